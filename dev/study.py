"""The study of docs/verdict.md: every run of its protocol, in order; what is there already is not run again.

  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books
  python dev/study.py --jobs 2                    everything that is missing; days on two CPU cores
  python dev/study.py --phases rates              a part of it
  python dev/study.py --collect records/study     copies what a record needs of the finished runs
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.runs import read_json, read_run  # noqa: E402

# Optimizer → five learning rates around the one that its row of the table has, or that short runs suggested.
RATES = {
    'adamw': ['3e-3', '6e-3', '1.2e-2', '2.4e-2', '4.8e-2'],
    'sophiag': ['5e-4', '1e-3', '2e-3', '4e-3', '8e-3'],
    'muon': ['3e-3', '6e-3', '1.2e-2', '2.4e-2', '4.8e-2'],
    'soap': ['1.5e-3', '3e-3', '6e-3', '1.2e-2', '2.4e-2'],
}
# Where they start, besides: what short runs have shown for AdamW and Sophia-G alike (docs/small-runs.md).
START = {'adamw': ['--beta1=0.9'], 'sophiag': ['--beta1=0.9'], 'muon': [], 'soap': []}
# What the coordinate search at 1,200 steps tries beside the learning rates.
TRIED = dict(warmup_iters='75,150,300,600', beta1='0.8,0.9,0.95,0.98', weight_decay='0,0.1,0.2')
OTHERS_TRIED = dict(beta2='0.95,0.99')
SOPHIA_TRIED = dict(beta2='0.9,0.99', gamma='0.0125,0.05,0.15,0.5', eps='1e-12,1e-7')
NOISE = 0.004  # two standard deviations over seeds of a validation loss
HORIZONS = [600, 1200, 2400, 4800, 9600]


def sweep(out_dir, args, search, *base):
    """Trains what is missing of one sweep."""
    if args.dry_run:
        search = [*search, '--dry_run'] if '--grid' in search else search
    command = [sys.executable, 'scripts/sweep.py', '--out_dir', str(out_dir), '--jobs', str(args.jobs), *search, '--',
               'config/study.py', *base]
    print(' '.join(command), flush=True)
    if args.dry_run and '--tune' in search:
        return
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f'{out_dir}: the sweep did not end; start this again when its message is dealt with')


def rates(args):
    """Five learning rates at 600 steps, a warm-up of half of them. At 1,200 the coordinate search begins with these."""
    for name, values in RATES.items():
        sweep(args.out_dir / 'rates' / name, args, ['--grid', f'learning_rate={",".join(values)}'],
              f'--optimizer_name={name}', '--max_iters=600', '--warmup_iters=300', *START[name])


def tuned(args):
    """The coordinate search of each optimizer at 1,200 steps."""
    for name, values in RATES.items():
        grid = dict(learning_rate=','.join(values), **TRIED, **(SOPHIA_TRIED if name == 'sophiag' else OTHERS_TRIED))
        sweep(args.out_dir / 'tuned' / name, args,
              ['--tune', *(f'{key}={grid[key]}' for key in grid), f'--noise={NOISE}'],
              f'--optimizer_name={name}', '--max_iters=1200', '--warmup_iters=600', *START[name])


def horizons(args):
    """The settings found at 1,200 steps at every horizon, the warm-up the same share of it. Up to 2,400 steps half and
    twice the learning rate, too; three seeds up to 1,200 steps, two beyond."""
    for name in RATES:
        best = dict(read_json(args.out_dir / 'tuned' / name / 'tuning.json')['best'])
        share, lr = float(best.pop('warmup_iters')) / 1200, float(best.pop('learning_rate'))
        for T in HORIZONS:
            base = [f'--optimizer_name={name}', f'--max_iters={T}', f'--warmup_iters={round(share * T)}',
                    *(f'--{key}={value}' for key, value in best.items())]
            near = [lr / 2, lr, 2 * lr] if T <= 2400 else [lr]
            sweep(args.out_dir / f'horizon_{T}' / name, args,
                  ['--grid', f'learning_rate={",".join(f"{value:g}" for value in near)}', '--grid',
                   f'learning_rate={lr:g}', f'seed={"1338,1339" if T <= 1200 else "1338"}'], *base)


def fresh(args):
    """Sophia-G on sequences that its gradient does not see, and with bias correction, at its best settings."""
    best = read_json(args.out_dir / 'tuned' / 'sophiag' / 'tuning.json')['best']
    flags = [f'--{key}={value}' for key, value in best.items()]
    sweep(args.out_dir / 'fresh', args,
          ['--grid', 'hessian_sequences=own,fresh', 'seed=1337,1338,1339',
           '--grid', 'hessian_bias_correction=True', 'seed=1337,1338,1339'],
          '--optimizer_name=sophiag', '--max_iters=1200', *flags)


PHASES = dict(rates=rates, tuned=tuned, horizons=horizons, fresh=fresh)


def collect(out_dir, target):
    """Copies the records of the finished runs below `out_dir`, and how they were chosen."""
    for config in sorted(out_dir.rglob('config.json')):
        run = read_run(config.parent)
        if run.diverged or not run.unfinished:
            for name in ('config.json', 'metrics.jsonl', 'failed.txt'):
                copy(config.with_name(name), out_dir, target)
    for name in ('sweep.json', 'tuning.json'):
        for path in out_dir.rglob(name):
            copy(path, out_dir, target)


def copy(path, out_dir, target):
    """Copies a file below `out_dir`, if there is one, to its place below `target`."""
    if path.is_file():
        there = target / path.relative_to(out_dir)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', type=Path, default=Path('out/study'))
    parser.add_argument('--phases', nargs='+', choices=PHASES, default=list(PHASES), metavar='PHASE',
                        help=f'of {", ".join(PHASES)} (default: all)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--dry_run', action='store_true', help='list the runs and their state')
    parser.add_argument('--collect', type=Path, metavar='DIR', help='only copy the records of finished runs there')
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.collect:
        collect(args.out_dir, args.collect)
        return
    for name in args.phases:
        PHASES[name](args)


if __name__ == '__main__':
    main()
