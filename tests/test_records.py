"""scripts/records.py: what a record must hold. The records of this repository, and the numbers told of them."""

import csv
import json
import re
import shlex

import pytest
from conftest import ROOT, rejection
from fake_runs import fake_run, rows_of
from PIL import Image

from scripts import records


@pytest.fixture
def record(tmp_path):
    run = fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'], machine=dict(cpu='x', gpu=None, cores=2, threads=2))
    about = json.loads((run / 'config.json').read_text())
    about.update(git_commit='0' * 40, command=['python', 'train.py', '--out_dir=out/x'])
    (run / 'config.json').write_text(json.dumps(about))
    return run


def test_a_complete_record_passes_and_is_in_the_table(record, tmp_path, capsys):
    records.main([str(tmp_path), '--output', str(tmp_path / 'table.csv')])
    assert '1 records, all complete' in capsys.readouterr().out
    (row,) = rows_of(tmp_path / 'table.csv')
    assert (row['optimizer'], row['T'], row['tokens'], row['machine']) == ('AdamW', '100', '6400', 'x')
    assert float(row['val/loss']) == pytest.approx(3.0)


@pytest.mark.parametrize(('change', 'what'), [
    (dict(machine=None), 'does not name the machine'), (dict(machine=dict(cpu='x')), 'cores and threads'),
    (dict(git_commit=None), 'no git_commit'), (dict(git_commit='0' * 40 + '+'), 'changed code'),
    (dict(data={}), 'no fingerprint'), (dict(command=[]), 'no command'),
    (dict(command=['train.py', '--dataset=/somebody/data']), 'names a place on the machine: --dataset=/somebody'),
    (dict(changes=[{'iter': 1, 'key': 'seed', 'from': 1, 'to': 2}]), 'seed was changed')])
def test_an_incomplete_record_is_named(record, tmp_path, capsys, change, what):
    about = json.loads((record / 'config.json').read_text())
    (record / 'config.json').write_text(json.dumps({**about, **change}))
    assert '1 of 1 records are incomplete' in rejection(records.main, [str(tmp_path)])
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(('line', 'what'), [
    ('{"iter": 50, "time": 1, "tokens": 1, "train/loss": 2.0}', 'do not rise'),
    ('{"iter": 101, "time": 1, "tokens": 1, "train/loss": NaN}', 'no finite number')])
def test_metrics_that_cannot_be_are_named(record, tmp_path, capsys, line, what):
    with (record / 'metrics.jsonl').open('a') as f:
        f.write(line + '\n')
    rejection(records.main, [str(tmp_path)])
    assert what in capsys.readouterr().err


def test_an_unfinished_record_is_named_and_a_diverged_one_is_complete(record, tmp_path, capsys):
    lines = (record / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (record / 'metrics.jsonl').write_text(''.join(lines[:9]))
    rejection(records.main, [str(tmp_path)])
    assert 'validation loss at iteration' in capsys.readouterr().err
    (record / 'failed.txt').write_text('iteration 50: the loss is not finite')
    records.main([str(tmp_path)])


def test_the_records_of_this_repository_are_finished_runs_of_one_schedule():
    runs = records.find_runs([ROOT / 'records'])
    assert len(runs) > 90 and [str(run.out_dir) for run in runs if run.rejected] == []


def test_every_picture_says_what_drew_it():
    for path in sorted((ROOT / 'records').rglob('*.png')):
        text = Image.open(path).info
        assert re.fullmatch('[0-9a-f]{40}', text['Commit']), path
        script, *words = shlex.split(text['Command'])
        assert (ROOT / script).is_file() and str(path.relative_to(ROOT)) in words, path


def test_the_older_verdict_is_that_of_its_records():
    result = json.loads((ROOT / 'records/cpu/few_speedup.json').read_text())
    sophia, = (verdict for verdict in result['verdicts'] if verdict['candidate'] == 'sophiag')
    page = ' '.join((ROOT / 'docs/small-runs.md').read_text(encoding='utf-8').split())
    for pattern, found in ((r'by ([\d., and]+) at 300, 600, 1,200 and 2,400 steps, each at its best',
                            [f'{row["difference"]:.3f}' for row in sophia['same_T']]),
                           (r"reaches Sophia-G's loss after ([\d., and]+) of Sophia-G's steps",
                            [f'{row["ratio steps"]:.2f}' for row in sophia['efficiency']])):
        assert re.findall(r'\d\.\d+', re.search(pattern, page)[1]) == found


def test_the_studys_table_is_that_of_its_records():
    page = (ROOT / 'docs/verdict.md').read_text(encoding='utf-8')
    with (ROOT / 'records/study.csv').open(encoding='utf-8') as file:
        for row in csv.DictReader(file):
            first = f'| {int(row["T"]):,} | {row["optimizer"]} |'
            line, = (line for line in page.splitlines() if line.startswith(first))
            sd = f'{float(row["sd"] or 0):.3f}'
            spread = f' ± {"<0.001" if float(sd) == 0 else sd}' if row['sd'] else ''
            lr, mean = float(row['learning_rate']), float(row['val/loss'])
            assert f'| {lr:g} ({row["trials"]}) | {mean:.3f}{spread} |' in line, (row, line)


def test_the_searches_of_adamw_and_sophia_ended_after_one_round():
    for name in ('adamw', 'sophiag'):
        tuning = json.loads((ROOT / f'records/study/1200/{name}/tuning.json').read_text())
        assert tuning['finished'] and tuning['kept'] == []
