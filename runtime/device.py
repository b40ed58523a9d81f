"""Device checks, names, defaults, memory, peak FLOP/s."""

import contextlib
import os
import resource
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from runtime.files import first_line

# The values of --dtype
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# Dense bf16/fp16 peak of one device in FLOP/s, from the makers' data sheets (no sparsity). The first one whose words
# are in the device's name counts; parts of a device (MIG) and slower chips of the same name have no known peak.
PEAK_FLOPS = {'MIG': None, 'Laptop': None, 'H200 NVL': 835e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12,
              'H100': 989e12, 'A100': 312e12, 'A5000': 111e12, 'L40S': 362e12, 'RTX 4090': 165e12}


def check_device(device):
    """`device` as a torch.device. Stops the run when nothing can be computed on it here."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f'--device={device}: {first_line(error)}; use cuda, cuda:N, mps or cpu') from None
    return torch.device(device)


def device_defaults(device):
    """(values of backend, dtype and compile for `device`, as a dict; where they come from, as text)."""
    if not device.startswith('cuda'):
        return dict(backend='gloo', dtype='float32', compile=False), f'device {device}'
    dtype, reason = 'bfloat16', f'device {device}'
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtype, reason = 'float16', f'{reason}; it has no bfloat16'
    if not can_compile():
        reason += '; no C compiler or no Python.h'
    return dict(backend='nccl', dtype=dtype, compile=can_compile()), reason


def can_compile():
    """Whether this machine has what torch.compile needs for CUDA: a C compiler and Python's headers."""
    compiler = os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang')
    return bool(compiler) and Path(sysconfig.get_path('include'), 'Python.h').is_file()


def autocast(device, dtype_name):
    """A reusable context manager in which matmuls on `device` run in DTYPES[dtype_name]."""
    if dtype_name == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[dtype_name])


def set_matmul_precision(dtype_name):
    """Lets float32 matmuls be TF32 where a GPU has it, but not in runs that are float32 throughout."""
    torch.set_float32_matmul_precision('highest' if dtype_name == 'float32' else 'high')


def synchronize(device):
    """Waits until the device has done its work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def device_name(device):
    """The name of a GPU, else the type of `device`."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


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
