"""scripts/speedup.py: the verdict on one optimizer against another, on runs whose answer is known."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, rejection
from fake_runs import SHAPE, fake_run, make, rows_of

import train
from analysis import compare, runs
from scripts import plot, speedup


def judge(tmp_path, *flags):
    """The contents of speedup.json; if there is one verdict, also its keys."""
    speedup.main([str(tmp_path), '--output', str(tmp_path / 'speedup.png'), '--panels', 'difference', *flags])
    result = json.loads((tmp_path / 'speedup.json').read_text())
    return {**result, **(result['verdicts'][0] if len(result['verdicts']) == 1 else {})}


@pytest.mark.parametrize(('loss', 'holds'), [(3.2, True), (3.2001, False)])
def test_the_criterion_is_strict_at_every_T(tmp_path, loss, holds):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4)
    make(tmp_path, 'adamw', 200, 3.2)
    make(tmp_path, 'sophiag', 100, loss)
    result = judge(tmp_path, '--panels', 'loss', 'difference')
    assert result['holds'] is holds
    assert [row['holds'] for row in result['criterion']] == [True, holds]
    assert f'is {"" if holds else "not "}2 times faster' in result['text'][0]


def test_the_best_settings_count_and_seeds_are_averaged(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5, lr=1e-3)
    make(tmp_path, 'adamw', 100, 3.1, lr=2e-3, seed=1)
    make(tmp_path, 'adamw', 100, 3.3, lr=2e-3, seed=2)
    make(tmp_path, 'sophiag', 50, 3.25)
    result = judge(tmp_path)
    row = rows_of(tmp_path / 'speedup.csv')[0]
    assert float(row['val/loss']) == pytest.approx(3.2) and float(row['sd']) == pytest.approx(math.sqrt(0.02))
    assert (row['seeds'], row['trials'], row['learning_rate']) == ('2', '2', '0.002')
    assert result['noise'] == {'sd': pytest.approx(math.sqrt(0.02)), 'df': 1} and not result['holds']


def test_one_lucky_seed_does_not_displace_settings_with_several(tmp_path):
    """It has to be lower on the seed that both have, and than the mean."""
    for seed, loss in ((1, 3.0), (2, 3.2), (3, 3.2)):
        make(tmp_path, 'adamw', 100, loss, lr=2e-3, seed=seed)
        make(tmp_path, 'adamw', 100, 3.17, lr=1e-3, seed=seed)  # the mean decides between settings with as many seeds
    make(tmp_path, 'adamw', 100, 3.05, lr=4e-3, seed=1)  # below the mean of the three, not below the same seed
    make(tmp_path, 'adamw', 100, 2.0, lr=5e-4, seed=9)  # lucky on a seed that no other setting has
    make(tmp_path, 'sophiag', 100, 3.2)
    (row,) = judge(tmp_path)['same_T']
    assert (row['seeds of baseline'], row['trials of baseline'], row['baseline']) == (3, 4, pytest.approx(9.4 / 3))
    make(tmp_path, 'adamw', 100, 2.9, lr=6e-3, seed=1)
    result = judge(tmp_path)
    assert result['same_T'][0]['baseline'] == pytest.approx(2.9)
    assert 'AdamW, T = 100: the best has fewer seeds (1) than another setting (3)' in result['notes']


def test_a_difference_is_tested_against_the_noise_over_seeds(tmp_path):
    for seed, loss in enumerate([3.00, 3.01, 3.02]):
        make(tmp_path, 'adamw', 100, loss, seed=seed)
        make(tmp_path, 'sophiag', 100, loss - 0.1, seed=seed)
        make(tmp_path, 'lion', 100, loss + 0.004, seed=seed)
    lion, sophia = (verdict['same_T'][0] for verdict in judge(tmp_path)['verdicts'])
    assert sophia['test'] == lion['test'] == 'Welch' and lion['p'] > 0.5
    assert sophia['difference'] == pytest.approx(-0.1) and sophia['p'] < 0.001 and sophia['p, Holm'] == sophia['p']
    assert 'within the noise' in judge(tmp_path, '--candidate', 'lion')['text'][-1]


def test_several_horizons_are_corrected_by_holm(tmp_path):
    """σ = 0.01 and 4 degrees of freedom each: t = 3.06, p = 0.038 at T = 100; none at 200."""
    for T, difference in ((100, 0.025), (200, 0)):
        for seed, loss in enumerate([3.00, 3.01, 3.02]):
            make(tmp_path, 'adamw', T, loss, seed=seed)
            make(tmp_path, 'sophiag', T, loss + difference, seed=seed)
    result = judge(tmp_path)
    one, two = result['same_T']
    assert one['p'] == pytest.approx(0.0376, abs=1e-4)
    assert (one['p, Holm'], two['p, Holm']) == (pytest.approx(2 * one['p']), 1)
    assert "p = 0.038, Welch; 0.075 after Holm's correction for 2 horizons" in '\n'.join(result['text'])


def test_a_single_run_is_tested_against_the_pooled_noise_or_not_at_all(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'sophiag', 100, 2.9)
    result = judge(tmp_path)
    assert result['same_T'][0]['p'] is None and 'the noise is not known' in result['text'][-1]
    for seed, loss in ((1, 3.30), (2, 3.32)):
        make(tmp_path, 'adamw', 100, loss, lr=5e-4, seed=seed)
    (row,) = judge(tmp_path)['same_T']
    assert row['test'] == 'pooled σ' and row['standard_error'] == pytest.approx(0.02) and row['df'] == 1


def test_the_noise_is_of_the_same_T_where_enough_seeds_tell_it(tmp_path):
    """Over all optimizers in the directory, compared or not."""
    for T, spread in ((100, 0.1), (200, 0.01)):
        for seed in range(3):
            make(tmp_path, 'adamw', T, 3.0 + spread * (seed - 1), seed=seed)
            make(tmp_path, 'lion', T, 3.0 + spread * (seed - 1), seed=seed)
        make(tmp_path, 'sophiag', T, 2.9, seed=0)
    rows = judge(tmp_path, '--candidate', 'sophiag')['same_T']
    assert [row['standard_error'] for row in rows] == pytest.approx([0.1 * math.sqrt(4 / 3), 0.01 * math.sqrt(4 / 3)])


def test_unequal_tuning_is_named_and_evened_out(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0)
    for lr, loss in ((1e-3, 3.2), (2e-3, 2.9), (4e-3, 3.4)):
        make(tmp_path, 'sophiag', 100, loss, lr=lr)
    result = judge(tmp_path)
    (row,) = result['same_T']
    assert (row['trials'], row['trials of baseline']) == (3, 1)
    assert row['difference'] == pytest.approx(-0.1)  # at the best of three
    assert row['at equal trials'] == pytest.approx((3.2 + 2.9 + 3.4) / 3) and row['baseline at equal trials'] == 3.0
    assert 'trials: Sophia-G 3, AdamW 1' in result['text'][-1]


def test_a_run_that_diverged_is_a_trial(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'sophiag', 100, 3.0)
    (make(tmp_path, 'sophiag', 100, 3.0, lr=1.0, end=30) / 'failed.txt').write_text('iteration 30: not finite')
    (row,) = judge(tmp_path)['same_T']
    assert row['trials'] == 2 and row['at equal trials'] == pytest.approx((3.0 + 5.0) / 2)  # losses start at 5
    make(tmp_path, 'sophiag', 100, math.nan, lr=2.0)  # to its end, where the loss was not finite
    result = judge(tmp_path)
    assert result['same_T'][0]['trials'] == 3 and list(result['rejected'].values()) == ['it diverged'] * 2
    assert [row['diverged'] for row in rows_of(tmp_path / 'speedup.csv')] == ['0', '2']
    unmeasured = make(tmp_path, 'sophiag', 100, 3.0, lr=3.0)
    (unmeasured / 'failed.txt').write_text('iteration 0: the loss is not finite')
    (unmeasured / 'metrics.jsonl').write_text('')
    assert judge(tmp_path)['same_T'][0]['trials'] == 4
    (make(tmp_path, 'sophiag', 100, 3.0, argv=['--n_layer=3'], end=30) / 'failed.txt').write_text('not finite')
    assert 'n_layer' in rejection(judge, tmp_path)  # a trial of another model


def test_a_run_that_diverged_after_a_change_is_no_trial(tmp_path):
    """It began with other settings, so these did not make it diverge."""
    for lr, loss in (2e-3, 3.0), (1e-3, 3.2):
        make(tmp_path, 'sophiag', 100, loss, lr=lr)
    make(tmp_path, 'adamw', 100, 3.0)
    changes = [dict(iter=20, key='learning_rate', **{'from': 4e-3, 'to': 2e-3})]
    (make(tmp_path, 'sophiag', 100, 3.0, lr=2e-3, seed=2, end=30, changes=changes) / 'failed.txt').write_text('no')
    result = judge(tmp_path)
    assert result['same_T'][0]['candidate'] == pytest.approx(3.0) and result['same_T'][0]['trials'] == 2
    assert [*result['rejected'].values()] == ['learning_rate was changed from 0.004 to 0.002 at iteration 20']
    assert len(compare.finished_runs([tmp_path])) == 3


def test_settings_that_diverged_with_one_seed_are_not_the_best(tmp_path):
    for seed, more in (1, 0.0), (2, 0.01), (3, -0.01):
        make(tmp_path, 'adamw', 100, 3.0 + more, seed=seed)
        make(tmp_path, 'sophiag', 100, 2.5 + more, seed=seed)
        make(tmp_path, 'sophiag', 100, 2.9 + more, lr=5e-4, seed=seed)
    (make(tmp_path, 'sophiag', 100, 2.5, seed=4, end=30) / 'failed.txt').write_text('iteration 30: not finite')
    result = judge(tmp_path)
    (row,) = result['same_T']
    assert row['candidate'] == pytest.approx(2.9) and row['trials'] == 2
    assert row['at equal trials'] == pytest.approx((2.9 + 5.0) / 2)
    assert not any('fewer seeds' in note for note in result['notes'])
    make(tmp_path, 'sophiag', 100, 2.5, seed=4)  # trained again, to its end
    make(tmp_path / '0', 'sophiag', 100, 2.5, seed=4)
    assert judge(tmp_path)['same_T'][0]['candidate'] == pytest.approx(2.9)


def test_data_efficiency_is_read_between_the_baselines_horizons(tmp_path):
    for T, loss in ((100, 4.0), (200, 3.5), (400, 3.0)):
        make(tmp_path, 'adamw', T, loss)
    for T, loss in ((100, 3.75), (200, 3.0), (400, 2.9)):  # in the middle; on the last point; beyond it
        make(tmp_path, 'sophiag', T, loss)
    one, two = judge(tmp_path)['efficiency']
    assert one['baseline steps'] == pytest.approx(100 * math.sqrt(2)) and two['ratio steps'] == pytest.approx(2)
    # Sophia-G's estimate: two thirds of half of the mini-batch in every tenth step.
    assert two['ratio FLOPs'] == pytest.approx(2 / (1 + 1 / 30), rel=2e-3)


def test_weak_tuning_is_noted(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5)
    for lr, gamma, loss in ((1e-3, 0.1, 3.5), (1e-3, 0.05, 3.4), (2e-3, 0.05, 3.45), (5e-4, 0.1, 3.6)):
        make(tmp_path, 'sophiag', 100, loss, lr=lr, argv=[f'--gamma={gamma}'])
    notes = judge(tmp_path)['notes']
    assert 'AdamW, T = 100: one learning rate only, so nothing was tuned' in notes
    assert 'Sophia-G, T = 100: the best γ, 0.05, is at the edge of those tried (0.05 to 0.1)' in notes
    edge = 'Sophia-G, T = 100: the best learning rate, 0.001, is at the edge of those tried (0.001 to 0.002)'
    assert edge in notes  # 5e-4 was tried with another γ
    make(tmp_path, 'sophiag', 100, 3.5, lr=5e-4, argv=['--gamma=0.05'])
    assert edge not in judge(tmp_path)['notes']


@pytest.mark.parametrize(('options', 'reason'), [
    (dict(), 'another run has the same settings and seed'),
    (dict(end=40), 'it has a validation loss at iteration 40 of 100 only'),
    (dict(argv=['--lr_decay_iters=200']), 'its learning rate decays over 200 iterations, and it was run for 100'),
    (dict(argv=['--warmup_iters=100']), 'it ends within its warm-up of 100 iterations'),
    (dict(changes=[{'iter': 60, 'key': 'learning_rate', 'from': 'a', 'to': 'b'}]),
     'learning_rate was changed from a to b at iteration 60')])
def test_runs_that_do_not_count_are_named(tmp_path, options, reason):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'sophiag', 100, 2.9)
    rejected = make(tmp_path, 'sophiag', 100, 2.0, **options)
    result = judge(tmp_path)
    assert result['same_T'][0]['candidate'] == pytest.approx(2.9) and result['same_T'][0]['trials'] == 1
    assert result['rejected'] == {str(rejected): reason}


def test_without_finished_runs_of_both_there_is_nothing_to_compare(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5)
    assert 'final_losses.py compares settings of one optimizer' in rejection(judge, tmp_path)
    make(tmp_path, 'sophiag', 50, 3.0, end=40)
    assert 'finished runs of adamw at T = [100]; sophiag at T = none; ' in rejection(judge, tmp_path)
    assert 'nothing to compare' in rejection(judge, tmp_path, '--candidate', 'lion', '--baseline', 'muon')
    make(tmp_path, 'sophiag', 100, 3.0)
    message = rejection(judge, tmp_path, '--candidate', 'sophiag', 'sophiagg')
    assert message == 'nothing to compare: no run of --candidate sophiagg'


WSD = ['--schedule=wsd', '--cooldown_iters=30']


@pytest.mark.parametrize(('argv', 'before', 'cooldown', 'iteration', 'kept'), [
    (['--warmup_iters=20'], 1000, 0, 20, True), (['--warmup_iters=20'], 1000, 0, 31, False),  # the cosine has begun
    (WSD, 1000, 30, 70, True), (WSD, 1000, 30, 81, False),
    (WSD, 60, 30, 70, False), (WSD, 2000, 1980, 60, False),  # under the former settings the decay had begun
    (WSD, 2000, 400, 60, True),  # docs/optimizers.md, "Schedules": a run that is branched off to decay
    (['--schedule=constant'], 1000, 0, 90, True)])
def test_a_horizon_may_change_before_the_decay_begins(tmp_path, argv, before, cooldown, iteration, kept):
    horizon = {'max_iters': before, 'lr_decay_iters': before, **({'cooldown_iters': cooldown} if cooldown else {})}
    first = train.resolve([*SHAPE, *argv, '--learning_rate=1', *(f'--{key}={value}' for key, value in horizon.items())])
    argv = [*argv, '--learning_rate=1', '--max_iters=100']
    second = train.resolve([*SHAPE, *argv])
    run = runs.read_run(fake_run(
        tmp_path, 3.0, argv, lr=lambda i: train.learning_rate_at(first if i < iteration else second, i),
        changes=[{'iter': iteration, 'key': key, 'from': value, 'to': 100} for key, value in horizon.items()]))
    assert (run.rejected is None) == kept
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines(keepends=True)  # in a directory of its own:
    (tmp_path / 'metrics.jsonl').write_text(''.join(line for line in lines if json.loads(line)['iter'] >= iteration))
    assert (runs.read_run(tmp_path).rejected is None) == kept


def test_the_settings_between_two_resumes_count(tmp_path):
    """A horizon that was changed back: only the iterations that it was for are off the schedule."""
    for resumes, kept in ((5, 15), True), ((40, 60), False):
        changes = [{'iter': resume, 'key': key, 'from': before, 'to': 100 if before == 1000 else 1000}
                   for resume, before in zip(resumes, (100, 1000)) for key in ('max_iters', 'lr_decay_iters')]
        changes += [dict(change, **{'from': change['to']}) for change in changes[-2:]]  # a resume without a step
        run = runs.read_run(fake_run(tmp_path, 3.0, ['--max_iters=100', '--warmup_iters=20'], changes=changes))
        assert (run.rejected is None) == kept


@pytest.mark.parametrize(('options', 'what'), [
    (dict(data='another'), 'fingerprint'), (dict(argv=['--eval_iters=3']), 'validation sequences'),
    (dict(argv=['--n_layer=3']), 'n_layer'), (dict(argv=['--warmup_iters=20']), 'warmup_iters'),
    (dict(argv=['--min_lr_ratio=0.1']), 'min_lr_ratio'), (dict(argv=['--init_from=gpt2']), 'init_from')])
def test_runs_of_another_protocol_are_rejected(tmp_path, options, what):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4, **options)
    message = rejection(judge, tmp_path)
    assert 'cannot be compared' in message and what in message
    if what == 'warmup_iters':
        assert judge(tmp_path, '--tuned', what)['holds']


@pytest.mark.parametrize(('argv', 'comparable'), [
    (['--warmup_iters=50'], True), (['--warmup_iters=100'], True), (['--warmup_iters=20'], False),
    (['--warmup_iters=50', '--schedule=wsd', '--cooldown_iters=20'], False)])
def test_the_warm_up_may_be_a_share_of_the_run_or_a_number_of_steps(tmp_path, argv, comparable):
    make(tmp_path, 'adamw', 100, 3.0, argv=['--warmup_iters=50'])
    make(tmp_path, 'adamw', 200, 3.0, argv=argv)
    found = runs.find_runs([tmp_path])
    if comparable:
        compare.check_comparable(found)
    else:
        assert 'cannot be compared' in rejection(compare.check_comparable, found)


def test_a_setting_that_an_edit_gives_the_model_is_part_of_the_protocol(tmp_path, monkeypatch):
    """A run that is older than the setting has its default."""
    monkeypatch.setattr(compare, 'PROTOCOL', [*compare.PROTOCOL, 'rope'])
    monkeypatch.setitem(runs.defaults(), 'rope', False)
    paths = [make(tmp_path, name, 100, 3.0) for name in ('adamw', 'lion')]
    about = json.loads((paths[1] / 'config.json').read_text())
    for value in (False, True):
        about['config']['rope'] = value
        (paths[1] / 'config.json').write_text(json.dumps(about))
        if value:
            assert 'rope is False in one and True in the other' in rejection(judge, tmp_path)
        else:
            assert judge(tmp_path)['same_T']


def test_iterations_with_fewer_tokens_cost_fewer_flops(tmp_path):
    run = runs.read_run(make(tmp_path, 'adamw', 100, 3.0))
    full = run.flops_per_iteration()
    for line in run.lines:
        line['tokens'] //= 2
    assert run.flops_per_iteration() == pytest.approx(full / 2)
    assert run.series('val/loss', 'flops')[0][-1] == pytest.approx(100 * full / 2)


def test_beta1_is_the_same_within_an_optimizer_unless_it_was_tuned(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5)
    make(tmp_path, 'sophiag', 50, 3.4)  # 0.96 where AdamW has 0.9
    assert judge(tmp_path)['holds']
    make(tmp_path, 'adamw', 100, 3.3, argv=['--beta1=0.96'])
    assert 'beta1 is 0.9' in rejection(judge, tmp_path)
    assert not judge(tmp_path, '--tuned', 'beta1')['holds']


def test_runs_of_different_code_are_named(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0, seed=1, code={'loss.py': 'a', 'model.py': 'a'})
    make(tmp_path, 'adamw', 100, 3.0, seed=2)  # of an older train.py: unknown, not different
    make(tmp_path, 'sophiag', 100, 2.9, seed=1, code={'loss.py': 'a', 'model.py': 'a', 'my_optimizer.py': 'a'})

    def notes():
        return [note for note in judge(tmp_path)['notes'] if 'code' in note]

    assert notes() == []
    make(tmp_path, 'sophiag', 100, 2.8, seed=2, code={'loss.py': 'b', 'model.py': 'a'})
    (note,) = notes()
    assert 'the runs are of different code (loss.py)' in note
    changed = make(tmp_path, 'sophiag', 100, 2.8, seed=3, changes=[dict(iter=40, key='code', files=['train.py'])])
    assert f'{changed}: its code was changed at iteration 40 (train.py)' in notes()
    assert judge(tmp_path)['same_T'][0]['seeds'] == 3


def test_older_config_files_lack_settings_and_have_removed_ones(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0)
    make(tmp_path, 'sophiag', 100, 2.9)
    for seed, remove, more in ((2, {'schedule', 'cooldown_iters', 'optimizer_args'}, {}),
                               (3, {}, dict(hessian_sequences='own', hessian_bias_correction=False))):
        path = make(tmp_path, 'sophiag', 100, 2.92, seed=seed) / 'config.json'
        about = json.loads(path.read_text())
        about['config'] = {key: value for key, value in about['config'].items() if key not in remove} | more
        path.write_text(json.dumps(about))
    assert judge(tmp_path)['same_T'][0]['seeds'] == 3


# ----------------------------------------------------------------------------------------------------------------------
# Losses of any program, in a CSV file


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / 'docs/verdict.md').read_text(encoding='utf-8')
    command, = re.findall(r'^python scripts/speedup.py (examples/.*) --output', page, flags=re.M)
    speedup.main([*shlex.split(command), '--output', str(tmp_path / 'x.png'), '--panels', 'difference'])
    told, = re.findall(r'says:\n\n```\n(.*?)```', page, flags=re.S)
    assert told in capsys.readouterr().out
    assert re.search(r'^```\n(optimizer,.*?)```', page, flags=re.M | re.S)[1] in Path('examples/losses.csv').read_text()


def as_csv(found, path, **columns):
    """Writes runs as a CSV file, with these columns: a function of the run and a line of its log."""
    columns = dict(optimizer=lambda run, _: run.optimizer_label, seed=lambda run, _: run.seed,
                   steps=lambda _, line: line['iter'], loss=lambda _, line: line['val/loss'], **columns)
    rows = [[str(value(run, line)) for value in columns.values()]
            for run in found for line in run.lines if 'val/loss' in line]
    path.write_text('\n'.join(','.join(row) for row in [list(columns), *rows]) + '\n', encoding='utf-8')
    return path


def test_a_csv_file_has_the_verdict_of_its_runs(tmp_path):
    for T in (100, 200):
        for seed, noise in enumerate([0.0, 0.01, 0.02]):
            make(tmp_path / 'runs', 'adamw', T, 3.1 - T / 1000 + noise, seed=seed)
            make(tmp_path / 'runs', 'sophiag', T, 3.05 - T / 1000 + noise / 2, seed=seed)
        make(tmp_path / 'runs', 'adamw', T, math.nan, lr=1.0)
    make(tmp_path / 'runs', 'adamw', 200, 2.0, lr=2e-3, end=100)
    path = as_csv(runs.find_runs([tmp_path / 'runs']), tmp_path / 'losses.csv', horizon=lambda run, _: run.max_iters,
                  learning_rate=lambda run, _: run.learning_rate,
                  flops=lambda run, line: line['iter'] * run.flops_per_iteration())
    ours = judge(tmp_path / 'runs')
    speedup.main([str(path), '--panels', 'difference', '--output', str(tmp_path / 'speedup.png')])
    theirs = json.loads((tmp_path / 'speedup.json').read_text())
    verdict, = theirs['verdicts']
    assert verdict['text'] == ours['text']
    for key in ('same_T', 'criterion', 'efficiency'):
        assert len(ours[key]) > 0 and verdict[key] == [pytest.approx(row) for row in ours[key]]
    assert sorted(theirs['rejected'].values()) == sorted(ours['rejected'].values()) and len(theirs['rejected']) == 3
    assert theirs['notes'][0] == f'{path} does not say whether model, data and validation set are the same'
    plot.main([str(path), '--x', 'flops', '--output', str(tmp_path / 'loss.png')])
    assert {row['metric'] for row in rows_of(tmp_path / 'loss.csv')} == {'val/loss'}
    assert 'compare them apart' in rejection(runs.find_runs, [path, tmp_path / 'runs'])


def test_what_a_csv_file_does_not_say_is_said(tmp_path):
    for seed in range(3):
        make(tmp_path / 'runs', 'adamw', 100, 3.1, seed=seed)
        make(tmp_path / 'runs', 'sophiag', 100, 3.0, seed=seed)
    path = as_csv(runs.find_runs([tmp_path / 'runs']), tmp_path / 'losses.csv')
    speedup.main([str(path), '--panels', 'difference', '--output', str(tmp_path / 'speedup.png')])
    notes = json.loads((tmp_path / 'speedup.json').read_text())['notes']
    assert notes == [f'{path} does not say whether model, data and validation set are the same; which '
                     'hyperparameters differ (a column each); whether the schedules ended at the last step (horizon); '
                     'the FLOPs of a step (flops)']
    assert 'losses.csv/optimizer=AdamW,seed=0: no tokens at iteration 0' in rejection(
        plot.main, [str(path), '--x', 'tokens', '--output', str(tmp_path / 'loss.png')])


@pytest.mark.parametrize(('cells', 'reason'), [
    (',', None), ('false,600000', None), ('True,', None), ('true,100', None),
    ('True,200', 'its learning rate decays over 200 iterations, and it was run for 100')])
def test_a_csv_file_may_say_whether_the_learning_rate_decays(tmp_path, cells, reason):
    (tmp_path / 'x.csv').write_text(f'optimizer,seed,steps,loss,decay_lr,lr_decay_iters\na,1,100,3,{cells}\n')
    run, = runs.find_runs([tmp_path / 'x.csv'])
    assert run.rejected == reason


def test_a_csv_file_of_another_program(tmp_path):
    """Which writes NaN for a setting that an optimizer lacks, calls the horizon max_iters, and is in progress."""
    (tmp_path / 'x.csv').write_text('optimizer,seed,max_iters,steps,loss,gamma\n' + ''.join(
        f'{name},{seed},200,{steps},{3 + seed / 100},{gamma}\n' for name, gamma in (('a', 'nan'), ('b', '0.05'))
        for seed, steps in ((1, 200), (2, 200), (3, 100), (3, 200), (4, 100))))
    found = runs.find_runs([tmp_path / 'x.csv'])
    unfinished = 'it has a validation loss at iteration 100 of 200 only'
    assert [run.rejected for run in found] == [None, None, None, unfinished] * 2
    assert [[run.seed for run in group] for group in runs.by_seed(found)] == [[1, 2, 3, 4]] * 2
    (tmp_path / 'x.csv').write_text('optimizer,seed,steps,loss\na,1,0,5\na,2,200,3\n')
    assert [run.rejected for run in runs.find_runs([tmp_path / 'x.csv'])] == [
        'it has a validation loss at iteration 0 of 0 only', None]


@pytest.mark.parametrize(('text', 'message'), [
    ('', ': no column optimizer'), ('optimizer,seed,step,loss\na,1,2,3\n', ': no column steps'),
    ('optimizer,seed,steps,loss\na,1,2\n', ':2: not as many columns'),
    ('optimizer,seed,steps,loss\na,1,2,low\n', ':2: steps, loss'), ('optimizer,seed,steps,loss\na,1,,3\n', ':2: steps'),
    ('optimizer,seed,steps,loss\na,1,2,3\na,1,2,4\n', ':3: the second row of a run for step 2'),
    *((f'optimizer,seed,steps,loss,{column}\na,1,2,3,\nb,1,2,3,10%\n', f':3: {column} must be a number, or empty')
      for column in runs.NUMBERS)])
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / 'x.csv').write_text(text)
    assert f'{tmp_path}/x.csv{message}' in rejection(runs.find_runs, [tmp_path / 'x.csv'])
    (tmp_path / 'x.csv').write_text(text, encoding='utf-16')
    assert f'{tmp_path}/x.csv: not a CSV file in UTF-8' in rejection(runs.find_runs, [tmp_path / 'x.csv'])
    assert f'{tmp_path}/y.csv: no run there' in rejection(runs.find_runs, [tmp_path / 'y.csv'])
