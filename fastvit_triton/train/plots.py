"""Training curves and a grid of predictions. matplotlib is imported on first use, without pyplot's global state."""

from math import floor, log10
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files import printable
from ..intervals import accuracy_text, percent, precision_text
from .data import Data
from .detection import intersection_over_union
from .loop import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e4e7eb"
BLUE = "#2f6fde"
ORANGE = "#e8833a"
RED = "#d64545"
NARROW = 4.2  # inches, of figures that a phone shows


def curves(history: list[dict], stacked: bool = False) -> "Figure":
    """A figure of loss, accuracy or average precision, and learning rate by epoch."""
    page = figure(NARROW, 6.9) if stacked else figure(12.5, 3.6)
    epochs = [row["epoch"] for row in history]
    loss, accuracy, rate = page.subplots(3, 1) if stacked else page.subplots(1, 3)
    style: dict[str, Any] = {"lw": 2, "markersize": 5}
    tested = [row for row in history if row["test_loss"] is not None]
    for key, rows, colour, label in (("train", history, BLUE, "training, augmented"), ("test", tested, ORANGE, "test")):
        style["marker"] = "o" if len(rows) < 10 else ""
        at = [row["epoch"] for row in rows]
        loss.plot(at, [row[f"{key}_loss"] for row in rows], color=colour, label=label, **style)
        with_accuracy = [row for row in rows if row[f"{key}_accuracy"] is not None]
        heights = [100 * row[f"{key}_accuracy"] for row in with_accuracy]
        if with_accuracy:
            accuracy.plot([row["epoch"] for row in with_accuracy], heights, color=colour, label=label, **style)
    name = "Accuracy"
    if tested and "test_ap" in tested[-1]:
        name = "Average precision"
        for key, colour, label in (("test_ap", ORANGE, "AP"), ("test_ap50", BLUE, "AP50")):
            known = [row for row in tested if row[key] is not None]
            heights = [100 * row[key] for row in known]
            accuracy.plot([row["epoch"] for row in known], heights, color=colour, label=label, **style)
        accuracy.set_title(percent(tested[-1]["test_ap"]), loc="right", color=ORANGE, fontsize=12)
        accuracy.legend(frameon=False, labelcolor=INK)
    style["marker"] = "o" if len(epochs) < 10 else ""
    rates = [row["lr"] for row in history]
    power = floor(log10(max(rates))) if max(rates) > 0 else 0
    rate.plot(epochs, [value / 10**power for value in rates], color=INK, **style)
    if tested and tested[-1]["test_accuracy"] is not None:
        accuracy.set_title(f"{100 * tested[-1]['test_accuracy']:.1f} %", loc="right", color=ORANGE, fontsize=12)
    scale = rf"$\times\,10^{{{power}}}$" if power else ""
    for axes, title, unit in ((loss, "Loss", "nats"), (accuracy, name, "%"), (rate, "Learning rate", scale)):
        dress(axes, title, unit)
    above = dict(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)  # beside the title
    loss.legend(frameon=False, labelcolor=INK, fontsize=9, handlelength=1.2, columnspacing=1, **above)
    return page


def mistakes_first(score: Score) -> list[int]:
    """Numbers of a classifier's test images: errors, the most confident first, then the least confident successes."""
    assert score.predictions is not None and score.targets is not None and score.confidences is not None
    wrong = score.predictions != score.targets
    return torch.where(wrong, -score.confidences - 2, score.confidences).argsort(stable=True).tolist()


