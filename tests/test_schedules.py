"""Learning rate schedules."""

import math
from types import SimpleNamespace

import pytest
from conftest import TINY, rejection

import train


def schedule(name, **settings):
    """The learning rates of 101 iterations: peak 1, warm-up 10, final 0.1."""
    c = SimpleNamespace(**{**dict(schedule=name, decay_lr=True, learning_rate=1.0, min_lr=0.1, warmup_iters=10,
                                  lr_decay_iters=100, cooldown_iters=20 * (name == 'wsd')), **settings})
    return [train.learning_rate_at(c, i) for i in range(101)]


def test_shapes():
    found = {name: schedule(name) for name in ('cosine', 'linear', 'wsd', 'constant')}
    for lrs in found.values():
        assert lrs[:10] == [(i + 1) / 11 for i in range(10)] and lrs[10] == 1
    assert found['cosine'][10:] == [0.1 + 0.5 * (1 + math.cos(math.pi * (i / 90))) * (1.0 - 0.1) for i in range(91)]
    assert found['linear'][55] == pytest.approx(0.55) and found['linear'][100] == pytest.approx(0.1)
    assert set(found['wsd'][10:81]) == {1.0} and found['wsd'][81] < 1
    assert found['wsd'][90] == pytest.approx(0.55) and found['wsd'][100] == pytest.approx(0.1)
    assert set(found['constant'][10:]) == {1.0}
    # Any schedule decays in the last cooldown_iters.
    cooled = schedule('cosine', cooldown_iters=20)
    assert set(cooled[10:81]) == {1.0} and cooled[90] == pytest.approx(0.55)
    assert cooled[85] - 0.1 == pytest.approx(0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    # Longer than planned: the final learning rate.
    assert schedule('linear', lr_decay_iters=50)[70] == schedule('wsd', lr_decay_iters=50)[70] == pytest.approx(0.1)
    assert schedule('wsd', decay_lr=False) == [1.0] * 101


def test_settings_of_schedules():
    def resolve(*flags):
        return train.resolve([*TINY, *flags])

    assert resolve('--schedule=wsd', '--max_iters=50').cooldown_iters == 10
    assert resolve().cooldown_iters == 0
    assert resolve('--schedule=constant', '--warmup_iters=20').cooldown_iters == 0
    at_most = 'because the decay ends at 10 and the warm-up at'
    for flags, message in [
            (['--schedule=cosin'], '--schedule=cosin: must be one of cosine, linear, constant, wsd'),
            (['--schedule=constant', '--cooldown_iters=9'], '--cooldown_iters=9: must be 0 for --schedule=constant'),
            (['--schedule=wsd', '--cooldown_iters=9'], f'--cooldown_iters=9: must be at most 8, {at_most} 2'),
            (['--schedule=wsd', '--warmup_iters=9'],
             f'schedule wsd: cooldown_iters = 2: must be at most 1, {at_most} 9'),
            (['--schedule=wsd', '--warmup_iters=99'],
             f'schedule wsd: cooldown_iters = 2: must be at most 0, {at_most} 99')]:
        assert rejection(resolve, *flags) == message
