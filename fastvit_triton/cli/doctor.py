"""`doctor`: which kernels run on this machine, and the predicted cost of a model on any known GPU."""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import platform
from functools import partial
from typing import TYPE_CHECKING

from .. import __version__
from .arguments import add_shared, dtype_name, select_device
from .console import print_line
from .model_by_name import PREFIXES, NamedModel, build_model, check_name
from .platforms import next_step, step_on_a_cpu, this_machine

if TYPE_CHECKING:
    import torch

    from ..expected.count import Prediction
    from ..expected.gpus import Gpu

HELP = "show which kernels run on this machine, or predict the cost of a model on a GPU"
EXAMPLES = (
    "fastvit-triton doctor",
    "fastvit-triton doctor --gpu 4090 --model timm:vit_small_patch16_224",
)
MODES = ("default", "max-autotune")
VIT = "vit_base_patch16_224"  # assumed without --model
VITS = {"ViT-Ti": 192, "ViT-S": 384, "ViT-B": 768}  # name → width, smallest first
IN_PHASE = {"inference": "in inference", "frozen": "frozen", "training": "in training"}
TOKENS = 197  # of an image of 224 × 224 in patches of 16 × 16
BATCHES = (1, 8, 64, 256)
NOTES = """
Nothing here was measured. Launches and bytes are counted from shapes: an operator that writes memory is one launch, \
which reads its operands and writes its results as often as its kernels do. Those of torch.compile are estimated by a \
rule (expected/inductor.py). Expected times are the longer of GPU and host time of the whole call, from rates of data \
sheets and constants fitted to published throughput of inference (expected/rates.json); a range in brackets is from \
the best to the pessimistic rates of our kernels, and a percentage is the error that nine of ten predicted gains of \
torch.compile over eager do not exceed in the model's family. How calls run is chosen by the table of the GPU \
(kernels/tuned/choices), from expected rates; what may be slower than PyTorch at pessimistic ones counts ten times."""
FROZEN = " Frozen: after fastvit_triton.freeze, which folds the LayerNorms of fused blocks into their projections once."
SAVED = " Saved: activations that the blocks save for the backward pass."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor`."""
    add = parser.add_argument
    add("--model", check=check_name, help=f"{PREFIXES} (default, with other options: timm:{VIT})")
    add("--gpu", check=_check_gpu, help="h200, a100, 4090, … (default: the GPU of this machine, else h200)")
    add_shared(parser, "--img-size")
    add_shared(parser, "--batch", default=", ".join(map(str, BATCHES)))
    add("--train", action="store_true", help="a training step without optimiser, not inference")
    text = "autocast to it, bfloat16 if no dtype follows (default: no autocast, weights in bfloat16)"
    add("--amp", nargs="?", const="bfloat16", type=dtype_name, choices=("bfloat16", "float16"), help=text)
    add("--mode", choices=MODES, help="of torch.compile (default: both)")


def run(args: argparse.Namespace) -> int:
    """Prints versions and what runs here, or why not, and the next step; with options, predicts a model's cost."""
    import torch

    from ..kernels import measured

    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    if args.model is None and any((args.gpu, args.img_size, args.batch, args.train, args.amp, args.mode)):
        from ..measure.variants import absent

        args.model = VIT if absent("timm") else f"timm:{VIT}"
    if args.model is not None:
        from ..expected.gpus import gpu_by_name
        from ..measure.verdict import local_gpu

        gpu = local_gpu() if args.gpu is None else gpu_by_name(args.gpu)
        _predict(build_model(args.model, args.img_size), args, gpu)
        return 0

    from ..kernels.backend import backend, why_not
    from ..kernels.tile import MISSING

    device = select_device("auto")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    installed = importlib.util.find_spec("triton") is not None
    facts = {
        "fastvit_triton": __version__,
        "device": f"{device} ({', '.join(gpus) or f'{torch.get_num_threads()} threads'})",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if installed else "not installed",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "backend": f"{backend()} (FASTVIT_TRITON_BACKEND)",
        "kernels": _by_dtype({d: f"not used: {why}" if (why := why_not(device, d)) else "run here" for d in dtypes}),
    }
    if device.type == "cpu":
        facts["oneDNN"] = f"on {measured.cpu_name()}, for linear layers of one image"
        facts |= {f"  {names}": fact for fact, names in _said({dtype: _onednn(dtype) for dtype in dtypes}).items()}
    if (why := _no_torchvision()) is not None:
        facts["torchvision"] = why
    step = next_step(this_machine(MISSING is None, why_not(device, torch.bfloat16)))
    facts |= {"next step": step} if device.type != "cpu" else {"next step": step_on_a_cpu(), "for a GPU": step}
    width = max(map(len, facts))
    for name, fact in facts.items():
        print_line(f"{name:{width}}  {fact}")
    return 0


def _no_torchvision() -> str | None:
    """Why torchvision, which timm and transformers import, cannot be imported; None if it can, or is not installed."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return f"cannot be imported ({cause}), nor can timm; install its build for this PyTorch, see docs/faq.md"
    return None


def _by_dtype(facts: "dict[torch.dtype, str]") -> str:
    """The facts; without dtypes if all are equal."""
    said = _said(facts)
    return next(iter(said)) if len(said) == 1 else "; ".join(f"{names}: {text}" for text, names in said.items())


def _said(facts: "dict[torch.dtype, str]") -> dict[str, str]:
    """Fact → the dtypes that have it."""
    said: dict[str, list[str]] = {}
    for dtype, text in facts.items():
        said.setdefault(text, []).append(str(dtype).removeprefix("torch."))
    return {text: ", ".join(names) for text, names in said.items()}


def _onednn(dtype: "torch.dtype") -> str:
    """When products in this dtype run by oneDNN on this CPU, and what it cannot do."""
    import torch

    from ..kernels import measured, onednn

    cpu = torch.device("cpu")
    rule = onednn.rule(cpu, dtype)
    if not rule.runs:
        text = f"not used, {rule.why}"
    else:
        smallest = {phase: _smallest(dtype, phase) for phase in onednn.PHASES}
        used = [f"{IN_PHASE[phase]} for {name} and larger" for phase, name in smallest.items() if name is not None]
        text = f"used {', '.join(used)}" if used else f"not used up to {list(VITS)[-1]}"
        tuned = measured.of(cpu).ways.values()
        if onednn.forced() or (not used and "onednn" in tuned):
            text = f"used {rule.why}"
        elif tuned:
            text += f"; {onednn.TUNED}"
    if onednn.why_not(cpu, dtype) is None:
        operations = (*onednn.BINARY, *onednn.POST_OPERATIONS, "packed")
        refused = [reason for name in operations if (reason := onednn.refusal(dtype, name)) is not None]
        text = "; ".join([text, *refused])
    return text


def _smallest(dtype: "torch.dtype", phase: str) -> str | None:
    """The first of `VITS` for which oneDNN's products are faster, for one image; None if they are for none."""
    from ..kernels import onednn

    products = {name: 3 * TOKENS * width**2 for name, width in VITS.items()}  # the mean of qkv, proj, fc1 and fc2
    return next((name for name, macs in products.items() if onednn.pays(dtype, macs, phase)), None)


def _check_gpu(option: str, name: str) -> None:
    """Raises ValueError if no rates of this GPU are known."""
    from ..expected.gpus import gpu_by_name

    try:
        gpu_by_name(name)
    except ValueError as error:
        raise ValueError(f"{option}{str(error).removeprefix('gpu')}") from error


def _predict(named_model: NamedModel, args: argparse.Namespace, gpu: "Gpu") -> None:
    """Converts a model, and prints for each batch size how its modules run and the predicted cost."""
    import torch

    from ..convert import optimize
    from ..convert.captured import replaced_parts
    from ..convert.chosen import located, with_ways
    from ..convert.flop_shares import CountedModel
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
    report = dataclasses.replace(report, subject=CountedModel(model, named or positional, replaced_parts))
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
    print_line(NOTES + (SAVED if args.train else FROZEN))


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
    expected = "expected ms"
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
