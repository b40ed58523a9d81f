"""What the scripts share: runs read from their out_dirs, their FLOPs, grouping over seeds, figures and tables written.

A run is a directory with the metrics.jsonl and config.json that train.py writes (or a copy of the two in records/).
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import math
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from runtime import files

# How an x-axis is called on the command line, and what it says under the figure.
AXES = {'steps': 'iterations', 'tokens': 'training tokens', 'seconds': 'seconds of training', 'flops': 'training FLOPs'}

OPTIMIZER_LABELS = {'adamw': 'AdamW', 'lion': 'Lion', 'adahessian': 'AdaHessian', 'sophiag': 'Sophia-G',
                    'sophiah': 'Sophia-H', 'ef_clip': 'E-F+clip', 'ah_clip': 'AH+clip', 'clip': 'Clip',
                    'normalize': 'Normalize', 'gnb_noclip': 'GNB without clipping', 'gnb_mean': 'GNB, mean of h',
                    'muon': 'Muon', 'normuon': 'NorMuon', 'soap': 'SOAP', 'ademamix': 'AdEMAMix', 'mars': 'MARS',
                    'adopt': 'ADOPT', 'schedulefree': 'Schedule-Free AdamW', 'prodigy': 'Prodigy', 'signum': 'Signum'}

# How an axis calls a setting.
SETTING_NAMES = {'max_iters': 'steps T', 'total_batch_size': 'sequences per step', 'block_size': 'tokens per sequence',
                 'learning_rate': 'peak learning rate', 'hessian_interval': 'k, steps between Hessian estimates',
                 'warmup_iters': 'steps of warm-up', 'weight_decay': 'weight decay', 'gamma': 'γ', 'beta1': 'β1',
                 'beta2': 'β2', 'n_layer': 'layers'}

# Settings that say where or how fast a run ran, not what it computed; and the seed, over which results are averaged.
INCIDENTAL = {
    'out_dir', 'dataset', 'eval_interval', 'log_interval', 'eval_iters', 'eval_only', 'always_save_checkpoint',
    'keep_checkpoints', 'init_from', 'ignore_data_change', 'max_hours', 'skip_nonfinite', 'show_config', 'wandb_log',
    'wandb_project', 'wandb_run_name', 'trackio_log', 'batch_size', 'gradient_accumulation_steps', 'parallel',
    'activation_checkpointing', 'backend', 'device', 'compile', 'seed'}

# Settings that have to agree in runs that are compared: the model, what it is trained with, and the schedule.
PROTOCOL = ('block_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'total_batch_size', 'grad_clip', 'decay_lr',
            'schedule', 'dtype')

# Settings that have to agree among the runs of one optimizer, and may differ between two.
OWN_PROTOCOL = ('beta1', 'hessian_sequences', 'hessian_bias_correction')

# Settings that came later: what a config.json without them stands for.
LATER = dict(schedule='cosine', cooldown_iters=0, branch_cooldown=0, optimizer_args='', hessian_sequences='own',
             hessian_bias_correction=False)

# Settings without which nothing can be said of a run; others may be unknown to the train.py that wrote its config.json.
NEEDED = ('optimizer_name', 'learning_rate', 'max_iters', 'decay_lr', 'lr_decay_iters', 'eval_iters', 'batch_size',
          'total_batch_size', 'hessian_interval', 'hessian_batch_size', 'model_size', 'block_size', 'n_layer', 'n_head',
          'n_embd', 'bias')


@dataclass
class Run:
    """One training run.

    out_dir: where it lies. config: its settings, key → value. about: config.json as it stands. records: the lines of
    metrics.jsonl.
    """
    out_dir: Path
    config: dict
    about: dict
    records: list

    def __getattr__(self, key):
        """A setting of the run: run.max_iters."""
        try:
            return self.__dict__['config'][key]
        except KeyError:
            raise AttributeError(f'{self.__dict__.get("out_dir")}: config.json has no {key!r}') from None

    @property
    def optimizer_label(self):
        return optimizer_label(self.optimizer_name)

    def series(self, key, x='steps'):
        """The measured values of `key` as (xs, ys), two lists; x is one of AXES."""
        found = [record for record in self.records if key in record]
        if x == 'flops':
            per_iteration = self.flops_per_iteration()
            xs = [record['iter'] * per_iteration for record in found]
        else:
            xs = [record[{'steps': 'iter', 'tokens': 'tokens', 'seconds': 'time'}[x]] for record in found]
        return xs, [record[key] for record in found]

    def last(self, key):
        """The latest measured value of `key`; None where there is none."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    @property
    def unfinished(self):
        """Why the run's schedule has not been run to its end, one clause; None when it has."""
        if self.diverged:
            return 'it diverged'
        done = max((record['iter'] for record in self.records if 'val/loss' in record), default=0)
        if done < self.max_iters:
            return f'it has a validation loss at iteration {done} of {self.max_iters} only'
        if self.decay_lr and self.lr_decay_iters != self.max_iters:
            return (f'its learning rate decays over {self.lr_decay_iters} iterations, and it was run for '
                    f'{self.max_iters}')
        return None

    @property
    def changed(self):
        """Which setting was changed when the run was resumed, one clause; None where none that a result depends on."""
        for change in self.about.get('changes', []):
            if change['key'] not in INCIDENTAL - {'dataset', 'seed'}:
                return (f'{change["key"]} was changed from {change["from"]} to {change["to"]} at iteration '
                        f'{change["iter"]}')
        return None

    @property
    def diverged(self):
        """Whether training gave the run up because something was not finite, or its last loss is not."""
        return (self.out_dir / 'failed.txt').is_file() or not math.isfinite(self.last('val/loss') or 0)

    @property
    def machine(self):
        """The machine that it ran on, as text; None where config.json does not say."""
        return json.dumps(self.about['machine']) if 'machine' in self.about else None

    @property
    def rejected(self):
        """Why the run cannot be compared with others, one clause; None when it can."""
        return self.unfinished or self.changed

    def flops_per_iteration(self):
        """FLOPs of one iteration on average, with its share of the Hessian estimates (see `flops_per_iteration`)."""
        return sum(flops_per_iteration(self.config, self.about))


