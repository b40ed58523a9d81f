"""The loss of a language model: output head and cross-entropy in one operation that never keeps logits.

`token_loss` says what the training loss is; training, evaluation and Hessian-vector products follow it. While it is the
plain cross-entropy and the head a plain linear layer, `head_loss` computes both in a fused operation with its gradient;
otherwise it differentiates them as they are, some rows at a time. Sophia-G's second loss is the negative log-likelihood
of labels drawn from softmax(logits), whatever the training loss adds to it (Algorithm 2).
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

CHUNK = 8192  # rows (tokens) computed at a time: matmuls run at full speed, and logits take 0.8 GB in 16 bits


def token_loss(logits, targets):
    """The training loss of each prediction: logits (N, V), targets (N,) → (N,), at least float32; ignored where -1."""
    return F.cross_entropy(logits.to(accumulate_dtype(logits)), targets, ignore_index=-1, reduction='none')


def mean_loss(logits, targets):
    """The mean loss over the targets that count: logits (B, T, V), targets (B, T) → 0-d.

    Another loss is an edit of `token_loss`: training does not pass here.
    """
    targets = targets.flatten()
    return loss_sum(logits.flatten(0, -2), targets) / (targets >= 0).sum()


def loss_sum(logits, targets):
    """The sum of `token_loss` over the targets that count: logits (N, V), targets (N,) → 0-d.

    Another loss is an edit of `token_loss`: training does not always pass here.
    """
    return torch.where(targets >= 0, token_loss(logits, targets), 0).sum()


def head_loss(x, lm_head, targets=None, labels_hat=None, uniforms=None, return_logits=False):
    """The logits lm_head(x) and their mean loss, or the loss alone: then logits are not kept, and it can be
    differentiated once, not twice.

    `lm_head` defines the logits, `token_loss` their loss: each is called in several places.

    Args:
        x: (B, T, C) hidden states.
        lm_head: the module that makes logits of them, (…, C) → (…, V).
        targets: (B, T), -1 where a position does not count.
        labels_hat: (n, T) labels, n ≤ B, of the first n sequences, for a second loss.
        uniforms: (n, T) uniform numbers in [0, 1) with which these labels are drawn from softmax(logits) instead.
        return_logits: whether to return logits; always without targets, never with second labels.

    Returns:
        (logits, loss), None for what there is not; with second labels (None, loss, loss_hat), where loss_hat is their
        negative log-likelihood, *summed* over the positions that count.
    """
    second = labels_hat is not None or uniforms is not None
    if targets is None or return_logits and not second:
        logits = lm_head(x)
        return logits, None if targets is None else mean_loss(logits, targets)
    x, targets = x.flatten(0, 1).to(compute_dtype(x)), targets.flatten()
    no_labels, no_uniforms = targets.new_empty(0), torch.empty(0, device=x.device)
    labels_hat = no_labels if labels_hat is None else labels_hat.flatten()
    uniforms = no_uniforms if uniforms is None else uniforms.flatten()
    if is_fused(lm_head):
        found = fused_head_loss(x, lm_head.weight, targets, labels_hat, uniforms, torch.is_grad_enabled())[:2]
    else:
        found = chunked_head_loss(x, lm_head, targets, labels_hat, uniforms)
    return None, *found[:1 + second]


def is_fused(lm_head):
    """Whether `fused_head_loss` computes what `token_loss` of `lm_head` says: neither has been changed."""
    plain = type(lm_head) is nn.Linear and lm_head.bias is None and 'forward' not in vars(lm_head)
    hooked = any((lm_head._forward_hooks, lm_head._forward_pre_hooks, lm_head._backward_hooks,
                  lm_head._backward_pre_hooks))
    return token_loss is FUSED and plain and not hooked


def cross_entropy(logits, targets):
    """What `fused_head_loss` computes: `token_loss` as it is shipped."""
    return F.cross_entropy(logits.to(accumulate_dtype(logits)), targets, ignore_index=-1, reduction='none')


def _code(function):
    """What a function does, without its docstring."""
    code = getattr(function, '__code__', None)  # a functools.partial, say, has none
    return code and (code.co_code, code.co_names, code.co_consts[1:], function.__defaults__)


# token_loss is meant to be edited, cross_entropy is not. While their code is equal, the fused operation computes
# token_loss. Code is compared, not values: values miss edits such as a single skipped token.
FUSED = token_loss if _code(token_loss) == _code(cross_entropy) else None


def chunked_head_loss(x, lm_head, targets, labels_hat, uniforms):
    """`head_loss` of any `token_loss` and `lm_head`, by PyTorch's own differentiation. Returns (loss, loss_hat)."""
    def of_rows(x, targets, labels_hat, uniforms):
        logits = lm_head(x)
        loss = loss_sum(logits, targets)
        if uniforms.numel():
            labels_hat = sample_categorical(logits.detach().float().softmax(-1), uniforms)
        n = len(labels_hat)
        labels_hat = torch.where(targets[:n] >= 0, labels_hat, -1)
        logits = logits[:n].to(accumulate_dtype(logits))
        return loss, F.cross_entropy(logits, labels_hat, ignore_index=-1, reduction='sum')

    totals = [0, 0]
    for rows in chunks(len(x), max(len(labels_hat), len(uniforms)), CHUNK):
        # Logits are computed again in the backward pass.
        found = checkpoint(of_rows, x[rows], targets[rows], labels_hat[rows], uniforms[rows], use_reentrant=False)
        totals = [total + part for total, part in zip(totals, found)]
    return totals[0] / (targets >= 0).sum(), totals[1]


