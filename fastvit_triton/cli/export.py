"""`export`: writes a trained model as an ONNX, OpenVINO, torch.export or AOTInductor program."""

import argparse
from pathlib import Path
from typing import Any

from .arguments import check_checkpoint, check_device, check_output
from .console import print_line
from .loading import load_trained
from .model_by_name import build_model, check_name, is_built
from .tasks.task import prepared

HELP = "write a model for ONNX, OpenVINO, torch.export or AOTInductor"
EXAMPLES = (
    "fastvit-triton export runs/photos photos.onnx --to onnx",
    "fastvit-triton export runs/photos photos.pt2 --to torch-export --free none",
    "fastvit-triton export timm:vit_small_patch16_224 vit.xml --to openvino",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export`."""
    text = "output folder of a run, a file, timm/NAME or hf-hub:ORG/NAME of the Hub, or NAME.TAG; or, with random "
    text += "weights, timm:NAME or torchvision:NAME"
    parser.add_argument("checkpoint", metavar="RUN", check=_check_model, help=text)
    text = "file to write, ending in .onnx for ONNX, .xml for OpenVINO (its weights go beside it in .bin), else in .pt2"
    parser.add_argument("out", type=Path, metavar="FILE", check=check_output, help=text)
    formats = ("onnx", "openvino", "torch-export", "aotinductor")
    text = "onnx or openvino, a graph of their operators; torch-export, of PyTorch's; or aotinductor, compiled; none "
    text += "needs this package or Triton to run"
    parser.add_argument("--to", required=True, choices=formats, metavar="FORMAT", help=text)
    parser.add_argument("--opset", type=int, help="version of ONNX's operators, 17 to 25 (default: 20)")
    text = "sizes that each call may choose: batch, height, width, separated by commas, or none (default: batch)"
    parser.add_argument("--free", default="batch", check=_free_sizes, metavar="SIZE,…", help=text)
    text = "device that aotinductor compiles for and torch-export records (default: cpu)"
    parser.add_argument("--device", default="cpu", check=check_device, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def _check_model(option: str, name: str) -> None:
    (check_name if is_built(name) else check_checkpoint)(option, name)


def run(args: argparse.Namespace) -> int:
    """Writes a model that takes normalised images, by default of one size and any number, and compares it with PyTorch.

    Mean, standard deviation, size, interpolation, crop and class names are in the file's metadata.
    """
    weights = (args.out.with_suffix(".bin"),) if args.to == "openvino" else ()
    for path in (args.out, *weights):
        if path.exists() and not args.overwrite:
            raise ValueError(f"{path} exists already; name another file, or give --overwrite")
    if args.opset is not None and args.to != "onnx":
        raise ValueError(f"--opset is {args.opset}, and {args.to} has none; leave it out")
    from ..deploy.export import OPSET, export_model

    opset = OPSET if args.opset is None else args.opset
    free_sizes = _free_sizes("--free", args.free)
    kept: dict[str, Any] = dict(opset=opset, device=args.device, free_sizes=free_sizes)
    if random := is_built(args.checkpoint):
        model: Any = build_model(args.checkpoint, device="cpu").model
    else:
        trained = load_trained(args.checkpoint)
        model = trained.model
        kept |= dict(preparation=prepared(trained.transform), classes=trained.classes)
    done = export_model(model, args.out, args.to, **kept)
    size = " x ".join(map(str, done.metadata["input_size"]))
    version = f" (ONNX, opset {opset})" if args.to == "onnx" else ""
    beside = "".join(f", its weights in {path}" for path in weights)
    free = f", and any {' and '.join(free_sizes)}" if free_sizes else ""
    print_line(f"{args.out} holds {done.metadata['model']}{version} for images of {size}{free}{beside}")
    if random:
        print_line("its weights are random; fastvit_triton.export_model writes those of a model in Python")
    mean, std = (",".join(f"{value:g}" for value in done.metadata[name]) for name in ("mean", "std"))
    print_line(f"normalise them with mean {mean} and standard deviation {std}, which are in its metadata")
    if done.difference is None:
        print_line("not compared with PyTorch: onnxruntime is not installed")
    else:
        print_line(
            f"largest difference from PyTorch: {done.difference:.1e} (rounding explains up to {done.allowed:.1e})"
        )
    if args.to == "openvino":
        hint = '{"INFERENCE_PRECISION_HINT": "f32"}'
        print_line(f'compared in float32, as by openvino.compile_model("{args.out}", "CPU", {hint});')
        print_line("without this hint OpenVINO computes in bfloat16 where the CPU has it")
    return 0


def _free_sizes(option: str, text: str) -> tuple[str, ...]:
    """The sizes that a text names; raises ValueError for others."""
    names = () if text == "none" else tuple(text.split(","))
    if not set(names) <= {"batch", "height", "width"}:
        raise ValueError(f"{option} is {text!r}; use batch, height and width, separated by commas, or none")
    return names
