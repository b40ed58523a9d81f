"""Results of this study, from runs.jsonl in this directory.

  python records/rare_tokens/results.py tables                                              the tables of README.md
  python records/rare_tokens/results.py trials --output records/rare_tokens/trials.csv      every run
  python records/rare_tokens/results.py losses --output records/rare_tokens/losses.png      the arms' fresh seeds
"""

import sys
from pathlib import Path

from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure
from analysis.runs import find_runs, mean_and_sd
from analysis.significance import difference, holm
from records.studies import SEARCH_SEED, losses, markdown, mean_sd, part_of, percent, show_results, texts

# Arm → the setting that was tuned with the learning rate
TUNED = dict.fromkeys(['mean', 'rms', 'mean_embedding', 'fresh_2500', 'rows_2500', 'AdamW', 'root', 'sign_scaled',
                       'rms_embedding', 'sampled_adam', 'data_mean', 'data_adam'], 'gamma')
TUNED |= dict.fromkeys(['AdamW', 'sampled_adam', 'data_adam'], 'beta2')
SEEDS = dict.fromkeys(TUNED, 6) | dict(rms=10, mean=10, data_mean=10)  # fresh seeds of a finished arm
TESTS = [('rms', 'mean'), ('mean_embedding', 'mean'), ('fresh_2500', 'rows_2500'), ('root', 'AdamW')]
DATA_TESTS = [('data_mean', 'mean'), ('data_adam', 'AdamW')]  # preregistered later: labels or curvature?
EQUIVALENCE, EQUIVALENT = [TESTS[0], *DATA_TESTS], 0.012  # these tests are of a difference within ± EQUIVALENT


def read():
    """Return {arm: {(tuned number, learning rate, whether λ is twice the row's): {seed: run}}}."""
    found = {arm: {} for arm in TUNED}
    for run in find_runs([HERE]):
        twice = run.about['provenance']['weight_decay'] == 'flag'
        trial = run.config[TUNED[part_of(run)]], run.learning_rate, twice
        found[part_of(run)].setdefault(trial, {})[run.seed] = run
    return {arm: trials for arm, trials in found.items() if trials}


def best_of(trials):
    """Return the settings of an arm that the search has chosen so far."""
    searched = {trial: seeds[SEARCH_SEED].final_loss for trial, seeds in trials.items() if SEARCH_SEED in seeds}
    return min(searched, key=searched.get)


def fresh(trials):
    """Return the losses of the fresh seeds of an arm so far."""
    return losses(run for seed, run in sorted(trials[best_of(trials)].items()) if seed != SEARCH_SEED)


def planned_tests(arms, pairs=TESTS):
    """Return a row for each of these tests whose runs are finished, with Holm's correction over all; a test that is not
    finished counts there with p = 1, so that the p-values can only fall when it is.

    In a test of equivalence p is the larger one of two one-sided Welch tests against ±EQUIVALENT.
    """
    found = {arm: fresh(trials) for arm, trials in arms.items()}
    finished = {arm: mine for arm, mine in found.items() if len(mine) == SEEDS[arm]}
    rows = []
    for one, two in pairs:
        if {one, two} <= finished.keys():
            row = difference(finished[one], finished[two])
            name = f'{one} minus {two}'
            if (one, two) in EQUIVALENCE and row['p'] is not None:
                inside = (EQUIVALENT - abs(row['difference'])) / row['standard_error']
                row['p'], name = float(stats.t.sf(inside, row['df'])), f'{name}, within ± {EQUIVALENT}'
            rows.append({'comparison': name, 'n': f'{len(finished[one])}, {len(finished[two])}', **row})
    corrected = holm([row['p'] for row in rows] + [None] * (len(pairs) - len(rows)))
    return [row | {'p, Holm': p} for row, p in zip(rows, corrected)]


def arm_table(arms):
    """Return a row of texts for each arm with fresh seeds: what its search has chosen, and their losses."""
    rows = []
    for arm, trials in arms.items():
        tuned, rate, twice = best = best_of(trials)
        searched, mine = trials[best][SEARCH_SEED], fresh(trials)
        if not mine:  # its search has not ended
            continue
        rows.append({'arm': f'`{arm}`', 'runs': f'{sum(map(len, trials.values()))}', 'tuned': f'{tuned:g}',
                     'lr': f'{rate:g}', 'λ': 'twice' if twice else '',
                     'unclipped': percent(searched.last('update_unclipped')),
                     'search': f'{searched.final_loss:.4f}',
                     'fresh seeds': f'{mean_sd(*mean_and_sd(mine))} ({len(mine)})'})
    return rows


def tables(arms):
    """Return the tables as Markdown: the planned tests, those on the true labels once one is finished, the arms."""
    tests = [texts(planned_tests(arms, pairs)) for pairs in (TESTS, DATA_TESTS)]
    return [markdown(rows) for rows in (*tests, arm_table(arms)) if rows]


def draw_losses(arms):
    """Draw the fresh seeds of each arm. Return (figure, rows)."""
    found = {arm: mine for arm, trials in arms.items() if (mine := fresh(trials))}
    rows = [dict(arm=arm, loss=loss) for arm, mine in found.items() for loss in mine]
    fig, (ax,) = figure(width=6.0, height=1.0 + 0.35 * len(found))
    for place, mine in enumerate(found.values()):
        ax.plot(mine, [place] * len(mine), 'o', markersize=4, alpha=0.7)
    ax.set_yticks(range(len(found)), [*found])
    ax.invert_yaxis()
    ax.set(xlabel='validation loss, one point a seed')
    return fig, rows


DRAWINGS = dict(losses=draw_losses)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
