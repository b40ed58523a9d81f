"""Sophia (Liu et al., 2023, https://arxiv.org/abs/2305.14342) in one file that needs nothing but PyTorch.

    optimizer = Sophia(model.parameters(), lr=4e-4)
    for step, (x, y) in enumerate(batches):
        logits = model(x)
        if step % 10 == 0:  # Algorithm 3, lines 7 to 9
            optimizer.update_hessian(gauss_newton_bartlett(logits, optimizer, retain_graph=True))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

Sophia-G estimates the Hessian's diagonal with `gauss_newton_bartlett` (Algorithm 2), Sophia-H with `hutchinson`
(Algorithm 1). Symbols are the paper's: gradient g, its EMA m, estimate ĥ, its EMA h, β1, β2, γ, ε, weight decay λ.
Parameters may be frozen, on several devices, replicated (DDP), or sharded (FSDP2; Sophia-G only).
"""

import functools
import sys
import warnings

import torch
import torch.distributed as dist
from torch.optim import Optimizer

__version__ = '0.2.0'

# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 3: the optimizer


def sophia_update(params, grads, ms, hs, lr, beta1, gamma, eps, weight_decay, rho=1.0):
    """Update m and θ in place (Algorithm 3, lines 6, 12 and 13), on lists of tensors."""
    torch._foreach_lerp_(ms, grads, 1 - beta1)  # m ← β1·m + (1−β1)·g
    torch._foreach_mul_(params, 1 - lr * weight_decay)  # θ ← θ − lr·λ·θ
    update = precondition(ms, hs, gamma, eps)
    torch._foreach_clamp_min_(update, -rho)
    torch._foreach_clamp_max_(update, rho)
    torch._foreach_mul_(update, -lr)
    torch._foreach_add_(params, update)  # θ ← θ − lr·clip(m / max(γ·h, ε), ρ), where the paper has ρ = 1


def precondition(ms, hs, gamma, eps):
    """Return m / max(γ·h, ε) as new tensors."""
    denominator = torch._foreach_mul(hs, gamma)
    torch._foreach_clamp_min_(denominator, eps)
    return torch._foreach_div(ms, denominator)


@functools.cache
def compiled(rule):
    return torch.compile(rule)


