"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; again, with batches that are read late; stopped halfway and resumed; in smaller
micro-batches; on two ranks; compiled. It compares losses, gradient norms, weights and the optimizer's state after every
step, and prints a line for each: equal; equal up to rounding; or the first step and the first number or tensor that
differ, and what a resume did not bring back. Exit status 1 if something differs.
"""

import argparse
import functools
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
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import train
from data import loader
from lifecycle.run import unsaved
from runtime import optim, runlog
from runtime.arguments import at_least
from runtime.device import can_compile
from runtime.files import one_line_errors
from runtime.optimizer_state import leaves
from runtime.signals import STOPPED

NAMES = 'again', 'resumed', 'micro-batches', 'two ranks', 'compiled'
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
MACHINERY = {'runtime', 'lifecycle', 'scripts', 'analysis', 'tests', 'site-packages'}  # folders without experiments
CHECKED = '.py', '.pyc', '.bin', 'meta.json', 'tokenizer.json'  # files whose change a resume notices
REMEDY = '(state may live in TrainState, param_groups, the state of the optimizer and buffers, nowhere else)'

# ----------------------------------------------------------------------------------------------------------------------
# A session: training in a process of its own


class Reader:
    """The loader's thread without a race: it reads a batch at once, or `late`, when it is asked for."""

    def __init__(self, late):
        self.late = late

    def submit(self, function, *args):
        """Return a future of function(*args)."""
        read = functools.cache(partial(function, *args))
        if not self.late:
            read()
        return SimpleNamespace(result=read)

    def shutdown(self, **options):
        """Do nothing."""


def session(path, stop, late, nudge, flags):
    """Train with `flags`, up to iteration `stop` if there is one; `nudge`: from weights that differ in their last bits.

    Write to `path`, as JSON, 'steps', the digests of what checkpoints hold at the start of each iteration and of its
    metrics; 'unsaved', those of what they do not hold, halfway; and 'files', what else was read.
    """
    steps, unsaved, opened, runs = {}, {}, {}, []
    begin, set_learning_rate, record = train.begin, optim.set_learning_rate, runlog.RunLog.record
    make_loader = loader.TrainLoader.__init__

    def recorded_begin(c):
        runs.extend(begin(c))
        with torch.no_grad():
            for p in runs[0].params if nudge else ():
                p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        return runs

    def recorded_loader(self, *args):
        make_loader(self, *args)
        runs.append(self)

    def recorded_start(optimizer, lr):
        run, state = runs[0], runs[0].state
        steps[state.iter] = digests(leaf for key, part in saved_state(run).items() for leaf in leaves(part, key))
        if state.iter == run.config.max_iters // 2:
            unsaved.update(digests(unsaved_state(*runs)))
        set_learning_rate(optimizer, lr)

    def recorded_metrics(log, state, line, metrics):
        steps[state.iter] |= digests((key, value) for key, value in metrics.items()
                                     if 'loss' in key or key in ('lr', 'grad_norm'))
        if state.iter + 1 == stop and 'train/loss' in metrics:
            os.kill(os.getpid(), signal.SIGTERM)
        record(log, state, line, metrics)

    def note(event, args):
        if event == 'open' and isinstance(args[0], str) and not (args[1] or 'r').strip('rbt'):
            opened[str(Path(args[0]).absolute())] = True

    train.begin, optim.set_learning_rate, runlog.RunLog.record = recorded_begin, recorded_start, recorded_metrics
    loader.ThreadPoolExecutor, loader.TrainLoader.__init__ = lambda *args: Reader(late), recorded_loader
    sys.addaudithook(note)
    try:
        train.main(flags)
    finally:
        if runs and runs[0].world.is_master:
            settings = {str(value) for key, value in runs[0].config.values.items() if key != 'dataset'}
            found = [name for name in opened if not is_expected(Path(name), settings - {''})]
            Path(path).write_text(json.dumps(dict(steps=steps, unsaved=unsaved, files=found)), encoding='utf-8')


