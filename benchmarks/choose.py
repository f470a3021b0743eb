"""Who is faster inside an op, by shape: the column `choice` of kernels/tuned/<arch>.json.

The shapes are those that models ask the dispatcher for, in inference and in a training step. On a GPU both answers are
timed on the very call that the model made; elsewhere the dispatcher's rule is written down, as predicted.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit_triton import create_model
from fastvit_triton.kernels import dispatch, launch
from fastvit_triton.measure.compare import Named, converted, leaves, verdict
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.timing import alternate

from .result_file import Part

# what most ViT time goes to, first
MODELS = (
    ("vit_base_patch16_224", 256),
    ("vit_small_patch16_224", 256),
    ("vit_tiny_patch16_224", 256),
    ("vit_large_patch16_224", 256),
    ("vit_huge_patch14_224", 128),
    ("vit_base_patch14_dinov2", 32),
    ("vit_base_patch16_224", 8),
    ("vit_small_patch16_224", 8),
)


class Call(NamedTuple):
    """A call inside which the dispatcher was asked, and what its rule says."""

    function: Callable
    arguments: tuple
    rule: str


Calls = dict[tuple[str, str], Call]  # row, shape → the first such call


class _Watch(TorchDispatchMode):
    """Writes down calls of our ops in which the dispatcher was asked."""

    def __init__(self, asked: list, calls: Calls) -> None:
        super().__init__()
        self.asked, self.calls = asked, calls

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.asked.clear()
        outputs = function(*arguments, **named or {})
        for row, shape, rule in self.asked:
            if function.namespace == "fastvit_triton":
                self.calls.setdefault((row, shape), Call(function, arguments, rule))
        self.asked.clear()
        return outputs


@contextlib.contextmanager
def asking(architecture: str) -> Iterator[Calls]:
    """Inside, every question to the dispatcher is answered with our kernels and written down."""
    asked: list[tuple[str, str, str]] = []

    def remember(key: tuple, row: Callable, x: torch.Tensor, described: tuple | None) -> bool:
        if described is not None:
            shape, work = described
            asked.append((row(), shape, dispatch.rule(architecture, x.dtype, launch.precision(x) == "ieee", work)))
        return True

    original, calls = dispatch.remember, Calls()
    dispatch.remember = remember
    dispatch.forget()
    try:
        with _Watch(asked, calls):
            yield calls
    finally:
        dispatch.remember = original
        dispatch.forget()


def calls_of(name: str, batch: int, architecture: str, device: torch.device, around: Callable, **options) -> Calls:
    """What one layer and the stem of a model ask, in inference and in a training step, in bfloat16."""
    with device:
        model = create_model(name, **dict(depth=1, num_classes=0) | options).to(torch.bfloat16)
        image = torch.randn(1, model.config.in_chans, *model.patch_embed.img_size, dtype=torch.bfloat16)
    image = image.expand(batch, -1, -1, -1)
    with around(), asking(architecture) as calls:
        with torch.no_grad():
            model.eval()(image)
        model.train()(image).sum().backward()
    return calls


def measure(call: Call, device: torch.device, deadline: Deadline, dry: bool = False) -> dict:
    """Times both answers, and says who computes what they should: float32 by PyTorch, within the budget of bfloat16."""
    given = {str(i): argument for i, argument in enumerate(call.arguments)}

    def answer(kernels: bool, arguments: dict) -> list[torch.Tensor]:
        before, dispatch.forced = dispatch.forced, kernels
        try:
            with torch.no_grad():
                return [t for t in leaves(call.function(*arguments.values())) if t.is_floating_point()]
        finally:
            dispatch.forced = before

    def found(kernels: bool, arguments: dict) -> Named:
        return {f"output {i}": t for i, t in enumerate(answer(kernels, arguments))}

    truth, theirs = found(False, converted(given, torch.float32)), found(False, given)
    said = verdict(found(True, given), truth, theirs, torch.bfloat16)
    steps = {name: partial(_step, answer, kernels, given) for name, kernels in (("torch", False), ("ours", True))}
    timings, errors = alternate(steps, device, deadline, 0.3, (1, 1) if dry else (3, 60))
    columns = said.columns() | {f"{name}_us": timing.us for name, timing in timings.items()}
    columns |= {f"{name}_error": text for name, text in errors.items()}
    faster = {"ours", "torch"} <= timings.keys() and timings["ours"].us <= timings["torch"].us
    return columns | dict(who="ours" if faster and said.match else "torch")


def _step(answer: Callable, kernels: bool, given: dict, copy: int) -> Callable[[], object]:
    return partial(answer, kernels, given)


def run(part: Part, architecture: str, device: torch.device, around: Callable) -> None:
    """Measured choices, a row each; of one shape the first."""
    seen: set[tuple[str, str]] = set()
    tiny = dict(img_size=32, embed_dim=32, num_heads=2)
    for name, batch in MODELS[:1] if part.dry else MODELS:
        calls: Calls = {}
        with part.row(f"choices of {name} batch {batch}") as go:
            if go:
                calls = calls_of(
                    name, 2 if part.dry else batch, architecture, device, around, **tiny if part.dry else {}
                )
        for (row, shape), call in calls.items():
            if (row, shape) in seen:
                continue
            seen.add((row, shape))
            with part.row(f"{row} {shape}") as go, around():
                if go:
                    columns = measure(call, device, part.deadline, part.dry)
                    part.add(dict(case=f"{row} {shape}", arch=architecture, row=row, shape_class=shape, **columns))


def predicted(architecture: str) -> list[dict]:
    """The rule's answers, for an architecture that is not here."""
    from .launches import recording

    found: Calls = {}
    for name, batch in MODELS:
        calls = calls_of(name, batch, architecture, torch.device("cpu"), partial(recording, architecture))
        found = calls | found
    return [dict(row=row, shape_class=shape, who=call.rule) for (row, shape), call in found.items()]


def merged(table: dict, rows: list[dict], provenance: str) -> dict:
    """The table with these answers in its column; of one shape the first."""
    made = json.loads(json.dumps(table))
    for row in reversed(rows):
        column = made.setdefault(row["row"], {}).setdefault("choice", {})
        column.setdefault(provenance, {})[row["shape_class"]] = row["who"]
    return made
