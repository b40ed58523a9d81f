"""The losses against PyTorch's own, sampled labels, and their compiled graph."""

import pytest
import torch
import torch._functorch.config
from conftest import random_gpt
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F

from loss import Losses, mean_loss, sample_labels, token_loss

SECOND = 'none', 'drawn for all', 'drawn for some', 'given for some'


@pytest.fixture
def two_backwards():
    """Lets a compiled forward be differentiated twice; forgets what was compiled before."""
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False), torch.compiler.config.patch(cache_key_tag='twice'):
        yield
    torch.compiler.reset()


def tiny():
    """A model for the tokens of `batch`."""
    return random_gpt(0.1, block_size=24, vocab_size=192, n_layer=1, n_head=2, n_embd=32)


def batch():
    """Tokens and targets, (4, 24) each; some targets do not count."""
    idx, targets = torch.randint(0, 192, (2, 4, 24), generator=torch.Generator().manual_seed(2))
    targets[1, :5], targets[0, :3], targets[3] = -1, 0, -1
    return idx, targets


def second_labels(kind):
    """Arguments of `Losses` for the second loss."""
    generator = torch.Generator().manual_seed(1)
    uniforms, labels = torch.rand((4, 24), generator=generator), torch.randint(0, 192, (3, 24), generator=generator)
    labels[0, :7], labels[1, 8:11] = -1, 0  # as of an estimate from some of the positions
    return {'none': {}, 'drawn for all': dict(uniforms=uniforms), 'drawn for some': dict(uniforms=uniforms[:2]),
            'given for some': dict(labels_hat=labels)}[kind]


def plain_losses(model, idx, targets, labels_hat=None, uniforms=None):
    """The losses from the model's logits, by PyTorch's own cross-entropy; last the predictions in the second one."""
    logits = model(idx)[0].float()
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)]
    if uniforms is not None:
        labels_hat = sample_labels(logits[:len(uniforms)], uniforms)
    if labels_hat is not None:
        n = len(labels_hat)
        labels_hat = torch.where(targets[:n] >= 0, labels_hat, -1)
        losses.append(F.cross_entropy(logits[:n].flatten(0, 1), labels_hat.flatten(), ignore_index=-1, reduction='sum'))
        losses.append((labels_hat >= 0).sum())
    return losses


def gradients(model, losses):
    """Losses, and the gradients of both, as a step of Sophia-G takes them."""
    params, (mean, *hat) = list(model.parameters()), losses
    second = torch.autograd.grad(hat[0] * 0.01, params, retain_graph=True) if hat else []
    return [mean.detach(), *(h.detach() for h in hat), *second, *torch.autograd.grad(mean / 3, params)]


@pytest.mark.parametrize('kind, compile', [*((kind, False) for kind in SECOND), ('drawn for some', True)])
def test_losses_and_gradients_equal_pytorchs(two_backwards, kind, compile):
    model, (idx, targets), second = tiny(), batch(), second_labels(kind)
    expected = gradients(model, plain_losses(model, idx, targets, **second))
    forward = torch.compile(Losses(model), fullgraph=True, backend='aot_eager') if compile else Losses(model)
    found = gradients(model, forward(idx, targets, **second)[1:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_any_negative_target_does_not_count():
    model, (idx, targets) = tiny(), batch()
    targets[0, :3] = -1
    second = dict(uniforms=torch.rand(len(idx), targets.size(1)))
    expected = Losses(model)(idx, targets, **second)[1:]
    targets[targets == -1] = -100
    torch.testing.assert_close(Losses(model)(idx, targets, **second)[1:], expected, rtol=0, atol=0)

    logits, none = torch.randn(2, 3, 5), torch.full((2, 3), -1)
    assert mean_loss(logits, none) == 0
    one = none.index_fill(1, torch.tensor(2), 4)[:1]
    assert mean_loss(logits[:1], one) == token_loss(logits[:1], one)[0, 2]


def test_losses_in_sixteen_bits_are_float32():
    """The model's logits are returned where nothing is differentiated."""
    model, (idx, targets), second = tiny(), batch(), second_labels('given for some')
    with torch.no_grad():
        torch.testing.assert_close(Losses(model)(idx, targets), model(idx, targets))
    expected = plain_losses(model, idx, targets, **second)
    with torch.autocast('cpu', torch.bfloat16):
        logits, *found = Losses(model)(idx, targets, **second)
        assert logits is None and model(idx)[0].dtype == torch.bfloat16
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.int64]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_a_loss_counts_where_its_target_does(monkeypatch):
    """A term of `token_loss` that does not look at the targets must not depend on padding."""
    monkeypatch.setattr('loss.token_loss', lambda logits, targets: logits.square().sum(-1))
    logits, targets = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64)
    whole = mean_loss(logits[:1], targets[:1])
    targets[1] = -1
    torch.testing.assert_close(mean_loss(logits, targets), whole)


def test_sampled_labels_follow_the_softmax():
    """Evenly spaced uniform numbers give every label its share. Impossible ones never come."""
    torch.manual_seed(0)
    logits = torch.randn(300)
    logits[::5] = -torch.inf
    labels = sample_labels(logits.expand(20_000, -1), (torch.arange(20_000) + 0.5) / 20_000)
    shares = torch.bincount(labels, minlength=300) / 20_000
    torch.testing.assert_close(shares, logits.softmax(-1), rtol=0, atol=1.5e-4)
    assert shares[::5].sum() == 0


def test_the_ends_of_the_unit_interval_give_possible_labels():
    """And NaN some label of the vocabulary, because another one would end a GPU's process."""
    labels = sample_labels(torch.full((8, 130), torch.nan), torch.rand(8))
    assert labels.min() >= 0 and labels.max() < 130
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf])
    ends = torch.tensor([0.0, 1 - 2 ** -24])
    assert sample_labels(logits.expand(2, -1), ends).tolist() == [1, 2]
    long = torch.full((1000,), -torch.inf)
    long[300:700] = torch.randn(400, generator=torch.Generator().manual_seed(0))
    assert sample_labels(long.expand(2, -1), ends).tolist() == [300, 699]
    many = torch.randn(800, 1000, generator=torch.Generator().manual_seed(0))
    many[:, 700:] = -torch.inf
    assert sample_labels(many, ends[1].expand(800)).max() == 699  # whatever the rounding of the sums


def test_a_compiled_backward_keeps_16_bit_logits_only(two_backwards):
    """Not a float32 array of tokens × vocabulary, which would be twice as large, for either loss."""
    model, (idx, targets), kept = tiny(), batch(), set()

    def partition(graph, inputs):
        """As the default backend decides what to keep, without its C++, which takes half a minute."""
        return compile_fx(graph, inputs, inner_compile=lambda graph, inputs, **options: make_boxed_func(graph))

    def keep(tensor):
        kept.add((tensor.numel(), tensor.dtype))
        return tensor

    second = second_labels('drawn for all')
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast('cpu', torch.bfloat16):
        losses = torch.compile(Losses(model), backend=partition)(idx, targets, **second)[1:]
    found, expected = gradients(model, losses), gradients(model, plain_losses(model, idx, targets, **second))
    torch.testing.assert_close(found[:3], expected[:3], rtol=2e-2, atol=0)
    of_logits = {dtype for numel, dtype in kept if numel == idx.numel() * 192}
    assert of_logits == {torch.bfloat16}, kept
