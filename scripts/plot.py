"""Draw the loss curves of one or several runs, or any other metric, and write the numbers beside the figure.

  python scripts/plot.py out/quickstart
  python scripts/plot.py out/adamw out/sophiag --x tokens --labels AdamW Sophia-G --output compare.png
  python scripts/plot.py out/sweep --metrics val/loss --x flops --log_x
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.runs import AXES, figure, find_runs, plain, png_path, save

STYLES = {'val/loss': dict(marker='o', markersize=3), 'train/loss': dict(alpha=0.45, linewidth=1)}
NAMES = {'val/loss': 'validation loss', 'train/loss': 'training loss'}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='a run, or a directory of runs')
    parser.add_argument('--x', choices=AXES, default='steps', help='x-axis (default: steps)')
    parser.add_argument('--metrics', nargs='+', default=['val/loss', 'train/loss'], metavar='KEY',
                        help='keys of metrics.jsonl (default: val/loss train/loss)')
    parser.add_argument('--labels', nargs='+', metavar='LABEL', help='one per run (default: the names of the out_dirs)')
    parser.add_argument('--title', default='')
    parser.add_argument('--log_x', action='store_true')
    parser.add_argument('--log_y', action='store_true')
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'))
    parser.add_argument('--output', help='PNG; the numbers go beside it as CSV (default: OUT_DIR/loss.png for one run, '
                                         'loss.png for several)')
    args = parser.parse_args(argv)
    runs = find_runs(args.out_dirs)
    output = png_path(args.output or (runs[0].out_dir / 'loss.png' if len(runs) == 1 else 'loss.png'))
    labels = args.labels or [run.out_dir.resolve().name for run in runs]
    if len(labels) != len(runs):
        raise SystemExit(f'--labels: {len(labels)} labels for {len(runs)} runs, which are '
                         + ', '.join(str(run.out_dir) for run in runs))

    fig, (ax,) = figure(width=6.5, height=4.2)
    rows = []
    for i, (run, label) in enumerate(zip(runs, labels)):
        for metric in args.metrics:
            xs, ys = run.series(metric, args.x)
            name = NAMES.get(metric, metric)
            ax.plot(xs, ys, color=f'C{i % 10}', label=plain(f'{label}, {name}' if len(args.metrics) > 1 else label),
                    **STYLES.get(metric, {}))
            rows += [{'run': label, 'metric': metric, args.x: x, 'value': y} for x, y in zip(xs, ys)]
    if not rows:
        raise SystemExit(f'{", ".join(args.metrics)}: no such metric in {", ".join(str(r.out_dir) for r in runs)}')
    ax.set(xlabel=AXES[args.x], ylabel=' / '.join(NAMES.get(metric, metric) for metric in args.metrics),
           title=plain(args.title), xscale='log' if args.log_x else 'linear', yscale='log' if args.log_y else 'linear',
           ylim=args.ylim)
    ax.legend(fontsize=8)
    save(output, fig, rows)


if __name__ == '__main__':
    main()
