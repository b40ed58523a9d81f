"""Is one optimizer better than another, and how many times faster? Table, verdict and picture of a directory of runs.

  python scripts/speedup.py out/sweep                                       every other optimizer against AdamW
  python scripts/speedup.py out/sweep --baseline adamw --candidate sophiag --k 2
  python scripts/speedup.py losses.csv --baseline AdamW                     of runs that any program has made
  python scripts/speedup.py out/sweep --by dropout                          values of a setting, not optimizers
  python scripts/speedup.py out/main out/fork --by out_dir                  directories: two models, or two versions

At the best hyperparameters tried, averaged over seeds, it compares final losses at the same horizon T and at equal
trials, tests the paper's criterion, Eval(O1, T) ≥ Eval(O2, T/k) at every T, and finds the horizon at which the baseline
reaches the candidate's loss. docs/verdict.md explains each number.
"""

import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis import compare, figures
from analysis.figures import print_table
from analysis.runs import as_number, by_seed, find_runs, mean_final_loss, notes_on
from analysis.significance import holm
from runtime.arguments import at_least
from runtime.files import one_line_errors

# The columns printed of the table at the same T; the .json has all.
SAME_T = ['T', 'candidate', 'baseline', 'difference', 'plus_or_minus', 'p', 'p, Holm', 'seeds', 'seeds of baseline',
          'at equal trials', 'baseline at equal trials']
PANELS = ['loss', 'difference']


@one_line_errors()
def main(argv=None):
    parser = figures.argparser(__doc__, 'speedup.png', '.csv and .json', of_runs=True)
    parser.add_argument('--by', default='optimizer_name', metavar='KEY',
                        help='what is compared: a setting, or out_dir, the paths given (default: optimizer_name)')
    parser.add_argument('--baseline', metavar='NAME',
                        help='O1 (default: adamw; with --by the lowest value, or the first path)')
    parser.add_argument('--candidate', nargs='+', metavar='NAME', help='O2, one or several (default: all others)')
    parser.add_argument('--k', type=at_least(1, Fraction), default=Fraction(2),
                        help='the factor claimed, such as 2, 1.1 or 4/3 (default: 2)')
    compare.add_tuned(parser)
    parser.add_argument('--panels', nargs='+', choices=PANELS, default=PANELS, help='default: all')
    args = figures.parse(parser, argv)
    sides = group_by_side(find_runs(args.out_dirs), args)
    baseline, *candidates = sides
    labels = {side: label_of_side(side, args.by) for side in sides}
    compared = [run for mine in sides.values() for run in mine]
    compare.check_comparable([run for run in compared if run.is_trial], args.tuned, args.by)
    counted = [run for mine in sides.values() for group in by_seed([run for run in mine if not run.rejected])
               for run in group]
    rejected = {str(run.out_dir): run.rejected or 'another run has the same settings and seed'
                for run in compared if run not in counted}
    for name, reason in rejected.items():
        print(f'{"lost" if reason == "it diverged" else "rejected"} {name}: {reason}')  # the former counts as a trial
    tuned = {side: compare.tuned_at_each_T(labels[side], mine) for side, mine in sides.items()}
    verdicts = [judge(side, labels, tuned[side], tuned[baseline], baseline, args.k) for side in candidates]
    if not any(verdict['criterion'] or verdict['same_T'] for verdict in verdicts):
        found = '; '.join(f'{side} at T = {sorted(mine) or "none"}' for side, mine in tuned.items())
        raise SystemExit(f'nothing to compare: finished runs of {found}; name other sides with --by, --baseline and '
                         '--candidate')

    column = 'optimizer' if args.by == 'optimizer_name' else args.by
    results = [one.row(column) for mine in tuned.values() for one in mine.values()]
    print_table(results, [key for key in results[0] if key != 'run'])
    for verdict in verdicts:
        for key in ('same_T', 'criterion', 'efficiency'):
            if verdict[key]:
                print()
                print_table(verdict[key], SAME_T if key == 'same_T' else None)
        print('\n'.join(['', *verdict['text']]))
    notes = notes_on(counted) + [note for mine in tuned.values() for one in mine.values()
                                 for note in compare.weaknesses(one)]
    print('\n'.join(['', *(f'note: {note}' for note in notes)]))
    fig = draw(tuned, labels, verdicts, args.panels)
    figures.set_title(fig, args.title)
    figures.save(args.output, fig, results, baseline=baseline, k=float(args.k), verdicts=verdicts, notes=notes,
                 rejected=rejected)


