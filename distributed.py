"""Process group, DDP wrapping, gradient sync and reductions. A single process is a world of one rank."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class World:
    """The ranks of this run, as torchrun's environment describes them, and what they do together.

    Attributes: rank, local_rank, size, is_master (rank 0), device (torch.device of this rank).
    """

    def __init__(self, device, backend):
        """Joins the process group. `backend` is 'nccl' or 'gloo'; SystemExit with one line when it cannot work."""
        self.rank, self.local_rank, self.size = ranks_from_environment()
        self.is_master = self.rank == 0
        if device == 'cuda' and self.size > 1:
            device = f'cuda:{self.local_rank}'
        self.device = check_device(device)
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
        if self.size > 1:
            if backend == 'nccl' and self.device.type != 'cuda':
                raise SystemExit(f'--backend=nccl needs CUDA devices, this run is on {self.device}; use --backend=gloo')
            dist.init_process_group(backend, timeout=timedelta(minutes=10),
                                    device_id=self.device if backend == 'nccl' else None)

    def wrap(self, model):
        """`model` under DDP where there are several ranks: its parameters made equal to rank 0's."""
        if self.size == 1:
            return model
        device_ids = [self.device.index] if self.device.type == 'cuda' else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def gradient_sync(self, model, last):
        """Around forward and backward of a micro-batch: DDP averages gradients over ranks only in the last one."""
        if self.size > 1:
            model.require_backward_grad_sync = last
        yield

    def sum(self, tensor):
        """Adds `tensor` up over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    def close(self):
        """Leaves the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def ranks_from_environment():
    """(rank, local rank, number of ranks) as torchrun sets them; (0, 0, 1) without torchrun."""
    return tuple(int(os.environ.get(key, default)) for key, default in
                 [('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)])


def check_device(device):
    """`device` as a torch.device; SystemExit with one line when this machine does not have it."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise SystemExit(f'--device={device}: no such kind of device; use cuda, cuda:N, mps or cpu') from None
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise SystemExit(f'--device={device}: torch finds no CUDA device here; use --device=cpu')
        if (device.index or 0) >= torch.cuda.device_count():
            raise SystemExit(f'--device={device}: this machine has {torch.cuda.device_count()} CUDA device(s); '
                             'start at most one process per device')
    if device.type == 'mps' and not torch.backends.mps.is_available():
        raise SystemExit(f'--device={device}: torch finds no MPS device here; use --device=cpu')
    return device


# Dense bf16/fp16 peak of one device in FLOP/s, from the makers' data sheets (no sparsity).
PEAK_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'A5000': 111e12, 'L40S': 362e12, 'RTX 4090': 165e12}


def peak_flops(device):
    """Peak FLOP/s of `device` in 16-bit matrix products; None where it is not known."""
    if device.type != 'cuda':
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
