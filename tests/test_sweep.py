"""scripts/sweep.py and what trains through it: paths, names of directories, Slurm scripts, tables of received runs."""

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
from conftest import ROOT, TINY, rejection, write_bins
from fake_runs import SHAPE, fake_run, rows_of

from analysis import runs
from runtime import checkpoint
from scripts import sweep
from scripts.paper import hessian_histogram, max_lr, tune_gamma


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current directory outside the repository, with a config file of the same name as one of the repository's."""
    place = tmp_path / 'elsewhere'
    (place / 'config').mkdir(parents=True)
    (place / 'config/quickstart.py').write_text('learning_rate = 0.125\nmax_iters = 100\noptimizer_name = "sophiag"\n')
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def launcher(tmp_path):
    """A --launcher that leaves a finished run with train.py's arguments, as it resolves them where it is started."""
    script = tmp_path / 'launch.py'
    script.write_text(f'''import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from fake_runs import fake_run
train, *argv, out_dir, resume = sys.argv[1:]
fake_run(out_dir.partition("=")[2], 3.0, argv, update_unclipped=0.3)
''')
    return shlex.join([sys.executable, str(script)])


def learning_rates(directory):
    return [json.loads(path.read_text())['config']['learning_rate'] for path in directory.rglob('config.json')]


def test_a_sweep_outside_the_repository_trains_the_config_it_checks(elsewhere, launcher, monkeypatch, tmp_path):
    sweep.main(['--out_dir', 'out', '--launcher', launcher, '--grid', 'seed=1', '--', 'config/quickstart.py',
                *SHAPE])
    assert learning_rates(elsewhere) == [0.125]
    monkeypatch.chdir(tmp_path)  # the stored spec names the same file from anywhere
    sweep.main(['--out_dir', 'elsewhere/out', '--launcher', launcher])


def test_max_lr_and_tune_gamma_outside_the_repository_train_the_config_they_check(elsewhere, launcher, capsys):
    max_lr.main(['--out_dir', 'a', '--launcher', launcher, '--optimizers', 'sophiag', '--learning_rates', '0.25', '--',
                 'config/quickstart.py'])
    iterations = [json.loads(path.read_text())['config']['max_iters'] for path in elsewhere.rglob('config.json')]
    assert iterations == [100, 100]
    tune_gamma.main(['--out_dir', 'b', '--launcher', launcher, '--iters', '100', '--', 'config/quickstart.py'])
    assert learning_rates(elsewhere / 'b') == [0.125]
    assert 'gamma = 0.05' in capsys.readouterr().out


def test_shipped_configs_are_found_from_outside_the_repository(elsewhere, capsys):
    sweep.main(['--out_dir', 'out', '--dry_run', '--grid', 'seed=1', '--', 'config/train_gpt2_small_adamw.py'])
    assert 'train.py config/train_gpt2_small_adamw.py' in capsys.readouterr().out
    message = rejection(sweep.main, ['--out_dir=out', '--grid', 'seed=1', '--', 'config/nosuch.py'])
    assert 'no such config file' in message


@pytest.mark.parametrize('runs', [
    [dict(config=['a/run.py', 'b/run.py'])], [dict(dataset=['x/y', 'x_y'])], [dict(dataset=['x,y', 'x_y'])],
    [dict(base=['--bias=True'], seed=1), dict(base=['--bias=False'], seed=1)]])
def test_different_runs_never_share_a_directory(runs, tmp_path):
    assert 'two runs of this sweep would be in this directory' in rejection(sweep.expand, dict(runs=runs), tmp_path)


def test_close_numbers_are_different_runs_and_equal_ones_are_the_same(tmp_path):
    rates = ['0.01', '0.010000000000001', 1e-2, '1e-2', '10e-3']
    items = sweep.expand(dict(runs=[dict(learning_rate=rates)]), tmp_path)
    assert [item.out_dir.name for item in items] == ['learning_rate=0.01', 'learning_rate=0.010000000000001']


