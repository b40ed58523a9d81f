"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add ../study COMMIT                      the commits are in README.md
  git worktree add ../study_h b5d4103
  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books
                                                        in each of the two
  python records/fresh_h/study.py --tree ../study --tree_h ../study_h --jobs 2        what is missing
  python records/fresh_h/study.py --tree ../study --tree_h ../study_h --list          the runs that are due
  python records/fresh_h/study.py --tree ../study --tree_h ../study_h --collect       adds finished runs to runs.jsonl
"""

import math
import sys
from operator import itemgetter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402

SEARCH_SEED = 1337  # chooses settings, and takes part in no test
SECOND_SEED = 1336  # decides in part B between the two best
COMMON = dict(beta1=0.8)
FRESH = dict(beta2=0.9, hessian_parts=16)
# Arm → (optimizer, its settings, the first γ tried for each share of unclipped coordinates).
ARMS = {
    'sign momentum': ('clip', {}, {}),
    'fresh': ('sophiag', FRESH, {0.10: 0.05, 0.25: 0.2, 0.50: 0.6}),
    'permuted': ('gnb_permuted', FRESH, {0.10: 0.05, 0.25: 0.2, 0.50: 0.6}),
    'paper': ('sophiag', {}, {0.10: 0.05, 0.25: 0.15, 0.50: 0.5}),
    'mean': ('gnb_mean', FRESH, {0.10: 0.02, 0.25: 0.1, 0.50: 0.4}),
    'AdamW': ('adamw', {}, {}),
    'short memory': ('sophiag', dict(beta2=0.9), {0.10: 0.05, 0.25: 0.15, 0.50: 0.5}),
    'parts': ('sophiag', dict(hessian_parts=16), {0.10: 0.05, 0.25: 0.15, 0.50: 0.5}),
}
# What comes first, as (part, arms): the planned tests of part A need its first four arms only; part B is where an h has
# its best chance.
ORDER = [('A', ('sign momentum', 'fresh', 'permuted', 'paper')), ('B', ('sign momentum', 'paper', 'fresh')),
         ('B', ('permuted',)), ('A', ('mean', 'AdamW')), ('B', ('mean', 'AdamW')),
         ('A', ('short memory', 'parts')), ('C', ())]
A = dict(max_iters=2400, warmup_iters=1200)
B = dict(max_iters=150, warmup_iters=50, total_batch_size=128)
C = dict(max_iters=9600, warmup_iters=2400, gamma=0.05)


def rate_at(k):
    """Return the k-th learning rate of a grid a factor of √2 apart, 0.004 at k = 0."""
    return float(f'{4e-3 * 2 ** (k / 2):.2g}')


class Search:
    """Looks for the best settings of an arm with the seed 1337.

    place: of its runs in the order, as (stage, arm). score: Result → the number that is to be low.
    """

    def __init__(self, study, place, part, optimizer, settings, score=lambda result: result.loss):
        self.study, self.place, self.part, self.optimizer = study, place, part, optimizer
        self.settings, self.score, self.runs = COMMON | settings, score, 0
        self.shares = {}  # γ → unclipped share at the middle learning rate

    def result(self, seed=SEARCH_SEED, **settings):
        """Return a run's `Result`, or None. The arms of a stage take turns: first the first run of each."""
        self.runs += 1
        stage, arm = self.place
        place = (stage, seed != SEARCH_SEED, self.runs, arm)
        return self.study.result(place, self.part, self.optimizer, **self.settings, **settings, seed=seed)

    def share(self, target, gamma, middle):
        """Return a γ with about `target` unclipped coordinates at the learning rate rate_at(middle), or None: within a
        factor of 1.4, or the second correction."""
        for _ in range(2):
            found = self.result(gamma=gamma, learning_rate=rate_at(middle))
            if found is None:
                return None
            if not found.unclipped:
                return gamma
            self.shares[gamma] = found.unclipped
            if target / 1.4 <= found.unclipped <= target * 1.4:
                return gamma
            gamma = self.corrected(target)
        return gamma

    def corrected(self, target):
        """Return the γ at which `target` is expected, given `shares`: logarithms are interpolated between the two
        nearest shares; on one side of all, a share grows like γ to the power of 0.6, as in the dissection."""
        below, above = ([pair for pair in self.shares.items() if (pair[1] < target) == side] for side in (True, False))
        if below and above:
            (low, low_share), (high, high_share) = max(below, key=itemgetter(1)), min(above, key=itemgetter(1))
            gamma = low * (high / low) ** (math.log(target / low_share) / math.log(high_share / low_share))
        else:
            gamma, share = min(self.shares.items(), key=lambda pair: abs(math.log(pair[1] / target)))
            gamma *= min(max((target / share) ** (1 / 0.6), 0.2), 5)
        return float(f'{gamma:.2g}')

    def rates(self, middle, **settings):
        """Try the learning rates around rate_at(middle). Return {settings, as pairs: score}; None while runs are
        missing."""
        found = around(middle, lambda k: self.result(**settings, learning_rate=rate_at(k)), self.score)
        return found and {(*settings.items(), ('learning_rate', rate_at(k))): self.score(found[k]) for k in found}

    def seeds(self, best, seeds):
        """Ask for fresh seeds of the settings `best`, as pairs."""
        for seed in seeds:
            self.result(seed=seed, **dict(best))


