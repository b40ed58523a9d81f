"""Results of this study, from runs.jsonl beside this file.

  python records/gpu_30m/results.py tables                                              the tables of README.md
  python records/gpu_30m/results.py curves --output records/gpu_30m/curves.png          losses, and the norm of h
"""

import math
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, optimizer_label, styles
from analysis.runs import find_runs
from analysis.significance import difference, holm
from records.dissection.results import interval, markdown
from records.gpu_30m.study import ARMS, HALF, LONG, SEARCH_SEED, STABLE_SEEDS, THREE
from records.studies import part_of, show_results

LOSSES = {'other books': 'val/loss', 'held-out text': 'val/loss/heldout'}
OPTIMIZERS = [ARMS[arm][0] for arm in THREE]
STABLE = [ARMS[arm][0] for arm in ('Sophia-G', 'sign momentum', 'permuted')]  # of part F


def read_runs():
    """Return the runs of this study."""
    return find_runs([HERE])


def search_table(runs):
    """Return a row of texts for each optimizer: the two losses with the search's seed at each learning rate, and for
    Sophia-G the unclipped share at the end."""
    search = {(run.optimizer_name, run.learning_rate): run for run in runs
              if part_of(run) == 'a' and run.max_iters == LONG['max_iters']}
    rates = sorted({lr for _, lr in search})
    rows = []
    for name in OPTIMIZERS:
        for what, key, digits in [*((place, key, '.3f') for place, key in LOSSES.items()),
                                  *[('unclipped', 'update_unclipped', '.2f')] * (name == 'sophiag')]:
            mine = {lr: format(search[name, lr].final(key), digits) for lr in rates if (name, lr) in search}
            rows.append({f'seed {SEARCH_SEED}': optimizer_label(name), 'value': what,
                         **{f'{lr:g}': mine.get(lr, '') for lr in rates}})
    return rows


def fresh_runs(runs, optimizer, rate):
    """Return the runs of an arm with the fresh seeds of parts B to E."""
    return [run for run in runs if (run.optimizer_name, run.learning_rate) == (optimizer, rate)
            and part_of(run) in 'bcde' and run.seed != SEARCH_SEED]


def fresh_losses(runs, optimizer, rate, key):
    """Return ({seed: loss} after 3,000 steps, {column: loss} of half of the steps) with fresh seeds."""
    mine = fresh_runs(runs, optimizer, rate)
    return ({run.seed: run.final(key) for run in mine if run.max_iters == LONG['max_iters']},
            {f'T = {run.max_iters:,}, seed {run.seed}': run.final(key) for run in mine
             if run.max_iters == HALF['max_iters']})


def fresh_arms(runs):
    """Return {name: (optimizer, learning rate)}: the arms at their best rates, and Sophia-G at part E's."""
    best = {run.optimizer_name: run.learning_rate for run in runs if part_of(run) == 'b'}
    lower = next(run.learning_rate for run in runs if part_of(run) == 'e')
    return {optimizer_label(name): (name, best[name]) for name in OPTIMIZERS} | {
        f'Sophia-G, {lower:g}': ('sophiag', lower)}


def fresh_table(runs):
    """Return a row of texts for each arm and each comparison, for both losses: fresh seeds, mean, p, part C.

    The mean of a comparison has its 95 % interval. p is Holm's over the two planned comparisons; without correction for
    the two with part E's rate, which were added.
    """
    rows, arms = [], fresh_arms(runs)
    for place, key in LOSSES.items():
        losses = {name: fresh_losses(runs, *arm, key) for name, arm in arms.items()}
        for name, (long, half) in losses.items():
            rows.append({'fresh seeds': name, 'loss on': place} | {
                column: f'{loss:.3f}' for column, loss in by_column(long, half, mean(long.values())).items()})
        tests = {(one, two): difference(list(losses[one][0].values()), list(losses[two][0].values()))
                 for one in losses if one.startswith('Sophia-G') for two in ('Sign momentum', 'AdamW')}
        corrected = holm([tests['Sophia-G', two]['p'] for two in ('Sign momentum', 'AdamW')])
        for (one, two), test in tests.items():
            long, half = (minus(*pair) for pair in zip(losses[one], losses[two]))
            columns = signed(by_column(long, half, test['difference']))
            p = corrected.pop(0) if one == 'Sophia-G' else test['p']
            rows.append({'fresh seeds': f'{one} minus {two}', 'loss on': place,
                         **columns, 'mean': interval(test), 'p': f'{p:.2f}'})
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns.sort(key=lambda column: column.startswith('T = '))
    return [{column: row.get(column) for column in columns} for row in rows]


