"""Gradients of the parameters of `depthwise`, where the symbols and equations (1) to (4) are defined.

Math      dw[u, v] = Σ_ij g[i, j] ∘ x[s·i + u − P, s·j + v − P]    db = Σ_ij g[i, j]    (5)
Kernels   Each thread of a program has its own K² sums, or one row of K if K > 3. They are added at the end, those
          of all programs in a second launch: deterministic.
"""

from typing import no_type_check

import torch
from torch import Tensor

from .launch import cdiv, launch, power_of_2
from .layer_norm_backward import sum_programs
from .tile import jit, tl

PROGRAMS = 512  # maximum for one tile of channels; the same on all GPUs, so that the sums have the same bits


@jit(do_not_specialize=["B", "blocks"])
@no_type_check
def _bwd_weight_kernel(
    x_ptr, g_ptr, partial_ptr, x_strides, B, H, W, OUT_H, OUT_W, C, blocks,
    K: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: TAPS rows of the kernel, BLOCK_C channels, summed over `blocks` blocks of outputs. Equation (5).

    The blocks are those of `depthwise._conv_kernel`. Partial sums are laid out as the weight [C, K²], then the bias.
    """
    tiles, groups = tl.cdiv(C, BLOCK_C), tl.cdiv(OUT_H, ROWS)
    c = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    program, in_c = tl.program_id(0) // tiles, (c < C)[None, :]
    u = tl.program_id(1) * TAPS  # the first row of the kernel
    zeros = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    dbias, dw = zeros, ()
    for _ in tl.static_range(TAPS * K):
        dw += (zeros,)
    for block in range(program * blocks, program * blocks + blocks):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        image, group, column = m // (groups * OUT_W), m // OUT_W % groups, m % OUT_W
        top, left, in_b = group * (ROWS * STRIDE) + u - K // 2, column * STRIDE - K // 2, image < B
        b, first, j = image.to(tl.int64), group.to(tl.int64) * ROWS, column.to(tl.int64)
        i = first * STRIDE + u - K // 2
        x_at = (b * x_strides[0] + i * x_strides[1] + (j * STRIDE - K // 2) * x_strides[2])[:, None] + c[None, :]
        g_at = ((b * OUT_H + first) * OUT_W + j)[:, None] * C + c[None, :]
        g = ()
        for r in tl.static_range(ROWS):
            inside = ((group * ROWS + r < OUT_H) & in_b)[:, None] & in_c
            at = g_ptr + g_at + tl.full([], r, tl.int64) * OUT_W * C
            g += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)  # [BLOCK_M, BLOCK_C]
            dbias += g[r]
        for v in tl.static_range(K):
            in_column = (left + v >= 0) & (left + v < W) & in_b
            for p in tl.static_range((ROWS - 1) * STRIDE + TAPS):
                inside = (top + p >= 0) & (top + p < H) & in_column
                at = x_at + (tl.full([], p, tl.int64) * x_strides[1] + tl.full([], v, tl.int64) * x_strides[2])
                x = tl.load(x_ptr + at, mask=inside[:, None] & in_c, other=0.0).to(tl.float32)
                dw = _add_weight_products(dw, g, x, p, v, K, STRIDE, TAPS, ROWS)
    at = partial_ptr + program.to(tl.int64) * (K * K + HAS_BIAS) * C
    for tap in tl.static_range(TAPS * K):
        tl.store(at + c.to(tl.int64) * (K * K) + u * K + tap, tl.sum(dw[tap], 0), mask=c < C)
    if HAS_BIAS:
        if u == 0:
            tl.store(at + K * K * C + c, tl.sum(dbias, 0), mask=c < C)


@jit
@no_type_check
def _add_weight_products(
    dw, g, x, p: tl.constexpr, v: tl.constexpr,
    K: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds row p of the input, times each of the ROWS rows of g, to the weights [TAPS, K] of column v between them."""
    sums = ()
    for tap in tl.static_range(TAPS * K):
        total = dw[tap]
        if tap % K == v:
            for r in tl.static_range(ROWS):
                if p - r * STRIDE == tap // K:
                    total += g[r] * x
        sums += (total,)
    return sums


def parameter_sums(
    x: Tensor, g: Tensor, like: Tensor, K: int, stride: int, blocks: dict[str, int], count: int, tiles: int
) -> Tensor:
    """Equation (5): dw as [C, K²], then db if `like` has values for it, in one vector.

    Args:
        x: [B, H, W, C], the last axis contiguous.
        g: [B, H', W', C], contiguous.
        like: [C·K²] or [C·K² + C], for the shape and dtype of the result.
        K: side of the kernel.
        stride: 1 or 2.
        blocks: launch parameters.
        count: number of blocks of outputs.
        tiles: number of tiles of channels.
    """
    B, H, W, C = x.shape
    per_program = power_of_2(cdiv(count, PROGRAMS))
    taps = K if K <= 3 else 1
    programs = cdiv(count, per_program)
    partial = torch.empty(programs, len(like), dtype=torch.float32, device=x.device)
    launch(
        _bwd_weight_kernel, (programs * tiles, K // taps),
        x, g, partial, x.stride()[:3], B, H, W, *g.shape[1:], per_program,
        K=K, STRIDE=stride, TAPS=taps, HAS_BIAS=len(like) > C * K * K, **blocks,
    )  # fmt: skip
    return sum_programs(partial, like.dtype)
