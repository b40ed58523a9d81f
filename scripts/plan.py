"""Compute the memory, FLOPs, hours and GPU-hours of a run before anything is trained.

  python scripts/plan.py --gpu 4090                                      which sizes fit one RTX 4090
  python scripts/plan.py config/train_gpt2_small_sophiag.py --gpus 8     on eight H100
  python scripts/plan.py config/train_neox_{1.5b,6.6b}_sophiag.py --gpu A100 --gpus 64 --mfu 0.3

Takes train.py's arguments: config files, one plan each, and --key=value flags for all of them; by default, plans the
published configs for Sophia-G. A missing data set is assumed to have GPT-2's ids. GB are 1e9 bytes. Communication is
not counted; activation checkpointing adds up to a third to the time. Memory is a formula for compiled steps of
model.py's GPT; dev/bench.py measures it.
"""

import copy
import functools
import itertools
import sys
from dataclasses import astuple
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from data.loader import first_dir, read_meta
from hessian import product_size, rows_at_once
from model import GPT, GPTConfig
from optimizers import hessian_flops_per_token, row
from runtime import device as devices
from runtime import gpt
from runtime.arguments import argument_parser, at_least
from runtime.files import one_line_errors

HEADROOM = 0.1  # share of a GPU's memory for the CUDA context, workspaces of cuBLAS and NCCL, and fragmentation
# Bytes per token and unit of width that a block saves in 16 bits: inputs (4) and outputs (2) of both layer norms, q, k,
# v and attention's result (2 each), the MLP's hidden units before and after GELU (8 each).
BLOCK = 36
OUTSIDE = 12  # the same for the last norm and the residual stream's gradients; fitted to the peaks in records/gpu
LOGIT = 2  # bytes per logit in a compiled backward pass, where the gradient overwrites the logits
KEPT_LOGIT = 4  # the same if a second backward pass needs the logits
EAGER_LOGIT = 12  # the same under FSDP, which compiles blocks only: float32 log-probabilities and two gradients
# Float32 numbers per parameter in the optimizer's state
STATES = dict.fromkeys(('lion', 'signum', 'normalize'), 1) | dict.fromkeys(
    ('adamw', 'muon', 'adahessian', 'sophiag', 'sophiah', 'ef_clip', 'ah_clip', 'gnb_noclip', 'sophiag_fresh'), 2)


def memory(c, shape, ranks=1):
    """Compute the peak memory of a step on one of `ranks` GPUs, {part: bytes}. c: settings; shape: the GPTConfig.

    The peak is in the head's backward pass after the first micro-batch, with all activations and gradients.
    """
    half = devices.DTYPES[c.dtype].itemsize
    P, blocks, matrices, _ = counts(*astuple(shape))
    block, root, sharded = blocks // shape.n_layer, P - blocks, ranks if c.parallel != 'ddp' else 1
    numbers = STATES.get(c.optimizer_name, 2) * P
    if c.optimizer_name == 'muon':
        numbers -= matrices  # they only have a momentum
    parts = {'parameters': 4 * P / sharded, 'gradients': 4 * P / sharded, 'optimizer': 4 * numbers / sharded}
    if c.parallel != 'ddp':  # the root group stays gathered, with two blocks
        parts['gathered weights'] = half * (root + 2 * block) + 4 * max(root, block)
    elif half == 2:
        parts['16-bit weights'] = 2 * P

    residual = 2 if c.parallel != 'ddp' else 4  # FSDP's residual stream is in 16 bits, too
    saved = BLOCK - 2 * (4 - residual)
    kept = saved + residual * shape.n_layer if c.activation_checkpointing else saved * shape.n_layer
    parts['activations'] = c.batch_size * c.block_size * shape.n_embd * (kept + OUTSIDE) * half / 2
    entries = c.batch_size * c.block_size * shape.vocab_size
    logits = entries * half / 2
    hook, rows = row(c.optimizer_name).hook, c.hessian_batch_size // ranks
    compiled = (KEPT_LOGIT if hook.samples_labels else LOGIT) * logits
    parts['logits'] = compiled if c.parallel == 'ddp' else EAGER_LOGIT * entries

    if hook.hessian_products:  # after the backward pass: vector, product, sum and tangent have the model's size
        lean = c.compile and c.dtype == 'bfloat16'
        rows = rows_at_once(shape, rows, c.block_size, min(rows, c.batch_size), lean)
        kept = 11 * rows * product_size(shape, c.block_size, lean)
        parts['Hessian-vector product'] = max(0, kept + 16 * P - parts['activations'] - parts['logits'])
    elif hook.cost:  # the gradients of a second loss of the same logits are added up in `estimate`
        gradients = parts['estimate'] = 4 * P / sharded
        # Two moments may be the peak: when its logits have a gradient, and when all parameters have one.
        if c.parallel == 'ddp':
            padded = 2 * logits if c.hessian_parts < 2 and rows % c.batch_size else 0  # zeros for other sequences
            parts['while estimating'] = max(padded, gradients - 2 * logits)
        else:
            log_probabilities = 4 * entries * min(1, rows / c.batch_size)
            parts['while estimating'] = log_probabilities + max(0, gradients - 8 * entries)
    return parts


