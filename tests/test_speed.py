"""What is fast equals what is plain: oneDNN's products, the head with its loss, the updates in parts and compiled."""

import copy
import weakref

import pytest
import torch
import torch._functorch.config
from conftest import needs_compiler
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import loss as ops
from model import GPT, GPTConfig
from optimizers import SETTINGS, build_hessian_hook, build_optimizer
from runtime.distributed import World
from sophia import Sophia, hessian_vector_product, in_parts

devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='this PyTorch has no oneDNN')


@pytest.fixture(autouse=True)
def full_precision():
    """No TF32 on a GPU, which scripts that other tests run allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def switch(monkeypatch):
    """A function that switches between plain PyTorch ('rows'), and the ways for CPU with oneDNN for all products
    ('convolutions'), for those without gradients ('products') or for none ('classes'), whatever this processor has."""
    def switch(way):
        monkeypatch.setattr(ops, 'FOR_CPU', way != 'rows')
        monkeypatch.setattr(ops, 'ONEDNN', way in ('convolutions', 'products'))
        monkeypatch.setattr(ops, 'AVX512', way == 'convolutions')
    return switch


def tiny(bias=False):
    """A model whose layers get enough numbers in `batch` for oneDNN's convolution."""
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


def test_parts_hold_every_entry_once():
    lists = [[torch.zeros(7, 3), torch.zeros(()), torch.zeros(4)], [torch.zeros(7, 3), torch.zeros(()), torch.zeros(4)]]
    parts = list(in_parts(*lists, size=5))
    assert [part[0][0].numel() for part in parts] == [5, 5, 5, 5, 1, 1, 4]
    for tensors, other in parts:
        tensors[0].add_(1)
        other[0].add_(2)
    assert all((t == i + 1).all() for i, tensors in enumerate(lists) for t in tensors)
    transposed = [torch.zeros(3, 7).t()]
    assert [[len(ts) for ts in part] for part in in_parts(transposed * 5, transposed * 5, together=42)] == [
        [2, 2], [2, 2], [1, 1]]


@needs_compiler
@pytest.mark.parametrize('variant', [{}, dict(squared=True), dict(clipping='normalize'),
                                     dict(clipping='none', eps=1e-3)])
@devices
def test_the_compiled_update_equals_the_plain_one(variant, device):
    torch.compiler.reset()  # of one function PyTorch compiles eight graphs, and then no more
    torch.manual_seed(0)
    shapes = (40, 9), (17,), ()
    start = [torch.randn(s, device=device) for s in shapes]
    optimizers = [Sophia([{'params': [torch.nn.Parameter(t.clone()) for t in start[:2]]},
                          {'params': [torch.nn.Parameter(start[2].clone())], 'weight_decay': 0.0}],
                         lr=1e-2, compile=compile, **variant) for compile in (False, True)]
    for step in range(4):
        gradients, estimates = ([torch.randn(s, device=device) for s in shapes] for _ in range(2))
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group['params']]
            for p, g in zip(params, gradients):
                p.grad = g.clone()
            optimizer.clip_coef = torch.tensor(0.3, device=device) if step > 1 else None
            for group in optimizer.param_groups:
                group['lr'] = 1e-2 / (step + 1)
            if step % 2 == 0 and variant.get('clipping') != 'normalize':
                optimizer.update_hessian([e.clone() for e in estimates])
            optimizer.step()
    plain, compiled = ([t for group in o.param_groups for p in group['params']
                        for t in (p.detach(), *o.state[p].values())] for o in optimizers)
    # On CUDA compiled code divides approximately.
    assert len(plain) == len(compiled) and error(plain, compiled) < (1e-6 if device == 'cpu' else 1e-5)
    assert copy.deepcopy(optimizers[1]).compile


def test_only_sophia_has_an_update_to_compile():
    params = [torch.nn.Parameter(torch.zeros(2))]
    for name in SETTINGS:
        optimizer = build_optimizer(name, params, lr=1e-3, compile=True)
        assert getattr(optimizer, 'compile', None) is (True if isinstance(optimizer, Sophia) else None)


# ----------------------------------------------------------------------------------------------------------------------
# Products by oneDNN, and the head with its loss


@needs_onednn
@pytest.mark.parametrize('threads', [1, 2])
def test_linear_layers_go_through_onednn(threads, switch):
    """Equal to F.linear, with the first and second derivatives; contiguous; and indeed another product than MKL's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        layer, x = ops.Linear(96, 160), torch.randn(4, 80, 96, requires_grad=True)
        results = []
        for way in ('rows', 'convolutions'):
            switch(way)
            y = layer(x)
            assert y.is_contiguous()
            first = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, *layer.parameters()))
            results.append([y.detach(), *(g.detach() for g in first), *second])
        with torch.profiler.profile() as profile:
            layer(x)
    finally:
        torch.set_num_threads(before)
    assert error(*results) < 5e-6
    assert 'aten::mkldnn_convolution' in {event.name for event in profile.events()}


@needs_onednn
def test_few_tokens_take_the_plain_product(switch):
    """As sampling does with a KV cache: below 20,481 numbers PyTorch's convolution is a slow one."""
    switch('convolutions')
    with torch.profiler.profile() as profile:
        ops.Linear(64, 96)(torch.randn(320, 64))
    assert not any('conv' in event.name for event in profile.events())


