"""scripts/speedup.py: the verdict on one optimizer against another."""

import json
import math

import pytest
from fake_runs import make, rows_of

from scripts import runs, speedup
from scripts.paper import final_losses


def judge(tmp_path, *flags):
    speedup.main([str(tmp_path), '--output', str(tmp_path / 'speedup.png'), *flags])
    return json.loads((tmp_path / 'speedup.json').read_text())


@pytest.mark.parametrize(('loss', 'holds'), [(3.0, True), (3.2, True), (3.2001, False)])
def test_speedup_is_strict_at_every_T(tmp_path, loss, holds):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4)
    make(tmp_path, 'adamw', 200, 3.2)
    make(tmp_path, 'sophiag', 100, loss)
    result = judge(tmp_path)
    assert result['holds'] is holds
    assert [row['holds'] for row in result['comparisons']] == [True, holds]


@pytest.mark.parametrize(('k', 'T', 'shorter'), [('1.1', 1650, 1500), ('2.2', 2640, 1200), ('4/3', 400, 300)])
def test_speedup_divides_T_exactly(tmp_path, k, T, shorter):
    make(tmp_path, 'adamw', T, 3.0)
    make(tmp_path, 'sophiag', shorter, 3.4)  # which turns the verdict
    make(tmp_path, 'adamw', 100, 4.0)
    make(tmp_path, 'sophiag', 50, 3.9)
    result = judge(tmp_path, f'--k={k}')
    assert [(row['T'], row['T/k']) for row in result['comparisons']] == [(T, shorter)] and not result['holds']


@pytest.mark.parametrize('key', ['learning_rate', 'max_iters', 'lr_decay_iters', 'dataset'])
def test_comparisons_reject_runs_resumed_with_other_settings(tmp_path, key, capsys):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'adamw', 100, 2.0, lr=2e-3, changes=[{'iter': 40, 'key': 'log_interval', 'from': 1, 'to': 2},
                                                       {'iter': 60, 'key': key, 'from': 'a', 'to': 'b'}])
    make(tmp_path, 'sophiag', 50, 2.5, changes=[{'iter': 40, 'key': 'out_dir', 'from': 'a', 'to': 'b'}])
    result = judge(tmp_path)
    assert result['holds'] and result['comparisons'][0]['H1 tried'] == 1
    assert f'{key} was changed from a to b at iteration 60' in result['refused'][0]['reason']
    final_losses.main([str(tmp_path), '--output', str(tmp_path / 'figure.png')])
    assert [row['tried'] for row in rows_of(tmp_path / 'figure.csv')] == ['1', '1']
    assert f'{key} was changed from a to b at iteration 60' in capsys.readouterr().err


def test_speedup_takes_the_minimum_over_rates_and_the_mean_over_seeds(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5, lr=1e-3)
    make(tmp_path, 'adamw', 100, 3.1, lr=2e-3, seed=1)
    make(tmp_path, 'adamw', 100, 3.3, lr=2e-3, seed=2)
    make(tmp_path, 'adamw', 100, 3.6, lr=4e-3)
    make(tmp_path, 'sophiag', 50, 3.25)
    (row,) = judge(tmp_path)['comparisons']
    assert row['loss O1'] == pytest.approx(3.2) and row['lr O1'] == 2e-3 and row['seeds O1'] == 2
    assert row['H1 tried'] == 3 and not row['holds']
    seeds = [run for run in runs.find_runs([tmp_path]) if run.learning_rate == 2e-3]
    assert runs.mean_loss(seeds) == pytest.approx((3.2, 0.1))  # half the range


def test_speedup_says_what_makes_its_verdict_weak(tmp_path, capsys):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4)
    assert 'one learning rate of O1 only' in ' '.join(judge(tmp_path)['notes'])
    for lr, loss in ((2e-3, 3.45), (5e-4, 3.4)):
        make(tmp_path, 'adamw', 100, loss, lr=lr)
        assert 'at the edge' in ' '.join(judge(tmp_path)['notes'])
    make(tmp_path, 'adamw', 100, 3.6, lr=4e-3)
    make(tmp_path, 'adamw', 100, 3.25, lr=2e-3, seed=2)
    notes = ' '.join(judge(tmp_path)['notes'])
    assert 'at the edge' not in notes and 'within the spread over seeds' in notes
    make(tmp_path, 'sophiag', 50, 3.0, lr=2e-3)
    assert 'one seed, so the noise' in ' '.join(judge(tmp_path)['notes'])
    make(tmp_path, 'sophiag', 50, 2.6, lr=4e-3, seed=1)
    make(tmp_path, 'sophiag', 50, 3.3, lr=4e-3, seed=2)
    result = judge(tmp_path)  # 3.35 ± 0.1 against 2.95 ± 0.35
    (row,), (note,) = result['comparisons'], result['notes']
    assert row['holds'] and (row['lr O1'], row['lr O2']) == (2e-3, 4e-3) and 'within the spread over seeds' in note


def test_speedup_refuses_unfinished_schedules_and_says_why(tmp_path, capsys):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 100, 3.0)
    make(tmp_path, 'sophiag', 200, 2.9)
    with pytest.raises(SystemExit, match='nothing to compare'):
        judge(tmp_path)
    said = capsys.readouterr().out
    assert 'its schedule is of 100, so at step 50 its learning rate is still high' in said
    make(tmp_path, 'sophiag', 50, 3.0, end=40)
    for T in (40, 100):
        make(tmp_path, 'sophiag', 50, 3.0, argv=[f'--lr_decay_iters={T}'])
    with pytest.raises(SystemExit, match='nothing to compare'):
        judge(tmp_path)
    said = capsys.readouterr().out
    assert 'its learning rate decays over 40 iterations, and it was run for 50' in said
    assert 'at iteration 40 of 50 only' in said
    assert 'its learning rate decays over 100 iterations, and it was run for 50' in said


def test_speedup_finds_the_k_at_which_losses_cross(tmp_path):
    make(tmp_path, 'adamw', 200, 3.0)
    for T, loss in [(50, 3.4), (100, 3.1), (200, 2.9)]:
        make(tmp_path, 'sophiag', T, loss)
    (row,) = judge(tmp_path)['comparisons']
    # Half-way in loss between 100 and 200 steps, hence √2 · 100 steps.
    assert float(row['losses cross at k']) == pytest.approx(math.sqrt(2), rel=1e-2)
    assert speedup.crossing(200, 3.5, {50: dict(loss=3.4)}) == '>= 4'
    assert speedup.crossing(200, 2.0, {50: dict(loss=3.4), 100: dict(loss=3.1)}) == '< 2'


@pytest.mark.parametrize(('options', 'what'), [
    (dict(data='another'), 'fingerprint'), (dict(argv=['--eval_iters=3']), 'validation windows'),
    (dict(argv=['--n_layer=3']), 'n_layer'), (dict(argv=['--n_head=1']), 'n_head'),
    (dict(argv=['--n_embd=64']), 'n_embd'), (dict(argv=['--total_batch_size=8']), 'total_batch_size')])
def test_speedup_refuses_runs_that_cannot_be_compared(tmp_path, options, what):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4, **options)
    with pytest.raises(SystemExit, match=what):
        judge(tmp_path)
