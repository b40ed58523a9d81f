"""The corpora: tokenizers, sources, the writer of bins, and every prepare.py."""

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import operator
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from conftest import ROOT, TINY, metrics, rejection

import train
from data import sources, writer
from data.fineweb import prepare as fineweb
from data.loader import Bin, read_meta
from data.openwebtext import prepare as openwebtext
from data.tokenizer import Char, get_tokenizer, tokenizer_from_meta
from data.writer import Corpus, write_bins
from scripts.load import load

EOT = '<|endoftext|>'
BYTE = get_tokenizer('byte')


@pytest.fixture(scope='session', autouse=True)
def environment(gpt2_cache, tmp_path_factory):
    """GPT-2's tokenizer is found, and no cache is left behind."""
    import datasets
    os.environ['HF_HOME'] = datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp('hf_home'))


def thread_pool(num_proc, context, initializer, initargs):
    """A pool without processes, which take a second to start."""
    writer.encode.tokenizer = tokenizer_from_meta(*initargs)
    return ThreadPoolExecutor(1)


@pytest.fixture(autouse=True)
def in_process(request, monkeypatch):
    if request.function is not test_bins_never_change:
        monkeypatch.setattr(writer, 'ProcessPoolExecutor', thread_pool)


def texts(n):
    """n documents, no two alike, with line ends, marks and letters outside ASCII."""
    rng = random.Random(0)
    words = ['sophia ', 'Hessian, ', 'über  ', 'naïve\n', '数学\t', '🙂\r\n', '3.14.\n\n', "don't ", EOT[:7]]
    return [f'{i} ' + ''.join(rng.choices(words, k=rng.randint(1, 80))) for i in range(n)]


def prepare(name, *args, ok=True):
    """Run data/NAME/prepare.py in this process; its output, or the one line of its failure."""
    out, err, problem = io.StringIO(), io.StringIO(), None
    with (patch.object(sys, 'argv', ['prepare.py', *map(str, args)]), contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(err)):
        try:
            importlib.import_module(f'data.{name}.prepare').main()
        except SystemExit as error:
            problem = error.code
    assert (not problem) == ok, (problem, err.getvalue())
    if ok:
        return out.getvalue() + err.getvalue()
    return problem if isinstance(problem, str) else err.getvalue().strip().splitlines()[-1]


def bins(out_dir):
    """The two bins as arrays and meta.json, checked against each other."""
    meta = json.loads((out_dir / 'meta.json').read_text())
    found = []
    for split in ('train', 'val'):
        data = (out_dir / f'{split}.bin').read_bytes()
        assert hashlib.sha256(data).hexdigest() == meta[split]['sha256']
        found.append(np.frombuffer(data, dtype=meta['dtype']))
        assert len(found[-1]) == meta[split]['tokens']
        assert found[-1].max() < meta['vocab_size']
        if meta['tokenizer'] == 'byte':
            assert meta[split]['bytes'] == len(found[-1]) - meta[split]['documents']
    assert {path.name for path in out_dir.iterdir()} - {'tokenizer.json'} == {
        'meta.json', 'prepare.lock', 'train.bin', 'val.bin'}
    return *found, meta


def done(out_dir):
    """The number of parts that are complete."""
    return len([*out_dir.glob('parts.*/*.npz')])


def documents_of(ids, tokenizer):
    """The texts between the end-of-text ids."""
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def by_split(corpus):
    """The documents of a corpus, in order: {'train': [...], 'val': [...]}."""
    found = {'train': [], 'val': []}
    for batch in corpus.open():
        for split, text in batch:
            found[split].append(text)
    return found


def write_parquet(path, rows, key='text'):
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({'url': [f'u{i}' for i in range(len(rows))], key: rows}), path)
    return path


def write_jsonl(path, rows, key='text'):
    import pyarrow
    data = ''.join(json.dumps({'meta': {'set': 'x'}, key: row}) + '\n' for row in rows).encode()
    if kind := {'.gz': 'gzip', '.zst': 'zstd'}.get(path.suffix):
        data = pyarrow.compress(data, kind, asbytes=True)
    path.write_bytes(data)
    return path


