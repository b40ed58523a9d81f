"""The loss of a language model, in plain PyTorch: the training loss, and the loss on labels drawn from the model.

To train on another loss, edit `token_loss`. Training and both Hessian estimators follow it; the logged val/loss stays
the plain cross-entropy, so that runs with different training losses can be compared.
"""

import torch
from torch.nn import functional as F


def token_loss(logits, targets):
    """The training loss of each prediction: logits (..., V), targets (...) → (...), 0 where the target is -1."""
    return cross_entropy(logits, targets)


def mean_loss(logits, targets):
    """The mean of `token_loss` over the targets that count: logits (B, T, V), targets (B, T) → 0-d."""
    return token_loss(logits, targets).sum() / (targets >= 0).sum()


def cross_entropy(logits, targets):
    """−log softmax(logits)[target] in float32: logits (..., V), targets (...) → (...), 0 where the target is -1.

    Compiled, it keeps the logits in their own dtype for the backward pass, and nothing of their shape in float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction='none')
    return losses.view_as(targets)


@torch.no_grad()
def sample_labels(logits, uniforms):
    """Labels ŷ ~ softmax(logits) by inverting the cumulative distribution (Algorithm 2, line 3).

    Args:
        logits: (n, ..., V).
        uniforms: (n, ...), one uniform number in [0, 1) per label, so that the caller decides what labels depend on.

    Returns:
        (n, ...) int64.
    """
    # A few sequences at a time, because probabilities and their sums are in float32.
    return torch.cat([invert(*part) for part in zip(logits.split(4), uniforms.split(4))])


def invert(logits, uniforms):
    """The labels at which the cumulative softmax of `logits` (..., V) first exceeds `uniforms` (...)."""
    cumulative = logits.softmax(-1, dtype=torch.float32).cumsum_(-1)
    t = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, t, right=True).squeeze(-1).clamp(max=logits.size(-1) - 1)
