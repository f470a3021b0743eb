"""IPT — Pre-trained image processing transformer. Chen et al., CVPR 2021, arXiv:2012.00364.
Official: huawei-noah/Pretrained-IPT, model/ipt.py.
Differs from ViT:
  1. It restores images: each task (x2, x3 and x4 enlarge, denoise, derain) has a convolutional head and tail.
  2. Tokens are patches of 3 x 3 of the head's map. An encoder and a decoder follow, whose queries are the encoder's
     output plus an embedding of the task; projections of attention have no biases, and there is no final norm.
  3. What the decoder returns is folded to a map and added to the head's. Pixels are 0 … 255.
"""

import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..layers.embed import sides
from ..layers.packed_attention import PackedLayer
from ..layers.recompute import recomputed
from . import fit
from .base import LAST
from .config import BaseConfig, Options, check_multiple
from .pixel import Prepared

RGB_MEAN = (0.4488, 0.4371, 0.4040)  # of DIV2K, as in the authors' code
SCALE = re.compile(r"x([234])")


class MeanShift(nn.Conv2d):
    """Adds the mean colour, or subtracts it: a fixed convolution, under the authors' names."""

    def __init__(self, channels: int, sign: int) -> None:
        super().__init__(channels, channels, 1)
        mean = RGB_MEAN if channels == 3 else (sum(RGB_MEAN) / 3,) * channels
        self.weight = nn.Parameter(torch.eye(channels)[:, :, None, None], requires_grad=False)
        self.bias = nn.Parameter(sign * 255 * torch.tensor(mean), requires_grad=False)


class ConvResidual(nn.Module):
    """x + conv(ReLU(conv(x))), 5 x 5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, channels, 5, padding=2)
        self.body = nn.Sequential(first, nn.ReLU(), nn.Conv2d(channels, channels, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F, h, w] → [B, F, h, w]."""
        return self.body(x) + x


def upsampler(channels: int, scale: int) -> nn.Sequential:
    """Convolutions and pixel shuffles that enlarge a map by 1, 2, 3 or 4."""
    layers: list[nn.Module] = []
    for step in {1: (), 2: (2,), 3: (3,), 4: (2, 2)}[scale]:
        layers += [nn.Conv2d(channels, step * step * channels, 3, padding=1), nn.PixelShuffle(step)]
    return nn.Sequential(*layers)


class RestorationEncoderLayer(PackedLayer):
    """x + attention(norm x), then x + MLP(norm x), with ReLU in the MLP."""

    def __init__(self, dim: int, num_heads: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__(dim, num_heads, hidden, drop, bias=False)
        nn.init.kaiming_uniform_(self.self_attn.in_proj_weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] → [B, N, D]."""
        y = self.norm1(x)
        x = x + self.dropout1(self.self_attn(y, y, y))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class RestorationDecoderLayer(PackedLayer):
    """An encoder layer with attention to the encoder's output; the task's embedding is added to queries and keys."""

    def __init__(self, dim: int, num_heads: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__(dim, num_heads, hidden, drop, bias=False, cross=True)

    def forward(self, x: Tensor, memory: Tensor, task: Tensor) -> Tensor:
        """[B, N, D], the encoder's output [B, N, D] and the task's embedding [N, D] → [B, N, D]."""
        y = self.norm1(x)
        x = x + self.dropout1(self.self_attn(y + task, y + task, y))
        x = x + self.dropout2(self.multihead_attn(self.norm2(x) + task, memory, memory))
        return x + self.dropout3(self.mlp(self.norm3(x)))


class RestorationTransformer(nn.Module):
    """Encoder and decoder of the patches of a map, and the authors' names."""

    def __init__(self, config: "IPTConfig") -> None:
        super().__init__()
        D = config.embed_dim
        sizes = (D, config.num_heads, int(D * config.mlp_ratio), config.drop_rate)
        self.patch_size = config.patch_size
        self.linear_encoding = nn.Linear(D, D)
        drops = [nn.Dropout(config.drop_rate) for _ in range(2)]
        self.mlp_head = nn.Sequential(nn.Linear(D, sizes[2]), drops[0], nn.ReLU(), nn.Linear(sizes[2], D), drops[1])
        self.query_embed = nn.Embedding(len(config.tasks), D * config.num_patches)
        encoder = nn.ModuleList(RestorationEncoderLayer(*sizes) for _ in range(config.depth))
        decoder = nn.ModuleList(RestorationDecoderLayer(*sizes) for _ in range(config.depth))
        self.encoder = nn.ModuleDict(dict(layers=encoder))
        self.decoder = nn.ModuleDict(dict(layers=decoder))
        self.position_encoding = nn.ModuleDict(dict(pe=nn.Embedding(config.num_patches, D)))
        self.dropout_layer1 = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor, task: int, recompute: bool = False) -> Tensor:
        """Map [B, F, h, w] → map [B, F, h, w], for the task of this number."""
        size = x.shape[2:]
        x = F.unfold(x, self.patch_size, stride=self.patch_size).mT  # [B, N, D]
        x = self.dropout_layer1(self.linear_encoding(x)) + x
        query = self.query_embed.weight[task].view(-1, x.shape[2])
        positions: Any = self.position_encoding["pe"]
        x = x + positions.weight
        for layer in self.encoder["layers"].children():
            x = recomputed(layer, x) if recompute else layer(x)
        memory = x
        for layer in self.decoder["layers"].children():
            x = recomputed(layer, x, memory, query) if recompute else layer(x, memory, query)
        x = self.mlp_head(x) + x
        return F.fold(x.mT, size, self.patch_size, stride=self.patch_size)


