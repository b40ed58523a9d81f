"""Draw the README's picture from records/: final losses at five horizons, and the norm of h at 30M parameters.

  python dev/front.py --output records/front.png
"""

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from analysis.figures import argparser, figure, save
from analysis.significance import difference
from records.dissection import results as dissection
from records.gpu_30m import results as gpu_30m
from records.studies import SEARCH_SEED, losses

COLORS = {'AdamW': 'C0', 'Sophia-G': 'C1', 'Muon': 'C2', 'SOAP': 'C3'}


def differences():
    """Return the README's two differences, Sophia-G's final loss minus AdamW's: {model: `difference`}."""
    C = dissection.arms_of(dissection.read(), 'C')
    small = [losses(dissection.fresh_runs(C, name, dissection.SIX)) for name in ('sophiag', 'adamw')]
    arms = gpu_30m.fresh_arms(gpu_30m.read())
    runs = [run for run in gpu_30m.read() if run.max_iters == gpu_30m.LONG and run.seed != SEARCH_SEED]
    _, rate = arms['Sophia-G, 0.0008']
    large = [losses(run for run in runs if (run.optimizer_name, run.learning_rate) == arm
                    and run.gamma != gpu_30m.LOWER_GAMMA) for arm in (('sophiag', rate), arms['AdamW'])]
    return {'0.8M': difference(*small), '30M': difference(*large)}


def draw():
    """Draw the picture. Return (figure, rows of its numbers)."""
    fig, (ends, norms) = figure(2, width=4.8, height=3.0)
    with (ROOT / 'records/study/study.csv').open(encoding='utf-8') as file:
        rows = [dict(optimizer=row['optimizer'], steps=int(row['T']), loss=float(row['val/loss']), seeds=row['seeds'])
                for row in csv.DictReader(file)]
    for name, color in COLORS.items():
        mine = [row for row in rows if row['optimizer'] == name]
        ends.plot([row['steps'] for row in mine], [row['loss'] for row in mine], 'o-', color=color, label=name)
    ends.set(xscale='log', xlabel='steps of the run', ylabel='final validation loss',
               title='0.8M parameters, tuned, five horizons')
    ends.set_xticks([600, 1200, 2400, 4800, 9600], ['600', '1,200', '2,400', '4,800', '9,600'], minor=False)
    ends.minorticks_off()
    runs = [run for run in gpu_30m.read() if run.max_iters == gpu_30m.LONG and run.optimizer_name == 'sophiag'
            and run.gamma != gpu_30m.LOWER_GAMMA]
    for rate, color in ((0.0008, 'C1'), (0.0016, 'C4')):
        mine = [run for run in runs if run.learning_rate == rate]
        for run in mine:
            steps, values = run.series('hessian_norm')
            norms.plot(steps, values, color=color, linewidth=1,
                       label=f'learning rate {rate:g}, {len(mine)} runs' if run is mine[0] else None)
            rows += [dict(run=run.out_dir.name, learning_rate=rate, steps=step, norm=value)
                     for step, value in zip(steps, values)][::10]
    norms.set(yscale='log', xlabel='steps', ylabel='norm of h', title='Sophia-G, 30M parameters: h may run away')
    norms.xaxis.set_major_formatter('{x:,.0f}')
    for ax in (ends, norms):
        ax.legend(frameon=False, fontsize=8)
        ax.title.set_fontsize(10)
    return fig, rows


if __name__ == '__main__':
    save(argparser(__doc__, 'front.png').parse_args().output, *draw())
