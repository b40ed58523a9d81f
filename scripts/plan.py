"""What a run will need: memory, whether it fits, FLOPs, days, and what the ranks send each other. Nothing is trained.

  python scripts/plan.py config/train_neox_6.6b_sophiag.py --gpus 64 --gpu h100
  python scripts/plan.py config/train_neox_1.5b_{adamw,sophiag}.py --gpus 8 --gpu a100 --mfu 0.3 --batch_size=8
  python scripts/plan.py config/train_gpt2_small_sophiag.py --gpus 1 --gpu h200 --measure

Settings are train.py's: config files, one plan each, and --key=value flags for all of them. GB are 1e9 bytes.

Memory is the peak of train.py's own train_step on one GPU, with a Hessian estimate where there is one. The step is
executed eagerly on fake tensors, which have shapes but no data, and PyTorch's MemTracker adds up what is alive; so the
plan follows any model, loss and optimizer. FSDP and HSDP are executed on rank 0 of a process group whose other ranks
send nothing; DDP's buckets are taken as one more set of gradients that stay from step to step. tests/test_plan.py
compares this with what real steps allocate on CPU. Two things are added where the run is on CUDA, because fake tensors
follow PyTorch's CPU operators: autocast's float32 copies of 16-bit inputs of layer norms, and of shards one more
gathered block, whose copy is under way. Compiled, Sophia's update goes tensor by tensor. Not counted: the CUDA context,
workspaces of cuBLAS and NCCL, fragmentation (HEADROOM is left for them).

FLOPs are the matmuls of that step as PyTorch's FlopCounterMode counts them, the causal half of attention in full (the
convention of train.py's mfu); recomputation of checkpointed blocks is included. A step takes them at --mfu of all
GPUs' peak. Communication is bytes over bandwidth, nothing of it hidden behind computation: its share of the step is an
upper bound of what it costs.
"""

import argparse
import contextlib
import copy
import gc
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import optimizers
import sophia
import train
from analysis.runs import estimates_per_iteration, print_table, show_progress, writable, write_json
from data.loader import data_dir, read_meta
from hessian import rows_at_once
from model import GPT, GPTConfig, padded_vocab_size
from runtime.device import DTYPES, PEAK_FLOPS
from runtime.distributed import World, ranks_from_environment

GiB = 2 ** 30
HEADROOM = 0.1  # of a GPU's memory, for what is not counted


@dataclass
class GPU:
    """memory: bytes. nvlink: bytes/s that one GPU sends to others of its node. network: bytes/s that a node sends."""
    memory: float
    nvlink: float
    network: float


# NVIDIA's data sheets: H100 and H200 SXM (80 and 141 GB; NVLink 900 GB/s, both ways together), DGX H100 and H200 (8
# adapters of 400 Gb/s), A100 SXM 80 GB (NVLink 600 GB/s), DGX A100 (8 adapters of 200 Gb/s). Clouds may have less
# between nodes: --network.
GPUS = {'h100': GPU(80 * GiB, 450e9, 400e9), 'h200': GPU(140 * GiB, 450e9, 400e9), 'a100': GPU(80 * GiB, 300e9, 200e9)}


def environment(gpus, per_node):
    """A context with the environment of rank 0 of `gpus`, as torchrun would set it: settings and shards depend on
    it."""
    return mock.patch.dict(os.environ, RANK='0', LOCAL_RANK='0', WORLD_SIZE=str(gpus),
                           LOCAL_WORLD_SIZE=str(min(gpus, per_node)))


def changed(config, **values):
    """A copy of `config` with some settings changed."""
    config = copy.copy(config)
    config.values = dict(config.values, **values)
    return config


def on_cuda(config):
    """Whether the run is on CUDA."""
    return config.device.startswith('cuda')


def vocabulary(config):
    """Padded vocabulary of a run. Without its data it is 50,304: the tokenizers of GPT-2 and GPT-NeoX-20B have 50,257
    and 50,277 ids."""
    meta = read_meta(data_dir(config.dataset))
    return padded_vocab_size(meta['vocab_size'] if meta else 50257)


def make_model(config, vocab_size, device):
    """The run's GPT on `device`."""
    torch.manual_seed(config.seed)
    with torch.device(device):  # the largest models take minutes on one CPU core
        return GPT(GPTConfig.from_settings(config.values, vocab_size))


def estimates(config):
    """How many Hessian estimates a step makes on average."""
    return estimates_per_iteration(config.optimizer_name, config.hessian_interval, config.max_iters)


