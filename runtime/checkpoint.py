"""The checkpoints of a run in its out_dir: saving, retention, loading, resuming, and the directory's lock.

Checkpoints are `ckpt_ITERATION.pt`, and `best.pt`, a second name of the one with the lowest validation loss. They hold
nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and what else a run needs to resume. The
state of random generators is not among it, because everything random is a function of (seed, iteration).

Where the model is sharded, a checkpoint is a directory `ckpt_ITERATION` (and `best`, a link to one), see sharded.py.
Either kind can be resumed by any number of ranks, sharded or not.
"""

import contextlib
import fcntl
import inspect
import json
import os
import pickle
import re
import shutil
import socket
import warnings
import zipfile
from pathlib import Path

import torch

from runtime.distributed import full_tensor, is_sharded, one_message, restarts
from runtime.files import atomic_write, first_line, sync_directory, warn

BEST, NONE = -1, -2  # sentinel iteration numbers: the best checkpoint, and no checkpoint
FAILED = 'failed.txt'  # the last words of a run that gave up
LOCKS = []  # open files of this process that hold a lock

# The keys that a checkpoint must have, and those that resuming needs besides.
REQUIRED = dict(model=dict, model_args=dict, iter_num=int, config=dict)
TO_RESUME = dict(train_state=dict, optimizer=dict, scaler=dict, data=dict)

# Settings whose change alters nothing that a run computes, but for rounding.
HARMLESS = {
    'out_dir', 'init_from', 'eval_interval', 'eval_only', 'log_interval', 'always_save_checkpoint', 'keep_checkpoints',
    'ignore_data_change', 'max_hours', 'show_config', 'wandb_log', 'wandb_project', 'wandb_run_name', 'trackio_log',
    'dataset', 'batch_size', 'gradient_accumulation_steps', 'parallel', 'activation_checkpointing', 'backend', 'device',
    'compile'}

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save_run(world, out_dir, model, optimizer, state, best=False, keep=2):
    """Saves a run as the checkpoint of state['iter_num']: rank 0 one file, or all ranks their shards.

    It is written under another name, synced, then renamed: a checkpoint under its final name is complete. It becomes
    the best one if `best`, and of the checkpoints up to this one the `keep` newest stay. Collective: every rank must
    call it.

    Args:
        state: a dict of everything but the tensors of `model` and `optimizer`: plain values.

    Returns its path; None, with a warning, when the file system fails (a full disk). The same on every rank. SystemExit
    with one line when something in it could not be read back.
    """
    world.reshard(model)
    with world.exit_together():
        check_plain(state['train_state'], 'TrainState')
        packed, tensors = pack_optimizer(model, optimizer, world.sharded)
    path = Path(out_dir) / f'ckpt_{state["iter_num"]:08d}{"" if world.sharded else ".pt"}'
    try:
        if world.sharded:
            from runtime import sharded
            sharded.write(world, path, model, dict(state, best=best, optimizer=packed), tensors)
            if world.is_master and best:
                link(path.name, path.with_name('best'))
        elif world.is_master:
            save(path, dict(model=model.state_dict(), optimizer=unpack(packed, tensors.get), **state), best)
        if world.is_master:
            remove(path.with_suffix('') if path.suffix else path.with_suffix('.pt'))
            prune(path.parent, number(path), keep)
        saved = True
    except OSError as error:
        saved = False
        if world.is_master:
            kept = '; older checkpoints are kept' if any(number(p) >= 0 for p in checkpoints(out_dir)) else ''
            warn(f'{path}: could not be saved ({error.strerror or error}){kept}; training continues')
    return path if world.from_master(int(saved)) else None


def save(path, state, best=False):
    """Writes the dict `state` as the file `path`, which is complete or absent, and as best.pt if `best`. OSError where
    the file system fails."""
    path = Path(path)
    with atomic_write(path, sync=True) as f:
        try:
            torch.save(dict(state, best=best), f)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save wraps the error of a write
                raise error.__context__ from None
            raise
        if best:  # first: a run that is killed between the two writes both again
            f.flush()
            os.fsync(f.fileno())
            link(f.name, path.with_name('best.pt'))
    sync_directory(path.parent)


def link(target, best):
    """Makes `best` a link to `target`: a second name of a file, or a symbolic link to a directory beside it."""
    partial = best.with_name('best.partial')
    partial.unlink(missing_ok=True)
    partial.symlink_to(target) if best.suffix == '' else os.link(target, partial)
    if best.is_dir() and not best.is_symlink():  # of a run that was copied
        remove(best)
    partial.replace(best)
    remove(best.with_suffix('.pt' if best.suffix == '' else ''))


