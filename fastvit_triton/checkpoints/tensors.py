"""Converts a checkpoint's tensors to our shapes (packed projections, head), and checks them against a model's."""

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


def fill_counts(target: State, state: State) -> None:
    """Adds the counters of BatchNorms that a checkpoint lacks, as PyTorch does; only training may read them."""
    state |= {key: t for key, t in target.items() if key.endswith("num_batches_tracked") and key not in state}


def fit_head(heads: tuple[str, ...], target: State, state: State) -> list[str]:
    """Removes from `state` heads of another size and layers of heads that the model lacks; adds biases of zero."""
    useless = []
    for root in dict.fromkeys(f"{head.partition('.')[0]}." for head in heads):
        if not any(key.startswith(root) for key in target):
            useless += [key for key in state if key.startswith(root)]
    for head in heads:
        weight = f"{head}.weight"
        bias = f"{head}.bias"
        if weight not in target or weight not in state or target[weight].shape[:1] != state[weight].shape[:1]:
            useless += [key for key in (weight, bias) if key in state and key not in useless]
        elif bias in target and bias not in state:
            state[bias] = torch.zeros_like(target[bias])
    if "head.weight" in useless or "head.weight" not in state:
        for part in ("pre_logits.", "attn_pool."):
            if not any(key.startswith(part) for key in target):
                useless += [key for key in state if key.startswith(part)]
    for key in useless:
        del state[key]
    return useless


def check(model: nn.Module, target: State, state: State, original_keys: dict[str, str], family: str) -> None:
    """Raises WeightsError unless `state` has exactly the names and shapes of `target`."""
    missing = tuple(key for key in target if key not in state)
    unknown = tuple(original_keys.get(key, key) for key in state if key not in target)
    if missing or unknown:
        parts = [f"it lacks {some(missing, 1)}"] * bool(missing)
        parts += [f"it has {some(unknown, 1)}, which the model does not have"] * bool(unknown)
        why = f"a {family} checkpoint does not fit {variant(model)}: {' and '.join(parts)}"
        raise WeightsError(f"{why}; create the model of the checkpoint, or give its sizes as options")
    for key, wanted in target.items():
        if state[key].shape != wanted.shape:
            name = original_keys.get(key, key)
            theirs = list(state[key].shape)
            ours = list(wanted.shape)
            hint = "; create the model of the checkpoint, or give its sizes as options"
            if key in (*TOKENS, "pos_embed") and theirs[-1] != ours[-1]:
                hint = f"; create the model with embed_dim={theirs[-1]}, or of another name"
            if key == "patch_embed.proj.weight" and len(theirs) == len(ours) == 4:
                hint = f"; create the model with in_chans={theirs[1]}, patch_size={theirs[2]}, embed_dim={theirs[0]}"
            raise WeightsError(
                f"{name} is {theirs} in the {family} checkpoint, but {key} is {ours} in {variant(model)}{hint}"
            )
        if wanted.is_floating_point() and not state[key].is_floating_point():
            raise WeightsError(
                f"{original_keys.get(key, key)} holds {state[key].dtype}; expected floating-point weights"
            )


def some(names: tuple[str, ...], most: int = 4) -> str:
    """The first `most` names, comma-separated, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def variant(model: nn.Module) -> str:
    """The model's name in `create_model`, else its class name."""
    return getattr(model, "variant", type(model).__name__)
