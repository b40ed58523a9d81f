"""The study of docs/verdict.md: every run of its protocol, in order; what is there already is not run again.

  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books
  python dev/study.py --jobs 2                    everything that is missing; days on two CPU cores
  python dev/study.py --phases rates_600 --optimizers adamw soap          a part of it
  python dev/study.py --collect records/study     copies what a record needs of the finished runs; those of `options`,
                                                  `edges` and `others` to records/study_options and so on

Copies of finished records below --out_dir count as finished runs. On a GPU, which small models do not fill:

  for name in adamw sophiag muon soap; do python dev/study.py --optimizers $name --jobs 4 & done; wait
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.runs import by_seed, find_runs, read_json, read_run  # noqa: E402
from scripts.significance import pooled_sd  # noqa: E402

# Optimizer → five learning rates, a factor of 2 apart, around the best one of the quickstart (docs/small-runs.md).
RATES = {
    'adamw': ['3e-3', '6e-3', '1.2e-2', '2.4e-2', '4.8e-2'],
    'sophiag': ['5e-4', '1e-3', '2e-3', '4e-3', '8e-3'],
    'muon': ['1.2e-2', '2.4e-2', '4.8e-2', '9.6e-2', '0.192'],
    'soap': ['6e-3', '1.2e-2', '2.4e-2', '4.8e-2', '9.6e-2'],
}
# Where they start besides: the rows of the table, with the β1 that short runs favour for AdamW and Sophia-G alike.
START = {
    'adamw': dict(beta1='0.9', beta2='0.95', weight_decay='0.1'),
    'sophiag': dict(beta1='0.9', beta2='0.99', weight_decay='0.2', gamma='0.05', eps='1e-12'),
    'muon': dict(beta1='0.95', beta2='0.95', weight_decay='0.1'),
    'soap': dict(beta1='0.95', beta2='0.95', weight_decay='0.1'),
}
# Three more, for which only the learning rate is tuned.
OTHER_RATES = {
    'lion': ['2.5e-4', '5e-4', '1e-3', '2e-3', '4e-3'],
    'sophiah': ['5e-4', '1e-3', '2e-3', '4e-3', '8e-3'],
    'ef_clip': ['5e-4', '1e-3', '2e-3', '4e-3', '8e-3'],
}
START |= {
    'lion': dict(beta1='0.9', beta2='0.98', weight_decay='0.2'),
    'sophiah': dict(beta1='0.9', beta2='0.99', weight_decay='0.2', gamma='0.01', eps='1e-12'),
    'ef_clip': dict(START['sophiag']),
}
# What the coordinate search at 1,200 steps tries beside the learning rates.
TRIED = dict(warmup_iters=['75', '150', '300', '600'], beta1=['0.8', '0.9', '0.95', '0.98'],
             beta2=['0.9', '0.95', '0.99'], weight_decay=['0', '0.1', '0.2'],
             gamma=['0.0125', '0.05', '0.15', '0.5'], eps=['1e-12', '1e-7'])
# One value beyond those tried, where the loss still fell towards the last of them.
EDGES = {'adamw': dict(beta1='0.7', warmup_iters='900'), 'sophiag': dict(beta1='0.7', warmup_iters='900'),
         'soap': dict(beta2='0.8')}
HORIZONS = [600, 2400, 4800, 9600]
MORE_SEEDS = {600: ['1338', '1339'], 1200: ['1338', '1339'], 2400: ['1338'], 4800: ['1338'], 9600: ['1338']}
THIRD_SEED_AT_9600 = ('adamw', 'sophiag')  # which two seeds each could not tell apart


def sweep(args, name, T, base, *search):
    """Trains what is missing of a search with the optimizer `name` over T steps.

    All its runs are in one directory, each named after everything that is tuned: no phase repeats a run of another.
    """
    command = [sys.executable, 'scripts/sweep.py', '--out_dir', str(args.out_dir / str(T) / name), '--jobs',
               str(args.jobs), *search, '--', 'config/study.py', f'--optimizer_name={name}', f'--max_iters={T}', *base]
    print(' '.join(command), flush=True)
    if not args.dry_run and subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f'{T} {name}: the sweep did not end; start this again when its message is dealt with')


def grid(args, name, T, learning_rates, settings, seeds=()):
    """Trains each learning rate with `settings` (setting → value), with `seeds` or the default one."""
    search = [f'learning_rate={",".join(learning_rates)}', *(f'{key}={value}' for key, value in settings.items())]
    sweep(args, name, T, [], '--grid', *search, *([f'seed={",".join(seeds)}'] if seeds else []))


def start_of(name, T):
    """Setting → value, where the search for `name` starts at T steps: a warm-up of half of them."""
    return dict(warmup_iters=str(T // 2), **START[name])


def lowest(args, name, T):
    """The learning rate with the lowest validation loss in the table that `grid` has left."""
    with (args.out_dir / str(T) / name / 'results.csv').open(encoding='utf-8') as file:
        return next(csv.DictReader(file))['learning_rate']  # sorted


def bracket(args, name, T, tried, settings):
    """(learning rates, the best of them): those `tried`, and more by factors of 2 while the best is at the edge."""
    while True:
        grid(args, name, T, tried, settings)
        if args.dry_run:
            return tried, '?'
        best = lowest(args, name, T)
        if float(best) == float(tried[0]):
            tried = [f'{float(best) / 2:g}', *tried]
        elif float(best) == float(tried[-1]):
            tried = [*tried, f'{float(best) * 2:g}']
        else:
            return tried, best


def rates(args, name, T):
    """The learning rates of `bracket`, and the best with more seeds."""
    best = bracket(args, name, T, (RATES | OTHER_RATES)[name], start_of(name, T))[1]
    grid(args, name, T, [best], start_of(name, T), MORE_SEEDS[T])


def noise(args):
    """Two standard deviations of the validation loss over seeds: of the best learning rates at 1,200 steps, pooled over
    all optimizers. SystemExit where those runs are not finished yet."""
    groups = []
    for name in RATES:
        found = by_seed([run for run in find_runs([args.out_dir / '1200' / name]) if not run.rejected
                         and all(run.config[key] == float(value) for key, value in start_of(name, 1200).items())])
        found = [group for group in found if len(group) > len(MORE_SEEDS[1200])]  # of `rates`; later ones are elsewhere
        if len(found) != 1:
            raise SystemExit(f'{args.out_dir}/1200/{name}: no learning rate with {1 + len(MORE_SEEDS[1200])} finished '
                             'seeds; run --phases rates_1200 first')
        groups.append([run.last('val/loss') for run in found[0]])
    return 2 * pooled_sd(groups)[0]


def tuned(args, name):
    """The coordinate search at 1,200 steps, one round from the best learning rate of `bracket`; the lowest trial with
    more seeds."""
    tried, best = bracket(args, name, 1200, RATES[name], start_of(name, 1200))
    start = dict(learning_rate=best, **start_of(name, 1200))
    values = dict(TRIED, learning_rate=tried)
    sweep(args, name, 1200, [f'--{key}={value}' for key, value in start.items()],
          '--tune', *(f'{key}={",".join(values[key])}' for key in start),
          '--rounds=1', f'--noise={"?" if args.dry_run else f"{noise(args):.4f}"}')
    if not args.dry_run:
        settings = best_of(args, name)
        grid(args, name, 1200, [settings.pop('learning_rate')], settings, MORE_SEEDS[1200])


def best_of(args, name):
    """Setting → value of the lowest trial of the coordinate search; SystemExit while it is not finished."""
    path = args.out_dir / '1200' / name / 'tuning.json'
    record = read_json(path) if path.is_file() else {}
    if not record.get('finished'):
        raise SystemExit(f'{path}: the coordinate search is not finished; run --phases tuned first')
    best = min((trial for trial in record['trials'] if trial['val/loss']), key=lambda trial: trial['val/loss'])
    return {key: best[key] for key in record['start']}


def horizons(args, name):
    """The settings found at 1,200 steps at every other horizon, the warm-up the same share of it. The learning rate is
    bracketed up to 2,400 steps, and then the best of 2,400. The best with more seeds."""
    best = best_of(args, name)
    lr, share = float(best.pop('learning_rate')), float(best['warmup_iters']) / 1200
    for T in HORIZONS:
        settings = dict(best, warmup_iters=str(round(share * T)))
        if T <= 2400:
            found = bracket(args, name, T, [f'{value:g}' for value in (lr / 2, lr, 2 * lr)], settings)[1]
        else:
            grid(args, name, T, [found], settings)
        more = ['1339'] * (T == 9600 and name in THIRD_SEED_AT_9600)
        grid(args, name, T, [found], settings, MORE_SEEDS[T] + more)


def options(args, name):
    """Sophia-G with h from sequences that its gradient does not see, and with bias correction of h: its best settings,
    1,200 steps, three seeds. In a directory of their own: scripts/speedup.py rejects two algorithms under one name."""
    best = best_of(args, name)
    for option in (dict(hessian_sequences='fresh'), dict(hessian_bias_correction='True')):
        settings = best | option
        grid(beside(args, 'options'), name, 1200, [settings.pop('learning_rate')], settings,
             ['1337', *MORE_SEEDS[1200]])


def edges(args, name):
    """The best settings at 1,200 steps with one of them beyond the edge of those tried (`EDGES`), one seed."""
    best = best_of(args, name)
    for key, value in EDGES.get(name, {}).items():
        settings = best | {key: value}
        grid(beside(args, 'edges'), name, 1200, [settings.pop('learning_rate')], settings)


def others(args, name):
    """`rates` at 1,200 steps, in a directory of their own: not tuned like the others there."""
    rates(beside(args, 'others'), name, 1200)


def beside(args, phase):
    """The arguments with the directory of a phase whose runs are not among the others but beside them."""
    return argparse.Namespace(**{**vars(args), 'out_dir': dir_beside(args.out_dir, phase)})


def dir_beside(out_dir, phase):
    """That directory."""
    return out_dir.with_name(f'{out_dir.name}_{phase}')


# Phase → (what it does, its optimizers).
PHASES = dict(rates_600=(partial(rates, T=600), RATES), rates_1200=(partial(rates, T=1200), RATES),
              tuned=(tuned, RATES), horizons=(horizons, RATES), options=(options, ['sophiag']), edges=(edges, EDGES),
              others=(others, OTHER_RATES))


def collect(out_dir, target):
    """Copies the records of the finished runs below `out_dir` and beside it, and how they were chosen."""
    own = ('options', 'edges', 'others')
    for root, there in ((out_dir, target), *((dir_beside(out_dir, phase), dir_beside(target, phase)) for phase in own)):
        for config in sorted(root.rglob('config.json')):
            run = read_run(config.parent)
            if run.diverged or not run.unfinished:
                for name in ('config.json', 'metrics.jsonl', 'failed.txt'):
                    copy(config.with_name(name), root, there)
        for path in root.rglob('tuning.json'):
            copy(path, root, there)


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
    parser.add_argument('--optimizers', nargs='+', choices=START, default=list(START), metavar='NAME',
                        help=f'of {", ".join(START)} (default: all)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--dry_run', action='store_true',
                        help='print the commands up to the search, on which the others depend; train nothing')
    parser.add_argument('--collect', type=Path, metavar='DIR', help='only copy the records of finished runs there')
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.collect:
        collect(args.out_dir, args.collect)
        return
    for phase in args.phases:
        run, names = PHASES[phase]
        for name in args.optimizers:
            if name in names and not (args.dry_run and phase in ('horizons', 'options', 'edges')):
                run(args, name)


if __name__ == '__main__':
    main()
