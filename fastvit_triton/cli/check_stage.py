"""Runs one stage of `check` in a process of its own: `python -m fastvit_triton.cli.check_stage REQUEST FILE`.

The request is JSON, the fields of `Request`; the result is written to the file as JSON.
"""

import json
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..files import replacing
from .model_by_name import NamedModel, Size, random_model
from .tune import DTYPES, pretending, tiny_model

if TYPE_CHECKING:
    import torch

    from ..measure.check import Subject
    from ..measure.timeout import Deadline
    from ..measure.tune import Tuned

RESERVE = 4.0  # seconds of a stage that are kept for the end of the process
TIMED = {"cuda": 10.0, "cpu": 12.0, "dry": 2.0}  # seconds at the end of a comparison for timing
DRY = 30.0  # seconds of tuning in a dry run, in which each step runs at least once


class Request(NamedTuple):
    """What a stage measures.

    Attributes:
        stage: "tune", "compare" or "max-autotune".
        model: name for `build_model`.
        size: height and width of images; None means the model's own.
        batch: number of images.
        dtype: one of `DTYPES`.
        train: training steps instead of inference.
        device: name of the device.
        dry: a tiny model in Triton's interpreter.
        budget: seconds that the stage has.
        end: time since the epoch at which it must have ended.
    """

    stage: str
    model: str
    size: Size | None
    batch: int
    dtype: str
    train: bool
    device: str
    dry: bool
    budget: float = 0.0
    end: float = 0.0

    def deadline(self) -> "Deadline":
        """The end of the measurements."""
        from ..measure.timeout import Deadline

        return Deadline(self.end - time.time() - RESERVE)

    def built(self) -> NamedModel:
        """The model with random weights."""
        import torch

        if self.dry:
            return tiny_model(self.train)
        size = None if self.size is None else (self.size[0], self.size[1])
        return random_model(self.model, size, torch.device(self.device), getattr(torch, DTYPES[self.dtype]), self.train)


def subject_of(request: Request) -> "Subject":
    """The model of a request and its inputs, as `measure.check` takes them."""
    import torch

    from ..measure.check import Subject

    built = request.built()
    dtype = getattr(torch, DTYPES[request.dtype])
    device = torch.device(request.device)

    def inputs(seed: int) -> dict:
        generator = torch.Generator(device).manual_seed(seed)
        images, named = built.inputs(request.batch, partial(_random, generator, dtype))
        return dict(image=images[0]) if images else named

    return Subject(request.model, built.model, inputs, request.batch, dtype, device, built.ours)


def _random(generator: "torch.Generator", dtype: "torch.dtype", *shape: int) -> "torch.Tensor":
    import torch

    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def compare(request: Request) -> dict:
    """Measures eager PyTorch, ours and torch.compile, in the mode max-autotune if the stage is called so."""
    from ..measure.check import compare

    mode = "max-autotune" if request.stage == "max-autotune" else None
    kind = "dry" if request.dry else "cuda" if request.device.startswith("cuda") else "cpu"
    result = compare(subject_of(request), mode, request.deadline(), TIMED[kind], request.budget)
    if request.dry:  # whose ratios are those of the interpreter
        right = sum(row.get("match") is True for row in result["rows"])
        result["said"] = f"{right} of {len(result['rows'])} variants gave right results"
    return result


def tune(request: Request) -> dict:
    """Tunes the model; returns what was chosen, the file that holds it, and "said"."""
    from ..measure.tune import tune
    from ..measure.variants import without_times

    subject = subject_of(request)
    example = subject.inputs(0)
    remaining = request.deadline().left  # the last candidate may take longer than tune's limit
    seconds = DRY if request.dry else max(0.85 * remaining, 1.0)
    tuned = tune(subject.model, example.get("image", example), request.train, seconds)
    parts = [dict(name=p["name"], count=p["count"], before=p["rule"], after=p["way"]) for p in tuned.parts]
    model = tuned.model
    if subject.device.type == "cpu" and not request.dry:
        model = {name: without_times([row])[0] for name, row in model.items()}
    return dict(parts=parts, path=str(tuned.path), model=model, said=_tuned(tuned, request.dry))


def _tuned(tuned: "Tuned", dry: bool) -> str:
    """What `tune` found, and whether it is kept, in one line."""
    new = [row for row in tuned.launches if row["best"] is not None and row["best"] != row["tried"][0]["config"]]
    parts = ", ".join(f"{part['count']} × {part['name']} {_chosen(part)}" for part in tuned.parts)
    launches = f"new launch parameters for {len(new)} of {len(tuned.launches)} launches" if tuned.launches else ""
    measured = any(part["way"] for part in tuned.parts) or any(row["best"] is not None for row in tuned.launches)
    kept = (
        "used in this run only" if dry else "saved; if the machine was busy, `fastvit-triton tune --clear` removes it"
    )
    return "; ".join(
        text for text in (parts, launches, kept if measured else "nothing was measured, so nothing saved") if text
    )


def _chosen(part: dict) -> str:
    """The way of a block, and the one before it was measured."""
    before, after = (_name(part[key]) for key in ("rule", "way"))
    if part["way"] is None:
        return f"{before}, as before, because it was not measured in time"
    return f"{after}, as before" if after == before else f"{after} (before: {before})"


def _name(way: str | None) -> str:
    return "by oneDNN" if way == "onednn" else str(way)


STAGES = {"tune": tune, "compare": compare, "max-autotune": compare}


def main() -> None:
    """Runs the stage of the request and writes its result, or "error"."""
    import torch

    from ..measure.timeout import capturing

    request = Request(**json.loads(sys.argv[1]))
    result = dict[str, object]()
    with capturing(result, "error"), pretending() if request.dry else nullcontext():
        if request.device.startswith("cuda"):
            torch.cuda.set_device(request.device)
        try:
            result |= STAGES[request.stage](request)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"--batch {request.batch} does not fit into memory; lower it") from error
    with replacing(Path(sys.argv[2])) as temporary:
        temporary.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
