"""What is fast equals what is plain: Sophia's update in parts that fit the cache, and compiled."""

import copy
import shutil

import pytest
import torch

from optimizers import SETTINGS, build_optimizer
from sophia import Sophia, in_parts

needs_compiler = pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='needs a C++ compiler')


def error(xs, ys):
    """The largest relative error, in the ℓ2 norm of each tensor."""
    return max(((x - y).norm() / x.norm().clamp(min=1e-6)).item() for x, y in zip(xs, ys, strict=True))


def test_parts_hold_every_entry_once():
    lists = [[torch.zeros(7, 3), torch.zeros(()), torch.zeros(4)], [torch.zeros(7, 3), torch.zeros(()), torch.zeros(4)]]
    parts = list(in_parts(*lists, size=5))
    assert [part[0][0].numel() for part in parts] == [5, 5, 5, 5, 1, 1, 4]
    for tensors, other in parts:
        tensors[0].add_(1)
        other[0].add_(2)
    assert all((t == i + 1).all() for i, tensors in enumerate(lists) for t in tensors)
    transposed = [torch.zeros(3, 7).t()]
    assert [[len(ts) for ts in part] for part in in_parts(transposed * 5, transposed * 5, together=42)] == [
        [2, 2], [2, 2], [1, 1]]


@needs_compiler
@pytest.mark.parametrize('variant', [{}, dict(squared=True), dict(clipping='normalize'),
                                     dict(clipping='none', eps=1e-3)])
def test_the_compiled_update_equals_the_plain_one(variant):
    torch.manual_seed(0)
    shapes = (40, 9), (17,), ()
    start = [torch.randn(s) for s in shapes]
    optimizers = [Sophia([{'params': [torch.nn.Parameter(t.clone()) for t in start[:2]]},
                          {'params': [torch.nn.Parameter(start[2].clone())], 'weight_decay': 0.0}],
                         lr=1e-2, compile=compile, **variant) for compile in (False, True)]
    for step in range(4):
        gradients, estimates = [torch.randn(s) for s in shapes], [torch.randn(s) for s in shapes]
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group['params']]
            for p, g in zip(params, gradients):
                p.grad = g.clone()
            for group in optimizer.param_groups:
                group['lr'] = 1e-2 / (step + 1)
            if step % 2 == 0 and variant.get('clipping') != 'normalize':
                optimizer.update_hessian([e.clone() for e in estimates])
            optimizer.step()
    plain, compiled = ([t for group in o.param_groups for p in group['params']
                        for t in (p.detach(), *o.state[p].values())] for o in optimizers)
    assert len(plain) == len(compiled) and error(plain, compiled) < 1e-6
    assert copy.deepcopy(optimizers[1]).compile


def test_only_sophia_has_an_update_to_compile():
    params = [torch.nn.Parameter(torch.zeros(2))]
    for name in SETTINGS:
        optimizer = build_optimizer(name, params, lr=1e-3, compile=True)
        assert getattr(optimizer, 'compile', None) is (True if isinstance(optimizer, Sophia) else None)
