"""Folders of models: for `from_pretrained`, for timm and for transformers, with a model card; and their publication."""

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...checkpoints import locations
from ...checkpoints.locations import REPOSITORY
from ...checkpoints.tensors import WeightsError, variant
from ...files import replacing
from ...preparation import data_config
from ..base import ImageModel
from . import timm_config, transformers_config
from .create import build_pretrained
from .describe import describe
from .load import CHECKPOINT_FORMATS, check_layout, load_model, save_weights
from .pretrained import class_names, find_location

CARD = """\
---
{front}
---

# {title}

{about}

```python
{usage}
```
"""
USAGE = {
    "fastvit_triton": """import fastvit_triton

model = fastvit_triton.create_model("hf-hub:{repo}", pretrained=True).eval()
transform = fastvit_triton.transforms(model)""",
    "timm": """import timm

model = timm.create_model("hf-hub:{repo}", pretrained=True).eval()""",
    "transformers": """from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{repo}")
processor = AutoImageProcessor.from_pretrained("{repo}")""",
}


def from_pretrained(
    kind: type, source: str | os.PathLike, hub: Mapping[str, Any], overrides: Mapping[str, Any]
) -> ImageModel:
    """A model of a class in evaluation mode, see `HubMethods.from_pretrained`."""
    if REPOSITORY.fullmatch(str(source)) and not Path(source).exists():  # a method that reads the Hub by its name
        source = f"hf-hub:{source}"
    location = find_location(source, **hub)
    if not overrides:
        model: ImageModel = load_model(location)[0]
    elif (description := describe(location)) is None:
        raise WeightsError(location.why_missing("config.json, which names the model"))
    else:
        model = build_pretrained(location, description, overrides)
    if not isinstance(model, kind):
        raise WeightsError(f"{location.text} holds a {type(model).__name__}, not a {kind.__name__}; use load_model")
    return model.eval()


def save_pretrained(
    model: ImageModel,
    folder: str | os.PathLike,
    metadata: Mapping[str, str] | None = None,
    layout: str = "fastvit_triton",
    repo: str | None = None,
) -> None:
    """Writes a folder of a model in a layout of `save_weights`.

    Args:
        model: from `create_model`.
        folder: is created; its README.md stays as it is if it has one, as by huggingface_hub's mixin.
        metadata: header of the file from which the model was loaded.
        layout: "fastvit_triton" writes parameters under our names, which are timm's, and a config.json that both read.
        repo: name on the Hub, for the model card.

    Raises:
        WeightsError: the layout does not support the model, or a file cannot be written.
    """
    try:
        folder = Path(folder)
        training = json.loads((metadata or {}).get("training", "{}"))
    except ValueError as error:
        raise WeightsError(
            f"metadata's training is no JSON ({error}); give the header that load_model returns"
        ) from error
    formats = check_layout(model, layout)
    names = training.get("classes") or class_names(model)
    cfg: dict[str, Any] = dict(model.pretrained_cfg) | data_config(model)
    cfg = {key: value for key, value in cfg.items() if not key.startswith(("hf_hub_", "label_"))}
    cfg["crop_mode"] = {"box": "center"}.get(cfg["crop_mode"], cfg["crop_mode"])  # the nearest that others have
    cfg |= {"label_names": list(names)} if names and len(names) == model.num_classes else {}
    files = {"config.json": _config(model, cfg, layout)}
    if layout == "transformers":
        any_model: Any = model
        chosen = formats.choose(any_model, formats.saved[layout])
        files["config.json"], files["preprocessor_config.json"] = transformers_config.write(any_model, chosen.name, cfg)
    title = repo or folder.resolve().name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder / "model.safetensors", layout, dict(metadata or {}))
        for name, content in files.items():
            with replacing(folder / name) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if not (folder / "README.md").exists():  # it may be the user's
            with replacing(folder / "README.md") as temporary:
                temporary.write_text(model_card(model, title, cfg, training, layout), encoding="utf-8")
    except OSError as error:
        raise WeightsError(f"cannot write {folder}: {error.strerror or error}") from error


