"""Weights of models with other stems and stages: parameter names in other libraries, and positions of another size.

Our names are timm's, and the authors' of families that timm has not.

Sources: state dicts of timm 1.0.31; naver-ai/pit (pit.py).
"""

import re
from collections.abc import Mapping
from typing import Any

from ..layers.pooling import resize_map
from .adapt import State
from .layouts import Layout
from .pyramid import write


def _from_pit(key: str) -> str:
    """The authors' poolings lie beside the stages; in timm they begin the next one."""
    return re.sub(r"^pools\.(\d+)\.", lambda m: f"transformers.{int(m[1]) + 1}.pool.", key)


PIT: dict[str, Any] = dict(mark="patch_embed.conv.weight", resize="bicubic_antialias")
TIMM_PIT = Layout(name="timm", beside="transformers.0.blocks.0.attn.qkv.weight", **PIT)
PIT_LAYOUTS = (Layout(name="PiT", number=_from_pit, **PIT | dict(mark="pools.0.conv.weight")), TIMM_PIT)


def fit_map(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions [1, D, h, w] of `state` fit the grid of a PiT; for the arguments see `vit.fit`."""
    new, pos = model.patch_embed.grid_size, state.get("pos_embed")
    if pos is None or pos.dim() != 4 or tuple(pos.shape[2:]) == new:
        return [], ""
    state["pos_embed"] = resize_map(pos, new, mode)
    return [], f"{pos.shape[2]}x{pos.shape[3]} resized to {new[0]}x{new[1]} ({mode})"


ROWS: dict[str, tuple] = {"pit": ("PiT", PIT_LAYOUTS, fit_map, {"timm": (TIMM_PIT,)}, write)}  # see `Spelling`
