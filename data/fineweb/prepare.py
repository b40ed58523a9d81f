"""FineWeb, already in GPT-2's tokens: shards of them in the format of llm.c and modded-nanogpt. No tokenizer is loaded.

--download N takes the first N training shards, of 103, with 100 million tokens each, and the validation shard of
kjj0/fineweb10B-gpt2, 0.2 GB each. --tokens takes such files from disk, the last one for val.bin.
The end-of-text id comes before each document.
"""

import sys
from itertools import repeat
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, distinct, local_files
from data.tokenizer import GPT2Tokens
from data.writer import Corpus, write_bins
from runtime.arguments import at_least
from runtime.files import local_path, one_line_errors

REPOSITORY, SHARDS = 'kjj0/fineweb10B-gpt2', 103
HEADER = 256  # int32s: magic number, version, number of tokens, zeros
MAGIC, VERSION = 20240520, 1
PIECE = 2 ** 24  # tokens in one batch


def download(n):
    """Download the first n training shards and the validation shard to HF_HOME and return their paths."""
    from huggingface_hub import hf_hub_download
    names = [*(f'fineweb_train_{i:06d}.bin' for i in range(1, n + 1)), 'fineweb_val_000000.bin']
    return [Path(hf_hub_download(REPOSITORY, name, repo_type='dataset')) for name in names]


def check(path):
    """Stop unless the file is a complete shard."""
    *kind, tokens = np.fromfile(path, '<i4', 3).tolist()
    if kind != [MAGIC, VERSION] or path.stat().st_size != 4 * HEADER + 2 * tokens:
        raise SystemExit(f'{path}: not a complete shard of GPT-2 tokens ({kind}; {tokens:,} tokens)')


def batches(train, val):
    """Yield the tokens of shards in batches."""
    for split, path in [*zip(repeat('train'), train), ('val', val)]:
        tokens = np.memmap(path, '<u2', 'r', offset=4 * HEADER)
        for start in range(0, len(tokens), PIECE):
            yield [(split, np.array(tokens[start:start + PIECE]))]


@one_line_errors()
def main():
    parser = argument_parser(__doc__, __file__)
    shards = parser.add_mutually_exclusive_group(required=True)
    shards.add_argument('--download', type=at_least(1, at_most=SHARDS), metavar='N',
                        help=f'the first N shards of {REPOSITORY}')
    shards.add_argument('--tokens', nargs='+', type=local_path, metavar='FILE', help='shards on disk')
    args = parser.parse_args()
    files = args.tokens or download(args.download)
    files = distinct(files[::-1])[::-1]  # the last one is for val.bin, even if *.bin has named it, too
    names, revision = local_files(files)
    for path in files:
        check(path)
    *train, val = files
    source = f'{REPOSITORY} {names}' if args.download else names
    write_bins(Corpus(source, revision, f'val: {val.name}', lambda: batches(train, val)), GPT2Tokens(), args.out_dir,
               args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
