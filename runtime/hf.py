"""Hugging Face's GPT-2 folders, both ways: config.json and safetensors to and from plain dicts.

A folder comes from elsewhere, so everything in it is checked before any of it is used: the configuration against a
schema, and the names and shapes of the weights, which their files name in a header, against the configuration.
"""

import json
import re
from pathlib import Path

import torch

# The models that are downloaded from the Hub by name.
HUB_MODELS = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
# Hugging Face stores these weights as (in, out), the transpose of nn.Linear's.
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')
# activation_function in config.json → the argument `approximate` of F.gelu.
ACTIVATIONS = {'gelu': 'none', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh'}
# The fields of a GPTConfig that a config.json can express.
FIELDS = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias',
          'scale_attn_by_inverse_layer_idx', 'gelu_approximate')

# The schema of config.json: sizes with their defaults, which are GPT2Config's; for other keys the values that a GPT can
# compute, the default first.
SIZES = {'n_positions': 1024, 'vocab_size': 50257, 'n_layer': 12, 'n_head': 12, 'n_embd': 768}
CHOICES = {'activation_function': ('gelu_new', 'gelu', 'gelu_pytorch_tanh'), 'layer_norm_epsilon': (1e-5,),
           'scale_attn_weights': (True,), 'scale_attn_by_inverse_layer_idx': (False, True),
           'add_cross_attention': (False,), 'tie_word_embeddings': (True,), 'bias': (True, False)}
CONFIG_BYTES = 2 ** 20  # a config.json has about a thousand bytes


def is_model(name):
    """Whether `name` is one of HUB_MODELS or a local folder with safetensors, and so something to `read`."""
    path = Path(name)
    return any(path.glob('*.safetensors')) or str(name) in HUB_MODELS and not path.exists()


def local_folder(name):
    """The local folder of the model `name`: a folder itself, or one of HUB_MODELS, downloaded unless it is cached."""
    if Path(name).is_dir():
        return Path(name)
    if name not in HUB_MODELS:
        raise SystemExit(f'{name}: neither a folder nor one of {", ".join(HUB_MODELS)}; download another model from '
                         'the Hub with `hf download NAME --local-dir FOLDER`')
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(f'openai-community/{name}',
                                      allow_patterns=['config.json', 'model.safetensors', 'tokenizer.json']))
    except ImportError:
        raise SystemExit(f'{name}: the download needs the package huggingface_hub: pip install huggingface_hub') \
            from None
    except Exception as error:  # whatever the network makes huggingface_hub raise
        raise SystemExit(f'{name}: unavailable from the Hugging Face Hub ({type(error).__name__}); where there is '
                         f'network, run `hf download openai-community/{name} --local-dir FOLDER`, and give FOLDER '
                         'instead of the name') from None


def read(name, block_size=None):
    """A GPT-2 in Hugging Face's format; needs the package safetensors.

    Args:
        name: one of HUB_MODELS, or a local folder with config.json and safetensors.
        block_size: positions to keep, at most the model's own, which is the default.

    Returns:
        (model_args, weights): a dict of FIELDS except dropout, and a state_dict of float32 tensors under
        GPT's names. A model whose biases are all zero, and whose config.json says `bias: false`, has none here.

    Raises SystemExit with one line when there is no such model, or when a GPT cannot compute it.
    """
    folder = local_folder(name)
    config = read_config(folder)
    block_size = block_size or config['n_positions']
    if block_size > config['n_positions']:
        raise SystemExit(f'--block_size={block_size}: {name} has {config["n_positions"]} positions; set at most that')
    weights = _read_weights(folder, config)
    tokens = weights['transformer.wte.weight']
    if not torch.equal(weights.setdefault('lm_head.weight', tokens), tokens):
        raise SystemExit(f'{folder}: the output head is not tied to the embeddings, which is not supported')
    # Hugging Face's GPT-2 always has biases. `write` marks a model without any; they stay zero unless it was trained.
    bias = config['bias'] or any(w.any() for key, w in weights.items() if key.endswith('.bias'))
    if not bias:
        weights = {key: w for key, w in weights.items() if not key.endswith('.bias')}
    weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size]
    weights = {key: w.t() if key.endswith(TRANSPOSED) else w for key, w in weights.items()}
    return dict(block_size=block_size, bias=bias, gelu_approximate=ACTIVATIONS[config['activation_function']],
                **{key: config[key] for key in ('vocab_size', 'n_layer', 'n_head', 'n_embd',
                                                'scale_attn_by_inverse_layer_idx')}), weights


