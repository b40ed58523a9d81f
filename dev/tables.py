"""Write the tables in the docs that come from the code or from records.

  python dev/tables.py            after a change to a setting, the table of optimizers, or records
  python dev/tables.py --check    exits with 1 if a page is not current

A table stands between the lines <!-- table: NAME --> and <!-- end -->; all other text is written by hand.
"""

import argparse
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optimizers
import shapes
import train
from analysis.compare import noise_of, same_horizon, tuned_at_each_T
from analysis.figures import mean_sd, optimizer_label
from analysis.runs import by_seed, find_runs, read_json
from configurator import label_of, sections
from records.dissection import results as dissection


def number(value):
    """Format a number as people write it: 0.0006 → 6e-4."""
    if value and abs(value) < 1e-2:
        mantissa, exponent = f'{value:e}'.split('e')
        return f'{float(mantissa):g}e{int(exponent)}'
    return f'{value:g}'


def table(head, rows):
    """Return a Markdown table of strings."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(cell.replace('|', r'\|') for cell in line) + ' |' for line in lines)


def settings():
    """List train.py's settings by section, with their defaults and comments."""
    found = sections(train.DEFAULTS, (ROOT / 'train.py').read_text(encoding='utf-8'))
    return '\n\n'.join(f'**{section.capitalize()}**\n\n' + table(['setting', 'default', ''], [
        [f'`{key}`', '*derived*' if one.default is None else f'`{one.default!r}`', comment]
        for key, one, comment in settings]) for section, settings in found.items())


def optimizer_settings():
    """List the settings of every optimizer."""
    keys = [key for key in optimizers.PLACEHOLDERS if key != 'optimizer_args']
    rows = [[optimizer_label(name), f'`{name}`',
             *(number(row.settings[key]) if key in row.settings else '–' for key in keys),
             row.hook.__name__.removesuffix('Hook') if 'hessian_interval' in row.settings else '–']
            for name, row in optimizers.OPTIMIZERS.items()]
    labels = ['sequences of 480' if key == 'hessian_batch_size' else label_of(key) for key in keys]
    return table(['optimizer', '`--optimizer_name`', *labels, 'estimate'], rows)


def learning_rates():
    """List the optimizers' peak learning rates by model size; equal ones share a row."""
    rows = {}
    for name in optimizers.OPTIMIZERS:
        rates = (optimizers.peak_learning_rate(name, size)[0] for size in shapes.SIZES)
        rows.setdefault(tuple('–' if lr is None else number(lr) for lr in rates), []).append(optimizer_label(name))
    return table(['', *shapes.SIZES], [['; '.join(labels), *rates] for rates, labels in rows.items()])


def optimizer_checks():
    """List whether each optimizer can be sharded, and its measured state and time of an update at 30M."""
    measured = {row['optimizer_name']: row for row in read_json(ROOT / 'records/cpu/bench_updates.json')['results']}
    rows = []
    for name, row in optimizers.OPTIMIZERS.items():
        found = measured.get(name)
        cells = [f'{found["state"]:.2f}', f'{found["over_adamw"]:.1f}'] if found else ['–', '–']
        rows.append([f'`{name}`', 'yes' if row.shards and not row.hook.hessian_products else 'no', *cells])
    return table(['`--optimizer_name`', 'fsdp', 'state', 'update'], rows)


STUDY = ['muon', 'soap', 'adamw', 'sophiag']  # its optimizers, in column order


@cache
def study_sides():
    """Return ({optimizer: {T: `Tuned`}}, noise) of records/study, as scripts/speedup.py does."""
    runs = find_runs([ROOT / 'records/study'])
    return {name: tuned_at_each_T(runs, name) for name in STUDY}, noise_of(by_seed([r for r in runs if not r.rejected]))


def loss(side):
    """Format the mean of a `Tuned`, with its standard deviation if there are three seeds or more."""
    row = side.row()
    return mean_sd(row['val/loss'], row['sd'] if len(side.best) > 2 else None)


