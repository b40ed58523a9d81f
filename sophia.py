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
# Algorithm 3: the update rule


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


# ----------------------------------------------------------------------------------------------------------------------
# Base classes: closures, guards, the state


class GuardedOptimizer(Optimizer):
    """Base class that checks settings and gradients before anything moves. A subclass defines `update(group, params,
    grads)`, which moves `params`, of the param group `group`, and their state.

    nonfinite: 'raise' FloatingPointError when a gradient holds inf or NaN, 'skip' that step, or 'ignore' it (no check,
    so no wait for the device).
    """
    keys = ('exp_avg',)  # of a parameter's state

    def __init__(self, params, defaults, nonfinite):
        if nonfinite not in ('raise', 'skip', 'ignore'):
            raise ValueError(f'{type(self).__name__}: nonfinite = {nonfinite!r}; choose raise, skip or ignore')
        super().__init__(params, defaults)
        self.nonfinite = nonfinite

    def add_param_group(self, param_group):
        """Add a group of parameters; ValueError if a setting is not suitable."""
        for key, value in {**self.defaults, **param_group}.items():
            if key in IN_RANGE and not IN_RANGE[key](value):
                raise ValueError(f'{type(self).__name__}: {key} = {value!r} is out of range')
        super().add_param_group(param_group)
        if any(p.dtype == torch.bfloat16 and p.requires_grad for p in self.param_groups[-1]['params']):
            warnings.warn('bfloat16 parameters drop updates below 1/256 of a value, which most of the weight decay is; '
                          'keep them in float32, and compute in bfloat16 by autocast', stacklevel=5)

    def __getstate__(self):
        # Optimizer's copies carry over only the attributes that it names.
        mine = {key: value for key, value in self.__dict__.items() if key in ('nonfinite', 'compile')}
        return super().__getstate__() | mine

    def __setstate__(self, state):
        """Take a state, in load_state_dict or for a copy; ValueError if it is of another optimizer."""
        mine = getattr(self, 'defaults', None)  # a copy has none yet
        for group in state['param_groups']:
            odd = [key for key in IN_RANGE if mine and (key in mine) != (key in group)]
            if any(self.keys[-1] not in state['state'][p] for p in group['params'] if state['state'].get(p)):
                odd.append(self.keys[-1])  # which AdaHessian has and AdamW has not
            if odd:
                raise ValueError(f'{type(self).__name__}: the state to load is of another optimizer; they differ in '
                                 + ', '.join(odd))
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient, and return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group['params'] if p.grad is not None]) for group in self.param_groups]
        if check_finite(self.nonfinite, 'gradient', [p.grad for _, params in groups for p in params]):
            for group, params in groups:
                if params:
                    self.update(group, params, [p.grad for p in params])
        return loss

    def buffers(self, params, key):
        """Return the state `key` of each of `params`, zeros where there is none yet. A subclass may set others before.
        """
        for p in params:
            for name in self.keys:  # all at once, because torch.distributed.checkpoint loads only complete states
                if name not in self.state[p]:
                    if p.dtype == torch.float16:  # in which ε is 0
                        raise ValueError(f'{type(self).__name__}: float16 parameters are not supported; keep them in '
                                         'float32, and compute in float16 by autocast')
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][key] for p in params]


class HessianOptimizer(GuardedOptimizer):
    """Base class with an EMA of Hessian estimates, or of a function of them, `averaged`, in the state `hessian`."""
    keys = ('exp_avg', 'hessian')

    def averaged(self, h_hat):
        """Return the quantity that the EMA averages: the estimate ĥ itself."""
        return h_hat

    @torch.no_grad()
    def update_hessian(self, estimates):
        """Update the EMA, h ← β2·h + (1−β2)·ĥ (line 9 of Algorithm 3).

        estimates: an iterable of tensors, one per parameter in param-group order; None leaves that h as it is. An inf
        or NaN is treated as in a gradient; 'skip' leaves out all of them.
        """
        params, estimates = params_of(self), list(estimates)
        if len(estimates) != len(params):
            raise ValueError(f'update_hessian got {len(estimates)} estimates for {len(params)} parameters')
        given = {p: h_hat for p, h_hat in zip(params, estimates) if h_hat is not None}
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
        """Move the EMAs of `params`, which belong to the param group `group`, towards `targets`."""
        torch._foreach_lerp_(local(self.buffers(params, 'hessian')), local(targets), 1 - group['betas'][1])


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 3: the optimizer


