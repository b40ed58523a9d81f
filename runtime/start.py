"""Where a run starts from: random weights, its own newest checkpoint, a checkpoint of which it is a branch, or the
weights of a Hugging Face model.

A branch is a new run that decays the learning rate from a checkpoint of a run whose learning rate is constant there.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from runtime import checkpoint


def from_scratch(c):
    """Whether the weights are this run's own, and not those of a Hugging Face model."""
    return c.init_from in ('scratch', 'resume', 'auto') or c.branch_cooldown > 0


def branch_settings(c):
    """A branch has the settings of its checkpoint, whatever a file or a flag does not change, and a schedule that ends
    `branch_cooldown` iterations later."""
    if not c.branch_cooldown:
        return {}, ''
    path = Path(c.init_from)
    c.require('init_from', checkpoint.number(path) >= 0, 'a checkpoint, DIRECTORY/ckpt_ITERATION, for a branch')
    saved = checkpoint.load(path, weights=False)[1]
    before, start = saved['config'], saved['iter_num']
    stable = dict(wsd=before.get('lr_decay_iters', 0) - before.get('cooldown_iters', 0), constant=math.inf)
    schedule = before.get('schedule', 'cosine') if before.get('decay_lr', True) else 'constant'
    if schedule not in stable:
        raise SystemExit(f'{path}: its run had --schedule={schedule}; branches are of a run with --schedule=wsd')
    if not before.get('warmup_iters', 0) <= start <= stable[schedule]:
        raise SystemExit(f'{path}: its learning rate is not the peak; branches start after the warm-up, '
                         f'{before.get("warmup_iters", 0)}, and not after {stable[schedule]}, where the cooldown began')
    end = start + c.branch_cooldown
    fixed = dict(schedule='wsd', decay_lr=True, max_iters=end, lr_decay_iters=end, cooldown_iters=c.branch_cooldown)
    for key, value in fixed.items():
        if c.sources[key] == 'flag' and c.values[key] != value:
            raise SystemExit(f'--{key}={c.values[key]}: --branch_cooldown={c.branch_cooldown} makes it {value}; leave '
                             'it out')
    kept = {'dataset', 'batch_size', 'eval_interval', 'log_interval'}
    for key, value in {**before, **fixed}.items():
        inherited = key in c.types and key not in c.given and (key not in checkpoint.HARMLESS or key in kept)
        if key in fixed or inherited and key != 'branch_cooldown':
            c.set(key, value, 'branch_cooldown' if key in fixed else 'the checkpoint')
            c.given.add(key)
    return {}, ''


@dataclass
class Start:
    """The checkpoint that a run starts from.

    path, saved: the checkpoint and its state; None where there is none.
    branch: whether a branch begins with it, and does not go on.
    differences, changes: what the settings of this run change, see `checkpoint.compare`.
    """
    path: Path | None
    saved: dict | None
    branch: bool
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

    def compares_losses(self, c, data):
        """Whether the validation losses so far are of this run and of the sequences that it evaluates."""
        before = self.saved['config']
        return not self.branch and self.saved['data']['val'] == data['val'] and (
            c.eval_iters * c.batch_size == before['eval_iters'] * before['batch_size'])


def open_run(world, c):
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
    return Start(path, saved, branch)
