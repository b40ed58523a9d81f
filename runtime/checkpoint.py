"""The files of a run in its out_dir: checkpoints (atomic saving, safe loading, retention), the lock, logs.

Checkpoints are `ckpt_ITERATION.pt`, and `best.pt`, a second name of the one with the lowest validation loss. They hold
nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and what else a run needs to go on; there
is no state of random generators among it, because everything random is a function of (seed, iteration).

Where the model is sharded, a checkpoint is a directory `ckpt_ITERATION` (and `best`, a link to one) to which every rank
writes its part: the tensors in the format of torch.distributed.checkpoint, the rest in state.json. Either kind can be
resumed by any number of ranks, sharded or not.
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
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime.distributed import restarts

BEST, NONE = -1, -2  # stand for best.pt, and for no checkpoint, where others have their iteration
FAILED = 'failed.txt'  # what a run said when it gave up
LOCKS = []  # files of this process whose closing would give up a lock

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save_run(world, out_dir, model, optimizer, state, best=False, keep=2):
    """Saves a run with its `model` and `optimizer`: rank 0 one file, or all ranks their shards. See `save`.

    Returns the path on every rank, or None where it failed; what fails on rank 0 alone is known to rank 0 alone.
    """
    if world.sharded:
        return save_shards(world, out_dir, model, optimizer, state, best, keep)
    if not world.is_master:
        return path_of(out_dir, state['iter_num'])
    return save(out_dir, dict(model=model.state_dict(), optimizer=optimizer.state_dict(), **state), best, keep)


def save(out_dir, state, best=False, keep=2):
    """Writes `state` as the checkpoint of state['iter_num'].

    Written beside, synced, then renamed: a checkpoint under its final name is complete. Then `best.pt` becomes this
    one if `best`, and of the checkpoints up to this one the `keep` newest stay.

    Returns its path, or None, with a warning, when the file system fails (a full disk); older checkpoints then remain.
    """
    out_dir = Path(out_dir)
    path = out_dir / f'ckpt_{state["iter_num"]:08d}.pt'
    try:
        write_file(path, state)
        if best:
            with _beside(out_dir / 'best.pt') as partial:
                try:
                    os.link(path, partial)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, partial)
            (out_dir / 'best').unlink(missing_ok=True)
        _remove(path.with_suffix(''))
        _sync_directory(out_dir)
    except OSError as error:
        _warn_not_saved(path, error.strerror)
        return None
    _retire(out_dir, state['iter_num'], keep)
    return path


def save_shards(world, out_dir, model, optimizer, state, best=False, keep=2):
    """`save_run` for a sharded model: a directory in a file system that all ranks share.

    Its files are written to a directory beside, synced, and their checksums put into state.json; then rank 0 renames
    it. A matter of all ranks; returns the same on all of them.
    """
    path = Path(out_dir) / f'ckpt_{state["iter_num"]:08d}'
    partial = path.with_suffix('.partial')
    model.reshard()  # a forward without a backward leaves the parameters of the root gathered
    if world.is_master:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        dcp.save(named_tensors(model, optimizer), storage_writer=ShardWriter(partial))
    except dcp.api.CheckpointException as error:  # the same on all ranks
        if world.is_master:
            rank, (cause, _) = next(iter(error.failures.items()))
            _warn_not_saved(path, f'rank {rank}: {getattr(cause, "strerror", None) or _first_line(cause)}')
            shutil.rmtree(partial, ignore_errors=True)
        return None
    mine = partial / f'__{world.rank}_0.distcp'
    sums = world.gather(torch.tensor([checksum(mine) if mine.is_file() else -1], device=world.device)).flatten()
    saved = True
    if world.is_master:
        try:
            files = {f'__{rank}_0.distcp': crc for rank, crc in enumerate(sums.tolist()) if crc >= 0}
            files['.metadata'] = checksum(partial / '.metadata')
            write_text(partial / 'state.json', with_checksum(dict(state, files=files, tied=tied(model))), sync=True)
            _sync_directory(partial)
            old = path.with_suffix('.old')
            if path.is_dir():  # of this iteration before its evaluation, say: it goes once the other one has its name
                path.rename(old)
            partial.replace(path)
            shutil.rmtree(old, ignore_errors=True)
            path.with_suffix('.pt').unlink(missing_ok=True)
            if best:
                with _beside(path.with_name('best')) as link:
                    link.symlink_to(path.name)
                path.with_name('best.pt').unlink(missing_ok=True)
            _sync_directory(path.parent)
            _retire(out_dir, state['iter_num'], keep)
        except (OSError, SystemExit) as error:
            _warn_not_saved(path, getattr(error, 'strerror', None) or error)
            _take_back(out_dir)
            shutil.rmtree(partial, ignore_errors=True)
            saved = False
    return path if world.from_master(int(saved)) else None


def _take_back(out_dir):
    """Gives checkpoints that were to be replaced their names back where nothing has taken them."""
    for old in out_dir.glob('ckpt_*.old'):
        shutil.rmtree(old) if old.with_suffix('').exists() else old.rename(old.with_suffix(''))


def named_tensors(model, optimizer):
    """The tensors of a run by name: model.NAME, and optimizer.NAME.KEY for the optimizer's state of parameter NAME."""
    found = {f'model.{name}': p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f'optimizer.{name}.{key}': value for key, value in optimizer.state[p].items()}
    return found


