"""Results of this study, from runs.jsonl in this directory.

  python records/gpu_30m/results.py tables                                              the tables of README.md
  python records/gpu_30m/results.py trials --output records/gpu_30m/trials.csv          every run
  python records/gpu_30m/results.py curves --output records/gpu_30m/curves.png          losses, and the norm of h
"""

import math
import sys
from pathlib import Path
from statistics import mean, median

from scipy.stats import mannwhitneyu

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, optimizer_label, styles
from analysis.runs import find_runs
from analysis.significance import difference, holm
from records.studies import SEARCH_SEED, interval, markdown, part_of, show_results

LOSSES = {'other books': 'val/loss', 'held-out text': 'val/loss/heldout'}
OPTIMIZERS = ['adamw', 'sophiag', 'signum']
LONG, HALF = 3000, 1500  # steps
STABLE_SEEDS = range(1341, 1345)  # of part F
LOWER_GAMMA, ADAMW_DECAY = 0.05, 1.2  # ADAMW_DECAY: gives sign momentum AdamW's lr·λ, 4.8e-4
PAIRS = {1: {('sophiag', 1341), ('signum', 1341)}, 2: {('sophiag', 1342), ('sophiag', 1343)},
         3: {('sophiag', 1344), ('lower γ', 1338)}, 4: {('lower γ', 1339), ('decay', 1341)}}


def read():
    return find_runs([HERE])


def fresh_runs(runs, optimizer, rate):
    """Return the runs of an arm with the fresh seeds of parts B to E."""
    return [run for run in runs if (run.optimizer_name, run.learning_rate) == (optimizer, rate)
            and part_of(run) in 'bcde' and run.seed != SEARCH_SEED]


def fresh_losses(runs, optimizer, rate, key):
    """Return ({seed: loss} after 3,000 steps, {column: loss} of half of the steps) with fresh seeds."""
    mine = fresh_runs(runs, optimizer, rate)
    return ({run.seed: run.final(key) for run in mine if run.max_iters == LONG},
            {f'T = {run.max_iters:,}, seed {run.seed}': run.final(key) for run in mine
             if run.max_iters == HALF})


def fresh_arms(runs):
    """Return {name: (optimizer, learning rate)}: the arms at their best rates, and Sophia-G at part E's."""
    best = {run.optimizer_name: run.learning_rate for run in runs if part_of(run) == 'b'}
    lower = next(run.learning_rate for run in runs if part_of(run) == 'e')
    return {optimizer_label(name): (name, best[name]) for name in OPTIMIZERS} | {
        f'Sophia-G, {lower:g}': ('sophiag', lower)}


def fresh_table(runs):
    """Return a row of texts for each arm and each comparison of losses on other books: fresh seeds, mean, p, part C.

    The mean of a comparison has its 95 % interval. p is Holm's over the two planned comparisons; without correction for
    the two with part E's rate, which were added.
    """
    losses = {name: fresh_losses(runs, *arm, 'val/loss') for name, arm in fresh_arms(runs).items()}
    rows = [{'fresh seeds': name} | {column: f'{loss:.3f}'
                                     for column, loss in by_column(long, half, mean(long.values())).items()}
            for name, (long, half) in losses.items()]
    tests = {(one, two): difference(list(losses[one][0].values()), list(losses[two][0].values()))
             for one in losses if one.startswith('Sophia-G') for two in ('Sign momentum', 'AdamW')}
    corrected = holm([tests['Sophia-G', two]['p'] for two in ('Sign momentum', 'AdamW')])
    for (one, two), test in tests.items():
        long, half = (minus(*pair) for pair in zip(losses[one], losses[two]))
        columns = signed(by_column(long, half, test['difference']))
        p = corrected.pop(0) if one == 'Sophia-G' else test['p']
        rows.append({'fresh seeds': f'{one} minus {two}', **columns, 'mean': interval(test), 'p': f'{p:.2f}'})
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns.sort(key=lambda column: column.startswith('T = '))
    return [{column: row.get(column) for column in columns} for row in rows]


