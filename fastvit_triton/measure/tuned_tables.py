"""The tables in kernels/tuned, one JSON file for each architecture: launch parameters by row, and measured ways.

A row keeps how it was found, "measured" or "predicted"; a predicted row never replaces a measured one.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ..files import replacing
from ..kernels import launch, plan
from .candidates import Config


def with_rows(table: dict, found: dict[str, Config], provenance: str, **facts: object) -> tuple[dict, list[str]]:
    """The table with launch parameters `found`, and the names of the rows that were taken.

    Args:
        table: row name → row.
        found: row name → launch parameters.
        provenance: "measured" or "predicted".
        facts: further entries of each new row.
    """
    measured = {n for n, row in table.items() if provenance == "predicted" and row.get("provenance") == "measured"}
    taken = {n: dict(config=c, provenance=provenance, **facts) for n, c in found.items() if n not in measured}
    return table | taken, list(taken)


def with_ways(table: dict, rows: Sequence[dict]) -> dict:
    """The table with measured ways of blocks: dicts of "shape" and "way"; the first of a shape counts."""
    found = {row["shape"]: row["way"] for row in reversed(rows)}
    return table | {"ways": {"measured": table.get("ways", {}).get("measured", {}) | found}} if found else table


def write(
    arch: str,
    found: dict[str, Config],
    provenance: str,
    folder: Path = launch.TUNED,
    ways: Sequence[dict] = (),
    **facts: object,
) -> list[str]:
    """Writes launch parameters and measured ways into an architecture's table; returns the names of the rows taken.

    The arguments are those of `with_rows` and `with_ways`; the tables in use are read anew.
    """
    path = folder / f"{arch}.json"
    table, taken = with_rows(json.loads(path.read_text()) if path.exists() else {}, found, provenance, **facts)
    table = with_ways(table, ways)
    lines = ",\n".join(f' "{name}": {json.dumps(row)}' for name, row in sorted(table.items()))
    with replacing(path) as temporary:
        temporary.write_text("{\n" + lines + "\n}\n")
    plan.forget()
    return taken


def best_rows(rows: Sequence[dict]) -> dict[str, Config]:
    """Row name → its best launch parameters, of results of `tuning.time_candidates`.

    Where several shapes use one row the first counts, which is the one that ViTs spend most time in.
    """
    found: dict[str, Config] = {}
    for row in rows:
        if row.get("best"):  # rows of ways have none
            found.setdefault(row["row"], row["best"])
    return found


def adopt(path: Path, folder: Path = launch.TUNED) -> list[str]:
    """Writes what a result file of `python -m benchmarks.gpu` measured into the table of its architecture.

    Returns the names of the rows taken.

    Raises:
        ValueError: the file holds no measurement of a GPU.
    """
    held = json.loads(path.read_text())
    if held.get("part") != "tuning" or held.get("dry_run") or not held.get("gpu"):
        raise ValueError(f"{path} is no tuning result of a GPU; python -m benchmarks.gpu --only tuning makes one")
    rows = [row for row in held["rows"] if "arch" in row]
    ways = [row for row in rows if "way" in row]
    return write(rows[0]["arch"], best_rows(rows), "measured", folder, ways, source=path.name) if rows else []
