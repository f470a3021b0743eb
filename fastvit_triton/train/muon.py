"""Muon for the matrices of the blocks, AdamW for all other parameters, as one optimiser."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .optim import is_block_matrix, parameter_groups
from .ranges import FractionAbove0, FractionBelow1, NonNegative, checked


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` over some parameter groups and `torch.optim.AdamW` over the others.

    Muon orthogonalises the momentum of a matrix (Jordan, kellerjordan.github.io/posts/muon; Liu et al.,
    arXiv:2502.16982). With `adjust_lr_fn="match_rms_adamw"` its updates are as large as AdamW's, so both share learning
    rate and weight decay. `param_groups` holds Muon's groups first; `state_dict` is that of one optimiser.

    Args:
        matrices: groups of 2-D parameters, for Muon.
        rest: groups of the other parameters, for AdamW.
        lr: learning rate of groups that have none.
        betas: β₁ and β₂ of AdamW.
    """

    @checked
    def __init__(
        self,
        matrices: list[dict],
        rest: list[dict],
        lr: NonNegative = 1e-3,
        betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999),
    ) -> None:
        parts: list[Optimizer] = []
        if matrices:
            parts.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if rest:
            parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = [(part, len(part.param_groups)) for part in parts]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates all parameters that have a gradient; `closure` is ignored."""
        start = 0
        for part, count in self._parts:  # `load_state_dict` replaces groups and state, so they are handed on here
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            part.step()
            start += count


@checked
def muon_adamw(
    model: nn.Module,
    lr: NonNegative,
    weight_decay: NonNegative,
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999),
    layer_decay: FractionAbove0 = 1.0,
    lr_scales: Mapping[str, float] | None = None,
) -> MuonAdamW:
    """`MuonAdamW` over `parameter_groups`, which documents the arguments.

    Muon has the matrices of numbered blocks (`is_block_matrix`). AdamW has the stem, positions and tokens, the head,
    biases and norms, as Muon's authors advise.

    Raises:
        ValueError: the model has no such matrix.
    """
    chosen = {id(parameter) for name, parameter in model.named_parameters() if is_block_matrix(model, name, parameter)}
    parts: tuple[list[dict], list[dict]] = [], []
    for group in parameter_groups(model, weight_decay, layer_decay, lr_scales=lr_scales):
        for part, wanted in zip(parts, (True, False), strict=True):
            if parameters := [parameter for parameter in group["params"] if (id(parameter) in chosen) is wanted]:
                part.append(group | {"params": parameters})
    if not parts[0]:
        raise ValueError("optimizer 'muon' needs matrices in numbered blocks, such as blocks.0; this model has none")
    return MuonAdamW(*parts, lr=lr, betas=betas)
