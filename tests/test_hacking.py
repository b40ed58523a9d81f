"""docs/hacking.md: each recipe, applied to a copy of the repository as it stands there, does what it says."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, write_bins

DOC = (ROOT / 'docs/hacking.md').read_text(encoding='utf-8')
ROOMS = ('runtime', 'data', 'analysis', 'scripts', 'dev', 'config', 'tests')


def recipes():
    """{title: (text, {file: places})} of the sections with a diff; a place is a list of lines with their signs."""
    found = {}
    for title, text in re.findall(r'^##+ (.*)\n((?:(?!##).*\n)*)', DOC, flags=re.M):
        for diff in re.findall(r'```diff\n(.*?)```', text, flags=re.S):
            edits = {}
            for name, body in re.findall(r'^--- (\S+)\n((?:(?!--- ).*\n)*)', diff, flags=re.M):
                edits[name] = [place.splitlines() for place in body.split('@@\n')[1:]]
            assert title not in found
            found[title] = text, edits
    return found


RECIPES = recipes()


def apply(copy, edits):
    """Makes the edits in the files of the directory `copy`; each place must be there once."""
    for name, places in edits.items():
        path = copy / name
        text = path.read_text(encoding='utf-8') if path.exists() else ''
        for lines in places:
            before, after = (''.join(f'{line[1:]}\n' for line in lines if line[:1] != sign) for sign in '+-')
            assert text.count(before) == 1, f'{name}: not there once:\n{before}'
            text = text.replace(before, after)
        path.write_text(text, encoding='utf-8')


@pytest.fixture(scope='module')
def copies(tmp_path_factory):
    """copies(edits): a copy of the repository with these edits."""
    place = tmp_path_factory.mktemp('copies')

    def copy(title, edits):
        target = place / re.sub(r'\W', '_', title)
        if not target.exists():
            for path in [*ROOT.glob('*.py'), *(p for room in ROOMS for p in (ROOT / room).rglob('*.py')),
                         ROOT / 'pyproject.toml']:
                where = target / path.relative_to(ROOT)
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, where)
            apply(target, edits)
        return target
    return copy


@pytest.fixture(scope='module')
def check(copies, tmp_path_factory):
    """check(name, title, edits=…): what tests/recipe.py's function `name` returns on a copy with the recipe's edits."""
    tmp = tmp_path_factory.mktemp('runs')
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.choice([1, 2, 7], p=[0.8, 0.1, 0.1], size=6_000)) % 61
    data = write_bins(tmp / 'data', tokens[:5_000], tokens[5_000:], vocab_size=64)
    server = subprocess.Popen([sys.executable, str(ROOT / 'tests/recipe.py')], stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, env=dict(os.environ, OMP_NUM_THREADS='1'))

    def run(name, title, edits=None):
        log = tmp / f'{name}.log'
        copy = copies(title, RECIPES[title][1] if edits is None else edits)
        request = dict(copy=str(copy), check=name, data=str(data), tmp=str(tmp), log=str(log))
        server.stdin.write(json.dumps(request) + '\n')
        server.stdin.flush()
        result, error = json.loads(server.stdout.readline())
        assert error is None, log.read_text()[-3000:] + error
        return result

    yield run
    server.stdin.close()
    server.wait()


@pytest.fixture(scope='module')
def plain(check):
    """Losses of the repository as it is, by optimizer; a run in 'before' that recipes resume."""
    return check('plain', 'plain', {})


@pytest.mark.parametrize('title', RECIPES)
def test_a_recipe_says_how_many_lines_it_takes(title):
    text, edits = RECIPES[title]
    for name, places in edits.items():
        signs = [line[:1] for lines in places for line in lines]
        lines = max(signs.count('+'), signs.count('-'))
        assert f'{name}, {lines} line' in text or not (ROOT / name).exists(), (name, lines)


@pytest.mark.parametrize('title', ['z-loss', 'Label smoothing', 'Auxiliary loss', 'RMSNorm', 'SwiGLU', 'QK-norm',
                                   'Untied head', 'Logit soft-capping'])
def test_another_loss_or_model(check, plain, title):
    """tests/recipe.py, `follows`: training, evaluation, sampling, estimates; and it is not the model that it was."""
    found = check(re.sub(r'\W', '_', title.lower()), title)
    assert all(found[name] != plain[name] for name in plain)


def test_a_setting_of_the_model(check, plain):
    """Off, nothing has changed, in losses and checkpoints; on, everything follows."""
    found = check('rotary_positions', 'Rotary positions')
    assert found['off'] == plain
    assert all(found['on'][name] != plain[name] for name in plain)
    check('back_again', 'plain', {})


@pytest.mark.parametrize('before, after', [
    ('targets, ignore_index', 'targets.where(targets != 7, -1), ignore_index'),
    ("reduction='none')", "reduction='none').clamp(max=4.0)")])
def test_no_edit_of_the_loss_is_missed(check, plain, before, after):
    """What leaves out one token, or is another loss only far from where a trial might look, is not the fused loss."""
    doc, line = RECIPES['z-loss'][1]['loss.py'][0][1:3]
    found = check('edited_unseen', after, {'loss.py': [[doc, line, '+' + line[1:].replace(before, after)]]})
    assert found != plain['sophiag']


@pytest.mark.parametrize('title', ['Another optimizer', 'Another Hessian estimator', 'Estimates at other times',
                                   'Another schedule', 'Another metric', 'Another tokenizer'])
def test_another(check, title):
    check(title.lower().replace(' ', '_'), title)
