"""Tokenizers by name: text to ids and back, for the corpora and for sampling.

All text is ordinary: `<|endoftext|>` written inside a document is spelled out, never the end-of-text id.
"""

import os

import numpy as np


class Tokenizer:
    """What every tokenizer has: `name`, `vocab_size` (ids are 0 … vocab_size - 1), `eot_id` (the id that ends a
    document; None where documents are not separated), `dtype` (of a bin), and encode, encode_batch, decode."""

    name, vocab_size, eot_id = '', 0, None

    @property
    def dtype(self):
        return 'uint16' if self.vocab_size <= 2 ** 16 else 'uint32'

    @property
    def meta(self):
        """The part of a meta.json that `tokenizer_from_meta` and the readers of a bin need."""
        return {'tokenizer': self.name, 'vocab_size': self.vocab_size, 'dtype': self.dtype, 'eot_id': self.eot_id}

    def encode_batch(self, texts):
        """One list or array of ids for each text."""
        return [self.encode(text) for text in texts]


class GPT2(Tokenizer):
    """GPT-2's byte-pair encoding, through tiktoken."""

    name, vocab_size, eot_id = 'gpt2', 50257, 50256

    def __init__(self):
        try:
            import tiktoken
            self.bpe = tiktoken.get_encoding('gpt2')
        except ImportError:
            raise SystemExit('tokenizer gpt2 needs the package tiktoken: pip install tiktoken') from None
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; a damaged download is a ValueError
            raise SystemExit(
                f'tokenizer gpt2: its vocabulary is not cached and could not be downloaded ({type(error).__name__}). '
                'Where there is network, run TIKTOKEN_CACHE_DIR=DIR python -c "import tiktoken; '
                'tiktoken.get_encoding(\'gpt2\')", bring DIR here, and set TIKTOKEN_CACHE_DIR to it') from None

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode([int(i) for i in ids])


class Byte(Tokenizer):
    """UTF-8 bytes; 0 ends a document, so NUL, which UTF-8 writes as 0, becomes U+FFFD in text."""

    name, vocab_size, eot_id = 'byte', 256, 0

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        return [np.frombuffer(utf8(text.replace('\0', '\ufffd')), dtype=np.uint8) for text in texts]

    def decode(self, ids):
        return bytes(int(i) for i in ids).decode(errors='replace')


class GPTNeoX(Tokenizer):
    """The GPT-NeoX-20B tokenizer, through the optional package `tokenizers`.

    Its file is tokenizer.json of EleutherAI/gpt-neox-20b on the Hub, or the local file GPT_NEOX_TOKENIZER names.
    """

    name, vocab_size, eot_id = 'gpt-neox-20b', 50277, 0
    revision = 'c292233c833e336628618a88a648727eb3dff0a7'

    def __init__(self):
        # The writer runs one process per core; threads inside each of them would only get in one another's way.
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
        path = os.environ.get('GPT_NEOX_TOKENIZER')
        try:
            import tokenizers
            if not path:
                from huggingface_hub import hf_hub_download
                path = hf_hub_download('EleutherAI/gpt-neox-20b', 'tokenizer.json', revision=self.revision)
            self.bpe = tokenizers.Tokenizer.from_file(path)
        except ImportError as error:
            missing = error.name
            raise SystemExit(f'tokenizer {self.name} needs the package {missing}: pip install {missing}') from None
        except Exception as error:  # `tokenizers` raises plain Exception for a file it cannot read
            where = path or 'the Hub'
            raise SystemExit(f'tokenizer {self.name}: cannot be loaded from {where} ({type(error).__name__}); set '
                             'GPT_NEOX_TOKENIZER to the tokenizer.json of EleutherAI/gpt-neox-20b') from None
        if self.bpe.get_vocab_size() != self.vocab_size or self.bpe.token_to_id('<|endoftext|>') != self.eot_id:
            raise SystemExit(f'{path}: {self.bpe.get_vocab_size()} ids, not the 50,277 of GPT-NeoX-20B')
        self.bpe.encode_special_tokens = True  # means: encode them like any other text

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        texts = [utf8(text).decode() for text in texts]
        return [encoding.ids for encoding in self.bpe.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids):
        return self.bpe.decode([int(i) for i in ids], skip_special_tokens=False)


class Char(Tokenizer):
    """One id per character of `chars`, nothing between documents: nanoGPT's shakespeare_char."""

    name = 'char'

    def __init__(self, chars):
        self.chars, self.vocab_size = chars, len(chars)
        self.ids = {char: i for i, char in enumerate(chars)}

    @property
    def meta(self):
        return {**super().meta, 'chars': self.chars}

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise SystemExit(f'character {error} is not among the {self.vocab_size} of this vocabulary: '
                             f'{self.chars!r}') from None

    def decode(self, ids):
        return ''.join(self.chars[int(i)] for i in ids)


def utf8(text):
    """The bytes of a text; lone surrogates (JSON can carry them) become U+FFFD, as in tiktoken."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').encode()


TOKENIZERS = {t.name: t for t in (GPT2, Byte, GPTNeoX)}


def get_tokenizer(name):
    """The tokenizer of that name: 'gpt2', 'byte' or 'gpt-neox-20b'. SystemExit with one line when it cannot be had."""
    if name not in TOKENIZERS:
        raise SystemExit(f'tokenizer {name!r} is unknown; there are {", ".join(TOKENIZERS)}')
    return TOKENIZERS[name]()


def tokenizer_from_meta(meta):
    """The tokenizer that the bins of a meta.json (its dict) were made with."""
    return Char(meta['chars']) if meta['tokenizer'] == 'char' else get_tokenizer(meta['tokenizer'])
