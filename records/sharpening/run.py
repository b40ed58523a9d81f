"""Trains a run of this study: train.py with more optimizers, and a low-noise curvature measured at the end.

  python records/sharpening/run.py config/study.py --optimizer_name=gnb_rows --key=value …

It deletes the checkpoints of a finished run. COMMIT in the environment names the commit of a copy without git.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from data.loader import TrainLoader, open_dataset
from hessian import ClippedGNBHook, GNBHook
from optimizers import OPTIMIZERS, SOPHIA_G, SOPHIA_G_LR, Row, kind_of, sophia
from runtime import checkpoint, runlog
from scripts import curvature
from sophia import Sophia

SEQUENCES = 512  # of the low-noise curvature, as in scripts/curvature.py


class Root(Sophia):
    """p = ½: h ← √(h · mean of h over the tensor), so that γ keeps its meaning."""

    def curvature(self, hs):
        return [(h * h.mean()).sqrt_() for h in hs]


class Proportional(Sophia):
    """γ in proportion to the learning rate: θ ← θ − clip(m / (c·h), lr), c = γ / peak learning rate."""

    def __init__(self, *args, compile, **settings):  # not compiled, because that would be done again for each γ
        super().__init__(*args, **settings)

    def update(self, group, params, grads):
        group['gamma'] = self.defaults['gamma'] * group['lr'] / self.defaults['lr']
        super().update(group, params, grads)


class Measured(Sophia):
    """Sign momentum: h is estimated and logged, and not used."""

    def curvature(self, hs):
        return [torch.zeros_like(h) for h in hs]


def row(cls=Sophia, hook=GNBHook):
    """Return the row of an optimizer that differs from Sophia-G's in its class or its hook."""
    return Row(partial(sophia, cls=cls), SOPHIA_G, SOPHIA_G_LR, 'Table 3, sophiag', hook)


OPTIMIZERS.update(gnb_root=row(Root), gnb_proportional=row(Proportional), gnb_measured=row(Measured),
                  gnb_clipped=row(hook=ClippedGNBHook))


def measured(run):
    """Return the low-noise curvature at the weights of a `train.Run`, as metrics: the norms of the diagonal, in all and
    by kind of tensor, the relative distance of its halves, and the curvature along the signs of m."""
    model, c = run.raw_model, run.config
    loader = TrainLoader(open_dataset(c.dataset, c.block_size)[0], curvature.SEED, SEQUENCES, c.block_size, 0, 1,
                         run.world.device)
    sequences = next(loader)
    loader.close()
    torch.manual_seed(curvature.SEED)
    names, params = curvature.trained(model)
    one, two = curvature.Gradients(model, params, sequences).halves
    found = {'curvature/all': (one + two).norm(), 'curvature/halves': (one - two).norm() / (one + two).norm()}
    parts = (one + two).split([p.numel() for p in params])
    kinds = [kind_of(name, p) for name, p in zip(names, params)]
    found |= {f'curvature/{kind}': torch.cat([part for part, other in zip(parts, kinds) if other == kind]).norm()
              for kind in sorted(set(kinds))}
    sign = curvature.flat(run.optimizer.state[p]['exp_avg'] for p in params).sign()
    return {key: value.item() for key, value in found.items()} | {
        'curvature/sign': curvature.curvature_along(model, sequences[:32], sign)}


def evaluate_and_save(run, wrapped=train.evaluate_and_save):
    """Log the low-noise curvature before the last validation loss, with which a run is finished."""
    if run.state.iter == run.config.max_iters:
        run.log.record(run.state, 'measuring the curvature', measured(run))
    wrapped(run)


def main(argv):
    """Train as `argv` says; delete the checkpoints of a finished run."""
    if commit := os.environ.get('COMMIT'):
        runlog.git_commit = lambda: commit
    config = train.resolve(argv)
    train.train(config)
    ends = checkpoint.checkpoints(config.out_dir)
    if ends and checkpoint.number(ends[0]) == config.max_iters:
        for path in ends:
            path.unlink()


if __name__ == '__main__':
    train.evaluate_and_save = evaluate_and_save
    main(sys.argv[1:])
