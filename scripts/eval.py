"""Measures validation loss, perplexity and bits per byte of a trained model, on bins or on a text file.

  python scripts/eval.py out/gpt2-small-sophiag                          the validation set it was trained with
  python scripts/eval.py gpt2 --dataset=openwebtext --stride=512         each token sees at least 512 before it
  python scripts/eval.py out/quickstart --text=README.md
  torchrun --standalone --nproc_per_node=8 scripts/eval.py out/gpt2-small-sophiag

Without --stride, the text is cut into sequences of block_size tokens, as train.py does; an incomplete one at the end is
left out. With --stride, sequences start that many tokens apart, and in each only the tokens that no earlier one had
count, so every token but the first counts once. One line of JSON goes to standard output, of a mixture of data sets one
for each part.
"""

import argparse
import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.load import (
    MODEL_HELP,
    add_device_flags,
    add_tokenizer_flag,
    check_data,
    dtype_name,
    find_data,
    load,
    require_tokenizer,
)
from data.loader import Bin, ValidationLoader, as_tensor, data_dir, on_device, parts_of
from data.sources import open_text, txt_pieces
from data.tokenizer import Byte, Char
from runtime.device import autocast
from runtime.distributed import World


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--dataset', help="a directory under data/, or a path (default: the checkpoint's own)")
    parser.add_argument('--split', choices=('val', 'train'), default='val', help='(default: val)')
    parser.add_argument('--text', type=Path, help='a UTF-8 text file instead of bins')
    parser.add_argument('--stride', type=int, default=0, help='slide the context by so many tokens')
    parser.add_argument('--eval_iters', type=int, default=0, help='micro-batches, as in train.py; 0: everything')
    parser.add_argument('--batch_size', type=int, default=8, help='sequences per forward pass and device (default: 8)')
    parser.add_argument('--block_size', type=int, default=0, help="tokens per sequence (default: the model's)")
    add_device_flags(parser)
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    if args.text and args.dataset:
        parser.error('--text and --dataset: give one of them')
    if args.stride and args.eval_iters:
        parser.error('--stride evaluates everything: leave out --eval_iters')
    if min(args.stride, args.eval_iters, args.block_size) < 0 or args.batch_size < 1:
        parser.error('--stride, --eval_iters and --block_size must be 0 or more, --batch_size at least 1')
    return args


class Text(Bin):
    """A text file as a Bin, tokenized as data/text/prepare.py does: <|endoftext|> divides documents."""

    def __init__(self, path, tokenizer):
        ids = []
        try:
            with open_text(path) as file:
                for text, ends in txt_pieces(file):
                    ids += [*tokenizer.encode(text), *[tokenizer.eot_id] * (ends and tokenizer.eot_id is not None)]
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise SystemExit(f'{path}: cannot be read as UTF-8 text ({error})') from None
        if ids and tokenizer.eot_id is not None:
            ids.pop()  # nothing comes after the last document
        self.path, self.vocab_size = path, tokenizer.vocab_size
        self.tokens = np.array(ids, dtype=tokenizer.dtype)
        if len(self) < 2:
            raise SystemExit(f'{path}: fewer than two tokens of text')


class SlidingLoader(ValidationLoader):
    """Overlapping sequences, as a ValidationLoader yields them: targets that an earlier sequence had are -1."""

    def __init__(self, data, stride, batch_size, block_size, rank, world_size, device):
        # Sequences end at block_size, block_size + stride, … and at the last token, and start block_size before that.
        self.ends = np.append(np.arange(block_size, len(data) - 1, stride), len(data) - 1)
        self.counted = np.diff(self.ends, prepend=0)
        self.mine = np.arange(len(self.ends))[rank::world_size]
        self.data, self.batch_size, self.block_size, self.device = data, batch_size, block_size, torch.device(device)

    def __iter__(self):
        for i in range(0, len(self.mine), self.batch_size):
            mine = self.mine[i:i + self.batch_size]
            tokens = self.data.sequences(self.ends[mine] - self.block_size, self.block_size + 1)
            batch = on_device(as_tensor(tokens), self.device)
            inputs, targets = batch[:, :-1], batch[:, 1:].clone()
            for row, counted in zip(targets, self.counted[mine]):
                row[:-counted] = -1
            yield inputs, targets


