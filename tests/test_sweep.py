"""scripts/sweep.py and scripts/tune.py."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
from conftest import ROOT, TINY, rejection
from fake_runs import SHAPE, edit, fake_run, rows_of

import train
from analysis import runs
from runtime.signals import undo_at_end
from scripts import curvature, sweep, tune


@pytest.fixture(scope='module', autouse=True)
def forks():
    """Sweeps fork train.py instead of starting Python, unless they have another launcher."""
    popen = subprocess.Popen

    def fork(words, stdout, **options):
        python, script, *argv = words
        if python != sys.executable:
            return popen(words, stdout=stdout, **options)
        process = faults.begin(script, argv, *[Path(stdout.name)] * 2, **options['env'])
        return SimpleNamespace(poll=lambda: process.exitcode, terminate=process.terminate, wait=process.join,
                               kill=process.kill)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.subprocess, 'Popen', fork)
        yield


def test_a_spec_becomes_trials_in_order_with_stable_names(tmp_path):
    spec = dict(base=['--seed=3'], runs=[dict(learning_rate=[1e-3, '2e-3', '0.001'], gamma='1e-1'), dict(gamma=0.2)])
    found = sweep.trials_of(spec, tmp_path)
    assert [trial.out_dir.name for trial in found] == [
        'learning_rate=0.001,gamma=0.1', 'learning_rate=0.002,gamma=0.1', 'gamma=0.2']
    assert found[1].argv == ['--seed=3', '--learning_rate=0.002', '--gamma=0.1']
    assert [trial.settings['dataset'] for trial in sweep.trials_of(dict(runs=[dict(dataset=['007', '1e3'])]), '')] == [
        '007', '1e3']  # names that look like numbers


@pytest.mark.parametrize('key, values, name', [
    ('max_iters', ['1e3', 1000, '1000.0'], 'max_iters=1000'), ('gamma', ['1', 1.0, '1e0'], 'gamma=1'),
    ('bias', ['True', 'true', True], 'bias=True')])
def test_equal_values_are_one_trial(tmp_path, key, values, name):
    trial, = sweep.trials_of(dict(base=SHAPE, runs=[{key: values}]), tmp_path)
    assert trial.out_dir == tmp_path / name


def test_values_of_a_grid():
    assert sweep.split_values(['seed=1,2', 'dataset=a,b']) == dict(seed=['1', '2'], dataset=['a', 'b'])
    for one in ('dataset=a:0.7,b:0.3', 'optimizer_args=a=1, b=2'):
        key, _, value = one.partition('=')
        assert sweep.split_values([one]) == {key: [value]}
    assert 'come after --' in rejection(sweep.split_values, ['seed=1,2', 'config/quickstart.py'])


@pytest.mark.parametrize('path', sorted((ROOT / 'config').rglob('*.json')), ids=lambda path: path.stem)
def test_shipped_specs_resolve(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    found = sweep.trials_of(json.loads(path.read_text()), tmp_path)
    assert len(found) > 3
    for trial in found[::5]:
        trial.check()


def test_a_run_is_checked_on_the_ranks_that_trained_it(tmp_path):
    """The launcher decides their number, and estimates are rounded to a multiple of it."""
    argv = [*SHAPE, '--optimizer_name=sophiag', '--total_batch_size=48', '--batch_size=16',
            '--gradient_accumulation_steps=1', '--hessian_batch_size=25']
    trial = sweep.Trial(tmp_path, {}, argv)
    trial.check()
    fake_run(tmp_path, 3.0, [*argv, '--gradient_accumulation_steps=0', '--hessian_batch_size=27'])
    edit(tmp_path, lambda about: about.update(world_size=3))
    trial.check()


def test_a_run_that_is_there_with_other_settings_is_rejected(tmp_path):
    argv = [*SHAPE, '--eval_sequences=16', '--batch_size=2']
    fake_run(tmp_path, 3.0, [*argv, '--dtype=float32'])
    for same in '--log_interval=3', '--batch_size=1', '--skip_nonfinite=0':
        sweep.Trial(tmp_path, {}, [*argv, same]).check()
    for flag, there in (('--dtype=bfloat16', "dtype = 'float32'"), ('--eval_sequences=8', 'eval_sequences = 16'),
                        ('--total_batch_size=8', 'total_batch_size = 4'), ('--skip_nonfinite=2', 'skip_nonfinite = 0')):
        assert f'holds a run with {there}, not' in rejection(sweep.Trial(tmp_path, {}, [*argv, flag]).check)
    tuned = [*SHAPE, '--init_from=gpt2', '--learning_rate=1e-3']  # the pretrained weights decide the shape
    edit(fake_run(tmp_path / 'tuned', 3.0, tuned), lambda about: about['config'].update(n_layer=12, n_embd=768))
    sweep.Trial(tmp_path / 'tuned', {}, tuned).check()


def test_a_run_ends_with_its_last_iteration(tmp_path):
    """It is not trained again, although its learning rate has not decayed to the end."""
    fake_run(tmp_path, 3.0, [*SHAPE, '--max_iters=100', '--lr_decay_iters=200', '--warmup_iters=0'])
    trial = sweep.Trial(tmp_path, {}, [])
    assert trial.ended
    assert sweep.outcome_of(trial.run) == (None, 'its learning rate decays over 200 iterations, and it was run for 100')


def test_gpus_are_taken_in_turns_and_cores_are_shared(tmp_path, monkeypatch):
    seen, trial = [], sweep.Trial(tmp_path, {}, [])
    monkeypatch.setattr(subprocess, 'Popen', lambda words, env, **_: seen.append(
        (env['CUDA_VISIBLE_DEVICES'], env['OMP_NUM_THREADS'])))
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(sweep.torch.cuda, 'device_count', lambda: 2)
    for visible, jobs, cores in ('', 3, 2), ('4,GPU-5a', 3, None), ('0,1,2,3,4', 2, 8):
        monkeypatch.setattr(sweep.os, 'cpu_count', lambda: cores)  # noqa: B023
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
        for slot in range(jobs):
            sweep.start_trial(trial, [], slot, jobs)
    assert seen == [*((gpu, '1') for gpu in ('0', '1', '0', '4', 'GPU-5a', '4')), ('0,1', '4'), ('2,3', '4')]


def table_of(text):
    """The rows of a printed table, dicts without empty cells."""
    header, *lines = [re.split(' {2,}', line.strip()) for line in text.splitlines()]
    return [{key: cell for key, cell in zip(header, line) if cell != '–'} for line in lines]


def test_the_table_has_no_loss_of_runs_that_cannot_be_compared(tmp_path, capsys):
    found = sweep.trials_of(dict(base=SHAPE, runs=[dict(gamma=[1, 2, 3, 4, 5], max_iters=100)]), tmp_path)
    for trial, loss, end in zip(found, (2.0, 3.2, 3.1), (50, 100, 100)):
        fake_run(trial.out_dir, loss, ['--max_iters=100'], end=end)
    fake_run(found[3].out_dir, 3.0, ['--max_iters=100'],
             changes=[{'iter': 40, 'key': 'learning_rate', 'from': 1, 'to': 2}])
    sweep.show(found)
    assert [(row['gamma'], row.get('val/loss'), row['state']) for row in table_of(capsys.readouterr().out)] == [
        ('3', '3.1000', 'finished'), ('2', '3.2000', 'finished'),
        ('1', None, 'it has a validation loss at iteration 50 of 100 only'),
        ('4', None, 'learning_rate was changed from 1 to 2 at iteration 40'), ('5', None, 'not begun')]


def test_the_table_is_averaged_over_seeds(tmp_path, capsys):
    spec = dict(base=SHAPE, runs=[dict(gamma=[0.1, 0.2, 0.3], seed=[1, 2], max_iters=100)])
    found = sweep.trials_of(spec, tmp_path)
    for trial, loss in zip(found, (3.0, 3.1, 2.9, 2.95, 2.8)):
        fake_run(trial.out_dir, loss, ['--max_iters=100'], data=str(loss < 2.9), grad_clipped=loss / 10)
    sweep.show(found)
    text, common = capsys.readouterr().out, dict(max_iters='100', seeds='2', state='finished')
    assert table_of(text.partition('note')[0]) == [
        dict(common, gamma='0.2', sd='0.0354', grad_clipped='0.2925', **{'val/loss': '2.9250'}),
        dict(common, gamma='0.1', sd='0.0707', grad_clipped='0.3050', **{'val/loss': '3.0500'}),
        dict(common, gamma='0.3', state='finished; not begun')]
    assert '\nnote: the runs differ in the data (fingerprint)' in text


@pytest.fixture(scope='module')
def swept(tmp_path_factory, corpus):
    """The directory of a sweep of three trained runs, of which one diverges."""
    out_dir = tmp_path_factory.mktemp('sweep')
    sweep.main(['--out_dir', str(out_dir), '--jobs', '2', '--grid', 'optimizer_name=sophiag,adamw',
                '--grid', 'learning_rate=1e30', '--', *TINY, f'--dataset={corpus}', '--learning_rate=0.01'])
    return out_dir


def test_a_sweep_trains_what_is_missing_and_sorts_by_loss(swept, capsys):
    """A diverged run is a result and not trained again."""
    out_dir, files = swept, sorted(swept.rglob('metrics.jsonl'))
    before = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 3
    sweep.main(['--out_dir', str(out_dir)])  # the spec is remembered
    assert [path.stat().st_mtime_ns for path in files] == before
    *rows, diverged = table_of(capsys.readouterr().out)
    assert {row['state'] for row in rows} == {'finished'}
    assert [row['val/loss'] for row in rows] == [
        f'{loss:.4f}' for loss in sorted(run.final_loss for run in runs.find_runs([out_dir]) if not run.diverged)]
    assert re.match(r'diverged: iteration \d+: .*; start again with a lower --learning_rate', diverged['state'])


def test_a_sweep_shows_the_last_line_of_a_run_that_failed(tmp_path, capsys):
    argv = ['--out_dir', str(tmp_path), '--launcher', 'sh -c "echo first; echo last"', '--grid', 'seed=1', '--', *SHAPE]
    assert rejection(sweep.main, argv) == f'not finished: 1 of 1 runs; {tmp_path}/seed=1: last'
    assert 'seed=1: failed: last' in capsys.readouterr().err
    argv[4:6] = '--noise=0', '--values', 'seed=1'
    assert f'{tmp_path}/seed=1337: not begun; last. Then run the same command again' == rejection(tune.main, argv)


def test_a_table_of_a_received_directory_executes_nothing(tmp_path, capsys):
    received, mark = tmp_path / 'received', tmp_path / 'executed'
    fake_run(received / 'seed=1', 3.0, ['--max_iters=100'])
    (received / 'evil.py').write_text(f'open({str(mark)!r}, "w").close()\n')
    spec = dict(base=[str(received / 'evil.py'), *SHAPE], runs=[dict(seed=1)])
    (received / 'sweep.json').write_text(json.dumps(spec))
    sweep.main(['--out_dir', str(received), '--table'])
    text = capsys.readouterr().out
    assert 'finished' in text and 'more runs' not in text and not mark.exists()
    fake_run(received / 'seed=2', 3.0, ['--max_iters=100'])
    sweep.main(['--out_dir', str(received), '--table'])
    assert f'note: 1 more runs in {received} are not in its sweep.json' in capsys.readouterr().out


def test_a_table_on_a_terminal_without_its_characters(tmp_path, monkeypatch):
    """Latin-1 lacks the dash of a missing value."""
    (tmp_path / 'sweep.json').write_text(json.dumps(dict(base=SHAPE, runs=[dict(seed=1)])))
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(written := io.BytesIO(), 'latin-1'))
    sweep.main(['--out_dir', str(tmp_path), '--table'])
    sys.stdout.flush()
    assert b'?' in written.getvalue() and b'not begun' in written.getvalue()


@pytest.mark.parametrize('text, problem', [
    ('{"runs": [}', 'JSONDecodeError: Expecting value'), ('{"base": []}', "KeyError: 'runs'"),
    ('[{"seed": 1}]', 'TypeError: ')])
def test_an_invalid_spec_is_one_line(tmp_path, text, problem):
    (tmp_path / 'spec.json').write_text(text)
    message = rejection(sweep.main, ['--out_dir', str(tmp_path), '--spec', str(tmp_path / 'spec.json')])
    assert message.startswith(f'{tmp_path}/spec.json: not a spec, see --help ({problem}')


@undo_at_end()
def test_a_sweep_stops_and_resumes_its_runs(tmp_path, corpus):
    argv = ['--out_dir', str(tmp_path), '--grid', 'seed=1', '--', *TINY, f'--dataset={corpus}', '--max_iters=300',
            '--eval_interval=10000', '--eval_iters=1']
    metrics = tmp_path / 'seed=1' / 'metrics.jsonl'
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outside of the sweep it must not end pytest

    def stop():
        while not (metrics.is_file() and metrics.read_text().count('\n') > 3):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert 'the same command resumes where it stopped' in rejection(sweep.main, argv)
    assert not runs.read_run(tmp_path / 'seed=1').ended
    sweep.main(argv)
    assert runs.read_run(tmp_path / 'seed=1').ended
    assert 'resuming from' in (tmp_path / 'seed=1' / 'log.txt').read_text()


def test_a_search_keeps_what_lowers_the_loss_by_more_than_the_noise():
    """The loss is lowest at a learning rate of 0.004 and γ = 0.2. A rate of 1 diverges."""
    def losses_of(candidates):
        asked.extend(candidates)
        octaves = [(math.log2(float(s['lr']) / 0.004), math.log2(float(s['gamma']) / 0.2)) for s in candidates]
        return [math.inf if s['lr'] == '1' else 3 + 0.05 * (a * a + b * b) + 0.02 * (a - b) ** 2
                for s, (a, b) in zip(candidates, octaves)]

    values = dict(lr=['0.001', '0.002', '0.004', '0.008', '1'], gamma=['0.05', '0.1', '0.2', '0.4'], flat=['1', '2'])
    start, asked = dict(lr='0.001', gamma='0.05', flat='1'), []
    assert tune.search(values, start, 0, losses_of) == (dict(lr='0.004', gamma='0.2', flat='1'), pytest.approx(3))
    asked.clear()
    assert tune.search(values, start, 10, losses_of)[0] == asked[0] == start and len(asked) == 1 + 4 + 3 + 1


def test_a_search_trains_its_candidates_once_and_names_edges(tmp_path, corpus, capsys):
    argv = ['--out_dir', str(tmp_path), '--noise=0', '--values', 'learning_rate=1e-3,1e-2', 'beta1=0.9', '--', *TINY,
            f'--dataset={corpus}', '--max_iters=10', '--learning_rate=0.001']
    for _ in range(2):
        tune.main(argv)
        out = capsys.readouterr().out
        assert 'note: the best learning_rate, 0.01, is at the edge of its --values' in out and 'beta1, ' not in out
        assert 'best of 2 settings tried: --learning_rate=0.01 --beta1=0.9, val loss' in out
    assert len(runs.find_runs([tmp_path])) == 2


@pytest.mark.parametrize(('script', 'argv', 'message'), [
    (tune, ['--values', 'no=1', '--noise=0'], '--no: unknown setting'),
    (sweep, ['--spec=x', '--grid', 'seed=1'], 'pass --spec, or'), (sweep, ['--', '--seed=1'], 'pass --spec, or'),
    (sweep, ['--grid', 'seed=1', 'gamma=1', 'seed=2'], 'seed=2: seed is given twice')])
def test_flags_that_make_no_sense_are_rejected(tmp_path, script, argv, message):
    assert message in rejection(script.main, ['--out_dir', str(tmp_path), *argv])


@pytest.mark.parametrize('estimator', ['gnb', 'hutchinson'])
def test_the_curvature_at_a_checkpoint(swept, tmp_path, capsys, monkeypatch, estimator):
    modes, forward = set(), train.GPT.forward
    monkeypatch.setattr(train.GPT, 'forward', lambda self, *args: (modes.add(self.training), forward(self, *args))[1])
    curvature.main([str(swept / 'optimizer_name=sophiag'), '--estimator', estimator, '--sequences', '32',
                    '--device', 'cpu', '--output', str(tmp_path / 'curvature.png')])
    summary = json.loads((tmp_path / 'curvature.json').read_text())
    *tensors, total = ({key: float(value) for key, value in row.items() if key != 'tensor'}
                       for row in rows_of(tmp_path / 'curvature.csv'))
    assert (summary['iteration'], summary['sequences']) == (10, 32) and modes == {True}
    assert sum(row['parameters'] for row in tensors) == total['parameters']
    if estimator == 'hutchinson':  # the diagonal has negative entries, unlike Gauss-Newton's
        assert 0.3 < total['positive'] < 0.9 and [key for key in total if key[:3] == 'cv_'] == ['cv_1']
        return
    assert total['positive'] > 0.95 and total['agreement'] > 0.5 and total['noise_of_h'] > 0 and total['scale'] > 0
    assert 'mean_age' in capsys.readouterr().out
