"""Documents from tables on the Hub, through `datasets`, and from .txt, .jsonl and .parquet files on disk.

Also shards of tokens, and the flags that every prepare.py has.
"""

import argparse
import hashlib
import io
import json
import os
import sys
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np

from data.tokenizer import END_OF_TEXT, TOKENIZER_NAMES, GPT2Tokens, get_tokenizer
from data.writer import Batches, Corpus, sha256, write_bins
from runtime.files import first_line

ROWS = 1000  # rows of a table in one batch
CHARS = 2 ** 20  # characters of text in one batch
KEY_HINT = 'see --text_key of data/text/prepare.py'
SPLIT = {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}  # nanoGPT's split of OpenWebText


def argument_parser(doc, script, tokenizer=None, data_files=False):
    """Return the parser of a prepare.py, from its docstring and __file__, with the flags that they share.

    Args:
        tokenizer: default of --tokenizer; None for no such flag.
        data_files: whether there is the flag --data_files.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', type=Path, default=Path(script).resolve().parent,
                        help="where the bins go (default: this script's directory)")
    parser.add_argument('--num_proc', type=at_least_one, help='processes (default: one per core)',
                        default=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
    parser.add_argument('--overwrite', action='store_true', help='replace other bins in out_dir')
    if tokenizer:
        parser.add_argument('--tokenizer', metavar=TOKENIZER_NAMES, default=tokenizer, help=f'default: {tokenizer}')
    if data_files:
        parser.add_argument('--data_files', nargs='+', type=Path, metavar='FILE', help='instead of those on the Hub')
    return parser


def at_least_one(text):
    """Convert an argument of argparse to an int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError('must be a whole number, at least 1')
    return int(text)


def local_files(paths):
    """Return (source, revision) of files on disk: their names, and the SHA-256 of the list of their SHA-256s."""
    try:
        listed = ''.join(map(sha256, paths))
    except OSError as error:
        raise SystemExit(f'{error.filename}: cannot be read ({error.strerror})') from None
    return names_of(paths), f'sha256:{hashlib.sha256(listed.encode()).hexdigest()}'