def optimizer_label(name):
    """How figures and tables call the optimizer of --optimizer_name: of a library, by its class."""
    return OPTIMIZER_LABELS.get(name, name.rpartition(':')[2])


def flops_per_iteration(config, about):
    """(FLOPs of forward and backward of an iteration, FLOPs per iteration spent on Hessian estimates).

    Chowdhery et al.'s formula (model.py, `GPT.flops_per_token`) × tokens per iteration; an estimate costs the hook's
    `cost` times that of hessian_batch_size sequences. What else an optimizer computes does not count.

    Args:
        config: the settings, key → value.
        about: what else config.json says: `flops_per_token` of the model that was trained; or, in older ones, its
            `parameters`, from which the vocabulary and with it the FLOPs of a GPT-2 follow.
    """
    per_token = about.get('flops_per_token')
    if per_token is None:
        import torch

        from model import GPT, GPTConfig
        shape = {key: config[key] for key in ('block_size', 'n_layer', 'n_head', 'n_embd', 'bias')}
        with torch.device('meta'):
            rest = GPT(GPTConfig(vocab_size=64, **shape)).num_params() - 64 * config['n_embd']
            vocab_size = (about['parameters'] - rest) // config['n_embd']
            per_token = GPT(GPTConfig(vocab_size=vocab_size, **shape)).flops_per_token()
    per_sequence = per_token * config['block_size']
    cost = hook_of(config['optimizer_name']).cost[config.get('hessian_sequences', 'own')]
    estimate = cost * config['hessian_batch_size'] * per_sequence
    return per_sequence * config['total_batch_size'], estimate * estimates_per_iteration(
        config['optimizer_name'], config['hessian_interval'], config['max_iters'])


