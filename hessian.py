"""When, and on what, a Hessian is estimated: the hooks that train_step calls.

In each iteration train_step calls `start`; for each micro-batch `forward` and, outside of autocast, `backward`; then,
before the update, `finish`. Estimates are made at iterations 0, k, 2k, … of the first sequences of that iteration's own
mini-batch (Algorithm 3, lines 7 to 9), or of `fresh_sequences`, which train_step passes to `add_fresh` before it.
Everything random is a function of (seed, iteration).
"""

import contextlib
from abc import ABC, abstractmethod

import torch
import torch._functorch.config
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from loss import compute_dtype
from runtime.rng import LABELS, VECTORS, keyed_seed, keyed_uniforms
from sophia import GaussNewtonBartlett, Hutchinson, hessian_vector_product, parameters


class Hook(ABC):
    """What an optimizer needs of an iteration besides its gradient."""

    hessian_products = False  # whether estimates are Hessian-vector products, which need an unsharded eager model
    cost: dict  # FLOPs of an estimate by `hessian_sequences`, in forward and backward passes of the same sequences

    @classmethod
    def estimates(cls, interval, iterations):
        """How many estimates a run of `iterations` iterations makes."""
        return 0

    def fresh_sequences(self, iter_num):
        """How many sequences, over all ranks, iteration `iter_num` needs beyond its mini-batch, for `add_fresh`."""
        return 0

    @abstractmethod
    def start(self, iter_num):
        """Begins iteration `iter_num`; True when it estimates the Hessian."""

    def add_fresh(self, model, X, Y, loss_scale=1.0):
        """Estimates on some of `fresh_sequences`, X and Y (B, T) int64; called outside of autocast."""
        raise NotImplementedError

    def forward(self, model, X, Y):
        """Runs the model on a micro-batch, X and Y (B, T) int64; returns its mean loss.

        Loss and model are changed in loss.py and model.py: evaluation and Hutchinson's products do not pass here.
        """
        return model(X, Y, return_logits=False)[1]

    @abstractmethod
    def backward(self, loss_scale=1.0):
        """What the estimate needs of the forward just made; leaves the graph for the gradient of the loss."""

    @abstractmethod
    def finish(self, loss_scale=1.0):
        """Passes the estimate to the optimizer; FloatingPointError if it is not finite: none of it is used."""


class FirstOrder(Hook):
    """The hook of first-order optimizers: it estimates nothing."""

    cost = dict(own=0.0, fresh=0.0)

    def __init__(self, model, optimizer, **options):
        pass

    def start(self, iter_num):
        return False

    def backward(self, loss_scale=1.0):
        pass

    def finish(self, loss_scale=1.0):
        pass


class HessianHook(Hook):
    """Estimates at iterations 0, k, 2k, … on the first `batch_size` sequences of the mini-batch, or on as many others.

    Args:
        model: the plain GPT, neither compiled nor wrapped.
        optimizer: takes the estimates by `update_hessian`.
        seed, interval (k), batch_size (sequences over all ranks, a multiple of world_size).
        fresh: estimate on sequences that the gradient does not see; see `fresh_sequences`.
        rank, world_size: which share of the mini-batch passes through `forward` here ([rank::world_size]).
        accumulation_steps: in how many micro-batches.
        autocast: context manager for a forward outside of train_step's own.
        compile: whether to compile what the estimator runs by itself.
    """

    def __init__(self, model, optimizer, *, seed, interval, batch_size, fresh=False, rank=0, world_size=1,
                 accumulation_steps=1, autocast=None, compile=False):
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.interval, self.batch_size, self.fresh = interval, batch_size, fresh
        self.rank, self.world_size = rank, world_size
        self.accumulation_steps, self.compile = accumulation_steps, compile
        self.autocast = autocast or contextlib.nullcontext()
        self.rows_left = 0

    @staticmethod
    def is_due(iter_num, interval):
        """Whether to estimate at an iteration. Depends on its arguments only: the data loader asks ahead of the
        iteration, FLOP counts ask without a run."""
        return iter_num % interval == 0

    @classmethod
    def estimates(cls, interval, iterations):
        return sum(cls.is_due(i, interval) for i in range(iterations))

    def fresh_sequences(self, iter_num):
        return self.batch_size if self.fresh and self.is_due(iter_num, self.interval) else 0

    def start(self, iter_num):
        self.iter_num = iter_num
        # If iteration 0 was skipped, the first that is not estimates instead, on its own mini-batch (the loader sends
        # no fresh sequences then): steps without any h are sign steps.
        self.due = self.is_due(iter_num, self.interval) or not any(self.optimizer.state.values())
        self.rows_left = self.batch_size // self.world_size if self.due else 0
        self.rows_counted = 0
        return self.due

    def add_fresh(self, model, X, Y, loss_scale=1.0):
        with self.autocast:
            self.forward(model, X, Y)
        self.backward(loss_scale)

    def count_rows(self, X):
        """How many of the micro-batch's first rows belong to the estimate; they are counted off."""
        n = min(self.rows_left, X.size(0))
        self.rows_left -= n
        self.rows_counted += n
        return n


