"""Train every run of the study whose protocol is in the README beside this file. Finished runs are skipped.

  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books
  git worktree add ../study b5d4103                                 the training code of all runs
  python records/dissection/study.py --tree ../study --jobs 2       what is missing; some 30 hours on two CPU cores
  python records/dissection/study.py --tree ../study --list         the runs that are due, and how many are done
  python records/dissection/study.py --tree ../study --collect      adds finished runs to runs.jsonl beside this file

A run is finished once it is in runs.jsonl or in the tree's out/dissection. An interrupted study continues when started
again; runs resume from their newest checkpoint.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from analysis.runs import packed, read_run
from runtime.files import write_text

RECORDS = HERE / 'runs.jsonl'
ORDER = 'ACBFGHDE'  # of the parts; runs of a later one fill the cores while an earlier one waits for a result
SEARCH_SEED = 1337  # chooses settings, and takes part in no test
# Settings that no part of the study tunes; all else is the optimizer's row in optimizers.py.
START = {name: dict(beta1=0.8) for name in ('adamw', 'clip', 'sophiag', 'gnb_mean', 'ef_clip', 'sophiah')}
GAMMAS = 0.0125, 0.05, 0.15, 0.5, 1.5


@dataclass(frozen=True)
class Trial:
    """A run: the part of the study it belongs to, its optimizer, and its other settings as (key, value) pairs."""
    part: str
    optimizer: str
    settings: tuple

    @property
    def path(self):
        """Return its directory, relative to the study's."""
        return Path(self.part, ','.join([self.optimizer, *(f'{key}={value:g}' for key, value in self.settings)]))

    @property
    def command(self):
        """Return the arguments of train.py, without --out_dir."""
        return ['config/study.py', f'--optimizer_name={self.optimizer}',
                *(f'--{key}={value:g}' for key, value in self.settings)]


@dataclass
class Study:
    """A reader of the losses of trials, which collects the trials that are missing.

    out_dir: where runs are. recorded: the losses of runs that need not be there, path → loss.
    """
    out_dir: Path
    recorded: dict = field(default_factory=dict)
    done: set = field(default_factory=set)  # paths of finished trials
    due: list = field(default_factory=list)  # of (what sorts trials, so that the arms of a part take turns; the trial)
    arms: Counter = field(default_factory=Counter)

    def loss(self, part, optimizer, seed=SEARCH_SEED, **settings):
        """Return a run's final validation loss, inf if it diverged; None, and note it as due, if it is not finished."""
        trial = Trial(part, optimizer, (*settings.items(), ('seed', seed)))
        fresh = seed != SEARCH_SEED
        arm = part, optimizer, settings.get('gamma'), fresh
        self.arms[arm] += 1
        loss = self.recorded.get(str(trial.path))
        if loss is None:
            loss = final_loss(self.out_dir / trial.path)
        if loss is None:
            self.due.append((ORDER.index(part), fresh, self.arms[arm], trial))
        else:
            self.done.add(trial.path)
        return loss

    def search(self, part, optimizer, rates, widen=True, **settings):
        """Ask for each learning rate, and for more by factors of 2 while the best is at the edge.

        Return {settings, as pairs: loss} of all trials; None while some are missing.
        """
        settings = dict(START[optimizer], **settings)
        rates = [float(f'{rate:g}') for rate in rates]
        while True:
            losses = {rate: self.loss(part, optimizer, learning_rate=rate, **settings) for rate in rates}
            if None in losses.values():
                return None
            best = min(losses, key=losses.get)
            if widen and best == rates[0]:
                rates = [float(f'{best / 2:g}'), *rates]
            elif widen and best == rates[-1]:
                rates = [*rates, float(f'{best * 2:g}')]
            else:
                return {(('learning_rate', rate), *settings.items()): loss for rate, loss in losses.items()}

    def seeds(self, part, optimizer, settings, seeds):
        """Return the losses of `settings` (pairs) with other seeds; None while some are missing."""
        losses = [self.loss(part, optimizer, seed, **dict(settings)) for seed in seeds]
        return None if None in losses else losses


def final_loss(out_dir):
    """Return the validation loss at the end of a run, inf if it diverged, None if it is not finished."""
    if not (out_dir / 'metrics.jsonl').is_file():
        return None
    run = read_run(out_dir)
    return run.final_loss if run.diverged or not run.unfinished else None


def around(rate):
    """Return half, once and twice a learning rate."""
    return rate / 2, rate, rate * 2


# ----------------------------------------------------------------------------------------------------------------------
# The protocol. What depends on a result that is not there yet returns None.


