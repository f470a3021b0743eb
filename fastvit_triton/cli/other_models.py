"""Classifiers of timm and transformers for `train`, `evaluate` and `predict`, built by their package and converted.

A name is `timm:NAME`, or `hf:FOLDER` or `hf:NAME` of transformers. Weights are saved under the names in the package's
modules, whose `load_state_dict` takes them. The header of the file says which package builds the model, with which
options.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoints.locations import Location
from ..checkpoints.reading import CHECKSUM, checksum, header_of, read
from ..checkpoints.tensors import WeightsError
from ..checkpoints.writing import write_tensors
from ..files import replacing
from ..train.data.transform import Transform
from ..train.drop_path import set_drop_path
from ..train.frozen import heads
from .console import print_warning
from .model_by_name import PACKAGES, check_name, check_other, is_other, package, parse_name, read_config
from .tasks.classify import Classify
from .tasks.task import prepared

if TYPE_CHECKING:
    from ..train.recipes import Recipe

NEEDED = ("num_classes", "in_chans", "img_size")  # options of every model
ORIGIN = "origin"  # entry of the header of a file of weights


class ImageClassifier(nn.Module):
    """A classifier of transformers as a function of images [B, C, H, W] to logits [B, K]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        return self.model(pixel_values=images).logits

    def get_classifier(self) -> list[nn.Module]:
        """The head, as in timm."""
        return heads(self.model)


def _inner(model: Any) -> Any:
    """The module of the package."""
    return model.model if isinstance(model, ImageClassifier) else model


def check_run(settings: dict, recipe: "Recipe") -> None:
    """Raises ValueError if the model cannot be trained by this recipe, or its package is not installed."""
    name = recipe.model
    check_other("--model", name)
    if recipe.loss not in Classify.labelled:
        raise ValueError(f"{name} is trained as a classifier, and not by loss {recipe.loss!r}; pass another --recipe")
    if recipe.mixtoken:
        raise ValueError(f"--mixtoken is for models of this package, not for {name}; use --mixup or --cutmix")
    if settings["teacher"]:
        raise ValueError(f"--teacher needs a model of this package with a distillation token, not {name}")
    if is_other(settings["weights"]) and settings["weights"] != name:
        raise ValueError(f"--weights {settings['weights']} are not those of --model {name}; leave one of them out")


def start_of(source: str) -> tuple[str, dict[str, Any], tuple[int, int], dict[str, Any]] | None:
    """Name and options of the model, size of images and preprocessing with timm's keys, which a new run takes over
    from weights; None if they are not those of another package.
    """
    from ..models.weights.pretrained import find_location

    if is_other(source):
        preprocessing = _preprocessing(source)
        return source, {}, tuple(preprocessing["input_size"][1:]), preprocessing
    if (recorded := origin_of(find_location(source))) is None:
        return None
    origin, header = recorded
    transform = Transform(**json.loads(header["training"])["transform"])
    options = {key: value for key, value in origin["options"].items() if key not in (*NEEDED, "drop_path_rate")}
    return origin["model"], options, transform.size, prepared(transform)


def _preprocessing(name: str) -> dict[str, Any]:
    """How images are prepared for pretrained weights, with timm's keys."""
    kind, rest = parse_name(name)
    if kind == "timm":
        return package("timm").models.get_pretrained_cfg(rest).to_dict()
    processor = _call(name, package("transformers").AutoImageProcessor.from_pretrained, rest).to_dict()
    size = processor.get("size") or {}
    side = size.get("height") or size.get("shortest_edge") or 224
    preprocessing = dict(mean=processor.get("image_mean"), std=processor.get("image_std"), input_size=(3, side, side))
    return {key: value for key, value in preprocessing.items() if value}


def build_other(
    recipe: "Recipe", classes: Sequence[str], channels: int, weights: str | None, checkpointing: bool
) -> Any:
    """The model of a run, on the CPU, with fused forwards where its modules are known."""
    name = recipe.model
    kind, rest = parse_name(name)
    options: dict[str, Any] = {"num_classes": len(classes), "in_chans": channels, "img_size": recipe.img_size}
    options |= recipe.options
    if recipe.drop_path_rate:
        options["drop_path_rate"] = recipe.drop_path_rate
    config = None
    if kind == "hf":
        config = _configured(name, rest, list(classes), options)
        options = {key: options[key] for key in NEEDED}
    origin = {"model": name, "version": package(PACKAGES[kind]).__version__}
    origin |= {"options": options} | ({} if config is None else {"config": json.loads(config.to_json_string(False))})
    model = _construct(origin, config, pretrained=weights == name)
    if weights is not None and not is_other(weights):
        _load_backbone(model, weights)
    if weights is None and recipe.head_bias:
        for head in heads(model):
            nn.init.constant_(head.get_parameter("bias"), recipe.head_bias)
    if recipe.drop_path_rate and recipe.drop_path_constant:
        set_drop_path(model, recipe.drop_path_rate, True)
    if checkpointing:
        enable = "gradient_checkpointing_enable" if kind == "hf" else "set_grad_checkpointing"
        if not hasattr(_inner(model), enable):
            raise ValueError(f"{name} has no --grad-checkpointing; leave it out")
        _call(name, getattr(_inner(model), enable))
    return _ready(model, origin)


def save_other(model: Any, path: Path, metadata: Mapping[str, str]) -> None:
    """Writes the weights under the package's own names as safetensors, atomically."""
    state = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in _inner(model).state_dict().items()}
    header = {**metadata, ORIGIN: json.dumps(model.origin), "format": "pt"}
    header[CHECKSUM] = checksum(state, header)
    with replacing(path) as temporary:
        write_tensors(state, temporary, header)


