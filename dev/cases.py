"""Random cases for soak.py and the tests: valid settings with interruptions, damaged bytes, files of other programs.

Every function draws from the random.Random that it is given, so that a case is known by its seed. Those called
`try_…` do something to the real programs and return what went wrong, '' for nothing.
"""

import contextlib
import copy
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import optimizers
from analysis.load import load
from runtime import checkpoint
from runtime.signals import NOT_FINITE, STOPPED
from scripts.consolidate import consolidate

ROOT = Path(__file__).resolve().parents[1]
HANG = 900  # seconds after which a process is taken to hang, also on a busy machine


@contextlib.contextmanager
def forks(logs):
    """A function run(script, *argv, faults=, environments=, seconds=) that runs a script of the repository in processes
    that start within milliseconds, because tests/inject.py forks them with PyTorch imported already: one for each of
    `environments`. It returns (exit codes, or None where one hung; stdout; stderr), the output of one process after the
    other, which goes through files in the directory `logs`.
    """
    server = subprocess.Popen([sys.executable, 'tests/inject.py', '--serve'], cwd=ROOT, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              # CUDA's own check for devices leaves a process whose forks cannot use them.
                              env=dict(os.environ, OMP_NUM_THREADS='1', PYTORCH_NVML_BASED_CUDA_CHECK='1'))
    number = itertools.count()

    def run(script, *argv, faults='', environments=({},), seconds=HANG):
        log = f'{logs}/fork{next(number)}'
        server.stdin.write(json.dumps(dict(script=str(ROOT / script), argv=[faults, *map(str, argv)], log=log,
                                           environments=environments, seconds=seconds)) + '\n')
        server.stdin.flush()
        codes, said = json.loads(server.stdout.readline()), []
        for name in ('out', 'err'):
            paths = [Path(f'{log}.{name}{rank}') for rank in range(len(environments))]
            said.append(''.join(path.read_text() for path in paths))
            for path in paths:
                path.unlink()
        return codes, *said

    yield run
    server.stdin.close()
    server.wait(HANG)


# ----------------------------------------------------------------------------------------------------------------------
# Runs with random settings

LIBRARY = [f'torch:{name}' for name in ('Adafactor', 'Adagrad', 'ASGD', 'NAdam', 'RAdam', 'RMSprop', 'SGD')]
# What depends on the clock, or is measured by a process for itself.
MEASURED = {'time', 'step_ms', 'hessian_ms', 'tokens_per_sec', 'mfu', 'memory_gb'}
# Faults for tests/inject.py.
SIGNAL = 'at({}, kill(signal.{}))\n'
CRASH = """
import itertools
def crashing(call, calls=itertools.count()):
    def wrapper(*args, **kwargs):
        if next(calls) == {}:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper
for name in ('fsync', 'link', 'rename', 'replace', 'symlink', 'unlink'):
    setattr(os, name, crashing(getattr(os, name)))
"""


def settings(rng):
    """Valid settings of a run of seconds on one CPU, a dict: of all kinds of optimizer, shape, schedule, rhythm."""
    names = [*optimizers.OPTIMIZERS, *LIBRARY]
    name = rng.choice([n for n in names if find_spec(optimizers.row(n).library.partition(':')[0] or 'torch')])
    row, iters, heads, total = optimizers.row(name), rng.randint(2, 12), rng.choice((1, 2, 4)), rng.randint(1, 8)
    learning_rate = 10 ** rng.uniform(-4, -2)
    s = dict(
        model_size='tiny', n_layer=rng.randint(1, 3), n_head=heads, n_embd=heads * rng.choice((2, 8, 16)),
        block_size=rng.randint(1, 40), dropout=rng.choice((0, 0, 0.1, 0.5)), bias=rng.random() < 0.5,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.3, total_batch_size=total,
        batch_size=rng.choice([n for n in range(1, total + 1) if total % n == 0]), optimizer_name=name,
        learning_rate=learning_rate, weight_decay=rng.choice((0, 0.1, 0.3)), grad_clip=rng.choice((0, 0.1, 1)),
        max_iters=iters, warmup_iters=rng.randint(0, iters + 1), decay_lr=rng.random() < 0.8,
        schedule=rng.choice(('cosine', 'linear', 'constant', 'wsd')), lr_decay_iters=rng.randint(1, iters + 3),
        eval_interval=rng.randint(1, iters + 1), eval_iters=rng.randint(1, 4), log_interval=rng.randint(1, 4),
        always_save_checkpoint=rng.random() < 0.7, keep_checkpoints=rng.randint(2, 4),
        skip_nonfinite=rng.choice((0, 0, 2)), seed=rng.randint(-2 ** 63, 2 ** 64 - 1), device='cpu',
        dtype=rng.choice(('float32', 'float32', 'float32', 'bfloat16', 'float16')), init_from='auto')
    s.update(rng.choice((dict(min_lr=learning_rate * rng.random()), dict(min_lr_ratio=rng.random()))))
    if s['schedule'] == 'wsd':
        s['cooldown_iters'] = rng.randint(0, s['lr_decay_iters'])
    if not row.hook.hessian_products:
        s['activation_checkpointing'] = rng.random() < 0.2
        if row.shards and s['dtype'] != 'float16':
            s['parallel'] = rng.choice(('ddp', 'ddp', 'ddp', 'fsdp'))
    own = dict(beta1=rng.choice((0, 0.9, 0.96)), beta2=rng.choice((0, 0.95, 0.99)), eps=10 ** rng.uniform(-12, -4),
               gamma=10 ** rng.uniform(-3, 0), hessian_interval=rng.randint(1, 5),
               hessian_batch_size=rng.randint(1, total), hessian_bias_correction=rng.random() < 0.5)
    return s | {key: value for key, value in own.items() if key in row.settings}


