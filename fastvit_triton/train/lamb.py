"""LAMB: Adam whose step is as long, matrix by matrix, as the matrix itself. What DeiT III trains with."""

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer

from .ranges import NotNegative, Positive, Share, checked


class Lamb(Optimizer):
    """LAMB (You et al., arXiv:1904.00962, algorithm 2) in the form of NVIDIA apex's FusedLAMB, of DeiT III.

        g ← g / max(1, ‖g‖ / c)                      over all parameters together
        m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
        u = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε) + λ w
        w ← w − lr · r · u,   r = ‖w‖ / ‖u‖ where λ > 0 and neither is 0, else 1

    Args:
        params: parameters or groups, such as `parameter_groups` gives.
        lr: rate.
        betas: β₁ and β₂.
        eps: ε; apex has 1e-6, DeiT's main.py passes 1e-8.
        weight_decay: λ.
        max_grad_norm: c; None does not clip.
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: NotNegative = 1e-3,
        betas: tuple[Share, Share] = (0.9, 0.999),
        eps: NotNegative = 1e-6,
        weight_decay: NotNegative = 0.01,
        max_grad_norm: Annotated[Positive | None, "no clipping"] = 1.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient; no closure is called."""
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return
        shrink = 1.0
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in moving])
            shrink = (norm / self.max_grad_norm).clamp(min=1)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._update(p, p.grad / shrink, **{name: group[name] for name in self.defaults})

    def _update(
        self, p: Tensor, grad: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        state = self.state[p]
        if not state:
            state |= dict(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        m = state["exp_avg"].lerp_(grad, 1 - betas[0])
        v = state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        corrections = [1 - beta ** state["step"] for beta in betas]
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps) + weight_decay * p
        if weight_decay:
            length, stride = p.norm(), update.norm()
            update *= torch.where((length > 0) & (stride > 0), length / stride, 1.0)
        p.sub_(lr * update)
