"""Token windows out of memory-mapped bins: the stateless order, prefetch, validation windows.

Everything random in a run is a pure function of (seed, what for, iteration), drawn with the counter-based generator
Philox; so the data that iteration i sees depend neither on the number of ranks, the micro-batch, the optimizer, nor on
how often the run was interrupted.
"""

import hashlib
import json
import queue
import threading
from pathlib import Path

import numpy as np
import torch

from runtime.rng import WINDOWS, keyed_bits


def window_starts(seed, iteration, n, num_tokens, block_size):
    """Where the `n` windows of an iteration's mini-batch start: int64 (n,), uniform over all windows of the split.

    A window is block_size + 1 tokens. Rank r of w takes every w-th of them, [r::w]: the first N sequences of the
    mini-batch are then spread evenly over the ranks.
    """
    fraction = (keyed_bits(seed, WINDOWS, iteration, n) >> np.uint64(11)) * 2.0 ** -53
    return (fraction * (num_tokens - block_size)).astype(np.int64)


def accumulation_steps(total_batch_size, batch_size, world_size, given=0):
    """Micro-batches per device and iteration: total_batch_size / (batch_size × world_size).

    SystemExit with one line that names the numbers and the nearest that fit when this is not a whole number, or not
    the `given` one (0 = none given).
    """
    step = batch_size * world_size
    if min(total_batch_size, batch_size) < 1 or given < 0:
        raise SystemExit(f'total_batch_size = {total_batch_size} and batch_size = {batch_size} must be at least 1')
    if given and given * batch_size == total_batch_size != given * step:
        raise SystemExit(f'gradient_accumulation_steps = {given} counts those of all {world_size} devices, as nanoGPT '
                         f'does; here they are each device\'s: leave it out')
    if given and given * step != total_batch_size:
        raise SystemExit(f'total_batch_size = {total_batch_size} is not gradient_accumulation_steps × batch_size × '
                         f'world_size = {given} × {batch_size} × {world_size}; set --total_batch_size={given * step}, '
                         'or leave out gradient_accumulation_steps')
    if total_batch_size % step:
        near = sorted({max(total_batch_size // step, 1) * step, (total_batch_size // step + 1) * step})
        raise SystemExit(f'total_batch_size = {total_batch_size} is not a multiple of batch_size × world_size = '
                         f'{batch_size} × {world_size} = {step}; nearest that fit: --total_batch_size='
                         + ' or '.join(map(str, near)))
    return total_batch_size // step


def data_dir(dataset, root=Path()):
    """The directory that --dataset means: data/DATASET, or the path itself where there is only that."""
    inside, itself = root / 'data' / dataset, root / dataset
    return itself if itself.is_dir() and not inside.is_dir() else inside


class Bin:
    """One split of a data set: `path` memory-mapped, checked against the meta.json beside it.

    Without a meta.json the file is taken as GPT-2's uint16 (nanoGPT's bins), and checked as it is read.

    Raises SystemExit with one line when the file is missing, is truncated, or does not fit its meta.json.
    """

    def __init__(self, data_dir, split):
        data_dir = Path(data_dir)
        self.path = data_dir / f'{split}.bin'
        if not self.path.is_file():
            prepare = data_dir / 'prepare.py'
            hint = f'run python {prepare}' if prepare.is_file() else 'make it with data/text/prepare.py'
            raise SystemExit(f'{self.path}: no such file; {hint}')
        self.meta = read_meta(data_dir)
        if not self.meta and (data_dir / 'meta.pkl').is_file():
            raise SystemExit(f'{data_dir}/meta.pkl: a vocabulary of nanoGPT\'s, which is not read, as a pickle may run '
                             'anything; make these bins again with data/shakespeare_char/prepare.py --input FILE')
        dtype = np.dtype(self.meta['dtype'] if self.meta else 'uint16').newbyteorder('<')
        try:
            size = self.path.stat().st_size
            if size == 0 or size % dtype.itemsize:
                raise SystemExit(f'{self.path}: {size} bytes are no whole number of {dtype.name} tokens; '
                                 'prepare it again')
            self.tokens = np.memmap(self.path, dtype=dtype, mode='r')
        except OSError as error:
            raise SystemExit(f'{self.path}: cannot be read ({error.strerror})') from None
        if self.meta and self.meta[split]['tokens'] != len(self.tokens):
            raise SystemExit(f'{self.path}: holds {len(self.tokens)} tokens, meta.json says '
                             f'{self.meta[split]["tokens"]}; prepare it again')
        self.vocab_size = self.meta['vocab_size'] if self.meta else 50257
        meta = self.meta or {'tokenizer': 'gpt2'}
        self.tokenizer = {key: meta[key] for key in ('tokenizer', 'chars') if key in meta}

    def __len__(self):
        return len(self.tokens)

    def windows(self, starts, length):
        """(len(starts), length) tokens in the file's dtype. SystemExit when an id is beyond the vocabulary."""
        return self.check_ids(np.stack([self.tokens[s:s + length] for s in starts]))

    def check_ids(self, tokens):
        """Returns `tokens`; SystemExit when one of them is beyond the vocabulary."""
        if (top := int(tokens.max())) >= self.vocab_size:
            raise SystemExit(f'{self.path}: token id {top} is beyond the vocabulary of {self.vocab_size}; '
                             f'prepare it again (ids above 65,535 need a meta.json that says uint32)')
        return tokens

    def samples(self):
        """The first, the last and evenly spaced tokens of the split, at most 2^20 of them: (blocks, tokens)."""
        length = min(2 ** 14, len(self))
        starts = np.linspace(0, len(self) - length, 64).astype(np.int64)
        return np.stack([self.tokens[s:s + length] for s in np.unique(starts)])

    def check_length(self, block_size):
        """SystemExit unless the split holds at least one window of block_size + 1 tokens."""
        if len(self) <= block_size:
            raise SystemExit(f'{self.path}: {len(self)} tokens are too few for block_size = {block_size}; '
                             f'set --block_size to at most {len(self) - 1}')

    def fingerprint(self):
        """Identifies the data by its size and `samples`, whatever meta.json says of it: a sha256, hexadecimal."""
        return hashlib.sha256(f'{self.tokens.dtype.str} {len(self)} '.encode() + self.samples().tobytes()).hexdigest()


def read_meta(data_dir):
    """The dict of data_dir/meta.json, None where there is none; SystemExit when it is not what the writer makes."""
    path = Path(data_dir) / 'meta.json'
    if not path.is_file():
        return None
    try:
        meta = json.loads(path.read_text(encoding='utf-8'))
        if meta['dtype'] not in ('uint16', 'uint32'):
            raise ValueError(f'dtype {meta["dtype"]!r}')
        counts = dict(vocab_size=meta['vocab_size'], **{f'{s} tokens': meta[s]['tokens'] for s in ('train', 'val')})
        for key, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f'{key} {count!r}')
        if meta['vocab_size'] > np.iinfo(meta['dtype']).max + 1:
            raise ValueError(f'vocab_size {meta["vocab_size"]} in {meta["dtype"]}')
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f'{path}: not a valid meta.json ({error!r}); prepare the data again') from None
    return meta


class TrainLoader:
    """This rank's share of each mini-batch, in iteration order from `first_iteration`, prepared one step ahead.

    `next(loader)` returns an int64 tensor (total_batch_size / world_size, block_size + 1) on `device`; inputs are
    [:, :-1] and targets [:, 1:]. Token ids stay in the file's 2 or 4 bytes until they are on the device.
    """

    def __init__(self, data, seed, total_batch_size, block_size, rank, world_size, device, first_iteration=0):
        data.check_length(block_size)
        self.data, self.seed, self.total_batch_size, self.block_size = data, seed, total_batch_size, block_size
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.iteration = first_iteration
        self.ready = queue.Queue(maxsize=2)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._fill, daemon=True, name='loader')
        self.thread.start()

    def starts(self, iteration, rank=None):
        """Window starts of a rank's share (default: this one's) of `iteration`, int64 (total_batch_size / ranks,)."""
        starts = window_starts(self.seed, iteration, self.total_batch_size, len(self.data), self.block_size)
        first = self.rank if rank is None else rank
        return starts[first::self.world_size]

    def describe(self, iteration, losses):
        """Says which windows have non-finite `losses` (ranks, micro-batches); where none has, any may be the cause."""
        bad = ~losses.isfinite()
        suspects = bad.nonzero() if bad.any() else torch.ones_like(bad).nonzero()
        return '; '.join(
            f'rank {rank}, micro-batch {i}: windows of {self.data.path} at '
            f'{np.array_split(self.starts(iteration, rank), losses.size(1))[i].tolist()}'
            for rank, i in suspects.tolist())

    def __next__(self):
        batch = self.ready.get()
        if isinstance(batch, BaseException):
            raise batch
        return on_device(batch, self.device)

    def close(self):
        """Stops the prefetching thread."""
        self.stopped.set()
        self.thread.join()

    def _fill(self):
        while not self.stopped.is_set():
            try:
                batch = as_tensor(self.data.windows(self.starts(self.iteration), self.block_size + 1))
                if self.device.type == 'cuda':
                    batch = batch.pin_memory()
            except BaseException as error:  # handed to the training thread, which raises it
                batch = error
            self.iteration += 1
            while not self.stopped.is_set():
                try:
                    self.ready.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    pass
            if isinstance(batch, BaseException):
                return


