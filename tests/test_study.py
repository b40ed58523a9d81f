"""Protocols of studies: which runs they ask for, given the results so far. The dissection's records are its results."""

import csv
import json
import math
import random
import re
from collections import Counter

import pytest
from conftest import ROOT

from analysis.runs import find_runs
from records import studies
from records.dissection import results, study
from records.dissection.results import mean_sd
from records.fresh_h import results as fresh_h_results
from records.fresh_h import study as fresh_h
from records.gpu_30m import results as gpu_30m_results
from records.gpu_30m import study as gpu_30m
from records.small_batch import results as small_batch_results
from records.small_batch import study as small_batch


def make_all(loss_of, protocol=study.protocol, share_of=lambda run: None):
    """Finish every due run, one at a time, with the losses that `loss_of(run)` gives; return them in order."""
    made = {}
    while due := studies.next_runs(protocol, made.get)[1]:
        made[due[0]] = studies.Result(loss_of(due[0]), loss_of(due[0]), share_of(due[0]))
    return list(made)


def share_of(run):
    """A share of unclipped coordinates that grows with γ; None without γ."""
    gamma = dict(run.settings).get('gamma')
    return gamma and min(1, 0.9 * gamma ** 0.6)


def surface(run):
    """A loss that is lowest at a learning rate of 0.004 (AdamW 0.012), γ = 0.15 and the study's other settings."""
    s = dict(run.settings)
    lr = math.log2(s['learning_rate'] / (0.012 if run.optimizer == 'adamw' else 0.004))
    return 1.3 + 0.01 * lr ** 2 + 0.001 * abs(math.log(s.get('gamma', 0.15) / 0.15)) + s['seed'] % 7 * 1e-6


def test_the_plan_follows_the_stated_protocol():
    made = make_all(surface)
    assert len(set(made)) == len(made)
    tests = [dict(run.settings) for run in made if run.part == 'A' and dict(run.settings)['seed'] > 1340]
    assert [(s['gamma'], s['learning_rate']) for s in tests] == [(0.15, 0.004)] * 3
    gammas = {dict(run.settings)['gamma'] for run in made if run.optimizer == 'ef_clip'}
    assert gammas == {0.075, 0.3}
    fresh = [run for run in made if run.part == 'C' and dict(run.settings)['seed'] != study.SEARCH_SEED]
    assert Counter(run.optimizer for run in fresh) == dict(adamw=6, sophiag=6, clip=6)
    # In turns: no side has two runs more than another at any time.
    for n in range(len(fresh)):
        counts = Counter(run.optimizer for run in fresh[:n])
        assert max(counts.values(), default=0) - min(counts[name] for name in ('adamw', 'sophiag', 'clip')) <= 1
    long = {dict(run.settings)['gamma'] for run in made if run.part == 'C' and run.optimizer == 'sophiag'}
    assert long == {0.15, 0.05}
    assert {dict(run.settings).get('total_batch_size') for run in made if run.part in 'BD'} == {128, 512}
    assert {dict(run.settings)['gamma'] for run in made if run.part == 'G'} == {0.075}


def test_parts_that_depend_on_the_best_warm_up():
    """F: sign momentum with Sophia-G's warm-up where it has another. H: fresh seeds where 1,200 steps are better."""
    def loss_of(run):
        s = dict(run.settings)
        gain = {2400: 0.01 if run.optimizer == 'sophiag' else -0.01, 1200: 0.005}.get(s['warmup_iters'], 0)
        return surface(run) - gain

    made = make_all(loss_of)
    assert [dict(run.settings)['warmup_iters'] for run in made if run.part == 'F'] == [2400] * 6
    assert Counter(run.optimizer for run in made if run.part == 'H') == dict(adamw=4, sophiag=1)
    assert {dict(run.settings)['warmup_iters'] for run in made if run.part == 'H'} == {1200}


@pytest.mark.parametrize('protocol', [study.protocol, fresh_h.protocol, gpu_30m.protocol, small_batch.protocol])
@pytest.mark.parametrize('seed', range(2))
def test_any_losses_come_to_an_end(protocol, seed):
    rng = random.Random(seed)
    make_all(lambda run: math.inf if rng.random() < 0.1 else surface(run) + rng.gauss(0, 0.02), protocol,
             lambda run: rng.choice([None, 0.0, rng.random()]))


