"""The log of a run, the start of its replicas, faults, saving, the end."""

import contextlib
import math
import os
import re
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from optimizers import hessian_flops_per_token, is_matrix
from runtime import checkpoint, gpt, optim, optimizer_state, runlog
from runtime.device import device_name
from runtime.files import FAILED, warn, write_text
from runtime.signals import NOT_FINITE, STOPPED

# Fields of Run that a checkpoint holds, or that are the same again after a resume
REBUILT = {'config', 'world', 'raw_model', 'model', 'optimizer', 'hessian', 'scaler', 'autocast', 'params',
           'cross_entropy', 'state', 'val_data', 'log', 'stops', 'about', 'fresh', 'saved', 'before'}
SAID = object()  # in place of a value that `warn_of_unsaved` has named

# ----------------------------------------------------------------------------------------------------------------------
# The start


def open_log(run, origin, train_data):
    """Return the `RunLog` of a run, and describe the run in config.json and on the terminal."""
    c, world, state = run.config, run.world, run.state
    parameters, flops = gpt.num_params(run.raw_model), gpt.flops_per_token(run.raw_model)
    writes = world.is_master and not c.eval_only
    if writes:
        (Path(c.out_dir) / FAILED).unlink(missing_ok=True)
        runlog.rewind_log(Path(c.out_dir) / 'metrics.jsonl', state.iter, state.last_eval_iter)
        runlog.describe_run(c.out_dir, c.values, c.sources, roles=c.roles, world_size=world.size, parameters=parameters,
                            flops_per_token=flops, hessian_flops_per_token=hessian_flops_per_token(c.values, flops),
                            data=run.about['data'], changes=origin.changes, device=device_name(world.device),
                            code=origin.code)
    log = runlog.RunLog(c.out_dir if writes else None, c.values, world.is_master)
    if origin.path:
        log.print(f'resuming from {origin.path} at iteration {state.iter} of {c.max_iters}')
    for line in (*(f'changed: {line}' for line in origin.differences), *c.lines(), *notes(c),
                 *group_notes(run.optimizer)):
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
    if c.decay_lr and c.warmup_iters >= c.max_iters:
        yield (f'note: the run of {c.max_iters} iterations ends in its warm-up of {c.warmup_iters}; see '
               '--warmup_iters')


def group_notes(optimizer):
    """Yield lines about param groups whose learning rate is not the logged one, or that Muon does not take."""
    groups = optimizer.param_groups
    if len(optim.parts(optimizer)) > 1 and any(group.get('role') for group in groups) and any(
            is_matrix(p) for group in groups if not group.get('role') for p in group['params']):
        yield "note: Muon takes no matrix of a param group without a role; those of hidden layers need role='hidden'"
    scales = sorted({group.get('lr_scale', 1.0) for group in groups})
    if scales != [1.0]:
        yield (f'note: param groups have learning rates of {scales[0]:g} to {scales[-1]:g} times the logged one '
               '(lr_scale)')
    if owner := next((part for part in optim.parts(optimizer) if hasattr(part, 'lr')), None):
        yield (f'warning: no schedule changes the attribute lr of {type(owner).__name__}; let its step read the lr of '
               'each param group')


def build_buckets(run, sequences):
    """Let DDP form its final buckets by two backward passes that change nothing else.

    DDP forms its buckets anew after its first sum over ranks, and the order in which three or more ranks are added
    depends on them. Then it divides gradients that are views of a bucket by the number of ranks, but multiplies others
    by its inverse. A resumed run must do as the uninterrupted one from its first iteration on. Collective: every rank
    must call it. `sequences`: a micro-batch of this rank, so that what is compiled here serves a step.
    """
    world = run.world
    if world.size == 1 or world.sharded:
        return
    world.set_gradient_sync(True)
    with same_buffers(run.raw_model):
        for _ in range(2):  # the second makes the gradients views of the new buckets
            with run.autocast:
                loss = run.model(sequences[:, :-1].clone(), sequences[:, 1:].clone())[1]
            run.scaler.scale(loss).backward()
            world.check_reduced()
    world.zero_grad(run.optimizer)


@contextlib.contextmanager
def same_buffers(model):
    """Undo, at the end of the context, what forward passes change in the buffers of `model`."""
    before = [(module, name, buffer, buffer.clone()) for module in model.modules()
              for name, buffer in module.named_buffers(recurse=False)]
    yield
    for module, name, buffer, value in before:
        setattr(module, name, buffer.copy_(value))  # it may have been assigned anew, in another shape


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def not_finite(**numbers):
    """Return words that name the first of `numbers` that is not finite; '' if all are finite."""
    return next((f'the {name} is not finite' for name, number in numbers.items() if not math.isfinite(number)), '')


