"""The optimizers a run can choose from: the baselines Lion and AdaHessian, the ablations of Sophia, and one table with
how each optimizer is built, its settings, its learning rates and its Hessian hook.

To add an optimizer, add a row to OPTIMIZERS. One of a library needs none: --optimizer_name=LIBRARY:CLASS.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim import AdamW

from hessian import AdaHessianHook, EmpiricalFisherHook, FirstOrder, GNBHook, Hook, HutchinsonHook
from runtime import hf, optim
from runtime.distributed import full_tensor
from runtime.start import finetunes
from sophia import GuardedOptimizer, HessianOptimizer, Sophia, local, parameters, scalar

# ----------------------------------------------------------------------------------------------------------------------
# Baselines


class Lion(GuardedOptimizer):
    """Lion (Chen et al., 2023): θ ← θ − lr·λ·θ;  θ ← θ − lr·sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g.

    Arguments as for `Sophia`. State per parameter: `exp_avg` (m).
    """

    def __init__(self, params, lr, betas=(0.95, 0.98), weight_decay=0.2, *, maximize=False, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize), nonfinite)

    def update(self, group, params, grads):
        lr, (beta1, beta2) = scalar(group['lr']), group['betas']
        # PyTorch 2.11 lacks some of these operators for DTensors; each rank updates its shards.
        ms, params, grads = local(self.buffers(params, 'exp_avg')), local(params), local(grads)
        update = torch._foreach_lerp(ms, grads, 1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)
        torch._foreach_lerp_(ms, grads, 1 - beta2)


class AdaHessian(HessianOptimizer):
    """AdaHessian (Yao et al., 2021) as the paper compares with it: Adam with the Hessian's diagonal instead of the
    gradient in the second moment, θ ← θ − lr·m̂ / (√v̂ + ε), v the EMA of ĥ², both bias-corrected, decoupled weight
    decay, no clipping.

    ĥ comes through `update_hessian`, as for `Sophia`; there is no averaging over blocks of coordinates. Arguments as
    for `Sophia`. State per parameter: `exp_avg` (m), `hessian` (v), and how often each was updated: `step`,
    `hessian_step` (0-d tensors on the CPU). RuntimeError in a step before the first estimate, when v is 0.
    """

    def __init__(self, params, lr, betas=(0.92, 0.99), eps=1e-8, weight_decay=1e-3, *, maximize=False,
                 nonfinite='raise'):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize),
                         nonfinite)

    def averaged(self, h_hat):
        return h_hat.square()

    def update(self, group, params, grads):
        lr, (beta1, beta2) = scalar(group['lr']), group['betas']
        if any('hessian_step' not in self.state.get(p, ()) for p in params):
            raise RuntimeError('AdaHessian.step() before an estimate of every Hessian: call update_hessian() first')
        ms, vs = self.buffers(params, 'exp_avg'), self.buffers(params, 'hessian')
        torch._foreach_lerp_(ms, grads, 1 - beta1)
        for p, m, v in zip(params, ms, vs):
            step, hessian_step = self.increment(p, 'step'), torch.as_tensor(self.state[p]['hessian_step']).double()
            denominator = (v / (1 - beta2 ** hessian_step)).sqrt_().add_(group['eps'])
            p.mul_(1 - lr * group['weight_decay'])
            p.sub_(m / denominator * (lr / (1 - beta1 ** step)))

    def update_ema(self, group, params, targets):
        super().update_ema(group, params, targets)
        for p in params:
            self.increment(p, 'hessian_step')

    def increment(self, p, key):
        """Adds 1 to the counter `key` of p, a float32 tensor (torch.compile would specialize on a number); returns it
        as float64."""
        self.state[p][key] = torch.as_tensor(self.state[p].get(key, 0.0), dtype=torch.float32) + 1
        return self.state[p][key].double()


# ----------------------------------------------------------------------------------------------------------------------
# Ablations (section "Ablation Study")


class SophiaUnclipped(Sophia):
    """The ablation "GNB without clipping": ε alone bounds the update."""
    rho = math.inf


class SophiaSquared(Sophia):
    """The ablation AH+clip: the state `hessian` is the EMA of ĥ², as AdaHessian's, and the update takes its root."""

    def averaged(self, h_hat):
        return h_hat.square()

    def curvature(self, group, hs):
        return torch._foreach_sqrt(super().curvature(group, hs))


