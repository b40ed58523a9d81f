"""The table of optimizers: constructor, settings, learning rates and Hessian estimator of each.
Add an optimizer as a row of OPTIMIZERS. A library's optimizer needs no row: --optimizer_name=LIBRARY:CLASS.

Also here: the baselines Lion and AdaHessian, the paper's ablations, and the param groups.
"""

import ast
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch.optim import AdamW

from hessian import AdaHessianHook, EmpiricalFisherHook, GNBHook, HutchinsonHook, StepHook, fit_parts
from runtime import optim, optimizer_state
from runtime.distributed import full_tensor
from runtime.files import one_line
from sophia import Sophia, local, params_of

# ----------------------------------------------------------------------------------------------------------------------
# Baselines and ablations without a Hessian


class Momentum(torch.optim.Optimizer):
    """Base class of optimizers whose state is `exp_avg` (m). A subclass defines `update(group, params, grads, ms)`, on
    lists of tensors."""

    def step(self, closure=None):
        """Update every parameter that has a gradient. Return the closure's loss, if there is a closure."""
        loss = closure() if closure else None
        with torch.no_grad():
            for group in self.param_groups:
                params = [p for p in group['params'] if p.grad is not None]
                for p in params:
                    if 'exp_avg' not in self.state[p]:
                        self.state[p]['exp_avg'] = torch.zeros_like(p)
                if params:
                    self.update(group, params, [p.grad for p in params], [self.state[p]['exp_avg'] for p in params])
        return loss


class Lion(Momentum):
    """Lion (Chen et al., 2023): θ ← θ − lr·λ·θ;  θ ← θ − lr·sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g."""

    def __init__(self, params, lr, betas=(0.95, 0.98), weight_decay=0.2):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def update(self, group, params, grads, ms):
        lr, (beta1, beta2) = group['lr'], group['betas']
        # PyTorch 2.11 lacks some of these operators for DTensors; each rank updates its shards.
        params, grads, ms = local(params), local(grads), local(ms)
        update = torch._foreach_lerp(ms, grads, 1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)
        torch._foreach_lerp_(ms, grads, 1 - beta2)


class Normalize(Momentum):
    """The ablation Normalize: θ ← θ − lr·λ·θ;  θ ← θ − lr·m / max(rms(m), ε), the root mean square of each tensor.
    momentum: β1, under the name that PyTorch's schedulers expect."""

    def __init__(self, params, lr, momentum=0.96, eps=1e-12, weight_decay=0.2):
        super().__init__(params, dict(lr=lr, momentum=momentum, eps=eps, weight_decay=weight_decay))

    def update(self, group, params, grads, ms):
        lr, params, grads, shards = group['lr'], local(params), local(grads), local(ms)
        torch._foreach_lerp_(shards, grads, 1 - group['momentum'])
        # A tensor's norm needs all of its shards. All other operations are elementwise.
        norms = [full_tensor(norm) for norm in torch._foreach_norm(ms)]
        rms = [norm.div_(m.numel() ** 0.5).clamp_(min=group['eps']) for norm, m in zip(norms, ms)]
        update = torch._foreach_div(shards, rms)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)


# ----------------------------------------------------------------------------------------------------------------------
# Baselines and ablations with a Hessian (section "Ablation Study")


class SophiaSquared(Sophia):
    """The ablation AH+clip: the state `hessian` is the EMA of ĥ², as in AdaHessian, and the update uses its root."""

    def update_hessian(self, estimates):
        return super().update_hessian(None if h_hat is None else h_hat.square() for h_hat in estimates)

    def curvature(self, hs):
        return torch._foreach_sqrt(hs)


