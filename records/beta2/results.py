"""Results of this study, from runs.jsonl in this directory, as far as it goes.

  python records/beta2/results.py tables                                        the tables of README.md
  python records/beta2/results.py trials --output records/beta2/trials.csv      every run
  python records/beta2/results.py losses --output records/beta2/losses.png      the fresh seeds
"""

import sys
from pathlib import Path

from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, legend, optimizer_label
from analysis.runs import find_runs, mean_and_sd
from analysis.significance import difference, holm
from records.studies import SEARCH_SEED, interval, losses, markdown, mean_sd, part_of, show_results, texts

SHORT, LONG = BETA2S = 0.95, 0.998
SEEDS = 3  # fresh ones of a finished group
MARGIN = 0.10  # preregistered: LONG ends at least this much below SHORT
TESTS = [('books', 'adamw'), ('books', 'muon'), ('books', 'soap'), ('python', 'adamw'), ('python', 'muon')]
COUNTED = 6  # in Holm's correction: SOAP on Python source was not run, and counts with p = 1
TEXTS = {'books': 'books', 'python': 'Python'}


def read():
    """Return {(text, optimizer, β2): {learning rate: {seed: run}}}, in the order of the protocol."""
    groups = {(text, optimizer, beta2): {} for text, optimizer in TESTS for beta2 in BETA2S}
    for run in find_runs([HERE]):
        rates = groups[part_of(run), run.optimizer_name, run.beta2]
        rates.setdefault(run.learning_rate, {})[run.seed] = run
    return {group: rates for group, rates in groups.items() if rates}


def best_of(rates):
    """Return the learning rate that the search has chosen so far."""
    return min(rates, key=lambda rate: rates[rate][SEARCH_SEED].final_loss)


def fresh(groups):
    """Return {group: losses of its fresh seeds so far}."""
    return {group: losses(run for seed, run in rates[best_of(rates)].items() if seed != SEARCH_SEED)
            for group, rates in groups.items()}


def finished(groups):
    """Return {group: losses of its fresh seeds} of the groups that have all of them."""
    return {group: mine for group, mine in fresh(groups).items() if len(mine) == SEEDS}


def planned_tests(groups):
    """Return a row for each preregistered test whose runs are finished: one-sided Welch tests for a gain of at least
    MARGIN. A test that is not finished counts in Holm's correction with p = 1."""
    found, rows = finished(groups), []
    for text, optimizer in TESTS:
        if {(text, optimizer, beta2) for beta2 in BETA2S} <= found.keys():
            row = difference(found[text, optimizer, LONG], found[text, optimizer, SHORT])
            if row['p'] is not None:
                row['p'] = float(stats.t.cdf((row['difference'] + MARGIN) / row['standard_error'], row['df']))
            rows.append({'comparison': f'{TEXTS[text]}, {optimizer_label(optimizer)}', 'n': f'{SEEDS}, {SEEDS}', **row})
    corrected = holm([row['p'] for row in rows] + [None] * (COUNTED - len(rows)))
    return [row | {'p, Holm': p} for row, p in zip(rows, corrected)]


def group_table(groups):
    """Return a row of texts for each group with fresh seeds: the number of its learning rates, the best one, these
    seeds' losses."""
    rows = []
    for (text, optimizer, beta2), mine in fresh(groups).items():
        if mine:
            rates = groups[text, optimizer, beta2]
            rows.append({'optimizer': f'{TEXTS[text]}, {optimizer_label(optimizer)}', 'β2': f'{beta2:g}',
                         'rates': str(len(rates)), 'best': f'{best_of(rates):g}',
                         'fresh seeds': f'{mean_sd(*mean_and_sd(mine))} ({len(mine)})'})
    return rows


def gains(groups):
    """Return a row of texts for each gain of Muon over AdamW at equal β2 and on one text, exploratory."""
    found = finished(groups)
    pairs = [((text, 'adamw', beta2), (text, 'muon', beta2)) for text in TEXTS for beta2 in BETA2S]
    return [{'text': TEXTS[adamw[0]], 'β2': f'{adamw[2]:g}',
             'Muon over AdamW': interval(difference(found[adamw], found[muon]))}
            for adamw, muon in pairs if {adamw, muon} <= found.keys()]


def tables(groups):
    """Return the tables as Markdown, those without a finished comparison left out: the preregistered tests, the groups,
    the gains."""
    return [markdown(rows) for rows in (texts(planned_tests(groups)), group_table(groups), gains(groups)) if rows]


def draw_losses(groups):
    """Draw the fresh seeds by optimizer and β2, a panel for each text that has some. Return (figure, rows)."""
    found = {group: mine for group, mine in fresh(groups).items() if mine}
    drawn = [text for text in TEXTS if any(text == group[0] for group in found)]
    fig, axes = figure(len(drawn), width=4.4, height=2.6)
    for ax, text in zip(axes, drawn):
        names = [optimizer for other, optimizer in TESTS if other == text]
        for color, beta2 in enumerate(BETA2S):
            mine = [(loss, place) for place, name in enumerate(names) for loss in found.get((text, name, beta2), [])]
            ax.plot([loss for loss, _ in mine], [place for _, place in mine], f'C{color}o', markersize=4, alpha=0.7,
                    label=f'β2 = {beta2}')
        ax.set_yticks(range(len(names)), map(optimizer_label, names))
        ax.set(ylim=(len(names) - 0.5, -0.5), xlabel='validation loss, one point a seed', title=TEXTS[text])
    legend(fig, axes[0])
    return fig, [dict(text=text, optimizer=optimizer, beta2=beta2, loss=loss)
                 for (text, optimizer, beta2), mine in found.items() for loss in mine]


DRAWINGS = dict(losses=draw_losses)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
