"""dev/study.py: which runs the protocol asks for, given the results so far."""

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from scipy import stats

import train
from analysis.runs import find_runs
from dev import dissection, study


def make_all(monkeypatch, loss_of):
    """Finishes every due trial, one at a time, with the loss that `loss_of(trial)` gives; returns them in order."""
    losses, made = {}, []
    monkeypatch.setattr(study, 'final_loss', lambda path: losses.get(path))
    while due := study.plan(Path('out')).due:
        made.append(due[0])
        losses[Path('out') / due[0].path] = loss_of(due[0])
    return made


def surface(trial):
    """A loss that is lowest at a learning rate of 0.004 (AdamW 0.012), γ = 0.15 and the study's other settings."""
    s = dict(trial.settings)
    lr = math.log2(s['learning_rate'] / (0.012 if trial.optimizer == 'adamw' else 0.004))
    return 1.3 + 0.01 * lr ** 2 + 0.001 * abs(math.log(s.get('gamma', 0.15) / 0.15)) + s['seed'] % 7 * 1e-6


def test_the_plan_follows_the_stated_protocol(monkeypatch):
    made = make_all(monkeypatch, surface)
    assert len(set(made)) == len(made)
    tests = [dict(trial.settings) for trial in made if trial.part == 'A' and dict(trial.settings)['seed'] > 1340]
    assert [(s['gamma'], s['learning_rate']) for s in tests] == [(0.15, 0.004)] * 3
    gammas = {dict(trial.settings)['gamma'] for trial in made if trial.optimizer == 'ef_clip'}
    assert gammas == {0.075, 0.3}
    fresh = [trial for trial in made if trial.part == 'C' and dict(trial.settings)['seed'] != study.SEARCH_SEED]
    assert Counter(trial.optimizer for trial in fresh) == dict(adamw=6, sophiag=6, clip=6)
    # In turns: no side has two runs more than another at any time.
    for n in range(len(fresh)):
        counts = Counter(trial.optimizer for trial in fresh[:n])
        assert max(counts.values(), default=0) - min(counts[name] for name in ('adamw', 'sophiag', 'clip')) <= 1
    long = {dict(trial.settings)['gamma'] for trial in made if trial.part == 'C' and trial.optimizer == 'sophiag'}
    assert long == {0.15, 0.05}
    assert {dict(trial.settings).get('total_batch_size') for trial in made if trial.part in 'BD'} == {128, 512}


@pytest.mark.parametrize('seed', range(2))
def test_any_losses_come_to_an_end(monkeypatch, seed):
    rng = random.Random(seed)
    make_all(monkeypatch, lambda trial: math.inf if rng.random() < 0.1 else surface(trial) + rng.gauss(0, 0.02))


def test_recorded_runs_are_not_due(monkeypatch, tmp_path):
    """A run that only runs.jsonl has counts as finished, and `collect` keeps it."""
    first, second, third = study.plan(tmp_path).due[:3]
    lines = [dict(run=str(first.path), config={}, metrics={'val/loss': [5.0, None, 1.5]}),
             dict(run=str(second.path), failed='iteration 7: the loss is not finite', config={},
                  metrics={'val/loss': [5.0]})]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    found = {name: study.recorded_loss(record) for name, record in study.read_records(path).items()}
    assert found == {str(first.path): 1.5, str(second.path): math.inf}
    due = study.plan(tmp_path, found).due
    assert first not in due and second not in due and third in due
    study.collect(tmp_path / 'out', path)
    assert [*map(json.loads, path.read_text().splitlines())] == sorted(lines, key=lambda line: line['run'])


def recorded(trial, loss, extra=None):
    """A line of runs.jsonl for a trial that ended with this loss."""
    config = train.resolve(trial.command).values
    tokens = config['max_iters'] * config['total_batch_size'] * config['block_size']
    return dict(run=str(trial.path), config=dict(config=config, parameters=1), metrics={
        'iter': [0, config['max_iters']], 'tokens': [0, tokens], 'val/loss': [5.0, loss],
        'update_unclipped': [None, extra]})


