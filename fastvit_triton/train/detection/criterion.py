"""The loss of detectors that predict a set of objects: classes, boxes, and each decoder layer by itself.

Sources: DETR (arXiv:2005.12872, section 3.1) and Deformable DETR (arXiv:2010.04159), and their authors' code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed import World
from ..objective import at_least_float32
from .boxes import generalized_iou, to_corners
from .matching import ALPHA, GAMMA, Costs, Kind, Matches, match

Targets = Sequence[Mapping[str, Any]]


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

    Attributes:
        kind: "softmax" (DETR) or "focal" (Deformable DETR).
        costs: weights in matching.
        weights: weights in the loss.
        eos: weight of the class "no object".
        world: ranks over which objects are counted.
    """

    kind: Kind = "softmax"
    costs: Costs = field(default_factory=Costs)
    weights: Costs = field(default_factory=Costs)
    eos: float = 0.1
    world: World = field(default_factory=World)

    def __call__(self, outputs: Mapping[str, Any], targets: Targets) -> dict[str, Tensor]:
        """The parts of the loss.

        Args:
            outputs: `logits` [B, Q, K + 1 or K] and `boxes` [B, Q, 4]; `aux`, a list of such outputs, and `proposals`,
                one of them, if the model has them.
            targets: for each image `labels` [n] and `boxes` [n, 4], centre and size in fractions of the image; n may
                be 0.
        """
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
        image, query = _places(matches)
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
    """The loss of a detector: that of DETR or of Deformable DETR, by its `scoring`, "softmax" or "focal".

    Args:
        model: a detector.
        world: ranks over which objects are counted.
    """
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
    """The mask [B, H, W] of a batch, True at pixels of an image; None if no image is padded.

    Args:
        images: [B, C, H, W].
        targets: for each image a dict; its `size`, (height, width), is that of the image without padding.
    """
    whole = (images.shape[2], images.shape[3])
    sizes = [target.get("size", whole) for target in targets]
    if all(size == whole for size in sizes):
        return None
    mask = torch.zeros(len(sizes), *whole, dtype=torch.bool)
    for row, (height, width) in zip(mask, sizes, strict=True):
        row[:height, :width] = True
    return mask.to(images.device, non_blocking=True)


def _places(matches: Matches) -> tuple[Tensor, Tensor]:
    """Indices of the images and of the queries that are matched."""
    images = [torch.full_like(queries, i) for i, (queries, _) in enumerate(matches)]
    return torch.cat(images), torch.cat([queries for queries, _ in matches])
