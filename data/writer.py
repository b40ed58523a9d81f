"""The one writer of token bins: a Corpus in, `train.bin`, `val.bin` and `meta.json` out.

A bin is headerless little-endian uint16 (uint32 above 65,536 ids): the ids of one document after another, each document
followed by the end-of-text id, as in nanoGPT. Until everything is written, the directory holds `*.bin.part` and
`progress.json`, which says how much of the parts is complete; then the parts are renamed, and meta.json comes last. So
a run may end at any moment, by kill -9 too: the same command resumes where it stopped and gives the same bytes. Only
the process that has locked `prepare.lock` changes anything in the directory.
"""

import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.tokenizer import tokenizer_from_meta
from runtime.files import atomic_write

SPLITS = ('train', 'val')
SAVE_SECONDS = 1.0  # how much work an interruption may cost


@dataclass
class Batches:
    """The text of a corpus in batches of about a megabyte, made one by one, each tokenized by a worker process.

    segments: iterables of batches (anything picklable) in the order of writing, the same in every run. A restart skips
        finished segments unread; of the one it stopped in, it reads, but does not tokenize, what is written already.
    read: called with a batch in a worker (hence picklable), returns its pieces: a list of (split, text, ends), where
        `ends` says that the document is complete with this piece. None: a batch is such a list. For a corpus that is
        tokenized already, it returns {split: (ids, number of documents)}.
    documents: how many there are, for the progress bar. None: only the end will tell.
    """

    segments: Sequence[Iterable]
    read: Callable | None = None
    documents: int | None = None


@dataclass
class Corpus:
    """What is to be written: what the text is, which version of it, how it is split, and a function for its Batches.

    Bins and parts that differ from this in source, revision, split or tokenizer are other data. `open` is called only
    when there is work to do.
    """

    source: str
    revision: str
    split: str
    open: Callable[[], Batches]


def write_bins(corpus, tokenizer, out_dir, num_proc, overwrite=False):
    """Write a corpus to `out_dir` with `num_proc` worker processes and return what meta.json says.

    Finished bins of the same corpus are left as they are. SystemExit with one line when other bins are in the way
    (unless `overwrite`), when another process is writing there, when the input is bad (then nothing is left behind),
    and after an interruption, an OSError of the input included (then the same command resumes).
    """
    out_dir = Path(out_dir)
    about = {key: value for key, value in tokenizer.meta.items() if key != 'json'}
    identity = {**about, 'source': corpus.source, 'revision': corpus.revision, 'split': corpus.split}
    meta = None if overwrite else find_existing(out_dir, identity)
    if meta:
        print(f'{out_dir}: these bins exist already, nothing to do (--overwrite makes them again)')
    else:
        with locked(out_dir):
            if not overwrite:  # again, because another process may have finished just before the lock was taken
                meta = find_existing(out_dir, identity)
            meta = meta or write(corpus, identity, tokenizer.meta, out_dir, num_proc, overwrite)
    for split in SPLITS:
        print(f'{out_dir / split}.bin: {meta[split]["tokens"]:,} tokens, {meta[split]["documents"]:,} documents')
    return meta


@contextmanager
def locked(out_dir):
    """Holds the lock of `out_dir`, which is created if need be. SystemExit with one line when another process has it.

    It is a POSIX lock, because worker processes do not inherit those, and network file systems have them.
    """
    path = out_dir / 'prepare.lock'
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        file = path.open('a')
    except OSError as error:
        raise SystemExit(f'{out_dir}: cannot be written ({error.strerror}); choose another --out_dir') from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError
        except (BlockingIOError, PermissionError, FileNotFoundError):  # the last: its holder has just removed the file
            raise SystemExit(f'{out_dir}: another process is writing there; wait for it, or choose another '
                             '--out_dir') from None
        except OSError as error:
            raise SystemExit(f'{path}: cannot be locked ({error.strerror}); choose an --out_dir on a file system '
                             'with locks') from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def write(corpus, identity, tokenizer_meta, out_dir, num_proc, overwrite):
    """The work of `write_bins`, under the lock."""
    batches = corpus.open()
    again = 'the same command' + ' without --overwrite' * overwrite + ' resumes where it stopped'
    for path in out_dir.glob('*.json.*.partial'):  # left by a process that was killed while it wrote them
        path.unlink()
    own = out_dir / 'tokenizer.json'
    if 'json' in tokenizer_meta and not overwrite and own.exists() and own.read_bytes().decode(errors='replace') != (
            tokenizer_meta['json']):
        raise SystemExit(f'{own}: another tokenizer is in the way; choose another --out_dir or pass --overwrite')
    if overwrite:  # only once the input could be opened; meta.json first, so that nothing else passes for its bins
        for name in ('meta.json', 'progress.json', *(f'{split}.bin' for split in SPLITS)):
            (out_dir / name).unlink(missing_ok=True)
    parts = Parts(out_dir, identity)
    try:
        with closing(encode_in_order(batches, tokenizer_meta, parts, num_proc)) as results:
            for position, encoded in results:
                parts.append(position, encoded)
        return parts.finish([len(batches.segments), 0], tokenizer_meta.get('json'))
    except SystemExit:
        parts.discard()
        raise
    except KeyboardInterrupt:
        raise SystemExit(f'{out_dir}: interrupted; {again}') from None
    except OSError as error:
        raise SystemExit(f'{out_dir}: stopped: {error}; {again}') from None


