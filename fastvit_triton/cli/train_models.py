"""Models for `train.Run`, ours and others: how they are checked, built, taught, warmed up and saved."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import progress
from .loading import load_trained
from .model_by_name import is_other
from .tasks import task_by_loss, task_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

    from ..train.data import Data
    from ..train.recipes import Recipe


def check_settings(settings: dict, recipe: "Recipe") -> None:
    """Raises ValueError if there is no such model, or if it cannot learn from a teacher and has one."""
    from ..models import family_of

    if is_other(recipe.model):
        from .other_models import check_run

        check_run(settings, recipe)
        return
    task_of(getattr(family_of(recipe.model), "MODEL", None)).check(settings, recipe)


def build_model(settings: dict, recipe: "Recipe", data: "Data", resumed: bool) -> "nn.Module":
    """The model to train, on the CPU, with its initial weights."""
    from ..models import create_model
    from ..models.weights.load import load_weights
    from ..train.build import build_masked_model, configure_model

    if is_other(recipe.model):
        from .other_models import build_other

        weights = None if resumed else settings["weights"]
        checkpointing = settings["grad_checkpointing"]
        return build_other(recipe, data.classes, len(data.transform.mean), weights, checkpointing)
    task = task_by_loss(recipe.loss)
    options: dict[str, object] = {
        "img_size": task.side(recipe),
        "in_chans": len(data.transform.mean),
        "num_classes": 0 if task.has_tiles else len(data.classes),
    }
    options |= {"drop_path_rate": recipe.drop_path_rate, "grad_checkpointing": settings["grad_checkpointing"]}
    options |= recipe.options
    model: nn.Module = create_model(recipe.model, **options)
    configure_model(recipe, model, fresh=not settings["weights"])
    if settings["weights"] and not resumed:
        load_weights(model, settings["weights"])
    described: Any = model
    cfg = {"architecture": described.variant, "num_classes": described.num_classes, "label_names": data.classes}
    described.pretrained_cfg = cfg | task.preparation(model, data.transform)
    if recipe.mask_ratio:
        options |= recipe.decoder
        model = build_masked_model(recipe, model, create_model(recipe.model, **options).blocks)
    return task.to_train(model, recipe, data, new=not settings["weights"] and not resumed)


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
    from ..deploy.warm_up import warmup

    with progress(quiet=quiet) as bar:
        stage = bar.add_task("compiling kernels", total=None)
        warmup(model, images, True, lambda done, total: bar.update(stage, completed=done, total=total))


def save_weights(model: "nn.Module", path: Path, metadata: dict[str, str]) -> None:
    """Writes the weights as safetensors, atomically."""
    from ..models.weights.load import save_weights

    if hasattr(model, "origin"):
        from .other_models import save_other

        save_other(model, path, metadata)
        return
    save_weights(model, path, metadata=metadata)
