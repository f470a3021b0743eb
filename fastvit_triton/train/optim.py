"""Parameter groups, AdamW, LAMB, and our learning-rate schedule; the published schedules are in schedule.py."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ranges import FractionAbove0, FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt, checked

# Parameter names in timm, transformers, torchvision and vit-pytorch: positions and class, register, distillation and
# mask tokens; the stem; the patch projection; numbered blocks.
_NO_DECAY = re.compile(
    r"(^|[._])((cls|class|reg|register|dist|distillation|mask)_tokens?|pos(ition)?_embed(ding)?s?|\w*bias_table)(\.|$)"
)
_STEM = re.compile(r"(^|\.)(patch_embed|to_patch_embedding|embeddings|conv_proj|norm_pre|stem)(\.|$)")
_PATCH = re.compile(r"(^|\.)(patch_embed\w*|to_patch_embedding|conv_proj)(\.|$)")
_BLOCK = re.compile(r"(^|\.)(blocks|layers?|encoder_layer)[._](\d+)\.")


@checked
def parameter_groups(
    model: nn.Module,
    weight_decay: NonNegative,
    layer_decay: FractionAbove0 = 1.0,
    patch_embed_scale: NonNegative = 1.0,
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict]:
    """Parameter groups with and without weight decay and, with layer-wise decay, with a learning-rate scale per layer.

    No decay applies to parameters with fewer than two axes (biases, norms, LayerScale), to tokens and positions, which
    are recognised by name, and to those named by `model.no_weight_decay()` (as in timm). Shared parameters appear once.

    Layer-wise decay d lowers the learning rate of early layers in fine-tuning (facebookresearch/mae, util/lr_decay.py):
    with L blocks, the scale is d^(L − i) for block i, d^(L + 1) for the stem (patches, tokens, positions) and 1 for the
    rest. It is stored as the group's `lr_scale`; multiply the learning rate by it, as `set_lr` does.

    Args:
        model: any module; `no_weight_decay` is optional. Blocks are numbered in names: blocks.3, layers.3, layer.3.
        weight_decay: weight decay of the groups that have it, in torch.optim.AdamW's convention.
        layer_decay: d in (0, 1]; with 1 all layers have the same rate.
        patch_embed_scale: additional factor for the patch projection (DINOv2: 0.2).
        lr_scales: additional factors by regular expressions, which are searched for in the names of parameters, such as
            {"^backbone": 0.1} of DETR.

    Returns:
        Groups for any `torch.optim` optimiser, those with decay first, each in the order of `model.named_parameters()`.
        At most two groups if both scales are 1; empty groups are left out.

    Raises:
        ValueError: the layer decay is outside (0, 1], or it is below 1 and the model has no numbered blocks.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    depth = 1 + max((int(match[3]) for name in names if (match := _BLOCK.search(name))), default=-1)
    if layer_decay < 1 and not depth:
        raise ValueError("layer_decay needs numbered blocks, such as blocks.0; this model has none, leave it at 1")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            no_decay = _has_no_decay(model, name, parameter)
            scale = layer_decay ** (depth + 1 - layer_of(name, depth))
            scale *= patch_embed_scale if _PATCH.search(name) else 1
            scale *= math.prod(factor for pattern, factor in (lr_scales or {}).items() if re.search(pattern, name))
            groups.setdefault((0.0 if no_decay else weight_decay, scale), []).append(parameter)
    groups = dict(sorted(groups.items(), key=lambda item: item[0][0] == 0.0))
    if {scale for _, scale in groups} <= {1.0}:
        return [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()]
    return [{"params": group, "weight_decay": decay, "lr_scale": scale} for (decay, scale), group in groups.items()]


def _has_no_decay(model: nn.Module, name: str, parameter: Tensor) -> bool:
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    return parameter.ndim < 2 or name in exempt or bool(_NO_DECAY.search(name))


def is_block_matrix(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """True for a 2-D parameter in a numbered block that has weight decay: a weight of qkv, proj, fc1, fc2."""
    return parameter.ndim == 2 and bool(_BLOCK.search(name)) and not _has_no_decay(model, name, parameter)


def layer_of(name: str, depth: int) -> int:
    """Layer number of a parameter: 0 for the stem, i + 1 for block i of `depth`, depth + 1 for the rest."""
    if match := _BLOCK.search(name):
        return int(match[3]) + 1
    return 0 if _NO_DECAY.search(name) or _STEM.search(name) else depth + 1


@checked
def set_lr(optimizer: Optimizer, lr: NonNegative) -> None:
    """Sets the learning rate of every group to `lr` times the group's `lr_scale`, if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@checked
def adamw(
    model: nn.Module,
    lr: NonNegative,
    weight_decay: NonNegative,
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999),
    layer_decay: FractionAbove0 = 1.0,
    lr_scales: Mapping[str, float] | None = None,
) -> Optimizer:
    """PyTorch's fused AdamW over `parameter_groups`, which documents the arguments."""
    groups = parameter_groups(model, weight_decay, layer_decay, lr_scales=lr_scales)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


@checked
def warmup_cosine(
    step: NonNegativeInt, steps: PositiveInt, warmup: NonNegativeInt, peak: NonNegative, floor: NonNegative = 0.0
) -> float:
    """Learning rate of one step: linear warm-up, then cosine decay.

        step < warmup    peak · (step + 1) / (warmup + 1)
        otherwise        floor + (peak − floor) · ½ (1 + cos(π · (step − warmup) / (steps − warmup)))

    The rate is `peak` at `step == warmup` and `floor` at `step == steps`, one past the last step.

    Args:
        step: 0 … steps.
        steps: length of the run.
        warmup: steps before the peak.
        peak: largest rate.
        floor: rate at the end.

    Raises:
        ValueError: the warm-up is not shorter than the run.
    """
    if not warmup < steps:
        raise ValueError(f"warmup is {warmup} of {steps} steps; it must be shorter than the run")
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@checked
def reinit_pos_embed(model: nn.Module, std: Positive) -> None:
    """Reinitialises the learned position embedding from N(0, std²); does nothing if the model has none.

    The usual 0.02 is small compared with tokens of standard deviation 0.5, and grows too slowly in a short run.
    """
    table = getattr(model, "pos_embed", None)
    if isinstance(table, nn.Parameter):
        nn.init.normal_(table, std=std)


class Lamb(Optimizer):
    """LAMB: Adam with a per-layer trust ratio (You et al., arXiv:1904.00962, algorithm 2).

    Computed as in NVIDIA apex's FusedLAMB, which DeiT III uses:

        g ← g / max(1, ‖g‖ / c)                      over all parameters together
        m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
        u = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε) + λ w
        w ← w − lr · r · u,   r = ‖w‖ / ‖u‖ where λ > 0 and neither is 0, else 1

    Args:
        params: parameters or groups, for example from `parameter_groups`.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: ε; the default is apex's, DeiT's main.py passes 1e-8.
        weight_decay: λ.
        max_grad_norm: c, over all parameters; None does not clip.
    """

    @checked
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: NonNegative = 1e-3,
        betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999),
        eps: NonNegative = 1e-6,
        weight_decay: NonNegative = 0.01,
        max_grad_norm: Annotated[Positive | None, "no clipping"] = 1.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it calls no closure
        """Updates all parameters that have a gradient; `closure` is ignored."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        shrink: Tensor | float = 1.0
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
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
            weight_norm = p.norm()
            update_norm = update.norm()
            update *= torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        p.sub_(lr * update)
