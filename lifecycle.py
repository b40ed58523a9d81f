"""The log of a run, checks before the first step, faults, saving, the end."""

import contextlib
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import shapes
from optimizers import OPTIMIZERS, hessian_flops_per_token
from runtime import checkpoint, optim, runlog
from runtime.device import device_name
from runtime.distributed import one_message, under_torchrun
from runtime.files import warn, write_text
from runtime.signals import NOT_FINITE, STOPPED

# ----------------------------------------------------------------------------------------------------------------------
# The start


def open_log(run, origin, train_data):
    """Return the `RunLog` of a run, and describe the run in config.json and on the terminal."""
    c, world, state = run.config, run.world, run.state
    parameters, flops = shapes.num_params(run.raw_model), shapes.flops_per_token(run.raw_model)
    writes = world.is_master and not c.eval_only
    if writes:
        (Path(c.out_dir) / checkpoint.FAILED).unlink(missing_ok=True)
        runlog.rewind_log(Path(c.out_dir) / 'metrics.jsonl', state.iter, state.last_eval_iter)
        runlog.describe_run(c.out_dir, c.values, c.sources, world_size=world.size, parameters=parameters,
                            flops_per_token=flops, hessian_flops_per_token=hessian_flops_per_token(c.values, flops),
                            data=run.about['data'], changes=origin.changes, device=device_name(world.device),
                            code=origin.code)
    log = runlog.RunLog(c.out_dir if writes else None, c.values, world.is_master)
    if origin.path:
        log.print(f'resuming from {origin.path} at iteration {state.iter} of {c.max_iters}')
    for line in (*(f'changed: {line}' for line in origin.differences), *c.lines(), *notes(c)):
        log.print(line)
    log.print(f'{parameters:,} parameters; {len(train_data):,} training tokens; '
              f'{c.total_batch_size * c.block_size:,} tokens per iteration = {world.size} device(s) × '
              f'{c.gradient_accumulation_steps} × {c.batch_size} × {c.block_size}')
    return log


def notes(c):
    """Yield lines about settings that are valid but may surprise."""
    if c.device.startswith('cuda') and not c.compile and 'compile' not in c.given:
        yield ('warning: compile = False because this machine has no C compiler or no Python.h, and training is much '
               'slower; install gcc and python3-dev')
    if c.compile:
        yield 'note: the first iterations compile the model, which takes a minute or more'
    if c.sources['optimizer_name'] == 'flag' != c.sources['out_dir']:
        others = OPTIMIZERS.keys() - {c.optimizer_name}
        if named := others & {*re.split('[^a-z_]', Path(c.out_dir).name)}:
            yield (f'note: out_dir = {c.out_dir} names {min(named)}, but this run is of {c.optimizer_name}; set '
                   '--out_dir')
    if c.decay_lr and c.warmup_iters >= c.max_iters:
        yield (f'note: the run of {c.max_iters} iterations ends in its warm-up of {c.warmup_iters}; see '
               '--warmup_iters')


@one_message()
def check_forward(run, sequences):
    """Stop the run before the first step when the forward pass of the model is not fit for training or estimates.

    Collective: every rank must call it. `sequences`: a micro-batch of this rank. Changes neither buffers nor gradients.
    """
    with same_buffers(run.raw_model):
        check_outputs(run, sequences[:1])
        if run.world.size > 1 and not run.world.sharded:
            check_ranks(run, sequences)


@contextlib.contextmanager
def same_buffers(model):
    """Undo, at the end of the context, what forward passes change in the buffers of `model`."""
    before = [(module, name, buffer, buffer.clone()) for module in model.modules()
              for name, buffer in module.named_buffers(recurse=False)]
    yield
    for module, name, buffer, value in before:
        setattr(module, name, buffer.copy_(value))  # it may have been assigned anew, in another shape


