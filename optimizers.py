"""The optimizers a run can choose from: the baselines Lion and AdaHessian, the table of every optimizer's settings and
peak learning rates, `build_optimizer`, and the Hessian hook that train.py calls.
"""

import contextlib

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from runtime.distributed import full_tensor
from runtime.rng import LABELS, VECTORS, keyed_bits, keyed_uniforms
from sophia import (
    GaussNewtonBartlett,
    GuardedOptimizer,
    HessianOptimizer,
    Hutchinson,
    Sophia,
    clipped,
    in_parts,
    local,
)

# ----------------------------------------------------------------------------------------------------------------------
# The table: section "Hyperparamter Tuning" of the paper for what it trains, "left to us" noted where it is silent.

SOPHIA = dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, hessian_interval=10)
SOPHIA_G = dict(SOPHIA, gamma=0.05, hessian_batch_size=240)
SOPHIA_H = dict(SOPHIA, gamma=0.01, hessian_batch_size=32)

# hessian_interval 0: no Hessian. hessian_batch_size stands for a mini-batch of 480 sequences.
SETTINGS = {
    'adamw': dict(beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8),
    'lion': dict(beta1=0.95, beta2=0.98, weight_decay=0.2),
    # Weight decay, ε and the whole mini-batch for the estimate are left to us. The decay per step is rate × λ, and the
    # rate is hundreds of times AdamW's.
    'adahessian': dict(beta1=0.92, beta2=0.99, weight_decay=1e-3, eps=1e-8, hessian_interval=1, hessian_batch_size=480),
    'sophiag': SOPHIA_G,
    'sophiah': SOPHIA_H,
    # Ablations. Empirical Fisher and AH+clip: k = 10, γ "found by grid search" but not stated, so Sophia's own here.
    'ef_clip': SOPHIA_G,
    'ah_clip': SOPHIA_H,
    # Clip and Normalize have no preconditioner; β1 is left to us. ε only bounds Normalize's denominator.
    'clip': dict(beta1=0.96, weight_decay=0.2),
    'normalize': dict(beta1=0.96, weight_decay=0.2, eps=1e-12),
    # k = 2 is the paper's; without the clip ε has to bound the step where h is tiny, its value is left to us.
    'gnb_noclip': dict(SOPHIA_G, hessian_interval=2, eps=1e-4),
}
UNUSED = dict(beta1=0.0, beta2=0.0, weight_decay=0.0, eps=0.0, gamma=0.0, hessian_interval=0, hessian_batch_size=0)

# Table 3: peak learning rates by model size. The row 'tiny' is ours (README, "The quickstart's settings").
PEAK_LR = {
    'tiny': dict(adamw=1.2e-2, lion=1e-3, sophiah=2e-3, sophiag=2e-3),
    '30M': dict(adamw=1.2e-3, lion=4e-4, sophiah=1e-3, sophiag=1e-3),
    '125M': dict(adamw=6e-4, lion=1.5e-4, sophiah=6e-4, sophiag=6e-4),
    '355M': dict(adamw=3e-4, lion=6e-5, sophiah=4e-4, sophiag=4e-4),
    '540M': dict(adamw=3e-4, sophiah=4e-4, sophiag=4e-4),
    '770M': dict(adamw=2e-4, sophiah=3e-4, sophiag=3e-4),
    '1.5B': dict(adamw=1.5e-4, sophiag=1.2e-4),
    '6.6B': dict(adamw=1.2e-4, sophiag=6e-5),
}
# AdaHessian's step is a fraction of a Newton step, not one of a size that the rate fixes: one rate for all models. The
# paper does not state it; ours is the best of 0.1, 0.3 and 1 with the model 'tiny'.
ADAHESSIAN_LR = 0.3
# Where the paper states no rate ("found by grid search"), the rate of the optimizer it is closest to.
RATE_OF = {'ef_clip': 'sophiag', 'gnb_noclip': 'sophiag', 'ah_clip': 'sophiah', 'clip': 'lion', 'normalize': 'lion'}


