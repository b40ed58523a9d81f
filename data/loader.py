"""Mini-batches from memory-mapped bins, in an order that depends only on seed and iteration, and validation sets."""

import functools
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from data.tokenizer import GPT2, FileTokenizer, identifying
from runtime.files import expanded, warn
from runtime.rng import AUGMENTATION, SEQUENCES, keyed_bits, keyed_generator

warn_once = functools.cache(warn)
is_dir = os.path.isdir  # noqa: PTH112 - Path.is_dir raises if the text of a mixture is too long for a file name


def sequence_starts(seed, iteration, n, num_tokens, block_size, weights=(1.0,)):
    """Draw the starts of a mini-batch's `n` sequences of block_size + 1 tokens uniformly: int64 (n,).

    For a mixture, `num_tokens` is a list, and starts index the concatenation of its parts. No sequence crosses from one
    part to the next. The `weights` of the parts sum to 1.
    """
    fraction = (keyed_bits(seed, SEQUENCES, iteration, n) >> np.uint64(11)) * 2.0 ** -53
    sizes, edges = np.atleast_1d(num_tokens), np.cumsum([0.0, *weights])
    part = np.minimum(np.searchsorted(edges, fraction, side='right'), len(sizes)) - 1
    inside = (fraction - edges[part]) / np.diff(edges)[part]
    choices = sizes[part] - block_size
    offset = np.minimum((inside * choices).astype(np.int64), choices - 1)
    return (np.cumsum(sizes) - sizes)[part] + offset


def data_dir(dataset):
    """Return the directory of --dataset: data/DATASET or DATASET, the first that exists, here or next to train.py."""
    path, root = Path(expanded(str(dataset), '--dataset=')), Path(__file__).resolve().parents[1]
    found = [place for place in ('data' / path, path, root / 'data' / path, root / path) if is_dir(place)]
    return found[0] if found else path if len(path.parts) > 1 else 'data' / path


def first_dir(dataset):
    """Return the directory of --dataset, or of the first part of a mixture."""
    return data_dir(next(iter(parts_of(dataset))))


class Bin:
    """One split of a data set, memory-mapped. `weight`: its share of a Mixture."""

    def __init__(self, data_dir, split, weight=1.0, block_size=0):
        self.path, self.weight = Path(data_dir) / f'{split}.bin', weight
        if not self.path.is_file():
            raise SystemExit(f'{self.path}: no such file; --dataset is a directory made by a prepare.py, for your own '
                             'text by data/text/prepare.py')
        meta, size = read_meta(data_dir), self.path.stat().st_size
        dtype = np.dtype(meta['dtype']).newbyteorder('<')
        tokens = meta[split]['tokens'] if split in meta else size // dtype.itemsize
        if not size or size != tokens * dtype.itemsize:
            raise SystemExit(f'{self.path}: empty or incomplete ({size} bytes for {tokens} tokens in {dtype.name}); '
                             'prepare it again with --overwrite')
        if tokens <= block_size:
            raise SystemExit(f'{self.path}: {tokens} tokens are too few for block_size = {block_size}; set '
                             f'--block_size to at most {tokens - 1}, or prepare it with more text (--val_fraction)')
        self.tokens = np.memmap(self.path, dtype=dtype, mode='r')
        if split not in meta and not self.tokens[1:2 ** 20:2].any():
            raise SystemExit(f'{self.path}: looks like uint32 (every second id is 0), but no meta.json says so; add '
                             'one, see docs/data.md, or prepare the data again')
        self.vocab_size, self.tokenizer = meta['vocab_size'], identifying(meta)
        known = meta.get(split, {})
        self.lost = known.get('lost', 0)  # share of the text's characters that the tokenizer loses
        self.bytes_per_token = known['bytes'] / tokens if 'bytes' in known else None

    def __len__(self):
        return len(self.tokens)

    def sequences(self, starts, length):
        """Return the tokens (len(starts), length) in the file's dtype."""
        return self.check_ids(np.stack([self.tokens[s:s + length] for s in starts]))

    def check_ids(self, tokens):
        """Return `tokens`. Exit if an id is beyond the vocabulary."""
        top = int(tokens.max())
        if top >= self.vocab_size:
            raise SystemExit(f'{self.path}: token id {top} is beyond the vocabulary of {self.vocab_size}; '
                             'prepare it again (ids above 65,535 need a meta.json that says uint32)')
        return tokens

    def samples(self):
        """Return up to 64 evenly spaced blocks of the split, with its first and its last token: (blocks, tokens)."""
        length = min(2 ** 14, len(self))
        starts = np.linspace(0, len(self) - length, 64).astype(np.int64)
        return np.stack([self.tokens[s:s + length] for s in np.unique(starts)])

    def fingerprint(self):
        """Return the hex SHA-256 of the data's dtype, size and `samples`."""
        return hashlib.sha256(f'{self.tokens.dtype.str} {len(self)} '.encode() + self.samples().tobytes()).hexdigest()


