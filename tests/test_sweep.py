"""scripts/sweep.py, scripts/tune.py and scripts/paper/max_lr.py, which train through analysis/trials.py."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, rejection
from fake_runs import SHAPE, fake_run, rows_of

from analysis import runs, trials
from runtime import checkpoint
from scripts import sweep, tune
from scripts.paper import hessian_histogram, max_lr

# ----------------------------------------------------------------------------------------------------------------------
# Trials: their directories, their arguments, how far they are


def test_a_spec_becomes_trials_in_order_with_stable_names(tmp_path):
    spec = dict(base=['--seed=3'], runs=[dict(learning_rate=[1e-3, '2e-3', '0.001'], gamma=0.1),
                                         dict(config='config/quickstart.py'), dict(base=['--bias=True'], gamma=0.2)])
    found = trials.trials_of(spec, tmp_path)
    assert [trial.out_dir.name for trial in found] == [
        'learning_rate=0.001,gamma=0.1', 'learning_rate=0.002,gamma=0.1', 'config=quickstart', 'gamma=0.2']
    assert found[1].argv == ['--seed=3', '--learning_rate=0.002', '--gamma=0.1']
    assert found[2].argv == ['--seed=3', 'config/quickstart.py']
    assert found[3].argv == ['--seed=3', '--bias=True', '--gamma=0.2']


@pytest.mark.parametrize('spec, message', [
    (dict(runs=[dict(config=['a/run.py', 'b/run.py'])]), 'two runs of this sweep would be in this directory'),
    (dict(runs=[dict(dataset=['x/y', 'x_y'])]), 'two runs of this sweep would be in this directory'),
    (dict(runs=[dict(base=['--bias=True'], seed=1), dict(base=['--bias=False'], seed=1)]), 'make two sweeps'),
    (dict(runs=[{'../../x': 1}]), 'not a setting'),
    (dict(runs=[3]), 'needs "runs"'), ([], 'needs "runs"'),
    (dict(base='--seed=1', runs=[dict(seed=1)]), '"base" of a sweep has to be a list')])
def test_specs_that_are_rejected(spec, message, tmp_path):
    assert message in rejection(trials.trials_of, spec, tmp_path)


def test_values_of_a_grid():
    assert trials.split_values('--grid', ['seed=1,2', 'dataset=a,b']) == dict(seed=['1', '2'], dataset=['a', 'b'])
    assert trials.split_values('--grid', ['dataset=a:0.7,b:0.3']) == dict(dataset=['a:0.7,b:0.3'])
    assert 'write KEY=V1,V2' in rejection(trials.split_values, '--grid', ['seed'])


@pytest.mark.parametrize('path', sorted((ROOT / 'config').rglob('*.json')), ids=lambda path: path.stem)
def test_shipped_specs_resolve(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    found = trials.trials_of(runs.read_json(path), tmp_path)
    assert len(found) > 3
    for trial in found[::5]:
        trial.check()


def test_gpus_are_taken_in_turns(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    assert [trials.gpu_of(slot, 2) for slot in range(3)] == ['0', '1', '0']
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,GPU-5a')
    assert [trials.gpu_of(slot, 2) for slot in range(3)] == ['4', 'GPU-5a', '4']


def test_the_table_has_no_loss_of_runs_that_cannot_be_compared(tmp_path, capsys):
    found = trials.trials_of(dict(base=SHAPE, runs=[dict(seed=[1, 2, 3, 4, 5], max_iters=100)]), tmp_path)
    for trial, loss, end in zip(found, (2.0, 3.2, 3.1), (50, 100, 100)):
        fake_run(trial.out_dir, loss, ['--max_iters=100'], end=end)
    fake_run(found[3].out_dir, 3.0, ['--max_iters=100'],
             changes=[{'iter': 40, 'key': 'learning_rate', 'from': 1, 'to': 2}])
    trials.show(found, tmp_path)
    assert [(row['seed'], row['val/loss'], row['state']) for row in rows_of(tmp_path / 'results.csv')] == [
        ('3', '3.1', 'finished'), ('2', '3.2', 'finished'), ('1', '', 'iter 50/100, loss 3.40'),
        ('4', '', 'finished, but learning_rate was changed from 1 to 2 at iteration 40'), ('5', '', 'not begun')]
    assert 'the code has changed' not in capsys.readouterr().out

    config = found[0].out_dir / 'config.json'
    config.write_text(json.dumps(dict(json.loads(config.read_text()), code='abc')))
    trials.show(found, tmp_path)
    assert 'the code has changed between these runs (abc: 1 run(s), unknown: 3 run(s))' in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps


@pytest.fixture(scope='module')
def swept(tmp_path_factory, corpus):
    """A sweep of two runs, really trained: (directory, arguments of sweep.py)."""
    out_dir = tmp_path_factory.mktemp('sweep')
    argv = ['--out_dir', str(out_dir), '--jobs', '2', '--grid', 'optimizer_name=sophiag,adamw', '--', *TINY,
            f'--dataset={corpus}', '--learning_rate=0.01']
    sweep.main(argv)
    return out_dir, argv


def test_a_sweep_trains_what_is_missing_and_sorts_by_loss(swept):
    out_dir, argv = swept
    files = sorted(out_dir.rglob('metrics.jsonl'))
    before = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 2
    sweep.main(['--out_dir', str(out_dir)])  # the spec is remembered
    assert [path.stat().st_mtime_ns for path in files] == before
    rows = rows_of(out_dir / 'results.csv')
    losses = [float(row['val/loss']) for row in rows]
    assert losses == sorted(losses) and losses == sorted(run.last('val/loss') for run in runs.find_runs([out_dir]))
    assert {row['state'] for row in rows} == {'finished'}


def test_a_sweep_does_not_take_a_run_with_other_settings_for_its_own(swept):
    out_dir, argv = swept
    for flag, message in (('--learning_rate=0.02', r'holds a run with learning_rate = 0\.01, asked for is 0\.02'),
                          ('--seed=2', 'holds a run with seed = 1337, asked for is 2'),
                          ('--learning_rat=0.02', 'unknown setting')):
        with pytest.raises(SystemExit, match=message):
            sweep.main([*argv, flag])


def test_a_sweep_shows_the_last_line_of_a_run_that_failed(tmp_path, corpus, capsys):
    """Here the run fails only once it trains: its data set has too few tokens."""
    argv = ['--out_dir', str(tmp_path), '--grid', 'block_size=1000000', '--', *TINY, f'--dataset={corpus}']
    message = rejection(sweep.main, argv)
    last, = (tmp_path / 'block_size=1000000/log.txt').read_text().splitlines()[-1:]
    assert last and message == f'not finished: 1 of 1 runs; block_size=1000000: {last}'
    assert f'block_size=1000000: failed: {last}' in capsys.readouterr().err


@pytest.mark.parametrize('launcher', [sys.executable, f'{sys.executable} -m torch.distributed.run --standalone'])
def test_a_run_that_diverged_is_a_result(tmp_path, corpus, launcher):
    """Under torchrun, too, whose exit code does not tell. It is tried again only with --retry."""
    argv = ['--out_dir', str(tmp_path), '--launcher', launcher, '--grid', 'learning_rate=1e30', '--', *TINY,
            f'--dataset={corpus}']
    sweep.main(argv)
    (log,) = tmp_path.rglob('log.txt')
    before = log.read_text()
    sweep.main(argv)
    assert log.read_text() == before
    assert rows_of(tmp_path / 'results.csv')[0]['state'].startswith('diverged: iteration ')


def test_only_and_retry(tmp_path, monkeypatch):
    argv = ['--out_dir', str(tmp_path), '--grid', 'seed=1,2,3', '--', *SHAPE]
    failures = [tmp_path / f'seed={seed}' / checkpoint.FAILED for seed in (1, 2, 3)]
    for path in failures:
        path.parent.mkdir()
        path.write_text('iteration 3: the loss is not finite')
    chosen = []
    monkeypatch.setattr(sweep, 'train_all', lambda trials, *_: chosen.extend(trials))
    assert 'not finished: 1 of 1' in rejection(sweep.main, ['--only=1', '--retry', *argv])
    assert [trial.settings for trial in chosen] == [dict(seed='2')]
    assert [path.exists() for path in failures] == [True, False, True]
    assert 'there are runs 0 to 2' in rejection(sweep.main, ['--only=3', *argv])


def test_a_table_of_a_received_directory_executes_nothing(tmp_path, capsys):
    received, mark = tmp_path / 'received', tmp_path / 'executed'
    fake_run(received / 'seed=1', 3.0, ['--max_iters=100'])
    (received / 'evil.py').write_text(f'open({str(mark)!r}, "w").close()\n')
    spec = dict(base=[str(received / 'evil.py'), *SHAPE], runs=[dict(seed=1)])
    (received / 'sweep.json').write_text(json.dumps(spec))
    for flag in ('--table', '--dry_run'):
        sweep.main(['--out_dir', str(received), flag])
        assert 'finished' in capsys.readouterr().out and not mark.exists()


def test_a_sweep_stops_and_resumes_its_runs(tmp_path, corpus):
    argv = [sys.executable, 'scripts/sweep.py', '--out_dir', str(tmp_path), '--grid', 'seed=1', '--', *TINY,
            f'--dataset={corpus}', '--max_iters=300', '--eval_interval=10000', '--eval_iters=1']
    env = dict(os.environ, OMP_NUM_THREADS='1')
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / 'seed=1' / 'metrics.jsonl'
    while not (metrics.is_file() and metrics.read_text().count('\n') > 20):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0]
    assert process.returncode and 'the same command resumes where it stopped' in said, said
    assert runs.read_run(tmp_path / 'seed=1').unfinished
    subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    assert not runs.read_run(tmp_path / 'seed=1').unfinished
    assert 'resuming from' in (tmp_path / 'seed=1' / 'log.txt').read_text()


def test_a_slurm_array(tmp_path):
    place = tmp_path / "a blank, 100%done 'quoted'"
    sweep.main(['--out_dir', str(place), '--slurm=--gres=gpu:1', '--grid', 'seed=1,2,3', '--', *SHAPE])
    text = (place / 'sweep.sbatch').read_text()
    assert text.startswith('#!/bin/bash\n') and '#SBATCH --array=0-2\n' in text and '#SBATCH --gres=gpu:1\n' in text
    assert '100%%done' in text and text.count('%a') == 1
    shell = 'srun() { printf "%s\\n" "$SRUN_CPUS_PER_TASK" "$@"; }\n'
    done = subprocess.run(['bash', '-eu', '-c', shell + text], capture_output=True, text=True, check=True,
                          env=dict(SLURM_ARRAY_TASK_ID='1', SLURM_CPUS_PER_TASK='8', PATH='/usr/bin:/bin'))
    assert done.stdout.splitlines() == [
        '8', sys.executable, str(ROOT / 'scripts/sweep.py'), '--out_dir', str(place), '--only', '1']
    words = [shlex.split(line.removeprefix('#SBATCH ')) for line in text.splitlines() if line.startswith('#SBATCH')]
    assert all(len(word) == 1 for word in words) and [f'--job-name={place.name}'] in words
    assert not list(place.glob('seed*')), 'nothing should have been trained'


# ----------------------------------------------------------------------------------------------------------------------
# The coordinate search


@pytest.fixture
def landscape(monkeypatch):
    """Runs in place of training: their loss is lowest, 3, at learning_rate = 0.004 and gamma = 0.2, where the best
    learning rate rises with γ; a learning rate of 1 diverges. Yields the list of the runs that were trained."""
    trained = []

    def start(trial, *_):
        lr, gamma = (float(trial.settings[key]) for key in ('learning_rate', 'gamma'))
        trained.append((lr, gamma))
        octaves = math.log2(lr / 0.004), math.log2(gamma / 0.2)
        loss = 3 + 0.05 * octaves[0] ** 2 + 0.05 * octaves[1] ** 2 + 0.02 * (octaves[0] - octaves[1]) ** 2
        argv = ['--max_iters=100', '--optimizer_name=sophiag', f'--learning_rate={lr}', f'--gamma={gamma}']
        fake_run(trial.out_dir, loss, argv, end=30 if lr == 1 else 100)
        if lr == 1:
            (trial.out_dir / checkpoint.FAILED).write_text('iteration 30: the loss is not finite')
        return SimpleNamespace(poll=lambda: 0, terminate=lambda: None, wait=lambda _: 0, kill=lambda: None)
    monkeypatch.setattr(trials, 'start', start)
    monkeypatch.setattr(trials.time, 'sleep', lambda _: None)
    return trained


VALUES = ['--values', 'learning_rate=1e-3,2e-3,4e-3,8e-3,1', 'gamma=0.05,0.1,0.2,0.4']
BASE = ['--', *SHAPE, '--max_iters=100', '--optimizer_name=sophiag', '--learning_rate=1e-3']


def test_a_search_finds_the_best_settings_and_records_every_trial(tmp_path, landscape, capsys):
    argv = ['--out_dir', str(tmp_path), *VALUES, '--noise=0', *BASE]
    tune.main(argv)
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['best'] == dict(learning_rate='0.004', gamma='0.2') and record['val/loss'] == pytest.approx(3)
    assert record['finished'] and record['start'] == dict(learning_rate='0.001', gamma='0.05')
    assert len(record['trials']) == len(landscape) == len(set(landscape))  # nothing is trained twice
    assert [trial['val/loss'] for trial in record['trials'] if trial['learning_rate'] == '1'] == [None] * len(
        [run for run in landscape if run[0] == 1])
    assert '--learning_rate=0.004 --gamma=0.2, val loss 3.0000' in capsys.readouterr().out
    tune.main(argv)
    assert len(record['trials']) == len(landscape)


def test_an_interrupted_search_continues(tmp_path, landscape, monkeypatch):
    start = trials.start

    def interrupted(*args):
        if len(landscape) == 3:
            raise KeyboardInterrupt
        return start(*args)
    monkeypatch.setattr(trials, 'start', interrupted)
    argv = ['--out_dir', str(tmp_path), *VALUES, '--noise=0.01', *BASE]
    assert 'the same command resumes' in rejection(tune.main, argv)
    monkeypatch.setattr(trials, 'start', start)
    tune.main(argv)
    assert len(landscape) == len(set(landscape))
    assert json.loads((tmp_path / 'tuning.json').read_text())['val/loss'] == pytest.approx(3)


def test_a_search_keeps_nothing_within_the_noise(tmp_path, landscape, capsys):
    tune.main(['--out_dir', str(tmp_path), *VALUES, '--noise=10', *BASE])
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['kept'] == [] and record['best'] == record['start'] and len(landscape) == 1 + 4 + 3
    assert 'learning_rate=0.001 is at the edge' in capsys.readouterr().out


def test_a_search_ends_after_the_rounds_asked_for(tmp_path, landscape):
    argv = ['--out_dir', str(tmp_path), *VALUES, '--noise=0.01']
    tune.main([*argv, '--rounds=1', *BASE])
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['finished'] and record['rounds'] == 1 and record['kept']
    assert len(landscape) == 1 + 4 + 3  # the start, then every other value of either setting once
    tune.main([*argv, *BASE])
    assert len(landscape) > 1 + 4 + 3  # without a limit it goes round again after a gain


@pytest.mark.parametrize(('argv', 'message'), [
    (['--values', 'seed=1', '--noise=1', '--rounds=0'], '--rounds=0: at least 1'),
    (['--values', 'seed=1', '--noise=-1'], 'at least 0'), (['--values', 'seed=1', '--noise=nan'], 'at least 0'),
    (['--values', 'seed=1'], '--noise')])
def test_searches_that_make_no_sense_are_rejected(tmp_path, argv, message, capsys):
    with pytest.raises(SystemExit):
        tune.main(['--out_dir', str(tmp_path), *argv])
    assert message in capsys.readouterr().err
    assert 'not a setting' in rejection(tune.main, ['--out_dir', str(tmp_path), '--values', 'nosuch=1', '--noise=1'])


# ----------------------------------------------------------------------------------------------------------------------
# Scripts of the paper that train, or read a checkpoint


def test_max_lr_finds_the_largest_stable_rate(tmp_path):
    # Runs as they would lie there: up to 2e-3 stable with scaling, up to 1e-3 without, where 2e-3 ends on a plateau.
    for scaled, losses in [(True, {1e-3: 3.5, 2e-3: 3.3, 4e-3: 6.5}), (False, {1e-3: 3.5, 2e-3: 4.9})]:
        entry = dict(optimizer_name='adamw', scale_attn_by_inverse_layer_idx=scaled, learning_rate=list(losses))
        base = ['--max_iters=100', *SHAPE]
        for trial, loss in zip(trials.trials_of(dict(base=base, runs=[entry]), tmp_path), losses.values()):
            fake_run(trial.out_dir, loss, [f'--{key}={value}' for key, value in trial.settings.items()]
                     + ['--max_iters=100'])
    max_lr.main(['--out_dir', str(tmp_path), '--optimizers', 'adamw', '--learning_rates', '1e-3', '2e-3', '4e-3',
                 '--', *base])
    largest = json.loads((tmp_path / 'max_lr.json').read_text())['largest']
    assert [(row['attention_scaling'], row['largest_stable']) for row in largest] == [(True, 2e-3), (False, 1e-3)]


@pytest.mark.parametrize('estimator', ['gnb', 'hutchinson'])
def test_hessian_histogram_of_a_checkpoint(swept, tmp_path, estimator):
    out_dir, _ = swept
    hessian_histogram.main([str(out_dir / 'optimizer_name=sophiag'), '--estimator', estimator, '--samples', '2',
                            '--batch_size', '4', '--device', 'cpu', '--output', str(tmp_path / 'histogram.png')])
    summary = json.loads((tmp_path / 'histogram.json').read_text())
    assert summary['iteration'] == 10 and summary['estimator'] == estimator
    counted = sum(int(row['parameters']) for row in rows_of(tmp_path / 'histogram.csv'))
    assert 0.98 * summary['positive'] * summary['parameters'] < counted <= summary['parameters']
    # Gauss-Newton is positive semidefinite; the Hessian's own diagonal is not.
    assert (summary['negative'] == 0) is (estimator == 'gnb')
