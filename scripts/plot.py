"""Draw loss curves or other metrics of runs, one panel each, and write the numbers next to the picture.

  python scripts/plot.py out/quickstart
  python scripts/plot.py out/adamw out/sophiag --x tokens --output compare.png
  python scripts/plot.py out/sweep --metrics val/loss --x flops
  Figures "dynamics" and "stability" (a), clipped updates, ‖h‖ and clipped gradients:
    python scripts/plot.py out/gpt2-small-* --metrics update_unclipped hessian_norm grad_clipped

Runs that differ only in seed are drawn as one line, their mean, with a band from the lowest to the highest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import AXES, argparser, figure, legend, parse, save, set_title, styles
from analysis.runs import averaged, by_seed, find_runs, labels_of, notes_on
from runtime.files import one_line_errors

NAMES = {'val/loss': 'validation loss', 'train/loss': 'training loss', 'hessian_norm': 'ℓ2 norm of h',
         'update_unclipped': 'unclipped share of the coordinates (grey: the paper\'s advice)',
         'grad_clipped': 'share of the steps whose gradient was clipped'}


@one_line_errors()
def main(argv=None):
    parser = argparser(__doc__, 'loss.png', of_runs=True)
    parser.add_argument('--x', choices=AXES, default='steps', help='x-axis (default: %(default)s)')
    parser.add_argument('--metrics', nargs='+', metavar='KEY',
                        help='keys of metrics.jsonl (default: val/loss train/loss, in one panel for a single run)')
    parser.add_argument('--ylim', nargs=2, type=float, metavar=('LOW', 'HIGH'))
    args = parse(parser, argv)
    runs = find_runs(args.out_dirs)
    for note in notes_on(runs):
        print(f'note: {note}', file=sys.stderr)
    measured = [key for key in ('val/loss', 'train/loss') if any(run.last(key) for run in runs)]
    metrics, lines = args.metrics or measured or ['val/loss'], by_seed(runs, repeats=True)
    together = len(runs) == 1 and not args.metrics
    panels = 1 if together else len(metrics)
    fig, axes = figure(panels, width=7.0 if panels == 1 else 4.6, height=3.8)
    axes, rows = axes * len(metrics) if together else axes, []
    for line, label, style in zip(lines, labels_of(lines), styles([line[0].optimizer_name for line in lines])):
        for metric, ax in zip(metrics, axes):
            xs, ys, lows, highs = averaged(line, metric, args.x)
            if not xs:
                continue
            ends = [max(run.series(metric)[0]) for run in line]
            if min(ends) < max(ends):
                print(f'note: {metric} of {label} is drawn up to step {min(ends)}, where one seed ends, because the '
                      'mean needs all of them', file=sys.stderr)
            ax.plot(xs, ys, 'o-' if len(xs) < 30 else '-', markersize=4, label=NAMES[metric] if together else label,
                    alpha=0.4 if together and metric != 'val/loss' else 1, **style)
            if len(line) > 1:
                ax.fill_between(xs, lows, highs, alpha=0.2, linewidth=0, **style)
            rows += [{'run': label, 'metric': metric, args.x: x, 'value': y, 'lowest': low, 'highest': high,
                      'seeds': len(line)} for x, y, low, high in zip(xs, ys, lows, highs)]
    if not rows:
        raise SystemExit(f'{", ".join(metrics)}: no such metric in {", ".join(str(run.out_dir) for run in runs)}')
    for metric, ax in zip(metrics, axes):
        ax.set(xlabel=AXES[args.x], ylim=args.ylim)
        ax.set_title('' if together else NAMES.get(metric, metric), fontsize=9)
        if metric == 'update_unclipped':
            ax.axhspan(0.1, 0.5, color='0.5', alpha=0.15)
    set_title(fig, args.title or (str(runs[0].out_dir) if together else ''))
    legend(fig, max(axes, key=lambda ax: len(ax.lines)))
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
