"""The fused head with its loss, compiled code: each against plain PyTorch."""

import copy
import weakref

import pytest
import torch
import torch._functorch.config
from conftest import needs_compiler
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import loss
from model import GPT, GPTConfig
from optimizers import OPTIMIZERS, SophiaSquared, SophiaUnclipped, build_hook, build_optimizer, parameter_groups
from runtime.distributed import World
from sophia import Sophia, hessian_vector_product

devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def full_precision():
    """No TF32 on a GPU, which scripts that other tests run allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    yield
    torch.set_float32_matmul_precision(before)
    loss.set_compile(False)


@pytest.fixture(params=['fused', 'chunked'])
def kernel(request, monkeypatch):
    """Each way to compute `head_loss`."""
    if request.param == 'chunked':
        monkeypatch.setattr(loss, 'is_fused', lambda lm_head: False)


def tiny(bias=False):
    """A model with its weights away from where they start, for the tokens of `batch`."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=96, vocab_size=384, n_layer=2, n_head=2, n_embd=64, bias=bias))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def batch():
    """Tokens and targets, (4, 96) each."""
    return torch.randint(0, 384, (2, 4, 96), generator=torch.Generator().manual_seed(2))


def error(xs, ys):
    """The largest relative error, in the ℓ2 norm of each tensor."""
    return max(((x - y).norm() / x.norm().clamp(min=1e-6)).item() for x, y in zip(xs, ys, strict=True))


def second_labels(kind, targets):
    """Arguments of `GPT.forward` for the second loss."""
    uniforms = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1))
    return {'none': {}, 'all rows': dict(uniforms=uniforms), 'first rows': dict(uniforms=uniforms[:2]),
            'given': dict(labels_hat=targets[:3].roll(1, 0))}[kind]


def plain_losses(model, idx, targets, labels_hat=None, uniforms=None):
    """The losses from the model's logits, by PyTorch's own operations."""
    logits = model(idx)[0].float()
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)]
    if uniforms is not None:
        labels_hat = loss.sample_categorical(logits[:len(uniforms)].detach().softmax(-1), uniforms)
    if labels_hat is not None:
        n = len(labels_hat)
        labels_hat = torch.where(targets[:n] >= 0, labels_hat, -1)
        losses.append(F.cross_entropy(logits[:n].flatten(0, 1), labels_hat.flatten(), ignore_index=-1, reduction='sum'))
    return losses


def both_gradients(model, losses):
    """Losses, and the gradients of both, as the Gauss-Newton-Bartlett hook takes them."""
    params, (mean, *hat) = list(model.parameters()), losses
    gradients = [g for h in hat for g in torch.autograd.grad(h * 0.01, params, retain_graph=True)]
    return [mean.detach(), *(h.detach() for h in hat), *gradients, *torch.autograd.grad(mean / 3, params)]


@pytest.fixture
def two_backwards():
    """Lets a compiled forward be gone back through twice, as World.wrap does; forgets what was compiled before."""
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.mark.parametrize('rows', [8192, 150])
@pytest.mark.parametrize('ignored', [0, 5])
@pytest.mark.parametrize('kind', ['none', 'all rows', 'first rows', 'given'])
def test_losses_and_gradients_equal_autograds(kernel, monkeypatch, kind, ignored, rows):
    monkeypatch.setattr(loss, 'CHUNK', rows)
    model, (idx, targets) = tiny(bias=kind == 'none'), batch()
    second = second_labels(kind, targets.clone())
    targets[1, :ignored] = targets[3, :ignored] = -1
    expected = both_gradients(model, plain_losses(model, idx, targets, **second))
    found = both_gradients(model, model(idx, targets, **second, return_logits=False)[1:])
    assert error(expected, found) < 5e-6
    with torch.no_grad():
        mean = model(idx, targets, return_logits=False)[1]
    assert mean.item() == pytest.approx(expected[0].item(), rel=1e-6) and not mean.requires_grad
    assert model(idx, targets)[1].item() == pytest.approx(expected[0].item(), rel=1e-6)


@pytest.mark.parametrize('dtype, compile', [(torch.bfloat16, False), (torch.float16, False),
                                            pytest.param(torch.bfloat16, True, marks=pytest.mark.gpu)])
@devices
def test_losses_and_gradients_in_sixteen_bits(two_backwards, monkeypatch, dtype, compile, device):
    """As near to those of float32 as autocast's own, and of the same types."""
    monkeypatch.setattr(loss, 'CHUNK', 150)
    model, (idx, targets) = tiny().to(device), batch().to(device)
    with torch.no_grad():
        # Some targets are nearly certain: their gradient is a small difference of large numbers.
        targets[:, ::3] = model(idx, targets)[0].argmax(-1)[:, ::3]
    second = dict(labels_hat=targets[:2].roll(1, 0))
    exact = both_gradients(model, plain_losses(model, idx, targets, **second))
    loss.set_compile(compile)
    forward = World(device, 'gloo').wrap(model, model.transformer.h, compile)
    with torch.autocast(device, dtype):
        autocasts = both_gradients(model, plain_losses(model, idx, targets, **second))
        ours = both_gradients(model, forward(idx, targets, **second, return_logits=False)[1:])
    assert [t.dtype for t in ours] == [torch.float32] * len(ours)
    for e, a, o in zip(exact, autocasts, ours, strict=True):
        assert error([e], [o]) < max(1.5 * error([e], [a]), 1e-3)


