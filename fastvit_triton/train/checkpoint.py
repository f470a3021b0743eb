"""The state of a run between two epochs, in one file: enough to go on as if nothing had happened."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from ..files import replacing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the several ways in which libraries report a failed write of `path` into one OSError with one sentence."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        cause = error.__cause__ or error
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OSError(f"cannot write {path}: {why}; what it held before is intact") from error


def save_state(path: Path, model: nn.Module, optimizer: Optimizer, history: list[dict], settings: dict) -> None:
    """Writes model, optimiser, finished epochs and random state to one file, whole or not at all.

    Written after each epoch, so that a stopped run costs one epoch at most. Refuses nothing; a failed write raises
    OSError and leaves the file of the epoch before.

    Args:
        path: the file.
        model: the module in training.
        optimizer: its optimiser.
        history: one row of numbers for each finished epoch.
        settings: what the run was asked to do: names, numbers, None.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": history,
        "settings": settings,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }
    with writing(path), replacing(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> dict:
    """Reads what `save_state` wrote, on the CPU. Refuses a damaged file, and one that wants to run code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged or no training state: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "history", "settings", "rng"} <= state.keys():
        raise ValueError(f"{path} is no training state of ours; give the folder of a run")
    return state


def restore(state: dict, model: nn.Module, optimizer: Optimizer) -> None:
    """Puts weights, optimiser and random generators back as `save_state` found them."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and len(state["cuda_rng"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
