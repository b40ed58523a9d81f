"""OpenWebText in GPT-2's tokens, the corpus of the paper's GPT-2 runs, with nanoGPT's split.

Downloads about 24 GB of parquet (Skylion007/openwebtext on the Hub), unpacked to about 40 GB in HF_HOME; the bins have
18 GB. nanoGPT reports 8,013,769 documents, 9,035,582,198 tokens in train.bin and 4,434,897 in val.bin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, network_errors
from data.writer import Corpus, write_bins
from runtime.files import one_line_errors

REPOSITORY, REVISION = 'Skylion007/openwebtext', '79d93d786212f7344586290adb811d4ae6a1762c'
FILES = [f'hf://datasets/{REPOSITORY}@{REVISION}/plain_text/train-{i:05d}-of-00080.parquet' for i in range(80)]
SPLIT = {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}  # nanoGPT's
ROWS = 4000  # documents in one batch


def split_table(files, num_proc):
    """Yield batches of parquet files, split by `datasets`' train_test_split."""
    from datasets import load_dataset
    with network_errors(REPOSITORY):
        table = load_dataset('parquet', data_files=files, columns=['text'], split='train',
                             num_proc=min(num_proc, len(files)))
    parts = table.train_test_split(**SPLIT)
    for split, part in ('train', parts['train']), ('val', parts['test']):
        for start in range(0, len(part), ROWS):
            yield [(split, text) for text in part[start:start + ROWS]['text']]


@one_line_errors()
def main():
    args = argument_parser(__doc__, __file__, tokenizer='gpt2').parse_args()
    corpus = Corpus(REPOSITORY, REVISION, f'train_test_split: {SPLIT}', lambda: split_table(FILES, args.num_proc))
    write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)


if __name__ == '__main__':
    main()