def bytes_per_id(tokenizer):
    """(vocab_size,) int64: how many bytes of text each id stands for, 0 for the end of text; None if unknown."""
    bpe = getattr(tokenizer, 'bpe', None)
    if isinstance(tokenizer, Byte):
        sizes = [1] * tokenizer.vocab_size
    elif isinstance(tokenizer, Char):
        sizes = [len(char.encode()) for char in tokenizer.chars]
    elif hasattr(bpe, 'decode_single_token_bytes'):  # tiktoken
        sizes = [len(bpe.decode_single_token_bytes(i)) for i in range(tokenizer.vocab_size)]
    elif 'ByteLevel' in type(getattr(bpe, 'decoder', None)).__name__:  # tokenizers, one character for each byte
        added = bpe.get_added_tokens_decoder()
        sizes = [len(added[i].content.encode()) if i in added else len(bpe.id_to_token(i) or '')
                 for i in range(tokenizer.vocab_size)]
    else:
        return None
    if tokenizer.eot_id is not None:
        sizes[tokenizer.eot_id] = 0
    return torch.tensor(sizes)


@torch.no_grad()
def evaluate(model, batches, world, precision, sizes=None):
    """(loss, tokens, bytes) of the (inputs, targets) batches of all ranks: the mean cross-entropy in nats, over what.

    Args:
        precision: a context manager, as `runtime.device.autocast` makes it.
        sizes: `bytes_per_id`; without, bytes is 0.
    """
    total = world.zeros(3)
    for X, Y in tqdm(batches, unit='batch', disable=not (world.is_master and sys.stderr.isatty())):
        with precision:
            loss = model(X, Y, return_logits=False)[1]
        counted = Y[Y >= 0]
        if not len(counted):  # padding of this rank's share, which has no mean loss
            continue
        total[0] += loss.to(total) * len(counted)
        total[1] += len(counted)
        if sizes is not None:
            total[2] += sizes[counted].sum()
    loss_sum, tokens, n_bytes = world.sum(total).tolist()
    return loss_sum / tokens, int(tokens), int(n_bytes)


def measure(loaded, data, args, world):
    """What the script prints about `loaded` on `data`, a Bin: a dict. Collective: every rank must call it."""
    check_data(loaded, data)
    positions = loaded.model.config.block_size
    block_size = args.block_size or positions
    if block_size > positions:
        raise SystemExit(f'--block_size={block_size}: the model has {positions} positions')
    if args.text or args.stride:
        block_size = min(block_size, len(data) - 1)
    if args.stride > block_size:
        raise SystemExit(f'--stride={args.stride}: would skip tokens between sequences of {block_size}')
    share = world.rank, world.size, world.device
    if args.stride:
        batches = SlidingLoader(data, args.stride, args.batch_size, block_size, *share)
    else:
        batches = ValidationLoader(data, args.eval_iters * args.batch_size, args.batch_size, block_size, *share)
    sizes = bytes_per_id(loaded.tokenizer) if loaded.tokenizer else None
    loss, tokens, n_bytes = evaluate(loaded.model, batches, world, autocast(world.device, dtype_name(args)),
                                     None if sizes is None else sizes.to(world.device))
    result = dict(checkpoint=str(loaded.path), iter=loaded.state.get('iter_num'), data=str(data.path),
                  block_size=block_size, stride=args.stride or block_size, tokens=tokens, loss=loss,
                  perplexity=math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf)
    if n_bytes:
        result |= dict(bytes=n_bytes, bits_per_byte=loss * tokens / n_bytes / math.log(2))
    return result


def main(argv=None):
    args = parse(argv)
    world = World(args.device, 'nccl' if args.device.startswith('cuda') else 'gloo')
    loaded = load(args.checkpoint, world.device, args.tokenizer)
    if args.text:
        require_tokenizer(loaded)
        found = [Text(args.text, loaded.tokenizer)]
    else:
        dataset = args.dataset or loaded.state.get('config', {}).get('dataset')
        if not dataset:
            raise SystemExit(f'{args.checkpoint}: does not name a data set to evaluate on; give --dataset or --text')
        found = [Bin(find_data(loaded.state, name) or data_dir(name), args.split) for name in parts_of(dataset)]
    torch.set_float32_matmul_precision('high')  # as in train.py
    for data in found:
        result = measure(loaded, data, args, world)
        if world.is_master:
            # JSON has neither infinity nor NaN.
            print(json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                              for key, value in result.items()}))
    world.close()


if __name__ == '__main__':
    main()
