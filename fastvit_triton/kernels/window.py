"""Self-attention in windows of a grid of tokens, on a packed q, k, v projection, with shifts, a bias and padding.

Math      The grid is padded at the bottom and right to whole windows, and rolled by −shift: [H', W']         (1)
          S = scale · Q Kᵀ + bias − 100·[m and n lie in different regions]        [N, N], N = h·w            (2)
          Regions of the rolled grid: rows below and from H' − sy on, columns below and from W' − sx on.
          Cosine attention: Q and K are divided by max(‖·‖₂, 1e-12), and scale has one value per head.       (3)
          O = softmax(S) V, rolled back and cut to [H, W]                                                     (4)
          A padded token is a row of zeros before the projection; so its q, k, v are the projection's bias. It is a key
          like any other, and has no output.
Backward  equations (5) to (10) of `window_backward`.
Kernels   They read the packed projection and write the result in place, by an index map: no pass pads, rolls or
          partitions. A window of at most 64 tokens is one tile, whose bias stays in registers for a run of windows; the
          keys of larger windows are read in blocks.
Cost      4·B·H·W·N·heads·D flops; bytes = qkv + o + 4·B·heads·H·W.
Saved     qkv, bias, scale, pad, o in storage dtype, and L = ln Σₙ exp(S) in fp32.
Limits    The kernels take heads of at most 64 channels. The bias of windows of more than 64 tokens is copied unless its
          last axis is contiguous.
Sources   Liu et al., Swin Transformer, arXiv:2103.14030, section 3.2 and eq. 4; Liu et al., Swin Transformer V2,
          arXiv:2111.09883, eq. 2. The value −100 and the padding are those of the authors' code.
"""

from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention, choose
from .argument import expect_bool, expect_floating, expect_int, expect_mixable, expect_nonempty, expect_number
from .attention_launch import prepare, prepared, start
from .backend import kernels_available
from .launch import cdiv
from .op import Op, cast, expect, make_randn, once_differentiable, register
from .tile import jit, tl
from .window_backward import ARGUMENTS, bwd_op
from .window_inner import (
    WIDEST,
    arguments_of,
    blocks_of,
    exp_minus,
    load_bias,
    load_tokens,
    lse_place,
    next_plane,
    places,
    readable,
    runs_of,
    scores,
    store_tokens,
    unit,
)

MAX_SIDE = 1024  # of a window, to which grids are padded
APART = -100.0  # added to scores between regions; not −inf, as in every published model
WINDOWS = 4  # most windows of a program
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
        window_size: (h, w), rows and columns of a window, at most 1024 each.
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
    D = _check(qkv, num_heads, window_size, shift_size, bias, scale, pad, pad_first)
    if D <= WIDEST and kernels_available(qkv, D) and _kernel_is_chosen(qkv, window_size, shift_size):
        scales, scale = (scale, 1.0) if isinstance(scale, Tensor) else (None, D**-0.5 if scale is None else scale)
        padded = qkv.shape[1] % window_size[0] or qkv.shape[2] % window_size[1]
        settings = num_heads, tuple(window_size), tuple(shift_size), scale, pad_first
        return _Fn.apply(cast(qkv)[0], bias, scales, pad if padded else None, *settings)
    return reference(qkv, num_heads, window_size, shift_size, bias, scale, pad, pad_first)


def _kernel_is_chosen(qkv, window_size, shift_size):
    """True if the plan selects our kernels, not the reference; constant while tracing."""
    (B, H, W, width), (h, w) = qkv.shape, window_size
    padded = not torch.compiler.is_compiling() and bool(H % h or W % w)
    sizes = choose.rows_of(B * H * W), width // 3, index(h * w), any(map(index, shift_size)), padded
    return choose.prefers_kernel(qkv, "window_attention", *sizes)


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
    rows = x.shape[1] // h
    columns = x.shape[2] // w
    q, k, v = (  # [B, windows·heads, N, D] each
        x.reshape(B, rows, h, columns, w, 3, num_heads, D)
        .permute(5, 0, 1, 3, 6, 2, 4, 7)
        .reshape(3, B, rows * columns * num_heads, h * w, D)
    )
    if isinstance(scale, Tensor):  # (3)
        wide = torch.promote_types(q.dtype, torch.float32)  # 1e-12 is 0 in float16, and padded keys may be 0
        q, k = (F.normalize(t.to(wide), dim=-1).to(t.dtype) for t in (q, k))
        q = q * scale.to(q.dtype).repeat(rows * columns)[:, None, None]
        scale = 1.0
    mask = None if bias is None else bias.repeat(rows * columns, 1, 1)
    if sy or sx:
        apart = _apart(x, window_size, shift_size).repeat_interleave(num_heads, 0)
        mask = apart if mask is None else mask + apart
    o = attention.reference(q, k, v, None if mask is None else mask[None], scale)
    if not B and mask is not None:
        o = o + mask.sum()  # PyTorch's attention of no images does not record the mask, whose gradient is 0
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
    """Returns D; raises ValueError or TypeError unless the arguments of `window_attention` fit each other."""
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
        expect_int(f"window_size, {axis},", side, 1, MAX_SIDE)
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
    return width // (3 * num_heads)


