"""What a call has a GPU do, from its trace: matrix products, attention and passes over memory, each with its sizes.

A call is traced with few images; `GpuWork` holds the parts that grow with their number, and those that do not, such as
weights, so that `at_batch` gives the work for any number of images.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..engine.values import reserved, without_weights
from .cuda_operators import as_on_cuda
from .events import MATMULS, Event, Piece
from .inductor import Kernel, grouped, is_extern, kernels
from .trace import tracing

IMAGES = 2  # in a traced call; operators may treat one image differently
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit_no_training")
NORM_BACKWARD = "native_layer_norm_backward"
REDUCTIONS = (
    *("_softmax", "_softmax_backward_data", "sum", "mean", "amax", "max", "var_mean", "linalg_vector_norm"),
    "_adaptive_avg_pool2d",
)
COPIES = ("clone", "roll", "cat", "stack", "index", "index_select", "gather", "constant_pad_nd", "im2col", "copy_")
ATTENTION = {
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_efficient_attention": "masked attention",
}
ATTENTION |= {f"{name}_backward": f"{kind} backward" for name, kind in ATTENTION.items()}
KINDS = {  # kind → what it is
    "product": "16-bit matrix product of PyTorch's BLAS",
    "float32 product": "matrix product in float32 without TF32",
    "attention": "FlashAttention",
    "masked attention": "memory-efficient attention with a bias or mask",
    "attention backward": "gradients of FlashAttention",
    "masked attention backward": "gradients of memory-efficient attention",
    "convolution": "convolution in 16 bits, channels first",
    "patch convolution": "the same with a stride of the kernel's size, in eager PyTorch",
    "depthwise": "depthwise convolution",
    "norm": "LayerNorm, RMSNorm, BatchNorm or GroupNorm in float32",
    "16-bit norm": "the same of 16-bit values",
    "norm backward": "gradients of LayerNorm in float32, in two kernels",
    "16-bit norm backward": "the same of 16-bit values",
    "reduction": "softmax, sum, mean or maximum",
    "copy": "copy that moves values: contiguous, roll, cat, pad, index",
    "tanh": "GELU by tanh",
    "pass": "any other operator without products",
    "interpolation": "bilinear interpolation of maps of several images, channels first; its time is not modelled",
    "compiled pass": "kernel of torch.compile without a reduction",
    "compiled norm": "kernel of torch.compile with a reduction",
    "fused product": "matrix product of ours, or of a template of torch.compile, with what follows it",
    "fused attention": "attention of ours",
    "fused attention backward": "gradients of attention of ours",
    "fused pass": "kernel of ours without a product",
}
# Kind whose time is not modelled → the kind whose constants stand in for it. UpSampleBilinear2d.cu gives each output
# pixel of a channels-first map to one thread, which loops over all images and channels.
UNMODELLED = {"interpolation": "pass"}
OURS = {  # kernel → kind
    "linear._fwd_kernel": "fused product",
    "mlp._fwd_kernel": "fused product",
    "patch_embed._fwd_kernel": "fused product",
    "patch_embed._bwd_weight_kernel": "fused product",
    "attention._fwd_kernel": "fused attention",
    "attention._fwd_whole_kernel": "fused attention",
    "attention._fwd_tma_kernel": "fused attention",
    "attention._bwd_kernel": "fused attention backward",
    "attention._bwd_tma_kernel": "fused attention backward",
    "attention._bwd_dq_kernel": "fused attention backward",
    "attention._bwd_dkdv_kernel": "fused attention backward",
    "attention._bwd_dbias_kernel": "fused attention backward",
    "attention._bwd_axes_kernel": "fused attention backward",
    "window._fwd_kernel": "fused attention",
    "window._bwd_kernel": "fused attention backward",
    "window._bwd_dq_kernel": "fused attention backward",
    "window._bwd_dbias_kernel": "fused attention backward",
}


class GpuWork(NamedTuple):
    """A kernel's work."""

    kind: str  # one of KINDS
    nbytes: float  # bytes read and written
    flops: float = 0.0  # of a product, convolution or attention; a multiply-add is 2
    # of products: (number of matrices, M, N, K); of attention: (heads of all images, queries, keys, channels); of
    # LayerNorms: (1, rows, 1, values of a row)
    size: tuple[float, float, int, int] = (0, 0, 0, 0)
    # for each of `nbytes`, `flops`, and the first two of `size`, the part that one image adds
    per_image: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def at_batch(self, images: int) -> "GpuWork":
        """The same kernel's work for this number of images."""
        nbytes, flops, count, rows = (step * (images - IMAGES) for step in self.per_image)
        size = (self.size[0] + count, self.size[1] + rows, *self.size[2:])
        return GpuWork(self.kind, self.nbytes + nbytes, self.flops + flops, size)