class Sophia(Optimizer):
    """Sophia, Algorithm 3. Call `update_hessian` in every k-th iteration (the paper: 10), before `step`.

    Args:
        params: parameters or param groups, in float32. Under mixed precision keep them in float32 and use autocast.
        lr: learning rate, a float or a 0-d tensor.
        betas: β1 and β2, the decay rates of m and h.
        gamma: γ, scales h. The paper uses 0.05 with Gauss-Newton-Bartlett and 0.01 with Hutchinson, and tunes it so
            that `unclipped_fraction()` stays between 0.1 and 0.5.
        eps: ε, the lower bound of γ·h.
        weight_decay: λ, decoupled as in AdamW.
        nonfinite: 'raise' FloatingPointError when a gradient or an estimate holds inf or NaN, 'skip' that update, or
            'ignore' it (no check, so no device sync).
        compile: fuse the update into one kernel with torch.compile. A new β1 or γ compiles it again.

    State per parameter: `exp_avg` (m) and `hessian` (h), like AdamW's two buffers. Neither is bias-corrected. Until the
    first estimate h is 0 and the update is sign momentum, with a warning.
    """
    rule = staticmethod(sophia_update)  # override to change the update; same signature
    rho = 1.0  # clipping threshold (the official code's "rho" is γ)
    nonfinite, compile, warned = 'raise', False, False  # defaults for copies, which lack instance attributes

    def __init__(self, params, lr, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.2, *, nonfinite='raise',
                 compile=False):
        if nonfinite not in ('raise', 'skip', 'ignore'):
            raise ValueError(f'nonfinite = {nonfinite!r}: must be raise, skip or ignore')
        super().__init__(params, dict(lr=lr, betas=betas, gamma=gamma, eps=eps, weight_decay=weight_decay))
        self.nonfinite, self.compile = nonfinite, compile

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        numbers = group['lr'], group['gamma'], group['weight_decay'], *group['betas']
        if not (all(number >= 0 for number in numbers) and max(group['betas']) < 1 and group['eps'] > 0):
            raise ValueError(f'out of range: {", ".join(f"{key} = {group[key]!r}" for key in self.defaults)}')
        dtypes = {p.dtype for p in group['params'] if p.requires_grad}
        if torch.float16 in dtypes:
            raise ValueError('float16 parameters are not supported (ε would be 0); keep float32 ones and use autocast')
        if torch.bfloat16 in dtypes:
            warn('bfloat16 parameters lose updates below 1/256 of a value; keep float32 ones and use autocast')

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group['params'] if p.grad is not None]) for group in self.param_groups]
        grads = [p.grad for _, params in groups for p in params]
        if any(g.is_sparse for g in grads):
            raise RuntimeError('Sophia does not support sparse gradients; use torch.nn.Embedding(..., sparse=False)')
        if check_finite(self.nonfinite, 'gradient', grads):
            for group, params in groups:
                if params:
                    self.update(group, params)
        return loss

    def update(self, group, params):
        """Update m and θ of `params`, which belong to the param group `group` and have gradients."""
        lr, hs = group['lr'], local(self.buffers(params, 'hessian'))
        if not self.warned and lr:  # a schedule may begin at 0
            self.warned = True
            if not any(state['hessian'].any() for state in self.state.values() if 'hessian' in state):
                warn('Sophia.step() while h is 0 is sign momentum: there was no update_hessian() yet, or its estimates '
                     'were 0')
        if self.compile and not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, device=params[0].device)  # a number would be a compile-time constant
        rule = compiled(self.rule) if self.compile else self.rule
        rule(local(params), local([p.grad for p in params]), local(self.buffers(params, 'exp_avg')), self.curvature(hs),
             lr, group['betas'][0], group['gamma'], group['eps'], group['weight_decay'], self.rho)

    @torch.no_grad()
    def update_hessian(self, estimates):
        """Update h ← β2·h + (1−β2)·ĥ (Algorithm 3, line 9). `estimates`: one ĥ per parameter, in the order of the param
        groups; None leaves that h unchanged. Returns whether all were finite, see `nonfinite`."""
        params, estimates = params_of(self), list(estimates)
        if len(estimates) != len(params):
            raise ValueError(f'update_hessian: {len(estimates)} estimates for {len(params)} parameters; pass the '
                             'optimizer to the estimator')
        given = {p: h_hat.to(p.dtype) for p, h_hat in zip(params, estimates) if h_hat is not None}
        for p, h_hat in given.items():
            if h_hat.shape != p.shape or is_dtensor(h_hat) != is_dtensor(p):
                raise ValueError(f'update_hessian: an estimate of shape {tuple(h_hat.shape)} for a parameter of shape '
                                 f'{tuple(p.shape)}, or only one of them sharded; pass the optimizer to the estimator')
        finite = check_finite(self.nonfinite, 'Hessian estimate', [*given.values()])
        for group in self.param_groups if finite else ():
            if here := [p for p in group['params'] if p in given]:
                hs, targets = self.buffers(here, 'hessian'), [given[p] for p in here]
                torch._foreach_lerp_(local(hs), local(targets), 1 - group['betas'][1])
        return finite

    def curvature(self, hs):
        """Return the h that the update uses, given the state `hessian`. Ablations override this."""
        return hs

    def buffers(self, params, key):
        """Return the state `key` of each parameter, initialized with zeros."""
        for p in params:
            for name in ('exp_avg', 'hessian'):  # both, because torch.distributed.checkpoint loads only complete states
                if name not in self.state[p]:
                    self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][key] for p in params]

    @torch.no_grad()
    def unclipped_fraction(self):
        """Return the fraction of coordinates that the last `step` did not clip, as a 0-d tensor, or None before any
        step. Call it before h changes again and, with sharded parameters, on every rank."""
        counts, ms = [], []
        for group in self.param_groups:
            for state in [self.state[p] for p in group['params'] if 'exp_avg' in self.state.get(p, {})]:
                m, h = local([state['exp_avg'], state['hessian']])
                update, = precondition([m], self.curvature([h]), group['gamma'], group['eps'])
                n = (update.abs() <= self.rho).sum()
                counts.append(torch.stack([n, torch.full_like(n, m.numel())]))
                ms.append(state['exp_avg'])
        if not ms:
            return None
        total = torch.stack([count.to(counts[0].device) for count in counts]).sum(0)  # layers may be on several devices
        unclipped, coordinates = sum_over_shards(total, ms)
        return unclipped / coordinates


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 2: the Gauss-Newton-Bartlett estimator


