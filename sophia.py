"""Sophia (Liu et al., 2023): the paper's three algorithms, with no other file needed.

- `Sophia`: Algorithm 3, the optimizer.
- `gauss_newton_bartlett`: Algorithm 2, the estimator of Sophia-G.
- `hutchinson`: Algorithm 1, the estimator of Sophia-H.

A training step with any model, every k-th iteration in front of the update:

    optimizer.update_hessian(gauss_newton_bartlett(model(x), params))
    optimizer.step()

Symbols are the paper's: m (EMA of the gradient), h (EMA of the diagonal Hessian estimate ĥ), γ, β1, β2, ε, k.
"""

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class GuardedOptimizer(Optimizer):
    """What the optimizers here share: closures, the guard in front of the state, lazily made state.

    A subclass names its per-parameter state in `state_keys` and defines `update` (and `fold`, if it takes Hessian
    estimates). nonfinite says what happens when a gradient or an estimate holds inf or NaN, before anything enters the
    state: 'raise' FloatingPointError, 'skip' that step or estimate, or 'ignore' (the caller has checked; saves a
    synchronisation with the device).
    """

    state_keys = ('exp_avg',)

    def __init__(self, params, defaults, nonfinite):
        in_range = dict(lr=lambda v: v >= 0, betas=lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v),
                        gamma=lambda v: v > 0, eps=lambda v: v > 0, weight_decay=lambda v: v >= 0,
                        clipping=lambda v: v in ('element', 'none', 'normalize'),
                        nonfinite=lambda v: v in ('raise', 'skip', 'ignore'))
        for key, value in dict(defaults, nonfinite=nonfinite).items():
            if key in in_range and not in_range[key](value):
                raise ValueError(f'{type(self).__name__}: {key} = {value!r} is out of range')
        super().__init__(params, defaults)
        self.nonfinite = nonfinite

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = [(group, [p for p in group['params'] if p.grad is not None]) for group in self.param_groups]
        if any(p.grad.is_sparse for _, params in batches for p in params):
            raise RuntimeError(f'{type(self).__name__} does not support sparse gradients: use dense embeddings')
        if may_enter(self.nonfinite, 'gradient', [p.grad for _, params in batches for p in params]):
            for group, params in batches:
                if params:
                    grads = [p.grad for p in params]
                    self.update(group, params, torch._foreach_neg(grads) if group['maximize'] else grads,
                                [self.state_of(p) for p in params])
        return loss

    @torch.no_grad()
    def update_hessian(self, estimates):
        """Folds ĥ into the state.

        Args:
            estimates: iterable of tensors, one per parameter in param-group order; None leaves that state as it is.
        """
        estimates = list(estimates)
        params = [(p, group) for group in self.param_groups for p in group['params']]
        if len(estimates) != len(params):
            raise ValueError(f'update_hessian got {len(estimates)} estimates for {len(params)} parameters')
        found = [(p, group, h_hat) for (p, group), h_hat in zip(params, estimates) if h_hat is not None]
        for p, _, h_hat in found:
            if h_hat.shape != p.shape:
                raise ValueError(f'estimate of shape {tuple(h_hat.shape)} for a parameter of {tuple(p.shape)}')
        if may_enter(self.nonfinite, 'Hessian estimate', [h_hat for _, _, h_hat in found]):
            for p, group, h_hat in found:
                self.fold(group, self.state_of(p), h_hat.to(p.dtype))

    def state_of(self, p):
        """The state of `p`, made of zeros where there is none yet."""
        state = self.state[p]
        if not state:
            state.update({key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in self.state_keys})
        return state