def settings(optimizer_name, total_batch_size):
    """The settings of an optimizer, a dict key → value for train.py; SystemExit when there is no such optimizer.

    hessian_batch_size keeps its share of the mini-batch; Hutchinson's 32 sequences stay 32 where that fits.
    """
    if optimizer_name not in SETTINGS:
        raise SystemExit(f'optimizer_name = {optimizer_name!r}: no such optimizer; choose from {", ".join(SETTINGS)}')
    table = dict(UNUSED, **SETTINGS[optimizer_name])
    if table['hessian_batch_size'] and HOOKS[optimizer_name] is not HutchinsonHook:
        table['hessian_batch_size'] = max(1, table['hessian_batch_size'] * total_batch_size // 480)
    table['hessian_batch_size'] = min(table['hessian_batch_size'], total_batch_size)
    return table


def peak_learning_rate(optimizer_name, model_size):
    """(rate, where it stands) from Table 3, or (None, why not) where the paper has none."""
    if optimizer_name == 'adahessian':
        return ADAHESSIAN_LR, 'our table: adahessian'
    column = RATE_OF.get(optimizer_name, optimizer_name)
    rate = PEAK_LR.get(model_size, {}).get(column)
    if rate is None:
        return None, f'Table 3 has no learning rate for {column} at {model_size}'
    table = 'our table' if model_size == 'tiny' else 'Table 3'
    return rate, f'{table}: {column}, {model_size}'


def scales_attention(optimizer_name, n_layer):
    """Whether the paper divides attention logits by the layer index: for AdamW and Lion from 355M (24 layers) up."""
    return optimizer_name in ('adamw', 'lion') and n_layer >= 24


def differentiates_twice(optimizer_name):
    """Whether its Hessian estimate is made of Hessian-vector products."""
    return issubclass(HOOKS.get(optimizer_name, NoHessian), HutchinsonHook)


def check_settings(config):
    """SystemExit with one line where a setting of train.py's `config` does not go with the optimizer: ε and those of
    the Hessian must be above 0 where it has them, and what differentiates twice needs the plain model."""
    values = config.values
    name = values['optimizer_name']
    for key in ('eps', 'gamma', 'hessian_interval', 'hessian_batch_size'):
        config.require(key, not SETTINGS[name].get(key) or values[key] > 0, f'above 0 for {name}')
    if differentiates_twice(name):
        for key, only in dict(parallel='ddp', activation_checkpointing=False).items():
            config.require(key, values[key] == only, f'{only} for {name}, which differentiates gradients')


def build_optimizer(name, params, *, lr, beta1=None, beta2=None, weight_decay=None, eps=None, gamma=None,
                    compile=False):
    """The optimizer called `name` in the table, on `params` (parameters or param groups).

    Settings that are None are the table's; `compile` fuses Sophia's update by torch.compile. Gradients are taken as
    finite: train.py has looked before it steps.
    """
    if name not in SETTINGS:
        raise ValueError(f'no optimizer {name!r}; choose from {", ".join(SETTINGS)}')
    given = dict(beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, gamma=gamma)
    given = {**UNUSED, **SETTINGS[name], **{key: value for key, value in given.items() if value is not None}}
    betas, eps = (given['beta1'], given['beta2']), given['eps']
    common = dict(lr=lr, betas=betas, weight_decay=given['weight_decay'])
    if name == 'adamw':
        return AdamW(params, eps=eps, fused=True, **common)
    if name == 'adahessian':
        return AdaHessian(params, eps=eps, nonfinite='ignore', **common)
    if name == 'lion':
        return Lion(params, nonfinite='ignore', **common)
    if name == 'clip':
        # Sign momentum: every step of Sophia with h = 0, or Lion with a single β.
        return Lion(params, nonfinite='ignore', **dict(common, betas=(betas[0], betas[0])))
    variant = {'ah_clip': dict(squared=True), 'normalize': dict(clipping='normalize'),
               'gnb_noclip': dict(clipping='none')}.get(name, {})
    return Sophia(params, eps=eps, gamma=given['gamma'], nonfinite='ignore', compile=compile, **common, **variant)


def total_norm(tensors, size=4096):
    """ℓ2 norm of all entries of `tensors` together, a 0-d tensor (a DTensor of sharded ones).

    On CPU PyTorch adds up the squares of a tensor in a few float32 sums: of 19M entries the norm comes out 0.1 % too
    small, of equal ones 1 %. By rows of `size` entries it is right, and takes less time.
    """
    if any(isinstance(t, DTensor) or t.device.type != 'cpu' for t in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    norms = []
    for t in tensors:
        t = t.reshape(-1)
        rows, rest = t.split([t.numel() - t.numel() % size, t.numel() % size])
        norms += [torch.linalg.vector_norm(rows.view(-1, size), dim=1), torch.linalg.vector_norm(rest)[None]]
    return torch.linalg.vector_norm(torch.cat(norms))


def param_norm(params):
    """ℓ2 norm of all entries of the parameters, a 0-d tensor, of sharded ones too."""
    return full_tensor(total_norm([p.detach() for p in params]))


def clip_gradients(optimizer, params, max_norm):
    """Clips the gradients of `params` at the norm `max_norm` (0: no clipping), or has the optimizer's next update do so
    without rewriting them. Returns their norm before that, a 0-d tensor."""
    norm = total_norm([p.grad for p in params])
    total = full_tensor(norm)
    if max_norm and isinstance(optimizer, GuardedOptimizer):
        optimizer.clip_coef = (max_norm / (total + 1e-6)).clamp(max=1)
    elif max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Baselines


class Lion(GuardedOptimizer):
    """Lion (Chen et al., 2023): θ ← θ − lr·λ·θ;  θ ← θ − lr·sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g.

    Arguments as for `Sophia`. State per parameter: `exp_avg` (m).
    """

    def __init__(self, params, lr, betas=(0.95, 0.98), weight_decay=0.2, *, maximize=False, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize), nonfinite)

    def update(self, group, params, grads):
        lr, (beta1, beta2) = group['lr'], group['betas']
        lists = local(params), local(grads), local(self.buffers(params, 'exp_avg'))
        for params, grads, ms in in_parts(*lists):
            grads = clipped(grads, self.clip_coef)
            step = torch._foreach_lerp(ms, grads, 1 - beta1)
            torch._foreach_sign_(step)
            torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
            torch._foreach_mul_(step, -lr)
            torch._foreach_add_(params, step)
            torch._foreach_lerp_(ms, grads, 1 - beta2)


class AdaHessian(HessianOptimizer):
    """AdaHessian (Yao et al., 2021) as the paper compares with it: Adam with the Hessian's diagonal for the gradient in
    the second moment, θ ← θ − lr·m̂ / (√v̂ + ε), v the EMA of ĥ², both bias-corrected, decoupled decay, no clipping.

    ĥ comes through `update_hessian`, as for `Sophia`; there is no averaging over blocks of coordinates. Arguments as
    for `Sophia`. State per parameter: `exp_avg` (m), `hessian` (v), and how often each was updated: `step`,
    `hessian_step` (int).
    """

    def __init__(self, params, lr, betas=(0.92, 0.99), eps=1e-8, weight_decay=1e-3, *, maximize=False,
                 nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize,
                                      squared=True), nonfinite)

    def update(self, group, params, grads):
        lr, (beta1, beta2) = group['lr'], group['betas']
        ms, vs = self.buffers(params, 'exp_avg'), self.buffers(params, 'hessian')
        torch._foreach_lerp_(ms, clipped(grads, self.clip_coef), 1 - beta1)
        for p, m, v in zip(params, ms, vs):
            state = self.state[p]
            state['step'] = state.get('step', 0) + 1
            # Before the first estimate v is 0 and has no bias to correct.
            correction = 1 - beta2 ** state.get('hessian_step', 0) or 1.0
            denominator = (v / correction).sqrt_().add_(group['eps'])
            p.mul_(1 - lr * group['weight_decay'])
            p.sub_(m / denominator * (lr / (1 - beta1 ** state['step'])))

    def fold(self, group, params, xs):
        super().fold(group, params, xs)
        for p in params:
            self.state[p]['hessian_step'] = self.state[p].get('hessian_step', 0) + 1


