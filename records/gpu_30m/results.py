"""Results of this study, from runs.jsonl beside this file.

  python records/gpu_30m/results.py tables                                              the tables of README.md
  python records/gpu_30m/results.py curves --output records/gpu_30m/curves.png          losses, and the norm of h
"""

import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, optimizer_label, styles
from analysis.runs import find_runs
from records.dissection.results import interval, markdown
from records.gpu_30m.study import ARMS, LONG, SEARCH_SEED, THREE
from records.studies import part_of, show_results

LOSSES = {'other books': 'val/loss', 'held-out text': 'val/loss/heldout'}
OPTIMIZERS = [ARMS[arm][0] for arm in THREE]
COMPARISONS = ('sophiag', 'clip'), ('sophiag', 'adamw')  # primary, secondary


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
            mine = {lr: format(search[name, lr].last(key), digits) for lr in rates if (name, lr) in search}
            rows.append({f'seed {SEARCH_SEED}': optimizer_label(name), 'value': what,
                         **{f'{lr:g}': mine.get(lr, '') for lr in rates}})
    return rows


def fresh_losses(runs, optimizer, key):
    """Return {column: loss} of an optimizer: each fresh seed, their mean, and half of the steps (part C)."""
    mine = {run.seed: run.last(key) for run in runs if part_of(run) == 'b' and run.optimizer_name == optimizer}
    half = {f'T = {run.max_iters:,}, seed {run.seed}': run.last(key) for run in runs
            if part_of(run) == 'c' and run.optimizer_name == optimizer}
    return {f'seed {seed}': mine[seed] for seed in sorted(mine)} | {'mean': mean(mine.values())} | half


def fresh_table(runs):
    """Return a row of texts for each optimizer and each comparison, for both losses: fresh seeds, mean, part C."""
    rows = []
    for place, key in LOSSES.items():
        losses = {name: fresh_losses(runs, name, key) for name in OPTIMIZERS}
        rows += [{'fresh seeds': optimizer_label(name), 'loss on': place,
                  **{column: f'{loss:.3f}' for column, loss in losses[name].items()}} for name in OPTIMIZERS]
        for one, two in COMPARISONS:
            apart = {column: losses[one][column] - losses[two][column] for column in losses[two]}
            rows.append({'fresh seeds': f'{optimizer_label(one)} minus {optimizer_label(two)}', 'loss on': place,
                         **{column: interval(dict(difference=d, p=None)) for column, d in apart.items()}})
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column) for column in columns} for row in rows]


def tables(runs):
    """Return the tables of README.md, in its order."""
    return [markdown(rows) for rows in (search_table(runs), fresh_table(runs))]


def draw_curves(runs):
    """Draw the training loss of the fresh seeds minus AdamW's, and the norm of h in Sophia-G's runs of 3,000 steps.
    Return (figure, rows)."""
    fig, (apart, norm) = figure(2, width=4.8, height=3.5)
    fresh = {name: [run for run in runs if part_of(run) == 'b' and run.optimizer_name == name] for name in OPTIMIZERS}
    means = {name: smoothed(fresh[name]) for name in OPTIMIZERS}
    for name, style in zip(OPTIMIZERS, styles(OPTIMIZERS)):
        apart.plot(list(means[name]), [loss - means['adamw'][step] for step, loss in means[name].items()],
                   label=optimizer_label(name), **style)
    apart.set(ylim=(-0.1, 0.2), xlabel='steps', title="Training loss minus AdamW's, two fresh seeds")
    apart.legend(frameon=False, fontsize=8)
    sophia = [run for run in runs if run.optimizer_name == 'sophiag' and run.max_iters == LONG['max_iters']]
    sophia.sort(key=lambda run: (run.learning_rate, run.seed))
    for run, style in zip(sophia, styles([''] * len(sophia))):
        norm.plot(*run.series('hessian_norm'), label=f'{run.learning_rate:g}, seed {run.seed}', **style)
    norm.set(yscale='log', xlabel='steps', title='Norm of h, Sophia-G, by learning rate')
    norm.legend(frameon=False, fontsize=8)
    for ax in (apart, norm):
        ax.xaxis.set_major_formatter('{x:,.0f}')
    return fig, [dict(optimizer=name, steps=step, train_loss=loss) for name in OPTIMIZERS
                 for step, loss in means[name].items()]


def smoothed(runs, width=100):
    """Return {step: mean training loss of `runs` in the `width` steps around it}, in order of steps."""
    losses = {}
    for run in runs:
        for step, loss in zip(*run.series('train/loss')):
            losses.setdefault(step // width * width + width // 2, []).append(loss)
    return {step: mean(losses[step]) for step in sorted(losses)}


if __name__ == '__main__':
    show_results(__doc__, 'curves.png', read_runs, tables, dict(curves=draw_curves))
