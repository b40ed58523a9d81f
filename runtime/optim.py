"""Any optimizer in the training loop: learning rates, clipping, averaged weights, several as one, a library's."""

import ast
import contextlib
import difflib
import importlib
import inspect

import torch

from runtime.distributed import full_tensor, is_sharded
from runtime.files import first_line

# ----------------------------------------------------------------------------------------------------------------------
# Any optimizer

ROW_SIZE = 4096  # entries that `total_norm` adds up at a time on CPU


def set_learning_rate(optimizer, lr):
    """Sets the learning rate of every param group: `lr`, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group['lr'] = lr * group.get('lr_scale', 1.0)


def parameters(optimizer):
    """The parameters of an optimizer, in param-group order."""
    return [p for group in optimizer.param_groups for p in group['params']]


def averages_weights(optimizer):
    """Whether the weights to evaluate are not those that training continues with: a schedule-free optimizer's."""
    return hasattr(optimizer, 'eval') and hasattr(optimizer, 'train')


@contextlib.contextmanager
def evaluating(optimizer):
    """Around evaluation and saving: gives the model the weights that the optimizer means to be evaluated. Training
    continues with exactly the weights from before, which a checkpoint saved meanwhile holds in the optimizer's state.
    """
    if averages_weights(optimizer) and any(optimizer.state.values()):  # before its first step there is no average
        for p in parameters(optimizer):
            optimizer.state[p]['training_weights'] = p.detach().clone()
        optimizer.eval()
    try:
        yield
    finally:
        back_to_training(optimizer)


@torch.no_grad()
def back_to_training(optimizer):
    """Ends `evaluating`, also for the state of a checkpoint that was saved during it."""
    if averages_weights(optimizer):
        optimizer.train()
        for p in parameters(optimizer):
            if 'training_weights' in optimizer.state[p]:
                p.copy_(optimizer.state[p].pop('training_weights'))


def total_norm(tensors):
    """ℓ2 norm of all entries of `tensors` together, a 0-d tensor (a DTensor of sharded ones).

    On CPU PyTorch adds up the squares of a tensor in a few float32 sums: of 19M entries the norm comes out 0.1 % too
    small, of equal ones 1 %. By rows of ROW_SIZE entries it is right, and takes less time.
    """
    if any(is_sharded(t) or t.device.type != 'cpu' for t in tensors):
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


def nearest(name, names):
    """The hint 'did you mean X?' of a message about the unknown `name`; '' when none of `names` is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f'did you mean {near[0]}?' if near else ''


def library_class(path):
    """The optimizer class 'LIBRARY:CLASS'; torch stands for torch.optim. SystemExit with one line if there is none."""
    library, _, name = path.partition(':')
    flag = f'--optimizer_name={path}'
    try:
        module = importlib.import_module('torch.optim' if library == 'torch' else library)
    except (ImportError, TypeError, ValueError):  # the last two: import_module of '.x' and of ''
        known = ('torch', 'pytorch_optimizer', 'schedulefree')
        hint = f'pip install {library}' if library in known else nearest(library, known) or 'check its name'
        raise SystemExit(f'{flag}: the package {library} is not installed; {hint}') from None
    classes = {key: value for key, value in vars(module).items()
               if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)}
    if name not in classes:
        raise SystemExit(f'{flag}: {library} has no such optimizer; '
                         f'{nearest(name, classes) or f"see the documentation of {library}"}')
    return classes[name]


def parse_arguments(text, path, taken):
    """The setting optimizer_args, 'nesterov=True, momentum=0.9', as a dict of arguments of the class `path`.

    Values are Python literals. `taken` are the arguments that other settings give. SystemExit with one line when
    something cannot be read, is taken, or is not an argument of the class.
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
    cls = library_class(path)
    known = [name for name, parameter in inspect.signature(cls).parameters.items()
             if name != 'params' and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    settings = dict(lr='--learning_rate', betas='--beta1 and --beta2', momentum='--beta1')
    for name in found:
        if name == 'lr' or name in taken:
            raise SystemExit(f'{flag}: set {name} with {settings.get(name, f"--{name}")}')
        if name not in known:
            raise SystemExit(f'{flag}: {cls.__name__} has no argument {name}; '
                             + (nearest(name, known) or f'choose from {", ".join(known)}'))
    return found


def build_from_library(path, groups, lr, arguments, text):
    """The optimizer 'LIBRARY:CLASS' on param `groups`, with the dict `arguments` and optimizer_args, the `text`.
    SystemExit with one line when it rejects them."""
    more = parse_arguments(text, path, set(arguments))
    try:
        optimizer = library_class(path)(groups, lr=lr, **arguments, **more)
    except Exception as error:  # whatever the library raises
        raise SystemExit(f'--optimizer_name={path}: cannot be built with its settings ({first_line(error)}); see '
                         '--optimizer_args') from None
    if not all('lr' in group for group in optimizer.param_groups):
        raise SystemExit(f'--optimizer_name={path}: keeps no learning rate in its param groups, which this training '
                         'loop sets in every iteration; choose another optimizer')
    optimizer.library = path
    return optimizer


def step(optimizer, scaler):
    """One update. SystemExit with one line when the first one of a library's optimizer fails."""
    try:
        scaler.step(optimizer)
    except Exception as error:
        if not getattr(optimizer, 'library', '') or getattr(optimizer, 'has_stepped', False):
            raise
        raise SystemExit(f'--optimizer_name={optimizer.library}: its first step failed ({first_line(error)}); this '
                         'training loop cannot use it as it is') from None
    optimizer.has_stepped = True