def origin_of(location: Location) -> tuple[dict[str, Any], dict[str, str]] | None:
    """What `save_other` wrote of the model's origin, and the whole header; None for other files."""
    header = header_of(location)
    try:
        origin = json.loads(header.get(ORIGIN, "null"))
    except (ValueError, RecursionError):
        return None
    return (origin, header) if isinstance(origin, dict) else None


def load_other(location: Location, origin: dict[str, Any]) -> Any:
    """The model of a run, with its weights, in float32 on the CPU."""
    name = str(origin.get("model"))
    options = origin.get("options")
    complete = isinstance(options, dict) and all(isinstance(options.get(key), int) for key in NEEDED)
    if not is_other(name) or not complete:
        raise WeightsError(f"{location.text} has a header that train did not write: it names the model {name}")
    config: Any = None
    if name.startswith("hf:"):
        try:
            entries: Any = origin.get("config")
            config = package("transformers").CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"the configuration of {name} is not one that transformers knows here") from error
        _check_classifier(name, config)
    else:
        check_name("the checkpoint's model", name)  # its name may not lead to the Hub
    model = _construct(origin, config, pretrained=False)
    state, _ = read(location.weights(), True)
    try:
        _inner(model).load_state_dict(state)
    except RuntimeError as error:
        library = PACKAGES[parse_name(name)[0]]
        text = f"it was written with {library} {origin.get('version')}"
        raise WeightsError(f"{location.text} does not fit the {name} that {library} builds here; {text}") from error
    return _ready(model, origin)


def _ready(model: Any, origin: dict[str, Any]) -> Any:
    """The model with its origin, converted; ValueError unless it makes logits of an image of this size."""
    from ..convert import optimize

    name, options = origin["model"], origin["options"]
    channels, side, classes = (options[key] for key in ("in_chans", "img_size", "num_classes"))
    with torch.no_grad():
        logits = _call(name, model.eval(), torch.zeros(1, channels, side, side))
    if getattr(logits, "shape", None) != (1, classes):
        raise ValueError(f"{name} returns a {type(logits).__name__} and not logits; name a plain classifier")
    model.train()
    model.origin = origin
    optimize(model)
    return model


def _construct(origin: dict[str, Any], config: Any, pretrained: bool) -> Any:
    """Builds a model by its package."""
    name = origin["model"]
    kind, rest = parse_name(name)
    if kind == "timm":
        options = dict(origin["options"])
        for optional in ("", "img_size", "drop_path_rate"):  # which not each class of timm has
            if options.pop(optional, None) is not None and optional == "drop_path_rate":
                _warn_of_drop_path(name)
            try:
                return _call(name, package("timm").create_model, rest, pretrained=pretrained, **options)
            except TypeError as error:
                wrong = error
        raise ValueError(f"{name} cannot be built: {wrong}") from wrong
    auto = package("transformers").AutoModelForImageClassification
    if not pretrained:
        return ImageClassifier(_call(name, auto.from_config, config))
    return ImageClassifier(_call(name, auto.from_pretrained, rest, config=config, ignore_mismatched_sizes=True))


def _warn_of_drop_path(name: str) -> None:
    print_warning(f"{name} has no drop path; the rate of the recipe is not used")


def _configured(name: str, rest: str, classes: list[str], options: dict[str, Any]) -> Any:
    """The configuration of transformers, for these classes and images."""
    transformers = package("transformers")
    if Path(rest).is_dir():
        config, _ = read_config(transformers, rest)
    else:
        config = _call(name, transformers.AutoConfig.from_pretrained, rest)
    _check_classifier(name, config)
    overrides = {"image_size": options["img_size"], "num_channels": options["in_chans"]}
    overrides |= {key: value for key, value in options.items() if key not in NEEDED}
    for key, value in overrides.items():
        if hasattr(config, key):
            setattr(config, key, value)
        elif key == "drop_path_rate":
            _warn_of_drop_path(name)
        elif key not in ("image_size", "num_channels"):
            raise ValueError(f"{name} takes no option {key}; leave it out")
    config.id2label = dict(enumerate(classes))  # also sets num_labels
    config.label2id = {label: number for number, label in enumerate(classes)}
    return config


def _check_classifier(name: str, config: Any) -> None:
    mapping = package("transformers").AutoModelForImageClassification._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"{name} is a {config.model_type}, which transformers has no image classifier for")


def _load_backbone(model: Any, source: str) -> None:
    """Copies the weights of an earlier run of the same model; the head stays as it is if it has another shape."""
    from ..models.weights.pretrained import find_location

    state, _ = read(find_location(source).weights(), True)
    inner = _inner(model)
    target = inner.state_dict()
    head = {f"{path}." for path, module in inner.named_modules() if any(module is part for part in heads(inner))}
    differ = [key for key in target if key not in state or state[key].shape != target[key].shape]
    wrong = [key for key in [*differ, *(state.keys() - target.keys())] if not key.startswith(tuple(head))]
    if wrong:
        raise WeightsError(f"{source} does not fit {type(inner).__name__}: {wrong[0]} is missing or has another shape")
    inner.load_state_dict({key: target[key] if key in differ else state[key] for key in target})


def _call(name: str, function: Any, *inputs: Any, **options: Any) -> Any:
    """Calls a function of a package; converts its errors, but TypeError, to a sentence."""
    try:
        return function(*inputs, **options)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"{name} cannot be built so: {why[:300].rstrip('.')}") from error
