"""Train a grid, a list or a coordinate search of runs, here or as a Slurm array; resumable; prints a table by loss.

  python scripts/sweep.py --out_dir out/lr --grid optimizer_name=adamw,lion learning_rate=1e-3,2e-3 \\
      -- config/quickstart.py --max_iters=200
  python scripts/sweep.py --out_dir out/sensitivity --spec config/ablation/sensitivity.json
  python scripts/sweep.py --out_dir out/sensitivity            the same again: trains what is missing
  python scripts/sweep.py --out_dir out/sensitivity --table    only the table; reads files, executes nothing

A spec is a JSON object: "base", arguments of train.py for every run, and "runs", a list of objects setting → value, or
→ list of values, of which every combination is one run. There "config" names a config file instead of a setting, and
"base" more arguments for the runs of that object. A run's directory is named after its settings, not after "base".
Other keys, such as "about", are for the reader.

A coordinate search starts from what the arguments after -- resolve to (for --optimizer_name=X alone, its row of the
table), tries one setting at a time over its values with the others as they are, keeps the best if it is lower by more
than --noise, and ends after a round in which nothing was, or after --rounds. OUT_DIR/tuning.json records what was tried
and kept:

  python scripts/sweep.py --out_dir out/tune --tune learning_rate=5e-4,1e-3,2e-3 gamma=0.05,0.15,0.5 --noise=0.004 \\
      -- config/quickstart.py --optimizer_name=sophiag

A path means the current directory's file where there is one, else the repository's; sweep.json stores what was found.
"""

import argparse
import contextlib
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.runs import (
    INCIDENTAL,
    ROOT,
    add_launcher,
    below,
    print_table,
    read_json,
    read_run,
    show_progress,
    write_csv,
    write_json,
    write_text,
)
from runtime.checkpoint import FAILED

# Settings in which a finished run must agree with what is asked for.
CHECKED_TOO = {'dataset', 'eval_iters', 'seed'}
REPORT_SECONDS = 30
GRACE_SECONDS = 60  # for a run that was told to stop, to save its state


@dataclass
class Item:
    """One run of a sweep: its directory, the settings that make it differ, and the arguments of train.py."""
    out_dir: Path
    settings: dict
    argv: list

    @property
    def name(self):
        return self.out_dir.name

    @property
    def failure(self):
        """What train.py said when the run diverged, one line; None where it has not."""
        path = self.out_dir / FAILED
        return path.read_text(encoding='utf-8').strip() if path.is_file() else None

    @property
    def run(self):
        """The `Run` so far, None where there is none."""
        return read_run(self.out_dir) if (self.out_dir / 'config.json').is_file() else None

    @property
    def finished(self):
        return self.run is not None and not self.run.unfinished

    @property
    def loss(self):
        """The final validation loss; math.inf when the run diverged, None when it cannot be compared or is not done."""
        run = self.run
        if run is None or run.rejected:
            return math.inf if self.failure else None
        return run.last('val/loss')

    def check(self):
        """SystemExit unless train.py takes the arguments and what lies in out_dir was trained with them.

        This executes the config files among the arguments.
        """
        values = resolve(self.argv).values
        if self.run:
            for key, there in self.run.config.items():
                if key in values and values[key] != there and key != 'dtype' and key not in INCIDENTAL - CHECKED_TOO:
                    raise SystemExit(f'{self.out_dir}: holds a run with {key} = {there!r}, asked for is '
                                     f'{values[key]!r}; choose another --out_dir or remove it')


def anchored(argument):
    """An argument of train.py as typed in the current directory, for train.py in the repository's.

    A config file, --dataset or --init_from that exists here becomes an absolute path (relative to the repository where
    it lies inside it); everything else stays, and means what it means in the repository.
    """
    if Path.cwd() == ROOT:
        return argument
    key, equals, value = argument.partition('=') if argument.startswith('--') else ('', '', argument)
    places = {'': [value], '--dataset': [Path('data', value), value], '--init_from': [value] * ('/' in value)}
    for place in map(Path, places.get(key, [])):
        if value and place.exists():
            return key + equals + below(ROOT, place)
    return argument


