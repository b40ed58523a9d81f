"""Checkpoints in a run's out_dir: saving, retention, loading and resuming; the lock of the directory.

`ckpt_ITERATION.pt` has nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and everything
else that resuming needs. It holds no random generators, because all random numbers are functions of (seed, iteration).
A sharded model's checkpoint is a directory `ckpt_ITERATION`, see sharded.py. Any number of ranks can resume from either
kind, sharded or not. `best.txt` names the checkpoint with the lowest validation loss."""

import contextlib
import pickle
import re
import shutil
from pathlib import Path

from runtime import optimizer_state
from runtime.files import atomic_write, load_pt, lock, one_line, put_in_place, save_pt, warn
from runtime.signals import UNDO

REQUIRED = 'model', 'model_args', 'iter_num', 'config'

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save_run(world, out_dir, model, optimizer, state, best=False, keep=2):
    """Save a run as the checkpoint of state['iter_num'], and remove older ones, see `prune`. Rank 0 writes one file, or
    all ranks their shards. Return the path; warn and return None if the file system fails, as on a full disk.
    Collective: every rank must call it. `state` has everything but `model` and `optimizer`, as plain values."""
    world.reshard(model)
    with world.exit_together():
        saved_optimizer, shards = optimizer_state.to_save(optimizer, parameter_names(model), world.sharded)
    path, saved = Path(out_dir) / f'ckpt_{state["iter_num"]:08d}{"" if world.sharded else ".pt"}', True
    state = dict(state, optimizer=saved_optimizer,
                 train_state=optimizer_state.map_tensors(state['train_state'], name='TrainState'))
    try:
        if world.sharded:
            from runtime import sharded
            sharded.write(world, path, model, state, shards)
        elif world.is_master:
            save_pt(path, dict(state, model=model.state_dict()))
        if world.is_master:
            if best:
                with atomic_write(path.with_name('best.txt'), 'w', sync=True) as f:
                    f.write(f'{path.name}\n')
            prune(path.parent, number(path), keep)
    except OSError as error:
        saved = False
        if world.is_master:
            shutil.rmtree(path.with_suffix('.partial'), ignore_errors=True)  # of shards
            warn(f'{path}: could not be saved ({error.strerror or error}); training continues')
    return path if world.from_master(int(saved)) else None


def parameter_names(model):
    """Return {parameter: name}, the first name of a tied one."""
    return {p: name for name, p in model.named_parameters()}


def prune(out_dir, iteration, keep):
    """Remove the checkpoints up to `iteration`, except for the `keep` newest of them and the best one."""
    best = best_path(out_dir)
    for old in [path for path in checkpoints(out_dir) if number(path) <= iteration][keep:]:
        if old != best:
            remove(old)


def remove(path):
    with contextlib.suppress(OSError):  # the new checkpoint is there; a later save tries again
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# ----------------------------------------------------------------------------------------------------------------------
# Finding and loading


def is_shards(path):
    return (path / 'state.pt').is_file()


def path_of(out_dir, iteration):
    """Return the path of the checkpoint of `iteration`: the directory if there is one."""
    directory = Path(out_dir) / f'ckpt_{iteration:08d}'
    return directory if is_shards(directory) else directory.with_suffix('.pt')


def best_path(out_dir):
    """Return the path of the checkpoint with the lowest validation loss, which best.txt names; None without one."""
    named = Path(out_dir) / 'best.txt'
    name = named.read_text(encoding='utf-8', errors='replace').strip() if named.is_file() else ''
    return next((path for path in checkpoints(out_dir) if path.name == name), None)


def number(path):
    """Return the iteration in a checkpoint's name; None for other files."""
    match = re.fullmatch(r'ckpt_(\d{8,18})(\.pt)?', path.name)
    return int(match[1]) if match else None


def checkpoints(out_dir):
    """List the checkpoints in `out_dir`, newest iteration first."""
    return sorted((p for p in Path(out_dir).glob('ckpt_*') if number(p) is not None), key=number, reverse=True)


def exists(path):
    """Return whether `path` can be an argument of `load_checkpoint`: a checkpoint or an out_dir with some."""
    path = Path(path)
    return path.is_file() or is_shards(path) or bool(checkpoints(path)) or path.name == 'best.pt'


def model_seed(state):
    """Return the seed with which a checkpoint's model was constructed, for random values that it does not hold."""
    return state.get('model_seed', state['config'].get('seed', 0))  # other programs save no model_seed


