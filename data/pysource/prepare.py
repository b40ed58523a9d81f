"""The source text of the Python standard library that runs this, in bytes: a corpus that needs no download.

About 11 MB without the tests. A file goes to val.bin, one in ten, by the hash of its path in the
library, so no file is in both splits and a file keeps its split in every Python version. Needs numpy and tqdm only.

The corpus depends on the Python version: between 3.10 and 3.13 its size differs by up to 4 %, the size of val.bin by up
to 20 %. Losses compare only between runs on the same bins; meta.json names the version.
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser
from data.writer import Batches, Corpus, write_bins

LEFT_OUT = {'test', 'tests', 'idle_test', '__pycache__', 'site-packages', 'dist-packages'}


def python_files(root):
    """(path below root, path) of every .py file below `root` that is not a test or of an installed package."""
    paths = ((path.relative_to(root), path) for path in sorted(root.rglob('*.py')))
    return [(name.as_posix(), path) for name, path in paths if not LEFT_OUT & set(name.parts)]


def is_text(data):
    """Whether bytes are UTF-8 and not blank."""
    try:
        return bool(data.decode().strip())
    except UnicodeDecodeError:
        return False


def read_sources(batch):
    """Worker: the documents of a batch of (split, path)."""
    return [(split, path.read_bytes().decode()) for split, path in batch]


def main():
    args = argument_parser(__doc__, __file__, tokenizer='byte').parse_args()
    files, seen, digest = [], set(), hashlib.sha256()
    for name, path in python_files(Path(sysconfig.get_path('stdlib'))):
        text = path.read_bytes()
        if is_text(text) and (content := hashlib.sha256(text).digest()) not in seen:
            seen.add(content)
            digest.update(name.encode() + b'\0' + text)
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big')
            files.append(('train' if number % 10 else 'val', path))
    source = f'Python {platform.python_version()} standard library'
    batches = Batches([[files[start:start + 50]] for start in range(0, len(files), 50)], read_sources, len(files))
    corpus = Corpus(source, f'sha256:{digest.hexdigest()}', 'val: one file in ten, by the hash of its path',
                    open=lambda: batches)
    write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
