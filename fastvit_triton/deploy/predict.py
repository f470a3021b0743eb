"""`predict`: names and probabilities of images, by the preprocessing with which the model was trained."""

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from ..models.naflex import NaFlexVisionTransformer
from ..models.weights.pretrained import class_names
from ..preparation import bare, data_config
from ..train.data.model_input import transforms
from ..train.data.transform import Source
from ..train.loop import evaluating
from ..train.ranges import PositiveInt, checked

Classes = list[tuple[str, float]]  # (name, probability), the most probable first


@checked
def predict(
    model: nn.Module, images: Source | Iterable[Source], top: PositiveInt = 5, batch_size: PositiveInt = 32
) -> list[Classes]:
    """Classifies images, as the command `predict` does.

    Args:
        model: a classifier from `create_model`, `load_model` or timm, on any device; its mode stays as it is.
        images: paths, open files or PIL images, of any size, or one of them; `transforms(model)` prepares them.
        top: classes to return for each image.
        batch_size: images that the model gets at a time.

    Returns:
        For each image, in order, a list of (name, probability), the most probable first. The names are those of the
        weights; numbers where they are unknown.

    Raises:
        ValueError: an image cannot be read, a number is below 1, or the model is no classifier.
        TypeError: the model does not say how its images are prepared, or an image is of another type.
    """
    known = bare(model)
    if not hasattr(known, "pretrained_cfg"):
        raise TypeError(
            f"model is {type(known).__name__}, which does not say how its images are prepared; give a model of "
            "create_model, load_model or timm"
        )
    task, classes = getattr(known, "task", "classify"), getattr(known, "num_classes", None)
    if task != "classify" or classes == 0:
        what = "has no classifier" if classes == 0 else f"is trained to {task}"
        raise ValueError(f"model {what}, and predict returns classes; give a classifier")
    if isinstance(known, NaFlexVisionTransformer):
        model = known.for_images(data_config(model)["input_size"][1:])
    single = isinstance(images, str | os.PathLike | Image.Image) or hasattr(images, "read")
    if isinstance(images, bytes) or (not single and not isinstance(images, Iterable)):
        raise TypeError(f"images is of type {type(images).__name__}; give paths or PIL images, or one of them")
    rest = iter([cast(Source, images)] if single else cast(Iterable[Source], images))
    read, parameter = transforms(model), next(model.parameters())
    found: list[Classes] = []
    with evaluating(model):
        while inputs := [read(image) for image in islice(rest, batch_size)]:
            found += best_classes(model, torch.stack(inputs).to(parameter), class_names(model), top)
    return found


def best_classes(model: nn.Module, images: Tensor, names: Sequence[str] | None, top: int) -> list[Classes]:
    """The most probable classes of normalised images [B, C, H, W], by a model in evaluation mode."""
    with torch.no_grad():
        logits: Any = model(images)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError(f"{type(model).__name__} does not return logits [B, classes]; give a classifier")
    best = logits.float().softmax(1).topk(min(top, logits.shape[1]))
    names = names or tuple(map(str, range(logits.shape[1])))
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[(names[i], share) for i, share in zip(numbers, shares, strict=True)] for shares, numbers in rows]
