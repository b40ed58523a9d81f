"""Train a grid or a list of runs, here or as a Slurm array; resumable; prints a table by validation loss.

  python scripts/sweep.py --out_dir out/lr --grid optimizer_name=adamw,lion learning_rate=1e-3,2e-3 \\
      -- config/quickstart.py --max_iters=200
  python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
  python scripts/sweep.py --out_dir out/sensitivity            the same again: trains what is missing
  python scripts/sweep.py --out_dir out/sensitivity --table    only the table; reads files, executes nothing

A spec is a JSON object: "base", arguments of train.py for every run, and "runs", a list of objects setting → value, or
→ list of values, of which every combination is one run. There "config" names a config file instead of a setting, and
"base" more arguments for the runs of that object. Other keys, such as "about", are for the reader. A run's directory is
named after its settings; OUT_DIR/sweep.json keeps the spec. scripts/tune.py searches one setting after the other.
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.runs import read_json
from analysis.trials import FAILED, ROOT, add_launcher, show, split_values, train_all, trials_of
from runtime.files import write_json, write_text


def sbatch(trials, out_dir, options):
    """The text of a Slurm array job that trains one trial a task."""
    log = f'{out_dir}/slurm-'.replace('%', '%%') + '%a.out'  # Slurm replaces what follows a single %
    directives = [*map(shlex.quote, (f'--job-name={out_dir.name}', f'--array=0-{len(trials) - 1}', f'--output={log}',
                                     '--requeue', '--open-mode=append', '--signal=TERM@300')),
                  *([options] if options else [])]
    command = shlex.join([sys.executable, str(ROOT / 'scripts/sweep.py'), '--out_dir', str(out_dir)])
    return '\n'.join(['#!/bin/bash', *(f'#SBATCH {line}' for line in directives), f'cd {shlex.quote(str(Path.cwd()))}',
                      # Since Slurm 22.05 srun does not take it over from sbatch.
                      '[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
                      f'srun {command} --only $SLURM_ARRAY_TASK_ID', ''])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run of --grid')
    parser.add_argument('--out_dir', required=True, type=Path, help='a directory per run is made in it')
    parser.add_argument('--spec', help='JSON file (default: the one that this out_dir was started with)')
    parser.add_argument('--grid', nargs='+', action='append', metavar='KEY=V1,V2',
                        help='settings and their values; given several times, several grids')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--only', type=int, metavar='N', help='train only run number N')
    add_launcher(parser)
    parser.add_argument('--slurm', nargs='?', const='', metavar='OPTIONS',
                        help="write OUT_DIR/sweep.sbatch, an array job, instead of training; "
                             "--slurm='--time=1:00 --mem=9G' passes options on to sbatch")
    parser.add_argument('--retry', action='store_true', help='try runs again that diverged')
    parser.add_argument('--dry_run', action='store_true', help='list the runs and their state')
    parser.add_argument('--table', action='store_true', help='print the table, train nothing')
    args = parser.parse_args(argv)
    stored = args.out_dir / 'sweep.json'
    if args.jobs < 1:
        parser.error(f'--jobs {args.jobs}: at least 1')
    if args.spec and (args.grid or args.base):
        parser.error('give --spec, or --grid with arguments after --, not both')
    if not (args.grid or args.spec or stored.is_file()):
        parser.error(f'{stored}: not there; give --spec or --grid')
    if args.grid:
        spec = dict(base=args.base, runs=[split_values('--grid', entry) for entry in args.grid])
    else:
        spec = read_json(args.spec or stored)
    trials = trials_of(spec, args.out_dir)
    if args.only is not None and not 0 <= args.only < len(trials):
        raise SystemExit(f'--only={args.only}: there are runs 0 to {len(trials) - 1}')
    chosen = trials if args.only is None else [trials[args.only]]

    # Config files are programs: what a received directory names must not be executed for a list or a table of it.
    if args.dry_run:
        for number, trial in enumerate(trials):
            print(f'{number}: {trial.state}: train.py {" ".join(trial.argv)}')
        return
    if args.table:
        show(trials, args.out_dir)
        return
    for trial in trials:
        trial.check()
    if args.only is None or not stored.is_file():
        args.out_dir.mkdir(parents=True, exist_ok=True)
        write_json(stored, spec)
    if args.slurm is not None:
        script = args.out_dir.resolve() / 'sweep.sbatch'
        write_text(script, sbatch(trials, args.out_dir.resolve(), args.slurm))
        print(f'sbatch {script}')
        return
    if args.retry:
        for trial in chosen:
            (trial.out_dir / FAILED).unlink(missing_ok=True)
    train_all(chosen, args.jobs, args.launcher)
    show(trials, args.out_dir)
    left = [trial for trial in chosen if not trial.finished and not trial.failure]
    if left:
        raise SystemExit(f'not finished: {len(left)} of {len(chosen)} runs; {left[0].name}: {left[0].last_line}')


if __name__ == '__main__':
    main()
