"""Counts the graphs that torch.compile makes of vision towers, original and converted, over image sizes.

    python -m benchmarks.recompiles --out benchmarks/results

Small models of tests/catalogue; nothing is compiled to machine code. Towers of packed images get images of other sizes
in each call, the others other numbers of images. A row has, for each variant of a model:

- captured: graphs with `fullgraph=True` over 20 calls with other images, or the error; packed towers get those tensors
  that transformers allows to compute before the graph, and the originals one image in each call, as they take no more;
- calls, if the original cannot be captured without these tensors: graphs and graph breaks over 3 calls;
- limits: functions that torch.compile no longer compiles, because it reached its limit of graphs for them;
- distance: of the outputs to those of the eager original, the largest ‖a − b‖ / ‖b‖ in float32.

Variants: "original"; "converted" runs the converted code on PyTorch; "kernels" traces our ops for sm_90, which launch
nothing. Rows are written one by one, and a second run measures only those that are missing.
"""

import argparse
import copy
import importlib
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fastvit_triton import optimize
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure.timeout import one_line

from .result_file import ROOT, as_json, origin, write_text

VARIANTS = ("original", "converted", "kernels")
CALLS, SIZES = 3, 20
KEYS = {  # function of transformers → names of what it computes, by which it may be given
    "get_vision_attention_seqlens": ("cu_seqlens", "max_seqlen"),
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_nearest_position_ids": ("position_ids",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
    "get_vision_bilinear_indices_and_weights": ("bilinear_indices", "bilinear_weights"),
    "get_vision_merged_shape": ("merged_shape",),
}
Given = dict[str, Any]