class AdaHessian(SophiaSquared):
    """AdaHessian (Yao et al., 2021) as the paper compares with it: AdamW with the EMA of ĥ² as the second moment v,
    θ ← θ − lr·λ·θ − lr·m̂ / (√v̂ + ε), m and v bias-corrected.

    A coordinate with v = 0 (no estimate yet, or all were 0) only decays, because m̂ / ε would be huge.
    State per parameter: `exp_avg` (m), `hessian` (v), and `step`, a float32 tensor (2,): step count, estimate count."""
    rho = math.inf  # no clip

    def __init__(self, params, lr, betas=(0.92, 0.99), eps=1e-8, weight_decay=1e-3, *, nonfinite='raise'):
        super().__init__(params, lr, betas, eps=eps, weight_decay=weight_decay, nonfinite=nonfinite)

    def update(self, group, params):
        lr, (beta1, beta2) = group['lr'], group['betas']
        for p, m, v in zip(params, self.buffers(params, 'exp_avg'), self.buffers(params, 'hessian')):
            count = self.count(p)
            count[0] += 1
            steps, estimates = count.tolist()
            m.lerp_(p.grad, 1 - beta1)
            denominator = (v / (1 - beta2 ** estimates)).sqrt_().add_(group['eps'])
            p.mul_(1 - lr * group['weight_decay'])
            p.sub_(torch.where(v > 0, m / denominator, 0) * (lr / (1 - beta1 ** steps)))

    def update_hessian(self, estimates):
        estimates = list(estimates)
        if finite := super().update_hessian(estimates):
            for p, h_hat in zip(params_of(self), estimates):
                if h_hat is not None:
                    self.count(p)[1] += 1
        return finite

    def count(self, p):
        # load_state_dict casts every state except 'step' to the parameter's dtype.
        return self.state[p].setdefault('step', torch.zeros(2, dtype=torch.float32))


class SophiaUnclipped(Sophia):
    """The ablation "GNB without clipping": only ε bounds the update."""
    rho = math.inf


# ----------------------------------------------------------------------------------------------------------------------
# The table. For the optimizers in the paper, values are from its section on hyperparameter tuning. Comments name the
# values that it does not state.


@dataclass(frozen=True)
class Row:
    """An optimizer of the table."""
    build: Callable  # (param groups, its settings as attributes) → Optimizer; gradients are finite and clipped
    settings: dict  # setting in train.py → default; hessian_batch_size is for mini-batches of 480 sequences
    learning_rates: dict | float  # peak learning rate by model size, or one for all sizes
    source: str = 'Table 2'  # source of the learning rates
    hook: type[StepHook] = StepHook  # the class that estimates its Hessian, see hessian.py
    scale_hessian_batch: bool = True  # whether hessian_batch_size scales with the mini-batch
    scales_attention: bool = False  # whether the paper divides its attention logits by the layer index
    library: str = ''  # 'LIBRARY:CLASS' of a library's optimizer
    shards: bool = False  # whether it can update sharded parameters


def adamw(groups, s):
    return AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), eps=s.eps, weight_decay=s.weight_decay,
                 fused=True)


def lion(groups, s):
    return Lion(groups, s.learning_rate, (s.beta1, s.beta2), s.weight_decay)


def signum(groups, s):
    """Build Signum, sign momentum: Sophia with h = 0, or Lion with a single β."""
    return Lion(groups, s.learning_rate, (s.beta1, s.beta1), s.weight_decay)


def normalize(groups, s):
    return Normalize(groups, s.learning_rate, s.beta1, s.eps, s.weight_decay)


def adahessian(groups, s):
    return AdaHessian(groups, s.learning_rate, (s.beta1, s.beta2), s.eps, s.weight_decay, nonfinite='ignore')


def sophia(groups, s, cls=Sophia):
    return cls(groups, s.learning_rate, (s.beta1, s.beta2), s.gamma, s.eps, s.weight_decay, nonfinite='ignore',
               compile=s.compile)


def from_library(groups, s, **arguments):
    """Build the row's library optimizer with `arguments`, by default the settings under the library's names."""
    path = row(s.optimizer_name).library
    if not arguments:
        arguments = {name: getattr(s, name) for name in ('eps', 'weight_decay') if hasattr(s, name)}
        arguments |= dict(betas=(s.beta1, s.beta2)) if hasattr(s, 'beta2') else {}
    more = parse_arguments(s.optimizer_args, path)
    try:
        return library_class(path)(groups, lr=s.learning_rate, **arguments, **more)
    except Exception as error:  # a library may raise anything
        raise SystemExit(f'--optimizer_name={path}: cannot be built with its settings ({one_line(error)}); see '
                         '--optimizer_args') from None


