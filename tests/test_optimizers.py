"""The baselines against references, what PyTorch users expect of an optimizer, the table, and the Hessian hook."""

import copy
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, metrics

import optimizers
from model import GPT, SIZES, GPTConfig
from optimizers import HOOKS, SETTINGS, AdaHessian, Lion, build_hessian_hook, build_optimizer
from runtime.rng import LABELS, VECTORS, keyed_bits, keyed_uniforms
from sophia import Sophia

# ----------------------------------------------------------------------------------------------------------------------
# Lion and AdaHessian


def lion_in_numpy(theta, gradients, _, lr, beta1, beta2, weight_decay):
    m = np.zeros_like(theta)
    for g in gradients:
        step = np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        theta = theta - lr * weight_decay * theta - lr * step
    return theta, m


def adahessian_in_numpy(theta, gradients, estimates, lr, beta1, beta2, weight_decay, eps):
    m, v, estimated = np.zeros_like(theta), np.zeros_like(theta), 0
    for t, (g, h_hat) in enumerate(zip(gradients, estimates), start=1):
        m = beta1 * m + (1 - beta1) * g
        if h_hat is not None:
            v, estimated = beta2 * v + (1 - beta2) * h_hat ** 2, estimated + 1
        m_hat, v_hat = m / (1 - beta1 ** t), v / (1 - beta2 ** estimated)
        theta = theta - lr * weight_decay * theta - lr * m_hat / (np.sqrt(v_hat) + eps)
    return theta, m


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
        if h_hat is not None and not isinstance(optimizer, Lion):
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

OPTIMIZERS = pytest.mark.parametrize('cls', [Sophia, Lion, AdaHessian])


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(4, 3), (3,)]]


def train(optimizer, params, steps, first=0):
    """Steps with gradients and estimates that depend on the step and the parameters."""
    for t in range(first, first + steps):
        for p in params:
            p.grad = torch.sin(p.detach() * 3 + t)
        if not isinstance(optimizer, Lion):
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
            if cls is not Lion:
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
        if cls is not Lion:
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
    if cls is not Lion:
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
def test_settings_out_of_range_are_refused(cls):
    for bad in (dict(lr=-1.0), dict(lr=float('nan')), dict(lr=0.1, betas=(1.0, 0.9)),
                dict(lr=0.1, weight_decay=-0.1), dict(lr=0.1, nonfinite='maybe')):
        with pytest.raises(ValueError, match=next(key for key in reversed(bad))):
            cls(make_params(), **bad)
    with pytest.raises(ValueError, match='lr = -1'):
        cls(make_params()[:1], lr=0.1).add_param_group({'params': make_params()[1:], 'lr': -1})


@OPTIMIZERS
def test_sparse_gradients_are_refused(cls):
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


@pytest.mark.parametrize('cls', [Sophia, AdaHessian, Lion])
def test_types_in_which_a_step_means_nothing_are_refused(cls):
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


def test_every_optimizer_has_settings_a_rate_and_a_builder():
    for name in SETTINGS:
        for size in ('tiny', '30M', '125M', '355M'):
            rate, where = optimizers.peak_learning_rate(name, size)
            assert (rate == 0.3 and 'our table' in where) if name == 'adahessian' else (rate < 0.02 and size in where)
        model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_embd=2))
        built = build_optimizer(name, model.parameters(), lr=1e-3)
        assert isinstance(built, torch.optim.Optimizer)
        assert build_hessian_hook(name, model, built, **hook_options()).start(0) == (name in HOOKS)
    with pytest.raises(SystemExit, match="'sophiaq': no such optimizer; choose from adamw"):
        optimizers.settings('sophiaq', 480)
    with pytest.raises(ValueError, match='no optimizer'):
        build_optimizer('sophiaq', make_params(), lr=1e-3)
    assert optimizers.peak_learning_rate('lion', '770M')[0] is None


def test_states_per_parameter():
    """What the README says: tensors of the parameter's size."""
    count = {}
    for name in SETTINGS:
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = build_optimizer(name, [p], lr=1e-3)
        if name in HOOKS:
            optimizer.update_hessian([torch.ones(3)])
        optimizer.step()
        count[name] = sum(isinstance(s, torch.Tensor) and s.shape == p.shape for s in optimizer.state[p].values())
    assert count == dict(adamw=2, lion=1, adahessian=2, sophiag=2, sophiah=2, ef_clip=2, ah_clip=2, clip=1, normalize=1,
                         gnb_noclip=2)


