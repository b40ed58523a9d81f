"""Generating: GPT.generate against a loop of its own, the sampler, scripts/sample.py, what analysis/load.py loads."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, rejection, write_bins
from torch.nn import functional as F

import analysis.load
from analysis.load import crop_vocab_size, load, with_tokenizer
from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig, sample_next
from runtime import checkpoint
from scripts import sample

TINY = dict(block_size=24, vocab_size=64, n_layer=3, n_head=2, n_embd=16, dropout=0.0, bias=False,
            scale_attn_by_inverse_layer_idx=False)


def make_model(**kwargs):
    """A random model with large weights: what it writes greedily is no repetition of one token."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**TINY, **kwargs})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_() if p.dim() == 2 else p.add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def recompute(model, idx, n):
    """The plain greedy loop: a full forward pass over the last block_size tokens for each new one."""
    for _ in range(n):
        logits = model(idx[:, -model.config.block_size:])[0][:, -1]
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize('kwargs', [{}, dict(bias=True, scale_attn_by_inverse_layer_idx=True, gelu_approximate='tanh')])
@pytest.mark.parametrize('length', [1, 7, 24, 30])
def test_generate_is_the_plain_greedy_loop(kwargs, length):
    model = make_model(**kwargs)
    idx = torch.randint(64, (3, length))
    expected = recompute(model, idx, 40)  # 24 positions: most tokens come after the context is full
    assert len(expected[:, length:].unique()) > 5
    ids, lengths = model.generate(idx, 40, temperature=0)
    assert torch.equal(ids, expected) and lengths.tolist() == [length + 40] * 3


def test_padded_rows_continue_as_if_alone():
    model = make_model(scale_attn_by_inverse_layer_idx=True)
    rows = [torch.randint(64, (1, n)) for n in (9, 1, 5, 9)]
    idx = torch.cat([F.pad(row, (0, 9 - row.size(1)), value=63) for row in rows])
    ids, lengths = model.generate(idx, 30, temperature=0, lengths=torch.tensor([9, 1, 5, 9]))
    assert lengths.tolist() == [39, 31, 35, 39]
    for row, found, length in zip(rows, ids, lengths):
        assert torch.equal(found[:length], recompute(model, row, 30)[0])


def test_rows_stop_on_their_own_and_the_loop_with_the_last():
    model, calls = make_model(), []
    idx = torch.randint(64, (3, 4))

    def stop(ids, lengths):
        calls.append(lengths.tolist())
        return lengths >= torch.tensor([6, 9, 7])

    ids, lengths = model.generate(idx, 30, temperature=0, stop=stop)
    assert lengths.tolist() == [6, 9, 7] and ids.shape == (3, 9) and len(calls) == 5
    expected = recompute(model, idx, 5)
    for found, alone, length in zip(ids, expected, lengths):
        assert torch.equal(found[:length], alone[:length])


def test_sampler_keeps_what_it_should():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)

    def frequencies(**kwargs):
        ids = sample_next(logits, generator=torch.Generator().manual_seed(0), **kwargs)
        return (torch.bincount(ids, minlength=4) / len(ids)).tolist()

    assert frequencies() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03) and frequencies(top_k=2)[2:] == [0, 0]
    # 0.5 does not reach 0.7, 0.5 + 0.3 does.
    assert frequencies(top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03) and frequencies(top_p=0.7)[2] == 0
    assert frequencies(top_p=0.1) == frequencies(temperature=0) == frequencies(top_k=1) == [1, 0, 0, 0]
    cold = [p ** 2 / sum(q ** 2 for q in (0.5, 0.3, 0.15, 0.05)) for p in (0.5, 0.3, 0.15, 0.05)]
    assert frequencies(temperature=0.5) == pytest.approx(cold, abs=0.03)
    # top_p is of what top_k leaves: 0.625 of the two alone.
    assert frequencies(top_k=2, top_p=0.6) == [1, 0, 0, 0]
    assert frequencies(top_k=100) == frequencies()


def test_crop_vocab_size_keeps_the_other_logits():
    model = make_model()
    idx = torch.randint(50, (2, 8))
    expected = model(idx)[0][..., :50]
    crop_vocab_size(model, 50)
    assert model(idx)[0].shape == (2, 8, 50) and torch.allclose(model(idx)[0], expected, atol=1e-6)
    assert model.lm_head.weight is model.transformer.wte.weight and model.config.vocab_size == 50


