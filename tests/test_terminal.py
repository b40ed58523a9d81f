"""The output of a run: advice, answers to Ctrl-C, lines and last lines, Weights & Biases."""

import json
import resource
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import metrics, rejection

from analysis.runs import RunRecord
from runtime import runlog
from runtime.signals import STOPPED


def test_a_log_takes_lists_of_finite_numbers(tmp_path):
    log = runlog.RunLog(tmp_path, {}, enabled=True)
    log.record(SimpleNamespace(iter=0, tokens=0, seconds=0.12345), '', dict(
        a=[1, 0.5], b=[1, float('nan')], c=1, d=float('inf')))
    assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == dict(iter=0, tokens=0, time=0.123, a=[1, 0.5], c=1)
    record = RunRecord(tmp_path, dict(config={}), [dict(iter=0, a=[1, 0.5], c=1)])
    assert record.series('a') == ([], [])  # a plot leaves them out


def test_the_time_that_is_left_counts_all_later_iterations():
    log = runlog.RunLog(None, dict(max_iters=7300), enabled=True)
    line = log.progress_line(99, {'train/loss': 1.0, 'lr': 0.1, 'grad_norm': 1.0, 'step_ms': 2e3, 'tokens_per_sec': 1})
    assert line.endswith(', ETA 4:00:00')


def test_a_line_that_a_full_disk_rejects_ends_no_run_and_leaves_no_part(tmp_path, capsys):
    path, (soft, hard) = tmp_path / 'log', resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text('one\n')
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
    try:
        runlog.append_line(path, 'two')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == 'one\n' and '(File too large); training continues' in capsys.readouterr().err


def test_ctrl_c_says_at_once_what_it_does_and_what_a_second_one_does(train, tmp_path):
    """One of two ranks answers. A second signal of any kind ends the process at once."""
    faults = ''.join(f"""
at(3, kill(signal.SIGINT), rank={rank})
at(3, lambda: time.sleep(0.5), rank={rank})
""" for rank in (0, 1))
    done = train(tmp_path, faults=faults, ranks=2)
    assert done.code == STOPPED
    assert done.err == 'SIGINT: stopping after this iteration; Ctrl-C again ends it now\n'
    assert done.out.splitlines()[-2:] == ['stopped at iteration 4 by SIGINT',
                                          'the same command with --auto_resume=True resumes it']
    later = 'at(8, kill(signal.SIGINT)); at(8, lambda: time.sleep(0.3)); at(8, kill(signal.SIGTERM))'
    assert train(tmp_path, '--auto_resume=True', faults=later).code == -signal.SIGTERM


@pytest.mark.parametrize('summary, sent', [(dict(iter=1), [1, 2]), ({}, [0, 1, 2])], ids=['online', 'offline'])
def test_a_resumed_run_continues_its_curves_in_wandb_and_sends_what_it_lacks(tmp_path, monkeypatch, summary, sent):
    """Offline it sends everything, because wandb does not know the earlier run. An empty id counts as none."""
    values = dict(wandb_log=True, wandb_project='p', wandb_run_name='n', out_dir='x', warmup_iters=9)
    (tmp_path / 'wandb_id.txt').touch()
    for known, before in (None, []), ('abc', sent):
        run = mock.Mock(id='abc', summary=summary)
        monkeypatch.setitem(sys.modules, 'wandb', wandb := mock.Mock(init=mock.Mock(return_value=run)))
        log = runlog.RunLog(tmp_path, values, enabled=True)
        wandb.init.assert_called_once_with(project='p', name='n', config=values, id=known, resume='allow')
        assert run.define_metric.mock_calls == [mock.call('iter'), mock.call('*', step_metric='iter')]
        for i in range(3):
            log.record(SimpleNamespace(iter=i, tokens=0, seconds=0.0), '', {})
        log.close()
        run.finish.assert_called_once()
        assert [call.args[0]['iter'] for call in run.log.mock_calls] == [*before, 0, 1, 2]
    runlog.RunLog(tmp_path, values, enabled=False)  # on another rank
    wandb.init.assert_called_once()


def test_a_run_without_wandb_installed_ends_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    assert 'run pip install wandb' in rejection(runlog.start_wandb, tmp_path / 'metrics.jsonl', {})


@pytest.mark.parametrize('call, sent', [('init', 0), ('define_metric', 0), ('log', 0), ('finish', 3)])
def test_a_run_goes_on_without_wandb_after_its_first_failure(train, tmp_path, call, sent):
    """`init` fails without a key or a network, other calls after wandb's process has ended."""
    done = train(tmp_path, '--wandb_log=True', '--max_iters=3', '--eval_interval=3', check=True, faults=f"""
run = mock.Mock(id='abc', summary={{}}, log=lambda entry: print('sent to W&B'))
sys.modules['wandb'] = wandb = mock.Mock(init=mock.Mock(return_value=run))
failing = mock.Mock(side_effect=[ConnectionResetError('connection lost')])
setattr(wandb if {call!r} == 'init' else run, {call!r}, failing)
""")
    assert done.err == ('warning: --wandb_log=True: connection lost; training continues, and metrics.jsonl has '
                        'everything. Offline, set WANDB_MODE=offline, and `wandb sync` later\n')
    assert len(metrics(tmp_path)) == 3 and done.out.count('sent to W&B') == (5 if sent else 0)


@pytest.mark.parametrize('flags, message', [
    (['--gamma=0.1'], '--gamma has no effect with adamw; leave it out'),  # before the ranks connect
    (['--dataset=pysorce'], 'data/pysorce/train.bin: no such file; --dataset is a directory made by a prepare.py, for '
     'your own text by data/text/prepare.py'),  # after the ranks have connected
])
def test_of_several_ranks_one_prints_the_error(train, tmp_path, flags, message):
    done = train(tmp_path / 'out', *flags, ranks=2, machines=2)
    assert (done.code, done.out, done.err) == (1, '', message + '\n') and not (tmp_path / 'out').exists()