def group_by_side(runs, args):
    """Return {side: runs} for --baseline, which comes first, and --candidate. SystemExit when one has no runs."""
    if args.by != 'out_dir':
        if any(args.by not in run.config for run in runs):
            raise SystemExit(f'--by {args.by}: not a setting of all of these runs')
        runs = sorted(runs, key=lambda run: (
            isinstance(value := run.config[args.by], str), 0 if value is None else value))
    found = {}  # by value, because 0 and 0.0 are one side
    for run in runs:
        found.setdefault(compare.side_of(run, args.by), []).append(run)
    sides = {str(side): mine for side, mine in found.items()}

    def named(text):  # a CSV file may have AdamW, 0.001 may be given as 1e-3, and a directory with a slash at its end
        wanted = str(Path(text)) if args.by == 'out_dir' else text
        return next((side for side in sides if side.lower() == wanted.lower() or as_number(side) == as_number(wanted)),
                    text)
    baseline = named(args.baseline or ('adamw' if args.by == 'optimizer_name' else next(iter(sides))))
    candidates = [named(text) for text in args.candidate or sides if named(text) != baseline]
    if unknown := [side for side in (baseline, *candidates) if side not in sides]:
        raise SystemExit(f'nothing to compare: no run of {" ".join(unknown)}; there are {", ".join(sides)}; choose by '
                         '--by, --baseline and --candidate')
    return {side: sides[side] for side in (baseline, *candidates)}


def label_of_side(side, by):
    """Return the name of a side in tables and pictures."""
    if by == 'optimizer_name':
        return figures.optimizer_label(side)
    return side if by == 'out_dir' else f'{figures.label_of(by)} {side}'


def judge(side, labels, candidate, baseline, baseline_side, k):
    """Return the verdict on a candidate: rows of three tables, lines of text, and whether the criterion holds."""
    same = [compare.same_horizon(candidate[T], baseline[T]) for T in sorted(candidate.keys() & baseline.keys())]
    tested = [row for row in same if row['p'] is not None]
    for row, p in zip(tested, holm([row['p'] for row in tested])):
        row['p, Holm'] = p
    criterion = [{'T': T, 'T/k': int(T / k), 'baseline at T': baseline[T].mean,
                  'candidate at T/k': candidate[T / k].mean,
                  'holds': baseline[T].mean >= candidate[T / k].mean} for T in sorted(baseline) if T / k in candidate]
    efficiency = [row for T in sorted(candidate) if (row := compare.efficiency_at(candidate[T], baseline))]
    holds = all(row['holds'] for row in criterion) if criterion else None
    text, one, two = [], labels[baseline_side], labels[side]
    if criterion:
        text.append(f'{two} is {"" if holds else "not "}{k} times faster than {one} by the criterion (it holds at '
                    f'{sum(row["holds"] for row in criterion)} of {len(criterion)} T)')
    text += [sentence(row, one, two, len(tested)) for row in same]
    text += [f'T = {row["T"]}: {one} reaches that loss at {row["baseline steps"]:.0f} steps: {two} is '
             f'{row["ratio steps"]:.2f} times as efficient in steps'
             + (f', {row["ratio FLOPs"]:.2f} in FLOPs' if row['ratio FLOPs'] else '') for row in efficiency]
    return dict(candidate=side, holds=holds, text=text, same_T=same, criterion=criterion, efficiency=efficiency)


def sentence(row, one, two, tests):
    """Return the sentence on a row of the table at the same T: baseline `one`, candidate `two`, and of how many tests
    its own is one."""
    apart, p, significance = f'{abs(row["difference"]):.4f}', row['p'], 'no test: it takes two seeds a side that differ'
    where = 'above' if row['difference'] > 0 else 'below'
    if float(apart) == 0:
        apart, where = 'level', 'with'
    if p is not None:
        apart += f' ± {row["plus_or_minus"]:.4f}'
        significance = 'within the noise' if p > 0.05 else f'p = {p:.2g}'
        if tests > 1 and p <= 0.05:
            significance += f'; {row["p, Holm"]:.2g} after Holm\'s correction for {tests} horizons'
    return (f'T = {row["T"]}: {two} ends {apart} {where} {one} ({significance}; trials: {two} {row["trials"]}, '
            f'{one} {row["trials of baseline"]})')


def draw(tuned, labels, verdicts, panels):
    """Return the figure of PANELS, side by side, against T: final losses with their standard deviation over seeds;
    differences to the baseline at the same T with their 95 % interval."""
    fig, axes = figures.figure(len(panels), width=4.6, height=3.8)
    looks = {side: dict(style, fmt='o-', capsize=3, markersize=4, label=labels[side])
             for side, style in zip(tuned, figures.styles(tuned))}
    baseline = next(iter(tuned))
    Ts = sorted({T for mine in tuned.values() for T in mine})
    for ax, panel in zip(axes, panels):
        if panel == 'loss':
            for side, mine in tuned.items():
                ax.errorbar(list(mine), [one.mean for one in mine.values()],
                            [mean_final_loss(one.best)[1] or 0 for one in mine.values()], **looks[side])
            ax.set(ylabel='final validation loss', title='Final loss at the best settings tried')
        else:
            ax.axhline(0, color=looks[baseline]['color'], label=labels[baseline])
            for rows, side in [(verdict['same_T'], verdict['candidate']) for verdict in verdicts]:
                ax.errorbar([row['T'] for row in rows], [row['difference'] for row in rows],
                            [row['plus_or_minus'] or 0 for row in rows], **looks[side])
            ax.set(ylabel=f"final loss minus {labels[baseline]}'s, 95 % interval", title='Difference at the same T')
        ax.set(xscale='log', xlabel='steps T of the whole schedule')
        ax.set_xticks(Ts, [f'{T:,}' for T in Ts])
        ax.minorticks_off()
    figures.legend(fig, axes[0])
    return fig


if __name__ == '__main__':
    main()