@functools.cache
def estimates_per_iteration(optimizer_name, interval, iterations):
    """How many Hessian estimates an iteration has on average, over a run of `iterations`."""
    return hook_of(optimizer_name).estimates(interval, iterations) / max(1, iterations)


def hook_of(optimizer_name):
    """The Hessian hook's class of an optimizer; of one that is not in the table, that of first-order ones."""
    from hessian import FirstOrder
    from optimizers import OPTIMIZERS
    return OPTIMIZERS[optimizer_name].hook if optimizer_name in OPTIMIZERS else FirstOrder


def read_run(out_dir):
    """The `Run` in `out_dir`; SystemExit with one line when it is not one."""
    out_dir = Path(out_dir)
    about = read_json(out_dir / 'config.json')
    if not isinstance(about, dict) or not isinstance(about.get('config'), dict):
        raise SystemExit(f'{out_dir}/config.json: not written by train.py (it has no "config")')
    missing = [key for key in NEEDED if key not in about['config']] + ['parameters'] * ('parameters' not in about)
    if missing:
        raise SystemExit(f'{out_dir}/config.json: has no {missing[0]!r}, which train.py writes; the file is damaged')
    for key, value in about['config'].items():
        needs = (int, float) if key in NEEDED and key not in ('optimizer_name', 'model_size') else (int, float, str)
        if not isinstance(value, needs) and (value is not None or key in NEEDED):
            raise SystemExit(f'{out_dir}/config.json: {key} is {value!r}; the file is damaged')
    if about['config']['max_iters'] < 1:
        raise SystemExit(f'{out_dir}: a run of no iterations (max_iters)')
    changes = about.get('changes', [])
    if not isinstance(changes, list) or not all(
            isinstance(change, dict) and {'iter', 'key', 'from', 'to'} <= change.keys() for change in changes):
        raise SystemExit(f'{out_dir}/config.json: "changes" is not a list of {{iter, key, from, to}}; the file is '
                         'damaged')
    path = out_dir / 'metrics.jsonl'
    records = read_metrics(path) if path.is_file() else []
    for number, record in enumerate(records, 1):
        if missing := {'iter', 'tokens', 'time'} - record.keys():
            raise SystemExit(f'{path}:{number}: has no {min(missing)!r}, which train.py writes; the file is damaged')
    return Run(out_dir, {**LATER, **about['config']}, about, records)


def read_metrics(path):
    """The lines of a metrics.jsonl, a list of dicts; SystemExit with one line when one is damaged."""
    records = []
    try:
        lines = path.read_text(encoding='utf-8').removesuffix('\n').split('\n')
    except UnicodeDecodeError as error:
        raise SystemExit(f'{path}: not a JSON object in every line ({error}); the file is damaged') from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # of a run that is being written it may be cut off
                break
            record = None
        if not isinstance(record, dict):
            raise SystemExit(f'{path}:{number}: not a JSON object; the file is damaged')
        for key in ('iter', 'tokens', 'time', 'train/loss', 'val/loss'):
            if not isinstance(record.get(key, 0), (int, float)):
                raise SystemExit(f'{path}:{number}: {key} is no number; the file is damaged')
        records.append(record)
    return records


def find_runs(paths):
    """The runs in `paths`: out_dirs, or directories of out_dirs at any depth, in order of their names."""
    found = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise SystemExit(f'{path}: no such directory; give the out_dir of a run, or a directory of such')
        out_dirs = [path] if (path / 'metrics.jsonl').is_file() else sorted(
            metrics.parent for metrics in path.rglob('metrics.jsonl'))
        if not out_dirs:
            raise SystemExit(f'{path}: no metrics.jsonl in it; train first, or check the path')
        found += [out_dir for out_dir in out_dirs if out_dir not in found]
    return [read_run(out_dir) for out_dir in found]


