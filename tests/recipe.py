"""The checks of docs/hacking.md, called by test_hacking.py in a copy of the repository that has the edits of a recipe.

  python tests/recipe.py DATA CHECK…        in the copy: calls the functions CHECK below; DATA is a tiny data set
"""

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--model_size=tiny', '--block_size=32', '--total_batch_size=4',
         '--batch_size=2', '--warmup_iters=2', '--max_iters=6', '--device=cpu', '--log_interval=1', '--eval_interval=3',
         '--eval_sequences=8', '--learning_rate=1e-3']
NAMES = 'adamw', 'sophiag', 'sophiah'
close = torch.testing.assert_close
runs = itertools.count()


def run(*flags, name='sophiag', out=None):
    """A short training run by train.py: its directory as 'out', and its metrics, {key: the values in order}."""
    import train
    second_order = [] if name in ('adamw', 'muon', 'adopt') else ['--hessian_interval=2', '--gamma=1e-3']
    out = out or f'runs/{next(runs)}'
    train.main([*SHAPE, *second_order, f'--dataset={DATA}', f'--optimizer_name={name}', f'--out_dir={out}', *flags])
    found = dict(out=str(out))
    for line in Path(out, 'metrics.jsonl').read_text().splitlines():
        for key, value in json.loads(line).items():
            found.setdefault(key, []).append(value)
    return found


def losses(found):
    """All losses of a run, as a tensor."""
    return torch.tensor([loss for key, series in sorted(found.items()) if 'loss' in key for loss in series])


def unedited(name):
    """The run of the repository without an edit."""
    return json.loads(Path(DATA, 'unedited.json').read_text())[name]


def resumes(*flags, name='sophiag'):
    """A run that is stopped in the middle and resumed has the losses of a run in one go, which is returned."""
    half = run(*flags, '--max_iters=3', '--lr_decay_iters=6', name=name)
    resumed, whole = run(*flags, '--init_from=resume', name=name, out=half['out']), run(*flags, name=name)
    assert torch.equal(losses(resumed), losses(whole))
    return whole


def resumes_and_shards(name):
    """A run that resumes, and has the same losses on shards."""
    found = resumes(name=name)
    close(losses(run('--parallel=fsdp', name=name)), losses(found), rtol=1e-5, atol=0)
    return found


def trains(*flags):
    """Three optimizers train, and not as without the edit; Sophia-G also resumes. Returns its run."""
    found = {name: (resumes if name == 'sophiag' else run)(*flags, name=name) for name in NAMES}
    for name in NAMES:
        assert all(a != b for a, b in zip(found[name]['train/loss'], unedited(name)['train/loss']))
    return found['sophiag']


def sharded_and_compiled(found, *names):
    """Sophia-G on shards has the losses of the run `found`, and compiled runs have those of eager ones."""
    close(losses(run('--parallel=fsdp')), losses(found), rtol=1e-5, atol=0)
    for name in names:
        eager, compiled = (run('--n_layer=1', '--max_iters=3', f'--compile={on}', name=name) for on in (False, True))
        close(losses(compiled), losses(eager), rtol=1e-4, atol=0)


def random_model(**settings):
    """(model, X, Y): a GPT in float64 with weights far from 0, and a batch in which one position does not count."""
    from model import GPT, GPTConfig
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=4, vocab_size=8, n_layer=2, n_head=2, n_embd=8, **settings)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    X, Y = torch.randint(8, (2, 2, 4))
    Y[0, 1] = -1
    return model, X, Y


def hook_of(cls, model):
    """A hook that estimates in every iteration, for an optimizer whose h is the latest estimate."""
    from sophia import Sophia
    return cls(model, Sophia(list(model.parameters()), lr=0.0, betas=(0.9, 0.0)), seed=0, interval=1, batch_size=2)