def predictions(data: Data, score: Score, max_images: int = 60) -> "Figure":
    """A figure with a grid of test images, predicted classes and their probabilities.

    Errors come first, in red and with the correct class, the most confident one first; then correct predictions, the
    least confident one first.
    """
    predictions, targets, confidences = score.predictions, score.targets, score.confidences
    assert predictions is not None and targets is not None and confidences is not None  # of a classifier
    assert score.accuracy is not None
    wrong = predictions != targets
    order = mistakes_first(score)
    names = tuple(map(printable, data.classes))
    short = max(map(len, names)) <= 6
    columns, rows = _grid(min(max_images, len(order)), 10 if short else 6)
    chosen = order[: rows * columns]
    width = max(columns * (1 if short else 2.2), 9.0)  # inches, at least those of the title
    inches = min(0.9 * width / columns, 1.9)  # of an image
    height = (inches + 0.45) * rows + 0.6  # 0.45 inches are for the caption of a row
    page = figure(width + 0.4, height, constrained=False)  # which moves columns together until captions overlap
    side = 0.2 / (width + 0.4)
    page.subplots_adjust(side, 0.1 / height, 1 - side, 1 - 0.95 / height, 0.05, 0.45 / inches)
    errors = int(wrong.sum())
    count = f"the {len(chosen):,} most confident of {errors:,}" if errors > len(chosen) else f"{errors:,}"
    parts = [f"{count} error{'s' * (errors != 1)} in red, the most confident first"] if errors else []
    parts += ["correct predictions, the least confident first"] if errors < len(chosen) else []
    shown = "; ".join(parts)
    title = f"Test accuracy {accuracy_text(score.accuracy, len(targets))}\n{shown}"
    page.suptitle(title, color=INK, fontsize=10, y=1 - 0.1 / height)
    for i, axes in zip(chosen, page.subplots(rows, columns, squeeze=False).flat, strict=True):
        predicted, expected = names[int(predictions[i])], names[int(targets[i])]
        image = data.test.display_image(i)
        _draw_image(axes, image, predicted, float(confidences[i]), expected, 0.9 * width / columns)
    return page


