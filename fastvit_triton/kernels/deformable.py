"""Multi-scale deformable sampling: each query reads a few points of several maps, interpolated, and adds them up.

Math      Level l is a map V_l of h × w cells, with cell centres at (j + ½) / w and (i + ½) / h.
          Without reference: p = locations, a = weights.                                                     (1)
          With reference [.., 2]: p = reference + locations / (w, h); with [.., 4], (centre, size) of boxes:
          p = centre + locations / P · size / 2. In both, a = softmax of the weights of all L·P points.       (2)
          (x, y) = p ∘ (w, h) − ½,  (x₀, y₀) = ⌊(x, y)⌋,  f = x − x₀,  g = y − y₀                             (3)
          s = Σ over the corners (y₀, x₀), (y₀, x₀ + 1), (y₀ + 1, x₀), (y₀ + 1, x₀ + 1) of
              (1 − g)(1 − f), (1 − g) f, g (1 − f), g f, times V_l there, which is 0 outside the map          (4)
          y = Σ over the L·P points of a · s                                                                  (5)
Backward  For a corner c of (4), V_l there is v_c, and u_c = dy · v_c                                         (6)
          da = Σ_c (its weight in (4)) · u_c;    with (2) the gradient of a logit is a · (da − Σ a · da)       (7)
          dx = a · Σ_g [(u_right − u_left) weighted by 1 − g, g],  dy likewise;  dp = (dx, dy) ∘ (w, h)       (8)
          and from dp by (2) those of locations and reference.
          dV_l[i, j] = Σ a · (weight of the corner in (4)) · dy over the points with a corner at (i, j)        (9)
Kernels   A program has several queries of one head and all their points: locations, weights and the softmax stay in
          registers, and no map, grid or sample is written. The backward pass writes the key of the cell (y₀, x₀) of
          each point, with f, g and a; sorted by key, the points of a cell are adjacent. A program of (9) then has one
          cell of one head: it adds the points of the cells (i, j − 1), (i, j), (i − 1, j − 1), (i − 1, j), in this
          order, so that sums have the same bits in each run.
Cost      10·M·L·P·H·D flops for M queries; bytes = value + locations + weights + y.
Saved     value, locations, weights and reference.
Limits    The kernels take heads of at most 256 channels, 8 levels and 64 points of a query. There are no second
          derivatives and no forward mode, as of `grid_sample`.
Sources   Zhu et al., Deformable DETR, arXiv:2010.04159, eq. 2 and 3, appendix A.3. The order of maps and points is that
          of the authors' operator and of transformers' `MultiScaleDeformableAttention`.
"""

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choose
from .argument import expect_floating, expect_int, expect_mixable, expect_nonempty
from .backend import kernels_available
from .launch import cdiv, config, launch, power_of_2
from .op import Op, expect, make_randn, once_differentiable, register
from .tile import jit, tl

# Default launch parameters, which fit every architecture; rows of tuned/ override them.
SPACE = {
    "fwd": dict(BLOCK_Q=32, num_warps=4, num_stages=1),
    "bwd": dict(BLOCK_Q=32, num_warps=4, num_stages=1),
    "bwd.reference": dict(BLOCK_Q=32, num_warps=4, num_stages=1),
    "bwd_value": dict(BLOCK=8, num_warps=1, num_stages=1),
}
VALUES = 1024  # of a tile, at most; larger ones spill
LEVELS = 8  # the kernels are unrolled over the levels
POINTS = 64  # of a query, whose weights are one tile
Maps = tuple[tuple[int, int], ...]