@needs_onednn
@pytest.mark.parametrize('way, layer, head', [('convolutions', 1, 3), ('products', 0, 2), ('classes', 0, 0)])
def test_where_onednn_computes(switch, way, layer, head):
    """Without AVX-512 only the head, and not its product over the classes, which is a convolution's gradient."""
    switch(way)
    model, targets = tiny(), batch()[1]
    x, weight = torch.randn(384, 64), model.lm_head.weight.detach()

    def convolutions(function):
        with torch.profiler.profile() as profile:
            function()
        return sum(event.name in ('aten::convolution', 'aten::convolution_backward') for event in profile.events())

    assert convolutions(lambda: model.transformer.h[0].mlp.c_fc(x)) == layer
    assert convolutions(lambda: ops.head_loss(x, weight, targets.flatten(), x.new_empty(0), True, False)) == head


def labels(kind, targets):
    uniforms = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1))
    return {'none': None, 'all rows': uniforms, 'first rows': uniforms[:2], 'given': targets[:3].roll(1, 0)}[kind]


def both_gradients(model, idx, targets, labels_hat, return_logits=False):
    """Losses, and the gradients of both, as the Gauss-Newton-Bartlett hook takes them."""
    params = list(model.parameters())
    _, loss, *hat = model(idx, targets, labels_hat, return_logits=return_logits)
    gradients = [g for h in hat for g in torch.autograd.grad(h * 0.01, params, retain_graph=True)]
    return [loss.detach(), *(h.detach() for h in hat), *gradients, *torch.autograd.grad(loss / 3, params)]


@pytest.fixture
def two_backwards():
    """Lets a compiled forward be gone back through twice, as World.wrap does; forgets what was compiled before."""
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.fixture(params=[*(pytest.param(way, marks=needs_onednn) for way in ('convolutions', 'products')), 'classes',
                        'rows'])
def way(request, switch):
    """All of head_loss's: those for CPU in float32, and that for everything else."""
    switch(request.param)
    return request.param


@pytest.mark.parametrize('classes, entries, rows', [(2048, 2 ** 26, 8192), (80, 384 * 150, 150)])
@pytest.mark.parametrize('ignored', [0, 5])
@pytest.mark.parametrize('kind', ['none', 'all rows', 'first rows', 'given'])
def test_losses_and_gradients_equal_autograds(way, monkeypatch, kind, ignored, classes, entries, rows):
    monkeypatch.setattr(ops, 'CLASSES', classes)
    monkeypatch.setattr(ops, 'ENTRIES', entries)
    monkeypatch.setattr(ops, 'ROWS', rows)
    model, (idx, targets) = tiny(bias=kind == 'none'), batch()
    given = labels(kind, targets.clone())
    targets[1, :ignored] = targets[3, :ignored] = -1
    expected, found = (both_gradients(model, idx, targets, given, logits) for logits in (True, False))
    assert error(expected, found) < 5e-6
    with torch.no_grad():
        loss = model(idx, targets, return_logits=False)[1]
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6) and not loss.requires_grad


@pytest.mark.parametrize('dtype, compile', [(torch.bfloat16, False), (torch.float16, False),
                                            pytest.param(torch.bfloat16, True, marks=needs_compiler)])
@devices
def test_losses_and_gradients_in_sixteen_bits(two_backwards, monkeypatch, dtype, compile, device):
    """As near to those of float32 as autocast's own, and of the same types."""
    monkeypatch.setattr(ops, 'ROWS', 150)
    model, (idx, targets) = tiny().to(device), batch().to(device)
    with torch.no_grad():
        # Some targets are nearly certain: their gradient is a small difference of large numbers.
        targets[:, ::3] = model(idx, targets)[0].argmax(-1)[:, ::3]
    given = targets[:2].roll(1, 0)
    exact = both_gradients(model, idx, targets, given, return_logits=True)
    forward = World(device, 'gloo').wrap(model, model.transformer.h, compile)
    with torch.autocast(device, dtype):
        autocasts = both_gradients(model, idx, targets, given, return_logits=True)
        ours = both_gradients(forward, idx, targets, given)
    assert [t.dtype for t in ours] == [torch.float32] * len(ours)
    for e, a, o in zip(exact, autocasts, ours, strict=True):
        assert error([e], [o]) < max(1.5 * error([e], [a]), 1e-3)


