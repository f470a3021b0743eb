"""Adapts a checkpoint to a model: norm, stem and positions. Functions that several families share."""

import dataclasses
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.renaming import Fitted, Layout
from ..checkpoints.tensors import TOKENS, State, WeightsError, split, variant
from ..layers.embed import resize_pos_embed, sides
from .transformer import VisionTransformer


def fit(model: VisionTransformer, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the tensors of `state` fit the model's norm, stem and positions.

    Args:
        model: a `VisionTransformer`.
        target: its state dict.
        state: the checkpoint's tensors under our names; changed in place.
        metadata: metadata of the checkpoint's file.
        mode: interpolation of positions, see `resize_pos_embed`.

    Returns:
        Keys to remove from `state`, and a description of the changes to the position table.
    """
    useless = fit_norm(target, state)
    fit_stem(model, state)
    return useless, fit_positions(model, state, metadata, mode)


def fit_norm(target: State, state: State) -> list[str]:
    """The keys of the final norm of a checkpoint without a head, if the model pools before its norm.

    The model's own norm keeps its initial values, as in MAE's fine-tuning (facebookresearch/mae, main_finetune.py).
    """
    moved = "fc_norm.weight" in target and "fc_norm.weight" not in state and "norm.weight" not in target
    if not moved or "head.weight" in state:
        return []
    useless: list[str] = [key for key in ("norm.weight", "norm.bias") if key in state]
    state |= {f"fc_{key}": target[f"fc_{key}"].clone() for key in useless}
    return useless


def fit_stem(model: VisionTransformer, state: State) -> None:
    """Converts the weight of the patch projection between convolution [D, C, P, P] and linear layer [D, P·P·C]."""
    weight = state.get("patch_embed.proj.weight")
    config = model.config
    convolves = config.patch_embed == "conv"
    if weight is None or weight.dim() != (2 if convolves else 4):
        return
    if not convolves:
        state["patch_embed.proj.weight"] = weight.permute(0, 2, 3, 1).flatten(1)
    elif weight.shape[1] == math.prod(sides(config.patch_size)) * config.in_chans:
        weight = weight.unflatten(1, (*sides(config.patch_size), config.in_chans))
        state["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)


def fit_positions(model: VisionTransformer, state: State, metadata: Mapping[str, str], mode: str) -> str:
    """Converts `state["pos_embed"]` [1, T + h·w, D] to the model's prefix and grid; returns a description."""
    table = model.pos_embed
    pos = state.get("pos_embed")
    if not isinstance(table, Tensor) or pos is None or pos.shape[::2] != table.shape[::2]:
        return ""  # nothing to convert, or a mismatch that `check` reports
    h, w = model.patch_embed.grid_size
    notes = list[str]()
    wanted = table.shape[1] - h * w
    prefixes = (wanted, 0, 1, model.num_prefix_tokens)
    source = _source_grid(model, "pos_embed", pos.shape[1], (h, w), prefixes, metadata)
    stored = source.prefix
    rows = sum(state[name].shape[1] for name in TOKENS if name in state and state[name].shape[::2] == pos.shape[::2])
    if wanted < stored and rows < stored:
        return ""  # a token is missing or has a different width, which `check` reports
    if stored != wanted:
        state |= move_prefix(state, stored, wanted)
        notes.append(f"prefix rows {stored} to {wanted}, the difference moved into the tokens")
    notes += _resize(state, "pos_embed", source, (h, w), wanted, mode)
    if not isinstance(table, nn.Parameter):  # a fixed table is not loaded if both are equal in the coarser dtype
        pos = state["pos_embed"]
        if torch.allclose(pos.to(table).to(pos).float(), table.to(pos).float(), atol=1e-5):
            del state["pos_embed"]
    return ", ".join(notes)


def _resize(state: State, key: str, source: "_Source", grid: tuple[int, int], prefix: int, mode: str) -> list[str]:
    """Resizes a table to another grid; returns notes on this, and on a grid that was assumed."""
    (h, w), assumed = source.grid, " (assumed)" * source.assumed
    if (h, w) == grid:
        return [f"{h}x{w}{assumed}"] * (source.assumed and h != w)
    state[key] = resize_pos_embed(state[key], (h, w), grid, prefix, mode)
    return [f"{h}x{w}{assumed} resized to {grid[0]}x{grid[1]} ({mode})"]


class _Source(NamedTuple):
    """A table in a checkpoint: its prefix rows and its grid (h, w), and if nothing states the grid."""

    prefix: int
    grid: tuple[int, int]
    assumed: bool


def _source_grid(
    model: Any,
    key: str,
    rows: int,
    grid: tuple[int, int],
    prefixes: tuple[int, ...],
    metadata: Mapping[str, str],
) -> _Source:
    """The source of a table: by the size of images that its config states, else the model's grid, else a square."""
    with suppress(ValueError, LookupError, TypeError):  # no config, or one of another library
        size = json.loads(metadata["config"])["img_size"]
        h, w = (g * side // own for g, side, own in zip(grid, sides(size), sides(model.config.img_size), strict=True))
        if rows - h * w in prefixes:
            return _Source(rows - h * w, (h, w), False)
    for prefix in prefixes:
        if rows - prefix == grid[0] * grid[1]:
            return _Source(prefix, grid, True)
    for prefix in prefixes:
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return _Source(prefix, (side, side), True)
    raise WeightsError(
        f"{key} has {rows} rows in the checkpoint, no square grid after {min(prefixes)} to {max(prefixes)} prefix "
        f"tokens, and {grid[0]}x{grid[1]} patches in the model; create the model with the checkpoint's img_size"
    )


def move_prefix(state: State, given: int, wanted: int) -> State:
    """Changes the prefix rows of pos_embed from `given` to `wanted`; the sums of tokens and positions are unchanged."""
    pos = state["pos_embed"]
    if wanted >= given:
        zeros = pos.new_zeros(1, wanted - given, pos.shape[2])
        return {**state, "pos_embed": torch.cat((pos[:, :given], zeros, pos[:, given:]), 1)}
    names = [name for name in TOKENS if name in state]
    sizes = [state[name].shape[1] for name in names]
    extra = F.pad(pos[:, wanted:given], (0, 0, wanted, max(0, sum(sizes) - given)))
    moved = {name: state[name] + rows for name, rows in zip(names, extra.split(sizes, 1), strict=True)}
    return {**state, **moved, "pos_embed": torch.cat((pos[:, :wanted], pos[:, given:]), 1)}


def supporting(layouts: tuple[Layout, ...], facts: dict[str, object], name: str) -> Layout:
    """The first layout whose `needs` the facts of a model satisfy."""
    layout = min(layouts, key=lambda layout: len(layout.unmet(facts)))
    if wrong := layout.unmet(facts):
        raise WeightsError(f"{name} cannot be written so: {layout.name} needs {'; '.join(wrong)}")
    return layout


def fit_tables(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the tables of positions [1, T + h · w, D] that the model lists fit their grids; as `fit`."""
    notes = list[str]()
    for key, (grid, prefix) in model.position_tables().items():
        pos = state.get(key)
        if pos is not None and pos.dim() == 3:
            source = _source_grid(model, key, pos.shape[1], grid, (prefix,), metadata)
            notes += _resize(state, key, source, grid, prefix, mode)
    return [], ", ".join(notes)


def choose(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout that supports the model."""
    facts = dataclasses.asdict(model.config) | {"final_norm": isinstance(model.norm, nn.LayerNorm)}
    return supporting(layouts, facts, variant(model))


def write(model: Any, state: State, layout: Layout) -> State:
    """Converts our tensors to the names of a layout; timm's are ours."""
    if not layout.base:
        return state
    return layout.convert(split(state, "attn.qkv", "attn.kv"), model.head_names, model.config.num_classes)
