"""Image to tokens: patch projection, position embedding and prefix tokens.

Math      x_p[n] = flatten(patch n)                              [N, C·P²]       (1)
          t = x_p Eᵀ + b                                         [N, D]          (2)
          tokens = [prefix; t] + pos  or  [prefix; t + pos]      [T + N, D]      (3)
          uint8 images are normalised as (image / 255 − mean) / std              (4)
          = (image − 128)·a + c,  a = 1 / (255 std),  c = (128/255 − mean) / std     per channel
          image − 128 is exact in 16 bits; a is folded into E, and c into b      (4')
Backward  dE = dtᵀ x_p    db = Σ dt    dpos = Σ_images dtokens    dprefix likewise      (5)
          dimage = transposed convolution of dt with E, if needed                       (6)
Kernels   (2) is a matrix product that reads patches from the image, without an im2col buffer, forward and backward; its
          epilogue adds positions and writes prefix tokens. dE is summed in two stages: deterministic.
Cost      2·B·N·C·P²·D flops; bytes = image + E + tokens.
Saved     image.
Sources   Dosovitskiy et al., ViT, arXiv:2010.11929, eq. 1.
Differs   Patches are flattened in (channel, row, column) order, as in a convolution's weight; the paper's (row, column,
          channel) order permutes the columns of E.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choose
from .argument import FLOATS, expect_floating, expect_mixable, expect_nonempty
from .backend import kernels_available
from .launch import cdiv, config, launch, precision
from .layer_norm_backward import sum_programs
from .op import Op, cast, expect, make_randn, once_differentiable, register
from .tile import from_wgmma_order, jit, split_columns, tl, wgmma_columns, wgmma_rows

# Default launch parameters, which fit every architecture; rows of tuned/ override them.
SPACE = {
    "fwd.half": dict(BLOCK_M=128, BLOCK_D=128, BLOCK_K=32, PARTS=4, WGMMA_WARPS=0, num_warps=4, num_stages=3),
    "fwd.fp32": dict(BLOCK_M=64, BLOCK_D=64, BLOCK_K=32, PARTS=4, WGMMA_WARPS=0, num_warps=8, num_stages=2),
    "bwd.half": dict(BLOCK_M=64, BLOCK_D=128, BLOCK_K=128, num_warps=8, num_stages=2),
    "bwd.fp32": dict(BLOCK_M=16, BLOCK_D=64, BLOCK_K=64, num_warps=8, num_stages=2),
}
ROWS = 4096  # patches per program in the sum for dE


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
        image: [B, C, H, W] in any memory format, of the weight's dtype, or uint8, which is normalised by equation (4)
            with `mean` and `std`.
        weight: [D, C, P, P'], as in a convolution.
        bias: [D], or None.
        pos: [1, N, D] added to the patch tokens, or [1, T + N, D] added to prefix tokens too.
        prefix: [1, T, D], class and register tokens, in order.
        mean: [C], of pixels in 0 … 1, on the image's device or the CPU; for uint8 images only.
        std: [C], likewise.

    Returns:
        [B, T + N, D], patches in row-major order.

    Raises:
        ValueError: a size or device does not fit, or mean and std are missing for a uint8 image or given for another.
        TypeError: the image is neither uint8 nor floating point, or an argument is of another type or dtype.
    """
    expect("weight", weight, D=None, C=None, P=None, **{"P'": None})
    expect_floating("weight", weight)
    D, C, *patch = weight.shape
    for axis, size in zip(("D", "C", "P", "P'"), weight.shape, strict=True):
        expect_nonempty("weight", axis, size)
    expect("image", image, weight, B=None, C=C, H=None, W=None)
    for axis, size, side in zip(("H", "W"), image.shape[2:], patch, strict=True):
        if size % side or not size:
            raise ValueError(f"axis {axis} of image must be a multiple of the patch side {side}, got {size}")
    _check_pixels(image, weight, mean, std)
    if bias is not None:
        expect("bias", bias, weight, D=D)
        expect_floating("bias", bias, weight)
    if prefix is not None:
        expect("prefix", prefix, weight, **{"1": 1}, T=None, D=D)
        expect_mixable("prefix", prefix, weight)
    if pos is not None:
        patches = image.shape[2] // patch[0] * (image.shape[3] // patch[1])
        tokens = patches + (0 if prefix is None else prefix.shape[1])
        expect("pos", pos, weight, **{"1": 1}, N=None, D=D)
        expect_mixable("pos", pos, weight)
        if pos.shape[1] != patches and pos.shape[1] != tokens:
            raise ValueError(f"axis N of pos must be {patches} (patches) or {tokens} (with prefix), got {pos.shape[1]}")
    if kernels_available(weight) and _kernel_is_chosen(image, weight, pos, prefix):
        mean, std = (None if t is None else t.to(image.device) for t in (mean, std))
        return _Fn.apply(image, cast(weight)[0], bias, pos, prefix, mean, std)
    return reference(image, weight, bias, pos, prefix, mean=mean, std=std)


