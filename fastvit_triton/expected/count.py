"""Predicts a model's cost on any GPU from its shapes: launches, bytes, flops and time. No GPU is needed."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..engine.freeze import freeze
from ..engine.values import given, without_weights
from ..engine.ways import SIZES
from ..expected.blocks import host_us, saved_values
from ..expected.gpus import Gpu
from ..kernels import tile
from ..kernels.backend import using_backend
from ..kernels.choose import Choice
from ..kernels.launch import targeting
from ..kernels.settings import assuming, observing
from . import times, work
from .cuda_operators import as_on_cuda
from .events import Count
from .inductor import inductor_count
from .trace import Trace, tracing

WEIGHTS = (torch.empty, torch.rand, torch.randn, torch.normal)


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of an inference call, or of a training step without optimiser; nothing is measured."""

    eager: Count  # with PyTorch's operators
    compiled: Count  # under torch.compile, estimated by `inductor`
    ours: Count  # with this package's defaults
    frozen: Count | None  # the same after `freeze`; None in training
    choices: tuple[Choice, ...]  # for branches and ops, in call order
    gpu: Gpu  # its rates
    training: bool  # it includes the backward pass
    traces: tuple[Trace, ...] = field(repr=False, compare=False)  # of eager PyTorch, ours, and in inference frozen

    @property
    def blocks(self) -> tuple[Choice, ...]:
        """The choices for residual branches."""
        return tuple(choice for choice in self.choices if choice.branches)

    def eager_us(self) -> float:
        """Expected microseconds in eager PyTorch."""
        us = times.call_us(self._call.eager, self.gpu.sheet, 0, fitted=times.with_ours(self.gpu, 1))
        return max(us, sum(self._host_us(choice, "plain") for choice in self.blocks))

    def compiled_us(self, mode: str = "default") -> float:
        """Expected microseconds under torch.compile of the whole model, also in mode "max-autotune"."""
        fitted = times.with_ours(self.gpu, 1)
        us = times.call_us(self._call.compiled, self.gpu.sheet, 0, "compile", fitted)
        if mode == "max-autotune":
            us -= times.saved_by_templates_us(self._call.templates, self.gpu, self.gpu.sheet)
        return us

    def ours_us(self, frozen: bool = False) -> tuple[float, float, float]:
        """Expected microseconds by default, at the kernels' pessimistic, expected and best rates."""
        host = sum(self._host_us(choice, choice.way) for choice in self.blocks)
        counted = work.ours(self.traces[2 if frozen else 1].events)
        rates = (times.with_ours(self.gpu, ratio) for ratio in (0, 1, 2))
        low, expected, best = (max(times.call_us(counted, self.gpu.sheet, 0, fitted=one), host) for one in rates)
        return low, expected, best

    def backend_us(self) -> float:
        """Expected microseconds under torch.compile(model, backend="fastvit_triton"), at the expected rates."""
        whole = (replace(event, region=1) for event in self.traces[1].events)
        return times.call_us(work.ours(whole), self.gpu.sheet, 0, "compile", times.with_ours(self.gpu, 1))

    @functools.cached_property
    def _call(self) -> work.CallWork:
        return work.work_of_events(self.traces[0].events)

    def _host_us(self, choice: Choice, way: str) -> float:
        return host_us(way, len(choice.branches), self.training, choice.replayed)

    def saved_bytes(self, way: str | None = None) -> int:
        """Bytes that the blocks save for the backward pass in one way, or by default; see `blocks.saved_values`."""
        return sum(
            b.images * b.tokens * b.itemsize * saved_values(b, way or choice.way)
            for choice in self.blocks
            for b in choice.branches
        )


def count(function: Callable, *inputs: object, **named: object) -> Count:
    """Counts the cost of function(*inputs, **named) on CPU tensors, of which only integers are read."""
    with tracing() as trace:
        function(*inputs, **named)
    return trace.count


def predict(model: nn.Module, gpu: Gpu, training: bool, *inputs: object, **named: object) -> Prediction:
    """Predicts the cost of a model on a GPU, in PyTorch and with this package's defaults.

    Inside `torch.autocast("cpu", dtype)` it is the cost under CUDA's autocast. The model is one of ours, or converted
    by `optimize`, on the meta device, as its inputs, which have the dtype of the weights; integers on the CPU, such as
    grids, have values that it may read. Training includes the backward pass of every output. RuntimeError if the model
    reads a value that depends on weights or on meta tensors.
    """
    choices: list[Choice] = []
    traces = [traced(model, None, training, inputs, named)]
    with observing(choices.append):
        traces.append(traced(model, gpu, training, inputs, named))
    if not training:
        traces.append(traced(model, gpu, training, inputs, named, frozen=True))
    eager, ours, *frozen = (trace.count for trace in traces)
    compiled = inductor_count(traces[0].events)
    after = frozen[0] if frozen else None
    return Prediction(eager, compiled, ours, after, tuple(choices), gpu, training, tuple(traces))


def traced(
    model: nn.Module, gpu: Gpu | None, training: bool, inputs: tuple, named: dict[str, object], frozen: bool = False
) -> Trace:
    """The trace of one call."""
    inputs, named = tree_map_only(Tensor, given, (inputs, named))
    net = _unplanned(without_weights(copy.deepcopy(model)).train(training))
    with using_backend("auto"), contextlib.nullcontext() if gpu is None else assumed(gpu):
        if frozen:
            freeze(net)
            _called(net, inputs, named)  # computes the folds
        return _called(_unplanned(net), inputs, named)


def _called(model: nn.Module, inputs: tuple, named: dict[str, object]) -> Trace:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    with tracing() as trace, as_on_cuda(autocast), torch.set_grad_enabled(model.training):
        results = model(*inputs, **named)
        results = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
        if model.training:
            torch.autograd.backward(results, [torch.empty_like(t) for t in results])
    return trace


def _unplanned(model: nn.Module) -> nn.Module:
    """Clears the blocks' cached sizes so that the plan is consulted again: cached ways ignore the assumed GPU."""
    for module in model.modules():
        module.__dict__.pop(SIZES, None)
    return model


@contextlib.contextmanager
def assumed(gpu: Gpu) -> Iterator[None]:
    """Context in which tensors count as that GPU's, and Triton as installed; nothing is compiled in it."""
    before = tile.MISSING
    tile.MISSING = None
    try:
        with targeting(gpu.architecture), assuming(gpu.key):
            yield
    finally:
        tile.MISSING = before


class _Weightless(TorchFunctionMode):
    """Gives new weights the meta device."""

    def __torch_function__(self, function: Any, types: object, arguments: tuple = (), named: dict | None = None) -> Any:
        named = named or {}
        if function in WEIGHTS and named.get("device") is None:
            named = named | {"device": "meta"}
        return function(*arguments, **named)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Context in which modules are built without memory for their weights; integer buffers and constants have values.

    Unlike under `torch.device("meta")`, constructors may read constants, as in `torch.linspace(0, 1, n).tolist()`.
    """
    with _Weightless():
        yield
