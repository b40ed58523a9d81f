"""Training runs: read from their out_dirs, from a runs.jsonl in records/ or from a CSV file, and grouped over seeds.

train.py writes the roles of its settings into config.json. So each run is judged by the train.py that made it, even a
fork's, and plotting needs neither PyTorch nor train.py.
"""

import contextlib
import csv
import glob
import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from analysis.figures import label_of, optimizer_label
from runtime.files import FAILED, differing_files

# Roles of a CSV file's columns, as in train.py. All other columns must agree between compared runs.
ROLES = {key: role for role, keys in {
    'tuned': 'optimizer_name optimizer_args learning_rate weight_decay beta1 beta2 eps gamma hessian_interval '
             'hessian_batch_size hessian_parts warmup_iters min_lr min_lr_ratio',
    'horizon': 'max_iters lr_decay_iters cooldown_iters', 'chance': 'seed skip_nonfinite',
    'eval': 'eval_iters eval_sequences'}.items() for key in keys.split()}


@dataclass
class RunRecord:
    """One training run, as its files describe it.

    out_dir: its directory, its name below the folder of runs.jsonl, or FILE.csv:LINE. about: the whole config.json.
    lines: the lines of metrics.jsonl. failed: why it diverged, or None. found_in: the path given by the user. config:
    its settings, key → value; if the run was ended early as finished, max_iters is that iteration. roles: the roles of
    its settings, except 'tuned'.
    """
    out_dir: Path
    about: dict
    lines: list
    failed: str | None = None
    found_in: str = ''

    def __post_init__(self):
        self.config, self.roles = dict(self.about['config']), self.about.get('roles', {})
        if 'ended' in self.about:
            self.config['max_iters'] = self.about['ended']['iter']

    def __getattr__(self, key):
        """Return a setting of the run: run.max_iters."""
        try:
            return self.__dict__['config'][key]
        except KeyError:
            raise AttributeError(f'{self.__dict__.get("out_dir")}: config.json has no {key!r}') from None

    @property
    def from_csv(self):
        """Whether the run was read from a CSV file."""
        return 'unsaid' in self.about

    @property
    def optimizer_label(self):
        return optimizer_label(self.optimizer_name)

    def having(self, *roles):
        """Return the run's settings with one of these roles as a dict."""
        return {key: value for key, value in self.config.items() if self.roles.get(key, 'tuned') in roles}

    def lacks(self, key):
        """Return whether the setting `key` is a placeholder, because the run's optimizer does not have it."""
        sources = self.about.get('provenance')
        if sources is None or self.config[key] != 0:  # a CSV file leaves the cell empty
            return False
        return sources.get(key, 'optimizer ').startswith(('optimizer ', 'not a setting'))  # older runs have no source

    def series(self, key, x='steps'):
        """Return the numbers measured for `key` as two lists (xs, ys). x: a key of AXES."""
        found = [line for line in self.lines if isinstance(line.get(key), (int, float))]
        column, factor = MEASURED[x], 1
        if x == 'flops' and not self.from_csv:
            column, factor = 'tokens', self.flops_per_token()
        if missing := [line for line in found if column not in line]:
            raise SystemExit(f'{self.out_dir}: no {x} at iteration {missing[0]["iter"]}; add a column {x}')
        return [line[column] * factor for line in found], [line[key] for line in found]

    def last(self, key):
        """Return the latest measured value of `key`, or None."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)

    @property
    def diverged(self):
        """Whether training stopped at a number that was not finite, or the last loss is not finite."""
        return self.failed is not None or not math.isfinite(self.last('val/loss') or 0)

    @property
    def ended(self):
        """Whether the run is finished, or has diverged."""
        return self.diverged or max(self.series('val/loss')[0], default=0) >= self.max_iters > 0

    @property
    def changed(self):
        """A clause that names the first setting that was changed on resume, or None."""
        return next((f'{change["key"]} was changed from {change["from"]} to {change["to"]} at iteration '
                     f'{change["iter"]}' for change in self.about.get('changes', []) if change['key'] != 'code'), None)

    @property
    def code_changes(self):
        """A clause for each resume with other code."""
        return [f'its code was changed at iteration {change["iter"]} ({", ".join(change["files"])})'
                for change in self.about.get('changes', []) if change['key'] == 'code']

    @property
    def rejected(self):
        """A clause that says why the run cannot be compared with others, or None."""
        if self.changed or self.diverged:
            return self.changed or 'it diverged'
        if not self.ended:
            done = max(self.series('val/loss')[0], default=0)
            return f'it has a validation loss at iteration {done} of {self.max_iters} only'
        if self.decay_lr is False:  # a CSV file gives None
            return None
        if self.warmup_iters >= self.max_iters:
            return f'it ends within its warm-up of {self.warmup_iters} iterations'
        if self.schedule == 'constant' or self.lr_decay_iters in (self.max_iters, None):
            return None
        return f'its learning rate decays over {self.lr_decay_iters} iterations, and it was run for {self.max_iters}'

    @property
    def is_trial(self):
        """Whether the run counts as a trial of its settings, because it can be compared, or diverged."""
        return not self.rejected or self.diverged and not self.changed

    def final(self, key):
        """Return the last value of `key`, or math.inf if the run diverged, however low its losses were before."""
        return math.inf if self.diverged else self.last(key)

    @property
    def final_loss(self):
        """The last validation loss, or math.inf if the run diverged."""
        return self.final('val/loss')

    def flops_per_token(self):
        """Return the mean FLOPs per training token, with Hessian estimates but without the optimizer's arithmetic."""
        return self.about['flops_per_token'] + self.about['hessian_flops_per_token']

    def flops_per_iteration(self):
        """Return the mean FLOPs per iteration, or None if a CSV file lacks them."""
        last = self.lines[-1]
        if self.from_csv:
            return last['flops'] / last['iter'] if last.get('flops') and last['iter'] else None
        return last['tokens'] / last['iter'] * self.flops_per_token()


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def read_run(out_dir):
    """Return the `RunRecord` of the directory `out_dir`."""
    out_dir = Path(out_dir)
    metrics, failed = out_dir / 'metrics.jsonl', out_dir / FAILED
    about = json.loads((out_dir / 'config.json').read_text(encoding='utf-8'))
    return RunRecord(out_dir, about, read_metrics(metrics) if metrics.is_file() else [],
                     failed.read_text(encoding='utf-8').strip() if failed.is_file() else None)