def deformable_attention(
    value: Tensor, shapes: Maps, locations: Tensor, weights: Tensor, reference: Tensor | None = None
) -> Tensor:
    """Weighted sum of points sampled bilinearly from several maps, as in Deformable DETR.

    Locations, weights and reference may have another dtype than value. They are used as float32 and are not cast to
    the dtype of autocast: half a cell of a map of 136 columns is lost in bfloat16.

    Args:
        value: [B, N, H, D], the cells of all maps, row by row, one map after the other; strided views are not copied if
            the last axis is contiguous.
        shapes: (rows, columns) of each of the L maps, N cells in all.
        locations: [B, Nq, H, L, P, 2], (x, y) of each point: in [0, 1] on the map, else outside, where values are 0.
            With a reference, offsets from it.
        weights: [B, Nq, H, L, P]; with a reference, logits of a softmax over all L·P points.
        reference: [B, Nq, L, 2], points in [0, 1], to which offsets in cells are added; or [B, Nq, L, 4], boxes
            (centre, size) with offsets in 1 / (2·P) of the size. None if locations and weights are final.

    Returns:
        [B, Nq, H·D] in the dtype of value, heads merged.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    _check(value, shapes, locations, weights, reference)
    L, P = locations.shape[3:5]
    fits = L <= LEVELS and L * P <= POINTS
    if fits and kernels_available(value, value.shape[3]) and _kernel_is_chosen(value, locations):
        return _Fn.apply(value, [side for shape in shapes for side in shape], locations, weights, reference)
    return _reference(value, shapes, locations, weights, reference)


def _kernel_is_chosen(value, locations):
    """True if the plan selects our kernels, not the reference."""
    (B, N, H, D), (_, Nq, _, L, P, _) = value.shape, locations.shape
    return choose.prefers_kernel(
        value, "deformable_attention", choose.rows_of(B * Nq), H * D, H, int(L), int(P), choose.rows_of(B * N)
    )


def reference(
    value: Tensor, shapes: Maps, locations: Tensor, weights: Tensor, reference: Tensor | None = None
) -> Tensor:
    """Equations (1) to (5), a map at a time, in float32 at least."""
    B, _, H, D = value.shape
    Nq, P = locations.shape[1], locations.shape[4]
    dtype = torch.promote_types(value.dtype, torch.float32)
    locations = locations.to(dtype)
    weights = weights.to(dtype)
    if reference is not None:
        locations, weights = sampling_points(shapes, locations, weights, reference.to(dtype))
    if not value.numel() or not locations.numel():  # grid_sample refuses empty maps
        return _nothing(value, locations, weights)
    y = value.new_zeros((), dtype=dtype)
    maps = value.to(dtype).split([h * w for h, w in shapes], 1)
    for (h, w), cells, points, weight in zip(shapes, maps, locations.unbind(3), weights.unbind(3), strict=True):
        image = cells.permute(0, 2, 3, 1).reshape(B * H, D, h, w)
        sides = sides_of(((h, w),), points)[0]
        points = points.clamp(-1.5 / sides, 1 + 1.5 / sides)  # where all is 0, so that distant points do not overflow
        grid = (2 * points - 1).transpose(1, 2).reshape(B * H, Nq, P, 2)
        found = F.grid_sample(image, grid, padding_mode="zeros", align_corners=False)  # (3), (4): [B·H, D, Nq, P]
        y = y + (found * weight.transpose(1, 2).reshape(B * H, 1, Nq, P)).sum(-1)  # (5)
    return y.view(B, H * D, Nq).transpose(1, 2).to(value.dtype).contiguous()


def sampling_points(shapes: Maps, offsets: Tensor, logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (2): locations [B, Nq, H, L, P, 2] in fractions of the maps, and weights [B, Nq, H, L, P].

    The arguments are those of `deformable_attention` with a reference, in float32 or float64.
    """
    L, P = logits.shape[3:5]
    place = reference[:, :, None, :, None]
    sides = sides_of(shapes, offsets)[:, None]
    locations = place[..., :2] + (offsets / sides if place.shape[-1] == 2 else offsets / P * place[..., 2:] / 2)
    return locations, logits.flatten(3).softmax(-1).unflatten(3, (L, P))


def sides_of(shapes: Maps, like: Tensor) -> Tensor:
    """(w, h) of each map, [L, 2], of the dtype and device of a tensor; filled there, as a copy would end a capture."""
    return torch.stack([torch.stack((like.new_full((), w), like.new_full((), h))) for h, w in shapes])


_reference = reference  # also where an argument has this name