def follows(objective=lambda logits, targets, hidden: F.cross_entropy(logits, targets), **settings):
    """The model's loss is `objective`, of logits, targets that count and last hidden states; both estimators follow."""
    from hessian import GNBHook, HutchinsonHook
    from loss import Losses, sample_labels
    from runtime.gpt import generate
    model, X, Y = random_model(**settings)
    params, hidden = list(model.parameters()), []

    def loss():
        with model.transformer.ln_f.register_forward_hook(lambda module, args, output: hidden.extend(args)):
            logits = model(X)[0]
        return objective(logits[Y >= 0], Y[Y >= 0], hidden.pop())

    close(model(X, Y)[1], loss(), rtol=1e-6, atol=0)
    u = [torch.randn_like(p) for p in params]
    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(loss(), params, create_graph=True)
        expected = torch.autograd.grad(sum((g * v).sum() for g, v in zip(gradient, u)), params)
    close(hook_of(HutchinsonHook, model).product(X, Y, u), expected)

    hook = hook_of(GNBHook, model)
    hook.start(0)
    given = hook.labels(X, Y, slice(0, len(X)))
    hook.add(*Losses(model)(X, Y, **given)[2:])
    hook.update()
    logits = model(X)[0]
    nll = F.cross_entropy(logits[Y >= 0], sample_labels(logits, given['uniforms'])[Y >= 0])
    expected = [(Y >= 0).sum() * g.square() for g in torch.autograd.grad(nll, params)]
    close([hook.optimizer.state[p]['hessian'] for p in params], expected, rtol=1e-5, atol=1e-9)

    longer = generate(model, X, 3, temperature=0)
    assert all(torch.equal(longer[:, i], model(longer[:, i - 4:i])[0][:, -1].argmax(-1)) for i in (4, 5, 6))


def z_loss():
    """The validation loss stays the cross-entropy; the training loss is logged under a name of its own."""
    follows(lambda logits, targets, x: F.cross_entropy(logits, targets) + 1e-4 * logits.logsumexp(-1).square().mean())
    found = trains()
    assert found['val/loss'][0] == unedited('sophiag')['val/loss'][0] != found['val/training_loss'][0]


def a_second_head():
    """The expectation of Sophia-G's estimate over all labels is the Gauss-Newton diagonal of the whole loss."""
    from hessian import GNBHook
    from loss import Losses
    from runtime import checkpoint
    model, X, _ = random_model()
    params, hidden = list(model.parameters()), []
    X, Y = X[:1], torch.tensor([[-1, -1, 5, -1]])  # head 1 predicts from position 2, head 2 from position 1
    with model.transformer.ln_f.register_forward_hook(lambda module, args, output: hidden.append(output)):
        log_1 = model(X)[0][0, 2].log_softmax(-1)
    log_2 = model.head_2(hidden[0])[0, 1].log_softmax(-1)
    close(model(X, Y)[1], -log_1[5] - 0.25 * log_2[5])
    found, expected = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for weight, log_p in (1.0, log_1), (0.25, log_2):
        for y in range(8):
            for total, g in zip(expected, torch.autograd.grad(log_p[y], params, retain_graph=True, allow_unused=True)):
                total += 0 if g is None else weight * log_p[y].exp().detach() * g.square()
    p_1, p_2 = log_1.detach().exp(), log_2.detach().exp()
    hook = hook_of(GNBHook, model)
    for labels in itertools.product(range(8), range(8)):
        u_1, u_2 = (p[:y].sum() + p[y] / 2 for p, y in zip((p_1, p_2), labels))  # which draw these labels
        hook.start(0)
        assert hook.labels(X, Y, slice(0, 1))['uniforms'].shape == (1, 8)
        hook.add(*Losses(model)(X, Y, uniforms=torch.tensor([[u_1] * 4 + [u_2] * 4]))[2:])
        hook.update()
        for total, p in zip(found, params):
            total += p_1[labels[0]] * p_2[labels[1]] * hook.optimizer.state[p]['hessian']
    close(found, expected, rtol=1e-5, atol=1e-9)
    state = checkpoint.load_checkpoint(trains()['out'])[1]['optimizer']['state']
    assert all(entry['hessian'].any() for entry in state.values())
    assert run('--max_iters=3', name='ef_clip')['train/loss']  # with true labels