class SophiaTensorMean(Sophia):
    """The ablation "mean of h": each coordinate is divided by the mean of h over its tensor, so that h says how large
    the steps of a tensor are but does not tell its coordinates apart. Not in the paper."""

    def curvature(self, group, hs):
        return [h.mean().expand_as(h) for h in super().curvature(group, hs)]


class Normalize(GuardedOptimizer):
    """The ablation Normalize: θ ← θ − lr·λ·θ;  θ ← θ − lr·m / max(rms(m), ε), the root mean square of each tensor.

    beta1: of m; the other arguments as for `Sophia`. State per parameter: `exp_avg` (m).
    """

    def __init__(self, params, lr, beta1=0.96, eps=1e-12, weight_decay=0.2, *, maximize=False, nonfinite='raise'):
        super().__init__(params, dict(lr=lr, beta1=beta1, eps=eps, weight_decay=weight_decay, maximize=maximize),
                         nonfinite)

    def update(self, group, params, grads):
        lr, ms = scalar(group['lr']), self.buffers(params, 'exp_avg')
        params, grads, shards = local(params), local(grads), local(ms)
        torch._foreach_lerp_(shards, grads, 1 - group['beta1'])
        # The norm of a tensor takes all of its shards; every other line is about one coordinate at a time.
        norms = [full_tensor(norm) for norm in torch._foreach_norm(ms)]
        rms = [norm.div_(m.numel() ** 0.5).clamp_(min=group['eps']) for norm, m in zip(norms, ms)]
        update = torch._foreach_div(shards, rms)
        torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
        torch._foreach_mul_(update, -lr)
        torch._foreach_add_(params, update)


# ----------------------------------------------------------------------------------------------------------------------
# Muon


def muon(groups, s):
    """Muon for hidden matrices, with updates as large as AdamW's, and AdamW for all other parameters."""
    hidden = [group for group in groups if group['role'] == 'hidden']
    rest = [group for group in groups if group['role'] != 'hidden']
    build = optim.library_builder('torch:Muon', lambda s: dict(momentum=s.beta1, weight_decay=s.weight_decay,
                                                               adjust_lr_fn='match_rms_adamw'))
    return optim.Together(build(hidden, s), AdamW(rest, lr=s.learning_rate, betas=(0.9, s.beta2), eps=s.eps,
                                                  weight_decay=s.weight_decay, fused=True))


# ----------------------------------------------------------------------------------------------------------------------
# The table: section "Hyperparamter Tuning" of the paper for what it trains; a comment says where it is silent.


@dataclass(frozen=True)
class Row:
    """An optimizer of the table.

    build: function of (param groups, settings) → torch.optim.Optimizer; the settings are those of train.py, as
        attributes. Gradients are finite and clipped when it steps.
    settings: what train.py's settings are unless a config file or a flag says otherwise. hessian_batch_size stands for
        a mini-batch of 480 sequences.
    learning_rates: peak learning rate by model size; or one for all sizes.
    source: where the learning rates come from.
    hook: what it needs of an iteration besides the gradient.
    scale_hessian_batch: whether hessian_batch_size keeps its share of the mini-batch where that is not 480 sequences.
    scales_attention: whether the paper divides its attention logits by the layer index, from 24 layers up.
    roles: None, or what the param group of each role has besides its parameters, an `lr_scale` for instance; see
        `parameter_groups`.
    library: the class, 'LIBRARY:CLASS', of an optimizer that takes optimizer_args.
    shards: whether it can update sharded parameters, each rank its part.
    """
    build: Callable
    settings: dict
    learning_rates: dict | float
    source: str = 'Table 3'
    hook: type[Hook] = FirstOrder
    scale_hessian_batch: bool = True
    scales_attention: bool = False
    roles: dict | None = None
    library: str = ''
    shards: bool = True


def betas(s):
    """(β1, β2) of the settings `s`."""
    return s.beta1, s.beta2


def library_row(path, settings, arguments_of, learning_rates=None, source='our table', shards=False, sharded=None,
                **more):
    """The row of the optimizer `path`, 'LIBRARY:CLASS', built with what `arguments_of` makes of the settings, and for
    sharded parameters with the arguments `sharded` as well."""
    return Row(optim.library_builder(path, arguments_of, sharded), settings, learning_rates or {}, source, library=path,
               shards=shards, **more)


