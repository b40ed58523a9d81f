"""The state of any optimizer as a checkpoint holds it: plain containers, and its way back into an optimizer."""

import copy
import functools
from types import SimpleNamespace

import torch

from runtime.distributed import is_sharded
from runtime.optim import parameters, parts


def map_tensors(value, function, name=''):
    """Copy nested dicts, lists and tuples with function(name, tensor) in the place of each tensor, and Python's
    numbers in the place of NumPy's and of enums; `name` is the keys, joined by dots. TypeError at other types."""
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


def record_construction(optimizer):
    """Keep with `optimizer`, which was just built, the values of its param groups, which checkpoints hold, too, and its
    attributes."""
    copied = {name: value.clone() if isinstance(value, torch.Tensor) else value
              for name, value in attributes(optimizer).items()}
    optimizer.construction = SimpleNamespace(groups=copy.deepcopy(settings(optimizer)), attributes=copied,
                                             restored=set())


def settings(optimizer):
    """Return the values of each param group as a dict."""
    return [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]


def to_save(optimizer, sharded, names=None):
    """Return the state_dict of `optimizer` in plain containers, and the dict of its DTensors by name, in whose place
    the former has tensors on the device 'meta'.

    Args:
        sharded: whether each rank has its part of the parameters.
        names: {parameter: key} of the state, by default the numbers that state_dicts have.

    To a state_dict are added the `shapes` of the parameters, and what the groups were `built` with.

    SystemExit when a checkpoint cannot hold it: objects other than tensors and plain values, or, `sharded`, a tensor
    that differs between ranks but is not a DTensor.
    """
    shards, names = {}, names or numbers(optimizer)
    state = dict(renamed(optimizer.state_dict(), {i: names[p] for p, i in numbers(optimizer).items()}),
                 shapes={names[p]: tuple(p.shape) for p in parameters(optimizer)})
    if hasattr(optimizer, 'construction'):
        state['built'] = optimizer.construction.groups

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


def numbers(optimizer):
    """Return {parameter: its number in a state_dict}."""
    return {p: i for i, p in enumerate(parameters(optimizer))}


def renamed(state, keys):
    """Return a state_dict with the keys of its parameters replaced as the dict `keys` says."""
    return dict(state, state={keys.get(key, key): value for key, value in state['state'].items()},
                param_groups=[dict(group, params=[keys[key] for key in group['params']])
                              for group in state['param_groups']])


def keys_of(optimizer, saved, names):
    """Return the key that each parameter of `optimizer` has in the state_dict `saved`: its name in the dict `names`,
    {parameter: name}; in older checkpoints, which have none, its number in param-group order.

    ValueError that says what differs, unless all parameters and shapes are the same here and there.
    """
    params, groups = parameters(optimizer), saved['param_groups']
    if 'shapes' in saved:
        ours, theirs = {names[p]: tuple(p.shape) for p in params}, saved['shapes']
        if missing := min(theirs.keys() ^ ours.keys(), default=''):
            raise ValueError(f'the optimizer {"had" if missing in theirs else "has"} a parameter {missing}, and '
                             f'{"has" if missing in theirs else "had"} none')
        pairs = [(name, theirs[name], shape) for name, shape in ours.items()]
        keys = list(ours)
    else:
        if [len(group['params']) for group in groups] != [len(group['params']) for group in optimizer.param_groups]:
            raise ValueError(f'{len(groups)} param groups were saved, and there are {len(optimizer.param_groups)} of '
                             'other sizes here: was parameter_groups edited?')
        keys = [key for group in groups for key in group['params']]
        pairs = list(shapes_by_position(saved['state'], keys, params, names))
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(f'the optimizer state of {name} is of shape {theirs}, not {ours}')
    return keys


