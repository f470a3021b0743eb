"""Checkpoints of several processes, through `torch.distributed.checkpoint`: in shards, or whole as one process's.

A sharded checkpoint is a folder, `step-000000120/`: each process writes the part it holds, so neither time nor memory
grows with their number. Any number of processes, one included, may read it. It appears whole or not at all: written
beside its place, fsynced, listed with checksums, renamed. PyTorch keeps the layout in a pickle: read your own only.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..files import replacing
from .parallel import World
from .ranges import Count, Number, checked

EXTRA, MANIFEST = "extra.pt", "manifest.json"
_NAME = re.compile(r"step-(\d{9})")


@checked
def save_sharded(
    folder: Path,
    step: Number,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    extra: dict | None = None,
    own: object = None,
    keep: Count = 2,
) -> Path:
    """Writes `folder/step-…` from all processes at once, and then removes older ones. All must call it.

    Args:
        folder: exists, and all processes see it.
        step: of the run; a later one is newer.
        model: from `ddp`, `fsdp`, or plain.
        optimizer: its optimiser.
        world: from `join`.
        extra: whatever else the run needs, tensors, numbers, strings, in lists and dicts; the first process's counts.
        own: the same for each process, such as its random state.
        keep: how many checkpoints stay.

    Returns:
        The new folder.

    Raises:
        OSError: a process could not write; the checkpoints before are intact.
    """
    path = folder / f"step-{step:09d}"
    parts = folder / f".{path.name}.parts"
    weights, moments = get_state_dict(model, optimizer)
    owns = world.gather(own)
    trouble, sums = world.tell(_empty(parts) if world.first else None), {}
    try:
        if trouble:
            raise OSError(trouble)
        with _quiet():
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=parts)
        if world.first:
            with replacing(parts / EXTRA) as temporary:
                torch.save({"extra": extra or {}, "own": owns}, temporary)
        mine = parts.glob(f"__{world.rank}_*")
        sums = {file.name: _sum(file) for file in (*mine, *([parts / ".metadata", parts / EXTRA] * world.first))}
    except (OSError, RuntimeError, CheckpointException) as error:
        trouble = _first_line(error)
    told = world.gather((trouble, sums))
    if world.first and not any(why for why, _ in told):
        try:
            _publish(parts, path, {name: made for _, some in told for name, made in some.items()})
            for old in checkpoints(folder)[keep:]:
                shutil.rmtree(old)
        except OSError as error:
            told.append((_first_line(error), {}))
    causes = [why for why, _ in world.tell(told) if why]
    if causes:
        if world.first:
            shutil.rmtree(parts, ignore_errors=True)
        raise OSError(f"cannot write {path}: {causes[0]}; the checkpoints before are intact")
    return path


def load_sharded(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> tuple[dict, object]:
    """Reads a checkpoint of any number of processes into this many. All must call it.

    Args:
        path: from `newest_sharded`.
        model: wrapped as it will train.
        optimizer: over its parameters.
        world: from `join`.

    Returns:
        `extra`, and this process's `own`, which is None where another number of processes wrote it.
    """
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    with _quiet():
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other = torch.load(path / EXTRA, map_location="cpu", weights_only=True)
    return other["extra"], other["own"][world.rank] if len(other["own"]) == world.size else None


def checkpoints(folder: Path) -> list[Path]:
    """The sharded checkpoints in a folder, newest first."""
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def newest_sharded(folder: Path, world: World) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint whose every byte is as it was written, and why newer ones are not taken.

    The processes share the reading.

    Args:
        folder: as for `save_sharded`.
        world: from `join`.

    Returns:
        Its path, or None; and a sentence for each damaged one.
    """
    damaged: dict[Path, str] = {}
    for path in world.tell(checkpoints(folder)):
        flaws = [flaw for flaw in world.gather(_flaw(path, world)) if flaw]
        if not flaws:
            return path, damaged
        damaged[path] = flaws[0]
    return None, damaged


def full_state(model: nn.Module, optimizer: Optimizer) -> dict:
    """{"model", "optimizer"} as one process without engines would have them, in host memory. All must call it.

    Parameters have the bare model's names, optimiser state its numbers, so `load_state_dict` of both takes them.

    Returns:
        The first process's is complete; the others' is empty.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": numbered(moments)} if weights else {}


def load_full_state(state: dict, model: nn.Module, optimizer: Optimizer) -> None:
    """The inverse of `full_state`: each process takes its part. All must call it.

    Args:
        state: {"model", "optimizer"}, whole on every process; `torch.load(mmap=True)` lets them share memory.
        model: wrapped as it will train.
        optimizer: over its parameters.
    """
    names = {id(parameter): name for name, parameter in getattr(model, "module", model).named_parameters()}
    named = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    order = [name for group in named for name in group]
    kept = {order[number]: values for number, values in state["optimizer"]["state"].items()}
    groups = zip(state["optimizer"]["param_groups"], named, strict=True)
    moments = {"state": kept, "param_groups": [group | {"params": params} for group, params in groups]}
    options = StateDictOptions(full_state_dict=True)
    weights = dict(state["model"])  # the call below renames in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)


def consolidate(path: Path) -> dict:
    """What `full_state` would have given for a sharded checkpoint, read by one process without engines or model."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with replacing(path / "whole.pt") as temporary:
        dcp_to_torch_save(path, temporary)
    try:
        state = torch.load(path / "whole.pt", map_location="cpu", weights_only=True)
    finally:
        (path / "whole.pt").unlink()
    return {"model": state["model"], "optimizer": numbered(state["optimizer"])}


def numbered(moments: dict) -> dict:
    """Optimiser state by parameter name, as torch.distributed.checkpoint has it, to numbers, as optimisers do."""
    numbers: dict[str, int] = {}
    for group in moments["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in moments["param_groups"]]
    return {"state": {numbers[name]: values for name, values in moments["state"].items()}, "param_groups": groups}


@contextmanager
def _quiet() -> Iterator[None]:
    """One process alone is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _empty(folder: Path) -> str | None:
    """Makes a folder anew; why it cannot be made."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        return _first_line(error)
    return None


def _publish(parts: Path, path: Path, sums: dict[str, list]) -> None:
    """Lists the files with sizes and checksums, and moves the folder to its place; each durable before the next."""
    with replacing(parts / MANIFEST) as temporary:
        temporary.write_text(json.dumps(sums))
    shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
    os.replace(parts, path)
    with suppress(PermissionError):  # systems that cannot open a folder
        handle = os.open(path.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _flaw(path: Path, world: World) -> str | None:
    """What is wrong with this process's part of a checkpoint's files."""
    try:
        listed = sorted(json.loads((path / MANIFEST).read_text()).items())
        for name, made in listed[world.rank :: world.size]:
            if _sum(path / name) != made:
                return f"{path / name} is not what was written"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{path / MANIFEST} cannot be read: {_first_line(error)}"
    return None


def _sum(file: Path) -> list:
    """[size, SHA-256]."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
        return [content.tell(), digest.hexdigest()]


def _first_line(error: BaseException) -> str:
    """The cause in a few words; torch.distributed.checkpoint keeps it by process."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
