"""The baselines against references, what PyTorch users expect of an optimizer, the table, and the Hessian hook."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, metrics
from reference import adahessian_in_numpy, lion_in_numpy, normalize_in_numpy

import hessian
import optimizers
import sophia
from hessian import FirstOrder, rows_at_once
from model import GPT, SIZES, GPTConfig
from optimizers import AdaHessian, Lion, Normalize, build_hook, build_optimizer
from runtime import optim
from runtime.rng import LABELS, VECTORS, keyed_bits, keyed_uniforms
from sophia import HessianOptimizer, Sophia

# The optimizers of the paper and its ablations, about which some tests know more than about any row of the table.
PAPER = ('adamw', 'lion', 'adahessian', 'sophiag', 'sophiah', 'ef_clip', 'ah_clip', 'clip', 'normalize', 'gnb_noclip')
HOOKS = [name for name in optimizers.OPTIMIZERS if optimizers.row(name).hook is not FirstOrder]

# ----------------------------------------------------------------------------------------------------------------------
# Lion, AdaHessian, Normalize


def random_problem(seed, with_eps, interval):
    """Random hyperparameters, θ, 15 gradients, and an estimate every `interval` of them."""
    rng = np.random.default_rng(seed)
    settings = dict(lr=10 ** rng.uniform(-4, -1), beta1=rng.uniform(0, 0.99), beta2=rng.uniform(0, 0.999),
                    weight_decay=rng.uniform(0, 0.5))
    if with_eps:
        settings['eps'] = 10 ** rng.uniform(-10, -2)
    theta = rng.normal(size=(3, 4))
    gradients = rng.normal(size=(15, 3, 4)) * 10 ** rng.uniform(-3, 1)
    estimates = [rng.normal(size=(3, 4)) if t % interval == 0 else None for t in range(15)]
    return settings, theta, gradients, estimates


def run(optimizer, p, gradients, estimates):
    for g, h_hat in zip(gradients, estimates):
        p.grad = torch.tensor(g)
        if h_hat is not None and isinstance(optimizer, HessianOptimizer):
            optimizer.update_hessian([torch.tensor(h_hat)])
        optimizer.step()


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('name, reference', [('lion', lion_in_numpy), ('adahessian', adahessian_in_numpy)])
def test_baselines(name, reference, seed):
    """AdaHessian corrects the bias of v by the number of estimates, which every third time is not that of the steps."""
    settings, theta, gradients, estimates = random_problem(seed, name == 'adahessian', interval=1 + seed % 3)
    p = torch.nn.Parameter(torch.tensor(theta))
    optimizer = build_optimizer(name, [p], **settings)
    run(optimizer, p, gradients, estimates)
    expected, m = reference(theta, gradients, estimates, **settings)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[p]['exp_avg'].numpy(), m, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('seed', range(3))
def test_normalize(seed):
    """Two tensors, each with a root mean square of its own; where it is below ε, ε bounds the step."""
    settings, theta, gradients, _ = random_problem(seed, True, 1)
    del settings['beta2']
    params = [torch.nn.Parameter(torch.tensor(theta[:1])), torch.nn.Parameter(torch.tensor(theta[1:]))]
    optimizer = build_optimizer('normalize', params, **settings)
    gradients[:, 1:] *= settings['eps'] / 10
    for g in gradients:
        params[0].grad, params[1].grad = torch.tensor(g[:1]), torch.tensor(g[1:])
        optimizer.step()
    for p, rows in zip(params, (slice(1), slice(1, None))):
        expected, m = normalize_in_numpy(theta[rows], gradients[:, rows], **settings)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(optimizer.state[p]['exp_avg'].numpy(), m, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('name', ['lion', 'adahessian', 'sophiah'])
@pytest.mark.parametrize('seed', range(3))
def test_against_pytorch_optimizer(name, seed):
    """An independent library, where it computes the same: an estimate at every step. Its SophiaH has no γ, and clips
    at p: with p = γ, lr / γ, ε / γ and γ·λ it is Algorithm 3."""
    theirs = pytest.importorskip('pytorch_optimizer', reason='pytorch_optimizer is not installed')
    settings, theta, gradients, estimates = random_problem(seed, name != 'lion', interval=1)
    lr, wd, betas = settings['lr'], settings['weight_decay'], (settings['beta1'], settings['beta2'])
    p, q = (torch.nn.Parameter(torch.tensor(theta)) for _ in range(2))
    if name == 'lion':
        other = theirs.Lion([q], lr=lr, betas=betas, weight_decay=wd)
    elif name == 'adahessian':
        other = theirs.AdaHessian([q], lr=lr, betas=betas, weight_decay=wd, eps=settings['eps'])
    else:
        settings['gamma'] = gamma = 0.05
        other = theirs.SophiaH([q], lr=lr / gamma, betas=betas, weight_decay=wd * gamma, p=gamma,
                               eps=settings['eps'] / gamma)
    run(build_optimizer(name, [p], **settings), p, gradients, estimates)
    for g, h_hat in zip(gradients, estimates):
        q.grad = torch.tensor(g)
        other.step(**({} if name == 'lion' else {'hessian': [torch.tensor(h_hat)]}))
    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_clip_is_sophia_without_curvature():
    """The ablation Clip, built as Lion with a single β, takes the steps of Algorithm 3 with h = 0."""
    settings, theta, gradients, _ = random_problem(0, False, 1)
    p, q = (torch.nn.Parameter(torch.tensor(theta)) for _ in range(2))
    run(build_optimizer('clip', [p], **settings), p, gradients, [None] * 15)
    run(Sophia([q], lr=settings['lr'], betas=(settings['beta1'], 0), weight_decay=settings['weight_decay']), q,
        gradients, [None] * 15)
    torch.testing.assert_close(p, q)


# ----------------------------------------------------------------------------------------------------------------------
# What PyTorch users expect

OPTIMIZERS = pytest.mark.parametrize('cls', [Sophia, Lion, AdaHessian, Normalize])


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(4, 3), (3,)]]


def train(optimizer, params, steps, first=0):
    """Steps with gradients and estimates that depend on the step and the parameters."""
    for t in range(first, first + steps):
        for p in params:
            p.grad = torch.sin(p.detach() * 3 + t)
        if isinstance(optimizer, HessianOptimizer):
            optimizer.update_hessian([1 + torch.cos(p.detach() + t) for p in params])
        optimizer.step()


@OPTIMIZERS
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_weights_only_round_trip_continues_identically(cls, dtype, tmp_path):
    params = make_params(dtype)
    optimizer = cls(params, lr=1e-2)
    train(optimizer, params, 5)
    torch.save([optimizer.state_dict(), [p.detach() for p in params]], tmp_path / 'state.pt')
    train(optimizer, params, 5, first=5)
    assert all(p.dtype == dtype and torch.isfinite(p).all() for p in params)

    state, values = torch.load(tmp_path / 'state.pt', weights_only=True)
    resumed = [torch.nn.Parameter(v) for v in values]
    optimizer = cls(resumed, lr=1.0, weight_decay=0.0)
    optimizer.load_state_dict(state)
    train(optimizer, resumed, 5, first=5)
    for p, q in zip(params, resumed):
        assert torch.equal(p, q)


@OPTIMIZERS
def test_bfloat16_follows_float32(cls):
    """Five steps with the same gradients, as far as 8 bits of mantissa can follow."""
    start, params, rounded = make_params(), make_params(), make_params(torch.bfloat16)
    for optimized in (params, rounded):
        optimizer = cls(optimized, lr=0.05)
        for t in range(5):
            for p, at in zip(optimized, start):
                p.grad = torch.sin(at.detach() * 3 + 0.1 * t).to(p.dtype)
            if issubclass(cls, HessianOptimizer):
                optimizer.update_hessian([1 + torch.cos(at.detach()) for at in start])
            optimizer.step()
    for p, q, before in zip(params, rounded, start):
        assert q.dtype == torch.bfloat16 and (q.float() - p).norm() < 0.2 * (p - before).norm()


@OPTIMIZERS
def test_deepcopy_continues_identically(cls):
    params = make_params()
    optimizer = cls(params, lr=1e-2, nonfinite='skip')
    train(optimizer, params, 3)
    copied, twins = copy.deepcopy((optimizer, params))
    train(optimizer, params, 3, first=3)
    train(copied, twins, 3, first=3)
    assert copied.nonfinite == 'skip'
    for p, q in zip(params, twins):
        assert torch.equal(p, q)


@OPTIMIZERS
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_tensor_learning_rate(cls, dtype):
    params, twins = make_params(dtype), make_params(dtype)
    decay = 0.1 if dtype == torch.float32 else 0.0  # 1 − lr·λ as a tensor is rounded to bfloat16
    optimizer = cls(params, lr=torch.tensor(0.02), weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
    train(optimizer, params, 4)
    train(cls(twins, lr=0.01, weight_decay=decay), twins, 4)
    assert torch.equal(scheduler.get_last_lr()[0], optimizer.param_groups[0]['lr'])
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q)


@OPTIMIZERS
def test_maximize_is_minimizing_the_negative(cls):
    params, twins = make_params(), make_params()
    up, down = cls(params, lr=0.01, maximize=True), cls(twins, lr=0.01)
    for p, q in zip(params, twins):
        p.grad, q.grad = torch.cos(p.detach()), -torch.cos(q.detach())
    given = [p.grad.clone() for p in params]
    for optimizer, estimated in ((up, params), (down, twins)):
        if issubclass(cls, HessianOptimizer):
            optimizer.update_hessian([torch.ones_like(p) for p in estimated])
        optimizer.step()
    for p, q, g in zip(params, twins, given):
        assert torch.equal(p, q) and torch.equal(p.grad, g)


@OPTIMIZERS
def test_closure_is_evaluated_with_gradients(cls):
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = cls([p], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = (p ** 2).sum()
        loss.backward()
        return loss

    if cls is AdaHessian:
        optimizer.update_hessian([torch.full((2,), 2.0)])
    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 5.0 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@OPTIMIZERS
@pytest.mark.parametrize('set_to_none', [True, False])
def test_zero_grad_and_parameters_without_gradient(cls, set_to_none):
    """A parameter without gradient keeps its value and makes no momentum; one with gradient 0 decays."""
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = cls(params, lr=0.1, weight_decay=0.5)
    params[0].grad = torch.ones_like(params[0])
    if issubclass(cls, HessianOptimizer):
        optimizer.update_hessian([torch.ones_like(params[0]), None])
    optimizer.step()
    assert torch.equal(params[1], before[1]) and not optimizer.state[params[1]]
    assert not torch.equal(params[0], before[0])
    optimizer.zero_grad(set_to_none=set_to_none)
    between = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], between) == set_to_none


@OPTIMIZERS
def test_param_groups_schedulers_and_hooks(cls):
    params = make_params()
    optimizer = cls(params[:1], lr=0.1)
    optimizer.add_param_group({'params': params[1:], 'lr': 0.01, 'weight_decay': 0.0})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 ** t)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append('pre'))
    optimizer.register_step_post_hook(lambda *_: calls.append('post'))
    train(optimizer, params, 1)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05, 0.005] and calls == ['pre', 'post']
    before = params[1].detach().clone()
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    train(optimizer, params, 1, first=1)
    assert torch.equal(params[1], before)
    with pytest.raises(ValueError, match='more than one parameter group'):
        optimizer.add_param_group({'params': params[:1]})


@OPTIMIZERS
def test_settings_out_of_range_are_rejected(cls):
    for bad in (dict(lr=-1.0), dict(lr=float('nan')), dict(lr=0.1, weight_decay=-0.1), dict(lr=0.1, nonfinite='maybe'),
                dict(lr=0.1, beta1=1.0) if cls is Normalize else dict(lr=0.1, betas=(1.0, 0.9))):
        with pytest.raises(ValueError, match=next(key for key in reversed(bad))):
            cls(make_params(), **bad)
    with pytest.raises(ValueError, match='lr = -1'):
        cls(make_params()[:1], lr=0.1).add_param_group({'params': make_params()[1:], 'lr': -1})


@OPTIMIZERS
def test_sparse_gradients_are_rejected(cls):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = cls(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match='sparse'):
        optimizer.step()


@OPTIMIZERS
@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_nonfinite_gradients_never_enter_the_state(cls, bad):
    for nonfinite in ('raise', 'skip'):
        params = make_params()
        optimizer = cls(params, lr=0.1, nonfinite=nonfinite)
        train(optimizer, params, 2)
        before = copy.deepcopy((params, optimizer.state_dict()['state']))
        for p in params:
            p.grad = torch.ones_like(p)
        params[1].grad[2] = bad
        if nonfinite == 'raise':
            with pytest.raises(FloatingPointError, match='gradient is not finite'):
                optimizer.step()
        else:
            optimizer.step()
        torch.testing.assert_close((params, optimizer.state_dict()['state']), before, rtol=0, atol=0)
        train(optimizer, params, 1)
        assert all(torch.isfinite(p).all() for p in params) and not torch.equal(params[0], before[0][0])


@pytest.mark.parametrize('cls', [Sophia, AdaHessian])
@pytest.mark.parametrize('bad', [float('nan'), -float('inf')])
def test_nonfinite_estimates_never_enter_the_state(cls, bad):
    for nonfinite in ('raise', 'skip'):
        params = make_params()
        optimizer = cls(params, lr=0.1, nonfinite=nonfinite)
        train(optimizer, params, 2)
        before = copy.deepcopy(optimizer.state_dict()['state'])
        estimates = [torch.ones(4, 3), torch.tensor([1.0, bad, 1.0])]
        if nonfinite == 'raise':
            with pytest.raises(FloatingPointError, match='Hessian estimate is not finite'):
                optimizer.update_hessian(estimates)
        else:
            optimizer.update_hessian(estimates)
        torch.testing.assert_close(optimizer.state_dict()['state'], before, rtol=0, atol=0)
        with pytest.raises(ValueError, match='1 estimates for 2 parameters'):
            optimizer.update_hessian(estimates[:1])
        with pytest.raises(ValueError, match='shape'):
            optimizer.update_hessian(estimates[::-1])


def test_what_overflows_on_its_way_into_the_state_is_not_finite():
    """A square beyond float32; an estimate beyond the parameter's float32. Large float64 values are finite."""
    for cls, value in ((AdaHessian, 1e30), (Sophia, 1e300)):
        with pytest.raises(FloatingPointError):
            cls([torch.zeros(2)], lr=0.1).update_hessian([torch.full((2,), value, dtype=torch.float64)])
    p = torch.zeros(2, dtype=torch.float64)
    optimizer = Sophia([p], lr=0.1)
    optimizer.update_hessian([torch.full((2,), 1e300, dtype=torch.float64)])
    assert (optimizer.state[p]['hessian'] > 1e297).all()


