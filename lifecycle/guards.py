"""Checks that end a run with one line before it loses work, and advice on γ."""

import math

from optimizers import row
from runtime import optimizer_state
from runtime.checkpoint import parameter_names
from runtime.files import one_line
from runtime.optim import parameters

RUNAWAY = 25  # catches all 37 recorded Sophia runs that pass ‖h‖ = 100, and three others, two with far too large a γ


def check_validation(val_data):
    """Exit unless the weights of the validation sets in val/loss sum to 1."""
    total = sum(data.weight for data in val_data.values())
    if abs(total - 1) > 1e-9:
        raise SystemExit(f'open_dataset: the weights of the validation sets {", ".join(val_data)} sum to {total:g}, so '
                         'val/loss would not be their mean; add a set with weight=0, or with --dataset=A:1,B:0')


def check_first_update(run):
    """After the first update, exit unless it reached every trainable parameter, and a checkpoint would restore the
    optimizer's state and the model's buffers."""
    if run.rest.fresh is None:
        return
    with run.world.exit_together():
        trained = set(parameters(run.optimizer))
        if missing := [name for name, p in run.raw_model.named_parameters() if p.requires_grad and p not in trained]:
            raise SystemExit(f'{missing[0]}: is in no group of parameter_groups, so it would not be trained; add it, '
                             'or freeze it with requires_grad_(False)')
        if differing := sorted(run.rest.names ^ {*run.raw_model.state_dict()}):
            raise SystemExit(f"{differing[0]}: the model's state_dict has it only before or only after the first step, "
                             'so the run could not be resumed; register it in the constructor, or with '
                             'persistent=False')
    check_round_trip(run.world, run.raw_model, run.optimizer, run.rest.fresh)
    run.rest.fresh = None  # frees the memory


def check_round_trip(world, model, optimizer, fresh):
    """Exit unless a checkpoint would restore the whole state of `optimizer` to `fresh`, the same optimizer without a
    state."""
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
        except Exception as error:  # load_state_dict may raise anything
            lost = one_line(error)
        if lost:
            raise SystemExit(f'{type(optimizer).__name__}: a checkpoint would not restore its state ({lost}), so the '
                             'run could not be resumed; use another optimizer, or keep all state in `state` '
                             'and `param_groups`, and optimizers inside it as parts of a CombinedOptimizer')


def advise(run, metrics):
    """Print once, after the warm-up and the first estimates, whether a step's `metrics` ask for a higher or lower γ."""
    c, unclipped = run.config, metrics.get('update_unclipped', 0.5)
    started = c.hessian_interval / (1 - c.beta2)
    if not 0.01 <= unclipped <= 0.9 and run.state.iter >= max(c.warmup_iters, started) and not run.log.advised:
        run.log.advised = True
        direction = 'raise' if unclipped < 0.5 else 'lower'
        run.log.print(f'note: {unclipped:.1%} of the coordinates are unclipped; {direction} --gamma until '
                      'update_unclipped is between 0.1 and 0.5')


def warn_of_runaway(run, metrics):
    """Warn if Sophia's h runs away (records/sharpening). The criterion is that ‖h‖, bias-corrected, is RUNAWAY times
    its lowest value since a tenth of the run, which `state.lowest_hessian_norm` keeps."""
    c, state = run.config, run.state
    measured = {'update_unclipped', 'hessian_norm'} <= metrics.keys()
    if not measured or not c.hessian_interval or state.iter < c.max_iters / 10:
        return
    norm = metrics['hessian_norm'] / (1 - c.beta2 ** (state.iter // c.hessian_interval + 1))
    if norm > RUNAWAY * state.lowest_hessian_norm:
        growth = norm / state.lowest_hessian_norm
        clips = 'hessian_clip' in row(c.optimizer_name).settings and not c.hessian_clip
        run.log.print(f'warning: the norm of h is {growth:.0f} times its lowest and runs away; restart with '
                      f'{"--hessian_clip=1.0 or " * clips}a lower --gamma or --learning_rate, see docs/running.md')
        state.lowest_hessian_norm = math.inf  # the next warning needs as much growth again
    state.lowest_hessian_norm = min(state.lowest_hessian_norm, norm or math.inf)  # norm is 0 without a finite estimate