def matrices_and_rest(groups):
    """Split param groups into Muon's matrices and the rest. Muon takes matrices in groups with the role 'hidden', or
    all matrices if no group has a role."""
    roles = any(group.get('role') for group in groups)

    def select(wanted):
        found = [dict(group, params=[p for p in group['params'] if wanted == (
            p.dim() == 2 and (group.get('role') == 'hidden' or not roles))]) for group in groups]
        return [group for group in found if group['params']]

    return select(True), select(False)


def muon(groups, s):
    """Build Muon for the matrices of the blocks, with updates as large as AdamW's, and AdamW for the rest."""
    matrices, rest = matrices_and_rest(groups)
    return optim.CombinedOptimizer(
        from_library(matrices, s, momentum=s.beta1, weight_decay=s.weight_decay, adjust_lr_fn='match_rms_adamw'),
        *([AdamW(rest, lr=s.learning_rate, betas=(0.9, s.beta2), eps=s.eps, weight_decay=s.weight_decay, fused=True)]
          if rest else []))


# Peak learning rates, Table 2. 'tiny' is ours (records/).
ADAMW_LR = {'tiny': 1.2e-2, '30M': 1.2e-3, '125M': 6e-4, '355M': 3e-4, '540M': 3e-4, '770M': 2e-4, '1.5B': 1.5e-4,
            '6.6B': 1.2e-4}
LION_LR = {'tiny': 4e-3, '30M': 4e-4, '125M': 1.5e-4, '355M': 6e-5}
SOPHIA_H_LR = {'tiny': 2e-3, '30M': 1e-3, '125M': 6e-4, '355M': 4e-4, '540M': 4e-4, '770M': 3e-4}
SOPHIA_G_LR = SOPHIA_H_LR | {'1.5B': 1.2e-4, '6.6B': 6e-5}
# AdaHessian's steps are fractions of a Newton step, so all model sizes share one learning rate. The paper does not
# state it; ours is the best of 0.1, 0.3 and 1 for the model 'tiny'.
ADAHESSIAN_LR = 0.3

SOPHIA = dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, hessian_interval=10)
SOPHIA_G = dict(SOPHIA, gamma=0.05, hessian_batch_size=240, hessian_parts=1, hessian_clip=0.0)
SOPHIA_H = dict(SOPHIA, gamma=0.01, hessian_batch_size=32)

