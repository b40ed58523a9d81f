"""The output of a run: advice, answers to Ctrl-C, lines and last lines, Weights & Biases."""

import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from conftest import iterations, metrics

from analysis.runs import RunRecord
from runtime import runlog
from runtime.signals import STOPPED


@pytest.mark.parametrize('unclipped, way', [(0.004, 'raise'), (0.96, 'lower')])
def test_advice_on_gamma_comes_once_and_after_the_warm_up(tmp_path, capsys, unclipped, way):
    log = runlog.RunLog(tmp_path, dict(auto_resume=False, warmup_iters=3), enabled=True)
    for i in range(6):
        log.record(SimpleNamespace(iter=i, tokens=0, seconds=0.0), f'line {i}', {
            'update_unclipped': unclipped if i != 3 else 0.3})
    *lines, advice, last = capsys.readouterr().out.splitlines()
    assert lines == [f'line {i}' for i in range(5)] and last == 'line 5'
    assert f'note: {unclipped:.1%} of the coordinates are unclipped; {way} --gamma until' in advice


def test_a_log_takes_lists_of_finite_numbers(tmp_path):
    log = runlog.RunLog(tmp_path, dict(warmup_iters=9), enabled=True)
    log.record(SimpleNamespace(iter=0, tokens=0, seconds=0.0), '', dict(
        a=[1, 0.5], b=[1, float('nan')], c=1, d=float('inf')))
    assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == dict(iter=0, tokens=0, time=0, a=[1, 0.5], c=1)
    record = RunRecord(tmp_path, {}, {}, [dict(iter=0, a=[1, 0.5], c=1)])
    assert record.series('a') == ([], [])  # a plot leaves them out


def test_ctrl_c_says_at_once_what_it_does_and_what_a_second_one_does(train, tmp_path):
    """Of two ranks that both get it, one answers. A second signal of any kind ends the process at once."""
    faults = ''.join(f"""
at(3, kill(signal.SIGINT), rank={rank})
at(3, lambda: time.sleep(0.5), rank={rank})
""" for rank in (0, 1))
    done = train(tmp_path, faults=faults, ranks=2)
    assert done.code == STOPPED
    assert done.err == 'SIGINT: stopping after this iteration; Ctrl-C again ends it now\n'
    assert done.out.splitlines()[-2:] == ['stopped at iteration 4 by SIGINT',
                                          'the same command with --auto_resume=True resumes it']
    done = train(tmp_path, '--auto_resume=True', faults='at(6, kill(signal.SIGINT)); at(6, kill(signal.SIGTERM))')
    assert done.code == -signal.SIGTERM


def test_a_first_signal_does_not_end_a_run_that_stops_at_its_time_limit(train, tmp_path):
    """A scheduler sends it at the end of a job, while the run saves."""
    done = train(tmp_path, faults="""
from runtime.signals import StopSignals
at(3, lambda: vars(next(one for one in gc.get_objects() if isinstance(one, StopSignals))).update(deadline=0.0))
save = checkpoint.save_run
checkpoint.save_run = lambda *args: (kill(signal.SIGTERM)(), save(*args))[1]
""")
    assert done.code == STOPPED and iterations(tmp_path) == [4], done.err
    assert 'stopped at iteration 4 by max_hours' in done.out


def test_lines_show_the_progress_and_the_end_says_what_to_try_next(train, tmp_path):
    done = train(tmp_path)
    lines = re.findall(r'^iter (\d+)/10: loss \d\.\d{4}, lr \d\.\d\de-\d\d, grad norm \d\.\d\d, \d+ ms, '
                       r'[\d,]+ tokens/s, ETA 0:\d\d:\d\d$', done.out, flags=re.M)
    assert lines == [str(i) for i in range(10)] and not done.err
    lowest = min(metrics(tmp_path, 'val/loss'))
    assert done.out.splitlines()[-2:] == [
        f'done: lowest val loss {lowest:.4f}; checkpoints and metrics.jsonl are in {tmp_path}',
        f'next: python scripts/sample.py {tmp_path}, python scripts/plot.py {tmp_path}']
    stopped = train(tmp_path, '--auto_resume=True', '--max_iters=20', '--max_hours=1e-9')
    assert stopped.out.splitlines()[-1] == 'the same command resumes it' and 'done: ' not in stopped.out


