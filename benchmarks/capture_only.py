"""What readers gain over captured blocks: both conversions of the same models, side by side.

    python -m benchmarks.coverage capture --out benchmarks/results [--only PATTERN]

Each model is converted as `optimize(model, example=…)` does, and again with no reader, so that every block is captured.
Compared: the share of the operations of linear layers and attention that run in our launches, fused attention
products, and launches of a call of the frozen model, counted from shapes on an assumed GPU with every module fused; the
Python calls of a frozen block, as in benchmarks/host.py, which also measures host time; the largest difference of an
output or gradient from the original's in float64, divided by the largest value; CPU seconds of the conversion. The
models are small, with random weights, and have two blocks, and six to count the calls of a block.
"""

import copy
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastvit_triton import freeze, optimize, set_backend
from fastvit_triton.convert import captured, conversion
from fastvit_triton.convert.example import arguments
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure.timeout import one_line

from .data import made
from .host import calls_of
from .no_device import no_device
from .official import difference, randomise, results
from .result_file import origin, write_pair
from .tables import capture_markdown

DEPTHS = (2, 6)
GPU = "h200"
ATTENTION = re.compile(r"attention|window|_softmax|_scaled_dot_product")  # in names of events


class Case(NamedTuple):
    """A line of capture_only.json."""

    name: str  # "package:model"
    build: dict[str, Any]  # see `data.made`; "depth" stands for the number of blocks
    inputs: Any  # of a call, likewise; a text such as "batchx3x32x32" stands for random numbers of this shape

    def model(self, depth: int) -> nn.Module:
        """The model with so many blocks."""
        return made(self.build, lambda text: depth if text == "depth" else text)

    def example(self, batch: int) -> Any:
        """Inputs of so many images."""

        def tensor(text: str) -> Any:
            if text == "batch":
                return batch
            return torch.randn([batch if n == "batch" else int(n) for n in text.split("x")])

        return made(self.inputs, tensor)


CASES = [Case(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text())]


def packed(images: int) -> dict[str, Tensor]:
    """Patches of images of 4 x 8, in one sequence."""
    return dict(hidden_states=torch.randn(32 * images, 3 * 2 * 8 * 8), grid_thw=torch.tensor([[1, 4, 8]] * images))


def without_forwards(model: nn.Module) -> None:
    """Leaves a model of ours the forwards of its classes."""
    for module in model.modules():
        for name in ("forward", *(name for name, _ in conversion.METHODS.values())):
            module.__dict__.pop(name, None)


def converted(model: nn.Module, example: Any, readers: bool) -> None:
    """Converts a model, with or without readers."""
    if readers:
        optimize(model, example=example)
        return
    without_forwards(model)
    with patch.object(conversion, "_rows", return_value=()):
        optimize(model, example=example)


def figures(case: Case, readers: bool) -> dict[str, Any]:
    """All but the host's time of one conversion of a model."""
    torch.manual_seed(0)
    model = case.model(DEPTHS[0]).double().eval()
    randomise(model)
    original = copy.deepcopy(model)
    without_forwards(original)
    example = in_dtype(case.example(2), torch.float64)
    captured._by_forward.clear()
    started = time.process_time()
    converted(model, example, readers)
    seconds = time.process_time() - started
    want = results(original, example, False)
    results(model, example, False)  # captures calls with gradients
    error = difference(results(model, example, False), want)
    half = case.model(DEPTHS[0]).bfloat16().eval()
    example = in_dtype(example, torch.bfloat16)
    converted(half, example, readers)
    freeze(half)
    positional, named = arguments(example)
    with forcing("fused"):
        events = traced(half, gpus()[GPU], False, positional, named, frozen=True).events
    products = [e for e in events if e.flops and "conv" not in e.name and "patch_embed" not in e.name]
    attention = [e.ours for e in events if e.launches and ATTENTION.match(e.name)]
    return dict(
        products=round(sum(e.flops for e in products if e.ours) / sum(e.flops for e in products), 4),
        attention=[sum(attention), len(attention)],
        launches=sum(e.launches for e in events),
        error=error,
        seconds=round(seconds, 1),
    )


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs, with floating-point tensors in this dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def calls(case: Case) -> list[float]:
    """Python calls of a block in a call of the frozen model, with readers and captured."""
    numbers = []
    with no_device(), forcing("fused"), torch.no_grad():
        for readers in (True, False):
            runs = [_call(case, depth, readers) for depth in DEPTHS]
            for run in runs * 5:  # fills caches of plans and compiled kernels
                run()
            shallow, deep = map(calls_of, runs)
            numbers.append((deep - shallow) / (DEPTHS[1] - DEPTHS[0]))
    return numbers


def _call(case: Case, depth: int, readers: bool) -> Callable[[], Any]:
    model, example = case.model(depth).eval(), case.example(1)
    converted(model, case.example(2), readers)
    freeze(model)
    return (lambda: model(**example)) if isinstance(example, dict) else (lambda: model(example))


def row_of(case: Case) -> dict[str, Any]:
    """The row of one model; with the error if it fails."""
    row: dict[str, Any] = dict(model=case.name)
    try:
        row |= dict(readers=figures(case, True), captured=figures(case, False))
        row["calls"] = calls(case)
    # Any error: the row states it, and the other models are tried.
    except Exception as error:
        row["error"] = one_line(error)
    return row


def main(only: str, out: Path | None) -> None:
    """Compares the models, prints a line for each, and writes coverage-capture.json and .md."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    set_backend("torch")
    rows = []
    for case in CASES:
        if re.search(only, case.name):
            rows.append(row_of(case))
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if out is not None:
        write_pair(out / "coverage-capture", capture_markdown, origin(), rows=rows)
