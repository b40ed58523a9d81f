"""scripts/eval.py: train.py's own validation loss, bits per byte, mixtures."""

import json
import math
import shutil

import pytest
from conftest import TINY, metrics, rejection

import train
from data import loader
from scripts import eval as eval_script
from scripts import load


@pytest.fixture(scope='module')
def out_dir(tmp_path_factory, corpus):
    out_dir = tmp_path_factory.mktemp('eval') / 'run'
    train.main([*TINY, f'--dataset={corpus}', f'--out_dir={out_dir}'])
    return out_dir


def evaluate(capsys, *argv):
    """The JSON object that the script prints."""
    eval_script.main([*map(str, argv), '--device=cpu'])
    return json.loads(capsys.readouterr().out)


def test_is_the_validation_loss_of_train(capsys, out_dir):
    result = evaluate(capsys, out_dir, '--batch_size=2')
    assert result['loss'] == pytest.approx(metrics(out_dir, 'val/loss')[-1], rel=1e-6)
    assert result['tokens'] == 1_999 // 32 * 32 and result['iter'] == 10
    assert result['perplexity'] == pytest.approx(math.exp(result['loss']))
    assert evaluate(capsys, out_dir, '--batch_size=7')['loss'] == pytest.approx(result['loss'], rel=1e-6)
    assert evaluate(capsys, out_dir, '--eval_sequences=6', '--batch_size=3')['tokens'] == 6 * 32


def test_targets_that_the_training_loss_leaves_out_count(capsys, out_dir, monkeypatch):
    plain, forward = evaluate(capsys, out_dir), load.GPT.forward

    def masking(self, idx, targets=None):
        targets[:, ::2] = -1
        return forward(self, idx, targets)
    monkeypatch.setattr(load.GPT, 'forward', masking)
    assert evaluate(capsys, out_dir) == plain


def edited(corpus, tmp_path, edit):
    """A copy of the data set whose meta.json is edited."""
    other = shutil.copytree(corpus, tmp_path / 'other')
    meta = json.loads((other / 'meta.json').read_text())
    edit(meta)
    (other / 'meta.json').write_text(json.dumps(meta))
    return other


@pytest.mark.parametrize('known, note', [
    (dict(bytes=1000), ''), (dict(bytes=1000, lost=0.09), 'because the tokenizer loses 9.0% of the text'),
    ({}, "because the text's bytes are unknown")])
def test_bits_per_byte_are_measured_where_the_tokens_stand_for_the_text(
        capsys, corpus, out_dir, tmp_path, known, note):
    other = edited(corpus, tmp_path, lambda meta: meta['val'].update(known))
    eval_script.main([str(out_dir), '--device=cpu', f'--dataset={other}'])
    out, err = capsys.readouterr()
    result = json.loads(out)
    expected = None if note else pytest.approx(result['loss'] * 2 / math.log(2))  # 2,000 tokens of 1,000 bytes
    assert result.get('bits_per_byte') == expected and note in err and (not note) == (err == '')


def test_data_of_another_tokenizer_is_rejected(out_dir, corpus, tmp_path):
    chars = ''.join(map(chr, range(256)))
    other = edited(corpus, tmp_path, lambda meta: meta.update(tokenizer='char', chars=chars))
    assert f'its tokenizer (char) differs from that of {out_dir}' in rejection(
        eval_script.main, [str(out_dir), f'--dataset={other}', '--device=cpu'])


def test_the_data_set_is_found_from_another_directory(capsys, out_dir, corpus, tmp_path, monkeypatch):
    plain = evaluate(capsys, out_dir)
    monkeypatch.setattr(loader, '__file__', str(tmp_path / 'repository/data/loader.py'))
    shutil.copytree(corpus, tmp_path / 'repository/data/mine')
    monkeypatch.chdir(tmp_path)
    assert evaluate(capsys, out_dir, '--dataset=mine')['loss'] == plain['loss']


def test_a_mixture_is_evaluated_part_by_part_also_where_it_was_not_trained_on(capsys, out_dir, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / 'other')
    eval_script.main([str(out_dir), f'--dataset={corpus}:1,{tmp_path / "other"}:0', '--device=cpu'])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first['data'] == str(corpus / 'val.bin') and second['data'] == str(tmp_path / 'other' / 'val.bin')
    assert first['loss'] == second['loss'] == evaluate(capsys, out_dir)['loss']
