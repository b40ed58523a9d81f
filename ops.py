"""What the model computes with: linear layers, cross-entropy, labels drawn from the softmax; on CPU by faster ways.

PyTorch's matrix product on x86 is MKL's, which leaves AVX-512 unused on AMD processors. Its convolutions are oneDNN's,
which does not: a linear layer is a convolution with a 1×1 kernel over its tokens. There the head and its loss are one
operation, too. The plain ways remain for every other device and dtype, for autocast, and where more than the first
derivative is asked for; setting `ONEDNN` to False leaves no other.
"""

import functools
import weakref

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def on_cpu(x):
    """Whether the ways for CPU are for `x`."""
    return ONEDNN and x.device.type == 'cpu' and x.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')


def as_image(x):
    """(…, C) as one picture with a token for a pixel, (1, C, tokens, 1); a view of contiguous `x`."""
    return x.reshape(1, -1, 1, x.size(-1)).permute(0, 3, 1, 2)


def linear(x, weight, bias=None):
    """F.linear: (…, C), (M, C), (M,) → (…, M)."""
    if not on_cpu(x) or x.numel() <= 20480:  # up to there PyTorch's convolution is not oneDNN's
        return F.linear(x, weight, bias)
    # The dilation of a 1×1 kernel changes nothing, but has PyTorch choose oneDNN on a single thread, too.
    y = F.conv2d(as_image(x), weight[:, :, None, None], bias, dilation=2)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """nn.Linear, computed by `linear`."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


def cross_entropy(logits, labels, reduction):
    """Cross-entropy of (B, T, V) logits with (B, T) labels; label -1 does not count."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-1, reduction=reduction)


def sample_labels(logits, uniforms):
    """ŷ ~ softmax(logits) by inverting the cumulative distribution: (…, V) logits, (…) uniforms in [0, 1) → (…) int64.

    One uniform number per label, so that the caller decides what the labels depend on.
    """
    return draw(logits.float().softmax(-1), uniforms)


def draw(p, uniforms):
    """`sample_labels` of probabilities p (…, V).

    Two levels (blocks of 128 classes, then the class within its block) keep the cumulative sums short and accurate.
    """
    p = F.pad(p, (0, -p.size(-1) % 128)).unflatten(-1, (-1, 128))
    block, t = _invert(p.sum(-1), uniforms)
    p = p.gather(-2, block[..., None, None].expand(*block.shape, 1, 128)).squeeze(-2)
    return block * 128 + _first_above(p.cumsum(-1), t).squeeze(-1)


def _invert(p, uniforms):
    """Where the share `uniforms` (…) of the sum of p (…, n) lies: in which class, and how far above its lower end."""
    upper = p.cumsum(-1)
    t = uniforms.unsqueeze(-1) * upper[..., -1:]
    found = _first_above(upper, t)
    return found.squeeze(-1), t - (upper - p).gather(-1, found)


def _first_above(cumulative, t):
    # Held below the total, so that rounding never selects a class of probability 0 past the end.
    t = torch.minimum(t, cumulative[..., -1:] * (1 - 2 ** -22))
    return (cumulative <= t).sum(-1, keepdim=True)


# ----------------------------------------------------------------------------------------------------------------------
# The head and its loss on CPU in float32

CLASSES = 2048  # computed at a time: 8 MB for 1,024 tokens, which stay in the cache
ENTRIES = 2 ** 26  # of the softmax kept at a time (256 MiB)


