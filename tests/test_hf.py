"""Hugging Face both ways: what transformers computes from an export, what we compute from its models."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, metrics, refusal, run_train

from data.loader import Bin, ValidationLoader
from data.tokenizer import Char, get_tokenizer
from model import GPT, GPTConfig, padded_vocab_size
from runtime import checkpoint
from runtime.distributed import World
from scripts.eval import evaluate
from scripts.export_hf import export
from scripts.export_hf import main as export_main
from scripts.load import Loaded, load, with_tokenizer

pytest.importorskip('safetensors', reason='needs requirements-hf.txt')
pytest.importorskip('tokenizers', reason='needs requirements-hf.txt')
transformers = pytest.importorskip('transformers', reason='needs requirements-hf.txt')


def make_checkpoint(out_dir, tokenizer, block_size=24, seed=0, **kwargs):
    """A checkpoint of a random model with weights far from zero, so that a wrong one shows. Returns the model."""
    out_dir.mkdir(parents=True)
    torch.manual_seed(seed)
    args = {**dict(block_size=block_size, vocab_size=padded_vocab_size(tokenizer.vocab_size + 1), n_layer=3, n_head=2,
                   n_embd=16, dropout=0.0, bias=False, scale_attn_by_inverse_layer_idx=False), **kwargs}
    model = GPT(GPTConfig(**args)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    checkpoint.save(out_dir, dict(
        model=model.state_dict(), model_args=args, iter_num=3, tokenizer=tokenizer.meta, tokens=288, data={},
        config=dict(dataset='gone', optimizer_name='sophiag', max_iters=9, total_batch_size=4, block_size=block_size)))
    return model


@torch.no_grad()
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('scale', [False, True])
def test_export_has_our_logits_and_import_gives_the_model_back(tmp_path, bias, scale):
    model = make_checkpoint(tmp_path / 'run', get_tokenizer('byte'), bias=bias, scale_attn_by_inverse_layer_idx=scale)
    assert model.config.vocab_size == 320  # padded beyond the 256 bytes
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    idx = torch.randint(256, (2, 24))
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weights
    ours = model(idx)[0][..., :256]
    torch.testing.assert_close(theirs.eval()(idx).logits, ours, atol=1e-4, rtol=0)
    back = GPT.from_pretrained(tmp_path / 'hf').eval()
    model.crop_vocab_size(256)
    assert back.config == model.config
    for (name, one), (other_name, other) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(one, other), name
    assert back.lm_head.weight is back.transformer.wte.weight
    if scale:  # the flag must matter, and survive versions of transformers that know it in eager attention only
        assert json.loads((tmp_path / 'hf' / 'config.json').read_text())['_attn_implementation'] == 'eager'
        plain = GPT(GPTConfig(**{**vars(model.config), 'scale_attn_by_inverse_layer_idx': False})).eval()
        plain.load_state_dict(model.state_dict())
        assert (plain(idx)[0] - ours).abs().max() > 1e-2


@torch.no_grad()
def test_import_of_a_model_of_transformers(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=77, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        p.add_(0.3 * torch.randn_like(p))
    idx = torch.randint(77, (2, 20))
    # With the head's name, and as published: from GPT2Model, without the prefix "transformer.".
    for name, saved in (('lm', theirs), ('base', theirs.transformer)):
        saved.save_pretrained(tmp_path / name)
        ours = GPT.from_pretrained(tmp_path / name, block_size=20).eval()
        assert ours.config.gelu_approximate == 'tanh' and ours.config.bias and ours.config.block_size == 20
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / 'sharded', max_shard_size='8KB')
    assert len(list((tmp_path / 'sharded').glob('*.safetensors'))) > 1
    torch.testing.assert_close(GPT.from_pretrained(tmp_path / 'sharded').eval()(idx)[0], ours(idx)[0])
    # Imported, exported again: what was there.
    loaded = with_tokenizer(Loaded('x', tmp_path / 'lm', GPT.from_pretrained(tmp_path / 'lm'),
                                   Char([chr(97 + i) for i in range(77)])))
    export(loaded, tmp_path / 'again')
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'again').state_dict()
    for key, w in theirs.state_dict().items():
        assert torch.equal(w, again[key]), key


def test_tokenizers_of_exports(tmp_path, gpt2_cache):
    texts = ['Hello world', "  it's 2,000 words\n\n\tand é ü 中文 😀 ", 'a' * 50, '\xa0\x07']
    for tokenizer in (get_tokenizer('gpt2'), get_tokenizer('byte'), Char(sorted(set(''.join(texts))))):
        make_checkpoint(tmp_path / tokenizer.name, tokenizer)
        dest = tmp_path / f'{tokenizer.name}-hf'
        export(with_tokenizer(load(tmp_path / tokenizer.name)), dest)
        theirs = transformers.AutoTokenizer.from_pretrained(dest)
        again = load(dest)
        assert len(theirs) == again.model.config.vocab_size == again.tokenizer.vocab_size == tokenizer.vocab_size
        assert theirs.eos_token_id == again.tokenizer.eot_id == tokenizer.eot_id
        for text in texts:
            ids = list(tokenizer.encode(text))
            assert theirs.encode(text) == ids and theirs.decode(ids) == text
            assert again.tokenizer.encode(text) == ids and again.tokenizer.decode(ids) == text
        if tokenizer.eot_id is not None:
            assert theirs.encode('a<|endoftext|>b')[1] == tokenizer.eot_id
            assert len(again.tokenizer.encode('a<|endoftext|>b')) > 3  # ordinary text in this repository
    # GPT-2's own files, byte for byte in content.
    ours = json.loads((tmp_path / 'gpt2-hf' / 'vocab.json').read_text())
    assert ours == json.loads(next(p for p in gpt2_cache.iterdir() if p.name.startswith('6c7e')).read_text())
    published = next(p for p in gpt2_cache.iterdir() if p.name.startswith('6d1c')).read_text().splitlines()
    written = (tmp_path / 'gpt2-hf' / 'merges.txt').read_text().splitlines()
    assert [line for line in written if not line.startswith('#version')] == published[1:]


def test_fine_tuning_starts_from_the_weights_and_resumes(tmp_path, corpus):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'), block_size=32)
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    flags = [f'--dataset={corpus}', f'--out_dir={tmp_path / "tuned"}', '--optimizer_name=sophiag', '--learning_rate=0',
             '--model_size=tiny', '--block_size=32', '--total_batch_size=4', '--batch_size=2', '--eval_interval=2',
             '--eval_iters=8', '--warmup_iters=1', '--device=cpu']
    run_train(*flags, f'--init_from={tmp_path / "hf"}', '--max_iters=2')
    given = json.loads((tmp_path / 'tuned' / 'config.json').read_text())['config']
    assert (given['n_layer'], given['n_embd'], given['bias']) == (3, 16, False)  # the weights' shape, not model_size's
    run_train(*flags, '--init_from=resume', '--max_iters=4')
    # At learning rate 0 the loss stays what it is of the exported model, in scripts/eval.py's reckoning too.
    losses = metrics(tmp_path / 'tuned', 'val/loss')
    assert losses == [losses[0]] * 3
    loaded = load(tmp_path / 'hf')
    batches = ValidationLoader(Bin(corpus, 'val'), 16, 2, 32, 0, 1, 'cpu')
    loss, _, _ = evaluate(loaded.model, batches, World('cpu', 'gloo'), contextlib.nullcontext())
    assert loss == pytest.approx(losses[0])


def test_model_card(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    lines = [{'iter': 2, 'val/loss': 5.0}, {'iter': 3, 'val/loss': 4.5}, {'iter': 4, 'val/loss': 4.0}]
    (tmp_path / 'run' / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    export(with_tokenizer(load(tmp_path / 'run')), tmp_path / 'hf')
    card = (tmp_path / 'hf' / 'README.md').read_text()
    assert '| validation loss | 4.5000 |' in card and "optimizer_name = 'sophiag'" in card and '| 256 ids' in card
    assert '| tokens seen | 288 |' in card and '| optimizer | sophiag |' in card
    assert 'max_iters = 9' in card and 'dataset = ' not in card  # names and places are nobody's business
    loaded = load(tmp_path / 'run')
    loaded.state = dict(iter_num=4, config=dict(dataset='gone', max_iters=9))  # what nanoGPT's checkpoints say
    export(with_tokenizer(loaded), tmp_path / 'nano')
    card = (tmp_path / 'nano' / 'README.md').read_text()
    assert '| iterations | 4 of 9 |' in card and 'optimizer' not in card


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    loaded = with_tokenizer(load(tmp_path / 'run'))
    with torch.no_grad():
        loaded.model.transformer.ln_f.weight[0] = float('nan')
    assert 'computes other logits' in refusal(export, loaded, tmp_path / 'hf')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_errors_are_one_line_and_leave_nothing(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there' / 'file').touch()
    (tmp_path / 'bert').mkdir()
    (tmp_path / 'bert' / 'config.json').write_text('{"model_type": "bert"}')
    before = sorted(tmp_path.iterdir())
    for call, words in ((lambda: export_main([str(tmp_path / 'run'), str(tmp_path / 'there')]), 'is there already'),
                        (lambda: GPT.from_pretrained(tmp_path / 'bert'), "model_type = 'bert'"),
                        (lambda: GPT.from_pretrained('gpt9'), 'neither a folder')):
        with pytest.raises(SystemExit) as error:
            call()
        assert words in str(error.value) and '\n' not in str(error.value)
    (tmp_path / 'file').touch()
    assert 'cannot be written' in refusal(export_main, [str(tmp_path / 'run'), str(tmp_path / 'file' / 'hf')])
    (tmp_path / 'file').unlink()
    assert sorted(tmp_path.iterdir()) == before
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    with pytest.raises(SystemExit, match='has 24 positions'):
        GPT.from_pretrained(tmp_path / 'hf', block_size=25)


def test_main_job_needs_no_transformers():
    """What training and sampling import must not import the optional packages."""
    code = 'import sys, model, checkpoint, scripts.sample; print({"transformers", "safetensors"} & set(sys.modules))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert done.stdout.strip() == 'set()', done.stderr