def pinned_corpus(kind, folder):
    def documents(n):
        return [f'{i} ' + "Sophia's clipped\r\nupdate  naïve\t数学 🙂 3.14. \n\n" * (i * 7 % 13) + EOT[:i % 13]
                + 'x' * (i % 5) for i in range(n)]

    rows = documents(300)
    if kind == 'table':
        path = write_parquet(folder / 'table.parquet', documents(2500))
        return Corpus('table', 'r1', 'nanoGPT', open=lambda: openwebtext.split_table([str(path)], 1))
    (folder / 'a.txt').write_bytes(EOT.join(rows[:100]).encode())
    if kind == 'few':
        return sources.files_corpus([folder / 'a.txt'], val_fraction=0.005)
    others = write_jsonl(folder / 'b.jsonl', rows[100:200]), write_parquet(folder / 'c.parquet', rows[200:])
    return sources.files_corpus([folder / 'a.txt', *others], val_fraction=0.05)


def interrupted(corpus, after, error=KeyboardInterrupt):
    """The corpus, with a Ctrl-C after some batches have been read."""
    def stopping():
        for i, batch in enumerate(corpus.open()):
            if i == after:
                raise error
            yield batch

    return replace(corpus, open=stopping)


@pytest.mark.parametrize('kind, tokenizer, train, val', [
    ('files', 'gpt2', '4eaa502e1e279648', 'baf35ea8c03b0fc4'),
    ('few', 'byte', '8d09431c6e57cf1a', '40f487499258ec3c'),
    ('table', 'gpt2', '17a838d9c4e2e1c9', 'e481404fb0adaf20')])
def test_bins_never_change(kind, tokenizer, train, val, tmp_path, monkeypatch):
    """Pinned, for any number of processes and after interruptions."""
    tokenizer = get_tokenizer(tokenizer)
    for out, num_proc, chars, rows, stops in (('whole', 1, 2 ** 20, 1000, ()), ('interrupted', 2, 2000, 100, (6, 8))):
        monkeypatch.setattr(sources, 'CHARS', chars)
        monkeypatch.setattr(openwebtext, 'ROWS', rows)
        for after in stops:
            with pytest.raises(SystemExit, match=r'stopped \(KeyboardInterrupt\); the same command'):
                write_bins(interrupted(pinned_corpus(kind, tmp_path), after), tokenizer, tmp_path / out, num_proc)
            assert 0 < done(tmp_path / out)
        meta = write_bins(pinned_corpus(kind, tmp_path), tokenizer, tmp_path / out, num_proc)
        assert (meta['train']['sha256'][:16], meta['val']['sha256'][:16]) == (train, val)
        bins(tmp_path / out)