def write(folder, model_args, weights, eot_id=None):
    """Writes config.json and model.safetensors of a GPT to the existing `folder`, for transformers and for `read`.

    Args:
        model_args: dict of FIELDS.
        weights: state_dict of a GPT; missing biases are written as zeros.
        eot_id: the end-of-text id, if the vocabulary has one.

    Raises SystemExit with one line when the model is not a GPT-2, OSError when the file system fails.
    """
    safetensors = _safetensors()
    config = _config(model_args, eot_id)
    zeros = {key: torch.zeros(shape) for key, shape in _shapes(config).items() if key.endswith('.bias')}
    weights = {key: (w.transpose(0, -1) if key.endswith(TRANSPOSED) else w).contiguous()
               for key, w in (zeros | weights).items()}
    head = weights.pop('lm_head.weight')
    _check_finite(weights, 'not written')
    problem = _mismatch({key: list(w.shape) for key, w in weights.items()}, config)
    if not problem and not torch.equal(head, weights['transformer.wte.weight']):
        problem = 'the output head is not tied to the embeddings'
    if problem:
        raise SystemExit(f"not written: the weights are not those of Hugging Face's GPT-2 ({problem})")
    (folder / 'config.json').write_text(json.dumps(config, indent=2), encoding='utf-8')
    try:
        safetensors.torch.save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    except safetensors.SafetensorError as error:  # what safetensors makes of an error of the file system
        raise OSError(str(error)) from None
    (folder / 'model.safetensors').chmod(0o644)  # safetensors writes for the owner alone


def _config(model_args, eot_id):
    """The dict of a GPT2Config."""
    scaled, dropout = model_args['scale_attn_by_inverse_layer_idx'], model_args['dropout']
    activation = next(name for name, value in ACTIVATIONS.items() if value == model_args['gelu_approximate'])
    config = dict(
        architectures=['GPT2LMHeadModel'], model_type='gpt2', n_positions=model_args['block_size'],
        **{key: model_args[key] for key in ('vocab_size', 'n_embd', 'n_layer', 'n_head')}, n_inner=None,
        activation_function=activation, layer_norm_epsilon=1e-5, scale_attn_weights=True, tie_word_embeddings=True,
        scale_attn_by_inverse_layer_idx=scaled, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=eot_id, eos_token_id=eot_id, torch_dtype='float32',
        bias=model_args['bias'])  # for `read`; Hugging Face's GPT-2 always has biases
    if scaled:
        # transformers < 5.4 ignores the scaling in its other implementations.
        config['_attn_implementation'] = 'eager'
    return config


def read_config(folder):
    """The dict of a folder's config.json, with defaults for missing keys; SystemExit unless it fits the schema."""
    path = folder / 'config.json'
    try:
        if not path.is_file() or path.stat().st_size > CONFIG_BYTES:
            raise ValueError('not a file of at most 1 MiB')
        given = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f'{path}: cannot be read ({error})') from None
    if not isinstance(given, dict):
        raise SystemExit(f'{path}: must hold a JSON object, not a {type(given).__name__}')
    defaults = {key: values[0] for key, values in CHOICES.items()} | {'model_type': None, 'n_inner': None}
    config = SIZES | defaults | given
    for key in SIZES:
        if type(config[key]) is not int or config[key] < 1:
            raise SystemExit(f'{path}: {key} = {_short(config[key])} must be a whole number, at least 1')
    if config['n_embd'] % config['n_head']:
        raise SystemExit(f'{path}: n_embd = {_short(config["n_embd"])} is not a multiple of '
                         f'n_head = {_short(config["n_head"])}')
    for key, values in {'model_type': ('gpt2',), **CHOICES, 'n_inner': (None, 4 * config['n_embd'])}.items():
        if config[key] not in values:
            raise SystemExit(f'{path}: {key} = {_short(config[key])} is not supported; it must be '
                             + ' or '.join(map(_short, values)))
    return config


