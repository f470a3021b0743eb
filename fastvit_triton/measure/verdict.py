"""What a conversion is expected to gain on a GPU, against the best of PyTorch; predicted, not measured."""

import contextlib
import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..convert import captured
from ..convert.example import arguments
from ..convert.reporting import Report
from ..expected.gpus import Gpu, gpu_by_name, gpus
from ..expected.times import error_of_gain
from ..kernels.backend import why_not
from ..kernels.launch import architecture
from ..kernels.predicted import gpu_on

if TYPE_CHECKING:
    from ..expected.count import Prediction

MODES = ("default", "max-autotune")
NEXT = "fastvit-triton check --model …"


class Expected(NamedTuple):
    """Predicted times of one inference call, and what they are compared with; prints as one sentence."""

    headline: str  # of the report: what is converted, and its share
    gpu: str  # its name
    numbers: str  # "bfloat16", or "autocast to float16"
    batch: int  # number of images
    eager_ms: float  # milliseconds in eager PyTorch
    compile_ms: tuple[float, float]  # under torch.compile in its mode "default", and in its mode "max-autotune"
    ours_ms: float  # by default, at the expected rates of our kernels
    backend_ms: float  # under torch.compile(model, backend="fastvit_triton"), if it finds what `optimize` does
    # of published gains of torch.compile over eager of the model's family, nine of ten are predicted with at most this
    # error; None for a model without a name of timm's, or of a family without published figures
    error: float | None

    @property
    def speedup(self) -> tuple[float, float]:
        """How many times ours is faster than torch.compile in each of MODES."""
        return self.compile_ms[0] / self.ours_ms, self.compile_ms[1] / self.ours_ms

    def __str__(self) -> str:
        over, best = self.speedup
        error = "not tested against measurements" if self.error is None else f"± {100 * self.error:.0f} %"
        whole = ""
        # small batches, and models of which much is not converted
        if 1.02 * self.backend_ms < self.ours_ms and self.backend_ms < self.compile_ms[0]:
            gain = self.compile_ms[0] / self.backend_ms
            whole = f'; torch.compile(model, backend="fastvit_triton") {gain:.2f} ×'
        return (
            f"{self.headline.rstrip('.')}; {self.gpu}, {self.numbers}, batch {self.batch}: expected {over:.2f} × "
            f"torch.compile ({error}), {best:.2f} × its mode max-autotune{whole}; next: {NEXT}"
        )


def expected(
    report: Report, *, gpu: str | None = None, batch: int = 64, amp: str | torch.dtype | None = None
) -> Expected:
    """Predicts how much faster a converted model is in inference than torch.compile; nothing is measured."""
    from ..expected.count import predict

    autocast = getattr(torch, amp, amp) if isinstance(amp, str) else amp
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"amp is {amp}; use bfloat16, float16 or None")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch is {batch}; use an integer of at least 1")
    rates = local_gpu() if gpu is None else gpu_by_name(gpu)
    model = None if report.subject is None else report.subject.model
    if report.subject is None or model is None:
        raise ValueError("report is of a graph, or of a model that was deleted; give that of `optimize` for a model")
    example = report.subject.example()
    if example is None:
        raise ValueError("the model does not state the size of its input; give optimize(model, example=…)")
    dtype = torch.bfloat16 if autocast is None else torch.float32
    inputs, named = arguments(tree_map_only(Tensor, lambda t: _images(t, batch, dtype), example))
    model = copy.deepcopy(model).eval().to(dtype)
    casting = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with casting, captured.counting():
        blocks = [module for module in model.modules() if captured.is_bound(module)]
        if blocks and all(t.is_floating_point() for t in tree_leaves(example) if isinstance(t, Tensor)):
            model = model.cpu()  # where it is counted; captures are of a device and a dtype
            for block in blocks:
                captured.ask(block, True)  # as on a GPU
            captured.call(model, tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=dtype), example))
        prediction = predict(model, rates, False, *inputs, **named)
    numbers = "bfloat16" if autocast is None else f"autocast to {str(autocast).removeprefix('torch.')}"
    return of_prediction(prediction, report, batch, numbers)


def local_gpu() -> Gpu:
    """The rates of this machine's GPU if the kernels run on it, else of the H200."""
    if not torch.cuda.is_available() or why_not(torch.device("cuda"), torch.bfloat16) is not None:
        return gpu_by_name("h200")
    device = torch.device("cuda", torch.cuda.current_device())
    return gpus()[gpu_on(device)]._replace(architecture=architecture(device))


def of_prediction(found: "Prediction", report: Report, batch: int, numbers: str) -> Expected:
    """What a prediction of inference says; arguments as the attributes of `Expected`."""
    compiled = (found.compiled_us(MODES[0]) / 1e3, found.compiled_us(MODES[1]) / 1e3)
    ours = found.ours_us()[1] / 1e3
    whole = found.backend_us() / 1e3
    cfg: Any = None if report.subject is None else getattr(report.subject.model, "pretrained_cfg", None)
    name = cfg.get("architecture") if isinstance(cfg, Mapping) else None  # timm's, or ours of the same name
    error = None if name is None else error_of_gain(name)
    eager = found.eager_us() / 1e3
    return Expected(report.headline(), found.gpu.name, numbers, batch, eager, compiled, ours, whole, error)


def _images(t: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory of the same form for this number of images."""
    shape = (batch, *t.shape[1:]) if t.dim() > 1 else t.shape
    return torch.empty(shape, dtype=dtype if t.is_floating_point() else t.dtype, device="meta")
