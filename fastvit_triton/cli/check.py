"""`check`: whether the package helps on this machine, in five minutes and one sentence."""

import argparse
import contextlib
import json
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import replacing
from .check_stage import Request
from .checks import at_least, check_output, check_size, image_size
from .console import add_device_option, print_line, select_device
from .model_by_name import PREFIXES, NamedModel, build_model, check_name
from .selftest import Checks, place_of
from .tune import DTYPES

if TYPE_CHECKING:
    import torch

HELP = "learn in five minutes whether this package is faster than torch.compile on this machine"
OUT = Path("fastvit-triton-check.json")
MODELS = dict(cuda="vit_base_patch16_224", cpu="vit_small_patch16_224")  # ViT-B does not finish on a busy CPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `check`."""
    add = parser.add_argument
    default = f"timm:{MODELS['cuda']} on a GPU, timm:{MODELS['cpu']} elsewhere"
    add("--model", check=check_name, help=f"{PREFIXES} (default: {default}; ours without timm)")
    add("--batch", type=int, check=at_least(1), help="images per batch (default: 64 on a GPU, 1 elsewhere)")
    text = "image side in pixels, or HEIGHTxWIDTH (default: the model's)"
    add("--img-size", "--image-size", type=image_size, check=check_size, metavar="SIZE", help=text)
    add("--dtype", choices=DTYPES, help="of weights and images (default: bf16 on a GPU, fp32 elsewhere)")
    add("--train", action="store_true", help="training steps instead of inference")
    add("--out", type=Path, check=check_output, metavar="FILE", help=f"file to contribute (default: {OUT})")
    add("--dry-run", action="store_true", help="execute every step on the CPU with a tiny model")
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Checks the kernels, tunes a model, and compares it with eager PyTorch and torch.compile, each in limited time.

    Ends in one sentence that says what to use, and writes a file to contribute. Without a GPU the CPU is measured.
    """
    out = args.out or (None if args.dry_run else OUT)
    if out is not None:
        check_output("--out", out)
    if args.dry_run:
        request = Request("", "vit_tiny_patch16_224", None, 2, "fp16", args.train, "cpu", True)
        with tempfile.TemporaryDirectory() as folder:
            return _run(request, {"TRITON_INTERPRET": "1", "FASTVIT_TRITON_CACHE": folder}, out)
    return _run(_request(args), {}, out)


def _request(args: argparse.Namespace) -> Request:
    """What is measured, after the checks that take little time.

    Raises:
        ValueError: the device cannot be measured, the model has nothing that the kernels replace, or the batch does not
            fit into memory.
    """
    import torch

    from ..measure.variants import absent

    device = select_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} has no float64 to compare with; use cpu or cuda")
    gpu = device.type == "cuda"
    if gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    name = args.model or ("" if absent("timm") else "timm:") + MODELS.get(device.type, MODELS["cpu"])
    batch = args.batch or (64 if gpu else 1)
    _refuse(name, build_model(name, args.img_size), batch, device)
    dtype = args.dtype or ("bf16" if gpu else "fp32")
    return Request("", name, args.img_size, batch, dtype, args.train, str(device), False)


def _refuse(name: str, built: NamedModel, batch: int, device: "torch.device") -> None:
    """Raises ValueError if the model, built without weights, cannot be measured."""
    from ..convert import optimize
    from .benchmark import memory_of

    if not built.ours and not optimize(built.model).rows:
        raise ValueError(f"--model {name} has no Transformer blocks and no other module that the kernels replace")
    needed = batch * math.prod(built.shape) * 8
    memory = memory_of(device)
    if needed > memory:
        sizes = f"{needed / 2**30:.0f} GiB for its images in float64, and {device} has {memory / 2**30:.0f} GiB"
        raise ValueError(f"--batch {batch} needs {sizes}; lower it")


def _run(request: Request, variables: dict[str, str], out: Path | None) -> int:
    """Runs all stages, writes the file after each, and prints the verdict."""
    import torch

    from ..kernels import onednn
    from ..kernels.backend import using_backend, why_not
    from ..measure.check import BUDGETS, STOPPED, Stage, contribution, run_stages, verdict
    from ..measure.machine import provenance

    device = torch.device(request.device)
    runs: dict[str, Callable[[float], dict]] = {
        name: partial(_in_process, request, variables, name) for name in BUDGETS
    }
    runs |= dict(selftest=partial(_selftest, request))
    with using_backend("auto"):
        why = why_not(device, getattr(torch, DTYPES[request.dtype]))
    if why is not None and not request.dry:
        runs |= dict(selftest=lambda seconds: dict(skipped=f"the kernels do not run here ({why})"))
        reason = onednn.why_not(device, getattr(torch, DTYPES[request.dtype]))
        if reason is not None:
            skipped = f"it measures the kernels and oneDNN's products, which do not run here ({reason})"
            runs |= dict(tune=lambda seconds: dict(skipped=skipped))
    settings = dict(model=request.model, batch=request.batch, dtype=DTYPES[request.dtype], train=request.train)
    settings |= {} if request.size is None else dict(img_size=list(request.size))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    source = provenance() | dict(gpu=gpu)

    def conclusion(stages: dict[str, dict]) -> str:
        return _dry_conclusion(stages) if request.dry else verdict(stages)

    def save(stages: dict[str, dict]) -> None:
        if out is not None:
            tuned = _exported(stages) if gpu or request.dry else None  # it has absolute times
            content = contribution(stages, source, settings, conclusion(stages), tuned, request.dry)
            with replacing(out) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    phase = "training" if request.train else "inference"
    model = "dry run: a tiny model in Triton's interpreter" if request.dry else request.model
    print_line(f"{model}, {phase}, {DTYPES[request.dtype]}, batch {request.batch}, on {gpu or 'the CPU'}")
    patience = 4 if request.dry else 1  # a dry run measures nothing, but has to get through on a busy machine
    with _terminable():
        stages = run_stages([Stage(name, patience * BUDGETS[name], runs[name]) for name in BUDGETS], print_line, save)
    if out is not None:
        how = "docs/tune.md says how to contribute them" if gpu else "only those of a GPU can be contributed"
        print_line(f"{out} holds these results; {how}")
    print_line(conclusion(stages))
    if any(row.get("error") == STOPPED for row in stages.values()):
        return 130
    measured = any(stages[name].get("ratios") for name in ("compare", "max-autotune"))
    return int(not measured or bool(stages["selftest"].get("failed")))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Context in which SIGTERM stops a stage as Ctrl-C does, so that its process ends and what is known is printed."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dry_conclusion(stages: dict[str, dict]) -> str:
    """The sentence of a dry run: whether every step was executed."""
    late = any(part["after"] is None for part in stages.get("tune", {}).get("parts", []))
    late |= any("error" in row or row.get("missing") for row in stages.values())
    done = "Some steps failed or were not reached in time." if late else "Every step was executed."
    return f"{done} Times in the interpreter are meaningless, so there is no verdict."


def _selftest(request: Request, seconds: float) -> dict:
    """Checks the kernels on the device, most important checks first; in a dry run the first case of every op."""
    import torch

    from ..kernels import OPS
    from ..measure.timeout import TimedOut

    checks = Checks(torch.device(request.device))
    if request.dry:
        checks.names = checks.names[: len(OPS)]
    checks.run(seconds)
    if not checks.rows:
        raise TimedOut("no check ended in time")
    return checks.facts() | dict(said=checks.sentence(place_of(checks.device)))


def _in_process(request: Request, variables: dict[str, str], stage: str, seconds: float) -> dict:
    """Runs a stage in a process of its own, which is killed when its time is over."""
    from ..measure.workers import result_of

    stage_request = request._replace(stage=stage, budget=seconds, end=time.time() + seconds)
    command = [sys.executable, "-m", "fastvit_triton.cli.check_stage", json.dumps(stage_request._asdict())]
    return result_of(command, seconds, variables)


def _exported(stages: dict[str, dict]) -> dict | None:
    """What `tune --export` would write, if this run has tuned."""
    from ..measure.kept import held_in

    path = stages.get("tune", {}).get("path")
    return None if path is None else held_in(Path(path))
