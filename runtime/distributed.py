"""Process group, replicas (DDP) and shards (FSDP2) of the model, reductions. A single process is a world of one rank.

Also what ends a run early: signals and the time limit (`Stops`), and the message of a rank that dies.
"""

import contextlib
import functools
import os
import resource
import shutil
import signal
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# Exit codes, besides 0 = finished and 1 = refused or failed (sysexits.h: EX_TEMPFAIL, EX_DATAERR).
STOPPED, NOT_FINITE = 75, 65
STARTED = time.monotonic()


class World:
    """The ranks of this run, as torchrun's environment describes them, and what they do together.

    Attributes: rank, local_rank, size, is_master (rank 0), device (torch.device of this rank); sharded: parameters are
    spread over the ranks, so that every forward is a matter of all of them.
    """

    def __init__(self, device, backend, parallel='ddp'):
        """Joins the process group.

        Args:
            backend: 'nccl' or 'gloo'.
            parallel: 'ddp': every rank holds the model. 'fsdp': all ranks together hold it once. 'hsdp': the ranks of
                each machine do.

        SystemExit with one line when it cannot work.
        """
        self.rank, self.local_rank, self.size = ranks_from_environment()
        self.is_master = self.rank == 0
        self.parallel, self.sharded = parallel, parallel != 'ddp'
        if device == 'cuda':
            device = f'cuda:{self.local_rank}'  # with an index, which set_device wants
        self.device = check_device(device)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save before `Stops` takes it
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
        if self.size > 1 or self.sharded:
            if backend == 'nccl' and self.device.type != 'cuda':
                raise SystemExit(f'--backend=nccl needs CUDA devices, this run is on {self.device}; use --backend=gloo')
            store = dist.HashStore() if self.size == 1 else None
            if self.size > 1 and restarts() and os.environ.get('LOCAL_WORLD_SIZE') == str(self.size):
                # torchrun keeps one store for all restarts on a machine; the addresses of dead ranks are still in it.
                store = dist.PrefixStore(f'restart {restarts()}', next(dist.rendezvous('env://'))[0])
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size,
                                    timeout=timedelta(minutes=10),
                                    device_id=self.device if backend == 'nccl' else None)
            sys.excepthook = self._die

    def wrap(self, model, compile=False, activation_checkpointing=False, low_precision=None):
        """Puts `model`, a GPT with the same weights on every rank, on the ranks' devices, and returns what to call.

        Sharded, the parameters of `model` become DTensors in place; build the optimizer afterwards.

        Args:
            compile: torch.compile what training runs between embeddings and head, or, where the model is sharded, each
                block; and the loss.
            activation_checkpointing: keep only what enters a block, and compute the rest again in the backward pass.
            low_precision: dtype that sharded parameters are gathered in; default their own. Shards, gradients and
                their sums stay float32.
        """
        if compile:
            # Gauss-Newton-Bartlett's two backward passes through one compiled forward need its buffers twice.
            torch._functorch.config.donated_buffer = False
            model.compile_loss = True
            if not self.sharded:
                # Its layout pass would copy what goes into convolutions, which linear layers are on CPU.
                model.compiled_trunk = torch.compile(model.transformer.forward, options={'layout_optimization': False})
        if activation_checkpointing:
            for block in model.transformer.h:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if self.sharded:
            return self._shard(model, compile, low_precision)
        model.to(self.device)
        if self.size == 1:
            return model
        device_ids = [self.device.index] if self.device.type == 'cuda' else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def _shard(self, model, compile, low_precision):
        """FSDP2: each block is gathered when it is needed, and given up again; the embeddings, shared with the head,
        and the last norm are another group of parameters."""
        shape, names = (self.size,), ('shard',)
        per_node = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        if self.parallel == 'hsdp' and self.size > per_node:  # on one machine it is fsdp
            shape, names = (self.size // per_node, per_node), ('replicate', 'shard')
        # Inputs stay as they are: bfloat16 would round the uniform numbers that labels are drawn with.
        options = dict(mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names),
                       mp_policy=MixedPrecisionPolicy(low_precision, torch.float32, cast_forward_inputs=False))
        if compile:
            # All blocks are one function to torch.compile. Where their attention is scaled differently, each needs
            # graphs of its own: to train and to evaluate.
            torch._dynamo.config.recompile_limit = max(8, 4 * len(model.transformer.h))
        for block in model.transformer.h:
            if compile:  # inside of FSDP's hooks
                block.forward = torch.compile(block.forward)
            fully_shard(block, **options)
        return fully_shard(model, **options)

    @contextlib.contextmanager
    def gradient_sync(self, model, last, estimating=False):
        """Around forward and backward of a micro-batch: DDP averages gradients over ranks only in the last one.

        Shards are summed up in every one: whole gradients would need the room that sharding is there to save. What
        HSDP has still to sum up between machines waits for the last one, unless the iteration is `estimating` the
        Hessian, whose gradient must not get mixed up with what waits.
        """
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = last
        elif self.parallel == 'hsdp':
            model.set_requires_all_reduce(last or estimating)
        yield

    def zero_grad(self, optimizer):
        """Forgets the gradients. DDP's stay, as zeros: they are views of its buckets, and others, up to the last
        micro-batch, would be a second set."""
        optimizer.zero_grad(set_to_none=self.size == 1 or self.sharded)

    def any(self, flag):
        """Whether `flag` is true, on any rank where the ranks have to go on together because they are sharded."""
        if not self.sharded:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def zeros(self, n):
        """(n,) zeros to add up over many batches: float64, which Apple's devices do not have."""
        return torch.zeros(n, dtype=torch.float32 if self.device.type == 'mps' else torch.float64, device=self.device)

    def sum(self, tensor):
        """Adds `tensor` up over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor):
        """The 1-D `tensor`s of all ranks, as rows."""
        rows = tensor.new_zeros(self.size, len(tensor))
        rows[self.rank] = tensor
        return self.sum(rows)

    def from_master(self, number):
        """Rank 0's `number` (an int), on all ranks."""
        return int(self.sum(torch.tensor(number if self.is_master else 0, device=self.device)))

    @contextlib.contextmanager
    def together(self):
        """Around a part of the set-up that may refuse: if it does on any rank, all leave, and the first one says why.

        No collective may stand inside.
        """
        refusal = None
        try:
            yield
        except SystemExit as error:
            refusal = error
        refused = torch.zeros(self.size, device=self.device)
        refused[self.rank] = float(refusal is not None)
        if self.sum(refused).any():
            raise refusal if refused.argmax() == self.rank else SystemExit(1)

    def close(self):
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _die(self, kind, error, trace):
        """Ends a rank that an exception has reached, at once, so that torchrun ends the others.

        The interpreter's orderly exit could wait for ranks that wait for this one.
        """
        lost = ('Connection closed by peer', 'Connection reset by peer', 'Broken pipe', 'remote process exited')
        if issubclass(kind, RuntimeError) and any(sign in str(error) for sign in lost):
            print(f'rank {self.rank}: another rank has died; its own message says why', file=sys.stderr)
            time.sleep(2)  # torchrun names the rank that ended first
        else:
            print(f'rank {self.rank}:', file=sys.stderr)
            sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Unbreakable:
    """The text stream `stream`, whose failures end no run: a log on a full disk, a terminal or pipe that has gone."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


class Stops:
    """Why this rank thinks that the run should stop or save: SIGTERM, SIGINT, SIGHUP, the time limit; SIGUSR1.

    Signal handlers only leave a note. The ranks exchange their notes once an iteration, together with the loss, so that
    all of them act after the same iteration.
    """

    def __init__(self, max_hours=0.0):
        self.deadline = STARTED + 3600 * max_hours if max_hours else float('inf')
        self.reason, self.noted, self.save = '', 0.0, False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._note)

    def _note(self, number, frame):
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.reason:
            self.reason, self.noted = signal.Signals(number).name, now
        elif number == signal.SIGINT and now > self.noted + 1:
            # Impatience. Within a second it may be a launcher that hands on what the terminal has sent to all.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def stop(self):
        """Whether the run should stop."""
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = 'max_hours'
        return bool(self.reason)

    def notes(self):
        """(stop, save) as 0 or 1; forgets that a save was asked for."""
        save, self.save = self.save, False
        return float(self.stop), float(save)


def whole(tensor):
    """`tensor`, gathered from all ranks if it is sharded (then a matter of all ranks)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def settings_for(device):
    """(backend, dtype and compile, as a dict; why) that suit a device, for train.py's `config.fill`."""
    if not device.startswith('cuda'):
        return dict(backend='gloo', dtype='float32', compile=False), f'device {device}'
    where = f'device {device}' if can_compile() else f'device {device}; no C compiler or no Python.h'
    return dict(backend='nccl', dtype='bfloat16', compile=can_compile()), where


def can_compile():
    """Whether this machine has what torch.compile needs for CUDA: a C compiler and Python's headers."""
    compiler = os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang')
    return bool(compiler) and Path(sysconfig.get_path('include'), 'Python.h').is_file()


def under_torchrun():
    """Whether torchrun has started this process: it takes every exit code but 0 for a failure, and may restart."""
    return 'TORCHELASTIC_RUN_ID' in os.environ


def restarts():
    """How often torchrun has started this run again after a failure."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


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


def device_name(device):
    """What `device` is called: the GPU's name, else its kind."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def peak_memory(device):
    """The most bytes so far: allocated on a GPU, else of this process."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


# Dense bf16/fp16 peak of one device in FLOP/s, from the makers' data sheets (no sparsity).
PEAK_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'A5000': 111e12, 'L40S': 362e12, 'RTX 4090': 165e12}


def peak_flops(device):
    """Peak FLOP/s of `device` in 16-bit matrix products; None where it is not known."""
    if device.type != 'cuda':
        return None
    return next((flops for key, flops in PEAK_FLOPS.items() if key in device_name(device)), None)
