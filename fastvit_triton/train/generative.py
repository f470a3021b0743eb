"""Modules that compute the loss of each image for models of pixels and of restoration; their `encoder` is saved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .restoration import SCALE, degrade


class Likelihood(nn.Module):
    """A model of pixels in training: the negative log-likelihood of each image, in nats a dimension."""

    def __init__(self, encoder: nn.Module, restore: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self.restore = restore

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Normalised images [B, C, H, W] and their classes [B] → [B]."""
        encoder: Any = self.encoder
        if classes is None or not encoder.num_classes:
            classes = torch.zeros(len(images), dtype=torch.long, device=images.device) if encoder.num_classes else None
        return encoder.nats(2 * self.restore(images) - 1, classes)


class Restoration(nn.Module):
    """A model of restoration in training: the mean absolute error of each restored image, of pixels in [0, 1].

    Each batch has a random task of the model, and is cropped at a random place to what the task needs.
    """

    def __init__(self, encoder: nn.Module, restore: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self.restore = restore

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Normalised images [B, C, H, W] → [B]; the classes are not used."""
        encoder: Any = self.encoder
        tasks = encoder.config.tasks
        task = tasks[int(torch.randint(len(tasks), ()))]
        targets = crop((255 * self.restore(images)).round(), scaled(encoder.config.img_size, task))
        errors = encoder(degrade(targets, task), task) - targets
        return errors.abs().flatten(1).mean(1) / 255


def scaled(size: tuple[int, int], task: str) -> tuple[int, int]:
    """The size of what a task restores from a tile of this size."""
    match = SCALE.fullmatch(task)
    scale = int(match[1]) if match else 1
    return size[0] * scale, size[1] * scale


def crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The images [B, C, H, W] cropped at a random place to this size; raises ValueError if they are smaller."""
    height, width = images.shape[2:]
    if height < size[0] or width < size[1]:
        raise ValueError(
            f"images have {height}x{width} pixels, and the task needs {size[0]}x{size[1]}; raise --img-size"
        )
    y = int(torch.randint(height - size[0] + 1, ()))
    x = int(torch.randint(width - size[1] + 1, ()))
    return images[:, :, y : y + size[0], x : x + size[1]]
