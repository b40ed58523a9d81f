"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; again, with batches that are read late; stopped and resumed, once after an evaluation and
once before one; in smaller micro-batches; on two ranks; on their shards; with activation checkpointing; compiled. It
compares metrics, weights and the optimizer's state after each step, and the last validation loss with scripts/eval.py's
of the checkpoint. It prints a line for each: equal; equal up to rounding; or the first step and the first number or
tensor that differ, and what a resume did not bring back. Exit status 1 if something differs. It warns where what the
first run says of its steps is not so: the loss, clipping, decay, learning rate, FLOPs, h.
Checkpoints of every step go to a temporary directory: with GPT-2's ids 2 GB.
"""

import contextlib
import functools
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import train
from analysis.runs import read_metrics
from data import loader
from lifecycle.run import same_buffers, unsaved
from runtime.arguments import argument_parser, at_least
from runtime.checkpoint import checkpoints, load_checkpoint, number, path_of
from runtime.device import can_compile
from runtime.files import load_pt, one_line_errors, own_modules, save_pt, warn
from runtime.gpt import flops_per_token
from runtime.optim import global_norm, parameters
from runtime.optimizer_state import equal, leaves

EXACT = 'again', 'resumed'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'sharded': ['--parallel=fsdp'],
           'recomputed': ['--activation_checkpointing=True'], 'compiled': ['--compile=True']}  # name → its flags
PATIENCE = 300  # seconds, and ten times those of the first run, after which a run is ended
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
MACHINERY = {'runtime', 'lifecycle', 'scripts', 'analysis', 'tests'}  # folders without experiments
NOTES = 'warning: ', 'note: training reads '  # beginnings of lines that a rehearsal repeats
CODE = '.py', '.pyc'
CHECKED = 'train.bin', 'val.bin', 'meta.json', 'tokenizer.json'  # of the data set, whose change a resume notices
SYSTEM = sys.prefix, sys.base_prefix, '/usr', '/lib', '/etc', '/opt', '/proc', '/sys', '/dev'
COUNTS = 'TrainState.', 'grad_clipped', 'update_unclipped'  # of which rounding may change one
ASSUMED = 'scripts/curvature.py (level, averaged, mean_age, noise_of_h) and the warning of a runaway assume'
ATTENTION = {  # which PyTorch does not count on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: (
        sdpa_flop_count(q, k, v)),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, q, k, v, *args, **kwargs: (
        2 * sdpa_flop_count(q, k, v))}
MACHINE = re.compile('(^|[_/])(time|ms|sec|seconds|mfu|memory)(_|$)')  # metrics of the machine

# ----------------------------------------------------------------------------------------------------------------------
# A session: training in a process of its own


def session(unsaved_path, late, nudge, flags):
    """Train with `flags` and save after every step; `late`: with batches that are read when they are needed; `nudge`:
    from weights that differ in their last bits. Write to `unsaved_path` what no checkpoint holds at the `stops`, and
    keep the checkpoint that an evaluation replaces at the second one."""
    c, opened, found, loaders = train.resolve(flags), set(), {}, []
    train_step, evaluate, audit = train.train_step, train.evaluate_and_save, Audit(c, train.train_step)
    make_loader = loader.TrainLoader.__init__

    def noted(self, *args, **options):
        loaders.append(self)
        make_loader(self, *args, **options)

    def keeping(run):
        path = path_of(c.out_dir, run.state.iter)
        if run.state.iter == stops(c.max_iters)[1] and run.world.is_master and path.is_file():
            shutil.copy(path, f'{c.out_dir}.{run.state.iter}')
        evaluate(run)

    def saved_step(run, sequences, iteration):
        if nudge and iteration == 0:
            with torch.no_grad():
                for p in run.params:
                    p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        if iteration in stops(c.max_iters) and run.world.is_master:
            found.update({(iteration, name): value.clone() if isinstance(value, torch.Tensor) else repr(value)
                          for name, value in unsaved_state(run, loaders)})
            save_pt(unsaved_path, found)
        run.stops.save = True
        return (train_step if c.compile or run.world.size > 1 else audit.step)(run, sequences, iteration)

    train.train_step, train.evaluate_and_save, loader.TrainLoader.__init__ = saved_step, keeping, noted
    loader.ThreadPoolExecutor = lambda *args: reader(late)
    sys.addaudithook(lambda event, args: event == 'open' and args[1] in ('r', 'rb') and opened.add(str(args[0])))
    train.train(c)
    places = (*SYSTEM, *map(os.path.abspath, (c.out_dir, c.init_from)))
    folders = map(loader.data_dir, loader.parts_of(c.dataset))
    checked = {*map(os.path.abspath, (folder / name for folder in folders for name in CHECKED))}
    for name in sorted(map(os.path.abspath, opened)):
        expected = name.startswith(places) or name.endswith(CODE) or name in checked or '/.' in name
        if Path(name).is_file() and not expected:
            print(f'note: training reads {name}; a resume does not notice when it is replaced')


class Audit:
    """A comparison of what a new run on one rank says of its steps with what they do; it warns once of a difference."""

    def __init__(self, c, train_step):
        self.train_step, self.said = train_step, set()
        self.decays = self.loss = None  # at first: of the param groups, and by GPT.forward
        self.clipped = 0  # gradients that reached the optimizer smaller than they were
        self.latest = None  # iteration
        if c.decay_lr and c.schedule != 'constant':
            end = train.learning_rate_at(c, c.lr_decay_iters)
            self.expect('end', math.isclose(end, c.min_lr, abs_tol=1e-3 * c.learning_rate),
                        f'learning_rate_at: at lr_decay_iters it is {end:.4g} instead of min_lr = {c.min_lr:.4g}, and '
                        'scripts/speedup.py takes a run for decayed from there on')

    def expect(self, what, agrees, text):
        """Warn unless it `agrees`, and not twice of the same."""
        if not agrees and what not in self.said:
            self.said.add(what)
            warn(text)

    def step(self, run, sequences, iteration):
        """Make a training step and return it."""
        if iteration == self.latest:
            self.expect('again', False, 'train_step is called more than once in an iteration: tokens, FLOPs and '
                        'grad_clipped count one')
            self.said.add('clipped')  # of which this method measures the first, and the run may count any
            return self.train_step(run, sequences, iteration)
        self.latest = iteration
        if iteration == 0:
            self.begin(run, sequences)
        if self.decays is None:  # a resumed run
            return self.train_step(run, sequences, iteration)
        self.expect('clipped', self.clipped == run.state.clipped, f'grad_clipped: counts {run.state.clipped} of '
                    f'{iteration} gradients, and {self.clipped} were clipped')
        counter, got = FlopCounterMode(display=False, custom_mapping=ATTENTION), {}
        counter.mod_tracker = contextlib.nullcontext()  # its hooks fail where a parameter is the input of a module
        counter.mod_tracker.parents = {'Global'}

        def measure(optimizer, *arguments):
            scaled = [(float(group['lr']), group.get('lr_scale', 1.0)) for group in optimizer.param_groups]
            got.update(norm=global_norm([p.grad for p in run.params if p.grad is not None]).item(),
                       decays=decays(optimizer), rates=[rate / scale for rate, scale in scaled if scale],
                       flops=counter.get_total_flops())

        counted = iteration in {1, run.config.hessian_interval} - {0}  # with an estimate and, if any has none, without
        # PyTorch counts the backward pass of a convolution as if it had one group.
        counted = counted and all(getattr(module, 'groups', 1) == 1 for module in run.raw_model.modules())
        with (run.optimizer.register_step_pre_hook(measure),
              run.optimizer.register_step_post_hook(lambda one, *_: got.update(unclipped=unclipped(one))),
              counter if counted else contextlib.nullcontext()):
            step = self.train_step(run, sequences, iteration)
        if got:
            self.clipped += got['norm'] < (1 - TOLERANCE) * step.grad_norm
            self.compare(run, iteration, step, got)
        return step

    def begin(self, run, sequences):
        """Measure what a step may change."""
        self.decays = decays(run.fresh)
        before = torch.get_rng_state()
        with torch.no_grad(), same_buffers(run.raw_model):
            loss = run.raw_model(sequences[:, :-1].clone(), sequences[:, 1:].clone())[1].item()
        if torch.equal(torch.get_rng_state(), before):  # without dropout
            self.loss = loss
        if isinstance(run.optimizer, train.optimizers.Sophia):
            other, level = train.make_optimizer(run.config, run.raw_model), 1 - run.config.beta2
            other.update_hessian([torch.ones_like(p) for p in parameters(other)])
            for h in (state['hessian'].mean().item() for state in other.state.values() if 'hessian' in state):
                self.expect('level', math.isclose(h, level, rel_tol=TOLERANCE), f'h: a first estimate of 1 makes it '
                            f'{h:.3g} instead of 1 − beta2 = {level:.3g}, which {ASSUMED}')

    def compare(self, run, iteration, step, got):
        """Warn where a step is not as the run says, by what its optimizer has `got`."""
        if iteration == 0 and self.loss is not None:
            self.expect('loss', math.isclose(step.loss, self.loss, rel_tol=TOLERANCE),
                        f'the loss of the first step is {step.loss:.9g}, and GPT.forward returns {self.loss:.9g} for '
                        'all its sequences, which evaluation and Sophia-H follow')
        self.expect('decay', all(then or not now for now, then in zip(got['decays'], self.decays)),
                    'weight decay: a param group that parameter_groups gives none, as of norms and biases, has some at '
                    f'step {iteration}')
        lr = train.learning_rate_at(run.config, iteration)
        for rate in got['rates']:
            self.expect('rate', math.isclose(rate, lr, rel_tol=1e-6), f'the learning rate of step {iteration} is '
                        f'{rate:.4g}, and learning_rate_at gives {lr:.4g}, by which scripts/speedup.py judges the '
                        'schedule of a run')
        now = unclipped(run.optimizer)
        self.expect('unclipped', now == got['unclipped'], f'update_unclipped: is {now:.3g} after step {iteration}, and '
                    f"was {got['unclipped']:.3g} at its update: h or m has changed since")
        if step.estimated and isinstance(run.optimizer, train.optimizers.Sophia):
            beta2s = {group['betas'][1] for group in run.optimizer.param_groups}
            self.expect('level', beta2s == {run.config.beta2}, f'h: β2 is {max(beta2s):.4g} at step {iteration} '
                        f'instead of beta2 = {run.config.beta2:.4g}, which {ASSUMED}')
        interval = run.config.hessian_interval
        self.expect('estimates', step.estimated == bool(interval and iteration % interval == 0),
                    f'step {iteration} makes {"an" if step.estimated else "no"} estimate, though hessian_interval = '
                    f"{interval}; figures spread the FLOPs of the hook's `estimates` evenly over the run")
        if got['flops']:
            told = run.hessian.cost * run.config.hessian_batch_size / run.config.total_batch_size * step.estimated
            ratio = got['flops'] / step.tokens / flops_per_token(run.raw_model)
            # A Hessian-vector product that is not compiled takes an eighth more than its cost.
            self.expect('FLOPs', abs(ratio - 1 - told) < 0.01 + 0.2 * told,
                        f'a step{" with an estimate" * step.estimated} takes {ratio:.3g} times the FLOPs of '
                        f'flops_per_token in runtime/gpt.py, and figures count {1 + told:.3g} times')


def decays(optimizer):
    """Return the weight decay of each param group."""
    return [float(group.get('weight_decay') or 0) for group in optimizer.param_groups]


def unclipped(optimizer):
    """Return the fraction of the latest update that the optimizer would log as not clipped."""
    return float(getattr(optimizer, 'metrics', dict)().get('update_unclipped', 0))


def reader(late):
    """Return the loader's thread without a race: it reads a batch at once or, if `late`, when the batch is needed."""
    def submit(function, *args):
        read = functools.cache(functools.partial(function, *args))
        if not late:
            read()
        return SimpleNamespace(result=read)
    return SimpleNamespace(submit=submit, shutdown=lambda **options: None)


