"""hessian.py: the estimates that training makes, on a GPT, against the explicit Hessian and Gauss-Newton matrix."""

import copy

import pytest
import torch
import torch._functorch.config
from conftest import needs_compiler, random_gpt
from reference import double_precision, flat  # noqa: F401 - for every test here
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessian
from hessian import fit_parts, rows_at_once
from loss import Losses
from model import GPT, SIZES, GPTConfig
from optimizers import build_optimizer, row
from runtime.optim import parameters
from runtime.rng import VECTORS, keyed_seed
from sophia import Hutchinson


def explicit_hessian(loss_fn, params):
    """The whole Hessian (n, n) by double backward, a row at a time."""
    gradient = torch.autograd.grad(loss_fn(params), params, create_graph=True)
    n = sum(p.numel() for p in params)
    rows = [g.flatten()[i] for g in gradient for i in range(g.numel())]
    return torch.stack([flat(torch.autograd.grad(row, params, retain_graph=True, materialize_grads=True))
                        for row in rows]).view(n, n)


@pytest.fixture(scope='module')
def gpt():
    """(a GPT of about 900 parameters, 4 sequences, its loss as a function of its parameters, the Hessian of this)."""
    torch.set_default_dtype(torch.float64)
    model = random_gpt(0.2, seed=3, block_size=4, vocab_size=16, n_layer=1, n_head=2, n_embd=8)
    idx = torch.randint(16, (4, 5))
    names = [name for name, _ in model.named_parameters()]

    def loss_fn(values):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, values)), (idx[:, :-1], idx[:, 1:]))[1]

    return model, idx, loss_fn, explicit_hessian(loss_fn, list(model.parameters()))


def make_hook(model, name, params=None, **options):
    """train.py's hook, which estimates in every iteration on four sequences. With β2 = 0 the state is the estimate."""
    params = params or [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(name, params, lr=0.0, beta2=0.0, weight_decay=0.0)
    return row(name).hook(model, optimizer, **{'interval': 1, 'batch_size': 4, 'seed': 7, **options})


def iteration(hook, X, Y, micro_batch=4, number=0, **scale):
    """The calls of an iteration of train_step: one forward, two backward passes."""
    hook.start(number, **scale)
    for rows in hook.split(len(X), micro_batch):
        x, y = X[rows], Y[rows].clone()
        _, loss, *second = Losses(hook.model)(x, y, **hook.labels(x, y, rows))
        if second:
            hook.add(*second)
        loss.backward()
    hook.model.zero_grad()
    return hook.update() if hook.due else ''


def estimates(model, idx, name, iterations=1, micro_batch=4, **options):
    """The estimates of several iterations on the same mini-batch, (iterations, n)."""
    hook, samples = make_hook(model, name, **options), []
    for i in range(iterations):
        iteration(hook, idx[:, :-1], idx[:, 1:], micro_batch, i)
        samples.append(flat(hook.optimizer.state[p]['hessian'] for p in parameters(hook.optimizer)))
    return torch.stack(samples)


def test_gauss_newton_bartlett_is_unbiased(gpt):
    """Sampled labels, two micro-batches."""
    model, idx, _, _ = gpt
    names = [name for name, _ in model.named_parameters()]
    params = tuple(p.detach() for p in model.parameters())

    def logits(params):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, params)), (idx[:, :-1],))[0].flatten(0, 1)

    p = logits(params).softmax(-1)
    S = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    exact = [torch.einsum('bv...,bvw,bw...->...', J, S, J) / len(p) for J in torch.func.jacrev(logits)(params)]
    samples = estimates(model, idx, 'sophiag', 300, micro_batch=2)
    z = (samples.mean(0) - flat(exact)) / (samples.std(0) / 300 ** 0.5).clamp(min=1e-12)
    assert (samples >= 0).all() and z.abs().max() < 6 and z.square().mean() < 1.5
    assert samples.sum(1).mean() == pytest.approx(flat(exact).sum().item(), rel=0.05)


def test_empirical_fisher_is_the_squared_gradient(gpt):
    """With the true labels and the whole mini-batch ĝ is the gradient: ĥ = B·g⊙g, unclipped."""
    model, idx, loss_fn, _ = gpt
    gradient = torch.func.grad(loss_fn)(tuple(p.detach() for p in model.parameters()))
    torch.testing.assert_close(estimates(model, idx, 'ef_clip', micro_batch=2)[0], 16 * flat(gradient) ** 2)


