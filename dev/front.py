"""Draw the README's picture, final losses minus AdamW's at 0.8M and 30M parameters, from records/ and nothing else.

  python dev/front.py --output records/front.png
"""

import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from analysis.figures import argparser, figure, save
from analysis.significance import difference
from records.dissection import results as dissection
from records.gpu_30m import results as gpu_30m
from records.studies import SEARCH_SEED, interval, losses, part_of


def panels():
    """Return {title of a panel: {arm: its losses with fresh seeds}}; AdamW is the first arm of each."""
    C = dissection.arms_of(dissection.read(), 'C')
    small = {label: losses(dissection.fresh_runs(C, name, dissection.SIX))
             for name, label in (('adamw', 'AdamW'), ('sophiag', 'Sophia-G'))}
    runs = gpu_30m.read()
    arms = gpu_30m.fresh_arms(runs)
    gamma = next(run.gamma for run in runs if part_of(run) == 'b' and run.optimizer_name == 'sophiag')
    mine = {'AdamW': (*arms['AdamW'], 0.0), **{f'Sophia-G, {rate:g}': (name, rate, gamma)
                                               for name, rate in arms.values() if name == 'sophiag'}}
    large = {label: losses(run for run in runs if run.max_iters == gpu_30m.LONG and run.seed != SEARCH_SEED
                           and (run.optimizer_name, run.learning_rate, run.gamma) == settings)
             for label, settings in mine.items()}
    return {'0.8M parameters, 9,600 steps, both tuned': small,
            '30M parameters, 3,000 steps, Sophia-G at two learning rates': large}


def tests(arms):
    """Return {arm: its `difference` to AdamW}, of the arms of a panel."""
    (_, adamw), *others = arms.items()
    return {label: difference(mine, adamw) for label, mine in others}


def draw(found):
    """Draw a panel for each model: a point for each seed, the mean's 95 % interval, its numbers right of the axis.
    Return (figure, rows)."""
    rows = []
    fig, axes = figure(len(found), width=5.4, height=1.9)
    for ax, (title, arms) in zip(axes, found.items()):
        reference, tested = mean(arms['AdamW']), tests(arms)
        ax.axvline(0, color='0.6', linewidth=1)
        for y, (label, mine) in enumerate(reversed(arms.items())):
            color = 'C0' if label == 'AdamW' else 'C1'
            ax.plot([loss - reference for loss in mine], [y + 0.18] * len(mine), 'o', markersize=4, color=color,
                    alpha=0.6)
            if label in tested:
                ax.errorbar(tested[label]['difference'], y - 0.1, xerr=tested[label]['plus_or_minus'], fmt='D',
                            markersize=5, capsize=4, color=color)
                ax.annotate(interval(tested[label]), (1.02, y), xycoords=('axes fraction', 'data'), va='center',
                            fontsize=9)
            rows.append(dict(panel=title, arm=label, seeds=len(mine), loss=mean(mine), **{
                key: tested.get(label, {}).get(key) for key in ('difference', 'plus_or_minus', 'p')}))
        ax.set(ylim=(-0.6, len(arms) - 0.4), title=title, xlabel="final validation loss minus AdamW's")
        ax.set_yticks(range(len(arms)), [*reversed(arms)])
        ax.title.set_fontsize(10)
    return fig, rows


def main():
    args = argparser(__doc__, 'front.png').parse_args()
    save(args.output, *draw(panels()))


if __name__ == '__main__':
    main()