def gauss_newton_bartlett(outputs, optimizer, distribution=None, group=None, retain_graph=False, by_parts=False,
                          max_norm=0.0):
    """Estimate the diagonal of the Gauss-Newton matrix from labels that are sampled from the model (Algorithm 2).

    Args:
        outputs: logits (…, V) with a graph, only at positions that count in the loss; or an iterable of micro-batches,
            such as [(mu, log_sigma)] for a `distribution` of a tuple. A generator keeps one graph in memory at a time.
        optimizer: the optimizer that takes the estimate, or a list of its parameters in the same order. With FSDP it
            must have all trained parameters of the model, because the backward adds to the gradients of the others.
        distribution: function from outputs to the torch.distributions.Distribution whose mean negative log-likelihood
            is the loss, an exponential family in its natural parameter. Default: Categorical(logits=…), that is
            cross-entropy. For ½(f − y)²: lambda f: Normal(f, 1.0).
        group: process group that shares the mini-batch. Default: all ranks. Seed torch differently on each rank.
        retain_graph: keep the graph for the gradient of the loss.
        by_parts, max_norm: see `GaussNewtonBartlett`; not in the paper.

    Returns ĥ = B·ĝ⊙ĝ as a list, with None for frozen parameters, where ĝ is the gradient of the mean loss over all B
    predictions on the sampled labels. If B is 0, all are None, so that h stays."""
    if distribution and isinstance(outputs, tuple):
        raise TypeError('gauss_newton_bartlett: a tuple is ambiguous; pass a list of micro-batches, [(mu, log_sigma)]')
    estimator = GaussNewtonBartlett(optimizer, by_parts, max_norm)
    check_seeds(estimator.params[0].device, group)
    for f in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
        if isinstance(f, torch.Tensor):  # float16 draws labels of probability 0, and its sums overflow
            f = f.to(torch.promote_types(f.dtype, torch.float32))
        likelihood = (distribution or categorical)(f)
        labels = likelihood.sample().detach().clone()  # line 4: ŷ ~ softmax(f); some distributions cache their sample
        nll = -likelihood.log_prob(labels)
        estimator.add(nll.sum(), nll.numel(), retain_graph)  # line 5: ĝ
    return estimator.estimate(group=group)  # line 6: B·ĝ⊙ĝ


def categorical(f):
    """Return Categorical(logits=f), or raise ValueError if f cannot be logits."""
    shape = tuple(getattr(f, 'shape', ()))  # f is a string if Hugging Face's output object was passed
    if len(shape) < 2 or shape[-1] < 2:
        raise ValueError(f'gauss_newton_bartlett: outputs of shape {shape} are not logits (B, …, V) with V > 1; pass '
                         'output.logits, or for a loss other than cross-entropy its distribution, such as Bernoulli')
    return torch.distributions.Categorical(logits=f, validate_args=False)  # validation syncs with the host


class GaussNewtonBartlett:
    """Algorithm 2 over micro-batches and ranks, for training loops that compute the loss on sampled labels themselves.

    ĥ = G⊙G / B, where G is the gradient of the loss summed over all B predictions; this equals B·ĝ⊙ĝ. Its standard
    deviation is about √2 times its mean for any B. An instance makes one estimate.

    by_parts: ĥ = Σₚ Gₚ⊙Gₚ / B, where Gₚ is the gradient of part p. A part is one call of `add`, on one rank, or on all
        ranks if the parameters are sharded. Labels are independent, so the mean is the same, and n equal parts have
        about 1/n of the variance.
    max_norm: scale ĥ as if ĝ had been clipped at this norm before it is squared, as the official script does at 1.0;
        0 = no clipping, as in the paper. The clipped estimate is biased.
    """

    def __init__(self, optimizer, by_parts=False, max_norm=0.0):
        self.params, self.by_parts, self.max_norm = params_of(optimizer), by_parts, max_norm
        self.total = [torch.zeros_like(p) if p.requires_grad else None for p in self.params]  # G, or Σₚ Gₚ⊙Gₚ
        self.predictions = 0  # B

    def add(self, loss_hat, predictions, retain_graph=False):
        """Add a micro-batch. `loss_hat`: its loss on sampled labels, *summed*. `predictions`: number of summands."""
        if not loss_hat.requires_grad:
            raise RuntimeError('the outputs have no graph; compute them without no_grad, and do not detach them')
        for total, g in zip(self.total, loss_gradients(loss_hat, self.params, retain_graph)):
            if g is not None:
                total, g = local([total, g])
                total.addcmul_(g, g) if self.by_parts else total.add_(g)
        self.predictions += predictions

    def estimate(self, loss_scale=1.0, group=None):
        """Return ĥ as a list: None for frozen parameters, and for all if there were no predictions. `loss_scale` is the
        factor by which the added losses were multiplied (float16)."""
        found, self.total = self.total, None  # another `add` fails
        B = sum_over_ranks(found, float(self.predictions), group)
        if not B:
            return [None] * len(found)
        totals = [total for total in found if total is not None]
        for total in totals:
            total.div_(loss_scale ** 2 * B) if self.by_parts else total.div_(loss_scale * B ** 0.5).square_()
        if self.max_norm:  # ĥ sums to B·‖ĝ‖²; by parts, in expectation
            sums = [total.sum() for total in totals]
            sums = [s.full_tensor() if is_dtensor(s) else s for s in sums]
            factor = B * self.max_norm ** 2 / torch.stack([s.to(sums[0].device) for s in sums]).sum()
            for total in local(totals):
                total.mul_(factor.clamp(max=1).to(total.device))
        return found


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 1: Hutchinson's estimator


