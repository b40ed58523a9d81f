"""Memory, FLOPs, days and GPU-hours of a run, computed before anything is trained.

  python scripts/plan.py config/train_gpt2_small_sophiag.py --gpus 8
  python scripts/plan.py config/train_neox_{1.5b,6.6b}_sophiag.py --gpus 64 --memory_gb 40 --tflops 312 --mfu 0.3
  python scripts/plan.py --model_size=125M --batch_size=30 --gpus 1 --measure

Settings are train.py's: config files, one plan each, and --key=value flags for all of them. GB are 1e9 bytes.

The time of a step assumes that the FLOPs of matmuls and Hessian estimates (analysis/runs.py) run at --mfu of the GPUs'
peak. Activation checkpointing adds up to a third; communication is not counted.

Memory is a formula (`memory`) for compiled steps of the GPT in model.py; uncompiled steps need more for the logits. For
an edited model, loss or optimizer use --measure, which takes two real steps on this machine.
"""

import argparse
import copy
import functools
import sys
from dataclasses import astuple
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.arguments import at_least
from analysis.runs import training_and_hessian_flops
from data.loader import vocab_size_of
from hessian import rows_at_once
from model import GPT, GPTConfig
from optimizers import row
from runtime import device as devices
from runtime.distributed import World, ranks_from_environment

HEADROOM = 0.1  # of a GPU's memory: the CUDA context, workspaces of cuBLAS and NCCL, fragmentation
# Saved activations of a block in 16 bits, bytes per token and unit of width: inputs of both layer norms (4 each) and
# their outputs (2), q, k, v and attention's result (2), the MLP's hidden units before and after GELU (8).
BLOCK = 36
OUTSIDE = 12  # the same for the last norm and the residual stream's gradients; chosen to fit the peaks in records/gpu
LOGIT = 4  # bytes per logit in the backward pass: the logits (2), their gradient (2)
STATES = dict(lion=1, clip=1, normalize=1)  # float32 numbers per parameter in the optimizer's state; others take 2


def memory(c, shape, ranks=1):
    """Peak memory of a training step on one of `ranks` GPUs, as {part: bytes}.

    The peak is in the backward pass of the head of a micro-batch after the first: all activations and all gradients.

    Args:
        c: settings, as train.resolve returns them.
        shape: the GPTConfig.
    """
    half = devices.DTYPES[c.dtype].itemsize
    P, blocks, matrices = number_of_parameters(*astuple(shape))
    block, root, sharded = blocks // shape.n_layer, P - blocks, ranks if c.parallel != 'ddp' else 1
    numbers = STATES.get(c.optimizer_name, 2) * P
    if c.optimizer_name == 'muon':
        numbers -= matrices  # only their momentum
    parts = {'parameters': 4 * P / sharded, 'gradients': 4 * P / sharded, 'optimizer': 4 * numbers / sharded}
    if c.parallel != 'ddp':  # the root group stays gathered, and two blocks are on their way
        parts['gathered weights'] = half * (root + 2 * block) + 4 * max(root, block)
    elif half == 2:
        parts['16-bit weights'] = 2 * P

    residual = 2 if c.parallel != 'ddp' else 4  # FSDP's residual stream is in 16 bits, too
    saved = BLOCK - 2 * (4 - residual)
    kept = saved + residual * shape.n_layer if c.activation_checkpointing else saved * shape.n_layer
    parts['activations'] = c.batch_size * c.block_size * shape.n_embd * (kept + OUTSIDE) * half / 2
    logits = c.batch_size * c.block_size * shape.vocab_size * half / 2
    parts['logits'] = LOGIT * logits

    hook, rows = row(c.optimizer_name).hook, c.hessian_batch_size // ranks
    if hook.hessian_products:  # after the backward pass; vector, product, sum and a tangent are as large as the model
        rows = rows_at_once(shape, rows, c.block_size, min(rows, c.batch_size))
        kept = rows * c.block_size * (shape.n_layer * shape.n_head * c.block_size + 4 * shape.vocab_size)
        parts['Hessian-vector product'] = max(0, 10 * kept + 16 * P - parts['activations'] - parts['logits'])
    elif hook.cost:
        parts['estimate'] = 4 * P / sharded
        # Two moments of the estimate have no gradient of the logits. Sampling labels: softmax and its cumulative sum of
        # 4 sequences, in float32. The end of its backward pass: its gradients, before they are added up.
        sampled = 8 * logits * min(4, rows, c.batch_size) / c.batch_size
        parts['while estimating'] = max(0, max(sampled, 4 * P / sharded) - (LOGIT - 2) * logits)
    return parts


@functools.cache
def number_of_parameters(*shape):
    """Numbers of parameters: of a GPT, of its blocks, and of the blocks' matrices. `shape`: the fields of GPTConfig."""
    model = GPT.without_values(GPTConfig(*shape))
    blocks = list(model.transformer.h.parameters())
    return model.num_params(), sum(p.numel() for p in blocks), sum(p.numel() for p in blocks if p.dim() == 2)


