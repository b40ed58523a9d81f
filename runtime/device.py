"""Device checks, names, defaults, memory, peak FLOP/s."""

import contextlib
import os
import re
import resource
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from runtime.files import one_line

# The values of --dtype
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}

# (FLOP/s, GB of memory) of one GPU, from data sheets: the dense bf16 or fp16 peak with float32 sums, and the smallest
# memory on sale. The first key in a device's name counts; MIG slices and slower variants have None.
GPUS = {'MIG': None, 'Laptop': None, 'B200': (2250e12, 180), 'H200 NVL': (835e12, 141), 'H200': (989e12, 141),
        'H100 PCIe': (756e12, 80), 'H100 NVL': (835e12, 94), 'H100': (989e12, 80), 'A100': (312e12, 40),
        'L40S': (362e12, 48), 'L4': (121e12, 24), 'A10G': (70e12, 24), 'A5000': (111e12, 24), 'A6000': (155e12, 48),
        'V100': (125e12, 16), 'T4': (65e12, 16), 'RTX 5090 D': None, 'RTX 5090': (209e12, 32), 'RTX 4090 D': None,
        'RTX 4090': (165e12, 24), 'RTX 3090 Ti': None, 'RTX 3090': (71e12, 24)}


def check_device(device):
    """Return `device` as a torch.device. Exit if it does not work here."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        n = torch.cuda.device_count()
        advice = f'{n} GPUs are visible; set --device=cuda or cpu, and --nproc_per_node to at most {n}'
        raise SystemExit(f'--device={device}: {one_line(error)}; {advice if n else "set --device=cpu"}') from None
    return torch.device(device)


def device_defaults(device):
    """Return (a dict of the default backend, dtype and compile for `device`, the reason as text)."""
    if not device.startswith('cuda'):
        return dict(backend='gloo', dtype='float32', compile=False), f'device {device}'
    dtype, reason = 'bfloat16', f'device {device}'
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtype, reason = 'float16', f'{reason}; it has no bfloat16'
    if not can_compile(device):
        reason += '; no C compiler or no Python.h'
    return dict(backend='nccl', dtype=dtype, compile=can_compile(device)), reason


def can_compile(device):
    """Return whether torch.compile finds Python's headers and a compiler, C for CUDA and else C++."""
    compiler = shutil.which(os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++'))
    if device.startswith('cuda'):
        compiler = os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang')
    return bool(compiler) and Path(sysconfig.get_path('include'), 'Python.h').is_file()


def autocast(device, dtype_name):
    """Return a reusable context manager for matmuls in DTYPES[dtype_name]."""
    kind = torch.device(device).type
    return torch.autocast(kind, DTYPES[dtype_name]) if dtype_name != 'float32' else contextlib.nullcontext()


def set_matmul_precision(dtype_name):
    """Allow TF32 in float32 matmuls, except in runs that are float32 throughout."""
    torch.set_float32_matmul_precision('highest' if dtype_name == 'float32' else 'high')


def synchronize(device):
    """Wait until a GPU has finished its work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def device_name(device):
    """Return the name of a GPU, else the type of `device`."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def peak_memory(device):
    """Return peak memory in bytes: allocated on a GPU, else of this process, on Linux without mapped files."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    status = Path('/proc/self/status')
    kib = dict(re.findall(r'(\w+):\s+(\d+) kB', status.read_text(encoding='utf-8'))) if status.is_file() else {}
    if 'RssFile' in kib:
        return 1024 * (int(kib['VmHWM']) - int(kib['RssFile']))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def peak_flops(device):
    """Return the peak FLOP/s of `device` in 16-bit matmuls, None if unknown."""
    return (GPUS.get(gpu_named(device_name(device))) or [None])[0]


def gpu_named(name):
    """Return the key of GPUS for a device's name, or for a part of the key, such as '4090'; None if unknown."""
    def contains(text, words):
        return re.search(rf'\b{re.escape(words)}\b', text, re.IGNORECASE)
    return (next((key for key in GPUS if contains(name, key)), None)
            or min((key for key in GPUS if GPUS[key] and contains(key, name)), key=len, default=None))