def arm_of(run):
    """The arm of a run of the study of a fresh h: the optimizer, and what is special to it."""
    s = dict(run.settings)
    return run.optimizer, s.get('beta2'), s.get('hessian_parts')


def test_fresh_h_takes_the_arms_in_turns_and_the_planned_tests_first():
    made = make_all(surface, fresh_h.protocol, share_of)
    a = [run for run in made if run.part == 'A']
    fresh = [run for run in a if dict(run.settings)['seed'] != fresh_h.SEARCH_SEED]
    assert set(Counter(map(arm_of, fresh)).values()) == {4} and len(set(map(arm_of, a))) == len(fresh_h.ARMS)
    planned = {('clip', None, None), ('sophiag', 0.9, 16), ('gnb_permuted', 0.9, 16), ('sophiag', None, None)}
    # The arms of the first tier search in turns, and are finished before another arm begins.
    assert [{arm_of(run) for run in made[i:i + 4]} for i in (0, 4, 8)] == [planned] * 3
    assert {arm_of(run) for run in fresh[:16]} == planned
    assert all(arm_of(run) in planned for run in made[:made.index(fresh[15])])
    for arm in planned - {('clip', None, None)}:  # three γ, each with three learning rates or more
        rates = Counter(dict(run.settings)['gamma'] for run in a if arm_of(run) == arm and run not in fresh)
        assert sum(count >= 3 for count in rates.values()) == 3


@pytest.mark.parametrize('best', [0.15, 1.5])
def test_fresh_h_looks_for_gamma_and_rate_on_the_fixed_mini_batch(best):
    def loss_of(run):
        gamma = dict(run.settings).get('gamma', best)
        return surface(run) + (0.1 * abs(math.log(gamma / best)) if run.part == 'B' else 0)

    made = [run for run in make_all(loss_of, fresh_h.protocol, share_of) if run.part == 'B']
    search = [run for run in made if dict(run.settings)['seed'] in (fresh_h.SEARCH_SEED, fresh_h.SECOND_SEED)]
    seeds = Counter(arm_of(run) for run in made if run not in search)
    assert set(seeds.values()) == {3} and len(seeds) == 6
    twice = Counter(arm_of(run) for run in search if dict(run.settings)['seed'] == fresh_h.SECOND_SEED)
    assert twice == dict.fromkeys(seeds, 2)
    for run in made:
        if run not in search and 'gamma' in dict(run.settings):
            tried = {dict(other.settings)['gamma'] for other in search if arm_of(other) == arm_of(run)}
            found = dict(run.settings)['gamma']
            assert abs(math.log(found / best)) < 0.6 and min(tried) < found < max(tried)


def test_fresh_h_is_tested_as_planned():
    loss = {('sophiag', 0.9, 16): 1.29, ('gnb_permuted', 0.9, 16): 1.31}
    results = {str(run.path): studies.Result(*2 * [surface(run) + loss.get(arm_of(run), 1.3)], share_of(run))
               for run in make_all(surface, fresh_h.protocol, share_of)}
    rows = fresh_h_results.planned_tests(results)
    assert [row['comparison'] for row in rows] == [
        *(f'A: fresh minus {arm}' for arm in ('sign momentum', 'permuted', 'paper')),
        'C: Sophia-H minus sign momentum']
    assert [round(row['difference'], 2) for row in rows[:3]] == [-0.01, -0.02, -0.01]
    assert all(row['p'] <= row['p, Holm'] <= 3 * row['p'] for row in rows[:3])
    del results[next(name for name in results if name.startswith('A/clip') and 'seed=1341' in name)]
    assert len(fresh_h_results.planned_tests(results)) == 3
    fixed = fresh_h_results.fixed_batch(results)
    assert [(row['arm'], row['mean'], row['minus sign momentum, 95 %']) for row in fixed] == [
        ('sign momentum', '2.600', ''), ('fresh', '2.590', '−0.010 ± 0.000'), ('permuted', '2.610', '+0.010 ± 0.000'),
        ('paper', '2.600', '+0.000 ± 0.000'), ('mean', '2.600', '+0.000 ± 0.000'),
        ('AdamW', '2.600', '+0.000 ± 0.000')]
    table = fresh_h_results.search_table(fresh_h_results.arms_of(results, 'A'))
    assert Counter(row['arm'] for row in table if row['fresh seeds']) == dict.fromkeys(fresh_h.ARMS, 1)
    assert all(row['unclipped'] for row in table if row['arm'] not in ('sign momentum', 'AdamW'))
    *parts, planned = fresh_h_results.tables(results)
    assert len(parts) == 4 and '| A: fresh minus permuted | 4, 4 | −0.020' in planned