class Sophia(HessianOptimizer):
    """Algorithm 3: m ← β1·m + (1−β1)·g;  θ ← θ − lr·λ·θ;  θ ← θ − lr·clip(m / max(γ·h, ε), 1).

    h changes only in `update_hessian`, h ← β2·h + (1−β2)·ĥ, to be called every k-th iteration before `step`. Neither m
    nor h is bias-corrected. A `step` before the first estimate is sign momentum, and warns.

    Args:
        params: parameters or param groups, in float32 or float64. bfloat16 warns; float16, where ε is 0, is rejected.
        lr: learning rate η, a float or a 0-d tensor.
        betas, eps, weight_decay: (β1, β2), ε, and λ, which is decoupled.
        gamma: γ, scales h. The paper: 0.05 with Gauss-Newton-Bartlett, 0.01 with Hutchinson.
        nonfinite: 'raise', 'skip' or 'ignore', see `GuardedOptimizer`.
        compile: fuse the update to one pass over memory by torch.compile. Each new β1 or γ compiles it again, so that
            OneCycleLR needs cycle_momentum=False.

    State per parameter: `exp_avg` (m) and `hessian` (h), in the parameter's dtype and shape.
    """
    rule = staticmethod(sophia_update)  # a variant of the update is another function of these arguments
    rho = 1.0  # where the update is clipped; the official code's rho is γ
    _first = True  # whether no step has moved anything yet

    def __init__(self, params, lr, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.2, *, nonfinite='raise',
                 compile=False):
        super().__init__(params, dict(lr=lr, betas=betas, gamma=gamma, eps=eps, weight_decay=weight_decay), nonfinite)
        self.compile = compile

    def update(self, group, params, grads):
        lr = group['lr']
        ms, hs = self.buffers(params, 'exp_avg'), self.buffers(params, 'hessian')
        if self._first and lr:  # warm-ups of other libraries begin at 0
            self._first = False
            # The state decides, because wrappers of an optimizer share nothing else with it.
            if not any(h.any() for h in local(state['hessian'] for state in self.state.values() if 'hessian' in state)):
                warnings.warn('Sophia.step() while h is 0 everywhere is sign momentum: there was no update_hessian() '
                              'yet, or its estimates were 0', stacklevel=5)
        if self.compile and not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, device=params[0].device)  # a number would be compiled in
        rule = compiled(self.rule) if self.compile else self.rule
        rule(local(params), local(grads), local(ms), self.curvature(local(hs)), lr, group['betas'][0], group['gamma'],
             group['eps'], group['weight_decay'], self.rho)

    def curvature(self, hs):
        """Return the h of the update, given the state `hessian`."""
        return hs

    def metrics(self):
        """Return a dict of 0-d tensors for a log: `update_unclipped`, the `unclipped_fraction`, if there is one, the
        rule is Algorithm 3's, and m in the dtype of its parameter, not a code of it."""
        plain = all(state['exp_avg'].dtype == p.dtype for p, state in self.state.items() if 'exp_avg' in state)
        unclipped = self.unclipped_fraction() if plain and self.rule is sophia_update else None
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
                counts.append((clipped == update).sum())
                ms.append(state['exp_avg'])
        if not counts:
            return None
        counts = torch.stack([count.to(counts[0].device) for count in counts])  # layers may be on several devices
        total = counts.new_full((), sum(m.numel() for m in local(ms)))  # filled on the device, without a wait
        unclipped, total = add_shards(torch.stack([counts.sum(), total]), ms)
        return unclipped / total


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
        max_norm: clip ĝ at this norm before it is squared, see `clip_estimate`; not in the paper.

    Returns the list of tensors ĥ = B·ĝ⊙ĝ for `Sophia.update_hessian`.
    """
    estimator, classes = GaussNewtonBartlett(optimizer, by_parts, max_norm), set()
    check_seeds(estimator.params[0].device, group)
    if isinstance(outputs, tuple) and (distribution or hasattr(outputs, '_fields')):
        raise TypeError('gauss_newton_bartlett: a tuple may be the outputs of one forward or of several; pass '
                        '[outputs] or list(outputs)')
    for f in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
        if distribution is None:
            check_logits(f, classes)
        if isinstance(f, torch.Tensor):  # in float16 labels of probability 0 are drawn, and sums overflow
            f = f.to(torch.promote_types(f.dtype, torch.float32))
        likelihood = (distribution or categorical)(f)
        with torch.no_grad():
            labels = likelihood.sample().clone()  # line 4: ŷ ~ softmax(f); a copy, which no distribution has cached
        nll = -likelihood.log_prob(labels)
        estimator.add(nll.sum(), nll.numel(), retain_graph)  # line 5: ĝ
    return estimator.estimate(group=group)  # line 6: B·ĝ⊙ĝ


def categorical(logits):
    """Return Categorical(logits=…), of no predictions, too, which PyTorch's check of arguments rejects."""
    return torch.distributions.Categorical(logits=logits, validate_args=None if logits.numel() else False)


