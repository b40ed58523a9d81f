"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; again, with batches that are read late; resumed from the checkpoint halfway; in smaller
micro-batches; on two ranks; compiled. It compares losses, gradient norms, weights and the optimizer's state after every
step, and prints a line for each: equal; equal up to rounding; or the first step and the first number or tensor that
differ, and what a resume did not bring back. Exit status 1 if something differs. Checkpoints of every step go to a
temporary directory: with GPT-2's ids 1.5 GB.
"""

import functools
import gc
import json
import math
import os
import re
import shutil
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
from runtime.checkpoint import checkpoints, number, path_of
from runtime.device import can_compile
from runtime.files import load_pt, one_line_errors, save_pt
from runtime.optimizer_state import equal, leaves

EXACT = 'again', 'resumed'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'compiled': ['--compile=True']}  # name → its flags
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
MACHINERY = {'runtime', 'lifecycle', 'scripts', 'analysis', 'tests', 'site-packages'}  # folders without experiments
NOTES = 'warning: ', 'note: training reads '  # beginnings of lines that a rehearsal repeats
CHECKED = '.py', '.pyc', '.bin', 'meta.json', 'tokenizer.json'  # files whose change a resume notices
SYSTEM = sys.prefix, sys.base_prefix, '/usr', '/lib', '/etc', '/opt', '/proc', '/sys', '/dev'
TIMES = {'time', 'step_ms', 'hessian_ms', 'tokens_per_sec', 'mfu', 'memory_gb'}  # metrics of the machine

# ----------------------------------------------------------------------------------------------------------------------
# A session: training in a process of its own


def session(unsaved_path, late, nudge, flags):
    """Train with `flags` and save after every step; `late`: with batches that are read when they are needed; `nudge`:
    from weights that differ in their last bits. Write to `unsaved_path` what no checkpoint holds halfway."""
    c, train_step, opened = train.resolve(flags), train.train_step, set()

    def saved_step(run, sequences, iteration):
        if nudge and iteration == 0:
            with torch.no_grad():
                for p in run.params:
                    p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        if iteration == c.max_iters // 2 and run.world.is_master:
            save_pt(unsaved_path, {name: value if isinstance(value, torch.Tensor) else repr(value)
                                   for name, value in unsaved_state(run)})
        run.stops.save = True
        return train_step(run, sequences, iteration)

    train.train_step = saved_step
    loader.ThreadPoolExecutor = lambda *args: reader(late)
    sys.addaudithook(lambda event, args: event == 'open' and args[1] in ('r', 'rb') and opened.add(str(args[0])))
    train.train(c)
    places = (*SYSTEM, *map(os.path.abspath, (c.out_dir, c.init_from)))
    for name in sorted(map(os.path.abspath, opened)):
        expected = name.startswith(places) or name.endswith(CHECKED) or '/.' in name
        if Path(name).is_file() and not expected:
            print(f'note: training reads {name}; a resume does not notice when it is replaced')


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
    parts = [('loader', one, ()) for one in gc.get_objects() if issubclass(type(one), loader.TrainLoader)]
    parts += [(key, getattr(run, key), {'advised'}) for key in ('log', 'stops', 'world')]
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, '__file__', None) or '/').resolve()
        if ROOT in path.parents and not MACHINERY & {*path.relative_to(ROOT).parts}:
            own = {key: value for key, value in vars(module).items()
                   if isinstance(value, (type, FunctionType)) and value.__module__ == name}
            parts += [(name, module, ()), *((f'{name}.{key}', value, ()) for key, value in own.items())]
    return unsaved(run, *parts)


# ----------------------------------------------------------------------------------------------------------------------
# Sessions that must agree


def shrunk(argv, steps):
    """Return the flags of a small run of `steps` steps with the settings of `argv`, whose own flags come last."""
    c = train.resolve(argv, world_size=1)
    few = dict(warmup_iters=2, cooldown_iters=steps // 2, block_size=32)
    if c.init_from in ('scratch', 'resume'):
        few |= dict(n_layer=2, n_head=2, n_embd=32)
    own = train.optimizers.row(c.optimizer_name).settings.keys()
    few |= {key: 2 for key in ('hessian_interval', 'hessian_parts') if key in own}
    small = {key: min(c.values[key], most) for key, most in few.items()} | dict(
        max_iters=steps, lr_decay_iters=steps, eval_interval=2, eval_sequences=16, log_interval=1, total_batch_size=8,
        batch_size=4, gradient_accumulation_steps=0, dtype='float32', parallel='ddp', compile=False, device='cpu',
        backend='gloo', auto_resume=True, keep_checkpoints=steps, eval_only=False, wandb_log=False, max_hours=0)
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


def trained(out_dir, flags, ranks=1, late=False, nudge=False):
    """Train with `flags`. Return the run's `out_dir`; its `steps`, {step: {name: value}}; what was `unsaved` halfway;
    and the `notes` that it prints. SystemExit with the last line of a run that fails."""
    unsaved_path = out_dir.with_suffix('.pt')
    session = ['--session', json.dumps([str(unsaved_path), late, nudge])]
    code, text = launch([*session, *flags, f'--out_dir={out_dir}'], ranks)
    if code:
        raise SystemExit(f'STOPS with exit code {code}: {(text.strip().splitlines() or [""])[-1]}')
    steps, latest = {}, {}
    for line in read_metrics(out_dir / 'metrics.jsonl'):
        latest |= {f'metric {key}': value for key, value in line.items() if key not in TIMES}
        steps.setdefault(line['iter'], {}).update(
            (key, value) for key, value in line.items() if 'loss' in key or key in ('lr', 'grad_norm'))
    for path in checkpoints(out_dir):
        state = load_pt(path)
        saved = dict(weights=state['model'], optimizer=state['optimizer'],
                     TrainState={key: value for key, value in state['train_state'].items() if key != 'seconds'})
        steps.setdefault(number(path), {}).update(leaf for part in saved for leaf in leaves(saved[part], part))
    return SimpleNamespace(out_dir=out_dir, steps=steps, unsaved=load_pt(unsaved_path) | latest,
                           notes=[line for line in text.splitlines() if line.startswith(NOTES)])


def resumed(run, step, out_dir, flags):
    """Return what `trained` does for a resume from the checkpoint that `run`, a future, has saved after some steps."""
    before = run.result()
    out_dir.mkdir()
    for path in before.out_dir / 'metrics.jsonl', path_of(before.out_dir, step):
        shutil.copy(path, out_dir)
    after = trained(out_dir, flags)
    after.steps |= {i: values for i, values in before.steps.items() if i < step}
    return after


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons


def apart(one, two):
    """Return the relative difference of two values, 0 where they are equal, infinity for different kinds."""
    if equal(one, two):
        return 0.0
    if not all(isinstance(value, (bool, int, float, torch.Tensor)) for value in (one, two)):
        return math.inf
    one, two = (torch.as_tensor(value, dtype=torch.float64) for value in (one, two))
    return ((one - two).norm() / max(one.norm(), two.norm())).item() if one.shape == two.shape else math.inf


def difference(ours, theirs, nudged=None):
    """Compare the steps of two runs. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference is below TOLERANCE, or ten times what that run has shown so far for values of this kind.
    """
    largest, drift = (0.0, ''), {}
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            relative = apart(a[name], nudged.get(step, {}).get(name, 'nothing'))
            drift[kind(name)] = max(drift.get(kind(name), 0.0), relative)
        for name in {**a, **b}:
            x, y = a.get(name, 'nothing'), b.get(name, 'nothing')
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


def shown(value):
    return f'a tensor of norm {value.double().norm():.9g}' if isinstance(value, torch.Tensor) else str(value)


def verdict(name, run):
    """Return (whether a run agrees with what it must equal, and a text); `run`: name → what `trained` returns."""
    try:
        if name in ROUNDED:
            return difference(*(run(other).steps for other in ('plain', name, 'nudged')))
        agrees, text = difference(run('whole').steps, run(name).steps)
        whole, again, after = (run(other).unsaved for other in ('whole', 'again', name))
    except SystemExit as error:
        return False, str(error)
    if name == 'resumed':
        # What differs between any two runs does not count, and metrics only where nothing else differs.
        lost = [f'{key} ({shown(after[key])} instead of {shown(value)})' for key, value in whole.items()
                if equal(again.get(key), value) and not equal(after.get(key, value), value)
                and (agrees or not key.startswith('metric '))]
        if lost:
            agrees, text = False, f'{text}; a resume does not bring back {", ".join(lost[:4])}'
        if not agrees:
            text += ' (state may live in TrainState, param_groups, the state of the optimizer and buffers)'
    return agrees, text


@one_line_errors()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--session']:
        session(*json.loads(argv[1]), argv[2:])
        return
    parser = argument_parser(__doc__, allow_abbrev=False, usage='%(prog)s CONFIG [--KEY=VALUE ...]')
    parser.add_argument('--half', type=at_least(1), default=5, help='steps before the resume, and after (default: 5)')
    parser.add_argument('--only', choices=[*EXACT, *ROUNDED], nargs='+', default=[*EXACT, *ROUNDED],
                        help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags, failed = shrunk(flags, 2 * args.half), False
    plain = [*flags, '--dropout=0']  # which draws by micro-batch
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        runs = dict(whole=pool.submit(trained, place / 'whole', flags))
        runs['again'] = pool.submit(trained, place / 'again', flags, late=True)
        if 'resumed' in args.only:
            runs['resumed'] = pool.submit(resumed, runs['whole'], args.half, place / 'resumed', flags)
        if any(name in ROUNDED for name in args.only):
            runs['plain'] = pool.submit(trained, place / 'plain', plain)
            runs['nudged'] = pool.submit(trained, place / 'nudged', plain, nudge=True)
        for name in args.only:
            if name in ROUNDED and (name != 'compiled' or can_compile('cpu')):
                ranks = 2 if name == 'two ranks' else 1
                runs[name] = pool.submit(trained, place / name, [*plain, *ROUNDED[name]], ranks)
        for name in args.only:
            if name in runs:
                agrees, text = verdict(name, lambda name: runs[name].result())
                failed |= not agrees
            else:
                text = 'skipped: no C++ compiler or no Python.h'
            print(f'{name:<15} {text}', flush=True)
        print(*runs['whole'].result().notes, sep='\n')
    sys.exit(failed)


if __name__ == '__main__':
    main()
