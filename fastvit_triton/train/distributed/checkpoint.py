"""Distributed checkpoints with `torch.distributed.checkpoint`: sharded, or gathered into one state dict.

A sharded checkpoint is a folder, `step-000000120/`: each rank writes its own shards, so time and memory do not
grow with the number of ranks. Any number of ranks, including one, can read it. The folder is written under a temporary
name, fsynced, listed with checksums in a manifest, and renamed, so it is never incomplete. PyTorch stores the layout as
a pickle: load only checkpoints that you trust.
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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from ...files import replacing
from ..ranges import NonNegativeInt, PositiveInt, checked
from . import World

EXTRA, MANIFEST = "extra.pt", "manifest.json"
_NAME = re.compile(r"step-(\d{9})")


@checked
def save_sharded(
    folder: Path,
    step: NonNegativeInt,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    extra: dict | None = None,
    per_rank: object = None,
    keep: PositiveInt = 2,
) -> Path:
    """Writes `folder/step-…` from all ranks and then removes older checkpoints. Collective.

    Args:
        folder: an existing folder on storage that all ranks share.
        step: step of the run; the checkpoint with the highest step is the newest.
        model: from `ddp`, `fsdp`, or a plain module.
        optimizer: over its parameters.
        world: from `process_group`.
        extra: other state of the run: tensors, numbers and strings in lists and dicts; rank 0's value is written.
        per_rank: this rank's own state, such as its random generators.
        keep: number of checkpoints to keep.

    Returns:
        The new folder.

    Raises:
        OSError: a rank could not write; earlier checkpoints are intact.
    """
    path = folder / f"step-{step:09d}"
    staging = folder / f".{path.name}.parts"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    ranks = world.all_gather(per_rank)
    error_text = world.broadcast(_make_empty(staging) if world.is_main else None)
    digests = {}
    try:
        if error_text:
            raise OSError(error_text)
        with _no_process_group_warning():
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=staging)
        if world.is_main:
            with replacing(staging / EXTRA) as temporary:
                torch.save({"extra": extra or {}, "own": ranks}, temporary)
        written = [*staging.glob(f"__{world.rank}_*"), *([staging / ".metadata", staging / EXTRA] * world.is_main)]
        digests = {file.name: _digest(file) for file in written}
    except (OSError, RuntimeError, CheckpointException) as error:
        error_text = _first_line(error)
    results = world.all_gather((error_text, digests))
    if world.is_main and not any(text for text, _ in results):
        try:
            _publish(staging, path, {name: digest for _, files in results for name, digest in files.items()})
            for old in checkpoints(folder)[keep:]:
                shutil.rmtree(old)
        except OSError as error:
            results.append((_first_line(error), {}))
    causes = [text for text, _ in world.broadcast(results) if text]
    if causes:
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise OSError(f"cannot write {path}: {causes[0]}; earlier checkpoints are intact")
    return path


def load_sharded(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> tuple[dict, object]:
    """Loads a checkpoint into model and optimiser. Collective; any number of ranks may have written the checkpoint.

    Args:
        path: from `newest_sharded`.
        model: wrapped as for training.
        optimizer: over its parameters.
        world: from `process_group`.

    Returns:
        `extra`, and this rank's `per_rank`; the latter is None if a different number of ranks wrote the checkpoint.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    with _no_process_group_warning():
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    stored = torch.load(path / EXTRA, map_location="cpu", weights_only=True)
    return stored["extra"], stored["own"][world.rank] if len(stored["own"]) == world.world_size else None


def checkpoints(folder: Path) -> list[Path]:
    """The sharded checkpoints in a folder, newest first."""
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def newest_sharded(folder: Path, world: World) -> tuple[Path | None, dict[Path, str]]:
    """Finds the newest checkpoint whose checksums are correct. Collective: each rank checks some of the files.

    Args:
        folder: as for `save_sharded`.
        world: from `process_group`.

    Returns:
        Its path, or None; and for each newer checkpoint one sentence on what is damaged.
    """
    damaged: dict[Path, str] = {}
    for path in world.broadcast(checkpoints(folder)):
        damage = [text for text in world.all_gather(_find_damage(path, world)) if text]
        if not damage:
            return path, damaged
        damaged[path] = damage[0]
    return None, damaged


