"""`evaluate`: how good a checkpoint is on test images: accuracy by class, AP, bits a dimension, or PSNR and SSIM."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..files import printable
from . import detect
from .checks import check_data
from .console import (
    add_device_option,
    add_max_pixels_option,
    add_skip_option,
    add_workers_option,
    print_line,
    select_device,
    tracked,
)
from .loading import TrainedModel, add_checkpoint_option, load_trained, test_images, trained_for
from .results import add_out_option, write_rows

if TYPE_CHECKING:
    import torch

    from ..train.loop import Score

HELP = "compute the test accuracy of a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `evaluate`."""
    add_checkpoint_option(parser)
    text = "data set whose val/ is evaluated, or all of <class>/ (default: test images of the training data set)"
    parser.add_argument("--data", check=check_data, help=text)
    text = (
        "the scores of each class, of detectors and classifiers, and their confusion matrix; JSON also has the totals"
    )
    add_out_option(parser, text)
    add_device_option(parser)
    add_workers_option(parser)
    add_skip_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Computes the test accuracy of a checkpoint, in total and by class; of models of pixels bits a dimension."""
    from ..train.loop import evaluate
    from ..train.outputs import skipped
    from ..train.step import autocast_dtype

    trained = load_trained(args.checkpoint, args.mean, args.std)
    if args.data is None and trained.data is None:
        raise ValueError(f"{args.checkpoint} does not say what it was trained on; give --data")
    if getattr(trained.model, "task", "classify") == "detect":
        return detect.evaluate(trained, args)
    skip = args.skip_bad_images or trained.skip_bad_images
    options = {"workers": args.workers, "skip_bad_images": skip, "max_pixels": args.max_pixels}
    test = test_images(trained, args.data, options)
    device = select_device(args.device)
    task = getattr(trained.model, "task", "classify")
    if args.out is not None and task in ("generate", "restore"):
        raise ValueError(f"--out {args.out} is for the scores of classifiers; leave it out")
    if task == "generate":
        return _likelihood(trained, test, device)
    if task == "restore":
        return _restoration(trained, test, device)
    trained_for("classify", trained, args.checkpoint)
    score = evaluate(trained.model.to(device), tracked(test, len(test), "evaluating"), autocast_dtype(device))
    _classification(trained, score, args.out)
    if test.bad:
        print_line(skipped(test.bad))
    return 0


def _classification(trained: TrainedModel, score: "Score", out: Path | None) -> None:
    """Prints the scores of each class and of all, and writes them to the file `out`."""
    from rich.table import Table

    from ..train.metrics import class_scores, confusion_matrix, macro_f1

    assert score.targets is not None and score.predictions is not None  # of a classifier
    arguments = score.targets, score.predictions, len(trained.classes)
    scores = class_scores(*arguments)
    table = Table("class", "images", "correct", "accuracy", "precision", "F1")
    for name, row in zip(trained.classes, scores, strict=True):
        shares = ["-" if value is None else f"{100 * value:.1f} %" for value in (row.recall, row.precision)]
        f1 = "-" if row.f1 is None else f"{row.f1:.3f}"
        table.add_row(Text(printable(name)), f"{row.images:,}", f"{row.correct:,}", *shares, f1)
    Console().print(table)
    correct = sum(row.correct for row in scores)
    images = len(score.targets)
    assert score.accuracy is not None and score.top5 is not None
    counts = f"({correct:,} of {images:,} images)"
    print_line(f"test accuracy {100 * score.accuracy:.2f} % {counts}, loss {score.loss:.4f}")
    five = f"top-5 accuracy {100 * score.top5:.2f} %, " if len(scores) > 5 else ""
    print_line(f"{five}macro-F1 {macro_f1(scores):.4f}")
    if out is None:
        return
    confusion = confusion_matrix(*arguments).tolist()
    rows = [{"class": name} | row._asdict() for name, row in zip(trained.classes, scores, strict=True)]
    totals: dict[str, Any] = {"images": images, "loss": score.loss, "top1": score.accuracy, "top5": score.top5}
    totals |= {"macro_f1": macro_f1(scores), "classes": rows, "confusion": confusion}
    columns = [f"predicted as {name}" for name in trained.classes]
    write_rows(
        out, [row | dict(zip(columns, line, strict=True)) for row, line in zip(rows, confusion, strict=True)], totals
    )
    print_line(f"{out} holds the scores of {len(rows):,} classes and the confusion matrix")


def _likelihood(trained: TrainedModel, test: Any, device: "torch.device") -> int:
    """Prints the bits a dimension of a model of pixels, a mean over the test images."""
    import torch

    from ..train.generative import Likelihood

    module = Likelihood(trained.model, trained.transform.restore).to(device).eval()
    bits = []
    with torch.no_grad():
        for images, classes in test:
            bits.append(module(images.to(device), classes.to(device)).double().cpu() / torch.tensor(2.0).log())
    per_image = torch.cat(bits)
    print_line(f"{per_image.mean():.4f} bits a dimension ({len(per_image):,} images)")
    return 0


def _restoration(trained: TrainedModel, test: Any, device: "torch.device") -> int:
    """Prints PSNR and SSIM of each task, and of the input, for x2, x3 and x4 enlarged by bicubic interpolation."""
    import torch
    from rich.table import Table

    from ..models.ipt import enlarged, scale_of
    from ..train.generative import crop, scaled
    from ..train.restoration import degrade, psnr, ssim

    model: Any = trained.model.to(device).eval()
    table = Table("task", "PSNR, dB", "of the input", "SSIM", "of the input")
    for task in model.config.tasks:
        torch.manual_seed(0)
        rows = []
        for images, _ in test:
            targets = crop((255 * trained.transform.restore(images)).round(), scaled(model.config.img_size, task))
            degraded = degrade(targets, task)
            with torch.no_grad():
                restored = model(degraded.to(device), task).cpu()
            pair = (restored.clamp(0, 255), enlarged(degraded, scale_of(task)).clamp(0, 255))
            rows.append(torch.stack([measure(x, targets) for measure in (psnr, ssim) for x in pair], 1))
        means = torch.cat(rows).mean(0).tolist()
        table.add_row(task, f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[2]:.4f}", f"{means[3]:.4f}")
    Console().print(table)
    return 0