def test_openwebtext_has_nanogpts_split(tmp_path, monkeypatch):
    """The two parts of train_test_split, in order, each document with its end-of-text id, as nanoGPT writes them."""
    import datasets
    rows = [*texts(2499), '']  # two documents for val
    files = [str(write_parquet(tmp_path / f'{i}.parquet', rows[start:end]))
             for i, (start, end) in enumerate([(0, 900), (900, 1000), (1000, 2500)])]
    assert openwebtext.FILES[-1].endswith('/train-00079-of-00080.parquet')
    monkeypatch.setattr(openwebtext, 'FILES', files)
    prepare('openwebtext', '--out_dir', tmp_path / 'out', '--num_proc', 2)
    train, val, meta = bins(tmp_path / 'out')
    parts = datasets.Dataset.from_dict({'text': rows}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    tokenizer = get_tokenizer('gpt2')
    for split, ids, part, size in ('train', train, 'train', 2498), ('val', val, 'test', 2):
        assert ids.tolist() == [i for text in parts[part]['text'] for i in [*tokenizer.encode(text), tokenizer.eot_id]]
        assert meta[split]['documents'] == size
        assert meta[split]['bytes'] == len(''.join(parts[part]['text']).encode())
    assert meta['split'] == "train_test_split: {'test_size': 0.0005, 'seed': 2357, 'shuffle': True}"


def test_shakespeare_char_is_nanogpts(tmp_path, monkeypatch):
    path, text = tmp_path / 'input.txt', 'To be, or not to be:\n' * 50
    path.write_text(text)
    prepare('shakespeare_char', '--input', path, '--out_dir', tmp_path / 'out')
    train, val, meta = bins(tmp_path / 'out')
    chars = sorted(set(text))
    assert meta['chars'] == ''.join(chars)
    assert [*train, *val] == [chars.index(c) for c in text] and len(train) == int(0.9 * len(text))
    assert rejection(tokenizer_from_meta(meta).encode, 'z') == (
        f"character 'z' is not among the {len(chars)} of this vocabulary")
    monkeypatch.setattr('urllib.request.urlopen', Mock(side_effect=[io.BytesIO(text.encode())]))
    for _ in range(2):  # the second time without a download
        prepare('shakespeare_char', '--out_dir', tmp_path / 'new/folder')
    assert (tmp_path / 'new/folder/input.txt').read_text() == text


@pytest.mark.parametrize('name, vocab_size, eot_id', [('gpt2', 50257, 50256), ('byte', 256, 0)])
def test_tokenizer(name, vocab_size, eot_id):
    tokenizer = get_tokenizer(name)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == (name, vocab_size, eot_id)
    assert tokenizer.dtype == 'uint16'
    for text in [*texts(20), '', f'a{EOT}b']:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert eot_id not in ids
    assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a\ufffdb'
    again = tokenizer_from_meta(json.loads(json.dumps(tokenizer.meta)))
    assert again.encode('the same') == tokenizer.encode('the same')


@pytest.fixture
def tokenizer_file(tmp_path):
    """A small byte-level tokenizer.json, with the truncation and padding that published files may have."""
    tokenizers = pytest.importorskip('tokenizers', reason='the optional package tokenizers is not installed')
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts(50), tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=['<s>', '</s>'], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    bpe.enable_truncation(8)
    bpe.enable_padding(length=32)
    path = tmp_path / 'own' / 'mine.json'
    path.parent.mkdir()
    bpe.save(str(path))
    return path


def test_a_tokenizer_file_is_kept_with_the_bins(tokenizer_file, tmp_path):
    rows, out_dir = [*texts(20), 'a<s>b</s>c'], tmp_path / 'out'
    path = write_jsonl(tmp_path / 'a.jsonl', rows)
    prepare('text', path, '--val_fraction', 0.1, '--out_dir', out_dir, '--tokenizer', tokenizer_file)
    assert (out_dir / 'tokenizer.json').read_bytes() == tokenizer_file.read_bytes()
    train, val, meta = bins(out_dir)
    assert (meta['tokenizer'], meta['vocab_size'], meta['eot_id']) == ('tokenizer.json', 300, 1)
    tokenizer_file.unlink()
    checkpoint = json.loads(json.dumps(Bin(out_dir, 'train').tokenizer))
    for entry in (read_meta(out_dir), checkpoint):  # neither needs the file that was given
        tokenizer = tokenizer_from_meta(entry)
        assert documents_of(train, tokenizer) + documents_of(val, tokenizer) == [
            *(row for i, row in enumerate(rows) if i % 10 != 9), *rows[9::10]]


def test_a_tokenizer_file_ends_documents_with_the_token_that_is_named(tokenizer_file):
    config = tokenizer_file.with_name('tokenizer_config.json')
    for content, token in (({}, '</s>'), ({'eos_token': '<s>'}, '<s>'), ({'eos_token': {'content': '<s>'}}, '<s>')):
        config.write_text(json.dumps(content))
        tokenizer = get_tokenizer(tokenizer_file)
        assert tokenizer.eot_id == tokenizer.bpe.token_to_id(token)
    for text, words in ('{"eos_token": "none such"}', 'no end-of-text token (none such)'), ('[]', 'cannot be read'):
        config.write_text(text)
        assert words in rejection(get_tokenizer, tokenizer_file)
    assert '--tokenizer=gpt3: unknown; pass gpt2, byte' in rejection(get_tokenizer, 'gpt3')


def test_a_vocabulary_is_kept_with_bins_and_checkpoints_of_a_mixture(tmp_path):
    for name, chars, val in ('one', 'abde', 'dd'), ('two', 'abde', 'ee'), ('other', 'bade', 'dd'):
        write_bins(small_corpus(val=val), Char(chars), tmp_path / name, 1)
    command = [*TINY, f'--dataset={tmp_path}/one:3,{tmp_path}/two:1', f'--out_dir={tmp_path}/out', '--block_size=1',
               '--max_iters=1']
    train.main(command)
    whole, one, two = (metrics(tmp_path / 'out', f'val/loss{key}') for key in ('', '/one', '/two'))
    assert whole == pytest.approx([0.75 * left + 0.25 * right for left, right in zip(one, two)]) and one != two
    shutil.rmtree(tmp_path / 'one')
    assert load(tmp_path / 'out').tokenizer.chars == 'abde'
    assert 'or both with byte, because char depends on the text' in rejection(
        train.main, [*command, '--init_from=resume', f'--dataset={tmp_path}/other', '--ignore_data_change=True'])


def test_a_tokenizer_of_a_folder_and_of_the_hub(tokenizer_file, tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip('huggingface_hub')
    monkeypatch.chdir(tmp_path)
    tokenizer_file.with_name('tokenizer_config.json').write_text('{"eos_token": "<s>"}')
    text = tokenizer_file.rename(tokenizer_file.with_name('tokenizer.json')).read_text()
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', lambda repository, name: {
        'EleutherAI/gpt-neox-20b': tokenizer_file.with_name(name)}[repository])
    for name in ('EleutherAI/gpt-neox-20b', tokenizer_file.parent, 'own', './own'):
        tokenizer = get_tokenizer(name)
        assert (tokenizer.json, tokenizer.eot_id) == (text, 0)


