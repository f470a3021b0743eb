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
from typing import TYPE_CHECKING, NamedTuple

from .arguments import add_shared, check_output, select_device
from .console import print_line
from .model_by_name import PREFIXES, NamedModel, Size, build_model, check_name, public_name, random_model
from .results import write_json
from .selftest import Checks, place_of
from .tune import pretending, tiny_model

if TYPE_CHECKING:
    import torch

    from ..measure.check import CheckedModel
    from ..measure.timeout import Deadline
    from ..measure.tune import Tuned

HELP = "learn in five minutes whether this package is faster than torch.compile on this machine"
EXAMPLES = (
    "fastvit-triton check",
    "fastvit-triton check --model timm:vit_base_patch16_224 --batch 64",
    "fastvit-triton check --model hf-config:ViTModel --train",
)
OUT = Path("fastvit-triton-check.json")
MODELS = dict(cuda="vit_base_patch16_224", cpu="vit_small_patch16_224")  # ViT-B does not finish on a busy CPU
STAGE = "from fastvit_triton.cli.check import run_stage; run_stage()"  # the program of a stage, in a process of its own
RESERVE = 4.0  # seconds of a stage that are kept for the end of the process
TIMED = {"cuda": 10.0, "cpu": 12.0, "dry": 2.0}  # seconds at the end of a comparison for timing
DRY = 30.0  # seconds of tuning in a dry run, in which each step runs at least once


