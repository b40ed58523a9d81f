"""scripts/speedup.py: the verdict on one optimizer against another, on runs with a known answer."""

import contextlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, rejection
from fake_runs import edit, make, rows_of

from analysis import compare, runs
from scripts import speedup


def judge(path, *flags):
    """Return the contents of speedup.json, next to the runs in `path`, and, if there is one verdict, its keys."""
    folder = path if path.is_dir() else path.parent
    speedup.main([str(path), '--output', str(folder / 'speedup.png'), '--panels', 'difference', *flags])
    result = json.loads((folder / 'speedup.json').read_text())
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
    assert not result['holds']


def test_settings_of_chance_are_together_the_seed(tmp_path):
    """skip_nonfinite alone makes no other sample."""
    for seed, data_seed, skip in (1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0), (2, 0, 3):
        for name, loss in ('adamw', 3.1), ('sophiag', 3.0):
            run = make(tmp_path, name, 100, loss + data_seed / 100, seed=seed, argv=[f'--skip_nonfinite={skip}'])
            edit(run, lambda about: [about[part].update(data_seed=new) for part, new in
                                     dict(config=data_seed, roles='chance', provenance='flag').items()])  # noqa: B023
    result = judge(tmp_path)
    row, = result['same_T']
    assert (row['seeds'], row['seeds of baseline'], row['trials']) == (4, 4, 1)
    assert list(result['rejected'].values()) == ['another run has the same settings and seed'] * 2


def test_one_lucky_seed_does_not_displace_settings_with_several(tmp_path):
    """It must be lower on shared seeds, and lower than the mean over all seeds."""
    for seed, loss in ((1, 3.0), (2, 3.2), (3, 3.2)):
        make(tmp_path, 'adamw', 100, loss, lr=2e-3, seed=seed)
        make(tmp_path, 'adamw', 100, 3.17, lr=1e-3, seed=seed)  # a higher mean
    make(tmp_path, 'adamw', 100, 3.05, lr=4e-3, seed=1)  # lower than the mean, not than the shared seed
    make(tmp_path, 'adamw', 100, 2.0, lr=5e-4, seed=9)  # not a shared seed
    make(tmp_path, 'sophiag', 100, 3.2)
    (row,) = judge(tmp_path)['same_T']
    assert (row['seeds of baseline'], row['trials of baseline'], row['baseline']) == (3, 4, pytest.approx(9.4 / 3))
    make(tmp_path, 'adamw', 100, 2.9, lr=6e-3, seed=1)
    result = judge(tmp_path)
    assert result['same_T'][0]['baseline'] == pytest.approx(2.9)
    assert 'AdamW, T = 100: the best has fewer seeds (1) than another setting (3)' in result['notes']


def test_several_horizons_are_corrected_by_holm(tmp_path):
    """t = 7.35 with 2 degrees of freedom, p = 0.018, at T = 100; a tie at 200."""
    for T, difference in ((100, 0.06), (200, 0)):
        for seed, loss in enumerate([3.00, 3.01, 3.02]):
            make(tmp_path, 'adamw', T, loss, seed=seed)
            make(tmp_path, 'sophiag', T, loss + difference, seed=seed)
    result = judge(tmp_path)
    one, two = result['same_T']
    assert one['p'] == pytest.approx(0.01802, abs=1e-5)
    assert (one['p, Holm'], two['p, Holm']) == (pytest.approx(2 * one['p']), 1)
    text = '\n'.join(result['text'])
    assert "p = 0.018; 0.036 after Holm's correction for 2 horizons" in text
    assert 'T = 200: Sophia-G ends 0.0000 ± 0.0351 below AdamW (within the noise' in text


