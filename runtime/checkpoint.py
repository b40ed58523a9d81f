"""The checkpoints of a run in its out_dir: saving, retention, validated loading, resuming, and the directory's lock.

Checkpoints are `ckpt_ITERATION.pt`, and `best.pt`, a second name of the one with the lowest validation loss. They hold
nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and what else a run needs to resume. No
state of random generators is among it, because everything random is a function of (seed, iteration).

Where the model is sharded, a checkpoint is a directory `ckpt_ITERATION` (and `best`, a link to one), see sharded.py.
Either kind can be resumed by any number of ranks, sharded or not.
"""

import contextlib
import fcntl
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from runtime import sharded
from runtime.distributed import restarts
from runtime.files import atomic_write, first_line, sync_directory, warn
from runtime.sharded import is_shards

BEST, NONE = -1, -2  # stand for the best checkpoint, and for no checkpoint, where others have their iteration
FAILED = 'failed.txt'  # what a run said when it gave up
LOCKS = []  # files of this process whose closing would give up a lock

# What a loaded checkpoint must hold, and what it may; `load` rejects other types.
REQUIRED = dict(model=dict, model_args=dict, iter_num=int, config=dict)
OPTIONAL = dict(optimizer=dict, best_val_loss=(float, int, torch.Tensor), train_state=dict, scaler=dict, data=dict,
                tokenizer=(dict, type(None)), changes=list, best=bool, finetuned=bool)
TRAIN_STATE = dict(iter=int, tokens=int, seconds=(float, int), clipped=int, skipped_in_a_row=int,
                   best_val_loss=(float, int), last_eval_iter=int, latest_losses=list)

# Largest values of model_args that are taken for meant.
BOUNDS = dict(block_size=2 ** 24, vocab_size=2 ** 24, n_layer=10_000, n_head=2 ** 16, n_embd=2 ** 20)

# Settings whose change does not alter what a run computes, but for rounding.
HARMLESS = {
    'out_dir', 'init_from', 'eval_interval', 'eval_only', 'log_interval', 'always_save_checkpoint', 'keep_checkpoints',
    'ignore_data_change', 'max_hours', 'show_config', 'wandb_log', 'wandb_project', 'wandb_run_name', 'trackio_log',
    'dataset', 'batch_size', 'gradient_accumulation_steps', 'parallel', 'activation_checkpointing', 'backend', 'device',
    'compile'}

# What a param group keeps as it was built at resume, besides what has the name of a setting: the command line sets it.
AS_BUILT = {'params', 'lr', 'initial_lr', 'lr_scale', 'role', 'betas', 'momentum', 'fused', 'foreach', 'capturable'}

# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save_run(world, out_dir, model, optimizer, state, best=False, keep=2):
    """Saves a run as the checkpoint of state['iter_num']: rank 0 one file, or all ranks their shards.

    It is written beside, synced, then renamed: a checkpoint under its final name is complete. Then it becomes the best
    one if `best`, and of the checkpoints up to this one the `keep` newest stay. Collective: every rank must call it.

    Args:
        state: a dict of everything else than the tensors of `model` and `optimizer`.

    Returns its path, or None, with a warning, when the file system fails (a full disk); older checkpoints then remain.
    The same on every rank. SystemExit with one line when the optimizer's state could not be read back.
    """
    if world.sharded:
        model.reshard()  # a forward without a backward leaves the parameters of the root gathered
    with world.exit_together():
        packed, tensors = packed_optimizer(model, optimizer, world.sharded)
    path = Path(out_dir) / f'ckpt_{state["iter_num"]:08d}{"" if world.sharded else ".pt"}'
    try:
        if world.sharded:
            sharded.write(world, path, model, dict(state, best=best, optimizer=packed), tensors)
            if world.is_master:
                _finish(path, best, keep)
        elif world.is_master:
            optimizer_state = sharded.unpack(packed, tensors.get)
            save(out_dir, dict(model=model.state_dict(), optimizer=optimizer_state, **state), best, keep)
        saved = True
    except OSError as error:
        saved = False
        if world.is_master:
            warn(f'{path}: could not be saved ({error.strerror or error}); older checkpoints are kept, '
                 'training continues')
    return path if world.from_master(int(saved)) else None


