"""SETR — Rethinking semantic segmentation with Transformers. Zheng et al., arXiv:2012.15840.

Official: fudan-zvg/SETR.
A ViT encodes the image; convolutions and bilinear interpolation enlarge its patch tokens to a class for each pixel.
  1. `naive`: a 1 x 1 convolution with BatchNorm and ReLU, a second one to the classes, and one interpolation
     (section 3.3, 1).
  2. `pup`, progressive upsampling: 3 x 3 convolutions with BatchNorm and ReLU, each but the last followed by an
     interpolation to twice the size, and a 1 x 1 convolution to the classes (section 3.3, 2).
  3. Auxiliary decoders read the tokens of earlier blocks while training; their losses count 0.4.
Differs from ViT: no classifier. Differs from the authors' code: images need not be square; the norm before the decoder
is the ViT's own `norm`.
Leaves out the decoder that aggregates several blocks (MLA).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State
from ..engine.body import normalize
from ..layers.embed import sides
from . import fit
from .config import CHOICES, Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE


@dataclass(frozen=True, kw_only=True)
class SetrConfig(ViTConfig):
    """Options of SETR, in addition to those of `ViTConfig`.

    Attributes:
        decoder: "naive" or "pup".
        decoder_dim: channels of the decoders' convolutions.
        aux_indices: blocks whose tokens auxiliary decoders read while training; empty for none.
    """

    img_size: int | tuple[int, int] = 768
    num_classes: int = 19  # of Cityscapes
    decoder: str = "pup"
    decoder_dim: int = 256
    aux_indices: tuple[int, ...] = ()
    dynamic_img_size: bool = True
    global_pool: str = "none"
    choices: ClassVar = CHOICES | dict(decoder=("naive", "pup"))
    least: ClassVar = ViTConfig.least | dict(decoder_dim=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_pool != "none":
            raise ValueError(f"global_pool is {self.global_pool!r}; every token is decoded, so use 'none'")
        if not all(0 <= index < self.depth for index in self.aux_indices):
            raise ValueError(f"aux_indices is {self.aux_indices}; the model has blocks 0 to {self.depth - 1}")


class UpHead(nn.Module):
    """Convolutions that enlarge a map to logits of each pixel, after each but the last one by one of `scales`.

    If it `normalizes`, a LayerNorm of the tokens comes first.
    """

    def __init__(self, config: SetrConfig, scales: tuple[int, ...], normalizes: bool = False) -> None:
        super().__init__()
        dim = config.embed_dim
        channels = config.decoder_dim
        kernel = 1 if config.decoder == "naive" else 3
        self.scales = scales
        self.norm = nn.LayerNorm(dim, eps=config.eps) if normalizes else nn.Identity()
        for i in range(len(scales)):
            conv = nn.Conv2d(channels if i else dim, channels, kernel, padding=kernel // 2)
            self.add_module(f"conv_{i}", conv)
            self.add_module(f"syncbn_fc_{i}", nn.BatchNorm2d(channels))
        self.add_module(f"conv_{len(scales)}", nn.Conv2d(channels, config.num_classes, 1))

    def forward(self, x: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """Patch tokens [B, h·w, D] of a grid (h, w) → logits [B, K, *size]."""
        x = normalize(x, self.norm).transpose(1, 2).unflatten(2, grid)
        for i, scale in enumerate(self.scales):
            x = F.relu(self.get_submodule(f"syncbn_fc_{i}")(self.get_submodule(f"conv_{i}")(x)))
            if scale > 1:
                x = F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=False)
        x = self.get_submodule(f"conv_{len(self.scales)}")(x)
        return F.interpolate(x, size, mode="bilinear", align_corners=False)

    def reset(self, num_classes: int) -> None:
        """Replaces the last convolution by a zero-initialised one."""
        name = f"conv_{len(self.scales)}"
        last: Any = self.get_submodule(name)
        conv = nn.Conv2d(last.in_channels, num_classes, 1, device=last.weight.device, dtype=last.weight.dtype)
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        self.add_module(name, conv.train(self.training))


class Setr(VisionTransformer):
    """SETR: image [B, C, H, W] → logits of each pixel [B, K, H, W].

    With auxiliary decoders, in training mode: a list of these logits and of those of each auxiliary decoder. Without
    classes (num_classes=0): the map [B, D, h, w] of the normalised patch tokens.
    """

    task = "segment"
    layout = "setr"
    head_names = ("decode_head", "auxiliary_head")
    zero_missing_heads = False
    config: SetrConfig
    decode_head: UpHead | None

    def __init__(self, config: SetrConfig) -> None:
        super().__init__(config.replace(num_classes=0))
        self.config = config
        self.num_classes = config.num_classes
        scales: tuple[int, ...] = (1,)
        aux_scales = (1,)
        if config.decoder == "pup":
            doublings = round(math.log2(max(sides(config.patch_size))))  # four for patches of 16 pixels
            scales = (*(2,) * (doublings - 1), 1)
            aux_scales = (4,)
        heads = [UpHead(config, aux_scales, normalizes=True) for _ in config.aux_indices if config.num_classes]
        self.decode_head = UpHead(config, scales) if config.num_classes else None
        self.auxiliary_head = nn.ModuleList(heads)

    def forward(self, image: Tensor) -> Any:
        """image [B, C, H, W] → logits [B, K, H, W], or a list of them, see the class."""
        grid = self.patch_embed.grid_of(image)
        size = image.shape[2:]
        T = self.num_prefix_tokens
        if not (self.training and len(self.auxiliary_head)):
            tokens = self.forward_features(image)[:, T:]
            if self.decode_head is None:
                return tokens.transpose(1, 2).unflatten(2, grid)
            return self.decode_head(tokens, grid, size)
        x = torch.empty(0)
        taken: dict[int, Tensor] = {}
        for i, x in enumerate(self.outputs(image)):
            if i in self.config.aux_indices:
                taken[i] = x[:, T:]
        assert self.decode_head is not None
        logits = [self.decode_head(normalize(x, self.norm)[:, T:], grid, size)]
        for i, head in zip(self.config.aux_indices, self.auxiliary_head, strict=True):
            logits.append(head(taken[i], grid, size))
        return logits

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks and their decoders; for the others see `VisionTransformer.prune`."""
        indices = self.config.aux_indices
        kept = [i for i, index in enumerate(indices) if index < stages and len(self.auxiliary_head)]
        self.auxiliary_head = nn.ModuleList(self.auxiliary_head[i] for i in kept)
        self.config = self.config.replace(aux_indices=tuple(index for index in indices if index < stages))
        super().prune(stages, norm, head)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the last convolution of each decoder by a zero-initialised one; 0 removes the decoders for good."""
        self.config = self.config.replace(num_classes=num_classes, global_pool=global_pool)
        self.num_classes = num_classes
        if not num_classes:
            self.decode_head = None
            self.auxiliary_head = nn.ModuleList()
        elif self.decode_head is None:
            raise ValueError(f"num_classes is {num_classes}, but the model has no decoder; create a new one")
        else:
            for decoder in (self.decode_head, *self.auxiliary_head):
                decoder.reset(num_classes)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """The decoders."""
        heads = (self.decode_head, self.auxiliary_head) if len(self.auxiliary_head) else (self.decode_head,)
        found = tuple(head for head in heads if head is not None)
        return found[0] if len(found) == 1 else found


CONFIG = SetrConfig
MODEL = Setr
VARIANTS: dict[str, Options] = {
    "setr_naive_base_768": dict(BASE, decoder="naive", aux_indices=(2, 5, 8)),
    "setr_naive_large_768": dict(LARGE, decoder="naive", aux_indices=(9, 14, 19)),
    "setr_pup_large_768": dict(LARGE, aux_indices=(9, 14, 19, 23)),
    "setr_naive_large_512": dict(LARGE, decoder="naive", aux_indices=(9, 14, 19), img_size=512, num_classes=150),
    "setr_pup_large_512": dict(LARGE, aux_indices=(9, 14, 19, 23), img_size=512, num_classes=150),
    "setr_digits": dict(
        embed_dim=64, depth=4, num_heads=2, patch_size=4, img_size=32, in_chans=1, num_classes=11, decoder_dim=32
    ),  # for scenes of 32 x 32 pixels: ten digits and the background
}


# Names in checkpoints, from the authors' mmseg/models/backbones/vit.py and decode_heads/vit_up_head.py.

AUTHORS = Layout(
    name="fudan-zvg",
    mark="patch_embed.proj.weight",
    resize="bilinear",
    base="backbone.",
    packed=True,
    stem={"norm": "decode_head.norm"},
)


def fit_decoders(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes a checkpoint of SETR or of a plain ViT fit the model."""
    decoders = ("decode_head.", "auxiliary_head.")
    useless = [key for key in state if key.startswith(("head.", "head_dist.", "fc_norm.", "pre_logits.", "dist_token"))]
    useless += [key for key in state if key.startswith(decoders) and key not in target]
    useless += [key for key in state if key in target and key.startswith(decoders) and _differs(target, state, key)]
    for key in useless:
        del state[key]
    return useless, fit.fit(model, target, state, metadata, mode)[1]


def _differs(target: State, state: State, key: str) -> bool:
    """True if this is of the last convolution, for another number of classes."""
    return target[key].shape[1:] == state[key].shape[1:] and target[key].shape[:1] != state[key].shape[:1]


CHECKPOINTS = CheckpointFormats("SETR", (AUTHORS,), fit_decoders, {"fudan-zvg": (AUTHORS,)})
