"""`convert`: rewrites a checkpoint with the parameter names of another library."""

import argparse
from pathlib import Path

from .checks import check_checkpoint, check_model, check_output
from .console import print_line

HELP = "rewrite a checkpoint for another library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `convert`."""
    text = "our checkpoint, or with --model a checkpoint in any known layout"
    parser.add_argument("checkpoint", type=Path, check=check_checkpoint, help=text)
    parser.add_argument("out", type=Path, check=_check_new, help="file to write, ending in .safetensors")
    layouts = ("fastvit_triton", "timm", "transformers")
    parser.add_argument("--to", required=True, choices=layouts, help="library whose parameter names to use")
    text = "name of the model that another library's checkpoint holds"
    parser.add_argument("--model", check=check_model, help=text)


def _check_new(option: str, path: Path) -> None:
    """Raises ValueError if the file exists already, or cannot be written."""
    if path.exists():
        raise ValueError(f"{path} exists already; name another file")
    check_output(option, path)


def run(args: argparse.Namespace) -> int:
    """Rewrites a checkpoint with the parameter names of another library."""
    from ..models import create_model
    from ..weights import load_model, load_weights, save_weights

    if args.model is None:
        model, header = load_model(args.checkpoint)
    else:
        model, header = create_model(args.model), {}
        load_weights(model, args.checkpoint)
    save_weights(model, args.out, layout=args.to, metadata=header)
    print_line(f"{args.out} holds {model.variant} with the parameter names of {args.to}")
    return 0