def _kernel_is_chosen(image, weight, pos, prefix):
    """True if the plan selects our kernel, not the reference, which normalises uint8 images in four passes."""
    D, *patch = weight.shape
    patches = choose.rows_of(image.numel() // math.prod(patch))
    sizes = patches, math.prod(patch), D, prefix is not None, pos is not None
    return image.dtype == torch.uint8 or choose.prefers_kernel(weight, "patch_embed", *sizes)


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
    """Equations (1) to (4); a convolution with stride equal to its kernel size is (2)."""
    if image.dtype == torch.uint8:
        assert mean is not None and std is not None  # `_check_pixels`
        mean, std = (t.to(image.device, weight.dtype)[:, None, None] for t in (mean, std))
        image = (image.to(weight.dtype) / 255 - mean) / std  # (4)
    tokens = F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)  # (2) [B, N, D]
    return assemble(tokens, pos, prefix)


def _check_pixels(image: Tensor, weight: Tensor, mean: Tensor | None, std: Tensor | None) -> None:
    """Raises ValueError or TypeError unless mean and std are present exactly if the image is uint8."""
    if image.dtype != torch.uint8:
        if image.dtype not in FLOATS:
            raise TypeError(f"image must be uint8 or of the weight's dtype {weight.dtype}, got {image.dtype}")
        expect_floating("image", image, weight)
        if mean is not None or std is not None:
            raise ValueError(f"mean and std are for uint8 images, image is {image.dtype}; normalise it before the call")
        return
    if mean is None or std is None:
        raise ValueError("image is torch.uint8 and needs mean and std; give both, or a floating-point image")
    for name, tensor in (("mean", mean), ("std", std)):
        expect(name, tensor, C=image.shape[1])
        expect_floating(name, tensor)
        if tensor.device != image.device and tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, image on {image.device}; move it there")


