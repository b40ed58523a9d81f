"""FineWeb-Edu, the sample of 10 billion tokens (sample-10BT), in GPT-2's tokens; or FineWeb, already tokenized.

FineWeb-Edu: downloads about 28 GB of parquet (HuggingFaceFW/fineweb-edu on the Hub), whose text `datasets` unpacks in
its cache (HF_HOME); the bins are 20 GB. 9,672,101 documents, split like OpenWebText.

FineWeb: --download N takes the first N shards, of 103, with 100 million tokens each, and the validation shard of
kjj0/fineweb10B-gpt2, 0.2 GB each. --tokens takes such files from disk: the shards of GPT-2's tokens that llm.c and
modded-nanogpt use. No tokenizer is loaded. In shards, the end-of-text id comes before each document.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, at_least_one, prepare_split_table, shards_corpus
from data.tokenizer import GPT2Tokens
from data.writer import write_bins
from runtime.files import first_line

REPOSITORY, REVISION = 'HuggingFaceFW/fineweb-edu', '87f09149ef4734204d70ed1d046ddc9ca3f2b8f9'
FILES = [f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)]
SHARDS = 'kjj0/fineweb10B-gpt2'
TRAIN_SHARDS, VAL_SHARD = [f'fineweb_train_{i:06d}.bin' for i in range(1, 104)], 'fineweb_val_000000.bin'


def download(names):
    """Download files of SHARDS and return their paths in the Hub's cache (HF_HOME)."""
    paths = []
    try:
        from huggingface_hub import hf_hub_download
        for name in names:
            paths.append(Path(hf_hub_download(SHARDS, name, repo_type='dataset')))
    except (Exception, KeyboardInterrupt) as error:  # import, network, Hub and file system have no common class
        raise SystemExit(f'{SHARDS}: {names[len(paths)]} cannot be downloaded ({first_line(error)}); the same command '
                         'resumes, and --tokens FILE... takes local copies') from None
    return paths


def main():
    parser = argument_parser(__doc__, __file__, tokenizer='gpt2', data_files=True)
    parser.add_argument('--tokens', nargs='+', type=Path, metavar='FILE',
                        help='shards of tokens instead of text; the last one is for val.bin')
    parser.add_argument('--val_file', type=Path, metavar='FILE', help='the shard for val.bin')
    parser.add_argument('--download', type=at_least_one, metavar='N', help=f'take the first N shards of {SHARDS}')
    args = parser.parse_args()
    if bool(args.data_files) + bool(args.tokens) + bool(args.download) > 1:
        parser.error('--data_files, --tokens and --download: pass only one')
    if args.val_file and not args.tokens:
        parser.error(f'--val_file={args.val_file}: needs --tokens')
    if args.tokens or args.download:
        prepare_shards(parser, args)
    else:
        prepare_split_table(args, REPOSITORY, REVISION, FILES)


def prepare_shards(parser, args):
    """Write the bins of the shards of --tokens or --download."""
    if args.tokenizer != GPT2Tokens.name:
        parser.error(f'--tokenizer={args.tokenizer}: the shards have GPT-2\'s tokens; leave it out')
    if args.download:
        if args.download > len(TRAIN_SHARDS):
            parser.error(f'--download={args.download}: there are {len(TRAIN_SHARDS)} shards')
        files = download([*TRAIN_SHARDS[:args.download], VAL_SHARD])
    else:
        files = [path for path in args.tokens if path != args.val_file] + [args.val_file] * bool(args.val_file)
    *train, val = files
    if not train:
        parser.error('--tokens: needs one more shard, for train.bin')
    corpus = shards_corpus(train, [val], SHARDS if args.download else '')
    write_bins(corpus, GPT2Tokens(), args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
