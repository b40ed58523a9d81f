"""scripts/plot.py: figures of one and several runs, and their numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, rejection
from fake_runs import GRADIENT_FLOPS, fake_run, rows_of
from PIL import Image

from analysis import figures
from scripts import plot


@pytest.fixture
def run(tmp_path):
    return fake_run(tmp_path / 'adamw', 3.0, ['--max_iters=100'])


def test_one_run_is_drawn_into_its_directory_with_numbers_command_and_commit(run, monkeypatch):
    argv = [str(run), '--title', 'two words']
    monkeypatch.setattr('sys.argv', ['scripts/plot.py', *argv])
    plot.main(argv)
    picture = Image.open(run / 'loss.png')
    assert min(picture.size) > 300
    assert picture.info['Command'] == f"scripts/plot.py {run} --title 'two words'"
    assert picture.info['Commit'] == (figures.files.git_commit() or 'unknown')
    val = [row for row in rows_of(run / 'loss.csv') if row['metric'] == 'val/loss']
    assert [int(row['steps']) for row in val] == list(range(0, 101, 10))
    assert [float(row['value']) for row in val] == pytest.approx([5.0 - 0.02 * i for i in range(0, 101, 10)])


# Every 10 steps Sophia-G adds two thirds of a gradient's FLOPs on half of the mini-batch, Sophia-H eight thirds on all.
@pytest.mark.parametrize(('optimizer', 'x', 'last'), [
    ('adamw', 'steps', 100), ('adamw', 'tokens', 6400), ('adamw', 'seconds', 50.0),
    ('sophiag', 'flops', 100 * GRADIENT_FLOPS * (1 + 2 / 3 / 2 / 10)),
    ('sophiah', 'flops', 100 * GRADIENT_FLOPS * (1 + 8 / 3 / 10))])
def test_axes(tmp_path, optimizer, x, last):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100', f'--optimizer_name={optimizer}'])
    plot.main([str(run), '--x', x, '--output', str(tmp_path / 'figure.png')])
    assert float(rows_of(tmp_path / 'figure.csv')[10][x]) == pytest.approx(last)


def test_seeds_are_averaged_where_all_of_them_were_measured(tmp_path, capsys):
    fake_run(tmp_path / 'a', 3.0, ['--max_iters=100', '--seed=1'])  # measured every 10 iterations
    fake_run(tmp_path / 'b', 2.0, ['--max_iters=100', '--seed=2'])
    path = tmp_path / 'b/metrics.jsonl'  # measured every 20 iterations
    path.write_text(''.join(line + '\n' for line in path.read_text().splitlines()
                            if json.loads(line)['iter'] % 20 == 0))
    plot.main([str(tmp_path), '--metrics', 'val/loss', '--output', str(tmp_path / 'x.png')])
    rows = rows_of(tmp_path / 'x.csv')
    assert [int(row['steps']) for row in rows] == [0, 20, 40, 60, 80, 100]
    last = {key: float(rows[-1][key]) for key in ('value', 'lowest', 'highest', 'seeds')}
    assert last == pytest.approx(dict(value=2.5, lowest=2.0, highest=3.0, seeds=2))
    assert 'note' not in capsys.readouterr().err
    fake_run(tmp_path / 'c', 3.0, ['--max_iters=100', '--seed=3'], end=20)
    plot.main([str(tmp_path), '--metrics', 'val/loss', '--output', str(tmp_path / 'x.png')])
    assert [int(row['steps']) for row in rows_of(tmp_path / 'x.csv')] == [0, 20]
    assert 'is drawn up to step 20, where one seed ends' in capsys.readouterr().err


def test_the_file_that_is_read_is_not_overwritten(tmp_path):
    path = tmp_path / 'loss.csv'
    path.write_text('optimizer,seed,steps,loss\nAdamW,1,100,3.0\n')
    assert rejection(plot.main, [str(path)]) == (
        f'{path}: the numbers of the picture would replace it; choose another --output')
    assert path.read_text().endswith('AdamW,1,100,3.0\n') and not (tmp_path / 'loss.png').exists()
    assert 'add a column flops' in rejection(plot.main, [str(path), '--x=flops', f'--output={tmp_path}/x.png'])


def test_a_picture_of_records_is_not_written_among_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted((ROOT / 'records/quickstart').iterdir())
    for path in f'{ROOT}/records/quickstart', f'{ROOT}/records/quickstart/lion':
        plot.main([path])
        assert [*map(str, sorted(Path('out').iterdir()))] == ['out/loss.csv', 'out/loss.png']
        shutil.rmtree('out')
    assert sorted((ROOT / 'records/quickstart').iterdir()) == before


def test_a_notebooks_backend_is_not_used(run):
    """A notebook exports it to its !commands, whose Python may lack its module."""
    subprocess.run([sys.executable, ROOT / 'scripts/plot.py', run], check=True,
                   env=os.environ | {'MPLBACKEND': 'module://matplotlib_inline.backend_inline'})
    assert (run / 'loss.png').is_file()


def test_lines_are_named_after_their_differences(tmp_path, capsys):
    for name, lr in (('adamw', 1e-3), ('adamw', 2e-3), ('lion', 1e-3)):
        argv = ['--max_iters=100', f'--optimizer_name={name}', f'--learning_rate={lr}']
        fake_run(tmp_path / f'{name}{lr}', 3.0, argv)
    argv = [str(tmp_path), '--metrics', 'val/loss', '--output', str(tmp_path / 'x.png')]
    plot.main(argv)
    assert {row['run'] for row in rows_of(tmp_path / 'x.csv')} == {
        'AdamW, learning rate 0.001', 'AdamW, learning rate 0.002', 'Lion'}
    fake_run(tmp_path / 'again', 2.0, ['--max_iters=100', '--optimizer_name=lion', '--learning_rate=1e-3'], data='new')
    plot.main([*map(str, tmp_path.glob('*/')), *argv[1:3]])  # A repeated seed is not averaged: its code may differ.
    assert {row['run'] for row in rows_of(tmp_path / 'loss.csv')} == {'adamw0.001', 'adamw0.002', 'lion0.001', 'again'}
    assert 'note: the runs differ in the data (fingerprint)' in capsys.readouterr().err


def test_a_panel_for_each_metric(tmp_path):
    """A run is in the panels of the metrics that it has. A run that is named twice is drawn once."""
    fake_run(tmp_path / 'sophiag', 3.0, ['--max_iters=100', '--optimizer_name=sophiag'], update_unclipped=0.4,
             hessian_norm=lambda i: 1.0 + i, grad_clipped=0.02)
    adamw = fake_run(tmp_path / 'adamw', 3.0, ['--max_iters=100'], grad_clipped=0.3)
    plot.main([str(tmp_path), str(adamw), '--metrics', 'update_unclipped', 'hessian_norm', 'grad_clipped',
               '--output', str(tmp_path / 'x.png')])
    last = {(row['run'], row['metric']): float(row['value']) for row in rows_of(tmp_path / 'x.csv')}
    assert last == {('Sophia-G', 'update_unclipped'): 0.4, ('Sophia-G', 'hessian_norm'): 101.0,
                    ('Sophia-G', 'grad_clipped'): 0.02, ('AdamW', 'grad_clipped'): 0.3}


def test_optimizers_keep_their_colors():
    assert [style['color'] for style in figures.styles(figures.COLORED[::-1])] == [f'C{9 - i}' for i in range(10)]
    assert [style['color'] for style in figures.styles(['muon', 'adamw'])] == ['C2', 'C0']
    assert [style['color'] for style in figures.styles(['muon', 'muon'])] == ['C0', 'C1']  # runs of one optimizer


def test_a_legend_has_as_many_columns_as_its_height_asks_for():
    fig, (ax,) = figures.figure(height=2.0)  # ten rows
    for i, style in enumerate(figures.styles(['adamw'] * 21)):
        ax.plot([0], [0], label=f'run {i}', **style)
    figures.legend(fig, ax)
    assert fig.legends[0]._ncols == 3 and len({line.get_color() for line in ax.lines}) == 21


def test_a_run_that_is_being_written_is_drawn(run):
    path = run / 'metrics.jsonl'
    path.write_text(path.read_text() + '{"iter": 110, "val/lo')
    plot.main([str(run)])
    assert rows_of(run / 'loss.csv')[10]['steps'] == '100'


def test_a_metric_that_no_run_has_is_named(run):
    assert 'mfu: no such metric' in rejection(plot.main, [str(run), '--metrics', 'mfu'])
    assert 'x.jpg: must end in .png' in rejection(plot.main, [str(run), '--output=x.jpg'])
    (run / 'metrics.jsonl').write_text('')
    assert 'val/loss: no such metric' in rejection(plot.main, [str(run)]) and not (run / 'loss.png').exists()
