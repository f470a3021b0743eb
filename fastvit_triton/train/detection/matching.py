"""Matches predictions to objects at the least total cost (Hungarian method; DETR, arXiv:2005.12872, section 3.1)."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..objective import at_least_float32
from .boxes import generalized_iou, to_corners

Kind = Literal["softmax", "focal"]
Matches = list[tuple[Tensor, Tensor]]
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss (arXiv:1708.02002)


class Costs(NamedTuple):
    """Weights of the parts of a cost, and of a loss: of the class, of the L1 distance, and of the generalised IoU."""

    label: float = 1.0
    l1: float = 5.0
    giou: float = 2.0


@torch.no_grad()
def match(
    outputs: Mapping[str, Tensor], targets: Sequence[Mapping[str, Tensor]], costs: Costs, kind: Kind = "softmax"
) -> Matches:
    """The assignment of queries to objects with the least total cost, for each image.

    The cost of query i for object j with class c is

        label · class(i, c) + l1 · ‖bᵢ − bⱼ‖₁ − giou · GIoU(bᵢ, bⱼ)

    where class(i, c) is −softmax(zᵢ)_c (DETR) or, with p = σ(z_ic), the difference of the focal losses of c and not c,
    0.25 (1 − p)² · −log p − 0.75 p² · −log(1 − p) (Deformable DETR, arXiv:2010.04159).

    Args:
        outputs: `logits` [B, Q, K + 1 or K] and `boxes` [B, Q, 4], centre and size in fractions of the image.
        targets: for each image `labels` [n] and `boxes` [n, 4].
        costs: weights.
        kind: "softmax" or "focal".

    Returns:
        For each image (queries, objects), two lists of min(Q, n) indices on the device of the logits.

    Raises:
        ValueError: a cost is not finite, or SciPy is not installed.
    """
    logits = at_least_float32(outputs["logits"].detach())
    boxes = outputs["boxes"].detach().to(logits.dtype)
    classes = -logits.softmax(-1) if kind == "softmax" else _focal_difference(logits.sigmoid())
    tables = []
    for scores, predicted, target in zip(classes, boxes, targets, strict=True):
        wanted = target["boxes"].to(predicted)
        l1 = torch.cdist(predicted, wanted, p=1)
        giou = generalized_iou(to_corners(predicted)[:, None], to_corners(wanted))
        tables.append(costs.label * scores[:, target["labels"]] + costs.l1 * l1 - costs.giou * giou)
    flat = torch.cat([table.flatten() for table in tables]).cpu()  # one copy for the batch
    if not flat.isfinite().all():
        raise ValueError("the cost of a match is not finite: the model's logits or boxes are not, or a target's boxes")
    assign = _assignment()
    matches = []
    for part, table in zip(flat.split([table.numel() for table in tables]), tables, strict=True):
        queries, objects = assign(part.view(table.shape).numpy())
        matches.append((torch.as_tensor(queries).to(logits.device), torch.as_tensor(objects).to(logits.device)))
    return matches


def _focal_difference(p: Tensor) -> Tensor:
    positive = ALPHA * (1 - p) ** GAMMA * -(p + 1e-8).log()
    negative = (1 - ALPHA) * p**GAMMA * -(1 - p + 1e-8).log()
    return positive - negative


def _assignment():
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ValueError("training a detector needs SciPy; pip install 'fastvit_triton[detect]'") from error
    return linear_sum_assignment
