"""Products on a CPU by oneDNN, which PyTorch ships, with the activation or the residual in the same pass.

Math      y = act(x Wᵀ + b)                       [M, F]                                   (1)
          y = x Wᵀ + b + residual, or (x Wᵀ + b) ∘ gate                                     (2)
          int8: q(x) = round(x / s), s = max|x| / 127 of each row; q(W) alike, once         (3)
                y = s · s_W · q(x) q(W)ᵀ + b, the product in int32                           (4)
Backward  dx = dy W, dW = dyᵀ x, db = Σ dy, by the same operator; activations and sums by PyTorch. It can be
          differentiated again.
Kernels   torch.ops.mkldnn._linear_pointwise. PyTorch's own float32 products on a CPU are MKL's, which uses no AVX-512
          on AMD. The operator is private and has no formula for gradients (a backward pass through it leaves every
          `.grad` None), so nothing else in the package calls it, and each pair of dtype and post-operation is tried
          on a small product before it is used. Products of float32 are in float32 unless the user lets PyTorch reduce
          them, by torch.set_float32_matmul_precision("medium") on a CPU with bfloat16 instructions.
Graphs    In graphs of torch.compile the product is one opaque op, `product_in_graph`, with the same gradients.
Saved     x and W, as eager PyTorch.
Cost      2·M·K·F flops; without packing, W is copied into oneDNN's layout in each call.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from . import backend, launch, measured, settings
from .activation import ACTIVATIONS, apply_activation
from .op import cast, register

POST_OPERATIONS = {  # activation → the operator's names of it and of its form
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "hardswish": ("hardswish", ""),
}
BINARY = ("add", "mul")  # post-operations with a second operand
PLAIN = (Tensor, torch.nn.Parameter)
LEAST = 2.0**-100  # of a row's largest value in int8, so that a row of zeros divides by no zero
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = Path(__file__).parent / "tuned" / "cpu.json"
PHASES = ("inference", "frozen", "training")
MAX_ROWS = 64  # numbers of rows for which oneDNN makes its code: 0.5 MB for each product of them is kept
PRECISIONS = ("float32", "bf16", "int8")  # of the products of frozen models
REMEDY = "run `fastvit-triton tune`, or set FASTVIT_TRITON_BACKEND=onednn"  # without a row


class PackedWeight(NamedTuple):
    """Weight and bias of a product in oneDNN's layout, kept by `engine.freeze`; inference only."""

    weight: Tensor  # [F, K] in the layout, also in bfloat16 or int8; it can be neither copied nor pickled
    bias: Tensor | None  # [F] in the weight's dtype, for int8 in float32; or None
    scaled: bool = False  # True if the LayerScale is multiplied into both
    scales: Tensor | None = None  # of an int8 weight, [F]: s_W of equation (4)


@dataclass(frozen=True, eq=False)
class OneDnnRow:
    """The fewest multiplications for which oneDNN is faster, by dtype and phase; a key of caches, by identity."""

    fewest: dict[str, dict[str, float]]


@functools.cache
def rows() -> dict[str, Any]:
    """The committed table: name of a CPU → dtype → phase → the fewest multiplications for which oneDNN is faster."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["cpus"]


def row() -> dict[str, dict[str, float]]:
    """The row of this machine's CPU, or that of `using_row`: dtype → phase → fewest multiplications; may be empty."""
    return _row_of(measured.cpu_name()) if settings.cpu_row is None else settings.cpu_row.fewest


@functools.cache
def _row_of(cpu: str) -> dict[str, dict[str, float]]:
    return {dtype: phases["from"] for dtype, phases in rows().get(cpu, {}).items()}


@contextlib.contextmanager
def using_row(fewest: dict[str, dict[str, float]] | None) -> Iterator[None]:
    """Context in which `row` returns this, such as {"float32": {"inference": 0}}; {} is that of an unknown CPU."""
    before = settings.cpu_row
    settings.cpu_row = None if fewest is None else OneDnnRow(fewest)
    try:
        yield
    finally:
        settings.cpu_row = before


