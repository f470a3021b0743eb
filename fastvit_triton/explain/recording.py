"""Records the inputs of a model's attention layers with hooks; the model's own passes never form an N × N matrix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident

import torch
from torch import Tensor, nn

from .. import layers
from .layer import AttentionLayer
from .readers import own, reader, unknown


@dataclass
class Recording:
    """Recording of one forward pass; a second pass overwrites it.

    Attributes:
        layers: attention layers in the order of their calls.
        stream: tokens [B, N, D] before the first block and after each block, for blocks that are modules.
        left: reason by path, for attention layers that could not be recorded.
        images: number of images; None if the model's first input was no image.
    """

    found: dict[str, AttentionLayer] = field(default_factory=dict)
    blocks: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    images: int | None = None

    @property
    def layers(self) -> list[AttentionLayer]:
        return list(self.found.values())

    @property
    def stream(self) -> list[Tensor]:
        pairs = list(self.blocks.values())
        return [pairs[0][0], *(after for _, after in pairs)] if pairs else []


@contextmanager
def capture(model: nn.Module, gradients: bool = False) -> Iterator[Recording]:
    """Records the input of each attention layer while the model runs inside the `with`, in the same thread.

    Supports our models, and timm, transformers, torchvision, vit-pytorch and torch.nn attention, optimised or not.
    Kernels stay enabled: our blocks stay fused; blocks of other libraries call their attention, which runs fused.
    Outputs differ at most by rounding, where a fused call is split in two. All hooks are removed at the end.

    Args:
        model: in training or evaluation mode; layers with active attention dropout are not recorded.
        gradients: also record the gradient of each attention layer's output, for `AttentionLayer.map_grad`.

    Yields:
        Recording: filled by the forward pass.

    Raises:
        ValueError: no attention layer was recorded.
    """
    recording = Recording()
    handles = []
    watched = set()
    parents = dict(model.named_modules())
    readers = {path: read for path, module in parents.items() if (read := reader(module)) is not None}
    try:
        handles.append(model.register_forward_pre_hook(_here(partial(_count, recording)), with_kwargs=True))
        for path in unknown(parents, set(readers)):
            handles.append(parents[path].register_forward_pre_hook(_here(partial(_leave_out, recording, path))))
        for path, read in readers.items():
            module = parents[path]
            outer, block = block_of(path, parents)
            if type(module) is layers.Attention and isinstance(block, layers.Block) and not gradients:
                norm = None if isinstance(block, layers.PostNormBlock) else block.norm1
                enter = partial(_enter, recording, path, partial(own, module), norm)
                handles.append(block.register_forward_pre_hook(_here(enter), with_kwargs=True))
            else:
                enter = partial(_enter, recording, path, read, None)
                handles.append(module.register_forward_pre_hook(_here(enter), with_kwargs=True))
            if gradients:
                handles.append(module.register_forward_hook(_here(partial(_after_attention, recording, path))))
            if block is not None and outer not in watched:
                watched.add(outer)
                after = partial(_after, recording, outer)
                handles.append(block.register_forward_hook(_here(after), with_kwargs=True))
        yield recording
    finally:
        for handle in handles:
            handle.remove()
    if not recording.found:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(recording.left.items())[:3])
        why += f"; and {len(recording.left) - 3} more" if len(recording.left) > 3 else ""
        raise ValueError(
            f"no attention of {type(model).__name__} could be recorded ({why or 'none of a known type ran'}); "
            "run the model itself, in eval mode and not compiled, inside capture"
        )


def _here(record: Callable[..., None]) -> Callable[..., None]:
    """Wraps a hook so that it ignores other threads, which may call the model while hooks are being registered."""
    thread = get_ident()
    return lambda *call: record(*call) if get_ident() == thread else None


def _count(recording: Recording, model: nn.Module, inputs: tuple, named: dict) -> None:
    """Forward pre-hook of the model: stores the number of images."""
    x = next((t for t in (*inputs, *named.values()) if isinstance(t, Tensor)), None)
    recording.images = len(x) if x is not None and x.dim() == 4 else None


def _leave_out(recording: Recording, path: str, module: nn.Module, inputs: tuple) -> None:
    """Forward pre-hook of an attention layer that cannot be recorded."""
    recording.left[path] = f"{type(module).__name__} is not a known type of attention"


@torch.no_grad()
def _enter(
    recording: Recording,
    path: str,
    read: Callable,
    norm: nn.Module | None,
    module: nn.Module,
    inputs: tuple,
    named: dict,
) -> None:
    """Forward pre-hook of an attention layer: stores its input."""
    reading = read(*inputs, **named)
    if reading is not None:
        recording.found.pop(path, None)  # a repeated call moves to the end of the call order
    if isinstance(reading, str):
        recording.left[path] = reading
    elif reading is not None:
        x, parts, position = reading
        recording.found[path] = AttentionLayer(path, x.detach(), parts, norm, position, recording.images)


def _after_attention(recording: Recording, path: str, module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
    """Forward hook of an attention layer: registers a hook that stores the gradient of its output."""
    y = output[0] if isinstance(output, tuple) else output
    layer = recording.found.get(path)
    if layer is not None and y.requires_grad:
        turned = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        y.register_hook(lambda grad: setattr(layer, "output_grad", grad.transpose(0, 1) if turned else grad))


def _after(recording: Recording, path: str, module: nn.Module, inputs: tuple, named: dict, output: object) -> None:
    """Forward hook of a block: stores its input and output tokens."""
    x = inputs[0] if inputs else next((v for v in named.values() if isinstance(v, Tensor)), None)
    y = output[0] if isinstance(output, tuple) else output
    recording.blocks.pop(path, None)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() == 3 and x.shape == y.shape:
        recording.blocks[path] = x.detach(), y.detach()


def block_of(path: str, modules: dict[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """Path and module of the nearest ancestor of an attention layer that is not a ModuleList."""
    while path:
        path = path.rpartition(".")[0]
        if type(modules[path]) is not nn.ModuleList:
            return path, modules[path]
    return "", None
