"""Training of models that give each pixel a class: loss, intersection over union, and scenes of digits with masks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import TensorBatches
from .data.transform import Transform
from .detection.scenes import CLASSES, INK, scenes
from .loop import Score, evaluating
from .metrics import confusion_matrix
from .objective import Objective, at_least_float32
from .ranges import NonNegative, PositiveInt, checked

IGNORED = 255  # class of pixels that count neither in the loss nor in scores, as in the data sets of the field
BACKGROUND = len(CLASSES)  # class of pixels of scenes that belong to no digit


@checked
def segmented(auxiliary_weight: NonNegative = 0.4) -> Objective:
    """The cross-entropy of all pixels, plus those of auxiliary decoders (SETR, arXiv:2012.15840, section 4.1).

    Pixels of class `IGNORED` are left out; the loss is a mean over the others of the batch.
    """

    def objective(model: nn.Module, images: Tensor, masks: Tensor) -> tuple[Tensor, None]:
        logits = model(images)
        first, *others = logits if isinstance(logits, list) else [logits]
        loss = F.cross_entropy(at_least_float32(first), masks, ignore_index=IGNORED)
        for other in others:
            loss = loss + auxiliary_weight * F.cross_entropy(at_least_float32(other), masks, ignore_index=IGNORED)
        return loss, None

    return objective


def confusion_of(predictions: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Counts of pixels [K, K], rows by true class and columns by prediction; both of any equal shape."""
    counted = masks != IGNORED
    return confusion_matrix(masks[counted], predictions[counted], classes)


def intersections_over_unions(confusion: Tensor) -> Tensor:
    """Intersection over union of each class [K]; NaN for a class that is neither true nor predicted anywhere."""
    both = confusion.diagonal().double()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


@torch.no_grad()
def evaluate_segmentation(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], amp: torch.dtype | None = None
) -> Score:
    """Loss and scores of all pixels of a test set; `metrics` are `miou`, the mean over classes, and `pixel_accuracy`.

    Training mode is restored afterwards.
    """
    device = next(model.parameters()).device
    confusion: Any = 0
    total = 0.0
    pixels = 0
    with evaluating(model):
        for images, masks in batches:
            masks = masks.to(device)
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = at_least_float32(model(images.to(device, non_blocking=True)))
            total += F.cross_entropy(logits, masks, ignore_index=IGNORED, reduction="sum").item()
            pixels += int((masks != IGNORED).sum())
            confusion = confusion + confusion_of(logits.argmax(1), masks, logits.shape[1])
    if not pixels:
        raise ValueError("there are no test images to evaluate on")
    miou = float(intersections_over_unions(confusion).nanmean())
    accuracy = float(confusion.diagonal().sum() / confusion.sum())
    return Score(total / pixels, metrics={"miou": miou, "pixel_accuracy": accuracy})


def masks_of(images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    """Classes of the pixels of scenes without noise, [N, S, S]: those brighter than `INK` are of the digit there."""
    side = images.shape[-1]
    centres = (torch.arange(side) + 0.5) / side
    masks = torch.full((len(images), side, side), BACKGROUND)
    for image, target, mask in zip(images[:, 0], targets, masks, strict=True):
        x, y, width, height = target["boxes"].T[:, :, None, None]  # [n, 1, 1] each
        dx = (centres - x).abs()
        dy = (centres[:, None] - y).abs()
        distance = torch.where((dx <= width / 2) & (dy <= height / 2), dx**2 + dy**2, torch.inf)  # [n, S, S]
        nearest, index = distance.min(0)
        inked = (image > INK) & nearest.isfinite()
        mask[inked] = target["labels"][index[inked]]
    return masks


@checked
def scene_masks(
    split: str, count: PositiveInt, seed: int = 0, *, batch_size: PositiveInt = 32, noise: NonNegative = 0.05
) -> TensorBatches:
    """Batches of scenes of digits and the classes of their pixels: the digit's, or `BACKGROUND`."""
    clean, targets = scenes(split, count, seed, noise=0.0)
    generator = torch.Generator().manual_seed(seed + 1)
    images = clean + noise * torch.randn(clean.shape, generator=generator)
    transform = Transform((clean.shape[2], clean.shape[3]), (0.0,), (1.0,))
    shuffled = torch.clone if split == "train" else None
    return TensorBatches(images, masks_of(clean, targets), transform, batch_size, shuffled)
