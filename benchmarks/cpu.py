"""The CPU paths against what they stand in for: one process, the two arms alternating, the ratio of each pair.

    python -m benchmarks.cpu [--out FILE] [--rounds N] [--against timm torch.compile] [--models NAME ...]

Against timm: our model beside timm's, both eager. Against torch.compile: timm's model compiled with
backend="fastvit_triton" beside the same model under plain torch.compile.

A ratio above 1 means fastvit_triton is faster. Machines that share their cores are noisy, so the table gives the median
and the quartiles of the ratios, and absolute times are not reported.
"""

import argparse
import copy
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

import fastvit_triton.convert  # noqa: F401  (registers the backend where nothing is installed)
from fastvit_triton import create_model
from fastvit_triton.files import replacing

from .match import outcome, verdict

COMMAND = "python -m benchmarks.cpu"
AGAINST = ("timm", "torch.compile")
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


def arms(name: str, against: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """(ours, theirs, theirs without a compiler) with the same weights."""
    plain = timm.create_model(name)
    if against == "timm":
        ours = create_model(name)
        ours.load_state_dict(plain.state_dict())
        return ours, plain, plain
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    return torch.compile(ours, backend="fastvit_triton"), torch.compile(theirs), plain


def matches(ours: torch.nn.Module, plain: torch.nn.Module, images: torch.Tensor) -> bool:
    """Our logits are within the budget of eager PyTorch; the truth is in float64."""
    exact = copy.deepcopy(plain).double()
    runs = ((ours, images), (exact, images.double()), (plain, images))
    found = [outcome(lambda run=run, given=given: run(given), {}, None) for run, given in runs]
    return verdict(*found, torch.float32).match


def measure(name: str, against: str, rounds: int) -> list[dict]:
    """One row for each step."""
    torch._dynamo.reset()
    ours, theirs, plain = arms(name, against)
    images = torch.randn(BATCH, 3, 224, 224)
    match, rows = matches(ours.eval(), plain.eval(), images), []
    for step in (forward, training_step):
        for model in (ours, theirs):
            model.train(step is training_step)
        found = ratios(step, ours, theirs, images, rounds)
        low, median, high = statistics.quantiles(found, n=4)
        row = dict(model=name, against=against, step=step.__name__, median=median, q1=low, q3=high, match=match)
        rows.append(row)
    return rows


def main() -> None:
    """Prints the table and, with --out, writes it as JSON with its provenance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=AGAINST)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    pairs = [(against, name) for against in arguments.against for name in arguments.models]
    rows = [row for against, name in pairs for row in measure(name, against, arguments.rounds)]
    table = Table("model", "against", "step", "theirs / ours, median", "quartiles", "match", width=110)
    for row in rows:
        spread = f"{row['q1']:.3f} to {row['q3']:.3f}"
        match = "yes" if row["match"] else "NO"
        table.add_row(row["model"], row["against"], row["step"], f"{row['median']:.3f}", spread, match)
    Console().print(table)
    if arguments.out:
        result = dict(
            command=COMMAND,
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
