"""Average precision of detections as COCO defines it: twelve numbers, equal to those of pycocotools.

Precision is interpolated at 101 recalls and averaged over ten thresholds of intersection over union, 0.50 to 0.95, over
classes, and over recalls. A detection is a true positive if it is matched, in the order of scores, to an object of its
class that has not been matched yet. Source: https://cocodataset.org/#detection-eval and pycocotools 2.0.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...intervals import Z

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
MOST = (1, 10, 100)  # detections of an image and class
NAMES = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar_1", "ar_10", "ar_100", "ar_small", "ar_medium", "ar_large"),
)


class _Matched(NamedTuple):
    """Detections of one image and class, best first, for A ranges of area and T thresholds."""

    scores: Any  # [D]
    hit: Any  # [A, T, D], matched to an object
    ignored: Any  # [A, T, D], neither right nor wrong
    objects: Any  # [A], objects that count


def average_precision(
    detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], draws: int = 0
) -> dict[str, float]:
    """COCO's twelve numbers, by the names of `NAMES`; −1 where there is no object."""
    by_class: defaultdict[int, list[_Matched]] = defaultdict(list)
    images: defaultdict[int, list[int]] = defaultdict(list)  # those of each class
    for image, (detected, target) in enumerate(zip(detections, targets, strict=True)):
        for label, matched in _match_image(_numbers(detected), _numbers(target)):
            by_class[label].append(matched)
            images[label].append(image)
    curves = [_curves(by_class[label]) for label in sorted(by_class)]
    shape = (len(curves), len(AREAS), len(MOST), len(THRESHOLDS))
    precision = np.array([p for p, _ in curves]).reshape(*shape, len(RECALLS))
    recall = np.array([r for _, r in curves]).reshape(shape)

    def mean(values: Any) -> float:
        defined = values[values > -1]
        return float(defined.mean()) if defined.size else -1.0

    last = len(MOST) - 1
    numbers = [mean(precision[:, 0, last]), mean(precision[:, 0, last, 0]), mean(precision[:, 0, last, 5])]
    numbers += [mean(precision[:, area, last]) for area in (1, 2, 3)]
    numbers += [mean(recall[:, 0, most]) for most in range(len(MOST))]
    numbers += [mean(recall[:, area, last]) for area in (1, 2, 3)]
    scores = dict(zip(NAMES, numbers, strict=True))
    return scores | (_intervals(scores, by_class, images, len(detections), draws) if draws else {})


def _intervals(
    scores: Mapping[str, float],
    by_class: Mapping[int, list[_Matched]],
    images: Mapping[int, list[int]],
    total: int,
    draws: int,
) -> dict[str, float]:
    """95 % intervals of `ap`, `ap50` and `ap75`: ± 1.96 standard deviations over images drawn with replacement.

    The draws are the same in each call. Bounds are −1 where all draws give the same value, such as for a perfect score:
    a bootstrap then says nothing. Of few images the intervals are too narrow, as the score itself is then too high:
    simulated detectors of three classes are inside for 92 to 94 % of sets of 100 images, and 84 to 90 % of 24. The
    percentiles of the draws, which lie above the score, were worse. Source: Efron & Tibshirani, An introduction to the
    bootstrap, 1993, chapters 6 and 13.
    """
    weights = np.random.default_rng(0).multinomial(total, np.full(total, 1 / total), size=draws)  # [draws, images]
    precision = np.full((draws, len(by_class), len(THRESHOLDS)), np.nan)
    for c, label in enumerate(by_class):
        precision[:, c] = _drawn(by_class[label], weights[:, images[label]])
    bounds = {}
    for name, thresholds in {"ap": range(len(THRESHOLDS)), "ap50": [0], "ap75": [5]}.items():
        values = precision[:, :, list(thresholds)].reshape(draws, -1)
        values = np.nanmean(values[~np.isnan(values).all(1)], 1)  # draws without any object have none
        half = Z * values.std(ddof=1) if len(values) > 1 else 0.0
        inside = [max(scores[name] - half, 0.0), min(scores[name] + half, 1.0)]
        bounds[f"{name}_low"], bounds[f"{name}_high"] = map(float, inside if half > 1e-9 else (-1.0, -1.0))
    return bounds


def _drawn(images: list[_Matched], weights: Any) -> Any:
    """Average precision [draws, T] of one class whose images count `weights` [draws, images] times; NaN of none."""
    lengths = [len(image.scores) for image in images]
    order = np.argsort(-np.concatenate([image.scores for image in images]), kind="stable")
    of = np.repeat(np.arange(len(images)), lengths)[order]  # the image of each detection
    hit, ignored = (
        np.concatenate([part[0] for part in parts], -1)[:, order]
        for parts in ([image.hit for image in images], [image.ignored for image in images])
    )
    objects = weights @ np.array([image.objects[0] for image in images])
    found = np.full((len(weights), len(THRESHOLDS)), np.nan)
    for i in np.flatnonzero(objects):
        right = np.cumsum((hit & ~ignored) * weights[i, of], -1, dtype=np.float64)  # [T, D]
        wrong = np.cumsum((~hit & ~ignored) * weights[i, of], -1, dtype=np.float64)
        found[i] = [_at_recalls(r, w, objects[i]).mean() for r, w in zip(right, wrong, strict=True)]
    return found