@jit(do_not_specialize=["windows", "runs", "tiles"])
def _fwd_kernel(
    qkv_ptr, bias_ptr, scales_ptr, pad_ptr, o_ptr, l_ptr, qkv_strides, bias_strides,
    layout, windows, runs, tiles, heads, scale,
    h: tl.constexpr, w: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, PAD_FIRST: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, in every n-th window, for n runs. Loops over keys."""
    head, tile, run = tl.program_id(0) % heads, tl.program_id(0) // heads % tiles, tl.program_id(0) // heads // tiles
    ONE: tl.constexpr = N <= BLOCK_N  # one block of keys, whose bias stays in registers
    C, H, W, d = heads * D, layout[0], layout[1], tl.arange(0, WIDTH)[None, :]
    m = tl.arange(0, BLOCK_M)
    if N > BLOCK_M:
        m += tile * BLOCK_M
    k_pad, v_pad = pad_ptr, pad_ptr
    if pad_ptr is not None:
        k_pad, v_pad = pad_ptr + C + head * D, pad_ptr + 2 * C + head * D
    if COSINE:
        scale = tl.load(scales_ptr + head).to(tl.float32)
    if ONE:
        bias = load_bias(bias_ptr, bias_strides, head, m[:, None], tl.arange(0, BLOCK_N)[None, :], N)
    for window in tl.range(run, windows, runs, disable_licm=True):  # hoisted addresses would spill registers
        b, y, x, real = places(m, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
        q_ptr = qkv_ptr + b * qkv_strides[0] * UNIT + head * D
        at = (y * qkv_strides[1] + x * qkv_strides[2]) * UNIT
        q = load_tokens(q_ptr, None, at[:, None], real[:, None], None, d, D, WIDTH)  # [BLOCK_M, WIDTH]
        if COSINE:
            q, _q_norm = unit(q, 1)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        for first in tl.range(0, N, BLOCK_N, disable_licm=True):
            n = first + tl.arange(0, BLOCK_N)
            _, n_y, n_x, n_real = places(n, window, layout, h, w, SHIFTED, PADDED, PAD_FIRST)
            n_at = ((n_y * qkv_strides[1] + n_x * qkv_strides[2]) * UNIT)[:, None]
            padded = ((n < N) & ~n_real)[:, None]
            k = load_tokens(q_ptr + C, k_pad, n_at, n_real[:, None], padded, d, D, WIDTH)
            v = load_tokens(q_ptr + 2 * C, v_pad, n_at, n_real[:, None], padded, d, D, WIDTH)
            if COSINE:
                k, _k_norm = unit(k, 1)
            if not ONE:
                bias = load_bias(bias_ptr, bias_strides, head, m[:, None], n[None, :], N)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            s = scores(s, scale, bias, m[:, None], n[None, :], window, layout, h, w, SHIFTED)
            new_max = tl.maximum(row_max, tl.max(s, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no unmasked key yet
            p = exp_minus(s, shift[:, None])
            if ONE:
                row_sum = tl.sum(p, 1)
                o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            else:
                decay = exp_minus(row_max, shift)
                row_sum = row_sum * decay + tl.sum(p, 1)
                o = tl.dot(p.to(v.dtype), v, o * decay[:, None], input_precision=PRECISION)
            row_max = new_max
        nonzero_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row without keys; its o is 0
        l_at = lse_place(b, head, y, x, heads, H, W, bias_ptr)
        store_tokens(o_ptr + head * D, o / nonzero_sum[:, None], ((b * H + y) * W + x) * C, real, D, WIDTH)
        row_max = tl.where(row_sum == 0, float("-inf"), row_max)
        if bias_ptr is None:
            tl.store(l_ptr + l_at, row_max + tl.log(nonzero_sum), mask=real)
        else:  # apart, because a sum of a maximum of -1e9 and a logarithm is that maximum
            tl.store(l_ptr + l_at, row_max, mask=real)
            tl.store(l_ptr + next_plane(l_at, H, W), tl.log(nonzero_sum), mask=real)


def _fwd(qkv, bias, scales, pad, heads, window_size, shift_size, scale, pad_first):
    """(o [B, H, W, heads·D], L [B, heads, 1, H, W], natural log); see `window_inner.lse_place`."""
    o, lse = _fwd_fake(qkv, bias, scales, pad, heads, window_size, shift_size, scale, pad_first)
    qkv, bias = readable(qkv, bias, window_size)
    if o.numel():
        tensors = dict(qkv=qkv, bias=bias, scales=scales, pad=pad, o=o, l=lse)
        settings = int(heads), tuple(window_size), tuple(shift_size), scale, pad_first
        for prepared_launch in prepared(_prepare, tensors, *settings):
            start(prepared_launch, tensors)
    return o, lse


def _prepare(tensors, *settings):
    """The launch of the forward pass."""
    arguments = arguments_of(tensors, *settings)
    windows = arguments["windows"]
    heads = arguments["heads"]
    N = arguments["N"]
    blocks = blocks_of("fwd", tensors["qkv"], arguments)
    tiles = cdiv(N, blocks["BLOCK_M"])
    runs = runs_of(windows, heads * tiles, WINDOWS if N <= blocks["BLOCK_N"] else 1)
    return [prepare(_fwd_kernel, heads * tiles * runs, blocks, **arguments, tiles=tiles, runs=runs)]


def _fwd_fake(qkv, bias, scales, pad, heads, window_size, shift_size, scale, pad_first):
    B, H, W, width = qkv.shape
    lse = qkv.new_empty(B, heads, 1 if bias is None else 2, H, W, dtype=torch.float32)
    return qkv.new_empty(B, H, W, width // 3), lse


_fwd_op = register("window_attention_fwd", f"({ARGUMENTS}) -> (Tensor, Tensor)", _fwd, _fwd_fake)


class _Fn(torch.autograd.Function):
    """Autograd of window_attention_fwd by window_attention_bwd; saves the tensors listed in the header."""

    @staticmethod
    def forward(ctx, qkv, bias, scales, pad, *settings):
        o, lse = _fwd_op(qkv, bias, scales, pad, *settings)
        ctx.settings = settings
        ctx.save_for_backward(qkv, bias, scales, pad, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        *inputs, o, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        grads = bwd_op(do, *inputs, *ctx.settings, o, lse, needs[1], needs[3])
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 5


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, H, W, heads, D, h, w) = (
        make_randn(device, dtype),
        (case[a] for a in ("B", "H", "W", "heads", "D", "h", "w")),
    )
    arguments = {"qkv": randn(B, H, W, 3 * heads * D), "num_heads": heads, "window_size": (h, w)}
    arguments |= {"shift_size": (case.get("sy", 0), case.get("sx", 0)), "pad_first": bool(case.get("pad_first", 1))}
    if "bias" in case:
        arguments["bias"] = randn(heads, h * w, h * w)
    if "cosine" in case:
        arguments["scale"] = randn(heads, scale=0.3, shift=10.0)
    if "pad" in case:
        arguments["pad"] = randn(3 * heads * D)
    return arguments


OP = Op(
    name="window_attention",
    run=window_attention,
    reference=reference,
    cases={
        "plain": dict(B=1, H=2, W=6, heads=1, D=3, h=2, w=3),
        "moved": dict(B=2, H=5, W=4, heads=2, D=3, h=2, w=3, sy=1, bias=1, pad=1, pad_first=1),
        "cosine": dict(B=1, H=3, W=5, heads=2, D=4, h=2, w=2, sy=1, sx=1, bias=1, cosine=1, pad=1, pad_first=0),
        "large": dict(B=1, H=5, W=14, heads=2, D=3, h=5, w=13, sx=4, bias=1, pad=1, cosine=1),
    },
    inputs=_inputs,
    ragged={
        "swin": dict(B=2, H=14, W=14, heads=3, D=32, h=7, w=7, sy=3, sx=3, bias=1),
        "padded": dict(B=2, H=9, W=16, heads=2, D=32, h=7, w=7, sy=3, sx=3, bias=1, pad=1),
        "padded_last": dict(B=1, H=9, W=16, heads=2, D=16, h=7, w=7, sy=3, sx=3, bias=1, pad=1, pad_first=0),
        "swinv2": dict(B=1, H=10, W=16, heads=3, D=32, h=8, w=8, sy=4, sx=4, bias=1, cosine=1, pad=1),
        "twins": dict(B=1, H=8, W=7, heads=2, D=30, h=7, w=7),
        "swin384": dict(B=1, H=12, W=24, heads=2, D=32, h=12, w=12, sx=6, bias=1),
        "swinv2_256": dict(B=1, H=20, W=16, heads=1, D=32, h=16, w=16, sy=8, bias=1, cosine=1, pad=1),
        "narrow": dict(B=3, H=3, W=4, heads=5, D=6, h=1, w=3, sx=2, bias=1, cosine=1, pad=1, pad_first=0),
        "no_images": dict(B=0, H=7, W=8, heads=2, D=8, h=4, w=4, sy=2, sx=2, bias=1, pad=1, cosine=1),
    },
)