def unsaved_state(run, loaders):
    """Return (name, leaf) of all else that the code of an experiment may keep from one iteration to the next."""
    parts = [('loader', one, ()) for one in loaders]
    parts += [(key, getattr(run, key), {'advised'}) for key in ('log', 'stops', 'world')]
    for path, module in own_modules():
        name = module.__name__
        if not MACHINERY & {*path.parts}:
            own = {key: value for key, value in vars(module).items()
                   if isinstance(value, (type, FunctionType)) and value.__module__ == name}
            parts += [(name, module, ()), *((f'{name}.{key}', value, ()) for key, value in own.items())]
    return unsaved(run, *parts)


# ----------------------------------------------------------------------------------------------------------------------
# Sessions that must agree


def stops(steps):
    """Return after how many of `steps` steps a run is stopped and resumed: after an evaluation of `shrunk` without an
    estimate, and before one with an estimate. It logs what follows, and not the step before."""
    return 3, max(6, steps // 12 * 6)


def shrunk(argv, steps):
    """Return the flags of a small run of `steps` steps with the settings of `argv`, whose own flags come last."""
    c = train.resolve(argv, world_size=1)
    few = dict(warmup_iters=2, cooldown_iters=steps // 2, block_size=32)
    if c.init_from in ('scratch', 'resume'):
        few |= dict(n_layer=2, n_head=2, n_embd=32)
    own = train.optimizers.row(c.optimizer_name).settings.keys()
    few |= {key: 2 for key in ('hessian_interval', 'hessian_parts') if key in own}
    small = {key: min(c.values[key], most) for key, most in few.items()} | dict(
        max_iters=steps, lr_decay_iters=steps, eval_interval=3, eval_sequences=13, log_interval=3,
        total_batch_size=8, batch_size=4, gradient_accumulation_steps=0, dtype='float32', parallel='ddp',
        activation_checkpointing=False, compile=False, device='cpu', backend='gloo', auto_resume=True,
        always_save_checkpoint=True, keep_checkpoints=steps, eval_only=False, wandb_log=False, max_hours=0)
    # With 6 sequences the micro-batches of a step have several sizes. Parts of 6 would not be the same on two ranks.
    small |= dict.fromkeys(own & {'hessian_batch_size'}, 4 if small.get('hessian_parts', 1) > 1 else 6)
    return [arg for arg in argv if arg[:2] != '--'] + [f'--{key}={value}' for key, value in small.items()] + [
        arg for arg in argv if arg[:2] == '--']


def launch(argv, ranks=1, first=None):
    """Run the script argv[0] on `ranks` ranks. Return what they print; SystemExit with the last line if one fails, or
    if they take much longer than the `first` run, in seconds."""
    environment = dict(os.environ, OMP_NUM_THREADS='1')
    environments = [environment]
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        environments = [environment | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)) for rank in range(ranks)]
    limit = None if first is None else PATIENCE + 10 * first
    with contextlib.ExitStack() as stack:
        # Files, because a rank that has filled a pipe would wait until the others have ended.
        outputs = [stack.enter_context(tempfile.TemporaryFile('w+', errors='replace')) for _ in environments]
        processes = [subprocess.Popen([sys.executable, *argv], stdout=output, stderr=subprocess.STDOUT, env=environment)
                     for output, environment in zip(outputs, environments)]
        try:
            for process in processes:
                process.wait(limit)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
                process.wait()
            why = ': ranks that do not agree when to estimate, or a deadlock' if ranks > 1 else ''
            raise SystemExit(f'STOPS: still running after {limit:.0f} s, while one rank took {first:.0f} s{why}'
                             ) from None
        text = ''
        for output in outputs:
            output.seek(0)
            text += output.read()
    if code := next((process.returncode for process in processes if process.returncode), 0):
        raise SystemExit(f'STOPS with exit code {code}: {last_words(text)}')
    return text


