"""Which room of the repository may import which, as the README's architecture section says."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

# What the files of a room may import of this repository, besides their own room.
MAY_IMPORT = {
    'train.py': {'model', 'loss', 'sophia', 'hessian', 'optimizers', 'configurator', 'runtime', 'data'},
    'model.py': {'loss', 'runtime'},
    'loss.py': set(),
    'sophia.py': set(),
    'hessian.py': {'sophia', 'loss', 'model', 'data', 'runtime'},
    'optimizers.py': {'sophia', 'hessian', 'runtime'},
    'configurator.py': set(),
    'runtime': set(),
    'data': {'runtime'},
    'examples': {'sophia'},
}
# Floors of runtime/, from below: a file imports from lower floors only. hf stands beside them.
FLOORS = [{'files', 'rng', 'device', 'signals'}, {'distributed', 'runlog'}, {'optim', 'optimizer_state'}, {'sharded'},
          {'checkpoint'},
          {'start'}]
ROOMS = {Path(room).stem for room in MAY_IMPORT} | {'analysis', 'scripts', 'dev', 'tests'}


def files(room):
    """The Python files of a room."""
    path = ROOT / room
    return [path] if path.is_file() else sorted(path.rglob('*.py'))


def name_of(path):
    """The dotted name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imports(path):
    """The modules of this repository that a file imports, anywhere in it, by their dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = '.'.join(name_of(path).split('.')[:-node.level]) if node.level else ''
            module = '.'.join(filter(None, (package, node.module)))
            for alias in node.names:
                submodule = ROOT / module.replace('.', '/') / alias.name
                is_module = submodule.is_dir() or submodule.with_suffix('.py').is_file()
                found.add(f'{module}.{alias.name}' if is_module else module)
    return {name for name in found if name.split('.')[0] in ROOMS}


@pytest.mark.parametrize('room', MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    if not (ROOT / room).exists():
        pytest.skip(f'{room} does not exist')
    allowed = MAY_IMPORT[room] | {Path(room).stem}
    wrong = {str(path.relative_to(ROOT)): sorted(name for name in imports(path) if name.split('.')[0] not in allowed)
             for path in files(room)}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize('floor', range(len(FLOORS)))
def test_a_floor_of_runtime_imports_only_lower_ones(floor):
    allowed = {f'runtime.{name}' for lower in FLOORS[:floor] for name in lower}
    for name in FLOORS[floor]:
        path = ROOT / 'runtime' / f'{name}.py'
        if path.is_file():
            assert imports(path) <= allowed, name


def test_runtime_does_not_know_the_paper():
    """Neither its optimizer, nor by name the modules of one architecture."""
    for path in files('runtime'):
        text = path.read_text(encoding='utf-8')
        assert 'sophia' not in text.lower(), path
        assert path.stem == 'hf' or 'transformer.h' not in text, path


def test_no_import_circle():
    modules = {name_of(path): imports(path) for room in sorted(ROOMS - {'tests'})
               for path in files(room if (ROOT / room).is_dir() else f'{room}.py') if path.is_file()}
    while modules:
        leaves = {name for name, imported in modules.items() if not imported & modules.keys()}
        assert leaves, f'a circle of imports among {sorted(modules)}'
        modules = {name: imported for name, imported in modules.items() if name not in leaves}