@OPTIMIZERS
def test_types_in_which_a_step_means_nothing_are_rejected(cls):
    """float16 has no such number as ε, and 0 / 0 would pass for a step; Lion divides by nothing."""
    optimizer = cls([torch.zeros(2)], lr=0.1)
    for dtype in (torch.complex64, *([torch.float16] if cls is not Lion else [])):
        with pytest.raises(ValueError, match=f'parameters of type {dtype} are not supported'):
            optimizer.add_param_group(dict(params=[torch.zeros(2, dtype=dtype)]))
    assert len(optimizer.param_groups) == 1
    if cls is Lion:
        p = torch.ones(2, dtype=torch.float16)
        p.grad = torch.ones(2, dtype=torch.float16)
        cls([p], lr=0.1).step()
        assert (p < 1).all()


# ----------------------------------------------------------------------------------------------------------------------
# The table, the hook


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_every_row_builds_an_optimizer_and_its_hook(name):
    pytest.importorskip((optimizers.row(name).library or 'torch').partition(':')[0])
    model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_embd=2))
    built = build_optimizer(name, model.parameters(), lr=1e-3)
    assert isinstance(built, torch.optim.Optimizer)
    assert build_hook(name, model, built, **hook_options()).start(0) == (name in HOOKS)


def test_unknown_optimizers_and_settings_are_rejected():
    with pytest.raises(SystemExit, match='--optimizer_name=sophiaq: no such optimizer; did you mean sophia'):
        build_optimizer('sophiaq', make_params(), lr=1e-3)
    with pytest.raises(ValueError, match='no setting rho'):
        build_optimizer('sophiag', make_params(), lr=1e-3, rho=0.05)


