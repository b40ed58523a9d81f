"""Search for the best settings one at a time (coordinate search). The same command resumes.

  python scripts/tune.py --out_dir out/tune --noise=0.004 --values learning_rate=5e-4,1e-3,2e-3 gamma=0.05,0.15,0.5 \\
      -- config/quickstart.py --optimizer_name=sophiag

Starts from the arguments after --. Tries all values of one setting after another with the others unchanged, and keeps
the best value if it lowers the validation loss by more than --noise. Ends after a round without a change.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.runs import as_number
from runtime.arguments import at_least
from runtime.files import one_line_errors
from scripts.sweep import canonical, outcome_of, show, split_values, sweep_argparser, train_all, trials_of


def search(values, start, noise, losses_of):
    """Return the best settings of a coordinate search and their loss. `values`: {setting: list of its values}. `start`:
    {setting: first value}. `losses_of`: function from a list of settings to their losses."""
    best, before = start, None
    lowest, = losses_of([best])
    while best != before:
        before = best
        for key, grid in values.items():
            others = [{**best, key: value} for value in grid if value != best[key]]
            losses = losses_of(others)
            if others and min(losses) < lowest - noise:
                best, lowest = others[losses.index(min(losses))], min(losses)
    return best, lowest


@one_line_errors()
def main(argv=None):
    parser = sweep_argparser(__doc__)
    parser.add_argument('--values', required=True, nargs='+', metavar='KEY=V1,V2', help='settings and their values')
    parser.add_argument('--noise', required=True, type=at_least(0, float), metavar='LOSS',
                        help='keep a value only if it lowers the loss by more, e.g. two standard deviations over seeds')
    args = parser.parse_args(argv)
    values = {key: [canonical(key, value) for value in grid] for key, grid in split_values(args.values).items()}
    for trial in trials_of(dict(base=args.base, runs=[{key: grid} for key, grid in values.items()]), args.out_dir):
        trial.check()  # rejects invalid values before the first run
    begin, tried = train.resolve(args.base).values, {}

    def losses_of(candidates):
        trials = trials_of(dict(base=args.base, runs=candidates), args.out_dir)
        for trial in trials:
            trial.check()
        train_all(trials, args.jobs, args.launcher)
        tried.update((trial.out_dir, trial) for trial in trials)
        outcomes = [outcome_of(trial.run) for trial in trials]
        for trial, (loss, state) in zip(trials, outcomes):
            if loss is None:
                raise SystemExit(f'{trial.out_dir}: {state}; {trial.last_line}. Then run the same command again')
        return [loss for loss, _ in outcomes]

    best, loss = search(values, {key: canonical(key, begin[key]) for key in values}, args.noise, losses_of)
    show(tried.values())
    for key, value in best.items():
        numbers, best_number = {as_number(trial.settings[key]) for trial in tried.values()}, as_number(value)
        if len(numbers) > 1 and not isinstance(best_number, str) and best_number in (min(numbers), max(numbers)):
            print(f'note: the best {key}, {value}, is at the edge of its --values; give more there')
    print(f'best of {len(tried)} settings tried: {" ".join(f"--{key}={value}" for key, value in best.items())}, '
          f'val loss {loss:.4f}')


if __name__ == '__main__':
    main()
