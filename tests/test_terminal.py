"""What a run says: its lines and progress bar, how it answers Ctrl-C, its last lines; what Weights & Biases and trackio
get."""

import json
import os
import re
import signal
import sys
import threading
import types

import pytest
from conftest import STOP_IN_EVALUATION, metrics, rejection

import train as train_module
from runtime import runlog
from runtime.signals import STOPPED

VALUES = dict(out_dir='out/x', eval_interval=4, init_from='scratch', branch_cooldown=0)


class Terminal:
    """A pseudo-terminal of 100 columns, what was written to it, and what a reader then sees: for each line what stands
    after its last carriage return."""

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
        """For inject.py: the run's stdout and stderr are this terminal."""
        return (f'for number in (1, 2):\n'
                f'    os.dup2(os.open({os.ttyname(self.slave)!r}, os.O_WRONLY | os.O_NOCTTY), number)\n')


# ----------------------------------------------------------------------------------------------------------------------
# Lines and bar


def test_the_bar_comes_after_the_settings_and_whole_lines_above_it(train, tmp_path):
    """Also lines that do not come from the log: a warning from anywhere, printed in two parts."""
    faults = """
def disturb():
    sys.stderr.write('a warning ')
    time.sleep(0.2)  # in which the bar is drawn again
    sys.stderr.write('in two parts\\n')
for i in range(10):
    at(i, lambda: time.sleep(0.12))  # the bar is drawn ten times a second
at(3, disturb)
"""
    with Terminal() as terminal:
        done = train(tmp_path, faults=terminal.faults + faults)
    assert done == (0, '', '')
    before, bar, _ = terminal.text.partition('| 0/10 [')
    assert bar and '1 device(s) × 2 × 2 × 32\r\n' in before and 'iter' not in before.rpartition('\r\n')[2]
    drawn = [line for line in terminal.lines if '/10 [' in line]
    assert len(drawn) == 1 and '| 10/10 [' in drawn[0]  # where it was at the end
    for line in ('a warning in two parts', 'iter 5: val loss', 'iter 9/10: loss', f'saved {tmp_path}'):
        assert any(shown.startswith(line) for shown in terminal.lines), terminal.lines
    assert re.search(r'evaluating 1/\d', terminal.text)
    losses = metrics(tmp_path)
    assert f'loss {losses[4]:.4f}, ETA 0:0' in terminal.text


def test_an_error_ends_the_bar_and_is_one_line(train, tmp_path):
    with Terminal() as terminal:
        done = train(tmp_path, faults=terminal.faults + 'at(3, spoil(float("nan")))')
    assert done.code != 0
    assert sum('iteration 3: the loss is not finite' in line for line in terminal.lines) == 1
    assert terminal.lines[-1] == ''  # the shell's prompt has a line of its own


def test_a_pipe_gets_plain_lines_that_say_how_far_the_run_is(train, tmp_path):
    done = train(tmp_path)
    assert not done.err and '\r' not in done.out
    lines = re.findall(r'^iter (\d+)/10: loss [\d.]+, .* tokens/s(, ETA \d+:\d\d)?$', done.out, flags=re.M)
    assert [int(i) for i, _ in lines] == list(range(10))
    assert [bool(eta) for _, eta in lines] == [False] * 2 + [True] * 8  # the first iteration does not count


def test_the_eta_counts_iterations_and_evaluations_of_this_process(tmp_path, monkeypatch, capsys):
    """Resumed at 6 of 20, evaluation every 4: a slow first iteration, 2 s for each other, 30 s for an evaluation."""
    clock = [1000.0]
    monkeypatch.setattr(runlog.time, 'monotonic', lambda: clock[0])
    log = runlog.RunLog(tmp_path, VALUES, total=20, initial=6, enabled=True)
    etas = []
    for i in range(6, 20):
        if i % 4 == 0:
            clock[0] += 30
            log.write({'iter': i, 'val/loss': 3.0}, '')
        etas.append(log.eta())
        clock[0] += 500 if i == 6 else 2
        log.update(loss=3.0)
    # At 8 the evaluations at 12, 16 and 20 are left, and 12 iterations.
    assert etas[:2] == ['', ''] and etas[2] == f', ETA {(12 * 2 + 90) // 60}:{(12 * 2 + 90) % 60:02}'
    assert etas[-1] == ', ETA 0:32'
    log = runlog.RunLog(tmp_path, VALUES, total=20_000, initial=0, enabled=True)
    for _ in range(2):
        log.update(loss=3.0)
        clock[0] += 2
    log.update(loss=3.0)
    assert log.eta() == ', ETA 11:06:34'


def test_a_run_log_writes_what_is_finite_and_prints_the_line(tmp_path, capsys):
    log = runlog.RunLog(tmp_path, VALUES, total=10, initial=2, enabled=True)
    log.write({'iter': 2, 'train/loss': float('nan'), 'lr': 0.5}, 'iter 2: a line')
    log.write({'iter': 3, 'lr': float('inf'), 'tokens': 96}, 'iter 3: a line')
    log.update(float('nan'))
    log.print('a note')
    log.close()
    assert capsys.readouterr().out.splitlines() == ['iter 2: a line', 'iter 3: a line', 'a note']
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert list(map(json.loads, lines)) == [{'iter': 2, 'lr': 0.5}, {'iter': 3, 'tokens': 96}]


