"""Starts of runs: the Slurm script (with agents of torchrun that meet on loopback as its machines), the environment,
the device, output streams."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    HANG,
    INJECT,
    ROOT,
    TINY,
    command,
    finish,
    iterations,
    metrics,
    needs_compiler,
    rejection,
    run_train,
)

from runtime import device
from runtime.checkpoint import load
from runtime.device import device_defaults
from runtime.distributed import World
from runtime.signals import STOPPED

SBATCH = ROOT / 'scripts/slurm/train.sbatch'
# In place of srun: a process group for each node; the highest exit code counts.
SRUN = f'''#!{sys.executable}
import os, subprocess, sys
argv = sys.argv[1:]
while argv[0].startswith('-'):
    argv.pop(0)
nodes = [subprocess.Popen(argv, start_new_session=True) for _ in range(int(os.environ['SLURM_JOB_NUM_NODES']))]
sys.exit(max([node.wait() for node in nodes]))
'''
SCONTROL = f'''#!{sys.executable}
import os, sys
print('127.0.0.1' if sys.argv[1] == 'show' else 'asked for: ' + ' '.join(sys.argv[1:]))
'''
TRAIN = f'''
import os, runpy, sys
sys.argv = [{str(INJECT)!r}, os.environ.get('FAULTS', ''), *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name='__main__')
'''


@pytest.fixture(scope='module')
def reference(train, tmp_path_factory):
    """The out_dir of an undisturbed run on two ranks of one machine."""
    out = tmp_path_factory.mktemp('reference')
    done = train(out, name='sophiag', ranks=2)
    assert done.code == 0, done.err
    return out


def sbatch(directory, *args, faults='', nodes=2, script=TRAIN, **kwargs):
    """Runs the Slurm script with Slurm's commands replaced, in a copy of the repository that is only train.py."""
    for name, text in (('srun', SRUN), ('scontrol', SCONTROL)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    (directory / 'train.py').write_text(script)
    with socket.create_server(('127.0.0.1', 0)) as free:
        job = free.getsockname()[1]
    environment = dict(os.environ, OMP_NUM_THREADS='1', FAULTS=faults, NPROC_PER_NODE='1', SLURM_JOB_ID=str(job),
                       SLURM_JOB_NODELIST='node[1-2]', SLURM_JOB_NUM_NODES=str(nodes),
                       PATH=os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ['PATH']]))
    return job, finish(subprocess.Popen(
        ['bash', str(SBATCH), *command(*args, **kwargs)[1:]], cwd=directory, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment))


def test_the_slurm_script_saves_before_the_time_limit_and_asks_to_go_on(reference, tmp_path):
    """SIGTERM reaches every process of both nodes, as Slurm's does. The job is requeued, and ends as if undisturbed."""
    to_all = 'lambda: (os.killpg(os.getpgid(os.getppid()), signal.SIGTERM), time.sleep(1))'
    job, done = sbatch(tmp_path, tmp_path / 'out', name='sophiag',
                       faults=f'at(6, {to_all}, rank=0)\nat(6, {to_all}, rank=1)')
    assert done.code == STOPPED and f'asked for: requeue {job}' in done.out, done.err
    assert iterations(tmp_path / 'out')[0] == 7
    _, done = sbatch(tmp_path, tmp_path / 'out', name='sophiag')
    assert done.code == 0 and 'at iteration 7 of 10' in done.out and 'asked for' not in done.out, done.err
    for key in ('train/loss', 'val/loss', 'hessian_norm', 'param_norm'):
        assert metrics(tmp_path / 'out', key) == metrics(reference, key)


def test_the_slurm_script_does_not_try_failures_again(tmp_path, corpus):
    command.corpus = corpus
    _, done = sbatch(tmp_path, tmp_path / 'out', nodes=1, script="raise SystemExit('--n_head=5: it says why')")
    assert done.code not in (0, STOPPED) and '--n_head=5: it says why' in done.err and 'asked for' not in done.out


def test_the_slurm_script_asks_slurm_for_what_it_needs():
    text = SBATCH.read_text()
    assert subprocess.run(['bash', '-n', str(SBATCH)]).returncode == 0
    for option in ('--requeue', '--signal=TERM@300', '--ntasks-per-node=1', '--open-mode=append'):
        assert f'#SBATCH {option}\n' in text
    assert text.index('\nexport SRUN_CPUS_PER_TASK=') < text.index('\nsrun ')


@pytest.mark.skipif(importlib.util.find_spec('yaml') is None, reason='PyYAML is not installed')
def test_the_skypilot_task_is_one():
    import yaml
    task = yaml.safe_load((ROOT / 'scripts/skypilot.yaml').read_text())
    assert task['num_nodes'] > 1 and (ROOT / task['envs']['CONFIG']).is_file()
    for script in (task['setup'], task['run']):
        assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0


