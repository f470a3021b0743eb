"""Checkpoints in and out: ours, timm's, transformers', torchvision's, the official PyTorch ones and JAX `.npz`.

Files are safetensors, `torch.save` files opened with `weights_only=True`, and `.npz` without pickles: none of them can
run code. A model is changed only after the whole checkpoint has been read, translated and found to fit.
"""

import argparse
import dataclasses
import json
import os
import pickle
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..files import replacing
from ..layers.embed import INTERPOLATION
from ..models import create_model
from . import adapt, vit
from .adapt import State, WeightsError, some, variant
from .layouts import LAYOUTS, TIMM, TRANSFORMERS, Layout

WRAPPERS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model")  # averaged weights first, as in timm
IRRELEVANT = re.compile(  # other parts of larger models, and training state
    r"(^|\.)(mask_token|position_ids|pooler|decoder\w*|text_model|text_projection|logit_scale|logit_bias|txt"
    r"|dino_head|ibot_head|student|opt)(\.|$)|(^|\.)[tb]$"
)
DAMAGE = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
DAMAGE += (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, struct.error)
DAMAGE += (SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError)


class Spelling(NamedTuple):
    """How the weights of an architecture are spelled elsewhere.

    Attributes:
        layouts: those that are read, in the order in which their marks are looked for.
        fit: makes translated tensors fit a model, see `vit.fit`.
        saved: those that are written, by name; the first that has a class for the model.
        write: a model's tensors under the names of one of these layouts, see `vit.write`.
    """

    layouts: tuple[Layout, ...]
    fit: Callable[..., tuple[list[str], str]]
    saved: dict[str, tuple[Layout, ...]]
    write: Callable[..., State]


SPELLINGS = {"vit": Spelling(LAYOUTS, vit.fit, {"timm": (TIMM,), "transformers": TRANSFORMERS}, vit.write)}


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
        family: whose checkpoint it was, and the entry of the file it was found under.
        tensors: how many tensors of the model were filled from it.
        positions: what happened to the position table; empty when it was taken as it was.
        reinitialised: head tensors that were set to zero.
        dropped: keys of the checkpoint that the model has no use for.
    """

    family: str
    tensors: int
    positions: str = ""
    reinitialised: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        zeroed, dropped = ", ".join(self.reinitialised), some(self.dropped)
        rows = {"positions": self.positions, "set to zero, to be trained": zeroed, "dropped": dropped}
        lines = [f"{title}: {what}" for title, what in rows.items() if what]
        return "\n".join([f"{self.tensors} tensors from a {self.family} checkpoint", *lines])


def load_weights(model: nn.Module, source: str | os.PathLike | Mapping, *, resize: str | None = None) -> LoadReport:
    """Copies a checkpoint into a model, whoever wrote it; dtype, device and `requires_grad` of the model stay.

    Positions are interpolated to the model's grid in the way of the checkpoint's family. The head is set to zero when
    the checkpoint has none or one for another number of classes (ViT, arXiv:2010.11929, section 3.2).

    Args:
        model: a model from `create_model`.
        source: a `.safetensors`, `.pt`, `.pth`, `.bin` or `.npz` file, a folder with `model.safetensors`, or a
            state dict.
        resize: interpolation in place of the family's own; a mode of `resize_pos_embed`.

    Returns:
        What was recognised, resized, zeroed and dropped; print it.

    Raises:
        WeightsError: the file is missing, damaged, or a pickle that wants to run code; the checkpoint is of no known
            family, of another architecture or of other shapes. The model is then as it was.
    """
    return _load(model, *_read(source), resize)


def load_model(path: str | os.PathLike) -> tuple[nn.Module, dict[str, str]]:
    """Rebuilds a model from what `save_weights` wrote.

    Args:
        path: the file, or a folder that holds `model.safetensors`.

    Returns:
        The model in float32 and training mode on the CPU, and the file's metadata.

    Raises:
        WeightsError: as for `load_weights`, or the file does not say which model it belongs to.
    """
    tensors, metadata = _read(path)
    if not {"variant", "config"} <= metadata.keys():
        raise WeightsError(
            f"{path} does not say which model it holds, so save_weights did not write it; "
            "use create_model(name) and load_weights(model, path)"
        )
    try:
        model = create_model(metadata["variant"], **json.loads(metadata["config"]))
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{path} holds a model that this version cannot build: {error}") from error
    _load(model, tensors, metadata, None)
    return model, metadata


def save_weights(
    model: nn.Module,
    path: str | os.PathLike,
    layout: str = "fastvit_triton",
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a model as safetensors; the file appears whole or not at all.

    For transformers these are the names that its class for such a model loads strictly: the classification class
    (CLIP's with projection) when the model has a head, otherwise the base class without pooler. That class needs a
    config with the same activation and epsilon.

    Args:
        model: a model from `create_model`.
        path: where to; ends in `.safetensors`.
        layout: "fastvit_triton", "timm" or "transformers".
        metadata: more entries for the header, beside format, layout, variant and config.

    Raises:
        WeightsError: the layout is unknown or has no place for this model, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"weights are saved as safetensors; name the file {path.with_suffix('.safetensors').name}")
    spelling = _spelling(model)
    if layout not in ("fastvit_triton", *spelling.saved):
        raise WeightsError(f"layout is {layout!r}; use one of {', '.join(('fastvit_triton', *spelling.saved))}")
    state = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    if layout != "fastvit_triton":
        state = spelling.write(model, state, spelling.saved[layout])
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    config = json.dumps(dataclasses.asdict(model.config))
    header = {**(metadata or {}), "format": "pt", "layout": layout, "variant": variant(model), "config": config}
    try:
        with replacing(path) as temporary:
            save_file(state, temporary, header)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def _read(source: str | os.PathLike | Mapping) -> tuple[Mapping, dict[str, str]]:
    """What the file holds, and its metadata."""
    if isinstance(source, Mapping):
        return source, {}
    path = Path(source)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise WeightsError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
        if path.suffix == ".npz":
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}, {}
        if path.suffix in (".pt", ".pth", ".bin"):
            with torch.serialization.safe_globals([argparse.Namespace]):  # training scripts keep their arguments so
                return torch.load(path, map_location="cpu", weights_only=True), {}
    except DAMAGE as error:
        if wanted := re.search(r"GLOBAL (\S+)|(Object arrays)|(pickled data)", str(error)):
            name = wanted[1] or "a pickled object"
            raise WeightsError(
                f"{path} was refused: it is a pickle that wants to run code ({name}); "
                "ask for a safetensors file, or save only model.state_dict() where it comes from"
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WeightsError(f"{path} is damaged, cut short or no {path.suffix} file: {reason}") from error
    raise WeightsError(f"{path} is no checkpoint: expected .safetensors, .pt, .pth, .bin or .npz")


def _load(model: nn.Module, held: Mapping, metadata: Mapping[str, str], resize: str | None) -> LoadReport:
    """Unwrap, translate, adapt, check, and only then copy."""
    if resize is not None and resize not in INTERPOLATION:
        raise WeightsError(f"resize is {resize!r}; use one of {', '.join(INTERPOLATION)}")
    spelling = _spelling(model)
    found, wrapper = _unwrap(held)
    layout, state, spelled = _translate(found, spelling.layouts)
    family, mode = layout.name, layout.resize
    if metadata.get("layout") == "fastvit_triton":
        family, mode = "fastvit_triton", model.position_resize
    target = model.state_dict()
    dropped = [key for key in state if IRRELEVANT.search(key)]
    state = {key: tensor for key, tensor in state.items() if key not in dropped}
    dropped += adapt.fit_head(model.head_names, target, state)
    useless, positions = spelling.fit(model, target, state, metadata, resize or mode)
    dropped += useless
    heads = tuple(f"{name}." for name in model.head_names)
    reinitialised = tuple(key for key in target if key.startswith(heads) and key not in state)
    state |= {key: torch.zeros_like(target[key]) for key in reinitialised}
    adapt.check(model, target, state, spelled, family)
    with torch.no_grad():
        for key, tensor in target.items():
            tensor.copy_(state[key])
    dropped = tuple(spelled.get(key, key) for key in dropped)
    return LoadReport(family + wrapper, len(target) - len(reinitialised), positions, reinitialised, dropped)


def _unwrap(held: Mapping) -> tuple[State, str]:
    """The tensors, and where they were found."""
    path = ""
    for _ in range(4):
        if inner := next((w for w in WRAPPERS if isinstance(held, Mapping) and isinstance(held.get(w), Mapping)), None):
            held, path = held[inner], f" ({inner})"
    if not isinstance(held, Mapping):
        raise WeightsError(f"the checkpoint holds a {type(held).__name__}; expected a state dict of named tensors")
    arrays = {str(key): _tensor(value) if isinstance(value, np.ndarray) else value for key, value in held.items()}
    return {key: value.detach() for key, value in arrays.items() if isinstance(value, Tensor)}, path


def _tensor(array: np.ndarray) -> Tensor | None:
    """An array as a tensor; numpy knows no bfloat16 and keeps its two bytes as raw data. None for what is no number."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)) if array.dtype.kind == "f" else None


