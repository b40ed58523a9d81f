"""Device checks, names, defaults, memory, peak FLOP/s."""

import contextlib
import os
import resource
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

# The values of --dtype
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# Dense bf16/fp16 peak of one device in FLOP/s, from the makers' data sheets (no sparsity).
PEAK_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'A5000': 111e12, 'L40S': 362e12, 'RTX 4090': 165e12}


def check_device(device):
    """`device` as a torch.device. Stops the run when it cannot be trained on, or when this machine lacks it."""
    flag = f'--device={device}'
    try:
        device = torch.device(device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ('cuda', 'mps', 'cpu'):
        raise SystemExit(f'{flag}: not a device to compute on; use cuda, cuda:N, mps or cpu')
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise SystemExit(f'{flag}: torch finds no CUDA device here; use --device=cpu')
        if (device.index or 0) >= torch.cuda.device_count():
            raise SystemExit(f'{flag}: this machine has {torch.cuda.device_count()} CUDA device(s); '
                             'start at most one process per device')
    if device.type == 'mps' and not torch.backends.mps.is_available():
        raise SystemExit(f'{flag}: torch finds no MPS device here; use --device=cpu')
    return device


def device_defaults(device):
    """(values of backend, dtype and compile for `device`, as a dict; where they come from, as text)."""
    if not device.startswith('cuda'):
        return dict(backend='gloo', dtype='float32', compile=False), f'device {device}'
    reason = f'device {device}' if can_compile() else f'device {device}; no C compiler or no Python.h'
    return dict(backend='nccl', dtype='bfloat16', compile=can_compile()), reason


def can_compile():
    """Whether this machine has what torch.compile needs for CUDA: a C compiler and Python's headers."""
    compiler = os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang')
    return bool(compiler) and Path(sysconfig.get_path('include'), 'Python.h').is_file()


def autocast(device, dtype_name):
    """A reusable context manager in which matmuls on `device` run in DTYPES[dtype_name]."""
    if dtype_name == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[dtype_name])


def device_name(device):
    """The name of a GPU, else the type of `device`."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def synchronize(device):
    """Waits until the device has done its work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def memory_in_use(device):
    """Bytes allocated on a GPU, else resident in this process (0 where the system does not say)."""
    return torch.cuda.memory_allocated(device) if device.type == 'cuda' else process_status('VmRSS')


def reset_peak_memory(device):
    """Starts the measurement of `recent_peak_memory`."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path('/proc/self/clear_refs').write_text('5')


def recent_peak_memory(device):
    """The highest `memory_in_use` since `reset_peak_memory`."""
    return torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else process_status('VmHWM')


def process_status(key):
    """A number of bytes in /proc/self/status; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/status').read_text().splitlines():
            if line.startswith(f'{key}:'):
                return int(line.split()[1]) * 1024
    return 0


def peak_memory(device):
    """The most bytes in use so far: allocated on a GPU, else resident in this process."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def peak_flops(device):
    """Peak FLOP/s of `device` in 16-bit matmuls; None where it is unknown."""
    if device.type != 'cuda':
        return None
    return next((flops for key, flops in PEAK_FLOPS.items() if key in device_name(device)), None)
