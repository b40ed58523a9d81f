"""lifecycle/guards.py: the warning of a runaway, replayed on the recorded runs; of later tokens."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_gpt

from analysis.runs import read_packed
from lifecycle import guards


def replay(run):
    """Return the first iteration of a `RunRecord` at which the warning is printed; None if there is none."""
    printed = []
    state = SimpleNamespace(iter=0, lowest_hessian_norm=math.inf)
    acting = SimpleNamespace(config=SimpleNamespace(**run.config), state=state, log=SimpleNamespace(
        print=lambda _: printed.append(state.iter)))
    for line in run.lines:
        state.iter = line['iter']
        guards.warn_of_runaway(acting, line)
    return min(printed, default=None)


def smoothed(run, last):
    """Return the training losses up to the iteration `last`, each the mean of five logged ones."""
    losses = [loss for step, loss in zip(*run.series('train/loss')) if step <= last]
    return [sum(losses[i:i + 5]) / 5 for i in range(len(losses) - 4)]


@pytest.mark.parametrize(('study', 'runaways', 'others'), [
    ('gpu_30m', 4, 0), ('sharpening', 4, 0), ('fresh_h', 17, 0), ('dissection', 5, 1), ('small_batch', 0, 0)])
def test_the_warning_comes_in_recorded_runaways_before_the_loss_has_risen(study, runaways, others):
    """A runaway passes ‖h‖ = 100. Part B of fresh_h is left out: its one mini-batch is learned by heart."""
    runs = [run for run in read_packed(ROOT / 'records' / study / 'runs.jsonl')
            if (study, run.out_dir.parent.name) != ('fresh_h', 'B') and len(run.series('hessian_norm')[1]) >= 30]
    warned = {id(run): step for run in runs if (step := replay(run)) is not None}
    away = [run for run in runs if max(run.series('hessian_norm')[1]) > 100]
    assert len(away) >= runaways and {id(run) for run in away} <= warned.keys()
    assert len(warned) == len(away) + others
    for run in away:
        losses = smoothed(run, warned[id(run)])
        assert losses[-1] < min(losses) + 0.051


def test_an_h_that_becomes_0_is_said_once():
    """Such as of an optimizer whose state is reset."""
    said, state = [], SimpleNamespace(iter=50, lowest_hessian_norm=math.inf)
    run = SimpleNamespace(config=SimpleNamespace(max_iters=100, hessian_interval=10, beta2=0.99), state=state,
                          log=SimpleNamespace(print=said.append))
    for norm in (0.0, 1.0, 0.0, 0.0, 1.0):
        guards.warn_of_runaway(run, dict(update_unclipped=0.1, hessian_norm=norm))
    assert len(said) == 1 and 'h has become 0' in said[0]


@pytest.mark.parametrize('seen, padding, leaks', [
    (lambda i, j: j < 8, None, True), (lambda i, j: (i > 9) & (j < 20), None, True),
    (lambda i, j: j >= 0, -math.inf, True), (lambda i, j: j >= 0, -1e9, True), (lambda i, j: j < 0, -math.inf, False),
    (lambda i, j: j >= 0, 'zeros', True), (lambda i, j: j < 0, 'zeros', False)])
def test_later_tokens_that_few_positions_see_or_beside_padding_are_noticed(monkeypatch, capsys, seen, padding, leaks):
    """A prefix is seen whole, or a part of the first half; the logits of ids that are padding are left out. Behind
    projections of zeros, too, which stay so."""
    i = torch.arange(64)
    mask = (i <= i[:, None]) | seen(i[:, None], i)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', lambda *qkv, is_causal, **options: sdpa(
        *qkv, attn_mask=mask, **options))
    model = random_gpt(0.1, block_size=64, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
    zeros = [block.attn.c_proj.weight for block in model.transformer.h] if padding == 'zeros' else []
    for p in zeros:
        p.data.zero_()
    if padding and not zeros:
        model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, i[-9:], padding))
    run = SimpleNamespace(raw_model=model, autocast=contextlib.nullcontext(), config=SimpleNamespace(
        compile=False, dtype='float32'), world=SimpleNamespace(is_master=True, sharded=False, reshard=print))
    guards.warn_of_leaks(run, torch.randint(0, 55, (1, 64), generator=torch.Generator().manual_seed(0)))
    assert ('change the logits of earlier positions' in capsys.readouterr().err) == leaks
    assert not any(p.any() for p in zeros)
