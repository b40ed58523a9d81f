"""GPT-2: configuration, the table of sizes, the model, its loss, parameter groups, FLOPs; sampling; pretrained weights.

The architecture is GPT-2's (learned positions, pre-norm blocks, GELU, tied head) in the paper's setting: no bias, no
dropout, vocabulary padded to a multiple of 64, optional scaling of attention logits by the inverse layer index.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from loss import Linear, TiedEmbedding, cross_entropy, head_hvp, head_loss, sample_labels
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


def padded_vocab_size(vocab_size):
    """`vocab_size` rounded up to a multiple of 64 (GPT-2's 50,257 → 50,304): aligned matrices are faster."""
    return math.ceil(vocab_size / 64) * 64


def product_dtype(x):
    """The type that products of `x` are computed in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


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


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention, (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.scale = (config.n_embd // config.n_head) ** -0.5
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(x).split(C, dim=2))
        mask, causal = None, True
        if cache is not None:
            k, v, mask, causal = cache.extend(self.layer_idx, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Position-wise GELU network of width 4 n_embd."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.gelu_approximate = config.gelu_approximate

    def forward(self, x):
        x = self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu_approximate))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """All of a GPT's parameters. Called, what lies between embeddings and head: (B, T, n_embd) → (B, T, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, x):
        x = F.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(nn.Module):
    """A GPT-2 language model with nanoGPT's module names."""

    # Training takes the loss from `ops.head_loss`, not from logits. To change the loss in `forward`, or what it does in
    # front of the trunk, set this to False: gradients and Hessian-vector products are those of its other lines then.
    fused = True

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f'n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}')
        self.config = config
        self.compiled_trunk, self.compile_loss = None, False  # for losses without logits, which World.wrap may compile
        self.transformer = Transformer(config)
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
            labels_hat: (n, T), n ≤ B, for the Gauss-Newton-Bartlett estimator, of the first n sequences: either labels
                (int64), or uniform numbers in [0, 1) (float32) with which ŷ ~ softmax(logits) is drawn. Positions
                whose target is -1 do not count here either. One forward then serves two backward passes.
            return_logits: False in training: logits (B, T, vocab_size), which cost memory and time, are not kept, and
                the loss can be differentiated once, not twice.

        Returns:
            (logits, loss), each None where not asked for; with `labels_hat`, (logits, loss, loss_hat) where
            loss_hat is the cross-entropy *summed* over the labels that count.
        """
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size = {self.config.block_size}')
        wte = self.transformer.wte.weight
        fused = self.fused and targets is not None and not return_logits
        if fused and wte.dtype == torch.float32:
            x, wte = TiedEmbedding.apply(idx, wte)
        else:
            x = F.embedding(idx, wte)
        x = x + self.transformer.wpe.weight[:T]
        if fused:
            return self.head_loss((self.compiled_trunk or self.transformer)(x), wte, targets, labels_hat)
        logits = self.lm_head(self.transformer(x))
        loss = None if targets is None else cross_entropy(logits, targets, 'mean')
        if labels_hat is None:
            return logits, loss
        logits_hat, counted = logits[:len(labels_hat)], targets[:len(labels_hat)] >= 0
        if labels_hat.is_floating_point():
            labels_hat = sample_labels(logits_hat.detach(), labels_hat)
        return logits, loss, cross_entropy(logits_hat, torch.where(counted, labels_hat, -1), 'sum')

    def head_loss(self, x, weight, targets, labels_hat):
        """What `forward` returns without logits, by ops.head_loss: x (B, T, n_embd) is the head's input."""
        x = x.flatten(0, 1).to(product_dtype(x))
        hat = torch.empty(0, device=x.device) if labels_hat is None else labels_hat.reshape(-1)
        loss, loss_hat, *_ = head_loss(x, weight, targets.reshape(-1), hat, torch.is_grad_enabled(), self.compile_loss)
        return (None, loss) if labels_hat is None else (None, loss, loss_hat)

    def hessian_vector_product(self, idx, targets, u):
        """∇²L·u with L the mean cross-entropy, by forward-over-reverse differentiation; logits are never kept.

        Args:
            idx, targets: as for `forward`.
            u: dict of tensors, with the names and shapes of the parameters.

        Returns:
            the product, a dict of the same names.
        """
        values = {name: p.detach() for name, p in self.named_parameters()}

        def math_attention(module, parameters, *args):
            with sdpa_kernel(SDPBackend.MATH):  # flash attention has no derivative of its derivative
                return functional_call(module, parameters, args)

        if not self.fused:
            gradient = torch.func.grad(lambda values: math_attention(self, values, idx, targets)[1])
            return torch.func.jvp(gradient, (values,), (u,))[1]
        tokens, positions = 'transformer.wte.weight', 'transformer.wpe.weight'
        short = {name: name.removeprefix('transformer.') for name in values if name not in (tokens, positions)}

        def split(of):
            """The embeddings, which are linear in their weights, and the other parameters by their short names."""
            x = F.embedding(idx, of[tokens]) + of[positions][:idx.size(1)]
            return x, {short[name]: of[name] for name in short}

        def run(x, inner):
            return math_attention(self.transformer, inner, x)

        def gradient(x, inner):
            x, pull_back = torch.func.vjp(run, x, inner)
            x, dx = forward_ad.unpack_dual(x)
            low = product_dtype(x)
            g, dg, to_tokens = head_hvp(x.flatten(0, 1).to(low), values[tokens], targets.reshape(-1),
                                        dx.flatten(0, 1).to(low), u[tokens], self.compile_loss)
            return pull_back(forward_ad.make_dual(*(t.view_as(x).to(x.dtype) for t in (g, dg)))), to_tokens

        _, (dx, inner), to_tokens = torch.func.jvp(gradient, split(values), split(u), has_aux=True)
        to_positions = torch.zeros_like(values[positions])
        to_positions[:idx.size(1)] = dx.sum(0)
        return {tokens: to_tokens.index_add_(0, idx.flatten(), dx.flatten(0, 1)), positions: to_positions,
                **{name: inner[short[name]] for name in short}}

    @classmethod
    def from_pretrained(cls, name, block_size=None, dropout=0.0):
        """A GPT with the weights of a GPT-2 in Hugging Face's format; needs the package safetensors.

        Args:
            name: one of hf.HUB_MODELS, or a local folder with config.json and model.safetensors.
            block_size: fewer tokens than the model's own; default its own.

        Raises SystemExit with one line when there is no such model, or it is no GPT-2 that this class can be.
        """
        model_args, weights = hf.read(name, block_size)
        model = cls(GPTConfig(**model_args, dropout=dropout))
        model.load_state_dict(weights)
        return model

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
        weights = sum(p.numel() for p in self.transformer.h.parameters() if p.dim() > 1) + c.n_embd * c.vocab_size
        return 6 * weights + 12 * c.n_layer * c.n_embd * (T or c.block_size)

    @torch.no_grad()
    def next_logits(self, idx, cache):
        """Logits (B, vocab_size) of the token after `idx` (B, T), which goes on from what `cache` holds already."""
        x = self.transformer.wte(idx) + self.transformer.wpe(cache.start(idx))
        for block in self.transformer.h:
            x = block(x, cache)
        return self.lm_head(self.transformer.ln_f(x[:, -1]))

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, padding=None, generator=None):
        """Continues each row of `idx` (B, T) by `max_new_tokens` ids, and yields them as they come: (B,) each.

        A token sees the block_size tokens before it. Up to block_size in all, a step computes one position and takes
        the others from a KV cache. Beyond, every step moves the window, and with it the position of each token in it:
        what was computed no longer holds, and a step costs a forward pass over block_size tokens.

        Args:
            temperature, top_k, top_p: see `sample_next`; temperature 0 is greedy decoding.
            padding: (B,) int64, how many tokens on the left of each row are padding (any id): no token sees them.
            generator: of the random numbers, on the device of `idx`; default torch's own.
        """
        block_size = self.config.block_size
        padding = torch.zeros(len(idx), dtype=torch.int64, device=idx.device) if padding is None else padding
        seen, cache = idx, None
        for _ in range(max_new_tokens):
            if cache is None or cache.length == cache.capacity:
                dropped = max(0, seen.size(1) - block_size)
                cache = KVCache(self.config.n_layer, min(block_size, idx.size(1) + max_new_tokens),
                                (padding - dropped).clamp(min=0))
                logits = self.next_logits(seen[:, dropped:], cache)
            else:
                logits = self.next_logits(seen[:, -1:], cache)
            new = sample_next(logits, temperature, top_k, top_p, generator)
            seen = torch.cat((seen, new[:, None]), dim=1)
            yield new

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, padding=None, generator=None):
        """All of `stream`: `idx` (B, T) and its continuation, (B, T + max_new_tokens)."""
        new = self.stream(idx, max_new_tokens, temperature, top_k, top_p, padding, generator)
        return torch.cat((idx, *(ids[:, None] for ids in new)), dim=1)

    def crop_vocab_size(self, vocab_size):
        """Leaves out the ids from `vocab_size` on, which pad the vocabulary and mean nothing."""
        if vocab_size > self.config.vocab_size:
            raise ValueError(f'{vocab_size} ids are more than the model has ({self.config.vocab_size})')
        self.config.vocab_size = self.transformer.wte.num_embeddings = self.lm_head.out_features = vocab_size
        self.transformer.wte.weight = nn.Parameter(self.transformer.wte.weight.detach()[:vocab_size].clone())
        self.lm_head.weight = self.transformer.wte.weight


