"""`export`: writes a trained model as an ONNX, torch.export or AOTInductor program."""

import argparse
from pathlib import Path
from typing import Any

from .checks import check_checkpoint, check_output
from .console import check_device, print_line
from .loading import load_trained

HELP = "write a model for ONNX, torch.export or AOTInductor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export`."""
    text = "output folder of a run, a file, timm/NAME or hf-hub:ORG/NAME of the Hub, or NAME.TAG"
    parser.add_argument("checkpoint", check=check_checkpoint, help=text)
    text = "file to write, ending in .onnx for ONNX, else in .pt2"
    parser.add_argument("out", type=Path, check=check_output, help=text)
    text = "a graph of ONNX's or of PyTorch's operators, or a compiled one; none needs this package or Triton to run"
    parser.add_argument("--to", required=True, choices=("onnx", "torch-export", "aotinductor"), help=text)
    parser.add_argument("--opset", type=int, help="version of ONNX's operators, 18 to 25 (default: 20)")
    text = "device that aotinductor compiles for and torch-export records (default: cpu)"
    parser.add_argument("--device", default="cpu", check=check_device, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def run(args: argparse.Namespace) -> int:
    """Writes a model that takes normalised images of one size, any number at a time, and compares it with PyTorch.

    Mean, standard deviation, size, interpolation, crop and class names are in the file's metadata.
    """
    if args.out.exists() and not args.overwrite:
        raise ValueError(f"{args.out} exists already; name another file, or give --overwrite")
    if args.opset is not None and args.to != "onnx":
        raise ValueError(f"--opset is {args.opset}, and {args.to} has none; leave it out")
    from ..deploy.export import BATCHES, OPSET, export_model

    trained = load_trained(args.checkpoint)
    used = trained.transform
    prepared: dict[str, Any] = {"input_size": (len(used.mean), *used.size), "crop_pct": used.crop}
    prepared |= {name: getattr(used, name) for name in ("mean", "std", "crop_mode", "interpolation")}
    opset = OPSET if args.opset is None else args.opset
    kept: dict[str, Any] = dict(preparation=prepared, classes=trained.classes, opset=opset, device=args.device)
    done = export_model(trained.model, args.out, args.to, **kept)
    size = " x ".join(map(str, prepared["input_size"]))
    version = f" (ONNX, opset {opset})" if args.to == "onnx" else ""
    print_line(f"{args.out} holds {done.metadata['model']}{version} for batches of images of {size}")
    mean, std = (",".join(f"{value:g}" for value in values) for values in (used.mean, used.std))
    print_line(f"normalise them with mean {mean} and standard deviation {std}, which are in its metadata")
    if done.difference is None:
        print_line("not compared with PyTorch: onnxruntime is not installed")
    else:
        batches = " and ".join(map(str, BATCHES))
        comparison = f"largest difference from PyTorch, for batches of {batches}: {done.difference:.1e}"
        print_line(f"{comparison} (rounding explains up to {done.allowed:.1e})")
    return 0
