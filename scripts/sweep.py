"""Train a grid or a list of runs; resumable; prints a table by validation loss.

  python scripts/sweep.py --out_dir out/lr --grid optimizer_name=adamw,lion learning_rate=1e-3,2e-3 \\
      -- config/quickstart.py --max_iters=200
  python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
  python scripts/sweep.py --out_dir out/sensitivity            again: trains the missing runs
  python scripts/sweep.py --out_dir out/sensitivity --table    only the table; reads files, executes nothing

A spec is a JSON object: "base", arguments of train.py for every run, and "runs", a list of objects setting → value or
setting → list of values. Every combination of the values is a run. In these objects "config" stands for a config file,
and "base" for more arguments. Other keys, such as "about", are comments. A run's directory is named after its settings;
OUT_DIR/sweep.json keeps the spec. A run that diverged is not trained again unless its directory is removed.
scripts/tune.py searches one setting after another.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.runs import read_json
from runtime.files import one_line_errors, write_json
from scripts.trials import show, split_values, sweep_argparser, train_all, trials_of


@one_line_errors()
def main(argv=None):
    parser = sweep_argparser(__doc__)
    parser.add_argument('--spec', help='JSON file (default: OUT_DIR/sweep.json)')
    parser.add_argument('--grid', nargs='+', action='append', metavar='KEY=V1,V2',
                        help='settings and their values; given several times, several grids')
    parser.add_argument('--table', action='store_true', help='print the table, train nothing')
    args = parser.parse_args(argv)
    stored = args.out_dir / 'sweep.json'
    if args.grid and args.spec or args.base and not args.grid:
        parser.error('pass --spec, or --grid with arguments after --, not both; a spec has its arguments in "base"')
    if not (args.grid or args.spec or stored.is_file()):
        parser.error(f'{stored}: not there; pass --spec or --grid')
    if args.grid:
        spec = dict(base=args.base, runs=[split_values('--grid', entry) for entry in args.grid])
    else:
        spec = read_json(args.spec or stored)
    trials = trials_of(spec, args.out_dir)
    # Config files are programs: printing a table of a received directory must not execute those that it names.
    if args.table:
        show(trials)
        return
    for trial in trials:
        trial.check()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write_json(stored, spec)
    train_all(trials, args.jobs, args.launcher)
    show(trials)
    if left := [trial for trial in trials if not trial.ended]:
        raise SystemExit(f'not finished: {len(left)} of {len(trials)} runs; {left[0].name}: {left[0].last_line}')


if __name__ == '__main__':
    main()
