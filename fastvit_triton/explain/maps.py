"""Statistics of attention maps: rollout, gradient-weighted rollout, entropy, mean attention distance.

Sources   Abnar & Zuidema, Quantifying attention flow, arXiv:2005.00928, section 3; ViT, arXiv:2010.11929, figure 6 and
          appendix D.8 (rollout), figure 7 right and appendix D.7 (distance); Chefer et al., arXiv:2103.15679,
          equations 5 and 6.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .layer import AttentionLayer
from .recording import capture

FUSE: dict[str, Callable[..., Tensor]] = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}


def rollout(maps: Iterable[Tensor | AttentionLayer], heads: str = "mean", discard: float = 0.0) -> Tensor:
    """Attention rollout: contribution of input tokens to output tokens, the product over layers of (A + I) / 2.

    A layer without a residual that halves the tokens (LeViT, between stages) contributes A.

    Args:
        maps: layers of a recording, or the attention map [B, H, N, N] of each, first layer first; one map at a time
            is held for layers and for a generator.
        heads: reduction over heads, "mean", "max" or "min"; rows are renormalised.
        discard: fraction, in [0, 1), of each image's entries to set to 0 in each layer, smallest first.

    Returns:
        [B, N, N], or [B, N', N] of a model that keeps N' of N tokens; rows sum to 1.

    Raises:
        ValueError: unknown `heads`, `discard` out of range, no maps, maps of different sizes, or maps that are not
            over all tokens of an image (windows, reduced keys).
    """
    if heads not in FUSE:
        raise ValueError(f"heads is {heads!r}; use one of {', '.join(FUSE)}")
    if not 0 <= discard < 1:
        raise ValueError(f"discard is {discard}; it must be at least 0 and below 1")
    total = None
    for attention, halves in map(_whole, maps):
        fused = FUSE[heads](attention, 1)  # [B, N, N]
        if discard:
            flat = fused.flatten(1)
            smallest = flat.topk(int(discard * flat.shape[1]), 1, largest=False).indices
            kept = flat.scatter(1, smallest, 0.0).view_as(fused)
            fused = torch.where(kept.any(-1, keepdim=True), kept, fused) if halves else kept
        fused = fused / fused.sum(-1, keepdim=True).clamp_min(torch.finfo(fused.dtype).tiny)
        if halves:
            step = fused
        else:
            step = fused + torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
            step = step / step.sum(-1, keepdim=True)  # a row with all keys discarded becomes the identity
        total = _then(total, step, step)
    if total is None:
        raise ValueError("maps is empty; give the map of at least one layer")
    return total


def gradient_rollout(maps: Iterable[Tensor | AttentionLayer], grads: Iterable[Tensor]) -> Tensor:
    """Relevance of each input token for one output: R ← R + Ā R, Ā = mean over heads of (A ∘ dA)⁺, R₀ = I.

    For a layer without a residual that halves the tokens, R ← Ā R.

    Args:
        maps: layers of a recording, or the attention map [B, H, N, N] of each, first layer first.
        grads: gradient of the output with respect to each map, same shapes.

    Returns:
        [B, N, N], or [B, N', N] as from `rollout`; the class token's row is the relevance of every token for the class.

    Raises:
        ValueError: no maps, maps of different sizes, or maps that are not over all tokens of an image.
    """
    total = None
    for (attention, halves), grad in zip(map(_whole, maps), grads, strict=True):
        mixed = (attention * grad).clamp_min(0).mean(1)  # [B, N, N]
        first = mixed if halves else mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
        total = _then(total, first, mixed, not halves)
    if total is None:
        raise ValueError("maps is empty; give the map of at least one layer")
    return total


def class_relevance(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """`gradient_rollout` for a logit of the model, from one forward and backward pass; parameters get no gradient.

    Args:
        model: from images to logits [B, K], or to an object with `logits`.
        images: [B, C, H, W], normalised.
        classes: [B] class numbers; None takes the largest logit.

    Returns:
        [B, N, N], or [B, N', N] as from `rollout`.

    Raises:
        ValueError: the model returns no logits, or no attention could be recorded.
    """
    images = images.detach().clone().requires_grad_()
    with torch.enable_grad(), capture(model, gradients=True) as seen:
        logits = logits_of(model(images))
        classes = logits.argmax(1) if classes is None else classes
        torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), images)
    layers = [layer for layer in seen.layers if layer.grad is not None]
    return gradient_rollout(layers, (layer.map_grad() for layer in layers))


def half_area(heat: Tensor) -> float:
    """The smallest share of the area that holds half of a map [h, w] ≥ 0; 0.5 if it is uniform."""
    values = heat.double().flatten().sort(descending=True).values
    below = values.cumsum(0) - values  # what the larger ones hold
    half = values.sum() / 2
    last = int((below < half).sum()) - 1  # of the largest that hold half, of which a part may do
    return (last + float((half - below[last]) / values[last])) / len(values)


def logits_of(output: object) -> Tensor:
    """Logits [B, K] in a model's output, which is a tensor or an object with `logits`."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError("the model returns no logits [B, classes]; explain a model with a classification head")
    return logits


def entropy(blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention entropy: mean over queries of −Σ A ln A, in nats; 0 for one-hot attention, ln N for uniform.

    Args:
        blocks: (queries [M], rows [B, H, M, N]) that cover every query once, from `AttentionLayer.blocks`.

    Returns:
        [B, H].
    """
    sums = [(torch.special.entr(rows).sum(-1).sum(-1), rows.shape[2]) for _, rows in blocks]
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def attention_distance(
    blocks: Iterable[tuple[Tensor, Tensor]], grid: tuple[int, int], patch: tuple[float, float]
) -> Tensor:
    """Mean attention distance of query patches i, Σⱼ Aᵢⱼ ‖pᵢ − pⱼ‖ over patches j, in pixels.

    Prefix tokens (class token, registers), which have no position in the image, are excluded as queries and as keys,
    and rows are renormalised.

    Args:
        blocks: (queries [M], rows [B, H, M, N]) that cover every query once, from `AttentionLayer.blocks`.
        grid: patches per column and per row; the last h·w tokens are patches.
        patch: (height, width) of a patch, pixels.

    Returns:
        [B, H], mean over queries.

    Raises:
        ValueError: there are fewer tokens than patches, as in windows, or not every patch is a query.
    """
    total: Any = 0.0
    seen = 0
    count = grid[0] * grid[1]
    for queries, rows in blocks:
        prefix = rows.shape[-1] - count
        if prefix < 0:
            raise ValueError(f"grid {grid[0]} x {grid[1]} has {count} patches, but the map has {rows.shape[-1]} tokens")
        steps = [
            torch.arange(n, device=rows.device, dtype=rows.dtype) * side for n, side in zip(grid, patch, strict=True)
        ]
        places = torch.cartesian_prod(*steps)  # [h·w, 2]
        inside = queries >= prefix
        seen += int(inside.sum())
        rows = rows[:, :, inside, prefix:]
        rows = rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        total = total + (rows * torch.cdist(places[queries[inside] - prefix], places)).sum((-1, -2))
    if seen != count:
        raise ValueError(f"{seen} of {count} patches are queries; the distance needs the map of an image's whole grid")
    return total / count


def _whole(attention: Tensor | AttentionLayer) -> tuple[Tensor, bool]:
    """The attention map [B, H, N, N] over all tokens of an image; [B, H, N', N] and True if the layer halves them."""
    if isinstance(attention, AttentionLayer):
        if attention.why_not_whole is not None:
            raise ValueError(f"{attention.why_not_whole}; rollout needs maps over all tokens of an image")
        if attention.halves:
            return attention.map(), True
        attention = attention.map()
    N, M = attention.shape[-2:]
    if N != M:
        raise ValueError(f"a map has queries × keys = {N} × {M}; rollout needs maps over all tokens of an image")
    return attention, False


def _then(total: Tensor | None, first: Tensor, step: Tensor, add: bool = False) -> Tensor:
    """The next rollout: step · total, plus total if `add`; `first` if there is no total yet."""
    if total is None:
        return first
    if len(total) != len(step):
        count = f"{len(total)} and then {len(step)}"
        raise ValueError(f"maps have {count} images or windows; rollout needs maps over all tokens of an image")
    if total.shape[-2] != step.shape[-1]:
        raise ValueError(
            f"maps have {total.shape[-2]} and then {step.shape[-1]} tokens; rollout needs layers that keep their tokens"
        )
    return step @ total + total if add else step @ total
