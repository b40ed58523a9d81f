"""Final validation losses of many runs: one line per optimizer, or a heat map over two settings.

  python scripts/paper/final_losses.py out/sweep
  python scripts/paper/final_losses.py out/interval --by optimizer_name hessian_interval --x flops
  python scripts/paper/final_losses.py out/sensitivity --grid gamma beta2

docs/reproduce.md has the command of each figure. Runs that differ only in seed are averaged. Of several settings at one
point or in one cell the best is drawn. Unfinished runs are left out.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.compare import add_tuned, finished_runs
from analysis.figures import argparser, figure, label_of, legend, parse, print_table, save, set_title, styles
from analysis.runs import by_seed, mean_final_loss
from runtime.files import one_line_errors

X = {'max_iters': 'steps T of the whole schedule', 'flops': 'training FLOPs', 'parameters': 'parameters',
     'learning_rate': 'peak learning rate'}


def best_groups(runs, place):
    """Return {place: row} of the groups of seeds with the lowest mean loss, sorted by place, a function of a run."""
    found = {}
    for group in by_seed(runs):
        run, (loss, sd) = group[0], mean_final_loss(group)
        found.setdefault(place(run), []).append({
            'val/loss': loss, 'sd': sd, 'seeds': len(group), 'learning_rate': run.learning_rate,
            'max_iters': run.max_iters, 'run': str(run.out_dir), 'optimizer': run.optimizer_name})
    return {at: dict(min(rows, key=lambda row: row['val/loss']), tried=len(rows)) for at, rows in sorted(found.items())}


def draw_lines(runs, x, by):
    """Return (figure, rows): final loss against `x`, a line for each value of the settings `by`."""
    def place(run):
        sources = run.about.get('provenance', {})  # the optimizer's 0: it does not have the setting
        line = ', '.join(run.optimizer_label if key == 'optimizer_name' else f'{label_of(key)} {run.config[key]}'
                         for key in by if run.config[key] != 0
                         or not sources.get(key, '').startswith(('optimizer ', 'not a setting')))
        if x == 'flops':
            return line, run.series('val/loss', 'flops')[0][-1]
        return line, run.about['parameters'] if x == 'parameters' else run.config[x]

    best = best_groups(runs, place)
    rows = [{'line': line, x: value, **row} for (line, value), row in best.items()]
    lines = list(dict.fromkeys(row['line'] for row in rows))
    if len(lines) == len(rows) > 2:  # a point each: labeled on the axis, not by colors
        fig, (ax,) = figure(width=6.5, height=1.2 + 0.28 * len(rows))
        ordered = sorted(rows, key=lambda row: -row['val/loss'])
        ax.errorbar([row['val/loss'] for row in ordered], [row['line'] for row in ordered],
                    xerr=[row['sd'] or 0 for row in ordered], fmt='o', capsize=3)
        for row in ordered:
            ax.annotate(f'{row["val/loss"]:.3f}', (row['val/loss'], row['line']), (8, 0),
                        textcoords='offset points', va='center', fontsize=8)
        ax.margins(x=0.12)
        ax.set(xlabel='final validation loss')
        return fig, rows
    fig, (ax,) = figure(width=6.5)
    optimizers = [next(row['optimizer'] for row in rows if row['line'] == line) for line in lines]
    for line, style in zip(lines, styles(optimizers)):
        mine = [row for row in rows if row['line'] == line]
        ax.errorbar([row[x] for row in mine], [row['val/loss'] for row in mine], [row['sd'] or 0 for row in mine],
                    label=line, marker='o', capsize=3, markersize=4, **style)
    ax.set(xscale='log', xlabel=X[x], ylabel='final validation loss')
    legend(fig, ax)
    return fig, rows


def draw_grid(runs, keys):
    """Return (figure, rows): final loss over the settings `keys` (rows, columns)."""
    labels = sorted({run.optimizer_label for run in runs})
    if len(labels) > 1:
        raise SystemExit(f'--grid: runs of one optimizer, not of {", ".join(labels)}; scripts/speedup.py compares them')
    best = best_groups(runs, lambda run: tuple(run.config[key] for key in keys))
    ys, xs = (sorted(set(values)) for values in zip(*best))
    grid = np.full((len(ys), len(xs)), np.nan)
    fig, (ax,) = figure()
    ax.grid(False)
    ax.set_facecolor('0.93')  # of cells without a run
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
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'), help='losses that lines are drawn for')
    add_tuned(parser)
    args = parse(parser, argv)
    sizes = ['n_layer', 'n_head', 'n_embd'] if args.x == 'parameters' else []
    runs = finished_runs(args.out_dirs, (*args.tuned, *(args.grid or [*args.by, *sizes])))
    fig, rows = draw_grid(runs, args.grid) if args.grid else draw_lines(runs, args.x, args.by)
    print_table(rows, [key for key in rows[0] if key != 'run'])
    set_title(fig, args.title)
    if args.ylim:
        fig.axes[0].set_ylim(args.ylim)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
