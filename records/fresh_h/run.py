"""Trains a run of this study: train.py, with matrix products whose factors are rounded to bfloat16.

  python records/fresh_h/run.py config/study.py --key=value …
  python records/fresh_h/run.py --fixed_batch config/study.py --key=value …       every step on the batch of iteration 0

All else is float32. On a CPU with AMX a product takes a third of the time, a step a half.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from runtime import device

aten = torch.ops.aten


class Attention(torch.autograd.Function):
    """Causal attention in float32: its small products are slower in bfloat16."""

    @staticmethod
    def forward(ctx, q, k, v):
        torch.set_float32_matmul_precision('highest')
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        torch.set_float32_matmul_precision('medium')
        ctx.save_for_backward(q, k, v, *out)
        return out[0]

    @staticmethod
    def backward(ctx, gradient):
        torch.set_float32_matmul_precision('highest')
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, *ctx.saved_tensors, 0.0, True)
        torch.set_float32_matmul_precision('medium')
        return gradients


class FixedLoader(train.TrainLoader):
    """The loader of training, at iteration 0 for ever."""

    def _load(self, iteration):
        return super()._load(0)


if __name__ == '__main__':
    if not torch.cpu._is_amx_tile_supported():
        raise SystemExit("this CPU has no AMX, so its products would not be rounded as the other runs' are")
    words = sys.argv[1:]
    if '--fixed_batch' in words:
        words.remove('--fixed_batch')
        train.TrainLoader = FixedLoader
    F.scaled_dot_product_attention = lambda q, k, v, is_causal, dropout_p: Attention.apply(q, k, v)
    device.set_matmul_precision = lambda dtype_name: torch.set_float32_matmul_precision('medium')
    train.main(words)
