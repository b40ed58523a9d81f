"""Results of this study, from runs.jsonl beside this file.

  python records/rare_tokens/results.py tables                                              the tables of README.md
  python records/rare_tokens/results.py losses --output records/rare_tokens/losses.png      the arms' fresh seeds
"""

import sys
from pathlib import Path

from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure
from analysis.runs import mean_and_sd
from analysis.significance import difference, holm
from records.dissection.results import markdown, mean_sd, texts
from records.rare_tokens.study import ARMS, EQUIVALENT, MORE, SEEDS, TESTS
from records.search import SEARCH_SEED
from records.studies import recorded, show_results


def read_arms():
    """Return {arm: {(tuned number, learning rate, λ or None): {seed: `Result`}}}."""
    found = {}
    for name, result in recorded(HERE / 'runs.jsonl').items():
        arm, words = name.split('/')
        settings = {key: float(value) for key, value in (word.split('=') for word in words.split(',')[1:])}
        tuned = settings[ARMS[arm][3][0]]
        trial = tuned, settings['learning_rate'], settings.get('weight_decay')
        found.setdefault(arm, {}).setdefault(trial, {})[int(settings['seed'])] = result
    return {arm: found[arm] for arm in ARMS if arm in found}


def best_of(trials):
    """Return the settings of an arm that the search has chosen so far."""
    searched = {trial: seeds[SEARCH_SEED].loss for trial, seeds in trials.items() if SEARCH_SEED in seeds}
    return min(searched, key=searched.get)


def fresh(arm, trials):
    """Return the losses of the fresh seeds of an arm so far, and whether all are there."""
    seeds = [*SEEDS, *(MORE if arm in TESTS[0] else ())]
    results = trials[best_of(trials)]
    return [results[seed].loss for seed in seeds if seed in results], {*seeds} <= results.keys()


def planned_tests(arms):
    """Return a row for each planned test whose runs are finished, with Holm's correction over four; a test that is not
    finished counts there with p = 1, so that the p-values can only fall when it is.

    The first test is of equivalence: its p is the larger one of two one-sided Welch tests against ±EQUIVALENT.
    """
    found = {arm: fresh(arm, trials) for arm, trials in arms.items()}
    losses = {arm: mine for arm, (mine, complete) in found.items() if complete}
    rows = []
    for one, two in TESTS:
        if {one, two} <= losses.keys():
            row = difference(losses[one], losses[two])
            name = f'{one} minus {two}'
            if (one, two) == TESTS[0]:
                inside = (EQUIVALENT - abs(row['difference'])) / row['standard_error']
                row['p'], name = float(stats.t.sf(inside, row['df'])), f'{name}, within ± {EQUIVALENT}'
            rows.append({'comparison': name, 'n': f'{len(losses[one])}, {len(losses[two])}', **row})
    corrected = holm([row['p'] for row in rows] + [None] * (len(TESTS) - len(rows)))
    return [row | {'p, Holm': p} for row, p in zip(rows, corrected)]


def arm_table(arms):
    """Return a row of texts for each arm: what its search has chosen, and its losses."""
    rows = []
    for arm, trials in arms.items():
        tuned, rate, decay = best = best_of(trials)
        searched = trials[best][SEARCH_SEED]
        losses, _ = fresh(arm, trials)
        unclipped = searched.unclipped if arm != 'AdamW' else None
        rows.append({'arm': f'`{arm}`', 'runs': f'{sum(map(len, trials.values()))}', 'tuned': f'{tuned:g}',
                     'lr': f'{rate:g}', 'λ': 'twice' if decay else '',
                     'unclipped': '' if unclipped is None else f'{unclipped:.0%}'.replace('%', ' %'),
                     'search': f'{searched.loss:.4f}',
                     'fresh seeds': f'{mean_sd(*mean_and_sd(losses))} ({len(losses)})' if losses else ''})
    return rows


def trial_table(arms):
    """Return a row of texts for each trial of the searches."""
    return [{'arm': f'`{arm}`', 'tuned': f'{tuned:g}', 'lr': f'{rate:g}', 'λ': 'twice' if decay else '',
             'loss': f'{seeds[SEARCH_SEED].loss:.4f}'}
            for arm, trials in arms.items()
            for (tuned, rate, decay), seeds in sorted(trials.items(), key=lambda item: (item[0][1], item[0][0]))
            if SEARCH_SEED in seeds]


def tables(arms):
    """Return the tables as Markdown: the planned tests, the arms, all trials."""
    return [markdown(rows) for rows in (texts(planned_tests(arms)), arm_table(arms), trial_table(arms)) if rows]


def draw_losses(arms):
    """Draw the fresh seeds of each arm. Return (figure, rows)."""
    losses = {arm: found for arm, trials in arms.items() if (found := fresh(arm, trials)[0])}
    rows = [dict(arm=arm, loss=loss) for arm, found in losses.items() for loss in found]
    fig, (ax,) = figure(width=6.0, height=1.0 + 0.35 * len(losses))
    for place, found in enumerate(losses.values()):
        ax.plot(found, [place] * len(found), 'o', markersize=4, alpha=0.7)
    ax.set_yticks(range(len(losses)), [*losses])
    ax.invert_yaxis()
    ax.set(xlabel='validation loss, one point a seed')
    return fig, rows


if __name__ == '__main__':
    show_results(__doc__, 'losses.png', read_arms, tables, dict(losses=draw_losses))
