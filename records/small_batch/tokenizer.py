"""Trains the tokenizer of this study: byte-level byte-pair encoding with 8,000 ids, of which one ends a document.

  python records/small_batch/tokenizer.py BOOKS.txt data/books_bpe.json
"""

import sys
from pathlib import Path

import tokenizers

END_OF_TEXT = '<|endoftext|>'

if __name__ == '__main__':
    books, output = map(Path, sys.argv[1:])
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(books.read_text(encoding='utf-8').split(END_OF_TEXT), tokenizers.trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    bpe.save(str(output))
