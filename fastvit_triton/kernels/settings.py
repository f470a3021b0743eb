"""The global settings that choices depend on. Every cache of choices reads them here, and nowhere else.

`choices` are read by this package's code: they are part of the keys of `plan`, of `engine.ways`, of prepared launches,
of records and of CUDA graphs. `operators` are read by PyTorch when it selects operators: they are part of the state of
records, which fix that selection, and of the keys of CUDA graphs. Triton's settings, by which a launch selects a
binary, are `launch.binaries`. `is_observed` is True while something must see each call.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from . import backend, launch, measured

forced: str | None = None  # way of every branch, see `plan.forcing`
assumed: Any = None  # GPU used instead of the device's, a `cost.Gpu`; see `plan.assuming`
observer: Callable | None = None  # called with each choice, see `plan.observing`
direct: bool = os.environ.get("FASTVIT_TRITON_DIRECT", "0") not in ("", "0")  # Inductor launches, see `convert.direct`
cpu_row: Any = None  # an `onednn.Row` used instead of that of this CPU, see `onednn.using_row`
reduced: bool = False  # True while a model is frozen with a reduced precision, see `engine.freeze`
locator: Callable | None = None  # tells where an observed choice is made, see `plan.locating`
region: int | None = None  # number of the region that a trace of `expected` is in, 0 outside; None without a trace

_call_of_modules = nn.Module.__call__
_call_impl_of_modules = nn.Module._call_impl


def choices(kind: str) -> tuple:
    """Settings that this package's choices depend on, for tensors on this type of device."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32",  # also for 16-bit x: a block may promote it
        torch._C._get_deterministic_algorithms(),
        forced,
        assumed,
        backend._switch,
        launch.target,
        measured.in_use,
        cpu_row,
    )


def compiled(kind: str) -> tuple:
    """Settings that compiled code with calls of the kernels depends on, for tensors on this type of device."""
    return choices(kind), reduced, direct


def choices_on_cpu() -> tuple:
    """As `choices`, for tensors on a CPU of which no kernel runs: without what only choices among kernels depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        forced,
        backend._switch,
        measured.in_use,
        cpu_row,
    )


def operators() -> tuple:
    """Settings by which PyTorch selects operators and dtypes, before it calls an operator of one device."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        *torch._C._get_sdp_priority_order(),
        torch._C._get_cudnn_enabled(),  # BatchNorm
        torch._C._get_mkldnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_autocast_enabled("cuda"),  # nn.MultiheadAttention reads it for any device
        torch.get_default_dtype(),
    )


def is_observed() -> bool:
    """True if a mode, transform, tracer, hook, context or patch of PyTorch or of this package observes each call."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or torch.is_anomaly_enabled()  # it names the operator whose gradient is NaN
        or observer is not None
        or launch._overrides is not None
        or _has_any_global_hook()
        or nn.Module.__call__ is not _call_of_modules
        or nn.Module._call_impl is not _call_impl_of_modules
    )
