"""Launches, bytes and flops of a model's forward pass, counted from tensors without data: nothing runs.

Each operator that writes memory is one launch, and moves each of its operands and results once. PyTorch's
scaled_dot_product_attention is one such operator, as it is on a GPU, and so is each of ours, but for a linear layer
that must find the row statistics of its LayerNorm first. PyTorch's own operators may launch more than that, and a cache
may save bytes; flops are those of matrix products and convolutions, 2 for a multiply-add.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..kernels import backend, launch, tile
from ..layers.freeze import freeze

ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Count:
    """What a call costs.

    Attributes:
        launches: kernels.
        nbytes: read and written.
        flops: of products.
    """

    launches: int = 0
    nbytes: int = 0
    flops: int = 0

    def __add__(self, other: "Count") -> "Count":
        """Both calls."""
        return Count(self.launches + other.launches, self.nbytes + other.nbytes, self.flops + other.flops)


class _Operators(TorchDispatchMode):
    """Adds up what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Count()

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        named = named or {}
        outputs = function(*arguments, **named)
        self.total += _cost(function, arguments, named, outputs)
        return outputs

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """One launch, as on a GPU; heads lie side by side in its output, as PyTorch's kernels leave them."""
        sizes = *query.shape[:-3], *query.shape[-2:-4:-1], value.shape[-1]
        o = query.new_empty(sizes).transpose(-3, -2) if query.dim() > 2 else query.new_empty(sizes)
        read = [t for t in (query, key, value, attn_mask) if t is not None]
        self.total += Count(1, sum(map(_nbytes, (*read, o))), _products(query, key, value))
        return o


def count(function: Callable, *inputs: object, **named: object) -> Count:
    """The cost of function(*inputs, **named) on tensors of the meta device.

    Raises:
        RuntimeError: the function reads a number that only real tensors hold.
    """
    operators = _Operators()
    # which without a GPU is taken apart before anyone sees it
    with _in_place((F, "scaled_dot_product_attention", operators.attention)), operators:
        function(*inputs, **named)
    return operators.total


def savings(model: nn.Module, *inputs: object, **named: object) -> tuple[Count, Count, Count]:
    """Inference of a model on the meta device: as PyTorch runs it, with the kernels, and with them when it is frozen.

    Args:
        model: optimised, or one of ours.
        inputs: its inputs on the meta device, in the dtype of the weights.
        named: more of them.

    Raises:
        RuntimeError: the model reads a number that only real tensors hold.
    """
    with torch.no_grad():
        with backend.using_backend("auto"):
            before = count(model, *inputs, **named)
        with backend.using_backend("triton"), _in_place(*_a_gpu()):
            after = count(model, *inputs, **named)
            frozen = copy.deepcopy(model)
            freeze(frozen)
            frozen(*inputs, **named)  # folds
            return before, after, count(frozen, *inputs, **named)


def _a_gpu() -> list[tuple[object, str, object]]:
    """What makes the meta device one where the kernels run: the rules are those of an interpreter's CPU."""
    why_not, cpu = backend.why_not, torch.device("cpu")
    return [
        (launch, "target", "sm_90"),
        (backend, "why_not", lambda device, dtype, head_dim=0: why_not(cpu, dtype, head_dim)),
        (tile, "MISSING", None),  # nothing is compiled
        (torch, "is_autocast_enabled", lambda *_: False),  # which does not know the meta device
    ]


@contextlib.contextmanager
def _in_place(*stand_ins: tuple[object, str, object]) -> Iterator[None]:
    """(owner, name, value): each value stands at its name until the end."""
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    try:
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(stand_ins, before, strict=True):
            setattr(owner, name, value)


def _cost(function: torch._ops.OpOverload, arguments: tuple, named: dict, outputs: object) -> Count:
    """The cost of one operator; nothing where it gives a view, or memory that nobody has written."""
    name = function.name().split("::")[1].split(".")[0]
    read = [t for t in tree_leaves((arguments, named)) if isinstance(t, Tensor)]
    written = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    memory = {t.untyped_storage()._cdata for t in read}
    views = not function._schema.is_mutable and all(t.untyped_storage()._cdata in memory for t in written)
    if views or name in ALLOCATE:
        return Count()
    nbytes = sum(_nbytes(t) for t in (*{id(t): t for t in read}.values(), *written))
    if function.overloadpacket in flop_registry:
        flops = flop_registry[function.overloadpacket](*arguments, **named, out_val=outputs)
    else:
        flops = _flops(name, *arguments)
    return Count(1, nbytes, flops) + _statistics(name, arguments, written)


def _statistics(name: str, arguments: tuple, written: list[Tensor]) -> Count:
    """The launch before a linear layer that finds mean and deviation of each row of x, and their use."""
    if name != "linear_fwd":
        return Count()
    x, _, _, colsum, stats, *_ = arguments
    _, _, mean, rstd, _ = written
    return Count(1, sum(map(_nbytes, (x, mean, rstd)))) if colsum is not None and stats is None else Count()


def _flops(name: str, *arguments: object) -> int:
    """Of our own operators in inference."""
    if name == "attention_fwd":
        return _products(*arguments[:3])
    if name == "linear_fwd":
        return 2 * arguments[0].numel() * len(arguments[1])
    if name == "mlp_fwd":  # both products, of x's width on both ends
        return 4 * arguments[0].numel() * len(arguments[1])
    if name == "patch_embed_fwd":
        image, weight, *_ = arguments
        patches = math.prod(side // p for side, p in zip(image.shape[2:], weight.shape[2:], strict=True))
        return 2 * len(image) * patches * weight.numel()
    return 0


def _products(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Flops of q kᵀ and of the probabilities' product with v."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _nbytes(t: Tensor) -> int:
    """Bytes of the memory that a tensor stands on: an expanded axis is read once."""
    return t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
