"""Process group, replicas (DDP) and shards (FSDP2) of a model, reductions. A single process is a World of one rank."""

import contextlib
import functools
import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.device import check_device
from runtime.files import one_line_errors
from runtime.signals import UNDO

TIMEOUT = timedelta(minutes=10)  # for a collective, after which the run ends as hung
PATIENCE = timedelta(hours=3)  # for a rank that reads or writes files
# Replicas live until the process ends, because their destructor can deadlock with gloo's threads.
_REPLICAS = []


@contextlib.contextmanager
def one_message():
    """Let only rank 0 print the message of a SystemExit that every rank raises inside."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str) and ranks_from_environment()[0]:
            raise SystemExit(1) from None
        raise


class World:
    """The ranks of this run, from torchrun's environment, and their collectives.

    Attributes: rank, size, is_master (rank 0), device (this rank's), started (the start's time), sharded (whether each
    rank holds a part of the parameters, so that all ranks must call every forward)."""

    def __init__(self, device, backend, parallel='ddp'):
        """Join the process group, until the end of `undo_at_end`. The `device` 'cuda' is the local rank's. `parallel`:
        each rank has a replica of the model ('ddp'), or shards, over all ranks ('fsdp') or each machine's ('hsdp')."""
        self.started = time.monotonic()
        self.rank, local_rank, self.size = ranks_from_environment()
        self.is_master = self.rank == 0
        self.parallel, self.sharded = parallel, parallel != 'ddp'
        self.reducer = None  # the module whose backward pass sums gradients over ranks, see `wrap`
        if device == 'cuda':
            device = f'cuda:{local_rank}'  # set_device needs an index
        self.device = check_device(device)
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
        if self.size == 1 and not self.sharded:
            return
        store = dist.HashStore() if self.size == 1 else next(dist.rendezvous('env://', timeout=TIMEOUT))[0]
        if os.environ.get('LOCAL_WORLD_SIZE') == str(self.size):
            # torchrun keeps one store for all restarts on a machine, which still has the addresses of dead ranks.
            store = dist.PrefixStore(f'restart {os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)}', store)
        self._store, self._barriers = dist.PrefixStore('barriers', store), 0
        UNDO.callback(setattr, sys, 'excepthook', sys.excepthook)  # The process group replaces it.
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT,
                                device_id=self.device if backend == 'nccl' else None)
        UNDO.push(self._leave)

    def _leave(self, kind, error, trace):
        """Leave the process group at the end of a run. After a crash end the process, as a normal exit can deadlock."""
        if kind and self.size > 1 and not issubclass(kind, SystemExit):
            if re.search('by peer|remote process exited', str(error)):
                print(f'rank {self.rank}: another rank has ended, or cannot be reached', file=sys.stderr)
            else:
                sys.excepthook(kind, error, trace)  # the process group's, which names the rank
            sys.stdout.flush()
            os._exit(1)
        # A gloo thread needs the GIL to release its last tensor, and DDP's destructor would hold it while waiting.
        time.sleep(0.2)
        dist.destroy_process_group()

    def wrap(self, losses, model, blocks, compile=False, activation_checkpointing=False, compute_dtype=None):
        """Move `model`, with the same weights on every rank, to the ranks' devices. Return the module that training
        calls: `losses`, which wraps `model`, perhaps compiled and replicated. In a sharded world the parameters become
        DTensors, gathered as `compute_dtype`; build the optimizer afterwards. `blocks` are sharded, compiled and
        recomputed one by one."""
        if activation_checkpointing:
            from torch.utils.checkpoint import checkpoint
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if compile:
                # On a GPU, recomputed dropout in compiled code would use generators that `seed_all` does not seed.
                from torch._functorch import config
                config.graphsafe_rng_functionalization = False
        if self.sharded:
            self.reducer = self._shard(model, blocks, compile, compute_dtype)
            return losses
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

    def _shard(self, model, blocks, compile, compute_dtype):
        """Shard the model by FSDP2: each block is a group of parameters, the rest of the model is another."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        shape, names = (self.size,), ('shard',)
        per_node = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        if self.parallel == 'hsdp' and self.size > per_node:  # On one machine it is fsdp.
            shape, names = (self.size // per_node, per_node), ('replicate', 'shard')
        # Inputs of blocks keep their dtype.
        options = dict(mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names),
                       mp_policy=MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False))
        for block in blocks:
            if compile:  # before FSDP adds its hooks
                block.forward = torch.compile(block.forward)
            fully_shard(block, **options)
        model = fully_shard(model, **options)
        model.register_forward_pre_hook(share_buffers)
        return model

    def reshard(self, model):
        """Free the weights that a forward without a backward pass has gathered, before an update makes them stale."""
        if self.sharded:
            model.reshard()

    def set_gradient_sync(self, last, estimating=False):
        """Let DDP average gradients over ranks only in an iteration's `last` micro-batch. Sharded gradients are reduced
        in each, to save memory. HSDP's reduction between machines also waits for the last one, unless `estimating`,
        when a second backward pass would add its gradients to the waiting ones."""
        if self.parallel == 'hsdp':
            self.reducer.set_requires_all_reduce(last or estimating)
        elif self.size > 1 and not self.sharded:
            self.reducer.require_backward_grad_sync = last

    def check_reduced(self):
        """Raise RuntimeError if a parameter of DDP got no gradient, because other ranks would wait for it."""
        if self.size > 1 and not self.sharded:
            self.reducer._check_reducer_finalized()

    def zero_grad(self, optimizer):
        """Reset the gradients. DDP's become zero, not None, because they are views of its buckets."""
        optimizer.zero_grad(set_to_none=self.size == 1 or self.sharded)

    def any(self, *flags):
        """Return a list that tells for each of `flags` whether it is true on any rank."""
        if self.size == 1:
            return [bool(flag) for flag in flags]
        return [n > 0 for n in self.sum(torch.tensor([float(flag) for flag in flags], device=self.device)).tolist()]

    def zeros(self, *shape):
        """Return zeros for sums over many batches: float64, or float32 on Apple's devices, which lack float64."""
        dtype = torch.float32 if self.device.type == 'mps' else torch.float64
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def sum(self, tensor):
        """Sum `tensor` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor):
        """Return the (n,) `tensor`s of all ranks as the rows of a (ranks, n) tensor."""
        rows = tensor.new_zeros(self.size, len(tensor))
        rows[self.rank] = tensor
        return self.sum(rows)

    def barrier(self):
        """Wait for all ranks with PATIENCE, because files may take longer than a collective's TIMEOUT."""
        if self.size == 1:
            return
        self._barriers += 1
        if self._store.add(f'{self._barriers}', 1) == self.size:
            self._store.set(f'{self._barriers} complete', '')
        self._store.wait([f'{self._barriers} complete'], PATIENCE)

    def from_master(self, number):
        """Return rank 0's `number`, an int, once every rank is here."""
        self.barrier()
        return int(self.sum(torch.tensor(number if self.is_master else 0, device=self.device)))

    @contextlib.contextmanager
    def exit_together(self):
        """Make all ranks exit if SystemExit or OSError is raised inside on any rank. Only the first such rank prints a
        message, for an OSError the file and the reason. No collective may be called inside."""
        error = None
        try:
            with one_line_errors():
                yield
        except SystemExit as raised:
            error = raised
        self.barrier()
        failed = self.gather(torch.tensor([float(error is not None)], device=self.device))
        if failed.any():
            raise error if failed.argmax() == self.rank else SystemExit(1)


def share_buffers(model, args):
    """Copy rank 0's buffers to all ranks before a forward of a sharded model, as DDP does for its models."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def is_sharded(tensor):
    """Return whether `tensor` is a DTensor."""
    return hasattr(tensor, 'placements')  # The class takes half a second to import.


def full_tensor(tensor):
    """Return `tensor`, gathered if it is sharded. Then every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def ranks_from_environment():
    """Return torchrun's (rank, local rank, number of ranks); (0, 0, 1) without it."""
    env = os.environ
    return int(env.get('RANK', 0)), int(env.get('LOCAL_RANK', 0)), int(env.get('WORLD_SIZE', 1))
