"""Results of this study, from runs.jsonl in this directory.

  python records/sharpening/results.py tables                                               the tables of README.md
  python records/sharpening/results.py trials --output out/sharpening.csv                   every run
  python records/sharpening/results.py norms --output records/sharpening/norms.png          ‖h‖ over the steps
"""

import sys
from pathlib import Path
from statistics import geometric_mean, mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, legend, styles
from analysis.runs import find_runs, mean_final_loss
from records.studies import markdown, mean_sd, part_of, show_results

RATE, RATIO = 0.0028, 72  # the learning rate, and γ over it, of the planned statements
ARMS = ['p=0.5', 'p=1', 'rows', 'proportional', 'clipped', 'no_grad_clip', 'beta2=0.97', 'beta2=0.99', 'warmup=300',
        'sign']
COLUMNS = {'last ‖m‖/‖g‖': 'momentum_ratio', 'clipped gradients': 'grad_clipped', 'unclipped': 'update_unclipped',
           'low-noise ‖h‖': 'curvature/all', 'along signs': 'curvature/sign'}


def read():
    """Return {(arm, γ / learning rate): runs, in order of their seeds}."""
    found = {}
    for run in sorted(find_runs([HERE]), key=lambda run: run.seed):
        found.setdefault((part_of(run), round(run.gamma / run.learning_rate)), []).append(run)
    return {key: found[key] for key in sorted(found, key=lambda key: (ARMS.index(key[0]), -key[1]))}


def norms(run):
    """Return (iterations, logged norms of h)."""
    return run.series('hessian_norm')


def largest(runs):
    """Return the largest logged norm of h of each run, infinite where it diverged."""
    return [float('inf') if run.diverged else max(norms(run)[1]) for run in runs]


def last(runs):
    """Return the last logged norm of h of each run."""
    return [norms(run)[1][-1] for run in runs]


def planned(found):
    """Return a row of texts for each planned statement."""
    rows = []
    for ratio, factor in (28, 2), (RATIO, 30):
        one, two = found['p=1', ratio], found['rows', ratio]
        times = geometric_mean(last(one)) / geometric_mean(last(two))
        apart = mean_final_loss(one)[0] - mean_final_loss(two)[0]
        holds = times >= factor and (factor > 2 or abs(apart) <= 0.01)
        rows.append((f'γ/lr = {ratio}: p = 1 ends at least {factor} × as sharp as `rows`',
                     f'{times:.3g} ×, loss {apart:+.3f}', holds))
    for arm in 'proportional', 'clipped':
        base, changed = largest(found['p=1', RATIO]), largest(found[arm, RATIO])
        rows.append((f'`{arm}` stays below 100, p = 1 passes 500', ', '.join(f'{x:.1f}' for x in changed) + '; '
                     + ', '.join(f'{x:,.0f}' for x in base), max(changed) < 100 and min(base) > 500))
    return [{'planned': what, 'found': text, 'holds': 'yes' if holds else '**no**'} for what, text, holds in rows]


def arm_rows(found):
    """Return a row of texts for each arm and γ: means over its seeds, of norms geometric ones."""
    rows = []
    for (arm, ratio), runs in found.items():
        row = {'arm': f'`{arm}`', 'γ/lr': f'{ratio}', 'lr': f'{RATE:g}', 'seeds': f'{len(runs)}',
               'loss ± sd': mean_sd(*mean_final_loss(runs)),
               'largest ‖h‖': ', '.join(f'{x:,.0f}' for x in largest(runs)),
               'last ‖h‖': f'{geometric_mean(last(runs)):,.3g}'}
        for name, key in COLUMNS.items():
            values = [run.last(key) for run in runs]
            average = mean if '‖' not in name else geometric_mean
            row[name] = '' if None in values else f'{average(values):.3g}'
        rows.append(row)
    return rows


def tables(found):
    """Return the tables as Markdown: the planned statements, and all arms."""
    return [markdown(rows) for rows in (planned(found), arm_rows(found))]


def draw_norms(found):
    """Draw the norm of h over the steps at γ/lr = 72, a line for each run. Return (figure, rows)."""
    mine = {arm: runs for (arm, ratio), runs in found.items() if ratio == RATIO}
    fig, (ax,), rows = *figure(width=6.4, height=3.6), []
    for (arm, runs), style in zip(mine.items(), styles([''] * len(mine))):
        for run in runs:
            steps, values = norms(run)
            ax.plot(steps, values, linewidth=1, label=arm if run is runs[0] else None, **style)
            rows += [dict(arm=arm, seed=run.seed, steps=step, norm=value) for step, value in zip(steps, values)]
    ax.axhline(100, color='0.6', linewidth=1, linestyle='--')
    ax.set(yscale='log', xlabel='steps', title='Norm of h, γ / learning rate = 72, a line for each run')
    legend(fig, ax)
    return fig, rows


DRAWINGS = dict(norms=draw_norms)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
