"""CUDA graphs of models on packed images, one per token budget; see `graphs`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import cuda_graph as graphs


class GraphedPackedModel(graphs.GraphedModel):
    """Inference of a model on packed images by CUDA graphs; created by `cuda_graph_packed`."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        example: tuple,
        token_budgets: Sequence[int],
        max_images: int,
        max_graphs: int,
        copy: bool,
    ) -> None:
        super().__init__(model, (), (), max_graphs, copy)
        self.token_budgets = sorted(token_budgets)
        self.max_images = max_images
        for budget in self.token_budgets[-max_graphs:]:
            self._graph(self._packed_key(budget, example), partial(self._static, budget, example))

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> object:
        """Runs the model on tensors [T, ...], cu_seqlens [B + 1] and max_seqlen.

        Calls with more tokens or images than captured run without a graph.
        """
        graphs.check(self.model, _tokens(inputs))
        with self._lock:
            self._follow_weights()
            images = len(inputs[-2]) - 1
            budget = next((b for b in self.token_budgets if len(inputs[0]) <= b), None)
            if budget is None or images > self.max_images or inputs[-1] > budget:
                return self.model(*inputs)
            key = self._packed_key(budget, inputs)
            return self._run(self._graph(key, lambda: self._static(budget, inputs)), inputs)

    def _longest(self, budget: int, max_seqlen: int) -> int:
        """max_seqlen of the graph: rounded up to a power of two, to limit the number of graphs."""
        return min(1 << max(max_seqlen - 1, 0).bit_length(), budget)

    def _packed_key(self, budget: int, inputs: tuple) -> tuple:
        return *graphs.key_of(budget, inputs[:-2]), inputs[-2].dtype, self._longest(budget, inputs[-1])

    def _static(self, budget: int, inputs: tuple) -> tuple:
        """Static inputs of a graph, with no images."""
        tokens = (x.new_zeros(budget, *x.shape[1:]) for x in inputs[:-2])
        return *tokens, inputs[-2].new_zeros(self.max_images + 1), self._longest(budget, inputs[-1])

    def _fill(self, static: tuple, inputs: tuple) -> dict[int, int]:
        """Copies the inputs; fills up with images without tokens, and with zero tokens that belong to no image."""
        sizes = super()._fill(static[:-2], inputs[:-2])
        for target in static[:-2]:
            target[len(inputs[0]) :].zero_()  # values of an earlier call may be NaN
        images = len(inputs[-2]) - 1
        static[-2][: images + 1].copy_(inputs[-2], non_blocking=True)
        static[-2][images + 1 :].copy_(inputs[-2][-1:].expand(self.max_images - images), non_blocking=True)
        return sizes | {self.max_images: images, self.max_images + 1: images + 1}


def cuda_graph_packed(
    model: nn.Module,
    example: tuple,
    token_budgets: Sequence[int] = (1024, 4096, 16384),
    max_images: int = 64,
    max_graphs: int = 8,
    copy: bool = True,
) -> GraphedPackedModel:
    """As `cuda_graph`, for a model on images of different sizes packed without padding (vision towers).

    A call uses the graph of the smallest budget that holds its tokens. Its cu_seqlens are padded with images without
    tokens, and its max_seqlen is rounded up to a power of two. Outputs with `max_images` rows, one more, or as many as
    the budget are cut to the images and tokens of the call.

    Args:
        model: called with tensors [T, ...], cu_seqlens [B + 1] and max_seqlen, on a GPU, in evaluation mode; see
            `varlen_attention`. The output for a token must depend only on the tokens of its image.
        example: example inputs, a tuple.
        token_budgets: numbers of tokens to capture.
        max_images: maximum number of images; calls with more run without a graph.
        max_graphs: maximum number of graphs kept.
        copy: return copies; False returns tensors that the next call overwrites.

    Raises:
        TypeError: the example does not end with cu_seqlens and max_seqlen.
        ValueError: the example is not on a GPU, a number is not positive, or max_images (or one more) is also a budget.
        RuntimeError: as for `cuda_graph`.
    """
    tokens = _tokens(example)
    if not all(map(graphs.can_capture, tokens)):
        raise ValueError(f"example is on {tokens[0].device}; CUDA graphs need a model and an example on a GPU")
    numbers = dict(token_budgets=tuple(token_budgets), max_images=(max_images,), max_graphs=(max_graphs,))
    for name, values in numbers.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be positive, got {values if name == 'token_budgets' else values[0]}")
    if {max_images, max_images + 1} & set(token_budgets):
        raise ValueError(f"max_images is {max_images}; token_budgets must not contain it or {max_images + 1}")
    graphs.check(model, tokens)
    return GraphedPackedModel(model, example, token_budgets, max_images, max_graphs, copy)


def _tokens(inputs: tuple) -> tuple[Tensor, ...]:
    """The inputs before cu_seqlens and max_seqlen."""
    if isinstance(inputs, tuple) and len(inputs) > 2:
        *tokens, cu_seqlens, max_seqlen = inputs
        if all(isinstance(x, Tensor) and x.dim() for x in (*tokens, cu_seqlens)) and type(max_seqlen) is int:
            if cu_seqlens.dim() == 1 and len(cu_seqlens):
                return tuple(tokens)
    raise TypeError("inputs must be tensors [T, ...], cu_seqlens [B + 1], and max_seqlen as an int")
