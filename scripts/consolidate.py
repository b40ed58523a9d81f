"""Make one .pt file of a sharded checkpoint (a directory), as runs without sharding write it; needs no ranks.

  python scripts/consolidate.py out/neox-1.5b                            its newest checkpoint → ckpt_ITERATION.pt there
  python scripts/consolidate.py out/neox-1.5b/best --output best-1.5b.pt --no_optimizer

The scripts and train.py, sharded or not, read such a directory as it is; other programs need the file.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime import checkpoint, sharded
from runtime.files import save_pt


def consolidate(path, output=None, optimizer=True):
    """Writes the file, and returns its path.

    Args:
        path: a directory ckpt_ITERATION (or best), or an out_dir, whose newest checkpoint is used.
        output: default the directory's name with .pt.
        optimizer: whether to copy the optimizer's state, without which the run cannot be resumed.
    """
    path, state = checkpoint.load(path)
    if not path.is_dir():
        raise SystemExit(f'{path}: is one file already')
    output = Path(output) if output else path.resolve().with_suffix('.pt')
    if output.exists():
        raise SystemExit(f'{output}: exists; remove it, or choose another --output')
    saved = state.pop('optimizer')
    if optimizer:
        state['optimizer'] = sharded.read_optimizer(path, saved)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_pt(output, state)
    return output


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help='out_dir (its newest checkpoint), or one directory ckpt_ITERATION in it')
    parser.add_argument('--output', help='the file to write; default: next to the directory')
    parser.add_argument('--no_optimizer', action='store_true', help="leave out the optimizer's state")
    args = parser.parse_args()
    print(consolidate(args.checkpoint, args.output, not args.no_optimizer))
