"""Sophia-G in a LightningModule with automatic optimization. Needs lightning.

    python examples/lightning_module.py

The estimate is made in `on_before_optimizer_step`, which Lightning calls between the backward and the update, once per
step even with gradient accumulation. `backward` keeps the graph for it. Lightning's checkpoints hold h, but no random
state: a resumed run samples other labels.
"""

import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett


class Classifier(lightning.LightningModule):
    """A multilayer perceptron with the cross-entropy loss, trained by Sophia-G."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        self.losses = []

    def configure_optimizers(self):
        # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps. γ was chosen
        # to leave 0.1 to 0.5 of the coordinates unclipped.
        groups = [dict(params=[p for p in self.parameters() if p.dim() > 1]),
                  dict(params=[p for p in self.parameters() if p.dim() < 2], weight_decay=0.0)]  # norms and biases
        return Sophia(groups, lr=5e-3, betas=(0.96, 0.9), gamma=0.5, weight_decay=0.1)

    def hessian_due(self):
        return self.global_step % 10 == 0  # k = 10

    def on_train_start(self):
        torch.manual_seed(1 + self.global_rank)  # ranks sample different labels

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        self.logits = self.model(inputs)
        loss = F.cross_entropy(self.logits, labels)
        self.losses.append(loss.detach())
        return loss

    def backward(self, loss):
        loss.backward(retain_graph=self.hessian_due())

    def on_before_optimizer_step(self, optimizer):
        if self.hessian_due():
            optimizer.update_hessian(gauss_newton_bartlett(self.logits, optimizer))
        self.logits = None  # a module with a graph cannot be copied, for example to average weights


def main(steps=60):
    torch.manual_seed(0)
    x = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(x, (x @ torch.randn(16, 8)).argmax(1)), batch_size=64, shuffle=True)
    module = Classifier()
    trainer = lightning.Trainer(max_steps=steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader)
    print(f'loss {module.losses[0]:.4f}, after {trainer.global_step} steps {module.losses[-1]:.4f}; '
          f'{trainer.optimizers[0].unclipped_fraction().item():.0%} not clipped')
    return module.losses


if __name__ == '__main__':
    main()
