"""Train every run of the study whose protocol is in the README beside this file. Finished runs are skipped.

  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books
  git worktree add ../study b5d4103                                 the training code of all runs
  python records/dissection/study.py --tree ../study --jobs 2       what is missing; some 30 hours on two CPU cores
  python records/dissection/study.py --tree ../study --list         the runs that are due, and how many are done
  python records/dissection/study.py --tree ../study --collect      adds finished runs to runs.jsonl beside this file

A run is finished once it is in runs.jsonl or in the tree's out/dissection. An interrupted study continues when started
again; runs resume from their newest checkpoint.
"""

import statistics
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies

ORDER = 'ACBFGHDE'  # of the parts; runs of a later one fill the cores while an earlier one waits for a result
SEARCH_SEED = 1337  # chooses settings, and takes part in no test
# Settings that no part of the study tunes; all else is the optimizer's row in optimizers.py.
START = {name: dict(beta1=0.8) for name in ('adamw', 'clip', 'sophiag', 'gnb_mean', 'ef_clip', 'sophiah')}
GAMMAS = 0.0125, 0.05, 0.15, 0.5, 1.5


class Losses:
    """The losses of a `studies.Study`; what is missing becomes due, so that the arms of a part take turns."""

    def __init__(self, study):
        self.study, self.arms = study, Counter()

    def loss(self, part, optimizer, seed=SEARCH_SEED, **settings):
        """Return a run's final validation loss, inf if it diverged; None, and note it as due, if it is not finished."""
        fresh = seed != SEARCH_SEED
        arm = part, optimizer, settings.get('gamma'), fresh
        self.arms[arm] += 1
        place = ORDER.index(part), fresh, self.arms[arm]
        result = self.study.result(place, part, optimizer, **settings, seed=seed)
        return result and result.loss

    def search(self, part, optimizer, rates, widen=True, **settings):
        """Ask for each learning rate, and for more by factors of 2 while the best is at the edge.

        Return {settings, as pairs: loss} of all runs; None while some are missing.
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


def protocol(study):
    """Ask for all runs of the study, as far as the results are there."""
    losses = Losses(study)
    found = dissection(losses)
    if found:
        long_horizon(losses, *found)
        mini_batch(losses, *found)
    edges(losses)


def command(run):
    """Return the arguments of Python for a run. The study's commit has --init_from=auto for --auto_resume."""
    return ['train.py', 'config/study.py', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--init_from=auto']


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, ['tree'], lambda run: 'tree', command)
