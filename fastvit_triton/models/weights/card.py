"""Model cards: README.md of a model's folder, with the Hub's metadata, its scores, classes, data, licence and use."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.locations import REPOSITORY
from ...checkpoints.tensors import variant
from ...files import printable
from ...intervals import PRECISIONS, percent, span, wilson
from ..base import ImageModel

Metric = tuple[str, float, tuple[float, float] | None]  # name, share in [0, 1], and its 95 % interval if it is known
NAMED = 100  # classes that a card names; config.json has all
TASKS = {  # task of a model → of the Hub, and what the model does
    "classify": ("image-classification", "classifies images"),
    "detect": ("object-detection", "finds objects in images"),
    "segment": ("image-segmentation", "gives each pixel of an image a class"),
    "generate": ("unconditional-image-generation", "generates images pixel by pixel"),
    "restore": ("image-to-image", "restores images"),
}
FEATURES = ("image-feature-extraction", "turns images into features")
CARD = """\
---
{front}
---

# {title}

`{variant}` {purpose}. It has {parameters:,} parameters and takes images of {height} x {width} pixels with {channels}.

## Use

{usage}

## Test scores

{scores}

## Classes

{classes}

## Data and licence

{origin}

## Preparation of images

{preparation}
"""
METHODS = ("a bootstrap over images", "Wilson's method")  # of other scores, and of the accuracy
LOADED = """\
import fastvit_triton

model, _ = fastvit_triton.load_model("{source}")
"""
USES = {  # layout and task of the Hub → code; {source} and {folder} are where it finds the model
    ("fastvit_triton", "image-classification"): LOADED
    + """(classes,) = fastvit_triton.predict(model, ["photo.jpg"])
for name, probability in classes:
    print(f"{{name}}: {{100 * probability:.1f}} %")""",
    ("fastvit_triton", "image-feature-extraction"): LOADED
    + """image = fastvit_triton.transforms(model)("photo.jpg")
print(model.eval()(image[None]).shape)""",
    ("fastvit_triton", "image-segmentation"): LOADED
    + """image = fastvit_triton.transforms(model)("photo.jpg")
print(model.eval()(image[None]).argmax(1))  # the class of each pixel""",
    ("fastvit_triton", "object-detection"): "fastvit-triton predict photo.jpg --checkpoint {source} --draw boxes",
    ("fastvit_triton", "unconditional-image-generation"): (
        "fastvit-triton generate --checkpoint {source} --out samples.png"
    ),
    ("fastvit_triton", "image-to-image"): ("fastvit-triton restore photo.jpg --checkpoint {source} --out restored.png"),
    ("timm", ""): """\
import timm
from PIL import Image

model = timm.create_model("{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
print(model(transform(Image.open("photo.jpg").convert("{mode}"))[None]))""",
    ("transformers", ""): """\
from PIL import Image
from transformers import AutoImageProcessor, {auto}

processor = AutoImageProcessor.from_pretrained("{name}")
model = {auto}.from_pretrained("{name}")
print(model(**processor(Image.open("photo.jpg").convert("{mode}"), return_tensors="pt")))""",
}


def model_card(
    model: ImageModel,
    title: str,
    cfg: Mapping[str, Any],
    training: Mapping[str, Any],
    layout: str,
    license_name: str | None = None,
    repo: str | None = None,
) -> str:
    """A model card in markdown, with the Hub's metadata at its top."""
    tag, purpose = FEATURES if _is_headless(model) else TASKS[model.task]
    published = None if training else cfg.get("license")
    licence = license_name or published or "unknown"
    channels, height, width = cfg["input_size"]
    data = _data(training)
    metrics = _metrics(training)
    front = [f"library_name: {layout}", f"pipeline_tag: {tag}", f"license: {json.dumps(licence)}", "tags:"]
    front += [f"- {tag}", "- vision-transformer"]
    if data and data.startswith("hf:"):
        front += ["datasets:", f"- {json.dumps(data.removeprefix('hf:'))}"]
    if data and metrics:
        front += _model_index(title, tag, data, metrics, training)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prepared = {"mean": cfg["mean"], "standard deviation": cfg["std"]}
    lines = [f"- {name}: {', '.join(f'{value:.4g}' for value in values)}" for name, values in prepared.items()]
    lines += [f"- {cfg['interpolation']} interpolation, {cfg['crop_mode']} crop of {cfg['crop_pct']:.4g}"]
    return CARD.format(
        front="\n".join(front),
        title=_text(title),
        variant=variant(model),
        purpose=purpose,
        parameters=parameters,
        height=height,
        width=width,
        channels="1 channel" if channels == 1 else f"{channels} channels",
        usage=_usage(layout, tag, repo, "L" if channels == 1 else "RGB"),
        scores=_scores(metrics, data, training),
        classes=_classes(cfg.get("label_names"), 0 if _is_headless(model) else model.num_classes),
        origin=_origin(data, training, cfg, license_name, published),
        preparation="\n".join(lines),
    )


def _is_headless(model: ImageModel) -> bool:
    return model.task == "classify" and not model.num_classes


def _data(training: Mapping[str, Any]) -> str | None:
    """The name of the training data without folders; "hf:ORG/NAME" for a data set of the Hub."""
    name = training.get("data")
    if not name:
        return None
    of_hub = re.fullmatch(r"hf:([^:]+)(:.*)?", name)
    if of_hub and (REPOSITORY.fullmatch(of_hub[1]) or re.fullmatch(r"[\w.-]+", of_hub[1])):
        return f"hf:{of_hub[1]}"
    return Path(of_hub[1] if of_hub else name).name


