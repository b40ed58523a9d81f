"""Checks of what training takes from the model and the optimizer: each can be deleted without changing a run.

They stop a run in one line where it would hang, could not be resumed, or would compute something else unseen.
"""

import contextlib
import math
from dataclasses import asdict

import torch

from lifecycle.run import same_buffers, warn_of_unsaved
from loss import Losses, cross_entropy
from runtime import optimizer_state
from runtime.checkpoint import check_plain, parameter_names
from runtime.distributed import one_message
from runtime.files import one_line, warn
from runtime.gpt import evaluation_mode
from runtime.optim import global_norm, parameters
from runtime.rng import seed_all

RUNAWAY = 25  # sees all 37 recorded runs of Sophia that pass ‖h‖ = 100, and three others, two with far too large a γ


def check_validation(val_data):
    """Stop the run unless the weights of the validation sets, with which val/loss is their mean, sum to 1."""
    total = sum(data.weight for data in val_data.values())
    if abs(total - 1) > 1e-9:
        raise SystemExit(f'open_dataset: the weights of the validation sets {", ".join(val_data)} sum to {total:g}, so '
                         'that val/loss would not be their mean; add a set with weight=0, or by --dataset=A:1,B:0')


def check_parameters(optimizer, model):
    """SystemExit unless the optimizer has all trained parameters of `model`, and that all in its lists and dicts."""
    mine, known = set(parameters(optimizer)), set(model.parameters())
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in mine]:
        raise SystemExit(f'{missing[0]}: is in no group of parameter_groups, so that it would not be trained; add it, '
                         'or freeze it with requires_grad_(False)')
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if any(isinstance(p, torch.nn.Parameter) and p not in known for p in values):
                raise SystemExit(f'{name or "GPT"}.{key}: holds parameters that the model does not know, so that they '
                                 'are neither trained nor saved; use nn.ParameterList or nn.ParameterDict')


@one_message()
def check_forward(run, sequences):
    """Stop the run before the first step when the forward pass of the model is not fit for training or estimates.

    Collective: every rank must call it. `sequences`: some of this rank. Changes none of these, no buffer, no gradient.
    """
    with same_buffers(run.raw_model):
        check_outputs(run, sequences[:2])  # a loss may compare sequences
        warn_of_leaks(run, sequences[:1, :-1])


def check_outputs(run, sequences):
    """Stop the run when the plain model does not return (logits, loss), changes what checkpoints hold of it, or masks
    what `check_masks` finds."""
    X, Y, masks = sequences[:, :-1].clone(), sequences[:, 1:].clone(), run.hessian.samples_labels
    before = shapes_of(run.raw_model)
    seed_all(run.config.seed)
    with eager(run), run.autocast, torch.set_grad_enabled(masks):
        outputs = run.raw_model(X, Y)
    if changed := dict(shapes_of(run.raw_model).items() ^ before.items()):
        raise SystemExit(f'model.py: GPT.forward makes or resizes the buffer {min(changed)}, so that no checkpoint '
                         'could be loaded; make it in the constructor, or with persistent=False')
    logits, loss = outputs[:2] if isinstance(outputs, (tuple, list)) and len(outputs) > 1 else (None, None)
    if getattr(logits, 'shape', ())[:2] != Y.shape or getattr(loss, 'shape', None) != ():
        raise SystemExit('model.py: with targets, GPT.forward must return the logits of all positions, (B, T, '
                         'vocab_size), and the mean loss, a 0-d tensor')
    warn_of_cross_entropy(run, logits[:1].detach(), sequences[:1, 1:])
    if masks:
        check_masks(run, Y, logits, loss, heads=len(outputs) - 1)
    if masks or run.hessian.hessian_products:
        warn_of_another_loss(run, sequences, loss)
    run.world.reshard(run.raw_model)


