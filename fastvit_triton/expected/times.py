"""Expected time of work on a GPU: data-sheet rates times constants that were fitted to published measurements.

A kernel takes the longer of its products and its memory passes, both at a fraction of the data sheet's rates that
depends on its kind, softened where they are equal, and not less than the time of an empty launch:

    t = max(((flops' / (rate · f))⁴ + (bytes / (bandwidth · m))⁴)^¼, LEAST_US)

flops' counts the padding of tiles. PyTorch's norms take some time for each row besides, and convolutions of patches are
no faster than `Device` says. A call takes the longer of its kernels and of the host, which launches them one by one.
Gradients of norms count as norms, and those of attention run at the rates of the GPU at 197 tokens of 64 channels.
Constants and their provenance: rates.json, written by `benchmarks.fit_rates`.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping

from .gpus import Device, Gpu, table
from .work import UNMODELLED, GpuWork

LEAST_US = 4.0  # of a kernel; an estimate
CONSTANTS_OF = {  # kind → the kind whose constants it takes, but for the rate of products, which `with_ours` changes
    "norm backward": "norm",
    "16-bit norm backward": "16-bit norm",
    "attention backward": "attention",
    "masked attention backward": "masked attention",
    "fused product": "product",
    "fused attention": "attention",
    "fused attention backward": "attention",
}
PREFIXES = "dinov3 rope siglip flexivit samvit eva beit swin deit cait".split()  # families by parts of timm's names
ROWS, COLUMNS, DEPTH = 64, 64, 16  # tile of a batched product to which its sizes are padded


@functools.cache
def constants() -> dict[str, float]:
    """The fitted constants by name."""
    return {key: row["value"] for key, row in table()["constants"].items()}


def family(name: str) -> str:
    """The first of PREFIXES that timm's name contains, otherwise the name up to its first digit or underscore."""
    return next((prefix for prefix in PREFIXES if prefix in name), re.split(r"[\d_]", name, maxsplit=1)[0])


def error_of_gain(name: str) -> float | None:
    """The error of the predicted gain of torch.compile over eager that nine of ten rows of a family do not exceed."""
    return table()["error_of_gain"].get(family(name))


def call_us(
    work: Iterable[tuple[GpuWork, int]],
    device: Device,
    images: int,
    host: str | None = None,
    fitted: Mapping[str, float] | None = None,
) -> float:
    """Expected microseconds of a call on a GPU."""
    fitted = constants() if fitted is None else fitted
    kernels = list(work)
    gpu = sum(times * kernel_us(kernel.at_batch(images), device, fitted) for kernel, times in kernels)
    return gpu if host is None else max(gpu, fitted[f"host: {host}"] * sum(times for _, times in kernels))


def saved_by_templates_us(
    templates: Iterable[tuple[tuple[tuple[GpuWork, ...], tuple[GpuWork, ...]], int]], gpu: Gpu, device: Device
) -> float:
    """Microseconds by which mode max-autotune is faster: where a template with its epilogue is, it takes the template.

    Templates are as fast as our kernels are expected to be, in relation to PyTorch's BLAS.
    """
    fitted = with_ours(gpu, 1)
    saved = 0.0
    for (apart, together), times in templates:
        before, after = (sum(kernel_us(one, device, fitted) for one in some) for some in (apart, together))
        saved += times * max(0.0, before - after)
    return saved


def with_ours(gpu: Gpu, ratio: int) -> dict[str, float]:
    """The constants, with those of our kernels and of gradients: PyTorch's times the ratios of a GPU."""
    fitted = dict(constants())
    for kind, others in CONSTANTS_OF.items():
        fitted |= {kind + n.removeprefix(others): v for n, v in constants().items() if n.startswith(f"{others}:")}
    fitted["fused product: flops"] *= gpu.fused_product[ratio]
    fitted["fused attention: flops"] *= gpu.fused_attention_tflops[0] / gpu.attention_tflops[0]
    padding = _up(197, ROWS) * _up(197, COLUMNS) / 197**2
    for kind, tflops in (
        ("", gpu.attention_tflops),
        ("masked ", gpu.attention_tflops),
        ("fused ", gpu.fused_attention_tflops),
    ):
        channels = fitted[f"{kind}attention backward: channels"]
        fitted[f"{kind}attention backward: tflops"] = tflops[1] * padding * (64 + channels) / 64
    fitted["fused pass: bandwidth"] = fitted[f"compiled {'norm' if ratio else 'pass'}: bandwidth"]
    return fitted


def kernel_us(work: GpuWork, device: Device, fitted: Mapping[str, float]) -> float:
    """Expected microseconds of one kernel; `work` is for the whole batch."""
    kind = UNMODELLED.get(work.kind, work.kind).removeprefix("patch ")
    memory = work.nbytes / (device.gbs * device.memory * fitted[f"{kind}: bandwidth"]) / 1e3
    if kind.startswith(("norm", "16-bit norm")):
        memory += work.size[1] * device.norm_row_ns[kind.endswith("backward")] / 1e3
    compute = 0.0
    if work.flops:
        rate = device.float32_tflops if work.kind == "float32 product" else device.tflops * device.clock
        rate *= device.attention if "attention" in kind else 1.0
        rate = fitted.get(f"{kind}: tflops") or rate * fitted[f"{kind}: flops"]
        compute = _padded(work, fitted) / rate / 1e6
    if work.kind == "patch convolution":
        compute = max(compute, work.flops / device.patch_tflops / 1e6)
    return max((compute**4 + memory**4) ** 0.25, LEAST_US)


def _padded(work: GpuWork, fitted: Mapping[str, float]) -> float:
    """Flops of the tiles that cover a product, longer by what a short sum over K or few channels cost."""
    count, M, N, K = work.size
    if "attention" in work.kind:  # the exponentials of the scores cost as much as some channels
        pairs = count * _up(M, ROWS) * _up(N, COLUMNS)
        return work.flops / (count * M * N * K) * pairs * (_up(K, 32) + fitted[f"{work.kind}: channels"])
    if work.kind == "depthwise":
        return work.flops
    if count > 1:
        return 2.0 * count * _up(M, ROWS) * _up(N, COLUMNS) * _up(K, DEPTH) * (1 + fitted["product: depth"] / K)
    return work.flops * _up(N, COLUMNS) / N * (1 + fitted["product: depth"] / K)


def _up(value: float, step: int) -> float:
    return math.ceil(value / step) * step
