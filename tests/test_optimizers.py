"""The optimizers against references, and as PyTorch users expect them; the table of the paper's settings; metrics."""

import copy
import math
import pickle

import pytest
import reference
import torch
from conftest import rejection
from reference import uniform
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import optimizers
import train as train_py
from configurator import setting
from model import GPT, GPTConfig
from optimizers import AdaHessian, Lion, Normalize, build_optimizer
from runtime import optim
from sophia import Sophia
from train import resolve


def random_problem(seed, interval=1, eps=True):
    """Random hyperparameters, θ, 15 gradients, and an estimate at every `interval`-th of them, in float64."""
    torch.manual_seed(seed)
    settings = dict(lr=10 ** uniform(-4, -1), beta1=uniform(0, 0.99), beta2=uniform(0, 0.999),
                    weight_decay=uniform(0, 0.5))
    if eps:
        settings['eps'] = 10 ** uniform(-10, -2)
    theta, gradients = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (15, 3, 4)))
    estimates = [torch.randn(3, 4, dtype=torch.float64) if t % interval == 0 else None for t in range(15)]
    return settings, theta, gradients * 10 ** uniform(-3, 1), estimates


def run(optimizer, p, gradients, estimates):
    for g, h_hat in zip(gradients, estimates):
        p.grad = g.clone()
        if h_hat is not None and isinstance(optimizer, Sophia):
            optimizer.update_hessian([h_hat])
        optimizer.step()


@pytest.mark.parametrize('seed', [0, 2])
@pytest.mark.parametrize('name', ['lion', 'adahessian', 'normalize'])
def test_baselines(name, seed):
    """AdaHessian corrects the bias of v by the number of estimates, which need not be that of the steps."""
    settings, theta, gradients, estimates = random_problem(seed, 1 + seed % 3, eps=name != 'lion')
    if name == 'normalize':
        del settings['beta2']
    p = torch.nn.Parameter(theta.clone())
    optimizer = build_optimizer(name, [p], **settings)
    run(optimizer, p, gradients, estimates)
    expected = getattr(reference, name)(theta, gradients, estimates, **settings)
    torch.testing.assert_close((p.detach(), optimizer.state[p]['exp_avg']), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('cls, options', [
    (optimizers.SophiaUnclipped, dict(rho=math.inf)), (optimizers.SophiaSquared, dict(squared=True))])
def test_variants_of_sophia(cls, options):
    settings, theta, gradients, estimates = random_problem(0, interval=3)
    p, gamma = torch.nn.Parameter(theta.clone()), uniform(0.01, 10)
    betas = settings['beta1'], settings['beta2']
    run(cls([p], settings['lr'], betas, gamma, settings['eps'], settings['weight_decay']), p, gradients, estimates)
    expected = reference.sophia(theta, gradients, estimates, gamma=gamma, **settings, **options)[0]
    torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


def test_unclipped_fraction_with_squared_estimates():
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = optimizers.SophiaSquared([p], lr=0.1, betas=(0, 0), gamma=0.5)
    optimizer.update_hessian([torch.tensor([1.0, 4.0, -1.0, 1.0, 10.0])])
    p.grad = torch.tensor([0.4, 3.0, 1e-3, 0.6, 1.0])
    optimizer.step()
    assert optimizer.unclipped_fraction().item() == pytest.approx(3 / 5)


@pytest.mark.filterwarnings('ignore:Sophia.step')
def test_clip_is_sophia_without_curvature():
    """The ablation Clip, built as Lion with a single β, takes the steps of Algorithm 3 with h = 0."""
    settings, theta, gradients, _ = random_problem(0, eps=False)
    p, q = (torch.nn.Parameter(theta.clone()) for _ in range(2))
    run(build_optimizer('signum', [p], **settings), p, gradients, [None] * 15)
    run(Sophia([q], lr=settings['lr'], betas=(settings['beta1'], 0), weight_decay=settings['weight_decay']), q,
        gradients, [None] * 15)
    torch.testing.assert_close(p, q)


OPTIMIZERS = pytest.mark.parametrize('cls', [Sophia, Lion, AdaHessian, Normalize])


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 3), (3,)]]