def check_ranks(run, sequences):
    """Stop the run unless all parameters get gradients on all ranks.

    Replicas wait for each other's gradients. A mixture of experts whose tokens miss an expert on one rank would hang
    without saying why.
    """
    world, X = run.world, sequences[:, :-1].contiguous()  # as in a step, so that what is compiled serves it

    def backward(sync):
        world.set_gradient_sync(sync)
        with run.autocast:
            loss = run.model(X, sequences[:, 1:].clone())[1]
        run.scaler.scale(loss).backward()

    backward(sync=False)
    has = world.gather(torch.tensor([float(p.grad is not None) for p in run.params], device=world.device)).bool()
    run.optimizer.zero_grad(set_to_none=True)
    missing = (~has).any(0).tolist()
    if any(missing):
        first = missing.index(True)
        name = {p: name for name, p in run.raw_model.named_parameters()}[run.params[first]]
        problem = ('has no gradient, for which the ranks would wait; remove it from the model, or freeze it with '
                   'requires_grad_(False)')
        if has[:, first].any():
            problem = ('has a gradient on some ranks only; let every rank use it, see docs/hacking.md, "A mixture of '
                       'experts"')
        raise SystemExit(f'{name}: {problem}')
    # After its first sum over ranks DDP forms other buckets, on which the order depends in which three or more ranks
    # are added. A resumed run must have them from its first iteration on, like the uninterrupted one.
    backward(sync=True)
    run.optimizer.zero_grad(set_to_none=True)


def check_outputs(run, sequences):
    """Stop the run when the plain model does not return (logits, loss), changes what checkpoints hold of it, or masks
    what `check_masks` finds."""
    X, Y, masks = sequences[:, :-1], sequences[:, 1:].clone(), run.hessian.samples_labels
    # Eager, because blocks compiled for one sequence are compiled again for any number, and so are slower.
    eager = torch.compiler.set_stance('force_eager') if run.config.compile else contextlib.nullcontext()
    before = shapes_of(run.raw_model)
    with eager, run.autocast, torch.set_grad_enabled(masks):
        outputs = run.raw_model(X, Y)
    if changed := dict(shapes_of(run.raw_model).items() ^ before.items()):
        raise SystemExit(f'model.py: GPT.forward makes or resizes the buffer {min(changed)}, so that no checkpoint '
                         'could be loaded; make it in the constructor, or with persistent=False')
    logits, loss = outputs[:2] if isinstance(outputs, (tuple, list)) and len(outputs) > 1 else (None, None)
    if getattr(logits, 'shape', ())[:2] != Y.shape or getattr(loss, 'shape', None) != ():
        raise SystemExit('model.py: with targets, GPT.forward must return the logits of all positions, (B, T, '
                         'vocab_size), and the mean loss, a 0-d tensor')
    if masks:
        check_masks(run, Y, logits, loss)
    run.world.reshard(run.raw_model)


def shapes_of(model):
    """Return {name: shape} of what a checkpoint holds of `model`."""
    return {name: getattr(value, 'shape', None) for name, value in model.state_dict().items()}


def check_masks(run, targets, logits, loss):
    """Stop the run when the training loss leaves out positions that count in `targets` after the forward pass.

    The labels that Gauss-Newton-Bartlett samples there would enter the estimate. A position is left out if the gradient
    of the loss in its logits is 0 throughout.
    """
    gradient, = torch.autograd.grad(run.scaler.scale(loss), logits, allow_unused=True)
    if gradient is None:
        if run.world.is_master:
            warn('model.py: the loss is not a function of the logits that GPT.forward returns; make sure that what it '
                 'masks it sets to -1 in targets, in place')
        return
    left_out = int(run.world.sum(((targets >= 0) & (gradient == 0).all(-1)).sum()))
    if left_out:
        raise SystemExit(f'model.py: GPT.forward leaves {left_out} of {targets.numel() * run.world.size} positions out '
                         'of the loss whose targets are not -1, so the Hessian estimate would take them; mask them in '
                         'place (targets[…] = -1), see docs/hacking.md, "Another loss"')


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def not_finite(**numbers):
    """Return words that name the first of `numbers` that is not finite; '' if all are finite."""
    return next((f'the {name} is not finite' for name, number in numbers.items() if not math.isfinite(number)), '')


