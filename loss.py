"""The loss of a language model, in plain PyTorch: the training loss, and the loss on labels drawn from the model.
To train on another loss, edit `token_loss`; training and Sophia-G call the rest.

Training and Sophia-H's estimator follow `token_loss`. Sophia-G's estimator always uses the cross-entropy on labels
drawn from the model, over the positions that count. The logged val/loss stays the plain cross-entropy, so that runs
with different training losses are comparable.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 128  # labels per block in `invert`


def token_loss(logits, targets):
    """Return the loss of each prediction: logits (..., V), targets (...) → (...). Negative targets do not count."""
    return cross_entropy(logits, targets)


def mean_loss(logits, targets):
    """Average `token_loss` over the targets that count, 0 if none does: logits (B, T, V), targets (B, T) → 0-d."""
    counts = targets >= 0
    return torch.where(counts, token_loss(logits, targets), 0).sum() / counts.sum().clamp(min=1)


class Losses(nn.Module):
    """The module that training calls: a model with nanoGPT's forward, (idx, targets) → (logits, mean loss).

    For Gauss-Newton-Bartlett it adds the loss on a second set of labels for the first n sequences.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, targets, uniforms=None, labels_hat=None):
        """Return (logits, loss) or, with a second set of labels, (logits, loss, loss_hat, predictions).

        Args:
            idx: (B, T) token ids.
            targets: (B, T) token ids, negative where a position does not count.
            uniforms: (n, T) uniform numbers in [0, 1), n ≤ B, for drawing labels from softmax(logits).
            labels_hat: (n, T) token ids to use as labels instead, negative where a position does not count.

        loss_hat is the negative log-likelihood of the second labels, *summed* over the `predictions` positions that
        count in them and, after the model's forward, in `targets`. With gradients enabled the logits are None, because
        compiled code would write a gradient of zeros for them.
        """
        logits, loss = self.model(idx, targets)
        if uniforms is not None:
            labels_hat = sample_labels(logits[:len(uniforms)], uniforms)
        if labels_hat is None:
            return None if torch.is_grad_enabled() else logits, loss
        n = len(labels_hat)
        counts = (targets[:n] >= 0) & (labels_hat >= 0)
        loss_hat = cross_entropy(logits[:n], torch.where(counts, labels_hat, -1)).sum()
        return None, loss, loss_hat, counts.sum()


def cross_entropy(logits, targets):
    """Return −log softmax(logits)[target] in float32: logits (..., V), targets (...) → (...), 0 for negative ones.

    Compiled code keeps the logits in their own dtype for the backward pass, and no float32 tensor of their size.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = targets.flatten().clamp(min=-1)  # maps the usual -100 to -1
    losses = F.cross_entropy(logits.flatten(0, -2), labels, ignore_index=-1, reduction='none')
    return losses.view_as(targets)


@torch.no_grad()
def sample_labels(logits, uniforms):
    """Draw labels ŷ ~ softmax(logits) by inverting the cumulative distribution (Algorithm 2, line 4).

    logits: (n, ..., V); uniforms: (n, ...), in [0, 1), one per label. Returns (n, ...) int64.
    """
    # Process a few sequences at a time, because without torch.compile the float32 probabilities take much memory.
    return torch.cat([invert(*part) for part in zip(logits.split(4), uniforms.split(4))])


def invert(logits, uniforms):
    """Return the labels at which the cumulative softmax of `logits` (..., V) first exceeds `uniforms` (...).

    It first finds a block of labels by the blocks' sums, then the label in the block. So compiled code reads the logits
    twice and writes no tensor of their size.
    """
    blocks = F.pad(logits, (0, -logits.size(-1) % BLOCK), value=-math.inf).unflatten(-1, (-1, BLOCK))
    largest = logits.amax(-1, keepdim=True).float()
    sums = (blocks.float() - largest.unsqueeze(-1)).exp().sum(-1)
    block, rest = first_above(sums, uniforms.unsqueeze(-1) * sums.sum(-1, keepdim=True))
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, BLOCK)).squeeze(-2)
    label, _ = first_above((inside.float() - largest).exp(), rest)
    return (BLOCK * block + label).squeeze(-1).clamp(max=logits.size(-1) - 1)  # NaN logits may select padding


def first_above(weights, t):
    """Return the first index at which the cumulative sum of `weights` (..., n) exceeds t (..., 1), and t minus the sum
    before that index."""
    cumulative = weights.cumsum(-1)
    t = t.minimum(cumulative[..., -1:] * (1 - 2 ** -23))  # rounding may make t as large as the last sum
    index = torch.searchsorted(cumulative, t, right=True).clamp(max=weights.size(-1) - 1)
    return index, t - F.pad(cumulative, (1, 0)).gather(-1, index)
