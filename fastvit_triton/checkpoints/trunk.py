"""Models of timm as image towers of open_clip: `visual.trunk.…`, and the projection beside it, `visual.head.proj.…`."""

import re

import torch

from .tensors import State, WeightsError

TRUNK, PROJECTION = "trunk.", "head.proj."


def take_trunk(tensors: State, heads: tuple[str, ...]) -> tuple[State, list[str]]:
    """The tower under timm's names, with the projection as its classifier, and the keys of what is beside it.

    Args:
        tensors: a checkpoint; one without a trunk is returned as it is.
        heads: names of the model's classifiers.

    Raises:
        WeightsError: the tower has a head of its own that is no linear projection.
    """
    prefix = next(
        (match[1] for key in tensors if (match := re.match(r"((?:module\.)?(?:visual\.)?)trunk\.", key))), None
    )
    if prefix is None:
        return tensors, []
    trunk, projection = prefix + TRUNK, prefix + PROJECTION
    taken = {key.removeprefix(trunk): tensor for key, tensor in tensors.items() if key.startswith(trunk)}
    own = (key for key in tensors if key.startswith(f"{prefix}head.") and not key.startswith(projection))
    if (other := next(own, None)) is not None:
        raise WeightsError(f"the checkpoint's {other} is no linear projection, which is the only head that is read")
    weight = tensors.get(f"{projection}weight")
    if weight is not None and heads:
        taken[f"{heads[0]}.weight"] = weight
        taken[f"{heads[0]}.bias"] = tensors.get(f"{projection}bias", torch.zeros(len(weight), dtype=weight.dtype))
    return taken, [key for key in tensors if not key.startswith((trunk, projection))]


def give_trunk(state: State, heads: tuple[str, ...]) -> State:
    """The inverse of `take_trunk`, with the prefix "visual."; a bias that is zero is left out, as most have none."""
    head = f"{heads[0]}." if heads else None
    given = {}
    for key, tensor in state.items():
        if head is None or not key.startswith(head):
            given[f"visual.{TRUNK}{key}"] = tensor
        elif key != f"{head}bias" or tensor.any():
            given[f"visual.{PROJECTION}{key.removeprefix(head)}"] = tensor
    return given
