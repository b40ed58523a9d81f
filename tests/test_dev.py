"""dev/: what bench and soak reject; gpu_suite."""

import json
import shutil
import signal
import sys
import time

import pytest
import torch
from conftest import rejection
from fake_runs import fake_run

from analysis import runs
from dev import bench, gpu_suite, soak


@pytest.mark.parametrize('only, words', [('kill=0', 'at least 1'), ('kill=-1', 'at least 1'), ('kill=', 'at least 1'),
                                         ('flood', 'choose from kill')])
def test_soak_needs_faults_and_tries(only, words, capsys):
    with pytest.raises(SystemExit):
        soak.main(['--only', only])
    assert words in capsys.readouterr().err


def test_soak_counts_what_survives(monkeypatch, tmp_path, capsys):
    def fault(directory, tries, settings):
        """A fault."""
        return [(i > 0, 2 * i) for i in range(tries)]
    (tmp_path / 'data' / 'here').mkdir(parents=True)
    (tmp_path / 'data' / 'here' / 'train.bin').touch()
    monkeypatch.setattr(soak, 'ROOT', tmp_path)
    monkeypatch.setattr(soak, 'FAULTS', dict(kill=(fault, 3)))
    argv = ['--dataset=here', '--only', 'kill=4', f'--output={tmp_path / "log"}']
    assert 'what is left' in rejection(soak.main, argv)
    log = (tmp_path / 'log').read_text()
    assert '| A fault | 4 | 3 | 6 |' in log and '3 of 4 survived' in log and log.startswith('python dev/soak.py --data')


def test_bench_rejects_an_output_that_cannot_be_written_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, 'measure', lambda *args: pytest.fail('it began to measure'))
    (tmp_path / 'folder.json').mkdir()
    argv = ['--tiny', '--device=cpu', f'--output={tmp_path / "folder.json"}']
    assert 'cannot be written' in rejection(bench.main, argv)


def test_gpu_suite_resumes_with_what_is_missing(tmp_path, corpus, capsys):
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
    learning_rates = {name: {s['learning_rate'] for s in settings if s['optimizer_name'] == name}
             for name in ('adamw', 'sophiag')}
    assert len(learning_rates['adamw']) >= len(learning_rates['sophiag']) > 1
    assert {item.state for item in items} == {'missing'} and plan('seeds') == []
    for item in items:
        item.item.check()

    # What is recorded counts as done, and once all learning_rates of the headline pair are, the best gets another seed.
    for item in items:
        loss = 3.0 + item.item.settings['learning_rate']
        fake_run(item.record, loss, [f'--max_iters={item.item.settings["max_iters"]}'])
    assert {item.state for item in plan('runs')} == {'done'}
    seeds = [item.item.settings for item in plan('seeds')]
    assert [(s['optimizer_name'], s['max_iters'], s['seed']) for s in seeds] == [('adamw', 20, 1338),
                                                                                 ('sophiag', 10, 1338)]
    assert [s['learning_rate'] for s in seeds] == [min(learning_rates['adamw']), min(learning_rates['sophiag'])]


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


@pytest.mark.parametrize('text', ['{}', '[]', '3', '{"exit_code": null, "seconds": 1}', '{"exit_code": 0}', '{'])
def test_gpu_suite_says_in_one_line_which_record_is_damaged(tmp_path, text):
    (tmp_path / 'tests.json').write_text(text)
    message = rejection(gpu_suite.main, ['--dry_run', '--device=cpu', '--groups=tests', f'--records={tmp_path}'])
    assert message.startswith(f'{tmp_path / "tests.json"}: not ')


def test_gpu_suite_does_not_begin_without_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(gpu_suite, 'prepare_data', lambda args: pytest.fail('it began'))
    assert 'no CUDA device' in rejection(gpu_suite.main, [
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