@functools.lru_cache(maxsize=1)
def scratch(size):
    """Memory for `size` numbers, for one call only. What a process gets anew costs more than computing on it."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.float32, device='cpu')


KEPT = []  # memory of `lent` that no tensor uses


def lent(like):
    """An empty tensor like `like` whose memory goes on to the next call once the last tensor that uses it is gone.

    For gradients of the model's size, which an optimizer's zero_grad frees in every step. A tensor made from an array
    holds it for as long as any tensor uses its memory: what watches the array knows when nobody does.
    """
    i = next((i for i, memory in enumerate(KEPT) if memory.size == like.numel()), None)
    memory = torch.empty(like.numel(), dtype=torch.float32).numpy() if i is None else KEPT.pop(i)
    array = memory.view()
    weakref.finalize(array, KEPT.append, memory).atexit = False
    return torch.from_numpy(array).view_as(like)


def outer(p, x):
    """pᵀ·x: (N, M), (N, C) → (M, C)."""
    if x.numel() <= 20480:
        return p.t() @ x
    # torch.nn.grad.conv2d_weight, which copies an expanded number to have something of the kernel's shape.
    kernel = x.new_empty(p.size(1), x.size(1), 1, 1)
    return torch.ops.aten.convolution_backward(as_image(p), as_image(x), kernel, None, [1, 1], [0, 0], [2, 2], False,
                                               [0, 0], 1, [False, True, False])[1].flatten(1)


def exponentials(x, weight, shift):
    """exp(logit − shift) for every class and token, and its sum over the classes.

    Args: x (N, C), weight (V, C), shift (N,), a number near the token's largest logits.
    Returns: list of (CLASSES, N), one for each part of the classes, in memory that the next call overwrites; (N,).
    """
    memory, parts, total = scratch(ENTRIES), [], torch.zeros_like(shift)
    for part in weight.split(CLASSES):
        logits = linear(part, x, -shift)
        p, memory = memory[:logits.numel()].view_as(logits), memory[logits.numel():]
        total += torch.exp(logits, out=p).sum(0)
        parts.append(p)
        del logits  # its memory is the next part's
    return parts, total


def draw_in_parts(parts, uniforms):
    """`draw` from what `exponentials` returns."""
    in_part = torch.stack([p.sum(0) for p in parts], dim=1)
    found, above = _invert(in_part, uniforms)
    uniforms = above / in_part.gather(-1, found[:, None])
    labels = torch.empty_like(found)
    for i, p in enumerate(parts):
        rows = (found == i).nonzero().squeeze(-1)
        labels[rows] = i * CLASSES + draw(p[:, rows].t(), uniforms[rows, 0])
    return labels


@torch.library.custom_op('sophia::head_loss', mutates_args=())
def head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, labels_hat: torch.Tensor, gradients: bool,
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the logits x·weightᵀ with `targets`, that summed over `labels_hat`, and their gradients.

    The gradients of the logits, softmax minus one-hot, differ between the two in the one-hot alone: the second loss
    needs no product of its own, only rows of `weight` and `x`. Differentiable once.

    Args:
        x: (N, C). weight: (V, C). targets: (N,), -1 = not counted.
        labels_hat: (N,) labels, or uniform numbers to draw them with, negative = not counted; (0,) for none.
        gradients: whether to compute them.

    Returns:
        loss, loss_hat, and the gradients of loss to x and weight, of loss_hat to x and weight; empty if not asked for.
    """
    N, hat = len(x), labels_hat.numel() > 0
    w, w_hat = (targets >= 0).float(), (labels_hat >= 0).float()
    w /= w.sum()
    loss, loss_hat = x.new_zeros(()), x.new_zeros(())
    dx, dx_hat, dw_hat = (torch.zeros_like(t) if gradients and wanted else t.new_empty(0)
                          for t, wanted in ((x, True), (x, hat), (weight, hat)))
    dw = lent(weight) if gradients else weight.new_empty(0)  # to be written first, not added to
    # Either all rows of a chunk may have a second label, or none has.
    last = int(w_hat.nonzero().amax()) + 1 if w_hat.any() else 0
    size = max(1, ENTRIES // len(weight))
    for first in [*range(0, last, size), *range(last, N, size)]:
        at = slice(first, min(first + size, last if first < last else N))
        xs, labels = x[at], targets[at].clamp(min=0)
        shift = (xs * weight[labels]).sum(-1)
        parts, total = exponentials(xs, weight, shift)
        if not (total < 1e20).all():  # a label so improbable that float32 has no room for it beside the others
            shift = torch.stack([linear(part, xs).amax(0) for part in weight.split(CLASSES)]).amax(0)
            parts, total = exponentials(xs, weight, shift)
        logsumexp = total.log() + shift
        sets = [(labels, w[at], loss, dx, dw)]
        if first < last:
            labels = labels_hat[at]
            labels = draw_in_parts(parts, labels) if labels.is_floating_point() else labels.clamp(min=0)
            sets.append((labels, w_hat[at], loss_hat, dx_hat, dw_hat))
        for labels, counted, sum_, _, _ in sets:
            sum_ += ((logsumexp - (xs * weight[labels]).sum(-1)) * counted).sum()
        if not gradients:
            continue

        # Where both labels of every row count, one product serves both losses.
        alike = first < last and bool((w_hat[at] == 1).all() and (w[at] == w[first]).all())
        scaled, scaled_hat = ((xs * (c / total)[:, None]).t().contiguous() for c in (w[at], (w_hat if hat else w)[at]))
        pw = torch.zeros_like(xs)
        for i, (p, part) in enumerate(zip(parts, weight.split(CLASSES))):
            classes = slice(i * CLASSES, i * CLASSES + len(part))
            pw += outer(p, part)
            if first < last:
                product = linear(p, scaled_hat)
                dw_hat[classes] += product
            product = product * w[first] if alike else linear(p, scaled)
            (dw[classes].add_ if first else dw[classes].copy_)(product)
        pw /= total[:, None]
        for labels, counted, _, dx_, dw_ in sets:
            dx_[at] = (pw - weight[labels]) * counted[:, None]
            dw_.index_add_(0, labels, xs * counted[:, None], alpha=-1)
    return loss, loss_hat, dx, dw, dx_hat, dw_hat


@head_loss.register_fake
def _(x, weight, targets, labels_hat, gradients):
    results = [x.new_empty(()), x.new_empty(())]
    for wanted in (gradients, gradients and labels_hat.numel() > 0):
        results += [torch.empty_like(x), torch.empty_like(weight)] if wanted else [x.new_empty(0), x.new_empty(0)]
    return tuple(results)


@register_flop_formula(torch.ops.sophia.head_loss)
def _(x, weight, targets, labels_hat, gradients, **_):
    return 2 * x[0] * x[1] * weight[0] * (3 if gradients else 1)


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])
    ctx.gradients = [t.detach() for t in output[2:]]


def _backward(ctx, grad, grad_hat, *_):
    """Gives the gradients away, as they may be as large as the model; another backward pass computes them again."""
    total = None
    for first, g in ((0, grad), (2, grad_hat)):
        kept = ctx.gradients[first]
        if g is None or kept is not None and not kept.numel():
            continue
        if kept is None:
            ctx.gradients = list(head_loss(*ctx.saved_tensors, True)[2:])
        pair = [t.mul_(g) for t in ctx.gradients[first:first + 2]]
        ctx.gradients[first:first + 2] = None, None
        total = pair if total is None else [t.add_(other) for t, other in zip(total, pair)]
    return *total, None, None, None


head_loss.register_autograd(_backward, setup_context=_keep)


class TiedEmbedding(torch.autograd.Function):
    """Rows `idx` (B, T) of `weight` (V, C), and `weight` itself, for `head_loss`: its gradient comes back first, as
    memory of its own, and takes in the rows' gradient. Two dense gradients would be made and added otherwise."""

    @staticmethod
    def forward(ctx, idx, weight):
        ctx.save_for_backward(idx)
        return F.embedding(idx, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, dx, dw):
        idx, = ctx.saved_tensors
        return None, dw.index_add_(0, idx.flatten(), dx.flatten(0, 1))
