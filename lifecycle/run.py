"""Log, DDP start-up, faults, saving and shutdown of a run."""

import math
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lifecycle import guards
from optimizers import hessian_flops_per_token
from runtime import checkpoint, gpt, optim, runlog
from runtime.device import device_name
from runtime.files import FAILED, write_text
from runtime.signals import NOT_FINITE, STOPPED

# ----------------------------------------------------------------------------------------------------------------------
# The start


@dataclass
class Rest:
    """The fields of a run that only lifecycle/ uses."""
    fresh: Any  # an optimizer without a state; None after the check of the first update
    names: set  # the keys of the model's state_dict before the first step
    about: dict = field(default_factory=dict)  # for checkpoints: model_args, data, tokenizer, code, …
    saved: bool = True  # whether the latest due checkpoint was saved


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
                            data=run.rest.about['data'], changes=origin.changes, device=device_name(world.device),
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
        yield ('warning: compile = False because this machine has no C compiler or no Python.h, so training is much '
               'slower; install gcc and python3-dev')
    if c.compile:
        yield 'note: the first iterations compile the model, which takes a minute or more'
    if c.decay_lr and c.warmup_iters >= c.max_iters:
        yield f'note: the run of {c.max_iters} iterations ends in its warm-up of {c.warmup_iters}; see --warmup_iters'


def build_buckets(run, sequences):
    """Run two backward passes that change only DDP's gradient buckets.

    DDP rebuilds them after its first all-reduce, and rounds differently before and after. Without these passes, the
    first iteration of a resumed run would differ from the uninterrupted run's. Collective: every rank must call it.
    `sequences`: a micro-batch of this rank, so that training reuses the compiled code.
    """
    world = run.world
    if world.size == 1 or world.sharded:
        return
    world.set_gradient_sync(True)
    buffers = {name: buffer.clone() for name, buffer in run.raw_model.named_buffers()}
    for _ in range(2):  # the second makes the gradients views of the new buckets
        with run.autocast:
            loss = run.model(sequences[:, :-1].clone(), sequences[:, 1:].clone())[1]
        run.scaler.scale(loss).backward()
        world.check_reduced()
    for name, buffer in run.raw_model.named_buffers():
        buffer.copy_(buffers[name])
    world.zero_grad(run.optimizer)


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def not_finite(**numbers):
    """Return a clause that names the first of `numbers` that is not finite, or ''."""
    return next((f'the {name} is not finite' for name, number in numbers.items() if not math.isfinite(number)), '')


def check_step(run, step):
    """Check the first update, count the steps whose update was skipped, and end the run after too many of them."""
    c, state = run.config, run.state
    if step.problem:
        state.skipped_in_a_row += 1
        overflow = run.scaler.is_enabled() and 'gradient' in step.problem  # float16's loss scale was too large
        allowed = max(c.skip_nonfinite, optim.OVERFLOWS) if overflow else c.skip_nonfinite
        if state.skipped_in_a_row > allowed:
            abort(run, step.problem, f', or skip it with --skip_nonfinite={state.skipped_in_a_row}')
        if not overflow:
            run.log.print(f'iter {state.iter}: {step.problem}; skipped')
        return
    state.skipped_in_a_row = 0
    state.clipped += bool(c.grad_clip and c.grad_clip < step.grad_norm)
    guards.check_first_update(run)


def abort(run, problem, otherwise=''):
    """End a run that cannot continue. One line on stderr and in failed.txt names the problem and advises a lower
    learning rate or `otherwise`. Collective: every rank must call it."""
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
# Logging, saving, and the end


def log_metrics(run, metrics):
    """Log a step's metrics, and warn if they show a runaway or a γ that is far off."""
    run.log.record(run.state, run.log.progress_line(run.state.iter, metrics), metrics)
    guards.advise(run, metrics)
    guards.warn_of_runaway(run, metrics)


def save(run, best=False):
    """Save a checkpoint; run.rest.saved says whether that succeeded. Collective: every rank must call it."""
    c, state = run.config, run.state
    if not optim.global_norm(run.params).isfinite():
        abort(run, 'the parameters are not finite')
    run.stops.save = False  # the request to save is fulfilled
    with optim.evaluating(run.optimizer):
        path = checkpoint.save_run(run.world, c.out_dir, run.raw_model, run.optimizer, dict(
            iter_num=state.iter, best_val_loss=state.best_val_loss, config=c.values, train_state=asdict(state),
            scaler=run.scaler.state_dict(), ended=run.stops.reason if run.stops.finished else '',
            **run.rest.about), best, c.keep_checkpoints)
    run.rest.saved = path is not None
    if path:
        run.log.print(f'saved {path}')


def close_run(run):
    """Report the end of a run. Exits with a special code if it was stopped and can resume, and with a message if its
    last checkpoint is missing."""
    c, log, state, stops = run.config, run.log, run.state, run.stops
    to_resume = stops.stopping and not stops.finished
    if stops.stopping:
        log.print(f'stopped at iteration {state.iter} by {stops.reason or "another rank"}')
    if stops.finished:
        log.note_end(state.iter, stops.reason)
    if run.rest.saved and not c.eval_only:
        log.print_what_next(state.iter, state.best_val_loss, to_resume)
    log.close()
    if not run.rest.saved:
        newest = next(iter(checkpoint.checkpoints(c.out_dir)), 'none')
        raise SystemExit(f'{c.out_dir}: the last checkpoint could not be saved; the newest one there: {newest}')
    if to_resume and 'TORCHELASTIC_RUN_ID' not in os.environ:  # torchrun treats other codes than 0 as failures
        raise SystemExit(STOPPED)
