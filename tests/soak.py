"""Train random valid settings once without and once with faults: both runs must end alike, bit for bit.

  python tests/soak.py --minutes 30
  python tests/soak.py --seed 17 --minutes 0             one run, whose settings and faults are drawn from seed 17

Faults are signals, kill -9 in an iteration or at a random operation of the file system, the time limit, and damage to
the newest checkpoint. Each run is train.py as a process, of seconds on one CPU core. The last and the best checkpoint
are compared, and metrics.jsonl except for times.
"""

import functools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from conftest import HANG, learnable
from faults import fork

import optimizers
import train
from configurator import HARMLESS, Config
from runtime import checkpoint, sharded
from runtime.arguments import argument_parser
from runtime.files import FAILED
from runtime.optimizer_state import first_difference
from runtime.signals import NOT_FINITE, STOPPED

LIBRARY = [f'torch:{name}' for name in ('Adafactor', 'Adagrad', 'ASGD', 'NAdam', 'RAdam', 'RMSprop', 'SGD')] + [
    'schedulefree:AdamWScheduleFree', 'pytorch_optimizer:AdEMAMix']
MEASURED = {'time', 'step_ms', 'hessian_ms', 'tokens_per_sec', 'mfu', 'memory_gb'}  # They differ between processes.
KILL_AT_FILE_OPERATION = """
import itertools
def killing(call, calls=itertools.count()):
    def wrapper(*args, **kwargs):
        if next(calls) == {}:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper
for name in ('fsync', 'rename', 'replace', 'symlink', 'unlink'):
    setattr(os, name, killing(getattr(os, name)))
"""


def settings(rng):
    """Draw valid settings of a run of seconds on one CPU from the random.Random `rng`."""
    name = rng.choice([name for name in (*optimizers.OPTIMIZERS, *LIBRARY) if find_spec(
        optimizers.row(name).library.partition(':')[0] or 'torch')])
    row, iters, heads, total = optimizers.row(name), rng.randint(2, 12), rng.choice((1, 2, 4)), rng.randint(1, 8)
    s = dict(
        model_size='tiny', n_layer=rng.randint(1, 3), n_head=heads, n_embd=heads * rng.choice((2, 8, 16)),
        block_size=rng.randint(1, 40), dropout=rng.choice((0, 0, 0.1, 0.5)), bias=rng.random() < 0.5,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.3, total_batch_size=total,
        batch_size=rng.choice([n for n in range(1, total + 1) if total % n == 0]), optimizer_name=name,
        learning_rate=10 ** rng.uniform(-4, -2), weight_decay=rng.choice((0, 0.1, 0.3)),
        grad_clip=rng.choice((0, 0.1, 1)), max_iters=iters, warmup_iters=rng.randint(0, iters + 1),
        decay_lr=rng.random() < 0.8, schedule=rng.choice(('cosine', 'linear', 'constant', 'wsd')),
        eval_interval=rng.randint(1, iters + 1), eval_iters=rng.randint(1, 4), log_interval=rng.randint(1, 4),
        always_save_checkpoint=rng.random() < 0.7, keep_checkpoints=rng.randint(2, 4),
        skip_nonfinite=rng.choice((0, 0, 2)), seed=rng.randint(-2 ** 63, 2 ** 64 - 1), device='cpu',
        dtype=rng.choice(('float32', 'float32', 'float32', 'bfloat16', 'float16')), auto_resume=True)
    s['lr_decay_iters'] = s['warmup_iters'] + rng.randint(1, iters + 3)
    if s['schedule'] == 'wsd':
        s['cooldown_iters'] = rng.randint(0, s['lr_decay_iters'] - s['warmup_iters'])
    if not row.hook.hessian_products:
        s['activation_checkpointing'] = rng.random() < 0.2
        if row.shards and s['dtype'] != 'float16':
            s['parallel'] = rng.choice(('ddp', 'ddp', 'ddp', 'fsdp'))
    own = dict(beta1=rng.choice((0, 0.9, 0.96)), beta2=rng.choice((0, 0.95, 0.99)), eps=10 ** rng.uniform(-12, -4),
               gamma=10 ** rng.uniform(-3, 0), hessian_interval=rng.randint(1, 5),
               hessian_batch_size=rng.randint(1, total))
    return s | {key: value for key, value in own.items() if key in row.settings}


