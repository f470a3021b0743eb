"""PVT — Pyramid vision transformer. Wang et al., arXiv:2102.12122. Official: whai362/PVT, classification/pvt.py.

Differs from ViT:
  1. Four stages; each cuts the map before it into patches of 2 x 2 tokens, with a LayerNorm and positions of its own.
  2. Keys and values come from a map that a convolution reduces by 8, 4, 2 and 1.
  3. The class token joins in the last stage.
Adds the reduced attention.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..checkpoints.tensors import State, WeightsError, variant
from ..layers import Block, Blocks, Mlp, ReducedAttention, resize_pos_embed
from . import fit
from .base import LAST
from .config import Options
from .pyramid import PyramidTransformer, ReducedConfig, patch_embeds


@dataclass(frozen=True, kw_only=True)
class PvtConfig(ReducedConfig):
    """Options of PVT, in addition to those of `ReducedConfig`.

    The class token is in the last stage, whose `sr_ratios` must be 1.
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
        self.cls_token = nn.Parameter(torch.empty(1, 1, self.num_features)) if config.class_token else None
        self.num_prefix_tokens = int(config.class_token)
        self.prefix_tokens = [0] * (self.num_stages - 1) + [self.num_prefix_tokens]
        for i, (embed, rates) in enumerate(zip(patch_embeds(config), self.drop_path_rates(), strict=True), 1):
            rows = embed.num_patches + self.prefix_tokens[i - 1]
            pos = nn.Parameter(torch.empty(1, rows, config.widths[i - 1]))
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

    def position_tables(self) -> dict[str, tuple[Any, int]]:
        return {
            f"pos_embed{i}": (getattr(self, f"patch_embed{i}").grid_size, T)
            for i, T in enumerate(self.prefix_tokens, 1)
        }

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


# Names in checkpoints, from state dicts of transformers 4.56 and 5.23, and the authors' classification/pvt.py.


EMBEDDINGS = "encoder.patch_embeddings."


def _read_pvt(tensors: State) -> State:
    """Takes the class token out of the last stage."""
    return {"cls_token" if key.endswith(".cls_token") else key: tensor for key, tensor in tensors.items()}


def _write_pvt(tensors: State) -> State:
    """The inverse of `_read_pvt`."""
    last = max(int(key.split(".")[2]) for key in tensors if key.startswith(EMBEDDINGS))
    return {f"{EMBEDDINGS}{last}.{key}" if key == "cls_token" else key: tensor for key, tensor in tensors.items()}


PVT_LAYOUTS = (
    Layout(
        name="transformers PVT",
        mark="encoder.patch_embeddings.0.projection.weight",
        resize="bilinear",
        stem={
            "patch_embed{}.{proj,norm}": EMBEDDINGS + "{-1}.{projection,layer_norm}",
            "pos_embed{}": EMBEDDINGS + "{-1}.position_embeddings",
            "norm": "encoder.layer_norm",
            "head": "classifier",
        },
        home="block{}.{}",
        blocks="encoder.block.{-1}.{}",
        block={
            "norm{1,2}": "layer_norm_{1,2}",
            "attn.q": "attention.self.query",
            "attn.{key,value}": "attention.self.{key,value}",
            "attn.{sr,norm}": "attention.self.{sequence_reduction,layer_norm}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "mlp.dense{1,2}",
        },
        read=_read_pvt,
        write=_write_pvt,
        base="pvt.",
        needs=dict(final_norm=True, class_token=True, global_pool="token", patch_size=((4, 4),)),
    ),
    Layout(name="PVT", mark="patch_embed1.proj.weight", resize="bilinear", home="block{}.{}", blocks="block{}.{}"),
)
PVT_SAVED: dict[str, tuple[Layout, ...]] = {"transformers": (PVT_LAYOUTS[0],)}


def choose_pvt(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout of transformers, if the images are square."""
    layout = fit.choose(model, layouts)
    size = model.config.img_size
    if size[0] != size[1]:
        sides = "x".join(map(str, size))
        raise WeightsError(f"{variant(model)} cannot be written so: {layout.name} needs square images, not {sides}")
    return layout


CHECKPOINTS = CheckpointFormats("PVT", PVT_LAYOUTS, fit.fit_tables, PVT_SAVED, choose_pvt, fit.write)