class CallWork(NamedTuple):
    """The work of one call, as (kernel, number of times)."""

    eager: tuple[tuple[GpuWork, int], ...]  # PyTorch's operators
    compiled: tuple[tuple[GpuWork, int], ...]  # under torch.compile in its default mode
    # ((product, kernel that follows it), kernels that mode max-autotune may run instead), number of times
    templates: tuple[tuple[tuple[tuple[GpuWork, ...], tuple[GpuWork, ...]], int], ...]


def work_of(
    model: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype, autocast: torch.dtype | None = None
) -> CallWork:
    """The work of a model's inference on a CUDA device."""
    model = without_weights(model).eval().to(dtype)
    images = reserved(torch.empty(IMAGES, *shape, dtype=dtype, device="meta"))
    with torch.no_grad(), tracing() as trace, as_on_cuda(autocast):
        model(images)
    return work_of_events(trace.events, growing(trace.events, images))


def work_of_events(events: list[Event], grows: Collection[int] = ()) -> CallWork:
    """The work of the events of a call of PyTorch's operators."""
    eager = Counter(_operator(event, grows) for event in events)
    compiled: Counter[GpuWork] = Counter()
    templates: Counter[tuple[tuple[GpuWork, ...], tuple[GpuWork, ...]]] = Counter()
    compiled_kernels = grouped(events)
    writers = {piece.storage: kernel for kernel in compiled_kernels if _is_product(kernel) for piece in kernel.writes}
    for kernel in compiled_kernels:
        one = _kernel(kernel, grows)
        compiled[one] += 1
        sources = [writers[piece.storage] for piece in kernel.reads if piece.storage in writers]
        if len(sources) == 1 and not _is_extern(kernel) and (instead := _template(sources[0], kernel, grows)):
            templates[(_kernel(sources[0], grows), one), instead] += 1
    return CallWork(tuple(eager.items()), tuple(compiled.items()), tuple(templates.items()))


def ours(events: Iterable[Event]) -> tuple[tuple[GpuWork, int], ...]:
    """The work of the events of a converted model's call, of this number of images."""
    counts: Counter[GpuWork] = Counter()
    for one in kernels(events):
        event = one.events[0] if isinstance(one, Kernel) else one
        if event.launches and event.ours:
            counts[_launch(event)] += 1
        elif event.launches:
            counts[_kernel(one, ()) if isinstance(one, Kernel) else _operator(event, ())] += 1
    return tuple(counts.items())


def growing(events: Iterable[Event], *inputs: Tensor) -> set[int]:
    """Storages whose size grows with the number of images: the inputs, and what is computed from them."""
    storages = {facts["number"] for t in inputs if "number" in (facts := vars(t.untyped_storage()))}
    for event in events:
        if any(piece.storage in storages for piece in event.reads):
            storages |= {piece.storage for piece in event.writes}
    return storages


def _launch(event: Event) -> GpuWork:
    """The work of a launch of ours."""
    kind = OURS.get(event.name)
    if kind is None:
        return GpuWork("fused pass", float(event.nbytes))
    return GpuWork(kind, float(event.nbytes), float(event.launch_flops), event.size)


def _is_product(kernel: Kernel) -> bool:
    return kernel.events[0].name in MATMULS


def _is_extern(kernel: Kernel) -> bool:
    return is_extern(kernel.events[0])


def _kernel(kernel: Kernel, grows: Collection[int]) -> GpuWork:
    """The work of a kernel of torch.compile."""
    if _is_extern(kernel):
        one = _operator(kernel.events[0], grows)
        return one._replace(kind=one.kind.removeprefix("patch "))  # which Inductor may run channels last
    reduces = any(event.name in (*NORMS, NORM_BACKWARD, *REDUCTIONS) for event in kernel.events)
    return _memory("compiled norm" if reduces else "compiled pass", (*kernel.reads, *kernel.writes), grows)


