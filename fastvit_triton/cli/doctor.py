"""`doctor`: which kernels run on this machine, and the predicted cost of a model on any known GPU."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import platform
from functools import partial
from typing import TYPE_CHECKING

from .. import __version__
from .checks import at_least, check_size, image_size
from .console import print_line, select_device
from .model_by_name import PREFIXES, NamedModel, build_model, check_name
from .platforms import next_step, this_machine

if TYPE_CHECKING:
    from ..expected.count import Prediction
    from ..expected.gpus import Gpu

HELP = "show which kernels run on this machine, or predict the cost of a model on a GPU"
MODES = ("default", "max-autotune")
MEDIUM = """
Another way to faster linear layers on a CPU is torch.set_float32_matmul_precision("medium"): PyTorch may then compute \
float32 products in bfloat16, on CPUs with such instructions, with lower precision; those by oneDNN keep float32."""
VIT = "vit_base_patch16_224"  # assumed without --model
BATCHES = (1, 8, 64, 256)
NOTES = """
Nothing here was measured. Launches and bytes are counted from shapes: an operator that writes memory is one launch, \
which reads its operands and writes its results once. Those of torch.compile are estimated by a rule \
(expected/inductor.py). Expected times are the longer of GPU and host time"""
WHOLE = """ of the whole call, from rates of data sheets and constants fitted to published throughput \
(expected/rates.json); a range in brackets is from the best to the pessimistic rates of our kernels, and the \
percentage is the error that nine of ten predicted gains of torch.compile over eager do not exceed in the model's \
family. How calls run is \
chosen by the table of the GPU (kernels/tuned/choices), from pessimistic rates."""
BLOCKS = """ of the blocks, from published rates and estimates (expected/rates.json); a range in brackets is from the \
best to the pessimistic rates of our kernels. The table by which calls run is from the pessimistic ones. torch.compile \
is expected to take the GPU time of the mixed way with PyTorch's attention, and no host time."""
FROZEN = " Frozen: after fastvit_triton.freeze, which folds the LayerNorms of fused blocks into their projections once."
SAVED = " Saved: activations that the blocks save for the backward pass."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor`."""
    add = parser.add_argument
    add("--model", check=check_name, help=f"{PREFIXES} (default, with other options: timm:{VIT})")
    add("--gpu", check=_check_gpu, help="h200, a100, 4090, … (default: the GPU of this machine, else h200)")
    text = "image side in pixels, or HEIGHTxWIDTH (default: the model's)"
    add("--img-size", "--image-size", type=image_size, check=check_size, metavar="SIZE", help=text)
    text = f"images per batch (default: {', '.join(map(str, BATCHES))})"
    add("--batch", type=int, check=at_least(1), help=text)
    add("--train", action="store_true", help="a training step without optimiser, not inference")
    text = "autocast to it, bfloat16 if no dtype follows (default: no autocast, weights in bfloat16)"
    add("--amp", nargs="?", const="bfloat16", choices=("bfloat16", "float16"), help=text)
    add("--mode", choices=MODES, help="of torch.compile (default: both)")


def run(args: argparse.Namespace) -> int:
    """Prints versions and whether each op's kernel runs here, or why not; with options, predicts a model's cost."""
    import torch

    if args.model is None and any((args.gpu, args.img_size, args.batch, args.train, args.amp, args.mode)):
        args.model = _default_model()
    if args.model is not None:
        from ..expected.gpus import gpu_by_name
        from ..measure.verdict import local_gpu

        gpu = local_gpu() if args.gpu is None else gpu_by_name(args.gpu)
        _predict(build_model(args.model, args.img_size), args, gpu)
        return 0

    from ..kernels import OPS
    from ..kernels.backend import backend, why_not
    from ..kernels.tile import MISSING

    device = select_device("auto")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    installed = importlib.util.find_spec("triton") is not None
    facts = {
        "fastvit_triton": __version__,
        "device": f"{device} ({', '.join(gpus) or f'{torch.get_num_threads()} threads'})",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if installed else "not installed",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "backend": f"{backend()} (FASTVIT_TRITON_BACKEND)",
    }
    paths = {dtype: f"PyTorch path: {why}" if (why := why_not(device, dtype)) else "kernel" for dtype in dtypes}
    same = len(set(paths.values())) == 1
    if device.type == "cpu":
        facts["oneDNN"] = _onednn(dtypes)
    for op in OPS:
        facts[op.name] = paths[dtypes[0]] if same else "; ".join(f"{dtype}: {path}" for dtype, path in paths.items())
        if device.type == "cpu" and op.name in ("linear", "mlp"):
            facts[op.name] = f"oneDNN's products where the line above says so, else the {facts[op.name]}"
    facts["next step"] = next_step(this_machine(MISSING is None, why_not(device, torch.bfloat16)))
    width = max(map(len, facts))
    for name, fact in facts.items():
        print_line(f"{name:{width}}  {fact}")
    if device.type == "cpu":
        print_line(MEDIUM)
    return 0


def _onednn(dtypes: tuple) -> str:
    """Which products run by oneDNN on this CPU, and what it cannot do, by dtype."""
    import torch

    from ..kernels import measured, onednn

    said: dict[str, list[str]] = {}
    for dtype in dtypes:
        runs, why = onednn.rule(torch.device("cpu"), dtype)
        text = f"linear layers run by it {why}" if runs else f"not used, {why}"
        if onednn.why_not(torch.device("cpu"), dtype) is None:
            operations = (*onednn.BINARY, *onednn.POST_OPERATIONS, "packed")
            refused = [reason for name in operations if (reason := onednn.refusal(dtype, name)) is not None]
            text = "; ".join([text, *refused])
        said.setdefault(text, []).append(str(dtype).removeprefix("torch."))
    return f"{measured.cpu_name()}: " + "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items())


def _check_gpu(option: str, name: str) -> None:
    """Raises ValueError if no rates of this GPU are known."""
    from ..expected.gpus import gpu_by_name

    try:
        gpu_by_name(name)
    except ValueError as error:
        raise ValueError(f"{option}{str(error).removeprefix('gpu')}") from error


def _default_model() -> str:
    """ViT-B/16: timm's if it is installed, else ours."""
    from ..measure.variants import absent

    return VIT if absent("timm") else f"timm:{VIT}"


def _predict(named_model: NamedModel, args: argparse.Namespace, gpu: "Gpu") -> None:
    """Converts a model, and prints for each batch size how its modules run and the predicted cost."""
    import torch

    from ..convert import optimize
    from ..convert.chosen import located, with_ways
    from ..convert.flop_shares import Subject
    from ..convert.reporting import NOTHING
    from ..expected.count import predict
    from ..expected.gpus import gpus
    from ..kernels.backend import why_not
    from ..measure.verdict import of_prediction

    model, shape = named_model.model, named_model.shape
    what = f"{args.model}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    report = optimize(model)
    if report.is_empty:
        print_line(f"{what}, {NOTHING}.")
        return
    print_line(what)
    why = None if args.gpu else why_not(select_device("auto"), torch.bfloat16)
    here = f" ({why}; --gpu takes {', '.join(gpus())})" if why else ""
    print_line(f"How calls run is chosen by a table, here for {gpu.name}, {gpu.architecture}{here}.")
    print_line(f"Source of its rates: {gpu.source}.")
    dtype = torch.float32 if args.amp else torch.bfloat16
    make = partial(torch.empty, dtype=dtype, device="meta")
    model.to(dtype)
    positional, named = named_model.inputs(1, make)
    report = dataclasses.replace(report, subject=Subject(model, named or positional))
    amp = torch.autocast("cpu", getattr(torch, args.amp)) if args.amp else contextlib.nullcontext()  # counted on a CPU
    numbers = f"autocast to {args.amp}" if args.amp else "bfloat16"
    phase = "training step" if args.train else "inference"
    for batch in BATCHES if args.batch is None else (args.batch,):
        positional, named = named_model.inputs(batch, make)
        try:
            with located(model), amp:
                prediction = predict(model, gpu, args.train, *positional, **named)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # some models need other inputs
            first = str(error).splitlines()[0]
            raise ValueError(f"{args.model} cannot be counted from the shape of images alone: {first}") from error
        print_line(f"\nbatch {batch}: images of {' × '.join(map(str, shape))}, {numbers}, {phase}\n")
        shown = with_ways(report, prediction.choices)
        print_line(f"{shown}\n")
        _print_table(prediction, batch, MODES if args.mode is None else (args.mode,))
        if not args.train:
            print_line(f"\n{of_prediction(prediction, shown, batch, numbers)}")
    print_line(NOTES + (BLOCKS + SAVED if args.train else WHOLE + FROZEN))


def _print_table(prediction: "Prediction", batch: int, modes: tuple[str, ...]) -> None:
    """Prints launches, bytes, saved activations and expected times, ours and PyTorch's."""
    counts = {"PyTorch": prediction.eager, "torch.compile": prediction.compiled, "by default": prediction.ours}
    if prediction.frozen is not None:
        counts["frozen"] = prediction.frozen
    rows = {
        name: {"launches": f"{n.launches}", "MB per image": _megabytes(n.nbytes, batch)} for name, n in counts.items()
    }
    if prediction.training:
        rows["PyTorch"]["MB per image saved"] = _megabytes(prediction.saved_bytes("plain"), batch)
        rows["by default"]["MB per image saved"] = _megabytes(prediction.saved_bytes(), batch)
        modes = ("default",)  # what templates compute is not known for the backward pass
    expected = "expected ms" + " of the blocks" * prediction.training
    if prediction.blocks or not prediction.training:
        rows["PyTorch"][expected] = _milliseconds(prediction.eager_us())
        rows["torch.compile"][expected] = _milliseconds(prediction.compiled_us())
        for name in list(counts)[2:]:
            most, between, least = prediction.ours_us(name == "frozen")
            span = f" ({_milliseconds(least)} to {_milliseconds(most)})" if most > least else ""
            rows[name][expected] = _milliseconds(between) + span
    if "max-autotune" in modes:
        best = {"max-autotune": {expected: _milliseconds(prediction.compiled_us("max-autotune"))}}
        rows = {name: rows.pop(name) for name in ("PyTorch", "torch.compile")} | best | rows
    if "default" not in modes:
        del rows["torch.compile"]
    width = {name: max(14, 2 + max(map(len, (name, *row.values())))) for name, row in rows.items()}
    print_line(f"{'':26}" + "".join(f"{name:>{width[name]}}" for name in rows))
    for label in dict.fromkeys(label for row in rows.values() for label in row):
        print_line(f"{label:26}" + "".join(f"{row.get(label, '-'):>{width[name]}}" for name, row in rows.items()))


def _megabytes(nbytes: float, batch: int) -> str:
    return f"{nbytes / 1e6 / batch:.1f}"


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.3f}"
