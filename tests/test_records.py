"""records/check.py and runs.jsonl: required contents of a record, and the records of this repository."""

import re
import shlex

import pytest
from conftest import ROOT, rejection
from fake_runs import edit, fake_run, make
from PIL import Image

from analysis import runs
from records import check as records


@pytest.fixture
def record(tmp_path):
    return fake_run(tmp_path / 'run', 3.0, ['--max_iters=100'], machine=dict(cpu='x', gpu=None))


def change(run, **entries):
    """Replace entries of a config.json."""
    edit(run, lambda about: about.update(dict(git_commit='0' * 40, command=['python', 'train.py', '--out_dir=out/x'])
                                         | entries))


@pytest.mark.parametrize(('entries', 'what'), [
    ({}, ''), (dict(machine=None), 'does not name the machine'), (dict(data={}), 'no fingerprint'),
    (dict(git_commit=None), 'no git_commit'), (dict(git_commit='0' * 40 + '+'), 'changed code'),
    (dict(command=['train.py', '--dataset=/somebody/data']), 'names a place on the machine: --dataset=/somebody'),
    (dict(changes=[{'iter': 1, 'key': 'seed', 'from': 1, 'to': 2}]), 'seed was changed')])
def test_an_incomplete_record_is_named(record, tmp_path, capsys, entries, what):
    change(record, **entries)
    if what:
        assert '1 of 1 records are incomplete' in rejection(records.main, [str(tmp_path)])
    else:
        records.main([str(tmp_path)])
    said = capsys.readouterr()
    assert 'AdamW' in said.out and what in said.err and (what or '1 records, all complete' in said.out)


def test_an_unfinished_record_is_named(record, tmp_path, capsys):
    change(record)
    lines = (record / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (record / 'metrics.jsonl').write_text(''.join(lines[:9]))
    rejection(records.main, [str(tmp_path)])
    assert 'validation loss at iteration' in capsys.readouterr().err
    (record / 'failed.txt').write_text('iteration 50: the loss is not finite')
    records.main([str(tmp_path)])  # It is complete.
    assert records.row(runs.find_runs([record])[0])['tokens'] == 40 * 4 * 16


@pytest.fixture
def pair(tmp_path):
    """Return (a directory of five runs, the folder with its runs.jsonl)."""
    diverged = fake_run(tmp_path / 'out/adamw/diverged', 3.0, ['--max_iters=100'], end=30)
    (diverged / 'failed.txt').write_text('iteration 30: the loss is not finite\n')
    for run in diverged, *(make(tmp_path / 'out' / name, name, 100, 3.0 + 0.1 * seed, seed=seed,
                                gpu_memory=lambda i: 1.0 + i) for name in ('adamw', 'sophiag') for seed in (1, 2)):
        change(run, machine=dict(cpu='x'))
    records.main([str(tmp_path / 'out'), '--pack', str(tmp_path / 'records')])
    return tmp_path / 'out', tmp_path / 'records'


def test_packed_runs_are_the_runs(pair):
    out, folder = pair
    before, after = runs.find_runs([out]), runs.find_runs([folder])
    assert [run.out_dir.relative_to(out) for run in before] == [run.out_dir.relative_to(folder) for run in after]
    assert len(before) == 5 and sorted(folder.iterdir()) == [folder / 'runs.jsonl']
    for one, two in zip(before, after):
        assert (one.config, one.about, one.lines, one.failed) == (two.config, two.about, two.lines, two.failed)
        assert one.rejected == two.rejected
    assert [run.failed for run in after if run.diverged] == ['iteration 30: the loss is not finite']


def test_packing_replaces_nothing_and_waits_for_complete_records(pair, tmp_path):
    out, folder = pair
    before = (folder / 'runs.jsonl').read_bytes()
    change(out / 'adamw/diverged', git_commit=None)
    assert 'already holds a record' in rejection(records.main, [str(out / 'adamw'), '--pack', str(folder)])
    assert (folder / 'runs.jsonl').read_bytes() == before
    assert '1 of 5 records are incomplete; nothing is packed' == rejection(
        records.main, [str(out), '--pack', str(tmp_path / 'new')])
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(('selection', 'count'), [
    ('', 5), ('adamw', 3), ('adamw/diverged', 1), ('*/*-1-*', 2), ('adam', None)])
def test_runs_are_chosen_by_name_or_wildcard(pair, selection, count):
    path = f'{pair[1]}/{selection}'
    if count:
        assert len(runs.find_runs([path])) == count
        assert len(runs.find_runs([path, pair[1]])) == 5  # Each run counts once.
    else:
        assert f'{path}: no runs found' in rejection(runs.find_runs, [path])


def test_records_are_finished_runs_of_one_schedule():
    found = runs.find_runs([ROOT / 'records'])
    assert len(found) >= 352
    assert [str(run.out_dir) for run in found if run.rejected and not run.diverged] == []


def test_every_picture_names_its_commit_and_command():
    for path in sorted((ROOT / 'records').rglob('*.png')):
        text = Image.open(path).info
        assert re.fullmatch('[0-9a-f]{40}', text['Commit']), path
        script, *words = shlex.split(text['Command'])
        assert (ROOT / script).is_file() and str(path.relative_to(ROOT)) in words, path
