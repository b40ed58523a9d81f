"""scripts/eval.py: train.py's own validation loss, sliding windows against brute force, text, all ranks."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import TINY, metrics
from torch.nn import functional as F

from analysis.load import load
from data.sources import files_corpus
from data.tokenizer import Char, FileTokenizer, get_tokenizer
from data.writer import write_bins
from scripts import eval as eval_script


@pytest.fixture(scope='module')
def out_dir(fork, tmp_path_factory, corpus):
    out_dir = tmp_path_factory.mktemp('eval') / 'run'
    fork('train.py', *TINY, f'--dataset={corpus}', f'--out_dir={out_dir}', check=True)
    return out_dir


def evaluate(capsys, *argv):
    """The JSON object that the script prints."""
    eval_script.main([*map(str, argv), '--device=cpu'])
    return json.loads(capsys.readouterr().out)


def test_is_the_validation_loss_of_train(capsys, out_dir):
    result = evaluate(capsys, out_dir, '--batch_size=2')
    assert result['loss'] == pytest.approx(metrics(out_dir, 'val/loss')[-1], rel=1e-9)
    assert result['tokens'] == 9_999 // 32 * 32 and result['iter'] == 10
    assert result['perplexity'] == pytest.approx(math.exp(result['loss']))
    assert evaluate(capsys, out_dir, '--batch_size=7')['loss'] == pytest.approx(result['loss'], rel=1e-6)
    assert evaluate(capsys, out_dir, '--split=train')['tokens'] == 49_999 // 32 * 32
    assert evaluate(capsys, out_dir, '--eval_iters=2', '--batch_size=3')['tokens'] == 2 * 3 * 32


@torch.no_grad()
def brute_force(model, tokens, stride, block_size):
    """Mean loss in which token t, counted in the first window that has it, sees what stands before it there."""
    losses, end = [], 0
    while end < len(tokens) - 1:
        before, end = end, min(block_size if end == 0 else end + stride, len(tokens) - 1)
        window = torch.tensor(tokens[end - block_size:end + 1])
        logits = model(window[None, :-1])[0][0]
        losses += F.cross_entropy(logits, window[1:], reduction='none')[before - end:].tolist()
    assert len(losses) == len(tokens) - 1
    return sum(losses) / len(losses)


def test_sliding_windows_count_every_token_once(capsys, out_dir, tmp_path):
    text = 'Every token but the first counts exactly once, whatever the stride is. ' * 4
    (tmp_path / 'text.txt').write_text(text)
    tokens, model = list(text.encode()), load(out_dir).model
    for stride in (1, 5, 32):
        result = evaluate(capsys, out_dir, f'--text={tmp_path / "text.txt"}', f'--stride={stride}', '--batch_size=3')
        assert result['tokens'] == len(tokens) - 1
        assert result['loss'] == pytest.approx(brute_force(model, tokens, stride, 32), rel=1e-5)
        assert result['bits_per_byte'] == pytest.approx(result['loss'] / math.log(2))  # a byte is a token
    (tmp_path / 'short.txt').write_text('short')
    assert evaluate(capsys, out_dir, f'--text={tmp_path / "short.txt"}')['tokens'] == 4


@pytest.mark.parametrize('flags, tokens', [(['--stride=20'], 9_999), (['--eval_iters=1', '--batch_size=1'], None)])
def test_all_ranks_together(fork, capsys, out_dir, flags, tokens):
    """In the second case there is one window, so that a rank has none."""
    alone = evaluate(capsys, out_dir, *flags)
    done = fork('scripts/eval.py', out_dir, *flags, '--device=cpu', ranks=2, check=True)
    together = json.loads(done.out)  # one line, of one rank
    assert together['loss'] == pytest.approx(alone['loss'], rel=1e-6)
    assert together['tokens'] == alone['tokens'] and tokens in (None, alone['tokens'])


def test_bytes_per_id_adds_up(tmp_path, gpt2_cache):
    text = "It's 2,000 words\n\n\tand é ü 中文 😀 …"
    for tokenizer in (get_tokenizer('byte'), get_tokenizer('gpt2'), Char(sorted(set(text)))):
        sizes = eval_script.bytes_per_id(tokenizer)
        assert len(sizes) == tokenizer.vocab_size
        assert sizes[torch.tensor(np.array(tokenizer.encode(text), dtype=np.int64))].sum() == len(text.encode())
        assert tokenizer.eot_id is None or sizes[tokenizer.eot_id] == 0


def test_bytes_per_id_of_a_folder(tmp_path, gpt2_cache):
    pytest.importorskip('tokenizers', reason='needs requirements-hf.txt')
    from scripts.export_hf import hf_tokenizer
    tokenizer = get_tokenizer('gpt2')
    hf_tokenizer(tokenizer).save(str(tmp_path / 'tokenizer.json'))
    folder = FileTokenizer((tmp_path / 'tokenizer.json').read_text(), tokenizer.eot_id)
    assert torch.equal(eval_script.bytes_per_id(folder), eval_script.bytes_per_id(tokenizer))


@pytest.mark.parametrize('content', [
    b'\xef\xbb\xbfwith a byte order mark', b'line\r\nline\r\n\r\nline\rend\r\n', b'a\x0cb\xe2\x80\xa8c\x1cd\n',
    b'one<|endoftext|>two<|endoftext|>\n \n<|endoftext|>three\n', b'\n  blanks first'])
def test_text_has_the_tokens_that_prepare_makes_of_it(tmp_path, content):
    (tmp_path / 'my.txt').write_bytes(content)
    (tmp_path / 'val.txt').write_text('another text')
    byte = get_tokenizer('byte')
    write_bins(files_corpus([tmp_path / 'my.txt'], [tmp_path / 'val.txt']), byte, tmp_path, 1)
    prepared = np.fromfile(tmp_path / 'train.bin', dtype='<u2').tolist()
    text = eval_script.Text(tmp_path / 'my.txt', byte)
    assert [*text.tokens.tolist(), 0] == prepared  # which ends the last document, too


def test_a_loss_beyond_floating_point_has_no_perplexity(capsys, out_dir, tmp_path, monkeypatch):
    (tmp_path / 'text.txt').write_text('some text')
    for loss in (800.0, math.inf, math.nan):
        monkeypatch.setattr(eval_script, 'evaluate', lambda *args, loss=loss: (loss, 8, 8))
        result = evaluate(capsys, out_dir, f'--text={tmp_path / "text.txt"}')
        assert result['perplexity'] is None and result['loss'] == (loss if loss == 800 else None)


def test_a_mixture_is_evaluated_part_by_part(capsys, out_dir, corpus, tmp_path):
    (tmp_path / 'other').mkdir()
    for name in ('train.bin', 'val.bin', 'meta.json'):
        (tmp_path / 'other' / name).symlink_to(corpus / name)
    eval_script.main([str(out_dir), f'--dataset={corpus}:0.7,{tmp_path / "other"}:0.3', '--device=cpu'])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first['data'] == str(corpus / 'val.bin') and second['data'] == str(tmp_path / 'other' / 'val.bin')
    assert first['loss'] == second['loss'] == evaluate(capsys, out_dir)['loss']


def test_errors_are_one_line(capsys, out_dir, tmp_path):
    (tmp_path / 'one.txt').write_text('1')
    for argv, words in ((('--text=missing.txt',), 'missing.txt'), ((f'--text={tmp_path / "one.txt"}',), 'fewer than'),
                        (('--block_size=64',), 'has 32 positions'), (('--stride=33',), 'skip tokens'),
                        (('--dataset=missing',), 'missing')):
        with pytest.raises(SystemExit) as error:
            evaluate(capsys, out_dir, *argv)
        assert words in str(error.value) and '\n' not in str(error.value)
