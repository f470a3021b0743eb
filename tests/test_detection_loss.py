"""Tests of what trains and judges detectors. Oracles: transformers, torchvision, pycocotools, and equations."""

import contextlib
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from agreement import ROUNDINGS
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
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


def scene(generator: torch.Generator, objects: int, extra: int) -> tuple[dict, dict]:
    """Integer boxes of objects, some of them crowds, and detections near them and elsewhere, with equal scores."""

    def number(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    side = torch.tensor([8, 40, 140])[number(0, 3, objects)]
    low = number(0, 200, objects, 2)
    real = torch.cat((low, low + side[:, None] + number(0, 9, objects, 2)), 1)
    near = real + number(-3, 4, objects, 4)
    low = number(0, 200, extra, 2)
    boxes = torch.cat((near, near + number(-2, 3, objects, 4), torch.cat((low, low + number(1, 90, extra, 2)), 1)))
    labels = torch.cat((number(0, 3, objects), number(0, 3, objects + extra)))
    target_labels = torch.where(number(0, 4, objects) > 0, labels[:objects], number(0, 3, objects))
    scores = number(1, 30, len(boxes)).double() / 32
    crowd = number(0, 6, objects) == 0
    areas = (real[:, 2:] - real[:, :2]).prod(1).double() * 0.75  # as of masks
    target = dict(boxes=real.double(), labels=target_labels, crowd=crowd, areas=areas)
    return dict(boxes=boxes.double(), labels=labels, scores=scores), target


def by_pycocotools(detections: list[dict], targets: list[dict]) -> list[float]:
    """The twelve numbers of COCOeval."""

    def box(corners):
        x0, y0, x1, y1 = corners.tolist()
        return [x0, y0, x1 - x0, y1 - y0]

    real, found = [], []
    for i, (detection, target) in enumerate(zip(detections, targets, strict=True)):
        for corners, label, crowd, area in zip(
            *(target[k] for k in ("boxes", "labels", "crowd", "areas")), strict=True
        ):
            row = dict(id=len(real) + 1, image_id=i, category_id=int(label), bbox=box(corners))
            real.append(row | dict(area=float(area), iscrowd=int(crowd)))
        for corners, label, score in zip(*(detection[k] for k in ("boxes", "labels", "scores")), strict=True):
            found.append(dict(image_id=i, category_id=int(label), bbox=box(corners), score=float(score)))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        images = [dict(id=i, width=400, height=400) for i in range(len(targets))]
        categories = [dict(id=i, name=str(i)) for i in range(4)]
        coco.dataset = dict(info={}, images=images, annotations=real, categories=categories)
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_average_precision_equals_pycocotools(seed):
    """Oracle: pycocotools: crowds, equal scores, images without objects or detections, over 100 detections a class."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(5, 3), (0, 4), (9, 0), (3, 420), (7, 9), (0, 0)]
    pairs = [scene(generator, objects, extra) for objects, extra in sizes]
    detections, targets = [d for d, _ in pairs], [t for _, t in pairs]
    found, wanted = average_precision(detections, targets), by_pycocotools(detections, targets)
    assert list(found) == list(NAMES) and len({round(w, 6) for w in wanted}) > 6
    for name, want in zip(NAMES, wanted, strict=True):
        assert abs(found[name] - want) <= ROUNDINGS * EPS, name


def test_equal_overlaps_are_matched_as_in_pycocotools():
    """Oracle: pycocotools, which takes the last of two objects that a detection overlaps equally."""
    real = torch.tensor([[0.0, 0, 10, 10], [4, 0, 14, 10]], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.int64)
    target = dict(boxes=real, labels=zeros, crowd=zeros.bool(), areas=torch.full((2,), 100.0))
    found = dict(boxes=torch.stack((real.mean(0), real[1])), labels=zeros, scores=torch.tensor([0.9, 0.8]))
    wanted = by_pycocotools([found], [target])
    assert 0 < wanted[1] < 1
    assert list(average_precision([found], [target]).values()) == pytest.approx(wanted, abs=ROUNDINGS * EPS)


def test_average_precision_of_nothing():
    """Oracle: pycocotools' −1 without objects, 0 without detections, 1 if all are right."""
    target = dict(boxes=torch.tensor([[0.0, 0, 10, 10]]), labels=torch.tensor([1]))
    empty = dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), scores=torch.zeros(0))
    assert set(average_precision([empty], [{**empty}]).values()) == {-1.0}
    assert average_precision([empty], [target])["ap"] == 0
    assert average_precision([target | dict(scores=torch.ones(1))], [target])["ap"] == pytest.approx(1, abs=EPS)