def read_meta(data_dir):
    """Return the dict of data_dir/meta.json, with the text of tokenizer.json as 'json'. Bins without a meta.json, such
    as nanoGPT's, hold GPT-2's tokens. Exit if there is nanoGPT's meta.pkl."""
    path = Path(data_dir) / 'meta.json'
    if not path.is_file():
        if path.with_suffix('.pkl').is_file():
            raise SystemExit(f'{path.with_suffix(".pkl")}: not read, because a pickle can run code; python '
                             'data/shakespeare_char/prepare.py --input FILE --out_dir DIR makes the same bins')
        return GPT2().meta
    meta = json.loads(path.read_text(encoding='utf-8'))
    if meta['tokenizer'] == FileTokenizer.name:
        meta['json'] = path.with_name(FileTokenizer.name).read_bytes().decode()
    return meta


class Mixture:
    """Bins with the same tokenizer, from which TrainLoader draws sequences with probabilities `weight`."""

    def __init__(self, bins):
        self.bins, self.path = bins, ' + '.join(str(bin.path) for bin in bins)
        self.first = np.cumsum([0, *map(len, bins)])
        self.tokenizer, self.vocab_size = bins[0].tokenizer, bins[0].vocab_size
        for bin in bins:
            if (bin.tokenizer, bin.vocab_size) != (self.tokenizer, self.vocab_size):
                raise SystemExit(f'{bin.path}: its tokenizer ({bin.tokenizer["tokenizer"]}) differs from that of '
                                 f'{bins[0].path} ({self.tokenizer["tokenizer"]}); prepare all parts with one')

    def __len__(self):
        return int(self.first[-1])

    def sequences(self, starts, length):
        index = np.searchsorted(self.first, starts, side='right') - 1  # of each sequence's bin
        inside = starts - self.first[index]
        return np.concatenate([self.bins[i].sequences([start], length) for i, start in zip(index, inside)])


def fingerprint(bins):
    """Return a hash of the data and weights of several Bins, or a single Bin's own fingerprint."""
    weights, found = [bin.weight for bin in bins], [bin.fingerprint() for bin in bins]
    return hashlib.sha256(repr((weights, found)).encode()).hexdigest() if len(found) > 1 else found[0]


def parts_of(dataset):
    """Return the parts of --dataset=a:0.7,b:0.3 as {name: share}. The name of an existing directory is one data set."""
    dataset, parts = str(dataset), {}
    if not {':', ','} & set(dataset) or is_dir(data_dir(dataset)):
        return {dataset: 1.0}
    for part in dataset.split(','):
        found = re.fullmatch(r'\s*(.+?)\s*:\s*(\d+\.?\d*|\.\d+)\s*', part)
        if not found:
            raise SystemExit(f'--dataset={dataset}: {part!r} is not NAME:WEIGHT; write a mixture as a:0.7,b:0.3')
        parts[found[1]] = float(found[2])
    if not (total := sum(parts.values())) or len({Path(name).name for name in parts}) <= dataset.count(','):
        raise SystemExit(f'--dataset={dataset}: all weights are 0, or two parts have the same name')
    return {name: weight / total for name, weight in parts.items()}