def train(optimizer, params, steps, first=0):
    """Steps with gradients and estimates that depend on the step and the parameters."""
    for t in range(first, first + steps):
        for p in params:
            p.grad = torch.sin(p.detach() * 3 + t)
        if isinstance(optimizer, Sophia):
            optimizer.update_hessian([1 + torch.cos(p.detach() + t) for p in params])
        optimizer.step()


def muon(params):
    return build_optimizer('muon', [dict(params=params[:1], role='hidden'), dict(params=params[1:])], lr=0.02)


@OPTIMIZERS
@pytest.mark.parametrize('copied', [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_continues_identically(cls, copied):
    params = make_params()
    optimizer = cls(params, lr=1e-2)
    train(optimizer, params, 3)
    other, twins = copied((optimizer, params))
    train(optimizer, params, 3, first=3)
    train(other, twins, 3, first=3)
    assert all(torch.equal(p, q) for p, q in zip(params, twins))


@OPTIMIZERS
def test_tensor_learning_rate(cls):
    params, twins = make_params(), make_params()
    optimizer = cls(params, lr=torch.tensor(0.02))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
    train(optimizer, params, 4)
    train(cls(twins, lr=0.01), twins, 4)
    assert torch.equal(scheduler.get_last_lr()[0], optimizer.param_groups[0]['lr'])
    torch.testing.assert_close(params, twins)


@OPTIMIZERS
@pytest.mark.filterwarnings('ignore:Sophia.step')
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
def test_parameters_without_gradient(cls):
    """A parameter without gradient keeps its value and makes no momentum; one with gradient 0 decays."""
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = cls(params, lr=0.1, weight_decay=0.5)
    params[0].grad = torch.zeros_like(params[0])
    if issubclass(cls, Sophia):
        optimizer.update_hessian([torch.ones_like(params[0]), None])
    optimizer.step()
    assert torch.equal(params[1], before[1]) and not optimizer.state[params[1]]
    torch.testing.assert_close(params[0].detach(), 0.95 * before[0])


@pytest.mark.parametrize('cls', [Sophia, AdaHessian])
def test_settings_out_of_range_are_rejected(cls):
    for bad in (dict(lr=-1.0), dict(lr=float('nan')), dict(lr=0.1, weight_decay=-0.1), dict(lr=0.1, nonfinite='maybe'),
                dict(lr=0.1, betas=(1.0, 0.9))):
        with pytest.raises(ValueError, match=next(key for key in reversed(bad))):
            cls(make_params(), **bad)
    with pytest.raises(ValueError, match='lr = -1'):
        cls(make_params()[:1], lr=0.1).add_param_group({'params': make_params()[1:], 'lr': -1})


@pytest.mark.parametrize('where', ['gradient', 'Hessian estimate'])
@pytest.mark.parametrize('cls', [Sophia, AdaHessian])
@pytest.mark.parametrize('bad, nonfinite', [(float('nan'), 'raise'), (-float('inf'), 'raise'), (float('nan'), 'skip')])
def test_what_is_not_finite_never_enters_the_state(cls, where, bad, nonfinite):
    params = make_params()
    optimizer = cls(params, lr=0.1, nonfinite=nonfinite)
    train(optimizer, params, 2)
    before = copy.deepcopy((params, optimizer.state_dict()['state']))
    values = [torch.ones(4, 3), torch.tensor([1.0, bad, 1.0])]

    def use():
        if where == 'gradient':
            params[0].grad, params[1].grad = values
            optimizer.step()
        else:
            optimizer.update_hessian(values)

    if nonfinite == 'raise':
        with pytest.raises(FloatingPointError, match=f'{where} is not finite'):
            use()
    else:
        use()
    torch.testing.assert_close((params, optimizer.state_dict()['state']), before, rtol=0, atol=0)
    train(optimizer, params, 1)
    assert all(torch.isfinite(p).all() for p in params) and not torch.equal(params[0], before[0][0])


@OPTIMIZERS
@pytest.mark.parametrize('options', [dict(full_state_dict=True, cpu_offload=True),
                                     dict(flatten_optimizer_state_dict=True)], ids=['full', 'flat'])
@pytest.mark.filterwarnings('error:Sophia.step')
def test_state_dicts_of_distributed_checkpoints_continue_identically(cls, options):
    """With counters above 256, which bfloat16 parameters must not round."""
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4).bfloat16()
        return model, cls(model.parameters(), lr=1e-2)

    (model, optimizer), (resumed, other) = make(), make()
    params, twins = list(model.parameters()), list(resumed.parameters())
    train(optimizer, params, 258)
    options = StateDictOptions(**options)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(resumed, other, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    for _ in range(2):
        for p, q in zip(params, twins):
            assert torch.equal(p, q) and optimizer.state[p].keys() == other.state[q].keys()
            assert all(t.dtype == other.state[q][key].dtype for key, t in optimizer.state[p].items())
            assert all(torch.equal(t, other.state[q][key]) for key, t in optimizer.state[p].items())
        train(optimizer, params, 2, first=258)
        train(other, twins, 2, first=258)
    assert cls is not AdaHessian or other.state[twins[0]]['step'].tolist() == [262, 262]


@pytest.mark.parametrize('estimates', [[torch.ones(4, 3), None], [torch.ones(4, 3), torch.zeros(3)]])
def test_adahessian_does_not_move_what_has_no_curvature_yet(estimates):
    """A layer that was frozen, or a row of an embedding that no estimate has seen, until it has an estimate."""
    params = make_params()
    before = params[1].detach().clone()
    optimizer = AdaHessian(params, lr=0.1, weight_decay=0)
    for own in ([None, None], estimates, [torch.ones_like(p) for p in params]):
        optimizer.update_hessian(own)
        assert torch.equal(params[1], before)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert 0.01 < (params[1] - before).abs().max() < 1


def test_settings_of_the_paper():
    """tests/test_configs.py has the published runs' settings."""
    for name, cls in dict(sophiag=Sophia, lion=Lion, adahessian=AdaHessian, normalize=Normalize).items():
        built = build_optimizer(name, make_params(), lr=0.1)
        assert built.defaults == cls(make_params(), lr=0.1).defaults  # by themselves, too
        assert not getattr(built, 'compile', False)
    assert build_optimizer('adamw', make_params(), lr=0.1).defaults['fused']
    for name, rate in dict(adamw=1.2e-2, lion=4e-3, sophiag=2e-3, adahessian=0.3, muon=4.8e-2, soap=2.4e-2).items():
        assert optimizers.peak_learning_rate(name, 'tiny')[0] == rate
    # Of another mini-batch Gauss-Newton keeps its half, AdaHessian the whole, Hutchinson its 32 where they fit.
    for name, total, expected in [('sophiag', 40, 20), ('adahessian', 40, 40), ('sophiah', 40, 32), ('sophiah', 8, 8),
                                  ('adahessian', 1024, 1024), ('sophiag', 1, 1), ('sophiag', 2, 1)]:
        found = resolve([f'--optimizer_name={name}', f'--total_batch_size={total}', f'--batch_size={min(total, 8)}'],
                        world_size=1)
        assert found.hessian_batch_size == expected
    # Ablations have the learning rate of the optimizer that they are closest to.
    for name, rate in dict(ef_clip=1e-3, gnb_noclip=1e-3, ah_clip=1e-3, signum=4e-4, normalize=4e-4).items():
        assert optimizers.peak_learning_rate(name, '30M')[0] == rate
    assert optimizers.peak_learning_rate('lion', '770M')[0] is None


def test_a_setting_of_one_optimizer_is_a_line_in_train(monkeypatch):
    """And a row may have another value of a setting with a default, which others keep."""
    own = dict(optimizers.OPTIMIZERS['adamw'].settings, nesterov=True, grad_clip=0.5)
    monkeypatch.setitem(optimizers.OPTIMIZERS, 'mine', optimizers.Row(optimizers.adamw, own, 0.1))
    monkeypatch.setitem(train_py.DEFAULTS, 'nesterov', setting(bool))
    found = {name: resolve([f'--optimizer_name={name}']) for name in ('mine', 'adamw')}
    assert {name: (c.nesterov, c.sources['nesterov'], c.grad_clip) for name, c in found.items()} == dict(
        mine=(True, 'optimizer mine', 0.5), adamw=(False, 'not a setting of adamw', 1.0))
    assert rejection(resolve, ['--nesterov=True']) == '--nesterov has no effect with adamw; leave it out'


def test_metrics():
    """The norm of the momentum, and what a method `metrics` returns."""
    class Own(torch.optim.SGD):
        def metrics(self):
            return dict(temperature=torch.tensor(2.0))

    model = torch.nn.ParameterDict(dict(a=torch.zeros(5), b=torch.zeros(2, 2)))
    kinds = {'hessian_norm/norm': 2000 ** 0.5, 'hessian_norm/other': 40.0}
    for optimizer, expected in (
            (Own(model.parameters(), lr=0.1, momentum=0.9), dict(momentum_norm=3.0, temperature=2.0)),
            (Sophia(model.parameters(), lr=0.1, betas=(0.5, 0.5)), dict(
                momentum_norm=1.5, hessian_norm=60.0, update_unclipped=1.0, **kinds))):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if isinstance(optimizer, Sophia):
            optimizer.update_hessian([torch.full_like(p, 40.0) for p in model.parameters()])
        optimizer.step()
        found = {key: value.item() for key, value in optimizers.optimizer_metrics(optimizer, model).items()}
        assert found == pytest.approx(expected)


def test_kinds_of_tensors():
    """What an edit adds or renames is of no known kind."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=8, block_size=8))
    model.transformer.h[0].mixer, model.head_2 = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    found = {name.removeprefix('transformer.'): optimizers.kind_of(name, p) for name, p in model.named_parameters()}
    assert found == {'wte.weight': 'embedding', 'wpe.weight': 'embedding', 'h.0.ln_1.weight': 'norm',
                     'h.0.attn.c_attn.weight': 'attention', 'h.0.attn.c_proj.weight': 'attention',
                     'h.0.ln_2.weight': 'norm', 'h.0.mlp.c_fc.weight': 'mlp', 'h.0.mlp.c_proj.weight': 'mlp',
                     'ln_f.weight': 'norm', 'h.0.mixer.weight': 'other', 'h.0.mixer.bias': 'norm',
                     'head_2.weight': 'other', 'head_2.bias': 'norm'}


@pytest.mark.parametrize('max_norm, scale', [(0, 3.0), (0.5, 1.0), (0.5, 3.0), (100.0, 3.0)])
def test_clipping_is_that_of_pytorch(max_norm, scale):
    """Parameters without a gradient, as of a module that a forward did not use, are left out."""
    params, twins = make_params(), make_params()
    for p, q in zip(params, twins):
        p.grad = torch.randn_like(p)
        q.grad = scale * p.grad
    params_and_one = [*params, torch.nn.Parameter(torch.ones(2))]
    optim.scale_gradients(params_and_one, torch.tensor(scale))
    norm = optim.clip_gradients(params_and_one, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, max_norm or float('inf')))
    torch.testing.assert_close([p.grad for p in params], [q.grad for q in twins])


def test_the_norm_of_many_entries_is_right():
    """PyTorch's own is 0.2 % off."""
    found = optim.global_norm([torch.full((5000, 1001), 1e-3), torch.tensor(2.0)])
    assert found.item() == pytest.approx((5000 * 1001 * 1e-6 + 4) ** 0.5, rel=1e-5)