def last_words(text):
    """Return the line of a program's output that says why it ended: that of its last exception, whose message may have
    several lines, else the last one; '' if there is none."""
    lines = [re.sub(r'^\[rank\d+\]: ', '', line).strip() for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r'[\w.]+(Error|Exception): ', line)]
    return (raised or lines or [''])[-1]


def trained(out_dir, flags, ranks=1, first=None, late=False, nudge=False):
    """Train with `flags`. Return the run's `out_dir`; its `steps`, {step: {name: value}}; what was `unsaved` at the
    `stops` and which files it leaves, {(step, name): value}; the `lines` of text files, {name: number}; the `notes`
    that it prints; and how many `seconds` it took."""
    unsaved_path, started = out_dir.with_suffix('.pt'), time.monotonic()
    session = [__file__, '--session', json.dumps([str(unsaved_path), late, nudge])]
    text, steps = launch([*session, *flags, f'--out_dir={out_dir}'], ranks, first), {}
    seconds = time.monotonic() - started
    for line in read_metrics(out_dir / 'metrics.jsonl'):
        measured = {key: value for key, value in line.items() if not MACHINE.search(key)}
        steps.setdefault(line['iter'], {}).update(leaf for key in measured for leaf in leaves(measured[key], key))
    for path in checkpoints(out_dir):
        state = load_checkpoint(path)[1]
        saved = dict(weights=state['model'], optimizer=state['optimizer'],
                     TrainState={key: value for key, value in state['train_state'].items() if key != 'seconds'})
        steps.setdefault(number(path), {}).update(leaf for part in saved for leaf in leaves(saved[part], part))
    files = {path.name: path.read_bytes() for path in out_dir.iterdir() if path.is_file() and number(path) is None}
    hashes = {(max(steps), f'file {name}'): hashlib.sha256(data).hexdigest()[:16] for name, data in files.items()}
    lines = {name: data.count(b'\n') for name, data in files.items() if b'\0' not in data}
    return SimpleNamespace(out_dir=out_dir, steps=steps, unsaved=load_pt(unsaved_path) | hashes, lines=lines,
                           notes=[line for line in text.splitlines() if line.startswith(NOTES)], seconds=seconds)


