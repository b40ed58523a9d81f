"""Train a grid or a list of runs; resumable; prints a table by validation loss.

  python scripts/sweep.py --out_dir out/lr --grid optimizer_name=adamw,lion learning_rate=1e-3,2e-3 \\
      -- config/quickstart.py --max_iters=200
  python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
  python scripts/sweep.py --out_dir out/sensitivity            again: trains the missing runs
  python scripts/sweep.py --out_dir out/sensitivity --table    only the table; reads files, executes nothing

A spec is a JSON object: "base", arguments of train.py for every run, and "runs", a list of objects setting → value or
setting → list of values. Every combination of the values is a run. Other keys, such as "about", are comments. A run's
directory is named after its settings; OUT_DIR/sweep.json keeps the spec. A run that diverged is not trained again
unless its directory is removed.
"""

import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.figures import print_table
from analysis.runs import as_number, is_seed, mean_final_loss, notes_on, read_run
from configurator import Config, configure
from model import GPTConfig
from optimizers import defaults_of
from runtime.arguments import argument_parser, at_least
from runtime.files import code_hashes, differing_files, local_path, one_line_errors, write_json
from runtime.signals import undo_at_end

ROOT = Path(__file__).resolve().parents[1]
FITTED = 'hessian_batch_size', 'hessian_parts', 'gradient_accumulation_steps'  # to the launcher's number of ranks
GRACE_SECONDS = 60  # for a run that was told to stop, to save its state


@dataclass
class Trial:
    """One run: its directory, the settings that tell it from others, and the arguments of train.py."""
    out_dir: Path
    settings: dict
    argv: list

    @property
    def run(self):
        """The `RunRecord` so far, or None."""
        return read_run(self.out_dir) if (self.out_dir / 'config.json').is_file() else None

    @property
    def ended(self):
        """Whether the run is finished, or has diverged."""
        run = self.run
        return run is not None and run.ended

    @property
    def last_line(self):
        """The last line of its log.txt, in which earlier starts may have ended otherwise."""
        text = (self.out_dir / 'log.txt').read_text(encoding='utf-8', errors='replace')
        return text.rstrip().split('\n')[-1].strip()

    def check(self):
        """SystemExit unless train.py accepts the arguments, keeps the values that tell the trial from others, and a run
        that is there has them. Executes config files."""
        run = self.run
        # The launcher sets the number of ranks; a run says how many trained it.
        argv = [*self.argv, '--gradient_accumulation_steps=0']
        c = train.resolve(argv, run.about.get('world_size') if run else None)
        asked = configure(train.DEFAULTS, argv).values
        for key, text in self.settings.items():
            if key not in FITTED and c.values[key] != asked[key]:
                raise SystemExit(f'--{key}={text}: would be trained with {c.values[key]!r} '
                                 f'({c.sources[key]}); let derive in train.py keep a value whose key is in c.given')
        if not run:
            return
        unchecked = c.having('run') | {'eval_iters'} | {'dtype'} - c.given  # whose default is this machine's
        if train.finetunes(c):  # these follow the pretrained weights
            unchecked |= asdict(GPTConfig()).keys() - {'block_size', 'dropout'}
        before = {**defaults_of(c), **run.about['config']}
        for key, value in c.values.items():
            if key not in unchecked and value != before.get(key, value):
                raise SystemExit(f'{self.out_dir}: holds a run with {key} = {before[key]!r}, asked for is '
                                 f'{value!r}; choose another --out_dir or remove it')


def outcome_of(run):
    """Return (final validation loss, math.inf if the run diverged; 'finished'), or (None, why it does not count)."""
    if run is None:
        return None, 'not begun'
    if run.diverged:
        return math.inf, f'diverged: {run.failed}'
    return (None, run.rejected) if run.rejected else (run.final_loss, 'finished')


def trials_of(spec, out_dir):
    """Return the `Trial`s of a spec, see the top of this file, in its order; equal ones once."""
    trials = {}
    for grid in spec['runs']:
        for values in itertools.product(*(value if isinstance(value, list) else [value] for value in grid.values())):
            settings = {key: canonical(key, value) for key, value in zip(grid, values)}
            words = [f'{key}={value}' for key, value in settings.items()]
            name = ','.join(word.replace('/', '_').replace(',', '_') for word in words)
            trial = Trial(Path(out_dir) / name, settings, [*spec.get('base', []), *(f'--{word}' for word in words)])
            if trials.setdefault(name, trial).settings != settings:
                raise SystemExit(f'{trial.out_dir}: two runs of this sweep would share this directory, '
                                 f'{" ".join(trials[name].argv)} and {" ".join(trial.argv)}; make two sweeps')
    return list(trials.values())


def canonical(key, value):
    """Return the value of a setting as text, a number in one way: 1e-3 as 0.001, and 1e3 as 1000."""
    default = train.DEFAULTS.get(key)
    if getattr(default, 'type', type(default)) is str:
        return str(value)
    number = as_number(str(value))  # of a JSON true, not 1
    return str(int(number) if isinstance(number, float) and number.is_integer() else number)


def split_values(pairs):
    """Parse KEY=V1,V2 into {setting: list of values}. A mixture of data sets is one value, as is optimizer_args."""
    found = {}
    for pair in pairs:
        key, _, values = pair.partition('=')
        if key in found:
            raise SystemExit(f'{pair}: {key} is there twice; pass all its values at once')
        one = key == 'optimizer_args' or key == 'dataset' and ':' in values
        found[key] = [values] if one else values.split(',')
    return found


