"""Builds the model that a file's header names, after comparing the header with the tensors that the file holds."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...checkpoints.tensors import check
from ..catalogue import create_model
from ..transformer import VisionTransformer

MAX_CONFIG = 65_536  # characters
TENSORS_PER_BLOCK = 4  # at least: the weights of qkv, proj, fc1 and fc2, under any names
TABLES = 2**26  # numbers in tables that are computed and not stored, such as fixed positions


class _NoDraws(TorchFunctionMode):
    """Skips `nn.init.normal_`, which on the meta device imports torch._dynamo, in 2 seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def skeleton(name: str, **options: object) -> VisionTransformer:
    """The model of `create_model` on the meta device, in milliseconds and without memory."""
    with torch.device("meta"), _NoDraws():
        return create_model(name, features_only=False, **options)


def build_model(
    tensors: Mapping[str, Tensor], name: str, config: Mapping[str, Any], layout: str | None
) -> VisionTransformer:
    """Builds the model of a header, which may ask for anything, only if the file can fill it."""
    compare(tensors, name, config, layout)
    return create_model(name, features_only=False, **config)


def compare(tensors: Mapping[str, Tensor], name: str, config: Mapping[str, Any], layout: str | None = None) -> None:
    """Raises ValueError unless a file of this layout can fill the model, which is built on the meta device."""
    characters = len(name) + len(json.dumps(config))
    if characters > MAX_CONFIG:
        raise ValueError(f"its name and config have {characters:,} characters, over {MAX_CONFIG:,}")
    depths = [config.get("depth"), *(d if isinstance(d := config.get("depths"), (list, tuple)) else [])]
    depth = sum(d for d in depths if isinstance(d, int))
    if depth * TENSORS_PER_BLOCK > len(tensors):
        raise ValueError(f"its config has depth {depth:,}, and the file {len(tensors):,} tensors")
    empty = skeleton(name, **config)
    for key, value in config.items():
        if value is None and (default := getattr(empty.config, key, None)) is not None:
            raise ValueError(f"{key} is None; leave it out, or give a value such as {default!r}")
    if layout == "fastvit_triton":
        check(empty, empty.state_dict(), dict(tensors), {}, layout)
    wanted = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    stored = sum(tensor.numel() for tensor in tensors.values())
    if wanted > 2 * stored + TABLES:
        raise ValueError(f"its config asks for {wanted:,} numbers, and the file holds {stored:,}")
