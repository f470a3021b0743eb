"""Which implementation an op takes at which shape, ours or PyTorch's: the column `choice` of kernels/tuned/<arch>.json.

`calls_of` runs a model and records the calls in which the dispatcher had to choose, in inference and in a training
step. `time_choice` times both implementations on such a call.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.dispatch import forcing, observing
from ..models import create_model
from .compare import Named, converted, leaves, verdict
from .timeout import Deadline
from .timing import alternate

# (model, images in a batch), in the order of the time that ViTs spend in them
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
    """A call of one of our ops in which the dispatcher had to choose.

    Attributes:
        function: the registered op.
        arguments: its positional arguments.
        rule: what the dispatcher's rule chooses, "ours" or "torch".
    """

    function: Callable
    arguments: tuple
    rule: str


Calls = dict[tuple[str, str], Call]  # (row, shape) → the first call with them


class _Recorder(TorchDispatchMode):
    """Records the calls of our ops in which the dispatcher had to choose."""

    def __init__(self, choices: list[tuple[str, str, str]], calls: Calls) -> None:
        super().__init__()
        self.choices, self.calls = choices, calls

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.choices.clear()
        outputs = function(*arguments, **named or {})
        for row, shape, rule in self.choices:
            if function.namespace == "fastvit_triton":
                self.calls.setdefault((row, shape), Call(function, arguments, rule))
        self.choices.clear()
        return outputs


@contextlib.contextmanager
def recording_calls() -> Iterator[Calls]:
    """In this context our kernels are always chosen; yields the calls with a choice, which are added as they happen."""
    choices: list[tuple[str, str, str]] = []
    calls = Calls()
    with observing(lambda *choice: choices.append(choice)), _Recorder(choices, calls):
        yield calls


def calls_of(
    name: str, batch: int, device: torch.device, context: Callable[[], AbstractContextManager], **options: object
) -> Calls:
    """The calls with a choice of one layer and the stem of a model, in inference and in a training step, in bfloat16.

    Args:
        name: a model of `create_model`.
        batch: number of images.
        device: where it runs.
        context: makes the context in which our kernels run there.
        options: further ones of `create_model`.
    """
    with device:
        model = create_model(name, **dict(depth=1, num_classes=0) | options).to(torch.bfloat16)
        image = torch.randn(1, model.config.in_chans, *model.patch_embed.img_size, dtype=torch.bfloat16)
    image = image.expand(batch, -1, -1, -1)
    with context(), recording_calls() as calls:
        with torch.no_grad():
            model.eval()(image)
        model.train()(image).sum().backward()
    return calls


def time_choice(call: Call, device: torch.device, deadline: Deadline, dry: bool = False) -> dict:
    """Times both implementations of a call and compares ours with PyTorch's result in float32.

    Args:
        call: from `calls_of`.
        device: where its arguments lie.
        deadline: no round starts after it, except the first.
        dry: one round only.

    Returns:
        "who" ("ours" if our result matches and is not slower, else "torch"), "match" and "within" of our result,
        "torch_us" and "ours_us" in microseconds, "torch_error" and "ours_error" where one failed.
    """
    given = {str(i): argument for i, argument in enumerate(call.arguments)}

    def run(kernels: bool, arguments: dict) -> list[torch.Tensor]:
        with forcing(kernels), torch.no_grad():
            return [t for t in leaves(call.function(*arguments.values())) if t.is_floating_point()]

    def outputs(kernels: bool, arguments: dict) -> Named:
        return {f"output {i}": t for i, t in enumerate(run(kernels, arguments))}

    truth, baseline = outputs(False, converted(given, torch.float32)), outputs(False, given)
    found = verdict(outputs(True, given), truth, baseline, torch.bfloat16)
    steps = {who: partial(_step, run, kernels, given) for who, kernels in (("torch", False), ("ours", True))}
    timings, errors = alternate(steps, device, deadline, 0.3, (1, 1) if dry else (3, 60))
    columns = found.columns() | {f"{who}_us": timing.us for who, timing in timings.items()}
    columns |= {f"{who}_error": text for who, text in errors.items()}
    faster = {"ours", "torch"} <= timings.keys() and timings["ours"].us <= timings["torch"].us
    return columns | dict(who="ours" if faster and found.match else "torch")


def _step(run: Callable, kernels: bool, given: dict, copy: int) -> Callable[[], object]:
    return partial(run, kernels, given)