def pasted_model():
    """A model.py in nanoGPT's style instead of ours: it learns, resumes, is evaluated, sampled, sharded, compiled."""
    import model
    import train
    from data.loader import Bin
    from runtime.gpt import generate
    from scripts import eval as evaluation
    from scripts.load import load
    assert not hasattr(model, 'SIZES')  # it is not ours
    with pytest.raises(SystemExit, match='has no table SIZES; set --n_layer, --n_head and --n_embd'):
        train.resolve(['--n_layer=2', '--n_head=2'])
    found = trains()
    assert found['val/loss'][-1] < found['val/loss'][0]
    loaded = load('runs/0')
    assert isinstance(loaded.model, model.GPT)
    assert generate(loaded.model, torch.tensor([[1, 2]]), 3).shape == (1, 5)
    loaded.tokenizer = None
    arguments = SimpleNamespace(eval_sequences=2, batch_size=2, device='cpu', dtype=None)
    assert evaluation.measure(loaded, Bin(DATA, 'val'), arguments)['loss'] < 4.2
    with pytest.raises(SystemExit, match='must be False because GPTConfig in model.py has no scale_attn'):
        run('--scale_attn_by_inverse_layer_idx=True')
    sharded_and_compiled(found, 'sophiag', 'sophiah')


def architecture():
    """Attention within documents, too: an id before the end of one changes no logits after it."""
    import model
    from scripts.load import load
    model.END_OF_TEXT = 5
    follows()
    gpt, X, _ = random_model()
    X[:] = torch.tensor([[1, 5, 2, 3], [1, 2, 2, 3]])
    before, X[:, 0] = gpt(X)[0], 4
    changed = (gpt(X)[0] != before).any(-1)
    assert changed.tolist() == [[True, True, False, False], [True] * 4]
    found = trains()
    loaded = load('runs/0').model
    assert not torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)
    sharded_and_compiled(found, 'sophiag')


def rotary_positions():
    """A setting: off, runs and checkpoints are as they were; on, everything follows."""
    from runtime import checkpoint
    from scripts.load import load
    off = run()
    assert off['train/loss'] == unedited('sophiag')['train/loss']
    args = checkpoint.load_checkpoint(off['out'])[1]['model_args']
    assert list(args) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias']  # nanoGPT's
    follows(rope=True)
    on = trains('--rope=True')['out']
    assert checkpoint.load_checkpoint(on)[1]['model_args'] == dict(args, rope=True) and load(on).model.config.rope
    with pytest.raises(SystemExit, match='the model differs in rope'):
        run('--init_from=resume', out=on)


def a_frozen_teacher():
    """The student's loss is half of the labels' and half of the teacher's, whose weights stay, and are not counted."""
    from runtime import checkpoint
    from scripts.load import load
    teacher = run('--bias=True', '--dropout=0.1')['out']
    saved, student = checkpoint.load_checkpoint(teacher)[1]['model'], resumes(f'--teacher={teacher}')
    state = checkpoint.load_checkpoint(student['out'])[1]['model']
    assert all(torch.equal(state[f'teacher.{name}'], value) for name, value in saved.items())
    assert not torch.equal(state['lm_head.weight'], saved['lm_head.weight'])
    ours, plain = (json.loads(Path(found['out'], 'config.json').read_text()) for found in (student, run()))
    assert all(ours[key] == plain[key] for key in ('parameters', 'flops_per_token'))
    assert all(a != b for a, b in zip(student['val/loss'], student['val/training_loss']))
    model, (X, Y) = load(student['out']).model.train(), torch.randint(64, (2, 2, 8))  # without the teacher's dropout
    Y[0, :3] = -1
    logits, loss = model(X, Y)
    soft = -(model.teacher(X)[0].softmax(-1) * logits.log_softmax(-1)).sum(-1)
    close(loss, (F.cross_entropy(logits[Y >= 0], Y[Y >= 0]) + soft[Y >= 0].mean()) / 2)


def a_mixture_of_experts():
    follows()
    torch.save(losses(trains()), 'one_rank.pt')


def a_mixture_of_experts_on_two_ranks():
    """The losses are the same as on one rank."""
    close(losses(run('--batch_size=1', out='runs/ranks')), torch.load('one_rank.pt'), rtol=1e-5, atol=0)


