"""Swin — Hierarchical vision transformer using shifted windows. Liu et al., arXiv:2103.14030.

Official: microsoft/Swin-Transformer.
Differs from ViT:
  1. Attention is within windows; every other block shifts them by half a window, and marks what was apart with −100.
  2. A learned bias per offset within a window instead of positions.
  3. Four stages; between them, 2 x 2 tokens are merged and their channels doubled.
  4. A LayerNorm after the patch projection; the mean of the last map goes to the head.
Differs from the authors' code: where windows do not divide the map, it is rolled and then padded, as in timm.
Adds windows and merging.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, WeightsError, variant
from ..layers import Block, Blocks, Mlp, NormedPatchEmbed, PatchMerging, Window, WindowAttention
from ..layers.embed import sides
from ..layers.window import resize_table
from . import fit
from .base import NORM
from .config import Options
from .pyramid import PyramidConfig, PyramidTransformer, Stage


@dataclass(frozen=True, kw_only=True)
class SwinConfig(PyramidConfig):
    """Options of Swin, in addition to those of `PyramidConfig`.

    Attributes:
        embed_dim: channels of the first stage; they double in each stage.
        window_size: side of a window in tokens, or (height, width); at most that of the map.
        always_partition: keep that size and the shift on smaller maps, which are padded.
    """

    embed_dim: int = 96
    window_size: int | tuple[int, int] = 7
    always_partition: bool = False
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    attn_drop_rate: float = 0.0
    dynamic_img_size: bool = False
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    drop_path_rate: float = 0.1  # as in timm
    eps: float = 1e-5

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.embed_dim << i for i in range(len(self.depths)))

    @property
    def smallest(self) -> tuple[int, int]:
        return sides(self.patch_size)  # merging fills up odd maps

    def window(self, grid: tuple[int, int], block: int) -> Window:
        """The windows of a block of a stage whose map has the size `grid`."""
        size = sides(self.window_size)
        shift = (size[0] // 2, size[1] // 2) if block % 2 else (0, 0)
        if not self.always_partition:
            shift = (shift[0] * (grid[0] > size[0]), shift[1] * (grid[1] > size[1]))
            size = (min(grid[0], size[0]), min(grid[1], size[1]))
        return Window(size, shift, pad_first=False)


class SwinTransformer(PyramidTransformer):
    """Swin Transformer; the last map is [B, H, W, D]."""

    layout = "swin"
    parts = ("layers",)
    info = "layers.{}", 0
    head_names = ("head.fc",)
    undecayed = r"relative_position_bias_table$"
    stem_pattern = r"^patch_embed"
    layer_patterns = ((r"^layers\.(\d+).downsample", (0,)), (r"^layers\.(\d+)\.\w+\.(\d+)", None), NORM)
    coarse_patterns = ((r"^layers\.(\d+)", None),)

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        sizes = sides(config.img_size), sides(config.patch_size)
        self.patch_embed = NormedPatchEmbed(*sizes, config.in_chans, config.embed_dim, strict_img_size=False)
        self.layers = nn.ModuleList()
        grid = self.patch_embed.grid_size
        for i, rates in enumerate(self.drop_path_rates()):
            grid = (-(-grid[0] // 2), -(-grid[1] // 2)) if i else grid
            blocks = Blocks(*(build_block(config, i, config.window(grid, j), p) for j, p in enumerate(rates)))
            self.layers.append(Stage(PatchMerging(config.widths[i - 1], config.eps) if i else nn.Identity(), blocks))
        self.build_head()
        self.head: Any = nn.Sequential(OrderedDict(fc=self.head))

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']."""
        if not i:
            x = self.patch_embed(x).unflatten(1, self.patch_embed.grid_of(x))
        return self.layers[i](x, self.recomputes)


def build_block(config: SwinConfig, stage: int, window: Window, drop_path: float) -> Block:
    """Builds one block of a stage."""
    D = config.widths[stage]
    drop = config.proj_drop_rate
    attn = WindowAttention(D, config.num_heads[stage], window, config.qkv_bias, True, drop, config.attn_drop_rate)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratio), drop=drop), config.eps, drop_path=drop_path)


SMALL: Options = dict(depths=(2, 2, 18, 2))
BASE: Options = dict(SMALL, embed_dim=128, num_heads=(4, 8, 16, 32))
LARGE: Options = dict(BASE, embed_dim=192, num_heads=(6, 12, 24, 48))

CONFIG = SwinConfig
MODEL = SwinTransformer
VARIANTS: dict[str, Options] = {
    "swin_tiny_patch4_window7_224": {},
    "swin_small_patch4_window7_224": SMALL,
    "swin_base_patch4_window7_224": BASE,
    "swin_base_patch4_window12_384": dict(BASE, window_size=12, img_size=384),
    "swin_large_patch4_window7_224": LARGE,
    "swin_large_patch4_window12_384": dict(LARGE, window_size=12, img_size=384),
}

