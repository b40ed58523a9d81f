"""scripts/: what all programs share."""

import importlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import ROOT, rejection

from runtime.files import one_line_errors
from scripts.rehearse import last_words

PROGRAMS = [str(path.relative_to(ROOT).with_suffix(''))
            for path in (*ROOT.glob('scripts/**/*.py'), *ROOT.glob('data/*/prepare.py'))
            if re.search(r'^def main\(', path.read_text(encoding='utf-8'), re.M)]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    message = rejection(one_line_errors()(lambda path: path.read_text()), tmp_path / 'none.csv')
    assert message == f'{tmp_path}/none.csv: No such file or directory'


def test_a_reader_that_closes_the_pipe_ends_a_script_quietly(monkeypatch):
    """As head does. Neither the script nor Python's last flush fails aloud, also for a character that is not ASCII."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, 'w', encoding='ascii') as stdout:
        monkeypatch.setattr(sys, 'stdout', stdout)
        with pytest.raises(SystemExit) as stopped:
            one_line_errors()(lambda: print('×', flush=True))()
        stdout.flush()
    assert stopped.value.code == 1


@pytest.mark.parametrize(('text', 'words'), [
    ('', ''), ('one\ntwo\n', 'two'), ('torch.OutOfMemoryError: full\nmore\n', 'torch.OutOfMemoryError: full'),
    ('[rank1]: AssertionError: once, got Block(\n[rank1]:   (ln_1): LayerNorm()\n[rank1]: )\n',
     'AssertionError: once, got Block(')])
def test_the_last_words_of_a_program_are_its_exceptions(text, words):
    assert last_words(text) == words


@pytest.mark.parametrize('name', PROGRAMS)
def test_every_program_finds_the_repository_has_errors_of_one_line_and_prints_its_help(name, monkeypatch):
    """`python FOLDER/NAME.py` puts the folder on sys.path, and not the repository."""
    monkeypatch.setattr(sys, 'path', [place for place in sys.path if Path(place).resolve() != ROOT])
    scope = runpy.run_path(str(ROOT / f'{name}.py'))
    assert str(ROOT) in sys.path and hasattr(scope['main'], '__wrapped__')
    monkeypatch.setattr(sys, 'argv', [name, '--help'])
    with pytest.raises(SystemExit, match='^0$'):
        runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')


@pytest.mark.parametrize('words', [
    'curvature gone --sequences=32', 'eval gone --eval_sequences=0', 'eval gone --batch_size=1', 'speedup gone --k=1',
    'plan --gpu=gone --gpus=1', 'plan --gpu=gone --mfu=0.01', 'sweep --out_dir=gone --jobs=1', 'sample gone --top_k=0',
    'tune --out_dir=gone --values gone=1 --noise=0', 'sample gone --num_samples=1', 'sample gone --max_new_tokens=1',
    'sample gone --temperature=0', 'sample gone --top_p=0', 'rehearse --gone=1 --steps=7'])
def test_a_number_may_be_the_lowest_and_none_below(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, low = words.rsplit('=', 1)
    for value, refused in (low, False), (f'{float(low) - 1:g}', True):
        script, *argv = f'{name}={value}'.split()
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f'scripts.{script}').main(argv)
        assert (ended.value.code == 2) == refused  # 2 is argparse's
