"""What the commands do with models of one kind."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...intervals import Z
from ..console import print_warning

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import nn

    from ...explain import Panel
    from ...train.data import Batches, Data
    from ...train.data.split import Split
    from ...train.data.transform import Transform
    from ...train.recipes import Recipe


TOKEN = "needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224"


class TrainedModel(NamedTuple):
    """A model with the training settings that evaluation needs; missing settings have defaults."""

    model: Any  # a module
    classes: tuple[str, ...]  # names, in the order of the logits
    transform: "Transform"  # from an image file to the model's input
    data: str | None  # training data, "digits" or a path; None if the file does not name it
    batch_size: int  # batch size of the training
    skip_bad_images: bool  # unreadable images were skipped in training
    split: "Split | None" = None  # how the training data were divided; None if they have test images of their own
    tested: str | None = None  # digest of the test images of a split

    @property
    def device(self) -> "torch.device":
        """Where the model is."""
        return next(self.model.parameters()).device


class Task:
    """A kind of model; this one gives each pixel a class, which no command trains or measures."""

    name = "segment"  # as `task` of its models has it
    command = ""  # that takes its checkpoints, in errors
    losses: tuple[str, ...] = ()  # of the recipes that train it
    labelled: tuple[str, ...] = ()  # those of them that learn the classes of images
    recipes = ""  # names of such recipes, in errors
    in_colour = "photos"  # the recipe for images in colour, in advice
    has_boxes = False  # its data
    has_tiles = False  # its images are larger than the model's inputs, and have no classes

    def check(self, settings: dict, recipe: "Recipe") -> None:
        """Raises ValueError if a model of this kind cannot be trained so; lists no images."""
        from ...train.detection import has_boxes

        if not self.losses:
            which = "gives each pixel a class, which this command does not train; see train.segmentation"
            raise ValueError(f"{recipe.model} {which}")
        data = settings["data"]
        if has_boxes(data) and not self.has_boxes:
            raise ValueError(
                f"data {data!r} has boxes, which {recipe.model} does not predict; pass --model deformable_detr_tiny or "
                "another detector, or give a folder with train/<class>/"
            )
        if recipe.loss not in self.losses:
            raise ValueError(f"{recipe.model} is not trained by loss {recipe.loss!r}; pass --recipe {self.recipes}")
        self.check_model(settings, recipe)

    def check_model(self, settings: dict, recipe: "Recipe") -> None:
        """Raises ValueError if there is no such model, or if it cannot learn from a teacher and has one."""
        from ...models.weights.rebuild import skeleton

        student = skeleton(recipe.model, **recipe.options | dict(img_size=self.side(recipe)))
        if settings["distillation"] != "hard" and not settings["teacher"]:
            raise ValueError(f"--distillation {settings['distillation']} needs a --teacher to learn from")
        if settings["teacher"] and not hasattr(student, "set_distilled_training"):
            raise ValueError(f"--teacher {TOKEN}")

    def side(self, recipe: "Recipe") -> int:
        """The side of the model's inputs."""
        return recipe.img_size

    def preparation(self, model: Any, transform: "Transform") -> dict[str, Any]:
        """How the model's inputs are prepared, with timm's keys, which its weights are saved with."""
        return prepared(transform)

    def to_train(self, model: "nn.Module", recipe: "Recipe", data: "Data", new: bool) -> "nn.Module":
        """What the recipe trains around the model, which is `new` if it has random weights."""
        return model

    def notes(self, model: Any) -> Iterator[str]:
        """Sentences on a model that starts from random weights."""
        yield from ()

    def predict(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints or writes what the model says of image files; the exit code is 2 if one cannot be read."""
        self.refuse(trained, args.checkpoint)

    def evaluate(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints or writes the scores on test images; returns the exit code."""
        self.refuse(trained, args.checkpoint)

    def panels(
        self, trained: TrainedModel, files: list[Path], classes: tuple[str, ...], args: argparse.Namespace
    ) -> "Iterator[Panel] | None":
        """Panels of a report on image files; None for those of any model of tokens."""
        return None

    def refuse(self, trained: TrainedModel, source: str) -> NoReturn:
        """Raises ValueError: another command takes such a model, if any."""
        use = f"; use fastvit-triton {self.command}" if self.command else ""
        raise ValueError(f"{source} holds a {type(trained.model).__name__}, whose task is to {self.name}{use}")


def prepared(transform: "Transform") -> dict[str, Any]:
    """How a transform prepares images, with timm's keys."""
    config: dict[str, Any] = {"input_size": (len(transform.mean), *transform.size), "crop_pct": transform.crop}
    config |= {name: getattr(transform, name) for name in ("mean", "std", "crop_mode", "interpolation")}
    return config if transform.levels is None else config | {"levels": transform.levels}


def opened(file: Path, trained: TrainedModel, args: argparse.Namespace) -> "Image":
    """An image file of `predict`, with its colours inverted if asked for."""
    from PIL import ImageOps

    from ...train.data.transform import read_image

    image = read_image(file, args.max_pixels, trained.transform.levels)
    return ImageOps.invert(image.convert("RGB")) if args.invert else image


def reading(trained: TrainedModel, args: argparse.Namespace) -> dict[str, Any]:
    """How test images are read."""
    skip = args.skip_bad_images or trained.skip_bad_images
    return {"workers": args.workers, "skip_bad_images": skip, "max_pixels": args.max_pixels}


def test_images(trained: TrainedModel, data: str | None, options: dict[str, Any]) -> "Batches":
    """The test images of a data set: those of the run's split, if the data are those that it divided."""
    from ...train.data.hf import absolute, is_hf
    from ...train.data.split import SPLIT
    from ...train.sources import load_test

    name = data or trained.data
    assert name is not None
    arguments = name, _classes_in(trained, name), trained.transform, trained.batch_size
    if trained.split is None:
        return load_test(*arguments, **options)
    same = data is None or trained.data == (absolute(data) if is_hf(data) else str(Path(data).resolve()))
    try:
        test = load_test(*arguments, **options, split=trained.split)
        unchanged = test.digest() == trained.tested
    except ValueError:
        if same:
            raise
        unchanged = False
    if not same and not unchanged:  # other data: all their test images
        return load_test(*arguments, **options)
    if not unchanged and trained.split.test is None:
        raise ValueError(f"the images of {name!r} have changed since training divided them; restore them, or {SPLIT}")
    if not unchanged:
        print_warning(f"the test images of {name!r} have changed since training ({trained.tested})")
    return test


def trained_on(trained: TrainedModel, test: Any) -> int:
    """How many test images have the bytes of a training image of the run; 0 where its data are not here.

    Of many images some are not compared, see `equal_files`.
    """
    from ...train.data.inspection import equal_files
    from ...train.data.transform import MAX_PIXELS
    from ...train.sources import DataSource

    content = getattr(test, "content", None)
    if content is None or trained.data is None or not Path(trained.data).is_dir():
        return 0
    try:
        source = DataSource.of(trained.data)
        train = source.part(trained.data, "train", None, MAX_PIXELS, None, trained.split, None)
    except (OSError, ValueError):
        return 0
    if train.content is None:
        return 0
    groups, _ = equal_files(train.files, test.files, (train.content, content))
    return sum(len(own) for theirs, own in groups if theirs)


def _classes_in(trained: TrainedModel, data: str) -> tuple[str, ...]:
    """The names of the model's classes as the folders of the data have them: ImageNet's are named by WordNet synset."""
    from ...models.weights.pretrained import imagenet_classes
    from ...train.data.folder import find_split

    names = imagenet_classes()
    root = Path(data)
    places = [root, find_split(root, "val") or root] if root.is_dir() else []
    if trained.classes == tuple(names.values()) and any((place / name).is_dir() for place in places for name in names):
        return tuple(names)
    return trained.classes


def half_interval(values: "torch.Tensor") -> "torch.Tensor":
    """Half the width of the 95 % interval of the mean of each column, from values [N, …]; infinite for one image."""
    return Z * values.std(0) / len(values) ** 0.5 if len(values) > 1 else values[0] * 0 + float("inf")