# Names in checkpoints, from state dicts of timm 1.0.31, transformers 4.56 and 5.23, torchvision 0.28, and the authors'
# models/swin_transformer.py. Patch merging ends a stage, and begins the next one in timm and here.

TABLE = ".relative_position_bias_table"


HEAD = {"head.fc": "head.fc head"}
# Stem, stages and mergings are numbered together: features.1 is stage 0, features.2 the merging of stage 1.
FEATURES = {"patch_embed.{proj,norm}": "features.0.{0,2}"}
FEATURES |= {f"layers.{i}.downsample": f"features.{2 * i}" for i in range(1, 4)}
FEATURES |= {f"layers.{i}.blocks": f"features.{2 * i + 1}" for i in range(4)}
FEATURES |= {f"layers.{i}.blocks.{{}}.mlp.fc{{1,2}}": f"features.{2 * i + 1}.{{}}.mlp.{{0,3}}" for i in range(4)}
SWIN: dict[str, Any] = dict(resize="bilinear", home="layers.{}.blocks.{}", blocks="layers.{}.blocks.{}")
TIMM_SWIN = Layout(
    name="timm", mark=f"layers.0.blocks.0.attn{TABLE}", beside="patch_embed.proj.weight", stem=HEAD, **SWIN
)
SWIN_LAYOUTS = (
    Layout(name="torchvision Swin", mark="features.0.0.weight", resize="bilinear", stem=HEAD | FEATURES),
    Layout(
        name="transformers Swin",
        mark="embeddings.patch_embeddings.projection.weight",
        stem={
            "layers.{}.downsample": "encoder.layers.{-1}.downsample",
            "patch_embed.proj": "embeddings.patch_embeddings.projection",
            "patch_embed.norm": "embeddings.norm",
            "norm": "layernorm",
            "head.fc": "classifier",
        },
        block={
            "norm{1,2}": "layernorm_{before,after}",
            "attn.{q,k,v}": "attention.{q,k,v}_proj attention.self.{query,key,value}",
            f"attn{TABLE}": f"attention.relative_position_bias{TABLE} attention.self{TABLE}",
            "attn.proj": "attention.o_proj attention.output.dense",
            "mlp.fc{1,2}": "mlp.fc{1,2} {intermediate,output}.dense",
        },
        base="swin.",
        needs=dict(final_norm=True, global_pool="avg", eps=1e-5, always_partition=False),
        **SWIN | dict(blocks="encoder.layers.{}.blocks.{}"),
    ),
    Layout(
        name="Swin",
        mark="layers.0.downsample.reduction.weight",
        beside="patch_embed.proj.weight",
        stem=HEAD | {"layers.{}.downsample": "layers.{-1}.downsample"},
        **SWIN,
    ),
    TIMM_SWIN,
)
SWIN_SAVED: dict[str, tuple[Layout, ...]] = {"timm": (TIMM_SWIN,), "transformers": (SWIN_LAYOUTS[1],)}


def fit_tables(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the bias tables of `state` fit the windows of a Swin; for the arguments see `fit.fit`."""
    notes = set()
    for key in [key for key in target if key.endswith(TABLE) and key in state]:
        rows = len(state[key])
        new = model.get_submodule(key.removesuffix(TABLE)).window.size
        if rows == len(target[key]) or state[key].dim() != 2:
            continue
        side = math.isqrt(rows)
        if side * side != rows or not side % 2:
            raise WeightsError(f"{key} has {rows} rows, no square window; create the model with its window_size")
        old = (side // 2 + 1, side // 2 + 1)
        state[key] = resize_table(state[key], old, new)
        notes.add(f"windows of {old[0]}x{old[1]} resized to {new[0]}x{new[1]}")
    return [], ", ".join(sorted(notes))


def choose_swin(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout of timm, or that of transformers if all windows are those of transformers."""
    layout = fit.choose(model, layouts)
    if layout is not TIMM_SWIN:
        _check_windows(model)
    return layout


def _check_windows(model: Any) -> None:
    """Raises WeightsError unless all windows are those of transformers.

    It has square windows, pads before it shifts them, and shifts both axes of a map or none.
    """
    h, w = sides(model.config.window_size)
    for rows, columns in _maps(model):
        same = not rows % h and not columns % h and (rows == h) == (columns == h)
        if h != w or not same:
            raise WeightsError(
                f"{variant(model)} cannot be written so: transformers has other windows of {h}x{w} on a map of "
                f"{rows}x{columns}; create the model with a window_size, as an integer, that divides all maps"
            )


def _maps(model: Any) -> Iterator[tuple[int, int]]:
    """(rows, columns) of the map of each stage."""
    grid = model.patch_embed.grid_size
    for _ in model.config.depths:
        yield grid
        grid = -(-grid[0] // 2), -(-grid[1] // 2)


CHECKPOINTS = CheckpointFormats("Swin", SWIN_LAYOUTS, fit_tables, SWIN_SAVED, choose_swin, fit.write)