def interruptions(rng, iterations):
    """Draw up to three interruptions of a run of this length: (expected exit code, CODE for faults.py, flags)."""
    found = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(iterations)
        found.append(rng.choice((
            (STOPPED, f'at({at}, kill(signal.{rng.choice(("SIGTERM", "SIGINT", "SIGHUP"))}))', []),
            (STOPPED, '', ['--max_hours=1e-9']),
            (-signal.SIGKILL, f'at({at}, kill(signal.SIGKILL))', []),
            (-signal.SIGKILL, f'at({rng.randint(0, at)}, kill(signal.SIGUSR1)); at({at}, kill(signal.SIGKILL))', []),
            (-signal.SIGKILL, KILL_AT_FILE_OPERATION.format(rng.randrange(30)), []))))
    return found


def damage(rng, out_dir):
    """Cut off a file of the newest checkpoint or flip one of its bits, unless it is the only checkpoint."""
    newest, *older = checkpoint.checkpoints(out_dir)
    if not older:
        return
    path = rng.choice(sorted(newest.iterdir())) if newest.is_dir() else newest
    data, at = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size)
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data[:rng.choice((at, len(data)))])


def attempt(rng, directory, train):
    """Train with random settings without faults and with them. Return '', or the difference of the second run.
    train(out_dir, *flags, faults=) runs train.py and returns faults.Done."""
    s = settings(rng)
    flags, plain, broken = [f'--{key}={value}' for key, value in s.items()], directory / 'plain', directory / 'broken'
    about = f'{" ".join(flags)}: '
    code, _, err = train(plain, *flags)
    if code not in (0, NOT_FINITE):
        return f'{about}exit code {code}\n{err}'
    for expected, faults, more in interruptions(rng, s['max_iters']):
        ended, _, err = train(broken, *flags, *more, faults=faults)
        about += f'{more or faults.strip()} -> {ended}; '
        if ended not in (expected, code):  # `code` if the run ends before the fault
            return f'{about}expected {expected}\n{err}'
        if rng.random() < 0.3 and checkpoint.checkpoints(broken):
            damage(rng, broken)
            about += 'damaged; '
    ended, _, err = train(broken, *flags)
    if ended != code:
        return f'{about}then {ended}, not {code}\n{err}'
    if code == NOT_FINITE:
        same = (plain / FAILED).read_text() == (broken / FAILED).read_text()
        return '' if same else f'{about}another {FAILED}'
    differs = compare(plain, broken)
    return f'{about}{differs}' if differs else ''


def compare(a, b):
    """Return the first difference between two finished runs, '' if they are equal bit for bit."""
    return first_difference(contents(a), contents(b), 'run')


def contents(out_dir):
    """Return the contents that equal runs share: the last checkpoint, the best one, metrics.jsonl without times."""
    found = {'metrics.jsonl': [{key: value for key, value in json.loads(line).items() if key not in MEASURED}
                               for line in (out_dir / 'metrics.jsonl').read_text().splitlines()]}
    for name, path in dict(last=checkpoint.checkpoints(out_dir)[0], best=checkpoint.best_path(out_dir)).items():
        if path:
            _, state = checkpoint.load_checkpoint(path)
            if path.is_dir():
                optimizer = state['optimizer']
                state['optimizer'] = sharded.read_optimizer(path, optimizer, dict.fromkeys(optimizer['state']))
            del state['train_state']['seconds'], state['code']  # The code may be edited meanwhile.
            state['config'] = {k: v for k, v in state['config'].items()
                               if k not in Config(train.DEFAULTS).having(*HARMLESS)}
            for group in state['optimizer']['param_groups']:
                group.pop('differentiable', None)  # PyTorch adds it at a resume.
            found[name] = state
    return found


if __name__ == '__main__':
    parser = argument_parser(__doc__)
    parser.add_argument('--minutes', type=float, default=10)
    parser.add_argument('--seed', type=int, default=0, help='for the first run; each further run adds 1')
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix='soak'))
    corpus = learnable(directory / 'corpus', 10_000)
    run = functools.partial(fork, 'train.py', logs=directory, seconds=HANG)
    end, tries, failures = time.monotonic() + 60 * args.minutes, 0, 0
    while tries == 0 or time.monotonic() < end:
        seed, tries = args.seed + tries, tries + 1
        out = directory / str(seed)
        if differs := attempt(random.Random(seed), out, lambda out, *flags, **kwargs: run(
                f'--out_dir={out}', f'--dataset={corpus}', *flags, **kwargs)):
            print(f'seed {seed}: {differs}', file=sys.stderr, flush=True)
            failures += 1
        else:
            shutil.rmtree(out)
    print(f'{tries - failures} of {tries} runs ended as the run without faults did, from seed {args.seed}')
    if failures:
        raise SystemExit(f'the others are in {directory}')
    shutil.rmtree(directory)