def with_same_settings(runs):
    """Give all `runs` the same settings, and return them. If an edit added a setting after a run, its default and role
    come from another run (of the same optimizer, for an optimizer's setting). Without such a run it is None."""
    default, roles = dict.fromkeys(key for run in runs for key in run.config), {}
    own = {run.optimizer_name: {} for run in runs}
    for run in runs:
        sources, name = run.about.get('provenance', {}), run.optimizer_name
        default |= {key: value for key, value in run.config.items() if sources.get(key) == 'default'}
        own[name] |= {key: value for key, value in run.config.items()
                      if sources.get(key) in (f'optimizer {name}', f'not a setting of {name}')}
        roles |= run.roles
    for run in runs:
        run.config, run.roles = {**default, **own[run.optimizer_name], **run.config}, {**roles, **run.roles}
    return runs


def read_metrics(path):
    """Return the lines of a metrics.jsonl as a list of dicts. The last line of an active run may be cut off."""
    *whole, last = path.read_bytes().splitlines() or [b'']
    lines = [json.loads(text) for text in whole]
    with contextlib.suppress(ValueError):
        lines.append(json.loads(last))
    return lines


def read_packed(path):
    """Return the runs in a runs.jsonl; see `packed`."""
    runs = []
    for entry in map(json.loads, path.read_text(encoding='utf-8').splitlines()):
        about, columns = entry['config'], entry['metrics']
        lines = [{key: value for key, value in zip(columns, values) if value is not None}
                 for values in zip(*columns.values())]
        runs.append(RunRecord(path.parent / entry['run'], about, lines, entry.get('failed')))
    return runs


def packed(run, name):
    """Format a run as a line of runs.jsonl: name, reason of failure, config.json, and metrics by column, or null."""
    columns = dict.fromkeys(key for line in run.lines for key in line)
    failed = {} if run.failed is None else {'failed': run.failed}
    return json.dumps(dict(run=str(name), **failed, config=run.about,
                           metrics={key: [line.get(key) for line in run.lines] for key in columns}))


# Measured columns of a CSV file → names in metrics.jsonl. All other columns identify the run.
MEASURED = {'steps': 'iter', 'loss': 'val/loss', 'tokens': 'tokens', 'flops': 'flops', 'seconds': 'time'}
RENAMED = {'max_iters': 'horizon', 'lr': 'learning_rate'}
REQUIRED = 'optimizer', 'seed', 'steps', 'loss'
NUMBERS = 'horizon', 'learning_rate', 'min_lr', 'warmup_iters', 'cooldown_iters', 'lr_decay_iters'  # numeric or empty
# Placeholders for settings without a column
NOT_SAID = dict(learning_rate=None, decay_lr=None, schedule=None, warmup_iters=0, cooldown_iters=0, min_lr=0,
                lr_decay_iters=None)
