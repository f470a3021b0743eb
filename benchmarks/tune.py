"""Tunes launch parameters and the ways of blocks for one architecture, and writes kernels/tuned/<arch>.json.

    python -m benchmarks.tune [--arch sm_90] [--seconds 300] [--check] [--ways] [--adopt FILE]

--adopt takes a result of benchmarks.gpu, a file of `fastvit-triton tune --export`, or a contributed file.
If the architecture is that of the local GPU, candidates are timed on it, and then ways with the best ("measured").
Otherwise candidates are compiled, and the bound of the compile report decides ("predicted"); ways then follow their
expected time, which needs no table. A measured row is never replaced by a predicted one. --ways times only the ways of
blocks.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from fastvit_triton.kernels import launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.choose import Choice
from fastvit_triton.kernels.compiling import CompiledLaunch, compiling
from fastvit_triton.kernels.settings import forcing, observing
from fastvit_triton.kernels.sizes import WAYS
from fastvit_triton.measure.model_parts import Part
from fastvit_triton.measure.selftest import blocks_of
from fastvit_triton.measure.timeout import Deadline, capturing
from fastvit_triton.measure.timing import Context, alternate, repeated
from fastvit_triton.measure.tuning import race

from .result_file import ResultFile
from .targets import Target, targets, to_race
from .tuned_tables import adopt, best_rows, write

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
CALLS = 4  # per sample, so that the host can run ahead of the GPU as in a model


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
    """Times two blocks of a model in each way and compares their results with float32."""
    blocks, tokens, channels = blocks_of(name, device, **options)
    x = torch.randn(batch, tokens, channels, device=device).to(torch.bfloat16).requires_grad_(training)
    choices: list[Choice] = []
    with context(), observing(choices.append), torch.set_grad_enabled(training):
        blocks(x)
    first = next(choice for choice in choices if choice.branches)
    part = Part(name, 1, first.shapes, blocks, (x,), {})

    @contextmanager
    def running(way: str) -> Iterator[None]:
        with context(), forcing(way):
            yield

    contexts = {way: partial(running, way) for way in WAYS}
    compared = part.comparison(contexts["plain"], training)
    said = {way: compared(contexts[way]) for way in WAYS}
    calls = 1 if dry else CALLS
    steps = {way: repeated(part.step(training), contexts[way], calls) for way in WAYS}
    timings, errors = alternate(steps, device, deadline, 0.3, (1, 1) if dry else (3, 60), latency=True)
    columns: dict[str, object] = dict(shape=first.shapes[-1], rule=first.way)
    columns |= {f"{way}_match": verdict.match for way, verdict in said.items()}
    columns |= {f"{way}_us": round(timing.us / calls, 1) for way, timing in timings.items()}
    columns |= {f"{way}_error": text for way, text in errors.items()}
    right = [way for way in WAYS if said[way].match and way in timings]
    return columns | dict(way=min(right, key=lambda way: timings[way].us, default="plain"))


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
        from . import predict  # needs the compile report's packages

        yield from (predict.predict_candidates(target, arch) for target in targets() if not result.deadline.over)


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
