"""scripts/curvature.py: its measures, each against its definition."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import random_gpt, rejection
from reference import double_precision  # noqa: F401 - for every test here

from scripts import curvature
from scripts.curvature import draw_gradients, gnb_diagonal
from scripts.load import Loaded


@pytest.fixture(scope='module')
def gpt():
    """A GPT of some hundred parameters, and 32 sequences."""
    return random_gpt(0.3, block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=4), torch.randint(8, (32, 5))


@pytest.mark.parametrize(('name', 'known'), [
    ('sophiag', True), ('sophiag_fresh', True), ('sophiah', False), ('ef_clip', False), ('this:Zen', False)])
def test_only_the_h_of_sophia_g_is_judged(tmp_path, name, known):
    state = dict(config=dict(optimizer_name=name), optimizer=dict(state=dict(w=dict(hessian=torch.ones(2)))))
    loaded = SimpleNamespace(path=tmp_path / 'ckpt_00000001.pt', state=state, model=torch.nn.Linear(1, 1))
    h = curvature.h_of_run(loaded, ['w'])
    assert h.tolist() == [1, 1] if known else h is None


def test_a_model_without_a_data_set_is_rejected(monkeypatch, gpt):
    monkeypatch.setattr(curvature, 'load', lambda *_, **__: Loaded('gpt2', gpt[0], None))
    assert 'gpt2: does not name its data set' in rejection(curvature.main, ['gpt2', '--device=cpu'])


@pytest.mark.parametrize(('size', 'parts'), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_the_noise_of_an_estimate_by_parts(monkeypatch, size, parts):
    """Computed from the moments of single gradients, here coin tosses and normals, it agrees with many estimates."""
    gs = torch.cat([torch.randn(40_000, 1), 2.0 * torch.randint(2, (40_000, 1)) - 1], 1)
    monkeypatch.setattr(curvature, 'draw_gradients', lambda *_: ((3, g) for g in gs[:4000]))
    gradients = gnb_diagonal(None, None, torch.zeros(4000, 4))
    estimates = (gs.view(-1, parts, size // parts, 2).sum(2) ** 2).sum(1) / size
    torch.testing.assert_close(sum(gradients.halves) * 3, estimates.mean(0), rtol=0.1, atol=0)
    for at in (slice(0, 1), slice(1, 2), slice(None)):
        cv = (estimates.var(0)[at].mean() / estimates.mean(0)[at].square().mean()).sqrt().item()
        assert gradients.cv(at, size, parts) == pytest.approx(cv, rel=0.1, abs=0.02)


def test_masked_targets_are_left_out(gpt):
    """Also if GPT.forward masks them in place, without changing the sequences."""
    model, sequences = copy.deepcopy(gpt[0]).double(), gpt[1].clone()
    params, before, forward = list(model.parameters()), sequences.clone(), model.forward
    model.forward = lambda idx, targets: forward(idx, targets.masked_fill_(targets == 3, -1))
    found = [*draw_gradients(model, params, sequences)]
    assert torch.equal(sequences, before)
    assert [count for count, _ in found] == (sequences[:, 1:] != 3).sum(1).tolist()
    gradients = gnb_diagonal(model, params, sequences)
    expected = sum(g ** 2 for _, g in found) / sum(count for count, _ in found)
    torch.testing.assert_close(sum(gradients.halves), expected)


def test_entries_that_are_not_positive_have_no_logarithm():
    a, b = torch.tensor([0.0, 0.5, 1.0, 4.0, 1.0]), torch.tensor([1.0, 0.5, 4.0, 1.0, 0.0])
    assert curvature.log_correlation(a, b) == pytest.approx(1 / 7) == curvature.log_correlation(b, a)
    low, h = torch.tensor([-1.0, 0.0, 0.5, 2.0, 4.0, 3.0]), torch.tensor([1.0, 1.0, 0.5, 3.0, 0.0, 0.2])
    left, right = curvature.draw(low, h, '', 0.5).axes
    assert sum(bar.get_height() for bar in left.patches) == 4 and right.collections[0].get_array().sum() == 3


def test_a_row_from_two_sequences():
    found = curvature.Diagonal()
    for estimate in torch.tensor([[1.0, 2.0, 0.0], [3.0, 6.0, 0.0]]):
        found.add(estimate)
    row = curvature.describe('all', slice(None), found, 2, [1, 2], (torch.tensor([1.0, 3.0, 2.0]), 2, 4.0))
    assert found.cv(slice(0, 1), 2, 1) == pytest.approx((2 - 4 / 3 / 2) ** 0.5)  # κ = 2 / (4 − 2 / 2) − 2
    assert [row[key] for key in ('positive', 'agreement', 'noise_of_h', 'log_corr', 'scale')] == pytest.approx(
        [2 / 3, 1, row['cv_2'] / 2, 1, 1])


@pytest.mark.parametrize('iterations', [1, 20, 605])
def test_the_weights_in_h_are_those_of_its_recursion(iterations):
    """Computed by running the recursion from h = 0."""
    h = age = variance = 0.0
    for i in range(iterations):
        if i % 10 == 0:
            h, age, variance = 0.99 * h + 0.01, 0.99 * age + 0.01 * i, 0.99 ** 2 * variance + 0.01 ** 2
    found = curvature.weights_of(iterations, 10, 0.99)
    assert [*found.values()] == pytest.approx([h, h ** 2 / variance, iterations - age / h])
