"""CUDA graphs for inference: one launch per call, which removes the host overhead of small batches.

A graph replays the same kernels on the same addresses, for one batch size. So inputs are copied into static tensors,
and batches slightly smaller than a captured size are padded. For images packed without padding see `packed_graphs`.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..engine.freeze import is_frozen
from ..kernels import settings

WARMUPS = 3  # calls before a capture, which compile kernels and record blocks
MAX_SEEN = 4096  # remembered sizes
MAX_PADDING = 1.25  # maximum ratio of padded to actual rows


@dataclass
class Captured:
    """A CUDA graph and its static tensors."""

    inputs: tuple[Tensor, ...]  # static input tensors
    outputs: object  # the model's output, with static tensors
    replay: Callable[[], None]  # launches the graph
    versions: list[int]  # version counters of the weights when cached folds were last checked


class GraphedModel:
    """Inference of a model by CUDA graphs; created by `cuda_graph`.

    Thread-safe: calls from several threads are serialised.
    """

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, example: tuple[Tensor, ...], batch_sizes: Sequence[int], max_graphs: int, copy: bool
    ) -> None:
        self.model = model
        self.batch_sizes = sorted(batch_sizes)
        self.max_graphs = max_graphs
        self.copy = copy
        self._graphs: OrderedDict[tuple, Captured] = OrderedDict()
        self._seen: set[tuple] = set()
        self._lock = threading.Lock()
        self._pool = pool()
        self._done: torch.cuda.Event | None = None
        self._weights = self._state()
        for size in self.batch_sizes[-max_graphs:]:
            inputs = tuple(x.new_zeros(size, *x.shape[1:]) for x in example)
            self._graph(key_of(size, inputs), partial(tuple, inputs))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> object:
        """Runs the model on tensors [B, ...].

        A new batch size runs without a graph the first time and is captured the second time.
        """
        check(self.model, inputs)
        with self._lock:
            self._follow_weights()
            captured = self._graph_for(inputs)
            return self.model(*inputs) if captured is None else self._run(captured, inputs)

    def reset(self) -> None:
        """Drops all graphs. Call it after any change of the model other than of its weights' values."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._weights = self._state()

    def _state(self) -> tuple[list, list]:
        """(addresses, version counters) of all parameters and buffers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [t.data_ptr() for t in tensors], [0 if t.is_inference() else t._version for t in tensors]

    def _follow_weights(self) -> None:
        """Drops all graphs if a weight has moved to another address."""
        state = self._state()
        if state[0] != self._weights[0]:
            self._drop()
        self._weights = state

    def _fold_again(self, captured: Captured) -> None:
        """Updates the folds of a frozen model in place, by a call of the model, if weights were written since."""
        if captured.versions != self._weights[1]:
            if is_frozen(self.model):
                self.model(*captured.inputs)
            captured.versions = self._weights[1]

    def _graph_for(self, inputs: tuple) -> Captured | None:
        """The graph for these inputs, padded to a captured size if close; None if their size is new."""
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
        """The graph for this key; captured with static inputs from `make` if there is none."""
        if key not in self._graphs:
            while len(self._graphs) >= self.max_graphs:
                self._graphs.popitem(last=False)
            inputs = make()
            on_device = torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else contextlib.nullcontext()
            with torch.no_grad(), on_device, without_cached_casts():
                outputs, replay = capture(lambda: self.model(*inputs), self._pool)
            self._graphs[key] = Captured(inputs, outputs, replay, self._weights[1])
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _run(self, captured: Captured, inputs: tuple) -> object:
        stream = None if not inputs[0].is_cuda else torch.cuda.current_stream(inputs[0].device)
        if stream is not None and self._done is not None:
            stream.wait_event(self._done)  # of the previous call, perhaps on another stream
        self._fold_again(captured)
        sizes = self._fill(captured.inputs, inputs)
        captured.replay()
        result = tree_map_only(Tensor, lambda t: _rows(t, sizes, self.copy), captured.outputs)
        if stream is not None:
            self._done = stream.record_event()
        return result

    def _fill(self, static: tuple, inputs: tuple) -> dict[int, int]:
        """Copies the inputs; returns {first-axis size in the graph: size in this call}, to slice the outputs."""
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
    """Captures CUDA graphs of a model's inference for `batch_sizes`; returns a callable that replays them.

    A batch is padded to a captured size that exceeds it by at most 25 %. Other sizes run without a graph the first time
    and are captured the second time; the least recently used graph is evicted. All graphs share one memory pool.
    Weights may be written between calls; if a parameter moves to another address, all graphs are captured again. After
    other changes of the model call `reset`.

    Args:
        model: on a GPU, in evaluation mode. Each output row must depend only on the same input row.
        example: one input [B, ...] or several with the same B, on the GPU, with any B.
        batch_sizes: sizes to capture now.
        max_graphs: maximum number of graphs kept.
        copy: return copies; False returns tensors that the next call overwrites.

    Raises:
        TypeError: the example is not a tensor or a tuple of tensors.
        ValueError: the example is not on a GPU, or a size or max_graphs is not positive.
        RuntimeError: the model is in training mode, or its forward synchronises with the GPU.
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
    """True if calls on this tensor's device can be captured."""
    return x.is_cuda


def capture(
    run: Callable[[], object], pool: Any, warmups: int = WARMUPS, stream: Any = None
) -> tuple[Any, Callable[[], None]]:
    """Captures `run` on a stream, by default a new one, after some calls of it without a graph.

    Returns its result, with static tensors in the memory of `pool`, and a function that launches the graph.
    """
    stream = stream or new_stream()
    on_stream(lambda: [run() for _ in range(warmups)], stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outputs = run()
    return outputs, graph.replay


def on_stream(run: Callable[[], Any], stream: Any) -> Any:
    """The result of a call on a stream that waits for the current one, which then waits for it."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run()
    torch.cuda.current_stream().wait_stream(stream)
    return result


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Context in which autocast caches no casts of weights: it frees them later, and a graph would still read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def pool() -> Any:
    """A handle of memory for graphs; None without a GPU."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


def new_stream() -> Any:
    """A stream; None without a GPU."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def key_of(rows: int, inputs: tuple[Tensor, ...]) -> tuple:
    """Key of the graph for inputs like these with `rows` rows."""
    chosen = *settings.choices(inputs[0].device.type), *settings.operators()
    return rows, chosen, *[(x.shape[1:], x.dtype, x.device) for x in inputs]


def _rows(t: Tensor, sizes: dict[int, int], copy: bool) -> Tensor:
    part = t[: sizes[len(t)]] if t.dim() and len(t) in sizes else t
    return part.clone() if copy else part


def check(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raises RuntimeError for a model in training mode, ValueError for inputs of different lengths."""
    if model.training:
        raise RuntimeError("the model is in training mode; CUDA graphs are for inference: call model.eval() first")
    if len({len(x) for x in inputs}) != 1:
        raise ValueError(f"all inputs must have the same number of rows, got {[len(x) for x in inputs]}")