def save_run(out_dir, **extra):
    """An out_dir with a checkpoint of a random byte model, the vocabulary padded to 320 ids."""
    out_dir.mkdir(exist_ok=True)
    args = dict(TINY, vocab_size=320)
    state = dict(model=make_model(vocab_size=320).state_dict(), model_args=args, iter_num=5,
                 config=dict(dataset='gone'), data={}) | extra
    checkpoint.save(out_dir, state)
    return out_dir


def run(capsys, *argv):
    sample.main([*argv, '--device=cpu'])
    return capsys.readouterr()


def test_script(tmp_path, capsys):
    out_dir = f'--out_dir={save_run(tmp_path / "run", tokenizer=get_tokenizer("byte").meta)}'
    short = (out_dir, '--max_new_tokens=12', '--num_samples=2')
    first = run(capsys, *short, '--start', 'abc', 'xyz')
    assert first.out.count('---------------\n') == 4
    assert first.out.count('abc') == 2 and first.out.count('xyz') == 2
    assert 'tokens/s' in first.err
    assert run(capsys, *short, '--start', 'abc', 'xyz').out == first.out  # the seed decides
    assert run(capsys, *short, '--start', 'abc', 'xyz', '--seed=2').out != first.out
    greedy = run(capsys, *short, '--temperature=0', '--start=abc').out.split('---------------\n')
    assert greedy[0] == greedy[1]
    (tmp_path / 'prompts.txt').write_text('one\ntwo\n\nthree\n')
    listed = run(capsys, out_dir, '--num_samples=1', '--max_new_tokens=3', f'--prompt_file={tmp_path / "prompts.txt"}')
    assert [part[:3] for part in listed.out.split('---------------\n')] == ['one', 'two', 'thr', '']
    whole = run(capsys, out_dir, '--num_samples=1', '--max_new_tokens=3', f'--start=FILE:{tmp_path / "prompts.txt"}')
    assert whole.out.startswith('one\ntwo\n\nthree\n')
    assert run(capsys, str(tmp_path / 'run'), *short[1:]).out == run(capsys, *short).out  # as scripts/eval.py takes it
    newest = run(capsys, f'--out_dir={tmp_path / "run" / "ckpt_00000005.pt"}', *short[1:], '--start', 'abc', 'xyz')
    assert newest.out == first.out
    assert run(capsys, *short, '--start=').out.count('-----') > 0  # a document from its beginning
    assert run(capsys, str(tmp_path / 'run'), *short[1:], '--start', 'abc', 'xyz').out == first.out
    with pytest.raises(SystemExit):
        run(capsys, str(tmp_path / 'run'), *short)
    assert 'give one of them' in capsys.readouterr().err


def test_lines_of_a_prompt_file_end_where_editors_end_them(tmp_path, capsys):
    run_dir = str(save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta))
    (tmp_path / 'prompts.txt').write_bytes('\ufeffone\u2028still one\r\ntwo\fstill two\r\n'.encode())
    out = run(capsys, run_dir, '--num_samples=1', '--max_new_tokens=3', f'--prompt_file={tmp_path / "prompts.txt"}').out
    first, second, rest = out.split('---------------\n')
    assert first.startswith('one\u2028still one') and second.startswith('two\fstill two') and not rest


def test_many_samples_take_several_batches(tmp_path, capsys, monkeypatch):
    run_dir = str(save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta))
    monkeypatch.setattr(analysis.load, 'LOGITS', 2 * 24 * 256)
    rows, generate = [], GPT.generate
    monkeypatch.setattr(GPT, 'generate',
                        lambda self, idx, *rest, **more: rows.append(len(idx)) or generate(self, idx, *rest, **more))
    out = run(capsys, run_dir, '--num_samples=5', '--max_new_tokens=3', '--start=abc').out
    assert rows == [2, 2, 1] and out.count('abc') == out.count('---------------\n') == 5


def test_tokenizer_is_the_data_sets(tmp_path, capsys):
    data = write_bins(tmp_path / 'data', range(50), range(50))
    run_dir = save_run(tmp_path / 'run', config=dict(dataset=str(data)))
    here = run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8')
    (data / 'meta.json').unlink()
    (data / 'train.bin').unlink()
    with pytest.raises(SystemExit, match='give --tokenizer='):
        run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8')
    assert run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8', '--tokenizer=byte').out == here.out