def a_first_order_optimizer():
    from adopt import ADOPT
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = ADOPT([p], lr=0.1, betas=(0.5, 0.5), weight_decay=0.5)
    for g in 2.0, 6.0, 8.0:  # v = 4, 20, …; m = 0, 1.5, 0.75 + 4 / √20
        p.grad = torch.full((2,), g)
        optimizer.step()
    theta = 0.95 * torch.tensor([1.0, -2.0]) - 0.15
    close(p.detach(), 0.95 * theta - 0.1 * (0.75 + 4 / 20 ** 0.5))
    found = resumes_and_shards('adopt')
    assert found['momentum_norm'][-1] > 0 and found['train/loss'][-1] < found['train/loss'][0]


def a_hessian_estimator():
    """Unlike the Hessian's, the curvature JᵀSJ is not negative along any u; and it trains."""
    from hessian import GaussNewtonProductHook, HutchinsonHook
    model, X, Y = random_model()
    us = [[torch.randn_like(p) for p in model.parameters()] for _ in range(20)]
    gauss_newton, hessian = ([sum((v * Hv).sum() for v, Hv in zip(u, hook_of(cls, model).product(X, Y, u))) for u in us]
                             for cls in (GaussNewtonProductHook, HutchinsonHook))
    assert min(gauss_newton) > 0 > min(hessian)
    half = '--hessian_batch_size=2'  # the other half of the mini-batch is for the gradient
    assert resumes(half, name='sophia_gnp')['train/loss'] != run(half, name='sophiah')['train/loss']
    with pytest.raises(SystemExit, match='ddp for sophia_gnp'):
        run('--parallel=fsdp', name='sophia_gnp')


def muon_and_sophia():
    """Each part makes its own updates, and the estimates reach Sophia's parameters alone."""
    from optimizers import build_optimizer, parameter_groups
    from sophia import Sophia
    ours, theirs = (random_model()[0] for _ in range(2))
    both = build_optimizer('muon_sophiag', parameter_groups(ours, 0.1), lr=0.01)
    embeddings, matrices, vectors = parameter_groups(theirs, 0.1)
    alone = [torch.optim.Muon([matrices], 0.01, momentum=0.96, adjust_lr_fn='match_rms_adamw'),
             Sophia([embeddings, vectors], 0.01)]
    for p, q in zip(ours.parameters(), theirs.parameters()):
        p.grad = q.grad = torch.randn_like(p)
    for optimizer in (both, alone[1]):
        optimizer.update_hessian(p.grad.abs() for group in optimizer.param_groups for p in group['params'])
    for optimizer in (both, *alone):
        optimizer.step()
    close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)
    found = resumes(name='muon_sophiag')
    assert found['hessian_norm'][-1] > 0 and found['momentum_norm'][-1] > 0


def a_hessian_optimizer():
    """Too many coordinates are clipped, so γ grows before all estimates but the first; a resume goes on with it."""
    from runtime import checkpoint
    found = resumes_and_shards('adaptive')
    for group in checkpoint.load_checkpoint(found['out'])[1]['optimizer']['param_groups']:
        assert group['gamma'] == 1e-3 * 1.01 ** 2 and max(found['update_unclipped']) < 0.3


def learning_rates_and_weight_decay_by_layer():
    """The scales of two layers; tests/test_rows.py checks that every optimizer follows a group's lr_scale."""
    from optimizers import parameter_groups
    model = random_model()[0]
    found = {id(p): (group.get('lr_scale', 1.0), group['weight_decay'])
             for group in parameter_groups(model, 0.1) for p in group['params']}
    scales = {'wte': (0.5, 0), 'h.0.mlp.c_fc': (0.9, 0.1), 'h.1.mlp.c_fc': (1.0, 0.1), 'ln_f': (1.0, 0)}
    assert {key: found[id(model.transformer.get_submodule(key).weight)] for key in scales} == scales
    resumes(name='muon')