def interruptions(rng, s):
    """Up to three times (exit code, faults for tests/inject.py, flags) by which a run with the settings `s` ends."""
    found = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(s['max_iters'])
        found.append(rng.choice((
            (STOPPED, SIGNAL.format(at, rng.choice(('SIGTERM', 'SIGINT', 'SIGHUP'))), []),
            (STOPPED, '', ['--max_hours=1e-9']),
            (-signal.SIGKILL, SIGNAL.format(at, 'SIGKILL'), []),
            (-signal.SIGKILL, SIGNAL.format(rng.randint(0, at), 'SIGUSR1') + SIGNAL.format(at, 'SIGKILL'), []),
            (-signal.SIGKILL, CRASH.format(rng.randrange(30)), []))))
    return found


def try_settings(rng, directory, run):
    """Random settings, once straight and once with random interruptions: both runs must end alike, bit for bit.

    `run(out_dir, *flags, faults=)` runs train.py through tests/inject.py; it returns (exit code, stdout, stderr).
    """
    s = settings(rng)
    flags, plain, broken = [f'--{key}={value}' for key, value in s.items()], directory / 'plain', directory / 'broken'
    about = f'{" ".join(flags)}: '
    code, _, err = run(plain, *flags)
    if code not in (0, NOT_FINITE):
        return f'{about}exit code {code}\n{err}'
    for expected, faults, more in interruptions(rng, s):
        ended, _, err = run(broken, *flags, *more, faults=faults)
        about += f'{more or faults.strip()} -> {ended}; '
        if ended not in (expected, code):  # the latter where it does not come to the fault
            return f'{about}expected {expected}\n{err}'
    ended, _, err = run(broken, *flags)
    if ended != code:
        return f'{about}then {ended}, not {code}\n{err}'
    if code == NOT_FINITE:
        same = (plain / checkpoint.FAILED).read_text() == (broken / checkpoint.FAILED).read_text()
        return '' if same else f'{about}another {checkpoint.FAILED}'
    what = difference(plain, broken)
    return f'{about}{what}' if what else ''


def difference(a, b):
    """In what two finished runs differ: their last and best checkpoints, metrics.jsonl; '' when all are the same, bit
    for bit, but for times and names of directories."""
    for best in (False, True):
        ours, theirs = (contents(out, best) for out in (a, b))
        if what := unequal(ours, theirs):
            return f'{"best" if best else "last"} checkpoint: {what}'
    ours, theirs = ([{key: value for key, value in json.loads(line).items() if key not in MEASURED}
                     for line in (out / 'metrics.jsonl').read_text().splitlines()] for out in (a, b))
    return f'metrics.jsonl: {unequal(ours, theirs)}' if ours != theirs else ''


def contents(out_dir, best=False):
    """The state of the newest checkpoint in `out_dir`, or of the best one, without what may differ."""
    path = next((p for p in checkpoint.checkpoints(out_dir) if (checkpoint.number(p) == checkpoint.BEST) == best), None)
    if path is None:
        return {}
    with tempfile.TemporaryDirectory() as whole:
        if path.is_dir():
            path = consolidate(path, Path(whole) / 'ckpt_00000000.pt')
        state = torch.load(path, weights_only=True)
    del state['train_state']['seconds'], state['config']['out_dir'], state['config']['max_hours']
    for group in state['optimizer']['param_groups']:
        group.pop('differentiable', None)  # which PyTorch adds at resume
    return state