def _nothing(value, locations, weights):
    """The result if there is nothing to compute, as a function of all arguments, whose gradients are 0."""
    y = value.new_zeros(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])
    return y + (value.sum() + locations.sum() + weights.sum()) * 0


def _check(value, shapes, locations, weights, reference):
    """Raises ValueError or TypeError unless the arguments of `deformable_attention` fit each other."""
    expect("value", value, B=None, N=None, H=None, D=None)
    expect_floating("value", value)
    B, N, H, D = value.shape
    expect_nonempty("value", "H", H)
    expect_nonempty("value", "D", D)
    if not isinstance(shapes, (tuple, list)) or not shapes:
        raise TypeError(f"shapes must be a tuple of (rows, columns), one of each map, got {shapes!r}")
    for shape in shapes:
        if not isinstance(shape, (tuple, list)) or len(shape) != 2:
            raise TypeError(f"shapes must be a tuple of (rows, columns), one of each map, got {shape!r} in it")
        for side in shape:
            expect_int("a side in shapes", side, 1, 2**24)  # float32 has all places of a cell in these
    cells = sum(h * w for h, w in shapes)
    if cells != N:
        raise ValueError(f"shapes have {cells} cells, and axis N of value is {N}; give the shape of each map")
    expect("locations", locations, value, B=B, Nq=None, H=H, L=len(shapes), P=None, **{"2": 2})
    expect_mixable("locations", locations, value)
    Nq, P = locations.shape[1], locations.shape[4]
    expect_nonempty("locations", "P", P)
    expect("weights", weights, value, B=B, Nq=Nq, H=H, L=len(shapes), P=P)
    expect_mixable("weights", weights, value)
    if reference is not None:
        expect("reference", reference, value, B=B, Nq=Nq, L=len(shapes), **{"2 or 4": None})
        expect_mixable("reference", reference, value)
        if reference.shape[3] not in (2, 4):
            raise ValueError(f"axis 2 or 4 of reference must be 2 or 4, got {reference.shape[3]}")


