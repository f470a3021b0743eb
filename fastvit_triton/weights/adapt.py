"""Makes a checkpoint's tensors fit a model: packed projections, head, stem, positions; and says what does not fit."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.embed import resize_pos_embed

State = dict[str, Tensor]

TOKENS = ("cls_token", "dist_token", "reg_token")  # prefix tokens in their order
PARTS = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn_pool.qkv": ("attn_pool.q", "attn_pool.k", "attn_pool.v"),
    "attn_pool.kv": ("attn_pool.k", "attn_pool.v"),
    "mlp.fc1": ("mlp.gate", "mlp.up"),  # of a SwiGLU, gate first
    "mlp.fc2": ("mlp.down",),
}


class WeightsError(ValueError):
    """A checkpoint that cannot be read, does not fit or cannot be written; the message says why and what would do."""


def join(state: State, *wholes: str) -> State:
    """Stacks parts, such as q, k and v [H·d, D] to qkv [3·H·d, D], wherever all parts are there."""
    state = dict(state)
    for whole in wholes:
        first, *_ = parts = PARTS[whole]
        for key in [key for key in state if f".{key}".rpartition(".")[0].endswith(f".{first}")]:
            keys = [key.replace(first, part) for part in parts]
            if all(key in state for key in keys):
                state[key.replace(first, whole)] = torch.cat([state.pop(key) for key in keys])
    return state


def split(state: State, *wholes: str) -> State:
    """The inverse of `join`."""
    out = {}
    for key, tensor in state.items():
        if whole := next((w for w in wholes if f".{key}".rpartition(".")[0].endswith(f".{w}")), None):
            pieces = tensor.chunk(len(PARTS[whole]))
            out |= {key.replace(whole, part): t.clone() for part, t in zip(PARTS[whole], pieces, strict=True)}
        else:
            out[key] = tensor
    return out


def read_jax(tensors: State) -> State:
    """Kernels [in, out], [D, H, d], [H, d, D] and [P, P, C, D] → weights; stacked blocks → single ones."""
    single = {}
    for key, tensor in _name_resnet(tensors).items():
        stacked = ".encoderblock." in key
        for i, one in enumerate(tensor if stacked else [tensor]):
            single[key.replace(".encoderblock.", f".encoderblock_{i}.")] = one
    out = {}
    for key, tensor in single.items():
        module, _, leaf = key.rpartition(".")
        if module.endswith((".query", ".key", ".value")):
            tensor = tensor.flatten(tensor.dim() - 2)
        if leaf == "kernel":
            tensor = tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.flatten(0, -2).T
        elif tensor.dim() == 4 and module.startswith("patch_embed."):
            tensor = tensor.flatten()  # GroupNorm [1, 1, 1, C]
        out[f"{module}.weight" if leaf in ("kernel", "scale") else key] = tensor
    return out


def _name_resnet(tensors: State) -> State:
    """The names of a hybrid's ResNet; block1.unit1 is our stages.0.blocks.0."""
    deep = any(key.startswith("block1.") for key in tensors)
    root = "patch_embed.backbone.stem." if deep else "patch_embed.backbone."
    out = {}
    for key, tensor in tensors.items():
        if found := re.fullmatch(r"(conv|gn)_root\.(\w+)", key):
            key = f"{root}{found[1]}.{found[2]}"
        elif found := re.fullmatch(r"block(\d+)\.unit(\d+)\.(conv|gn)(\d|_proj)\.(\w+)", key):
            stage, unit = int(found[1]) - 1, int(found[2]) - 1
            module = f"downsample.{found[3]}" if found[4] == "_proj" else found[3] + found[4]
            key = f"patch_embed.backbone.stages.{stage}.blocks.{unit}.{module}.{found[5]}"
        out[re.sub(r"\bgn", "norm", key)] = tensor
    return out


def write_tower(tensors: State) -> State:
    """Positions and class token without leading axes of one: [N, D] and [D]."""
    keep = {"embeddings.position_embedding.weight": (0, 1), "embeddings.class_embedding": (0, 2)}
    return {key: tensor.flatten(*keep[key]) if key in keep else tensor for key, tensor in tensors.items()}


