"""Shared by every records/NAME/results.py: texts of tables, the trials, the command line."""

from pathlib import Path

from analysis.figures import png_path, save, write_csv
from analysis.runs import find_runs
from runtime.arguments import argument_parser
from runtime.files import local_path

SEARCH_SEED = 1337  # chose settings, and takes part in no test
DERIVED = 'optimizer_name', 'lr_decay_iters', 'min_lr'  # settings with another column or that follow from others
MEASURED = 'val/loss', 'val/loss/heldout', 'train/loss', 'update_unclipped', 'hessian_norm'


def part_of(run):
    """Return the name of the part of its study that a `RunRecord` in records/ belongs to."""
    return run.out_dir.relative_to(Path(__file__).resolve().parent).parts[1]


def losses(runs):
    """Return the final losses of `runs`."""
    return [run.final_loss for run in runs]


def markdown(rows):
    """Return a table, a list of dicts of texts, as Markdown."""
    lines = [rows[0], ['---'] * len(rows[0]), *([cell or '' for cell in row.values()] for row in rows)]
    return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def mean_sd(mean, sd):
    """Return the text of a mean loss, with its standard deviation unless `sd` is None."""
    if sd is None:
        return f'{mean:.3f}'
    return f'{mean:.3f} ± {sd:.3f}' if sd >= 0.0005 else f'{mean:.3f} ± <0.001'


def percent(share):
    """Return the text of a share, '' for None."""
    return '' if share is None else f'{share:.0%}'.replace('%', ' %')


def interval(row):
    """Return the text of a `difference`, with its 95 % interval if it has one."""
    known = f' ± {row["plus_or_minus"]:.3f}' if row['p'] is not None else ''
    return f'{row["difference"]:+.3f}'.replace('-', '−') + known


def texts(tests):
    """Return the rows of tests as texts."""
    return [{'test': row['comparison'], 'seeds': row['n'], 'difference, 95 %': interval(row), **{
        key: '–' if row.get(key) is None else f'{row[key]:.2g}' for key in ('p', 'p, Holm')}} for row in tests]


def trials(here):
    """Return a row for each run of a study: its place, the settings in which the runs differ, what it measured last.
    A setting that the run's optimizer lacks stays empty."""
    def text(value):
        return f'{value:.5g}' if isinstance(value, float) else value

    def setting(run, key):
        return '' if run.lacks(key) else text(run.config[key])

    runs = find_runs([here])
    keys = [key for key in sorted(runs[0].having('tuned', 'model', 'protocol', 'horizon')) if key not in DERIVED
            and len({setting(run, key) for run in runs} - {''}) > 1]
    measured = [key for key in MEASURED if any(run.last(key) is not None for run in runs)]
    return [{'part': str(run.out_dir.relative_to(here).parent), 'optimizer': run.optimizer_name,
             **{key: setting(run, key) for key in keys}, 'seed': run.seed,
             **{key: text(run.final(key) if 'loss' in key else run.last(key)) for key in measured}} for run in runs]


def show_results(doc, here, read=None, tables=None, drawings=None):
    """Print the tables of a study, write its trials, or draw one of its pictures: the program of a results.py.

    Args:
        here: the study's folder.
        read: () → results.
        tables: results → list of texts.
        drawings: {name: function of the results → (figure, rows)}.
    """
    parser, drawings = argument_parser(doc), drawings or {}
    parser.add_argument('what', choices=[*['tables'] * bool(tables), 'trials', *drawings])
    parser.add_argument('--output', type=local_path, metavar='FILE',
                        help='the .csv of the trials, or the .png of a picture (default: in out/)')
    args = parser.parse_args()
    if args.what == 'tables':
        print('\n'.join(tables(read())))
    elif args.what == 'trials':
        output = args.output or Path('out/trials.csv')
        output.parent.mkdir(parents=True, exist_ok=True)
        write_csv(output, trials(here))
        print(f'wrote {output}')
    else:
        save(png_path(args.output or f'out/{args.what}.png'), *drawings[args.what](read()))
