"""`evaluate`: how good a checkpoint is on test images: accuracy by class, bits a dimension, or PSNR and SSIM."""

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..files import printable
from .checks import check_data
from .console import (
    add_device_option,
    add_max_pixels_option,
    add_skip_option,
    add_workers_option,
    print_line,
    select_device,
)
from .loading import TrainedModel, add_checkpoint_option, load_trained, test_images, trained_for

if TYPE_CHECKING:
    import torch

HELP = "compute the test accuracy of a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `evaluate`."""
    add_checkpoint_option(parser)
    text = "data set whose val/ is evaluated, or all of <class>/ (default: test images of the training data set)"
    parser.add_argument("--data", check=check_data, help=text)
    add_device_option(parser)
    add_workers_option(parser)
    add_skip_option(parser)
    add_max_pixels_option(parser)


def run(args: argparse.Namespace) -> int:
    """Computes the test accuracy of a checkpoint, in total and by class; of models of pixels bits a dimension."""
    from rich.table import Table

    from ..train.data.transform import join_names
    from ..train.loop import evaluate
    from ..train.step import autocast_dtype

    trained = load_trained(args.checkpoint, args.mean, args.std)
    if args.data is None and trained.data is None:
        raise ValueError(f"{args.checkpoint} does not say what it was trained on; give --data")
    skip = args.skip_bad_images or trained.skip_bad_images
    options = {"workers": args.workers, "skip_bad_images": skip, "max_pixels": args.max_pixels}
    test = test_images(trained, args.data, options)
    device = select_device(args.device)
    if trained.model.task == "generate":
        return _likelihood(trained, test, device)
    if trained.model.task == "restore":
        return _restoration(trained, test, device)
    trained_for("classify", trained, args.checkpoint)
    score = evaluate(trained.model.to(device), test, autocast_dtype(device))
    targets = score.targets
    predictions = score.predictions
    accuracy = score.accuracy
    assert targets is not None and predictions is not None and accuracy is not None  # of a classifier
    table = Table("class", "images", "correct", "accuracy")
    for number, label in enumerate(trained.classes):
        mask = targets == number
        images = int(mask.sum())
        correct = int((predictions[mask] == number).sum())
        share = f"{100 * correct / images:.1f} %" if images else "-"
        table.add_row(Text(printable(label)), f"{images:,}", f"{correct:,}", share)
    Console().print(table)
    correct = int((predictions == targets).sum())
    images = len(targets)
    print_line(f"test accuracy {100 * accuracy:.2f} % ({correct:,} of {images:,} images), loss {score.loss:.4f}")
    if test.bad:
        names = join_names([str(path) for path in sorted(test.bad)])
        print_line(f"skipped {len(test.bad)} images that cannot be read: {names}")
    return 0


def _likelihood(trained: TrainedModel, test: Any, device: "torch.device") -> int:
    """Prints the bits a dimension of a model of pixels, a mean over the test images."""
    import torch

    from ..train.generative import Likelihood

    module = Likelihood(trained.model, trained.transform.restore).to(device).eval()
    bits = []
    with torch.no_grad():
        for images, classes in test:
            bits.append(module(images.to(device), classes.to(device)).double().cpu() / torch.tensor(2.0).log())
    found = torch.cat(bits)
    print_line(f"{found.mean():.4f} bits a dimension ({len(found):,} images)")
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
            given = degrade(targets, task)
            with torch.no_grad():
                restored = model(given.to(device), task).cpu()
            pair = (restored.clamp(0, 255), enlarged(given, scale_of(task)).clamp(0, 255))
            rows.append(torch.stack([measure(x, targets) for measure in (psnr, ssim) for x in pair], 1))
        means = torch.cat(rows).mean(0).tolist()
        table.add_row(task, f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[2]:.4f}", f"{means[3]:.4f}")
    Console().print(table)
    return 0
