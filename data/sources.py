"""Documents from .txt, .jsonl and .parquet files on disk, and the flags that every prepare.py has."""

import gzip
import hashlib
import io
import json
import os
from itertools import chain, islice, repeat
from pathlib import Path

from data.tokenizer import END_OF_TEXT, TOKENIZER_NAMES, get_tokenizer
from data.writer import Corpus, sha256
from runtime import arguments
from runtime.files import local_path, one_line

CHARS = 2 ** 23  # characters of text in one batch


def argument_parser(doc, script, tokenizer=None):
    """Return the parser of a prepare.py, from its docstring and __file__; --tokenizer exists if it has a default."""
    parser = arguments.argument_parser(doc)
    parser.add_argument('--out_dir', type=local_path, default=Path(script).resolve().parent,
                        help="where the bins go (default: this script's directory)")
    parser.add_argument('--num_proc', type=arguments.at_least(1), help='processes (default: one per core)',
                        default=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
    parser.add_argument('--overwrite', action='store_true', help='replace other bins in out_dir')
    if tokenizer:
        parser.add_argument('--tokenizer', type=get_tokenizer, metavar=TOKENIZER_NAMES, default=tokenizer,
                            help=f'default: {tokenizer}')
    return parser


def distinct(paths):
    """Return the paths without a second one of the same file, which would count twice."""
    return list({path.resolve(): path for path in paths}.values())


def local_files(paths):
    """Return (source, revision) of files on disk: their names, and the SHA-256 of the list of their SHA-256s."""
    listed = ''.join(map(sha256, paths))
    return names_of(paths), f'sha256:{hashlib.sha256(listed.encode()).hexdigest()}'


def names_of(paths):
    """Name the first three files, and say how many more there are."""
    return ' '.join(path.name for path in paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')


def files_corpus(files, val_files=(), val_fraction=0.01, text_key='text'):
    """Return the Corpus of .txt, .jsonl and .parquet files, and directories of them, without blank documents. A file
    counts once, one of `val_files` for val only, unless train would have no other."""
    files, val_files = distinct(expand(files)), distinct(expand(val_files))
    held_out = {path.resolve() for path in val_files}
    files = [path for path in files if path.resolve() not in held_out] or files
    source, revision = local_files([*files, *val_files])
    if any(reader_of(path) is not txt for path in [*files, *val_files]):
        source += f', key {text_key!r}'  # part of the bins' identity

    def documents(paths):
        return (text for path in paths for text in read(path, text_key) if text.strip())

    if val_files:
        rule = 'val: ' + names_of(val_files)
        pairs = chain(zip(repeat('train'), documents(files)), zip(repeat('val'), documents(val_files)))
    else:
        enough = int(1 / val_fraction) + 1
        lengths = [len(text) for text in islice(documents(files), enough)]
        if len(lengths) == enough:
            rule = f'val: {val_fraction:g} of the documents'  # at 0.01 the documents 100, 200, 300, …
            pairs = (('val' if int(val_fraction * i) > int(val_fraction * (i - 1)) else 'train', text)
                     for i, text in enumerate(documents(files), 1))
        else:
            rule = f'val: about the last {val_fraction:g} of the text, as there are fewer than {enough} documents'
            pairs = by_position(documents(files), sum(lengths), val_fraction)
        print(rule)
    return Corpus(source, revision, rule, open=lambda: batched(pairs))


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
    """Return the paths, with directories replaced by the files below them that can be read, sorted by name, without
    hidden ones."""
    files = []
    for path in paths:
        below = sorted(path.rglob('*')) if path.is_dir() else [path]
        found = [p for p in below if reader_of(p) and not p.is_dir()
                 and not any(part[0] == '.' for part in p.relative_to(path).parts)]
        if not found:
            raise SystemExit(f'{path}: no .txt, .jsonl or .parquet file; copy or link other text to a name in .txt')
        files += found
    return files


def read(path, text_key):
    """Yield the texts of a file. SystemExit when its content is bad, OSError when the file system fails."""
    number = 0
    try:
        for text in reader_of(path)(path, text_key):
            if not isinstance(text, str):
                raise TypeError(f'{text_key!r} is {text!r:.60}, not text')
            number += 1
            yield text
    except Exception as error:  # parsers and decompressors have no common class
        if getattr(error, 'errno', None):
            raise
        raise SystemExit(f'{path}: cannot be read after document {number} ({type(error).__name__}: {one_line(error)})'
                         ) from None


def lines(path):
    """Yield the lines of a UTF-8 file, perhaps a .gz or .zst, without its byte order mark; only newlines end them."""
    with gzip.open(path) if path.suffix.lower() == '.gz' else path.open('rb') as file:
        if path.suffix.lower() == '.zst':
            import pyarrow  # unlike zstandard, it fails when a file is truncated
            file = io.BufferedReader(pyarrow.input_stream(file, compression='zstd'))
        yield from io.TextIOWrapper(file, encoding='utf-8-sig', newline='\n')


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
    for line in lines(path):
        if line.strip():
            yield json.loads(line)[text_key]


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file; only the column `text_key` is read."""
    from pyarrow.parquet import ParquetFile
    with path.open('rb') as opened:
        file = ParquetFile(opened)
        for rows in file.iter_batches(16, columns=[text_key]):  # few, because documents may be large
            yield from rows[text_key].to_pylist()


def reader_of(path):
    """Return the function that reads a file of this name, None if there is none."""
    name = path.name.lower()
    kind = Path(name.removesuffix('.gz').removesuffix('.zst')).suffix
    return parquet if name.endswith('.parquet') else {'.txt': txt, '.jsonl': jsonl}.get(kind)
