"""Rehearse a run after an edit: its numbers must not depend on how it is carried out.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; stopped and resumed; in smaller micro-batches; on two ranks; on their shards; with
activation checkpointing; compiled. It compares metrics, weights and the optimizer's state after each step, and the last
validation loss with scripts/eval.py's of the checkpoint. It prints a line for each: equal; equal up to rounding; or the
first step and the first number or tensor that differ. Exit status 1 if something differs. It warns where the model or
its loss is not as training takes it to be (`contract`).
Checkpoints of every step go to a temporary directory: with GPT-2's ids 2 GB.
"""

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
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import train
from analysis.runs import read_metrics
from runtime.arguments import argument_parser, at_least
from runtime.checkpoint import checkpoints, load_checkpoint, number
from runtime.device import can_compile
from runtime.files import one_line_errors
from runtime.gpt import evaluation_mode
from runtime.optim import global_norm
from runtime.optimizer_state import equal, leaves
from runtime.signals import undo_at_end

EXACT = 'model', 'resumed', 'evaluated'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'sharded': ['--parallel=fsdp'],
           'recomputed': ['--activation_checkpointing=True'], 'compiled': ['--compile=True']}  # name → its flags
STOP = 6  # the step before which a run is resumed: after an evaluation, before an estimate and a line of the log
PATIENCE = 300  # seconds, and ten times those of the first run, after which a run is ended
TOLERANCE = 1e-3  # of a difference that may be rounding, relative to the norm of a tensor
COUNTS = 'TrainState.', 'grad_clipped', 'update_unclipped'  # of which rounding may change one
MACHINE = re.compile('(^|[_/])(time|ms|sec|seconds|mfu|memory)(_|$)')  # metrics of the machine

# ----------------------------------------------------------------------------------------------------------------------
# The model's contract


@undo_at_end()
def check_model(flags):
    """Print a warning for each part of the `contract` that the model of a run with `flags` does not keep."""
    run, loader = train.begin(train.resolve(flags))
    sequences = next(loader)
    loader.close()
    for text in contract(run, sequences):
        print(f'warning: {text}')


def contract(run, sequences):
    """Yield what is not as training, sampling or an estimate takes it to be in the model and its loss."""
    model, X, Y = run.raw_model, sequences[:, :-1], sequences[:, 1:]
    for p in run.params:  # because nothing is seen through zeros, as of output projections
        if p.dim() > 1 and not p.any():
            p.data.normal_(std=0.02)
    with torch.no_grad(), evaluation_mode(model):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        logits = model(X.clone(), Y.clone())[0]
        for cut in range(1, X.size(1)):
            later = torch.cat([X[:, :cut], (X[:, cut:] + 1) % model.config.vocab_size], 1)
            if not close(model(later, Y.clone())[0][:, :cut], logits[:, :cut]):
                yield ('in evaluation mode, later tokens or chance change the logits of earlier positions, so that '
                       'losses may be far too low; use is_causal=True in attention, and self.training in dropout')
                break
        if not close(model(X.clone())[0][:, -1], logits[:, -1]):
            yield ('GPT.forward returns other logits without targets, with which scripts/sample.py samples, than with '
                   'them, of which val/loss is; change them before `if targets is None`, or in `token_loss`')
        if changed := [name for name, buffer in model.named_buffers() if not equal(buffer, buffers.get(name))]:
            yield f'GPT.forward changes the buffer {changed[0]} in evaluation mode, too; do so only if self.training'
        if not close(train.cross_entropy(logits, Y), -logits.log_softmax(-1).gather(-1, Y[..., None])[..., 0]):
            yield ('loss.py: cross_entropy is not the plain one, as val/loss and the labels of Sophia-G must be; put '
                   'smoothed labels and the like into `token_loss`')

    targets = Y.clone()
    logits, loss, *more = model(X.clone(), targets)
    if run.hessian.samples_labels and not more:
        yield from contract_of_estimate(run.params, logits, loss, targets >= 0)
    trained = train.train_step(run, sequences, 0).loss
    if not math.isclose(trained, loss.item(), rel_tol=TOLERANCE):
        yield (f'the first step trains on a loss of {trained:.6g}, and GPT.forward returns {loss.item():.6g}, which is '
               'all that evaluation and Hessian estimates see; put what training adds into `token_loss`')


