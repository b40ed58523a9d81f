"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add --detach ../beta2 COMMIT                  the commit and the data are in README.md
  python records/beta2/study.py --tree ../beta2 --jobs 2     trains what is missing
  python records/beta2/study.py --tree ../beta2 --list       the runs that are due
  python records/beta2/study.py --tree ../beta2 --collect    adds finished runs to runs.jsonl
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402
from records.search import Search, around, rate_at  # noqa: E402

BETA2S = 0.95, 0.998
SEEDS = 1352, 1353, 1354  # used by no other study of this size
MARGIN = 0.10  # preregistered: 0.998 ends at least this much below 0.95
# Optimizer → k of its middle learning rate in `rate_at`, from records/board
OPTIMIZERS = {'adamw': 0, 'muon': 0, 'soap': 2}
SECOND_TEXT = 'adamw', 'muon'
COMMON = dict(max_iters=2400, warmup_iters=240, total_batch_size=4)


def tuned(study, place, optimizer, beta2):
    """Search the learning rate on the books with seed 1337. Ask for the fresh seeds of the best. Return the trials
    {k: final loss} and the losses of the seeds, None while runs are missing."""
    search = Search(study, (0, place), 'books', optimizer, COMMON | dict(beta2=beta2))
    trials = around(OPTIMIZERS[optimizer], lambda k: search.result(learning_rate=rate_at(k)), lambda found: found.loss)
    if trials is None:
        return None, None
    trials = {k: found.loss for k, found in trials.items()}
    return trials, fresh(search, min(trials, key=trials.get))


def transferred(study, place, optimizer, beta2, trials):
    """On Python source, choose with seed 1337 between the two learning rates that are best on the books. Return what
    `tuned` does."""
    if trials is None:
        return None, None
    search = Search(study, (1, place), 'python', optimizer, COMMON | dict(beta2=beta2))
    results = {k: search.result(learning_rate=rate_at(k)) for k in sorted(trials, key=trials.get)[:2]}
    if None in results.values():
        return None, None
    trials = {k: found.loss for k, found in results.items()}
    return trials, fresh(search, min(trials, key=trials.get))


def fresh(search, k):
    """Return the losses of the fresh seeds at the k-th learning rate, None while runs are missing."""
    results = [search.result(learning_rate=rate_at(k), seed=seed) for seed in SEEDS]
    return None if None in results else [found.loss for found in results]


def outcomes(study):
    """Ask for all runs. Return {(text, optimizer, β2): (trials, losses of the fresh seeds)}."""
    found = {}
    for place, (optimizer, beta2) in enumerate((name, beta2) for name in OPTIMIZERS for beta2 in BETA2S):
        found['books', optimizer, beta2] = trials, _ = tuned(study, place, optimizer, beta2)
        if optimizer in SECOND_TEXT:
            found['python', optimizer, beta2] = transferred(study, place, optimizer, beta2, trials)
    return found


def command(run):
    """Return the arguments of Python for a run."""
    return ['records/beta2/run.py', 'config/study.py', f'--dataset={run.part}_bpe', '--batch_size=4',
            '--eval_interval=200', '--eval_sequences=400', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']


if __name__ == '__main__':
    studies.main(outcomes, HERE, __doc__, command)
