"""GPT-2 weights in Hugging Face's format, from a local folder or the Hub, as a model in nanoGPT's style."""

from pathlib import Path

import torch

from runtime import gpt
from runtime.files import one_line


def load_gpt2(cls, config_class, name, block_size=None, dropout=0.0):
    """Load the GPT-2 `name`, one of gpt.HUB_MODELS or a folder, as a model `cls` with a config `config_class` and the
    first `block_size` positions, by default all. Exit if the model cannot represent it."""
    theirs = load_transformer(name)
    c, weights = theirs.config, theirs.state_dict()
    supported = dict(activation_function=[*gpt.ACTIVATIONS], n_inner=[None, 4 * c.n_embd], layer_norm_epsilon=[1e-5],
                     scale_attn_weights=[True], add_cross_attention=[False])
    for key, values in supported.items():
        if getattr(c, key) not in values:
            raise SystemExit(f'{name}: {key} = {getattr(c, key)!r} is not supported; it must be one of {values}')
    if not torch.equal(weights['lm_head.weight'], weights['transformer.wte.weight']):
        raise SystemExit(f'{name}: its output head is not tied to the embeddings, which is not supported')
    # Hugging Face's GPT-2 always has biases. For a model without biases, scripts/export_hf.py adds zeros.
    bias = getattr(c, 'bias', True) or any(w.any() for key, w in weights.items() if key.endswith('.bias'))
    weights = {key: w.t().contiguous() if key.endswith(gpt.TRANSPOSED) else w for key, w in weights.items()
               if bias or not key.endswith('.bias')}
    positions = weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size].clone()
    return gpt.with_weights(cls, config_class(
        len(positions), c.vocab_size, c.n_layer, c.n_head, c.n_embd, dropout, bias,
        c.scale_attn_by_inverse_layer_idx, gpt.ACTIVATIONS[c.activation_function]), weights)


def load_transformer(name):
    """Load the GPT2LMHeadModel called `name` in float32."""
    try:
        import transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        source = f'openai-community/{name}' if name in gpt.HUB_MODELS and not Path(name).exists() else name
        model, report = transformers.GPT2LMHeadModel.from_pretrained(source, use_safetensors=True,
                                                                     output_loading_info=True)
    except Exception as error:  # Damaged folders and the network raise errors of many classes.
        raise SystemExit(f'{name}: transformers (requirements-hf.txt) cannot load it ({one_line(error)})') from None
    if problems := [*report['missing_keys'], *report['mismatched_keys'], *report['unexpected_keys']]:
        raise SystemExit(f'{name}: its weights do not fit its config.json ({problems[0]})')
    return model.float()
