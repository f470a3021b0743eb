"""`doctor`: what runs on this machine, and what conversion would fuse in a model."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import platform

from .console import print_line, select_device
from .meta_model import MetaModel, build_meta_model

HELP = "say what runs on this machine, or what would be fused in a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor`."""
    text = "timm:NAME, torchvision:NAME, hf-config:PATH_OR_CLASS, or a name from list_models()"
    parser.add_argument("--model", help=text)
    parser.add_argument("--img-size", type=int, help="image side in pixels (default: the model's)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: 64)")


def run(args: argparse.Namespace) -> int:
    """Prints versions and, for each op, whether its kernel runs here or why not; with --model, what would be fused."""
    import torch

    if args.model is not None:
        return _print_savings(build_meta_model(args.model, args.img_size), args.model, args.batch_size)
    if args.img_size is not None:
        raise ValueError("--img-size belongs to a --model; name one")

    from ..kernels import OPS
    from ..kernels.backend import backend, why_not

    device, dtypes = select_device("auto"), (torch.float32, torch.float16, torch.bfloat16)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = importlib.util.find_spec("triton") is not None
    facts = {
        "device": f"{device} ({', '.join(gpus) or f'{torch.get_num_threads()} threads'})",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if found else "not installed",
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


def _print_savings(found: MetaModel, name: str, batch: int) -> int:
    """Prints what conversion fuses in a model and the launches, bytes and flops it saves, from meta tensors."""
    import torch

    from ..convert import optimize
    from ..convert.count import savings
    from ..kernels.backend import why_not

    if batch < 1:
        raise ValueError(f"--batch-size is {batch}; it must be at least 1")
    model, shape, image, ours = found
    why = why_not(select_device("auto"), torch.bfloat16)
    print_line(f"{name}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters\n")
    if ours:
        print_line(f"Its layers call the kernels; nothing needs to be converted.{f' {why}.' if why else ''}")
    else:
        print_line(str(dataclasses.replace(optimize(model), device=why)))
    images = torch.empty(batch, *shape, dtype=torch.bfloat16, device="meta")
    positional, keywords = ((images,), {}) if image is None else ((), {image: images})
    try:
        counts = savings(model.to(torch.bfloat16), *positional, **keywords)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # other libraries' models may need more
        first = str(error).splitlines()[0]
        raise ValueError(f"what {name} saves cannot be counted from the shape of images alone: {first}") from error
    where = "a GPU where the kernels run" if why else "this GPU"
    print_line(f"\nOn {where}, {batch} images of {' × '.join(map(str, shape))}, bfloat16, inference:\n")
    print_line(f"{'':16}{'PyTorch':>10}{'fused':>10}{'frozen':>10}{'saved':>10}")
    for label, field, unit, places in (
        ("launches a batch", "launches", 1, 0),
        ("MB an image", "nbytes", 1e6 * batch, 1),
        ("GFLOP an image", "flops", 1e9 * batch, 1),
    ):
        before, after, frozen = (getattr(count, field) / unit for count in counts)
        print_line(f"{label:16}" + "".join(f"{n:>10.{places}f}" for n in (before, after, frozen, before - frozen)))
    print_line(
        "\nCounted, not measured: an operator that writes memory is one launch, which reads its operands and writes "
        "its results once; flops are those of matrix products and convolutions. Frozen: after fastvit_triton.freeze, "
        "which stores the weights of projections with the preceding LayerNorms folded in."
    )
    return 0
