"""Tokenizers for corpora and for sampling, by name or from a tokenizer.json.

All text is ordinary: `<|endoftext|>` inside a document is spelled out, never the end-of-text id.
"""

import functools
import inspect
import json
from pathlib import Path

from runtime.files import expanded, one_line

END_OF_TEXT = '<|endoftext|>'
END_OF_TEXT_NAMES = END_OF_TEXT, '<|end_of_text|>', '</s>', '<eos>'  # in the tokenizers of published models


class Tokenizer:
    """The interface of a tokenizer: the attributes below, `encode` (text to a list of ids) and `decode`.

    meta.json and checkpoints store the constructor's arguments, which must be attributes of the same names.
    """

    name = ''
    vocab_size = 0  # ids are 0 … vocab_size - 1
    eot_id = None  # the end-of-text id; None: documents are not separated

    @property
    def dtype(self):
        """Name of a bin's dtype."""
        return 'uint16' if self.vocab_size <= 2 ** 16 else 'uint32'

    @property
    def meta(self):
        """Entries of meta.json that describe the tokenizer."""
        return {'tokenizer': self.name, 'vocab_size': self.vocab_size, 'dtype': self.dtype, 'eot_id': self.eot_id,
                **{key: getattr(self, key) for key in self.arguments()}}

    @classmethod
    def arguments(cls):
        return list(inspect.signature(cls).parameters)


class GPT2(Tokenizer):
    """GPT-2's byte-pair encoding. tiktoken is only needed to encode and decode."""

    name, vocab_size, eot_id = 'gpt2', 50257, 50256

    @functools.cached_property
    def bpe(self):
        import tiktoken
        try:
            return tiktoken.get_encoding('gpt2')
        except OSError as error:  # errors of the requests library, too
            raise SystemExit(f'gpt2: cannot be downloaded ({type(error).__name__}); use --tokenizer=byte, or set '
                             'TIKTOKEN_CACHE_DIR to a folder that has it') from None

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode([int(i) for i in ids])


class Byte(Tokenizer):
    """UTF-8 bytes. 0 ends a document, so NUL becomes U+FFFD."""

    name, vocab_size, eot_id = 'byte', 256, 0

    def encode(self, text):
        return list(utf8(text.replace('\0', '\ufffd')))

    def decode(self, ids):
        return bytes(int(i) for i in ids).decode(errors='replace')


class Char(Tokenizer):
    """One id per character of `chars`, without an end-of-text id, as in nanoGPT's shakespeare_char."""

    name = 'char'

    def __init__(self, chars):
        self.chars, self.vocab_size = chars, len(chars)
        self.ids = {char: i for i, char in enumerate(chars)}

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise SystemExit(f'character {error} is not among the {self.vocab_size} of this vocabulary') from None

    def decode(self, ids):
        return ''.join(self.chars[int(i)] for i in ids)


class FileTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's package `tokenizers`. Checkpoints store its whole text."""

    name = 'tokenizer.json'

    def __init__(self, json, eot_id=None):
        import tokenizers
        self.json, self.eot_id = json, eot_id
        self.bpe = tokenizers.Tokenizer.from_str(json)
        self.vocab_size = 1 + max(self.bpe.get_vocab().values())
        self.bpe.encode_special_tokens = True  # encodes special tokens as ordinary text
        self.bpe.no_truncation()  # published files may truncate at 512 ids
        self.bpe.no_padding()

    @classmethod
    def from_file(cls, path):
        """Load a tokenizer.json. Documents end with the eos_token of the tokenizer_config.json next to it, by default
        with the first of END_OF_TEXT_NAMES in the vocabulary."""
        config, names = path.with_name('tokenizer_config.json'), END_OF_TEXT_NAMES
        try:
            tokenizer = cls(path.read_bytes().decode())
            if config.is_file() and (eos := json.loads(config.read_text(encoding='utf-8')).get('eos_token')):
                names = [eos['content'] if isinstance(eos, dict) else eos]
        except Exception as error:  # `tokenizers` raises plain Exception
            raise SystemExit(f'{path} or its tokenizer_config.json: cannot be read ({one_line(error)})') from None
        tokenizer.eot_id = next((i for i in map(tokenizer.bpe.token_to_id, names) if i is not None), None)
        if tokenizer.eot_id is None:
            raise SystemExit(f'{path}: has no end-of-text token ({", ".join(names)}); name it as "eos_token" in a '
                             'tokenizer_config.json next to it')
        return tokenizer

    def encode(self, text):
        return self.bpe.encode(utf8(text).decode(), add_special_tokens=False).ids

    def decode(self, ids):
        return self.bpe.decode([int(i) for i in ids], skip_special_tokens=False)


