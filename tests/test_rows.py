"""What every row of the table does, those that build an optimizer of a library, and optimizers by their library's
name."""

import copy
import dataclasses
import importlib

import numpy as np
import pytest
import torch
from conftest import TINY, metrics, needs_compiler, rejection

import optimizers
import train
from hessian import FirstOrder
from model import GPT, GPTConfig
from optimizers import OPTIMIZERS, SophiaSquared, build_optimizer, parameter_groups
from runtime import checkpoint, optim
from runtime.signals import STOPPED
from sophia import Sophia

# Each row with the class that it stands for, stand-alone, as its library's documentation has it. AdamW's settings are
# those of the table; `rest` is the embeddings and the head, then norms and biases.
NAMES = [name for name, row in OPTIMIZERS.items() if row.library]
BY_NAME = ['torch:NAdam', 'pytorch_optimizer:AdaBelief']
ALL = [*OPTIMIZERS, *BY_NAME]
LR = 1e-3


def needs(name):
    """Skips the test where the optimizer's library is not installed."""
    library = optimizers.row(name).library.partition(':')[0] or 'torch'
    pytest.importorskip(library, reason=f'the package {library} is not installed (requirements-dev.txt)')


def tiny_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=32, n_layer=2, n_head=2, n_embd=16, bias=True))


