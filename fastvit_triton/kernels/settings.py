"""The global settings that choices depend on. Every cache of choices reads them here, and nowhere else.

`choices` are read by this package's code: they are part of the keys of `choose`, `engine.ways`, prepared launches,
records and CUDA graphs. `operators` are read by PyTorch when it selects operators: they are part of the state of
records, which fix that selection, and of the keys of CUDA graphs. Triton's settings, by which a launch selects a
binary, are `launch.binaries`. `is_observed` is True while something must see each call.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from . import backend, launch, measured
from .sizes import WAYS

TRACED = (256, 197)  # (images, tokens) assumed while tracing, so that choices do not depend on them
forced: str | None = None  # way of every branch, see `forcing`
assumed: str | None = None  # name of the GPU used instead of the device's, see `assuming`
observer: Callable | None = None  # called with each choice, see `observing`
direct: bool = os.environ.get("FASTVIT_TRITON_DIRECT", "0") not in ("", "0")  # Inductor launches, see `convert.direct`
exact: bool = os.environ.get("FASTVIT_TRITON_EXACT", "0") not in ("", "0")  # none of the roundings that `mixed` adds
cpu_row: Any = None  # an `onednn.Row` used instead of that of this CPU, see `onednn.using_row`
reduced: bool = False  # True while a model is frozen with a reduced precision, see `engine.freeze`
locator: Callable | None = None  # tells where an observed choice is made, see `locating`
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


def forcing(way: str) -> contextlib.AbstractContextManager[None]:
    """Context in which every branch runs in this way if possible, and ops run our kernels unless it is "plain".

    What is an op of its own inside a mixed branch, fc1 with its activation, still runs as its row says.

    Raises:
        ValueError: the way is not "fused", "mixed", "onednn" or "plain".
    """
    if way not in (*WAYS, "onednn"):
        raise ValueError(f"way is {way!r}; use one of {', '.join(WAYS)} or onednn")
    return _setting("forced", way)


def assuming(gpu: str) -> contextlib.AbstractContextManager[None]:
    """Context in which choices are made for this GPU on any device; see `launch.targeting` for its architecture.

    Args:
        gpu: name of its table in tuned/choices.
    """
    return _setting("assumed", gpu)


def unobserved() -> contextlib.AbstractContextManager[None]:
    """Context in which no observer is called, because the choices are not followed."""
    return _setting("observer", None)


def observing(found: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Context in which `found` is called with each `choose.Choice`."""
    return _setting("observer", found)


def locating(found: Callable[[], str | None]) -> contextlib.AbstractContextManager[None]:
    """Context in which observed choices have the path that `found` returns, which is called where one is made."""
    return _setting("locator", found)


@contextlib.contextmanager
def _setting(name: str, value: object) -> Iterator[None]:
    this = sys.modules[__name__]
    before = getattr(this, name)
    setattr(this, name, value)
    try:
        yield
    finally:
        setattr(this, name, before)
