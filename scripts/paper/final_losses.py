"""Final validation losses of many runs: one line per optimizer, or a heat map over two settings.

  python scripts/paper/final_losses.py out/sweep
  python scripts/paper/final_losses.py out/interval --by optimizer_name hessian_interval --x flops
  python scripts/paper/final_losses.py out/sensitivity --grid gamma beta2
  python scripts/paper/final_losses.py out/max_lr --x learning_rate --by optimizer_name scale_attn_by_inverse_layer_idx

docs/reproduce.md has the command for each figure. Runs that differ only in seed are averaged. If several settings share
a point or a cell, the best is drawn. Unfinished runs are left out.

With --x learning_rate it prints each line's largest stable rate. A rate is stable if its runs, one per seed, and those
at all lower rates end finite, at most 0.5 above the lowest training loss up to their rate (means over tenths of runs).
"""

import math
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.compare import add_tuned, finished_runs
from analysis.figures import argparser, figure, label_of, legend, parse, print_table, save, set_title, styles
from analysis.runs import by_seed, find_runs, mean_final_loss
from runtime.files import one_line_errors

X = {'max_iters': 'steps T of the whole schedule', 'flops': 'training FLOPs', 'parameters': 'parameters',
     'learning_rate': 'peak learning rate'}
MARGIN = 0.5  # nats of training loss within which a learning rate is stable


def groups_at(runs, key):
    """Return {key(run): groups of seeds, the lowest mean loss first}, sorted by key."""
    found = {}
    for group in by_seed(runs):
        found.setdefault(key(group[0]), []).append(group)
    return {at: sorted(groups, key=lambda group: mean_final_loss(group)[0]) for at, groups in sorted(found.items())}


def row_of(groups):
    """Return a dict that describes the first of `groups`."""
    run, (loss, sd) = groups[0][0], mean_final_loss(groups[0])
    return {'val/loss': loss, 'sd': sd, 'seeds': len(groups[0]), 'learning_rate': run.learning_rate,
            'max_iters': run.max_iters, 'run': str(run.out_dir), 'optimizer': run.optimizer_name, 'tried': len(groups)}


def place_of(run, by, x):
    """Return (the label of a run's line: its values of the settings `by` that its optimizer has, its x-value)."""
    line = ', '.join(run.optimizer_label if key == 'optimizer_name' else f'{label_of(key)} {run.config[key]}'
                     for key in by if not run.lacks(key))
    if x == 'flops':
        return line, run.series('val/loss', 'flops')[0][-1]
    return line, run.about['parameters'] if x == 'parameters' else run.config[x]


