"""The CPU path against timm's eager models: one process, the two arms alternating, the ratio of each neighbouring pair.

    python -m benchmarks.cpu [--out FILE] [--rounds N]

A ratio above 1 means fastvit_triton is faster. Machines that share their cores are noisy, so the table gives the median
and the quartiles of the ratios, and absolute times are not reported.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table

from fastvit_triton import create_model
from fastvit_triton.files import replacing

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
BATCH = 4


def forward(model: torch.nn.Module, images: torch.Tensor) -> None:
    """Inference."""
    with torch.inference_mode():
        model(images)


def training_step(model: torch.nn.Module, images: torch.Tensor) -> None:
    """Forward, backward, SGD."""
    model(images).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-6)
            parameter.grad = None


def seconds(step, model: torch.nn.Module, images: torch.Tensor) -> float:
    """One timed call."""
    start = time.perf_counter()
    step(model, images)
    return time.perf_counter() - start


def ratios(step, ours: torch.nn.Module, theirs: torch.nn.Module, images: torch.Tensor, rounds: int) -> list[float]:
    """Their seconds over ours, pair by pair; who goes first alternates."""
    found = []
    for i in range(-2, rounds):  # two pairs warm up
        order = (ours, theirs) if i % 2 else (theirs, ours)
        taken = {id(model): seconds(step, model, images) for model in order}
        if i >= 0:
            found.append(taken[id(theirs)] / taken[id(ours)])
    return found


def main() -> None:
    """Prints the table and, with --out, writes it as JSON with its provenance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    rows = []
    for name in MODELS:
        theirs = timm.create_model(name)
        ours = create_model(name)
        ours.load_state_dict(theirs.state_dict())
        images = torch.randn(BATCH, 3, 224, 224)
        match = torch.allclose(ours.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)
        for step in (forward, training_step):
            for model in (ours, theirs):
                model.train(step is training_step)
            found = ratios(step, ours, theirs, images, arguments.rounds)
            low, median, high = statistics.quantiles(found, n=4)
            rows.append(dict(model=name, step=step.__name__, median=median, q1=low, q3=high, match=match))
    table = Table("model", "step", "timm / ours, median", "quartiles", "match", width=100)
    for row in rows:
        spread = f"{row['q1']:.3f} to {row['q3']:.3f}"
        table.add_row(row["model"], row["step"], f"{row['median']:.3f}", spread, "yes" if row["match"] else "NO")
    Console().print(table)
    if arguments.out:
        result = dict(
            command="python -m benchmarks.cpu",
            date=str(date.today()),
            cpu=platform.processor() or platform.machine(),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            timm=timm.__version__,
            batch=BATCH,
            rounds=arguments.rounds,
            rows=rows,
        )
        with replacing(arguments.out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
