"""Training state: one file from which a run resumes bit for bit. The last two files are kept."""

import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from ..files import reason, replacing, write_failure
from .loop import Progress
from .ranges import NonNegative, NonNegativeInt, PositiveInt, check
from .rng import get_rng_state, set_rng_state
from .step import Step

STATE = "training_state.pt"
PREVIOUS = "training_state.previous.pt"
_PROGRESS = ("epoch", "step", "images", "loss_sum", "correct", "lr", "seconds", "epoch_rng", "done")
LOG_COLUMNS = tuple(
    "epoch lr train_loss train_accuracy test_loss test_accuracy test_images images_per_second seconds".split()
)
DETECTION_COLUMNS = (*LOG_COLUMNS, "test_ap", "test_ap50", "test_ap75", "test_ap_low", "test_ap_high")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Converts the exceptions that libraries raise when writing `path` fails to OSError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {write_failure(error)}; its previous content is intact") from error


def make_state(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    progress: Progress,
    history: list[dict],
    settings: dict,
    data: dict | None = None,
) -> dict:
    """Everything that a run needs to resume, as tensors, numbers, strings, lists and dicts.

    Args:
        model: the model being trained.
        optimizer: over its parameters.
        step: its loss scaler and EMA are saved.
        progress: the last one that `fit` yielded.
        history: one log row per finished epoch.
        settings: settings of the run, from `resolve_settings`.
        data: `Data.identity` of the run; None if it must not be compared on resuming.
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": None if step.ema is None else step.ema.state_dict(),
        "scaler": step.scaler.state_dict(),
        "progress": {name: getattr(progress, name) for name in _PROGRESS},
        "history": history,
        "settings": settings,
        "data": data,
        "generators": get_rng_state(),
    }


def save_state(folder: Path, state: dict) -> None:
    """Writes a state to the folder atomically and keeps the previous one.

    Each record of the file has a CRC-32, which `load_state` checks. If writing fails, both files are unchanged.

    Args:
        folder: an existing folder.
        state: from `make_state`.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / STATE
    with write_errors(path), replacing(path, keep=folder / PREVIOUS) as temporary, temporary.open("wb") as file:
        torch.save(state, file)  # given a path, PyTorch does not say why it cannot write


def load_state(path: Path) -> dict:
    """Loads a file of `save_state` onto the CPU. A file that would execute code when unpickled is rejected.

    Args:
        path: the file.

    Raises:
        ValueError: a checksum is wrong, a key is missing, or the file is not a training state.
    """
    try:
        with zipfile.ZipFile(path) as records:  # PyTorch writes checksums but does not read them
            if sum(record.file_size for record in records.infolist()) > path.stat().st_size:  # it never compresses
                raise zipfile.BadZipFile("its records are larger than the file")
            if bad := records.testzip():
                raise zipfile.BadZipFile(f"the checksum of {bad} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except (RuntimeError, EOFError, KeyError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged or not a training state: {reason(error)}") from error
    expected = {"model", "optimizer", "ema", "scaler", "progress", "history", "settings", "generators"}
    if not isinstance(state, dict) or not expected <= state.keys():
        raise ValueError(f"{path} is not a training state of fastvit-triton; give the folder of a run")
    try:
        _check_values(state)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return state


def _check_values(state: dict) -> None:
    """Raises ValueError unless progress and history hold the values that `make_state` writes."""
    progress = state["progress"]
    history = state["history"]
    for name in ("model", "optimizer", "scaler", "progress", "settings", "generators"):
        check(name, state[name], dict)
    if missing := [name for name in _PROGRESS if name not in progress]:
        raise ValueError(f"its progress has no {missing[0]!r}")
    check("data", state.get("data"), dict | None)
    for name, least in {"epoch": PositiveInt, "step": PositiveInt, "images": NonNegativeInt}.items():
        check(f"progress {name}", progress[name], least)
    for name in ("lr", "seconds"):
        check(f"progress {name}", progress[name], NonNegative)
    check("progress done", progress["done"], bool)
    for name in ("loss_sum", "correct"):
        if not isinstance(progress[name], (torch.Tensor, float, int)) or torch.as_tensor(progress[name]).ndim:
            raise ValueError(f"progress {name} is no number")
    if not progress["done"]:
        check("progress epoch_rng", progress["epoch_rng"], dict)
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("its history is no list of log rows")
    if len(history) != progress["epoch"] - (not progress["done"]):
        raise ValueError(f"its history has {len(history)} rows after epoch {progress['epoch']}")
    for row in history:
        if tuple(row) not in (LOG_COLUMNS, DETECTION_COLUMNS):
            raise ValueError(f"a row of its history has {', '.join(map(str, row)) or 'nothing'}")
        for name, value in row.items():
            check(f"{name} of its history", value, float | None)


def newest_state(folder: Path) -> tuple[dict, str]:
    """The newest undamaged state of a run, and a sentence about a newer one that is damaged, or "".

    Args:
        folder: output folder of the run.

    Raises:
        ValueError: there is no undamaged state.
    """
    errors = []
    for path in (folder / STATE, folder / PREVIOUS):
        try:
            state = load_state(path)
        except ValueError as error:
            errors.append(error)
            continue
        progress = state["progress"]
        where = f"epoch {progress['epoch']}" + ("" if progress["done"] else f", step {progress['step']}")
        return state, f"{errors[0]}; resuming from {path}, {where}" if errors else ""
    raise errors[0]


def restore(state: dict, model: nn.Module, optimizer: Optimizer, step: Step, load: Callable[..., None]) -> Progress:
    """Restores weights, optimiser, EMA, loss scaler and random generators; returns the progress of the run.

    Args:
        state: from `load_state`.
        model: of the same architecture, on its device.
        optimizer: over its parameters.
        step: with an EMA if the run had one.
        load: `Engine.load_state`; called with the four arguments above, it loads weights, optimiser and EMA.

    Raises:
        ValueError: the state belongs to another model or optimiser.
    """
    try:
        load(state, model, optimizer, step)
        step.scaler.load_state_dict(state["scaler"])
        set_rng_state(state["generators"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        first, *rest = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"the state does not fit this run: {' '.join([first, *map(str.strip, rest[:1])])}") from error
    device = next(model.parameters()).device
    stored = state["progress"]
    return Progress(**stored | {name: torch.as_tensor(stored[name], device=device) for name in ("loss_sum", "correct")})


def checksum(model: nn.Module) -> int:
    """CRC-32 over the bytes of all tensors of a model, in order, without their names."""
    total = 0
    for tensor in model.state_dict().values():
        total = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), total)
    return total