OPTIMIZERS = {
    'adamw': Row(adamw, dict(beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8), ADAMW_LR, scales_attention=True,
                 shards=True),
    'lion': Row(lion, dict(beta1=0.95, beta2=0.98, weight_decay=0.2), LION_LR, scales_attention=True, shards=True),
    # The paper does not state weight_decay, eps and hessian_batch_size. λ is small because the decay per step is
    # learning rate × λ, and the learning rate is hundreds of times AdamW's.
    'adahessian': Row(adahessian, dict(beta1=0.92, beta2=0.99, weight_decay=1e-3, eps=1e-8, hessian_interval=1,
                                       hessian_batch_size=480), ADAHESSIAN_LR, 'our table', AdaHessianHook),
    'sophiag': Row(sophia, SOPHIA_G, SOPHIA_G_LR, hook=GNBHook, shards=True),
    'sophiah': Row(sophia, SOPHIA_H, SOPHIA_H_LR, hook=HutchinsonHook, scale_hessian_batch=False),
    # Ablations. The paper does not state their learning rates; ours are the closest optimizer's. For empirical Fisher
    # and AH+clip it states k = 10 and a γ "found by grid search"; ours is Sophia's.
    'ef_clip': Row(sophia, SOPHIA_G, SOPHIA_G_LR, 'Table 2, sophiag', EmpiricalFisherHook, shards=True),
    'ah_clip': Row(partial(sophia, cls=SophiaSquared), SOPHIA_H, SOPHIA_H_LR, 'Table 2, sophiah', HutchinsonHook,
                   scale_hessian_batch=False),
    # Clip and Normalize have no preconditioner. The paper does not state β1. ε only bounds Normalize's denominator.
    'signum': Row(signum, dict(beta1=0.96, weight_decay=0.2), LION_LR, 'Table 2, lion', shards=True),
    'normalize': Row(normalize, dict(beta1=0.96, weight_decay=0.2, eps=1e-12), LION_LR, 'Table 2, lion', shards=True),
    # k = 2 is the paper's. Without clipping, ε must bound the step where h is tiny. The paper does not state ε.
    'gnb_noclip': Row(partial(sophia, cls=SophiaUnclipped), dict(SOPHIA_G, hessian_interval=2, eps=1e-4), SOPHIA_G_LR,
                      'Table 2, sophiag', GNBHook, shards=True),
    # Not in the paper. The window is 100 steps instead of 1,000; squaring 16 parts separately keeps the noise similar.
    'sophiag_fresh': Row(sophia, dict(SOPHIA_G, beta2=0.9, hessian_parts=16), SOPHIA_G_LR, 'Table 2, sophiag', GNBHook,
                         shards=True),
    # Baselines that the paper does not have, with library defaults except for AdamW's weight decay. Muon's updates are
    # scaled to the size of AdamW's, so it takes AdamW's learning rates. With shards it gathers whole matrices.
    'muon': Row(muon, dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8, optimizer_args=''),
                ADAMW_LR | {'tiny': 4.8e-2}, 'Table 2, adamw', shards=True, library='torch:Muon'),
    'soap': Row(from_library, dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8, optimizer_args=''),
                {'tiny': 2.4e-2}, 'our table', library='pytorch_optimizer:SOAP'),
    # Rows of a fork:
}
INSTEAD = {  # library optimizers that this loop cannot run → what to use
    'torch:Muon': 'muon, which leaves all but the matrices of the blocks to AdamW',
    'torch:SparseAdam': 'adamw, because gradients here are dense',
    'torch:LBFGS': 'adamw, because a step here evaluates the loss once',
    'pytorch_optimizer:SophiaH': 'sophiah', 'pytorch_optimizer:AdaHessian': 'adahessian',
}
# Library optimizers that are elementwise or support DTensors
SHARDABLE = {f'torch:{name}' for name in torch.optim.__all__} - {'torch:Muon', 'torch:Adafactor', 'torch:Rprop'} | {
    'schedulefree:AdamWScheduleFree'}


def row(optimizer_name):
    """Return the row of an optimizer, from the table or built for a library's."""
    if optimizer_name in INSTEAD:
        raise SystemExit(f'--optimizer_name={optimizer_name}: is not supported; use {INSTEAD[optimizer_name]}')
    if ':' in optimizer_name:
        return unlisted_row(optimizer_name)
    if optimizer_name not in OPTIMIZERS:
        raise SystemExit(f'--optimizer_name={optimizer_name}: unknown optimizer; choose from {", ".join(OPTIMIZERS)}, '
                         'or LIBRARY:CLASS')
    return OPTIMIZERS[optimizer_name]


def unlisted_row(path):
    """Build a row for the optimizer 'LIBRARY:CLASS'. Its settings are betas (if a pair), eps and weight_decay, where
    the class has these arguments, with the class's defaults."""
    defaults = {name: p.default for name, p in inspect.signature(library_class(path)).parameters.items()}
    settings = {key: float(defaults[key]) for key in ('weight_decay', 'eps') if type(defaults.get(key)) in (int, float)}
    pair = defaults.get('betas')
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        settings.update(beta1=pair[0], beta2=pair[1])
    return Row(from_library, dict(settings, optimizer_args=''), {}, 'our table', library=path, shards=path in SHARDABLE)


def build_optimizer(name, params, *, lr, compile=False, **settings):
    """Build the optimizer called `name` in the table on parameters or param groups. Missing settings come from
    the table. `compile` fuses Sophia's update with torch.compile. Gradients must be finite when it steps."""
    if unknown := settings.keys() - {key for one in OPTIMIZERS.values() for key in one.settings}:
        raise ValueError(f'build_optimizer: unknown settings {", ".join(sorted(unknown))}')
    chosen, groups = row(name), list(params)
    groups = groups if isinstance(groups[0], dict) else [dict(params=groups)]
    groups = [dict(group, params=list(group['params'])) for group in groups]
    own = {key: settings.get(key, value) for key, value in chosen.settings.items()}
    s = SimpleNamespace(**own, optimizer_name=name, learning_rate=lr, compile=compile)
    optimizer = chosen.build(groups, s)  # AttributeError if the row lacks a setting
    optim.back_to_training(optimizer)  # schedule-free optimizers start in evaluation mode
    optimizer_state.record_construction(optimizer)
    return optimizer


