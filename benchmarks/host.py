"""Host time of a transformer block compared with timm's: Python, the dispatcher and autograd, without a GPU.

    python -m benchmarks.host [--json] [--rounds 60] [--out benchmarks/results/host.json]

Launches of kernels end in a function that does nothing (benchmarks/no_device.py), on one thread. timm's block runs on
an empty batch, where PyTorch's operators compute nothing. Ours runs on one image, of 2 tokens and 16 channels, in the
ways that launch kernels, because an empty batch launches none; mixed blocks leave matrix products to PyTorch, and those
of way "onednn" to oneDNN on this CPU, so they are compared with timm's on that image as well. In training, the matrix
products of a fused block's backward pass count against it. A block's time is the slope between 2 and 10 blocks; the two
models alternate. Calls are replayed (`engine.replay`) unless a row says otherwise. `calls` counts the Python calls of a
block, built-in functions included, by cProfile; the count is deterministic.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fastvit_triton import create_model, freeze, optimize
from fastvit_triton.engine import ways
from fastvit_triton.kernels import fold
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.sizes import WAYS
from fastvit_triton.measure.machine import provenance

from .no_device import no_device
from .result_file import as_json, write_text

DEPTHS = (2, 10)
SMALL = dict(img_size=16, embed_dim=16, num_heads=1, num_classes=0)  # 2 tokens, 16 channels
TARGETS = {"fused": 0.6, "mixed": 0.9, "plain": 1.05, "onednn": 1.0}  # ratio to timm's time in inference, by way
TRAINING_TARGET = 1.3


def by_timm(depth: int) -> nn.Module:
    """timm's model with `depth` blocks."""
    return timm.create_model("vit_tiny_patch16_224", depth=depth, **SMALL)


def ours(depth: int) -> nn.Module:
    """Our model with the same sizes."""
    return create_model("vit_tiny_patch16_224", depth=depth, **SMALL)


def converted(depth: int) -> nn.Module:
    """timm's model after `optimize`."""
    model = by_timm(depth)
    optimize(model)
    return model


class WrittenAttention(nn.Module):
    """Self-attention of a class that no reader knows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, D] → [B, N, D]."""
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 1, D).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, D))


class WrittenBlock(nn.Module):
    """Pre-norm block of a class that no reader knows, with the submodules of timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = WrittenAttention()
        self.ls1, self.ls2 = nn.Identity(), nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 16), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, D] → [B, N, D]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


def captured(depth: int) -> nn.Module:
    """Blocks that `optimize` captures."""
    model = nn.Module()
    model.blocks = nn.Sequential(*(WrittenBlock() for _ in range(depth)))
    optimize(model.blocks, example=torch.zeros(2, 2, 16))
    return model


def frozen(depth: int) -> nn.Module:
    """Our model with its LayerNorms folded once."""
    model = ours(depth).eval()
    freeze(model)
    return model


def call(make: Callable[[int], nn.Module], depth: int, phase: str, batch: int) -> Callable[[], None]:
    """A function that runs a model's blocks, in training with backward, in float32 (cheapest for small products)."""
    model = make(depth).train(phase == "training")
    x = torch.zeros(batch, 2, 16, requires_grad=phase == "training")
    gradient = torch.zeros_like(x)

    def infer() -> None:
        with torch.no_grad():
            model.blocks(x)

    def train() -> None:
        model.blocks(x).backward(gradient)
        for parameter in model.parameters():
            parameter.grad = None

    return train if phase == "training" else infer


def calls_of(run: Callable[[], None]) -> int:
    """Number of Python calls in one run."""
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    return pstats.Stats(profile).total_calls


def seconds_of(run: Callable[[], None]) -> float:
    """CPU time of one run on this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def target(phase: str, way: str) -> float:
    """Target ratio to timm's time."""
    return TARGETS[way] if phase == "inference" else TRAINING_TARGET


def variants() -> Iterator[tuple[str, str, str, Callable[[int], nn.Module], bool]]:
    """(phase, block, way, model, whether calls are replayed) of every row."""
    for phase in ("inference", "training"):
        for block, make in (("ours", ours), ("timm's, optimized", converted)):
            for way in WAYS:
                yield phase, block, way, make, True
        yield phase, "captured", "fused", captured, True
        yield phase, "captured, not replayed", "fused", captured, False
        for way in ("mixed", "fused"):
            yield phase, "timm's, optimized, not replayed", way, converted, False
    yield "inference", "ours, frozen", "fused", frozen, True
    for block, make in (("ours", ours), ("timm's, optimized", converted), ("ours, frozen", frozen)):
        yield "inference", block, "onednn", make, True


def measure(phase: str, way: str, make: Callable[[int], nn.Module], rounds: int) -> dict[str, float]:
    """Microseconds and Python calls of a block and of timm's, the median ratio and its quartiles."""
    eager = [call(by_timm, depth, phase, 1 if way in ("mixed", "onednn") else 0) for depth in DEPTHS]
    tested = [call(make, depth, phase, 0 if way == "plain" else 1) for depth in DEPTHS]
    blocks = DEPTHS[1] - DEPTHS[0]
    with forcing(way):
        for run in (*eager, *tested) * 3:  # fills caches of plans and compiled kernels
            run()
        gc.collect()  # frees earlier models
        calls = [(calls_of(deep) - calls_of(shallow)) / blocks for shallow, deep in (eager, tested)]
        slopes = [[], []]
        for _ in range(rounds):
            for slope, (shallow, deep) in zip(slopes, (eager, tested), strict=True):
                slope.append((seconds_of(deep) - seconds_of(shallow)) / blocks * 1e6)
    ratios = [b / a for a, b in zip(*slopes, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return dict(
        us=round(statistics.median(slopes[1]), 1), timm_us=round(statistics.median(slopes[0]), 1),
        ratio=round(middle, 3), quartiles=[round(low, 3), round(high, 3)], calls=calls[1], timm_calls=calls[0],
    )  # fmt: skip


def rows(rounds: int) -> list[dict[str, object]]:
    """One row for each phase, block and way; LayerNorms are folded as at large batches."""
    results = []
    for phase, block, way, make, replays in variants():
        folds = patch.dict(fold.SPACE, border=dict(ROWS_PER_OUTPUT=0))
        running = using_backend("onednn") if way == "onednn" else no_device()
        with folds, patch.object(ways, "REPLAYS", replays), running:
            figures = measure(phase, way, make, rounds)
        results.append(dict(phase=phase, block=block, way=way, **figures, target=target(phase, way)))
    return results


def main(words: list[str] | None = None) -> None:
    """Prints the rows, as a table or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--out", type=Path, help="file for the rows and their provenance")
    parser.add_argument("--rounds", type=int, default=60, help="number of calls of each model")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    results = rows(arguments.rounds)
    if arguments.out:
        write_text(arguments.out, as_json(dict(provenance=provenance()), rows=results))
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    table = Table("phase", "block", "way", "µs", "timm µs", "ratio", "quartiles", "calls", "timm calls", "target")
    for row in results:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