# Writes 12 batches. With a third argument it waits after nine.
DRIVER = '''
import sys, time
sys.path.insert(0, sys.argv[1])
from data import writer
from data.tokenizer import get_tokenizer

def batches():
    for i in range(12):
        if i == 9 and sys.argv[3:]:
            time.sleep(600)
        yield [('train' if i % 4 else 'val', f'document {i}')]

if __name__ == '__main__':
    corpus = writer.Corpus('driver', 'r1', 'by number', batches)
    writer.write_bins(corpus, get_tokenizer('byte'), sys.argv[2], num_proc=2)
'''


def test_killed_and_started_again(tmp_path):
    """With kill -9, while a second process is kept out. The name of TMPDIR is too long for a socket."""
    driver, killed, temporary = tmp_path / 'driver.py', tmp_path / 'killed', tmp_path / ('t' * 100)
    driver.write_text(DRIVER)
    temporary.mkdir()
    command, env = [sys.executable, driver, ROOT, killed], dict(os.environ, TMPDIR=str(temporary))
    with subprocess.Popen([*command, 'wait'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as first:
        try:
            while done(killed) < 5:  # five more may be on their way
                assert first.poll() is None, 'the process ended early'
                time.sleep(0.01)
            message = rejection(write_bins, small_corpus(), BYTE, killed, 1, True)
            assert message.startswith(f'{killed}: process {first.pid} on ')
        finally:
            first.kill()
        first.communicate(timeout=300)  # returns only if the workers have ended, too
    (killed / 'train.bin.host.1.partial').touch()
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    assert re.search('resuming after [5-9] parts', out)
    train, val, _ = bins(killed)
    assert documents_of(train, BYTE) == [f'document {i}' for i in range(12) if i % 4]
    assert documents_of(val, BYTE) == [f'document {i}' for i in (0, 4, 8)]


def small_corpus(revision='r1', val='d'):
    documents = [('train', 'a'), ('train', 'b'), ('val', val)]
    return Corpus('small', revision, 'by hand', open=lambda: [documents[:1], documents[1:]])


def content(out_dir):
    """The two bins of small ids as bytes."""
    return tuple(bytes(ids.tolist()) for ids in bins(out_dir)[:2])


def test_ids_above_65536_are_uint32(tmp_path):
    text = ''.join(chr(i) for i in range(67_585) if not 0xd800 <= i < 0xe000)
    assert (len(text), Char(text[1:]).dtype) == (65_537, 'uint16')
    corpus = Corpus('many', 'r', 'by hand', open=lambda: [[('train', text), ('val', text[-2:])]])
    write_bins(corpus, Char(text), tmp_path, num_proc=1)
    train, val, meta = bins(tmp_path)
    assert train.dtype == np.uint32 and np.array_equal(train, np.arange(len(text))) and meta['eot_id'] is None
    assert list(val) == [len(text) - 2, len(text) - 1] and meta['train']['bytes'] == len(text.encode())


def test_other_bins_in_the_way(tmp_path, capsys):
    def write(corpus, tokenizer=BYTE, overwrite=False):
        return write_bins(corpus, tokenizer, tmp_path, 1, overwrite)

    (tmp_path / 'val.bin').write_bytes(b'\1\0')
    message = rejection(write, small_corpus())
    assert 'val.bin: made from other data' in message and '--overwrite' in message
    before = write(small_corpus(), overwrite=True)
    assert write(small_corpus()) == before == bins(tmp_path)[2]
    assert 'nothing to do' in capsys.readouterr().out
    assert "revision 'r1', not 'r2'" in rejection(write, small_corpus('r2'))
    assert "tokenizer 'byte', not 'gpt2'" in rejection(write, small_corpus(), get_tokenizer('gpt2'))
    (tmp_path / 'val.bin').unlink()  # incomplete bins of the same data are made again
    assert write(small_corpus()) == before == bins(tmp_path)[2]


@pytest.mark.parametrize('error', [KeyboardInterrupt, BrokenProcessPool('killed'), OSError(5, 'Input/output error')])
def test_finished_bins_and_parts_stay_until_other_bins_are_complete(error, tmp_path):
    before, after = write_bins(small_corpus(), BYTE, tmp_path, 1), small_corpus('r2', val='e')
    assert 'the same command without --overwrite resumes; if memory is short, use a smaller --num_proc' in rejection(
        write_bins, interrupted(after, 1, error), BYTE, tmp_path, 1, True)
    assert json.loads((tmp_path / 'meta.json').read_text()) == before
    assert (tmp_path / 'val.bin').read_bytes() == b'd\0\0\0'
    assert done(tmp_path) and write_bins(after, BYTE, tmp_path, 1)['revision'] == 'r2'
    assert content(tmp_path) == (b'a\0b\0', b'e\0')


def test_overwrite_discards_the_parts_of_an_interrupted_run(tmp_path):
    assert 'stopped' in rejection(write_bins, interrupted(small_corpus(), 1), BYTE, tmp_path, 1)
    write_bins(Corpus('small', 'r1', 'by hand', lambda: [[('train', 'x'), ('val', 'y')]]), BYTE, tmp_path, 1, True)
    assert content(tmp_path) == (b'x\0', b'y\0')


def test_bad_text_and_a_bad_disk_are_told_apart(tmp_path, monkeypatch):
    good, bad, out_dir = write_jsonl(tmp_path / 'a.jsonl', texts(9)), tmp_path / 'b.jsonl', tmp_path / 'out'
    bad.write_text('{"text": \n')
    command = ['text', bad, '--val_file', good, '--tokenizer', 'byte', '--out_dir', out_dir]
    assert prepare(*command, ok=False).startswith(f'{bad}: cannot be read after document 0 (JSONDecodeError: ')
    monkeypatch.setattr(sources, 'lines', lambda path: path.open('x'))
    message = prepare(*command, ok=False)
    assert f"stopped ([Errno 17] File exists: '{bad}'); the same command" in message


def test_a_network_that_fails_between_two_files_of_the_hub_leaves_what_is_done(tmp_path, monkeypatch):
    import datasets
    real, network, names = datasets.load_dataset, ['00.jsonl'], [f'{i:02d}.jsonl' for i in range(30)]

    def load_dataset(kind, data_files, **kwargs):
        if (name := Path(data_files).stem) not in network:
            raise ValueError('no route to host')  # an HTTP client's error is not an OSError
        return real(kind, data_files=str(write_jsonl(tmp_path / name, [name])), **kwargs)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(sources, 'CHARS', 1)
    command = ['pile', '--tokenizer', 'byte', '--out_dir', tmp_path / 'out']
    message = prepare(*command, ok=False)
    assert 'stopped (monology/pile-uncopyrighted: ValueError: no route to host); the same command' in message
    assert done(tmp_path / 'out') == 1
    network += [*names, 'val.jsonl']
    assert 'resuming after 1 parts' in prepare(*command)
    assert [documents_of(ids, BYTE) for ids in bins(tmp_path / 'out')[:2]] == [names, ['val.jsonl']]


def test_openwebtext_without_a_network_is_one_line(tmp_path, monkeypatch):
    import datasets
    monkeypatch.setattr(datasets, 'load_dataset', lambda *_, **__: 1 / 0)
    message = prepare('openwebtext', '--tokenizer', 'byte', '--out_dir', tmp_path / 'out', ok=False)
    assert 'stopped (Skylion007/openwebtext: ZeroDivisionError: division by zero); the same command' in message


def write_shard(path, ids, magic=20240520, version=1, tokens=300):
    header = np.zeros(256, '<i4')
    header[:3] = magic, version, tokens
    path.write_bytes(header.tobytes() + ids.astype('<u2').tobytes())
    return path


def shard_ids(seed):
    """300 random ids, every tenth the beginning of a document."""
    ids = np.random.default_rng(seed).integers(50256, size=300)
    ids[::10] = 50256
    return ids


def test_shards_are_joined(tmp_path, monkeypatch):
    """In their order, the last one for val, in pieces and without a tokenizer, each once."""
    huggingface_hub = pytest.importorskip('huggingface_hub')
    monkeypatch.setattr(fineweb, 'PIECE', 70)
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    names = ['fineweb_train_000001.bin', 'fineweb_train_000002.bin', 'fineweb_val_000000.bin']
    files = [write_shard(tmp_path / name, shard_ids(i)) for i, name in enumerate(names)]
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', lambda repository, name, repo_type: {
        ('kjj0/fineweb10B-gpt2', 'dataset'): tmp_path / name}[repository, repo_type])
    for out, flags, source in [('hub', ['--download', 2], f'kjj0/fineweb10B-gpt2 {" ".join(names)}'),
                               ('disk', ['--tokens', *files, *files[1:]], ' '.join(names))]:
        prepare('fineweb', *flags, '--out_dir', tmp_path / out)
        train_ids, val_ids, meta = bins(tmp_path / out)
        assert train_ids.tolist() == [*shard_ids(0), *shard_ids(1)] and val_ids.tolist() == shard_ids(2).tolist()
        assert (meta['tokenizer'], meta['vocab_size'], meta['eot_id']) == ('gpt2', 50257, 50256)
        assert (meta['train']['documents'], meta['val']['documents'], meta['source']) == (60, 30, source)
        assert 'bytes' not in meta['train'] and meta['split'] == f'val: {names[2]}'