def adamw(groups, s):
    return AdamW(groups, lr=s.learning_rate, betas=betas(s), eps=s.eps, weight_decay=s.weight_decay, fused=True)


def lion(groups, s):
    return Lion(groups, s.learning_rate, betas(s), s.weight_decay, nonfinite='ignore')


def sign_momentum(groups, s):
    """Every step of Sophia with h = 0; or Lion with a single β."""
    return Lion(groups, s.learning_rate, (s.beta1, s.beta1), s.weight_decay, nonfinite='ignore')


def normalize(groups, s):
    return Normalize(groups, s.learning_rate, s.beta1, s.eps, s.weight_decay, nonfinite='ignore')


def adahessian(groups, s):
    return AdaHessian(groups, s.learning_rate, betas(s), s.eps, s.weight_decay, nonfinite='ignore')


def sophia(groups, s, cls=Sophia):
    return cls(groups, s.learning_rate, betas(s), s.gamma, s.eps, s.weight_decay, nonfinite='ignore',
               bias_correction=s.hessian_bias_correction, compile=s.compile)


# Peak learning rates, Table 3. 'tiny' is ours (docs/small-runs.md).
ADAMW_LR = {'tiny': 1.2e-2, '30M': 1.2e-3, '125M': 6e-4, '355M': 3e-4, '540M': 3e-4, '770M': 2e-4, '1.5B': 1.5e-4,
            '6.6B': 1.2e-4}
LION_LR = {'tiny': 1e-3, '30M': 4e-4, '125M': 1.5e-4, '355M': 6e-5}
SOPHIA_H_LR = {'tiny': 2e-3, '30M': 1e-3, '125M': 6e-4, '355M': 4e-4, '540M': 4e-4, '770M': 3e-4}
SOPHIA_G_LR = SOPHIA_H_LR | {'1.5B': 1.2e-4, '6.6B': 6e-5}
# AdaHessian's step is a fraction of a Newton step, not one of a size that the learning rate fixes: one for all models.
# The paper does not state it; ours is the best of 0.1, 0.3 and 1 with the model 'tiny'.
ADAHESSIAN_LR = 0.3

SOPHIA = dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, hessian_interval=10, hessian_sequences='own',
              hessian_bias_correction=False)
SOPHIA_G = dict(SOPHIA, gamma=0.05, hessian_batch_size=240)
SOPHIA_H = dict(SOPHIA, gamma=0.01, hessian_batch_size=32)