def finished_runs(paths, free=()):
    """The runs in `paths` that trained with one schedule to its end; says on stderr which were left out, and why.

    SystemExit unless there are some, and `check_comparable`.
    """
    runs = find_runs(paths)
    for run in runs:
        if run.rejected:
            print(f'left out {run.out_dir}: {run.rejected}', file=sys.stderr)
    kept = [run for run in runs if not run.rejected]
    if not kept:
        raise SystemExit('no finished run among these; let train.py reach max_iters')
    check_comparable(kept, free)
    return kept


def add_tuned(parser):
    """Gives an ArgumentParser the flag --tuned, the settings in which the protocols of compared runs may differ."""
    parser.add_argument('--tuned', nargs='+', default=[], metavar='KEY',
                        help='settings of the protocol that were tuned, and may differ from run to run, such as '
                             'warmup_iters or beta1')


def check_comparable(runs, free=()):
    """SystemExit unless all runs have the same data, validation sequences and protocol.

    The protocol is every setting in PROTOCOL, warm-up and cooldown (the same iterations, or the same share of the run),
    and OWN_PROTOCOL among the runs of one optimizer. A setting in `free` may differ.
    """
    def protocol(run):
        yield 'the data (fingerprint)', run.about.get('data')
        if 'eval_iters' not in free:
            sequences = run.eval_iters * run.batch_size or 'all'
            yield 'the number of validation sequences (eval_iters × batch_size)', sequences
        for key in PROTOCOL:
            yield key, run.config.get(key)
        yield 'min_lr_ratio', round(run.config.get('min_lr', 0) / (run.learning_rate or 1), 4)
        yield 'init_from', starting_weights(run)

    def same_share(key):
        T, n = runs[0].max_iters, runs[0].config.get(key, 0)
        # Up to one iteration of rounding.
        return all(abs(run.config.get(key, 0) * T - n * run.max_iters) <= max(T, run.max_iters) for run in runs)

    parts = [key for key in ('warmup_iters', 'cooldown_iters') if not same_share(key)] if runs else []
    first_of = {}  # of each optimizer
    for run in runs:
        first = first_of.setdefault(run.optimizer_name, run)
        pairs = [(runs[0], key, one, two) for (key, one), (_, two) in zip(protocol(runs[0]), protocol(run))]
        pairs += [(first, key, first.config.get(key), run.config.get(key)) for key in OWN_PROTOCOL]
        pairs += [(runs[0], key, runs[0].config.get(key), run.config.get(key)) for key in parts]
        for other, key, one, two in pairs:
            if one != two and key not in free:
                hint = '' if ' ' in key else f'; leave one out, or give --tuned {key} if it was tuned'
                raise SystemExit(f'{other.out_dir} and {run.out_dir} cannot be compared: {key} is {one} in one and '
                                 f'{two} in the other{hint}')


def starting_weights(run):
    """The weights that a run started from, None for random ones; all branches of runs with one are alike."""
    if run.config.get('branch_cooldown'):
        return 'a run of which it is a branch'
    return None if run.config.get('init_from') in ('scratch', 'auto', 'resume') else run.config.get('init_from')


def hyperparameters(run):
    """What a run's result depends on besides data and seed, as a hashable key: equal keys differ in the seed only."""
    settings = {key: value for key, value in run.config.items() if key not in INCIDENTAL}
    settings['init_from'] = str(starting_weights(run))
    return tuple(sorted(settings.items()))


def by_seed(runs):
    """Lists of the runs that differ in their seed only, in order of first appearance; of each seed the first run."""
    groups = {}
    for run in runs:
        groups.setdefault(hyperparameters(run), {}).setdefault(run.config.get('seed'), run)
    return [list(group.values()) for group in groups.values()]


def mean_loss(runs, key='val/loss'):
    """(mean, standard deviation) of the last `key` of runs that differ in their seed; (loss, None) of a single one."""
    losses = [run.last(key) for run in runs]
    return statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else None


