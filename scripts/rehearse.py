"""Rehearse a run after an edit, because its numbers must not depend on the way it is executed.

  python scripts/rehearse.py config/quickstart.py --optimizer_name=sophiah

trains a few steps of train.py with the config's optimizer, schedule and data, but a small model and short sequences, in
float32 on a CPU: in one go; stopped and resumed; in smaller micro-batches; on two ranks; sharded over them; with
activation checkpointing; compiled. It compares metrics, weights and the optimizer's state after each step, and the last
validation loss with scripts/eval.py's. It prints one line per run: equal; equal up to rounding; or the first number and
the first tensor that differ. The exit status is 1 if something differs. It warns if the model or its loss breaks the
contract with training, such as logits that depend on later tokens, or curvature that Sophia-G's estimate does not see.

It misses state and loss terms that matter only after its steps; gradient hooks, which estimates skip; initial values
that a constructor gives a linear layer or an embedding, because GPT's `self.apply` overwrites them; and numbers
computed from settings: `flops_per_token`, an estimate's `cost`, the update in scripts/curvature.py. Checkpoints of
every step go to a temporary directory, and take 2 GB with GPT-2's vocabulary.
"""

import functools
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

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
from runtime.sharded import read_optimizer

EXACT = 'model', 'resumed', 'evaluated'
ROUNDED = {'micro-batches': ['--batch_size=2'], 'two ranks': [], 'sharded': ['--parallel=fsdp'],
           'recomputed': ['--activation_checkpointing=True'], 'compiled': ['--compile=True']}  # name → its flags
STOP = 6  # a run resumes before this step, after an evaluation, and before an estimate and a log line
PATIENCE = 900  # seconds after which a run counts as hung
close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-5)
TOLERANCE = 1e-3  # largest difference that may be rounding, relative to a tensor's norm
COUNTS = 'TrainState.', 'grad_clipped', 'update_unclipped'  # counts, which rounding may change
MACHINE = re.compile('(^|[_/])(time|ms|sec|seconds|mfu|memory)(_|$)')  # metrics that depend on the machine

# ----------------------------------------------------------------------------------------------------------------------
# The model's contract


def contract(flags):
    """Yield a line for each way in which the model or loss of a run with `flags` breaks the contract."""
    run, loader = train.begin(train.resolve(flags))
    model, sequences = run.raw_model, next(loader)
    loader.close()
    X, Y = sequences[:, :-1], sequences[:, 1:]
    known = {*model.parameters(), *model.modules()}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if any(isinstance(item, (torch.nn.Parameter, torch.nn.Module)) and item not in known for item in items):
                yield f'{prefix}.{key} holds parameters that are neither trained nor saved; use nn.ModuleList there'
    for p in run.params:  # zeros, as in output projections, would hide the layers below
        if p.dim() > 1 and not p.any():
            p.data.normal_(std=0.02)

    with torch.no_grad(), evaluation_mode(model):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        logits, loss = model(X.clone(), Y.clone())[:2]
        if logits.shape[:-1] != X.shape or loss.dim():
            return (yield 'GPT.forward does not return (logits of all positions, 0-d mean loss)')
        if not close(model(torch.cat([X, X]), torch.cat([Y, Y]))[1], loss):
            yield 'GPT.forward returns another loss for the same sequences twice, so it is not a mean over predictions'
        for cut in range(1, X.size(1)):
            later = torch.cat([X[:, :cut], (X[:, cut:] + 1) % model.config.vocab_size], 1)
            if not close(model(later, Y.clone())[0][:, :cut], logits[:, :cut]):
                yield ('in evaluation mode, later tokens or chance change the logits of earlier positions, so that '
                       'losses may be far too low; use is_causal=True in attention, and self.training in dropout')
                break
        if not close(model(X.clone())[0][:, -1], logits[:, -1]):
            yield ('GPT.forward returns other logits without targets, which scripts/sample.py uses, than with them, '
                   'which val/loss uses; change them before `if targets is None`, or in `token_loss`')
        if changed := [name for name, buffer in model.named_buffers() if not equal(buffer, buffers.get(name))]:
            yield f'GPT.forward changes the buffer {changed[0]} in evaluation mode, too; do so only if self.training'
        if not close(train.cross_entropy(logits, Y), -logits.log_softmax(-1).gather(-1, Y[..., None])[..., 0]):
            yield ('loss.py: cross_entropy is not the plain one, which val/loss and the labels of Sophia-G need; put '
                   'label smoothing and other changes into `token_loss`')

    targets = Y.clone()
    with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
        logits, loss = model(X.clone(), targets)
        if run.hessian.samples_labels:
            yield from contract_of_estimate(run.params, logits, loss, targets)
    trained = train.train_step(run, sequences, 0).loss
    if not math.isclose(trained, loss.item(), rel_tol=TOLERANCE):
        yield (f'the first step trains on a loss of {trained:.6g}, but GPT.forward returns {loss.item():.6g}, and '
               'evaluation and Hessian estimates see only that; put additional terms into `token_loss`')


