"""Is one optimizer better than another, and how many times faster? Table, verdict and picture of a directory of runs.

  python scripts/speedup.py out/sweep                                       every other optimizer against AdamW
  python scripts/speedup.py out/sweep --baseline adamw --candidate sophiag --k 2

Four questions, each answered at the best hyperparameters tried, runs that differ in the seed only averaged:

- At the same horizon T, is the candidate's final loss lower, by more than the noise over seeds?
- Would it be with as many trials for both sides? The expected best of n of the trials made.
- The paper's criterion (section Evaluation): O2 is k times faster than O1 if Eval(O1, T) ≥ Eval(O2, T/k) at every T.
- Data efficiency: the horizon at which L(T) = E + A · T^-α, fitted to the baseline, reaches the candidate's loss.

Runs count with the schedule that they were given: one that is unfinished, or was resumed with other settings, is
rejected. All must have the same data, validation sequences and protocol (model, mini-batch, warm-up, final learning
rate; within an optimizer β1 and Sophia's options). docs/verdict.md explains each number.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import SETTING_NAMES, figure, legend, optimizer_label, png_path, print_table, save
from analysis.runs import add_tuned, by_seed, check_comparable, find_runs, hyperparameters, mean_loss
from analysis.significance import difference, expected_best, pooled_sd, seeds_needed, student_quantile

# What is printed of the three tables; the .json has all.
COLUMNS = {'same_T': ['T', 'candidate', 'baseline', 'difference', 'plus or minus', 'p', 'test', 'seeds',
                      'seeds of baseline', 'seeds needed', 'at equal trials', 'baseline at equal trials'],
           'criterion': None,
           'efficiency': None}
DRAWS = 1000  # repetitions of the fit, for the interval of data efficiency


@dataclass
class Tuned:
    """An optimizer at one horizon T: `best`, the runs of its best hyperparameters; of each trial the loss and the
    hyperparameters, a dict.

    A trial is one choice of hyperparameters. One that diverged counts with the loss that it started from.
    """
    T: int
    best: list = field(default_factory=list)
    trials: list = field(default_factory=list)
    tried: list = field(default_factory=list)
    diverged: int = 0
    most: int = 1  # seeds of a setting

    @property
    def losses(self):
        return [run.last('val/loss') for run in self.best]

    @property
    def mean(self):
        return mean_loss(self.best)[0]

    @property
    def learning_rate(self):
        return self.best[0].learning_rate

    def cost(self, unit):
        """Of one iteration: 'steps', 'FLOPs' or 'seconds'."""
        if unit == 'steps':
            return 1.0
        if unit == 'FLOPs':
            return self.best[0].flops_per_iteration()
        return sum(run.records[-1]['time'] / run.max_iters for run in self.best) / len(self.best)

    def row(self):
        mean, sd = mean_loss(self.best)
        return {'optimizer': self.best[0].optimizer_label, 'T': self.T, 'val/loss': mean, 'sd': sd,
                'seeds': len(self.best), 'trials': len(self.trials), 'diverged': self.diverged,
                'learning_rate': self.learning_rate, 'run': str(self.best[0].out_dir)}


def factor(text):
    """A factor as an exact fraction, so that T divided by it is a number of steps or is not: 1650 / 1.1 is 1500."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f'{text}: must be a number above 0')
    return value


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='runs of all, or directories of runs')
    parser.add_argument('--baseline', default='adamw', metavar='NAME', help='O1 (default: adamw)')
    parser.add_argument('--candidate', nargs='+', metavar='NAME', help='O2, one or several (default: all others)')
    parser.add_argument('--k', type=factor, default=Fraction(2), help='the factor claimed, such as 2, 1.1 or 4/3 '
                        '(default: 2)')
    add_tuned(parser)
    parser.add_argument('--output', default='speedup.png', help='PNG; .csv and .json beside it (default: speedup.png)')
    parser.add_argument('--panels', nargs='+', choices=PANELS, default=list(PANELS),
                        help='of the picture (default: all)')
    args = parser.parse_args(argv)
    png_path(args.output)
    if args.baseline in (args.candidate or ()):
        raise SystemExit(f'--candidate {args.baseline}: it is the baseline; choose another, or another --baseline')
    runs = find_runs(args.out_dirs)
    candidates = args.candidate or sorted({run.optimizer_name for run in runs} - {args.baseline})
    runs = [run for run in runs if run.optimizer_name in (args.baseline, *candidates)]
    rejected = [dict(run=str(run.out_dir), reason=run.rejected) for run in runs if run.rejected]
    kept = [run for run in runs if not run.rejected]
    check_comparable(kept + [run for run in runs if run.diverged], args.tuned)
    groups = by_seed(kept)
    counted = {run.out_dir for group in groups for run in group}
    rejected += [dict(run=str(run.out_dir), reason='another run has the same settings and seed') for run in kept
                 if run.out_dir not in counted]
    tuned = {name: tuned_at_each_T(runs, name) for name in (args.baseline, *candidates)}
    for entry in rejected:
        print(f'rejected {entry["run"]}: {entry["reason"]}')
    for name in candidates:
        for line in tempting(tuned[name], [T / args.k for T in tuned[args.baseline]]):
            print(line)
    noise = noise_of(groups)

    results = [side.row() for name in tuned for _, side in sorted(tuned[name].items())]
    verdicts = [judge(name, args.baseline, tuned[name], tuned[args.baseline], args.k, noise) for name in candidates]
    if not any(verdict['criterion'] or verdict['same_T'] for verdict in verdicts):
        others = '; '.join(f'{name} at T = {sorted(tuned[name]) or "none"}' for name in candidates)
        raise SystemExit(f'nothing to compare: {args.baseline} has finished runs at T = '
                         f'{sorted(tuned[args.baseline]) or "none"}; {others or "there is no other optimizer"}')
    print_table(results, [key for key in results[0] if key != 'run'])
    for T in (None, *sorted({run.max_iters for run in runs})):
        if noise(T)[0] and (T is None or noise(T) != noise()):
            print(f'noise of one run over seeds{f", T = {T}" if T else ""}: σ = {noise(T)[0]:.4f} from {noise(T)[1]} '
                  'degrees of freedom')
    for verdict in verdicts:
        print()
        for key, columns in COLUMNS.items():
            if verdict[key]:
                print_table(verdict[key], columns)
                print()
        print('\n'.join(verdict['text']))
    notes = [note for sides in tuned.values() for T in sorted(sides) for note in weaknesses(sides[T])]
    if not verdicts[0]['curve']:
        notes.append(f'{optimizer_label(args.baseline)} has no curve to fit: it needs at least two T, and losses that '
                     'fall')
    print('\n'.join(['', *(f'note: {note}' for note in notes)]))

    fig = draw(tuned, args.baseline, verdicts, args.k, args.panels)
    save(args.output, fig, results, baseline=args.baseline, k=float(args.k), noise=dict(zip(('sd', 'df'), noise())),
         verdicts=verdicts, notes=notes, rejected=rejected)


