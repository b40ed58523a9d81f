"""The package that pip installs: the module `sophia` alone."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import HANG, ROOT

import sophia


def test_distributions(tmp_path):
    """The sdist holds sophia.py with its manual and builds; the wheel installs sophia.py alone."""
    pytest.importorskip('setuptools', '77', reason='needs setuptools>=77: pip install -r requirements-dev.txt')
    source = tmp_path / 'source'
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns('.*', 'out', 'wandb', 'records', 'build', '*.egg-info',
                                                                '*.bin', '*.png', '__pycache__'))

    def build(kind, folder):
        code = f'from setuptools import build_meta; build_meta.build_{kind}({str(tmp_path)!r})'
        done = subprocess.run([sys.executable, '-c', code], cwd=folder, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr[-3000:]

    build('sdist', source)
    sdist, = tmp_path.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        files = {name.partition('/')[2] for name in archive.getnames()}
        archive.extractall(tmp_path / 'unpacked', filter='data')
    assert {'sophia.py', 'docs/sophia.md', 'LICENSE', 'pyproject.toml'} <= files
    assert not [name for name in files if name.startswith('tests')]  # they test the whole repository
    build('wheel', next((tmp_path / 'unpacked').iterdir()))
    wheel, = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if '.dist-info/' not in name}
        metadata, = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        metadata = email.message_from_bytes(archive.read(metadata))
    assert files == {'sophia.py'}
    needed = metadata.get_all('Requires-Dist')
    assert [line for line in needed if 'extra ==' not in line] == ['torch>=2.11']
    extras = {extra: {line.split(';')[0].strip() for line in needed if f"extra == '{extra}'" in line.replace('"', "'")}
              for extra in metadata.get_all('Provides-Extra')}
    assert extras.keys() == {'train', 'examples', 'dev'}
    assert {'torch<=2.13.0,>=2.11', 'tiktoken>=0.7'} <= extras['train'] and extras['train'] < extras['dev']
    assert extras['examples'] < extras['dev']
    citation = dict(re.findall(r'^(title|version): "?([^"\n]+)', (ROOT / 'CITATION.cff').read_text(), flags=re.M))
    release = re.search(r'^## (\d.*)$', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'), flags=re.M)[1]
    assert metadata['Version'] == sophia.__version__ == citation['version'] == release
    assert (ROOT / 'README.md').read_text(encoding='utf-8').startswith(f'# {citation["title"]}\n')
    # twine check --strict asks for these two.
    assert metadata['Description-Content-Type'] == 'text/markdown'
    assert metadata.get_payload(decode=True).decode().startswith('# Sophia in PyTorch')
