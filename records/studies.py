"""Studies as programs: a protocol says which runs are due, given the results so far; this trains and records them.

A study's protocol is in records/NAME/study.py, which calls `main`. Runs are trained with the code of pinned checkouts
(git worktree add TREE COMMIT), one thread each. A run is finished once it is in records/NAME/runs.jsonl or in its
tree's out/NAME. An interrupted study continues when started again: runs resume from their newest checkpoint.
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from analysis.figures import argparser, save
from analysis.runs import packed, read_packed, read_run
from runtime.arguments import argument_parser
from runtime.files import write_text
from scripts.sweep import launch, run_in_turns

# glibc does not give the memory of a step's activations back to the system: the same bits, 7 % sooner.
KEEP_MEMORY = ':'.join(f'glibc.malloc.{name}' for name in ('hugetlb=1', 'trim_threshold=4294967296',
                                                           'mmap_threshold=4294967296'))


@dataclass(frozen=True)
class PlannedRun:
    """A run of a protocol: its part of the study, its optimizer, and its other settings as (key, value) pairs."""
    part: str
    optimizer: str
    settings: tuple

    @property
    def path(self):
        """The run's directory, below the study's."""
        return Path(self.part, ','.join([self.optimizer, *(
            f'{key}={value:g}' if isinstance(value, float) else f'{key}={value}' for key, value in self.settings)]))


@dataclass
class Result:
    """How a run ended. A run that diverged has infinite losses and no share."""
    loss: float = math.inf  # validation loss
    train_loss: float = math.inf  # of the last mini-batch
    unclipped: float | None = None  # share of the coordinates at the end


@dataclass
class Study:
    """Looks up results, and collects the runs that are due.

    find: `PlannedRun` → `Result`, None while the run is not finished.
    """
    find: object
    done: dict = field(default_factory=dict)  # finished runs → their results
    due: dict = field(default_factory=dict)  # runs → their place in the order

    def result(self, place, part, optimizer, **settings):
        """Return the result of a run; if it is not finished, return None and note it as due at `place`, a tuple."""
        run = PlannedRun(part, optimizer, tuple(settings.items()))
        found = self.done[run] if run in self.done else self.find(run)
        if found is None:
            self.due.setdefault(run, place)
        else:
            self.done[run] = found
        return found


def result_of(record):
    """Return the `Result` of a `RunRecord`."""
    return Result() if record.diverged else Result(*map(record.last, ('val/loss', 'train/loss', 'update_unclipped')))


def finished(out_dir):
    """Return the `RunRecord` of a directory, None if it is not finished."""
    if not all((out_dir / name).is_file() for name in ('metrics.jsonl', 'config.json')):  # it has just been started
        return None
    record = read_run(out_dir)
    return record if record.ended else None


def recorded(path):
    """Return {name of a run: its `Result`} of a runs.jsonl; {} if there is no file."""
    records = read_packed(path) if path.is_file() else []
    return {str(record.out_dir.relative_to(path.parent)): result_of(record) for record in records}


def next_runs(protocol, find):
    """Return the `Study` so far, and its due runs in order."""
    study = Study(find)
    protocol(study)
    return study, sorted(study.due, key=study.due.get)


def train_due(protocol, find, start, jobs):
    """Train until nothing is due, `jobs` runs at a time.

    Args:
        find: `PlannedRun` → `Result`, None while the run is not finished.
        start: (`PlannedRun`, slot) → its process.
    """
    def ended(run):
        if find(run) is None:  # the others may work
            print(f'{run.path}: the run failed; its last lines are in log.txt there', file=sys.stderr, flush=True)

    run_in_turns(lambda: next_runs(protocol, find)[1], start, jobs, ended)


def finder(runs_jsonl, out_dir_of):
    """Return a function `PlannedRun` → `Result`, None while it is not finished; out_dir_of: the run → its directory."""
    records = recorded(runs_jsonl)

    def find(run):
        name = str(run.path)
        if name not in records and (record := finished(out_dir_of(run))):
            records[name] = result_of(record)
        return records.get(name)
    return find


def start_run(tree, words, out_dir, **environment):
    """Start a program of the checkout `tree` on a run; return the process."""
    print(time.strftime('%H:%M:%S'), out_dir.relative_to(tree), flush=True)
    return launch([sys.executable, *words, f'--out_dir={out_dir.relative_to(tree)}'], out_dir, cwd=tree,
                  env=os.environ | environment)


def collect(out_dirs, path):
    """Add the finished runs below `out_dirs` to the runs.jsonl `path`."""
    found = path.read_text(encoding='utf-8').splitlines() if path.is_file() else []
    lines = {json.loads(line)['run']: line for line in found}
    for out_dir in out_dirs:
        for config in out_dir.rglob('config.json'):
            if record := finished(config.parent):
                name = str(config.parent.relative_to(out_dir))
                lines[name] = packed(record, name)
    write_text(path, ''.join(f'{lines[name]}\n' for name in sorted(lines)))
    print(f'{path}: {len(lines)} runs')


def part_of(run):
    """Return the name of the part of its study that a `RunRecord` in records/ belongs to."""
    return run.out_dir.relative_to(Path(__file__).resolve().parent).parts[1]


def show_results(doc, picture, read, tables, drawings, argv=None):
    """Print the tables of a study, or draw one of its pictures: the program of a records/NAME/results.py.

    Args:
        picture: the name of its file unless --output gives one.
        read: () → results.
        tables: results → list of texts.
        drawings: {name: function of the results → (figure, rows)}.
    """
    parser = argparser(doc, picture)
    parser.add_argument('what', choices=['tables', *drawings])
    args, results = parser.parse_args(argv), read()
    if args.what == 'tables':
        print('\n'.join(tables(results)))
    else:
        save(args.output, *drawings[args.what](results))


def main(protocol, here, description, command):
    """Run a study from the command line. Arguments behind -- go to every run.

    Args:
        protocol: function that asks a `Study` for results.
        here: the record's folder.
        command: `PlannedRun` → the arguments of Python, without --out_dir.
    """
    parser = argument_parser(description)
    parser.add_argument('--tree', type=Path, required=True, help='a checkout of the commit in README.md')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time (default: 1)')
    parser.add_argument('--minutes', type=float, default=0, help='stop after so long; the same command resumes')
    parser.add_argument('flags', nargs='*', help='of train.py, for every run')
    parser.add_argument('--list', action='store_true', help='print the runs that are due; train nothing')
    parser.add_argument('--collect', action='store_true', help='add finished runs to runs.jsonl')
    args = parser.parse_args()
    tree, runs = args.tree.resolve(), args.tree.resolve() / 'out' / here.name
    find = finder(here / 'runs.jsonl', lambda run: runs / run.path)

    def start(run, _):
        return start_run(tree, command(run) + args.flags, runs / run.path, OMP_NUM_THREADS='1',
                         GLIBC_TUNABLES=KEEP_MEMORY)

    for stop in signal.SIGTERM, signal.SIGALRM:
        signal.signal(stop, lambda *_: sys.exit(1))
    if args.collect:
        collect([runs], here / 'runs.jsonl')
    elif args.list:
        study, due = next_runs(protocol, find)
        print('\n'.join(str(run.path) for run in due))
        print(f'{len(study.done)} runs finished, {len(due)} due')
    else:
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
        train_due(protocol, find, start, args.jobs)
