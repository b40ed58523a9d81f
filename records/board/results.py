"""Results of this study, from runs.jsonl in this directory.

  python records/board/results.py tables                                     the tables of README.md
  python records/board/results.py trials --output records/board/trials.csv   every run
  python records/board/results.py orders --output records/board/orders.png   final loss against steps at 124M
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure
from analysis.runs import find_runs
from records.studies import losses, markdown, part_of, show_results

TASKS = {'ids_4': 2400, 'bytes_32': 600, 'ids_32': 600}  # → steps
# Steps to a validation loss of 3.28 on FineWeb with GPT-2 of 124M, modded-nanogpt's track 3 at f411b3d: README.md.
STEPS = {'adamw': 4950, 'lion': 12250, 'signum': 13500, 'muon': 3250, 'normuon': 3250, 'soap': 3125, 'shampoo': 4100,
         'shampoo_one_sided': 3375}
GATE = 0.8  # Spearman's correlation of the final losses with these steps, on one task


def read():
    """Return {(task, arm): runs}."""
    found = {}
    for run in find_runs([HERE]):
        found.setdefault((part_of(run), run.optimizer_name), []).append(run)
    return found


def lowest(runs):
    """Return {task: {arm: lowest loss of its eight trials, None while it has none}}; last those of ids_4 with one β2
    for all: AdamW's trials with 0.95, and the added runs with 0.998."""
    found = {task: {arm: min(losses(runs.get((task, arm), [])), default=None) for arm in STEPS} for task in TASKS}
    short = min(losses(run for run in runs['ids_4', 'adamw'] if run.beta2 == 0.95))
    added = {arm: min(losses(runs['ids_4_beta2', arm])) for arm in STEPS if ('ids_4_beta2', arm) in runs}
    return found | dict(ids_4_short=found['ids_4'] | dict(adamw=short), ids_4_beta2=found['ids_4'] | added)


def correlation(losses):
    """Return Spearman's correlation of a task's losses with the steps at 124M, and its 95 % interval, from 10,000 draws
    of as many arms with replacement."""
    arms, generator = sorted(losses), np.random.default_rng(0)
    pairs = np.array([(losses[arm], STEPS[arm]) for arm in arms])
    drawn = [stats.spearmanr(*pairs[generator.integers(len(arms), size=len(arms))].T)[0] for _ in range(10_000)]
    return stats.spearmanr(*pairs.T)[0], *np.nanquantile(drawn, (0.025, 0.975))


def speed_up(runs, part):
    """Return a task's steps / the first evaluated step at which a run of Muon in `part` has AdamW's lowest final loss,
    None if none has. Muon's learning rate has not decayed there, so its speed-up is at least this."""
    task = part.removesuffix('_beta2')
    target = min(losses(runs[task, 'adamw']))
    steps = [step for run in runs[part, 'muon'] for step, loss in zip(*run.series('val/loss')) if loss <= target]
    return TASKS[task] / min(steps) if steps else None


def complete(runs):
    """Return the tasks of `lowest` that have a loss for each arm."""
    return {task: mine for task, mine in lowest(runs).items() if None not in mine.values()}


def tables(runs):
    yield markdown([{'optimizer': arm, 'steps at 124M': f'{STEPS[arm]:,}', **{
        task: f'{mine[arm]:.4f}' if mine[arm] is not None else '' for task, mine in lowest(runs).items()}}
        for arm in STEPS])
    for task, mine in complete(runs).items():
        rho, low, high = correlation(mine)
        faster = speed_up(runs, task) if task != 'ids_4_short' else None
        yield (f'{task}: Spearman {rho:.2f} ({low:.2f} to {high:.2f}), {"at least" if rho >= GATE else "below"} {GATE}'
               + (f'; Muon is at least {faster:.2g} times as fast as AdamW' if faster else ''))


def draw_orders(runs):
    fig, axes = figure(len(complete(runs)))
    for ax, (part, mine) in zip(axes, complete(runs).items()):
        for arm, loss in mine.items():
            ax.plot(STEPS[arm], loss, 'o')
            ax.annotate(arm, (STEPS[arm], loss), fontsize=7)
        ax.set(title=part, xlabel='steps to 3.28 at 124M', ylabel='validation loss', xscale='log')
    return fig, [{'part': part, 'optimizer': arm, 'loss': loss, 'steps': STEPS[arm]}
                 for part, mine in complete(runs).items() for arm, loss in mine.items()]


DRAWINGS = dict(orders=draw_orders)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