def prune(out_dir, iteration, keep):
    """Removes all but the `keep` newest checkpoints up to `iteration`, and the best one."""
    best = path_of(out_dir, BEST).resolve()
    for old in [p for p in checkpoints(out_dir) if BEST < number(p) <= iteration][keep:]:
        with contextlib.suppress(OSError):
            if old.is_file() or old.resolve() != best:  # a file's content stays under its name best.pt
                remove(old)


def remove(path):
    """Removes a checkpoint, if there is one; a directory leaves its place at once."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path.rename(path.with_suffix('.old.partial')))
    else:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Plain values and tensors, which are all that a checkpoint holds


def check_plain(values, what):
    """SystemExit with one line unless JSON can hold the dict `values`."""
    for key, value in values.items():
        try:
            json.dumps(value)
        except TypeError:
            raise SystemExit(f'{what}.{key}: a checkpoint cannot hold a {type(value).__name__} there; keep plain '
                             'numbers, and tensors in a buffer of the model') from None


def pack(value, name, tensors):
    """`value` as JSON can hold it: a tensor becomes {'tensor': its name}, and goes to the dict `tensors`.

    Args:
        value: tensors, numbers, strings and None, in dicts, lists and tuples.
        name: the beginning of the names of its tensors.

    TypeError where `value` holds anything else.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {'tensor': name}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {'dict': [[key, pack(item, f'{name}.{key}', tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f'{name}.{i}', tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {'tuple': items}
    if hasattr(value, 'item'):  # a number of NumPy
        value = value.item()
    if type(value) in (str, int, float, bool, type(None)):
        return value
    raise TypeError(f'{name} is of type {type(value).__name__}')


def unpack(value, find):
    """The inverse of `pack`: `find` gives the tensor of a name."""
    if isinstance(value, list):
        return [unpack(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'dict':
        return {key: unpack(item, find) for key, item in content}
    return tuple(unpack(content, find)) if kind == 'tuple' else find(content)


def pack_optimizer(model, optimizer, sharded):
    """(the state_dict of `optimizer` as `pack` makes it, its tensors by name); `sharded`: with parameters by name.

    SystemExit with one line when it holds something that no checkpoint can hold: other objects than tensors and plain
    values, or, sharded, a tensor that differs between ranks but is not a DTensor.
    """
    state, tensors = optimizer.state_dict(), {}
    if sharded:
        name_of = {id(p): name for name, p in model.named_parameters()}
        names = [name_of[id(p)] for group in optimizer.param_groups for p in group['params']]
        state = dict(state, state={names[i]: entries for i, entries in state['state'].items()}, param_groups=[
            dict(group, params=[names[i] for i in group['params']]) for group in state['param_groups']])
    try:
        packed = pack(state, 'optimizer', tensors)
        for name, tensor in tensors.items():
            if sharded and tensor.numel() > 1 and not is_sharded(tensor):
                raise TypeError(f'{name} is a tensor that each rank has for itself')
    except TypeError as error:
        raise SystemExit(f'{type(optimizer).__name__}: its state cannot be saved ({error}); keep plain numbers and '
                         f'tensors there{", or use --parallel=ddp" if sharded else ""}') from None
    return packed, tensors


def check_round_trip(world, model, optimizer, fresh):
    """SystemExit with one line unless a checkpoint would bring back the whole state of `optimizer` to `fresh`, the same
    optimizer without a state. To be called after the first step."""
    with world.exit_together():
        pack_optimizer(model, optimizer, world.sharded)
        saved = optimizer.state_dict()
        try:
            restore_optimizer(fresh, saved)
            lost = difference(saved, dict(fresh.state_dict(), param_groups=[
                {**group, **{key: value for key, value in theirs.items() if key in built_with(optimizer)}}
                for group, theirs in zip(fresh.state_dict()['param_groups'], saved['param_groups'])]))
        except Exception as error:  # whatever the optimizer's load_state_dict raises
            lost = first_line(error)
        if lost:
            raise SystemExit(f'{type(optimizer).__name__}: a checkpoint would not bring back its state ({lost}), and '
                             'the run could not be resumed; use another optimizer')


def difference(a, b, name='state'):
    """Where two nested states differ, as text; '' when they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and bool(full_tensor((a == b) | (a != a)).all())
        return '' if same else f'{name} differs'
    if type(a) is not type(b):
        return f'{name} is a {type(a).__name__}, and then a {type(b).__name__}'
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f'{name}.{min(map(str, a.keys() ^ b.keys()))} is missing'
        pairs = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f'{name} has another length'
        pairs = [(i, *both) for i, both in enumerate(zip(a, b))]
    else:
        return '' if a == b or a != a else f'{name} is {a!r:.40}, and then {b!r:.40}'
    return next(filter(None, (difference(one, other, f'{name}.{key}') for key, one, other in pairs)), '')


# ----------------------------------------------------------------------------------------------------------------------
# Finding and loading


def is_shards(path):
    """Whether `path` is the directory of a sharded checkpoint."""
    return (Path(path) / 'state.json').is_file()


def path_of(out_dir, iteration):
    """Path of the checkpoint of `iteration`, a directory if there is one, or of the best one for BEST."""
    directory = Path(out_dir) / ('best' if iteration == BEST else f'ckpt_{iteration:08d}')
    return directory if is_shards(directory) else directory.with_suffix('.pt')


def number(path):
    """The iteration that a checkpoint's name says, BEST for the best one, NONE for other files."""
    match = re.fullmatch(r'ckpt_(\d{8}|[1-9]\d{8,17})(\.pt)?', path.name)
    return int(match[1]) if match else BEST if path.name in ('best.pt', 'best') else NONE


def checkpoints(out_dir):
    """The checkpoints in `out_dir`, newest iteration first, the best one last."""
    found = (p for pattern in ('ckpt_*', 'best*') for p in Path(out_dir).glob(pattern) if number(p) != NONE)
    return sorted(found, key=number, reverse=True)


def newest(out_dir, numbers, share=(0, 1), agree=bool):
    """The newest readable checkpoint in `out_dir` of the iterations `numbers` (newest first), as `load` returns it.

    Damaged and foreign files are skipped with a warning, and so is one whose name says another iteration than it holds.
    `share` as for `load`; `agree` maps whether it can be read here to whether all ranks can. SystemExit with one line
    when none can be read.
    """
    for iteration in numbers:
        try:
            path, state = load(path_of(out_dir, iteration), False, share)
            if iteration not in (BEST, state['iter_num']):
                raise SystemExit(f'{path}: holds iteration {state["iter_num"]}, which its name does not say')
        except SystemExit as error:
            warn(f'{error}; it is skipped')
            state = None
        if agree(state is not None):
            return path, state
    raise SystemExit(f'{out_dir}: none of its {len(numbers)} checkpoints can be read; '
                     'restore one of them, or start from scratch in another --out_dir')


def load(path, weights=True, share=(0, 1)):
    """The checkpoint at `path`, or the newest readable one of an out_dir. Returns (path, state).

    Loads tensors and plain containers only, after comparing the file with its checksums: a .pt file memory-mapped, of
    a directory the model, unless `weights` is False, and not the optimizer. Of a directory's files only the i-th of
    every n are compared, where `share` is (i, n).

    SystemExit with one line when there is none or it cannot be read.
    """
    path = Path(path)
    if path.is_dir() and not is_shards(path):
        numbers = [number(p) for p in checkpoints(path)]
        if not numbers:
            hint = 'name ckpt.pt, nanoGPT\'s, itself' if (path / 'ckpt.pt').is_file() else 'train first'
            raise SystemExit(f'{path}: no checkpoint ckpt_*.pt in it; {hint}, or check --out_dir')
        path = newest(path, numbers)[0]
    if not path.exists():
        raise SystemExit(f'{path}: no such checkpoint')
    try:
        if path.is_dir():
            from runtime import sharded
            state = sharded.read(path, weights, share)
        else:
            state = load_file(path)
        require(state, REQUIRED)
        return path, dict(state, model=clean_state_dict(state['model']))
    except pickle.UnpicklingError:
        reason = 'it holds objects that could run code, which no checkpoint does'
    except zipfile.BadZipFile:
        reason = 'it is truncated, or something else'
    except Exception as error:  # whatever a damaged or foreign file makes torch raise
        reason = first_line(error)
    raise SystemExit(f'{path}: not a checkpoint of this repository ({reason})')


def load_file(path):
    """The state in a .pt file; an exception when its checksums do not fit, or it holds more than plain containers."""
    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError('it was compressed, which torch.save does not do')  # memory-mapped, it would be garbage
        if archive.testzip():
            raise ValueError('its content does not fit its checksums')
    with warnings.catch_warnings():  # torch's remarks on the pickles of other programs
        warnings.simplefilter('ignore')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def require(state, keys):
    """ValueError unless `state` is a dict with these keys, each of its type."""
    for key, kind in keys.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise ValueError(f'it has no {key}')


def clean_state_dict(weights):
    """The weights of a model by the names that they have here.

    Without the prefixes of torch.compile and DDP, and without the mask buffers that nanoGPT (where it has no flash
    attention) and the official repository save.
    """
    cleaned = {re.sub(r'^(module\.)+', '', name.replace('_orig_mod.', '')): weight for name, weight in weights.items()}
    return {name: weight for name, weight in cleaned.items()
            if not name.endswith('.attn.masked_bias') and not (name.endswith('.attn.bias') and weight.dim() == 4)}


# ----------------------------------------------------------------------------------------------------------------------
# Starting and resuming a run


def open_run(world, out_dir, init_from, read_only=False):
    """Makes `out_dir` this run's own, and loads the checkpoint from which the run resumes.

    Args:
        world: the ranks. The first one takes and chooses; all load, and each compares the checksums of its share of a
            directory's files, which may be more than one rank can read in time.
        init_from: 'resume', 'auto' (resume if there is a checkpoint), or anything else for a start without one.
        read_only: nothing will be written (evaluation), so other runs may use the directory.

    A run that torchrun has restarted resumes, whatever its init_from.

    Returns (path, state), or (None, None) for a start without a checkpoint. SystemExit with one line when another run
    has the directory, it cannot be written, there is nothing to resume, or the run would overwrite checkpoints.
    """
    out_dir = Path(out_dir)
    init_from = 'auto' if restarts() else init_from
    resumes, numbers = init_from in ('resume', 'auto'), []
    with world.exit_together():
        if world.is_master:
            numbers = [number(path) for path in checkpoints(out_dir)]
            if resumes and not numbers and (out_dir / 'ckpt.pt').is_file():
                raise SystemExit(f'{out_dir / "ckpt.pt"}: a checkpoint of nanoGPT, which does not say what data it has '
                                 'seen; make it a Hugging Face folder with scripts/export_hf.py, and start from that '
                                 'with --init_from=FOLDER in another --out_dir')
            if init_from == 'resume' and not numbers:
                raise SystemExit(f'{out_dir}: no checkpoint in it, nothing to resume; check --out_dir, or use '
                                 '--init_from=auto')
            if not read_only:
                lock_out_dir(out_dir)
            if not resumes and numbers and not read_only:
                raise SystemExit(f'{out_dir}: holds checkpoints, which a new run would overwrite; continue that run '
                                 'with --init_from=resume (or auto), or choose another --out_dir')
    if world.sharded and not read_only:
        with world.exit_together():
            if not (out_dir / 'lock').is_file():
                raise SystemExit(f'{out_dir}: rank {world.rank} does not see what rank 0 has written there; '
                                 'set --out_dir to a directory on a file system that all machines share')
    count = world.from_master(len(numbers) if resumes else 0)
    if not count:
        return None, None
    numbers = [world.from_master(numbers[i] if world.is_master else 0) for i in range(count)]
    with one_message():
        return newest(out_dir, numbers, (world.rank, world.size), world.all)


def lock_out_dir(out_dir):
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
        if restarts() and (out_dir / FAILED).is_file():
            raise SystemExit(f'{out_dir}: not restarted, for it would fail again: {(out_dir / FAILED).read_text()}')
        (out_dir / FAILED).unlink(missing_ok=True)
        for partial in out_dir.glob('*.partial'):  # left by a run that was killed while saving
            path = partial.with_suffix('')
            if number(path) != NONE and is_shards(partial) and not path.exists():
                partial.rename(path)  # it is complete: state.json comes last
            else:
                shutil.rmtree(partial) if partial.is_dir() and not partial.is_symlink() else partial.unlink()
    except OSError as error:
        raise SystemExit(f'{out_dir}: cannot be written ({error.strerror}); set --out_dir to a directory that '
                         'can') from None
    LOCKS.append(lock)


def compare(path, state, config, data, ignore_data_change=False):
    """Checks that the checkpoint `state` from `path` can be resumed by a run with these settings.

    Args:
        config, data: dicts as `save_run` gets them; data: fingerprints by split.

    Returns (lines, changes): the settings that differ, as text; and a list for config.json and the next checkpoints of
    all that changed at this resume and before, as dicts with iter, key, from and to, without harmless changes.
    SystemExit with one line when optimizer or data are others.
    """
    try:
        require(state, TO_RESUME)
    except ValueError as error:
        raise SystemExit(f'{path}: cannot be resumed ({error})') from None
    before = state['config']
    for key in 'optimizer_name', 'optimizer_args':
        if before.get(key, '') != config[key]:
            raise SystemExit(f'{path}: was trained with --{key}={before.get(key, "")}; resume with it, or choose '
                             'another --out_dir')
    other = [split for split in data if state['data'].get(split) != data[split]]
    if other and not ignore_data_change:
        raise SystemExit(f'{path}: was trained on another data set than {config["dataset"]} ({", ".join(other)}.bin '
                         'differs); name its --dataset, or use this one with --ignore_data_change=True')
    changed = [key for key in config if key in before and before[key] != config[key]]
    changes = [dict(iter=state['iter_num'], key=key, **{'from': before[key], 'to': config[key]})
               for key in changed if key not in HARMLESS]
    changes += [dict(iter=state['iter_num'], key=f'data {split}', **{'from': state['data'].get(split),
                                                                    'to': data[split]}) for split in other]
    return ([f'{key} = {config[key]!r}, was {before[key]!r}' for key in changed if key not in ('init_from', 'out_dir')],
            state.get('changes', []) + changes)


def restore(path, state, model, optimizer, scaler):
    """Puts the tensors of the checkpoint `state` from `path` into model, optimizer and GradScaler; see
    `restore_optimizer`. No communication. SystemExit with one line when something does not fit."""
    try:
        names = {id(p): name for name, p in model.named_parameters()}
        params = {names[id(p)]: p for group in optimizer.param_groups for p in group['params']}
        saved = state['optimizer']
        if path.is_dir():
            from runtime import sharded
            sharded.read_model(path, model)
            saved = sharded.read_optimizer(path, saved, params)
        elif any(is_sharded(p) for p in params.values()):
            for name, target in model.state_dict().items():
                target.copy_(spread(state['model'][name], target))
            saved = dict(saved, state={i: {key: spread(value, p) for key, value in saved['state'][i].items()}
                                       for i, p in enumerate(params.values()) if i in saved['state']})
        else:
            model.load_state_dict(state['model'])
        restore_optimizer(optimizer, saved)
        if state['scaler']:
            scaler.load_state_dict(state['scaler'])
    except Exception as error:
        raise SystemExit(f'{path}: does not fit this run ({first_line(error)}); resume with its own settings') from None


def spread(value, like):
    """A whole tensor of the shape of `like` as a DTensor of its placements; anything else as it is."""
    if is_sharded(like) and isinstance(value, torch.Tensor) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def restore_optimizer(optimizer, saved):
    """Loads the state_dict `saved`, counters in the param groups included.

    What a group is built with stays, see `built_with`.
    """
    built = optimizer.state_dict()['param_groups']
    if len(saved['param_groups']) != len(built):
        raise ValueError(f'{len(saved["param_groups"])} param groups were saved, and there are {len(built)} here: was '
                         'parameter_groups edited?')
    kept = built_with(optimizer) - {'params'}
    groups = [{**ours, **{key: value for key, value in theirs.items() if key not in kept}}
              for ours, theirs in zip(built, saved['param_groups'])]
    optimizer.load_state_dict(dict(saved, param_groups=groups))
    params = [p for group in optimizer.param_groups for p in group['params']]
    numbers = [i for group in saved['param_groups'] for i in group['params']]
    for p, i in zip(params, numbers):
        if i in saved['state']:
            optimizer.state[p] = as_saved(optimizer.state[p], saved['state'][i])


def built_with(optimizer):
    """The keys of a param group that the command line or the code sets, and a checkpoint does not overrule: the
    arguments of the optimizer's constructor, and what `parameter_groups` sets."""
    names = {'params', 'initial_lr', 'lr_scale', 'role'}
    for part in getattr(optimizer, 'optimizers', [optimizer]):
        names |= inspect.signature(type(part)).parameters.keys()
    return names


def as_saved(loaded, saved):
    """`loaded` by load_state_dict, which gives tensors the dtype of their parameter, with the dtype that was saved; and
    not in the mapped file, which would keep its place on the disk after its deletion."""
    if isinstance(loaded, dict):
        return {key: as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(map(as_saved, loaded, saved))
    if isinstance(saved, torch.Tensor) and not is_sharded(saved):
        return saved.to(loaded.device, copy=saved.device.type == 'cpu')
    return loaded