def tied(model):
    """The further names of parameters that have several, and the first one of each."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}


def checksum(path):
    """CRC-32 of a file."""
    value = 0
    with path.open('rb') as f:
        while block := f.read(2 ** 24):
            value = zlib.crc32(block, value)
    return value


def with_checksum(state):
    """`state` as the text of a state.json: JSON with the CRC-32 of the rest in it."""
    return json.dumps(dict(crc32=zlib.crc32(json.dumps(state).encode()), state=state))


def _retire(out_dir, iteration, keep):
    """Removes all but the `keep` newest checkpoints up to `iteration`, and the best one."""
    best = path_of(out_dir, BEST).resolve()
    for old in [p for p in checkpoints(out_dir) if BEST < number(p) <= iteration][keep:]:
        with contextlib.suppress(OSError):
            if old.is_file():
                old.unlink()
            elif old.resolve() != best:
                _remove(old)


def _remove(path):
    """Removes the directory `path`, if there is one; it has gone from its place at once."""
    if path.is_dir():
        shutil.rmtree(path.rename(path.with_suffix('.old.partial')))


def _warn_not_saved(path, reason):
    warn(f'{path}: could not be saved ({reason}); older checkpoints are kept, training goes on')


def write_file(path, state):
    """Writes the checkpoint `state` as the file `path`, which is there complete or not at all; OSError if it fails."""
    with _beside(path) as partial, partial.open('wb') as f:
        try:
            torch.save(state, f)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save wraps the error of a write
                raise error.__context__ from None
            raise
        f.flush()
        os.fsync(f.fileno())


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
    """Where the checkpoint of `iteration` is, a directory if there is one; BEST stands for the best one."""
    directory = Path(out_dir) / ('best' if iteration == BEST else f'ckpt_{iteration:08d}')
    return directory if is_shards(directory) else directory.with_suffix('.pt')


def is_shards(path):
    """Whether `path` is the directory of a sharded checkpoint."""
    return (Path(path) / 'state.json').is_file()


def number(path):
    """The iteration that a checkpoint's name says, BEST for the best one, NONE for other files."""
    match = re.fullmatch(r'ckpt_(\d+)(\.pt)?', path.name)
    return int(match[1]) if match else BEST if path.name in ('best.pt', 'best') else NONE


def checkpoints(out_dir):
    """The checkpoints in `out_dir`, newest iteration first, the best one last."""
    found = (p for pattern in ('ckpt_*', 'best*') for p in Path(out_dir).glob(pattern) if number(p) != NONE)
    return sorted(found, key=number, reverse=True)


def newest(out_dir, but=(), share=(0, 1)):
    """The path of the newest valid checkpoint in `out_dir`; None when it holds no checkpoint.

    Damaged and foreign files are passed over with a warning, and the iterations `but` without. `share` as for `load`.
    SystemExit with one line when there is nothing else.
    """
    found = checkpoints(out_dir)
    for path in [p for p in found if number(p) not in but]:
        try:
            load(path, weights=False, share=share)
            return path
        except SystemExit as error:
            warn(f'{error}; it is skipped')
    if found:
        raise SystemExit(f'{out_dir}: none of its {len(found)} checkpoints can be read; '
                         'restore one of them, or start anew in another --out_dir')
    return None


def load(path, weights=True, share=(0, 1)):
    """The checkpoint at `path`, or the newest valid one of an out_dir. Returns (path, state).

    Loads tensors and plain containers only, after comparing the file with its checksums: a .pt file memory-mapped, of
    a directory the model, unless `weights` is False, and not the optimizer. Of a directory's files only the i-th of
    every n are compared, where `share` is (i, n). SystemExit with one line when there is none or it cannot be read.
    """
    path = Path(path)
    if path.is_dir() and not is_shards(path):
        directory, path = path, newest(path)
        if path is None:
            hint = 'name ckpt.pt, nanoGPT\'s, itself' if (directory / 'ckpt.pt').is_file() else 'train first'
            raise SystemExit(f'{directory}: no checkpoint ckpt_*.pt in it; {hint}, or check --out_dir')
    if not path.exists():
        raise SystemExit(f'{path}: no such checkpoint')
    try:
        state = _load_shards(path, weights, share) if path.is_dir() else _load_file(path)
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


