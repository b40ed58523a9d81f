"""Tiny Shakespeare, one id per character: the same bins as nanoGPT's.

65 characters; 1,003,854 tokens in train.bin, the first 90 % of the text, and 111,540 in val.bin. Takes any other text
with --input; without it, downloads the text once and keeps it as input.txt.
"""

import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, lines, local_files
from data.tokenizer import Char
from data.writer import Corpus, write_bins
from runtime.files import atomic_write, local_path, one_line_errors

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'


@one_line_errors()
def main():
    parser = argument_parser(__doc__, __file__)
    parser.add_argument('--input', type=local_path, help='a text file to take instead of the download')
    args = parser.parse_args()
    path = args.input or args.out_dir / 'input.txt'
    if not args.input and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(URL, timeout=60) as response, atomic_write(path) as file:
            file.write(response.read())
    source, revision = local_files([path])
    text = ''.join(lines(path))
    start = int(0.9 * len(text))
    documents = [('train', text[:start]), ('val', text[start:])]
    corpus = Corpus(source, revision, 'val: the last tenth of the text', lambda: [documents])
    write_bins(corpus, Char(''.join(sorted(set(text)))), args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
