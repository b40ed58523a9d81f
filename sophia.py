"""Sophia (Liu et al., 2023): the paper's three algorithms in one file that needs nothing but PyTorch.
Edit the update rule and the estimators here; for use elsewhere copy the file.

- `Sophia`: Algorithm 3, the optimizer; `sophia_update` is its update rule.
- `gauss_newton_bartlett`: Algorithm 2, the estimator of Sophia-G.
- `hutchinson`: Algorithm 1, the estimator of Sophia-H.

A training step with any model; the first line only in every k-th iteration:

    optimizer.update_hessian(gauss_newton_bartlett(model(x), optimizer))
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()

Symbols are the paper's: m (EMA of the gradient), h (EMA of the diagonal Hessian estimate ĥ), γ, β1, β2, ε, k. Frozen
parameters may be in the optimizer: their estimate is None. Parameters may be sharded by FSDP2; see "Shards" below.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.optim import Optimizer

__version__ = '0.2.0'

# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 3


def sophia_update(params, grads, ms, hs, lr, beta1, gamma, eps, weight_decay, rho=1.0):
    """Update m and θ, in place, on lists of tensors: Algorithm 3, which has ρ = 1, without its lines on h.

    `unclipped_fraction` follows edits of `precondition` and `clip_` only.
    """
    torch._foreach_lerp_(ms, grads, 1 - beta1)  # line 6: m ← β1·m + (1−β1)·g
    torch._foreach_mul_(params, 1 - lr * weight_decay)  # line 12: θ ← θ − lr·λ·θ
    update = precondition(ms, hs, gamma, eps)  # line 13: θ ← θ − lr·clip(m / max(γ·h, ε), ρ)
    clip_(update, rho)
    torch._foreach_mul_(update, -lr)
    torch._foreach_add_(params, update)


def precondition(ms, hs, gamma, eps):
    """Return m / max(γ·h, ε), new tensors."""
    denominator = torch._foreach_mul(hs, gamma)
    torch._foreach_clamp_min_(denominator, eps)
    return torch._foreach_div(ms, denominator)


def clip_(update, rho):
    """Clip each coordinate at ρ, in place."""
    torch._foreach_clamp_min_(update, -rho)
    torch._foreach_clamp_max_(update, rho)


@functools.cache
def compiled(rule):
    return torch.compile(rule)


class Sophia(Optimizer):
    """Algorithm 3: m ← β1·m + (1−β1)·g;  θ ← θ − lr·λ·θ;  θ ← θ − lr·clip(m / max(γ·h, ε), 1).

    h changes only in `update_hessian`, h ← β2·h + (1−β2)·ĥ, to be called every k-th iteration before `step`. Neither m
    nor h is bias-corrected. A `step` before the first estimate is sign momentum, and warns.

    Args:
        params: parameters or param groups, in float32 or float64. bfloat16 warns; float16, where ε is 0, is rejected.
        lr: learning rate η, a float or a 0-d tensor.
        betas, eps, weight_decay: (β1, β2), ε, and λ, which is decoupled.
        gamma: γ, scales h. The paper: 0.05 with Gauss-Newton-Bartlett, 0.01 with Hutchinson.
        nonfinite: 'raise' FloatingPointError when a gradient or an estimate holds inf or NaN, 'skip' that update, or
            'ignore' it (no check, so no wait for the device).
        compile: fuse the update to one pass over memory by torch.compile. Each new β1 or γ compiles it again, so that
            OneCycleLR needs cycle_momentum=False.

    State per parameter: `exp_avg` (m) and `hessian` (h), in the parameter's dtype and shape.
    """
    rule = staticmethod(sophia_update)  # a variant of the update is another function of these arguments
    rho = 1.0  # where the update is clipped; the official code's rho is γ
    nonfinite, compile = 'raise', False  # also of a copy
    _first = True  # whether no step has moved anything yet

    def __init__(self, params, lr, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.2, *, nonfinite='raise',
                 compile=False):
        if nonfinite not in ('raise', 'skip', 'ignore'):
            raise ValueError(f'nonfinite = {nonfinite!r}: choose raise, skip or ignore')
        super().__init__(params, dict(lr=lr, betas=betas, gamma=gamma, eps=eps, weight_decay=weight_decay))
        self.nonfinite, self.compile = nonfinite, compile

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        in_range = dict(lr=group['lr'] >= 0, betas=all(0 <= beta < 1 for beta in group['betas']),
                        gamma=group['gamma'] >= 0, eps=group['eps'] > 0, weight_decay=group['weight_decay'] >= 0)
        for key, ok in in_range.items():
            if not ok:
                raise ValueError(f'{key} = {group[key]!r} is out of range')
        dtypes = {p.dtype for p in group['params'] if p.requires_grad}
        if torch.float16 in dtypes:
            raise ValueError('float16 parameters are not supported, because ε is 0 there; keep them in float32, and '
                             'compute in float16 by autocast')
        if torch.bfloat16 in dtypes:
            warnings.warn('bfloat16 parameters drop updates below 1/256 of a value, which most of the weight decay is; '
                          'keep them in float32, and compute in bfloat16 by autocast', stacklevel=4)

    def step(self, closure=None):
        """Update every parameter that has a gradient, and return the loss of the closure, if there is one."""
        loss = closure() if closure else None
        groups = [(group, [p for p in group['params'] if p.grad is not None]) for group in self.param_groups]
        with torch.no_grad():
            if check_finite(self.nonfinite, 'gradient', [p.grad for _, params in groups for p in params]):
                for group, params in groups:
                    if params:
                        self.update(group, params, [p.grad for p in params])
        return loss

    def update(self, group, params, grads):
        """Move `params`, which belong to the param group `group`, and their m."""
        lr, ms, hs = group['lr'], local(self.buffers(params, 'exp_avg')), local(self.buffers(params, 'hessian'))
        if self._first and lr:  # warm-ups of other libraries begin at 0
            self._first = False
            if not any(h.any() for h in hs):
                warnings.warn('Sophia.step() while h is 0 is sign momentum: there was no update_hessian() yet, or its '
                              'estimates were 0', stacklevel=4)
        if self.compile and not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, device=params[0].device)  # a number would be compiled in
        rule = compiled(self.rule) if self.compile else self.rule
        rule(local(params), local(grads), ms, self.curvature(hs), lr, group['betas'][0], group['gamma'], group['eps'],
             group['weight_decay'], self.rho)

    @torch.no_grad()
    def update_hessian(self, estimates):
        """Update h ← β2·h + (1−β2)·ĥ (line 9).

        estimates: an iterable of tensors, one per parameter in param-group order; None leaves that h as it is. An inf
        or NaN is treated as in a gradient; 'skip' leaves out all of them.
        """
        given = {p: h_hat for p, h_hat in zip(params_of(self), estimates, strict=True) if h_hat is not None}
        for p, h_hat in given.items():
            if h_hat.shape != p.shape or is_dtensor(h_hat) != is_dtensor(p):
                raise ValueError(f'update_hessian: an estimate of shape {tuple(h_hat.shape)} for a parameter of shape '
                                 f'{tuple(p.shape)}, or only one of them sharded; pass the optimizer to the estimator')
        targets = {p: self.averaged(h_hat.to(p.dtype)) for p, h_hat in given.items()}
        if check_finite(self.nonfinite, 'Hessian estimate', targets.values()):
            for group in self.param_groups:
                if params := [p for p in group['params'] if p in targets]:
                    self.update_ema(group, params, [targets[p] for p in params])

    def update_ema(self, group, params, targets):
        """Move h of `params`, which belong to the param group `group`, towards `targets`."""
        torch._foreach_lerp_(local(self.buffers(params, 'hessian')), local(targets), 1 - group['betas'][1])

    def averaged(self, h_hat):
        """Return what h averages: the estimate ĥ itself."""
        return h_hat

    def curvature(self, hs):
        """Return the h of the update, given the state `hessian`."""
        return hs

    def buffers(self, params, key):
        """Return the state `key` of each of `params`, made as zeros where there is none yet."""
        for p in params:
            for name in ('exp_avg', 'hessian'):  # both, because torch.distributed.checkpoint loads only complete states
                if name not in self.state[p]:
                    self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][key] for p in params]

    def metrics(self):
        """Return a dict of 0-d tensors for a log: `update_unclipped`, unless the rule is not Algorithm 3's."""
        unclipped = self.unclipped_fraction() if self.rule is sophia_update else None
        return {} if unclipped is None else dict(update_unclipped=unclipped)

    def unclipped_fraction(self):
        """Return the fraction of the coordinates of m / max(γ·h, ε) that the clip leaves as they are, a 0-d tensor;
        None before the first step. Call it after `step`, before h changes, and on every rank if the parameters are
        sharded. The paper keeps it between 0.1 and 0.5.
        """
        counts, ms = [], []
        for group in self.param_groups:
            for state in [self.state[p] for p in group['params'] if 'exp_avg' in self.state.get(p, {})]:
                m, h = local([state['exp_avg'], state['hessian']])
                update, = precondition([m], self.curvature([h]), group['gamma'], group['eps'])
                clipped = update.clone()
                clip_([clipped], self.rho)
                n = (clipped == update).sum()
                counts.append(torch.stack([n, torch.full_like(n, m.numel())]))
                ms.append(state['exp_avg'])
        if not counts:
            return None
        total = torch.stack([count.to(counts[0].device) for count in counts]).sum(0)  # layers may be on several devices
        unclipped, coordinates = add_shards(total, ms)
        return unclipped / coordinates


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 2


