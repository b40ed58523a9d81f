"""Each part of the repository imports only what MAY_IMPORT allows, and slow libraries only where it needs them."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# The modules and packages of this repository that each part may import, in addition to itself.
MAY_IMPORT = {
    'train.py': {'model', 'loss', 'sophia', 'hessian', 'optimizers', 'configurator', 'lifecycle', 'runtime', 'data'},
    'model.py': {'loss', 'runtime'},
    'loss.py': set(),
    'sophia.py': set(),
    'hessian.py': {'sophia', 'loss', 'runtime'},
    'optimizers.py': {'sophia', 'hessian', 'runtime'},
    'configurator.py': {'runtime'},
    'lifecycle': {'configurator', 'data', 'loss', 'model', 'optimizers', 'runtime'},
    'runtime': set(),
    'data': {'runtime'},
    'examples': {'sophia'},
}
PARTS = {Path(part).stem for part in MAY_IMPORT} | {'analysis', 'scripts', 'dev', 'records', 'tests'}


def files(part):
    """Return the Python files of a part."""
    path = ROOT / part
    return [path] if path.is_file() else sorted(path.rglob('*.py'))


def name_of(path):
    """Return the dotted name by which a file is imported."""
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


def imports(path):
    """Return the dotted names of this repository's modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: a relative import'
            for alias in node.names:
                submodule = ROOT / node.module.replace('.', '/') / alias.name
                is_module = submodule.is_dir() or submodule.with_suffix('.py').is_file()
                found.add(f'{node.module}.{alias.name}' if is_module else node.module)
    return {name for name in found if name.split('.')[0] in PARTS}


@pytest.mark.parametrize('part', MAY_IMPORT)
def test_a_part_imports_only_what_it_may(part):
    allowed = MAY_IMPORT[part] | {Path(part).stem}
    wrong = {str(path.relative_to(ROOT)): sorted(name for name in imports(path) if name.split('.')[0] not in allowed)
             for path in files(part)}
    assert not {path: names for path, names in wrong.items() if names}


def test_runtime_does_not_know_the_paper():
    """It names neither its optimizer nor the modules of one architecture."""
    for path in files('runtime'):
        text = path.read_text(encoding='utf-8')
        assert 'sophia' not in text.lower() and 'transformer.h' not in text, path


def test_no_import_circle():
    modules = {name_of(path): imports(path) for part in sorted(PARTS - {'tests'})
               for path in files(part if (ROOT / part).is_dir() else f'{part}.py') if path.is_file()}
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError


@pytest.mark.parametrize(('modules', 'slow'), [
    ('scripts.plot, records.check', ['torch', 'scipy']),
    ('train, scripts.sample', ['torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'torch.distributed.fsdp',
                               'sympy', 'transformers', 'safetensors', 'tokenizers', 'matplotlib', 'scipy'])])
def test_slow_modules_are_imported_where_they_are_used(modules, slow):
    """Reading runs needs no PyTorch, and training imports code for compiling and sharding only to use it."""
    code = f'import sys, {modules}; print([name for name in {slow} if name in sys.modules])'
    assert subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True) == '[]\n'