def around(middle, find, score, width=1):
    """Return {k: find(k)} of the integers up to `width` from `middle`, and of more while the one with the lowest
    score(find(k)) is at the edge; None while a find(k) is None."""
    found = {k: find(k) for k in sorted(range(middle - width, middle + width + 1), key=lambda k: abs(k - middle))}
    while None not in found.values():
        best = min(found, key=lambda k: score(found[k]))
        if min(found) < best < max(found):
            return found
        k = best - 1 if best == min(found) else best + 1
        found[k] = find(k)
    return None


def lowest(searches):
    """Return the settings with the lowest score in all `searches`, or None while one is missing."""
    if None in searches:
        return None
    scores = {settings: score for search in searches for settings, score in search.items()}
    return min(scores, key=scores.get)


def fresh_h(study, arm, place):
    """Part A for one arm; returns its best settings, as pairs, or None."""
    optimizer, settings, gammas = ARMS[arm]
    search = Search(study, place, 'A', optimizer, settings | A)
    middle = 3 if arm == 'AdamW' else 0
    found = [] if gammas else [search.rates(middle)]
    for target, gamma in gammas.items():
        gamma = search.share(target, gamma, middle)
        if gamma is None:  # the next one's corrections may need this share
            return None
        found.append(search.rates(middle, gamma=gamma))
    best = lowest(found)
    if best:
        search.seeds(best, range(1338, 1342))
    return best


def no_noise(study, arm, best, place):
    """Part B for one arm: the training loss on a fixed mini-batch, around part A's best γ."""
    optimizer, settings, _ = ARMS[arm]
    often = dict(hessian_interval=1) if 'hessian_parts' in settings else {}  # then h lags by ten steps
    search = Search(study, place, 'B', optimizer, settings | often | B, score=lambda result: result.train_loss)
    best = dict(best)
    middle = round(2 * math.log2(best['learning_rate'] / 4e-3)) - 2  # half of part A's best: above, training stalls

    def rates(k):
        return search.rates(middle, gamma=float(f"{best['gamma'] * 3 ** k:.2g}"))

    found = around(0, rates, lambda scores: min(scores.values())) if 'gamma' in best else {0: search.rates(middle)}
    if not found or None in found.values():
        return
    scores = {settings: score for mine in found.values() for settings, score in mine.items()}
    two = sorted(scores, key=scores.get)[:2]
    again = [search.result(seed=SECOND_SEED, **dict(settings)) for settings in two]
    if None not in again:
        means = {settings: (scores[settings] + search.score(result)) / 2 for settings, result in zip(two, again)}
        search.seeds(min(means, key=means.get), range(1338, 1341))


def hutchinson(study, place):
    """Part C: Sophia-H at 9,600 steps."""
    search = Search(study, place, 'C', 'sophiah', C)
    found = lowest([search.rates(-2)])
    if found:
        search.seeds(found, range(1338, 1344))


def protocol(study):
    """Ask for all runs of the study, as far as the results are there."""
    best = {}
    for stage, (part, arms) in enumerate(ORDER):
        for i, arm in enumerate(arms):
            if part == 'A':
                best[arm] = fresh_h(study, arm, (stage, i))
            elif best[arm]:
                no_noise(study, arm, best[arm], (stage, i))
        if part == 'C':
            hutchinson(study, (stage, 0))


def command(run):
    """Return the arguments of Python for a run."""
    program = dict(A=['records/fresh_h/run.py'], B=['records/fresh_h/run.py', '--fixed_batch'], C=['train.py'])
    resume = '--init_from=auto' if run.part == 'C' else '--auto_resume=True'  # b5d4103 has the former
    return [*program[run.part], 'config/study.py', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), resume]


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, ('tree', 'tree_h'), lambda run: 'tree_h' if run.part == 'C' else 'tree',
                 command)
