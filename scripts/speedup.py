"""Is one optimizer better than another, and how many times faster? Table, verdict and picture of a directory of runs.

  python scripts/speedup.py out/sweep                                       every other optimizer against AdamW
  python scripts/speedup.py out/sweep --baseline adamw --candidate sophiag --k 2
  python scripts/speedup.py losses.csv --baseline AdamW                     runs of any program
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

# Columns of the same-T table that are printed; the .json has all.
SAME_T = ['T', 'candidate', 'baseline', 'difference', 'plus_or_minus', 'p', 'p, Holm', 'seeds', 'seeds of baseline',
          'at equal trials', 'baseline at equal trials']
PANELS = ['loss', 'difference']


@one_line_errors()
def main(argv=None):
    parser = figures.argparser(__doc__, 'speedup.png', '.csv and .json', of_runs=True)
    parser.add_argument('--by', default='optimizer_name', metavar='KEY',
                        help='setting to compare, or out_dir for the given paths (default: %(default)s)')
    parser.add_argument('--baseline', metavar='NAME',
                        help='O1 (default: adamw; with --by the lowest value, or the first path)')
    parser.add_argument('--candidate', nargs='+', metavar='NAME', help='O2, one or several (default: all others)')
    parser.add_argument('--k', type=at_least(1, Fraction), default=Fraction(2),
                        help='the claimed factor, such as 2, 1.1 or 4/3 (default: %(default)s)')
    compare.add_tuned(parser)
    parser.add_argument('--panels', nargs='+', choices=PANELS, default=PANELS, help='default: all')
    args = figures.parse(parser, argv)
    methods = group_by_method(find_runs(args.out_dirs), args)
    baseline, *candidates = methods
    labels = {method: label_of_method(method, args.by) for method in methods}
    compared = [run for mine in methods.values() for run in mine]
    compare.check_comparable([run for run in compared if run.is_trial], args.tuned, args.by)
    counted = [run for mine in methods.values() for group in by_seed([run for run in mine if not run.rejected])
               for run in group]
    rejected = {str(run.out_dir): run.rejected or 'another run has the same settings and seed'
                for run in compared if run not in counted}
    for name, reason in rejected.items():
        print(f'{"lost" if reason == "it diverged" else "rejected"} {name}: {reason}')  # a lost run is a trial
    tuned = {method: compare.tuned_at_each_T(labels[method], mine) for method, mine in methods.items()}
    verdicts = [judge(method, labels, tuned[method], tuned[baseline], baseline, args.k) for method in candidates]
    if not any(verdict['criterion'] or verdict['same_T'] for verdict in verdicts):
        found = '; '.join(f'{method} at T = {sorted(mine) or "none"}' for method, mine in tuned.items())
        raise SystemExit(f'nothing to compare: finished runs of {found}; name other methods with --by, --baseline and '
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


def group_by_method(runs, args):
    """Return {method: runs} for --baseline, which comes first, and --candidate. Exit if one has no runs."""
    if args.by != 'out_dir':
        if any(args.by not in run.config for run in runs):
            raise SystemExit(f'--by {args.by}: not a setting of all of these runs')
        runs = sorted(runs, key=lambda run: (
            isinstance(value := run.config[args.by], str), 0 if value is None else value))
    found = {}  # keyed by value, because 0 and 0.0 are one method
    for run in runs:
        found.setdefault(compare.method_of(run, args.by), []).append(run)
    methods = {str(method): mine for method, mine in found.items()}

    def named(text):  # adamw also names AdamW in a CSV file, 1e-3 names 0.001, and out/a/ names out/a
        wanted = str(Path(text)) if args.by == 'out_dir' else text
        same = (name for name in methods if name.lower() == wanted.lower() or as_number(name) == as_number(wanted))
        return next(same, text)
    baseline = named(args.baseline or ('adamw' if args.by == 'optimizer_name' else next(iter(methods))))
    candidates = [named(text) for text in args.candidate or methods if named(text) != baseline]
    if unknown := [method for method in (baseline, *candidates) if method not in methods]:
        raise SystemExit(f'nothing to compare: no run of {" ".join(unknown)}; there are {", ".join(methods)}; choose '
                         'by --by, --baseline and --candidate')
    return {method: methods[method] for method in (baseline, *candidates)}


def label_of_method(method, by):
    """Return the name of a method in tables and pictures."""
    if by == 'optimizer_name':
        return figures.optimizer_label(method)
    return method if by == 'out_dir' else f'{figures.label_of(by)} {method}'


def judge(method, labels, candidate, baseline, baseline_method, k):
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
    text, one, two = [], labels[baseline_method], labels[method]
    if criterion:
        text.append(f'{two} is {"" if holds else "not "}{k} times faster than {one} by the criterion (it holds at '
                    f'{sum(row["holds"] for row in criterion)} of {len(criterion)} T)')
    text += [sentence(row, one, two, len(tested)) for row in same]
    text += [f'T = {row["T"]}: {one} reaches that loss at {row["baseline steps"]:.0f} steps: {two} is '
             f'{row["ratio steps"]:.2f} times as efficient in steps'
             + (f', {row["ratio FLOPs"]:.2f} in FLOPs' if row['ratio FLOPs'] else '') for row in efficiency]
    return dict(candidate=method, holds=holds, text=text, same_T=same, criterion=criterion, efficiency=efficiency)


def sentence(row, one, two, tests):
    """Return the sentence on a row of the same-T table. `one`: baseline. `two`: candidate. `tests`: number of tests."""
    apart, p = f'{abs(row["difference"]):.4f}', row['p']
    significance = 'no test: each method needs two seeds, with different losses'
    where = 'above' if row['difference'] > 0 else 'below'
    if p is not None:
        apart += f' ± {row["plus_or_minus"]:.4f}'
        significance = 'within the noise' if p > 0.05 else f'p = {p:.2g}'
        if tests > 1 and p <= 0.05:
            significance += f'; {row["p, Holm"]:.2g} after Holm\'s correction for {tests} horizons'
    return (f'T = {row["T"]}: {two} ends {apart} {where} {one} ({significance}; trials: {two} {row["trials"]}, '
            f'{one} {row["trials of baseline"]})')


def draw(tuned, labels, verdicts, panels):
    """Return a figure with PANELS against T: final losses with their standard deviation over seeds, and differences to
    the baseline at the same T with their 95 % interval."""
    fig, axes = figures.figure(len(panels), width=4.6, height=3.8)
    looks = {method: dict(style, fmt='o-', capsize=3, markersize=4, label=labels[method])
             for method, style in zip(tuned, figures.styles(tuned))}
    baseline = next(iter(tuned))
    Ts = sorted({T for mine in tuned.values() for T in mine})
    for ax, panel in zip(axes, panels):
        if panel == 'loss':
            for method, mine in tuned.items():
                ax.errorbar(list(mine), [one.mean for one in mine.values()],
                            [mean_final_loss(one.best)[1] or 0 for one in mine.values()], **looks[method])
            ax.set(ylabel='final validation loss', title='Final loss at the best settings tried')
        else:
            ax.axhline(0, color=looks[baseline]['color'], label=labels[baseline])
            for rows, method in [(verdict['same_T'], verdict['candidate']) for verdict in verdicts]:
                ax.errorbar([row['T'] for row in rows], [row['difference'] for row in rows],
                            [row['plus_or_minus'] or 0 for row in rows], **looks[method])
            ax.set(ylabel=f"final loss minus {labels[baseline]}'s, 95 % interval", title='Difference at the same T')
        ax.set(xscale='log', xlabel='steps T of the whole schedule')
        ax.set_xticks(Ts, [f'{T:,}' for T in Ts])
        ax.minorticks_off()
    figures.legend(fig, axes[0])
    return fig


if __name__ == '__main__':
    main()