def dissection(study):
    """Ask for part A, T = 2,400: Sophia-G with one piece left out at a time.

    Return (best learning rate of AdamW, of sign momentum; [(γ, its best learning rate)] of Sophia-G, the best γ
    first), or None.
    """
    T = dict(max_iters=2400, warmup_iters=1200)
    best = {}
    for name, rates in (('adamw', (6e-3, 1.2e-2, 2.4e-2)), ('clip', (1e-3, 2e-3, 4e-3))):
        best[name] = lowest(study, 'A', name, [study.search('A', name, rates, **T)], (1338, 1339, 1340))
    found = {gamma: lowest(study, 'A', 'sophiag', [study.search('A', 'sophiag', (2e-3, 4e-3, 8e-3), gamma=gamma, **T)],
                           (1338, 1339, 1340)) for gamma in GAMMAS}
    lowest(study, 'A', 'sophiah', [study.search('A', 'sophiah', (2e-3, 4e-3, 8e-3), gamma=gamma, **T)
                                   for gamma in (0.01, 0.05)], (1338, 1339, 1340))
    if None in found.values() or None in best.values():
        return None
    gammas = sorted(GAMMAS, key=lambda gamma: found[gamma][1])
    gamma, settings = gammas[0], found[gammas[0]][0]
    study.seeds('A', 'sophiag', settings, (1341, 1342, 1343))  # for the tests: did not choose γ
    for name in ('gnb_mean', 'ef_clip'):
        lowest(study, 'A', name, [study.search('A', name, around(dict(settings)['learning_rate']), gamma=value, **T)
                                  for value in (gamma / 2, gamma * 2)], (1338, 1339, 1340))
    return (*(dict(best[name][0])['learning_rate'] for name in ('adamw', 'clip')),
            [(gamma, dict(found[gamma][0])['learning_rate']) for gamma in gammas])


def lowest(study, part, name, searches, seeds):
    """Return the settings with the lowest loss in `searches`, and their mean loss with the `seeds`, too; or None."""
    if None in searches:
        return None
    losses = {settings: loss for search in searches for settings, loss in search.items()}
    settings = min(losses, key=losses.get)
    others = study.seeds(part, name, settings, seeds)
    return None if others is None else (settings, statistics.mean([losses[settings], *others]))


def long_horizon(study, adamw, clip, gammas):
    """Ask for part C, T = 9,600: each side tuned there, then six fresh seeds of its best settings. Parts F and G: the
    same seeds of sign momentum with Sophia-G's warm-up, and of Sophia-G with the mean of h. Part H: a shorter warm-up.
    """
    T = dict(max_iters=9600, warmup_iters=4800)
    second = next(pair for pair in gammas[1:] if pair[0] == 0.05 or gammas[0][0] == 0.05)  # the paper's γ, or the next
    searches = {
        'adamw': [study.search('C', 'adamw', around(adamw), **T)],
        'sophiag': [study.search('C', 'sophiag', around(rate), gamma=gamma, **T)
                    for gamma, rate in (gammas[0], second)],
        'clip': [study.search('C', 'clip', around(clip), **T)],
    }
    changes = {'adamw': (dict(beta1=0.9), dict(warmup_iters=2400), dict(weight_decay=0.3)),
               'sophiag': (dict(warmup_iters=2400),), 'clip': (dict(warmup_iters=2400),)}
    for name, found in searches.items():
        best = lowest(study, 'C', name, found, ())
        for change in changes[name] if best else ():
            settings = dict(best[0]) | change
            found.append(study.search('C', name, (settings.pop('learning_rate'),), widen=False, **settings))
    if all(None not in found for found in searches.values()):
        seeds = range(1338, 1344)
        best = {name: lowest(study, 'C', name, found, seeds) for name, found in searches.items()}
        if best['sophiag'] and best['clip']:
            sophia, clip = (dict(best[name][0]) for name in ('sophiag', 'clip'))
            if clip['warmup_iters'] != sophia['warmup_iters']:
                study.seeds('F', 'clip', clip | dict(warmup_iters=sophia['warmup_iters']), seeds)
            study.seeds('G', 'gnb_mean', sophia | dict(gamma=sophia['gamma'] / 2), seeds)
        for name in 'adamw', 'sophiag':
            settings, loss = lowest(study, 'C', name, searches[name], ())
            settings = dict(settings, warmup_iters=1200)
            shorter = study.loss('H', name, **settings)
            if shorter is not None and shorter < loss:
                study.seeds('H', name, settings, (1338, 1339, 1340))


