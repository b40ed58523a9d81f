"""Your own text: .txt (documents separated by <|endoftext|>), .jsonl and .parquet files.

The first two may be compressed (.gz, .zst). A directory stands for all such files below it, sorted by name, except
hidden ones and links to directories.

Without --val_file, val_fraction of the documents go to val.bin: at 0.01 every 100th. If there are too few documents,
val.bin gets the last val_fraction of the text, from a line end if one is near.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, files_corpus
from data.writer import write_bins
from runtime.arguments import at_least
from runtime.files import local_path, one_line_errors


@one_line_errors()
def main():
    parser = argument_parser(__doc__, __file__, tokenizer='gpt2')
    parser.add_argument('files', nargs='+', type=local_path, metavar='PATH')
    parser.add_argument('--val_file', nargs='+', type=local_path, default=[], metavar='PATH', help='files for val.bin')
    parser.add_argument('--val_fraction', type=at_least(1e-9, float, at_most=0.5), default=0.01,
                        help='the part for val.bin (default: %(default)s)')
    parser.add_argument('--text_key', default='text', help='key of texts in .jsonl and .parquet (default: %(default)s)')
    args = parser.parse_args()
    corpus = files_corpus(args.files, args.val_file, args.val_fraction, args.text_key)
    meta = write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)
    if (tokens := meta['val']['tokens']) < 10_000:
        print(f'warning: val.bin has only {tokens:,} tokens, so val/loss will be noisy; raise --val_fraction, or pass '
              '--val_file')


if __name__ == '__main__':
    main()