def check_logits(f, classes):
    """Raise unless `f` are logits of one more micro-batch; `classes` is the set of the numbers of classes so far."""
    shape = tuple(getattr(f, 'shape', ()))  # of Hugging Face's outputs f is a key
    if len(shape) < 2 or shape[-1] < 2 or classes - {shape[-1]}:
        raise ValueError(f'gauss_newton_bartlett: outputs of shape {shape} are not logits (B, …, V) of as many classes '
                         'V > 1 as others; pass output.logits, or of a tuple only the logits, and for another loss '
                         'than cross-entropy its distribution, such as Bernoulli or Normal')
    if not classes:
        rows = f.detach().flatten(0, -2)[:16].float()
        if len(rows) and ((rows >= 0).all() & ((rows.sum(-1) - 1).abs() < 0.01).all()):
            warnings.warn('gauss_newton_bartlett: the outputs sum to 1, like probabilities; pass the logits, without '
                          'softmax', stacklevel=3)
    classes.add(shape[-1])


class GaussNewtonBartlett:
    """Algorithm 2 over micro-batches and ranks: `add` the loss on sampled labels of each micro-batch, then `estimate`.

    ĥ = G⊙G / B, where G is the gradient of the loss summed over all B predictions; this is the paper's B·ĝ⊙ĝ. Each
    coordinate of G is close to normal, so ĥ is noisy whatever B is: its standard deviation is √2 of its mean.

    by_parts: ĥ = Σₚ Gₚ⊙Gₚ / B, where Gₚ belongs to part p, one `add` on one rank. Labels are drawn independently, so
    products of different parts are 0 in expectation: the mean is the same, and n equal parts have 1/n of the variance.
    With sharded parameters a part is one `add` on all ranks, because FSDP's backward sums over them.
    """

    def __init__(self, optimizer, by_parts=False, max_norm=None):
        self.params, self.by_parts, self.max_norm = params_of(optimizer), by_parts, max_norm
        self.total, self.predictions = [None] * len(self.params), 0  # G, or Σₚ Gₚ⊙Gₚ; B

    def add(self, loss_hat, predictions, retain_graph=False):
        """Add the gradient of `loss_hat`, the loss on sampled labels *summed* over `predictions` predictions, a number
        or a 0-d tensor."""
        for i, g in enumerate(loss_gradients(loss_hat, self.params, retain_graph)):
            if g is not None:
                if self.total[i] is None:
                    self.total[i] = torch.zeros_like(self.params[i])
                total, g = local([self.total[i], g])
                total.addcmul_(g, g) if self.by_parts else total.add_(g)
        self.predictions += predictions

    def estimate(self, loss_scale=1.0, group=None):
        """Return ĥ as a list of tensors, None for frozen parameters, the same on every rank of `group`; NaN when no
        predictions were added. What is added next belongs to another estimate.

        `loss_scale` is the factor by which the added losses were multiplied (float16's loss scaling).
        """
        found = [torch.zeros_like(p) if total is None and p.requires_grad else total
                 for total, p in zip(self.total, self.params)]
        B = sum_over_ranks(found, float(self.predictions), group)
        self.total, self.predictions = [None] * len(self.params), 0
        for total in found:
            if total is not None:
                total.div_(loss_scale ** 2 * B) if self.by_parts else total.div_(loss_scale * B ** 0.5).square_()
        if self.max_norm is not None:
            clip_estimate(found, B, self.max_norm)
        return found


def clip_estimate(estimates, predictions, max_norm):
    """Scale an estimate ĥ = B·ĝ⊙ĝ, in place, as if ĝ had been clipped at `max_norm` before it was squared.

    Its coordinates sum to B·‖ĝ‖², in expectation also by parts. The paper does not clip ĝ; where the gradient is
    clipped, this keeps h from running away, at the price of a bias. `predictions`: B.
    """
    given = [h_hat for h_hat in estimates if h_hat is not None]
    sums = [h_hat.sum() for h_hat in given]
    sums = [total.full_tensor() if is_dtensor(total) else total for total in sums]
    factor = predictions * max_norm ** 2 / torch.stack([total.to(sums[0].device) for total in sums]).sum()
    for h_hat in local(given):
        h_hat.mul_(factor.clamp(max=1).to(h_hat.device))