def mini_batch(study, adamw, clip, gammas):
    """Ask for part B, T = 1,200: mini-batches 4 times as large. Part D: 16 times, with one seed."""
    T, losses = dict(max_iters=1200, warmup_iters=600), {}
    arms = [('adamw', adamw, {}), ('clip', clip, {}),
            *(('sophiag', rate, dict(gamma=gamma)) for gamma, rate in gammas[:2])]
    for name, rate, more in arms:
        found = study.search('B', name, around(rate), total_batch_size=128, **more, **T)
        found = lowest(study, 'B', name, [found], (1338, 1339, 1340))
        losses.setdefault(name, []).append(found)
    if all(None not in found for found in losses.values()):
        for name, found in losses.items():
            settings = dict(min(found, key=lambda pair: pair[1])[0], total_batch_size=512)
            study.search('D', name, around(settings.pop('learning_rate')), widen=False, **settings)


def edges(study):
    """Ask for part E: the warm-up of 900 at T = 1,200, beyond the longest that the earlier study tried."""
    for name, rate in ('adamw', 6e-3), ('sophiag', 2e-3):
        for warmup in 600, 900:
            study.search('E', name, (rate,), widen=False, max_iters=1200, warmup_iters=warmup)


def plan(out_dir, recorded=()):
    """Return the `Study` so far, its due trials in order: within a part the arms take turns."""
    study = Study(out_dir, dict(recorded))
    found = dissection(study)
    if found:
        long_horizon(study, *found)
        mini_batch(study, *found)
    edges(study)
    study.due = list(dict.fromkeys(trial for *_, trial in sorted(study.due, key=lambda due: due[:-1])))
    return study


# ----------------------------------------------------------------------------------------------------------------------
# Running it


def train_all(tree, out_dir, recorded, jobs):
    """Train until nothing is due, `jobs` runs at a time, one thread each, with the code of the checkout `tree`."""
    running = {}
    try:
        while True:
            for trial in [trial for trial, process in running.items() if process.poll() is not None]:
                running.pop(trial)
                if final_loss(out_dir / trial.path) is None:
                    raise SystemExit(f'{out_dir / trial.path}: the run failed; its last lines are in log.txt there')
            if len(running) < jobs:
                due = [trial for trial in plan(out_dir, recorded).due if trial not in running]
                for trial in due[:jobs - len(running)]:
                    running[trial] = start(tree, out_dir, trial)
            if not running:
                return
            time.sleep(2)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def start(tree, out_dir, trial):
    """Start the training of a trial; return its process."""
    there = out_dir / trial.path
    there.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, 'train.py', *trial.command, f'--out_dir={there.relative_to(tree)}',
               '--init_from=auto']  # the study's commit has this in place of --auto_resume
    print(time.strftime('%H:%M:%S'), trial.path, flush=True)
    with (there / 'log.txt').open('a') as log:
        return subprocess.Popen(command, cwd=tree, env=dict(os.environ, OMP_NUM_THREADS='1'), stdout=log, stderr=log)


def read_records(path=RECORDS):
    """Return the lines of a runs.jsonl as dicts by their run; {} where there is no file."""
    lines = path.read_text(encoding='utf-8').splitlines() if path.is_file() else []
    return {record['run']: record for record in map(json.loads, lines)}


def recorded_loss(record):
    """Return the final validation loss of a line of runs.jsonl, inf if the run diverged."""
    if 'failed' in record:
        return math.inf
    return [loss for loss in record['metrics']['val/loss'] if loss is not None][-1]


def collect(out_dir, path=RECORDS):
    """Add finished runs to a runs.jsonl."""
    records = read_records(path)
    for config in out_dir.rglob('config.json'):
        if final_loss(config.parent) is not None:
            name = str(config.parent.relative_to(out_dir))
            records[name] = json.loads(packed(read_run(config.parent), name))
    write_text(path, ''.join(json.dumps(records[name]) + '\n' for name in sorted(records)))
    print(f'{path}: {len(records)} runs')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tree', type=Path, required=True, help="a checkout of the study's commit, which runs")
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--list', action='store_true', help='print the runs that are due; train nothing')
    parser.add_argument('--collect', action='store_true', help='add finished runs to runs.jsonl beside this file')
    args = parser.parse_args()
    tree = args.tree.resolve()
    out_dir = tree / 'out/dissection'
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    recorded = {name: recorded_loss(record) for name, record in read_records().items()}
    if args.collect:
        collect(out_dir)
    elif args.list:
        study = plan(out_dir, recorded)
        print('\n'.join(str(trial.path) for trial in study.due))
        print(f'{len(study.done)} runs finished, {len(study.due)} due')
    else:
        train_all(tree, out_dir, recorded, args.jobs)


if __name__ == '__main__':
    main()
