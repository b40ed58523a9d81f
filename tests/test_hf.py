"""Hugging Face both ways: transformers computes our logits from an export, and we compute the logits of its models."""

import json

import pytest
import torch
from conftest import metrics, random_gpt, rejection

import train
from analysis.runs import read_run
from data.tokenizer import Char, folder_meta, get_tokenizer, identifying, same_tokenizer
from model import GPT
from runtime.files import save_pt
from scripts.export_hf import export
from scripts.export_hf import main as export_main
from scripts.load import Loaded, load, with_tokenizer

transformers = pytest.importorskip('transformers', reason='needs requirements-hf.txt')

SHAPE = dict(vocab_size=77, n_positions=32, n_embd=16, n_layer=2, n_head=2)


def save_checkpoint(out_dir, tokenizer, block_size=24, **kwargs):
    """Saves and returns a random model."""
    out_dir.mkdir()
    args = dict(block_size=block_size, vocab_size=(tokenizer.vocab_size // 64 + 1) * 64, n_layer=3, n_head=2, n_embd=16,
                **kwargs)
    model = random_gpt(0.3, **args).eval()
    save_pt(out_dir / 'ckpt_00000003.pt', dict(
        model=model.state_dict(), model_args=args, iter_num=3, tokenizer=tokenizer.meta, data={}, config={}))
    return model


def export_bytes(tmp_path, **kwargs):
    """Exports the folder hf of a random model of bytes, whose checkpoint is in run. Returns the model."""
    model = save_checkpoint(tmp_path / 'run', get_tokenizer('byte'), **kwargs)
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    return model


@torch.no_grad()
@pytest.mark.parametrize('bias, scaled', [(False, True), (True, False)])
def test_export_has_our_logits_and_import_gives_the_model_back(tmp_path, bias, scaled):
    model = export_bytes(tmp_path, bias=bias, scale_attn_by_inverse_layer_idx=scaled)
    assert model.config.vocab_size == 320  # padded beyond the 256 bytes
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weights
    idx = torch.randint(256, (2, 24))
    ours = model(idx)[0][..., :256]
    torch.testing.assert_close(theirs.eval()(idx).logits, ours, atol=1e-4, rtol=0)
    with_tokenizer(Loaded('run', model, get_tokenizer('byte')))
    back = GPT.from_pretrained(tmp_path / 'hf').eval()
    assert back.config == model.config and back.lm_head.weight is back.transformer.wte.weight
    for (name, w), (other_name, other) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(w, other), name
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    # Versions of transformers before 5.4 scale eager attention only.
    assert (config.get('_attn_implementation') == 'eager') == scaled


@torch.no_grad()
def test_import_of_models_of_transformers(tmp_path):
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, n_inner=64))
    for p in theirs.eval().parameters():
        p.add_(0.3 * torch.randn_like(p))
    idx = torch.randint(77, (2, 20))
    theirs.save_pretrained(tmp_path / 'head')
    theirs.transformer.save_pretrained(tmp_path / 'base')  # as published: without the prefix "transformer."
    theirs.save_pretrained(tmp_path / 'shards', max_shard_size='8KB')
    assert len(list((tmp_path / 'shards').glob('*.safetensors'))) > 1
    for name in ('head', 'base', 'shards'):
        ours = GPT.from_pretrained(tmp_path / name, block_size=20).eval()
        assert ours.config.gelu_approximate == 'tanh' and ours.config.bias and ours.config.block_size == 20
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize('change, words', [
    (dict(activation_function='relu'), "activation_function = 'relu'"), (dict(n_inner=32), 'n_inner = 32'),
    (dict(tie_word_embeddings=False), 'not tied'), (dict(n_head=3), 'cannot load it'), (dict(n_layer=3), 'h.2.'),
    (dict(n_layer=1), 'h.1.')])
def test_models_that_gpt_cannot_be_are_rejected(tmp_path, change, words):
    built_so = {key: value for key, value in change.items() if key in ('n_inner', 'tie_word_embeddings')}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **built_so)).save_pretrained(tmp_path)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in rejection(GPT.from_pretrained, tmp_path)
    (tmp_path / 'model.safetensors').write_bytes(b'a model')
    assert rejection(GPT.from_pretrained, tmp_path).startswith(str(tmp_path))


