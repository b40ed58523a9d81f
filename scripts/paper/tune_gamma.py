"""γ and the peak learning rate of Sophia by the paper's procedure (section "Experimental Setup").

  python scripts/paper/tune_gamma.py --out_dir out/tune_gamma -- --optimizer_name=sophiag --dataset=openwebtext

Short runs of a small model (30M unless the arguments say otherwise): γ is halved while more than 50 % of the
coordinates are not clipped, and doubled while fewer than 10 % are. The learning rate is 0.8 × AdamW's if none is given.
Standard output holds the lines for a config file, standard error the rest. The runs stay in out_dir, and the same
command resumes where it stopped.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.arguments import at_least
from analysis.trials import add_launcher, train_all, trials_of
from optimizers import peak_learning_rate, row
from train import resolve

LOW, HIGH = 0.1, 0.5
MOST = 8  # values of γ


def say(text):
    print(text, file=sys.stderr, flush=True)


def runs_arguments(base, iters, learning_rate):
    """The arguments of train.py that the runs share: `base`, made short."""
    config = resolve(base)
    short = dict(max_iters=iters, eval_interval=iters, eval_iters=1, always_save_checkpoint=False,
                 warmup_iters=min(config.values['warmup_iters'], iters // 10),
                 log_interval=min(config.values['log_interval'], max(1, iters // 50)), learning_rate=learning_rate)
    # h is not corrected for its start at 0: while it is below its level in a long run, γ would come out too large.
    estimates = row(config.optimizer_name).hook.estimates(config.hessian_interval, iters)
    beta2 = 0.05 ** (1 / estimates)
    if 'beta2' not in config.given and beta2 < config.values['beta2']:
        short['beta2'] = round(beta2, 4)
        say(f'beta2 = {short["beta2"]} in these runs, for {config.values["beta2"]} in yours: with {estimates} '
            'estimates h then ends at 95 % of its level')
    return [*base, *(f'--{key}={value}' for key, value in short.items())]


def unclipped(gamma, base, out_dir, launcher):
    """Trains with γ, and returns the mean fraction of unclipped coordinates in the last quarter of the run."""
    trial, = trials_of(dict(base=base, runs=[dict(gamma=gamma)]), out_dir)
    trial.check()
    train_all([trial], launcher=launcher)
    if trial.state != 'finished':
        raise SystemExit(f'{trial.out_dir}: {trial.outcome}')
    for path in trial.out_dir.glob('*.pt'):
        path.unlink()  # only the metrics are of use
    fractions = trial.run.series('update_unclipped')[1]
    return statistics.mean(fractions[-max(1, len(fractions) // 4):])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run')
    parser.add_argument('--out_dir', required=True, type=Path, help='each run gets a directory in it')
    parser.add_argument('--iters', type=at_least(1), default=1000, help='iterations of a run (default: 1000)')
    add_launcher(parser)
    args = parser.parse_args(argv)
    config = resolve(args.base)
    if 'model_size' not in config.given:
        args.base.append('--model_size=30M')
        config = resolve(args.base)
    name, gamma, size = (config.values[key] for key in ('optimizer_name', 'gamma', 'model_size'))
    if 'gamma' not in row(name).settings or name == 'gnb_noclip':
        raise SystemExit(f'{name} does not clip by γ; choose an optimizer that does, such as --optimizer_name=sophiag')
    adamw = peak_learning_rate('adamw', size)[0]
    learning_rate, source = float(f'{0.8 * adamw:.3g}'), f"0.8 × AdamW's {adamw:g}"
    if 'learning_rate' in config.given:
        learning_rate, source = config.learning_rate, 'as given'
    base = runs_arguments(args.base, args.iters, learning_rate)

    tried = {}
    for _ in range(MOST):
        tried[gamma] = unclipped(gamma, base, args.out_dir, args.launcher)
        say(f'gamma = {gamma:g}: {tried[gamma]:.1%} not clipped')
        if LOW <= tried[gamma] <= HIGH:
            print(f'optimizer_name = {name!r}')
            print(f'gamma = {gamma:g}  # {tried[gamma]:.0%} not clipped in the last quarter of {args.iters} iterations')
            print(f'learning_rate = {learning_rate:g}  # {source}')
            return
        gamma = gamma / 2 if tried[gamma] > HIGH else gamma * 2
    raise SystemExit(f'no γ among {", ".join(f"{g:g}" for g in sorted(tried))} leaves 10 to 50 % unclipped; start '
                     'elsewhere with --gamma=…, or give more --iters')


if __name__ == '__main__':
    main()
