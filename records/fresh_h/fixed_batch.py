"""Trains on one fixed mini-batch: every iteration has the sequences of iteration 0. For part B of study.py.

  python records/fresh_h/fixed_batch.py config/study.py --key=value …
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train


class FixedLoader(train.TrainLoader):
    """The loader of training, at iteration 0 for ever."""

    def _load(self, iteration):
        return super()._load(0)


train.TrainLoader = FixedLoader
train.main(sys.argv[1:])