def jumping(gamma):
    """A share that is no power of γ."""
    return 0.3 * (gamma / 0.2) ** 0.6 if gamma < 0.2 else min(0.9, 0.3 * (gamma / 0.2) ** 1.5)


@pytest.mark.parametrize(('share', 'found'), [
    (jumping, [0.05, 0.2, 0.33]), (lambda gamma: 0.4 * gamma ** 0.6, [0.099, 0.46, 1.5])])
def test_fresh_h_corrects_gamma_by_the_shares_so_far(share, found):
    search = fresh_h.Search(None, (), 'A', 'sophiag', {})
    search.result = lambda gamma, learning_rate: studies.Result(1.4, 1.4, share(gamma))
    targets = fresh_h.ARMS['fresh'][2]
    assert [search.share(target, gamma, 0) for target, gamma in targets.items()] == found
    assert all(target / 1.4 <= share(gamma) <= target * 1.4 for target, gamma in zip(targets, found))


def small_batch_surface(run):
    """A loss that is lowest at γ = 1.3, β2 = 0.98 and a learning rate of 0.001."""
    s = dict(run.settings)
    return (5 + 0.01 * math.log2(s['learning_rate'] / 0.001) ** 2 + 0.003 * abs(math.log(s.get('gamma', 1.3) / 1.3))
            + abs(s.get('beta2', 0.98) - 0.98 if run.optimizer == 'adamw' else 0) + s['seed'] * 1e-6)


def test_small_batch_tunes_gamma_then_the_rate_then_takes_fresh_seeds():
    made = make_all(small_batch_surface, small_batch.protocol)
    runs = {arm: [] for arm in small_batch.ARMS}
    for run in made:
        arm, settings = small_batch_results.arm_and_settings(str(run.path))
        runs[arm].append(settings)
    for arm, (_, _, middle, tuned) in small_batch.ARMS.items():
        search = [s for s in runs[arm] if s['seed'] == fresh_h.SEARCH_SEED]
        fresh = [s for s in runs[arm] if s not in search]
        assert [s['seed'] for s in fresh] == [1338, 1339, 1340, 1341]
        assert {s['learning_rate'] for s in fresh} == {0.001}
        if tuned:
            key, first = tuned[0], small_batch.rate_at(middle)
            best = {s[key] for s in fresh}
            assert len({s[key] for s in search if s['learning_rate'] == first}) >= 3 and len(best) == 1
            assert {s[key] for s in search if s['learning_rate'] != first} == best
            assert best <= ({0.98} if key == 'beta2' else {1.3, 1.6})
    seeds = [dict(run.settings)['seed'] for run in made]
    adamw = [run.optimizer == 'adamw' for run in made]
    assert adamw == sorted(adamw)  # last
    seeds = seeds[:adamw.index(True)]
    assert seeds == sorted(seeds, key=lambda seed: seed != fresh_h.SEARCH_SEED)  # the others search first


def test_small_batch_is_tested_as_planned():
    loss = dict.fromkeys(small_batch.ARMS, 0.0) | {'fresh': -0.1, 'permuted': 0.1}
    results = {}
    for run in make_all(small_batch_surface, small_batch.protocol):
        arm, _ = small_batch_results.arm_and_settings(str(run.path))
        results[str(run.path)] = studies.Result(small_batch_surface(run) + loss[arm], 0, 0.1)
    rows = small_batch_results.planned_tests(results)
    assert [(row['comparison'], round(row['difference'], 2)) for row in rows] == [
        ('fresh minus sign momentum', -0.1), ('mean minus sign momentum', 0.0), ('paper minus sign momentum', 0.0),
        ('fresh minus permuted', -0.2)]
    assert all(row['p'] <= row['p, Holm'] <= 4 * row['p'] for row in rows)
    del results[next(name for name in results if name.startswith('A/clip') and 'seed=1341' in name)]
    assert not small_batch_results.planned_tests(results)


