"""Tunes launch parameters and the ways of blocks for one architecture, and writes kernels/tuned/<arch>.json.

    python -m benchmarks.tune [--arch sm_90] [--seconds 300] [--check] [--ways] [--adopt FILE]

--adopt takes a result of benchmarks.gpu, a file of `fastvit-triton tune --export`, or a contributed file.
If the architecture is that of the local GPU, candidates are timed on it, and then ways with the best ("measured").
Otherwise candidates are compiled, and the bound of the compile report decides ("predicted"); ways then follow their
expected time, which needs no table. A measured row is never replaced by a predicted one. --ways times only the ways of
blocks.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.kernels import choose, launch, measured
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.choose import Choice
from fastvit_triton.kernels.compiling import CompiledLaunch, compiling
from fastvit_triton.kernels.measured import NOTHING
from fastvit_triton.kernels.settings import observing
from fastvit_triton.measure.candidates import Config
from fastvit_triton.measure.model_parts import Part, ops_of
from fastvit_triton.measure.selftest import blocks_of
from fastvit_triton.measure.timeout import Deadline, capturing
from fastvit_triton.measure.timing import Context
from fastvit_triton.measure.tune import time_part
from fastvit_triton.measure.tuning import race

from .result_file import ResultFile, write_text
from .targets import Target, targets, to_race

DEVICE = torch.device("cuda", 0)
# whose blocks are timed in each way: (model, batch size), most important first
MODELS = (
    ("vit_base_patch16_224", 256),
    ("vit_small_patch16_224", 256),
    ("vit_tiny_patch16_224", 256),
    ("vit_large_patch16_224", 256),
    ("vit_huge_patch14_224", 128),
    ("vit_base_patch14_dinov2", 32),
    ("vit_base_patch16_224", 64),
    ("vit_base_patch16_224", 8),
    ("vit_base_patch16_224", 1),
    ("vit_small_patch16_224", 64),
    ("vit_small_patch16_224", 8),
    ("vit_small_patch16_224", 1),
    ("vit_tiny_patch16_224", 64),
    ("vit_tiny_patch16_224", 8),
    ("vit_tiny_patch16_224", 1),
)


def measure_ways(result: ResultFile, device: torch.device, context: Context) -> None:
    """Times the blocks of all models in each way, in inference and training, and adds a row for each.

    In `context` our kernels run there; it must not override launch parameters, or blocks are not replayed.
    """
    arch = launch.architecture(device)
    tiny = dict(img_size=32, embed_dim=32, num_heads=2)
    for name, batch in MODELS[:1] if result.dry else MODELS:
        for training in (False, True):
            case = f"ways of {name} batch {batch} {'training' if training else 'inference'}"
            with result.row(case) as wanted:
                if wanted:
                    call = (name, 2 if result.dry else batch, training, device, result.deadline, context, result.dry)
                    result.add(dict(case=case, arch=arch, **time_ways(*call, **tiny if result.dry else {})))


def time_ways(
    name: str,
    batch: int,
    training: bool,
    device: torch.device,
    deadline: Deadline,
    context: Context,
    dry: bool = False,
    **options: object,
) -> dict:
    """Times two blocks of a model in each way, of which it has the fastest variant, as `tune` times a block."""
    blocks, tokens, channels = blocks_of(name, device, **options)
    x = torch.randn(batch, tokens, channels, device=device).to(torch.bfloat16).requires_grad_(training)
    choices: list[Choice] = []
    with context():
        with observing(choices.append), torch.set_grad_enabled(training):
            blocks(x)
        part = Part(name, 1, next(choice.shapes for choice in choices if choice.branches), blocks, (x,), {})
        part.ops = ops_of(part, NOTHING, training)
        row = time_part(part, NOTHING, NOTHING, device, training, deadline, (1, 1) if dry else (3, 30))
    times: dict[str, float] = {}
    for variant, columns in row["variants"].items():
        column = f"{variant.partition(',')[0]}_us"
        if "us" in columns:
            times[column] = min(columns["us"], times.get(column, columns["us"]))
    ways = {shape: entry["way"] for shape, entry in row["entries"].items() if shape.startswith("~")}
    shape = part.shapes[-1]
    kept = {name: row[name] for name in ("rule", "variants")}
    return dict(shape=shape, way=ways.get(shape, "plain"), ways=ways, **kept, **times)


def compile_candidates(result: ResultFile, device: torch.device, context: Context) -> None:
    """Compiles the kernels of all candidates in threads, and adds a row with the number of launches and the seconds."""
    with result.row("compile candidates") as wanted:
        if wanted and not result.dry:  # the interpreter compiles nothing
            start = time.monotonic()
            launches: dict[tuple, CompiledLaunch] = {}
            errors: dict[str, str] = {}  # each is raised again when the target is timed
            for target in targets():
                with capturing(errors, target.row), context():
                    recorded = to_race(target, torch.bfloat16, device).launches()
                    launches |= {each.key: each for group in recorded.values() for each in group}
            with compiling(list(launches.values())) as futures:
                failed = sum(future.exception() is not None for future in futures)
            seconds = round(time.monotonic() - start, 1)
            facts = dict(launches=len(launches), failed=failed, seconds=seconds, errors=errors)
            result.add(dict(case="compile candidates") | facts)


def time_target(
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    deadline: Deadline,
    context: Context,
    most: int | None = None,
) -> dict:
    """Times the candidates of a target, or the first `most` once."""
    with context():
        choices = [to_race(target, dtype, device, most)]
        (row,) = race(choices, device, deadline, seconds=1.0, rounds=(1, 1) if most else (3, 30))
    return row


def run(result: ResultFile, device: torch.device, context: Context) -> None:
    """Times all candidates; `--adopt` reads the file."""
    arch = launch.architecture(device)
    compile_candidates(result, device, context)
    for target in targets(True)[:4] if result.dry else targets():
        name = f"{target.row} {' '.join(f'{k}={v}' for k, v in target.shape.items())}"
        with result.row(name) as wanted:
            if wanted:
                most = 2 if result.dry else None
                row = time_target(target, torch.bfloat16, device, result.deadline, context, most)
                result.add(dict(case=name, arch=arch, **row))


def tried(arch: str, is_here: bool, result: ResultFile) -> Iterator[dict]:
    """A row for each target with what was tried: timed on this GPU, or compiled for another architecture."""
    if is_here:
        run(result, DEVICE, partial(using_backend, "triton"))
        yield from (row for row in result.rows if "tried" in row)
    else:
        from . import candidates  # needs the compile report's packages

        yield from (candidates.predict_candidates(target, arch) for target in targets() if not result.deadline.over)


# Tables in kernels/tuned, one JSON file per architecture: launch parameters by row, and measured ways. A row is marked
# "measured" or "predicted"; a predicted row never replaces a measured one.


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


def main() -> None:
    """Tunes, prints the result, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = launch.architecture(DEVICE) if torch.cuda.is_available() else "sm_90"
    parser.add_argument("--arch", default=here, help="architecture of the table; predicted unless it is this GPU's")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no new row after this time")
    parser.add_argument("--check", action="store_true", help="print the result and write nothing")
    parser.add_argument("--ways", action="store_true", help="time only the ways of blocks")
    parser.add_argument("--adopt", type=Path, metavar="FILE", help="take a tuning result or an exported file instead")
    arguments = parser.parse_args()
    if arguments.adopt:
        try:
            print("taken:", *adopt(arguments.adopt), sep="\n  ")
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return
    rows, is_here = [], torch.cuda.is_available() and arguments.arch == here
    with tempfile.TemporaryDirectory() as folder:
        result = ResultFile("tuning", Path(folder), Deadline(arguments.seconds))
        for row in () if arguments.ways else tried(arguments.arch, is_here, result):
            print(row["row"], row["best"], *row["tried"], sep="\n  ")
            rows.append(row)
        if not arguments.check:
            print("taken:", *write(arguments.arch, best_rows(rows), "measured" if is_here else "predicted"))
        if is_here:
            measure_ways(result, DEVICE, partial(using_backend, "auto"))
            ways = [row for row in result.rows if "way" in row]
            if not arguments.check:
                write(arguments.arch, {}, "measured", ways=ways)
            print(f"{len(ways)} ways")


if __name__ == "__main__":
    main()