def _load_file(path):
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError('its content does not fit its checksums')
    with warnings.catch_warnings():  # torch's remarks on the pickles of other programs
        warnings.simplefilter('ignore')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def _load_shards(path, weights, share):
    text = (path / 'state.json').read_text(encoding='utf-8')
    state = json.loads(text)['state']
    if with_checksum(state) != text:
        raise ValueError('state.json does not fit its checksum')
    for name, crc in list(state.pop('files').items())[share[0]::share[1]]:
        if not (path / name).is_file() or checksum(path / name) != crc:
            raise ValueError(f'{name} does not fit its checksum')
    model = read_shards(path, 'model.') if weights else {}
    also = state.pop('tied')
    return dict(state, model=model | {name: model[first] for name, first in also.items() if weights})


def read_shards(path, prefix):
    """Whole tensors of the directory `path`, by what follows `prefix` in their names; for one process."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in tensors_in(path).items() if name.startswith(prefix)}
    _load_into(tensors, path)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _load_into(tensors, path):
    """Fills `tensors`, by their names, from the directory `path`, without communication."""
    with warnings.catch_warnings():  # the remark that there is no process group
        warnings.simplefilter('ignore')
        dcp.load(tensors, storage_reader=ShardReader(path), no_dist=True)


def tensors_in(path):
    """The metadata (size, properties.dtype) of the tensors in the directory `path`, by name."""
    return ShardReader(path).read_metadata().state_dict_metadata


class ShardWriter(dcp.FileSystemWriter):
    """Writes shards without a word of where that was."""

    def storage_meta(self):
        return None


class ShardReader(dcp.FileSystemReader):
    """Reads shards without running code that a file may hold: tensors, and metadata of nothing else."""

    def read_metadata(self, *args, **kwargs):
        """The metadata; UnpicklingError when it is about anything but tensors."""
        with (Path(self.path) / '.metadata').open('rb') as f:
            metadata = _MetadataUnpickler(f).load()
        if not all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError('not a tensor')
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what the metadata of tensors consist of."""

    ALLOWED = {
        'torch.distributed.checkpoint.metadata': {
            'Metadata', 'MetadataIndex', 'TensorStorageMetadata', 'TensorProperties', 'ChunkStorageMetadata',
            'StorageMeta', '_MEM_FORMAT_ENCODING'},
        'torch.distributed.checkpoint.filesystem': {'_StorageInfo'},
        'torch.serialization': {'_get_layout'},
        'torch': {'Size', 'float32', 'bfloat16', 'float64', 'int64'},
    }

    def find_class(self, module, name):
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f'{module}.{name}')
        return super().find_class(module, name)


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
        world: the ranks. The first one takes and chooses; all load, and each looks for damage in its share of a
            directory's files, which may be more than one rank can read in time.
        init_from: 'resume', 'auto' (resume if there is a checkpoint), or anything else for a start without one.
        read_only: nothing will be written (evaluation), so it does not matter what other runs do.

    A run that torchrun has restarted resumes, whatever its init_from.

    Returns (path, state), or (None, None) for a start without a checkpoint. SystemExit with one line when another run
    has the directory, it cannot be written, there is nothing to resume, or the run would overwrite checkpoints.
    """
    out_dir = Path(out_dir)
    init_from = 'auto' if restarts() else init_from
    with world.exit_together():
        if world.is_master:
            if init_from == 'resume' and not checkpoints(out_dir):
                raise SystemExit(f'{out_dir}: no checkpoint in it, nothing to resume; check --out_dir, or use '
                                 '--init_from=auto')
            if not read_only:
                claim(out_dir)
            if init_from not in ('resume', 'auto') and checkpoints(out_dir) and not read_only:
                raise SystemExit(f'{out_dir}: holds checkpoints, which a new run would overwrite; go on with that run '
                                 'by --init_from=resume (or auto), or choose another --out_dir')
    if world.sharded and not read_only:
        with world.exit_together():
            if not (out_dir / 'lock').is_file():
                raise SystemExit(f'{out_dir}: rank {world.rank} does not see what rank 0 has written there; '
                                 'set --out_dir to a directory on a file system that all machines share')
    damaged = []
    while True:
        chosen = NONE
        with world.exit_together():
            if world.is_master and init_from in ('resume', 'auto'):
                found = newest(out_dir, damaged, (0, world.size))
                chosen = number(found) if found else NONE
        chosen = world.from_master(chosen)
        if chosen == NONE:
            return None, None
        try:
            loaded = load(path_of(out_dir, chosen), weights=False, share=(world.rank, world.size))
        except SystemExit as error:
            warn(f'{error}; it is skipped')
            loaded = None
        if not world.sum(torch.tensor(float(loaded is None), device=world.device)):
            return loaded
        damaged.append(chosen)


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
        (out_dir / FAILED).unlink(missing_ok=True)
        _take_back(out_dir)
        for partial in out_dir.glob('*.partial'):  # left by a run that was killed while saving
            shutil.rmtree(partial) if partial.is_dir() and not partial.is_symlink() else partial.unlink()
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
        require(state, scaler=dict, best_val_loss=float, evaluated=int, tokens=int, seconds=float, clipped=int,
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

    The optimizer keeps the settings it was built with. No communication, sharded or not. SystemExit with one line when
    something does not fit.
    """
    try:
        if path.is_dir():
            for name, entry in tensors_in(path).items():
                _make_room(model, optimizer, name, entry.size, entry.properties.dtype)
            _load_into(named_tensors(model, optimizer), path)
        elif any(isinstance(p, DTensor) for p in model.parameters()):
            _restore_into_shards(state, model, optimizer)
        else:
            _restore_file(state, model, optimizer)
        if state['scaler']:
            scaler.load_state_dict(state['scaler'])
    except Exception as error:
        reason = _first_line(error)
        raise SystemExit(f'{path}: does not fit this run ({reason}); resume with its own settings') from None


