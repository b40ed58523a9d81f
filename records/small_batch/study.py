"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add ../small_batch COMMIT                     the commit is in README.md
  python records/small_batch/tokenizer.py BOOKS.txt bpe.json
  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=bpe.json --out_dir data/books_bpe
                                                             both there
  python records/small_batch/study.py --tree ../small_batch --jobs 2        trains what is missing
  python records/small_batch/study.py --tree ../small_batch --list          the runs that are due
  python records/small_batch/study.py --tree ../small_batch --collect       adds finished runs to runs.jsonl
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402
from records.fresh_h.study import Search, around, lowest, rate_at  # noqa: E402

SEEDS = range(1338, 1342)  # of the tests
COMMON = dict(total_batch_size=4, beta1=0.96, max_iters=2400, warmup_iters=1200)
PAPER = dict(hessian_batch_size=4)
FRESH = PAPER | dict(beta2=0.95, hessian_interval=5, hessian_parts=4)


def gammas(middle):
    """Return k → γ, a factor of 3 apart."""
    return 'gamma', lambda k: float(f'{middle * 3 ** k:.2g}')


# Arm → (optimizer, its settings, k of the first learning rate in `rate_at`, the setting that is tuned with it).
ARMS = {
    'sign momentum': ('clip', {}, -3, None),
    'fresh': ('sophiag', FRESH, -3, gammas(0.15)),
    'permuted': ('gnb_permuted', FRESH, -3, gammas(0.15)),
    'paper': ('sophiag', PAPER, -3, gammas(0.15)),
    'mean': ('gnb_mean', FRESH, -3, gammas(0.06)),
    'AdamW': ('adamw', {}, -1, ('beta2', lambda k: float(f'{1 - 0.02 / 3 ** k:.3g}'))),  # 0.94, 0.98, 0.993
}


def tune(search, middle, tuned, width=1):
    """Tune the setting `tuned` at the learning rate rate_at(middle), then the learning rate. Return the best settings,
    as pairs; None while runs are missing. The setting has 2·`width` + 1 values, and more while the best is at the edge.
    """
    if not tuned:
        return lowest([search.rates(middle)])
    key, value = tuned
    found = around(0, lambda k: search.result(**{key: value(k)}, learning_rate=rate_at(middle)), search.score,
                   width)
    if not found:
        return None
    best = min(found, key=lambda k: search.score(found[k]))
    return lowest([search.rates(middle, **{key: value(best)})])


def protocol(study):
    """Ask for all runs of the study, as far as the results are there."""
    for place, (arm, (optimizer, settings, middle, tuned)) in enumerate(ARMS.items()):
        stage = arm == 'AdamW'  # last, because no planned test needs it
        search = Search(study, (stage, place), 'A', optimizer, settings | COMMON)
        if best := tune(search, middle, tuned):
            search.seeds(best, SEEDS)
    # Added after the planned tests: with a fresh h the search left 1 % unclipped. Had it stopped too early?
    added = Search(study, (0, len(ARMS)), 'B', 'sophiag', FRESH | COMMON)
    for gamma in (1.3, 4.0):
        added.result(gamma=gamma, learning_rate=rate_at(-3))


def command(run):
    """Return the arguments of Python for a run."""
    return ['records/fresh_h/run.py', 'config/study.py', '--dataset=books_bpe', '--batch_size=4', '--eval_iters=400',
            '--eval_interval=2400', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, ['tree'], lambda run: 'tree', command)