@pytest.mark.parametrize('name', PAPER)
def test_every_optimizer_of_the_paper_has_learning_rates(name):
    for size in ('tiny', '30M', '125M', '355M'):
        lr, where = optimizers.peak_learning_rate(name, size)
        assert (lr == 0.3 and 'our table' in where) if name == 'adahessian' else (lr < 0.02 and size in where)


def test_states_per_parameter():
    """Tensors of the parameter's size."""
    count = {}
    for name in PAPER:
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = build_optimizer(name, [p], lr=1e-3)
        if name in HOOKS:
            optimizer.update_hessian([torch.ones(3)])
        optimizer.step()
        count[name] = sum(isinstance(s, torch.Tensor) and s.shape == p.shape for s in optimizer.state[p].values())
    assert count == dict(adamw=2, lion=1, adahessian=2, sophiag=2, sophiah=2, ef_clip=2, ah_clip=2, clip=1, normalize=1,
                         gnb_noclip=2)


def settings(name, total_batch_size):
    return optimizers.optimizer_settings(SimpleNamespace(optimizer_name=name, total_batch_size=total_batch_size))[0]


def test_settings_of_the_paper():
    assert settings('sophiag', 480) == dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, gamma=0.05,
                                            hessian_interval=10, hessian_batch_size=240,
                                            hessian_sequences='own', hessian_bias_correction=False)
    assert {key: settings('sophiah', 480)[key] for key in ('gamma', 'hessian_batch_size')} == dict(
        gamma=0.01, hessian_batch_size=32)
    # A smaller mini-batch: Gauss-Newton keeps its half, AdaHessian the whole, Hutchinson its 32 where they fit.
    assert [settings(name, 40)['hessian_batch_size'] for name in ('sophiag', 'adahessian', 'sophiah')] == [20, 40, 32]
    assert settings('sophiah', 8)['hessian_batch_size'] == 8
    assert settings('adahessian', 1024)['hessian_batch_size'] == 1024
    assert settings('gnb_noclip', 480)['hessian_interval'] == 2
    assert settings('adahessian', 480)['hessian_interval'] == 1
    # Ablations have the learning rate of the optimizer that they are closest to.
    assert {name: optimizers.peak_learning_rate(name, '30M')[0] for name in PAPER[5:]} == {
        'ef_clip': 1e-3, 'gnb_noclip': 1e-3, 'ah_clip': 1e-3, 'clip': 4e-4, 'normalize': 4e-4}
    assert optimizers.peak_learning_rate('lion', '770M')[0] is None


