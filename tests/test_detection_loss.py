"""Tests of what trains and judges detectors. Oracles: transformers, torchvision, and equations."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from agreement import ROUNDINGS
from torchvision.ops import box_iou, generalized_box_iou
from transformers.loss import loss_deformable_detr, loss_for_object_detection

from fastvit_triton.train.detection import (
    DEFORMABLE,
    DETR,
    Costs,
    average_precision,
    detected,
    from_corners,
    generalized_iou,
    intersection_over_union,
    match,
    to_corners,
)
from fastvit_triton.train.detection.average_precision import NAMES

EPS = torch.finfo(torch.float64).eps
CLASSES = 7


def draw_boxes(*shape: int) -> torch.Tensor:
    """Centres and sizes in fractions of the image, float64."""
    return torch.cat((torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.02), -1).double()


def draw_outputs(classes: int, images: int = 3, queries: int = 20) -> dict[str, torch.Tensor]:
    logits = torch.randn(images, queries, classes, dtype=torch.float64)
    return dict(logits=logits.requires_grad_(), boxes=draw_boxes(images, queries).requires_grad_())


def draw_targets(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [dict(labels=torch.randint(CLASSES, (n,)), boxes=draw_boxes(n)) for n in counts]


def as_theirs(outputs, targets):
    """Outputs and targets with the keys of transformers."""
    theirs = dict(logits=outputs["logits"], pred_boxes=outputs["boxes"])
    return theirs, [dict(class_labels=t["labels"], boxes=t["boxes"]) for t in targets]


def test_generalized_iou_equals_torchvision():
    """Oracle: torchvision's, of all pairs; gradients exist where a box has no area."""
    a, b = to_corners(draw_boxes(9)), to_corners(draw_boxes(6))
    torch.testing.assert_close(generalized_iou(a[:, None], b), generalized_box_iou(a, b), rtol=0, atol=ROUNDINGS * EPS)
    torch.testing.assert_close(intersection_over_union(a[:, None], b), box_iou(a, b), rtol=0, atol=ROUNDINGS * EPS)
    torch.testing.assert_close(to_corners(from_corners(a)), a, rtol=0, atol=ROUNDINGS * EPS)
    point = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    generalized_iou(to_corners(point), b).sum().backward()
    assert point.grad.isfinite().all() and point.grad.any()


def cost_by_equation(kind: str, logits, boxes, labels, wanted, costs: Costs) -> torch.Tensor:
    """The cost of every query for every object, [Q, n], term by term."""
    if kind == "softmax":
        classes = -logits.softmax(-1)[:, labels]
    else:
        p = logits.sigmoid()[:, labels]
        classes = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log()
    l1 = (boxes[:, None] - wanted).abs().sum(-1)
    giou = generalized_box_iou(to_corners(boxes), to_corners(wanted))
    return costs.label * classes + costs.l1 * l1 - costs.giou * giou


@pytest.mark.parametrize("kind", ["softmax", "focal"])
@pytest.mark.parametrize("queries, objects", [(6, 4), (3, 5), (4, 0)])
def test_matching_is_optimal(kind, queries, objects):
    """Oracle: the least cost of all assignments, one after the other."""
    outputs, targets = draw_outputs(CLASSES + 1, 2, queries), draw_targets(objects, objects)
    costs = Costs(1.5, 4.0, 3.0)
    for i, (found, taken) in enumerate(match(outputs, targets, costs, kind)):
        target = targets[i]
        table = cost_by_equation(
            kind, outputs["logits"][i], outputs["boxes"][i], target["labels"], target["boxes"], costs
        ).detach()
        most = min(queries, objects)
        assert len(found) == len(taken) == most == len(set(found.tolist())) == len(set(taken.tolist()))
        rows, columns = (table, taken) if queries >= objects else (table.T, found)
        choices = itertools.permutations(range(len(rows)), most)
        least = min((sum(float(rows[q, n]) for n, q in enumerate(choice)) for choice in choices), default=0.0)
        assert len(columns) == most and abs(float(table[found, taken].sum()) - least) <= ROUNDINGS * EPS * (
            1 + abs(least)
        )


