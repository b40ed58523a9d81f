"""The writer of token bins: a Corpus in, `train.bin`, `val.bin` and `meta.json` out.

A bin is headerless little-endian uint16 (uint32 above 65,536 ids): the documents' ids, each document followed by the
end-of-text id, as in nanoGPT. Until everything is written, `progress.json` says how much of the `*.bin.part` is
complete; then these are renamed, and meta.json comes last. So after a kill at any moment the same command resumes and
writes the same bytes.
"""

import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.tokenizer import check_known
from runtime.files import atomic_write, first_line, sync_directory

SPLITS = ('train', 'val')
SAVE_SECONDS = 1.0  # between saves: the most work that an interruption costs


@dataclass
class Corpus:
    """A text, and its source, revision and split, which with the tokenizer identify bins.

    open: function that returns the text, called only if the bins are missing: segments, iterables of batches of about a
        megabyte, each tokenized by a worker process. A batch is a list of (split, document); an array of ids stands for
        documents that are tokenized already. Segments and batches are the same in every run; a resumed run skips
        finished segments unread.
    """

    source: str
    revision: str
    split: str
    open: Callable[[], Sequence[Iterable]]


def write_bins(corpus, tokenizer, out_dir, num_proc, overwrite=False):
    """Write a corpus to `out_dir` with `num_proc` worker processes and return the content of meta.json.

    Finished bins of the same corpus are kept. SystemExit when `out_dir` holds other bins (unless `overwrite`), another
    process writes there or the input is bad (then the parts are removed), and after an interruption or an OSError (then
    the same command resumes).
    """
    check_known(tokenizer.name)
    out_dir = Path(out_dir)
    about = {key: value for key, value in tokenizer.meta.items() if key != 'json'}
    identity = {**about, 'source': corpus.source, 'revision': corpus.revision, 'split': corpus.split}
    with lock(out_dir):
        meta = None if overwrite else find_existing(out_dir, identity)
        if meta:
            print(f'{out_dir}: already has these bins, nothing to do (--overwrite makes them again)')
        else:
            try:
                meta = write(corpus, identity, tokenizer, out_dir, num_proc, overwrite)
            except (KeyboardInterrupt, BrokenProcessPool, OSError) as error:
                raise SystemExit(f'{out_dir}: stopped ({first_line(error)}); the same command, without --overwrite, '
                                 'resumes where it stopped (with a smaller --num_proc, if memory is short)') from None
    for split in SPLITS:
        print(f'{out_dir / split}.bin: {meta[split]["tokens"]:,} tokens, {meta[split]["documents"]:,} documents')
    return meta


