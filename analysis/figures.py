"""Figures and tables: style, labels, printing, and files that record their command and commit."""

import csv
import math
import os
import shlex
import sys
import textwrap
from pathlib import Path

from runtime import files
from runtime.arguments import argument_parser

RECORDS = Path(__file__).resolve().parents[1] / 'records'

# Value of --x → label of the x-axis
AXES = {'steps': 'iterations', 'tokens': 'training tokens', 'seconds': 'seconds of training', 'flops': 'training FLOPs'}

# The last three are controls of studies in records/.
OPTIMIZER_LABELS = {'adamw': 'AdamW', 'lion': 'Lion', 'adahessian': 'AdaHessian', 'sophiag': 'Sophia-G',
                    'sophiah': 'Sophia-H', 'ef_clip': 'E-F+clip', 'ah_clip': 'AH+clip', 'signum': 'Sign momentum',
                    'normalize': 'Normalize', 'gnb_noclip': 'GNB without clipping',
                    'sophiag_fresh': 'Sophia-G, fresh h', 'muon': 'Muon', 'soap': 'SOAP', 'gnb_mean': 'GNB, mean of h',
                    'gnb_rows': 'GNB, h shuffled in rows', 'gnb_permuted': 'GNB, h permuted'}

SETTING_LABELS = dict(learning_rate='learning rate', weight_decay='weight decay', beta1='β1', beta2='β2', eps='ε',
                      gamma='γ', hessian_interval='k', hessian_parts='parts', max_iters='steps T',
                      warmup_iters='warm-up', total_batch_size='sequences per step', block_size='tokens per sequence',
                      n_layer='layers', scale_attn_by_inverse_layer_idx='attention scaling')

# Optimizers with the same color in all pictures: C0, C1, …
COLORED = ['adamw', 'sophiag', 'muon', 'soap', 'lion', 'sophiah', 'signum', 'gnb_mean', 'ef_clip', 'sophiag_fresh']


def label_of(key):
    return SETTING_LABELS.get(key, key)


def optimizer_label(name):
    """Return an optimizer's name in figures and tables; for LIBRARY:CLASS, the class."""
    return OPTIMIZER_LABELS.get(name, name.rpartition(':')[2])


def figure(columns=1, width=5.0, height=3.7):
    """Return (figure, list of axes): a matplotlib figure of `columns` panels side by side."""
    # A notebook's !commands inherit its backend, and Matplotlib cannot be imported if that is not installed.
    os.environ['MPLBACKEND'] = 'agg'
    from matplotlib.figure import Figure
    fig = Figure(figsize=(width * columns, height), layout='constrained')
    axes = fig.subplots(1, columns, squeeze=False)
    for ax in axes[0]:
        ax.grid(alpha=0.3)
        ax.spines[['top', 'right']].set_visible(False)
    return fig, list(axes[0])


def styles(names):
    """Return ax.plot's options for lines of the optimizers `names`, with their own colors if all names differ."""
    if len(set(names)) == len(names) and set(names) <= set(COLORED):
        return [dict(color=f'C{COLORED.index(name)}') for name in names]
    if len(names) <= 10:
        return [dict(color=f'C{i}') for i in range(len(names))]
    from matplotlib import colormaps
    return [dict(color=colormaps['viridis'](0.95 * i / (len(names) - 1))) for i in range(len(names))]


def legend(fig, ax):
    """Put the labels of `ax` into a legend right of the panels, with enough columns to fit the figure's height."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        rows = max(1, int(fig.get_figheight() * 5))
        fig.legend(handles, labels, loc='outside right center', fontsize=8, frameon=False,
                   ncols=math.ceil(len(labels) / rows))


def set_title(fig, text):
    """Put a title over the whole figure, wrapped to its width."""
    fig.suptitle(textwrap.fill(text, int(fig.get_figwidth() * 12)), fontsize=10)


def save(output, fig, rows, **data):
    """Write the figure as a PNG with its command and commit in text chunks. Write its numbers next to it: `rows`, a
    list of dicts, as .csv, and `data`, if any, as .json."""
    made_by = dict(Command=shlex.join(sys.argv), Commit=files.git_commit() or 'unknown')
    with files.atomic_write(output) as f:
        fig.savefig(f, dpi=150, format='png', metadata=made_by)
    written = [output, output.with_suffix('.csv')]
    write_csv(written[1], rows)
    if data:
        written.append(output.with_suffix('.json'))
        files.write_json(written[2], data)
    print('wrote ' + ', '.join(map(str, written)))


def argparser(doc, output, numbers='.csv', of_runs=False):
    """Return an ArgumentParser with --output for a script that draws. With `of_runs` it also has OUT_DIR and --title,
    which `parse` reads."""
    parser = argument_parser(doc)
    parser.add_argument('--output', default=None if of_runs else f'out/{output}', type=png_path, metavar='FILE.png',
                        help=f'the picture; its numbers go next to it as {numbers} (default: '
                             + (f'{output} in the directory of the runs)' if of_runs else f'out/{output})'))
    if of_runs:
        parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR',
                            help='a run, a directory of runs, or a CSV file (docs/verdict.md)')
        parser.add_argument('--title', default='', help='title of the picture')
        parser.set_defaults(name=output)
    return parser


def parse(parser, argv):
    """Parse the arguments of an `argparser` with `of_runs`. By default the picture goes into the run's directory, or
    into the parent of several runs or of a file. If that is in records/, it goes into out/ instead."""
    args = parser.parse_args(argv)
    folder = Path(args.out_dirs[0])
    if len(args.out_dirs) > 1 and (folder / 'config.json').is_file():
        folder = folder.parent
    while not folder.is_dir():  # the path may name a file, or a run in a runs.jsonl
        folder = folder.parent
    if folder.resolve().is_relative_to(RECORDS):
        folder = Path('out')
    args.output = args.output or png_path(folder / args.name)
    inputs = [(Path(path) / name).resolve() for path in args.out_dirs for name in ('', 'sweep.json')]
    for numbers in args.output.with_suffix('.csv'), args.output.with_suffix('.json'):
        if numbers.resolve() in inputs:
            raise SystemExit(f'{numbers}: the numbers of the picture would replace it; choose another --output')
    return args


def png_path(output):
    """Return `output` as a Path, which must end in .png, and make its folder."""
    output = files.local_path(str(output))
    if output.suffix != '.png':
        raise SystemExit(f'--output={output}: must end in .png; the numbers go next to it as .csv or .json')
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


def print_table(rows, columns=None):
    """Print `rows`, a list of dicts, as an aligned table."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print('  '.join(text.rjust(width) for text, width in zip(line, widths)).rstrip())


def cell(value):
    """Format a value of a table."""
    if value is None:
        return '–'
    if isinstance(value, float):
        return f'{value:.4f}' if 0.01 <= abs(value) < 1e4 else f'{value:.3g}'
    return str(value)


def write_csv(path, rows):
    """Write `rows`, a list of dicts, as a CSV file. A row's missing keys stay empty."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    with files.atomic_write(path, 'w') as f:
        writer = csv.DictWriter(f, header, lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
