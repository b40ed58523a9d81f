"""Operations on any optimizer: learning rates, clipping, averaged weights, a combination of several."""

import contextlib

import torch

from runtime.distributed import full_tensor, is_sharded

# float16's loss scale starts at 2^16 and is halved at each overflow, so 40 in a row are normal.
OVERFLOWS = 40


def set_learning_rate(optimizer, lr):
    """Set the learning rate of every param group: `lr`, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        rate = lr * group.get('lr_scale', 1.0)
        if isinstance(group['lr'], torch.Tensor):  # Some libraries keep a tensor, and reject a number.
            group['lr'].fill_(rate)
        else:
            group['lr'] = rate


def parameters(optimizer):
    """Return the parameters of an optimizer, in param-group order."""
    return [p for group in optimizer.param_groups for p in group['params']]


def averaging(optimizer):
    """Return the optimizers in `optimizer` that evaluate other weights than they train, such as schedule-free ones."""
    found = [optimizer] if hasattr(optimizer, 'eval') else []
    return found + [part for one in getattr(optimizer, 'optimizers', []) for part in averaging(one)]


@contextlib.contextmanager
def evaluating(optimizer):
    """Give the model an averaging optimizer's evaluation weights, and at the end its training weights. A checkpoint
    saved inside has the latter in the optimizer's state."""
    for part in averaging(optimizer):
        if any(optimizer.state.values()):  # Before the first step there is no average.
            for p in parameters(part):
                optimizer.state[p]['training_weights'] = p.detach().clone()
            part.eval()
    try:
        yield
    finally:
        back_to_training(optimizer)


@torch.no_grad()
def back_to_training(optimizer):
    """Undo `evaluating`, also after loading a checkpoint that was saved during it."""
    for part in averaging(optimizer):
        part.train()
        for p in parameters(part):
            if 'training_weights' in optimizer.state[p]:
                p.copy_(optimizer.state[p].pop('training_weights'))


@torch.no_grad()
def global_norm(tensors):
    """Return the ℓ2 norm of all entries of `tensors` together, 0-d, over all ranks for sharded ones."""
    if all(t.device.type == 'cpu' and not is_sharded(t) for t in tensors):
        # PyTorch's float32 sum over a large tensor is up to 1 % off; sums over its rows are not.
        tensors = [torch.linalg.vector_norm(t, dim=-1) for t in tensors]
    return full_tensor(torch.nn.utils.get_total_norm(tensors))


def gradients(params):
    """Return the gradients of those `params` that have one."""
    return [p.grad for p in params if p.grad is not None]


@torch.no_grad()
def scale_gradients(params, scale):
    """Multiply the gradients of `params` by `scale`, a 0-d tensor."""
    torch._foreach_mul_(gradients(params), scale.float())


@torch.no_grad()
def clip_gradients(params, max_norm):
    """Clip the gradients of `params` at the norm `max_norm`, unless it is 0. Return their norm before, a 0-d tensor."""
    norm = global_norm(gradients(params))
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


class CombinedOptimizer(torch.optim.Optimizer):
    """Several `optimizers` as one, with their param groups in order and their state in one `state`. Also the base class
    of wrappers such as Lookahead, which override `step`, and pass on `update_hessian` and `metrics`.

    A wrapper keeps all that resuming needs in `state` and `param_groups`. It adds to a parameter's state only after its
    parts' first step, because many optimizers initialize their state only if a parameter has none."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        # Index of the optimizer that owns each param group
        self.owners = [i for i, optimizer in enumerate(optimizers) for _ in optimizer.param_groups]
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], defaults={})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self.share()

    def share(self):
        """Let the parts work on the groups and the state of this optimizer."""
        for i, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group, owner in zip(self.param_groups, self.owners) if owner == i]
            optimizer.state = self.state
            if isinstance(optimizer, CombinedOptimizer):
                optimizer.share()

    def __setstate__(self, state):  # load_state_dict calls it last
        super().__setstate__(state)
        self.share()

    def step(self, closure=None):
        """Step each optimizer in turn. Return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
