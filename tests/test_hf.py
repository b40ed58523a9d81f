"""Hugging Face both ways: what transformers computes from an export, what we compute from its models."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, metrics, rejection

from analysis.load import Loaded, crop_vocab_size, load, with_tokenizer
from data.loader import Bin, ValidationLoader
from data.tokenizer import Char, get_tokenizer
from model import GPT, GPTConfig
from runtime import checkpoint, hf
from runtime.distributed import World
from scripts.eval import evaluate
from scripts.export_hf import check, export
from scripts.export_hf import main as export_main

pytest.importorskip('safetensors', reason='needs requirements-hf.txt')
pytest.importorskip('tokenizers', reason='needs requirements-hf.txt')
transformers = pytest.importorskip('transformers', reason='needs requirements-hf.txt')
from safetensors.torch import load_file, save_file  # noqa: E402


def make_checkpoint(out_dir, tokenizer, block_size=24, seed=0, **kwargs):
    """A checkpoint of a random model with weights far from zero, so that a wrong one shows. Returns the model."""
    out_dir.mkdir(parents=True)
    torch.manual_seed(seed)
    args = {**dict(block_size=block_size, vocab_size=(tokenizer.vocab_size // 64 + 1) * 64, n_layer=3, n_head=2,
                   n_embd=16, dropout=0.0, bias=False, scale_attn_by_inverse_layer_idx=False), **kwargs}
    model = GPT(GPTConfig(**args)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    checkpoint.save(out_dir, dict(
        model=model.state_dict(), model_args=args, iter_num=3, tokenizer=tokenizer.meta, data={},
        train_state=dict(tokens=288),
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
    crop_vocab_size(model, 256)
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


def test_nothing_is_exported_unchecked(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    loaded = with_tokenizer(load(tmp_path / 'run'))
    plain = loaded.model.forward

    def louder(*args, **kwargs):
        logits, *rest = plain(*args, **kwargs)
        return 2 * logits, *rest

    monkeypatch.setattr(loaded.model, 'forward', louder)
    assert 'computes other logits' in rejection(export, loaded, tmp_path / 'hf')
    monkeypatch.setattr('scripts.export_hf.find_spec', lambda name: None)
    assert 'transformers, which is not installed: pip install' in rejection(export, loaded, tmp_path / 'hf')
    assert not (tmp_path / 'hf').exists()


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
        export(with_tokenizer(again), tmp_path / f'{tokenizer.name}-again')  # with a tokenizer.json of its own
        assert load(tmp_path / f'{tokenizer.name}-again').tokenizer.encode(texts[1]) == list(tokenizer.encode(texts[1]))
        if tokenizer.eot_id is not None:
            assert theirs.encode('a<|endoftext|>b')[1] == tokenizer.eot_id
            assert len(again.tokenizer.encode('a<|endoftext|>b')) > 3  # ordinary text in this repository
    # GPT-2's own files, byte for byte in content.
    ours = json.loads((tmp_path / 'gpt2-hf' / 'vocab.json').read_text())
    assert ours == json.loads(next(p for p in gpt2_cache.iterdir() if p.name.startswith('6c7e')).read_text())
    published = next(p for p in gpt2_cache.iterdir() if p.name.startswith('6d1c')).read_text().splitlines()
    written = (tmp_path / 'gpt2-hf' / 'merges.txt').read_text().splitlines()
    assert [line for line in written if not line.startswith('#version')] == published[1:]


def test_fine_tuning_starts_from_the_weights_and_resumes(fork, tmp_path, corpus):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'), block_size=32)
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    flags = [f'--dataset={corpus}', f'--out_dir={tmp_path / "tuned"}', '--optimizer_name=sophiag', '--learning_rate=0',
             '--model_size=tiny', '--block_size=32', '--total_batch_size=4', '--batch_size=2', '--eval_interval=2',
             '--eval_iters=8', '--warmup_iters=1', '--device=cpu']
    start = f'--init_from={tmp_path / "hf"}'
    refused = fork('train.py', *flags, start, '--n_layer=7')
    assert refused.code == 1 and refused.err.strip() == '--n_layer=7: must be 3, as in the pretrained weights'
    fork('train.py', *flags, start, '--max_iters=2', check=True)
    given = json.loads((tmp_path / 'tuned' / 'config.json').read_text())['config']
    assert (given['n_layer'], given['n_embd'], given['bias']) == (3, 16, False)  # the weights' shape, not model_size's
    fork('train.py', *flags, '--init_from=resume', '--max_iters=4', check=True)
    # At learning rate 0 the loss stays that of the exported model, which scripts/eval.py measures too.
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
    assert 'max_iters = 9' in card and 'dataset = ' not in card  # private names and paths
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
    assert 'ln_f.weight holds values that are not finite' in rejection(export, loaded, tmp_path / 'hf')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_check_finds_other_logits_and_nan(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    loaded = with_tokenizer(load(tmp_path / 'run'))
    export(loaded, tmp_path / 'hf')
    for value in (2.0, float('nan')):
        with torch.no_grad():
            loaded.model.transformer.ln_f.weight[0] = value
        assert 'computes other logits' in rejection(check, loaded, tmp_path / 'hf')


def test_an_architecture_that_gpt2_lacks_is_not_exported(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))

    def exported(change):
        loaded = with_tokenizer(load(tmp_path / 'run'))
        change(loaded.model)
        return rejection(export, loaded, tmp_path / 'hf')

    def untie(model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)

    def another_setting(model):
        model.config = dataclasses.make_dataclass('Config', [('rope', bool, False)], bases=(GPTConfig,))(
            **vars(model.config), rope=True)

    assert 'rope = True' in exported(another_setting)
    assert 'not tied' in exported(untie)
    assert "ln_3.weight' is not one of them" in exported(
        lambda model: setattr(model.transformer.h[1], 'ln_3', torch.nn.LayerNorm(16)))
    assert 'wpe.weight is missing' in exported(lambda model: delattr(model.transformer, 'wpe'))
    assert 'mlp.c_fc.weight has the shape' in exported(
        lambda model: setattr(model.transformer.h[0].mlp, 'c_fc', torch.nn.Linear(16, 32, bias=False)))
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_errors_are_one_line_and_leave_nothing(tmp_path):
    make_checkpoint(tmp_path / 'run', get_tokenizer('byte'))
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there' / 'file').touch()
    (tmp_path / 'bert').mkdir()
    (tmp_path / 'bert' / 'config.json').write_text('{"model_type": "bert"}')
    before = sorted(tmp_path.iterdir())
    for call, words in ((lambda: export_main([str(tmp_path / 'run'), str(tmp_path / 'there')]), 'there: exists'),
                        (lambda: GPT.from_pretrained(tmp_path / 'bert'), "model_type = 'bert'"),
                        (lambda: GPT.from_pretrained('gpt9'), 'neither a folder')):
        with pytest.raises(SystemExit) as error:
            call()
        assert words in str(error.value) and '\n' not in str(error.value)
    (tmp_path / 'file').touch()
    assert 'cannot be written' in rejection(export_main, [str(tmp_path / 'run'), str(tmp_path / 'file' / 'hf')])
    (tmp_path / 'file').unlink()
    assert sorted(tmp_path.iterdir()) == before
    export_main([str(tmp_path / 'run'), str(tmp_path / 'hf')])
    with pytest.raises(SystemExit, match='has 24 positions'):
        GPT.from_pretrained(tmp_path / 'hf', block_size=25)


def test_main_job_needs_no_transformers():
    """What training and sampling import must not import the optional packages."""
    code = 'import sys, model, runtime.hf, scripts.sample; print({"transformers", "safetensors"} & set(sys.modules))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert done.stdout.strip() == 'set()', done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Broken foreign folders: (what is done to a good one, a part of the one line that names it)

HUGE = 10 ** 7
BROKEN_CONFIGS = {
    'a list': ('[]', 'not a list'),
    'a number': ('7', 'not a int'),
    'null': ('null', 'not a NoneType'),
    'empty': ('', 'cannot be read'),
    'truncated': ('{"n_layer": 2,', 'cannot be read'),
    'nested': ('[' * 100_000, 'cannot be read'),
    'no UTF-8': (b'\xff\xfe{}', 'cannot be read'),
    'too long': (' ' * 2 ** 21 + '{}', 'not a file of at most 1 MiB'),
    'thousands of digits': ('{"n_layer": 1' + '0' * 5000 + '}', 'cannot be read'),
    'bert': (dict(model_type='bert'), "model_type = 'bert'"),
    'model_type a list': (dict(model_type=['gpt2']), "model_type = ['gpt2']"),
    'no model_type': (dict(model_type=None), 'model_type = None'),
    'text for n_embd': (dict(n_embd='16'), "n_embd = '16' must be"),
    'null for n_embd': (dict(n_embd=None), 'n_embd = None must be'),
    'a list for n_embd': (dict(n_embd=[16]), 'n_embd = [16] must be'),
    'an object for n_embd': (dict(n_embd={'16': 16}), 'n_embd = '),
    'a fraction for n_layer': (dict(n_layer=2.0), 'n_layer = 2.0 must be'),
    'true for n_layer': (dict(n_layer=True), 'n_layer = True must be'),
    'no layer': (dict(n_layer=0), 'n_layer = 0 must be'),
    'no head': (dict(n_head=0), 'n_head = 0 must be'),
    'negative heads': (dict(n_head=-2), 'n_head = -2 must be'),
    'heads that do not divide': (dict(n_head=3), 'n_embd = 16 is not a multiple of n_head = 3'),
    'infinite n_embd': ('{"model_type": "gpt2", "n_embd": 1e999}', 'n_embd = inf must be'),
    'n_embd is not a number': ('{"model_type": "gpt2", "n_embd": NaN}', 'n_embd = nan must be'),
    'text for vocab_size': (dict(vocab_size='many'), "vocab_size = 'many' must be"),
    'no positions': (dict(n_positions=0), 'n_positions = 0 must be'),
    'huge n_layer': (dict(n_layer=HUGE), 'they have 2 blocks, n_layer is 10000000'),
    'huge n_embd': (dict(n_embd=HUGE), 'has the shape'),
    'huge vocab_size': (dict(vocab_size=10 ** 40), 'wte.weight has the shape [50, 16]'),
    'huge n_positions': (dict(n_positions=10 ** 400), 'wpe.weight has the shape [12, 16]'),
    'one layer less': (dict(n_layer=1), 'they have 2 blocks, n_layer is 1'),
    'another activation': (dict(activation_function='relu'), "activation_function = 'relu'"),
    'an object for the activation': (dict(activation_function={}), 'activation_function = {}'),
    'another epsilon': (dict(layer_norm_epsilon='1e-5'), "layer_norm_epsilon = '1e-5'"),
    'another width of the MLP': (dict(n_inner=32), 'n_inner = 32'),
    'text for the scaling': (dict(scale_attn_by_inverse_layer_idx='yes'), "scale_attn_by_inverse_layer_idx = 'yes'"),
    'cross attention': (dict(add_cross_attention=True), 'add_cross_attention = True'),
    'text for bias': (dict(bias='no'), "bias = 'no'"),
    'an untied head': (dict(tie_word_embeddings=False), 'tie_word_embeddings = False'),
}
WTE, C_ATTN = 'transformer.wte.weight', 'transformer.h.1.attn.c_attn.weight'
BROKEN_WEIGHTS = {
    'no embeddings': ({WTE: None}, f'{WTE} is missing'),
    'no bias': ({'transformer.h.0.ln_1.bias': None}, 'h.0.ln_1.bias is missing'),
    'a foreign name': ({'transformer.h.0.attn.rotary': torch.zeros(4)}, "attn.rotary' is not one of them"),
    'a third block of one weight': ({'transformer.h.7.ln_1.bias': torch.zeros(16)}, 'they have 3 blocks'),
    'another name of a block': ({'transformer.h.1.ln_1.bias': None, 'transformer.h.01.ln_1.bias': torch.zeros(16)},
                                'they have 3 blocks'),
    '3-D weights': ({C_ATTN: torch.zeros(1, 16, 48)}, 'has the shape [1, 16, 48], not [16, 48]'),
    '1-D weights': ({C_ATTN: torch.zeros(16 * 48)}, 'has the shape [768]'),
    '0-D weights': ({WTE: torch.zeros(())}, 'has the shape []'),
    'transposed weights': ({C_ATTN: torch.zeros(48, 16)}, 'has the shape [48, 16]'),
    'no values': ({WTE: torch.zeros(0, 16)}, 'has the shape [0, 16]'),
    'integers': ({C_ATTN: torch.zeros(16, 48, dtype=torch.int8)}, 'is torch.int8'),
    'NaN': ({C_ATTN: torch.full((16, 48), torch.nan)}, 'c_attn.weight holds values that are not finite'),
    'an untied head': ({'lm_head.weight': torch.zeros(50, 16)}, 'not tied'),
    'a head of another shape': ({'lm_head.weight': torch.zeros(51, 16)}, 'lm_head.weight has the shape [51, 16]'),
    'no weights at all': (None, 'they have 0 blocks'),
}
BROKEN_FILES = {
    'empty': b'',
    'text': b'a model',
    'a header beyond the end': (2 ** 40).to_bytes(8, 'little') + b'{}',
    'a header that is not JSON': (4).to_bytes(8, 'little') + b'oops',
    'an offset beyond the end': (61).to_bytes(8, 'little')
    + b'{"wte.weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'[:61],
    'a pickle': b'\x80\x04\x95',
}


@pytest.fixture
def folder(tmp_path):
    """A good folder with a model of two blocks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=12, vocab_size=50, n_layer=2, n_head=2, n_embd=16, bias=True))
    tmp_path.joinpath('good').mkdir()
    hf.write(tmp_path / 'good', vars(model.config), model.state_dict())
    assert hf.read(tmp_path / 'good')[0]['n_layer'] == 2
    return tmp_path / 'good'