def stable_table(runs):
    """Return a row of texts for each arm and each planned test of part F; none before all of its runs are there. A loss
    has a norm of h beside it where that ends above 50. An arm of which a run diverged has neither mean nor test."""
    found = {name: {run.seed: run for run in runs if part_of(run) == 'f' and run.optimizer_name == name}
             for name in STABLE}
    if not all(set(mine) == set(STABLE_SEEDS) for mine in found.values()):
        return []
    arms = {name: {seed: run.final_loss for seed, run in mine.items()} for name, mine in found.items()}
    rows = [{'part F': optimizer_label(name), **{f'seed {seed}': how_it_ended(mine[seed]) for seed in STABLE_SEEDS},
             'mean': f'{mean(arms[name].values()):.3f}' if math.inf not in arms[name].values() else None,
             'p, Holm': None} for name, mine in found.items()]
    sophia, *others = STABLE
    tests = [difference(list(arms[sophia].values()), list(arms[other].values())) for other in others]
    for other, test, p in zip(others, tests, holm([test['p'] for test in tests])):
        apart = signed({f'seed {seed}': d for seed, d in minus(arms[sophia], arms[other]).items()})
        tested = test['p'] is not None
        rows.append({'part F': f'{optimizer_label(sophia)} minus {optimizer_label(other)}', **apart,
                     'mean': interval(test) if tested else None, 'p, Holm': f'{p:.2g}' if tested else None})
    return rows


def how_it_ended(run):
    """Return the final loss of a run as text, with the norm of h if that is above 50."""
    if run.diverged:
        return 'diverged'
    h = run.last('hessian_norm') or 0  # sign momentum has none
    return f'{run.last("val/loss"):.3f}' + (f' (norm of h {h:,.0f})' if h > 50 else '')


def by_column(long, half, average):
    """Return {column: value} from {seed: value}, {column: value} and the mean over the seeds."""
    return {f'seed {seed}': long[seed] for seed in sorted(long)} | {'mean': average} | half


def signed(differences):
    """Return the texts of a dict of differences, '' for a run that diverged."""
    return {key: interval(dict(difference=d, p=None)) if math.isfinite(d) else '' for key, d in differences.items()}


def minus(one, two):
    """Return {key: difference} for the keys of both."""
    return {key: one[key] - two[key] for key in one if key in two}


def tables(runs):
    """Return the tables of README.md, in its order."""
    return [markdown(rows) for rows in (search_table(runs), fresh_table(runs), stable_table(runs)) if rows]


def draw_curves(runs):
    """Draw the training loss of the fresh seeds minus AdamW's, and the norm of h in Sophia-G's runs of 3,000 steps.
    Return (figure, rows)."""
    fig, (apart, norm) = figure(2, width=4.8, height=3.5)
    long = [run for run in runs if run.max_iters == LONG['max_iters']]
    arms = fresh_arms(runs)
    means = {name: smoothed(fresh_runs(long, *arm)) for name, arm in arms.items()}
    for name, style in zip(arms, styles(arms)):
        apart.plot(list(means[name]), [loss - means['AdamW'][step] for step, loss in means[name].items()],
                   label=name, **style)
    apart.set(ylim=(-0.02, 0.2), xlabel='steps', title="Training loss minus AdamW's, three fresh seeds")
    apart.legend(frameon=False, fontsize=8, loc='upper right')
    sophia = sorted((run for run in long if run.optimizer_name == 'sophiag'), key=lambda run: run.learning_rate)
    rates = list(dict.fromkeys(run.learning_rate for run in sophia))
    for rate, style in zip(rates, styles(rates)):
        mine = [run for run in sophia if run.learning_rate == rate]
        label = f'{rate:g}, {len(mine)} seed{"s" * (len(mine) > 1)}'
        for run in mine:
            norm.plot(*run.series('hessian_norm'), label=label if run is mine[0] else None, **style)
    norm.set(yscale='log', xlabel='steps', title='Norm of h, Sophia-G, by learning rate')
    norm.legend(frameon=False, fontsize=8)
    for ax in (apart, norm):
        ax.xaxis.set_major_formatter('{x:,.0f}')
    return fig, [dict(arm=name, steps=step, train_loss=loss) for name in arms for step, loss in means[name].items()]


def smoothed(runs, width=100):
    """Return {step: mean training loss of `runs` in the `width` steps around it}, in order of steps."""
    losses = {}
    for run in runs:
        for step, loss in zip(*run.series('train/loss')):
            losses.setdefault(step // width * width + width // 2, []).append(loss)
    return {step: mean(losses[step]) for step in sorted(losses)}


if __name__ == '__main__':
    show_results(__doc__, 'curves.png', read_runs, tables, dict(curves=draw_curves))