@jit
@no_type_check
def _load_point(location_ptr, reference_ptr, i, r, inside, h, w, P: tl.constexpr, SIDES: tl.constexpr):
    """Equations (1) to (3) for points i, and row r of the reference.

    Returns:
        x0 and y0 as integers, f, g, then ∂x / ∂locations and ∂y / ∂locations.
    """
    x = tl.load(location_ptr + 2 * i, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(location_ptr + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
    x_slope, y_slope = w + tl.zeros_like(x), h + tl.zeros_like(y)
    if SIDES > 0:
        at = reference_ptr + r * SIDES
        if SIDES == 2:
            x_slope, y_slope = tl.full(x.shape, 1.0, tl.float32), tl.full(x.shape, 1.0, tl.float32)
        else:
            x_slope *= tl.load(at + 2, mask=inside, other=0.0).to(tl.float32) * (0.5 / P)
            y_slope *= tl.load(at + 3, mask=inside, other=0.0).to(tl.float32) * (0.5 / P)
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * w + x * x_slope
        y = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32) * h + y * y_slope
    else:
        x *= w
        y *= h
    # distant points become integers; all is 0 there
    x = tl.clamp(x - 0.5, -2.0, w.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    y = tl.clamp(y - 0.5, -2.0, h.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    left, above = tl.floor(x), tl.floor(y)
    return left.to(tl.int32), above.to(tl.int32), x - left, y - above, x_slope, y_slope


@jit
@no_type_check
def _load_corners(map_ptr, step, x0, y0, h, w, inside, D: tl.constexpr, WIDTH: tl.constexpr):
    """The four corners of (4), in its order: [len(x0), WIDTH] fp32 each; map_ptr [1, WIDTH] is the first cell."""
    in_d = (tl.arange(0, WIDTH) < D)[None, :]
    at = map_ptr + ((y0 * w + x0).to(tl.int64) * step)[:, None]
    below = at + w.to(tl.int64) * step
    left, right = inside & (x0 >= 0) & (x0 < w), inside & (x0 >= -1) & (x0 < w - 1)
    up, down = (y0 >= 0) & (y0 < h), (y0 >= -1) & (y0 < h - 1)
    v00 = tl.load(at, mask=(left & up)[:, None] & in_d, other=0.0).to(tl.float32)
    v01 = tl.load(at + step, mask=(right & up)[:, None] & in_d, other=0.0).to(tl.float32)
    v10 = tl.load(below, mask=(left & down)[:, None] & in_d, other=0.0).to(tl.float32)
    v11 = tl.load(below + step, mask=(right & down)[:, None] & in_d, other=0.0).to(tl.float32)
    return v00, v01, v10, v11


@jit
@no_type_check
def _softmax(weight_ptr, row, inside, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """(largest logit, sum of exp(logit − largest)) of the COUNT points of each query; BLOCK ≥ COUNT, a power of 2."""
    k = tl.arange(0, BLOCK)
    at = weight_ptr + (row * COUNT)[:, None] + k[None, :]
    logits = tl.load(at, mask=inside[:, None] & (k < COUNT)[None, :], other=float("-inf")).to(tl.float32)
    logits = tl.where(inside[:, None], logits, 0.0)
    top = tl.max(logits, 1)
    return top, tl.sum(tl.exp(logits - top[:, None]), 1)


@jit(do_not_specialize=["shapes", "Nq", "tiles"])
@no_type_check
def _fwd_kernel(
    value_ptr, location_ptr, weight_ptr, reference_ptr, y_ptr, value_strides, shapes, Nq, tiles, H,
    D: tl.constexpr, L: tl.constexpr, P: tl.constexpr, SIDES: tl.constexpr,
    BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one head. Equations (1) to (5)."""
    q, d = tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH)
    head, b = tl.program_id(0) // tiles % H, (tl.program_id(0) // tiles // H).to(tl.int64)
    first_q = tl.program_id(0) % tiles * BLOCK_Q
    in_q, first, row = first_q + q < Nq, (b * Nq + first_q) * H + head, q * H  # rows of the program are close: 32 bits
    location_ptr += first * (2 * L * P)
    weight_ptr += first * (L * P)
    if SIDES > 0:
        reference_ptr += (b * Nq + first_q) * (L * SIDES)
    map_ptr = value_ptr + b * value_strides[0] + head.to(tl.int64) * value_strides[2] + d[None, :]
    if SIDES > 0:
        top, total = _softmax(weight_ptr, row, in_q, L * P, BLOCK_P)
    acc = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for level in tl.static_range(L):
        h, w = shapes[2 * level], shapes[2 * level + 1]
        for p in range(P):
            i = row * (L * P) + level * P + p
            x0, y0, f, g, _, _ = _load_point(location_ptr, reference_ptr, i, q * L + level, in_q, h, w, P, SIDES)
            a = tl.load(weight_ptr + i, mask=in_q, other=0.0).to(tl.float32)
            if SIDES > 0:
                a = tl.exp(a - top) / total
            v00, v01, v10, v11 = _load_corners(map_ptr, value_strides[1], x0, y0, h, w, in_q, D, WIDTH)
            acc += (a * (1 - g) * (1 - f))[:, None] * v00
            acc += (a * (1 - g) * f)[:, None] * v01
            acc += (a * g * (1 - f))[:, None] * v10
            acc += (a * g * f)[:, None] * v11
        map_ptr += (h * w).to(tl.int64) * value_strides[1]
    y_at = y_ptr + first * D + (row * D)[:, None] + d[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=in_q[:, None] & (d < D)[None, :])


@jit(do_not_specialize=["shapes", "Nq", "tiles", "cells"])
@no_type_check
def _bwd_points_kernel(
    dy_ptr, value_ptr, location_ptr, weight_ptr, reference_ptr,
    dlocation_ptr, dweight_ptr, dreference_ptr, key_ptr, place_ptr,
    value_strides, shapes, Nq, tiles, H, cells,
    D: tl.constexpr, L: tl.constexpr, P: tl.constexpr, SIDES: tl.constexpr,
    BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one head. Equations (6) to (8), and what `_bwd_value_kernel` reads.

    dlocation_ptr: None if only the latter is wanted. dreference_ptr: sums over the points of one head, [B, Nq, H, L,
    SIDES]. key_ptr: keys of the points' cells, or None; an image's head has `cells` of them, and points outside the
    map have the key after all. place_ptr: f, g and a of each point, or None.
    """
    q, d, k = tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH), tl.arange(0, BLOCK_P)
    head, b = tl.program_id(0) // tiles % H, (tl.program_id(0) // tiles // H).to(tl.int64)
    first_q = tl.program_id(0) % tiles * BLOCK_Q
    in_q, first, row = first_q + q < Nq, (b * Nq + first_q) * H + head, q * H
    location_ptr += first * (2 * L * P)
    weight_ptr += first * (L * P)
    if SIDES > 0:
        reference_ptr += (b * Nq + first_q) * (L * SIDES)
    map_ptr = value_ptr + b * value_strides[0] + head.to(tl.int64) * value_strides[2] + d[None, :]
    if SIDES > 0:
        top, total = _softmax(weight_ptr, row, in_q, L * P, BLOCK_P)
    if dlocation_ptr is not None:
        dy = tl.load(
            dy_ptr + first * D + (row * D)[:, None] + d[None, :], mask=in_q[:, None] & (d < D)[None, :], other=0.0
        )
        dy = dy.to(tl.float32)
        dlocation_ptr += first * (2 * L * P)
        dweight_ptr += first * (L * P)
        weights, dweights = tl.zeros([BLOCK_Q, BLOCK_P], tl.float32), tl.zeros([BLOCK_Q, BLOCK_P], tl.float32)
    first_key = (b * H + head) * cells
    if key_ptr is not None:
        key_ptr += first * (L * P)
        place_ptr += first * (3 * L * P)
        last_key = tl.num_programs(0).to(tl.int64) // tiles * cells
    for level in tl.static_range(L):
        h, w = shapes[2 * level], shapes[2 * level + 1]
        if dreference_ptr is not None:
            x_sum, y_sum = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
            w_sum, h_sum = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
        for p in range(P):
            i, r = row * (L * P) + level * P + p, q * L + level
            x0, y0, f, g, x_slope, y_slope = _load_point(location_ptr, reference_ptr, i, r, in_q, h, w, P, SIDES)
            near = (x0 >= -1) & (x0 < w) & (y0 >= -1) & (y0 < h)
            a = tl.load(weight_ptr + i, mask=in_q, other=0.0).to(tl.float32)
            if SIDES > 0:
                a = tl.exp(a - top) / total
            if key_ptr is not None:
                key = first_key + ((y0 + 1) * (w + 1) + x0 + 1)
                key = tl.where(near, key, last_key)
                tl.store(key_ptr + i, key.to(key_ptr.dtype.element_ty), mask=in_q)
                tl.store(place_ptr + 3 * i, f, mask=in_q)
                tl.store(place_ptr + 3 * i + 1, g, mask=in_q)
                tl.store(place_ptr + 3 * i + 2, a, mask=in_q)
            if dlocation_ptr is not None:
                v00, v01, v10, v11 = _load_corners(map_ptr, value_strides[1], x0, y0, h, w, in_q, D, WIDTH)
                u00, u01 = tl.sum(dy * v00, 1), tl.sum(dy * v01, 1)  # (6)
                u10, u11 = tl.sum(dy * v10, 1), tl.sum(dy * v11, 1)
                da = (1 - g) * ((1 - f) * u00 + f * u01) + g * ((1 - f) * u10 + f * u11)
                if SIDES > 0:
                    here = (k == level * P + p)[None, :]
                    dweights = tl.where(here, da[:, None], dweights)
                    weights = tl.where(here, a[:, None], weights)
                else:
                    tl.store(dweight_ptr + i, da.to(dweight_ptr.dtype.element_ty), mask=in_q)
                dx = a * ((1 - g) * (u01 - u00) + g * (u11 - u10))  # (8)
                dh = a * ((1 - f) * (u10 - u00) + f * (u11 - u01))
                tl.store(dlocation_ptr + 2 * i, (dx * x_slope).to(dlocation_ptr.dtype.element_ty), mask=in_q)
                tl.store(dlocation_ptr + 2 * i + 1, (dh * y_slope).to(dlocation_ptr.dtype.element_ty), mask=in_q)
                if dreference_ptr is not None:
                    x_sum += dx * w
                    y_sum += dh * h
                    if SIDES == 4:
                        x = tl.load(location_ptr + 2 * i, mask=in_q, other=0.0).to(tl.float32)
                        y = tl.load(location_ptr + 2 * i + 1, mask=in_q, other=0.0).to(tl.float32)
                        w_sum += dx * w * x * (0.5 / P)
                        h_sum += dh * h * y * (0.5 / P)
        map_ptr += (h * w).to(tl.int64) * value_strides[1]
        first_key += (h + 1) * (w + 1)
        if dreference_ptr is not None:
            at = dreference_ptr + first * (L * SIDES) + (row * L + level) * SIDES
            tl.store(at, x_sum, mask=in_q)
            tl.store(at + 1, y_sum, mask=in_q)
            if SIDES == 4:
                tl.store(at + 2, w_sum, mask=in_q)
                tl.store(at + 3, h_sum, mask=in_q)
    if dlocation_ptr is not None and SIDES > 0:  # (7)
        dweights = weights * (dweights - tl.sum(weights * dweights, 1)[:, None])
        at = dweight_ptr + (row * (L * P))[:, None] + k[None, :]
        tl.store(at, dweights.to(dweight_ptr.dtype.element_ty), mask=in_q[:, None] & (k < L * P)[None, :])


@jit(do_not_specialize=["shapes", "N", "cells"])
@no_type_check
def _bwd_value_kernel(
    dy_ptr, order_ptr, end_ptr, place_ptr, dvalue_ptr, shapes, N, H, cells,
    D: tl.constexpr, L: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: one cell of one head. Equation (9); POINTS = L·P.

    order_ptr: the points, sorted by key. end_ptr: the number of points before each key.
    """
    head, n, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    cell, width, key = n, n * 0, n * 0  # the place in the map, and the first key of the map
    start, first_key = n * 0, n * 0
    for level in tl.static_range(L):
        h, w = shapes[2 * level], shapes[2 * level + 1]
        here = n >= start
        cell, width, key = tl.where(here, n - start, cell), tl.where(here, w, width), tl.where(here, first_key, key)
        start += h * w
        first_key += (h + 1) * (w + 1)
    own = (b * H + head) * cells + key + (cell // width + 1) * (width + 1) + cell % width + 1
    k, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    dvalue = tl.zeros([BLOCK, WIDTH], tl.float32)
    for above in tl.static_range(2):  # the points of a cell and of that to its left are adjacent
        at = end_ptr + own - above * (width + 1)
        first, middle, last = tl.load(at - 1), tl.load(at), tl.load(at + 1)
        for block in range(first, last, BLOCK):
            j = block + k
            i = tl.load(order_ptr + j, mask=j < last, other=0)
            f = tl.load(place_ptr + 3 * i, mask=j < last, other=0.0)
            g = tl.load(place_ptr + 3 * i + 1, mask=j < last, other=0.0)
            a = tl.load(place_ptr + 3 * i + 2, mask=j < last, other=0.0)
            a *= tl.where(j < middle, f, 1 - f) * (g if above else 1 - g)
            dy_at = dy_ptr + (i // POINTS * D)[:, None] + d[None, :]
            dy = tl.load(dy_at, mask=(j < last)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            dvalue += a[:, None] * dy
    at = dvalue_ptr + ((b * N + n) * H + head) * D + d
    tl.store(at, tl.sum(dvalue, 0).to(dvalue_ptr.dtype.element_ty), mask=d < D)


def _blocks(row: str, value: Tensor, queries: int, points: int) -> dict[str, int]:
    """Launch parameters of a kernel, a name in SPACE."""
    D = value.shape[3]
    blocks = config(f"deformable.{row}", SPACE[row], value.device, queries, D, points)
    return blocks | dict(WIDTH=power_of_2(max(D, 16)))


def _per_query(row: str, value: Tensor, locations: Tensor, reference: Tensor | None) -> tuple[dict, int]:
    """(compile-time arguments of a kernel over queries, with parameters of that row; tiles of queries)."""
    _, Nq, _, L, P, _ = locations.shape
    fixed = _blocks(row, value, Nq, L * P)
    block_p = power_of_2(L * P)
    most = VALUES // max(fixed["WIDTH"], block_p)  # of registers
    fixed["BLOCK_Q"] = max(min(fixed["BLOCK_Q"], most), 1)
    sides = 0 if reference is None else reference.shape[3]
    fixed |= dict(D=value.shape[3], L=L, P=P, SIDES=sides, BLOCK_P=block_p)
    return fixed, cdiv(Nq, fixed["BLOCK_Q"])


def _readable(value, locations, weights, reference):
    """The tensors as kernels read them: value with a contiguous last axis, the others contiguous."""
    value = value if value.stride(3) == 1 or value.shape[3] == 1 else value.contiguous()
    reference = None if reference is None else reference.contiguous()
    return value, locations.contiguous(), weights.contiguous(), reference


def _fwd(value, shapes, locations, weights, reference):
    """y [B, Nq, H·D]."""
    y = _fwd_fake(value, shapes, locations, weights, reference)
    value, locations, weights, reference = _readable(value, locations, weights, reference)
    if y.numel():
        fixed, tiles = _per_query("fwd", value, locations, reference)
        B, _, H, _ = value.shape
        launch(
            _fwd_kernel, (B * H * tiles,),
            value, locations, weights, reference, y, value.stride()[:3], tuple(shapes), locations.shape[1], tiles, H,
            **fixed,
        )  # fmt: skip
    return y


def _fwd_fake(value, shapes, locations, weights, reference):
    B, _, H, D = value.shape
    return value.new_empty(B, locations.shape[1], H * D)


def _bwd(dy, value, shapes, locations, weights, reference, needs):
    """(dvalue, dlocations, dweights, dreference); `needs`: value, locations or weights or reference, reference."""
    outputs = _bwd_fake(dy, value, shapes, locations, weights, reference, needs)
    dvalue, dlocations, dweights, dreference = outputs
    (B, N, H, D), (_, Nq, _, L, P, _), shapes = value.shape, locations.shape, tuple(shapes)
    if not dy.numel():
        return tuple(t.zero_() for t in outputs)
    dy = dy.contiguous()
    value, locations, weights, reference = _readable(value, locations, weights, reference)
    cells = sum((h + 1) * (w + 1) for h, w in zip(shapes[::2], shapes[1::2], strict=True))
    keys = places = partial = None
    if needs[0]:
        keys = torch.empty(weights.numel(), dtype=_index(B * H * cells), device=value.device)
        places = torch.empty(weights.numel(), 3, dtype=torch.float32, device=value.device)
    if needs[2]:
        partial = torch.empty(B, Nq, H, L, reference.shape[3], dtype=torch.float32, device=value.device)
    row = "bwd" if reference is None else "bwd.reference"
    fixed, tiles = _per_query(row, value, locations, reference)
    launch(
        _bwd_points_kernel, (B * H * tiles,),
        dy, value, locations, weights, reference, dlocations if needs[1] else None, dweights if needs[1] else None,
        partial, keys, places, value.stride()[:3], shapes, Nq, tiles, H, cells, **fixed,
    )  # fmt: skip
    if needs[2]:
        dreference.copy_(partial.sum(2))
    if needs[0]:
        keys, order = keys.sort(stable=True)
        ends = torch.searchsorted(keys, torch.arange(B * H * cells + 1, dtype=keys.dtype, device=keys.device))
        launch(
            _bwd_value_kernel, (N * H, B),
            dy, order, ends, places, dvalue, shapes, N, H, cells,
            D=D, L=L, POINTS=L * P, **_blocks("bwd_value", value, Nq, L * P),
        )  # fmt: skip
    return outputs


def _bwd_fake(dy, value, shapes, locations, weights, reference, needs):
    given = value, locations, weights, weights if reference is None else reference
    needed = needs[0], needs[1], needs[1], needs[2]
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(given, needed, strict=True))


def _index(largest: int) -> torch.dtype:
    """Dtype of keys up to `largest`."""
    return torch.int32 if largest < 2**31 else torch.int64


ARGUMENTS = "Tensor value, SymInt[] shapes, Tensor locations, Tensor weights, Tensor? reference"
_fwd_op = register("deformable_attention_fwd", f"({ARGUMENTS}) -> Tensor", _fwd, _fwd_fake)
_bwd_op = register(
    "deformable_attention_bwd",
    f"(Tensor dy, {ARGUMENTS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Autograd of deformable_attention_fwd by deformable_attention_bwd; saves the tensors listed in the header."""

    @staticmethod
    def forward(ctx, value, shapes, locations, weights, reference):
        ctx.save_for_backward(value, locations, weights, reference)
        ctx.shapes = shapes
        return _fwd_op(value, shapes, locations, weights, reference)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        value, *points = ctx.saved_tensors
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]
        found = _bwd_op(dy, value, ctx.shapes, *points, [needs[0], any(needs[1:]), needs[3]])
        dvalue, *dpoints = (grad if need else None for grad, need in zip(found, needs, strict=True))
        return dvalue, None, *dpoints


def _inputs(case: dict, dtype: torch.dtype, device: torch.device | str) -> dict:
    wide, (B, Nq, H, D, P) = make_randn("cpu", torch.float64), (case[a] for a in ("B", "Nq", "H", "D", "P"))
    shapes = tuple((case[f"h{i}"], case[f"w{i}"]) for i in range(3) if f"h{i}" in case)
    L = len(shapes)
    sides = torch.tensor([[w, h] for h, w in shapes], dtype=torch.float64)[:, None]
    place = wide(B, Nq, H, L, P, 2, scale=0.4, shift=0.5).detach() * sides - 0.5
    # gradients of locations jump where x or y is an integer: in 16 bits points stay away from that
    locations = (place.floor() + 0.1 + 0.8 * (place - place.floor()) + 0.5) / sides
    found = {"value": wide(B, sum(h * w for h, w in shapes), H, D), "shapes": shapes}
    found |= {"locations": locations, "weights": wide(B, Nq, H, L, P)}
    if "sides" in case:
        near = wide(B, Nq, L, case["sides"], scale=0.1, shift=0.5).detach()
        offsets = locations - near[:, :, None, :, None, :2]
        offsets = offsets * sides if case["sides"] == 2 else offsets / near[:, :, None, :, None, 2:] * 2 * P
        found |= {"locations": offsets, "reference": near}
    return {n: t.detach().to(device, dtype).requires_grad_() if isinstance(t, Tensor) else t for n, t in found.items()}


OP = Op(
    name="deformable_attention",
    run=deformable_attention,
    reference=reference,
    cases={
        "locations": dict(B=2, Nq=3, H=2, D=3, P=2, h0=3, w0=4, h1=2, w1=1),
        "offsets": dict(B=1, Nq=4, H=1, D=5, P=3, h0=2, w0=5, h1=3, w1=3, sides=2),
        "boxes": dict(B=1, Nq=2, H=2, D=4, P=2, h0=4, w0=3, h1=1, w1=2, sides=4),
        "one_cell": dict(B=2, Nq=2, H=1, D=2, P=1, h0=1, w0=1),
    },
    inputs=_inputs,
    ragged={
        "encoder": dict(B=1, Nq=37, H=2, D=32, P=4, h0=5, w0=4, h1=3, w1=2, h2=1, w2=1),
        "offsets": dict(B=1, Nq=19, H=3, D=24, P=3, h0=4, w0=7, h1=2, w1=3, sides=2),
        "boxes": dict(B=2, Nq=9, H=1, D=40, P=4, h0=3, w0=5, h1=2, w1=2, h2=1, w2=3, sides=4),
        "crowded": dict(B=1, Nq=70, H=1, D=16, P=2, h0=2, w0=2),
        "no_queries": dict(B=2, Nq=0, H=2, D=8, P=2, h0=2, w0=3, sides=2),
    },
)
