"""`doctor`: which kernels run on this machine, and the predicted cost of a model on any known GPU."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections import Counter
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
    add("--model", check=check_name, help=PREFIXES)
    add("--gpu", check=_check_gpu, help="h200, a100, rtx4090, … (default: the GPU of this machine, else h200)")
    text = "image side in pixels, or HEIGHTxWIDTH (default: the model's)"
    add("--img-size", "--image-size", type=image_size, check=check_size, metavar="SIZE", help=text)
    text = f"images per batch (default: {', '.join(map(str, BATCHES))})"
    add("--batch", type=int, check=at_least(1), help=text)
    add("--train", action="store_true", help="a training step without optimiser, not inference")


def run(args: argparse.Namespace) -> int:
    """Prints versions and whether each op's kernel runs here, or why not; with --model, predicts its cost on a GPU."""
    import torch

    if args.model is not None:
        gpu = _gpu(args.gpu)
        found = build_model(args.model, args.img_size)
        if _print_model(found, args.model, args.gpu, gpu):
            _print_predictions(found, args, gpu)
        return 0
    given = {"--gpu": args.gpu, "--img-size": args.img_size, "--batch": args.batch, "--train": args.train or None}
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option} needs --model; name one")

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
    from ..kernels.cost import gpus

    if name not in gpus():
        raise ValueError(f"{option} is {name}; use one of {', '.join(gpus())}")


def _gpu(name: str | None) -> "Gpu":
    """The GPU of that name; without a name, this machine's GPU if the kernels run on it, else the H200."""
    import torch

    from ..kernels.backend import why_not
    from ..kernels.cost import gpus
    from ..kernels.launch import architecture
    from ..kernels.plan import gpu_on

    device = select_device("auto")
    if name is not None or why_not(device, torch.bfloat16) is not None:
        return gpus()[name or "h200"]
    device = torch.device("cuda", torch.cuda.current_device())
    return gpu_on(device)._replace(architecture=architecture(device))


def _print_model(found: NamedModel, name: str, asked: str | None, gpu: "Gpu") -> bool:
    """Converts a model and prints the conversion report; False if there is nothing to predict, after one sentence."""
    import torch

    from ..convert import optimize
    from ..convert.reporting import NOTHING
    from ..kernels.backend import why_not
    from ..kernels.cost import gpus

    why = why_not(select_device("auto"), torch.bfloat16)
    model = found.model
    what = f"{name}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    report = None if found.ours else optimize(model)
    if report is not None and report.is_empty:
        print_line(f"{what}, {NOTHING}.")
        return False
    print_line(f"{what}\n")
    if report is None:
        print_line(f"Its layers call the kernels; nothing needs to be converted.{f' {why}.' if why else ''}")
    else:
        print_line(str(dataclasses.replace(report, device=why)))
    here = "" if asked or not why else f" (no GPU here runs the kernels; --gpu takes {', '.join(gpus())})"
    print_line(f"\nHow calls run is chosen by expected time, here for {gpu.name}, {gpu.architecture}{here}.")
    print_line(f"Source of its rates: {gpu.source}.")
    return True


def _print_predictions(found: NamedModel, args: argparse.Namespace, gpu: "Gpu") -> None:
    """Prints the choices and the predicted cost for each batch size."""
    import torch

    from ..convert.counting.count import predict

    model, shape = found.model, found.shape
    model.to(torch.bfloat16)
    phase = "training step" if args.train else "inference"
    for batch in BATCHES if args.batch is None else (args.batch,):
        positional, keywords = found.inputs(batch, partial(torch.empty, dtype=torch.bfloat16, device="meta"))
        try:
            prediction = predict(model, gpu, args.train, *positional, **keywords)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # some models need other inputs
            first = str(error).splitlines()[0]
            raise ValueError(f"{args.model} cannot be counted from the shape of images alone: {first}") from error
        print_line(f"\nbatch {batch}: images of {' × '.join(map(str, shape))}, bfloat16, {phase}\n")
        for (text, way, why), times in Counter(map(_described, prediction.choices)).items():
            print_line(f"{f'{times} × {text}':40} {way:7} {why}")
        _print_table(prediction, batch)
    print_line(NOTES + (SAVED if args.train else FROZEN))


def _described(choice: "Choice") -> tuple[str, str, str]:
    """(name of the op or block, chosen way, reason) of a choice."""
    name = f"op {choice.name}"
    if choice.branches:
        name = f"{choice.name} N={choice.branches[0].tokens} C={choice.branches[0].channels}"
    if choice.why != "expected":
        return name, choice.way, choice.why
    times = []
    for way, (gpu, host) in choice.us.items():
        if way in choice.refused:
            times.append(f"{way} {choice.refused[way]}")
        else:
            times.append(f"{way} {max(gpu, host):.0f} (GPU {gpu:.0f}, host {host:.0f})" if host else f"{way} {gpu:.1f}")
    return name, choice.way, f"least expected µs: {'; '.join(times)}"


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