def tuned_at_each_T(runs, optimizer_name):
    """{T: `Tuned`} of an optimizer, where it has a finished run.

    The best has the lowest mean of those with the most seeds. One with fewer takes its place only where it is lower on
    the seeds that the two share, and also than that mean: a single lucky run does not.
    """
    found, at_T = {}, {}
    runs = [run for run in runs if run.optimizer_name == optimizer_name]
    for group in by_seed([run for run in runs if not run.rejected]):
        at_T.setdefault(group[0].max_iters, []).append(group)
    for T, groups in at_T.items():
        best, *others = sorted(groups, key=lambda group: (-len(group), mean_loss(group)[0]))
        most = len(best)
        for group in others:
            loss, loss_of_best = losses_of_shared_seeds([group, best])
            if len(group) < len(best) and loss < loss_of_best and mean_loss(group)[0] < mean_loss(best)[0]:
                best = group
        found[T] = Tuned(T, best, losses_of_shared_seeds(groups), [dict(hyperparameters(group[0])) for group in groups],
                         most=most)
    for group in by_seed([run for run in runs if run.diverged and run.rejected]):
        side, started = found.get(group[0].max_iters), group[0].series('val/loss')[1]
        if side:
            side.trials.append(started[0] if started else max(side.trials))
            side.tried.append(dict(hyperparameters(group[0])))
            side.diverged += 1
    return found


def losses_of_shared_seeds(groups):
    """The mean loss of each group over the seeds that all groups have; over its own where there are none."""
    shared = set.intersection(*({run.seed for run in group} for group in groups))
    return [mean_loss([run for run in group if run.seed in shared] or group)[0] for group in groups]


def noise_of(groups):
    """A function of T, or of nothing for all T: (σ, degrees of freedom) of the noise within `groups`, lists of runs
    that differ in their seed only: those of T steps where they have at least four degrees of freedom, else all."""
    def noise(T=None):
        found = pooled_sd([[run.last('val/loss') for run in group] for group in groups
                           if T is None or group[0].max_iters == T])
        return found if T is None or found[1] >= 4 else noise()
    return noise