def open_dataset(dataset, block_size):
    """Open the training split and the validation splits of --dataset: (Mixture, {directory name: Bin}). Each part of a
    mixture is a validation set; a part of weight 0 is not trained on."""
    parts = parts_of(dataset)
    train = [Bin(data_dir(name), 'train', share, block_size) for name, share in parts.items() if share]
    val = {Path(name).name: Bin(data_dir(name), 'val', share, block_size) for name, share in parts.items()}
    for bin in Mixture([*train, *val.values()]).bins:  # checks that all have the same tokenizer
        bin.check_ids(bin.samples())
    return Mixture(train), val


class TrainLoader:
    """This rank's share of each mini-batch, read one iteration ahead. `next(loader)` returns int64 (total_batch_size /
    world_size, block_size + 1) on `device`: inputs [:, :-1], targets [:, 1:]."""

    def __init__(self, data, seed, total_batch_size, block_size, rank, world_size, device, first_iteration=0):
        self.data, self.seed, self.total_batch_size, self.block_size = data, seed, total_batch_size, block_size
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.iteration, self.thread = first_iteration, ThreadPoolExecutor(1, 'loader')
        self.ahead = self.thread.submit(self._load, first_iteration)

    def starts(self, iteration):
        """Return the starts of a mini-batch's sequences, over all ranks, int64 (B,). Defines the order of the data."""
        return sequence_starts(self.seed, iteration, self.total_batch_size, [len(bin) for bin in self.data.bins],
                               self.block_size, [bin.weight for bin in self.data.bins])

    def augment(self, sequences, generators):
        """Return the sequences unchanged. Override for random changes of training data; draw only from `generators`, a
        NumPy generator for each sequence, because this runs ahead in another thread."""
        return sequences

    def first(self):
        """Return the next mini-batch without advancing."""
        return self.ahead.result().to(self.device, non_blocking=True)

    def __next__(self):
        batch = self.first()
        self.iteration += 1
        self.ahead = self.thread.submit(self._load, self.iteration)
        return batch

    def close(self):
        self.thread.shutdown()

    def _load(self, iteration):
        places = range(self.rank, self.total_batch_size, self.world_size)  # spreads the first N over the ranks
        sequences = self.data.sequences(self.starts(iteration)[places], self.block_size + 1)
        generators = (keyed_generator(self.seed, AUGMENTATION, iteration, place) for place in places)
        batch = torch.from_numpy(self.augment(sequences, generators).astype(np.int64))
        return batch.pin_memory() if self.device.type == 'cuda' else batch


class ValidationLoader:
    """Fixed, non-overlapping sequences of the validation split, the same for every run, shared over the ranks.

    Yields (inputs, targets), each int64 (batch_size, block_size) on `device`, equally many on all ranks. A last batch
    may be smaller. With `one_shape`, or without any sequence, it is padded; padding has targets of -1, which do not
    count. `num_sequences` are spaced evenly over the split; 0 = all sequences.
    """

    def __init__(self, data, num_sequences, batch_size, block_size, rank, world_size, device, one_shape=False):
        available = (len(data) - 1) // block_size
        if available < 8 and rank == 0:
            warn_once(f'{data.path}: only {available} sequences of block_size = {block_size}, so val/loss is noisy; '
                      'prepare it with a larger --val_fraction or a --val_file')
        n = min(num_sequences or available, available)
        self.starts = np.arange(n, dtype=np.int64) * available // n * block_size
        self.mine = self.starts[rank::world_size]
        self.batches = -(-n // (world_size * batch_size))
        self.data, self.batch_size, self.block_size, self.device = data, batch_size, block_size, torch.device(device)
        self.one_shape = one_shape

    def __len__(self):
        return self.batches

    def __iter__(self):
        for i in range(self.batches):
            starts = self.mine[i * self.batch_size:(i + 1) * self.batch_size]
            size = self.batch_size if self.one_shape else max(1, len(starts))
            tokens = self.data.sequences(np.pad(starts, (0, size - len(starts))), self.block_size + 1)
            batch = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
            # Copies, because other strides than in training trigger a recompilation, and a forward may `view` inputs.
            inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].clone()
            targets[len(starts):] = -1
            yield inputs, targets