def foreign_checkpoint(path, model, dataset='gone', **model_args):
    """Saves `model` as the official repository does, and nanoGPT where there is no flash attention: compiled, with the
    buffers of its attention's masks."""
    c = model.config
    mask = torch.tril(torch.ones(c.block_size, c.block_size))[None, None]
    weights = {f'_orig_mod.{key}': w for key, w in model.state_dict().items()}
    weights |= {f'_orig_mod.transformer.h.{i}.attn.bias': mask for i in range(c.n_layer)}
    args = {key: getattr(c, key) for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout',
                                             'bias')}
    torch.save(dict(model=weights, optimizer={}, model_args=args | model_args, iter_num=5,
                    best_val_loss=torch.tensor(1.0), config=dict(dataset=dataset)), path)


@pytest.mark.parametrize('official', [False, True])
def test_foreign_checkpoints_sample_end_to_end(tmp_path, capsys, official):
    """The official repository's GELU is the tanh approximation; its model_args have the attention scaling."""
    short = ('--max_new_tokens=8', '--num_samples=1', '--tokenizer=byte')
    settings = dict(scale_attn_by_inverse_layer_idx=True) if official else {}
    model = make_model(vocab_size=320, gelu_approximate='tanh' if official else 'none', **settings)
    foreign_checkpoint(tmp_path / 'ckpt.pt', model, **settings)
    (tmp_path / 'run').mkdir()
    checkpoint.save(tmp_path / 'run', dict(model=model.state_dict(), model_args=vars(model.config), iter_num=5,
                                           config=dict(dataset='gone'), data={}))
    ours = run(capsys, str(tmp_path / 'run'), *short).out
    assert run(capsys, str(tmp_path / 'ckpt.pt'), *short).out == ours


def test_nanogpts_character_checkpoint_needs_its_data_prepared_here(tmp_path, capsys, monkeypatch):
    text, short = 'To be, or not to be: that is the question.\n' * 9, ('--max_new_tokens=8', '--num_samples=1')
    foreign_checkpoint(tmp_path / 'ckpt.pt', make_model(vocab_size=len(set(text))), 'shakespeare_char')
    monkeypatch.chdir(tmp_path)
    for prepared in (analysis.load.ROOT / 'data' / 'shakespeare_char').glob('*.bin'):
        pytest.skip(f'{prepared} is here')
    message = rejection(run, capsys, 'ckpt.pt', *short)
    assert 'run python data/shakespeare_char/prepare.py' in message and '--tokenizer=FILE.json|DIR' in message
    assert 'gpt2' not in message  # it has far more ids
    (tmp_path / 'input.txt').write_text(text)
    prepare = [sys.executable, ROOT / 'data' / 'shakespeare_char' / 'prepare.py', '--input=input.txt', '--num_proc=1']
    subprocess.run([*prepare, '--out_dir=elsewhere'], check=True, capture_output=True)
    by_directory = run(capsys, 'ckpt.pt', *short, '--tokenizer=elsewhere').out
    assert set(by_directory.partition('-')[0]) <= set(text) and len(by_directory.partition('\n----')[0]) == 9
    (tmp_path / 'data').mkdir()
    (tmp_path / 'elsewhere').rename(tmp_path / 'data' / 'shakespeare_char')
    assert run(capsys, 'ckpt.pt', *short).out == by_directory
    assert '--tokenizer=nowhere: unknown' in rejection(run, capsys, 'ckpt.pt', *short, '--tokenizer=nowhere')
    assert '--tokenizer=.: a directory' in rejection(run, capsys, 'ckpt.pt', *short, '--tokenizer=.')


@pytest.mark.parametrize('change, words', [
    (dict(gelu_approximate='rough'), 'approximate'), (dict(n_layer=9000), 'far larger'), (dict(n_layer=2), 'h.2.'),
    (dict(n_embd=18), 'size mismatch'), (dict(vocab_size=321), '321'), (dict(block_size=2 ** 24), 'size mismatch'),
    (dict(rotary=True), 'rotary'), (dict(bias=True), 'Missing key')])
def test_model_args_that_are_not_the_weights_are_one_line(tmp_path, change, words):
    run_dir = save_run(tmp_path / 'run', model_args=dict(TINY, vocab_size=320) | change)
    message = rejection(load, run_dir / 'ckpt_00000005.pt')
    assert 'not a ' in message and words in message and len(message) < 400 + len(str(run_dir))


@pytest.mark.parametrize('tokenizer', [dict(tokenizer='nobody'), dict(tokenizer='char'),
                                       dict(tokenizer='char', chars=5)])
