"""lifecycle/guards.py: the warning of a runaway, replayed on the recorded runs; of later tokens."""

import math
from types import SimpleNamespace

import pytest
from conftest import ROOT

from analysis.runs import read_packed
from lifecycle import guards


def replay(run):
    """Return the first iteration of a `RunRecord` at which the warning is printed; None if there is none."""
    printed = []
    state = SimpleNamespace(iter=0, lowest_hessian_norm=math.inf)
    acting = SimpleNamespace(config=SimpleNamespace(**run.config), state=state, log=SimpleNamespace(
        print=lambda _: printed.append(state.iter)))
    for line in run.lines:
        state.iter = line['iter']
        guards.warn_of_runaway(acting, line)
    return min(printed, default=None)


def smoothed(run, last):
    """Return the training losses up to the iteration `last`, each the mean of five logged ones."""
    losses = [loss for step, loss in zip(*run.series('train/loss')) if step <= last]
    return [sum(losses[i:i + 5]) / 5 for i in range(len(losses) - 4)]


@pytest.mark.parametrize(('study', 'runaways', 'others'), [
    ('gpu_30m', 4, 0), ('sharpening', 4, 0), ('fresh_h', 17, 0), ('dissection', 5, 1), ('small_batch', 0, 0)])
def test_the_warning_comes_in_recorded_runaways_before_the_loss_has_risen(study, runaways, others):
    """A runaway passes ‖h‖ = 100. Part B of fresh_h is left out: its one mini-batch is learned by heart."""
    runs = [run for run in read_packed(ROOT / 'records' / study / 'runs.jsonl')
            if (study, run.out_dir.parent.name) != ('fresh_h', 'B') and len(run.series('hessian_norm')[1]) >= 30]
    warned = {id(run): step for run in runs if (step := replay(run)) is not None}
    away = [run for run in runs if max(run.series('hessian_norm')[1]) > 100]
    assert len(away) >= runaways and {id(run) for run in away} <= warned.keys()
    assert len(warned) == len(away) + others
    for run in away:
        losses = smoothed(run, warned[id(run)])
        assert losses[-1] < min(losses) + 0.051
