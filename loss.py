"""What the model computes with: linear layers, cross-entropy, labels drawn from the softmax; the head with its loss.

PyTorch's matrix product on x86 is MKL's, which leaves AVX-512 unused on AMD processors. Its convolutions are oneDNN's,
which does not: where there is AVX-512, on CPU in float32, a linear layer is a convolution with a 1×1 kernel over its
tokens (`linear`). Without AVX-512 a convolution is a little faster, but its gradients are slower: then only what needs
no gradients is one (`product`).

`head_loss` is the output head and the cross-entropy as one operation, part by part, so that logits are never kept, and
`head_hvp` what a Hessian-vector product needs of both.
"""

import functools
import weakref

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

FOR_CPU = True  # False: as on any other device
ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # on x86
AVX512 = torch.backends.cpu.get_cpu_capability() == 'AVX512'


def on_cpu(x):
    """Whether the ways for CPU are for `x`."""
    return FOR_CPU and x.device.type == 'cpu' and x.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')


def by_convolution(x):
    """Whether a product of `x` (…, C) is to be a convolution."""
    return ONEDNN and on_cpu(x) and x.numel() > 20480  # up to there PyTorch's convolution is not oneDNN's


def as_image(x):
    """(…, C) as one picture with a token for a pixel, (1, C, tokens, 1); a view of contiguous `x`."""
    return x.reshape(1, -1, 1, x.size(-1)).permute(0, 3, 1, 2)


def linear(x, weight, bias=None):
    """F.linear: (…, C), (M, C), (M,) → (…, M)."""
    return product(x, weight, bias) if AVX512 else F.linear(x, weight, bias)


def product(x, weight, bias=None):
    """`linear` where nobody differentiates it."""
    if not by_convolution(x):
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
    if missing := -p.size(-1) % 128:  # F.pad would copy p in any case
        p = F.pad(p, (0, missing))
    p = p.unflatten(-1, (-1, 128))
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
# The head with its loss

ROWS = 8192  # computed at a time: products are at full speed, and logits take 0.8 GB in 16 bits


@torch.library.custom_op('sophia::head_loss', mutates_args=())
def head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, labels_hat: torch.Tensor, gradients: bool,
              compile: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
                                      torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the logits x·weightᵀ with `targets`, that summed over `labels_hat`, and their gradients.

    The gradients of the logits, softmax minus one-hot, differ between the two in the one-hot alone: the second loss
    needs no product of its own, only rows of `weight` and `x`. Differentiable once.

    Args:
        x: (N, C), of the type that products are to be computed in. weight: (V, C).
        targets: (N,), -1 = not counted, in neither loss.
        labels_hat: (n,), n ≤ N, second labels of the first n rows, or uniform numbers to draw them with.
        gradients: whether to compute them.
        compile: whether to torch.compile what is no product (on CPU in float32 it never is).

    Returns:
        loss and loss_hat; how many targets count; and the gradients to x and weight, first of the *sum* over the
        targets, then of loss_hat, to its n rows of x; empty where not asked for. All but those to x at least float32.
    """
    N, n = len(x), len(labels_hat)
    counted, labels, w = targets >= 0, targets.clamp(min=0), weight.to(x.dtype)
    losses = x.new_zeros(2, dtype=wide(x))
    dx, dw, dx_hat, dw_hat = _gradients(x, weight, n, gradients)
    size, way = (max(1, ENTRIES // len(weight)), by_classes) if on_cpu(x) else (ROWS, by_rows)
    if gradients and on_cpu(x):
        dw = lent(weight)
    with torch.autocast(x.device.type, enabled=False):
        # Either all rows of a chunk may have a second label, or none has.
        for first in [*range(0, n, size), *range(n, N, size)]:
            at = slice(first, min(first + size, n if first < n else N))
            hat, mask, y = labels_hat[at] if first < n else None, counted[at].to(losses.dtype), labels[at]
            backward = None  # which holds the softmax of the chunk before
            nll, y_hat, nll_hat, backward = way(x[at], w, y, hat, compile)
            losses[0] += (nll * mask).sum()
            if hat is not None:
                losses[1] += (nll_hat * mask).sum()
            if not gradients:
                continue
            mask = mask[:, None].to(x.dtype)
            xs = x[at] * mask
            dx_at = backward(xs, [dw] if hat is None else [dw, dw_hat], first == 0)
            dx[at] = dx_at * mask
            if hat is not None:
                dx_hat[at] = (dx_at + (w[y] - w[y_hat])) * mask
                xs = xs.to(dw.dtype)
                dw_hat.index_add_(0, y, xs).index_add_(0, y_hat, xs, alpha=-1)
    count = counted.sum().to(losses.dtype)
    return losses[0] / count, losses[1].clone(), count, dx, dw, dx_hat, dw_hat


def wide(x):
    """The type that numbers of x's type are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