OPTIMIZERS = {
    'adamw': Row(adamw, dict(beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8), ADAMW_LR, scales_attention=True),
    'lion': Row(lion, dict(beta1=0.95, beta2=0.98, weight_decay=0.2), LION_LR, scales_attention=True),
    # Weight decay, ε and the whole mini-batch for the estimate are left to us. The decay per step is learning rate × λ,
    # and the learning rate is hundreds of times AdamW's.
    'adahessian': Row(adahessian, dict(beta1=0.92, beta2=0.99, weight_decay=1e-3, eps=1e-8, hessian_interval=1,
                                       hessian_batch_size=480, hessian_sequences='own'),
                      ADAHESSIAN_LR, 'our table', AdaHessianHook),
    'sophiag': Row(sophia, SOPHIA_G, SOPHIA_G_LR, hook=GNBHook),
    'sophiah': Row(sophia, SOPHIA_H, SOPHIA_H_LR, hook=HutchinsonHook, scale_hessian_batch=False),
    # Ablations. The paper states no learning rate for them: that of the optimizer they are closest to. Empirical Fisher
    # and AH+clip: k = 10, γ "found by grid search" but not stated, so Sophia's own here.
    'ef_clip': Row(sophia, SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', EmpiricalFisherHook),
    'ah_clip': Row(partial(sophia, cls=SophiaSquared), SOPHIA_H, SOPHIA_H_LR, 'Table 3, sophiah', hook=HutchinsonHook,
                   scale_hessian_batch=False),
    # Clip and Normalize have no preconditioner; β1 is left to us. ε only bounds Normalize's denominator.
    'clip': Row(sign_momentum, dict(beta1=0.96, weight_decay=0.2), LION_LR, 'Table 3, lion'),
    'normalize': Row(normalize, dict(beta1=0.96, weight_decay=0.2, eps=1e-12), LION_LR, 'Table 3, lion'),
    # k = 2 is the paper's; without the clip ε has to bound the step where h is tiny, its value is left to us.
    'gnb_noclip': Row(partial(sophia, cls=SophiaUnclipped), dict(SOPHIA_G, hessian_interval=2, eps=1e-4), SOPHIA_G_LR,
                      'Table 3, sophiag', GNBHook),
    # Whether h matters coordinate by coordinate. The mean would be that of a shard only, where tensors are sharded.
    'gnb_mean': Row(partial(sophia, cls=SophiaTensorMean), SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', GNBHook,
                    shards=False),
    # Baselines that the paper does not have. Settings are the libraries' defaults, but for weight decay, AdamW's. Only
    # rows whose updates are scaled to AdamW's size take over its learning rates.
    # Muon's matrix products of shards are those of the whole matrix, which DTensor gathers for them.
    'muon': Row(muon, dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8), ADAMW_LR | {'tiny': 4.8e-2},
                'Table 3, adamw', roles=dict(hidden={}, embedding={}, vector={}), library='torch:Muon'),
    'normuon': library_row(
        'pytorch_optimizer:NorMuon', dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8),
        lambda s: dict(momentum=s.beta1, beta2=s.beta2, update_scale='match_rms', adamw_lr=s.learning_rate,
                       adamw_betas=(0.9, 0.95), adamw_eps=s.eps), ADAMW_LR, 'Table 3, adamw',
        roles=dict(hidden=dict(use_muon=True), embedding=dict(use_muon=False), vector=dict(use_muon=False))),
    'soap': library_row('pytorch_optimizer:SOAP', dict(beta1=0.95, beta2=0.95, weight_decay=0.1, eps=1e-8),
                        lambda s: dict(betas=betas(s), eps=s.eps), {'tiny': 2.4e-2}),
    'ademamix': library_row('pytorch_optimizer:AdEMAMix', dict(beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8),
                            lambda s: dict(betas=(*betas(s), 0.9999), eps=s.eps, weight_decouple=True), shards=True),
    # Its variance reduction is for matrices; AdamW updates norms and biases, at the same learning rate. DTensor lacks
    # some of PyTorch's operators on lists of tensors, which ADOPT would use as well.
    'mars': library_row('pytorch_optimizer:MARS', dict(beta1=0.95, beta2=0.99, weight_decay=0.1, eps=1e-8),
                        lambda s: dict(betas=betas(s), eps=s.eps, lr_1d=s.learning_rate, weight_decay_1d=0.0),
                        shards=True, sharded=dict(foreach=False)),
    'adopt': library_row('pytorch_optimizer:ADOPT', dict(beta1=0.9, beta2=0.9999, weight_decay=0.1, eps=1e-6),
                         lambda s: dict(betas=betas(s), eps=s.eps, weight_decouple=True),
                         shards=True, sharded=dict(foreach=False)),
    'schedulefree': library_row('schedulefree:AdamWScheduleFree', dict(
        beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, schedule='constant'),
        lambda s: dict(betas=betas(s), eps=s.eps), shards=True),
    # Prodigy finds the size of its steps; the learning rate is a factor of that.
    'prodigy': library_row('pytorch_optimizer:Prodigy', dict(beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8),
                           lambda s: dict(betas=betas(s), eps=s.eps), 1.0, 'its paper'),
    'signum': library_row('pytorch_optimizer:SignSGD', dict(beta1=0.9, weight_decay=0.1),
                          lambda s: dict(momentum=s.beta1), shards=True, sharded=dict(foreach=False)),
}
# Every optimizer setting of train.py, at its value for an optimizer that does not use it.
NEUTRAL = dict(beta1=0.0, beta2=0.0, weight_decay=0.0, eps=0.0, gamma=0.0, hessian_interval=0, hessian_batch_size=0,
               hessian_sequences='own', hessian_bias_correction=False, optimizer_args='')


def row(optimizer_name):
    """The row of an optimizer, in the table or of a library; SystemExit with one line when there is none."""
    if ':' in optimizer_name:
        return unlisted_row(optimizer_name)
    if optimizer_name not in OPTIMIZERS:
        hint = optim.nearest(optimizer_name, OPTIMIZERS, f'choose from {", ".join(OPTIMIZERS)}, or write LIBRARY:CLASS')
        raise SystemExit(f'--optimizer_name={optimizer_name}: no such optimizer; {hint}')
    return OPTIMIZERS[optimizer_name]


