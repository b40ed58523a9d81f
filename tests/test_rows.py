"""Every optimizer of the table and of libraries in training: the same as alone, resumed, on two ranks; and settings."""

import copy
import importlib

import numpy as np
import pytest
import torch
from conftest import TINY, metrics, rejection

import optimizers
import train as program
from hessian import Hook
from model import GPT, GPTConfig
from optimizers import OPTIMIZERS, build_optimizer, parameter_groups
from runtime import checkpoint, optim
from runtime.signals import STOPPED

BY_NAME = ['torch:NAdam', 'pytorch_optimizer:AdaBelief']
FROM_LIBRARIES = [*(name for name, row in OPTIMIZERS.items() if row.library), *BY_NAME]
LR = 1e-3


def needs(name):
    """Skips the test where the optimizer's library is not installed."""
    library = name.partition(':')[0] if ':' in name else OPTIMIZERS[name].library.partition(':')[0]
    if library not in ('', 'torch'):
        pytest.importorskip(library, reason=f'the package {library} is not installed (requirements-dev.txt)')


def tiny_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=32, n_layer=2, n_head=2, n_embd=16, bias=True))


def step(model, steppers, seed):
    """One update of all parameters by random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    for optimizer in steppers:
        if hasattr(optimizer, 'update_hessian'):
            optimizer.update_hessian(p.grad.abs() for group in optimizer.param_groups for p in group['params'])
        optimizer.step()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ----------------------------------------------------------------------------------------------------------------------
# On a model


def alone(name, model):
    """The optimizer without our table, as its library's documentation has it, in a list. AdamW's settings are the
    table's."""
    hidden = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
    both = [dict(params=embeddings + hidden, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    if name == 'muon':
        return [torch.optim.Muon(hidden, lr=LR, weight_decay=0.1, adjust_lr_fn='match_rms_adamw'),
                torch.optim.AdamW([dict(params=embeddings, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)]
    library, _, cls = (name if ':' in name else OPTIMIZERS[name].library).partition(':')
    return [getattr(importlib.import_module({'torch': 'torch.optim'}.get(library, library)), cls)(both, lr=LR)]


@pytest.mark.parametrize('name', FROM_LIBRARIES)
def test_an_optimizer_computes_what_its_library_does(name):
    """With the learning rate of each step set from outside, bit for bit; its state_dict restores all."""
    needs(name)
    ours, theirs = tiny_gpt(), tiny_gpt()
    optimizer, alone_ones = build_optimizer(name, parameter_groups(ours, 0.1), lr=LR), alone(name, theirs)
    for i in range(13):
        for one in (optimizer, *alone_ones):
            optim.set_learning_rate(one, LR * (i + 1) / 13)
        step(ours, [optimizer], i)
        step(theirs, alone_ones, i)
        for (key, p), q in zip(ours.named_parameters(), theirs.parameters()):
            assert torch.equal(p, q), (key, i)
    assert not torch.equal(ours.transformer.wpe.weight, tiny_gpt().transformer.wpe.weight)

    again = copy.deepcopy(ours)
    loaded = build_optimizer(name, parameter_groups(again, 0.1), lr=LR)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(2):
        step(ours, [optimizer], 100 + i)
        step(again, [loaded], 100 + i)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), again.parameters()))


def test_copies_of_several_optimizers_together():
    model = tiny_gpt()
    optimizer = build_optimizer('muon', parameter_groups(model, 0.1), lr=LR)
    step(model, [optimizer], 0)
    both = copy.deepcopy(dict(model=model, optimizer=optimizer))
    for m, o in ((model, optimizer), both.values()):
        assert all(inner.state is o.state for inner in o.optimizers)
        step(m, [o], 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), both['model'].parameters()))


