"""Where the queries of detectors look: the map of DETR's last cross-attention, or the points of Deformable DETR's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.deformable import sampling_points
from .page import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 6  # objects of an image that are drawn


@dataclass(frozen=True)
class QueryView:
    """An object that a detector found, and where its query looked in the last layer of the decoder."""

    box: Tensor  # [4], left, top, right and bottom in fractions of the image
    label: int  # class number
    score: float  # in [0, 1]
    # of DETR, attention to the cells of the encoder's map [h, w], the mean over heads; its sum is 1
    map: Tensor | None = None
    points: Tensor | None = None  # of Deformable DETR, [n, 2], (x, y) in fractions of the image; they may lie outside
    weights: Tensor | None = None  # of the points [n], the mean over heads; their sum is 1


@torch.no_grad()
def query_views(model: nn.Module, images: Tensor, threshold: float = 0.4) -> list[list[QueryView]]:
    """Objects of each image, best first, with what their queries attend to.

    Args:
        model: DETR or Deformable DETR, in evaluation mode.
        images: [B, C, H, W], without padding.
        threshold: least score.

    Raises:
        TypeError: the model is no detector of this package.
    """
    if getattr(model, "task", None) != "detect":
        raise TypeError(f"model is a {type(model).__name__}; query_views is for DETR and Deformable DETR")
    detector: Any = model
    *_, layer = model.get_submodule("transformer.decoder.layers").children()
    deformable = hasattr(layer, "cross_attn")
    attention: Any = layer.get_submodule("cross_attn" if deformable else "multihead_attn")
    encoded = model.get_submodule("input_proj")
    with (
        _collected(attention.register_forward_pre_hook) as inputs,
        _collected(encoded.register_forward_hook) as maps,  # none if its parts are called instead
    ):
        outputs = model(images)
    if deformable:
        points, weights = _points(attention, *inputs[-1])
    else:
        attended = _map(attention, *inputs[-1]).unflatten(-1, maps[-1].shape[2:])
    scores, labels, queries = detector.class_scores(outputs["logits"].float())
    centre, extent = outputs["boxes"].float().split(2, -1)
    corners = torch.cat((centre - extent / 2, centre + extent / 2), -1)
    views: list[list[QueryView]] = []
    for i in range(len(images)):
        order = scores[i].argsort(descending=True)
        views.append([])
        for at in order[scores[i][order] >= threshold].tolist():
            query = int(queries[i, at])
            found = (
                dict(points=points[i, query], weights=weights[i, query]) if deformable else dict(map=attended[i, query])
            )
            views[-1].append(QueryView(corners[i, query], int(labels[i, at]), float(scores[i, at]), **found))
    return views


@contextmanager
def _collected(register: Callable[..., Any]) -> Iterator[list[Any]]:
    """Collects what a hook gets last at each call of a module: its positional arguments before, its result after."""
    calls: list[Any] = []
    handle = register(lambda *seen: calls.append(seen[-1]))
    try:
        yield calls
    finally:
        handle.remove()


def _map(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean over heads of the softmax of a `PackedAttention`, [B, Q, N]."""
    weights = attention.in_proj_weight.chunk(3)
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    q, k = (
        F.linear(x, weights[i], biases[i]).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2).float()
        for i, x in enumerate((q, k))
    )
    scores = q @ k.mT * q.shape[-1] ** -0.5  # [B, H, Q, N]
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1).mean(1)


def _points(
    attention: Any, q: Tensor, reference: Tensor, memory: Tensor, shapes: Any, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Points [B, Q, n, 2] of a `DeformableAttention` and their weights [B, Q, n], n of all heads and maps."""
    heads = (attention.num_heads, attention.levels, attention.points)
    offsets = attention.sampling_offsets(q).unflatten(-1, (*heads, 2)).float()
    logits = attention.attention_weights(q).unflatten(-1, heads).float()
    locations, weights = sampling_points(shapes, offsets, logits, reference.float())
    return locations.flatten(2, 4), weights.flatten(2) / attention.num_heads


def query_panels(
    model: nn.Module,
    images: Sequence[Tensor],
    pictures: Sequence[Tensor],
    names: Sequence[str],
    classes: Sequence[str],
    threshold: float = 0.4,
) -> Iterator[Panel]:
    """A panel for each image: its objects, and where their queries look.

    Args:
        model: as for `query_views`.
        images: normalised images, [C, H, W] each.
        pictures: the same between 0 and 1.
        names: of the images.
        classes: names by label.
        threshold: least score.
    """
    for number, (image, picture, name) in enumerate(zip(images, pictures, names, strict=True), 1):
        (views,) = query_views(model, image[None], threshold)
        shown = views[:MOST]
        kind = "attention of its query" if shown and shown[0].map is not None else "points that its query reads"
        rows = [("class", "score", "left, top, right, bottom")]
        for view in shown:
            box = ", ".join(f"{100 * side:.0f} %" for side in view.box.tolist())
            rows.append((classes[view.label], f"{100 * view.score:.0f} %", box))
        reading = f"For each object its box, and the {kind} in the last layer of the decoder, of all heads."
        if not shown:
            reading = f"No object has a score of {100 * threshold:.0f} % or more."
        yield Panel(
            f"queries-{number}",
            f"The best {MOST} objects and their queries" if len(views) > MOST else "Objects and their queries",
            reading,
            f"{name}: {len(views)} objects, and where the queries of the detector look",
            draw_queries(picture, shown, classes),
            tuple(rows) if shown else (),
            name,
        )


def draw_queries(picture: Tensor, views: Sequence[QueryView], classes: Sequence[str]) -> "Figure":
    """A figure with a picture [C, H, W] between 0 and 1 for each object, or one picture without objects."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height, width = picture.shape[1:]
    pixels = picture.clamp(0, 1).permute(1, 2, 0).expand(-1, -1, 3).numpy()
    count = max(len(views), 1)
    drawn: list[QueryView | None] = list(views) or [None]
    figure = Figure(figsize=(2.6 * count, 2.6 * height / width + 0.4), layout="constrained")
    for place, view in zip(figure.subplots(1, count, squeeze=False)[0], drawn, strict=True):
        place.imshow(pixels, extent=(0, 1, 1, 0), aspect=height / width)
        place.set_axis_off()
        place.set_xlim(0, 1)
        place.set_ylim(1, 0)
        if view is None:
            continue
        place.set_title(f"{classes[view.label]}, {100 * view.score:.0f} %", fontsize=9)
        left, top, right, bottom = view.box.tolist()
        place.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="#e8833a", linewidth=1.5)
        )
        if view.map is not None:
            shares = (view.map / view.map.max()).cpu().numpy()
            colours: dict[str, Any] = dict(cmap="inferno", alpha=0.6, vmin=0, vmax=1)
            place.imshow(shares, extent=(0, 1, 1, 0), aspect=height / width, **colours)
        elif view.points is not None and view.weights is not None:
            x, y = view.points.cpu().T.numpy()
            sizes = 300 * view.weights.cpu().numpy()
            place.scatter(x, y, s=sizes, color="#2f6fde", alpha=0.7, linewidths=0.3, edgecolors="white")
    return figure