def chunks(N, n, size):
    """Slices of at most `size` of N rows, of equal size as far as possible, as each size is compiled anew: either all
    rows of a chunk are among the first n, or none is."""
    found = []
    for first, last in (0, n), (n, N):
        step = math.ceil((last - first) / max(1, math.ceil((last - first) / size)))
        found += [slice(i, min(i + step, last)) for i in range(first, last, step or 1)]
    return found


def accumulate_dtype(x):
    """The type that numbers of x's type are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


def compute_dtype(x):
    """The type that matmuls of `x` are computed in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# ----------------------------------------------------------------------------------------------------------------------
# Label sampling (Algorithm 2, line 3)


def sample_categorical(p, uniforms):
    """Labels ŷ ~ p by inverting the cumulative distribution: p (…, V), uniforms (…) in [0, 1) → (…) int64.

    One uniform number a label, so that the caller decides what the labels depend on. p need not sum to 1. Two levels
    (blocks of 128 classes, then the class within its block) keep the cumulative sums short and accurate.
    """
    if missing := -p.size(-1) % 128:  # F.pad would copy p in any case
        p = F.pad(p, (0, missing))
    p = p.unflatten(-1, (-1, 128))
    block, offset = invert_cdf(p.sum(-1), uniforms)
    p = p.gather(-2, block[..., None, None].expand(*block.shape, 1, 128)).squeeze(-2)
    return block * 128 + _searchsorted(p.cumsum(-1), offset).squeeze(-1)


def invert_cdf(p, uniforms):
    """Where the share `uniforms` (…) of the sum of p (…, n) lies: the class (…), and the offset from its lower end
    (…, 1)."""
    upper = p.cumsum(-1)
    t = uniforms.unsqueeze(-1) * upper[..., -1:]
    found = _searchsorted(upper, t)
    # Rounding can put t below the lower end; a negative offset would select a first class of probability 0.
    return found.squeeze(-1), (t - (upper - p).gather(-1, found)).clamp(min=0)


def _searchsorted(cumulative, t):
    # Kept below the total, so that rounding never selects a class of probability 0 past the end.
    t = torch.minimum(t, cumulative[..., -1:] * (1 - 2 ** -22))
    return (cumulative <= t).sum(-1, keepdim=True)


# ----------------------------------------------------------------------------------------------------------------------
# The fused operation


@torch.library.custom_op('sophia::head_loss', mutates_args=())
def fused_head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, labels_hat: torch.Tensor,
                    uniforms: torch.Tensor, gradients: bool) -> tuple[
                        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
                        torch.Tensor]:
    """`head_loss` of the plain cross-entropy and the logits x·weightᵀ, with its gradients.

    The gradients of the logits, softmax minus one-hot, differ between the two losses in the one-hot alone: the second
    loss needs no matmul of its own, only rows of `weight` and `x`.

    Args:
        x: (N, C), of the type that matmuls are to be computed in. weight: (V, C).
        targets: (N,), -1 where a row does not count, in neither loss.
        labels_hat, uniforms: (n,), n ≤ N, second labels of the first n rows, or what to draw them with; else empty.
        gradients: whether to compute them.

    Returns:
        loss and loss_hat; how many targets count; and the gradients to x and weight, first of the *sum* over the
        targets, then of loss_hat, to its n rows of x; empty where not asked for. All but those to x at least float32.
    """
    n = max(len(labels_hat), len(uniforms))
    counted, labels, w = targets >= 0, targets.clamp(min=0), weight.to(x.dtype)
    losses = x.new_zeros(2, dtype=accumulate_dtype(x))
    dx, dw, dx_hat, dw_hat = _gradients(x, weight, n, gradients)
    room = 64 if x.dtype == torch.float16 else 1  # for sums over rows, which no loss scaling makes smaller
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks(len(x), n, CHUNK):
            hat = rows.start < n
            mask, y = counted[rows].to(losses.dtype), labels[rows]
            p = None  # frees the softmax of the chunk before
            nll, y_hat, nll_hat, p = softmax_fn(F.linear(x[rows], w), y, labels_hat[rows] if hat else None,
                                                uniforms[rows] if hat and len(uniforms) else None)
            losses[0] += (nll * mask).sum()
            if hat:
                losses[1] += (nll_hat * mask).sum()
            if not gradients:
                continue
            # The gradient of the logits, p minus the one-hot, in place; near p = 1 not from p, rounded to 16 bits.
            p.scatter_(-1, y[:, None], torch.expm1(-nll)[:, None].to(p.dtype))
            mask = mask[:, None].to(x.dtype)
            xs = x[rows] * mask
            product = p.t() @ (xs / room)
            for total in (dw, dw_hat) if hat else (dw,):
                total.add_(product, alpha=room)
            dx_rows = p @ w
            dx[rows] = dx_rows * mask
            if hat:
                dx_hat[rows] = (dx_rows + (w[y] - w[y_hat])) * mask
                xs = xs.to(dw.dtype)
                dw_hat.index_add_(0, y, xs).index_add_(0, y_hat, xs, alpha=-1)
    count = counted.sum().to(losses.dtype)
    return losses[0] / count, losses[1].clone(), count, dx, dw, dx_hat, dw_hat