def test_a_key_that_is_no_setting_names_no_directory_outside(tmp_path):
    assert 'no such setting' in rejection(sweep.expand, dict(runs=[{'../../x': 1}]), tmp_path)


def test_a_table_or_a_list_of_a_received_directory_executes_nothing(tmp_path, capsys):
    received, mark = tmp_path / 'received', tmp_path / 'executed'
    fake_run(received / 'seed=1', 3.0, ['--max_iters=100'])
    (received / 'evil.py').write_text(f'open({str(mark)!r}, "w").close()\n')
    spec = dict(base=[str(received / 'evil.py'), *SHAPE], runs=[dict(seed=1)])
    (received / 'sweep.json').write_text(json.dumps(spec))
    for flag in ('--table', '--dry_run'):
        sweep.main(['--out_dir', str(received), flag])
        assert 'finished' in capsys.readouterr().out and not mark.exists()


def test_a_run_whose_settings_were_changed_on_the_way_has_no_loss_in_the_table(tmp_path):
    (item,) = sweep.expand(dict(base=SHAPE, runs=[dict(max_iters=100)]), tmp_path)
    fake_run(item.out_dir, 3.0, ['--max_iters=100'], changes=[{'iter': 40, 'key': 'max_iters', 'from': 50, 'to': 100}])
    (row,) = sweep.table([item])
    assert row['val/loss'] is None
    assert row['state'] == 'finished, but max_iters was changed from 50 to 100 at iteration 40'


def test_slurm_scripts_quote_their_paths(tmp_path):
    place = tmp_path / "a blank, 100%done 'quoted'"
    sweep.main(['--out_dir', str(place), '--slurm', '--grid', 'seed=1,2', '--', *SHAPE])
    text = (place / 'sweep.sbatch').read_text()
    assert "100%%done" in text and text.count('%a') == 1
    done = subprocess.run(['bash', '-eu', '-c', 'srun() { printf "%s\\n" "$@"; }\n' + text], capture_output=True,
                          text=True, env=dict(SLURM_ARRAY_TASK_ID='1', PATH='/usr/bin:/bin'), check=True)
    assert done.stdout.splitlines() == [
        sys.executable, 'scripts/sweep.py', '--out_dir', str(place), '--only', '1']
    words = [subprocess.run(['bash', '-c', f'printf "%s\\n" {line.removeprefix("#SBATCH ")}'], capture_output=True,
                            text=True).stdout.splitlines() for line in text.splitlines() if line.startswith('#SBATCH')]
    assert all(len(word) == 1 for word in words)
    assert [f'--job-name={place.name}'] in words


def test_paths_typed_in_the_repository_stay_as_they_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ['config/quickstart.py', '--dataset=pysource', '--seed=1', *TINY]
    assert [sweep.anchored(word) for word in words] == words


def test_sweep_expands_a_spec_in_order_with_stable_names(tmp_path):
    spec = dict(base=['--seed=3'], runs=[dict(learning_rate=[1e-3, '2e-3'], gamma=0.1),
                                         dict(learning_rate='0.001', gamma=0.1), dict(config='config/quickstart.py'),
                                         dict(base=['--bias=True'], gamma=0.2)])
    items = sweep.expand(spec, tmp_path)
    assert [item.out_dir.name for item in items] == [
        'learning_rate=0.001,gamma=0.1', 'learning_rate=0.002,gamma=0.1', 'config=quickstart', 'gamma=0.2']
    assert items[1].argv == ['--seed=3', '--learning_rate=2e-3', '--gamma=0.1']
    assert items[2].argv == ['--seed=3', 'config/quickstart.py']
    assert items[3].argv == ['--seed=3', '--bias=True', '--gamma=0.2']


