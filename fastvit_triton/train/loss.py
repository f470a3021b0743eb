"""Losses of the Vision Transformer recipes: classification, distillation, token labels, and losses on patch tokens.

Soft targets are class probabilities, as `smooth_labels`, `mixup` and `cutmix` return them.
"""

from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor

from .ranges import Finite, FractionBelow1, NonNegative, Positive, PositiveInt, Probability, checked


@checked
def smooth_labels(targets: Tensor, classes: PositiveInt, smoothing: FractionBelow1 = 0.0) -> Tensor:
    """Label smoothing as soft targets: (1 − s) y + s / K (Szegedy et al., arXiv:1512.00567, section 7).

    Args:
        targets: class numbers [...], or probabilities [..., K] from mixing.
        classes: K.
        smoothing: s, the probability spread evenly over all classes, in [0, 1).

    Returns:
        Probabilities [..., K] in float32, or in the dtype of `targets` if they are probabilities.

    Raises:
        ValueError: the smoothing is outside [0, 1).
    """
    soft = targets if targets.is_floating_point() else F.one_hot(targets, classes).float()
    return soft * (1 - smoothing) + smoothing / classes


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with soft targets: −Σ_k y_k log softmax(z)_k, mean over all other axes.

    Args:
        logits: z [..., K].
        targets: y [..., K], probabilities.

    Returns:
        A scalar, in nats.
    """
    return -(targets * F.log_softmax(logits, -1)).sum(-1).mean()


@checked
def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, smoothing: FractionBelow1 = 0.0) -> Tensor:
    """Cross-entropy with class weights: −Σ_k w_k y_k log softmax(z)_k, mean over images.

    `F.cross_entropy(weight=w)` of class numbers divides by the weights of the batch instead of the number of images, so
    that micro-batches and processes would not add up to the whole batch.
    """
    total = F.cross_entropy(logits, targets, weights.to(logits.dtype), label_smoothing=smoothing, reduction="sum")
    return total / len(logits)


@checked
def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    threshold: Annotated[Finite | None, "unchanged targets"] = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Binary cross-entropy per class: −y log σ(z) − (1 − y) log σ(−z).

    DeiT III (arXiv:2204.07118, section 3.2; facebookresearch/deit, engine.py, `targets.gt(0.0)`) sets targets above a
    threshold of 0 to 1 and takes the mean over images and classes; do not smooth its targets, which would all become 1.
    big_vision's `sigmoid_xent` keeps the probabilities and sums over classes.

    Args:
        logits: z [B, K].
        targets: y [B, K], probabilities.
        threshold: targets above it become 1, others 0; None keeps the probabilities.
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
    weight: NonNegative = 1.0,
    token_weight: NonNegative = 1.0,
) -> Tensor:
    """Token labelling: w CE(class token, y) + w' mean_i CE(token_i, y_i) (Jiang et al., arXiv:2104.10858).

    The default weights are those of the authors' code (TokenLabeling, tlt/loss/cross_entropy.py). After `mix_tokens`,
    mix the class targets by area and apply `mix_tokens` with the same box to the token logits to undo the mixing.

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
    """Patch-wise cosine loss: mean cosine similarity of pairs of patch tokens (Gong et al., arXiv:2104.12753).

        1 / (n(n − 1)) Σ_{i≠j} |u_i · u_j|,   u_i = h_i / ‖h_i‖

    The first version of the paper has no absolute value; then the sum is ‖Σ u_i‖² − n, without an n × n matrix.

    Args:
        tokens: final patch tokens h [B, n, D], n at least 2.
        absolute: take |u_i · u_j|.

    Returns:
        A scalar: 1 for equal tokens, 0 for orthogonal ones.

    Raises:
        ValueError: there are fewer than two patches.
    """
    count = tokens.shape[1]
    if count < 2:
        raise ValueError(f"tokens has {count} patches; use two or more")
    units = F.normalize(tokens, dim=-1)
    if absolute:
        cosines = (units @ units.mT).abs()
        total = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)
    else:
        total = units.sum(1).square().sum(-1) - units.square().sum((1, 2))
    return total.mean() / (count * (count - 1))


def patch_contrastive_loss(first: Tensor, last: Tensor, others: bool = True) -> Tensor:
    """Patch-wise contrastive loss between the first and the last layer's tokens (arXiv:2104.12753).

        −1/n Σ_i log [ exp(e_i · h_i) / (exp(e_i · h_i) + exp(e_i · m_i)) ]

    Args:
        first: patch tokens after the first layer, e [B, n, D]; detached.
        last: final patch tokens, h [B, n, D].
        others: m_i is the mean over j ≠ i (second version); False takes the mean over all (first version).

    Returns:
        A scalar.

    Raises:
        ValueError: `others` is True and there are fewer than two patches.
    """
    first, count = first.detach(), last.shape[1]
    if others and count < 2:
        raise ValueError(f"last has {count} patches; others=True needs two or more")
    total = last.sum(1, keepdim=True)
    mean = (total - last) / (count - 1) if others else total / count
    return -F.logsigmoid((first * (last - mean)).sum(-1)).mean()


def patch_mixing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Patch-wise mixing loss, 1/n Σ_i CE(g(h_i), y_i): classify the source image of each patch (arXiv:2104.12753).

    Args:
        logits: g(h) [B, n, K], from one head shared by all patches.
        targets: y, class numbers of the source images [B, n]: `mix_tokens(targets[:, None].expand(-1, n), box, grid)`.

    Returns:
        A scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def hard_distillation(student: Tensor, distilled: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """½ CE(student, target) + ½ CE(distilled, argmax teacher) (DeiT, arXiv:2012.12877, section 3, equation 3).

    Args:
        student: class-token logits [B, K].
        distilled: distillation-token logits [B, K].
        teacher: the teacher's logits [B, K]; no gradient flows to them.
        target: class numbers [B].

    Returns:
        A scalar.
    """
    return (F.cross_entropy(student, target) + F.cross_entropy(distilled, teacher.argmax(-1))) / 2


@checked
def soft_distillation(
    student: Tensor,
    distilled: Tensor,
    teacher: Tensor,
    target: Tensor,
    weight: Probability = 0.1,
    tau: Positive = 3.0,
    reduction: Literal["batchmean", "official"] = "batchmean",
) -> Tensor:
    """(1 − λ) CE(student, target) + λ τ² KL(softmax(teacher / τ) ‖ softmax(distilled / τ)), equation 2 of DeiT.

    Args:
        student: class-token logits [B, K].
        distilled: distillation-token logits [B, K].
        teacher: the teacher's logits [B, K]; no gradient flows to them.
        target: class numbers [B].
        weight: λ.
        tau: τ, the temperature.
        reduction: "batchmean" (the paper: mean over images) or "official" (the released code divides by B·K).

    Returns:
        A scalar.

    Raises:
        ValueError: the reduction is unknown.
    """
    targets = F.log_softmax(teacher.detach() / tau, -1)
    divergence = F.kl_div(F.log_softmax(distilled / tau, -1), targets, reduction="batchmean", log_target=True)
    if reduction == "official":
        divergence = divergence / student.shape[-1]
    return (1 - weight) * F.cross_entropy(student, target) + weight * tau**2 * divergence
