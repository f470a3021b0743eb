"""A LayerNorm folded into the projections behind it, so that the product reads x as it is.

Math      W' = W·diag(γ)    s_f = Σ_k W'_fk    c = W β + b                                   (1)
          LN(x) Wᵀ + b = r·(x W'ᵀ) − r·μ·s + c,  r = 1/√(σ² + ε), μ and σ² of each row of x  (2)
          The sums see the rounded W', so that a constant in x cancels exactly.
Backward  dW = dW'·diag(γ) + dc βᵀ    db = dc    dγ = Σ_f dW'_f ∘ W_f    dβ = Wᵀ dc           (3)
          in PyTorch; s is a function of W' and carries no gradient of its own.
Kernels   One, over whole rows of W. The backward pass of `linear` uses it for W' alone, rows times a gamma.
Saved     W, γ, β.
Cost      reads W once, writes W' once.
Sources   Ba et al., Layer Normalization, arXiv:1607.06450, eq. 4, multiplied out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .argument import FLOATS, filled, floating, mixing
from .op import Op, cdiv, expect, make, once_differentiable, register, usable, whole_rows
from .tile import jit, tl

Parts = tuple[Tensor | None, ...]

MAX_K = 16384  # one program holds a whole row


class Folded(NamedTuple):
    """What `fold` makes: equation (1). Stands for a weight and its bias behind a LayerNorm."""

    weight: Tensor  # W' [F, K], rounded
    colsum: Tensor  # s [F], fp32
    const: Tensor  # c [F], fp32


def fold(
    weights: tuple[Tensor, ...],
    biases: Parts,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dtype: torch.dtype,
) -> Folded:
    """Equation (1): projections and the LayerNorm before them as one weight, for `linear` and `mlp`.

    Differentiable; made once it serves until a source changes, which is for the caller to notice.

    Args:
        weights: projections [F_i, K], packed in this order.
        biases: their biases [F_i], or None.
        norm_weight: [K], or None.
        norm_bias: [K], or None.
        dtype: of the product, which is that of x.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    check(weights, biases, norm_weight, norm_bias)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
    weight, bias = packed(weights, biases)
    if usable(weight) and weight.shape[1] <= MAX_K:
        return Folded(*_Fn.apply(weight, bias, norm_weight, norm_bias, dtype))
    return _reference(weight, bias, norm_weight, norm_bias, dtype)


def reference(
    weights: tuple[Tensor, ...],
    biases: Parts,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dtype: torch.dtype,
) -> Folded:
    """Equation (1)."""
    return _reference(*packed(weights, biases), norm_weight, norm_bias, dtype)


