"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add ../board COMMIT                           the commit is in README.md; the data of sharpening and of
  python records/board/study.py --tree ../board --jobs 2     small_batch. Trains what is missing
  python records/board/study.py --tree ../board --list       the runs that are due
  python records/board/study.py --tree ../board --collect    adds finished runs to runs.jsonl
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402
from records.search import Search, rate_at  # noqa: E402

# Task → (data, sequences a step, steps, by how many factors of √2 its learning rates are below those of ARMS).
TASKS = {'ids_4': ('books_bpe', 4, 2400, 3), 'bytes_32': ('books', 32, 600, 0), 'ids_32': ('books_bpe', 32, 600, 0)}
SHARE = ('gamma', (0.3, 3.0), 0.1)  # γ: of AdamW's learning rate, for what is no matrix of a block
# Arm → (k of its middle learning rate in `rate_at`, the setting tuned with it, two values besides the row's, λ).
ARMS = {
    'adamw': (3, 'beta2', (0.98, 0.998), 0.1),
    'lion': (-1, 'beta2', (0.95, 0.99), 0.2),
    'signum': (-1, 'beta1', (0.9, 0.98), 0.2),
    'muon': (5, *SHARE),
    'normuon': (5, *SHARE),
    'soap': (4, *SHARE),
    'shampoo': (4, *SHARE),
    'shampoo_one_sided': (4, *SHARE),
}
# Steps to a validation loss of 3.28 on FineWeb with GPT-2 of 124M, modded-nanogpt's track 3 at f411b3d: README.md.
STEPS = {'adamw': 4950, 'lion': 12250, 'signum': 13500, 'muon': 3250, 'normuon': 3250, 'soap': 3125, 'shampoo': 4100,
         'shampoo_one_sided': 3375}
GATE = 0.8  # Spearman's correlation of the final losses with these steps, on one task
# Added when AdamW had gained 0.23 of ids_4 by β2: the others' AdamW has it, too, at their best rate of three trials.
BETA2, ADDED = 0.998, {'muon': 4e-3, 'normuon': 8e-3, 'soap': 0.011, 'shampoo': 0.011, 'shampoo_one_sided': 5.7e-3}


def eight_trials(search, middle, key, values, decay):
    """Return the lowest loss of eight trials, None while some are missing: five learning rates, a factor of 2 apart,
    or √2 once the best is inside; with the best, two more values of `key`; with the best of these, twice the row's λ,
    `decay`."""
    def loss(**settings):
        found = search.result(**settings)
        return None if found is None else found.loss

    found = {k: loss(learning_rate=rate_at(k)) for k in (middle, middle - 2, middle + 2)}
    while None not in found.values() and len(found) < 5:
        best = min(found, key=found.get)
        inside = [k for k in range(min(found), max(found)) if k not in found]
        k = (best - 2 if best == min(found) else best + 2 if best == max(found) else
             min(inside, key=lambda k: (abs(k - best), k)))
        found[k] = loss(learning_rate=rate_at(k))
    if None in found.values():
        return None
    best = dict(learning_rate=rate_at(min(found, key=found.get)))
    trials = {None: min(found.values())} | {value: loss(**best, **{key: value}) for value in values}
    if None in trials.values():
        return None
    value = min(trials, key=trials.get)
    decayed = loss(**best, **({} if value is None else {key: value}), weight_decay=2 * decay)
    return None if decayed is None else min(trials[value], decayed)


def common_to(task):
    """Return the settings that all runs of a task have."""
    _, sequences, steps, _ = TASKS[task]
    return dict(max_iters=steps, warmup_iters=steps // 10, total_batch_size=sequences)


def planned(study):
    """Ask for the planned runs; return {task: {arm: lowest loss of its eight trials, None while some are missing}}."""
    lowest = {}
    for stage, (task, (*_, lower)) in enumerate(TASKS.items()):
        common = common_to(task)
        for place, (arm, (middle, key, values, decay)) in enumerate(ARMS.items()):
            search = Search(study, (stage, place), task, arm, common)
            lowest.setdefault(task, {})[arm] = eight_trials(search, middle - lower, key, values, decay)
    return lowest


def with_beta2(study):
    """Ask for the runs of ADDED; return {arm: final loss, None while it is missing}."""
    found = {}
    for place, (arm, rate) in enumerate(ADDED.items()):
        search = Search(study, (0, place), 'ids_4_beta2', arm, common_to('ids_4'))
        result = search.result(learning_rate=rate, beta2=BETA2)
        found[arm] = None if result is None else result.loss
    return found


def protocol(study):
    """Ask for the planned runs and the added ones."""
    planned(study)
    with_beta2(study)


def command(run):
    """Return the arguments of Python for a run."""
    data, sequences, steps, _ = TASKS[run.part.removesuffix('_beta2')]
    return ['records/board/run.py', 'config/study.py', f'--dataset={data}', f'--batch_size={min(16, sequences)}',
            f'--eval_interval={steps // 12}', '--eval_sequences=400', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, command)