def contract_of_estimate(params, logits, loss, targets):
    """Yield a line if the curvature of `loss` differs from Sophia-G's estimate, which uses the cross-entropy of
    `logits` at the targets that count. It compares a Hessian-vector product of each."""
    plain = train.cross_entropy(logits, targets).sum() / (targets >= 0).sum()
    signs = [1.0 - 2 * torch.randint_like(p, 2) for p in params]

    def product(loss):
        """Return the product of `signs` with the Hessian of `loss`, without the curvature of the logits themselves."""
        weights, = torch.autograd.grad(loss, logits, retain_graph=True, materialize_grads=True)
        rest = loss - (weights * logits).sum()
        gradient = torch.autograd.grad(rest, params, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(gradient, params, signs, retain_graph=True, materialize_grads=True)

    seen = product(plain)
    share = global_norm(torch._foreach_sub(product(loss), seen)) / global_norm(seen)
    if share > 0.1:
        yield (f'the curvature of the loss differs by {share:.0%} from the curvature that Sophia-G estimates, of the '
               'cross-entropy of the logits over targets other than -1; the loss has masks, weights, other logits or '
               'terms that are not functions of the logits; see docs/hacking.md, "Another loss"')


# ----------------------------------------------------------------------------------------------------------------------
# Runs that must agree


def session(nudge, flags):
    """Train with `flags`, and save after every step. With `nudge`, start from weights changed in their last bits."""
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
    # Estimates from 6 sequences make micro-batches of several sizes. Parts of 6 would not be the same on two ranks.
    small |= dict.fromkeys(own & {'hessian_batch_size'}, 4 if small.get('hessian_parts', 1) > 1 else 6)
    return [arg for arg in argv if arg[:2] != '--'] + [f'--{key}={value}' for key, value in small.items()] + [
        arg for arg in argv if arg[:2] == '--']


def launch(argv, ranks=1):
    """Run the script argv[0] on `ranks` ranks. Return their output, or exit with its last line if one fails."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    environments = [dict(os.environ, OMP_NUM_THREADS='1', RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                         LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
                    for rank in range(ranks)]
    with tempfile.TemporaryFile('w+', errors='replace') as output:
        processes = [subprocess.Popen([sys.executable, *argv], stdout=output, stderr=subprocess.STDOUT, env=environment)
                     for environment in environments]
        try:
            codes = [process.wait(PATIENCE) for process in processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f'STOPS: still running after {PATIENCE} s') from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    if code := next(filter(None, codes), 0):
        raise SystemExit(f'STOPS with exit code {code}: {last_words(text)}')
    return text


def last_words(text):
    """Return the last exception in a program's output, or else its last line, or ''."""
    lines = [re.sub(r'^\[rank\d+\]: ', '', line).strip() for line in text.strip().splitlines()]
    raised = [line for line in lines if re.match(r'[\w.]+(Error|Exception): ', line)]
    return (raised or lines or [''])[-1]


def trained(out_dir, flags, ranks=1, nudge=False):
    """Train with `flags`. Return {step: {name: value}} of the run's metrics, weights and states."""
    launch([__file__, '--session', str(int(nudge)), *flags, f'--out_dir={out_dir}'], ranks)
    steps = {}
    for line in read_metrics(out_dir / 'metrics.jsonl'):
        measured = {key: value for key, value in line.items() if not MACHINE.search(key)}
        steps.setdefault(line['iter'], {}).update(leaf for key in measured for leaf in leaves(measured[key], key))
    for path in checkpoints(out_dir):
        state = load_checkpoint(path)[1]
        optimizer = read_optimizer(path, state['optimizer'], {}) if path.is_dir() else state['optimizer']
        saved = dict(optimizer=optimizer, weights=state['model'],
                     TrainState={key: value for key, value in state['train_state'].items() if key != 'seconds'})
        steps.setdefault(number(path), {}).update(leaf for part in saved for leaf in leaves(saved[part], part))
    return steps


def resumed(out_dir, flags, whole, steps):
    """Resume the run in `whole` before the step STOP. Return all steps like `trained`, earlier ones from `steps`."""
    out_dir.mkdir()
    for path in whole.iterdir():  # imitates a run that was killed after its last step
        if path.is_file() and number(path) in (None, STOP):
            shutil.copy(path, out_dir)
    return trained(out_dir, flags) | {i: values for i, values in steps.items() if i < STOP}


def evaluated(out_dir, logged, sequences):
    """Compare a run's `logged` validation losses with scripts/eval.py's. Return (whether they agree, and a text)."""
    text = launch([str(ROOT / 'scripts/eval.py'), str(out_dir), f'--eval_sequences={sequences}', '--device=cpu'])
    for result in map(json.loads, re.findall(r'^\{.*\}$', text, re.MULTILINE)):
        expected = logged.get(f'val/loss/{Path(result["data"]).parent.name}', logged['val/loss'])  # if a mixture
        if not math.isclose(result['loss'], expected, rel_tol=1e-5):
            return False, (f'DIFFERS: scripts/eval.py measures {result["loss"]:.9g} instead of {expected:.9g}; it '
                           'builds the model from GPTConfig and state_dict alone')
    return True, 'equal up to rounding'


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons


def apart(one, two, start=None):
    """Return the relative difference of two values: 0 if they are equal, infinity if their kinds differ. With a
    tensor's initial value `start`, it is relative to the distance from there."""
    if equal(one, two):
        return 0.0
    if not all(isinstance(value, (bool, int, float, torch.Tensor)) for value in (one, two)):
        return math.inf
    one, two = (torch.as_tensor(value, dtype=torch.float64) for value in (one, two))
    size = max(one.norm(), two.norm())
    if start is not None:
        size = max((one - start).norm(), TOLERANCE * size)  # rounding is relative to the tensor
    return ((one - two).norm() / size).item() if one.shape == two.shape else math.inf


def difference(ours, theirs, nudged=None):
    """Compare the steps of two runs. Return (whether they agree, a text with the first number and tensor that differ).

    They agree if they are equal. With a third run whose weights were `nudged`, they also agree up to rounding, if each
    relative difference (for weights, relative to their movement) is at most TOLERANCE, or ten times the largest one so
    far of the nudged run for values of this kind.
    """
    found, equally, drift, starts = [], True, {}, {}
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(step, {}), theirs.get(step, {})
        for name in a if nudged else ():
            relative = apart(a[name], nudged.get(step, {}).get(name, 'nothing'), starts.get(name))
            drift[kind(name)] = max(drift.get(kind(name), 0.0), relative)
        for name in {**a, **b}:
            x, y = a.get(name, 'nothing'), b.get(name, 'nothing')
            relative = apart(x, y, starts.get(name))
            allowed = max(TOLERANCE, 10 * drift.get(kind(name), 0.0)) if nudged else 0.0
            if not (relative <= allowed or nudged and name.startswith(COUNTS)):  # also for NaN
                found.append((step, name, x, y))
            equally &= relative == 0
        starts = {name: value for name, value in a.items() if name.startswith('weights')} | starts
    if not found:
        return True, 'equal' if equally else 'equal up to rounding'
    first_tensor = [one for one in found if isinstance(one[2], torch.Tensor)][:1]
    first = [f'from step {step}: {name} is {shown(y)} instead of {shown(x)}' for step, name, x, y in
             found[:1] + first_tensor]
    advice = '' if nudged else "state may live in TrainState, in buffers, in the optimizer's state and param_groups"
    return False, f'DIFFERS {"; ".join(filter(None, [*dict.fromkeys(first), advice]))}'


def kind(name):
    """Return the kind of a value's name: 'weights.weight', 'optimizer.exp_avg', or a metric."""
    return re.sub(r'\..*\.', '.', name)


def shown(value):
    return f'a tensor of norm {value.double().norm():.9g}' if isinstance(value, torch.Tensor) else str(value)


def without_dropout(c):
    """Return flags that turn off every dropout setting, because dropout draws by micro-batch."""
    off = {key: one.type() for key, one in c.declared.items() if 'drop' in key and one.type is not str}
    return [f'--{key}={value}' for key, value in off.items() if c.values[key] and not c.declared[key].problem(value)]


def skipped(c):
    """Return {name: reason} of the comparisons to skip."""
    found, row = {}, train.optimizers.row(c.optimizer_name)
    if not can_compile('cpu'):
        found['compiled'] = 'no C++ compiler or no Python.h'
    if row.hook.hessian_products:
        found['recomputed'] = f'{c.optimizer_name} has no --activation_checkpointing'
    if not row.shards or c.hessian_parts > 1:
        found['sharded'] = 'no shards=True, or hessian_parts > 1, which draws other labels on shards'
    return found


@one_line_errors()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--model']:
        return print(*(f'warning: {text}' for text in contract(argv[1:])), sep='\n')
    if argv[:1] == ['--session']:
        return session(int(argv[1]), argv[2:])
    parser = argument_parser(__doc__, allow_abbrev=False, usage='%(prog)s CONFIG [--KEY=VALUE ...]')
    parser.add_argument('--steps', type=at_least(STOP + 1), default=10, help='steps per run (default: %(default)s)')
    names = [*EXACT, *ROUNDED]
    parser.add_argument('--only', choices=names, nargs='+', default=names, help='make only these comparisons')
    args, flags = parser.parse_known_args(argv)
    flags = shrunk(flags, args.steps)
    c = train.resolve(flags, world_size=1)
    plain_flags = flags + without_dropout(c)
    left_out, failed = skipped(c), False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        scratch = Path(folder)
        whole = trained(scratch / 'whole', flags) if args.only != ['model'] else None
        if {*args.only} & {*ROUNDED}:
            plain = trained(scratch / 'plain', plain_flags) if plain_flags != flags else whole
            nudged = trained(scratch / 'nudged', plain_flags, nudge=True)

        def compare(name):
            """Return (whether a run agrees with its reference, a text)."""
            if name in left_out:
                return True, f'skipped: {left_out[name]}'
            try:
                if name == 'model':
                    text = launch([__file__, '--model', *plain_flags, f'--out_dir={scratch / name}'])
                    return True, '\n'.join(re.findall('^warning: .*$', text, re.MULTILINE)) or 'fulfills the contract'
                if name == 'resumed':
                    return difference(whole, resumed(scratch / name, flags, scratch / 'whole', whole))
                if name == 'evaluated':
                    return evaluated(scratch / 'whole', whole[max(whole)], c.eval_sequences)
                ranks = 2 if name in ('two ranks', 'sharded') else 1
                return difference(plain, trained(scratch / name, [*plain_flags, *ROUNDED[name]], ranks), nudged)
            except SystemExit as error:
                return False, str(error)

        for name, (agrees, text) in zip(args.only, pool.map(compare, args.only)):
            failed |= not agrees
            print(f'{name:<15} {text}', flush=True)
    sys.exit(failed)


if __name__ == '__main__':
    main()
