"""The scripts that make the paper's figures and tables, the speed-up evaluator and the tools that train many runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import rejection
from fake_runs import GRADIENT_FLOPS, make, rows_of

from records.paper import clipped_newton, toy_landscape
from scripts.paper import final_losses


def test_toy_trajectories_are_those_of_the_papers_figure():
    end = {name: toy_landscape.trajectory(name)[-1] for name in toy_landscape.LEARNING_RATES}
    assert toy_landscape.trajectory('Sophia')[7:] == pytest.approx(np.tile([1, 4], (44, 1)), abs=0.05)
    assert end['Newton'] == pytest.approx([0, 4], abs=1e-6), 'Newton should end at the saddle point'
    assert end['GD'][1] < 2, 'GD should be slow along the flat direction'
    assert abs(end['SignGD'][0] - 1) > 0.05, 'SignGD should bounce'


def test_theory_steps_are_flat_below_the_bound_and_signgds_above_theirs():
    conditions = [10, 1000]
    rows = clipped_newton.convex_rows(conditions, np.random.default_rng(0)) + clipped_newton.quadratic_rows(conditions)
    for name in [*clipped_newton.FUNCTIONS, 'quadratic']:
        one, two = (row for row in rows if row['function'] == name and row['method'] == 'clipped Newton')
        assert abs(one['steps'] - two['steps']) <= 4 and 5 < one['steps'] <= one['bound']
    signgd = [row for row in rows if row['method'] == 'SignGD']
    assert all(row['steps'] >= row['bound'] for row in signgd)
    assert math.log10(signgd[1]['steps'] / signgd[0]['steps']) == pytest.approx(1, abs=0.05)  # the root of 100


@pytest.mark.parametrize('name', clipped_newton.FUNCTIONS)
def test_theory_R_is_no_smaller_than_it_must_be(name):
    phi, rng = clipped_newton.FUNCTIONS[name], np.random.default_rng(0)
    problem = clipped_newton.Problem(phi, np.logspace(0, 2, 3), rng)
    theta = problem.start(10.0, rng)
    assert problem.loss(theta) == pytest.approx(10.0) and problem.loss(problem.minimizer) == 0
    # The assumption: within R the second derivative changes by at most a factor of 2, and somewhere by that much.
    z = np.linspace(-4, 4, 4001)
    ratio = phi.second(z + phi.R) / phi.second(z)
    assert 1.9 < max(ratio.max(), 1 / ratio.min()) <= 2 + 1e-9


def test_final_losses_draws_the_best_rate_of_finished_runs(tmp_path, capsys):
    for lr, loss in [(1e-3, 3.5), (2e-3, 3.3), (4e-3, 3.6)]:
        make(tmp_path, 'adamw', 100, loss, lr=lr)
    make(tmp_path, 'adamw', 200, 3.1)
    make(tmp_path, 'sophiag', 100, 1.0, end=50)
    make(tmp_path, 'sophiag', 100, 3.2)
    final_losses.main([str(tmp_path), '--output', str(tmp_path / 'figure.png')])
    rows = [(row['line'], int(row['max_iters']), float(row['val/loss']), int(row['tried']))
            for row in rows_of(tmp_path / 'figure.csv')]
    assert rows == [('AdamW', 100, pytest.approx(3.3), 3), ('AdamW', 200, pytest.approx(3.1), 1),
                    ('Sophia-G', 100, pytest.approx(3.2), 1)]
    text = capsys.readouterr()
    assert 'left out' in text.err and text.out.split('\n')[0].split()[-2:] == ['optimizer', 'tried'], text
    assert str(tmp_path) not in text.out.split('wrote ')[0]  # run, the last column of the .csv
    assert 'no finished run' in rejection(final_losses.main, [str(*tmp_path.glob('sophiag*-4'))])


def test_final_losses_finds_the_largest_stable_rate(tmp_path, capsys):
    """Of each line; with scaling 4e-3 ends high, and 8e-3 low again; without, 2e-3 ends on a plateau."""
    for scaled, losses in [(True, {1e-3: 3.5, 2e-3: 3.3, 4e-3: 6.5, 8e-3: 3.2}), (False, {1e-3: 3.5, 2e-3: 4.9})]:
        for lr, loss in losses.items():
            make(tmp_path, 'adamw', 100, loss, lr, argv=[f'--scale_attn_by_inverse_layer_idx={scaled}'])

    def stable():
        final_losses.main([str(tmp_path), '--x', 'learning_rate', '--by', 'optimizer_name',
                           'scale_attn_by_inverse_layer_idx', '--output', str(tmp_path / 'f.png')])
        head, *lines = capsys.readouterr().out.split('\n\n')[1].splitlines()[:-1]
        assert head.split('  ')[-2:] == ['largest stable rate', 'not stable at']
        return {line.split()[3]: line.split()[-2:] for line in lines}

    assert stable() == {'False': ['0.001', '0.002'], 'True': ['0.002', '0.004']}
    assert [(row['line'], float(row['learning_rate'])) for row in rows_of(tmp_path / 'f.csv')] == [
        *(('AdamW, attention scaling False', lr) for lr in (1e-3, 2e-3)),
        *(('AdamW, attention scaling True', lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3))]
    # Without scaling another seed diverges at 1e-3, so that not even the lowest rate is stable.
    (make(tmp_path, 'adamw', 100, 3.5, 1e-3, seed=2, end=50, argv=['--scale_attn_by_inverse_layer_idx=False'])
     / 'failed.txt').write_text('iteration 50')
    assert stable() == {'False': ['–', '0.001'], 'True': ['0.002', '0.004']}
    make(tmp_path, 'lion', 100, 3.0, 5e-4, argv=['--scale_attn_by_inverse_layer_idx=False'])
    make(tmp_path, 'lion', 100, 3.4, 1e-3, argv=['--scale_attn_by_inverse_layer_idx=False'])
    assert stable()['False'] == ['0.001', '–']  # Lion's, which come last


def test_a_noisy_mini_batch_makes_no_rate_unstable():
    for name, losses, means in [('train/loss', [4.0, 5.0, 4.0] + [3.0] * 18 + [2.0, 4.0], [3.0] * 10 + [4.5, 4.0]),
                                ('val/loss', [4.0, 5.0, 3.0], [3.0, 5.0, 4.0])]:  # a short run
        run = SimpleNamespace(series=lambda key: ([0, 1, 2], losses) if key == name else ([], []))  # noqa: B023
        assert final_losses.tenths(run) == means


def test_lines_of_one_point_are_named_on_the_axis_the_best_one_last():
    rows = [{'line': line, 'max_iters': 100, 'val/loss': loss, 'sd': sd, 'optimizer': 'adamw'}
            for line, loss, sd in [('one', 3.0, None), ('two', 3.25, 0.5), ('three', 3.125, None)]]
    fig = final_losses.draw_lines(rows, 'max_iters')
    fig.draw_without_rendering()
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ['two', 'three', 'one']
    assert [text.get_text() for text in fig.axes[0].texts] == ['3.250', '3.125', '3.000']
    two = final_losses.draw_lines(rows[:2], 'max_iters')
    assert two.axes[0].get_xscale() == 'log' and [text.get_text() for text in two.legends[0].texts] == ['one', 'two']
    assert fig.axes[0].collections[0].get_segments()[0][:, 0].tolist() == [2.75, 3.75]  # the standard deviation
    assert two.axes[0].collections[1].get_segments()[0][:, 1].tolist() == [2.75, 3.75]


def test_final_losses_against_parameters(tmp_path):
    for n_layer in (1, 2):
        make(tmp_path, 'adamw', 100, 3.0, argv=[f'--n_layer={n_layer}'])
    argv = [str(tmp_path), '--output', str(tmp_path / 'f.png')]
    assert 'n_layer' in rejection(final_losses.main, argv)
    final_losses.main([*argv, '--x', 'parameters'])
    assert [row['line'] for row in rows_of(tmp_path / 'f.csv')] == ['AdamW']


def test_final_losses_by_hessian_interval_against_flops(tmp_path):
    for k in (1, 10):
        make(tmp_path, 'sophiag', 100, 3.0 + k / 100, argv=[f'--hessian_interval={k}'])
    final_losses.main([str(tmp_path), '--by', 'hessian_interval', '--x', 'flops', '--output', str(tmp_path / 'f.png')])
    frequent, seldom = rows_of(tmp_path / 'f.csv')
    assert frequent['line'] == 'k 1' and float(seldom['flops']) == pytest.approx(100 * GRADIENT_FLOPS * (1 + 1 / 30))
    # Two thirds of half of the mini-batch: a third more at k = 1, a thirtieth at k = 10.
    assert float(frequent['flops']) / float(seldom['flops']) == pytest.approx((1 + 1 / 3) / (1 + 1 / 30))


@pytest.mark.parametrize(('keys', 'argv', 'lines'), [
    (['dropout'], [['--dropout=0.2'], ['--dropout=0'], ['--dropout=0.1']], [f'dropout 0.{i}' for i in range(3)]),
    (['bias'], [['--bias=False'], ['--bias=True']], ['bias False', 'bias True']),
    (['optimizer_name', 'gamma'], [[], ['--optimizer_name=sophiag']], ['AdamW', 'Sophia-G, γ 0.05'])])
def test_a_line_is_named_by_its_settings(tmp_path, keys, argv, lines):
    """Also by one that is 0, unless the optimizer does not have it."""
    for flags in argv:
        make(tmp_path, 'adamw', 100, 3.0, argv=flags)
    final_losses.main([str(tmp_path), '--by', *keys, '--output', str(tmp_path / 'f.png')])
    assert [row['line'] for row in rows_of(tmp_path / 'f.csv')] == lines


def test_a_grid_shows_losses(tmp_path):
    for gamma in (0.01, 0.02):
        for beta2 in (0.95, 0.99):
            make(tmp_path, 'sophiah', 100, 3 + gamma + beta2, argv=[f'--gamma={gamma}', f'--beta2={beta2}'])
    final_losses.main([str(tmp_path), '--grid', 'gamma', 'beta2', '--output', str(tmp_path / 'g.png')])
    cells = {(float(row['gamma']), float(row['beta2'])): float(row['val/loss']) for row in rows_of(tmp_path / 'g.csv')}
    assert cells == {(g, b): pytest.approx(3 + g + b) for g in (0.01, 0.02) for b in (0.95, 0.99)}
    make(tmp_path, 'adamw', 100, 3.5, lr=1e-3)
    assert 'not AdamW, Sophia-H' in rejection(final_losses.main, [str(tmp_path), '--grid', 'schedule', 'max_iters'])
