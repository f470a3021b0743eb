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

if TYPE_CHECKING:
    from ..convert.counting.count import Prediction
    from ..kernels.cost import Gpu
    from ..kernels.plan import Choice

HELP = "show which kernels run on this machine, or predict the cost of a model on a GPU"
VIT = "vit_base_patch16_224"  # assumed without --model
BATCHES = (1, 8, 64, 256)
NOTES = """
Nothing here was measured. Launches and bytes are counted from shapes: an operator that writes memory is one launch, \
which reads its operands and writes its results once. Those of torch.compile are estimated by a rule \
(convert/counting/inductor_rule.py). Expected times are the longer of GPU and host time of the blocks, from published \
rates and estimates (kernels/tuned/rates.json); a range in brackets is from the best to the pessimistic rates of our \
kernels. The choice uses the pessimistic ones. torch.compile is expected to take the GPU time of the mixed way with \
PyTorch's attention, and no host time."""
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
    add("--amp", choices=("bfloat16", "float16"), help="autocast to it (default: weights in bfloat16)")


def run(args: argparse.Namespace) -> int:
    """Prints versions and whether each op's kernel runs here, or why not; with options, predicts a model's cost."""
    import torch

    if args.model is None and any((args.gpu, args.img_size, args.batch, args.train, args.amp)):
        args.model = _default_model()
    if args.model is not None:
        _predict(build_model(args.model, args.img_size), args, _gpu(args.gpu))
        return 0

    from ..kernels import OPS
    from ..kernels.backend import backend, why_not

    device, dtypes = select_device("auto"), (torch.float32, torch.float16, torch.bfloat16)
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
    for op in OPS:
        facts[op.name] = paths[dtypes[0]] if same else "; ".join(f"{dtype}: {path}" for dtype, path in paths.items())
    width = max(map(len, facts))
    for name, fact in facts.items():
        print_line(f"{name:{width}}  {fact}")
    return 0


def _check_gpu(option: str, name: str) -> None:
    """Raises ValueError if no rates of this GPU are known."""
    from ..kernels.cost import gpu_by_name

    try:
        gpu_by_name(name)
    except ValueError as error:
        raise ValueError(f"{option}{str(error).removeprefix('gpu')}") from error


def _default_model() -> str:
    """ViT-B/16: timm's if it is installed, else ours."""
    from ..measure.variants import absent

    return VIT if absent("timm") else f"timm:{VIT}"


def _gpu(name: str | None) -> "Gpu":
    """The GPU of that name; without a name, this machine's GPU if the kernels run on it, else the H200."""
    import torch

    from ..kernels.backend import why_not
    from ..kernels.cost import gpu_by_name
    from ..kernels.launch import architecture
    from ..kernels.plan import gpu_on

    device = select_device("auto")
    if name is not None or why_not(device, torch.bfloat16) is not None:
        return gpu_by_name(name or "h200")
    device = torch.device("cuda", torch.cuda.current_device())
    return gpu_on(device)._replace(architecture=architecture(device))


def _predict(found: NamedModel, args: argparse.Namespace, gpu: "Gpu") -> None:
    """Converts a model, and prints for each batch size how its modules run and the predicted cost."""
    import torch

    from ..convert import optimize
    from ..convert.chosen import located, with_ways
    from ..convert.counting.count import predict
    from ..convert.reporting import NOTHING
    from ..convert.shares import Subject
    from ..kernels.backend import why_not
    from ..kernels.cost import gpus

    model, shape = found.model, found.shape
    what = f"{args.model}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    report = optimize(model)
    if report.is_empty:
        print_line(f"{what}, {NOTHING}.")
        return
    print_line(what)
    why = None if args.gpu else why_not(select_device("auto"), torch.bfloat16)
    here = f" ({why}; --gpu takes {', '.join(gpus())})" if why else ""
    print_line(f"How calls run is chosen by expected time, here for {gpu.name}, {gpu.architecture}{here}.")
    print_line(f"Source of its rates: {gpu.source}.")
    dtype = torch.float32 if args.amp else torch.bfloat16
    make = partial(torch.empty, dtype=dtype, device="meta")
    model.to(dtype)
    positional, named = found.inputs(1, make)
    report = dataclasses.replace(report, subject=Subject(model, named or positional))
    amp = torch.autocast("cpu", getattr(torch, args.amp)) if args.amp else contextlib.nullcontext()  # counted on a CPU
    numbers, phase = (
        f"autocast to {args.amp}" if args.amp else "bfloat16",
        "training step" if args.train else "inference",
    )
    for batch in BATCHES if args.batch is None else (args.batch,):
        positional, named = found.inputs(batch, make)
        try:
            with located(model), amp:
                prediction = predict(model, gpu, args.train, *positional, **named)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # some models need other inputs
            first = str(error).splitlines()[0]
            raise ValueError(f"{args.model} cannot be counted from the shape of images alone: {first}") from error
        print_line(f"\nbatch {batch}: images of {' × '.join(map(str, shape))}, {numbers}, {phase}\n")
        print_line(str(with_ways(report, prediction.choices, _reason)))
        print_line("")
        _print_table(prediction, batch)
    print_line(NOTES + (SAVED if args.train else FROZEN))


def _reason(choice: "Choice") -> str:
    """Why a choice was made: what decided, and the expected times if these did."""
    if choice.why != "expected":
        return choice.why
    times = []
    for way, (gpu, host) in choice.us.items():
        if way in choice.refused:
            times.append(f"{way} {choice.refused[way]}")
        else:
            times.append(f"{way} {max(gpu, host):.0f} (GPU {gpu:.0f}, host {host:.0f})" if host else f"{way} {gpu:.1f}")
    return f"least expected µs: {'; '.join(times)}"


def _print_table(found: "Prediction", batch: int) -> None:
    """Prints launches, bytes, saved activations and expected times, ours and PyTorch's."""
    counts = {"PyTorch": found.eager, "torch.compile": found.compiled, "by default": found.ours}
    if found.frozen is not None:
        counts["frozen"] = found.frozen
    rows = {
        "launches": [f"{count.launches}" for count in counts.values()],
        "MB per image": [f"{count.nbytes / 1e6 / batch:.1f}" for count in counts.values()],
    }
    if found.blocks:
        if found.training:
            saved = (found.saved_bytes("plain"), None, found.saved_bytes())
            rows["MB per image saved"] = ["-" if n is None else f"{n / 1e6 / batch:.1f}" for n in saved]
        times = [f"{found.eager_us() / 1e3:.3f}", f"{found.compiled_us() / 1e3:.3f}"]
        for frozen in (False, True)[: len(counts) - 2]:
            most, expected, least = (us / 1e3 for us in found.ours_us(frozen))
            times.append(f"{expected:.3f}" + (f" ({least:.3f} to {most:.3f})" if most > least else ""))
        rows["expected ms of the blocks"] = times
    widths = [max(14, 2 + max(len(row[i]) for row in (list(counts), *rows.values()))) for i in range(len(counts))]
    for label, row in {"": list(counts), **rows}.items():
        print_line(f"{label:26}" + "".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
