"""Loads and saves checkpoints: ours, timm's, transformers', torchvision's, the official PyTorch ones and JAX `.npz`.

Files are safetensors, `torch.save` files opened with `weights_only=True`, TorchScript files, of which only the tensors
are read, and `.npz` without pickles: none of them can run code. A model is changed only after the whole checkpoint has
been read, converted and checked.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ...checkpoints.reading import CHECKSUM, checksum, is_finite, read, unwrap, why_unusable
from ...checkpoints.renaming import CheckpointFormats, Layout, give_trunk, take_trunk
from ...checkpoints.tensors import (
    TOKENS,
    State,
    WeightsError,
    check,
    fill_counts,
    fit_head,
    join,
    some,
    split,
    variant,
)
from ...checkpoints.writing import write_tensors
from ...files import replacing
from ...layers.embed import INTERPOLATION
from ...preparation import bare
from .. import plain
from ..catalogue import FAMILIES
from ..features import FeatureGetterNet
from ..transformer import VisionTransformer
from .describe import describe, from_metadata, with_size
from .pretrained import find_location
from .rebuild import build_model

CHECKPOINT_FORMATS: dict[str, CheckpointFormats] = {"vit": plain.CHECKPOINTS}
CHECKPOINT_FORMATS |= {family.MODEL.layout: family.CHECKPOINTS for family in FAMILIES if hasattr(family, "CHECKPOINTS")}


@dataclass(frozen=True)
class LoadReport:
    """Report of `load_weights`.

    Attributes:
        family: layout of the checkpoint, and the entry of the file that contained it.
        tensors: number of the model's tensors that were loaded.
        positions: changes to the position table, and a grid that was assumed; empty if there were none.
        reinitialised: head tensors that were set to zero.
        dropped: unused keys of the checkpoint.
        initial: head tensors that keep their initial values.
    """

    family: str
    tensors: int
    positions: str = ""
    reinitialised: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()

    def __str__(self) -> str:
        zeroed = ", ".join(self.reinitialised)
        dropped = some(self.dropped)
        rows = {"positions": self.positions, "initialised to zero, must be trained": zeroed, "dropped": dropped}
        rows["initial values, must be trained"] = some(self.initial)
        lines = [f"{title}: {what}" for title, what in rows.items() if what]
        return "\n".join([f"{self.tensors} tensors from a {self.family} checkpoint", *lines])


def load_weights(
    model: nn.Module, source: str | os.PathLike | Mapping, *, resize: str | None = None, verify: bool = True
) -> LoadReport:
    """Copies a checkpoint of any supported library into a model; keeps the model's dtype, device and `requires_grad`.

    Positions are interpolated to the model's grid as in the checkpoint's library, from the grid that the file or a
    config.json beside it states. The head is set to zero if the
    checkpoint has none or one for a different number of classes (ViT, arXiv:2010.11929, section 3.2), or keeps its
    initial values if the model's `zero_missing_heads` is False.

    Args:
        model: a model from `create_model`, also in torch.compile or DataParallel; one with `features_only=True` takes
            what its backbone kept.
        source: a file of safetensors, torch.save, torch.jit.save or NumPy, whatever its suffix; a state dict; or
            another source of `load_model`.
        resize: interpolation mode of `resize_pos_embed`; None uses that of the checkpoint's library.
        verify: compare the checksums of the file, require finite values, and refuse files whose contents are out of
            proportion.

    Returns:
        A printable report: the layout, and tensors that were resized, zeroed or dropped.

    Raises:
        WeightsError: the file is missing, damaged, or names classes whose code would run; the checkpoint has an unknown
            layout, a different architecture or different shapes, or values that are not finite. The model is then
            unchanged.
    """
    if isinstance(source, Mapping):
        return _load(model, source, {}, resize, verify)
    location = find_location(source)
    tensors, metadata = read(location.weights(), verify)
    description = None
    with suppress(WeightsError):  # the weights may fit, whatever a config.json beside them says
        description = describe(location)
    loaded = _load(model, tensors, with_size(metadata, description), resize, verify)
    backbone: Any = _backbone(model)
    # a file may lie beside the description of another model
    if description is not None and (location.file is None or description.name == variant(backbone)):
        backbone.pretrained_cfg = description.pretrained_cfg
    return loaded


def load_model(
    source: str | os.PathLike, *, verify: bool = True, hub: Mapping[str, Any] | None = None
) -> tuple[VisionTransformer, dict[str, str]]:
    """Rebuilds a model from a checkpoint that says which model it holds.

    Args:
        source: a file of `save_weights`; a folder, also as "local-dir:PATH", with such a file, or with weights and the
            config.json of timm or transformers; "hf-hub:org/name" or "timm/name" on the Hub, with "@revision" if
            wanted; or a name with a tag, which `list_models(pretrained=True)` lists.
        verify: as for `load_weights`.
        hub: options of `huggingface_hub.hf_hub_download`, such as token and cache_dir.

    Returns:
        The model in float32 and training mode on the CPU, and the file's metadata.

    Raises:
        WeightsError: as for `load_weights`, or nothing names the model, or the tensors do not fit it.
    """
    location = find_location(source, **(hub or {}))
    described = describe(location)  # before the weights are downloaded
    tensors, metadata = read(location.weights(), verify)
    try:
        if (description := from_metadata(metadata) or described) is not None:
            model = build_model(unwrap(tensors)[0], description.name, description.options, metadata.get("layout"))
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        raise WeightsError(f"{location.text} holds a model that this version cannot build: {reason}") from error
    if description is None and "origin" in metadata:
        commands = "fastvit-triton predict, evaluate, explain and export load it"
        raise WeightsError(
            f"{location.text} holds a model of another package, under that package's own names; {commands}"
        )
    if description is None:
        convert = f"fastvit-triton convert {location.text} new.safetensors --to fastvit_triton --model NAME"
        raise WeightsError(
            f"{location.text} does not say which model it holds: save_weights did not write it, and no config.json is "
            f"beside it; {convert} writes a file that does; create_model(NAME, checkpoint_path=…) and "
            "fastvit-triton train --weights take this one"
        )
    loaded = _load(model, tensors, with_size(metadata, description), None, verify)
    if missing := loaded.reinitialised or loaded.initial:
        raise WeightsError(f"{location.text} has no {missing[0]}, which its configuration needs")
    model.pretrained_cfg = description.pretrained_cfg
    return model, metadata


def save_weights(
    model: nn.Module,
    path: str | os.PathLike,
    layout: str = "fastvit_triton",
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a model as safetensors, atomically.

    With layout "transformers", names and shapes match strictly a transformers class: the classification class (CLIP's
    with projection) if the model has a head, otherwise the base class without pooler. Its config must have the same
    activation and epsilon.

    Args:
        model: a model from `create_model`; of one with `features_only=True` the backbone, its `model`, is written.
        path: file to write; ends in `.safetensors`.
        layout: "fastvit_triton", "timm" or "transformers"; for CLIP's towers also "open_clip", with the names in the
            whole models of open_clip and OpenAI, "visual.…", or "open_clip_visual", with those in their `model.visual`;
            where timm has the model also "open_clip_trunk": those of a tower of timm in open_clip, "visual.trunk.…".
        metadata: header entries in addition to format, layout, variant and config.

    Raises:
        WeightsError: the layout is unknown or does not support this model, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"weights are saved as safetensors; name the file {path.with_suffix('.safetensors').name}")
    if not path.parent.is_dir():
        raise WeightsError(f"{path} is in a folder that does not exist; create {path.parent} first")
    ours: Any = _backbone(model)  # as `check_layout` checks
    formats = check_layout(ours, layout)
    state = {key: tensor.detach().cpu() for key, tensor in ours.state_dict().items()}
    if layout == "open_clip_trunk":
        state = give_trunk(formats.convert(ours, state, "timm"), ours.head_names)
    elif layout != "fastvit_triton":
        state = formats.convert(ours, state, layout)
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    config = json.dumps(dataclasses.asdict(ours.config))
    facts = {"pretrained_cfg": json.dumps(dict(ours.pretrained_cfg))} if ours.pretrained_cfg else {}
    header = {**(metadata or {}), **facts, "format": "pt", "layout": layout}
    header |= {"variant": variant(ours), "config": config}
    header[CHECKSUM] = checksum(state, header)
    try:
        with replacing(path) as temporary:
            write_tensors(state, temporary, header)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def _load(model: Any, checkpoint: Mapping, metadata: Mapping[str, str], resize: str | None, verify: bool) -> LoadReport:
    """Unwraps, renames, adapts and checks the tensors before it copies them into the model."""
    if resize is not None and resize not in INTERPOLATION:
        raise WeightsError(f"resize is {resize!r}; use one of {', '.join(INTERPOLATION)}")
    model = _backbone(model)
    formats = _formats(model)
    tensors, wrapper = unwrap(checkpoint)
    tensors, beside = take_trunk(tensors, model.head_names)
    layout, state, original_keys, outside = _translate(tensors, formats)
    family, mode = layout.name, layout.resize
    if metadata.get("layout") == "fastvit_triton":
        family, mode = "fastvit_triton", model.position_resize
    target = model.state_dict()
    dropped = [key for key in state if formats.irrelevant.search(key) or key in model.pruned]
    state = {key: tensor for key, tensor in state.items() if key not in dropped}
    fill_counts(target, state)
    dropped += fit_head(model.head_names, target, state)
    useless, positions = formats.fit(model, target, state, metadata, resize or mode)
    useless += [key for key in outside if key in state and key not in target]
    dropped += useless
    state = {key: tensor for key, tensor in state.items() if key not in useless}
    heads = tuple(f"{name}." for name in model.head_names)
    new = tuple(key for key in target if key.startswith(heads) and key not in state)
    zeroed = model.zero_missing_heads
    state |= {key: torch.zeros_like(target[key]) if zeroed else target[key].clone() for key in new}
    check(model, target, state, original_keys, family)
    wrong = next((key for key in target if verify and not is_finite(state[key])), None)
    if wrong is not None:
        name = original_keys.get(wrong, wrong)
        raise WeightsError(f"the checkpoint's {name} has non-finite values; verify=False loads it anyway")
    with torch.no_grad():
        for key, tensor in target.items():
            tensor.copy_(state[key])
    unused = (*(original_keys.get(key, key) for key in dropped), *beside)
    loaded = len(target) - len(new)
    return LoadReport(family + wrapper, loaded, positions, new if zeroed else (), unused, () if zeroed else new)


def _backbone(model: nn.Module) -> nn.Module:
    """The model inside wrappers and a feature extractor, or the model itself."""
    model = bare(model)
    return model.model if isinstance(model, FeatureGetterNet) else model


def _formats(model: Any) -> CheckpointFormats:
    if getattr(model, "layout", None) not in CHECKPOINT_FORMATS:
        raise WeightsError(f"model is {type(model).__name__}; give a model from create_model")
    return CHECKPOINT_FORMATS[model.layout]


def check_layout(model: Any, layout: str) -> CheckpointFormats:
    """The layouts of a model's architecture; raises WeightsError if it cannot be written in this one."""
    formats = _formats(model)
    layouts = ("fastvit_triton", *formats.saved, *(("open_clip_trunk",) if "timm" in formats.saved else ()))
    if layout not in layouts:
        names = ", ".join(layouts)
        raise WeightsError(f"layout is {layout!r}; for {formats.name} use one of {names}")
    return formats


