"""The data order, the sequences of every world size, bins that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, rejection, write_bins

from data import loader
from data.loader import Bin, Mixture, TrainLoader, ValidationLoader, open_dataset, sequence_starts
from runtime.rng import keyed_bits, keyed_seed, keyed_uniforms


def test_data_order_never_changes():
    """Pinned, because other numbers would silently change the data of resumed and compared runs."""
    assert keyed_bits(1337, 0, 5, 2).tolist() == [6403813828210065407, 16623685186354751458]
    assert keyed_seed(1337, 0, 5) == 6403813828210065407 // 2 and keyed_bits(-1, 0, 5) != keyed_bits(2 ** 63 - 1, 0, 5)
    assert keyed_uniforms(1337, 0, 5, [2]).tolist() == [bits // 2 ** 40 / 2 ** 24 for bits in keyed_bits(1337, 0, 5, 2)]
    assert sequence_starts(1337, 5, 3, 9_000_000_000, 1024).tolist() == [3124362633, 8110545094, 3008058390]
    assert not np.array_equal(sequence_starts(1337, 6, 3, 9_000, 64), sequence_starts(1337, 5, 3, 9_000, 64))
    assert not np.array_equal(sequence_starts(1338, 5, 3, 9_000, 64), sequence_starts(1337, 5, 3, 9_000, 64))
    assert sequence_starts(1337, 5, 4, [10 ** 9, 10 ** 6], 1024, [0.7, 0.3]).tolist() == (
        [495930125, 1000669885, 477469151, 238625459])
    starts = sequence_starts(1337, 5, 100, 9_000_000_000, 1024)
    for sizes, weights in ([9_000_000_000], [1.0]), ([9_000_000_000, 2_000], [1.0, 0.0]):
        assert np.array_equal(starts, sequence_starts(1337, 5, 100, sizes, 1024, weights))


def test_sequences_are_uniform_over_all_starts():
    counts = np.bincount(sequence_starts(0, 0, 20_000, 42, 32))
    assert len(counts) == 10  # starts 0 … num_tokens - block_size - 1
    assert abs(counts - 2000).max() < 5 * 2000 ** 0.5


def batches(data, first, n, rank=0, world_size=1):
    """This rank's share of n mini-batches of 24 sequences from iteration `first` on."""
    loader = TrainLoader(data, 7, 24, 16, rank, world_size, 'cpu', *[first] * bool(first))  # 0 is the default
    found = [next(loader) for _ in range(n)]
    loader.close()
    return found


@pytest.mark.parametrize('world_size', [1, 8, 12])
def test_shares_of_all_ranks_make_up_the_mini_batch(corpus, world_size):
    data = Mixture([Bin(corpus, 'train')])
    whole = data.sequences(sequence_starts(7, 2, 24, len(data), 16), 17)
    for rank in range(world_size):
        share, = batches(data, 2, 1, rank, world_size)
        assert share.dtype == torch.int64 and np.array_equal(share, whole[rank::world_size])


def test_random_changes_of_the_data_depend_on_the_seed_and_the_iteration_only(corpus, monkeypatch):
    """Not on the global generator, the number of ranks, or where a run resumes."""
    data = Mixture([Bin(corpus, 'train')])
    plain = torch.stack(batches(data, 0, 3))

    def augment(self, sequences, generators):
        for sequence, generator in zip(sequences, generators):
            sequence[generator.random(len(sequence)) < 0.5] = 255
        return sequences

    monkeypatch.setattr(TrainLoader, 'augment', augment)
    changed = torch.stack(batches(data, 0, 3))
    marks = changed == 255
    assert torch.equal(changed[~marks], plain[~marks]) and 0.45 < marks.float().mean() < 0.55
    assert len(marks.flatten(0, 1).unique(dim=0)) > 65  # of 72 sequences
    np.random.seed(3)
    assert torch.equal(batches(data, 2, 1)[0], changed[2])
    assert torch.equal(torch.stack([batches(data, 1, 1, rank, 3)[0] for rank in range(3)], 1).flatten(0, 1), changed[1])


@pytest.mark.parametrize('one_shape', [False, True])
@pytest.mark.parametrize('tokens, sequences', [(100, 9), (101, 10), (103, 10)])
@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_validation_sequences_cover_the_split_once(tmp_path, world_size, tokens, sequences, one_shape):
    """In sequences of ten tokens; the last one needs one more token, its last target."""
    data = Bin(write_bins(tmp_path, range(100), range(tokens)), 'val')
    seen = []
    for rank in range(world_size):
        loader = ValidationLoader(data, 0, 4, 10, rank, world_size, 'cpu', one_shape)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-sequences // (4 * world_size))
        for X, Y in batches:
            assert X.shape == Y.shape and X.size(1) == 10 and X.is_contiguous()
            assert len(X) == 4 if one_shape else len(X) == 1 or (Y != -1).all()
            for x, y in zip(X, Y):
                if (y != -1).any():
                    assert torch.equal(y, x + 1)
                    seen.append(x[0].item())
    assert sorted(seen) == [10 * i for i in range(sequences)]