def gauss_newton_bartlett(outputs, optimizer, distribution=None, group=None, retain_graph=False, by_parts=False,
                          max_norm=None):
    """Estimate the Gauss-Newton diagonal from labels that the model itself draws (Algorithm 2).

    Args:
        outputs: (…, V) logits of B predictions with a graph; or an iterable, one for each micro-batch (a generator runs
            the forwards one at a time), such as `[(mu, log_sigma)]` if the `distribution` takes a tuple. Leave out the
            positions that the loss ignores.
        optimizer: the optimizer that takes the estimate, or the list of its parameters in param-group order. Sharded
            ones (FSDP2 only) must be all that the model trains: FSDP's backward adds to the gradients of others.
        distribution: maps outputs to the `torch.distributions.Distribution` whose mean negative log-likelihood is the
            loss, an exponential family in its natural parameter. Default Categorical(logits=…), i.e. cross-entropy;
            for ½(f − y)²: `lambda f: torch.distributions.Normal(f, 1.0)`.
        group: process group over which the mini-batch is spread; default all ranks. If the parameters are sharded over
            only some of the ranks, the group of those. Seed torch differently on each rank.
        retain_graph: keep the graph of `outputs` for the gradient of the true loss.
        by_parts: square the gradient of each micro-batch, and of each rank, by itself: less noise, see
            `GaussNewtonBartlett`. Parts of one forward, `logits.split(1)`, also need retain_graph=True.
        max_norm: clip ĝ at this norm before it is squared, see `GaussNewtonBartlett`; not in the paper.

    Returns the list of tensors ĥ = B·ĝ⊙ĝ for `Sophia.update_hessian`.
    """
    estimator = GaussNewtonBartlett(optimizer, by_parts, max_norm)
    check_seeds(estimator.params[0].device, group)
    for f in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
        if isinstance(f, torch.Tensor):  # in float16 labels of probability 0 are drawn, and sums overflow
            f = f.to(torch.promote_types(f.dtype, torch.float32))
        likelihood = (distribution or categorical)(f)
        nll = -likelihood.log_prob(likelihood.sample())  # line 4: ŷ ~ softmax(f)
        estimator.add(nll.sum(), nll.numel(), retain_graph)  # line 5: ĝ
    return estimator.estimate(group=group)  # line 6: B·ĝ⊙ĝ


