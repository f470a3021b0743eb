"""Tests of mixing images and tokens. Oracle: labels equal the fractions of the mixed images."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target, rand_bbox

from fastvit_triton.models import create_model
from fastvit_triton.train.augment import mix

pytestmark = pytest.mark.fast

CLOSE = torch.testing.assert_close


def flags(count: int = 6, side: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [B, B, side, side] where channel b is 1 in image b, so its mean over pixels is that image's fraction."""
    targets = torch.arange(count)
    return F.one_hot(targets).float()[:, :, None, None].expand(-1, -1, side, side), targets


def test_cutmix_labels_equal_the_pasted_area():
    """Oracle: the mean of each channel, the fraction of each source image; the input is not modified."""
    images, targets = flags()
    for _ in range(20):
        pasted, soft = mix.cutmix(images, targets, 6, alpha=1.0)
        CLOSE(pasted.mean((2, 3)), soft)
        assert set(pasted.unique().tolist()) <= {0.0, 1.0}
    CLOSE(images, flags()[0])
    same, hard = mix.cutmix(images, targets, 6, alpha=0)
    assert same is images and torch.equal(hard.argmax(1), targets)


def test_mixtoken_on_pixels_equals_mixtoken_on_tokens():
    """Oracle: `mix_tokens` on the patch embeddings of the unmixed images, with the same box."""
    stem = create_model("vit_digits_patch2_8").patch_embed
    images, targets = torch.randn(6, 1, 8, 8), torch.arange(6)
    for seed in range(10):
        torch.manual_seed(seed)
        mixed, soft = mix.mixtoken(images, targets, 10, 1.0, (2, 2))
        torch.manual_seed(seed)
        box = mix.cut_box((4, 4), torch.distributions.Beta(1.0, 1.0).sample().item())
        CLOSE(stem(mixed), mix.mix_tokens(stem(images), box, (4, 4)))
        CLOSE(soft, mix.mix_by_area(F.one_hot(targets, 10).float(), box, (4, 4)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_boxes_equal_timms(share: float, monkeypatch: pytest.MonkeyPatch):
    """Oracle: timm's rand_bbox, given the same centre, for every centre of an odd and an even side."""
    for y in range(7):
        for x in range(10):
            ours, theirs = iter((y, x)), iter((y, x))
            monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(next(ours)))  # noqa: B023
            monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(theirs))  # noqa: B023
            assert mix.cut_box((7, 10), share) == tuple(int(edge) for edge in rand_bbox((7, 10), share))


@pytest.mark.parametrize(("mixup_alpha", "cutmix_alpha"), [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_mixup_and_cutmix_are_chosen_at_random(mixup_alpha: float, cutmix_alpha: float):
    """Oracle: the pixels show which of the two was applied; labels are timm's smoothing of the fractions."""
    images, targets = flags()
    pasted = 0
    for _ in range(40):
        blend, soft = mix.mixup_or_cutmix(images, targets, 6, mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha)
        shares = blend.mean((2, 3))
        CLOSE(soft, 0.9 * shares + 0.1 / 6)
        pasted += bool((blend.amax((2, 3)) - blend.amin((2, 3)) > 0.5).any())  # a box has an edge
    CLOSE(mix.smooth_labels(targets, 6, 0.1), mixup_target(targets, 6, smoothing=0.1))
    if mixup_alpha and cutmix_alpha:
        assert 0 < pasted < 40
    else:
        assert (pasted > 20) == (cutmix_alpha > 0) and (pasted == 0) == (cutmix_alpha == 0)


def test_mixed_tokens_are_restored():
    """Oracle: pasting is its own inverse; each token's share of the class target is its share of the grid."""
    grid, classes = (4, 5), torch.arange(3)
    tokens = F.one_hot(classes, 3).float()[:, None].expand(-1, 20, -1)
    numbered = tokens + torch.arange(20)[:, None]
    for _ in range(20):
        box = mix.cut_box(grid, torch.rand(()).item())
        mixed = mix.mix_tokens(tokens, box, grid)
        CLOSE(mixed.mean(1), mix.mix_by_area(tokens[:, 0], box, grid))
        assert torch.equal(mix.mix_tokens(mix.mix_tokens(numbered, box, grid), box, grid), numbered)
        assert mix.area(box) == sum(not torch.equal(a, b) for a, b in zip(mixed[0], tokens[0], strict=True))
    assert math.prod(grid) == mixed.shape[1]