def largest_micro_batch(c, shape, ranks, limit):
    """The largest batch_size that divides a rank's sequences and stays below `limit` bytes; 0 if none does."""
    share = c.total_batch_size // ranks
    return max([n for n in range(1, share + 1) if share % n == 0
                and sum(memory(changed(c, batch_size=n), shape, ranks).values()) <= limit], default=0)


def changed(c, **values):
    """A copy of the settings `c` with other values."""
    c = copy.copy(c)
    c.values = {**c.values, **values}
    return c


def plan(c, shape, args):
    """Prints the plan of the settings `c`."""
    model, optimizer = GPT.without_values(shape), row(c.optimizer_name)
    gradient, hessian = training_and_hessian_flops(c.values, dict(flops_per_token=model.flops_per_token()))
    seconds = (gradient + hessian) / (args.gpus * args.tflops * 1e12 * args.mfu)
    hours, limit = seconds * c.max_iters / 3600, (1 - HEADROOM) * args.memory_gb * 1e9
    print(f'{c.out_dir}: {c.optimizer_name}, {model.num_params():,} parameters, {(gradient + hessian) / 1e12:,.0f} '
          f'TFLOPs a step, {hessian / (gradient + hessian):.1%} of them for the Hessian')
    print(f'  {args.gpus} × {args.tflops:g} TFLOP/s at an MFU of {args.mfu:g}: {seconds:.2f} s a step; {c.max_iters:,} '
          f'steps take {hours / 24:.1f} days, {hours * args.gpus:,.1f} GPU-hours')
    if optimizer.library and c.optimizer_name != 'muon':
        print(f'  note: the state of {c.optimizer_name} is counted as AdamW\'s, two numbers per parameter, and may be '
              'much larger: use --measure')
    print(f'  memory, computed, of {limit / 1e9:.0f} GB ({1 - HEADROOM:.0%} of {args.memory_gb:g}):')
    modes, switches = ['ddp'], [False]
    if not optimizer.hook.hessian_products:
        switches.append(True)
        if args.gpus > 1 and optimizer.shards:
            modes.append('fsdp')
    for parallel in modes:
        for checkpointing in switches:
            here = changed(c, parallel=parallel, activation_checkpointing=checkpointing)
            parts = memory(here, shape, args.gpus)
            peak, largest = sum(parts.values()), largest_micro_batch(here, shape, args.gpus, limit)
            chosen = (parallel, checkpointing) == (c.parallel, c.activation_checkpointing)
            too_much = ' (too much)' if peak > limit else ''
            print(f'  {"*" if chosen else " "} {parallel:4} {"checkpointing" if checkpointing else "":13}  batch_size='
                  f'{c.batch_size}: {peak / 1e9:6.1f} GB{too_much}; largest: {largest or "none"}')
            if chosen:
                print('      ' + ', '.join(f'{part} {size / 1e9:.1f}' for part, size in parts.items() if size))


def measure(c, shape):
    """Bytes at the peak of two real steps on random tokens, the first of them with a Hessian estimate: allocated on a
    GPU, else resident in this process."""
    world = World(c.device, c.backend, c.parallel)
    torch.manual_seed(c.seed)
    with world.device:
        model = GPT(shape)
    run = train.set_up(c, world, model)
    sequences = c.total_batch_size // world.size, c.block_size + 1
    for iteration in (0, 1):
        train.train_step(run, torch.randint(shape.vocab_size, sequences, device=world.device), iteration)
    peak = devices.peak_memory(world.device)
    world.close()
    return peak


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('configs', nargs='*', metavar='CONFIG', help='config files, one plan each')
    parser.add_argument('--gpus', type=at_least(1), default=8, help='GPUs in all (default: 8)')
    parser.add_argument('--memory_gb', type=at_least(1, float), default=80,
                        help='memory of each (default: 80, an H100)')
    parser.add_argument('--tflops', type=at_least(1, float), default=devices.PEAK_FLOPS['H100'] / 1e12,
                        help='dense 16-bit peak of each (default: 989, an H100; an A100 has 312)')
    parser.add_argument('--mfu', type=at_least(0.01, float), default=0.4,
                        help='share of the peak that the FLOPs reach (default: 0.4)')
    parser.add_argument('--measure', action='store_true', help='also take two real steps on this device; under '
                        'torchrun, on its devices')
    args, flags = parser.parse_known_args(argv)
    rank = 0
    if args.measure:
        rank, _, args.gpus = ranks_from_environment()
    else:
        flags = ['--device=cuda', *flags]  # the plan is for GPUs, whatever this machine has
    for source in [[name] for name in args.configs] or [[]]:
        c = train.resolve([*source, *flags], world_size=args.gpus)
        shape = GPTConfig.from_settings(c.values, vocab_size_of(c.dataset))
        if rank == 0:
            plan(c, shape, args)
        if args.measure:
            peak = measure(c, shape)
            print(f'  rank {rank}: {peak / 1e9:.2f} GB measured on {c.device}')


if __name__ == '__main__':
    main()
