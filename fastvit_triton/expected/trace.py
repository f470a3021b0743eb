"""Traces what a call would launch on any GPU: operators and kernels, their bytes and flops. Nothing runs.

A PyTorch operator that writes memory counts as one launch, or as the number in LAUNCHES. It reads each operand once and
writes each result once; views and allocations are free, and cache hits are ignored. Inside our operators, each Triton
launch moves each of its tensors once, and PyTorch operators around it count. A multiply-add of a product is 2 flops.

Tensors are on the CPU, so that autocast and scaled_dot_product_attention work, but their memory is not accessed and
results are uninitialised, except for what is computed from integers and constants alone, see `values`. Inside
`kernels.launch.targeting` they count as GPU tensors.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import conv_flop_count, flop_registry

from ..engine.replay.recorder import ALLOCATE, READERS
from ..engine.values import (
    CONSTANTS,
    LARGE,
    described,
    has_values,
    is_known,
    mark,
    positions,
    reserved,
    written_arguments,
)
from ..kernels import launch, linear_backward, settings, tile
from ..kernels.op import REGISTERED
from ..kernels.sizes import seen_pairs
from . import launched
from .events import FLASH, Count, Event, Piece
from .inductor import counted

# CUDA kernels of a PyTorch operator, if not 1, by torch 2.13: flash_bwd_launch_template.h (Δ; dq, dk, dv; dq from fp32
# sums), layer_norm_kernel.cu (dx; dγ and dβ, up to 65,536 rows), Convolution.cpp (bias and its gradient are apart)
LAUNCHES = {f"{name}_backward": 3 for name in FLASH} | {"native_layer_norm_backward": 2}

# operators that copy their operands first, unless they are contiguous, by layer_norm_kernel.cu of torch 2.13
CONTIGUOUS = ("native_layer_norm", "native_layer_norm_backward")
# operators that PyTorch's table of flops lacks → those that have as many
SAME_FLOPS = {"addmm_": "addmm", "_addmm_activation": "addmm", "baddbmm_": "baddbmm"}

_storages = itertools.count()


@dataclass
class Trace:
    """Trace of a call."""

    events: list[Event] = field(default_factory=list)  # operators and launches, in order
    # host synchronisations (reading a value, or copying host values), and operators of ours whose results differ from
    # those of their fake implementation
    findings: list[str] = field(default_factory=list)
    peak: int = 0  # most bytes allocated at once, besides weights and inputs; without workspaces of libraries

    @property
    def count(self) -> Count:
        """Sum over the events; those of a region are grouped as Inductor does."""
        return counted(self.events)


class _Tracer(TorchDispatchMode):
    """Records operators and launches in a trace; runs views, allocations, and operators on known values."""

    def __init__(self, enters: bool) -> None:
        super().__init__()
        self.trace = Trace()
        self.enters = enters
        self.op = ""
        self.allocated = 0  # bytes

    def __torch_dispatch__(self, function: OpOverload, kinds: object, arguments: tuple = (), named: dict | None = None):
        named = named or {}
        name = function.name().split("::")[1].split(".")[0]
        if function.namespace == "fastvit_triton":
            return self._enter(name, arguments)
        tensors = _tensors((arguments, named))
        if name == "nonzero" and _all_true and not has_values(tensors[0]):
            places = reserved(torch.empty(tensors[0].numel(), tensors[0].dim(), dtype=torch.int64, device="meta"))
            self._add(name, tensors, (places,), 0)
            return places
        if name in READERS:
            self.read(name, *tensors)
        if name == "index" and (masks := [t for t in arguments[1] if t is not None and t.dtype == torch.bool]):
            self.read(name, *masks)
            arguments = (arguments[0], positions(arguments[1]))
        if name == "lift_fresh" and arguments[0].dim():  # torch.tensor; assigned scalars are filled in on the device
            self.trace.findings.append(f"host copies values for {name}{f' in {self.op}' if self.op else ''}")
        if _is_composite(function):  # such as F.linear in one of our operators, below autograd
            with self:
                return function.decompose(*arguments, **named)
        if function.is_view or not _gives_tensors(function):
            return function(*arguments, **named)
        on_meta = arguments, {k: torch.device("meta") if k == "device" and v else v for k, v in named.items()}
        on_meta = tree_map_only(Tensor, described, on_meta)
        if name in ALLOCATE:
            return self._allocate(mark(reserved(function(*on_meta[0], **on_meta[1])), False, empty=True))
        values_known = is_known(function, name, tensors)
        if values_known and (not tensors or name in CONSTANTS):
            values_known = all(t.nbytes < LARGE for t in _tensors(function(*on_meta[0], **on_meta[1])))
        call = (arguments, named) if values_known else on_meta
        outputs = results = function(*call[0], **call[1])
        if name == "convolution" and suggest_memory_format(tensors[0]) == torch.channels_last:
            outputs = results = results.to(memory_format=torch.channels_last)  # as cuDNN's, unlike on the meta device
        memory = {t.untyped_storage()._cdata for t in _tensors(call)}
        if function._schema.is_mutable:
            outputs = results if values_known else written_arguments(function, arguments, named, results)
        elif all(t.untyped_storage()._cdata in memory for t in _tensors(results)):  # such as _unsafe_view
            return results if values_known else function(*arguments, **named)
        elif not values_known:
            outputs = tree_map_only(Tensor, reserved, results)
        for t in _tensors(outputs):
            mark(t, values_known)
            if t.untyped_storage()._cdata not in memory:
                self._allocate(t)
        written = outputs[:2] if name in FLASH else outputs  # the others hold the state of random numbers
        if name in CONTIGUOUS:
            for t in tensors:
                if t.dim() > 1 and not t.is_contiguous():
                    self._add("clone", (t,), (t,), 0)
        name += "_tanh" if named.get("approximate") == "tanh" else ""
        if name == "upsample_bilinear2d" and suggest_memory_format(tensors[0]) != torch.channels_last:
            name += "_channels_first"  # another kernel
        again, sums = [], []
        if name == "_scaled_dot_product_flash_attention_backward":  # Δ reads dO and O; the sums of dQ are fp32
            do, q, _, _, o, *_ = arguments
            again, sums = [do, o], [reserved(torch.empty(q.shape, dtype=torch.float32, device="meta"))]
        elif name == "native_layer_norm_backward" and any(arguments[-1][1:]):  # the sums of dγ and dβ
            again = [*arguments[:2]]
        elif name == "convolution" and len(tensors) > 2:  # the bias is added to the result
            sums = [outputs]
        elif name == "convolution_backward" and arguments[-1][2]:  # the gradient of the bias
            again = [arguments[0]]
        flops = self._flops(function, arguments, named, outputs)
        self._add(name, [*tensors, *again, *sums], [*_tensors(written), *sums], flops)
        return outputs

    def _enter(self, name: str, arguments: tuple) -> object:
        """Traces the launches in one of our operators, and compares its results with those of its fake."""
        body, fake = REGISTERED[name]
        expected = fake(*tree_map_only(Tensor, described, arguments))
        flops = OUR_FLOPS[name](*arguments) if name in OUR_FLOPS else 0
        if not self.enters:
            outputs = tree_map_only(Tensor, lambda t: self._allocate(reserved(t)), expected)
            self._add(name, _tensors(arguments), _tensors(outputs), flops, ours=True)
            return outputs
        outer = self.op
        self.op = name
        try:
            with self:
                outputs = body(*arguments)
        finally:
            self.op = outer
        self.trace.events.append(Event(name, name, True, 0, (), (), flops, region=settings.region or 0))
        got, wanted = ([_facts(t) for t in tree_leaves(part)] for part in (outputs, expected))
        if got != wanted:
            self.trace.findings.append(f"{name} gives {got}, its fake {wanted}")
        return outputs

    def read(self, name: str, *tensors: Tensor) -> None:
        """Records that the host waits for values; raises RuntimeError if they are not known."""
        self.trace.findings.append(f"host waits for {name}{f' in {self.op}' if self.op else ''}")
        if not all(map(has_values, tensors)):
            raise RuntimeError(
                f"{name} reads a value that depends on weights, images or meta tensors, which have none when they are "
                "counted; integer inputs on the CPU, such as a grid, have values"
            )

    def host(self, name: str) -> Callable:
        """Replaces the method of Tensor that copies its values to the host without an operator."""

        def copied(t: Tensor, *inputs: Any, **named: Any) -> Any:
            self.read(name, t)
            return getattr(torch._C.TensorBase, name)(t, *inputs, **named)

        return copied

    def launched(self, kernel: tile.Kernel, grid: object, arguments: tuple, fixed: dict[str, object]) -> None:
        """Replaces `kernels.launch.run`: records a launch."""
        tensors = {(t.data_ptr(), t.shape): t for t in _tensors(arguments)}
        module = kernel.fn.__module__.rsplit(".", 1)[-1].removesuffix("_backward")
        one = launched.Launched.of(f"{module}.{kernel.fn.__name__}", kernel, grid, arguments, fixed)
        self._add(one.name, tensors.values(), (), int(launched.work(one).flops), ours=True, size=launched.size(one))

    def _add(
        self,
        name: str,
        read: Iterable,
        written: Iterable,
        flops: int,
        ours: bool = False,
        size: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        reads, writes = (tuple(map(self._piece, tensors)) for tensors in (read, written))
        launches = 1 if ours else _launches(name, reads, writes)
        counted = 0 if ours and self.op in OUR_FLOPS else flops  # else counted for the whole operator
        facts = counted, size, settings.region or 0, flops if ours else 0
        self.trace.events.append(Event(name, self.op, ours, launches, reads, writes, *facts))

    def _allocate(self, t: Tensor) -> Tensor:
        """Counts the memory of a new tensor until it is freed; returns the tensor."""
        storage = t.untyped_storage()
        if "freed" not in vars(storage):
            vars(storage)["freed"] = weakref.finalize(storage, self._free, storage.nbytes())
            self.allocated += storage.nbytes()
            self.trace.peak = max(self.trace.peak, self.allocated)
        return t

    def _free(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def _piece(self, t: Tensor) -> Piece:
        facts = vars(t.untyped_storage())  # of the same Python object while the storage exists
        if "number" not in facts:
            facts["number"] = next(_storages)
        return Piece(facts["number"], int(t.storage_offset()), tuple(t.shape), _nbytes(t))

    def _flops(self, function: OpOverload, arguments: tuple, named: dict, outputs: object) -> int:
        if self.op in OUR_FLOPS:
            return 0  # counted for the whole operator
        packet = function.overloadpacket
        packet = getattr(torch.ops.aten, SAME_FLOPS.get(packet.__name__, packet.__name__))
        if packet in flop_registry:
            flops = flop_registry[packet](*arguments, **named, out_val=outputs)
        else:
            flops = _products(*arguments[:3]) if packet.__name__ in FLASH else 0
        given = {a.name: value for a, value in zip(function._schema.arguments, arguments, strict=False)} | named
        if packet is torch.ops.aten.convolution_backward:  # PyTorch counts dW of a grouped one as that of a dense one
            dy, x, weight = (t.shape for t in arguments[:3])
            flops = sum(given["output_mask"][:2]) * conv_flop_count(x, weight, dy, given["transposed"])
        if given.get("is_causal"):  # PyTorch counts the pairs that the mask leaves out, and its kernels skip them
            Nq, Nk = (given[name].shape[-2] for name in ("query", "key"))
            flops = flops * seen_pairs(Nq, Nk, True) // max(Nq * Nk, 1)
        return flops


_all_true = False


@contextlib.contextmanager
def assuming_true() -> Iterator[None]:
    """Context in which masks whose values are not known select every place, so that no more is read than counted."""
    global _all_true
    before = _all_true
    _all_true = True
    try:
        yield
    finally:
        _all_true = before


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Context in which operators and launches are recorded but not run.

    Without Triton, each operator of ours counts as one launch. Reading a value that is not known raises RuntimeError.
    """
    tracer = _Tracer(enters=tile.MISSING is None)
    stand_ins = [
        (launch, "run", tracer.launched),
        (linear_backward, "matmul_fp32", functools.partial(torch.mm, out_dtype=torch.float32)),  # as on NVIDIA GPUs
        (Tensor, "tolist", tracer.host("tolist")),
        (Tensor, "numpy", tracer.host("numpy")),
    ]
    before = [owner.__dict__.get(name) for owner, name, _ in stand_ins]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator for an encoder layer, without a meta kernel
    for stand_in in stand_ins:
        setattr(*stand_in)
    outside, settings.region = settings.region, 0
    try:
        with tracer:
            yield tracer.trace
    finally:
        settings.region = outside
        torch.backends.mha.set_fastpath_enabled(fast)
        for (owner, name, _), original in zip(stand_ins, before, strict=True):
            delattr(owner, name) if original is None else setattr(owner, name, original)


