"""Documents from tables (parquet, jsonl) through `datasets`, on the Hub or on disk, and from a user's own files.

Also the flags that every prepare.py has.
"""

import argparse
import hashlib
import json
import os
from functools import partial
from itertools import chain, islice
from pathlib import Path

from data.tokenizer import END_OF_TEXT, TOKENIZER_NAMES, get_tokenizer
from data.writer import Batches, Corpus, sha256, write_bins
from runtime.files import first_line

ROWS = 1000  # rows of a table in one batch
CHARS = 2 ** 20  # characters of text in one batch
SPLIT = {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}  # nanoGPT's split of OpenWebText


def argument_parser(doc, script, tokenizer=None):
    """The parser of a prepare.py, from its docstring and __file__, with the flags that all of them share.

    `tokenizer`: the default of --tokenizer; without it, there is no such flag.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', type=Path, default=Path(script).resolve().parent,
                        help="where the bins go (default: this script's directory)")
    parser.add_argument('--num_proc', type=at_least_one, help='processes (default: one per core)',
                        default=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
    parser.add_argument('--overwrite', action='store_true', help='replace other bins that are in the way')
    if tokenizer:
        parser.add_argument('--tokenizer', type=get_tokenizer, metavar=TOKENIZER_NAMES, default=tokenizer,
                            help=f'default: {tokenizer}')
    return parser


def at_least_one(text):
    """An int >= 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError('must be a whole number, at least 1')
    return int(text)


def local_files(paths):
    """(source, revision) of files on disk: their names, and the SHA-256 of the list of their SHA-256s."""
    try:
        listed = ''.join(map(sha256, paths))
    except OSError as error:
        raise SystemExit(f'{error.filename}: cannot be read ({error.strerror})') from None
    return names_of(paths), f'sha256:{hashlib.sha256(listed.encode()).hexdigest()}'