def test_the_softmax_of_some_rows_is_gone_before_the_next_is_made(switch, monkeypatch):
    switch('rows')
    monkeypatch.setattr(ops, 'ROWS', 3)
    by_rows, made, left_over = ops.by_rows, [], []

    def watched(*args):
        left_over.append(sum(held() is not None for held in made))
        results = by_rows(*args)
        made.append(weakref.ref(results[-1]))  # its closure holds the softmax
        return results

    monkeypatch.setattr(ops, 'by_rows', watched)
    for gradients in (True, False):
        ops.head_loss(torch.randn(10, 4), torch.randn(6, 4), torch.arange(10) % 6, torch.rand(5), gradients, False)
    assert len(made) == 8 and not any(left_over)


def test_labels_drawn_part_by_part_follow_the_softmax(way, monkeypatch):
    monkeypatch.setattr(ops, 'CLASSES', 80)
    torch.manual_seed(0)
    x, weight, targets = torch.randn(1, 300).expand(4000, 300), 0.1 * torch.randn(200, 300), torch.zeros(4000).long()
    uniforms = torch.rand(4000)
    result = ops.head_loss(x, weight, targets, uniforms, True, False)
    logits = x[:1] @ weight.t()
    drawn = ops.sample_labels(logits.expand(4000, -1), uniforms)
    assert result[1].item() == pytest.approx(F.cross_entropy(logits.expand(4000, -1), drawn, reduction='sum').item())
    counts = torch.bincount(drawn, minlength=200) / 4000
    assert (counts - logits.softmax(-1)[0]).abs().max() < 0.03


@pytest.mark.parametrize('logit', [20.0, 60.0, 300.0])
def test_improbable_labels_have_finite_losses_and_right_gradients(way, logit):
    """The sums are relative to the label's own logit, which may be far below the largest."""
    x, weight = torch.full((2, 4), logit / 4), torch.zeros(3, 4)
    weight[0], weight[1] = 1.0, 0.5
    x.requires_grad_(), weight.requires_grad_()
    labels = torch.tensor([2, 0])
    loss = ops.head_loss(x, weight, labels, torch.empty(0), True, False)[0]
    expected = F.cross_entropy(F.linear(x, weight), labels)
    assert loss.item() == pytest.approx(expected.item())
    for ours, theirs in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight))):
        torch.testing.assert_close(ours, theirs)


def test_gradients_accumulate_over_losses_and_calls(way):
    """Two forward passes before two backward passes, and a graph that is gone through twice."""
    model, (idx, targets) = tiny(), batch()
    losses = [model(idx[rows], targets[rows], return_logits=False)[1] for rows in (slice(0, 2), slice(2, 4))]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (2 * model(idx[:2], targets[:2])[1] + model(idx[2:], targets[2:])[1]).backward()
    assert error([p.grad for p in model.parameters()], ours) < 5e-6


def test_lent_memory_goes_on_only_when_no_tensor_uses_it():
    like = torch.zeros(7, 11)
    first = ops.lent(like)
    row, at = first[3], first.data_ptr()
    del first
    assert ops.lent(like).data_ptr() != at
    del row
    taken = [ops.lent(like) for _ in range(2)]
    assert at in [t.data_ptr() for t in taken] and taken[0].data_ptr() != taken[1].data_ptr()
    assert taken[0].shape == like.shape and taken[0].is_contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Hessian-vector products


def loss_of(model):
    """The loss of PyTorch's own operations, as a function of the parameters; and these, and a u of their shapes."""
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()))
    torch.manual_seed(1)
    u = tuple(torch.randn_like(v) for v in values)

    def loss(values, idx, targets):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, values)), (idx, targets))[1]

    return loss, values, u, names


def product_of(model, idx, targets, u, names, function=None):
    """`GPT.hessian_vector_product`, or `function` in its place, as a list."""
    found = (function or model.hessian_vector_product)(idx, targets, dict(zip(names, u)))
    return [found[name] for name in names]


@pytest.mark.parametrize('classes, entries, rows', [(2048, 2 ** 26, 8192), (80, 2 * 384 * 150, 300)])
@pytest.mark.parametrize('ignored', [0, 5])
def test_hessian_vector_products_equal_the_plain_ones(way, monkeypatch, ignored, classes, entries, rows):
    """Without logits, which `head_hvp` keeps a part of at a time; more than one, and parts left over."""
    monkeypatch.setattr(ops, 'CLASSES', classes)
    monkeypatch.setattr(ops, 'ENTRIES', entries)
    monkeypatch.setattr(ops, 'ROWS', rows)
    model, (idx, targets) = tiny(bias=bool(ignored)), batch()
    targets[1, :ignored] = targets[3, :ignored] = -1
    loss, values, u, names = loss_of(model)
    expected = hessian_vector_product(lambda v: loss(v, idx, targets), values, u)
    assert error(expected, product_of(model, idx, targets, u, names)) < 1e-5
    assert all(p.grad is None for p in model.parameters())


