"""Settings of a training run: a recipe and the options beside it, for a new run and for one that is resumed."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from . import recipes
from .class_weights import check_class_weights
from .data import Data
from .data.hf import absolute, is_hf
from .data.inspection import ALLOW
from .detection import has_boxes
from .detection.load import COMPOSED
from .ranges import OpenFraction, Positive, PositiveInt, Seed, check
from .recipes import Recipe, override_recipe
from .recipes.published import PUBLISHED

# Defaults of the settings that are not fields of a recipe.
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "val_split": None,  # fraction of each class that is for testing, if the data set has no test images of its own
    "seed": 0,
    "skip_bad_images": False,
    "weights": None,
    "grad_accum_steps": 1,
    "amp": "auto",
    "teacher": None,
    "distillation": "hard",
    "grad_checkpointing": False,
    "deterministic": False,
    "transform": None,
    "log_to": None,
    "run_key": None,
    "class_weights": None,  # "balanced", or a dictionary of class names and weights
    "patience": None,  # evaluations in a row without a better one, after which the run stops
    "freeze": None,  # "backbone" trains the head alone
    "allow": [],  # names of `data.inspection.ALLOW`: what is said of the data and not refused
    "levels": None,  # value of white in images of more than 8 bits
    "ways": None,  # how the model's blocks run, from `Models.ways`; None for what this machine says now
}
RECIPES = {"digits": recipes.DIGITS, "photos": recipes.PHOTOS, "folder": recipes.FOLDER}
RECIPES |= {"fashion-mnist": recipes.FASHION_MNIST, "pixels": recipes.PIXELS, "restoration": recipes.RESTORATION}
RECIPES |= {"scenes": recipes.SCENES, "scenes-detr": recipes.SCENES_DETR, "shapes": recipes.SHAPES}
RECIPES |= {"boxes": recipes.BOXES, "boxes-tiny": recipes.BOXES_TINY}
RECIPES |= PUBLISHED
OWN_RECIPES = {RECIPES[name].model: name for name in ("pixels", "restoration", "scenes", "scenes-detr", "boxes-tiny")}
RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))
MIXING = ("mixup", "cutmix", "mixtoken", "erasing", "label_smoothing")  # of images and classes of a batch
AUGMENTATION = ("policy", "repeats", "min_area", "flip", "degrees", "zoom", "shear", "shift")  # which moves no boxes


def resolve_settings(given: dict, state: dict | None = None, accept_changes: bool = False) -> dict:
    """The complete settings of a run: those of the run to resume, or those of a recipe, overridden by given values.

    A finished run may be given more epochs: its learning rate goes on as in the longer run.

    Args:
        given: any of "recipe" (a name), the keys of `SETTINGS`, and the fields of `Recipe`.
        state: from `load_state`, to resume; None starts a new run.
        accept_changes: given values replace those of the run to resume.

    Raises:
        ValueError: a value is out of range, the recipe is unknown, or a given value differs from that of the run.
    """
    given = dict(given)
    for name in ("data", "weights", "teacher"):
        if given.get(name) is not None and Path(given[name]).exists():  # else "digits", or a name on the Hub
            given[name] = str(Path(given[name]).resolve())
    if is_hf(given.get("data") or ""):
        given["data"] = absolute(given["data"])
    check("seed", given.get("seed", 0), Seed)
    check("grad_accum_steps", given.get("grad_accum_steps", 1), PositiveInt)
    check_class_weights("class_weights", given.get("class_weights"))
    check("patience", given.get("patience"), Annotated[PositiveInt | None, "no early stop"])
    check("freeze", given.get("freeze"), Annotated[Literal["backbone"] | None, "training all weights"])
    check("levels", given.get("levels"), Annotated[Positive | None, "the usual range"])
    if unknown := set(given.get("allow", ())) - ALLOW.keys():
        raise ValueError(f"allow has {', '.join(sorted(unknown))}; use names of {', '.join(ALLOW)}")
    check("val_split", given.get("val_split"), Annotated[OpenFraction | None, "a data set with test images"])
    if state is not None:
        return _resume(given, state, accept_changes)
    data = given.get("data", "digits")
    started = given.get("model") is not None or given.get("weights") is not None
    images, boxes = ("folder", "boxes") if started else ("photos", "boxes-tiny")
    usual = data if data in ("digits", *COMPOSED) else boxes if has_boxes(data) else images
    own = usual if given.get("model") == RECIPES[usual].model else OWN_RECIPES.get(given.get("model", ""), usual)
    name = given.pop("recipe", None) or own
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; use one of {', '.join(RECIPES)}")
    return _override(SETTINGS | asdict(RECIPES[name]) | {"recipe": name}, given)


def check_used(settings: dict) -> None:
    """Raises ValueError if a field differs from that of the recipe, and the task or the data make no use of it."""
    data, loss = settings["data"], settings["loss"]
    detector = loss == "detection"
    task = "the training of a detector" if detector else f"training by loss {loss!r}"
    unused: tuple[str, ...] = () if loss in ("softmax", "sigmoid", "bce") else MIXING
    unused += AUGMENTATION if detector else ()
    unused += ("mean", "std") if data in COMPOSED else ()
    usual = RECIPES[settings["recipe"]]
    for name in unused:
        if settings[name] != getattr(usual, name):
            raise ValueError(f"{name} is {settings[name]}, which {task} does not use; leave it out")


def imported(settings: dict) -> dict[str, str]:
    """Settings that name an object to import, `module:attribute`."""
    return {name: settings[name] for name in ("transform", "optimizer") if ":" in (settings.get(name) or "")}


def recipe_of(settings: dict) -> Recipe:
    """The recipe in the settings of a run."""
    if missing := [name for name in (*SETTINGS, *RECIPE_FIELDS) if name not in settings]:
        raise ValueError(f"the settings of the run have no {missing[0]}; its state is damaged")
    return Recipe(**{name: settings[name] for name in RECIPE_FIELDS})


def check_unchanged(data: Data, state: dict, accept_changes: bool = False) -> None:
    """Compares the data of a run with those that its state was trained on. States of earlier versions name none."""
    saved = state.get("data") or {}
    for part, value in data.identity.items():
        if saved.get(part, value) == value:
            continue
        if part == "classes":
            raise ValueError(
                f"data {data.name!r} has the classes {', '.join(value[:10])}, but the run to resume was trained on "
                f"{', '.join(saved[part][:10])}; restore them, or start a new run"
            )
        if not accept_changes:
            raise ValueError(
                f"the {part} images of data {data.name!r} have changed since the run was stopped "
                f"({saved[part]}; now {value}); restore them, or pass --accept-changes"
            )


def _resume(overrides: dict, state: dict, accept_changes: bool) -> dict:
    saved = SETTINGS | state["settings"]
    progress = state["progress"]
    done = progress["epoch"]
    # at the end of an epoch, its last step is the number of steps per epoch
    finished = progress["done"] and recipe_of(saved).epochs_of(progress["step"]) == done
    changed = {name: value for name, value in overrides.items() if value != saved.get(name)}
    for name, value in changed.items():
        if (name == "epochs" and finished and value > done) or name in ("log_to", "patience", "allow"):
            continue
        fixed = name in ("recipe", "val_split")  # another split would test on training images
        if fixed or not accept_changes:
            remedy = "leave it out" if fixed else "leave it out, or pass --accept-changes"
            raise ValueError(f"{name} is {value}, but the run to resume has {saved.get(name)}; {remedy}")
    for name, value in imported(saved).items():  # a file does not name code to run
        if overrides.get(name) is None:
            raise ValueError(f"the run to resume imports {value}; give --{name} {value} again")
    return _override(saved, changed)


def _override(settings: dict, overrides: dict) -> dict:
    """Settings with given values, and dependent fields of the recipe rescaled."""
    recipe = override_recipe(recipe_of(settings), **{key: overrides[key] for key in RECIPE_FIELDS if key in overrides})
    return settings | overrides | asdict(recipe)