def _gradients(x, weight, n, wanted):
    """Memory for the gradients that `head_loss` returns."""
    none = [(0,)] * 2
    (a, b), (c, d) = ([(rows, x.size(1)), weight.shape] if wanted and rows else none for rows in (len(x), n))
    return x.new_empty(a), x.new_empty(b, dtype=wide(x)), x.new_empty(c), x.new_empty(d, dtype=wide(x))


@head_loss.register_fake
def _(x, weight, targets, labels_hat, gradients, compile):
    return *(x.new_empty((), dtype=wide(x)) for _ in range(3)), *_gradients(x, weight, len(labels_hat), gradients)


@register_flop_formula(torch.ops.sophia.head_loss)
def _(x, weight, targets, labels_hat, gradients, *_, **__):
    return 2 * x[0] * x[1] * weight[0] * (3 if gradients else 1)


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], output[2])
    ctx.compile, ctx.gradients = inputs[5], [t.detach() for t in output[3:]]


def _backward(ctx, grad, grad_hat, *_):
    """Gives the gradients away, as they may be as large as the model; another backward pass computes them again."""
    *inputs, count = ctx.saved_tensors
    to_x, to_weight = None, None
    for first, scale in ((0, None if grad is None else grad / count), (2, grad_hat)):
        kept = ctx.gradients[first]
        if scale is None or kept is not None and not kept.numel():
            continue
        if kept is None:
            ctx.gradients = list(head_loss(*inputs, True, ctx.compile)[3:])
        dx, dw = ctx.gradients[first:first + 2]
        ctx.gradients[first:first + 2] = None, None
        dx, dw = F.pad(dx.to(dw.dtype) * scale, (0, 0, 0, len(inputs[0]) - len(dx))), dw.mul_(scale)
        to_x, to_weight = (dx, dw) if to_x is None else (to_x + dx, to_weight.add_(dw))
    if to_x is not None:
        to_x, to_weight = to_x.to(inputs[0].dtype), to_weight.to(inputs[1].dtype)
    return to_x, to_weight, None, None, None, None


head_loss.register_autograd(_backward, setup_context=_keep)


def by_rows(x, weight, labels, hat, compile):
    """Softmax and losses of all classes of some rows.

    Args: x (R, C), weight (V, C), labels (R,), hat (R,): second labels, uniform numbers to draw them with, or None.

    Returns:
        The label's negative log-likelihood (R,); the second labels and theirs; and a function of (xs (R, C), totals,
        first) that adds the gradient to `weight` with xs for x to each of the `totals`, writes it if it is the `first`,
        and returns that to x.
    """
    logits = F.linear(x, weight)
    if compile:
        nll, labels_hat, nll_hat, logits = compiled(softmax)(logits, labels, hat)
    else:
        nll, labels_hat, nll_hat, logits = softmax(logits, labels, hat, in_place=True)
    minus_one_hot(logits, labels, nll)

    def backward(xs, totals, first):
        room = 64 if xs.dtype == torch.float16 else 1  # for sums over rows, which no loss scaling makes smaller
        product = logits.t() @ (xs / room)
        for total in totals:
            (total.zero_() if first else total).add_(product, alpha=room)
        return logits @ weight

    return nll, labels_hat, nll_hat, backward


def softmax(logits, labels, hat, in_place=False):
    """Losses and second labels as `by_rows` returns them, and the softmax of `logits` (R, V), if wanted in their place.

    Not compiled in place: PyTorch 2.11 makes that a kernel which reads the label's logit from what it has overwritten.
    """
    log_p = F.log_softmax(logits, -1, dtype=wide(logits))
    at = labels[:, None]
    nll, p = -log_p.gather(-1, at), log_p.exp_()
    labels_hat, nll_hat = hat, None
    if hat is not None:
        labels_hat = draw(p, hat) if hat.is_floating_point() else hat
        others = logits.gather(-1, labels_hat[:, None]).to(log_p.dtype)
        nll_hat = (nll + logits.gather(-1, at) - others).squeeze(-1)
    return nll.squeeze(-1), labels_hat, nll_hat, logits.copy_(p) if in_place else p.to(logits.dtype)


