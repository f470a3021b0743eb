"""Tests of training with a class for each pixel: loss, scores, masks of scenes, and a run that learns."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import jaccard_score

from benchmarks.trainings import SETR, SETR_OPTIONS, rows_of
from fastvit_triton import create_model
from fastvit_triton.train import Step, fit
from fastvit_triton.train.detection import scenes
from fastvit_triton.train.segmentation import (
    BACKGROUND,
    IGNORED,
    confusion_of,
    evaluate_segmentation,
    intersections_over_unions,
    masks_of,
    scene_masks,
    segmented,
)

TINY = dict(embed_dim=16, depth=2, num_heads=2, decoder_dim=8)


def test_the_loss_is_the_mean_over_pixels_and_decoders():
    """Oracle: the terms by hand, in float64; ignored pixels have no gradient."""
    model = create_model("setr_digits", **TINY, aux_indices=(0,)).double().train()
    images = torch.randn(2, 1, 32, 32, dtype=torch.float64)
    masks = torch.randint(11, (2, 32, 32))
    masks[:, :10] = IGNORED
    torch.manual_seed(1)
    loss, logits = segmented(0.3)(model, images, masks)
    first, other = model(images)  # BatchNorms use the batch, so the second call is the same
    terms = [
        -y.log_softmax(1).gather(1, masks[:, None].clamp(max=10))[:, 0][masks != IGNORED].mean() for y in (first, other)
    ]
    want = terms[0] + 0.3 * terms[1]
    assert logits is None and (loss - want).abs() <= 1e3 * torch.finfo(torch.float64).eps * want
    leaf = first.detach().requires_grad_()
    segmented()(lambda logits: logits, leaf, masks)[0].backward()
    assert leaf.grad is not None and not leaf.grad[:, :, :10].any() and leaf.grad[:, :, 10:].all()


def test_scores_equal_scikit_learns():
    """Oracle: sklearn.metrics.jaccard_score; a class that occurs nowhere is left out of the mean."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(4, (3, 8, 8), generator=generator)
    predictions = torch.where(torch.rand(masks.shape, generator=generator) < 0.6, masks, 3 - masks)
    masks[0, 0] = IGNORED
    kept = masks != IGNORED
    found = intersections_over_unions(confusion_of(predictions, masks, 5))
    want = jaccard_score(masks[kept], predictions[kept], average=None, labels=range(4))
    assert found[:4].tolist() == pytest.approx(list(want), rel=8 * torch.finfo(torch.float64).eps) and found[4].isnan()

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, images):
            return 10.0 * F.one_hot(images[:, 0].long(), 5).movedim(-1, 1) + self.weight

    model = Fixed().train()
    batches = [(predictions[i : i + 2, None].float(), masks[i : i + 2]) for i in (0, 2)]
    score = evaluate_segmentation(model, batches)
    assert score.metrics["miou"] == pytest.approx(float(want.mean())) and model.training
    assert score.metrics["pixel_accuracy"] == pytest.approx(float((masks == predictions)[kept].float().mean()))
    logits = torch.cat([model(images) for images, _ in batches])
    assert score.loss == pytest.approx(float(F.cross_entropy(logits.detach(), masks, ignore_index=IGNORED)))
    with pytest.raises(ValueError, match="no test images"):
        evaluate_segmentation(model, [])


def test_masks_are_the_ink_of_the_digits():
    """Oracle: every inked pixel of a box of one digit has its class, and no pixel outside of boxes has one."""
    images, targets = scenes("test", 20, 3, noise=0.0)
    masks = masks_of(images, targets)
    assert masks.shape == (20, 32, 32) and set(masks.unique().tolist()) <= {*range(11)}
    for image, target, mask in zip(images[:, 0], targets, masks, strict=True):
        assert torch.equal((mask != BACKGROUND), image > 0.2)
        assert set(mask.unique().tolist()) - {BACKGROUND} == set(target["labels"].tolist())
        if len(target["labels"]) == 1:
            assert set(mask[image > 0.2].tolist()) == {int(target["labels"])}
    batches = scene_masks("test", 20, 3, batch_size=8)
    assert [tuple(m.shape) for _, m in batches] == [(8, 32, 32), (8, 32, 32), (4, 32, 32)]
    assert torch.equal(torch.cat([m for _, m in batches]), masks)


def test_a_model_learns_a_few_scenes():
    """Oracle: an answer that knows which pixels are ink, but gives all of them the most frequent digit.

    The model, trained by `fit`, has a higher mean intersection over union and fewer wrong pixels.
    """
    model = create_model("setr_digits", **TINY)
    batches = scene_masks("train", 8, batch_size=8)
    masks = torch.cat([masks for _, masks in batches])
    ink = masks != BACKGROUND
    confusion = confusion_of(masks.where(~ink, masks[ink].mode().values), masks, BACKGROUND + 1)
    optimizer = torch.optim.AdamW(model.parameters())
    test = partial(evaluate_segmentation, batches=batches)
    step = Step(objective=segmented())
    *_, last = fit(model, batches, optimizer, lambda step: 1e-2, epochs=50, step=step, test=test, test_once=True)
    assert last.test.metrics["miou"] > intersections_over_unions(confusion).nanmean()
    assert last.test.metrics["pixel_accuracy"] > confusion.diagonal().sum() / confusion.sum()
    assert last.test.mark == last.test.metrics["miou"]


def test_committed_figures_are_those_of_the_docs():
    """Oracle: the result file: its options are the script's, and the page has its figures."""
    (result,) = rows_of("segmentation")
    page = (Path(__file__).parent.parent / "docs" / "detect.md").read_text()
    last = result["log"][-1]
    assert (result["name"], result["options"]) == (SETR, SETR_OPTIONS) and result["steps"] == last["epoch"] * 400
    assert sum(p.numel() for p in create_model(SETR).parameters()) == result["parameters"]
    for figure in (
        f"{100 * last['miou']:.1f} %",
        f"{100 * last['pixel_accuracy']:.1f} %",
        f"{result['steps']:,} steps",
    ):
        assert figure in page
    assert f"{result['core_seconds'] / 60:.0f} minutes of one core" in page