@dataclass(frozen=True, kw_only=True)
class IPTConfig(BaseConfig):
    """Options of IPT, in addition to those of `BaseConfig`; img_size is that of a tile before it is enlarged.

    Attributes:
        tasks: "x2", "x3" and "x4" enlarge; others, such as "denoise30" and "derain", keep the size.
        features: F, channels of the maps.
        patch_size: P, side of a patch of a map; a token has F · P² channels.
        depth: layers of the encoder, and of the decoder.
        mlp_ratio: hidden channels of the MLPs divided by those of a token.
        drop_rate: dropout.
        skip: add the image, enlarged by bicubic interpolation, to the output, which the paper does not; the tails then
            start at zero, so that training starts with that image.
    """

    img_size: int | tuple[int, int] = 48
    num_classes: int = 0
    tasks: tuple[str, ...] = ("x2",)
    features: int = 64
    patch_size: int = 3
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    drop_rate: float = 0.0
    skip: bool = False
    zeros = ("num_classes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks is {self.tasks}; give at least one, each once")
        check_multiple(self, "embed_dim", "num_heads")
        if any(side % self.patch_size for side in sides(self.img_size)):
            raise ValueError(f"img_size {sides(self.img_size)} is not a multiple of patch_size {self.patch_size}")
        if self.num_classes or self.drop_path_rate:
            raise ValueError("IPT has no classes and no stochastic depth; leave out num_classes and drop_path_rate")

    @property
    def embed_dim(self) -> int:
        """D, channels of a token."""
        return self.features * self.patch_size**2

    @property
    def num_patches(self) -> int:
        """N, patches of a map."""
        height, width = sides(self.img_size)
        return height * width // self.patch_size**2