def unequal(a, b, name='state'):
    """The name of the first thing in which two nested containers differ, types included; '' when they are the same."""
    if type(a) is not type(b):
        return f'{name}: {type(a).__name__}, {type(b).__name__}'
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f'{name}: keys {sorted(map(str, a.keys() ^ b.keys()))}'
        return next((what for key in a if (what := unequal(a[key], b[key], f'{name}.{key}'))), '')
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f'{name}: of length {len(a)}, {len(b)}'
        return next((what for i, pair in enumerate(zip(a, b)) if (what := unequal(*pair, f'{name}.{i}'))), '')
    if isinstance(a, torch.Tensor):
        return '' if a.dtype == b.dtype and torch.equal(a, b) else f'{name}: other numbers'
    return '' if a == b else f'{name}: {a!r}, {b!r}'


# ----------------------------------------------------------------------------------------------------------------------
# Damaged and foreign files

JUNK = (None, True, False, 0, -1, 1, 2.5, 10 ** 7, 10 ** 40, float('nan'), float('inf'), '', '16', 'text', [], [1], {},
        {'x': 1}, 'x' * 5000)


def flip(rng, data):
    """`data` with one bit flipped."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]


def truncate(rng, data):
    """`data` cut off at a random byte."""
    return data[:rng.randrange(len(data))]


def damage(rng, data):
    """`data` damaged in one of the ways in which files are."""
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice((
        lambda: flip(rng, data), lambda: truncate(rng, data),
        lambda: data[:start] + bytes(end - start) + data[end:],  # blocks that were never written
        lambda: data[:start] + data[end:], lambda: data[:end] + data[start:],
        lambda: data + rng.randbytes(100), lambda: rng.randbytes(len(data))))()


def places(value, place=()):
    """The places (tuples of keys) of all that is in a nested container."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def mutate(rng, value):
    """A copy of a nested dict in which something is missing, of another kind, shape or size, or in another place."""
    value = copy.deepcopy(value)
    *outer, key = rng.choice([place for place in places(value) if len(place) < 6])
    inner, wrong = value, rng.choice(JUNK)
    for k in outer:
        inner = inner[k]
    if isinstance(inner, tuple):
        return mutate(rng, value)
    if isinstance(inner[key], torch.Tensor) and rng.random() < 0.7:
        t = inner[key]
        wrong = rng.choice((t.flatten(), t[None], t.double(), t.to(torch.int8), t.T.contiguous() if t.dim() == 2 else
                            t.sum(), t.flatten()[:0], torch.full_like(t, float('nan') if t.is_floating_point() else 9)))
    how = rng.random()
    if how < 0.15:
        del inner[key]
    elif how < 0.25 and isinstance(inner, dict):
        inner[f'{key}x'] = inner.pop(key)
    elif how < 0.35 and isinstance(inner, dict):
        inner[rng.choice(('extra', 7, ''))] = wrong
    else:
        inner[key] = wrong
    return value


def one_line(function, path):
    """Calls `function`: '' if it returns, or exits with one line that names `path`; else what it did instead."""
    def hung(*_):
        raise TimeoutError(f'still at work after {HANG // 10} s')
    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG // 10)
    try:
        function()
    except SystemExit as error:
        message = str(error)
        return '' if str(path) in message and '\n' not in message and len(message) < 1000 else f'said {message:.2000}'
    except BaseException as error:
        return f'{type(error).__name__}: {error}'
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ''


def try_folder(rng, good, bad):
    """A Hugging Face folder like `good` with something wrong, made at `bad`: a model, or one line."""
    from safetensors.torch import load_file, save_file
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    config, weights = bad / 'config.json', bad / 'model.safetensors'
    data = weights.read_bytes()
    length = struct.unpack('<Q', data[:8])[0]
    kind = rng.choice(('config', 'config', 'config bytes', 'weights', 'weights', 'header', 'header bytes', 'bytes'))
    if kind == 'config':
        config.write_text(json.dumps(mutate(rng, json.loads(config.read_text()))))
    elif kind == 'config bytes':
        config.write_bytes(damage(rng, config.read_bytes()))
    elif kind == 'weights':
        found = mutate(rng, load_file(weights)).items()
        save_file({str(name): w.clone() for name, w in found if isinstance(w, torch.Tensor)}, weights)
    elif kind == 'header':
        header = json.dumps(mutate(rng, json.loads(data[8:8 + length]))).encode()
        weights.write_bytes(struct.pack('<Q', len(header)) + header + data[8 + length:])
    elif kind == 'header bytes':
        weights.write_bytes(damage(rng, data[:8 + length]) + data[8 + length:])
    else:
        weights.write_bytes(damage(rng, data))

    def use():
        model = load(bad).model
        model(torch.zeros(1, min(4, model.config.block_size), dtype=torch.long))
    what = one_line(use, bad)
    return f'folder, {kind}: {what}' if what else ''


