"""Configs, weights, counts, FLOPs and samples of any model with nanoGPT's forward and nanoGPT's fields in `config`."""

import contextlib
import math
from dataclasses import MISSING, fields

import torch
from torch import nn

NANOGPT_ARGS = 'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'
# GPT-2 models that init_from can download from the Hugging Face Hub
HUB_MODELS = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
# Hugging Face's activation_function → the argument `approximate` of F.gelu.
ACTIVATIONS = {'gelu_new': 'tanh', 'gelu': 'none', 'gelu_pytorch_tanh': 'tanh'}
# Hugging Face stores these weights as (in, out), the transpose of nn.Linear's.
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')


def padded_vocab_size(vocab_size):
    """Round `vocab_size` up to a multiple of 64, for faster matmuls: 50,257 becomes 50,304. Sizes below 1,024 stay,
    because the padding would raise the first losses."""
    return vocab_size if vocab_size < 1024 else math.ceil(vocab_size / 64) * 64


def config_of(cls, settings, vocab_size):
    """Build the config dataclass `cls` from train.py's `settings`, a dict, and the tokenizer's `vocab_size`."""
    return cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings},
               vocab_size=padded_vocab_size(vocab_size))


def default_args(cls):
    """Return the defaults of the config class `cls`, by name."""
    return {f.name: f.default for f in fields(cls) if f.init and f.default is not MISSING}


def arguments(config):
    """Return the arguments of a `config`, a dict, without attributes that its class or a model adds."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init}


def model_args(config):
    """Return the arguments of `config` for a checkpoint: nanoGPT's, and others that differ from their default."""
    defaults = default_args(type(config))
    return {key: value for key, value in arguments(config).items()
            if key in NANOGPT_ARGS or key not in defaults or value != defaults[key]}


def with_weights(cls, config, weights):
    """Return a model `cls(config)` with the state_dict `weights`. Raises RuntimeError if they do not fit."""
    model = cls(config)
    model.load_state_dict(weights)
    check_tied(model, weights)
    return model


def take_weights(model, weights, rows):
    """Copy the state_dict `weights` into `model`, which may have a larger vocabulary, of which the first `rows` ids get
    embeddings, or fewer positions. Return the names of weights that stay. Raises RuntimeError if they do not fit."""
    own, taken = model.state_dict(), dict(weights)
    for name in {'transformer.wte.weight', 'lm_head.weight', 'lm_head.bias'} & own.keys() & taken.keys():
        taken[name] = torch.cat([taken[name][:rows], own[name][rows:]])
    if 'transformer.wpe.weight' in taken:
        taken['transformer.wpe.weight'] = taken['transformer.wpe.weight'][:model.config.block_size]
    missing, unexpected = model.load_state_dict(taken, strict=False)
    if unexpected:
        raise RuntimeError(f'{unexpected[0]} is in the checkpoint only')
    check_tied(model, taken)
    return missing


def check_tied(model, weights):
    """Raise RuntimeError if `weights`, as loaded into `model`, hold two values for a tied parameter."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in weights and not torch.equal(p, weights[name].to(p.dtype)):
            raise RuntimeError(f'{name} is tied to another weight here, but not in the checkpoint')


def num_params(model):
    """Count the trained parameters, a tied head once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def flops_per_token(model):
    """Return the FLOPs to train on one token, in sequences of block_size, as in Chowdhery et al. (2022) and Table 1: 6
    per weight of a trained matrix, and 12·n_layer·n_embd·block_size for QKᵀ and AV, as if attention were not causal. A
    tied head counts, embedding look-ups do not; a block that the model uses n times counts n times."""
    c = model.config
    weights = sum(p.numel() for _, module in model.named_modules(remove_duplicate=False)
                  if not isinstance(module, nn.Embedding)
                  for p in module.parameters(recurse=False) if p.dim() > 1 and p.requires_grad)
    return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size


@contextlib.contextmanager
def evaluation_mode(model):
    """Put `model` in evaluation mode and, at the end, each module back in its mode, which differs for a teacher."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    yield
    for module in training:
        module.training = True


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=None, generator=None):
    """Continue the rows of `idx` (B, T) by `max_new_tokens` ids, or until stop(ids) is true; see `sample_next`."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size:])[0][:, -1]
        idx = torch.cat((idx, sample_next(logits, temperature, top_k, top_p, generator)[:, None]), dim=1)
        if stop is not None and stop(idx):
            break
    return idx


def sample_next(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw an id from softmax(logits / temperature) for each row of `logits` (B, V); return (B,) int64. `top_k` keeps
    the k likeliest ids; `top_p` then keeps the likeliest whose probabilities first sum to top_p. Temperature 0 takes
    the likeliest id. `generator` is on the logits' device, by default torch's global one."""
    logits = logits.float()
    if temperature < 1e-30:  # A division would overflow.
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
