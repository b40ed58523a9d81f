"""records/dissection: which runs the protocol asks for, given the results so far; the results are its records'."""

import csv
import json
import math
import random
from collections import Counter

import pytest

from analysis.runs import find_runs
from dev import studies
from records.dissection import results, study


def make_all(loss_of):
    """Finish every due trial, one at a time, with the loss that `loss_of(trial)` gives; return them in order."""
    made = {}
    while due := studies.next_trials(study.protocol, made.get)[1]:
        made[due[0]] = studies.Result(loss_of(due[0]))
    return list(made)


def surface(trial):
    """A loss that is lowest at a learning rate of 0.004 (AdamW 0.012), γ = 0.15 and the study's other settings."""
    s = dict(trial.settings)
    lr = math.log2(s['learning_rate'] / (0.012 if trial.optimizer == 'adamw' else 0.004))
    return 1.3 + 0.01 * lr ** 2 + 0.001 * abs(math.log(s.get('gamma', 0.15) / 0.15)) + s['seed'] % 7 * 1e-6


def test_the_plan_follows_the_stated_protocol():
    made = make_all(surface)
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
    assert {dict(trial.settings)['gamma'] for trial in made if trial.part == 'G'} == {0.075}


def test_parts_that_depend_on_the_best_warm_up():
    """F: sign momentum with Sophia-G's warm-up where it has another. H: fresh seeds where 1,200 steps are better."""
    def loss_of(trial):
        s = dict(trial.settings)
        gain = {2400: 0.01 if trial.optimizer == 'sophiag' else -0.01, 1200: 0.005}.get(s['warmup_iters'], 0)
        return surface(trial) - gain

    made = make_all(loss_of)
    assert [dict(trial.settings)['warmup_iters'] for trial in made if trial.part == 'F'] == [2400] * 6
    assert Counter(trial.optimizer for trial in made if trial.part == 'H') == dict(adamw=4, sophiag=1)
    assert {dict(trial.settings)['warmup_iters'] for trial in made if trial.part == 'H'} == {1200}


@pytest.mark.parametrize('seed', range(2))
def test_any_losses_come_to_an_end(seed):
    rng = random.Random(seed)
    make_all(lambda trial: math.inf if rng.random() < 0.1 else surface(trial) + rng.gauss(0, 0.02))


def test_recorded_runs_are_kept(tmp_path):
    """`collect` keeps the runs that only runs.jsonl has; their results are read from there."""
    lines = [dict(run='A/one', config={}, metrics={'val/loss': [5.0, None, 1.5], 'train/loss': [None, 2.0, None]}),
             dict(run='A/two', failed='iteration 7: the loss is not finite', config={}, metrics={'val/loss': [5.0]})]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    studies.collect([tmp_path / 'out'], path)
    assert [*map(json.loads, path.read_text().splitlines())] == lines
    found = {name: studies.recorded(record) for name, record in studies.read_records(path).items()}
    assert found == {'A/one': studies.Result(1.5, 2.0), 'A/two': studies.Result()}


def test_the_plan_is_done_by_the_records():
    """But for part D, which was dropped."""
    records = studies.read_records(results.RECORDS / 'runs.jsonl')

    def find(trial):
        return str(trial.path) in records and studies.recorded(records[str(trial.path)]) or None

    plan, due = studies.next_trials(study.protocol, find)
    assert len(plan.done) == len(records) and {trial.part for trial in due} == {'D'}


@pytest.mark.parametrize(('drawing', 'file'), [('curves', 'curves.csv'), ('gamma', 'dissection.csv')])
def test_the_pictures_are_of_the_records(drawing, file):
    rows = results.DRAWINGS[drawing](find_runs([results.RECORDS]))[1]
    written = list(csv.DictReader((results.RECORDS / file).open(encoding='utf-8')))
    assert written == [{key: '' if value is None else str(value) for key, value in row.items()} for row in rows]