# ----------------------------------------------------------------------------------------------------------------------
# The Hessian hook


class NoHessian:
    """The hook of first-order optimizers: the forward of a micro-batch, and nothing else.

    In each iteration train.py calls `start`; for each micro-batch `loss` and, after leaving autocast, `backward`;
    then `finish`, before the update.
    """

    def start(self, iter_num):
        """Begins iteration `iter_num`; True when it estimates the Hessian."""
        return False

    def loss(self, model, X, Y):
        """The mean loss of a micro-batch, X and Y (B, T) int64."""
        return model(X, Y, return_logits=False)[1]

    def backward(self, loss_scale=1.0):
        """What the estimate needs of the forward just made; leaves the graph for the gradient of the loss."""

    def finish(self, optimizer, loss_scale=1.0):
        """Hands the estimate to the optimizer; FloatingPointError if it is not finite, nothing of it taken."""


class HessianHook(NoHessian):
    """Estimates at iterations 0, k, 2k, … on the first `batch_size` sequences of that iteration's own mini-batch.

    Args:
        model: the plain GPT, neither compiled nor wrapped.
        params: its parameters in the optimizer's order.
        seed, interval (k), batch_size (sequences over all ranks, a multiple of world_size).
        rank, world_size: which share of the mini-batch passes through `loss` here ([rank::world_size]).
        accumulation_steps: in how many micro-batches.
        autocast: context manager for a forward outside train.py's own.
        compile: whether to compile what the estimator runs by itself.
    """

    def __init__(self, model, params, *, seed, interval, batch_size, rank, world_size, accumulation_steps=1, autocast,
                 compile):
        self.model, self.params, self.seed = model, params, seed
        self.interval, self.batch_size, self.rank, self.world_size = interval, batch_size, rank, world_size
        self.accumulation_steps, self.autocast, self.compile = accumulation_steps, autocast, compile
        self.rows_left = 0

    def start(self, iter_num):
        self.iter_num = iter_num
        self.due = iter_num % self.interval == 0
        self.rows_left = self.batch_size // self.world_size if self.due else 0
        self.rows_taken = 0
        return self.due

    def take_rows(self, X):
        """How many of the micro-batch's first rows belong to the estimate; counts them as taken."""
        n = min(self.rows_left, X.size(0))
        self.rows_left -= n
        self.rows_taken += n
        return n


