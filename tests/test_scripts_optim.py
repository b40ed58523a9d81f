"""scripts/paper/tune_gamma.py, and the configs of the ablations."""

import json
import re
import sys

import pytest
from conftest import ROOT, TINY
from fake_runs import SHAPE, fake_run

import train
from optimizers import peak_learning_rate
from scripts.paper import tune_gamma


def test_tune_gamma(corpus, tmp_path, capsys):
    """From a γ that is too small; the second time the runs are there already."""
    args = ['--out_dir', f'{tmp_path}/runs', '--iters', '20', '--', *TINY, f'--dataset={corpus}',
            '--optimizer_name=sophiag', '--hessian_interval=2', '--gamma=0.02']
    tune_gamma.main(args)
    printed = capsys.readouterr()
    chosen = {}
    exec(printed.out, {}, chosen)  # lines for a config file
    assert chosen['optimizer_name'] == 'sophiag'
    assert chosen['learning_rate'] == pytest.approx(0.8 * peak_learning_rate('adamw', 'tiny')[0])
    fractions = {float(gamma): float(percent) for gamma, percent in
                 re.findall(r'^gamma = (\S+): ([\d.]+)% not clipped', printed.err, flags=re.M)}
    gammas = list(fractions)
    assert len(gammas) > 1 and gammas == [0.02 * 2 ** i for i in range(len(gammas))] and gammas[-1] == chosen['gamma']
    assert 10 <= fractions[chosen['gamma']] <= 50 and all(fractions[gamma] < 10 for gamma in gammas[:-1])
    assert 'h then ends at 95 % of its level' in printed.err
    assert not list((tmp_path / 'runs').rglob('*.pt'))
    settings = json.loads((tmp_path / 'runs' / 'gamma=0.02' / 'config.json').read_text())['config']
    assert settings['max_iters'] == 20 and settings['beta2'] ** 10 == pytest.approx(0.05, rel=1e-2)
    lines = (tmp_path / 'runs' / 'gamma=0.02' / 'log.txt').read_text()
    tune_gamma.main(args)
    assert capsys.readouterr().out == printed.out
    assert (tmp_path / 'runs' / 'gamma=0.02' / 'log.txt').read_text() == lines


def test_tune_gamma_keeps_what_is_given_and_looks_at_the_last_quarter(tmp_path):
    given = ['--optimizer_name=sophiag', '--learning_rate=0.5', '--beta2=0.9', '--warmup_iters=500']
    added = tune_gamma.runs_arguments(given, 1000, 0.5)
    assert added[:4] == given and {'--warmup_iters=100', '--learning_rate=0.5'} <= {*added[4:]}
    assert not [flag for flag in added[4:] if flag.startswith('--beta2')]
    assert '--learning_rate=0.1' in tune_gamma.runs_arguments(given[:1], 1000, 0.1)

    base = [*SHAPE, '--optimizer_name=sophiag', '--max_iters=100']  # a run that is there already
    fake_run(tmp_path / 'gamma=0.03', 3.0, [*base, '--gamma=0.03'], update_unclipped=lambda i: i / 100)
    assert tune_gamma.unclipped(0.03, base, tmp_path, [sys.executable]) == pytest.approx((0.9 + 1.0) / 2)


def test_tune_gamma_doubles_halves_and_gives_up(monkeypatch, tmp_path, capsys):
    """With a made-up dependence of the fraction on γ instead of runs."""
    def chosen(fraction):
        monkeypatch.setattr(tune_gamma, 'unclipped', lambda gamma, *_: fraction(gamma))
        tune_gamma.main(['--out_dir', str(tmp_path), '--', '--optimizer_name=sophiah'])
        return capsys.readouterr().out

    assert 'gamma = 0.0025  # 38% not clipped' in chosen(lambda gamma: 150 * gamma)
    assert 'gamma = 0.16  # 16% not clipped' in chosen(lambda gamma: gamma)
    assert "learning_rate = 0.00096  # 0.8 × AdamW's 0.0012" in chosen(lambda gamma: 0.3)
    with pytest.raises(SystemExit, match='no γ among 0.01, 0.02 leaves'):
        chosen(lambda gamma: 0.05 if gamma < 0.015 else 0.6)
    with pytest.raises(SystemExit, match='lion does not clip by γ'):
        tune_gamma.main(['--out_dir', str(tmp_path), '--', '--optimizer_name=lion'])


@pytest.mark.parametrize('name, expected', [
    ('ef_clip', dict(optimizer_name='ef_clip', hessian_interval=10, hessian_batch_size=240)),
    ('ah_clip', dict(optimizer_name='ah_clip', hessian_interval=10, hessian_batch_size=32)),
    ('adahessian', dict(optimizer_name='adahessian', hessian_interval=1, beta1=0.92, beta2=0.99)),
    ('clip', dict(optimizer_name='clip', hessian_interval=0)),
    ('normalize', dict(optimizer_name='normalize', hessian_interval=0)),
    ('gnb_noclip', dict(optimizer_name='gnb_noclip', hessian_interval=2, hessian_batch_size=240)),
    ('hessian_interval_1', dict(optimizer_name='sophiag', hessian_interval=1, beta2=0.99)),
    ('hessian_interval_10', dict(optimizer_name='sophiag', hessian_interval=10, beta2=0.99)),
    ('hessian_interval_100', dict(optimizer_name='sophiag', hessian_interval=100, beta2=0.99)),
])
def test_ablation_configs(name, expected):
    values = train.resolve([str(ROOT / f'config/ablation/{name}.py')]).values
    expected = dict(expected, model_size='30M', n_layer=6, total_batch_size=480, max_iters=100000)
    assert {key: values[key] for key in expected} == expected
