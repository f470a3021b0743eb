"""Launch parameters: rows of the tuned tables, and the arithmetic of tiles."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import torch

TUNED = Path(__file__).parent / "tuned"
target: str | None = None  # an architecture to compile for in place of the device's own, as in the compile report
_overrides: tuple[dict, dict] | None = None  # rows in use instead of the tables', and those looked up; see `overriding`


def config(row: str, default: dict[str, int], device: torch.device) -> dict[str, int]:
    """Launch parameters of a kernel: the row that this GPU's table in tuned/ has by that name, else the default.

    Tables are committed, each row with its provenance, "measured" or "predicted"; nothing is timed in a user's process.
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
    """In this context launch parameters are those of `architecture`, such as "sm_90", whatever the device is."""
    global target
    before, target = target, architecture
    try:
        yield
    finally:
        target = before


@functools.cache
def table(architecture: str) -> dict[str, dict[str, int]]:
    """Launch parameters by row name, from an architecture's table in tuned/; empty where there is none."""
    path = TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: row["config"] for name, row in rows.items() if "config" in row}


def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942" or "cpu": that of the device, or `target` where it is set."""
    return target or _architecture(device.type, device.index)


@functools.cache
def _architecture(kind: str, index: int | None) -> str:
    if kind != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def precision(x: torch.Tensor) -> str:
    """Of dot products: those of float32 follow torch.set_float32_matmul_precision."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def split(D: int) -> tuple[int, int]:
    """D as two tiles of powers of two where that is less than one: 80 = 64 + 16, but 64 = 64 + 0 and 100 < 128 + 0."""
    whole = power_of_2(max(D, 16))
    half, rest = whole // 2, power_of_2(max(D - whole // 2, 16))
    return (half, rest) if half >= 16 and half + rest < whole and D > half else (whole, 0)


def whole_rows(K: int) -> tuple[int, int, dict[str, int]]:
    """Rows of a program that holds whole rows of K values, their width as a power of two, and launch parameters."""
    block = power_of_2(K)
    return max(1, 1024 // block), block, dict(num_warps=min(max(block // 1024, 1), 16), enable_fp_fusion=True)