@functools.cache
def counts(*shape):
    """Count the parameters of a GPT, its blocks and their matrices, and its FLOPs per token, by GPTConfig's fields."""
    with torch.device('meta'):
        model = GPT(GPTConfig(*shape))
    blocks = list(model.transformer.h.parameters())
    return (gpt.num_params(model), sum(p.numel() for p in blocks), sum(p.numel() for p in blocks if p.dim() == 2),
            gpt.flops_per_token(model))


def largest_micro_batch(c, shape, ranks, limit):
    """Return the largest batch_size that divides a rank's sequences and needs at most `limit` bytes; 0 if none."""
    share = c.total_batch_size // ranks
    return max([n for n in range(1, share + 1) if share % n == 0
                and sum(memory(changed(c, batch_size=n), shape, ranks).values()) <= limit], default=0)


def changed(c, **values):
    """Copy the settings with other values."""
    c = copy.copy(c)
    vars(c).update(values)
    return c


def number(x):
    """Format a positive number: 1,561.2, 4.2 or 0.0042."""
    return f'{x:,.1f}' if x >= 10 else f'{x:.2g}'


def plan(c, shape, args):
    """Print the plan of the settings `c`."""
    optimizer, limit, tokens = row(c.optimizer_name), args.limit, c.total_batch_size * c.block_size
    parameters, *_, per_token = counts(*astuple(shape))
    hessian = tokens * hessian_flops_per_token(c.values, per_token)
    flops = tokens * per_token + hessian
    seconds = flops / (args.gpus * args.flops * args.mfu)
    hours = seconds * c.max_iters / 3600
    print(f'{c.out_dir}: {c.optimizer_name}, {parameters:,} parameters, {shape.vocab_size:,} ids, '
          f'{number(flops / 1e12)} TFLOPs a step, {hessian / flops:.1%} of them for the Hessian\n  {number(seconds)} s '
          f'a step; {c.max_iters:,} steps take {number(hours)} hours, {number(hours * args.gpus)} GPU-hours')
    if c.optimizer_name not in STATES:
        print(f'  note: {c.optimizer_name} is counted with two numbers per parameter, as AdamW')
    print(f'  memory, computed, of {limit / 1e9:.0f} GB ({1 - HEADROOM:.0%} of {args.memory_gb:g}):')
    shards = ['fsdp'] if args.gpus > 1 and optimizer.shards else []
    lean = [False] if optimizer.hook.hessian_products else [False, True]
    for parallel, checkpointing in itertools.product(['ddp', *shards], lean):  # the fastest first
        here = changed(c, parallel=parallel, activation_checkpointing=checkpointing)
        parts, largest = memory(here, shape, args.gpus), largest_micro_batch(here, shape, args.gpus, limit)
        peak, chosen = sum(parts.values()), here.values == c.values
        print(f'  {"*" if chosen else " "} {parallel:4} {"checkpointing" * checkpointing:13}  '
              f'batch_size={c.batch_size}: {peak / 1e9:6.1f} GB{" (too much)" if peak > limit else ""}; largest: '
              f'{largest or "none"}')
        if chosen:
            print('      ' + ', '.join(f'{part} {size / 1e9:.1f}' for part, size in parts.items() if size))


@one_line_errors()
def main(argv=None):
    cards = ', '.join(filter(devices.GPUS.get, devices.GPUS))
    parser = argument_parser(__doc__, allow_abbrev=False)
    parser.add_argument('configs', nargs='*', metavar='CONFIG', help='config files, one plan each')
    parser.add_argument('--gpu', metavar='NAME', help=f'{cards}, or the last word of a name (default: H100)')
    parser.add_argument('--gpus', type=at_least(1), help='number of GPUs (default: 1 with --gpu, else 8)')
    parser.add_argument('--mfu', type=at_least(0.01, float, at_most=1), default=0.4,
                        help='share of the peak FLOP/s that training reaches (default: %(default)s)')
    args, flags = parser.parse_known_args(argv)
    card = devices.gpu_named(args.gpu or 'H100')
    if not devices.GPUS.get(card):
        raise SystemExit(f'--gpu={args.gpu}: not in GPUS of runtime/device.py; add it there, or pass one of {cards}')
    args.flops, args.memory_gb = devices.GPUS[card]
    args.gpus = args.gpus or (1 if args.gpu else 8)
    args.limit = (1 - HEADROOM) * args.memory_gb * 1e9
    print(f'{args.gpus} × {card}, {args.memory_gb} GB and {args.flops / 1e12:g} TFLOP/s each; MFU {args.mfu:g}')
    published = sorted((Path(__file__).parents[1] / 'config').glob('train_*_sophiag.py'))
    configs = [[str(config)] for config in args.configs or ([] if flags else published)]
    for words in configs or [[]]:
        c = train.resolve(['--device=cuda', *flags, *words], world_size=args.gpus)  # this machine may have none
        plan(c, gpt.config_of(GPTConfig, c.values, read_meta(first_dir(c.dataset))['vocab_size']), args)


if __name__ == '__main__':
    main()