def shapes_by_position(state, keys, params, names):
    """Yield (name, shape of a tensor in its state, shape) of parameters whose keys are numbers.

    An entry that has the shape of any parameter counts as having its parameter's shape; others, such as the factors of
    Adafactor, are left out.
    """
    for entry in {entry for key in keys for entry in state.get(key, {})}:
        tensors = [(state.get(key, {}).get(entry), names[p], tuple(p.shape)) for key, p in zip(keys, params)]
        found = [(name, tuple(tensor.shape), shape) for tensor, name, shape in tensors
                 if isinstance(tensor, torch.Tensor) and tensor.dim()]
        if {theirs for _, theirs, _ in found} & {ours for *_, ours in found}:
            yield from found


def restore(optimizer, saved, names=None):
    """Load the state_dict `saved` into `optimizer`, which was just built.

    Each parameter gets the state that was saved under its name, see `keys_of`. A group gets the values of the group
    that its parameters were in; but where it was built with another value than that group, it keeps its own. Older
    checkpoints do not say what their groups were built with, so that all values are restored.

    Returns the keys of the values that an older checkpoint has restored, and that differ from what was built here.
    """
    params, names = parameters(optimizer), names or numbers(optimizer)
    keys, groups = keys_of(optimizer, saved, names), optimizer.state_dict()['param_groups']
    construction = getattr(optimizer, 'construction', None)
    built = map_tensors(construction.groups if construction else settings(optimizer), lambda name, tensor: tensor)
    unknown = set()
    for group, now, i in zip(groups, built, groups_before(groups, saved, keys)):
        if i is None:
            continue
        before = saved['param_groups'][i]
        then = saved['built'][i] if 'built' in saved else now
        group |= {key: value for key, value in before.items() if key != 'params' and same(key, now, then)}
        if then is now:
            unknown |= {key for key in now.keys() & before.keys() - {'lr'} if not same(key, now, before)}
    state = renamed(saved, {key: i for i, key in enumerate(keys)})['state']
    optimizer.load_state_dict(dict(saved, state=state, param_groups=groups))
    for i, p in enumerate(params):
        if i in state:
            optimizer.state[p] = as_saved(optimizer.state[p], state[i], p)
    return unknown


def same(key, a, b):
    """Return whether two dicts have the same value of `key`, or both none."""
    return (key in a) == (key in b) and not first_difference(a.get(key), b.get(key))


def groups_before(groups, saved, keys):
    """Return for each of `groups` the number of the param group in the state_dict `saved` that its parameters, with
    these `keys` there, were in; None for a group without parameters. ValueError when there were several."""
    group_of = {key: i for i, group in enumerate(saved['param_groups']) for key in group['params']}
    found = []
    for group in groups:
        before = {group_of[keys[i]]: keys[i] for i in group['params']}
        if len(before) > 1:
            first, second, *_ = before.values()
            raise ValueError(f'{first} and {second} are in one param group, and were in two: was parameter_groups '
                             'edited?')
        found.append(next(iter(before), None))
    return found