def _tensors(structure: object) -> list[Tensor]:
    """The tensors in a structure, each once."""
    return list({id(t): t for t in tree_leaves(structure) if isinstance(t, Tensor)}.values())


@functools.cache
def _is_composite(function: OpOverload) -> bool:
    """True if the operator decomposes into others, having no kernel of its own."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")


@functools.cache
def _gives_tensors(function: OpOverload) -> bool:
    return any("Tensor" in str(result.type) for result in function._schema.returns) or function._schema.is_mutable


def _facts(t: object) -> object:
    """Properties that our operator and its fake must share; strides of axes of size 1 are ignored."""
    if not isinstance(t, Tensor):
        return t
    return t.dtype, tuple(t.shape), tuple(step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1)


def _launches(name: str, reads: tuple[Piece, ...], writes: tuple[Piece, ...]) -> int:
    """Number of CUDA kernels of a PyTorch operator."""
    if name == "convolution":
        return 1 + (len(reads) > 2)  # image and weight; a bias is added separately
    if name == "convolution_backward":
        return sum(bool(piece.shape) for piece in writes)
    return LAUNCHES.get(name, 1)


def _products(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> int:
    """Flops of q kᵀ and of the product of probabilities and v."""
    pairs = math.prod(q.shape[:-2]) * seen_pairs(q.shape[-2], k.shape[-2], causal)
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def _nbytes(t: Tensor) -> int:
    """Bytes of the memory of a tensor; expanded axes count once."""
    return t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)


OUR_FLOPS = {
    "attention_fwd": lambda q, k, v, *rest: _products(q, k, v, rest[6:] == (True,)),
    "window_attention_fwd": lambda qkv, bias, scales, pad, heads, window, *_: 4 * qkv.numel() // 3 * math.prod(window),
    "linear_fwd": lambda x, weight, *_: 2 * x.numel() * len(weight),
    "mlp_fwd": lambda x, weight, *_: 4 * x.numel() * len(weight),  # both matmuls; input and output have x's width
    "depthwise_fwd": lambda x, taps, bias, stride, *_: 2 * len(taps) * x[:, ::stride, ::stride].numel(),
    "deformable_attention_fwd": lambda value, shapes, points, *_: 5 * points.numel() * value.shape[3],  # x and y
    "patch_embed_fwd": lambda image, weight, *_: 2 * image.numel() * len(weight),  # patches cover the image
}