def save(out_dir, state, best=False, keep=2):
    """Writes the dict `state`, model and optimizer included, as one file; the rest as `save_run`. Returns its path.

    OSError where the file system fails.
    """
    path = Path(out_dir) / f'ckpt_{state["iter_num"]:08d}.pt'
    write_file(path, dict(state, best=best))
    _finish(path, best, keep)
    return path


def packed_optimizer(model, optimizer, shards):
    """(plain values, tensors) of the state of `optimizer`, see `sharded.pack`; with `shards` by parameter names.

    SystemExit with one line when it holds what no checkpoint can.
    """
    tensors = {}
    try:
        if shards:
            return sharded.pack_optimizer(model, optimizer, tensors), tensors
        return sharded.pack(optimizer.state_dict(), 'optimizer', tensors), tensors
    except TypeError as error:
        raise SystemExit(f'{type(optimizer).__name__}: its state cannot be saved ({error}); keep plain numbers and '
                         f'tensors there{", or use --parallel=ddp" if shards else ""}') from None


def write_file(path, state):
    """Writes the checkpoint `state` as the file `path`, which is there complete or not at all; OSError if it fails."""
    with atomic_write(path, sync=True) as f:
        try:
            torch.save(state, f)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save wraps the error of a write
                raise error.__context__ from None
            raise


def _finish(path, best, keep):
    """What follows when the checkpoint `path` has its name: best, durability, retention."""
    _remove(path.with_suffix('') if path.suffix else path.with_suffix('.pt'))
    if best:
        link_best(path)
    sync_directory(path.parent)
    prune(path.parent, number(path), keep)


def link_best(path):
    """Makes `best.pt` (`best`, where it is a directory) a second name of the checkpoint `path`."""
    best, other = (path.with_name(f'best{suffix}') for suffix in ((path.suffix, '') if path.suffix else ('', '.pt')))
    partial = path.with_name('best.partial')
    partial.unlink(missing_ok=True)
    if best.is_dir() and not best.is_symlink():  # of a run that was copied
        _remove(best)
    try:
        partial.symlink_to(path.name) if path.is_dir() else os.link(path, partial)
        partial.replace(best)
    except OSError:  # a file system without links
        with atomic_write(best, sync=True) as f, path.open('rb') as source:
            shutil.copyfileobj(source, f)
    _remove(other)


def prune(out_dir, iteration, keep):
    """Removes all but the `keep` newest checkpoints up to `iteration`, and the best one."""
    best = path_of(out_dir, BEST).resolve()
    for old in [p for p in checkpoints(out_dir) if BEST < number(p) <= iteration][keep:]:
        with contextlib.suppress(OSError):
            if old.is_file() or old.resolve() != best:  # the content of a file stays under its name best.pt
                _remove(old)


def _remove(path):
    """Removes a checkpoint, if there is one; a directory leaves its place at once."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path.rename(path.with_suffix('.old.partial')))
    else:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Finding and loading


def path_of(out_dir, iteration):
    """Where the checkpoint of `iteration` is, a directory if there is one; BEST stands for the best one."""
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


def newest(out_dir, exclude=(), share=(0, 1)):
    """The path of the newest valid checkpoint in `out_dir`; None when it holds no checkpoint.

    Damaged and foreign files are skipped with a warning, as is one whose name says another iteration than it holds; the
    iterations `exclude` without. `share` as for `load`. SystemExit with one line when there is nothing else.
    """
    found = checkpoints(out_dir)
    for path in [p for p in found if number(p) not in exclude]:
        try:
            iteration = load(path, weights=False, share=share)[1]['iter_num']
            if number(path) not in (BEST, iteration):
                raise SystemExit(f'{path}: holds iteration {iteration}, which its name does not say')
            return path
        except SystemExit as error:
            warn(f'{error}; it is skipped')
    if found:
        raise SystemExit(f'{out_dir}: none of its {len(found)} checkpoints can be read; '
                         'restore one of them, or start from scratch in another --out_dir')
    return None


def load(path, weights=True, share=(0, 1)):
    """The checkpoint at `path`, or the newest valid one of an out_dir. Returns (path, state).

    Loads tensors and plain containers only, after comparing the file with its checksums: a .pt file memory-mapped, of
    a directory the model, unless `weights` is False, and not the optimizer. Of a directory's files only the i-th of
    every n are compared, where `share` is (i, n). The state has the types of REQUIRED and OPTIONAL.

    SystemExit with one line when there is none or it cannot be read.
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
        state = sharded.read(path, weights, share) if path.is_dir() else _load_file(path)
        return path, _validated(state)
    except pickle.UnpicklingError:
        reason = 'it holds objects that could run code, which no checkpoint does'
    except zipfile.BadZipFile:
        reason = 'it is truncated, or something else'
    except (Exception, CheckpointException) as error:  # whatever a damaged or foreign file makes torch raise
        reason = first_line(error)
    raise SystemExit(f'{path}: not a checkpoint of this repository ({reason})')


