"""The sources of the corpora: tables on the Hub, files on disk, shards of tokens; and the flags of every prepare.py."""

import argparse
import glob
import hashlib
import io
import json
import os
import sys
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from data.tokenizer import END_OF_TEXT, TOKENIZER_NAMES, get_tokenizer
from data.writer import Corpus, sha256, write_bins
from runtime.files import first_line

ROWS = 1000  # rows of a table in one batch
CHARS = 2 ** 20  # characters of text in one batch
SPLIT = {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}  # nanoGPT's split of OpenWebText


def argument_parser(doc, script, tokenizer=None, data_files=False):
    """Return the parser of a prepare.py, from its docstring and __file__, with the flags that they share.

    `tokenizer`: default of --tokenizer; None for no such flag. `data_files`: whether there is the flag --data_files.
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


def prepare_split_table(args, repository, revision, names):
    """Write the bins of parquet files, --data_files or those on the Hub, with nanoGPT's split."""
    files, source = [f'hf://datasets/{repository}@{revision}/{name}' for name in names], repository
    if args.data_files:
        files = [glob.escape(str(path)) for path in args.data_files]
        source, revision = local_files(args.data_files)
    corpus = Corpus(source, revision, f'train_test_split: {SPLIT}', lambda: split_table(files, args.num_proc))
    write_bins(corpus, get_tokenizer(args.tokenizer), args.out_dir, args.num_proc, args.overwrite)


def split_table(files, num_proc):
    """Return the segments of parquet files with nanoGPT's split, `datasets`' train_test_split, each part in order."""
    try:
        from datasets import load_dataset
        table = load_dataset('parquet', data_files=files, columns=['text'], split='train',
                             num_proc=min(num_proc, len(files)))
        parts = table.train_test_split(**SPLIT)
    except Exception as error:  # import, network, Hub, file system and parsers have no common class
        error = error.__cause__ or error
        raise SystemExit(f'{files[0]}: cannot be read, or the files after it ({type(error).__name__}: '
                         f'{first_line(error)}); --data_files FILE... reads local copies') from None
    return [rows(parts[part], start, split) for split, part in (('train', 'train'), ('val', 'test'))
            for start in range(0, len(parts[part]), ROWS)]


def rows(table, start, split):
    """Yield a batch, the rows of a table from `start` on."""
    yield [(split, text) for text in table[start:start + ROWS]['text']]


def stream(file):
    """Yield the texts of a .jsonl file on the Hub. OSError, which keeps finished work, when it cannot be read."""
    try:
        from datasets import load_dataset
        table = load_dataset('json', data_files=file, split='train', streaming=True)
        for part in table.with_format('arrow').iter(ROWS):
            yield from part['text'].to_pylist()
    except Exception as error:  # as above
        raise OSError(f'{file}: {type(error).__name__}: {first_line(error)}') from None


# ---- shards of tokens ------------------------------------------------------------------------------------------------

SHARD_HEADER = 256  # int32s: magic number, version, number of tokens, zeros
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_PIECE = 2 ** 20  # tokens in one batch


def shards_corpus(files, source=''):
    """Return the Corpus of shards of GPT-2's tokens in the format of llm.c and modded-nanogpt: a header, then uint16.

    The last of the `files` is for val. `source`: where they are from, for meta.json. SystemExit when one is not such a
    file, or not complete.
    """
    names, revision = local_files(files)
    rule = f'val: {files[-1].name}'
    print(f'{names}: {rule}')
    for path in files:
        check_shard(path)
    segments = [shard(path, 'val' if path is files[-1] else 'train') for path in files]
    return Corpus(f'{source} {names}'.strip(), revision, rule, open=lambda: segments)


def check_shard(path):
    """Stop unless the file is a complete shard."""
    magic, version, tokens = [*np.fromfile(path, '<i4', 3).tolist(), 0, 0, 0][:3]
    size, expected = path.stat().st_size, 4 * SHARD_HEADER + 2 * tokens
    if (magic, version, size) != (SHARD_MAGIC, SHARD_VERSION, expected):
        raise SystemExit(f'{path}: not a complete shard of GPT-2 tokens: magic number {magic} (not {SHARD_MAGIC}), '
                         f'version {version} (not {SHARD_VERSION}) or {size:,} bytes (not {expected:,})')


def shard(path, split):
    """Yield the tokens of a shard in batches."""
    tokens = np.memmap(path, '<u2', 'r', offset=4 * SHARD_HEADER)
    for start in range(0, len(tokens), SHARD_PIECE):
        yield [(split, np.array(tokens[start:start + SHARD_PIECE]))]


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
        segments = [batched(zip(repeat(split), documents([path])))
                    for split, paths in (('train', files), ('val', val_files)) for path in paths]
    else:
        enough = int(1 / val_fraction) + 1
        try:
            lengths = [len(text) for text in islice(documents(files), enough)]
        except OSError as error:
            raise SystemExit(str(error)) from None
        if len(lengths) == enough:
            rule = f'val: {val_fraction:g} of the documents'  # at 0.01 the documents 100, 200, 300, …
            pairs = (('val' if int(val_fraction * i) > int(val_fraction * (i - 1)) else 'train', text)
                     for i, text in enumerate(documents(files), 1))
        else:
            rule = f'val: about the last {val_fraction:g} of the text, as there are fewer than {enough} documents'
            pairs = by_position(documents(files), sum(lengths), val_fraction)
        print(f'{source}: {rule}')
        segments = [batched(pairs)]
    return Corpus(source, revision, rule, open=lambda: segments)


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

    Hidden files are left out; a note names others that are not read, among them links to directories.
    """
    files = []
    for path in paths:
        found = sorted(p for p in path.rglob('*') if p.is_symlink() or not p.is_dir()) if path.is_dir() else [path]
        found = [p for p in found if not any(name[0] == '.' for name in p.relative_to(path).parts)]
        readable = [p for p in found if reader_of(p)]
        if not readable:
            raise SystemExit(f'{path}: no .txt, .jsonl or .parquet file')
        if others := [p for p in found if p not in readable]:
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
    with path.open('rb') as file:
        if kind := COMPRESSED.get(path.suffix.lower()):
            import pyarrow  # unlike gzip and zstandard, it fails when a file is truncated
            file = io.BufferedReader(pyarrow.input_stream(file, compression=kind))
        for number, line in enumerate(file, 1):
            try:
                text = line.decode('utf-8-sig' if number == 1 else 'utf-8')
            except UnicodeDecodeError as error:
                raise SystemExit(f'{path}, line {number}: not UTF-8 text (byte {line[error.start]:#04x}, '
                                 f'{error.reason})') from None
            yield text


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
                raise SystemExit(f'{path}, line {number}: not a JSON object with the key {text_key!r}; '
                                 'see --text_key') from None


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file; only the column `text_key` is read."""
    from pyarrow.parquet import ParquetFile
    with path.open('rb') as opened:
        file = ParquetFile(opened)
        names = file.schema_arrow.names
        if text_key not in names and file.metadata.num_rows:
            raise SystemExit(f'{path}: no column {text_key!r}, only {", ".join(names)}; see --text_key')
        for rows in file.iter_batches(16, columns=[text_key]):  # few, because documents may be large
            yield from rows[text_key].to_pylist()


READERS = {'.txt': txt, '.jsonl': jsonl, '.parquet': parquet}
COMPRESSED = {'.gz': 'gzip', '.zst': 'zstd'}
READERS |= {f'{kind}{packed}': READERS[kind] for kind in ('.txt', '.jsonl') for packed in COMPRESSED}


def reader_of(path):
    """Return the function that reads a file of this name, None if there is none."""
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)