class Sophia(GuardedOptimizer):
    """Algorithm 3: m ← β1·m + (1−β1)·g;  θ ← θ − lr·λ·θ;  θ ← θ − lr·clip(m / max(γ·h, ε), 1).

    h changes only in `update_hessian`, h ← β2·h + (1−β2)·ĥ, to be called every k-th iteration before `step`. Neither m
    nor h is bias-corrected.

    Args:
        params: parameters or param groups.
        lr: learning rate η, a float or a 0-d tensor.
        betas: (β1, β2).
        gamma: γ, scales h. The paper: 0.05 with Gauss-Newton-Bartlett, 0.01 with Hutchinson.
        eps: ε.
        weight_decay: λ, decoupled.
        maximize: step uphill instead.
        clipping: 'element' is Algorithm 3. For the paper's ablations 'none' leaves out the clip, and 'normalize'
            takes m divided by its root mean square over each tensor, without h.
        squared: for the ablation AH+clip: h is the EMA of ĥ², and √h takes its place in the update.
        nonfinite: 'raise', 'skip' or 'ignore', see `GuardedOptimizer`.

    State per parameter: `exp_avg` (m) and `hessian` (h), in the parameter's dtype and shape.
    """

    state_keys = ('exp_avg', 'hessian')

    def __init__(self, params, lr, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.2, *, maximize=False,
                 clipping='element', squared=False, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, gamma=gamma, eps=eps, weight_decay=weight_decay,
                                      maximize=maximize, clipping=clipping, squared=squared), nonfinite)

    def update(self, group, params, grads, states):
        """Lines 6, 11 and 12 of Algorithm 3."""
        lr, ms, hs = group['lr'], [s['exp_avg'] for s in states], [s['hessian'] for s in states]
        torch._foreach_lerp_(ms, grads, 1 - group['betas'][0])
        if group['clipping'] == 'normalize':
            rms = [norm.clamp_(min=group['eps']) / m.numel() ** 0.5 for norm, m in zip(torch._foreach_norm(ms), ms)]
            step = torch._foreach_div(ms, rms)
        else:
            denominator = torch._foreach_mul(torch._foreach_sqrt(hs) if group['squared'] else hs, group['gamma'])
            torch._foreach_clamp_min_(denominator, group['eps'])
            step = torch._foreach_div(ms, denominator)
            if group['clipping'] == 'element':
                torch._foreach_clamp_min_(step, -1.0)
                torch._foreach_clamp_max_(step, 1.0)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(step, -lr)
        torch._foreach_add_(params, step)

    def fold(self, group, state, h_hat):
        """Line 9 of Algorithm 3."""
        state['hessian'].lerp_(h_hat.square() if group['squared'] else h_hat, 1 - group['betas'][1])

    def unclipped(self):
        """Fraction of coordinates with |m / max(γ·h, ε)| < 1 in the latest update, a 0-d tensor (None before the first
        step). The paper chooses γ so that it lies between 0.1 and 0.5."""
        inside, total = [], 0
        for group in self.param_groups:
            for state in (self.state[p] for p in group['params'] if p in self.state):
                h = state['hessian'].sqrt() if group['squared'] else state['hessian']
                inside.append((state['exp_avg'].abs() < (group['gamma'] * h).clamp_(min=group['eps'])).sum())
                total += h.numel()
        return torch.stack(inside).sum() / total if inside else None


def may_enter(nonfinite, what, tensors):
    """Whether `tensors` may enter an optimizer's state: True when all their entries are finite.

    Otherwise FloatingPointError under nonfinite = 'raise', False under 'skip'. 'ignore' does not look.
    """
    tensors = [t for t in tensors if t.numel()]
    if nonfinite == 'ignore' or not tensors:
        return True
    if torch.stack([m.float() for m in torch._foreach_norm(tensors, ord=torch.inf)]).isfinite().all():
        return True
    if nonfinite == 'raise':
        raise FloatingPointError(f'a {what} is not finite; nothing of it entered the optimizer state')
    return False


class GaussNewtonBartlett:
    """Algorithm 2 over any number of micro-batches and ranks: ĥ = B·ĝ⊙ĝ, ĝ the gradient of the mean over B predictions.

    `add` the loss on sampled labels of each micro-batch, then `estimate` once. B counts the predictions of all
    micro-batches on all ranks together: squaring per micro-batch would estimate something else.
    """

    def __init__(self, params):
        self.params = list(params)
        self.gradient = [torch.zeros_like(p) for p in self.params]
        self.predictions = 0

    def add(self, loss_hat, predictions, retain_graph=False):
        """Adds the gradient of `loss_hat`, the loss on sampled labels *summed* over `predictions` predictions."""
        gradient = torch.autograd.grad(loss_hat, self.params, retain_graph=retain_graph, allow_unused=True)
        for total, g in zip(self.gradient, gradient):
            if g is not None:
                total.add_(g)
        self.predictions += predictions

    def estimate(self, loss_scale=1.0, group=None):
        """ĥ as a list of tensors, the same on every rank of `group` (default: all ranks, where there are several).

        `loss_scale` is the factor by which the added losses were multiplied (float16's loss scaling).
        """
        B = sum_over_ranks(self.gradient, self.predictions, group)
        if B == 0:
            raise ValueError('Gauss-Newton-Bartlett: no predictions were added')
        return [g.div_(loss_scale * B).square_().mul_(B) for g in self.gradient]