def judge(name, baseline_name, candidate, baseline, k, noise):
    """The verdict on one candidate, a dict.

    same_T, criterion, efficiency: rows of its three tables. text: lines. holds: whether the criterion does, None
    without a T to check it at. curve: that of the baseline.
    """
    same = [same_horizon(candidate[T], baseline[T], noise) for T in sorted(candidate.keys() & baseline.keys())]
    criterion = [{'T': T, 'T/k': int(T / k), f'{optimizer_label(baseline_name)} at T': baseline[T].mean,
                  f'{optimizer_label(name)} at T/k': candidate[T / k].mean,
                  'holds': baseline[T].mean >= candidate[T / k].mean}
                 for T in sorted(baseline) if T / k in candidate]
    curve = fit({T: side.mean for T, side in baseline.items()})
    efficiency = [row for T in sorted(candidate) if (row := efficiency_at(candidate[T], baseline, curve, noise))]
    holds = all(row['holds'] for row in criterion) if criterion else None
    text, one, two = [], optimizer_label(baseline_name), optimizer_label(name)
    if criterion:
        text.append(f'{two} is {"" if holds else "not "}{k} times faster than {one} by the criterion (it holds at '
                    f'{sum(row["holds"] for row in criterion)} of {len(criterion)} T)')
    for row in same:
        sign = 'within the noise' if row['p'] is not None and row['p'] > 0.05 else (
            f'p = {row["p"]:.2g}, {row["test"]}' if row['p'] is not None else 'the noise is not known')
        spread = '' if row['p'] is None else f' ± {row["plus or minus"]:.4f}'
        text.append(f'T = {row["T"]}: {two} ends {abs(row["difference"]):.4f}{spread} '
                    f'{"above" if row["difference"] > 0 else "below"} {one} ({sign}; trials: {two} {row["trials"]}, '
                    f'{one} {row["trials of baseline"]})')
    if efficiency and math.isinf(efficiency[-1]['baseline steps']):
        text.append(f'T = {efficiency[-1]["T"]}: {one} never reaches that loss, by its fitted curve')
    elif efficiency:
        row = efficiency[-1]
        interval = f' ({row["interval of steps"]})' if row['interval of steps'] else ''
        text.append(f'T = {row["T"]}: {one} reaches that loss at {row["baseline steps"]:.0f} steps'
                    f'{" (extrapolated)" if row["extrapolated"] else ""}: {two} is '
                    f'{row["ratio steps"]:.2f} times{interval} as efficient in steps, {row["ratio FLOPs"]:.2f} in FLOPs'
                    + (f', {row["ratio seconds"]:.2f} in seconds' if row['ratio seconds'] else ''))
    return dict(candidate=name, holds=holds, text=text, same_T=same, criterion=criterion, efficiency=efficiency,
                curve=curve and dict(zip(('E', 'A', 'alpha'), curve)))


def same_horizon(candidate, baseline, noise):
    """The row of the table that compares two `Tuned` at one T; *plus or minus* is half of the 95 % interval."""
    n = min(len(candidate.trials), len(baseline.trials))
    found = difference(candidate.losses, baseline.losses, noise(candidate.T))
    tested, error = found['p'] is not None, found['standard_error']
    # The σ of a run that the test used: of these two sides, or of all.
    sd = error / math.sqrt(1 / len(candidate.losses) + 1 / len(baseline.losses)) if tested else None
    return {'T': candidate.T, 'candidate': candidate.mean, 'baseline': baseline.mean, **found,
            'plus or minus': student_quantile(0.05, found['df']) * error if tested else None,
            'seeds needed': seeds_needed(found['difference'], sd) if tested else None,
            'seeds': len(candidate.losses), 'seeds of baseline': len(baseline.losses),
            'trials': len(candidate.trials), 'trials of baseline': len(baseline.trials),
            'at equal trials': expected_best(candidate.trials, n),
            'baseline at equal trials': expected_best(baseline.trials, n)}