def fused(x, weight, targets, labels_hat=None, uniforms=None, gradients=True):
    empty = targets.new_empty(0)
    return loss.fused_head_loss(x, weight, targets, empty if labels_hat is None else labels_hat,
                                torch.empty(0) if uniforms is None else uniforms, gradients)


def test_the_softmax_of_some_rows_is_freed_before_the_next_is_made(monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK', 3)
    made, left_over = [], []

    def watched(*args):
        left_over.append(sum(held() is not None for held in made))
        results = loss.softmax_and_losses(*args)
        made.append(weakref.ref(results[-1]))
        return results

    monkeypatch.setattr(loss, 'softmax_fn', watched)
    for gradients in (True, False):
        fused(torch.randn(10, 4), torch.randn(6, 4), torch.arange(10) % 6, uniforms=torch.rand(5), gradients=gradients)
    assert len(made) == 8 and not any(left_over)


@pytest.mark.parametrize('classes', [200, 300])
def test_sampled_labels_follow_the_softmax(classes):
    """Some classes are all but impossible, and never come."""
    torch.manual_seed(0)
    weight = 0.1 * torch.randn(classes, 300)
    weight[::5] = -3
    x, targets, uniforms = torch.rand(1, 300).expand(4000, 300), torch.ones(4000).long(), torch.rand(4000)
    p = (x[:1] @ weight.t()).softmax(-1)
    drawn = loss.sample_categorical(p.expand(4000, -1), uniforms)
    result = fused(x.contiguous(), weight, targets, uniforms=uniforms)
    assert result[1].item() == pytest.approx(-p[0, drawn].log().sum().item(), rel=1e-4)
    counts = torch.bincount(drawn, minlength=classes) / 4000
    assert (counts - p[0]).abs().max() < 0.03 and counts[::5].sum() == 0


@pytest.mark.parametrize('logit', [20.0, 60.0, 300.0])
def test_improbable_labels_have_finite_losses_and_right_gradients(logit):
    """Of a label whose logit is far below the largest."""
    x, weight = torch.full((2, 4), logit / 4), torch.zeros(3, 4)
    weight[0], weight[1] = 1.0, 0.5
    x.requires_grad_(), weight.requires_grad_()
    labels = torch.tensor([2, 0])
    ours = fused(x, weight, labels)[0]
    expected = F.cross_entropy(F.linear(x, weight), labels)
    assert ours.item() == pytest.approx(expected.item())
    for a, b in zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(expected, (x, weight))):
        torch.testing.assert_close(a, b)


def test_gradients_accumulate_over_losses_and_calls(kernel):
    """Two forward passes before two backward passes, and a graph that is gone through twice."""
    model, (idx, targets) = tiny(), batch()
    (2 * model(idx[:2], targets[:2])[1] + model(idx[2:], targets[2:])[1]).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses = [model(idx[rows], targets[rows], return_logits=False)[1] for rows in (slice(0, 2), slice(2, 4))]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    assert error(expected, [p.grad for p in model.parameters()]) < 5e-6


def test_an_edited_loss_or_head_leaves_the_fused_operation(monkeypatch):
    head = torch.nn.Linear(4, 6, bias=False)
    assert loss.is_fused(head) and not loss.is_fused(torch.nn.Linear(4, 6))

    class Capped(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    assert not loss.is_fused(Capped(4, 6, bias=False))
    hooked = torch.nn.Linear(4, 6, bias=False)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    assert not loss.is_fused(hooked)
    hooked = torch.nn.Linear(4, 6, bias=False)
    hooked.register_full_backward_hook(lambda module, *gradients: None)
    assert not loss.is_fused(hooked)
    replaced = torch.nn.Linear(4, 6, bias=False)
    replaced.forward = lambda x: 2 * x @ replaced.weight.T
    assert not loss.is_fused(replaced)
    monkeypatch.setattr(loss, 'token_loss', lambda *args: F.cross_entropy(*args, reduction='none', label_smoothing=0.1))
    assert not loss.is_fused(head)


# ----------------------------------------------------------------------------------------------------------------------
# Hessian-vector products, compiled code, whole runs


def loss_of(model):
    """The loss of PyTorch's own operations, as a function of the parameters; and these, and a u of their shapes."""
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()))
    torch.manual_seed(1)
    u = tuple(torch.randn_like(v) for v in values)

    def mean_loss(values, idx, targets):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, values)), (idx, targets))[1]

    return mean_loss, values, u