def test_results_are_the_planned_tests(monkeypatch, tmp_path, capsys):
    """On made-up losses: sign momentum is worse than Sophia-G by 0.02, the mean of h equal, all with σ = 0.003."""
    rng = random.Random(0)
    noise = {}

    def loss_of(trial):
        s = dict(trial.settings)
        loss = surface(trial) + dict(clip=0.02, ef_clip=0.01, adamw=0.005).get(trial.optimizer, 0)
        loss += 0.1 * (s['max_iters'] == 2400)
        loss += 0.002 * (s['beta1'] == 0.9) + 0.002 * ('weight_decay' in s)
        loss += (-0.001 if trial.optimizer == 'sophiag' else 0.002) * (s['warmup_iters'] == 2400)
        noise[trial.path] = loss + (rng.gauss(0, 0.003) if dict(trial.settings)['seed'] != study.SEARCH_SEED else 0)
        return noise[trial.path]

    made = make_all(monkeypatch, loss_of)
    folder = tmp_path / 'dissection'
    folder.mkdir()
    monkeypatch.setattr(dissection, 'RECORDS', folder / 'runs.jsonl')
    lines = [json.dumps(recorded(trial, noise[trial.path], 0.3)) for trial in made if trial.part in 'ACFG']
    (folder / 'runs.jsonl').write_text('\n'.join(lines) + '\n')
    rows = dissection.tests(find_runs([folder]))
    assert [row['comparison'] for row in rows] == [
        'A: Sign momentum minus Sophia-G', 'A: GNB, mean of h minus Sophia-G', 'A: E-F+clip minus Sophia-G',
        'A: Sophia-H minus Sophia-G', 'C, primary: Sophia-G minus AdamW', 'C, secondary: Sophia-G minus Sign momentum',
        'F, added: Sophia-G minus Sign momentum, same warm-up', 'G, added: Sophia-G minus GNB, mean of h']
    added = [dict(trial.settings) for trial in made if trial.part == 'F']
    assert [s['warmup_iters'] for s in added] == [2400] * 6 and {s['learning_rate'] for s in added} == {0.004}
    assert {dict(trial.settings)['gamma'] for trial in made if trial.part == 'G'} == {0.075}
    seeds = {name: [noise[trial.path] for trial in made if trial.part == 'C' and trial.optimizer == name
                    and dict(trial.settings)['seed'] != study.SEARCH_SEED] for name in ('sophiag', 'adamw')}
    expected = stats.ttest_ind(seeds['sophiag'], seeds['adamw'], equal_var=False)
    assert rows[4]['p'] == pytest.approx(expected.pvalue)
    assert rows[0]['difference'] > 0.01 and rows[0]['p, Holm'] >= rows[0]['p']
    long = {row['optimizer']: row for row in dissection.long_horizon(find_runs([folder]))}
    assert [*long] == ['Sophia-G', 'AdamW', 'Sign momentum']  # the lowest loss first
    mean = statistics.mean
    assert long['Sophia-G']['val/loss'] == pytest.approx(mean(seeds['sophiag']))
    assert long['Sophia-G']['difference'] == pytest.approx(mean(seeds['sophiag']) - mean(seeds['adamw']))
    short = mean(dissection.losses(dissection.arms_of(find_runs([folder]), 'A')['sophiag', 0.15], dissection.TESTED))
    way = (short - mean(seeds['adamw'])) / (short - mean(seeds['sophiag']))
    assert long['Sophia-G']['to AdamW'] == pytest.approx(2400 * 4 ** way)
    assert long['AdamW']['to AdamW'] == pytest.approx(9600) and long['Sign momentum']['to AdamW'] is None
    dissection.main(['--output', str(tmp_path / 'x.png')])
    said = capsys.readouterr().out
    assert 'C, primary' in said and (tmp_path / 'x.png').stat().st_size > 10_000

    # A fresh seed that diverges: its side has no mean, no test, and is last.
    diverged = [line if 'C/sophiag' not in line or 'seed=1343' not in line else
                json.dumps(json.loads(line) | {'failed': 'iteration 7: the loss is not finite'}) for line in lines]
    (folder / 'runs.jsonl').write_text('\n'.join(diverged) + '\n')
    found = find_runs([folder])
    last = dissection.long_horizon(found)[-1]
    assert last['optimizer'] == 'Sophia-G' and last['val/loss'] == math.inf and last['sd'] is last['p'] is None
    assert [row['p'] for row in dissection.tests(found)[4:]] == [None] * 4
    dissection.main([])
    assert 'inf' in capsys.readouterr().out

    # With a run of each side missing nothing is tested.
    kept = [line for line in lines if '1343' not in line]
    (folder / 'runs.jsonl').write_text('\n'.join(kept) + '\n')
    assert dissection.tests(find_runs([folder])) == [] and dissection.long_horizon(find_runs([folder])) == []
