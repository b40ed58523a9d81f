"""The largest stable peak learning rate, with and without attention scaling (Figure "stability" (b)).

  python scripts/paper/max_lr.py --out_dir out/max_lr --optimizers adamw lion sophiag \\
      --learning_rates 1e-4 2e-4 4e-4 8e-4 -- config/train_gpt2_medium_adamw.py --max_iters=2000

For every optimizer, once with and once without scale_attn_by_inverse_layer_idx, runs at rising learning rates
until one blows up. A learning rate is stable when its run ends finite and with a training loss no more than 0.5 above
the lowest loss of the run itself and of the runs at lower ones. Where all are stable, the largest is above those tried.
Runs are kept in out_dir; the same command resumes. The figure is OUT_DIR/max_lr.png.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import figure, legend, optimizer_label, print_table, save
from analysis.trials import add_launcher, train_all, trials_of

# The list that the paper searches (section Hyperparamter Tuning), rising.
LEARNING_RATES = [4e-5, 6e-5, 8e-5, 1e-4, 1.2e-4, 1.5e-4, 2e-4, 3e-4, 4e-4, 6e-4]
MARGIN = 0.5  # nats of training loss


def judge(trial, lowest):
    """(final loss, lowest loss, why the run is not stable or '') of a run that has ended; `lowest`: over the runs at
    lower learning rates. The final loss is the mean over the last tenth of the lines."""
    if trial.failure:
        return None, None, trial.failure
    if not trial.finished:
        raise SystemExit(f'{trial.out_dir}: failed: {trial.last_line}')
    losses = trial.run.series('train/loss')[1]
    end, lowest = statistics.mean(losses[-max(1, len(losses) // 10):]), min(lowest, *losses)
    return end, lowest, '' if end <= lowest + MARGIN else f'ends {end - lowest:.2f} above the lowest loss'


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run')
    parser.add_argument('--out_dir', required=True, type=Path)
    parser.add_argument('--optimizers', nargs='+', default=['adamw', 'lion', 'sophiag'], metavar='NAME')
    parser.add_argument('--learning_rates', nargs='+', type=float, default=LEARNING_RATES,
                        help="default: the paper's list")
    add_launcher(parser)
    args = parser.parse_args(argv)

    rows, largest = [], []
    for name in args.optimizers:
        for scaled in (True, False):
            lowest, best = float('inf'), None
            entry = dict(optimizer_name=name, scale_attn_by_inverse_layer_idx=scaled,
                         learning_rate=sorted(args.learning_rates))
            for trial in trials_of(dict(base=args.base, runs=[entry]), args.out_dir):
                trial.check()
                train_all([trial], launcher=args.launcher)
                loss, lowest, why = judge(trial, lowest)
                lr = float(trial.settings['learning_rate'])
                rows.append(dict(optimizer=name, attention_scaling=scaled, learning_rate=lr, stable=not why,
                                 final_train_loss=loss, why=why))
                print(f'{name}, attention scaling {scaled}, {lr:g}: {why or "stable"}', flush=True)
                if why:
                    break
                best = lr
            largest.append(dict(optimizer=name, attention_scaling=scaled, largest_stable=best,
                                all_stable=best == max(args.learning_rates)))
    print_table(largest)

    fig, (ax,) = figure()
    for i, name in enumerate(args.optimizers):
        for scaled, style in (True, 'o-'), (False, 'o--'):
            stable = [row for row in rows if row['stable']
                      and (row['optimizer'], row['attention_scaling']) == (name, scaled)]
            ax.plot([row['learning_rate'] for row in stable], [row['final_train_loss'] for row in stable], style,
                    color=f'C{i}', label=f'{optimizer_label(name)}, {"with" if scaled else "without"} scaling')
    ax.set(xscale='log', xlabel='peak learning rate', ylabel='final training loss', title='Stable learning rates')
    legend(fig, ax)
    save(args.out_dir / 'max_lr.png', fig, rows, largest=largest)


if __name__ == '__main__':
    main()
