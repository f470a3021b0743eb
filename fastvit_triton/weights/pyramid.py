"""Weights of hierarchical models: parameter names in other libraries, and tables of positions of another size.

Our names are timm's, and for PVT the authors'. Libraries also number the stages differently: a layout's `number` comes
first, and its tables then translate the rest.

Sources: state dicts of timm 1.0.31, transformers 4.56 and 5.23, torchvision 0.28; microsoft/Swin-Transformer
(models/swin_transformer.py), whai362/PVT (classification/pvt.py).
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from ..layers import resize_pos_embed, resize_table
from ..layers.embed import sides
from .adapt import State, WeightsError, split, variant
from .layouts import Layout
from .vit import supporting

TABLE = ".relative_position_bias_table"


def _merges_last(key: str) -> str:
    """Patch merging ends a stage, and begins the next one in timm."""
    return re.sub(r"^(encoder\.)?layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[2]) + 1}.downsample", key)


def _from_torchvision(key: str) -> str:
    """Stem, stages and mergings are numbered together: features.1 is stage 0, features.2 the merging of stage 1."""
    if found := re.fullmatch(r"features\.(\d+)\.(.+)", key):
        n, rest = int(found[1]), found[2]
        if n == 0:
            return {"0": "patch_embed.proj", "2": "patch_embed.norm"}.get(rest[0], rest) + rest[1:]
        return f"layers.{n // 2}.{'blocks' if n % 2 else 'downsample'}.{rest}"
    return key


def _from_pvt(key: str) -> str:
    """Stages are numbered from 1 by the authors."""
    if found := re.fullmatch(r"encoder\.(block|patch_embeddings)\.(\d+)\.(.+)", key):
        stage, rest = int(found[2]) + 1, found[3]
        if found[1] == "block":
            return f"block{stage}.{rest}"
        rest = rest.replace("projection.", "proj.").replace("layer_norm.", "norm.")
        return {"cls_token": rest, "position_embeddings": f"pos_embed{stage}"}.get(rest, f"patch_embed{stage}.{rest}")
    return key


def _write_swin(tensors: State) -> State:
    """The inverse of `_merges_last`."""

    def name(key: str) -> str:
        return re.sub(r"^layers\.(\d+)\.downsample", lambda m: f"encoder.layers.{int(m[1]) - 1}.downsample", key)

    return {name(key): tensor for key, tensor in tensors.items()}


def _write_pvt(tensors: State) -> State:
    """The inverse of `_from_pvt`; the class token is in the last stage."""
    last = max(int(found[1]) for key in tensors if (found := re.match(r"patch_embed(\d+)\.", key)))
    parts = {"proj": "projection", "norm": "layer_norm"}

    def name(key: str) -> str:
        if key == "cls_token":
            return f"encoder.patch_embeddings.{last - 1}.cls_token"
        found = re.fullmatch(r"(block|patch_embed|pos_embed)(\d+)\.?(.*)", key)
        if found is None:
            return key
        stage, rest = int(found[2]) - 1, found[3]
        if found[1] == "block":
            return f"encoder.block.{stage}.{rest}"
        module, _, leaf = rest.partition(".")
        rest = f"{parts[module]}.{leaf}" if module else "position_embeddings"
        return f"encoder.patch_embeddings.{stage}.{rest}"

    return {name(key): tensor for key, tensor in tensors.items()}


HEAD = {"head.fc": "head.fc head"}
SWIN: dict[str, Any] = dict(resize="bilinear", home="layers.{}.blocks.{}", blocks="layers.{}.blocks.{}")
TIMM_SWIN = Layout(
    name="timm", mark=f"layers.0.blocks.0.attn{TABLE}", beside="patch_embed.proj.weight", stem=HEAD, **SWIN
)
SWIN_LAYOUTS = (
    Layout(
        name="torchvision Swin",
        mark="features.0.0.weight",
        number=_from_torchvision,
        stem=HEAD,
        block={"mlp.fc{1,2}": "mlp.{0,3}"},
        **SWIN,
    ),
    Layout(
        name="transformers Swin",
        mark="embeddings.patch_embeddings.projection.weight",
        number=_merges_last,
        stem={
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
        write=_write_swin,
        base="swin.",
        needs=dict(final_norm=True, global_pool="avg", eps=1e-5, always_partition=False),
        **SWIN | dict(blocks="encoder.layers.{}.blocks.{}"),
    ),
    Layout(
        name="Swin",
        mark="layers.0.downsample.reduction.weight",
        beside="patch_embed.proj.weight",
        number=_merges_last,
        stem=HEAD,
        **SWIN,
    ),
    TIMM_SWIN,
)
TIMM_TWINS = Layout(
    name="timm", mark="pos_block.0.proj.0.weight", resize="bilinear", home="blocks.{}.{}", blocks="blocks.{}.{}"
)
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
SWIN_SAVED: dict[str, tuple[Layout, ...]] = {"timm": (TIMM_SWIN,), "transformers": (SWIN_LAYOUTS[1],)}
PVT_SAVED: dict[str, tuple[Layout, ...]] = {"transformers": (PVT_LAYOUTS[0],)}


def fit_tables(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the bias tables of `state` fit the windows of a Swin; for the arguments see `vit.fit`."""
    notes = set()
    for key in [key for key in target if key.endswith(TABLE) and key in state]:
        rows, new = len(state[key]), model.get_submodule(key.removesuffix(TABLE)).window.size
        if rows == len(target[key]) or state[key].dim() != 2:
            continue
        side = math.isqrt(rows)
        if side * side != rows or not side % 2:
            raise WeightsError(f"{key} has {rows} rows, no square window; create the model with its window_size")
        old = (side // 2 + 1, side // 2 + 1)
        state[key] = resize_table(state[key], old, new)
        notes.add(f"windows of {old[0]}x{old[1]} resized to {new[0]}x{new[1]}")
    return [], ", ".join(sorted(notes))


def fit_positions(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of each stage of a PVT; for the arguments see `vit.fit`."""
    notes = []
    for i, T in enumerate(model.prefix_tokens):
        key, (h, w) = f"pos_embed{i + 1}", getattr(model, f"patch_embed{i + 1}").grid_size
        if key not in state or state[key].shape == target[key].shape or state[key].dim() != 3:
            continue
        old = _grid(state[key].shape[1] - T, i, metadata)
        if old is None:
            rows = state[key].shape[1]
            raise WeightsError(f"{key} has {rows} rows, no square grid; create the model with its img_size")
        state[key] = resize_pos_embed(state[key], old, (h, w), T, mode)
        notes.append(f"{old[0]}x{old[1]} resized to {h}x{w} ({mode})")
    return [], ", ".join(notes)


def _grid(patches: int, stage: int, metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """(h, w) of a table: from the file's config, else a square; None if there is none."""
    with suppress(ValueError, LookupError, TypeError):  # no config, or one of another library
        config = json.loads(metadata["config"])
        h, w = (side // (p << stage) for side, p in zip(config["img_size"], config["patch_size"], strict=True))
        if h * w == patches:
            return h, w
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def keep(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Changes nothing: no tensor of a Twins depends on the size of the image."""
    return [], ""


def choose(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The first layout that supports the model.

    Raises:
        WeightsError: none of them does.
    """
    facts = dataclasses.asdict(model.config) | {"final_norm": isinstance(model.norm, nn.LayerNorm)}
    return supporting(layouts, facts, variant(model))


def choose_pvt(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout of transformers, if the images are square.

    Raises:
        WeightsError: they are not, or the layout does not support the model.
    """
    layout, size = choose(model, layouts), model.config.img_size
    if size[0] != size[1]:
        sides = "x".join(map(str, size))
        raise WeightsError(f"{variant(model)} cannot be written so: {layout.name} needs square images, not {sides}")
    return layout


def choose_swin(model: Any, layouts: tuple[Layout, ...]) -> Layout:
    """The layout of timm, or that of transformers if all windows are those of transformers.

    Raises:
        WeightsError: they are not, or the layout does not support the model.
    """
    layout = choose(model, layouts)
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


def write(model: Any, state: State, layout: Layout) -> State:
    """Converts our tensors to the names of a layout; timm's are ours."""
    if not layout.base:
        return state
    return layout.convert(split(state, "attn.qkv", "attn.kv"), model.head_names, model.config.num_classes)


ROWS: dict[str, tuple] = {  # see `Spelling`
    "swin": ("Swin", SWIN_LAYOUTS, fit_tables, SWIN_SAVED, choose_swin, write),
    "twins": ("Twins", (TIMM_TWINS,), keep, {"timm": (TIMM_TWINS,)}),
    "pvt": ("PVT", PVT_LAYOUTS, fit_positions, PVT_SAVED, choose_pvt, write),
}
