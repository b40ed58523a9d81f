"""The files of a run in its out_dir: checkpoints (atomic saving, safe loading, retention), the lock, logs.

Checkpoints are `ckpt_ITERATION.pt`, and `best.pt`, a second name of the one with the lowest validation loss. They hold
nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and what else a run needs to go on; there
is no state of random generators among it, because everything random is a function of (seed, iteration).
"""

import contextlib
import fcntl
import json
import os
import pickle
import platform
import re
import shutil
import socket
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

BEST, NONE = -1, -2  # stand for best.pt, and for no checkpoint, where others have their iteration
LOCKS = []  # files of this process whose closing would give up a lock

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save(out_dir, state, best=False, keep=2):
    """Writes `state` as the checkpoint of state['iter_num'].

    Written beside, synced, then renamed: a checkpoint under its final name is complete. Then `best.pt` becomes this
    one if `best`, and of the checkpoints up to this one the `keep` newest stay.

    Returns its path, or None, with a warning, when the file system fails (a full disk); older checkpoints then remain.
    """
    out_dir = Path(out_dir)
    path = path_of(out_dir, state['iter_num'])
    try:
        with _beside(path) as partial, partial.open('wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        if best:
            with _beside(out_dir / 'best.pt') as partial:
                try:
                    os.link(path, partial)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, partial)
        _sync_directory(out_dir)
    except (OSError, RuntimeError) as error:
        # torch.save wraps the error of a write into a RuntimeError of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        warn(f'{path}: could not be saved ({cause.strerror}); older checkpoints are kept, training goes on')
        return None
    for old in [p for p in checkpoints(out_dir) if BEST < number(p) <= state['iter_num']][keep:]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


@contextlib.contextmanager
def _beside(path):
    """Yields the path of a file to be written that then takes the place of `path`; it is removed on failure."""
    partial = path.with_suffix('.partial')
    try:
        partial.unlink(missing_ok=True)
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _sync_directory(path):
    """Makes renames in the directory `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------------------------------
# Finding and loading


def path_of(out_dir, iteration):
    """Where the checkpoint of `iteration` is; BEST stands for best.pt."""
    return Path(out_dir) / ('best.pt' if iteration == BEST else f'ckpt_{iteration:08d}.pt')


def number(path):
    """The iteration that a checkpoint's name says, BEST for best.pt, NONE for other files."""
    match = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
    return int(match[1]) if match else BEST if path.name == 'best.pt' else NONE


def checkpoints(out_dir):
    """The checkpoints in `out_dir`, newest iteration first, best.pt last."""
    return sorted((p for p in Path(out_dir).glob('*.pt') if number(p) != NONE), key=number, reverse=True)


def newest(out_dir):
    """The path of the newest valid checkpoint in `out_dir`; None when it holds no checkpoint.

    Damaged and foreign files are passed over with a warning. SystemExit with one line when there is nothing else.
    """
    found = checkpoints(out_dir)
    for path in found:
        try:
            load(path)
            return path
        except SystemExit as error:
            warn(f'{error}; it is skipped')
    if found:
        raise SystemExit(f'{out_dir}: none of its {len(found)} checkpoints can be read; '
                         'restore one of them, or start anew in another --out_dir')
    return None


