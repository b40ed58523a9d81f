"""lifecycle/guards.py: advice on γ, and the warning of a runaway, replayed on the recorded runs."""

import math
from types import SimpleNamespace

import pytest
from conftest import ROOT

from analysis.runs import read_packed
from lifecycle import guards


def warns(run):
    """Return whether a recorded run would print the warning."""
    printed = []
    state = SimpleNamespace(iter=0, lowest_hessian_norm=math.inf)
    config = SimpleNamespace(**{**run.config, 'optimizer_name': 'sophiag', 'hessian_clip': 0.0})  # only for the advice
    acting = SimpleNamespace(config=config, state=state, log=SimpleNamespace(print=printed.append))
    for line in run.lines:
        state.iter = line['iter']
        guards.warn_of_runaway(acting, line)
    return bool(printed)


@pytest.mark.parametrize(('study', 'runaways', 'others'), [
    ('gpu_30m', 4, 0), ('sharpening', 10, 0), ('fresh_h', 17, 0), ('dissection', 5, 1), ('small_batch', 0, 0)])
def test_the_warning_comes_in_every_recorded_runaway(study, runaways, others):
    """A runaway exceeds ‖h‖ = 100. Part B of fresh_h is left out, because it memorizes its one mini-batch."""
    runs = [run for run in read_packed(ROOT / 'records' / study / 'runs.jsonl')
            if (study, run.out_dir.parent.name) != ('fresh_h', 'B') and len(run.series('hessian_norm')[1]) >= 30]
    warned = {run.out_dir for run in runs if warns(run)}
    away = {run.out_dir for run in runs if max(run.series('hessian_norm')[1]) > 100}
    assert len(away) == runaways and away <= warned and len(warned) == len(away) + others


@pytest.mark.parametrize(('settings', 'hessian_clip', 'advice'), [
    (('hessian_clip',), 0.0, 'restart with --hessian_clip=1.0 or a lower --gamma or --learning_rate, see'),
    (('hessian_clip',), 1.0, 'restart with a lower --gamma or --learning_rate, see'),
    ((), 0.0, 'restart with a lower --gamma or --learning_rate, see')])
def test_clipping_the_estimate_is_advised_if_it_is_possible_and_off(monkeypatch, settings, hessian_clip, advice):
    monkeypatch.setattr(guards, 'row', lambda name: SimpleNamespace(settings=settings))
    printed = []
    run = SimpleNamespace(
        config=SimpleNamespace(hessian_interval=10, max_iters=110, beta2=0.5, optimizer_name='x',
                               hessian_clip=hessian_clip),
        state=SimpleNamespace(iter=0, lowest_hessian_norm=1.0), log=SimpleNamespace(print=printed.append))
    for run.state.iter, norm in (10, 30), (11, 26), (12, 25 * 26):  # It warns from a tenth of the run on.
        guards.warn_of_runaway(run, dict(update_unclipped=0.3, hessian_norm=0.75 * norm))  # after two estimates
    assert len(printed) == 1 and 'the norm of h is 26 times its lowest' in printed[0] and advice in printed[0]


@pytest.mark.parametrize('unclipped, fine, way, warmup, interval', [
    (0.004, 0.01, 'raise', 3, 1), (0.96, 0.9, 'lower', 0, 2), (0.96, 0.9, 'lower', 5, 1)])
def test_advice_on_gamma_comes_once_after_the_warm_up_and_the_first_estimates(unclipped, fine, way, warmup, interval):
    printed, state = [], SimpleNamespace(iter=0)
    run = SimpleNamespace(
        config=SimpleNamespace(warmup_iters=warmup, hessian_interval=interval, beta2=0.5), state=state,
        log=SimpleNamespace(advised=False, print=lambda line: printed.append((state.iter, line))))
    for state.iter in range(8):
        guards.advise(run, {} if state.iter == 3 else dict(update_unclipped=unclipped if state.iter != 4 else fine))
    (iteration, advice), = printed
    assert iteration == 5 and f'note: {unclipped:.1%} of the coordinates are unclipped; {way} --gamma until' in advice
