"""Train a grid or a list of runs, and print a table sorted by validation loss.

  python scripts/sweep.py --out_dir out/lr --grid optimizer_name=adamw,lion learning_rate=1e-3,2e-3 \\
      -- config/quickstart.py --max_iters=200
  python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
  python scripts/sweep.py --out_dir out/sensitivity            again: trains the missing runs
  python scripts/sweep.py --out_dir out/sensitivity --table    only prints the table; executes nothing

A spec is a JSON object: "base", a list of arguments of train.py for every run, and "runs", a list of objects with a
value or a list of values for each setting. Every combination of values is a run, in a directory named after its
settings. OUT_DIR/sweep.json keeps the spec. Diverged runs are not trained again unless their directory is removed.
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
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.figures import print_table
from analysis.runs import is_seed, mean_final_loss, notes_on, read_run
from configurator import Config, from_text
from runtime.arguments import argument_parser, at_least
from runtime.files import local_path, one_line, one_line_errors, write_json
from runtime.signals import undo_at_end

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 60  # a stopping run has this long to save its state


@dataclass
class Trial:
    """One run: its directory, the settings that are varied, and the arguments of train.py."""
    out_dir: Path
    settings: dict
    argv: list

    @property
    def run(self):
        """The `RunRecord`, or None if there is no run yet."""
        return read_run(self.out_dir) if (self.out_dir / 'config.json').is_file() else None

    @property
    def ended(self):
        """Whether the run has finished or diverged."""
        return bool(run := self.run) and run.ended

    @property
    def last_line(self):
        """The last line of its log.txt."""
        text = (self.out_dir / 'log.txt').read_text(encoding='utf-8', errors='replace')
        return text.rstrip().split('\n')[-1].strip()

    def check(self):
        """Exit unless train.py accepts the arguments, and an existing run has them. Executes config files."""
        run = self.run
        # The launcher sets the number of ranks; config.json records it.
        c = train.resolve([*self.argv, '--gradient_accumulation_steps=0'], run and run.about.get('world_size'))
        unchecked = c.having('run') | {'eval_iters'} | {'dtype'} - c.given  # the machine decides the default dtype
        if train.finetunes(c):  # the pretrained weights decide the shape
            unchecked |= c.having('model') - {'block_size', 'dropout'}
        before = run.about['config'] if run else {}
        for key, value in c.values.items():
            if key not in unchecked and value != before.get(key, value):
                raise SystemExit(f'{self.out_dir}: holds a run with {key} = {before[key]!r}, not {value!r}; choose '
                                 'another --out_dir or remove it')


def outcome_of(run):
    """Return (final validation loss, 'finished'), math.inf for a diverged run, or (None, reason)."""
    if run is None:
        return None, 'not begun'
    if run.diverged:
        return math.inf, f'diverged: {run.failed}'
    return (None, run.rejected) if run.rejected else (run.final_loss, 'finished')


def trials_of(spec, out_dir):
    """Return the distinct `Trial`s of a spec (see the top of this file) in its order."""
    trials = {}
    for grid in spec['runs']:
        for values in itertools.product(*(value if isinstance(value, list) else [value] for value in grid.values())):
            settings = {key: canonical(key, value) for key, value in zip(grid, values)}
            words = [f'{key}={value}' for key, value in settings.items()]
            name = ','.join(word.replace('/', '_').replace(',', '_') for word in words)
            trials[name] = Trial(Path(out_dir) / name, settings,
                                 [*spec.get('base', []), *(f'--{word}' for word in words)])
    return list(trials.values())


def canonical(key, value):
    """Return a setting's value as text, the same for equal values: 1e-3 as 0.001, 1e3 as 1000, true as True."""
    if key not in train.DEFAULTS:
        return str(value)  # train.py rejects the key
    value = from_text(f'--{key}', str(value), Config(train.DEFAULTS).declared[key].type)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def read_spec(path):
    """Read a spec from a JSON file."""
    try:
        spec = json.loads(Path(path).read_text(encoding='utf-8'))
        return {**spec, 'runs': [dict(grid) for grid in spec['runs']]}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f'{path}: not a spec, see --help ({type(error).__name__}: {one_line(error)})') from None


def split_values(pairs):
    """Parse KEY=V1,V2 into {setting: list of values}. A mixture of data sets and optimizer_args are one value."""
    found = {}
    for pair in pairs:
        key, equals, values = pair.partition('=')
        if not equals:
            raise SystemExit(f'--grid {pair}: must be KEY=V1,V2; config files and flags of all runs come after --')
        if key in found:
            raise SystemExit(f'{pair}: {key} is given twice; pass all its values at once')
        one = key == 'optimizer_args' or key == 'dataset' and ':' in values
        found[key] = [values] if one else values.split(',')
    return found


