"""Loads a trained model and its tokenizer, for the scripts that use them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.loader import data_dir, parts_of, read_meta
from data.tokenizer import (
    TOKENIZER_NAMES,
    TOKENIZERS,
    FileTokenizer,
    Tokenizer,
    get_tokenizer,
    tokenizer_from_meta,
)
from model import GPT, GPTConfig
from runtime import checkpoint, hf
from runtime.device import DTYPES, check_device

LOGITS = 2 ** 29  # the most in one forward pass of generation: 2 GiB in float32
MODEL_HELP = 'out_dir (its newest checkpoint), .pt file, Hugging Face folder, or ' + ', '.join(hf.HUB_MODELS)


@dataclass
class Loaded:
    """A model in eval mode and what belongs to it.

    name: a short one, for tables. tokenizer: None if unknown. state: the checkpoint without its weights; {} for a
    Hugging Face model.
    """
    name: str
    path: Path
    model: GPT
    tokenizer: Tokenizer | None
    state: dict = field(default_factory=dict)


def add_device_flags(parser):
    """Adds --device and --dtype."""
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', choices=DTYPES, help='default: bfloat16 on cuda, else float32')


def dtype_name(args):
    """The key of DTYPES that the flags of `add_device_flags` ask for."""
    return args.dtype or ('bfloat16' if args.device.startswith('cuda') else 'float32')


def add_tokenizer_flag(parser):
    """Adds --tokenizer, the argument of `load`."""
    parser.add_argument('--tokenizer', metavar='NAME|DIR',
                        help=f"{TOKENIZER_NAMES}, or the directory of a data set made with it; needed only if the "
                             "checkpoint's data set is no longer here")


def rows_at_once(model, length):
    """How many rows of `length` tokens one forward pass of generation takes, so that its logits fit into memory."""
    return max(1, LOGITS // (length * model.config.vocab_size))


def load(path, device='cpu', tokenizer=None):
    """The model at `path`: an out_dir (its newest checkpoint), a .pt file, a Hugging Face folder or one of HUB_MODELS.

    Args:
        tokenizer: name of the tokenizer, or directory of a data set made with it; needed only if the checkpoint's
            data set is gone.

    Raises SystemExit with one line when there is none.
    """
    device = check_device(device)
    named = named_tokenizer(tokenizer) if tokenizer else None
    if hf.is_model(path):
        folder = hf.local_folder(path)
        model = GPT.from_pretrained(folder)
        found = named or folder_tokenizer(folder, model.config.vocab_size)
        return Loaded(Path(path).name, folder, model.to(device).eval(), found)
    given = Path(path)
    path, state = checkpoint.load(path)
    state.pop('optimizer', None)
    best = checkpoint.path_of(given, checkpoint.BEST)
    if path.parent == given and best.exists() and not best.samefile(path):
        print(f'note: {path} is the newest; {best} had the lowest validation loss', file=sys.stderr)
    try:
        model = build(state)
        found = named or checkpoint_tokenizer(state)
    except Exception as error:  # whatever a foreign file's fields make torch or Python raise
        reason = ' '.join(str(error).split())[:200] or type(error).__name__
        raise SystemExit(f'{path}: not a model of this repository ({reason})') from None
    name = path.parent.resolve().name if path.name.startswith('ckpt_') else f'{path.parent.resolve().name}-{path.stem}'
    return Loaded(name, path, model.to(device).eval(), found, state)


def build(state):
    """The GPT of a checkpoint's `state`, whose weights are removed from it. Raises an exception if they do not fit."""
    weights, args = state.pop('model'), dict(state['model_args'])
    if 'data' not in state and 'scale_attn_by_inverse_layer_idx' in args:
        args.setdefault('gelu_approximate', 'tanh')  # the official repository's GELU
    # A model without memory comes first: it shows settings that fail, and sizes that the weights do not have.
    with torch.device('meta'):
        outline = GPT(GPTConfig(**args))
        outline(torch.zeros(1, 1, dtype=torch.int64))
    outline.load_state_dict(weights, assign=True)
    model = GPT(GPTConfig(**args))
    model.load_state_dict(weights)
    return model


