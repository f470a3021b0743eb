"""Detectors: models that find objects in images."""

import argparse
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...files import printable, replacing
from ..console import print_line
from ..images import find_images, names_of, readable_images
from ..results import cell, write_rows
from .task import TOKEN, Task, TrainedModel, opened, reading

if TYPE_CHECKING:
    from ...explain import Panel
    from ...train.recipes import Recipe

BOXES = "give --data shapes or scenes, or a folder with annotations of COCO, Roboflow or YOLO"


class Detect(Task):
    """Finds objects: their boxes and classes."""

    name = "detect"
    command = "predict"
    losses = ("detection",)
    recipes = "scenes, shapes or boxes"
    in_colour = "boxes-tiny"
    has_boxes = True

    def check(self, settings: dict, recipe: "Recipe") -> None:
        """Raises ValueError if the data have no boxes, a package is not installed, or as for others."""
        from ...train.detection import has_boxes
        from ...train.detection.average_precision import pycocotools_classes

        if not has_boxes(settings["data"]):
            raise ValueError(f"data {settings['data']!r} has no boxes, which {recipe.model} learns; {BOXES}")
        super().check(settings, recipe)
        pycocotools_classes()  # which the first epoch ends with

    def check_model(self, settings: dict, recipe: "Recipe") -> None:
        """Raises ValueError if there is a teacher."""
        if settings["teacher"] or settings["distillation"] != "hard":
            raise ValueError(f"{'--teacher' if settings['teacher'] else '--distillation'} {TOKEN}")

    def notes(self, model: Any) -> Iterator[str]:
        """What a user has to know of a detector that starts from random weights."""
        yield (
            "a detector with random weights knows objects from these images only; for few images give pretrained "
            "weights, such as --model detr_resnet50 --weights FILE"
        )
        if model.config.depths and model.config.frozen:
            yield "the stem and first stage of its ResNet are not trained and stay random; leave --model out"

    def predict(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints a line for each object in image files, draws and writes them."""
        import torch

        from ...train.detection.batches import prepared
        from ...train.detection.draw import draw_boxes

        threshold = 0.4 if args.threshold is None else args.threshold
        files = find_images(args.images)
        if args.draw is not None:
            args.draw.mkdir(exist_ok=True)
        records: list[dict[str, Any]] = []
        drawn: set[str] = set()
        for file in readable_images(files, args.max_pixels, trained.transform.levels):
            image = opened(file, trained, args)
            with torch.no_grad():
                outputs = trained.model(prepared(image, trained.transform)[None].to(trained.device))
            (found,) = trained.model.detections(outputs, [(image.height, image.width)], threshold)
            order = found["scores"].argsort(descending=True)
            found = {name: values[order].cpu() for name, values in found.items()}
            objects: list[dict[str, Any]] = [
                dict(label=trained.classes[label], score=score, box=box)
                for label, score, box in zip(*(found[n].tolist() for n in ("labels", "scores", "boxes")), strict=True)
            ]
            records.append(dict(file=cell(file), width=image.width, height=image.height, objects=objects))
            if args.out is None:
                _print_objects(file, objects, threshold)
            if args.draw is not None:
                names = chain([file.stem], (f"{file.stem}-{n}" for n in count(2)))
                drawn.add(name := next(name for name in names if name not in drawn))
                with replacing(args.draw / f"{name}.png") as temporary:
                    draw_boxes(image, found, trained.classes).save(temporary, format="PNG")
        if args.out is not None and records:
            corners = ("left", "top", "right", "bottom")
            rows = [
                {"file": record["file"], "label": thing["label"], "score": thing["score"]}
                | dict(zip(corners, thing["box"], strict=True))
                for record in records
                for thing in record["objects"]
            ]
            write_rows(args.out, rows, records, ("file", "label", "score", *corners))
            print_line(f"{args.out} holds {len(rows):,} objects of {len(records):,} images")
        return 0 if len(records) == len(files) else 2

    def evaluate(self, trained: TrainedModel, args: argparse.Namespace) -> int:
        """Prints the average precision of a detector on test images, by class and in total."""
        from ...intervals import PRECISIONS, percent, span
        from ...train.data.findings import quiet
        from ...train.detection import average_precision, evaluate_detector, has_boxes, load_detection_test
        from ...train.detection.evaluate import DRAWS
        from ...train.outputs import skipped
        from ...train.step import autocast_dtype

        data = args.data or trained.data
        assert data is not None  # one of them is given
        if not has_boxes(data):
            raise ValueError(f"data {data!r} has no boxes, which {args.checkpoint} predicts; {BOXES}")
        with quiet():
            arguments = data, trained.classes, trained.transform, trained.batch_size
            test = load_detection_test(*arguments, **reading(trained, args))
        if lost := test.findings.lost_labels():
            print_line(f"{data}, left out or missing: {lost}")
        score = evaluate_detector(trained.model, test, autocast_dtype(trained.device))
        assert score.detections is not None and score.objects is not None  # of a detector
        images = len(score.objects)
        table = Table("class", "objects", "AP", "95 % interval", "AP50", "AP75")
        rows = []
        for number, label in enumerate(trained.classes):
            found = [_of_class(part, number) for part in score.detections]
            wanted = [_of_class(part, number) for part in score.objects]
            count = sum(int((~part["crowd"]).sum()) if "crowd" in part else len(part["labels"]) for part in wanted)
            if label:
                numbers = average_precision(found, wanted, DRAWS) if count else {}
                names = ("ap", "ap50", "ap75", "ap_low", "ap_high")
                scores = {name: None if numbers.get(name, -1.0) < 0 else numbers[name] for name in names}
                ap, ap50, ap75 = (percent(scores[name], images) for name in names[:3])
                bounds = span(scores["ap_low"], scores["ap_high"], images)
                table.add_row(Text(printable(label)), f"{count:,}", ap, bounds, ap50, ap75)
                rows.append({"class": label, "objects": count} | scores)
        Console().print(table)
        numbers = average_precision(score.detections, score.objects, DRAWS)
        known = {name: value for name, value in numbers.items() if value >= 0}
        table = Table("metric", "value", "95 % interval")
        sizes = {f"ap_{size}": f"AP of {size} objects" for size in ("small", "medium", "large")}
        for key, name in (PRECISIONS | sizes).items():
            if key in known:
                bounds = span(known.get(f"{key}_low"), known.get(f"{key}_high"), images)
                table.add_row(name, percent(known[key], images), bounds)
        table.add_row("loss", f"{score.loss:.4f}", "-")
        Console().print(table)
        print_line(
            f"{images:,} test images. Intervals are ± 1.96 standard deviations of a bootstrap over the images; "
            "AP by size and loss have none."
        )
        if args.out is not None:
            write_rows(args.out, rows, {"images": images, "loss": score.loss} | known | {"classes": rows})
            print_line(f"{args.out} holds the average precision of {len(rows):,} classes")
        if test.bad:
            print_line(skipped(test.bad))
        return 0

    def panels(
        self, trained: TrainedModel, files: list[Path], classes: tuple[str, ...], args: argparse.Namespace
    ) -> "Iterator[Panel]":
        """Where the queries of objects look in the images."""
        from ...explain import query_panels
        from ...train.data.transform import read_image
        from ...train.detection.batches import prepared

        if args.query is not None:
            raise ValueError(f"--query {args.query} is for classifiers; a detector shows the queries of its objects")
        images = [
            prepared(read_image(file, args.max_pixels, trained.transform.levels), trained.transform) for file in files
        ]
        pictures = [trained.transform.restore(image) for image in images]
        names = names_of(files)
        yield from query_panels(trained.model, [image.to(trained.device) for image in images], pictures, names, classes)


def _print_objects(file: Path, objects: list[dict[str, Any]], threshold: float) -> None:
    for thing in objects:
        left, top, right, bottom = map(round, thing["box"])
        share = f"{printable(thing['label'])} {100 * thing['score']:.1f} %"
        print_line(f"{file}: {share} at {left},{top} to {right},{bottom}")
    if not objects:
        print_line(f"{file}: no object has a score of {threshold:g} or more")


def _of_class(part: dict[str, Any], number: int) -> dict[str, Any]:
    """The objects of one class."""
    keep = part["labels"] == number
    return {name: values[keep] for name, values in part.items()}