def test_validation_sequences_are_spread_over_the_split(corpus):
    loader = ValidationLoader(Bin(corpus, 'val'), 7, 4, 32, 0, 1, 'cpu')  # the first of each seventh of 62
    assert loader.starts.tolist() == [32 * sequence for sequence in (0, 8, 17, 26, 35, 44, 53)]


@pytest.mark.parametrize('tokens, told', [(7 * 32 + 1, True), (8 * 32 + 1, False)])
def test_a_validation_set_of_few_sequences_is_named_once(tmp_path, capsys, tokens, told):
    data = Bin(write_bins(tmp_path, range(100), range(tokens), vocab_size=300), 'val')
    for rank, now in (1, False), (0, told), (0, False):
        ValidationLoader(data, 1, 4, 32, rank, 2, 'cpu')
        err = capsys.readouterr().err
        assert err.count('\n') == now and ('only 7 sequences of block_size = 32,' in err) == now


@pytest.mark.parametrize('dtype, ids', [('uint16', [0, 32767, 32768, 65535]), ('uint32', [0, 70_000, 2 ** 32 - 2])])
def test_large_ids_survive(tmp_path, dtype, ids):
    path = write_bins(tmp_path, ids * 20, ids * 20, vocab_size=ids[-1] + 1, dtype=dtype)
    (X, _), *_ = ValidationLoader(Bin(path, 'val'), 1, 1, 16, 0, 1, 'cpu')
    for sequences in (X, batches(Mixture([Bin(path, 'train')]), 0, 1)[0]):
        assert sequences.dtype == torch.int64 and sequences.unique().tolist() == ids


def test_nanogpt_bins_load_without_meta(tmp_path):
    """Bins that look like uint32 are rejected, because as uint16 they would train and their loss would fall."""
    path = write_bins(tmp_path, [50256, 1, 2, 3], [0, 5, 0, 5], meta=False)
    data = Bin(path, 'train')
    assert data.vocab_size == 50257 and data.sequences([0], 4).tolist() == [[50256, 1, 2, 3]]
    assert Bin(path, 'val').sequences([0], 4).tolist() == [[0, 5, 0, 5]]
    write_bins(tmp_path, [50256, 1, 2, 3], [1], dtype='uint32', meta=False)
    assert 'train.bin: looks like uint32 (every second id is 0)' in rejection(Bin, path, 'train')
    (path / 'meta.pkl').touch()  # nanoGPT's, of characters
    assert rejection(Bin, path, 'train').startswith(f'{path}/meta.pkl: not read')


def test_a_fingerprint_tells_size_and_both_ends(tmp_path):
    """Also of splits that are only sampled. Pinned, because checkpoints store it."""
    plain, longer, first, last = (np.arange(n) % 251 for n in (2 ** 21, 2 ** 21 + 1, 2 ** 21, 2 ** 21))
    first[0] = last[-1] = 252
    bins = [Bin(write_bins(tmp_path / str(i), tokens, [0]), 'train') for i, tokens in enumerate(
        (plain, longer, first, last))]
    assert len({data.fingerprint() for data in bins}) == 4
    assert bins[0].samples().size <= 2 ** 20 and bins[0].fingerprint().startswith('b0df12bcb6b9f9a3')


def test_a_data_set_is_named_by_its_directory_in_data_or_by_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    write_bins(tmp_path / 'data/pysource', [1], [1])
    for name in ('pysource', 'data/pysource', './data/pysource', tmp_path / 'data/pysource', '~/data/pysource'):
        assert loader.data_dir(name).resolve() == tmp_path / 'data/pysource'
    for dataset, path in ('mine', 'data/mine'), ('data/mine', 'data/mine'), ('x/y', 'x/y'):
        assert rejection(open_dataset, dataset, 1).startswith(f'{path}/train.bin: no such file')
    assert rejection(open_dataset, 's3://c/a', 16).startswith('--dataset=s3://c/a: a URL, not a local path')
    for dataset in 'text', 'data/text':  # prepare.py writes beside train.py, from any working directory
        assert loader.data_dir(dataset) == ROOT / 'data/text'


@pytest.mark.parametrize('meta, raw', [(True, b'abcd'), (False, b'abc'), (False, b'')])
def test_incomplete_bins_are_rejected(tmp_path, meta, raw):
    path = write_bins(tmp_path, np.arange(100), np.arange(50), meta=meta)
    (path / 'train.bin').write_bytes(raw)
    assert f'train.bin: empty or incomplete ({len(raw)} bytes for ' in rejection(Bin, path, 'train')


def test_a_directory_that_exists_is_no_mixture(two, tmp_path):
    write_bins(tmp_path / 'data/a:2', [7] * 20, [7] * 20)
    assert list(open_dataset('a:2', 16)[1]) == ['a:2']
    assert list(open_dataset(f'a:.{"1" * 150},b:.{"1" * 150}', 16)[1]) == ['a', 'b']  # too long for a file name


