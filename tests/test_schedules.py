"""Learning rate schedules, and branches of a run with a stable learning rate."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, metrics, rejection
from test_rows import same

import train
from runtime import checkpoint


def schedule(name, **settings):
    """The learning rates of 101 iterations: peak 1, warm-up 10, final 0.1."""
    c = SimpleNamespace(**{**dict(schedule=name, decay_lr=True, learning_rate=1.0, min_lr=0.1, warmup_iters=10,
                                  lr_decay_iters=100, cooldown_iters=20 * (name == 'wsd')), **settings})
    return [train.learning_rate_at(c, i) for i in range(101)]


def test_shapes():
    found = {name: schedule(name) for name in ('cosine', 'linear', 'wsd', 'constant')}
    for lrs in found.values():
        assert lrs[:10] == [(i + 1) / 11 for i in range(10)] and lrs[10] == 1
    assert found['cosine'][10:] == [0.1 + 0.5 * (1 + math.cos(math.pi * (i / 90))) * (1.0 - 0.1) for i in range(91)]
    assert found['linear'][55] == pytest.approx(0.55) and found['linear'][100] == pytest.approx(0.1)
    assert set(found['wsd'][10:81]) == {1.0} and found['wsd'][81] < 1
    assert found['wsd'][90] == pytest.approx(0.55) and found['wsd'][100] == pytest.approx(0.1)
    assert set(found['constant'][10:]) == {1.0}
    # Any schedule decays in the last cooldown_iters.
    cooled = schedule('cosine', cooldown_iters=20)
    assert set(cooled[10:81]) == {1.0} and cooled[90] == pytest.approx(0.55)
    assert cooled[85] - 0.1 == pytest.approx(0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    # Longer than planned: the final learning rate.
    assert schedule('linear', lr_decay_iters=50)[70] == schedule('wsd', lr_decay_iters=50)[70] == pytest.approx(0.1)
    assert schedule('wsd', decay_lr=False) == [1.0] * 101


def test_settings_of_schedules():
    resolve = lambda *flags: train.resolve([*TINY, *flags])  # noqa: E731
    assert resolve('--schedule=wsd', '--max_iters=50').cooldown_iters == 10
    assert resolve().cooldown_iters == 0
    for flags, message in [(['--schedule=cosin'], '--schedule=cosin: must be one of cosine, linear, wsd, constant'),
                           (['--schedule=wsd', '--cooldown_iters=99'], '--cooldown_iters=99: must be at most'),
                           (['--schedule=constant', '--cooldown_iters=9'], 'must be 0 for --schedule=constant'),
                           (['--branch_cooldown=3'], "must be a checkpoint, DIRECTORY/ckpt_ITERATION"),
                           (['--branch_cooldown=3', '--init_from=ckpt_00000001.pt'], 'no such checkpoint')]:
        assert message in rejection(resolve, *flags)


def run(out, *flags):
    for lock in checkpoint.LOCKS:  # of runs of this process
        lock.close()
    train.main([f'--out_dir={out}', '--device=cpu', '--compile=False', '--keep_checkpoints=9', *map(str, flags)])
    state = torch.load(checkpoint.newest(out), weights_only=True)
    return state['model'], state['optimizer']['state']


WSD = ['--schedule=wsd', '--max_iters=12', '--cooldown_iters=4', '--eval_interval=4', '--eval_iters=2',
       '--optimizer_name=sophiag', '--hessian_interval=3', '--learning_rate=1e-3']


def test_a_branch_is_the_shorter_run(corpus, tmp_path, monkeypatch):
    """Bit for bit; also when it was stopped and the same command resumes it. It says where it comes from."""
    flags = [*TINY, f'--dataset={corpus}', *WSD]
    run(tmp_path / 'long', *flags)
    short = run(tmp_path / 'short', *flags, '--max_iters=8')
    start = tmp_path / 'long/ckpt_00000004.pt'
    branch = [f'--init_from={start}', '--branch_cooldown=4']
    polls = iter([[0, 0], [1, 0]])
    with monkeypatch.context() as patch:
        patch.setattr(train.StopSignals, 'poll', lambda self: next(polls))
        with pytest.raises(SystemExit):
            run(tmp_path / 'branch', *branch)
    assert same(run(tmp_path / 'branch', *branch), short)
    assert metrics(tmp_path / 'branch') == metrics(tmp_path / 'short')[4:]
    assert metrics(tmp_path / 'branch', 'lr') == metrics(tmp_path / 'short', 'lr')[4:]
    assert metrics(tmp_path / 'branch', 'val/loss') == metrics(tmp_path / 'short', 'val/loss')[1:]

    about = json.loads((tmp_path / 'branch/config.json').read_text())
    assert about['branched_from'] == dict(checkpoint=str(start), iter=4) and about['changes'] == []
    assert about['config']['max_iters'] == 8 and about['config']['optimizer_name'] == 'sophiag'
    first = json.loads((tmp_path / 'branch/metrics.jsonl').read_text().splitlines()[0])
    assert (first['iter'], first['branched_from']) == (4, str(start))
    assert json.loads((tmp_path / 'short/config.json').read_text())['branched_from'] is None

    # Not into a directory of another run, nor with a schedule of its own, nor from the cooldown or the warm-up.
    for out, more, message in [
            ('long', branch, 'holds another run than this branch'),
            ('branch', [branch[0], '--branch_cooldown=5'], 'holds another run than this branch'),
            ('new', [*branch, '--max_iters=20'], '--max_iters=20: --branch_cooldown=4 makes it 8'),
            ('new', [f'--init_from={tmp_path}/long/ckpt_00000012.pt', branch[1]], 'its learning rate is not the peak')]:
        assert message in rejection(run, tmp_path / out, *more)
    assert not (tmp_path / 'new').exists()


def test_branches_are_of_runs_with_a_stable_learning_rate(corpus, tmp_path):
    run(tmp_path / 'cosine', *TINY, f'--dataset={corpus}', '--max_iters=4', '--eval_interval=2')
    message = rejection(run, tmp_path / 'new', f'--init_from={tmp_path}/cosine/ckpt_00000002.pt', '--branch_cooldown=2')
    assert 'its run had --schedule=cosine; branches are of a run with --schedule=wsd' in message