@pytest.mark.parametrize('name, flag, good, bad', [
    ('text', '--val_fraction', [1e-9, 0.5], [0, 0.6]), ('text', '--num_proc', [1], [0]),
    ('pile', '--num_files', [1], [0]), ('fineweb', '--download', [1, 103], [0, 104])])
def test_the_bounds_of_a_flag(name, flag, good, bad):
    for value in good + bad:
        message = prepare(name, 'x', flag, value, '--tokenizer', 'byte', '--unknown', ok=False)
        assert ('must be at least' if value in bad else 'unrecognized arguments') in message and 'inf' not in message


@pytest.mark.parametrize('change', [dict(magic=20240801), dict(version=2), dict(tokens=299)])
def test_a_bad_shard_is_one_line(tmp_path, change):
    bad = write_shard(tmp_path / 'bad.bin', shard_ids(0), **change)
    message = prepare('fineweb', '--tokens', bad, '--out_dir', tmp_path / 'out', ok=False)
    assert message.startswith(f'{bad}: not a complete shard of GPT-2 tokens')


@pytest.mark.parametrize('fraction, share, first', [
    (0.4, 400, [3, 5, 8, 10]), (0.03, 30, [34, 67, 100]), (0.01, 10, [100, 200])])
def test_val_has_the_fraction_of_the_documents(fraction, share, first, tmp_path):
    (tmp_path / 'a.txt').write_text(EOT.join(f'{i}' for i in range(1, 1001)))
    val = by_split(sources.files_corpus([tmp_path / 'a.txt'], val_fraction=fraction))['val']
    assert len(val) == share
    assert [int(text) for text in val[:len(first)]] == first


