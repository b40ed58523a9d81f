"""Results of this study, from runs.jsonl beside this file.

  python records/sharpening/results.py tables                                               the tables of README.md
  python records/sharpening/results.py norms --output records/sharpening/norms.png          ‖h‖ over the steps
"""

import sys
from pathlib import Path
from statistics import geometric_mean, mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, legend, styles
from analysis.runs import mean_final_loss, read_packed
from records.dissection.results import markdown, mean_sd
from records.sharpening.study import ARMS, RATES, RATIOS
from records.studies import show_results

COLUMNS = {'last ‖m‖/‖g‖': 'momentum_ratio', 'clipped gradients': 'grad_clipped', 'unclipped': 'update_unclipped',
           'low-noise ‖h‖': 'curvature/all', 'along signs': 'curvature/sign'}


def read_runs():
    """Return {(arm, γ / learning rate, learning rate): runs, in order of their seeds}."""
    found = {}
    for run in sorted(read_packed(HERE / 'runs.jsonl'), key=lambda run: run.seed):
        key = run.out_dir.parent.name, round(run.gamma / run.learning_rate), run.learning_rate
        found.setdefault(key, []).append(run)
    return {key: found[key] for key in sorted(found, key=lambda key: (key[2], [*ARMS].index(key[0]), -key[1]))}


def norms(run):
    """Return (iterations, logged norms of h)."""
    return run.series('hessian_norm')


def largest(runs):
    """Return the largest logged norm of h of each run, infinite where it diverged."""
    return [float('inf') if run.diverged else max(norms(run)[1]) for run in runs]


def last(runs):
    """Return the last logged norm of h of each run."""
    return [norms(run)[1][-1] for run in runs]


def planned(found, rate=RATES[0]):
    """Return a row of texts for each planned statement whose runs are finished."""
    complete = {key: runs for key, runs in found.items() if len(runs) == 3 and key[2] == rate}
    rows = []
    for ratio, factor in (28, 2), (RATIOS[-1], 30):
        if {('p=1', ratio, rate), ('rows', ratio, rate)} <= complete.keys():
            one, two = complete['p=1', ratio, rate], complete['rows', ratio, rate]
            times = geometric_mean(last(one)) / geometric_mean(last(two))
            apart = mean_final_loss(one)[0] - mean_final_loss(two)[0]
            holds = times >= factor and (factor > 2 or abs(apart) <= 0.01)
            rows.append((f'γ/lr = {ratio}: p = 1 ends at least {factor} × as sharp as `rows`',
                         f'{times:.3g} ×, loss {apart:+.3f}', holds))
    for arm in 'proportional', 'clipped':
        if {('p=1', RATIOS[-1], rate), (arm, RATIOS[-1], rate)} <= complete.keys():
            base, changed = largest(complete['p=1', RATIOS[-1], rate]), largest(complete[arm, RATIOS[-1], rate])
            rows.append((f'`{arm}` stays below 100, p = 1 passes 500', ', '.join(f'{x:.1f}' for x in changed) + '; '
                         + ', '.join(f'{x:,.0f}' for x in base), max(changed) < 100 and min(base) > 500))
    return [{'planned': what, 'found': text, 'holds': 'yes' if holds else '**no**'} for what, text, holds in rows]


def arm_rows(found):
    """Return a row of texts for each arm, γ and learning rate: means over its seeds, of norms geometric ones."""
    rows = []
    for (arm, ratio, rate), runs in found.items():
        row = {'arm': f'`{arm}`', 'γ/lr': f'{ratio}', 'lr': f'{rate:g}', 'seeds': f'{len(runs)}',
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
    mine = {arm: runs for (arm, ratio, rate), runs in found.items() if (ratio, rate) == (RATIOS[-1], RATES[0])}
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


if __name__ == '__main__':
    show_results(__doc__, 'norms.png', read_runs, tables, dict(norms=draw_norms))