def _metrics(training: Mapping[str, Any]) -> dict[str, Metric]:
    """The scores that `train` wrote, by their type on the Hub."""
    images = training.get("test_images")
    found: dict[str, Metric] = {}
    if (accuracy := training.get("test_accuracy")) is not None:
        bounds = wilson(round(accuracy * images), int(images)) if images else None
        found["accuracy"] = ("accuracy", accuracy, bounds)
    for key, name in PRECISIONS.items():
        if (share := training.get(f"test_{key}")) is not None:
            low, high = training.get(f"test_{key}_low"), training.get(f"test_{key}_high")
            bounds = None if low is None or high is None else (low, high)
            found["mean_average_precision" if key == "ap" else key] = (name, share, bounds)
    return found


def _model_index(
    title: str, tag: str, data: str, metrics: Mapping[str, Metric], training: Mapping[str, Any]
) -> list[str]:
    """Lines of the Hub's metadata on scores; strings are JSON's, which YAML reads."""
    name = json.dumps(data.removeprefix("hf:"), ensure_ascii=False)
    lines = ["model-index:", f"- name: {json.dumps(title, ensure_ascii=False)}", "  results:", "  - task:"]
    lines += [f"      type: {tag}", "    dataset:", f"      name: {name}", f"      type: {name}", "      split: test"]
    lines += ["    metrics:"]
    for kind, (metric, share, bounds) in metrics.items():
        facts: dict[str, Any] = {}
        facts |= {"test_images": int(training["test_images"])} if training.get("test_images") else {}
        facts |= {"interval_95": [round(bound, 4) for bound in bounds]} if bounds else {}
        facts |= {"interval_method": METHODS[kind == "accuracy"]} if bounds else {}
        lines += [f"    - type: {kind}", f"      name: {metric}", f"      value: {share:.4f}"]
        lines += [f"      args: {json.dumps(facts)}"] if facts else []
    return lines


def _scores(metrics: Mapping[str, Metric], data: str | None, training: Mapping[str, Any]) -> str:
    """A table of the scores, and what they are of."""
    if not metrics:
        return "None is recorded in the file of the weights."
    images = int(training["test_images"]) if training.get("test_images") else None
    lines = ["| metric | value | 95 % interval |", "|---|--:|--:|"]
    for name, share, bounds in metrics.values():
        low, high = bounds or (None, None)
        lines.append(f"| {name} | {percent(share, images)} | {span(low, high, images)} |")
    count = "test images" if images is None else f"{images:,} test images"
    known = any(bounds for *_, bounds in metrics.values())
    method = f" The interval, by {METHODS['accuracy' in metrics]}, covers the choice of these images only."
    name = _text((data or "unknown data").removeprefix("hf:"))
    return "\n".join([*lines, "", f"On {count} of {name}.{method if known else ''}"])


def _classes(names: Any, count: int) -> str:
    """The names of the classes in the order of the outputs."""
    if not count:
        return "The model has no classifier."
    if not names:
        return f"{count:,}; their names are not known."
    shown = ", ".join(_text(name) for name in names[:NAMED])
    rest = ", … (all names are in `label_names` of config.json)" if len(names) > NAMED else ""
    return f"{count:,}, in the order of the outputs: {shown}{rest}"


def _origin(
    data: str | None,
    training: Mapping[str, Any],
    cfg: Mapping[str, Any],
    license_name: str | None,
    published: str | None,
) -> str:
    """A list of data, recipe, the weights that training started from, and licence."""
    rows: dict[str, Any] = {"Data set": _text(data.removeprefix("hf:")) if data else "unknown"}
    if training.get("train_images"):
        rows["Training images"] = f"{training['train_images']:,}"
    rows |= {"Recipe": training.get("recipe"), "Batch size": training.get("batch_size")}
    if "weights" in training:
        rows["Trained from"] = _text(Path(training["weights"]).name) if training["weights"] else "random weights"
    if cfg.get("tag"):
        rows["Configuration"] = f"{cfg['architecture']}.{cfg['tag']}"
    rows["Licence"] = license_name or published or "unknown; none was stated when this card was written"
    return "\n".join(f"- {name}: {value}" for name, value in rows.items() if value is not None)


def _usage(layout: str, tag: str, repo: str | None, mode: str) -> str:
    """A block of code that loads the model from the Hub, or from the folder in which it is run, and uses it."""
    code = USES.get((layout, tag)) or USES[layout, ""]
    auto = "AutoModelForImageClassification" if tag == "image-classification" else "AutoModel"
    places = {"source": f"hf-hub:{repo}" if repo else ".", "folder": f"hf-hub:{repo}" if repo else "local-dir:."}
    code = code.format(**places, name=repo or ".", auto=auto, mode=mode)
    language = "bash" if code.startswith("fastvit-triton ") else "python"
    package = f"With the Python package {layout}{' and its extra `hub`' if repo and layout == 'fastvit_triton' else ''}"
    return f"{package}{'' if repo else ', in this folder'}:\n\n```{language}\n{code}\n```"


def _text(name: Any) -> str:
    """A name as markdown that is shown as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", printable(str(name).replace("\n", " ")))
