"""The data order, the windows of every world size, bins that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refusal, write_bins

from data.loader import (
    Bin,
    TrainLoader,
    ValidationLoader,
    accumulation_steps,
    data_dir,
    on_device,
    window_starts,
)
from runtime.rng import keyed_bits, keyed_uniforms


def test_windows_are_a_pure_function_of_seed_and_iteration():
    starts = window_starts(7, 3, 480, 10_000, 64)
    assert np.array_equal(starts, window_starts(7, 3, 480, 10_000, 64))
    assert not np.array_equal(starts, window_starts(7, 4, 480, 10_000, 64))
    assert not np.array_equal(starts, window_starts(8, 3, 480, 10_000, 64))
    assert starts.min() >= 0 and starts.max() < 10_000 - 64


def test_data_order_never_changes():
    """Pinned: other numbers here would silently change the data of every run that is resumed or compared."""
    assert keyed_bits(1337, 0, 5, 2).tolist() == [6403813828210065407, 16623685186354751458]
    assert window_starts(1337, 5, 3, 9_000_000_000, 1024).tolist() == [3124362633, 8110545094, 3008058390]


def test_windows_are_uniform_over_all_starts():
    starts = np.concatenate([window_starts(0, i, 1000, 42, 32) for i in range(20)])
    counts = np.bincount(starts, minlength=10)
    assert len(counts) == 10  # starts 0 … num_tokens - block_size - 1
    assert abs(counts - 2000).max() < 5 * 2000 ** 0.5


def test_streams_do_not_overlap():
    draws = [keyed_bits(1, stream, iteration, 100).tolist() for stream in range(4) for iteration in range(10)]
    assert len(set(sum(draws, []))) == 4000


def test_uniforms_lie_in_the_half_open_interval():
    u = keyed_uniforms(0, 1, 0, (100, 1000))
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize('world_size', [1, 2, 8, 10])
def test_shares_of_all_ranks_make_up_the_mini_batch(corpus, world_size):
    data = Bin(corpus, 'train')
    whole = data.windows(window_starts(5, 2, 40, len(data), 16), 17)
    together = np.zeros_like(whole)
    for rank in range(world_size):
        loader = TrainLoader(data, 5, 40, 16, rank, world_size, 'cpu', first_iteration=2)
        share = next(loader)
        loader.close()
        assert share.shape == (40 // world_size, 17) and share.dtype == torch.int64
        together[rank::world_size] = share.numpy()
    assert np.array_equal(together, whole)


def test_loader_goes_through_the_iterations_and_starts_anywhere(corpus):
    data = Bin(corpus, 'train')
    loader, later = (TrainLoader(data, 0, 4, 16, 0, 1, 'cpu', first) for first in (0, 3))
    batches = [next(loader) for _ in range(5)]
    assert torch.equal(batches[3], next(later)) and torch.equal(batches[4], next(later))
    loader.close(), later.close()
    assert not loader.thread.is_alive()


@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_validation_windows_cover_the_split_once(tmp_path, world_size):
    data = Bin(write_bins(tmp_path, np.arange(100) % 256, np.arange(103) % 251), 'val')
    seen = []
    for rank in range(world_size):
        loader = ValidationLoader(data, 0, 4, 10, rank, world_size, 'cpu')
        batches = list(loader)
        assert len(batches) == len(loader)
        for X, Y in batches:
            assert X.shape == Y.shape == (4, 10)
            for x, y in zip(X, Y):
                if (y >= 0).all():
                    assert torch.equal(x[1:], y[:-1])
                    seen.append(x[0].item())
                else:
                    assert (y == -1).all()
    assert sorted(seen) == list(range(0, 100, 10))  # 102 predictions: ten windows of ten


def test_validation_windows_are_spread_over_the_split(corpus):
    """Of 312 windows the first of each seventh."""
    loader = ValidationLoader(Bin(corpus, 'val'), 7, 4, 32, 0, 1, 'cpu')
    assert loader.starts.tolist() == [32 * window for window in (0, 44, 89, 133, 178, 222, 267)]


@pytest.mark.parametrize('tokens, windows', [(40, 3), (41, 4)])
def test_the_last_validation_window_has_its_last_target(tmp_path, tokens, windows):
    loader = ValidationLoader(Bin(write_bins(tmp_path, range(40), range(tokens)), 'val'), 0, 8, 10, 0, 1, 'cpu')
    (_, Y), = loader
    assert Y[windows - 1].tolist() == list(range(10 * windows - 9, 10 * windows + 1)) and (Y[windows:] == -1).all()


def test_ids_above_32767_survive(tmp_path):
    tokens = np.array([0, 32767, 32768, 65535] * 10)
    data = Bin(write_bins(tmp_path / 'a', tokens, tokens, vocab_size=65536), 'train')
    loader = TrainLoader(data, 0, 8, 4, 0, 1, 'cpu')
    assert set(next(loader).unique().tolist()) == {0, 32767, 32768, 65535}
    loader.close()
    wide = np.array([0, 70_000] * 10)
    data = Bin(write_bins(tmp_path / 'b', wide, wide, vocab_size=100_000, dtype='uint32'), 'train')
    windows = torch.from_numpy(data.windows([0], 4).view(np.int32))
    assert on_device(windows, 'cpu').tolist() == [[0, 70_000, 0, 70_000]]


def test_nanogpt_bins_load_without_meta(tmp_path):
    data = Bin(write_bins(tmp_path, [50256, 1, 2, 3], [1, 2, 3], meta=False), 'train')
    assert data.vocab_size == 50257 and data.windows([0], 4).tolist() == [[50256, 1, 2, 3]]
    other = write_bins(tmp_path / 'other', [50256, 1, 2, 4], [1], meta=False)
    assert data.fingerprint() != Bin(other, 'train').fingerprint()


def test_a_fingerprint_tells_size_and_both_ends(tmp_path):
    """Of splits so long that only parts of them are looked at."""
    plain, longer, first, last = (np.zeros(n, dtype=np.uint16) for n in (2 ** 21, 2 ** 21 + 1, 2 ** 21, 2 ** 21))
    first[0] = last[-1] = 7
    bins = [Bin(write_bins(tmp_path / str(i), tokens, [0]), 'train') for i, tokens in enumerate(
        (plain, longer, first, last))]
    assert len({data.fingerprint() for data in bins}) == 4
    assert bins[0].samples().size <= 2 ** 20


def test_nanogpts_character_bins_are_not_taken_for_gpt2s(tmp_path):
    path = write_bins(tmp_path, range(60), range(60), meta=False)
    (path / 'meta.pkl').touch()
    assert 'meta.pkl: a vocabulary of nanoGPT' in refusal(Bin, path, 'train')


def test_bins_that_do_not_fit_are_refused(tmp_path):
    def fresh(name, **kwargs):
        return write_bins(tmp_path / name, np.arange(100), np.arange(50), **kwargs)

    assert 'train.bin: no such file' in refusal(Bin, tmp_path / 'none', 'train')
    path = fresh('odd')
    (path / 'train.bin').write_bytes(b'abc')
    assert 'no whole number of uint16' in refusal(Bin, path, 'train')
    path = fresh('short')
    (path / 'train.bin').write_bytes(b'abcd')
    assert 'holds 2 tokens, meta.json says 100' in refusal(Bin, path, 'train')
    path = fresh('lies')
    (path / 'meta.json').write_text(json.dumps({'dtype': 'uint16'}))
    assert 'not a valid meta.json' in refusal(Bin, path, 'train')
    data = Bin(fresh('ids', vocab_size=90), 'train')
    assert 'token id 99 is beyond the vocabulary of 90' in refusal(data.windows, [0], 100)
    assert 'too few for block_size = 100' in refusal(data.check_length, 100)


def test_a_bad_token_stops_the_training_thread_with_its_message(tmp_path):
    data = Bin(write_bins(tmp_path, np.full(100, 95), np.arange(50), vocab_size=90), 'train')
    loader = TrainLoader(data, 0, 4, 8, 0, 1, 'cpu')
    assert 'token id 95' in refusal(next, loader)
    loader.close()


def test_a_data_set_is_named_by_its_directory_in_data_or_by_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('data/mine').mkdir(parents=True)
    for name in ('mine', 'data/mine', './data/mine', tmp_path / 'data/mine'):
        assert data_dir(name).resolve() == tmp_path / 'data/mine'
    assert data_dir('missing') == Path('data/missing')


def test_accumulation_steps():
    assert accumulation_steps(480, 12, 8) == 5
    assert accumulation_steps(480, 8, 10, given=6) == 6
    message = refusal(accumulation_steps, 480, 7, 2)
    assert '480' in message and '7 × 2 = 14' in message and '476 or 490' in message
    message = refusal(accumulation_steps, 480, 8, 10, 5)
    assert 'gradient_accumulation_steps' in message and '= 5 × 8 × 10' in message and '=400' in message
    assert 'as nanoGPT does' in refusal(accumulation_steps, 480, 12, 8, 40)
    assert '--total_batch_size=64,' in refusal(accumulation_steps, 480, 64, 1, 1)  # which fits
    assert accumulation_steps(64, 64, 1, 1) == 1
    refusal(accumulation_steps, 480, 0, 1)
