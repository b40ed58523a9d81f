"""Studies: protocols, what trains and collects their runs; pages and pictures are those of the records."""

import csv
import itertools
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, iterations

import train
from analysis.runs import find_runs
from optimizers import OPTIMIZERS
from records import studies
from records.board import study as board
from records.dissection import results
from records.dissection.results import mean_sd
from records.fresh_h import results as fresh_h_results
from records.gpu_30m import results as gpu_30m_results
from records.rare_tokens import results as rare_tokens_results
from records.rare_tokens import study as rare_tokens
from records.sharpening import results as sharpening_results
from records.sharpening import study as sharpening
from records.small_batch import results as small_batch_results


def test_every_seed_has_a_directory_of_its_own():
    one, two = (studies.PlannedRun('A', 'adamw', (('learning_rate', 0.002), ('seed', seed)))
                for seed in (10 ** 7, 10 ** 7 + 1))
    assert str(one.path) == 'A/adamw,learning_rate=0.002,seed=10000000' and one.path != two.path


@pytest.mark.parametrize('file', ['metrics.jsonl', 'config.json'])
def test_a_run_that_has_just_been_started_is_not_finished(tmp_path, file):
    (tmp_path / file).touch()
    assert studies.finished(tmp_path) is None


def test_a_study_trains_what_is_due_in_its_tree_and_lists_it(tmp_path, monkeypatch, capsys):
    """`main`, with a program in place of train.py: it writes the loss that it is given."""
    here, tree = tmp_path / 'records/toy', tmp_path / 'tree'
    here.mkdir(parents=True)
    tree.mkdir()
    (tree / 'program.py').write_text('''import json, os, pathlib, sys
loss, out_dir = float(sys.argv[1]), pathlib.Path(sys.argv[2].removeprefix('--out_dir='))
(out_dir / 'config.json').write_text(json.dumps({'config': {'max_iters': 1}}))
row = {'iter': 1, 'val/loss': loss, 'train/loss': float(os.environ['OMP_NUM_THREADS'])}
(out_dir / 'metrics.jsonl').write_text(json.dumps(row) + chr(10))''')

    def protocol(asked):
        first = asked.result(0, 'A', 'adamw', learning_rate=2.0)
        if first:
            asked.result(0, 'A', 'clip', learning_rate=first.loss / 4)

    monkeypatch.setattr('signal.signal', lambda *_: None)  # main's handler would stay in this process

    def run(*flags):
        monkeypatch.setattr('sys.argv', ['study.py', f'--tree={tree}', *flags])
        studies.main(protocol, here, 'A toy.', lambda run: ['program.py', str(dict(run.settings)['learning_rate'])])
        return capsys.readouterr().out

    assert 'A/adamw,learning_rate=2\n0 runs finished, 1 due' in run('--list')
    run()
    assert '2 runs finished, 0 due' in run('--list')
    run('--collect')
    assert studies.recorded(here / 'runs.jsonl') == {
        'A/adamw,learning_rate=2': studies.Result(2.0, 1.0), 'A/clip,learning_rate=0.5': studies.Result(0.5, 1.0)}


def test_recorded_runs_are_kept(tmp_path):
    """`collect` keeps the runs that only runs.jsonl has; their results are read from there."""
    config = dict(config={})
    lines = [dict(run='A/one', config=config, metrics={'val/loss': [5.0, None, 1.5], 'train/loss': [None, 2.0, None]}),
             dict(run='A/two', failed='iteration 7: it is not finite', config=config, metrics={'val/loss': [5.0]})]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    studies.collect([tmp_path / 'out'], path)
    assert [*map(json.loads, path.read_text().splitlines())] == lines
    assert studies.recorded(path) == {'A/one': studies.Result(1.5, 2.0), 'A/two': studies.Result()}


def test_the_table_of_the_first_study_is_of_its_records():
    study = (ROOT / 'records/study/README.md').read_text(encoding='utf-8')
    for row in csv.DictReader((ROOT / 'records/study/study.csv').open(encoding='utf-8')):
        T, loss = int(row['T']), mean_sd(float(row['val/loss']), float(row['sd']) if row['seeds'] != '2' else None)
        rate = f'{float(row["learning_rate"]):g} ({row["trials"]})'
        assert f'| {T:,} | {row["optimizer"]} | {rate} | {loss} | {row["seeds"]} |' in study


@pytest.mark.parametrize(('study', 'read', 'draw', 'file'), [
    (results, partial(find_runs, [results.RECORDS]), results.DRAWINGS['curves'], 'curves.csv'),
    (results, partial(find_runs, [results.RECORDS]), results.DRAWINGS['gamma'], 'dissection.csv'),
    (gpu_30m_results, gpu_30m_results.read_runs, gpu_30m_results.draw_curves, 'curves.csv'),
    (fresh_h_results, fresh_h_results.read_results, fresh_h_results.draw_shares, 'shares.csv'),
    (small_batch_results, small_batch_results.read_results, small_batch_results.draw_bands, 'bands.csv'),
    (sharpening_results, sharpening_results.read_runs, sharpening_results.draw_norms, 'norms.csv'),
    (rare_tokens_results, rare_tokens_results.read_arms, rare_tokens_results.draw_losses, 'losses.csv'),
])
def test_the_page_and_the_picture_of_a_study_are_of_its_records(study, read, draw, file):
    found, here = read(), Path(study.__file__).parent
    page = (here / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in study.tables(found))
    written = list(csv.DictReader((here / file).open(encoding='utf-8')))
    assert written == [{key: '' if value is None else str(value) for key, value in row.items()}
                       for row in draw(found)[1]]


