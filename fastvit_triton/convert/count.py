"""What a model saves on a GPU that need not be here: launches, bytes and flops before and after, from its shapes."""

import contextlib
import copy
from collections.abc import Callable, Iterator

from torch import Tensor, nn, no_grad
from torch.utils._pytree import tree_map_only

from ..kernels import tile
from ..kernels.backend import using_backend
from ..kernels.launch import targeting
from ..layers.freeze import freeze
from .trace import Count, reserved, tracing


def count(function: Callable, *inputs: object, **named: object) -> Count:
    """The cost of function(*inputs, **named) on tensors of the CPU, which are not read.

    Raises:
        RuntimeError: the function reads a value.
    """
    with tracing() as trace:
        function(*inputs, **named)
    return trace.count


def savings(model: nn.Module, *inputs: object, **named: object) -> tuple[Count, Count, Count]:
    """Inference of a model without data: as PyTorch runs it, with the kernels, and with them when it is frozen.

    Args:
        model: optimised, or one of ours; on the meta device.
        inputs: its inputs on the meta device, in the dtype of the weights.
        named: more of them.

    Raises:
        RuntimeError: the model reads a value.
    """
    model = copy.deepcopy(model).to_empty(device="cpu")
    inputs, named = tree_map_only(Tensor, reserved, (inputs, named))
    with no_grad():
        with using_backend("auto"):
            before = count(model, *inputs, **named)
        with using_backend("triton"), targeting("sm_90"), _triton():
            after = count(model, *inputs, **named)
            freeze(model)
            count(model, *inputs, **named)  # folds
            return before, after, count(model, *inputs, **named)


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """In this context Triton counts as installed, because nothing is compiled."""
    before, tile.MISSING = tile.MISSING, None
    try:
        yield
    finally:
        tile.MISSING = before
