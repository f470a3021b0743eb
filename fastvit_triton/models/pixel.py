"""The base of models that predict the pixels of an image one after another: likelihoods, samples and features."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.embed import sides
from ..layers.recompute import recomputed
from .base import ImageModel
from .config import BaseConfig


class Prepared(ImageModel):
    """A model whose images are not prepared as a classifier's, also where nothing is known of its weights."""

    # mean, std and other facts of `pretrained_cfg` that hold unless the weights say otherwise
    preparation: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, config: BaseConfig, num_features: int) -> None:
        super().__init__(config, num_features)
        self.facts: dict[str, Any] = {}

    @property
    def pretrained_cfg(self) -> Mapping[str, Any]:
        """What is known of the weights, with timm's keys, and the preparation."""
        return {**self.preparation, **self.facts}

    @pretrained_cfg.setter
    def pretrained_cfg(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)


class KeyValues:
    """Keys and values of the positions that one layer has computed, in memory for all positions."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0  # positions that are stored
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, H, n, d] of the next n positions; returns those of all positions so far."""
        if self.keys is None or self.values is None:
            self.keys = k.new_empty(*k.shape[:2], self.length, k.shape[3])
            self.values = v.new_empty(*v.shape[:2], self.length, v.shape[3])
        end = self.count + k.shape[2]
        self.keys[:, :, self.count : end] = k
        self.values[:, :, self.count : end] = v
        self.count = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class PixelModel(Prepared):
    """A model of the distribution of images: p(x) = Π p(xₙ | x₀ … xₙ₋₁, class), over positions n.

    A position is a pixel, or one channel of it; its code is an integer. Codes are in the order of rows, and positions
    may be generated in another one, `order`. A family implements `encode`, `decode`, `inputs` and `head`, and has
    `blocks`, which map ([B, n, D], cache) to [B, n, D].
    """

    task = "generate"
    preparation = MappingProxyType(
        dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, crop_mode="squash", interpolation="bilinear")
    )
    head_names = ()
    position_resize = "bicubic"
    feature_formats = ("NCHW", "NLC")
    reduction = 1  # a row of pixels for each row of positions
    order: Tensor | None  # [N], the position of each step of the generation; None for the order of rows
    num_positions: int  # N

    def encode(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, H, W] → codes [B, N] (or [B, N, C] where a position is a pixel of C numbers)."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse of `encode`: codes → normalised images [B, C, H, W]."""
        raise NotImplementedError

    def inputs(self, codes: Tensor, classes: Tensor | None, start: int, stop: int) -> Tensor:
        """Inputs [B, stop − start, D] of these steps, from the codes of the steps before `stop` − 1 (or more)."""
        raise NotImplementedError

    def block_list(self) -> list[Any]:
        """The blocks, in order."""
        return list(self.get_submodule(self.blocks_path).children())

    def final(self, x: Tensor) -> Tensor:
        """What follows the last block and precedes the head: [B, n, D] → [B, n, D]."""
        return x

    def losses(self, logits: Tensor, codes: Tensor) -> Tensor:
        """Negative log-likelihoods in nats of each dimension, [B, dimensions], from logits and codes of all steps."""
        return F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")

    def draw(self, logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
        """Logits [B, K] of one step → drawn codes [B]."""
        logits = logits.float() / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def codes_of(self, x: Tensor) -> Tensor:
        """Codes in the order of the generation, of images [B, C, H, W] or codes [B, N] in the order of rows."""
        size = (self.config.in_chans, *sides(self.config.img_size))
        if x.is_floating_point():
            if x.dim() != 4 or tuple(x.shape[1:]) != size:
                wanted = ", ".join(map(str, size))
                raise ValueError(f"image has shape {list(x.shape)}; this model takes [B, {wanted}]")
            x = self.encode(x)
        elif x.dim() < 2 or x.shape[1] != self.num_positions:
            raise ValueError(f"codes have shape {list(x.shape)}; this model takes [B, {self.num_positions}]")
        return x if self.order is None else x[:, self.order]

    def check_classes(self, classes: Tensor | None) -> None:
        """Raises ValueError unless classes are given exactly if the model depends on them."""
        if classes is None and self.num_classes:
            raise ValueError(f"the model depends on the class; give classes, [B] integers below {self.num_classes}")
        if classes is not None and not self.num_classes:
            raise ValueError("classes are given, but the model does not depend on them; create it with num_classes")

    def outputs(self, image: Tensor, classes: Tensor | None = None) -> Iterator[Tensor]:
        """Yields the outputs [B, N, D] of each block, in the order of the generation."""
        x = self.inputs(self.codes_of(image), self.first_class(image, classes), 0, self.num_positions)
        for block in self.block_list():
            x = recomputed(block, x) if self.recomputes else block(x)
            yield x

    def first_class(self, image: Tensor, classes: Tensor | None) -> Tensor | None:
        """The classes, by default class 0 of a model that depends on the class, so that features need none."""
        if classes is None and self.num_classes:
            return torch.zeros(image.shape[0], dtype=torch.long, device=image.device)
        self.check_classes(classes)
        return classes

    def forward_features(self, image: Tensor, classes: Tensor | None = None) -> Tensor:
        """Images [B, C, H, W] or codes [B, N] → features [B, N, D] before the head, in the order of the generation."""
        x = image
        for y in self.outputs(image, classes):
            x = y
        return self.final(x)

    def forward(self, image: Tensor, classes: Tensor | None = None) -> Tensor:
        """Images or codes → logits of every step given the steps before it, in the order of the generation.

        Args:
            image: normalised images [B, C, H, W], or integers, codes [B, N] in the order of rows.
            classes: [B], for models with num_classes; None means class 0.

        Returns:
            [B, N, K].
        """
        return self.forward_head(self.forward_features(image, classes))

    def nats(self, image: Tensor, classes: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of a dimension of each image in nats, [B]; for the arguments see `forward`."""
        self.check_classes(classes)
        codes = self.codes_of(image)
        logits = self(image, classes)
        return self.losses(logits if logits.dtype == torch.float64 else logits.float(), codes).mean(1)

    def bits_per_dim(self, image: Tensor, classes: Tensor | None = None) -> Tensor:
        """`nats` in bits, [B]."""
        return self.nats(image, classes) / math.log(2)

    @torch.no_grad()
    def generate(
        self,
        count: int = 1,
        *,
        prefix: Tensor | None = None,
        classes: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws images, one position after another; keys and values of earlier positions are kept.

        Args:
            count: B, number of images.
            prefix: codes [1 or B, n, ...] of the first n positions, which are kept.
            classes: [B], for models with num_classes.
            temperature: divides the logits.
            top_k: draw from the k most likely codes.
            generator: random numbers; None uses the global ones.

        Returns:
            Codes [B, N], or as `encode` returns them; `decode` makes images of them.

        Raises:
            ValueError: the prefix is longer than an image or ends within a block of the order, or a number is not
                in its range.
        """
        self.check_classes(classes)
        if count < 1 or temperature <= 0 or (top_k is not None and top_k < 1):
            numbers = f"count is {count}, temperature {temperature} and top_k {top_k}"
            raise ValueError(f"{numbers}; use a count and a top_k of at least 1, and a temperature above 0")
        if classes is not None and tuple(classes.shape) != (count,):
            raise ValueError(f"classes have shape {list(classes.shape)}; give one for each of the {count} images")
        prefix_length = 0 if prefix is None else prefix.shape[1]
        codes = self.empty_codes(count)
        if prefix is not None:
            codes[:, :prefix_length] = self.in_order(prefix).expand(count, *prefix.shape[1:])
        caches = [KeyValues(self.num_positions) for _ in self.block_list()]
        start = 0
        with self.evaluating():
            for step in range(prefix_length, self.num_positions):
                x = self.inputs(codes[:, :step], classes, start, step + 1)
                for block, cache in zip(self.block_list(), caches, strict=True):
                    x = block(x, cache)
                logits = self.forward_head(self.final(x[:, -1:]))[:, 0]
                codes[:, step] = self.draw(logits, temperature, top_k, generator)
                start = step + 1
        if self.order is None:
            return codes
        return torch.empty_like(codes).index_copy_(1, self.order, codes)

    def empty_codes(self, count: int) -> Tensor:
        """Memory for the codes of this number of images."""
        return torch.zeros(count, self.num_positions, dtype=torch.long, device=next(self.parameters()).device)

    def in_order(self, prefix: Tensor) -> Tensor:
        """The codes of a prefix in the order of the generation."""
        n = prefix.shape[1]
        if n > self.num_positions:
            raise ValueError(f"prefix has {n} positions; an image of this model has {self.num_positions}")
        if self.order is None:
            return prefix
        order = self.order[:n]
        if n and int(order.max()) != n - 1:
            raise ValueError(f"prefix has {n} positions and ends within a row of blocks; give whole rows of blocks")
        return prefix[:, order]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in evaluation mode."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def normalize_stage(self, x: Tensor, stage: int) -> Tensor:
        """The final norm of a block's output."""
        return self.final(x)

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, None]:
        """Features [B, N, D] in the order of the generation → [B, N, D] in the order of rows, or a map [B, D, h, w]."""
        if self.order is not None:
            x = torch.empty_like(x).index_copy_(1, self.order, x)
        return (x if output_fmt == "NLC" else x.mT.unflatten(2, self.grid).contiguous()), None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of positions."""
        rows, _ = sides(self.config.img_size)
        return rows, self.num_positions // rows

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Not for generators: raises ValueError."""
        raise ValueError(f"{type(self).__name__} generates images and has no classifier; use features_only=True")
