"""Write the tables of docs/optimizers.md from optimizers.py.

  python dev/tables.py            after a change to the table of optimizers

A table is between the lines <!-- table: NAME --> and <!-- end -->. All other text is written by hand.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optimizers
import train
from analysis.figures import label_of

PAGE = ROOT / 'docs/optimizers.md'


def number(value):
    """Format a number compactly: 0.0006 → 6e-4."""
    if value and abs(value) < 1e-2:
        mantissa, exponent = f'{value:e}'.split('e')
        return f'{float(mantissa):g}e{int(exponent)}'
    return f'{value:g}'


def table(head, rows):
    """Return a Markdown table of strings."""
    lines = ['| ' + ' | '.join(cell.replace('|', r'\|') for cell in line) + ' |' for line in (head, *rows)]
    return '\n'.join([lines[0], '|' + '---|' * len(head), *lines[1:]])


def shared(cells_of):
    """Merge {name: cells} into a row for each distinct list of cells, beginning with the names that share it."""
    rows = {}
    for name, cells in cells_of.items():
        rows.setdefault(tuple(cells), []).append(f'`{name}`')
    return [[', '.join(names), *cells] for cells, names in rows.items()]


def optimizer_settings(hessian):
    """List the settings of optimizers with or without a Hessian, and whether they support sharding."""
    mine = {name: row for name, row in optimizers.OPTIMIZERS.items() if ('hessian_interval' in row.settings) == hessian}
    used = {key for row in mine.values() for key in row.settings} - {'optimizer_args'}
    keys = [key for key in train.DEFAULTS if key in used]
    cells = {name: [*(number(row.settings[key]) if key in row.settings else '–' for key in keys),
                    *[row.hook.__name__.removesuffix('Hook')] * hessian,
                    'yes' if row.shards and not row.hook.hessian_products else 'no'] for name, row in mine.items()}
    labels = ['sequences of 480' if key == 'hessian_batch_size' else label_of(key) for key in keys]
    return table(['`--optimizer_name`', *labels, *['estimate'] * hessian, 'fsdp'], shared(cells))


def learning_rates():
    """List the optimizers' peak learning rates by model size."""
    rates = {name: [optimizers.peak_learning_rate(name, size)[0] for size in train.SIZES] for name in
             optimizers.OPTIMIZERS}
    return table(['', *train.SIZES], shared({name: ['–' if lr is None else number(lr) for lr in mine]
                                             for name, mine in rates.items()}))


def current(text):
    """Return the text of a page with current tables."""
    make = dict(first_order=lambda: optimizer_settings(False), second_order=lambda: optimizer_settings(True),
                learning_rates=learning_rates)
    return re.sub(r'(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)',
                  lambda found: f'{found[1]}\n{make[found[2]]()}\n\n', text, flags=re.DOTALL)


if __name__ == '__main__':
    text = PAGE.read_text(encoding='utf-8')
    if (found := current(text)) != text:
        PAGE.write_text(found, encoding='utf-8')
        print(f'wrote {PAGE}')
