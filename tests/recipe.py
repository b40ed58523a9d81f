"""What the tests of docs/hacking.md run on an edited copy of the repository.

`recipe.py` imports PyTorch once. For each line on stdin, a request in JSON, it forks a process that imports the copy,
calls one of the checks below and ends; the answer is a line with null, or with the traceback.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # noqa: F401 - slow to import, and any optimizer does
import torch.distributed.fsdp  # noqa: F401
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ITERATIONS = 3
KEPT = []  # what lives as long as its process
HANG = 600  # seconds after which a process is taken to hang: it shows where, and ends
SHAPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--model_size=tiny', '--block_size=32', '--total_batch_size=4',
         '--batch_size=2', '--warmup_iters=2', '--max_iters=6', '--hessian_interval=2', '--gamma=1e-3', '--device=cpu',
         '--log_interval=1', '--eval_interval=3', '--learning_rate=1e-3']


def flags(data, *more, name='sophiag'):
    """train.py's flags for a small run; later ones take precedence."""
    given = [*SHAPE, f'--dataset={data}', f'--optimizer_name={name}', *more]
    if name in ('adamw', 'my_adopt'):
        given = [flag for flag in given if not flag.startswith(('--hessian_interval', '--gamma'))]
    return given


def ranks(size, function):
    """The JSON-able result of `function` on rank 0, called in `size` forked processes with torchrun's environment."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                              MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
            keep_models()
            os.write(write, attempt(function).encode())
            os._exit(0)
        os.close(write)
        children.append((pid, read))
    answers = []
    for pid, read in children:
        with open(read) as f:  # noqa: PTH123 - a file descriptor
            answers.append(json.loads(f.read() or '[null, "no answer"]'))
        os.waitpid(pid, 0)
    assert all(error is None for _, error in answers), '\n'.join(error or '' for _, error in answers)
    return answers[0][0]


def keep_models():
    """A model that is freed after its process group may wait for a thread of gloo, which waits for the GIL."""
    import train
    set_up = train.set_up
    train.set_up = lambda *args: KEPT.append(set_up(*args)) or KEPT[-1]


def attempt(function):
    """(result, traceback) as JSON, one of them null."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(HANG)
    try:
        return json.dumps((function(), None))
    except BaseException:
        return json.dumps((None, traceback.format_exc()))


def losses(argv):
    """The losses of some training steps and the validation loss, by train.py's own functions."""
    import train
    from data.loader import Bin, TrainLoader
    from model import GPT, GPTConfig
    c = train.resolve(argv)
    world = train.World(c.device, c.backend, c.parallel)
    data = Bin(Path(c.dataset), 'train')
    torch.manual_seed(c.seed)
    run = train.set_up(c, world, GPT(GPTConfig.from_settings(c.values, data.vocab_size)))
    loader = TrainLoader(data, c.seed, c.total_batch_size, c.block_size, world.rank, world.size, world.device)
    found = []
    for i in range(ITERATIONS):
        train.optim.set_learning_rate(run.optimizer, c.learning_rate)
        step = train.train_step(run, next(loader), i)
        assert not step.problem, step.problem
        found.append(step.loss)
    loader.close()
    stops = train.StopSignals(0)
    found.append(train.evaluate(run, Bin(Path(c.dataset), 'val'), stops))
    world.close()
    return found


def run_main(argv):
    """train.py with these arguments."""
    import train
    from runtime import checkpoint
    checkpoint.LOCKS.clear()  # of the runs before, which this process keeps until it ends
    train.main(argv)


def one_line(function):
    """The one line with which `function` stops."""
    try:
        function()
    except SystemExit as error:
        assert isinstance(error.code, str) and '\n' not in error.code
        return error.code
    raise AssertionError('it did not stop')


# ----------------------------------------------------------------------------------------------------------------------
# What every change of the loss or the model has to pass


