"""The checks of docs/hacking.md, run by test_hacking.py in a copy of the repository that has the edits of a recipe.

  python tests/recipe.py DATA CHECK…         in the copy: calls the functions CHECK; DATA is a tiny data set
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--model_size=tiny', '--block_size=32', '--total_batch_size=4',
         '--batch_size=2', '--warmup_iters=2', '--max_iters=6', '--device=cpu', '--log_interval=1', '--eval_interval=3',
         '--learning_rate=1e-3']
HESSIAN = ['--hessian_interval=2', '--gamma=1e-3']
NAMES = 'adamw', 'sophiag', 'sophiah'
close = torch.testing.assert_close
runs = itertools.count()


def run(*more, name='sophiag', out=None):
    """The metrics of a short training run by train.py, {key: its values in order}; 'out' is its directory."""
    import train
    hessian = HESSIAN if name not in ('adamw', 'muon', 'adopt') else []
    out = out or f'runs/{next(runs)}'
    train.main([*SHAPE, *hessian, f'--dataset={DATA}', f'--optimizer_name={name}', f'--out_dir={out}', *more])
    found = dict(out=out)
    for line in Path(out, 'metrics.jsonl').read_text().splitlines():
        for key, value in json.loads(line).items():
            found.setdefault(key, []).append(value)
    return found


def losses(found):
    """All losses of a run, as a tensor."""
    return torch.tensor([*found['train/loss'], *found['val/loss']])


def resumes(*more, name='sophiag'):
    """A run that is stopped in the middle and resumed has the losses of a run in one go, which are returned."""
    from runtime import checkpoint
    half = run(*more, '--max_iters=3', '--lr_decay_iters=6', name=name)
    checkpoint.LOCKS.clear()  # a process keeps the lock of its run
    resumed, whole = run(*more, '--init_from=resume', name=name, out=half['out']), run(*more, name=name)
    assert torch.equal(losses(resumed), losses(whole))
    return whole


def message(function):
    """The one line with which `function` stops."""
    try:
        function()
    except SystemExit as error:
        assert isinstance(error.code, str) and '\n' not in error.code
        return error.code
    raise AssertionError('it did not stop')


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


def hessian_hook(cls, model):
    """A hook that estimates in every iteration, for an optimizer whose h is the latest estimate."""
    from sophia import Sophia
    return cls(model, Sophia(list(model.parameters()), lr=0.0, betas=(0.9, 0.0)), seed=0, interval=1, batch_size=2)


def is_estimated(model, X, Y, loss):
    """Sophia-H's products are second derivatives of `loss`, a function of the model's logits and Y or of the model; and
    Sophia-G's estimate is of labels drawn from the logits."""
    from hessian import GNBHook, HutchinsonHook
    from loss import sample_labels
    params = list(model.parameters())
    u = [torch.randn_like(p) for p in params]
    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(loss(), params, create_graph=True)
        expected = torch.autograd.grad(sum((g * v).sum() for g, v in zip(gradient, u)), params)
    close(hessian_hook(HutchinsonHook, model).product(X, Y, u), expected)

    hook = hessian_hook(GNBHook, model)
    hook.start(0)
    more = hook.labels(X, Y)
    hook.add(model(X, Y, **more)[2])
    hook.finish()
    logits = model(X)[0]
    sampled = sample_labels(logits, more['uniforms']).where(Y >= 0, -1)
    nll = F.cross_entropy(logits.flatten(0, 1), sampled.flatten(), ignore_index=-1)
    wanted = [(Y >= 0).sum() * g.square() for g in torch.autograd.grad(nll, params)]
    close([hook.optimizer.state[p]['hessian'] for p in params], wanted, rtol=1e-5, atol=1e-9)


def is_the_objective(expected):
    """`expected`, a function of (logits, targets, last hidden states) where targets count, is what training and both
    estimators take for the loss; val/loss stays the cross-entropy."""
    model, X, Y = random_model()

    def loss():
        hidden = []
        with model.transformer.ln_f.register_forward_hook(lambda module, args, output: hidden.extend(args)):
            logits = model(X)[0]
        return expected(logits[Y >= 0], Y[Y >= 0], hidden[0])

    close(model(X, Y)[1], loss(), rtol=1e-6, atol=0)
    is_estimated(model, X, Y, loss)
    plain = json.loads(Path(DATA, 'plain.json').read_text())
    for name in NAMES:
        found = run(name=name)
        assert found['val/loss'][0] == plain[name]['val/loss'][0]
        assert found['val/training_loss'][0] > found['val/loss'][0]
        assert all(a != b for a, b in zip(found['train/loss'], plain[name]['train/loss']))


