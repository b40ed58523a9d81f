"""Where documents come from: tables (parquet, jsonl) through `datasets`, on the Hub or on disk, and a user's own files.

Also the flags that every prepare.py has.
"""

import argparse
import bz2
import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import zlib
from fractions import Fraction
from functools import partial
from pathlib import Path

from data.tokenizer import TOKENIZER_NAMES, get_tokenizer
from data.writer import Batches, Corpus, sha256, write_bins
from runtime.files import first_line

ROWS = 1000  # rows of a table in one batch
CHARS = 2 ** 20  # characters of text in one batch
LONGEST = 2 ** 22  # characters after which a text is cut where tokens may cross
DENOMINATOR = 10 ** 6  # the largest of a fraction of documents; so its reciprocal is the least fraction
END_OF_TEXT = '<|endoftext|>'
SPLIT = {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}  # nanoGPT's split of OpenWebText

# A blank after something that is none. The tokenizers named in data/tokenizer.py never join across such a place (they
# cut text into words before they merge, a blank going with the word after it), so a long text cut there gives the ids
# of the whole. Text that has no such place for LONGEST characters (base64, blanks only) is cut nevertheless, or one
# piece would take all memory.
CUT = re.compile(r'(?<=\S)[ \t\r\n]')


def argument_parser(doc, script, tokenizer=None, data_files=None):
    """The parser of a prepare.py, from its docstring and __file__, with the flags that all of them share.

    `tokenizer`: the default of --tokenizer; `data_files`: what kinds --data_files takes. Without them, no such flag.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', type=Path, default=Path(script).resolve().parent,
                        help="where the bins go (default: this script's directory)")
    parser.add_argument('--num_proc', type=at_least_one, help='processes (default: one per core)',
                        default=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
    parser.add_argument('--overwrite', action='store_true', help='replace other bins that are in the way')
    if tokenizer:
        parser.add_argument('--tokenizer', metavar=TOKENIZER_NAMES, default=tokenizer, help=f'default: {tokenizer}')
    if data_files:
        parser.add_argument('--data_files', nargs='+', type=existing, metavar='FILE',
                            help=f'local {data_files} files instead of the Hub')
    return parser


def at_least_one(text):
    """An int >= 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError('must be at least 1')
    return int(text)


def existing(text):
    """The path of a file or directory, for argparse: so a prepare.py looks for its input before its tokenizer."""
    if not Path(text).exists():
        raise SystemExit(f'{text}: no such file')
    return Path(text)


def local_files(paths, val_paths=()):
    """(source, revision) of files on disk: their names, the SHA-256 of the list of their SHA-256s.

    So text that moves from one file to another makes another revision. SystemExit if a file cannot be read, or is for
    val with the content of one for train.
    """
    files = [*paths, *val_paths]
    digests = []
    for path in files:
        try:
            digests.append(sha256(path))
        except OSError as error:
            raise SystemExit(f'{path}: cannot be read ({error})') from None
        if len(digests) > len(paths) and (first := digests.index(digests[-1])) < len(paths):
            raise SystemExit(f'{path}: for val, but the same content as {files[first]}, which is for train; give val '
                             'a file of its own')
    return names_of(files), f'sha256:{hashlib.sha256("".join(digests).encode()).hexdigest()}'


def names_of(paths):
    """The names of the first three files, and how many there are besides."""
    return ' '.join(path.name for path in paths[:3]) + (f' and {len(paths) - 3} more' if len(paths) > 3 else '')


def hub(repository, revision, names):
    """Addresses, for `load`, of files of a data set on the Hub."""
    return [f'hf://datasets/{repository}@{revision}/{name}' for name in names]


# ---- tables ----------------------------------------------------------------------------------------------------------


def load(files, text_key, **kwargs):
    """`datasets.load_dataset` of parquet or jsonl files (paths or hf:// addresses), as one split."""
    try:
        import datasets
    except ImportError:
        raise SystemExit('this corpus needs the package datasets: pip install datasets') from None
    files = [str(file) for file in files]
    if files[0].endswith('.zst') and not importlib.util.find_spec('zstandard'):
        raise SystemExit('reading .zst needs the package zstandard: pip install zstandard')
    kind = 'parquet' if files[0].endswith('.parquet') else 'json'
    try:
        dataset = datasets.load_dataset(kind, data_files=files, split='train', **kwargs)
    except Exception as error:  # errors of the network, the Hub, the file system and parsers have no common class
        raise SystemExit(f'{files[0]}: cannot be read ({type(error).__name__}: {first_line(error)}); '
                         '--data_files FILE... reads local copies') from None
    if dataset.column_names and text_key not in dataset.column_names:
        raise SystemExit(f'{files[0]}: no column {text_key!r}, only {", ".join(dataset.column_names)}')
    return dataset


