"""The output of a run: lines and progress bar, answers to Ctrl-C, last lines, advice, Weights & Biases."""

import json
import os
import re
import signal
import sys
import threading

import pytest
from conftest import STOP_IN_EVALUATION, metrics, rejection

import train as train_module
from runtime import runlog
from runtime.signals import NOT_FINITE, STOPPED

VALUES = dict(out_dir='out/x', init_from='scratch', warmup_iters=3, decay_lr=True)


class Terminal:
    """A pseudo-terminal of 100 columns. `text`: all that was written to it. `lines`: as a reader sees them, without the
    part of a line before its last carriage return."""

    def __enter__(self):
        fcntl, termios, struct = (pytest.importorskip(name) for name in ('fcntl', 'termios', 'struct'))
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 100, 0, 0))
        self.raw = b''
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        return self

    def read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # how a terminal ends
                return
            if not data:
                return
            self.raw += data

    def __exit__(self, *_):
        os.close(self.slave)
        self.reader.join()
        os.close(self.master)
        self.text = self.raw.decode()
        self.lines = [line.rpartition('\r')[2].removeprefix('\033[K') for line in self.text.split('\r\n')]

    @property
    def faults(self):
        """A fault: the run's stdout and stderr are this terminal."""
        return (f'for number in (1, 2):\n'
                f'    os.dup2(os.open({os.ttyname(self.slave)!r}, os.O_WRONLY | os.O_NOCTTY), number)\n')


# ----------------------------------------------------------------------------------------------------------------------
# Lines and bar


def test_the_bar_comes_after_the_settings_and_lines_above_it(train, tmp_path):
    faults = """
from runtime.files import warn
for i in range(10):
    at(i, lambda: time.sleep(0.12))  # the bar is drawn ten times a second
at(3, lambda: warn('a warning'))
"""
    with Terminal() as terminal:
        done = train(tmp_path, faults=terminal.faults + faults)
    assert done == (0, '', ''), terminal.text
    before, bar, _ = terminal.text.partition('| 0/10 [')
    assert bar and '1 device(s) × 2 × 2 × 32\r\n' in before and 'iter' not in before.rpartition('\r\n')[2]
    drawn = [line for line in terminal.lines if '/10 [' in line]
    assert len(drawn) == 1 and '| 10/10 [' in drawn[0]  # where it was at the end
    for line in ('warning: a warning', 'iter 5: val loss', 'iter 9/10: loss', f'saved {tmp_path}'):
        assert any(shown.startswith(line) for shown in terminal.lines), terminal.lines
    assert re.search(r'evaluating 1/\d', terminal.text)
    assert f'loss {metrics(tmp_path)[4]:.4f}, ETA 0:0' in terminal.text


def test_a_divergence_ends_the_bar_with_one_line_that_begins_with_the_advice(train, tmp_path):
    with Terminal() as terminal:
        done = train(tmp_path, faults=terminal.faults + 'at(3, spoil(float("nan")))')
    assert done.code == NOT_FINITE
    # The terminal shows a carriage return's line without its beginning; failed.txt has the line itself.
    line = (tmp_path / 'failed.txt').read_text().strip()
    assert sum(line in shown for shown in terminal.lines) == 1
    assert re.fullmatch(r'iteration 3: the loss is not finite; resume with a lower --learning_rate, or skip it with '
                        r'--skip_nonfinite=1\. Nothing of the iteration was saved \(rank 0, micro-batch 0: .* at '
                        r'\[\d+, \d+\]\)', line)
    assert terminal.lines[-1] == ''  # the shell's prompt has a line of its own


def test_a_pipe_gets_plain_lines_that_show_the_progress(train, tmp_path):
    done = train(tmp_path)
    assert not done.err and '\r' not in done.out
    lines = re.findall(r'^iter (\d+)/10: loss \d\.\d{4}, lr \d\.\d\de-\d\d, grad norm \d\.\d\d, \d+ ms, [\d,]+ tokens/s'
                       r'(, ETA \d+:\d\d)?$', done.out, flags=re.M)
    assert [int(i) for i, _ in lines] == list(range(10))
    assert [bool(eta) for _, eta in lines] == [False] * 2 + [True] * 8  # the first iteration does not count


