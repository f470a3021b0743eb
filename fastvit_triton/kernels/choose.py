"""Chooses how a block or an op runs, before any of its ops is called: a lookup in tables, without arithmetic.

Ways      fused: our kernels, with the LayerNorm folded into the first matmul.
          mixed: BLAS matmuls, and one pass for the operations between them: activation; LayerScale, stochastic depth,
          residual and the next LayerNorm. Attention by the kernel that is expected to be faster. In inference without
          LayerScale, the last matmul of a block adds to the residual in place, and no pass follows it.
          plain: PyTorch's modules, operator by operator.
          onednn: on a CPU, oneDNN's products.

The first of these decides: a context (`settings.forcing`) or the backend switch; measurements on this GPU (see
`measured`); a measured row "ways" in tuned/<architecture>.json; a predicted row in tuned/choices/<GPU>.json, which
`benchmarks.choices` writes; plain. On a CPU: measurements on this machine, else the row of this CPU in tuned/cpu.json,
else plain. All ways compute the same function.

A predicted row is of a kind of block or an op, its phase, dtype and surroundings. For each width it has ways by number
of rows (images times tokens), as in "plain 1576 fused": plain up to 1576 rows, fused for more.

While a graph is traced, choices must not depend on the number of images or tokens, so those of `TRACED` are used. Mixed
and plain are then both PyTorch operators, which the compiler fuses, and are called plain.
"""

import functools
import json
import math
import operator
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend, launch, measured, onednn, settings
from .sizes import Branch, kind_of_block

TRACED = (256, 197)  # (images, tokens) assumed while tracing
MAX_CHOICES = 4096  # cached choices
NORMS = ("layer_norm", "add_layer_norm")  # ops
# ops without a matmul, whose operands autocast does not cast
KEEP_DTYPE = ("layer_norm", "add_layer_norm", "depthwise", "deformable_attention", "batch_norm_act")
# op → what each of its sizes is: "rows" are multiplied, "other side" of the weight is compared with the width, "" does
# not count, others are part of the row's name
OPS = {
    "linear": ("rows", "width", "other side", "norm", "", "pass", "residual", "layer scale", "sample scale"),
    "mlp": ("rows", "width", "", "", "norm", "", "pass", "residual", "layer scale", "sample scale"),
    "attention": ("rows", "rows", "rows", "width", "channels", "packed", ""),
    "patch_embed": ("rows", "other side", "width", "pass", "pass"),
    "layer_norm": ("rows", "width"),
    "add_layer_norm": ("rows", "width", "scale", "scale"),
    "depthwise": ("rows", "width", "", "stride", "bias", "activation", "residual", "copied weight"),
    "window_attention": ("rows", "width", "", "copy", "copy"),
    "deformable_attention": ("rows", "width", "", "", "", ""),
    "batch_norm_act": ("rows", "width", "activation", "residual"),
}


def has_ways(x: Tensor) -> bool:
    """True if a block with input x can run otherwise than plain: the kernels are available, or oneDNN on a CPU."""
    return backend.kernels_available(x) or onednn.usable(x)


class Choice(NamedTuple):
    """How the branches of a block, or an op, run, and why.

    Attributes:
        name: kinds of the branches, "attention + mlp", or name of the op.
        way: "fused", "mixed", "onednn" or "plain".
        why: "asked for", "empty" (there are no tokens), or "measured" or "predicted", with the row that decided.
        shapes: names in tables of measurements, most exact first.
        branches: of the block; empty for an op.
        replayed: True if calls of the block are replayed, which takes less host time.
        path: of the module that made it, if observed in `settings.locating`; else None.
    """

    name: str
    way: str
    why: str
    shapes: tuple[str, ...]
    branches: tuple[Branch, ...]
    replayed: bool = False
    path: str | None = None


_choices: dict[tuple, str] = {}