def _restore_file(state, model, optimizer):
    model.load_state_dict(state['model'])
    params = [p for group in optimizer.param_groups for p in group['params']]
    saved = state['optimizer']['state']
    for index, entries in saved.items():
        for key, value in entries.items():
            # Of the states that optimizers here have; what another one keeps, its own load_state_dict knows.
            if key in ('exp_avg', 'exp_avg_sq', 'hessian') and value.shape != params[index].shape:
                raise ValueError(f'{key} of parameter {index} has the shape {tuple(value.shape)}')
    optimizer.load_state_dict(dict(state=saved, param_groups=optimizer.state_dict()['param_groups']))
    for entries in optimizer.state.values():
        # Not the mapped file, which would keep its place on the disk after its deletion.
        entries.update({key: value.clone() for key, value in entries.items()
                        if torch.is_tensor(value) and value.device.type == 'cpu'})


def _restore_into_shards(state, model, optimizer):
    """Each rank takes its part of the whole tensors of a file."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = [name_of[id(p)] for group in optimizer.param_groups for p in group['params']]
    whole = {f'model.{name}': state['model'][name] for name in names}
    for index, entries in state['optimizer']['state'].items():
        whole |= {f'optimizer.{names[index]}.{key}': value for key, value in entries.items()}
    for name, source in whole.items():
        _make_room(model, optimizer, name, source.shape, source.dtype)
    for name, target in named_tensors(model, optimizer).items():
        if isinstance(target, DTensor):
            source = distribute_tensor(whole[name].to(target.device), target.device_mesh, target.placements,
                                       src_data_rank=None)
            target, whole[name] = target.to_local(), source.to_local()
        target.copy_(whole[name])


def _make_room(model, optimizer, name, shape, dtype):
    """Makes the optimizer's state that the tensor `name` of `named_tensors` goes to; ValueError if it does not fit."""
    kind, _, name = name.partition('.')
    name, _, key = name.rpartition('.') if kind == 'optimizer' else (name, '', '')
    p = model.get_parameter(name)
    if key and not len(shape):
        optimizer.state[p][key] = torch.zeros((), dtype=dtype, device=p.device)
    elif p.shape != torch.Size(shape):
        raise ValueError(f'{key or "the weight"} of {name} has the shape {tuple(shape)}')
    elif key:
        optimizer.state[p][key] = torch.zeros_like(p)


# ----------------------------------------------------------------------------------------------------------------------
# Logs


def write_text(path, text, sync=False):
    """Replaces the file `path`, atomically, with `sync` durably. SystemExit with one line when it cannot be written."""
    try:
        with _beside(path) as partial, partial.open('w', encoding='utf-8') as f:
            f.write(text)
            if sync:
                f.flush()
                os.fsync(f.fileno())
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
