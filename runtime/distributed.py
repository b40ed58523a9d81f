"""Process group, replicas (DDP) and shards (FSDP2) of a model, reductions. A single process is a world of one rank."""

import contextlib
import functools
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.device import can_compile, check_device
from runtime.files import first_line

# Kept until the process ends: a replica's destructor waits for gloo's threads, which may wait for the interpreter.
_REPLICAS = []


class World:
    """The ranks of this run, as torchrun's environment describes them, and their collectives.

    Attributes: rank, local_rank, size, is_master (rank 0), device (torch.device of this rank); sharded: whether
    parameters are spread over the ranks. If so, every forward is collective: every rank must call it.
    """

    def __init__(self, device, backend, parallel='ddp'):
        """Joins the process group.

        Args:
            device: as --device, checked; 'cuda' becomes the device of this local rank.
            backend: 'nccl' or 'gloo'.
            parallel: 'ddp': every rank holds the model. 'fsdp': all ranks together hold it once. 'hsdp': the ranks of
                each machine do.

        Stops the run when the environment, the device or the backend does not allow it.
        """
        self.rank, self.local_rank, self.size = ranks_from_environment()
        self.is_master = self.rank == 0
        self.parallel, self.sharded = parallel, parallel != 'ddp'
        self.reducer = None  # the module, of `wrap`, whose backward pass sums gradients over ranks
        if device == 'cuda':
            device = f'cuda:{self.local_rank}'  # set_device needs an index
        self.device = check_device(device)
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
        if self.size > 1 or self.sharded:
            if backend == 'nccl' and self.device.type != 'cuda':
                raise SystemExit(f'--backend=nccl: needs CUDA devices, and --device={device} is none; set '
                                 '--backend=gloo')
            if self.size > 1 and not (os.environ.get('MASTER_ADDR') and os.environ.get('MASTER_PORT')):
                raise SystemExit(f'WORLD_SIZE={self.size}: MASTER_ADDR or MASTER_PORT is not set; start with torchrun, '
                                 'or unset WORLD_SIZE')
            store = dist.HashStore() if self.size == 1 else None
            if self.size > 1 and restarts() and os.environ.get('LOCAL_WORLD_SIZE') == str(self.size):
                # torchrun keeps one store for all restarts on a machine; the addresses of dead ranks are still in it.
                store = dist.PrefixStore(f'restart {restarts()}', next(dist.rendezvous('env://'))[0])
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size,
                                    timeout=timedelta(minutes=10),
                                    device_id=self.device if backend == 'nccl' else None)
            sys.excepthook = self._die

    def wrap(self, losses, model, blocks, compile=False, activation_checkpointing=False, compute_dtype=None):
        """Move `model`, with the same weights on every rank, to the ranks' devices; return the module that training
        calls: `losses`, perhaps compiled and replicated.

        Weights on the device 'meta' get memory, but no values. If the world is sharded, the parameters of `model`
        become DTensors in place; build the optimizer afterwards. Otherwise `model` itself stays eager.

        Args:
            losses: a module that calls `model`, its only submodule with parameters.
            blocks: the modules that most of the model consists of, which FSDP gathers one after another and which
                activation checkpointing computes again.
            compile: torch.compile `losses` as a whole, or each block where the model is sharded.
            activation_checkpointing: keep only the inputs of a block, and compute the rest again in the backward pass.
            compute_dtype: dtype in which sharded parameters are gathered; default their own. Shards, gradients and
                their sums stay float32.
        """
        if compile and not can_compile(self.device.type):
            raise SystemExit('--compile=True: this machine has no C++ compiler or no Python.h; install g++ and '
                             'python3-dev, or set --compile=False' if self.is_master else 1)
        blocks = list(blocks)
        if activation_checkpointing:
            from torch.utils.checkpoint import checkpoint
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if self.sharded:
            self.reducer = self._shard(model, blocks, compile, compute_dtype)
            return losses
        self._materialize(model)
        losses.to(self.device)
        if compile:
            losses = torch.compile(losses)
        if self.size == 1:
            return losses
        from torch.nn.parallel import DistributedDataParallel
        device_ids = [self.device.index] if self.device.type == 'cuda' else None
        self.reducer = DistributedDataParallel(losses, device_ids=device_ids, gradient_as_bucket_view=True)
        _REPLICAS.append(self.reducer)
        return self.reducer

    def _materialize(self, model):
        """Allocates on this rank's device the parameters that are on 'meta'. In place, because some have two names."""
        for p in model.parameters():
            if p.is_meta:
                torch.utils.swap_tensors(p, torch.nn.Parameter(torch.empty_like(p, device=self.device),
                                                               p.requires_grad))

    def _shard(self, model, blocks, compile, compute_dtype):
        """FSDP2: each block is gathered when it is needed and freed afterwards; all other parameters (the embeddings,
        the last norm, the head) are one more group."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        shape, names = (self.size,), ('shard',)
        per_node = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        if self.parallel == 'hsdp' and self.size > per_node:  # on one machine it is fsdp
            shape, names = (self.size // per_node, per_node), ('replicate', 'shard')
        # Inputs of blocks keep their dtype: the residual stream stays float32.
        options = dict(mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names),
                       mp_policy=MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False))
        try:
            for block in blocks:
                if compile:  # inside FSDP's hooks
                    block.forward = torch.compile(block.forward)
                fully_shard(block, **options)
            model = fully_shard(model, **options)
        except Exception as error:  # shared parameters, blocks that are used twice, scalar parameters, …
            raise SystemExit(f'--parallel={self.parallel}: FSDP cannot shard this model ({first_line(error)}); use '
                             '--parallel=ddp' if self.is_master else 1) from None
        self._materialize(model)
        model.register_forward_pre_hook(share_buffers)
        return model

    def reshard(self, model):
        """Frees what a forward without a backward pass has left gathered: its copy of the weights would be stale once
        the optimizer changes them."""
        if self.sharded:
            model.reshard()

    def set_gradient_sync(self, last, estimating=False):
        """Before a micro-batch: DDP averages gradients over ranks only in the `last` one.

        Sharded gradients are reduced in every micro-batch, because whole ones would take the memory that sharding
        saves. HSDP's reduction between machines waits for the last one, unless the iteration makes a second backward
        pass (`estimating`), whose gradients must not be added to those that wait.
        """
        if self.parallel == 'hsdp':
            self.reducer.set_requires_all_reduce(last or estimating)
        elif self.size > 1 and not self.sharded:
            self.reducer.require_backward_grad_sync = last

    def zero_grad(self, optimizer):
        """Resets the gradients. DDP's become zeros instead of None, because they are views of its buckets: without them
        all micro-batches but the last would accumulate into a second set."""
        optimizer.zero_grad(set_to_none=self.size == 1 or self.sharded)

    def any(self, *flags):
        """For each of `flags`, whether it is true on any rank, as a list."""
        if self.size == 1:
            return [bool(flag) for flag in flags]
        return [n > 0 for n in self.sum(torch.tensor([float(flag) for flag in flags], device=self.device)).tolist()]

    def zeros(self, n):
        """(n,) zeros, for sums over many batches: float64, or float32 on Apple's devices, which have no float64."""
        return torch.zeros(n, dtype=torch.float32 if self.device.type == 'mps' else torch.float64, device=self.device)

    def sum(self, tensor):
        """Sums `tensor` over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor):
        """The (n,) `tensor`s of all ranks as rows: (ranks, n)."""
        rows = tensor.new_zeros(self.size, len(tensor))
        rows[self.rank] = tensor
        return self.sum(rows)

    def from_master(self, number):
        """Rank 0's `number` (an int), on all ranks."""
        return int(self.sum(torch.tensor(number if self.is_master else 0, device=self.device)))

    @contextlib.contextmanager
    def exit_together(self):
        """Around a part of the set-up that may raise SystemExit: if any rank does, all exit, and the first of them
        prints its message. No collective may be called inside."""
        error = None
        try:
            yield
        except SystemExit as raised:
            error = raised
        failed = self.gather(torch.tensor([float(error is not None)], device=self.device))
        if failed.any():
            raise error if failed.argmax() == self.rank else SystemExit(1)

    def close(self):
        """Leaves the process group."""
        if dist.is_initialized():
            # A thread of gloo needs the GIL to release the tensor of its last collective, and DDP's destructor, which
            # holds the GIL, waits for that thread. The pause lets it finish first.
            time.sleep(0.2)
            dist.destroy_process_group()

    def _die(self, kind, error, trace):
        """Ends this rank at once after an uncaught exception, so that torchrun ends the others. A normal exit can
        deadlock with ranks that wait for this one."""
        print(f'rank {self.rank}:', file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def one_message():
    """Around what fails alike on every rank, before they have met: only rank 0 prints the message of SystemExit."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str) and ranks_from_environment()[0]:
            raise SystemExit(1) from None
        raise


def share_buffers(model, args):
    """A hook before each forward of a sharded model: gives every rank the buffers of rank 0, as DDP does, because a
    forward may change them by its rank's sequences."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def is_sharded(tensor):
    """Whether `tensor` is a DTensor, whose module is imported only once something has been sharded."""
    module = sys.modules.get('torch.distributed.tensor')
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor):
    """`tensor`, gathered from all ranks if it is sharded. Collective then: every rank must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def under_torchrun():
    """Whether torchrun has started this process: it takes every exit code but 0 for a failure, and may restart."""
    return 'TORCHELASTIC_RUN_ID' in os.environ


def restarts():
    """How often torchrun has restarted this run after a failure."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


def run_id():
    """Return the id that torchrun gives a run and its restarts, '' without torchrun.

    Without --rdzv_id or --standalone the id is 'none' for every run; then the name of torchrun's own directory for the
    run stands for it, which ends in random letters.
    """
    name, file = (os.environ.get(f'TORCHELASTIC_{key}', '') for key in ('RUN_ID', 'ERROR_FILE'))
    return name if name != 'none' else Path(file).parent.parent.parent.name  # …/none_x7k2/attempt_0/0/error.json


def ranks_from_environment():
    """Return (rank, local rank, number of ranks) as torchrun sets them; (0, 0, 1) without torchrun. SystemExit when
    the environment has something else there."""
    found = []
    for key, lowest in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1).items():
        text = os.environ.get(key, str(lowest))
        if not text.isdecimal() or int(text) < lowest:
            raise SystemExit(f'{key}={text}: must be a whole number, at least {lowest}; start with torchrun, or unset '
                             f'{key}')
        found.append(int(text))
    rank, _, size = found
    if rank >= size:
        raise SystemExit(f'RANK={rank}: must be below WORLD_SIZE={size}; start with torchrun, or unset both')
    return tuple(found)