def test_frozen_parameters_take_no_part(gpt, monkeypatch):
    """Hutchinson's estimate of the others belongs to their block of the Hessian."""
    model, idx, _, H = gpt
    model = copy.deepcopy(model)
    frozen = model.transformer.wpe.weight, model.transformer.h[0].ln_2.weight
    trained = flat(torch.full_like(p, all(p is not f for f in frozen)) for p in model.parameters()) > 0
    for p in frozen:
        p.requires_grad_(False)
    drawn, estimate = [], Hutchinson.estimate
    monkeypatch.setattr(Hutchinson, 'estimate', lambda self: drawn.append(flat(self.u)) or estimate(self))
    h_hat, = estimates(model, idx, 'sophiah')
    u, = drawn
    torch.testing.assert_close(h_hat, u * (H[trained][:, trained] @ u))


def test_a_second_call_of_an_estimator_draws_on(gpt):
    """A subclass that averages two estimates; the first is what it was."""
    model, idx = gpt[:2]
    hook = make_hook(model, 'sophiah')
    iteration(hook, idx[:, :-1], idx[:, 1:])
    one, two = (flat(hook.diagonal()) for _ in range(2))
    hook.start(0)
    hook.labels(idx[:, :-1], idx[:, 1:], slice(0, 4))
    assert not torch.equal(one, two) and torch.equal(flat(hook.diagonal()), estimates(model, idx, 'sophiah')[0])


@pytest.mark.parametrize('name', ['sophiag', 'sophiah', 'ef_clip'])
def test_the_micro_batch_does_not_change_the_estimate(gpt, name):
    """All 4 sequences as 3 + 1; the first 3 of them out of 2 + 2."""
    model, idx = gpt[:2]
    for size, micro_batch in ((4, 3), (3, 2)):
        whole, parts = (estimates(model, idx, name, 2, n, batch_size=size) for n in (4, micro_batch))
        torch.testing.assert_close(parts, whole)
        assert name == 'ef_clip' or not torch.equal(*whole)  # drawn anew in each iteration


@pytest.mark.parametrize(('compile', 'parts', 'sizes'), [(False, 1, [3, 1, 3, 2]), (True, 1, [3, 3, 3]),
                                                         (True, 2, [2, 2, 3, 2]), (False, 4, [1] * 4 + [3, 2])])
def test_the_second_backward_pass_is_over_the_estimate_only(gpt, monkeypatch, compile, parts, sizes):
    """Of nine sequences four are of the estimate. Compiled, a size of its own would cost more than it saves."""
    kept = []
    monkeypatch.setattr(hessian, 'keep_buffers', lambda: kept.append(True))
    hook = make_hook(gpt[0], 'sophiag', compile=compile, parts=parts, interval=2)
    assert bool(kept) == compile
    hook.start(0)
    slices = hook.split(9, 3)
    assert [len(range(9)[rows]) for rows in slices] == sizes
    assert sorted(i for rows in slices for i in range(9)[rows]) == [*range(9)]
    hook.start(1)
    assert [len(range(9)[rows]) for rows in hook.split(9, 3)] == [3, 3, 3]


@pytest.mark.parametrize('parts', [2, 4])
def test_the_number_of_ranks_does_not_change_an_estimate_by_parts(gpt, parts):
    """Four of six sequences; two ranks that do not know of each other each estimate from their own predictions."""
    model, idx, _, _ = gpt
    idx = torch.cat([idx, idx.flip(0)[:2]])
    whole, rank_0, rank_1 = (
        estimates(model, idx[rank::ranks], 'sophiag', parts=parts, rank=rank, world_size=ranks)[0]
        for rank, ranks in ((0, 1), (0, 2), (1, 2)))
    torch.testing.assert_close((rank_0 + rank_1) / 2, whole)
    assert not torch.equal(whole, estimates(model, idx, 'sophiag')[0])


@pytest.mark.parametrize('parts, batch_size, micro_batch, ranks, sharded, expected', [
    (1, 240, 15, 8, False, 1), (16, 240, 15, 1, False, 16), (16, 240, 15, 8, False, 16), (16, 240, 5, 8, False, 48),
    (16, 240, 15, 8, True, 30), (16, 16, 16, 1, False, 16), (3, 8, 8, 2, False, 4), (99, 8, 8, 2, False, 8),
    (2, 9, 9, 1, False, 3), (0, 0, 8, 1, False, 0), (2, 12, 12, 2, False, 2)])
def test_parts_fit_ranks_and_micro_batches(parts, batch_size, micro_batch, ranks, sharded, expected):
    assert fit_parts(parts, batch_size, micro_batch, ranks, sharded) == expected


class Masked(GPT):
    """Leaves out targets, of some sequences more than of others."""

    def forward(self, idx, targets=None):
        targets.masked_fill_(idx % 3 == 0, -1)
        return super().forward(idx, targets)