def test_sweep_trains_the_one_asked_for_and_tries_again_only_that(tmp_path, monkeypatch):
    argv = ['--out_dir', str(tmp_path), '--grid', 'seed=1,2,3', '--', *SHAPE]
    failures = [tmp_path / f'seed={seed}' / checkpoint.FAILED for seed in (1, 2, 3)]
    for path in failures:
        path.parent.mkdir()
        path.write_text('iteration 3: the loss is not finite')
    chosen = []
    monkeypatch.setattr(sweep, 'train_all', lambda items, *args: chosen.extend(items) or [])
    assert 'not finished: 1 of 1' in rejection(sweep.main, ['--only=1', '--retry', *argv])
    assert [item.settings for item in chosen] == [dict(seed='2')]
    assert [path.exists() for path in failures] == [True, False, True]
    assert 'there are runs 0 to 2' in rejection(sweep.main, ['--only=3', *argv])


def test_sweep_lists_no_loss_of_what_is_not_finished(tmp_path):
    items = sweep.expand(dict(base=SHAPE, runs=[dict(seed=[1, 2, 3, 4], max_iters=100)]), tmp_path)
    for item, loss, end in zip(items, (2.0, 3.2, 3.1), (50, 100, 100)):
        fake_run(item.out_dir, loss, ['--max_iters=100'], end=end)
    assert [(row['seed'], row['val/loss'], row['state']) for row in sweep.table(items)] == [
        (3, pytest.approx(3.1), 'finished'), (2, pytest.approx(3.2), 'finished'),
        (1, None, 'iter 50/100, 3.40, ETA 25 s'), (4, None, 'not begun')]