def require_tokenizer(loaded):
    """SystemExit with one line that says how to get the tokenizer of `loaded`, unless it has one."""
    if loaded.tokenizer is not None:
        return
    size, dataset = loaded.model.config.vocab_size, loaded.state.get('config', {}).get('dataset')
    names = [name for name, tokenizer in TOKENIZERS.items() if tokenizer.vocab_size <= size]
    flag = f'give --tokenizer={"|".join([*names, "FILE.json", "DIR"])}, DIR being a data set made with it'
    if dataset and (ROOT / 'data' / dataset / 'prepare.py').is_file():
        flag = f'run python data/{dataset}/prepare.py, or {flag}'
    missing = f'its data set {dataset!r} is not here, with a meta.json that names the tokenizer' if dataset else \
        'it does not come with a tokenizer'
    raise SystemExit(f'{loaded.path}: {missing}; {flag}')


def with_tokenizer(loaded):
    """`loaded` with its vocabulary cut to that of its tokenizer, so that no padding is sampled."""
    require_tokenizer(loaded)
    if loaded.tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise SystemExit(f'{loaded.path}: the model has {loaded.model.config.vocab_size} ids, fewer than the tokenizer '
                         f'{loaded.tokenizer.name} ({loaded.tokenizer.vocab_size}); check --tokenizer')
    crop_vocab_size(loaded.model, loaded.tokenizer.vocab_size)
    return loaded


def crop_vocab_size(model, vocab_size):
    """Leaves out of a GPT the ids from `vocab_size` on, which pad the vocabulary and mean nothing."""
    embedding, head = model.transformer.wte, model.lm_head
    cropped = {id(p): nn.Parameter(p.detach()[:vocab_size].clone()) for p in (embedding.weight, *head.parameters())}
    for module in (embedding, head):
        for name, p in list(module.named_parameters()):
            setattr(module, name, cropped[id(p)])  # one for both, if the head is tied
    model.config.vocab_size = embedding.num_embeddings = head.out_features = vocab_size


def check_data(loaded, data):
    """SystemExit with one line unless the vocabulary of `data`, a `Bin`, has the size of the model's."""
    ids = loaded.tokenizer.vocab_size if loaded.tokenizer else loaded.model.config.vocab_size
    if data.vocab_size > ids or loaded.tokenizer and data.vocab_size != ids:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, that of {loaded.path} has '
                         f'{ids}; prepare the text with that one')


def named_tokenizer(name):
    """The tokenizer that --tokenizer asks for: one that `get_tokenizer` knows, or that of a data set's directory."""
    if not Path(name).is_dir():
        return get_tokenizer(name)
    meta = read_meta(name)
    if meta is None:
        raise SystemExit(f'--tokenizer={name}: a directory without the meta.json of a data set')
    return tokenizer_from_meta(meta)


def checkpoint_tokenizer(state):
    """The tokenizer that a checkpoint names, else that of its data set; None if the data set is gone."""
    meta, folder = state.get('tokenizer'), find_data(state)
    if meta is None and folder:
        meta = read_meta(folder)
        if meta is None and state['model_args'].get('vocab_size', 50304) >= 50257:
            meta = {'tokenizer': 'gpt2'}  # what data/loader.py assumes without a meta.json
    return tokenizer_from_meta(meta) if meta and 'tokenizer' in meta else None


def find_data(state, dataset=None):
    """The directory of a data set, by default the one a checkpoint was trained on; None if it is not here.

    Looks in the working directory, as train.py does, and in the repository. Of a mixture it returns the first part.
    """
    dataset = dataset or state.get('config', {}).get('dataset')
    places = [data_dir(name, root) for name in parts_of(dataset) for root in (Path(), ROOT)] if dataset else []
    return next((place for place in places if (place / 'meta.json').is_file() or (place / 'train.bin').is_file()), None)


def folder_tokenizer(folder, vocab_size):
    """The tokenizer of a Hugging Face folder; GPT-2's if it has none and the vocabulary has that size."""
    path = folder / 'tokenizer.json'
    if path.is_file():
        eot_id = hf.read_config(folder).get('eos_token_id')
        try:
            text = path.read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f'{path}: cannot be read ({error})') from None
        return FileTokenizer(text, eot_id if type(eot_id) is int and 0 <= eot_id < vocab_size else None, path)
    return get_tokenizer('gpt2') if vocab_size == 50257 else None
