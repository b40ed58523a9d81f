"""Sophia-G in a training loop of Hugging Face's Accelerate, with gradient accumulation and clipping. Needs accelerate.

    python examples/accelerate_loop.py
    torchrun --nproc_per_node=2 examples/accelerate_loop.py
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett


def main(steps=60):
    # Without a GPU, several ranks need cpu=True to find each other.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(x, (x @ torch.randn(16, 8)).argmax(1)), batch_size=32, shuffle=True)
    # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps. γ was chosen to
    # leave 0.1 to 0.5 of the coordinates unclipped.
    groups = [dict(params=[p for p in model.parameters() if p.dim() > 1]),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]  # norms and biases
    sophia = Sophia(groups, lr=5e-3, betas=(0.96, 0.9), gamma=0.5, weight_decay=0.1)
    # Accelerate's wrapper has no `update_hessian`, so call it on `sophia`, which is also `optimizer.optimizer`.
    model, optimizer, loader = accelerator.prepare(model, sophia, loader)
    torch.manual_seed(1 + accelerator.process_index)  # ranks sample different labels
    losses = []
    while len(losses) < steps:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                logits = model(inputs)
                loss = F.cross_entropy(logits, labels)
                # The estimate uses the step's last micro-batch.
                due = accelerator.sync_gradients and len(losses) % 10 == 0  # k = 10
                accelerator.backward(loss, retain_graph=due)
                if due:
                    sophia.update_hessian(gauss_newton_bartlett(logits, sophia))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(accelerator.reduce(loss.detach(), 'mean').item())
                optimizer.step()
                optimizer.zero_grad()
            if len(losses) == steps:
                break
    accelerator.print(f'loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.4f}; '
                      f'{sophia.unclipped_fraction().item():.0%} not clipped')
    return losses


if __name__ == '__main__':
    main()