@pytest.mark.parametrize('weights', [[1.0], [0.999, 0.001], [0.1] * 10])  # the sum of ten times 0.1 is less than 1
def test_no_sequence_leaves_its_part(weights, monkeypatch):
    sizes = [20, 18, 10 ** 12, 17, 40, 20, 20, 20, 20, 20][:len(weights)]
    starts = sequence_starts(0, 0, 10_000, sizes, 16, weights)
    ends = np.cumsum(sizes)
    part = np.searchsorted(ends, starts, side='right')
    assert set(part) == set(range(len(weights))) and (starts >= 0).all()
    assert (starts + 17 <= ends[part]).all()
    monkeypatch.setattr('data.loader.keyed_bits', lambda *_: np.array([0, 2 ** 64 - 1], np.uint64))
    assert sequence_starts(0, 0, 2, sizes, 16, weights).tolist() == [0, ends[-1] - 17]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Data sets a, which counts from 0 to 99, and b, which counts from 100 to 199, below the working directory."""
    monkeypatch.chdir(tmp_path)
    write_bins(tmp_path / 'data/a', np.arange(5000) % 100, np.arange(500) % 100)
    write_bins(tmp_path / 'data/b', np.arange(700) % 100 + 100, np.arange(300) % 100 + 100)


def test_a_mixture_draws_its_parts_by_their_weights(two):
    data, val = open_dataset('a:7,b:3', 16)
    found = torch.cat(batches(data, 0, 200))
    assert (found % 100)[:, 1:].equal((found % 100)[:, :-1].add(1).remainder(100))
    of_b = (found >= 100).float().mean(1)
    assert set(of_b.tolist()) == {0.0, 1.0}  # no sequence crosses from one part to the other
    assert of_b.mean().item() == pytest.approx(0.3, abs=5 * (0.21 / 4800) ** 0.5)
    assert data.sequences([4983, 5000], 17)[:, [0, 16]].tolist() == [[83, 99], [100, 116]]
    assert {key: (str(bin.path), bin.weight) for key, bin in val.items()} == {
        'a': ('data/a/val.bin', 0.7), 'b': ('data/b/val.bin', 0.3)}
    train, val = open_dataset('a:2,b:0', 16)
    assert [str(bin.path) for bin in train.bins] == ['data/a/train.bin'] and list(val) == ['a', 'b']
    assert [loader.first_dir(name) for name in ('a:0.7,b:0.3', 'none')] == [Path('data/a'), Path('data/none')]


def test_the_fingerprint_of_a_mixture_covers_all_of_it(two, tmp_path):
    def fingerprints(dataset):
        train, val = open_dataset(dataset, 16)
        return loader.fingerprint(train.bins), loader.fingerprint(val.values())

    known = [fingerprints(dataset) for dataset in ('a', 'b', 'a:0.7,b:0.3', 'a:0.6,b:0.4')]
    assert known[2] == fingerprints('a:7,b:3')
    assert known[0] == (Bin('data/a', 'train').fingerprint(), Bin('data/a', 'val').fingerprint())
    write_bins(tmp_path / 'data/b', np.arange(700) % 100 + 101, np.arange(300) % 100 + 101)
    known.append(fingerprints('a:0.7,b:0.3'))
    for split in zip(*known):
        assert len(set(split)) == len(known)


@pytest.mark.parametrize('dataset, message', [
    ('a:0.7,b', "'b' is not NAME:WEIGHT"), ('a:-1,b:2', "'a:-1' is not"),
    ('a:1,./data/a:1', 'or two parts have the same name'), ('a:1,a:2', 'or two parts have the same name'),
    ('a:0,b:0', '--dataset=a:0,b:0: all weights are 0, or'),
    ('a:1,c:1', 'data/c/train.bin: its tokenizer (char) differs from that of data/a/train.bin (byte); prepare all'),
    ('a:1,c:0', 'data/c/val.bin: its tokenizer (char) differs')])
def test_mixtures_that_cannot_be_are_one_line(dataset, message, two):
    path = write_bins(Path('data/c'), range(60), range(60)) / 'meta.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'tokenizer': 'char', 'chars': 'ab'}))
    assert message in rejection(open_dataset, dataset, 16)


def test_open_dataset_checks_the_length_and_the_ids_of_each_split(two):
    """Only samples of the ids are checked at first; all are checked when they are read."""
    assert rejection(open_dataset, 'a:1,b:1', 300) == (
        'data/b/val.bin: 300 tokens are too few for block_size = 300; set --block_size to at most 299, or prepare it '
        'with more text (--val_fraction)')
    write_bins(Path('data/b'), np.full(700, 99), np.full(300, 99), vocab_size=99)
    message = 'data/b/train.bin: token id 99 is beyond the vocabulary of 99'
    assert message in rejection(open_dataset, 'b', 16)
    assert message in rejection(batches, Mixture([Bin('data/b', 'train')]), 0, 1)
