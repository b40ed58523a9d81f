"""Write the tables of docs/optimizers.md, which come from optimizers.py.

  python dev/tables.py            after a change to the table of optimizers

A table stands between the lines <!-- table: NAME --> and <!-- end -->; all other text is written by hand.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optimizers
import train
from analysis.figures import optimizer_label
from configurator import Config, label_of

PAGE = ROOT / 'docs/optimizers.md'


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


def optimizer_settings():
    """List the settings of every optimizer, and whether it can be sharded."""
    keys = [*optimizers.placeholders(Config(train.DEFAULTS))]
    rows = [[optimizer_label(name), f'`{name}`',
             *(number(row.settings[key]) if key in row.settings else '–' for key in keys),
             row.hook.__name__.removesuffix('Hook') if 'hessian_interval' in row.settings else '–',
             'yes' if row.shards and not row.hook.hessian_products else 'no']
            for name, row in optimizers.OPTIMIZERS.items()]
    labels = ['sequences of 480' if key == 'hessian_batch_size' else label_of(key) for key in keys]
    return table(['optimizer', '`--optimizer_name`', *labels, 'estimate', 'fsdp'], rows)


def learning_rates():
    """List the optimizers' peak learning rates by model size; equal ones share a row."""
    rows = {}
    for name in optimizers.OPTIMIZERS:
        rates = (optimizers.peak_learning_rate(name, size)[0] for size in train.SIZES)
        rows.setdefault(tuple('–' if lr is None else number(lr) for lr in rates), []).append(optimizer_label(name))
    return table(['', *train.SIZES], [['; '.join(labels), *rates] for rates, labels in rows.items()])


def current(text):
    """Return the text of a page with current tables."""
    make = dict(optimizer_settings=optimizer_settings, learning_rates=learning_rates)
    return re.sub(r'(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)',
                  lambda found: f'{found[1]}\n{make[found[2]]()}\n\n', text, flags=re.DOTALL)


def main():
    text = PAGE.read_text(encoding='utf-8')
    if (found := current(text)) != text:
        PAGE.write_text(found, encoding='utf-8')
        print(f'wrote {PAGE}')


if __name__ == '__main__':
    main()
