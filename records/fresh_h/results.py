"""Results of this study, from runs.jsonl in this directory.

  python records/fresh_h/results.py tables                                            the tables of README.md
  python records/fresh_h/results.py trials --output records/fresh_h/trials.csv        every run
  python records/fresh_h/results.py shares --output records/fresh_h/shares.png        loss against unclipped share
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, styles
from analysis.runs import find_runs
from analysis.significance import difference, holm
from records.studies import SEARCH_SEED, losses, markdown, part_of, show_results, texts

# Arm → optimizer, β2 and parts of an estimate.
ARMS = {'sign momentum': ('signum', 0, 0), 'fresh': ('sophiag', 0.9, 16), 'permuted': ('gnb_permuted', 0.9, 16),
        'paper': ('sophiag', 0.99, 1), 'mean': ('gnb_mean', 0.9, 16), 'AdamW': ('adamw', 0.95, 0),
        'short memory': ('sophiag', 0.9, 1), 'parts': ('sophiag', 0.99, 16), 'Sophia-H': ('sophiah', 0.99, 0)}


def read():
    return find_runs([HERE])


def arms_of(runs, part):
    """Group the runs of a part: {arm: {(γ, learning rate): {seed: run}}}, γ = 0 for arms without h."""
    arms = {arm: {} for arm in ARMS}
    for run in runs:
        if part_of(run) == part:
            arm = next(arm for arm, row in ARMS.items() if row == (run.optimizer_name, run.beta2, run.hessian_parts))
            arms[arm].setdefault((run.gamma, run.learning_rate), {})[run.seed] = run
    return {arm: trials for arm, trials in arms.items() if trials}


def search_of(trials):
    """Return {γ: {learning rate: run}} of an arm with the search's seed, in order of γ."""
    found = {}
    for (gamma, lr), seeds in sorted(trials.items(), key=lambda item: item[0][0]):
        if SEARCH_SEED in seeds:
            found.setdefault(gamma, {})[lr] = seeds[SEARCH_SEED]
    return found


def fresh(trials):
    """Return the losses of the fresh seeds of an arm, at the settings that have the most of them."""
    return max((losses(run for seed, run in seeds.items() if seed != SEARCH_SEED)
                for seeds in trials.values()), key=len)


def planned_tests(runs):
    """Return a row for each planned test: A's three, corrected by Holm, and C's against part F of the dissection."""
    found = {arm: fresh(trials) for arm, trials in arms_of(runs, 'A').items()}
    rows = [{'comparison': f'A: fresh minus {arm}', 'n': '4, 4', **difference(found['fresh'], found[arm])}
            for arm in ('sign momentum', 'permuted', 'paper')]
    for row, p in zip(rows, holm([row['p'] for row in rows])):
        row['p, Holm'] = p
    sign = losses(find_runs([HERE.with_name('dissection') / 'F']))
    return [*rows, {'comparison': 'C: Sophia-H minus sign momentum', 'n': '6, 6',
                    **difference(fresh(arms_of(runs, 'C')['Sophia-H']), sign)}]


def tables(runs):
    """Return the table of the planned tests as Markdown."""
    return [markdown(texts(planned_tests(runs)))]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_shares(runs):
    """Draw part A: the loss with the search's seed against the unclipped share, each γ at its best learning rate; and
    the planned tests with their 95 % intervals. Return (figure, rows)."""
    rows = []
    for arm, trials in arms_of(runs, 'A').items():
        for gamma, mine in search_of(trials).items():
            best = min(mine.values(), key=lambda run: run.final_loss)
            rows.append(dict(arm=arm, gamma=gamma or None, learning_rate=best.learning_rate,
                             unclipped=best.last('update_unclipped'), loss=best.final_loss))
    fig, (loss, tested) = figure(2, width=4.8, height=3.4)
    with_h = list(dict.fromkeys(row['arm'] for row in rows if row['gamma']))
    for arm, style in zip(with_h, styles([''] * len(with_h))):
        mine = [row for row in rows if row['arm'] == arm]
        loss.plot([row['unclipped'] for row in mine], [row['loss'] for row in mine], 'o-', markersize=4, label=arm,
                  **style)
    for arm, line in ('sign momentum', '--'), ('AdamW', ':'):
        for row in rows:
            if row['arm'] == arm:
                loss.axhline(row['loss'], color='0.4', linestyle=line, label=arm)
    loss.set(xlabel='unclipped share at the end', title='Validation loss, seed of the search')
    loss.legend(frameon=False, fontsize=8)
    tests = [row for row in planned_tests(runs) if row['comparison'].startswith('A: ')]
    for place, row in enumerate(tests):
        tested.errorbar(row['difference'], -place, xerr=row['plus_or_minus'], fmt='o', capsize=4, color='C0')
    tested.axvline(0, color='0.4', linewidth=1)
    tested.locator_params(axis='x', nbins=5)
    tested.set(ylim=(0.5 - max(len(tests), 1), 0.5), title='Difference of the losses, fresh seeds, 95 %')
    tested.set_yticks([-place for place in range(len(tests))],
                      [row['comparison'].removeprefix('A: ').replace(' minus', '\nminus') for row in tests])
    return fig, rows


DRAWINGS = dict(shares=draw_shares)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
