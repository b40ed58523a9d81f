"""Hessian estimates during training: their schedule, sequences, labels and vectors.
For another schedule or estimator, subclass a hook and name it in a row of optimizers.py.

In each iteration train_step calls `start` and `split`, and for each micro-batch `labels` before the forward pass. If
that returned labels, it calls `add` with the loss on them. If `start` returned True, it calls `update` before the
optimizer's step. Estimates are made at iterations 0, k, 2k, … on the first sequences of that iteration's mini-batch
(Algorithm 3, lines 7 to 9). All random numbers are functions of (seed, iteration).
"""

import contextlib

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.files import warn
from runtime.optim import parameters
from runtime.rng import LABELS, VECTORS, keyed_seed, keyed_uniforms
from sophia import GaussNewtonBartlett, Hutchinson, check_finite, hessian_vector_product, is_dtensor


class StepHook:
    """Callbacks of a training step. First-order optimizers use this class, which estimates nothing."""

    hessian_products = False  # whether estimates are Hessian-vector products, which need an unsharded eager model
    samples_labels = False  # whether labels are sampled from the model's logits
    cost = 0.0  # FLOPs of an estimate, in forward and backward passes over its sequences

    def __init__(self, model, optimizer, **options):
        pass

    @classmethod
    def is_due(cls, iter_num, interval):
        """Return whether iteration `iter_num` makes an estimate."""
        return False

    def start(self, iter_num, loss_scale=1.0):
        """Begin iteration `iter_num`. Return whether it estimates the Hessian. `loss_scale`: GradScaler's scale."""
        return False

    def split(self, rows, size):
        """Return the micro-batches, each of at most `size` of this rank's `rows` sequences, as slices. Their sizes may
        differ when an estimate is due."""
        return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]

    def labels(self, X, Y, rows):
        """Return extra arguments for `loss.Losses` as a dict. X and Y, (B, T) int64, are the sequences `rows`. If they
        are labels for the first sequences, `add(loss_hat, predictions)` gets the summed loss on these labels."""
        return {}


class HessianHook(StepHook):
    """Base class of estimators. They run at iterations 0, k, 2k, … on the mini-batch's first `batch_size` sequences. A
    subclass defines `diagonal()`, which returns ĥ as a list of tensors in param-group order; None keeps that h. During
    `diagonal`, `p.grad` is the mean gradient of the whole mini-batch, already clipped.

    Checkpoints do not hold a hook, so its results must not depend on earlier iterations.

    Args:
        model: the plain GPT, neither compiled nor wrapped.
        optimizer: anything with `param_groups` and `update_hessian(estimates)`, see sophia.py.
        seed: random seed of labels and vectors.
        interval, batch_size: k, and the number of sequences over all ranks, a multiple of world_size.
        parts, clip: the settings hessian_parts and hessian_clip, for Gauss-Newton-Bartlett only.
        rank, world_size: this rank has the sequences [rank::world_size] of the mini-batch.
        autocast: context manager for forward passes outside of train_step.
        compile: whether the model's forward is compiled; then Hessian-vector products are, too.
    """

    def __init__(self, model, optimizer, *, seed, interval, batch_size, parts=1, clip=0.0, rank=0, world_size=1,
                 autocast=None, compile=False):
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.interval, self.batch_size, self.parts, self.clip = interval, batch_size, parts, clip
        self.rank, self.world_size, self.compile = rank, world_size, compile
        self.autocast = autocast or contextlib.nullcontext()

    @classmethod
    def is_due(cls, iter_num, interval):
        return iter_num % interval == 0

    def start(self, iter_num, loss_scale=1.0):
        self.iter_num, self.due = iter_num, self.is_due(iter_num, self.interval)
        # Estimates overflow at another loss scale than gradients, and GradScaler tracks only gradients.
        self.scale = min(loss_scale, self.group.get('hessian_scale', loss_scale))
        self.here = self.batch_size // self.world_size if self.due else 0  # this rank's sequences in the estimate
        return self.due

    @property
    def group(self):
        """The param group that keeps the estimates' loss scale, because checkpoints hold param groups."""
        return next(group for group in self.optimizer.param_groups if group['params'])

    def count(self, rows):
        """Return how many of the first sequences in the micro-batch `rows` belong to the estimate."""
        return len(range(rows.start, min(rows.stop, self.here), rows.step or 1))

    def update(self):
        """Update h with the estimate (Algorithm 3, line 9). Return the reason to skip the iteration, or ''."""
        estimates = self.diagonal()
        if check_finite('skip', 'Hessian estimate', [h_hat for h_hat in estimates if h_hat is not None]):
            self.optimizer.update_hessian(estimates)
        elif self.scale > 1:
            self.group['hessian_scale'] = self.scale / 2
            if self.rank == 0:
                warn(f'iteration {self.iter_num}: the Hessian estimate overflowed in float16 and was left out; its '
                     f'loss scale falls to {self.scale / 2:g}')
        else:
            return 'a Hessian estimate is not finite'
        return ''


