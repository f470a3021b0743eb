"""Detectors in the commands: which data they take, the table of their average precision, and their boxes."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import check_folder_of
from .console import print_line, select_device
from .results import cell, write_rows

if TYPE_CHECKING:
    from ..train.recipes import Recipe
    from .loading import TrainedModel

OPTIONS = ("draw", "threshold")


def check_boxes(settings: dict, recipe: "Recipe", task: str) -> None:
    """Raises ValueError unless both the data and the model, whose task is given, have boxes, or neither."""
    from ..train.detection import has_boxes

    data = settings["data"]
    boxes = has_boxes(data)
    if boxes and task != "detect":
        raise ValueError(
            f"data {data!r} has boxes, which {recipe.model} does not predict; pass --model deformable_detr_digits or "
            "another detector, or give a folder with train/<class>/"
        )
    if task == "detect" and not boxes:
        raise ValueError(
            f"data {data!r} has no boxes, which {recipe.model} learns; give --data scenes, or a folder with "
            "annotations of COCO, Roboflow or YOLO"
        )
    if task == "detect" and recipe.loss != "detection":
        raise ValueError(f"{recipe.model} is not trained by loss {recipe.loss!r}; pass --recipe scenes or boxes")
    if task == "detect" and (settings["teacher"] or settings["distillation"] != "hard"):
        option = "--teacher" if settings["teacher"] else "--distillation"
        raise ValueError(f"{option} needs a --model with a distillation token, such as deit_tiny_distilled_patch16_224")


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `predict` for detectors."""
    text = "folder for PNG files of the images with their boxes (detectors only, like the next)"
    parser.add_argument("--draw", type=Path, check=check_folder_of, metavar="FOLDER", help=text)
    text = "least score of a box, from 0 to 1 (default: 0.4)"
    parser.add_argument("--threshold", type=float, check=_check_threshold, help=text)


def refuse_options(args: argparse.Namespace) -> None:
    """Raises ValueError if an option for detectors was given with another model."""
    for name in OPTIONS:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for detectors, and {args.checkpoint} predicts no boxes; leave it out")


def predict(trained: "TrainedModel", args: argparse.Namespace) -> int:
    """Prints a line for each object in image files, draws and writes them; the exit code is 2 if one cannot be read."""
    import torch
    from PIL import ImageOps

    from ..files import printable, replacing
    from ..train.data.transform import read_image
    from ..train.detection.batches import prepared
    from ..train.detection.draw import draw_boxes
    from .loading import find_images, readable_images

    threshold = 0.4 if args.threshold is None else args.threshold
    device = select_device(args.device)
    model: Any = trained.model.to(device).eval()
    files = find_images(args.images)
    if args.draw is not None:
        args.draw.mkdir(exist_ok=True)
    records: list[dict[str, Any]] = []
    drawn: set[str] = set()
    for file in readable_images(files, args.max_pixels):
        image = read_image(file, args.max_pixels)
        image = ImageOps.invert(image.convert("RGB")) if args.invert else image
        with torch.no_grad():
            outputs = model(prepared(image, trained.transform)[None].to(device))
        (found,) = model.detections(outputs, [(image.height, image.width)], threshold)
        order = found["scores"].argsort(descending=True)
        found = {name: values[order].cpu() for name, values in found.items()}
        columns = (found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist())
        objects_of_file = list(zip(*columns, strict=True))
        for box, label, score in objects_of_file if args.out is None else ():
            left, top, right, bottom = (round(value) for value in box)
            name = printable(trained.classes[label])
            print_line(f"{file}: {name} {100 * score:.1f} % at {left},{top} to {right},{bottom}")
        if not objects_of_file and args.out is None:
            print_line(f"{file}: no object has a score of {threshold:g} or more")
        objects = [dict(label=trained.classes[label], score=score, box=box) for box, label, score in objects_of_file]
        records.append(dict(file=cell(file), width=image.width, height=image.height, objects=objects))
        if args.draw is not None:
            name = next(name for name in _names(file.stem) if name not in drawn)
            drawn.add(name)
            with replacing(args.draw / f"{name}.png") as temporary:
                draw_boxes(image, found, trained.classes).save(temporary, format="PNG")
    if args.out is not None and records:
        corners = ("left", "top", "right", "bottom")
        rows = [
            dict(
                file=record["file"],
                label=thing["label"],
                score=thing["score"],
                **dict(zip(corners, thing["box"], strict=True)),
            )
            for record in records
            for thing in record["objects"]
        ]
        write_rows(args.out, rows, records, ("file", "label", "score", *corners))
        print_line(f"{args.out} holds {len(rows):,} objects of {len(records):,} images")
    return 0 if len(records) == len(files) else 2


