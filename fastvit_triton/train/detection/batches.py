"""Batches of images with boxes: composed images in memory, and image files."""

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data import TensorBatches
from ..data.folder import FolderBatches, ImageDataset, Sample
from ..data.sampler import SampleKey
from ..data.transform import DECODE_ERRORS, Transform, reason_of
from .augment import BEFORE_CROP, CROP, LONGEST, SHORTEST, augment, scale
from .boxes import to_corners
from .objects import fractions

USUAL = SHORTEST[-1]  # pixels of the shorter side, for which `LONGEST` and the sides of the augmentation are meant


class SceneBatches(TensorBatches):
    """Batches of composed images in memory; for training they come in random order, without augmentation."""

    def __init__(
        self, images: Tensor, targets: list[dict[str, Tensor]], transform: Transform, batch_size: int, shuffled: bool
    ) -> None:
        super().__init__(images, torch.zeros(len(images)), transform, batch_size, torch.clone if shuffled else None)
        size = (images.shape[2], images.shape[3])
        whole = torch.tensor([size[1], size[0], size[1], size[0]])
        self.targets = [
            dict(target, original=size, truth=dict(boxes=to_corners(target["boxes"]) * whole, labels=target["labels"]))
            for target in targets
        ]

    def digest(self) -> str:
        """The number of images, and a CRC-32 of their pixels and boxes."""
        boxes = torch.cat([target["boxes"] for target in self.targets]).numpy()
        return f"{len(self.images)} images, {zlib.crc32(boxes.data, zlib.crc32(self.images.numpy().data)):08x}"


class BoxDataset(ImageDataset):
    """Maps a `SampleKey` to a `Sample` of a `BoxBatches`; a key without a seed is not augmented."""

    def __getitem__(self, key: SampleKey) -> Sample:
        path = self.files[key.index]
        truth: Any = self.targets[key.index]
        try:
            image = _converted(self.decode(path), self.transform)
        except DECODE_ERRORS as error:
            return Sample(None, None, key.index, path, reason_of(error))
        shortest, longest = _sides(self.transform)
        target = truth
        original = (image.height, image.width)
        if key.seed is None:
            image, target = scale(image, target, shortest, longest)
        else:
            generator = torch.Generator().manual_seed(key.seed)
            sides, before, (least, most) = (_scaled(part, shortest) for part in (SHORTEST, BEFORE_CROP, CROP))
            image, target = augment(image, target, generator, sides, longest, before, (least, most))
        target = fractions(target, image.size) | dict(size=(image.height, image.width), original=original, truth=truth)
        return Sample(self.transform.tensor(image), target, key.index, path, "")


def padded(images: list[Any]) -> Tensor:
    """Images [C, h, w] as a batch [B, C, H, W], with zeros below and right."""
    height = max(image.shape[1] for image in images)
    width = max(image.shape[2] for image in images)
    return torch.stack([F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images])


class BoxBatches(FolderBatches):
    """Batches of image files with boxes, padded to the largest image of the batch.

    Images are scaled until the shorter side is that of the transform, or less where the longer one would exceed 5/3 of
    it; for training they are mirrored, scaled and cropped at random, see `augment`. A target has `labels` and `boxes`
    for the loss, `size`, (height, width) of the image in the batch, `original`, that of the file, and `truth`, what
    `average_precision` takes. The arguments are those of `FolderBatches`; the targets are those of `DetectionFiles`.
    """

    dataset = BoxDataset
    stack = staticmethod(padded)
    join = staticmethod(lambda targets: targets)

    def display_image(self, i: int) -> Tensor:
        """Readable image i, whole, [C, H, W] in [0, 1]."""
        readable = [path for path in self.files if path not in self.bad]
        image = _converted(self.decode(readable[i]), self.transform)
        return self.transform.restore(self.transform.tensor(image))

    def digest(self) -> str:
        """The number of images, and a CRC-32 of their names, sizes in bytes, classes and boxes."""
        total = 0
        for path, target in zip(self.files, self.targets, strict=True):
            name = str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name
            total = zlib.crc32(f"{name}\0{path.stat().st_size if path.exists() else 0}\0".encode(), total)
            total = zlib.crc32(target["labels"].numpy().data, zlib.crc32(target["boxes"].numpy().data, total))
        return f"{len(self.files)} images, {total:08x}"


def prepared(image: Image.Image, transform: Transform) -> Tensor:
    """An image as a detector takes it: scaled to the shorter side of the transform and normalised, [C, h, w]."""
    resized, _ = scale(_converted(image, transform), dict(boxes=torch.zeros(0, 4)), *_sides(transform))
    return transform.tensor(resized)


def _converted(image: Image.Image, transform: Transform) -> Image.Image:
    return image.convert("L" if len(transform.mean) == 1 else "RGB")


def _sides(transform: Transform) -> tuple[int, int]:
    """The shorter side of an image, and the limit of the longer one."""
    shortest = min(transform.size)
    return shortest, max(shortest * LONGEST // USUAL, 1)


def _scaled(sides: tuple[int, ...], shortest: int) -> tuple[int, ...]:
    """Sides of the authors' augmentation for images whose shorter side is another one."""
    return tuple(max(round(side * shortest / USUAL), 1) for side in sides)