# ----------------------------------------------------------------------------------------------------------------------
# Algorithm 1


def hutchinson(losses, optimizer, generator=None, rademacher=False, group=None):
    """Estimate the Hessian's diagonal without bias, of any sign (Algorithm 1).

    Args:
        losses: the mean loss of a mini-batch, a 0-d tensor with a graph that can be differentiated twice (no compiled
            module, attention under sdpa_kernel(SDPBackend.MATH)); or an iterable, one for each micro-batch, which have
            equal sizes. A torch.autograd.Function whose backward autograd cannot follow counts as linear, which is an
            error only where a parameter's whole gradient has no graph.
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
            if total is not None and hvp is not None:  # of those trained at the start, and now
                total.add_(hvp, alpha=examples)
        self.examples += examples

    def estimate(self, group=None):
        """Return ĥ as a list of tensors, None for frozen parameters, the mean over the examples of `group`."""
        product, self.product = self.product, None
        n = sum_over_ranks(product, self.examples, group)
        return [hvp if hvp is None else hvp.div_(n).mul_(u) for hvp, u in zip(product, self.u)]


def double_backward(loss, params, u):
    """Return ∇²L u = ∇⟨∇L, u⟩ of a mean loss with a graph, None where it does not depend on a parameter."""
    check_graph(loss, TWICE)
    gradient = gradients(loss, params, create_graph=True)
    used = [(g, v) for g, v in zip(gradient, u) if g is not None and v is not None]
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
# Helpers and guards

IN_RANGE = dict(lr=lambda v: v >= 0, betas=lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v),
                momentum=lambda v: 0 <= v < 1, gamma=lambda v: v >= 0, eps=lambda v: v > 0,
                weight_decay=lambda v: v >= 0)


def params_of(optimizer):
    """Return the parameters of an optimizer in param-group order, as a list; a list of parameters stays the same."""
    groups = getattr(optimizer, 'param_groups', None)  # wrappers have them, too
    params = [p for group in groups for p in group['params']] if groups else list(optimizer)
    if not any(p.requires_grad for p in params):
        raise ValueError('no trained parameters: all are frozen, or a generator such as model.parameters() was used '
                         'before; pass the optimizer')
    return params


def gradients(outputs, params, **options):
    """Call torch.autograd.grad, with None for a parameter that is frozen or that `outputs` do not depend on."""
    found = iter(torch.autograd.grad(outputs, [p for p in params if p.requires_grad], allow_unused=True, **options))
    return [next(found) if p.requires_grad else None for p in params]


def check_finite(nonfinite, what, tensors):
    """Return whether `tensors` may enter an optimizer's state: True when all their entries are finite.

    Otherwise FloatingPointError under nonfinite = 'raise', False under 'skip'. 'ignore' does not look.
    """
    tensors = [t for t in tensors if t.numel()]
    if nonfinite == 'ignore' or not tensors:
        return True
    shards = [t for t in local(tensors) if t.numel()]
    largest = torch._foreach_norm(shards, ord=torch.inf) if shards else [torch.zeros((), device=tensors[0].device)]
    bad = torch.stack([~m.isfinite().to(largest[0].device) for m in largest]).sum()
    if not add_shards(bad, tensors):
        return True
    if nonfinite == 'raise':
        raise FloatingPointError(f'a {what} is not finite; nothing of it entered the optimizer state')
    return False


# Part of the name of an autograd node → why its derivative is wrong: the first one, and the second one as well.
ONCE = {'CheckpointFunctionBackward': 'the outputs were made under checkpoint(…, use_reentrant=True), which hides its '
                                      'parameters; set use_reentrant=False'}
TWICE = ONCE | {
    'WeightNormInterface': 'the second derivative of weight_norm is wrong in PyTorch; use gauss_newton_bartlett, or '
                           'compute g * v / v.norm(…) yourself',
    'linear_cross_entropy': 'F.linear_cross_entropy with options has no second derivative; leave out options'}


def check_graph(loss, forbidden):
    """Raise RuntimeError where the graph of `loss` has a node with a wrong derivative, one of `forbidden`."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            for word, problem in forbidden.items():
                if word in node.name():
                    raise RuntimeError(problem)
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]