def load(path, map_location='cpu'):
    """The checkpoint at `path`: a .pt file, or an out_dir, whose newest valid one is taken. Returns (path, state).

    Loads tensors and plain containers only, memory-mapped, after comparing the file with its checksums. SystemExit with
    one line when there is none or it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        directory, path = path, newest(path)
        if path is None:
            raise SystemExit(f'{directory}: no checkpoint ckpt_*.pt in it; train first, or check --out_dir')
    if not path.is_file():
        raise SystemExit(f'{path}: no such checkpoint')
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError('its content does not fit its checksums')
        with warnings.catch_warnings():  # torch's remarks on the pickles of other programs
            warnings.simplefilter('ignore')
            state = torch.load(path, map_location=map_location, weights_only=True, mmap=True)
        require(state, model=dict, model_args=dict, iter_num=int, config=dict)
        if state['iter_num'] < 0:
            raise ValueError(f'its iter_num is {state["iter_num"]}')
        return path, state
    except pickle.UnpicklingError:
        reason = 'it holds objects that could run code, which no checkpoint does'
    except zipfile.BadZipFile:
        reason = 'it is truncated, or something else'
    except Exception as error:  # whatever a damaged or foreign file makes torch.load raise
        reason = _first_line(error)
    raise SystemExit(f'{path}: not a checkpoint of this repository ({reason})')


def require(state, **kinds):
    """ValueError unless the checkpoint `state` is a dict with these keys, each of its type."""
    for key, kind in kinds.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise ValueError(f'it has no {key}')


# ----------------------------------------------------------------------------------------------------------------------
# Starting and resuming a run


def begin(world, out_dir, init_from, read_only=False):
    """Makes `out_dir` this run's own, and loads the checkpoint from which the run goes on.

    Args:
        world: the ranks. The first one takes and chooses, all load.
        init_from: 'resume', 'auto' (resume if there is a checkpoint), or anything else for a start without one.
        read_only: nothing will be written (evaluation), so it does not matter what other runs do.

    Returns (path, state), or (None, None) for a start without a checkpoint. SystemExit with one line when another run
    has the directory, it cannot be written, there is nothing to resume, or the run would overwrite checkpoints.
    """
    out_dir, chosen = Path(out_dir), NONE
    with world.together():
        if world.is_master:
            if init_from == 'resume' and not checkpoints(out_dir):
                raise SystemExit(f'{out_dir}: no checkpoint in it, nothing to resume; check --out_dir, or use '
                                 '--init_from=auto')
            if not read_only:
                claim(out_dir)
            if init_from in ('resume', 'auto'):
                found = newest(out_dir)
                chosen = number(found) if found else NONE
            elif checkpoints(out_dir) and not read_only:
                raise SystemExit(f'{out_dir}: holds checkpoints, which a new run would overwrite; go on with that run '
                                 'by --init_from=resume (or auto), or choose another --out_dir')
    chosen = world.from_master(chosen)
    if chosen == NONE:
        return None, None
    with world.together():
        return load(path_of(out_dir, chosen))


def claim(out_dir):
    """Makes `out_dir`, if need be, and locks it until this process ends, whatever ends it. The lock names the process.

    SystemExit with one line when another run has it, or it cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = (out_dir / 'lock').open('a+', encoding='utf-8')
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SystemExit(f'{out_dir}: another run (process {lock.read().strip()}) is writing there; stop it, or '
                             'choose another --out_dir') from None
        except OSError as error:
            warn(f'{out_dir}: the file system has no locks ({error.strerror}); make sure that no other run uses it')
        lock.truncate(0)
        lock.write(f'{os.getpid()} on {socket.gethostname()}\n')
        lock.flush()
        for partial in out_dir.glob('*.partial'):  # left by a run that was killed while saving
            partial.unlink()
    except OSError as error:
        raise SystemExit(f'{out_dir}: cannot be written ({error.strerror}); set --out_dir to a directory that '
                         'can') from None
    LOCKS.append(lock)


