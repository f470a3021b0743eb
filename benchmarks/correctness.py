"""The checks of `fastvit-triton selftest` as a part of the GPU script, and a context in which ops run their kernels."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from functools import partial

import torch

from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.selftest import planned
from fastvit_triton.measure.workers import Worker, WorkerRun, count

from .result_file import ROOT, ResultFile


@contextlib.contextmanager
def kernels_on(device: torch.device) -> Iterator[None]:
    """In this context ops launch their kernels, on a CPU in Triton's interpreter.

    LayerNorms are folded into products for any number of rows, so that small cases take that path.
    """
    with overriding({"fold.border": dict(ROWS_PER_OUTPUT=0)}), _launching(device):
        yield


@contextlib.contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with using_backend("triton"):  # instead of the plan's choice
            yield
        return
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        interpreting = importlib.import_module("interpreter").interpreting
    finally:
        sys.path.remove(str(ROOT / "tests"))
    with interpreting():
        yield


def run(result: ResultFile, device: torch.device) -> None:
    """Adds a row for each check, or in a dry run for two, in Triton's interpreter.

    This fills Triton's cache for later parts.
    """
    names = list(planned(device))
    if result.dry:
        names = [names[0], next(name for name in names if name.endswith("under load"))]
    work = WorkerRun([n for n in names if n not in result.done], result.deadline, result.add, partial(Worker, device))
    try:
        work.run(1 if result.dry else count(device))
    finally:
        result.not_reached += work.not_reached
