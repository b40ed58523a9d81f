"""OpenWebText, the open reproduction of GPT-2's WebText, in GPT-2's tokens: the corpus of the paper's GPT-2 runs.

Downloads about 24 GB of parquet (Skylion007/openwebtext on the Hub), which `datasets` unpacks to about 40 GB in its
cache (HF_HOME); the bins are 18 GB. The split is nanoGPT's, in documents and order. For comparison, nanoGPT reports
8,013,769 documents, 9,035,582,198 tokens in train.bin and 4,434,897 in val.bin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import argument_parser, prepare_split_table

REPOSITORY, REVISION = 'Skylion007/openwebtext', '79d93d786212f7344586290adb811d4ae6a1762c'
FILES = [f'plain_text/train-{i:05d}-of-00080.parquet' for i in range(80)]


def main():
    args = argument_parser(__doc__, __file__, tokenizer='gpt2', data_files=True).parse_args()
    prepare_split_table(args, REPOSITORY, REVISION, FILES)


if __name__ == '__main__':
    main()