def categorical(f):
    """Return Categorical(logits=f); ValueError unless f can be logits."""
    shape = tuple(getattr(f, 'shape', ()))  # of Hugging Face's outputs f is a key
    if len(shape) < 2 or shape[-1] < 2:
        raise ValueError(f'gauss_newton_bartlett: outputs of shape {shape} are not logits (B, …, V) with V > 1; pass '
                         'output.logits, and for another loss than cross-entropy its distribution, such as Bernoulli')
    # PyTorch's check of arguments rejects logits of no predictions.
    return torch.distributions.Categorical(logits=f, validate_args=None if f.numel() else False)


class GaussNewtonBartlett:
    """Algorithm 2 over micro-batches and ranks: `add` the loss on sampled labels of each micro-batch, then `estimate`,
    once.

    ĥ = G⊙G / B, where G is the gradient of the loss summed over all B predictions; this is the paper's B·ĝ⊙ĝ. Each
    coordinate of G is close to normal, so ĥ is noisy whatever B is: its standard deviation is √2 of its mean.

    by_parts: ĥ = Σₚ Gₚ⊙Gₚ / B, where Gₚ belongs to part p, one `add` on one rank. Labels are drawn independently, so
    products of different parts are 0 in expectation: the mean is the same, and n equal parts have 1/n of the variance.
    With sharded parameters a part is one `add` on all ranks, because FSDP's backward sums over them.

    max_norm: ĥ is scaled as if ĝ had been clipped at this norm. Where the gradient is clipped, too, this keeps h from
    running away, at the price of a bias.
    """

    def __init__(self, optimizer, by_parts=False, max_norm=None):
        self.params, self.by_parts, self.max_norm = params_of(optimizer), by_parts, max_norm
        self.total = [torch.zeros_like(p) if p.requires_grad else None for p in self.params]  # G, or Σₚ Gₚ⊙Gₚ
        self.predictions = 0  # B

    def add(self, loss_hat, predictions, retain_graph=False):
        """Add the gradient of `loss_hat`, the loss on sampled labels *summed* over `predictions` predictions, a number
        or a 0-d tensor."""
        for total, g in zip(self.total, loss_gradients(loss_hat, self.params, retain_graph)):
            if g is not None:
                total, g = local([total, g])
                total.addcmul_(g, g) if self.by_parts else total.add_(g)
        self.predictions += predictions

    def estimate(self, loss_scale=1.0, group=None):
        """Return ĥ as a list of tensors, None for frozen parameters, the same on every rank of `group`; NaN when no
        predictions were added. `loss_scale`: by which the added losses were multiplied, as in float16."""
        found, self.total = self.total, None  # another `add` is an error
        B = sum_over_ranks(found, float(self.predictions), group)
        totals = [total for total in found if total is not None]
        for total in totals:
            total.div_(loss_scale ** 2 * B) if self.by_parts else total.div_(loss_scale * B ** 0.5).square_()
        if self.max_norm is not None:  # ĥ sums to B·‖ĝ‖², in expectation also by parts
            sums = [total.sum() for total in totals]
            sums = [s.full_tensor() if is_dtensor(s) else s for s in sums]
            factor = B * self.max_norm ** 2 / torch.stack([s.to(sums[0].device) for s in sums]).sum()
            for total in local(totals):
                total.mul_(factor.clamp(max=1).to(total.device))
        return found


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 1


