"""Float32 kernels for AMD processors with AVX-512, installed into a model and its loss by one call of the set-up.

PyTorch's matmul on x86 is MKL's, which leaves AVX-512 unused on AMD processors. Its convolutions are oneDNN's, which
do not: there a linear layer is a convolution with a 1×1 kernel over its tokens (`ConvLinear`), and the output head with
its loss goes class by class, in memory that stays in the cache (`over_vocab`). On other processors PyTorch's own
kernels are as fast or faster, and `install` does nothing.
"""

import functools
import threading
import weakref
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

CLASSES = 2048  # computed at a time: 8 MB for 1,024 tokens, which stay in the cache
ENTRIES = 2 ** 26  # of the softmax kept at a time (256 MiB)


@functools.cache
def pays():
    """Whether this machine is one on which the kernels are faster."""
    try:
        amd = 'AuthenticAMD' in Path('/proc/cpuinfo').read_text()
    except OSError:
        amd = False
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return amd and onednn and torch.backends.cpu.get_cpu_capability() == 'AVX512'


def install(trunk, loss, force=False):
    """Installs the kernels where they pay, and returns whether they are installed.

    Args:
        trunk: module whose plain nn.Linear layers are to be computed by convolutions.
        loss: the module loss.py, of which `chunk_fn`, `chunk_rows` and `empty` are exchanged.
        force: install them on any x86 processor, for tests.
    """
    if not (pays() or force):
        return False
    for module in trunk.modules():
        if type(module) is nn.Linear:
            module.__class__ = ConvLinear
    over_tokens, rows = loss.over_tokens, loss.CHUNK
    loss.chunk_fn = lambda x, *args: (over_vocab if fits(x) else over_tokens)(x, *args)
    loss.chunk_rows = lambda x, weight: max(1, ENTRIES // len(weight)) if fits(x) else rows
    loss.empty = pooled_empty
    return True


def fits(x):
    """Whether the kernels are for `x`."""
    return x.device.type == 'cpu' and x.dtype == torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# Matmuls as convolutions


class ConvLinear(nn.Linear):
    """nn.Linear by oneDNN's convolution."""

    def forward(self, x):
        if torch.is_autocast_enabled('cpu'):
            return super().forward(x)
        return linear(x, self.weight, self.bias)


def by_convolution(x):
    """Whether a matmul of `x` (…, C) is to be a convolution."""
    return fits(x) and x.numel() > 20480  # up to there PyTorch's convolution is not oneDNN's


def as_image(x):
    """(…, C) as one picture with a token for a pixel, (1, C, tokens, 1); a view of contiguous `x`."""
    return x.reshape(1, -1, 1, x.size(-1)).permute(0, 3, 1, 2)


def linear(x, weight, bias=None):
    """F.linear: (…, C), (M, C), (M,) → (…, M)."""
    if not by_convolution(x):
        return F.linear(x, weight, bias)
    # The dilation of a 1×1 kernel changes nothing, but has PyTorch choose oneDNN on a single thread, too.
    y = F.conv2d(as_image(x), weight[:, :, None, None], bias, dilation=2)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


def outer(p, x):
    """pᵀ·x: (N, M), (N, C) → (M, C)."""
    if not by_convolution(x):
        return p.t() @ x
    # torch.nn.grad.conv2d_weight, which copies an expanded number to have something of the kernel's shape.
    kernel = x.new_empty(p.size(1), x.size(1), 1, 1)
    return torch.ops.aten.convolution_backward(as_image(p), as_image(x), kernel, None, [1, 1], [0, 0], [2, 2], False,
                                               [0, 0], 1, [False, True, False])[1].flatten(1)


# ----------------------------------------------------------------------------------------------------------------------
# Memory that is used again: what a process gets anew from the system costs more than computing on it.

_workspace = threading.local()
_pool = []  # arrays of `pooled_empty` that no tensor uses


def workspace(size):
    """Memory for `size` numbers, for one call only, of this thread only."""
    if getattr(_workspace, 'memory', None) is None or _workspace.memory.numel() < size:
        with torch.inference_mode(False):
            _workspace.memory = torch.empty(size, dtype=torch.float32)
    return _workspace.memory[:size]


def pooled_empty(shape, dtype, device):
    """torch.empty whose memory is reused by the next call of that size once the last tensor that uses it is gone.

    For gradients of the model's size, which an optimizer's zero_grad frees in every step. A tensor made from an array
    holds it for as long as any tensor uses its memory: a finalizer on the array knows when none does.
    """
    size = torch.Size(shape).numel()
    if device.type != 'cpu' or dtype != torch.float32 or size < 2 ** 20:
        return torch.empty(shape, dtype=dtype, device=device)
    i = next((i for i, memory in enumerate(_pool) if memory.size == size), None)
    memory = torch.empty(size, dtype=torch.float32).numpy() if i is None else _pool.pop(i)
    array = memory.view()
    weakref.finalize(array, _pool.append, memory).atexit = False
    return torch.from_numpy(array).view(shape)


# ----------------------------------------------------------------------------------------------------------------------
# Head and loss


def over_vocab(x, weight, labels, labels_hat, uniforms):
    """`loss.over_tokens`, some classes after the other: the same arguments, the same results."""
    parts, sums, shift = exponentials(x, weight, labels)
    logsumexp = sums.log() + shift
    labels_hat = labels_hat if uniforms is None else sample_parts(parts, uniforms)
    nll_hat = None if labels_hat is None else logsumexp - (x * weight[labels_hat]).sum(-1)

    def backward(xs, totals, first):
        scaled, px = (xs / sums[:, None]).t().contiguous(), torch.zeros_like(x)
        for i, (p, part) in enumerate(zip(parts, weight.split(CLASSES))):
            classes = slice(i * CLASSES, i * CLASSES + len(part))
            px += outer(p, part)
            gradient = linear(p, scaled)
            for total in totals:
                total[classes].copy_(gradient) if first else total[classes].add_(gradient)
        for total in totals:
            total.index_add_(0, labels, xs, alpha=-1)
        return px / sums[:, None] - weight[labels]

    return logsumexp - (x * weight[labels]).sum(-1), labels_hat, nll_hat, backward


def exponentials(x, weight, labels):
    """exp(logit − shift) for every class and token, the shift being the logit of one of the classes, and their sums.

    Args: x (N, C), weight (V, C), labels (N,).
    Returns: list of (CLASSES, N), one for each part of the classes, in memory that the next call overwrites; (N,); and
    the shift (N,), the label's logit, or where that will not do the largest one.
    """
    found = shifted(x, weight, labels)
    if not (found[1] < 1e20).all():  # a label so improbable that float32 has no room for it beside the others
        logits, classes = zip(*(linear(part, x).max(0) for part in weight.split(CLASSES)))
        i = torch.stack(logits).argmax(0, keepdim=True)
        found = shifted(x, weight, (i * CLASSES + torch.stack(classes).gather(0, i))[0])
    return found


def shifted(x, weight, reference):
    """`exponentials` with the logit of the classes `reference` (N,) as the shift."""
    memory, parts = workspace(max(ENTRIES, len(x) * len(weight))), []
    shift, sums = (x * weight[reference]).sum(-1), x.new_zeros(len(x))
    for part in weight.split(CLASSES):
        logits = linear(part, x, -shift)
        p, memory = memory[:logits.numel()].view_as(logits), memory[logits.numel():]
        torch.exp(logits, out=p)
        sums += p.sum(0)
        parts.append(p)
        del logits  # frees the memory for the next part
    return parts, sums, shift


def sample_parts(parts, uniforms):
    """Labels drawn in proportion to what `exponentials` returns, by `uniforms` (N,) in [0, 1); (N,) int64."""
    in_part = torch.stack([p.sum(0) for p in parts], dim=1).double()
    upper = in_part.cumsum(-1)
    found, t = invert(upper, uniforms.double()[:, None] * upper[:, -1:])
    offset = t - (upper - in_part).gather(1, found)
    labels = torch.empty_like(found.squeeze(1))
    for i, p in enumerate(parts):
        rows = (found[:, 0] == i).nonzero().squeeze(1)
        cumulative = p[:, rows].t().cumsum(-1, dtype=torch.float64)
        labels[rows] = i * CLASSES + invert(cumulative, offset[rows])[0].squeeze(1)
    return labels


def invert(cumulative, t):
    """The first class whose cumulative weight (N, V) is above t (N, 1), kept between 0 and the total; and that t."""
    t = torch.minimum(t.clamp(min=0), cumulative[:, -1:] * (1 - 1e-12))
    return torch.searchsorted(cumulative, t, right=True), t
