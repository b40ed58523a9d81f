"""FineWeb-Edu, the sample of 10 billion tokens (sample-10BT), in GPT-2's tokens; or FineWeb, already tokenized.

FineWeb-Edu: downloads about 28 GB of parquet (HuggingFaceFW/fineweb-edu on the Hub), whose text `datasets` unpacks in
its cache (HF_HOME); the bins are 20 GB. 9,672,101 documents, split like OpenWebText.

FineWeb: --download N takes the first N shards, of 103, with 100 million tokens each, and the validation shard of
kjj0/fineweb10B-gpt2, 0.2 GB each. --tokens takes such files from disk, the last one for val.bin: the shards of GPT-2's
tokens that llm.c and modded-nanogpt use. No tokenizer is loaded. In shards, the end-of-text id comes before each
document.
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


def download(n):
    """Download the first n training shards and the validation shard of SHARDS to HF_HOME and return their paths."""
    names = [*(f'fineweb_train_{i:06d}.bin' for i in range(1, n + 1)), 'fineweb_val_000000.bin']
    try:
        from huggingface_hub import hf_hub_download
        return [Path(hf_hub_download(SHARDS, name, repo_type='dataset')) for name in names]
    except (Exception, KeyboardInterrupt) as error:  # import, network, Hub and file system have no common class
        raise SystemExit(f'{SHARDS}: cannot be downloaded ({first_line(error)}); the same command resumes, and '
                         '--tokens FILE... takes local copies') from None


def main():
    parser = argument_parser(__doc__, __file__, tokenizer='gpt2', data_files=True)
    parser.add_argument('--tokens', nargs='+', type=Path, metavar='FILE', help='shards of tokens instead of text')
    parser.add_argument('--download', type=at_least_one, metavar='N', help=f'take the first N shards of {SHARDS}')
    args = parser.parse_args()
    if bool(args.data_files) + bool(args.tokens) + bool(args.download) > 1:
        parser.error('--data_files, --tokens and --download: pass only one')
    if args.tokens or args.download:
        if args.tokenizer != GPT2Tokens.name:
            parser.error(f'--tokenizer={args.tokenizer}: the shards have GPT-2\'s tokens; leave it out')
        corpus = shards_corpus(args.tokens or download(args.download), SHARDS if args.download else '')
        write_bins(corpus, GPT2Tokens(), args.out_dir, args.num_proc, args.overwrite)
    else:
        prepare_split_table(args, REPOSITORY, REVISION, FILES)


if __name__ == '__main__':
    main()