def minus_one_hot(p, labels, nll):
    """Takes the one-hot off the softmax in place; near p = 1 that has to be before it is rounded to 16 bits."""
    p.scatter_(-1, labels[:, None], torch.expm1(-nll)[:, None].to(p.dtype))


@functools.cache
def compiled(function):
    """torch.compile, once for each function: `softmax` in two passes over the logits."""
    return torch.compile(function)


# On CPU in float32: class by class

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
    if not (AVX512 and by_convolution(x)):
        return p.t() @ x
    # torch.nn.grad.conv2d_weight, which copies an expanded number to have something of the kernel's shape.
    kernel = x.new_empty(p.size(1), x.size(1), 1, 1)
    return torch.ops.aten.convolution_backward(as_image(p), as_image(x), kernel, None, [1, 1], [0, 0], [2, 2], False,
                                               [0, 0], 1, [False, True, False])[1].flatten(1)


def exponentials(x, weight, labels, dx=None, dweight=None):
    """exp(logit − shift) for every class and token, the shift being the logit of one of the classes, and their sums.

    Args: x, dx (N, C), weight, dweight (V, C), labels (N,).
    Returns: list of (CLASSES, N), one for each part of the classes, in memory that the next call overwrites; (N,); and
    the shift (N,), the label's logit, or where that will not do the largest one. With dx and dweight the derivatives of
    the exponentials along them follow as N more columns, and N more sums.
    """
    parts, sums, shift = _exponentials(x, weight, labels, dx, dweight)
    if not (sums[:len(x)] < 1e20).all():  # a label so improbable that float32 has no room for it beside the others
        logits, classes = zip(*(product(part, x).max(0) for part in weight.split(CLASSES)))
        i = torch.stack(logits).argmax(0, keepdim=True)
        largest = i * CLASSES + torch.stack(classes).gather(0, i)
        parts, sums, shift = _exponentials(x, weight, largest[0], dx, dweight)
    return parts, sums, shift


def _exponentials(x, weight, reference, dx, dweight):
    memory, parts, n = scratch(ENTRIES), [], len(x)
    xs, shift = x, (x * weight[reference]).sum(-1)
    if dx is not None:
        xs = torch.cat((x, dx))
        shift = torch.cat((shift, (dx * weight[reference] + x * dweight[reference]).sum(-1)))
    sums = torch.zeros_like(shift)
    for i, part in enumerate(weight.split(CLASSES)):
        logits = product(part, xs, -shift)
        p, memory = memory[:logits.numel()].view_as(logits), memory[logits.numel():]
        torch.exp(logits[:, :n], out=p[:, :n])
        if dx is not None:
            dlogits = logits[:, n:].add_(product(dweight[i * CLASSES:i * CLASSES + len(part)], x))
            torch.mul(p[:, :n], dlogits, out=p[:, n:])
            del dlogits
        sums += p.sum(0)
        parts.append(p)
        del logits  # its memory is the next part's
    return parts, sums, shift[:n]


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


def by_classes(x, weight, labels, hat, compile):
    """As `by_rows`, a part of the classes after the other; there is nothing to compile."""
    parts, sums, shift = exponentials(x, weight, labels)
    logsumexp = sums.log() + shift
    labels_hat = draw_in_parts(parts, hat) if hat is not None and hat.is_floating_point() else hat
    nll_hat = None if hat is None else logsumexp - (x * weight[labels_hat]).sum(-1)

    def backward(xs, totals, first):
        scaled, px = (xs / sums[:, None]).t().contiguous(), torch.zeros_like(x)
        for i, (p, part) in enumerate(zip(parts, weight.split(CLASSES))):
            classes = slice(i * CLASSES, i * CLASSES + len(part))
            px += outer(p, part)
            gradient = product(p, scaled)
            for total in totals:
                total[classes].copy_(gradient) if first else total[classes].add_(gradient)
        for total in totals:
            total.index_add_(0, labels, xs, alpha=-1)
        return px / sums[:, None] - weight[labels]

    return logsumexp - (x * weight[labels]).sum(-1), labels_hat, nll_hat, backward


