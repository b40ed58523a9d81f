"""Generating: the KV cache against computing everything again, the sampler, scripts/sample.py."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, write_bins

from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig, sample_next
from runtime import checkpoint
from scripts import sample
from scripts.load import load

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
def test_cache_gives_the_tokens_of_recomputing(kwargs, length):
    model = make_model(**kwargs)
    idx = torch.randint(64, (3, length))
    expected = recompute(model, idx, 40)  # 24 positions: most of it with a moving window
    assert len(expected[:, length:].unique()) > 5
    assert torch.equal(model.generate(idx, 40, temperature=0), expected)


def test_a_position_is_computed_once():
    """Up to block_size the cache must really spare the work: only the first call sees more than one token."""
    model, seen = make_model(), []
    model.transformer.wte.register_forward_hook(lambda module, args, out: seen.append(args[0].size(1)))
    model.generate(torch.randint(64, (1, 6)), 19, temperature=0)
    assert seen == [6] + [1] * 18
    model.generate(torch.randint(64, (1, 6)), 21, temperature=0)
    assert seen[19:] == [6] + [1] * 18 + [24, 24]


def test_padded_rows_go_on_as_if_alone():
    model = make_model(scale_attn_by_inverse_layer_idx=True)
    rows = [torch.randint(64, (1, n)) for n in (9, 1, 5, 9)]
    padding = torch.tensor([9 - row.size(1) for row in rows])
    idx = torch.cat([torch.cat((torch.full((1, pad), 63), row), 1) for row, pad in zip(rows, padding.tolist())])
    together = model.generate(idx, 30, temperature=0, padding=padding)
    for row, pad, found in zip(rows, padding.tolist(), together):
        assert torch.equal(found[pad:], recompute(model, row, 30)[0])


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
    model.crop_vocab_size(50)
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
    newest = run(capsys, f'--out_dir={tmp_path / "run" / "ckpt_00000005.pt"}', *short[1:], '--start', 'abc', 'xyz')
    assert newest.out == first.out
    assert run(capsys, *short, '--start=').out.count('-----') > 0  # a document from its beginning


def test_tokenizer_is_the_data_sets(tmp_path, capsys):
    data = write_bins(tmp_path / 'data', range(50), range(50))
    run_dir = save_run(tmp_path / 'run', config=dict(dataset=str(data)))
    here = run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8')
    (data / 'meta.json').unlink()
    (data / 'train.bin').unlink()
    with pytest.raises(SystemExit, match='give --tokenizer='):
        run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8')
    assert run(capsys, f'--out_dir={run_dir}', '--max_new_tokens=8', '--tokenizer=byte').out == here.out


def test_nanogpts_checkpoints(tmp_path, capsys):
    model, short = make_model(vocab_size=320), ('--max_new_tokens=8', '--num_samples=1', '--tokenizer=byte')
    ours = run(capsys, f'--out_dir={save_run(tmp_path / "run")}', *short).out
    args = {key: value for key, value in vars(model.config).items() if key not in (
        'scale_attn_by_inverse_layer_idx', 'gelu_approximate')}
    torch.save(dict(model={f'_orig_mod.{key}': w for key, w in model.state_dict().items()}, optimizer={},
                    model_args=args, iter_num=5, best_val_loss=torch.tensor(1.0), config=dict(dataset='gone')),
               tmp_path / 'ckpt.pt')
    assert run(capsys, f'--out_dir={tmp_path / "ckpt.pt"}', *short).out == ours
    with pytest.raises(SystemExit, match="name ckpt.pt, nanoGPT's, itself"):
        run(capsys, f'--out_dir={tmp_path}', *short)


def test_gelu_of_the_official_repositorys_checkpoints(tmp_path):
    """Its GELU is the tanh approximation; its model_args say so by the attention scaling, which nanoGPT's lack."""
    ours = save_run(tmp_path / 'run')
    state = checkpoint.load(ours)[1]
    assert 'gelu_approximate' not in state['model_args']
    torch.save({key: value for key, value in state.items() if key != 'data'}, tmp_path / 'ckpt.pt')
    assert load(ours).model.config.gelu_approximate == 'none'
    assert load(tmp_path / 'ckpt.pt').model.config.gelu_approximate == 'tanh'


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
                        ((f'--out_dir={run_dir}', f'--prompt_file={tmp_path / "empty"}'), 'no prompt'),
                        ((f'--out_dir={run_dir}', '--tokenizer=gpt2'), 'check --tokenizer'),
                        ((f'--out_dir={run_dir}', '--device=abacus'), 'abacus')):
        with pytest.raises(SystemExit) as error:
            sample.main([*argv, '--max_new_tokens=2'])
        assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('temperature', ['nan', '-1', 'inf'])
def test_a_temperature_that_is_none_is_refused(temperature, capsys):
    with pytest.raises(SystemExit):
        sample.main([f'--temperature={temperature}'])
    assert f'--temperature={float(temperature)}: must be' in capsys.readouterr().err


def test_it_ends_quietly_when_nobody_reads_on(tmp_path):
    out_dir = save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)
    process = subprocess.Popen([sys.executable, 'scripts/sample.py', f'--out_dir={out_dir}', '--num_samples=1000',
                                '--device=cpu'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=dict(os.environ, OMP_NUM_THREADS='1'))
    process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 0 and said.count('\n') == 1 and 'parameters' in said


def test_text_streams_in_whole_characters(capsys):
    written = 'aé中😀'.encode() + b'\xff\xfe!' + b'\0' + b'never shown'
    model = SimpleNamespace(stream=lambda *args, **kwargs: (torch.tensor([b]) for b in written))
    loaded = SimpleNamespace(model=model, tokenizer=get_tokenizer('byte'))
    args = SimpleNamespace(max_new_tokens=99, temperature=1.0, top_k=0, top_p=1.0)
    assert sample.write_sample(loaded, None, args, None) == len('aé中😀'.encode()) + 4
    assert capsys.readouterr().out == 'aé中😀\ufffd\ufffd!\n'
