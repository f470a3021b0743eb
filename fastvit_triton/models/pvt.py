"""PVT — Pyramid vision transformer. Wang et al., arXiv:2102.12122. Official: whai362/PVT, classification/pvt.py.

Differs from ViT:
  1. Four stages; each cuts the map before it into patches of 2 x 2 tokens, with a LayerNorm and positions of its own.
  2. Keys and values come from a map that a convolution reduces by 8, 4, 2 and 1.
  3. The class token joins in the last stage.
Adds the reduced attention.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, WeightsError, variant
from ..layers import Block, Blocks, Mlp, NormedPatchEmbed, ReducedAttention, resize_pos_embed
from ..layers.embed import sides
from . import fit
from .base import LAST
from .config import Options
from .pyramid import PyramidTransformer, ReducedConfig


@dataclass(frozen=True, kw_only=True)
class PvtConfig(ReducedConfig):
    """Options of PVT, in addition to those of `ReducedConfig`.

    Attributes:
        class_token: prepend a learned token in the last stage, whose `sr_ratios` must be 1.
        qkv_bias: bias on the query, key and value projections.
    """

    class_token: bool = True
    qkv_bias: bool = True
    global_pool: str = "token"
    pools = ("token", "avg", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_token and self.sr_ratios[-1] != 1:
            raise ValueError(f"sr_ratios is {self.sr_ratios}; the class token is in the last stage, which must have 1")


PARTS = ("patch_embed", "pos_embed", "pos_drop", "block")  # of a stage; its number, from 1, follows


class PyramidVisionTransformer(PyramidTransformer):
    """PVT; its features are tokens [B, 1 + N, D]. Positions are resampled for images of another size."""

    layout = "pvt"
    flattens = True
    info = "block{}", 1
    undecayed = r"^cls_token$"
    stem_pattern = r"^patch_embed1"  # these as in timm's Twins
    layer_patterns = ((r"^block(\d+)\.(\d+)", None), (r"^(?:patch|pos)_embed(\d+)", (0,)), (r"^norm|^cls_token", LAST))
    coarse_patterns = ((r"^(?:block|patch_embed|pos_embed)(\d+)", None), (r"^norm|^cls_token", LAST))

    def __init__(self, config: PvtConfig) -> None:
        super().__init__(config)
        size = sides(config.img_size)
        patch = sides(config.patch_size)
        channels = config.in_chans
        self.cls_token = nn.Parameter(torch.empty(1, 1, self.num_features)) if config.class_token else None
        self.num_prefix_tokens = int(config.class_token)
        self.prefix_tokens = [0] * (self.num_stages - 1) + [self.num_prefix_tokens]
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True), 1):
            embed = NormedPatchEmbed(size, patch, channels, D, strict_img_size=False)
            size = embed.grid_size
            patch = (2, 2)
            channels = D
            pos = nn.Parameter(torch.empty(1, embed.num_patches + self.prefix_tokens[i - 1], D))
            blocks = Blocks(*(build_block(config, i - 1, p) for p in rates))
            for name, part in zip(PARTS, (embed, pos, nn.Dropout(config.pos_drop_rate), blocks), strict=True):
                setattr(self, f"{name}{i}", part)
        self.build_head()

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']; [B, 1, 1 + N, D] for the last one."""
        image = x.permute(0, 3, 1, 2) if i else x
        T = self.prefix_tokens[i]
        embed, pos, drop, blocks = (getattr(self, f"{name}{i + 1}") for name in PARTS)
        grid = embed.grid_of(image)
        pos = resize_pos_embed(pos, embed.grid_size, grid, T, self.position_resize)
        x = drop(embed(image, pos, self.cls_token if T else None))
        return blocks(x.unsqueeze(1) if T else x.unflatten(1, grid), recompute=self.recomputes)

    def drop_stages(self, kept: int) -> None:
        """Removes the modules of all but the first `kept` stages, and the class token."""
        for name in (f"{part}{i + 1}" for part in PARTS for i in range(kept, self.num_stages)):
            delattr(self, name)
        self.cls_token = None
        self.num_prefix_tokens = 0
        self.prefix_tokens = [0] * kept
        self.config = self.config.replace(class_token=False, global_pool="none")

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises the weights as the authors do."""
        super().init_weights()
        for table in (t for name, t in self.named_parameters() if re.match("cls_token|pos_embed", name)):
            nn.init.trunc_normal_(table, std=0.02)


def build_block(config: PvtConfig, stage: int, drop_path: float) -> Block:
    """Builds one block of a stage."""
    D = config.widths[stage]
    drop = config.proj_drop_rate
    sizes = D, config.num_heads[stage], config.sr_ratios[stage]
    attn = ReducedAttention(*sizes, config.qkv_bias, drop, config.attn_drop_rate)
    return Block(D, attn, Mlp(D, int(D * config.mlp_ratios[stage]), drop=drop), config.eps, drop_path=drop_path)


CONFIG = PvtConfig
MODEL = PyramidVisionTransformer
DEPTHS = dict(tiny=(2, 2, 2, 2), small=(3, 4, 6, 3), medium=(3, 4, 18, 3), large=(3, 8, 27, 3))
VARIANTS: dict[str, Options] = {f"pvt_{size}": dict(depths=depths) for size, depths in DEPTHS.items()}

# Counted by the authors' code.
PARAMS = dict(zip(VARIANTS, (13_229_288, 24_485_864, 44_208_104, 61_369_320), strict=True))

# Names in checkpoints, from state dicts of transformers 4.56 and 5.23, and the authors' classification/pvt.py.


def _from_pvt(key: str) -> str:
    """Stages are numbered from 1 by the authors."""
    if match := re.fullmatch(r"encoder\.(block|patch_embeddings)\.(\d+)\.(.+)", key):
        stage = int(match[2]) + 1
        rest = match[3]
        if match[1] == "block":
            return f"block{stage}.{rest}"
        rest = rest.replace("projection.", "proj.").replace("layer_norm.", "norm.")
        return {"cls_token": rest, "position_embeddings": f"pos_embed{stage}"}.get(rest, f"patch_embed{stage}.{rest}")
    return key


def _write_pvt(tensors: State) -> State:
    """The inverse of `_from_pvt`; the class token is in the last stage."""
    last = max(int(match[1]) for key in tensors if (match := re.match(r"patch_embed(\d+)\.", key)))
    parts = {"proj": "projection", "norm": "layer_norm"}

    def name(key: str) -> str:
        if key == "cls_token":
            return f"encoder.patch_embeddings.{last - 1}.cls_token"
        match = re.fullmatch(r"(block|patch_embed|pos_embed)(\d+)\.?(.*)", key)
        if match is None:
            return key
        stage = int(match[2]) - 1
        rest = match[3]
        if match[1] == "block":
            return f"encoder.block.{stage}.{rest}"
        module, _, leaf = rest.partition(".")
        rest = f"{parts[module]}.{leaf}" if module else "position_embeddings"
        return f"encoder.patch_embeddings.{stage}.{rest}"

    return {name(key): tensor for key, tensor in tensors.items()}


PVT_LAYOUTS = (
    Layout(
        name="transformers PVT",
        mark="encoder.patch_embeddings.0.projection.weight",
        resize="bilinear",
        number=_from_pvt,
        stem={"norm": "encoder.layer_norm", "head": "classifier"},
        home="block{}.{}",
        blocks="block{}.{}",
        block={
            "norm{1,2}": "layer_norm_{1,2}",
            "attn.q": "attention.self.query",
            "attn.{key,value}": "attention.self.{key,value}",
            "attn.{sr,norm}": "attention.self.{sequence_reduction,layer_norm}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "mlp.dense{1,2}",
        },
        write=_write_pvt,
        base="pvt.",
        needs=dict(final_norm=True, class_token=True, global_pool="token", patch_size=((4, 4),)),
    ),
    Layout(name="PVT", mark="patch_embed1.proj.weight", resize="bilinear", home="block{}.{}", blocks="block{}.{}"),
)
PVT_SAVED: dict[str, tuple[Layout, ...]] = {"transformers": (PVT_LAYOUTS[0],)}


def fit_positions(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the positions of `state` fit the grid of each stage of a PVT; for the arguments see `fit.fit`."""
    grids = [getattr(model, f"patch_embed{i + 1}").grid_size for i in range(len(model.prefix_tokens))]
    tables = {
        f"pos_embed{i + 1}": (grid, T) for i, (grid, T) in enumerate(zip(grids, model.prefix_tokens, strict=True))
    }
    return [], fit.fit_table(model, target, state, metadata, mode, tables)


def choose_pvt(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout of transformers, if the images are square."""
    layout = fit.choose(model, layouts)
    size = model.config.img_size
    if size[0] != size[1]:
        sides = "x".join(map(str, size))
        raise WeightsError(f"{variant(model)} cannot be written so: {layout.name} needs square images, not {sides}")
    return layout


CHECKPOINTS = CheckpointFormats("PVT", PVT_LAYOUTS, fit_positions, PVT_SAVED, choose_pvt, fit.write)
