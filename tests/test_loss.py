"""Tests of losses. Oracles: timm, PyTorch, and sums written out in float64."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F

from fastvit_triton.train import loss
from fastvit_triton.train.augment.mix import mix_tokens

pytestmark = pytest.mark.fast

CLOSE = torch.testing.assert_close


def soft(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64).softmax(-1)


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_label_smoothing_equals_pytorchs():
    """Oracle: PyTorch's cross-entropy with label_smoothing; by hand for four classes."""
    z, y = logits(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    CLOSE(
        loss.soft_cross_entropy(z, loss.smooth_labels(y, 4, 0.1).double()), F.cross_entropy(z, y, label_smoothing=0.1)
    )
    assert loss.smooth_labels(torch.tensor([1]), 4, 0.2).tolist() == [pytest.approx([0.05, 0.85, 0.05, 0.05])]
    blend = soft(3, 4)
    CLOSE(loss.smooth_labels(blend, 4, 0.2), 0.8 * blend + 0.05)
    with pytest.raises(ValueError, match=r"smoothing is 1.0; use a number in \[0, 1\)"):
        loss.smooth_labels(y, 4, 1.0)


def test_soft_cross_entropy():
    """Oracle: timm's SoftTargetCrossEntropy; over tokens, PyTorch's with the classes on axis 1."""
    z, y = logits(6, 5), soft(6, 5)
    CLOSE(loss.soft_cross_entropy(z, y), timm.loss.SoftTargetCrossEntropy()(z, y))
    tokens, answers = logits(2, 3, 5), soft(2, 3, 5)
    CLOSE(loss.soft_cross_entropy(tokens, answers), F.cross_entropy(tokens.mT, answers.mT))


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
def test_binary_cross_entropy(threshold: float | None):
    """Oracle: timm's BinaryCrossEntropy, averaged and summed over classes."""
    z, y = logits(6, 5), F.one_hot(torch.arange(6) % 5, 5).double() * 0.7 + F.one_hot(torch.arange(6) % 3, 5) * 0.3
    for reduction, total in (("mean", False), ("sum", True)):
        timms = timm.loss.BinaryCrossEntropy(smoothing=0.0, target_threshold=threshold, sum_classes=total)
        CLOSE(loss.binary_cross_entropy(z, y, threshold, reduction), timms(z, y))
    with pytest.raises(ValueError, match="reduction is 'none'; use 'mean'"):
        loss.binary_cross_entropy(z, y, reduction="none")


def test_blended_classes_become_full_binary_targets():
    """Oracle: by hand; at logit 0 every term is log 2, and at threshold 0 the gradient is σ(z) − 1 for each class."""
    z = torch.zeros(1, 3, requires_grad=True)
    value = loss.binary_cross_entropy(z, torch.tensor([[0.9, 0.1, 0.0]]), 0.0)
    value.backward()
    assert math.isclose(value.item(), math.log(2), rel_tol=1e-6)
    CLOSE(z.grad, torch.tensor([[-0.5, -0.5, 0.5]]) / 3)


def test_token_labels():
    """Oracle: both cross-entropies by PyTorch, weighted by hand."""
    z, tokens, y, answers = logits(2, 5), logits(2, 3, 5), soft(2, 5), soft(2, 3, 5)
    expected = 2 * F.cross_entropy(z, y) + 0.5 * F.cross_entropy(tokens.flatten(0, 1), answers.flatten(0, 1))
    CLOSE(loss.token_label_loss(z, tokens, y, answers, 2, 0.5), expected)


@pytest.mark.parametrize("absolute", [True, False])
def test_similarity(absolute: bool):
    """Oracle: the double sum, pair by pair; 1 for equal tokens, 0 for orthogonal ones."""
    h = logits(2, 5, 7)
    pairs = [F.cosine_similarity(h[:, i], h[:, j], -1) for i in range(5) for j in range(5) if i != j]
    expected = torch.stack([pair.abs() if absolute else pair for pair in pairs]).mean()
    CLOSE(loss.similarity_loss(h, absolute), expected)
    CLOSE(loss.similarity_loss(torch.ones(1, 4, 3).double(), absolute), torch.tensor(1.0).double())
    assert loss.similarity_loss(torch.eye(4)[None], absolute) == 0
    with pytest.raises(ValueError, match="tokens has 1 patches"):
        loss.similarity_loss(h[:, :1], absolute)


@pytest.mark.parametrize("others", [True, False])
def test_patch_contrast(others: bool):
    """Oracle: the formula with exponentials, patch by patch; no gradient reaches the first layer."""
    e, h = logits(2, 4, 3), logits(2, 4, 3)
    terms = []
    for b in range(2):
        for i in range(4):
            rest = [h[b, j] for j in range(4) if j != i or not others]
            own, average = (e[b, i] @ h[b, i]).exp(), (e[b, i] @ torch.stack(rest).mean(0)).exp()
            terms.append(-(own / (own + average)).log())
    value = loss.patch_contrastive_loss(e, h, others)
    CLOSE(value, torch.stack(terms).mean())
    value.backward()
    assert e.grad is None and h.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="last has 1 patches"):
        loss.patch_contrastive_loss(e[:, :1], h[:, :1], True)


def test_patch_mixing():
    """Oracle: tokens whose logits are their image's class are classified correctly wherever they were pasted."""
    y = torch.tensor([0, 1, 2])
    tokens = 50.0 * F.one_hot(y, 3)[:, None].expand(-1, 6, -1).float()
    box, grid = (0, 1, 1, 3), (2, 3)
    mixed, sources = mix_tokens(tokens, box, grid), mix_tokens(y[:, None].expand(-1, 6), box, grid)
    assert sources[0].tolist() == [0, 2, 2, 0, 0, 0]
    assert loss.patch_mixing_loss(mixed, sources) < 1e-6 < loss.patch_mixing_loss(tokens, sources)