def test_two_seeds_of_each_group_are_tested_and_one_is_not(tmp_path):
    """Only their own noise counts, not that of a third setting with many seeds."""
    for seed, loss in enumerate([3.0, 3.0, 3.0001, 3.0001]):
        make(tmp_path, 'adamw', 100, loss + 1, lr=5e-4, seed=seed)
    make(tmp_path, 'adamw', 100, 3.0, seed=8)
    make(tmp_path, 'sophiag', 100, 2.9)
    result = judge(tmp_path, '--tuned', 'beta1')
    assert result['same_T'][0]['p'] is None and 'each method needs two seeds' in result['text'][-1]
    for seed, loss in ((1, 3.02), (2, 2.92)):
        make(tmp_path, 'adamw' if loss > 3 else 'sophiag', 100, loss, seed=seed)
    row, = judge(tmp_path)['same_T']
    assert (row['seeds'], row['seeds of baseline'], row['df']) == (2, 2, 1)
    assert row['standard_error'] == pytest.approx(math.sqrt(2) * 0.01)


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
    make(tmp_path, 'sophiag', 100, math.nan, lr=2.0)  # It reached its end, where the loss was not finite.
    result = judge(tmp_path)
    assert result['same_T'][0]['trials'] == 3 and list(result['rejected'].values()) == ['it diverged'] * 2
    assert [row['diverged'] for row in rows_of(tmp_path / 'speedup.csv')] == ['0', '2']
    (make(tmp_path, 'sophiag', 100, 3.0, argv=['--n_layer=3'], end=30) / 'failed.txt').write_text('not finite')
    assert 'n_layer' in rejection(judge, tmp_path)  # a trial of another model


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


def test_data_efficiency_is_read_between_the_baselines_horizons(tmp_path):
    for T, loss in ((100, 4.0), (200, 3.5), (400, 3.0)):
        make(tmp_path, 'adamw', T, loss)
    for T, loss in ((50, 4.0), (100, 3.75), (200, 3.0), (400, 2.9)):  # the first point, between, the last one, beyond
        make(tmp_path, 'sophiag', T, loss)
    first, one, two = judge(tmp_path)['efficiency']
    assert first['baseline steps'] == pytest.approx(100)
    assert one['baseline steps'] == pytest.approx(100 * math.sqrt(2)) and two['ratio steps'] == pytest.approx(2)
    # Sophia-G's estimate costs two thirds of a gradient on half of the mini-batch in every tenth step.
    assert two['ratio FLOPs'] == pytest.approx(2 / (1 + 1 / 30), rel=2e-3)


def test_weak_tuning_is_noted(tmp_path):
    make(tmp_path, 'adamw', 100, 3.5)
    for lr, gamma, loss in ((1e-3, 0.1, 3.5), (1e-3, 0.05, 3.4), (2e-3, 0.05, 3.45), (5e-4, 0.1, 3.6)):
        make(tmp_path, 'sophiag', 100, loss, lr=lr, argv=[f'--gamma={gamma}'])
    for lr, beta2 in (1e-3, 0.98), (2e-3, 0.9):
        make(tmp_path, 'lion', 100, 3.5 + lr, lr=lr, argv=[f'--beta2={beta2}'])
    notes = ' '.join(judge(tmp_path)['notes'])
    assert 'AdamW, T = 100: one learning rate only, so nothing was tuned' in notes
    assert 'Lion, T = 100: one learning rate only with the other settings of the best' in notes
    assert 'the best γ, 0.05, is at the edge' in notes
    assert 'the best learning rate, 0.001, is at the edge' in notes  # 5e-4 was tried with another γ
    make(tmp_path, 'sophiag', 100, 3.5, lr=5e-4, argv=['--gamma=0.05'])
    assert 'the best learning rate, 0.001' not in ' '.join(judge(tmp_path)['notes'])


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
    make(tmp_path, 'sophiag', 50, 3.0, end=40)
    assert 'finished runs of adamw at T = [100]; sophiag at T = none; ' in rejection(judge, tmp_path)
    message = rejection(judge, tmp_path, '--candidate', 'sophiag', 'sophiagg')
    assert message == ('nothing to compare: no run of sophiagg; there are adamw, sophiag; choose by --by, --baseline '
                       'and --candidate')


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


@pytest.mark.parametrize(('steps', 'comparable'), [(50, True), (102, True), (103, False), (20, False)])
def test_the_warm_up_may_be_a_share_of_the_run_or_a_number_of_steps(tmp_path, steps, comparable):
    make(tmp_path, 'adamw', 100, 3.0, argv=['--warmup_iters=50'])
    make(tmp_path, 'adamw', 200, 3.0, argv=[f'--warmup_iters={steps}'])
    with contextlib.nullcontext() if comparable else pytest.raises(SystemExit, match='cannot be compared'):
        compare.check_comparable(runs.find_runs([tmp_path]))