def way_of(x: Tensor, branches: tuple[Branch, ...], training: bool, replayed: bool, frozen: str | None = None) -> str:
    """Chooses the way of a block's residual branches: "fused", "mixed", "onednn" or "plain".

    Args:
        x: [B, ..., C], the residual, for which the kernels are available; only its device and dtype are used.
        branches: of the block; while tracing, numbers of images and tokens are those of `TRACED`.
        training: True if gradients are enabled.
        replayed: True if calls of the block are replayed, see `engine.replay`.
        frozen: the precision with which it was frozen, see `engine.freeze`; None if it was not.
    """
    traced = torch.compiler.is_compiling()
    dtypes = x.dtype, launch.product_dtype(x)
    return _way(x.device, dtypes, tuple(map(tuple, branches)), training, traced, replayed, frozen)


@backend.constant
def _way(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[tuple, ...],
    training: bool,
    traced: bool,
    replayed: bool,
    frozen: str | None,
) -> str:
    """`way_of`, for the dtypes of the residual and of the matmuls."""
    key = (device, dtypes, sizes, training, traced, replayed, frozen, *settings.choices(device.type))
    way = _choices.get(key)
    if way is None or settings.observer is not None:
        branches = tuple(Branch(*fields) for fields in sizes)
        if dtypes[0] == torch.float32 != dtypes[1]:
            branches = tuple(b._replace(wide=1) for b in branches)
        if traced:
            branches = tuple(b._replace(images=TRACED[0], tokens=TRACED[1]) for b in branches)
        forced = settings.forced
        switch = backend.backend()
        if device.type == "cpu" and launch.target is None and switch != "triton":
            phase = "training" if training else "frozen" if frozen else "inference"
            reduced = frozen not in (None, "float32") and phase == "frozen" and forced is None
            reduced = reduced and dtypes[1] == torch.float32  # not after `.half()`
            choice = _choose_on_cpu(dtypes[1], branches, phase, traced, "onednn" if reduced else forced, switch)
        else:
            choice = choose(device, branches, dtypes[1], training, traced, replayed, forced, switch)
        way = "plain" if traced and choice.way != "fused" else choice.way
        _remember(key, choice._replace(way=way))
    return way


def _remember(key: tuple, choice: Choice) -> None:
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    _choices[key] = choice.way
    if settings.observer is not None:
        settings.observer(choice if settings.locator is None else choice._replace(path=settings.locator()))


def choose(
    device: torch.device,
    branches: tuple[Branch, ...],
    dtype: torch.dtype,
    training: bool,
    traced: bool,
    replayed: bool,
    forced: str | None,
    switch: str,
) -> Choice:
    """Makes the choice for the branches of a block.

    Args:
        device: device of the GPU, see `gpu_on`.
        branches: of the block.
        dtype: of the matmuls.
        training: True if gradients are enabled.
        traced: True while a graph is traced.
        replayed: True if calls of the block are replayed.
        forced: the way set by `settings.forcing`, or None.
        switch: `backend.backend()`.
    """
    name = " + ".join(branch.kind for branch in branches)
    shapes = block_names(branches, "training" if training else "inference")
    if forced is not None or switch == "triton":
        return Choice(name, "plain" if forced == "onednn" else forced or "fused", "asked for", shapes, branches)
    if not all(branch.images * branch.tokens for branch in branches):
        return Choice(name, "plain", "empty", shapes, branches)
    found = None if launch.is_ieee(dtype) else measured_way(device, shapes, replayed or traced)
    if found is None:
        mode = "compiled" if traced else "replayed" if replayed else "called"
        found = predicted_way(gpu_on(device), branches, dtype, training, mode)
    return Choice(name, *found, shapes, branches, replayed)