def assert_written(rows, path):
    """The CSV file beside a picture has the numbers that its drawing returns."""
    written = list(csv.DictReader(path.open(encoding='utf-8')))
    assert written == [{key: '' if value is None else str(value) for key, value in row.items()} for row in rows]


def test_the_page_of_fresh_h_is_of_its_records():
    found = fresh_h_results.read_results()
    page = (fresh_h.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in fresh_h_results.tables(found))
    due = studies.next_runs(fresh_h.protocol, lambda run: found.get(str(run.path)))[1]
    assert f'{len(found)} of {len(found) + len(due)} runs' in page
    rows = fresh_h_results.draw_shares(found)[1]
    assert_written(rows, fresh_h.HERE / 'shares.csv')


@pytest.mark.parametrize(('best', 'factors'), [(0.5, [1, 2, 0.5]), (1, [1, 2, 0.5]), (2, [1, 2, 4]), (4, [1, 2, 4])])
def test_gpu_30m_tries_half_or_four_times_the_middle_rate(best, factors):
    def loss_of(run):
        s = dict(run.settings)
        middle = 1.2e-3 if run.optimizer == 'adamw' else 4e-4
        return 4 + abs(math.log(s['learning_rate'] / middle / best))

    made = make_all(loss_of, gpu_30m.protocol, share_of)
    rates = {name: [dict(run.settings)['learning_rate'] for run in made if run.part == part
                    and run.optimizer == name and dict(run.settings)['max_iters'] == 3000]
             for name, part in (('adamw', 'a'), ('clip', 'a'), ('sophiag', 'b'))}
    assert rates['adamw'] == [1.2e-3 * factor for factor in factors]
    assert rates['clip'] == [4e-4 * factor for factor in factors]
    assert rates['sophiag'] == [4e-4 * best] * 2
    parts = ''.join(run.part for run in made)
    assert parts == 'a' * 10 + 'b' * 6 + 'c' * 2 + 'd' * 10 + 'e' * 2 + 'f' * 8
    added = [(run.optimizer, dict(run.settings)['learning_rate']) for run in made if run.part == 'e']
    assert added == [('sophiag', 2e-4 * best)] * 2
    assert [run.optimizer for run in made if run.part == 'b'] == ['adamw', 'sophiag', 'clip'] * 2


@pytest.mark.parametrize(('share', 'gamma'), [(0.3, 0.15), (0.1, 0.75), (0.2, 0.34), (0.6, 0.054), (0.0, 0.75)])
def test_gpu_30m_corrects_gamma_once(share, gamma):
    made = make_all(surface, gpu_30m.protocol, lambda run: share)
    sophia = [dict(run.settings) for run in made if run.optimizer == 'sophiag']
    assert [s['gamma'] for s in sophia if s['max_iters'] == 300] == [0.15]
    assert {s['gamma'] for s in sophia if s['max_iters'] > 300} == {gamma, gpu_30m.LOWER_GAMMA}


def test_the_page_of_gpu_30m_is_of_its_records_which_are_the_runs_of_its_protocol():
    runs, page = gpu_30m_results.read_runs(), (gpu_30m_results.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in gpu_30m_results.tables(runs))
    rows = gpu_30m_results.draw_curves(runs)[1]
    assert_written(rows, gpu_30m_results.HERE / 'curves.csv')
    recorded = studies.recorded(gpu_30m_results.HERE / 'runs.jsonl')
    _, due = studies.next_runs(gpu_30m.protocol, lambda run: recorded.pop(str(run.path), None))
    assert not recorded and {run.part for run in due} <= {'d', 'f'}


@pytest.mark.parametrize('file', ['metrics.jsonl', 'config.json'])
def test_a_run_that_has_just_been_started_is_not_finished(tmp_path, file):
    (tmp_path / file).touch()
    assert studies.finished(tmp_path) is None