def sweep_argparser(doc):
    """Build an ArgumentParser with train.py's arguments, --out_dir, --jobs and --launcher."""
    parser = argument_parser(doc)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run')
    parser.add_argument('--out_dir', required=True, type=local_path, help='each run gets a directory in it')
    parser.add_argument('--jobs', type=at_least(1), default=1, help='runs at a time (default: %(default)s)')
    parser.add_argument('--launcher', type=shlex.split, default=[sys.executable], metavar='COMMAND',
                        help='starts train.py, e.g. "torchrun --standalone --nproc_per_node=8" (default: this Python)')
    return parser


@undo_at_end()
def train_all(trials, jobs, launcher):
    """Train or resume the `trials` that have not ended, `jobs` at a time. Reports each on stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    waiting, running = [trial for trial in trials if not trial.ended], {}  # running: slot → (trial, process)
    try:
        while waiting or running:
            for slot in range(jobs):
                if slot in running and running[slot][1].poll() is not None:
                    trial, _ = running.pop(slot)
                    state = outcome_of(trial.run)[1] if trial.ended else f'failed: {trial.last_line} (its log.txt)'
                    print(f'{trial.out_dir}: {state}', file=sys.stderr, flush=True)
                if slot not in running and waiting:
                    trial = waiting.pop(0)
                    running[slot] = trial, start_trial(trial, launcher, slot, jobs)
            time.sleep(0.1)
    except KeyboardInterrupt:
        raise SystemExit('interrupted; the same command resumes where it stopped') from None
    finally:
        for _, process in running.values():
            process.terminate()  # it saves its state
        for _, process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()


def start_trial(trial, launcher, slot, jobs):
    """Start train.py on a trial, as number `slot` of `jobs` at a time. Return the process."""
    env = dict(os.environ)
    if jobs > 1:
        env.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // jobs)))
        gpus = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name]
        if gpus := gpus or [*map(str, range(torch.cuda.device_count()))]:
            n = max(1, len(gpus) // jobs)  # GPUs per job
            first = slot * n % len(gpus)
            env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[first:first + n])
    command = [*launcher, os.path.relpath(ROOT / 'train.py'), *trial.argv, f'--out_dir={trial.out_dir}',
               '--auto_resume=True']
    trial.out_dir.mkdir(parents=True, exist_ok=True)
    with (trial.out_dir / 'log.txt').open('a') as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)


def show(trials):
    """Print a table of `trials` averaged over seeds, sorted by validation loss, and notes on differences. A mean is
    left out if a seed is missing."""
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
    for note in notes_on([run for runs in groups.values() for run in runs if run]):
        print(f'note: {note}')


@one_line_errors()
def main(argv=None):
    parser = sweep_argparser(__doc__)
    parser.add_argument('--spec', help='JSON file (default: OUT_DIR/sweep.json)')
    parser.add_argument('--grid', nargs='+', action='append', metavar='KEY=V1,V2',
                        help='settings and their values; may be given several times')
    parser.add_argument('--table', action='store_true', help='print the table, train nothing')
    args = parser.parse_args(argv)
    stored = args.out_dir / 'sweep.json'
    if args.grid and args.spec or args.base and not args.grid:
        raise SystemExit('pass --spec, or --grid with arguments after --; a spec has its arguments in "base"')
    if args.grid:
        spec = dict(base=args.base, runs=[split_values(entry) for entry in args.grid])
    else:
        spec = read_spec(args.spec or stored)
    trials = trials_of(spec, args.out_dir)
    if not args.table:  # the table executes no config file, because a received directory may name any program
        for trial in trials:
            trial.check()
        args.out_dir.mkdir(parents=True, exist_ok=True)
        write_json(stored, spec)
        train_all(trials, args.jobs, args.launcher)
    show(trials)
    if others := {path.parent for path in args.out_dir.glob('*/config.json')} - {trial.out_dir for trial in trials}:
        print(f'note: {len(others)} more runs in {args.out_dir} are not in its sweep.json; speedup.py reads all')
    left = [trial for trial in trials if not trial.ended]
    if left and not args.table:
        raise SystemExit(f'not finished: {len(left)} of {len(trials)} runs; {left[0].out_dir}: {left[0].last_line}')


if __name__ == '__main__':
    main()
