"""The mixed way of `linear` and `mlp`: a cuBLAS matmul, and one pass for the operations around it.

Math      equations (1) to (3) of `linear`; LN(y) for the next matmul, by equation (2) of `layer_norm`.
Kernels   cuBLAS; a Triton pass for the activation, or in inference one launch for act(x Wᵀ + b), by cuBLASLt or, where
          the row of "fc1" says so, by `linear`; a Triton pass for LayerScale, stochastic depth, residual and the
          next LayerNorm, which writes the dtype of the next matmul, so that autocast casts nothing.
Backward  that of `linear`.
Saved     as in `linear`: x, the pre-activation if there is an activation, row statistics in fp32, and under autocast
          the weight that was cast.
Cost      values per token moved outside the matmuls of a ViT block of width C: 16 C in inference, 8 C with the
          activation in one launch, 4 C if the matmuls accumulate into the stream; eager PyTorch 18 C.
Lent      in a sequence of blocks in bfloat16 inference, proj and fc2 accumulate in place without their biases, whose
          sum the passes of LayerNorm add to what they read: see `argument.Lent`. The stream is rounded without them,
          so errors grow where biases cancel most of their products; float16 could overflow, and adds them at once.
GELU      cuBLASLt's is the tanh form. In bfloat16 inference it also stands for erf's: in the norm over normal values it
          differs by 2e-4, a tenth or less of the rounding of the result, 2.6e-3. In float16 rounding is 3e-4, so erf's
          stays.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choose, launch, settings
from .activation import GATED, activate, gate_of, passes_of
from .argument import Lent, NextNorm, Norm, Normalized
from .launch import cdiv
from .layer_norm import add_and_normalize, normalize_lent, output_dtype, scaled
from .tile import jit, tl

EPILOGUES = {"relu": False, "gelu_tanh": True}  # activations of cuBLASLt → `use_gelu` of torch._addmm_activation
LENDS = (torch.bfloat16,)
FASTER_ON = ("sm_90", "sm_100")  # by published measurements; slower on sm_120


class MixedCall(NamedTuple):
    """Arguments of a mixed call that a fused one does not have."""

    normed: Normalized | Lent | None  # LN(x) from the call that produced x, a `Lent` if that lent x, or None
    next_norm: NextNorm | None  # the norm of the next call, to apply to the output; or None
    dtype: torch.dtype  # of the matmul
    product: Callable  # `linear_fwd`, which computes a matmul and its activation in one launch


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    layer_scale: Tensor | None,
    sample_scale: Tensor | None,
    residual: Tensor | None,
    call: MixedCall,
    save: bool,
) -> tuple[Tensor | None, ...]:
    """Equations (1) to (3), without gradients.

    Args:
        x: [..., K].
        weight: [F, K], or [2F, K] for a gated activation.
        bias: [F] or [2F], or None.
        norm: the LayerNorm or RMSNorm of x, or None.
        activation: as in `linear`.
        layer_scale: [F], or None.
        sample_scale: [B], or None.
        residual: [..., F], or None.
        call: see `MixedCall`.
        save: a backward pass follows.

    Returns:
        (y [..., F], pre-activation, mean and rstd of x for the backward pass, then the fields of `Normalized` for y, or
        as many None without a next norm).
    """
    normed: Any = call.normed
    dtype = call.dtype
    next_norm = call.next_norm
    if next_norm is not None and residual is not None and next_norm.lent is not None:
        _accumulate(x, weight, residual)
        return _outputs(x, *normalize_lent(residual, next_norm.lent, bias, next_norm))
    if norm is not None and isinstance(normed, Lent):
        _, normed = normalize_lent(x, normed, None, NextNorm(norm))
    if norm is None and normed is not None and normed.late_bias is not None:
        _accumulate(x, weight, residual)
        return _outputs(x, residual)
    if norm is not None and (normed is None or normed.y.dtype != dtype):
        _, normed = add_and_normalize(x, None, None, None, norm, dtype, save)
    with torch.autocast(x.device.type, enabled=False):
        operand = x.to(dtype) if norm is None else normed.y
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if not save and bias is not None and activation in EPILOGUES and has_epilogues(x.device):
            rows = operand.reshape(-1, operand.shape[-1])
            h = torch._addmm_activation(bias, rows, weight.t(), use_gelu=EPILOGUES[activation])
            h = pre = h.view(*operand.shape[:-1], -1)
        elif not save and activation is not None and _computes_activation(operand, weight, activation):
            nothing = (None, None, None, False, False)
            h = pre = call.product(operand, weight, bias, None, None, None, 0.0, activation, *nothing)[0]
        else:
            h = pre = F.linear(operand, weight, bias)
            h = h if activation is None else _activated(h, activation)
    next_normed = None
    pre = pre.flatten(0, -2) if save and activation is not None else h.new_empty(0)
    if next_norm is not None and not torch.is_autocast_enabled(x.device.type):
        next_norm = next_norm if output_dtype(h, layer_scale, residual) == dtype else None  # the matmul's dtype
    if residual is not None and not (next_norm is layer_scale is sample_scale is None):
        norm_and_bias = (None, None) if next_norm is None else next_norm
        ends = layer_scale, sample_scale, norm_and_bias[0], dtype, save, norm_and_bias[1]
        h, next_normed = add_and_normalize(h, residual, *ends)
    else:
        h = scaled(h, layer_scale, sample_scale)
        h = h if residual is None else h + residual
    mean, rstd = (None, None) if norm is None else normed[1:3]
    none = h.new_empty(0, dtype=torch.float32)
    return h, pre, none if mean is None else mean, none if rstd is None else rstd, *(next_normed or (None,) * 5)


@jit(do_not_specialize=["M"])
def _activation_kernel(
    h_ptr, y_ptr, M, F, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """One program: a tile of act(h) [M, F]; of act(gate) · up for h [M, 2F] if GATED."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (m < M)[:, None] & (f < F)[None, :]
    at = m[:, None] * (2 * F if GATED else F) + f[None, :]
    y = activate(
        tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION, y_ptr.dtype.element_ty == tl.float32
    )
    if GATED:
        y *= tl.load(h_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + m[:, None] * F + f[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def _activated(h: Tensor, activation: str) -> Tensor:
    """The activation of h, [..., F] or gated [..., 2F] → [..., F], in one launch, without gradients."""
    gated = activation in GATED
    F = h.shape[-1] // (2 if gated else 1)
    y = h.new_empty(*h.shape[:-1], F)
    if M := math.prod(h.shape[:-1]):
        launch.launch(
            _activation_kernel, (cdiv(M, 8), cdiv(F, 512)),
            h, y, M, F, ACTIVATION=gate_of(activation), GATED=gated,
            BLOCK_M=8, BLOCK_F=512, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def has_epilogues(device: torch.device) -> bool:
    """True if a matmul with its activation in cuBLASLt's epilogue is faster on this device than two launches."""
    on_gpu = device.type == "cuda" or launch.target is not None  # on a CPU the operator computes another GELU
    return on_gpu and launch.architecture(device) in FASTER_ON


def _computes_activation(x: Tensor, weight: Tensor, activation: str) -> bool:
    """True if `linear` is expected to compute act(x Wᵀ + b) faster than a BLAS matmul and a pass."""
    F, K = weight.shape
    sizes = (math.prod(x.shape[:-1]), K, F, passes_of(activation))
    return x.numel() > 0 and weight.is_contiguous() and choose.computes_fc1(x, sizes)


def may_lend(x: Tensor) -> bool:
    """True if a block may hand on the stream x without its biases, see the header."""
    return x.dtype in LENDS and not settings.exact


def takes_tanh_for_erf(x: Tensor) -> bool:
    """True if the GELU of this call may be its tanh form, see the header; autograd needs erf's."""
    return not torch.is_grad_enabled() and has_epilogues(x.device) and launch.product_dtype(x) == torch.bfloat16


def _accumulate(x: Tensor, weight: Tensor, residual: Any) -> None:
    """Adds x Wᵀ to the residual in place: one launch, no gradients."""
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())


def _outputs(x: Tensor, y: Any, normed: Normalized | None = None) -> tuple[Tensor | None, ...]:
    """What `forward` returns without gradients."""
    none = x.new_empty(0)
    return y, none, none, none, *(normed or (None,) * 5)
