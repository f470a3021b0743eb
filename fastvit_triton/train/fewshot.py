"""What frozen features know: ridge regression in closed form and nearest neighbours. Nothing is trained by gradient."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ranges import Count, Number, Positive, checked

BIAS = 100.0  # a constant feature so large that its weight is hardly penalised (big_vision, evaluators/fewshot_lsr.py)


@torch.no_grad()
def extract(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], forward: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Features and targets of all images, on the CPU; the model is left in the mode it came in.

    Args:
        model: any module.
        batches: (images [B, C, H, W], targets [B]).
        forward: images to features [B, D]; None calls the model, which then must have no head. A timm model or one of
            ours with a head: `lambda x: model.forward_head(model.forward_features(x), pre_logits=True)`.

    Returns:
        [N, D] and [N].

    Raises:
        ValueError: there is no image.
    """
    device, modes = next(model.parameters()).device, {module: module.training for module in model.modules()}
    model.eval()
    features, answers = [], []
    try:
        for images, targets in batches:
            features.append((forward or model)(images.to(device, non_blocking=True)).cpu())
            answers.append(targets)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not features:
        raise ValueError("there is no image to take features of")
    return torch.cat(features), torch.cat(answers)


@checked
def few(targets: Tensor, shots: Count, seed: Number = 0) -> Tensor:
    """Indices of `shots` random images of each class, fewer where a class has fewer.

    Args:
        targets: class numbers [N].
        shots: images per class.
        seed: draws them.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(targets.shape[0], generator=generator)
    return torch.cat([order[targets[order] == label][:shots] for label in targets.unique()])


@checked
def ridge(features: Tensor, targets: Tensor, penalty: Positive, dual: bool | None = None) -> Tensor:
    """The minimiser of ‖X W − Y‖² + λ ‖W‖², through one symmetric eigendecomposition Q diag(e) Qᵀ.

        primal   W = Q (e + λ)⁻¹ Qᵀ Xᵀ Y,   XᵀX = Q e Qᵀ   [D, D]
        dual     W = Xᵀ Q (e + λ)⁻¹ Qᵀ Y,   XXᵀ = Q e Qᵀ   [N, N]

    The same W; the smaller matrix is the cheaper one. Compute in float64.

    Args:
        features: X [N, D].
        targets: Y [N, K].
        penalty: λ above 0.
        dual: None takes the smaller matrix.

    Returns:
        W [D, K].

    Raises:
        ValueError: the penalty is not positive.
    """
    rows, columns = features.shape
    if columns > rows if dual is None else dual:
        values, vectors = torch.linalg.eigh(features @ features.mT)
        return features.mT @ (vectors / (values + penalty)) @ (vectors.mT @ targets)
    values, vectors = torch.linalg.eigh(features.mT @ features)
    return (vectors / (values + penalty)) @ (vectors.mT @ (features.mT @ targets))


@checked
def few_shot(
    features: Tensor, targets: Tensor, test_features: Tensor, classes: Count, penalty: Positive = 2.0**10
) -> Tensor:
    """Few-shot linear evaluation (ViT, arXiv:2010.11929, section 4.1 "Metrics"; big_vision, `fewshot_lsr`).

    Features are whitened by the training images' mean and deviation + 1e-5, a constant 100 is appended, and ridge
    regression maps them to {−1, 1}^K: 1 for the class. All in float64.

    Args:
        features: [N, D], of the few training images.
        targets: [N].
        test_features: [M, D].
        classes: K.
        penalty: λ, 2¹⁰ as in big_vision.

    Returns:
        Outputs [M, K] in float64; argmax(1) is the answer.
    """
    features, test_features = features.double(), test_features.double()
    mean, std = features.mean(0), features.std(0, correction=0) + 1e-5
    train, test = (F.pad((x - mean) / std, (0, 1), value=BIAS) for x in (features, test_features))
    return test @ ridge(train, 2 * F.one_hot(targets, classes).double() - 1, penalty)


@checked
def nearest_neighbours(
    features: Tensor,
    targets: Tensor,
    test_features: Tensor,
    classes: Count,
    k: Count = 20,
    temperature: Positive = 0.07,
) -> Tensor:
    """Votes of the k most similar training images (Wu et al., arXiv:1805.01978, section 3.4; DINO, eval_knn.py).

        vote for class c = Σ over the k nearest i of class c: exp(cos(f, f_i) / τ)

    Args:
        features: [N, D].
        targets: [N].
        test_features: [M, D].
        classes: K.
        k: neighbours, at most N.
        temperature: τ.

    Returns:
        Votes [M, K]; argmax(1) is the answer.

    Raises:
        ValueError: there are fewer images than neighbours.
    """
    if k > features.shape[0]:
        raise ValueError(f"k is {k} for {features.shape[0]} images; it must be at most the images")
    bank = F.normalize(features, dim=1)
    votes = []
    for some in F.normalize(test_features, dim=1).split(1024):  # never an [M, N] matrix of a large set
        cosines, nearest = (some @ bank.mT).topk(k, dim=1)
        weights = (cosines / temperature).exp()
        votes.append(weights.new_zeros(some.shape[0], classes).scatter_add_(1, targets[nearest], weights))
    return torch.cat(votes)