def _recognise(keys: Collection[str], layouts: tuple[Layout, ...]) -> tuple[Layout, str] | None:
    """The first layout whose mark is in the keys, and the mark's prefix; prefers a prefix that contains "teacher"."""
    for layout in layouts:
        prefixes = [key.removesuffix(layout.mark) for key in keys if f".{key}".endswith(f".{layout.mark}")]
        if prefixes := [prefix for prefix in prefixes if not layout.beside or prefix + layout.beside in keys]:
            return layout, min(prefixes, key=lambda prefix: ("teacher" not in prefix, len(prefix)))
    return None


def _translate(tensors: State, formats: CheckpointFormats) -> tuple[Layout, State, dict[str, str], list[str]]:
    """The layout, the tensors under our names, a map from our names to the checkpoint's keys, and our names of those
    outside the model's prefix: its head, or what belongs to the loss, an average or a profiler.
    """
    dotted = {key.replace("/", "."): key for key in tensors}
    if (match := _recognise(dotted, formats.layouts)) is None:
        held = f"this is not a checkpoint of {formats.name}: its keys ({some(tuple(tensors)) or 'none'})"
        if like := tuple(other.name for other in CHECKPOINT_FORMATS.values() if _recognise(dotted, other.layouts)):
            advice = "create the model of the checkpoint, in a command by --model"
            raise WeightsError(f"{held} are like those of {some(like)}; {advice}")
        known = ", ".join(layout.name for layout in formats.layouts)
        raise WeightsError(f"{held} match no known layout; known are {known}")
    layout, prefix = match
    if layout.alone and prefix:  # what has no prefix would take the places of what has one
        dotted = {key if key.startswith(prefix) else f"text_model.{key}": spelt for key, spelt in dotted.items()}
    for key, tensor in tensors.items():
        if (why := why_unusable(tensor)) is not None:
            raise WeightsError(f"the checkpoint's {key} {why}; save it as a dense tensor of numbers")
    outside = {original for key, original in dotted.items() if not key.startswith(prefix)}
    dotted = {key: dotted[key] for key in sorted(dotted, key=lambda key: key.startswith(prefix))}  # what is inside wins
    state = {key.removeprefix(prefix): tensors[original] for key, original in dotted.items()}
    leaf = re.compile(r"\b(kernel|scale)$")  # JAX's names for weight
    original_keys = {
        leaf.sub("weight", layout.ours(key.removeprefix(prefix))): original for key, original in dotted.items()
    }
    try:
        state = {layout.ours(key): tensor for key, tensor in layout.read(state).items()}
        state = join(split(state, "attn_pool.qkv"), "attn.qkv", "attn.kv", "attn_pool.kv", "mlp.fc1", "mlp.fc2")
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(f"this {layout.name} checkpoint has tensors of unusual shape: {error}") from error
    for key in (*TOKENS, "pos_embed"):
        if key in state:
            state[key] = state[key].reshape((1,) * (3 - state[key].dim()) + state[key].shape)
    return layout, state, original_keys, [key for key, original in original_keys.items() if original in outside]