def gauss_newton_bartlett(outputs, params, distribution=None, group=None, retain_graph=False):
    """Algorithm 2: an estimate of the Gauss-Newton diagonal from labels that the model itself draws.

    Args:
        outputs: what the model computed with a graph, (…, V) logits of B predictions; or an iterable of such, one per
            micro-batch (a generator runs the forwards one at a time).
        params: the parameters, in the optimizer's param-group order.
        distribution: maps outputs to the `torch.distributions.Distribution` whose negative log-likelihood is the loss;
            any exponential family in its natural parameter. Default Categorical(logits=…), i.e. cross-entropy; for the
            squared loss ½(f − y)²: `lambda f: torch.distributions.Normal(f, 1.0)`.
        group: process group over which the mini-batch is spread; default all ranks.
        retain_graph: keep the graph of `outputs` for the gradient of the true loss.

    Returns:
        list of tensors ĥ = B·ĝ⊙ĝ for `Sophia.update_hessian`.
    """
    distribution = distribution or (lambda logits: torch.distributions.Categorical(logits=logits))
    estimator = GaussNewtonBartlett(params)
    for f in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
        likelihood = distribution(f)
        with torch.no_grad():
            y_hat = likelihood.sample()
        nll = -likelihood.log_prob(y_hat)
        estimator.add(nll.sum(), nll.numel(), retain_graph)
    return estimator.estimate(group=group)


class Hutchinson:
    """Algorithm 1 over any number of micro-batches and ranks: ĥ = u ⊙ ∇²L u with one u for the whole mini-batch.

    Args:
        params: the parameters, in the optimizer's param-group order.
        generator: of u, on the parameters' device. Ranks must draw the same u: seed it alike on all of them.
        rademacher: u ∈ {−1, 1} (AdaHessian's choice) instead of u ~ N(0, I).
    """

    def __init__(self, params, generator=None, rademacher=False):
        self.params = list(params)
        self.u = [torch.randn(p.shape, dtype=p.dtype, device=p.device, generator=generator) for p in self.params]
        if rademacher:
            self.u = [torch.where(u < 0, -1.0, 1.0).to(u.dtype) for u in self.u]
        self.product = [torch.zeros_like(p) for p in self.params]
        self.examples = 0

    def add(self, product, examples):
        """Adds a micro-batch: `product` = ∇²L u with L its mean loss, `examples` its size."""
        for total, hvp in zip(self.product, product):
            if hvp is not None:
                total.add_(hvp, alpha=examples)
        self.examples += examples

    def estimate(self, group=None):
        """ĥ as a list of tensors, the mean over the examples of all ranks of `group`."""
        n = sum_over_ranks(self.product, self.examples, group)
        if n == 0:
            raise ValueError('Hutchinson: no examples were added')
        return [hvp.div_(n).mul_(u) for hvp, u in zip(self.product, self.u)]


def hutchinson(losses, params, generator=None, rademacher=False, group=None):
    """Algorithm 1: an unbiased estimate of the Hessian's diagonal, of any sign.

    Args:
        losses: the mean loss of a mini-batch, a 0-d tensor with a graph that can be differentiated twice (no
            flash attention, no compiled module); or an iterable of such, one per micro-batch of equal size.
        params: the parameters, in the optimizer's param-group order.
        generator, rademacher: see `Hutchinson`. Over several ranks the generator is required.
        group: process group over which the mini-batch is spread; default all ranks.

    Returns:
        list of tensors ĥ = u ⊙ ∇⟨∇L, u⟩ for `Sophia.update_hessian`.
    """
    if generator is None and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        raise ValueError('hutchinson: several ranks need the same u; pass a generator seeded alike on all of them')
    estimator = Hutchinson(params, generator, rademacher)
    for loss in [losses] if isinstance(losses, torch.Tensor) else losses:
        gradient = torch.autograd.grad(loss, estimator.params, create_graph=True, allow_unused=True)
        used = [(g, u) for g, u in zip(gradient, estimator.u) if g is not None and g.requires_grad]
        if not used:
            raise RuntimeError('hutchinson: the gradient has no graph of its own; the loss must come from an eager, '
                               'twice differentiable forward (use hessian_vector_product under torch.compile)')
        product = torch.autograd.grad([g for g, _ in used], estimator.params, [u for _, u in used], allow_unused=True)
        estimator.add(product, 1)
    return estimator.estimate(group)


def hessian_vector_product(loss_fn, params, u):
    """∇²L u by forward-over-reverse differentiation, which torch.compile can trace where double backward cannot.

    Args:
        loss_fn: maps a tuple of tensors like `params` to the 0-d mean loss (`torch.func.functional_call` on a module).
            Its attention must go through the math path: `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
        params, u: sequences of tensors of equal shapes.

    Returns:
        tuple of tensors like `params`.
    """
    return torch.func.jvp(torch.func.grad(loss_fn), (tuple(params),), (tuple(u),))[1]


def sum_over_ranks(tensors, count, group=None):
    """Adds up `tensors` (in place) and the number `count` over the ranks of `group`; returns the summed count."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return count
    counts = torch.tensor([count], dtype=torch.float64, device=tensors[0].device)
    for work in [dist.all_reduce(t, group=group, async_op=True) for t in [*tensors, counts]]:
        work.wait()
    return int(counts.item())