def utf8(text):
    """Encode text as UTF-8. Lone surrogates, which JSON allows, become U+FFFD, as in tiktoken."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').encode()


TOKENIZERS = {t.name: t for t in (GPT2, Byte, Char, FileTokenizer)}  # add your own class here
NAMED = [name for name, t in TOKENIZERS.items() if not t.arguments()]
TOKENIZER_NAMES = '|'.join([*NAMED, 'FILE.json', 'FOLDER', 'OWNER/NAME'])  # for the help of --tokenizer


def get_tokenizer(name):
    """Load 'gpt2', 'byte', a tokenizer.json or its folder, or the tokenizer of 'OWNER/NAME', a model on the Hub."""
    if name in NAMED:
        return TOKENIZERS[name]()
    path = Path(expanded(str(name), '--tokenizer='))
    inside = path / FileTokenizer.name
    if path.suffix == '.json' or inside.is_file():
        return FileTokenizer.from_file(inside if inside.is_file() else path)
    if str(name).count('/') == 1:
        from huggingface_hub import hf_hub_download
        hf_hub_download(name, 'tokenizer_config.json')  # goes to the same folder of the cache
        return FileTokenizer.from_file(Path(hf_hub_download(name, FileTokenizer.name)))
    raise SystemExit(f'--tokenizer={name}: unknown; pass {", ".join(NAMED)}, a tokenizer.json, its folder, or '
                     'OWNER/NAME on the Hub')


def identifying(meta):
    """Return the entries of meta.json that define the tokenizer: its name, and its constructor's arguments."""
    known = TOKENIZERS.get(meta['tokenizer'])
    return {key: meta[key] for key in ['tokenizer', *(known.arguments() if known else ())]}


def same_tokenizer(one, other):
    """Return whether two tokenizers, dicts from `identifying`, decode every shared id alike."""
    if one == other:
        return True
    if FileTokenizer.name not in (one['tokenizer'], other['tokenizer']):
        return False
    one, other = tokenizer_from_meta(one), tokenizer_from_meta(other)
    return all(one.decode([i]) == other.decode([i]) or i == one.eot_id == other.eot_id
               for i in range(min(one.vocab_size, other.vocab_size)))


def folder_meta(folder, vocab_size):
    """Return the `meta` of a Hugging Face folder's tokenizer, or None. Without a tokenizer.json it is GPT-2's if the
    vocabulary has that size."""
    path = Path(folder) / FileTokenizer.name
    if path.is_file():
        return FileTokenizer.from_file(path).meta
    is_gpt2 = vocab_size == GPT2.vocab_size and not path.with_name('vocab.json').is_file()
    return GPT2().meta if is_gpt2 else None


def check_same_tokenizer(data, meta, model):
    """Stop if a Bin and a model have different tokenizers. `meta`: of the model's tokenizer, or None if unknown."""
    if meta and not same_tokenizer(identifying(meta), data.tokenizer):
        raise SystemExit(f'{data.path}: its tokenizer ({data.tokenizer["tokenizer"]}) differs from that of {model} '
                         f'({meta["tokenizer"]}); prepare the data with the tokenizer of the model' + (
                             ', or both with byte, because char depends on the text' * (meta['tokenizer'] == 'char')))


def tokenizer_from_meta(meta):
    """Build the tokenizer of a meta.json, a dict. A KeyError means that TOKENIZERS lacks the class."""
    cls = TOKENIZERS[meta['tokenizer']]
    return cls(*(meta[key] for key in cls.arguments()))