def trains_everywhere(*flags, parallel='fsdp'):
    """Three optimizers train, resume, and give other losses than GPT-2; shards and compiled code give the same."""
    plain = json.loads(Path(DATA, 'plain.json').read_text())
    found = {name: resumes(*flags, name=name) for name in NAMES}
    for name in NAMES:
        assert all(a != b for a, b in zip(found[name]['train/loss'], plain[name]['train/loss']))
    close(losses(run(*flags, '--parallel=fsdp')), losses(found['sophiag']), rtol=1e-5, atol=0)
    for name in 'sophiag', 'sophiah':
        close(losses(run(*flags, '--compile=True', name=name)), losses(found[name]), rtol=1e-4, atol=0)


def samples(model):
    """GPT.generate continues by the logits of the model's own forward."""
    idx = torch.tensor([[3, 1]])
    found = model.generate(idx, 6, temperature=0)
    for _ in range(6):
        idx = torch.cat((idx, model(idx[:, -model.config.block_size:])[0][:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, idx)


# ----------------------------------------------------------------------------------------------------------------------
# Losses


def z_loss():
    is_the_objective(lambda logits, targets, x: F.cross_entropy(logits, targets)
                     + 1e-4 * logits.logsumexp(-1).square().mean())


def label_smoothing():
    is_the_objective(lambda logits, targets, x: F.cross_entropy(logits, targets, label_smoothing=0.1))


def auxiliary_loss():
    is_the_objective(lambda logits, targets, x: F.cross_entropy(logits, targets) + 0.1 * x.square().mean())


def a_second_head():
    """The expectation of Sophia-G's estimate over all labels is the Gauss-Newton diagonal of the whole loss. Without its
    own sampled loss the head is named by a warning."""
    from hessian import GNBHook
    model, X, _ = random_model()
    params = list(model.parameters())
    X, Y = X[:1], torch.tensor([[-1, -1, 5, -1]])  # head 1 predicts from position 2, head 2 from position 1
    hidden = []
    with model.transformer.ln_f.register_forward_hook(lambda module, args, output: hidden.append(output)):
        log_1 = model(X)[0][0, 2].log_softmax(-1)
    log_2 = model.head_2(hidden[0])[0, 1].log_softmax(-1)
    close(model(X, Y)[1], -log_1[5] - 0.25 * log_2[5])
    expected, wanted = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for weight, log_p in (1.0, log_1), (0.25, log_2):
        for y in range(8):
            gradient = torch.autograd.grad(log_p[y], params, retain_graph=True, allow_unused=True)
            for total, g in zip(wanted, gradient):
                total += 0 if g is None else weight * log_p[y].exp().detach() * g.square()
    p_1, p_2 = log_1.detach().exp(), log_2.detach().exp()
    hook = hessian_hook(GNBHook, model)
    for y_1, y_2 in itertools.product(range(8), range(8)):
        u_1, u_2 = (p[:y].sum() + p[y] / 2 for p, y in ((p_1, y_1), (p_2, y_2)))  # these draw y_1 and y_2
        hook.start(0)
        assert hook.labels(X, Y)['uniforms'].shape == (1, 8)
        hook.add(model(X, Y, uniforms=torch.tensor([[u_1] * 4 + [u_2] * 4]))[2])
        hook.finish()
        for total, p in zip(expected, params):
            total += p_1[y_1] * p_2[y_2] * hook.optimizer.state[p]['hessian']
    close(expected, wanted, rtol=1e-5, atol=1e-9)

    stderr, sys.stderr = sys.stderr, open('warnings.txt', 'w')  # noqa: PTH123, SIM115
    for name in NAMES:
        resumes(name=name)
    assert 'head_2' not in Path('warnings.txt').read_text()
    forward = __import__('model').GPT.forward

    def without_labels(self, idx, targets=None, uniforms=None):
        if targets is None or uniforms is None:
            return forward(self, idx, targets)
        from loss import cross_entropy, sample_labels
        logits, loss = forward(self, idx, targets)
        return logits, loss, cross_entropy(logits, sample_labels(logits, uniforms[:, :idx.size(1)])).sum()

    __import__('model').GPT.forward = without_labels
    run()
    sys.stderr.flush()
    sys.stderr = stderr
    lines = [line for line in Path('warnings.txt').read_text().splitlines() if 'head_2.weight' in line]
    assert len(lines) == 1 and 'A second head' in lines[0]


# ----------------------------------------------------------------------------------------------------------------------
# Architectures


def architecture():
    from analysis.load import load
    model, X, Y = random_model()
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert isinstance(model.transformer.h[0].ln_1, torch.nn.RMSNorm)
    samples(model)
    is_estimated(model, X, Y, lambda: F.cross_entropy(model(X)[0].flatten(0, 1), Y.flatten(), ignore_index=-1))
    model.lm_head.weight.data *= 1000
    assert 29 < model(X)[0].abs().max() <= 30
    trains_everywhere()
    loaded = load('runs/0').model
    assert not torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)


def rotary_positions():
    """A setting: off, runs and checkpoints are as they were; on, everything follows."""
    from analysis.load import load
    from runtime import checkpoint
    plain = json.loads(Path(DATA, 'plain.json').read_text())
    off = run()
    assert off['train/loss'] == plain['sophiag']['train/loss']
    args = checkpoint.load(off['out'])[1]['model_args']
    assert list(args) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias']  # nanoGPT's
    model, X, Y = random_model(rope=True)
    samples(model)
    is_estimated(model, X, Y, lambda: F.cross_entropy(model(X)[0].flatten(0, 1), Y.flatten(), ignore_index=-1))
    on = resumes('--rope=True')
    assert checkpoint.load(on['out'])[1]['model_args'] == dict(args, rope=True)
    assert load(on['out']).model.config.rope
    checkpoint.LOCKS.clear()
    assert 'is a model with another rope' in message(lambda: run('--init_from=resume', out=on['out']))


def a_mixture_of_experts():
    """On one rank; on two ranks the losses are the same; and ranks that leave out an expert stop with a line."""
    found = {name: losses(resumes(name=name)) for name in NAMES}
    close(losses(run('--parallel=fsdp')), found['sophiag'], rtol=1e-5, atol=0)
    torch.save(found['sophiag'], 'one_rank.pt')


def a_mixture_of_experts_on_two_ranks():
    import torch.distributed as dist

    import model
    close(losses(run('--batch_size=1', out='runs/ranks')), torch.load('one_rank.pt'), rtol=1e-5, atol=0)
    assert not dist.is_initialized()

    def skipping(self, x):
        return sum(expert(x) for expert in self.experts[dist.get_rank():])

    model.MixtureOfExperts.forward = skipping
    os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1)
    try:
        run('--batch_size=1', out='runs/skipping')
    except SystemExit as error:
        assert error.code == 1 or 'experts.0' in error.code and 'A mixture of experts' in error.code
        print('stopped:', error.code)
    else:
        raise AssertionError('it did not stop')


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers


def a_first_order_optimizer():
    from adopt import ADOPT
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = ADOPT([p], lr=0.1, betas=(0.9, 0.8), weight_decay=0.5)
    theta, m, v = p.detach().clone(), 0, None
    for g in torch.randn(4, 2, dtype=torch.float64):
        p.grad = g
        optimizer.step()
        if v is not None:
            m = 0.9 * m + 0.1 * g / v.sqrt().clamp(min=1e-6)
            theta = theta - 0.1 * 0.5 * theta - 0.1 * m
        v = g ** 2 if v is None else 0.8 * v + 0.2 * g ** 2
    close(p.detach(), theta)
    found = resumes(name='adopt')
    close(losses(run('--parallel=fsdp', name='adopt')), losses(found), rtol=1e-5, atol=0)
    assert found['momentum_norm'][-1] > 0 and found['train/loss'][-1] < found['train/loss'][0]


def a_hessian_optimizer():
    from cautious import CautiousSophia
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = CautiousSophia([p], lr=0.1, betas=(0.5, 0.5), gamma=1.0, weight_decay=0.0)
    optimizer.update_hessian([torch.tensor([8.0, 0.0, 8.0])])
    p.grad = torch.tensor([2.0, 2.0, 2.0])
    optimizer.step()
    close(p.detach(), 1 - 0.1 * torch.tensor([0.25, 1.0, 0.25]))  # m = 1, h = 4, 0, 4
    p.grad = torch.tensor([2.0, -0.1, -0.1])  # m = 1.5, 0.45, 0.45: two updates go up the gradient
    optimizer.step()
    close(p.detach(), 1 - 0.1 * torch.tensor([0.25 + 0.375, 1.0, 0.25]))
    found = resumes(name='cautious')
    close(losses(run('--parallel=fsdp', name='cautious')), losses(found), rtol=1e-5, atol=0)
    assert found['hessian_norm'][-1] > 0
    assert found['train/loss'] != run()['train/loss']


