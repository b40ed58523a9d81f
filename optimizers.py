"""The optimizers of a run: one table with how each is built, its settings, learning rates and Hessian hook.
Add an optimizer as a row of OPTIMIZERS; one of a library needs none, --optimizer_name=LIBRARY:CLASS.

The baselines Lion and AdaHessian, the ablations of Sophia, and the param groups are here, too.
"""

import ast
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch.optim import AdamW

from hessian import (
    AdaHessianHook,
    ClippedGNBHook,
    EmpiricalFisherHook,
    GNBHook,
    HessianHook,
    HutchinsonHook,
    StepHook,
    fitting_parts,
)
from runtime import optim, optimizer_state
from runtime.distributed import full_tensor
from runtime.files import one_line
from sophia import GuardedOptimizer, HessianOptimizer, Sophia, local

# ----------------------------------------------------------------------------------------------------------------------
# Baselines


class Lion(GuardedOptimizer):
    """Lion (Chen et al., 2023): θ ← θ − lr·λ·θ;  θ ← θ − lr·sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g.

    Arguments as for `Sophia`. State per parameter: `exp_avg` (m).
    """

    def __init__(self, params, lr, betas=(0.95, 0.98), weight_decay=0.2, *, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), nonfinite)

    def update(self, group, params, grads):
        lr, (beta1, beta2) = group['lr'], group['betas']
        # PyTorch 2.11 lacks some of these operators for DTensors; each rank updates its shards.
        ms, params, grads = local(self.buffers(params, 'exp_avg')), local(params), local(grads)
        update = torch._foreach_lerp(ms, grads, 1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)
        torch._foreach_lerp_(ms, grads, 1 - beta2)


class AdaHessian(HessianOptimizer):
    """AdaHessian (Yao et al., 2021) as the paper compares with it: AdamW with the EMA of ĥ² as the second moment v,
    θ ← θ − lr·λ·θ − lr·m̂ / (√v̂ + ε), m and v bias-corrected.

    A coordinate whose v is 0, because all its estimates were, does not move: m̂ / ε would throw it far away. A step
    before any estimate is a RuntimeError.

    Arguments and `update_hessian` as for `Sophia`. State per parameter: `exp_avg` (m), `hessian` (v), and `step`, how
    often each of the two was updated.
    """

    def __init__(self, params, lr, betas=(0.92, 0.99), eps=1e-8, weight_decay=1e-3, *, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), nonfinite)

    def averaged(self, h_hat):
        return h_hat.square()

    def update(self, group, params, grads):
        lr, (beta1, beta2) = group['lr'], group['betas']
        ms, vs, counts = self.buffers(params, 'exp_avg'), self.buffers(params, 'hessian'), self.counts(params)
        if not any(self.state[p]['step'][1] for p in optim.parameters(self) if self.state.get(p)):
            if lr:
                raise RuntimeError('AdaHessian.step() before any estimate of the Hessian: call update_hessian() first')
            return  # torch.distributed.checkpoint makes such a step, to get the state that it loads into
        torch._foreach_lerp_(ms, grads, 1 - beta1)
        for p, m, v, count in zip(params, ms, vs, counts):
            count[0] += 1
            steps, estimates = count.tolist()
            denominator = (v / (1 - beta2 ** estimates)).sqrt_().add_(group['eps'])
            p.mul_(1 - lr * group['weight_decay'])
            p.sub_(torch.where(v > 0, m / denominator, 0) * (lr / (1 - beta1 ** steps)))

    def update_ema(self, group, params, targets):
        super().update_ema(group, params, targets)
        for count in self.counts(params):
            count[1] += 1

    def counts(self, params):
        """Return the state `step` of each of `params`: float32 (2,), its numbers of steps and of estimates."""
        # PyTorch loads a state of this name as it is, and all others in the dtype of the parameter.
        return [self.state[p].setdefault('step', torch.zeros(2, dtype=torch.float32)) for p in params]


# ----------------------------------------------------------------------------------------------------------------------
# Ablations (section "Ablation Study")


class SophiaUnclipped(Sophia):
    """The ablation "GNB without clipping": ε alone bounds the update, so that there is no fraction to log."""
    rho = math.inf

    def metrics(self):
        return {}


