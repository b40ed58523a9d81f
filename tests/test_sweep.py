"""scripts/sweep.py and what trains through it: paths, names of directories, Slurm scripts, tables of received runs."""

import json
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, refusal
from fake_runs import SHAPE, fake_run

from scripts import sweep
from scripts.paper import max_lr, tune_gamma


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
    max_lr.main(['--out_dir', 'a', '--launcher', launcher, '--optimizers', 'sophiag', '--rates', '0.25', '--',
                 'config/quickstart.py'])
    iterations = [json.loads(path.read_text())['config']['max_iters'] for path in elsewhere.rglob('config.json')]
    assert iterations == [100, 100]
    tune_gamma.main(['--out_dir', 'b', '--launcher', launcher, '--iters', '100', '--', 'config/quickstart.py'])
    assert learning_rates(elsewhere / 'b') == [0.125]
    assert 'gamma = 0.05' in capsys.readouterr().out


def test_shipped_configs_are_found_from_outside_the_repository(elsewhere, capsys):
    sweep.main(['--out_dir', 'out', '--dry_run', '--grid', 'seed=1', '--', 'config/train_gpt2_small_adamw.py'])
    assert 'train.py config/train_gpt2_small_adamw.py' in capsys.readouterr().out
    assert 'no such config file' in refusal(sweep.main, ['--out_dir=out', '--grid', 'seed=1', '--', 'config/nosuch.py'])


@pytest.mark.parametrize('runs', [
    [dict(config=['a/run.py', 'b/run.py'])], [dict(dataset=['x/y', 'x_y'])], [dict(dataset=['x,y', 'x_y'])],
    [dict(base=['--bias=True'], seed=1), dict(base=['--bias=False'], seed=1)]])
def test_different_runs_never_share_a_directory(runs, tmp_path):
    assert 'two runs of this sweep would be in this directory' in refusal(sweep.expand, dict(runs=runs), tmp_path)


def test_close_numbers_are_different_runs_and_equal_ones_are_the_same(tmp_path):
    rates = ['0.01', '0.010000000000001', 1e-2, '1e-2', '10e-3']
    items = sweep.expand(dict(runs=[dict(learning_rate=rates)]), tmp_path)
    assert [item.out_dir.name for item in items] == ['learning_rate=0.01', 'learning_rate=0.010000000000001']


def test_a_key_that_is_no_setting_names_no_directory_outside(tmp_path):
    assert 'no such setting' in refusal(sweep.expand, dict(runs=[{'../../x': 1}]), tmp_path)


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
