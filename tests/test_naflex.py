"""Tests of NaFlex batches. Oracle: an image's logits do not depend on the other images of its batch."""

import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from catalogue import redraw
from torch import nn

from fastvit_triton import create_model, load_weights
from fastvit_triton.models.config import ViTConfig
from fastvit_triton.models.naflex import NaFlexVisionTransformer
from fastvit_triton.models.transformer import VisionTransformer
from fastvit_triton.train.data.naflex import TokenBudgetBatches, fitting_grid, to_patches
from fastvit_triton.train.loop import evaluate, fit
from fastvit_triton.train.step import Step

pytestmark = pytest.mark.fast

CLOSE = torch.testing.assert_close
CONFIG = ViTConfig(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True)
SIZES = [(16, 16), (8, 24), (12, 4), (4, 4)]


def twins(**options) -> tuple[NaFlexVisionTransformer, VisionTransformer]:
    config = CONFIG.replace(**options)
    flexible, plain = NaFlexVisionTransformer(config).double(), VisionTransformer(config).double()
    plain.load_state_dict(flexible.state_dict())
    for model in (flexible, plain):
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return flexible, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_embed_class": True, "reg_tokens": 2},
        {"global_pool": "avg", "class_token": False, "pos_embed": "sincos2d", "init_values": 0.1},
        {"global_pool": "avg", "qk_norm": True, "pre_norm": True, "grad_checkpointing": True},
        {"pos_embed": "none"},
    ],
)
def test_each_image_equals_a_batch_of_its_own(options: dict):
    """Oracle: `VisionTransformer` on each image by itself in float64, logits and every gradient."""
    flexible, plain = twins(**options)
    images = [torch.randn(3, *size).double() for size in SIZES]
    patches = torch.stack([_at_own_size(image, 16) for image in images])
    logits = flexible(patches)
    expected = torch.cat([plain(image[None]) for image in images])
    CLOSE(logits, expected)
    for value in (logits, expected):
        value.square().sum().backward()
    for (name, a), b in zip(flexible.named_parameters(), plain.parameters(), strict=True):
        CLOSE(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_gap", "naflexvit_so150m2_patch16_reg1_gap"])
def test_logits_equal_timms(name: str):
    """Oracle: timm's NaFlexViT in float64, with weights read by `load_weights`, on the same padded patches."""
    sizes = dict(embed_dim=24, depth=2, num_heads=2, num_classes=5)
    ours, theirs = create_model(name, **sizes).double(), redraw(timm.create_model(name, **sizes).double())
    assert load_weights(ours, theirs.state_dict()).family == "timm NaFlexViT"
    patches = torch.stack([_at_own_size(torch.randn(3, *size).double(), 6, 16) for size in [(32, 48), (32, 32)]])
    places, valid = patches[..., :2].long(), patches[..., 0] >= 0
    inputs = dict(patches=patches[..., 2:], patch_coord=places.clamp(min=0), patch_valid=valid)
    CLOSE(ours.eval()(patches), theirs.eval()(inputs))


def _at_own_size(image: torch.Tensor, length: int, patch: int = 4) -> torch.Tensor:
    """Patches without resizing: to_patches with exactly the image's number of tokens, then padding."""
    rows = to_patches(image, image.shape[1] * image.shape[2] // patch**2, (patch, patch))
    padding = rows.new_zeros(length - rows.shape[0], rows.shape[1])
    padding[:, :2] = -1
    return torch.cat((rows, padding + 7 * (torch.arange(rows.shape[1]) > 1)))  # values in the padding must not matter


def test_unsupported_options_raise():
    """Oracle: the error sentence."""
    with pytest.raises(ValueError, match="need images of one size"):
        NaFlexVisionTransformer(CONFIG.replace(patch_drop_rate=0.5))
    with pytest.raises(ValueError, match="global_pool is 'map'"):
        NaFlexVisionTransformer(CONFIG.replace(global_pool="map"))


@pytest.mark.parametrize("tokens", [1, 7, 16, 256])
@pytest.mark.parametrize("size", [(32, 32), (100, 33), (7, 400), (4, 4)])
def test_grids_fit_and_keep_the_aspect_ratio(size: tuple[int, int], tokens: int):
    """Oracle: no more tokens than allowed; one more row and column at the same aspect ratio would exceed the limit."""
    rows, columns = fitting_grid(size, tokens, (4, 4))
    assert 1 <= rows * columns <= tokens
    if min(rows, columns) > 1:
        scale = math.sqrt(tokens / (size[0] * size[1] / 16))
        assert (rows, columns) == (int(size[0] / 4 * scale), int(size[1] / 4 * scale))


def test_patches_carry_their_coordinates():
    """Oracle: pixels whose values are their coordinates; padding has coordinate −1."""
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    rows = to_patches(torch.stack((y, x)), 6, (4, 4))
    assert rows.shape == (6, 2 + 32)
    pixels = rows[:, 2:].unflatten(1, (4, 4, 2))
    assert torch.equal(pixels[:, 0, 0], 4 * rows[:, :2])
    padded = to_patches(torch.stack((y, x)), 9, (4, 4))
    assert (padded[:, 0] >= 0).sum() == 6 and (padded[6:, :2] == -1).all()


def test_budget_and_epochs():
    """Oracle: each image exactly once per epoch, no batch above the budget, the same number of batches; `iter_from`
    continues like an uninterrupted epoch."""
    images = [torch.randn(1, 4 + 4 * (i % 5), 4 + 4 * (i % 3)) for i in range(23)]
    batches = TokenBudgetBatches(images, torch.arange(23), (4, 4), budget=24, lengths=(4, 8, 12))
    for _ in range(3):
        seen, drawn = [], list(batches)
        assert len(drawn) == len(batches)
        for patches, targets in drawn:
            assert patches.shape[0] * patches.shape[1] <= 24 and patches.shape[2] == 2 + 16
            seen += targets.tolist()
        assert sorted(seen) == list(range(23))
    state = torch.get_rng_state()
    whole = list(batches)
    torch.set_rng_state(state)
    for (a, b), (c, d) in zip(whole[2:], batches.iter_from(2), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
    with pytest.raises(ValueError, match=r"lengths is \(32,\) and budget 24"):
        TokenBudgetBatches(images, torch.arange(23), (4, 4), budget=24, lengths=(32,))


def test_training_learns_on_mixed_sizes():
    """Oracle: bright and dark images of many shapes are classified after training by the common loop."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(60) % 2
    images = [
        torch.randn(1, *torch.randint(4, 40, (2,), generator=generator).tolist(), generator=generator) + 2 * target
        for target in targets.tolist()
    ]
    config = CONFIG.replace(in_chans=1, num_classes=2, drop_path_rate=0.1)
    model = NaFlexVisionTransformer(config)
    batches = TokenBudgetBatches(images, targets, (4, 4), budget=128, lengths=(8, 16))
    test = TokenBudgetBatches(images, targets, (4, 4), budget=128, lengths=(16,), shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(grad_accum_steps=2, clip=1.0)
    *_, last = fit(model, batches, optimizer, lambda _: 3e-3, epochs=4, step=step, test=partial(evaluate, batches=test))
    assert last.test.accuracy == 1.0 and last.test.loss < F.cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
