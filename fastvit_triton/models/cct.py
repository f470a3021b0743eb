"""CCT, CVT, ViT-Lite — Escaping the big data paradigm with compact transformers. Hassani et al., arXiv:2104.05704.

Official: SHI-Labs/Compact-Transformers.
Differs from ViT:
  1. The residual is normalised after each attention, and the MLP has no norm of its own; qkv has no bias.
  2. `compact_cvt_*`, `cct_*`: no class token; the head reads a weighted mean of the tokens (sequence pooling).
  3. `cct_*`: tokens come from convolutions with max pooling; cct_7_3x1 has 7 blocks and one convolution of 3 x 3.
Adds the block, the pooling and the tokenizer. `compact_cvt_*` is the authors' CVT, and not CvT (arXiv:2103.15808).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State, WeightsError
from ..layers import resize_pos_embed
from .compact import CompactTransformer
from .config import ALIASES, BaseConfig, Options, check_types


@dataclass(frozen=True, kw_only=True)
class CctConfig(BaseConfig):
    """Options of compact transformers, in addition to those of `BaseConfig`.

    Attributes:
        kernel_size: side of the tokenizer's convolutions, or of the patches.
        conv_layers: convolutions of the tokenizer; 0 for patches.
        embed_dim: D, channels per token.
        depth: number of blocks.
        num_heads: heads.
        mlp_ratio: hidden channels of the MLP divided by D.
        pos_embed: "learned", "sincos1d" (a fixed parameter) or "none".
        class_token: prepend a learned token; needed by global_pool="token".
        global_pool: "seq" (sequence pooling), "token" (class token) or "none" (all tokens go to the head).
        eps: LayerNorm epsilon.
        pos_drop_rate: dropout after the positions.
        proj_drop_rate: dropout after the attention projection and in the MLP.
        attn_drop_rate: dropout on attention probabilities.
        final_norm: LayerNorm after the last block.
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 10
    kernel_size: int = 3
    conv_layers: int = 1
    embed_dim: int = 256
    depth: int = 7
    num_heads: int = 4
    mlp_ratio: float = 2.0
    pos_embed: str = "learned"
    class_token: bool = False
    global_pool: str = "seq"
    eps: float = 1e-5
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.1  # this and the next as in the authors' code
    drop_path_rate: float = 0.1
    final_norm: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        super().__post_init__()
        object.__setattr__(self, "global_pool", ALIASES.get(self.global_pool, self.global_pool))
        choices = dict(pos_embed=("learned", "sincos1d", "none"), global_pool=("seq", "token", "none"))
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; use one of {', '.join(allowed)}")
        least = dict(kernel_size=1, conv_layers=0, embed_dim=1, depth=1, num_heads=1, mlp_ratio=0)
        for field, value in least.items():
            if getattr(self, field) < value:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least {value}")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}; change one")
        if self.global_pool == "token" and not self.class_token:
            raise ValueError("global_pool 'token' needs class_token=True; use 'seq' without a class token")


# number of blocks → heads, MLP ratio, D
SIZES = {2: (2, 1.0, 128), 4: (2, 1.0, 128), 6: (4, 2.0, 256), 7: (4, 2.0, 256), 14: (6, 3.0, 384)}


def of(depth: int, kernel_size: int, conv_layers: int = 0, img_size: int = 32, num_classes: int = 10) -> Options:
    """The authors' options of a model of this depth."""
    heads, ratio, D = SIZES[depth]
    stem = dict(kernel_size=kernel_size, conv_layers=conv_layers, img_size=img_size, num_classes=num_classes)
    return dict(stem, depth=depth, num_heads=heads, mlp_ratio=ratio, embed_dim=D)


TOKEN = dict(class_token=True, global_pool="token")

CONFIG = CctConfig
MODEL = CompactTransformer
VARIANTS: dict[str, Options] = {
    "cct_2_3x2_32": of(2, 3, 2),
    "cct_4_3x2_32": of(4, 3, 2),
    "cct_6_3x1_32": of(6, 3, 1),
    "cct_6_3x2_32": of(6, 3, 2),
    "cct_7_3x1_32": of(7, 3, 1),
    "cct_7_3x2_32": of(7, 3, 2),
    "cct_7_7x2_224": of(7, 7, 2, 224, 102),
    "cct_14_7x2_224": of(14, 7, 2, 224, 1000),
    "cct_14_7x2_384": of(14, 7, 2, 384, 1000),
}
VARIANTS |= {f"compact_cvt_{depth}_4_32": of(depth, 4) for depth in (2, 4, 6, 7)}
VARIANTS |= {f"vit_lite_{depth}_4_32": dict(of(depth, 4), **TOKEN) for depth in (2, 4, 6, 7)}
ORACLE: dict[str, str] = {}  # vit-pytorch has cct, with other constructors

# Counted by the authors' code with their number of classes; a class has D + 1 weights.
COUNTS: tuple[int, ...] = (
    283_723,
    482_123,
    3_233_803,
    3_326_923,
    3_760_139,
    3_853_259,
    4_573_735,
    22_367_273,
    22_513_193,
)
COUNTS += (214_539, 412_939, 3_190_283, 3_716_619, 214_666, 413_066, 3_190_538, 3_716_874)
PARAMS = {
    name: count + (1000 - options["num_classes"]) * (options["embed_dim"] + 1)
    for (name, options), count in zip(VARIANTS.items(), COUNTS, strict=True)
}

# Names in checkpoints: the authors', src/utils/transformers.py and helpers.py.

CCT = Layout(
    name="CCT",
    mark="classifier.blocks.0.pre_norm.weight",
    beside="tokenizer.conv_layers.0.0.weight",
    resize="bilinear",
    home="classifier.blocks.{}",
    blocks="classifier.blocks.{}",
)


def fit_cct(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of a compact transformer; for the arguments see `fit.fit`."""
    key, T, grid = "classifier.positional_emb", model.num_prefix_tokens, model.grid_size
    if key not in target or key not in state or state[key].shape == target[key].shape or state[key].dim() != 3:
        return [], ""
    rows = state[key].shape[1]
    side = math.isqrt(max(rows - T, 0))
    if not side or side * side != rows - T:
        raise WeightsError(f"{key} has {rows} rows, no square grid; create the model with its img_size")
    state[key] = resize_pos_embed(state[key], (side, side), grid, T, mode)
    return [], f"{side}x{side} resized to {grid[0]}x{grid[1]} ({mode})"


CHECKPOINTS = Spelling("a compact transformer", (CCT,), fit_cct)
