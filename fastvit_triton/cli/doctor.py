"""`doctor`, `convert` and `pack`."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import platform

from .console import choose, say
from .subject import Subject, subject


def doctor(args: argparse.Namespace) -> int:
    """Says what runs on this machine, for each op the kernel or why not; with --model, what would be fused of it."""
    import torch

    if args.model is not None:
        return _examine(subject(args.model, args.img_size), args.model, args.batch_size)
    if args.img_size is not None:
        raise ValueError("--img-size belongs to a --model; name one")

    from ..kernels import OPS
    from ..kernels.op import backend, why_not

    device, dtypes = choose("auto"), (torch.float32, torch.float16, torch.bfloat16)
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
        say(f"{name:{width}}  {fact}")
    return 0


def _examine(found: Subject, name: str, batch: int) -> int:
    """Reports what conversion makes of a model and what that saves, from tensors without data."""
    import torch

    from ..convert import optimize
    from ..convert.count import savings
    from ..kernels.op import why_not

    if batch < 1:
        raise ValueError(f"--batch-size is {batch}; it must be at least 1")
    model, shape, image, ours = found
    why = why_not(choose("auto"), torch.bfloat16)
    say(f"{name}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters\n")
    if ours:
        say(f"Its layers call the kernels; nothing needs to be converted.{f' {why}.' if why else ''}")
    else:
        say(str(dataclasses.replace(optimize(model), device=why)))
    images = torch.empty(batch, *shape, dtype=torch.bfloat16, device="meta")
    given, named = ((images,), {}) if image is None else ((), {image: images})
    try:
        counts = savings(model.to(torch.bfloat16), *given, **named)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # foreign code, which may want more than that
        first = str(error).splitlines()[0]
        raise ValueError(f"what {name} saves cannot be counted from the shape of images alone: {first}") from error
    where = "a GPU where the kernels run" if why else "this GPU"
    say(f"\nOn {where}, {batch} images of {' × '.join(map(str, shape))}, bfloat16, inference:\n")
    say(f"{'':16}{'PyTorch':>10}{'fused':>10}{'frozen':>10}{'saved':>10}")
    for label, field, unit, places in (
        ("launches a batch", "launches", 1, 0),
        ("MB an image", "nbytes", 1e6 * batch, 1),
        ("GFLOP an image", "flops", 1e9 * batch, 1),
    ):
        before, after, frozen = (getattr(count, field) / unit for count in counts)
        say(f"{label:16}" + "".join(f"{n:>10.{places}f}" for n in (before, after, frozen, before - frozen)))
    say(
        "\nCounted, not measured: an operator that writes memory is one launch, which reads its operands and writes "
        "its results once; flops are those of matrix products and convolutions. Frozen: after fastvit_triton.freeze, "
        "which keeps LayerNorms folded into the projections behind them."
    )
    return 0


def convert(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint under the names of another library."""
    from ..models import create_model
    from ..weights import load_model, load_weights, save_weights

    if args.out.exists():
        raise ValueError(f"{args.out} exists already; name another file")
    if args.model is None:
        model, header = load_model(args.checkpoint)
    else:
        model, header = create_model(args.model), {}
        load_weights(model, args.checkpoint)
    save_weights(model, args.out, layout=args.to, metadata=header)
    say(f"{args.out} holds {model.variant} under the names of {args.to}")
    return 0


def pack(args: argparse.Namespace) -> int:
    """Writes an image folder as webdataset shards, which `train --data` reads."""
    from ..train.shards import pack

    pack(args.folder, args.out, args.per_shard)
    counts = (f"{len(list((args.out / split).iterdir()))} of {split}/" for split in ("train", "val"))
    say(f"{args.out} holds {' and '.join(counts)} shards")
    return 0
