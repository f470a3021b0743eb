"""Weights of models with other stems and stages: parameter names in other libraries, and positions of another size.

Our names are timm's, and the authors' of families that timm has not.

Sources: state dicts of timm 1.0.31; naver-ai/pit (pit.py); huawei-noah/Efficient-AI-Backbones
(tnt_pytorch/tnt.py); IBM/CrossViT (models/crossvit.py);
yitu-opensource/T2T-ViT (models/t2t_vit.py); coeusguo/ceit (ceit_model.py); facebookresearch/LeViT (levit.py);
transformers 5.23.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from ..layers import resize_pos_embed
from ..layers.pooling import resize_map
from .adapt import State, WeightsError
from .layouts import Layout


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


def fit_tnt(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of a TNT; for the arguments see `vit.fit`."""
    useless = ["outer_tokens"] * ("outer_tokens" in state)
    for key in useless:  # zeros, which the authors' code does not train
        del state[key]
    return useless, fit_table(state, target, "patch_pos", model.pixel_embed.grid_size, 1, mode)


def fit_table(state: State, target: State, key: str, grid: tuple[int, int], prefix: int, mode: str) -> str:
    """Makes the positions [1, T + h · w, D] under a key fit a grid; returns a description of the change."""
    pos = state.get(key)
    if pos is None or pos.dim() != 3 or pos.shape == target[key].shape:
        return ""
    side = math.isqrt(max(pos.shape[1] - prefix, 0))
    if not side or side * side != pos.shape[1] - prefix:
        raise WeightsError(f"{key} has {pos.shape[1]} rows, no square grid; create the model with its img_size")
    state[key] = resize_pos_embed(pos, (side, side), grid, prefix, mode)
    return f"{side}x{side} resized to {grid[0]}x{grid[1]} ({mode})"


def _from_tnt(key: str) -> str:
    for theirs, ours in TNT_NAMES.items():
        key = key.replace(theirs, ours)
    return key


def _read_tnt(state: State) -> State:
    """The authors' positions of pixels [1, h · w, c], which are square, as [1, c, h, w]."""
    pos = state["inner_pos"]
    return {**state, "inner_pos": pos.transpose(1, 2).unflatten(2, (math.isqrt(pos.shape[1]), -1))}


TNT_NAMES = {"outer_pos": "patch_pos", "inner_pos": "pixel_pos", "patch_embed": "pixel_embed"}
TNT_NAMES |= {"proj_norm1": "norm1_proj", "proj_norm2": "norm2_proj", "inner_norm1": "norm_in"}
TNT_NAMES |= {"inner_attn": "attn_in", "inner_norm2": "norm_mlp_in", "inner_mlp": "mlp_in", "outer_norm1": "norm_out"}
TNT_NAMES |= {"outer_attn": "attn_out", "outer_norm2": "norm_mlp", "outer_mlp": "mlp"}
TIMM_TNT = Layout(name="timm", mark="patch_pos", resize="bicubic_antialias")
TNT_LAYOUTS = Layout(name="TNT", mark="inner_pos", resize="bicubic", number=_from_tnt, read=_read_tnt), TIMM_TNT


