"""Studies in records/: their pages, pictures and trials agree with the records; preregistered tests."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from scipy import stats

from records.beta2 import results as beta2
from records.board import results as board
from records.dissection import results as dissection
from records.fresh_h import results as fresh_h
from records.gpu_30m import results as gpu_30m
from records.rare_tokens import results as rare_tokens
from records.sharpening import results as sharpening
from records.small_batch import results as small_batch
from records.studies import mean_sd, trials


def rows_in(path):
    return list(csv.DictReader(path.open(encoding='utf-8')))


def as_written(rows):
    return [{key: '' if value is None else str(value) for key, value in row.items()} for row in rows]


def test_the_table_of_the_first_study_agrees_with_its_records():
    study = (ROOT / 'records/study/README.md').read_text(encoding='utf-8')
    for row in rows_in(ROOT / 'records/study/study.csv'):
        T, loss = int(row['T']), mean_sd(float(row['val/loss']), float(row['sd']) if row['seeds'] != '2' else None)
        rate = f'{float(row["learning_rate"]):g} ({row["trials"]})'
        assert f'| {T:,} | {row["optimizer"]} | {rate} | {loss} | {row["seeds"]} |' in study


@pytest.mark.parametrize(('study', 'picture', 'file'), [
    (dissection, 'curves', 'curves.csv'), (dissection, 'gamma', 'dissection.csv'), (gpu_30m, 'curves', 'curves.csv'),
    (fresh_h, 'shares', 'shares.csv'), (small_batch, 'bands', 'bands.csv'), (sharpening, 'norms', 'norms.csv'),
    (rare_tokens, 'losses', 'losses.csv'), (board, 'orders', 'orders.csv'), (beta2, 'losses', 'losses.csv')])
def test_the_page_and_the_picture_of_a_study_agree_with_its_records(study, picture, file):
    found = study.read()
    page = (study.HERE / 'README.md').read_text(encoding='utf-8')
    # board's page has its numbers in other columns.
    assert study is board or all(table in page for table in study.tables(found))
    assert rows_in(study.HERE / file) == as_written(study.DRAWINGS[picture](found)[1])


@pytest.mark.parametrize('path', sorted((ROOT / 'records').glob('*/trials.csv')), ids=lambda path: path.parent.name)
def test_the_trials_of_a_study_are_all_its_runs(path):
    rows = trials(path.parent)
    assert rows_in(path) == as_written(rows)
    assert len(rows) == len((path.parent / 'runs.jsonl').read_text(encoding='utf-8').splitlines())


def seeds(*losses, search=None):
    """Return {seed: a run with this loss}, the search's seed first."""
    return {seed: SimpleNamespace(final_loss=loss, last=lambda key: None)
            for seed, loss in zip((1337, *range(1352, 1360)), (min(losses) if search is None else search, *losses))}


def test_beta2_tests_a_gain_of_at_least_a_tenth_and_counts_what_is_missing():
    long, short = (5.20, 5.21, 5.22), (5.40, 5.42, 5.41)
    groups = {('books', 'adamw', 0.95): {0.004: seeds(*short), 0.0057: seeds(search=6.0)},
              ('books', 'adamw', 0.998): {0.004: seeds(*long)},
              ('books', 'muon', 0.95): {0.004: seeds(*short)}, ('books', 'muon', 0.998): {0.004: seeds(*long[:2])}}
    row, = beta2.planned_tests(groups)
    p = stats.ttest_ind([loss + 0.10 for loss in long], short, equal_var=False, alternative='less').pvalue
    assert row['p'] == pytest.approx(p) and row['p, Holm'] == pytest.approx(6 * p)
    assert row['comparison'] == 'books, AdamW'
    _, table, gains = beta2.tables(groups)
    assert '| books, AdamW | 0.95 | 2 | 0.004 | 5.410 ± 0.010 (3) |' in table
    assert '| books | 0.95 | +0.000 ± 0.0' in gains and gains.count('\n') == 3  # With 0.998 Muon lacks a seed.
    assert len(beta2.DRAWINGS['losses'](groups)[1]) == 11  # every fresh seed
    groups['books', 'adamw', 0.998][0.004][1352].final_loss = math.inf
    assert beta2.planned_tests(groups)[0]['p, Holm'] == 1


@pytest.mark.parametrize('apart', [0.001, -0.011, 0.02])
def test_labels_or_curvature_is_an_equivalence_test_once_its_runs_are_finished(apart):
    losses = [5.30 + i / 1000 for i in range(6)]
    trial = 0.99, 0.004, False
    arms = {'AdamW': {trial: seeds(*losses)}, 'data_adam': {trial: seeds(*[loss + apart for loss in losses])}}
    row, = rare_tokens.planned_tests(arms, rare_tokens.DATA_TESTS)
    below, above = (stats.ttest_ind([loss + apart + side for loss in losses], losses, equal_var=False,
                                    alternative=alternative).pvalue
                    for side, alternative in ((-0.012, 'less'), (0.012, 'greater')))
    assert row['p'] == pytest.approx(max(below, above))
    assert row['p, Holm'] == pytest.approx(min(1, 2 * row['p']))  # The other, unfinished test counts with p = 1.
    assert 'data_adam minus AdamW, within ± 0.012' in rare_tokens.tables(arms)[0]
    del arms['data_adam'][trial][1352]
    assert rare_tokens.planned_tests(arms, rare_tokens.DATA_TESTS) == []


def test_the_program_of_a_study_writes_its_trials_and_pictures(tmp_path, monkeypatch, capsys):
    from records.studies import show_results

    def run(*argv):
        monkeypatch.setattr('sys.argv', ['results.py', *argv])
        show_results('A study.', board.HERE, board.read, board.tables, board.DRAWINGS)
        return capsys.readouterr().out

    run('trials', '--output', f'{tmp_path}/a/trials.csv')
    assert (tmp_path / 'a/trials.csv').read_bytes() == (board.HERE / 'trials.csv').read_bytes()
    monkeypatch.chdir(tmp_path)
    run('orders')
    assert Path('out/orders.png').is_file() and Path('out/orders.csv').read_bytes() == (
        board.HERE / 'orders.csv').read_bytes()
    assert 'ids_4: Spearman 0.61 (-0.30 to 1.00), below 0.8\n' in run('tables')