def follows(data, model_flags=(), compile=(), parallel=(), token_loss=None, auxiliary=lambda x: 0):
    """Training, evaluation, sampling, Sophia-G, Sophia-H; and compiled, or over two ranks, the same losses.

    Args:
        compile: optimizers to compile with. parallel: 'ddp', 'fsdp'.
        token_loss: the training loss as the recipe is meant, (logits, targets) → (N,); default cross-entropy.
        auxiliary: what is added to its mean, a function of the last hidden states.
    """
    from model import GPT, GPTConfig
    token_loss = token_loss or (lambda logits, targets: F.cross_entropy(logits, targets, reduction='none'))
    # First, before this process has threads, with which it could not safely fork.
    over_ranks = [ranks(2, lambda kind=kind: losses(flags(data, *model_flags, f'--parallel={kind}', '--batch_size=1')))
                  for kind in parallel]
    plain = {name: losses(flags(data, *model_flags, name=name)) for name in ('sophiag', 'sophiah')}
    for found in over_ranks:
        close(found, plain['sophiag'])
    for name in compile:
        shallow = *model_flags, '--n_layer=1'
        close(losses(flags(data, *shallow, '--compile=True', name=name)), losses(flags(data, *shallow, name=name)))

    # The first loss, and all derivatives, are those of the logits that sampling sees.
    torch.manual_seed(1)
    args = GPTConfig.from_settings(
        dict(block_size=4, n_layer=2, n_head=2, n_embd=8, **{f[2:].split('=')[0]: True for f in model_flags}), 16)
    model = GPT(args).double()
    with torch.no_grad():
        for p in model.parameters():  # far from the initial weights, where many things make no difference
            p.add_(0.3 * torch.randn_like(p))
    X, Y = torch.randint(16, (2, 2, 4))
    Y[0, 1] = -1
    kept = Y.flatten() >= 0
    hidden = []
    handle = model.transformer.ln_f.register_forward_hook(lambda module, args, output: hidden.append(output))
    logits = model(X)[0].flatten(0, 1)
    handle.remove()
    expected = token_loss(logits[kept], Y.flatten()[kept]).mean() + auxiliary(hidden[0])
    params = list(model.parameters())
    wanted = torch.autograd.grad(expected, params)
    for keep in (True, False):
        loss = model(X, Y, return_logits=keep)[1]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, params), wanted)
    model.eval()
    torch.testing.assert_close(model(X, Y, return_logits=False)[1], expected)
    samples(model)
    gauss_newton_bartlett(model, X)
    hutchinson(model, X, Y)
    return plain


def close(found, expected):
    """Losses agree to 1e-4."""
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def samples(model):
    """GPT.generate's greedy tokens are those of the model's own forward, beyond block_size too."""
    idx = torch.tensor([[3, 1]])
    found, _ = model.generate(idx, 6, temperature=0)
    for _ in range(6):
        logits = model(idx[:, -model.config.block_size:])[0]
        idx = torch.cat((idx, logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, idx)


def gauss_newton_bartlett(model, X):
    """The expectation of GNBHook's estimate over a token's label is its part of the Fisher diagonal, by brute force:
    Σ p(y) (∂nll/∂θ)² over the classes, one at a time."""
    import hessian
    from sophia import Sophia
    params = list(model.parameters())
    optimizer = Sophia(params, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)
    hook = hessian.GNBHook(model, optimizer, seed=0, interval=1, batch_size=1)
    X, Y = X[:1], torch.tensor([[-1, -1, 2, -1]])  # one token counts, and depends on three
    log_p = model(X)[0][0, 2].log_softmax(-1)
    p = log_p.detach().exp()
    fisher, expectation = ([torch.zeros_like(q) for q in params] for _ in range(2))
    for y in range(len(p)):
        for total, g in zip(fisher, torch.autograd.grad(log_p[y], params, retain_graph=True)):
            total += p[y] * g ** 2
        middle = p[:y].sum() + p[y] / 2
        hook.start(0)
        with mock.patch('hessian.keyed_uniforms', lambda seed, stream, i, shape, u=middle: torch.full(shape, u.item())):
            loss = hook.forward(model, X, Y)
        hook.backward()
        loss.backward()
        hook.finish()
        for total, q in zip(expectation, params):
            total += p[y] * optimizer.state[q]['hessian']
    torch.testing.assert_close(expectation, fisher, rtol=1e-6, atol=1e-12)  # ĥ = B·ĝ² of B = 1 prediction


def hutchinson(model, X, Y):
    """HutchinsonHook's product is that of differentiating the training loss twice."""
    from hessian import HutchinsonHook
    from sophia import Sophia
    params = list(model.parameters())
    hook = HutchinsonHook(model, Sophia(params, lr=0.0), seed=0, interval=1, batch_size=2)
    u = [torch.randn_like(p) for p in params]
    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(model(X, Y, return_logits=True)[1], params, create_graph=True)
        expected = torch.autograd.grad(sum((g * v).sum() for g, v in zip(gradient, u)), params)
    torch.testing.assert_close(hook.product(X, Y, u), expected, rtol=1e-6, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# The recipes


def plain(data, tmp):
    """The repository without an edit: its losses, and a run for the recipes to resume."""
    run_main(flags(data, f'--out_dir={tmp}/before', '--max_iters=3', '--lr_decay_iters=6'))
    return {name: losses(flags(data, name=name)) for name in ('sophiag', 'sophiah')}


def z_loss(data, tmp):
    return follows(data, compile=['sophiag'], parallel=['ddp', 'fsdp'], token_loss=lambda logits, targets: (
        F.cross_entropy(logits, targets, reduction='none') + 1e-4 * logits.logsumexp(-1) ** 2))


def label_smoothing(data, tmp):
    return follows(data, token_loss=lambda logits, targets: (
        -0.9 * logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] - 0.1 * logits.log_softmax(-1).mean(-1)))


def auxiliary_loss(data, tmp):
    return follows(data, auxiliary=lambda x: 1e-4 * x.abs().mean())


def rmsnorm(data, tmp):
    return follows(data)


def swiglu(data, tmp):
    return follows(data)


def qk_norm(data, tmp):
    return follows(data)


def untied_head(data, tmp):
    import model
    head = model.GPT(model.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=64))
    assert head.lm_head.weight is not head.transformer.wte.weight
    return follows(data, parallel=['ddp', 'fsdp'])