def test_a_study_trains_what_is_due_in_its_tree_and_lists_it(tmp_path, monkeypatch, capsys):
    """`main`, with a program in place of train.py: it writes the loss that it is given."""
    here, tree = tmp_path / 'records/toy', tmp_path / 'tree'
    here.mkdir(parents=True)
    tree.mkdir()
    (tree / 'program.py').write_text('''import json, os, pathlib, sys
loss, out_dir = float(sys.argv[1]), pathlib.Path(sys.argv[2].removeprefix('--out_dir='))
(out_dir / 'config.json').write_text(json.dumps({'config': {'max_iters': 1}}))
row = {'iter': 1, 'val/loss': loss, 'train/loss': float(os.environ['OMP_NUM_THREADS'])}
(out_dir / 'metrics.jsonl').write_text(json.dumps(row) + chr(10))''')

    def protocol(asked):
        first = asked.result(0, 'A', 'adamw', learning_rate=2.0)
        if first:
            asked.result(0, 'A', 'clip', learning_rate=first.loss / 4)

    monkeypatch.setattr('signal.signal', lambda *_: None)  # main's handler would stay in this process

    def run(*flags):
        monkeypatch.setattr('sys.argv', ['study.py', f'--tree={tree}', *flags])
        studies.main(protocol, here, 'A toy.', ['tree'], lambda run: 'tree',
                     lambda run: ['program.py', str(dict(run.settings)['learning_rate'])])
        return capsys.readouterr().out

    assert 'A/adamw,learning_rate=2\n0 runs finished, 1 due' in run('--list')
    run()
    assert '2 runs finished, 0 due' in run('--list')
    run('--collect')
    assert studies.recorded(here / 'runs.jsonl') == {
        'A/adamw,learning_rate=2': studies.Result(2.0, 1.0), 'A/clip,learning_rate=0.5': studies.Result(0.5, 1.0)}


def test_recorded_runs_are_kept(tmp_path):
    """`collect` keeps the runs that only runs.jsonl has; their results are read from there."""
    config = dict(config={})
    lines = [dict(run='A/one', config=config, metrics={'val/loss': [5.0, None, 1.5], 'train/loss': [None, 2.0, None]}),
             dict(run='A/two', failed='iteration 7: it is not finite', config=config, metrics={'val/loss': [5.0]})]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    studies.collect([tmp_path / 'out'], path)
    assert [*map(json.loads, path.read_text().splitlines())] == lines
    assert studies.recorded(path) == {'A/one': studies.Result(1.5, 2.0), 'A/two': studies.Result()}


def test_the_plan_is_done_by_the_records():
    """But for part D, which was dropped."""
    records = studies.recorded(results.RECORDS / 'runs.jsonl')
    plan, due = studies.next_runs(study.protocol, lambda run: records.get(str(run.path)))
    assert len(plan.done) == len(records) and {run.part for run in due} == {'D'}


@pytest.mark.parametrize(('drawing', 'file'), [('curves', 'curves.csv'), ('gamma', 'dissection.csv')])
def test_the_pictures_are_of_the_records(drawing, file):
    rows = results.DRAWINGS[drawing](find_runs([results.RECORDS]))[1]
    assert_written(rows, results.RECORDS / file)


def test_the_tables_of_the_pages_are_of_the_records():
    front, study, page = ((ROOT / name).read_text(encoding='utf-8') for name in (
        'docs/results.md', 'records/study/README.md', 'records/dissection/README.md'))
    assert all(table in page for table in results.tables(find_runs([results.RECORDS])))
    for row in csv.DictReader((ROOT / 'records/study/study.csv').open(encoding='utf-8')):
        T, loss = int(row['T']), mean_sd(float(row['val/loss']), float(row['sd']) if row['seeds'] != '2' else None)
        rate = f'{float(row["learning_rate"]):g} ({row["trials"]})'
        assert f'| {T:,} | {row["optimizer"]} | {rate} | {loss} | {row["seeds"]} |' in study
        assert loss in re.search(rf'^\| {T:,} \| .*', front, flags=re.M)[0]


def test_the_page_of_small_batch_is_of_its_records_which_are_the_runs_of_its_protocol():
    found, page = small_batch_results.read_results(), (small_batch.HERE / 'README.md').read_text(encoding='utf-8')
    assert all(table in page for table in small_batch_results.tables(found))
    so_far, due = studies.next_runs(small_batch.protocol, lambda run: found.get(str(run.path)))
    assert {str(run.path) for run in so_far.done} == set(found) and not due
    assert f'{len(found)} of {len(found)} runs' in page
    assert_written(small_batch_results.draw_bands(found)[1], small_batch.HERE / 'bands.csv')