def write_clip(tensors: State) -> State:
    """The projection has no bias; ours is zero, as `needs` asks."""
    return {key: tensor for key, tensor in write_tower(tensors).items() if key != "visual_projection.bias"}


def read_dinov2(tensors: State) -> State:
    """The classifier [K, 2·D] reads the class token and the patch mean; ours [K, D] the class token."""
    weight, width = tensors.get("classifier.weight"), tensors["embeddings.cls_token"].shape[-1]
    if weight is None or weight.shape[1] != 2 * width or weight[:, width:].any():
        return tensors
    return {**tensors, "classifier.weight": weight[:, :width]}


def write_dinov2(tensors: State) -> State:
    """The inverse: zeros for the patch mean, and the mask token of pre-training."""
    tensors = {**tensors, "embeddings.mask_token": torch.zeros_like(tensors["embeddings.cls_token"][0])}
    if (weight := tensors.get("classifier.weight")) is not None:
        tensors["classifier.weight"] = torch.cat((weight, torch.zeros_like(weight)), 1)
    return tensors


def fit_head(target: State, state: State) -> list[str]:
    """Takes out of `state` heads for other classes, and what only leads to a head; completes a head without bias."""
    useless = []
    for head in ("head", "head_dist"):
        weight, bias = f"{head}.weight", f"{head}.bias"
        if weight not in target or weight not in state or target[weight].shape[:1] != state[weight].shape[:1]:
            useless += [key for key in (weight, bias) if key in state]
        elif bias in target and bias not in state:
            state[bias] = torch.zeros_like(target[bias])
    if "head.weight" in useless or "head.weight" not in state:
        for part in ("pre_logits.", "attn_pool."):
            if not any(key.startswith(part) for key in target):
                useless += [key for key in state if key.startswith(part)]
    for key in useless:
        del state[key]
    return useless


def fit_norm(target: State, state: State) -> list[str]:
    """Takes the final norm out of a checkpoint without a head, for a model that pools before it normalises.

    The model's own norm starts as it is, as in MAE's fine-tuning (facebookresearch/mae, main_finetune.py).
    """
    moved = "fc_norm.weight" in target and "fc_norm.weight" not in state and "norm.weight" not in target
    useless = [key for key in ("norm.weight", "norm.bias") if key in state and moved and "head.weight" not in state]
    for key in useless:
        del state[key]
        state[f"fc_{key}"] = target[f"fc_{key}"].clone()
    return useless


def fit_stem(model: nn.Module, state: State) -> None:
    """A convolution's weight [D, C, P, P] for a stem that projects flattened patches [D, P·P·C]."""
    weight = state.get("patch_embed.proj.weight")
    if model.config.patch_embed != "conv" and weight is not None and weight.dim() == 4:
        state["patch_embed.proj.weight"] = weight.permute(0, 2, 3, 1).flatten(1)


def fit_positions(model: nn.Module, state: State, metadata: Mapping[str, str], mode: str) -> str:
    """Brings `state["pos_embed"]` [1, T + h·w, D] to the model's prefix and grid; says what was done."""
    own, pos = model.pos_embed, state.get("pos_embed")
    if not isinstance(own, Tensor) or pos is None or pos.shape[::2] != own.shape[::2]:
        return ""  # nothing to fit, or a mismatch that `check` names
    (h, w), notes = model.patch_embed.grid_size, []
    wanted = own.shape[1] - h * w
    given, old = _source_grid(pos.shape[1], (h, w), (wanted, 0, 1, model.num_prefix_tokens), metadata)
    rows = sum(state[name].shape[1] for name in TOKENS if name in state and state[name].shape[::2] == pos.shape[::2])
    if wanted < given and rows < given:
        return ""  # a token is missing or has another width: likewise
    if given != wanted:
        state |= move_prefix(state, given, wanted)
        notes.append(f"prefix rows {given} to {wanted}, the difference moved into the tokens")
    if old != (h, w):
        state["pos_embed"] = resize_pos_embed(state["pos_embed"], old, (h, w), wanted, mode)
        notes.append(f"{old[0]}x{old[1]} resized to {h}x{w} ({mode})")
    if not isinstance(own, nn.Parameter):  # a fixed table: nothing to load if both are the same in the coarser dtype
        pos = state["pos_embed"]
        if torch.allclose(pos.to(own).to(pos).float(), own.to(pos).float(), atol=1e-5):
            del state["pos_embed"]
    return ", ".join(notes)


