"""Tables in kernels/tuned, one JSON file per architecture: launch parameters by row, and measured ways.

A row is marked "measured" or "predicted"; a predicted row never replaces a measured one.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fastvit_triton.kernels import choose, launch, measured
from fastvit_triton.measure.candidates import Config

from .result_file import write_text


def with_ways(table: dict, rows: Sequence[dict], **facts: object) -> dict:
    """The table updated with measured ways of blocks."""
    by_shape = {shape: way for row in reversed(rows) for shape, way in _ways(row).items()}
    before = table.get("ways", {})
    if not by_shape:
        return table
    ways = {"measured": before.get("measured", {}) | by_shape}
    facts_by_shape = {shape: said for shape, said in before.get("facts", {}).items() if shape not in by_shape}
    facts_by_shape |= dict.fromkeys(by_shape, facts) if facts else {}
    return table | {"ways": ways | ({"facts": facts_by_shape} if facts_by_shape else {})}


def write(
    arch: str,
    found: dict[str, Config],
    provenance: str,
    folder: Path = launch.TUNED,
    ways: Sequence[dict] = (),
    **facts: object,
) -> list[str]:
    """Writes launch parameters `found`, and measured ways, into an architecture's table; returns the names written.

    Clears the cached tables.
    """
    path = folder / f"{arch}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    kept = {n for n, row in table.items() if provenance == "predicted" and row.get("provenance") == "measured"}
    taken = {n: dict(config=c, provenance=provenance, **facts) for n, c in found.items() if n not in kept}
    table = with_ways(table | taken, ways, **facts)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    write_text(path, "{\n" + lines + "\n}\n")
    choose.forget()
    return [*taken, *dict.fromkeys(shape for row in ways for shape in _ways(row))]


def _ways(row: dict) -> dict[str, str]:
    """Shape → way, of a block and of the ops in it that have a choice of their own."""
    return {row["shape"]: row["way"]} | row.get("ways", {})


def best_rows(rows: Sequence[dict]) -> dict[str, Config]:
    """Row name → best launch parameters, from results of `tune.time_target`.

    If several shapes use one row, the first is used, in which ViTs spend most time.
    """
    best: dict[str, Config] = {}
    for row in rows:
        if row.get("best"):  # way rows have none
            best.setdefault(row["row"], row["best"])
    return best


def adopt(path: Path, folder: Path = launch.TUNED) -> list[str]:
    """Writes a file's measurements into the table of its architecture; returns the names of rows and ways written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    content = content.get("tune", content) if isinstance(content, dict) else {}
    if "facts" in content:
        try:
            return _adopt_exported(measured.parse(json.dumps(content)), path.name, folder)
        except ValueError as error:
            raise ValueError(f"{path} cannot be adopted: {error}") from error
    if content.get("part") not in ("tuning", "ways", "rows") or content.get("dry_run") or not content.get("gpu"):
        raise ValueError(
            f"{path} is not a tuning result of a GPU; python -m benchmarks.gpu --only tuning makes one, and so does "
            "fastvit-triton tune --export"
        )
    rows = [row for row in content["rows"] if "arch" in row]
    ways = [row for row in rows if "way" in row]
    return write(rows[0]["arch"], best_rows(rows), "measured", folder, ways, source=path.name) if rows else []


def _adopt_exported(content: dict, source: str, folder: Path) -> list[str]:
    """Adopts the parsed content of a file exported by `fastvit-triton tune`; returns the names of the rows."""
    arch = str(content["facts"].get("architecture"))
    gpu = content["facts"].get("gpu")
    if not re.fullmatch(r"sm_\d+|gfx\w+", arch):  # it is part of a file name
        raise ValueError(f"its architecture is {arch}, not one of a GPU such as sm_89; export it with this version")
    rows = {name: entry["config"] for name, entry in content["rows"].items() if " ~" in name}
    ways = [dict(shape=name, way=entry["way"]) for name, entry in content["ways"].items() if "~" in name]
    if not rows and not ways:
        raise ValueError("it has no entry for a class of sizes (a name with a ~)")
    return write(arch, rows, "measured", folder, ways, gpu=gpu, source=source)
