"""Sophia-G on a model sharded by FSDP2 (`fully_shard`): m, h and the estimate are sharded like the parameters.

    torchrun --standalone --nproc_per_node=2 examples/fsdp2.py [--steps=60]

Runs on GPUs with NCCL or on CPU with gloo. Sophia-H's Hessian-vector products do not work with FSDP.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=60)
    args = parser.parse_args(argv)
    device = f'cuda:{os.environ["LOCAL_RANK"]}' if torch.cuda.is_available() else 'cpu'
    if device != 'cpu':
        torch.cuda.set_device(device)
    dist.init_process_group('gloo' if device == 'cpu' else 'nccl')
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 8)).to(device)
    teacher = torch.randn(16, 8).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps. γ was chosen to
    # leave 0.1 to 0.5 of the coordinates unclipped. The optimizer must be built after `fully_shard`.
    groups = [dict(params=[p for p in model.parameters() if p.dim() > 1]),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]  # norms and biases
    optimizer = Sophia(groups, lr=5e-3, betas=(0.96, 0.9), gamma=0.5, weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())  # ranks draw different sequences and labels
    for step in range(args.steps):
        inputs = torch.randn(32, 16, device=device)
        logits = model(inputs)
        loss = F.cross_entropy(logits, (inputs @ teacher).argmax(1))
        due = step % 10 == 0  # k = 10
        loss.backward(retain_graph=due)
        if due:
            optimizer.update_hessian(gauss_newton_bartlett(logits, optimizer))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:  # every rank takes part, because both calls are collective
            mean, unclipped = loss.detach() / dist.get_world_size(), optimizer.unclipped_fraction()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f'step {step}: loss {mean.item():.4f}, {unclipped.item():.0%} not clipped')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