def test_what_suits_a_device(monkeypatch):
    for compiler in (True, False):
        monkeypatch.setattr(device, 'can_compile', lambda found=compiler: found)
        assert device_defaults('cuda:1')[0] == dict(backend='nccl', dtype='bfloat16', compile=compiler)
        assert device_defaults('cpu')[0] == dict(backend='gloo', dtype='float32', compile=False)


@pytest.mark.parametrize('environment, index', [({}, 0), (dict(LOCAL_RANK='0'), 0), (dict(LOCAL_RANK='3'), 3)])
def test_a_cuda_device_has_an_index(monkeypatch, environment, index):
    """Without one `torch.cuda.set_device` rejects it, and so does NCCL's process group."""
    chosen = []
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    for name, value in dict(is_available=lambda: True, device_count=lambda: 4, set_device=chosen.append).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert chosen == [World('cuda', 'nccl').device] == [torch.device('cuda', index)]


@pytest.mark.parametrize('environment, words', [
    (dict(WORLD_SIZE=''), 'WORLD_SIZE=: must be a whole'), (dict(RANK='abc'), 'RANK=abc: must be a whole number'),
    (dict(WORLD_SIZE='0'), 'WORLD_SIZE=0: must be a whole number, at least 1'),
    (dict(LOCAL_RANK='-1'), 'LOCAL_RANK=-1: must be'), (dict(RANK='2', WORLD_SIZE='2'), 'RANK=2: must be below'),
    (dict(RANK='1', WORLD_SIZE='2'), 'WORLD_SIZE=2: MASTER_ADDR is not set'),
])
def test_an_environment_that_describes_no_ranks_is_one_line(monkeypatch, environment, words):
    for key in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    message = rejection(World, 'cpu', 'gloo')
    assert words in message and 'start with torchrun' in message


@pytest.mark.parametrize('name', ['meta', 'xla', 'gpu', 'cuda:x', ''])
def test_a_device_that_cannot_train_is_one_line(name):
    assert rejection(device.check_device, name).startswith(f'--device={name}: ')


# ----------------------------------------------------------------------------------------------------------------------
# World.wrap


class Tiny(torch.nn.Module):
    """Two linear layers as blocks, and a parameter outside of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x * self.scale))
        return x.sum()


@needs_compiler
@pytest.mark.parametrize('activation_checkpointing', [False, True])
def test_the_whole_model_is_compiled_and_stays_eager_itself(activation_checkpointing):
    plain, model = Tiny(), Tiny()
    forward = World('cpu', 'gloo').wrap(model, model.blocks, True, activation_checkpointing)
    x = torch.randn(4, 8)
    graphs = torch._dynamo.explain(forward._orig_mod)(x)
    assert graphs.graph_count == 1 and graphs.graph_break_count == 0
    torch._dynamo.reset()
    loss = forward(x)
    for _ in range(2):  # as an estimate and the gradient do, through one forward
        loss.backward(retain_graph=True)
    for _ in range(2):
        plain(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    compiled_frames = torch._dynamo.utils.counters['stats']['unique_graphs']
    torch.testing.assert_close(model(x[:3]), plain(x[:3]))  # of another shape, which would be compiled anew
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == compiled_frames


# ----------------------------------------------------------------------------------------------------------------------
# Output streams


@pytest.mark.parametrize('redirected', ['>&- 2>&-', '>/dev/full 2>/dev/full'])
def test_streams_that_fail_do_not_end_a_run(corpus, tmp_path, redirected):
    done = subprocess.run(['sh', '-c', f'exec "$@" {redirected}', 'sh', sys.executable, str(ROOT / 'train.py'), *TINY,
                           f'--dataset={corpus}', f'--out_dir={tmp_path}', '--learning_rate=1e-2'], cwd=ROOT,
                          capture_output=True, text=True, timeout=HANG, env=dict(os.environ, OMP_NUM_THREADS='1'))
    assert done.returncode == 0 and len(metrics(tmp_path)) == 10, done.stderr
    assert iterations(tmp_path) == [10, 5] and load(tmp_path)[1]['iter_num'] == 10
    assert not done.stdout and not done.stderr


def test_a_terminal_that_knows_ascii_only(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
    done = run_train(*TINY, f'--dataset={corpus}', f'--out_dir={tmp_path}', '--learning_rate=1e-2', '--max_iters=1')
    assert '1 device(s) \\xd7 2' in done.out and len(metrics(tmp_path)) == 1