def test_groups_hold_exactly_the_trained_parameters():
    model = tiny_gpt()
    model.transformer.wpe.weight.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert [(group.get('role'), group['weight_decay']) for group in groups] == [
        ('embedding', 0.1), (None, 0.1), (None, 0.0)]
    names = {id(p): name for name, p in model.named_parameters()}
    embedding, hidden, vector = ([names[id(p)] for p in group['params']] for group in groups)
    assert embedding == ['transformer.wte.weight']
    assert hidden == [f'transformer.h.{i}.{layer}.weight' for i in range(2)
                      for layer in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(embedding + hidden + vector) == sorted(trained)


@pytest.mark.parametrize('name', [*OPTIMIZERS, *BY_NAME])
def test_a_learning_rate_of_a_groups_own_reaches_every_optimizer(name):
    """Layers with lr_scale = 0, some of them Muon's, stay as they are, and all others move."""
    needs(name)
    model = tiny_gpt()
    before = copy.deepcopy(model)
    still = {id(p) for p in [*model.transformer.h[0].parameters(), model.transformer.wte.weight]}
    groups = [dict(group, params=[p for p in group['params'] if (id(p) in still) == stays], lr_scale=scale)
              for group in parameter_groups(model, 0.1) for stays, scale in ((True, 0.0), (False, 0.5))]
    optimizer = build_optimizer(name, [group for group in groups if group['params']], lr=LR)
    optim.set_learning_rate(optimizer, LR)
    assert {group['lr'] for group in optimizer.param_groups} == {0.0, LR / 2}
    for i in range(3):
        step(model, [optimizer], i)
    for p, q in zip(model.parameters(), before.parameters()):
        assert torch.equal(p, q) == (id(p) in still)


def test_a_checkpoint_does_not_overrule_what_the_code_says_of_a_group(tmp_path):
    def optimizer(maximize, lr_scale):
        return optimizers.AdaHessian([dict(params=model.parameters(), lr_scale=lr_scale)], lr=LR, maximize=maximize)

    model = tiny_gpt()
    saved, restored = optimizer(True, 0.1), optimizer(False, 0.5)
    saved.param_groups[0]['counter'] = 3
    saved.update_hessian([torch.ones_like(p) for p in model.parameters()])
    state = dict(model=model.state_dict(), optimizer=saved.state_dict(), scaler={}, config={})
    checkpoint.restore(tmp_path / 'ckpt_00000001.pt', state, model, restored, None)
    group, = restored.param_groups
    assert (group['maximize'], group['lr_scale'], group['counter']) == (False, 0.5, 3)
    assert all((restored.state[p]['hessian'] > 0).all() for p in model.parameters())
    two = optimizers.AdaHessian([dict(params=[p]) for p in model.parameters()], lr=LR)
    message = rejection(checkpoint.restore, tmp_path / 'ckpt_00000001.pt', state, model, two, None)
    assert '1 param groups were saved' in message and 'was parameter_groups edited?' in message


# ----------------------------------------------------------------------------------------------------------------------
# In training

FLAGS = {'soap': ['--optimizer_args=precondition_frequency=3'], 'adahessian': ['--hessian_interval=1']}
FLAGS |= {name: ['--hessian_interval=4'] for name, row in OPTIMIZERS.items()
          if row.hook is not Hook and name != 'adahessian'}


def arguments(corpus, out, name, *flags):
    lr = 0.003 if name == 'adahessian' else 3e-3
    return [*TINY, f'--dataset={corpus}', f'--out_dir={out}', f'--optimizer_name={name}', f'--learning_rate={lr}',
            '--max_iters=12', '--eval_interval=4', '--eval_iters=2', '--compile=False', *FLAGS.get(name, []),
            *map(str, flags)]


def run(corpus, out, name, *flags):
    """train.main in this process. Returns its checkpoint of iteration 12."""
    for lock in checkpoint.LOCKS:  # of runs of this process
        lock.close()
    program.main(arguments(corpus, out, name, *flags))
    return torch.load(out / 'ckpt_00000012.pt', weights_only=True)


@pytest.mark.parametrize('name', [*OPTIMIZERS, *BY_NAME, 'schedulefree:AdamWScheduleFree'])
def test_an_optimizer_lowers_the_loss_and_resumes_bit_for_bit(corpus, tmp_path, name, monkeypatch):
    """Stopped after six iterations, at which nothing is evaluated, and resumed: the whole next checkpoint is the same.
    The log holds what means something for this optimizer."""
    needs(name)
    whole = run(corpus, tmp_path / 'whole', name)
    losses = metrics(tmp_path / 'whole', 'val/loss')
    assert losses[-1] < losses[0] - (0.001 if name == 'adahessian' else 0.02), losses
    estimates = name in OPTIMIZERS and OPTIMIZERS[name].hook is not Hook
    assert len(metrics(tmp_path / 'whole', 'hessian_norm')) == 12 * estimates
    assert len(metrics(tmp_path / 'whole', 'update_unclipped')) == 12 * (estimates and name != 'adahessian')

    polls = iter([[0, 0]] * 5 + [[1, 0]])
    with monkeypatch.context() as patch:
        patch.setattr(program.StopSignals, 'poll', lambda self: next(polls))
        with pytest.raises(SystemExit) as stopped:
            run(corpus, tmp_path / 'parts', name)
        assert stopped.value.code == STOPPED and (tmp_path / 'parts/ckpt_00000006.pt').exists()
    resumed = run(corpus, tmp_path / 'parts', name, '--init_from=resume')
    assert same(resumed['model'], whole['model']) and same(resumed['optimizer'], whole['optimizer'])
    assert metrics(tmp_path / 'parts') == metrics(tmp_path / 'whole')


def test_schedule_free_evaluates_and_saves_the_averaged_weights(corpus, tmp_path):
    name = 'schedulefree:AdamWScheduleFree'
    needs(name)
    saved = run(corpus, tmp_path / 'out', name)
    z, y = ([state[key] for state in saved['optimizer']['state'].values()] for key in ('z', 'training_weights'))
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    params = [p for group in parameter_groups(model, 0.1) for p in group['params']]
    # y = (1 − β1)·z + β1·x, x being the average.
    for p, z_, y_ in zip(params, z, y):
        torch.testing.assert_close(0.1 * z_ + 0.9 * p.detach(), y_)
        assert not torch.equal(p, y_)
    evaluated = metrics(tmp_path / 'out', 'val/loss')[-1]
    run(corpus, tmp_path / 'out', name, '--init_from=resume', '--eval_only=True')
    assert metrics(tmp_path / 'out', 'val/loss')[-1] == evaluated


@pytest.mark.parametrize('name, parallel', [
    *((name, 'ddp') for name in ('lion', 'adahessian', 'sophiah', 'ef_clip', 'gnb_mean', 'soap', 'torch:NAdam')),
    *((name, 'fsdp') for name in ('lion', 'normalize', 'sophiag', 'muon', 'schedulefree:AdamWScheduleFree'))])
def test_two_ranks_compute_what_one_does(corpus, train, tmp_path, name, parallel):
    needs(name)
    flags = ['--max_iters=5', '--lr_decay_iters=5', '--batch_size=1', '--dropout=0', '--hessian_batch_size=2'][
        :5 if name in OPTIMIZERS and OPTIMIZERS[name].hook is not Hook else 4]
    flags = [*arguments(corpus, tmp_path / 'one', name)[len(TINY):], *flags]
    for lock in checkpoint.LOCKS:
        lock.close()
    program.main([*TINY, *flags])
    done = train(tmp_path / 'two', *(flag for flag in flags if not flag.startswith('--out_dir')),
                 f'--parallel={parallel}', ranks=2, name=name)
    assert done.code == 0, done.err
    # Rounding chooses among SOAP's eigenvectors.
    for key in ('train/loss', 'val/loss'):
        np.testing.assert_allclose(metrics(tmp_path / 'two', key), metrics(tmp_path / 'one', key),
                                   rtol=1e-3 if name == 'soap' else 1e-4)
    for key in ('hessian_norm', 'momentum_norm', 'update_unclipped'):
        np.testing.assert_allclose(metrics(tmp_path / 'two', key), metrics(tmp_path / 'one', key), rtol=2e-2, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# Any optimizer of a library: the first step, with one line where it cannot train


def first_step(corpus, out, name):
    """A run of one iteration, which ends by comparing the optimizer's state with what a checkpoint holds."""
    for lock in checkpoint.LOCKS:
        lock.close()
    program.main([*TINY, f'--dataset={corpus}', f'--out_dir={out}', f'--optimizer_name={name}', '--learning_rate=1e-3',
                  '--max_iters=1', '--warmup_iters=0', '--eval_iters=1', '--n_embd=16'])


@pytest.mark.parametrize('name', [
    *(f'torch:{name}' for name in ('Adadelta', 'Adafactor', 'Adamax', 'ASGD', 'RAdam', 'RMSprop', 'Rprop', 'SGD')),
    *(f'pytorch_optimizer:{name}' for name in (
        'SPlus', 'StableSPAM', 'AdaFactor', 'Amos', 'SPAM', 'AvaGrad', 'AdEMAMix', 'MARS', 'ADOPT', 'Prodigy',
        'SignSGD'))])
def test_optimizers_of_libraries_that_train(corpus, tmp_path, name):
    needs(name)
    first_step(corpus, tmp_path, name)
    assert (tmp_path / 'ckpt_00000001.pt').exists()


@pytest.mark.parametrize('name, message', [
    ('torch:SparseAdam', 'its first step failed (SparseAdam does not support dense gradients'),
    ('torch:LBFGS', 'cannot be built'),
    ('torch:Muon', 'cannot be built with its settings (Muon only supports 2D parameters'),
    ('pytorch_optimizer:A2Grad', 'keeps no learning rate in its param groups'),
    ('pytorch_optimizer:AliG', 'keeps no learning rate in its param groups'),
    ('pytorch_optimizer:AdaLOMO', 'cannot be built'), ('pytorch_optimizer:LOMO', 'cannot be built'),
    ('pytorch_optimizer:DeMo', ''), ('pytorch_optimizer:NorMuon', ''),
    ('pytorch_optimizer:AggMo', 'its state cannot be saved'), ('pytorch_optimizer:Kron', 'its state cannot be saved'),
    ('pytorch_optimizer:SCION', 'its state cannot be saved')])
def test_optimizers_of_libraries_that_do_not(corpus, tmp_path, name, message):
    needs(name)
    found = rejection(first_step, corpus, tmp_path, name)
    assert message in found and name.partition(':')[2] in found


# ----------------------------------------------------------------------------------------------------------------------
# Settings


def settings(*flags):
    return program.resolve([*TINY, *flags])


def test_an_optimizer_by_its_librarys_name():
    """Its defaults are the settings, where there are such; --optimizer_args are for the others."""
    c = settings('--optimizer_name=torch:NAdam', '--learning_rate=1e-3', '--beta1=0.5', '--weight_decay=0.3',
                 '--optimizer_args=momentum_decay=0.01, foreach=False')
    assert (c.beta1, c.beta2, c.eps, c.weight_decay) == (0.5, 0.999, 1e-8, 0.3)
    built = program.make_optimizer(c, tiny_gpt())
    assert [(g['betas'], g['momentum_decay'], g['foreach'], g['weight_decay']) for g in built.param_groups] == [
        ((0.5, 0.999), 0.01, False, decay) for decay in (0.3, 0.3, 0.0)]


def test_a_run_announces_the_settings_of_its_optimizer_only():
    """AdEMAMix has three betas, so ours are not its."""
    needs('pytorch_optimizer:AdEMAMix')
    for name, has in [('adamw', {'beta1', 'beta2', 'eps', 'weight_decay'}), ('clip', {'beta1', 'weight_decay'}),
                      ('pytorch_optimizer:AdEMAMix', {'eps', 'weight_decay'})]:
        c = settings(f'--optimizer_name={name}', '--learning_rate=1e-3')
        announced = {line.split()[0] for line in c.lines()}
        assert announced & optimizers.PLACEHOLDERS.keys() == has
        everything = [line for line in c.lines(everything=True) if line.startswith('gamma')]
        assert len(everything) == 1 and everything[0].endswith(f'not a setting of {name}')


@pytest.mark.parametrize('flags, message', [
    (['muno'], '--optimizer_name=muno: unknown optimizer; did you mean muon?'),
    (['torch:NAdamW'], '--optimizer_name=torch:NAdamW: torch has no such optimizer; did you mean NAdam?'),
    (['pytorch_optimiser:SOAP'], 'the package pytorch_optimiser is not installed; did you mean pytorch_optimizer?'),
    (['no_such_library:X'], 'the package no_such_library is not installed; check its name'),
    (['torch:NAdam', '--optimizer_args=momentum_decai=0.1'], 'NAdam has no argument momentum_decai; did you mean '
                                                             'momentum_decay?'),
    (['torch:NAdam', '--optimizer_args=betas'], '--optimizer_args=betas: write NAME=VALUE'),
    (['torch:NAdam', '--optimizer_args=eps=__import__("os")'], 'write NAME=VALUE'),
    (['torch:NAdam', '--optimizer_args=lr=1'], 'set lr with --learning_rate'),
    (['torch:NAdam', '--optimizer_args=weight_decay=0.1'], 'set weight_decay with --weight_decay'),
    (['torch:NAdam', '--optimizer_args=betas=(0.9, 0.99, 0.999)'], 'set betas with --beta1 and --beta2'),
    (['muon', '--optimizer_args=momentum=0.9'], 'set momentum with --beta1'),
    (['sophiag', '--optimizer_args=foreach=True'], '--optimizer_args has no effect with sophiag'),
    (['torch:Rprop', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for torch:Rprop'),
    (['sophiah', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for sophiah'),
    (['gnb_mean', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for gnb_mean'),
    (['soap', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for soap'),
    (['pytorch_optimizer:SOAP', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for pytorch_optimizer:SOAP'),
])
def test_settings_that_cannot_be_are_rejected_in_one_line(flags, message):
    if 'SOAP' in flags[0] and 'optimiser' not in flags[0]:
        needs(flags[0])
    assert message in rejection(settings, f'--optimizer_name={flags[0]}', '--learning_rate=1e-3', *flags[1:])


def test_a_learning_rate_that_the_table_does_not_have_must_be_given():
    message = rejection(settings, '--optimizer_name=torch:NAdam')
    assert 'has no learning rate for torch:NAdam at tiny; set --learning_rate' in message
    muon, adamw = (settings(f'--optimizer_name={name}', '--model_size=125M') for name in ('muon', 'adamw'))
    assert muon.learning_rate == adamw.learning_rate == 6e-4


def test_settings_that_an_optimizer_rejects():
    needs('soap')
    message = rejection(lambda: build_optimizer('soap', parameter_groups(tiny_gpt(), 0.1), lr=1e-3,
                                                optimizer_args='precondition_frequency=-1'))
    assert message.startswith('--optimizer_name=pytorch_optimizer:SOAP: cannot be built with its settings')
