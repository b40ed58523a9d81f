"""How a run starts and ends: from random weights, its own newest checkpoint, a checkpoint of which it is a branch, or
the weights of a Hugging Face model; finished, stopped, or given up.

A branch is a new run that decays the learning rate from a checkpoint of a run whose learning rate is constant there.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from runtime import checkpoint, runlog
from runtime.device import device_name
from runtime.distributed import under_torchrun
from runtime.files import write_text
from runtime.signals import NOT_FINITE, STOPPED

# ----------------------------------------------------------------------------------------------------------------------
# Settings and shape that come with a checkpoint


def finetunes(c):
    """Whether the run begins with the weights of a Hugging Face model."""
    return c.init_from not in ('scratch', 'resume', 'auto') and not c.branch_cooldown


def inherit_settings(c):
    """Gives a branch the settings of its checkpoint, except those that a file or a flag sets, and a schedule that ends
    `branch_cooldown` iterations later. Other runs inherit nothing."""
    if not c.branch_cooldown:
        return
    path = Path(c.init_from)
    c.require('init_from', checkpoint.number(path) >= 0, 'a checkpoint, DIRECTORY/ckpt_ITERATION, for a branch')
    saved = checkpoint.load(path, weights=False)[1]
    before, start = saved['config'], saved['iter_num']
    schedule = before.get('schedule', 'cosine') if before.get('decay_lr', True) else 'constant'
    stable = math.inf
    if schedule != 'constant':
        if not before.get('cooldown_iters'):
            raise SystemExit(f'{path}: its run had --schedule={schedule}; branches are of a run with --schedule=wsd')
        stable = before['lr_decay_iters'] - before['cooldown_iters']
    if not before.get('warmup_iters', 0) <= start <= stable:
        raise SystemExit(f'{path}: its learning rate is not the peak; branches start after the warm-up, '
                         f'{before.get("warmup_iters", 0)}, and not after {stable}, where the cooldown began')
    end = start + c.branch_cooldown
    fixed = dict(schedule='wsd' if schedule == 'constant' else schedule, decay_lr=True, max_iters=end,
                 lr_decay_iters=end, cooldown_iters=c.branch_cooldown)
    for key, value in fixed.items():
        if c.sources[key] == 'flag' and c.values[key] != value:
            raise SystemExit(f'--{key}={c.values[key]}: --branch_cooldown={c.branch_cooldown} makes it {value}; leave '
                             'it out')
    kept = {'dataset', 'batch_size', 'eval_interval', 'log_interval'}
    inherited = {key: value for key, value in before.items() if key in c.types and key != 'branch_cooldown'
                 and key not in fixed and key not in c.given and (key not in checkpoint.HARMLESS or key in kept)}
    for settings, source in (inherited, 'the checkpoint'), (fixed, 'branch_cooldown'):
        for key, value in settings.items():
            c.set(key, value, source)
            c.given.add(key)


def adopt_model_args(c, args, data):
    """The model_args of pretrained weights, with this run's block_size and dropout. The settings `c` follow them.

    SystemExit with one line when a config file or a flag sets another, or `data`, a data set, has another vocabulary.
    """
    if not args['vocab_size'] - 64 < data.vocab_size <= args['vocab_size']:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, but the pretrained weights '
                         f'have {args["vocab_size"]}; prepare the data with their tokenizer')
    args = dict(args, block_size=c.block_size, dropout=c.dropout)
    for key, value in args.items():
        if key in c.values and value != c.values[key]:
            c.require(key, key not in c.given, f'{value}, as in the pretrained weights')
            c.set(key, value, 'pretrained weights')
    return args


# ----------------------------------------------------------------------------------------------------------------------
# The start


@dataclass
class Start:
    """The checkpoint that a run starts from.

    path, saved: the checkpoint and its state; None where there is none.
    branch: whether a new branch starts from it; False when one resumes.
    finetuned: whether its run began with the weights of a Hugging Face model.
    differences, changes: what the settings of this run change, see `checkpoint.compare`.
    """
    path: Path | None
    saved: dict | None
    branch: bool
    finetuned: bool
    differences: list = field(default_factory=list)
    changes: list = field(default_factory=list)

    def compare(self, c, model_args, data, defaults):
        """Fills in differences and changes; SystemExit with one line when the run cannot start from the checkpoint.
        Arguments as for `checkpoint.compare`."""
        self.differences, self.changes = checkpoint.compare(self.path, self.saved, c.values, model_args, data,
                                                            c.ignore_data_change, defaults)
        if self.branch:
            self.changes = [change for change in self.changes if change['key'] != 'branch_cooldown'
                            and c.sources.get(change['key']) != 'branch_cooldown']

    def losses_are_comparable(self, c, data):
        """Whether the validation losses so far are of this run and of the sequences that it evaluates."""
        before = self.saved['config']
        return not self.branch and self.saved['data']['val'] == data['val'] and (
            c.eval_iters * c.batch_size == before['eval_iters'] * before['batch_size'])


def find_start(world, c):
    """The `Start` of the run with the settings `c`, whose out_dir becomes its own; see `checkpoint.open_run`.

    SystemExit with one line when that cannot be.
    """
    init_from = 'auto' if c.branch_cooldown else c.init_from
    path, saved = checkpoint.open_run(world, c.out_dir, init_from, read_only=c.eval_only)
    branch = c.branch_cooldown > 0 and saved is None
    with world.exit_together():
        if branch:
            path, saved = checkpoint.load(c.init_from, weights=False)
        elif c.branch_cooldown and any(saved['config'].get(key) != c.values[key]
                                       for key in ('init_from', 'branch_cooldown')):
            raise SystemExit(f'{c.out_dir}: holds another run than this branch; choose another --out_dir')
    # Checkpoints from before this key name the form of GELU only where they are fine-tuned.
    finetuned = bool(saved) and saved.get('finetuned', 'gelu_approximate' in saved['model_args'])
    return Start(path, saved, branch, finetuned)


def open_log(c, world, start, state, model, train_data, fingerprints):
    """The `RunLog` of a run that starts at the TrainState `state`. Writes what the run is to config.json, and prints
    it."""
    writes = world.is_master and not c.eval_only
    log = runlog.RunLog(c.out_dir if writes else None, c.values, c.max_iters, state.iter, world.is_master)
    if writes:
        branched_from = dict(checkpoint=c.init_from, iter=c.max_iters - c.branch_cooldown)
        runlog.rewind_log(Path(c.out_dir) / 'metrics.jsonl', state.iter, state.last_eval_iter)
        runlog.describe_run(c.out_dir, c.values, c.sources, world_size=world.size, parameters=model.num_params(),
                            flops_per_token=model.flops_per_token(), data=fingerprints, changes=start.changes,
                            device=device_name(world.device),
                            branched_from=branched_from if c.branch_cooldown else None)
    if start.path:
        verb = 'branching' if start.branch else 'resuming'
        log.print(f'{verb} from {start.path} at iteration {state.iter} of {c.max_iters}')
    for line in (*(f'changed: {line}' for line in start.differences), *c.lines()):
        log.print(line)
    if c.decay_lr and c.warmup_iters >= c.max_iters:
        log.print(f'note: the run of {c.max_iters} iterations ends in its warm-up of {c.warmup_iters}; see '
                  '--warmup_iters')
    log.print(f'{model.num_params():,} parameters; {len(train_data):,} training tokens; '
              f'{c.total_batch_size * c.block_size:,} tokens per iteration = {world.size} device(s) × '
              f'{c.gradient_accumulation_steps} × {c.batch_size} × {c.block_size}')
    return log


# ----------------------------------------------------------------------------------------------------------------------
# The end


def give_up(c, world, log, iteration, what, otherwise=''):
    """Ends a run that cannot continue, with one line on stderr and in failed.txt: `what` is wrong at the iteration, and
    what might help, a lower learning rate or `otherwise`. Collective: every rank must call it."""
    log.close()
    if world.is_master:
        line = (f'iteration {iteration}: {what}; nothing of it was saved; resume with a lower --learning_rate'
                f'{otherwise}')
        print(line, file=sys.stderr)
        write_text(Path(c.out_dir) / checkpoint.FAILED, line + '\n')
    raise SystemExit(NOT_FINITE)


def close_run(c, world, log, iteration, best_val_loss, is_saved, stopped_by):
    """Says how a run ended. SystemExit, after everything else, if it was stopped (`stopped_by`, else '') or its last
    checkpoint is missing."""
    if stopped_by:
        log.print(f'stopped at iteration {iteration} by {stopped_by}')
    if is_saved and not c.eval_only:
        log.print_what_next(iteration, best_val_loss, bool(stopped_by))
    log.close()
    world.close()
    if not is_saved:
        raise SystemExit(f'{c.out_dir}: the last checkpoint could not be saved; the one before it is the newest')
    if stopped_by and not under_torchrun():  # which takes every exit code but 0 for a failure
        raise SystemExit(STOPPED)