def sweep_argparser(doc):
    """Return an ArgumentParser with the arguments of train.py, --out_dir, --jobs, and --launcher, a list of words."""
    parser = argument_parser(doc)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run')
    parser.add_argument('--out_dir', required=True, type=local_path, help='each run gets a directory in it')
    parser.add_argument('--jobs', type=at_least(1), default=1, help='runs at a time (default: 1)')
    parser.add_argument('--launcher', type=shlex.split, default=[sys.executable], metavar='COMMAND',
                        help='starts train.py, e.g. "torchrun --standalone --nproc_per_node=8" (default: this Python)')
    return parser


@undo_at_end()
def train_all(trials, jobs, launcher):
    """Train `trials`, `jobs` at a time, each from where it stopped, unless it has ended. Reports each on stderr."""
    def report(trial):
        state = outcome_of(trial.run)[1] if trial.ended else f'failed: {trial.last_line} (its log.txt)'
        print(f'{trial.out_dir}: {state}', file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    waiting = [trial for trial in trials if not trial.ended]
    try:
        run_in_turns(lambda: waiting, lambda trial, slot: start_trial(trial, launcher, slot, jobs), jobs, report)
    except KeyboardInterrupt:
        raise SystemExit('interrupted; the same command resumes where it stopped') from None


def run_in_turns(due, start, jobs, ended):
    """Run a process for each item of `due()`, `jobs` at a time, until none is left. On an error all save their state.

    Args:
        due: function that returns the items to run, in order; called when a process has ended.
        start: (item, slot) → process; slot: a number below `jobs`.
        ended: called with each item whose process has ended.
    """
    started, running = [], {}  # running: slot → (item, process)
    try:
        while True:
            waiting = [item for item in due() if item not in started]
            for slot, item in zip([slot for slot in range(jobs) if slot not in running], waiting):
                started.append(item)
                running[slot] = item, start(item, slot)
            if not running:
                return
            while not (done := [slot for slot, (_, process) in running.items() if process.poll() is not None]):
                time.sleep(0.1)
            for slot in done:
                ended(running.pop(slot)[0])
    finally:
        if running:
            print('stopping: the runs save their state', file=sys.stderr, flush=True)
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()


def start_trial(trial, launcher, slot, jobs):
    """Start train.py on a trial, the `slot`-th of `jobs` at a time; return the process."""
    env = dict(os.environ)
    if jobs > 1:
        env.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // jobs)))
        gpus = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name]
        if gpus := gpus or [*map(str, range(torch.cuda.device_count()))]:
            n = max(1, len(gpus) // jobs)  # each job gets as many, as one of several ranks needs them
            first = slot * n % len(gpus)
            env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[first:first + n])
    return launch([*launcher, os.path.relpath(ROOT / 'train.py'), *trial.argv, f'--out_dir={trial.out_dir}',
                   '--auto_resume=True'], trial.out_dir, env=env)


def launch(words, out_dir, **options):
    """Start a program, whose output goes to log.txt in `out_dir`; return the process."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with (out_dir / 'log.txt').open('a') as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, **options)


def show(trials):
    """Print a table of `trials`, averaged over seeds, the lowest validation loss first, and notes on what differs. A
    mean is over all seeds, or missing."""
    groups, rows, roles = {}, [], Config(train.DEFAULTS).roles
    for trial in trials:
        settings = tuple((key, value) for key, value in trial.settings.items() if not is_seed(key, roles.get(key)))
        groups.setdefault(settings, []).append(trial.run)
    for settings, runs in groups.items():
        losses, states = zip(*map(outcome_of, runs))
        counted = [] if None in losses else runs
        mean, sd = mean_final_loss(counted) if counted else (None, None)
        row = {**dict(settings), 'val/loss': mean, 'sd': sd, 'seeds': len(runs)}
        for key in ('update_unclipped', 'grad_clipped'):
            values = [run.last(key) for run in counted]
            row[key] = statistics.mean(values) if values and None not in values else None
        rows.append({**row, 'state': '; '.join(dict.fromkeys(states))})
    print_table(sorted(rows, key=lambda row: math.inf if row['val/loss'] is None else row['val/loss']))
    begun = [run for runs in groups.values() for run in runs if run]
    notes = notes_on(begun)
    if files := differing_files(code_hashes(), *(run.about.get('code') for run in begun)):
        notes.append(f'{", ".join(files)} changed since some of these runs were trained; choose another --out_dir to '
                     'train them with the present code')
    for note in notes:
        print(f'note: {note}')


@one_line_errors()
def main(argv=None):
    parser = sweep_argparser(__doc__)
    parser.add_argument('--spec', help='JSON file (default: OUT_DIR/sweep.json)')
    parser.add_argument('--grid', nargs='+', action='append', metavar='KEY=V1,V2',
                        help='settings and their values; given several times, several grids')
    parser.add_argument('--table', action='store_true', help='print the table, train nothing')
    args = parser.parse_args(argv)
    stored = args.out_dir / 'sweep.json'
    if args.grid and args.spec or args.base and not args.grid:
        parser.error('pass --spec, or --grid with arguments after --, not both; a spec has its arguments in "base"')
    if args.grid:
        spec = dict(base=args.base, runs=[split_values(entry) for entry in args.grid])
    else:
        spec = json.loads(Path(args.spec or stored).read_text(encoding='utf-8'))
    trials = trials_of(spec, args.out_dir)
    # Config files are programs: printing a table of a received directory must not execute those that it names.
    if args.table:
        show(trials)
        return
    for trial in trials:
        trial.check()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write_json(stored, spec)
    train_all(trials, args.jobs, args.launcher)
    show(trials)
    if left := [trial for trial in trials if not trial.ended]:
        raise SystemExit(f'not finished: {len(left)} of {len(trials)} runs; {left[0].out_dir}: {left[0].last_line}')


if __name__ == '__main__':
    main()