def predicted_way(
    gpu: str, branches: tuple[Branch, ...], dtype: torch.dtype, training: bool, mode: str
) -> tuple[str, str]:
    """(the way of a block by its predicted row, which row that is).

    A block without a row runs as its branches do: mixed if their ways differ, and plain if one is plain.

    Args:
        gpu: name of its table.
        branches: of the block.
        dtype: of the matmuls.
        training: True if gradients are enabled.
        mode: "replayed", "called" or "compiled".
    """
    rows, channels = branches[0].images * branches[0].tokens, branches[0].channels
    way, why = _row(gpu, block_row(branches, dtype, training, mode), channels, rows)
    if way is None and len(branches) > 1:
        ways = {predicted_way(gpu, (branch,), dtype, training, mode)[0] for branch in branches}
        way = ways.pop() if len(ways) == 1 else "plain" if "plain" in ways else "mixed"
        why += ", as its branches run"
    return way or "plain", why


def block_row(branches: tuple[Branch, ...], dtype: torch.dtype, training: bool, mode: str) -> str:
    """Name of a block's row: kind, phase, dtype and surroundings; in training also whether branches are scaled."""
    phase = "training" if training else "inference"
    if training and any(branch.scales for branch in branches):
        phase += " with LayerScale" if any(branch.layer_scale for branch in branches) else " with stochastic depth"
    of = "autocast" if any(branch.wide for branch in branches) else _named(dtype)
    return f"{kind_of_block(branches)}; {phase}; {of}; {mode}"


def op_row(op: str, dtype: torch.dtype, training: bool, sizes: tuple[int, ...]) -> tuple[str, int, int]:
    """(name of an op's row, width, rows), from its sizes as in `OPS`."""
    of: Counter[str] = Counter()
    rows = 1
    for name, size in zip(OPS[op], sizes, strict=False):
        if name == "rows":
            rows *= size
        else:
            of[name] += size
    width, other = of.pop("width"), of.pop("other side", 0)
    of.pop("", None)
    if op == "linear":
        of["narrowing"] = other < width
    if op == "patch_embed":
        of["large patches"] = other > 4 * width
    if op == "attention":  # our backward pass is one kernel for these
        of["one tile"] = of.pop("channels") in (16, 32, 64)
    of["stride"] = of["stride"] > 1
    facts = [name if size == 1 else f"{name} × {int(size)}" for name, size in of.items() if size]
    phase = "training" if training else "inference"
    of_dtype = "float32" if op in KEEP_DTYPE and dtype == torch.float32 else _named(dtype)  # they have no matmul
    return f"{', '.join([op, *facts])}; {phase}; {of_dtype}", width, rows


def _named(dtype: torch.dtype) -> str:
    """What rows call the dtype of matmuls."""
    return "16-bit" if dtype.itemsize == 2 else "IEEE float32" if launch.is_ieee(dtype) else "TF32"


def _row(gpu: str, name: str, width: int, rows: int) -> tuple[str | None, str]:
    """(the way for this width and number of rows in a GPU's table, None without a row; what was looked up)."""
    row = _table(gpu).get(name)
    if row is None:
        return None, f"no predicted row: {name}"
    if isinstance(row, str):
        said, steps = "", row
    else:
        low, high = min(row, key=lambda span: max(span[0] / max(width, 1), width / span[1]))
        steps = row[low, high]
        said = f", width {low}" + f" to {high}" * (high > low)
        said += "" if low <= width <= high else f" (no row for {width})"
    *limits, last = steps.split()
    way = next((way for way, most in zip(limits[::2], limits[1::2], strict=True) if rows <= int(most)), last)
    return way, f"predicted: {name}{said}"


@functools.cache
def _table(gpu: str) -> dict[str, str | dict[tuple[int, int], str]]:
    """The rows of a GPU's table: name → (first, last) width → ways by number of rows; or those of all widths."""
    rows = json.loads((launch.TUNED / "choices" / f"{gpu}.json").read_text())["rows"]
    return {name: row if isinstance(row, str) else {_span(text): steps for text, steps in row.items()}
            for name, row in rows.items()}  # fmt: skip