def tenths(run):
    """Return the mean training loss of each tenth of a run, the last one first."""
    losses = run.series('train/loss')[1] or run.series('val/loss')[1]
    size = max(1, len(losses) // 10)
    return [statistics.mean(losses[max(0, end - size):end]) for end in range(len(losses), 0, -size)]


def stable_rates(best, tried):
    """Return a row for each line, with its largest stable learning rate and its lowest unstable one, if any. `best`:
    {(line, learning rate): groups} of finished runs. `tried`: (line, learning rate) of all runs, also diverged ones."""
    rows = []
    for line in sorted({line for line, _ in tried}):
        stable, lowest = None, math.inf
        for rate in sorted(rate for other, rate in tried if other == line):
            losses = [tenths(run) for run in best[line, rate][0]] if (line, rate) in best else []
            lowest = min([lowest, *map(min, losses)])
            if not losses or max(last for last, *_ in losses) > lowest + MARGIN:
                break
            stable = rate
        else:
            rate = None
        rows.append({'line': line, 'largest stable rate': stable, 'not stable at': rate})
    return rows


def draw_lines(rows, x):
    """Draw final loss against `x`, a line for each value of row['line']."""
    lines = list(dict.fromkeys(row['line'] for row in rows))
    if len(lines) == len(rows) > 2:  # one point per line, labeled on the axis instead of by color
        fig, (ax,) = figure(width=6.5, height=1.2 + 0.28 * len(rows))
        ordered = sorted(rows, key=lambda row: -row['val/loss'])
        ax.errorbar([row['val/loss'] for row in ordered], [row['line'] for row in ordered],
                    xerr=[row['sd'] or 0 for row in ordered], fmt='o', capsize=3)
        for row in ordered:
            ax.annotate(f'{row["val/loss"]:.3f}', (row['val/loss'], row['line']), (8, 0),
                        textcoords='offset points', va='center', fontsize=8)
        ax.margins(x=0.12)
        ax.set(xlabel='final validation loss')
        return fig
    fig, (ax,) = figure(width=6.5)
    mine = {line: [row for row in rows if row['line'] == line] for line in lines}
    for line, style in zip(lines, styles([mine[line][0]['optimizer'] for line in lines])):
        ax.errorbar([row[x] for row in mine[line]], [row['val/loss'] for row in mine[line]],
                    [row['sd'] or 0 for row in mine[line]], label=line, marker='o', capsize=3, markersize=4, **style)
    ax.set(xscale='log', xlabel=X[x], ylabel='final validation loss')
    legend(fig, ax)
    return fig


def draw_grid(runs, keys):
    """Return (figure, rows): final loss over the settings `keys` (rows, columns)."""
    labels = sorted({run.optimizer_label for run in runs})
    if len(labels) > 1:
        raise SystemExit(f'--grid: needs runs of one optimizer, not {", ".join(labels)}; see scripts/speedup.py')
    best = {cell: row_of(groups) for cell, groups in groups_at(
        runs, lambda run: tuple(run.config[key] for key in keys)).items()}
    ys, xs = (sorted(set(values)) for values in zip(*best))
    grid = np.full((len(ys), len(xs)), np.nan)
    fig, (ax,) = figure()
    ax.grid(False)
    ax.set_facecolor('0.93')  # color of cells without a run
    for (y, x), row in best.items():
        i, j = ys.index(y), xs.index(x)
        grid[i, j] = row['val/loss']
        ax.text(j, i, f'{grid[i, j]:.3f}', ha='center', va='center', fontsize=8, backgroundcolor='white')
    image = ax.imshow(grid, aspect='auto', origin='lower', cmap='viridis_r')
    for set_ticks, values in (ax.set_xticks, xs), (ax.set_yticks, ys):
        set_ticks(range(len(values)), [value if isinstance(value, str) else f'{value:g}' for value in values])
    ax.set(xlabel=label_of(keys[1]), ylabel=label_of(keys[0]), title=labels[0])
    fig.colorbar(image, label='final validation loss')
    return fig, [{**dict(zip(keys, cell)), **row} for cell, row in best.items()]


@one_line_errors()
def main(argv=None):
    parser = argparser(__doc__, 'final_losses.png', of_runs=True)
    parser.add_argument('--x', choices=X, default='max_iters')
    parser.add_argument('--by', nargs='+', default=['optimizer_name'], metavar='KEY',
                        help='settings that make a line (default: optimizer_name)')
    parser.add_argument('--grid', nargs=2, metavar=('ROWS', 'COLUMNS'), help='a heat map over two settings instead')
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'), help='range of the loss axis')
    add_tuned(parser)
    args = parse(parser, argv)
    sizes = ['n_layer', 'n_head', 'n_embd'] if args.x == 'parameters' else []
    found = find_runs(args.out_dirs)
    runs = finished_runs(found, (*args.tuned, *(args.grid or [*args.by, *sizes])))
    if args.grid:
        fig, rows = draw_grid(runs, args.grid)
    else:
        best = groups_at(runs, lambda run: place_of(run, args.by, args.x))
        rows = [{'line': line, args.x: x, **row_of(groups)} for (line, x), groups in best.items()]
        fig = draw_lines(rows, args.x)
    print_table(rows, [key for key in rows[0] if key != 'run'])
    if args.x == 'learning_rate' and not args.grid:
        print()
        print_table(stable_rates(best, {place_of(run, args.by, args.x) for run in found if run.is_trial}))
    set_title(fig, args.title)
    if args.ylim:
        fig.axes[0].set_ylim(args.ylim)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
