"""The source of this Python's standard library, about 11 MB of bytes. Needs no download.

One file in ten goes to val.bin, by the hash of its path. Between Python 3.10 and 3.13 the size of val.bin differs by up
to 20 %, so losses are comparable only on the same bins. meta.json names the version.
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser
from data.writer import Corpus, write_bins
from runtime.files import one_line_errors

LEFT_OUT = {'test', 'tests', 'idle_test', '__pycache__', 'site-packages', 'dist-packages'}


@one_line_errors()
def main():
    args = argument_parser(__doc__, __file__, tokenizer='byte').parse_args()
    root = Path(sysconfig.get_path('stdlib'))
    documents, seen, digest = [], set(), hashlib.sha256()
    for path in sorted(root.rglob('*.py')):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        data = path.read_bytes()
        text = data.decode(errors='replace')
        if text.strip() and text not in seen:
            seen.add(text)
            name = name.as_posix().encode()
            digest.update(name + b'\0' + data)
            number = int.from_bytes(hashlib.sha256(name).digest()[:8], 'big')
            documents.append(('train' if number % 10 else 'val', text))
    batches = [documents[start:start + 50] for start in range(0, len(documents), 50)]
    corpus = Corpus(f'Python {platform.python_version()} standard library', f'sha256:{digest.hexdigest()}',
                    'val: one file in ten, by the hash of its path', lambda: batches)
    write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
