"""`push`: publishes a trained model on the Hugging Face Hub, with a model card."""

import argparse
import importlib.util

from .arguments import add_shared, check_checkpoint
from .console import print_line

HELP = "publish a model on the Hugging Face Hub"
EXAMPLES = (
    "hf auth login                                               # or set HF_TOKEN",
    "fastvit-triton push runs/photos me/photos --license mit",
    "fastvit-triton push runs/photos me/photos --private",
    "fastvit-triton convert runs/photos seen --to fastvit_triton  # writes, only",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `push`."""
    text = "output folder of a run, or a file of weights"
    parser.add_argument("checkpoint", metavar="RUN", check=check_checkpoint, help=text)
    text = "name on the Hub, USER/NAME or ORGANISATION/NAME; it is created if it does not exist"
    parser.add_argument("repository", metavar="REPO", check=_check_repository, help=text)
    add_shared(parser, "--license")
    parser.add_argument("--private", action="store_true", default=None, help="if it is created, only you can see it")
    parser.add_argument("--branch", metavar="NAME", help="branch to write to (default: main)")


def _check_repository(option: str, name: str) -> None:
    """Raises ValueError unless this is a name on the Hub, and its client is installed."""
    from ..checkpoints.locations import REPOSITORY

    if not REPOSITORY.fullmatch(name) or "@" in name:
        raise ValueError(f"{option} is {name!r}; use USER/NAME or ORGANISATION/NAME")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError("push needs the package huggingface_hub; pip install 'fastvit_triton[hub]'")


def run(args: argparse.Namespace) -> int:
    """Publishes weights, config.json and a model card, with scores, classes, data, licence and use; no images."""
    from ..models.weights.load import load_model

    model, header = load_model(args.checkpoint)
    options = {"private": args.private, "branch": args.branch, "license": args.license}
    url = model.push_to_hub(args.repository, metadata=header, **options)
    print_line(f"published as {url}")
    print_line(f"use it by --checkpoint hf-hub:{args.repository}, or as its model card says")
    return 0