def prepare_split_table(doc, script, repository, revision, names):
    """The whole of a prepare.py whose corpus is a table on the Hub, in GPT-2's tokens and with nanoGPT's split."""
    args = argument_parser(doc, script, tokenizer='gpt2', data_files='.parquet or .jsonl').parse_args()
    tokenizer = get_tokenizer(args.tokenizer)
    files, source = hub(repository, revision, names), repository
    if args.data_files:
        files, (source, revision) = args.data_files, local_files(args.data_files)
    corpus = Corpus(source, revision, split=f'train_test_split: {SPLIT}',
                    open=partial(split_table, files, min(args.num_proc, len(files))))
    write_bins(corpus, tokenizer, args.out_dir, args.num_proc, args.overwrite)


def split_table(files, num_proc, text_key='text'):
    """Batches of a table split as nanoGPT splits it: the parts of `datasets`' train_test_split, each in its order."""
    dataset = load(files, text_key, num_proc=num_proc)
    try:
        parts = dataset.train_test_split(**SPLIT)
    except ValueError:
        raise SystemExit(f'{files[0]}: {len(dataset)} documents are too few to split') from None
    parts = {'train': parts['train'], 'val': parts['test']}
    segments = [[(split, start)] for split in parts for start in range(0, len(parts[split]), ROWS)]
    return Batches(segments, partial(read_rows, parts, text_key), documents=len(dataset))


def read_rows(parts, text_key, batch):
    """Worker: the pieces of one batch of a split table."""
    split, start = batch
    return [(split, text, True) for text in parts[split][start:start + ROWS][text_key]]


def stream_tables(files, text_key='text'):
    """Batches of tables too large to keep: {split: files}, read one after another as streams, nothing stored."""
    return Batches([stream(file, load([file], text_key, streaming=True), split, text_key)
                    for split in files for file in files[split]])


def stream(file, dataset, split, text_key):
    """Yield the batches of one file."""
    try:
        for table in dataset.with_format('arrow').iter(ROWS):
            if text_key not in table.column_names:
                raise SystemExit(f'{file}: no column {text_key!r}, only {", ".join(table.column_names)}')
            yield [(split, text, True) for text in table[text_key].to_pylist()]
    except Exception as error:  # as in `load`; an OSError lets the writer keep what it has
        raise OSError(f'{file}: {type(error).__name__}: {first_line(error)}') from None


# ---- a user's own files ----------------------------------------------------------------------------------------------


def files_corpus(files, val_files=(), val_fraction=0.01, text_key='text'):
    """.txt, .jsonl (both also .gz, .bz2) and .parquet files, and directories of them.

    Without `val_files`, some of the text is for val.
    """
    files, val_files = expand(files), expand(val_files)
    source, revision = local_files(files, val_files)
    if {kind_of(path) for path in [*files, *val_files]} != {'.txt'}:
        source += f', key {text_key!r}'  # another key is other text, so these are other bins
    if val_files:
        rule = 'val: ' + names_of(val_files)
        pieces = ((split, *piece) for split, of in (('train', files), ('val', val_files))
                  for piece in read_files(of, text_key))
    else:
        # As many documents in all as the fraction says, if it comes to one; else the end of the text.
        part = Fraction(val_fraction).limit_denominator(DENOMINATOR)
        enough = math.ceil(1 / part)
        documents, characters = count(read_files(files, text_key), enough)
        if documents == enough:
            rule = f'val: {part.numerator} of every {part.denominator} documents'
            pieces = by_document(read_files(files, text_key), part)
        else:
            rule = f'val: the last {val_fraction:g} of the text, as there are fewer than {enough} documents'
            pieces = by_position(read_files(files, text_key), max(1, int(characters * (1 - val_fraction))))
        print(f'{source}: {rule}')
    return Corpus(source, revision, rule, open=lambda: Batches([batched(pieces)]))


def count(pieces, enough):
    """(documents, characters) of the pieces, up to `enough` documents. What cannot be read is one line."""
    documents = characters = 0
    try:
        for text, ends in pieces:
            documents, characters = documents + ends, characters + len(text)
            if documents == enough:
                break
    except OSError as error:
        raise SystemExit(f'{error}; the same command tries again') from None
    return documents, characters


def by_document(pieces, part):
    """(split, text, ends): a document is for val when `part` × (documents so far) reaches the next whole number.

    Of 1/n these are the documents number n, 2 x n, ...
    """
    number, numerator, denominator = 1, part.numerator, part.denominator
    for text, ends in pieces:
        yield 'val' if number * numerator % denominator < numerator else 'train', text, ends
        number += ends


def by_position(pieces, boundary):
    """(split, text, ends): val's is what comes after the last line end before character number `boundary`."""
    split = 'train'
    for text, ends in pieces:
        if split == 'train' and boundary <= len(text):
            end = text.rfind('\n', 0, boundary) + 1 or boundary
            yield split, text[:end], True
            split, text = 'val', text[end:]
            if not text:
                continue
        boundary -= len(text)
        yield split, text, ends


