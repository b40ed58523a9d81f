"""The Pile without its copyrighted parts, in GPT-NeoX-20B's tokens, the closest public corpus to the paper's NeoX data.

The Pile is no longer distributed. monology/pile-uncopyrighted on the Hub lacks Books3, BookCorpus2, OpenSubtitles,
YTSubtitles and OWT2, so losses are not comparable with the paper's. Streams about 340 GB without storing them, and
again when resumed. --num_files takes fewer of the 30 training files of about 11 GB. Needs the package zstandard.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, batched, network_errors
from data.writer import Corpus, write_bins
from runtime.arguments import at_least
from runtime.files import one_line_errors

REPOSITORY, REVISION = 'monology/pile-uncopyrighted', '3be90335b66f24456a5d6659d9c8d208c0357119'
HUB = f'hf://datasets/{REPOSITORY}@{REVISION}'


def stream(files):
    """Yield (split, text) of .jsonl files on the Hub, given as (split, name)."""
    from datasets import load_dataset
    with network_errors(REPOSITORY):
        for split, name in files:
            table = load_dataset('json', data_files=f'{HUB}/{name}', split='train', streaming=True)
            for part in table.with_format('arrow').iter(1000):
                yield from ((split, text) for text in part['text'].to_pylist())


@one_line_errors()
def main():
    parser = argument_parser(__doc__, __file__, tokenizer='EleutherAI/gpt-neox-20b')
    parser.add_argument('--num_files', type=at_least(1), default=30, help='training files (default: all %(default)s)')
    args = parser.parse_args()
    files = [('train', f'train/{i:02d}.jsonl.zst') for i in range(args.num_files)] + [('val', 'val.jsonl.zst')]
    split = f'{args.num_files} files for train, 1 for val'
    corpus = Corpus(REPOSITORY, REVISION, split, lambda: batched(stream(files)))
    write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