def hutchinson(losses, optimizer, generator=None, rademacher=False, group=None):
    """Estimate the diagonal of the Hessian (Algorithm 1): ĥ = u ⊙ ∇⟨∇L, u⟩. It is unbiased, and may be negative.

    Args:
        losses: mean loss of the mini-batch, or an iterable with the losses of equally large micro-batches. The graph
            must be twice differentiable: no compiled module, no FSDP, attention under sdpa_kernel(SDPBackend.MATH).
            weight_norm, F.linear_cross_entropy with options and many custom kernels fail, mostly without an error.
        optimizer, group: as in `gauss_newton_bartlett`.
        generator: random generator for u. Several ranks need one that is seeded alike on all of them.
        rademacher: draw u from {−1, 1} (as AdaHessian does) instead of N(0, I).
    """
    if generator is None and world_size(group) > 1:
        raise ValueError('hutchinson: several ranks need the same u; pass a generator seeded alike on all of them')
    estimator = Hutchinson(optimizer, generator, rademacher)
    for loss in [losses] if isinstance(losses, torch.Tensor) else losses:
        gradient = gradients(loss, estimator.params, create_graph=True)
        used = [(g, u) for g, u in zip(gradient, estimator.u) if g is not None]
        if not used:
            raise RuntimeError('hutchinson: the loss depends on none of the parameters: another model, or sharded by '
                               'FSDP, which has no second derivative? Use gauss_newton_bartlett')
        gs, us = zip(*used)
        estimator.add(gradients(gs, estimator.params, grad_outputs=us), 1)
    return estimator.estimate(group)


class Hutchinson:
    """Algorithm 1 over micro-batches and ranks, with one u for the mini-batch. An instance makes one estimate. For its
    arguments see `hutchinson`. Hessian-vector products come from double backward or `hessian_vector_product`."""

    def __init__(self, optimizer, generator=None, rademacher=False):
        self.params = params_of(optimizer)
        self.u = [torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=generator) if p.requires_grad else None
                  for p in self.params]
        if rademacher:
            self.u = [u if u is None else torch.where(u < 0, -1.0, 1.0).to(u.dtype) for u in self.u]
        self.product, self.examples = [u if u is None else torch.zeros_like(u) for u in self.u], 0

    def add(self, product, examples):
        """Add a micro-batch: `product` is ∇²L·u for its mean loss L, `examples` is its size."""
        for total, hvp in zip(self.product, product):
            if hvp is not None:
                total.add_(hvp, alpha=examples)
        self.examples += examples

    def estimate(self, group=None):
        """Return ĥ, averaged over all examples, as a list like `GaussNewtonBartlett.estimate`."""
        product, self.product = self.product, None
        n = sum_over_ranks(product, self.examples, group)
        return [hvp.div_(n).mul_(u) if hvp is not None and n else None for hvp, u in zip(product, self.u)]


def hessian_vector_product(loss_fn, params, u):
    """Return ∇²L·u by forward-over-reverse differentiation, which torch.compile can trace, unlike double backward.
    `loss_fn` maps a tuple of tensors like `params` to the 0-d mean loss L, without flash attention."""
    return torch.func.jvp(torch.func.grad(loss_fn), (tuple(params),), (tuple(u),))[1]


# ----------------------------------------------------------------------------------------------------------------------
# Helpers


def params_of(optimizer):
    """Return the parameters of an optimizer, or of a wrapper with `param_groups`, in order; a list stays the same."""
    groups = getattr(optimizer, 'param_groups', None)
    params = [p for group in groups for p in group['params']] if groups else list(optimizer)
    if not params:
        raise ValueError('no parameters: a generator such as model.parameters() was used before; pass the optimizer')
    return params


def gradients(outputs, params, **options):
    """Call torch.autograd.grad, with None for frozen and unused parameters."""
    found = iter(torch.autograd.grad(outputs, [p for p in params if p.requires_grad], allow_unused=True, **options))
    return [next(found) if p.requires_grad else None for p in params]