def test_the_eta_is_at_the_pace_of_this_process_without_its_first_iteration(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(runlog.time, 'monotonic', lambda: clock[0])
    log = runlog.RunLog(tmp_path, VALUES, total=20, initial=6, enabled=True)
    etas = []
    for seconds in (500, 2, 2, 32):  # compiling; steps; a step and an evaluation
        clock[0] += seconds
        log.update(loss=3.0)
        etas.append(log.eta())
    assert etas == ['', ', ETA 0:24', ', ETA 0:22', ', ETA 2:00']
    log.total = 20_000
    assert log.eta() == ', ETA 66:38:00'


@pytest.mark.parametrize('enabled', [True, False])
def test_a_run_log_writes_finite_numbers_and_prints_the_line(tmp_path, capsys, enabled):
    log = runlog.RunLog(tmp_path, VALUES, total=10, initial=2, enabled=enabled)
    log.write({'iter': 2, 'train/loss': float('nan'), 'lr': 0.5}, 'iter 2: a line')
    log.write({'iter': 3, 'lr': float('inf'), 'tokens': 96}, 'iter 3: a line')
    log.update(float('nan'))
    log.close()
    assert capsys.readouterr().out.splitlines() == ['iter 2: a line', 'iter 3: a line'] * enabled
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines() if enabled else []
    assert list(map(json.loads, lines)) == [{'iter': 2, 'lr': 0.5}, {'iter': 3, 'tokens': 96}] * enabled


def test_a_loss_spike_is_five_standard_deviations_above_the_latest_hundred_losses():
    latest = []
    for i in range(100):
        assert runlog.loss_spike(latest, 3.0 + 0.1 * (-1) ** i) is None  # mean 3, standard deviation 0.1
    assert runlog.loss_spike(latest, 3.49) is None and runlog.loss_spike(latest, 3.6) == pytest.approx(3, abs=0.01)
    assert len(latest) == 100


@pytest.mark.parametrize('unclipped, means, way', [(0.004, 'too small', 'raise'), (0.96, 'too large', 'lower')])
def test_advice_on_gamma_comes_once_and_after_the_warm_up(tmp_path, capsys, unclipped, means, way):
    log = runlog.RunLog(tmp_path, VALUES, total=10, initial=0, enabled=True)
    for i in range(6):
        log.write({'iter': i, 'update_unclipped': unclipped if i != 3 else 0.3}, f'line {i}')
    *lines, advice, last = capsys.readouterr().out.splitlines()
    assert lines == [f'line {i}' for i in range(5)] and last == 'line 5'
    assert f'note: {unclipped:.1%} of the coordinates are unclipped: γ·h is {means}' in advice
    assert f'; {way} --gamma until' in advice


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C, and the last lines


def test_ctrl_c_says_at_once_what_it_does_and_what_a_second_one_does(train, tmp_path):
    """Of two ranks that both get it, one answers; the second press ends them."""
    faults = ''.join(f"""
at(3, kill(signal.SIGINT), rank={rank})
at(3, lambda: time.sleep(0.5), rank={rank})
""" for rank in (0, 1))
    done = train(tmp_path, faults=faults, ranks=2)
    assert done.code == STOPPED
    assert done.err == ('Ctrl-C: stopping after this iteration, with a checkpoint; Ctrl-C again ends it at once, '
                        'without\n')
    assert done.out.splitlines()[-2:] == ['stopped at iteration 4 by SIGINT',
                                          'the same command with --init_from=auto resumes it']
    second = 'at(6, kill(signal.SIGINT))\nat(6, lambda: time.sleep(1.1))\nat(6, kill(signal.SIGINT))'
    done = train(tmp_path, '--init_from=auto', faults=second)
    assert done.code == -signal.SIGINT and done.err.splitlines()[1:] == ['ended at once']


def test_other_signals_say_what_they_do_and_an_evaluation_promises_no_checkpoint(train, tmp_path):
    done = train(tmp_path, faults='at(3, kill(signal.SIGTERM))')
    assert done.err == 'SIGTERM: stopping after this iteration, with a checkpoint\n'
    done = train(tmp_path, '--init_from=auto', faults='at(5, kill(signal.SIGTERM))')
    assert done.out.splitlines()[-1] == 'the same command resumes it'
    stop = STOP_IN_EVALUATION.replace("len(calls) == 2 and os.environ['RANK'] == '1'", 'True')
    done = train(tmp_path, '--init_from=auto', '--eval_only=True', faults=stop)
    assert done.err == 'SIGTERM: stopping after this iteration\n' and 'resumes' not in done.out


def test_the_end_gives_the_result_and_what_to_try_next(train, tmp_path):
    done = train(tmp_path)
    last, best = metrics(tmp_path, 'val/loss')[-1], min(metrics(tmp_path, 'val/loss'))
    assert last == best
    assert done.out.splitlines()[-2:] == [
        f'done: val loss {last:.4f}, the lowest; checkpoints (the newest, the best) and metrics.jsonl are in '
        f'{tmp_path}',
        f'next: python scripts/sample.py {tmp_path}, python scripts/plot.py {tmp_path}']
    again = train(tmp_path, '--init_from=auto')  # there is nothing left to do
    assert f'done: lowest val loss {best:.4f}; ' in again.out
    for flags in ['--eval_only=True'], ['--max_iters=20', '--max_hours=1e-9']:
        assert 'done: ' not in train(tmp_path, '--init_from=resume', *flags).out


def test_the_end_names_the_lowest_loss_where_it_is_not_the_last(tmp_path, capsys):
    log = runlog.RunLog(tmp_path, VALUES, total=8, initial=0, enabled=True)
    log.write({'iter': 8, 'val/loss': 3.5}, '')
    log.print_what_next(8, best_val_loss=3.25, stopped=False)
    assert 'done: val loss 3.5000, lowest val loss 3.2500; ' in capsys.readouterr().out
    log.print_what_next(0, best_val_loss=3.25, stopped=True)  # before the first update nothing is saved
    assert capsys.readouterr().out == ''


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases

# The part of wandb that is used.
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
        # The server has received everything up to iteration 2 when the process is killed.
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
    flags = ['--wandb_log=True', '--wandb_project=p', '--wandb_run_name=n', '--init_from=auto']
    assert train(out, *flags, faults=path + 'at(8, kill(signal.SIGKILL))').code == -signal.SIGKILL
    assert train(out, *flags, faults=path, ranks=2).code == 0  # one of two ranks logs
    calls = [json.loads(line) for line in (tmp_path / 'wandb_calls.jsonl').read_text().splitlines()]
    first, second = [call for call in calls if call[0] == 'init']
    assert first == ['init', dict(project='p', name='n', id=None, resume='allow'), 1337]
    assert second == ['init', dict(project='p', name='n', id='abc123', resume='allow'), 1337]
    assert ['define', '*', 'iter'] in calls[:5] and calls[-1] == ['finish']
    logged = [call[1] for call in calls[calls.index(second):] if call[0] == 'log']
    ours = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert logged == [entry for entry in ours if entry['iter'] > 2]
    assert (out / 'wandb_id.txt').read_text() == 'abc123\n'
    done = train(tmp_path / 'new', '--wandb_log=True', faults=path + """
import wandb
def init(**_):
    raise RuntimeError('no API key\\nsecond line')
wandb.init = init
""")
    assert done.code == 1 and done.err == '--wandb_log=True: RuntimeError: no API key\n'


def test_a_missing_package_is_named_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    assert rejection(train_module.resolve, ['--wandb_log=True']) == '--wandb_log=True needs: pip install wandb'
    config = tmp_path / 'config.py'
    config.write_text('wandb_log = True\n')
    assert rejection(train_module.resolve, [str(config)]) == f'{config}: wandb_log = True needs: pip install wandb'


@pytest.mark.parametrize('flags, message', [
    (['--gamma=0.1'], '--gamma has no effect with adamw; leave it out'),  # before the ranks have met
    (['--dataset=pysorce'], '--dataset=pysorce: no directory data/pysorce; did you mean pysource?'),  # and after
])
def test_of_several_ranks_one_prints_the_error(train, tmp_path, flags, message):
    done = train(tmp_path / 'out', *flags, ranks=2)
    assert (done.code, done.out, done.err) == (1, '', message + '\n')