@pytest.mark.parametrize('study', [sharpening, rare_tokens, board])
def test_records_are_runs_of_their_protocol(study):
    recorded = studies.recorded(study.HERE / 'runs.jsonl')
    so_far, due = studies.next_runs(study.protocol, lambda run: recorded.pop(str(run.path), None))
    assert not recorded and so_far.done and due


def test_the_runs_of_the_runaway_are_in_the_order_of_their_worth():
    *_, order = studies.next_runs(sharpening.protocol, lambda run: None)
    assert len(order) == 126 and [run.part for run in order[:12]] == ['p=1', 'rows', 'proportional', 'clipped'] * 3


def test_rare_tokens_searches_each_arm_alike_and_then_takes_fresh_seeds():
    """The loss is lowest at a learning rate of 0.001, the middle of what is tuned, and the row's weight decay."""
    def loss_of(run):
        s = dict(run.settings)
        return (5 + abs(math.log2(s['learning_rate'] / 0.001)) + 0.1 * ('weight_decay' in s) + s['seed'] * 1e-6
                + abs(math.log(s.get('gamma', 0.45) / 0.45)))

    made = {}
    while due := studies.next_runs(rare_tokens.protocol, made.get)[1]:
        made[due[0]] = studies.Result(loss_of(due[0]))
    for arm in rare_tokens.ARMS:
        runs = [dict(run.settings) for run in made if run.part == arm]
        search = [s for s in runs if s['seed'] == 1337]
        fresh = [s for s in runs if s['seed'] != 1337]
        assert {s['seed'] for s in fresh} == {*range(1342, 1352 if arm in ('rms', 'mean') else 1348)}
        assert {(s['learning_rate'], s.get('weight_decay')) for s in fresh} == {(0.001, None)}
        assert sum('weight_decay' in s for s in search) == 1 and len(search) >= 5 + 2 + 1


def trained_board(lowest):
    """Return {run: its `Result`} of the board where twice the weight decay helps, and the rate `lowest` is the best."""
    def loss_of(run):
        s = dict(run.settings)
        return 5 + abs(math.log2(s['learning_rate'] / lowest)) - 0.1 * ('weight_decay' in s) + 0.01 * len(s)

    made = {}
    while due := studies.next_runs(board.planned, made.get)[1]:
        made[due[0]] = studies.Result(loss_of(due[0]))
    trials = Counter((run.part, run.optimizer) for run in made)
    assert trials == dict.fromkeys(itertools.product(board.TASKS, board.ARMS), 8)
    return made


def test_board_gives_each_optimizer_eight_trials_of_a_task_and_goes_beyond_an_edge():
    made = trained_board(0.001)
    lion = [dict(run.settings) for run in made if run.part == 'bytes_32' and run.optimizer == 'lion']
    assert {s['learning_rate'] for s in lion} == {0.0057, 0.0028, 0.0014, 0.00071, 0.001}
    assert [s['learning_rate'] for s in lion if 'weight_decay' in s] == [0.001]
    assert board.planned(studies.Study(made.get))['bytes_32']['lion'] == min(
        result.loss for run, result in made.items() if run.part == 'bytes_32' and run.optimizer == 'lion')


def test_board_tries_another_rate_inside_where_both_neighbours_of_the_best_are_tried():
    rates = {dict(run.settings)['learning_rate'] for run in trained_board(0.0057)
             if run.part == 'ids_4' and run.optimizer == 'normuon'}
    assert rates == {0.004, 0.0057, 0.008, 0.011, 0.016}


@pytest.fixture(scope='module')
def programs():
    """The programs of two studies, which add rows to the table of optimizers."""
    before = dict(OPTIMIZERS)
    from records.rare_tokens import run as rare
    from records.sharpening import run as sharp
    yield sharp, rare
    OPTIMIZERS.clear()
    OPTIMIZERS.update(before)


def test_the_arms_of_the_runaway_change_what_the_protocol_says(programs):
    sharp, _ = programs
    h = torch.rand(4, 6)
    assert torch.allclose(sharp.Root.curvature(None, [h])[0], (h * h.mean()).sqrt())
    p, g = torch.zeros(4, 6, requires_grad=True), torch.randn(4, 6)
    optimizer = sharp.Proportional([p], 0.03, (0, 0), gamma=0.6, weight_decay=0, compile=False)
    optimizer.update_hessian([h])
    optimizer.param_groups[0]['lr'], p.grad = 0.01, g
    optimizer.step()
    assert torch.allclose(p, -(g / (0.6 / 0.03 * h)).clamp(-0.01, 0.01))  # θ ← θ − clip(m / (c·h), lr)


@pytest.mark.parametrize('optimizer', ['gnb_clipped', 'rms_embedding'])
def test_a_run_of_a_study_ends_with_its_curvature_and_without_checkpoints(programs, optimizer, corpus, tmp_path,
                                                                          monkeypatch):
    sharp, _ = programs
    monkeypatch.setattr(train, 'evaluate_and_save', sharp.evaluate_and_save)
    monkeypatch.setattr(sharp, 'SEQUENCES', 32)
    sharp.main([*TINY, '--max_iters=2', f'--dataset={corpus}', f'--optimizer_name={optimizer}',
                f'--out_dir={tmp_path / "out"}'])
    *_, curvature, last = map(json.loads, (tmp_path / 'out/metrics.jsonl').read_text().splitlines())
    assert curvature['iter'] == last['iter'] == 2 and curvature['curvature/all'] > 0 and 'val/loss' in last
    assert not iterations(tmp_path / 'out')
