"""Search the best settings one at a time (coordinate search), by training; resumable.

  python scripts/tune.py --out_dir out/tune --noise=0.004 --values learning_rate=5e-4,1e-3,2e-3 gamma=0.05,0.15,0.5 \\
      -- config/quickstart.py --optimizer_name=sophiag

The search starts from the settings of the arguments after --. It tries all values of one setting after another, with
the others unchanged, and keeps the best value if it lowers the validation loss by more than --noise. It ends after a
round without a change. OUT_DIR/tuning.json records the trials and the best settings.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.runs import RunRecord, as_number
from runtime.arguments import at_least
from runtime.files import one_line_errors, write_json
from scripts.trials import canonical, outcome_of, show, split_values, sweep_argparser, train_all, trials_of


def tune(args, values):
    """Search `values`, setting → list; return (content of tuning.json, trials). SystemExit if a run has no result."""
    start = train.resolve(args.base).values
    if problem := RunRecord(args.out_dir, dict(config=start), []).off_schedule:
        raise SystemExit(f'runs could not be compared: {problem}; leave out --lr_decay_iters')
    for key, grid in values.items():
        for value in grid:
            train.resolve([*args.base, f'--{key}={value}'])  # which rejects invalid values
    best, trials = {key: canonical(start[key]) for key in values}, {}
    record = dict(base=args.base, values=values, noise=args.noise, start=best, trials=[])

    def losses_of(candidates):
        found = trials_of(dict(base=args.base, runs=candidates), args.out_dir)
        for trial in found:
            trial.check()
        train_all(found, args.jobs, args.launcher)
        losses = []
        for trial in found:
            loss, state = outcome_of(trial.run)
            if loss is None:
                raise SystemExit(f'{trial.out_dir}: {state}; {trial.last_line}. Then run the same command again')
            if trial.name not in trials:
                trials[trial.name] = trial
                record['trials'].append({**trial.settings, 'run': trial.name, 'val/loss': loss})
            losses.append(loss)
        return losses

    lowest, = losses_of([best])
    before = None
    while best != before:
        before = best
        for key, grid in values.items():
            others = [value for value in dict.fromkeys(map(canonical, grid)) if value != best[key]]
            candidates = [dict(best, **{key: value}) for value in others]
            found = losses_of(candidates)
            if found and min(found) < lowest - args.noise:
                best, lowest = candidates[found.index(min(found))], min(found)
            record.update(best=best, **{'val/loss': lowest})
            write_json(args.out_dir / 'tuning.json', record)
    return record, list(trials.values())


def edges(record):
    """List the settings whose best value is the lowest or the highest of several numbers that were tried."""
    tried = {key: {as_number(trial[key]) for trial in record['trials']} for key in record['best']}
    return [key for key, values in tried.items() if len(values) > 1 and not any(isinstance(v, str) for v in values)
            and as_number(record['best'][key]) in (min(values), max(values))]


@one_line_errors()
def main(argv=None):
    parser = sweep_argparser(__doc__)
    parser.add_argument('--values', required=True, nargs='+', metavar='KEY=V1,V2', help='settings and their values')
    parser.add_argument('--noise', required=True, type=at_least(0, float), metavar='LOSS',
                        help='keep a value only if it lowers the loss by more, e.g. two standard deviations over seeds')
    args = parser.parse_args(argv)
    record, trials = tune(args, split_values('--values', args.values))
    show(trials)
    for key in edges(record):
        print(f'note: the best {key}, {record["best"][key]}, is at the edge of its --values; give more there')
    print(f'best of {len(trials)} settings tried: ' +
          ' '.join(f'--{key}={value}' for key, value in record['best'].items()) +
          f', val loss {record["val/loss"]:.4f} ({args.out_dir / "tuning.json"})')


if __name__ == '__main__':
    main()
