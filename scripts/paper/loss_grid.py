"""Final validation loss over a grid of two settings, or its difference to another optimizer, as a heat map.

  Figure "stability" (c), sensitivity to γ and β2 (Sophia-H, 30M):
    python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
    python scripts/paper/loss_grid.py out/sensitivity --rows gamma --columns beta2
  Where Sophia wins: the difference to tuned AdamW over mini-batch and horizon:
    python scripts/paper/loss_grid.py out/map --rows total_batch_size --columns max_iters --minus adamw

Runs that differ in their seed are averaged; of those that differ otherwise in one cell, the best counts. Unfinished
runs are left out.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import SETTING_NAMES, figure, optimizer_label, png_path, print_table, save
from analysis.runs import add_tuned, by_seed, finished_runs, mean_loss


def best_losses(runs, keys):
    """{(value of each of `keys`): (loss, learning rate)} of the best group of seeds."""
    best = {}
    for group in by_seed(runs):
        cell, loss = tuple(group[0].config[key] for key in keys), mean_loss(group)[0]
        if cell not in best or loss < best[cell][0]:
            best[cell] = loss, group[0].learning_rate
    return best


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='runs, or directories of runs')
    parser.add_argument('--rows', default='gamma', metavar='KEY', help='default: gamma')
    parser.add_argument('--columns', default='beta2', metavar='KEY', help='default: beta2')
    parser.add_argument('--optimizer', help='whose runs (default: the only other one)')
    parser.add_argument('--minus', metavar='OPTIMIZER', help='subtract its best loss in the same cell')
    add_tuned(parser)
    parser.add_argument('--output', default='loss_grid.png', help='PNG; .csv beside it')
    args = parser.parse_args(argv)
    png_path(args.output)
    keys = (args.rows, args.columns)
    runs = finished_runs(args.out_dirs, (*args.tuned, *keys))
    for key in keys:
        if key not in runs[0].config:
            raise SystemExit(f'{key}: no such setting; see python train.py --help')
    names = sorted({run.optimizer_name for run in runs} - {args.minus})
    if not args.optimizer and len(names) != 1:
        raise SystemExit(f'runs of {", ".join(names) or "no other optimizer"} among these: choose one with --optimizer')
    name = args.optimizer or names[0]
    losses = best_losses([run for run in runs if run.optimizer_name == name], keys)
    base = best_losses([run for run in runs if run.optimizer_name == args.minus], keys) if args.minus else {}
    cells = [cell for cell in sorted(losses) if not args.minus or cell in base]
    if not cells:
        raise SystemExit(f'no finished run of {name}' + (f' in a cell that {args.minus} has too' if args.minus else ''))

    table = []
    for cell in cells:
        row = {args.rows: cell[0], args.columns: cell[1], 'val/loss': losses[cell][0], 'learning_rate': losses[cell][1]}
        if args.minus:
            row.update({f'{args.minus} val/loss': base[cell][0], f'{args.minus} learning_rate': base[cell][1],
                        'difference': losses[cell][0] - base[cell][0]})
        table.append(row)
    print_table(table)

    shown = 'difference' if args.minus else 'val/loss'
    ys, xs = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    grid = np.full((len(ys), len(xs)), np.nan)
    for cell, row in zip(cells, table):
        grid[ys.index(cell[0]), xs.index(cell[1])] = row[shown]
    fig, (ax,) = figure()
    ax.grid(False)
    # A difference is blue where the optimizer is ahead and red where it is behind.
    limit = np.nanmax(np.abs(grid)) or 1.0
    image = ax.imshow(grid, aspect='auto', origin='lower', **(
        dict(cmap='RdBu_r', vmin=-limit, vmax=limit) if args.minus else dict(cmap='viridis_r')))
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            ax.text(j, i, f'{value:+.3f}' if args.minus else f'{value:.3f}', ha='center', va='center', fontsize=8,
                    bbox=dict(boxstyle='round,pad=0.15', facecolor='white', alpha=0.7, linewidth=0))
    ax.set_xticks(range(len(xs)), [f'{x:g}' for x in xs])
    ax.set_yticks(range(len(ys)), [f'{y:g}' for y in ys])
    label = optimizer_label(name)
    ax.set(xlabel=SETTING_NAMES.get(args.columns, args.columns), ylabel=SETTING_NAMES.get(args.rows, args.rows),
           title=f'{label} minus {optimizer_label(args.minus)}' if args.minus else label)
    fig.colorbar(image, label='final validation loss' + (', difference' if args.minus else ''))
    save(args.output, fig, table)


if __name__ == '__main__':
    main()