def find_existing(out_dir, identity):
    """meta.json of the finished bins in `out_dir` if they have this identity, None if there is work to do.

    SystemExit if something else is there.
    """
    bins = [out_dir / f'{split}.bin' for split in SPLITS]
    for name in ('meta.json', 'progress.json'):
        if (path := out_dir / name).exists():
            found = read_json(path)
            if wrong := [key for key in identity if found.get(key) != identity[key]]:
                raise SystemExit(f'{path}: bins of other data are in the way ({wrong[0]} {found.get(wrong[0])!r}, not '
                                 f'{identity[wrong[0]]!r}); choose another --out_dir or pass --overwrite')
            if name == 'progress.json':
                return None
            for bin, split in zip(bins, SPLITS):
                size = found[split]['tokens'] * np.dtype(found['dtype']).itemsize
                if not bin.exists() or bin.stat().st_size != size:
                    raise SystemExit(f'{bin}: not the {size} bytes that meta.json says; pass --overwrite')
            return found
    for bin in bins:
        if bin.exists():
            raise SystemExit(f'{bin}: in the way, and no meta.json says what it is; choose another --out_dir or pass '
                             '--overwrite')
    return None


class Parts:
    """train.bin.part, val.bin.part and progress.json of a directory, opened where the last run left them."""

    def __init__(self, out_dir, identity):
        self.dir, self.files, self.progress_path = out_dir, {}, out_dir / 'progress.json'
        self.dtype = np.dtype(identity['dtype']).newbyteorder('<')
        resumed = self.progress_path.exists()
        self.progress = read_json(self.progress_path) if resumed else {
            **identity, **{split: {'tokens': 0, 'documents': 0} for split in SPLITS}, 'seconds': 0, 'position': [0, 0]}
        try:
            for split in SPLITS:
                if resumed and (bin := out_dir / f'{split}.bin').exists():  # ended between the renaming and meta.json
                    bin.replace(self.part(split))
                self.files[split] = self.part(split).open('ab')
        except OSError as error:
            raise SystemExit(f'{out_dir}: cannot be written ({error}); choose another --out_dir') from None
        for split, file in self.files.items():
            size = self.progress[split]['tokens'] * self.dtype.itemsize
            if file.tell() < size:
                raise SystemExit(f'{self.part(split)}: not the {size} bytes that progress.json says; pass --overwrite')
            file.truncate(size)
        if resumed:
            print(f'{out_dir}: resuming after {self.count("documents"):,} documents')
        self.started, self.saved = time.monotonic() - self.progress['seconds'], float('-inf')

    def part(self, split):
        return self.dir / f'{split}.bin.part'

    def count(self, what):
        """The 'tokens' or 'documents' of all splits so far."""
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
        self.progress.update(seconds=round(self.saved - self.started, 1), position=position)
        write_json(self.progress_path, self.progress)

    def finish(self, end, tokenizer_json=None):
        """Turn the complete parts into bins, write meta.json and return it. SystemExit if a split is empty.

        `tokenizer_json`: goes to tokenizer.json.
        """
        for split in SPLITS:
            if not self.progress[split]['tokens']:
                raise SystemExit(f'{self.progress["source"]}: there is no text for {split}.bin')
        self.save(end)
        meta = {key: value for key, value in self.progress.items() if key != 'position'}
        for split in SPLITS:
            meta[split] = {**self.progress[split], 'sha256': sha256(self.part(split))}
        for split in SPLITS:
            self.files[split].close()
            self.part(split).replace(self.dir / f'{split}.bin')
        if tokenizer_json:
            with atomic_write(self.dir / 'tokenizer.json', sync=True) as file:
                file.write(tokenizer_json.encode())
        write_json(self.dir / 'meta.json', meta)
        self.progress_path.unlink()
        return meta

    def discard(self):
        for path in (self.progress_path, *map(self.part, SPLITS)):
            path.unlink(missing_ok=True)


