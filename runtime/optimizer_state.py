"""Any optimizer's state as plain containers for a checkpoint, its restoration, comparisons of states."""

import copy

import torch

from runtime.distributed import is_sharded
from runtime.optim import parameters


def map_tensors(value, function=lambda name, tensor: tensor, name=''):
    """Copy nested containers, with function(name, tensor) in place of a tensor, whose `name` is its keys joined by
    dots, and plain values in place of NumPy's numbers and enums. TypeError for types that `load_pt` rejects."""
    if isinstance(value, torch.Tensor):
        return function(name, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, f'{name}.{key}') for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function, f'{name}.{i}') for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    value = value.item() if hasattr(value, 'item') else value
    for kind in bool, int, float, str:
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, torch.dtype):
        return value
    raise TypeError(f'{name} is of type {type(value).__name__}')


def leaves(value, name):
    """Yield (name, value) for each value in nested containers, and for each empty container."""
    if isinstance(value, (dict, list, tuple)) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f'{name}.{key}')
    else:
        yield name, value


def first_difference(a, b, name='state'):
    """Return the first difference between two nested states (in DTensors, of this rank's shards) as text, or ''."""
    a, b = dict(leaves(a, name)), dict(leaves(b, name))
    if a.keys() != b.keys():
        return f'{min(a.keys() ^ b.keys())} is missing'
    return next((f'{key} differs' for key in a if not equal(a[key], b[key])), '')


def equal(a, b):
    """Return whether two leaves are equal, where NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (t.to_local() if is_sharded(t) else t for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    return isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and (a == b or (a != a and b != b))


def record_construction(optimizer):
    """Keep in `optimizer`, which was just built, a copy of its param groups' values, for its checkpoints."""
    optimizer.construction = copy.deepcopy([{key: value for key, value in group.items() if key != 'params'}
                                            for group in optimizer.param_groups])


def to_save(optimizer, names, sharded):
    """Return (state, shards): the optimizer's state_dict in plain containers, and its DTensors by name, which `state`
    has as tensors on the device 'meta'. `names`, {parameter: name}, replaces the parameters' numbers. It also has their
    `shapes` and how the groups were `built`. Exit if a checkpoint cannot hold a value, or shards of one may differ."""
    shards, params = {}, parameters(optimizer)
    state = dict(renamed(optimizer.state_dict(), dict(enumerate(names[p] for p in params))),
                 shapes={names[p]: tuple(p.shape) for p in params}, built=optimizer.construction)

    def placeholder(name, tensor):
        if is_sharded(tensor):
            shards[name] = tensor
            return torch.empty(tensor.shape, dtype=tensor.dtype, device='meta')
        if sharded and tensor.numel() > 1:
            raise TypeError(f'{name} is a tensor that each rank has for itself')
        return tensor

    try:
        return map_tensors(state, placeholder, 'optimizer'), shards
    except TypeError as error:
        raise SystemExit(f'{type(optimizer).__name__}: its state cannot be saved ({error}); keep plain numbers and '
                         f'tensors there{", or use --parallel=ddp" if sharded else ""}') from None


def renamed(state, keys):
    """Return a state_dict with its parameters' keys replaced by the dict `keys`."""
    return dict(state, state={keys.get(key, key): value for key, value in state['state'].items()},
                param_groups=[dict(group, params=[keys[key] for key in group['params']])
                              for group in state['param_groups']])


def load_optimizer(optimizer, saved, names):
    """Load the state_dict `saved` into `optimizer`, which was just built. Each parameter gets the state saved under its
    name. A group gets its parameters' saved group values, except those with which it was built differently. ValueError
    unless the parameters have the same names and shapes."""
    params, keys = dict(enumerate(parameters(optimizer))), [names[p] for p in parameters(optimizer)]
    if differing := first_difference(saved['shapes'], {names[p]: tuple(p.shape) for p in params.values()}, 'shapes'):
        raise ValueError(f"the optimizer's parameters are not the checkpoint's ({differing})")
    groups, built = optimizer.state_dict()['param_groups'], map_tensors(optimizer.construction)
    group_of = {key: i for i, group in enumerate(saved['param_groups']) for key in group['params']}
    for group, built_here in zip(groups, built):
        sources = {group_of[keys[i]]: keys[i] for i in group['params']}
        if len(sources) > 1:
            raise ValueError(f'{" and ".join(sources.values())} were in different param groups: was parameter_groups '
                             'edited?')
        for i in sources:  # A group without parameters has none.
            built_there = saved['built'][i]
            group |= {key: value for key, value in saved['param_groups'][i].items()
                      if key != 'params' and not first_difference(built_here.get(key), built_there.get(key))}
    # Full tensors are sharded first, because load_state_dict moves all it gets to the parameters' device.
    state = {i: map_tensors(entries, lambda _, tensor, i=i: spread(tensor, params.get(i)))
             for i, entries in renamed(saved, {key: i for i, key in enumerate(keys)})['state'].items()}
    optimizer.load_state_dict(dict(saved, state=state, param_groups=groups))
    for i in params.keys() & state.keys():
        optimizer.state[params[i]] = as_saved(optimizer.state[params[i]], state[i])


def as_saved(loaded, saved):
    """Return a parameter's state, which load_state_dict has `loaded`, with the `saved` dtypes, copied out of the
    memory-mapped file, because a reference would keep a removed file's disk space."""
    if isinstance(loaded, dict):
        return {key: as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(as_saved(*pair) for pair in zip(loaded, saved))
    if is_sharded(saved):
        return saved  # It has memory of its own.
    return saved.to(loaded.device, copy=saved.device.type == 'cpu') if isinstance(saved, torch.Tensor) else loaded


def spread(value, like):
    """Return the tensor `value` sharded like `like` if the shapes agree, else unchanged. Needs no communication."""
    if is_sharded(like) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value