# An empty cell or NaN means that the optimizer lacks the setting. NaN would separate seeds, because it equals nothing.
WORDS = {'true': True, 'false': False, '': None, 'nan': None}


def read_csv(path):
    """Return the runs in a CSV file, whose format docs/verdict.md describes. Exit if the format is wrong."""
    columns, rows = csv_rows(path)
    settings, found = [column for column in columns if column not in MEASURED], {}
    for where, row in rows:
        if None in row or None in row.values():
            raise SystemExit(f'{where}: not as many columns as in the header')
        row = {column: cell.strip() for column, cell in row.items()}
        for column in (*MEASURED, *NUMBERS):
            if isinstance(as_number(row.get(column) or 'nan'), str) or not row['steps']:
                raise SystemExit(f'{where}: {column} must be a number')
        line = {name: as_number(row[column] or 'nan') for column, name in MEASURED.items()
                if row.get(column) or column == 'loss'}
        if line['iter'] > as_number(row.get('horizon') or 'inf'):
            raise SystemExit(f'{where}: step {row["steps"]} is beyond the horizon, {row["horizon"]}')
        values = tuple(WORDS.get(row[column].lower(), as_number(row[column])) for column in settings)
        first, of_run = found.setdefault(values, (where, {}))
        if line['iter'] in of_run:
            raise SystemExit(f'{where}: duplicate row for step {row["steps"]}; if these are two runs, add a column for '
                             'the setting in which they differ')
        of_run[line['iter']] = line
    unsaid = f'{path} does not say whether model, data and validation set are the same'
    if missing := [column for column in ('horizon', 'learning_rate', 'flops') if column not in columns]:
        unsaid += f'; it has no column {", ".join(missing)}'
    runs = []
    for values, (first, lines) in found.items():
        config = NOT_SAID | {column: value for column, value in zip(settings, values) if value is not None}
        config |= dict(optimizer_name=str(config.pop('optimizer', '')), max_iters=config.pop('horizon', None))
        about = dict(config=config, roles={key: ROLES.get(key, 'protocol') for key in config}, unsaid=unsaid)
        runs.append(RunRecord(Path(first), about, [lines[step] for step in sorted(lines)]))
    for run in sorted(runs, key=lambda run: run.diverged):
        if run.max_iters is None:  # use its last step, or if it diverged, the shortest horizon that it had not passed
            last = run.lines[-1]['iter']
            horizons = [other.max_iters for other in runs if run.diverged and (other.max_iters or 0) >= last]
            run.config['max_iters'] = min(horizons, default=last)
    return runs


def csv_rows(path):
    """Return (columns, [(FILE:LINE, row as a dict)]) of a CSV file with commas, semicolons or tabs."""
    with path.open(encoding='utf-8-sig', newline='') as f:
        header = f.readline()
        delimiter = max(',;\t', key=header.count)
        columns = [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter), [])]
        columns = [RENAMED.get(name, name) for name in columns]
        rows = csv.DictReader(f, columns, delimiter=delimiter, skipinitialspace=True)
        rows = [(f'{path}:{rows.reader.line_num + 1}', row) for row in rows]  # rows.line_num does not count blank lines
    if wrong := [column for column in (*REQUIRED, *columns) if columns.count(column) != 1]:
        raise SystemExit(f'{path}: {columns.count(wrong[0])} columns {wrong[0]}; its first line must name each column '
                         'once, and optimizer, seed, steps and loss')
    return columns, rows


def as_number(text):
    """Return a cell as a number if it is one, else as text."""
    for kind in int, float:
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def find_runs(paths):
    """Return the runs in `paths`, sorted by name within each path. A path is

    - a CSV file;
    - a directory of runs and of runs.jsonl, at any depth and through links; or
    - names in a runs.jsonl, where * matches anything: records/study/1200/adamw for the runs 1200/adamw/… in
      records/study/runs.jsonl, or records/study/1200/*/learning_rate=0.002*.
    """
    found = {}
    for path in map(Path, paths):
        pattern = f'{glob.escape(str(path))}/**/*.jsonl'
        below = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207 - pathlib's follows no links
        runs = [read_run(file.parent) for file in below if file.name == 'metrics.jsonl']
        runs += [run for file in below if file.name == 'runs.jsonl' for run in read_packed(file)]
        runs += read_csv(path) if path.suffix == '.csv' and path.is_file() else []
        folder = next((parent for parent in path.parents if (parent / 'runs.jsonl').is_file()), None)
        if folder and not runs:
            runs = [run for run in read_packed(folder / 'runs.jsonl')
                    if any(fnmatch(str(run.out_dir), wanted) for wanted in (f'{path}', f'{path}/*'))]
        if not runs:
            raise SystemExit(f'{path}: no runs found; give the out_dir of a run, or a directory of runs')
        for run in runs if runs[0].from_csv else sorted(runs, key=lambda run: run.out_dir):
            run.found_in = run.found_in or str(path)
            found.setdefault(run.out_dir.resolve(), run)
    return with_same_settings(list(found.values()))