def lock(out_dir):
    """Make and lock `out_dir`, and return an open file; closing it ends the lock.

    It is a POSIX lock: worker processes do not inherit it, and network file systems support it.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        file = (out_dir / 'prepare.lock').open('a')
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SystemExit(f'{out_dir}: cannot be locked, or another process is writing there ({error.strerror}); '
                         'choose another --out_dir') from None
    return file


def find_existing(out_dir, identity):
    """Return meta.json of the finished bins in `out_dir`, None if bins of this identity are missing or not complete.

    SystemExit if anything else is there.
    """
    for name in ('progress.json', 'meta.json', *(f'{split}.bin' for split in SPLITS)):
        if (path := out_dir / name).exists():
            try:
                meta = json.loads(path.read_text(encoding='utf-8')) if path.suffix == '.json' else {}
            except ValueError as error:
                raise SystemExit(f'{path}: not JSON ({error}); choose another --out_dir or pass --overwrite') from None
            if wrong := [key for key in identity if meta.get(key) != identity[key]]:
                raise SystemExit(f'{path}: already there, of other data ({wrong[0]} {meta.get(wrong[0])!r}, not '
                                 f'{identity[wrong[0]]!r}); choose another --out_dir or pass --overwrite')
            return meta if name == 'meta.json' and complete(out_dir, meta) else None
    return None


def complete(out_dir, meta):
    """Return whether the bins in `out_dir` exist and have the size that `meta`, the content of meta.json, says."""
    itemsize, bins = np.dtype(meta['dtype']).itemsize, {split: out_dir / f'{split}.bin' for split in SPLITS}
    return all(bin.exists() and bin.stat().st_size == meta[split]['tokens'] * itemsize for split, bin in bins.items())


def write(corpus, identity, tokenizer, out_dir, num_proc, overwrite):
    """Do the work of `write_bins`, under the lock."""
    segments = corpus.open()
    if overwrite:  # finished bins stay until the new ones are complete
        (out_dir / 'progress.json').unlink(missing_ok=True)
    parts = Parts(out_dir, identity)
    try:
        with (closing(encode_in_order(segments, tokenizer, parts.progress['position'], num_proc)) as results,
              tqdm(initial=parts.count('documents'), unit=' documents',
                   mininterval=0.5 if sys.stderr.isatty() else 30) as bar):
            for position, encoded in results:
                parts.append(position, encoded)
                bar.set_postfix_str(f'{parts.count("tokens"):,} tokens, part {position[0] + 1} of {len(segments)}',
                                    refresh=False)
                bar.update(sum(documents for _, documents in encoded.values()))
        return parts.finish([len(segments), 0], tokenizer.meta.get('json'))
    except SystemExit:
        for path in (parts.progress_path, *parts.paths.values()):
            path.unlink(missing_ok=True)
        raise


class Parts:
    """train.bin.part, val.bin.part and progress.json in a directory, opened where the last run stopped."""

    def __init__(self, out_dir, identity):
        self.progress_path = out_dir / 'progress.json'
        self.paths = {split: out_dir / f'{split}.bin.part' for split in SPLITS}
        self.dtype = np.dtype(identity['dtype']).newbyteorder('<')
        self.progress = {**identity, 'position': [0, 0], **{s: {'tokens': 0, 'documents': 0} for s in SPLITS}}
        if self.progress_path.exists():
            self.progress = json.loads(self.progress_path.read_text(encoding='utf-8'))
            print(f'{out_dir}: resuming after {self.count("documents"):,} documents, {self.count("tokens"):,} tokens')
            if self.progress.pop('complete', False):  # the last run ended before meta.json
                for path in self.paths.values():
                    if not path.exists() and (bin := path.with_suffix('')).exists():
                        bin.replace(path)
        self.files = {split: path.open('ab') for split, path in self.paths.items()}
        for split, file in self.files.items():
            size = self.progress[split]['tokens'] * self.dtype.itemsize
            if file.tell() < size:
                raise SystemExit(f'{file.name}: not the {size} bytes that progress.json says; pass --overwrite')
            file.truncate(size)
        self.save(self.progress['position'])  # from here on the same command resumes
        self.saved = float('-inf')  # the first batch is saved at once

    def count(self, what):
        """Return the number of 'tokens' or 'documents' in both splits so far."""
        return sum(self.progress[split][what] for split in SPLITS)

    def append(self, position, encoded):
        """Add {split: (ids, documents)}; `position` says where to resume after it."""
        for split, (ids, documents) in encoded.items():
            self.files[split].write(ids.astype(self.dtype, copy=False).data)
            self.progress[split]['tokens'] += len(ids)
            self.progress[split]['documents'] += documents
        if time.monotonic() - self.saved >= SAVE_SECONDS:
            self.save(position)

    def save(self, position):
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        self.saved = time.monotonic()
        self.progress['position'] = position
        with atomic_write(self.progress_path, 'w', sync=True) as file:
            json.dump(self.progress, file, indent=2)

    def finish(self, end, tokenizer_json=None):
        """Turn the complete parts into bins, write tokenizer.json, if any, and return what is written to meta.json."""
        for split in SPLITS:
            if not self.progress[split]['tokens']:
                raise SystemExit(f'{self.progress["source"]}: there is no text for {split}.bin')
        self.save(end)
        meta = {key: value for key, value in self.progress.items() if key != 'position'}
        for split, path in self.paths.items():
            meta[split] = {**meta[split], 'sha256': sha256(path)}
        self.progress['complete'] = True  # so that bins without a part are these parts, not what they replace
        self.save(end)
        self.progress_path.with_name('meta.json').unlink(missing_ok=True)  # of bins that these replace
        for split, path in self.paths.items():
            self.files[split].close()
            path.replace(path.with_suffix(''))
        for name, text in (('tokenizer.json', tokenizer_json), ('meta.json', json.dumps(meta, indent=2))):
            if text:
                with atomic_write(self.progress_path.with_name(name), sync=True) as file:
                    file.write(text.encode())
        sync_directory(self.progress_path.parent)
        self.progress_path.unlink()
        return meta


def encode_in_order(segments, tokenizer, position, num_proc):
    """Yield (position after it, {split: (ids, documents)}) for each batch from `position` on, in order.

    At most two batches per process are in memory.
    """
    first, skip = position
    # Not fork, Linux's default before Python 3.14: a lock held by a thread at that moment would stay locked.
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context('forkserver'), start_worker, (tokenizer,))
    under_way = deque()
    try:
        for segment in range(first, len(segments)):
            for n, batch in enumerate(itertools.islice(segments[segment], skip, None), skip + 1):
                under_way.append(([segment, n], pool.submit(encode, batch)))
                if len(under_way) > 2 * num_proc:
                    position, oldest = under_way.popleft()
                    yield position, oldest.result()
            skip = 0
        for position, future in under_way:
            yield position, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(tokenizer):
    """Prepare a worker process for `encode`: it leaves Ctrl-C to the parent and ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    encode.tokenizer = tokenizer


def encode(batch):
    """Tokenize a batch in a worker process: {split: (ids, number of documents)}."""
    tokenizer, arrays, counts = encode.tokenizer, defaultdict(list), Counter()
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    for split, text in batch:
        if isinstance(text, np.ndarray):  # from anywhere in the corpus, with the end-of-text ids
            arrays[split].append(text)
            counts[split] += int(np.count_nonzero(text == tokenizer.eot_id))
            continue
        try:
            ids = tokenizer.encode(text)
        except BaseException as error:  # a panic of Rust is not an Exception, and cannot be pickled
            raise SystemExit(f'the tokenizer {tokenizer.name} cannot encode the document for {split}.bin that begins '
                             f'with {str(text)[:60]!r} ({type(error).__name__}: {first_line(error)})') from None
        arrays[split] += [np.asarray(part, tokenizer.dtype) for part in (ids, end)]
        counts[split] += 1
    return {split: (np.concatenate(parts), counts[split]) for split, parts in arrays.items()}


def sha256(path):
    """Return the hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()