# ----------------------------------------------------------------------------------------------------------------------
# Shards: parameters that are DTensors, and mini-batches spread over ranks. Rules act on each rank's shards.


def loss_gradients(loss, params, retain_graph):
    """Return d loss / d params, None where there is none, summed over the ranks that share a sharded parameter."""
    if any(map(is_dtensor, params)):
        found = fsdp_gradients(loss, params, retain_graph)
    else:
        check_graph(loss, ONCE)
        found = gradients(loss, params, retain_graph=retain_graph)
    if all(g is None for g in found):
        raise RuntimeError('the outputs depend on none of the params: another model, FSDP1 (use fully_shard), or '
                           'set_requires_gradient_sync(False)?')
    return found


def fsdp_gradients(loss, params, retain_graph):
    """Return the gradients of `loss_gradients` by FSDP's own backward, which alone turns gradients into shards. It
    leaves in .grad the mean over the ranks that share a parameter, so the loss is multiplied by their number."""
    for *outer, inner in [p.placements for p in params if is_dtensor(p)]:
        if not (inner.is_shard() and all(placement.is_replicate() for placement in outer)):
            raise ValueError(f'gauss_newton_bartlett: placements {*outer, inner}; tensor parallelism is not supported')
    sizes = [p.device_mesh.size() if is_dtensor(p) else 1 for p in params]  # of those that FSDP ignores 1
    before = [(p.grad, p._post_accumulate_grad_hooks) for p in params]
    for p in params:
        p.grad = p._post_accumulate_grad_hooks = None  # such hooks step optimizers
    try:
        (loss * max(sizes)).backward(retain_graph=retain_graph)
        found = [p.grad for p in params]
    finally:
        for p, (grad, hooks) in zip(params, before):
            p.grad, p._post_accumulate_grad_hooks = grad, hooks
    if any(g is None for p, g in zip(params, found) if p.requires_grad and not is_dtensor(p)):
        raise RuntimeError('gauss_newton_bartlett: an unsharded parameter has no gradient; list the parameters before '
                           'the forward, in which FSDP replaces them, or pass the optimizer')
    return [g if g is None or size == max(sizes) else g * (size / max(sizes)) for g, size in zip(found, sizes)]


def is_dtensor(tensor):
    return hasattr(tensor, 'placements')  # to import the class costs half a second


def local(tensors):
    return [t.to_local() if is_dtensor(t) else t for t in tensors]


def meshes_of(tensors):
    """Return the DeviceMeshes over which `tensors` are sharded, none of them twice."""
    return list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))


def add_shards(count, tensors):
    """Sum `count`, of the `local` shards of `tensors`, over their ranks, in place; with several meshes a multiple."""
    for mesh in meshes_of(tensors):
        for group in mesh.get_all_groups():
            dist.all_reduce(count, group=group)
    return count


def ranks(group=None):
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def gather(numbers, device, group):
    """Return the numbers, below 2**53, of each rank of `group`, as a list of lists."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(ranks(group))]
    dist.all_gather(found, own, group=group)
    return torch.stack(found).tolist()


def check_seeds(device, group=None):
    """Raise ValueError when ranks of `group` would draw the same labels, which makes ĥ too large in expectation."""
    if ranks(group) > 1:
        # torch.initial_seed() is the CPU's; an accelerator has a generator of its own.
        initial_seed = getattr(torch.get_device_module(device), 'initial_seed', torch.initial_seed)
        seeds = gather([initial_seed() % 2 ** 53], device, group)
        if len(set(map(tuple, seeds))) < len(seeds):
            raise ValueError('gauss_newton_bartlett: ranks with the same random seed would draw the same labels; '
                             'call torch.manual_seed(seed + rank) once the model is made')


def sum_over_ranks(tensors, count, group=None):
    """Add up `tensors` (in place) and the number `count` over the ranks of `group`, and return the summed count.

    DTensors stay as they are, because FSDP's backward has summed them. ValueError where ranks have other tensors.
    """
    if ranks(group) < 2:
        return count
    tensors = [t for t in tensors if t is not None]  # of frozen parameters
    shapes = hash(tuple(t.shape for t in tensors)) % 2 ** 53
    counts, shapes = zip(*gather([count, shapes], tensors[0].device, group))
    if len(set(shapes)) > 1:
        raise ValueError('ranks passed different parameters; pass the whole ZeroRedundancyOptimizer, not its .optim')
    for work in [dist.all_reduce(t, group=group, async_op=True) for t in tensors if not is_dtensor(t)]:
        work.wait()
    return sum(counts)