def warn_of_cross_entropy(run, logits, targets):
    """Warn where `loss.cross_entropy`, by which val/loss and sampled labels count, is not the plain one."""
    targets = targets.clamp(min=0)
    plain = -logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if run.world.is_master and not torch.allclose(cross_entropy(logits, targets), plain, 1e-3, 1e-3, equal_nan=True):
        warn('loss.py: cross_entropy is not the plain one, as val/loss and the estimates of Sophia-G must be; put '
             'smoothed labels and the like into `token_loss`')


def warn_of_another_loss(run, sequences, loss):
    """Warn where training's loss is not `loss`, the plain model's, to which the estimates and their checks keep."""
    seed_all(run.config.seed)  # for equal dropout
    with eager(run), run.autocast, torch.set_grad_enabled(loss.requires_grad):  # for the same kernels
        trained = Losses(run.raw_model)(sequences[:, :-1].clone(), sequences[:, 1:].clone())[1]
    trained, loss = trained.item(), loss.item()
    if run.world.is_master and not math.isclose(trained, loss, rel_tol=1e-5):
        warn(f'loss.py: Losses.forward returns {trained:.6g} where GPT.forward returns {loss:.6g}, which is all that '
             'Hessian estimates and their checks see; put what it adds into `token_loss` or GPT.forward')


def eager(run):
    """Return a context without compiled code: blocks compiled for one sequence are compiled again for any number, and
    so are slower."""
    return torch.compiler.set_stance('force_eager') if run.config.compile else contextlib.nullcontext()