# ----------------------------------------------------------------------------------------------------------------------
# Grouping


def hyperparameters(run):
    """Return a hashable key of everything that a run's final loss depends on, except the seed."""
    return tuple(sorted((measured_on(run) | run.having('tuned', 'model', 'protocol', 'horizon')).items()))


def is_seed(key, role):
    """Return whether a setting with this role is part of the seed. skip_nonfinite is not, because it draws nothing."""
    return role == 'chance' and key != 'skip_nonfinite'


def seed_of(run):
    """Return all settings that are part of the seed as a hashable key."""
    return tuple(sorted((key, value) for key, value in run.having('chance').items() if is_seed(key, 'chance')))


def by_seed(runs, repeats=False):
    """Group runs that differ only in `seed_of`, in order of first appearance. Only the first of several runs with the
    same seed counts; with `repeats`, each further one begins another group."""
    groups, seen = {}, Counter()
    for run in runs:
        key, seed = hyperparameters(run), seed_of(run)
        again = seen[key, seed]
        seen[key, seed] += 1
        if repeats or not again:
            groups.setdefault((key, again), []).append(run)
    return list(groups.values())


def measured_on(run):
    """Return {name: value} of the data that a run's loss is measured on. Losses on other data are not comparable."""
    others = run.having('eval')
    others.pop('eval_iters', None)  # only sets eval_sequences
    return {'the data (fingerprint)': json.dumps(run.about.get('data')),
            'the number of validation sequences': others.pop('eval_sequences', 0) or 'all', **others}


def notes_on(runs):
    """Return notes on data and code, which may make losses of `runs` differ by more than settings and seeds do."""
    first, *others = map(measured_on, runs) if runs else [{}]
    notes = [f'the runs differ in {what}, so their losses cannot be compared' for what, value in first.items()
             if any(other.get(what) != value for other in others)]
    if files := differing_files(*(run.about.get('code') for run in runs)):
        notes.append(f'the runs used different code ({", ".join(files)}), so they may differ in more than settings '
                     'and seed')
    notes += dict.fromkeys(run.about['unsaid'] for run in runs if run.from_csv)
    return notes + [f'{run.out_dir}: {clause}' for run in runs for clause in run.code_changes]


def mean_final_loss(runs):
    """Return `mean_and_sd` of the final losses of `runs`."""
    return mean_and_sd([run.final_loss for run in runs])


def mean_and_sd(losses):
    """Return (mean, standard deviation). The latter is None for a single loss, or if a loss is infinite."""
    mean = statistics.mean(losses)
    return mean, statistics.stdev(losses) if len(losses) > 1 and math.isfinite(mean) else None


def labels_of(groups):
    """Label each of the groups `by_seed` with the optimizer and the settings in which its groups differ, or with the
    directory if two labels would be equal."""
    derived = {'optimizer_name', 'lr_decay_iters', 'min_lr'}
    labels = []
    for group in groups:
        run, same = group[0], [other[0] for other in groups if other[0].optimizer_name == group[0].optimizer_name]
        keys = [key for key in run.having('tuned', 'model', 'protocol', 'horizon')
                if key not in derived and len({other.config.get(key) for other in same}) > 1]
        labels.append(', '.join([run.optimizer_label, *(f'{label_of(key)} {run.config[key]}' for key in keys)]))
    if len(groups) == 1 or len(set(labels)) < len(labels):
        return [group[0].out_dir.resolve().name for group in groups]
    return labels


def averaged(group, key, x='steps'):
    """Return (xs, means, lows, highs) of `key` over a group's runs, at the iterations that they share."""
    curves = [dict(zip(run.series(key)[0], zip(*run.series(key, x)))) for run in group]  # {iteration: (x, y)}
    shared = [[curve[i] for curve in curves] for i in curves[0] if all(i in curve for curve in curves)]
    xs = [statistics.mean(x for x, _ in points) for points in shared]
    ys = [[y for _, y in points] for points in shared]
    return xs, list(map(statistics.mean, ys)), list(map(min, ys)), list(map(max, ys))