def hutchinson(losses, optimizer, generator=None, rademacher=False, group=None):
    """Estimate the Hessian's diagonal without bias, of any sign (Algorithm 1).

    Args:
        losses: the mean loss of a mini-batch, a 0-d tensor with a graph that can be differentiated twice (no compiled
            module, attention under sdpa_kernel(SDPBackend.MATH)); or an iterable, one for each micro-batch, which have
            equal sizes. Kernels whose backward autograd cannot follow count as linear.
        optimizer, group: as for `gauss_newton_bartlett`, but not sharded.
        generator, rademacher: see `Hutchinson`. Over several ranks the generator is required.

    Returns the list of tensors ĥ = u ⊙ ∇⟨∇L, u⟩ for `Sophia.update_hessian`.
    """
    if generator is None and ranks(group) > 1:
        raise ValueError('hutchinson: several ranks need the same u; pass a generator seeded alike on all of them')
    estimator = Hutchinson(optimizer, generator, rademacher)
    for loss in [losses] if isinstance(losses, torch.Tensor) else losses:
        estimator.add(double_backward(loss, estimator.params, estimator.u), 1)
    return estimator.estimate(group)


class Hutchinson:
    """Algorithm 1 over any number of micro-batches and ranks: ĥ = u ⊙ ∇²L u with one u for the whole mini-batch. Makes
    one estimate: the next one needs another u.

    Args:
        optimizer: as for `hutchinson`.
        generator: of u, on the parameters' device. Ranks must draw the same u: seed it alike on all of them.
        rademacher: u ∈ {−1, 1} (AdaHessian's choice) instead of u ~ N(0, I).
    """

    def __init__(self, optimizer, generator=None, rademacher=False):
        self.params = params_of(optimizer)
        self.u = [torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=generator) if p.requires_grad else None
                  for p in self.params]
        if rademacher:
            self.u = [u if u is None else torch.where(u < 0, -1.0, 1.0).to(u.dtype) for u in self.u]
        self.product = [u if u is None else torch.zeros_like(u) for u in self.u]
        self.examples = 0

    def add(self, product, examples):
        """Add a micro-batch: `product` = ∇²L u with L its mean loss, `examples` its size."""
        for total, hvp in zip(self.product, product):
            if hvp is not None:
                total.add_(hvp, alpha=examples)
        self.examples += examples

    def estimate(self, group=None):
        """Return ĥ as a list of tensors, None for frozen parameters, the mean over the examples of `group`."""
        product, self.product = self.product, None
        n = sum_over_ranks(product, self.examples, group)
        return [hvp if hvp is None else hvp.div_(n).mul_(u) for hvp, u in zip(product, self.u)]


