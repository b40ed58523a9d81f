"""Loading a trained model and its tokenizer from a checkpoint or a Hugging Face folder."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data import tokenizer as tokenizers
from data.loader import Bin, data_dir, first_dir, parts_of, read_meta
from runtime import checkpoint
from runtime.device import DTYPES, check_device, device_defaults
from runtime.files import expanded
from runtime.gpt import HUB_MODELS, with_weights
from runtime.rng import seed_all
from train import GPT, GPTConfig  # the classes that training uses

MODEL_HELP = 'out_dir (its newest checkpoint), .pt file, Hugging Face folder, or ' + ', '.join(HUB_MODELS)


@dataclass
class Loaded:
    """A model with its tokenizer and metadata."""
    path: Path
    model: GPT
    tokenizer: tokenizers.Tokenizer | None  # None if unknown
    state: dict = field(default_factory=dict)  # the checkpoint without its weights; {} for Hugging Face models


def add_model_flags(parser):
    """Add --device, --dtype and --tokenizer."""
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', choices=DTYPES, help='default: bfloat16 on cuda, else float32')
    add_tokenizer_flag(parser)


def add_tokenizer_flag(parser):
    """Add --tokenizer, an argument of `load`."""
    parser.add_argument('--tokenizer', metavar='NAME|DIR',
                        help=f'{tokenizers.TOKENIZER_NAMES}, or the directory of a data set made with it; needed only '
                             'if the checkpoint does not contain its tokenizer')


def dtype_name(args):
    """Return the key of DTYPES for the flags of `add_model_flags`."""
    return args.dtype or device_defaults(args.device)[0]['dtype']


def load(path, device='cpu', tokenizer=None, training=False):
    """Load the model at `path`, see MODEL_HELP, as a `Loaded`. `tokenizer`: value of --tokenizer. The model is in
    evaluation mode, or in train.py's mode if `training`."""
    device, given = check_device(device), Path(path)
    if any(given.glob('*.safetensors')) or str(path) in HUB_MODELS and not given.exists():
        model, path, state = GPT.from_pretrained(path), given, {}
        meta = tokenizers.folder_meta(given, model.config.vocab_size)
    else:
        path, state = checkpoint.load_checkpoint(path)
        best = checkpoint.best_path(given)
        if path.parent == given and best and best != path:
            print(f'note: {path} is the newest; {best} had the lowest validation loss', file=sys.stderr)
        args, weights = dict(state['model_args']), state.pop('model')
        if 'data' not in state and 'scale_attn_by_inverse_layer_idx' in args:
            args.setdefault('gelu_approximate', 'tanh')  # the official repository's GELU
        seed_all(checkpoint.model_seed(state))
        model = with_weights(GPT, GPTConfig(**args), weights)
        meta, dataset = state.get('tokenizer'), state['config'].get('dataset')
        if meta is None and dataset and not tokenizer and (first_dir(dataset) / 'train.bin').is_file():
            meta = read_meta(first_dir(dataset))  # nanoGPT's checkpoints do not contain it
    if not training:
        model.eval()
    return Loaded(path, model.to(device), chosen_tokenizer(tokenizer, meta, path), state)


def chosen_tokenizer(name, meta, path):
    """Return the tokenizer of --tokenizer=`name` or else of `meta`, with which the model at `path` was trained; None
    without both. Exit if they differ."""
    if name:
        folder = Path(expanded(name, '--tokenizer='))
        named = read_meta(folder) if (folder / 'train.bin').is_file() else tokenizers.get_tokenizer(name).meta
        if meta and not tokenizers.same_tokenizer(tokenizers.identifying(named), tokenizers.identifying(meta)):
            raise SystemExit(f'--tokenizer={name}: {path} was trained with {meta["tokenizer"]}; leave the flag out')
        meta = named
    return tokenizers.tokenizer_from_meta(meta) if meta else None


def with_tokenizer(loaded):
    """Return `loaded` without the padding of its vocabulary, so that padding is never sampled."""
    tokenizer, size = loaded.tokenizer, loaded.model.config.vocab_size
    if tokenizer is None:
        raise SystemExit(f'{loaded.path}: its tokenizer is unknown; pass --tokenizer={tokenizers.TOKENIZER_NAMES}|DIR, '
                         'where DIR is a data set made with it')
    if tokenizer.vocab_size > size:
        raise SystemExit(f'{loaded.path}: the model has {size} ids, fewer than the tokenizer {tokenizer.name} '
                         f'({tokenizer.vocab_size}); check --tokenizer')
    if tokenizer.vocab_size < size:
        size, embedding, head = tokenizer.vocab_size, loaded.model.transformer.wte, loaded.model.lm_head
        for p in (*embedding.parameters(), *head.parameters()):  # cropping a tied weight twice does no harm
            p.data = p.data[:size]
        loaded.model.config.vocab_size = embedding.num_embeddings = head.out_features = size
    return loaded


def open_bins(loaded, dataset, split):
    """Open the Bins of a split of `dataset`, by default `loaded`'s. A mixture has several."""
    dataset = dataset or loaded.state.get('config', {}).get('dataset')
    if not dataset:
        raise SystemExit(f'{loaded.path}: does not name its data set; pass --dataset, or a checkpoint of train.py')
    bins = [Bin(data_dir(name), split, share, loaded.model.config.block_size)
            for name, share in parts_of(dataset).items() if share or split != 'train']
    for data in bins:
        tokenizers.check_same_tokenizer(data, loaded.tokenizer and loaded.tokenizer.meta, loaded.path)
    return bins
