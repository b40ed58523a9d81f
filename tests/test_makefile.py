"""The Makefile's targets that remove files."""

import shutil
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.skipif(not shutil.which('make'), reason='needs make')
def test_nothing_is_removed_without_a_yes_and_no_input_ever(tmp_path):
    shutil.copy(ROOT / 'Makefile', tmp_path)
    folder, run = tmp_path / 'data/mine', tmp_path / 'out/run'
    folder.mkdir(parents=True)
    run.mkdir(parents=True)
    inputs, prepared = (set(names) for names in (('prepare.py', 'input.txt', 'tokenizer.json'), (
        'train.bin', 'parts.0123456789ab', 'meta.json', 'val.bin.host.1.partial')))
    for name in inputs | prepared:
        (folder / name).mkdir()
    for answer, left in ('n\n', inputs | prepared), ('y\n', inputs):
        for target in 'clean', 'clean-data':
            subprocess.run(['make', target], cwd=tmp_path, input=answer, capture_output=True, text=True)
        assert {path.name for path in folder.iterdir()} == left and run.exists() == (answer == 'n\n')
