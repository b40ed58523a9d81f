"""The protocol of this study (README.md states it in words) as a program: it alone decides which runs are due.

run.py trains them.
"""

from pathlib import Path

from analysis.runs import read_packed

SEARCH_SEED = 1337  # chooses settings, and takes part in no comparison
ARMS = {'AdamW': ('adamw', 1.2e-3), 'Sophia-G': ('sophiag', 4e-4), 'sign momentum': ('clip', 4e-4),
        'fresh': ('sophiag_fresh', 4e-4)}  # arm → (optimizer, middle learning rate)
THREE = ('AdamW', 'Sophia-G', 'sign momentum')
LONG, HALF = dict(max_iters=3000, warmup_iters=1000), dict(max_iters=1500, warmup_iters=500)
LOOK = dict(max_iters=300, warmup_iters=150)
FIRST_GAMMA, SHARE = 0.15, (0.25, 0.40)  # SHARE: of unclipped coordinates
STABLE_SEEDS = range(1341, 1345)  # of part F
EXPLODED, LOWER_GAMMA, ADAMW_DECAY = (1338, 1339), 0.05, 1.2  # ADAMW_DECAY: gives sign momentum AdamW's lr·λ, 4.8e-4
PROPORTIONAL = 'gnb_proportional'  # of records/sharpening: Sophia-G with γ in proportion to the learning rate
# Part F's runs, two at a time: (arm, or what differs; seed) → its pair
PAIR_OF = {('Sophia-G', 1341): 1, ('sign momentum', 1341): 1, ('Sophia-G', 1342): 2, ('Sophia-G', 1343): 2,
           ('Sophia-G', 1344): 3, (LOWER_GAMMA, 1338): 3, (LOWER_GAMMA, 1339): 4, (ADAMW_DECAY, 1341): 4,
           (PROPORTIONAL, 1338): 4, (PROPORTIONAL, 1339): 4}
SHARPENING = Path(__file__).resolve().parents[1] / 'sharpening/runs.jsonl'
DATASET = 'out/gpu/data/books:1,out/gpu/data/heldout:0'


class Arm:
    """The runs of one arm. turn: its place among the arms."""

    def __init__(self, study, name, turn):
        self.study, self.turn = study, turn
        self.optimizer, self.middle = ARMS[name]
        self.has_h = self.optimizer.startswith('sophia')

    def result(self, place, schedule, **settings):
        """Return a run's `Result`, or None. place: (part, round); in a round the arms take turns."""
        return self.study.result((*place, self.turn), place[0], self.optimizer, beta1=0.9, **schedule, **settings)

    def gamma(self):
        """Return the settings of the clip: γ after a look at 300 steps, corrected once; None while that is due."""
        if not self.has_h:
            return {}
        found = self.result(('a', 0), LOOK, gamma=FIRST_GAMMA, learning_rate=self.middle, seed=SEARCH_SEED)
        if found is None:
            return None
        low, high = SHARE
        if found.unclipped is None or low <= found.unclipped <= high:  # None: it diverged
            return dict(gamma=FIRST_GAMMA)
        # In the study of a fresh h the share grows like γ to the power of 0.6.
        factor = ((low + high) / 2 / max(found.unclipped, 1e-9)) ** (1 / 0.6)
        return dict(gamma=float(f'{FIRST_GAMMA * min(max(factor, 0.2), 5):.2g}'))

    def best(self):
        """Return the settings with the lowest loss: the middle learning rate, twice, and then half, or four times if
        twice is better than the middle. None while runs are missing."""
        clip = self.gamma()
        if clip is None:
            return None

        def loss(factor, round_):
            found = self.result(('a', round_), LONG, **clip, learning_rate=factor * self.middle, seed=SEARCH_SEED)
            return None if found is None else found.loss

        losses = {factor: loss(factor, round_) for round_, factor in enumerate((1, 2))}
        if None not in losses.values():
            third = 4 if losses[2] < losses[1] else 0.5
            losses[third] = loss(third, 2)
        if None in losses.values():
            return None
        return dict(clip, learning_rate=min(losses, key=losses.get) * self.middle)


