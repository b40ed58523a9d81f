"""GPT-2: its config, the table of sizes, the model, weights from Hugging Face.
Edit the architecture here, or put another model.py with nanoGPT's `GPT` and `GPTConfig` in its place.

The architecture is GPT-2's (learned positions, pre-norm blocks, GELU, tied head) in the paper's setting: no bias, no
dropout, optional scaling of attention logits by the inverse layer index. Module names are nanoGPT's, and so is
`forward(idx, targets=None)` → (logits, loss).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from loss import mean_loss
from runtime import gpt
from runtime.files import one_line

INIT_STD = 0.02  # of the initial weights


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
    gelu_approximate: str = 'none'  # 'tanh' for the weights that OpenAI published


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


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention, (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x, divisor=None):
        """Attend to the positions up to each one. `divisor`: divides the attention logits; an integer 0-d tensor."""
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
        self.apply(self._init_weights)  # replaces the weights of the submodules' constructors, but no frozen ones
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
            targets: (B, T) token ids, negative where a position does not count. To leave out more, set them to -1 in
                place: the sampling of labels reads `targets` afterwards.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size = {self.config.block_size}')
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        x = F.dropout(x, self.config.dropout, self.training)
        divisors = [None] * self.config.n_layer
        if self.config.scale_attn_by_inverse_layer_idx:
            # A tensor, because Python numbers would make several graphs of compiled blocks; exact in bfloat16.
            divisors = torch.arange(1, self.config.n_layer + 1, device=idx.device)
        for block, divisor in zip(self.transformer.h, divisors):
            x = block(x, divisor)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, mean_loss(logits, targets)

    def generate(self, idx, max_new_tokens, *args, **options):
        """Continue each row of `idx` (B, T) by up to `max_new_tokens` ids; see `gpt.generate`."""
        return gpt.generate(self, idx, max_new_tokens, *args, **options)

    @classmethod
    def from_pretrained(cls, name, block_size=None, dropout=0.0):
        """Load the GPT-2 `name`, one of gpt.HUB_MODELS or a folder with config.json and safetensors, and keep the
        first `block_size` positions, by default all."""
        theirs = load_hf(name)
        c, weights = theirs.config, theirs.state_dict()
        supported = dict(activation_function=[*gpt.ACTIVATIONS], n_inner=[None, 4 * c.n_embd],
                         layer_norm_epsilon=[1e-5], scale_attn_weights=[True], add_cross_attention=[False])
        for key, values in supported.items():
            if getattr(c, key) not in values:
                raise SystemExit(f'{name}: {key} = {getattr(c, key)!r} is not supported; it must be one of {values}')
        if not torch.equal(weights['lm_head.weight'], weights['transformer.wte.weight']):
            raise SystemExit(f'{name}: its output head is not tied to the embeddings, which is not supported')
        # Hugging Face's GPT-2 always has biases. scripts/export_hf.py sets them to zero for a model without any.
        bias = getattr(c, 'bias', True) or any(w.any() for key, w in weights.items() if key.endswith('.bias'))
        weights = {key: w.t().contiguous() if key.endswith(gpt.TRANSPOSED) else w for key, w in weights.items()
                   if bias or not key.endswith('.bias')}
        positions = weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size].clone()
        return gpt.with_weights(cls, GPTConfig(
            len(positions), c.vocab_size, c.n_layer, c.n_head, c.n_embd, dropout, bias,
            c.scale_attn_by_inverse_layer_idx, gpt.ACTIVATIONS[c.activation_function]), weights)


def load_hf(name):
    """Load the GPT2LMHeadModel called `name`, in float32, from a local folder or the Hub."""
    try:
        import transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        source = f'openai-community/{name}' if name in gpt.HUB_MODELS and not Path(name).exists() else name
        model, report = transformers.GPT2LMHeadModel.from_pretrained(source, use_safetensors=True,
                                                                     output_loading_info=True)
    except Exception as error:  # damaged folders and the network have no common class
        raise SystemExit(f'{name}: transformers (requirements-hf.txt) cannot load it ({one_line(error)})') from None
    if problems := [*report['missing_keys'], *report['mismatched_keys'], *report['unexpected_keys']]:
        raise SystemExit(f'{name}: its weights do not fit its config.json ({problems[0]})')
    return model.float()