def resumed(whole, places, flags):
    """Return what `trained` does for a run that is stopped and resumed at the `places`, as long as `whole`."""
    run = whole
    for step in places:
        before, out_dir = run, whole.out_dir.with_name(f'resumed_{step}')
        out_dir.mkdir()
        for path in before.out_dir.iterdir():  # as if the run had been killed after its last step
            if path.is_file() and number(path) is None:
                shutil.copy(path, out_dir)
        kept = Path(f'{before.out_dir}.{step}')
        shutil.copy(kept if kept.is_file() else path_of(before.out_dir, step), path_of(out_dir, step))
        run = trained(out_dir, flags, first=whole.seconds)
        run.steps |= {i: values for i, values in before.steps.items() if i < step}
        run.unsaved |= {key: value for key, value in before.unsaved.items() if key[0] < step}
    return run


def evaluated(whole, sequences):
    """Compare the last validation losses of a run with scripts/eval.py's of its last checkpoint. Return (whether they
    agree, and a text)."""
    script, logged = str(ROOT / 'scripts/eval.py'), whole.steps[max(whole.steps)]
    text = launch([script, str(whole.out_dir), f'--eval_sequences={sequences}', '--device=cpu'], first=whole.seconds)
    for result in map(json.loads, re.findall(r'^\{.*\}$', text, re.MULTILINE)):
        expected = logged.get(f'val/loss/{Path(result["data"]).parent.name}', logged['val/loss'])  # of a mixture's part
        if not math.isclose(result['loss'], expected, rel_tol=1e-5):
            return False, (f'DIFFERS: scripts/eval.py measures {result["loss"]:.9g} of the last checkpoint instead of '
                           f'{expected:.9g} (it makes the model of GPTConfig and state_dict alone)')
    return True, 'equal up to rounding'


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons


def apart(one, two, start=None):
    """Return the relative difference of two values, 0 where they are equal, infinity for different kinds; given where
    a tensor has been at the `start`, relative to how far it is from there."""
    if equal(one, two):
        return 0.0
    if not all(isinstance(value, (bool, int, float, torch.Tensor)) for value in (one, two)):
        return math.inf
    one, two = (torch.as_tensor(value, dtype=torch.float64) for value in (one, two))
    size = max(one.norm(), two.norm())
    if start is not None:
        size = max((one - start).norm(), TOLERANCE * size)  # because rounding is relative to the tensor
    return ((one - two).norm() / size).item() if one.shape == two.shape else math.inf


def difference(ours, theirs, nudged=None, whole=True):
    """Compare the steps of two runs. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference, of weights relative to how far they have moved, is below TOLERANCE, or ten times what that run has shown
    so far for values of this kind. Unless `whole`, the optimizer's state is left out, which cannot be read from shards.
    """
    largest, drift, starts = (0.0, ''), {}, {}
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            relative = apart(a[name], nudged.get(step, {}).get(name, 'nothing'), starts.get(name))
            drift[kind(name)] = max(drift.get(kind(name), 0.0), relative)
        for name in {**a, **b}:
            if nudged and name.startswith(COUNTS) or not whole and name.startswith('optimizer'):
                continue
            x, y = a.get(name, 'nothing'), b.get(name, 'nothing')
            relative = apart(x, y, starts.get(name))
            allowed = max(TOLERANCE, 10 * drift.get(kind(name), 0.0)) if nudged else 0.0
            if not relative <= allowed:  # NaN, too
                return False, f'DIFFERS from step {step}: {name} is {shown(y)} instead of {shown(x)}'
            largest = max(largest, (relative, f'{name} at step {step}'))
        starts = {name: value for name, value in a.items() if name.startswith('weights')} | starts
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
            plain, split, nudged = map(run, ('plain', name, 'nudged'))
            agrees, text = difference(plain.steps, split.steps, nudged.steps, whole=name != 'sharded')
            for file, lines in split.lines.items() if name == 'two ranks' else ():
                if lines != plain.lines.get(file):
                    agrees, text = False, f'{text}; file {file} has {lines} lines instead of {plain.lines.get(file)}'
            return agrees, text
        agrees, text = difference(run('whole').steps, run(name).steps)
        whole, again, after = (run(other).unsaved for other in ('whole', 'again', name))
    except SystemExit as error:
        return False, str(error)
    if name == 'resumed':
        # What differs between any two runs does not count.
        lost = {key[1]: f'{key[1]} ({shown(after[key])} instead of {shown(value)})' for key, value in whole.items()
                if equal(again.get(key), value) and not equal(after.get(key, value), value)}
        if lost:
            agrees, text = False, f'{text}; a resume does not bring back {", ".join([*lost.values()][:4])}'
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
    parser.add_argument('--steps', type=at_least(7), default=10, help='of each run (default: 10)')
    comparisons = [*EXACT, 'evaluated', *ROUNDED]
    parser.add_argument('--only', choices=comparisons, nargs='+', default=comparisons, help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags, failed, skipped = shrunk(flags, args.steps), False, {}
    c = train.resolve(flags, world_size=1)
    if not can_compile('cpu'):
        skipped['compiled'] = 'no C++ compiler or no Python.h'
    row = train.optimizers.row(c.optimizer_name)
    if row.hook.hessian_products:
        skipped['recomputed'] = f'{c.optimizer_name} has no --activation_checkpointing'
    if not row.shards or c.hessian_parts > 1:
        skipped['sharded'] = 'no shards=True, or an estimate in parts, which draws other labels there'
    drops = [f'--{key}=0' for key, value in c.values.items() if 'drop' in key and value]  # which draw by micro-batch
    plain = [*flags, *drops]
    names = [name for name in args.only if name not in skipped]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        runs = dict(whole=pool.submit(trained, place / 'whole', flags))
        runs['again'] = pool.submit(trained, place / 'again', flags, late=True)
        try:
            whole = runs['whole'].result()
        except SystemExit as error:
            raise SystemExit(f'{error}; the model is small here, n_embd = {c.n_embd} and block_size = {c.block_size}, '
                             'unless flags say otherwise') from None
        submit = functools.partial(pool.submit, trained, first=whole.seconds)
        if 'resumed' in names:
            runs['resumed'] = pool.submit(resumed, whole, stops(c.max_iters), flags)
        if 'evaluated' in names:
            runs['evaluated'] = pool.submit(evaluated, whole, c.eval_sequences)
        if any(name in ROUNDED for name in names):
            runs['plain'] = submit(place / 'plain', plain) if drops else runs['whole']
            runs['nudged'] = submit(place / 'nudged', plain, nudge=True)
        for name in names:
            if name in ROUNDED:
                ranks = 2 if name in ('two ranks', 'sharded') else 1
                runs[name] = submit(place / name, [*plain, *ROUNDED[name]], ranks)
        print(f'the first run took {whole.seconds:.0f} s; {len({*runs.values()}) - 1} more, {os.cpu_count()} at a time',
              file=sys.stderr)
        for name in args.only:
            if name in names:
                agrees, text = verdict(name, lambda name: runs[name].result())
                failed |= not agrees
            else:
                text = f'skipped: {skipped[name]}'
            print(f'{name:<15} {text}', flush=True)
        print(*whole.notes, sep='\n')
    sys.exit(failed)


if __name__ == '__main__':
    main()
