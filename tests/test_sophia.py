"""sophia.py: Algorithms 1 to 3, each against an independent reference. Needs PyTorch and pytest only:

    pytest --noconftest tests/test_sophia.py
"""

import itertools
import shutil
import warnings

import pytest
import reference
import torch
import torch.distributed as dist
from reference import double_precision, flat, uniform  # noqa: F401 - for every test here
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributions import AffineTransform, Bernoulli, Categorical, Normal, Poisson, TransformedDistribution
from torch.nn import functional as F

import sophia
from sophia import GaussNewtonBartlett, Hutchinson, Sophia, gauss_newton_bartlett, hessian_vector_product, hutchinson

needs_compiler = pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='needs a C++ compiler')


@pytest.mark.parametrize('seed', range(3))
def test_update_rule(seed):
    """Random hyperparameters, two param groups, estimates of either sign at some of the steps, some of them None."""
    torch.manual_seed(seed)
    settings = [dict(lr=10 ** uniform(-4, -1), beta1=uniform(0, 0.99), beta2=uniform(0, 0.99),
                     gamma=10 ** uniform(-2, 1), eps=10 ** uniform(-12, -2), weight_decay=uniform(0, 0.5))
                for _ in range(2)]
    start = [torch.randn(shape) for shape in [(3, 4), (5,), (2, 2)]]
    group_of = [0, 0, 1]
    gradients = [[torch.randn(theta.shape) * 10 ** uniform(-3, 1) for theta in start] for _ in range(20)]
    estimates = [[0.5 + torch.randn(theta.shape) if t % 3 == 0 and (i, t) != (1, 6) else None
                  for i, theta in enumerate(start)] for t in range(20)]

    params = [torch.nn.Parameter(theta.clone()) for theta in start]
    groups = [{**{key: s[key] for key in ('lr', 'gamma', 'eps', 'weight_decay')}, 'betas': (s['beta1'], s['beta2']),
               'params': [p for p, of in zip(params, group_of) if of == g]} for g, s in enumerate(settings)]
    optimizer = Sophia(groups, lr=1.0)
    for t in range(20):
        if t % 3 == 0:
            optimizer.update_hessian(estimates[t])
        for p, g in zip(params, gradients[t]):
            p.grad = g.clone()
        optimizer.step()

    for i, p in enumerate(params):
        expected = reference.sophia(start[i], [g[i] for g in gradients], [e[i] for e in estimates],
                                    **settings[group_of[i]])
        found = p.detach(), optimizer.state[p]['exp_avg'], optimizer.state[p]['hessian']
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_unclipped_fraction_is_of_the_latest_step():
    p, q = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(1))
    optimizer = Sophia([p, q], lr=1.0, betas=(0, 0), gamma=0.5, weight_decay=0)
    assert optimizer.unclipped_fraction() is None
    optimizer.update_hessian([torch.tensor([1.0, 4.0, -1.0, 1.0]), torch.tensor([10.0])])
    p.grad, q.grad = torch.tensor([0.4, 5.0, 1e-3, 0.5]), torch.tensor([1.0])
    optimizer.step()
    assert optimizer.unclipped_fraction().item() == pytest.approx(3 / 5)  # one is at the bound
    torch.testing.assert_close(p.detach(), -torch.tensor([0.8, 1.0, 1.0, 1.0]))


def test_the_first_step_that_moves_without_an_estimate_warns():
    """Only that one, and not where a wrapper holds the same state, nor at a learning rate of 0."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Sophia([p], lr=0.0)
    p.grad = torch.ones(2)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', module='test_sophia')  # of the line that calls
        optimizer.step()
        optimizer.param_groups[0]['lr'] = 0.1
        optimizer.update_hessian([None])
        with pytest.raises(UserWarning, match='no update_hessian.. yet, or its estimates were 0'):
            optimizer.step()
        optimizer.step()
        resumed = Sophia([p], lr=0.1)
        optimizer.update_hessian([torch.ones(2)])
        resumed.load_state_dict(optimizer.state_dict())
        resumed.step()
        scheduled = Sophia([p], lr=0.1)
        torch.optim.lr_scheduler.LinearLR(scheduled)  # wraps `step`
        with pytest.raises(UserWarning, match='no update_hessian'):
            scheduled.step()
        wrapped, wrapper = Sophia([p], lr=0.1), Sophia([p], lr=0.1)
        wrapper.__dict__.update(wrapped.__dict__)  # as Lightning's
        wrapper.update_hessian([torch.ones(2)])
        wrapped.step()


@pytest.mark.filterwarnings('error:Sophia.step')
def test_a_group_whose_h_is_0_does_not_warn():
    """As of an adapter behind a matrix of zeros, if another group has an h."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Sophia([dict(params=[p]) for p in params], lr=0.1)
    optimizer.update_hessian([torch.zeros(2), torch.ones(2)])
    for p in params:
        p.grad = torch.ones(2)
    optimizer.step()