@pytest.mark.parametrize('documents, val', [
    (['one document\nof few\nlines'], 'of few\nlines'), (['no line end'], ' end'), (['ab', 'c\nd', 'e f'], 'de f'),
    (['title\n' + 'ACGT' * 25], 'ACGT' * 8), (['xy'], 'y')])
def test_few_documents_are_split_by_position(documents, val, tmp_path):
    (tmp_path / 'a.txt').write_text(EOT.join(documents))
    found = by_split(sources.files_corpus([tmp_path / 'a.txt'], val_fraction=0.3))
    assert all(found['train']) and all(found['val'])
    assert ''.join(found['train'] + found['val']) == ''.join(documents)
    assert ''.join(found['val']) == val


def test_few_large_documents_are_not_in_memory_together(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'CHARS', 2 ** 20)
    (tmp_path / 'a.txt').write_text(f'{"x" * 99}\n{EOT}'.join('x' * 10 ** 6 for _ in range(20)))
    tracemalloc.start()
    try:
        corpus = sources.files_corpus([tmp_path / 'a.txt'])
        assert sum(len(text) for batch in corpus.open() for _, text in batch) > 2 * 10 ** 7
        assert tracemalloc.get_traced_memory()[1] < 10 ** 7
    finally:
        tracemalloc.stop()