def anchored_spec(spec):
    """A spec with all its paths `anchored`."""
    def anchor(key, value):
        if isinstance(value, list):
            return [anchor(key, each) for each in value]
        if key in ('base', 'config'):
            return anchored(str(value))
        if key in ('dataset', 'init_from'):
            return anchored(f'--{key}={value}').partition('=')[2]
        return anchored_spec(value) if key == 'runs' else value
    return {key: anchor(key, value) for key, value in spec.items()} if isinstance(spec, dict) else spec


def resolve(argv):
    """`train.resolve` in the repository, which is where train.py is started."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        return train.resolve(argv)
    finally:
        os.chdir(here)


def expand(spec, out_dir):
    """The `Item`s of a spec (see the top of this file), in its order; equal ones once.

    SystemExit where different runs would have the same directory.
    """
    runs = spec.get('runs') if isinstance(spec, dict) else None
    if not runs or not isinstance(runs, list) or not all(isinstance(entry, dict) for entry in runs):
        raise SystemExit('a sweep needs "runs": a list of objects setting → value or list of values')
    if not all(isinstance(part.get('base', []), list) for part in (spec, *runs)):
        raise SystemExit('"base" of a sweep has to be a list of arguments, such as ["config/quickstart.py"]')
    items = {}
    for entry in runs:
        grid = {key: value if isinstance(value, list) else [value] for key, value in entry.items() if key != 'base'}
        for key in grid:
            if not key.isidentifier():
                raise SystemExit(f'{key!r} in "runs" of a sweep: no such setting')
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values))
            name = ','.join(f'{key}={short(value)}' for key, value in settings.items())
            argv = [*spec.get('base', []), *entry.get('base', [])]
            if 'config' in settings:
                argv.append(settings['config'])
            argv += [f'--{key}={value}' for key, value in settings.items() if key != 'config']
            item = Item(Path(out_dir) / name, settings, argv)
            first = items.setdefault(name, item)
            if signature(first) != signature(item):
                raise SystemExit(f'{item.out_dir}: two runs of this sweep would be in this directory, '
                                 f'{" ".join(first.argv)} and {" ".join(argv)}; rename a file, or make two sweeps')
    return list(items.values())


def signature(item):
    """(arguments of the base, settings) of an item, 1e-3 the same as 0.001: what equal items agree in."""
    settings = [f'{key}={exact(value)}' for key, value in item.settings.items()]
    return item.argv[:len(item.argv) - len(settings)], settings


def exact(value):
    """A number as its shortest exact text, the same for 1e-3 and 0.001; any other value as text."""
    text = str(value)
    with contextlib.suppress(ValueError):
        return str(int(text))
    with contextlib.suppress(ValueError):
        number = float(text)
        rounded = f'{number:.10g}'
        return rounded if float(rounded) == number else repr(number)
    return text


def short(value):
    """A setting's value as part of a directory's name: `exact`, of a config file its name without folder and .py."""
    text = exact(value)
    return Path(text).stem if text.endswith('.py') else text.replace('/', '_').replace(',', '_')


def train_all(items, jobs=1, launcher=(sys.executable,), deadline=None):
    """Trains `items`, `jobs` at a time, each from where it stopped; yields each as it ends.

    Runs that are finished or have diverged are skipped. Every REPORT_SECONDS stderr says how far each run is, a
    terminal's last line every second. At `deadline` (of time.monotonic), or when this process is interrupted, runs are
    told to save and stop.
    """
    waiting = [item for item in items if not item.finished and not item.failure]
    free, running, reported = list(range(jobs)), {}, time.monotonic()
    try:
        while waiting or running:
            if deadline and time.monotonic() > deadline:
                return
            while waiting and free:
                slot, item = free.pop(0), waiting.pop(0)
                running[slot] = item, start(item, launcher, slot if jobs > 1 else None)
            time.sleep(0.1)
            terminal = sys.stderr.isatty()
            if time.monotonic() > reported + (1 if terminal else REPORT_SECONDS):
                reported = time.monotonic()
                lines = [f'run {items.index(item) + 1}/{len(items)} {item.name}: {progress(item)}'
                         for item, _ in running.values()]
                show_progress(' | '.join(lines))
                if not terminal:
                    print(*lines, sep='\n', file=sys.stderr, flush=True)
            for slot, (item, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    free.append(slot)
                    show_progress('')
                    yield item
    finally:
        show_progress('')
        if running:
            print('stopping: waiting for the runs to save their state', file=sys.stderr, flush=True)
        for _, process in running.values():
            process.terminate()
        for item, process in running.values():
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            print(f'stopped {item.out_dir}: {progress(item)}', flush=True)


def start(item, launcher, slot):
    """Starts train.py on an item; its output goes to log.txt in out_dir. Returns the process."""
    item.out_dir.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ)
    if slot is not None:
        import torch
        if torch.cuda.is_available():
            env['CUDA_VISIBLE_DEVICES'] = gpu_of(slot, torch.cuda.device_count())
    with (item.out_dir / 'log.txt').open('a') as log:
        return subprocess.Popen([*launcher, 'train.py', *item.argv, f'--out_dir={below(ROOT, item.out_dir)}',
                                 '--init_from=auto'], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def gpu_of(slot, count):
    """The name of the GPU for the `slot`-th of the runs at a time, out of the `count` that this process sees."""
    visible = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name]
    return (visible or [*map(str, range(count))])[slot % count]


def progress(item):
    """How far an item is, in a few words."""
    if item.finished:
        return f'finished, but {item.run.changed}' if item.run.changed else 'finished'
    if item.failure:
        return f'diverged: {item.failure}'
    run = item.run
    steps = [record for record in run.records if 'train/loss' in record] if run else []
    if not steps:
        return 'not begun'
    first, last = steps[-10:][0], steps[-1]
    text = f'iter {last["iter"]}/{run.max_iters}, {last["train/loss"]:.2f}'
    if last['iter'] > first['iter']:
        seconds = (run.max_iters - last['iter']) * (last['time'] - first['time']) / (last['iter'] - first['iter'])
        text += f', ETA {seconds:.0f} s' if seconds < 90 else (
            f', ETA {seconds / 60:.0f} min' if seconds < 5400 else f', ETA {seconds / 3600:.1f} h')
    return text


def tune(spec, out_dir, train_items):
    """A coordinate search (see the top of this file); returns its record, which is also kept in tuning.json.

    Args:
        spec: dict with base (arguments of train.py), tune (setting → values), noise (in the validation loss) and, where
            they are limited, the number of rounds over all settings.
        train_items: trains a list of `Item`s.

    SystemExit when a run ends without a result.
    """
    values = resolve(spec['base']).values
    for key in spec['tune']:
        if key not in values:
            raise SystemExit(f'--tune {key}=…: no such setting; see python train.py --help')
    best = {key: exact(values[key]) for key in spec['tune']}
    record = dict(spec, start=dict(best), trials=[], kept=[])
    losses = {}

    def loss_of(candidates):
        items = expand(dict(base=spec['base'], runs=candidates), out_dir)
        for item in items:
            item.check()
        train_items(items)
        for item in items:
            if item.loss is None:
                raise SystemExit(f'{item.out_dir}: {progress(item)}; see log.txt in it, then give the same command')
            if item.name not in losses:
                record['trials'].append({**item.settings, 'val/loss': item.loss if item.loss < math.inf else None,
                                         'run': item.name})
            losses[item.name] = item.loss
        return [item.loss for item in items]

    lowest, = loss_of([best])
    for number in itertools.count(1):
        improved = False
        for key, grid in spec['tune'].items():
            candidates = [dict(best, **{key: value}) for value in dict.fromkeys(map(exact, grid)) if value != best[key]]
            found = loss_of(candidates) if candidates else []
            if found and min(found) < lowest - spec['noise']:
                chosen = candidates[found.index(min(found))]
                record['kept'].append({'setting': key, 'from': best[key], 'to': chosen[key], 'val/loss': min(found),
                                       'before': lowest})
                best, lowest, improved = chosen, min(found), True
            record.update(best=best, **{'val/loss': lowest, 'settings tried': len(record['trials'])})
            write_json(Path(out_dir) / 'tuning.json', record)
        if not improved or number == spec.get('rounds'):
            break
    write_json(Path(out_dir) / 'tuning.json', dict(record, finished=True))
    return record


def table(items):
    """One row per item, sorted by validation loss; unfinished ones last."""
    rows = []
    for item in items:
        run = item.run
        loss = item.loss
        row = dict(item.settings, **{'val/loss': None if loss == math.inf else loss})
        for key in ('train/loss', 'grad_clipped', 'update_unclipped'):
            row[key] = run.last(key) if run else None
        row.update(seconds=run.records[-1]['time'] if run and run.records else None, state=progress(item))
        rows.append(row)
    return sorted(rows, key=lambda row: float('inf') if row['val/loss'] is None else row['val/loss'])


def sbatch(items, out_dir, options):
    """The text of a Slurm array job that trains one item a task."""
    log = f'{out_dir}/slurm-'.replace('%', '%%') + '%a.out'  # Slurm replaces what follows a single %
    directives = [*map(shlex.quote, (f'--job-name={out_dir.name}', f'--array=0-{len(items) - 1}', f'--output={log}',
                                     '--requeue', '--open-mode=append', '--signal=TERM@300')),
                  *([options] if options else [])]
    return '\n'.join(['#!/bin/bash', *(f'#SBATCH {line}' for line in directives),
                      f'cd {shlex.quote(str(ROOT))}',
                      # Since Slurm 22.05 srun does not take it over from sbatch.
                      '[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
                      f'srun {shlex.join([sys.executable, "scripts/sweep.py", "--out_dir", str(out_dir)])} '
                      '--only $SLURM_ARRAY_TASK_ID', ''])


def interrupt(*_):
    raise KeyboardInterrupt


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', nargs='*', metavar='-- ARGUMENTS', help='of train.py, for every run of --grid')
    parser.add_argument('--out_dir', required=True, type=Path, help='a directory per run is made in it')
    parser.add_argument('--spec', help='JSON file (default: the one that this out_dir was started with)')
    parser.add_argument('--grid', nargs='+', action='append', metavar='KEY=V1,V2',
                        help='settings and their values; given several times, several grids')
    parser.add_argument('--tune', nargs='+', metavar='KEY=V1,V2', help='a coordinate search over these settings')
    parser.add_argument('--noise', type=float, metavar='LOSS',
                        help='of --tune: how much lower a validation loss has to be, such as two standard deviations '
                             'over seeds')
    parser.add_argument('--rounds', type=int, metavar='N',
                        help='of --tune: at most so many times over all settings (default: until none gains)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--only', type=int, metavar='N', help='train only run number N')
    add_launcher(parser)
    parser.add_argument('--slurm', nargs='?', const='', metavar='OPTIONS',
                        help="write OUT_DIR/sweep.sbatch, an array job, instead of training; "
                             "--slurm='--time=1:00 --mem=9G' passes options on to sbatch")
    parser.add_argument('--retry', action='store_true', help='try runs again that diverged')
    parser.add_argument('--dry_run', action='store_true', help='list the runs and their state')
    parser.add_argument('--table', action='store_true', help='print the table, train nothing')
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f'--jobs {args.jobs}: at least 1')
    if args.spec and args.base:
        parser.error('give --spec, or --grid with arguments after --, not both')
    stored = args.out_dir / 'sweep.json'
    if sum(map(bool, (args.grid, args.spec, args.tune))) > 1:
        parser.error('give one of --grid, --spec and --tune')
    if args.tune and not (args.noise or -1) >= 0:
        parser.error('--tune needs --noise=LOSS, at least 0')
    if args.rounds is not None and (args.rounds < 1 or not args.tune):
        parser.error('--rounds: of --tune, at least 1')
    if args.grid:
        spec = dict(base=args.base, runs=[grid_of(parser, '--grid', entry) for entry in args.grid])
    elif args.tune:
        spec = dict(base=args.base, tune=grid_of(parser, '--tune', args.tune), noise=args.noise)
        if args.rounds:
            spec['rounds'] = args.rounds
    elif args.spec:
        spec = read_json(args.spec)
    elif stored.is_file():
        spec = read_json(stored)
    else:
        parser.error(f'{stored}: no such file; give --spec, --grid or --tune')
    given = bool(args.grid or args.spec or args.tune)
    if given:
        spec = anchored_spec(spec)
    if isinstance(spec, dict) and 'tune' in spec:
        if args.only is not None or args.slurm is not None:
            parser.error('a coordinate search decides what to train next by itself: not with --only or --slurm')
        return main_tune(spec, args, stored)
    items = expand(spec, args.out_dir)
    # Config files are programs: what a received directory names must not be executed for a list or a table of it.
    if given or not (args.table or args.dry_run):
        for item in items:
            item.check()
    if args.only is not None and not 0 <= args.only < len(items):
        raise SystemExit(f'--only={args.only}: there are runs 0 to {len(items) - 1}')
    chosen = items if args.only is None else [items[args.only]]

    if args.dry_run:
        for number, item in enumerate(items):
            print(f'{number}: {progress(item)}: train.py {" ".join(item.argv)}')
        return None
    if not args.table:
        if args.only is None or not stored.is_file():
            write_json(stored, spec)
        if args.slurm is not None:
            script = args.out_dir.resolve() / 'sweep.sbatch'
            write_text(script, sbatch(items, args.out_dir.resolve(), args.slurm))
            print(f'sbatch {script}')
            return None
        with trainer(args) as train_items:
            train_items(chosen)
    show(items, args.out_dir)
    left = [item for item in chosen if not item.finished and not item.failure]
    if left and not args.table:
        raise SystemExit(f'not finished: {len(left)} of {len(chosen)} runs; see log.txt in their directories')
    return None


def grid_of(parser, flag, pairs):
    """{setting: list of values} of what was typed as KEY=V1,V2."""
    for pair in pairs:
        if not pair.partition('=')[2]:
            parser.error(f'{flag} {pair}: write KEY=V1,V2')
    return {key: values.split(',') for key, _, values in (pair.partition('=') for pair in pairs)}


def main_tune(spec, args, stored):
    """The rest of `main` for a coordinate search."""
    log = args.out_dir / 'tuning.json'
    if args.table or args.dry_run:
        trials = read_json(log)['trials']
        show(expand(dict(runs=[{key: trial[key] for key in spec['tune']} for trial in trials]), args.out_dir),
             args.out_dir)
        return
    write_json(stored, spec)
    with trainer(args) as train_items:
        record = tune(spec, args.out_dir, train_items)
    show(expand(dict(runs=[{key: trial[key] for key in spec['tune']} for trial in record['trials']]), args.out_dir),
         args.out_dir)
    print(f'best of {len(record["trials"])} settings tried: ' +
          ' '.join(f'--{key}={value}' for key, value in record['best'].items()) +
          f', val loss {record["val/loss"]:.4f} ({log})')
    for key, value in record['best'].items():
        numbers = [float(v) for v in spec['tune'][key] if is_number(v)]
        if is_number(value) and numbers and not min(numbers) < float(value) < max(numbers):
            print(f'note: {key}={value} is at the edge of what was tried; give more values')


def is_number(text):
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@contextlib.contextmanager
def trainer(args):
    """Yields a function that trains a list of items as the flags say; in the block, signals stop them with a line."""
    if args.jobs > 1:
        os.environ.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // args.jobs)))
    signal.signal(signal.SIGTERM, interrupt)

    def train_items(items):
        if args.retry:
            for item in items:
                (item.out_dir / FAILED).unlink(missing_ok=True)
        for item in train_all(items, args.jobs, args.launcher):
            print(f'{item.name}: {progress(item)}' + (f', val loss {item.loss:.4f}' if item.loss else ''), flush=True)
    try:
        yield train_items
    except KeyboardInterrupt:
        raise SystemExit('interrupted; the same command resumes where it stopped') from None


def show(items, out_dir):
    """Prints the table of `items`, and writes it as results.csv."""
    rows = table(items)
    print_table(rows)
    write_csv(out_dir / 'results.csv', rows)


if __name__ == '__main__':
    main()
