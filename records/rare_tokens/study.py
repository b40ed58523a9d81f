"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

  git worktree add ../rare_tokens COMMIT                     the commit is in README.md; the data as for small_batch
  python records/rare_tokens/study.py --tree ../rare_tokens --jobs 2        trains what is missing
  python records/rare_tokens/study.py --tree ../rare_tokens --jobs 12 --minutes 9 -- --device=cuda      on a GPU
  python records/rare_tokens/study.py --tree ../rare_tokens --list          the runs that are due
  python records/rare_tokens/study.py --tree ../rare_tokens --collect       adds finished runs to runs.jsonl
"""

import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records import studies  # noqa: E402
from records.search import Search, gammas, rate_at  # noqa: E402

SEEDS = range(1342, 1348)  # that no other study of this kind has
MORE = range(1348, 1352)  # where equivalence is claimed
COMMON = dict(beta1=0.96, total_batch_size=4, max_iters=2400, warmup_iters=1200)
ESTIMATE = dict(hessian_batch_size=4, hessian_interval=5, hessian_parts=4)
MEMORIES = {100: 0.95, 500: 0.99, 2500: 0.998}  # k / (1 − β2) in steps → β2
FRESH = {memory: ESTIMATE | dict(beta2=beta2) for memory, beta2 in MEMORIES.items()}


def beta2s(missing):
    """Return k → β2 = 1 − `missing` / 3^k, at most 0.9999: four times the steps of a run."""
    return 'beta2', lambda k: min(0.9999, float(f'{1 - missing / 3 ** k:.{3 if k < 1 else 4}g}'))


# Arm → (optimizer, its settings, k of the first learning rate in `rate_at`, the setting that is tuned with it, λ).
ARMS = {
    'mean': ('gnb_mean', FRESH[100], -3, gammas(0.54), 0.2),
    'rms': ('rms', {}, -3, gammas(1), 0.2),
    'mean_embedding': ('mean_embedding', FRESH[100], -3, gammas(0.54), 0.2),
    'fresh_2500': ('sophiag', FRESH[2500], -3, gammas(0.45), 0.2),
    'rows_2500': ('gnb_rows', FRESH[2500], -3, gammas(0.45), 0.2),
    'AdamW': ('adamw', {}, 0, beta2s(0.0067), 0.1),
    'root': ('gnb_root', FRESH[2500], -3, gammas(0.45), 0.2),
    'sign_scaled': ('sign_scaled', {}, -3, gammas(0.33), 0.2),
    'rms_embedding': ('rms_embedding', {}, -3, gammas(1), 0.2),
    'mean_matrices': ('mean_matrices', FRESH[100], -3, gammas(0.54), 0.2),
    'fresh_100': ('sophiag', FRESH[100], -3, gammas(0.45), 0.2),
    'rows_100': ('gnb_rows', FRESH[100], -3, gammas(0.45), 0.2),
    'fresh_500': ('sophiag', FRESH[500], -3, gammas(0.45), 0.2),
    'rows_500': ('gnb_rows', FRESH[500], -3, gammas(0.45), 0.2),
    'sampled_adam': ('sampled_adam', ESTIMATE, 0, beta2s(0.01), 0.1),
}
TESTS = [('rms', 'mean'), ('mean_embedding', 'mean'), ('fresh_2500', 'rows_2500'), ('root', 'AdamW')]
EQUIVALENT = 0.012  # the first test: a difference within this
# Added later, labels or curvature? `mean` and `sampled_adam` with the data's labels in place of sampled ones.
# Arm → (optimizer, its settings, k of the first learning rate, the tuned setting, fresh seeds).
DATA_LABELS = {
    'data_mean': ('data_mean', FRESH[100], -3, gammas(0.54), [*SEEDS, *MORE]),
    'data_adam': ('data_adam', ESTIMATE, -1, beta2s(0.01), SEEDS),
}
DATA_TESTS = [('data_mean', 'mean'), ('data_adam', 'AdamW')]  # both: equivalent within EQUIVALENT
# Of the order; all other arms come last.
STAGES = dict(mean=0, rms=0, mean_embedding=1, fresh_2500=2, rows_2500=2, AdamW=2, root=3, sampled_adam=4,
              sign_scaled=5)


def best_of(study, place, arm, optimizer, settings, middle, tuned, decay):
    """Tune an arm: the setting `tuned`, the learning rate, then twice the weight decay; ask for its fresh seeds."""
    search = Search(study, (STAGES.get(arm, math.inf), place), arm, optimizer, COMMON | settings)
    found = search.tune(middle, *tuned, width=2)
    more = found and search.result(**found[1], weight_decay=2 * decay)
    if more is None:
        return
    loss, best = found
    if more.loss < loss:
        best = best | dict(weight_decay=2 * decay)
    for seed in [*SEEDS, *(MORE if arm in TESTS[0] else ())]:
        search.result(seed=seed, **best)


def with_data_labels(study):
    """Ask for the runs of DATA_LABELS. `data_mean` is tuned like `mean`; `data_adam` has five trials."""
    for place, (arm, (optimizer, settings, middle, (tuned, values), seeds)) in enumerate(DATA_LABELS.items()):
        search = Search(study, (-1, place), arm, optimizer, COMMON | settings)
        if arm == 'data_mean':
            found = search.tune(middle, tuned, values, width=2)
            more = found and search.result(**found[1], weight_decay=0.4)
            best = more and (found[1] | dict(weight_decay=0.4) if more.loss < found[0] else found[1])
        else:
            best = five_trials(search, middle, tuned, values)
        if best:
            for seed in seeds:
                search.result(seed=seed, **best)


def five_trials(search, middle, tuned, values):
    """Return the settings of the best of three values of `tuned` and then three learning rates; None while runs are
    missing."""
    def choose(trials):
        results = [search.result(**trial) for trial in trials]
        return None if None in results else min(zip(results, trials), key=lambda pair: pair[0].loss)[1]

    best = choose([{tuned: values(k), 'learning_rate': rate_at(middle)} for k in (-1, 0, 1)])
    return best and choose([best | dict(learning_rate=rate_at(k)) for k in (middle - 1, middle, middle + 1)])


def protocol(study):
    """Ask for all runs of the study, as far as the results are there."""
    with_data_labels(study)
    for place, (arm, row) in enumerate(ARMS.items()):
        best_of(study, place, arm, *row)


def command(run):
    """Return the arguments of Python for a run."""
    return ['records/rare_tokens/run.py', 'config/study.py', '--dataset=books_bpe', '--batch_size=4',
            '--eval_iters=400', '--eval_interval=2400', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']


if __name__ == '__main__':
    studies.main(protocol, HERE, __doc__, command)