@functools.cache
def refusal(dtype: torch.dtype, operation: str | None = None) -> str | None:
    """Why oneDNN's product with this post-operation is not used; None if it gives the right result on a small product.

    Args:
        dtype: of the operands.
        operation: a name in `POST_OPERATIONS` or `BINARY`, "packed" or "int8" for packed weights, or None.
    """
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return "this CPU has no float16 products"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 products"
    try:
        # the result is cached, so it must not depend on modes that are active in the first call
        with torch.no_grad(), torch.device("cpu"), _disable_current_modes():
            generator = torch.Generator().manual_seed(0)
            x, weight, other = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(3))
            bias = torch.randn(16, generator=generator).to(dtype)
            if operation == "packed":
                result = _call(x, _pack(weight, 16), bias)
            elif operation == "int8":
                result = _int8_product(x, pack(weight, bias, None, 16, "int8"))
            elif operation in BINARY:
                result = _call(x, weight, bias, other=other, operation=operation)
            else:
                result = _call(x, weight, bias, activation=operation)
            expected = F.linear(x.double(), weight.double(), bias.double())
            if operation in BINARY:
                expected = expected + other.double() if operation == "add" else expected * other.double()
            elif operation in ACTIVATIONS:
                expected = ACTIVATIONS[operation](expected)
    except (AttributeError, RuntimeError) as error:
        return f"oneDNN's product in {dtype} fails: {str(error).splitlines()[0]}"
    wrong = float((result.double() - expected).norm() / expected.norm())
    if result.dtype != dtype or not wrong <= (1 / 32 if operation == "int8" else 8 * torch.finfo(dtype).eps):
        return f"oneDNN's product in {dtype} with {operation or 'bias'} is wrong by {wrong:.1e}"
    return None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products in this dtype never run by oneDNN on this device; None if it depends on their size."""
    if device.type != "cpu":
        return f"oneDNN runs on a CPU, this is {device.type}"
    if dtype not in DTYPES:
        return f"{dtype} always runs on PyTorch"
    if not torch._C._get_mkldnn_enabled():
        return "torch.backends.mkldnn is disabled"
    return refusal(dtype)


def is_observed() -> bool:
    """True while a trace, mode or transform must see PyTorch's own operators; `replay` records any operator."""
    if torch._C._len_torch_function_stack():
        stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        if not all(isinstance(mode, DeviceContext) for mode in stack):
            return True
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return bool(
        torch.compiler.is_compiling()
        or not all(isinstance(mode, launch.LaunchRecorder) for mode in modes)
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def pays(dtype: torch.dtype, macs: float, phase: str) -> bool:
    """True if this CPU's row says that oneDNN is faster for a product with this many multiplications.

    Args:
        dtype: of the product.
        macs: multiplications.
        phase: one of `PHASES`.
    """
    return macs >= row().get(_name_of(dtype), {}).get(phase, math.inf)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def product(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Equation (1), then (2): the activation, the gate and the residual in this order, each if it is given.

    Args:
        x: [..., K].
        weight: [F, K], or packed with its bias.
        bias: [F], or None.
        activation: as in `linear`, not gated.
        residual: [..., F], added last.
        gate: [..., F], multiplied last.
    """
    if isinstance(weight, PackedWeight):
        if weight.scales is not None:
            return _finished(_int8_product(x, weight), activation, residual, gate)
        weight, bias = weight[:2]
        x = x.to(weight.dtype)
    operands = x, weight, bias, residual, gate
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if not x.numel() or weight.dtype != x.dtype:
        y = F.linear(x, weight, bias)
    elif learns:
        y = _Product.apply(x, weight, bias, _call)
    else:
        alone = sum(part is not None for part in (activation, residual, gate)) == 1  # one post-operation
        other, operation = (residual, "add") if gate is None else (gate, "mul")
        if alone and other is not None and other.dtype == x.dtype and refusal(x.dtype, operation) is None:
            return _call(x, weight, bias, other=other, operation=operation)
        if activation in POST_OPERATIONS and refusal(x.dtype, activation) is None:
            y = _call(x, weight, bias, activation=activation)
            activation = None
        else:
            y = _call(x, weight, bias)
    return _finished(y, activation, residual, gate)


def _finished(y: Tensor, activation: str | None, residual: Tensor | None, gate: Tensor | None) -> Tensor:
    """Equations (1) and (2) for a product y that has its bias."""
    y = y if activation is None else apply_activation(y, activation)
    y = y if gate is None else y * gate
    return y if residual is None else y + residual


def _int8_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """Equations (3) and (4) in float32; x is shifted by 128, as oneDNN multiplies unsigned by signed bytes."""
    assert packed.scales is not None
    largest = x.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
    shifted = torch.addcmul(x.new_full((), 128.5), x, 127 / largest).to(torch.uint8)  # rounds, as it cuts the fraction
    zeros = torch.zeros_like(packed.scales, dtype=torch.int32)
    y = torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 128, packed.weight, packed.scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    scale = largest.div_(127)
    return y.mul_(scale) if packed.bias is None else torch.addcmul(packed.bias, y, scale)


class Rule(NamedTuple):
    """What decides whether products in a dtype run by oneDNN on this machine."""

    runs: bool  # True if some or all of them do
    why: str  # what says so, or why none does, in a clause


TUNED = "blocks that `fastvit-triton tune` measured run as it found"


def rule(device: torch.device, dtype: torch.dtype) -> Rule:
    """What decides whether products in this dtype on this device run by oneDNN, for reports."""
    if settings.forced is None and backend.backend() == "torch":
        return Rule(False, "FASTVIT_TRITON_BACKEND is torch")
    if (reason := why_not(device, dtype)) is not None:
        return Rule(False, reason)
    if forced():
        return Rule(True, "in every block, because FASTVIT_TRITON_BACKEND is onednn")
    ways, limits = set(measured.of(device).ways.values()), row().get(_name_of(dtype))
    if limits:
        sizes = ", ".join(f"{macs:,.0f} in {phase}" for phase, macs in limits.items()).replace("in frozen", "if frozen")
        more = f"; {TUNED}" if ways else ""
        return Rule(True, f"where a block's mean GEMM has at least this many multiplications: {sizes}{more}")
    if "onednn" in ways:
        return Rule(True, "in blocks for which `fastvit-triton tune` measured that it is faster")
    if ways:
        return Rule(False, "`fastvit-triton tune` measured that PyTorch's products are faster")
    if limits is not None:
        return Rule(False, "measurements on this CPU say that PyTorch's products are faster")
    return Rule(False, f"there is no row for this CPU: {REMEDY}")


def product_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` as one opaque op, which runs oneDNN's product; for graphs of compilers, also on fake tensors.

    Args:
        x: [..., K].
        weight: [F, K].
        bias: [F], or None.
    """
    if bias is None:
        return _Product.apply(*cast(x, weight), None, _product_op)
    return _Product.apply(*cast(x, weight, bias), _product_op)


def forced() -> bool:
    """True if a context or the switch says that every product runs by oneDNN."""
    return settings.forced == "onednn" or (backend.backend() == "onednn" and settings.forced is None)


def unlisted(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing asks for oneDNN's products in this dtype; None if a context, the switch or a measurement does."""
    if device.type != "cpu" or launch.target is not None:
        return "oneDNN's products run on a CPU"
    if backend.backend() not in ("auto", "onednn"):
        return "FASTVIT_TRITON_BACKEND excludes oneDNN's products"
    if forced() or settings.reduced:
        return None
    listed = settings.forced is None and (row().get(_name_of(dtype)) or measured.of(device).ways)
    return None if listed else "no measurement says that oneDNN's products are faster on this CPU"


def product_refusal(x: Tensor, weight: Tensor, training: bool) -> str | None:
    """Why a linear layer of a captured graph stays PyTorch's; None if oneDNN's product replaces it.

    Args:
        x: [..., K]; for a symbolic number of rows, that of `settings.TRACED` is used, so that the choice adds no guard.
        weight: [F, K].
        training: True if gradients of its output are wanted.
    """
    dtype = launch.product_dtype(x)
    reason = unlisted(x.device, dtype) or why_not(x.device, dtype)
    if reason is None and not all(t.layout is torch.strided for t in (x, weight)):
        reason = "it is not dense"
    if reason is not None or forced():
        return reason
    if not all(isinstance(size, int) for size in weight.shape):
        return "its weight has symbolic sizes"
    rows = math.prod(x.shape[:-1] if all(isinstance(size, int) for size in x.shape) else settings.TRACED)
    if pays(dtype, rows * math.prod(weight.shape), "training" if training else "inference"):
        return None
    return "no measurement says that oneDNN's product of this size is faster on this CPU"


def usable(x: Tensor) -> bool:
    """True if products of x may run by oneDNN in this call, if they are large enough."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # a trace cannot follow
        return False
    if type(x) not in PLAIN:  # sharded, quantised or traced
        return False
    dtype = launch.product_dtype(x)
    if unlisted(x.device, dtype) is not None or is_observed() or why_not(x.device, dtype) is not None:
        return False
    return _has_code(x.numel() // max(x.shape[-1], 1)) if x.dim() else True


_rows: set[int] = set()


def _has_code(rows: int) -> bool:
    """True for the first MAX_ROWS numbers of rows in this process; further ones are left to PyTorch."""
    if rows not in _rows and len(_rows) >= MAX_ROWS:
        return False
    _rows.add(rows)
    return True


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    other: Tensor | None = None,
    operation: str = "",
) -> Tensor:
    """The operator, without autograd."""
    if other is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other.contiguous(), weight, bias, operation)
    post, form = ("none", "") if activation is None else POST_OPERATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, post, [], form)


def _in_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operator, or PyTorch's product where it does not run: a compiled graph may outlive what it was chosen for."""
    if x.numel() and weight.numel() and why_not(x.device, x.dtype) is None:
        return _call(x, weight, bias)
    return F.linear(x, weight, bias).contiguous()


def _in_op_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_product_op = register("product", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _in_op, _in_op_fake)


class _Product(torch.autograd.Function):
    """x Wᵀ + b by `_call` or by the op, with gradients by the same, which can be differentiated again."""

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return call(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        dw = None
        db = None
        if need_x:
            dx = _differentiable(dy, weight.t(), ctx.call)
        if need_weight:
            dw = _differentiable(rows.t(), x.reshape(-1, x.shape[-1]).t(), ctx.call)
        if need_bias:
            db = rows.sum(0)
        return dx, dw, db, None


def _differentiable(x: Tensor, weight: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """x Wᵀ, recorded if gradients of gradients are wanted."""
    return _Product.apply(x, weight, None, call) if torch.is_grad_enabled() else call(x, weight, None)


def _pack(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def pack(
    weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, rows: int, precision: str = "float32"
) -> PackedWeight:
    """A product's weight and bias in oneDNN's layout, for about this many rows of x.

    Args:
        weight: [F, K].
        bias: [F], or None.
        layer_scale: [F], multiplied into both; or None.
        rows: rows of x.
        precision: "bf16" or "int8", see `PRECISIONS`; "float32" keeps the weight's dtype.
    """
    if layer_scale is not None:
        weight = weight * layer_scale[:, None]
        bias = None if bias is None else bias * layer_scale
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if precision == "int8":
        scales = weight.abs().amax(1).clamp(min=LEAST) / 127
        rounded = (weight / scales[:, None]).round().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(rounded, [rows, weight.shape[1]])
        return PackedWeight(packed, bias, layer_scale is not None, scales)
    if precision == "bf16":
        weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    return PackedWeight(_pack(weight.contiguous(), rows), bias, layer_scale is not None)
