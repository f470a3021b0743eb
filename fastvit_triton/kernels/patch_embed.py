"""Image to tokens: patch projection, positions and prefix tokens.

Math      x_p[n] = flatten(patch n)                              [N, C·P²]       (1)
          t = x_p Eᵀ + b                                         [N, D]          (2)
          tokens = [prefix; t] + pos  or  [prefix; t + pos]      [T + N, D]      (3)
          uint8 images enter as (image / 255 − mean) / std                       (4)
Cost      2·B·N·C·P²·D flops; bytes = image + E + tokens.
Sources   Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 1.
Differs   The patch is flattened in (channel, row, column) order, as a convolution's weight is; (row, column, channel)
          of the paper is the same map with E's columns permuted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .op import Op, expect, make


def patch_embed(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pos: Tensor | None = None,
    prefix: Tensor | None = None,
    *,
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Tensor:
    """Projects non-overlapping patches to tokens and adds positions and prefix tokens.

    Args:
        image: [B, C, H, W], any memory format; uint8 needs `mean` and `std`.
        weight: [D, C, P, P'], the convolution's weight.
        bias: [D], or None.
        pos: [1, N, D] added to the patch tokens, or [1, T + N, D] added to prefix tokens too.
        prefix: [1, T, D], class and register tokens, in order.
        mean: [C], in units of 1 for white.
        std: [C], likewise.

    Returns:
        [B, T + N, D], patches in row-major order.

    Raises:
        ValueError: a size does not fit, or a uint8 image comes without mean and std.
    """
    D, C, *patch = weight.shape
    expect("image", image, B=None, C=C, H=None, W=None)
    for axis, size, side in zip(("H", "W"), image.shape[2:], patch, strict=True):
        if size % side:
            raise ValueError(f"axis {axis} of image must be a multiple of the patch side {side}, got {size}")
    if bias is not None:
        expect("bias", bias, D=D)
    if prefix is not None:
        expect("prefix", prefix, **{"1": 1}, T=None, D=D)
    if pos is not None:
        patches = image.shape[2] // patch[0] * (image.shape[3] // patch[1])
        tokens = patches + (0 if prefix is None else prefix.shape[1])
        expect("pos", pos, **{"1": 1}, N=None, D=D)
        if pos.shape[1] != patches and pos.shape[1] != tokens:
            raise ValueError(f"axis N of pos must be {patches} (patches) or {tokens} (with prefix), got {pos.shape[1]}")
    if not image.is_floating_point() and (mean is None or std is None):
        raise ValueError(f"image is {image.dtype} and needs mean and std; give both, or a floating-point image")
    return reference(image, weight, bias, pos, prefix, mean=mean, std=std)


def reference(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pos: Tensor | None = None,
    prefix: Tensor | None = None,
    *,
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Tensor:
    """Equations (1) to (4); a convolution whose stride is its size is the projection of (2)."""
    if not image.is_floating_point():
        mean, std = (t.to(image.device, weight.dtype)[:, None, None] for t in (mean, std))
        image = (image.to(weight.dtype) / 255 - mean) / std  # (4)
    tokens = F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)  # (2) [B, N, D]
    return assemble(tokens, pos, prefix)


def assemble(tokens: Tensor, pos: Tensor | None, prefix: Tensor | None) -> Tensor:
    """Equation (3) on patch tokens [B, N, D]."""
    over_patches = pos is not None and pos.shape[1] == tokens.shape[1]
    if over_patches:
        tokens = tokens + pos
    if prefix is not None:
        tokens = torch.cat((prefix.to(tokens.dtype).expand(len(tokens), -1, -1), tokens), 1)
    return tokens if pos is None or over_patches else tokens + pos  # (3)


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, C, H, W, P, D, T) = make(device, dtype), (case[a] for a in ("B", "C", "H", "W", "P", "D", "T"))
    N = H // P * (W // P)
    return {
        "image": randn(B, C, H, W),
        "weight": randn(D, C, P, P, scale=(C * P * P) ** -0.5),
        "bias": randn(D),
        "pos": randn(1, N + case["pos_prefix"], D),
        "prefix": randn(1, T, D),
    }


OP = Op(
    name="patch_embed",
    run=patch_embed,
    reference=reference,
    cases={
        "after": dict(B=2, C=1, H=4, W=6, P=2, D=5, T=1, pos_prefix=1),
        "before": dict(B=1, C=3, H=4, W=4, P=2, D=3, T=2, pos_prefix=0),
    },
    inputs=_inputs,
)