def logit_soft_capping(data, tmp):
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=64))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1000)
    assert 29 < model(torch.zeros(1, 1, dtype=torch.int64))[0].abs().max() <= 30
    return follows(data, parallel=['fsdp'])


def rotary_positions(data, tmp):
    """A setting: off, it leaves runs and checkpoints as they were; on, everything follows."""
    from analysis.load import load
    from runtime import checkpoint
    on = follows(data, ['--rope=True'], compile=['sophiag', 'sophiah'], parallel=['ddp', 'fsdp'])
    off = {name: losses(flags(data, name=name)) for name in ('sophiag', 'sophiah')}

    resume = flags(data, '--init_from=resume', f'--out_dir={tmp}/before')
    assert 'is a model with another rope' in one_line(lambda: run_main([*resume, '--rope=True']))
    run_main(resume)
    args = checkpoint.load(f'{tmp}/before')[1]['model_args']
    assert list(args) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias']  # nanoGPT's
    run_main(flags(data, f'--out_dir={tmp}/rope', '--rope=True'))
    assert checkpoint.load(f'{tmp}/rope')[1]['model_args'] == dict(args, rope=True)
    samples(load(f'{tmp}/rope').model)
    return dict(off=off, on=on)


def back_again(data, tmp):
    """The repository without the edit again, and a checkpoint of a model that only the edit knows."""
    from analysis.load import load
    assert 'is a model with another rope' in one_line(
        lambda: run_main(flags(data, '--init_from=resume', f'--out_dir={tmp}/rope')))
    assert 'rope' in one_line(lambda: load(f'{tmp}/rope'))


def edited_unseen(data, tmp):
    """Edits of token_loss that a trial of a few numbers would miss."""
    import loss
    assert loss.FUSED is None
    return losses(flags(data))


