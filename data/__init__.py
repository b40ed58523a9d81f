"""Corpora: `NAME/prepare.py` makes the bins of one corpus with the tokenizers, sources and writer of this package."""