class SophiaSquared(Sophia):
    """The ablation AH+clip: the state `hessian` is the EMA of ĥ², as AdaHessian's, and the update takes its root."""

    def averaged(self, h_hat):
        return h_hat.square()

    def curvature(self, hs):
        return torch._foreach_sqrt(hs)


class SophiaTensorMean(Sophia):
    """The ablation "mean of h", not in the paper: each coordinate is divided by the mean of h over its tensor."""

    def curvature(self, hs):
        return [h.mean().expand_as(h) for h in hs]


class SophiaShuffledRows(Sophia):
    """The control "shuffled h", not in the paper: within each row of a tensor the coordinates of h are shuffled, the
    same way in every step, so that a row, such as a token's embedding, keeps its denominators."""

    def curvature(self, hs):
        return [h.gather(-1, order_of_rows(h.shape, h.device)) for h in hs]


@functools.cache
def order_of_rows(shape, device):
    """Return a random order of each row of a tensor, int64 of its shape, a function of the shape alone."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator).argsort(-1).to(device)


class Normalize(GuardedOptimizer):
    """The ablation Normalize: θ ← θ − lr·λ·θ;  θ ← θ − lr·m / max(rms(m), ε), the root mean square of each tensor.

    momentum: β1, by the name that PyTorch's schedulers look for; the other arguments as for `Sophia`. State per
    parameter: `exp_avg` (m).
    """

    def __init__(self, params, lr, momentum=0.96, eps=1e-12, weight_decay=0.2, *, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, momentum=momentum, eps=eps, weight_decay=weight_decay), nonfinite)

    def update(self, group, params, grads):
        lr, ms = group['lr'], self.buffers(params, 'exp_avg')
        params, grads, shards = local(params), local(grads), local(ms)
        torch._foreach_lerp_(shards, grads, 1 - group['momentum'])
        # The norm of a tensor takes all of its shards; every other line is about one coordinate at a time.
        norms = [full_tensor(norm) for norm in torch._foreach_norm(ms)]
        rms = [norm.div_(m.numel() ** 0.5).clamp_(min=group['eps']) for norm, m in zip(norms, ms)]
        update = torch._foreach_div(shards, rms)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)


# ----------------------------------------------------------------------------------------------------------------------
# The table. Values are from the paper's section on hyperparameter tuning for the optimizers that it trains; a comment
# says where it is silent.


@dataclass(frozen=True)
class Row:
    """An optimizer of the table."""
    build: Callable  # (param groups, its settings as attributes) → Optimizer; gradients come finite and clipped
    settings: dict  # its values of train.py's settings; hessian_batch_size is for a mini-batch of 480 sequences
    learning_rates: dict | float  # peak learning rate by model size, or one for all sizes
    source: str = 'Table 3'  # where the learning rates come from
    hook: type[StepHook] = StepHook  # the class of its per-step callbacks, see hessian.py
    scale_hessian_batch: bool = True  # whether hessian_batch_size grows and shrinks with the mini-batch
    scales_attention: bool = False  # whether the paper divides its attention logits by the layer index
    library: str = ''  # 'LIBRARY:CLASS' of a library's optimizer
    shards: bool = False  # whether it can update sharded parameters, each rank its part


def betas(s):
    return s.beta1, s.beta2


def adamw(groups, s):
    return AdamW(groups, lr=s.learning_rate, betas=betas(s), eps=s.eps, weight_decay=s.weight_decay, fused=True)


def lion(groups, s):
    return Lion(groups, s.learning_rate, betas(s), s.weight_decay, nonfinite='ignore')


def signum(groups, s):
    """Build Signum, sign momentum: Sophia with h = 0, or Lion with a single β."""
    return Lion(groups, s.learning_rate, (s.beta1, s.beta1), s.weight_decay, nonfinite='ignore')


def normalize(groups, s):
    return Normalize(groups, s.learning_rate, s.beta1, s.eps, s.weight_decay, nonfinite='ignore')


def adahessian(groups, s):
    return AdaHessian(groups, s.learning_rate, betas(s), s.eps, s.weight_decay, nonfinite='ignore')


def sophia(groups, s, cls=Sophia):
    return cls(groups, s.learning_rate, betas(s), s.gamma, s.eps, s.weight_decay, nonfinite='ignore',
               compile=s.compile)


def from_library(groups, s, **arguments):
    """Build the optimizer of the row's library with `arguments`, by default the settings under their names there.
    SystemExit when it cannot be built, or has no learning rate to set."""
    path = row(s.optimizer_name).library
    flag = f'--optimizer_name={path}'
    if not arguments:
        arguments = {name: getattr(s, name) for name in ('eps', 'weight_decay') if hasattr(s, name)}
        arguments |= dict(betas=betas(s)) if hasattr(s, 'beta2') else {}
    more = parse_arguments(s.optimizer_args, path)
    try:
        optimizer = library_class(path)(groups, lr=s.learning_rate, **arguments, **more)
    except Exception as error:  # whatever the library raises
        raise SystemExit(f'{flag}: cannot be built with its settings ({one_line(error)}); see --optimizer_args'
                         ) from None
    if not all('lr' in group for group in optimizer.param_groups):
        raise SystemExit(f'{flag}: keeps no learning rate in its param groups, as this training loop needs; choose '
                         'another optimizer')
    return optimizer


def matrices_and_rest(groups):
    """Return the param groups of the matrices that Muon is for, and the groups of the rest: those of the role 'hidden',
    or, where no group has a role, all."""
    role = 'hidden' if any(group.get('role') for group in groups) else None

    def for_muon(group, p):
        p = p[1] if isinstance(p, tuple) else p  # named_parameters() gives pairs
        return group.get('role') == role and p.dim() == 2 and is_matrix(p)

    matrices = [dict(group, params=[p for p in group['params'] if for_muon(group, p)]) for group in groups]
    rest = [dict(group, params=[p for p in group['params'] if not for_muon(group, p)]) for group in groups]
    if not any(group['params'] for group in matrices):
        raise SystemExit("parameter_groups: no group of the role 'hidden' has a matrix, and Muon takes no others")
    return [[group for group in part if group['params']] for part in (matrices, rest)]


def muon(groups, s):
    """Build Muon for the matrices of the blocks, with updates as large as AdamW's, and AdamW for the others."""
    matrices, rest = matrices_and_rest(groups)
    parts = [from_library(matrices, s, momentum=s.beta1, weight_decay=s.weight_decay, adjust_lr_fn='match_rms_adamw')]
    if rest:
        parts.append(AdamW(rest, lr=s.learning_rate, betas=(0.9, s.beta2), eps=s.eps, weight_decay=s.weight_decay,
                           fused=True))
    return optim.CombinedOptimizer(*parts)