class CheckRequest(NamedTuple):
    """What a stage measures."""

    stage: str  # "tune", "compare", "runtimes" or "max-autotune"
    model: str  # name for `build_model`
    size: Size | None  # height and width of images; None means the model's own
    batch: int  # number of images
    dtype: str  # PyTorch's name of it
    train: bool  # training steps instead of inference
    device: str  # name of the device
    dry: bool  # a tiny model in Triton's interpreter
    budget: float = 0.0  # seconds that the stage has
    end: float = 0.0  # time since the epoch at which it must have ended

    def deadline(self) -> "Deadline":
        """The end of the measurements."""
        from ..measure.timeout import Deadline

        return Deadline(self.end - time.time() - RESERVE)

    def built(self) -> NamedModel:
        """The model with random weights."""
        import torch

        if self.dry:
            return tiny_model(self.train)
        size = None if self.size is None else (self.size[0], self.size[1])
        return random_model(self.model, size, torch.device(self.device), getattr(torch, self.dtype), self.train)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `check`."""
    add = parser.add_argument
    default = f"timm:{MODELS['cuda']} on a GPU, timm:{MODELS['cpu']} elsewhere"
    add("--model", check=check_name, help=f"{PREFIXES} (default: {default}; ours without timm)")
    add_shared(parser, "--batch", default="64 on a GPU, 1 elsewhere")
    add_shared(parser, "--img-size", "--dtype")
    add("--train", action="store_true", help="training steps instead of inference")
    add("--out", type=Path, check=check_output, metavar="FILE", help=f"file to contribute (default: {OUT})")
    add("--dry-run", action="store_true", help="execute every step on the CPU with a tiny model")
    add_shared(parser, "--device")


def run(args: argparse.Namespace) -> int:
    """Checks the kernels, tunes a model, and compares it with eager PyTorch and torch.compile, each in limited time.

    Ends in one sentence that says what to use, and writes a file to contribute. Without a GPU the CPU is measured, also
    with ONNX Runtime and OpenVINO where they are installed.
    """
    out = args.out or (None if args.dry_run else OUT)
    if out is not None:
        check_output("--out", out)
    if args.dry_run:
        request = CheckRequest("", "vit_tiny_patch16_224", None, 2, "float16", args.train, "cpu", True)
        with tempfile.TemporaryDirectory() as folder:
            return _run(request, {"TRITON_INTERPRET": "1", "FASTVIT_TRITON_CACHE": folder}, out)
    return _run(_request(args), {}, out)


def _request(args: argparse.Namespace) -> CheckRequest:
    """What is measured, after the checks that take little time."""
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
    dtype = args.dtype or ("bfloat16" if gpu else "float32")
    return CheckRequest("", name, args.img_size, batch, dtype, args.train, str(device), False)


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


def _run(request: CheckRequest, variables: dict[str, str], out: Path | None) -> int:
    """Runs all stages, writes the file after each, and prints the verdict."""
    import torch

    from ..kernels import onednn
    from ..kernels.backend import using_backend, why_not
    from ..measure.check import BUDGETS, ON_A_CPU, STOPPED, Advice, CheckStage, contribution, run_stages, verdict
    from ..measure.kept import held_in
    from ..measure.machine import provenance

    device = torch.device(request.device)
    budgets = BUDGETS | (ON_A_CPU if device.type == "cpu" and not request.dry else {})
    runs: dict[str, Callable[[float], dict]] = {
        name: partial(_in_process, request, variables, name) for name in budgets
    }
    runs |= dict(selftest=partial(_selftest, request))
    with using_backend("auto"):
        why = why_not(device, getattr(torch, request.dtype))
    if why is not None and not request.dry:
        runs |= dict(selftest=lambda seconds: dict(skipped=f"the kernels do not run here ({why})"))
        reason = onednn.why_not(device, getattr(torch, request.dtype))
        if reason is not None:
            skipped = f"it measures the kernels and oneDNN's products, which do not run here ({reason})"
            runs |= dict(tune=lambda seconds: dict(skipped=skipped))
    name = public_name(request.model)
    settings = dict(model=name, batch=request.batch, dtype=request.dtype, train=request.train)
    settings |= {} if request.size is None else dict(img_size=list(request.size))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    source = provenance() | dict(gpu=gpu)

    def conclusion(stages: dict[str, dict]) -> Advice:
        return Advice(_dry_conclusion(stages)) if request.dry else verdict(stages)

    def save(stages: dict[str, dict]) -> None:
        if out is not None:
            path = stages.get("tune", {}).get("path") if gpu or request.dry else None  # it has absolute times
            tuned = None if path is None else held_in(Path(path))
            write_json(out, contribution(stages, source, settings, str(conclusion(stages)), tuned, request.dry))

    phase = "training" if request.train else "inference"
    model = (
        f"dry run: a tiny model in place of {request.model}, in Triton's interpreter" if request.dry else request.model
    )
    print_line(f"{model}, {phase}, {request.dtype}, batch {request.batch}, on {gpu or 'the CPU'}")
    patience = 4 if request.dry else 1  # a dry run measures nothing, but has to get through on a busy machine
    with _terminable():
        stages = run_stages(
            [CheckStage(name, patience * budgets[name], runs[name]) for name in budgets], print_line, save
        )
    if out is not None:
        how = "docs/tune.md says how to contribute them" if gpu else "only those of a GPU can be contributed"
        print_line(f"{out} holds these results; {how}")
    advice, notes = conclusion(stages)
    for note in notes:
        print_line(f"note: {note}")
    print_line(advice)
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
    late = [name for name, row in stages.items() if "error" in row or row.get("missing")]
    if "tune" not in late and any(part["after"] is None for part in stages.get("tune", {}).get("parts", [])):
        late.append("tune")
    done = f"Failed, or not reached in time: {', '.join(late)}." if late else "Every step was executed."
    return f"{done} Times in the interpreter are meaningless, so there is no verdict."


def _selftest(request: CheckRequest, seconds: float) -> dict:
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


def _in_process(request: CheckRequest, variables: dict[str, str], stage: str, seconds: float) -> dict:
    """Runs a stage in a process of its own, which is killed when its time is over."""
    from ..measure.workers import result_of

    stage_request = request._replace(stage=stage, budget=seconds, end=time.time() + seconds)
    command = [sys.executable, "-c", STAGE, json.dumps(stage_request._asdict())]
    return result_of(command, seconds, variables)


def _subject_of(request: CheckRequest) -> "CheckedModel":
    """The model of a request and its inputs, as `measure.check` takes them."""
    import torch

    from ..measure.check import CheckedModel

    built = request.built()
    dtype = getattr(torch, request.dtype)
    device = torch.device(request.device)

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        images, named = built.inputs(request.batch, random)
        return dict(image=images[0]) if images else named

    return CheckedModel(request.model, built.model, inputs, request.batch, dtype, device, built.ours)


def _compare(request: CheckRequest) -> dict:
    """Measures eager PyTorch, ours and torch.compile, in the mode max-autotune if the stage is called so."""
    from ..measure.check import compare

    mode = "max-autotune" if request.stage == "max-autotune" else None
    kind = "dry" if request.dry else "cuda" if request.device.startswith("cuda") else "cpu"
    result = compare(_subject_of(request), mode, request.deadline(), TIMED[kind], request.budget)
    if request.dry:  # whose ratios are those of the interpreter
        right = sum(row.get("match") is True for row in result["rows"])
        result["said"] = f"{right} of {len(result['rows'])} variants gave right results"
    return result


def _runtimes(request: CheckRequest) -> dict:
    """Measures ONNX Runtime and OpenVINO beside eager PyTorch and ours, or says why not in "skipped"."""
    from ..measure.check import runtimes, runtimes_skipped

    if (why := runtimes_skipped(request.train, request.dtype)) is not None:
        return dict(skipped=why)
    return runtimes(_subject_of(request), request.deadline(), TIMED["cpu"], request.budget)


def _tune(request: CheckRequest) -> dict:
    """Tunes the model; returns what was chosen, the file that holds it, and "said"."""
    from ..measure.tune import tune
    from ..measure.variants import without_times

    subject = _subject_of(request)
    example = subject.inputs(0)
    remaining = request.deadline().left  # the last candidate may take longer than tune's limit
    seconds = DRY if request.dry else max(0.85 * remaining, 1.0)
    tuned = tune(subject.model, example.get("image", example), request.train, seconds)
    parts = [dict(name=p["name"], count=p["count"], before=p["rule"], after=p["way"]) for p in tuned.parts]
    model = tuned.model
    if subject.device.type == "cpu" and not request.dry:
        model = {name: without_times([row])[0] for name, row in model.items()}
    return dict(parts=parts, path=str(tuned.path), model=model, said=_tuned(tuned, request.dry))


def _tuned(tuned: "Tuned", dry: bool) -> str:
    """What `tune` found, and whether it is kept, in one line."""
    new = [row for row in tuned.launches if row["best"] is not None and row["best"] != row["tried"][0]["config"]]
    parts = ", ".join(f"{part['count']} × {part['name']} {_chosen(part)}" for part in tuned.parts)
    launches = f"new launch parameters for {len(new)} of {len(tuned.launches)} launches" if tuned.launches else ""
    measured = any(part["way"] for part in tuned.parts) or any(row["best"] is not None for row in tuned.launches)
    kept = (
        "used in this run only" if dry else "saved; if the machine was busy, `fastvit-triton tune --clear` removes it"
    )
    return "; ".join(
        text for text in (parts, launches, kept if measured else "nothing was measured, so nothing saved") if text
    )


def _chosen(part: dict) -> str:
    """The way of a block, and the one before it was measured."""
    before, after = ({"onednn": "by oneDNN"}.get(part[key], part[key]) for key in ("rule", "way"))
    if part["way"] is None:
        return f"{before}, as before, because it was not measured in time"
    return f"{after}, as before" if after == before else f"{after} (before: {before})"


STAGES = {"tune": _tune, "compare": _compare, "runtimes": _runtimes, "max-autotune": _compare}


def run_stage() -> None:
    """Runs the stage of the request, sys.argv[1] as JSON, and writes its result, or "error", to the file argv[2]."""
    import torch

    from ..measure.timeout import capturing

    request = CheckRequest(**json.loads(sys.argv[1]))
    result = dict[str, object]()
    with capturing(result, "error"), pretending() if request.dry else contextlib.nullcontext():
        if request.device.startswith("cuda"):
            torch.cuda.set_device(request.device)
        try:
            result |= STAGES[request.stage](request)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"--batch {request.batch} does not fit into memory; lower it") from error
    write_json(Path(sys.argv[2]), result)
