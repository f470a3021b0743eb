"""Calls of a model with an example input that leave the model as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..engine.freeze import fold_again


def arguments(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a call: a dictionary is keywords, a tuple or list several arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context that restores buffers and random states at its end, and invalidates cached folds."""
    places = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    before = [(*place, place[2].clone()) for place in places]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    try:
        with torch.random.fork_rng([d.index for d in devices]):
            yield
    finally:
        fold_again(model)
        for buffers, name, buffer, value in before:
            buffers[name] = buffer  # a forward may have replaced it
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
