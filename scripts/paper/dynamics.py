"""Training statistics over a run: clipped updates, ‖h‖, clipped gradients (Figures "dynamics" and "stability" (a)).

  python scripts/paper/dynamics.py out/gpt2-small-adamw out/gpt2-small-sophiag --output out/dynamics.png

(a) the fraction of coordinates whose update is clipped, |m / max(γh, ε)| ≥ 1: the paper's approaches 60 %, and it
recommends a γ that keeps it between 50 % and 90 %. (b) the ℓ2 norm of h. (c) the fraction of the steps so far whose
gradient was clipped by its norm: above 10 % for AdamW and Lion in the paper, seldom for Sophia. It depends on the
learning rate: compare each optimizer at its best. Seeds are averaged, with a band from the lowest to the highest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import AXES, figure, legend, plain, png_path, print_table, save, styles
from analysis.runs import add_tuned, averaged, check_comparable, find_runs, labels_of, lines_of

PANELS = {'update_clipped': '(a) fraction of updates clipped', 'hessian_norm': '(b) ℓ2 norm of h',
          'grad_clipped': '(c) fraction of steps with clipped gradient'}


def values(line, key, x):
    """(xs, means, lows, highs) of `key` over the seeds of a line; update_clipped is what update_unclipped leaves."""
    if key != 'update_clipped':
        return averaged(line, key, x)
    xs, *series = averaged(line, 'update_unclipped', x)
    means, highs, lows = ([1 - y for y in ys] for ys in series)
    return xs, means, lows, highs


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='a run, or a directory of runs')
    parser.add_argument('--x', choices=AXES, default='steps')
    add_tuned(parser)
    parser.add_argument('--output', default='dynamics.png', help='PNG; .csv and .json beside it')
    args = parser.parse_args(argv)
    png_path(args.output)
    runs = find_runs(args.out_dirs)
    check_comparable(runs, ('eval_iters', *args.tuned))  # validation is not drawn
    fig, axes = figure(3, width=4.2)
    rows, summary, lines = [], [], lines_of(runs)
    for line, label, style in zip(lines, labels_of(lines), styles([line[0].optimizer_name for line in lines])):
        last = {'run': label, 'seeds': len(line)}
        for ax, (key, title) in zip(axes, PANELS.items()):
            xs, ys, lows, highs = values(line, key, args.x)
            if ys:
                ax.plot(xs, ys, label=plain(label), **style)
                ax.fill_between(xs, lows, highs, color=style['color'], alpha=0.2, linewidth=0)
                last[key] = ys[-1]
            ax.set(xlabel=AXES[args.x], title=title)
            rows += [{'run': label, 'metric': key, args.x: x, 'value': y} for x, y in zip(xs, ys)]
        summary.append(last)
    if not rows:
        raise SystemExit('no statistics in these runs: metrics.jsonl has none of update_unclipped, hessian_norm, '
                         'grad_clipped')
    print_table(summary)
    axes[0].axhspan(0.5, 0.9, color='0.5', alpha=0.15)
    axes[0].annotate('recommended', (0.02, 0.86), xycoords=('axes fraction', 'data'), fontsize=7, color='0.3')
    axes[0].set_ylim(0, 1)
    axes[2].set_ylim(0, None)
    legend(fig, axes[2])
    save(args.output, fig, rows, at_the_end=summary)


if __name__ == '__main__':
    main()
