"""Tests of positions and heads of another size, and of what loading keeps; all parameters are random."""

import math

import numpy as np
import pytest
import scipy.ndimage
import torch
import torchvision
from agreement import distance
from checkpoints import TOLERANCE, TRANSFORMERS, assert_agree, build, foreign, images, jax_arrays
from timm.layers import resample_abs_pos_embed
from torch import nn

from fastvit_triton import load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError

pytestmark = pytest.mark.fast

# Positions


def positions_after(state: dict, name: str = "vit_tiny_patch16_224", grid=(6, 6), resize: str | None = None, **options):
    """pos_embed [1, T + N, D] after loading into a model of that grid."""
    model = build(name, img_size=(8 * grid[0], 8 * grid[1]), **options)
    report = load_weights(model, state, resize=resize)
    assert f"4x4 (assumed) resized to {grid[0]}x{grid[1]}" in report.positions
    return model.pos_embed.detach()


@pytest.mark.parametrize("grid", [(6, 6), (3, 3), (5, 9)])
def test_jax_positions(grid):
    """Oracle: scipy.ndimage.zoom(order=1), which the ViT paper's code calls; the class token's row is kept."""
    arrays = jax_arrays(vit_paper=True)
    got = positions_after(arrays, grid=grid)
    table = arrays["Transformer/posembed_input/pos_embedding"][0]
    want = scipy.ndimage.zoom(table[1:].reshape(4, 4, 48), (grid[0] / 4, grid[1] / 4, 1), order=1).reshape(-1, 48)
    assert torch.equal(got[0, 0], torch.from_numpy(table[0]))
    assert distance(got[0, 1:], torch.from_numpy(want)) <= TOLERANCE


@pytest.mark.parametrize("grid", [(6, 6), (3, 3), (5, 9)])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_timm_positions(name, grid):
    """Oracle: timm's resample_abs_pos_embed, with one, two and no prefix rows."""
    state = build(name).state_dict()
    prefix = {"vit": 1, "deit": 2, "deit3": 0}[name.split("_")[0]]
    want = resample_abs_pos_embed(state["pos_embed"], list(grid), num_prefix_tokens=prefix)
    assert distance(positions_after(state, name, grid), want) <= TOLERANCE


def test_torchvision_positions():
    """Oracle: torchvision's interpolate_embeddings."""
    state = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 192, num_classes=7).state_dict()
    want = torchvision.models.vision_transformer.interpolate_embeddings(48, 8, dict(state))["encoder.pos_embedding"]
    assert distance(positions_after(state), want) <= TOLERANCE


@pytest.mark.parametrize("case", ["vit", "deit", "dinov2", "dinov2 registers", "siglip", "clip"])
@pytest.mark.parametrize("grid", [(6, 6), (5, 9)])
def test_transformers_positions(case, grid):
    """Oracle: transformers' model with interpolate_pos_encoding, called on the larger image."""
    theirs, run = foreign(case)
    name, options, *_ = TRANSFORMERS[case]
    state = theirs.state_dict()
    if "classifier.weight" in state and "dinov2" in case:
        state["classifier.weight"][:, 48:] = 0
    ours = build(name, **options, img_size=(8 * grid[0], 8 * grid[1]))
    load_weights(ours, state)
    x = images(ours)
    more = {} if "dinov2" in case else dict(interpolate_pos_encoding=True)
    with torch.no_grad():
        assert distance(ours(x), run(x, **more)) <= TOLERANCE


def test_dinov2_positions():
    """Oracle: the coordinates in facebookresearch/dinov2's code, (i + 1/2) · h / (H + 0.1) − 1/2, with Keys' bicubic
    weights (a = −0.75) in float64; with registers its code switches to antialiasing, which is timm's function.
    """

    def weights_of(new: int, old: int) -> np.ndarray:  # [new, old]
        table = np.zeros((new, old))
        for i in range(new):
            x = (i + 0.5) * old / (new + 0.1) - 0.5
            for j in range(math.floor(x) - 1, math.floor(x) + 3):
                t, a = abs(x - j), -0.75
                near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
                table[i, min(max(j, 0), old - 1)] += near if t <= 1 else far
        return table

    state = build("vit_small_patch14_dinov2").state_dict()
    pos, mask = state["pos_embed"], {"mask_token": torch.zeros(1, 48)}
    got = positions_after(state | mask, "vit_small_patch14_dinov2", (6, 9))
    grid = pos[0, 1:].double().numpy().reshape(4, 4, 48)
    want = np.einsum("ai,bj,ijd->abd", weights_of(6, 4), weights_of(9, 4), grid).reshape(1, 54, 48)
    assert torch.equal(got[:, :1], pos[:, :1])
    assert distance(got[:, 1:].double(), torch.from_numpy(want)) <= TOLERANCE

    state = build("vit_small_patch14_reg4_dinov2").state_dict()
    state["register_tokens"] = state.pop("reg_token")
    got = positions_after(state | mask, "vit_small_patch14_reg4_dinov2", (6, 9))
    assert distance(got, resample_abs_pos_embed(state["pos_embed"], [6, 9], num_prefix_tokens=0)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["bilinear", "bilinear_align_corners", "bicubic", "bicubic_align_corners"])
