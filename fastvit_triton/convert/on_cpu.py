"""How a model runs on a CPU, now and frozen, by the rule that decides in each call, and what that was measured to gain.

cpu_gains.json holds what whole models gained on CPUs, see `benchmarks.cpu_gains`.
"""

import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..engine.freeze import freeze, precision_of
from ..kernels import choose, launch, measured, onednn, tile
from ..kernels.choose import Choice
from ..kernels.settings import forcing, observing
from . import captured
from .chosen import located
from .flop_shares import CountedModel, runs_on_shapes

CPU = torch.device("cpu")
PRETENDED = "sm_90"  # where the kernels run blocks choose a way, and are told to run plain
GAINS = Path(__file__).parent / "cpu_gains.json"
NEAR = 4  # largest ratio of sizes between a model and the one from which its gain is expected
NAMES = {"float32": "", "bf16": " in bfloat16", "int8": " in int8"}


def blocks_of(model: nn.Module, example: Any, frozen: bool = False) -> list[Choice] | None:
    """The blocks of one inference call with their sizes and paths; None if the model does not run on the example.

    A copy, which is frozen if asked for, is called on shapes alone. It decides nothing: each block states its sizes,
    and runs PyTorch's operators.
    """
    found: list[Choice] = []
    with located(model), observing(found.append), _pretending():
        ran = runs_on_shapes(model, example, freeze if frozen else id)
    return [choice for choice in found if choice.branches] if ran else None


@contextlib.contextmanager
def _pretending() -> Iterator[None]:
    """Context in which blocks on a CPU choose a way as on a GPU, which is always plain."""
    before, tile.MISSING = tile.MISSING, None
    try:
        with launch.targeting(PRETENDED), forcing("plain"):
            yield
    finally:
        tile.MISSING = before


def decided(blocks: Iterable[Choice], dtype: torch.dtype, training: bool, frozen: str | None) -> list[Choice]:
    """The blocks with the ways in which they would run now; arguments as in `choose.way_of`."""
    x = torch.empty(0, dtype=dtype)
    return [block._replace(way=choose.way_of(x, block.branches, training, False, frozen)) for block in blocks]


def products(blocks: Iterable[Choice]) -> float:
    """Multiplications of the mean product of the blocks."""
    branches = [branch for block in blocks for branch in block.branches]
    return sum(b.images * b.tokens * b.channels * (b.width + b.inner) for b in branches) / (2 * len(branches))


class Numbers(NamedTuple):
    """How many of a model's blocks oneDNN runs."""

    total: int  # blocks, or modules, that choose a way
    noun: str  # what they are
    inference: int  # how many of them oneDNN runs; then frozen, and in training
    frozen: int
    training: int
    others: bool  # some blocks are captured, which choose by the size of each linear layer
    products: float  # multiplications of the mean product of the blocks, see `products`

    def said(self, number: int, precision: str = "float32") -> str:
        """What runs, for this number by oneDNN."""
        if not number:
            return "PyTorch"
        plural = "s" * (self.total != 1)
        return f"oneDNN{NAMES[precision]} for {number} of {self.total} {self.noun}{plural}"


def numbers_of(model: nn.Module, example: Any, dtype: torch.dtype, precision: str = "float32") -> Numbers | None:
    """The numbers of a model for an example, frozen in this precision; None if they are not known.

    They are not if the model does not run on the example, or if none of its modules chooses a way as a whole.
    """
    blocks = None if example is None else blocks_of(model, example)
    if not blocks:
        return None
    folds = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    after = (folds and blocks_of(model, example, frozen=True)) or blocks

    def by_onednn(blocks: list[Choice], training: bool, frozen: str | None) -> int:
        ways = decided(blocks, dtype, training, frozen)
        return len({block.path for block in ways if block.way == "onednn"})

    return Numbers(
        len({block.path for block in after}),
        "block" if any(len(block.branches) > 1 for block in after) else "module",
        by_onednn(blocks, False, None),
        by_onednn(after, False, precision),
        by_onednn(blocks, True, None),
        any(map(captured.is_bound, model.modules())),
        products(after),
    )


