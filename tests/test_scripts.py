"""scripts/: what all programs share."""

import importlib
import re

import pytest
from conftest import ROOT, rejection

from runtime.files import one_line_errors

PROGRAMS = [str(path.relative_to(ROOT).with_suffix('')).replace('/', '.') for path in ROOT.glob('scripts/**/*.py')
            if re.search(r'^def main\(', path.read_text(encoding='utf-8'), re.M)]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    message = rejection(one_line_errors()(lambda path: path.read_text()), tmp_path / 'none.csv')
    assert message == f'{tmp_path}/none.csv: No such file or directory'


@pytest.mark.parametrize('name', PROGRAMS)
def test_every_program_says_so(name):
    assert hasattr(importlib.import_module(name).main, '__wrapped__')
