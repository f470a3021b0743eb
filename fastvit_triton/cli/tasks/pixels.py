"""Models of pixels, which draw images, and models that enlarge or denoise images."""

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..console import print_line
from .task import Task, TrainedModel, half_interval, prepared, reading, test_images

if TYPE_CHECKING:
    from torch import nn

    from ...train.data import Batches, Data
    from ...train.data.transform import Transform
    from ...train.recipes import Recipe


class Generate(Task):
    """Predicts each pixel from those before it."""

    name = command = "generate"
    losses = ("likelihood",)
    recipes = "pixels"

    def preparation(self, model: Any, transform: "Transform") -> dict[str, Any]:
        """Its images are between −1 and 1."""
        half = (0.5,) * len(transform.mean)
        return prepared(transform) | {"mean": half, "std": half}

    def to_train(self, model: "nn.Module", recipe: "Recipe", data: "Data", new: bool) -> "nn.Module":
        """The module that computes the loss of each image; a new model gets the colours of the data."""
        from ...train.build import build_generative_model

        if new and hasattr(model, "set_clusters"):
            _choose_colours(model, data)
        return build_generative_model(recipe, model, data.transform)

    def evaluate(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints the bits a dimension, a mean over the test images."""
        import torch

        from ...train.generative import Likelihood

        test = _test_of(trained, args)
        device = trained.device
        module = Likelihood(trained.model, trained.transform.restore).to(device).eval()
        bits = []
        with torch.no_grad():
            for images, classes in test:
                bits.append(module(images.to(device), classes.to(device)).double().cpu() / torch.tensor(2.0).log())
        per_image = torch.cat(bits)
        text = f"{per_image.mean():.4f} ± {half_interval(per_image):.4f} bits a dimension"
        print_line(f"{text} (mean of {len(per_image):,} images, with half its 95 % interval)")
        return 0


class Restore(Generate):
    """Restores images, tile by tile."""

    name = command = "restore"
    losses = ("restoration",)
    recipes = "restoration"
    has_tiles = True

    def side(self, recipe: "Recipe") -> int:
        """The side of the model's tiles before they are enlarged."""
        from ...models import model_config
        from ...models.ipt import scale_of

        tasks = getattr(model_config(recipe.model, **recipe.options), "tasks", ("x2",))
        return recipe.img_size // max(map(scale_of, tasks))

    def preparation(self, model: Any, transform: "Transform") -> dict[str, Any]:
        """Its tiles have pixels 0 … 255."""
        count = len(transform.mean)
        tiles = {"mean": (0.0,) * count, "std": (1 / 255,) * count, "input_size": (count, *model.config.img_size)}
        return prepared(transform) | tiles

    def evaluate(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints PSNR and SSIM of each task, and of the input, for x2, x3 and x4 enlarged by bicubic interpolation."""
        import torch

        from ...models.ipt import enlarged, scale_of
        from ...train.generative import crop, scaled
        from ...train.restoration import degrade, psnr, ssim

        test = _test_of(trained, args)
        model = trained.model
        table = Table("task", "PSNR, dB", "of the input", "SSIM", "of the input")
        for task in model.config.tasks:
            torch.manual_seed(0)
            rows = []
            for images, _ in test:
                targets = crop((255 * trained.transform.restore(images)).round(), scaled(model.config.img_size, task))
                degraded = degrade(targets, task)
                with torch.no_grad():
                    restored = model(degraded.to(trained.device), task).cpu()
                pair = (restored.clamp(0, 255), enlarged(degraded, scale_of(task)).clamp(0, 255))
                rows.append(torch.stack([measure(x, targets) for measure in (psnr, ssim) for x in pair], 1))
            values = torch.cat(rows)
            pairs = zip(values.mean(0).tolist(), half_interval(values).tolist(), (2, 2, 4, 4), strict=True)
            table.add_row(task, *(f"{mean:.{digits}f} ± {half:.{digits}f}" for mean, half, digits in pairs))
        Console().print(table)
        print_line(f"Means of {len(values):,} images, with half their 95 % intervals.")
        return 0


def _test_of(trained: TrainedModel, args: argparse.Namespace) -> "Batches":
    """The images of `evaluate`, which writes no file of such scores."""
    if args.out is not None:
        raise ValueError(f"--out {args.out} is for the scores of classifiers; leave it out")
    return test_images(trained, args.data, reading(trained, args))


def _choose_colours(model: Any, data: "Data") -> None:
    """Sets the colours of an iGPT of colour images by k-means on 64 training images; greys are evenly spaced."""
    import torch

    from ...models.igpt import colour_clusters

    count, channels = model.clusters.shape
    if channels > 1:
        images = [data.train.display_image(i) for i in range(min(64, len(data.train)))]
        model.set_clusters(colour_clusters(2 * torch.stack(images) - 1, count))