# Peak learning rates, Table 3. 'tiny' is ours (records/).
ADAMW_LR = {'tiny': 1.2e-2, '30M': 1.2e-3, '125M': 6e-4, '355M': 3e-4, '540M': 3e-4, '770M': 2e-4, '1.5B': 1.5e-4,
            '6.6B': 1.2e-4}
LION_LR = {'tiny': 4e-3, '30M': 4e-4, '125M': 1.5e-4, '355M': 6e-5}
SOPHIA_H_LR = {'tiny': 2e-3, '30M': 1e-3, '125M': 6e-4, '355M': 4e-4, '540M': 4e-4, '770M': 3e-4}
SOPHIA_G_LR = SOPHIA_H_LR | {'1.5B': 1.2e-4, '6.6B': 6e-5}
# AdaHessian's step is a fraction of a Newton step, whose size the learning rate does not fix: one for all models. The
# paper does not state it; ours is the best of 0.1, 0.3 and 1 with the model 'tiny'.
ADAHESSIAN_LR = 0.3

SOPHIA = dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, hessian_interval=10)
SOPHIA_G = dict(SOPHIA, gamma=0.05, hessian_batch_size=240, hessian_parts=1)
SOPHIA_FRESH = dict(SOPHIA_G, beta2=0.9, gamma=0.15, hessian_parts=16)
SOPHIA_H = dict(SOPHIA, gamma=0.01, hessian_batch_size=32)