def names_of(paths):
    """The names of the first three files, and how many more there are."""
    return ' '.join(path.name for path in paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')


# ---- tables ----------------------------------------------------------------------------------------------------------


def load(files, text_key, **kwargs):
    """`datasets.load_dataset` of parquet or jsonl files (paths or hf:// addresses), as one split."""
    files = [str(file) for file in files]
    kind = 'parquet' if files[0].endswith('.parquet') else 'json'
    try:
        import datasets
        dataset = datasets.load_dataset(kind, data_files=files, split='train', **kwargs)
    except Exception as error:  # of the import, the network, the Hub, the file system and parsers: no common class
        hint = '; --data_files FILE... reads local copies' if files[0].startswith('hf:') else ''
        raise SystemExit(f'{files[0]}: cannot be read ({type(error).__name__}: {first_line(error)}){hint}') from None
    if dataset.column_names and text_key not in dataset.column_names:
        raise SystemExit(f'{files[0]}: no column {text_key!r}, only {", ".join(dataset.column_names)}')
    return dataset


def prepare_split_table(doc, script, repository, revision, names):
    """A whole prepare.py, for a table on the Hub in GPT-2's tokens and with nanoGPT's split."""
    parser = argument_parser(doc, script, tokenizer='gpt2')
    parser.add_argument('--data_files', nargs='+', type=Path, metavar='FILE', help='instead of those on the Hub')
    args = parser.parse_args()
    if args.data_files:
        files, (source, revision) = args.data_files, local_files(args.data_files)
    else:
        files, source = [f'hf://datasets/{repository}@{revision}/{name}' for name in names], repository
    corpus = Corpus(source, revision, split=f'train_test_split: {SPLIT}',
                    open=partial(split_table, files, min(args.num_proc, len(files))))
    write_bins(corpus, args.tokenizer, args.out_dir, args.num_proc, args.overwrite)


def split_table(files, num_proc):
    """Batches of a table split as nanoGPT splits it: the parts of `datasets`' train_test_split, each in its order."""
    dataset = load(files, 'text', num_proc=num_proc)
    try:
        parts = dataset.train_test_split(**SPLIT)
    except ValueError:
        raise SystemExit(f'{files[0]}: {len(dataset)} documents are too few to split') from None
    parts = {'train': parts['train'], 'val': parts['test']}
    segments = [[(split, slice(start, start + ROWS))] for split in parts for start in range(0, len(parts[split]), ROWS)]
    return Batches(segments, partial(read_rows, parts), documents=len(dataset))


def read_rows(parts, batch):
    """Worker: the documents of one batch of a split table."""
    split, rows = batch
    return [(split, text) for text in parts[split][rows]['text']]


def stream_tables(files):
    """Batches of tables that are too large to store: {split: files}, read one after another as streams."""
    return Batches([map(partial(tagged, split), stream(file, load([file], 'text', streaming=True), 'text'))
                    for split in files for file in files[split]])


def tagged(split, texts):
    """The texts as documents of `split`."""
    return [(split, text) for text in texts]


def stream(file, dataset, text_key):
    """Yield the texts of one streamed file in lists of ROWS. After an OSError the writer keeps what it has."""
    try:
        for table in dataset.with_format('arrow').iter(ROWS):
            if text_key not in table.column_names:
                raise SystemExit(f'{file}: no column {text_key!r}, only {", ".join(table.column_names)}')
            yield table[text_key].to_pylist()
    except Exception as error:  # as in `load`
        raise OSError(f'{file}: {type(error).__name__}: {first_line(error)}') from None


# ---- a user's own files ----------------------------------------------------------------------------------------------


def files_corpus(files, val_files=(), val_fraction=0.01, text_key='text'):
    """.txt, .jsonl and .parquet files, and directories of them. Without `val_files`, some of the text is for val."""
    files, val_files = expand(files), expand(val_files)
    source, revision = local_files([*files, *val_files])
    if {path.suffix for path in [*files, *val_files]} != {'.txt'}:
        source += f', key {text_key!r}'  # another key is other text, so these are other bins
    if val_files:
        rule = 'val: ' + names_of(val_files)
        documents = chain((('train', text) for text in read_files(files, text_key)),
                          (('val', text) for text in read_files(val_files, text_key)))
    else:
        enough = int(1 / val_fraction) + 1
        try:
            first = list(islice(read_files(files, text_key), enough))
        except OSError as error:
            raise SystemExit(str(error)) from None
        if len(first) == enough:
            rule = f'val: {val_fraction:g} of the documents'
            documents = by_document(read_files(files, text_key), val_fraction)
        else:
            rule = f'val: the last {val_fraction:g} of the text, as there are fewer than {enough} documents'
            documents = by_position(first, val_fraction)
        print(f'{source}: {rule}')
    return Corpus(source, revision, rule, open=lambda: Batches([batched(documents)]))


def by_document(texts, fraction):
    """(split, text): a document is for val when `fraction` × (documents so far) reaches the next whole number.

    At 0.01 these are the documents 100, 200, 300, ...
    """
    for i, text in enumerate(texts):
        yield 'val' if int(fraction * (i + 1)) > int(fraction * i) else 'train', text


def by_position(texts, fraction):
    """(split, text): val begins after the last line end before the last `fraction` of the characters."""
    left = max(1, int(sum(map(len, texts)) * (1 - fraction)))  # characters for train
    for text in texts:
        if 0 < left <= len(text):  # the document in which val begins
            end = text.rfind('\n', 0, left) + 1 or left
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
    """The paths, where a directory stands for the readable files anywhere below it, in the order of their names.

    Hidden files are left out.
    """
    files = []
    for path in paths:
        found = sorted(path.rglob('*')) if path.is_dir() else [path]
        found = [p for p in found if p.suffix in READERS and not any(n[0] == '.' for n in p.relative_to(path).parts)]
        if not found:
            raise SystemExit(f'{path}: no .txt, .jsonl or .parquet file')
        files += found
    return files


def read_files(paths, text_key):
    """Yield the documents of the files; blank ones are left out."""
    for path in paths:
        for document in READERS[path.suffix](path, text_key):
            if not isinstance(document, str):
                raise SystemExit(f'{path}: {text_key!r} is {document!r} in one document, not text')
            if document.strip():
                yield document


def lines(path):
    """Yield the lines of a UTF-8 file without its byte order mark; only a newline ends one. SystemExit if not UTF-8."""
    try:
        with path.open(encoding='utf-8-sig', newline='\n') as file:
            yield from file
    except UnicodeDecodeError as error:
        raise SystemExit(f'{path}: cannot be read as UTF-8 text ({error})') from None


def txt(path, text_key):
    """Yield the documents of a .txt file between <|endoftext|>."""
    parts = []
    for line in lines(path):
        *ends, rest = line.split(END_OF_TEXT)
        for end in ends:
            yield ''.join([*parts, end])
            parts = []
        parts.append(rest)
    yield ''.join(parts)


def jsonl(path, text_key):
    """Yield the text of each line of a .jsonl file that is not blank."""
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)[text_key]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f'{path}, line {number}: not a JSON object with the key {text_key!r} '
                                 '(--text_key names another)') from None


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file."""
    for texts in stream(path, load([path], text_key, streaming=True), text_key):
        yield from texts


READERS = {'.txt': txt, '.jsonl': jsonl, '.parquet': parquet}