class IPT(Prepared):
    """IPT: an image [B, C, h, w] with pixels 0 … 255 → the restored image; any image by `restore`."""

    task = "restore"
    layout = "ipt"
    head_names = ()
    stem_pattern = r"^head|^body\.(linear_encoding|position_encoding|query_embed)"
    layer_patterns = (
        (r"^body\.encoder\.layers\.(\d+)", None),
        (r"^body\.decoder\.layers\.(\d+)", None),
        (r"^body\.mlp_head|^tail", LAST),
    )
    position_resize = "bicubic"
    preparation = MappingProxyType(dict(mean=(0.0,) * 3, std=(1 / 255,) * 3, crop_pct=1.0, crop_mode="squash"))
    config: IPTConfig

    def __init__(self, config: IPTConfig) -> None:
        super().__init__(config, config.embed_dim)
        self.selected = 0  # the task that runs if a call names none
        C = config.in_chans
        channels = config.features
        self.sub_mean = MeanShift(C, -1)
        self.add_mean = MeanShift(C, 1)
        self.head = nn.ModuleList()
        self.tail = nn.ModuleList()
        for task in config.tasks:
            first = nn.Conv2d(C, channels, 3, padding=1)
            self.head.append(nn.Sequential(first, ConvResidual(channels), ConvResidual(channels)))
            last = nn.Conv2d(channels, C, 3, padding=1)
            if config.skip:
                for parameter in last.parameters():
                    nn.init.zeros_(parameter)
            self.tail.append(nn.Sequential(upsampler(channels, scale_of(task)), last))
        self.body = RestorationTransformer(config)

    def task_index(self, task: str | None) -> int:
        """The number of a task, by default the selected one; raises ValueError if the model has no such task."""
        if task is None:
            return self.selected
        if task not in self.config.tasks:
            raise ValueError(f"task is {task!r}; this model has {', '.join(self.config.tasks)}")
        return self.config.tasks.index(task)

    def select(self, task: str) -> None:
        """Makes a task the one that runs if none is given."""
        self.selected = self.task_index(task)

    def forward(self, image: Tensor, task: str | None = None) -> Tensor:
        """Restores tiles of the model's size.

        Args:
            image: [B, C, h, w], pixels 0 … 255.
            task: one of the config's tasks; None means the selected one.

        Returns:
            [B, C, s·h, s·w], where s is the task's scale; not rounded or clipped.
        """
        i = self.task_index(task)
        size = (self.config.in_chans, *sides(self.config.img_size))
        if image.dim() != 4 or tuple(image.shape[1:]) != size:
            wanted = ", ".join(map(str, size))
            raise ValueError(f"image has shape {list(image.shape)}; this model takes [B, {wanted}]; use restore()")
        x = self.head[i](self.sub_mean(image))
        x = self.body(x, i, self.recomputes) + x
        if not self.config.skip:
            return self.add_mean(self.tail[i](x))
        return enlarged(image, scale_of(self.config.tasks[i])) + self.tail[i](x)

    def restore(self, image: Tensor, task: str | None = None, overlap: int | None = None, batch: int = 16) -> Tensor:
        """Restores an image of any size of at least a tile: tiles overlap, and a smooth mean joins them.

        The authors' code takes means of equal weights, of the tiles' centres only, and runs the borders in four
        further passes (forward_chop); the results differ where tiles overlap.

        Args:
            image: [C, H, W] or [1, C, H, W], pixels 0 … 255.
            task: as for `forward`.
            overlap: pixels that neighbouring tiles share, at least; None means a quarter of a tile.
            batch: tiles in one call.

        Returns:
            The restored image, clipped to 0 … 255, with the axes of the given one.

        Raises:
            ValueError: the image is smaller than a tile, or the overlap is not smaller than one.
        """
        rows, columns = sides(self.config.img_size)
        if image.dim() == 4 and image.shape[0] == 1:
            return self.restore(image[0], task, overlap, batch)[None]
        if image.dim() != 3 or image.shape[0] != self.config.in_chans:
            raise ValueError(f"image has shape {list(image.shape)}; give one image [{self.config.in_chans}, H, W]")
        height, width = image.shape[1:]
        if height < rows or width < columns:
            raise ValueError(f"image is {height}x{width} pixels, smaller than a tile of {rows}x{columns}; enlarge it")
        overlap = min(rows, columns) // 4 if overlap is None else overlap
        if not 0 <= overlap < min(rows, columns):
            raise ValueError(f"overlap is {overlap}; use 0 to {min(rows, columns) - 1}, less than a tile")
        corners = [(y, x) for y in starts(height, rows, overlap) for x in starts(width, columns, overlap)]
        s = scale_of(self.config.tasks[self.task_index(task)])
        if len(corners) == 1:
            return self(image[None], task)[0].clamp(0, 255)
        window = ramp(rows * s, overlap * s)[:, None] * ramp(columns * s, overlap * s)
        window = window.to(image)
        total = image.new_zeros(image.shape[0], height * s, width * s)
        weight = image.new_zeros(height * s, width * s)
        for some in (corners[i : i + batch] for i in range(0, len(corners), batch)):
            tiles = torch.stack([image[:, y : y + rows, x : x + columns] for y, x in some])
            for tile, (y, x) in zip(self(tiles, task), some, strict=True):
                place = (..., slice(y * s, (y + rows) * s), slice(x * s, (x + columns) * s))
                total[place] += tile * window
                weight[place] += window
        return (total / weight).clamp(0, 255)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Not for restoration: raises ValueError."""
        raise ValueError("IPT restores images and has no stages of features; leave out features_only")

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Not for restoration: raises ValueError."""
        raise ValueError("IPT restores images and has no classifier")


def scale_of(task: str) -> int:
    """How much a task enlarges images: 2 of "x2", 1 of "denoise30"."""
    match = SCALE.fullmatch(task)
    return int(match[1]) if match else 1


def enlarged(image: Tensor, scale: int) -> Tensor:
    """The image [B, C, H, W] enlarged by bicubic interpolation."""
    return image if scale == 1 else F.interpolate(image, scale_factor=scale, mode="bicubic", align_corners=False)


def starts(side: int, tile: int, overlap: int) -> list[int]:
    """Where tiles start that cover a side and overlap by at least this much; the last ends with the side."""
    step = tile - overlap
    return [*range(0, side - tile, step), side - tile]


def ramp(length: int, overlap: int) -> Tensor:
    """Weights [length] of a tile's pixels: 1 within, falling linearly over the overlap at both ends."""
    at = torch.arange(length, dtype=torch.float64) + 0.5
    return torch.minimum(at, length - at).div(overlap or 1).clamp_max(1.0)


CONFIG = IPTConfig
MODEL = IPT
ALL = ("x2", "x3", "x4", "denoise30", "denoise50", "derain")
VARIANTS: dict[str, Options] = {f"ipt_{task}": dict(tasks=(task,)) for task in ALL}
VARIANTS["ipt_multitask"] = dict(tasks=ALL)
SMALL: Options = dict(features=16, depth=2, num_heads=6, mlp_ratio=2.0, img_size=24, skip=True)
VARIANTS["ipt_digits"] = dict(tasks=("x2", "denoise30"), **SMALL)


# Names in checkpoints: the authors', which are ours.

AUTHORS = Layout(name="IPT", mark="body.linear_encoding.weight", beside="body.query_embed.weight", resize="bicubic")
CHECKPOINTS = CheckpointFormats("IPT", (AUTHORS,), fit.fit_tables, irrelevant=re.compile(r"(^|\.)position_ids$"))