def contract_of_estimate(params, logits, loss, counts):
    """Yield what Gauss-Newton-Bartlett does not see of `loss`, which it takes for a function of the `logits` with the
    Hessian of their cross-entropy at the positions that count."""
    gradient, = torch.autograd.grad(loss, logits, create_graph=True, materialize_grads=True)
    whole, seen = (torch.autograd.grad(output, params, weight, retain_graph=True, materialize_grads=True)
                   for output, weight in ((loss, None), (logits, gradient.detach())))
    share = global_norm(torch._foreach_sub(whole, seen)) / global_norm(whole)
    if share > 0.01:
        yield (f'terms of the loss that are not functions of the logits make {share:.0%} of its gradient; Sophia-G '
               'does not see them, so h may be too small; see docs/hacking.md, "Another loss"')
    signs, p = 1.0 - 2 * (torch.arange(logits.size(-1)) % 2), logits.detach().softmax(-1)
    expected = p * (signs - (p @ signs)[..., None]) * counts[..., None] / counts.sum()
    try:
        product, = torch.autograd.grad(gradient, logits, signs.expand_as(logits))
    except RuntimeError:  # a loss without a second derivative
        return
    apart = (product - expected).norm() / expected.norm()
    if apart > 0.1:
        yield (f'the Hessian of the loss in the logits differs by {apart:.0%} from that of their cross-entropy over '
               'targets other than -1, which Sophia-G estimates: predictions are masked, weighted, or of other logits; '
               'see docs/hacking.md, "Another loss"')


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Runs that must agree


def session(nudge, flags):
    """Train with `flags` and save after every step; if `nudge`, from weights that differ in their last bits."""
    c, train_step = train.resolve(flags), train.train_step

    def saved_step(run, sequences, iteration):
        if nudge and iteration == 0:
            with torch.no_grad():
                for p in run.params:
                    p.mul_(1 + 2e-7 * torch.randint_like(p, 2))
        run.stops.save = True
        return train_step(run, sequences, iteration)

    train.train_step = saved_step
    train.train(c)


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
    environments = [dict(os.environ, OMP_NUM_THREADS='1')]
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        environments = [environments[0] | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)) for rank in range(ranks)]
    limit = None if first is None else PATIENCE + 10 * first
    with tempfile.TemporaryFile('w+', errors='replace') as output:
        processes = [subprocess.Popen([sys.executable, *argv], stdout=output, stderr=subprocess.STDOUT, env=environment)
                     for environment in environments]
        try:
            for process in processes:
                process.wait(limit)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
                process.wait()
            raise SystemExit(f'STOPS: still running after {limit:.0f} s, while one rank took {first:.0f} s') from None
        output.seek(0)
        text = output.read()
    if code := next((process.returncode for process in processes if process.returncode), 0):
        raise SystemExit(f'STOPS with exit code {code}: {last_words(text)}')
    return text


def last_words(text):
    """Return the line of a program's output that says why it ended: that of its last exception, whose message may have
    several lines, else the last one; '' if there is none."""
    lines = [re.sub(r'^\[rank\d+\]: ', '', line).strip() for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r'[\w.]+(Error|Exception): ', line)]
    return (raised or lines or [''])[-1]


def trained(out_dir, flags, ranks=1, first=None, nudge=False):
    """Train with `flags`. Return the run's `out_dir`, its `steps`, {step: {name: value}}, and how many `seconds` it
    took."""
    started, steps = time.monotonic(), {}
    launch([__file__, '--session', str(int(nudge)), *flags, f'--out_dir={out_dir}'], ranks, first)
    seconds = time.monotonic() - started
    for line in read_metrics(out_dir / 'metrics.jsonl'):
        measured = {key: value for key, value in line.items() if not MACHINE.search(key)}
        steps.setdefault(line['iter'], {}).update(leaf for key in measured for leaf in leaves(measured[key], key))
    for path in checkpoints(out_dir):
        state = load_checkpoint(path)[1]
        saved = dict(weights=state['model'], optimizer=state['optimizer'],
                     TrainState={key: value for key, value in state['train_state'].items() if key != 'seconds'})
        steps.setdefault(number(path), {}).update(leaf for part in saved for leaf in leaves(saved[part], part))
    return SimpleNamespace(out_dir=out_dir, steps=steps, seconds=seconds)


def resumed(out_dir, flags, whole):
    """Return what `trained` does for a run that is resumed before the step STOP of the run `whole`."""
    out_dir.mkdir()
    for path in whole.out_dir.iterdir():  # as if the run had been killed after its last step
        if path.is_file() and number(path) in (None, STOP):
            shutil.copy(path, out_dir)
    run = trained(out_dir, flags, first=whole.seconds)
    run.steps |= {i: values for i, values in whole.steps.items() if i < STOP}
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


