"""Comparison of runs: checks that they are comparable, the best settings at each horizon, differences and tests."""

import math
import sys
from dataclasses import dataclass

from analysis.figures import label_of
from analysis.runs import by_seed, hyperparameters, mean_final_loss, measured_on, notes_on, seed_of
from analysis.significance import difference, expected_best


def add_tuned(parser):
    """Add the flag --tuned to an ArgumentParser."""
    parser.add_argument('--tuned', nargs='+', default=[], metavar='KEY',
                        help='settings of the protocol that were tuned, so that they may differ, such as warmup_iters')


def method_of(run, by='optimizer_name'):
    """Return the method of a run: its value of the setting `by`, or for 'out_dir' the path it was found in."""
    return run.found_in if by == 'out_dir' else run.config[by]


def check_comparable(runs, free=(), by='optimizer_name'):
    """Exit unless all runs have the same data, validation sequences and protocol. Settings in `free` may differ.

    The protocol is every setting with the role 'model' or 'protocol', the ratio of final to peak learning rate, warm-up
    and cooldown (in iterations, or as a share of the run), the optimizer unless `by` compares optimizers, and β1 within
    a method.
    """
    keys = {key for run in runs for key in run.having('model', 'protocol')} | {'optimizer_name'}
    keys |= {key for key in ('warmup_iters', 'cooldown_iters')
             if not all(same_share(key, runs[0], run) for run in runs)}
    keys -= {'scale_attn_by_inverse_layer_idx'}  # the paper's AdamW and Lion scale attention, its Sophia does not
    free = {*free, by}

    def settings(run):
        return {**measured_on(run), **{key: run.config[key] for key in sorted(keys)},
                'min_lr_ratio': round((run.min_lr or 0) / (run.learning_rate or 1), 4)}

    def check(first, run, settings_of):
        expected, found = settings_of(first), settings_of(run)
        if differing := [key for key in found if found[key] != expected[key] and key not in free]:
            named = [key for key in differing if ' ' not in key]
            raise SystemExit(
                f'{first.out_dir} and {run.out_dir} cannot be compared: '
                + ', '.join(f'{key} is {expected[key]} in one and {found[key]} in the other' for key in differing)
                + (f'; leave one out, or give --tuned {" ".join(named)} if tuned' if named else ''))

    first_of_method = {}
    for run in runs:
        check(runs[0], run, settings)
        check(first_of_method.setdefault(method_of(run, by), run), run, lambda run: {'beta1': run.config.get('beta1')})


def same_share(key, one, two):
    """Return whether a number of iterations is the same share of two runs, up to one iteration of rounding."""
    return abs(one.config[key] * two.max_iters - two.config[key] * one.max_iters) <= max(one.max_iters, two.max_iters)


def finished_runs(runs, free=()):
    """Return the `runs` that trained with one schedule to its end. Print a reason for each run that is left out.

    Settings with which another run diverged are left out. Exit without runs, or if they cannot be compared.
    """
    kept = []
    lost = {hyperparameters(run) for run in runs if run.diverged and run.is_trial}
    for run in runs:
        reason = run.rejected or ('another run of these settings diverged' if hyperparameters(run) in lost else None)
        if reason:
            print(f'left out {run.out_dir}: {reason}', file=sys.stderr)
        else:
            kept.append(run)
    if not kept:
        raise SystemExit('no finished run among these whose settings never diverged; let train.py reach max_iters')
    check_comparable(kept, free)
    for note in notes_on(kept):
        print(f'note: {note}', file=sys.stderr)
    return kept


@dataclass
class Tuned:
    """A method at one horizon T.

    best: the runs with the best hyperparameters, one per seed. tried: such a list for each combination tried.
    trials: their losses. One that diverged counts with its loss at the start, or else the highest loss of the others.
    """
    method: str
    T: int
    best: list
    tried: list
    trials: list

    @property
    def losses(self):
        return [run.final_loss for run in self.best]

    @property
    def mean(self):
        return mean_final_loss(self.best)[0]

    def row(self, column):
        """Return a row of the table of best settings. `column`: header of the column of methods."""
        mean, sd = mean_final_loss(self.best)
        return {column: self.method, 'T': self.T, 'val/loss': mean, 'sd': sd, 'seeds': len(self.best),
                'trials': len(self.trials), 'diverged': sum(group[0].diverged for group in self.tried),
                'learning_rate': self.best[0].learning_rate, 'run': str(self.best[0].out_dir)}


