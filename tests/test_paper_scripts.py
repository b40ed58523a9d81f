"""The scripts that make the paper's figures and tables, the speed-up evaluator and the tools that train many runs."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, refusal, write_bins
from fake_runs import SHAPE, fake_run

from dev import bench, gpu_suite, soak
from runtime import checkpoint
from scripts import consolidate, plan, plot, runs, speedup, sweep
from scripts.paper import (
    clipped_newton,
    compute_table,
    dynamics,
    final_losses,
    hessian_histogram,
    loss_grid,
    max_lr,
    superglue,
    toy_landscape,
)


def rows_of(path):
    with Path(path).open() as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize('script', [clipped_newton, compute_table, dynamics, final_losses, gpu_suite, hessian_histogram,
                                    loss_grid, max_lr, plot, speedup, sweep, toy_landscape],
                         ids=lambda script: script.__name__)
def test_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(['--help'])
    assert stopped.value.code == 0 and '--' in capsys.readouterr().out


@pytest.mark.parametrize('page', ['README.md', 'docs/differences.md', 'docs/models.md'])
def test_the_files_that_the_pages_name_exist(page):
    text = (ROOT / page).read_text(encoding='utf-8')
    named = set(re.findall(r'(?:scripts|config|tests)/[\w/]+\.(?:py|json)', text))
    assert named or page == 'docs/differences.md'
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(('script', 'argv', 'message'), [
    (speedup, ['somewhere', '--k=0'], 'above 0'), (speedup, ['somewhere', '--k=nan'], 'above 0'),
    (soak, ['--tries=0'], 'at least 1'), (soak, ['--tries=-1'], 'at least 1'),
    (compute_table, ['config/quickstart.py', '--launcher=torchrum --standalone'], 'no such command'),
    (compute_table, ['config/quickstart.py', '--launcher='], 'no such command'),
    (compute_table, ['config/quickstart.py', '--launcher="torchrun'], 'No closing quotation'),
    (sweep, ['--out_dir=somewhere', '--launcher=nosuch'], 'no such command'),
    (sweep, ['--out_dir=somewhere', '--jobs=0'], 'at least 1')])
def test_flags_that_make_no_sense_are_refused(script, argv, message, capsys):
    with pytest.raises(SystemExit):
        script.main(argv)
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Files written


@pytest.mark.parametrize(('script', 'argv', 'suffix'), [
    (plot, ['{run}'], 'png'), (superglue, ['nowhere', '--device=cpu'], 'png'),
    (plan, ['config/quickstart.py', '--gpus=1'], 'json'), (bench, ['--tiny', '--device=cpu'], 'json')],
    ids=lambda value: getattr(value, '__name__', ''))
def test_output_that_cannot_be_written_is_refused_before_the_work(script, argv, suffix, tmp_path, monkeypatch, capsys):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'])
    monkeypatch.setattr(bench, 'measure', lambda *args: pytest.fail('it began to measure'))
    monkeypatch.setattr(plot, 'figure', lambda *args, **kwargs: pytest.fail('it began to draw'))
    monkeypatch.chdir(ROOT)
    (tmp_path / 'file').touch()
    (tmp_path / f'folder.{suffix}').mkdir()
    argv = [flag.format(run=run) for flag in argv]
    for place in (tmp_path / 'file' / f'x.{suffix}', tmp_path / f'folder.{suffix}'):
        assert f'{place}: cannot be written' in refusal(script.main, [*argv, f'--output={place}'])
    assert capsys.readouterr().out == ''


def test_a_file_is_written_whole_or_not_at_all_into_a_folder_that_is_made(tmp_path):
    path = runs.writable(tmp_path / 'a' / 'b' / 'x.txt')
    assert not (tmp_path / 'a').exists(), 'asking should leave nothing'
    runs.write_text(path, 'first')

    def fail():
        with runs.writing(path) as partial:
            partial.write_text('half')
            raise OSError(28, 'No space left on device')

    assert refusal(fail) == f'{path}: cannot be written (No space left on device)'
    assert path.read_text() == 'first' and list(path.parent.iterdir()) == [path]


def test_consolidate_makes_the_folder_or_refuses(tmp_path, monkeypatch):
    (tmp_path / 'ckpt_00000005').mkdir()
    monkeypatch.setattr(checkpoint, 'load', lambda path: (path, dict(model={'w': torch.zeros(2)})))
    written = consolidate.consolidate(tmp_path / 'ckpt_00000005', tmp_path / 'a' / 'b' / 'x.pt', optimizer=False)
    assert torch.load(written)['model']['w'].tolist() == [0, 0]
    assert 'cannot be written' in refusal(
        consolidate.consolidate, tmp_path / 'ckpt_00000005', written / 'x.pt', False)


@pytest.mark.parametrize('config', [{'config': {}}, {'config': 3}, {'parameters': 3}, [1]])
def test_a_run_without_its_settings_is_refused(tmp_path, config):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'])
    (run / 'config.json').write_text(json.dumps(config))
    for main, flags in ((speedup.main, []), (final_losses.main, []), (plot.main, ['--x', 'flops'])):
        message = refusal(main, [str(run), *flags, f'--output={tmp_path / "x.png"}'])
        assert message.startswith(f'{run}/config.json: ') and ('config' in message and 'damaged' in message
                                                               or 'not written by train.py' in message)


@pytest.mark.parametrize('key', ['parameters', 'max_iters', 'bias'])
def test_a_run_that_lacks_one_key_is_refused_by_its_name(tmp_path, key):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'])
    about = json.loads((run / 'config.json').read_text())
    (about if key in about else about['config']).pop(key)
    (run / 'config.json').write_text(json.dumps(about))
    assert f'config.json: has no {key!r}' in refusal(runs.read_run, run)


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
    clipped_newton.main(['--dim', '5', '--max_condition', '1e6', '--signgd_condition', '1e4',
                         '--output', str(tmp_path / 'theory.png')])
    rows = rows_of(tmp_path / 'theory.csv')
    for name in [*clipped_newton.FUNCTIONS, 'quadratic']:
        mine = [row for row in rows if row['function'] == name and row['method'] == 'clipped Newton']
        steps = [int(row['steps']) for row in mine]
        assert max(steps) - min(steps) <= 4 and min(steps) > 5
        assert all(int(row['steps']) <= float(row['bound']) for row in mine)
        assert all(float(row['measured Hessian ratio']) <= 2 + 1e-6 for row in mine)
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
    # Outside of the assumption's radius the measured ratio does exceed 2: the measurement can tell.
    assert problem.hessian_ratio(theta, 3 * phi.R, rng) > 2


# ----------------------------------------------------------------------------------------------------------------------
# The speed-up evaluator


def make(tmp_path, optimizer, T, loss, lr=1e-3, seed=1, **options):
    argv = [f'--optimizer_name={optimizer}', f'--max_iters={T}', f'--learning_rate={lr}', f'--seed={seed}',
            *options.pop('argv', [])]
    return fake_run(tmp_path / f'{optimizer}-{T}-{lr}-{seed}-{len(list(tmp_path.glob("*")))}', loss, argv, **options)


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


def test_losses_of_other_data_or_windows_are_not_averaged(tmp_path, capsys):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'adamw', 100, 3.1)  # the same run again
    make(tmp_path, 'adamw', 100, 3.3, argv=['--init_from=gpt2'])
    make(tmp_path, 'adamw', 100, 3.4, argv=['--weight_decay=0.3'])
    final_losses.main([str(tmp_path), '--output', str(tmp_path / 'figure.png')])
    (row,) = rows_of(tmp_path / 'figure.csv')
    assert (row['val/loss'], row['seeds'], row['tried']) == ('3.0', '1', '3')
    for other, what in ((dict(data='other'), 'the data'), (dict(argv=['--eval_iters=3']), 'validation windows')):
        directory = tmp_path / what
        make(directory, 'adamw', 100, 3.0)
        make(directory, 'adamw', 100, 3.0, lr=2e-3, **other)
        for script, flags in ((final_losses, []), (loss_grid, ['--rows', 'gamma', '--columns', 'beta2'])):
            with pytest.raises(SystemExit, match=f'cannot be compared: {what}'):
                script.main([str(directory), *flags, '--output', str(tmp_path / 'g.png')])


def test_final_losses_by_hessian_interval_against_flops(tmp_path):
    for k in (1, 10):
        make(tmp_path, 'sophiag', 100, 3.0 + k / 100, argv=[f'--hessian_interval={k}'])
    final_losses.main([str(tmp_path), '--by', 'hessian_interval', '--x', 'flops', '--output', str(tmp_path / 'f.png')])
    frequent, seldom = rows_of(tmp_path / 'f.csv')
    assert frequent['line'] == 'hessian_interval = 1'
    # Two thirds of half of the mini-batch: a third more at k = 1, a thirtieth at k = 10.
    assert float(frequent['flops']) / float(seldom['flops']) == pytest.approx((1 + 1 / 3) / (1 + 1 / 30))


def test_loss_grid_shows_losses_and_differences(tmp_path):
    for gamma in (0.01, 0.02):
        for beta2 in (0.95, 0.99):
            make(tmp_path, 'sophiah', 100, 3 + gamma + beta2, argv=[f'--gamma={gamma}', f'--beta2={beta2}'])
    loss_grid.main([str(tmp_path), '--output', str(tmp_path / 'g.png')])
    cells = {(float(row['gamma']), float(row['beta2'])): float(row['val/loss']) for row in rows_of(tmp_path / 'g.csv')}
    assert cells == {(g, b): pytest.approx(3 + g + b) for g in (0.01, 0.02) for b in (0.95, 0.99)}

    make(tmp_path, 'adamw', 100, 3.5, lr=1e-3)
    make(tmp_path, 'adamw', 100, 3.4, lr=2e-3)
    loss_grid.main([str(tmp_path), '--rows', 'total_batch_size', '--columns', 'max_iters', '--minus', 'adamw',
                    '--output', str(tmp_path / 'd.png')])
    (row,) = rows_of(tmp_path / 'd.csv')
    assert float(row['difference']) == pytest.approx(3 + 0.01 + 0.95 - 3.4)


def test_dynamics_shows_what_is_clipped(tmp_path):
    make(tmp_path, 'sophiag', 100, 3.0, update_unclipped=lambda i: 0.4, hessian_norm=lambda i: 1.0 + i,
         grad_clipped=0.02)
    make(tmp_path, 'adamw', 100, 3.0, grad_clipped=0.3)
    dynamics.main([str(tmp_path), '--output', str(tmp_path / 'dynamics.png')])
    adamw, sophia = sorted(json.loads((tmp_path / 'dynamics.json').read_text())['at_the_end'], key=lambda r: r['run'])
    assert sophia['update_clipped'] == pytest.approx(0.6) and sophia['hessian_norm'] == 101.0
    assert adamw['grad_clipped'] == 0.3 and 'hessian_norm' not in adamw


# Table 2, TFLOPs per step. The paper's Sophia-G counts a whole forward and backward for the estimate, 1/20 more; here
# the forward is shared.
@pytest.mark.parametrize(('size', 'tflops'), [('large', 2550), ('medium', 1195)])
def test_compute_table_agrees_with_table_2(tmp_path, monkeypatch, size, tflops):
    monkeypatch.chdir(ROOT)
    compute_table.main([f'config/train_gpt2_{size}_adamw.py', f'config/train_gpt2_{size}_sophiag.py',
                        '--output', str(tmp_path / 'table.png')])
    adamw, sophiag = rows_of(tmp_path / 'table.csv')
    assert float(adamw['TFLOPs per step']) == pytest.approx(tflops, rel=0.005)
    assert float(sophiag['TFLOPs per step']) / float(adamw['TFLOPs per step']) == pytest.approx(1 + 2 / 3 / 20)


def test_compute_table_measures_times_from_runs(tmp_path):
    a = make(tmp_path, 'adamw', 100, 3.0)
    s = make(tmp_path, 'sophiag', 100, 3.0, hessian_ms=100.0)
    compute_table.main([str(a), str(s), '--output', str(tmp_path / 'table.png')])
    adamw, sophiag = rows_of(tmp_path / 'table.csv')
    assert float(adamw['T(step) s']) == pytest.approx(0.5) and float(adamw['memory GB']) == 1.5
    assert float(sophiag['T(Hessian) s']) == pytest.approx(0.01) and sophiag['over AdamW'] == '+0.0%'


def test_compute_table_trains_with_the_launcher(tmp_path, monkeypatch):
    """`train.py` in its place is a copy of a run."""
    (tmp_path / 'launch er.py').write_text(
        'import pathlib, shutil, sys\nassert sys.argv[1:3] == ["--ranks=8", "train.py"]\n'
        'out_dir, = [a.partition("=")[2] for a in sys.argv if a.startswith("--out_dir=")]\n'
        f'shutil.copytree({str(make(tmp_path, "adamw", 100, 3.0))!r}, out_dir, dirs_exist_ok=True)\n')
    argv = ['config/quickstart.py', '--steps=60', '--output', str(tmp_path / 'table.png'), '--launcher']
    launcher = shlex.join([sys.executable, str(tmp_path / 'launch er.py'), '--ranks='])
    monkeypatch.chdir(ROOT)
    compute_table.main([*argv, f'{launcher}8'])
    assert float(rows_of(tmp_path / 'table.csv')[0]['T(step) s']) == pytest.approx(0.5)
    assert 'AssertionError' in refusal(compute_table.main, [*argv, f'{launcher}7'])


# ----------------------------------------------------------------------------------------------------------------------
# Training many runs


def test_sweep_expands_a_spec_in_order_with_stable_names(tmp_path):
    spec = dict(base=['--seed=3'], runs=[dict(learning_rate=[1e-3, '2e-3'], gamma=0.1),
                                         dict(learning_rate='0.001', gamma=0.1), dict(config='config/quickstart.py'),
                                         dict(base=['--bias=True'], gamma=0.2)])
    items = sweep.expand(spec, tmp_path)
    assert [item.out_dir.name for item in items] == [
        'learning_rate=0.001,gamma=0.1', 'learning_rate=0.002,gamma=0.1', 'config=quickstart', 'gamma=0.2']
    assert items[1].argv == ['--seed=3', '--learning_rate=2e-3', '--gamma=0.1']
    assert items[2].argv == ['--seed=3', 'config/quickstart.py']
    assert items[3].argv == ['--seed=3', '--bias=True', '--gamma=0.2']


def test_sweep_trains_the_one_asked_for_and_tries_again_only_that(tmp_path, monkeypatch):
    argv = ['--out_dir', str(tmp_path), '--grid', 'seed=1,2,3', '--', *SHAPE]
    failures = [tmp_path / f'seed={seed}' / checkpoint.FAILED for seed in (1, 2, 3)]
    for path in failures:
        path.parent.mkdir()
        path.write_text('iteration 3: the loss is not finite')
    chosen = []
    monkeypatch.setattr(sweep, 'train_all', lambda items, *args: chosen.extend(items) or [])
    assert 'not finished: 1 of 1' in refusal(sweep.main, ['--only=1', '--retry', *argv])
    assert [item.settings for item in chosen] == [dict(seed='2')]
    assert [path.exists() for path in failures] == [True, False, True]
    assert 'there are runs 0 to 2' in refusal(sweep.main, ['--only=3', *argv])


def test_sweep_lists_no_loss_of_what_is_not_finished(tmp_path):
    items = sweep.expand(dict(base=SHAPE, runs=[dict(seed=[1, 2, 3, 4], max_iters=100)]), tmp_path)
    for item, loss, end in zip(items, (2.0, 3.2, 3.1), (50, 100, 100)):
        fake_run(item.out_dir, loss, ['--max_iters=100'], end=end)
    assert [(row['seed'], row['val/loss'], row['state']) for row in sweep.table(items)] == [
        (3, pytest.approx(3.1), 'finished'), (2, pytest.approx(3.2), 'finished'),
        (1, None, 'iteration 50 of 100'), (4, None, 'not begun')]


@pytest.mark.parametrize('path', sorted((ROOT / 'config').rglob('*.json')), ids=lambda path: path.stem)
def test_shipped_specs_resolve(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    items = sweep.expand(runs.read_json(path), tmp_path)
    assert len(items) > 3
    for item in items[::5]:
        item.check()


@pytest.fixture(scope='module')
def swept(tmp_path_factory, corpus):
    """A sweep of two runs, really trained: (directory, arguments of sweep.py)."""
    out_dir = tmp_path_factory.mktemp('sweep')
    argv = ['--out_dir', str(out_dir), '--jobs', '2', '--grid', 'optimizer_name=sophiag,adamw', '--', *TINY,
            f'--dataset={corpus}', '--learning_rate=0.01']
    sweep.main(argv)
    return out_dir, argv


def test_sweep_trains_what_is_missing_and_sorts_by_loss(swept, capsys):
    out_dir, argv = swept
    files = sorted(out_dir.rglob('metrics.jsonl'))
    before = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 2
    sweep.main(['--out_dir', str(out_dir)])  # the spec is remembered
    assert [path.stat().st_mtime_ns for path in files] == before
    rows = rows_of(out_dir / 'results.csv')
    losses = [float(row['val/loss']) for row in rows]
    assert losses == sorted(losses) and losses == sorted(run.last('val/loss') for run in runs.find_runs([out_dir]))
    assert {row['state'] for row in rows} == {'finished'}


def test_sweep_does_not_take_a_run_with_other_settings_for_its_own(swept):
    out_dir, argv = swept
    with pytest.raises(SystemExit, match=r'holds a run with learning_rate = 0\.01, asked for is 0\.02'):
        sweep.main([*argv, '--learning_rate=0.02'])
    with pytest.raises(SystemExit, match='holds a run with seed = 1337, asked for is 2'):
        sweep.main([*argv, '--seed=2'])
    with pytest.raises(SystemExit, match='unknown setting'):
        sweep.main([*argv, '--learning_rat=0.02'])


@pytest.mark.parametrize('launcher', [sys.executable, f'{sys.executable} -m torch.distributed.run --standalone'])
def test_sweep_remembers_a_run_that_diverged(tmp_path, corpus, capsys, launcher):
    """Under torchrun, too, whose exit code does not tell."""
    argv = ['--out_dir', str(tmp_path), '--launcher', launcher, '--grid', 'learning_rate=1e30', '--', *TINY,
            f'--dataset={corpus}']
    with pytest.raises(SystemExit, match='not finished: 1 of 1'):
        sweep.main(argv)
    (log,) = tmp_path.rglob('log.txt')
    before = log.read_text()
    with pytest.raises(SystemExit, match='not finished: 1 of 1'):
        sweep.main(argv)
    assert log.read_text() == before
    assert rows_of(tmp_path / 'results.csv')[0]['state'].startswith('diverged: iteration ')


@pytest.mark.parametrize('spec, words', [
    ({'runs': [3]}, 'needs "runs"'),
    ({'base': '--seed=1', 'runs': [{'seed': 1}]}, '"base" of a sweep has to be a list')])
def test_sweep_refuses_specs(tmp_path, spec, words):
    (tmp_path / 'spec.json').write_text(json.dumps(spec))
    assert words in refusal(sweep.main, ['--out_dir', str(tmp_path / 'out'), '--spec', str(tmp_path / 'spec.json')])


def test_sweep_stops_and_resumes_its_runs(tmp_path, corpus):
    argv = [sys.executable, 'scripts/sweep.py', '--out_dir', str(tmp_path), '--grid', 'seed=1', '--', *TINY,
            f'--dataset={corpus}', '--max_iters=400', '--eval_interval=10000', '--eval_iters=1']
    env = dict(os.environ, OMP_NUM_THREADS='1')
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / 'seed=1' / 'metrics.jsonl'
    while not (metrics.is_file() and metrics.read_text().count('\n') > 20):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode and 'the same command goes on where it stopped' in said, said
    assert runs.read_run(tmp_path / 'seed=1').unfinished
    subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    assert not runs.read_run(tmp_path / 'seed=1').unfinished
    assert 'resuming from' in (tmp_path / 'seed=1' / 'log.txt').read_text()


def test_sweep_takes_the_gpus_it_may_see_in_turns(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    assert [sweep.gpu_of(slot, 2) for slot in range(3)] == ['0', '1', '0']
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,GPU-5a')
    assert [sweep.gpu_of(slot, 2) for slot in range(3)] == ['4', 'GPU-5a', '4']


def test_sweep_writes_a_slurm_array(tmp_path, capsys):
    sweep.main(['--out_dir', str(tmp_path), '--slurm=--gres=gpu:1', '--grid', 'seed=1,2,3', '--', *SHAPE])
    text = (tmp_path / 'sweep.sbatch').read_text()
    assert text.startswith('#!/bin/bash\n') and '#SBATCH --array=0-2\n' in text and '#SBATCH --gres=gpu:1\n' in text
    assert f'--out_dir {tmp_path} --only $SLURM_ARRAY_TASK_ID' in text
    job = text.replace(text[text.index('srun'):], 'echo $SRUN_CPUS_PER_TASK')
    for cpus in ('8', ''):
        done = subprocess.run(['bash', '-eu', '-c', job], env=dict(os.environ, SLURM_CPUS_PER_TASK=cpus),
                              capture_output=True, text=True)
        assert done.stdout.strip() == cpus, done.stderr
    assert not list(tmp_path.glob('seed*')), 'nothing should have been trained'


@pytest.mark.parametrize('estimator', ['gnb', 'hutchinson'])
def test_hessian_histogram_of_a_checkpoint(swept, tmp_path, estimator):
    out_dir, _ = swept
    hessian_histogram.main([str(out_dir / 'optimizer_name=sophiag'), '--estimator', estimator, '--samples', '2',
                            '--batch_size', '4', '--device', 'cpu', '--output', str(tmp_path / 'histogram.png')])
    summary = json.loads((tmp_path / 'histogram.json').read_text())
    assert summary['iteration'] == 10 and summary['estimator'] == estimator
    assert summary['1% quantile'] < summary['50% quantile'] < summary['99% quantile']
    counted = sum(int(row['parameters']) for row in rows_of(tmp_path / 'histogram.csv'))
    assert 0.98 * summary['positive'] * summary['parameters'] < counted <= summary['parameters']
    # Gauss-Newton is positive semidefinite; the Hessian's own diagonal is not.
    assert (summary['negative'] == 0) is (estimator == 'gnb')


def test_hessian_histogram_refuses_tokens_of_another_tokenizer(swept, tmp_path):
    for ids in (255, 257):
        data = write_bins(tmp_path / f'{ids}', range(250), range(250), vocab_size=ids)
        message = refusal(hessian_histogram.main, [
            str(swept[0] / 'optimizer_name=sophiag'), f'--dataset={data}', '--samples=1', '--device=cpu',
            f'--output={tmp_path / "x.png"}'])
        assert f'a tokenizer of {ids} ids' in message and 'has 256' in message


def test_max_lr_finds_the_largest_stable_rate(tmp_path, capsys):
    # Runs as they would lie there: up to 2e-3 stable with scaling, up to 1e-3 without, where 2e-3 ends on a plateau.
    for scaled, losses in [(True, {1e-3: 3.5, 2e-3: 3.3, 4e-3: 6.5}), (False, {1e-3: 3.5, 2e-3: 4.9})]:
        entry = dict(optimizer_name='adamw', scale_attn_by_inverse_layer_idx=scaled, learning_rate=list(losses))
        base = ['--max_iters=100', *SHAPE]
        for item, loss in zip(sweep.expand(dict(base=base, runs=[entry]), tmp_path), losses.values()):
            fake_run(item.out_dir, loss, [f'--{key}={value}' for key, value in item.settings.items()]
                     + ['--max_iters=100'])
    max_lr.main(['--out_dir', str(tmp_path), '--optimizers', 'adamw', '--rates', '1e-3', '2e-3', '4e-3', '--', *base])
    largest = json.loads((tmp_path / 'max_lr.json').read_text())['largest']
    assert [(row['attention_scaling'], row['largest_stable']) for row in largest] == [(True, 2e-3), (False, 1e-3)]


def test_gpu_suite_goes_on_with_what_is_missing(tmp_path, corpus, capsys):
    common = ['--tiny', '--device', 'cpu', '--records', str(tmp_path / 'records'), '--work', str(tmp_path / 'work')]

    def plan(group):
        args = gpu_suite.parse(common)
        args.dataset = corpus
        return gpu_suite.training_items(args, group)

    for item in plan('variants') + plan('map'):
        item.item.check()
    items = plan('runs')
    settings = [item.item.settings for item in items]
    assert [(s['optimizer_name'], s['max_iters']) for s in settings[:3]] == [
        ('adamw', 20), ('sophiag', 10), ('adamw', 10)]
    rates = {name: {s['learning_rate'] for s in settings if s['optimizer_name'] == name}
             for name in ('adamw', 'sophiag')}
    assert len(rates['adamw']) >= len(rates['sophiag']) > 1
    assert {item.state for item in items} == {'missing'} and plan('seeds') == []
    for item in items:
        item.item.check()

    # What is recorded counts as done, and once all rates of the headline pair are, the best gets another seed.
    for item in items:
        loss = 3.0 + item.item.settings['learning_rate']
        fake_run(item.record, loss, [f'--max_iters={item.item.settings["max_iters"]}'])
    assert {item.state for item in plan('runs')} == {'done'}
    seeds = [item.item.settings for item in plan('seeds')]
    assert [(s['optimizer_name'], s['max_iters'], s['seed']) for s in seeds] == [('adamw', 20, 1338),
                                                                                 ('sophiag', 10, 1338)]
    assert [s['learning_rate'] for s in seeds] == [min(rates['adamw']), min(rates['sophiag'])]


def test_gpu_suite_leaves_for_another_call_what_has_not_enough_time(tmp_path, corpus, monkeypatch, capsys):
    records = tmp_path / 'records'
    items = [gpu_suite.Command(name, [sys.executable, '-c', code], records, needs) for name, code, needs in (
        ('first', 'import time; time.sleep(2); print("slept")', 0.1), ('long', '', 0.18), ('short', '', 0.01))]
    monkeypatch.setattr(gpu_suite, 'items_of', lambda args, group: items)
    shutil.copytree(corpus, tmp_path / 'pysource')
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    argv = ['--tiny', '--device', 'cpu', '--groups', 'bench', '--minutes', '0.2', '--records', str(records),
            '--work', str(tmp_path)]
    gpu_suite.main([*argv, '--minutes', '0.005'])
    assert {item.state for item in items} == {'missing'} and 'needs 0.01 minutes' in capsys.readouterr().out
    gpu_suite.main(argv)
    said = capsys.readouterr().out
    assert [item.state for item in items] == ['done (exit code 0)', 'missing', 'done (exit code 0)']
    assert 'slept' in said and 'long: needs 0.18 minutes, 0.' in said and 'left for another call: long' in said
    gpu_suite.main(argv)  # which has all of its time for it
    assert items[1].state == 'done (exit code 0)' and 'all done' in capsys.readouterr().out

    endless = gpu_suite.Command('endless', [sys.executable, '-uc', 'print("begun"); import time; time.sleep(99)'],
                                records, 0.01)
    assert not endless.run(time.monotonic() + 3) and endless.state == 'cut off after 0.1 minutes'
    assert json.loads(endless.record.read_text())['output'] == 'begun\n'
    items[:] = [endless]
    gpu_suite.main([*argv, '--minutes', '0.05'])  # no more than it had
    assert 'left for another call: endless' in capsys.readouterr().out
    endless.argv[-1] = 'print("ended")'
    gpu_suite.main(argv)
    assert endless.state == 'done (exit code 0)' and 'ended' in capsys.readouterr().out


def test_gpu_suite_refuses_to_begin_without_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(gpu_suite, 'prepare_data', lambda args: pytest.fail('it began'))
    assert 'no CUDA device' in refusal(gpu_suite.main, [
        '--groups', 'runs', '--records', str(tmp_path / 'records'), '--work', str(tmp_path / 'work')])


def test_gpu_suite_trains_an_item_and_stops_in_time(tmp_path, corpus, capsys):
    args = gpu_suite.parse(['--tiny', '--device', 'cpu', '--records', str(tmp_path / 'records'),
                            '--work', str(tmp_path / 'work')])
    args.dataset = corpus
    item = gpu_suite.training_items(args, 'runs')[1]
    assert not item.run(time.monotonic() - 1), 'out of time: it should not have begun'
    assert item.state == 'missing'
    assert item.run(time.monotonic() + 120) and item.state == 'done'
    assert not runs.read_run(item.record).unfinished
    gpu_suite.pack(args.records, tmp_path / 'records.tar.gz')
    assert (tmp_path / 'records.tar.gz').stat().st_size > 500
