"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add ../sharpening COMMIT                     the commit is in README.md
  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --tokenizer=byte --out_dir data/books      there
  python records/sharpening/study.py --tree ../sharpening --jobs 2          trains what is missing
  python records/sharpening/study.py --tree ../sharpening --jobs 12 --minutes 9 -- --device=cuda      on a GPU
  python records/sharpening/study.py --tree ../sharpening --list            the runs that are due
  python records/sharpening/study.py --tree ../sharpening --collect         adds finished runs to runs.jsonl
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402

SEEDS = 1342, 1343, 1344  # that no other study on these data has
COMMON = dict(beta1=0.8, beta2=0.9, hessian_parts=16, max_iters=2400, warmup_iters=1200)
RATES = 0.0028, 0.004
RATIOS = 14, 28, 50, 72  # γ / learning rate
POWERS = {'p=0': 'gnb_mean', 'p=0.5': 'gnb_root', 'p=1': 'sophiag'}
# Arm → (optimizer, what else differs from p = 1).
CHANGES = {
    'rows': ('gnb_rows', {}),
    'proportional': ('gnb_proportional', {}),
    'clipped': ('gnb_clipped', {}),
    'no_grad_clip': ('sophiag', dict(grad_clip=0)),
    'beta2=0.97': ('sophiag', dict(beta2=0.97)),
    'beta2=0.99': ('sophiag', dict(beta2=0.99)),
    'warmup=300': ('sophiag', dict(warmup_iters=300)),
    'sign': ('gnb_measured', {}),
}
ARMS = {arm: (optimizer, {}) for arm, optimizer in POWERS.items()} | CHANGES
# (arms, γ / learning rate, learning rate), in order: planned tests (ii) to (iv), (i), then the rest by worth.
ORDER = [(['p=1', 'rows', 'proportional', 'clipped'], 72, RATES[0]), (['p=1', 'rows'], 28, RATES[0]),
         (['no_grad_clip', 'beta2=0.99'], 72, RATES[0]), (['p=0.5'], 72, RATES[0]), (CHANGES, 72, RATES[0]),
         *(([arm], ratio, RATES[0]) for arm in POWERS for ratio in RATIOS),
         (['p=1', 'rows', 'proportional', 'clipped'], 72, RATES[1]), (['p=1', 'rows'], 28, RATES[1]),
         *(([arm], ratio, RATES[1]) for arm in POWERS for ratio in RATIOS), (CHANGES, 72, RATES[1])]


def result(study, place, arm, ratio, rate, seed):
    """Return the result of a run; None, and note it as due, while it is missing."""
    optimizer, settings = ARMS[arm]
    return study.result(place, arm, optimizer, **COMMON | settings, gamma=float(f'{ratio * rate:.4g}'),
                        learning_rate=rate, seed=seed)


def protocol(study):
    """Ask for all runs of the study."""
    for stage, (arms, ratio, rate) in enumerate(ORDER):
        for seed in SEEDS:
            for arm in arms:
                result(study, (stage, seed), arm, ratio, rate, seed)


def command(run):
    """Return the arguments of Python for a run."""
    return ['records/sharpening/run.py', 'config/study.py', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, command)