@pytest.mark.parametrize('name', ['sophiag', 'sophiah', 'ef_clip'])
def test_a_mask_in_the_forward_counts_for_the_estimate(gpt, name):
    model, idx, _, _ = gpt
    masked = copy.deepcopy(model)
    masked.__class__ = Masked
    hook = make_hook(model, name)
    iteration(hook, idx[:, :-1], idx[:, 1:].masked_fill(idx[:, :-1] % 3 == 0, -1))
    torch.testing.assert_close(estimates(masked, idx, name, micro_batch=1)[0],
                               flat(hook.optimizer.state[p]['hessian'] for p in model.parameters()))


def test_products_have_the_order_of_the_param_groups(gpt):
    """The optimizer has the parameters in another order than the model; some are of one shape."""
    model, idx, _, H = gpt
    params = list(model.parameters())
    shuffled = params[::-1]
    hook = make_hook(model, 'sophiah', shuffled)
    iteration(hook, idx[:, :-1], idx[:, 1:])
    u = flat(Hutchinson(shuffled, torch.Generator().manual_seed(keyed_seed(7, VECTORS, 0))).u[::-1])
    torch.testing.assert_close(flat(hook.optimizer.state[p]['hessian'] for p in params), u * (H @ u))


def test_a_product_in_parts_is_the_product(gpt, monkeypatch):
    """4 sequences, of which as many fit at a time: 4, 2 (3 would leave one over), 1."""
    model, idx = gpt[:2]
    one = hessian.product_size(model.config, idx.size(1) - 1, lean=False)
    sizes, product = [], hessian.HutchinsonHook.curvature_product
    monkeypatch.setattr(hessian.HutchinsonHook, 'curvature_product', lambda self, X, *args: (
        sizes.append(len(X)), product(self, X, *args))[1])
    found = []
    for fit in (4, 3, 0.5):
        monkeypatch.setattr(hessian, 'PRODUCT_SIZE', int(fit * one))
        found.append(estimates(model, idx, 'sophiah'))
    assert sizes == [4, 2, 2, 1, 1, 1, 1]
    torch.testing.assert_close(found, [found[0]] * 3)


@pytest.mark.parametrize('size, rows, T, micro_batch, expected, lean', [
    ('125M', 32, 1024, 32, 2, 4), ('125M', 30, 1024, 32, 3, 5), ('770M', 32, 1024, 12, 1, 1),
    ('30M', 32, 128, 12, 8, 8), ('30M', 32, 1024, 30, 4, 8), ('355M', 32, 1024, 15, 1, 2)])
def test_a_product_takes_as_many_sequences_as_fit(size, rows, T, micro_batch, expected, lean):
    """More where less is kept of each."""
    config = GPTConfig(**SIZES[size])
    assert [rows_at_once(config, rows, T, micro_batch, kept) for kept in (False, True)] == [expected, lean]


def test_hessian_vector_products_in_low_precision(gpt):
    """bfloat16 is close; float16 runs compute the product in float32."""
    model, idx = copy.deepcopy(gpt[0]).float(), gpt[1]
    torch.set_default_dtype(torch.float32)
    exact, = estimates(model, idx, 'sophiah')
    bfloat16 = torch.autocast('cpu', torch.bfloat16)
    rough, = estimates(model, idx, 'sophiah', autocast=bfloat16)
    assert 0 < (rough - exact).norm() < 0.05 * exact.norm()
    half, = estimates(model, idx, 'sophiah', autocast=torch.autocast('cpu', torch.float16))
    torch.testing.assert_close(half, exact, rtol=0, atol=0)
    assert [make_hook(model, 'sophiah', compile=compile, autocast=autocast).lean
            for compile in (False, True) for autocast in (None, bfloat16)] == [False, False, False, True]


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_an_estimate_that_is_not_finite_is_not_used(gpt, name):
    """Of derivatives that are NaN."""
    model = copy.deepcopy(gpt[0])
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan
    hook, idx = make_hook(model, name), gpt[1]
    if name == 'sophiag':  # At a loss scale above 1 the scale may be the reason.
        assert iteration(hook, idx[:, :-1], idx[:, 1:], loss_scale=2.0) == ''
    assert iteration(hook, idx[:, :-1], idx[:, 1:], loss_scale=2.0) == 'a Hessian estimate is not finite'
    assert not any(hook.optimizer.state.values())