def average_of_the_weights():
    """The average is of the weights after each update; it is evaluated, saved and resumed, and training is the same."""
    from average import AveragedSophia

    from runtime import checkpoint
    from runtime.optim import parameters
    step, weights = AveragedSophia.step, []

    def recorded(self, closure=None):
        loss = step(self, closure)
        weights.append([p.detach().clone() for p in parameters(self)])
        return loss

    AveragedSophia.step, AveragedSophia.decay = recorded, 0.5
    found, plain = run(name='averaged'), run()
    assert found['train/loss'] == plain['train/loss'] and found['val/loss'][-1] > plain['val/loss'][-1]
    average = weights[0]
    for latest in weights[1:]:
        average = [0.5 * a + 0.5 * p for a, p in zip(average, latest)]
    state = checkpoint.load_checkpoint(found['out'])[1]
    close([state['model'][name] for name in state['optimizer']['shapes']], average)
    resumes_and_shards('averaged')


def batch_ramp():
    """The first iteration is that of a run whose mini-batch is a quarter as large: loss, gradient, estimate."""
    ramped = resumes('--total_batch_size=8', '--hessian_batch_size=8', '--warmup_iters=3')
    small = run('--total_batch_size=2', '--hessian_batch_size=2', '--warmup_iters=0')
    for key in 'train/loss', 'grad_norm', 'momentum_norm', 'hessian_norm':
        assert ramped[key][0] == small[key][0] and ramped[key][-1] != small[key][-1], key
    assert list(dict.fromkeys(ramped['tokens'])) == [32 * n for n in (0, 2, 6, 12, 20, 28, 36)]
    of_steps = [per_second * ms / 1e3 for per_second, ms in zip(ramped['tokens_per_sec'], ramped['step_ms'])]
    assert of_steps == pytest.approx([32 * n for n in (2, 4, 6, 8, 8, 8)])


def random_tokens():
    """A run with changed tokens resumes, whatever draws from the global generators meanwhile."""
    assert resumes('--dropout=0.1', name='adamw')['train/loss'] != unedited('adamw')['train/loss']
    assert run(name='adamw')['val/loss'] != unedited('adamw')['val/loss']


def early_stopping():
    """A run whose loss stays ends after the third evaluation that is not better, as finished."""
    from analysis.runs import read_run
    found = run('--learning_rate=0', '--eval_interval=1', name='adamw')
    ended = read_run(found['out'])
    assert len(found['val/loss']) == 5 and ended.about['ended'] == dict(iter=4, reason='early stopping')
    assert ended.ended and 'it was run for 4' in ended.rejected
    with pytest.raises(SystemExit) as stopped:
        run('--auto_resume=True', name='adamw', out=found['out'])
    assert stopped.value.code is None and read_run(found['out']).about['ended'] == ended.about['ended']
    assert len(run('--init_from=resume', '--max_iters=5', name='adamw', out=found['out'])['val/loss']) > 5


def another_schedule():
    import train
    c = train.resolve(['--learning_rate=1', '--min_lr=0', '--warmup_iters=10', '--max_iters=110', '--schedule=1-sqrt'])
    assert [train.learning_rate_at(c, i) for i in (10, 35, 74, 110)] == [1.0, 0.5, 1 - 0.8, 0.0]
    assert run('--schedule=1-sqrt')['lr'] != unedited('sophiag')['lr'] == run()['lr']


def another_metric():
    from runtime import checkpoint
    found = run()
    weight = checkpoint.load_checkpoint(found['out'])[1]['model']['lm_head.weight']
    close(found['head_norm'][-1], weight.norm().item(), rtol=1e-5, atol=0)
    blocks = torch.tensor([found[f'grad_norm/{i}'] for i in range(2)])
    assert (blocks > 0).all() and (blocks.norm(dim=0) < torch.tensor(found['grad_norm'])).all()
    parameters = json.loads(Path(found['out'], 'config.json').read_text())['parameters']
    assert {len(counts) for counts in found['h_histogram']} == {20} and sum(found['h_histogram'][-1]) == parameters


if __name__ == '__main__':
    sys.path.insert(0, str(Path.cwd()))
    DATA = sys.argv[1]
    compile_ = torch.compile  # without the C++ compiler, which takes minutes
    torch.compile = lambda f=None, dynamic=None, **options: compile_(f, dynamic=dynamic, backend='aot_eager')
    for function in sys.argv[2:]:
        globals()[function]()
    print('the checks passed', flush=True)
    os._exit(0)  # a normal exit can abort where a run that stopped has left its process group