def _template(product: Kernel, after: Kernel, grows: Collection[int]) -> tuple[GpuWork, ...] | None:
    """The product with the pointwise operators that follow it, whose operand is then not stored, and the rest of them.

    The rest is a norm, which needs whole rows; None if nothing but a norm follows.
    """
    names = [event.name in NORMS or event.name in REDUCTIONS for event in after.events]
    start = names.index(True) if True in names else len(names)
    pointwise = after.events[:start]
    rest = after.events[start:]
    between = {piece.storage for piece in product.writes}
    results = [p for p in after.writes if any(p.storage == w.storage for event in pointwise for w in event.writes)]
    if len(results) != 1:
        return None
    read = {piece for event in pointwise for piece in event.reads}
    operands = [piece for piece in after.reads if piece in read and piece.storage not in between]
    event = product.events[0]
    one = _operator(event, grows)
    first = event.reads[MATMULS[event.name]]
    fused = _memory("fused product", (*event.reads, *operands, *results), grows, one.flops, one.size, first)
    if not rest:
        return (fused,)
    others = {piece for event in rest for piece in event.reads}
    pieces = (*results, *(p for p in after.reads if p in others and p not in read), *set(after.writes) - set(results))
    return fused, _memory("compiled norm", pieces, grows)


def _operator(event: Event, grows: Collection[int]) -> GpuWork:
    """The work of one of PyTorch's operators."""
    name = event.name
    pieces: Collection[Piece] = (*event.reads, *event.writes)
    if name in (NORM_BACKWARD, "convolution", "convolution_backward"):  # the constants are those of each operand once
        pieces = dict.fromkeys(pieces)
    if name in MATMULS:
        first, second = event.reads[MATMULS[name] :][:2]
        size = (math.prod(first.shape[:-2]), first.shape[-2], second.shape[-1], first.shape[-1])
        kind = "float32 product" if _itemsize(first) == 4 else "product"
        return _memory(kind, pieces, grows, 2.0 * math.prod(size), size, first)
    if name in ATTENTION:
        query, key = event.reads[1:3] if name.endswith("_backward") else event.reads[:2]
        size = (math.prod(query.shape[:2]), query.shape[2], key.shape[2], query.shape[3])
        return _memory(ATTENTION[name], pieces, grows, event.flops, size, query)
    if name in ("convolution", "convolution_backward"):
        image, weight = event.reads[:2] if name == "convolution" else event.reads[1:3]
        kind = "depthwise" if weight.shape[1] == 1 and image.shape[1] > 1 else "convolution"
        images, _, *sides = (event.writes if name == "convolution" else event.reads)[0].shape
        kernels = [*weight.shape[2:]]
        patches = [a * b for a, b in zip(sides, kernels, strict=True)] == [*image.shape[2:]] and min(kernels) > 1
        if name == "convolution" and kind == "convolution" and patches and _itemsize(image) == 2:
            kind = "patch convolution"
        size = (1, images * math.prod(sides), weight.shape[0], math.prod(weight.shape[1:]))
        return _memory(kind, pieces, grows, event.flops, size, image)
    if name in (*NORMS, NORM_BACKWARD):
        kind = "norm backward" if name == NORM_BACKWARD else "norm"
        x = event.reads[0]
        size = (1, math.prod(x.shape[:-1]), 1, x.shape[-1]) if "layer_norm" in name else (0, 0, 0, 0)
        return _memory(f"16-bit {kind}" if _itemsize(x) == 2 else kind, pieces, grows, size=size, operand=x)
    if name == "upsample_bilinear2d_channels_first" and event.writes[0].shape[0] > 1:
        return _memory("interpolation", pieces, grows)
    kind = "reduction" if name in REDUCTIONS else "copy" if name in COPIES else "pass"
    return _memory("tanh" if name == "gelu_tanh" else kind, pieces, grows)


def _memory(
    kind: str,
    pieces: Iterable[Piece],
    grows: Collection[int],
    flops: float = 0.0,
    size: tuple[float, float, int, int] = (0, 0, 0, 0),
    operand: Piece | None = None,
) -> GpuWork:
    """The work of a kernel that reads and writes these; its sizes grow with the number of images if `operand` does."""
    pieces = list(pieces)
    nbytes = float(sum(piece.nbytes for piece in pieces))
    step = sum(piece.nbytes for piece in pieces if piece.storage in grows) / IMAGES
    if operand is None or operand.storage not in grows:
        return GpuWork(kind, nbytes, flops, size, (step, 0.0, 0.0, 0.0))
    several = size[0] > 1 or kind.endswith("attention")
    rows = (size[0] / IMAGES, 0.0) if several else (0.0, size[1] / IMAGES)
    return GpuWork(kind, nbytes, flops, size, (step, flops / IMAGES, *rows))


def _itemsize(piece: Piece) -> int:
    return round(piece.nbytes / math.prod(piece.shape)) if math.prod(piece.shape) else 0
