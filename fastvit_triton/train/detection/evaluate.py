"""Average precision of a detector on test images."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..batch import blank_target, to_device
from ..distributed import World
from ..loop import Score, evaluating, local_batches
from .average_precision import average_precision, pycocotools_classes
from .criterion import criterion_of, predicted

LOGGED = ("ap", "ap50", "ap75", "ap_low", "ap_high")
DRAWS = 100  # a standard deviation of that many is known to 7 %, and costs as much as the score itself


@torch.no_grad()
def evaluate_detector(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    amp: torch.dtype | None = None,
    world: World | None = None,
    per_rank_batches: bool = False,
) -> Score:
    """Mean loss and average precision over a test set. Training mode is restored afterwards."""
    pycocotools_classes()  # before the images are evaluated
    device = next(model.parameters()).device
    world = world or World()
    detector: Any = getattr(model, "module", model)
    criterion = criterion_of(detector, world)
    rows = []
    with evaluating(model):
        for images, targets, indices in local_batches(batches, world, per_rank_batches):
            wanted = to_device(targets if len(targets) else blank_target(targets), device)
            with torch.autocast(device.type, amp, enabled=amp is not None):
                outputs = predicted(model, images.to(device, non_blocking=True), wanted)
            loss = float(criterion.total(criterion(outputs, wanted)))
            found = detector.detections(outputs, [target.get("original", (1, 1)) for target in wanted])
            places = indices.tolist() or [0] * len(targets)
            for place, target, objects in zip(places, targets, found, strict=False):  # none of a dummy image
                rows.append((place, loss, to_device(objects, torch.device("cpu")), target["truth"]))
    rows = [row for part in world.all_gather(rows) for row in part]
    if not rows:
        raise ValueError("there are no test images to evaluate on")
    rows.sort(key=lambda row: row[0])
    _, losses, detections, objects_of = zip(*rows, strict=True)
    numbers = average_precision(detections, objects_of, DRAWS)
    metrics = {name: numbers[name] if numbers[name] >= 0 else None for name in LOGGED}
    return Score(sum(losses) / len(losses), None, metrics=metrics, detections=[*detections], objects=[*objects_of])
