"""What the training loop asks of any optimizer, optimizers of libraries by their name, several optimizers as one."""

import ast
import contextlib
import difflib
import importlib
import inspect

import torch
from torch.distributed.tensor import DTensor

from runtime.distributed import full_tensor

# ----------------------------------------------------------------------------------------------------------------------
# What the loop asks of any optimizer

ROW_SIZE = 4096  # entries that `total_norm` adds up at a time on CPU


def set_learning_rate(optimizer, lr):
    """Sets the learning rate of every param group: `lr`, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group['lr'] = lr * group.get('lr_scale', 1.0)


def parameters(optimizer):
    """The parameters of an optimizer, in param-group order."""
    return [p for group in optimizer.param_groups for p in group['params']]


@contextlib.contextmanager
def evaluating(optimizer):
    """Around evaluation and saving: the weights are those that the optimizer means to be evaluated. For schedule-free
    ones (with the methods `eval` and `train`) that is an average, and training continues with exactly the weights
    before; a checkpoint that is saved meanwhile holds them in the optimizer's state."""
    if hasattr(optimizer, 'eval') and hasattr(optimizer, 'train'):
        for p in parameters(optimizer):
            optimizer.state[p]['training_weights'] = p.detach().clone()
        optimizer.eval()
    try:
        yield
    finally:
        back_to_training(optimizer)


@torch.no_grad()
def back_to_training(optimizer):
    """Ends `evaluating`, or what a checkpoint was saved in the midst of."""
    if hasattr(optimizer, 'eval') and hasattr(optimizer, 'train'):
        optimizer.train()
        for p in parameters(optimizer):
            if 'training_weights' in optimizer.state[p]:
                p.copy_(optimizer.state[p].pop('training_weights'))