# The part of Weights & Biases that is used.
WANDB = """
import json
from pathlib import Path
FILE = Path(__file__).with_name('wandb_calls.jsonl')

def add(*call):
    with FILE.open('a') as f:
        f.write(json.dumps(call) + chr(10))

def init(**arguments):
    add('init', {key: value for key, value in arguments.items() if key != 'config'}, arguments['config']['seed'])
    return Run(arguments['id'])

class Run:
    def __init__(self, id):
        self.id, self.resumed = id or 'abc123', id is not None
        # The server has received a line of iteration 2 when the process is killed.
        self.summary = dict(iter=2) if self.resumed else {}

    def define_metric(self, name, step_metric=None):
        add('define', name, step_metric)

    def log(self, entry, step=None):
        assert step is None
        add('log', entry)

    def finish(self):
        add('finish')
"""


def test_a_resumed_run_continues_its_curves_in_wandb_and_sends_what_a_kill_has_lost(train, tmp_path):
    """It is killed at iteration 8, and resumes from the checkpoint at 5."""
    (tmp_path / 'wandb.py').write_text(WANDB)
    path, out = f'sys.path.insert(0, {str(tmp_path)!r})\n', tmp_path / 'out'
    flags = ['--wandb_log=True', '--wandb_project=p', '--wandb_run_name=n', '--auto_resume=True']
    assert train(out, *flags, faults=path + 'at(8, kill(signal.SIGKILL))').code == -signal.SIGKILL
    assert train(out, *flags, faults=path, ranks=2).code == 0  # one of two ranks logs
    calls = [json.loads(line) for line in (tmp_path / 'wandb_calls.jsonl').read_text().splitlines()]
    first, second = [call for call in calls if call[0] == 'init']
    assert first == ['init', dict(project='p', name='n', id=None, resume='allow'), 1337]
    assert second == ['init', dict(project='p', name='n', id='abc123', resume='allow'), 1337]
    assert ['define', '*', 'iter'] in calls[:5] and calls[-1] == ['finish']
    logged = [call[1] for call in calls[calls.index(second):] if call[0] == 'log']
    ours = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert logged == [entry for entry in ours if entry['iter'] >= 2]
    assert (out / 'wandb_id.txt').read_text() == 'abc123\n'
    done = train(tmp_path / 'new', '--wandb_log=True', faults=path + """
import wandb
def init(**_):
    raise RuntimeError('no API key\\nsecond line')
wandb.init = init
""")
    assert done.code == 1 and done.err == '--wandb_log=True: RuntimeError: no API key\n'
    (tmp_path / 'wandb.py').unlink()
    (tmp_path / 'wandb').mkdir()  # where wandb keeps its runs
    done = train(tmp_path / 'newer', '--wandb_log=True', faults=path)
    assert done.code == 1 and done.err == (
        '--wandb_log=True: the package wandb is not installed; pip install wandb, or set --wandb_log=False\n')


def test_a_run_that_resumes_offline_writes_all_its_lines_again(tmp_path, monkeypatch):
    """wandb then knows of no earlier run. An empty id is none."""
    logged, ids = [], []
    run = SimpleNamespace(id='abc', resumed=False, summary={}, define_metric=lambda *_, **__: None, log=logged.append)
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=lambda id, **_: ids.append(id) or run))
    path, values = tmp_path / 'metrics.jsonl', dict(wandb_project='p', wandb_run_name='', out_dir='x')
    path.write_text('{"iter": 0}\n{"iter": 1}\n')
    (tmp_path / 'wandb_id.txt').write_text('')
    runlog.start_wandb(path, values)
    assert logged == []  # of another run, which logged nothing to wandb
    runlog.start_wandb(path, values)
    assert logged == [{'iter': 0}, {'iter': 1}] and ids == [None, 'abc']


def test_a_directory_with_spaces_is_quoted_in_what_comes_next(capsys):
    runlog.RunLog(None, dict(out_dir='my run'), True).print_what_next(10, 3.0, False)
    assert "next: python scripts/sample.py 'my run', python scripts/plot.py 'my run'" in capsys.readouterr().out


@pytest.mark.parametrize('flags, message', [
    (['--gamma=0.1'], '--gamma has no effect with adamw; leave it out'),  # before the ranks have met
    (['--dataset=pysorce'], '--dataset=pysorce: no directory data/pysorce; did you mean pysource?'),  # and after
])
def test_of_several_ranks_one_prints_the_error(train, tmp_path, flags, message):
    done = train(tmp_path / 'out', *flags, ranks=2)
    assert (done.code, done.out, done.err) == (1, '', message + '\n') and not (tmp_path / 'out').exists()