def sentences(subject: CountedModel, dtype: torch.dtype) -> str:
    """What runs a model with parameters in this dtype on a CPU: now, after `freeze`, and on a GPU."""
    on_gpu = " On a GPU: Triton, where it is expected to be faster." if dtype in onednn.DTYPES else ""
    rule = onednn.rule(CPU, dtype)
    model = subject.model
    precision = None if model is None else precision_of(model)
    if not rule.runs and precision in (None, "float32"):
        return f"On this CPU: PyTorch, because {rule.why}.{on_gpu}"
    example = None if model is None else subject.example()
    numbers = None if model is None else numbers_of(model, example, dtype, precision or "float32")
    if numbers is None:
        remedy = "" if example is not None or model is None else "; optimize(model, example=images) says which"
        return f"On this CPU: oneDNN or PyTorch, by the sizes of each call{remedy}.{on_gpu}"
    batch = batch_of(example)
    inference = numbers.said(numbers.frozen, precision) if precision else numbers.said(numbers.inference)
    training = numbers.said(numbers.training)
    text = inference if training == inference else f"{inference} in inference, {training} in training"
    text += ", others by the size of each linear layer" * numbers.others
    if precision:
        return f"On this CPU, frozen, batch {batch}: {text}.{on_gpu}"
    later = f"{numbers.said(numbers.frozen)}, with packed weights" if numbers.frozen else "PyTorch, too"
    if numbers.frozen and text == numbers.said(numbers.frozen):
        return f"On this CPU, batch {batch}: {text}, with packed weights after freeze(model).{on_gpu}"
    return f"On this CPU, batch {batch}: {text}; after freeze(model) {later}.{on_gpu}"


def batch_of(example: Any) -> int:
    """The number of images of an example."""
    return next((t.shape[0] for t in tree_leaves(example) if isinstance(t, Tensor) and t.dim()), 1)


@dataclass(frozen=True, eq=False)
class Gain:
    """What a model gained over eager PyTorch in float32, in inference on a CPU."""

    model: str  # its name in timm
    batch: int  # images
    threads: int  # of PyTorch
    products: float  # multiplications of its mean product, see `products`
    # precision → median, first and third quartile of its speed relative to eager PyTorch's
    speeds: dict[str, list[float]]

    def said(self, precision: str) -> str:
        """The speed with its quartiles."""
        median, low, high = self.speeds[precision]
        return f"{median:.2f} × eager PyTorch in float32 ({low:.2f} to {high:.2f})"

    @property
    def place(self) -> str:
        """The model and how it was called."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.model}, batch {self.batch}, {threads}"


@functools.cache
def _gains() -> dict[str, list[Gain]]:
    held = json.loads(GAINS.read_text(encoding="utf-8"))["cpus"]
    return {cpu: [Gain(**row) for row in rows] for cpu, rows in held.items()}


def gains() -> list[Gain]:
    """What was measured on this machine's kind of CPU, see `measured.cpu_name`; may be empty."""
    return _gains().get(measured.cpu_name(), [])


def nearest(found: Iterable[Gain], macs: float, precision: str) -> Gain | None:
    """The measured model with products nearest in size; None if none was measured in this precision.

    Sizes differ at most by the factor `NEAR`, within which one with this number of threads comes first.
    """
    threads = torch.get_num_threads()
    distances = {gain: abs(math.log(gain.products / macs)) for gain in found if precision in gain.speeds}
    near = (gain for gain, distance in distances.items() if distance <= math.log(NEAR))
    return min(near, key=lambda gain: (gain.threads != threads, distances[gain]), default=None)


def span(found: Iterable[Gain], precision: str) -> tuple[float, float] | None:
    """The least and largest median speed in a precision; None if none was measured."""
    medians = [gain.speeds[precision][0] for gain in found if precision in gain.speeds]
    return (min(medians), max(medians)) if medians else None


def pays(found: Iterable[Gain], precision: str) -> bool:
    """True if each measured model was measurably faster in this precision than eager PyTorch in float32."""
    lows = [gain.speeds[precision][1] for gain in found if precision in gain.speeds]
    return bool(lows) and min(lows) > 1


def evidence(macs: float | None, precision: str) -> str:
    """What to expect of a frozen model on this machine, in a sentence or two."""
    found = gains()
    on = f"this kind of CPU ({measured.cpu_name()})"
    limits = span(found, precision)
    if limits is not None and macs is None:
        return f"Measured on {on}: {limits[0]:.2f} to {limits[1]:.2f} × eager PyTorch in float32, by model."
    near = None if macs is None else nearest(found, macs, precision)
    if near is None:
        what = "Nothing" if limits is None else "No model of this size"
        return f"{what} was measured in this precision on {on}; time the model before you use it."
    text = f"Measured on {on} at the nearest size, {near.place}: {near.said(precision)}."
    return f"{text} {no_gain}" if precision == "int8" and (no_gain := _no_gain(near)) else text


def _no_gain(near: Gain) -> str | None:
    """What int8 is not measurably faster than."""
    low = near.speeds["int8"][1]
    for other, how in (("float32", "freeze(model)"), ("bf16", 'freeze(model, "bf16")')):
        if other in near.speeds and low <= near.speeds[other][2]:
            return f"There int8 does not gain over {how}: {near.said(other)}."
    return None