def test_the_line_of_an_iteration(tmp_path):
    log = runlog.RunLog(tmp_path, VALUES, total=10, initial=2, enabled=True)
    found = {'train/loss': 2.5, 'lr': 1e-3, 'grad_norm': 0.7, 'step_ms': 12.3, 'tokens_per_sec': 12345.6}
    assert log.progress_line(3, found) == (
        'iter 3/10: loss 2.5000, lr 1.00e-03, grad norm 0.70, 12 ms, 12,346 tokens/s')


def test_a_loss_spike_is_five_standard_deviations_above_the_latest_hundred_losses():
    latest = []
    for i in range(100):
        assert runlog.loss_spike(latest, 3.0 + 0.1 * (-1) ** i) is None  # mean 3, standard deviation 0.1
    assert len(latest) == 100
    copy = list(latest)
    assert runlog.loss_spike(copy, 3.49) is None and copy == [*latest[1:], 3.49]
    assert runlog.loss_spike(latest, 3.51) == pytest.approx(3.0) and latest[-1] == 3.51 and len(latest) == 100


@pytest.mark.parametrize('enabled', [True, False])
def test_a_run_log_without_a_directory_or_rank_writes_nothing(tmp_path, capsys, enabled):
    log = runlog.RunLog(None if enabled else tmp_path, dict(VALUES, wandb_log=True, trackio_log=True), 10, 0, enabled)
    log.write({'iter': 2}, 'a line')
    log.close()
    assert capsys.readouterr().out == 'a line\n' * enabled and not list(tmp_path.iterdir())


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


def test_the_end_says_what_came_out_and_what_to_try_next(train, tmp_path):
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
# Weights & Biases, trackio

# wandb as far as it matters: a step of its own that must not fall, else an entry is ignored; without one it counts on.
WANDB = """
import json
from pathlib import Path
FILE = Path(__file__).with_name('wandb_calls.jsonl')

def add(*call):
    with FILE.open('a') as f:
        f.write(json.dumps(call) + chr(10))

def init(**arguments):
    add('init', {key: value for key, value in arguments.items() if key != 'config'}, arguments['config']['seed'])
    return Run(arguments['id'] or 'abc123')

class Run:
    def __init__(self, id):
        self.id = id

    def define_metric(self, name, step_metric=None):
        add('define', name, step_metric)

    def log(self, entry, step=None):
        assert step is None
        add('log', entry)

    def finish(self):
        add('finish')
"""


def test_a_resumed_run_continues_its_curves_in_wandb(train, tmp_path):
    """It is killed at iteration 8, and resumes from the checkpoint at 5: nothing that it logs again is lost."""
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
    assert logged == ours[-len(logged):] and logged[0]['iter'] == 5
    assert (out / 'wandb_id.txt').read_text() == 'abc123\n'
    done = train(tmp_path / 'new', '--wandb_log=True', faults=path + """
import wandb
def init(**_):
    raise RuntimeError('no API key\\nsecond line')
wandb.init = init
""")
    assert done.code == 1 and done.err == '--wandb_log=True: RuntimeError: no API key\n'


def test_trackio_gets_the_same(tmp_path, monkeypatch):
    calls = []

    def init(**arguments):
        calls.append(arguments)
        return types.SimpleNamespace(log=lambda entry, step: calls.append((entry, step)),
                                     finish=lambda: calls.append('finish'))

    monkeypatch.setitem(sys.modules, 'trackio', types.SimpleNamespace(init=init))
    values = dict(VALUES, trackio_log=True, wandb_project='p', wandb_run_name='')
    for initial in (0, 4):
        log = runlog.RunLog(tmp_path, values, 10, initial, enabled=True)
        log.write({'iter': initial, 'time': 1.5, 'lr': 0.5, 'x': float('nan')}, '')
        log.close()
    assert calls[0] == dict(project='p', name='out/x', config=values, resume='never', embed=False)
    assert calls[3] == dict(calls[0], resume='allow')
    assert calls[1:3] == [({'iter': 0, 'lr': 0.5}, 0), 'finish'] and calls[4] == ({'iter': 4, 'lr': 0.5}, 4)


@pytest.mark.parametrize('package', ['wandb', 'trackio'])
def test_a_missing_package_is_named_before_anything_is_trained(monkeypatch, package, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    assert rejection(train_module.resolve, [f'--{package}_log=True']) == (
        f'--{package}_log=True needs: pip install {package}')
    config = tmp_path / 'config.py'
    config.write_text(f'{package}_log = True\n')
    assert rejection(train_module.resolve, [str(config)]) == (
        f'{config}: {package}_log = True needs: pip install {package}')


@pytest.mark.parametrize('flags, message', [
    (['--gamma=0.1'], '--gamma has no effect with adamw; leave it out'),  # before the ranks have met
    (['--dataset=pysorce'], '--dataset=pysorce: no directory data/pysorce; did you mean pysource?'),  # and after
])
def test_of_several_ranks_one_says_what_is_wrong(train, tmp_path, flags, message):
    done = train(tmp_path / 'out', *flags, ranks=2)
    assert (done.code, done.out, done.err) == (1, '', message + '\n')