def whole_patches(image: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """image [B, C, H, W] without the rows and columns at its end that fill no patch of (height, width)."""
    (height, width), (h, w) = image.shape[2:], patch_size
    return image if not (height % h or width % w) else image[:, :, : height - height % h, : width - width % w]


def assemble(tokens: Tensor, pos: Tensor | None, prefix: Tensor | None) -> Tensor:
    """Equation (3) on patch tokens [B, N, D]."""
    over_patches = pos is not None and pos.shape[1] == tokens.shape[1]
    if pos is not None and over_patches:
        tokens = tokens + pos
    if prefix is not None:
        tokens = torch.cat((prefix.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens), 1)
    return tokens if pos is None or over_patches else tokens + pos  # (3)


@jit
def _load_patches(
    image_ptr, m, k, M, strides, N, like,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Loads values k of patches m, [len(m), len(k)], in the dtype of `like`; of uint8 images value − 128.

    Patches are counted over all images; indices past the end are clamped. Values past K are 0, or −128 of uint8 images.
    EVEN: all k are below K.
    """
    m = tl.minimum(m, M - 1)
    b, row, column = (m // N).to(tl.int64), (m % N // GRID_W).to(tl.int64), (m % N % GRID_W).to(tl.int64)
    c, y, x = (k // (P * Q)).to(tl.int64), (k // Q % P).to(tl.int64), (k % Q).to(tl.int64)
    patch = b * strides[0] + row * P * strides[2] + column * Q * strides[3]
    at = image_ptr + patch[:, None] + (c * strides[1] + y * strides[2] + x * strides[3])[None, :]
    values = tl.load(at) if EVEN else tl.load(at, mask=(k < K)[None, :], other=0)
    if image_ptr.dtype.element_ty == tl.uint8:
        values = values.to(tl.float32) - 128.0
    return values.to(like.dtype)


@jit(do_not_specialize=["B"])
def _fwd_kernel(
    image_ptr, w_ptr, bias_ptr, pos_ptr, prefix_ptr, tokens_ptr, strides, B, N, T, D, pos_first,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_POS: tl.constexpr, HAS_PREFIX: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, WGMMA_WARPS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M patches, BLOCK_D channels. Equations (2) and (3); the first programs write prefix tokens."""
    tiles = tl.cdiv(D, BLOCK_D)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    m_first = tl.program_id(0) // tiles * BLOCK_M
    m = m_first + tl.arange(0, BLOCK_M)  # 32 bits are enough for the number of patches
    d_first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_D
    d = d_first + tl.arange(0, BLOCK_D)
    M, in_d = B * N, d < D
    wgmma_m, wgmma_d = m_first + wgmma_rows(BLOCK_M, WGMMA_WARPS), d_first + wgmma_columns(BLOCK_D, WGMMA_WARPS)
    w_at = w_ptr + tl.minimum(wgmma_d, D - 1)[None, :] * K
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_at + k[:, None]) if EVEN else tl.load(w_at + k[:, None], mask=(k < K)[:, None], other=0.0)
        x = _load_patches(image_ptr, wgmma_m, k, M, strides, N, w, P, Q, GRID_W, K, EVEN)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)  # (2) [BLOCK_M, BLOCK_D]
    parts = split_columns(from_wgmma_order(acc, WGMMA_WARPS), PARTS)
    b, n = (m // N).to(tl.int64), (m % N).to(tl.int64)
    for part in tl.static_range(PARTS):
        e = d_first + part * (BLOCK_D // PARTS) + tl.arange(0, BLOCK_D // PARTS)
        inside = (m < M)[:, None] & (e < D)[None, :]
        y = parts[part]
        if HAS_BIAS:
            y += tl.load(bias_ptr + e, mask=e < D, other=0.0).to(tl.float32)[None, :]
        if HAS_POS:  # pos_first is the row of the first patch: T if prefix tokens have positions too, else 0
            y += tl.load(pos_ptr + (pos_first + n)[:, None] * D + e[None, :], mask=inside, other=0.0).to(tl.float32)
        token_at = tokens_ptr + (b * (T + N) + T + n)[:, None] * D + e[None, :]
        tl.store(token_at, y.to(tokens_ptr.dtype.element_ty), mask=inside)
    if HAS_PREFIX:  # row tile i writes the prefix tokens of BLOCK_M images from i·BLOCK_M on
        if m_first < B:
            for prefix in range(0, T):
                t = tl.cast(prefix, tl.int64)
                token = tl.load(prefix_ptr + t * D + d, mask=in_d, other=0.0).to(tl.float32)
                if HAS_POS:
                    if pos_first > 0:
                        token += tl.load(pos_ptr + t * D + d, mask=in_d, other=0.0).to(tl.float32)
                row = tl.broadcast_to(token.to(tokens_ptr.dtype.element_ty)[None, :], [BLOCK_M, BLOCK_D])
                at = tokens_ptr + (m.to(tl.int64) * (T + N) + t)[:, None] * D + d[None, :]
                tl.store(at, row, mask=(m < B)[:, None] & in_d[None, :])


@jit(do_not_specialize=["M"])
def _bwd_weight_kernel(
    image_ptr, dt_ptr, partial_ptr, strides, M, N, T, D,
    P: tl.constexpr, Q: tl.constexpr, GRID_W: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of dE, [BLOCK_D, BLOCK_K], summed over ROWS patches. Equation (5)."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.program_id(2) * ROWS
    acc = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    for first in range(start, tl.minimum(start + ROWS, M), BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        at = dt_ptr + ((m // N).to(tl.int64) * (T + N) + T + m % N)[None, :] * D + tl.minimum(d, D - 1)[:, None]
        dt = tl.load(at, mask=(m < M)[None, :], other=0.0)  # [BLOCK_D, BLOCK_M]
        x = _load_patches(image_ptr, m, k, M, strides, N, dt, P, Q, GRID_W, K, K % BLOCK_K == 0)
        if PRECISION == "ieee":  # a sum of sums of BLOCK_M patches: one running sum would round more than PyTorch's
            acc += tl.dot(dt, x, input_precision=PRECISION)
        else:
            acc = tl.dot(dt, x, acc, input_precision=PRECISION)
    at = partial_ptr + (tl.program_id(2).to(tl.int64) * D + d[:, None]) * K + k[None, :]
    tl.store(at, acc, mask=(d < D)[:, None] & (k < K)[None, :])


def tuned_row(kernel: str, weight: Tensor) -> str:
    """Row name in tuned/ for a kernel, "fwd" or "bwd", and the dtype of the weight."""
    return f"patch_embed.{kernel}.{'fp32' if weight.dtype == torch.float32 else 'half'}"


def _blocks(kernel, weight, M, K):
    """Launch parameters of a kernel, "fwd" or "bwd"."""
    row = tuned_row(kernel, weight)
    return config(row, SPACE[row.removeprefix("patch_embed.")], weight.device, M, len(weight), K)


def _sizes(image, weight, prefix):
    """(N, T, D, compile-time arguments of both kernels)."""
    D, C, P, Q = weight.shape
    N = image.shape[2] // P * (image.shape[3] // Q)
    T = 0 if prefix is None else prefix.shape[1]
    return N, T, D, dict(P=P, Q=Q, GRID_W=image.shape[3] // Q, K=C * P * Q, PRECISION=precision(weight))


def _scale_and_offset(mean, std):
    """a and c of equation (4'), [C, 1, 1] fp32."""
    mean = mean.float()[:, None, None]
    std = std.float()[:, None, None]
    return 1 / (255 * std), (128 / 255 - mean) / std


def _fwd(image, weight, bias, pos, prefix, mean, std):
    """Tokens [B, T + N, D]."""
    tokens = _fwd_fake(image, weight, bias, pos, prefix, mean, std)
    N, T, D, fixed = _sizes(image, weight, prefix)
    M = len(image) * N
    blocks = _blocks("fwd", weight, M, fixed["K"])
    pos_first = 0 if pos is None else pos.shape[1] - N
    if image.dtype == torch.uint8:  # (4')
        factor, offset = _scale_and_offset(mean, std)
        extra = (weight.float() * offset).sum((1, 2, 3))
        weight = (weight.float() * factor).to(weight.dtype)
        bias = extra if bias is None else bias.float() + extra
    if M:
        launch(
            _fwd_kernel, (cdiv(M, blocks["BLOCK_M"]) * cdiv(D, blocks["BLOCK_D"]),),
            image, weight.contiguous(), bias, None if pos is None else pos.contiguous(),
            None if prefix is None else prefix.contiguous(), tokens, image.stride(), len(image), N, T, D, pos_first,
            HAS_BIAS=bias is not None, HAS_POS=pos is not None, HAS_PREFIX=prefix is not None, **fixed, **blocks,
        )  # fmt: skip
    return tokens


def _fwd_fake(image, weight, bias, pos, prefix, mean, std):
    D, _, P, Q = weight.shape
    N = image.shape[2] // P * (image.shape[3] // Q)
    dtype = weight.dtype if pos is None else torch.promote_types(weight.dtype, pos.dtype)
    return weight.new_empty(image.shape[0], N + (0 if prefix is None else prefix.shape[1]), D, dtype=dtype)


def _bwd(dtokens, image, weight, prefix, mean, std):
    """dE [D, C, P, P'] in the weight's dtype, for uint8 images in fp32."""
    N, T, D, fixed = _sizes(image, weight, prefix)
    M = len(image) * N
    K = fixed["K"]
    blocks = _blocks("bwd", weight, M, K)
    parts = cdiv(M, ROWS)
    partial = torch.empty(parts, D, K, dtype=torch.float32, device=weight.device)
    if M:
        launch(
            _bwd_weight_kernel, (cdiv(K, blocks["BLOCK_K"]), cdiv(D, blocks["BLOCK_D"]), parts),
            image, dtokens.to(weight.dtype).contiguous(), partial, image.stride(), M, N, T, D,
            ROWS=ROWS, **fixed, **blocks,
        )  # fmt: skip
    if image.dtype != torch.uint8:
        return sum_programs(partial, weight.dtype).view(weight.shape)
    factor, offset = _scale_and_offset(mean, std)  # (4')
    dbias = dtokens[:, T:].to(weight.dtype).sum((0, 1), dtype=torch.float32)
    return sum_programs(partial).view(weight.shape) * factor + dbias[:, None, None, None] * offset


def _bwd_fake(dtokens, image, weight, prefix, mean, std):
    return weight.new_empty(weight.shape, dtype=torch.float32 if image.dtype == torch.uint8 else weight.dtype)


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


def _summed(dtokens: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The sum over these axes in fp32, rounded once; one launch if dtokens has the dtype of the result."""
    return dtokens.sum(axes, dtype=None if dtokens.dtype == dtype else torch.float32).to(dtype)


class _Fn(torch.autograd.Function):
    """Autograd of patch_embed_fwd by patch_embed_bwd; saves the image and the parameters."""

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
        T = 0 if prefix is None else prefix.shape[1]
        needs = ctx.needs_input_grad
        dimage = dweight = dbias = dpos = dprefix = None
        if needs[1]:
            dweight = _bwd_op(dtokens, image, weight, prefix, mean, std).to(weight.dtype)
        bias, pos, first = ctx.dtypes
        if needs[2]:
            dbias = _summed(dtokens[:, T:], (0, 1), bias)
        if needs[3]:
            dpos = _summed(dtokens[:, dtokens.shape[1] - ctx.rows :], (0,), pos)[None]
        if needs[4]:
            dprefix = _summed(dtokens[:, :T], (0,), first)[None]
        if needs[0]:
            h, w = (side // patch for side, patch in zip(image.shape[2:], weight.shape[2:], strict=True))
            dt = dtokens[:, T:].transpose(1, 2).unflatten(2, (h, w)).to(weight.dtype)
            dimage = F.conv_transpose2d(dt, weight, stride=weight.shape[2:]).to(image.dtype)  # (6)
        return dimage, dweight, dbias, dpos, dprefix, None, None


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (B, C, H, W, P, D, T) = make_randn(device, dtype), (case[a] for a in ("B", "C", "H", "W", "P", "D", "T"))
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
