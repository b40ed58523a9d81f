"""GPT.generate, its sampler, scripts/sample.py, and the checkpoints that scripts/load.py loads."""

import pytest
import torch
from conftest import random_gpt, rejection, write_bins

from data.sources import files_corpus
from data.tokenizer import Char, get_tokenizer
from data.writer import write_bins as prepare
from model import GPT
from runtime.checkpoint import clean_state_dict
from runtime.files import save_pt
from runtime.gpt import generate, sample_next
from scripts import sample
from scripts.load import Loaded, load, with_tokenizer

TINY = dict(block_size=24, vocab_size=64, n_layer=3, n_head=2, n_embd=16)


def make_model(**kwargs):
    """A random model with large weights, so that greedy decoding does not repeat one token."""
    return random_gpt(1.0, **{**TINY, **kwargs}).eval()


@torch.no_grad()
@pytest.mark.parametrize('kwargs', [{}, dict(bias=True, scale_attn_by_inverse_layer_idx=True, gelu_approximate='tanh')])
@pytest.mark.parametrize('length', [1, 7, 30])
def test_greedy_tokens_are_those_of_a_plain_loop(kwargs, length):
    model = make_model(**kwargs)
    idx = expected = torch.randint(64, (3, length))
    for _ in range(40):  # 24 positions: most tokens come after the context is full
        logits = model(expected[:, -24:])[0][:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert len(expected[:, length:].unique()) > 5
    assert torch.equal(generate(model, idx, 40, temperature=0), expected)
    assert torch.equal(generate(model, idx, 40, 0), expected)  # by position, as in nanoGPT
    stopped = generate(model, idx, 40, temperature=0, stop=lambda ids: ids.size(1) == length + 5)
    assert torch.equal(stopped, expected[:, :length + 5])
    for options in {}, dict(temperature=0.7, top_k=5), dict(top_k=99):
        torch.manual_seed(0)
        own = model.generate(idx, 40, **options)
        torch.manual_seed(0)
        assert torch.equal(own, generate(model, idx, 40, **options))


def test_sampler_keeps_what_it_should():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)

    def frequencies(**kwargs):
        ids = sample_next(logits, generator=torch.Generator().manual_seed(0), **kwargs)
        return (torch.bincount(ids, minlength=4) / len(ids)).tolist()

    assert frequencies() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03) and frequencies(top_k=2)[2:] == [0, 0]
    assert frequencies(top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03) and frequencies(top_p=0.7)[2] == 0
    assert frequencies(top_p=0.1) == frequencies(temperature=1e-40) == frequencies(top_k=1) == [1, 0, 0, 0]
    cold = [p ** 2 / sum(q ** 2 for q in (0.5, 0.3, 0.15, 0.05)) for p in (0.5, 0.3, 0.15, 0.05)]
    assert frequencies(temperature=0.5) == pytest.approx(cold, abs=0.03)
    assert frequencies(top_k=2, top_p=0.6) == [1, 0, 0, 0]  # top_k leaves 0.625 and 0.375
    assert frequencies(top_k=100) == frequencies()
    assert sample_next(torch.zeros(4000, 4), top_p=0.5).unique().tolist() == [0, 1]


@pytest.mark.parametrize('tied', [True, False])
def test_the_padding_of_the_vocabulary_is_cut_off(tied):
    model = make_model()
    if not tied:
        model.lm_head = torch.nn.Linear(16, 64)  # with a bias
    idx = torch.randint(50, (2, 8))
    expected = model(idx)[0][..., :50]
    with_tokenizer(Loaded('path', model, Char([*map(chr, range(50))])))
    torch.testing.assert_close(model(idx)[0], expected)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied and model.config.vocab_size == 50


def save_run(out_dir, **extra):
    """An out_dir with a checkpoint of a random byte model, the vocabulary padded to 320 ids."""
    out_dir.mkdir(exist_ok=True)
    state = dict(model=make_model(vocab_size=320).state_dict(), model_args=dict(TINY, vocab_size=320), iter_num=5,
                 config=dict(dataset='gone'), data={}) | extra
    save_pt(out_dir / f'ckpt_{state["iter_num"]:08d}.pt', state)
    return out_dir


def run(capsys, *argv):
    """The text that the script samples."""
    sample.main(['--max_new_tokens=12', '--num_samples=2', *map(str, argv), '--device=cpu'])
    return capsys.readouterr().out


def test_script(tmp_path, capsys):
    out = save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)
    first = run(capsys, f'--out_dir={out}', '--start=abc')  # as nanoGPT's
    one, two, end = first.split('\n---------------\n')
    assert one != two and one.startswith('abc') and two.startswith('abc') and end == ''
    assert run(capsys, out, '--start=abc') == run(capsys, out / 'ckpt_00000005.pt', '--start=abc') == first
    assert run(capsys, out, '--start=abc', '--seed=2') != first
    assert run(capsys, out, '--start=abc', '--temperature=0.8', '--top_k=200', '--top_p=1') == first  # the defaults
    assert run(capsys, out, '--start=abc', '--top_p=0') == first
    assert run(capsys, out, '--start=abc', '--temperature=0').count('\n---------------\n') == 1
    (tmp_path / 'prompt.txt').write_bytes('\ufeffone\r\ntwo\n'.encode())
    assert run(capsys, out, f'--start=FILE:{tmp_path / "prompt.txt"}').startswith('one\r\ntwo\n')  # as prepare reads
    assert run(capsys, out).startswith('\n') and run(capsys, out, '--start=').count('-----')  # a document's beginning


