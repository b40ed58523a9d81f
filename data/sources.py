"""Documents from .txt, .jsonl and .parquet files, and the flags shared by all prepare.py scripts."""

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
from collections import Counter
from itertools import chain, islice, repeat
from pathlib import Path

from data.tokenizer import END_OF_TEXT, TOKENIZER_NAMES, get_tokenizer
from data.writer import Corpus, sha256
from runtime import arguments
from runtime.files import local_path, one_line

CHARS = 2 ** 23  # characters of text in one batch
READABLE = '.txt, .jsonl (one JSON object a line) and .parquet are read, also .txt.gz, .jsonl.gz, .txt.zst, …'


def argument_parser(doc, script, tokenizer=None):
    """Build the parser of a prepare.py from its docstring and __file__. `tokenizer`: default of --tokenizer, if any."""
    parser = arguments.argument_parser(doc)
    parser.add_argument('--out_dir', type=local_path, default=Path(script).resolve().parent,
                        help="where the bins go (default: this script's directory)")
    parser.add_argument('--num_proc', type=arguments.at_least(1), help='processes (default: one per core)',
                        default=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
    parser.add_argument('--overwrite', action='store_true', help='replace other bins in out_dir')
    if tokenizer:
        parser.add_argument('--tokenizer', type=get_tokenizer, metavar=TOKENIZER_NAMES, default=tokenizer,
                            help='default: %(default)s')
    return parser


def distinct(paths):
    """Return the paths without duplicates of a file."""
    return list({path.resolve(): path for path in paths}.values())


def local_files(paths):
    """Return (source, revision) of files on disk: their names, and a SHA-256 of their SHA-256s."""
    listed = ''.join(map(sha256, paths))
    return names_of(paths), f'sha256:{hashlib.sha256(listed.encode()).hexdigest()}'


def names_of(paths):
    """Name the first three files, and say how many more there are."""
    return ' '.join(path.name for path in paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')


def files_corpus(files, val_files=(), val_fraction=0.01, text_key='text'):
    """Return the Corpus of files and directories, without blank documents. `val_files` are only validated on."""
    files, val_files = distinct(expand(files)), distinct(expand(val_files))
    held_out = {path.resolve() for path in val_files}
    files = [path for path in files if path.resolve() not in held_out] or files  # both may be the same file
    source, revision = local_files([*files, *val_files])
    if any(READERS.get(kind_of(path)) is not txt for path in [*files, *val_files]):
        source += f', key {text_key!r}'

    def documents(paths):
        return (text for path in paths for text in read(path, text_key) if text.strip())

    if val_files:
        pairs = chain(zip(repeat('train'), documents(files)), zip(repeat('val'), documents(val_files)))
        return Corpus(source, revision, 'val: ' + names_of(val_files), open=lambda: batched(pairs))
    enough = int(1 / val_fraction) + 1
    lengths = [len(text) for text in islice(documents(files), enough)]
    if len(lengths) == enough:
        rule = f'val: {val_fraction:g} of the documents'  # at 0.01 the documents 100, 200, 300, …
        pairs = (('val' if int(val_fraction * i) > int(val_fraction * (i - 1)) else 'train', text)
                 for i, text in enumerate(documents(files), 1))
    else:
        rule = f'val: about the last {val_fraction:g} of the text, because there are fewer than {enough} documents'
        pairs = by_position(documents(files), sum(lengths), val_fraction)
    print(rule)
    return Corpus(source, revision, rule, open=lambda: batched(pairs))


def by_position(texts, size, fraction):
    """Yield (split, text). val is the last `fraction` of `size` characters, or up to twice that, to start a line."""
    begin, seen = max(1, int(size * (1 - fraction))), 0  # the start of val, and of this document
    for text in texts:
        cut = max(0, begin - seen)
        if 0 < cut <= len(text):
            cut = text.rfind('\n', max(0, cut - (size - begin)), cut) + 1 or cut
        yield from ((split, part) for split, part in (('train', text[:cut]), ('val', text[cut:])) if part)
        seen += len(text)


def batched(documents):
    """Yield lists of documents, each with about CHARS characters."""
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
    """Replace directories by the readable files below them, sorted by name. Prints how many files are left out."""
    files = []
    for path in paths:
        below = sorted(files_below(path)) if path.is_dir() else [path]
        found = [p for p in below if kind_of(p) in READERS]
        if not found:
            raise SystemExit(f'{path}: no file to read; {READABLE}')
        if left := Counter(kind for kind in map(kind_of, below) if kind not in READERS):
            kinds = ', '.join(kind for kind, _ in left.most_common(5)) + ', …' * (len(left) > 5)
            print(f'{path}: {len(found)} files read, {left.total()} left out ({kinds}); {READABLE}')
        files += found
    return files


def files_below(directory):
    """Yield the files below a directory, except hidden ones. OSError if a subdirectory cannot be read."""
    def fail(error):
        raise error

    for folder, folders, names in os.walk(directory, onerror=fail):
        folders[:] = [name for name in folders if name[0] != '.']
        linked = [name for name in folders if Path(folder, name).is_symlink()]  # left out, because it may be a cycle
        yield from (Path(folder, name) for name in names + linked if name[0] != '.')


def read(path, text_key):
    """Yield the texts of a file, without nulls. Exit if its content is bad, OSError if the disk fails."""
    number, nulls = 0, 0
    try:
        for text in READERS[kind_of(path)](path, text_key):
            if text is None:  # nulls are common in parquet
                nulls += 1
                continue
            if not isinstance(text, str):
                raise TypeError(f'{text_key!r} is {text!r:.60}, not text')
            number += 1
            yield text
    except Exception as error:  # the errors of parsers and decompressors have no common class
        if code := getattr(error, 'errno', None):
            raise OSError(code, os.strerror(code), str(path)) from None
        advice = {KeyError: '; --text_key names the key of the text', UnicodeDecodeError: '; convert the file to UTF-8'}
        raise SystemExit(f'{path}: cannot be read after document {number + nulls} ({type(error).__name__}: '
                         f'{one_line(error)}){advice.get(type(error), "")}') from None
    if nulls:
        print_once(f'{path}: {nulls} null texts left out of {number + nulls}')


print_once = functools.cache(print)  # because a small file is read twice


@contextlib.contextmanager
def network_errors(source):
    """Turn any error inside into an OSError, which write_bins reports in one line."""
    try:
        yield
    except Exception as error:  # the errors of HTTP clients have no common class
        raise OSError(f'{source}: {type(error).__name__}: {one_line(error)}') from None


def lines(path):
    """Yield the lines of a UTF-8 file or its .gz or .zst, without a byte order mark. Only newlines end lines."""
    with gzip.open(path) if path.suffix.lower() == '.gz' else path.open('rb') as file:
        if path.suffix.lower() == '.zst':
            import pyarrow  # unlike zstandard, it detects a truncated file
            file = io.BufferedReader(pyarrow.input_stream(file, compression='zstd'))
        yield from io.TextIOWrapper(file, encoding='utf-8-sig', newline='\n')


def txt(path, text_key):
    """Yield the documents of a .txt file, separated by <|endoftext|>."""
    parts = []
    for line in lines(path):
        *ends, rest = line.split(END_OF_TEXT)
        for end in ends:
            yield ''.join([*parts, end])
            parts = []
        parts.append(rest)
    yield ''.join(parts)


def jsonl(path, text_key):
    """Yield the text of each line of a .jsonl file, except blank lines."""
    for line in lines(path):
        if begin := line.lstrip()[:1]:
            if begin != '{':
                raise ValueError(f"a line begins with {begin}, not {{; jq -c '.[]' splits an array into lines")
            yield json.loads(line)[text_key]


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file."""
    from pyarrow.parquet import ParquetFile
    with path.open('rb') as opened:
        file = ParquetFile(opened)
        for rows in file.iter_batches(16, columns=[text_key]):  # few rows, because documents may be large
            yield from rows[text_key].to_pylist()


def kind_of(path):
    """Return a file's suffix, with the suffix before it if it is compressed (.json.gz), or its name if it has none."""
    compressed = path.suffix.lower() in ('.gz', '.zst', '.xz', '.bz2')
    return ''.join(path.suffixes[-2 if compressed else -1:]).lower() or path.name


READERS = {'.txt': txt, '.txt.gz': txt, '.txt.zst': txt, '.jsonl': jsonl, '.jsonl.gz': jsonl, '.jsonl.zst': jsonl,
           '.parquet': parquet}