def difference(ours, theirs, nudged=None):
    """Compare the steps of two runs. Return (whether they agree, and a text that says how far).

    They agree if they are equal, or, given a third run whose weights were `nudged`, up to rounding: the relative
    difference, of weights relative to how far they have moved, is below TOLERANCE, or ten times what that run has shown
    so far for values of this kind.
    """
    equally, drift, starts = True, {}, {}
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            relative = apart(a[name], nudged.get(step, {}).get(name, 'nothing'), starts.get(name))
            drift[kind(name)] = max(drift.get(kind(name), 0.0), relative)
        for name in {**a, **b}:
            if nudged and name.startswith(COUNTS):
                continue
            x, y = a.get(name, 'nothing'), b.get(name, 'nothing')
            relative = apart(x, y, starts.get(name))
            allowed = max(TOLERANCE, 10 * drift.get(kind(name), 0.0)) if nudged else 0.0
            if not relative <= allowed:  # NaN, too
                return False, (f'DIFFERS from step {step}: {name} is {shown(y)} instead of {shown(x)}' + (
                    '' if nudged else '; state may live in TrainState, in buffers, and in the optimizer\'s state and '
                    'param_groups'))
            equally &= relative == 0
        starts = {name: value for name, value in a.items() if name.startswith('weights')} | starts
    return True, 'equal' if equally else 'equal up to rounding'


def kind(name):
    """Return what the names of comparable values share: 'weights.weight', 'optimizer.exp_avg', a metric."""
    return re.sub(r'\..*\.', '.', name)


def shown(value):
    return f'a tensor of norm {value.double().norm():.9g}' if isinstance(value, torch.Tensor) else str(value)


def skipped(c):
    """Return why some comparisons are left out, {name: text}."""
    found, row = {}, train.optimizers.row(c.optimizer_name)
    if not can_compile('cpu'):
        found['compiled'] = 'no C++ compiler or no Python.h'
    if row.hook.hessian_products:
        found['recomputed'] = f'{c.optimizer_name} has no --activation_checkpointing'
    if not row.shards or c.hessian_parts > 1:
        found['sharded'] = 'no shards=True, or an estimate in parts, which draws other labels there'
    return found


@one_line_errors()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--model']:
        return check_model(argv[1:])
    if argv[:1] == ['--session']:
        return session(int(argv[1]), argv[2:])
    parser = argument_parser(__doc__, allow_abbrev=False, usage='%(prog)s CONFIG [--KEY=VALUE ...]')
    parser.add_argument('--steps', type=at_least(STOP + 1), default=10, help='of each run (default: 10)')
    comparisons = [*EXACT, *ROUNDED]
    parser.add_argument('--only', choices=comparisons, nargs='+', default=comparisons, help='some of the comparisons')
    args, flags = parser.parse_known_args(argv)
    flags = shrunk(flags, args.steps)
    c = train.resolve(flags, world_size=1)
    # Without dropout, which draws by micro-batch
    plain_flags = flags + [f'--{key}=0' for key, value in c.values.items() if 'drop' in key and value]
    left_out, failed = skipped(c), False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        place = Path(folder)
        whole = trained(place / 'whole', flags) if [*args.only] != ['model'] else None
        if {*args.only} & {*ROUNDED}:
            plain = trained(place / 'plain', plain_flags) if plain_flags != flags else whole
            nudged = trained(place / 'nudged', plain_flags, nudge=True)

        def compare(name):
            """Return (whether a run agrees with what it must equal, and a text)."""
            if name in left_out:
                return True, f'skipped: {left_out[name]}'
            try:
                if name == 'model':
                    text = launch([__file__, '--model', *plain_flags, f'--out_dir={place / name}'])
                    return True, '\n'.join(re.findall('^warning: .*$', text, re.MULTILINE)) or 'as training takes it'
                if name == 'resumed':
                    return difference(whole.steps, resumed(place / name, flags, whole).steps)
                if name == 'evaluated':
                    return evaluated(whole, c.eval_sequences)
                ranks = 2 if name in ('two ranks', 'sharded') else 1
                run = trained(place / name, [*plain_flags, *ROUNDED[name]], ranks, whole.seconds)
                return difference(plain.steps, run.steps, nudged.steps)
            except SystemExit as error:
                return False, str(error)

        for name, (agrees, text) in zip(args.only, pool.map(compare, args.only)):
            failed |= not agrees
            print(f'{name:<15} {text}', flush=True)
    sys.exit(failed)


if __name__ == '__main__':
    main()