def try_file(rng, good, bad, resume):
    """A checkpoint file like `good` with something wrong, made at `bad`: it works, or is rejected in one line.

    `resume()` resumes the run from it, and trains. Damaged bytes that are accepted must mean what they meant.
    """
    if rng.random() < 0.3:
        kind = 'bytes'
        bad.write_bytes(damage(rng, good.read_bytes()))

        def use():
            if what := unequal(checkpoint.load(bad)[1], checkpoint.load(good)[1]):
                raise ValueError(f'damaged, but loaded: {what}')
        what = one_line(use, bad)
    else:
        kind = 'state'
        torch.save(mutate(rng, torch.load(good, weights_only=True)), bad)

        def use():
            model = load(bad).model
            model(torch.zeros(1, 2, dtype=torch.long))
        what = one_line(use, bad) or one_line(resume, bad)
    return f'file, {kind}: {what}' if what else ''


# ----------------------------------------------------------------------------------------------------------------------
# Standard streams, and preparing data

STREAMS = {'closed': '&-', 'nowhere': '/dev/null', 'full': '/dev/full', 'a file': ''}


def try_streams(rng, out_dir, flags):
    """train.py with standard streams that are closed, full or without a reader, in any encoding: it trains to the end.

    `flags` are those of a run of three iterations or more, log_interval 1, init_from=auto.
    """
    state = {name: rng.choice([*STREAMS, 'without a reader']) for name in ('stdout', 'stderr')}
    state['stdin'] = rng.choice(('closed', 'nowhere'))
    encoding = rng.choice(('ascii', 'latin-1', 'utf-8', 'utf-16', 'cp1252', 'shift_jis'))
    out_dir.mkdir(parents=True)
    reader, writer = os.pipe()
    os.close(reader)
    redirections = []
    for name, sign in (('stdin', '<'), ('stdout', '>'), ('stderr', '2>')):
        target = f'&{writer}' if state[name] == 'without a reader' else STREAMS[state[name]] or out_dir / name
        redirections.append(f'{sign}{target}')
    done = subprocess.run(
        ['bash', '-c', f'exec "$@" {" ".join(redirections)}', 'bash', sys.executable, 'train.py', *flags,
         f'--out_dir={out_dir}'], cwd=ROOT, pass_fds=[writer], timeout=HANG, env=dict(
             os.environ, PYTHONIOENCODING=encoding, LC_ALL='C'))
    os.close(writer)
    lines = (out_dir / 'metrics.jsonl').read_text().count('"train/loss"') if done.returncode == 0 else 0
    return '' if lines >= 3 else f'{state}, {encoding}: exit code {done.returncode}, {lines} lines of metrics'


def try_prepare(rng, directory, text, whole):
    """data/text/prepare.py on the file `text`, and kill -9 of it or of one of its workers, until it is done: the bins
    must be those in `whole`."""
    command = [sys.executable, 'data/text/prepare.py', str(text), '--out_dir', str(directory), '--tokenizer=byte',
               '--num_proc=2', '--val_fraction=0.1']
    said = ''
    for kills in range(4):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + HANG
        while kills < 3 and process.poll() is None and not any(directory.glob('*.part')):
            time.sleep(0.002)
        if kills < 3:
            time.sleep(rng.uniform(0, 0.4))
            kill_one(rng, process)
        try:
            said = process.communicate(timeout=max(1, deadline - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return f'hung after {kills + 1} kills'
        if 'Traceback' in said:
            return said
        if process.returncode == 0:
            break
    if process.returncode:
        return f'exit code {process.returncode}: {said}'
    metas = [dict(json.loads((out / 'meta.json').read_text()), seconds=0) for out in (directory, whole)]
    same = metas[0] == metas[1] and all((directory / name).read_bytes() == (whole / name).read_bytes()
                                        for name in ('train.bin', 'val.bin'))
    return '' if same else 'other bins'


def kill_one(rng, process):
    """kill -9 of `process` or of one of its children."""
    try:
        children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
        os.kill(int(rng.choice([process.pid, *children])), signal.SIGKILL)
    except OSError:  # it has ended meanwhile
        pass


def text_file(path, documents=60, words=4000):
    """Writes text of many documents to `path`; returns it."""
    rng = random.Random(0)
    path.write_text('<|endoftext|>'.join(' '.join(str(rng.random()) for _ in range(words // 10)) * 10
                                         for _ in range(documents)))
    return path