def hessian_flops_per_token(settings, flops_per_token):
    """Return the FLOPs of Hessian estimates per training token, given the dict of a run's `settings` and the
    `flops_per_token` of forward and backward. An estimate costs `hook.cost` times that per token."""
    hook, iterations = row(settings['optimizer_name']).hook, settings['max_iters']
    estimates = sum(hook.is_due(i, settings['hessian_interval']) for i in range(iterations)) if hook.cost else 0
    share = settings['hessian_batch_size'] / settings['total_batch_size']
    return hook.cost * share * estimates / iterations * flops_per_token


def parameter_groups(model, weight_decay):
    """Return three param groups: embeddings (and an untied head), the blocks' matrices, and all vectors, such as norms
    and biases. Vectors have no weight decay. For the others None means the optimizer's default.

    A group may have an `lr_scale`, which multiplies its learning rate. Muon takes only the `role` 'hidden'.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    in_blocks = set(model.transformer.h.parameters())
    hidden = [p for p in trained if p.dim() > 1 and p in in_blocks]
    others = [p for p in trained if p.dim() > 1 and p not in in_blocks]
    vectors = [p for p in trained if p.dim() < 2]
    decay = {} if weight_decay is None else dict(weight_decay=weight_decay)
    groups = [dict(params=others, role='embedding', **decay), dict(params=hidden, role='hidden', **decay),
              dict(params=vectors, weight_decay=0.0)]
    return [group for group in groups if group['params']]


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers of libraries


def library_class(path):
    """Return the optimizer class 'LIBRARY:CLASS'; torch stands for torch.optim."""
    library, _, name = path.partition(':')
    try:
        return getattr(importlib.import_module('torch.optim' if library == 'torch' else library), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # '.x' gives a TypeError, '' a ValueError
        raise SystemExit(f'--optimizer_name={path}: cannot be imported ({one_line(error)}); check its name, or install '
                         'what is missing') from None


def parse_arguments(text, path):
    """Parse the setting optimizer_args, such as 'nesterov=True, momentum=0.9', into a dict. Exit unless the
    class `path` names these arguments, because some classes accept any."""
    flag = f'--optimizer_args={text}'
    try:
        call = ast.parse(f'dict({text})', mode='eval').body
        found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args:
            raise ValueError
    except (AttributeError, SyntaxError, ValueError):
        raise SystemExit(f'{flag}: write NAME=VALUE, NAME=VALUE, … with Python literals') from None
    known = inspect.signature(library_class(path)).parameters
    if unknown := found.keys() - known.keys():
        raise SystemExit(f'{flag}: {min(unknown)} is not an argument of {path}; choose from {", ".join(known)}')
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Settings from the table, for train.py's `derive`


def unused(config):
    """Return the settings that only other optimizers of the table have, each as 0 or False."""
    names = {key for one in OPTIMIZERS.values() for key in one.settings} - row(config.optimizer_name).settings.keys()
    return {key: one.type() for key, one in config.declared.items() if key in names and one.default is None}


def defaults_of(config):
    """Return the default settings of a run with this optimizer."""
    return {**unused(config), **row(config.optimizer_name).settings, **config.defaults}


def fill_settings(config):
    """Fill in the optimizer's settings, with hessian_batch_size scaled to the mini-batch."""
    name, chosen = config.optimizer_name, row(config.optimizer_name)
    settings = dict(chosen.settings)
    if 'hessian_batch_size' in settings:
        size, total = settings['hessian_batch_size'], config.total_batch_size
        size = max(1, size * total // 480) if chosen.scale_hessian_batch else size
        settings['hessian_batch_size'] = min(size, total)
    config.fill(settings, f'optimizer {name}')
    config.fill(unused(config), f'not a setting of {name}')
    # In the paper AdamW and Lion divide attention logits by the layer index from 24 layers (355M) up.
    config.fill(dict(scale_attn_by_inverse_layer_idx=chosen.scales_attention and config.n_layer >= 24),
                f'{name}, {config.n_layer} layers')


def peak_learning_rate(optimizer_name, model_size):
    """Return (learning rate or None, name of the table)."""
    chosen = row(optimizer_name)
    rates, ours = chosen.learning_rates, model_size == 'tiny' and chosen.source.startswith('Table')
    table = 'our table' if ours else chosen.source
    return rates.get(model_size) if isinstance(rates, dict) else rates, table


def fit_estimate(config, ranks):
    """Set hessian_batch_size and hessian_parts to the next values that fit the mini-batch and the ranks."""
    asked, parts, total = config.hessian_batch_size, config.hessian_parts, config.total_batch_size
    size = math.ceil(min(asked, total) / ranks) * ranks
    if size != asked:
        config.set('hessian_batch_size', size, f'{asked} made to fit {total} sequences on {ranks} device(s)')
    fitting = fit_parts(parts, size, config.batch_size, ranks, config.parallel != 'ddp')
    if fitting != parts:
        config.set('hessian_parts', fitting, f'{parts} made to fit {size} sequences on {ranks} device(s), at most '
                   f'{config.batch_size} sequences a part')


def check_settings(config):
    """Exit if a setting does not fit the optimizer. Hessian-vector products need the plain model."""
    name, chosen = config.optimizer_name, row(config.optimizer_name)
    for key in (*unused(config), *({'optimizer_args'} - chosen.settings.keys())):
        if config.sources[key] == 'flag':
            raise SystemExit(f'--{key} has no effect with {name}; leave it out')
    for key in ('hessian_interval', 'hessian_batch_size', 'eps') if 'hessian_interval' in chosen.settings else ():
        config.require(key, config.values[key] > 0, f'above 0 for {name}')
    products = chosen.hook.hessian_products
    config.require('parallel', config.parallel == 'ddp' or chosen.shards and not products, f'ddp for {name}, which '
                   'cannot update shards (see its row in optimizers.py)')
    config.require('activation_checkpointing', not (products and config.activation_checkpointing),
                   f'False for {name} (Hessian-vector products), or use sophiag')


# ----------------------------------------------------------------------------------------------------------------------
# Metrics


# Module of a GPT → kind of its tensors in metrics
KINDS = dict(attn='attention', mlp='mlp', wte='embedding', wpe='embedding', lm_head='embedding')


def optimizer_metrics(optimizer, model):
    """Return metrics as 0-d tensors. `momentum_norm`: ℓ2 norm of the state `exp_avg` or `momentum_buffer`.
    `hessian_norm`: ℓ2 norm of the state `hessian`, also by kind of tensor as `hessian_norm/KIND`. `update_unclipped`:
    for Sophia. If the optimizer has a method `metrics()`, the dict that it returns is added."""
    states = [optimizer.state.get(p, {}) for p in optim.parameters(optimizer)]
    found = {}
    for metric, keys in dict(momentum_norm=('exp_avg', 'momentum_buffer'), hessian_norm=('hessian',)).items():
        if held := [state[key] for state in states for key in keys if isinstance(state.get(key), torch.Tensor)]:
            found[metric] = optim.global_norm(held)
    kinds = {}
    for name, p in model.named_parameters():
        if 'hessian' in optimizer.state.get(p, {}):
            kinds.setdefault(kind_of(name, p), []).append(optimizer.state[p]['hessian'])
    found.update({f'hessian_norm/{kind}': optim.global_norm(hs) for kind, hs in sorted(kinds.items())})
    if isinstance(optimizer, Sophia) and optimizer.rho < math.inf and found:
        found['update_unclipped'] = optimizer.unclipped_fraction()
    return found | (optimizer.metrics() if hasattr(optimizer, 'metrics') else {})


def kind_of(name, p):
    """Return the kind of a GPT's parameter: norm (any vector), attention, mlp, embedding (or an untied head), or other
    if its module has no name of model.py's."""
    if p.dim() < 2:
        return 'norm'
    return next((KINDS[part] for part in name.split('.') if part in KINDS), 'other')
