"""What a call has a GPU do, from its trace: matrix products, attention and passes over memory, each with its sizes.

A call is traced with few images; `Work` holds the parts that grow with their number, and those that do not, such as
weights, so that `at_batch` gives the work for any number of images.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cuda_operators import as_on_cuda
from .inductor import grouped
from .trace import Event, Piece, tracing
from .values import reserved, without_weights

IMAGES = 2  # in a traced call; operators may treat one image differently
PRODUCTS = {"addmm": 1, "mm": 0, "bmm": 0, "baddbmm": 1}  # operator → index of its first matrix
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit_no_training")
REDUCTIONS = ("_softmax", "sum", "mean", "amax", "max", "var_mean", "linalg_vector_norm", "_adaptive_avg_pool2d")
COPIES = ("clone", "roll", "cat", "stack", "index", "index_select", "gather", "constant_pad_nd", "im2col", "copy_")
ATTENTION = {
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_efficient_attention": "masked attention",
}
KINDS = {  # kind → what it is
    "product": "16-bit matrix product of PyTorch's BLAS",
    "float32 product": "matrix product in float32 without TF32",
    "attention": "FlashAttention",
    "masked attention": "memory-efficient attention with a bias or mask",
    "convolution": "convolution in 16 bits, channels first",
    "depthwise": "depthwise convolution",
    "norm": "LayerNorm, RMSNorm, BatchNorm or GroupNorm",
    "reduction": "softmax, sum, mean or maximum",
    "copy": "copy that moves values: contiguous, roll, cat, pad, index",
    "tanh": "GELU by tanh",
    "pass": "any other operator without products",
    "compiled pass": "kernel of torch.compile without a reduction",
    "compiled norm": "kernel of torch.compile with a reduction",
}


class Work(NamedTuple):
    """A kernel's work.

    Attributes:
        kind: one of KINDS.
        nbytes: bytes read and written.
        flops: of a product, convolution or attention; a multiply-add is 2.
        size: of products: (number of matrices, M, N, K); of attention: (heads of all images, queries, keys, channels).
        per_image: for each of `nbytes`, `flops`, and the first two of `size`, the part that one image adds.
    """

    kind: str
    nbytes: float
    flops: float = 0.0
    size: tuple[float, float, int, int] = (0, 0, 0, 0)
    per_image: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def at_batch(self, images: int) -> "Work":
        """The same kernel's work for this number of images."""
        nbytes, flops, count, rows = (step * (images - IMAGES) for step in self.per_image)
        size = (self.size[0] + count, self.size[1] + rows, *self.size[2:])
        return Work(self.kind, self.nbytes + nbytes, self.flops + flops, size)


class Call(NamedTuple):
    """The work of one call, as (kernel, number of times): in eager PyTorch and under torch.compile."""

    eager: tuple[tuple[Work, int], ...]
    compiled: tuple[tuple[Work, int], ...]


def work_of(
    model: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype, autocast: torch.dtype | None = None
) -> Call:
    """The work of a model's inference on a CUDA device.

    Args:
        model: on any device; it is changed: its weights lose their values.
        shape: [C, H, W] of an image.
        dtype: of weights and images.
        autocast: dtype of autocast, or None without it.

    Raises:
        RuntimeError: the model reads a value that depends on weights or images.
    """
    model = without_weights(model).eval().to(dtype)
    images = reserved(torch.empty(IMAGES, *shape, dtype=dtype, device="meta"))
    return work_of_call(lambda: model(images), (images,), autocast)


def work_of_call(call: Callable[[], object], inputs: Iterable[Tensor], autocast: torch.dtype | None = None) -> Call:
    """The work of a call whose `inputs` hold IMAGES images; see `work_of`."""
    with torch.no_grad(), tracing() as trace, as_on_cuda(autocast):
        call()
    growing = _growing(trace.events, {vars(t.untyped_storage())["number"] for t in inputs if _is_traced(t)})
    eager = Counter(_operator(event, growing) for event in trace.events if event.launches)
    compiled: Counter[Work] = Counter()
    for kernel in grouped(trace.events):
        name = kernel.events[0].name
        if name in PRODUCTS or name in ATTENTION or name == "convolution":
            compiled[_operator(kernel.events[0], growing)] += 1
        elif any(piece.storage in growing for piece in kernel.writes):  # the others are computed once, or are casts
            reduces = any(event.name in NORMS or event.name in REDUCTIONS for event in kernel.events)
            kind = "compiled norm" if reduces else "compiled pass"
            compiled[_memory(kind, (*kernel.reads, *kernel.writes), growing)] += 1
        else:
            compiled[_memory("compiled pass", (*kernel.reads, *kernel.writes), growing)] += 1
    return Call(tuple(eager.items()), tuple(compiled.items()))


def _is_traced(t: Tensor) -> bool:
    return "number" in vars(t.untyped_storage())


def _growing(events: Iterable[Event], found: set[int]) -> set[int]:
    """Storages whose size grows with the number of images: the inputs, and what is computed from them."""
    for event in events:
        if any(piece.storage in found for piece in event.reads):
            found |= {piece.storage for piece in event.writes}
    return found


def _operator(event: Event, growing: set[int]) -> Work:
    """The work of one of PyTorch's operators."""
    pieces, name = (*event.reads, *event.writes), event.name
    if name in PRODUCTS:
        first, second = event.reads[PRODUCTS[name] :][:2]
        count = math.prod(first.shape[:-2])
        size = (count, first.shape[-2], second.shape[-1], first.shape[-1])
        kind = "float32 product" if _itemsize(event.writes[0]) == 4 else "product"
        return _memory(kind, pieces, growing, event.flops, size, first.storage in growing)
    if name in ATTENTION:
        query, key = event.reads[:2]
        size = (math.prod(query.shape[:2]), query.shape[2], key.shape[2], query.shape[3])
        return _memory(ATTENTION[name], pieces, growing, event.flops, size, True)
    if name == "convolution":
        image, weight = event.reads[:2]
        depthwise = weight.shape[1] == 1 and image.shape[1] > 1
        size = (1, math.prod(event.writes[0].shape[2:]) * IMAGES, weight.shape[0], math.prod(weight.shape[1:]))
        return _memory("depthwise" if depthwise else "convolution", pieces, growing, event.flops, size, True)
    kind = "norm" if name in NORMS else "reduction" if name in REDUCTIONS else "copy" if name in COPIES else "pass"
    return _memory("tanh" if name == "gelu_tanh" else kind, pieces, growing)


def _memory(
    kind: str,
    pieces: Iterable[Piece],
    growing: set[int],
    flops: float = 0,
    size: tuple[int, int, int, int] = (0, 0, 0, 0),
    grows: bool = False,
) -> Work:
    pieces = list(pieces)
    per_image = sum(piece.nbytes for piece in pieces if piece.storage in growing) / IMAGES
    several = size[0] > 1 or kind.endswith("attention")
    steps = (size[0] / IMAGES, 0.0) if several else (0.0, size[1] / IMAGES)
    nbytes = float(sum(piece.nbytes for piece in pieces))
    step = (per_image, flops / IMAGES, *steps) if grows else (per_image, 0.0, 0.0, 0.0)
    return Work(kind, nbytes, float(flops), size, step)


def _itemsize(piece: Piece) -> int:
    return round(piece.nbytes / math.prod(piece.shape)) if math.prod(piece.shape) else 0
