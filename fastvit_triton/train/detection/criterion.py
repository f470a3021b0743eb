"""The loss of detectors that predict a set of objects: classes, boxes, and each decoder layer by itself.

Predictions are matched to objects at the least total cost, by the Hungarian method.

Sources: DETR (arXiv:2005.12872, section 3.1) and Deformable DETR (arXiv:2010.04159), and their authors' code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed import World
from ..objective import at_least_float32
from .boxes import generalized_iou, to_corners

Kind = Literal["softmax", "focal"]
Matches = list[tuple[Tensor, Tensor]]
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss (arXiv:1708.02002)
Targets = Sequence[Mapping[str, Any]]


class Costs(NamedTuple):
    """Weights of the parts of a cost, and of a loss: of the class, of the L1 distance, and of the generalised IoU."""

    label: float = 1.0
    l1: float = 5.0
    giou: float = 2.0


@torch.no_grad()
def match(outputs: Mapping[str, Tensor], targets: Targets, costs: Costs, kind: Kind = "softmax") -> Matches:
    """The assignment of queries to objects with the least total cost, for each image.

    The cost of query i for object j with class c is

        label · class(i, c) + l1 · ‖bᵢ − bⱼ‖₁ − giou · GIoU(bᵢ, bⱼ)

    where class(i, c) is −softmax(zᵢ)_c (DETR) or, with p = σ(z_ic), the difference of the focal losses of c and not c,
    0.25 (1 − p)² · −log p − 0.75 p² · −log(1 − p) (Deformable DETR, arXiv:2010.04159).
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ValueError("training a detector needs SciPy; pip install 'fastvit_triton[detect]'") from error
    logits = at_least_float32(outputs["logits"].detach())
    boxes = outputs["boxes"].detach().to(logits.dtype)
    if kind == "softmax":
        classes = -logits.softmax(-1)
    else:
        p = logits.sigmoid()
        classes = ALPHA * (1 - p) ** GAMMA * -(p + 1e-8).log() - (1 - ALPHA) * p**GAMMA * -(1 - p + 1e-8).log()
    tables = []
    for scores, predicted, target in zip(classes, boxes, targets, strict=True):
        wanted = target["boxes"].to(predicted)
        l1 = torch.cdist(predicted, wanted, p=1)
        giou = generalized_iou(to_corners(predicted)[:, None], to_corners(wanted))
        tables.append(costs.label * scores[:, target["labels"]] + costs.l1 * l1 - costs.giou * giou)
    flat = torch.cat([table.flatten() for table in tables]).cpu()  # one copy for the batch
    if not flat.isfinite().all():
        raise ValueError("the cost of a match is not finite: the model's logits or boxes are not, or a target's boxes")
    matches = []
    for part, table in zip(flat.split([table.numel() for table in tables]), tables, strict=True):
        queries, objects = linear_sum_assignment(part.view(table.shape).numpy())
        matches.append((torch.as_tensor(queries).to(logits.device), torch.as_tensor(objects).to(logits.device)))
    return matches


