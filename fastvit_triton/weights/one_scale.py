"""Weights of models with one scale that are no plain ViT: names, and positions of another grid.

Our names are those of timm and, where it lacks the model, the authors'.

Sources: state dicts of timm 1.0.31; SHI-Labs/Compact-Transformers (src/utils/transformers.py, helpers.py),
zhoudaquan/dvit_repo (models/layers.py), zihangJiang/TokenLabeling (tlt/models/lvvit.py, tlt/utils/utils.py).
"""

import math
from collections.abc import Mapping
from typing import Any

from ..layers import resize_pos_embed
from . import vit
from .adapt import State, WeightsError, split
from .layouts import Layout

CCT = Layout(
    name="CCT",
    mark="classifier.blocks.0.pre_norm.weight",
    beside="tokenizer.conv_layers.0.0.weight",
    resize="bilinear",
    home="classifier.blocks.{}",
    blocks="classifier.blocks.{}",
)
CAIT = Layout(
    name="timm",
    mark="blocks_token_only.0.attn.q.weight",
    beside="patch_embed.proj.weight",
    resize="bicubic_antialias",
    home="blocks_token_only.{}",
    blocks="blocks_token_only.{}",
)
AUTHORS: dict[str, Any] = dict(mark="patch_embed.proj.weight", beside="blocks.0.attn.qkv.weight", resize="bicubic")
DEEPVIT, LVVIT, REFINER = (Layout(name=name, **AUTHORS) for name in ("DeepViT", "LV-ViT", "Refiner"))


def fit_cct(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of a compact transformer; for the arguments see `vit.fit`."""
    key, T, grid = "classifier.positional_emb", model.num_prefix_tokens, model.grid_size
    if key not in target or key not in state or state[key].shape == target[key].shape or state[key].dim() != 3:
        return [], ""
    rows = state[key].shape[1]
    side = math.isqrt(max(rows - T, 0))
    if not side or side * side != rows - T:
        raise WeightsError(f"{key} has {rows} rows, no square grid; create the model with its img_size")
    state[key] = resize_pos_embed(state[key], (side, side), grid, T, mode)
    return [], f"{side}x{side} resized to {grid[0]}x{grid[1]} ({mode})"


def fit_cait(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit a CaiT, whose class attention has three projections; see `vit.fit`."""
    for key in [key for key in state if key.startswith("blocks_token_only.") and ".attn.qkv." in key]:
        state |= split({key: state.pop(key)}, "attn.qkv")
    return vit.fit(model, target, state, metadata, mode)


ROWS: dict[str, tuple] = {  # see `Spelling`
    "cct": ("a compact transformer", (CCT,), fit_cct),
    "cait": ("CaiT", (CAIT,), fit_cait, {"timm": (CAIT,)}),
    "deepvit": ("DeepViT", (DEEPVIT,), vit.fit),
    "lvvit": ("LV-ViT", (LVVIT,), vit.fit),
    "refiner": ("Refiner", (REFINER,), vit.fit),
}