class GNBHook(HessianHook):
    """Gauss-Newton-Bartlett (Algorithm 2), sharing its forward with the gradient: one forward, two backwards."""

    cost = dict(own=2 / 3, fresh=1.0)

    def __init__(self, *args, compile=False, **kwargs):
        super().__init__(*args, compile=compile, **kwargs)
        if compile:  # two backward passes through one compiled forward need its buffers twice
            torch._functorch.config.donated_buffer = False

    def start(self, iter_num):
        self.loss_hat = self.uniforms = self.estimator = None  # clears what a skipped iteration left
        if super().start(iter_num):
            self.estimator = GaussNewtonBartlett(self.optimizer)
        return self.due

    def forward(self, model, X, Y):
        counted_before, n = self.rows_counted, self.count_rows(X)
        if n == 0:
            return super().forward(model, X, Y)
        _, loss, self.loss_hat = model(X, Y, **self.labels(Y, counted_before, n), return_logits=False)
        self.predictions = (Y[:n] >= 0).float().sum()  # a float: scripts/plan.py takes those of fake tensors for 1
        if counted_before == 0:
            # loss_hat is a sum. Weighted like the training loss, its gradient fits float16 where that one does;
            # `estimate` divides by the weight again.
            self.share = 1 / (self.accumulation_steps * Y.numel())
        return loss

    def labels(self, Y, first, n):
        """What the forward draws ŷ of the first n rows with, `first` rows having been counted before."""
        if self.uniforms is None:
            shape = (self.batch_size, Y.size(1))
            uniforms = keyed_uniforms(self.seed, LABELS, self.iter_num, shape)[self.rank::self.world_size]
            self.uniforms = uniforms.to(Y.device)
        return dict(uniforms=self.uniforms[first:first + n])

    def backward(self, loss_scale=1.0):
        if self.loss_hat is not None:
            self.estimator.add(self.loss_hat * (loss_scale * self.share), self.predictions, retain_graph=True)
            self.loss_hat = None

    def finish(self, loss_scale=1.0):
        if self.due:
            estimator, self.estimator = self.estimator, None
            # Under loss scaling overflows are normal.
            self.optimizer.update_hessian(estimator.estimate(loss_scale * self.share),
                                          nonfinite='skip' if loss_scale != 1 else 'raise')


class EmpiricalFisherHook(GNBHook):
    """The ablation E-F+clip: Gauss-Newton-Bartlett with the true labels instead of sampled ones."""

    def labels(self, Y, first, n):
        return dict(labels_hat=Y[:n].clamp(min=0))  # where Y is -1 no label counts


# Numbers that one Hessian-vector product may have of attention weights and logits. Some ten bytes are kept of each
# until its end, so that a product takes about the memory that a micro-batch of training does.
PRODUCT_SIZE = 2 ** 30


def rows_at_once(config, rows, T, micro_batch):
    """How many of `rows` sequences of T tokens a Hessian-vector product of a GPT takes at a time.

    At most a micro-batch, and no more than PRODUCT_SIZE allows; all parts are equal, as anything else would be
    compiled again.
    """
    size = T * (config.n_layer * config.n_head * T + 4 * config.vocab_size)
    most = max(1, min(micro_batch, PRODUCT_SIZE // size))
    return max(n for n in range(1, most + 1) if rows % n == 0)


class HutchinsonHook(HessianHook):
    """Hutchinson's estimator (Algorithm 1): Hessian-vector products of the model's own forward."""

    hessian_products = True
    # Forward over reverse: each of a gradient's three matmuls has two tangents, and the gradient itself of the weight
    # is not needed: 3 + 6 − 1 = 8.
    cost = dict(own=8 / 3, fresh=8 / 3)
    rademacher = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        name_of = {p: name for name, p in self.model.named_parameters()}
        self.params = [p for p in parameters(self.optimizer) if p.requires_grad]
        self.names = [name_of[p] for p in self.params]
        self.product = self.curvature_product
        if self.compile:
            # dynamic=False: PyTorch 2.11 fails to compile this for varying shapes; rows_at_once gives one.
            self.product = torch.compile(self.product, dynamic=False)
        with self.autocast:
            half = compute_dtype(self.params[0]) == torch.float16
        if half:
            # Gradients and their derivatives along u differ too much in size for float16, whatever the loss scale.
            self.autocast = contextlib.nullcontext()

    def curvature_product(self, X, Y, u):
        """∇²L·u of the mean loss L of some sequences, X and Y (B, T); u: tensors like `params`."""
        def loss(values):
            return functional_call(self.model, dict(zip(self.names, values)), (X, Y))[1]

        with sdpa_kernel(SDPBackend.MATH):  # flash attention has no derivative of its derivative
            return hessian_vector_product(loss, [p.detach() for p in self.params], u)

    def start(self, iter_num):
        self.rows = []
        return super().start(iter_num)

    def backward(self, loss_scale=1.0):
        pass

    def keep_rows(self, X, Y):
        n = self.count_rows(X)
        self.rows.append((X[:n], Y[:n]))

    def add_fresh(self, model, X, Y, loss_scale=1.0):
        self.keep_rows(X, Y)

    def forward(self, model, X, Y):
        if self.rows_left:
            self.keep_rows(X, Y)
        return super().forward(model, X, Y)

    def finish(self, loss_scale=1.0):
        if not self.due:
            return
        generator = torch.Generator(self.params[0].device)
        generator.manual_seed(keyed_seed(self.seed, VECTORS, self.iter_num))
        estimator = Hutchinson(self.params, generator, self.rademacher)
        X, Y = (torch.cat(parts) for parts in zip(*self.rows))
        n = rows_at_once(self.model.config, *X.shape, max(len(x) for x, _ in self.rows))
        for x, y in zip(X.split(n), Y.split(n)):
            with self.autocast:
                product = self.product(x, y, estimator.u)
            estimator.add(product, n)
            del product  # frees the memory for the next one
        self.rows = []
        estimates = dict(zip(self.params, estimator.estimate()))
        self.optimizer.update_hessian([estimates.get(p) for p in parameters(self.optimizer)], nonfinite='raise')


class AdaHessianHook(HutchinsonHook):
    """AdaHessian's own choice of u, uniform on {−1, 1}."""

    rademacher = True
