"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; again, with batches that are read late; resumed from the checkpoint halfway; in smaller
micro-batches; on two ranks; on their shards; with activation checkpointing; compiled. It compares metrics, weights and
the optimizer's state after every step, and the last validation loss with scripts/eval.py's of the checkpoint. It prints
a line for each: equal; equal up to rounding; or the first step and the first number or tensor that differ, and what a
resume did not bring back. Exit status 1 if something differs. Checkpoints of every step go to a temporary directory:
with GPT-2's ids 2 GB.
"""

import functools
import gc
import hashlib
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
from lifecycle.run import same_buffers, unsaved
from runtime.arguments import argument_parser, at_least
from runtime.checkpoint import checkpoints, load_checkpoint, number, path_of
from runtime.device import can_compile
from runtime.files import load_pt, one_line_errors, save_pt, warn
from runtime.optimizer_state import equal, leaves

EXACT = 'again', 'resumed'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'sharded': ['--parallel=fsdp'],
           'recomputed': ['--activation_checkpointing=True'], 'compiled': ['--compile=True']}  # name → its flags
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
MACHINERY = {'runtime', 'lifecycle', 'scripts', 'analysis', 'tests', 'site-packages'}  # folders without experiments
NOTES = 'warning: ', 'note: training reads '  # beginnings of lines that a rehearsal repeats
CHECKED = '.py', '.pyc', 'train.bin', 'val.bin', 'meta.json', 'tokenizer.json'  # whose change a resume notices
SYSTEM = sys.prefix, sys.base_prefix, '/usr', '/lib', '/etc', '/opt', '/proc', '/sys', '/dev'
COUNTS = 'TrainState.', 'grad_clipped', 'update_unclipped'  # of which rounding may change one
MACHINE = re.compile('(^|[_/])(time|ms|sec|seconds|mfu|memory)(_|$)')  # metrics of the machine

# ----------------------------------------------------------------------------------------------------------------------
# A session: training in a process of its own


def session(unsaved_path, late, nudge, flags):
    """Train with `flags` and save after every step; `late`: with batches that are read when they are needed; `nudge`:
    from weights that differ in their last bits. Write to `unsaved_path` what no checkpoint holds halfway."""
    c, train_step, opened = train.resolve(flags), train.train_step, set()

    def saved_step(run, sequences, iteration):
        expected = None
        if nudge and iteration == 0:
            with torch.no_grad():
                for p in run.params:
                    p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        if iteration == c.max_iters // 2 and run.world.is_master:
            save_pt(unsaved_path, {name: value.clone() if isinstance(value, torch.Tensor) else repr(value)
                                   for name, value in unsaved_state(run)})
        run.stops.save = True
        if iteration == 0 and not c.dropout and run.world.size == 1:
            with torch.no_grad(), same_buffers(run.raw_model):
                expected = run.raw_model(sequences[:, :-1].contiguous(), sequences[:, 1:].clone())[1].item()
        step = train_step(run, sequences, iteration)
        if expected is not None and not math.isclose(step.loss, expected, rel_tol=TOLERANCE):
            warn(f'the loss of the first step is {step.loss:.9g}, and GPT.forward returns {expected:.9g} for its '
                 'sequences, which evaluation and Sophia-H follow')
        return step

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
        batch_size=4, gradient_accumulation_steps=0, dtype='float32', parallel='ddp', activation_checkpointing=False,
        compile=False, device='cpu', backend='gloo', auto_resume=True, keep_checkpoints=steps, eval_only=False,
        wandb_log=False, max_hours=0)
    small |= dict.fromkeys(own & {'hessian_batch_size'}, 4)  # of which each of two ranks has two
    return [arg for arg in argv if arg[:2] != '--'] + [f'--{key}={value}' for key, value in small.items()] + [
        arg for arg in argv if arg[:2] == '--']


def launch(argv, ranks=1):
    """Run the script argv[0] on `ranks` ranks. Return what they print; SystemExit with the last line if one fails."""
    environment = dict(os.environ, OMP_NUM_THREADS='1')
    environments = [environment]
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        environments = [environment | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)) for rank in range(ranks)]
    processes = [subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, env=environment) for environment in environments]
    texts = [process.communicate()[0] for process in processes]
    text = ''.join(texts)
    if code := next((process.returncode for process in processes if process.returncode), 0):
        raise SystemExit(f'STOPS with exit code {code}: {(text.strip().splitlines() or [""])[-1]}')
    return text


def trained(out_dir, flags, ranks=1, late=False, nudge=False):
    """Train with `flags`. Return the run's `out_dir`; its `steps`, {step: {name: value}}; what was `unsaved` halfway;
    and the `notes` that it prints."""
    unsaved_path = out_dir.with_suffix('.pt')
    session = [__file__, '--session', json.dumps([str(unsaved_path), late, nudge])]
    text, steps = launch([*session, *flags, f'--out_dir={out_dir}'], ranks), {}
    for line in read_metrics(out_dir / 'metrics.jsonl'):
        measured = {key: value for key, value in line.items() if not MACHINE.search(key)}
        steps.setdefault(line['iter'], {}).update(leaf for key in measured for leaf in leaves(measured[key], key))
    for path in checkpoints(out_dir):
        state = load_checkpoint(path)[1]
        saved = dict(weights=state['model'], optimizer=state['optimizer'],
                     TrainState={key: value for key, value in state['train_state'].items() if key != 'seconds'})
        steps.setdefault(number(path), {}).update(leaf for part in saved for leaf in leaves(saved[part], part))
    files = {f'file {path.name}': hashlib.sha256(path.read_bytes()).hexdigest()[:16]
             for path in out_dir.iterdir() if path.is_file() and number(path) is None}
    return SimpleNamespace(out_dir=out_dir, steps=steps, unsaved=load_pt(unsaved_path) | files,
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


def evaluated(run, sequences):
    """Compare the last validation losses of `run`, a future, with scripts/eval.py's of the last checkpoint. Return
    (whether they agree, and a text)."""
    found, script = run.result(), str(ROOT / 'scripts/eval.py')
    logged = found.steps[max(found.steps)]
    text = launch([script, str(found.out_dir), f'--eval_sequences={sequences}', '--device=cpu'])
    for result in map(json.loads, re.findall(r'^\{.*\}$', text, re.MULTILINE)):
        expected = logged.get(f'val/loss/{Path(result["data"]).parent.name}', logged['val/loss'])  # of a mixture's part
        if not math.isclose(result['loss'], expected, rel_tol=1e-5):
            return False, (f'DIFFERS: scripts/eval.py measures {result["loss"]:.9g} of the last checkpoint instead of '
                           f'{expected:.9g} (it makes the model of GPTConfig and state_dict alone)')
    return True, 'equal up to rounding'


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


def difference(ours, theirs, nudged=None, whole=True):
    """Compare the steps of two runs. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference is below TOLERANCE, or ten times what that run has shown so far for values of this kind. Unless `whole`,
    the optimizer's state is left out, which cannot be read from shards.
    """
    largest, drift = (0.0, ''), {}
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            relative = apart(a[name], nudged.get(step, {}).get(name, 'nothing'))
            drift[kind(name)] = max(drift.get(kind(name), 0.0), relative)
        for name in {**a, **b}:
            if nudged and name.startswith(COUNTS) or not whole and name.startswith('optimizer'):
                continue
            x, y = a.get(name, 'nothing'), b.get(name, 'nothing')
            relative = apart(x, y)
            allowed = max(TOLERANCE, 10 * drift.get(kind(name), 0.0)) if nudged else 0.0
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
        if name == 'evaluated':
            return run(name)
        if name in ROUNDED:
            return difference(*(run(other).steps for other in ('plain', name, 'nudged')), whole=name != 'sharded')
        agrees, text = difference(run('whole').steps, run(name).steps)
        whole, again, after = (run(other).unsaved for other in ('whole', 'again', name))
    except SystemExit as error:
        return False, str(error)
    if name == 'resumed':
        # What differs between any two runs does not count.
        lost = [f'{key} ({shown(after[key])} instead of {shown(value)})' for key, value in whole.items()
                if equal(again.get(key), value) and not equal(after.get(key, value), value)]
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
    comparisons = [*EXACT, 'evaluated', *ROUNDED]
    parser.add_argument('--only', choices=comparisons, nargs='+', default=comparisons, help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags, failed, skipped = shrunk(flags, 2 * args.half), False, {}
    c = train.resolve(flags, world_size=1)
    if not can_compile('cpu'):
        skipped['compiled'] = 'no C++ compiler or no Python.h'
    row = train.optimizers.row(c.optimizer_name)
    if row.hook.hessian_products:
        skipped['recomputed'] = f'{c.optimizer_name} has no --activation_checkpointing'
    if not row.shards or c.hessian_parts > 1:
        skipped['sharded'] = 'no shards=True, or an estimate in parts, which draws other labels there'
    plain = [*flags, '--dropout=0']  # which draws by micro-batch
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        runs = dict(whole=pool.submit(trained, place / 'whole', flags))
        runs['again'] = pool.submit(trained, place / 'again', flags, late=True)
        if 'resumed' in args.only:
            runs['resumed'] = pool.submit(resumed, runs['whole'], args.half, place / 'resumed', flags)
        if 'evaluated' in args.only:
            runs['evaluated'] = pool.submit(evaluated, runs['whole'], c.eval_sequences)
        if any(name in ROUNDED for name in args.only):
            runs['plain'] = pool.submit(trained, place / 'plain', plain)
            runs['nudged'] = pool.submit(trained, place / 'nudged', plain, nudge=True)
        for name in args.only:
            if name in ROUNDED and name not in skipped:
                ranks = 2 if name in ('two ranks', 'sharded') else 1
                runs[name] = pool.submit(trained, place / name, [*plain, *ROUNDED[name]], ranks)
        for name in args.only:
            if name not in skipped:
                agrees, text = verdict(name, lambda name: runs[name].result())
                failed |= not agrees
            else:
                text = f'skipped: {skipped[name]}'
            print(f'{name:<15} {text}', flush=True)
        print(*runs['whole'].result().notes, sep='\n')
    sys.exit(failed)


if __name__ == '__main__':
    main()