def _config(model: ImageModel, cfg: dict[str, Any], layout: str) -> dict[str, Any]:
    """The config.json that timm reads; of our own layout, with all options, and for models that timm lacks, too."""
    if layout == "transformers":
        return {}
    ours = {"variant": variant(model), "config": dataclasses.asdict(model.config)}
    state = dict(model.state_dict())
    formats = CHECKPOINT_FORMATS[model.layout]
    try:
        config = timm_config.write(model, cfg)
        written = formats.convert(model, state, "timm") if layout != "timm" and "timm" in formats.saved else state
        if written.keys() != state.keys():
            raise WeightsError("timm stores other tensors")
    except WeightsError:
        if layout == "timm":
            raise
        inside = {key: value for key, value in cfg.items() if key != "label_names"}
        config = {"architecture": variant(model), "num_classes": model.num_classes, "pretrained_cfg": inside}
        config |= {"label_names": cfg["label_names"]} if "label_names" in cfg else {}
    return config if layout == "timm" else {**config, "fastvit_triton": ours}


def model_card(model: ImageModel, title: str, cfg: dict[str, Any], training: dict[str, Any], layout: str) -> str:
    """A model card in markdown with the Hub's metadata: the model, its images and, if known, data and accuracy.

    Args:
        model: the model.
        title: its name on the Hub.
        cfg: its configuration.
        training: entry of the file's header that `train` writes; {} if it has none.
        layout: as for `save_pretrained`.
    """
    task = "image-classification" if model.num_classes else "image-feature-extraction"
    front = [f"library_name: {layout}", f"pipeline_tag: {task}", "tags:", f"- {task}", "- vision-transformer"]
    if not training and cfg.get("license"):
        front.append(f"license: {cfg['license']}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    channels, height, width = cfg["input_size"]
    rows = {"Architecture": variant(model), "Parameters": f"{parameters:,}", "Classes": model.num_classes or None}
    rows |= {"Image": f"{channels} x {height} x {width}", "Mean": cfg["mean"], "Standard deviation": cfg["std"]}
    rows |= {"Resampling": f"{cfg['interpolation']}, {cfg['crop_mode']} crop of {cfg['crop_pct']:.4g}"}
    rows |= {"Pretrained weights": cfg.get("tag"), "Trained on": training.get("data") and Path(training["data"]).name}
    rows |= {"Recipe": training.get("recipe"), "Batch size": training.get("batch_size")}
    if training.get("test_accuracy") is not None:
        rows["Test accuracy"] = f"{100 * training['test_accuracy']:.2f} %"
    lines = [f"- {name}: {_words(value)}" for name, value in rows.items() if value is not None]
    usage = USAGE[layout].format(repo=title)
    return CARD.format(front="\n".join(front), title=title, about="\n".join(lines), usage=usage)


def _words(value: Any) -> str:
    return ", ".join(f"{item:.4g}" for item in value) if isinstance(value, (tuple, list)) else str(value)


def push_to_hub(
    model: ImageModel,
    repo_id: str,
    metadata: Mapping[str, str] | None,
    token: str | None,
    private: bool | None,
    commit: Mapping[str, Any],
) -> str:
    """Publishes a model, see `HubMethods.push_to_hub`; `commit` holds options of `HfApi.upload_folder`."""
    client = locations.hub_client()
    errors: Any = importlib.import_module("huggingface_hub.errors")
    api = client.HfApi(token=token, library_name="fastvit_triton")
    with TemporaryDirectory() as folder:
        try:
            repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name
            save_pretrained(model, folder, metadata, repo=repository)
            return str(api.upload_folder(repo_id=repository, folder_path=folder, **commit))
        except errors.HFValidationError as error:
            raise WeightsError(f"repo_id is {repo_id!r}; use 'org/name', or 'name' for your own") from error
        except (*errors.HfHubHTTPError.__bases__, OSError) as error:
            login = "check the name, and set HF_TOKEN to a token that may write, or run hf auth login"
            raise WeightsError(f"{repo_id} was not published: {locations.reason(error)}; {login}") from error
