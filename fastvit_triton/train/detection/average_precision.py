"""Average precision of detections as COCO defines it, by pycocotools, and intervals by a bootstrap over the images.

Source: https://cocodataset.org/#detection-eval
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from torch import Tensor

from ...intervals import Z

RECALLS = np.linspace(0, 1, 101)
NAMES = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar_1", "ar_10", "ar_100", "ar_small", "ar_medium", "ar_large"),
)


def average_precision(
    detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], draws: int = 0
) -> dict[str, float]:
    """COCO's twelve numbers, by the names of `NAMES`; −1 where there is no object."""
    if len(detections) != len(targets):
        raise ValueError(
            f"detections are of {len(detections)} images, targets of {len(targets)}; give both of each image"
        )
    COCO, COCOeval = pycocotools_classes()
    labels = sorted({label for part in (*detections, *targets) for label in part["labels"].tolist()})
    tables = []
    with redirect_stdout(io.StringIO()):  # pycocotools prints what it does
        for parts in (targets, detections):
            rows = [row for image, part in enumerate(parts) for row in _annotations(image, part)]
            tables.append(COCO())
            tables[-1].dataset = dict(
                images=[dict(id=image) for image in range(len(targets))],
                categories=[dict(id=label) for label in labels],
                annotations=[row | dict(id=number) for number, row in enumerate(rows, 1)],
            )
            tables[-1].createIndex()
        evaluation = COCOeval(*tables, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    scores = dict(zip(NAMES, evaluation.stats.tolist(), strict=True))
    return scores | (_intervals(scores, evaluation, draws) if draws else {})


def pycocotools_classes() -> tuple[Any, Any]:
    """pycocotools' COCO and COCOeval; raises ValueError if it is not installed."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ValueError("average precision needs pycocotools; pip install 'fastvit_triton[detect]'") from error
    return COCO, COCOeval


def _annotations(image: int, part: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """The objects in an image, or those found in it, as COCO's files have them."""
    low, high = part["boxes"].detach().cpu().double().reshape(-1, 4).split(2, 1)
    sizes = high - low
    columns = dict(category_id=part["labels"], area=part.get("areas", sizes.prod(1)))
    columns |= {key: part[name] for name, key in (("crowd", "iscrowd"), ("scores", "score")) if name in part}
    values = (column.tolist() for column in columns.values())
    for (x, y), (width, height), *row in zip(low.tolist(), sizes.tolist(), *values, strict=True):
        yield dict(image_id=image, iscrowd=0, bbox=[x, y, width, height]) | dict(zip(columns, row, strict=True))


def _intervals(scores: Mapping[str, float], evaluation: Any, draws: int) -> dict[str, float]:
    """95 % intervals of `ap`, `ap50` and `ap75`: ± 1.96 standard deviations over images drawn with replacement.

    The draws are the same in each call. Bounds are −1 where all draws give the same value, such as for a perfect score:
    a bootstrap then says nothing. Of few images the intervals are too narrow, as the score itself is then too high:
    simulated detectors of three classes are inside for 92 to 94 % of sets of 100 images, and 84 to 90 % of 24. The
    percentiles of the draws, which lie above the score, were worse. Source: Efron & Tibshirani, An introduction to the
    bootstrap, 1993, chapters 6 and 13.
    """
    total = len(evaluation.params.imgIds)
    weights = np.random.default_rng(0).multinomial(total, np.full(total, 1 / total), size=draws)  # [draws, images]
    matches = evaluation.evalImgs  # by class, range of areas, of which the first is all, and image
    starts = range(0, len(matches), total * len(evaluation.params.areaRng))
    precision = np.full((draws, len(starts), len(evaluation.params.iouThrs)), np.nan)
    for c, start in enumerate(starts):
        precision[:, c] = _drawn(matches[start : start + total], weights)
    bounds = {}
    for name, thresholds in {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}.items():
        values = precision[:, :, thresholds].reshape(draws, -1)
        values = np.nanmean(values[~np.isnan(values).all(1)], 1)  # draws without any object have none
        half = Z * values.std(ddof=1) if len(values) > 1 else 0.0
        inside = [max(scores[name] - half, 0.0), min(scores[name] + half, 1.0)]
        bounds[f"{name}_low"], bounds[f"{name}_high"] = map(float, inside if half > 1e-9 else (-1.0, -1.0))
    return bounds


def _drawn(images: Sequence[dict[str, Any] | None], weights: Any) -> Any:
    """Average precision [draws, T] of one class whose images count `weights` [draws, images] times; NaN of none."""
    known = {i: image for i, image in enumerate(images) if image is not None}  # with objects or detections
    order = np.argsort(-np.concatenate([image["dtScores"] for image in known.values()]), kind="stable")
    of = np.repeat([*known], [len(image["dtScores"]) for image in known.values()])[order]  # the image of each detection
    hit, ignored = (
        np.concatenate([image[name] for image in known.values()], 1)[:, order] > 0 for name in ("dtMatches", "dtIgnore")
    )
    objects = weights[:, [*known]] @ [sum(image["gtIgnore"] == 0) for image in known.values()]
    found = np.full((len(weights), len(hit)), np.nan)
    for i in np.flatnonzero(objects):
        right, wrong = (np.cumsum((kind & ~ignored) * weights[i, of], 1, dtype=np.float64) for kind in (hit, ~hit))
        found[i] = [_at_recalls(r, w, objects[i]).mean() for r, w in zip(right, wrong, strict=True)]
    return found


def _at_recalls(right: Any, wrong: Any, objects: int) -> Any:
    """Precision at each recall of `RECALLS`, from the numbers of right and wrong detections [D], best first."""
    precisions = right / (right + wrong + np.spacing(1))
    precisions = np.maximum.accumulate(precisions[::-1])[::-1]  # does not rise with recall
    return np.append(precisions, 0.0)[np.searchsorted(right / objects, RECALLS)]
