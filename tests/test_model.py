"""The model: initial weights, parameters, FLOPs, attention scaling. tests/test_hf.py compares it with transformers'."""

import functools
import math
from dataclasses import asdict, dataclass, field

import pytest
import torch
import torch._functorch.config
from conftest import needs_compiler
from torch.nn import functional as F

from loss import Losses
from model import GPT, SIZES, GPTConfig
from runtime import gpt
from runtime.distributed import World
from runtime.rng import seed_all


@needs_compiler
@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_dropout_follows_the_seed_where_blocks_are_checkpointed_and_compiled(device, monkeypatch):
    """In both passes, and a second time through the same graph."""
    if device == 'cpu':  # sooner, and a CPU draws as the seed says in any case
        monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    model, X = tiny(dropout=0.5), torch.arange(64, device=device).view(4, 16)

    def gradients(seed):
        seed_all(seed)
        with torch.autocast(device, torch.bfloat16):
            loss = losses(X, X)[1]
        return [torch.autograd.grad(loss, model.transformer.wpe.weight, retain_graph=retain)[0]
                for retain in (True, False)]

    # PyTorch's own patch, because monkeypatch would leave the config without the key. The tag is hessian.keep_buffers'.
    config = torch._functorch.config
    with config.patch(graphsafe_rng_functionalization=True, donated_buffer=False), \
            torch.compiler.config.patch(cache_key_tag='donated_buffer=False'):
        losses = World(device, 'gloo').wrap(Losses(model), model, model.transformer.h, True, True)
        assert not config.graphsafe_rng_functionalization
        first, again = gradients(1)
        slack = 0.01 * first.abs().max().item()  # a GPU may add up in another order
        assert all(torch.allclose(same, first, atol=slack) for same in (again, *gradients(1)))
        assert not torch.allclose(gradients(2)[0], first, atol=10 * slack)


def tiny(**kwargs):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{'block_size': 16, 'vocab_size': 64, 'n_layer': 2, 'n_head': 2, 'n_embd': 32, **kwargs}))


def test_initial_weights():
    """GPT-2's: 0.02, divided by √(2 n_layer) where a block adds to the residual stream; so the loss is near log V."""
    model = tiny(n_layer=8, n_embd=128, bias=True)
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            assert (p == 0).all()
        elif 'ln_' in name:
            assert (p == 1).all()
        else:
            assert p.std().item() == pytest.approx(0.005 if 'c_proj' in name else 0.02, rel=0.05), name
    assert model.lm_head.weight is model.transformer.wte.weight
    idx = torch.randint(64, (4, 17))
    assert model(idx[:, :-1])[1] is None
    assert model(idx[:, :-1], idx[:, 1:])[1].item() == pytest.approx(math.log(64), abs=0.1)


def test_blocks_with_scaled_attention_share_one_graph():
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    model, counter = tiny(n_layer=10, scale_attn_by_inverse_layer_idx=True), CompileCounter()
    idx = torch.randint(64, (2, 16))
    expected = model(idx)[0]
    for block in model.transformer.h:  # as for a sharded model
        block.forward = torch.compile(block.forward, backend=counter)
    torch.testing.assert_close(model(idx)[0], expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_scaling_keeps_the_precision_of_the_attention(monkeypatch, dtype):
    """Queries stay in 16 bits, and are divided by 3, say, not multiplied by a rounded third."""
    attend, seen = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda q, *args, **kwargs: seen.append(q) or attend(
        q, *args, **kwargs))
    attention, hidden = tiny().transformer.h[0].attn, torch.randn(2, 16, 32)
    with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
        attention(hidden), attention(hidden, torch.tensor(3))
    plain, scaled = seen
    assert scaled.dtype == dtype and torch.equal(scaled, (plain.double() / 3).to(dtype))


@pytest.mark.parametrize('size, block_size, millions', [
    ('tiny', 1024, 7.36), ('30M', 1024, 30.3), ('125M', 1024, 124.4), ('355M', 1024, 354.5), ('540M', 1024, 537.0),
    ('770M', 1024, 773.6), ('1.5B', 2048, 1440), ('6.6B', 2048, 6660)])
def test_parameter_counts(size, block_size, millions):
    with torch.device('meta'):
        model = GPT(GPTConfig(**SIZES[size], block_size=block_size))
    c = model.config
    # Written out: token and position embeddings, 12 d² per block and its two norms, the final norm.
    expected = (50304 + block_size) * c.n_embd + c.n_layer * (12 * c.n_embd ** 2 + 2 * c.n_embd) + c.n_embd
    assert gpt.num_params(model) == expected
    assert gpt.num_params(model) / 1e6 == pytest.approx(millions, abs=max(0.1, 0.002 * millions))
    if size == '125M':  # the default; with biases and its own vocabulary OpenAI's GPT-2 small
        assert c == GPTConfig()
        with torch.device('meta'):
            assert gpt.num_params(GPT(GPTConfig(vocab_size=50257, bias=True))) == 124_439_808


def test_flops_per_token_counts_the_matrix_products():
    """torch's own counter over one forward and backward (flash attention off, the causal half counted in full)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    model = tiny(n_layer=3)
    idx = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx, idx)[1].backward()
    expected = counter.get_total_flops() / idx.numel()
    assert gpt.flops_per_token(model) == expected
    model.transformer.h = torch.nn.ModuleList(list(model.transformer.h)[:1] * 3)  # one block, used three times
    assert gpt.flops_per_token(model) == expected
    model.transformer.mtp = torch.nn.Linear(8, 5)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied: as many products
    assert gpt.flops_per_token(model) == expected + 6 * 8 * 5


def test_shape_of_a_run_and_in_a_checkpoint():
    assert [gpt.padded_vocab_size(n) for n in (65, 1023, 1025, 50257, 50304)] == [65, 1023, 1088, 50304, 50304]
    settings = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True, dropout=0.1, learning_rate=1.0,
                    scale_attn_by_inverse_layer_idx=False)
    config = gpt.config_of(GPTConfig, settings, 50257)
    assert config == GPTConfig(16, 50304, 2, 2, 32, 0.1, True)
    assert tuple(gpt.model_args(config)) == gpt.NANOGPT_ARGS  # which nanoGPT reads
    config.gelu_approximate = 'tanh'
    assert GPTConfig(**gpt.model_args(config)) == config and asdict(config).keys() > gpt.model_args(config).keys()


def test_the_defaults_of_a_config_are_its_constructors():
    @dataclass
    class Config:
        width: int
        depth: int = 2
        heads: int = field(default=3, init=False)

    assert gpt.default_args(Config) == dict(depth=2)


def test_a_model_of_given_weights_has_them():
    model = tiny()
    weights = model.state_dict()
    again = gpt.with_weights(GPT, model.config, weights)
    fresh = GPT(model.config)
    assert gpt.take_weights(fresh, weights, model.config.vocab_size) == []
    for other in again, fresh:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    weights = dict(weights, **{'lm_head.weight': weights['lm_head.weight'] + 1})
    for take in (lambda: gpt.with_weights(GPT, model.config, weights),
                 lambda: gpt.take_weights(model, weights, model.config.vocab_size)):
        with pytest.raises(RuntimeError, match='wte.weight is tied to another weight here, but not in the'):
            take()
