"""Training curves and a grid of predictions. matplotlib is imported on first use, without pyplot's global state."""

from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files import printable
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


def draw_curves(history: list[dict], path: Path) -> None:
    """Writes a PNG of loss, accuracy or average precision, and learning rate by epoch.

    Args:
        history: rows of the log.
        path: file to write.
    """
    curves(history).savefig(path, format="png", dpi=150)


def curves(history: list[dict], stacked: bool = False) -> "Figure":
    """A figure of loss, accuracy or average precision, and learning rate by epoch.

    Args:
        history: rows of the log.
        stacked: one plot above the other, for narrow screens, instead of side by side.
    """
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
            heights = [100 * row[key] for row in tested]
            accuracy.plot([row["epoch"] for row in tested], heights, color=colour, label=label, **style)
        accuracy.set_title(f"{100 * tested[-1]['test_ap']:.1f} %", loc="right", color=ORANGE, fontsize=12)
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


def draw_predictions(data: Data, score: Score, path: Path, max_images: int = 60) -> None:
    """Writes a PNG with a grid of test images and predictions: errors first, in red, with the correct class.

    Args:
        data: data of the run.
        score: score on `data.test`, with predictions.
        path: file to write.
        max_images: largest number of images in the grid.
    """
    predictions(data, score, max_images).savefig(path, format="png", dpi=150)


def predictions(data: Data, score: Score, max_images: int = 60) -> "Figure":
    """The figure of `draw_predictions`, which documents the arguments."""
    predictions = score.predictions
    targets = score.targets
    accuracy = score.accuracy
    assert predictions is not None and targets is not None and accuracy is not None  # of a classifier
    wrong = (predictions != targets).nonzero().flatten()
    correct = (predictions == targets).nonzero().flatten()
    sample = correct[torch.linspace(0, max(len(correct) - 1, 0), min(max_images, len(correct))).long()]
    chosen = torch.cat([wrong, sample])[:max_images].tolist()
    names = tuple(map(printable, data.classes))
    short = max(map(len, names)) <= 6
    columns = min(12 if short else 6, len(chosen))
    rows = -(-len(chosen) // columns)
    width = max(columns * (1 if short else 2.2), 8.4)  # inches, at least those of the title
    inches = 0.95 if short else 1.6  # of an image
    height = (inches + 0.45) * rows + 0.6  # 0.45 inches are for the caption of a row
    page = figure(width + 0.4, height, constrained=False)  # which moves columns together until captions overlap
    side = 0.2 / (width + 0.4)
    page.subplots_adjust(side, 0.1 / height, 1 - side, 1 - 0.95 / height, 0.05, 0.45 / inches)
    shown = min(len(wrong), max_images)
    page.suptitle(
        f"{100 * accuracy:.1f} % of {len(targets):,} test images correct; {len(wrong):,} wrong"
        + (f", {'shown first' if shown == len(wrong) else f'{shown} of them shown'}, in red" if shown else ""),
        color=INK,
        fontsize=12,
        y=1 - 0.15 / height,
    )
    for i, axes in enumerate(page.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if i < len(chosen):
            predicted = names[int(predictions[chosen[i]])]
            expected = names[int(targets[chosen[i]])]
            _draw_image(axes, data.test.display_image(chosen[i]), predicted, expected, 0.9 * width / columns)
    return page


def _draw_image(axes: "Axes", image: Tensor, predicted: str, expected: str, width: float) -> None:
    """Draws one image [C, H, W] and its caption, whose lines are at most `width` inches long."""
    axes.imshow(image.movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    if predicted == expected:
        axes.set_title(_shorten(predicted, width), fontsize=8, color=MUTED, pad=3, parse_math=False)
        return
    axes.axis("on")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=RED, linewidth=3)
    title = f"{_shorten(predicted, width)}\n{_shorten(f'true: {expected}', width)}"
    axes.set_title(title, fontsize=8, color=RED, pad=4, fontweight="bold", parse_math=False)  # `$` is no formula


def draw_detections(data: Data, score: Score, path: Path, max_images: int = 12, threshold: float = 0.4) -> None:
    """Writes a PNG with test images and the boxes found in them; wrong ones are red, missed objects dashed.

    Args:
        data: data of the run.
        score: score on `data.test`, with detections.
        path: file to write.
        max_images: largest number of images.
        threshold: least score of a box.
    """
    detections(data, score, max_images, threshold).savefig(path, format="png", dpi=150)


def detections(data: Data, score: Score, max_images: int = 12, threshold: float = 0.4) -> "Figure":
    """The figure of `draw_detections`, which documents the arguments."""
    assert score.detections is not None and score.objects is not None and score.metrics is not None  # of a detector
    count = min(max_images, len(score.detections))
    columns = min(6, count)
    rows = -(-count // columns)
    page = figure(max(2 * columns, 8.4), 2.1 * rows + 0.5)
    title = f"AP {100 * score.metrics['ap']:.1f} %, AP50 {100 * score.metrics['ap50']:.1f} % of "
    title += f"{len(score.objects):,} test images; boxes with a score of {threshold:g} and more: "
    title += "wrong ones red, missed ones dashed"
    page.suptitle(title, color=INK, fontsize=11)
    for i, axes in enumerate(page.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if i < count:
            image = data.test.display_image(i).movedim(0, -1).squeeze(-1).numpy()
            axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            _draw_boxes(axes, score.detections[i], score.objects[i], data.classes, threshold)
    return page


def _draw_boxes(
    axes: "Axes", found: dict[str, Tensor], objects: dict[str, Tensor], names: Any, threshold: float
) -> None:
    """Draws the boxes of one image, in pixels, whose centres have whole coordinates."""
    from matplotlib.patches import Rectangle

    missed = set(range(len(objects["labels"])))
    for box, label, score in zip(found["boxes"], found["labels"].tolist(), found["scores"].tolist(), strict=True):
        if score < threshold:
            continue
        same = [i for i in missed if int(objects["labels"][i]) == label]
        overlaps = {i: float(intersection_over_union(box, objects["boxes"][i])) for i in same}
        best = max(overlaps, key=overlaps.__getitem__, default=-1)
        right = best >= 0 and overlaps[best] >= 0.5
        missed -= {best} if right else set()
        colour = ORANGE if right else RED
        x0, y0, x1, y1 = (box - 0.5).tolist()
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color=colour, lw=1.5))
        text = f"{printable(names[label])} {score:.2f}"
        plate = dict(facecolor=colour, edgecolor="none", pad=1.0)
        above = y0 > 0.1 * axes.get_ylim()[0]  # whose y axis points down
        place = dict(y=y0, va="bottom") if above else dict(y=y1, va="top")
        axes.text(x=x0, s=text, color="white", fontsize=7, bbox=plate, parse_math=False, **place)
    for i in sorted(missed):
        x0, y0, x1, y1 = (objects["boxes"][i] - 0.5).tolist()
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color="white", lw=1, ls="--"))


def _shorten(text: str, width: float) -> str:
    """The text, or its beginning and "…", at most `width` inches long in bold type of 8 points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    bold = FontProperties(weight="bold", size=8)
    for length in range(min(len(text), 60), 0, -1):
        line = text if length == len(text) else f"{text[: length - 1].rstrip()}…"
        if TextPath((0, 0), line.replace("$", "S"), prop=bold).get_extents().width <= 72 * width:
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
