"""Measure the validation loss, perplexity and bits per byte of a trained model.

  python scripts/eval.py out/gpt2-small-sophiag                          on its data set
  python scripts/eval.py gpt2 --dataset=openwebtext

Sequences have block_size tokens, as in train.py. Prints a line of JSON, or one for each part of a mixture of data sets.
bits_per_byte takes the bytes per token of the whole split.
"""

import json
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.loader import ValidationLoader
from loss import cross_entropy
from runtime.arguments import argument_parser, at_least
from runtime.device import autocast, set_matmul_precision
from runtime.files import one_line_errors
from scripts.load import MODEL_HELP, add_model_flags, dtype_name, load, open_bins


@torch.no_grad()
def measure(loaded, data, args):
    """Evaluate `loaded` on a Bin and return the results as a dict."""
    block_size, precision = loaded.model.config.block_size, autocast(args.device, dtype_name(args))
    batches = ValidationLoader(data, args.eval_sequences, args.batch_size, block_size, 0, 1, args.device)
    total, tokens = 0.0, 0
    for X, Y in tqdm(batches, unit='batch', disable=None):  # only shown on a terminal
        with precision:
            # A copy, because GPT.forward may mask targets in place; like val/loss, this loss counts all targets.
            total += cross_entropy(loaded.model(X, Y.clone())[0], Y).double().sum().item()
        tokens += (Y >= 0).sum().item()
    loss = total / tokens
    result = dict(checkpoint=str(loaded.path), iter=loaded.state.get('iter_num'), data=str(data.path),
                  block_size=block_size, tokens=tokens, loss=loss, perplexity=math.exp(loss))
    if data.bytes_per_token and not data.lost:
        result['bits_per_byte'] = loss / math.log(2) / data.bytes_per_token
    else:
        why = f'the tokenizer loses {data.lost:.1%} of the text' if data.lost else "the text's bytes are unknown"
        print(f'note: {data.path}: no bits_per_byte, because {why}', file=sys.stderr)
    return result


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--dataset', help="a directory under data/, or a path (default: the checkpoint's)")
    parser.add_argument('--eval_sequences', type=at_least(0), default=0, help='as in train.py; 0 (default): all')
    parser.add_argument('--batch_size', type=at_least(1), default=8, help='sequences at a time (default: %(default)s)')
    add_model_flags(parser)
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device, args.tokenizer)
    set_matmul_precision(dtype_name(args))
    for data in open_bins(loaded, args.dataset, 'val'):
        print(json.dumps(measure(loaded, data, args)))


if __name__ == '__main__':
    main()
