"""Measures how blocks of a model run fastest ("fused", "mixed" or "plain"), for kernels/tuned/<arch>.json.

`time_ways` times two blocks in each way, including host time, in inference or a training step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from fastvit_triton.kernels.choose import Choice
from fastvit_triton.kernels.settings import forcing, observing
from fastvit_triton.kernels.sizes import WAYS
from fastvit_triton.measure.model_parts import Part
from fastvit_triton.measure.selftest import blocks_of
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.timing import Context, alternate, repeated

# (model, batch size), most important first
MODELS = (
    ("vit_base_patch16_224", 256),
    ("vit_small_patch16_224", 256),
    ("vit_tiny_patch16_224", 256),
    ("vit_large_patch16_224", 256),
    ("vit_huge_patch14_224", 128),
    ("vit_base_patch14_dinov2", 32),
    ("vit_base_patch16_224", 64),
    ("vit_base_patch16_224", 8),
    ("vit_base_patch16_224", 1),
    ("vit_small_patch16_224", 64),
    ("vit_small_patch16_224", 8),
    ("vit_small_patch16_224", 1),
    ("vit_tiny_patch16_224", 64),
    ("vit_tiny_patch16_224", 8),
    ("vit_tiny_patch16_224", 1),
)
CALLS = 4  # per sample, so that the host can run ahead of the GPU as in a model


def chosen_way(blocks: nn.Module, x: torch.Tensor, training: bool) -> tuple[str, str]:
    """(name of the block's shape in tables, the way that the plan selects)."""
    choices: list[Choice] = []
    with observing(choices.append), torch.set_grad_enabled(training):
        blocks(x)
    first = next(choice for choice in choices if choice.branches)
    return first.shapes[-1], first.way


def time_ways(
    name: str,
    batch: int,
    training: bool,
    device: torch.device,
    deadline: Deadline,
    context: Context,
    dry: bool = False,
    **options: object,
) -> dict:
    """Times two blocks of a model in each way and compares their results with float32."""
    blocks, tokens, channels = blocks_of(name, device, **options)
    x = torch.randn(batch, tokens, channels, device=device).to(torch.bfloat16).requires_grad_(training)
    with context():
        shape, rule = chosen_way(blocks, x, training)
    part = Part(name, 1, (shape,), blocks, (x,), {})
    contexts = {way: partial(_running, context, way) for way in WAYS}
    compared = part.comparison(contexts["plain"], training)
    said = {way: compared(contexts[way]) for way in WAYS}
    calls = 1 if dry else CALLS
    steps = {way: repeated(part.step(training), contexts[way], calls) for way in WAYS}
    timings, errors = alternate(steps, device, deadline, 0.3, (1, 1) if dry else (3, 60), latency=True)
    columns: dict[str, object] = dict(shape=shape, rule=rule) | {f"{way}_match": v.match for way, v in said.items()}
    columns |= {f"{way}_us": round(timing.us / calls, 1) for way, timing in timings.items()}
    columns |= {f"{way}_error": text for way, text in errors.items()}
    right = [way for way in WAYS if said[way].match and way in timings]
    return columns | dict(way=min(right, key=lambda way: timings[way].us, default="plain"))


@contextmanager
def _running(context: Context, way: str) -> Iterator[None]:
    """Context in which blocks run in this way on our kernels."""
    with context(), forcing(way):
        yield