def compare(path, state, config, model_args, data, ignore_data_change=False):
    """Checks that the checkpoint `state` from `path` can be resumed by a run with these settings.

    Args:
        config, model_args, data: dicts as `save` gets them; data: fingerprints by split.

    Returns the settings that differ, as text. SystemExit with one line when model, optimizer or data are others.
    """
    try:
        require(state, optimizer=dict, scaler=dict, best_val_loss=float, evaluated=int, seconds=float, clipped=int,
                passed_over=int, latest_losses=list, data=dict)
    except ValueError as error:
        raise SystemExit(f'{path}: cannot be resumed ({error})') from None
    differing = [key for key in model_args if state['model_args'].get(key) != model_args[key]]
    if differing:
        raise SystemExit(f'{path}: is a model with another {", ".join(differing)}; resume with its own settings, or '
                         'choose another --out_dir')
    before = state['config']
    if before.get('optimizer_name') != config['optimizer_name']:
        raise SystemExit(f'{path}: was trained with --optimizer_name={before.get("optimizer_name")}; resume with it, '
                         'or choose another --out_dir')
    changed = [split for split in data if state['data'].get(split) != data[split]]
    if changed and not ignore_data_change:
        raise SystemExit(f'{path}: was trained on another data set than {config["dataset"]} ({", ".join(changed)}.bin '
                         'differs); name its --dataset, or go on with this one by --ignore_data_change=True')
    return [f'{key} = {value!r}, was {before[key]!r}' for key, value in config.items()
            if key in before and before[key] != value and key not in ('init_from', 'out_dir')]


def restore(path, state, model, optimizer, scaler):
    """Puts the tensors of the checkpoint `state` from `path` into model, optimizer and GradScaler.

    The optimizer keeps the settings it was built with. SystemExit with one line when something does not fit.
    """
    try:
        model.load_state_dict(state['model'])
        params = [p for group in optimizer.param_groups for p in group['params']]
        saved = state['optimizer']['state']
        for index, entries in saved.items():
            for key, value in entries.items():
                if torch.is_tensor(value) and value.dim() and value.shape != params[index].shape:
                    raise ValueError(f'{key} of parameter {index} has the shape {tuple(value.shape)}')
        optimizer.load_state_dict(dict(state=saved, param_groups=optimizer.state_dict()['param_groups']))
        for entries in optimizer.state.values():
            # Not the mapped file, which would keep its place on the disk after its deletion.
            entries.update({key: value.clone() for key, value in entries.items()
                            if torch.is_tensor(value) and value.device.type == 'cpu'})
        if state['scaler']:
            scaler.load_state_dict(state['scaler'])
    except Exception as error:
        reason = _first_line(error)
        raise SystemExit(f'{path}: does not fit this run ({reason}); resume with its own settings') from None


# ----------------------------------------------------------------------------------------------------------------------
# Logs


def write_text(path, text):
    """Replaces the file `path`, atomically. SystemExit with one line when it cannot be written."""
    try:
        with _beside(path) as partial:
            partial.write_text(text, encoding='utf-8')
    except OSError as error:
        raise SystemExit(f'{path}: cannot be written ({error.strerror})') from None


def describe_run(out_dir, values, sources, **more):
    """Writes config.json: every setting and its source, the command, versions, the commit, and what `more` says."""
    try:
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    except OSError:  # no git here
        commit = None
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    write_text(Path(out_dir) / 'config.json', json.dumps(dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        processor=platform.processor() or platform.machine(), git_commit=commit), indent=1))


def append_line(path, line):
    """Adds `line` to the file `path`, whole or not at all; warns when the file system fails."""
    data = line.encode() + b'\n'
    problem = 'No space left on device'
    try:
        with path.open('ab', buffering=0) as f:
            size = f.tell()
            if f.write(data) == len(data):
                return
            f.truncate(size)
    except OSError as error:
        problem = error.strerror
    warn(f'{path}: a line could not be written ({problem}); training goes on')


def rewind_log(path, iteration, evaluated):
    """Drops from a metrics.jsonl what a run that goes on at `iteration` will write again, and torn lines.

    `evaluated` is the iteration of its last evaluation, which precedes the update of that iteration.
    """
    kept = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            if entry['iter'] < iteration or ('val/loss' in entry and entry['iter'] == iteration == evaluated):
                kept.append(line + '\n')
        except (ValueError, KeyError, TypeError):
            pass
    write_text(path, ''.join(kept))


def warn(text):
    """One line on stderr."""
    print(f'warning: {text}', file=sys.stderr, flush=True)


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