def evaluate(trained: "TrainedModel", args: argparse.Namespace) -> int:
    """Prints the average precision of a detector on test images, by class and in total."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..files import printable
    from ..train.detection import average_precision, evaluate_detector, has_boxes, load_detection_test
    from ..train.outputs import skipped
    from ..train.step import autocast_dtype

    data = args.data or trained.data
    assert data is not None  # one of them is given
    if not has_boxes(data):
        raise ValueError(
            f"data {data!r} has no boxes, which {args.checkpoint} predicts; give --data scenes, or a folder with "
            "annotations of COCO, Roboflow or YOLO"
        )
    test = load_detection_test(
        data,
        trained.classes,
        trained.transform,
        trained.batch_size,
        workers=args.workers,
        skip_bad_images=args.skip_bad_images or trained.skip_bad_images,
        max_pixels=args.max_pixels,
    )
    device = select_device(args.device)
    score = evaluate_detector(trained.model.to(device), test, autocast_dtype(device))
    assert score.detections is not None and score.objects is not None  # of a detector
    table = Table("class", "objects", "AP", "AP50", "AP75")
    rows = []
    for number, label in enumerate(trained.classes):
        found = [_of_class(part, number) for part in score.detections]
        wanted = [_of_class(part, number) for part in score.objects]
        count = sum(int((~part["crowd"]).sum()) if "crowd" in part else len(part["labels"]) for part in wanted)
        if label:
            numbers = average_precision(found, wanted) if count else {}
            shares = [_percent(numbers.get(name, -1.0)) for name in ("ap", "ap50", "ap75")]
            table.add_row(Text(printable(label)), f"{count:,}", *shares)
            scores = {name: numbers.get(name) for name in ("ap", "ap50", "ap75")}
            rows.append({"class": label, "objects": count} | scores)
    Console().print(table)
    numbers = average_precision(score.detections, score.objects)
    shown = dict(AP="ap", AP50="ap50", AP75="ap75", small="ap_small", medium="ap_medium", large="ap_large")
    text = ", ".join(f"{name} {_percent(numbers[key])}" for name, key in shown.items() if numbers[key] >= 0)
    print_line(f"test {text} ({len(score.objects):,} images), loss {score.loss:.4f}")
    if args.out is not None:
        known = {name: value for name, value in numbers.items() if value >= 0}
        write_rows(args.out, rows, {"images": len(score.objects), "loss": score.loss} | known | {"classes": rows})
        print_line(f"{args.out} holds the average precision of {len(rows):,} classes")
    if test.bad:
        print_line(skipped(test.bad))
    return 0


def _of_class(part: dict[str, Any], number: int) -> dict[str, Any]:
    """The objects of one class."""
    keep = part["labels"] == number
    return {name: values[keep] for name, values in part.items()}


def _percent(share: float) -> str:
    return "-" if share < 0 else f"{100 * share:.1f} %"


def _names(stem: str) -> Any:
    """The stem, then the stem with numbers."""
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def _check_threshold(option: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{option} is {value:g}; use a score from 0 to 1")