def batched(pieces):
    """Lists of pieces with about CHARS characters in each."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def kind_of(path):
    """'.txt', '.jsonl' or '.parquet', by the name of a file, compressed or not; None if it is none of them."""
    kind = path.with_suffix('').suffix if path.suffix in ('.gz', '.bz2') else path.suffix
    return kind if kind in ('.txt', '.jsonl', '.parquet') else None


def expand(paths):
    """The paths, with the files below it for each directory: those of a kind that is read, hidden ones left out.

    In the order of their names. SystemExit when nothing below a directory, or a file that was named, is of such a kind.
    """
    files = []
    for path in paths:
        found = [path]
        if path.is_dir():
            below = [p for p in sorted(path.rglob('*')) if p.is_file()]
            found = [p for p in below if kind_of(p) and not any(n.startswith('.') for n in p.relative_to(path).parts)]
            print(f'{path}: {len(found)} of {len(below)} files are text')
        if not found or not kind_of(found[0]):
            raise SystemExit(f'{path}: {"no" if path.is_dir() else "not a"} .txt, .jsonl (both also .gz, .bz2) or '
                             '.parquet file' + ' in it' * path.is_dir())
        files += found
    return files


def read_files(paths, text_key):
    """Yield (text, ends) for the documents of the files, the long ones in several pieces; blank ones are left out.

    SystemExit if the data is bad, OSError if the system cannot read it: that may pass, and the writer keeps its parts.
    """
    for path in paths:
        kind = kind_of(path)
        try:
            if kind == '.txt':
                with open_text(path) as file:
                    yield from txt_pieces(file)
            else:
                for document in (jsonl if kind == '.jsonl' else parquet)(path, text_key):
                    if not isinstance(document, str):
                        raise SystemExit(f'{path}: {text_key!r} is {document!r} in one document, not text')
                    if document.strip():
                        yield from pieces_of(document)
        except (UnicodeDecodeError, EOFError, zlib.error, OSError) as error:
            # What gzip, bz2 and pyarrow raise for damaged data is an OSError, too, but one without an errno.
            kind = OSError if getattr(error, 'errno', None) else SystemExit
            raise kind(f'{path}: cannot be read ({first_line(error)})') from None


def open_text(path):
    """A text file, compressed or not, without its byte order mark, and with its line ends as they are.

    Only a newline ends a line: JSON may have a carriage return between its tokens.
    """
    opener = {'.gz': gzip.open, '.bz2': bz2.open}.get(path.suffix, open)
    return opener(path, 'rt', encoding='utf-8-sig', newline='\n')


def read_text(path):
    """The whole text of a UTF-8 file, compressed or not, exactly as the corpora have it (see `open_text`).

    SystemExit with one line when it cannot be read.
    """
    try:
        with open_text(Path(path)) as file:
            return file.read()
    except (UnicodeDecodeError, EOFError, zlib.error, OSError) as error:
        raise SystemExit(f'{path}: cannot be read as UTF-8 text ({first_line(error)})') from None


def txt_pieces(file):
    """Yield (text, ends) for documents between <|endoftext|>, never holding much more than LONGEST characters."""
    held = len(END_OF_TEXT) - 1  # characters that may be the beginning of <|endoftext|>, in which is no cut
    rest, begun = '', False
    while block := file.read(CHARS):
        *documents, rest = (rest + block).split(END_OF_TEXT)
        for document in documents:
            if begun or document.strip():
                yield from pieces_of(document)
            begun = False
        *ready, left = cut(rest[:-held])
        rest = left + rest[-held:]
        for text in ready:
            if begun := begun or bool(text.strip()):
                yield text, False
    if begun or rest.strip():
        yield from pieces_of(rest)


def jsonl(path, text_key):
    """Yield the text of each line of a .jsonl file that is not blank."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[text_key]
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f'{path}, line {number}: not a JSON object with the key {text_key!r} '
                                 '(--text_key names another)') from None
            except RecursionError:
                raise SystemExit(f'{path}, line {number}: nested too deeply to be read') from None


def parquet(path, text_key):
    """Yield the text of each row of a .parquet file."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile
    try:
        file = ParquetFile(path)
        if text_key not in file.schema_arrow.names:
            raise SystemExit(f'{path}: no column {text_key!r}, only {", ".join(file.schema_arrow.names)} '
                             '(--text_key names another)')
        for rows in file.iter_batches(batch_size=ROWS, columns=[text_key]):
            yield from rows.column(0).to_pylist()
    except ArrowException as error:
        raise SystemExit(f'{path}: not a parquet file, or a damaged one ({first_line(error)})') from None


def pieces_of(document):
    """Yield (text, ends) for one document."""
    *texts, last = cut(document)
    for text in texts:
        yield text, False
    yield last, True


def cut(text):
    """The text in pieces: each at least CHARS long and ending where no token crosses, the last as long as is left.

    Where no such place comes within LONGEST characters, the piece is LONGEST long, and the ids at its end may be others
    than those of the whole. Where the cuts are depends on nothing but the text before them.
    """
    pieces, start = [], 0
    while (found := CUT.search(text, start + CHARS, start + LONGEST)) or len(text) > start + LONGEST:
        end = found.start() if found else start + LONGEST
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
