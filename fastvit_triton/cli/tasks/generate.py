"""Models of pixels, which draw images."""

import argparse
from typing import TYPE_CHECKING, Any

from ..console import print_line
from .task import Task, TrainedModel, half_interval, prepared, reading, test_images

if TYPE_CHECKING:
    from torch import nn

    from ...train.data import Data
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

        if args.out is not None:
            raise ValueError(f"--out {args.out} is for the scores of classifiers; leave it out")
        test = test_images(trained, args.data, reading(trained, args))
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


def _choose_colours(model: Any, data: "Data") -> None:
    """Sets the colours of an iGPT of colour images by k-means on 64 training images; greys are evenly spaced."""
    import torch

    from ...models.igpt import colour_clusters

    count, channels = model.clusters.shape
    if channels > 1:
        images = [data.train.display_image(i) for i in range(min(64, len(data.train)))]
        model.set_clusters(colour_clusters(2 * torch.stack(images) - 1, count))
