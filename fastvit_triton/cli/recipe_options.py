"""Options of `train` that choose a recipe or replace its values, and the list of all recipes."""

import argparse
import textwrap
from shlex import quote
from typing import TYPE_CHECKING, Any

from .arguments import add_shared
from .model_by_name import check_model
from .parser import Parser

if TYPE_CHECKING:
    from ..train.recipes import Recipe

# Options that override a field of the recipe: type and help; `help(fastvit_triton.train.Recipe)` has the details.
RECIPE_OPTIONS = {
    "model": (str, "a name that `fastvit-triton models` lists, timm:NAME, or hf:FOLDER or hf:NAME of transformers"),
    "epochs": (int, "passes over the training images"),
    "batch-size": (int, "images per step, over all processes"),
    "lr": (float, "peak learning rate"),
    "warmup": (float, "fraction of the run before the peak"),
    "img-size": (int, "image side in pixels"),
    "ema-decay": (float, "test and save a moving average of the weights with this decay, such as 0.999"),
    "optimizer": (str, "optimizer: adamw, sgd, lamb, muon, or your own as module:Class"),
    "schedule": (str, "learning-rate schedule: own, vit, deit or mae"),
    "loss": (str, "loss: softmax, sigmoid or bce"),
    "weight-decay": (float, "weight decay of matrices"),
    "layer-decay": (float, "learning rate of a block divided by that of the next"),
    "clip": (float, "maximum gradient norm"),
    "label-smoothing": (float, "probability spread evenly over all classes"),
    "mixup": (float, "Mixup's alpha; 0 disables it"),
    "cutmix": (float, "CutMix's alpha; 0 disables it"),
    "mixtoken": (float, "MixToken's alpha; excludes mixup and cutmix"),
    "erasing": (float, "probability of random erasing"),
    "policy": (str, "augmentation of crops: timm, three or randaug(2,15)"),
    "repeats": (int, "copies of each image (repeated augmentation)"),
    "min-area": (float, "smallest fraction of the area in a random crop"),
    "drop-path-rate": (float, "stochastic-depth rate of the last block"),
}


def add_recipe_options(parser: Parser) -> None:
    """Adds --recipe, --list-recipes, and an option for each of `RECIPE_OPTIONS`."""
    group = parser.add_argument_group("recipe, and options that replace its values")
    text = "model and training schedule (default: that of the data; for a folder photos or, with boxes, boxes-tiny; "
    text += "with --model or --weights folder or boxes)"
    group.add_argument("--recipe", check=_check_recipe, help=text)
    group.add_argument("--list-recipes", action="store_true", help="print the values of each recipe and exit")
    for name, (kind, about) in RECIPE_OPTIONS.items():
        group.add_argument(f"--{name}", type=kind, check=_check_field, help=about)
    add_shared(group, "--mean", "--std", default="that of --weights, or of ImageNet")


def _check_recipe(option: str, name: str) -> None:
    """Raises ValueError if there is no recipe of that name."""
    from ..train.settings import RECIPES

    if name not in RECIPES:
        raise ValueError(f"{option} is {name!r}; use one of {', '.join(RECIPES)}")


def _check_field(option: str, value: Any) -> None:
    """Raises ValueError if the value is outside the range of the recipe's field."""
    from ..train.augment.policy import policy_by_name
    from ..train.build import optimizer_class
    from ..train.ranges import check, without_none
    from ..train.recipes import OPTIMIZERS, Recipe

    name = option.removeprefix("--").replace("-", "_")
    check(option, value, without_none(Recipe.__annotations__[name]))
    if name == "model":
        check_model(option, value)
    if name == "policy":
        policy_by_name(value)
    if name == "optimizer" and ":" in value:
        optimizer_class(option, value)
    elif name == "optimizer" and value not in OPTIMIZERS:
        raise ValueError(f"{option} is {value!r}; use {', '.join(map(repr, OPTIMIZERS))}, or module:Class")


def recipes() -> str:
    """The values of each recipe as options."""
    from ..train.recipes import Recipe
    from ..train.settings import RECIPES

    usual = {name: field.default for name, field in Recipe.__dataclass_fields__.items()}
    common = argparse.Namespace(**usual | dict(model=None, batch_size=None, lr=None))
    lines = [*_paragraph("every recipe, unless it lists another value", _values(common, {}))]
    for name, recipe in RECIPES.items():
        lines += _paragraph(name, _values(recipe, usual))
    return "\n".join(lines)


def _values(recipe: "Recipe | argparse.Namespace", usual: dict[str, object]) -> list[str]:
    """Options that give the values of a recipe, without those that are usual or off; lengths in steps come last."""
    words = []
    lengths = []
    off = (None, "", 0.0)
    for option in RECIPE_OPTIONS:
        name = option.replace("-", "_")
        value = getattr(recipe, name)
        default = usual.get(name)
        if name == "warmup" and recipe.warmup_unit != "run":
            lengths.append(f"warm-up of {value:,} {recipe.warmup_unit}")
        elif value != default and not (value in off and default in off):
            words.append(f"--{option} {quote(value) if isinstance(value, str) else f'{value:.7g}'}")
    if recipe.steps:
        lengths.append(f"{recipe.steps:,} steps in all")
    return [*words, f"({', '.join(lengths)})"] if lengths else words


def _paragraph(name: str, words: list[str]) -> list[str]:
    """A name and words as lines of at most 79 characters; a word, such as an option with its value, is not divided."""
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, 75, break_on_hyphens=False)
    return [f"  {name}", *(f"    {line}".replace("\0", " ") for line in lines)]