def fit_branches(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grids of a CrossViT; for the arguments see `vit.fit`."""
    grids = [embed.grid_size for embed in model.patch_embed]
    notes = [fit_table(state, target, f"pos_embed_{i}", grid, 1, mode) for i, grid in enumerate(grids)]
    return [], ", ".join(note for note in notes if note)


def fit_levit(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Drops heads that the model has not, and tables of indices; for the arguments see `vit.fit`."""
    absent = [key for key in state if key.startswith(("head.", "head_dist.")) and key not in target]
    useless = [key for key in state if key.endswith("attention_bias_idxs")] + absent
    for key in useless:
        del state[key]
    return useless, ""


def _flat(state: State) -> State:
    """Convolutions of 1 x 1 pixels, but in the stem, as linear layers."""
    return {k: t.flatten(1) if t.dim() == 4 and not k.startswith("stem.") else t for k, t in state.items()}


LAYER = re.compile(r"(?:encoder\.stages\.(\d+)\.layers|blocks)\.(\d+)\.(?:m\.|module\.)?(.+)")
INSIDE = {
    "q.1": "q.ln",
    "proj.1": "proj.ln",
    "0": "ln1",
    "2": "ln2",
}  # the authors' names in a layer, then transformers'
INSIDE |= {"queries_keys_values": "qkv", "keys_values": "kv", "queries": "q.ln", "projection": "proj.ln"}
INSIDE |= {"linear_up": "ln1", "linear_down": "ln2"}
LEAVES = {"c": "linear", "l": "linear", "convolution": "linear", "batch_norm": "bn"}
LEVIT_HEADS = {"classifier": "head", "classifier_distill": "head_dist"}


def _from_levit(key: str) -> str:
    """Names of a layer, of the stem and of the heads; the layers keep their numbers."""
    found = LAYER.fullmatch(key)
    head, inside = (key[: found.start(3)], found[3]) if found else ("", key)
    if inside.count(".") < 2:
        return key
    module, part, leaf = inside.rsplit(".", 2)
    if conv := re.fullmatch(r"(patch_embed\.|patch_embeddings\.embedding_layer_)(\d+)", module):
        number = int(conv[2])
        module = f"stem.conv{number // 2 + 1 if conv[1] == 'patch_embed.' else number}"
    module = (INSIDE if found else LEVIT_HEADS).get(module, module)
    return f"{head}{module}.{LEAVES.get(part, part)}.{leaf}"


def _read_levit(state: State) -> State:
    """Attentions and MLPs are one list of layers for the authors, and one per stage in transformers; each attention
    with a stride ends a stage there and begins the next one in timm, with the MLP after it."""
    layers: dict[tuple[int, int], dict[str, Any]] = {}
    read: State = {}
    for key, tensor in state.items():
        key = _from_levit(key)
        if found := LAYER.fullmatch(key):
            layers.setdefault((int(found[1] or 0), int(found[2])), {})[found[3]] = tensor
        else:
            read[key] = tensor
    stage, block = 0, -1
    for _, layer in sorted(layers.items()):
        if "kv.linear.weight" in layer:
            stage, block, home = stage + 1, -1, f"stages.{stage + 1}.downsample.attn_downsample"
        elif "qkv.linear.weight" in layer:
            block, home = block + 1, f"stages.{stage}.blocks.{block + 1}.attn"
        else:
            home = f"stages.{stage}.downsample.mlp" if block < 0 else f"stages.{stage}.blocks.{block}.mlp"
        read |= {f"{home}.{name}": tensor for name, tensor in layer.items()}
    return read


LEVIT: dict[str, Any] = dict(resize="bicubic", read=_read_levit)
TIMM_LEVIT = Layout(name="timm", mark="stem.conv1.linear.weight", resize="bicubic", read=_flat)
LEVIT_LAYOUTS = (
    Layout(name="transformers LeViT", mark="patch_embeddings.embedding_layer_1.convolution.weight", **LEVIT),
    Layout(name="LeViT", mark="patch_embed.0.c.weight", **LEVIT),
    TIMM_LEVIT,
)


def fit_t2t(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Takes the model's fixed positions where those of `state` are for another size; see `vit.fit`."""
    pos = state.get("pos_embed")
    if pos is None or pos.shape == target["pos_embed"].shape or pos.shape[2:] != target["pos_embed"].shape[2:]:
        return [], ""
    state["pos_embed"] = target["pos_embed"]
    return [], f"sinusoids for {pos.shape[1]} tokens replaced by those for {target['pos_embed'].shape[1]}"


def fit_ceit(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> tuple[list[str], str]:
    """Makes the positions of `state` fit the grid of a CeiT; for the arguments see `vit.fit`."""
    side, (height, width) = model.config.patch_size[0], model.config.img_size
    return [], fit_table(state, target, "pos_embed", (height // side, width // side), 1, mode)


CEIT = Layout(name="CeiT", mark="i2t.proj.weight", resize="bicubic")
T2T = Layout(name="T2T-ViT", mark="tokens_to_token.project.weight", resize="bicubic")

CROSS: dict[str, Any] = dict(beside="blocks.0.revert_projs.0.0.weight", resize="bicubic_antialias")
TIMM_CROSS = Layout(name="timm", mark="pos_embed_0", **CROSS)
CROSS_LAYOUTS = (
    TIMM_CROSS,
    Layout(
        name="CrossViT",
        mark="pos_embed.0",
        number=lambda key: re.sub(r"^(pos_embed|cls_token)\.", r"\1_", key),
        **CROSS,
    ),
)

ROWS: dict[str, tuple] = {  # see `Spelling`
    "pit": ("PiT", PIT_LAYOUTS, fit_map, {"timm": (TIMM_PIT,)}),
    "crossvit": ("CrossViT", CROSS_LAYOUTS, fit_branches, {"timm": (TIMM_CROSS,)}),
    "levit": ("LeViT", LEVIT_LAYOUTS, fit_levit, {"timm": (TIMM_LEVIT,)}),
    "t2t": ("T2T-ViT", (T2T,), fit_t2t),
    "ceit": ("CeiT", (CEIT,), fit_ceit),
    "tnt": ("TNT", TNT_LAYOUTS, fit_tnt, {"timm": (TIMM_TNT,)}),
}
