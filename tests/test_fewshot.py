"""Tests of frozen features: ridge against normal equations, neighbours against scikit-learn; fine-tuning."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from fastvit_triton.models import create_model
from fastvit_triton.models.weights import load_weights
from fastvit_triton.train import fewshot
from fastvit_triton.train.data import DIGITS_MEAN, DIGITS_STD, TensorBatches, digits
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.loop import evaluate, fit
from fastvit_triton.train.optim import reinit_pos_embed

pytestmark = pytest.mark.fast

CLOSE = torch.testing.assert_close


@pytest.mark.parametrize(("rows", "columns"), [(30, 12), (12, 30)])
def test_ridge(rows: int, columns: int):
    """Oracle: the normal equations and scikit-learn in float64; primal equals dual; the gradient is 0."""
    x, y = torch.randn(rows, columns).double(), torch.randn(rows, 4).double()
    primal, dual = (fewshot.ridge(x, y, 0.5, dual) for dual in (False, True))
    CLOSE(primal, dual)
    CLOSE(primal, torch.linalg.solve(x.mT @ x + 0.5 * torch.eye(columns).double(), x.mT @ y))
    CLOSE(primal, torch.from_numpy(Ridge(alpha=0.5, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_).mT)
    assert torch.equal(fewshot.ridge(x, y, 0.5), dual if columns > rows else primal)
    gradient = x.mT @ (x @ primal - y) + 0.5 * primal
    CLOSE(gradient, torch.zeros_like(gradient))
    with pytest.raises(ValueError, match="penalty is 0; use a number above 0"):
        fewshot.ridge(x, y, 0)


def test_few_shot():
    """Oracle: scikit-learn's ridge on the same whitened features and targets in {−1, 1}."""
    (train, targets), (test, answers) = digits("train"), digits("test")
    chosen = fewshot.sample_per_class(targets, 10)
    assert targets[chosen].bincount().tolist() == [10] * 10
    assert torch.equal(chosen, fewshot.sample_per_class(targets, 10)) and not torch.equal(
        chosen, fewshot.sample_per_class(targets, 10, seed=1)
    )
    x, y, z = train[chosen].flatten(1), targets[chosen], test.flatten(1)
    ours = fewshot.few_shot(x, y, z, 10)
    mean, std = x.double().mean(0), x.double().std(0, correction=0) + 1e-5
    a, b = (np.hstack([((f - mean) / std).numpy(), np.full((len(f), 1), 100.0)]) for f in (x, z))
    model = Ridge(alpha=1024.0, fit_intercept=False).fit(a, 2 * F.one_hot(y, 10).numpy() - 1)
    CLOSE(ours, torch.from_numpy(model.predict(b)))
    assert (ours.argmax(1) == answers).double().mean() > 0.8


def test_nearest_neighbours():
    """Oracle: scikit-learn's cosine neighbours with the same weights."""
    (x, targets), (z, _) = digits("train"), digits("test")
    x, z = x.flatten(1).double(), z.flatten(1).double()
    theirs = KNeighborsClassifier(7, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    probabilities = torch.from_numpy(theirs.fit(x.numpy(), targets.numpy()).predict_proba(z.numpy()))
    votes = fewshot.nearest_neighbours(x, targets, z, 10, k=7)
    CLOSE(votes / votes.sum(1, keepdim=True), probabilities)
    with pytest.raises(ValueError, match="k is 3 for 2 images"):
        fewshot.nearest_neighbours(x[:2], targets[:2], z, 10, k=3)


def test_features_of_a_model():
    """Oracle: one call of the model without head, in evaluation mode; the mode is restored."""
    model = create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=2, drop_path_rate=0.5, num_classes=0)
    images, targets = digits("test")
    batches = TensorBatches(images, targets, Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,)), 100)
    features, answers = fewshot.extract_features(model, batches)
    assert model.training and torch.equal(answers, targets) and features.shape == (360, 16)
    with torch.no_grad():
        CLOSE(features, model.eval()(batches.transform.normalise(images)))
    with pytest.raises(ValueError, match="no images to extract features from"):
        fewshot.extract_features(model, [])


@pytest.mark.full
def test_fine_tuning_at_a_higher_resolution():
    """Oracle: a zero head predicts 0 for every class; positions are the old ones, resized. Training on half of the
    classes helps on all: after the same few steps, the loss is lower than from random weights."""
    options = dict(embed_dim=32, depth=2, num_heads=2)
    images, targets = digits("train")
    transform, half, some = (
        Transform((8, 8), (DIGITS_MEAN,), (DIGITS_STD,)),
        targets < 5,
        fewshot.sample_per_class(targets, 20),
    )
    enlarged = F.interpolate(images, (16, 16), mode="bilinear")
    batches = TensorBatches(enlarged[some], targets[some], transform, 50, torch.clone)

    def final_loss(model: torch.nn.Module, data: TensorBatches, epochs: int) -> float:
        test = partial(evaluate, batches=data)
        steps = fit(model, data, torch.optim.AdamW(model.parameters()), lambda _: 3e-3, epochs=epochs, test=test)
        return [progress.test.loss for progress in steps if progress.done][-1]

    small = create_model("vit_digits_patch2_8", num_classes=5, **options)
    reinit_pos_embed(small, 0.5)
    random = create_model("vit_digits_patch2_8", img_size=16, **options)
    load_weights(random, small.state_dict())
    final_loss(small, TensorBatches(images[half], targets[half], transform, 50, torch.clone), 6)
    tuned = create_model("vit_digits_patch2_8", img_size=16, **options)
    report = load_weights(tuned, small.state_dict())
    assert "4x4 (assumed) resized to 8x8" in report.positions and set(report.reinitialised) == {
        "head.weight",
        "head.bias",
    }
    assert tuned(enlarged[:2]).abs().sum() == 0
    assert final_loss(tuned, batches, 4) < 0.8 * final_loss(random, batches, 4)
