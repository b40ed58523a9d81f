"""Trials of this study, from runs.jsonl in this directory.

  python records/study/results.py trials --output records/study/trials.csv
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from records.studies import show_results

if __name__ == '__main__':
    show_results(__doc__, HERE)
