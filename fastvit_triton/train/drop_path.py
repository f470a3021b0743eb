"""Stochastic depth: the rate of each block of a model."""

import re
from typing import Any

from torch import nn

from .ranges import FractionBelow1, checked

# Class names of stochastic-depth modules → names of their rate: ours and timm's, torchvision's.
_DROP_PATH_RATE = {"DropPath": ("p", "drop_prob"), "StochasticDepth": ("p",)}
_BLOCK_NUMBER = re.compile(r"(^|\.)(?:blocks|layers?|encoder_layer)[._](\d+)(\.|$)")


@checked
def set_drop_path(model: nn.Module, last: FractionBelow1, constant: bool = False, skip: bool = False) -> list[float]:
    """Sets the stochastic-depth rate of each block of a model (Huang et al., arXiv:1603.09382, section 3, equation 4).

        rate of block i of L = last · i / (L − 1),   or `last` in all of them (DeiT III)

    Args:
        model: with `DropPath` modules in numbered blocks (blocks.3, layers.3). timm creates them only for rates above
            0, so create its models with a rate above 0.
        last: rate of the last block, in [0, 1).
        constant: the same rate in every block.
        skip: do not compute the branch for dropped images, if the model's `DropPath` supports it (ours does).

    Returns:
        The rates, one per block.

    Raises:
        ValueError: the rate is outside [0, 1), or a block with a rate above 0 has no `DropPath`.
    """
    blocks: dict[int, list[Any]] = {}
    for name, module in model.named_modules():
        if match := _BLOCK_NUMBER.search(name):
            in_block = blocks.setdefault(int(match[2]), [])
            if type(module).__name__ in _DROP_PATH_RATE:
                in_block.append(module)
    depth = len(blocks)
    rates = [last if constant else last * i / max(depth - 1, 1) for i in range(depth)]
    missing = [i for i in range(depth) if rates[i] and not blocks[i]]
    if missing or not blocks:
        where = f"block {missing[0]} has" if blocks else "the model has no numbered blocks with"
        raise ValueError(f"{where} {'no' if blocks else 'any'} DropPath; build it with drop_path_rate above 0")
    for i, rate in enumerate(rates):
        for module in blocks[i]:
            attribute = next(field for field in _DROP_PATH_RATE[type(module).__name__] if hasattr(module, field))
            setattr(module, attribute, rate)
            if hasattr(module, "skip"):
                module.skip = skip
    return rates
