"""The step of `tune` that only a GPU needs: times launch parameters, and checks blocks with the best ones."""

from collections.abc import Callable

import torch

from ..kernels import launch, measured
from ..kernels.compiling import compiling
from ..kernels.measured import Measured
from .model_parts import Call, Part
from .timeout import Deadline
from .tuning import row_candidates


def tune_launches(
    calls: list[Call],
    parts: list[Part],
    before: Measured,
    train: bool,
    device: torch.device,
    deadline: Deadline,
    on_progress: Callable[[str, float], None],
) -> tuple[list[dict], Measured]:
    """Times launch parameters; returns a row for each distinct launch, and `before` with the best parameters.

    If these make the results of a part wrong, none is kept: the rows say so, and the measurements are `before`.

    Args:
        calls: calls of our ops in the model.
        parts: its blocks and stems.
        before: measurements in use.
        train: compare gradients, too.
        device: where it runs.
        deadline: candidates that are not compiled by then are skipped.
        on_progress: called with the current stage and the fraction done.
    """
    launches = _time(calls, device, deadline, on_progress)
    after = Measured(before.rows | {name: entry["config"] for name, entry in rows_of(launches).items()}, before.ways)
    for part in parts:
        ways = {name: ways for name, ways in part.variants().items() if not name.startswith("mixed")}
        old, new = (
            part.compare({name: Measured(table.rows, table.ways | more) for name, more in ways.items()}, train)[0]
            for table in (before, after)
        )
        if any(said.match and not (name in new and new[name].match) for name, said in old.items()):
            why = f"{part.name} is incorrect with the new launch parameters"
            return [row | dict(best=None, rejected=why) for row in launches], before
    return launches, after


def rows_of(launches: list[dict]) -> dict[str, dict]:
    """File entries for launch parameters, by row name with exact sizes and with their size class."""
    entries: dict[str, dict] = {}
    for one in reversed(launches):  # of entries with the same name, the most frequent call is written last
        if one["best"] is not None:
            entry = dict(config=one["best"], us=one["us"], us_before=one["us_before"])
            entries |= dict.fromkeys(_class_first(one["row"]), entry)
    return entries


def _class_first(name: str) -> tuple[str, ...]:
    """(row name with its size class, row name with exact sizes); exact ones are written last."""
    row, _, sizes = name.partition(" ")
    exact, near, _ = measured.names(row, tuple(map(int, sizes.split(","))))
    return near, exact


def _time(calls: list[Call], device: torch.device, deadline: Deadline, on_progress: Callable) -> list[dict]:
    """Times the candidates of all distinct launches while others compile; returns rows."""
    arch = launch.architecture(device)
    choices = [one for call in calls for one in row_candidates(call, arch)]
    every = [(one, text, launch) for one in choices for text, group in one.launches().items() for launch in group]
    rows = []
    with compiling([launch for *_, launch in every]) as futures:
        for (one, text, _), future in zip(every, futures, strict=True):
            one.compiled.setdefault(text, []).append(future)
        for i, one in enumerate(choices):
            on_progress(f"launches of {one.call.op}", i / len(choices))
            rows.append(one.time(deadline.sooner(deadline.left / (len(choices) - i))))
    return rows
