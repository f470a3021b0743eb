"""Predicts a model's cost on any GPU from its shapes: launches, bytes, flops and time. No GPU is needed."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels import tile
from ..kernels.backend import using_backend
from ..kernels.cost import Gpu, block_us, compiled_us, saved_values
from ..kernels.launch import targeting
from ..kernels.plan import Choice, assuming, host_us, observing
from ..layers.freeze import freeze
from ..layers.ways import SIZES
from .inductor import inductor_count
from .trace import Count, Trace, tracing
from .values import given, without_weights


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of an inference call, or of a training step without optimiser; nothing is measured.

    Attributes:
        eager: with PyTorch's operators.
        compiled: under torch.compile, estimated by `inductor`.
        ours: with this package's defaults.
        frozen: the same after `freeze`; None in training.
        choices: for branches and ops, in call order.
        gpu: its rates.
        training: True if it includes the backward pass.
    """

    eager: Count
    compiled: Count
    ours: Count
    frozen: Count | None
    choices: tuple[Choice, ...]
    gpu: Gpu
    training: bool

    @property
    def blocks(self) -> tuple[Choice, ...]:
        """The choices for residual branches."""
        return tuple(choice for choice in self.choices if choice.branches)

    def eager_us(self) -> float:
        """Expected microseconds of the blocks in eager PyTorch."""
        return sum(self._us(choice, "plain", False, 0) for choice in self.blocks)

    def compiled_us(self) -> float:
        """Expected microseconds of the blocks under torch.compile: as mixed, with PyTorch's attention, no host time."""
        return sum(compiled_us(self.gpu, choice.branches, self.training) for choice in self.blocks)

    def ours_us(self, frozen: bool = False) -> tuple[float, float, float]:
        """Expected microseconds of the blocks by default, at the kernels' pessimistic, expected and best rates."""
        low, expected, best = (sum(self._us(c, c.way, frozen, ratio) for c in self.blocks) for ratio in (0, 1, 2))
        return low, expected, best

    def _us(self, choice: Choice, way: str, frozen: bool, ratio: int) -> float:
        host = host_us(way, len(choice.branches), self.training, choice.replayed)
        return max(block_us(self.gpu, choice.branches, way, self.training, frozen, ratio), host)

    def saved_bytes(self, way: str | None = None) -> int:
        """Bytes that the blocks save for the backward pass in one way, or by default; see `cost.saved_values`."""
        return sum(
            b.images * b.tokens * b.itemsize * saved_values(b, way or choice.way)
            for choice in self.blocks
            for b in choice.branches
        )


def count(function: Callable, *inputs: object, **named: object) -> Count:
    """Counts the cost of function(*inputs, **named) on CPU tensors, of which only integers are read.

    Raises:
        RuntimeError: the function reads a value that depends on floating-point inputs.
    """
    with tracing() as trace:
        function(*inputs, **named)
    return trace.count


def predict(model: nn.Module, gpu: Gpu, training: bool, *inputs: object, **named: object) -> Prediction:
    """Predicts the cost of a model on a GPU, in PyTorch and with this package's defaults.

    Args:
        model: converted by `optimize`, or one of ours; on the meta device. It is not changed.
        gpu: one of `cost.gpus()`.
        training: include the backward pass of every output.
        inputs: its inputs on the meta device, in the dtype of the weights; integers on the CPU, such as grids, have
            values that the model may read.
        named: keyword inputs.

    Raises:
        RuntimeError: the model reads a value that depends on weights or on meta tensors.
    """
    choices: list[Choice] = []
    eager = traced(model, None, training, inputs, named)
    with observing(choices.append):
        ours = traced(model, gpu, training, inputs, named).count
    frozen = None if training else traced(model, gpu, training, inputs, named, frozen=True).count
    return Prediction(eager.count, inductor_count(eager.events), ours, frozen, tuple(choices), gpu, training)


def traced(
    model: nn.Module, gpu: Gpu | None, training: bool, inputs: tuple, named: dict[str, object], frozen: bool = False
) -> Trace:
    """The trace of one call.

    Args:
        model: as for `predict`.
        gpu: one of `cost.gpus()`; None for eager PyTorch.
        training: include the backward pass of every output.
        inputs: as for `predict`.
        named: keyword inputs.
        frozen: keep folded weights between calls.

    Raises:
        RuntimeError: the model reads a value that depends on weights or on meta tensors.
    """
    inputs, named = tree_map_only(Tensor, given, (inputs, named))
    net = _unplanned(without_weights(copy.deepcopy(model)).train(training))
    with using_backend("auto"), contextlib.nullcontext() if gpu is None else _assumed(gpu):
        if frozen:
            freeze(net)
            _called(net, inputs, named)  # computes the folds
        return _called(_unplanned(net), inputs, named)


def _called(model: nn.Module, inputs: tuple, named: dict[str, object]) -> Trace:
    with tracing() as trace, torch.set_grad_enabled(model.training):
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
def _assumed(gpu: Gpu) -> Iterator[None]:
    """Context in which tensors count as that GPU's, and Triton as installed; nothing is compiled in it."""
    before, tile.MISSING = tile.MISSING, None
    try:
        with targeting(gpu.architecture), assuming(gpu):
            yield
    finally:
        tile.MISSING = before