def _read_weights(folder, config):
    """The weights in a folder's safetensors, float32, under the names of GPT's state_dict, (in, out) as stored."""
    safetensors = _safetensors()
    files = sorted(file for file in folder.glob('model*.safetensors') if file.is_file())
    if not files:
        raise SystemExit(f'{folder}: holds no model.safetensors, the only format of weights that is read')
    found = {}  # name → (file, name in it, shape)
    file = None
    try:
        for file in files:
            with safetensors.safe_open(file, framework='pt') as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    # Older files hold each block's causal mask; names saved from GPT2Model lack the prefix.
                    if not key.endswith(('.attn.bias', '.attn.masked_bias')):
                        name = key if key.startswith(('transformer.', 'lm_head.')) else f'transformer.{key}'
                        found[name] = file, key, opened.get_slice(key).get_shape()
        if problem := _mismatch({name: shape for name, (_, _, shape) in found.items()}, config):
            raise SystemExit(f'{folder}: the weights are not those of its config.json ({problem})')
        weights = {}
        for file in files:
            with safetensors.safe_open(file, framework='pt') as opened:
                weights |= {name: opened.get_tensor(key) for name, (of, key, _) in found.items() if of == file}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise SystemExit(f'{file}: not a safetensors file ({_short(str(error))})') from None
    if integers := [name for name, w in weights.items() if not w.is_floating_point()]:
        raise SystemExit(f'{folder}: {integers[0]} is {weights[integers[0]].dtype}; quantized weights are not read')
    _check_finite(weights, folder)
    return {name: w.float() for name, w in weights.items()}


def _check_finite(weights, where):
    """SystemExit with one line that names the first of `weights` that holds NaN or infinity."""
    if bad := [name for name, w in weights.items() if not w.isfinite().all()]:
        raise SystemExit(f'{where}: {bad[0]} holds values that are not finite')


def _shapes(config):
    """The weights of a GPT-2 without its head: {name: [size, …]}, as Hugging Face stores them."""
    width = config['n_embd']
    block = {'ln_1': [width], 'attn.c_attn': [width, 3 * width], 'attn.c_proj': [width, width],
             'ln_2': [width], 'mlp.c_fc': [width, 4 * width], 'mlp.c_proj': [4 * width, width]}
    layers = {f'h.{i}.{name}': shape for i in range(config['n_layer']) for name, shape in block.items()}
    shapes = {'wte.weight': [config['vocab_size'], width], 'wpe.weight': [config['n_positions'], width]}
    for name, shape in (layers | {'ln_f': [width]}).items():
        shapes |= {f'{name}.weight': shape, f'{name}.bias': shape[-1:]}
    return {f'transformer.{name}': shape for name, shape in shapes.items()}


def _mismatch(shapes, config):
    """What is wrong with weights of these shapes, {name: [size, …]}, for a model of `config`; None if they fit."""
    blocks = {match[1] for name in shapes if (match := re.match(r'transformer\.h\.(\d+)\.', name))}
    if len(blocks) != config['n_layer']:  # checked before `_shapes` makes so many names
        return f'they have {len(blocks)} blocks, n_layer is {_short(config["n_layer"])}'
    expected = _shapes(config)
    expected['lm_head.weight'] = expected['transformer.wte.weight']
    for name, shape in shapes.items():
        if name not in expected:
            return f'{_short(name)} is not one of them'
        if shape != expected[name]:
            return f'{name} has the shape {_short(shape)}, not {_short(expected[name])}'
    missing = [name for name in expected if name not in shapes and name != 'lm_head.weight']
    return f'{missing[0]} is missing' if missing else None


def _safetensors():
    """The package; SystemExit without it."""
    try:
        import safetensors.torch
    except ImportError:
        raise SystemExit("Hugging Face's format needs the package safetensors: pip install safetensors") from None
    return safetensors


def _short(value):
    """The repr of a value from a foreign file, short enough for a message of one line."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = 'a number of thousands of digits'
    return text if len(text) <= 100 else f'{text[:100]}…'