def fit(losses):
    """(E, A, α) of L(T) = E + A · T^-α through {T: loss}, E ≥ 0, by least squares; of two T a power law, E = 0.

    A loss may be an array, for as many curves. None where there are fewer T, or where no losses fall; NaN for single
    ones that do not.
    """
    T, y = np.array(sorted(losses), float), np.array([losses[T] for T in sorted(losses)])
    if len(T) < 2:
        return None
    falls = np.polyfit(np.log(T), y, 1)[0] < -1e-9
    if not np.any(falls):
        return None
    if len(T) == 2:
        alpha = np.log(y[0] / y[1]) / math.log(T[1] / T[0])
        found = 0.0 * alpha, y[0] * T[0] ** alpha, alpha
    else:
        least = np.full(y.shape[1:], np.inf)
        found = [np.zeros_like(least) for _ in range(3)]
        for alpha in np.geomspace(0.01, 4, 2000):
            x = T ** -alpha
            A = (x - x.mean()) @ (y - y.mean(0)) / ((x - x.mean()) @ (x - x.mean()))
            E = y.mean(0) - A * x.mean()
            A, E = np.where(E < 0, x @ y / (x @ x), A), np.maximum(E, 0)
            squares = ((E + np.multiply.outer(x, A) - y) ** 2).sum(0)
            found = [np.where(squares < least, new, old) for new, old in zip((E, A, alpha), found)]
            least = np.minimum(squares, least)
    return tuple(np.where(falls, value, np.nan)[()] for value in found)


def horizon(curve, loss):
    """The T at which a fitted curve, or each of several, reaches `loss`; math.inf below its floor E."""
    E, A, alpha = curve
    above = np.asarray(loss > E)
    return np.where(above | np.isnan(E), (A / np.where(above, loss - E, np.nan)) ** (1 / alpha), math.inf)[()]


def efficiency_at(candidate, baseline, curve, noise):
    """The row of the table of data efficiency at one T; None without a curve.

    The interval holds 95 % of what comes out when the fit is repeated with every loss moved by its noise over seeds,
    and the candidate's by the standard error of the curve's residuals besides.
    """
    if not curve:
        return None
    T = float(horizon(curve, candidate.mean))
    nearest = baseline[min(baseline, key=lambda other: abs(math.log(other / candidate.T)))]
    known = all(noise(side.T)[0] is not None for side in [candidate, *baseline.values()])
    if known:
        random, (E, A, alpha) = np.random.default_rng(0), curve
        squares = sum((E + A * T ** -alpha - side.mean) ** 2 for T, side in baseline.items())
        misfit = math.sqrt(squares / (len(baseline) - 3)) if len(baseline) > 3 else 0.0

        def moved(side, misfit=0.0):
            error = math.hypot(noise(side.T)[0] / math.sqrt(len(side.best)), misfit)
            return side.mean + error * random.standard_normal(DRAWS)

        curves = fit({other: moved(side) for other, side in baseline.items()})
        # NaN, of curves that do not fall, comes last.
        ratios = np.sort(horizon(curves, moved(candidate, misfit)) / candidate.T)
        low, high = ratios[[round(0.025 * DRAWS), round(0.975 * DRAWS)]]
    row = {'T': candidate.T, 'val/loss': candidate.mean, 'baseline steps': T}
    machines = {run.machine for run in candidate.best + nearest.best}
    for unit in ('steps', 'FLOPs', 'seconds'):
        comparable = unit != 'seconds' or (len(machines) == 1 and None not in machines)
        row[f'ratio {unit}'] = T * nearest.cost(unit) / (candidate.T * candidate.cost(unit)) if comparable else None
    row['interval of steps'] = f'{low:.3g} to {high:.3g}' if known else None
    row['extrapolated'] = not min(baseline) <= T <= max(baseline)
    return row


def weaknesses(side):
    """What makes the best of a `Tuned` doubtful, a list of sentences: settings whose best value is at the edge of those
    that were tried with everything else as in the best."""
    who, best = f'{side.best[0].optimizer_label}, T = {side.T}', dict(hyperparameters(side.best[0]))
    varied = [key for key in best if key != 'min_lr' and len({tried.get(key) for tried in side.tried}) > 1]
    if not varied:
        return [f'{who}: one learning rate only, so nothing was tuned']
    found = []
    if len(side.best) < side.most:
        found.append(f'{who}: the best has fewer seeds ({len(side.best)}) than another setting ({side.most})')
    for key in dict.fromkeys(['learning_rate', *varied]):
        name = SETTING_NAMES.get(key, key).removeprefix('peak ')
        values = sorted({tried[key] for tried in side.tried if is_number(tried.get(key))
                         and all(tried.get(other) == best[other] for other in varied if other != key)})
        if len(values) == 1 and key == 'learning_rate':
            found.append(f'{who}: one learning rate only with the other settings of the best')
        elif len(values) > 1 and best[key] in (values[0], values[-1]):
            found.append(f'{who}: the best {name}, {best[key]:g}, is at the edge of those tried ({values[0]:g} to '
                         f'{values[-1]:g})')
    return found


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def tempting(candidate, wanted):
    """For each wanted number of steps without a run of its own: the longer run whose checkpoint one would like to take,
    and why that does not count, a line each."""
    found = []
    for step in map(float, wanted):
        longer = [T for T in candidate if T > step]
        if step not in candidate and longer:
            T = min(longer)
            found.append(f'no run of {step:g} steps: {candidate[T].best[0].out_dir} at step {step:g} is none, as its '
                         f'schedule is of {T} and its learning rate still high there')
    return found