class Case:
    """A small model, by the name of a class of tests/catalogue/transformers.py."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.packed = f"hf_{name}" in _helpers("catalogue.transformers").PACKED  # sizes of images may differ

    def build(self) -> nn.Module:
        """The model with random parameters."""
        torch.manual_seed(0)
        return _helpers("catalogue").build(f"hf_{self.name}", torch.float32).eval()

    def give(self, model: nn.Module, sizes: list[tuple[int, int]]) -> Given:
        """Its inputs for images of these rows and columns of patches; models of one size take as many images."""
        torch.manual_seed(len(sizes))
        return _helpers("catalogue").inputs(f"hf_{self.name}", torch.float32, sizes)


def cases() -> list[Case]:
    """The towers of tests/catalogue/transformers.py, those of packed images first."""
    towers = _helpers("catalogue.transformers")
    return [Case(name.removeprefix("hf_")) for name in (*towers.PACKED, *towers.TOWERS)]


def sizes_of(count: int, images: int | None = None) -> list[list[tuple[int, int]]]:
    """For each call rows and columns of each image, no two calls alike; 2 to 4 images, or this number."""
    sizes = []
    for i in range(count):
        n = images or 2 + i % 3
        sizes.append([(4 + 4 * ((i + j) % 4), 4 + 4 * (i // 4) + 8 * (j % 2)) for j in range(n)])
    return sizes


class Compiler:
    """A backend that counts graphs and runs them in eager mode, each in the context `around`."""

    def __init__(self, around: Callable[[], Any] = ExitStack) -> None:
        self.graphs, self.around = 0, around

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        """Counts the graph."""
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            with self.around():
                return graph(*inputs)

        return run


def counted(model: nn.Module, calls: list[Given], variant: str, whole: bool) -> dict[str, Any]:
    """Graphs and breaks of these calls; `whole` graphs only, or the error; and outputs."""
    torch._dynamo.reset()
    counters.clear()
    compiler, outputs = Compiler(tracing if variant == "kernels" else ExitStack), []
    compiled = torch.compile(model, backend=compiler, fullgraph=whole)
    row: dict[str, Any] = {}
    with running(variant), torch.no_grad(), limits() as warned:
        try:
            for inputs in calls:
                torch.manual_seed(1)
                outputs.append(compiled(**inputs))
        # Any error: that Dynamo or the model raises one is the result, which the row records.
        except Exception as error:
            row["error"] = one_line(error)
    torch._dynamo.reset()
    row |= dict(graphs=compiler.graphs, breaks=sum(counters["graph_break"].values()))
    if hit := sum("recompile_limit" in record.getMessage() for record in warned):
        row["limits"] = hit
    return row | dict(outputs=outputs)


@contextmanager
def running(variant: str) -> Iterator[None]:
    """Context in which a converted model runs its own code on PyTorch, or launches kernels on a simulated GPU."""
    with ExitStack() as stack:
        if variant == "kernels":
            stack.enter_context(targeting("sm_90"))
            stack.enter_context(forcing("fused"))
        stack.enter_context(using_backend("auto" if variant == "kernels" else "torch"))
        yield


@contextmanager
def limits() -> Iterator[list[logging.LogRecord]]:
    """Context that collects the warnings of torch.compile, such as that it no longer compiles a function."""
    logger, found, handler = logging.getLogger("torch._dynamo"), list[logging.LogRecord](), logging.NullHandler()
    handler.handle = found.append  # type: ignore[assignment, method-assign]
    with patch.object(logger, "handlers", [handler]), patch.object(logger, "propagate", False):
        yield found


def precomputed(model: nn.Module, given: Given) -> Given:
    """The inputs with all tensors that the model may be given instead of computing them from the sizes of images."""
    home, computed = sys.modules[type(model).__module__], {}
    before = {name: getattr(home, name) for name in KEYS if hasattr(home, name)}

    def record(name: str, *inputs: Any, **named: Any) -> Any:
        y = before[name](*inputs, **named)
        pairs = zip(KEYS[name], y if isinstance(y, tuple) else (y,), strict=True)
        if named.get("kwargs") is not None:  # else it cannot be given
            computed.update({key: value for key, value in pairs if isinstance(value, Tensor)})
        return y

    with patch.multiple(home, **{name: partial(record, name) for name in before}), torch.no_grad():
        model(**given)
    return given | computed


def row_of(case: Case) -> dict[str, Any]:
    """The figures of one model."""
    row: dict[str, Any] = dict(model=case.name, packed=case.packed)
    for variant in VARIANTS:
        row[variant] = dict(captured=figures(case, variant, captured=True))
    if case.packed or "error" in row["original"]["captured"]:
        for variant in VARIANTS[:2]:
            row[variant]["calls"] = figures(case, variant, captured=False)
    return row


def figures(
    case: Case, variant: str, captured: bool, calls: int | None = None, blocks: int | None = None
) -> dict[str, Any]:
    """Graphs, breaks and distance of one variant; in whole graphs if `captured`; of a model of so many blocks."""
    plain = case.build()
    for blocks_of in [m for m in plain.modules() if isinstance(m, nn.ModuleList) and blocks]:
        del blocks_of[blocks:]
    one = 1 if captured and case.packed and variant == "original" else None
    inputs = [case.give(plain, sizes) for sizes in sizes_of(calls or (SIZES if captured else CALLS), one)]
    if captured and case.packed:
        inputs = [precomputed(plain, each) for each in inputs]
    model = copy.deepcopy(plain)
    if variant != "original":
        optimize(model)
    row = counted(model, inputs, variant, captured)
    outputs = row.pop("outputs")
    if variant == "converted" and outputs:
        row["distance"] = max(distance(y, plain, each) for y, each in zip(outputs, inputs, strict=False))
    return row


def distance(got: object, model: nn.Module, given: Given) -> float:
    """‖a − b‖ / ‖b‖ of the outputs, in floating point, and those of the model."""
    torch.manual_seed(1)
    with torch.no_grad():
        a, b = map(_helpers("catalogue").joined, (got, model(**given)))
    return float((a - b).norm() / b.norm())


def _helpers(name: str) -> Any:
    """A module of tests/."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    return importlib.import_module(name)


def main() -> None:
    """Command line; see the module's documentation."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for recompiles.json; its rows are not measured again")
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    path = args.out and args.out / "recompiles.json"
    rows = {row["model"]: row for row in json.loads(path.read_text())["rows"]} if path and path.exists() else {}
    rows = {name: rows[name] for name in (case.name for case in cases()) if name in rows}
    for case in cases():
        if case.name in rows or args.only not in case.name:
            continue
        rows[case.name] = row_of(case)
        print(json.dumps(rows[case.name]), flush=True)
        if path:
            write_text(path, as_json(origin(), rows=rows.values()))
    if path:
        write_text(path, as_json(origin(), rows=[rows[case.name] for case in cases() if case.name in rows]))


if __name__ == "__main__":
    main()