def test_settings_of_the_paper():
    assert optimizers.settings('sophiag', 480) == dict(beta1=0.96, beta2=0.99, weight_decay=0.2, eps=1e-12, gamma=0.05,
                                                       hessian_interval=10, hessian_batch_size=240)
    assert {key: optimizers.settings('sophiah', 480)[key] for key in ('gamma', 'hessian_batch_size')} == dict(
        gamma=0.01, hessian_batch_size=32)
    # A smaller mini-batch: Gauss-Newton keeps its half, AdaHessian the whole, Hutchinson its 32 where they fit.
    assert [optimizers.settings(name, 40)['hessian_batch_size'] for name in ('sophiag', 'adahessian', 'sophiah')] == [
        20, 40, 32]
    assert optimizers.settings('sophiah', 8)['hessian_batch_size'] == 8
    assert optimizers.settings('adahessian', 1024)['hessian_batch_size'] == 1024
    assert optimizers.settings('gnb_noclip', 480)['hessian_interval'] == 2
    assert optimizers.settings('adahessian', 480)['hessian_interval'] == 1
    # Ablations have the rate of the optimizer that they are closest to.
    assert {name: optimizers.peak_learning_rate(name, '30M')[0] for name in optimizers.RATE_OF} == {
        'ef_clip': 1e-3, 'gnb_noclip': 1e-3, 'ah_clip': 1e-3, 'clip': 4e-4, 'normalize': 4e-4}


def hook_options(**options):
    return {'interval': 3, 'batch_size': 4, 'seed': 0, 'rank': 0, 'world_size': 1, 'compile': False,
            'autocast': torch.autocast('cpu', enabled=False), **options}


def test_hook_estimates_at_0_k_2k_and_takes_its_share_of_the_rows():
    hook = build_hessian_hook('sophiag', torch.nn.Linear(1, 1), build_optimizer('sophiag', make_params(), lr=1e-3),
                              **hook_options(batch_size=10, world_size=2))
    assert [i for i in range(10) if hook.start(i)] == [0, 3, 6, 9]
    assert [hook.take_rows(torch.zeros(3, 2)) for _ in range(3)] == [3, 2, 0]


def test_what_a_hook_draws_is_a_function_of_seed_iteration_and_rank_alone(monkeypatch):
    """With streams of their own: neither labels nor u have to do with the windows that they are drawn for."""
    params, drawn = make_params(), []
    model = torch.nn.ParameterList(params)
    model.hessian_vector_product, model.config = None, None
    options = hook_options(seed=5, rank=1, world_size=2)
    labels, vectors = (build_hessian_hook(name, model, build_optimizer(name, params, lr=1e-3), **options)
                       for name in ('sophiag', 'sophiah'))
    labels.start(3)
    uniforms = keyed_uniforms(5, LABELS, 3, (4, 7))
    assert torch.equal(labels.labels(torch.zeros(2, 7), 1, 1), uniforms[[3]])  # its second row: the fourth of all

    def estimator(params, generator, rademacher):
        drawn.append(generator.initial_seed())
        raise InterruptedError

    monkeypatch.setattr(optimizers, 'Hutchinson', estimator)
    vectors.start(3)
    with pytest.raises(InterruptedError):
        vectors.finish(None)
    assert drawn == [int(keyed_bits(5, VECTORS, 3)[0] >> 1)] and LABELS != VECTORS


def test_statistics_are_those_of_the_state():
    params = make_params()
    optimizer = build_optimizer('sophiag', params, lr=1e-3)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.update_hessian([torch.rand_like(p) for p in params])
    optimizer.step()
    found = optimizers.statistics(optimizer)
    for name, key in (('momentum_norm', 'exp_avg'), ('hessian_norm', 'hessian')):
        expected = torch.cat([optimizer.state[p][key].flatten() for p in params]).norm()
        assert found[name].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found['update_unclipped'] == optimizer.unclipped()


@pytest.mark.parametrize('size, rows, T, micro_batch, expected', [
    ('125M', 32, 1024, 32, 4), ('125M', 30, 1024, 32, 6), ('770M', 32, 1024, 12, 1), ('6.6B', 2, 2048, 1, 1),
    ('30M', 32, 128, 32, 32), ('30M', 32, 128, 12, 8), ('30M', 31, 128, 12, 1)])
def test_a_hessian_vector_product_takes_as_many_rows_as_have_room(size, rows, T, micro_batch, expected):
    config = GPTConfig(**SIZES[size])
    assert optimizers.rows_at_once(config, rows, T, micro_batch) == expected
    assert expected == 1 or expected * T ** 2 * config.n_layer * config.n_head <= optimizers.ATTENTION_WEIGHTS