def _spelling(model: nn.Module) -> Spelling:
    if getattr(model, "layout", None) not in SPELLINGS:
        raise WeightsError(f"model is {type(model).__name__}; give a model from create_model")
    return SPELLINGS[model.layout]


def _recognise(keys: Collection[str], layouts: tuple[Layout, ...]) -> tuple[Layout, str] | None:
    """The first layout whose mark is among the keys, and the prefix before it; a teacher's before a student's."""
    for layout in layouts:
        prefixes = [key.removesuffix(layout.mark) for key in keys if f".{key}".endswith(f".{layout.mark}")]
        if prefixes := [prefix for prefix in prefixes if not layout.beside or prefix + layout.beside in keys]:
            return layout, min(prefixes, key=lambda prefix: ("teacher" not in prefix, len(prefix)))
    return None


def _translate(found: State, layouts: tuple[Layout, ...]) -> tuple[Layout, State, dict[str, str]]:
    """The layout, the tensors under our names, and our names → the checkpoint's own spelling."""
    dotted = {key.replace("/", "."): key for key in found}
    if (match := _recognise(dotted, layouts)) is None:
        raise WeightsError(
            f"this is no checkpoint of a plain ViT: its keys ({some(tuple(found)) or 'none'}) belong to no known "
            f"layout; known are {', '.join(layout.name for layout in layouts)}"
        )
    layout, prefix = match
    state = {key.removeprefix(prefix): found[spelling] for key, spelling in dotted.items()}
    leaf = re.compile(r"\b(kernel|scale)$")  # JAX's words for weight
    spelled = {leaf.sub("weight", layout.ours(key.removeprefix(prefix))): spelling for key, spelling in dotted.items()}
    try:
        state = {layout.ours(key): tensor for key, tensor in layout.read(state).items()}
        state = adapt.join(adapt.split(state, "attn_pool.qkv"), "attn.qkv", "attn_pool.kv", "mlp.fc1", "mlp.fc2")
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(f"this {layout.name} checkpoint has tensors of unusual shape: {error}") from error
    for key in (*adapt.TOKENS, "pos_embed"):
        if key in state:
            state[key] = state[key].reshape((1,) * (3 - state[key].dim()) + state[key].shape)
    return layout, state, spelled
