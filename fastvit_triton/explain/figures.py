"""Plots of the report. Each function returns one matplotlib figure; the other modules here compute the data."""

from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..train.plots import BLUE, GRID, INK, MUTED, NARROW, ORANGE, dress, figure
from .costs import Cost
from .published import MODELS, TABLE_2, TABLE_5, TABLE_6, TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAT = "magma"
WIDTH = NARROW  # inches: on a phone, which shows it 358 pixels wide, 9 points are 11 pixels
GREEN = "#2f9e6e"
HEADS = 8  # tiles in a row of attention maps at most
COLD, HOT = 0.35, 0.8  # opacity of the lowest and of the highest value of a map over a picture


def mosaic(tiles: Tensor) -> np.ndarray:
    """Arranges tiles [R, C, h, w] or [R, C, h, w, 3] in a grid, separated by NaN pixels."""
    repeat = -(-24 // max(tiles.shape[2:4]))  # enlarges tiles of a few pixels, so that gaps look narrow
    tiles = tiles.repeat_interleave(repeat, 2).repeat_interleave(repeat, 3)
    gap = max(1, round(max(tiles.shape[2:4]) / 12))
    tail = (0, 0) * (tiles.dim() - 4)
    tiles = F.pad(tiles.float(), (*tail, 0, gap, 0, gap), value=torch.nan)
    R, C, h, w = tiles.shape[:4]
    return tiles.transpose(1, 2).reshape(R * h, C * w, *tiles.shape[4:])[: R * h - gap, : C * w - gap].cpu().numpy()


def draw_predictions(picture: Tensor, chances: Tensor, classes: tuple[str, ...], most: int = 5) -> "Figure":
    """Plots an image [C, H, W] beside its most likely classes, from probabilities [K]."""
    page = figure(WIDTH, 2)
    left, right = page.subplots(1, 2, width_ratios=(1, 2))
    _picture(left, picture)
    best = chances.topk(min(most, len(chances)))
    names = [fill(shorten(classes[i], 28, placeholder="…"), 14) for i in best.indices.tolist()][::-1]
    values = [100 * chance for chance in best.values.tolist()][::-1]
    right.barh(range(len(names)), values, color=[GRID] * (len(names) - 1) + [BLUE])
    for y, value in enumerate(values):
        right.text(value + 1, y, f"{value:.1f} %", va="center", color=INK)
    right.set(xlim=(0, 140), xticks=[])
    right.set_yticks(range(len(names)), names, color=INK, parse_math=False)  # `$` in a name is no formula
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    return page


def draw_why(pictures: Tensor, maps: list[list[tuple[Tensor, str]]], titles: list[tuple[str, str, str]]) -> "Figure":
    """Plots each image beside itself under its heat maps [h, w] ≥ 0, each with what to write below it."""
    slots = 1 + max(map(len, maps))
    columns = min(2, len(pictures)) if slots == 2 else 1
    rows = -(-len(pictures) // columns)
    points = 9 * columns  # letters of one size on a phone, which shows the figure as wide as its screen
    gap = 0.16 * columns  # inches, as all lengths here
    side = (WIDTH - 0.08 * (slots + 1)) / slots
    tall = side * pictures.shape[2] / pictures.shape[3]
    line = 1.3 * points / 72
    below = max(text.count("\n") + 1 for of_image in maps for _, text in of_image) * line
    height = 3 * line + tall + below + gap
    page = figure(columns * WIDTH, rows * height + 1.5 * line, constrained=False)
    width, total = page.get_size_inches()
    letters = int((WIDTH - 0.16) * 72 / (0.62 * points))  # of a line; 0.62 is the mean width of bold letters
    style: dict[str, Any] = {"fontsize": points, "color": MUTED, "parse_math": False}
    for i, (picture, of_image, texts) in enumerate(zip(pictures, maps, titles, strict=True)):
        x = i % columns * WIDTH + 0.08
        y = total - 1.5 * line - (i // columns + 1) * height + below + gap / 2
        for number, (heat, text) in enumerate(((None, ""), *of_image)):
            left = x + number * (side + 0.08)
            axes = page.add_axes((left / width, y / total, side / width, tall / total))
            if heat is None:
                _picture(axes, picture)
                continue
            _overlay(axes, picture, heat)
            for number_of_line, words in enumerate(text.split("\n"), 1):
                page.text((left + side) / width, (y - number_of_line * line) / total, words, ha="right", **style)
        for number, (text, more) in enumerate(zip(texts, ({}, {"color": INK, "weight": "bold"}, {}), strict=True)):
            place = x / width, (y + tall + (2.3 - number) * line) / total
            page.text(*place, shortened(text, letters), **style | more)
    page.text(0.08 / width, 1 - 1.2 * line / total, "Each map has its own scale, from 0 to its largest value.", **style)
    return page


def shortened(text: str, letters: int) -> str:
    """The text, or its beginning and "…" if it has more letters."""
    return text if len(text) <= letters else f"{text[: letters - 1].rstrip()}…"


def _overlay(axes: "Axes", picture: Tensor, heat: Tensor) -> None:
    """Draws a picture [C, H, W] in gray under a smooth heat map [h, w] ≥ 0, which dims cold places."""
    from matplotlib import colormaps

    _picture(axes, picture.mean(0, keepdim=True))
    heat = heat.double().cpu()
    if heat.max() == heat.min():
        return
    size = [max(n, 256) for n in picture.shape[1:]]
    smooth = F.interpolate(heat[None, None], size, mode="bicubic")[0, 0].clamp_min(0)
    shares = (smooth / smooth.max()).numpy()
    colours = colormaps["inferno"](shares)
    colours[..., 3] = COLD + (HOT - COLD) * shares  # without a step to the places where bicubic values were negative
    extent = (-0.5, picture.shape[2] - 0.5, picture.shape[1] - 0.5, -0.5)
    axes.imshow(colours, extent=extent, interpolation="bilinear")


def draw_attention(picture: Tensor, maps: dict[int, Tensor]) -> "Figure":
    """Plots an image above the maps [H, h, w] of each layer, each map from its smallest to its largest value."""
    tiles = {}
    for number, heads in maps.items():
        low, high = heads.amin((-1, -2), keepdim=True), heads.amax((-1, -2), keepdim=True)
        columns = -(-len(heads) // -(-len(heads) // HEADS))  # as many in each row
        blank = (0, 0, 0, 0, 0, -len(heads) % columns)
        scaled = F.pad((heads - low) / (high - low).clamp_min(1e-30), blank, value=torch.nan)
        tiles[number] = columns, mosaic(scaled.unflatten(0, (-1, columns)))
    inner = min(WIDTH - 0.68, 1.1 * max(columns for columns, _ in tiles.values()))  # inches, as all lengths here
    sides = [inner / next(iter(tiles.values()))[0]]  # of the image, which is as wide as the tiles below it
    shapes = [picture.shape[1:], *(shades.shape for _, shades in tiles.values())]
    sides += [inner] * len(tiles)
    heights = [side * shape[0] / shape[1] for side, shape in zip(sides, shapes, strict=True)]
    width, total = inner + 0.68, sum(heights) + 0.1 * len(tiles) + 0.65
    page = figure(width, total, constrained=False)
    y = total - 0.25
    for number, side, height in zip((0, *tiles), sides, heights, strict=True):
        y -= height
        axes = page.add_axes((0.6 / width, y / total, side / width, height / total))
        y -= 0.1
        if not number:
            _picture(axes, picture)
            axes.set_title("image", color=INK, fontsize=10)
            continue
        shades = tiles[number][1]
        axes.imshow(shades, cmap=HEAT, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        _label(axes, shades.shape, [], [f"{number}"])
    page.text(0.1 / width, 0.5, "attention layer", rotation=90, va="center", color=MUTED)
    page.text((0.6 + inner / 2) / width, 0.1 / total, "heads", ha="center", color=MUTED)
    return page


def draw_overlays(picture: Tensor, heats: dict[str, Tensor]) -> "Figure":
    """Plots an image [C, H, W] with each heat map [h, w] overlaid; keys of `heats` are titles."""
    columns = 2
    rows = -(-(len(heats) + 1) // columns)
    page = figure(WIDTH, rows * (WIDTH / columns * picture.shape[1] / picture.shape[2] + 0.35))
    grid = page.subplots(rows, columns, squeeze=False).flat
    for axes in grid:
        axes.axis("off")
    _picture(grid[0], picture)
    grid[0].set_title("image", color=INK, fontsize=10)
    for axes, (title, heat) in zip(grid[1:], heats.items(), strict=False):
        _overlay(axes, picture, heat - heat.min())
        axes.set_title(title, color=INK, fontsize=10)
    return page


def draw_layers(panels: dict[str, tuple[dict[int, Tensor], str]]) -> "Figure":
    """Scatter plots of values per layer and head, with a line through each layer's mean."""
    page = figure(WIDTH, 2.4 * len(panels))
    numbers = [number for values, _ in panels.values() for number in values]
    for axes, (title, (values, unit)) in zip(
        page.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True
    ):
        axes.plot(list(values), [float(row.mean()) for row in values.values()], color=GRID, lw=2, zorder=1)
        for at, row in values.items():
            axes.scatter([at] * len(row), row.tolist(), s=22, color=BLUE, alpha=0.75, zorder=2)
        dress(axes, title, unit, "attention layer")
        axes.set_xlim(min(numbers) - 0.4, max(numbers) + 0.4)
        axes.set_ylim(0, 1.08 * max(float(torch.cat([*values.values()]).max()), 1e-6))
    return page


def draw_tokens(picture: Tensor, norms: Tensor, colours: Tensor, prefix: list[float]) -> "Figure":
    """Plots an image, the norms of its patch tokens [h, w], and their first principal components as RGB [h, w, 3]."""
    page = figure(WIDTH, WIDTH / 3 * picture.shape[1] / picture.shape[2] + 1.4)
    places = page.add_gridspec(2, 3, height_ratios=(1, 0.06))  # the bar in a row of its own, so that pictures align
    extent = (-0.5, picture.shape[2] - 0.5, picture.shape[1] - 0.5, -0.5)
    first, second, third = (page.add_subplot(places[0, i]) for i in range(3))
    _picture(first, picture)
    shown = second.imshow(norms.cpu().numpy(), cmap=HEAT, interpolation="nearest", extent=extent)
    third.imshow(colours.cpu().numpy(), interpolation="nearest", extent=extent)
    for axes, title in ((first, "image"), (second, "token norm"), (third, "components")):
        axes.set_title(title, color=INK, fontsize=10)
        axes.axis("off")
    bar = page.colorbar(shown, cax=page.add_subplot(places[1, :]), location="bottom")
    bar.outline.set_visible(False)
    others = f"; class token and registers: {', '.join(f'{n:.2g}' for n in prefix[:5])}" if prefix else ""
    bar.set_label(f"norm{others}", fontsize=9, color=MUTED)
    page.supxlabel("components: the first three principal ones\nas red, green, blue", fontsize=9, color=MUTED)
    return page


def draw_positions(similarity: Tensor) -> "Figure":
    """Plots cosine similarities [h, w, h, w] as an h × w grid of tiles (ViT, figure 7 centre)."""
    h, w = similarity.shape[:2]
    tiles = mosaic(similarity)
    page = figure(WIDTH, 1.1 + (WIDTH - 0.6) * tiles.shape[0] / tiles.shape[1])
    axes = page.subplots()
    shown = axes.imshow(tiles, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    _label(axes, tiles.shape, [f"{i + 1}" for i in range(w)], [f"{i + 1}" for i in range(h)])
    axes.set_xlabel("column of the patch", color=MUTED)
    axes.set_ylabel("row of the patch", color=MUTED)
    text = "cosine similarity to the patch of the tile's place"
    bar = page.colorbar(shown, ax=axes, location="bottom", aspect=40, ticks=(-1, -0.5, 0, 0.5, 1), label=text)
    bar.outline.set_visible(False)
    return page


def draw_bands(bands: Tensor) -> "Figure":
    """Plots the rotation per patch of each rotary channel pair, vertical and horizontal, in radians [pairs, 2]."""
    page = figure(WIDTH, 2.8)
    axes = page.subplots()
    at = range(1, len(bands) + 1)
    for axis, (colour, label) in enumerate(((BLUE, "downwards"), (ORANGE, "to the right"))):
        axes.plot(at, bands[:, axis].abs().tolist(), "o", ms=5, color=colour, label=label)
    dress(axes, "Rotation from one patch to the next", "radians", "channel pair")
    axes.legend(frameon=False, labelcolor=INK)
    return page


def draw_filters(components: Tensor) -> "Figure":
    """Plots patch filters [K, C, P, P] in [0, 1], seven per row, numbered; frames show where a white one ends."""
    K, C = components.shape[:2]
    colour = components.expand(-1, 3, -1, -1) if C == 1 else components[:, :3]
    columns = min(7, K)
    rows = -(-K // columns)
    page = figure(WIDTH, 0.2 + (WIDTH / columns + 0.1) * rows)
    for i, axes in enumerate(page.subplots(rows, columns, squeeze=False).flat):
        if i >= K:
            axes.axis("off")
            continue
        axes.imshow(colour[i].movedim(0, -1).cpu().numpy(), interpolation="nearest", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{i + 1}", color=INK, fontsize=9, pad=3)
        axes.spines[:].set_color(MUTED)
    return page


def draw_similarity(values: dict[int, float]) -> "Figure":
    """Plots the mean cosine similarity of tokens after attention layers, by their number."""
    page = figure(WIDTH, 2.4)
    axes = page.subplots()
    axes.plot(list(values), list(values.values()), "o-", color=BLUE, lw=2, ms=5)
    dress(axes, "Similarity of an image's tokens", "mean cosine similarity", "after attention layer")
    axes.set_ylim(min(0, *values.values()) - 0.06, 1.06)
    return page


def draw_cost(rows: list[Cost]) -> "Figure":
    """Dot plot of FLOPs by image size, split into parts linear and quadratic in N, on a logarithmic scale."""
    page = figure(WIDTH, 1.3 + 0.46 * len(rows))
    axes = page.subplots()
    y = np.arange(len(rows))[::-1]
    for values, colour, label in (
        ([row.linear_flops for row in rows], BLUE, "projections and MLPs, grow with N"),
        ([row.attention_flops for row in rows], ORANGE, "attention, grows with N²"),
    ):
        axes.plot([value / 1e9 for value in values], y, "o", ms=7, color=colour, label=label)
    axes.grid(color=GRID)
    axes.set_xscale("log")
    axes.set_yticks(y, [f"{fill(row.label, 18)}\n{row.tokens:,} tokens" for row in rows], color=INK, fontsize=9)
    axes.set_xlabel("GFLOP per image", color=MUTED)
    axes.tick_params(which="both", length=0, colors=MUTED)
    axes.spines[:].set_visible(False)
    page.legend(loc="outside upper left", frameon=False, labelcolor=INK, fontsize=9)
    return page


def draw_confusion(counts: Tensor, classes: tuple[str, ...]) -> "Figure":
    """Plots a confusion matrix [K, K]; rows are true classes, columns predictions."""
    K = len(classes)
    page = figure(WIDTH, WIDTH)
    axes = page.subplots()
    shade = counts.double().log1p()
    axes.imshow(shade.numpy(), cmap="Blues", interpolation="nearest")
    if K <= 20:
        for i, j in counts.nonzero().tolist():
            colour = "white" if shade[i, j] > shade.max() / 2 else INK
            axes.text(j, i, f"{counts[i, j]}", ha="center", va="center", color=colour, fontsize=min(9, 90 / K))
        turned: dict[str, Any] = (
            {} if max(map(len, classes)) < 4 else dict(rotation=60, ha="right", rotation_mode="anchor")
        )
        axes.set_xticks(range(K), classes, color=INK, parse_math=False, **turned)
        axes.set_yticks(range(K), classes, color=INK, parse_math=False)
    axes.set_xlabel("predicted class", color=MUTED)
    axes.set_ylabel("true class", color=MUTED)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return page


def draw_published() -> "Figure":
    """Plots tables 2, 5 and 6 of the ViT paper, labelled as published."""
    page = figure(WIDTH, 10.5)
    first, second, third = page.subplots(3, 1, height_ratios=(1, 1, 1.5))
    for i, (name, values) in enumerate(TABLE_2.items()):
        points = [(at + 0.12 * (i - 2), value) for at, value in enumerate(values) if value is not None]
        colour = (BLUE, GREEN, ORANGE, MUTED, INK)[i]
        first.plot([at for at, _ in points], [value for _, value in points], "o", color=colour, label=name)
    dress(first, "Table 2 (published)", "accuracy, %", "")
    first.set_xticks(range(len(TASKS)), TASKS, fontsize=9, rotation=30, ha="right", rotation_mode="anchor")
    first.set_ylim(60, 101)
    first.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left", ncols=2)
    for (name, values), colour in zip(TABLE_5.items(), (MUTED, ORANGE, BLUE), strict=True):
        points = [(at, value) for at, value in enumerate(values) if value is not None]
        second.plot([at for at, _ in points], [value for _, value in points], "o", color=colour, label=name)
    dress(second, "Table 5 (published)", "ImageNet top-1, %", "ViT, by pre-training data")
    second.set_xticks(range(len(MODELS)), MODELS)
    second.set_ylim(60, 92)
    second.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    at = 0
    names: list[str] = []
    for (family, models), colour in zip(TABLE_6.items(), (BLUE, GREEN, ORANGE), strict=True):
        third.barh(range(at, at + len(models)), list(models.values()), color=colour, label=family)
        names += models
        at += len(models)
    third.set_yticks(range(at), names, fontsize=9, color=INK)
    third.invert_yaxis()
    third.set_xscale("log")
    third.set_title("Table 6 (published)", loc="left", color=INK, fontsize=12, fontweight="bold")
    third.set_xlabel("pre-training compute, exaFLOP", color=MUTED)
    third.tick_params(which="both", length=0, colors=MUTED)
    third.spines[:].set_visible(False)
    third.legend(frameon=False, labelcolor=INK, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.31))
    return page


def _picture(axes: "Axes", picture: Tensor) -> None:
    """Draws an image [C, H, W] in [0, 1]."""
    axes.imshow(picture.movedim(0, -1).squeeze(-1).cpu().numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.axis("off")


def _label(axes: "Axes", shape: tuple[int, ...], columns: list[str], rows: list[str]) -> None:
    """Labels the columns and rows of a mosaic."""
    for names, size, put in ((columns, shape[1], axes.set_xticks), (rows, shape[0], axes.set_yticks)):
        step = -(-len(names) // 16) or 1
        put([(i + 0.5) * size / len(names) - 0.5 for i in range(0, len(names), step)], names[::step], color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