def test_matching_names_what_is_not_finite():
    """Oracle: one sentence instead of SciPy's error."""
    outputs = draw_outputs(CLASSES + 1)
    with torch.no_grad():
        outputs["boxes"][1, 2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        match(outputs, draw_targets(1, 2, 0), Costs())


@pytest.mark.parametrize("kind", ["softmax", "focal"])
def test_criterion_equals_transformers(kind):
    """Oracle: transformers' losses in float64, also of an auxiliary layer and of an image without objects.

    Its Deformable DETR counts objects by arg max, which differs from the authors' code.
    """
    targets = draw_targets(4, 0, 6)
    classes = CLASSES + (kind == "softmax")
    outputs, layer = draw_outputs(classes), draw_outputs(classes)
    theirs, labels = as_theirs(outputs, targets)
    theirs["auxiliary_outputs"] = [as_theirs(layer, targets)[0]]
    kinds = ["labels", "boxes", "cardinality"]
    if kind == "softmax":
        criterion = DETR
        matcher = loss_for_object_detection.HungarianMatcher(1, 5, 2)
        oracle = loss_for_object_detection.ImageLoss(matcher, CLASSES, 0.1, kinds).double()
        oracle.empty_weight[-1] = 0.1  # not rounded to float32
    else:
        criterion = DEFORMABLE
        matcher = loss_deformable_detr.DeformableDetrHungarianMatcher(2, 5, 2)
        oracle = loss_deformable_detr.DeformableDetrImageLoss(matcher, CLASSES, 0.25, kinds)
    wanted = {name: loss.detach() for name, loss in oracle(theirs, labels).items()}
    found = {name: loss.detach() for name, loss in criterion({**outputs, "aux": [layer]}, targets).items()}
    names = {"labels": "loss_ce", "boxes": "loss_bbox", "giou": "loss_giou"}
    for ours, name in names.items():
        for suffix in ("", "_0"):
            want = wanted[name + suffix]
            assert abs(float(found[ours + suffix] - want)) <= ROUNDINGS * EPS * float(want) and want > 0
    assert float(found["cardinality"]) == float(wanted["cardinality_error"])
    weights = dict(loss_ce=criterion.weights.label, loss_bbox=5, loss_giou=2)
    total = sum(weights[name] * wanted[name + suffix] for name in weights for suffix in ("", "_0"))
    assert abs(float(criterion.total(found) - total)) <= ROUNDINGS * EPS * float(total)


def test_two_stage_loss_equals_equations():
    """Oracle: the focal loss of "an object or none" in class 0, and L1, written out, for proposals that coincide."""
    (target,) = targets = draw_targets(3)
    logits = torch.randn(1, 5, CLASSES, dtype=torch.float64)
    boxes = torch.cat((target["boxes"] + 0.01, draw_boxes(2)))[None]
    logits[0, :3, 0] = 3.0  # so that proposal i is matched to object i
    found = DEFORMABLE({**draw_outputs(CLASSES, 1), "proposals": dict(logits=logits, boxes=boxes)}, targets)
    p = logits.sigmoid()
    loss = 0.75 * p**2 * -F.logsigmoid(-logits)
    loss[0, :3, 0] = (0.25 * (1 - p) ** 2 * -F.logsigmoid(logits))[0, :3, 0]
    assert abs(float(found["labels_enc"] - loss.sum() / 3)) <= ROUNDINGS * EPS * float(loss.sum())
    assert abs(float(found["boxes_enc"]) - 4 * 0.01) <= ROUNDINGS * EPS
    assert {"labels", "boxes", "giou", "cardinality", "giou_enc"} <= found.keys()


@pytest.mark.parametrize("criterion", [DETR, DEFORMABLE], ids=lambda c: c.kind)
def test_no_objects(criterion):
    """Oracle: boxes cost nothing, classes learn that there is nothing, gradients are finite."""
    outputs, targets = draw_outputs(CLASSES), draw_targets(0, 0, 0)
    losses = criterion(outputs, targets)
    assert losses["boxes"].item() == losses["giou"].item() == 0 < losses["labels"].item()
    criterion.total(losses).backward()
    assert outputs["logits"].grad.any() and outputs["boxes"].grad.isfinite().all()


def test_the_objective_is_the_weighted_sum():
    """Oracle: `total` of the parts of what the model returns."""
    outputs, targets = draw_outputs(CLASSES), draw_targets(1, 2, 3)
    loss, logits = detected(DEFORMABLE)(lambda images: outputs, None, targets)
    assert logits is None and torch.equal(loss, DEFORMABLE.total(DEFORMABLE(outputs, targets)))


# Average precision


def test_average_precision_equals_numbers_by_hand(capsys):
    """Oracle: precision at 101 recalls and recall, counted by hand, of a class of each size, and nothing printed."""

    def labelled(label, corners, **columns):
        columns = {name: torch.tensor(values) for name, values in columns.items()}
        boxes = torch.tensor(corners, dtype=torch.float64)
        return dict(boxes=boxes, labels=torch.full((len(corners),), label), **columns)

    # Class 2, small by its box: one object, found with an overlap of 0.72, which five of ten thresholds allow.
    small = labelled(2, [(0, 0, 20, 20)]), labelled(2, [(0, 0, 20, 14.4)], scores=[0.3])
    # Class 5, medium by its areas: one of three objects is found; the best box, in a crowd, is neither right nor wrong.
    places = [(0, 0, 20, 20), (30, 0, 50, 20), (60, 0, 80, 20), (0, 50, 99, 99)]
    crowd = dict(areas=[2e3, 2e3, 2e3, 5e3], crowd=[False, False, False, True])
    medium = labelled(5, places, **crowd), labelled(5, [places[1], (10, 60, 30, 80)], scores=[0.8, 0.9])
    # Class 7, large: of four objects two are found, second and twelfth among wrong boxes.
    places = [(200 * i, 0, 200 * i + 100, 100) for i in range(4)]
    found = [(200 * i, 500, 200 * i + 100, 600) for i in range(12)]
    found[1], found[11] = places[3], places[0]
    large = labelled(7, places), labelled(7, found, scores=[1 - i / 20 for i in range(12)])
    targets, detections = zip(small, medium, large, strict=True)
    precisions = 34 / 101, (26 / 2 + 25 / 6) / 101  # at recalls up to 1/3; up to 1/4 and 1/2
    wanted = [(0.5 + sum(precisions)) / 3, (1 + sum(precisions)) / 3, sum(precisions) / 3, 0.5, *precisions]
    wanted += [0.5 / 3, (0.5 + 1 / 3 + 1 / 4) / 3, (0.5 + 1 / 3 + 1 / 2) / 3, 0.5, 1 / 3, 1 / 2]
    numbers = average_precision(detections, targets)
    assert list(numbers) == list(NAMES) and list(numbers.values()) == pytest.approx(wanted, abs=ROUNDINGS * EPS)
    assert capsys.readouterr() == ("", "")
    assert average_precision([*detections[1:], detections[0]], targets)["ap50"] == 0  # of other images


def test_average_precision_without_pycocotools(monkeypatch: pytest.MonkeyPatch):
    """Oracle: one sentence with the command that installs it."""
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(ValueError, match=r"needs pycocotools; pip install 'fastvit_triton\[detect\]'"):
        average_precision([], [])


def test_average_precision_of_unequal_numbers():
    one = dict(boxes=torch.tensor([[0.5, 0.5, 0.2, 0.2]]), labels=torch.tensor([0]), scores=torch.tensor([0.9]))
    with pytest.raises(ValueError, match="detections are of 2 images, targets of 1; give both of each image"):
        average_precision([one, one], [one])


def test_average_precision_of_nothing():
    """Oracle: −1 without objects, 0 without detections, 1 if all are right."""
    target = dict(boxes=torch.tensor([[0.0, 0, 10, 10]]), labels=torch.tensor([1]))
    empty = dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), scores=torch.zeros(0))
    assert set(average_precision([empty], [{**empty}]).values()) == {-1.0}
    assert average_precision([empty], [target])["ap"] == 0
    assert average_precision([target | dict(scores=torch.ones(1))], [target])["ap"] == pytest.approx(1, abs=EPS)