def interval(row):
    """Format a `difference`, with its 95 % interval if it has one."""
    text = f'{row["difference"]:+.3f}'.replace('-', '−')
    return text if row['p'] is None else f'{text} ± {row["plus_or_minus"]:.3f}'


def minus_adamw(side, baseline, noise):
    """Format a `Tuned`'s difference to AdamW's with its 95 % interval, and the p-value; '' where there is none."""
    if side is baseline or not side or not baseline:
        return '', ''
    row = same_horizon(side, baseline, noise)
    return interval(row), '' if row['p'] is None else f'{row["p"]:.2g}'


def study():
    """List losses, seeds, trials and differences of records/study; at each T the lowest loss first."""
    sides, noise = study_sides()
    rows = []
    for T in sorted(sides['adamw']):
        for side in sorted((at_T[T] for at_T in sides.values() if T in at_T), key=lambda side: side.mean):
            rows.append([f'{T:,}', side.best[0].optimizer_label, f'{side.learning_rate:g} ({len(side.trials)})',
                         loss(side), str(len(side.best)), *minus_adamw(side, sides['adamw'][T], noise)])
    return table(['T', 'optimizer', 'best learning rate (trials)', 'validation loss', 'seeds', 'minus AdamW', 'p'],
                 rows)


def study_losses():
    """List the losses of records/study."""
    sides, noise = study_sides()
    rows = [[f'{T:,}', *(loss(at_T[T]) if T in at_T else '–' for at_T in sides.values()),
             minus_adamw(sides['sophiag'].get(T), sides['adamw'].get(T), noise)[0]] for T in sorted(sides['adamw'])]
    return table(['steps', *map(optimizer_label, STUDY), 'Sophia-G minus AdamW, 95 %'], rows)


@cache
def dissection_runs():
    """Return the runs of records/dissection."""
    return find_runs([dissection.RECORDS])


def dissection_part(part):
    """List the losses of every arm of a part of records/dissection."""
    rows = dissection.table(dissection.arms_of(dissection_runs(), part), dissection.SEEDS[part])
    return table([*rows[0]], [[cell or '' for cell in row.values()] for row in rows])


def dissection_six():
    """List the losses with six fresh seeds at the long horizon."""
    rows = dissection.long_horizon(dissection_runs())
    cells = [[row['optimizer'], mean_sd(row['mean'], row['sd']), '' if row['optimizer'] == 'AdamW' else interval(row)]
             for row in rows]
    return table(['six fresh seeds', 'loss', 'minus AdamW, 95 %'], cells)


def dissection_tests():
    """List the tests of records/dissection."""
    cells = []
    for row in dissection.tests(dissection_runs()):
        ps = ['–' if row.get(key) is None else f'{row[key]:.2g}' for key in ('p', 'p, Holm')]
        cells.append([row['comparison'], row['n'], interval(row), *ps])
    return table(['test', 'seeds', 'difference, 95 %', 'p', 'p, Holm'], cells)


TABLES = {make.__name__: make for make in (settings, optimizer_settings, learning_rates, optimizer_checks, study,
                                           study_losses, dissection_six, dissection_tests)}
TABLES |= {f'dissection_{name}': lambda part=part: dissection_part(part)
           for name, part in dict(search='A', batch='B', long='C').items()}
PAGES = ('README.md', 'docs/settings.md', 'docs/optimizers.md', 'records/study/README.md',
         'records/dissection/README.md')


def current(text):
    """Return the text of a page with current tables."""
    return re.sub(r'(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)',
                  lambda found: f'{found[1]}\n{TABLES[found[2]]()}\n\n', text, flags=re.DOTALL)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing, exit with 1 if a page is not current')
    check = parser.parse_args(argv).check
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding='utf-8')
        if (found := current(text)) != text:
            if check:
                raise SystemExit(f'{page}: not current; run python dev/tables.py')
            path.write_text(found, encoding='utf-8')
            print(f'wrote {page}')


if __name__ == '__main__':
    main()