def tuned_at_each_T(method, runs):
    """Return {T: `Tuned`} of a method's `runs`, for each T with a finished run. Hyperparameters that diverged with any
    seed are never the best."""
    found = {}
    # Diverged runs come first, because by_seed keeps the first of several runs with the same settings and seed.
    tried = by_seed(sorted((run for run in runs if run.is_trial), key=lambda run: not run.diverged))
    for T in sorted({group[0].max_iters for group in tried}):
        at_T = [group for group in tried if group[0].max_iters == T]
        lost, groups = ([group for group in at_T if group[0].diverged == diverged] for diverged in (True, False))
        if groups:
            highest = max(loss for group in groups for loss in finite_losses(group))
            trials = losses_of_shared_seeds(groups) + [next(iter(finite_losses(group)), highest) for group in lost]
            found[T] = Tuned(method, T, best_of(groups), groups + lost, trials)
    return found


def best_of(groups):
    """Return the group of seeds with the lowest mean loss among those with the most seeds. A group with fewer wins if
    its mean is lower both over its own seeds and over the shared seeds, so that one lucky run is not enough."""
    best, *others = sorted(groups, key=lambda group: (-len(group), mean_final_loss(group)[0]))
    for group in others:
        if len(group) < len(best) and shared_seeds([group, best]):
            loss, loss_of_best = losses_of_shared_seeds([group, best])
            if loss < loss_of_best and mean_final_loss(group)[0] < mean_final_loss(best)[0]:
                best = group
    return best


def finite_losses(runs):
    """Return all validation losses of `runs` that are finite, in order."""
    return [loss for run in runs for loss in run.series('val/loss')[1] if math.isfinite(loss)]


def shared_seeds(groups):
    return set.intersection(*(set(map(seed_of, group)) for group in groups))


def losses_of_shared_seeds(groups):
    """Return the mean loss of each group over the seeds that all groups share, or over its own if they share none."""
    shared = shared_seeds(groups)
    return [mean_final_loss([run for run in group if seed_of(run) in shared] or group)[0] for group in groups]


def same_horizon(candidate, baseline):
    """Return the row of the same-T table for two `Tuned`."""
    n = min(len(candidate.trials), len(baseline.trials))
    return {'T': candidate.T, 'candidate': candidate.mean, 'baseline': baseline.mean,
            **difference(candidate.losses, baseline.losses, cautious=True),
            'seeds': len(candidate.best), 'seeds of baseline': len(baseline.best),
            'trials': len(candidate.trials), 'trials of baseline': len(baseline.trials),
            'at equal trials': expected_best(candidate.trials, n),
            'baseline at equal trials': expected_best(baseline.trials, n)}


def efficiency_at(candidate, baseline):
    """Return the row of the data-efficiency table at one T, by linear interpolation in log T between the baseline's
    horizons, or None outside of their losses."""
    Ts = sorted(baseline)
    for shorter, longer in zip(Ts, Ts[1:]):
        above, below = baseline[shorter].mean, baseline[longer].mean
        if above >= candidate.mean >= below and above > below:
            steps = shorter * (longer / shorter) ** ((above - candidate.mean) / (above - below))
            one, two = (tuned.best[0].flops_per_iteration() for tuned in (baseline[shorter], candidate))
            return {'T': candidate.T, 'val/loss': candidate.mean, 'baseline steps': steps,
                    'ratio steps': steps / candidate.T,
                    'ratio FLOPs': steps / candidate.T * one / two if one and two else None}
    return None


def weaknesses(tuned):
    """Return reasons to doubt the best settings of a `Tuned`, as sentences."""
    who, found = f'{tuned.method}, T = {tuned.T}', []
    best, *tried = (dict(hyperparameters(group[0])) for group in (tuned.best, *tuned.tried))
    for key in [key for key in best if type(best[key]) in (int, float)]:
        name, fixed = label_of(key), best.keys() - {key, 'min_lr'}
        values = sorted({one[key] for one in tried if type(one.get(key)) in (int, float)
                         and all(one.get(other) == best[other] for other in fixed)})
        if len(values) > 1 and best[key] in (values[0], values[-1]):
            found.append(f'{who}: the best {name}, {best[key]:g}, is at the edge of those tried ({values[0]:g} to '
                         f'{values[-1]:g})')
        elif len(values) == 1 and key == 'learning_rate':
            found.append(f'{who}: one learning rate only'
                         + (' with the other settings of the best' if len(tried) > 1 else ', so nothing was tuned'))
    most = max(len(group) for group in tuned.tried if not group[0].diverged)
    if len(tuned.best) < most:
        found.append(f'{who}: the best has fewer seeds ({len(tuned.best)}) than another setting ({most})')
    return found
