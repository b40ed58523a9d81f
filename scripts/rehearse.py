"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; again, with batches that are read late; stopped halfway and resumed; in smaller
micro-batches; on two ranks; compiled. It compares losses, gradient norms, weights and the optimizer's state after every
step, and prints a line for each: equal; equal up to rounding; or the first step and the first number or tensor that
differ, and what a resume did not bring back. Exit status 1 if something differs.
"""

import functools
import gc
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import train
from analysis.runs import read_metrics
from data import loader
from lifecycle.run import unsaved
from runtime.arguments import argument_parser, at_least
from runtime.checkpoint import parameter_names
from runtime.device import can_compile
from runtime.files import one_line_errors
from runtime.optimizer_state import leaves, to_save
from runtime.signals import STOPPED

EXACT = 'again', 'resumed'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'compiled': ['--compile=True']}  # name → its flags
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
MACHINERY = {'runtime', 'lifecycle', 'scripts', 'analysis', 'tests', 'site-packages'}  # folders without experiments
TIMES = {'time', 'step_ms', 'hessian_ms', 'tokens_per_sec', 'mfu', 'memory_gb'}  # metrics of the machine

# ----------------------------------------------------------------------------------------------------------------------
# A session: training in a process of its own


def session(path, stop, late, nudge, flags):
    """Train with `flags`, up to iteration `stop` if there is one; `late`: with batches that are read when they are
    needed; `nudge`: from weights that differ in their last bits.

    Write to `path`, as JSON, 'steps', the digests of what checkpoints hold after each step, and 'unsaved', those of
    what they do not hold, halfway.
    """
    c, steps, halfway, train_step = train.resolve(flags), {}, {}, train.train_step

    def recorded_step(run, sequences, iteration):
        if nudge and not steps:
            with torch.no_grad():
                for p in run.params:
                    p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        if iteration == c.max_iters // 2:
            halfway.update(digests(unsaved_state(run)))
        if iteration + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        step = train_step(run, sequences, iteration)
        optimizer, _ = to_save(run.optimizer, parameter_names(run.raw_model), False)
        progress = {key: value for key, value in vars(run.state).items() if key != 'seconds'}
        saved = dict(weights=run.raw_model.state_dict(), optimizer=optimizer, TrainState=progress)
        steps[iteration] = digests(leaf for key, part in saved.items() for leaf in leaves(part, key))
        return step

    train.train_step = recorded_step
    loader.ThreadPoolExecutor = lambda *args: reader(late)
    try:
        train.train(c)
    finally:
        if os.environ.get('RANK', '0') == '0':
            Path(path).write_text(json.dumps(dict(steps=steps, unsaved=halfway)), encoding='utf-8')


def reader(late):
    """Return the loader's thread without a race: it reads a batch at once or, if `late`, when the batch is needed."""
    def submit(function, *args):
        read = functools.cache(functools.partial(function, *args))
        if not late:
            read()
        return SimpleNamespace(result=read)
    return SimpleNamespace(submit=submit, shutdown=lambda **options: None)


def unsaved_state(run):
    """Return (name, leaf) of all else that the code of an experiment may keep from one iteration to the next."""
    parts = [('loader', one, ()) for one in gc.get_objects() if isinstance(one, loader.TrainLoader)]
    parts += [(key, getattr(run, key), {'advised'}) for key in ('log', 'stops', 'world')]
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, '__file__', None) or '/').resolve()
        if ROOT in path.parents and not MACHINERY & {*path.relative_to(ROOT).parts}:
            own = {key: value for key, value in vars(module).items()
                   if isinstance(value, (type, FunctionType)) and value.__module__ == name}
            parts += [(name, module, ()), *((f'{name}.{key}', value, ()) for key, value in own.items())]
    return unsaved(run, *parts)