def check_finite(nonfinite, what, tensors):
    """Return whether `tensors` are finite on all ranks that share their shards. If not, nonfinite = 'raise' raises
    FloatingPointError; 'ignore' skips the check."""
    if nonfinite == 'ignore' or not tensors:
        return True
    shards = [t for t in local(tensors) if t.numel()]  # a rank may have none
    bad = torch.zeros((), device=tensors[0].device)
    for largest in torch._foreach_norm(shards, ord=torch.inf) if shards else []:
        bad += (~largest.isfinite()).to(bad.device)
    finite = not sum_over_shards(bad, tensors)
    if not finite and nonfinite == 'raise':
        raise FloatingPointError(f'a {what} is not finite; nothing of it entered the optimizer state')
    return finite


def warn(message):
    """Warn at the first caller outside of this file and of PyTorch, whose schedulers and GradScaler call `step`."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith((__file__, torch.__path__[0])):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks: mini-batches that ranks share, and parameters sharded by FSDP2 (DTensors)


def loss_gradients(loss, params, retain_graph):
    """Return d loss / d params, None for unused ones. Sharded ones are summed over the ranks that share them."""
    find = fsdp_gradients if any(map(is_dtensor, params)) else gradients
    found = find(loss, params, retain_graph=retain_graph)
    if all(g is None for g in found):
        raise RuntimeError('the outputs depend on none of the parameters: another model, FSDP1 (use fully_shard), or '
                           'set_requires_gradient_sync(False)?')
    return found


def fsdp_gradients(loss, params, retain_graph):
    """Return gradients as shards. Only FSDP's own backward reduces them, into .grad, as a mean over the ranks. So the
    loss is multiplied by the number of ranks, and .grad is set aside and restored."""
    for *outer, inner in [p.placements for p in params if is_dtensor(p)]:
        if not (inner.is_shard() and all(placement.is_replicate() for placement in outer)):
            raise ValueError('gauss_newton_bartlett: tensor parallelism is not supported')
    sizes = [p.device_mesh.size() if is_dtensor(p) else 1 for p in params]
    before = [(p.grad, p._post_accumulate_grad_hooks) for p in params]
    for p in params:
        p.grad = p._post_accumulate_grad_hooks = None  # such hooks may step an optimizer
    try:
        (loss * max(sizes)).backward(retain_graph=retain_graph)
        found = [p.grad for p in params]
    finally:
        for p, (grad, hooks) in zip(params, before):
            p.grad, p._post_accumulate_grad_hooks = grad, hooks
    if any(g is None and p.requires_grad and not is_dtensor(p) for p, g in zip(params, found)):
        raise RuntimeError('gauss_newton_bartlett: a parameter has no gradient, because FSDP replaces it in the '
                           'forward pass; pass the optimizer, or list the parameters before the forward')
    return [g if g is None or size == max(sizes) else g * (size / max(sizes)) for g, size in zip(found, sizes)]


def is_dtensor(tensor):
    return hasattr(tensor, 'placements')  # importing the class takes half a second


def local(tensors):
    """Return this rank's shards."""
    return [t.to_local() if is_dtensor(t) else t for t in tensors]


def sum_over_shards(count, tensors):
    """Sum the tensor `count` in place over the ranks that share the shards of `tensors`."""
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)):
        for group in mesh.get_all_groups():
            dist.all_reduce(count, group=group)
    return count


def world_size(group=None):
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(tensors, count, group=None):
    """Sum `tensors` (in place) and the number `count` over the ranks of `group`. Return the sum of `count`. DTensors
    are skipped, because FSDP's backward has summed them."""
    if world_size(group) < 2:
        return count
    tensors = [t for t in tensors if t is not None]
    total = torch.tensor(count, dtype=torch.float64, device=tensors[0].device)
    for t in [total, *(t for t in tensors if not is_dtensor(t))]:
        dist.all_reduce(t, group=group)
    return total.item()


def check_seeds(device, group=None):
    """Raise ValueError if two ranks have the same seed, because equal labels would make ĥ too large."""
    if world_size(group) > 1:
        seed = getattr(torch.get_device_module(device), 'initial_seed', torch.initial_seed)()
        seeds = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(world_size(group))]
        dist.all_gather(seeds, torch.tensor(seed % 2 ** 63, device=device), group=group)
        if len({seed.item() for seed in seeds}) < len(seeds):
            raise ValueError('gauss_newton_bartlett: ranks with the same random seed would sample the same labels; '
                             'call torch.manual_seed(seed + rank) after building the model')