@pytest.mark.parametrize('name', ['gpt2', 'char'])
def test_tokenizer_of_an_export(tmp_path, capsys, gpt2_cache, name):
    texts = ['Hello , world .', "  it's 2,000 words\n\n\tand é ü 中文 😀 ", 'a' * 50, '\xa0\x07']
    tokenizer = get_tokenizer('gpt2') if name == 'gpt2' else Char(sorted(set(''.join(texts))))
    save_checkpoint(tmp_path / 'run', tokenizer)
    export(with_tokenizer(load(tmp_path / 'run')), tmp_path / 'hf')
    again = load(tmp_path / 'hf')
    assert again.model.config.vocab_size == tokenizer.vocab_size
    if name == 'char':
        assert again.tokenizer is None and 'the tokenizer char is not exported' in capsys.readouterr().err
        return
    export(with_tokenizer(again), tmp_path / 'again')  # from a tokenizer.json
    for folder in ('hf', 'again'):
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / folder), load(tmp_path / folder).tokenizer
        assert len(theirs) == ours.vocab_size == 50257 and theirs.eos_token_id == ours.eot_id == 50256
        for text in texts:
            assert theirs.encode(text) == ours.encode(text) == tokenizer.encode(text)
            assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text)) == text
        assert theirs.encode('a<|endoftext|>b')[1] == 50256
        assert len(ours.encode('a<|endoftext|>b')) > 3  # ordinary text in this repository
    file, bpe = identifying(folder_meta(tmp_path / 'hf', 50257)), dict(tokenizer='gpt2')
    assert file['tokenizer'] == 'tokenizer.json' and same_tokenizer(file, bpe) and same_tokenizer(bpe, file)
    other = json.loads(file['json'])
    vocab = other['model']['vocab']
    vocab['\u0120the'], vocab['\u0120t'] = vocab['\u0120t'], vocab['\u0120the']
    assert not same_tokenizer(dict(file, json=json.dumps(other)), bpe)


def test_an_export_adds_no_token_that_training_did_not_have(tmp_path):
    """Although its tokenizer.json has a post-processor that adds one."""
    import tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({'<s>': 0, '</s>': 1, 'a': 2, 'b': 3}, unk_token='b'))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.add_special_tokens(['<s>', '</s>'])
    bpe.post_processor = tokenizers.processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 0)])
    bpe.save(str(tmp_path / 'tokenizer.json'))
    tokenizer = get_tokenizer(tmp_path)
    assert bpe.encode('a b').ids == [0, 2, 3]
    save_checkpoint(tmp_path / 'run', tokenizer)
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert theirs('a b')['input_ids'] == tokenizer.encode('a b') == [2, 3] and theirs.eos_token_id == 1


def test_bytes_of_an_export(tmp_path, capsys):
    export_bytes(tmp_path)
    assert 'hf: 13,808 parameters, logits differ by at most ' in capsys.readouterr().out
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf'), load(tmp_path / 'hf').tokenizer
    assert len(theirs) == ours.vocab_size == 256 and theirs.eos_token_id == ours.eot_id == 0
    # U+0100 stands for byte 0 in the vocabularies of other byte-level tokenizers.
    for text in ('Hello , world .', "  it's\n\n\té ü 中文 😀 ", '\u0100\x07'):
        assert theirs.encode(text) == ours.encode(text) == list(text.encode())
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text)) == text
    assert theirs.encode('a<|endoftext|>b') == [97, 0, 98] and theirs.decode([97, 0], skip_special_tokens=True) == 'a'
    assert same_tokenizer(identifying(ours.meta), dict(tokenizer='byte'))


def untie(model):
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))


def spoil(model):
    model.transformer.ln_f.weight.data[0] = float('nan')


def divide(model):
    """Edits the model so that only texts with several documents have other logits."""
    plain = model.forward
    model.forward = lambda idx, targets=None: (plain(idx)[0] * (idx == 0).any(1)[:, None, None].logical_not(), None)


def add(model):
    model.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize('edit, words', [(untie, 'other logits'), (spoil, 'other logits'), (divide, 'other logits'),
                                         (add, "the weights are not a GPT-2's (")])
def test_only_a_gpt2_is_exported(tmp_path, edit, words):
    save_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    loaded = with_tokenizer(load(tmp_path / 'run'))
    edit(loaded.model)
    assert words in rejection(export, loaded, tmp_path / 'hf') and not (tmp_path / 'hf').exists()
    assert 'run: exists' in rejection(export_main, [str(tmp_path / 'run'), str(tmp_path / 'run')])


def test_fine_tuning_starts_from_the_weights_and_resumes(tmp_path, corpus):
    """At learning rate 0 every validation loss is the exported model's."""
    export_bytes(tmp_path, block_size=32)
    flags = [f'--dataset={corpus}', f'--out_dir={tmp_path / "tuned"}', '--learning_rate=0', '--model_size=tiny',
             '--block_size=32', '--total_batch_size=4', '--batch_size=2', '--eval_interval=2', '--eval_iters=8',
             '--warmup_iters=1', '--device=cpu']
    start = f'--init_from={tmp_path / "hf"}'
    assert '--n_layer=7: must be 3, as in' in rejection(train.main, [*flags, start, '--n_layer=7'])
    train.main([*flags, start, '--max_iters=2'])
    settings = json.loads((tmp_path / 'tuned/config.json').read_text())['config']
    assert (settings['n_layer'], settings['n_embd'], settings['bias']) == (3, 16, False)  # not model_size's
    train.main([*flags, '--init_from=resume', '--max_iters=4'])
    train.main([*flags, start, '--auto_resume=True', '--max_iters=6'])
    losses = metrics(tmp_path / 'tuned', 'val/loss')
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4)
    assert read_run(tmp_path / 'tuned').config['init_from'] == str(tmp_path / 'hf')  # also after a resume