def _reference(weight, bias, norm_weight, norm_bias, dtype):
    """Equation (1) of one weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    const = weight.new_zeros(weight.shape[0], dtype=wide) if bias is None else bias.to(wide)
    if norm_bias is not None:
        const = const + weight.to(wide) @ norm_bias.to(wide)
    folded = weight.to(wide) if norm_weight is None else weight.to(wide) * norm_weight.to(wide)
    folded = folded.to(dtype)
    return Folded(folded, folded.detach().to(wide).sum(1), const)


def check(weights: tuple[Tensor, ...], biases: Parts, norm_weight: Tensor | None, norm_bias: Tensor | None) -> None:
    """Raises ValueError or TypeError when the parts do not fit each other."""
    for name, parts in (("weights", weights), ("biases", biases)):
        if not isinstance(parts, (tuple, list)) or not parts:
            raise TypeError(f"{name} must be a tuple, one for each projection, got {type(parts).__name__}")
    if len(weights) != len(biases):
        raise ValueError(f"biases must be {len(weights)}, as there are weights, got {len(biases)}")
    K = None
    for weight, bias in zip(weights, biases, strict=True):
        expect("weight", weight, weights[0], F=None, K=K)
        floating("weight", weight)
        if weight.dtype != weights[0].dtype:
            raise TypeError(f"weights must have one dtype, got {weights[0].dtype} and {weight.dtype}")
        filled("weight", "F", weight.shape[0])
        K = weight.shape[1]
        if bias is not None:
            expect("bias", bias, weight, F=weight.shape[0])
            mixing("bias", bias, weight)
    filled("weight", "K", K)
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None:
            expect(name, parameter, weights[0], K=K)
            mixing(name, parameter, weights[0])


def packed(weights: tuple[Tensor, ...], biases: Parts) -> tuple[Tensor, Tensor | None]:
    """Projections as one weight and one bias; a missing bias beside others is zero."""
    if len(weights) == 1:
        return weights[0], biases[0]
    if all(b is None for b in biases):
        return torch.cat(weights), None
    pairs = zip(weights, biases, strict=True)
    return torch.cat(weights), torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


@jit
def _fold_kernel(
    w_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, gamma_ptr, folded_ptr, colsum_ptr, const_ptr, F, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_GAMMA: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_F outputs. Equation (1).

    Without SUMS, and with rows times gamma, it is the matrix that takes dpre to dx in `linear`.
    """
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    in_f, in_k = f < F, k < K
    inside = in_f[:, None] & in_k[None, :]
    w = tl.load(w_ptr + f[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F, BLOCK_K]
    const = tl.zeros([BLOCK_F], tl.float32)
    if HAS_BIAS:
        const += tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        const += tl.sum(w * tl.load(norm_bias_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :], 1)
    if HAS_WEIGHT:
        w *= tl.load(norm_weight_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
    if HAS_GAMMA:
        w *= tl.load(gamma_ptr + f, mask=in_f, other=0.0).to(tl.float32)[:, None]
    folded = w.to(folded_ptr.dtype.element_ty)
    tl.store(folded_ptr + f[:, None] * K + k[None, :], folded, mask=inside)
    if SUMS:
        tl.store(colsum_ptr + f, tl.sum(folded.to(tl.float32), 1), mask=in_f)
        tl.store(const_ptr + f, const, mask=in_f)


def _fold(weight, bias, norm_weight, norm_bias, dtype):
    """Equation (1): (W' [F, K] in `dtype`, its column sums [F] and the constant [F], fp32)."""
    outputs = _fold_fake(weight, bias, norm_weight, norm_bias, dtype)
    launch(weight, bias, norm_weight, norm_bias, None, *outputs)
    return outputs


def launch(
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    gamma: Tensor | None,
    folded: Tensor,
    colsum: Tensor | None = None,
    const: Tensor | None = None,
) -> None:
    """Writes W', with rows times gamma [F] if given, and its sums if there is room for them."""
    rows, block, options = whole_rows(weight.shape[1])
    _fold_kernel[(cdiv(len(weight), rows),)](
        weight.contiguous(), bias, norm_weight, norm_bias, gamma, folded, colsum, const, len(weight), K=weight.shape[1],
        HAS_BIAS=bias is not None, HAS_WEIGHT=norm_weight is not None, HAS_SHIFT=norm_bias is not None,
        HAS_GAMMA=gamma is not None, SUMS=colsum is not None, BLOCK_F=rows, BLOCK_K=block, **options,
    )  # fmt: skip


def _fold_fake(weight, bias, norm_weight, norm_bias, dtype):
    colsum, const = (weight.new_empty(len(weight), dtype=torch.float32) for _ in range(2))
    return weight.new_empty(weight.shape, dtype=dtype), colsum, const


fold_op = register(
    "fold",
    "(Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _fold,
    _fold_fake,
)


class _Fn(torch.autograd.Function):
    """Ties fold to equation (3)."""

    @staticmethod
    def forward(ctx, weight, bias, norm_weight, norm_bias, dtype):
        ctx.save_for_backward(weight, norm_weight, norm_bias)
        ctx.bias_dtype = None if bias is None else bias.dtype
        folded, colsum, const = fold_op(weight, bias, norm_weight, norm_bias, dtype)
        ctx.mark_non_differentiable(colsum)
        return folded, colsum, const

    @staticmethod
    @once_differentiable
    def backward(ctx, dfolded, _, dconst):
        weight, norm_weight, norm_bias = ctx.saved_tensors
        dweight, wide = dfolded.float(), weight.float()
        dgain = None if norm_weight is None else (dweight * wide).sum(0).to(norm_weight.dtype)
        dshift = None if norm_bias is None else (dconst @ wide).to(norm_bias.dtype)
        if norm_weight is not None:
            dweight = dweight * norm_weight.float()
        if norm_bias is not None:
            dweight = dweight + dconst[:, None] * norm_bias.float()
        dbias = None if ctx.bias_dtype is None else dconst.to(ctx.bias_dtype)
        return dweight.to(weight.dtype), dbias, dgain, dshift, None


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (F, K) = make(device, dtype), (case[a] for a in ("F", "K"))
    weights = tuple(randn(F, K, scale=K**-0.5) for _ in range(case["parts"]))
    biases = tuple(None if i == 1 else randn(F) for i in range(case["parts"]))  # BEiT's keys have none
    return {"weights": weights, "biases": biases, "norm_weight": randn(K), "norm_bias": randn(K), "dtype": dtype}


OP = Op(
    name="fold",
    run=fold,
    reference=reference,
    cases={"one": dict(F=3, K=5, parts=1), "three": dict(F=2, K=4, parts=3)},
    inputs=_inputs,
    ragged={"one": dict(F=70, K=33, parts=1), "three": dict(F=24, K=48, parts=3)},
)
