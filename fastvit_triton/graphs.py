"""CUDA graphs of a model's inference: all launches of a call as one, so that the host no longer limits small batches.

A graph replays the same kernels on the same addresses, for one size of batch. So inputs are copied into static tensors,
and batches a little smaller than a captured one are padded. For images that are packed without padding see
`packed_graphs`.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .layers.freeze import is_frozen

WARMUPS = 3  # calls before a capture: kernels are compiled, blocks recorded
MAX_SEEN = 4096  # sizes that came once
MAX_PADDING = 1.25  # rows of a padded batch, relative to its own


@dataclass
class Captured:
    """A graph and the tensors that it reads and writes.

    Attributes:
        inputs: static.
        outputs: what the model returned, static.
        replay: launches the graph.
        versions: counted writes of the weights that kept folds were made of.
    """

    inputs: tuple[Tensor, ...]
    outputs: object
    replay: Callable[[], None]
    versions: list[int]


class GraphedModel:
    """A model in inference, run by CUDA graphs; made by `cuda_graph`.

    It may be called from several threads, whose calls run one after another.
    """

    def __init__(
        self, model: nn.Module, example: tuple[Tensor, ...], batch_sizes: Sequence[int], max_graphs: int, copy: bool
    ) -> None:
        self.model, self.batch_sizes, self.max_graphs, self.copy = model, sorted(batch_sizes), max_graphs, copy
        self._graphs: OrderedDict[tuple, Captured] = OrderedDict()
        self._seen: set[tuple] = set()
        self._lock = threading.Lock()
        self._pool = _pool()
        self._done: torch.cuda.Event | None = None
        self._weights = self._state()
        for size in self.batch_sizes[-max_graphs:]:
            inputs = tuple(x.new_zeros(size, *x.shape[1:]) for x in example)
            self._graph(key_of(size, inputs), lambda inputs=inputs: inputs)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> object:
        """The model of its inputs, tensors [B, ...].

        Sizes that were not captured run without a graph the first time, and are captured the second time.

        Raises:
            RuntimeError: the model is in training mode.
            ValueError: the inputs differ in their numbers of rows.
        """
        check(self.model, inputs)
        with self._lock:
            self._follow_weights()
            captured = self._graph_for(inputs)
            return self.model(*inputs) if captured is None else self._run(captured, inputs)

    def reset(self) -> None:
        """Drops all graphs, which are captured anew: after any change of the model but one of its weights' values."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._weights = self._state()

    def _state(self) -> tuple[list, list]:
        """Addresses and counted writes of all parameters and buffers."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return [t.data_ptr() for t in held], [0 if t.is_inference() else t._version for t in held]

    def _follow_weights(self) -> None:
        """Drops graphs whose weights are elsewhere."""
        state = self._state()
        if state[0] != self._weights[0]:
            self._drop()
        self._weights = state

    def _fold_again(self, captured: Captured) -> None:
        """Has a frozen model fold weights that were written since, in place, by a call like that of the graph."""
        if captured.versions != self._weights[1]:
            if is_frozen(self.model):
                self.model(*captured.inputs)
            captured.versions = self._weights[1]

    def _graph_for(self, inputs: tuple) -> Captured | None:
        """The graph of the smallest size that these inputs fit into, captured if it is due."""
        rows = len(inputs[0])
        near = (size for size in self.batch_sizes if rows <= size <= rows * MAX_PADDING)
        key = key_of(next(near, rows), inputs)
        due = key in self._graphs or key[0] in self.batch_sizes or key in self._seen
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        if not due:
            return None
        return self._graph(key, lambda: tuple(x.new_zeros(key[0], *x.shape[1:]) for x in inputs))

    def _graph(self, key: tuple, make: Callable[[], tuple]) -> Captured:
        """The graph of this key, captured with static inputs if there is none."""
        if key not in self._graphs:
            while len(self._graphs) >= self.max_graphs:
                self._graphs.popitem(last=False)
            inputs = make()
            on_device = torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else contextlib.nullcontext()
            with torch.no_grad(), on_device:
                outputs, replay = capture(lambda: self.model(*inputs), self._pool)
            self._graphs[key] = Captured(inputs, outputs, replay, self._weights[1])
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _run(self, captured: Captured, inputs: tuple) -> object:
        stream = None if not inputs[0].is_cuda else torch.cuda.current_stream(inputs[0].device)
        if stream is not None and self._done is not None:
            stream.wait_event(self._done)  # of the call before, perhaps on another stream
        self._fold_again(captured)
        sizes = self._fill(captured.inputs, inputs)
        captured.replay()
        result = tree_map_only(Tensor, lambda t: _rows(t, sizes, self.copy), captured.outputs)
        if stream is not None:
            self._done = stream.record_event()
        return result

    def _fill(self, static: tuple, inputs: tuple) -> dict[int, int]:
        """Copies inputs; returns the size of a first axis of the graph → that of this call."""
        rows = len(inputs[0])
        for target, x in zip(static, inputs, strict=True):
            target[:rows].copy_(x, non_blocking=True)
        return {len(static[0]): rows}


def cuda_graph(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    batch_sizes: Sequence[int] = (1, 8, 64),
    max_graphs: int = 8,
    copy: bool = True,
) -> GraphedModel:
    """A callable that runs a model's inference by CUDA graphs, captured now for `batch_sizes`.

    Batches that a captured size exceeds by at most a quarter are padded to it. Others run without a graph the first
    time and are captured the second time; the least recently used graph makes room. All graphs share one memory pool.
    Weights may be written between calls; a parameter that lies elsewhere has all graphs captured anew. For other
    changes of the model call `reset`.

    Args:
        model: on a GPU, in evaluation mode. Each row of its outputs depends on the same row of its inputs alone.
        example: one input [B, ...] or several with the same B, on the GPU; B may be any.
        batch_sizes: numbers of rows.
        max_graphs: that are kept at a time.
        copy: return copies; without, tensors that the next call overwrites.

    Raises:
        TypeError: the example is not of tensors.
        ValueError: the example is not on a GPU, or a size or a number is not positive.
        RuntimeError: the model is in training mode, or waits for the GPU within its forward, which no graph can.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
        raise TypeError("example must be a tensor [B, ...] or a tuple of them")
    if not all(map(can_capture, inputs)):
        raise ValueError(f"example is on {inputs[0].device}; CUDA graphs need a model and an example on a GPU")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be positive numbers, got {tuple(batch_sizes)}")
    if max_graphs < 1:
        raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
    check(model, inputs)
    return GraphedModel(model, inputs, batch_sizes, max_graphs, copy)


def can_capture(x: Tensor) -> bool:
    """Calls on this tensor's device can be captured."""
    return x.is_cuda


def capture(run: Callable[[], object], pool: object) -> tuple[object, Callable[[], None]]:
    """(what `run` returned while it was captured, a function that launches the graph)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outputs = run()
    return outputs, graph.replay


def _pool() -> object:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


def key_of(rows: int, inputs: tuple[Tensor, ...]) -> tuple:
    """What a graph with so many rows is for."""
    kind = inputs[0].device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return rows, autocast, *[(x.shape[1:], x.dtype, x.device) for x in inputs]


def _rows(t: Tensor, sizes: dict[int, int], copy: bool) -> Tensor:
    part = t[: sizes[len(t)]] if t.dim() and len(t) in sizes else t
    return part.clone() if copy else part


def check(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raises RuntimeError for a model in training mode, ValueError for inputs of different lengths."""
    if model.training:
        raise RuntimeError("the model is in training mode; CUDA graphs are for inference: call model.eval() first")
    if len({len(x) for x in inputs}) != 1:
        raise ValueError(f"all inputs must have the same number of rows, got {[len(x) for x in inputs]}")