def test_a_group_has_its_own_share_of_the_learning_rate():
    params = make_params()
    optimizer = build_optimizer('sophiag', [dict(params=params[:1], lr_scale=0.1), dict(params=params[1:])], lr=1.0)
    optim.set_learning_rate(optimizer, 0.5)
    assert [group['lr'] for group in optimizer.param_groups] == [0.05, 0.5]


def test_a_builder_may_give_a_group_its_own_learning_rate(monkeypatch):
    def build(groups, s):
        return torch.optim.SGD([dict(params=groups[:1], lr=0.1 * s.learning_rate), dict(params=groups[1:])],
                               lr=s.learning_rate)

    monkeypatch.setitem(optimizers.OPTIMIZERS, 'two', optimizers.Row(build, {}, 0.1))
    optimizer = build_optimizer('two', make_params(), lr=1.0)
    optim.set_learning_rate(optimizer, 0.5)
    assert [group['lr'] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_parameters_without_a_gradient_are_left_out_of_the_clipping():
    used, unused = make_params()[:2]
    used.grad = torch.full_like(used, 3.0)
    norm = optim.clip_gradients([used, unused], 1.0)
    assert norm.item() == pytest.approx(3 * used.numel() ** 0.5) and unused.grad is None
    assert used.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def hook_options(**options):
    return {'interval': 3, 'batch_size': 4, 'seed': 0, **options}


def test_hook_estimates_at_0_k_2k_and_takes_its_share_of_the_rows():
    hook = build_hook('sophiag', torch.nn.Linear(1, 1), build_optimizer('sophiag', make_params(), lr=1e-3),
                      **hook_options(batch_size=10, world_size=2))
    assert [i for i in range(10) if hook.start(i)] == list(range(10))  # as long as iteration 0 is always skipped
    hook.optimizer.update_hessian([torch.ones_like(p) for p in sophia.parameters(hook.optimizer)])
    assert [i for i in range(10) if hook.start(i)] == [0, 3, 6, 9]
    assert [hook.count_rows(torch.zeros(3, 2)) for _ in range(3)] == [3, 2, 0]


def test_what_a_hook_draws_is_a_function_of_seed_iteration_and_rank_alone(monkeypatch):
    """With streams of their own: neither labels nor u have to do with the sequences that they are drawn for."""
    params, drawn = make_params(), []
    model = torch.nn.ParameterList(params)
    options = hook_options(seed=5, rank=1, world_size=2)
    labels, vectors = (build_hook(name, model, build_optimizer(name, params, lr=1e-3), **options)
                       for name in ('sophiag', 'sophiah'))
    labels.start(3)
    uniforms = keyed_uniforms(5, LABELS, 3, (4, 7))
    assert torch.equal(labels.labels(torch.zeros(2, 7), 1, 1)['uniforms'], uniforms[[3]])  # the fourth of all

    def estimator(params, generator, rademacher):
        drawn.append(generator.initial_seed())
        raise InterruptedError

    monkeypatch.setattr(hessian, 'Hutchinson', estimator)
    vectors.start(3)
    with pytest.raises(InterruptedError):
        vectors.finish()
    assert drawn == [int(keyed_bits(5, VECTORS, 3)[0] >> 1)] and LABELS != VECTORS


def test_metrics_are_those_of_the_state():
    params = make_params()
    optimizer = build_optimizer('sophiag', params, lr=1e-3)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.update_hessian([torch.rand_like(p) for p in params])
    optimizer.step()
    found = optimizers.optimizer_metrics(optimizer)
    for name, key in (('momentum_norm', 'exp_avg'), ('hessian_norm', 'hessian')):
        expected = torch.cat([optimizer.state[p][key].flatten() for p in params]).norm()
        assert found[name].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found['update_unclipped'] == optimizer.unclipped_fraction()


def test_momentum_of_other_optimizers_counts_as_well():
    p = make_params()[0]
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizers.optimizer_metrics(optimizer)['momentum_norm'].item() == pytest.approx(p.numel() ** 0.5)


@pytest.mark.parametrize('size, rows, T, micro_batch, expected', [
    ('125M', 32, 1024, 32, 2), ('125M', 30, 1024, 32, 3), ('770M', 32, 1024, 12, 1), ('6.6B', 2, 2048, 1, 1),
    ('30M', 32, 128, 32, 32), ('30M', 32, 128, 12, 8), ('30M', 31, 128, 12, 1)])
def test_a_hessian_vector_product_takes_as_many_rows_as_fit(size, rows, T, micro_batch, expected):
    assert rows_at_once(GPTConfig(**SIZES[size]), rows, T, micro_batch) == expected


@pytest.mark.parametrize('name', ['sophiag', 'sophiah', 'adahessian'])
def test_a_hook_passes_on_nothing_that_is_not_finite(name):
    """A model whose derivatives are NaN; under loss scaling Gauss-Newton's overflow is skipped."""
    class Model(torch.nn.Linear):
        config = GPTConfig(n_layer=1, n_head=1)

        def forward(self, X, Y, uniforms=None, return_logits=True):
            loss = (super().forward(X) ** 2).sum().sqrt() * torch.inf
            return None, loss, loss

    model = Model(2, 2)
    optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
    hook = build_hook(name, model, optimizer, **hook_options())
    for scale in (1.0, 2.0):
        hook.start(0)
        hook.forward(model, torch.ones(4, 2), torch.ones(4, 2))
        hook.backward(scale)
        if name == 'sophiag' and scale != 1:
            hook.finish(scale)
        else:
            with pytest.raises(FloatingPointError, match='Hessian estimate is not finite'):
                hook.finish(scale)
    assert not optimizer.state


@pytest.mark.parametrize('name', ['sophiag', 'ef_clip'])
def test_positions_that_do_not_count_are_no_predictions(name):
    """ĥ = B·ĝ⊙ĝ of B predictions: with labels of −1 that of the others alone."""
    model = GPT(GPTConfig(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    X, Y = torch.arange(8).view(2, 4), torch.tensor([[3, 1, -1, -1], [-1, -1, -1, -1]])
    found = []
    for x, y in ((X, Y), (X[:1, :2], Y[:1, :2])):  # attention is causal: the same two predictions
        optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
        hook = build_hook(name, model, optimizer, **hook_options(batch_size=len(x)))
        hook.start(0)
        hook.uniforms = torch.full(x.shape, 0.5)
        hook.forward(model, x, y)
        hook.backward()
        hook.finish()
        found.append([optimizer.state[p]['hessian'] for p in model.parameters()])
    torch.testing.assert_close(*found)
    assert found[0][0].any()


def test_a_hooks_estimates_follow_the_order_of_the_param_groups():
    """Two matrices of one shape, in the optimizer's groups in another order than in the model."""
    model = GPT(GPTConfig(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    a, b = model.transformer.h[0].attn.c_proj.weight, model.transformer.wte.weight
    rest = [p for p in model.parameters() if p is not a and p is not b]
    X = torch.arange(8).view(2, 4)
    for name in ('sophiag', 'sophiah'):
        found = []
        for groups in ([b, a, *rest], [a, b, *rest]):
            optimizer = build_optimizer(name, groups, lr=1e-3)
            # AH of each parameter has to be its own: u is drawn in the order of the groups, so compare with products.
            hook = build_hook(name, model, optimizer, **hook_options(batch_size=2))
            hook.start(0)
            loss = hook.forward(model, X, X.flip(1))
            hook.backward()
            loss.backward()
            hook.finish()
            found.append({id(p): optimizer.state[p]['hessian'] for p in groups})
        if name == 'sophiag':
            assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
        assert all(h.shape == p.shape for p in (a, b) for h in [found[0][id(p)]])
        assert (found[0][id(a)] - found[0][id(b)]).abs().max() > 0


@pytest.mark.parametrize('max_norm', [0, 0.5, 100.0])
def test_clipping_is_that_of_pytorch(max_norm):
    params, twins = make_params(), make_params()
    for p, q in zip(params, twins):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    norm = optim.clip_gradients(params, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm or float('inf'))
    torch.testing.assert_close(norm, expected)
    for p, q in zip(params, twins):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_subclass_that_only_defines_update_is_clipped():
    class Descent(sophia.GuardedOptimizer):
        def update(self, group, params, grads):
            torch._foreach_add_(params, grads, alpha=-group['lr'])

    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), 10.0)
    optimizer = Descent([p], dict(lr=1.0, maximize=False), 'raise')
    optim.clip_gradients([p], 1.0)
    optimizer.step()
    assert p.norm().item() == pytest.approx(1.0, rel=1e-4)


@OPTIMIZERS
def test_state_of_another_implementation_gets_the_defaults_of_missing_settings(cls):
    params = make_params()
    optimizer = cls(params, lr=0.1)
    train(optimizer, params, 1)
    state = optimizer.state_dict()
    for group in state['param_groups']:
        for key in ('maximize', 'bias_correction'):
            group.pop(key, None)
    optimizer = cls(params, lr=0.1)
    optimizer.load_state_dict(state)
    train(optimizer, params, 1, first=1)
    assert optimizer.param_groups[0]['maximize'] is False


@OPTIMIZERS
def test_learning_rates_in_tensors_have_one_element_of_any_shape(cls):
    params, twins = make_params(), make_params()
    train(cls(params, lr=torch.tensor([0.01])), params, 2)
    train(cls(twins, lr=0.01), twins, 2)
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q)
    with pytest.raises(ValueError, match='has one element, not 2'):
        cls(make_params(), lr=torch.tensor([0.1, 0.1]))


def test_adahessian_needs_an_estimate_before_its_first_step():
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = AdaHessian(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match='call update_hessian'):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before)) and not optimizer.state