def test_resize_overrides_the_family(mode):
    """Oracle: F.interpolate with the arguments that the mode names."""
    state = build("vit_tiny_patch16_224").state_dict()
    grid = state["pos_embed"][:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    kind, _, corners = mode.partition("_")
    want = nn.functional.interpolate(grid, (6, 6), mode=kind, align_corners=bool(corners)).flatten(2).mT
    assert distance(positions_after(state, resize=mode)[:, 1:], want) <= TOLERANCE
    with pytest.raises(WeightsError, match="resize is 'cubic'; use one of bilinear"):
        load_weights(build("vit_tiny_patch16_224"), state, resize="cubic")


def test_our_files_store_a_grid_that_is_not_square(tmp_path):
    """Oracle: timm's resample_abs_pos_embed, given the old size; without the config, 2 · 8 patches look like 4 · 4."""
    wide = build("vit_tiny_patch16_224", img_size=(16, 64))
    save_weights(wide, tmp_path / "a.safetensors")
    model = build("vit_tiny_patch16_224", img_size=(32, 32))
    assert "2x8 resized to 4x4" in load_weights(model, tmp_path / "a.safetensors").positions
    want = resample_abs_pos_embed(wide.pos_embed.detach(), [4, 4], [2, 8], num_prefix_tokens=1)
    assert distance(model.pos_embed.detach(), want) <= TOLERANCE


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize(("old", "new"), [(False, True), (True, False)])
def test_positions_of_prefix_tokens_are_moved_exactly(old, new, registers):
    """Oracle: the first model; a token plus its position is one sum, wherever the two are stored."""
    options = dict(reg_tokens=registers, pos_embed="learned")
    first = build("vit_tiny_patch16_224", no_embed_class=old, **options)
    second = build("vit_tiny_patch16_224", no_embed_class=new, **options)
    report = load_weights(second, first.state_dict())
    assert "moved into the tokens" in report.positions
    assert_agree(first, second)


def test_positions_of_the_class_token_alone():
    """Oracle: transformers' model with registers, which have no position there and a zero position in ours."""
    theirs, run = foreign("dinov2 registers")
    state = theirs.state_dict()
    state["classifier.weight"][:, 48:] = 0
    ours = build("vit_small_patch14_reg4_dinov2", no_embed_class=False)
    assert "prefix rows 1 to 5" in load_weights(ours, state).positions
    assert_agree(ours, run)


def test_no_square_grid():
    """Oracle: for 15 patches, which form no square, an error that names the rows, the grid, and a remedy."""
    state = build("vit_tiny_patch16_224").state_dict()
    state["pos_embed"] = torch.randn(1, 16, 48)[:, :15]
    with pytest.raises(WeightsError, match=r"pos_embed has 15 rows.*4x4 patches.*img_size"):
        load_weights(build("vit_tiny_patch16_224"), state)


# Heads


@pytest.mark.parametrize("classes", [7, None])
def test_a_head_that_does_not_fit_becomes_zero(classes):
    """Oracle: zeros for other classes or a checkpoint without a head, listed in the report; the rest is loaded."""
    name = "deit_tiny_distilled_patch16_224"
    state = build(name).state_dict()
    if classes is None:
        state = {key: tensor for key, tensor in state.items() if not key.startswith("head")}
    model = build(name, num_classes=9 if classes else 7)
    report = load_weights(model, state)
    for parameter in (*model.head.parameters(), *model.head_dist.parameters()):
        assert not parameter.any()
    assert report.reinitialised == ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    assert torch.equal(model.norm.weight, state["norm.weight"])
    assert "initialised to zero, must be trained: head.weight" in str(report)
    assert ("dropped: head.weight" in str(report)) == bool(classes)


def test_a_headless_model_drops_the_head():
    """Oracle: for a model without a head, the head is listed as dropped."""
    report = load_weights(build("vit_tiny_patch16_224", num_classes=0), build("vit_tiny_patch16_224").state_dict())
    assert report.dropped == ("head.weight", "head.bias") and not report.reinitialised


# What stays


def test_dtype_device_and_requires_grad_are_kept(tmp_path):
    """Oracle: a bfloat16 model with a frozen part stays so, and its version counters (`_version`) show the change."""
    source = build("vit_tiny_patch16_224")
    save_weights(source, tmp_path / "a.safetensors")
    model = build("vit_tiny_patch16_224").bfloat16()
    model.blocks[0].requires_grad_(False)
    before = {name: (p.requires_grad, p.data_ptr(), p._version) for name, p in model.named_parameters()}
    load_weights(model, tmp_path / "a.safetensors")
    for name, p in model.named_parameters():
        assert (p.requires_grad, p.data_ptr()) == before[name][:2] and p._version > before[name][2]
        assert p.dtype == torch.bfloat16 and p.grad is None
        assert torch.equal(p, source.state_dict()[name].bfloat16())
