"""Apply recipes of docs/hacking.md to this checkout.

  python dev/apply.py rotary z_loss        makes the edits of docs/hacking/rotary.diff and z_loss.diff

In such a file `--- PATH` begins a file, which may be new, and `@@` a place in it. A place is found by its text, which
must be there once.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.stem: path for path in sorted((ROOT / 'docs/hacking').glob('*.diff'))}


def apply(name, root=ROOT):
    """Make the edits of a recipe, all or none, in the directory `root`."""
    edited = {}
    for file, body in re.findall(r'^--- (\S+)\n((?:(?!--- ).*\n)*)', RECIPES[name].read_text(encoding='utf-8'), re.M):
        path = root / file
        text = path.read_text(encoding='utf-8') if path.exists() else ''
        for place in body.split('@@\n')[1:]:
            before, after = (''.join(f'{line[1:]}\n' for line in place.splitlines() if line[:1] != sign)
                             for sign in '+-')
            if text.count(before) != 1:
                raise SystemExit(f'{name}, {file}: not there once:\n{before}')
            text = text.replace(before, after)
        edited[path] = text
    for path, text in edited.items():
        path.write_text(text, encoding='utf-8')
        print(f'{name}: edited {path.relative_to(root)}')


if __name__ == '__main__':
    if not sys.argv[1:] or {*sys.argv[1:]} - RECIPES.keys():
        raise SystemExit('usage: python dev/apply.py NAME..., of ' + ' '.join(RECIPES))
    for name in sys.argv[1:]:
        apply(name)