def full_state(model: nn.Module, optimizer: Optimizer) -> dict:
    """Gathers the state dicts {"model", "optimizer"} of the unwrapped model, in host memory. Collective.

    Parameters have the unwrapped model's names and optimiser state is numbered, as `load_state_dict` expects.

    Returns:
        The complete state on rank 0; {} on other ranks.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": numbered(optimizer_state)} if model_state else {}


def load_full_state(state: dict, model: nn.Module, optimizer: Optimizer) -> None:
    """The inverse of `full_state`: each rank loads its shards of a full state. Collective.

    Args:
        state: {"model", "optimizer"}, complete on every rank; `torch.load(mmap=True)` lets ranks share its memory.
        model: wrapped as for training.
        optimizer: over its parameters.
    """
    names = {id(parameter): name for name, parameter in getattr(model, "module", model).named_parameters()}
    group_names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    order = [name for group in group_names for name in group]
    values = {order[number]: value for number, value in state["optimizer"]["state"].items()}
    groups = zip(state["optimizer"]["param_groups"], group_names, strict=True)
    named: dict[str, Any] = {"state": values, "param_groups": [group | {"params": params} for group, params in groups]}
    options = StateDictOptions(full_state_dict=True)
    model_state = dict(state["model"])  # set_state_dict renames its keys in place
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=named, options=options)


def consolidate(path: Path) -> dict:
    """Converts a sharded checkpoint to the format of `full_state`, in one process and without a model."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with replacing(path / "whole.pt") as temporary:
        dcp_to_torch_save(path, temporary)
    try:
        state = torch.load(path / "whole.pt", map_location="cpu", weights_only=True)
    finally:
        (path / "whole.pt").unlink()
    return {"model": state["model"], "optimizer": numbered(state["optimizer"])}


def numbered(optimizer_state: dict) -> dict:
    """Optimiser state keyed by parameter name (torch.distributed.checkpoint) → keyed by number (`torch.optim`)."""
    numbers: dict[str, int] = {}
    for group in optimizer_state["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    groups = [
        group | {"params": [numbers[name] for name in group["params"]]} for group in optimizer_state["param_groups"]
    ]
    return {
        "state": {numbers[name]: values for name, values in optimizer_state["state"].items()},
        "param_groups": groups,
    }


@contextmanager
def _no_process_group_warning() -> Iterator[None]:
    """Silences PyTorch's warning that there is no process group; with one process none is needed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _make_empty(folder: Path) -> str | None:
    """Creates a folder, removing an old one; returns the cause of a failure, or None."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        return _first_line(error)
    return None


def _publish(staging: Path, path: Path, digests: dict[str, list]) -> None:
    """Writes the manifest, then renames the folder; each step is fsynced before the next."""
    with replacing(staging / MANIFEST) as temporary:
        temporary.write_text(json.dumps(digests))
    shutil.rmtree(path, ignore_errors=True)  # a damaged checkpoint of the same step
    os.replace(staging, path)
    with suppress(PermissionError):  # Windows cannot open a folder
        handle = os.open(path.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _find_damage(path: Path, world: World) -> str | None:
    """Checks this rank's share of a checkpoint's files; returns one sentence about the first damage, or None."""
    try:
        listed = sorted(json.loads((path / MANIFEST).read_text()).items())
        for name, digest in listed[world.rank :: world.world_size]:
            if _digest(path / name) != digest:
                return f"the checksum of {path / name} is wrong"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{path / MANIFEST} cannot be read: {_first_line(error)}"
    return None


def _digest(file: Path) -> list:
    """[size in bytes, SHA-256 in hex]."""
    sha256 = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            sha256.update(block)
        return [content.tell(), sha256.hexdigest()]


def _first_line(error: BaseException) -> str:
    """The first line of an error's message; torch.distributed.checkpoint stores one error per rank."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
