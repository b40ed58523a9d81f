"""How runs are started: several machines, as far as one can be several (agents of torchrun that meet on loopback, the
Slurm script), the environment, the device; and that the tests' own way of starting runs tells hangs."""

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
    start,
)

from runtime import device
from runtime.checkpoint import load
from runtime.device import device_defaults
from runtime.distributed import World
from runtime.signals import STOPPED

SBATCH = ROOT / 'scripts/slurm/train.sbatch'
# What Slurm would be: one more process group for each node; the highest exit code counts.
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


def two_nodes(*args, **kwargs):
    """What ends train.py on two agents with one rank each: [Done, Done]."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        endpoint = f'127.0.0.1:{free.getsockname()[1]}'
    agents = [subprocess.Popen(
        [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc_per_node=1', '--rdzv_backend=c10d',
         f'--rdzv_endpoint={endpoint}', '--rdzv_id=test', str(INJECT), *command(*args, **kwargs)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1', TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')) for _ in range(2)]
    try:
        return [finish(agent) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


def test_two_nodes_are_one_run_and_stop_together(train, reference, tmp_path):
    """SIGTERM to the agents of both stops and saves the run; continued, it ends as if undisturbed."""
    stopped = two_nodes(tmp_path, '--init_from=auto', name='sophiag',
                        faults='at(6, kill_torchrun, rank=0)\nat(6, kill_torchrun, rank=1)')
    assert sum('stopped at iteration 7 by ' in done.out for done in stopped) == 1, stopped  # there is one rank 0
    assert iterations(tmp_path)[0] == 7
    assert train(tmp_path, '--init_from=auto', name='sophiag', ranks=2, machines=2).code == 0
    for key in ('train/loss', 'val/loss', 'hessian_norm', 'param_norm'):
        assert metrics(tmp_path, key) == metrics(reference, key)


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
    """SIGTERM reaches every process of a step, as Slurm's does; then the job is requeued, and ends, on one node."""
    to_all = 'lambda: (os.killpg(os.getpgid(os.getppid()), signal.SIGTERM), time.sleep(1))'
    job, done = sbatch(tmp_path, tmp_path / 'out', name='sophiag',
                       faults=f'at(6, {to_all}, rank=0)\nat(6, {to_all}, rank=1)')
    assert done.code == STOPPED and f'asked for: requeue {job}' in done.out, done.err
    assert iterations(tmp_path / 'out')[0] == 7
    _, done = sbatch(tmp_path, tmp_path / 'out', name='sophiag', nodes=1)
    assert done.code == 0 and 'at iteration 7 of 10' in done.out and 'asked for' not in done.out, done.err
    assert metrics(tmp_path / 'out')[:7] == metrics(reference)[:7] and len(metrics(tmp_path / 'out')) == 10


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


@needs_compiler
def test_an_incomplete_file_in_the_compile_cache_is_removed(fork, tmp_path):
    """What kill -9 leaves while a kernel is linked: an empty library, which every later start would load."""
    (tmp_path / 'script.py').write_text(f"""
import os, torch
from runtime.distributed import World
os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}
World('cpu', 'gloo').wrap(torch.nn.Tanh(), [], compile=True)(torch.randn(4, 8))
""")

    def run():
        return fork(tmp_path / 'script.py')
    assert run().code == 0
    library = next(tmp_path.glob('*/*.main.so'))
    library.write_bytes(b'')
    failed = run()
    *warnings, line = failed.err.splitlines()  # a build for CUDA warns where there is none
    assert failed.code == 1 and not any('Traceback' in text for text in warnings), failed.err
    assert f'{library}: a killed process left' in line and not library.exists()
    assert run().code == 0 and library.stat().st_size


# ----------------------------------------------------------------------------------------------------------------------
# Output streams


@pytest.mark.parametrize('closed', ['2>&-', '<&- >&- 2>&-'])
def test_closed_streams_do_not_end_a_run(corpus, tmp_path, closed):
    done = subprocess.run(['sh', '-c', f'exec "$@" {closed}', 'sh', sys.executable, str(ROOT / 'train.py'), *TINY,
                           f'--dataset={corpus}', f'--out_dir={tmp_path}', '--learning_rate=1e-2'], cwd=ROOT,
                          capture_output=True, text=True, timeout=HANG, env=dict(os.environ, OMP_NUM_THREADS='1'))
    assert done.returncode == 0 and len(metrics(tmp_path)) == 10, done.stderr
    assert iterations(tmp_path) == [10, 5] and load(tmp_path)[1]['iter_num'] == 10
    assert ('iter 9' in done.stdout) == ('>&-' not in closed.split()) and not done.stderr


def test_a_terminal_that_knows_ascii_only(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
    done = run_train(*TINY, f'--dataset={corpus}', f'--out_dir={tmp_path}', '--learning_rate=1e-2', '--max_iters=1')
    assert '1 device(s) \\xd7 2' in done.out and len(metrics(tmp_path)) == 1


def test_closed_streams_leave_no_standard_descriptor_free():
    """A file that got one of them would receive what C libraries print."""
    code = """
from runtime.signals import SafeStream
streams = SafeStream(None), SafeStream(None)
streams[0].write('lost')
assert open('README.md').fileno() > 2
"""
    done = subprocess.run(['sh', '-c', 'exec "$@" <&- >&-', 'sh', sys.executable, '-c', code], cwd=ROOT,
                          stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The harness


@pytest.mark.parametrize('forked', [True, False])
def test_a_hang_is_called_one(train, tmp_path, forked):
    """A run that the harness has killed must not look like one that a signal has ended."""
    with pytest.raises(pytest.fail.Exception, match='the run hung: .* not ended after 2 s'):
        if forked:
            train(tmp_path, faults='time.sleep(3600)', seconds=2)
        else:
            finish(start(tmp_path, faults='time.sleep(3600)'), seconds=2)
