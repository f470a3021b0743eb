"""`tune`: finds the fastest way to run a model on this machine's GPU or CPU, and saves it for later processes."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .arguments import add_shared, check_output, number, select_device
from .console import print_line, progress
from .model_by_name import PREFIXES, NamedModel, check_name, random_model

if TYPE_CHECKING:
    from ..measure.tune import Tuned

HELP = "measure the fastest way to run a model on this machine, and save it for later processes"
EXAMPLES = (
    "fastvit-triton tune --model timm:vit_base_patch16_224 --batch 64",
    "fastvit-triton tune --model vit_tiny_patch16_224 --train",
    "fastvit-triton tune --show",
)
MODEL = "vit_base_patch16_224"
SECONDS = 60
DRY_SECONDS = 600  # the interpreter is slow, and a dry run ends when every step was executed
TINY = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=4)  # the model of a dry run
DRY = "FASTVIT_TRITON_DRY_RUN"  # marks the process of a dry run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tune`."""
    add = parser.add_argument
    text = f"{PREFIXES} (default: {MODEL}, or a tiny one with --dry-run)"
    add("--model", check=check_name, help=text)
    add_shared(parser, "--batch", default="64 on a GPU, 1 elsewhere")
    add_shared(parser, "--img-size", "--dtype")
    phases = parser.add_mutually_exclusive_group()
    phases.add_argument("--train", action="store_true", help="training steps instead of inference")
    phases.add_argument("--freeze", action="store_true", help="inference of a frozen model")
    text = f"approximate seconds to measure (default: {SECONDS}, or {DRY_SECONDS} with --dry-run)"
    add("--seconds", type=float, check=number(lambda value: value > 0, "give a number above 0"), help=text)
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--show", action="store_true", help="print this machine's saved measurements and exit")
    files.add_argument("--clear", action="store_true", help="remove this machine's saved measurements")
    text = "export the measurements for this GPU or CPU and software"
    files.add_argument("--export", type=Path, metavar="FILE", check=check_output, help=text)
    files.add_argument(
        "--import",
        type=Path,
        metavar="FILE",
        dest="source",
        help="import measurements exported on an identical machine",
    )
    files.add_argument("--dry-run", action="store_true", help="execute every step on the CPU, in Triton's interpreter")
    add_shared(parser, "--device")


def run(args: argparse.Namespace) -> int:
    """Measures launch parameters, and fused, mixed and plain blocks, on this machine's GPU, and saves the fastest.

    On a CPU it measures plain blocks, and blocks whose linear layers run by oneDNN. Later processes on this machine use
    the result for all models of the same sizes. It affects speed only.
    """
    from ..measure import kept

    if args.show:
        return _show()
    if args.clear:
        for path in kept.clear():
            print_line(f"removed {path}")
        return 0
    if args.export is not None:
        kept.export(args.export, select_device(args.device))
        print_line(f"{args.export} contains what was measured here")
        return 0
    if args.source is not None:
        print_line(f"imported to {kept.import_from(args.source, select_device(args.device))}")
        return 0
    return _dry_run(args) if args.dry_run else _tune(args)


