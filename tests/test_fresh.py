"""hessian_sequences = fresh: estimates of sequences that the gradient does not see."""

import pytest
import torch
from conftest import TINY, metrics

import train as program
from analysis.runs import hook_of
from data.loader import Bin, TrainLoader
from model import GPT, GPTConfig
from runtime.distributed import World

SIZES = dict(total_batch_size=6, batch_size=3, hessian_batch_size=4, hessian_interval=2)


def run_of(name, corpus, **settings):
    """A `train.Run` with two micro-batches of three sequences, and its loader."""
    flags = [f'--{key}={value}' for key, value in {**SIZES, **settings}.items()]
    c = program.resolve([*TINY, f'--dataset={corpus}', f'--optimizer_name={name}', '--learning_rate=0', *flags])
    data, world = Bin(corpus, 'train'), World('cpu', 'gloo')
    torch.manual_seed(0)
    run = program.set_up(c, world, GPT(GPTConfig.from_settings(c.values, data.vocab_size)))
    loader = TrainLoader(data, c.seed, c.total_batch_size, c.block_size, 0, 1, 'cpu', 0, run.hessian.fresh_sequences)
    return run, loader


def estimate(run):
    return [run.optimizer.state[p]['hessian'] for p in run.params]


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_the_estimate_is_of_the_fresh_sequences_and_the_gradient_is_not(corpus, name):
    run, loader = run_of(name, corpus, hessian_sequences='fresh')
    own, own_loader = run_of(name, corpus)
    batches = [next(loader) for _ in range(3)]
    assert [len(batch) for batch in batches] == [10, 6, 10]
    plain = [next(own_loader) for _ in range(3)]
    loader.close(), own_loader.close()
    assert all(torch.equal(batch[:6], other) for batch, other in zip(batches, plain))
    assert not torch.equal(batches[0][6:], batches[0][:4])

    steps = [program.train_step(one, tokens[0], 0) for one, tokens in ((run, batches), (own, plain))]
    assert steps[0].estimated and steps[0].loss == steps[1].loss and steps[0].grad_norm == steps[1].grad_norm
    assert not all(torch.allclose(a, b) for a, b in zip(estimate(run), estimate(own)))

    # The same sequences as a mini-batch of their own: the labels and u are functions of (seed, iteration).
    alone, loader = run_of(name, corpus, total_batch_size=4, batch_size=4)
    loader.close()
    program.train_step(alone, batches[0][6:], 0)
    for a, b in zip(estimate(run), estimate(alone)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)

    step = program.train_step(run, batches[1], 1)
    assert not step.estimated and not step.problem


@pytest.mark.parametrize('name, parallel', [('sophiag', 'ddp'), ('sophiag', 'fsdp'), ('sophiah', 'ddp')])
def test_ranks_share_the_fresh_sequences(train, tmp_path, name, parallel):
    flags = [f'--optimizer_name={name}', '--learning_rate=1e-2', '--max_iters=4', '--hessian_sequences=fresh',
             '--hessian_interval=2', '--hessian_batch_size=2', '--batch_size=1', '--log_interval=1',
             '--eval_interval=2']
    for out, ranks, more in (('one', 1, []), ('two', 2, [f'--parallel={parallel}'])):
        done = train(tmp_path / out, *flags, *more, ranks=ranks)
        assert done.code == 0, done.err
    for key in ('train/loss', 'val/loss'):
        assert metrics(tmp_path / 'one', key) == pytest.approx(metrics(tmp_path / 'two', key), abs=1e-4)
    assert metrics(tmp_path / 'one', 'hessian_norm') == pytest.approx(metrics(tmp_path / 'two', 'hessian_norm'),
                                                                      rel=2e-2)


def test_fresh_sequences_cost_a_forward():
    own, fresh = (hook_of('sophiag').cost[sequences] for sequences in ('own', 'fresh'))
    assert fresh == pytest.approx(own + 1 / 3)
    own, fresh = (hook_of('sophiah').cost[sequences] for sequences in ('own', 'fresh'))
    assert fresh == own  # its product has a forward in any case
