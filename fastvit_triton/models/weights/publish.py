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
from .card import model_card
from .create import build_pretrained
from .describe import describe
from .load import CHECKPOINT_FORMATS, check_layout, load_model, save_weights
from .pretrained import class_names, find_location

LOGIN = "set HF_TOKEN to a token that may write, or run hf auth login"
REFUSALS = {  # by HTTP status
    401: f"the Hub does not know the token; {LOGIN}",
    403: f"the token may not write there; use a name of your own, or {LOGIN}",
    404: "the Hub has no such user, organisation, repository or branch; check the name",
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
    license: str | None = None,
) -> None:
    """Writes a folder of a model in a layout of `save_weights`."""
    folder = Path(folder)
    training = _training(metadata)
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
                card = model_card(model, title, cfg, training, layout, license, repo)
                temporary.write_text(card, encoding="utf-8")
    except OSError as error:
        raise WeightsError(f"cannot write {folder}: {error.strerror or error}") from error


def _training(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The entry of a file's header that `train` wrote; {} if it has none."""
    try:
        return json.loads((metadata or {}).get("training", "{}"))
    except ValueError as error:
        raise WeightsError(
            f"metadata's training is no JSON ({error}); give the header that load_model returns"
        ) from error


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


def push_to_hub(
    model: ImageModel,
    repo_id: str,
    metadata: Mapping[str, str] | None,
    token: str | None,
    private: bool | None,
    license: str | None,
    commit: Mapping[str, Any],
) -> str:
    """Publishes a model, see `HubMethods.push_to_hub`; `commit` holds options of `HfApi.upload_folder`."""
    client = locations.hub_client()
    errors: Any = importlib.import_module("huggingface_hub.errors")
    api = client.HfApi(token=token, library_name="fastvit_triton")
    with TemporaryDirectory() as folder:
        try:
            client.utils.validate_repo_id(repo_id)
            if token is None and client.get_token() is None:
                raise WeightsError(f"{repo_id} was not published: there is no token; {LOGIN}")
            repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name
            save_pretrained(model, folder, _without_paths(metadata), repo=repository, license=license)
            return str(api.upload_folder(repo_id=repository, folder_path=folder, **commit))
        except errors.HFValidationError as error:
            raise WeightsError(f"repo_id is {repo_id!r}; use 'org/name', or 'name' for your own") from error
        except (*errors.HfHubHTTPError.__bases__, OSError) as error:
            status: Any = getattr(getattr(error, "response", None), "status_code", None)
            refused = REFUSALS.get(status, f"{locations.reason(error)}; try again")
            raise WeightsError(f"{repo_id} was not published: {refused}") from error


def _without_paths(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The header of a file, whose training data and first weights are named without their folders on this machine."""
    training = _training(metadata)
    for key in {"data", "weights"} & training.keys():
        path = str(training[key]).removeprefix("hf:").removeprefix("local-dir:")
        training[key] = Path(path).name if Path(path).is_absolute() else training[key]
    return {**(metadata or {}), **({"training": json.dumps(training)} if training else {})}
