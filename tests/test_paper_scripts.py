"""The scripts that make the paper's figures and tables, the speed-up evaluator and the tools that train many runs."""

import json
import math

import numpy as np
import pytest
from conftest import ROOT, rejection
from fake_runs import fake_run, make, rows_of

from analysis import figures
from scripts import plot, speedup, sweep
from scripts.paper import (
    clipped_newton,
    compute_table,
    final_losses,
    hessian_histogram,
    max_lr,
    superglue,
    toy_landscape,
)


@pytest.mark.parametrize('script', [clipped_newton, compute_table, final_losses, hessian_histogram,
                                    max_lr, plot, speedup, sweep, toy_landscape],
                         ids=lambda script: script.__name__)
def test_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(['--help'])
    assert stopped.value.code == 0 and '--' in capsys.readouterr().out


@pytest.mark.parametrize(('script', 'argv', 'message'), [
    (speedup, ['somewhere', '--k=0'], 'above 0'), (speedup, ['somewhere', '--k=nan'], 'above 0'),
    (sweep, ['--out_dir=somewhere', '--grid', 'seed=1', '--jobs=0'], 'at least 1')])
def test_flags_that_make_no_sense_are_rejected(script, argv, message, capsys):
    with pytest.raises(SystemExit):
        script.main(argv)
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Files written


@pytest.mark.parametrize(('script', 'argv', 'suffix'), [
    (plot, ['{run}'], 'png'), (superglue, ['nowhere', '--device=cpu'], 'png')],
    ids=lambda value: getattr(value, '__name__', ''))
def test_output_that_cannot_be_written_is_rejected_before_the_work(script, argv, suffix, tmp_path, monkeypatch, capsys):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'])
    monkeypatch.setattr(plot, 'figure', lambda *args, **kwargs: pytest.fail('it began to draw'))
    monkeypatch.chdir(ROOT)
    (tmp_path / 'file').touch()
    (tmp_path / f'folder.{suffix}').mkdir()
    argv = [flag.format(run=run) for flag in argv]
    for place in (tmp_path / 'file' / f'x.{suffix}', tmp_path / f'folder.{suffix}'):
        assert f'{place}: cannot be written' in rejection(script.main, [*argv, f'--output={place}'])
    assert capsys.readouterr().out == ''


def test_a_file_is_written_whole_or_not_at_all_into_a_folder_that_is_made(tmp_path):
    path = figures.writable(tmp_path / 'a' / 'b' / 'x.txt')
    assert not (tmp_path / 'a').exists(), 'asking should leave nothing'
    figures.write_text(path, 'first')

    class Full:
        def savefig(self, f, **_):
            f.write(b'half')
            raise OSError(28, 'No space left on device')

    picture = path.with_suffix('.png')
    picture.write_text('first')
    assert rejection(figures.save, picture, Full()) == f'{picture}: cannot be written (No space left on device)'
    assert picture.read_text() == 'first' and sorted(path.parent.iterdir()) == [picture, path]


# ----------------------------------------------------------------------------------------------------------------------
# The toy landscape and the theory


def test_toy_derivatives_are_those_of_the_footnotes_functions():
    for x, y in [(-0.9, 0.5), (0.2, 0.0), (0.7, 5.0), (1.4, -1.0)]:
        theta, step = np.array([x, y]), 1e-5
        assert toy_landscape.loss(theta) == pytest.approx(
            8 * (x - 1) ** 2 * (1.3 * x ** 2 + 2 * x + 1) + (y - 4) ** 2 / 2)
        for i in range(2):
            e = np.eye(2)[i] * step
            slope = (toy_landscape.loss(theta + e) - toy_landscape.loss(theta - e)) / (2 * step)
            bend = (toy_landscape.gradient(theta + e)[i] - toy_landscape.gradient(theta - e)[i]) / (2 * step)
            assert toy_landscape.gradient(theta)[i] == pytest.approx(slope, abs=1e-5)
            assert toy_landscape.hessian_diagonal(theta)[i] == pytest.approx(bend, abs=1e-5)


def test_toy_trajectories_are_those_of_the_papers_figure(tmp_path):
    toy_landscape.main(['--output', str(tmp_path / 'toy.png')])
    end = {row['method']: row for row in json.loads((tmp_path / 'toy.json').read_text())['summary']}
    reached = 'steps to stay within 0.05 of the minimum'
    assert end['Sophia'][reached] <= 10 and end['Sophia']['loss'] < 1e-6
    assert abs(end['Newton']['theta1']) < 1e-6, 'Newton should end at the saddle point at 0'
    assert end['GD'][reached] is None and end['GD']['theta2'] < 2, 'GD should be slow along the flat direction'
    assert end['SignGD'][reached] is None and abs(end['SignGD']['theta1'] - 1) > 0.05, 'SignGD should bounce'
    assert (tmp_path / 'toy.png').stat().st_size > 10_000
    assert len(rows_of(tmp_path / 'toy.csv')) == 5 * 51