@needs_onednn
def test_per_sample_gradients_equal_the_plain_ones(switch):
    (loss, values, *_), (idx, targets) = loss_of(tiny()), batch()
    results = []
    for way in ('rows', 'convolutions'):
        switch(way)
        results.append(vmap(grad(loss), (None, 0, 0))(values, idx[:, None], targets[:, None]))
    assert error(*results) < 1e-5


@pytest.mark.parametrize('dtype, compile', [(torch.float32, False), (torch.bfloat16, False),
                                            pytest.param(torch.float32, True, marks=needs_compiler),
                                            pytest.param(torch.bfloat16, True, marks=needs_compiler)])
@devices
def test_hessian_vector_products_in_sixteen_bits_and_compiled(switch, monkeypatch, dtype, compile, device):
    """As near to those of float32 as autocast's own, and of the same types."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    switch('rows')
    monkeypatch.setattr(ops, 'ROWS', 300)
    model, (idx, targets) = tiny().to(device), batch().to(device)
    with torch.no_grad():
        targets[:, ::3] = model(idx, targets)[0].argmax(-1)[:, ::3]
    loss, values, u, names = loss_of(model)
    exact = hessian_vector_product(lambda v: loss(v, idx, targets), values, u)
    model.compile_loss = compile
    function = torch.compile(model.hessian_vector_product) if compile else None
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        autocasts = hessian_vector_product(lambda v: loss(v, idx, targets), values, u)
        ours = product_of(model, idx, targets, u, names, function)
    assert [t.dtype for t in ours] == [torch.float32] * len(ours)
    for e, a, o in zip(exact, autocasts, ours, strict=True):
        assert error([e], [o]) < max(1.5 * error([e], [a]), 1e-5)
    # The product; and in it the softmax, of 150 rows and of those that are left.
    assert not compile or torch._dynamo.utils.counters['frames']['ok'] == 3


@pytest.mark.parametrize('logit', [20.0, 60.0, 300.0])
def test_products_of_improbable_labels(way, logit):
    x, weight = torch.full((2, 4), logit / 4), torch.zeros(3, 4)
    weight[0], weight[1] = 1.0, 0.5
    torch.manual_seed(0)
    dx, dweight, labels = torch.randn(2, 4), torch.randn(3, 4), torch.tensor([2, 0])
    gradient = grad(lambda x, weight: F.cross_entropy(F.linear(x, weight), labels), (0, 1))
    (expected, _), derivatives = torch.func.jvp(gradient, (x, weight), (dx, dweight))
    for ours, theirs in zip(ops.head_hvp(x, weight, labels, dx, dweight, False), (expected, *derivatives)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def train(model, name, steps, forward):
    """The losses of a run with an estimate at every fifth step."""
    optimizer = build_optimizer(name, model.parameter_groups(0.2), lr=1e-3)
    hook = build_hessian_hook(name, model, optimizer, interval=5, batch_size=3, seed=0, rank=0, world_size=1,
                              autocast=torch.enable_grad(), compile=False)
    generator, losses = torch.Generator().manual_seed(3), []
    for i in range(steps):
        hook.start(i)
        windows = torch.randint(0, 3, (4, 97), generator=generator).cumsum(1) % 384
        loss = hook.loss(forward, windows[:, :-1], windows[:, 1:])
        hook.backward()
        loss.backward()
        hook.finish(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize('name', ['adamw', 'sophiag', 'sophiah'])
def test_fifty_steps_have_the_losses_of_plain_pytorch(way, switch, monkeypatch, name):
    fast, model = tiny(), tiny()
    runs = [train(fast, name, 50, fast)]
    switch('rows')
    monkeypatch.setattr('sophia.in_parts', lambda *lists: [lists])
    runs.append(train(model, name, 50, lambda *args, return_logits: model(*args)))
    assert runs[0] == pytest.approx(runs[1], abs=2e-3) and runs[0][:5] == pytest.approx(runs[1][:5], abs=1e-5)
    assert runs[0][-1] < runs[0][0]


@needs_compiler
def test_a_compiled_model_gives_the_gradients_of_the_plain_one(way, two_backwards, monkeypatch):
    monkeypatch.setattr(ops, 'ROWS', 150)
    model, (idx, targets) = tiny(), batch()
    compiled = World('cpu', 'gloo').wrap(model, model.transformer.h, True)
    for kind in ('none', 'first rows', 'all rows'):
        given = labels(kind, targets)
        expected = both_gradients(model, idx, targets, given, return_logits=True)
        assert error(expected, both_gradients(compiled, idx, targets, given)) < 5e-6
