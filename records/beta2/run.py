"""Trains a run of this study: train.py with the optimizers of records/board, and one β2 for all parts of SOAP.

  python records/beta2/run.py config/study.py --optimizer_name=soap --beta2=0.998 --key=value …

It deletes the checkpoints of a finished run.
"""

import sys
from functools import partial
from pathlib import Path

from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dataclasses import replace

from optimizers import OPTIMIZERS, matrices_and_rest
from records.board.run import MATRICES, orthogonalize_in_float32
from records.sharpening.run import main
from runtime.optim import CombinedOptimizer


def soap(groups, s):
    """Build SOAP for the matrices in the blocks and AdamW for the others, both with β2 = s.beta2."""
    matrices, rest = matrices_and_rest(groups)
    settings = dict(lr=s.learning_rate, weight_decay=s.weight_decay)
    build = partial(MATRICES['soap'], betas=(0.95, s.beta2))
    return CombinedOptimizer(build(matrices, **settings), AdamW(rest, **settings, betas=(0.9, s.beta2), fused=True))


OPTIMIZERS['soap'] = replace(OPTIMIZERS['soap'], build=soap)

if __name__ == '__main__':
    orthogonalize_in_float32()
    main(sys.argv[1:])
