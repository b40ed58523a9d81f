"""Starts of runs: the Slurm script, the environment, the device, output streams."""

import io
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import INJECT, ROOT, command, finish, iterations, rejection

from runtime import device, speed
from runtime.device import device_defaults
from runtime.distributed import World, ranks_from_environment
from runtime.signals import STOPPED, SafeStream, StopSignals, undo_at_end

SBATCH = ROOT / 'scripts/slurm/train.sbatch'
# A stand-in for srun with a process group for each node. It returns the highest exit code.
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


def test_the_slurm_script_saves_before_the_time_limit_and_asks_to_go_on(tmp_path, corpus):
    """SIGTERM reaches every process of two nodes, as Slurm's does; torchrun's agents meet on the loopback device."""
    for name, text in (('srun', SRUN), ('scontrol', SCONTROL), ('train.py', TRAIN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    to_all = 'lambda: (os.killpg(os.getpgid(os.getppid()), signal.SIGTERM), time.sleep(1))'
    job = os.getpid()  # The script derives its port from it.
    environment = dict(os.environ, OMP_NUM_THREADS='1', NPROC_PER_NODE='1', SLURM_JOB_ID=str(job),
                       SLURM_JOB_NODELIST='node[1-2]', SLURM_JOB_NUM_NODES='2',
                       FAULTS=f'at(6, {to_all}, rank=0)\nat(6, {to_all}, rank=1)',
                       PATH=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ['PATH']]))
    done = finish(subprocess.Popen(
        ['bash', str(SBATCH), *command(tmp_path / 'out', name='sophiag')[1:]], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment))
    assert done.code == STOPPED and f'asked for: requeue {job}' in done.out, done.err
    assert iterations(tmp_path / 'out')[0] == 7


def test_defaults_of_a_device(monkeypatch):
    for compiler in (True, False):
        monkeypatch.setattr(device, 'can_compile', lambda _, found=compiler: found)
        assert device_defaults('cuda:1')[0] == dict(backend='nccl', dtype='bfloat16', compile=compiler)
        assert device_defaults('cpu')[0] == dict(backend='gloo', dtype='float32', compile=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: including_emulation)
    assert device_defaults('cuda')[0]['dtype'] == 'float16'


@pytest.mark.parametrize('name, tool, compilers', [('cpu', 'CXX', ['g++']), ('cuda', 'CC', ['gcc', 'clang'])])
def test_compiling_needs_a_compiler_and_pythons_headers(monkeypatch, tmp_path, name, tool, compilers):
    monkeypatch.setattr(sysconfig, 'get_path', lambda _: str(tmp_path))
    monkeypatch.setattr(sys, 'platform', 'linux')
    monkeypatch.delenv(tool, raising=False)
    for header in False, True:
        for found in (*compilers, ''):
            monkeypatch.setattr('shutil.which', {found: found}.get)
            assert device.can_compile(name) == (header and found != '')
        (tmp_path / 'Python.h').touch()


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12), ('Tesla T4', 65e12), ('NVIDIA T400', None),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None), ('NVIDIA GeForce RTX 4090 Laptop GPU', None)])
def test_peak_flops_are_those_of_the_variant(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda _: name)
    assert device.peak_flops(torch.device('cuda')) == peak
    peaks, memory = zip(*filter(None, device.GPUS.values()))  # in whole TFLOP/s, of sizes that are on sale
    assert not any(peak % 1e12 for peak in peaks) and {*memory} == {16, 24, 32, 40, 48, 80, 94, 141, 180}


@pytest.mark.parametrize('gpus, advice', [(0, 'set --device=cpu'), (
    4, '4 GPUs are visible; set --device=cuda or cpu, and --nproc_per_node to at most 4')])
def test_a_device_that_does_not_work(monkeypatch, gpus, advice):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    message = rejection(device.check_device, 'gpu')
    assert message.startswith('--device=gpu: ') and message.endswith(f'; {advice}')


