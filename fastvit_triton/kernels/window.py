"""Self-attention in windows of a grid of tokens, on a packed q, k, v projection, with shifts, a bias and padding.

Math      The grid is padded at the bottom and right to whole windows, and rolled by −shift: [H', W']         (1)
          S = scale · Q Kᵀ + bias − 100·[m and n lie in different regions]        [N, N], N = h·w            (2)
          Regions of the rolled grid: rows below and from H' − sy on, columns below and from W' − sx on.
          Cosine attention: Q and K are divided by max(‖·‖₂, 1e-12), and scale has one value per head.       (3)
          O = softmax(S) V, rolled back and cut to [H, W]                                                     (4)
          A padded token is a row of zeros before the projection; so its q, k, v are the projection's bias. It is a key
          like any other, and has no output.
Sources   Liu et al., Swin Transformer, arXiv:2103.14030, section 3.2 and eq. 4; Liu et al., Swin Transformer V2,
          arXiv:2111.09883, eq. 2. The value −100 and the padding are those of the authors' code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention
from .argument import expect_bool, expect_floating, expect_int, expect_mixable, expect_nonempty, expect_number
from .op import expect

APART = -100.0  # added to scores between regions; not −inf, as in every published model
Sides = tuple[int, int]


def window_attention(
    qkv: Tensor,
    num_heads: int,
    window_size: Sides,
    shift_size: Sides = (0, 0),
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    pad: Tensor | None = None,
    pad_first: bool = True,
) -> Tensor:
    """Self-attention within the windows of a grid of tokens, as in Swin; reads and writes the grid in place.

    Args:
        qkv: [B, H, W, 3·heads·D], ordered as [3, heads, D]; strided views are not copied if the last axis is
            contiguous.
        num_heads: heads.
        window_size: (h, w), rows and columns of a window.
        shift_size: (sy, sx), 0 ≤ sy < h and 0 ≤ sx < w. Models use 0 along an axis with a single window.
        bias: [heads, h·w, h·w], added to the scores of every window.
        scale: softmax scale; None means D^-0.5. A tensor [heads] selects the cosine attention of equation (3).
        pad: [3·heads·D], q, k and v of padded tokens, that is the bias of the projection; None means zeros.
        pad_first: order of padding and rolling where the grid is no multiple of the window: True to pad first, as
            torchvision and transformers do, False to roll first, as timm does.

    Returns:
        [B, H, W, heads·D], heads merged.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    _check(qkv, num_heads, window_size, shift_size, bias, scale, pad, pad_first)
    return reference(qkv, num_heads, window_size, shift_size, bias, scale, pad, pad_first)


def reference(
    qkv: Tensor,
    num_heads: int,
    window_size: Sides,
    shift_size: Sides = (0, 0),
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    pad: Tensor | None = None,
    pad_first: bool = True,
) -> Tensor:
    """Equations (1) to (4): pad, roll, partition, attend, merge, roll back, cut."""
    (B, H, W, width), (h, w), (sy, sx) = qkv.shape, window_size, shift_size
    D = width // (3 * num_heads)
    x = qkv if pad_first else _roll(qkv, -sy, -sx)
    x = _padded(x, -H % h, -W % w, pad)
    x = _roll(x, -sy, -sx) if pad_first else x
    rows, columns = x.shape[1] // h, x.shape[2] // w
    q, k, v = (  # [B, windows·heads, N, D] each
        x.reshape(B, rows, h, columns, w, 3, num_heads, D)
        .permute(5, 0, 1, 3, 6, 2, 4, 7)
        .reshape(3, B, rows * columns * num_heads, h * w, D)
    )
    if isinstance(scale, Tensor):  # (3)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q, scale = q * scale.to(q.dtype).repeat(rows * columns)[:, None, None], 1.0
    mask = None if bias is None else bias.repeat(rows * columns, 1, 1)
    if sy or sx:
        apart = _apart(x, window_size, shift_size).repeat_interleave(num_heads, 0)
        mask = apart if mask is None else mask + apart
    o = attention.reference(q, k, v, None if mask is None else mask[None], scale)
    o = o.reshape(B, rows, columns, num_heads, h, w, D).permute(0, 1, 4, 2, 5, 3, 6)
    o = o.reshape(*x.shape[:3], width // 3)
    if pad_first:
        return _roll(o, sy, sx)[:, :H, :W]
    return _roll(o[:, :H, :W], sy, sx)


def _roll(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [B, H, W, C], rolled along H and W."""
    return x.roll((rows, columns), (1, 2)) if rows or columns else x


def _padded(x: Tensor, bottom: int, right: int, pad: Tensor | None) -> Tensor:
    """x [B, H, W, C] with rows below and columns to the right of it, all equal to `pad` or zero."""
    if not bottom and not right:
        return x
    larger = F.pad(x, (0, 0, 0, right, 0, bottom))
    if pad is None:
        return larger
    inside = F.pad(torch.ones(x.shape[1:3], dtype=torch.bool, device=x.device), (0, right, 0, bottom))
    return torch.where(inside[..., None], larger, pad.to(x.dtype))


def _apart(x: Tensor, window_size: Sides, shift_size: Sides) -> Tensor:
    """The last term of equation (2) for the rolled grid x [B, H', W', ...]: [windows, N, N]."""
    (_, height, width, *_), (h, w), (sy, sx) = x.shape, window_size, shift_size
    row = torch.arange(height, device=x.device) >= height - sy
    column = torch.arange(width, device=x.device) >= width - sx
    region = row[:, None].to(x.dtype) * 2 + column
    region = region.view(height // h, h, width // w, w).transpose(1, 2).reshape(-1, h * w)
    return (region[:, :, None] != region[:, None, :]).to(x.dtype) * APART


def _check(qkv, num_heads, window_size, shift_size, bias, scale, pad, pad_first):
    """Raises ValueError or TypeError unless the arguments of `window_attention` fit each other."""
    expect("qkv", qkv, B=None, H=None, W=None, **{"3·heads·D": None})
    expect_floating("qkv", qkv)
    expect_int("num_heads", num_heads, 1)
    _, H, W, width = qkv.shape
    expect_nonempty("qkv", "H", H)
    expect_nonempty("qkv", "W", W)
    if width % (3 * num_heads) or not width:
        raise ValueError(f"axis 3·heads·D of qkv must be a multiple of 3·num_heads = {3 * num_heads}, got {width}")
    for name, sides in (("window_size", window_size), ("shift_size", shift_size)):
        if not isinstance(sides, (tuple, list)) or len(sides) != 2:
            raise TypeError(f"{name} must be a tuple (rows, columns), got {sides!r}")
    for axis, side, shift in zip(("rows", "columns"), window_size, shift_size, strict=True):
        expect_int(f"window_size, {axis},", side, 1)
        expect_int(f"shift_size, {axis},", shift, 0, side - 1)
    if bias is not None:
        N = window_size[0] * window_size[1]
        expect("bias", bias, qkv, heads=num_heads, **{"h·w": N, "h·w (keys)": N})
        expect_mixable("bias", bias, qkv)
    if isinstance(scale, Tensor):
        expect("scale", scale, qkv, heads=num_heads)
        expect_mixable("scale", scale, qkv)
    elif scale is not None:
        expect_number("scale", scale)
    if pad is not None:
        expect("pad", pad, qkv, **{"3·heads·D": width})
        expect_mixable("pad", pad, qkv)
    expect_bool("pad_first", pad_first)