def test_files_are_read_in_their_order(tmp_path):
    rows = texts(4000)
    train = [write_jsonl(tmp_path / 'a.jsonl', rows[:2000], 'content'),
             write_jsonl(tmp_path / 'b.JSONL.gz', rows[2000:2500], 'content')]
    val = [write_parquet(tmp_path / 'd.parquet', rows[2500:3000], 'content'),
           write_jsonl(tmp_path / 'c.jsonl.zst', rows[3000:], 'content')]
    command = [*train, '--val_file', *val, '--tokenizer', 'byte', '--out_dir', tmp_path / 'out', '--text_key']
    prepare('text', *command, 'content')
    train, val, meta = bins(tmp_path / 'out')
    assert (documents_of(train, BYTE), documents_of(val, BYTE)) == (rows[:2500], rows[2500:])
    assert meta['source'] == "a.jsonl b.JSONL.gz d.parquet and 1 more, key 'content'"
    assert "key 'content'', not" in prepare('text', *command, 'url', ok=False).replace('"', "'")


def test_no_file_is_in_both_splits(tmp_path):
    """Nor twice in one split."""
    for name in 'abc':
        (tmp_path / f'{name}.txt').write_text(name)
    corpus = sources.files_corpus([tmp_path, tmp_path / 'a.txt'], [tmp_path / '..' / tmp_path.name / 'b.txt'])
    assert [pair for batch in corpus.open() for pair in batch] == [
        ('train', 'a'), ('train', 'c'), ('val', 'b')]
    corpus = sources.files_corpus([tmp_path / 'a.txt', tmp_path], val_fraction=0.5)
    assert [pair for batch in corpus.open() for pair in batch] == [('train', 'a'), ('val', 'b'), ('train', 'c')]


def test_the_files_of_a_directory(tmp_path, capsys):
    """Those that can be read, sorted by name; the others are counted, except hidden files."""
    folder = tmp_path / 'corpus'
    for name in ('b/v2.0.txt', 'a.jsonl.gz', 'b/1.TXT', 'c.txt', '.hidden/x.txt', 'b/.x.txt', 'README.md', 'x.gz',
                 'c4-train.01.json.gz', 'c4-train.02.json.gz', 'LICENSE', 'y.parquet.gz'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert sources.expand([folder]) == [folder / name for name in ('a.jsonl.gz', 'b/1.TXT', 'b/v2.0.txt', 'c.txt')]
    assert capsys.readouterr().out.startswith(
        f'{folder}: 4 files read, 6 left out (.json.gz, LICENSE, .md, .gz, .parquet.gz); .txt, .jsonl')
    (folder / 'z.pdf').touch()
    sources.expand([folder])
    assert '7 left out (.json.gz, LICENSE, .md, .gz, .parquet.gz, …);' in capsys.readouterr().out
    (tmp_path / 'linked').symlink_to(folder / 'b')
    sources.expand([tmp_path])
    assert '8 left out (' in capsys.readouterr().out


def test_a_subdirectory_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'b.txt').write_text('text')
    real = os.scandir

    def scandir(path):  # as for a user without the right
        if Path(path).name == 'a':
            raise PermissionError(13, 'Permission denied', str(path))
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    assert prepare('text', tmp_path, '--out_dir', tmp_path / 'out', ok=False) == f'{tmp_path}/a: Permission denied'


def test_nulls_are_left_out_and_counted(tmp_path, capsys):
    """Once, although few documents are read twice."""
    rows = ['one', None, 'two', None, 'three']
    for path in write_jsonl(tmp_path / 'a.jsonl', rows), write_parquet(tmp_path / 'b.parquet', rows):
        corpus = sources.files_corpus([path], val_fraction=0.5)
        assert [text for batch in corpus.open() for _, text in batch] == ['one', 'two', 'three']
        assert capsys.readouterr().out.count(f'{path}: 2 null texts left out of 5') == 1


@pytest.mark.parametrize('size, told', [(999_850, False), (999_750, True)])  # one in 100 is for val
def test_a_small_validation_set_is_named(tmp_path, size, told):
    (tmp_path / 'a.txt').write_text('x' * size)
    out = prepare('text', tmp_path / 'a.txt', '--out_dir', tmp_path / 'out', '--tokenizer', 'byte', '--num_proc', 1)
    assert read_meta(tmp_path / 'out')['val']['tokens'] == 10_000 - told
    assert ('val/loss will be noisy; raise --val_fraction' in out) == told


