"""Results of this study, from runs.jsonl beside this file.

  python records/board/results.py tables                                     the tables of README.md
  python records/board/results.py orders --output records/board/orders.png   final loss against steps at 124M
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure
from analysis.runs import read_packed
from records.board.study import ARMS, GATE, STEPS, TASKS, planned, with_beta2
from records.dissection.results import markdown
from records.studies import Study, recorded, show_results


def runs_of(part, arm):
    return [run for run in read_packed(HERE / 'runs.jsonl')
            if run.out_dir.parent.name == part and run.optimizer_name == arm]


def read_losses():
    """Return {task: {arm: lowest loss of its eight trials, None while some are missing}}; last, once they are complete,
    those of ids_4 with one β2 for all: AdamW's trials with 0.95, and the added runs with 0.998."""
    results = recorded(HERE / 'runs.jsonl')
    study = Study(lambda run: results.get(str(run.path)))
    losses = planned(study)
    short = min(run.final_loss for run in runs_of('ids_4', 'adamw') if run.beta2 == 0.95)
    added = dict(ids_4_short=losses['ids_4'] | dict(adamw=short), ids_4_beta2=losses['ids_4'] | with_beta2(study))
    return losses | {part: mine for part, mine in added.items() if None not in mine.values()}


def correlation(losses):
    """Return Spearman's correlation of a task's losses with the steps at 124M, and its 95 % interval, from 10,000 draws
    of as many arms with replacement."""
    arms, generator = sorted(losses), np.random.default_rng(0)
    pairs = np.array([(losses[arm], STEPS[arm]) for arm in arms])
    drawn = [stats.spearmanr(*pairs[generator.integers(len(arms), size=len(arms))].T)[0] for _ in range(10_000)]
    return stats.spearmanr(*pairs.T)[0], *np.nanquantile(drawn, (0.025, 0.975))


def speed_up(part):
    """Return a task's steps / the first evaluated step at which a run of Muon in `part` has AdamW's lowest final loss,
    None if none has. Muon's learning rate has not decayed there, so its speed-up is at least this."""
    task = part.removesuffix('_beta2')
    target = min(run.final_loss for run in runs_of(task, 'adamw'))
    steps = [step for run in runs_of(part, 'muon') for step, loss in zip(*run.series('val/loss')) if loss <= target]
    return TASKS[task][2] / min(steps) if steps else None


def tables(losses):
    complete = {task: mine for task, mine in losses.items() if None not in mine.values()}
    yield markdown([{'optimizer': arm, 'steps at 124M': f'{STEPS[arm]:,}', **{
        task: f'{mine[arm]:.4f}' if mine[arm] is not None else '' for task, mine in losses.items()}} for arm in ARMS])
    for task, mine in complete.items():
        rho, low, high = correlation(mine)
        faster = speed_up(task) if task != 'ids_4_short' else None
        yield (f'{task}: Spearman {rho:.2f} ({low:.2f} to {high:.2f}), {"at least" if rho >= GATE else "below"} {GATE}'
               + (f'; Muon is at least {faster:.2g} times as fast as AdamW' if faster else ''))


def draw_orders(losses):
    complete = {part: mine for part, mine in losses.items() if None not in mine.values()}
    fig, axes = figure(len(complete))
    for ax, (part, mine) in zip(axes, complete.items()):
        for arm, loss in mine.items():
            ax.plot(STEPS[arm], loss, 'o')
            ax.annotate(arm, (STEPS[arm], loss), fontsize=7)
        ax.set(title=part, xlabel='steps to 3.28 at 124M', ylabel='validation loss', xscale='log')
    return fig, [{'part': part, 'optimizer': arm, 'loss': loss, 'steps': STEPS[arm]}
                 for part, mine in complete.items() for arm, loss in mine.items()]


if __name__ == '__main__':
    show_results(__doc__, 'orders.png', read_losses, tables, dict(orders=draw_orders))
