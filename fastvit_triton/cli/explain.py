"""`predict` and `explain`: image files and what a checkpoint makes of them."""

import argparse
import csv
import importlib.util
from pathlib import Path

from .console import choose, complain, say, trained


def predict(args: argparse.Namespace) -> int:
    """Classifies image files; a picture that cannot be read gets one sentence, and exit code 2 at the end."""
    import torch
    from PIL import ImageOps

    from ..train.image import defect, read

    model, about = trained(args.checkpoint)
    device = choose(args.device)
    model.to(device).eval()
    code = 0
    for file in files_in(args.images):
        if why := defect(file, decode=True):
            code = complain(f"{file} cannot be read as an image: {why}", 2)
            continue
        picture = ImageOps.invert(read(file).convert("RGB")) if args.invert else read(file)
        with torch.no_grad():
            chances = model(about["transform"](picture)[None].to(device))[0].softmax(0)
        best = chances.topk(min(max(args.top, 1), len(chances)))
        answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        say(f"{file}: " + ", ".join(f"{about['classes'][i]} ({100 * chance:.1f} %)" for i, chance in answers))
    return code


def explain(args: argparse.Namespace) -> int:
    """Shows what a checkpoint sees in image files: attention, tokens, positions, filters and costs, in one report."""
    import torch

    from ..explain import explain, explain_run, published_tables, write_report
    from ..train.image import defect, read

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("explain draws with matplotlib; pip install matplotlib")
    if args.most < 1:
        raise ValueError(f"--most is {args.most}; show at least 1 image")
    model, about = trained(args.checkpoint)
    device = choose(args.device)
    model.to(device).eval()
    files, code = files_in([args.image]), 0
    shown = []
    for file in files[: args.most]:
        if why := defect(file, decode=True):
            code = complain(f"{file} cannot be read as an image: {why}", 2)
        else:
            shown.append(file)
    if not shown:
        return code
    images = torch.stack([about["transform"](read(file)) for file in shown])
    panels = explain(
        model,
        images.to(device),
        about["transform"].restore(images),
        [file.name for file in shown],
        about["classes"],
        args.query,
    )

    def everything():
        yield from panels
        yield from explain_run(*_run(args, model, about, device), about["classes"])
        yield published_tables()

    page = write_report(everything(), args.out, f"What {args.checkpoint.resolve().name} sees")
    say(f"{page} shows {len(shown)} of {len(files)} image{'s' if len(files) > 1 else ''}; its pictures lie beside it")
    return code


def files_in(paths: list[Path]) -> list[Path]:
    """Image files, and those inside folders, in order. Refuses folders without one."""
    from ..train.folder import is_image

    found = [f for path in paths for f in (sorted(filter(is_image, path.rglob("*"))) if path.is_dir() else [path])]
    if not found:
        raise ValueError(f"there is no image in {', '.join(map(str, paths))}")
    return found


def _run(args: argparse.Namespace, model, about: dict, device) -> tuple:
    """The log of the run and its score on the test images, each None where it cannot be had."""
    from ..train.data import load_test
    from ..train.job import LOG
    from ..train.loop import evaluate
    from ..train.step import half

    folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    history = None
    if (folder / LOG).exists():
        with (folder / LOG).open(newline="") as file:
            lines = list(csv.DictReader(file))
        history = [{name: float(value) if value else None for name, value in line.items()} for line in lines]
    if about["data"] is None or args.no_test or not (about["data"] == "digits" or Path(about["data"]).is_dir()):
        return history, None
    options = {"workers": args.workers, "skip_bad_images": about["skip_bad_images"]}
    test = load_test(about["data"], about["classes"], about["transform"], about["batch_size"], **options)
    return history, evaluate(model, test, half(device))
