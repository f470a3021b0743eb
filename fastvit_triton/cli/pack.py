"""`pack`: writes an image folder as webdataset shards."""

import argparse
from pathlib import Path

from .arguments import at_least, check_folder
from .console import print_line

HELP = "write an image folder as webdataset shards"
EXAMPLES = (
    "fastvit-triton pack photos shards",
    "fastvit-triton train --data shards",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `pack`."""
    parser.add_argument("folder", type=Path, check=check_folder, help="folder with train/<class>/ and val/<class>/")
    parser.add_argument("out", type=Path, help="a new folder")
    text = "images per shard (default: 1000)"
    parser.add_argument("--per-shard", type=int, default=1000, check=at_least(1), help=text)


def run(args: argparse.Namespace) -> int:
    """Writes an image folder as webdataset shards, which `train --data` reads."""
    from ..train.data.shards import pack

    pack(args.folder, args.out, args.per_shard)
    counts = (f"{len(list((args.out / split).iterdir()))} of {split}/" for split in ("train", "val"))
    print_line(f"{args.out} holds {' and '.join(counts)} shards")
    return 0
