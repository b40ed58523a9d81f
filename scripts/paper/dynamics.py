"""Training statistics over a run: clipped updates, ‖h‖, clipped gradients (Figures "dynamics" and "stability" (a)).

  python scripts/paper/dynamics.py out/gpt2-small-adamw out/gpt2-small-sophiag --output out/dynamics.png

(a) the fraction of coordinates whose update is clipped, |m / max(γh, ε)| ≥ 1: the paper's approaches 60 %, and it
recommends a γ that keeps it between 50 % and 90 %. (b) the ℓ2 norm of h. (c) the fraction of the steps so far whose
gradient was clipped by its norm: above 10 % for AdamW and Lion in the paper, seldom for Sophia.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.runs import AXES, figure, find_runs, plain, png_path, print_table, save

PANELS = {'update_clipped': '(a) fraction of updates clipped', 'hessian_norm': r'(b) $\|h\|_2$',
          'grad_clipped': '(c) fraction of steps with clipped gradient'}


def values(run, key, x):
    """The series of `key`; update_clipped is what update_unclipped leaves."""
    if key != 'update_clipped':
        return run.series(key, x)
    xs, ys = run.series('update_unclipped', x)
    return xs, [1 - y for y in ys]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='a run, or a directory of runs')
    parser.add_argument('--x', choices=AXES, default='steps')
    parser.add_argument('--output', default='dynamics.png', help='PNG; .csv and .json beside it')
    args = parser.parse_args(argv)
    png_path(args.output)
    runs = find_runs(args.out_dirs)
    fig, axes = figure(3, width=4.5)
    rows, summary = [], []
    for run in runs:
        label = f'{run.optimizer_label} ({run.out_dir.resolve().name})'
        last = {'run': label}
        for ax, (key, title) in zip(axes, PANELS.items()):
            xs, ys = values(run, key, args.x)
            if ys:
                ax.plot(xs, ys, label=plain(label))
                last[key] = ys[-1]
            ax.set(xlabel=AXES[args.x], title=title)
            rows += [{'run': label, 'metric': key, args.x: x, 'value': y} for x, y in zip(xs, ys)]
        summary.append(last)
    if not rows:
        raise SystemExit('no statistics in these runs: metrics.jsonl has none of update_unclipped, hessian_norm, '
                         'grad_clipped')
    print_table(summary)
    axes[0].axhspan(0.5, 0.9, color='0.5', alpha=0.15, label='recommended')
    for ax in axes:
        if ax.lines:
            ax.legend(fontsize=7)
    save(args.output, fig, rows, at_the_end=summary)


if __name__ == '__main__':
    main()
