"""GPUs with known rates, from rates.json, which states the source of each."""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RATES = Path(__file__).with_name("rates.json")


class Device(NamedTuple):
    """Rates of a GPU by its data sheet."""

    name: str  # as its maker writes it
    tflops: float  # of dense 16-bit products with float32 sums
    float32_tflops: float  # of float32 arithmetic without tensor cores
    gbs: float  # bandwidth of memory
    source: str  # of these figures
    # factors of rates beside the constants, which hold for an RTX 4090
    clock: float = 1.0  # of `tflops`: limits of power, and of clocks
    memory: float = 1.0  # of `gbs`
    attention: float = 1.0  # of the rate of attention's products, forward
    patch_tflops: float = math.inf  # of eager 16-bit convolutions with the stride of their kernel, where slower
    # of PyTorch's LayerNorm, forward and backward: nanoseconds of a row, besides those of its bytes
    norm_row_ns: Sequence[float] = (0.0, 0.0)


class Gpu(NamedTuple):
    """Rates of a GPU."""

    key: str  # its short name, also that of its table of choices
    name: str  # as the driver reports it, in part
    architecture: str  # sm_90, gfx942, …
    units: int  # streaming multiprocessors
    product_tflops: float  # of 16-bit BLAS matmuls with large K
    copy_gbs: float  # bandwidth of a copy, reads plus writes
    fused_product: tuple[float, float, float]  # our matmuls as a fraction of BLAS: pessimistic, expected, best
    attention_tflops: tuple[float, float]  # of PyTorch's attention, forward and backward, at about 200 tokens
    fused_attention_tflops: tuple[float, float]  # of ours
    source: str  # where the rates come from
    sheet: Device  # those of its data sheet


@functools.cache
def table() -> dict[str, Any]:
    """Content of rates.json."""
    return json.loads(RATES.read_text())


@functools.cache
def gpus() -> dict[str, Gpu]:
    """GPUs with known rates, by short name."""

    def of(key: str, row: dict[str, Any]) -> Gpu:
        fixed: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in row.items()}
        return Gpu(key, **fixed | {"sheet": Device(row["name"], **row["sheet"])})

    return {key: of(key, row) for key, row in table()["gpus"].items()}


def devices() -> dict[str, Device]:
    """The data sheets of GPUs with known rates, by short name."""
    return {key: gpu.sheet for key, gpu in gpus().items()}


def gpu_by_name(name: str) -> Gpu:
    """The GPU of a short name such as rtx4090, or of what ends only this one, such as 4090; any case and spaces."""
    short = (
        "".join(filter(str.isalnum, name.lower())).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    )
    near = [key for key in gpus() if len(short) > 2 and key.endswith(short)]
    if short not in gpus() and len(near) != 1:
        raise ValueError(f"gpu is {name}; use one of {', '.join(near or gpus())}")
    return gpus()[short if short in gpus() else near[0]]
