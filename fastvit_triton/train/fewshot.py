"""Evaluation of frozen features: few-shot linear evaluation by ridge regression, and k nearest neighbours."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loop import evaluating
from .ranges import NonNegativeInt, Positive, PositiveInt, checked

BIAS = 100.0  # constant feature; large, so that its weight is hardly penalised (big_vision, evaluators/fewshot_lsr.py)


@torch.no_grad()
def extract_features(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], forward: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Features and targets of all images, on the CPU. Training mode is restored afterwards.

    Args:
        model: any module.
        batches: yields (images [B, C, H, W], targets [B]).
        forward: from images to features [B, D]; None calls the model, which must have no head. For a timm model or
            one of ours with a head: `lambda x: model.forward_head(model.forward_features(x), pre_logits=True)`.

    Returns:
        Features [N, D] and targets [N].

    Raises:
        ValueError: there are no images.
    """
    device = next(model.parameters()).device
    features = []
    answers = []
    with evaluating(model):
        for images, targets in batches:
            features.append((forward or model)(images.to(device, non_blocking=True)).cpu())
            answers.append(targets)
    if not features:
        raise ValueError("there are no images to extract features from")
    return torch.cat(features), torch.cat(answers)


@checked
def sample_per_class(targets: Tensor, shots: PositiveInt, seed: NonNegativeInt = 0) -> Tensor:
    """Indices of `shots` random images of each class, or of all images of a smaller class.

    Args:
        targets: class numbers [N].
        shots: images per class.
        seed: seed of the sampling.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(targets.shape[0], generator=generator)
    return torch.cat([order[targets[order] == label][:shots] for label in targets.unique()])


@checked
def ridge(features: Tensor, targets: Tensor, penalty: Positive, dual: bool | None = None) -> Tensor:
    """Ridge regression: the minimiser of ‖X W − Y‖² + λ ‖W‖², by one symmetric eigendecomposition Q diag(e) Qᵀ.

        primal   W = Q (e + λ)⁻¹ Qᵀ Xᵀ Y,   XᵀX = Q e Qᵀ   [D, D]
        dual     W = Xᵀ Q (e + λ)⁻¹ Qᵀ Y,   XXᵀ = Q e Qᵀ   [N, N]

    Both give the same W; the smaller matrix is cheaper. Pass float64 tensors.

    Args:
        features: X [N, D].
        targets: Y [N, K].
        penalty: λ above 0.
        dual: use the dual form; None chooses the form with the smaller matrix.

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
    features: Tensor, targets: Tensor, test_features: Tensor, classes: PositiveInt, penalty: Positive = 2.0**10
) -> Tensor:
    """Few-shot linear evaluation (ViT, arXiv:2010.11929, section 4.1 "Metrics"; big_vision, `fewshot_lsr`).

    Features are standardised by the training images' mean and standard deviation + 1e-5, a constant 100 is appended,
    and ridge regression fits targets in {−1, 1}^K, 1 for the image's class. Computed in float64.

    Args:
        features: [N, D], of the training images.
        targets: [N].
        test_features: [M, D].
        classes: K.
        penalty: λ, 2¹⁰ as in big_vision.

    Returns:
        Outputs [M, K] in float64; argmax(1) is the predicted class.
    """
    features = features.double()
    test_features = test_features.double()
    mean = features.mean(0)
    std = features.std(0, correction=0) + 1e-5
    train, test = (F.pad((x - mean) / std, (0, 1), value=BIAS) for x in (features, test_features))
    return test @ ridge(train, 2 * F.one_hot(targets, classes).double() - 1, penalty)


@checked
def nearest_neighbours(
    features: Tensor,
    targets: Tensor,
    test_features: Tensor,
    classes: PositiveInt,
    k: PositiveInt = 20,
    temperature: Positive = 0.07,
) -> Tensor:
    """Weighted votes of the k nearest training images by cosine similarity.

    Wu et al., arXiv:1805.01978, section 3.4; DINO, eval_knn.py.

        vote for class c = Σ over the k nearest i of class c: exp(cos(f, f_i) / τ)

    Args:
        features: [N, D].
        targets: [N].
        test_features: [M, D].
        classes: K.
        k: neighbours, at most N.
        temperature: τ.

    Returns:
        Votes [M, K]; argmax(1) is the predicted class.

    Raises:
        ValueError: there are fewer than k training images.
    """
    if k > features.shape[0]:
        raise ValueError(f"k is {k} for {features.shape[0]} images; use at most the number of images")
    bank = F.normalize(features, dim=1)
    votes = []
    for queries in F.normalize(test_features, dim=1).split(1024):  # the [M, N] matrix may not fit into memory
        cosines, nearest = (queries @ bank.mT).topk(k, dim=1)
        weights = (cosines / temperature).exp()
        votes.append(weights.new_zeros(queries.shape[0], classes).scatter_add_(1, targets[nearest], weights))
    return torch.cat(votes)