def _tune(args: argparse.Namespace) -> int:
    import torch

    from ..convert import optimize
    from ..kernels.measured import kind_of
    from ..measure.tune import tune

    device = select_device(args.device)
    dtype_name, batch = ("bfloat16", 64) if device.type == "cuda" else ("float32", 1)
    dtype_name, batch = args.dtype or dtype_name, args.batch or batch
    dtype = getattr(torch, dtype_name)
    name = args.model or MODEL
    built = random_model(name, args.img_size, device, dtype, args.train)
    images, named = built.inputs(batch, partial(torch.randn, device=device, dtype=dtype))
    example = images[0] if images else named
    if args.freeze:
        if device.type == "cuda":
            raise ValueError(
                "--freeze is for a CPU; on a GPU frozen blocks run as those that were measured in inference"
            )
        optimize(built.model, freeze=True)
    with progress(TextColumn("{task.description:40.40}"), BarColumn(), TimeElapsedColumn()) as bar:
        stage = bar.add_task("building the model", total=1.0)

        def on_progress(what: str, done: float) -> None:
            bar.update(stage, completed=done, description=what)

        try:
            tuned = tune(built.model, example, args.train, args.seconds or SECONDS, on_progress)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"--batch {batch} does not fit into memory; lower it") from error
    phase = "training" if args.train else "inference, frozen" if args.freeze else "inference"
    place = tuned.facts[kind_of(tuned.facts)]
    _report(tuned, f"{name}, {phase}, {dtype_name}, batch {batch}, on {place}", True)
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    """Runs all steps in Triton's interpreter, of a tiny model without --model, in a subprocess with its own cache."""
    if os.environ.get(DRY) is None:
        words = ["--dry-run", "--dtype", "float16", *["--train"] * args.train]
        words += ["--seconds", f"{args.seconds:g}"] if args.seconds else []
        words += ["--batch", str(args.batch)] if args.batch else []
        words += ["--model", args.model] if args.model else []
        words += ["--img-size", "x".join(map(str, args.img_size))] if args.img_size else []
        with tempfile.TemporaryDirectory() as folder:
            more = {DRY: "1", "TRITON_INTERPRET": "1", "FASTVIT_TRITON_CACHE": folder}
            command = [sys.executable, "-m", "fastvit_triton.cli", "tune", *words]
            return subprocess.run(command, env=os.environ | more).returncode
    import torch

    from ..measure.timeout import is_late
    from ..measure.tune import tune

    with pretending():
        if args.model is None and args.img_size is None:
            built, batch = tiny_model(args.train), 2
        else:
            named = args.model or MODEL
            built, batch = random_model(named, args.img_size, torch.device("cpu"), torch.float16, args.train), 1
        inputs, named_inputs = built.inputs(args.batch or batch, partial(torch.randn, dtype=torch.float16))
        tuned = tune(built.model, inputs[0] if inputs else named_inputs, args.train, args.seconds or DRY_SECONDS)
    _report(tuned, f"dry run: {args.model or 'a tiny model'} in Triton's interpreter", False)
    late = any(is_late(columns) for row in tuned.parts for columns in row["variants"].values())
    done = "Steps were not reached in time; raise --seconds." if late else "Every step was executed."
    print_line(f"{done} Times in the interpreter are meaningless; nothing was saved.")
    return 0


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Context of a dry run: kernels run in Triton's interpreter as on an H200, and torch.compile needs no compiler.

    TRITON_INTERPRET must be 1.
    """
    from ..kernels.launch import targeting
    from ..kernels.tile import repair_interpreter
    from ..measure.variants import compiling

    repair_interpreter()
    with targeting("sm_90"), compiling("aot_eager"):
        yield


def tiny_model(train: bool) -> NamedModel:
    """The model of a dry run, in float16."""
    import torch

    from ..measure.model_cases import randomized
    from ..models import create_model

    model = randomized(create_model("vit_tiny_patch16_224", **TINY), torch.float16).half().train(train)
    return NamedModel(model, (3, 32, 32), ours=True)


def _report(tuned: "Tuned", title: str, timed: bool) -> None:
    """Prints the results for launch parameters, block variants and the whole model."""
    from ..measure.timeout import is_late

    print_line(title)
    console = Console()
    if tuned.launches:
        _report_launches(tuned, timed, console)
    for row in tuned.parts:
        print_line(f"{row['count']} × {row['name']}: {row['shapes'][0]}")
        table = Table("variant", "ratio to plain", "match", "", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, columns in row["variants"].items():
            ratio = f"{columns['speedup']:.2f}" if timed and "speedup" in columns else "-"
            marks = ["before"] * (name == row["rule"]) + ["after"] * (name == row["way"])
            match = {True: "yes", False: "NO", None: "-"}[columns.get("match")]
            table.add_row(name, ratio, match, ", ".join(marks))
        console.print(table)
        for name, columns in row["variants"].items():
            if "error" in columns and (timed or not is_late(columns)):
                print_line(f"{name}: {'not timed; raise --seconds' if is_late(columns) else columns['error']}")
    for row in tuned.attention if timed else ():
        times = ", ".join(f"{name} {columns['us']:.0f} µs" for name, columns in row["variants"].items())
        print_line(f"attention {row['sizes']}: {times}")
    table = Table("the whole model", *["ms"] * timed, "ratio to eager", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, row in tuned.model.items():
        ms = [f"{row['us'] / 1e3:.3f}" if "us" in row else "-"] * timed
        table.add_row(name, *ms, f"{row['speedup']:.2f}" if timed and "speedup" in row else "-")
    console.print(table)
    for name, row in tuned.model.items():
        if "error" in row and (timed or not is_late(row)):
            print_line(f"{name}: {row['error']}")
    if timed:
        print_line(f"Saved in {tuned.path}; `fastvit-triton tune --show` lists it, --clear removes it.")


def _report_launches(tuned: "Tuned", timed: bool, console: Console) -> None:
    """Prints the results for launch parameters."""
    from ..measure.timeout import is_late

    table = Table("launches", "tried", "new", "speedup", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in tuned.launches:
        tried = sum("us" in candidate for candidate in row["tried"])
        changed = row["best"] is not None and row["best"] != row["tried"][0]["config"]
        gain = row["us_before"] / row["us"] if changed and row["us_before"] else None
        cells = f"{tried} of {len(row['tried'])}", "yes" if changed else "no", f"{gain:.2f}" if gain and timed else "-"
        table.add_row(f"{row['count']} × {row['row']}", *cells)
    console.print(table)
    late = 0
    for row in tuned.launches:
        for candidate in row["tried"]:
            late += is_late(candidate)
            why = candidate.get("error") or (None if candidate.get("match", True) else "wrong result")
            if why is not None and not is_late(candidate):
                print_line(f"{row['row']}: rejected {_text(candidate['config'])}: {why}")
    if late:
        print_line(f"{late} candidates were not reached in time; raise --seconds.")
    if any("rejected" in row for row in tuned.launches):
        print_line(f"No launch parameters were saved: {tuned.launches[0]['rejected']}.")


def _text(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _show() -> int:
    """Prints all tuning results saved on this machine."""
    from ..kernels import measured
    from ..measure import kept

    files = kept.files()
    if not files:
        print_line(f"nothing was measured on this machine: {measured.folder()} has no files")
    for path, content in files:
        print_line(f"{path}{' is damaged; --clear removes it' if content is None else ''}")
        if content is None:
            continue
        print_line("  " + ", ".join(f"{name} {value}" for name, value in content["facts"].items()))
        for run in content["runs"]:
            print_line(f"  {run['date']}: {run['model']}, {'training' if run['train'] else 'inference'}")
        for name, entry in content["ways"].items():
            print_line(f"  {entry['way']:6} {name}")
        for name, entry in content["rows"].items():
            print_line(f"  {name}: {_text(entry['config'])}")
    return 0
