"""Is one optimizer k times faster than another? The paper's own criterion (section Evaluation, equation compare).

  python scripts/speedup.py out/sweep --baseline adamw --candidate sophiag

O2 is k times faster than O1 if min over H1 of Eval(O1, T, H1) ≥ Eval(O2, T/k, H2) for some H2, without any tolerance,
for every T at hand. Runs count with the schedule that they were given: one whose learning rate was to decay over more
steps than are compared, or that has not reached its end, is refused. Runs that differ in the seed only are averaged.
"""

import argparse
import math
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.runs import (
    OPTIMIZER_LABELS,
    by_seed,
    check_comparable,
    figure,
    find_runs,
    mean_loss,
    png_path,
    print_table,
    save,
)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='runs of both, or directories of runs')
    parser.add_argument('--baseline', default='adamw', help='O1 (default: adamw)')
    parser.add_argument('--candidate', default='sophiag', help='O2 (default: sophiag)')
    parser.add_argument('--k', type=factor, default=Fraction(2), help='the factor claimed, such as 2, 1.1 or 4/3 '
                        '(default: 2)')
    parser.add_argument('--output', default='speedup.png', help='PNG; .csv and .json beside it (default: speedup.png)')
    args = parser.parse_args(argv)
    png_path(args.output)
    if args.baseline == args.candidate:
        print('note: an optimizer compared with itself; with k > 1 it should fail', file=sys.stderr)
    runs = [run for run in find_runs(args.out_dirs) if run.optimizer_name in (args.baseline, args.candidate)]
    refused = [dict(run=str(run.out_dir), reason=run.rejected) for run in runs if run.rejected]
    runs = [run for run in runs if not run.rejected]
    check_comparable(runs, 'n_layer', 'n_head', 'n_embd', 'total_batch_size')
    best = {name: best_at_each_T(runs, name) for name in (args.baseline, args.candidate)}
    rows, notes = compare(best[args.baseline], best[args.candidate], args.k)
    refused += tempting(best[args.candidate], [T / args.k for T in best[args.baseline]])

    for entry in refused:
        print(f'refused {entry["run"]}: {entry["reason"]}')
    if not rows:
        raise SystemExit(f'nothing to compare: no finished run of {args.candidate} at T/{args.k} for a T of '
                         f'{args.baseline} (T of {args.baseline}: {sorted(best[args.baseline]) or "none"}; of '
                         f'{args.candidate}: {sorted(best[args.candidate]) or "none"})')
    print_table(rows)
    for note in notes:
        print(f'note: {note}')
    holds = all(row['holds'] for row in rows)
    names = [OPTIMIZER_LABELS.get(name, name) for name in (args.candidate, args.baseline)]
    verdict = (f'{names[0]} is {"" if holds else "not "}{args.k} times faster than {names[1]} by the criterion '
               f'(it holds at {sum(row["holds"] for row in rows)} of {len(rows)} T)')
    print(verdict)

    fig, (ax,) = figure()
    for name, style in ((args.baseline, 'o-'), (args.candidate, 's-')):
        Ts = sorted(best[name])
        ax.errorbar(Ts, [best[name][T]['loss'] for T in Ts], [best[name][T]['spread'] for T in Ts], fmt=style,
                    label=OPTIMIZER_LABELS.get(name, name), capsize=3)
    for row in rows:
        ax.annotate('', (row['T/k'], row['loss O2']), (row['T'], row['loss O1']),
                    arrowprops=dict(arrowstyle='->', linewidth=1.5, color='C2' if row['holds'] else 'C3'))
    ax.set(xscale='log', xlabel='steps T of the whole schedule', ylabel='final validation loss',
           title='from O1 at T to O2 at T/k; green: the criterion holds')
    ax.legend()
    save(args.output, fig, rows, verdict=verdict, holds=holds, k=float(args.k), baseline=args.baseline,
         candidate=args.candidate, comparisons=rows, notes=notes, refused=refused)


def factor(text):
    """A factor as an exact fraction, so that T divided by it is a number of steps or is not: 1650 / 1.1 is 1500."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f'{text}: must be a number above 0')
    return value


def best_at_each_T(runs, optimizer_name):
    """{T: the best hyperparameters tried at T: loss and spread (over seeds), run, rates tried}."""
    best = {}
    for group in by_seed([run for run in runs if run.optimizer_name == optimizer_name]):
        T, (loss, spread) = group[0].max_iters, mean_loss(group)
        entry = best.setdefault(T, dict(loss=math.inf, rates=set(), tried=0))
        entry['rates'].add(group[0].learning_rate)
        entry['tried'] += 1
        if loss < entry['loss']:
            entry.update(loss=loss, spread=spread, run=group[0], seeds=len(group))
    return best


def compare(baseline, candidate, k):
    """Rows of the table, one per T at which both sides exist, and notes on how far they can be trusted."""
    rows, notes = [], []
    for T in sorted(baseline):
        if T / k not in candidate:
            continue
        one, two = baseline[T], candidate[T / k]
        rows.append({'T': T, 'T/k': int(T / k), 'loss O1': one['loss'], 'loss O2': two['loss'],
                     'O1 - O2': one['loss'] - two['loss'], 'holds': one['loss'] >= two['loss'],
                     'lr O1': one['run'].learning_rate, 'lr O2': two['run'].learning_rate,
                     'H1 tried': one['tried'], 'H2 tried': two['tried'], 'seeds O1': one['seeds'],
                     'seeds O2': two['seeds'], 'losses cross at k': crossing(T, one['loss'], candidate)})
        rates = sorted(one['rates'])
        if len(rates) == 1:
            notes.append(f'T = {T}: one learning rate of O1 only; the criterion takes the minimum over H1')
        elif one['run'].learning_rate in (rates[0], rates[-1]):
            notes.append(f'T = {T}: the best learning rate of O1, {one["run"].learning_rate:g}, is at the edge of '
                         f'those tried ({rates[0]:g} to {rates[-1]:g})')
        if abs(one['loss'] - two['loss']) <= one['spread'] + two['spread']:
            notes.append(f'T = {T}: the difference is within the spread over seeds')
        elif one['seeds'] == 1 or two['seeds'] == 1:
            notes.append(f'T = {T}: one seed, so the noise of the difference is not known')
    return rows, notes


def crossing(T, loss, candidate):
    """The k at which the candidate's best final loss, interpolated over log T, equals `loss`: '2.31', '> 4', '< 1'."""
    Ts = sorted(candidate)
    if candidate[Ts[0]]['loss'] <= loss:
        return f'>= {T / Ts[0]:.3g}'
    for low, high in zip(Ts, Ts[1:]):
        a, b = candidate[low]['loss'], candidate[high]['loss']
        if b <= loss:
            position = (a - loss) / (a - b)
            return f'{T / math.exp(math.log(low) + position * math.log(high / low)):.3g}'
    return f'< {T / Ts[-1]:.3g}'


def tempting(candidate, wanted):
    """For each wanted number of steps without a run of its own: the longer run whose checkpoint one would like to take,
    and why that does not count."""
    found = []
    for step in map(float, wanted):
        longer = [T for T in candidate if T > step]
        if step not in candidate and longer:
            T = min(longer)
            found.append(dict(run=str(candidate[T]['run'].out_dir), reason=(
                f'as a run of {step:g} steps: its schedule is of {T}, so at step {step:g} its learning rate is still '
                'high; and an optimizer that trains for T/k steps and then rests would pass that comparison too')))
    return found


if __name__ == '__main__':
    main()