def test_a_compiled_adahessian_is_compiled_once():
    """Its counters are tensors: a number in the state would be a constant of the compiled code."""
    params = make_params()
    optimizer = AdaHessian(params, lr=0.1)
    step = torch.compile(optimizer.step, backend='eager', dynamic=False)

    def run():
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.update_hessian(torch.ones_like(p) for p in params)
        step()
    for _ in range(2):  # the second one finds the state that the first has made
        run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            run()


def test_sophia_warns_once_of_steps_without_an_estimate():
    params = make_params()
    optimizer = Sophia(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match='sign momentum') as caught:
        for _ in range(3):
            optimizer.step()
    assert len(caught) == 1


def test_the_norm_of_many_entries_is_right():
    """PyTorch's own is 0.2 % off for these."""
    tensors = [torch.full((5000, 1001), 1e-3), torch.full((3, 2), 0.1), torch.zeros(4096), torch.tensor(2.0)]
    expected = sum(t.double().square().sum() for t in tensors).sqrt().item()
    assert optim.total_norm(tensors).item() == pytest.approx(expected, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The real train.py: every optimizer, 1 and 2 ranks, float32 and bfloat16

RUNS = [(name, dtype) for name in PAPER for dtype in ('float32', 'bfloat16')]


@pytest.mark.parametrize('name, dtype', RUNS)
def test_train_with_every_optimizer(fork, corpus, tmp_path, name, dtype):
    """It learns, logs what means something for this optimizer, and two ranks do what one does."""
    flags = [*TINY, f'--dataset={corpus}', f'--optimizer_name={name}', f'--dtype={dtype}', '--max_iters=6',
             '--eval_interval=6', '--eval_iters=4', '--learning_rate=5e-3']
    flags += ['--hessian_interval=2', '--hessian_batch_size=2', '--eps=1e-4'] * (name in HOOKS)
    flags += ['--gamma=0.5'] * (name in HOOKS and name != 'adahessian')
    one, two = (tmp_path / f'{ranks}' for ranks in (1, 2))
    for ranks, out in enumerate((one, two), start=1):
        fork('train.py', *flags, f'--out_dir={out}', ranks=ranks, check=True)
    losses = metrics(one)
    assert len(losses) == 6 and np.isfinite(losses).all() and min(losses[3:]) < losses[0]
    line = next(line for line in map(json.loads, (one / 'metrics.jsonl').read_text().splitlines())
                if line['iter'] == 5 and 'lr' in line)
    assert {'grad_norm', 'grad_clipped', 'momentum_norm', 'param_norm'} <= line.keys()
    assert ('hessian_norm' in line) == (name in HOOKS)
    assert ('update_unclipped' in line) == (name in HOOKS and name != 'adahessian')
    slack = 1e-3 if dtype == 'float32' else 2e-2  # the sign of a sum near 0 depends on its rounding
    assert metrics(two) == pytest.approx(losses, abs=slack)
    assert metrics(two, 'val/loss') == pytest.approx(metrics(one, 'val/loss'), abs=slack)
    for key in ('hessian_norm', 'momentum_norm'):
        assert metrics(two, key) == pytest.approx(metrics(one, key), rel=1e-3 if dtype == 'float32' else 0.1)
    state = torch.load(one / 'ckpt_00000006.pt', weights_only=True)
    tensors = [t for s in state['optimizer']['state'].values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert tensors and all(torch.isfinite(t).all() for t in tensors)

