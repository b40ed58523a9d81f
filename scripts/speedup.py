"""Is one optimizer better than another, and how many times faster? Table, verdict and picture of a directory of runs.

  python scripts/speedup.py out/sweep                                       every other optimizer against AdamW
  python scripts/speedup.py out/sweep --baseline adamw --candidate sophiag --k 2
  python scripts/speedup.py losses.csv --baseline AdamW                     of runs that any program has made

At the best hyperparameters tried, averaged over seeds, it compares final losses at the same horizon T and at equal
trials, tests the paper's criterion, Eval(O1, T) ≥ Eval(O2, T/k) at every T, and finds the horizon at which the baseline
reaches the candidate's loss. docs/verdict.md explains each number.
"""

import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis import compare
from analysis.figures import argparser, figure, legend, optimizer_label, parse, print_table, save, set_title, styles
from analysis.runs import by_seed, find_runs, mean_final_loss, notes_on
from analysis.significance import holm
from scripts.arguments import at_least

# The columns printed of the table at the same T; the .json has all.
SAME_T = ['T', 'candidate', 'baseline', 'difference', 'plus_or_minus', 'p', 'p, Holm', 'test', 'seeds',
          'seeds of baseline', 'at equal trials', 'baseline at equal trials']
PANELS = ['loss', 'difference']


def main(argv=None):
    parser = argparser(__doc__, 'speedup.png', '.csv and .json', of_runs=True)
    parser.add_argument('--baseline', default='adamw', metavar='NAME', help='O1 (default: adamw)')
    parser.add_argument('--candidate', nargs='+', metavar='NAME', help='O2, one or several (default: all others)')
    parser.add_argument('--k', type=at_least(1, Fraction), default=Fraction(2),
                        help='the factor claimed, such as 2, 1.1 or 4/3 (default: 2)')
    compare.add_tuned(parser)
    parser.add_argument('--panels', nargs='+', choices=PANELS, default=PANELS, help='default: all')
    args = parse(parser, argv)
    runs = find_runs(args.out_dirs)
    baseline = next((run.optimizer_name for run in runs  # a CSV file may have AdamW
                     if run.optimizer_name.lower() == args.baseline.lower()), args.baseline)
    # The noise is of all optimizers, compared or not.
    noise = compare.noise_of(by_seed([run for run in runs if not run.rejected]))
    candidates = args.candidate or sorted({run.optimizer_name for run in runs} - {baseline})
    if unknown := sorted({*candidates} - {run.optimizer_name for run in runs}):
        raise SystemExit(f'nothing to compare: no run of --candidate {" ".join(unknown)}')
    runs = [run for run in runs if run.optimizer_name in (baseline, *candidates)]
    kept = [run for run in runs if not run.rejected]
    compare.check_comparable([run for run in runs if run.is_trial], args.tuned)
    counted = {run.out_dir for group in by_seed(kept) for run in group}
    rejected = {str(run.out_dir): run.rejected or 'another run has the same settings and seed'
                for run in runs if run.out_dir not in counted}
    for name, reason in rejected.items():
        print(f'rejected {name}: {reason}')
    tuned = {name: compare.tuned_at_each_T(runs, name) for name in (baseline, *candidates)}
    verdicts = [judge(name, baseline, tuned[name], tuned[baseline], args.k, noise) for name in candidates]
    if not any(verdict['criterion'] or verdict['same_T'] for verdict in verdicts):
        found = '; '.join(f'{name} at T = {sorted(sides) or "none"}' for name, sides in tuned.items())
        raise SystemExit(f'nothing to compare: finished runs of {found}; scripts/paper/final_losses.py compares '
                         'settings of one optimizer')

    results = [side.row() for sides in tuned.values() for side in sides.values()]
    print_table(results, [key for key in results[0] if key != 'run'])
    if noise()[0]:
        print('noise of one run over seeds, all T: σ = {:.4f} from {} degrees of freedom'.format(*noise()))
    for verdict in verdicts:
        print()
        for key in ('same_T', 'criterion', 'efficiency'):
            if verdict[key]:
                print_table(verdict[key], SAME_T if key == 'same_T' else None)
                print()
        print('\n'.join(verdict['text']))
    notes = notes_on(kept) + [note for sides in tuned.values() for side in sides.values()
                              for note in compare.weaknesses(side)]
    print('\n'.join(['', *(f'note: {note}' for note in notes)]))
    fig = draw(tuned, baseline, verdicts, args.panels)
    set_title(fig, args.title)
    save(args.output, fig, results, baseline=baseline, k=float(args.k), noise=dict(zip(('sd', 'df'), noise())),
         verdicts=verdicts, notes=notes, rejected=rejected)