def check_step(run, step, loader):
    """Count a step whose update was skipped, and end the run after too many.

    After the first update also end it, SystemExit, when no checkpoint could hold its state.
    """
    c, state = run.config, run.state
    if not step.problem:
        state.skipped_in_a_row = 0
        state.clipped += bool(c.grad_clip and c.grad_clip < step.grad_norm)
        if run.fresh is not None:
            with run.world.exit_together():
                checkpoint.check_plain(asdict(state), 'TrainState')
            checkpoint.check_round_trip(run.world, run.raw_model, run.optimizer, run.fresh)
            run.fresh = None  # frees its state
        return
    state.skipped_in_a_row += 1
    sequences = loader.describe(state.iter, run.world.gather(step.losses))
    where = f' ({sequences})' if sequences else ''
    overflow = run.scaler.is_enabled() and 'gradient' in step.problem  # of the scaled loss
    if state.skipped_in_a_row > (max(c.skip_nonfinite, optim.OVERFLOWS) if overflow else c.skip_nonfinite):
        abort(run, step.problem, f', or skip it with --skip_nonfinite={state.skipped_in_a_row}', where)
    if not overflow:
        run.log.print(f'iter {state.iter}: {step.problem}; skipped{where}')


def abort(run, problem, otherwise='', where=''):
    """End a run that cannot continue, with one line on stderr and in failed.txt. Collective: every rank must call it.

    The line holds the problem, what might help (a lower learning rate or `otherwise`), and `where` it happened, which
    is appended unchanged.
    """
    run.log.close()
    if run.world.is_master:
        out_dir = Path(run.config.out_dir)
        advice = 'resume' if checkpoint.checkpoints(out_dir) else 'start again'
        line = (f'iteration {run.state.iter}: {problem}; {advice} with a lower --learning_rate{otherwise}. Nothing of '
                f'the iteration was saved{where}')
        print(line, file=sys.stderr)
        write_text(out_dir / checkpoint.FAILED, line + '\n')
    raise SystemExit(NOT_FINITE)


# ----------------------------------------------------------------------------------------------------------------------
# Saving, and the end


def save(run, best=False):
    """Save a checkpoint; run.saved says whether that succeeded. Collective: every rank must call it."""
    c, state = run.config, run.state
    check_weights(run)
    run.stops.save = False  # a request to save is answered
    with optim.evaluating(run.optimizer):
        path = checkpoint.save_run(run.world, c.out_dir, run.raw_model, run.optimizer, dict(
            iter_num=state.iter, best_val_loss=state.best_val_loss, config=c.values, train_state=asdict(state),
            scaler=run.scaler.state_dict(), **run.about), best, c.keep_checkpoints)
    run.saved = path is not None
    if run.saved:
        run.log.print(f'saved {path}')


def check_weights(run):
    """End a run whose parameters are not finite. Warn of one that was thawed too late for the optimizer, and where the
    ranks' replicas of the model differ, because only rank 0's is saved. Collective: every rank must call it."""
    world, norm = run.world, optim.global_norm(run.params)
    if not norm.isfinite():
        abort(run, 'the parameters are not finite')
    trained = set(run.params)
    late = [name for name, p in run.raw_model.named_parameters() if p.requires_grad and p not in trained]
    if late and world.is_master:
        warn(f'{late[0]}: is not trained, because it was frozen when the optimizer was built; freeze it after that')
    if world.size > 1 and not world.sharded:
        norms = world.gather(norm.reshape(1)).flatten()
        if world.is_master and (norms / norms[0] - 1).abs().max() > 1e-6:
            warn(f"the ranks' weights have drifted apart (norms {norms.min():.7g} to {norms.max():.7g}), and rank 0's "
                 'are saved; let nothing that changes weights or gradients differ between ranks')


def close_run(run):
    """Say how a run ended. Exits with a special code if it was stopped and can resume, and with a message if its last
    checkpoint is missing."""
    c, log, state, stops = run.config, run.log, run.state, run.stops
    to_resume = stops.stopping and not stops.finished
    if stops.stopping:
        log.print(f'stopped at iteration {state.iter} by {stops.reason or "another rank"}')
    if stops.finished:
        log.note_end(state.iter, stops.reason)
    if run.saved and not c.eval_only:
        log.print_what_next(state.iter, state.best_val_loss, to_resume)
    log.close()
    if not run.saved:
        newest = next(iter(checkpoint.checkpoints(c.out_dir)), 'none')
        raise SystemExit(f'{c.out_dir}: the last checkpoint could not be saved; the newest one there: {newest}')
    if to_resume and not under_torchrun():  # which takes every exit code but 0 for a failure
        raise SystemExit(STOPPED)