class KVCache:
    """Keys and values that each block has computed for the tokens a batch has read so far.

    Args:
        n_layer: blocks of the model.
        capacity: tokens it has room for.
        padding: (B,), how many of each row's first tokens are padding.
    """

    def __init__(self, n_layer, capacity, padding):
        self.keys, self.values = [None] * n_layer, [None] * n_layer
        self.capacity, self.padding, self.length = capacity, padding, 0
        self.padded = bool(padding.any())
        self.mask, self.causal = None, True

    def start(self, idx):
        """Makes room for the tokens `idx` (B, T), and returns their positions, (T,) or, where rows differ, (B, T)."""
        first, self.length = self.length, self.length + idx.size(1)
        at = torch.arange(first, self.length, device=idx.device)
        # PyTorch's causal masks start both sequences at 0: right for the first tokens, and one token alone needs none.
        self.causal = first == 0
        if not self.padded:
            return at
        of = torch.arange(self.length, device=idx.device)
        # Padding attends to itself, so that no row of the softmax is empty.
        mask = (of >= self.padding[:, None, None]) & (of <= at[:, None]) | (of == at[:, None])
        self.mask, self.causal = mask[:, None], False
        return (at - self.padding[:, None]).clamp(min=0)

    def extend(self, layer_idx, k, v):
        """Adds keys and values, (B, n_head, T, head size) each. Returns all of them, the mask, and is_causal."""
        if self.keys[layer_idx] is None:
            B, n_head, _, head_size = k.shape
            self.keys[layer_idx] = k.new_empty(B, n_head, self.capacity, head_size)
            self.values[layer_idx] = torch.empty_like(self.keys[layer_idx])
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, self.length - k.size(2):self.length] = k
        values[:, :, self.length - k.size(2):self.length] = v
        return keys[:, :, :self.length], values[:, :, :self.length], self.mask, self.causal


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
