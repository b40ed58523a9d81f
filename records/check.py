"""Check that records of runs are complete, print them as a table, and pack directories of runs into records.

  python records/check.py records/study
  python records/check.py out/sweep --pack records/sweep     writes records/sweep/runs.jsonl, a line per run

records/README.md says what a record must hold. If any is incomplete, nothing is packed and the exit code is 1.
"""

import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import print_table
from analysis.runs import find_runs, packed
from runtime.arguments import argument_parser
from runtime.files import local_path, one_line_errors, write_text


def problems(run):
    """List the faults of a record, as clauses."""
    about, machine, commit = run.about, run.about.get('machine') or {}, str(run.about.get('git_commit'))
    places = [word for word in map(str, about.get('command') or []) if re.search(r'(^|=)(/|~|[A-Za-z]:\\)', word)]
    faults = [(not (machine.get('gpu') or machine.get('cpu')), 'config.json does not name the machine (CPU or GPU)'),
              (commit.endswith('+'), 'it was trained with changed code'),
              (not re.fullmatch('[0-9a-f]{40}[+]?', commit), 'config.json has no git_commit'),
              (not about.get('data'), 'config.json has no fingerprint of the data'),
              (run.rejected and not run.diverged, run.rejected),
              (places, f'the command names a place on the machine: {", ".join(places)}')]
    return [clause for wrong, clause in faults if wrong] + run.code_changes


def row(run):
    """Return a record's row of the table."""
    machine = run.about.get('machine') or {}
    return {'record': str(run.out_dir), 'optimizer': run.optimizer_label, 'parameters': run.about['parameters'],
            'T': run.max_iters, 'tokens': run.last('tokens'),
            'learning_rate': run.learning_rate, 'seed': run.config.get('seed'),
            'val/loss': None if run.rejected else run.last('val/loss'),
            'hours': run.lines[-1]['time'] / 3600 if run.lines else None,
            'machine': machine.get('gpu') or machine.get('cpu'), 'commit': str(run.about.get('git_commit'))[:10]}


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR', help='records, or directories of records')
    parser.add_argument('--pack', metavar='DIR', type=local_path,
                        help='write DIR/runs.jsonl, each run named by its path below the one OUT_DIR')
    args = parser.parse_args(argv)
    if args.pack and (args.pack / 'runs.jsonl').exists():
        raise SystemExit(f'--pack {args.pack}: already holds a record, runs.jsonl; choose another DIR or remove it')
    runs = find_runs(args.out_dirs)
    rows = sorted(map(row, runs), key=lambda row: (row['parameters'], row['T'], row['optimizer'],
                                                   row['val/loss'] or math.inf))
    print_table(rows)
    incomplete = {run.out_dir: found for run in runs if (found := problems(run))}
    for out_dir, found in incomplete.items():
        print(f'{out_dir}: {"; ".join(found)}', file=sys.stderr)
    if incomplete:
        raise SystemExit(f'{len(incomplete)} of {len(runs)} records are incomplete'
                         + ('; nothing is packed' if args.pack else ''))
    if args.pack:
        lines = [packed(run, run.out_dir.relative_to(args.out_dirs[0])) + '\n' for run in runs]
        args.pack.mkdir(parents=True, exist_ok=True)
        write_text(args.pack / 'runs.jsonl', ''.join(lines))
    print(f'{len(runs)} records, all complete')


if __name__ == '__main__':
    main()
