"""What a run will need: memory, whether it fits, FLOPs, days, and what the ranks send each other. Nothing is trained.

  python scripts/plan.py config/train_neox_6.6b_sophiag.py --gpus 64 --gpu h100
  python scripts/plan.py config/train_neox_1.5b_{adamw,sophiag}.py --gpus 8 --gpu a100 --mfu 0.3 --batch_size=8
  python scripts/plan.py config/train_gpt2_small_sophiag.py --gpus 1 --gpu h200 --measure

Settings are train.py's: config files, one plan each, and --key=value flags for all of them. GB are 1e9 bytes.

Memory is the peak of a training step on one GPU: parameters, gradients, optimizer state, what autograd saves and the
buffers around it, at the moment of the step where they are most, of steps with a Hessian estimate where there are any.
It follows from model.py, sophia.py and optimizers.py as they run eagerly, and tests/test_plan.py holds it against what
real steps allocate on CPU, shards included. (Compiled, four small cases took 102 to 108 % of it there.) Where CUDA
differs the figure is CUDA's, read off PyTorch's dispatch and sources, and not measured yet: layer norms of 16-bit
inputs save a float32 copy of them (on CPU none); Sophia's and Lion's updates copy larger parts than fit a cache; of
shards one more block is on its way. A compiled loss copies logits to float32 to draw labels only. Not counted: the CUDA
context, workspaces of cuBLAS and NCCL, fragmentation (HEADROOM is left for them), masks of dropout.

A step takes its FLOPs (by Chowdhery et al., as train.py's mfu counts them, and the Hessian's and those of
recomputation) at --mfu of all GPUs' peak. Communication is bytes over bandwidth, nothing of it hidden behind
computation: its share of the step is an upper bound of what it costs.
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator
import loss as ops
import optimizers
from model import GPT, GPTConfig, padded_vocab_size
from runtime.device import PEAK_FLOPS
from runtime.distributed import World, ranks_from_environment
from scripts.runs import flops_per_iteration, print_table, writable, write_json
from sophia import Sophia

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


@contextlib.contextmanager
def ranks_pretended(gpus, per_node):
    """The environment of rank 0 of `gpus`, as torchrun would set it: train.py's settings depend on it."""
    before = dict(os.environ)
    os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE=str(gpus), LOCAL_WORLD_SIZE=str(min(gpus, per_node)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def vocabulary(values):
    """Padded vocabulary of a run. Without its data it is 50,304: the tokenizers of GPT-2 and GPT-NeoX-20B have 50,257
    and 50,277 ids."""
    meta = Path('data') / values['dataset'] / 'meta.json'
    return padded_vocab_size(json.loads(meta.read_text())['vocab_size'] if meta.is_file() else 50257)


def shape_of(values, vocab_size):
    """The GPTConfig of a run."""
    keys = ('block_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'scale_attn_by_inverse_layer_idx')
    return GPTConfig(vocab_size=vocab_size, **{key: values[key] for key in keys})


def meta_model(values, vocab_size):
    """The run's GPT without memory, made once: a plan asks for it for every way to spread it and every micro-batch."""
    return _meta_model(*astuple(shape_of(values, vocab_size)))


@functools.lru_cache(maxsize=8)
def _meta_model(*shape):
    with torch.device('meta'):
        return GPT(GPTConfig(*shape))


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def states_of(values):
    """(float32 numbers of optimizer state per parameter, float32 copies of the parameters that an update makes, copies
    that it makes of a part of them after the other), from the optimizer itself."""
    p = torch.nn.Parameter(torch.zeros(8))
    p.grad = torch.zeros(8)
    optimizer = optimizers.build_optimizer(values['optimizer_name'], [p], lr=1e-3)
    if values['optimizer_name'] in optimizers.HOOKS:
        optimizer.update_hessian([torch.zeros(8)])
    optimizer.step()
    on_cuda = values['device'].startswith('cuda')
    states = sum(s.numel() for s in optimizer.state[p].values() if isinstance(s, torch.Tensor) and s.shape == p.shape)
    if isinstance(optimizer, Sophia):
        normalize = optimizer.param_groups[0]['clipping'] == 'normalize'
        return states / 8, 1 * normalize, 2 * (on_cuda and not normalize)
    in_parts = 3 if isinstance(optimizer, optimizers.AdaHessian) else isinstance(optimizer, optimizers.Lion) * on_cuda
    return states / 8, 0, in_parts


# Bytes of one Hessian-vector product (forward-over-reverse, attention by the math path) without the head's, fitted to
# 17 shapes on CPU, all of which it meets within 4 %: per layer, for each entry of the T × T attention matrices and each
# channel of a token; once, for the same; and per parameter of the blocks.
HUTCHINSON = {4: dict(layer_squares=8.7, layer_channels=121, squares=27.2, channels=99, parameters=8),
              2: dict(layer_squares=7.9, layer_channels=81.5, squares=31.3, channels=50.5, parameters=12.15)}


def memory(values, vocab_size, gpus=1, per_node=8):
    """{moment of a step: {term: bytes on one GPU}}; the peak is that of the moment with the largest sum.

    Bytes per token of a micro-batch and channel (NC) are counted operation by operation; `e` is the size of a number
    that matrix products take, `r` of one in the residual stream.
    """
    model = meta_model(values, vocab_size)
    c, (B, T) = model.config, (values['batch_size'], values['block_size'])
    N, NC = B * T, B * T * c.n_embd
    P, block = model.num_params(), sum(p.numel() for p in model.transformer.h[0].parameters())
    root, wte = P - c.n_layer * block, c.vocab_size * c.n_embd
    shards = {'ddp': 1, 'fsdp': gpus, 'hsdp': min(gpus, per_node)}[values['parallel']]
    on_cuda, low = values['device'].startswith('cuda'), values['dtype'] != 'float32'
    sharded = values['parallel'] != 'ddp'
    e = 2 if low else 4
    r = 2 if low and sharded else 4

    # Saved by a block: the inputs of norms (layer norms on CUDA want float32), of c_attn, q, k, v, of c_proj, of c_fc,
    # of GELU, of c_proj; statistics of norms and of the softmax. A checkpointed block saves its input.
    norm = 4 if low and on_cuda else r
    block_saved = (2 * norm + 14 * e) * NC + (16 + 4 * c.n_head) * N
    checkpointed = values['activation_checkpointing']
    entered = r * NC if checkpointed else block_saved
    blocks = c.n_layer * entered
    # The block that is computed again; its first norm's input is what was saved of it, unless that is a copy.
    inside = block_saved - r * NC * (norm == r) if checkpointed else 0
    # Backward through a block: gradients of the residual stream, and of c_proj's output and input with its weights';
    # or, where the graph is kept, of attention's output, q, k, v, and these put together.
    working = (r + e + 4 * e if low else 20) * NC + e * 4 * c.n_embd ** 2
    working_kept = (r + 7 * e) * NC
    # ops.head_loss computes ROWS logits at a time; compiled their softmax, else in float32 their log-probabilities
    # (16-bit ones it copies first); and the product that adds to the head's gradient. It saves its input, that
    # gradient, and the one of the input.
    head, head_weight = (norm + 2 * e) * NC + 8 * N, 4 * wte

    def losing(rows):
        beside = e if values['compile'] else 8 if low else 4
        logits = min(rows, ops.ROWS) * c.vocab_size
        computing = max((e + beside) * logits, e * (logits + wte))
        return head_weight + e * NC + 2 * wte * (low and not sharded) + computing

    scaled = e * wte * (low and sharded) + (4 + e * low) * NC

    states, step_copies, step_largest = states_of(values)
    resident = {'parameters': 4 * P / shards, 'optimizer state': 4 * states * P / shards}
    gradients = 4 * P / shards
    matrices = 12 * c.n_embd ** 2
    if sharded:
        # Gathered weights: embeddings and head for the whole step, blocks as they are needed, the next one ahead, which
        # on CUDA is still being copied. Their gradients pass by whole, and once more in float32 to be summed up; these
        # stay until those of the next block are.
        ahead, summing = e * block * on_cuda, 4 * block
        at_loss = after_forward = e * root
        at_backward = e * (root + block)
        at_last, at_first = e * (root + 2 * block), e * (root + block)
        waiting, passing, passing_block = e * wte, (e + 4) * root, (e + 4) * block
    else:
        # 16-bit copies that autocast makes of matrices: kept until it ends, and by the graph, which has none of what
        # checkpoints will compute again. The head's gradient waits for the look-up's to be added.
        ahead = summing = 0
        at_loss = 2 * c.n_layer * matrices * low
        after_forward = at_backward = 0 if checkpointed else at_loss
        at_first = 2 * matrices * low
        at_last = at_first if checkpointed else at_loss
        waiting, passing, passing_block = 4 * wte, 0, 0

    accumulation = values['gradient_accumulation_steps']
    twice = optimizers.differentiates_twice(values['optimizer_name'])
    gauss_newton = values['optimizer_name'] in optimizers.HOOKS and not twice
    estimating_micro_batches = math.ceil(values['hessian_batch_size'] / gpus / B) if gauss_newton else 0
    accumulated = gradients if gauss_newton else 0
    in_buckets = gpus > 1 and not sharded  # DDP's stay
    found = {}

    def moment(name, held=0, kept=0, copies=0, lost=0, buffers=0, accumulated=accumulated):
        terms = dict(resident, gradients=held, estimate=accumulated, copies=copies, activations=kept, loss=lost,
                     buffers=buffers)
        found[name] = {term: size for term, size in terms.items() if size}

    held = gradients if accumulation > 1 or in_buckets else 0
    again = waiting if held or sharded else 0
    # Of the first block the gradients of attention and c_fc are still to come, then those of the positions.
    to_come = 4 * (8 * c.n_embd ** 2 + T * c.n_embd) / shards
    moment('loss', held, blocks + head, at_loss, losing(N),
           accumulated=accumulated if estimating_micro_batches < accumulation else 0)
    moment('after the forward pass', held, blocks + head, after_forward, head_weight)
    moment('backward: loss', held, blocks + head, at_backward, head_weight + scaled)
    moment('backward: last block', held, blocks + inside, at_last, buffers=working + waiting + ahead)
    moment('backward: first block', held or gradients - to_come, entered + inside, at_first,
           buffers=again + working + summing + ahead)
    moment('backward: embeddings', gradients, 0, e * root * sharded, buffers=again + passing)
    if sharded:
        moment('backward: last block but one', held, blocks - entered + inside, at_last,
               buffers=working + waiting + summing + ahead)
        moment('backward: gradients of the last block', held, blocks - entered, at_last,
               buffers=r * NC + waiting + passing_block + ahead)
    if gauss_newton:
        held = gradients if estimating_micro_batches > 1 or in_buckets else 0
        # The second loss has gradients of its own, and its rows are computed by themselves.
        sampled = min(B, math.ceil(values['hessian_batch_size'] / gpus)) * T
        both = head_weight + 4 * wte + e * sampled * c.n_embd
        kept_copies = at_last if sharded else after_forward + at_first * checkpointed
        moment('loss, sampled labels', held, blocks + head, at_loss,
               both - head_weight + losing(max(sampled, N - sampled)))
        moment('estimate: loss', held, blocks + head, at_backward, both + scaled + 8 * sampled * c.n_embd)
        # The graph is kept for the gradient. Parameters' gradients are handed over together, and only then added to
        # those before; shards of them are added as they come.
        handed = 0 if sharded else gradients
        moment('estimate: first block', held, blocks + head + inside, kept_copies, head_weight,
               max(0, handed - to_come) + working_kept + waiting * sharded + summing + ahead)
        moment('estimate: embeddings', held, blocks + head, after_forward, head_weight, handed + passing)
        if sharded:
            moment('estimate: gradients of the first block', held, blocks + head, kept_copies, head_weight,
                   r * NC + waiting + passing_block + ahead)
    elif twice:
        rows = optimizers.rows_at_once(c, math.ceil(values['hessian_batch_size'] / gpus), T, B)
        NC, squares = NC / B * rows, rows * c.n_head * T * T
        a = HUTCHINSON[e]
        kept = c.n_layer * (a['layer_squares'] * squares + a['layer_channels'] * NC)
        # ops.head_hvp: the logits and their derivative, and the softmax of both; uncompiled, three of these in float32.
        logits = min(rows * T, ops.ROWS // 2) * c.vocab_size
        computing = max((4 * e if values['compile'] else 2 * e + 12 + e * low) * logits, 4 * e * logits + 2 * e * wte)
        weights = 4 * (P - wte) * low + (4 + 2 * e * low) * wte
        moment('estimate: head', gradients, kept, weights, computing, 6 * e * NC, 8 * P)
        moment('estimate: blocks', gradients, kept, a['parameters'] * (P - wte) + 4 * wte, 0,
               a['squares'] * squares + a['channels'] * NC, 8 * P)
    part = min(P, wte + 2 ** 26) / shards
    moment('update', gradients, buffers=4 * (step_copies * P / shards + step_largest * part), accumulated=0)
    return found


def peak(moments):
    """(name, bytes) of the moment that needs the most."""
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return name, sum(moments[name].values())


def largest_micro_batch(values, vocab_size, gpus, per_node, limit):
    """(batch_size, bytes) of the largest micro-batch that divides the mini-batch and stays below `limit`, or None."""
    share = values['total_batch_size'] // gpus
    for size in sorted((n for n in range(1, share + 1) if share % n == 0), reverse=True):
        tried = dict(values, batch_size=size, gradient_accumulation_steps=share // size)
        needed = peak(memory(tried, vocab_size, gpus, per_node))[1]
        if needed <= limit:
            return size, needed
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Time


def flops(values, vocab_size):
    """FLOPs of a step on average, all GPUs together: `gradient`, `hessian`, and `recomputation` of checkpointed blocks.

    The first two are those of scripts/paper/compute_table.py, the convention of train.py's mfu.
    """
    model = meta_model(values, vocab_size)
    gradient, hessian = flops_per_iteration(values, model.num_params())
    head = 6 * model.config.n_embd * vocab_size
    blocks = 1 - head / model.flops_per_token()
    # A forward pass is a third of forward and backward, and half of the backward that Gauss-Newton-Bartlett adds.
    again = (gradient / 3 + hessian / 2) * blocks if values['activation_checkpointing'] else 0.0
    return dict(gradient=gradient, hessian=hessian, recomputation=again)


def traffic(values, vocab_size, gpus, per_node):
    """[(what, bytes that each GPU sends in a step on average, 'nvlink' or 'network')].

    Collectives as rings: an all-reduce of S bytes over n GPUs sends 2·S·(n−1)/n from each, a gather or scatter half of
    it. A ring through several nodes leaves each of them with those bytes once for all of its GPUs' rings together.
    """
    if gpus == 1:
        return []
    model = meta_model(values, vocab_size)
    P, blocks = model.num_params(), sum(p.numel() for p in model.transformer.h.parameters())
    e = 4 if values['dtype'] == 'float32' else 2
    nodes = math.ceil(gpus / per_node)
    link, interval = 'network' if nodes > 1 else 'nvlink', values['hessian_interval']
    if values['parallel'] == 'ddp':
        estimates = 1 / interval if interval else 0
        return [('all-reduce of gradients', 2 * (gpus - 1) / gpus * 4 * P, link),
                ('all-reduce of estimates', 2 * (gpus - 1) / gpus * 4 * P * estimates, link)]
    hybrid = values['parallel'] == 'hsdp'
    shards = min(gpus, per_node) if hybrid else gpus
    forwards = values['gradient_accumulation_steps']
    estimates = math.ceil(values['hessian_batch_size'] / gpus / values['batch_size']) if interval else 0
    backwards = forwards + (estimates / interval if interval else 0)
    part, link = (shards - 1) / shards, 'nvlink' if hybrid else link
    found = [('all-gather of parameters', part * e * (P * forwards + blocks * backwards), link),
             ('reduce-scatter of gradients', part * 4 * P * backwards, link)]
    if hybrid and nodes > 1:
        # All GPUs of a node at once, each for its shard: once in a step, but for steps with an estimate.
        times = 1 + (forwards + estimates - 1) / interval if interval else 1
        found.append(('all-reduce between nodes', 2 * (nodes - 1) / nodes * 4 * P * times, 'network'))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def plan(values, gpus, per_node, gpu, peak_flops, mfu):
    """Everything about the settings `values` on `gpus` of `gpu` (a `GPU`), as plain containers."""
    vocab_size = vocabulary(values)
    model, limit = meta_model(values, vocab_size), (1 - HEADROOM) * gpu.memory
    options = []
    twice = optimizers.differentiates_twice(values['optimizer_name'])
    kinds = [values['parallel']] if gpus == 1 or twice else ['ddp', 'fsdp'] + ['hsdp'] * (gpus > per_node)
    for parallel in kinds:
        for checkpointing in (False,) if twice else (False, True):
            values_here = dict(values, parallel=parallel, activation_checkpointing=checkpointing)
            moments = memory(values_here, vocab_size, gpus, per_node)
            moment, needed = peak(moments)
            work = sum(flops(values_here, vocab_size).values())
            seconds = work / (gpus * peak_flops * mfu)
            largest = largest_micro_batch(values_here, vocab_size, gpus, per_node, limit)
            sent = traffic(values_here, vocab_size, gpus, per_node)
            waiting = sum(size / getattr(gpu, link) for _, size, link in sent)
            options.append(dict(
                parallel=parallel, activation_checkpointing=checkpointing, batch_size=values['batch_size'],
                chosen=(parallel, checkpointing) == (values['parallel'], values['activation_checkpointing']),
                peak_bytes=needed, peak_moment=moment, moments=moments, fits=needed <= limit,
                largest_batch_size=largest and largest[0], largest_peak_bytes=largest and largest[1],
                seconds_per_step=seconds, days=seconds * values['max_iters'] / 86400,
                sent_bytes={what: size for what, size, _ in sent}, communication_seconds=waiting,
                communication_share=waiting / seconds))
    states = states_of(values)[0]
    P = model.num_params()
    return dict(
        out_dir=values['out_dir'], model_size=values['model_size'], optimizer_name=values['optimizer_name'],
        parameters=P, gpus=gpus, gpu_memory_bytes=gpu.memory, limit_bytes=limit,
        total_batch_size=values['total_batch_size'], block_size=values['block_size'], max_iters=values['max_iters'],
        gradient_accumulation_steps=values['gradient_accumulation_steps'],
        state_bytes=dict(parameters=4 * P, gradients=4 * P, optimizer=4 * states * P),
        flops_per_step=flops(values, vocab_size), mfu=mfu, options=options)


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
               'days': f'{option["days"]:.1f}', 'GB sent/step': gb(sum(option['sent_bytes'].values())),
               'share of step': f'{option["communication_share"]:.1%}'}
        rows.append(row)
    print_table(rows)
    chosen = next((option for option in entry['options'] if option['chosen']), None)
    if chosen:
        terms = chosen['moments'][chosen['peak_moment']]
        print('  * at its peak: ' + ', '.join(f'{term} {gb(size)}' for term, size in terms.items()))
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
        self.device, self.marked = device, {}
        gc.collect()  # what is freed from now on was allocated from now on
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self.profile.start()

    def mark(self, name):
        """Remembers what is allocated at this point."""
        if self.device.type == 'cuda':
            self.marked[name] = torch.cuda.memory_allocated(self.device) - self.before
        else:
            with torch.profiler.record_function(f'mark {name}'):
                pass

    def read(self):
        """(peak, {mark: bytes})."""
        if self.device.type == 'cuda':
            return torch.cuda.max_memory_allocated(self.device) - self.before, self.marked
        self.profile.stop()
        total = highest = 0
        for event in sorted(self.profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == '[memory]':
                total += event.nbytes()
                highest = max(highest, total)
            elif event.name().startswith('mark '):
                self.marked[event.name()[5:]] = total
        return highest, self.marked


def measure(values, vocab_size):
    """`steps_measured` without the ways that are for CPU alone, whose memory is another."""
    before, ops.FOR_CPU = ops.FOR_CPU, False
    try:
        return steps_measured(values, vocab_size)
    finally:
        ops.FOR_CPU = before


def steps_measured(values, vocab_size):
    """What three real steps allocate on this rank's device, built and run as train.py does: a dict of bytes.

    peak; parameters; optimizer (state); activations: what the forward pass of a micro-batch leaves for the backward.
    The last of the steps makes a Hessian estimate, where the optimizer has any.
    """
    world = World(values['device'], values['backend'], values['parallel'])
    meter = Meter(world.device)
    low = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[values['dtype']]
    autocast = torch.autocast(world.device.type, low) if low else contextlib.nullcontext()
    torch.manual_seed(values['seed'])
    with world.device:  # minutes for the largest on one CPU core
        raw_model = GPT(shape_of(values, vocab_size))
    model = world.wrap(raw_model, raw_model.transformer.h, values['compile'], values['activation_checkpointing'], low)
    params = list(raw_model.parameters())
    optimizer = optimizers.build_optimizer(values['optimizer_name'], raw_model.parameter_groups(0.1), lr=1e-4)
    hessian = optimizers.build_hessian_hook(
        values['optimizer_name'], raw_model, optimizer, interval=values['hessian_interval'],
        batch_size=values['hessian_batch_size'], seed=0, rank=world.rank, world_size=world.size, autocast=autocast,
        compile=values['compile'])
    steps, rows = values['gradient_accumulation_steps'], values['gradient_accumulation_steps'] * values['batch_size']
    for iter_num in (0, 1, values['hessian_interval'] or 2):
        due = hessian.start(iter_num)
        windows = torch.randint(vocab_size, (rows, values['block_size'] + 1), device=world.device)
        for micro_step, micro_batch in enumerate(windows.split(values['batch_size'])):
            with world.gradient_sync(model, micro_step == steps - 1, due):
                meter.mark(f'before {iter_num}')
                with autocast:
                    loss = hessian.loss(model, micro_batch[:, :-1], micro_batch[:, 1:]) / steps
                meter.mark(f'after {iter_num}')
                hessian.backward()
                loss.backward()
        optimizers.clip_gradients(optimizer, params, 1.0)
        hessian.finish(optimizer)
        optimizer.step()
        world.zero_grad(optimizer)
        del loss
    highest, marked = meter.read()
    parts = [p.to_local() if hasattr(p, 'to_local') else p for p in params]
    state = [s.to_local() if hasattr(s, 'to_local') else s for p in params for s in optimizer.state[p].values()
             if isinstance(s, torch.Tensor)]
    peaks = world.gather(torch.tensor([float(highest)], dtype=torch.float64, device=world.device))
    world.close()
    return dict(peak=int(peaks.max()), parameters=sum(p.nbytes for p in parts), optimizer=sum(s.nbytes for s in state),
                activations=marked['after 1'] - marked['before 1'])


def compare(values):
    """Prints the estimate beside what real steps allocate; with torchrun, on its ranks."""
    vocab_size, (rank, _, ranks) = vocabulary(values), ranks_from_environment()
    measured = measure(values, vocab_size)
    moments = memory(values, vocab_size, ranks, int(os.environ.get('LOCAL_WORLD_SIZE', 1)))
    held = moments['after the forward pass']
    planned = dict(
        peak=peak(moments)[1], parameters=held['parameters'], optimizer=held['optimizer state'],
        activations=sum(held.get(term, 0) for term in ('activations', 'loss', 'copies')))
    if rank == 0:
        print_table([{'GB': key, 'planned': f'{planned[key] / 1e9:.4f}', 'measured': f'{measured[key] / 1e9:.4f}',
                      'difference': f'{planned[key] / measured[key] - 1:+.1%}'} for key in planned])
    return planned, measured


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
            values = configurator.resolve([*source, *flags]).values
            if values['device'].startswith('cuda') and not torch.cuda.is_available():
                raise SystemExit('--measure needs a CUDA device, and torch finds none; use --device=cpu')
            compare(values)
        return
    gpu = GPUS[args.gpu]
    gpu = GPU(gpu.memory, args.bandwidth * 1e9 if args.bandwidth else gpu.nvlink,
              args.network * 1e9 if args.network else gpu.network)
    peak_flops = PEAK_FLOPS[args.gpu.upper()]
    plans = []
    for source in sources:
        with ranks_pretended(args.gpus, args.gpus_per_node):
            config = configurator.resolve([*source, *flags])
        plans.append(plan(config.values, args.gpus, args.gpus_per_node, gpu, peak_flops, args.mfu))
        if len(plans) > 1:
            print()
        show(plans[-1], args.gpu.upper(), args.gpus_per_node)
    if args.output:
        write_json(args.output, dict(gpu=args.gpu, gpus_per_node=args.gpus_per_node, peak_flops=peak_flops,
                                     nvlink=gpu.nvlink, network=gpu.network, plans=plans))


if __name__ == '__main__':
    main()
