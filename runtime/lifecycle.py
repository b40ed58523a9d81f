"""How a run starts, what is done about faults, and how it ends."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from runtime import checkpoint, optim, runlog
from runtime.device import device_name
from runtime.distributed import under_torchrun
from runtime.files import code_hashes, differing_files, warn, write_text
from runtime.signals import NOT_FINITE, STOPPED

# ----------------------------------------------------------------------------------------------------------------------
# The start


@dataclass
class Start:
    """The start of a run, and the checkpoint from which it resumes; without one, `path` and `saved` are None.

    code: the `files.code_hashes` of the code that runs.
    model_args: the shape of its model.
    differences, changes: how the settings differ from the checkpoint's, see `checkpoint.compare`.
    comparable: whether validation losses before and after are of the same sequences.
    """
    code: dict
    path: Path | None = None
    saved: dict | None = None
    model_args: dict | None = None
    differences: list = field(default_factory=list)
    changes: list = field(default_factory=list)
    comparable: bool = True

    def check_model_args(self, args):
        """Stops the run when the checkpoint is of another model than `args`."""
        theirs = self.model_args or args
        differing = [f'{key} ({theirs.get(key)} there, {args.get(key)} asked for)' for key in args | theirs
                     if theirs.get(key) != args.get(key)]
        if differing:
            raise SystemExit(f'{self.path}: is a model with another {", ".join(differing)}; resume with its own '
                             'settings, or choose another --out_dir')

    def restore(self, world, model, optimizer, scaler, state):
        """Puts the checkpoint's tensors into their places, and its progress into the TrainState `state`."""
        if not self.path:
            return
        progress = self.saved['train_state']
        with world.exit_together():
            if unknown := progress.keys() - vars(state).keys():
                raise SystemExit(f'{self.path}: is of another version of train.py (its TrainState has {min(unknown)}); '
                                 'resume with that version, or choose another --out_dir')
            checkpoint.restore(self.path, self.saved, model, optimizer, scaler)
            optim.back_to_training(optimizer)  # checkpoints are saved in evaluation mode
        vars(state).update(progress)
        if not self.comparable:
            state.best_val_loss, state.last_eval_iter = float('inf'), -1
        self.saved = None  # frees the memory


def find_start(world, c, data, fingerprints, defaults, model_defaults):
    """The `Start` of the run with the settings `c`, whose out_dir becomes its own; see `checkpoint.open_run`.

    Of a run that resumes, init_from is the checkpoint's: the weights that the run began with.

    Args:
        data: the training data set.
        fingerprints: of the data, by split.
        defaults: the values of settings that a checkpoint does not have, because they are younger.
        model_defaults: the arguments of the model that a checkpoint leaves out.
    """
    path, saved = checkpoint.open_run(world, c.out_dir, must_resume=c.init_from == 'resume', may_resume=c.auto_resume,
                                      read_only=c.eval_only)
    code = code_hashes()
    if path is None:
        return Start(code)
    with world.exit_together():
        if saved['iter_num'] > c.max_iters:
            raise SystemExit(f'{c.shown("max_iters")}: {path} is at iteration {saved["iter_num"]} already; set at '
                             'least that, or choose another --out_dir')
        began_with, model_args = checkpoint.first_weights(saved), {**model_defaults, **saved['model_args']}
        if 'init_from' in c.given and c.init_from != 'resume' and Path(c.init_from) != Path(began_with):
            raise SystemExit(f'{path}: is of a run that began with init_from = {began_with}; continue it with '
                             '--init_from=resume, or choose another --out_dir')
        if began_with != 'scratch':
            if 'learning_rate' not in c.given and not c.eval_only:
                raise SystemExit(f'{path}: is of a run that began with {began_with}, for which Table 3 has no learning '
                                 'rate; set --learning_rate')
            adopt_model_args(c, model_args, data)
        if began_with != c.init_from:
            c.set('init_from', began_with, str(path))
        differences, changes = checkpoint.compare(path, saved, c.values, fingerprints, defaults, c.ignore_data_change)
        if files := differing_files(saved.get('code'), code):
            differences.append(f'the code is not the one that saved the checkpoint ({", ".join(files)})')
            changes.append(dict(iter=saved['iter_num'], key='code', files=files))
    before = saved['config']
    comparable = saved['data']['val'] == fingerprints['val'] and (
        c.eval_iters * c.batch_size == before['eval_iters'] * before['batch_size'])
    return Start(code, path, saved, model_args, differences, changes, comparable)


def adopt_model_args(c, args, data):
    """Makes the settings `c` follow `args`, the model_args of pretrained weights; block_size and dropout are the run's.

    Stops the run when a config file or a flag sets another, or when `data`, a data set, has another vocabulary.
    """
    if not args['vocab_size'] - 64 < data.vocab_size <= args['vocab_size']:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, but the pretrained weights '
                         f'have {args["vocab_size"]}; prepare the data with their tokenizer')
    for key, value in args.items():
        if key in c.values and key not in ('block_size', 'dropout') and value != c.values[key]:
            c.require(key, key not in c.given, f'{value}, as in the pretrained weights')
            c.set(key, value, 'pretrained weights')


