"""The paper's three algorithms, and two baselines, in plain NumPy: what the tests compare the fast versions with.

Each is written from the paper, line by line, for arrays of any shape; nothing of the repository is imported.
"""

import numpy as np


def hutchinson_in_numpy(hessian, u):
    """Algorithm 1 of a loss with this Hessian (n, n): ĥ = u ⊙ (∇²L u), u ~ N(0, I) of shape (n,)."""
    return u * (hessian @ u)


def gauss_newton_bartlett_in_numpy(x, W, labels):
    """Algorithm 2 of a linear classifier: B·ĝ⊙ĝ, ĝ the gradient in W of the mean cross-entropy with labels ŷ.

    Args:
        x: (B, C). W: (C, V), logits are x·W. labels: (B,), ŷ ~ softmax(x·W).
    """
    B, p = len(x), np.exp(x @ W)
    p /= p.sum(-1, keepdims=True)
    g = x.T @ (p - np.eye(W.shape[1])[labels]) / B
    return B * g * g


def sophia_in_numpy(theta, gradients, estimates, lr, beta1, beta2, gamma, eps, weight_decay, rho, squared):
    """Algorithm 3, and the ablations' variants: θ, m, h after the last of the `gradients`. `estimates` holds one ĥ for
    each gradient, None where the iteration makes none."""
    theta, m, h = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    for g, h_hat in zip(gradients, estimates):
        m = beta1 * m + (1 - beta1) * g
        if h_hat is not None:
            h = beta2 * h + (1 - beta2) * (h_hat ** 2 if squared else h_hat)
        theta = theta - lr * weight_decay * theta
        ratio = m / np.maximum(gamma * (np.sqrt(h) if squared else h), eps)
        theta = theta - lr * np.clip(ratio, -rho, rho)
    return theta, m, h


def normalize_in_numpy(theta, gradients, lr, beta1, weight_decay, eps):
    """The ablation Normalize: steps of the momentum divided by its root mean square."""
    m = np.zeros_like(theta)
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        theta = theta - lr * weight_decay * theta - lr * m / max(np.sqrt(np.mean(m ** 2)), eps)
    return theta, m


def lion_in_numpy(theta, gradients, _, lr, beta1, beta2, weight_decay):
    """Lion (Chen et al., 2023)."""
    m = np.zeros_like(theta)
    for g in gradients:
        step = np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        theta = theta - lr * weight_decay * theta - lr * step
    return theta, m


def adahessian_in_numpy(theta, gradients, estimates, lr, beta1, beta2, weight_decay, eps):
    """AdaHessian (Yao et al., 2021) with decoupled weight decay, estimates whenever there are any."""
    m, v, estimated = np.zeros_like(theta), np.zeros_like(theta), 0
    for t, (g, h_hat) in enumerate(zip(gradients, estimates), start=1):
        m = beta1 * m + (1 - beta1) * g
        if h_hat is not None:
            v, estimated = beta2 * v + (1 - beta2) * h_hat ** 2, estimated + 1
        m_hat, v_hat = m / (1 - beta1 ** t), v / (1 - beta2 ** estimated)
        theta = theta - lr * weight_decay * theta - lr * m_hat / (np.sqrt(v_hat) + eps)
    return theta, m