def draw(tuned, baseline, verdicts, k, panels):
    """The figure of some of PANELS, side by side."""
    fig, axes = figure(len(panels), width=4.3, height=3.8)
    colors = {name: f'C{i}' for i, name in enumerate(tuned)}
    for ax, panel in zip(axes, panels):
        PANELS[panel](ax, tuned, baseline, verdicts, k, colors)
    legend(fig, axes[0])
    return fig


def draw_loss(ax, tuned, baseline, verdicts, k, colors):
    """Final losses against T, with the fitted curve and the criterion."""
    for name, sides in tuned.items():
        sides = [sides[T] for T in sorted(sides)]
        ax.errorbar([side.T for side in sides], [side.mean for side in sides],
                    [mean_loss(side.best)[1] or 0 for side in sides], fmt='o-', capsize=3, markersize=4,
                    color=colors[name], label=optimizer_label(name))
    curve = verdicts[0]['curve']
    if curve:
        Ts = np.geomspace(min(tuned[baseline]), max(tuned[baseline]), 50)
        ax.plot(Ts, curve['E'] + curve['A'] * Ts ** -curve['alpha'], ':', color=colors[baseline],
                label=f'{optimizer_label(baseline)}, fitted')
    if len(verdicts) == 1 and verdicts[0]['criterion']:
        for row in verdicts[0]['criterion']:
            ax.annotate('', (row['T/k'], list(row.values())[3]), (row['T'], list(row.values())[2]),
                        arrowprops=dict(arrowstyle='->', color='C2' if row['holds'] else 'C3'))
        title = (f'Does {optimizer_label(verdicts[0]["candidate"])} at T/{k} reach {optimizer_label(baseline)} at T? '
                 + ('Yes.' if verdicts[0]['holds'] else 'No.'))
    else:
        title = 'Final loss at the best settings tried'
    ax.set(ylabel='final validation loss', title=title)
    horizons(ax, tuned)


def draw_difference(ax, tuned, baseline, verdicts, k, colors):
    """Differences to the baseline's final loss at the same T, with two standard errors."""
    ax.axhline(0, color=colors[baseline], label=optimizer_label(baseline))
    for verdict in verdicts:
        rows, name = verdict['same_T'], verdict['candidate']
        ax.errorbar([row['T'] for row in rows], [row['difference'] for row in rows],
                    [2 * (row['standard_error'] or 0) for row in rows], fmt='o-', capsize=3, markersize=4,
                    color=colors[name], label=optimizer_label(name))
    ax.set(ylabel=f'final loss minus {optimizer_label(baseline)}\'s', title='Difference at the same T')
    horizons(ax, tuned)


def draw_tuning(ax, tuned, baseline, verdicts, k, colors):
    """The expected best of n trials, at the T at which most optimizers have several; of these the longest."""
    Ts = {T for sides in tuned.values() for T in sides}
    shown = max(Ts, key=lambda T: (sum(T in sides and len(sides[T].trials) > 1 for sides in tuned.values()), T))
    for name, sides in tuned.items():
        if shown in sides:
            trials = sides[shown].trials
            counts = range(1, len(trials) + 1)
            ax.plot(counts, [expected_best(trials, n) for n in counts], 'o-', markersize=4, color=colors[name],
                    label=optimizer_label(name))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel='hyperparameter settings tried', ylabel='expected lowest validation loss',
           title=f'What tuning buys, T = {shown:,}')


def horizons(ax, tuned):
    """Labels the x-axis with the T that there are."""
    Ts = sorted({T for sides in tuned.values() for T in sides})
    ax.set(xscale='log', xlabel='steps T of the whole schedule', xlim=(0.8 * Ts[0], 1.25 * Ts[-1]))
    ax.set_xticks(Ts, [f'{T:,}' for T in Ts])
    ax.minorticks_off()


PANELS = dict(loss=draw_loss, difference=draw_difference, tuning=draw_tuning)


if __name__ == '__main__':
    main()