def test_a_setting_that_an_edit_gives_the_model_is_part_of_the_protocol(tmp_path):
    """The run's config.json says so. An older run has the setting's default."""
    older, younger = (make(tmp_path, name, 100, 3.0) for name in ('adamw', 'lion'))
    for value, source in (False, 'default'), (True, 'flag'):
        edit(younger, lambda about: [about[part].update(rope=new) for part, new in
                                     dict(config=value, roles='model', provenance=source).items()])  # noqa: B023
        if value:
            assert 'rope is None in one and True in the other; leave one out' in rejection(judge, tmp_path)
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
    make(tmp_path, 'sophiag', 50, 3.4)  # Its default is 0.96, AdamW's 0.9.
    assert judge(tmp_path)['holds']
    make(tmp_path, 'adamw', 100, 3.3, argv=['--beta1=0.96'])
    assert 'beta1 is 0.9' in rejection(judge, tmp_path)
    assert not judge(tmp_path, '--tuned', 'beta1')['holds']


def test_runs_of_different_code_are_named(tmp_path):
    make(tmp_path, 'adamw', 100, 3.0, seed=1, code={'loss.py': 'a', 'model.py': 'a'})
    make(tmp_path, 'adamw', 100, 3.0, seed=2)  # Its code is unknown, not different.
    make(tmp_path, 'sophiag', 100, 2.9, seed=1, code={'loss.py': 'a', 'model.py': 'a', 'my_optimizer.py': 'a'})

    def notes():
        return [note for note in judge(tmp_path)['notes'] if 'code' in note]

    assert notes() == []
    make(tmp_path, 'sophiag', 100, 2.8, seed=2, code={'loss.py': 'b', 'model.py': 'a'})
    (note,) = notes()
    assert 'the runs used different code (loss.py)' in note
    changed = make(tmp_path, 'sophiag', 100, 2.8, seed=3, changes=[dict(iter=40, key='code', files=['train.py'])])
    assert f'{changed}: its code was changed at iteration 40 (train.py)' in notes()
    assert judge(tmp_path)['same_T'][0]['seeds'] == 3


def test_a_run_that_was_ended_early_is_of_the_horizon_that_it_reached(tmp_path):
    for seed in 1, 2:
        make(tmp_path, 'adamw', 50, 3.0, seed=seed, argv=['--schedule=constant'])
        ended = make(tmp_path, 'sophiag', 100, 2.0, seed=seed, end=50, argv=['--schedule=constant', '--warmup_iters=1'])
        edit(ended, lambda about: about.update(ended=dict(iter=50, reason='early stopping')))
    row, = judge(tmp_path)['same_T']
    assert (row['T'], row['candidate'], row['baseline']) == (50, 3.5, 3.0)
    edit(ended, lambda about: about['config'].update(schedule='cosine'))  # It had not decayed to its end.
    assert 'decays over 100 iterations, and it was run for 50' in str(judge(tmp_path)['rejected'])


def test_values_of_a_setting_are_compared(tmp_path):
    for seed, noise in enumerate([0.0, 0.01, 0.02]):
        for lr in 1e-3, 2e-3:
            run = make(tmp_path, 'adamw', 100, 3.0 + noise + 100 * lr, seed=seed, lr=lr)
            if seed == 1:
                edit(run, lambda about: about['config'].update(dropout=0))  # It equals 0.0.
            make(tmp_path, 'adamw', 100, 3.1 + noise + 100 * lr, seed=seed, lr=lr, argv=['--dropout=0.1'])
    assert '--by zloss: not a setting of all of these runs' in rejection(judge, tmp_path, '--by', 'zloss')
    result = judge(tmp_path, '--by', 'dropout')
    row, = result['same_T']
    assert result['baseline'] == '0.0' and row['trials'] == row['trials of baseline'] == 2
    assert row['seeds'] == row['seeds of baseline'] == 3
    assert row['difference'] == pytest.approx(0.1) and 'dropout 0.1 ends 0.1000 ± 0.0351 above dropout 0.0' in (
        result['text'][0])
    assert [row['dropout'] for row in rows_of(tmp_path / 'speedup.csv')] == ['dropout 0.0', 'dropout 0.1']
    assert judge(tmp_path, '--by', 'dropout', '--baseline', '1e-1')['candidate'] == '0.0'
    make(tmp_path, 'lion', 100, 3.0, argv=['--dropout=0.1'])  # A gain could be the optimizer's.
    assert 'optimizer_name is adamw in one and lion in the other' in rejection(judge, tmp_path, '--by', 'dropout')


