"""FineWeb as shards of GPT-2's tokens, in the format of llm.c and modded-nanogpt.

--download N gets the first N of 103 training shards and the validation shard of kjj0/fineweb10B-gpt2, 0.2 GB each.
--tokens reads shards from disk; the last one becomes val.bin. The end-of-text id comes before each document.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, distinct, local_files
from data.tokenizer import GPT2
from data.writer import Corpus, write_bins
from runtime.arguments import at_least
from runtime.files import local_path, one_line_errors

REPOSITORY, SHARDS = 'kjj0/fineweb10B-gpt2', 103
HEADER = 256  # int32s: magic number, version, number of tokens, zeros
MAGIC, VERSION = 20240520, 1
PIECE = 2 ** 24  # tokens in one batch


def batches(files):
    """Yield the tokens of shards in batches."""
    for path in files:
        tokens = np.memmap(path, '<u2', 'r', offset=4 * HEADER)
        for start in range(0, len(tokens), PIECE):
            yield [('val' if path == files[-1] else 'train', np.array(tokens[start:start + PIECE]))]


@one_line_errors()
def main():
    parser = argument_parser(__doc__, __file__)
    shards = parser.add_mutually_exclusive_group(required=True)
    shards.add_argument('--download', type=at_least(1, at_most=SHARDS), metavar='N',
                        help=f'the first N shards of {REPOSITORY}')
    shards.add_argument('--tokens', nargs='+', type=local_path, metavar='FILE', help='shards on disk')
    args = parser.parse_args()
    files = args.tokens
    if args.download:
        from huggingface_hub import hf_hub_download
        shard_names = [*(f'fineweb_train_{i:06d}.bin' for i in range(1, args.download + 1)), 'fineweb_val_000000.bin']
        files = [Path(hf_hub_download(REPOSITORY, name, repo_type='dataset')) for name in shard_names]
    files = distinct(files[::-1])[::-1]  # keeps the last one for val.bin if *.bin has named it, too
    names, revision = local_files(files)
    for path in files:
        *kind, tokens = np.fromfile(path, '<i4', 3).tolist()
        if kind != [MAGIC, VERSION] or path.stat().st_size != 4 * HEADER + 2 * tokens:
            raise SystemExit(f'{path}: not a complete shard of GPT-2 tokens ({kind}; {tokens:,} tokens)')
    source = f'{REPOSITORY} {names}' if args.download else names
    corpus = Corpus(source, revision, f'val: {files[-1].name}', lambda: batches(files))
    write_bins(corpus, GPT2(), args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