def unlisted_row(path):
    """A row for the optimizer `path`, 'LIBRARY:CLASS': its defaults, as settings where we have such."""
    cls = optim.library_class(path, path)
    taken = optim.settings_of({name: p.default for name, p in inspect.signature(cls).parameters.items()})

    def arguments_of(s):
        arguments = {name: getattr(s, name) for name in ('eps', 'weight_decay') if name in taken}
        return {**arguments, 'betas': betas(s)} if 'beta1' in taken else arguments

    # torch.optim's work on each coordinate alone, or know of DTensors, but for these.
    shards = path.startswith('torch:') and path not in ('torch:Muon', 'torch:Adafactor')
    return library_row(path, taken, arguments_of, shards=shards)


def build_optimizer(name, params, *, lr, compile=False, **settings):
    """The optimizer called `name` in the table, on `params` (parameters or param groups).

    For an optimizer that treats parameters by their role, param groups are those of `parameter_groups`; of parameters
    without groups, each matrix is taken for a hidden one.

    Settings (the keys of NEUTRAL) that are None or not given are the table's; `compile` fuses Sophia's update by
    torch.compile. Gradients are taken as finite: train_step has looked before the update.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if unknown := given.keys() - NEUTRAL.keys():
        raise ValueError(f'build_optimizer: no setting {", ".join(sorted(unknown))}')
    chosen, params = row(name), list(params)
    if chosen.roles and not any(isinstance(group, dict) for group in params):
        params = role_groups(chosen.roles, params, {id(p) for p in params})
    optimizer = chosen.build(params, SimpleNamespace(**{**NEUTRAL, **chosen.settings, **given, 'learning_rate': lr,
                                                        'compile': compile, 'optimizer_name': name}))
    for group in optimizer.param_groups:  # a builder's own learning rate of a group follows the schedule, too
        if group['lr'] != lr and lr:
            group.setdefault('lr_scale', group['lr'] / lr)
    if not chosen.library:  # a library may count in such entries
        optimizer.as_built = set(optimizer.defaults)  # which a checkpoint does not overrule at resume
    optim.back_to_training(optimizer)  # schedule-free ones start in evaluation mode
    return optimizer


def build_hook(name, model, optimizer, **options):
    """The Hessian hook of the optimizer called `name`; `options` as for `hessian.HessianHook`."""
    return row(name).hook(model, optimizer, **options)


def parameter_groups(model, weight_decay, optimizer_name='adamw'):
    """Two param groups: weight decay on matrices (2-D and up), none on norms and biases.

    Three for an optimizer that treats parameters by their role: 'hidden', the matrices of the blocks; 'embedding', all
    others, i.e. embeddings and head; 'vector', norms and biases. Each has its `role`, and what the row says of that.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    decayed = {id(p) for p in params if p.dim() >= 2}
    groups = [{'params': params}]
    if roles := row(optimizer_name).roles:
        groups = role_groups(roles, params, {id(p) for p in model.transformer.h.parameters()})
    found = []
    for group in groups:
        halves = [{'weight_decay': weight_decay if decay else 0.0, **group,
                   'params': [p for p in group['params'] if (id(p) in decayed) == decay]} for decay in (True, False)]
        found += [half for half in halves if half['params']] or halves[:1]
    return found


def role_groups(roles, params, hidden):
    """The `params` as a param group for each role, with what `roles` says of it; `hidden` has the ids of those in the
    blocks."""
    members = dict(hidden=[], embedding=[], vector=[])
    for p in params:
        members['vector' if p.dim() < 2 else 'hidden' if p.dim() == 2 and id(p) in hidden else 'embedding'].append(p)
    return [{'params': members[role], 'role': role, **roles[role]} for role in members]


# ----------------------------------------------------------------------------------------------------------------------
# What the table says of a run: for `configurator.derive`, each (settings, their source)


def unused_settings(config):
    """Every optimizer setting at its value without effect, for those that the optimizer does not have."""
    settings = {key: value for key, value in NEUTRAL.items() if key != 'optimizer_args'}
    return settings, f'not a setting of {config.optimizer_name}'