def test_equal_values_in_a_csv_file_are_one_group(tmp_path):
    path = tmp_path / 'x.csv'
    path.write_text('optimizer,seed,steps,loss,dropout\n' + ''.join(
        f'{name},{seed},100,{3 + seed / 100 + float(dropout)},{dropout}\n' for seed, name, dropout in [
            (1, 'AdamW', '0'), (2, 'AdamW ', '0.0'), (3, 'AdamW', '0'), (1, 'AdamW', '.1'), (2, 'AdamW', '0.10')]))
    row, = judge(path, '--by', 'dropout')['same_T']
    assert (row['seeds'], row['seeds of baseline'], row['trials']) == (2, 3, 1)


def test_directories_are_compared(tmp_path):
    """Two checkouts or models have the same settings and seeds."""
    for seed, noise in enumerate([0.0, 0.01, 0.02]):
        for place, loss in (('main', 3.0), ('fork', 2.9)):
            make(tmp_path / place, 'adamw', 100, loss + noise, seed=seed)
    argv = [f'{tmp_path}/main', f'{tmp_path}/fork/', f'--output={tmp_path}/speedup.png', '--by=out_dir']
    speedup.main([*argv, f'--baseline={tmp_path}/fork/'])
    assert json.loads((tmp_path / 'speedup.json').read_text())['baseline'] == f'{tmp_path}/fork'
    speedup.main(argv)
    verdict, = json.loads((tmp_path / 'speedup.json').read_text())['verdicts']
    assert f'{tmp_path}/fork ends 0.1000 ± 0.0351 below {tmp_path}/main (p = 0.0066; trials' in verdict['text'][0]


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / 'docs/verdict.md').read_text(encoding='utf-8')
    command, = re.findall(r'^python scripts/speedup.py (examples/.*) --output', page, flags=re.M)
    speedup.main([*shlex.split(command), '--output', str(tmp_path / 'x.png'), '--panels', 'difference'])
    told, = re.findall(r'says:\n\n```\n(.*?)```', page, flags=re.S)
    assert told in capsys.readouterr().out
    assert re.search(r'^```\n(optimizer,.*?)```', page, flags=re.M | re.S)[1] in Path('examples/losses.csv').read_text()


def test_a_csv_file_has_the_verdict_of_its_runs(tmp_path):
    for T in (100, 200):
        for seed, noise in enumerate([0.0, 0.01, 0.02]):
            make(tmp_path / 'runs', 'adamw', T, 3.1 - T / 1000 + noise, seed=seed)
            make(tmp_path / 'runs', 'sophiag', T, 3.05 - T / 1000 + noise / 2, seed=seed)
        make(tmp_path / 'runs', 'adamw', T, math.nan, lr=1.0)
    make(tmp_path / 'runs', 'adamw', 200, 2.0, lr=2e-3, end=100)
    path, header = tmp_path / 'losses.csv', 'optimizer,seed,steps,loss,horizon,learning_rate,flops'
    path.write_text('\n'.join([header, *(
        f'{run.optimizer_label},{run.seed},{line["iter"]},{line["val/loss"]},{run.max_iters},{run.learning_rate},'
        f'{line["iter"] * run.flops_per_iteration()}'
        for run in runs.find_runs([tmp_path / 'runs']) for line in run.lines if 'val/loss' in line)]))
    ours = judge(tmp_path / 'runs')
    theirs = judge(path)
    assert theirs['text'] == ours['text']
    for key in ('same_T', 'criterion', 'efficiency'):
        assert len(ours[key]) > 0 and theirs[key] == [pytest.approx(row) for row in ours[key]]
    assert sorted(theirs['rejected'].values()) == sorted(ours['rejected'].values()) and len(theirs['rejected']) == 3
    assert theirs['notes'][0] == f'{path} does not say whether model, data and validation set are the same'
    assert 'cannot be compared: the data' in rejection(
        speedup.main, [str(path), str(tmp_path / 'runs'), '--baseline', 'AdamW', '--output', str(tmp_path / 'x.png')])


@pytest.mark.parametrize(('cells', 'counts'), [
    (',', True), (',200', False), ('false,600000', True), ('True,', True), ('true,100', True), ('True,200', False)])
