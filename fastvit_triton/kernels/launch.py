"""Launch parameters: rows of the tables in tuned/, and tile arithmetic."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import torch

TUNED = Path(__file__).parent / "tuned"
target: str | None = None  # architecture that takes the place of the device's own; see `targeting`
_overrides: tuple[dict, dict] | None = None  # rows in use instead of the tables', and those looked up; see `overriding`


def config(row: str, default: dict[str, int], device: torch.device) -> dict[str, int]:
    """Launch parameters of a kernel: the row of that name in the table of this architecture, else the default.

    Tables are committed files whose rows are marked "measured" or "predicted". Nothing is timed in a user's process.

    Args:
        row: row name.
        default: launch parameters if the table has no such row.
        device: its architecture selects the table.
    """
    found = table(architecture(device)).get(row, default)
    if _overrides is not None:
        rows, looked_up = _overrides
        found = rows.get(row, found)
        looked_up.setdefault(row, found)
    return dict(found, enable_fp_fusion=True)


@contextlib.contextmanager
def overriding(rows: dict[str, dict[str, int]]) -> Iterator[dict[str, dict[str, int]]]:
    """In this context `rows` replace those of the tables; contexts nest.

    Yields the launch parameters that kernels looked up in it, by row name: from `rows`, a table or a default.
    """
    global _overrides
    before, looked_up = _overrides, {}
    _overrides = (rows if before is None else before[0] | rows), looked_up
    try:
        yield looked_up
    finally:
        _overrides = before


@contextlib.contextmanager
def targeting(architecture: str) -> Iterator[None]:
    """In this context CPU tensors count as those of a GPU of `architecture`, which need not be here."""
    global target
    before, target = target, architecture
    try:
        yield
    finally:
        target = before


@functools.cache
def table(architecture: str) -> dict[str, dict[str, int]]:
    """Launch parameters by row name, from tuned/<architecture>.json; empty if there is no such file."""
    path = TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: row["config"] for name, row in rows.items() if "config" in row}


def architecture(device: torch.device) -> str:
    """Architecture of the device, such as "sm_90", "gfx942" or "cpu"; `target` if that is set."""
    return target or _architecture(device.type, device.index)


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    if kind != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def is_gpu(device: torch.device) -> bool:
    """The device is a GPU, or counts as one inside `targeting`."""
    return device.type == "cuda" or target is not None


def precision(x: torch.Tensor) -> str:
    """input_precision of tl.dot; for float32 it follows torch.set_float32_matmul_precision."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def split_tiles(D: int) -> tuple[int, int]:
    """Widths of the two tiles, powers of two of at least 16, that hold D channels; the second is 0 if one is no wider.

    80 → (64, 16); 64 → (64, 0); 100 → (128, 0).
    """
    one_tile = power_of_2(max(D, 16))
    half, rest = one_tile // 2, power_of_2(max(D - one_tile // 2, 16))
    return (half, rest) if half >= 16 and half + rest < one_tile and D > half else (one_tile, 0)


def whole_row_blocks(K: int) -> tuple[int, int, dict[str, int]]:
    """(rows a program, tile width, launch options) of kernels whose programs hold whole rows of K values.

    There is one warp for every 1024 values: all accesses have 16 bytes, and rows of up to 1024 values need no barrier.
    """
    block = power_of_2(K)
    return max(1, 1024 // block), block, dict(num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True)