def double_backward(loss, params, u):
    """Return ∇²L u = ∇⟨∇L, u⟩ of a mean loss with a graph, None where it does not depend on a parameter."""
    gradient = gradients(loss, params, create_graph=True)
    used = [(g, v) for g, v in zip(gradient, u) if g is not None]
    if not used:
        raise RuntimeError('hutchinson: the loss depends on none of the params: another model, or sharded by FSDP, '
                           'which has no second derivative? Use gauss_newton_bartlett')
    return gradients([g for g, _ in used], params, grad_outputs=[v for _, v in used])


def hessian_vector_product(loss_fn, params, u):
    """Return ∇²L u by forward-over-reverse differentiation, which torch.compile can trace, unlike `double_backward`.

    `loss_fn` maps a tuple of tensors like `params` to the 0-d mean loss, without flash attention.
    """
    return torch.func.jvp(torch.func.grad(loss_fn), (tuple(params),), (tuple(u),))[1]


# ----------------------------------------------------------------------------------------------------------------------
# Helpers


def params_of(optimizer):
    """Return the parameters of an optimizer in param-group order, as a list; a list of parameters stays the same."""
    groups = getattr(optimizer, 'param_groups', None)  # wrappers have them, too
    params = [p for group in groups for p in group['params']] if groups else list(optimizer)
    if not params:
        raise ValueError('no parameters: a generator such as model.parameters() was used before; pass the optimizer')
    return params


def gradients(outputs, params, **options):
    """Call torch.autograd.grad, with None for a parameter that is frozen or that `outputs` do not depend on."""
    found = iter(torch.autograd.grad(outputs, [p for p in params if p.requires_grad], allow_unused=True, **options))
    return [next(found) if p.requires_grad else None for p in params]