def test_the_mapped_corpus_does_not_count_as_memory(monkeypatch):
    cpu = torch.device('cpu')
    assert 1e7 < device.peak_memory(cpu) < 1e12
    monkeypatch.setattr(Path, 'is_file', lambda _: True)
    monkeypatch.setattr(Path, 'read_text', lambda *_, **__: 'VmHWM:\t  300 kB\nVmRSS:\t  200 kB\nRssFile:\t  100 kB\n')
    assert device.peak_memory(cpu) == 200 * 1024
    monkeypatch.setattr(Path, 'is_file', lambda _: False)  # as on a Mac, whose unit is a byte
    monkeypatch.setattr(device.resource, 'getrusage', lambda _: SimpleNamespace(ru_maxrss=3))
    for platform, memory in ('darwin', 3), ('linux', 3 * 1024):
        monkeypatch.setattr(sys, 'platform', platform)
        assert device.peak_memory(cpu) == memory


def test_the_speed_covers_the_iterations_since_the_last_line(monkeypatch):
    monkeypatch.setattr(speed, 'peak_flops', lambda _: 40.0)
    monkeypatch.setattr(speed, 'peak_memory', lambda _: 3e9)
    measured = speed.Speed(6.0, SimpleNamespace(device=None, size=2))
    for seconds, expected in (2.5, [2250, 500, 8 / 4.5]), (0.5, [1250, 0, 8 / 2.5]):
        measured.add(seconds, 5, True)  # with an estimate
        measured.add(2.0, 3, False)
        assert [*measured.metrics().values()] == pytest.approx([*expected, expected[2] * 6 / 80, 3])


def test_a_stream_that_fails_or_lacks_a_character_ends_no_run():
    written = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(written, 'ascii'))
    stream.write('2 × 3')
    stream.flush()
    assert written.getvalue() == b'2 \\xd7 3'
    SafeStream(io.StringIO()).write('as with %run train.py in a notebook')
    if Path('/dev/full').exists():
        stream = SafeStream(Path('/dev/full').open('w'))  # noqa: SIM115
        stream.write('a')
        stream.flush()
        os.close(stream.fileno())  # close() would flush once more.


def test_the_time_limit_is_in_hours_since_the_start_of_the_run():
    for hours in 2.0, 0.0:
        world, before = World('cpu', 'gloo'), time.monotonic()
        with undo_at_end():
            assert StopSignals(world, hours).deadline == pytest.approx(before + 3600 * (hours or float('inf')), abs=1)


@pytest.mark.parametrize(('torchrun', 'after', 'ends'), [(False, 0.1, False), (False, 1.0, True), (True, 1.9, False),
                                                         (True, 3.0, True)])
def test_a_second_signal_ends_the_run_unless_it_repeats_the_first(monkeypatch, torchrun, after, ends):
    """torchrun repeats a signal within two seconds."""
    killed, clock = [], iter([50.0, 50.0 + after])
    monkeypatch.setattr('runtime.signals.time.monotonic', lambda: next(clock))
    monkeypatch.setattr('runtime.signals.os.kill', lambda pid, number: killed.append(number))
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    if torchrun:
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', '1')
    with undo_at_end():
        stops = StopSignals(SimpleNamespace(started=0.0, is_master=False))
        for _ in range(2):
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        assert killed == [signal.SIGTERM] * ends and stops.reason == 'SIGTERM'
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == ends


def test_a_rank_waits_for_a_file_before_a_collective_that_could_time_out(monkeypatch):
    events, store = [], dist.HashStore()
    worlds = [World.__new__(World) for _ in range(2)]
    for rank, world in enumerate(worlds):
        vars(world).update(rank=rank, size=2, is_master=rank == 0, device='cpu', _store=store, _barriers=0)
    monkeypatch.setattr(World, 'sum', lambda self, tensor: events.append(f'rank {self.rank}') or tensor)
    for _ in range(2):
        other = threading.Thread(target=worlds[1].from_master, args=[7])
        other.start()
        other.join(0.3)  # A rank that does not wait would end here.
        events.append('saved')
        worlds[0].from_master(7)
        other.join()
        assert events[-3] == 'saved' and sorted(events[-2:]) == ['rank 0', 'rank 1']


def test_a_single_process_is_a_world_of_one_rank():
    world, p = World('cpu', 'gloo'), torch.nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    world.zero_grad(torch.optim.SGD([p]))  # An optimizer leaves out what has no gradient.
    assert p.grad is None and world.zeros(2).dtype == torch.float64 and ranks_from_environment() == (0, 0, 1)
