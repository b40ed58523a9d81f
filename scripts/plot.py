"""Draw the loss curves of one or several runs, or any other metric, and write the numbers beside the figure.

  python scripts/plot.py out/quickstart
  python scripts/plot.py out/adamw out/sophiag --x tokens --labels AdamW Sophia-G --output compare.png
  python scripts/plot.py out/sweep --metrics val/loss --x flops --log_x

Runs that differ in their seed only are one line, their mean, with a band from the lowest to the highest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import AXES, figure, legend, plain, png_path, save, styles
from analysis.runs import averaged, find_runs, labels_of, lines_of

STYLES = {'val/loss': dict(marker='o', markersize=3), 'train/loss': dict(linewidth=1)}
NAMES = {'val/loss': 'validation loss', 'train/loss': 'training loss'}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='a run, or a directory of runs')
    parser.add_argument('--x', choices=AXES, default='steps', help='x-axis (default: steps)')
    parser.add_argument('--metrics', nargs='+', metavar='KEY',
                        help='keys of metrics.jsonl (default: val/loss train/loss; of more than six lines val/loss)')
    parser.add_argument('--labels', nargs='+', metavar='LABEL',
                        help='one per line (default: what tells the lines apart)')
    parser.add_argument('--title', default='')
    parser.add_argument('--log_x', action='store_true')
    parser.add_argument('--log_y', action='store_true')
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'))
    parser.add_argument('--output', help='PNG; the numbers go beside it as CSV (default: OUT_DIR/loss.png for one run, '
                                         'loss.png for several)')
    args = parser.parse_args(argv)
    runs = find_runs(args.out_dirs)
    output = png_path(args.output or (runs[0].out_dir / 'loss.png' if len(runs) == 1 else 'loss.png'))
    lines = lines_of(runs)
    labels = args.labels or labels_of(lines)
    args.metrics = args.metrics or ['val/loss', 'train/loss'][:1 if len(lines) > 6 else 2]
    if len(labels) != len(lines):
        raise SystemExit(f'--labels: {len(labels)} labels for {len(lines)} lines (runs that differ in the seed only '
                         'are one), which are ' + ', '.join(str(line[0].out_dir) for line in lines))

    fig, (ax,) = figure(width=7.0, height=4.2)
    rows = []
    for line, label, style in zip(lines, labels, styles([line[0].optimizer_name for line in lines])):
        drawn = False
        for metric in args.metrics:
            xs, ys, lows, highs = averaged(line, metric, args.x)
            name = NAMES.get(metric, metric)
            # Several lines are told apart by their color, the metrics of a single one by their name.
            text = f'{label}, {name}' if len(lines) == 1 and len(args.metrics) > 1 else None if drawn else label
            if xs:
                faint = dict(alpha=0.45) if metric == 'train/loss' and len(args.metrics) > 1 else {}
                ax.plot(xs, ys, label=text and plain(text), **style, **STYLES.get(metric, {}), **faint)
                drawn = True
            if len(line) > 1:
                ax.fill_between(xs, lows, highs, color=style['color'], alpha=0.2, linewidth=0)
            rows += [{'run': label, 'metric': metric, args.x: x, 'value': y, 'lowest': low, 'highest': high,
                      'seeds': len(line)} for x, y, low, high in zip(xs, ys, lows, highs)]
    if not rows:
        raise SystemExit(f'{", ".join(args.metrics)}: no such metric in {", ".join(str(r.out_dir) for r in runs)}')
    ax.set(xlabel=AXES[args.x], ylabel=' / '.join(NAMES.get(metric, metric) for metric in args.metrics),
           title=plain(args.title), xscale='log' if args.log_x else 'linear',
           yscale='log' if args.log_y else 'linear', ylim=args.ylim)
    legend(fig, ax)
    save(output, fig, rows)


if __name__ == '__main__':
    main()