def optimizer_settings(config):
    """The settings that an optimizer has. hessian_batch_size keeps its share of the mini-batch; Hutchinson's 32
    sequences stay 32 where that fits."""
    chosen = row(config.optimizer_name)
    settings = dict(chosen.settings)
    if chosen.library and config.optimizer_args:
        cls = optim.library_class(chosen.library, config.optimizer_name)
        given = optim.settings_of(optim.parse_arguments(config.optimizer_args, cls))
        for key in given.keys() & config.given:
            raise SystemExit(f'--optimizer_args={config.optimizer_args}: --{key} says the same; leave out one of them')
        settings.update(given)
    if 'hessian_batch_size' in settings:
        size, total = settings['hessian_batch_size'], config.total_batch_size
        settings['hessian_batch_size'] = min(max(1, size * total // 480) if chosen.scale_hessian_batch else size, total)
    return settings, f'optimizer {config.optimizer_name}'


def peak_learning_rate(optimizer_name, model_size):
    """(learning rate, where it stands) in the table, or (None, why not)."""
    chosen = row(optimizer_name)
    if not isinstance(chosen.learning_rates, dict):
        return chosen.learning_rates, f'{chosen.source}: {optimizer_name}'
    source = 'our table' if model_size == 'tiny' else chosen.source
    if model_size not in chosen.learning_rates:
        return None, f'{source} has no learning rate for {optimizer_name} at {model_size}'
    return chosen.learning_rates[model_size], f'{source}: {optimizer_name}, {model_size}'


def learning_rate_settings(config):
    """The peak learning rate; SystemExit with one line where the table has none. It is about training from scratch."""
    scratch = not finetunes(config)
    config.require('init_from', scratch or config.init_from in hf.HUB_MODELS or Path(config.init_from).is_dir(),
                   f'scratch, resume, auto, {", ".join(hf.HUB_MODELS)} or a Hugging Face folder')
    lr, source = peak_learning_rate(config.optimizer_name, config.model_size)
    if not scratch and not config.eval_only:
        lr, source = None, f'Table 3 is for training from scratch, not for init_from = {config.init_from}'
    if lr is None and 'learning_rate' not in config.given:
        raise SystemExit(f'{source}; set --learning_rate')
    return dict(learning_rate=lr) if lr is not None else {}, source


def attention_settings(config):
    """Whether the paper divides attention logits by the layer index: for AdamW and Lion from 355M (24 layers) up."""
    scales = row(config.optimizer_name).scales_attention and config.n_layer >= 24
    return dict(scale_attn_by_inverse_layer_idx=scales), f'{config.optimizer_name}, {config.n_layer} layers'


def check_settings(config):
    """SystemExit with one line where a setting does not go with the optimizer: ε and those of the Hessian must be
    above 0 where it has them, and Hessian-vector products need the plain model."""
    name, chosen = config.optimizer_name, row(config.optimizer_name)
    if chosen.library:
        optim.library_class(chosen.library, name)
    config.require('parallel', chosen.shards or config.parallel == 'ddp',
                   f'ddp for {name}, which is not known to work on parts of a parameter')
    for key in NEUTRAL:
        if key in ('eps', 'gamma', 'hessian_interval', 'hessian_batch_size') and key in chosen.settings:
            config.require(key, config.values[key] > 0, f'above 0 for {name}')
        used = key in chosen.settings or key == 'optimizer_args' and chosen.library
        if config.sources[key] == 'flag' and not used and config.values[key]:
            raise SystemExit(f'--{key} has no effect with {name}; leave it out')
    if chosen.hook.hessian_products:
        for key, only in dict(parallel='ddp', activation_checkpointing=False).items():
            config.require(key, config.values[key] == only,
                           f'{only} for {name} (Hessian-vector products), or use sophiag')


# ----------------------------------------------------------------------------------------------------------------------
# What the log says of an optimizer

# The names under which optimizers keep an EMA of the gradient.
MOMENTUM = ('exp_avg', 'momentum_buffer')


def optimizer_metrics(optimizer):
    """What the optimizer's state says of the run, as 0-d tensors: `momentum_norm` (ℓ2 of m) and, where there is an h,
    `hessian_norm` (ℓ2 of h) and `update_unclipped`."""
    states, found = [optimizer.state.get(p, {}) for p in parameters(optimizer)], {}
    for name, keys in [('momentum_norm', MOMENTUM), ('hessian_norm', ('hessian',))]:
        if tensors := [state[key] for state in states for key in keys if isinstance(state.get(key), torch.Tensor)]:
            found[name] = optim.global_norm(tensors)
    if isinstance(optimizer, Sophia) and (unclipped := optimizer.unclipped_fraction()) is not None:
        found['update_unclipped'] = unclipped
    return found