def saved_state(run):
    """Return what a checkpoint holds of the `Run`, a dict."""
    names = {p: name for name, p in run.raw_model.named_parameters()}
    return {'weights': run.raw_model.state_dict(),
            'state': {names.get(p, str(p)): state for p, state in run.optimizer.state.items()},
            'param_groups': [{key: value for key, value in group.items() if key not in ('params', 'lr')}
                             for group in run.optimizer.param_groups],
            'TrainState': {key: value for key, value in vars(run.state).items() if key != 'seconds'}}


def unsaved_state(run, data, loader):
    """Yield (name, leaf) of all else that the code of an experiment may keep from one iteration to the next."""
    code = {name: module for name, module in [*sys.modules.items()] if is_experiment(module)}
    yield from unsaved(
        run, ('config', SimpleNamespace(**run.config.values), ()), ('loader', loader, ()), ('data', data, ()),
        *((key, getattr(run, key), {'advised'}) for key in ('log', 'stops', 'world')),
        *((name, module, ()) for name, module in code.items()),
        *((f'{name}.{key}', value, ()) for name, module in code.items() for key, value in vars(module).items()
          if isinstance(value, (type, FunctionType)) and value.__module__ == name))


def is_experiment(module):
    """Return whether a module is one of this repository's that experiments edit or add."""
    path = Path(getattr(module, '__file__', None) or '/').resolve()
    return ROOT in path.parents and path.is_file() and not MACHINERY & {*path.relative_to(ROOT).parts}


def is_expected(path, settings):
    """Return whether a file that was read is the machine's, or one that `settings` name or that a resume checks."""
    folders = [sys.prefix, sys.base_prefix, '/usr', '/lib', '/etc', '/opt', '/proc', '/sys', '/dev']
    return (path.name.endswith(CHECKED) or not path.is_file() or any(part[0] == '.' for part in path.parts)
            or bool({Path(name).absolute() for name in (*folders, *settings)} & {path, *path.parents})
            or 'torchinductor' in str(path))


def digests(named):
    """Return {name: [text, norm, number]}: texts differ where values do, and numbers by about a difference's norm."""
    found = {}
    for name, value in named:
        found[name] = [repr(value), 0.0, 0.0]
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            text = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ''
            signs = torch.randint(2, flat.shape, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
            found[name] = [f'{value.dtype} {tuple(value.shape)} {text}', float(flat.double().norm()),
                           float(flat.double() @ signs)]
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
        arg for arg in argv if arg[:2] == '--'], c.dropout


