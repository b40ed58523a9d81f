"""FineWeb's sample of 10 billion tokens, already in GPT-2's tokens: the shards that the GPT-2 speedruns train on.

Downloads 103 training shards and one for validation, 100 million tokens and 200 MB each (kjj0/fineweb10B-gpt2 on the
Hub; kept in its cache, HF_HOME); --num_files takes only the first ones. Or reads shards from --data_files. The ids stay
as published, where the end-of-text id precedes each document instead of following it, so losses compare with the
speedruns' losses.

A shard is a header of 256 little-endian int32, of which the first three are 20240520, 1 and the number of tokens, and
then the tokens as uint16.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, at_least_one, existing, local_files
from data.tokenizer import GPT2
from data.writer import Batches, Corpus, write_bins
from runtime.files import first_line

REPOSITORY, REVISION = 'kjj0/fineweb10B-gpt2', '889765ea1f903759787add96995d81171b632d0c'
FILES = [f'fineweb_train_{i:06d}.bin' for i in range(1, 104)]
HEADER_BYTES, MAGIC, VERSION = 1024, 20240520, 1
TOKENS = 2 ** 22  # in a batch


class GPT2Ids(GPT2):
    """GPT-2's tokenizer without its vocabulary files, because nothing is encoded here."""

    def __init__(self):
        pass


class Shard:
    """The batches of one file: a path, or a name on the Hub, which is downloaded when its turn comes."""

    def __init__(self, split, file):
        self.split, self.file = split, file

    def __iter__(self):
        path = self.file if isinstance(self.file, Path) else download(self.file)
        for start in range(0, (n := num_tokens(path)), TOKENS):
            yield self.split, path, start, min(TOKENS, n - start)


def num_tokens(path):
    """The number of tokens in a shard; SystemExit when the file is not a shard."""
    try:
        header = np.fromfile(path, '<i4', HEADER_BYTES // 4)
    except OSError as error:
        raise SystemExit(f'{path}: cannot be read ({error.strerror})') from None
    if len(header) < HEADER_BYTES // 4 or header[0] != MAGIC or header[1] != VERSION:
        raise SystemExit(f'{path}: not a shard of GPT-2 tokens (its header does not begin with {MAGIC}, {VERSION})')
    n, size = int(header[2]), path.stat().st_size
    if size != HEADER_BYTES + 2 * n:
        raise SystemExit(f'{path}: {size} bytes, but its header says {n} tokens, which makes {HEADER_BYTES + 2 * n}; '
                         'download it again')
    return n


def read_tokens(batch):
    """Worker: {split: (ids, documents)} of a batch of a Shard."""
    split, path, start, count = batch
    ids = np.fromfile(path, '<u2', count, offset=HEADER_BYTES + 2 * start)
    if (top := int(ids.max())) >= GPT2.vocab_size:
        raise SystemExit(f'{path}: token id {top} is beyond the vocabulary of GPT-2')
    return {split: (ids, int((ids == GPT2.eot_id).sum()))}


def download(name):
    """The path of a file of the repository on the Hub. OSError when it is unavailable."""
    try:
        from huggingface_hub import hf_hub_download
        return Path(hf_hub_download(REPOSITORY, name, repo_type='dataset', revision=REVISION))
    except ImportError:
        raise SystemExit('this corpus needs the package huggingface_hub: pip install huggingface_hub') from None
    except Exception as error:  # errors of the network, the Hub and the file system have no common class
        raise OSError(f'{REPOSITORY}/{name}: {type(error).__name__}: {first_line(error)} (--data_files FILE... reads '
                      'local copies)') from None


def main():
    parser = argument_parser(__doc__, __file__, data_files='.bin')
    parser.add_argument('--val_files', nargs='+', type=existing, metavar='FILE', help='the val split of --data_files')
    parser.add_argument('--num_files', type=at_least_one, default=103, help='training shards to take (default: all)')
    args = parser.parse_args()
    if bool(args.data_files) != bool(args.val_files):
        parser.error('--data_files and --val_files go together')
    files, source, revision = (FILES[:args.num_files], ['fineweb_val_000000.bin']), REPOSITORY, REVISION
    if args.data_files:
        files = args.data_files, args.val_files
        for path in [*args.data_files, *args.val_files]:
            num_tokens(path)
        source, revision = local_files(*files)
    shards = [Shard(split, file) for split, of in zip(('train', 'val'), files) for file in of]
    corpus = Corpus(source, revision, split=f'{len(files[0])} files for train, {len(files[1])} for val',
                    open=lambda: Batches(shards, read_tokens))
    write_bins(corpus, GPT2Ids(), args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