def _grid(images: int, most: int) -> tuple[int, int]:
    """The number of columns, at most `most`, whose full rows hold the most images, and that of rows."""
    counts = range(most // 2 + 1, most + 1) if images > most else [max(images, 1)]
    columns = max(counts, key=lambda columns: (images // columns * columns, columns))
    return columns, max(images // columns, 1)


def _draw_image(axes: "Axes", image: Tensor, predicted: str, confidence: float, expected: str, width: float) -> None:
    """Draws one image [C, H, W] and its caption, whose lines are at most `width` inches long."""
    axes.imshow(image.movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    right = predicted == expected
    share = f", {100 * confidence:.0f} %"
    lines = [_shorten(predicted, width, share) + share]
    lines += [] if right else [_shorten(f"true: {expected}", width)]
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=GRID if right else RED, linewidth=1 if right else 3)
    style: dict[str, Any] = dict(color=MUTED, pad=3) if right else dict(color=RED, pad=4, fontweight="bold")
    axes.set_title("\n".join(lines), fontsize=8, parse_math=False, **style)  # `$` is no formula


def detections(data: Data, score: Score, max_images: int = 12, threshold: float = 0.4) -> "Figure":
    """A figure with test images and the boxes found in them: right ones blue, wrong ones red, missed objects dashed.

    The image with the most confident wrong box comes first; of those without one, that with the most missed objects.
    """
    assert score.detections is not None and score.objects is not None and score.metrics is not None  # of a detector
    judged = [_judge(*pair, threshold) for pair in zip(score.detections, score.objects, strict=True)]
    worst = []  # of each image: the score of the most confident wrong box, and the number of missed objects
    for found, (boxes, missed) in zip(score.detections, judged, strict=True):
        wrong = (float(found["scores"][k]) for k, right in boxes.items() if not right)
        worst.append((max(wrong, default=0.0), len(missed)))
    columns, rows = _grid(min(max_images, len(judged)), 6)
    page = figure(max(2 * columns, 8.4), 2.1 * rows + 0.5)
    title = f"Test {precision_text(score.metrics, score.images)}\n"
    least = f"boxes with a score of at least {100 * threshold:g} %"
    title += f"{least}: right ones blue, wrong ones red, missed objects dashed"
    page.suptitle(title, color=INK, fontsize=10)
    chosen = sorted(range(len(judged)), key=worst.__getitem__, reverse=True)[: rows * columns]
    for i, axes in zip(chosen, page.subplots(rows, columns, squeeze=False).flat, strict=True):
        axes.axis("off")
        image = data.test.display_image(i).movedim(0, -1).squeeze(-1).numpy()
        axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        _draw_boxes(axes, score.detections[i], score.objects[i], *judged[i], data.classes)
    return page


def _judge(found: dict[str, Tensor], objects: dict[str, Tensor], threshold: float) -> tuple[dict[int, bool], set[int]]:
    """Which boxes of an image with at least this score are right, by number, and the numbers of missed objects."""
    missed = set(range(len(objects["labels"])))
    boxes = {}
    for k in (found["scores"] >= threshold).nonzero().flatten().tolist():
        same = [i for i in missed if objects["labels"][i] == found["labels"][k]]
        overlaps = {i: float(intersection_over_union(found["boxes"][k], objects["boxes"][i])) for i in same}
        best = max(overlaps, key=overlaps.__getitem__, default=-1)
        boxes[k] = best >= 0 and overlaps[best] >= 0.5
        missed -= {best} if boxes[k] else set()
    return boxes, missed


def _draw_boxes(
    axes: "Axes",
    found: dict[str, Tensor],
    objects: dict[str, Tensor],
    boxes: dict[int, bool],
    missed: set[int],
    names: Any,
) -> None:
    """Draws the boxes of one image, in pixels, whose centres have whole coordinates."""
    from matplotlib.patches import Rectangle

    def outline(box: Tensor, **style: Any) -> tuple[float, ...]:
        x0, y0, x1, y1 = (box - 0.5).tolist()
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, **style))
        return x0, y0, x1, y1

    for i in sorted(missed):
        outline(objects["boxes"][i], color="white", lw=1, ls="--")
    width, height = axes.get_xlim()[1], axes.get_ylim()[0]  # the y axis points down
    taken: list[tuple[float, float]] = []  # left and lower ends of labels
    for k, right in sorted(boxes.items(), key=lambda item: item[1]):  # wrong ones are labelled first
        colour = BLUE if right else RED
        x0, y0, _, y1 = outline(found["boxes"][k], color=colour, lw=1.5)
        text = f"{printable(names[int(found['labels'][k])])} {100 * float(found['scores'][k]):.0f} %"
        left = max(0.0, min(x0, width * (1 - 0.037 * len(text))))
        line = 0.11 * height
        places = [y for y in (y0, y1 + line, y0 + line, y1) if line <= y <= height] or [line]
        lower = next((y for y in places if all(not _meet((left, y), other, width, line) for other in taken)), places[0])
        taken.append((left, lower))
        plate = dict(facecolor=colour, edgecolor="none", pad=1.0)
        label = axes.text(left, lower, text, va="bottom", color="white", fontsize=7, bbox=plate, parse_math=False)
        label.set_in_layout(False)  # so that all images have one size


def _meet(one: tuple[float, float], other: tuple[float, float], width: float, line: float) -> bool:
    """True if two labels of the usual length, given by their left and lower ends, overlap."""
    return abs(one[0] - other[0]) < 0.6 * width and abs(one[1] - other[1]) < line


def _shorten(text: str, width: float, after: str = "") -> str:
    """The text, or its beginning and "…", in bold type of 8 points: with `after` at most `width` inches long."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    bold = FontProperties(weight="bold", size=8)
    for length in range(min(len(text), 60), 0, -1):
        line = text if length == len(text) else f"{text[: length - 1].rstrip()}…"
        if TextPath((0, 0), line.replace("$", "S") + after, prop=bold).get_extents().width <= 72 * width:
            return line
    return "…"


def figure(width: float, height: float, constrained: bool = True) -> "Figure":
    """An empty white figure; width and height in inches. Unless told otherwise, the constrained layout places plots."""
    from matplotlib.figure import Figure

    if not constrained:
        return Figure(figsize=(width, height), facecolor="white")
    page = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    layout: Any = page.get_layout_engine()
    layout.set(w_pad=0.08, h_pad=0.08)
    return page


def dress(axes: "Axes", title: str, unit: str, below: str = "epoch") -> None:
    """Styles a plot over integer x values, by default epochs; `below` labels the x axis."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel(below, color=MUTED)
    locator: Any = axes.xaxis.get_major_locator()
    locator.set_params(integer=True)
    axes.set_ylabel(unit, color=MUTED)
    axes.tick_params(colors=MUTED, length=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