class Worker:
    """A process that encodes batches, and a pipe to it.

    The pipe closes when the process is killed, so the parent learns of it even in the middle of a result. (Executors of
    the standard library have one pipe for all results; there the parent waits for the rest of that result for ever.)
    """

    def __init__(self, read, tokenizer_meta):
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=work, args=(theirs, read, tokenizer_meta), daemon=True)
        self.process.start()
        theirs.close()

    def encode(self, batch):
        """The tokens of a batch, see `encode`; raises what the worker does, ChildProcessError when it has ended."""
        try:
            self.pipe.send(batch)
            result = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            how = f'ended with exit code {self.process.exitcode}'
            if self.process.exitcode == -signal.SIGKILL:
                how = 'was killed (if memory is short, set a smaller --num_proc)'
            raise ChildProcessError(f'a worker process {how}') from None
        if isinstance(result, BaseException):
            raise result
        return result


def encode_in_order(batches, tokenizer_meta, parts, num_proc):
    """Yield (position after it, {split: (ids, documents)}) for each batch that `parts` has not, in order.

    At most two batches per process are under way at a time, however large the corpus.
    """
    first, done = parts.progress['position']
    workers = [Worker(batches.read, tokenizer_meta) for _ in range(num_proc)]  # before there are threads
    idle, under_way = queue.SimpleQueue(), deque()
    for worker in workers:
        idle.put(worker)

    def encode_there(batch):
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    with (ThreadPoolExecutor(num_proc) as pool,
          tqdm(total=batches.documents, initial=parts.count('documents'), unit=' documents',
               mininterval=0.5 if sys.stderr.isatty() else 30) as bar):

        def oldest():
            position, future = under_way.popleft()
            encoded = future.result()
            bar.set_postfix_str(f'{parts.count("tokens"):,} tokens', refresh=False)
            bar.update(sum(documents for _, documents in encoded.values()))
            return position, encoded

        try:
            for segment in range(first, len(batches.segments)):
                skip = done if segment == first else 0
                for n, batch in enumerate(itertools.islice(batches.segments[segment], skip, None), skip + 1):
                    under_way.append(([segment, n], pool.submit(encode_there, batch)))
                    if len(under_way) > 2 * num_proc:
                        yield oldest()
            while under_way:
                yield oldest()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.process.kill()


def work(pipe, read, tokenizer_meta):
    """Worker: answers each batch that comes through `pipe` with its tokens, or with the error of the input.

    Ends when the parent ends, however it does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    tokenizer = None
    while True:
        batch = pipe.recv()
        try:
            result = read(batch) if read else batch
            if not isinstance(result, dict):
                tokenizer = tokenizer or tokenizer_from_meta(tokenizer_meta)
                result = encode(result, tokenizer)
        except (SystemExit, OSError) as error:
            result = error
        except MemoryError:
            result = OSError('a worker process ran out of memory (set a smaller --num_proc)')
        pipe.send(result)


def encode(pieces, tokenizer):
    """The tokens of the pieces of a batch, {split: (ids, number of documents that end in them)}."""
    for split, text, _ in pieces:
        if not isinstance(text, str):
            raise SystemExit(f'a document for {split}.bin is {text!r}, not text')
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    arrays, documents = {}, dict.fromkeys(SPLITS, 0)
    for (split, _, ends), ids in zip(pieces, tokenizer.encode_batch([text for _, text, _ in pieces])):
        arrays.setdefault(split, []).extend(np.asarray(part, tokenizer.dtype) for part in (ids, end if ends else []))
        documents[split] += ends
    return {split: (np.concatenate(parts), documents[split]) for split, parts in arrays.items()}


def sha256(path):
    """Hex SHA-256 of the bytes of a file."""
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()


def read_json(path):
    """The dict in a JSON file; an empty one if the file holds none."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def write_json(path, value):
    """Replaces a JSON file, durably. OSError when it cannot be written."""
    with atomic_write(path, 'w', sync=True) as file:
        json.dump(value, file, indent=2)