def as_saved(loaded, saved, p):
    """Return the state `loaded` by load_state_dict for the parameter `p`, with the `saved` dtypes, sharded like `p`.

    It is copied out of the memory-mapped file, whose disk space stays taken while anything refers to it.
    """
    if isinstance(loaded, dict):
        return {key: as_saved(value, saved[key], p) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(as_saved(*pair, p) for pair in zip(loaded, saved))
    if isinstance(saved, torch.Tensor) and not is_sharded(saved):
        return spread(saved.to(loaded.device, copy=saved.device.type == 'cpu'), p)
    return loaded


def spread(value, like):
    """Shard a whole tensor of the shape of `like` where `like` is; return anything else unchanged. No communication."""
    if is_sharded(like) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def lost_in_round_trip(optimizer, fresh, saved):
    """Return the first difference between `optimizer` and `fresh`, built alike but without a state, after `fresh` has
    loaded the state_dict `saved`; '' when there is none. The learning rate, which the loop sets, does not count."""
    if nested := nested_optimizers(optimizer):
        return f'{nested[0]} is an optimizer, whose state no checkpoint holds; derive {type(optimizer).__name__} from '\
               'runtime.optim.Together'
    restore(fresh, saved)
    keys = [group.keys() - {'lr'} for group in optimizer.state_dict()['param_groups']]

    def comparable(one):
        state = one.state_dict()
        groups = [{key: value for key, value in group.items() if key in compared}
                  for group, compared in zip(state['param_groups'], keys)]
        return dict(state, param_groups=groups, attributes=attributes(one))

    lost = first_difference(comparable(optimizer), comparable(fresh))
    if not lost and hasattr(optimizer, 'construction'):
        optimizer.construction.restored = changed_attributes(optimizer)  # by load_state_dict
    return lost


def left_out(optimizer, state):
    """Return what `state`, which `to_save` has made of `optimizer`, lacks, as text; '' if nothing: an attribute that
    has changed since the construction, or an entry of the state of a parameter."""
    changed = hasattr(optimizer, 'construction') and changed_attributes(optimizer) - optimizer.construction.restored
    if changed:
        return f'the attribute {min(changed).partition(".")[2]}'
    for p, key in zip(parameters(optimizer), state['shapes']):
        for entry in optimizer.state.get(p, {}).keys() - state['state'].get(key, {}).keys():
            return f'the state {entry} of {key}'
    return ''


@functools.cache
def no_state():
    """Return the names of attributes that PyTorch keeps in any optimizer, that checkpoints hold, or that this module
    keeps. A function, because building an optimizer imports torch._dynamo."""
    return {*vars(torch.optim.Optimizer([torch.zeros(1)], {})), 'optimizers', 'construction'}


def attributes(optimizer):
    """Return {PART.NAME…: value} of the numbers and tensors in the attributes of an optimizer and its parts, which a
    state_dict does not have.

    Parameters are left out, and flags with an underscore, where schedulers and optimizers note what they have checked
    or warned of.
    """
    own = [{name: value for name, value in vars(part).items() if name not in no_state()
            and isinstance(value, (int, float, torch.Tensor, list, tuple, dict))
            and not (name.startswith('_') and isinstance(value, bool))} for part in parts(optimizer)]
    return {name.removeprefix('.'): value for name, value in leaves(own, '')
            if not isinstance(value, torch.nn.Parameter)}


def changed_attributes(optimizer):
    """Return the names, 'PART.NAME', of the attributes that have changed since the construction."""
    now, then = attributes(optimizer), optimizer.construction.attributes
    return {'.'.join(name.split('.')[:2]) for name in now.keys() | then.keys()
            if name not in now or name not in then or not equal(now[name], then[name])}


def nested_optimizers(optimizer):
    """Return the names of the attributes that hold an optimizer that `parts` does not know."""
    known = set(map(id, parts(optimizer)))
    return [name for one in parts(optimizer) for attribute, content in vars(one).items() if attribute not in no_state()
            for name, value in leaves(content, attribute) if hasattr(value, 'param_groups') and id(value) not in known]


def first_difference(a, b, name='state'):
    """Return the first difference of two nested states, as text; '' when they are equal.

    Of DTensors it compares the shards of this rank.
    """
    a, b = dict(leaves(a, name)), dict(leaves(b, name))
    if a.keys() != b.keys():
        return f'{min(a.keys() ^ b.keys())} is missing'
    return next((f'{key} differs' for key in a if not equal(a[key], b[key])), '')


def leaves(value, name):
    """Yield (name, value) of everything in nested dicts, lists and tuples that is not one of these."""
    if not isinstance(value, (dict, list, tuple)):
        yield name, value
        return
    for i, (key, item) in enumerate(value.items() if isinstance(value, dict) else enumerate(value)):
        yield from leaves(item, f'{name}.{i if isinstance(key, torch.Tensor) else key}')


def equal(a, b):
    """Return whether two leaves are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (t.to_local() if is_sharded(t) else t for t in (a, b))
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return a is b or a == b or (a != a and b != b)
