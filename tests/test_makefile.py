"""The Makefile's recipes, with a stub in place of Python."""

import shutil
import subprocess

import pytest
from conftest import ROOT

# Training leaves a checkpoint, and fails where a file `interrupt` is; plotting leaves its picture.
STUB = """#!/bin/sh
echo "$*" >> calls
case "$1" in
  train.py) mkdir -p out/quickstart; touch out/quickstart/ckpt; test ! -e interrupt;;
  scripts/plot.py) touch "$4";;
esac
"""
pytestmark = pytest.mark.skipif(not shutil.which('make'), reason='needs make')


@pytest.fixture
def make(tmp_path):
    """make(target, answer, VARIABLE=): runs a target in a copy of the repository's Makefile; the finished process."""
    for name in ('Makefile', 'requirements.txt'):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / '.venv').mkdir()
    (tmp_path / '.venv/.installed').touch()
    (tmp_path / 'stub').write_text(STUB)
    (tmp_path / 'stub').chmod(0o755)

    def run(target, answer='', **variables):
        # Under `make test` the inner make would print the directories that it enters.
        given = [f'{key}={value}' for key, value in variables.items()]
        words = ['make', '--no-print-directory', target, 'PY=./stub', *given]
        return subprocess.run(words, cwd=tmp_path, input=answer, capture_output=True, text=True)
    return run


def test_an_interrupted_quickstart_resumes_and_a_finished_one_starts_over_after_a_yes(make, tmp_path):
    out, calls = tmp_path / 'out/quickstart', tmp_path / 'calls'
    (tmp_path / 'interrupt').touch()
    assert make('quickstart').returncode
    (out / 'of the first run').touch()
    (tmp_path / 'interrupt').unlink()
    calls.unlink()
    assert make('quickstart').returncode == 0
    assert (out / 'of the first run').exists()
    assert [call.split()[0] for call in calls.read_text().splitlines()] == [
        'data/pysource/prepare.py', 'train.py', 'scripts/sample.py', 'scripts/plot.py']
    assert 'train.py config/quickstart.py --auto_resume=True\n' in calls.read_text()
    assert make('quickstart', 'n\n').returncode and make('quickstart').returncode
    assert (out / 'of the first run').exists()
    assert make('quickstart', 'y\n').returncode == 0
    assert (out / 'ckpt').exists() and not (out / 'of the first run').exists()


def test_clean_keeps_data_and_asks(make, tmp_path):
    kept = [tmp_path / 'data/mine' / name for name in ('prepare.py', 'input.txt', 'tokenizer.json')]
    prepared = [tmp_path / 'data/mine' / name for name in ('train.bin', 'val.bin.part', 'meta.json', 'progress.json')]
    kept[0].parent.mkdir(parents=True)
    (tmp_path / 'out').mkdir()
    for path in (*kept, *prepared):
        path.write_text('content')
    (tmp_path / 'out/run').mkdir()
    assert make('clean').returncode and (tmp_path / 'out/run').exists()
    for again in range(2):  # the second time there is nothing to ask
        done = make('clean', 'y\n')
        assert done.returncode == 0 and ('out/run' in done.stdout) is (again == 0)
    assert not (tmp_path / 'out').exists() and all(path.exists() for path in (*kept, *prepared))
    for answer in ('', 'n\n'):
        done = make('clean-data', answer)
        assert done.returncode and all(path.exists() for path in prepared)
        assert all(f'data/mine/{path.name}' in done.stdout for path in prepared)
    assert make('clean-data', 'y\n').returncode == 0
    assert all(path.exists() for path in kept) and not any(path.exists() for path in prepared)
    assert 'no prepared data' in make('clean-data', 'y\n').stdout


@pytest.mark.parametrize('python, message', [('nopython', 'nopython: no such program'),
                                             ('./old', './old is older than Python 3.10')])
def test_a_python_that_is_missing_and_one_that_is_too_old(make, tmp_path, python, message):
    (tmp_path / '.venv/.installed').unlink()
    (tmp_path / 'old').write_text('#!/bin/sh\nexit 1\n')
    (tmp_path / 'old').chmod(0o755)
    done = make('install', PYTHON=python)
    assert done.returncode and done.stdout.startswith(message) and 'make PYTHON=python3.12' in done.stdout
