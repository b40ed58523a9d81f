"""Branches: runs that decay the learning rate from a checkpoint of a run whose learning rate is constant there."""

import math
from pathlib import Path

from runtime import checkpoint


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
