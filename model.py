"""GPT-2: its config, the table of sizes, the model. Needs PyTorch and loss.py only.
Edit the architecture here, or put another model.py with nanoGPT's `GPT` and `GPTConfig` in its place.

The architecture is GPT-2's (learned positions, pre-norm blocks, GELU, tied head) in the paper's setting: no bias, no
dropout, optional scaling of attention logits by the inverse layer index. Module names are nanoGPT's, and so is
`forward(idx, targets=None)` → (logits, loss).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from loss import mean_loss

INIT_STD = 0.02  # standard deviation of the initial weights


@dataclass
class GPTConfig:
    """Shape of a GPT. `vocab_size` includes padding."""
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False
    scale_attn_by_inverse_layer_idx: bool = False
    gelu_approximate: str = 'none'  # 'tanh' for the weights that OpenAI published


# Depth, heads, width: Table 2 of the paper. 'tiny' is ours, for a laptop or two CPU cores.
SIZES = {
    'tiny': dict(n_layer=4, n_head=4, n_embd=128),
    '30M': dict(n_layer=6, n_head=6, n_embd=384),
    '125M': dict(n_layer=12, n_head=12, n_embd=768),
    '355M': dict(n_layer=24, n_head=16, n_embd=1024),
    '540M': dict(n_layer=30, n_head=18, n_embd=1152),
    '770M': dict(n_layer=36, n_head=20, n_embd=1280),
    '1.5B': dict(n_layer=48, n_head=24, n_embd=1536),
    '6.6B': dict(n_layer=32, n_head=32, n_embd=4096),
}


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention, (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x, divisor=None):
        """Apply causal attention. `divisor`: integer 0-d tensor that divides the attention logits."""
        B, T, C = x.shape
        n_head = self.config.n_head
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        if divisor is not None:
            q = q / divisor
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                           dropout_p=self.config.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.config.dropout, self.training)


class MLP(nn.Module):
    """Position-wise GELU network of width 4 n_embd."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x):
        x = self.c_proj(F.gelu(self.c_fc(x), approximate=self.config.gelu_approximate))
        return F.dropout(x, self.config.dropout, self.training)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, divisor=None):
        x = x + self.attn(self.ln_1(x), divisor)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 language model."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._init_weights)  # overwrites the submodules' own initial weights, except frozen ones
        # GPT-2's depth scaling: each block adds to the residual stream twice.
        for name, p in self.named_parameters():
            if name.endswith('c_proj.weight') and p.requires_grad:
                nn.init.normal_(p, mean=0.0, std=INIT_STD / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.requires_grad:
            nn.init.normal_(module.weight, mean=0.0, std=INIT_STD)
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """Return (logits, loss), as in nanoGPT: (B, T, vocab_size), and the mean over the positions that count or None.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) token ids, negative where a position does not count. To mask more positions, set them to -1
                in place, because label sampling reads `targets` afterwards.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size = {self.config.block_size}')
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        x = F.dropout(x, self.config.dropout, self.training)
        divisors = [None] * self.config.n_layer
        if self.config.scale_attn_by_inverse_layer_idx:
            # Use a tensor, because Python numbers would recompile the blocks. It is exact in bfloat16.
            divisors = torch.arange(1, self.config.n_layer + 1, device=idx.device)
        for block, divisor in zip(self.transformer.h, divisors):
            x = block(x, divisor)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, mean_loss(logits, targets)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue each row of `idx` (B, T) by `max_new_tokens` sampled ids, as in nanoGPT."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1] / temperature
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], 1)
        return idx

    @classmethod
    def from_pretrained(cls, name, block_size=None, dropout=0.0):
        """Load GPT-2 weights from Hugging Face, see runtime/huggingface.py."""
        from runtime.huggingface import load_gpt2
        return load_gpt2(cls, GPTConfig, name, block_size, dropout)