def check_finite(nonfinite, what, tensors):
    """Return whether `tensors` may enter an optimizer's state because all their entries are finite. If not, raise
    FloatingPointError under nonfinite = 'raise'; 'ignore' does not look."""
    tensors = list(tensors)
    if nonfinite == 'ignore' or not tensors:
        return True
    shards = [t for t in local(tensors) if t.numel()]  # a rank may have none
    bad = torch.zeros((), device=tensors[0].device)
    for largest in torch._foreach_norm(shards, ord=torch.inf) if shards else []:
        bad += (~largest.isfinite()).to(bad.device)
    if not add_shards(bad, tensors):
        return True
    if nonfinite == 'raise':
        raise FloatingPointError(f'a {what} is not finite; nothing of it entered the optimizer state')
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Shards: parameters that are DTensors, and mini-batches spread over ranks. Rules act on each rank's shards.


def loss_gradients(loss, params, retain_graph):
    """Return d loss / d params, None where there is none; of sharded ones the sum over the ranks."""
    if any(map(is_dtensor, params)):
        found = fsdp_gradients(loss, params, retain_graph)
    else:
        found = gradients(loss, params, retain_graph=retain_graph)
    if all(g is None for g in found):
        raise RuntimeError('the outputs depend on none of the params: another model, FSDP1 (use fully_shard), or '
                           'set_requires_gradient_sync(False)?')
    return found


def fsdp_gradients(loss, params, retain_graph):
    """Return the gradients of `loss_gradients` by FSDP's own backward, which alone turns gradients into shards. It
    leaves in .grad the mean over the ranks, so the loss is multiplied by their number."""
    mesh = next(p.device_mesh for p in params if is_dtensor(p))
    for p in params:
        if p.requires_grad and not (is_dtensor(p) and p.device_mesh == mesh and p.placements[-1].is_shard()
                                    and all(placement.is_replicate() for placement in p.placements[:-1])):
            raise ValueError('gauss_newton_bartlett: parameters must all be sharded by fully_shard over one mesh, '
                             'without tensor parallelism; pass the optimizer, or list them before the forward')
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    (loss * mesh.size()).backward(retain_graph=retain_graph)
    found = [p.grad for p in params]
    for p, grad in zip(params, before):
        p.grad = grad
    return found


def is_dtensor(tensor):
    return hasattr(tensor, 'placements')  # to import the class costs half a second


def local(tensors):
    return [t.to_local() if is_dtensor(t) else t for t in tensors]


def add_shards(count, tensors):
    """Sum `count`, of the `local` shards of `tensors`, over the ranks that share these, in place."""
    meshes = [t.device_mesh for t in tensors if is_dtensor(t)]
    for group in meshes[0].get_all_groups() if meshes else []:
        dist.all_reduce(count, group=group)
    return count


def ranks(group=None):
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def check_seeds(device, group=None):
    """Raise ValueError when ranks of `group` would draw the same labels, which makes ĥ too large in expectation."""
    if ranks(group) > 1:
        own = torch.tensor(torch.initial_seed() % 2 ** 63, device=device)
        seeds = [torch.empty_like(own) for _ in range(ranks(group))]
        dist.all_gather(seeds, own, group=group)
        if len(set(map(int, seeds))) < len(seeds):
            raise ValueError('gauss_newton_bartlett: ranks with the same random seed would draw the same labels; '
                             'call torch.manual_seed(seed + rank) once the model is made')


def sum_over_ranks(tensors, count, group=None):
    """Add up `tensors` (in place) and the number `count` over the ranks of `group`, and return the summed count.

    DTensors stay as they are, because FSDP's backward has summed them.
    """
    if ranks(group) < 2:
        return count
    tensors = [t for t in tensors if t is not None]  # of frozen parameters
    total = torch.tensor(count, dtype=torch.float64, device=tensors[0].device)
    for t in [total, *tensors]:
        if not is_dtensor(t):
            dist.all_reduce(t, group=group)
    return total.item()
