"""lifecycle/guards.py: the detector of a runaway of h, on the curves of recorded runs."""

import json
import math
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY

import train
from lifecycle.guards import Runaway


def sophia_runs(study):
    """(config, largest norm of h, log lines as (iteration, clipped so far, ‖m‖/‖g‖)) of a study's runs of Sophia-G."""
    for line in (ROOT / 'records' / study / 'runs.jsonl').open():
        record = json.loads(line)
        config, m = record['config']['config'], record['metrics']
        if config['optimizer_name'] == 'sophiag' and config['max_iters'] > 1000:
            columns = zip(m['iter'], m['grad_clipped'], m['momentum_norm'], m['grad_norm'], m['hessian_norm'])
            lines = [(i, round(share * (i + 1)), momentum / norm, h) for i, share, momentum, norm, h in columns if norm]
            yield config, max(h for *_, h in lines), [line[:3] for line in lines]


@pytest.mark.parametrize('study, runaways, stable', [
    ('fresh_h', 17, 42), ('sharpening', 3, 0), ('gpu_30m', 4, 12), ('dissection', 5, 62)])
def test_the_recorded_runaways_are_seen_and_no_stable_run(study, runaways, stable):
    found = {'runaway': [], 'stable': []}
    for config, largest, lines in sophia_runs(study):
        detector = Runaway(SimpleNamespace(**config))
        first = next((i for i, *line in lines if detector.signs(i, *line)), math.inf)
        if not 45 < largest < 100:
            found['runaway' if largest > 100 else 'stable'].append(first / config['max_iters'])
    assert {key: len(firsts) for key, firsts in found.items()} == dict(runaway=runaways, stable=stable)
    assert max(found['runaway']) <= 0.95 and set(found['stable']) <= {math.inf}


def test_a_run_warns_once(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runaway, 'signs', lambda self, iteration, clipped, ratio: 'all' if iteration > 1 else '')
    for name in 'sophiag', 'adamw':
        train.main([*TINY, f'--dataset={corpus}', f'--out_dir={tmp_path / name}', f'--optimizer_name={name}',
                    '--gamma=0.05' if name == 'sophiag' else '--eps=1e-8', '--learning_rate=1e-2', '--eval_iters=1'])
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('warning: iteration 2: all, as where h runs away, and ‖h‖ is ') and line.endswith(
        'try a smaller --gamma (γ / learning rate is 5), or half of --learning_rate, see docs/troubleshooting.md')