def another_optimizer(data, tmp):
    """ADOPT as its docstring says it, in NumPy; the same losses over ranks and shards; it saves and resumes; and the
    tests of the table still pass."""
    import pytest
    from adopt import ADOPT

    import train
    assert pytest.main(['tests/test_optimizers.py', '-q', '-p', 'no:cacheprovider', '-k',
                        'row or paper or states_per or rejected']) == 0
    over_ranks = [ranks(2, lambda kind=kind: losses(
        flags(data, f'--parallel={kind}', '--batch_size=1', name='my_adopt'))) for kind in ('ddp', 'fsdp')]
    one = losses(flags(data, name='my_adopt'))
    for found in over_ranks:
        close(found, one)

    rng = np.random.default_rng(0)
    theta, gradients = rng.normal(size=5), rng.normal(size=(4, 5))
    p = torch.nn.Parameter(torch.tensor(theta))
    optimizer = ADOPT([p], lr=0.1, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.5)
    m, v = np.zeros(5), None
    for g in gradients:
        p.grad = torch.tensor(g)
        optimizer.step()
        if v is not None:
            m = 0.9 * m + 0.1 * g / np.maximum(np.sqrt(v), 1e-6)
            theta = theta - 0.1 * 0.5 * theta - 0.1 * m
        v = g ** 2 if v is None else 0.8 * v + 0.2 * g ** 2
    np.testing.assert_allclose(p.detach().numpy(), theta, rtol=1e-12)

    settings = train.resolve(['--optimizer_name=my_adopt'])
    assert (settings.learning_rate, settings.eps, settings.beta2) == (6e-4, 1e-6, 0.9999)
    whole, half = (flags(data, f'--out_dir={tmp}/{out}', name='my_adopt') for out in ('whole', 'half'))
    run_main(whole)
    run_main([*half, '--max_iters=3', '--lr_decay_iters=6'])
    run_main([*half, '--init_from=resume'])
    lines = [list(map(json.loads, Path(f'{tmp}/{out}/metrics.jsonl').read_text().splitlines()))
             for out in ('whole', 'half')]
    whole, half = ([line['train/loss'] for line in found if 'train/loss' in line] for found in lines)
    assert whole == half and len(whole) == 6
    assert lines[0][-2]['momentum_norm'] > 0


def another_hessian_estimator(data, tmp):
    """The product with the explicit Gauss-Newton matrix; and it trains."""
    import hessian
    import train
    from model import GPT, GPTConfig
    from scripts.plan import flops
    from sophia import Sophia
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=4)).double()
    X, Y = torch.randint(8, (2, 2, 4))
    names, values = zip(*model.named_parameters())
    hook = hessian.GaussNewtonProductHook(model, Sophia(values, lr=0.0), seed=0, interval=1, batch_size=2)
    params = tuple(p.detach() for p in values)

    def logits_of(params):
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, params)), (X,))[0].flatten(0, 1)

    p = logits_of(params).softmax(-1)
    S = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(p)
    J = torch.cat([j.flatten(2) for j in torch.func.jacrev(logits_of)(params)], dim=-1)
    u = [torch.randn_like(p) for p in params]
    expected = torch.einsum('bvi,bvw,bwj,j->i', J, S, J, torch.cat([v.flatten() for v in u]))
    torch.testing.assert_close(torch.cat([v.flatten() for v in hook.product(X, Y, u)]), expected)
    counted = flops(train.resolve(flags(data, '--hessian_interval=1', '--compile=False', name='sophiagnp')), 64)
    cost = counted['hessian'] / counted['gradient']
    assert math.isclose(cost, hessian.GaussNewtonProductHook.cost['own'], rel_tol=0.1)
    found = losses(flags(data, '--n_layer=1', name='sophiagnp'))
    assert found != losses(flags(data, '--n_layer=1', name='sophiah'))
    close(losses(flags(data, '--n_layer=1', '--compile=True', name='sophiagnp')), found)
    assert 'ddp for sophiagnp' in one_line(lambda: train.resolve(flags(data, '--parallel=fsdp', name='sophiagnp')))


def estimates_at_other_times(data, tmp):
    """Training, fresh sequences, and what counts FLOPs."""
    import train
    from analysis.runs import read_run
    from optimizers import OPTIMIZERS
    from scripts.plan import flops
    norms, per_iteration, planned = {}, {}, {}
    for k in (2, 4):
        for sequences in ('own', 'fresh'):
            given = flags(data, f'--hessian_interval={k}', f'--hessian_sequences={sequences}', '--compile=False')
            out = f'{tmp}/{k}-{sequences}'
            run_main([*given, f'--out_dir={out}'])
            run = read_run(out)
            norms[k, sequences] = run.series('hessian_norm')[1]
            per_iteration[k, sequences] = run.flops_per_iteration()
            planned[k, sequences] = flops(train.resolve(given), 64)['hessian']
    for found in norms.values():
        assert len(found) == 6
    for sequences in ('own', 'fresh'):
        # With k = 2 at every iteration, with k = 4 at every other one.
        assert len(set(norms[2, sequences])) == 6 and len(set(norms[4, sequences])) == 3
        assert norms[4, sequences][0] == norms[4, sequences][1] != norms[4, sequences][2]
        gradient = 2 * per_iteration[4, sequences] - per_iteration[2, sequences]
        assert 0 < gradient < per_iteration[4, sequences]
        assert math.isclose(planned[2, sequences], 2 * planned[4, sequences])
    hook = OPTIMIZERS['sophiag'].hook
    assert (hook.estimates(10, 1000), hook.estimates(10, 2000), hook.estimates(1, 50)) == (200, 300, 50)