def estimate_first(run):
    """Has iteration 0 estimate the Hessian, and no other one."""
    run.hessian.is_due = lambda iter_num, interval: iter_num == 0


def take_step(run, iter_num, micro_batches=None):
    """One step of training on random tokens, of all micro-batches or the first few."""
    c = run.config
    micro_batches = min(c.gradient_accumulation_steps, micro_batches or c.gradient_accumulation_steps)
    fresh = run.hessian.fresh_sequences(iter_num) // run.world.size
    shape = (micro_batches * c.batch_size + fresh, c.block_size + 1)
    train.train_step(run, torch.randint(run.raw_model.config.vocab_size, shape, device=run.world.device), iter_num)


# ----------------------------------------------------------------------------------------------------------------------
# A step on fake tensors


class FakeRank(World):
    """Rank 0 of `size` ranks, of which the others send nothing."""

    def __init__(self, parallel, size):
        self.rank = self.local_rank = 0
        self.size, self.is_master, self.parallel, self.sharded = size, True, parallel, parallel != 'ddp'
        self.device = torch.device('cpu')
        if size > 1 or self.sharded:
            dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=size)


class Buckets:
    """DDP as far as memory goes: gradients are views of its buckets, which are there from the start."""

    def __new__(cls, model, **options):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model


def finite_list(tensor, tolist=torch.Tensor.tolist):
    """Tensor.tolist, of a fake tensor ones."""
    return [1.0] * tensor.numel() if isinstance(tensor, FakeTensor) else tolist(tensor)


def cuda_layer_norm(x, shape, *args):
    """F.layer_norm, which CUDA's autocast has take float32, and the CPU's does not."""
    if torch.is_autocast_enabled('cpu'):
        x, *args = (arg.float() if isinstance(arg, torch.Tensor) else arg for arg in (x, *args))
    return torch.layer_norm(x, shape, *args)


class Inside(TorchDispatchMode):
    """Has custom operators execute their bodies, whose memory and FLOPs count, too. Gives the numbers that fake tensors
    do not have: 1 of floating point, and 0 for counts of what is not finite."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes again for the local tensor
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        body = getattr(OPDEFS.get(func.name().split('.')[0]), '_init_fn', func)
        return body(*args, **(kwargs or {}))


# What MemTracker calls the kinds of tensors.
KINDS = dict(Parameter='parameters', Gradient='gradients', Activation='activations', Temp='backward pass',
             Optstate='optimizer')


class Tracker(MemTracker):
    """MemTracker that remembers at which moment of a step the peak was. Its figures by module are left out: they allow
    of one call a module."""

    def __init__(self, run):
        super().__init__()
        self.model, self.estimating = run.raw_model, False
        self.start()
        run.hessian.backward = self.during_estimate(run.hessian.backward)
        run.hessian.finish = self.during_estimate(run.hessian.finish)

    def _by_module(self, *args):
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _by_module

    def during_estimate(self, function):
        def wrapped(*args):
            self.estimating = True
            function(*args)
            self.estimating = False
        return wrapped

    def _update_peak_stats(self, state):
        alive = self._curr_mem_snap.get(torch.device('cpu'), {'Total': 0})
        if alive['Total'] > self.highest['Total']:
            self.highest = dict(alive)
            self.moment = ('update' if self._in_opt else 'estimate' if self.estimating else
                           'backward' if self._mod_tracker.is_bw else 'forward')

    def start(self):
        """Looks for a peak from now on. What is there of parameters and gradients is counted as such."""
        self._track_module_params_and_buffers(self.model)
        self.highest = {'Total': 0}

    def peak(self):
        """The highest since `start`: bytes, moment, and {kind of tensor: bytes}."""
        terms = {KINDS.get(kind, kind): size for kind, size in self.highest.items() if kind != 'Total' and size}
        return dict(peak=self.highest['Total'], moment=self.moment, terms=terms)


def update_by_tensor(params, grads, ms, hs, *settings):
    """The memory of Sophia's compiled update: it needs none as large as the model."""
    for i in range(len(params)):
        sophia.sophia_update(params[i:i + 1], grads[i:i + 1], ms[i:i + 1], hs[i:i + 1], *settings)


def real_mesh(*args, **options):
    """`init_device_mesh`, whose tensor of ranks is read and cannot be fake."""
    with unset_fake_temporarily():
        return init_device_mesh(*args, **options)