def test_a_csv_file_may_say_whether_the_learning_rate_decays(tmp_path, cells, counts):
    (tmp_path / 'x.csv').write_text(f'optimizer,seed,steps,loss,decay_lr,lr_decay_iters\na,1,100,3,{cells}\n')
    run, = runs.find_runs([tmp_path / 'x.csv'])
    assert (run.rejected is None) == counts


def test_a_csv_file_of_another_program(tmp_path):
    """It has NaN for a setting that an optimizer lacks, calls the horizon max_iters, and has unfinished runs."""
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


def test_a_diverged_run_without_a_horizon_is_a_trial_of_the_next_longer_ones(tmp_path, capsys):
    rows = [f'{name},{seed},{T},{loss},{lr}' for name in 'ab' for T, loss, lr in ((100, 3.2, 1), (200, 3.0, 2))
            for seed in (1, 2)]
    lost = ['a,1,0,5.0,9', 'a,1,40,nan,9', 'a,1,0,5.0,8', 'a,1,120,,8', 'a,1,300,nan,7']
    (tmp_path / 'x.csv').write_text('\n'.join(['optimizer,seed,steps,loss,learning_rate', *rows, *lost]))
    found = [(row['T'], row['trials'], row['trials of baseline'], row['at equal trials'])
             for row in judge(tmp_path / 'x.csv', '--baseline=b')['same_T']]
    assert found == [(100, 2, 1, (3.2 + 5) / 2), (200, 2, 1, (3.0 + 5) / 2)]
    assert [line.split(':')[1:] for line in capsys.readouterr().out.splitlines() if line.startswith('lost ')] == [
        [str(line), ' it diverged'] for line in (10, 12, 14)]


@pytest.mark.parametrize('delimiter', [';', '\t'])
def test_a_csv_file_as_spreadsheets_write_it(tmp_path, delimiter):
    rows = [['Optimizer', 'Seed', 'Steps', 'Loss', 'LR'], ['AdamW', '1', '100', '3.0', '0.001']]
    (tmp_path / 'x.csv').write_text('\r\n'.join(delimiter.join(row) for row in rows), encoding='utf-8-sig')
    run, = runs.find_runs([tmp_path / 'x.csv'])
    assert (run.optimizer_name, run.seed, run.max_iters, run.final_loss) == ('AdamW', 1, 100, 3)
    assert run.learning_rate == 0.001


@pytest.mark.parametrize('column', ['dataset', 'width'])
def test_only_columns_that_are_known_to_be_tuned_may_differ(tmp_path, column):
    """Otherwise easier data or a larger model would be the best setting."""
    path = tmp_path / 'x.csv'
    rows = [f'{name},{seed},100,{3 - value},{value},{value}' for name in 'ab' for seed in (1, 2) for value in (1, 2)]
    path.write_text('\n'.join([f'optimizer,seed,steps,loss,{column},gamma', *rows]))
    assert f'cannot be compared: {column} is 1 in one and 2 in the other' in rejection(judge, path, '--baseline=a')
    assert judge(path, '--baseline=a', '--tuned', column)['same_T']


@pytest.mark.parametrize(('text', 'message'), [
    ('', ': 0 columns optimizer'), ('optimizer,seed,step,loss\na,1,2,3\n', ': 0 columns steps'),
    ('optimizer,seed,steps,loss\na,1,2\n', ':2: not as many columns'),
    ('optimizer,seed,steps,loss\na,1,,3\n', ':2: steps must be a number'),
    ('optimizer,seed,steps,loss\na,1,2,3\na,1,2,4\n', ':3: duplicate row for step 2'),
    ('optimizer,seed,steps,loss\n\n"a\nb",1,2,3\n\n\na,1,2,low\n', ':7: loss must be a number'),
    ('optimizer,seed,steps,loss\n', ': no runs found'),
    ('optimizer,seed,steps,loss,LOSS\na,1,2,3,4\n', ': 2 columns loss'),
    ('optimizer,seed,max_iters,steps,loss\na,1,100,120,3\n', ':2: step 120 is beyond the horizon, 100'),
    ('optimizer,seed,steps,loss,horizon\na,1,2,3,\nb,1,2,3,10%\n', ':3: horizon must be a number')])
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / 'x.csv').write_text(text)
    assert f'{tmp_path}/x.csv{message}' in rejection(runs.find_runs, [tmp_path / 'x.csv'])
    assert f'{tmp_path}/y.csv: no runs found' in rejection(runs.find_runs, [tmp_path / 'y.csv'])
