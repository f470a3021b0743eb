"""Stochastic depth, set on a model that is already built."""

import re

from torch import nn

from .ranges import Share, checked

RATE = {"DropPath": ("p", "drop_prob"), "StochasticDepth": ("p",)}  # ours and timm's, torchvision's
_NUMBER = re.compile(r"(^|\.)(?:blocks|layers?|encoder_layer)[._](\d+)(\.|$)")


@checked
def set_drop_path(model: nn.Module, last: Share, constant: bool = False, skip: bool = False) -> list[float]:
    """Sets the rate at which each block skips its branches (Huang et al., arXiv:1603.09382, section 3, equation 4).

        rate of block i of L = last · i / (L − 1),   or `last` in all of them (DeiT III)

    Args:
        model: with `DropPath` modules in numbered blocks (blocks.3, layers.3). timm builds none where the rate is 0:
            build such a model with a rate above 0.
        last: rate of the last block, in [0, 1).
        constant: the same rate in every block.
        skip: dropped images are left out of a branch's work, where the model's own `DropPath` can (ours can).

    Returns:
        The rates, block by block.

    Raises:
        ValueError: the rate is outside [0, 1), or the model has nothing to set in some block.
    """
    blocks: dict[int, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if found := _NUMBER.search(name):
            own = blocks.setdefault(int(found[2]), [])
            if type(module).__name__ in RATE:
                own.append(module)
    depth = len(blocks)
    rates = [last if constant else last * i / max(depth - 1, 1) for i in range(depth)]
    missing = [i for i in range(depth) if rates[i] and not blocks[i]]
    if missing or not blocks:
        where = f"block {missing[0]} has" if blocks else "the model has no numbered blocks with"
        raise ValueError(f"{where} {'no' if blocks else 'any'} DropPath; build it with drop_path_rate above 0")
    for i, rate in enumerate(rates):
        for module in blocks[i]:
            attribute = next(field for field in RATE[type(module).__name__] if hasattr(module, field))
            setattr(module, attribute, rate)
            if hasattr(module, "skip"):
                module.skip = skip
    return rates