def alone(name, model):
    """The same optimizer without our table: [(optimizer, …)]."""
    hidden = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
    both = [dict(params=[p for p in model.parameters() if p.dim() == 2], weight_decay=0.1),
            dict(params=vectors, weight_decay=0.0)]
    if name == 'muon':
        return [torch.optim.Muon(hidden, lr=LR, weight_decay=0.1, adjust_lr_fn='match_rms_adamw'),
                torch.optim.AdamW([dict(params=embeddings, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)]
    if name == 'schedulefree':
        import schedulefree
        optimizer = schedulefree.AdamWScheduleFree(both, lr=LR)
        optimizer.train()
        return [optimizer]
    if name == 'torch:NAdam':
        return [torch.optim.NAdam(both, lr=LR)]
    po = importlib.import_module('pytorch_optimizer')
    if name == 'normuon':
        return [po.NorMuon([dict(params=hidden, lr=LR, weight_decay=0.1, use_muon=True),
                            dict(params=embeddings, lr=LR, weight_decay=0.1, use_muon=False),
                            dict(params=vectors, lr=LR, weight_decay=0.0, use_muon=False)],
                           update_scale='match_rms', adamw_eps=1e-8)]
    return [{'soap': lambda: po.SOAP(both, lr=LR),
             'ademamix': lambda: po.AdEMAMix(both, lr=LR, weight_decouple=True),
             'mars': lambda: po.MARS(both, lr=LR, lr_1d=LR, weight_decay_1d=0.0),
             'adopt': lambda: po.ADOPT(both, lr=LR, weight_decouple=True),
             'prodigy': lambda: po.Prodigy(both, lr=LR),
             'signum': lambda: po.SignSGD(both, lr=LR),
             'pytorch_optimizer:AdaBelief': lambda: po.AdaBelief(both, lr=LR)}[name]()]


def step(model, steppers, seed):
    """One update of all parameters by random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    for optimizer in steppers:
        optimizer.step()


@pytest.mark.parametrize('name', [*NAMES, *BY_NAME])
def test_a_row_computes_what_its_library_does(name):
    """With the learning rate of each step set from outside, bit for bit; its state_dict restores all."""
    needs(name)
    ours, theirs = tiny_gpt(), tiny_gpt()
    decay = 0.0 if ':' in name else 0.1
    args = dict(weight_decay=0.1, optimizer_args='weight_decay=0.1') if ':' in name else {}
    optimizer = build_optimizer(name, parameter_groups(ours, decay or 0.1, name), lr=LR, **args)
    alone_ones = alone(name, theirs)
    for i in range(13):
        lr = LR * (i + 1) / 13
        optim.set_learning_rate(optimizer, lr)
        for other in alone_ones:
            optim.set_learning_rate(other, lr)
        step(ours, [optimizer], i)
        step(theirs, alone_ones, i)
        for (key, p), q in zip(ours.named_parameters(), theirs.parameters()):
            assert torch.equal(p, q), (key, i)
    assert not torch.equal(ours.transformer.wpe.weight, tiny_gpt().transformer.wpe.weight)

    # state_dict: another model with these weights, and an optimizer that has loaded its state.
    again = copy.deepcopy(ours)
    loaded = build_optimizer(name, parameter_groups(again, 0.1, name), lr=LR, **args)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(2):
        step(ours, [optimizer], 100 + i)
        step(again, [loaded], 100 + i)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), again.parameters()))


def test_copies_of_several_optimizers_together():
    model = tiny_gpt()
    optimizer = build_optimizer('muon', parameter_groups(model, 0.1, 'muon'), lr=LR)
    step(model, [optimizer], 0)
    both = copy.deepcopy(dict(model=model, optimizer=optimizer))
    for m, o in ((model, optimizer), both.values()):
        assert all(inner.state is o.state for inner in o.optimizers)
        step(m, [o], 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), both['model'].parameters()))


def test_groups_by_role_hold_exactly_the_models_parameters():
    model = tiny_gpt()
    model.transformer.wpe.weight.requires_grad_(False)
    groups = parameter_groups(model, 0.1, 'muon')
    assert [group['role'] for group in groups] == ['hidden', 'embedding', 'vector']
    assert [group['weight_decay'] for group in groups] == [0.1, 0.1, 0.0]
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, embedding, vector = ({names[id(p)] for p in group['params']} for group in groups)
    assert hidden == {f'transformer.h.{i}.{layer}.weight' for i in range(2)
                      for layer in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}
    assert embedding == {'transformer.wte.weight'}
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(id(p) for group in groups for p in group['params']) == sorted(trained)


def test_a_role_has_its_share_of_the_learning_rate(monkeypatch):

    roles = dict(hidden={}, embedding=dict(lr_scale=0.5, weight_decay=0.0), vector={})
    monkeypatch.setitem(OPTIMIZERS, 'muon', dataclasses.replace(OPTIMIZERS['muon'], roles=roles))
    model = tiny_gpt()
    optimizer = build_optimizer('muon', parameter_groups(model, 0.1, 'muon'), lr=LR)
    optim.set_learning_rate(optimizer, 1.0)
    assert [group['lr'] for group in optimizer.param_groups] == [1.0, 0.5, 1.0]
    assert [group['weight_decay'] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]


def test_what_the_code_says_of_a_param_group_is_not_overruled_by_a_checkpoint(tmp_path, monkeypatch):
    def optimizer(maximize, lr_scale):
        build = lambda groups, s: Sophia(groups, lr=LR, maximize=maximize, bias_correction=True)  # noqa: E731
        monkeypatch.setitem(OPTIMIZERS, 'sophiag', dataclasses.replace(OPTIMIZERS['sophiag'], build=build))
        return build_optimizer('sophiag', [dict(params=model.parameters(), lr_scale=lr_scale)], lr=LR)

    model = tiny_gpt()
    saved = optimizer(maximize=True, lr_scale=0.1)
    saved.update_hessian([torch.ones_like(p) for p in model.parameters()])
    state = dict(model=model.state_dict(), optimizer=saved.state_dict(), scaler={}, config={})
    restored = optimizer(maximize=False, lr_scale=0.5)
    checkpoint.restore(tmp_path / 'ckpt_00000001.pt', state, model, restored, None)
    group, = restored.param_groups
    assert (group['maximize'], group['lr_scale'], group['hessian_step']) == (False, 0.5, 1)
    assert all((restored.state[p]['hessian'] > 0).all() for p in model.parameters())
    two = Sophia([dict(params=[p]) for p in model.parameters()], lr=LR)
    message = rejection(checkpoint.restore, tmp_path / 'ckpt_00000001.pt', state, model, two, None)
    assert '1 param groups were saved' in message and 'was parameter_groups edited?' in message


# ----------------------------------------------------------------------------------------------------------------------
# In training

FLAGS = {'soap': ['--optimizer_args=precondition_frequency=3'], 'prodigy': ['--optimizer_args=d0=1e-4']}
FLAGS |= {name: ['--hessian_interval=4'] for name, row in OPTIMIZERS.items() if row.hook is not FirstOrder}
FLAGS['adahessian'] = ['--hessian_interval=1']
LEARNING_RATES = dict(prodigy=1.0, adahessian=0.003)


def run(corpus, out, name, *flags):
    """train.main in this process. Returns its checkpoint of iteration 12."""
    for lock in checkpoint.LOCKS:  # of runs of this process
        lock.close()
    train.main([*TINY, f'--dataset={corpus}', f'--out_dir={out}', f'--optimizer_name={name}',
                f'--learning_rate={LEARNING_RATES.get(name, 3e-3)}', '--max_iters=12', '--eval_interval=4',
                '--eval_iters=2', '--compile=False', *FLAGS.get(name, []), *map(str, flags)])
    return torch.load(out / 'ckpt_00000012.pt', weights_only=True) if (out / 'ckpt_00000012.pt').exists() else None


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize('name', ALL)
def test_a_row_lowers_the_loss_and_resumes_bit_for_bit(corpus, tmp_path, name, monkeypatch, capsys):
    """Stopped after six iterations, which is no evaluation, and resumed: all of the next checkpoint is the same."""
    needs(name)
    whole = run(corpus, tmp_path / 'whole', name)
    losses = metrics(tmp_path / 'whole', 'val/loss')
    assert losses[-1] < losses[0] - (0.001 if name in LEARNING_RATES else 0.02), losses

    polls = iter([[0, 0]] * 5 + [[1, 0]])
    with monkeypatch.context() as patch:
        patch.setattr(train.StopSignals, 'poll', lambda self: next(polls))
        with pytest.raises(SystemExit) as stopped:
            run(corpus, tmp_path / 'parts', name)
        assert stopped.value.code == STOPPED and (tmp_path / 'parts/ckpt_00000006.pt').exists()
    resumed = run(corpus, tmp_path / 'parts', name, '--init_from=resume')
    assert same(resumed['model'], whole['model']) and same(resumed['optimizer'], whole['optimizer'])
    assert metrics(tmp_path / 'parts') == metrics(tmp_path / 'whole')


def test_schedule_free_evaluates_and_saves_the_averaged_weights(corpus, tmp_path, monkeypatch):
    needs('schedulefree')
    saved = run(corpus, tmp_path / 'out', 'schedulefree')
    z, y = ([state[key] for state in saved['optimizer']['state'].values()] for key in ('z', 'training_weights'))
    groups = [i for group in saved['optimizer']['param_groups'] for i in group['params']]
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    params = [p for group in parameter_groups(model, 0.1) for p in group['params']]
    assert groups == list(range(len(params)))
    # y = (1 − β1)·z + β1·x, x being the average.
    for p, z_, y_ in zip(params, z, y):
        torch.testing.assert_close(0.1 * z_ + 0.9 * p.detach(), y_)
        assert not torch.equal(p, y_)
    evaluated = metrics(tmp_path / 'out', 'val/loss')[-1]
    run(corpus, tmp_path / 'out', 'schedulefree', '--init_from=resume', '--eval_only=True')
    assert metrics(tmp_path / 'out', 'val/loss')[-1] == evaluated


def test_other_arguments_are_rejected_at_resume(corpus, tmp_path):
    """A param group keeps what it was saved with, so they would have no effect."""
    run(corpus, tmp_path, 'torch:NAdam')
    assert '--optimizer_args=; resume with it' in rejection(
        run, corpus, tmp_path, 'torch:NAdam', '--init_from=resume', '--optimizer_args=momentum_decay=0.1')


@pytest.mark.parametrize('name', ALL)
def test_a_row_computes_on_two_ranks_what_it_does_on_one(train, tmp_path, name):
    """Replicas, and shards where it takes them; those resume, too."""
    needs(name)
    flags = [*FLAGS.get(name, []), '--max_iters=6', '--lr_decay_iters=6', '--eval_interval=3',
             f'--learning_rate={LEARNING_RATES.get(name, 1e-3)}', '--dropout=0']

    def losses(out, *more, ranks=2):
        done = train(tmp_path / out, *flags, *more, ranks=ranks, name=name)
        assert done.code == 0, done.err
        return metrics(tmp_path / out)

    alone = losses('alone', ranks=1)
    # Rounding chooses among SOAP's eigenvectors.
    np.testing.assert_allclose(losses('ddp'), alone, rtol=1e-3 if name == 'soap' else 1e-4)
    row = optimizers.row(name)
    if row.shards and not row.hook.hessian_products:
        whole = losses('fsdp', '--parallel=fsdp')
        np.testing.assert_allclose(whole, alone, rtol=1e-4)
        losses('parts', '--parallel=fsdp', '--max_iters=3')
        assert losses('parts', '--parallel=fsdp', '--init_from=resume') == whole
    else:
        done = train(tmp_path / 'fsdp', *flags, '--parallel=fsdp', ranks=2, name=name)
        assert f'--parallel=fsdp: must be ddp for {name}' in done.err and 'Traceback' not in done.err


# ----------------------------------------------------------------------------------------------------------------------
# Settings


def settings(*flags):
    return train.resolve([*TINY, *flags])


def test_an_optimizer_by_its_librarys_name():
    """Its defaults are the settings, where we have such; optimizer_args go over them."""
    c = settings('--optimizer_name=torch:NAdam', '--learning_rate=1e-3')
    assert (c.beta1, c.beta2, c.eps, c.weight_decay) == (0.9, 0.999, 1e-8, 0.0)
    c = settings('--optimizer_name=pytorch_optimizer:AdaBelief', '--learning_rate=1e-3',
                 '--optimizer_args=betas=(0.8,0.95), weight_decay=0.2, rectify=True')
    assert (c.beta1, c.beta2, c.weight_decay) == (0.8, 0.95, 0.2)
    values = {key: c.values[key] for key in optimizers.NEUTRAL}
    model = tiny_gpt()
    built = build_optimizer(c.optimizer_name, parameter_groups(model, c.weight_decay, c.optimizer_name), lr=1e-3,
                            **values)
    assert [(g['betas'], g['weight_decay'], g['rectify']) for g in built.param_groups] == [
        ((0.8, 0.95), 0.2, True), ((0.8, 0.95), 0.0, True)]
    c = settings('--optimizer_name=torch:NAdam', '--learning_rate=1e-3', '--beta1=0.5', '--weight_decay=0.3')
    built = build_optimizer(c.optimizer_name, parameter_groups(model, c.weight_decay), lr=1e-3,
                            **{key: c.values[key] for key in optimizers.NEUTRAL})
    assert built.param_groups[0]['betas'] == (0.5, 0.999) and built.param_groups[0]['weight_decay'] == 0.3


def test_a_run_announces_the_settings_of_its_optimizer_only():
    """AdEMAMix has three betas, so ours are not its."""
    for name, has in [('adamw', {'beta1', 'beta2', 'eps', 'weight_decay'}), ('signum', {'beta1', 'weight_decay'}),
                      ('pytorch_optimizer:AdEMAMix', {'eps', 'weight_decay'})]:
        c = settings(f'--optimizer_name={name}', '--learning_rate=1e-3')
        announced = {line.split()[0] for line in c.lines()}
        assert announced & optimizers.NEUTRAL.keys() == has
        everything = [line for line in c.lines(everything=True) if line.startswith('gamma')]
        assert len(everything) == 1 and everything[0].endswith(f'not a setting of {name}')


@pytest.mark.parametrize('flags, message', [
    (['muno'], '--optimizer_name=muno: no such optimizer; did you mean muon?'),
    (['torch:NAdamW'], '--optimizer_name=torch:NAdamW: torch has no such optimizer; did you mean NAdam?'),
    (['pytorch_optimiser:SOAP'], 'needs the package pytorch_optimiser, which is not installed; did you mean '
                                 'pytorch_optimizer?'),
    (['no_such_library:X'], 'needs the package no_such_library, which is not installed; pip install no_such_library'),
    (['torch:LBFGS'], '--optimizer_name=torch:LBFGS: its step evaluates the loss again'),
    (['torch:NAdam', '--optimizer_args=momentum_decai=0.1'], 'NAdam has no argument momentum_decai; did you mean '
                                                             'momentum_decay?'),
    (['torch:NAdam', '--optimizer_args=betas'], '--optimizer_args=betas: write NAME=VALUE'),
    (['torch:NAdam', '--optimizer_args=eps=__import__("os")'], 'write NAME=VALUE'),
    (['torch:NAdam', '--optimizer_args=lr=1'], 'the learning rate is --learning_rate'),
    (['torch:NAdam', '--optimizer_args=weight_decay=0.1', '--weight_decay=0.2'], '--weight_decay says the same'),
    (['sophiag', '--optimizer_args=foreach=True'], '--optimizer_args has no effect with sophiag'),
    (['soap', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for soap'),
    (['pytorch_optimizer:SOAP', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for pytorch_optimizer:SOAP'),
])
def test_what_cannot_be_is_rejected_in_one_line(flags, message):
    assert message in rejection(settings, f'--optimizer_name={flags[0]}', '--learning_rate=1e-3', *flags[1:])


def test_a_learning_rate_that_the_table_does_not_have_must_be_given():
    assert rejection(settings, '--optimizer_name=mars') == (
        'our table has no learning rate for mars at tiny; set --learning_rate')
    muon, adamw = (settings(f'--optimizer_name={name}', '--model_size=125M') for name in ('muon', 'adamw'))
    assert muon.learning_rate == adamw.learning_rate == 6e-4


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib, 'import_module', lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert rejection(settings, '--optimizer_name=soap', '--learning_rate=1e-3') == (
        '--optimizer_name=soap: needs the package pytorch_optimizer, which is not installed; pip install '
        'pytorch_optimizer')


def test_settings_that_an_optimizer_rejects():
    model = tiny_gpt()
    message = rejection(lambda: build_optimizer('soap', parameter_groups(model, 0.1), lr=1e-3,
                                              optimizer_args='precondition_frequency=-1'))
    assert message.startswith('--optimizer_name=soap: SOAP rejects its settings')


# ----------------------------------------------------------------------------------------------------------------------
# Sophia's bias correction


@pytest.mark.parametrize('cls, compile', [(Sophia, False), (SophiaSquared, False),
                                          pytest.param(SophiaSquared, True, marks=needs_compiler)])
def test_bias_correction_of_h(cls, compile):
    """Constant gradients and estimates: from the first step on, each step has the size that it has in the end, where
    h has reached its level."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = cls([p], lr=1.0, betas=(0.0, 0.9), gamma=0.5, weight_decay=0.0, bias_correction=True, compile=compile)
    for i in range(4):
        if i % 2 == 0:
            optimizer.update_hessian([torch.full((3,), 8.0)])
        before = p.detach().clone()
        p.grad = torch.full((3,), 2.0)
        optimizer.step()
        torch.testing.assert_close(before - p.detach(), torch.full((3,), 2 / (0.5 * 8)))
        assert optimizer.unclipped_fraction() == 1
    assert optimizer.param_groups[0]['hessian_step'] == 2


def test_bias_correction_resumes_bit_for_bit(corpus, tmp_path):
    flags = ['--hessian_interval=3', '--hessian_bias_correction=True']
    whole = run(corpus, tmp_path / 'whole', 'sophiag', *flags)
    plain = run(corpus, tmp_path / 'plain', 'sophiag', flags[0])
    run(corpus, tmp_path / 'parts', 'sophiag', *flags, '--max_iters=6', '--lr_decay_iters=12')
    resumed = run(corpus, tmp_path / 'parts', 'sophiag', *flags, '--init_from=resume')
    assert same(resumed['model'], whole['model']) and not same(plain['model'], whole['model'])
    assert resumed['optimizer']['param_groups'][0]['hessian_step'] == 4