def load_checkpoint(path, weights=True, check=True):
    """Load the checkpoint at `path`, or the newest readable one of an out_dir; OUT_DIR/best.pt is the best one. Return
    (path, state), or stop with one line. For shards see `sharded.read_state`."""
    path = Path(path)
    if path.name == 'best.pt' and not path.exists():
        path = best_path(path.parent) or path
    if path.is_dir() and not is_shards(path):
        return load_newest(path, weights)
    state, reason = {}, ''
    try:
        if path.is_dir():
            from runtime import sharded
            state = sharded.read_state(path, weights, check)
        else:
            state = load_pt(path)
    except pickle.UnpicklingError:  # torch's message advises to load it nevertheless
        reason = 'it holds objects that could run code, unlike a checkpoint'
    except Exception as error:  # Damaged and foreign files raise errors of many classes.
        reason = one_line(error)
    if missing := [key for key in REQUIRED if key not in state]:
        raise SystemExit(f'{path}: not a checkpoint of this repository ({reason or f"it has no {missing[0]}"})')
    if 'train_state' not in state:  # another program wrote it
        state['model'] = clean_state_dict(state['model'])
    elif 'optimizer' in state and 'shapes' not in state['optimizer']:
        raise SystemExit(f'{path}: a checkpoint from before version 0.2, which only the version that wrote it can read')
    return path, state


def load_newest(out_dir, weights=True):
    """Load the newest readable checkpoint in `out_dir`, and warn of newer ones. Exit if none is readable."""
    problems = []
    for path in checkpoints(out_dir):
        try:
            loaded = load_checkpoint(path_of(out_dir, number(path)), weights)
        except SystemExit as error:
            problems.append(str(error))
        else:
            for problem in problems:
                warn(f'{problem}; it is skipped')
            return loaded
    raise SystemExit(problems[0] if problems else f'{out_dir}: has no checkpoint; name the --out_dir of a run')


def clean_state_dict(weights):
    """Return another program's weights under the names that they have here: without prefixes of torch.compile and DDP,
    and without the attention masks that nanoGPT and the official repository may save."""
    cleaned = {re.sub(r'^(module\.)+', '', name.replace('_orig_mod.', '')): weight for name, weight in weights.items()}
    return {name: weight for name, weight in cleaned.items()
            if not name.endswith('.attn.masked_bias') and not (name.endswith('.attn.bias') and weight.dim() == 4)}


# ----------------------------------------------------------------------------------------------------------------------
# Starting and resuming a run


def open_run(world, out_dir, *, must_resume=False, may_resume=False, read_only=False):
    """Lock `out_dir` for this run, unless `read_only`, and load the checkpoint from which the run must or may resume.
    Return (path, state); (None, None) without one. Exit if the run would overwrite checkpoints."""
    out_dir, path, state = Path(out_dir), None, None
    with world.exit_together():
        if world.is_master:
            path, state = claim(out_dir, must_resume, may_resume, read_only)
    iteration = world.from_master(number(path) if path else 0)  # No run saves at iteration 0.
    with world.exit_together():
        if world.sharded and not read_only and not (out_dir / 'lock').is_file():
            raise SystemExit(f'{out_dir}: rank {world.rank} does not see what rank 0 has written there; set --out_dir '
                             'to a directory on a file system that all machines share')
        if iteration and not world.is_master:
            path, state = load_checkpoint(path_of(out_dir, iteration), weights=False, check=False)
    return path, state


def claim(out_dir, must_resume, may_resume, read_only):
    """Do rank 0's part of `open_run`."""
    if not read_only:
        UNDO.enter_context(lock(out_dir / 'lock'))
        put_in_place(out_dir)
        for left_by_a_kill in out_dir.glob(f'ckpt_{"[0-9]" * 8}*.partial'):
            remove(left_by_a_kill)
    exist, new = checkpoints(out_dir), not (must_resume or may_resume or read_only)
    if new and exist:
        raise SystemExit(f'{out_dir}: holds checkpoints, which a new run would overwrite; continue that run with '
                         '--auto_resume=True, or choose another --out_dir')
    log = out_dir / 'metrics.jsonl'  # with one validation loss the run has just begun
    if new and log.is_file() and log.read_text().count('"val/loss"') > 1:
        raise SystemExit(f'{out_dir}: holds the metrics of a run without checkpoints, which a new run would overwrite; '
                         'remove it, or choose another --out_dir')
    if not must_resume and not (may_resume and exist):
        return None, None
    return load_newest(out_dir, weights=False)


def load_tensors(path, state, model, optimizer, scaler):
    """Load the tensors of the checkpoint `state` from `path` into model, optimizer and GradScaler, without
    communication. RuntimeError or ValueError if something does not fit."""
    saved, names = state['optimizer'], parameter_names(model)
    if path.is_dir():
        from runtime import sharded
        sharded.load_into(sharded.model_tensors(model), path)
        saved = sharded.read_optimizer(path, saved, {name: p for p, name in names.items()})
    else:
        targets = model.state_dict()
        model.load_state_dict({name: optimizer_state.spread(value, targets.get(name))
                               for name, value in state['model'].items()})
    optimizer_state.load_optimizer(optimizer, saved, names)
    if state['scaler']:
        scaler.load_state_dict(state['scaler'])
