"""dev/gpu.py packs its data without loss."""

import numpy as np

from data.loader import open_dataset
from dev import gpu


def test_packed_data_come_back_and_the_pieces_held_out_are_not_for_training(tmp_path, monkeypatch):
    work = tmp_path / 'out'
    monkeypatch.setattr(gpu, 'WORK', work)
    monkeypatch.setenv('OUT', str(tmp_path))
    monkeypatch.setattr(gpu, 'PIECE', 100)
    bins = dict(train=np.arange(9300, dtype='<u2'), val=np.arange(1500, dtype='<u2'))
    gpu.write_bins(work / 'bins', dict(tokenizer='gpt2', vocab_size=50257, dtype='uint16', eot_id=50256), **bins)
    gpu.pack(work / 'bins')
    gpu.unpack()
    train, val = open_dataset(f'{work}/data/books:1,{work}/data/heldout:0', 64)
    (books,) = train.bins
    held = np.r_[4400:4500, 8900:9000]
    assert np.array_equal(val['heldout'].tokens, held) and np.array_equal(val['books'].tokens, bins['val'])
    assert np.array_equal(np.sort(np.r_[books.tokens, held]), bins['train'])
