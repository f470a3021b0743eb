"""Folds LayerNorms into the projections that follow them, so that the matmul reads x without normalising it.

Math      W' = W·diag(γ)    s_f = Σ_k W'_fk    c = W β + b                                   (1)
          LN(x) Wᵀ + b = r·(x W'ᵀ) − r·μ·s + c,  r = 1/√(σ² + ε), μ and σ² of each row of x  (2)
          s is summed over the rounded W', so that a constant in x cancels exactly.
Backward  dW = dW'·diag(γ) + dc βᵀ    db = dc    dγ = Σ_f dW'_f ∘ W_f    dβ = Wᵀ dc           (3)
          computed by PyTorch. s is a function of W' and has no separate gradient.
Kernels   One launch for all projections of all norms; programs process whole rows and write the projections of a norm
          packed. The backward pass of `linear` uses the kernel for W' only, with rows times layer_scale.
Saved     W, γ, β.
Cost      2·F·K values (reads W, writes W'); a separate LayerNorm moves 2·M·K. `pays` compares the two.
Sources   Ba et al., Layer Normalization, arXiv:1607.06450, eq. 4, multiplied out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .argument import FLOATS, expect_floating, expect_mixable, expect_nonempty
from .backend import kernels_available
from .launch import cdiv, config, whole_row_blocks
from .launch import launch as launch_kernel
from .op import Op, expect, make_randn, once_differentiable, register
from .tile import jit, tl

Tensors = tuple[Tensor | None, ...]

MAX_K = 16384  # a program holds whole rows
SPACE = {"border": dict(ROWS_PER_OUTPUT=1)}  # see `pays`; tuned/ may override it


class Group(NamedTuple):
    """The parameters of a LayerNorm and of the projections that follow it, which are packed in this order."""

    weights: tuple[Tensor, ...]  # [F_i, K]
    biases: Tensors  # [F_i], or None
    norm_weight: Tensor | None  # [K]
    norm_bias: Tensor | None  # [K]


class Folded(NamedTuple):
    """Result of `fold`, equation (1): the weight and bias of a projection with the LayerNorm before it folded in.

    Attributes:
        weight: W' [F, K], in the dtype of the product.
        colsum: s [F] fp32, the column sums of W'ᵀ.
        bias: c [F] fp32.
        source: the packed projection and norm that get the gradients; None if gradients flow through W' and c.
    """

    weight: Tensor
    colsum: Tensor
    bias: Tensor
    source: Group | None = None


def fold(
    weights: tuple[Tensor, ...],
    biases: Tensors,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dtype: torch.dtype,
) -> Folded:
    """Equation (1): projections and the LayerNorm before them as one weight and bias, for `linear` and `mlp`.

    Differentiable. The result is not updated when a parameter changes.

    Args:
        weights: projections [F_i, K], packed in this order.
        biases: their biases [F_i], or None.
        norm_weight: [K], or None.
        norm_bias: [K], or None.
        dtype: of W', which is the dtype of x in the product.

    Returns:
        W' [F, K], its column sums [F] and bias [F] in fp32, with F = Σ F_i.

    Raises:
        ValueError: a size or device does not fit.
        TypeError: an argument is of another type or dtype.
    """
    check(weights, biases, norm_weight, norm_bias)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
    if kernels_available(weights[0]) and weights[0].shape[1] <= MAX_K:
        return Folded(*_Fn.apply(dtype, norm_weight, norm_bias, *weights, *biases))
    return reference(weights, biases, norm_weight, norm_bias, dtype)


@torch.no_grad()
def fold_groups(groups: Sequence[Group], dtype: torch.dtype) -> list[Folded]:
    """Equation (1) for several LayerNorms of the same width K in one launch, without gradients.

    Args:
        groups: norms and their projections [F_i, K].
        dtype: of W'.

    Returns:
        One `Folded` for each group.

    Raises:
        ValueError: a size does not fit.
        TypeError: a parameter is of another type or dtype.
    """
    for group in groups:
        check(*group)
        expect("weight", group.weights[0], F=None, K=groups[0].weights[0].shape[1])
    if kernels_available(groups[0].weights[0]) and groups[0].weights[0].shape[1] <= MAX_K:
        return run(groups, dtype)
    return [reference(*group, dtype) for group in groups]


def pays(x: Tensor, outputs: int) -> bool:
    """True if folding in this call moves fewer bytes than a LayerNorm of x [..., K] before projections to `outputs`.

    Always True under torch.compile, so that the number of rows is not specialised.
    """
    if torch.compiler.is_compiling() or not isinstance(rows := x.numel() // max(x.shape[-1], 1), int):
        return True
    return rows >= config("fold.border", SPACE["border"], x.device)["ROWS_PER_OUTPUT"] * outputs


def reference(
    weights: tuple[Tensor, ...],
    biases: Tensors,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dtype: torch.dtype,
) -> Folded:
    """Equation (1)."""
    weight, bias = packed(weights, biases)
    wide = torch.promote_types(weight.dtype, torch.float32)
    folded_bias = weight.new_zeros(weight.shape[0], dtype=wide) if bias is None else bias.to(wide)
    if norm_bias is not None:
        folded_bias = folded_bias + weight.to(wide) @ norm_bias.to(wide)
    folded = weight.to(wide) if norm_weight is None else weight.to(wide) * norm_weight.to(wide)
    folded = folded.to(dtype)
    return Folded(folded, folded.detach().to(wide).sum(1), folded_bias)


def check(weights: tuple[Tensor, ...], biases: Tensors, norm_weight: Tensor | None, norm_bias: Tensor | None) -> None:
    """Raises ValueError or TypeError if projections and norm do not fit each other; arguments as in `fold`."""
    for name, parts in (("weights", weights), ("biases", biases)):
        if not isinstance(parts, (tuple, list)) or not parts:
            raise TypeError(f"{name} must be a tuple with an entry for each projection, got {type(parts).__name__}")
    if len(weights) != len(biases):
        raise ValueError(f"biases must have {len(weights)} entries, as weights, got {len(biases)}")
    K: int | None = None
    for weight, bias in zip(weights, biases, strict=True):
        expect("weight", weight, weights[0], F=None, K=K)
        expect_floating("weight", weight)
        if weight.dtype != weights[0].dtype:
            raise TypeError(f"weights must have the same dtype, got {weights[0].dtype} and {weight.dtype}")
        expect_nonempty("weight", "F", weight.shape[0])
        K = weight.shape[1]
        if bias is not None:
            expect("bias", bias, weight, F=weight.shape[0])
            expect_mixable("bias", bias, weight)
    expect_nonempty("weight", "K", weights[0].shape[1])
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None:
            expect(name, parameter, weights[0], K=K)
            expect_mixable(name, parameter, weights[0])


def packed(weights: tuple[Tensor, ...], biases: Tensors) -> tuple[Tensor, Tensor | None]:
    """Projections packed into one weight [F, K] and one bias [F] (None if all are None; a missing one is zeros).

    Takes one launch if no gradients are needed, else torch.cat.
    """
    if len(weights) == 1:
        return weights[0], biases[0]
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*weights, *biases))
    if kernels_available(weights[0]) and weights[0].shape[1] <= MAX_K and not learns:
        weight, bias = _pack_op(weights, biases)
        return weight, bias if bias.numel() else None
    if all(b is None for b in biases):
        return torch.cat(weights), None
    pairs = zip(weights, biases, strict=True)
    return torch.cat(weights), torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs])


@jit
def _fold_rows(
    w_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, layer_scale_ptr, folded_weight_ptr, colsum_ptr, folded_bias_ptr,
    block, F,
    K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Equation (1) for BLOCK_F outputs of one projection, rows times layer_scale; any pointer but w_ptr may be None."""
    f = block.to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    in_f, in_k = f < F, k < K
    inside = in_f[:, None] & in_k[None, :]
    w = tl.load(w_ptr + f[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F, BLOCK_K]
    folded_bias = tl.zeros([BLOCK_F], tl.float32)
    if bias_ptr is not None:
        folded_bias += tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    if norm_bias_ptr is not None:
        folded_bias += tl.sum(w * tl.load(norm_bias_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :], 1)
    if norm_weight_ptr is not None:
        w *= tl.load(norm_weight_ptr + k, mask=in_k, other=0.0).to(tl.float32)[None, :]
    if layer_scale_ptr is not None:
        w *= tl.load(layer_scale_ptr + f, mask=in_f, other=0.0).to(tl.float32)[:, None]
    folded = w.to(folded_weight_ptr.dtype.element_ty)
    tl.store(folded_weight_ptr + f[:, None] * K + k[None, :], folded, mask=inside)
    if colsum_ptr is not None:
        tl.store(colsum_ptr + f, tl.sum(folded.to(tl.float32), 1), mask=in_f)
    if folded_bias_ptr is not None:
        tl.store(folded_bias_ptr + f, folded_bias.to(folded_bias_ptr.dtype.element_ty), mask=in_f)


@jit
def _fold_kernel(
    w_ptrs, bias_ptrs, norm_weight_ptrs, norm_bias_ptrs, layer_scale_ptrs, folded_weight_ptrs, colsum_ptrs,
    folded_bias_ptrs, F,
    K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_F outputs of one projection. Arguments are tuples with an entry for each projection."""
    block = tl.program_id(0)
    for i in tl.static_range(len(w_ptrs)):
        blocks = tl.cdiv(F[i], BLOCK_F)
        if (block >= 0) & (block < blocks):
            _fold_rows(
                w_ptrs[i], bias_ptrs[i], norm_weight_ptrs[i], norm_bias_ptrs[i], layer_scale_ptrs[i],
                folded_weight_ptrs[i], colsum_ptrs[i], folded_bias_ptrs[i], block, F[i], K, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        block -= blocks


def _fold(weights, biases, norms, sizes, dtype):
    """Equation (1): for each group in turn W' [F, K] in `dtype`, its column sums [F] and bias [F] in fp32.

    `norms` holds weight and bias of each LayerNorm in turn; `sizes` the number of projections of each.
    """
    outputs = _fold_fake(weights, biases, norms, sizes, dtype)
    projections = []
    first = 0
    for i, size in enumerate(sizes):
        rows = [len(w) for w in weights[first : first + size]]
        views = zip(*(t.split(rows) for t in outputs[3 * i : 3 * i + 3]), strict=True)
        for j, (weight, colsum, bias) in enumerate(views, first):
            projections.append((weights[j], biases[j], *norms[2 * i : 2 * i + 2], None, weight, colsum, bias))
        first += size
    launch(*zip(*projections, strict=True))
    return outputs


def _pack(weights, biases):
    """Projections packed into one weight [F, K] and one bias [F], which is empty if there is none."""
    outputs = _pack_fake(weights, biases)
    none = (None,) * len(weights)
    rows = [len(w) for w in weights]
    parts = [t.split(rows) if t.numel() else none for t in outputs]
    launch(weights, biases, none, none, none, parts[0], none, parts[1])
    return outputs


def _pack_fake(weights, biases):
    F = sum(len(w) for w in weights)
    bias = next((b for b in biases if b is not None), None)
    weight = weights[0].new_empty(F, weights[0].shape[1])
    return weight, weight.new_empty(0) if bias is None else bias.new_empty(F)


def launch(
    weights: tuple[Tensor, ...],
    biases: Tensors,
    norm_weights: Tensors,
    norm_biases: Tensors,
    layer_scales: Tensors,
    folded: Tensors,
    colsums: Tensors,
    folded_biases: Tensors,
) -> None:
    """Launches the kernel: writes W' of each projection [F_i, K], rows times layer_scale [F_i] if there is one.

    Args:
        weights: [F_i, K] each.
        biases: [F_i], or None, as in all that follow.
        norm_weights: [K].
        norm_biases: [K].
        layer_scales: [F_i].
        folded: outputs W' [F_i, K].
        colsums: outputs [F_i] fp32, or None if not needed.
        folded_biases: outputs [F_i], or None if not needed.
    """
    sizes = tuple(len(w) for w in weights)
    rows, block, options = whole_row_blocks(weights[0].shape[1])
    dense = [tuple(t if t is None else t.contiguous() for t in p) for p in (weights, biases, norm_weights, norm_biases)]
    launch_kernel(
        _fold_kernel, (sum(cdiv(size, rows) for size in sizes),),
        *dense, layer_scales, folded, colsums, folded_biases, sizes,
        K=weights[0].shape[1], BLOCK_F=rows, BLOCK_K=block, **options,
    )  # fmt: skip


def _fold_fake(weights, biases, norms, sizes, dtype):
    outputs = []
    first = 0
    for size in sizes:
        F = sum(len(w) for w in weights[first : first + size])
        K = weights[0].shape[1]
        outputs.append(weights[0].new_empty(F, K, dtype=dtype))
        outputs += [weights[0].new_empty(F, dtype=torch.float32) for _ in range(2)]
        first += size
    return outputs


_fold_op = register(
    "fold",
    "(Tensor[] weights, Tensor?[] biases, Tensor?[] norms, int[] sizes, ScalarType dtype) -> Tensor[]",
    _fold,
    _fold_fake,
)


_pack_op = register("pack", "(Tensor[] weights, Tensor?[] biases) -> (Tensor, Tensor)", _pack, _pack_fake)


def run(groups: Sequence[Group], dtype: torch.dtype) -> list[Folded]:
    """Equation (1) for each group by the kernel, in one launch; arguments as in `fold_groups`."""
    weights = [t for group in groups for t in group.weights]
    biases = [t for group in groups for t in group.biases]
    norms = [t for group in groups for t in group[2:]]
    outputs = _fold_op(weights, biases, norms, [len(group.weights) for group in groups], dtype)
    return [Folded(*outputs[i : i + 3]) for i in range(0, len(outputs), 3)]


class _Fn(torch.autograd.Function):
    """Autograd of fold by equation (3); dtype, norm_weight [K], norm_bias [K], then all weights and all biases.

    Dynamo omits ctx from a call with as many arguments as `forward` has parameters, so they are never four here.
    """

    @staticmethod
    def forward(ctx, dtype, norm_weight, *parts):
        norm_bias, parts = parts[0], parts[1:]
        weights = parts[: len(parts) // 2]
        biases = parts[len(parts) // 2 :]
        ctx.save_for_backward(norm_weight, norm_bias, *weights)
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        (folded,) = run([Group(weights, biases, norm_weight, norm_bias)], dtype)
        ctx.mark_non_differentiable(folded.colsum)
        return folded[:3]

    @staticmethod
    @once_differentiable
    def backward(ctx, dfolded_weight, _, dfolded_bias):
        norm_weight, norm_bias, *weights = ctx.saved_tensors
        weight = torch.cat(weights).float()
        dweight = dfolded_weight.float()
        dnorm_weight = None if norm_weight is None else (dweight * weight).sum(0).to(norm_weight.dtype)
        dnorm_bias = None if norm_bias is None else (dfolded_bias @ weight).to(norm_bias.dtype)
        if norm_weight is not None:
            dweight = dweight * norm_weight.float()
        if norm_bias is not None:
            dweight = dweight + dfolded_bias[:, None] * norm_bias.float()
        rows = [len(w) for w in weights]
        dweights = [d.to(w.dtype) for d, w in zip(dweight.split(rows), weights, strict=True)]
        pairs = zip(dfolded_bias.split(rows), ctx.bias_dtypes, strict=True)
        dbiases = [None if dtype is None else d.to(dtype) for d, dtype in pairs]
        return None, dnorm_weight, dnorm_bias, *dweights, *dbiases


def _inputs(case: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> dict:
    randn, (F, K) = make_randn(device, dtype), (case[a] for a in ("F", "K"))
    weights = tuple(randn(F, K, scale=K**-0.5) for _ in range(case["parts"]))
    biases = tuple(None if i == 1 else randn(F) for i in range(case["parts"]))  # as for BEiT's keys
    return {"weights": weights, "biases": biases, "norm_weight": randn(K), "norm_bias": randn(K), "dtype": dtype}


OP = Op(
    name="fold",
    run=fold,
    reference=reference,
    cases={"one": dict(F=3, K=5, parts=1), "three": dict(F=2, K=4, parts=3)},
    inputs=_inputs,
    ragged={"one": dict(F=70, K=33, parts=1), "three": dict(F=24, K=48, parts=3)},
)