@pytest.mark.parametrize('name', BROKEN_CONFIGS)
def test_broken_configs_are_one_line(folder, name):
    change, words = BROKEN_CONFIGS[name]
    path = folder / 'config.json'
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_bytes(change if isinstance(change, bytes) else change.encode())
    message = rejection(GPT.from_pretrained, folder)
    assert words in message and str(folder) in message and len(message) < 300 + len(str(folder))


@pytest.mark.parametrize('name', BROKEN_WEIGHTS)
def test_broken_weights_are_one_line(folder, name):
    change, words = BROKEN_WEIGHTS[name]
    path = folder / 'model.safetensors'
    weights = load_file(path) | change if change else {}
    save_file({key: w for key, w in weights.items() if w is not None}, path)
    message = rejection(GPT.from_pretrained, folder)
    assert words in message and str(folder) in message


@pytest.mark.parametrize('name', BROKEN_FILES)
def test_broken_safetensors_are_one_line(folder, name):
    (folder / 'model.safetensors').write_bytes(BROKEN_FILES[name])
    assert 'not a safetensors file' in rejection(GPT.from_pretrained, folder)


def test_folders_without_weights_are_one_line(folder):
    (folder / 'model.safetensors').unlink()
    os.mkfifo(folder / 'model.safetensors')  # opening it would wait for ever
    assert 'holds no model.safetensors' in rejection(GPT.from_pretrained, folder)
    (folder / 'config.json').unlink()
    assert 'config.json: cannot be read' in rejection(GPT.from_pretrained, folder)
    os.mkfifo(folder / 'config.json')
    assert 'config.json: cannot be read' in rejection(GPT.from_pretrained, folder)