@torch.no_grad()
def warn_of_leaks(run, X):
    """Warn where, in evaluation mode, logits depend on later tokens, such as by attention without a causal mask, or on
    chance: where other tokens after the first, the 15th or half of them change logits before. Warn where those of the
    last position depend on targets, without which a model samples. `X`: (1, T)."""
    def differ(a, b):
        # Without ids that are left out: -inf minus itself is NaN, and a norm with -1e9 hides the others
        a, b = (torch.where(logits > -1e4, logits.float(), 0) for logits in (a, b))
        return bool(((a - b).norm(dim=-1) > limit * a.norm(dim=-1)).any())

    # In bfloat16 rounding is below 1 %, and attention to 1,024 positions of a new model of width 128 changes 3 %.
    model, limit = run.raw_model, 1e-4 if run.config.dtype == 'float32' else 0.01
    half, leaks, depends, problem = max(1, X.size(1) // 2 - 1), False, False, ''
    with eager(run), run.autocast, evaluation_mode(model), filled(() if run.world.sharded else model.parameters()):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        logits = model(X.clone(), X.clone())[0][0]
        # Not where a chunk of an even size ends; the first is inside any prefix that is seen whole. More take seconds.
        for cut in sorted({1, min(15, half), half}):
            other = torch.cat([X[:, :cut], (X[:, cut:] + 1) % model.config.vocab_size], 1)
            # One after the other, because in one batch a statistic of the batch would change all
            leaks |= differ(logits[:cut], model(other.clone(), other.clone())[0][0, :cut])
        moved = [name for name, buffer in model.named_buffers() if not optimizer_state.equal(buffer, before.get(name))]
        try:
            depends = differ(logits[-1], model(X.clone())[0][0, -1])
        except Exception as error:  # whatever the model raises
            problem = one_line(error)
    run.world.reshard(model)
    if run.world.is_master and moved:
        warn(f'model.py: GPT.forward changes the buffer {moved[0]} in evaluation mode, too, so that results depend on '
             'eval_interval; change it only if self.training')
    if run.world.is_master and leaks:
        warn('model.py: in evaluation mode, later tokens or chance change the logits of earlier positions, so that '
             'losses may be far too low; use is_causal=True in attention, and self.training in dropout')
    elif run.world.is_master and problem:
        warn(f'model.py: GPT.forward fails without targets, as scripts/sample.py calls it ({problem})')
    elif run.world.is_master and depends:
        warn('model.py: GPT.forward returns other logits with targets than without, so that val/loss is not that of '
             'the model that scripts/sample.py uses; change logits before `if targets is None`, or, for training only, '
             'in `token_loss`')


@contextlib.contextmanager
def filled(parameters):
    """Fill matrices of zeros, such as output projections, with noise, because nothing is seen through them; empty them
    at the end. By `.data`, so that it counts as no change."""
    zeros = [p.data for p in parameters if p.dim() > 1 and not p.any()]
    for values in zeros:
        values.normal_(std=0.02)
    yield
    for values in zeros:
        values.zero_()


def shapes_of(model):
    """Return {name: shape} of what a checkpoint holds of `model`."""
    return {name: getattr(value, 'shape', None) for name, value in model.state_dict().items()}


def check_masks(run, targets, logits, loss, heads):
    """Stop the run when the training loss leaves out positions that count in `targets` after the forward pass.

    The labels that Gauss-Newton-Bartlett samples there would enter the estimate. A position is left out if the gradient
    of the loss in its logits is 0 throughout. Of several `heads` the estimate may take labels, too.
    """
    loss = run.scaler.scale(loss)
    gradient, = torch.autograd.grad(loss, logits, allow_unused=True, create_graph=True)
    if gradient is None:
        if run.world.is_master:
            warn('model.py: the loss is not a function of the logits that GPT.forward returns; make sure that what it '
                 'masks it sets to -1 in targets, in place')
        return
    left_out = int(run.world.sum(((targets >= 0) & (gradient == 0).all(-1)).sum()))
    if left_out:
        raise SystemExit(f'model.py: GPT.forward leaves {left_out} of {targets.numel() * run.world.size} positions out '
                         'of the loss whose targets are not -1, so the Hessian estimate would take them; mask them in '
                         'place (targets[…] = -1), see docs/hacking.md, "Another loss"')
    if heads == 1 and not run.world.sharded:  # FSDP's backward communicates
        warn_of_terms(run, logits, loss, gradient.detach())
    warn_of_weights(run, targets >= 0, logits, gradient)


def warn_of_terms(run, logits, loss, gradient):
    """Warn where the loss has terms that are not functions of the logits, which Gauss-Newton-Bartlett does not see.
    `gradient`: that of the loss in the logits."""
    whole, seen = (torch.autograd.grad(output, run.params, weight, retain_graph=True, materialize_grads=True)
                   for output, weight in ((loss, None), (logits, gradient)))
    share = global_norm(torch._foreach_sub(whole, seen)) / global_norm(whole)
    if run.world.is_master and share > 0.01:
        warn(f'model.py: terms of the loss that are not functions of the logits make {share:.0%} of its gradient; '
             'the Hessian estimate does not see them, so h may be too small; see docs/hacking.md, "Another loss"')


def warn_of_weights(run, counts, logits, gradient):
    """Warn where predictions have weights in the training loss, whose Hessian in the logits is then larger or smaller
    than the plain cross-entropy's, which Gauss-Newton-Bartlett estimates; or another one, as of adjusted logits.

    Labels, smoothed, noisy or a teacher's, do not change that Hessian. `counts`: the positions in the loss, (B, T);
    `gradient`: that of the scaled loss, with a graph. Collective: FSDP's hooks on the logits communicate.
    """
    signs = 1 - 2 * (torch.arange(logits.size(-1), device=logits.device) % 2).to(logits.dtype)
    try:
        product, = torch.autograd.grad(gradient, logits, signs.expand_as(logits))
    except RuntimeError:  # a loss without a second derivative
        return
    product, signs = product.float() / run.scaler.get_scale() * counts.sum(), signs.float()
    p = logits.detach().float().softmax(-1)
    plain = p * (signs - (p @ signs).unsqueeze(-1))  # the same product of the plain loss
    counts = counts & (plain @ signs > 0.01)  # a trained model may be sure of a label
    if not counts.any():
        return
    weights, squares = product @ signs / (plain @ signs), product.norm(dim=-1).square()
    rest = squares - 2 * weights * torch.linalg.vecdot(product, plain) + (weights * plain.norm(dim=-1)).square()
    weights, share = weights[counts], (rest[counts].sum() / squares[counts].sum()).clamp(min=0).sqrt().item()
    if run.world.is_master and share > 0.1:
        warn(f'model.py: {share:.0%} of the Hessian of the loss in the logits is not that of a cross-entropy of the '
             'logits that GPT.forward returns, from which Sophia-G draws labels; return those that the loss is of')
        return
    mean = round(weights.mean().item(), 2)  # which few predictions may change
    low, high = (round(weights.quantile(q).item(), 2) for q in (0.05, 0.95))
    if run.world.is_master and not (0.9 <= low <= high <= 1.1 and 0.9 <= mean <= 1.1):
        warn(f'model.py: predictions have weights of {weights.min():.2g} to {weights.max():.2g} in the loss, which the '
             f'Hessian estimate does not see; multiply --gamma by their mean, {mean:g}, and see docs/hacking.md, '
             '"Another loss"')


def warn_of_runaway(run, metrics):
    """Print a warning when Sophia's h runs away (records/sharpening): when ‖h‖, corrected for its start at 0, is
    RUNAWAY times its lowest value since a tenth of the run, which `state.lowest_hessian_norm` keeps.

    metrics: the dict of a logged step.
    """
    c, state = run.config, run.state
    measured = {'update_unclipped', 'hessian_norm'} <= metrics.keys()
    if not measured or not c.hessian_interval or state.iter < c.max_iters / 10:
        return
    norm = metrics['hessian_norm'] / (1 - c.beta2 ** (state.iter // c.hessian_interval + 1))
    if norm == 0 and state.lowest_hessian_norm < math.inf:
        run.log.print('warning: h has become 0, so that updates are sign momentum until the next estimate')
        state.lowest_hessian_norm = math.inf
    if norm > RUNAWAY * state.lowest_hessian_norm:
        growth = norm / state.lowest_hessian_norm
        run.log.print(f'warning: the norm of h is {growth:.0f} times its lowest and runs away; begin again with '
                      '--optimizer_name=sophiag_clipped, or, also at an earlier checkpoint, with a lower --gamma or '
                      '--learning_rate, see docs/running.md')
        state.lowest_hessian_norm = math.inf  # so that it is said again only after as much growth again
    state.lowest_hessian_norm = min(state.lowest_hessian_norm, norm or math.inf)  # 0: no estimate was finite yet


def check_first_update(run, step):
    """SystemExit when no checkpoint could hold the state of the run, once an update has been made."""
    if run.fresh is not None and not step.problem:
        with run.world.exit_together():
            check_plain(asdict(run.state), 'TrainState')
        check_round_trip(run.world, run.raw_model, run.optimizer, run.fresh)
        warn_of_unsaved(run, run.fresh)
        run.fresh = None  # frees its state


def check_round_trip(world, model, optimizer, fresh):
    """Stop the run, after its first step, unless a checkpoint would bring back the whole state of `optimizer` to
    `fresh`, the same optimizer without a state."""
    names = parameter_names(model)
    with world.exit_together():
        saved, shards = optimizer_state.to_save(optimizer, names, world.sharded)
        saved = optimizer_state.map_tensors(saved, lambda name, tensor: shards.get(name, tensor), 'optimizer')
        try:
            optimizer_state.load_optimizer(fresh, saved, names)
            ours, theirs = optimizer.state_dict(), fresh.state_dict()
            theirs['param_groups'] = [{key: group.get(key) for key in compared}  # load_state_dict may add settings
                                      for group, compared in zip(theirs['param_groups'], ours['param_groups'])]
            lost = optimizer_state.first_difference(ours, theirs)
        except Exception as error:  # whatever the optimizer's load_state_dict raises
            lost = one_line(error)
        if lost:
            raise SystemExit(f'{type(optimizer).__name__}: a checkpoint would not bring back its state ({lost}), so '
                             'that the run could not be resumed; use another optimizer, or keep all state in `state` '
                             'and `param_groups`, and optimizers inside it as parts of a CombinedOptimizer')