def test_the_share_that_a_tokenizer_loses_is_told(tmp_path):
    """Here the spaces and the words that the vocabulary lacks are lost."""
    tokenizers = pytest.importorskip('tokenizers', reason='the optional package tokenizers is not installed')
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({'</s>': 0, 'a': 1, '?': 2}, unk_token='?'))
    lossy.pre_tokenizer, lossy.decoder = tokenizers.pre_tokenizers.Whitespace(), tokenizers.decoders.Fuse()
    lossy.add_special_tokens(['</s>'])
    lossy.save(str(tmp_path / 'lossy.json'))
    path = write_jsonl(tmp_path / 'a.jsonl', ['a a'] * 30 + ['a b'])
    assert writer.sample_lost(get_tokenizer(tmp_path / 'lossy.json'), 'a b ' * 9999) == (10_000, 7_500)
    for name, told in (tmp_path / 'lossy.json', True), ('byte', False):
        out = prepare('text', path, '--out_dir', tmp_path / 'out', '--tokenizer', name, '--overwrite', '--val_file',
                      write_jsonl(tmp_path / 'b.jsonl', ['a b']))
        meta = read_meta(tmp_path / 'out')
        assert (meta['train'].get('lost'), meta['val'].get('lost')) == ((1 / 3, 2 / 3) if told else (None, None))
        assert ('loses 33.3% of its characters' in out) == told == (Bin(tmp_path / 'out', 'val').lost != 0)


@pytest.mark.parametrize('mark', ['', '\ufeff'])
@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl'])
def test_only_a_byte_order_mark_and_blank_documents_are_left_out(name, mark, tmp_path):
    """Line ends stay as they are, also those that only Python knows."""
    documents = 'one\r\ntwo\rthree\u2028four\x0cfive\x85six\n', ' \n', 'seven'
    content = EOT.join(documents) if name == 'a.txt' else '\n \r\n\n'.join(
        json.dumps({'text': text}, ensure_ascii=False) for text in documents)
    (tmp_path / name).write_bytes((mark + content).encode())
    assert by_split(sources.files_corpus([tmp_path / name], [tmp_path / name]))['train'] == [documents[0], 'seven']


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl', b'{"text": "good"}\n{"text": \n', 'a.jsonl: cannot be read after document 1 (JSONDecodeError: Exp'),
    ('a.jsonl', b'{"text": 3}\n', "a.jsonl: cannot be read after document 0 (TypeError: 'text' is 3, not text)"),
    ('a.jsonl', b'{"body": "good"}\n', "(KeyError: 'text'); --text_key names the key of the text"),
    ('a.txt', b'caf\xe9', 'convert the file to UTF-8'),
    ('a.txt', b'good\n' * 9999 + b'\xff\xfe', "(UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position"),
    ('a.txt.gz', gzip.compress(b'text', mtime=0)[:-4], 'a.txt.gz: cannot be read after document 0 (EOFError: '),
    ('a.txt.zst', b'(\xb5/\xfd', 'a.txt.zst: cannot be read after document 0 (OSError: Truncated'),
    ('a.csv', b'text\n', 'a.csv: no file to read; .txt, .jsonl'),
    ('a.jsonl', b'[{"text": "good"}]\n', "(ValueError: a line begins with [, not {; jq -c '.[]' splits"),
    ('a.txt', b' \n ', 'no text for train.bin'),
])
def test_bad_text_is_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert message in rejection(lambda: write_bins(
        sources.files_corpus([tmp_path / name]), BYTE, tmp_path / 'out', num_proc=1))
    assert not (tmp_path / 'out/meta.json').exists()


def test_pysource_needs_no_download_and_no_further_package(tmp_path):
    for name in ('tiktoken', 'datasets', 'pyarrow', 'tokenizers', 'huggingface_hub', 'torch', 'requests'):
        (tmp_path / f'{name}.py').write_text(f'raise ImportError({name!r})')
    subprocess.run([sys.executable, ROOT / 'data/pysource/prepare.py', '--out_dir', tmp_path / 'out'], check=True,
                   env=dict(os.environ, PYTHONPATH=str(tmp_path)))
    train, val, meta = bins(tmp_path / 'out')
    assert (meta['tokenizer'], meta['vocab_size'], meta['eot_id'], meta['dtype']) == ('byte', 256, 0, 'uint16')
    assert len(train) > 5e6
    assert 0.03 < len(val) / len(train) < 0.2
    train_files, val_files = (documents_of(ids, BYTE) for ids in (train, val))
    assert not set(train_files) & set(val_files) and Path(operator.__file__).read_text() in val_files  # by the hash