OPTIMIZERS = {
    'adamw': Row(adamw, dict(beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8), ADAMW_LR, scales_attention=True,
                 shards=True),
    'lion': Row(lion, dict(beta1=0.95, beta2=0.98, weight_decay=0.2), LION_LR, scales_attention=True, shards=True),
    # The paper does not state weight decay, ε and the size of the estimate's batch. The decay per step is learning
    # rate × λ, and the learning rate is hundreds of times AdamW's.
    'adahessian': Row(adahessian, dict(beta1=0.92, beta2=0.99, weight_decay=1e-3, eps=1e-8, hessian_interval=1,
                                       hessian_batch_size=480), ADAHESSIAN_LR, 'our table', AdaHessianHook),
    'sophiag': Row(sophia, SOPHIA_G, SOPHIA_G_LR, hook=GNBHook, shards=True),
    'sophiah': Row(sophia, SOPHIA_H, SOPHIA_H_LR, hook=HutchinsonHook, scale_hessian_batch=False),
    # Ablations. The paper does not state their learning rates: ours are the closest optimizer's. Empirical Fisher
    # and AH+clip: k = 10, γ "found by grid search" but not stated, so Sophia's own here.
    'ef_clip': Row(sophia, SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', EmpiricalFisherHook, shards=True),
    'ah_clip': Row(partial(sophia, cls=SophiaSquared), SOPHIA_H, SOPHIA_H_LR, 'Table 3, sophiah', HutchinsonHook,
                   scale_hessian_batch=False),
    # Clip and Normalize have no preconditioner; the paper does not state β1. ε only bounds Normalize's denominator.
    'signum': Row(signum, dict(beta1=0.96, weight_decay=0.2), LION_LR, 'Table 3, lion', shards=True),
    'normalize': Row(normalize, dict(beta1=0.96, weight_decay=0.2, eps=1e-12), LION_LR, 'Table 3, lion', shards=True),
    # k = 2 is the paper's. Without the clip ε has to bound the step where h is tiny; the paper does not state it.
    'gnb_noclip': Row(partial(sophia, cls=SophiaUnclipped), dict(SOPHIA_G, hessian_interval=2, eps=1e-4), SOPHIA_G_LR,
                      'Table 3, sophiag', GNBHook, shards=True),
    # Not in the paper: h with a tenth of the lag and, by squares of 16 parts, about the same noise.
    'sophiag_fresh': Row(sophia, SOPHIA_FRESH, SOPHIA_G_LR, 'Table 3, sophiag', GNBHook, shards=True),
    # Not in the paper: the same with ĝ clipped, which ends the runaway of h in records/sharpening.
    'sophiag_clipped': Row(sophia, SOPHIA_FRESH, SOPHIA_G_LR, 'Table 3, sophiag', ClippedGNBHook, shards=True),
    # Not in the paper: does h matter coordinate by coordinate? Neither works on shards: both take whole rows or more.
    'gnb_mean': Row(partial(sophia, cls=SophiaTensorMean), SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', GNBHook),
    'gnb_rows': Row(partial(sophia, cls=SophiaShuffledRows), SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', GNBHook),
    # Baselines that the paper does not have, with their libraries' defaults but for AdamW's weight decay. Muon's
    # updates are scaled to the size of AdamW's, so it takes AdamW's learning rates; for its matrix products of
    # shards DTensor gathers the whole matrix.
    'muon': Row(muon, dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8, optimizer_args=''),
                ADAMW_LR | {'tiny': 4.8e-2}, 'Table 3, adamw', shards=True, library='torch:Muon'),
    'soap': Row(from_library, dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8, optimizer_args=''),
                {'tiny': 2.4e-2}, 'our table', library='pytorch_optimizer:SOAP'),
    # Rows of a fork:
}
# Library optimizers that work on each coordinate by itself, or know DTensors
SHARDABLE = {f'torch:{name}' for name in torch.optim.__all__} - {'torch:Muon', 'torch:Adafactor', 'torch:Rprop'} | {
    'schedulefree:AdamWScheduleFree'}


def row(optimizer_name):
    """Return the row of an optimizer, in the table or of a library."""
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


def all_settings():
    return {key for chosen in OPTIMIZERS.values() for key in chosen.settings}


def build_optimizer(name, params, *, lr, compile=False, **settings):
    """Build the optimizer called `name` in the table on `params`: parameters, with or without names, or param groups.

    Settings that are not given are the table's; those that its row lacks have no effect. `compile` fuses Sophia's
    update by torch.compile. Gradients must be finite when it steps.
    """
    if unknown := settings.keys() - all_settings():
        raise ValueError(f'build_optimizer: unknown settings {", ".join(sorted(unknown))}')
    chosen, groups = row(name), listed(params)
    if not any(isinstance(group, dict) for group in groups):
        groups = [dict(params=groups)]
    groups = [dict(group, params=listed(group['params'])) for group in groups]  # copies, to which settings are added
    own = {key: settings.get(key, value) for key, value in chosen.settings.items()}
    s = SimpleNamespace(**own, optimizer_name=name, learning_rate=lr, compile=compile)
    optimizer = chosen.build(groups, s)  # AttributeError where its row lacks a setting
    for group in optimizer.param_groups:  # a learning rate of a group's own follows the schedule, too
        if group['lr'] != lr and lr:
            group.setdefault('lr_scale', group['lr'] / lr)
    optim.back_to_training(optimizer)  # schedule-free ones start in evaluation mode
    optimizer_state.record_construction(optimizer)
    return optimizer


def listed(params):
    return [params] if isinstance(params, torch.Tensor) else list(params)


def hessian_flops_per_token(settings, flops_per_token):
    """Return the FLOPs of Hessian estimates per training token of a run with these `settings`, a dict, whose forward
    and backward take `flops_per_token`. An estimate costs the hook's `cost` × those of hessian_batch_size sequences.
    """
    hook, iterations = row(settings['optimizer_name']).hook, settings['max_iters']
    per_iteration = hook.estimates(settings['hessian_interval'], iterations) / iterations
    share = settings['hessian_batch_size'] / settings['total_batch_size']
    return hook.cost * share * per_iteration * flops_per_token


def is_matrix(p):
    """Return whether two dimensions of `p` or more have several entries, so that a gain of shape (n_head, 1, 1) is a
    vector. nanoGPT decays whatever has two dimensions."""
    return sum(n > 1 for n in p.shape) > 1


def parameter_groups(model, weight_decay):
    """Return the param groups of the embeddings (and an untied head) and of the blocks' matrices, both with weight
    decay (None: the optimizer's own), and of norms, biases and other vectors, without.

    A group's `lr_scale` multiplies its learning rate. Muon, which is for hidden layers, takes the matrices of groups of
    the `role` 'hidden' only.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    in_blocks = set(model.transformer.h.parameters())
    hidden = [p for p in trained if is_matrix(p) and p in in_blocks]
    others = [p for p in trained if is_matrix(p) and p not in in_blocks]
    vectors = [p for p in trained if not is_matrix(p)]
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
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two for '.x' and for ''
        raise SystemExit(f'--optimizer_name={path}: cannot be imported ({one_line(error)}); check its name, or install '
                         'what is missing') from None


def parse_arguments(text, path):
    """Return the setting optimizer_args, 'nesterov=True, momentum=0.9' in Python literals, as a dict. SystemExit unless
    they are arguments of the class `path`, because some classes take any."""
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


def placeholders(config):
    """Return 0, or False, for each setting that some row has and that has no default, as its value for other rows."""
    names = all_settings()
    return {key: one.type() for key, one in config.declared.items() if key in names and one.default is None}


def defaults_of(config):
    """Return the settings of a run of this optimizer whose files name none."""
    return {**placeholders(config), **row(config.optimizer_name).settings, **config.defaults}


def fill_settings(config):
    """Fill in the settings of the optimizer, hessian_batch_size for this run's mini-batch."""
    name, chosen = config.optimizer_name, row(config.optimizer_name)
    settings = dict(chosen.settings)
    if 'hessian_batch_size' in settings:
        size, total = settings['hessian_batch_size'], config.total_batch_size
        if chosen.scale_hessian_batch:
            size = max(1, size * total // 480)
        settings['hessian_batch_size'] = min(size, total)
    config.fill(settings, f'optimizer {name}')
    config.fill({key: value for key, value in placeholders(config).items() if key not in settings},
                f'not a setting of {name}')
    # In the paper AdamW and Lion divide attention logits by the layer index from 24 layers (355M) up.
    config.fill(dict(scale_attn_by_inverse_layer_idx=chosen.scales_attention and config.n_layer >= 24),
                f'{name}, {config.n_layer} layers')


def fill_learning_rate(config):
    """Fill in the peak learning rate of training from scratch; SystemExit when the table has none."""
    lr, source = peak_learning_rate(config.optimizer_name, config.model_size)
    if lr is None:
        raise SystemExit(f'{source}; set --learning_rate')
    config.fill(dict(learning_rate=lr), source)


def peak_learning_rate(optimizer_name, model_size):
    """Return (learning rate, where it stands) in the table, or (None, why not)."""
    chosen = row(optimizer_name)
    if not isinstance(chosen.learning_rates, dict):
        return chosen.learning_rates, f'{chosen.source}: {optimizer_name}'
    source = 'our table' if model_size == 'tiny' else chosen.source
    if model_size not in chosen.learning_rates:
        return None, f'{source} has no learning rate for {optimizer_name} at {model_size}'
    return chosen.learning_rates[model_size], f'{source}: {optimizer_name}, {model_size}'


def fit_estimate(config, ranks):
    """Set hessian_batch_size and hessian_parts to the next values that fit the mini-batch and the ranks."""
    asked, parts, total = config.hessian_batch_size, config.hessian_parts, config.total_batch_size
    size = math.ceil(min(asked, total) / ranks) * ranks
    if size != asked:
        config.set('hessian_batch_size', size, f'{asked} made to fit {total} sequences on {ranks} device(s)')
    fitting = fitting_parts(parts, size, config.batch_size, ranks, config.parallel != 'ddp')
    if fitting != parts:
        config.set('hessian_parts', fitting, f'{parts} made to fit {size} sequences on {ranks} device(s), at most '
                   f'{config.batch_size} sequences a part')


def check_settings(config):
    """SystemExit where a setting does not go with the optimizer. Hessian-vector products need the plain model."""
    name, chosen = config.optimizer_name, row(config.optimizer_name)
    config.require('parallel', chosen.shards or chosen.hook.hessian_products or config.parallel == 'ddp',
                   f'ddp for {name}, whose row in optimizers.py does not say shards=True')
    positive = {'eps', 'gamma', 'hessian_parts'} & chosen.settings.keys() if name in OPTIMIZERS else set()
    if issubclass(chosen.hook, HessianHook):
        positive |= {'hessian_interval', 'hessian_batch_size'}
    for key in (*placeholders(config), 'optimizer_args'):
        if key in positive:
            config.require(key, config.values[key] > 0, f'above 0 for {name}')
        if key not in chosen.settings and config.sources[key] == 'flag':
            raise SystemExit(f'--{key} has no effect with {name}; leave it out')
    if chosen.hook.hessian_products:
        for key, only in dict(parallel='ddp', activation_checkpointing=False).items():
            config.require(key, config.values[key] == only,
                           f'{only} for {name} (Hessian-vector products), or use sophiag')


# ----------------------------------------------------------------------------------------------------------------------
# Metrics


# Modules of a GPT → the kind of their tensors in metrics
KINDS = dict(attn='attention', mlp='mlp', wte='embedding', wpe='embedding', lm_head='embedding')


def optimizer_metrics(optimizer, model):
    """Return metrics as 0-d tensors: the ℓ2 norms of m and h, `momentum_norm` and `hessian_norm`, if the state has them
    in the dtype of the parameters, as `exp_avg` or `momentum_buffer` and as `hessian`; that of h also by the kind of
    tensor, `hessian_norm/KIND`; and the result of the optimizer's method `metrics()`, if it has one (Sophia:
    update_unclipped)."""
    found = {}
    for metric, keys in dict(momentum_norm=('exp_avg', 'momentum_buffer'), hessian_norm=('hessian',)).items():
        states = [(p, optimizer.state.get(p, {})) for p in optim.parameters(optimizer)]
        held = [(p, state[key]) for p, state in states for key in keys if isinstance(state.get(key), torch.Tensor)]
        # In another dtype it may be a code, such as int8 with a scale.
        if held and all(tensor.dtype in (p.dtype, torch.float32) for p, tensor in held):
            found[metric] = optim.global_norm([tensor for _, tensor in held])
    kinds = {}
    for name, p in model.named_parameters() if 'hessian_norm' in found else ():
        if 'hessian' in optimizer.state.get(p, {}):
            kinds.setdefault(kind_of(name, p), []).append(optimizer.state[p]['hessian'])
    found.update({f'hessian_norm/{kind}': optim.global_norm(hs) for kind, hs in sorted(kinds.items())})
    return found | (optimizer.metrics() if hasattr(optimizer, 'metrics') else {})


def kind_of(name, p):
    """Return the kind of a GPT's parameter: norm (any vector), attention, mlp, embedding (an untied head, too); or
    other, in a module whose name is not model.py's."""
    if not is_matrix(p):
        return 'norm'
    return next((KINDS[part] for part in name.split('.') if part in KINDS), 'other')