def test_theory_steps_are_flat_below_the_bound_and_signgds_above_theirs(tmp_path):
    clipped_newton.main(['--max_condition', '1e4', '--output', str(tmp_path / 'theory.png')])
    rows = rows_of(tmp_path / 'theory.csv')
    for name in [*clipped_newton.FUNCTIONS, 'quadratic']:
        mine = [row for row in rows if row['function'] == name and row['method'] == 'clipped Newton']
        steps = [int(row['steps']) for row in mine]
        assert max(steps) - min(steps) <= 4 and min(steps) > 5
        assert all(int(row['steps']) <= float(row['bound']) for row in mine)
    signgd = [row for row in rows if row['method'] == 'SignGD']
    assert all(int(row['steps']) >= float(row['bound']) for row in signgd)
    growth = math.log(int(signgd[-1]['steps']) / int(signgd[0]['steps'])) / math.log(1e4)
    assert growth == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize('name', clipped_newton.FUNCTIONS)
def test_theory_R_is_no_smaller_than_it_must_be_and_derivatives_fit(name):
    phi, rng = clipped_newton.FUNCTIONS[name], np.random.default_rng(0)
    for z in (-1.3, 0.0, 0.4, 2.1):
        assert phi.first(z) == pytest.approx((phi.value(z + 1e-6) - phi.value(z - 1e-6)) / 2e-6, abs=1e-6)
        assert phi.second(z) == pytest.approx((phi.first(z + 1e-6) - phi.first(z - 1e-6)) / 2e-6, abs=1e-6)
    problem = clipped_newton.Problem(phi, np.logspace(0, 2, 3), rng)
    theta = problem.start(10.0, rng)
    assert problem.loss(theta) == pytest.approx(10.0) and problem.loss(problem.minimizer) == 0
    # The assumption: within R the second derivative changes by at most a factor of 2, and somewhere by that much.
    z = np.linspace(-4, 4, 4001)
    ratio = phi.second(z + phi.R) / phi.second(z)
    assert 1.9 < max(ratio.max(), 1 / ratio.min()) <= 2 + 1e-9


# ----------------------------------------------------------------------------------------------------------------------
# Figures and tables out of runs


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
    assert 'left out' in capsys.readouterr().err


def test_losses_of_other_data_or_sequences_are_not_averaged(tmp_path, capsys):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'adamw', 100, 3.1)  # the same run again
    make(tmp_path, 'adamw', 100, 3.3, argv=['--init_from=gpt2'])
    make(tmp_path, 'adamw', 100, 3.4, argv=['--weight_decay=0.3'])
    argv = [str(tmp_path), '--output', str(tmp_path / 'figure.png')]
    assert 'init_from is None in one and gpt2 in the other' in rejection(final_losses.main, argv)
    final_losses.main([*argv, '--tuned', 'init_from'])
    (row,) = rows_of(tmp_path / 'figure.csv')
    assert (row['val/loss'], row['seeds'], row['tried']) == ('3.0', '1', '3')
    for other, what in ((dict(data='other'), 'the data'),
                        (dict(argv=['--eval_iters=3']), 'the number of validation sequences')):
        directory = tmp_path / what
        make(directory, 'adamw', 100, 3.0)
        make(directory, 'adamw', 100, 3.0, lr=2e-3, **other)
        for flags in ([], ['--grid', 'gamma', 'beta2']):
            with pytest.raises(SystemExit, match=f'cannot be compared: {what}'):
                final_losses.main([str(directory), *flags, '--output', str(tmp_path / 'g.png')])


def test_final_losses_by_hessian_interval_against_flops(tmp_path):
    for k in (1, 10):
        make(tmp_path, 'sophiag', 100, 3.0 + k / 100, argv=[f'--hessian_interval={k}'])
    final_losses.main([str(tmp_path), '--by', 'hessian_interval', '--x', 'flops', '--output', str(tmp_path / 'f.png')])
    frequent, seldom = rows_of(tmp_path / 'f.csv')
    assert frequent['line'] == 'k 1'
    # Two thirds of half of the mini-batch: a third more at k = 1, a thirtieth at k = 10.
    assert float(frequent['flops']) / float(seldom['flops']) == pytest.approx((1 + 1 / 3) / (1 + 1 / 30))


def test_a_grid_shows_losses_and_differences(tmp_path, monkeypatch):
    for gamma in (0.01, 0.02):
        for beta2 in (0.95, 0.99):
            make(tmp_path, 'sophiah', 100, 3 + gamma + beta2, argv=[f'--gamma={gamma}', f'--beta2={beta2}'])
    final_losses.main([str(tmp_path), '--grid', 'gamma', 'beta2', '--output', str(tmp_path / 'g.png')])
    cells = {(float(row['gamma']), float(row['beta2'])): float(row['val/loss']) for row in rows_of(tmp_path / 'g.csv')}
    assert cells == {(g, b): pytest.approx(3 + g + b) for g in (0.01, 0.02) for b in (0.95, 0.99)}

    make(tmp_path, 'adamw', 100, 3.5, lr=1e-3)
    make(tmp_path, 'adamw', 100, 3.4, lr=2e-3)
    argv = [str(tmp_path), '--grid', 'total_batch_size', 'max_iters', '--minus', 'adamw',
            '--output', str(tmp_path / 'd.png')]
    final_losses.main(argv)
    (row,) = rows_of(tmp_path / 'd.csv')
    assert float(row['difference']) == pytest.approx(3 + 0.01 + 0.95 - 3.4)
    figures = []
    monkeypatch.setattr(final_losses, 'save', lambda output, fig, *_, **__: figures.append(fig))
    final_losses.main(argv)
    assert (figures[0].axes[0].get_xlabel(), figures[0].axes[0].get_ylabel()) == ('steps T', 'sequences per step')