def a_hessian_estimator():
    """The product is that with the explicit Gauss-Newton matrix; and it trains."""
    from torch.func import functional_call

    from hessian import GaussNewtonProductHook
    model, X, Y = random_model()
    names, values = zip(*model.named_parameters())
    hook = hessian_hook(GaussNewtonProductHook, model)

    def logits_of(params):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, params)), (X,))[0][Y >= 0]

    params = tuple(p.detach() for p in values)
    p = logits_of(params).softmax(-1)
    S = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(p)
    J = torch.cat([j.flatten(2) for j in torch.func.jacrev(logits_of)(params)], dim=-1)
    u = [torch.randn_like(p) for p in params]
    expected = torch.einsum('bvi,bvw,bwj,j->i', J, S, J, torch.cat([v.flatten() for v in u]))
    close(torch.cat([v.flatten() for v in hook.product(X, Y, u)]), expected, rtol=1e-6, atol=1e-9)
    found = resumes(name='sophia_gnp')
    assert found['train/loss'] != run(name='sophiah')['train/loss']
    close(losses(run('--compile=True', name='sophia_gnp')), losses(found), rtol=1e-4, atol=0)
    assert 'ddp for sophia_gnp' in message(lambda: run('--parallel=fsdp', name='sophia_gnp'))


def learning_rates_by_layer():
    """For each optimizer the steps of a tensor are its lr_scale times the usual ones."""
    import train
    moved = {}
    for name in (*NAMES, 'lion', 'muon', 'torch:NAdam'):
        for scaled in (True, False):
            c = train.resolve([*SHAPE, f'--optimizer_name={name}'])
            torch.manual_seed(0)
            model = train.GPT(train.GPTConfig.from_settings(c.values, 64))
            optimizer = train.make_optimizer(c, model)
            for group in optimizer.param_groups:
                group['weight_decay'] = 0.0
                if not scaled:
                    group.pop('lr_scale', None)
            train.optim.set_learning_rate(optimizer, c.learning_rate)
            before = {key: p.detach().clone() for key, p in model.named_parameters()}
            model(*torch.randint(64, (2, 2, 32)))[1].backward()
            optimizer.step()
            moved[scaled] = {key: p.detach() - before[key] for key, p in model.named_parameters()}
        scales = {'transformer.wte.weight': 0.5, 'transformer.h.0.mlp.c_fc.weight': 0.9,
                  'transformer.h.1.mlp.c_fc.weight': 1.0, 'transformer.ln_f.weight': 1.0}
        for key, scale in scales.items():
            close(moved[True][key], scale * moved[False][key], rtol=1e-3, atol=1e-6, msg=f'{name} {key}')
            assert moved[False][key].any()
    for name in 'muon', 'sophiag':
        resumes(name=name)


def weight_decay():
    from optimizers import parameter_groups
    model = random_model()[0]
    found = {id(p): group['weight_decay'] for group in parameter_groups(model, 0.1) for p in group['params']}
    assert found == {id(p): 0.1 * (p.dim() == 2 and name.startswith('transformer.h'))
                     for name, p in model.named_parameters()}
    assert resumes(name='adamw')['train/loss'] != json.loads(Path(DATA, 'plain.json').read_text())['adamw']['train/loss']


