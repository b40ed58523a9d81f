"""GPT-2: configuration, the table of sizes, the model, its loss, parameter groups and FLOPs.

The architecture is GPT-2's (learned positions, pre-norm blocks, GELU, tied head) in the paper's setting: no bias, no
dropout, vocabulary padded to a multiple of 64, optional scaling of attention logits by the inverse layer index.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

# Depth, heads, width: Table 3 of the paper. 'tiny' is ours, for a laptop or two CPU cores.
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


def padded_vocab_size(vocab_size):
    """`vocab_size` rounded up to a multiple of 64 (GPT-2's 50,257 → 50,304): aligned matrices are faster."""
    return math.ceil(vocab_size / 64) * 64


@dataclass
class GPTConfig:
    """Shape of a GPT. `vocab_size` is the padded one."""
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False
    scale_attn_by_inverse_layer_idx: bool = False


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention, (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.scale = (config.n_embd // config.n_head) ** -0.5
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Position-wise GELU network of width 4 n_embd."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x):
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 language model with nanoGPT's module names."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f'n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}')
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._init_weights)
        # GPT-2's depth scaling: each block adds to the residual stream twice.
        for name, p in self.named_parameters():
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None, labels_hat=None, return_logits=True):
        """Logits and mean cross-entropy, as in nanoGPT; optionally the loss on a second set of labels.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) token ids, -1 where a position does not count.
            labels_hat: (B, T), for the Gauss-Newton-Bartlett estimator: either labels (int64, -1 = not counted), or
                uniform numbers in [0, 1) (float32, negative = not counted) with which ŷ ~ softmax(logits) is drawn.
                One forward then serves two backward passes.
            return_logits: False in training, where keeping (B, T, vocab_size) alive costs memory.

        Returns:
            (logits, loss), each None where not asked for; with `labels_hat`, (logits, loss, loss_hat) where
            loss_hat is the cross-entropy *summed* over the labels that count.
        """
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size = {self.config.block_size}')
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[:T]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else cross_entropy(logits, targets, 'mean')
        kept = logits if return_logits else None
        if labels_hat is None:
            return kept, loss
        if labels_hat.is_floating_point():
            labels_hat = torch.where(labels_hat < 0, -1, sample_labels(logits.detach(), labels_hat))
        return kept, loss, cross_entropy(logits, labels_hat, 'sum')

    def parameter_groups(self, weight_decay):
        """Two param groups for an optimizer: weight decay on matrices (2-D and up), none on norms and biases."""
        params = [p for p in self.parameters() if p.requires_grad]
        return [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]

    def num_params(self, non_embedding=False):
        """Number of parameters, the tied head counted once; `non_embedding` leaves out the position embeddings."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops_per_token(self, T=None):
        """FLOPs to train on one token (forward + backward) at context length T, default block_size.

        Counts every matrix product: 6 per weight that multiplies (blocks and head; not the embedding look-ups) and
        12·n_layer·n_embd·T for QKᵀ and AV, the causal half counted in full: the convention of Chowdhery et al.
        (2022), which the paper's Table 2 follows.
        """
        c = self.config
        weights = 12 * c.n_layer * c.n_embd ** 2 + c.n_embd * c.vocab_size
        return 6 * weights + 12 * c.n_layer * c.n_embd * (T or c.block_size)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continues each row of `idx` (B, T) by `max_new_tokens` sampled ids; returns (B, T + max_new_tokens)."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1, :].float() / temperature
            if top_k is not None:
                kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -torch.inf)
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx


def cross_entropy(logits, labels, reduction):
    """Cross-entropy of (B, T, V) logits with (B, T) labels; label -1 does not count."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-1, reduction=reduction)


def sample_labels(logits, uniforms):
    """ŷ ~ softmax(logits) by inverting the cumulative distribution: (…, V) logits, (…) uniforms in [0, 1) → (…) int64.

    One uniform number per label, so that the caller decides what the labels depend on. Two levels (blocks of 128
    classes, then the class within its block) keep the cumulative sums short and accurate.
    """
    V = logits.size(-1)
    p = F.pad(logits.float().softmax(-1), (0, -V % 128)).unflatten(-1, (-1, 128))
    in_block = p.sum(-1)
    up_to_block = in_block.cumsum(-1)
    t = uniforms.unsqueeze(-1) * up_to_block[..., -1:]
    block = _first_above(up_to_block, t)
    t = t - (up_to_block - in_block).gather(-1, block)
    p = p.gather(-2, block.unsqueeze(-1).expand(*block.shape, 128)).squeeze(-2)
    return (block * 128 + _first_above(p.cumsum(-1), t)).squeeze(-1)


def _first_above(cumulative, t):
    # Held below the total, so that rounding never selects a class of probability 0 past the end.
    t = torch.minimum(t, cumulative[..., -1:] * (1 - 2 ** -22))
    return (cumulative <= t).sum(-1, keepdim=True)
