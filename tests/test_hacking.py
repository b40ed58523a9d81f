"""The recipes of docs/hacking/, applied to a copy of the repository, do what the page says."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import recipe
from conftest import ROOT, write_bins

from dev.apply import RECIPES, apply

# Functions of recipe.py by the recipes that they check, which are edits of one copy.
CHECKS = {
    'z_loss': 'z_loss',
    'second_head': 'a_second_head',
    'rms_norm document_masking': 'architecture',
    'rotary frozen_teacher': 'rotary_positions a_frozen_teacher',
    'mixture_of_experts': 'a_mixture_of_experts',
    'adopt adaptive_gamma gauss_newton_product muon_and_sophia weight_average one_minus_sqrt metrics':
        'a_first_order_optimizer a_hessian_optimizer a_hessian_estimator muon_and_sophia average_of_the_weights '
        'another_schedule another_metric',
    'random_tokens': 'random_tokens',
    'batch_ramp rates_by_layer early_stopping': 'batch_ramp learning_rates_and_weight_decay_by_layer early_stopping',
}


def elsewhere(copy):
    """Code for `fork`: the modules in the directory `copy` take the place of the repository's."""
    return f'''
for module in [*sys.modules.values()]:
    file = getattr(module, '__file__', None) or ''
    if file.startswith({str(ROOT)!r}) and 'site-packages' not in file:
        sys.modules.pop(module.__name__, None)
sys.path[:] = [path for path in sys.path if not path.startswith({str(ROOT)!r}) or 'site-packages' in path]
os.chdir({str(copy)!r})
'''


def copy_repository(target):
    """The repository's Python files, without records, docs and tests, as a copy in the directory `target`."""
    def left_out(folder, names):
        return [name for name in names if name in ('records', 'docs', 'tests', 'out', 'build', 'wandb', 'venv')
                or name[0] == '.' or not (Path(folder, name).is_dir() or name.endswith(('.py', '.toml')))]
    return Path(shutil.copytree(ROOT, target, ignore=left_out, dirs_exist_ok=True))


@pytest.fixture
def check(fork, data):
    """check(functions, copy, ranks=): functions of recipe.py in the directory `copy`."""
    def run(functions, copy, ranks=1):
        done = fork('tests/recipe.py', data, *functions.split(), faults=elsewhere(copy), ranks=ranks, seconds=600)
        assert done.out.count('the checks passed\n') == ranks, f'{done.out[-2000:]}\n{done.err[-2000:]}'
    return run


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A tiny data set, and the metrics of runs of the unedited repository on it, in unedited.json."""
    tmp, rng = tmp_path_factory.mktemp('data'), np.random.default_rng(0)
    tokens = np.cumsum(rng.choice([1, 2, 7], p=[0.8, 0.1, 0.1], size=6_000)) % 61
    recipe.DATA = write_bins(tmp / 'bins', tokens[:5_000], tokens[5_000:], vocab_size=64)
    found = {name: recipe.run(name=name, out=tmp / name) for name in recipe.NAMES}
    (recipe.DATA / 'unedited.json').write_text(json.dumps(found))
    return recipe.DATA


def test_a_model_in_nanogpts_style_trains(check, tmp_path):
    copy = copy_repository(tmp_path / 'copy')
    shutil.copy(ROOT / 'tests/nanogpt_style.py', copy / 'model.py')
    check('pasted_model', copy)


def test_every_recipe_has_a_check_and_a_place_on_the_page():
    page = (ROOT / 'docs/hacking.md').read_text(encoding='utf-8')
    assert sorted(' '.join(CHECKS).split()) == sorted(RECIPES) == sorted(set(re.findall(r'hacking/(\w+)\.diff', page)))


@pytest.mark.parametrize('names', CHECKS)
def test_a_recipe(names, check, tmp_path):
    copy = copy_repository(tmp_path)
    for name in names.split():
        apply(name, copy)
    check(CHECKS[names], copy)
    if names == 'mixture_of_experts':
        check('a_mixture_of_experts_on_two_ranks', copy, ranks=2)