def proportional_gamma_helps(path=SHARPENING):
    """Return whether in the runs of records/sharpening, at γ / learning rate = 72 and the learning rate 0.0028, γ in
    proportion to the learning rate keeps the norm of h below 100 with all three seeds, where the same h passes 500."""
    runs = read_packed(path) if path.exists() else []
    runs = [run for run in runs if (run.learning_rate, run.gamma) == (0.0028, 0.2016)]
    largest = {arm: [max(run.series('hessian_norm')[1]) for run in runs if run.out_dir.parent.name == arm]
               for arm in ('p=1', 'proportional')}
    return all(len(norms) == 3 for norms in largest.values()) and (
        max(largest['proportional']) < 100 and min(largest['p=1']) > 500)


def stable(study, arms, pairs, helps):
    """Ask for the first `pairs` pairs of part F.

    arms: name → (`Arm`, its best settings). helps: whether γ in proportion to the learning rate is pair 4.
    """
    sophia, best = arms['Sophia-G']
    sign, sign_best = arms['sign momentum']
    lower = dict(best, learning_rate=best['learning_rate'] / 2)
    runs = [(sophia, 'Sophia-G', seed, lower) for seed in STABLE_SEEDS]
    runs += [(sign, 'sign momentum', STABLE_SEEDS[0], sign_best)]
    runs += [(sophia, LOWER_GAMMA, seed, dict(best, gamma=LOWER_GAMMA)) for seed in EXPLODED[:1 if helps else 2]]
    if helps:
        proportional = Arm(study, 'Sophia-G', len(arms))
        proportional.optimizer = PROPORTIONAL
        runs += [(proportional, PROPORTIONAL, seed, best) for seed in EXPLODED]
    else:
        runs += [(sign, ADAMW_DECAY, STABLE_SEEDS[0], dict(sign_best, weight_decay=ADAMW_DECAY))]
    for arm, what, seed, settings in runs:
        if PAIR_OF[what, seed] <= pairs:
            arm.result(('f', PAIR_OF[what, seed]), LONG, **settings, seed=seed)


def protocol(study, arms=THREE, over=True, pairs=4):
    """Ask for all runs of the study, as far as the results are there. over: with part D, for time left over; pairs: so
    many of part F."""
    found = {}
    for turn, name in enumerate(arms):
        arm = Arm(study, name, turn)
        best = arm.best()
        if not best:
            continue
        found[name] = arm, best
        for seed in (1338, 1339):
            arm.result(('b', seed), LONG, **best, seed=seed)
        if name in ('AdamW', 'Sophia-G'):
            arm.result(('c', 0), HALF, **best, seed=1338)
        if name == 'Sophia-G':
            half = dict(best, learning_rate=best['learning_rate'] / 2)
            for seed in (1338, 1339):
                arm.result(('e', seed), LONG, **half, seed=seed)
            if over:
                arm.result(('d', 0), LONG, **half, seed=1340)
        if over:
            arm.result(('d', 0), LONG, **best, seed=1340)
            for round_, factor in enumerate((2 ** 0.5, 2 ** -0.5), 1):
                between = float(f'{best["learning_rate"] * factor:.2g}')
                arm.result(('d', round_), LONG, **dict(best, learning_rate=between), seed=SEARCH_SEED)
    if {'Sophia-G', 'sign momentum'} <= found.keys():
        stable(study, found, pairs, proportional_gamma_helps())


def command(run):
    """Return the arguments of Python for a run."""
    program = ['train.py']
    if run.optimizer == PROPORTIONAL:  # which records/sharpening/run.py adds to the table of optimizers
        program = ['-c', 'import sys, records.sharpening.run, train; train.main(sys.argv[1:])']
    return [*program, '--model_size=30M', f'--dataset={DATASET}', '--total_batch_size=32', '--batch_size=32',
            '--eval_interval=1000', '--log_interval=20', f'--optimizer_name={run.optimizer}',
            *(f'--{key}={value:g}' for key, value in run.settings), '--auto_resume=True']
