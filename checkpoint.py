"""Checkpoints: atomic saving, loading without unpickling, retention.

A run's checkpoints are `ckpt_ITERATION.pt` in its out_dir, and `best.pt`, a second name of the one with the lowest
validation loss. They hold nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and what else
a run needs to go on.
"""

import os
from pathlib import Path

import torch


def save(out_dir, state, best=False, keep=2):
    """Writes `state` as the checkpoint of state['iter_num'] and returns its path.

    Written beside, synced, then renamed: a checkpoint under its final name is complete. The `keep` newest stay, and
    `best.pt` becomes this one if `best`.
    """
    out_dir = Path(out_dir)
    path = out_dir / f'ckpt_{state["iter_num"]:08d}.pt'
    partial = path.with_suffix('.partial')
    with partial.open('wb') as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)
    if best:
        link = out_dir / 'best.partial'
        link.unlink(missing_ok=True)
        os.link(path, link)
        link.replace(out_dir / 'best.pt')
    sync_directory(out_dir)
    for old in checkpoints(out_dir)[keep:]:
        old.unlink()
    return path


def checkpoints(out_dir):
    """The checkpoints in `out_dir`, newest iteration first."""
    return sorted(Path(out_dir).glob('ckpt_*.pt'), reverse=True)


def load(path, map_location='cpu'):
    """The checkpoint at `path`: a .pt file, or an out_dir, whose newest one is taken. Returns (path, state).

    Loads tensors and plain containers only. SystemExit with one line when there is none or it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        found = checkpoints(path) or sorted(path.glob('best.pt'))
        if not found:
            raise SystemExit(f'{path}: no checkpoint ckpt_*.pt in it; train first, or check --out_dir')
        path = found[0]
    if not path.is_file():
        raise SystemExit(f'{path}: no such checkpoint')
    try:
        state = torch.load(path, map_location=map_location, weights_only=True, mmap=True)
        return path, {key: state[key] for key in ('model', 'model_args', 'iter_num', 'config')} | state
    except Exception as error:  # whatever a damaged or foreign file makes torch.load raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SystemExit(f'{path}: not a checkpoint of this repository ({reason})') from None


def sync_directory(path):
    """Makes renames in the directory `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