def total_norm(tensors):
    """ℓ2 norm of all entries of `tensors` together, a 0-d tensor (a DTensor of sharded ones).

    On CPU PyTorch adds up the squares of a tensor in a few float32 sums: of 19M entries the norm comes out 0.1 % too
    small, of equal ones 1 %. By rows of ROW_SIZE entries it is right, and takes less time.
    """
    if any(isinstance(t, DTensor) or t.device.type != 'cpu' for t in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    norms = []
    for t in tensors:
        t = t.reshape(-1)
        rows, rest = t.split([t.numel() - t.numel() % ROW_SIZE, t.numel() % ROW_SIZE])
        norms += [torch.linalg.vector_norm(rows.view(-1, ROW_SIZE), dim=1), torch.linalg.vector_norm(rest)[None]]
    return torch.linalg.vector_norm(torch.cat(norms))


def clip_gradients(params, max_norm):
    """Clips the gradients of `params` at the norm `max_norm` (0: no clipping). Returns their norm before that, a 0-d
    tensor, over all ranks."""
    params = [p for p in params if p.grad is not None]  # of a module that this forward did not use
    norm = total_norm([p.grad for p in params])
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return full_tensor(norm)


def global_norm(tensors):
    """ℓ2 norm of all entries of `tensors` together, a 0-d tensor, over all ranks for sharded ones."""
    return full_tensor(total_norm([t.detach() for t in tensors]))


# ----------------------------------------------------------------------------------------------------------------------
# Several optimizers as one


class Together(torch.optim.Optimizer):
    """Several optimizers, each with param groups of its own, as one: what is done to it is done to each of them.

    Its param groups are theirs, in order, and they all keep their state in its state.
    """

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.share()

    def share(self):
        """Lets the optimizers work on the groups and the state of this one."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def __getstate__(self):
        return dict(super().__getstate__(), optimizers=self.optimizers)

    def __setstate__(self, state):  # of a copy, and of load_state_dict
        super().__setstate__(state)
        self.share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers of libraries


def nearest(name, names, otherwise):
    """The hint of a message about the unknown `name`: the one of `names` that is nearest, or `otherwise`."""
    near = difflib.get_close_matches(name, names, n=1)
    return f'did you mean {near[0]}?' if near else otherwise


def library_class(path, optimizer_name):
    """The optimizer class that `path`, 'LIBRARY:CLASS', stands for; torch: torch.optim's.

    SystemExit with one line, which names `optimizer_name` as the user typed it, when there is none.
    """
    library, _, name = path.partition(':')
    flag = f'--optimizer_name={optimizer_name}'
    try:
        module = importlib.import_module('torch.optim' if library == 'torch' else library)
    except (ImportError, TypeError, ValueError):  # the last two: import_module of '.x' and of ''
        known = ('torch', 'pytorch_optimizer', 'schedulefree')
        install = f'pip install {library}'
        hint = install if library in known else nearest(library, known, install)
        raise SystemExit(f'{flag}: needs the package {library}, which is not installed; {hint}') from None
    classes = {key: value for key, value in vars(module).items()
               if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)}
    if name not in classes:
        raise SystemExit(f'{flag}: {library} has no such optimizer; '
                         f'{nearest(name, classes, f"see the documentation of {library}")}')
    closure = inspect.signature(classes[name].step).parameters.get('closure')
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SystemExit(f'{flag}: its step evaluates the loss again (closure), which the training loop does not do; '
                         'choose another')
    return classes[name]


def parse_arguments(text, cls):
    """The setting optimizer_args, 'betas=(0.9, 0.95), amsgrad=True', as a dict of arguments for the optimizer `cls`.

    Values are Python literals. SystemExit with one line when something cannot be read, or `cls` has no such argument.
    """
    flag = f'--optimizer_args={text}'
    try:
        call = ast.parse(f'f({text})', mode='eval').body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):  # the text ')(' makes two calls
            raise ValueError
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise SystemExit(f'{flag}: write NAME=VALUE, NAME=VALUE, … with numbers, strings, True, False, None and tuples '
                         'of them') from None
    known = [name for name, parameter in inspect.signature(cls).parameters.items()
             if name != 'params' and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    for name in found:
        if name == 'lr':
            raise SystemExit(f'{flag}: the learning rate is --learning_rate')
        if name not in known:
            raise SystemExit(f'{flag}: {cls.__name__} has no argument {name}; '
                             f'{nearest(name, known, "choose from " + ", ".join(known))}')
    return found


def library_builder(path, arguments_of, sharded=None):
    """A function of (param groups, settings) that builds the optimizer `path`, 'LIBRARY:CLASS'.

    Its arguments are those that `arguments_of` makes of the settings, the dict `sharded` where parameters are sharded,
    and optimizer_args.
    """
    def build(groups, s):
        cls = library_class(path, s.optimizer_name)
        params = [p for group in groups for p in (group['params'] if isinstance(group, dict) else [group])]
        arguments = arguments_of(s)
        if sharded and any(isinstance(p, DTensor) for p in params):
            arguments.update(sharded)
        arguments.update(parse_arguments(s.optimizer_args, cls))
        try:
            return cls(groups, lr=s.learning_rate, **arguments)
        except (TypeError, ValueError, AssertionError, ZeroDivisionError) as error:
            raise SystemExit(f'--optimizer_name={s.optimizer_name}: {cls.__name__} rejects its settings '
                             f'({str(error).splitlines()[0] if str(error) else type(error).__name__}); '
                             'see --optimizer_args') from None
    return build


def settings_of(arguments):
    """Those of a library's `arguments` that are settings here: weight_decay, eps > 0, and betas, if they are two."""
    settings = {key: float(arguments[key]) for key in ('weight_decay', 'eps')
                if isinstance(arguments.get(key), (int, float)) and (key != 'eps' or arguments[key] > 0)}
    pair = arguments.get('betas')
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(b, (int, float)) for b in pair):
        settings.update(beta1=float(pair[0]), beta2=float(pair[1]))
    return settings
