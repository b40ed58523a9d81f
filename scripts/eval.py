"""Measure validation loss, perplexity and bits per byte of a trained model.

  python scripts/eval.py out/gpt2-small-sophiag                          on its data set
  python scripts/eval.py gpt2 --dataset=openwebtext

The tokens are cut into sequences of block_size, as in train.py, without an incomplete one at the end. Prints a line of
JSON, for a mixture of data sets a line for each part.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.loader import ValidationLoader
from data.tokenizer import GPT2, Byte, Char
from loss import cross_entropy
from runtime.arguments import at_least
from runtime.device import autocast, set_matmul_precision
from runtime.files import one_line_errors
from scripts.load import MODEL_HELP, add_model_flags, dtype_name, load, open_bins


def bytes_per_id(tokenizer):
    """Return the number of text bytes of each id, (vocab_size,) int64, 0 for the end of text.

    None if the ids do not tell: a tokenizer.json may normalize the text, or leave out a part of it.
    """
    if isinstance(tokenizer, Byte):
        sizes = [1] * tokenizer.vocab_size
    elif isinstance(tokenizer, Char):
        sizes = [len(char.encode()) for char in tokenizer.chars]
    elif isinstance(tokenizer, GPT2):
        sizes = [len(tokenizer.bpe.decode_single_token_bytes(i)) for i in range(tokenizer.vocab_size)]
    else:
        return None
    if tokenizer.eot_id is not None:
        sizes[tokenizer.eot_id] = 0
    return torch.tensor(sizes)


@torch.no_grad()
def measure(loaded, data, args):
    """Return the results of `loaded` on `data`, a Bin, as a dict."""
    block_size, precision = loaded.model.config.block_size, autocast(args.device, dtype_name(args))
    batches = ValidationLoader(data, args.eval_sequences, args.batch_size, block_size, 0, 1, args.device)
    total, counts = 0.0, torch.zeros(data.vocab_size, dtype=torch.int64)  # of each id
    for X, Y in tqdm(batches, unit='batch', disable=None):  # on a terminal only
        with precision:
            # A copy, because GPT.forward may mask targets in place: the loss is over all of them, as val/loss is.
            total += cross_entropy(loaded.model(X, Y.clone())[0], Y).double().sum().item()
        counts += Y[Y >= 0].cpu().bincount(minlength=len(counts))
    tokens = counts.sum().item()
    loss = total / tokens
    result = dict(checkpoint=str(loaded.path), iter=loaded.state.get('iter_num'), data=str(data.path),
                  block_size=block_size, tokens=tokens, loss=loss, perplexity=float(np.exp(loss)))
    sizes = bytes_per_id(loaded.tokenizer)
    if sizes is not None:
        n_bytes = (counts * sizes[:len(counts)]).sum().item()
    else:  # in proportion, because only the whole split's are known
        n_bytes = tokens * (data.text_bytes or 0) / len(data)
    if n_bytes:
        result |= dict(bytes=round(n_bytes), bits_per_byte=loss * tokens / n_bytes / math.log(2))
    else:
        print(f'note: {data.path}: no bits_per_byte, because its meta.json does not have the bytes of the text; '
              'prepare the data again', file=sys.stderr)
    return result


@one_line_errors()
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--dataset', help="a directory under data/, or a path (default: the checkpoint's)")
    parser.add_argument('--eval_sequences', type=at_least(0), default=0, help='as in train.py; 0 (default): all')
    parser.add_argument('--batch_size', type=at_least(1), default=8, help='sequences per forward pass (default: 8)')
    add_model_flags(parser)
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device, args.tokenizer)
    set_matmul_precision(dtype_name(args))
    for data in open_bins(loaded, args.dataset, 'val'):
        print(json.dumps(measure(loaded, data, args)))


if __name__ == '__main__':
    main()