def _gradients(x, weight, n, wanted):
    """Memory for the gradients that `fused_head_loss` returns."""
    def pair(rows):
        to_x, to_weight = ((rows, x.size(1)), weight.shape) if wanted and rows else (0, 0)
        return x.new_empty(to_x), x.new_zeros(to_weight, dtype=accumulate_dtype(x))

    return *pair(len(x)), *pair(n)


@fused_head_loss.register_fake
def _(x, weight, targets, labels_hat, uniforms, gradients):
    return (*(x.new_empty((), dtype=accumulate_dtype(x)) for _ in range(3)),
            *_gradients(x, weight, max(len(labels_hat), len(uniforms)), gradients))


@register_flop_formula(torch.ops.sophia.head_loss)
def _(x, weight, targets, labels_hat, uniforms, gradients, *_, **__):
    return 2 * x[0] * x[1] * weight[0] * (3 if gradients else 1)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], output[2])
    ctx.gradients = [t.detach() for t in output[3:]]


def _backward(ctx, grad, grad_hat, *_):
    """Gives the gradients away, as they may be as large as the model; another backward pass computes them again."""
    *inputs, count = ctx.saved_tensors
    to_x, to_weight = None, None
    for first, scale in ((0, None if grad is None else grad / count), (2, grad_hat)):
        kept = ctx.gradients[first]
        if scale is None or kept is not None and not kept.numel():
            continue
        if kept is None:
            ctx.gradients = list(fused_head_loss(*inputs, True)[3:])
        dx, dw = ctx.gradients[first:first + 2]
        ctx.gradients[first:first + 2] = None, None
        dx, dw = F.pad(dx.to(dw.dtype) * scale, (0, 0, 0, len(inputs[0]) - len(dx))), dw.mul_(scale)
        to_x, to_weight = (dx, dw) if to_x is None else (to_x + dx, to_weight.add_(dw))
    if to_x is not None:
        to_x, to_weight = to_x.to(inputs[0].dtype), to_weight.to(inputs[1].dtype)
    return to_x, to_weight, None, None, None, None


fused_head_loss.register_autograd(_backward, setup_context=_setup_context)


def softmax_and_losses(logits, labels, labels_hat, uniforms):
    """Softmax and losses of some rows, all classes at once; draws their second labels.

    Args: logits (R, V), labels (R,); second labels (R,), uniforms (R,) to draw them with, or None.
    Returns: the labels' negative log-likelihood (R,), the second labels (R,) and theirs, and the softmax (R, V).
    """
    log_p = F.log_softmax(logits, -1, dtype=accumulate_dtype(logits))
    at = labels[:, None]
    nll, p = -log_p.gather(-1, at), log_p.exp_()
    nll_hat = None
    if labels_hat is not None:
        if uniforms is not None:
            labels_hat = sample_categorical(p, uniforms)
        others = logits.gather(-1, labels_hat[:, None]).to(log_p.dtype)
        # −log p(ŷ) = −log p(y) + logit(y) − logit(ŷ)
        nll_hat = (nll + logits.gather(-1, at) - others).squeeze(-1)
    return nll.squeeze(-1), labels_hat, nll_hat, p.to(logits.dtype)


softmax_fn = softmax_and_losses
_compiled_softmax = torch.compile(softmax_and_losses)  # two passes over the logits instead of five


def set_compile(compile):
    """Whether the fused operation compiles its softmax."""
    global softmax_fn
    softmax_fn = _compiled_softmax if compile else softmax_and_losses
