"""Draw the loss curves of one or several runs, or any other metrics, and write the numbers next to the figure.

  python scripts/plot.py out/quickstart
  python scripts/plot.py out/adamw out/sophiag --x tokens --labels AdamW Sophia-G --output compare.png
  python scripts/plot.py out/sweep --metrics val/loss --x flops --log_x
  Figures "dynamics" and "stability" (a), clipped updates, ‖h‖ and clipped gradients:
    python scripts/plot.py out/gpt2-small-* --panels --metrics update_unclipped hessian_norm grad_clipped

Runs that differ in their seed only are one line, their mean, with a band from the lowest to the highest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import AXES, figure, legend, plain, png_path, save, styles
from analysis.runs import averaged, by_seed, find_runs, labels_of

STYLES = {'val/loss': dict(marker='o', markersize=3), 'train/loss': dict(linewidth=1)}
NAMES = {'val/loss': 'validation loss', 'train/loss': 'training loss', 'hessian_norm': 'ℓ2 norm of h',
         'update_unclipped': 'unclipped share of the coordinates (grey: the paper\'s advice)',
         'grad_clipped': 'share of the steps whose gradient was clipped'}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='a run, or a directory of runs')
    parser.add_argument('--x', choices=AXES, default='steps', help='x-axis (default: steps)')
    parser.add_argument('--metrics', nargs='+', metavar='KEY',
                        help='keys of metrics.jsonl (default: val/loss train/loss; of more than six lines val/loss)')
    parser.add_argument('--panels', action='store_true', help='one panel for each metric')
    parser.add_argument('--labels', nargs='+', metavar='LABEL',
                        help='one per line (default: what tells the lines apart)')
    parser.add_argument('--title', default='')
    parser.add_argument('--log_x', action='store_true')
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'))
    parser.add_argument('--output', help='PNG; the numbers go next to it as CSV (default: OUT_DIR/loss.png for one '
                                         'run, loss.png for several)')
    args = parser.parse_args(argv)
    runs = find_runs(args.out_dirs)
    output = png_path(args.output or (runs[0].out_dir / 'loss.png' if len(runs) == 1 else 'loss.png'))
    lines = by_seed(runs, repeats=True)
    labels = args.labels or labels_of(lines)
    metrics = args.metrics or ['val/loss', 'train/loss'][:1 if len(lines) > 6 else 2]
    if len(labels) != len(lines):
        raise SystemExit(f'--labels: {len(labels)} labels for {len(lines)} lines (runs that differ in the seed only '
                         'are one), which are ' + ', '.join(str(line[0].out_dir) for line in lines))

    fig, axes = figure(len(metrics), width=4.4) if args.panels else figure(width=7.0, height=4.2)
    panel_of = dict(zip(metrics, axes if args.panels else axes * len(metrics)))
    one_line, overlaid, rows = len(lines) == 1, len(metrics) > 1 and not args.panels, []
    for line, label, style in zip(lines, labels, styles([line[0].optimizer_name for line in lines])):
        named = set()  # panels whose legend has the line
        for metric in metrics:
            ax, name = panel_of[metric], NAMES.get(metric, metric)
            xs, ys, lows, highs = averaged(line, metric, args.x)
            if not xs:
                continue
            # Several lines are told apart by their color, the metrics of a single one by their name.
            text = f'{label}, {name}' if one_line and overlaid else None if ax in named else label
            named.add(ax)
            color = style if not (one_line and overlaid) else {}
            faint = dict(alpha=0.45) if metric == 'train/loss' and overlaid else {}
            drawn, = ax.plot(xs, ys, label=text and plain(text), **color, **STYLES.get(metric, {}), **faint)
            if len(line) > 1:
                ax.fill_between(xs, lows, highs, color=drawn.get_color(), alpha=0.2, linewidth=0)
            rows += [{'run': label, 'metric': metric, args.x: x, 'value': y, 'lowest': low, 'highest': high,
                      'seeds': len(line)} for x, y, low, high in zip(xs, ys, lows, highs)]
    if not rows:
        raise SystemExit(f'{", ".join(metrics)}: no such metric in {", ".join(str(run.out_dir) for run in runs)}')
    for ax in axes:
        shown = [NAMES.get(metric, metric) for metric in metrics if panel_of[metric] is ax]
        ax.set(xlabel=AXES[args.x], ylim=args.ylim, xscale='log' if args.log_x else 'linear',
               **(dict(title=shown[0]) if args.panels else dict(ylabel=' / '.join(shown), title=plain(args.title))))
        ax.title.set_fontsize(9)
    if args.panels and 'update_unclipped' in panel_of:
        panel_of['update_unclipped'].axhspan(0.1, 0.5, color='0.5', alpha=0.15)
    if args.panels:
        fig.suptitle(plain(args.title) or None)
    legend(fig, max(axes, key=lambda ax: len(ax.lines)))
    save(output, fig, rows)


if __name__ == '__main__':
    main()
