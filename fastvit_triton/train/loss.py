"""Losses of the Vision Transformer recipes, of what any model gives: logits and tokens. Two more are in distill.py.

Soft targets are probabilities: what `smooth`, `mixup` and `cutmix` make of class numbers.
"""

from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor

from .ranges import Count, Finite, NotNegative, Share, checked


@checked
def smooth(targets: Tensor, classes: Count, smoothing: Share = 0.0) -> Tensor:
    """Label smoothing as soft targets: (1 − s) y + s / K (Szegedy et al., arXiv:1512.00567, section 7).

    Args:
        targets: class numbers [...], or probabilities [..., K] from a blend.
        classes: K.
        smoothing: s, the probability spread evenly over all classes, in [0, 1).

    Returns:
        Probabilities [..., K] in float32, or in the probabilities' own dtype.

    Raises:
        ValueError: the smoothing is no probability below 1.
    """
    soft = targets if targets.is_floating_point() else F.one_hot(targets, classes).float()
    return soft * (1 - smoothing) + smoothing / classes


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k y_k log softmax(z)_k, mean over everything but the classes.

    Args:
        logits: z [..., K].
        targets: y [..., K], probabilities.

    Returns:
        A scalar, in nats.
    """
    return -(targets * F.log_softmax(logits, -1)).sum(-1).mean()


@checked
def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    threshold: Annotated[Finite | None, "the targets as they are"] = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """One yes-or-no question per class: −y log σ(z) − (1 − y) log σ(−z).

    DeiT III (arXiv:2204.07118, section 3.2; facebookresearch/deit, engine.py, `targets.gt(0.0)`) asks whether a class
    is in the blend at all, threshold 0, and takes the mean over images and classes. That needs targets without
    smoothing: smoothed ones are all above 0. big_vision's `sigmoid_xent` keeps the shares and sums over classes.

    Args:
        logits: z [B, K].
        targets: y [B, K], probabilities.
        threshold: targets above it count as 1, others as 0; None takes them as they are.
        reduction: "mean" over images and classes, or "sum" over classes and mean over images.

    Returns:
        A scalar, in nats.

    Raises:
        ValueError: the reduction is unknown.
    """
    if threshold is not None:
        targets = targets > threshold
    value = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
    return value if reduction == "mean" else value * logits.shape[-1]


@checked
def token_label_loss(
    logits: Tensor,
    token_logits: Tensor,
    targets: Tensor,
    token_targets: Tensor,
    weight: NotNegative = 1.0,
    token_weight: NotNegative = 1.0,
) -> Tensor:
    """Every patch answers too: w CE(class token, y) + w' mean_i CE(token_i, y_i) (Jiang et al., arXiv:2104.10858).

    The default weights are those of the code (TokenLabeling, tlt/loss/cross_entropy.py). After `mix_tokens`, mix the
    class targets by area and put the token logits back with the same box, so that token i is about patch i.

    Args:
        logits: of the class token [B, K].
        token_logits: of the patches [B, N, K].
        targets: probabilities [B, K].
        token_targets: probabilities [B, N, K].
        weight: w.
        token_weight: w', the paper's β.

    Returns:
        A scalar.
    """
    return weight * soft_cross_entropy(logits, targets) + token_weight * soft_cross_entropy(token_logits, token_targets)


def similarity_loss(tokens: Tensor, absolute: bool = True) -> Tensor:
    """How alike the patches have become: mean cosine of two different ones (Gong et al., arXiv:2104.12753).

        1 / (n(n − 1)) Σ_{i≠j} |u_i · u_j|,   u_i = h_i / ‖h_i‖

    The paper's first version has no absolute value; then the sum is ‖Σ u_i‖² − n and no n × n map is made.

    Args:
        tokens: final patch tokens h [B, n, D], n at least 2.
        absolute: take |u_i · u_j|.

    Returns:
        A scalar: 1 for equal tokens, 0 for orthogonal ones.

    Raises:
        ValueError: there is only one patch.
    """
    count = tokens.shape[1]
    if count < 2:
        raise ValueError(f"tokens has {count} patches; two or more have a similarity")
    units = F.normalize(tokens, dim=-1)
    if absolute:
        cosines = (units @ units.mT).abs()
        total = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)
    else:
        total = units.sum(1).square().sum(-1) - units.square().sum((1, 2))
    return total.mean() / (count * (count - 1))


def patch_contrastive_loss(first: Tensor, last: Tensor, others: bool = True) -> Tensor:
    """Each last token should resemble its own first one more than the average token does (arXiv:2104.12753).

        −1/n Σ_i log [ exp(e_i · h_i) / (exp(e_i · h_i) + exp(e_i · m_i)) ]

    Args:
        first: patch tokens after the first layer, e [B, n, D]; they get no gradient.
        last: final patch tokens, h [B, n, D].
        others: m_i is the mean over j ≠ i (second version); False takes the mean over all (first version).

    Returns:
        A scalar.

    Raises:
        ValueError: there is only one patch, and `others` asks for another.
    """
    first, count = first.detach(), last.shape[1]
    if others and count < 2:
        raise ValueError(f"last has {count} patches; others=True needs two or more")
    total = last.sum(1, keepdim=True)
    mean = (total - last) / (count - 1) if others else total / count
    return -F.logsigmoid((first * (last - mean)).sum(-1)).mean()


def patch_mixing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """1/n Σ_i CE(g(h_i), y_i): each patch names the image it was cut from (arXiv:2104.12753).

    Args:
        logits: g(h), one head for all patches [B, n, K].
        targets: y, the source's class numbers [B, n]: `mix_tokens(targets[:, None].expand(-1, n), box, grid)`.

    Returns:
        A scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
