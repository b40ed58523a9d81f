"""FineWeb-Edu, the sample of 10 billion tokens (sample-10BT), in GPT-2's tokens.

Downloads about 28 GB of parquet (HuggingFaceFW/fineweb-edu on the Hub), which `datasets` unpacks to about twice that in
its cache (HF_HOME); the bins are 20 GB. 9,672,101 documents, split like OpenWebText.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.sources import prepare_split_table, table_parser

REPOSITORY, REVISION = 'HuggingFaceFW/fineweb-edu', '87f09149ef4734204d70ed1d046ddc9ca3f2b8f9'
FILES = [f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)]


def main():
    prepare_split_table(table_parser(__doc__, __file__).parse_args(), REPOSITORY, REVISION, FILES)


if __name__ == '__main__':
    main()