def lines_of(runs):
    """Lists of the runs that a figure draws as one line: equal but for their seed, and on the same data."""
    groups = []
    for run in runs:
        key, seed = (hyperparameters(run), json.dumps(run.about.get('data'))), run.config.get('seed')
        group = next((group for other, group in groups
                      if other == key and seed not in {one.config.get('seed') for one in group}), None)
        if group is None:
            groups.append((key, [run]))
        else:
            group.append(run)
    return [group for _, group in groups]


# How a setting is called in the label of a line.
SHORT = {'learning_rate': 'lr', 'max_iters': 'T', 'gamma': 'γ', 'beta1': 'β1', 'beta2': 'β2', 'eps': 'ε',
         'hessian_interval': 'k', 'warmup_iters': 'warm-up', 'total_batch_size': 'batch', 'weight_decay': 'λ'}


def labels_of(groups):
    """A label for each of the `lines_of` some runs: the optimizer, and the settings in which its lines differ; the
    names of the directories where that does not tell them apart."""
    derived = {'optimizer_name', 'lr_decay_iters', 'min_lr', 'seed'}
    labels = []
    for group in groups:
        run, same = group[0], [other[0] for other in groups if other[0].optimizer_name == group[0].optimizer_name]
        keys = [key for key in run.config if key not in INCIDENTAL | derived
                and len({json.dumps(other.config.get(key)) for other in same}) > 1]
        labels.append(', '.join([run.optimizer_label, *(f'{SHORT.get(key, key)} {run.config[key]}' for key in keys)]))
    if len(groups) == 1 or len(set(labels)) < len(labels):
        return [group[0].out_dir.resolve().name for group in groups]
    return labels


def averaged(group, key, x='steps'):
    """(xs, means, lows, highs) of the values of `key` over runs that differ in their seed, at the iterations at which
    all of them have one."""
    points = [dict(zip(run.series(key)[0], zip(*run.series(key, x)))) for run in group]
    rows = [[run[i] for run in points] for i in points[0] if all(i in run for run in points)]
    return ([statistics.mean(x for x, _ in row) for row in rows], [statistics.mean(y for _, y in row) for row in rows],
            [min(y for _, y in row) for row in rows], [max(y for _, y in row) for row in rows])


def below(root, path):
    """`path` relative to the directory `root` where it lies in it, else absolute: a str that says nothing of the
    machine where that can be helped."""
    path = Path(path).resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def read_json(path):
    """The contents of a JSON file; SystemExit with one line when it is missing or damaged."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except OSError:
        raise SystemExit(f'{path}: no such file') from None
    except ValueError as error:
        raise SystemExit(f'{path}: not JSON ({error})') from None


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def figure(columns=1, width=5.0, height=3.7, **options):
    """A matplotlib figure of `columns` panels side by side, drawn without a display: (figure, list of axes)."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit('drawing needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    fig, axes = plt.subplots(1, columns, figsize=(width * columns, height), squeeze=False, layout='constrained',
                             **options)
    for ax in axes[0]:
        ax.grid(alpha=0.3)
        ax.spines[['top', 'right']].set_visible(False)
    return fig, list(axes[0])


def styles(names):
    """Options of ax.plot that tell lines apart, for the optimizer's name of each: a color for each of up to ten lines;
    of more, a color per optimizer, from dark to light within; of more of one optimizer, a scale of colors."""
    import numpy as np
    from matplotlib import colormaps, colors
    if len(names) <= 10:
        return [dict(color=f'C{i}') for i in range(len(names))]
    kinds = list(dict.fromkeys(names))
    if len(kinds) == 1:
        return [dict(color=colormaps['viridis'](0.95 * i / (len(names) - 1))) for i in range(len(names))]
    found = []
    for i, name in enumerate(names):
        place = names[:i].count(name) / max(1, names.count(name) - 1)  # 0 to 1 among those of the optimizer
        toward, share = (0, 0.5 - place) if place < 0.5 else (1, 1.4 * (place - 0.5))  # black, white
        color = np.array(colors.to_rgb(f'C{kinds.index(name) % 10}'))
        found.append(dict(color=tuple(map(float, color + share * (toward - color)))))
    return found


