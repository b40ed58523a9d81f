"""GPT-2: the table of sizes, the model, its loss, its FLOPs, sampling.

The architecture is GPT-2's (learned positions, pre-norm blocks, GELU, tied head) in the paper's setting: no bias, no
dropout, optional scaling of attention logits by the inverse layer index. Module names are nanoGPT's.
"""

import math
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
from torch.nn import functional as F

from loss import head_loss
from runtime import hf

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
INIT_STD = 0.02  # of the initial weights


def size_settings(config):
    """(depth, heads and width of the setting model_size, their source), for `configurator.derive`."""
    config.require('model_size', config.model_size in SIZES, f'one of {", ".join(SIZES)}')
    return SIZES[config.model_size], f'model size {config.model_size}'


def padded_vocab_size(vocab_size):
    """`vocab_size` rounded up to a multiple of 64 (GPT-2's 50,257 → 50,304), for which matmuls are faster.

    Below 1,024 ids as it is: there the padding would be a large part of the vocabulary and raise the first losses.
    """
    return vocab_size if vocab_size < 1024 else math.ceil(vocab_size / 64) * 64


NANOGPT_ARGS = 'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'


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

    @classmethod
    def from_settings(cls, settings, vocab_size):
        """The shape of a run with train.py's `settings`, a dict, for a tokenizer of `vocab_size` ids."""
        return cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings},
                   vocab_size=padded_vocab_size(vocab_size))

    def model_args(self):
        """The shape as a checkpoint holds it: nanoGPT's arguments, and others where they are not the default, so that
        nanoGPT reads models that it knows, and an argument added here leaves old checkpoints valid."""
        return {key: value for key, value in asdict(self).items()
                if key in NANOGPT_ARGS or value != getattr(GPTConfig, key)}


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention, (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.config = config
        self.scale = (config.n_embd // config.n_head) ** -0.5
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale,
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
    """A GPT-2 language model. ValueError when n_embd is not a multiple of n_head."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f'n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}')
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._init_weights)  # over what the constructors of submodules have drawn
        # GPT-2's depth scaling: each block adds to the residual stream twice.
        for name, p in self.named_parameters():
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, mean=0.0, std=INIT_STD / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=INIT_STD)
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None, labels_hat=None, uniforms=None, return_logits=True):
        """Logits and mean loss, as in nanoGPT; for the Gauss-Newton-Bartlett estimator the loss on other labels, too.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) token ids, -1 where a position does not count.
            labels_hat: (n, T) token ids, n ≤ B, of the first n sequences, for a second loss.
            uniforms: (n, T) uniform numbers in [0, 1) with which these labels are drawn from softmax(logits) instead.
            return_logits: False in training: logits (B, T, vocab_size), which cost memory and time, are not kept, and
                the loss can be differentiated once, not twice.

        Returns:
            (logits, loss), the loss None without targets, the logits None where not asked for; with second labels
            (None, loss, loss_hat), where loss_hat is their negative log-likelihood, *summed*.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size = {self.config.block_size}')
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        return head_loss(x, self.lm_head, targets, labels_hat, uniforms, return_logits)

    def num_params(self):
        """Number of parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None):
        """FLOPs to train on one token (forward + backward) at context length T, default block_size.

        Counts every matmul: 6 per weight that multiplies (a tied head too; not the embedding look-ups) and
        12·n_layer·n_embd·T for QKᵀ and AV, the causal half counted in full: the convention of Chowdhery et al.
        (2022), which the paper's Table 2 follows.
        """
        c = self.config
        weights = sum(p.numel() for module in self.modules() if not isinstance(module, nn.Embedding)
                      for p in module.parameters(recurse=False) if p.dim() > 1)
        return 6 * weights + 12 * c.n_layer * c.n_embd * (T or c.block_size)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, lengths=None, stop=None,
                 generator=None):
        """Continues each row of `idx` (B, T) by up to `max_new_tokens` ids.

        Each token costs a forward pass over the whole row, of which a token sees the last block_size ids.

        Args:
            temperature, top_k, top_p: see `sample_next`; temperature 0 is greedy decoding.
            lengths: (B,) ids of each row that count, where rows are padded on the right; default T. A causal model
                needs no mask: nothing attends to what stands behind it.
            stop: function of (ids (B, L), lengths (B,)) that says which rows have ended, (B,) bool. They are not
                continued, and when all have ended nothing is.
            generator: of the random numbers, on the device of `idx`; default torch's own.

        Returns:
            (ids, lengths): the rows (B, L ≤ T + max_new_tokens), of which the first `lengths` ids count.
        """
        B, T = idx.shape
        block_size, rows = self.config.block_size, torch.arange(B, device=idx.device)
        lengths = torch.full_like(rows, T) if lengths is None else lengths.clone()
        idx, ended = idx.clone(), torch.zeros_like(rows, dtype=torch.bool)
        for _ in range(max_new_tokens):
            if lengths.max() == idx.size(1):
                idx = F.pad(idx, (0, 1))
            first = (lengths - block_size).clamp(min=0)  # where each row's context begins
            width = min(int(lengths.max()), block_size)
            context = idx.gather(1, first[:, None] + torch.arange(width, device=idx.device))
            logits = self(context)[0][rows, lengths - first - 1]
            new = sample_next(logits, temperature, top_k, top_p, generator)
            idx[rows, lengths] = torch.where(ended, idx[rows, lengths], new)
            lengths = lengths + ~ended
            if stop is not None:
                ended = ended | stop(idx, lengths)
                if ended.all():
                    break
        return idx[:, :int(lengths.max())], lengths

    @classmethod
    def from_pretrained(cls, name, block_size=None, dropout=0.0):
        """A GPT with the weights of a GPT-2 in Hugging Face's format; needs the package safetensors.

        Args:
            name: one of runtime.hf.HUB_MODELS, or a local folder with config.json and model.safetensors.
            block_size: fewer tokens than the model's own; default its own.

        Raises SystemExit with one line when there is no such model, or it is no GPT-2 that this class can be.
        """
        model_args, weights = hf.read(name, block_size)
        model = cls(GPTConfig(**model_args, dropout=dropout))
        model.load_state_dict(weights)
        return model


def sample_next(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One id for each row of `logits` (B, V), drawn from softmax(logits / temperature); (B,) int64.

    `top_k` keeps the k likeliest ids, `top_p` the likeliest whose probabilities first reach top_p together (of those
    that top_k leaves). Temperature 0 takes the likeliest one.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, ids, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