def launch(argv, ranks):
    """Run this script with `argv` on `ranks` ranks. Return the first exit code that is not 0, and their output."""
    environment = [dict(os.environ, OMP_NUM_THREADS='1') for _ in range(ranks)]
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = str(free.getsockname()[1])
        for rank, one in enumerate(environment):
            one.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                       MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    processes = [subprocess.Popen([sys.executable, __file__, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, env=one) for one in environment]
    texts = [process.communicate()[0] for process in processes]
    return next((process.returncode for process in processes if process.returncode), 0), ''.join(texts)


def once(folder, flags, out, stop=None, late=False, nudge=False, ranks=1):
    """Return what a session with `flags` writes; SystemExit with its last line where it fails."""
    path = Path(folder, f'{out}-{stop}.json')
    code, text = launch(['--session', json.dumps([str(path), stop, late, nudge]), *flags,
                         f'--out_dir={Path(folder, out)}'], ranks)
    if code != (STOPPED if stop else 0):
        reason = (text.strip().splitlines() or [''])[-1] if code else f'it ends before step {stop}'
        raise SystemExit(f'STOPS with exit code {code}: {reason}')
    warnings = [line for line in text.splitlines() if line.startswith('warning: ')]
    return dict(json.loads(path.read_text(encoding='utf-8')), warnings=warnings)


def resumed(folder, flags, half):
    """Return what two sessions write, the first of which is stopped halfway."""
    first, second = once(folder, flags, 'resumed', stop=half), once(folder, flags, 'resumed')
    return dict(second, steps=first['steps'] | second['steps'])


def changes(ours, theirs):
    """Yield (step, name, relative difference, two digests) of what differs in two {iteration: digests}."""
    for step in sorted(ours.keys() | theirs.keys(), key=int):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in {**a, **b}:
            x, y = a.get(name, ['nothing', 0, 0]), b.get(name, ['nothing', 0, 0])
            if x[0] != y[0]:
                size = max(x[1], y[1])
                yield step, name, abs(x[2] - y[2]) / size if size else math.inf, x, y


def difference(ours, theirs, nudged=None):
    """Compare two {iteration: digests}. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference is below TOLERANCE, or ten times what that run has shown so far for values of this kind.
    """
    largest, place, drift, known = 0.0, '', {}, list(changes(ours, nudged or {}))
    for step, name, relative, x, y in changes(ours, theirs):
        if nudged and name.startswith('TrainState.'):  # counts, of which rounding may change one
            continue
        while nudged and known and int(known[0][0]) <= int(step):
            _, other, size, *_ = known.pop(0)
            drift[kind(other)] = max(drift.get(kind(other), 0), size)
        if not nudged or not relative <= max(TOLERANCE, 10 * drift.get(kind(name), 0)):
            return False, f'DIFFERS from step {step}: {name} is {shown(y)} instead of {shown(x)}'
        largest, place = max((largest, place), (relative, f'{name} at step {step}'))
    return True, f'equal up to rounding (at most {largest:.1g}, {place})' if largest else 'equal'


def kind(name):
    """Return what the names of comparable values share: 'weights', 'state' and an entry's name, a metric."""
    return re.sub(r'\..*\.', '.', name)


def shown(digest):
    """Return a value as a message gives it, of a tensor its norm."""
    return digest[0] if len(digest[0]) < 30 else f'a tensor of norm {digest[1]:.9g}'


def lost(whole, again, after):
    """Return what a resume has not brought back, of the values that do not differ between any two runs."""
    return [f'{name} ({shown(theirs)} instead of {shown(ours)})' for name, ours in whole['unsaved'].items()
            if again['unsaved'].get(name) == ours and (theirs := after['unsaved'].get(name, ours))[0] != ours[0]]


@one_line_errors()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--session']:
        session(*json.loads(argv[1]), argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, usage='%(prog)s CONFIG [--KEY=VALUE ...]',
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--half', type=at_least(1), default=5, help='steps before the stop, and after (default: 5)')
    parser.add_argument('--only', choices=NAMES, nargs='+', default=NAMES, help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags, dropout = shrunk(flags, 2 * args.half)
    plain = [*flags, '--dropout=0']  # which draws by micro-batch
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {'whole': partial(once, folder, flags, 'whole'),
                'again': partial(once, folder, flags, 'again', late=True),
                'resumed': partial(resumed, folder, flags, args.half),
                'plain': partial(once, folder, plain, 'plain'),
                'nudged': partial(once, folder, plain, 'nudged', nudge=True),
                'micro-batches': partial(once, folder, [*plain, '--batch_size=2'], 'micro'),
                'two ranks': partial(once, folder, plain, 'ranks', ranks=2),
                'compiled': partial(once, folder, [*plain, '--compile=True'], 'compiled')}
        futures = {name: pool.submit(job) for name, job in jobs.items()
                   if name in ('whole', 'again', *args.only) and (name != 'compiled' or can_compile('cpu'))
                   or name in ('nudged', *['plain'] * bool(dropout)) and {*args.only} - {'again', 'resumed'}}
        for name in args.only:
            if name not in futures:
                print(f'{name:<15} skipped: no C++ compiler or no Python.h')
                continue
            exact = name in ('again', 'resumed')
            try:
                ours = futures['whole' if exact or not dropout else 'plain'].result()
                agrees, text = difference(ours['steps'], futures[name].result()['steps'],
                                          None if exact else futures['nudged'].result()['steps'])
                if name == 'resumed' and (names := lost(ours, futures['again'].result(), futures[name].result())):
                    agrees, text = False, f'{text}; a resume does not bring back {", ".join(names[:4])}'
            except SystemExit as error:
                agrees, text = False, str(error)
            print(f'{name:<15} {text}', *[REMEDY] * (name == 'resumed' and not agrees), flush=True)
            failed += not agrees
        print('\n'.join(futures['whole'].result()['warnings'] + [
            f'note: training reads {name}; a resume does not notice when it is replaced'
            for name in futures['whole'].result()['files']]))
    raise SystemExit(bool(failed))


if __name__ == '__main__':
    main()
