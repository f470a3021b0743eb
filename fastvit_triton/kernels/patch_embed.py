"""Image to tokens: patch projection, positions and prefix tokens.

Math      x_p[n] = flatten(patch n)                              [N, C·P²]       (1)
          t = x_p Eᵀ + b                                         [N, D]          (2)
          tokens = [prefix; t] + pos  or  [prefix; t + pos]      [T + N, D]      (3)
          uint8 images enter as (image / 255 − mean) / std                       (4)
Backward  dE = dtᵀ x_p    db = Σ dt    dpos = Σ_images dtokens    dprefix likewise      (5)
          dimage = fold(dt E), by a transposed convolution, only if asked for           (6)
Kernels   (2) is one product over an implicit unfold: no im2col buffer, forward or backward; positions and prefix tokens
          are written on the way out. dE is summed in two stages: same bits every run.
Cost      2·B·N·C·P²·D flops; bytes = image + E + tokens.
Saved     image.
Sources   Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 1.
Differs   The patch is flattened in (channel, row, column) order, as a convolution's weight is; (row, column, channel)
          of the paper is the same map with E's columns permuted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .op import Op, cast, cdiv, expect, make, register, usable
from .tile import jit, tl

# Launch parameters, for every architecture.
SPACE = {
    "fwd": dict(BLOCK_M=64, BLOCK_D=128, BLOCK_K=64, num_warps=4, num_stages=3),
    "bwd": dict(BLOCK_M=32, BLOCK_D=128, BLOCK_K=128, num_warps=4, num_stages=2),
}
ROWS = 4096  # patches whose share of dE one program sums


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
    if usable(weight):
        mean, std = (None if t is None else t.to(image.device) for t in (mean, std))
        return _Fn.apply(image, cast(weight)[0], bias, pos, prefix, mean, std)
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
        tokens = torch.cat((prefix.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens), 1)
    return tokens if pos is None or over_patches else tokens + pos  # (3)


@jit
def _patches(
    image_ptr, mean_ptr, std_ptr, m, k, M, strides, N,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr, NORMAL: tl.constexpr,
):  # fmt: skip
    """Values k of patches m of all images, [len(m), len(k)] fp32: equations (1) and (4)."""
    b, n = (m // N).to(tl.int64), (m % N).to(tl.int64)
    c, y, x = k // (P * Q), k // Q % P, k % Q
    patch = b * strides[0] + (n // GRID_W * P) * strides[2] + (n % GRID_W * Q) * strides[3]
    value = c.to(tl.int64) * strides[1] + y.to(tl.int64) * strides[2] + x.to(tl.int64) * strides[3]
    inside = (m < M)[:, None] & (k < K)[None, :]
    values = tl.load(image_ptr + patch[:, None] + value[None, :], mask=inside, other=0).to(tl.float32)
    if NORMAL:
        mean = tl.load(mean_ptr + c, mask=k < K, other=0.0).to(tl.float32)
        std = tl.load(std_ptr + c, mask=k < K, other=1.0).to(tl.float32)
        values = tl.where(inside, (values / 255.0 - mean[None, :]) / std[None, :], 0.0)
    return values


@jit
def _fwd_kernel(
    image_ptr, w_ptr, bias_ptr, pos_ptr, prefix_ptr, mean_ptr, std_ptr, tokens_ptr, strides,
    B, N, T, D, pos_first,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_POS: tl.constexpr, HAS_PREFIX: tl.constexpr,
    NORMAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M patches of all images and BLOCK_D channels; the first ones also write prefix tokens."""
    tiles = tl.cdiv(D, BLOCK_D)
    m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    M, in_d = B * N, d < D
    inside = (m < M)[:, None] & in_d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptr + d[None, :] * K + k[:, None], mask=(k < K)[:, None] & in_d[None, :], other=0.0)
        x = _patches(image_ptr, mean_ptr, std_ptr, m, k, M, strides, N, P, Q, GRID_W, K, NORMAL)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision=PRECISION)  # (2) [BLOCK_M, BLOCK_D]
    b, n = m // N, m % N
    if HAS_BIAS:
        acc += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if HAS_POS:  # pos_first is the row of the first patch: 0, or T where prefix tokens have positions too
        acc += tl.load(pos_ptr + (pos_first + n)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(tokens_ptr + (b * (T + N) + T + n)[:, None] * D + d[None, :], acc.to(tokens_ptr.dtype.element_ty), inside)
    if HAS_PREFIX:  # row tile i also writes the prefix tokens of images i·BLOCK_M …
        if tl.program_id(0) // tiles * BLOCK_M < B:
            for prefix in range(0, T):
                t = tl.cast(prefix, tl.int64)
                token = tl.load(prefix_ptr + t * D + d, mask=in_d, other=0.0).to(tl.float32)
                if HAS_POS:
                    token += tl.load(pos_ptr + t * D + d, mask=in_d & (pos_first > 0), other=0.0).to(tl.float32)
                row = tl.broadcast_to(token.to(tokens_ptr.dtype.element_ty)[None, :], [BLOCK_M, BLOCK_D])
                at = tokens_ptr + (m * (T + N) + t)[:, None] * D + d[None, :]
                tl.store(at, row, mask=(m < B)[:, None] & in_d[None, :])


@jit
def _bwd_weight_kernel(
    image_ptr, dt_ptr, mean_ptr, std_ptr, partial_ptr, strides, M, N, T, D,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr, NORMAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: ROWS patches' share of one tile of dE, [BLOCK_D, BLOCK_K]. Equation (5)."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.program_id(2).to(tl.int64) * ROWS
    acc = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    for first in range(start, tl.minimum(start + ROWS, M), BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        at = dt_ptr + (m // N * (T + N) + T + m % N)[None, :] * D + d[:, None]
        dt = tl.load(at, mask=(m < M)[None, :] & (d < D)[:, None], other=0.0)  # [BLOCK_D, BLOCK_M]
        x = _patches(image_ptr, mean_ptr, std_ptr, m, k, M, strides, N, P, Q, GRID_W, K, NORMAL)
        acc = tl.dot(dt, x.to(dt.dtype), acc, input_precision=PRECISION)
    at = partial_ptr + (tl.program_id(2).to(tl.int64) * D + d[:, None]) * K + k[None, :]
    tl.store(at, acc, mask=(d < D)[:, None] & (k < K)[None, :])


def _sizes(image, weight, prefix):
    """N, T, grid width, K and the arguments by name that both kernels share."""
    D, C, P, Q = weight.shape
    N, T = image.shape[2] // P * (image.shape[3] // Q), 0 if prefix is None else prefix.shape[1]
    shared = dict(strides=image.stride(), N=N, T=T, P=P, Q=Q, GRID_W=image.shape[3] // Q, K=C * P * Q, D=D)
    exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return shared | dict(NORMAL=not image.is_floating_point(), PRECISION="ieee" if exact else "tf32")


def _fwd(image, weight, bias, pos, prefix, mean, std):
    """Tokens [B, T + N, D]."""
    tokens, shared = _fwd_fake(image, weight, bias, pos, prefix, mean, std), _sizes(image, weight, prefix)
    M, D = len(image) * shared["N"], shared["D"]
    pos_first = 0 if pos is None else pos.shape[1] - shared["N"]
    if M:
        _fwd_kernel[(cdiv(M, SPACE["fwd"]["BLOCK_M"]) * cdiv(D, SPACE["fwd"]["BLOCK_D"]),)](
            image, weight.contiguous(), bias, None if pos is None else pos.contiguous(),
            None if prefix is None else prefix.contiguous(), mean, std, tokens, B=len(image), pos_first=pos_first,
            HAS_BIAS=bias is not None, HAS_POS=pos is not None, HAS_PREFIX=prefix is not None, enable_fp_fusion=True,
            **shared, **SPACE["fwd"],
        )  # fmt: skip
    return tokens


def _fwd_fake(image, weight, bias, pos, prefix, mean, std):
    D, _, P, Q = weight.shape
    N = image.shape[2] // P * (image.shape[3] // Q)
    dtype = weight.dtype if pos is None else torch.promote_types(weight.dtype, pos.dtype)
    return weight.new_empty(image.shape[0], N + (0 if prefix is None else prefix.shape[1]), D, dtype=dtype)


def _bwd(dtokens, image, weight, prefix, mean, std):
    """dE [D, C, P, P'] in fp32."""
    dweight, shared = _bwd_fake(dtokens, image, weight, prefix, mean, std), _sizes(image, weight, prefix)
    M, D, K = len(image) * shared["N"], shared["D"], shared["K"]
    parts = max(cdiv(M, ROWS), 1)
    partial = torch.zeros(parts, D, K, dtype=torch.float32, device=weight.device)
    if M:
        _bwd_weight_kernel[(cdiv(K, SPACE["bwd"]["BLOCK_K"]), cdiv(D, SPACE["bwd"]["BLOCK_D"]), parts)](
            image, dtokens.to(weight.dtype).contiguous(), mean, std, partial, M=M, ROWS=ROWS, enable_fp_fusion=True,
            **shared, **SPACE["bwd"],
        )  # fmt: skip
    return torch.sum(partial, 0, out=dweight.view(D, K)).view(weight.shape)


def _bwd_fake(dtokens, image, weight, prefix, mean, std):
    return weight.new_empty(weight.shape, dtype=torch.float32)


_fwd_op = register(
    "patch_embed_fwd",
    "(Tensor image, Tensor weight, Tensor? bias, Tensor? pos, Tensor? prefix, Tensor? mean, Tensor? std) -> Tensor",
    _fwd,
    _fwd_fake,
)
_bwd_op = register(
    "patch_embed_bwd",
    "(Tensor dtokens, Tensor image, Tensor weight, Tensor? prefix, Tensor? mean, Tensor? std) -> Tensor",
    _bwd,
    _bwd_fake,
)


class _Fn(torch.autograd.Function):
    """Ties patch_embed_fwd to patch_embed_bwd; saves the image."""

    @staticmethod
    def forward(ctx, image, weight, bias, pos, prefix, mean, std):
        ctx.save_for_backward(image, weight, prefix, mean, std)
        ctx.rows = 0 if pos is None else pos.shape[1]
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (bias, pos, prefix))
        return _fwd_op(image, weight, bias, pos, prefix, mean, std)

    @staticmethod
    @once_differentiable
    def backward(ctx, dtokens):
        image, weight, prefix, mean, std = ctx.saved_tensors
        T, needs = 0 if prefix is None else prefix.shape[1], ctx.needs_input_grad
        dimage = dweight = dbias = dpos = dprefix = None
        if needs[1]:
            dweight = _bwd_op(dtokens, image, weight, prefix, mean, std).to(weight.dtype)
        if needs[2] or needs[3] or needs[4]:
            rows = dtokens.sum(0, dtype=torch.float32)  # [T + N, D]
            bias, pos, first = ctx.dtypes
            dbias = rows[T:].sum(0).to(bias) if needs[2] else None
            dpos = rows[len(rows) - ctx.rows :][None].to(pos) if needs[3] else None
            dprefix = rows[:T][None].to(first) if needs[4] else None
        if needs[0]:
            h, w = (side // patch for side, patch in zip(image.shape[2:], weight.shape[2:], strict=True))
            dt = dtokens[:, T:].transpose(1, 2).unflatten(2, (h, w)).to(weight.dtype)
            dimage = F.conv_transpose2d(dt, weight, stride=weight.shape[2:]).to(image.dtype)  # (6)
        return dimage, dweight, dbias, dpos, dprefix, None, None


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
    ragged={
        "patch14": dict(B=2, C=3, H=42, W=28, P=14, D=48, T=1, pos_prefix=1),
        "registers": dict(B=3, C=3, H=32, W=48, P=16, D=70, T=5, pos_prefix=0),
        "many_images": dict(B=130, C=1, H=4, W=4, P=4, D=16, T=1, pos_prefix=1),
        "no_images": dict(B=0, C=3, H=8, W=8, P=4, D=16, T=1, pos_prefix=1),
    },
)