def another_schedule(data, tmp):
    """It is what runs log; and without it nothing has changed."""
    import train
    c = train.resolve(['--learning_rate=1', '--min_lr=0', '--warmup_iters=10', '--max_iters=110', '--schedule=sqrt'])
    assert [train.learning_rate_at(c, i) for i in (10, 35, 74, 110)] == [1.0, 0.5, 1 - 0.8, 0.0]
    assert train.learning_rate_at(c, 0) < train.learning_rate_at(c, 9) < 1.0
    logged = {}
    for schedule in ('sqrt', 'cosine'):
        argv = flags(data, f'--out_dir={tmp}/{schedule}', f'--schedule={schedule}')
        run_main(argv)
        lines = map(json.loads, Path(f'{tmp}/{schedule}/metrics.jsonl').read_text().splitlines())
        logged[schedule] = [line['lr'] for line in lines if 'lr' in line]
        assert logged[schedule] == [train.learning_rate_at(train.resolve(argv), i) for i in range(6)]
    assert logged['sqrt'] != logged['cosine']


def another_metric(data, tmp):
    """It is that of the model, in shards too."""
    from runtime import checkpoint

    def logged(out, *more):
        run_main(flags(data, f'--out_dir={tmp}/{out}', '--max_iters=3', *more))
        lines = [json.loads(line) for line in Path(f'{tmp}/{out}/metrics.jsonl').read_text().splitlines()]
        return [line['head_norm'] for line in lines if 'head_norm' in line]

    two = ranks(2, lambda: logged('two', '--parallel=fsdp', '--batch_size=1'))
    one = logged('one')
    weight = checkpoint.load(f'{tmp}/one')[1]['model']['lm_head.weight']
    assert len(one) == 3 and math.isclose(one[-1], weight.norm().item(), rel_tol=1e-5)
    np.testing.assert_allclose(two, one, rtol=1e-4)


def another_tokenizer(data, tmp):
    """From text to bins, to a run, and to text."""
    import runpy

    from analysis.load import load
    from data.loader import read_meta
    text = Path(tmp) / 'my.txt'
    text.write_text('to be or not to be, that is the question:\n' * 200, encoding='utf-8')
    sys.argv = ['prepare.py', '--tokenizer=ascii', f'--out_dir={tmp}/bins', '--num_proc=1', str(text)]
    runpy.run_path('data/text/prepare.py', run_name='__main__')
    assert read_meta(Path(tmp) / 'bins')['vocab_size'] == 128
    run_main(flags(f'{tmp}/bins', f'--out_dir={tmp}/out'))
    loaded = load(f'{tmp}/out')
    assert loaded.tokenizer.name == 'ascii' and loaded.tokenizer.decode(loaded.tokenizer.encode('ä b\n')) == '\x1a b\n'
    assert loaded.model.config.vocab_size == 128


def main():
    """Serves requests: {copy, check, data, tmp, log}."""
    torch.set_num_threads(1)
    compile = torch.compile  # without the C++ compiler, which takes minutes: what can be traced can be compiled
    torch.compile = lambda f=None, dynamic=None, **options: compile(f, dynamic=dynamic, backend='aot_eager')
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for stream in (1, 2):
                os.dup2(os.open(request['log'], os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            os.chdir(request['copy'])
            sys.path[0] = request['copy']
            check = globals()[request['check']]
            answer = attempt(lambda check=check, request=request: check(request['data'], request['tmp']))
            with contextlib.suppress(BrokenPipeError):
                os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        with open(read) as f:  # noqa: PTH123
            print(f.read() or '[null, "the check ended its process"]', flush=True)
        os.waitpid(pid, 0)


if __name__ == '__main__':
    main()
