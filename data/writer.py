"""Writing a Corpus as `train.bin`, `val.bin` and `meta.json`.

A bin is headerless little-endian uint16 (uint32 above 65,536 ids), with the end-of-text id after each document, as in
nanoGPT. Tokenized parts are kept in `parts.HASH` and joined at the end; meta.json is written last. So after a kill at
any moment the same command resumes and writes the same bytes.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.tokenizer import tokenizer_from_meta, utf8
from runtime.files import atomic_write, lock, one_line, sync_directory

SPLITS = ('train', 'val')
LOSSY = 1e-3  # a tokenizer that loses a larger share of the characters is reported


@dataclass
class Corpus:
    """A text. Its source, revision and split, with the tokenizer, identify the bins.

    open: function that returns batches of a few megabytes, the same in every run; called only if bins are missing.
        A batch is a list of (split, document). An array of ids stands for tokenized documents.
    """

    source: str
    revision: str
    split: str
    open: Callable[[], Iterable]


def write_bins(corpus, tokenizer, out_dir, num_proc, overwrite=False):
    """Write a corpus to `out_dir` with `num_proc` worker processes and return the content of meta.json. Exit if
    `out_dir` holds other bins, unless `overwrite`."""
    out_dir = Path(out_dir)
    identity = {**tokenizer.meta, 'source': corpus.source, 'revision': corpus.revision, 'split': corpus.split}
    if tokenizer_json := identity.pop('json', None):
        identity['tokenizer_sha256'] = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    parts = out_dir / f'parts.{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}'
    with lock(out_dir / 'prepare.lock'):
        if overwrite:  # but keep finished bins until the new ones are complete
            shutil.rmtree(parts, ignore_errors=True)
        meta = None if overwrite or parts.exists() else find_existing(out_dir, identity)
        if meta:
            print(f'{out_dir}: already has these bins, nothing to do (--overwrite makes them again)')
        else:
            try:
                write_parts(corpus.open(), tokenizer.meta, parts, num_proc)
                meta = join(parts, identity, tokenizer_json)
            except (KeyboardInterrupt, BrokenProcessPool, OSError) as error:
                raise SystemExit(f'{out_dir}: stopped ({one_line(error)}); the same command without --overwrite '
                                 'resumes; if memory is short, use a smaller --num_proc or shorter documents') from None
    for split in SPLITS:
        print(f'{out_dir / split}.bin: {meta[split]["tokens"]:,} tokens, {meta[split]["documents"]:,} documents')
        if lost := meta[split].get('lost'):
            print(f'warning: encoding and decoding a sample loses {lost:.1%} of its characters')
    return meta


def find_existing(out_dir, identity):
    """Return meta.json of the bins in `out_dir`, or None if they are incomplete. Exit if there are other bins."""
    path = out_dir / 'meta.json'
    there = [file for file in (path, out_dir / 'train.bin', out_dir / 'val.bin') if file.exists()]
    meta = json.loads(path.read_text(encoding='utf-8')) if path in there else {}
    wrong = [key for key in identity if meta.get(key) != identity[key]]
    if there and wrong:
        raise SystemExit(f'{there[0]}: made from other data ({wrong[0]} {meta.get(wrong[0])!r}, not '
                         f'{identity[wrong[0]]!r}); choose another --out_dir or pass --overwrite')
    return meta if len(there) == 3 else None


def write_parts(batches, tokenizer_meta, parts, num_proc):
    """Tokenize the missing parts in the directory `parts`. At most two batches per process are in memory."""
    parts.mkdir(exist_ok=True)
    if done := len([*parts.glob('*.npz')]):
        print(f'{parts.parent}: resuming after {done} parts')
    # Not fork, because a lock that a thread holds at that moment would stay locked. Not forkserver, because the name of
    # its socket in TMPDIR may be too long.
    context = multiprocessing.get_context('spawn')
    with (ProcessPoolExecutor(num_proc, context, start_worker, (tokenizer_meta,)) as pool,
          tqdm(unit=' documents', mininterval=0.5 if sys.stderr.isatty() else 30) as bar):
        under_way = deque()
        for number, batch in enumerate(batches):
            path = parts / f'{number:09d}.npz'
            if not path.exists():
                under_way.append(pool.submit(encode, batch, path))
            if len(under_way) > 2 * num_proc:
                bar.update(under_way.popleft().result())
        for part in under_way:
            bar.update(part.result())


def join(parts, identity, tokenizer_json):
    """Write the bins from the parts, tokenizer.json, if any, and meta.json. Return the content of meta.json."""
    out_dir, dtype = parts.parent, np.dtype(identity['dtype']).newbyteorder('<')
    total, digests = np.zeros((len(SPLITS), 5), dtype=np.int64), [hashlib.sha256() for _ in SPLITS]
    for path in out_dir.glob('*.bin.*.partial'):  # a killed process left them
        path.unlink()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(atomic_write(out_dir / f'{split}.bin', sync=True)) for split in SPLITS]
        for path in sorted(parts.glob('*.npz')):
            with np.load(path) as part:
                for i, split in enumerate(SPLITS):
                    ids = part[split].astype(dtype, copy=False)
                    files[i].write(ids.data)
                    digests[i].update(ids.data)
                    total[i] += len(ids), *part['counts'][i]
        for split, tokens in zip(SPLITS, total[:, 0]):
            if not tokens:
                raise SystemExit(f'{identity["source"]}: there is no text for {split}.bin')
        (out_dir / 'meta.json').unlink(missing_ok=True)  # it describes the bins that these replace
    meta = dict(identity)
    for split, (tokens, documents, size, sampled, lost), digest in zip(SPLITS, total.tolist(), digests):
        known = {'bytes': size} if size else {}  # unknown for a corpus that was already tokenized
        known |= {'lost': lost / sampled} if lost > LOSSY * sampled else {}
        meta[split] = {'tokens': tokens, 'documents': documents, **known, 'sha256': digest.hexdigest()}
    for name, text in (('tokenizer.json', tokenizer_json), ('meta.json', json.dumps(meta, indent=2))):
        if text:
            with atomic_write(out_dir / name, sync=True) as file:
                file.write(text.encode())
    sync_directory(out_dir)
    for unused in out_dir.glob('parts.*'):  # also the parts of interrupted commands for other data
        shutil.rmtree(unused)
    return meta


def start_worker(tokenizer_meta):
    """Set up a worker process, which ignores Ctrl-C and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    encode.tokenizer = tokenizer_from_meta(tokenizer_meta)