class GaussNewton(HessianHook):
    """Gauss-Newton-Bartlett (Algorithm 2), sharing its forward with the gradient: one forward, two backwards."""

    def start(self, iter_num):
        self.loss_hat = self.uniforms = self.estimator = None  # also of an iteration that was passed over
        if super().start(iter_num):
            self.estimator = GaussNewtonBartlett(self.params)
        return self.due

    def loss(self, model, X, Y):
        taken_before, n = self.rows_taken, self.take_rows(X) if self.due else 0
        if n == 0:
            return super().loss(model, X, Y)
        labels = self.labels(Y, taken_before, n)
        _, loss, self.loss_hat = model(X, Y, labels, return_logits=False)
        self.predictions = n * Y.size(1)
        if taken_before == 0:
            # The weight of a label in the gradient of the loss, for whose size float16's loss scale has room.
            self.share = 1 / (self.accumulation_steps * Y.numel())
        return loss

    def labels(self, Y, first, n):
        """Uniform numbers (n, T) with which the forward draws ŷ of the first n rows, `first` rows having been taken."""
        if self.uniforms is None:
            shape = (self.batch_size, Y.size(1))
            uniforms = keyed_uniforms(self.seed, LABELS, self.iter_num, shape)[self.rank::self.world_size]
            self.uniforms = uniforms.to(Y.device)
        return self.uniforms[first:first + n]

    def backward(self, loss_scale=1.0):
        if self.loss_hat is not None:
            self.estimator.add(self.loss_hat * (loss_scale * self.share), self.predictions, retain_graph=True)
            self.loss_hat = None

    def finish(self, optimizer, loss_scale=1.0):
        if self.due:
            estimator, self.estimator = self.estimator, None
            # Under loss scaling overflows are normal.
            optimizer.update_hessian(estimator.estimate(loss_scale * self.share),
                                     nonfinite='skip' if loss_scale != 1 else 'raise')


class EmpiricalFisher(GaussNewton):
    """The ablation E-F+clip: Gauss-Newton-Bartlett with the true labels in the place of sampled ones."""

    def labels(self, Y, first, n):
        return Y[:n]