def _span(text: str) -> tuple[int, int]:
    """(first, last) of "384-768", or of "384"."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _choose_on_cpu(
    dtype: torch.dtype, branches: tuple[Branch, ...], phase: str, traced: bool, forced: str | None, switch: str
) -> Choice:
    """`choose` on a CPU, where only oneDNN can replace PyTorch's products: by the block's mean product.

    Args:
        dtype: of the products.
        branches: of the block.
        phase: one of `onednn.PHASES`.
        traced: True while a graph is traced, which oneDNN's operator does not enter.
        forced: the way set by `settings.forcing`, or None.
        switch: `backend.backend()`.
    """
    name = " + ".join(branch.kind for branch in branches)
    shapes = block_names(branches, phase)
    if traced or not all(branch.images * branch.tokens for branch in branches):
        return Choice(name, "plain", "asked for" if traced else "empty", shapes, branches)
    if forced is not None or switch == "onednn":
        way = "onednn" if forced in (None, "onednn") else "plain"
        return Choice(name, way, "asked for", shapes, branches)
    lookups = shapes if phase != "frozen" else (*shapes, *block_names(branches, "inference"))
    if (found := measured_way(torch.device("cpu"), lookups)) is not None:
        return Choice(name, *found, shapes, branches)
    macs = [b.images * b.tokens * b.channels * size for b in branches for size in (b.width, b.inner)]
    way = "onednn" if onednn.pays(dtype, sum(macs) / len(macs), phase) else "plain"
    return Choice(name, way, "measured", shapes, branches)


def block_names(branches: tuple[Branch, ...], phase: str) -> tuple[str, str]:
    """Names of a block's shape in tables of measurements: with exact and with rounded sizes.

    Args:
        branches: of the block.
        phase: "inference" or "training"; on a CPU one of `onednn.PHASES`.
    """
    pair = branches, [branch.rounded for branch in branches]
    exact, near = (f"{' + '.join(branch.name for branch in sizes)} {phase}" for sizes in pair)
    return exact, f"~{near}"


def op_names(op: str, size: int, training: bool, sizes: tuple[int, ...]) -> tuple[str, str]:
    """As `block_names`, for an op with arguments of `size` bytes per value."""
    phase = f"{'training' if training else 'inference'}{' fp32' if size == 4 else ''}"
    exact, near, *_ = measured.names(f"{op} {phase}", tuple(map(int, sizes)))
    return exact, near


def measured_way(device: torch.device, shapes: tuple[str, ...], replayed: bool = True) -> tuple[str, str] | None:
    """(the way measured for one of these shapes, on this GPU or else on its architecture; which row that is); or None.

    Blocks of the tables of architectures were replayed; they say nothing of others, which take the host longer.
    """
    pretended = launch.target is not None or settings.assumed is not None
    tables = {"on this machine": measured.of(device, pretended).ways}
    if replayed:
        tables[f"in tuned/{launch.architecture(device)}.json"] = measured_ways(launch.architecture(device))
    found = ((ways[shape], f"measured {where}: {shape}") for where, ways in tables.items() for shape in shapes
             if shape in ways)  # fmt: skip
    return next(found, None)


def product_refusal(x: Tensor, weight: Tensor, training: bool) -> str | None:
    """Why a linear layer of a captured graph stays PyTorch's; None if oneDNN's product replaces it.

    Args:
        x: [..., K]; for a symbolic number of rows, that of `TRACED` is used, so that the choice adds no guard.
        weight: [F, K].
        training: True if gradients of its output are wanted.
    """
    dtype = launch.product_dtype(x)
    reason = onednn.unlisted(x.device, dtype) or onednn.why_not(x.device, dtype)
    if reason is None and not all(t.layout is torch.strided for t in (x, weight)):
        reason = "it is not dense"
    if reason is not None or onednn.forced():
        return reason
    if not all(isinstance(size, int) for size in weight.shape):
        return "its weight has symbolic sizes"
    rows = math.prod(x.shape[:-1] if all(isinstance(size, int) for size in x.shape) else TRACED)
    pays = onednn.pays(dtype, rows * math.prod(weight.shape), "training" if training else "inference")
    return None if pays else "no measurement says that oneDNN's product of this size is faster on this CPU"


def rows_of(rows: int) -> int:
    """Number of rows by which an operand's path is chosen; constant while tracing."""
    return math.prod(TRACED) if torch.compiler.is_compiling() else rows