def _load_file(path):
    if not path.is_file():
        raise ValueError('it is no regular file')
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError('it was compressed, which torch.save does not do')  # memory-mapped, it would be garbage
        if sum(member.file_size for member in members) > path.stat().st_size or archive.testzip():
            raise ValueError('its content does not fit its checksums')
    with warnings.catch_warnings():  # torch's remarks on the pickles of other programs
        warnings.simplefilter('ignore')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def _validated(state):
    """The content of a file, upgraded to today's keys; ValueError unless its fields have their types."""
    require(state, **REQUIRED)
    if 'train_state' not in state and 'passed_over' in state:  # as this repository wrote it before
        renamed = dict(iter='iter_num', skipped_in_a_row='passed_over', last_eval_iter='evaluated')
        state['train_state'] = {key: state.get(renamed.get(key, key)) for key in TRAIN_STATE}
    require(state, **{key: kind for key, kind in OPTIONAL.items() if key in state})
    if state['iter_num'] < 0:
        raise ValueError(f'its iter_num is {state["iter_num"]}')
    for name, weight in state['model'].items():
        if type(name) is not str or not isinstance(weight, torch.Tensor):
            raise ValueError(f'its model holds {name!r}, which is no tensor')
    json.dumps([state.get(key) for key in ('config', 'model_args', 'train_state', 'changes', 'tokenizer')])
    for key in ('config', 'model_args', 'train_state'):
        if not all(type(name) is str for name in state.get(key, ())):
            raise ValueError(f'its {key} has keys that are no text')
    for key, items, kind in (('changes', state.get('changes', ()), dict),
                             ('latest_losses', state.get('train_state', {}).get('latest_losses', ()), float)):
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, kind) for item in items):
            raise ValueError(f'its {key} is {items!r:.80}')
    require(state['config'], **{key: str for key in ('dataset', 'optimizer_name') if key in state['config']})
    if state.get('tokenizer'):
        require(state['tokenizer'], tokenizer=str)
    check_model_args(state['model_args'], state['model'])
    state['model'] = clean_state_dict(state['model'])
    return state


