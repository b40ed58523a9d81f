"""Trains a run of this study: train.py with more optimizers of matrices. The setting gamma is AdamW's share of the
learning rate: its factor for the embeddings, norms and biases, which these optimizers leave to AdamW.

  python records/board/run.py config/study.py --optimizer_name=shampoo --key=value …

It deletes the checkpoints of a finished run.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from optimizers import OPTIMIZERS, Row, library_class, matrices_and_rest
from records.sharpening.run import main
from runtime.optim import CombinedOptimizer


class Shampoo(torch.optim.Optimizer):
    """Shampoo (Gupta et al., 2018) with running means and AdamW's step size (grafting): θ ← θ − lr·λ·θ − lr·s·U with
    U = L^(−1/4) m R^(−1/4), one-sided: L^(−1/2) m for the shorter side, and s such that s·U is as long as AdamW's step.
    """

    def __init__(self, params, lr, weight_decay, betas=(0.9, 0.95), eps=1e-8, every=10, one_sided=False):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, every=every,
                                      one_sided=one_sided))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                update = self.direction(group, p.grad, self.state[p])
                p.mul_(1 - group['lr'] * group['weight_decay']).sub_(group['lr'] * update)

    def direction(self, group, g, state):
        """Return s·U for the gradient g, a matrix, and update its `state`."""
        (beta1, beta2), tall = group['betas'], g.size(0) > g.size(1)
        sides = {'left': g @ g.T, 'right': g.T @ g}
        if group['one_sided']:
            del sides['left' if tall else 'right']
        if not state:
            state.update(step=torch.zeros(()), m=torch.zeros_like(g), v=torch.zeros_like(g))
            state.update((side, torch.zeros_like(gg)) for side, gg in sides.items())
        state['step'] += 1
        t = int(state['step'])
        m, v = state['m'].lerp_(g, 1 - beta1), state['v'].lerp_(g * g, 1 - beta2)
        for side, gg in sides.items():
            state[side].lerp_(gg, 1 - beta2)
            if t % group['every'] == 1:
                state[f'{side}_root'] = root(state[side] / (1 - beta2 ** t), -0.5 / len(sides))
        update = m
        if 'left' in sides:
            update = state['left_root'] @ update
        if 'right' in sides:
            update = update @ state['right_root']
        adam = m / (1 - beta1 ** t) / ((v / (1 - beta2 ** t)).sqrt() + group['eps'])
        return update * (adam.norm() / update.norm().clamp(min=1e-30))


def root(matrix, power):
    """Return a power of a positive semidefinite matrix, eigenvalues below 1e-6 of the largest raised to that."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-6 * values[-1].item()).pow(power) @ vectors.T


def orthogonalize_in_float32():
    """Let Muon's and NorMuon's Newton-Schulz iterations be in float32. On a CPU without instructions for bfloat16, in
    which the libraries make them, they take eight times as long as the rest of a step."""
    from pytorch_optimizer.optimizer.muon import base, normuon
    iterate = partial(base.zero_power_via_newton_schulz_5, dtype=torch.float32)
    base.zero_power_via_newton_schulz_5 = normuon.zero_power_via_newton_schulz_5 = iterate
    torch.optim._muon._zeropower_via_newtonschulz = lambda g, coefficients, steps, eps: iterate(
        g, steps, eps, weights=coefficients)


# Optimizer of the blocks' matrices → how it is built: a library's defaults, with updates as large as AdamW's.
MATRICES = {
    'muon': partial(library_class('torch:Muon'), momentum=0.95, adjust_lr_fn='match_rms_adamw'),
    'normuon': partial(library_class('pytorch_optimizer:NorMuon'), update_scale='match_rms'),
    'soap': library_class('pytorch_optimizer:SOAP'),
    'shampoo': Shampoo,
    'shampoo_one_sided': partial(Shampoo, one_sided=True),
}


def build(groups, s):
    """Build the optimizer of the matrices in the blocks, and AdamW for the others."""
    matrices, rest = matrices_and_rest(groups)
    settings = dict(lr=s.learning_rate, weight_decay=s.weight_decay)
    matrices = [group | dict(use_muon=True) if s.optimizer_name == 'normuon' else group for group in matrices]
    rest = [group | dict(lr_scale=s.gamma) for group in rest]
    return CombinedOptimizer(MATRICES[s.optimizer_name](matrices, **settings),
                             AdamW(rest, **settings, betas=(0.9, s.beta2), fused=True))


OPTIMIZERS.update({name: Row(build, dict(beta2=0.95, gamma=1.0, weight_decay=0.1), 1e-2, 'our table')
                   for name in MATRICES})

if __name__ == '__main__':
    orthogonalize_in_float32()
    main(sys.argv[1:])