def lengths_of(images: int, queries: int, keys: int, heads: int) -> tuple[int, int, int, int]:
    """(images, heads, queries, keys) by which attention's path is chosen; constant while tracing, except one query."""
    if torch.compiler.is_compiling():
        images = TRACED[0]
        queries = 1 if isinstance(queries, int) and queries == 1 else TRACED[1]
        keys = TRACED[1]
    return images, heads, queries, keys


def is_asked_for() -> bool:
    """True if a way is forced, or the backend switch is "triton", so that no expected time decides."""
    return settings.forced is not None or backend.backend() == "triton"


def copies(x: Tensor, residual: Tensor | None) -> bool:
    """True if `linear` and `mlp` would copy an operand first, because its rows are strided; unknown while tracing."""
    if torch.compiler.is_compiling() or is_asked_for():
        return False
    return (x.stride(-1) != 1 and x.shape[-1] > 1) or not (residual is None or residual.is_contiguous())


def prefers_kernel(x: Tensor, op: str, *sizes: int) -> bool:
    """True if our kernels are chosen for a public function; they must be available.

    Norms of a traced inference call are left to the compiler, which fuses them with what is around them.

    Args:
        x: tensor of the operation's device and dtype.
        op: a name in `OPS`.
        sizes: what `OPS` names.
    """
    if op in NORMS and torch.compiler.is_compiling() and not (torch.is_grad_enabled() or is_asked_for()):
        return False
    dtype = x.dtype if op in KEEP_DTYPE else launch.product_dtype(x)
    fixed = tuple(map(operator.index, sizes))  # of weights, which may be symbolic
    return _prefers(x.device, dtype, torch.is_grad_enabled(), op, fixed)


@backend.constant
def _prefers(device: torch.device, dtype: torch.dtype, training: bool, op: str, sizes: tuple) -> bool:
    if settings.forced is not None or backend.backend() == "triton":
        return settings.forced not in ("plain", "onednn")
    key = (device, dtype, training, op, sizes, *settings.choices(device.type))
    way = _choices.get(key)
    if way is None or settings.observer is not None:
        choice = _choose_op(device, dtype, training, op, sizes)
        way = choice.way
        _remember(key, choice)
    return way == "fused"


def _choose_op(device: torch.device, dtype: torch.dtype, training: bool, op: str, sizes: tuple) -> Choice:
    shapes = op_names(op, dtype.itemsize, training, sizes)
    found = None if launch.is_ieee(dtype) else measured_way(device, shapes)
    if found is None:
        way, why = _row(gpu_on(device), *op_row(op, dtype, training, sizes))
        found = way or "plain", why
    return Choice(op, *found, shapes, ())


def gpu_on(device: torch.device) -> str:
    """Name of the table of this device's GPU, or of the one set by `settings.assuming` or `launch.targeting`."""
    real = launch.target is None and device.type == "cuda"
    return settings.assumed or _gpu_on(launch.architecture(device), real, device.index)


@functools.cache
def _gpu_on(architecture: str, real: bool, index: int | None) -> str:
    """The GPU of that name; else the first one of that architecture, else the first one of all."""
    gpus = json.loads((launch.TUNED / "choices" / "gpus.json").read_text())
    name = torch.cuda.get_device_name(index) if real else ""
    near = [key for key, gpu in gpus.items() if gpu["architecture"] == architecture]
    return next((key for key in near if gpus[key]["name"] in name), next(iter([*near, *gpus])))


@functools.cache
def measured_ways(architecture: str) -> dict[str, str]:
    """Measured ways in the table of an architecture: name of a branch and phase → way."""
    path = launch.TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return rows.get("ways", {}).get("measured", {})


def forget() -> None:
    """Clears the caches, so that tables and files are read again."""
    launch.forget()
    _choices.clear()
    measured_ways.cache_clear()
    _table.cache_clear()
    _gpu_on.cache_clear()