@contextlib.contextmanager
def fake_run(config, vocab_size, gpus=1, per_node=8):
    """The `train.Run` of rank 0 of `gpus` on fake tensors; steps are taken inside, under `Inside`."""
    with contextlib.ExitStack() as stack:
        for context in (environment(gpus, per_node), FakeTensorMode(),
                        mock.patch('runtime.distributed.init_device_mesh', real_mesh),
                        # DTensor infers shapes on unsharded fake tensors: in a mode that the tracker leaves out.
                        mock.patch('torch.distributed.tensor._sharding_prop.detect_fake_mode', lambda *args: None,
                                   create=True),
                        mock.patch('runtime.distributed.DistributedDataParallel', Buckets),
                        mock.patch.object(sophia, 'compiled_update', lambda: update_by_tensor),
                        mock.patch.object(F, 'layer_norm', cuda_layer_norm if on_cuda(config) else F.layer_norm),
                        mock.patch.object(torch.Tensor, 'tolist', finite_list)):
            stack.enter_context(context)
        world = FakeRank(config.parallel, gpus)
        stack.callback(world.close)
        model = make_model(config, vocab_size, world.device)
        model.to = lambda device: model  # fake tensors cannot be moved
        run = train.set_up(changed(config, compile=False), world, model)
        run.optimizer.compile = config.compile
        run.scaler = torch.amp.GradScaler('cpu', enabled=False)  # it would find numbers that are not finite
        yield run


def memory(config, vocab_size, gpus=1, per_node=8):
    """The peak of a training step on one GPU, a dict: bytes of its `peak`, the `moment` of the step when it is reached,
    the `terms` that it consists of; bytes of `parameters` and of the `optimizer`'s state."""
    rows = config.hessian_batch_size // gpus
    # Every micro-batch after the first finds the same gradients, so one stands for all. Where the estimate ends within
    # the first one, that finds none, and the others compute their loss in larger parts.
    two, accumulates = 0 < rows <= config.batch_size, config.gradient_accumulation_steps > 1
    with fake_run(config, vocab_size, gpus, per_node) as run:
        if run.hessian.hessian_products:
            rows = rows_at_once(run.raw_model.config, rows, config.block_size, min(rows, config.batch_size))
            run.hessian.batch_size = rows * gpus
        estimate_first(run)
        with Tracker(run) as tracker, Inside():
            make_state(run)
            if two or not accumulates:
                run.world.zero_grad(run.optimizer)
            tracker.start()
            take_step(run, 0, 2 if two and accumulates else 1)
            if two and not accumulates:
                take_step(run, 1, 1)
        found = dict(tracker.peak(), **held(run))
    if on_cuda(config) and run.world.sharded:
        size = DTYPES[config.dtype].itemsize
        block = max(sum(p.numel() for p in block.parameters()) for block in run.raw_model.transformer.h) * size
        found['terms']['block on its way'] = block
        found['peak'] += block
    return found


def make_state(run):
    """Gives the parameters gradients, and the optimizer the state that it has after its first step."""
    for p in run.params:
        p.grad = torch.zeros_like(p)
    if hasattr(run.optimizer, 'update_hessian'):
        run.optimizer.update_hessian([torch.zeros_like(p) for p in sophia.parameters(run.optimizer)])
    run.optimizer.step()


def held(run):
    """Bytes on this rank of the parameters, and of the optimizer's state."""
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    return {name: sum(t.nbytes for t in sophia.local([t for t in tensors if isinstance(t, torch.Tensor)]))
            for name, tensors in (('parameters', run.params), ('optimizer', states))}