def test_bad_tokenizers_are_one_line(tmp_path, tokenizer):
    rejection(load, save_run(tmp_path / 'run', tokenizer=tokenizer))


def test_a_better_checkpoint_than_the_newest_is_named(tmp_path, capsys):
    run_dir = save_run(tmp_path / 'run')
    (run_dir / 'best.pt').hardlink_to(run_dir / 'ckpt_00000005.pt')
    load(run_dir)
    assert 'note' not in capsys.readouterr().err
    save_run(run_dir, iter_num=7)
    assert load(run_dir).state['iter_num'] == 7
    assert f'{run_dir / "best.pt"} had the lowest validation loss' in capsys.readouterr().err
    load(run_dir / 'ckpt_00000005.pt')
    assert not capsys.readouterr().err


def test_errors_are_one_line(tmp_path, capsys, gpt2_cache):
    run_dir = save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)
    (tmp_path / 'empty').touch()
    for argv, words in ((('--out_dir=nowhere',), 'nowhere'), ((f'--out_dir={tmp_path}',), 'no checkpoint'),
                        ((f'--out_dir={run_dir}', '--prompt_file=nothing.txt'), 'nothing.txt'),
                        ((f'--out_dir={run_dir}', f'--prompt_file={tmp_path / "empty"}'), 'holds no prompt'),
                        ((f'--out_dir={run_dir}', '--tokenizer=gpt2'), 'check --tokenizer'),
                        ((f'--out_dir={run_dir}', '--device=abacus'), 'abacus')):
        with pytest.raises(SystemExit) as error:
            sample.main([*argv, '--max_new_tokens=2'])
        assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('temperature', ['nan', '-1', 'inf'])
def test_bad_temperatures_are_rejected(temperature, capsys):
    with pytest.raises(SystemExit):
        sample.main([f'--temperature={temperature}'])
    assert f'--temperature={float(temperature)}: must be' in capsys.readouterr().err


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    out_dir = save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)
    process = subprocess.Popen([sys.executable, 'scripts/sample.py', f'--out_dir={out_dir}', '--num_samples=1000',
                                '--device=cpu'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=dict(os.environ, OMP_NUM_THREADS='1'))
    process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(300) == 0 and said.count('\n') == 1 and 'parameters' in said


def test_text_streams_in_whole_characters(capsys):
    ids = list('>aé中😀'.encode() + b'\xff\xfe!' + b'\0' + b'never shown')
    write, seen = sample.Writer(get_tokenizer('byte'), ids[:1]), []
    for n in range(2, len(ids) + 1):
        write(ids[:n])
        seen.append(capsys.readouterr().out)
    assert seen[:13] == ['a', '', 'é', '', '', '中', '', '', '', '😀', '', '', '\ufffd\ufffd!'] and not any(seen[13:])
    write = sample.Writer(get_tokenizer('byte'), ids[:1])
    write(ids[:3])  # half of é
    write(ids[:3], complete=True)
    assert capsys.readouterr().out == 'a\ufffd'


def test_spaces_between_tokens_are_written(capsys):
    """A tokenizer that, as SentencePiece's, writes the space before a word only if another word precedes it."""
    tokenizer = SimpleNamespace(eot_id=None, decode=lambda ids: ' '.join(['Once', 'upon', 'a', 'time'][i] for i in ids))
    write = sample.Writer(tokenizer, [0])
    for n in (2, 3, 4):
        write(list(range(n)))
    assert capsys.readouterr().out == ' upon a time'


def test_the_first_sample_streams_and_rows_end_with_their_document(tmp_path, capsys, monkeypatch):
    """A model that counts down: from 'c' it writes 'b', 'a', and 0, the end of the document."""
    loaded, printed = with_tokenizer(load(save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta))), []

    def forward(idx):
        printed.append(capsys.readouterr().out)
        nearer = torch.where(idx > ord('a'), idx - 1, 0)
        return 100.0 * F.one_hot(nearer, 256), None

    monkeypatch.setattr(loaded.model, 'forward', forward)
    args = SimpleNamespace(max_new_tokens=99, temperature=1.0, top_k=0, top_p=1.0)
    assert sample.write_samples(loaded, 'd', torch.tensor([[ord('d')]]), 2, args, None) == 2 * 4
    assert printed == ['d', 'c', 'b', 'a']
    assert capsys.readouterr().out == '\n---------------\ndcba\n---------------\n'
