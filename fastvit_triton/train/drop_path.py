"""Stochastic depth: the rate of each block of a model."""

import re
from typing import Any

from torch import nn

from .ranges import FractionBelow1, checked

# Class names of stochastic-depth modules → names of their rate: ours and timm's, torchvision's.
_DROP_PATH_RATE = {"DropPath": ("p", "drop_prob"), "StochasticDepth": ("p",)}


@checked
def set_drop_path(model: nn.Module, last: FractionBelow1, constant: bool = False, skip: bool = False) -> list[float]:
    """Sets the stochastic-depth rate of each block of a model (Huang et al., arXiv:1603.09382, section 3, equation 4).

        rate of block i of L = last · i / (L − 1),   or `last` in all of them (DeiT III)

    Args:
        model: with `DropPath` modules in numbered blocks, which are counted through all stages (blocks.3,
            layers.2.blocks.3, block2.3). timm creates them only for rates above 0, so create its models with one.
        last: rate of the last block, in [0, 1).
        constant: the same rate in every block.
        skip: do not compute the branch for dropped images, if the model's `DropPath` supports it (ours does).

    Returns:
        The rates, one per block.

    Raises:
        ValueError: the rate is outside [0, 1), or a block with a rate above 0 has no `DropPath`.
    """
    paths = [(path, module, _block(path)) for path, module in model.named_modules()]
    kinds = {_kind(block) for _, module, block in paths if block and type(module).__name__ in _DROP_PATH_RATE}
    blocks: dict[str, list[Any]] = {}
    for path, module, block in paths:
        if path == block and _kind(path) in kinds:
            blocks[path] = []
        elif block in blocks and type(module).__name__ in _DROP_PATH_RATE:
            blocks[block].append(module)
    depth = len(blocks)
    rates = [last if constant else last * i / max(depth - 1, 1) for i in range(depth)]
    missing = [block for rate, (block, found) in zip(rates, blocks.items(), strict=True) if rate and not found]
    if missing or not blocks:
        where = f"{missing[0]} has no" if blocks else "the model has no numbered blocks with"
        raise ValueError(f"{where} DropPath; build it with drop_path_rate above 0, or leave the rate at 0")
    for rate, found in zip(rates, blocks.values(), strict=True):
        for module in found:
            attribute = next(field for field in _DROP_PATH_RATE[type(module).__name__] if hasattr(module, field))
            setattr(module, attribute, rate)
            if hasattr(module, "skip"):
                module.skip = skip
    return rates


def _block(path: str) -> str:
    """The path up to its last number, which is that of a block; empty if it has none."""
    numbers = re.match(r"(.*(?:\.|\.encoder_layer_)\d+)(?:\.\D[^.]*)*$", "." + path)
    return numbers[1][1:] if numbers else ""


def _kind(block: str) -> str:
    """The path of a block without its numbers, which all blocks of a kind share."""
    return re.sub(r"\d+", "#", block)