def _source_grid(
    rows: int, grid: tuple[int, int], prefixes: tuple[int, ...], metadata: Mapping[str, str]
) -> tuple[int, tuple[int, int]]:
    """Prefix rows and (h, w) of a table: as its config says, else the model's own grid, else a square."""
    with suppress(ValueError, LookupError, TypeError):  # absent, or somebody else's
        config = json.loads(metadata["config"])
        h, w = (side // patch for side, patch in zip(config["img_size"], config["patch_size"], strict=True))
        if rows - h * w in prefixes:
            return rows - h * w, (h, w)
    for prefix in prefixes:
        if rows - prefix == grid[0] * grid[1]:
            return prefix, grid
    for prefix in prefixes:
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return prefix, (side, side)
    raise WeightsError(
        f"pos_embed has {rows} rows in the checkpoint, no square grid after {min(prefixes)} to {max(prefixes)} prefix "
        f"tokens, and {grid[0]}x{grid[1]} patches in the model; create the model with the checkpoint's img_size"
    )


def move_prefix(state: State, given: int, wanted: int) -> State:
    """Exactly the same sum of tokens and positions with `wanted` instead of `given` prefix rows in pos_embed."""
    pos = state["pos_embed"]
    if wanted >= given:
        zeros = pos.new_zeros(1, wanted - given, pos.shape[2])
        return {**state, "pos_embed": torch.cat((pos[:, :given], zeros, pos[:, given:]), 1)}
    names = [name for name in TOKENS if name in state]
    sizes = [state[name].shape[1] for name in names]
    extra = F.pad(pos[:, wanted:given], (0, 0, wanted, max(0, sum(sizes) - given)))
    moved = {name: state[name] + rows for name, rows in zip(names, extra.split(sizes, 1), strict=True)}
    return {**state, **moved, "pos_embed": torch.cat((pos[:, :wanted], pos[:, given:]), 1)}


def check(model: nn.Module, target: State, state: State, spelled: dict[str, str], family: str) -> None:
    """Raises WeightsError unless `state` has exactly the names and shapes of `target`."""
    missing = tuple(key for key in target if key not in state)
    unknown = tuple(spelled.get(key, key) for key in state if key not in target)
    if missing or unknown:
        parts = [f"it lacks {some(missing, 1)}"] * bool(missing)
        parts += [f"it has {some(unknown, 1)}, for which the model has no place"] * bool(unknown)
        raise WeightsError(f"a {family} checkpoint does not fit {variant(model)}: {' and '.join(parts)}")
    for key, wanted in target.items():
        if state[key].shape != wanted.shape:
            name, theirs, ours = spelled.get(key, key), list(state[key].shape), list(wanted.shape)
            hint = ""
            if key == "patch_embed.proj.weight" and len(theirs) == len(ours) == 4:
                hint = f"; create the model with in_chans={theirs[1]}, patch_size={theirs[2]}, embed_dim={theirs[0]}"
            raise WeightsError(
                f"{name} is {theirs} in the {family} checkpoint, but {key} is {ours} in {variant(model)}{hint}"
            )
        if not state[key].is_floating_point():
            raise WeightsError(f"{spelled.get(key, key)} holds {state[key].dtype}; expected floating-point weights")


def some(names: tuple[str, ...], most: int = 4) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def variant(model: nn.Module) -> str:
    """The name the model was created by, else its class."""
    return getattr(model, "variant", type(model).__name__)
