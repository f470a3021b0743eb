"""`doctor`, `convert` and `pack`."""

import argparse
import importlib.metadata
import importlib.util
import platform

from .console import choose, say


def doctor(args: argparse.Namespace) -> int:
    """Says what runs on this machine: devices, versions, and for each op the kernel or why not."""
    import torch

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
