"""Final validation losses of many runs: against steps, FLOPs, model size or learning rate, one line per optimizer.

  Figure "add_res": python scripts/paper/final_losses.py out/sweep
  Figure "head" (d): python scripts/paper/final_losses.py out/sizes --x parameters
  Figure "ablation" (a): python scripts/paper/final_losses.py out/interval --by optimizer_name hessian_interval \\
      --x flops
  Figure "ablation" (b): python scripts/paper/final_losses.py out/preconditioners
  Figure "ablation" (c): python scripts/paper/final_losses.py out/clipping
  Figure "66b": python scripts/paper/final_losses.py out/rates --x learning_rate

Runs that differ in their seed are averaged; of those that differ otherwise, at the same x and on the same line, the
best is drawn: the learning rate is tuned for each point. Unfinished runs are left out.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import SHORT, figure, legend, plain, png_path, print_table, save, styles
from analysis.runs import add_tuned, by_seed, finished_runs, mean_loss

X = {'max_iters': 'steps T of the whole schedule', 'flops': 'training FLOPs', 'parameters': 'parameters',
     'learning_rate': 'peak learning rate', 'tokens': 'training tokens'}


def x_value(run, x):
    """The run's place on the x-axis."""
    if x == 'flops':
        return run.max_iters * run.flops_per_iteration()
    if x == 'tokens':
        return run.max_iters * run.total_batch_size * run.block_size
    return run.about['parameters'] if x == 'parameters' else run.config[x]


def line_of(run, by):
    """The name of the line that a run belongs to; a setting of 0 is one that its optimizer does not have."""
    return ', '.join(run.optimizer_label if key == 'optimizer_name' else f'{SHORT.get(key, key)} {run.config[key]}'
                     for key in by if run.config[key] != 0)


def best_points(runs, by, x):
    """Rows line, x, loss, sd, learning rate, …: the best group of seeds at each x of each line, sorted."""
    best = {}
    for group in by_seed(runs):
        point, (loss, sd) = (line_of(group[0], by), x_value(group[0], x)), mean_loss(group)
        row = {'line': point[0], 'optimizer': group[0].optimizer_name, x: point[1], 'val/loss': loss, 'sd': sd,
               'seeds': len(group), 'learning_rate': group[0].learning_rate, 'max_iters': group[0].max_iters,
               'run': str(group[0].out_dir)}
        tried = best[point]['tried'] if point in best else 0
        if point not in best or loss < best[point]['val/loss']:
            best[point] = row
        best[point]['tried'] = tried + 1
    return [best[point] for point in sorted(best)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='runs, or directories of runs')
    parser.add_argument('--x', choices=X, default='max_iters')
    parser.add_argument('--by', nargs='+', default=['optimizer_name'], metavar='KEY',
                        help='settings that make a line (default: optimizer_name)')
    add_tuned(parser)
    parser.add_argument('--output', default='final_losses.png', help='PNG; .csv beside it')
    args = parser.parse_args(argv)
    png_path(args.output)
    shape = ('n_layer', 'n_head', 'n_embd') if args.x == 'parameters' else ()
    runs = finished_runs(args.out_dirs, (*args.tuned, *args.by, *shape))
    for key in args.by:
        if key not in runs[0].config:
            raise SystemExit(f'--by={key}: no such setting; see python train.py --help')
    rows = best_points(runs, args.by, args.x)
    print_table(rows, [key for key in rows[0] if key != 'run'])

    lines = list(dict.fromkeys(row['line'] for row in rows))
    if len(lines) == len(rows) > 2:  # a point each: the names on an axis say more than colors
        fig, (ax,) = figure(width=6.5, height=1.2 + 0.28 * len(rows))
        ordered = sorted(rows, key=lambda row: -row['val/loss'])
        ax.errorbar([row['val/loss'] for row in ordered], range(len(ordered)), xerr=[row['sd'] or 0 for row in ordered],
                    fmt='o', capsize=3)
        for i, row in enumerate(ordered):
            ax.annotate(f'{row["val/loss"]:.3f}', (row['val/loss'], i), (8, 0), textcoords='offset points',
                        va='center', fontsize=8)
        ax.set_yticks(range(len(ordered)), [plain(row['line']) for row in ordered])
        ax.margins(x=0.12)
        ax.set(xlabel='final validation loss', title='Final loss at the best of the settings tried')
    else:
        fig, (ax,) = figure(width=6.5)
        names = [next(row['optimizer'] for row in rows if row['line'] == line) for line in lines]
        for line, style in zip(lines, styles(names)):
            mine = [row for row in rows if row['line'] == line]
            ax.errorbar([row[args.x] for row in mine], [row['val/loss'] for row in mine],
                        [row['sd'] or 0 for row in mine], label=plain(line), marker='o', capsize=3, markersize=4,
                        **style)
        ax.set(xscale='log', xlabel=X[args.x], ylabel='final validation loss',
               title='Final loss at the best of the settings tried')
        if len(xs := sorted({row[args.x] for row in rows})) <= 8:  # ticks where the runs are
            kept = [x for i, x in enumerate(xs) if not i or x > 1.05 * xs[i - 1]]
            ax.set_xticks(kept, [f'{x:,}' if x == int(x) and x < 1e6 else f'{x:.3g}' for x in kept])
            ax.minorticks_off()
        legend(fig, ax)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
