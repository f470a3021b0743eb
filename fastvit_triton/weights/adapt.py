"""Converts a checkpoint's tensors to our shapes (packed projections, JAX, head), and checks them against a model."""

import re

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

TOKENS = ("cls_token", "dist_token", "reg_token")  # prefix tokens, in order
PARTS = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.kv": ("attn.key", "attn.value"),
    "attn_pool.qkv": ("attn_pool.q", "attn_pool.k", "attn_pool.v"),
    "attn_pool.kv": ("attn_pool.k", "attn_pool.v"),
    "mlp.fc1": ("mlp.gate", "mlp.up"),  # of a SwiGLU, gate first
    "mlp.fc2": ("mlp.down",),
}


class WeightsError(ValueError):
    """A checkpoint cannot be read, loaded into the model, or written; the message states the cause and a remedy."""


def join(state: State, *wholes: str) -> State:
    """Concatenates parts, such as q, k and v [H·d, D] to qkv [3·H·d, D], if all parts are present."""
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
    out: State = {}
    for key, tensor in state.items():
        if whole := next((w for w in wholes if f".{key}".rpartition(".")[0].endswith(f".{w}")), None):
            pieces = tensor.chunk(len(PARTS[whole]))
            out |= {key.replace(whole, part): t.clone() for part, t in zip(PARTS[whole], pieces, strict=True)}
        else:
            out[key] = tensor
    return out


def read_jax(tensors: State) -> State:
    """Converts JAX kernels [in, out], [D, H, d], [H, d, D] and [P, P, C, D] to weights, and unstacks blocks."""
    single = {}
    for key, tensor in _name_resnet(tensors).items():
        stacked = ".encoderblock." in key and tensor.numel()  # an empty tensor may have any number of rows
        for i, one in enumerate(tensor if stacked else [tensor]):
            single[key.replace(".encoderblock.", f".encoderblock_{i}.")] = one
    out: State = {}
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
    """Renames the tensors of a hybrid model's ResNet; block1.unit1 becomes our stages.0.blocks.0."""
    deep = any(key.startswith("block1.") for key in tensors)
    root = "patch_embed.backbone.stem." if deep else "patch_embed.backbone."
    out: State = {}
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
    """Removes leading axes of length 1 from positions, to [N, D], and class token, to [D]."""
    keep = {"embeddings.position_embedding.weight": (0, 1), "embeddings.class_embedding": (0, 2)}
    return {key: tensor.flatten(*keep[key]) if key in keep else tensor for key, tensor in tensors.items()}


def write_clip(tensors: State) -> State:
    """`write_tower` without the bias of the projection, which CLIP lacks; ours is zero, see `CLIP.needs`."""
    return {key: tensor for key, tensor in write_tower(tensors).items() if key != "visual_projection.bias"}


def read_dinov2(tensors: State) -> State:
    """Reduces the classifier [K, 2·D] to the class token's half [K, D] if the patch mean's half is zero."""
    weight, width = tensors.get("classifier.weight"), tensors["embeddings.cls_token"].shape[-1]
    if weight is None or weight.shape[1] != 2 * width or weight[:, width:].any():
        return tensors
    return {**tensors, "classifier.weight": weight[:, :width]}


def write_dinov2(tensors: State) -> State:
    """The inverse of `read_dinov2`: adds a zero half for the patch mean, and a zero mask token."""
    tensors = {**tensors, "embeddings.mask_token": torch.zeros_like(tensors["embeddings.cls_token"][0])}
    if (weight := tensors.get("classifier.weight")) is not None:
        tensors["classifier.weight"] = torch.cat((weight, torch.zeros_like(weight)), 1)
    return tensors


def read_naflex(tensors: State) -> State:
    """Flattens positions [1, h, w, D] to [1, h·w, D]."""
    key = "embeds.pos_embed"
    return {**tensors, key: tensors[key].flatten(1, 2)} if tensors[key].dim() == 4 else tensors


def fill_counts(target: State, state: State) -> None:
    """Adds the counters of BatchNorms that a checkpoint lacks, as PyTorch does; only training may read them."""
    state |= {key: t for key, t in target.items() if key.endswith("num_batches_tracked") and key not in state}


def fit_head(heads: tuple[str, ...], target: State, state: State) -> list[str]:
    """Removes from `state` heads of another size and layers used only by a head; adds missing biases of zero.

    Returns:
        The removed keys.
    """
    useless = []
    for head in heads:
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


def check(model: nn.Module, target: State, state: State, spelled: dict[str, str], family: str) -> None:
    """Raises WeightsError unless `state` has exactly the names and shapes of `target`."""
    missing = tuple(key for key in target if key not in state)
    unknown = tuple(spelled.get(key, key) for key in state if key not in target)
    if missing or unknown:
        parts = [f"it lacks {some(missing, 1)}"] * bool(missing)
        parts += [f"it has {some(unknown, 1)}, which the model does not have"] * bool(unknown)
        why = f"a {family} checkpoint does not fit {variant(model)}: {' and '.join(parts)}"
        raise WeightsError(f"{why}; create the model of the checkpoint, or give its sizes as options")
    for key, wanted in target.items():
        if state[key].shape != wanted.shape:
            name, theirs, ours = spelled.get(key, key), list(state[key].shape), list(wanted.shape)
            hint = "; create the model of the checkpoint, or give its sizes as options"
            if key in (*TOKENS, "pos_embed") and theirs[-1] != ours[-1]:
                hint = f"; create the model with embed_dim={theirs[-1]}, or of another name"
            if key == "patch_embed.proj.weight" and len(theirs) == len(ours) == 4:
                hint = f"; create the model with in_chans={theirs[1]}, patch_size={theirs[2]}, embed_dim={theirs[0]}"
            raise WeightsError(
                f"{name} is {theirs} in the {family} checkpoint, but {key} is {ours} in {variant(model)}{hint}"
            )
        if wanted.is_floating_point() and not state[key].is_floating_point():
            raise WeightsError(f"{spelled.get(key, key)} holds {state[key].dtype}; expected floating-point weights")


def some(names: tuple[str, ...], most: int = 4) -> str:
    """The first `most` names, comma-separated, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def variant(model: nn.Module) -> str:
    """The model's name in `create_model`, else its class name."""
    return getattr(model, "variant", type(model).__name__)
