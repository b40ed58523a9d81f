"""What pip installs: the module `sophia` alone, with torch as its only requirement; and CITATION.cff."""

import email
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import HANG, ROOT


def test_wheel(tmp_path):
    """`pip install .` installs sophia.py and nothing else of the repository; what training needs is an extra."""
    pytest.importorskip('setuptools', '77', reason='needs setuptools>=77: pip install -r requirements-dev.txt')
    source = tmp_path / 'source'
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns('.*', 'out', 'wandb', 'records', 'build', '*.egg-info',
                                                                '*.bin', '*.png', '__pycache__'))
    built = subprocess.run([sys.executable, '-m', 'pip', 'wheel', '--no-build-isolation', '--no-deps', '--no-index',
                            '--disable-pip-version-check', '--wheel-dir', tmp_path, source],
                           capture_output=True, text=True, timeout=HANG)
    assert built.returncode == 0, built.stderr[-3000:]
    wheel, = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if '.dist-info/' not in name}
        metadata, = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        metadata = email.message_from_bytes(archive.read(metadata))
        archive.extractall(tmp_path / 'site')
    assert files == {'sophia.py'}
    needed = metadata.get_all('Requires-Dist')
    assert [line for line in needed if 'extra ==' not in line] == ['torch>=2.11']
    extras = {extra: {line.split(';')[0].strip() for line in needed if f"extra == '{extra}'" in line.replace('"', "'")}
              for extra in metadata.get_all('Provides-Extra')}
    assert extras.keys() == {'train', 'examples', 'dev'}
    assert {'torch<=2.13.0,>=2.11', 'tiktoken>=0.7'} <= extras['train'] and extras['train'] < extras['dev']
    assert extras['examples'] < extras['dev']
    # Installed, it is imported from anywhere.
    where = subprocess.run([sys.executable, '-c', 'import sophia; print(sophia.__file__)'], cwd=tmp_path, text=True,
                           capture_output=True, timeout=HANG, env=dict(os.environ, PYTHONPATH=str(tmp_path / 'site')))
    assert where.stdout.strip() == str(tmp_path / 'site/sophia.py'), where.stderr[-3000:]


def test_citation_and_workflow():
    """CITATION.cff names the paper, and the workflow runs .ci/run."""
    yaml = pytest.importorskip('yaml', reason='needs PyYAML, which requirements-hf.txt brings')
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text(encoding='utf-8'))
    paper = citation['preferred-citation']
    assert [author['family-names'] for author in paper['authors']] == ['Liu', 'Li', 'Hall', 'Liang', 'Ma']
    assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()
    workflow = yaml.safe_load((ROOT / '.github/workflows/ci.yml').read_text(encoding='utf-8'))
    commands = [step.get('run') for job in workflow['jobs'].values() for step in job['steps']]
    assert '.ci/run' in commands and os.access(ROOT / '.ci/run', os.X_OK)