def stable_table(runs):
    """Return a row of texts for each run of part F: its losses, and at the end the norm of h, the unclipped share and
    the median of ‖m‖/‖g‖ over the last 200 steps."""
    rows = []
    for run in sorted((run for run in runs if part_of(run) == 'f'), key=pair_of):
        different = [f'γ = {run.gamma:g}'] * (run.gamma == LOWER_GAMMA) + [
            f'λ = {run.weight_decay:g}'] * (run.weight_decay == ADAMW_DECAY)
        h, share = run.last('hessian_norm'), run.last('update_unclipped')
        rows.append({'pair': f'{pair_of(run)}', 'arm': ', '.join([optimizer_label(run.optimizer_name), *different]),
                     'learning rate': f'{run.learning_rate:g}', 'seed': f'{run.seed}',
                     **{place: f'{run.final(key):.3f}' for place, key in LOSSES.items()},
                     'norm of h': f'{h:,.1f}' if h else None, 'unclipped': f'{share:.0%}' if share else None,
                     '‖m‖/‖g‖': f'{median(ratios(run)[-10:]):.2f}'})
    return rows


def pair_of(run):
    """Return the number of the pair of part F that a run belongs to."""
    what = 'lower γ' if run.gamma == LOWER_GAMMA else 'decay' if run.weight_decay == ADAMW_DECAY else run.optimizer_name
    return next(pair for pair, runs in PAIRS.items() if (what, run.seed) in runs)


def ratios(run):
    """Return ‖m‖/‖g‖ of each logged step of a run."""
    return [m / g for m, g in zip(run.series('momentum_norm')[1], run.series('grad_norm')[1])]


def rank_tests(runs):
    """Return a row of texts for each look at part F's planned test, after the pairs 2 and 3: the exact rank sum,
    one-sided, of Sophia-G's fresh seeds against sign momentum's four, on other books. Corrected: for both looks."""
    *_, (_, lower) = fresh_arms(runs).values()
    stable = {run.seed: run.final_loss for run in runs if part_of(run) == 'f' and run.optimizer_name == 'sophiag'
              and run.learning_rate == lower}
    sign = [run.final_loss for run in runs if run.optimizer_name == 'signum' and run.seed != SEARCH_SEED
            and run.weight_decay != ADAMW_DECAY]
    rows = []
    for pair, seeds in {2: STABLE_SEEDS[:3], 3: STABLE_SEEDS}.items():
        if all(seed in stable for seed in seeds) and len(sign) == 4:
            mine = [stable[seed] for seed in seeds]
            p = mannwhitneyu(mine, sign, alternative='less', method='exact').pvalue
            rows.append({'after pair': f'{pair}', 'Sophia-G': f'{len(mine)}', 'sign momentum': f'{len(sign)}',
                         'difference of means': interval(difference(mine, sign)), 'p': f'{p:.3f}',
                         'p, corrected': f'{min(1, 2 * p):.3f}'})
    return rows


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
    return [markdown(rows) for rows in (fresh_table(runs), stable_table(runs), rank_tests(runs))]


def draw_curves(runs):
    """Draw the training loss of the fresh seeds minus AdamW's, and the norm of h in Sophia-G's runs of 3,000 steps.
    Return (figure, rows)."""
    fig, (apart, norm) = figure(2, width=4.8, height=3.5)
    long = [run for run in runs if run.max_iters == LONG]
    arms = fresh_arms(runs)
    means = {name: smoothed(fresh_runs(long, *arm)) for name, arm in arms.items()}
    for name, style in zip(arms, styles(arms)):
        apart.plot(list(means[name]), [loss - means['AdamW'][step] for step, loss in means[name].items()],
                   label=name, **style)
    apart.set(ylim=(-0.02, 0.2), xlabel='steps', title="Training loss minus AdamW's, three fresh seeds")
    apart.legend(frameon=False, fontsize=8, loc='upper right')
    sophia = [run for run in long if run.optimizer_name == 'sophiag']
    clips = sorted({(run.learning_rate, run.gamma) for run in sophia})
    for (rate, gamma), style in zip(clips, styles(clips)):
        mine = [run for run in sophia if (run.learning_rate, run.gamma) == (rate, gamma)]
        label = f'{rate:g}, γ = {gamma:g}, {len(mine)} seed{"s" * (len(mine) > 1)}'
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


DRAWINGS = dict(curves=draw_curves)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