def test_bfloat16_is_that_of_training(tmp_path, capsys, monkeypatch):
    """Matmuls are in bfloat16, weights and buffers in float32."""
    def forward(self, idx, targets=None, forward=GPT.forward):
        logits, loss = forward(self, idx, targets)
        dtypes.update([logits.dtype, self.lm_head.weight.dtype])
        return logits, loss

    dtypes = set()
    monkeypatch.setattr(GPT, 'forward', forward)
    run(capsys, save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta), '--dtype=bfloat16')
    assert dtypes == {torch.bfloat16, torch.float32}


def test_a_sample_ends_with_its_document(tmp_path, capsys, monkeypatch):
    """A model that counts down: after 'd' it writes 'c', 'b', 'a', and 0, the end of the document."""
    out = save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)
    monkeypatch.setattr(GPT, 'forward', lambda self, idx: (
        100.0 * torch.nn.functional.one_hot(torch.where(idx > ord('a'), idx - 1, 0), 256), None))
    assert run(capsys, out, '--start=d', '--num_samples=1') == 'dcba\n---------------\n'


def test_tokenizer_is_the_data_sets(tmp_path, capsys):
    data = write_bins(tmp_path / 'data', range(50), range(50))
    out = save_run(tmp_path / 'run', config=dict(dataset=str(data)))
    here = run(capsys, out)
    (data / 'meta.json').unlink()
    (data / 'train.bin').unlink()
    assert 'its tokenizer is unknown; pass --tokenizer=' in rejection(run, capsys, out)
    assert run(capsys, out, '--tokenizer=byte') == here


def foreign_checkpoint(path, model, dataset='gone', prefix='', **model_args):
    """Saves `model` as nanoGPT does, with attention masks, and with the `prefix` of torch.compile and DDP."""
    c = model.config
    mask = torch.tril(torch.ones(c.block_size, c.block_size))[None, None]
    weights = {f'{prefix}{key}': w for key, w in model.state_dict().items()}
    for i in range(c.n_layer):
        block = f'{prefix}transformer.h.{i}'
        weights |= {f'{block}.attn.bias': mask, f'{block}.attn.masked_bias': torch.ones(())}
    args = {key: getattr(c, key) for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout',
                                             'bias')}
    torch.save(dict(model=weights, optimizer={}, model_args=args | model_args, iter_num=5,
                    best_val_loss=torch.tensor(1.0), config=dict(dataset=dataset)), path)


@torch.no_grad()
@pytest.mark.parametrize('official, prefix', [(False, ''), (False, '_orig_mod.'), (True, 'module._orig_mod.')])
def test_checkpoints_of_nanogpt_and_of_the_official_repository(tmp_path, official, prefix):
    """The official repository's GELU is the tanh approximation, and its model_args have the attention scaling."""
    settings = dict(scale_attn_by_inverse_layer_idx=True) if official else {}
    model = make_model(gelu_approximate='tanh' if official else 'none', bias=True, **settings)
    foreign_checkpoint(tmp_path / 'ckpt.pt', model, prefix=prefix, **settings)
    loaded, idx = load(tmp_path / 'ckpt.pt'), torch.randint(64, (2, 24))
    assert torch.equal(loaded.model(idx)[0], model(idx)[0])
    assert loaded.tokenizer is None and loaded.state['iter_num'] == 5
    others = {'h.attn.bias': torch.ones(3), 'h.conv.weight': torch.ones(1, 1, 1, 1)}  # They are no masks.
    assert clean_state_dict(others) == others


def test_nanogpts_character_checkpoint_needs_its_data_prepared_here(tmp_path, capsys, monkeypatch):
    (tmp_path / 'input.txt').write_text(text := 'To be, or not to be: that is the question.\n' * 9)
    foreign_checkpoint(tmp_path / 'ckpt.pt', make_model(vocab_size=len(set(text))), 'my_chars')
    monkeypatch.chdir(tmp_path)
    assert 'its tokenizer is unknown' in rejection(run, capsys, 'ckpt.pt')
    prepare(files_corpus([tmp_path / 'input.txt']), Char(''.join(sorted(set(text)))), 'data/my_chars', 1)
    capsys.readouterr()
    by_directory = run(capsys, 'ckpt.pt', '--tokenizer=data/my_chars')
    assert set(by_directory.partition('-')[0]) <= set(text)
    assert run(capsys, 'ckpt.pt') == by_directory


def test_another_tokenizer_than_the_models_is_rejected(tmp_path, capsys, gpt2_cache):
    assert 'check --tokenizer' in rejection(run, capsys, save_run(tmp_path / 'unknown'), '--tokenizer=gpt2')
    known = save_run(tmp_path / 'known', tokenizer=get_tokenizer('byte').meta)
    assert 'was trained with byte; leave the flag out' in rejection(run, capsys, known, '--tokenizer=gpt2')
