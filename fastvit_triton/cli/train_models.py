"""Models for `train.Run`, ours and others: how they are checked, built, taught, warmed up and saved."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import is_other
from .console import show_warmup
from .detect import check_boxes
from .loading import load_trained

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

    from ..train.data import Data
    from ..train.recipes import Recipe


def check_settings(settings: dict, recipe: "Recipe") -> None:
    """Raises ValueError if there is no such model, or if it cannot learn from a teacher and has one."""
    from ..models import family_of
    from ..models.weights.rebuild import skeleton

    if is_other(recipe.model):
        from .other_models import check_run

        check_run(settings, recipe)
        return
    task = getattr(getattr(family_of(recipe.model), "MODEL", None), "task", "classify")
    if task == "segment":
        raise ValueError(
            f"{recipe.model} gives each pixel a class, which this command does not train; see train.segmentation"
        )
    check_boxes(settings, recipe, task)
    if task == "detect":
        return
    loss = {"generate": "likelihood", "restore": "restoration"}.get(task)
    if loss != (recipe.loss if recipe.loss in ("likelihood", "restoration") else None):
        recipes = {"likelihood": "pixels", "restoration": "restoration", None: "digits or folder"}
        raise ValueError(f"{recipe.model} is not trained by loss {recipe.loss!r}; pass --recipe {recipes[loss]}")
    student = skeleton(recipe.model, **recipe.options | dict(img_size=_side(recipe)))
    if settings["distillation"] != "hard" and not settings["teacher"]:
        raise ValueError(f"--distillation {settings['distillation']} needs a --teacher to learn from")
    if settings["teacher"] and not hasattr(student, "set_distilled_training"):
        raise ValueError("--teacher needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224")


def build_model(settings: dict, recipe: "Recipe", data: "Data", resumed: bool) -> "nn.Module":
    """The model to train, on the CPU, with its initial weights."""
    from ..models import create_model
    from ..models.weights.load import load_weights
    from ..train.build import build_generative_model, build_masked_model, configure_model

    if is_other(recipe.model):
        from .other_models import build_other

        weights = None if resumed else settings["weights"]
        checkpointing = settings["grad_checkpointing"]
        return build_other(recipe, data.classes, len(data.transform.mean), weights, checkpointing)
    options: dict[str, object] = {
        "img_size": _side(recipe),
        "in_chans": len(data.transform.mean),
        "num_classes": 0 if recipe.loss == "restoration" else len(data.classes),
    }
    options |= {"drop_path_rate": recipe.drop_path_rate, "grad_checkpointing": settings["grad_checkpointing"]}
    options |= recipe.options
    model: nn.Module = create_model(recipe.model, **options)
    configure_model(recipe, model, fresh=not settings["weights"])
    if settings["weights"] and not resumed:
        load_weights(model, settings["weights"])
    described: Any = model
    described.pretrained_cfg = _describe(model, data)
    if recipe.mask_ratio:
        options |= recipe.decoder
        model = build_masked_model(recipe, model, create_model(recipe.model, **options).blocks)
    if recipe.loss in ("likelihood", "restoration"):
        if hasattr(model, "set_clusters") and not settings["weights"] and not resumed:
            _choose_colours(model, data)
        model = build_generative_model(recipe, model, data.transform)
    return model


def _side(recipe: "Recipe") -> int:
    """The side of the model's images; of a model of restoration, that of its tiles before they are enlarged."""
    from ..models import model_config
    from ..models.ipt import scale_of

    if recipe.loss != "restoration":
        return recipe.img_size
    tasks = getattr(model_config(recipe.model, **recipe.options), "tasks", ("x2",))
    return recipe.img_size // max(map(scale_of, tasks))


def _choose_colours(model: Any, data: "Data") -> None:
    """Sets the colours of an iGPT of colour images by k-means on 64 training images; greys are evenly spaced."""
    import torch

    from ..models.igpt import colour_clusters

    count, channels = model.clusters.shape
    if channels > 1:
        images = [data.train.display_image(i) for i in range(min(64, len(data.train)))]
        model.set_clusters(colour_clusters(2 * torch.stack(images) - 1, count))


def load_teacher(path: str, student: Any, classes: int, device: "torch.device") -> "nn.Module":
    """Loads the teacher, and sets the student to return class-token and distillation-token logits."""
    teacher = load_trained(path)
    if len(teacher.classes) != classes:
        raise ValueError(
            f"--teacher has {len(teacher.classes)} classes, the data has {classes}; train one on this data"
        )
    student.set_distilled_training()
    return teacher.model.to(device).eval().requires_grad_(False)


def ways(device: "torch.device") -> dict:
    """The measurements of this device that choose how blocks run, and the row of a CPU."""
    from ..kernels import measured, onednn

    table = measured.of(device)
    return {"rows": table.rows, "ways": table.ways, "cpu": onednn.row() if device.type == "cpu" else {}}


@contextmanager
def using_ways(ways: dict | None) -> "Iterator[None]":
    """Context in which blocks run by these measurements; None for those of this machine."""
    from ..kernels import measured, onednn

    if ways is None:
        yield
        return
    with measured.using(measured.Measured(ways["rows"], ways["ways"])), onednn.using_row(ways["cpu"]):
        yield


def warm_up(model: "nn.Module", images: "Tensor", quiet: bool) -> None:
    """Compiles the kernels of training; shows a progress bar on a terminal unless `quiet`."""
    show_warmup(model, images, train=True, quiet=quiet)


def save_weights(model: "nn.Module", path: Path, metadata: dict[str, str]) -> None:
    """Writes the weights as safetensors, atomically."""
    from ..models.weights.load import save_weights

    if hasattr(model, "origin"):
        from .other_models import save_other

        save_other(model, path, metadata)
        return
    save_weights(model, path, metadata=metadata)


def _describe(model: Any, data: "Data") -> dict[str, Any]:
    """What will be known of the trained weights, with timm's keys."""
    transform = data.transform
    mean, std = transform.mean, transform.std
    if model.task == "generate":  # their images are between −1 and 1
        mean = std = (0.5,) * len(mean)
    size = transform.size
    if model.task == "restore":  # its tiles have pixels 0 … 255
        mean, std = (0.0,) * len(mean), (1 / 255,) * len(mean)
        size = model.config.img_size
    cfg = {"architecture": model.variant, "num_classes": model.num_classes, "label_names": data.classes}
    cfg |= {"input_size": (len(transform.mean), *size), "mean": mean, "std": std}
    return cfg | {
        "interpolation": transform.interpolation,
        "crop_pct": transform.crop,
        "crop_mode": transform.crop_mode,
    }
