"""The largest stable peak learning rate, with and without attention scaling (Figure "stability" (b)).

  python scripts/sweep.py --out_dir out/max_lr --grid optimizer_name=adamw,lion,sophiag learning_rate=1e-4,2e-4,4e-4 \\
      scale_attn_by_inverse_layer_idx=True,False -- --model_size=355M --max_iters=4000
  python scripts/paper/max_lr.py out/max_lr

A learning rate is stable if its runs, one for each seed, and all runs at lower rates end finite, each at most 0.5 above
the lowest training loss seen up to its rate. Where all are stable, the largest is above those tried.
"""

import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.compare import check_comparable
from analysis.figures import argparser, figure, legend, parse, print_table, save
from analysis.runs import find_runs, hyperparameters
from runtime.files import one_line_errors

MARGIN = 0.5  # nats of training loss


def stable_rates(runs):
    """Return {learning rate: final training loss, a mean} of the stable rates of `runs`, whose learning rates rise."""
    found, lowest = {}, float('inf')
    for rate, group in itertools.groupby(runs, lambda run: run.learning_rate):
        group = [*group]
        if any(run.diverged for run in group):
            break
        losses = [run.series('train/loss')[1] for run in group]
        ends = [statistics.mean(mine[-max(1, len(mine) // 10):]) for mine in losses]
        lowest = min(lowest, *map(min, losses))
        if max(ends) > lowest + MARGIN:
            break
        found[rate] = statistics.mean(ends)
    return found


@one_line_errors()
def main(argv=None):
    parser = argparser(__doc__, 'max_lr.png', of_runs=True)
    args = parse(parser, argv)
    runs, groups = find_runs(args.out_dirs), {}
    check_comparable(runs)
    for run in sorted(runs, key=lambda run: run.learning_rate):
        if (problem := run.unfinished or run.off_schedule) and not run.diverged:
            raise SystemExit(f'{run.out_dir}: {problem}; let the sweep finish, or leave the run out')
        group = groups.setdefault((run.optimizer_label, run.scale_attn_by_inverse_layer_idx), [])
        group.append(run)
        one, other = (dict(hyperparameters(each)) for each in (group[0], run))
        for key in one:
            if one[key] != other[key] and key not in ('learning_rate', 'min_lr'):
                raise SystemExit(f'{group[0].out_dir} and {run.out_dir}: {key} is {one[key]} in one and {other[key]} '
                                 'in the other; pass runs that differ only in learning rate, scaling and seed')

    rows, (fig, (ax,)) = [], figure()
    optimizers = sorted({optimizer for optimizer, _ in groups})
    for (optimizer, scaled), runs in sorted(groups.items()):
        stable, tried = stable_rates(runs), {run.learning_rate for run in runs}
        rates, losses = [*stable], [*stable.values()]
        rows.append(dict(optimizer=optimizer, attention_scaling=scaled, largest_stable=max(rates, default=None),
                         all_stable=len(stable) == len(tried), training_loss=losses[-1] if losses else None))
        ax.plot(rates, losses, 'o-' if scaled else 'o--', color=f'C{optimizers.index(optimizer)}',
                label=f'{optimizer}, {"with" if scaled else "without"} scaling')
    print_table(rows)
    ax.set(xscale='log', xlabel='peak learning rate', ylabel='final training loss',
           title=args.title or 'Stable learning rates')
    legend(fig, ax)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
