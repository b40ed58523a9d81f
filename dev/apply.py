"""Apply recipes of docs/hacking.md to this checkout.

  python dev/apply.py rotary z_loss        makes the edits of docs/hacking/rotary.diff and z_loss.diff

In a recipe `--- PATH` begins a file, which may be new, and `@@` a hunk. The old text of a hunk must occur exactly once.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.stem: path for path in sorted((ROOT / 'docs/hacking').glob('*.diff'))}


def apply(name, root=ROOT):
    """Make all edits of a recipe in the directory `root`, or none."""
    edited = {}
    for file, body in re.findall(r'^--- (\S+)\n((?:(?!--- ).*\n)*)', RECIPES[name].read_text(encoding='utf-8'), re.M):
        path = root / file
        text = path.read_text(encoding='utf-8') if path.exists() else ''
        for hunk in body.split('@@\n')[1:]:
            before, after = (''.join(f'{line[1:]}\n' for line in hunk.splitlines() if line[:1] != sign)
                             for sign in '+-')
            if text.count(before) != 1:
                raise SystemExit(f'{name}, {file}: expected exactly one match for:\n{before}')
            text = text.replace(before, after)
        edited[path] = text
    for path, text in edited.items():
        path.write_text(text, encoding='utf-8')
        print(f'{name}: edited {path.relative_to(root)}')


if __name__ == '__main__':
    if not sys.argv[1:] or {*sys.argv[1:]} - RECIPES.keys():
        raise SystemExit('usage: python dev/apply.py NAME...; recipes: ' + ' '.join(RECIPES))
    for name in sys.argv[1:]:
        apply(name)