def require(state, **kinds):
    """ValueError unless `state` is a dict with these keys, each of its type (a bool is no int)."""
    for key, kind in kinds.items():
        value = state.get(key) if isinstance(state, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            raise ValueError(f'it has no {key}' if value is None else f'its {key} is {value!r:.80}')


def check_model_args(args, weights=None):
    """ValueError unless the model that `args` asks for is of plausible size, measured by its `weights` if given."""
    for key, value in args.items():
        if key in BOUNDS and not (type(value) is int and 0 < value <= BOUNDS[key]):
            raise ValueError(f'its {key} is {value!r:.80}')
        if key == 'dropout' and not (type(value) in (int, float) and 0 <= value < 1):
            raise ValueError(f'its dropout is {value!r:.80}')
        if type(value) not in (int, float, bool, str, type(None)):
            raise ValueError(f'its {key} is of type {type(value).__name__}')
    n_embd = args.get('n_embd', 1)
    if n_embd % args.get('n_head', 1):
        raise ValueError(f'its n_embd is {n_embd}, which n_head = {args["n_head"]} does not divide')
    asked = n_embd * (args.get('n_layer', 1) * n_embd + args.get('vocab_size', 1))
    if weights and asked > 64 * sum(weight.numel() for weight in weights.values()):
        raise ValueError('its model_args ask for a far larger model than its weights are')


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
    resumes = init_from in ('resume', 'auto')
    with world.exit_together():
        if world.is_master:
            found = checkpoints(out_dir)
            if resumes and not found and (out_dir / 'ckpt.pt').is_file():
                raise SystemExit(f'{out_dir / "ckpt.pt"}: a checkpoint of nanoGPT, which does not say what data it has '
                                 'seen; make it a Hugging Face folder by scripts/export_hf.py, and start from that by '
                                 '--init_from=FOLDER in another --out_dir')
            if init_from == 'resume' and not found:
                raise SystemExit(f'{out_dir}: no checkpoint in it, nothing to resume; check --out_dir, or use '
                                 '--init_from=auto')
            if not read_only:
                lock_out_dir(out_dir)
            if not resumes and found and not read_only:
                raise SystemExit(f'{out_dir}: holds checkpoints, which a new run would overwrite; continue that run '
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
            if world.is_master and resumes:
                path = newest(out_dir, damaged, (0, world.size))
                chosen = number(path) if path else NONE
        chosen = world.from_master(chosen)
        if chosen == NONE:
            return None, None
        try:
            loaded = load(path_of(out_dir, chosen), weights=False, share=(world.rank, world.size))
        except SystemExit as error:
            warn(f'{error}; it is skipped')
            loaded = None
        if not world.sum(torch.tensor(float(loaded is None), device=world.device)):
            if world.is_master and not read_only:
                _repair_best(*loaded)
            return loaded
        damaged.append(chosen)


def _repair_best(path, state):
    """Makes `path` the best checkpoint if it was when it was saved, but the run was killed before it got that name."""
    best = path_of(path.parent, BEST)
    if not state.get('best') or best.exists() and best.samefile(path):
        return
    try:
        lowest = load(best, weights=False)[1].get('best_val_loss', float('inf'))
    except SystemExit:  # missing or damaged
        lowest = float('inf')
    if lowest > state.get('best_val_loss', float('inf')):
        try:
            link_best(path)
        except OSError as error:
            warn(f'{best}: cannot be written ({error.strerror})')


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


def compare(path, state, config, model_args, data, ignore_data_change=False, defaults=None):
    """Checks that the checkpoint `state` from `path` can be resumed by a run with these settings.

    Args:
        config, model_args, data: dicts as `save_run` gets them; data: fingerprints by split.
        defaults: model_args that either side may leave out.

    Returns (lines, changes): the settings that differ, as text; and a list for config.json and the next checkpoints of
    all that changed at this resume and before, as dicts with iter, key, from and to, without what alters no number.
    SystemExit with one line when model, optimizer or data are others.
    """
    try:
        require(state, scaler=dict, data=dict, train_state=dict, **({} if path.is_dir() else dict(optimizer=dict)))
        require(state['train_state'], **TRAIN_STATE)
        before = state['config']
        require(before, **{key: (int, float) if type(value) in (int, float) else type(value)
                           for key, value in config.items() if key in before and value is not None})
    except ValueError as error:
        raise SystemExit(f'{path}: cannot be resumed ({error})') from None
    ours, theirs = ({**(defaults or {}), **args} for args in (model_args, state['model_args']))
    differing = [key for key in ours | theirs if key not in ours or key not in theirs or theirs[key] != ours[key]]
    if differing:
        what = ', '.join(f'{key} ({theirs.get(key)} there, {ours.get(key)} asked for)' for key in differing)
        raise SystemExit(f'{path}: is a model with another {what}; resume with its own settings, or choose another '
                         '--out_dir')
    for key, absent in ('optimizer_name', ''), ('optimizer_args', ''), ('hessian_bias_correction', False):
        if before.get(key, absent) != config.get(key, absent):
            raise SystemExit(f'{path}: was trained with --{key}={before.get(key, absent)}; resume with it, or choose '
                             'another --out_dir')
    other = [split for split in data if state['data'].get(split) != data[split]]
    if other and not ignore_data_change:
        raise SystemExit(f'{path}: was trained on another data set than {config["dataset"]} ({", ".join(other)}.bin '
                         'differs); name its --dataset, or use this one by --ignore_data_change=True')
    changed = [key for key in config if key in before and before[key] != config[key]]
    changes = [dict(iter=state['iter_num'], key=key, **{'from': before[key], 'to': config[key]})
               for key in changed if key not in HARMLESS]
    changes += [dict(iter=state['iter_num'], key=f'data {split}', **{'from': state['data'].get(split),
                                                                    'to': data[split]}) for split in other]
    return ([f'{key} = {config[key]!r}, was {before[key]!r}' for key in changed if key not in ('init_from', 'out_dir')],
            state.get('changes', []) + changes)


def restore(path, state, model, optimizer, scaler):
    """Puts the tensors of the checkpoint `state` from `path` into model, optimizer and GradScaler.

    Of the optimizer everything is restored, counters in its param groups included, except what the command line or the
    code sets: AS_BUILT, whatever has the name of a setting, and `optimizer.as_built`, where it has that. No
    communication, sharded or not. SystemExit with one line when something does not fit.
    """
    try:
        names = {id(p): name for name, p in model.named_parameters()}
        params = {names[id(p)]: p for group in optimizer.param_groups for p in group['params']}
        saved = state.get('optimizer')
        if path.is_dir():
            sharded.read_model(path, model)
            saved = sharded.read_optimizer(path, saved, params)
        elif any(isinstance(p, DTensor) for p in params.values()):
            for name, target in model.state_dict().items():
                target.copy_(_spread(state['model'][name], target))
            saved = dict(saved, state={i: {key: _spread(value, p) for key, value in saved['state'][i].items()}
                                       for i, p in enumerate(params.values()) if i in saved['state']})
        else:
            model.load_state_dict(state['model'])
        _restore_optimizer(optimizer, saved, AS_BUILT | state['config'].keys() | getattr(optimizer, 'as_built', set()))
        if state['scaler']:
            scaler.load_state_dict(state['scaler'])
    except (Exception, CheckpointException) as error:
        raise SystemExit(f'{path}: does not fit this run ({first_line(error)}); resume with its own settings') from None


def _spread(value, like):
    """A whole tensor of the shape of `like` as a DTensor of its placements; anything else as it is."""
    if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def _restore_optimizer(optimizer, saved, as_built):
    built = optimizer.state_dict()['param_groups']
    if len(saved['param_groups'] or built) != len(built):
        raise ValueError(f'{len(saved["param_groups"])} param groups were saved, and there are {len(built)} here: was '
                         'parameter_groups edited?')
    params = [p for group in optimizer.param_groups for p in group['params']]
    numbers = [i for group in saved['param_groups'] or built for i in group['params']]
    for p, i in zip(params, numbers):
        if i in saved['state']:
            _check_state(optimizer, p, i, saved['state'][i])
    for ours, theirs in zip(built, saved['param_groups'] or ()):
        for key in ours.keys() & theirs.keys():
            if isinstance(ours[key], (int, float)) and not isinstance(theirs[key], (int, float, torch.Tensor)):
                raise ValueError(f'{key} of a param group is {theirs[key]!r:.80}')
    groups = [{**ours, **{key: value for key, value in theirs.items() if key not in as_built or key == 'params'}}
              for ours, theirs in zip(built, saved['param_groups'] or built)]
    optimizer.load_state_dict(dict(state=saved['state'], param_groups=groups))
    for p, i in zip(params, numbers):
        if i in saved['state']:
            optimizer.state[p] = _as_saved(optimizer.state[p], saved['state'][i])


def _check_state(optimizer, p, i, entries):
    """ValueError unless what many optimizers keep of a parameter, and many a step takes for granted, fits it."""
    missing = isinstance(optimizer, torch.optim.Adam) and {'step', 'exp_avg', 'exp_avg_sq'} - entries.keys()
    if entries and missing:
        raise ValueError(f'{min(missing)} of parameter {i} is missing')
    for key, value in entries.items():
        tensor = isinstance(value, torch.Tensor)
        what = f'has the shape {tuple(value.shape)} and is {value.dtype}' if tensor else f'is {value!r:.80}'
        if key in ('exp_avg', 'exp_avg_sq', 'hessian') and not (
                tensor and value.shape == p.shape and value.dtype == p.dtype):
            raise ValueError(f'{key} of parameter {i} {what}')
        if key in ('step', 'hessian_step') and not (value.numel() == 1 if tensor else isinstance(value, (int, float))):
            raise ValueError(f'{key} of parameter {i} {what}')


def _as_saved(loaded, saved):
    """`loaded` by load_state_dict, which gives tensors the dtype of their parameter, with the dtype that was saved; and
    not in the mapped file, which would keep its place on the disk after its deletion."""
    if isinstance(loaded, dict):
        return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(map(_as_saved, loaded, saved))
    if isinstance(saved, torch.Tensor) and not isinstance(saved, DTensor):
        return saved.to(loaded.device, copy=saved.device.type == 'cpu')
    return loaded
