"""The model: parameter counts, FLOPs, loss, attention scaling, label sampling."""

import math

import pytest
import torch
from torch.nn import functional as F

from loss import sample_categorical
from model import GPT, SIZES, GPTConfig, padded_vocab_size
from optimizers import parameter_groups


def tiny(**kwargs):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{'block_size': 16, 'vocab_size': 64, 'n_layer': 2, 'n_head': 2, 'n_embd': 32, **kwargs}))


@pytest.mark.parametrize('size, millions', [('30M', 30.3), ('125M', 124.4), ('355M', 354.5), ('540M', 537.0),
                                            ('770M', 773.6)])
def test_parameter_counts(size, millions):
    with torch.device('meta'):
        model = GPT(GPTConfig(**SIZES[size]))
    c = model.config
    # Written out: token and position embeddings, 12 d² per block and its two norms, the final norm.
    expected = (50304 + 1024) * c.n_embd + c.n_layer * (12 * c.n_embd ** 2 + 2 * c.n_embd) + c.n_embd
    assert model.num_params() == expected
    assert model.num_params() / 1e6 == pytest.approx(millions, abs=0.1)


def test_gpt2_small_has_gpt2s_parameters():
    """OpenAI's GPT-2 small, with biases and its own vocabulary, has 124,439,808."""
    with torch.device('meta'):
        assert GPT(GPTConfig(**SIZES['125M'], vocab_size=50257, bias=True)).num_params() == 124_439_808


def test_initial_loss_is_that_of_the_uniform_distribution():
    model = tiny()
    idx = torch.randint(64, (4, 17))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 16, 64)
    assert loss.item() == pytest.approx(math.log(64), abs=0.1)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten()).item(), abs=1e-6)


def test_initialisation_is_scaled_with_depth():
    model = tiny(n_layer=8, n_embd=128)
    assert model.transformer.h[3].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.transformer.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_no_token_sees_the_future():
    model = tiny()
    idx = torch.randint(64, (1, 16))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 64
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_attention_scaling_by_layer_index():
    """Layer i with the scaling equals layer i without it and queries divided by i + 1."""
    scaled, plain = tiny(scale_attn_by_inverse_layer_idx=True), tiny()
    idx = torch.randint(64, (2, 16))
    assert not torch.allclose(scaled(idx)[0], plain(idx)[0])
    with torch.no_grad():
        for i, block in enumerate(plain.transformer.h):
            block.attn.c_attn.weight[:32] /= i + 1
    torch.testing.assert_close(scaled(idx)[0], plain(idx)[0])


def test_targets_of_minus_one_do_not_count():
    model = tiny()
    idx, targets = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
    targets[1] = -1
    torch.testing.assert_close(model(idx, targets)[1], model(idx[:1], targets[:1])[1])


def test_second_loss_takes_labels_or_uniforms():
    model = tiny()
    idx, targets = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
    logits = model(idx)[0]
    _, loss, loss_hat = model(idx, targets, targets)
    torch.testing.assert_close(loss_hat, loss * targets.numel())
    uniforms = torch.rand(1, 16)
    y_hat = sample_categorical(logits[:1].softmax(-1), uniforms)
    expected = F.cross_entropy(logits[0], y_hat[0], reduction='sum')
    torch.testing.assert_close(model(idx, targets, uniforms=uniforms)[2], expected)


@pytest.mark.parametrize('classes', [3, 128, 300])
def test_sampled_labels_invert_the_distribution(classes):
    """Against a plain float64 inversion, and in frequency; impossible classes never come."""
    torch.manual_seed(1)
    logits = 2 * torch.randn(classes)
    logits[::5] = -torch.inf
    uniforms = torch.rand(20_000)
    labels = sample_categorical(logits.softmax(-1).expand(20_000, -1), uniforms)
    p = logits.double().softmax(-1)
    cumulative = p.cumsum(-1)
    slack = 1e-6
    assert (cumulative[labels] >= uniforms - slack).all()
    assert (cumulative[labels] - p[labels] <= uniforms + slack).all()
    assert (p[labels] > 0).all()
    frequency = torch.bincount(labels, minlength=classes) / 20_000
    assert (frequency - p).abs().max() < 5 * (0.25 / 20_000) ** 0.5


def test_rounding_at_the_edge_of_a_block_selects_no_impossible_class():
    """The first classes of the second block are impossible; uniforms around the block's lower end."""
    p = torch.full((1, 256), 0.1)
    p[0, 128:160] = 0
    edge = (p[0, :128].sum() / p.sum()).item()
    uniforms = torch.linspace(edge - 1e-6, edge + 1e-6, 20_001)
    labels = sample_categorical(p.expand(len(uniforms), -1), uniforms)
    assert (p[0, labels] > 0).all() and labels.min() < 128 <= labels.max()


def test_extreme_uniforms_give_possible_labels():
    logits = torch.full((2, 200), -torch.inf)
    logits[:, 7], logits[:, 130] = 0.0, -3.0
    labels = sample_categorical(logits.softmax(-1), torch.tensor([0.0, 1 - 2 ** -24]))
    assert labels.tolist() == [7, 130]


def test_flops_per_token_counts_the_matrix_products():
    """torch's own counter over one forward and backward (flash attention off, the causal half counted in full)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    model = tiny(n_layer=3)
    idx = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == model.flops_per_token() * idx.numel()


def test_flops_per_token_counts_what_is_added_outside_of_the_blocks():
    model, wider = tiny(), tiny()
    wider.transformer.mtp = torch.nn.Linear(8, 5)
    assert wider.flops_per_token() == model.flops_per_token() + 6 * 8 * 5
    wider.lm_head.weight = torch.nn.Parameter(wider.lm_head.weight.detach().clone())  # untied: as many products
    assert wider.flops_per_token() == model.flops_per_token() + 6 * 8 * 5


def test_weight_decay_on_matrices_only():
    model = tiny(bias=True)
    decayed, rest = parameter_groups(model, 0.1)
    assert decayed['weight_decay'] == 0.1 and rest['weight_decay'] == 0.0
    assert all(p.dim() >= 2 for p in decayed['params']) and all(p.dim() < 2 for p in rest['params'])
    assert len(decayed['params']) + len(rest['params']) == len(list(model.parameters()))


def test_large_vocabularies_are_padded():
    sizes = (65, 257, 50257, 50277, 50304)
    assert [padded_vocab_size(n) for n in sizes] == [65, 257, 50304, 50304, 50304]


def test_too_long_a_sequence_is_rejected():
    with pytest.raises(ValueError, match='longer than block_size = 16'):
        tiny()(torch.zeros(1, 17, dtype=torch.long))