def encode(batch, path):
    """Tokenize a batch in a worker process and return its number of documents. Write to `path` the ids of each split
    and `counts` of documents, bytes, sampled characters and lost characters."""
    tokenizer, counts = encode.tokenizer, np.zeros((len(SPLITS), 4), dtype=np.int64)
    ids = {split: [np.zeros(0, tokenizer.dtype)] for split in SPLITS}
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    for split, text in batch:
        count = counts[SPLITS.index(split)]
        if isinstance(text, np.ndarray):
            ids[split].append(text)
            count[0] += np.count_nonzero(text == tokenizer.eot_id)
        else:
            ids[split].append(np.asarray([*tokenizer.encode(text), *end], tokenizer.dtype))
            sampled = (0, 0) if count[0] else sample_lost(tokenizer, text)
            count += 1, len(utf8(text)), *sampled
    with atomic_write(path, sync=True) as file:
        np.savez(file, **{split: np.concatenate(found) for split, found in ids.items()}, counts=counts)
    return int(counts[:, 0].sum())


def sample_lost(tokenizer, text):
    """Return how many characters the text's beginning has, and how many of them encoding and decoding lose."""
    sample = utf8(text[:10_000]).decode()
    return len(sample), (Counter(sample) - Counter(tokenizer.decode(tokenizer.encode(sample)))).total()


def sha256(path):
    """Return the hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()