def judge(name, baseline_name, candidate, baseline, k, noise):
    """Return the verdict on a candidate: rows of three tables, lines of text, and whether the criterion holds."""
    same = [compare.same_horizon(candidate[T], baseline[T], noise) for T in sorted(candidate.keys() & baseline.keys())]
    tested = [row for row in same if row['p'] is not None]
    for row, p in zip(tested, holm([row['p'] for row in tested])):
        row['p, Holm'] = p
    criterion = [{'T': T, 'T/k': int(T / k), 'baseline at T': baseline[T].mean,
                  'candidate at T/k': candidate[T / k].mean,
                  'holds': baseline[T].mean >= candidate[T / k].mean} for T in sorted(baseline) if T / k in candidate]
    efficiency = [row for T in sorted(candidate) if (row := compare.efficiency_at(candidate[T], baseline))]
    holds = all(row['holds'] for row in criterion) if criterion else None
    text, one, two = [], optimizer_label(baseline_name), optimizer_label(name)
    if criterion:
        text.append(f'{two} is {"" if holds else "not "}{k} times faster than {one} by the criterion (it holds at '
                    f'{sum(row["holds"] for row in criterion)} of {len(criterion)} T)')
    for row in same:
        difference, p, significance = f'{abs(row["difference"]):.4f}', row['p'], 'the noise is not known'
        if p is not None:
            difference += f' ± {row["plus_or_minus"]:.4f}'
            significance = 'within the noise' if p > 0.05 else f'p = {p:.2g}, {row["test"]}'
            if len(tested) > 1 and p <= 0.05:
                significance += f'; {row["p, Holm"]:.2g} after Holm\'s correction for {len(tested)} horizons'
        text.append(f'T = {row["T"]}: {two} ends {difference} {"above" if row["difference"] > 0 else "below"} {one} '
                    f'({significance}; trials: {two} {row["trials"]}, {one} {row["trials of baseline"]})')
    text += [f'T = {row["T"]}: {one} reaches that loss at {row["baseline steps"]:.0f} steps: {two} is '
             f'{row["ratio steps"]:.2f} times as efficient in steps'
             + (f', {row["ratio FLOPs"]:.2f} in FLOPs' if row['ratio FLOPs'] else '') for row in efficiency]
    return dict(candidate=name, holds=holds, text=text, same_T=same, criterion=criterion, efficiency=efficiency)


def draw(tuned, baseline, verdicts, panels):
    """Return the figure of PANELS, side by side, against T: final losses with their standard deviation over seeds;
    differences to the baseline at the same T with their 95 % interval."""
    fig, axes = figure(len(panels), width=4.6, height=3.8)
    looks = {name: dict(style, fmt='o-', capsize=3, markersize=4, label=optimizer_label(name))
             for name, style in zip(tuned, styles(tuned))}
    Ts = sorted({T for sides in tuned.values() for T in sides})
    for ax, panel in zip(axes, panels):
        if panel == 'loss':
            for name, sides in tuned.items():
                ax.errorbar(list(sides), [side.mean for side in sides.values()],
                            [mean_final_loss(side.best)[1] or 0 for side in sides.values()], **looks[name])
            ax.set(ylabel='final validation loss', title='Final loss at the best settings tried')
        else:
            one = optimizer_label(baseline)
            ax.axhline(0, color=looks[baseline]['color'], label=one)
            for rows, name in [(verdict['same_T'], verdict['candidate']) for verdict in verdicts]:
                ax.errorbar([row['T'] for row in rows], [row['difference'] for row in rows],
                            [row['plus_or_minus'] or 0 for row in rows], **looks[name])
            ax.set(ylabel=f"final loss minus {one}'s, 95 % interval", title='Difference at the same T')
        ax.set(xscale='log', xlabel='steps T of the whole schedule')
        ax.set_xticks(Ts, [f'{T:,}' for T in Ts])
        ax.minorticks_off()
    legend(fig, axes[0])
    return fig


if __name__ == '__main__':
    main()
