"""Tells which way each module of a report runs, from the choices of one call."""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FrameType

from torch import nn

from ..kernels.choose import Choice
from ..kernels.settings import locating
from .readers.ours import run_chained
from .reporting import OURS, Report, Row

PATH = "_fastvit_triton_path"  # key in a module's __dict__, which copies of the model have, too
CALLS = {  # code of a call → local name of the module
    nn.Module._call_impl.__code__: "self",
    run_chained.__code__: "block",
}


@contextlib.contextmanager
def located(model: nn.Module) -> Iterator[None]:
    """Context in which observed choices have the path of the innermost module, of the model or a copy, that runs."""
    for path, module in model.named_modules():
        module.__dict__[PATH] = path
    try:
        with locating(_running):
            yield
    finally:
        for module in model.modules():
            module.__dict__.pop(PATH, None)


def _running() -> str | None:
    """The path of the innermost module in whose call this is called; None if it has none.

    It is read from the stack, as wrapping calls or adding hooks would change what is fused.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in CALLS:
            return vars(frame.f_locals[CALLS[frame.f_code]]).get(PATH)
        frame = frame.f_back
    return None


def with_ways(report: Report, choices: Iterable[Choice]) -> Report:
    """The report with the way and its reason in each row of a converted module, and with a row for each of ours."""
    model = None if report.subject is None else report.subject.model
    if model is None:
        raise ValueError("report is of a graph, or of a model that was deleted; give the report of a model that exists")
    by_path: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_path[choice.path or ""].append(choice)
    first = {id(module): path for path, module in model.named_modules()}  # a shared module runs at its first path
    rows: dict[str, Row] = {}
    for row in _with_ours(report.rows, by_path, model):
        row_choices = by_path.get(first[id(model.get_submodule(row.path))], [])
        rows[row.path] = row if row.became is None else _chosen(row, row_choices, rows.get(row.within or row.path))
    return replace(report, rows=tuple(rows.values()), device=None, on_cpu=None)


def _chosen(row: Row, choices: list[Choice], around: Row | None) -> Row:
    """The row with its way: of its branches, else of its ops, else of the block around it."""
    branches = [choice for choice in choices if choice.branches]
    if not choices:
        way = around.way if around is not None and around.way is not None else "plain"
        return replace(row, way=way, why=row.why if around is not None else _joined(row.why, "it chose no kernel"))
    ways = {choice.way for choice in branches or choices}
    ops = [f"{choice.name} {choice.way}" for choice in choices if not choice.branches] if branches else []
    texts = dict.fromkeys([*(choice.why for choice in branches or choices), *ops])
    return replace(row, way=ways.pop() if len(ways) == 1 else "mixed", why=_joined(row.why, *texts))


def _joined(*texts: str | None) -> str:
    return "; ".join(text for text in texts if text)


def _with_ours(rows: tuple[Row, ...], by_path: dict[str, list[Choice]], model: nn.Module) -> Iterator[Row]:
    """The rows; in place of a module of ours its blocks, and other modules in it that made choices for themselves.

    Choices inside a block become the block's.
    """
    for row in rows:
        inside = [path for path in by_path if row.path in ("", path) or path.startswith(f"{row.path}.")]
        if row.why != OURS or not inside:
            yield row
            continue
        blocks = [path for path in inside if any(choice.branches for choice in by_path[path])]
        for path in inside:
            if block := next((p for p in blocks if path.startswith(f"{p}.")), None):
                by_path[block] += by_path.pop(path)
            elif path in blocks:
                name = next(choice.name for choice in by_path[path] if choice.branches)
                yield Row(path, type(model.get_submodule(path)).__name__, f"{name} block")
            elif not any(p.startswith(f"{path}.") for p in inside) and path:
                yield Row(path, type(model.get_submodule(path)).__name__, by_path[path][0].name)