def average_of_the_weights():
    """The average is of the weights after each update; it is evaluated, saved and resumed, and changes nothing else."""
    import ema
    import train
    plain = json.loads(Path(DATA, 'plain.json').read_text())
    update, weights = ema.update, []

    def update_and_record(optimizer):
        update(optimizer, decay=0.5)
        weights.append([p.detach().clone() for p in train.optim.parameters(optimizer)])

    ema.update = update_and_record
    for name in NAMES:
        weights.clear()
        found = run('--keep_checkpoints=9', name=name)
        assert found['train/loss'] == plain[name]['train/loss'] and found['val/loss'] == plain[name]['val/loss']
        assert found['val/ema_loss'][0] == found['val/loss'][0]
        assert found['val/ema_loss'][-1] > found['val/loss'][-1]  # it lags behind
        state = train.checkpoint.load(found['out'])[1]['optimizer']['state']
        average = weights[0]
        for latest in weights[1:6]:
            average = [0.5 * a + 0.5 * p for a, p in zip(average, latest)]
        close([state[i]['ema'] for i in sorted(state)], average)
    ema.update = update
    assert torch.equal(*(torch.tensor(resumes(name=name)['val/ema_loss']) for name in ('sophiag', 'sophiag')))
    found = run('--parallel=fsdp')
    close(torch.tensor(found['val/ema_loss']), torch.tensor(resumes()['val/ema_loss']), rtol=1e-5, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Data, and the loop


def batch_ramp():
    """The first iteration is that of a run with its micro-batch alone: loss, gradient, estimate."""
    flags = '--total_batch_size=8', '--warmup_iters=3', '--hessian_batch_size=8'
    for name in NAMES:
        ramped = resumes(*flags, name=name) if name != 'adamw' else resumes(*flags[:2], name=name)
        small = run('--total_batch_size=2', '--warmup_iters=3', '--max_iters=1', name=name,
                    *(['--hessian_batch_size=2'] if name != 'adamw' else []))
        for key in 'train/loss', 'grad_norm', 'momentum_norm', *(['hessian_norm'] if name != 'adamw' else []):
            assert ramped[key][0] == small[key][0], key
        sequences = [2, 4, 6, 8, 8, 8]
        tokens = [0] + [32 * sum(sequences[:n]) for n in range(1, 7)]
        assert [n for n in dict.fromkeys(ramped['tokens'])] == tokens, ramped['tokens']


def sequence_length_warm_up():
    for name in NAMES:
        found = resumes(name=name)
        tokens = [0, 64, 128, 256, 384, 512, 640]
        assert list(dict.fromkeys(found['tokens'])) == tokens, found['tokens']


def each_sequence_once_per_epoch():
    from data.loader import TrainLoader, open_dataset
    data = open_dataset(DATA, 32)[0]
    loaders = [TrainLoader(data, 1, 4, 32, rank, 2, 'cpu') for rank in (0, 1)]
    count = (len(data) - 1) // 32
    starts = [start for i in range(count // 2 + 1) for rank in (0, 1) for start in loaders[0].starts(i, rank)[0].tolist()]
    for loader in loaders:
        loader.close()
    places = [loaders[0].starts(i, rank)[0].tolist() for i in range(count) for rank in (0, 1)]
    order = [start for i in range(count) for pair in zip(*places[2 * i:2 * i + 2]) for start in pair]
    epochs = [order[i * count:(i + 1) * count] for i in range(4)]
    assert all(sorted(epoch) == list(range(0, 32 * count, 32)) for epoch in epochs) and epochs[0] != epochs[1]
    assert len(starts) >= count
    resumes()


def estimates_at_other_times():
    from hessian import HessianHook
    h = run('--hessian_interval=4')['hessian_norm']
    assert h[0] == h[1] != h[2] == h[3] != h[4]
    assert HessianHook.estimates(10, 1000) == 200 and HessianHook.estimates(10, 2000) == 300


def another_schedule():
    import train
    c = train.resolve(['--learning_rate=1', '--min_lr=0', '--warmup_iters=10', '--max_iters=110', '--schedule=sqrt'])
    assert [train.learning_rate_at(c, i) for i in (10, 35, 74, 110)] == [1.0, 0.5, 1 - 0.8, 0.0]
    assert run('--schedule=sqrt')['lr'] != run()['lr']


def another_metric():
    from runtime import checkpoint
    found = run()
    weight = checkpoint.load(found['out'])[1]['model']['lm_head.weight']
    assert len(found['head_norm']) == 6 and abs(found['head_norm'][-1] / weight.norm().item() - 1) < 1e-5


def another_tokenizer():
    import runpy

    from analysis.load import load
    Path('my.txt').write_text('to be or not to be, that is the question:\n' * 200, encoding='utf-8')
    sys.argv = ['prepare.py', '--tokenizer=ascii', '--out_dir=bins', '--num_proc=1', 'my.txt']
    runpy.run_path('data/text/prepare.py', run_name='__main__')
    loaded = load(run('--dataset=bins')['out'])
    assert loaded.tokenizer.decode(loaded.tokenizer.encode('ä b\n')) == '\x1a b\n'
    assert loaded.model.config.vocab_size == 128


if __name__ == '__main__':
    sys.path[0] = str(Path.cwd())
    DATA = sys.argv[1]
    compile_ = torch.compile  # without the C++ compiler, which takes minutes
    torch.compile = lambda f=None, dynamic=None, **options: compile_(f, dynamic=dynamic, backend='aot_eager')
    for function in sys.argv[2:]:
        globals()[function]()
    print('the checks passed')