def open_log(c, world, start, state, model, train_data, fingerprints, **more):
    """The `RunLog` of a run that starts at the TrainState `state`. Describes the run in config.json, with `more`
    entries, and on the terminal."""
    writes = world.is_master and not c.eval_only
    if writes:
        (Path(c.out_dir) / checkpoint.FAILED).unlink(missing_ok=True)
        runlog.rewind_log(Path(c.out_dir) / 'metrics.jsonl', state.iter, state.last_eval_iter)
        runlog.describe_run(c.out_dir, c.values, c.sources, world_size=world.size, parameters=model.num_params(),
                            flops_per_token=model.flops_per_token(), data=fingerprints, changes=start.changes,
                            device=device_name(world.device), code=start.code, harmless=sorted(checkpoint.HARMLESS),
                            **more)
    log = runlog.RunLog(c.out_dir if writes else None, c.values, world.is_master)
    if start.path:
        log.print(f'resuming from {start.path} at iteration {state.iter} of {c.max_iters}')
    for line in (*(f'changed: {line}' for line in start.differences), *c.lines(), *notes(c)):
        log.print(line)
    log.print(f'{model.num_params():,} parameters; {len(train_data):,} training tokens; '
              f'{c.total_batch_size * c.block_size:,} tokens per iteration = {world.size} device(s) × '
              f'{c.gradient_accumulation_steps} × {c.batch_size} × {c.block_size}')
    return log


def notes(c):
    """Lines about settings that are valid but may surprise."""
    if c.device.startswith('cuda') and not c.compile and 'compile' not in c.given:
        yield ('warning: compile = False because this machine has no C compiler or no Python.h, and training is much '
               'slower; install gcc and python3-dev')
    if c.decay_lr and c.warmup_iters >= c.max_iters:
        yield (f'note: the run of {c.max_iters} iterations ends in its warm-up of {c.warmup_iters}; see '
               '--warmup_iters')


def check_ranks(run, sequences):
    """Before the first step: stops the run unless all parameters get gradients on all ranks.

    Replicas wait for each other's gradients. A mixture of experts whose tokens miss an expert on one rank would hang
    without saying why. `sequences`: a micro-batch of this rank.
    """
    world = run.world
    if world.size == 1 or world.sharded:
        return
    world.set_gradient_sync(run.model, False)
    buffers = [buffer.clone() for buffer in run.raw_model.buffers()]  # which a forward pass may update
    with run.autocast:
        loss = run.model(sequences[:, :-1], sequences[:, 1:].clone())[1]
    run.scaler.scale(loss).backward()
    for buffer, before in zip(run.raw_model.buffers(), buffers):
        buffer.copy_(before)
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
        raise SystemExit(f'{name}: {problem}' if world.is_master else 1)


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def require_finite(**numbers):
    """FloatingPointError that names the first of `numbers` that is not finite."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise FloatingPointError(f'the {name} is not finite')


def check_step(run, log, state, step, loader):
    """Counts a step whose update was skipped, and ends the run after too many."""
    c, world = run.config, run.world
    if not step.problem:
        state.skipped_in_a_row = 0
        state.clipped += bool(c.grad_clip and c.grad_clip < step.grad_norm)
        return
    state.skipped_in_a_row += 1
    sequences = loader.describe(state.iter, world.gather(step.losses))
    where = f' ({sequences})' if sequences else ''
    overflow = run.scaler.is_enabled() and 'gradient' in step.problem  # of the scaled loss
    if state.skipped_in_a_row > (max(c.skip_nonfinite, optim.OVERFLOWS) if overflow else c.skip_nonfinite):
        abort(c, world, log, state.iter, step.problem,
              f', or skip it with --skip_nonfinite={state.skipped_in_a_row}', where)
    if not overflow:
        log.print(f'iter {state.iter}: {step.problem}; skipped{where}')


def abort(c, world, log, iteration, problem, otherwise='', where=''):
    """Ends a run that cannot continue, with one line on stderr and in failed.txt. Collective: every rank must call it.

    The line holds the problem, what might help (a lower learning rate or `otherwise`), and `where` it happened, which
    is appended as it is.
    """
    log.close()
    if world.is_master:
        advice = 'resume' if checkpoint.checkpoints(c.out_dir) else 'start again'
        line = (f'iteration {iteration}: {problem}; {advice} with a lower --learning_rate{otherwise}. Nothing of the '
                f'iteration was saved{where}')
        print(line, file=sys.stderr)
        write_text(Path(c.out_dir) / checkpoint.FAILED, line + '\n')
    raise SystemExit(NOT_FINITE)


def check_weights(run, log, iteration):
    """Before a checkpoint: ends a run whose parameters are not finite, and warns where the ranks' replicas of the model
    differ, because only rank 0's is saved. Collective: every rank must call it."""
    world, norm = run.world, optim.global_norm(run.params)
    if not norm.isfinite():
        abort(run.config, world, log, iteration, 'the parameters are not finite')
    if world.size > 1 and not world.sharded:
        norms = world.gather(norm.reshape(1)).flatten()
        if world.is_master and (norms / norms[0] - 1).abs().max() > 1e-6:
            warn(f"the ranks' weights have drifted apart (norms {norms.min():.7g} to {norms.max():.7g}), and rank 0's "
                 'are saved; let nothing that changes weights or gradients differ between ranks')


# ----------------------------------------------------------------------------------------------------------------------
# The end


def close_run(run, log, state, stopped_by):
    """Says how a run ended. Exits with a code of its own if it was `stopped_by` something ('' if not), and with a
    message if its last checkpoint is missing."""
    c = run.config
    if stopped_by:
        log.print(f'stopped at iteration {state.iter} by {stopped_by}')
    if run.saved and not c.eval_only:
        log.print_what_next(state.iter, state.best_val_loss, bool(stopped_by))
    log.close()
    run.world.close()
    if not run.saved:
        newest = next(iter(checkpoint.checkpoints(c.out_dir)), 'none')
        raise SystemExit(f'{c.out_dir}: the last checkpoint could not be saved; the newest one there: {newest}')
    if stopped_by and not under_torchrun():  # which takes every exit code but 0 for a failure
        raise SystemExit(STOPPED)
