"""What the scripts that use a trained model share: the model and its tokenizer, from wherever they are."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.loader import data_dir, read_meta
from data.tokenizer import TOKENIZERS, Tokenizer, get_tokenizer, tokenizer_from_meta
from model import GPT, GPTConfig
from runtime import checkpoint, hf
from runtime.device import DTYPES, check_device

LOGITS = 2 ** 29  # at most so many in one forward pass of generation: 2 GiB in float32
MODEL_HELP = 'out_dir (its newest checkpoint), .pt file, Hugging Face folder, or ' + ', '.join(hf.HUB_MODELS)


@dataclass
class Loaded:
    """A model in eval mode and what belongs to it.

    name: short, for tables. tokenizer: None where it is unknown. state: the checkpoint without its weights; {} for a
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
                        help=f'{", ".join(TOKENIZERS)}, or the directory of a data set made with the tokenizer; needed '
                             "only if the checkpoint's data set is no longer here")


def rows_at_once(model, length):
    """How many rows of `length` tokens one forward pass of generation takes, so that its logits fit into memory."""
    return max(1, LOGITS // (length * model.config.vocab_size))


def load(path, device='cpu', tokenizer=None):
    """The model at `path`: an out_dir (its newest checkpoint), a .pt file, a Hugging Face folder, or a hf.HUB_MODELS.

    Args:
        tokenizer: name of the tokenizer, or directory of a data set made with it; needed only where the checkpoint's
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
    """The GPT of a checkpoint's `state`, from which its weights are taken. Raises something if they make no model."""
    weights, args = state.pop('model'), dict(state['model_args'])
    if 'data' not in state and 'scale_attn_by_inverse_layer_idx' in args:
        args.setdefault('gelu_approximate', 'tanh')  # of the official repository, whose GELU that is
    # First without memory: sizes that the weights do not have are not allocated, settings out of range not accepted.
    with torch.device('meta'):
        outline = GPT(GPTConfig(**args))
        outline(torch.zeros(1, 1, dtype=torch.int64))
    outline.load_state_dict(weights, assign=True)
    model = GPT(GPTConfig(**args))
    model.load_state_dict(weights)
    return model


def require_tokenizer(loaded):
    """SystemExit with one line that says where to get the tokenizer of `loaded`, unless it has one."""
    if loaded.tokenizer is not None:
        return
    size, dataset = loaded.model.config.vocab_size, loaded.state.get('config', {}).get('dataset')
    names = [name for name, tokenizer in TOKENIZERS.items() if tokenizer.vocab_size <= size]
    flag = f'give --tokenizer={"|".join([*names, "DIR"])}, DIR being that of a data set made with it'
    if dataset and (ROOT / 'data' / dataset / 'prepare.py').is_file():
        flag = f'run python data/{dataset}/prepare.py, or {flag}'
    missing = f'its data set {dataset!r} is not here, with a meta.json that names the tokenizer' if dataset else \
        'it does not come with a tokenizer'
    raise SystemExit(f'{loaded.path}: {missing}; {flag}')


def with_tokenizer(loaded):
    """`loaded`, its vocabulary cut to that of its tokenizer: for what reads or writes text. SystemExit without one."""
    require_tokenizer(loaded)
    if loaded.tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise SystemExit(f'{loaded.path}: a model of {loaded.model.config.vocab_size} ids is not one for the tokenizer '
                         f'{loaded.tokenizer.name}, which has {loaded.tokenizer.vocab_size}; check --tokenizer')
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
    """SystemExit with one line unless the tokens of `data`, which has a `Bin`'s path and vocab_size, are of the model's
    tokenizer, as far as the number of ids tells."""
    ids = loaded.tokenizer.vocab_size if loaded.tokenizer else loaded.model.config.vocab_size
    if data.vocab_size > ids or loaded.tokenizer and data.vocab_size != ids:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, the one of {loaded.path} has '
                         f'{ids}; prepare the text again with the right one')


def named_tokenizer(name):
    """The tokenizer that --tokenizer asks for: one of TOKENIZERS, or that of the data set in the directory `name`."""
    if name in TOKENIZERS or str(name).endswith('.json'):
        return get_tokenizer(name)
    meta = read_meta(name)
    if meta is None:
        raise SystemExit(f'--tokenizer={name}: neither one of {", ".join(TOKENIZERS)} nor a directory with a meta.json')
    return tokenizer_from_meta(meta)


def checkpoint_tokenizer(state):
    """The tokenizer that a checkpoint names, else that of its data set; None where the data set is gone."""
    meta, folder = state.get('tokenizer'), find_data(state)
    if meta is None and folder:
        meta = read_meta(folder)
        if meta is None and state['model_args'].get('vocab_size', 50304) >= 50257:
            meta = {'tokenizer': 'gpt2'}  # as loader.py takes bins without meta.json
    return tokenizer_from_meta(meta) if meta and 'tokenizer' in meta else None


def find_data(state, dataset=None):
    """The directory of a data set, by default the one a checkpoint was trained on; None where it is not here.

    It is looked for from the working directory, as train.py does, and from the repository.
    """
    dataset = dataset or state.get('config', {}).get('dataset')
    places = [data_dir(dataset), data_dir(dataset, ROOT)] if dataset else []
    return next((place for place in places if (place / 'meta.json').is_file() or (place / 'train.bin').is_file()), None)


class FolderTokenizer(Tokenizer):
    """The tokenizer.json of a Hugging Face folder, through the package `tokenizers`."""

    def __init__(self, path, eot_id):
        try:
            import tokenizers
            self.bpe = tokenizers.Tokenizer.from_file(str(path))
        except ImportError:
            raise SystemExit(f'{path}: needs the package tokenizers: pip install tokenizers') from None
        except Exception as error:  # `tokenizers` raises plain Exception for a file it cannot read
            raise SystemExit(f'{path}: not a tokenizer ({error})') from None
        self.bpe.encode_special_tokens = True  # means: encode them like any other text
        self.name, self.vocab_size, self.eot_id = str(path), self.bpe.get_vocab_size(), eot_id

    def encode(self, text):
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.bpe.decode([int(i) for i in ids], skip_special_tokens=False)


def folder_tokenizer(folder, vocab_size):
    """The tokenizer of a Hugging Face folder; GPT-2's where it brings none and the vocabulary has that size."""
    if (folder / 'tokenizer.json').is_file():
        eot_id = hf.read_config(folder).get('eos_token_id')
        known = type(eot_id) is int and 0 <= eot_id < vocab_size
        return FolderTokenizer(folder / 'tokenizer.json', eot_id if known else None)
    return get_tokenizer('gpt2') if vocab_size == 50257 else None