@dataclass(frozen=True)
class SetCriterion:
    """The loss of a set of predictions: (outputs, targets) → its parts by name; `total` is their weighted sum.

    Each query that `match` assigns to an object learns its class and box, the others that they have none:

        labels   kind "softmax": cross entropy with "no object" as the last class, whose weight is `eos`
                 kind "focal": Σ −α_t (1 − p_t)² log p_t over all queries and classes, divided by the number of objects
        boxes    Σ ‖b − b*‖₁ / number of objects
        giou     Σ (1 − GIoU(b, b*)) / number of objects
        cardinality   mean | queries with an object − objects |, a metric without a gradient

    Every auxiliary output i is matched and adds the same parts with the suffix _i, and proposals with the suffix _enc,
    where every object has class 0. The number of objects is the mean over ranks, at least 1.
    """

    kind: Kind = "softmax"  # or "focal", of Deformable DETR
    costs: Costs = field(default_factory=Costs)  # weights in matching
    weights: Costs = field(default_factory=Costs)  # weights in the loss
    eos: float = 0.1  # weight of the class "no object"
    world: World = field(default_factory=World)  # ranks over which objects are counted

    def __call__(self, outputs: Mapping[str, Any], targets: Targets) -> dict[str, Tensor]:
        """The parts of the loss."""
        logits = outputs["logits"]
        count = torch.tensor(float(sum(len(t["labels"]) for t in targets)), device=logits.device)
        objects = (self.world.all_reduce_sum(count) / self.world.world_size).clamp(min=1)
        losses = self.parts(outputs, targets, objects)
        losses["cardinality"] = self.cardinality(logits, targets)
        for i, layer in enumerate(outputs.get("aux") or ()):
            losses |= {f"{name}_{i}": loss for name, loss in self.parts(layer, targets, objects).items()}
        if outputs.get("proposals") is not None:
            binary = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
            parts = self.parts(outputs["proposals"], binary, objects)
            losses |= {f"{name}_enc": loss for name, loss in parts.items()}
        return losses

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the parts, without the cardinality."""
        weights = dict(labels=self.weights.label, boxes=self.weights.l1, giou=self.weights.giou)
        parts = [weights[name.split("_")[0]] * loss for name, loss in losses.items() if name != "cardinality"]
        return torch.stack(parts).sum()

    def parts(self, outputs: Mapping[str, Tensor], targets: Targets, objects: Tensor) -> dict[str, Tensor]:
        """Losses of classes and boxes of one set of outputs."""
        logits = at_least_float32(outputs["logits"])
        boxes = outputs["boxes"].to(logits.dtype)
        matches = match(outputs, targets, self.costs, self.kind)
        image = torch.cat([torch.full_like(queries, i) for i, (queries, _) in enumerate(matches)])
        query = torch.cat([queries for queries, _ in matches])
        chosen = [t["labels"].to(query.device)[taken] for t, (_, taken) in zip(targets, matches, strict=True)]
        wanted = torch.cat([t["boxes"].to(boxes)[taken] for t, (_, taken) in zip(targets, matches, strict=True)])
        predicted = boxes[image, query]
        giou = generalized_iou(to_corners(predicted), to_corners(wanted))
        return dict(
            labels=self.label_loss(logits, (image, query), torch.cat(chosen), objects),
            boxes=(predicted - wanted).abs().sum() / objects,
            giou=(1 - giou).sum() / objects,
        )

    def label_loss(self, logits: Tensor, places: tuple[Tensor, Tensor], labels: Tensor, objects: Tensor) -> Tensor:
        """The loss of the classes; `places` are (images, queries) that have the objects with these labels."""
        if self.kind == "softmax":
            none = logits.shape[-1] - 1
            classes = torch.full(logits.shape[:2], none, device=logits.device)
            classes[places] = labels
            weights = logits.new_ones(none + 1)
            weights[none] = self.eos
            return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), weights)
        is_class = torch.zeros_like(logits)
        images, queries = places
        is_class[images, queries, labels] = 1
        p = logits.sigmoid()
        entropy = F.binary_cross_entropy_with_logits(logits, is_class, reduction="none")
        wrong = p * (1 - is_class) + (1 - p) * is_class  # 1 − p_t
        alpha = ALPHA * is_class + (1 - ALPHA) * (1 - is_class)
        return (alpha * wrong**GAMMA * entropy).sum() / objects

    @torch.no_grad()
    def cardinality(self, logits: Tensor, targets: Targets) -> Tensor:
        """Mean over images of the difference between predicted and true numbers of objects."""
        is_object = logits.argmax(-1) != logits.shape[-1] - 1 if self.kind == "softmax" else logits.amax(-1) > 0
        predicted = is_object.sum(1).to(torch.float32)
        counts = torch.tensor([float(len(t["labels"])) for t in targets], device=predicted.device)
        return (predicted - counts).abs().mean()


DETR = SetCriterion()
DEFORMABLE = SetCriterion("focal", Costs(label=2.0), Costs(label=2.0))


def criterion_of(model: Any, world: World | None = None) -> SetCriterion:
    """The loss of a detector: that of DETR or of Deformable DETR, by its `scoring`, "softmax" or "focal"."""
    criterion = {"softmax": DETR, "focal": DEFORMABLE}[model.scoring]
    return criterion if world is None else replace(criterion, world=world)


def detected(criterion: SetCriterion) -> Any:
    """The objective of a detector: (model, images, targets) → (loss, None), see `train.objective`.

    Images are [B, C, H, W], padded below and right if targets have a `size`, (height, width) without padding.
    """

    def objective(model: nn.Module, images: Any, targets: Targets) -> tuple[Tensor, None]:
        return criterion.total(criterion(predicted(model, images, targets), targets)), None

    return objective


def predicted(model: nn.Module, images: Any, targets: Targets) -> dict[str, Any]:
    """The outputs of a detector, which does not see the padding of the images."""
    mask = padding_mask(images, targets) if isinstance(images, Tensor) else None
    return model(images) if mask is None else model(images, mask)


def padding_mask(images: Tensor, targets: Targets) -> Tensor | None:
    """The mask [B, H, W] of a batch, True at pixels of an image; None if no image is padded."""
    whole = (images.shape[2], images.shape[3])
    sizes = [target.get("size", whole) for target in targets]
    if all(size == whole for size in sizes):
        return None
    mask = torch.zeros(len(sizes), *whole, dtype=torch.bool)
    for row, (height, width) in zip(mask, sizes, strict=True):
        row[:height, :width] = True
    return mask.to(images.device, non_blocking=True)
