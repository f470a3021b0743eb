"""`models`: lists the models by name."""

import argparse

from .console import print_line

FIGURES = ("params, M", "GFLOPs", "top-1")
HELP = "list the models by name"
EXAMPLES = (
    "fastvit-triton models",
    "fastvit-triton models 'vit_*_224'",
    "fastvit-triton models --pretrained deit3",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of `models`."""
    text = "part of a name, such as deit3, or a shell pattern, such as 'vit_*_224' (default: all)"
    parser.add_argument("pattern", nargs="?", default="*", help=text)
    text = "list names with tags, which have pretrained weights, with their classes and licences"
    parser.add_argument("--pretrained", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Lists the names that create_model, train, benchmark, tune and doctor take, and the sizes of the models.

    Parameters are in millions, with the usual number of classes; GFLOPs are of one image in inference, and a
    multiply-add counts as two. Top-1 is the accuracy in % on ImageNet-1k that timm's authors publish for the default
    weights, where they do.
    """
    from ..models import CATALOGUE, list_models, model_config
    from ..models.config import sides
    from ..models.detector import DetectorConfig
    from ..models.pyramid import PyramidConfig
    from ..models.weights.pretrained import figures, pretrained_cfg

    whole = set(args.pattern) & set("*?[")
    if args.pretrained:
        return _list_pretrained(args.pattern, args.pattern if whole else f"*{args.pattern}*")
    names = list_models(args.pattern if whole else f"*{args.pattern}*")
    if not names:
        raise ValueError(f"no model matches {args.pattern!r}; leave it out to list all {len(CATALOGUE)}")
    rows: list[tuple[str, ...]] = [("name", "image", "channels", "layers", "heads", *FIGURES)]
    for name in names:
        config = model_config(name)
        side = "×".join(map(str, sides(config.img_size)))
        if isinstance(config, PyramidConfig):  # one number per stage
            sizes = ["-".join(map(str, numbers)) for numbers in (config.widths, config.depths, config.num_heads)]
        elif isinstance(config, DetectorConfig):
            layers = f"{config.encoder_layers}+{config.decoder_layers}"
            sizes = [str(config.hidden_dim), layers, str(config.num_heads)]
        else:
            sizes = [_joined(number) for number in (config.embed_dim, config.depth, config.num_heads)]
        tag = pretrained_cfg(name).get("tag")
        parameters, gflops = figures()["sizes"].get(name, (None, None))
        numbers = [f"{parameters / 1e6:.1f}" if parameters else "", _rounded(gflops)]
        rows.append((name, side, *sizes, *numbers, _top1(f"{name}.{tag}")))
    _print_table(rows)
    return 0


def _rounded(gflops: float | None) -> str:
    """With one decimal, or one digit of what is small; "" if they are unknown."""
    if gflops is None:
        return ""
    return f"{gflops:,.1f}" if gflops >= 0.1 else f"{gflops:.1g}"


def _top1(name: str) -> str:
    """The published accuracy of weights, in %; "" if there is none."""
    from ..models.weights.pretrained import figures

    found = figures()["top1"].get(name)
    return "" if found is None else f"{found:.1f}"


def _joined(number: object) -> str:
    """A number, or those of both branches of a model."""
    if not isinstance(number, tuple):
        return str(number)
    return "-".join(map(_joined, number) if type(number[0]) is int else ("+".join(map(str, n)) for n in number))


def _list_pretrained(typed: str, pattern: str) -> int:
    """Lists the pretrained weights, the default of a name first; errors name the pattern as it was typed."""
    from ..models.weights.pretrained import list_models, pretrained_cfg

    rows: list[tuple[str, ...]] = [("name", "image", "classes", "licence", "top-1")]
    for name in list_models(pattern, pretrained=True):
        cfg = pretrained_cfg(name)
        size = "×".join(map(str, cfg["input_size"][1:]))
        rows.append((name, size, str(cfg["num_classes"]), cfg["license"] or "-", _top1(name)))
    if len(rows) == 1:
        raise ValueError(f"no pretrained weights match {typed!r}; leave it out to list all")
    _print_table(rows)
    return 0


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows; the first column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{row[0]:{widths[0]}}"] + [f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True)]
        print_line("  ".join(cells).rstrip())