# ----------------------------------------------------------------------------------------------------------------------
# The head in a Hessian-vector product


@torch.library.custom_op('sophia::head_hvp', mutates_args=())
def head_hvp(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor,
             compile: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the mean cross-entropy of the logits x·weightᵀ, and its derivative along (dx, dweight).

    With p the softmax, ż = dx·weightᵀ + x·dweightᵀ the derivative of the logits and δ = p minus one-hot that of the
    losses by them, δ̇ = p ⊙ (ż − ⟨p, ż⟩); the gradients are δ·weight and δᵀ·x.

    Args:
        x, dx: (N, C), of the type that products are to be computed in. weight, dweight: (V, C).
        targets: (N,), -1 = not counted.
        compile: as for `head_loss`.

    Returns:
        the gradient to x, its derivative, and the derivative of the gradient to weight, at least float32.
    """
    w, dw, labels = weight.to(x.dtype), dweight.to(x.dtype), targets.clamp(min=0)
    mask = (targets >= 0).to(x.dtype)[:, None]
    to_x, dto_x = torch.empty_like(x), torch.empty_like(x)
    dto_weight = torch.zeros_like(weight, dtype=wide(x))
    # Two numbers are kept for each logit.
    size, way = (max(1, ENTRIES // len(weight) // 2), hvp_by_classes) if on_cpu(x) else (ROWS // 2, hvp_by_rows)
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, len(x), size):
            at = slice(first, first + size)
            xs, dxs = x[at] * mask[at], dx[at] * mask[at]
            to_x[at], dto_x[at] = way(xs, w, labels[at], dxs, dw, mask[at], dto_weight, compile)
    count = mask.sum(dtype=dto_weight.dtype)
    return to_x / count, dto_x / count, dto_weight.div_(count)


@head_hvp.register_fake
def _(x, weight, targets, dx, dweight, compile):
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight, dtype=wide(x))


@register_flop_formula(torch.ops.sophia.head_hvp)
def _(x, weight, *_, **__):
    return 2 * x[0] * x[1] * weight[0] * 8


def hvp_by_rows(x, weight, labels, dx, dweight, mask, total, compile):
    """`head_hvp` of some rows, of the sum of their losses: x and dx (R, C) are 0 where mask (R, 1) is.

    Adds the derivative of the gradient to `weight` to `total`; returns the gradient to x and its derivative, (R, C).
    """
    logits, dlogits = F.linear(x, weight), torch.addmm(F.linear(dx, weight), x, dweight.t())
    nll, p, dp = (compiled(dsoftmax) if compile else dsoftmax)(logits, dlogits, labels)
    del logits, dlogits
    minus_one_hot(p, labels, nll)
    total.add_(torch.addmm(dp.t() @ x, p.t(), dx))
    return p @ weight * mask, torch.addmm(dp @ weight, p, dweight) * mask


def dsoftmax(logits, dlogits, labels):
    """Losses (R,), softmax and its derivative (R, V) of the logits (R, V) whose derivative is dlogits (R, V)."""
    log_p = F.log_softmax(logits, -1, dtype=wide(logits))
    nll, p = -log_p.gather(-1, labels[:, None]).squeeze(-1), log_p.exp_()
    return nll, p.to(logits.dtype), (p * (dlogits - (p * dlogits).sum(-1, keepdim=True))).to(logits.dtype)


def hvp_by_classes(x, weight, labels, dx, dweight, mask, total, compile):
    """As `hvp_by_rows`, a part of the classes after the other."""
    n = len(x)
    parts, sums, _ = exponentials(x, weight, labels, dx, dweight)
    # The softmax is p / sum, its derivative (dp − p · mean) / sum.
    scale = 1 / sums[:n, None]
    mean, xs = sums[n:, None] * scale, x * scale
    factors = torch.cat((dx * scale - xs * mean, xs)).t().contiguous()
    both, pdw = x.new_zeros(2 * n, x.size(1)), torch.zeros_like(x)
    for p, w, dw, to_w in zip(parts, *(t.split(CLASSES) for t in (weight, dweight, total))):
        both += outer(p, w)
        pdw += outer(p[:, :n], dw)
        to_w.add_(product(p, factors))
    total.index_add_(0, labels, dx, alpha=-1)
    pw, dpw = both.split(n)
    return (pw * scale - weight[labels]) * mask, ((dpw + pdw - pw * mean) * scale - dweight[labels]) * mask


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