def fit_parts(parts, batch_size, micro_batch, ranks, sharded):
    """Return the smallest feasible number of parts of `batch_size` sequences of at least `parts`, else the largest.

    All parts have one size, at most `micro_batch`. A part is on one rank, or on all ranks with `sharded` parameters.
    """
    here = batch_size // ranks  # sequences per rank
    fit = [n for n in range(1, here + 1) if here % n == 0 and here // n <= micro_batch]
    fit = [n if sharded else n * ranks for n in fit]
    return parts if parts < 2 else next((n for n in fit if n >= parts), fit[-1])


class GNBHook(HessianHook):
    """Gauss-Newton-Bartlett (Algorithm 2), sharing its forward with the gradient: one forward, two backwards."""

    samples_labels = True
    cost = 2 / 3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.compile:
            keep_buffers()

    def start(self, iter_num, loss_scale=1.0):
        super().start(iter_num, loss_scale)
        self.uniforms = None
        self.estimator = GaussNewtonBartlett(self.optimizer, self.parts > 1, self.clip) if self.due else None
        return self.due

    def split(self, rows, size):
        if not self.due or self.compile and self.parts < 2:  # another size would be recompiled
            return super().split(rows, size)
        # The sequences of the estimate come first, because its backward pass is over whole micro-batches.
        here = min(self.here, rows)
        first = super().split(here, size)
        if self.parts > 1:
            # Part p has the sequences p, p + parts, … of the mini-batch, however many ranks share it. With sharded
            # parameters all ranks work on one part, with other sequences. That is another draw of the same estimate.
            n = self.parts if any(map(is_dtensor, self.estimator.params)) else self.parts // self.world_size
            first = [slice(i, here, n) for i in range(min(n, here))]
        return first + [slice(here + one.start, here + one.stop) for one in super().split(rows - here, size)]

    def labels(self, X, Y, rows):
        n = self.count(rows)
        if n == 0:
            return {}
        # loss_hat is a sum. This weight makes it a scaled mean, whose gradient fits float16. `diagonal` undoes it.
        self.weight = self.scale * self.world_size / (self.batch_size * Y.size(1))
        return self.second_labels(Y[:n], rows)

    def second_labels(self, Y, rows):
        """Return the arguments for the second loss on `Y`, the sequences of `rows` that belong to the estimate."""
        if self.uniforms is None:  # drawn once for all of this rank's sequences in the estimate
            shape = (self.batch_size, Y.size(1))
            uniforms = keyed_uniforms(self.seed, LABELS, self.iter_num, shape)
            self.uniforms = uniforms[self.rank::self.world_size].to(Y.device)
        return dict(uniforms=self.uniforms[rows])

    def add(self, loss_hat, predictions):
        self.estimator.add(loss_hat * self.weight, predictions, retain_graph=True)

    def diagonal(self):
        estimator, self.estimator = self.estimator, None
        return estimator.estimate(self.weight)


def keep_buffers():
    """Let a compiled forward be differentiated twice, though by default its first backward overwrites its buffers.

    Call it before anything is compiled. PyTorch's compile cache ignores this switch, so a tag keeps the code apart.
    """
    import torch._functorch.config
    torch._functorch.config.donated_buffer = False
    torch.compiler.config.cache_key_tag = 'donated_buffer=False'


class EmpiricalFisherHook(GNBHook):
    """The ablation E-F+clip: Gauss-Newton-Bartlett with the true labels instead of sampled ones."""

    def second_labels(self, Y, rows):
        return dict(labels_hat=Y)


# Limit on attention weights and logits in one Hessian-vector product, about ten bytes each
PRODUCT_SIZE = 2 ** 30


def rows_at_once(config, rows, T, micro_batch, lean):
    """Return how many of `rows` sequences of T tokens one Hessian-vector product takes: at most a micro-batch, within
    PRODUCT_SIZE, and a divisor of `rows`, because a second size would be compiled again."""
    most = max(1, min(micro_batch, PRODUCT_SIZE // product_size(config, T, lean)))
    return max(n for n in range(1, most + 1) if rows % n == 0)


def product_size(config, T, lean):
    """Return the number of attention weights and logits in a Hessian-vector product of a sequence of T tokens. `lean`
    products, compiled and in bfloat16, keep about a quarter of the logits' bytes."""
    return T * (config.n_layer * config.n_head * T + (1 if lean else 4) * config.vocab_size)


class HutchinsonHook(HessianHook):
    """Hutchinson's estimator (Algorithm 1): Hessian-vector products of the model's own forward."""

    hessian_products = True
    # Forward-over-reverse takes the 3 matmuls of forward and backward and two tangents of each, without the unused
    # gradient of the weight: 3 + 6 − 1 = 8.
    cost = 8 / 3
    rademacher = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.params = [p for p in parameters(self.optimizer) if p.requires_grad]
        index = {p: i for i, p in enumerate(self.params)}
        # A tied parameter has several names. A module that is used twice is listed once.
        self.names = [(name, index[p]) for prefix, module in self.model.named_modules()
                      for name, p in module.named_parameters(prefix, recurse=False) if p in index]
        self.product = self.curvature_product
        if self.compile:
            # PyTorch 2.11 fails to compile this for varying shapes; rows_at_once makes them equal.
            self.product = torch.compile(self.product, dynamic=False)
        dtype = getattr(self.autocast, 'fast_dtype', None)
        self.lean = self.compile and dtype == torch.bfloat16
        if dtype == torch.float16:
            # The sizes of gradients and their derivatives along u differ too much for float16 at any loss scale.
            self.autocast = contextlib.nullcontext()

    def forward(self, values, *args):
        """Call the model with the parameters' `values`. It gets copies of `args` and buffers, because torch.func lets
        it change only new tensors. So an estimate leaves the model's own buffers unchanged."""
        tensors = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        tensors.update((name, values[i]) for name, i in self.names)
        return functional_call(self.model, tensors, tuple(arg.clone() for arg in args), tie_weights=False)

    def curvature_product(self, X, Y, u):
        """Return ∇²L·u, with L the mean loss on sequences X and Y (B, T) and u tensors like `params`."""
        def loss(values):
            return self.forward(values, X, Y)[1]

        with sdpa_kernel(SDPBackend.MATH):  # flash attention has no second derivative
            return hessian_vector_product(loss, [p.detach() for p in self.params], u)

    def start(self, iter_num, loss_scale=1.0):
        self.sequences, self.generator = [], torch.Generator(self.params[0].device)
        self.generator.manual_seed(keyed_seed(self.seed, VECTORS, iter_num))
        return super().start(iter_num)

    def labels(self, X, Y, rows):
        if n := self.count(rows):
            self.sequences.append((X[:n].clone(), Y[:n]))  # the forward may mask Y, and X is a copy
        return {}

    def diagonal(self):
        estimator = Hutchinson(self.params, self.generator, self.rademacher)
        X, Y = (torch.cat(parts) for parts in zip(*self.sequences))
        n = rows_at_once(self.model.config, *X.shape, max(len(x) for x, _ in self.sequences), self.lean)
        for x, y in zip(X.split(n), Y.split(n)):
            with self.autocast:
                product = self.product(x, y, estimator.u)
            # Predictions are the weights, as in the loss. The model's forward has masked targets in place.
            estimator.add(product, int((y >= 0).sum()) / y.size(1))
            del product  # frees the memory for the next one
        estimates = dict(zip(self.params, estimator.estimate()))
        return [estimates.get(p) for p in parameters(self.optimizer)]


class AdaHessianHook(HutchinsonHook):
    """Hutchinson's estimator with AdaHessian's u, uniform on {−1, 1}."""

    rademacher = True