@pytest.mark.parametrize('path', sorted((ROOT / 'config').rglob('*.json')), ids=lambda path: path.stem)
def test_shipped_specs_resolve(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    items = sweep.expand(runs.read_json(path), tmp_path)
    assert len(items) > 3
    for item in items[::5]:
        item.check()


@pytest.fixture(scope='module')
def swept(tmp_path_factory, corpus):
    """A sweep of two runs, really trained: (directory, arguments of sweep.py)."""
    out_dir = tmp_path_factory.mktemp('sweep')
    argv = ['--out_dir', str(out_dir), '--jobs', '2', '--grid', 'optimizer_name=sophiag,adamw', '--', *TINY,
            f'--dataset={corpus}', '--learning_rate=0.01']
    sweep.main(argv)
    return out_dir, argv


def test_sweep_trains_what_is_missing_and_sorts_by_loss(swept, capsys):
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


def test_sweep_does_not_take_a_run_with_other_settings_for_its_own(swept):
    out_dir, argv = swept
    with pytest.raises(SystemExit, match=r'holds a run with learning_rate = 0\.01, asked for is 0\.02'):
        sweep.main([*argv, '--learning_rate=0.02'])
    with pytest.raises(SystemExit, match='holds a run with seed = 1337, asked for is 2'):
        sweep.main([*argv, '--seed=2'])
    with pytest.raises(SystemExit, match='unknown setting'):
        sweep.main([*argv, '--learning_rat=0.02'])


@pytest.mark.parametrize('launcher', [sys.executable, f'{sys.executable} -m torch.distributed.run --standalone'])
def test_sweep_remembers_a_run_that_diverged(tmp_path, corpus, capsys, launcher):
    """Under torchrun, too, whose exit code does not tell."""
    argv = ['--out_dir', str(tmp_path), '--launcher', launcher, '--grid', 'learning_rate=1e30', '--', *TINY,
            f'--dataset={corpus}']
    sweep.main(argv)  # a trial with a result, not an error
    (log,) = tmp_path.rglob('log.txt')
    before = log.read_text()
    sweep.main(argv)
    assert log.read_text() == before
    assert rows_of(tmp_path / 'results.csv')[0]['state'].startswith('diverged: iteration ')


@pytest.mark.parametrize('spec, words', [
    ({'runs': [3]}, 'needs "runs"'),
    ({'base': '--seed=1', 'runs': [{'seed': 1}]}, '"base" of a sweep has to be a list')])
def test_sweep_rejects_specs(tmp_path, spec, words):
    (tmp_path / 'spec.json').write_text(json.dumps(spec))
    assert words in rejection(sweep.main, ['--out_dir', str(tmp_path / 'out'), '--spec', str(tmp_path / 'spec.json')])


def test_sweep_stops_and_resumes_its_runs(tmp_path, corpus):
    argv = [sys.executable, 'scripts/sweep.py', '--out_dir', str(tmp_path), '--grid', 'seed=1', '--', *TINY,
            f'--dataset={corpus}', '--max_iters=400', '--eval_interval=10000', '--eval_iters=1']
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


def test_sweep_takes_the_gpus_it_may_see_in_turns(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    assert [sweep.gpu_of(slot, 2) for slot in range(3)] == ['0', '1', '0']
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,GPU-5a')
    assert [sweep.gpu_of(slot, 2) for slot in range(3)] == ['4', 'GPU-5a', '4']


def test_sweep_writes_a_slurm_array(tmp_path, capsys):
    sweep.main(['--out_dir', str(tmp_path), '--slurm=--gres=gpu:1', '--grid', 'seed=1,2,3', '--', *SHAPE])
    text = (tmp_path / 'sweep.sbatch').read_text()
    assert text.startswith('#!/bin/bash\n') and '#SBATCH --array=0-2\n' in text and '#SBATCH --gres=gpu:1\n' in text
    assert f'--out_dir {tmp_path} --only $SLURM_ARRAY_TASK_ID' in text
    job = text.replace(text[text.index('srun'):], 'echo $SRUN_CPUS_PER_TASK')
    for cpus in ('8', ''):
        done = subprocess.run(['bash', '-eu', '-c', job], env=dict(os.environ, SLURM_CPUS_PER_TASK=cpus),
                              capture_output=True, text=True)
        assert done.stdout.strip() == cpus, done.stderr
    assert not list(tmp_path.glob('seed*')), 'nothing should have been trained'


def test_max_lr_finds_the_largest_stable_rate(tmp_path, capsys):
    # Runs as they would lie there: up to 2e-3 stable with scaling, up to 1e-3 without, where 2e-3 ends on a plateau.
    for scaled, losses in [(True, {1e-3: 3.5, 2e-3: 3.3, 4e-3: 6.5}), (False, {1e-3: 3.5, 2e-3: 4.9})]:
        entry = dict(optimizer_name='adamw', scale_attn_by_inverse_layer_idx=scaled, learning_rate=list(losses))
        base = ['--max_iters=100', *SHAPE]
        for item, loss in zip(sweep.expand(dict(base=base, runs=[entry]), tmp_path), losses.values()):
            fake_run(item.out_dir, loss, [f'--{key}={value}' for key, value in item.settings.items()]
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
    assert summary['1% quantile'] < summary['50% quantile'] < summary['99% quantile']
    counted = sum(int(row['parameters']) for row in rows_of(tmp_path / 'histogram.csv'))
    assert 0.98 * summary['positive'] * summary['parameters'] < counted <= summary['parameters']
    # Gauss-Newton is positive semidefinite; the Hessian's own diagonal is not.
    assert (summary['negative'] == 0) is (estimator == 'gnb')


def test_hessian_histogram_rejects_tokens_of_another_tokenizer(swept, tmp_path):
    for ids in (255, 257):
        data = write_bins(tmp_path / f'{ids}', range(250), range(250), vocab_size=ids)
        message = rejection(hessian_histogram.main, [
            str(swept[0] / 'optimizer_name=sophiag'), f'--dataset={data}', '--samples=1', '--device=cpu',
            f'--output={tmp_path / "x.png"}'])
        assert f'a tokenizer of {ids} ids' in message and 'has 256' in message


# ----------------------------------------------------------------------------------------------------------------------
# Progress, and the coordinate search


@pytest.fixture
def landscape(monkeypatch):
    """Runs in place of training: their loss is lowest, 3, at learning_rate = 0.004 and gamma = 0.2, where the best
    learning rate rises with γ; a learning rate of 1 diverges. Yields the list of the runs that were trained."""
    trained = []

    def start(item, *_):
        lr, gamma = (float(item.settings[key]) for key in ('learning_rate', 'gamma'))
        trained.append((lr, gamma))
        octaves = math.log2(lr / 0.004), math.log2(gamma / 0.2)
        loss = 3 + 0.05 * octaves[0] ** 2 + 0.05 * octaves[1] ** 2 + 0.02 * (octaves[0] - octaves[1]) ** 2
        argv = ['--max_iters=100', '--optimizer_name=sophiag', f'--learning_rate={lr}', f'--gamma={gamma}']
        fake_run(item.out_dir, loss, argv, end=30 if lr == 1 else 100)
        if lr == 1:
            (item.out_dir / checkpoint.FAILED).write_text('iteration 30: the loss is not finite')
        return SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(sweep, 'start', start)
    return trained


TUNE = ['--tune', 'learning_rate=1e-3,2e-3,4e-3,8e-3,1', 'gamma=0.05,0.1,0.2,0.4']
BASE = ['--', *SHAPE, '--max_iters=100', '--optimizer_name=sophiag', '--learning_rate=1e-3']


def test_a_coordinate_search_finds_the_best_settings_and_records_the_way(tmp_path, landscape, capsys):
    argv = ['--out_dir', str(tmp_path), *TUNE]
    sweep.main([*argv, '--noise=0.01', *BASE])
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['best'] == {'learning_rate': '0.004', 'gamma': '0.2'} and record['finished']
    assert record['val/loss'] == pytest.approx(3) and record['start'] == {'learning_rate': '0.001', 'gamma': '0.05'}
    losses = [kept['val/loss'] for kept in record['kept']]
    assert losses == sorted(losses, reverse=True)
    assert [kept['before'] for kept in record['kept']][1:] == losses[:-1]
    assert len(landscape) == len(set(landscape)) == len(record['trials']) == record['settings tried']  # each once
    diverged = [trial['val/loss'] for trial in record['trials'] if trial['learning_rate'] == '1']
    assert (1.0, 0.05) in landscape and diverged and not any(diverged)
    assert f'best of {len(landscape)} settings tried: --learning_rate=0.004 --gamma=0.2' in capsys.readouterr().out

    # The same again trains nothing, and comes to the same; so does a table of it.
    before = (tmp_path / 'tuning.json').read_text()
    sweep.main(['--out_dir', str(tmp_path)])
    sweep.main(['--out_dir', str(tmp_path), '--table'])
    assert (tmp_path / 'tuning.json').read_text() == before and len(landscape) == record['settings tried']
    assert len(rows_of(tmp_path / 'results.csv')) == len(landscape)


def test_a_coordinate_search_resumes(tmp_path, landscape, monkeypatch):
    start = sweep.start

    def interrupted(item, *args):
        if len(landscape) == 3:
            raise KeyboardInterrupt
        return start(item, *args)
    monkeypatch.setattr(sweep, 'start', interrupted)
    argv = ['--out_dir', str(tmp_path), *TUNE, '--noise=0.01', *BASE]
    assert 'the same command resumes' in rejection(sweep.main, argv)
    assert not list(tmp_path.glob('tuning.json')) or 'finished' not in (tmp_path / 'tuning.json').read_text()
    monkeypatch.setattr(sweep, 'start', start)
    sweep.main(argv)
    assert len(landscape) == len(set(landscape))
    assert json.loads((tmp_path / 'tuning.json').read_text())['val/loss'] == pytest.approx(3)


def test_a_coordinate_search_keeps_nothing_within_the_noise(tmp_path, landscape, capsys):
    sweep.main(['--out_dir', str(tmp_path), *TUNE, '--noise=10', *BASE])
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['kept'] == [] and record['best'] == record['start'] and len(landscape) == 1 + 4 + 3
    assert 'learning_rate=0.001 is at the edge' in capsys.readouterr().out


def test_a_coordinate_search_ends_after_the_rounds_asked_for(tmp_path, landscape):
    argv = ['--out_dir', str(tmp_path), *TUNE, '--noise=0.01']
    sweep.main([*argv, '--rounds=1', *BASE])
    record = json.loads((tmp_path / 'tuning.json').read_text())
    assert record['finished'] and record['rounds'] == 1 and record['kept']
    assert len(landscape) == 1 + 4 + 3  # the start, then every other value of either setting once
    sweep.main([*argv, *BASE])
    assert len(landscape) > 1 + 4 + 3  # without a limit it goes round again after a gain


@pytest.mark.parametrize(('argv', 'message'), [
    (['--tune', 'seed=1', '--noise=1', '--rounds=0'], '--rounds: of --tune, at least 1'),
    (['--grid', 'seed=1', '--rounds=2'], '--rounds: of --tune'),
    (['--tune', 'seed=1'], '--tune needs --noise'), (['--tune', 'seed', '--noise=1'], 'write KEY=V1,V2'),
    (['--tune', 'seed=1', '--noise=1', '--grid', 'seed=1'], 'give one of'),
    (['--tune', 'seed=1', '--noise=1', '--only=1'], 'not with --only')])
def test_coordinate_searches_that_make_no_sense_are_rejected(tmp_path, argv, message, capsys):
    with pytest.raises(SystemExit):
        sweep.main(['--out_dir', str(tmp_path), *argv])
    assert message in capsys.readouterr().err
    assert 'no such setting' in rejection(sweep.main, ['--out_dir', str(tmp_path), '--tune', 'nosuch=1', '--noise=1'])


def test_progress_says_which_run_is_how_far(tmp_path, monkeypatch, capsys):
    items = sweep.expand(dict(base=SHAPE, runs=[dict(max_iters=[100, 200], learning_rate=2e-3)]), tmp_path)
    polls = iter([None, None, 0])

    def start(item, *_):
        fake_run(item.out_dir, 3.0, ['--max_iters=200'], end=80)
        return SimpleNamespace(poll=lambda: next(polls))
    monkeypatch.setattr(sweep, 'start', start)
    monkeypatch.setattr(sweep, 'REPORT_SECONDS', 0)
    fake_run(items[0].out_dir, 3.0, ['--max_iters=100'])
    assert list(sweep.train_all(items)) == items[1:]
    assert 'run 2/2 max_iters=200,learning_rate=0.002: iter 80/200, 4.10, ETA 60 s' in capsys.readouterr().err


def test_on_a_terminal_the_last_line_says_how_far_the_runs_are(tmp_path, monkeypatch, capsys):
    items = sweep.expand(dict(base=SHAPE, runs=[dict(max_iters=200, learning_rate=[1e-3, 2e-3])]), tmp_path)
    polls = iter([None, None, None, None, 0, 0])

    def start(item, *_):
        fake_run(item.out_dir, 3.0, ['--max_iters=200'], end=80)
        return SimpleNamespace(poll=lambda: next(polls), terminate=lambda: None, wait=lambda _: 0)
    monkeypatch.setattr(sweep, 'start', start)
    monkeypatch.setattr(sweep.time, 'sleep', lambda _: None)
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(sweep.time, 'monotonic', lambda: next(clock))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    monkeypatch.setenv('COLUMNS', '60')
    ended = sweep.train_all(items, jobs=2)
    assert next(ended) == items[0]
    text = 'run 1/2 max_iters=200,learning_rate=0.001: iter 80/200, 4.10, ETA 60 s | run 2/2'
    err = capsys.readouterr().err
    assert f'\r\033[K{text[:59]}\r' in err and '\n' not in err and err.endswith('\r\033[K')
    ended.close()  # as an interrupt does
    assert 'stopping: waiting for the runs to save their state\n' in capsys.readouterr().err
