"""Every optimizer of the table and of libraries in training: the same as alone, resumed, on two ranks; and settings."""

import copy
import importlib

import numpy as np
import pytest
import torch
from conftest import TINY, metrics, rejection

import train as program
from hessian import StepHook
from lifecycle import guards
from model import GPT, GPTConfig
from optimizers import OPTIMIZERS, build_optimizer, parameter_groups
from runtime import optim
from runtime.distributed import World
from runtime.optimizer_state import first_difference

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


def alone(name, model):
    """The optimizer without our table, as its library's documentation has it, in a list."""
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
    """With the learning rate of each step set from outside, bit for bit."""
    needs(name)
    ours, theirs = tiny_gpt(), tiny_gpt()
    optimizer, alone_ones = build_optimizer(name, parameter_groups(ours, 0.1), lr=LR), alone(name, theirs)
    for i in range(11):  # SOAP's eigenvectors are computed again in the tenth
        for one in (optimizer, *alone_ones):
            optim.set_learning_rate(one, LR * (i + 1) / 11)
        step(ours, [optimizer], i)
        step(theirs, alone_ones, i)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters()))
    assert not torch.equal(ours.transformer.wpe.weight, tiny_gpt().transformer.wpe.weight)


def test_groups_hold_exactly_the_trained_parameters():
    model = tiny_gpt()
    model.transformer.wpe.weight.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert [(group.get('role'), group['weight_decay']) for group in groups] == [
        ('embedding', 0.1), ('hidden', 0.1), (None, 0.0)]
    names = {id(p): name for name, p in model.named_parameters()}
    embedding, hidden, vector = ([names[id(p)] for p in group['params']] for group in groups)
    assert embedding == ['transformer.wte.weight']
    assert hidden == [f'transformer.h.{i}.{layer}.weight' for i in range(2)
                      for layer in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(embedding + hidden + vector) == sorted(trained)


def test_matrices_of_a_group_without_a_role_are_not_for_muon():
    """As of positions that an edit gives a group of their own."""
    model = tiny_gpt()
    embedding, hidden, vectors = parameter_groups(model, 0.1)
    tokens, positions = embedding['params']
    groups = [embedding | dict(params=[tokens]), dict(params=[positions], weight_decay=0.0), hidden, vectors]
    for one in groups, [{key: value for key, value in group.items() if key != 'role'} for group in groups]:
        muon, adamw = build_optimizer('muon', one, lr=LR).optimizers
        assert (positions in {*optim.parameters(adamw)}) == (one is groups)
        assert {*hidden['params']} <= {*optim.parameters(muon)}


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


def estimates(name):
    """Whether the optimizer takes Hessian estimates."""
    return name in OPTIMIZERS and OPTIMIZERS[name].hook is not StepHook


def arguments(corpus, out, name, *flags):
    """Four iterations of one layer, with estimates in the first and the third; SOAP's first step makes its state."""
    more = ['--optimizer_args=precondition_frequency=2'] if name == 'soap' else []
    lr, k = (0.01, 1) if name == 'adahessian' else (3e-3, 2)
    return [*TINY, f'--dataset={corpus}', f'--out_dir={out}', f'--optimizer_name={name}', f'--learning_rate={lr}',
            '--warmup_iters=0', '--max_iters=4', '--eval_interval=2', '--eval_iters=2', '--n_embd=16', *more,
            *([f'--hessian_interval={k}'] if estimates(name) else []), *flags]


def run(*args):
    """train.main in this process."""
    program.main(arguments(*args))


@pytest.mark.parametrize('name', [*OPTIMIZERS, *BY_NAME, 'schedulefree:AdamWScheduleFree'])
def test_an_optimizer_lowers_the_loss_and_resumes_bit_for_bit(corpus, tmp_path, name):
    """Resumed from iteration 2: the whole last checkpoint is the same."""
    needs(name)
    run(corpus, tmp_path, name)
    losses, logged = metrics(tmp_path, 'val/loss'), metrics(tmp_path)
    assert losses[-1] < losses[0], losses
    assert len(metrics(tmp_path, 'hessian_norm')) == 4 * estimates(name)
    assert len(metrics(tmp_path, 'update_unclipped')) == 4 * (estimates(name) and name not in (
        'adahessian', 'gnb_noclip'))

    last = tmp_path / 'ckpt_00000004.pt'
    whole = torch.load(last, weights_only=True)
    last.unlink()
    run(corpus, tmp_path, name, '--init_from=resume')
    resumed = torch.load(last, weights_only=True)
    assert not first_difference([resumed['model'], resumed['optimizer']], [whole['model'], whole['optimizer']])
    assert metrics(tmp_path) == logged

    if name.startswith('schedulefree'):  # y = (1 − β1)·z + β1·x; the averaged weights x are evaluated and saved
        model = GPT(GPTConfig(**whole['model_args']))
        model.load_state_dict(whole['model'])
        params = [p for group in parameter_groups(model, 0.1) for p in group['params']]
        for p, state in zip(params, whole['optimizer']['state'].values()):
            torch.testing.assert_close(0.1 * state['z'] + 0.9 * p.detach(), state['training_weights'])
            assert not torch.equal(p, state['training_weights'])
        run(corpus, tmp_path, name, '--init_from=resume', '--eval_only=True')
        assert metrics(tmp_path, 'val/loss')[-1] == losses[-1]


@pytest.mark.parametrize('name, parallel', [('adahessian', 'ddp'), ('ef_clip', 'ddp'), ('lion', 'fsdp'),
                                            ('normalize', 'fsdp'), ('schedulefree:AdamWScheduleFree', 'fsdp')])
def test_two_ranks_compute_what_one_does(corpus, fork, tmp_path, name, parallel):
    """tests/test_sharding.py has more of the table's optimizers."""
    needs(name)
    flags = ['--batch_size=1', *(['--hessian_batch_size=2'] if estimates(name) else [])]
    run(corpus, tmp_path / 'one', name, *flags)
    fork('train.py', *arguments(corpus, tmp_path / 'two', name, *flags, f'--parallel={parallel}'), ranks=2, check=True)
    for key in ('train/loss', 'val/loss', 'hessian_norm', 'momentum_norm', 'update_unclipped'):
        np.testing.assert_allclose(metrics(tmp_path / 'two', key), metrics(tmp_path / 'one', key),
                                   rtol=1e-4 if 'loss' in key else 2e-2, atol=1e-3)


def first_step(name):
    """The loop's first update, and the comparison of the state with what a checkpoint brings back."""
    model = tiny_gpt()
    optimizer, fresh = (build_optimizer(name, parameter_groups(model, 0.1), lr=LR) for _ in range(2))
    step(model, [optimizer], 0)
    guards.check_round_trip(World('cpu', 'gloo'), model, optimizer, fresh)


@pytest.mark.parametrize('name', [
    *(f'torch:{name}' for name in ('Adadelta', 'Adafactor', 'Adamax', 'ASGD', 'RAdam', 'RMSprop', 'Rprop', 'SGD')),
    *(f'pytorch_optimizer:{name}' for name in (
        'SPlus', 'StableSPAM', 'AdaFactor', 'Amos', 'SPAM', 'AvaGrad', 'AggMo', 'Kron', 'SCION', 'AdEMAMix', 'MARS',
        'ADOPT', 'Prodigy', 'SignSGD')), 'schedulefree:AdamWScheduleFree'])
def test_optimizers_of_libraries_that_train(name):
    needs(name)
    first_step(name)


def test_unknown_settings_are_rejected_and_generators_are_kept():
    with pytest.raises(ValueError, match='unknown settings betas'):
        build_optimizer('adamw', tiny_gpt().parameters(), lr=LR, betas=(0.5, 0.6))
    model = tiny_gpt()
    optimizer = build_optimizer('muon', [dict(params=model.parameters())], lr=LR)
    assert {*optim.parameters(optimizer)} == {*model.parameters()}


def test_a_learning_rate_that_is_a_tensor_is_filled():
    """A library's optimizer, or a compiled update, may hold on to it."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)
    optim.set_learning_rate(optimizer, 0.05)
    assert optimizer.param_groups[0]['lr'] is rate and rate == 0.05


@pytest.mark.parametrize('name, message', [
    ('torch:LBFGS', 'use adamw'), ('torch:Muon', 'use muon'), ('torch:SparseAdam', 'gradients here are dense'),
    ('pytorch_optimizer:SophiaH', 'use sophiah'),
    ('pytorch_optimizer:LOMO', 'cannot be built'), ('pytorch_optimizer:DeMo', ''), ('pytorch_optimizer:NorMuon', '')])
def test_optimizers_of_libraries_that_do_not(name, message):
    needs(name)
    found = rejection(first_step, name)
    assert message in found and name.partition(':')[2] in found


def test_a_combined_optimizer_returns_the_loss_of_its_closure():
    p, q = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.tensor(3.0))
    optimizer = optim.CombinedOptimizer(torch.optim.SGD([p], lr=0.1), torch.optim.Adagrad([q], lr=0.4))

    def closure():
        loss = p * q
        loss.backward()
        return loss

    assert optimizer.state.keys() == {q}  # Adagrad has a state before its first step.
    assert optimizer.step(closure) == 6 and [p.item(), q.item()] == pytest.approx([2 - 0.3, 3 - 0.4])


def settings(*flags):
    return program.resolve([*TINY, *flags])


def test_an_optimizer_by_its_librarys_name():
    """Its defaults are the settings, where there are such; --optimizer_args are for the others."""
    c = settings('--optimizer_name=torch:NAdam', '--learning_rate=1e-3', '--beta1=0.5', '--weight_decay=0.3', '--eps=0',
                 '--optimizer_args=momentum_decay=0.01, foreach=False')
    assert (c.beta1, c.beta2, c.eps, c.weight_decay) == (0.5, 0.999, 0, 0.3)
    built = program.make_optimizer(c, tiny_gpt())
    assert [(g['betas'], g['momentum_decay'], g['foreach'], g['weight_decay']) for g in built.param_groups] == [
        ((0.5, 0.999), 0.01, False, decay) for decay in (0.3, 0.3, 0.0)]


@pytest.mark.parametrize('flags, message', [
    (['muno'], '--optimizer_name=muno: unknown optimizer; choose from adamw, lion'),
    (['torch:NAdamW'], "NAdamW: cannot be imported (module 'torch.optim' has no attribute 'NAdamW')"),
    (['pytorch_optimiser:SOAP'], "cannot be imported (No module named 'pytorch_optimiser'); check its name"),
    (['torch:NAdam', '--optimizer_args=momentum_decai=0.1'],
     '--optimizer_args=momentum_decai=0.1: momentum_decai is not an argument of torch:NAdam; choose from params, lr'),
    (['torch:NAdam', '--optimizer_args=betas'], '--optimizer_args=betas: write NAME=VALUE'),
    (['torch:NAdam', '--optimizer_args=lr=1'], "got multiple values for keyword argument 'lr'"),
    (['torch:NAdam', '--optimizer_args=betas=(0.9, 0.99, 0.999)'], "values for keyword argument 'betas'"),
    (['muon', '--optimizer_args=momentum=0.9'], "values for keyword argument 'momentum'"),
    (['sophiag', '--optimizer_args=foreach=True'], '--optimizer_args has no effect with sophiag'),
    (['torch:Rprop', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for torch:Rprop'),
])
def test_settings_that_cannot_be_are_rejected_in_one_line(flags, message):
    def build():
        program.make_optimizer(settings(f'--optimizer_name={flags[0]}', '--learning_rate=1e-3', *flags[1:]), tiny_gpt())

    assert message in rejection(build)
