"""A linear probe: the backbone keeps its weights and statistics, and only the head is trained."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

HEADS = ("classifier", "head", "heads", "fc")  # of transformers, timm, torchvision


def freeze_backbone(model: nn.Module) -> list[nn.Module]:
    """Sets `requires_grad` of all parameters outside the head to False; returns all modules outside it.

    Training calls the returned modules in evaluation mode (`fit(frozen=…)`): without dropout or drop path, and norms
    with statistics use those that they have and do not change them.
    """
    head = {id(module) for part in heads(model) for module in part.modules()}
    trained = {id(parameter) for part in heads(model) for parameter in part.parameters()}
    if not trained:
        raise ValueError(f"freeze is 'backbone', and {type(model).__name__} has no head that could be trained")
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    above = {id(module) for module in model.modules() if head & {id(part) for part in module.modules()}}
    return [module for module in model.modules() if id(module) not in above]


def has_batch_norm(model: nn.Module, frozen: Sequence[nn.Module] = ()) -> bool:
    """True if training computes statistics of batches, in a module that is not frozen."""
    fixed = {id(module) for module in frozen}
    return any(isinstance(module, _BatchNorm) and id(module) not in fixed for module in model.modules())


def heads(model: Any) -> list[nn.Module]:
    """The heads of a classifier, see `freeze_backbone`; [] if none is known."""
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    if head is None:
        head = next((getattr(model, name) for name in HEADS if isinstance(getattr(model, name, None), nn.Module)), ())
    return [head] if isinstance(head, nn.Module) else list(head)
