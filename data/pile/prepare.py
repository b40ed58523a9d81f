"""The Pile without its copyrighted parts, in GPT-NeoX-20B's tokens: the nearest to the paper's NeoX data.

The Pile is no longer distributed. This mirror, monology/pile-uncopyrighted on the Hub, lacks Books3, BookCorpus2,
OpenSubtitles, YTSubtitles and OWT2, so losses on it do not compare with the paper's. About 340 GB are streamed and not
stored; --num_files takes only the first of the 30 training files, some 11 GB each. Needs the package zstandard.
"""

import sys
from functools import partial
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, at_least_one, batched, expand, local_files, read, stream
from data.tokenizer import get_tokenizer
from data.writer import Corpus, write_bins

REPOSITORY, REVISION = 'monology/pile-uncopyrighted', '3be90335b66f24456a5d6659d9c8d208c0357119'
HUB = f'hf://datasets/{REPOSITORY}@{REVISION}'


def main():
    parser = argument_parser(__doc__, __file__, tokenizer='EleutherAI/gpt-neox-20b', data_files=True)
    parser.add_argument('--val_files', nargs='+', type=Path, metavar='FILE', help='the val split of --data_files')
    parser.add_argument('--num_files', type=at_least_one, default=30, help='training files to take (default: all 30)')
    args = parser.parse_args()
    if bool(args.data_files) != bool(args.val_files):
        parser.error('--data_files and --val_files go together')
    tokenizer = get_tokenizer(args.tokenizer)
    if args.data_files:
        train, val = expand(args.data_files), expand(args.val_files)
        source, revision = local_files([*train, *val])
        texts = partial(read, text_key='text')
    else:
        train, val = [f'{HUB}/train/{i:02d}.jsonl.zst' for i in range(args.num_files)], [f'{HUB}/val.jsonl.zst']
        source, revision, texts = REPOSITORY, REVISION, stream
    segments = [batched(zip(repeat('train'), texts(file))) for file in train]
    segments += [batched(zip(repeat('val'), texts(file))) for file in val]
    corpus = Corpus(source, revision, f'{len(train)} files for train, {len(val)} for val', lambda: segments)
    write_bins(corpus, tokenizer, args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
