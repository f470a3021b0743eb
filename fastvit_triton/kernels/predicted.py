"""The predicted rows in tuned/choices/<GPU>.json, which `benchmarks.choices` writes: their names, and the lookup.

A row is of a kind of block or an op, its phase, dtype and surroundings. For each width it has ways by number of rows
(images times tokens), as in "plain 1576 fused": plain up to 1576 rows, fused for more.
"""

import functools
import json
from collections import Counter

import torch

from . import launch, settings
from .sizes import Branch, kind_of_block

# ops without a matmul, whose operands autocast does not cast
KEEP_DTYPE = ("layer_norm", "add_layer_norm", "depthwise", "deformable_attention", "batch_norm_act")
# op → what each of its sizes is: "rows" are multiplied, "other side" of the weight is compared with the width, "" does
# not count, others are part of the row's name
OPS = {
    "linear": ("rows", "width", "other side", "norm", "", "pass", "residual", "layer scale", "sample scale"),
    "fc1": ("rows", "width", "", "pass"),  # of a mixed MLP in inference, with its activation
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


def predicted_way(
    gpu: str, branches: tuple[Branch, ...], dtype: torch.dtype, training: bool, mode: str
) -> tuple[str, str]:
    """(the way of a block by its row in a GPU's table, which row that is), if it is "replayed", "called" or "compiled".

    A block without a row runs as its branches do: mixed if their ways differ, and plain if one is plain.
    """
    rows, channels = branches[0].images * branches[0].tokens, branches[0].channels
    way, why = row_of(gpu, block_row(branches, dtype, training, mode), channels, rows)
    if way is None and len(branches) > 1:
        ways = {predicted_way(gpu, (branch,), dtype, training, mode)[0] for branch in branches}
        way = ways.pop() if len(ways) == 1 else "plain" if "plain" in ways else "mixed"
        why += ", as its branches run"
    return way or "plain", why


def block_row(branches: tuple[Branch, ...], dtype: torch.dtype, training: bool, mode: str) -> str:
    """Name of a block's row: kind, phase, whether branches are scaled, dtype and surroundings."""
    phase = "training" if training else "inference"
    if any(branch.layer_scale for branch in branches):
        phase += " with LayerScale"
    elif training and any(branch.scales for branch in branches):
        phase += " with stochastic depth"
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


def row_of(gpu: str, name: str, width: int, rows: int) -> tuple[str | None, str]:
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


def forget() -> None:
    """Clears cached tables, so that they are read again."""
    _table.cache_clear()
    _gpu_on.cache_clear()