def test_the_defaults_are_the_papers_for_sophia_g():
    optimizer = Sophia([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert optimizer.defaults == dict(lr=1.0, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.2)
    assert not optimizer.compile


def test_a_state_is_complete_from_the_first_estimate_on():
    """torch.distributed.checkpoint cannot load a part of what a step makes."""
    model = torch.nn.Linear(3, 2)
    optimizer = Sophia(model.parameters(), lr=0.1)
    optimizer.update_hessian([torch.ones(2, 3), None])
    _, saved = get_state_dict(model, optimizer)
    assert {name: [*state] for name, state in saved['state'].items()} == {'weight': ['exp_avg', 'hessian']}
    assert optimizer.unclipped_fraction() == 1


@needs_compiler
def test_the_compiled_update_equals_the_plain_one():
    torch.compiler.reset()  # PyTorch compiles eight graphs of a function, and then no more
    used = sophia.compiled.cache_info()
    shapes = (40, 9), (17,), ()
    plain, compiled = (Sophia([{'params': [torch.nn.Parameter(torch.ones(s, dtype=torch.float32)) for s in shapes]}],
                              lr=1.0, compile=compile) for compile in (False, True))
    for step in range(4):
        gradients, estimates = ([torch.randn(s, dtype=torch.float32) for s in shapes] for _ in range(2))
        for optimizer in (plain, compiled):
            group, = optimizer.param_groups
            group['lr'] = 1e-2 / (step + 1)
            for p, g in zip(group['params'], gradients):
                p.grad = g.clone()
            if step % 2 == 0:
                optimizer.update_hessian(estimates)
            with torch.compiler.set_stance('fail_on_recompile' if step else 'default'):  # for another learning rate
                optimizer.step()
    found, expected = ([[p.detach(), *o.state[p].values()] for p in o.param_groups[0]['params']]
                       for o in (compiled, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert sophia.compiled.cache_info() != used


LABELS = torch.arange(8) % 5


def make_mlp(outputs):
    """A tiny network, its 8 inputs, and a function (parameters as a tuple) → (8, outputs)."""
    params = [torch.nn.Parameter(0.8 * torch.randn(shape)) for shape in [(3, 4), (4,), (4, outputs)]]
    x = torch.randn(8, 3)
    return params, x, lambda params, x: torch.tanh(x @ params[0] + params[1]) @ params[2]


def exact_gauss_newton(f, params, x, distribution):
    """diag(1/B Σ J S Jᵀ), S the Hessian of the negative log-likelihood in the outputs, for some fixed label."""
    params = tuple(p.detach() for p in params)
    total = [torch.zeros_like(p) for p in params]
    for x_b in x:
        out = f(params, x_b)
        y = distribution(out).sample()
        S = torch.func.hessian(lambda out, y: -distribution(out).log_prob(y).sum())(out, y)
        for sum_, J in zip(total, torch.func.jacrev(f)(params, x_b)):
            sum_ += torch.einsum('v...,vw,w...->...', J, S, J)
    return total, len(x)


def assert_mean_is(samples, expected):
    """The mean of `samples` (N, n) agrees with `expected` (n,) within its standard error, and that says something."""
    error = samples.std(0) / len(samples) ** 0.5
    z = (samples.mean(0) - expected) / error.clamp(min=1e-12)
    assert z.abs().max() < 5 and z.square().mean() < 2.5
    assert samples.sum(1).std() / len(samples) ** 0.5 < 0.05 * expected.sum().abs()


@pytest.mark.parametrize('by_parts', [False, True])
def test_the_expectation_over_all_labels_is_the_gauss_newton_diagonal(monkeypatch, by_parts):
    """Exactly, by summing over the labels of four predictions with their probabilities; parts of 1 and 3."""
    params, x, f = make_mlp(outputs=3)
    x, mean = x[:4], 0
    total, B = exact_gauss_newton(f, params, x, lambda out: Categorical(logits=out))
    probabilities = f(params, x).detach().softmax(-1)
    for labels in itertools.product(range(3), repeat=4):
        labels = torch.tensor(labels)
        parts = iter(labels.split([1, 3]))
        monkeypatch.setattr(Categorical, 'sample', lambda self, parts=parts: next(parts))
        h_hat = gauss_newton_bartlett((f(params, part) for part in x.split([1, 3])), params, by_parts=by_parts)
        mean = mean + probabilities[range(4), labels].prod() * flat(h_hat)
    torch.testing.assert_close(mean, flat(total) / B, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('scale', [0.1, 10])
def test_an_estimate_with_a_max_norm_is_of_the_clipped_gradient(scale):
    """In one part; by parts the factor comes from the sum of the estimate, whose expectation is the same."""
    params, x = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)], scale * torch.randn(7, 5)
    estimates = {}
    for by_parts, max_norm in itertools.product((False, True), (0, 0.5)):
        estimator = GaussNewtonBartlett(params, by_parts, max_norm)
        for part in x.split(4):
            estimator.add(8.0 * (part @ torch.cat(params)).sum(), len(part))
        estimates[by_parts, max_norm] = flat(estimator.estimate(8.0))
    g = x.mean(0)
    torch.testing.assert_close(estimates[False, 0.5], 7 * (g * (0.5 / g.norm()).clamp(max=1)).square())
    parts = estimates[True, 0]
    torch.testing.assert_close(estimates[True, 0.5], parts * (7 * 0.25 / parts.sum()).clamp(max=1))


@pytest.mark.parametrize('distribution', [
    lambda f: Normal(f, 1.0), lambda f: Bernoulli(logits=f), lambda f: Poisson(f.exp())],
    ids=['squared loss', 'Bernoulli', 'Poisson'])
def test_gauss_newton_bartlett_of_any_exponential_family(distribution):
    """Two outputs per example, and a loss that is the mean over all 16 of them: B = 16."""
    params, x, f = make_mlp(outputs=2)
    total, B = exact_gauss_newton(f, params, x, distribution)
    samples = torch.stack([flat(gauss_newton_bartlett(f(params, x), params, distribution)) for _ in range(800)])
    assert_mean_is(samples, flat(total) / (2 * B))


class Reparametrized(Normal):
    sample = Normal.rsample


def cached(mu, sigma):
    """A normal distribution that keeps its last sample, by which its log_prob would lose the gradient."""
    return TransformedDistribution(Normal(torch.zeros_like(mu), 1.0), [AffineTransform(mu, sigma, cache_size=1)])


@pytest.mark.parametrize('distribution', [Normal, Reparametrized, cached])
def test_labels_are_constants(distribution):
    """The Fisher information of (μ, σ) at (0, 1) is (1, 2). Outputs of two tensors are a list of one micro-batch."""
    mu, sigma = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.ones(()))
    outputs = [(mu.expand(64), sigma.expand(64))]
    samples = torch.stack([flat(gauss_newton_bartlett(outputs, [mu, sigma], lambda f: distribution(*f)))
                           for _ in range(600)])
    assert_mean_is(samples, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize('micro_batches', [(8,), (3, 5)])
def test_algorithm_2_with_given_labels(monkeypatch, micro_batches):
    """B counts the predictions of all micro-batches, and ĝ is squared once and not clipped: its norm is above 1."""
    x, W, labels = 10 * torch.randn(8, 3), torch.nn.Parameter(torch.randn(3, 5)), torch.randint(5, (8,))
    parts = iter(labels.split(micro_batches))
    monkeypatch.setattr(Categorical, 'sample', lambda self: next(parts))
    found, = gauss_newton_bartlett((part @ W for part in x.split(micro_batches)), [W])
    torch.testing.assert_close(found, reference.gauss_newton_bartlett(x, W.detach(), labels), rtol=1e-10, atol=0)
    assert found.sum() > 8


@pytest.mark.parametrize('dtype, used', [(torch.float16, torch.float32), (torch.bfloat16, torch.float32),
                                         (torch.float64, torch.float64)])
def test_labels_are_drawn_in_float32_at_least(dtype, used):
    """In float16 PyTorch's sampler draws labels of probability 0, and sums of losses overflow."""
    outputs, seen = torch.nn.Parameter(torch.zeros(8, 5, dtype=dtype)), []
    gauss_newton_bartlett(outputs, [outputs], lambda f: seen.append(f.dtype) or Categorical(logits=f))
    assert seen == [used]


def test_gauss_newton_bartlett_keeps_the_graph_if_asked_and_undoes_the_loss_scale():
    params, x, f = make_mlp(outputs=5)
    out = f(params, x)
    gauss_newton_bartlett(out, params, retain_graph=True)
    gauss_newton_bartlett(out, params)
    with pytest.raises(RuntimeError, match='retain_graph=True'):
        out.sum().backward()
    estimates = []
    for scale in (1.0, 1024.0):
        estimator = GaussNewtonBartlett(params)
        estimator.add(scale * F.cross_entropy(f(params, x), LABELS, reduction='sum'), 8)
        estimates.append(flat(estimator.estimate(scale)))
    torch.testing.assert_close(*estimates)
    estimator = GaussNewtonBartlett(params[1:2])
    for _ in range(3):
        estimator.add(1.5 * params[1].sum(), 0.5)  # predictions may be fractions
    assert estimator.estimate()[0].tolist() == pytest.approx([4.5 ** 2 / 1.5] * 4)


def indefinite_matrix(n):
    A = torch.randn(n, n)
    A = A + A.T
    A.diagonal().copy_(torch.linspace(-2, 2, n))
    return A


def test_an_estimator_makes_one_estimate():
    p = torch.nn.Parameter(torch.ones(3))
    for estimator, parts in (Hutchinson([p]), ([torch.ones(3)], 2)), (GaussNewtonBartlett([p]), (p.sum(), 2)):
        estimator.add(*parts)
        estimator.estimate()
        with pytest.raises(TypeError):
            estimator.add(*parts)


@pytest.mark.parametrize('options', [{}, dict(rademacher=True)])
def test_algorithm_1_is_unbiased_on_an_indefinite_quadratic(options):
    A, theta = indefinite_matrix(6), torch.nn.Parameter(torch.randn(6))
    u, = Hutchinson([theta], torch.Generator().manual_seed(1), **options).u
    generator = torch.Generator().manual_seed(1)
    samples = torch.stack([hutchinson(0.5 * theta @ A @ theta, [theta], generator, **options)[0]
                           for _ in range(1000)])
    torch.testing.assert_close(samples[0], reference.hutchinson(A, u), rtol=1e-10, atol=0)
    z = (samples.mean(0) - A.diagonal()) / (samples.std(0) / 1000 ** 0.5)
    assert z.abs().max() < 4.5
    assert (samples.mean(0)[[0, -1]] - torch.tensor([-2.0, 2.0])).abs().max() < 0.5


def test_hutchinson_averages_micro_batches_with_one_u():
    params, x, f = make_mlp(outputs=5)
    whole = hutchinson(F.cross_entropy(f(params, x), LABELS), params, torch.Generator().manual_seed(2))
    parts = hutchinson((F.cross_entropy(f(params, part), y) for part, y in zip(x.split(2), LABELS.split(2))), params,
                       torch.Generator().manual_seed(2))
    torch.testing.assert_close(parts, whole)


def test_estimators_take_the_optimizer_and_keep_its_order():
    """Two matrices of one shape, with the groups in another order than the model's."""
    params, x, f = make_mlp(outputs=5)
    optimizer = Sophia([dict(params=params[2:]), dict(params=params[:2])], lr=0.1)
    torch.manual_seed(4)
    expected = gauss_newton_bartlett(f(params, x), params)
    torch.manual_seed(4)
    optimizer.update_hessian(gauss_newton_bartlett(f(params, x), optimizer))
    for p, h_hat in zip(params, expected):
        torch.testing.assert_close(optimizer.state[p]['hessian'], 0.01 * h_hat)
    estimates = hutchinson(F.cross_entropy(f(params, x), LABELS), optimizer)
    assert [h.shape for h in estimates] == [p.shape for p in params[2:] + params[:2]]


def test_hessian_vector_product():
    """Forward over reverse is double backward."""
    params, x, f = make_mlp(outputs=5)
    values, u = tuple(p.detach() for p in params), [torch.randn_like(p) for p in params]

    def loss_fn(values):
        return F.cross_entropy(f(values, x), LABELS)

    product = hessian_vector_product(loss_fn, values, u)
    gradient = torch.autograd.grad(loss_fn(params), params, create_graph=True)
    torch.testing.assert_close(product, torch.autograd.grad(gradient, params, u))


def test_hutchinson_rejects_a_gradient_without_a_graph():
    """As a compiled module or an operation with a derivative of its own can return: PyTorch's error."""
    p, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    for params, i in ([p], 0), ([unused, p], 1):
        with pytest.raises(RuntimeError, match=f'element {i} of tensors does not require grad'):
            hutchinson((2.0 * p).sum() + unused.square().sum(), params)
    with pytest.raises(RuntimeError, match='the loss depends on none of the parameters'):
        hutchinson((2.0 * p).sum(), [unused])
    estimates = hutchinson((p ** 2).sum(), [p, unused], rademacher=True)
    torch.testing.assert_close(estimates, [torch.full((3,), 2.0), torch.zeros(2)])


def test_the_state_of_frozen_parameters_stays():
    """What is not trained may stay in the lists, quantized weights too. The estimates of the others are as without."""
    params, x, f = make_mlp(outputs=5)
    quantized = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    optimizer = Sophia([*params, quantized], lr=0.1)
    optimizer.update_hessian([*map(torch.ones_like, params), None])
    frozen = params[-1].requires_grad_(False)
    before = frozen.clone(), optimizer.state[frozen]['hessian'].clone()
    for estimate in (lambda of: gauss_newton_bartlett(f(params, x), of),
                     lambda of: hutchinson(F.cross_entropy(f(params, x), LABELS), of, rademacher=True)):
        found = []
        for of in optimizer, params[:-1]:
            torch.manual_seed(1)
            found.append(estimate(of))
        optimizer.update_hessian(found[0])
        assert found[0][2:] == [None, None] and flat(found[1]).any()
        assert all(map(torch.equal, found[0][:2], found[1]))
    F.cross_entropy(f(params, x), LABELS).backward()
    optimizer.step()
    torch.testing.assert_close((frozen, optimizer.state[frozen]['hessian']), before, rtol=0, atol=0)
    assert optimizer.unclipped_fraction() is not None


MISUSE = {  # what → (error, its words)
    'another model': (lambda m, x: gauss_newton_bartlett(m(x), [torch.nn.Parameter(torch.ones(2))]),
                      'depend on none of the parameters'),
    'a used generator': (lambda m, x: gauss_newton_bartlett(m(x), iter([])), 'generator .* was used before'),
    'one output': (lambda m, x: gauss_newton_bartlett(m(x)[:, :1], m.parameters()),
                   r'of shape \(8, 1\) are not logits .* its distribution'),
    'a regression': (lambda m, x: gauss_newton_bartlett(m(x)[:, 0], m.parameters()), r'of shape \(8,\) are not logits'),
    'loss and logits': (lambda m, x: gauss_newton_bartlett((m(x).mean(), m(x)), m.parameters()),
                        r'of shape \(\) are not logits'),
    'a dict': (lambda m, x: gauss_newton_bartlett(dict(logits=m(x)), m.parameters()), 'pass output.logits'),
    'a smaller estimate': (lambda m, x: Sophia(m.parameters(), lr=0.1).update_hessian([torch.ones(3), torch.ones(5)]),
                           r'an estimate of shape \(3,\) for a parameter of shape \(5, 3\)'),
    'too few': (lambda m, x: Sophia(m.parameters(), lr=0.1).update_hessian([torch.ones(5, 3)]), '1 estimates for 2'),
    'a bare tuple': (lambda m, x: gauss_newton_bartlett((m(x), m(x)), m.parameters(), lambda f: Normal(*f)),
                     r'a tuple is ambiguous; pass a list'),
    'no graph': (lambda m, x: gauss_newton_bartlett(m(x).detach(), m.parameters()), 'the outputs have no graph'),
    'a range': (lambda m, x: Sophia(m.parameters(), lr=0.1, eps=0.0), 'out of range: .* eps = 0.0'),
    # There ε is 0, and 0 / 0 would pass for a step.
    'float16': (lambda m, x: Sophia(m.half().parameters(), lr=0.1), 'float16 parameters are not supported'),
    'bfloat16': (lambda m, x: Sophia(m.bfloat16().parameters(), lr=0.1), 'keep float32 ones'),
}


@pytest.mark.parametrize('what', MISUSE)
@pytest.mark.filterwarnings('error:::test_sophia')
def test_misuse_is_named(what):
    """Each would be a wrong estimate or update without a word, or an error that does not say what is wrong."""
    use, words = MISUSE[what]
    with pytest.raises((TypeError, ValueError, RuntimeError, UserWarning), match=words):
        use(torch.nn.Linear(3, 5), torch.randn(8, 3))


def test_a_micro_batch_without_predictions_adds_nothing():
    model, x, keep = torch.nn.Linear(4, 2), torch.randn(2, 8, 4), torch.tensor([[True] * 8, [False] * 8])
    torch.manual_seed(0)
    both = gauss_newton_bartlett((model(part)[kept] for part, kept in zip(x, keep)), model.parameters())
    torch.manual_seed(0)
    torch.testing.assert_close(both, gauss_newton_bartlett(model(x[0]), model.parameters()))


@pytest.mark.parametrize('outputs', [lambda model: model(torch.ones(0, 4)), lambda model: iter(())])
def test_a_mini_batch_without_predictions_leaves_h(outputs):
    """A mask may leave none."""
    model = torch.nn.Linear(4, 3)
    optimizer = Sophia(model.parameters(), lr=0.1)
    optimizer.update_hessian([torch.ones(3, 4), torch.ones(3)])
    before = [optimizer.state[p]['hessian'].clone() for p in model.parameters()]
    optimizer.update_hessian(gauss_newton_bartlett(outputs(model), optimizer))
    optimizer.update_hessian(hutchinson((), optimizer))
    assert all(torch.equal(optimizer.state[p]['hessian'], h) for p, h in zip(model.parameters(), before))


def test_sparse_gradients_are_one_line():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = Sophia(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match='does not support sparse gradients; use torch.nn.Embedding'):
        optimizer.step()


@pytest.fixture
def one_rank():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_estimate_calls_no_optimizer_that_steps_in_the_backward_pass(one_rank):
    """Its gradient would be that of sampled labels. FSDP's own backward makes it."""
    model, x, calls, found = fully_shard(torch.nn.Linear(3, 5)), torch.randn(8, 3), [], []
    params = [*model.parameters()]
    for _ in range(2):
        torch.manual_seed(0)
        found.append(flat(h.full_tensor() for h in gauss_newton_bartlett(model(x), params)))
        for p in params:
            p.register_post_accumulate_grad_hook(calls.append)
    assert torch.equal(*found) and not calls
    model(x).sum().backward()
    assert len(calls) == 4  # two hooks of either parameter


def test_parameters_that_fsdp_replaces_in_the_forward_are_named(one_rank):
    """A generator of them is read after the forward, when those of the root module are not sharded."""
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5)), torch.randn(8, 3)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = Sophia(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match='list the parameters before the forward'):
        gauss_newton_bartlett(model(x), model.parameters())
    with pytest.raises(ValueError, match='only one of them sharded'):
        optimizer.update_hessian([torch.ones(p.shape) for p in model.parameters()])
    with pytest.raises(RuntimeError, match='sharded by FSDP, which has no second derivative'):
        hutchinson(model(x).square().mean(), optimizer)


def test_tensor_parallelism_is_refused(one_rank):
    mesh = init_device_mesh('cpu', (1, 1), mesh_dim_names=('dp', 'tp'))
    W = torch.nn.Parameter(distribute_tensor(torch.randn(3, 5), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(ValueError, match='tensor parallelism is not supported'):
        gauss_newton_bartlett(torch.randn(8, 3) @ W.full_tensor(), [W])


def on_each_of_two_ranks(rank, path):
    """Rank 0 has three of the eight examples for Gauss-Newton-Bartlett, half of them for Hutchinson."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{path}/store', rank=rank, world_size=2)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    params, x, f = make_mlp(outputs=5)
    mine, half = x[:3] if rank == 0 else x[3:], slice(4 * rank, 4 * rank + 4)
    # Ranks must draw different labels, but the same u.
    with pytest.raises(ValueError, match=r'torch.manual_seed\(seed \+ rank\)'):
        gauss_newton_bartlett(f(params, mine), params)
    with pytest.raises(ValueError, match='same u'):
        hutchinson(F.cross_entropy(f(params, x[half]), LABELS[half]), params)
    torch.manual_seed(2 ** 60 + 2 * rank)  # which float64 would round
    samples = torch.stack([flat(gauss_newton_bartlett((f(params, part) for part in mine.split(2)), params))
                           for _ in range(300)])
    alone = [dist.new_group([r]) for r in range(2)][rank]
    estimates = {name: flat(hutchinson(F.cross_entropy(f(params, x[half]), LABELS[half]), params,
                                       torch.Generator().manual_seed(2), group=group))
                 for name, group in (('both', None), ('alone', alone))}

    def estimate(params, outputs, parts, group=None, **options):
        """The estimate from these parts, lists of examples, with LABELS for sampled ones."""
        estimator = GaussNewtonBartlett(params, **options)
        for i in parts:
            estimator.add(F.cross_entropy(outputs(x[i]), LABELS[i], reduction='sum'), len(LABELS[i]))
        return estimator.estimate(group=group)

    def network():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))

    own = [[0, 1], [2]] if rank == 0 else [[3, 4, 5], [6, 7]]
    estimates['parts'] = flat(estimate(params, lambda x: f(params, x), own, by_parts=True))
    model, parts = fully_shard(network()), torch.arange(8)[half].split(2)
    sharded = estimate(model.parameters(), model, parts, by_parts=True)
    estimates['sharded parts'] = flat(h_hat.full_tensor() for h_hat in sharded)
    sharded = estimate(model.parameters(), model, parts, by_parts=True, max_norm=0.01)
    estimates['clipped parts'] = flat(h_hat.full_tensor() for h_hat in sharded)
    model, parts = network(), ([0, 1, 4, 5], [2, 3, 6, 7])  # both ranks' first and second part
    estimates['its parts'] = flat(estimate(model.parameters(), model, parts, alone, by_parts=True))
    *_, estimates['its estimate'] = estimate(model.parameters(), model, [slice(None)], alone)
    model = network()
    fully_shard(model, ignored_params={model[2].bias})
    *_, estimates['ignored'] = estimate(model.parameters(), model, [half])
    # The first layer, an expert of each rank's own, on a mesh of 1, the second on a mesh of 2, in either order.
    own_mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('each', 'own'))['own']
    for order in 1, -1:
        model = network()
        fully_shard(model[0], mesh=own_mesh)
        fully_shard(model)
        found = estimate([*model.parameters()][::order], model, [half])[::order]
        estimates[f'meshes {order}'] = [h_hat.full_tensor() for h_hat in found]
    model = network()
    estimates['its half'] = estimate(model.parameters(), model, [half], alone)
    both = init_device_mesh('cpu', (2,))
    assert sophia.check_finite('raise', 'gradient', [distribute_tensor(torch.ones(1), both, [Shard(0)])])  # on rank 0
    with pytest.raises(FloatingPointError):
        sophia.check_finite('raise', 'gradient', [distribute_tensor(torch.tensor([torch.nan]), both, [Shard(0)])])
    # Sharded over a part of the ranks: over this one alone.
    by_shards = []
    for shards in False, True:
        model = network()
        if shards:
            fully_shard(model, mesh=own_mesh)
        optimizer = Sophia(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        optimizer.update_hessian(gauss_newton_bartlett(model(x), optimizer, group=alone))
        F.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
        hs = [state['hessian'].full_tensor() if shards else state['hessian'] for state in optimizer.state.values()]
        by_shards.append((flat(hs), optimizer.unclipped_fraction()))
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match=r'set_requires_gradient_sync\(False\)'):
        gauss_newton_bartlett(model(x), optimizer, group=alone)
    # Each rank's optimizer has a part of the parameters.
    by_optimizer = []
    for make in (lambda params: ZeroRedundancyOptimizer(params, Sophia, lr=0.1), lambda params: Sophia(params, lr=0.1)):
        model = network()
        optimizer = make(model.parameters())
        own = getattr(optimizer, 'optim', optimizer)
        torch.manual_seed(rank)
        found = dict(zip(model.parameters(), gauss_newton_bartlett(model(x[half]), optimizer)))
        own.update_hessian(found[p] for group in own.param_groups for p in group['params'])
        F.cross_entropy(model(x), LABELS).backward()
        optimizer.step()
        by_optimizer.append(flat(model.parameters()).detach())
    torch.save(dict(samples=samples, by_shards=by_shards, by_optimizer=by_optimizer, **estimates), f'{path}/{rank}.pt')
    dist.destroy_process_group()


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp('ranks')
    torch.multiprocessing.start_processes(on_each_of_two_ranks, (path,), nprocs=2, start_method='forkserver')
    return [torch.load(path / f'{rank}.pt') for rank in range(2)]


def test_estimates_over_two_ranks_are_those_of_the_whole_mini_batch(two_ranks):
    """B counts the examples of both ranks, which have different numbers of them and of micro-batches."""
    params, x, f = make_mlp(outputs=5)
    total, B = exact_gauss_newton(f, params, x, lambda out: Categorical(logits=out))
    assert_mean_is(two_ranks[0]['samples'], flat(total) / B)
    whole = flat(hutchinson(F.cross_entropy(f(params, x), LABELS), params, torch.Generator().manual_seed(2)))
    for rank in two_ranks:
        assert torch.equal(rank['samples'], two_ranks[0]['samples'])
        torch.testing.assert_close(rank['both'], whole)
    # Without the all-reduce each rank would have kept the estimate of its own half.
    assert (two_ranks[0]['alone'] - two_ranks[1]['alone']).norm() > 0.1 * whole.norm()
    torch.testing.assert_close((two_ranks[0]['alone'] + two_ranks[1]['alone']) / 2, whole)


def test_parts_are_squared_before_they_are_added_up_over_ranks(two_ranks):
    """Sharded parameters have parts that are spread over all ranks."""
    params, x, f = make_mlp(outputs=5)
    parts = [torch.autograd.grad(F.cross_entropy(f(params, x[i]), LABELS[i], reduction='sum'), params)
             for i in ([0, 1], [2], [3, 4, 5], [6, 7])]
    expected = sum(flat(part) ** 2 for part in parts) / 8
    for rank in two_ranks:
        torch.testing.assert_close(rank['parts'], expected)
        torch.testing.assert_close(rank['sharded parts'], rank['its parts'])
        factor = 8 * 0.01 ** 2 / rank['its parts'].sum()
        torch.testing.assert_close(rank['clipped parts'], rank['its parts'] * factor)


@pytest.mark.parametrize('order', [1, -1])
def test_each_parameter_has_the_sum_over_the_ranks_that_share_it(two_ranks, order):
    """Of 8 predictions; a rank's own expert sees its half of them."""
    for rank in two_ranks:
        expert, shared = rank[f'meshes {order}'][:2], rank[f'meshes {order}'][2:]
        torch.testing.assert_close(expert, [h_hat / 2 for h_hat in rank['its half'][:2]])
        for whole in shared[-1], rank['ignored']:  # a parameter that FSDP ignores is summed, too
            torch.testing.assert_close(whole, rank['its estimate'])


def test_sharded_and_divided_optimizers_make_the_step_of_a_whole_one(two_ranks):
    """Parameters sharded over a part of the ranks have the estimate of that part."""
    for rank in two_ranks:
        torch.testing.assert_close(*rank['by_shards'])
        torch.testing.assert_close(*rank['by_optimizer'])
    assert not torch.equal(two_ranks[0]['by_shards'][0][0], two_ranks[1]['by_shards'][0][0])
