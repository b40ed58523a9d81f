"""Studies: their records are the runs of their protocols, their pages and pictures those of the records."""

import csv
import json
import re

import pytest
from conftest import ROOT

from analysis.runs import find_runs
from records import studies
from records.dissection import results, study
from records.dissection.results import mean_sd
from records.fresh_h import results as fresh_h_results
from records.fresh_h import study as fresh_h
from records.gpu_30m import results as gpu_30m_results
from records.gpu_30m import study as gpu_30m
from records.small_batch import results as small_batch_results
from records.small_batch import study as small_batch


def assert_written(rows, path):
    """The CSV file beside a picture has the numbers that its drawing returns."""
    written = list(csv.DictReader(path.open(encoding='utf-8')))
    assert written == [{key: '' if value is None else str(value) for key, value in row.items()} for row in rows]


def test_the_page_of_fresh_h_is_of_its_records():
    found = fresh_h_results.read_results()
    page = (fresh_h.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in fresh_h_results.tables(found))
    due = studies.next_runs(fresh_h.protocol, lambda run: found.get(str(run.path)))[1]
    assert f'{len(found)} of {len(found) + len(due)} runs' in page
    rows = fresh_h_results.draw_shares(found)[1]
    assert_written(rows, fresh_h.HERE / 'shares.csv')


def test_the_page_of_gpu_30m_is_of_its_records_which_are_the_runs_of_its_protocol():
    runs, page = gpu_30m_results.read_runs(), (gpu_30m_results.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in gpu_30m_results.tables(runs))
    rows = gpu_30m_results.draw_curves(runs)[1]
    assert_written(rows, gpu_30m_results.HERE / 'curves.csv')
    recorded = studies.recorded(gpu_30m_results.HERE / 'runs.jsonl')
    _, due = studies.next_runs(gpu_30m.protocol, lambda run: recorded.pop(str(run.path), None))
    assert not recorded and {run.part for run in due} <= {'d', 'f'}


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
        studies.main(protocol, here, 'A toy.', ['tree'], lambda run: 'tree',
                     lambda run: ['program.py', str(dict(run.settings)['learning_rate'])])
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


def test_the_plan_is_done_by_the_records():
    """But for part D, which was dropped."""
    records = studies.recorded(results.RECORDS / 'runs.jsonl')
    plan, due = studies.next_runs(study.protocol, lambda run: records.get(str(run.path)))
    assert len(plan.done) == len(records) and {run.part for run in due} == {'D'}


@pytest.mark.parametrize(('drawing', 'file'), [('curves', 'curves.csv'), ('gamma', 'dissection.csv')])
def test_the_pictures_are_of_the_records(drawing, file):
    rows = results.DRAWINGS[drawing](find_runs([results.RECORDS]))[1]
    assert_written(rows, results.RECORDS / file)


def test_the_tables_of_the_pages_are_of_the_records():
    front, study, page = ((ROOT / name).read_text(encoding='utf-8') for name in (
        'docs/results.md', 'records/study/README.md', 'records/dissection/README.md'))
    assert all(table in page for table in results.tables(find_runs([results.RECORDS])))
    for row in csv.DictReader((ROOT / 'records/study/study.csv').open(encoding='utf-8')):
        T, loss = int(row['T']), mean_sd(float(row['val/loss']), float(row['sd']) if row['seeds'] != '2' else None)
        rate = f'{float(row["learning_rate"]):g} ({row["trials"]})'
        assert f'| {T:,} | {row["optimizer"]} | {rate} | {loss} | {row["seeds"]} |' in study
        assert loss in re.search(rf'^\| {T:,} \| .*', front, flags=re.M)[0]


def test_the_page_of_small_batch_is_of_its_records_which_are_the_runs_of_its_protocol():
    found, page = small_batch_results.read_results(), (small_batch.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in small_batch_results.tables(found))
    so_far, due = studies.next_runs(small_batch.protocol, lambda run: found.get(str(run.path)))
    assert {str(run.path) for run in so_far.done} == set(found) and not due
    assert f'{len(found)} of {len(found)} runs' in page
    assert_written(small_batch_results.draw_bands(found)[1], small_batch.HERE / 'bands.csv')