@pytest.mark.parametrize('parts', [1, 2])
def test_an_estimate_in_float16_is_float32s(gpt, parts, capsys):
    """At a loss scale that fits; where it overflows the estimate is left out, and its own scale is halved."""
    model, idx = copy.deepcopy(gpt[0]).float(), gpt[1]
    exact, = estimates(model, idx, 'sophiag', parts=parts)
    hook, scales = make_hook(model, 'sophiag', parts=parts), []
    while not any(hook.optimizer.state.values()):
        with torch.autocast('cpu', torch.float16):
            assert iteration(hook, idx[:, :-1], idx[:, 1:], loss_scale=2.0 ** 30) == ''
        scales.append(hook.scale)
    assert scales == [2.0 ** (30 - i) for i in range(len(scales))] and 5 < len(scales) < 25
    assert capsys.readouterr().err.count('overflowed in float16 and was left out') == len(scales) - 1
    h = flat(hook.optimizer.state[p]['hessian'] for p in model.parameters())
    assert (h - exact).norm() < 0.02 * exact.norm()
    resumed = make_hook(model, 'sophiag', parts=parts)
    resumed.optimizer.load_state_dict(hook.optimizer.state_dict())
    resumed.start(1, 2.0 ** 30)
    assert resumed.scale == scales[-1]


def test_estimates_may_begin_later(gpt, monkeypatch):
    monkeypatch.setattr(hessian.HessianHook, 'is_due', classmethod(lambda cls, i, interval: i in (2, 9)))
    hook = make_hook(gpt[0], 'sophiag')
    assert [i for i in range(12) if hook.start(i)] == [2, 9]


class Counting(GPT):
    """A GPT whose forward passes in training change buffers, in place and by assignment."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer('seen', torch.zeros(()))
        self.register_buffer('mean', torch.zeros(()))

    def forward(self, idx, targets):
        logits, loss = super().forward(idx, targets)
        self.seen += 1
        self.mean = 0.9 * self.mean + logits.detach().mean()
        return logits, loss * self.seen


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_a_forward_may_change_buffers_and_an_estimate_changes_none(gpt, name):
    """Such as running means, or the biases that balance experts."""
    model, idx = Counting(gpt[0].config), gpt[1]
    model.load_state_dict(gpt[0].state_dict(), strict=False)
    hook = make_hook(model, name)
    assert iteration(hook, idx[:, :-1], idx[:, 1:]) == ''
    assert model.seen == 1 and model.mean == model(idx[:, :-1], idx[:, 1:])[0].mean()
    if name == 'sophiah':  # an estimate is of the loss of one more forward pass
        h = flat(hook.optimizer.state[p]['hessian'] for p in parameters(hook.optimizer))
        torch.testing.assert_close(h, 2 * estimates(gpt[0], idx, name)[0])


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_an_optimizer_needs_update_hessian_and_nothing_else(gpt, name):
    """One of another library, say: no state of a known name, no base class of sophia.py."""
    class Newton(torch.optim.SGD):
        def update_hessian(self, estimates):
            self.received = list(estimates)

    model, idx = gpt[:2]
    hook = row(name).hook(model, Newton(model.parameters(), lr=0.1), interval=10, batch_size=4, seed=7)
    iteration(hook, idx[:, :-1], idx[:, 1:])
    assert not hook.start(1)
    expected = make_hook(model, name)
    iteration(expected, idx[:, :-1], idx[:, 1:])
    h = [expected.optimizer.state[p]['hessian'] for p in model.parameters()]
    torch.testing.assert_close(hook.optimizer.received, h)


def test_a_compiled_product_is_the_product(gpt, monkeypatch):
    """With autograd's graph of it, but without the C++ compiler, which takes half a minute."""
    torch.compiler.reset()
    (model, idx), compiled, compile = gpt[:2], [], torch.compile
    monkeypatch.setattr(torch, 'compile', lambda f, **options: compiled.append(f) or compile(
        f, **options, backend='aot_eager'))
    torch.testing.assert_close(estimates(model, idx, 'sophiah', compile=True), estimates(model, idx, 'sophiah'))
    assert len(compiled) == 1


@needs_compiler
@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_compiled_code_of_a_run_with_one_backward_pass_is_not_used_for_two(tmp_path, monkeypatch, device):
    """Code of AdamW's run in PyTorch's cache overwrites buffers that Sophia-G's second backward reads."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    x, w = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device, requires_grad=True)
    exact, = torch.autograd.grad((x @ w).sin().sum(), w)
    with torch._functorch.config.patch(donated_buffer=True), torch.compiler.config.patch(cache_key_tag=''):
        for backwards in (1, 2):
            torch.compiler.reset()
            if backwards == 2:
                hessian.keep_buffers()
            loss = torch.compile(lambda x, w: (x @ w).sin().sum())(x, w)
            for _ in range(backwards):
                gradient, = torch.autograd.grad(loss, w, retain_graph=backwards == 2)
                torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
