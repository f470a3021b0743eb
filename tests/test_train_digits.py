"""Tests of training on the digits: fused kernels take the reference's steps, and each way reaches its accuracy."""

import math
from functools import partial

import pytest
import torch
from budget import allowed
from interpreter import interpreting

from benchmarks import trainings
from fastvit_triton.models import create_model
from fastvit_triton.train.augment.mix import mixup
from fastvit_triton.train.data import TensorBatches, digits
from fastvit_triton.train.loop import evaluate, fit
from fastvit_triton.train.optim import adamw
from fastvit_triton.train.step import Step


def path(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and all weights after each of three steps, with mixed batches, clipped gradients and AdamW."""
    torch.manual_seed(0)
    images, targets = (x[:12] for x in digits("train"))
    model = create_model("vit_digits_patch2_8", embed_dim=16, depth=1, num_heads=1).to(dtype)
    trainings.configure_model(trainings.DIGITS, model)
    batches = TensorBatches(images.to(dtype), targets, trainings.TRANSFORM, 4, torch.clone)
    step = Step(mix=partial(mixup, classes=10, alpha=0.4), clip=1.0)
    test = partial(evaluate, batches=[(images[:1].to(dtype), targets[:1])])
    losses, weights = [], []
    for progress in fit(model, batches, adamw(model, 1e-3, 0.05), lambda _: 1e-3, epochs=1, step=step, test=test):
        losses.append(progress.loss.double())
        weights.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    return torch.stack(losses), torch.stack(weights)


@pytest.mark.full
def test_fused_steps_equal_the_reference_steps():
    """Oracle: the same run in float64; after every step, the fused float32 run is at most twice as far from it as the
    float32 reference, plus one rounding of the largest number."""
    exact, plain = path(torch.float64), path(torch.float32)
    with interpreting():
        fused = path(torch.float32)
    assert not torch.equal(fused[1], plain[1])  # the kernels ran
    for want, ours, theirs in zip(exact, fused, plain, strict=True):
        for at, (w, a, b) in enumerate(zip(want, ours, theirs, strict=True)):
            most = allowed((b - w).abs().max(), w.abs().max(), torch.float32)
            assert (a - w).abs().max() <= most, f"step {at + 1}: {(a - w).abs().max():.2e} of {most:.2e}"


@pytest.mark.full
@pytest.mark.parametrize("way", trainings.WAYS)
def test_each_way_learns(way: str):
    """Oracle: the results of the same few epochs in results/trainings.json, minus three standard deviations of a share
    of 360 images, because other processors round differently. Masked pre-training with 100 labels learns little in
    eight epochs, so its loss is tested: it varies by 0.02 between seeds and is 0.08 higher after one epoch."""
    committed = next(row for row in trainings.rows_of("learn") if row["name"] == f"{way} quick")
    found = trainings.WAYS[way](committed["epochs"])
    if way == "masked":
        assert found["masked_loss"] <= committed["masked_loss"] + 3 * 0.02
        return
    share, chance = committed["accuracy"], 1 / len("0123456789")
    mark = share - 3 * math.sqrt(share * (1 - share) / len(digits("test")[1]))
    assert found["accuracy"] >= mark > chance


@pytest.mark.fast
def test_the_file_has_every_row_of_the_table(tmp_path):
    """Oracle: the names and seeds of the table; a row that is stored again takes its own place."""
    rows = trainings.stored(trainings.RESULT)
    want = [
        (name, row, seed)
        for name, training in trainings.TRAININGS.items()
        for seed in range(training.seeds)
        for row in training.rows
    ]
    assert [(row["training"], row["name"], row["seed"]) for row in rows] == want
    for row in (*rows[::-1], rows[3] | dict(core_seconds=0)):
        trainings.store(row, tmp_path / "trainings.json")
    again = trainings.stored(tmp_path / "trainings.json")
    assert again == [*rows[:3], rows[3] | dict(core_seconds=0), *rows[4:]]
