"""`convert`: rewrites a checkpoint with the parameter names of another library, or as a folder that it loads."""

import argparse
from pathlib import Path

from .arguments import add_shared, at_least, check_checkpoint, check_output
from .console import print_line
from .model_by_name import check_tagged_model

HELP = "rewrite a checkpoint for another library"
EXAMPLES = (
    "fastvit-triton convert runs/photos photos.safetensors --to timm",
    "fastvit-triton convert runs/photos folder --to transformers --license mit",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `convert`."""
    text = "our checkpoint, timm/NAME or hf-hub:ORG/NAME of the Hub, NAME.TAG, or with --model any known layout"
    parser.add_argument("checkpoint", metavar="RUN", check=check_checkpoint, help=text)
    text = "file to write, ending in .safetensors; or a folder, with config.json and a model card"
    parser.add_argument("out", type=Path, metavar="FILE", check=_check_new, help=text)
    layouts = ("fastvit_triton", "timm", "transformers", "open_clip", "open_clip_visual", "open_clip_trunk")
    text = f"library whose parameter names to use: {', '.join(layouts)}"
    parser.add_argument("--to", required=True, choices=layouts, metavar="LIBRARY", help=text)
    text = "name of the model that another library's checkpoint holds; with a tag, its images are prepared as the tag's"
    parser.add_argument("--model", check=check_tagged_model, help=text)
    text = "with --model: outputs of the checkpoint's head (default: those of the name; 0 for no head)"
    parser.add_argument("--num-classes", type=int, check=at_least(0), help=text)
    add_shared(parser, "--license")


def _check_new(option: str, path: Path) -> None:
    """Raises ValueError if the file or folder exists already, or cannot be written."""
    if path.exists():
        raise ValueError(f"{path} exists already; name another file or folder")
    if path.suffix in {".pt", ".pth", ".bin", ".npz"}:
        raise ValueError(f"{option} is {path}; name a file that ends in .safetensors, or a folder")
    check_output(option, path)


def run(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint with the parameter names of another library."""
    from ..models.weights.create import create_model
    from ..models.weights.load import load_model, load_weights, save_weights
    from ..models.weights.publish import save_pretrained
    from ..preparation import data_config

    if args.to.startswith("open_clip") and args.out.suffix != ".safetensors":
        raise ValueError(f"{args.out} would be a folder, which open_clip does not read; name a .safetensors file")
    if args.model is None:
        if args.num_classes is not None:
            raise ValueError(f"--num-classes is {args.num_classes} without --model; give both, or neither")
        model, header = load_model(args.checkpoint)
    else:
        model = create_model(args.model)
        header = {}
        if args.num_classes is not None:
            model.reset_classifier(args.num_classes)
        report = load_weights(model, args.checkpoint)
        if new := report.reinitialised or report.initial:
            raise ValueError(f"{args.checkpoint} has no {new[0]} for {model.num_classes:,} classes; give --num-classes")
    if args.out.suffix == ".safetensors":
        save_weights(model, args.out, layout=args.to, metadata=header)
    else:
        save_pretrained(model, args.out, header, args.to, license=args.license)
    print_line(f"{args.out} holds {model.variant} with the parameter names of {args.to}")
    if model.pretrained_cfg and "training" not in header:
        used = data_config(model)
        numbers = (",".join(f"{value:g}" for value in used[name]) for name in ("mean", "std"))
        name = ".".join(filter(None, (model.pretrained_cfg.get(key) for key in ("architecture", "tag"))))
        print_line("its images have mean {} and standard deviation {}, as for {}".format(*numbers, name))
    return 0
