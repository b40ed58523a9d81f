"""The writer of token bins: a Corpus in, `train.bin`, `val.bin` and `meta.json` out.

A bin is headerless little-endian uint16 (uint32 above 65,536 ids): the documents' ids, each document followed by the
end-of-text id, as in nanoGPT. Until all is tokenized, a directory `parts.HASH` holds the parts that are done; then they
are joined, and meta.json comes last. So after a kill at any moment the same command resumes and writes the same bytes.
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

from data.tokenizer import utf8
from runtime.files import atomic_write, code_hashes, lock, one_line, sync_directory

SPLITS = ('train', 'val')
LOSSY = 1e-3  # the share of its characters without which a text is another one


@dataclass
class Corpus:
    """A text, and its source, revision and split, which with the tokenizer identify bins.

    open: function that returns the text, called only if the bins are missing: batches of a few megabytes, the same in
        every run. A batch is a list of (split, document); an array of ids stands for documents that are tokenized.
    """

    source: str
    revision: str
    split: str
    open: Callable[[], Iterable]


def write_bins(corpus, tokenizer, out_dir, num_proc, overwrite=False):
    """Write a corpus to `out_dir` with `num_proc` worker processes and return the content of meta.json. SystemExit when
    `out_dir` holds other bins, unless `overwrite`."""
    out_dir = Path(out_dir)
    about = {key: value for key, value in tokenizer.meta.items() if key != 'json'}
    identity = {**about, 'source': corpus.source, 'revision': corpus.revision, 'split': corpus.split}
    code = {name: digest for name, digest in code_hashes().items() if name.startswith('data/')}
    parts = out_dir / f'parts.{hashlib.sha256(json.dumps([identity, code]).encode()).hexdigest()[:12]}'
    with lock(out_dir / 'prepare.lock'):
        if overwrite:  # finished bins stay until the new ones are complete
            shutil.rmtree(parts, ignore_errors=True)
        meta = None if overwrite or parts.exists() else find_existing(out_dir, identity)
        if meta:
            print(f'{out_dir}: already has these bins, nothing to do (--overwrite makes them again)')
        else:
            try:
                write_parts(corpus.open(), tokenizer, parts, num_proc)
                meta = join(parts, identity, tokenizer.meta.get('json'))
            except (KeyboardInterrupt, BrokenProcessPool, OSError) as error:
                raise SystemExit(f'{out_dir}: stopped ({one_line(error)}); the same command, without --overwrite, '
                                 'resumes where it stopped (with a smaller --num_proc, if memory is short)') from None
    for split in SPLITS:
        print(f'{out_dir / split}.bin: {meta[split]["tokens"]:,} tokens, {meta[split]["documents"]:,} documents')
        if lost := meta[split].get('lost'):
            print(f'warning: encoding and decoding a sample loses {lost:.1%} of its characters')
    return meta


def find_existing(out_dir, identity):
    """Return meta.json of the bins in `out_dir`, None if they are not complete. SystemExit if other bins are there."""
    there = [path for path in (out_dir / name for name in ('meta.json', 'train.bin', 'val.bin')) if path.exists()]
    if not there:
        return None
    meta = json.loads(there[0].read_text(encoding='utf-8')) if there[0].name == 'meta.json' else {}
    if wrong := [key for key in identity if meta.get(key) != identity[key]]:
        raise SystemExit(f'{there[0]}: made from other data ({wrong[0]} {meta.get(wrong[0])!r}, not '
                         f'{identity[wrong[0]]!r}); choose another --out_dir or pass --overwrite')
    return meta if len(there) == 3 else None


def write_parts(batches, tokenizer, parts, num_proc):
    """Tokenize the parts that are missing in the directory `parts`; in memory are at most two batches per process."""
    parts.mkdir(exist_ok=True)
    if done := len([*parts.glob('*.npz')]):
        print(f'{parts.parent}: resuming after {done} parts')
    # Not fork, because a lock held by a thread at that moment would stay locked, nor forkserver, whose socket is in
    # TMPDIR, where its name may be too long.
    context = multiprocessing.get_context('spawn')
    with (ProcessPoolExecutor(num_proc, context, start_worker, (tokenizer,)) as pool,
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


def join(parts, identity, tokenizer_json=None):
    """Write the bins from the parts, tokenizer.json, if any, and meta.json, whose content is returned."""
    out_dir, dtype = parts.parent, np.dtype(identity['dtype']).newbyteorder('<')
    total, digests = np.zeros((len(SPLITS), 5), dtype=np.int64), [hashlib.sha256() for _ in SPLITS]
    for path in out_dir.glob('*.bin.*.partial'):  # left by a kill
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
        (out_dir / 'meta.json').unlink(missing_ok=True)  # of bins that these replace
    meta = dict(identity)
    for split, (tokens, documents, size, sampled, lost), digest in zip(SPLITS, total.tolist(), digests):
        known = {'bytes': size} if size else {}  # not of what was tokenized already
        known |= {'lost': lost / sampled} if lost > LOSSY * sampled else {}
        meta[split] = {'tokens': tokens, 'documents': documents, **known, 'sha256': digest.hexdigest()}
    for name, text in (('tokenizer.json', tokenizer_json), ('meta.json', json.dumps(meta, indent=2))):
        if text:
            with atomic_write(out_dir / name, sync=True) as file:
                file.write(text.encode())
    sync_directory(out_dir)
    for unused in out_dir.glob(f'parts.{"[0-9a-f]" * 12}'):  # also of runs of other data, which were not finished
        shutil.rmtree(unused)
    return meta


def start_worker(tokenizer):
    """Prepare a worker process, which leaves Ctrl-C to the parent and ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    encode.tokenizer = tokenizer


def encode(batch, path):
    """Tokenize a batch in a worker process, and return the number of documents. The file `path` gets the ids of each
    split and its `counts`: documents, bytes, and the characters of a sample and those that its tokens lose."""
    tokenizer, counts = encode.tokenizer, np.zeros((len(SPLITS), 4), dtype=np.int64)
    ids = {split: [np.zeros(0, tokenizer.dtype)] for split in SPLITS}
    end = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    for split, text in batch:
        if isinstance(text, np.ndarray):  # from anywhere in the corpus, with the end-of-text ids
            ids[split].append(text)
            counts[SPLITS.index(split), 0] += np.count_nonzero(text == tokenizer.eot_id)
            continue
        try:
            ids[split].append(np.asarray([*tokenizer.encode(text), *end], tokenizer.dtype))
            first = not counts[SPLITS.index(split), 0]
            counts[SPLITS.index(split)] += 1, len(utf8(text)), *(sample_lost(tokenizer, text) if first else (0, 0))
        except BaseException as error:  # a panic of Rust is not an Exception, and cannot be pickled
            raise SystemExit(f'the tokenizer {tokenizer.name} cannot encode the document for {split}.bin that begins '
                             f'with {str(text)[:60]!r} ({type(error).__name__}: {one_line(error)})') from None
    with atomic_write(path, sync=True) as file:
        np.savez(file, **{split: np.concatenate(found) for split, found in ids.items()}, counts=counts)
    return int(counts[:, 0].sum())


def sample_lost(tokenizer, text):
    """Return the length of the text's beginning, in characters, and how many of them are not there any more once it is
    encoded and decoded."""
    sample = utf8(text[:10_000]).decode()
    return len(sample), (Counter(sample) - Counter(tokenizer.decode(tokenizer.encode(sample)))).total()


def sha256(path):
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while block := file.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()
