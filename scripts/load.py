"""What the scripts that use a trained model share: the model and its tokenizer, from where they are."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.loader import data_dir, read_meta
from data.tokenizer import TOKENIZERS, Tokenizer, get_tokenizer, tokenizer_from_meta
from model import GPT, GPTConfig
from runtime import checkpoint, hf
from runtime.device import check_device

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
MODEL_HELP = 'out_dir (its newest checkpoint), .pt file, Hugging Face folder, or ' + ', '.join(hf.HUB_MODELS)


@dataclass
class Loaded:
    """A model in eval mode and what belongs to it.

    name: short, for tables. tokenizer: None where it is not known. state: the checkpoint without its weights; {} for a
    Hugging Face model.
    """
    name: str
    path: Path
    model: GPT
    tokenizer: Tokenizer | None
    state: dict = field(default_factory=dict)


def load(path, device='cpu', tokenizer=None):
    """The model at `path`: an out_dir (its newest checkpoint), a .pt file, a Hugging Face folder, one of hf.HUB_MODELS.

    Args:
        tokenizer: name of the tokenizer; needed only where the checkpoint's data set is gone.

    Raises SystemExit with one line when there is none.
    """
    device = check_device(device)
    if hf.is_model(path):
        folder = hf.local_folder(path)
        model = GPT.from_pretrained(folder)
        found = get_tokenizer(tokenizer) if tokenizer else folder_tokenizer(folder, model.config.vocab_size)
        return Loaded(Path(path).name, folder, model.to(device).eval(), found)
    given = Path(path)
    path, state = checkpoint.load(path)
    state.pop('optimizer', None)
    best = checkpoint.path_of(given, checkpoint.BEST)
    if path.parent == given and best.exists() and not best.samefile(path):
        print(f'note: {path} is the newest; {best} had the lowest validation loss', file=sys.stderr)
    if 'data' not in state and 'scale_attn_by_inverse_layer_idx' in state['model_args']:
        state['model_args'].setdefault('gelu_approximate', 'tanh')  # of the official repository, whose GELU that is
    try:
        model = GPT(GPTConfig(**state['model_args']))
        # nanoGPT saves the compiled model, whose names begin so.
        model.load_state_dict({key.removeprefix('_orig_mod.'): w for key, w in state.pop('model').items()})
    except (TypeError, RuntimeError) as error:
        raise SystemExit(f'{path}: not a model of this repository ({" ".join(str(error).split())[:200]})') from None
    found = get_tokenizer(tokenizer) if tokenizer else checkpoint_tokenizer(state)
    name = path.parent.resolve().name if path.name.startswith('ckpt_') else f'{path.parent.resolve().name}-{path.stem}'
    return Loaded(name, path, model.to(device).eval(), found, state)


def with_tokenizer(loaded):
    """`loaded`, its vocabulary cut to that of its tokenizer: for what reads or writes text. SystemExit without one."""
    if loaded.tokenizer is None:
        raise SystemExit(f'{loaded.path}: the data set {loaded.state["config"]["dataset"]!r} it was trained on is not '
                         f'here to name the tokenizer; give --tokenizer={"|".join(TOKENIZERS)}')
    if loaded.tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise SystemExit(f'{loaded.path}: a model of {loaded.model.config.vocab_size} ids is not one for the tokenizer '
                         f'{loaded.tokenizer.name}, which has {loaded.tokenizer.vocab_size}; check --tokenizer')
    loaded.model.crop_vocab_size(loaded.tokenizer.vocab_size)
    return loaded


def check_data(loaded, data):
    """SystemExit with one line unless the tokens of `data`, which has a `Bin`'s path and vocab_size, are of the model's
    tokenizer, as far as the number of ids tells."""
    ids = loaded.tokenizer.vocab_size if loaded.tokenizer else loaded.model.config.vocab_size
    if data.vocab_size > ids or loaded.tokenizer and data.vocab_size != ids:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, the one of {loaded.path} has '
                         f'{ids}; prepare the text again with the right one')


def checkpoint_tokenizer(state):
    """The tokenizer that a checkpoint names, else that of its data set; None where the data set is gone."""
    meta, folder = state.get('tokenizer'), find_data(state)
    if meta is None and folder:
        meta = read_meta(folder) or {'tokenizer': 'gpt2'}  # as loader.py takes bins without meta.json
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
