"""Sophia on models other than GPTs: a convolutional classifier and a squared-loss regressor, on generated data.

    python examples/sophia_anywhere.py [--steps=300] [--estimator=gnb]

Needs PyTorch and sophia.py, installed or in the same folder.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett, hutchinson


def stripes(n, size=12):
    """Return noisy images (n, 1, size, size) of stripes in one of 8 directions, and the directions (n,)."""
    labels = torch.randint(8, (n,))
    angle = labels[:, None, None] * torch.pi / 8
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing='ij')
    phase = 2 * torch.pi * torch.rand(n, 1, 1)
    images = torch.sin(x * angle.cos() + y * angle.sin() + phase) + 1.5 * torch.randn(n, size, size)
    return images[:, None], labels


def surface(n):
    """Return points (n, 2) in a square, and the noisy height (n, 1) of a wavy surface there."""
    x = 4 * torch.rand(n, 2) - 2
    return x, torch.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(n, 1)


def normal(f):
    """Return the normal distribution with mean f and variance ½: −log p(y) = (f − y)², up to a constant."""
    return torch.distributions.Normal(f, 0.5 ** 0.5)


def train(model, batch, loss_fn, distribution, steps, estimator):
    """Train `model` with Sophia; return its loss on 1,000 new examples.

    `loss_fn`: negative log-likelihood of `distribution`, up to a constant.
    """
    gamma = 0.05 if estimator == 'gnb' else 0.01
    # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps.
    groups = [dict(params=[p for p in model.parameters() if p.dim() > 1]),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]  # norms and biases
    optimizer = Sophia(groups, lr=3e-3, betas=(0.96, 0.9), gamma=gamma, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        x, y = batch(64)
        outputs = model(x)
        loss = loss_fn(outputs, y)
        due = step % 10 == 0
        loss.backward(retain_graph=due)
        if due and estimator == 'gnb':
            optimizer.update_hessian(gauss_newton_bartlett(outputs, optimizer, distribution))
        elif due:
            optimizer.update_hessian(hutchinson(loss, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 50 == 0 or step == steps - 1:
            print(f'  step {step}: loss {loss.item():.4f}, {optimizer.unclipped_fraction().item():.0%} not clipped')
    x, y = batch(1000)
    with torch.no_grad():
        return loss_fn(model(x), y).item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--estimator', choices=['gnb', 'hutchinson'], default='gnb')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    print('classifier, cross-entropy (8 classes: 2.08 at the start)')
    classifier = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
                               nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(64, 8))
    print(f'  new images: {train(classifier, stripes, F.cross_entropy, None, args.steps, args.estimator):.4f}')
    print('regressor, mean squared error (0.01 of it is noise)')
    regressor = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    print(f'  new points: {train(regressor, surface, F.mse_loss, normal, args.steps, args.estimator):.4f}')


if __name__ == '__main__':
    main()
