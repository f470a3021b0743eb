"""Tests of window attention's PyTorch path. Oracles: torchvision's functions and timm's blocks, in float64."""

import pytest
import torch
from agreement import close64
from timm.models import swin_transformer, swin_transformer_v2
from torchvision.models.swin_transformer import shifted_window_attention

from fastvit_triton import window_attention
from fastvit_triton.kernels.window import reference

GRIDS = [(8, 8), (7, 5), (5, 9), (14, 14)]
WINDOWS = [(4, 4), (7, 7), (4, 7), (2, 5)]
HEADS, D = 2, 3


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def shift_of(grid, window, wanted):
    """The shift of every model: 0 along an axis with a single window."""
    return tuple(0 if w >= g else min(wanted, w - 1) for g, w in zip(grid, window, strict=True))


@pytest.mark.parametrize("cosine", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("wanted", [0, 2, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_padding_first_equals_torchvision(grid, window, wanted, cosine):
    """Oracle: torchvision's function with an identity as output projection. It zeroes the keys' bias in Swin V2."""
    C, N = HEADS * D, window[0] * window[1]
    x, weight, qkv_bias, bias = randn(2, *grid, C), randn(3 * C, C), randn(3 * C), randn(HEADS, N, N)
    logits = randn(HEADS, 1, 1) + 1 if cosine else None
    if cosine:
        qkv_bias[C : 2 * C] = 0
    shift = shift_of(grid, window, wanted)
    sizes = list(window), HEADS, list(shift)
    want = shifted_window_attention(
        x, weight, torch.eye(C).double(), bias[None], *sizes, qkv_bias=qkv_bias, logit_scale=logits, training=False
    )
    scale = logits.exp().flatten() if cosine else None
    got = window_attention(x @ weight.T + qkv_bias, HEADS, window, shift, bias, scale, qkv_bias)
    assert close64(got, want)


@pytest.mark.parametrize("cosine", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("wanted", [0, 2, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rolling_first_equals_timm(grid, window, wanted, cosine):
    """Oracle: timm's block with an identity as output projection."""
    C = HEADS * D
    shift = shift_of(grid, window, wanted)
    module = swin_transformer_v2.SwinTransformerV2Block if cosine else swin_transformer.SwinTransformerBlock
    block = module(C, grid, HEADS, window_size=window, shift_size=shift, always_partition=True).double().eval()
    if block.shift_size != shift:
        block.shift_size = shift  # timm takes 0 for "half a window" where a shift may be given
    a, x = block.attn, randn(2, *grid, C)
    with torch.no_grad():
        for p in a.parameters():
            torch.nn.init.normal_(p)
        a.proj.weight.copy_(torch.eye(C))
        a.proj.bias.zero_()
        if cosine:
            table = a.cpb_mlp(a.relative_coords_table).view(-1, HEADS)
            bias = 16 * torch.sigmoid(table[a.relative_position_index]).permute(2, 0, 1)
            pad, scale = torch.cat((a.q_bias, a.k_bias, a.v_bias)), a.logit_scale.exp().flatten()
        else:
            bias, pad, scale = a._get_rel_pos_bias()[0], a.qkv.bias, None
        want = block._attn(x)
        got = window_attention(x @ a.qkv.weight.T + pad, HEADS, window, shift, bias, scale, pad, pad_first=False)
    assert close64(got, want)


def test_the_order_of_padding_and_rolling_matters():
    """Oracle: the two packages, which agree where the window divides the grid and differ elsewhere."""
    qkv = randn(1, 5, 7, 3 * HEADS * D)
    both = [reference(qkv, HEADS, (4, 4), (2, 2), pad_first=first) for first in (True, False)]
    assert (both[0] - both[1]).abs().max() > 0.1
    qkv = randn(1, 8, 12, 3 * HEADS * D)
    both = [reference(qkv, HEADS, (4, 4), (2, 2), pad_first=first) for first in (True, False)]
    assert torch.equal(*both)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(qkv=randn(1, 4, 4, 10)), "axis 3·heads·D of qkv must be a multiple of 3·num_heads = 6, got 10"),
        (dict(qkv=randn(1, 0, 4, 12)), "axis H of qkv must be at least 1, got 0"),
        (dict(window_size=4), "window_size must be a tuple"),
        (dict(window_size=(4, 0)), "window_size, columns, must be between 1 and 1024, got 0"),
        (dict(shift_size=(0, 2)), "shift_size, columns, must be between 0 and 1, got 2"),
        (dict(bias=randn(2, 3, 4)), "axis h·w of bias must be 4, got 3"),
        (dict(scale=randn(3)), "axis heads of scale must be 2, got 3"),
        (dict(pad=randn(6)), "axis 3·heads·D of pad must be 12, got 6"),
        (dict(pad_first=1), "pad_first must be True or False, got int"),
    ],
)
def test_invalid_arguments_are_rejected(changes, words):
    """Oracle: the sentence that names the argument."""
    arguments = dict(qkv=randn(1, 4, 4, 12), num_heads=2, window_size=(2, 2)) | changes
    with pytest.raises((TypeError, ValueError), match=words):
        window_attention(**arguments)