def largest_micro_batch(config, vocab_size, gpus, per_node, limit, peak):
    """(batch_size, peak bytes) of the largest micro-batch that divides the mini-batch and stays below `limit`, or None.
    `peak`: bytes with the configured micro-batch."""
    share, found = config.total_batch_size // gpus, (config.batch_size, peak)
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    middle = sizes.index(config.batch_size)
    low, high = (middle + 1, len(sizes)) if peak <= limit else (0, middle)
    found = found if peak <= limit else None
    while low < high:
        middle = (low + high) // 2
        tried = changed(config, batch_size=sizes[middle], gradient_accumulation_steps=share // sizes[middle])
        peak = memory(tried, vocab_size, gpus, per_node)['peak']
        if peak <= limit:
            low, found = middle + 1, (sizes[middle], peak)
        else:
            high = middle
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Time


def flops(config, vocab_size):
    """FLOPs of a step on average, all GPUs together: `gradient`, `hessian`, and `recomputation` of checkpointed
    blocks."""
    def of_step(checkpointing):
        one = changed(config, parallel='ddp', activation_checkpointing=checkpointing, gradient_accumulation_steps=1,
                      batch_size=1, hessian_batch_size=1)
        found = []
        # Attention by its matmuls: the counter does not know the CPU's fused operator.
        with fake_run(one, vocab_size) as run, sdpa_kernel(SDPBackend.MATH):
            estimate_first(run)
            for iter_num in (0, 1):
                with FlopCounterMode(display=False) as counter, Inside():
                    take_step(run, iter_num)
                found.append(counter.get_total_flops())
        estimate, plain = found
        return plain * config.total_batch_size, (estimate - plain) * config.hessian_batch_size * estimates(config)

    gradient, hessian = of_step(False)
    again = sum(of_step(True)) - gradient - hessian if config.activation_checkpointing else 0
    return dict(gradient=gradient, hessian=hessian, recomputation=again)


def traffic(config, vocab_size, gpus, per_node):
    """[(what, bytes that each GPU sends in a step on average, 'nvlink' or 'network')].

    Collectives as rings: an all-reduce of S bytes over n GPUs sends 2·S·(n−1)/n from each, a gather or scatter half of
    it. A ring through several nodes leaves each of them with those bytes once for all of its GPUs' rings together.
    """
    if gpus == 1:
        return []
    model = make_model(config, vocab_size, 'meta')
    P, blocks = model.num_params(), sum(p.numel() for p in model.transformer.h.parameters())
    e, nodes, due = DTYPES[config.dtype].itemsize, math.ceil(gpus / per_node), estimates(config)
    link = 'network' if nodes > 1 else 'nvlink'
    if config.parallel == 'ddp':
        return [('all-reduce of gradients', 2 * (gpus - 1) / gpus * 4 * P, link),
                ('all-reduce of estimates', 2 * (gpus - 1) / gpus * 4 * P * due, link)]
    hybrid = config.parallel == 'hsdp'
    shards = min(gpus, per_node) if hybrid else gpus
    forwards = config.gradient_accumulation_steps
    more = math.ceil(config.hessian_batch_size / gpus / config.batch_size)
    backwards = forwards + more * due
    part, link = (shards - 1) / shards, 'nvlink' if hybrid else link
    found = [('all-gather of parameters', part * e * (P * forwards + blocks * backwards), link),
             ('reduce-scatter of gradients', part * 4 * P * backwards, link)]
    if hybrid and nodes > 1:
        # All GPUs of a node at once, each for its shard: once in a step, but for steps with an estimate.
        times = 1 + (forwards + more - 1) * due
        found.append(('all-reduce between nodes', 2 * (nodes - 1) / nodes * 4 * P * times, 'network'))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def plan(config, gpus, per_node, gpu, peak_flops, mfu):
    """Everything about the settings `config` on `gpus` of `gpu` (a `GPU`), as plain containers."""
    vocab_size, limit, options = vocabulary(config), (1 - HEADROOM) * gpu.memory, []
    products = optimizers.row(config.optimizer_name).hook.hessian_products
    kinds = [config.parallel] if gpus == 1 or products else ['ddp', 'fsdp'] + ['hsdp'] * (gpus > per_node)
    work = {checkpointing: flops(changed(config, activation_checkpointing=checkpointing), vocab_size)
            for checkpointing in ((False,) if products else (False, True))}
    for parallel in kinds:
        for checkpointing in work:
            here = changed(config, parallel=parallel, activation_checkpointing=checkpointing)
            show_progress(f'{config.out_dir}: {parallel}{", checkpointing" * checkpointing}')
            needed = memory(here, vocab_size, gpus, per_node)
            largest = largest_micro_batch(here, vocab_size, gpus, per_node, limit, needed['peak'])
            seconds = sum(work[checkpointing].values()) / (gpus * peak_flops * mfu)
            sent = traffic(here, vocab_size, gpus, per_node)
            waiting = sum(size / getattr(gpu, link) for _, size, link in sent)
            days = seconds * config.max_iters / 86400
            options.append(dict(
                parallel=parallel, activation_checkpointing=checkpointing, batch_size=config.batch_size,
                chosen=(parallel, checkpointing) == (config.parallel, config.activation_checkpointing),
                peak_bytes=needed['peak'], peak_moment=needed['moment'], peak_terms=needed['terms'],
                parameter_bytes=needed['parameters'], optimizer_bytes=needed['optimizer'],
                fits=needed['peak'] <= limit,
                largest_batch_size=largest and largest[0], largest_peak_bytes=largest and largest[1],
                seconds_per_step=seconds, days=days, gpu_hours=24 * days * gpus,
                sent_bytes={what: size for what, size, _ in sent}, communication_seconds=waiting,
                communication_share=waiting / seconds))
    show_progress('')
    P = make_model(config, vocab_size, 'meta').num_params()
    whole = options[0]
    return dict(
        out_dir=config.out_dir, model_size=config.model_size, optimizer_name=config.optimizer_name,
        parameters=P, gpus=gpus, gpu_memory_bytes=gpu.memory, limit_bytes=limit,
        total_batch_size=config.total_batch_size, block_size=config.block_size, max_iters=config.max_iters,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        state_bytes=dict(parameters=4 * P, gradients=4 * P,
                         optimizer=round(whole['optimizer_bytes'] / whole['parameter_bytes'] * 4 * P)),
        flops_per_step=work[config.activation_checkpointing], mfu=mfu, options=options)


def show(entry, gpu_name, per_node):
    """Prints a plan."""
    gpus, states, work = entry['gpus'], entry['state_bytes'], entry['flops_per_step']
    total = sum(work.values())
    print(f'{entry["out_dir"]}: {entry["parameters"]:,} parameters, {entry["optimizer_name"]}, {gpus} × {gpu_name} in '
          f'nodes of {min(gpus, per_node)}')
    print(f'  states: parameters {gb(states["parameters"])} + gradients {gb(states["gradients"])} + optimizer '
          f'{gb(states["optimizer"])} = {gb(sum(states.values()))} GB, float32')
    print(f'  step: {entry["total_batch_size"]} × {entry["block_size"]} tokens, {total / 1e12:,.0f} TFLOPs, of these '
          f'Hessian {work["hessian"] / total:.1%}; {entry["max_iters"]:,} steps; MFU {entry["mfu"]:g} assumed')
    print(f'  memory: {gpu_name} has {gb(entry["gpu_memory_bytes"])} GB, of which {1 - HEADROOM:.0%} are counted on')
    rows = []
    for option in entry['options']:
        row = {'parallel': option['parallel'] + (' *' if option['chosen'] else ''),
               'checkpointing': 'yes' if option['activation_checkpointing'] else 'no',
               'batch_size': str(option['batch_size']), 'peak GB': gb(option['peak_bytes']),
               'at': option['peak_moment'], 'fits': 'yes' if option['fits'] else 'no',
               'largest batch_size': str(option['largest_batch_size'] or '–'),
               's/step': f'{option["seconds_per_step"]:.2f}',
               'days': f'{option["days"]:.1f}', 'GPU-hours': f'{option["gpu_hours"]:,.0f}',
               'GB sent/step': gb(sum(option['sent_bytes'].values())),
               'share of step': f'{option["communication_share"]:.1%}'}
        rows.append(row)
    print_table(rows)
    chosen = next((option for option in entry['options'] if option['chosen']), None)
    if chosen:
        print('  * at its peak: ' + ', '.join(f'{term} {gb(size)}' for term, size in chosen['peak_terms'].items()))
        for what, size in chosen['sent_bytes'].items():
            print(f'  * {what}: {gb(size)} GB per GPU and step')


def gb(size):
    """Bytes as GB, for people."""
    return f'{size / 1e9:,.1f}' if size >= 1e8 else f'{size / 1e9:.2g}'


# ----------------------------------------------------------------------------------------------------------------------
# A real step


class Meter:
    """Bytes that tensors take from the allocator of `device` from now on."""

    def __init__(self, device):
        self.device = device
        gc.collect()  # what is freed from now on was allocated from now on
        if device.type == 'cuda':
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self.profile.start()

    def forget_peak(self):
        """The peak is that of what follows."""
        if self.device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with torch.profiler.record_function('forget_peak'):
                pass

    def peak(self):
        """The most bytes at any time since `forget_peak`; ends the measurement."""
        if self.device.type == 'cuda':
            return torch.cuda.max_memory_allocated(self.device) - self.before
        self.profile.stop()
        total = highest = 0
        for event in sorted(self.profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == '[memory]':
                total += event.nbytes()
                highest = max(highest, total)
            elif event.name() == 'forget_peak':
                highest = total
        return highest


def measure(config, vocab_size):
    """What three real steps allocate on this rank's device, a dict of bytes: the peak, parameters and optimizer
    (state). The last of the steps estimates the Hessian, if any does."""
    world = World(config.device, config.backend, config.parallel)
    meter = Meter(world.device)
    run = train.set_up(config, world, make_model(config, vocab_size, world.device))
    meter.forget_peak()
    run.hessian.is_due = lambda iter_num, interval: iter_num != 1
    for iter_num in range(3):
        take_step(run, iter_num)
    peak = world.gather(torch.tensor([float(meter.peak())], dtype=torch.float64, device=world.device)).max()
    world.close()
    return dict(peak=int(peak), **held(run))


def compare(config):
    """Prints the estimate beside what real steps allocate; with torchrun, on its ranks."""
    vocab_size, (rank, _, ranks) = vocabulary(config), ranks_from_environment()
    measured = measure(config, vocab_size)
    if rank == 0:
        planned = memory(config, vocab_size, ranks, int(os.environ.get('LOCAL_WORLD_SIZE', 1)))
        print_table([{'GB': key, 'planned': f'{planned[key] / 1e9:.4f}', 'measured': f'{size / 1e9:.4f}',
                      'difference': f'{planned[key] / size - 1:+.1%}' if size else '–'}
                     for key, size in measured.items()])


# ----------------------------------------------------------------------------------------------------------------------


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('configs', nargs='*', metavar='CONFIG', help='config files, one plan each')
    parser.add_argument('--gpus', type=int, default=8, help='GPUs altogether (default: 8)')
    parser.add_argument('--gpu', choices=GPUS, default='h100', help='their kind (default: h100)')
    parser.add_argument('--gpus_per_node', type=int, default=8, help='GPUs that NVLink connects (default: 8)')
    parser.add_argument('--bandwidth', type=float, metavar='GB/s',
                        help='that a GPU sends to others of its node (default: NVLink by the data sheet)')
    parser.add_argument('--network', type=float, metavar='GB/s',
                        help='that a node sends to others (default: the adapters of a DGX)')
    parser.add_argument('--mfu', type=float, default=0.4, help='share of the peak that the FLOPs reach (default: 0.4)')
    parser.add_argument('--output', type=Path, metavar='FILE.json', help='also write everything as JSON')
    parser.add_argument('--measure', action='store_true',
                        help='instead, take three steps on this device (torchrun: devices) and compare their memory')
    args, flags = parser.parse_known_args(argv)
    for flag in flags:
        if not flag.startswith('--') or '=' not in flag:
            parser.error(f'{flag}: flags for train.py are written --key=value')
    for key in ('gpus', 'gpus_per_node', 'mfu'):
        if getattr(args, key) <= 0:
            parser.error(f'--{key} must be above 0')
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        parser.error(f'--gpus={args.gpus} is not a multiple of --gpus_per_node={args.gpus_per_node}')
    if args.output:
        writable(args.output)
    return args, flags


def main(argv=None):
    args, flags = parse(argv)
    flags = ['--device=cuda', *flags]  # the plan is for GPUs, whatever this machine has
    sources = [[name] for name in args.configs] or [[]]
    if args.measure:
        for source in sources:
            config = train.resolve([*source, *flags])
            if on_cuda(config) and not torch.cuda.is_available():
                raise SystemExit('--measure needs a CUDA device, and torch finds none; use --device=cpu')
            compare(config)
        return
    gpu = GPUS[args.gpu]
    gpu = GPU(gpu.memory, args.bandwidth * 1e9 if args.bandwidth else gpu.nvlink,
              args.network * 1e9 if args.network else gpu.network)
    peak_flops = PEAK_FLOPS[args.gpu.upper()]
    plans = []
    for source in sources:
        with environment(args.gpus, args.gpus_per_node):
            config = train.resolve([*source, *flags])
        plans.append(plan(config, args.gpus, args.gpus_per_node, gpu, peak_flops, args.mfu))
        if len(plans) > 1:
            print()
        show(plans[-1], args.gpu.upper(), args.gpus_per_node)
        if torch.__version__ < '2.13' and config.dtype == 'float32':
            print('  note: before PyTorch 2.13 the plan of FSDP in float32 may be twice what it takes')
    if args.output:
        write_json(args.output, dict(gpu=args.gpu, gpus_per_node=args.gpus_per_node, peak_flops=peak_flops,
                                     nvlink=gpu.nvlink, network=gpu.network, plans=plans))


if __name__ == '__main__':
    main()