# Of all layers together, in one Hessian-vector product: without flash attention they stay, with their derivatives, some
# 10 bytes each. 32 sequences of 1,024 tokens in one product would take 80 GB with 125M parameters; so a product takes
# what a micro-batch of training does.
ATTENTION_WEIGHTS = 2 ** 30


def rows_at_once(config, rows, T, micro_batch):
    """How many of `rows` sequences of T tokens a Hessian-vector product of a GPT takes at a time.

    At most a micro-batch, and no more than ATTENTION_WEIGHTS allows; all parts are equal, as anything else would be
    compiled again.
    """
    most = max(1, min(micro_batch, ATTENTION_WEIGHTS // (config.n_layer * config.n_head * T ** 2)))
    return max(n for n in range(1, most + 1) if rows % n == 0)


class HutchinsonHook(HessianHook):
    """Hutchinson's estimator (Algorithm 1), the Hessian-vector product by forward-over-reverse differentiation."""

    rademacher = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        name_of = {p: name for name, p in self.model.named_parameters()}
        self.names = [name_of.pop(p) for p in self.params]
        self.frozen = {name: p for p, name in name_of.items()}
        self.product = self.model.hessian_vector_product
        if self.compile:
            # For one shape: PyTorch 2.11 fails at others. Without the layout pass, as in World.wrap.
            self.product = torch.compile(self.product, dynamic=False, options={'layout_optimization': False})
        if getattr(self.autocast, 'fast_dtype', None) == torch.float16:
            # Gradients and their derivatives along u differ too much in size for float16, whatever the loss scale.
            self.autocast = contextlib.nullcontext()

    def start(self, iter_num):
        self.rows = []
        return super().start(iter_num)

    def loss(self, model, X, Y):
        if self.due and (n := self.take_rows(X)):
            self.rows.append((X[:n], Y[:n]))
        return super().loss(model, X, Y)

    def finish(self, optimizer, loss_scale=1.0):
        if not self.due:
            return
        generator = torch.Generator(self.params[0].device)
        generator.manual_seed(int(keyed_bits(self.seed, VECTORS, self.iter_num)[0] >> 1))
        estimator = Hutchinson(self.params, generator, self.rademacher)
        u = dict(zip(self.names, estimator.u)) | {name: torch.zeros_like(p) for name, p in self.frozen.items()}
        X, Y = (torch.cat(parts) for parts in zip(*self.rows))
        n = rows_at_once(self.model.config, *X.shape, max(len(x) for x, _ in self.rows))
        for x, y in zip(X.split(n), Y.split(n)):
            with self.autocast:
                product = self.product(x, y, u)
            estimator.add([product.pop(name) for name in self.names], n)  # and its memory is the next one's
        self.rows = []
        optimizer.update_hessian(estimator.estimate(), nonfinite='raise')


class AdaHessianHook(HutchinsonHook):
    """AdaHessian's own choice of u, uniform on {−1, 1}."""

    rademacher = True


HOOKS = {'sophiag': GaussNewton, 'gnb_noclip': GaussNewton, 'ef_clip': EmpiricalFisher,
         'sophiah': HutchinsonHook, 'ah_clip': HutchinsonHook, 'adahessian': AdaHessianHook}


def build_hessian_hook(name, model, optimizer, *, interval, **options):
    """The hook for the optimizer called `name`; `options` as for `HessianHook`."""
    if name not in HOOKS:
        return NoHessian()
    params = [p for group in optimizer.param_groups for p in group['params']]
    return HOOKS[name](model, params, interval=interval, **options)


def statistics(optimizer):
    """What the optimizer's state says of the run, as 0-d tensors: `momentum_norm` (ℓ2 of m) and, where there is an h,
    `hessian_norm` (ℓ2 of h) and `update_unclipped`."""
    params = [p for group in optimizer.param_groups for p in group['params']]
    found = {}
    for name, key in [('momentum_norm', 'exp_avg'), ('hessian_norm', 'hessian')]:
        tensors = [optimizer.state[p][key] for p in params if key in optimizer.state[p]]
        if tensors:
            found[name] = full_tensor(total_norm(tensors))
    if isinstance(optimizer, Sophia) and (unclipped := optimizer.unclipped()) is not None:
        found['update_unclipped'] = unclipped
    return found
