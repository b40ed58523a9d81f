"""The paper's three algorithms and the baselines in plain PyTorch: the references of the tests.

Each is written from its paper, line by line, for tensors of any shape; nothing of the repository is imported.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def double_precision():
    """Every test of a file that imports this computes in float64, with torch seeded."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def uniform(low, high):
    """A random number between these."""
    return low + (high - low) * torch.rand(()).item()


def flat(tensors):
    """All entries as one vector."""
    return torch.cat([t.detach().flatten() for t in tensors])


def hutchinson(hessian, u):
    """Algorithm 1 of a loss with this Hessian (n, n): ĥ = u ⊙ (∇²L u), u ~ N(0, I) of shape (n,)."""
    return u * (hessian @ u)


def gauss_newton_bartlett(x, W, labels):
    """Algorithm 2 of a linear classifier: B·ĝ⊙ĝ, ĝ the gradient in W of the mean cross-entropy with labels ŷ.

    Args:
        x: (B, C). W: (C, V), logits are x·W. labels: (B,), ŷ ~ softmax(x·W).
    """
    p = torch.exp(x @ W)
    p = p / p.sum(-1, keepdim=True)
    g = x.T @ (p - torch.eye(W.size(1))[labels]) / len(x)
    return len(x) * g * g


def sophia(theta, gradients, estimates, lr, beta1, beta2, gamma, eps, weight_decay, rho=1.0, squared=False):
    """Algorithm 3 and the ablations' variants: the last θ, m, h. `estimates` has None where an iteration makes none."""
    theta, m, h = theta.clone(), torch.zeros_like(theta), torch.zeros_like(theta)
    for g, h_hat in zip(gradients, estimates):
        m = beta1 * m + (1 - beta1) * g
        if h_hat is not None:
            h = beta2 * h + (1 - beta2) * (h_hat ** 2 if squared else h_hat)
        theta = theta - lr * weight_decay * theta
        ratio = m / (gamma * (h.sqrt() if squared else h)).clamp(min=eps)
        theta = theta - lr * ratio.clamp(-rho, rho)
    return theta, m, h


def normalize(theta, gradients, _, lr, beta1, weight_decay, eps):
    """The ablation Normalize: steps of the momentum divided by its root mean square."""
    m = torch.zeros_like(theta)
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        theta = theta - lr * weight_decay * theta - lr * m / max((m ** 2).mean() ** 0.5, eps)
    return theta, m


def lion(theta, gradients, _, lr, beta1, beta2, weight_decay):
    """Lion (Chen et al., 2023)."""
    m = torch.zeros_like(theta)
    for g in gradients:
        step = torch.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        theta = theta - lr * weight_decay * theta - lr * step
    return theta, m


def adahessian(theta, gradients, estimates, lr, beta1, beta2, weight_decay, eps):
    """AdaHessian (Yao et al., 2021) with decoupled weight decay, estimates whenever there are any."""
    m, v, estimated = torch.zeros_like(theta), torch.zeros_like(theta), 0
    for t, (g, h_hat) in enumerate(zip(gradients, estimates), start=1):
        m = beta1 * m + (1 - beta1) * g
        if h_hat is not None:
            v, estimated = beta2 * v + (1 - beta2) * h_hat ** 2, estimated + 1
        m_hat, v_hat = m / (1 - beta1 ** t), v / (1 - beta2 ** estimated)
        theta = theta - lr * weight_decay * theta - lr * m_hat / (v_hat.sqrt() + eps)
    return theta, m
