"""Trains a run of this study: train.py with more optimizers. The setting gamma is the number that an arm tunes.

  python records/rare_tokens/run.py config/study.py --optimizer_name=rms --key=value …

It deletes the checkpoints of a finished run. COMMIT in the environment names the commit of a copy without git.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from hessian import EmpiricalFisherHook, GNBHook
from optimizers import OPTIMIZERS, SOPHIA_G, SOPHIA_G_LR, AdaHessian, Row, SophiaTensorMean, betas, signum
from optimizers import sophia as build_sophia
from records.sharpening.run import main, row
from sophia import Sophia

PREDICTIONS = 4 * 128  # in an estimate


def scaled(groups, s):
    """Build sign momentum whose learning rate for the embeddings is γ times the others'."""
    return signum([group | dict(lr_scale=s.gamma) if group.get('role') == 'embedding' else group
                          for group in groups], s)


class Rms(Sophia):
    """clip(m / (γ·rms m), 1), the root mean square of each tensor of the embeddings, or of all: no Hessian."""

    def __init__(self, *args, everywhere, **settings):
        super().__init__(*args, **settings)
        self.everywhere = everywhere

    def update(self, group, params, grads):
        for p, m, g in zip(params, self.buffers(params, 'exp_avg'), grads):
            if self.everywhere or group.get('role') == 'embedding':
                rms = m.lerp(g, 1 - group['betas'][0]).square().mean().sqrt()
                self.state[p]['hessian'] = rms.expand_as(p).clone()
        super().update(group, params, grads)


class MeanOf(SophiaTensorMean):
    """The mean of h over each tensor, of the embeddings or of the matrices in the blocks; sign momentum elsewhere."""

    def __init__(self, *args, role, **settings):
        super().__init__(*args, **settings)
        self.role = role

    def update_ema(self, group, params, targets):
        if params[0].dim() > 1 and group.get('role') == self.role:
            super().update_ema(group, params, targets)


class SampledAdam(AdaHessian):
    """AdamW whose second moment is of gradients on sampled labels: m̂ / (√(ĥ/B) + ε), without a clip."""

    def averaged(self, h_hat):
        return h_hat / PREDICTIONS


def sampled_adam(groups, s):
    return SampledAdam(groups, s.learning_rate, betas(s), s.eps, s.weight_decay, nonfinite='ignore')


WITHOUT_H = {key: SOPHIA_G[key] for key in ('beta1', 'beta2', 'gamma', 'eps', 'weight_decay')}
OPTIMIZERS.update(
    sign_scaled=Row(scaled, WITHOUT_H, SOPHIA_G_LR, 'Table 3, sophiag'),
    rms=Row(partial(build_sophia, cls=partial(Rms, everywhere=True)), WITHOUT_H, SOPHIA_G_LR, 'Table 3, sophiag'),
    rms_embedding=Row(partial(build_sophia, cls=partial(Rms, everywhere=False)), WITHOUT_H, SOPHIA_G_LR,
                      'Table 3, sophiag'),
    mean_embedding=row(partial(MeanOf, role='embedding')),
    mean_matrices=row(partial(MeanOf, role='hidden')),
    sampled_adam=Row(sampled_adam, SOPHIA_G | dict(eps=1e-8, weight_decay=0.1), SOPHIA_G_LR, 'Table 3, sophiag',
                     GNBHook),
    data_mean=row(SophiaTensorMean, EmpiricalFisherHook),
    data_adam=Row(sampled_adam, SOPHIA_G | dict(eps=1e-8, weight_decay=0.1), SOPHIA_G_LR, 'Table 3, sophiag',
                  EmpiricalFisherHook))

if __name__ == '__main__':
    main(sys.argv[1:])