def names_of(paths):
    """Name the first three files, and say how many more there are."""
    return ' '.join(path.name for path in paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')


# ---- tables ----------------------------------------------------------------------------------------------------------


def load(name, build):
    """Return `build(datasets)`, a table called `name`. SystemExit when it fails."""
    try:
        import datasets
        return build(datasets)
    except Exception as error:  # import, network, Hub, file system and parsers have no common class
        hint = '; --data_files FILE... reads local copies' if str(name).startswith('hf:') else ''
        error = error.__cause__ or error
        raise SystemExit(f'{name}: cannot be read ({type(error).__name__}: {first_line(error)}){hint}') from None


def prepare_split_table(args, repository, revision, names):
    """Write the bins of --data_files, or of parquet files on the Hub, with nanoGPT's split."""
    tokenizer = get_tokenizer(args.tokenizer)
    if args.data_files:
        files = expand(args.data_files)
        source, revision = local_files(files)
        table = partial(local_table, files, revision)
    else:
        files, source = [f'hf://datasets/{repository}@{revision}/{name}' for name in names], repository

        def table():
            return load(files[0], lambda datasets: datasets.load_dataset(
                'parquet', data_files=files, columns=['text'], split='train', num_proc=min(args.num_proc, len(files))))
    corpus = Corpus(source, revision, split=f'train_test_split: {SPLIT}', open=lambda: split_table(table()))
    write_bins(corpus, tokenizer, args.out_dir, args.num_proc, args.overwrite)


def local_table(files, revision):
    """Return the texts of files on disk as a `datasets.Dataset`, stored in its cache by their `revision`."""
    return load(files[0], lambda datasets: datasets.Dataset.from_generator(
        rows, datasets.Features({'text': datasets.Value('large_string')}),
        gen_kwargs={'files': files, 'revision': revision}))


def rows(files, revision):
    """Yield the texts of files as rows of a table."""
    for file in files:
        for text in read(file, 'text'):
            yield {'text': text}


def split_table(dataset):
    """Return the Batches of a table with nanoGPT's split: `datasets`' train_test_split, each part in its order."""
    try:
        parts = dataset.train_test_split(**SPLIT)
    except ValueError:
        raise SystemExit(f'--data_files: {len(dataset)} documents are too few to split') from None
    parts = {'train': parts['train'], 'val': parts['test']}
    segments = [[(split, slice(start, start + ROWS))] for split in parts for start in range(0, len(parts[split]), ROWS)]
    return Batches(segments, partial(read_rows, parts), documents=len(dataset))


def read_rows(parts, batch):
    """Return the documents of one batch of a split table, in a worker process."""
    split, rows = batch
    return [(split, text) for text in parts[split][rows]['text']]


def file_by_file(files, read):
    """Return the Batches of files that are too large to store: {split: files}, whose texts `read(file)` yields."""
    return Batches([batched(zip(repeat(split), read(file))) for split in files for file in files[split]])


def stream(file):
    """Yield the texts of a .jsonl file on the Hub. OSError, which keeps finished work, when it cannot be read."""
    try:
        from datasets import load_dataset
        table = load_dataset('json', data_files=file, split='train', streaming=True)
        for part in table.with_format('arrow').iter(ROWS):
            yield from part['text'].to_pylist()
    except Exception as error:  # as in `load`
        raise OSError(f'{file}: {type(error).__name__}: {first_line(error)}') from None


# ---- shards of tokens ------------------------------------------------------------------------------------------------

SHARD_HEADER = 256  # int32s: magic number, version, number of tokens, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_PIECE = 2 ** 20  # tokens in one batch


def shards_corpus(train, val, source=''):
    """Return the Corpus of shards of GPT-2's tokens in the format of llm.c and modded-nanogpt: a header, then uint16.

    Args:
        train, val: their paths. SystemExit when one is not such a file, or not complete.
        source: where they are from, for meta.json.
    """
    shards = [(split, path, shard_tokens(path)) for split, paths in (('train', train), ('val', val)) for path in paths]
    names, revision = local_files([*train, *val])
    source, rule = f'{source} {names}'.strip(), 'val: ' + names_of(val)
    print(f'{source}: {rule}')
    segments = [[(split, path, start, min(start + SHARD_PIECE, tokens)) for start in range(0, tokens, SHARD_PIECE)]
                for split, path, tokens in shards]
    return Corpus(source, revision, rule, open=lambda: Batches(segments, read_shard))


def shard_tokens(path):
    """Return the number of tokens in a shard. SystemExit when it is not a shard, or incomplete."""
    try:
        header, size = np.fromfile(path, '<i4', SHARD_HEADER), path.stat().st_size
    except OSError as error:
        raise SystemExit(f'{path}: cannot be read ({error.strerror})') from None
    if len(header) < SHARD_HEADER or header[:2].tolist() != [SHARD_MAGIC, SHARD_VERSION]:
        raise SystemExit(f'{path}: not a shard of GPT-2 tokens, whose header begins with {SHARD_MAGIC} and version '
                         f'{SHARD_VERSION}')
    tokens = int(header[2])
    if size != (expected := 4 * SHARD_HEADER + 2 * tokens):
        raise SystemExit(f'{path}: not complete: {size:,} bytes, not {expected:,} for the {tokens:,} tokens that its '
                         'header says')
    return tokens


def read_shard(batch):
    """Return the tokens start … end - 1 of a shard, in a worker process. SystemExit when an id is not GPT-2's."""
    split, path, start, end = batch
    ids = np.fromfile(path, '<u2', end - start, offset=4 * SHARD_HEADER + 2 * start)
    if len(ids) < end - start:
        raise SystemExit(f'{path}: became shorter while it was read')
    if (top := ids.max()) >= GPT2Tokens.vocab_size:
        raise SystemExit(f'{path}: token id {top} is not one of GPT-2\'s {GPT2Tokens.vocab_size:,}')
    return [(split, ids)]


# ---- files on disk ---------------------------------------------------------------------------------------------------


def files_corpus(files, val_files=(), val_fraction=0.01, text_key='text'):
    """Return the Corpus of .txt, .jsonl and .parquet files, and directories of them, without blank documents.

    If there are no `val_files`, `val_fraction` of the text is for val.
    """
    files, val_files = expand(files), expand(val_files)
    source, revision = local_files([*files, *val_files])
    if any(reader_of(path) is not txt for path in [*files, *val_files]):
        source += f', key {text_key!r}'  # part of the bins' identity

    def documents(paths):
        return (text for path in paths for text in read(path, text_key) if text.strip())

    if val_files:
        rule = 'val: ' + names_of(val_files)
        split = chain(zip(repeat('train'), documents(files)), zip(repeat('val'), documents(val_files)))
    else:
        enough = int(1 / val_fraction) + 1
        try:
            lengths = [len(text) for text in islice(documents(files), enough)]
        except OSError as error:
            raise SystemExit(str(error)) from None
        if len(lengths) == enough:
            rule = f'val: {val_fraction:g} of the documents'  # at 0.01 the documents 100, 200, 300, …
            split = (('val' if int(val_fraction * i) > int(val_fraction * (i - 1)) else 'train', text)
                     for i, text in enumerate(documents(files), 1))
        else:
            rule = f'val: about the last {val_fraction:g} of the text, as there are fewer than {enough} documents'
            split = by_position(documents(files), sum(lengths), val_fraction)
        print(f'{source}: {rule}')
    return Corpus(source, revision, rule, open=lambda: Batches([batched(split)]))


def by_position(texts, size, fraction):
    """Yield (split, text); val is the last `fraction` of `size` characters or, from a line end, up to twice as many."""
    left = max(1, int(size * (1 - fraction)))  # characters for train
    near = size - left
    for text in texts:
        if 0 < left <= len(text):  # the document in which val begins
            end = text.rfind('\n', max(0, left - near), left) + 1 or left
            parts = [('train', text[:end]), ('val', text[end:])]
        else:
            parts = [('train' if left > 0 else 'val', text)]
        yield from (part for part in parts if part[1])
        left -= len(text)


def batched(documents):
    """Yield lists of documents with about CHARS characters in each."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def expand(paths):
    """Return the paths, with directories replaced by the readable files anywhere below them, sorted by name.

    Hidden files are left out, a note names others that are not read, and links to directories are not followed.
    """
    files = []
    for path in paths:
        found = sorted(path.rglob('*')) if path.is_dir() else [path]
        found = [p for p in found if not any(n[0] == '.' for n in p.relative_to(path).parts)]
        readable = [p for p in found if reader_of(p) and not p.is_dir()]
        if not readable:
            raise SystemExit(f'{path}: no .txt, .jsonl or .parquet file')
        others = [p for p in found if p not in readable and (not p.is_dir() or p.is_symlink())]
        if others:
            print(f'note: {path}: not read: {names_of(others)}', file=sys.stderr)
        files += readable
    return files


def read(path, text_key):
    """Yield the texts of a file. SystemExit when its content is bad, OSError when the file system fails."""
    try:
        for number, text in enumerate(reader_of(path)(path, text_key), 1):
            if not isinstance(text, str):
                raise SystemExit(f'{path}: {text_key!r} of document {number} is {text!r:.60}, not text')
            yield text
    except Exception as error:  # parsers and decompressors have no common class
        if getattr(error, 'errno', None):
            raise
        raise SystemExit(f'{path}: cannot be read ({type(error).__name__}: {first_line(error)})') from None


def lines(path):
    """Yield the lines of a UTF-8 file, perhaps a .gz or .zst, without its byte order mark. SystemExit if not UTF-8.

    Only a newline ends a line.
    """
    with decompressed(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode('utf-8-sig' if number == 1 else 'utf-8')
            except UnicodeDecodeError as error:
                raise SystemExit(f'{path}, line {number}: not UTF-8 text (byte {line[error.start]:#04x}, '
                                 f'{error.reason})') from None
            yield text


def decompressed(path):
    """Open a file for its decompressed bytes. pyarrow, unlike gzip and zstandard, fails when it is truncated."""
    file, kind = path.open('rb'), COMPRESSED.get(path.suffix.lower())
    if kind:
        import pyarrow
        return io.BufferedReader(pyarrow.input_stream(file, compression=kind))
    return file


def txt(path, text_key):
    """Yield the documents of a .txt file, which <|endoftext|> separates."""
    parts = []
    for line in lines(path):
        *ends, rest = line.split(END_OF_TEXT)
        for end in ends:
            yield ''.join([*parts, end])
            parts = []
        parts.append(rest)
    yield ''.join(parts)


def jsonl(path, text_key):
    """Yield the text in each line of a .jsonl file; blank lines are skipped."""
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)[text_key]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f'{path}, line {number}: not a JSON object with the key {text_key!r} '
                                 f'({KEY_HINT})') from None


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file; only the column `text_key` is read."""
    from pyarrow.parquet import ParquetFile
    with path.open('rb') as opened:
        file = ParquetFile(opened)
        names = file.schema_arrow.names
        if text_key not in names and file.metadata.num_rows:
            raise SystemExit(f'{path}: no column {text_key!r}, only {", ".join(names)} ({KEY_HINT})')
        for rows in file.iter_batches(16, columns=[text_key]):  # few, because documents may be large
            yield from rows[text_key].to_pylist()


READERS = {'.txt': txt, '.jsonl': jsonl, '.parquet': parquet}
COMPRESSED = {'.gz': 'gzip', '.zst': 'zstd'}
READERS |= {f'{kind}{packed}': READERS[kind] for kind in ('.txt', '.jsonl') for packed in COMPRESSED}


def reader_of(path):
    """Return the function that reads a file of this name, None if there is none."""
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)