def hook(model, name, optimizer=None, **options):
    optimizer = optimizer or build_optimizer(name, parameter_groups(model, 0.2), lr=1e-3)
    return build_hook(name, model, optimizer, **{'interval': 5, 'batch_size': 3, 'seed': 0, **options})


@pytest.mark.parametrize('dtype, compile', [(torch.float32, False), (torch.bfloat16, False),
                                            pytest.param(torch.float32, True, marks=needs_compiler)])
@devices
def test_hessian_vector_products(dtype, compile, device):
    """As near to those of float32 as autocast's own, and of the same types."""
    torch.compiler.reset()
    model, (idx, targets) = tiny().to(device), batch().to(device)
    mean_loss, values, u = loss_of(model)
    exact = hessian_vector_product(lambda v: mean_loss(v, idx, targets), values, u)
    estimator = hook(model, 'sophiah', compile=compile)
    names = [name for name, _ in model.named_parameters()]
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        product = estimator.product(idx, targets, [u[names.index(name)] for name in estimator.names])
    ours = dict(zip(estimator.names, product))
    assert [t.dtype for t in product] == [torch.float32] * len(product)
    assert error(exact, [ours[name] for name in names]) < (2e-5 if dtype == torch.float32 else 0.1)
    assert all(p.grad is None for p in model.parameters())


def train(model, name, steps, forward):
    """The losses of a run with an estimate at every fifth step."""
    optimizer = build_optimizer(name, parameter_groups(model, 0.2), lr=1e-3)
    estimator = hook(model, name, optimizer)
    generator, losses = torch.Generator().manual_seed(3), []
    for i in range(steps):
        estimator.start(i)
        sequences = torch.randint(0, 3, (4, 97), generator=generator).cumsum(1) % 384
        mean = estimator.forward(forward, sequences[:, :-1], sequences[:, 1:])
        estimator.backward()
        mean.backward()
        estimator.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


@pytest.mark.parametrize('name', ['adamw', 'sophiag', 'sophiah'])
def test_fifty_steps_have_the_losses_of_plain_pytorch(name):
    model, fast = tiny(), tiny()

    def plain(idx, targets, uniforms=None, return_logits=True):
        return None, *plain_losses(model, idx, targets, uniforms=uniforms)

    runs = [train(model, name, 50, plain)]
    runs.append(train(fast, name, 50, fast))
    assert runs[0] == pytest.approx(runs[1], abs=2e-3) and runs[0][:5] == pytest.approx(runs[1][:5], abs=1e-5)
    assert runs[0][-1] < runs[0][0]


@needs_compiler
def test_a_compiled_model_gives_the_gradients_of_the_plain_one(two_backwards, monkeypatch):
    monkeypatch.setattr(loss, 'CHUNK', 150)
    model, (idx, targets) = tiny(), batch()
    loss.set_compile(True)
    compiled = World('cpu', 'gloo').wrap(model, model.transformer.h, True)
    second = second_labels('first rows', targets)
    expected = both_gradients(model, plain_losses(model, idx, targets, **second))
    found = both_gradients(model, compiled(idx, targets, **second, return_logits=False)[1:])
    assert error(expected, found) < 5e-6


@needs_compiler
@pytest.mark.parametrize('cls, eps', [(Sophia, 1e-12), (SophiaSquared, 1e-12), (SophiaUnclipped, 1e-3)])
@devices
def test_the_compiled_update_equals_the_plain_one(cls, eps, device):
    torch.compiler.reset()  # of one function PyTorch compiles eight graphs, and then no more
    torch.manual_seed(0)
    shapes = (40, 9), (17,), ()
    start = [torch.randn(s, device=device) for s in shapes]
    optimizers = [cls([{'params': [torch.nn.Parameter(t.clone()) for t in start[:2]]},
                       {'params': [torch.nn.Parameter(start[2].clone())], 'weight_decay': 0.0}],
                      lr=1e-2, eps=eps, compile=compile) for compile in (False, True)]
    for step in range(4):
        gradients, estimates = ([torch.randn(s, device=device) for s in shapes] for _ in range(2))
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group['params']]
            for p, g in zip(params, gradients):
                p.grad = g.clone()
            for group in optimizer.param_groups:
                group['lr'] = 1e-2 / (step + 1)
            if step % 2 == 0:
                optimizer.update_hessian([e.clone() for e in estimates])
            optimizer.step()
    plain, compiled = ([t for group in o.param_groups for p in group['params']
                        for t in (p.detach(), *o.state[p].values())] for o in optimizers)
    # On CUDA compiled code divides approximately.
    assert len(plain) == len(compiled) and error(plain, compiled) < (1e-6 if device == 'cpu' else 1e-5)
    assert copy.deepcopy(optimizers[1]).compile


def test_only_sophia_has_an_update_to_compile():
    params = [torch.nn.Parameter(torch.zeros(2))]
    for name in (name for name, row in OPTIMIZERS.items() if not row.library):
        optimizer = build_optimizer(name, params, lr=1e-3, compile=True)
        assert getattr(optimizer, 'compile', None) is (True if isinstance(optimizer, Sophia) else None)