@pytest.mark.parametrize('name', ['sophiag', 'sophiah', 'adahessian'])
def test_a_hook_hands_over_nothing_that_is_not_finite(name):
    """A model whose derivatives are NaN; under loss scaling Gauss-Newton's overflow is passed over."""
    class Model(torch.nn.Linear):
        config = GPTConfig(n_layer=1, n_head=1)

        def forward(self, X, Y, labels_hat=None, return_logits=True):
            loss = (super().forward(X) ** 2).sum().sqrt() * torch.inf
            return None, loss, loss

        def hessian_vector_product(self, X, Y, u):
            return {name: t * torch.nan for name, t in u.items()}

    model = Model(2, 2)
    optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
    hook = build_hessian_hook(name, model, optimizer, **hook_options())
    for scale in (1.0, 2.0):
        hook.start(0)
        hook.loss(model, torch.ones(4, 2), torch.ones(4, 2))
        hook.backward(scale)
        if name == 'sophiag' and scale != 1:
            hook.finish(optimizer, scale)
        else:
            with pytest.raises(FloatingPointError, match='Hessian estimate is not finite'):
                hook.finish(optimizer, scale)
    assert not optimizer.state


@pytest.mark.parametrize('max_norm', [0, 0.5, 100.0])
@pytest.mark.parametrize('name', SETTINGS)
def test_clipping_inside_the_update_is_clipping(name, max_norm):
    """Bit for bit what clip_grad_norm_ in front of the update does; our own optimizers leave the gradients alone."""
    runs = []
    for inside in (True, False):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((5, 4), (3,))]
        optimizer = build_optimizer(name, params, lr=1e-2)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            before = [p.grad.clone() for p in params]
            if name in HOOKS:
                optimizer.update_hessian([torch.rand_like(p) for p in params])
            if inside:
                norm = optimizers.clip_gradients(optimizer, params, max_norm)
                untouched = all(torch.equal(p.grad, g) for p, g in zip(params, before))
                assert untouched == (name != 'adamw' or max_norm != 0.5)
            else:
                norm = torch.nn.utils.clip_grad_norm_(params, max_norm or float('inf'))
            optimizer.step()
        runs.append([norm, *(p.detach() for p in params)])
    assert all(torch.equal(*pair) for pair in zip(*runs))


def test_the_norm_of_many_entries_is_right():
    """PyTorch's own is 0.2 % off for these."""
    tensors = [torch.full((5000, 1001), 1e-3), torch.full((3, 2), 0.1), torch.zeros(4096), torch.tensor(2.0)]
    expected = sum(t.double().square().sum() for t in tensors).sqrt().item()
    assert optimizers.total_norm(tensors).item() == pytest.approx(expected, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# The real train.py: every optimizer, 1 and 2 ranks, float32 and bfloat16

RUNS = [(name, dtype) for name in SETTINGS for dtype in ('float32', 'bfloat16')]


def run_all(rank, world_size, ports, dataset, out):
    """Runs train.py for each of RUNS in this process, as one of `world_size` ranks."""
    for (name, dtype), port in zip(RUNS, ports):
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
        sys.argv = [str(ROOT / 'train.py'), *TINY, f'--dataset={dataset}', f'--optimizer_name={name}',
                    f'--dtype={dtype}', f'--out_dir={out}/{name}-{dtype}', '--max_iters=6', '--eval_interval=6',
                    '--eval_iters=4', '--hessian_interval=2', '--hessian_batch_size=2', '--learning_rate=5e-3',
                    '--gamma=0.5', '--eps=1e-4']
        runpy.run_path(sys.argv[0], run_name='__main__')


@pytest.fixture(scope='module')
def trained(corpus, tmp_path_factory):
    """world size → directory with the out_dirs of RUNS. Three processes in all, each of which runs train.py again and
    again: starting Python anew for each would take most of the time."""
    outs, processes = {}, []
    for world_size in (1, 2):
        outs[world_size] = tmp_path_factory.mktemp(f'{world_size}-ranks')
        sockets = [socket.create_server(('127.0.0.1', 0)) for _ in RUNS]
        ports = [str(s.getsockname()[1]) for s in sockets]
        for s in sockets:
            s.close()
        for rank in range(world_size):
            processes.append(subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world_size), ','.join(ports), corpus, outs[world_size]],
                env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=f'{ROOT}'), stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True))
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error[-3000:]
    return outs


@pytest.mark.parametrize('name, dtype', RUNS)
def test_train_with_every_optimizer(trained, name, dtype):
    """It learns, logs what means something for this optimizer, and two ranks do what one does."""
    one, two = (trained[world_size] / f'{name}-{dtype}' for world_size in (1, 2))
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


if __name__ == '__main__':
    run_all(*sys.argv[1:3], sys.argv[3].split(','), *map(Path, sys.argv[4:]))