def check_step(run, step):
    """Count a step whose update was skipped, and end the run after too many."""
    c, state = run.config, run.state
    if not step.problem:
        state.skipped_in_a_row = 0
        state.clipped += bool(c.grad_clip and c.grad_clip < step.grad_norm)
        return
    state.skipped_in_a_row += 1
    overflow = run.scaler.is_enabled() and 'gradient' in step.problem  # of the scaled loss
    allowed = max(c.skip_nonfinite, optim.OVERFLOWS) if overflow else c.skip_nonfinite
    if state.skipped_in_a_row > allowed:
        abort(run, step.problem, f', or skip it with --skip_nonfinite={state.skipped_in_a_row}')
    if not overflow:
        run.log.print(f'iter {state.iter}: {step.problem}; skipped')


def abort(run, problem, otherwise=''):
    """End a run that cannot continue, with one line on stderr and in failed.txt: the problem, and what might help, a
    lower learning rate or `otherwise`. Collective: every rank must call it."""
    run.log.close()
    if run.world.is_master:
        out_dir = Path(run.config.out_dir)
        advice = 'resume' if checkpoint.checkpoints(out_dir) else 'start again'
        line = (f'iteration {run.state.iter}: {problem}; {advice} with a lower --learning_rate{otherwise}. Nothing of '
                'the iteration was saved')
        print(line, file=sys.stderr)
        write_text(out_dir / FAILED, line + '\n')
    raise SystemExit(NOT_FINITE)


# ----------------------------------------------------------------------------------------------------------------------
# Saving, and the end


def save(run, best=False):
    """Save a checkpoint; run.saved says whether that succeeded. Collective: every rank must call it."""
    c, state = run.config, run.state
    check_weights(run)
    warn_of_unsaved(run)
    run.stops.save = False  # a request to save is answered
    with optim.evaluating(run.optimizer):
        path = checkpoint.save_run(run.world, c.out_dir, run.raw_model, run.optimizer, dict(
            iter_num=state.iter, best_val_loss=state.best_val_loss, config=c.values, train_state=asdict(state),
            scaler=run.scaler.state_dict(), ended=run.stops.reason if run.stops.finished else '',
            **run.about), best, c.keep_checkpoints)
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


def unsaved(run, *more):
    """Yield (name, value) of the plain values and tensors that an experiment may keep and no checkpoint holds: in
    fields that it has added to Run, in the hook, in attributes of optimizers and modules.

    Flags with an underscore are left out, in which PyTorch notes what it has checked or warned of. `more`: further
    parts, as (name, object, names of attributes to leave out).
    """
    parts = [('Run', run, REBUILT), ('hook', run.hessian, ()), *more]
    parts += [(f'optimizer{i or ""}', part, optimizer_state.no_state())
              for i, part in enumerate(optim.parts(run.optimizer))]
    for key in sorted({f.name for f in fields(run)} - REBUILT | {'raw_model'}):
        if isinstance(getattr(run, key), torch.nn.Module):
            parts += [(f'{key}.{name}'.rstrip('.'), module, vars(torch.nn.Module()))
                      for name, module in getattr(run, key).named_modules()]
    seen = {id(one): one for one in (*(getattr(run, key) for key in REBUILT), *(part for _, part, _ in parts))}
    saved = {id(tensor) for tensor in run.raw_model.state_dict(keep_vars=True).values()}
    for name, part, known in parts:
        named = {f.name: getattr(part, f.name) for f in fields(part)} if part is run else vars(part)
        if isinstance(part, torch.nn.Module):
            named = named | {key: part._buffers[key] for key in part._non_persistent_buffers_set}
        for key, value in [*named.items()]:
            if key not in known and key[:2] != '__' and not (key[0] == '_' and isinstance(value, bool)):
                yield from (leaf for leaf in optimizer_state.leaves(value, f'{name}.{key}', seen)
                            if id(leaf[1]) not in saved)


def note_unsaved(run):
    """Keep copies of the values that no checkpoint holds, for `warn_of_unsaved`."""
    run.before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in unsaved(run)}


def warn_of_unsaved(run, loaded=None):
    """Warn of what has changed since `note_unsaved` and is in no checkpoint; once of each.

    Of what is new, only attributes of optimizers count: a hook or a module may set some anew in every iteration.
    `loaded`: an optimizer that has loaded the state of the run's. Attributes that this has brought back are saved.
    """
    changed, brought_back = [], dict(unsaved(replace(run, optimizer=loaded))) if loaded else {}
    for name, value in unsaved(run):
        before = run.before.get(name, None if re.fullmatch(r'optimizer\d*\.\w+', name) else value)
        if before is not SAID and not optimizer_state.equal(value, before):
            run.before[name] = SAID
            if not (name.startswith('optimizer') and optimizer_state.equal(value, brought_back.get(name))):
                changed.append(name)
    if changed and run.world.is_master:
        warn(f'{changed[0]}: has changed, but no checkpoint holds it, so a resumed run may differ; keep it in '
             'TrainState, in state or param_groups of the optimizer, or in a buffer of the model')


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
    if to_resume and 'TORCHELASTIC_RUN_ID' not in os.environ:  # torchrun takes every exit code but 0 for a failure
        raise SystemExit(STOPPED)
