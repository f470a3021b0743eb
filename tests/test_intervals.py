"""Intervals of scores, the digits of percentages, and the pictures that show mistakes."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binomtest

from fastvit_triton.intervals import accuracy_text, percent, precision_text, span, wilson
from fastvit_triton.train import evaluate, plots
from fastvit_triton.train.detection import average_precision
from fastvit_triton.train.detection.average_precision import NAMES
from fastvit_triton.train.loop import Score

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("images", [1, 24, 50_000])
def test_wilson(images: int):
    """Oracle: SciPy, to the rounding of the roots of a quadratic; none, all and any number of correct images."""
    for correct in {0, 1, images // 3, images - 1, images}:
        wanted = binomtest(correct, images).proportion_ci(method="wilson")
        assert wilson(correct, images) == pytest.approx(tuple(wanted), abs=1e-12), correct
    assert wilson(0, images)[0] == 0 and wilson(images, images)[1] == 1


def test_digits_follow_from_the_number_of_images():
    """Oracle: by hand: one image more changes the text, as long as two decimals suffice for that."""
    for images in (1, 24, 99, 100, 360, 1_000, 1_001, 9_999):
        shown = [percent(k / images, images) for k in range(images + 1)]
        assert len(set(shown)) == images + 1 and shown[0].strip("0. %") == ""
    assert percent(0.96944, 360) == "96.9 %" and percent(0.96944, 50_000) == "96.94 %" and percent(None) == "-"
    assert accuracy_text(1.0, 24) == "100 % (24 of 24 images, 95 % interval 86 to 100 % by Wilson)"
    assert accuracy_text(349 / 360, 360) == "96.9 % (349 of 360 images, 95 % interval 94.6 to 98.3 % by Wilson)"
    assert accuracy_text(0.5, None) == "50.0 %" and span(None, 1.0) == "-"
    shares = {"ap": 0.61, "ap50": 0.9, "ap75": None, "ap_low": 0.473, "ap_high": 0.747}
    text = "AP 61 % (24 images, 95 % interval 47 to 75 % by bootstrap), AP50 90 %, AP75 -"
    assert precision_text(shares, 24) == text
    assert precision_text({"ap": 0.61, "ap50": 0.9}, None) == "AP 61.0 %, AP50 90.0 %"


def detections(count: int) -> tuple[list[dict], list[dict]]:
    """Detections and objects of two classes in small images; some of the images have none of one class, or none."""
    generator = torch.Generator().manual_seed(0)
    found, wanted = [], []
    for i in range(count):
        corners = 40 * torch.rand(i % 4, 2, generator=generator)
        boxes = torch.cat([corners, corners + 10 + 20 * torch.rand(i % 4, 2, generator=generator)], 1)
        labels = torch.randint(0, 2, (i % 4,), generator=generator)
        wanted.append(dict(boxes=boxes, labels=labels))
        moved = torch.cat([boxes + 2 * torch.randn(boxes.shape, generator=generator), torch.tensor([[1.0, 1, 30, 30]])])
        scores = torch.rand(len(moved), generator=generator)
        found.append(dict(boxes=moved, labels=torch.cat([labels, torch.tensor([i % 2])]), scores=scores))
    return found, wanted


def test_the_bootstrap_counts_images_as_often_as_they_are_drawn(monkeypatch: pytest.MonkeyPatch):
    """Oracle: the score of the list of drawn images, and the standard deviation of these scores."""
    found, wanted = detections(9)
    weights = torch.randint(0, 3, (5, 9), generator=torch.Generator().manual_seed(1)).numpy()
    draws = SimpleNamespace(multinomial=lambda *words, size: weights)
    monkeypatch.setattr("numpy.random.default_rng", lambda seed: draws)
    scores = average_precision(found, wanted, draws=5)
    assert {name: scores[name] for name in NAMES} == average_precision(found, wanted)
    drawn = [[i for i, weight in enumerate(row) for _ in range(weight)] for row in weights]
    each = [average_precision([found[i] for i in rows], [wanted[i] for i in rows]) for rows in drawn]
    for name in ("ap", "ap50", "ap75"):
        values = torch.tensor([numbers[name] for numbers in each], dtype=torch.float64)
        assert values.std() > 0.01
        half = 1.959963984540054 * values.std().item()
        bounds = max(scores[name] - half, 0), min(scores[name] + half, 1)
        assert (scores[f"{name}_low"], scores[f"{name}_high"]) == pytest.approx(bounds, abs=1e-12)


def test_a_bootstrap_that_says_nothing_has_no_interval():
    """Oracle: −1 for a perfect score, one image, and images without objects; the same bounds in each call."""
    wanted = detections(8)[1]
    perfect = [target | dict(scores=torch.ones(len(target["labels"]))) for target in wanted]
    for found, objects in ((perfect, wanted), (perfect[3:4], wanted[3:4]), (perfect[:1], wanted[:1])):
        scores = average_precision(found, objects, 10)
        assert scores["ap"] in (pytest.approx(1), -1) and scores["ap_low"] == scores["ap_high"] == -1
    assert average_precision(*detections(8), 10) == average_precision(*detections(8), 10)


def test_confidences_are_probabilities_of_predictions():
    """Oracle: softmax of the logits, by hand."""
    logits = torch.tensor([[0.0, 1, 2], [5, 0, 0], [0, 3, 0]])
    model = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(model.weight)
    score = evaluate(model, [(logits[:2], torch.tensor([2, 1])), (logits[2:], torch.tensor([1]))])
    assert torch.equal(score.confidences, logits.softmax(1).max(1).values) and score.images == 3


@pytest.mark.parametrize("count, most, shown", [(1, 60, 1), (23, 60, 20), (24, 60, 24), (50, 12, 12), (7, 60, 6)])
def test_the_most_confident_mistakes_come_first(count: int, most: int, shown: int):
    """Oracle: the order by hand; each place of the grid holds an image."""
    drawn: list[int] = []
    show = SimpleNamespace(display_image=lambda i: drawn.append(i) or torch.zeros(1, 4, 4))
    data = SimpleNamespace(classes=("a", "a long name"), test=show)
    targets = torch.zeros(count, dtype=torch.long)
    predictions = (torch.arange(count) % 5 == 3).long()
    confidences = torch.rand(count, generator=torch.Generator().manual_seed(0))
    accuracy = float((predictions == targets).float().mean())
    page = plots.predictions(data, Score(0.1, accuracy, predictions, targets, confidences=confidences), most)
    wrong = sorted((i for i in range(count) if i % 5 == 3), key=lambda i: -confidences[i])
    right = sorted((i for i in range(count) if i % 5 != 3), key=lambda i: confidences[i])
    assert drawn == [*wrong, *right][:shown] and len(page.axes) == shown
    titles = [axes.get_title() for axes in page.axes]
    assert [title.count("\n") for title in titles] == [int(i % 5 == 3) for i in drawn]
    assert all(f", {100 * confidences[i]:.0f} %" in title for i, title in zip(drawn, titles, strict=True))
    assert f"{count - len(wrong)} of {count} images" in page._suptitle.get_text()


def test_the_most_confident_wrong_boxes_come_first():
    """Oracle: the order by hand: wrong boxes by score, then missed objects by number, then what is right."""
    box, far = torch.tensor([[0.0, 0, 9, 9]]), torch.tensor([[20.0, 20, 29, 29]])
    one, none = torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    cases = [(box, 0.9, one), (far, 0.6, one), (box, 0.2, one), (far, 0.8, one), (far, 0.3, none)]
    found = [dict(boxes=boxes, labels=one, scores=torch.tensor([score])) for boxes, score, _ in cases]
    wanted = [dict(boxes=box[: len(labels)], labels=labels) for *_, labels in cases]
    drawn: list[int] = []
    show = SimpleNamespace(display_image=lambda i: drawn.append(i) or torch.zeros(3, 30, 30))
    data = SimpleNamespace(classes=("a",), test=show)
    plots.detections(data, Score(0.1, metrics={"ap": 0.5, "ap50": 0.5}, detections=found, objects=wanted))
    assert drawn == [3, 1, 2, 0, 4]