def legend(fig, ax, **options):
    """The labels of `ax` as a legend beside the panels of a figure, in as many columns as its height asks for."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        rows = max(1, int(fig.get_figheight() * 5))
        fig.legend(handles, labels, loc='outside right upper', fontsize=8, frameon=False,
                   ncols=math.ceil(len(labels) / rows), **options)


def plain(text):
    """`text` for a figure with its dollar signs shown: matplotlib takes what stands between two for a formula."""
    return str(text).replace('$', r'\$')


def save(output, fig, rows=None, **data):
    """Writes the figure as `output` (PNG) and beside it the numbers: `rows` as .csv, and `data` as .json. What drew it
    is said by the PNG's text chunks Command and Commit.

    Args:
        rows: list of dicts; the header is the union of their keys in order of appearance.
        data: what else was measured; written only where there is any.
    """
    from matplotlib import pyplot as plt
    output = png_path(output)
    make_folder(output)
    origin = dict(Command=shlex.join(sys.argv), Commit=files.git_commit() or 'unknown')
    with write_errors(output), files.atomic_write(output) as f:
        fig.savefig(f, dpi=150, format='png', metadata=origin)
    plt.close(fig)
    written = [output]
    if rows is not None:
        write_csv(output.with_suffix('.csv'), rows)
        written.append(output.with_suffix('.csv'))
    if data:
        write_json(output.with_suffix('.json'), data)
        written.append(output.with_suffix('.json'))
    print('wrote ' + ', '.join(map(str, written)))


def add_launcher(parser):
    """Gives an ArgumentParser the flag --launcher, whose value is the list of the command's words."""
    def words(text):
        try:
            found = shlex.split(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f'{text}: {error}') from None
        if not found or not shutil.which(found[0]):
            raise argparse.ArgumentTypeError(f'{text!r}: no such command')
        return found
    parser.add_argument('--launcher', type=words, default=[sys.executable], metavar='COMMAND',
                        help='starts train.py, e.g. "torchrun --standalone --nproc_per_node=8" (default: this Python)')


def png_path(output):
    """`output` as a Path; SystemExit with one line unless it ends in .png and can be written."""
    output = Path(output)
    if output.suffix != '.png':
        raise SystemExit(f'--output={output}: must end in .png; the numbers go beside it as .csv or .json')
    return writable(output)


@contextlib.contextmanager
def write_errors(path):
    """Around what writes `path`: where the file system fails, SystemExit with one line."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f'{path}: cannot be written ({error.strerror or error})') from None


def writable(path):
    """`path` as a Path; SystemExit with one line when no file could be written there. To be asked before the work that
    the file is for; leaves nothing, not even the folder where that is missing."""
    path = Path(path)
    with write_errors(path):
        if path.is_dir():
            raise IsADirectoryError('is a directory')
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell, to root for one
            return path


def write_csv(path, rows):
    """`rows`, a list of dicts, as a CSV file; a key that a row lacks stays empty."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_json(path, data):
    """`data` as an indented JSON file."""
    write_text(path, json.dumps(data, indent=1) + '\n')


def write_text(path, text):
    """Replaces a text file, in a folder that is made where it is missing; SystemExit with one line when that fails."""
    make_folder(path)
    files.write_text(path, text)


def make_folder(path):
    """Makes the folder of the file `path`; SystemExit with one line when that fails."""
    with write_errors(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def show_progress(text):
    """Shows `text`, as much of it as fits, on the last line of a terminal instead of what stood there; elsewhere
    nothing."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be replaced
        print(f'\r\033[K{text[:width]}', end='', file=sys.stderr, flush=True)


def print_table(rows, columns=None):
    """Prints `rows`, a list of dicts, as an aligned table."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print('  '.join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip())


def _cell(value):
    if value is None:
        return '–'
    if isinstance(value, float):
        return 'nan' if math.isnan(value) else f'{value:.4f}' if 0.01 <= abs(value) < 1e4 else f'{value:.3g}'
    return str(value)
