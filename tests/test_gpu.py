"""dev/gpu.py: skips what is finished, and packs its data without loss."""

import tarfile

import numpy as np
import pytest

from data.loader import open_dataset
from dev import gpu


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The directory of the program."""
    work = tmp_path / 'out'
    monkeypatch.setattr(gpu, 'WORK', work)
    monkeypatch.setenv('OUT', str(tmp_path))
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '')  # is set by the program
    for name in ('signal', 'setitimer'):  # pytest's own timeout has the alarm
        monkeypatch.setattr(gpu.signal, name, lambda *_: None)
    work.mkdir()
    return work


def test_finished_work_is_archived_and_skipped(work, capfd):
    program = ['-c', 'print("here")']
    assert not gpu.call('step', ['-c', 'raise SystemExit("no luck")'])
    assert 'no luck' in capfd.readouterr().out
    assert gpu.call('step', program) and gpu.call('step', ['-c', 'raise SystemExit(1)'])
    # A new machine gets the archive of the last one.
    with tarfile.open(work.parent / 'gpu.tar.gz') as archive:
        assert archive.extractfile('records/gpu/step.txt').read() == b'here\n'
        work.rename(work.parent / 'before')
        archive.extractall(work, filter='data')
    assert gpu.call('step', ['-c', 'raise SystemExit(1)'])


def test_packed_data_come_back_and_the_pieces_held_out_are_not_for_training(work, monkeypatch, capsys):
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