def _at_recalls(right: Any, wrong: Any, objects: int) -> Any:
    """Precision at each recall of `RECALLS`, from the numbers of right and wrong detections [D], best first."""
    precisions = right / (right + wrong + np.spacing(1))
    precisions = np.maximum.accumulate(precisions[::-1])[::-1]  # does not rise with recall
    return np.append(precisions, 0.0)[np.searchsorted(right / objects, RECALLS)]


def _numbers(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arrays on the CPU; boxes as left, top, width and height in float64."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in values.items()}
    boxes = arrays["boxes"].astype(np.float64).reshape(-1, 4)
    arrays["boxes"] = np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)
    return arrays


def _match_image(found: dict[str, Any], target: dict[str, Any]) -> list[tuple[int, _Matched]]:
    """(class, matches) of each class of an image that has detections or objects."""
    count = len(target["boxes"])
    crowd = target.get("crowd", np.zeros(count)).astype(bool)
    areas = target.get("areas", target["boxes"][:, 2:].prod(1)).astype(np.float64)
    matches = []
    for label in sorted({*found["labels"].tolist(), *target["labels"].tolist()}):
        mine = np.flatnonzero(found["labels"] == label)
        mine = mine[np.argsort(-found["scores"][mine], kind="stable")][: MOST[-1]]
        real = target["labels"] == label
        boxes = found["boxes"][mine]
        overlaps = _overlaps(boxes, target["boxes"][real], crowd[real])
        matches.append((label, _match(found["scores"][mine], boxes, overlaps, areas[real], crowd[real])))
    return matches


def _overlaps(found: Any, real: Any, crowd: Any) -> Any:
    """Intersection over union [D, G]; over the area of the detection for crowds. Boxes: left, top, width, height."""
    low = np.maximum(found[:, None, :2], real[:, :2])
    high = np.minimum(found[:, None, :2] + found[:, None, 2:], real[:, :2] + real[:, 2:])
    common = np.clip(high - low, 0, None).prod(-1)
    area = found[:, 2:].prod(1)[:, None]
    union = np.where(crowd, area, area + real[:, 2:].prod(1) - common)
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def _match(scores: Any, boxes: Any, overlaps: Any, areas: Any, crowd: Any) -> _Matched:
    """Gives each detection, best first, the free object that it overlaps most; crowds are always free."""
    D, G = overlaps.shape
    low, high = np.array(list(AREAS.values())).T
    skip = crowd | (areas < low[:, None]) | (areas > high[:, None])  # [A, G]
    taken = np.zeros((len(AREAS), len(THRESHOLDS), G), bool)
    hit = np.zeros((len(AREAS), len(THRESHOLDS), D), bool)
    ignored = np.zeros_like(hit)
    least = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]
    for d in range(D if G else 0):
        free = (~taken | crowd) & (overlaps[d] >= least)  # [A, T, G]
        counted = free & ~skip[:, None]
        choice = np.where(counted.any(-1, keepdims=True), counted, free)  # ignored objects only if no other is free
        best = G - 1 - np.argmax(np.where(choice, overlaps[d], -1.0)[..., ::-1], -1)  # the last of equals
        hit[..., d] = choice.any(-1)
        ignored[..., d] = hit[..., d] & np.take_along_axis(skip, best, 1)
        np.put_along_axis(taken, best[..., None], np.take_along_axis(taken, best[..., None], 2) | hit[..., d, None], 2)
    size = boxes[:, 2:].prod(1)
    outside = (size < low[:, None]) | (size > high[:, None])  # [A, D]
    ignored |= ~hit & outside[:, None]
    return _Matched(scores, hit, ignored, (~skip).sum(1))


def _curves(images: list[_Matched]) -> tuple[Any, Any]:
    """Precision [A, M, T, R] at each recall, and largest recall [A, M, T], of one class; −1 without objects."""
    objects = sum(image.objects for image in images)
    precision = np.full((len(AREAS), len(MOST), len(THRESHOLDS), len(RECALLS)), -1.0)
    recall = np.full(precision.shape[:3], -1.0)
    for m, most in enumerate(MOST):
        scores = np.concatenate([image.scores[:most] for image in images])
        order = np.argsort(-scores, kind="stable")
        hit, ignored = (
            np.concatenate([part[..., :most] for part in parts], -1)[..., order]
            for parts in ([image.hit for image in images], [image.ignored for image in images])
        )
        right = np.cumsum(hit & ~ignored, -1, dtype=np.float64)  # [A, T, D]
        wrong = np.cumsum(~hit & ~ignored, -1, dtype=np.float64)
        for a in np.flatnonzero(objects):
            for t in range(len(THRESHOLDS)):
                precision[a, m, t] = _at_recalls(right[a, t], wrong[a, t], objects[a])
                recall[a, m, t] = right[a, t, -1] / objects[a] if right.shape[-1] else 0.0
    return precision, recall