def digests(named):
    """Return {name: [text, norm, number]}: texts differ where values do, and numbers by about a difference's norm."""
    found = {}
    for name, value in named:
        found[name] = [repr(value), 0.0, 0.0]
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            text = f'{value.dtype} {value.shape} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}'
            signs = torch.randint(2, flat.shape, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
            found[name] = [text, float(flat.double().norm()), float(flat.double() @ signs)]
        elif isinstance(value, (bool, int, float)):
            found[name][1:] = abs(value), value
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Sessions that must agree


def shrunk(argv, steps):
    """Return the flags of a small run of `steps` steps with the settings of `argv`, whose own flags come last."""
    c = train.resolve(argv, world_size=1)
    few = dict(warmup_iters=2, cooldown_iters=steps // 2, block_size=32)
    if c.init_from in ('scratch', 'resume'):
        few |= dict(n_layer=2, n_head=2, n_embd=64)
    own = train.optimizers.row(c.optimizer_name).settings.keys()
    few |= {key: 2 for key in ('hessian_interval', 'hessian_parts') if key in own}
    small = {key: min(c.values[key], most) for key, most in few.items()} | dict(
        max_iters=steps, lr_decay_iters=steps, eval_interval=2, eval_sequences=16, log_interval=1, total_batch_size=8,
        batch_size=4, gradient_accumulation_steps=0, dtype='float32', parallel='ddp', compile=False, device='cpu',
        backend='gloo', auto_resume=True, always_save_checkpoint=True, eval_only=False, wandb_log=False, max_hours=0)
    small |= dict.fromkeys(own & {'hessian_batch_size'}, 4)  # of which each of two ranks has two
    return [arg for arg in argv if arg[:2] != '--'] + [f'--{key}={value}' for key, value in small.items()] + [
        arg for arg in argv if arg[:2] == '--']


def launch(argv, ranks):
    """Run this script with `argv` on `ranks` ranks. Return the first exit code that is not 0, and their output."""
    environment = dict(os.environ, OMP_NUM_THREADS='1')
    environments = [environment]
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        environments = [environment | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)) for rank in range(ranks)]
    processes = [subprocess.Popen([sys.executable, __file__, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, env=environment) for environment in environments]
    texts = [process.communicate()[0] for process in processes]
    return next((process.returncode for process in processes if process.returncode), 0), ''.join(texts)


def trained(folder, name, flags, stops=(None,), late=False, nudge=False, ranks=1):
    """Return what sessions with `flags` write, the first of which ends before the iteration stops[0], and so on;
    SystemExit with the last line of one that fails."""
    steps = {}
    for stop in stops:
        path = Path(folder, f'{name}-{stop}.json')
        code, text = launch(['--session', json.dumps([str(path), stop, late, nudge]), *flags,
                             f'--out_dir={Path(folder, name)}'], ranks)
        if code != (STOPPED if stop else 0):
            reason = (text.strip().splitlines() or [''])[-1] if code else f'it ends before step {stop}'
            raise SystemExit(f'STOPS with exit code {code}: {reason}')
        found = json.loads(path.read_text(encoding='utf-8'))
        steps |= found['steps']
    latest = {}
    for line in read_metrics(Path(folder, name, 'metrics.jsonl')):
        latest |= line
        measured = digests((key, value) for key, value in line.items() if 'loss' in key or key in ('lr', 'grad_norm'))
        steps[str(line['iter'])] = measured | steps.get(str(line['iter']), {})
    found['unsaved'] |= digests((f'metric {key}', value) for key, value in latest.items() if key not in TIMES)
    warnings = [line for line in text.splitlines() if line.startswith('warning: ')]
    return dict(found, steps=steps, warnings=warnings)


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons of what they wrote


def apart(one, two):
    """Return the relative difference of two digests, 0 where they are equal."""
    size = max(one[1], two[1])
    return 0.0 if one[0] == two[0] else abs(one[2] - two[2]) / size if size else math.inf


def difference(ours, theirs, nudged=None):
    """Compare two {iteration: digests}. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference is below TOLERANCE, or ten times what that run has shown so far for values of this kind.
    """
    missing, largest, drift = ['nothing', 0.0, 0.0], (0.0, ''), {}
    for step in sorted(ours.keys() | theirs.keys(), key=int):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            other = nudged.get(step, {}).get(name, missing)
            drift[kind(name)] = max(drift.get(kind(name), 0.0), apart(a[name], other))
        for name in {**a, **b}:
            x, y = a.get(name, missing), b.get(name, missing)
            relative = apart(x, y)
            allowed = max(TOLERANCE, 10 * drift.get(kind(name), 0.0)) if nudged else 0.0
            if nudged and name.startswith('TrainState.'):  # counts, of which rounding may change one
                continue
            if not relative <= allowed:  # NaN, too
                return False, f'DIFFERS from step {step}: {name} is {shown(y)} instead of {shown(x)}'
            largest = max(largest, (relative, f'{name} at step {step}'))
    return True, f'equal up to rounding (at most {largest[0]:.1g}, {largest[1]})' if largest[0] else 'equal'


def kind(name):
    """Return what the names of comparable values share: 'weights.weight', 'optimizer.exp_avg', a metric."""
    return re.sub(r'\..*\.', '.', name)


def shown(digest):
    return digest[0] if len(digest[0]) < 30 else f'a tensor of norm {digest[1]:.9g}'


def lost(whole, again, after):
    """Return what a resume has not brought back, of the values that do not differ between any two runs."""
    return [f'{name} ({shown(theirs)} instead of {shown(ours)})' for name, ours in whole['unsaved'].items()
            if again['unsaved'].get(name) == ours and (theirs := after['unsaved'].get(name, ours))[0] != ours[0]]


def verdict(name, run):
    """Return (whether a run agrees with what it must equal, and a text); `run`: name → what `trained` returns."""
    try:
        if name in ROUNDED:
            return difference(run('plain')['steps'], run(name)['steps'], run('nudged')['steps'])
        agrees, text = difference(run('whole')['steps'], run(name)['steps'])
        names = lost(run('whole'), run('again'), run(name)) if name == 'resumed' else []
    except SystemExit as error:
        return False, str(error)
    if names := [name for name in names if agrees or not name.startswith('metric ')]:  # which follow from others
        agrees, text = False, f'{text}; a resume does not bring back {", ".join(names[:4])}'
    if name == 'resumed' and not agrees:
        text += ' (state may live in TrainState, param_groups, the state of the optimizer and buffers)'
    return agrees, text


@one_line_errors()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--session']:
        session(*json.loads(argv[1]), argv[2:])
        return
    parser = argument_parser(__doc__, allow_abbrev=False, usage='%(prog)s CONFIG [--KEY=VALUE ...]')
    parser.add_argument('--half', type=at_least(1), default=5, help='steps before the stop, and after (default: 5)')
    parser.add_argument('--only', choices=[*EXACT, *ROUNDED], nargs='+', default=[*EXACT, *ROUNDED],
                        help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags, failed = shrunk(flags, 2 * args.half), False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        def start(name, *more, **how):
            runs[name] = pool.submit(trained, folder, name, [*flags, *more], **how)

        runs, without = {}, '--dropout=0'  # which draws by micro-batch
        start('whole')
        start('again', late=True)
        if 'resumed' in args.only:
            start('resumed', stops=(args.half, None))
        if any(name in ROUNDED for name in args.only):
            start('plain', without)
            start('nudged', without, nudge=True)
        for name in args.only:
            if name in ROUNDED and (name != 'compiled' or can_compile('cpu')):
                start(name, without, *ROUNDED[name], ranks=2 if name == 'two ranks' else 1)
        for name in args.only:
            if name in runs:
                agrees, text = verdict(name, lambda name: runs[name].result())
                failed |= not agrees
            else:
                text = 'skipped: no C++ compiler or no Python.h'
            print(f'{name:<15} {text}', flush=True)
        print(*runs['whole'].result()['warnings'], sep='\n')
    sys.exit(failed)


if __name__ == '__main__':
    main()