class ValidationLoader:
    """Fixed, non-overlapping windows of the validation split, the same for every run, shared over the ranks.

    Iterating yields (inputs, targets), each (batch_size, block_size) int64 on `device`; an incomplete batch is filled
    up with targets of -1, which do not count: every batch has one shape, and every rank as many of them.

    Args:
        num_windows: how many, evenly spaced over the split; 0 = all of them.
    """

    def __init__(self, data, num_windows, batch_size, block_size, rank, world_size, device):
        data.check_length(block_size)
        available = (len(data) - 1) // block_size
        n = min(num_windows or available, available)
        self.starts = np.arange(n, dtype=np.int64) * available // n * block_size
        self.mine = self.starts[rank::world_size]
        self.batches = -(-n // (world_size * batch_size))
        self.data, self.batch_size, self.block_size, self.device = data, batch_size, block_size, torch.device(device)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for i in range(self.batches):
            starts = self.mine[i * self.batch_size:(i + 1) * self.batch_size]
            missing = self.batch_size - len(starts)
            starts = np.pad(starts, (0, missing))
            batch = on_device(as_tensor(self.data.windows(starts, self.block_size + 1)), self.device)
            inputs, targets = batch[:, :-1], batch[:, 1:].clone()
            targets[self.batch_size - missing:] = -1
            yield inputs, targets


def as_tensor(tokens):
    """Token ids as the signed torch type of the same width: torch's unsigned types lack most operations."""
    return torch.from_numpy(tokens.view(np.int16 if tokens.itemsize == 2 else np.int32))


def on_device(ids, device):
    """Moves ids of `as_tensor` to `device` and widens them to int64."""
    mask = 0xFFFF if ids.dtype == torch.int16 else 0xFFFFFFFF
    return ids.to(device, non_blocking=True).to(torch.int64).bitwise_and_(mask)
