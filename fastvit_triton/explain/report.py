"""The figures of a report, each with a sentence on how to read it; those without information are left out and named."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.forwards import Forward, arguments, forward_for
from ..train.loop import Score
from ..train.metrics import confusion_matrix
from ..train.plots import curves
from . import figures, tokens
from .costs import Cost, cost_table
from .gradients import Contribution, by_grid, contributions, finest
from .layer import AttentionLayer
from .maps import attention_distance, class_relevance, entropy, half_area, logits_of, rollout
from .page import Absent, Panel
from .published import SOURCE
from .recording import Recording, record

FEWEST = 4  # rows and columns of patches below which a map is no picture; of keys, up to which a layer has no choice
SMALLEST = 3  # pixels on a side of a filter that shows a pattern
FLAT = 0.02  # range of a map relative to its mean, up to which it is uniform
LACKS = "the model has no such part"
UNIFORM = "the map is uniform"
WHY = "Why"
FOLDED = partial(Panel, folded=True)


def can_explain(model: nn.Module, images: Tensor) -> bool:
    """True if `explain` takes the model: attention over all tokens of an image, or contributions of patches."""
    try:
        with torch.no_grad(), record(model) as seen:
            model(images)
        return _is_whole(seen, len(images)) or bool(contributions(model, images))
    except ValueError:  # no logits
        return False


def _is_whole(seen: Recording, images: int) -> bool:
    """True if each layer attends to all tokens of an image, those that the layer before it returned."""
    if not seen.layers:
        return False
    N = seen.layers[0].shape[3]
    for layer in seen.layers:
        if layer.why_not_whole or layer.shape[3] != N or layer.shape[0] != images:
            return False
        N = layer.shape[2]
    return True


def explain(
    model: nn.Module,
    images: Tensor,
    pictures: Tensor,
    names: list[str],
    classes: tuple[str, ...] | None = None,
    query: int | None = None,
    targets: list[int | None] | None = None,
) -> Iterator[Panel | Absent]:
    """Yields the panels for a model and some images, from a forward pass and, if there are logits, a backward pass.

    The first one shows where the predicted classes come from. What would show nothing is yielded as `Absent`: maps of
    fewer than 4 × 4 patches, uniform ones, filters of fewer than 3 × 3 pixels, and what the model does not have.

    Args:
        model: in eval mode, on the device of the images.
        images: [B, C, H, W], normalised.
        pictures: the same images for display, [B, C, H, W] in [0, 1].
        names: names of the images.
        classes: names of the logits; None numbers them.
        query: index of the token whose attention to show; None means the class token or, without one, all patches.
        targets: numbers of the true classes, None where it is not known; shown where another one is predicted.

    Raises:
        ValueError: there is no attention, or layers differ in number of tokens other than by halving the grid between
            stages, and there are no logits or no patches that reach them; or `query` is out of range or given for such
            models.
    """
    with torch.no_grad(), record(model) as seen:
        output = model(images)
    if not _is_whole(seen, len(images)):
        yield from _by_gradient(model, seen, output, images, pictures, names, classes, query, targets)
        return
    counts = list(dict.fromkeys(layer.shape[3] for layer in seen.layers) | {seen.layers[-1].shape[2]: None})
    N = counts[0]
    if query is not None and len(counts) > 1:
        raise ValueError(f"query is {query}, but stages have {', '.join(map(str, counts))} tokens; leave it out")
    if query is not None and not 0 <= query < N:
        raise ValueError(f"query is {query}; the model has tokens 0 to {N - 1}")
    if len(counts) > 1:
        places = {count: tokens.stage_geometry(images, count) for count in counts}
    else:
        places = {N: tokens.geometry(model, images, N)}
    where = places[N]
    try:
        logits = logits_of(output)
    except ValueError:
        logits = None
        yield Absent(WHY, "the model returns no logits")
    query = 0 if query is None and where.prefix else query
    flows = {f"rollout, {heads} of heads": rollout(seen.layers, heads) for heads in ("mean", "max", "min")}
    flows["rollout, mean,\nsmallest half discarded"] = rollout(seen.layers, "mean", 0.5)
    if logits is not None:

        def relevance(images: Tensor, chosen: Tensor | None = None) -> Tensor:
            flow = class_relevance(model, images, chosen)
            if len(counts) == 1:  # without what each token has of itself, which is the same for all
                flow = flow - torch.eye(N, dtype=flow.dtype, device=flow.device)
            return flow

        def heats_of(flow: Tensor) -> Tensor:
            return _heats(flow, 0 if where.prefix else None, where)

        def of_class(image: Tensor, chosen: Tensor) -> Tensor:
            return heats_of(relevance(image, chosen))

        predicted = relevance(images)
        flows["gradient-weighted,\npredicted class"] = predicted
        how = "Attention of all layers, weighted by positive gradients."
        yield _why(logits, heats_of(predicted), of_class, images, pictures, names, classes, how, targets)
    heats = {title: _heats(flow, query, where) for title, flow in flows.items()}
    if min(where.grid) < FEWEST:
        yield Absent("attention rollout", _few(where))
        heats = {}
    for title in [title for title, maps in heats.items() if _is_flat(maps)]:
        del heats[title]
        yield Absent(title.replace("\n", " "), UNIFORM)
    rows = [_query(layer, query) for layer in seen.layers]
    drawn = {}
    for n, row in enumerate(rows, 1):
        of_row = places[row.shape[2]]
        tiles = row[..., of_row.prefix :].unflatten(-1, of_row.grid)  # [B, H, h, w]
        if min(of_row.grid) < FEWEST:
            yield Absent(f"attention of layer {n}", _few(of_row))
        elif _is_flat(tiles):
            yield Absent(f"attention of layer {n}", UNIFORM)
        else:
            drawn[n] = tiles
    stream = [(x, places[x.shape[1]]) for x in seen.stream if x.shape[1] in places]
    final, last = next((pair for pair in reversed(stream) if min(pair[1].grid) >= FEWEST), (None, where))
    if final is None:
        yield Absent("output tokens", _few(where))
    colours = None if final is None else tokens.feature_colours(final, last)
    target = "all patches" if query is None else "the class token" if query == 0 else f"token {query}"
    for i, name in enumerate(names):
        tag, image = (f"{i + 1:02d}-", name) if len(names) > 1 else ("", "")
        if logits is not None:
            yield _prediction(tag, image, name, pictures[i], logits[i], classes)
        if drawn:
            yield FOLDED(
                f"{tag}attention",
                f"Attention of {target} by layer",
                "Each tile is one head's attention over the image; brighter patches get more. Each tile is scaled from "
                f"its smallest to its largest value. More than {figures.HEADS} heads continue in a second row.",
                f"{name} above a mosaic of the attention maps of each head in {len(drawn)} layers",
                figures.draw_attention(pictures[i], {n: tiles[i] for n, tiles in drawn.items()}),
                image=image,
            )
        if heats:
            yield FOLDED(
                f"{tag}rollout",
                "Attention rollout",
                f"Rollout multiplies attention through all layers: bright regions contribute most to {target}. The "
                "gradient-weighted map counts attention by the positive gradients of the predicted class. Each map is "
                "scaled from its smallest to its largest value.",
                f"{name} under {len(heats)} heat maps of attention rollout",
                figures.draw_overlays(pictures[i], {title: maps[i] for title, maps in heats.items()}),
                image=image,
            )
        if final is not None and colours is not None:
            yield _tokens(tag, image, name, pictures[i], final[i], colours[i], last)
    yield from _layers(seen, places, len(images))
    yield from _model(model, seen, where, images)


def _by_gradient(
    model: nn.Module,
    seen: Recording,
    output: object,
    images: Tensor,
    pictures: Tensor,
    names: list[str],
    classes: tuple[str, ...] | None,
    query: int | None,
    targets: list[int | None] | None,
) -> Iterator[Panel | Absent]:
    """Yields the panels for a model without rollout, whose layers attend to different tokens, or which has none."""
    different = "the model's layers have different tokens (windows, stages or class tokens)"
    different = different if seen.layers else "the model has no attention that can be recorded"
    if query is not None:
        raise ValueError(f"query is {query}, but {different}; leave it out, or use explain.capture in Python")
    try:
        logits = logits_of(output)
        found = contributions(model, images)
    except ValueError as error:
        raise ValueError(f"{different}, so their contributions to a class are shown: {error}") from error
    if not found:
        raise ValueError(
            f"{different}, and no block returns patches that reach the logits; explain LeViT, Swin, PVT or a plain "
            "ViT, such as vit_tiny_patch16_224, or use explain.capture in Python"
        )
    best = finest(found)
    how = f"Gradient times value of the {best.where.grid[0]} × {best.where.grid[1]} patches that {best.path} returns."

    def of_class(image: Tensor, chosen: Tensor) -> Tensor:
        values = [c.values for c in contributions(model, image, chosen) if c.path == best.path]
        return values[0].clamp_min(0) if values else torch.zeros_like(best.values[:1])

    yield _why(logits, best.values.clamp_min(0), of_class, images, pictures, names, classes, how, targets)
    shown = [c for c in by_grid(found) if min(c.where.grid) >= FEWEST]
    for part in by_grid(found):
        if part not in shown:
            yield Absent(f"contributions at {part.path}", _few(part.where))
    final = next((c for c in reversed(found) if min(c.where.grid) >= FEWEST), None)
    if final is None:
        yield Absent("output tokens", _few(found[-1].where))
    colours = None if final is None else tokens.feature_colours(final.x, final.where)
    for i, name in enumerate(names):
        tag, image = (f"{i + 1:02d}-", name) if len(names) > 1 else ("", "")
        yield _prediction(tag, image, name, pictures[i], logits[i], classes)
        if shown:
            heats = {_depth(c, i): c.values[i].clamp_min(0) for c in shown}
            yield FOLDED(
                f"{tag}contributions",
                "Contribution to the predicted class",
                "Bright patches, as a block returns them, contribute most to the class: the logit grows with their "
                "size (gradient times value; what speaks against the class is dark). Each map is scaled separately.",
                f"{name} under {len(heats)} heat maps of contributions",
                figures.draw_overlays(pictures[i], heats),
                image=image,
            )
        if final is not None and colours is not None:
            yield _tokens(tag, image, name, pictures[i], final.x[i], colours[i], final.where)
    idle = _idle(seen)
    yield from idle.values()
    spread = {n: entropy(layer.blocks()).mean(0) for n, layer in enumerate(seen.layers, 1) if n not in idle}
    if spread:
        over = f"over {len(images)} image{'s' if len(images) > 1 else ''}"
        yield FOLDED(
            "layers",
            "Attention entropy",
            "Each dot is a head. A low entropy means attention to few tokens; uniform attention has the logarithm of "
            f"the number of keys, which differs by layer (means {over}).",
            f"Attention entropy in nats of each head in {len(spread)} layers",
            figures.draw_layers({"Attention entropy": (spread, "nats")}),
        )
    filters = tokens.patch_filters(model, images.shape[1])
    if filters is not None:
        yield _filters(filters)
    reason = (
        "layers attend to different tokens (explain.capture has their maps in Python)" if seen.layers else different
    )
    for title in ("attention by head", "rollout", "attention distance", "similarity by depth", "positions", "cost"):
        yield Absent(title, reason)


def _why(
    logits: Tensor,
    heats: Tensor,
    of_class: Callable[[Tensor, Tensor], Tensor],  # (image [1, C, H, W], class [1]) → map [1, h, w]
    images: Tensor,
    pictures: Tensor,
    names: list[str],
    classes: tuple[str, ...] | None,
    how: str,
    targets: list[int | None] | None = None,
) -> Panel | Absent:
    """The first panel: each image beside the map of its predicted class and, of a mistake, that of the true one."""
    if min(heats.shape[1:]) < FEWEST:
        return Absent(WHY, f"the map has {heats.shape[1]} × {heats.shape[2]} patches, fewer than {FEWEST} × {FEWEST}")
    labels = classes or tuple(map(str, range(logits.shape[1])))
    chances = logits.softmax(1)
    order = chances.topk(min(2, logits.shape[1])).indices
    maps = [{at[0]: heat} for heat, at in zip(heats, order.tolist(), strict=True)]
    titles = []
    known = targets or [None] * len(names)
    for i, (name, values, at, true) in enumerate(zip(names, chances.tolist(), order.tolist(), known, strict=True)):
        answers = {k: f"{labels[k]}: {100 * values[k]:.1f} %" for k in (*at, true) if k is not None}
        other = f"then {answers[at[1]]}" if len(at) > 1 else ""
        if true is not None and true != at[0]:
            other = f"true class {answers[true]}"
            (maps[i][true],) = of_class(images[i : i + 1], torch.tensor([true], device=images.device))
        titles.append((name, answers[at[0]], other))
    shown = [[_captioned(*pair, labels, len(one) > 1) for pair in one.items()] for one in maps]
    lines = [[*texts, *(said.replace("\n", " ") for _, said in one)] for texts, one in zip(titles, shown, strict=True)]
    return Panel(
        "why",
        WHY,
        "Bright: where the predicted class comes from; of a mistake, a second map is of the true class. "
        f"{how} A map is as coarse as the model's patches, {heats.shape[1]} × {heats.shape[2]}; the smaller the part "
        "of the image that holds half of it, the more it is one spot. Below the name are the predicted class and the "
        "next one or, if known and different, the true one, with probabilities.",
        "; ".join(map(", ".join, lines)),
        figures.draw_why(pictures, shown, titles),
    )


def _captioned(k: int, heat: Tensor, labels: tuple[str, ...], several: bool) -> tuple[Tensor, str]:
    """The map [h, w] of class k, zeros if it is uniform, and what to write below it."""
    flat = _is_flat(heat)
    said = "the map is uniform" if flat else f"half the map lies on\n{100 * half_area(heat):.2g} % of the image"
    return heat * (not flat), f"{figures.shortened(labels[k], 14)}:\n{said}" if several else said


def _few(where: tokens.Geometry) -> str:
    return f"{where.grid[0]} × {where.grid[1]} patches are fewer than {FEWEST} × {FEWEST}"


def _is_flat(maps: Tensor) -> bool:
    """True if each map [..., h, w] is uniform."""
    spread = maps.amax((-1, -2)) - maps.amin((-1, -2))
    return not bool((spread > FLAT * maps.mean((-1, -2)).abs()).any())


def _depth(found: Contribution, image: int) -> str:
    """The title of a map of contributions."""
    h, w = found.where.grid
    what = "patches" if bool((found.values[image] > 0).any()) else "patches, none positive"
    path = found.path if len(found.path) <= 26 else f"…{found.path[-25:]}"
    return f"{path},\n{h} × {w} {what}"


def _prediction(
    tag: str, image: str, name: str, picture: Tensor, logits: Tensor, classes: tuple[str, ...] | None
) -> Panel:
    chances = logits.softmax(0)
    answer = classes[int(chances.argmax())] if classes else f"{int(chances.argmax())}"
    labels = classes or tuple(map(str, range(len(chances))))
    return FOLDED(
        f"{tag}prediction",
        f"{name}: {answer}",
        "Probabilities of the most likely classes; the longest bar is the prediction.",
        f"{name}, predicted as {answer} with {100 * chances.max():.1f} %",
        figures.draw_predictions(picture, chances, labels),
        image=image,
    )


def _tokens(
    tag: str, image: str, name: str, picture: Tensor, x: Tensor, colours: Tensor, where: tokens.Geometry
) -> Panel:
    lengths = x.float().norm(dim=-1)
    return FOLDED(
        f"{tag}tokens",
        "Output tokens",
        "Patches of one colour have similar features. A token with many times the norm of its neighbours is an "
        "outlier in which the model stores global information (registers take over this role).",
        f"{name}, the norm of each of its tokens, and their first three principal components as colours",
        figures.draw_tokens(
            picture, lengths[where.prefix :].view(where.grid), colours, lengths[: where.prefix].tolist()
        ),
        image=image,
    )


def _filters(filters: Tensor) -> Panel | Absent:
    h, w = filters.shape[2:]
    if min(h, w) < SMALLEST:
        return Absent("filters of the patch embedding", f"{h} × {w} pixels are fewer than {SMALLEST} × {SMALLEST}")
    components = tokens.filter_components(filters.float())
    return FOLDED(
        "filters",
        "Filters of the patch embedding",
        "Each tile is a principal component of the patch projection, most important first; smooth tiles are "
        "colours and edges to which most channels respond.",
        f"The first {len(components)} principal components of the patch projection",
        figures.draw_filters(components),
    )


def _why_idle(layer: AttentionLayer) -> str | None:
    """Why the distance and entropy of a layer would show nothing; None if they show something."""
    keys = layer.shape[3]
    if keys <= FEWEST:
        return f"attention to {FEWEST} tokens or fewer has little choice"
    uniform = all(bool(((keys * rows - 1).abs() <= FLAT).all()) for _, rows in layer.blocks())
    return "attention is uniform" if uniform else None


def _idle(seen: Recording) -> dict[int, Absent]:
    """Number → what is said of a layer whose distance and entropy are left out."""
    reasons = {number: _why_idle(layer) for number, layer in enumerate(seen.layers, 1)}
    return {n: Absent(f"distance and entropy of layer {n}", why) for n, why in reasons.items() if why is not None}


def _layers(seen: Recording, places: dict[int, tokens.Geometry], count: int) -> Iterator[Panel | Absent]:
    """Yields the panels of values per layer."""
    idle = _idle(seen)
    yield from idle.values()
    far, spread = {}, {}
    for number, layer in enumerate(seen.layers, 1):
        if number in idle:
            continue
        spread[number] = entropy(layer.blocks()).mean(0)
        if not layer.halves:  # whose queries are not all patches
            where = places[layer.shape[2]]
            far[number] = attention_distance(layer.blocks(), where.grid, where.patch).mean(0)
    left = "" if len(far) == len(spread) else " Layers that halve the grid have no distance."
    over = f"over {count} image{'s' if count > 1 else ''}"
    shown = {"Attention distance": (far, "pixels"), "Attention entropy": (spread, "nats")}
    if spread:
        yield FOLDED(
            "layers",
            "Attention distance and entropy",
            "Each dot is a head. A low distance means local attention, a high one global attention; a low entropy "
            f"means attention to few tokens, a high one uniform attention (means {over}).{left}",
            f"Mean attention distance in pixels and entropy in nats of each head in {len(spread)} layers",
            figures.draw_layers({title: values for title, values in shown.items() if values[0]}),
        )
    if len(seen.stream) > 1:
        values = {n: float(tokens.token_similarity(x).mean()) for n, x in zip(seen.depths, seen.stream, strict=True)}
        first, *_, last = values.values()
        yield FOLDED(
            "similarity",
            "Similarity of tokens by depth",
            f"Near 1 all tokens of an image are alike (over-smoothing), near 0 they differ (mean {over}). Layer 0 is "
            "before the first; layers that halve the grid have no value.",
            f"Mean cosine similarity of tokens, {first:.2f} before the first layer and {last:.2f} at the end",
            figures.draw_similarity(values),
        )


def _model(model: nn.Module, seen: Recording, where: tokens.Geometry, images: Tensor) -> Iterator[Panel | Absent]:
    """Yields the panels that depend on weights and image size only."""
    table = tokens.position_table(model, where)
    if table is not None and min(where.grid) < FEWEST:
        yield Absent("similarity of position embeddings", _few(where))
    elif table is not None:
        yield FOLDED(
            "positions",
            "Similarity of position embeddings",
            "Tile (row, column) compares the position of that patch with all others: a bright spot at its own place "
            "and in its row and column means that the model has learned the grid.",
            f"Cosine similarity of the position embeddings of {where.grid[0]} by {where.grid[1]} patches",
            figures.draw_positions(tokens.position_similarity(table.float(), where.grid)),
        )
    else:
        yield Absent("similarity of position embeddings", LACKS)
    rope = _rope(model, seen.layers[0].path, images[:1])
    if rope is not None and min(where.grid) > 1 and rope[0].shape[-2] == where.count:
        bands = tokens.rotary_bands(rope, where.grid)
        yield FOLDED(
            "bands",
            "Rotation of rotary positions",
            "A high dot is a channel pair that distinguishes neighbours; a low one rotates slowly across the image.",
            "Rotation per patch of each rotary channel pair, downwards and to the right",
            figures.draw_bands(bands.flatten(0, -3)[0] if bands.dim() > 2 else bands),
        )
    filters = tokens.patch_filters(model, images.shape[1])
    if filters is not None:
        yield _filters(filters)
        yield _cost(seen, where, images, filters.shape[-1], len(filters))
    else:
        yield Absent("filters of the patch projection and cost by image size", LACKS)


def _rope(model: nn.Module, path: str, image: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Rotary tables of the attention at `path`, as `optimize` reads them; None if it reads none."""
    module = model.get_submodule(path)
    forward = forward_for(module)
    if not isinstance(forward, Forward) or forward.read is None:
        return None
    calls: list[tuple] = []
    handle = module.register_forward_pre_hook(lambda _, inputs, named: calls.append((inputs, named)), with_kwargs=True)
    try:
        with torch.no_grad():
            model(image)
    finally:
        handle.remove()
    inputs, named = calls[-1]
    call = dict(zip(arguments(type(module)), inputs[1:], strict=False)) | named
    parts = forward.read(module, **{name: value for name, value in call.items() if name not in ("hidden_states", "x")})
    return getattr(getattr(parts, "between", None), "rope", None)


def _cost(seen: Recording, where: tokens.Geometry, images: Tensor, patch: int, dim: int) -> Panel:
    """The panel of cost by image size."""
    first = seen.layers[0]
    heads = dict(num_heads=first.shape[1], head_dim=first.head_dim)
    shape = dict(dim=dim, depth=len(seen.layers), hidden=4 * dim, **heads)
    sides = tuple(sorted({images.shape[2], *((8, 16, 32, 64, 224) if images.shape[2] < 64 else (224, 384, 512, 1024))}))
    rows = cost_table(patch, sides, channels=images.shape[1], prefix=where.prefix, **shape)
    return FOLDED(
        "cost",
        "Cost by image size",
        "Doubling the side gives four times the tokens and sixteen times the arithmetic of attention: the orange dot "
        "overtakes the blue one (computed for this width and depth, with MLPs four times as wide; nothing was timed).",
        f"Arithmetic for {len(rows)} image sizes, up to {rows[-1].tokens:,} tokens with one per pixel",
        figures.draw_cost(rows),
        (("image", "tokens", "GFLOP", "N × N matrices per layer", "fused: q, k, v, o"), *map(_row, rows)),
    )


def explain_run(
    history: list[dict] | None, score: Score | None, classes: tuple[str, ...], others: bool = False
) -> Iterator[Panel]:
    """Yields the training curves and the confusion matrix of a run; skips those without data.

    Args:
        history: rows of the log.
        score: score on the test images.
        classes: names of the classes.
        others: whether the report is of other images than the run's test images; the headings say so.
    """
    others_said = ", not of the images above" * others
    if history:
        yield Panel(
            "curves",
            f"Training curves of the run{others_said}",
            "Training accuracy is measured on augmented images, so it may be below the test accuracy.",
            f"Loss, accuracy and learning rate over {len(history)} epochs",
            curves(history, stacked=True),
        )
    if score is not None and score.accuracy is not None and score.targets is not None and score.predictions is not None:
        counts = confusion_matrix(score.targets, score.predictions, len(classes))
        yield Panel(
            "confusion",
            f"Confusion matrix of the run's {len(score.targets):,} test images{others_said}",
            "Entries on the diagonal are correct predictions; the others count images of the row's class that were "
            "predicted as the column's.",
            f"Confusion matrix of {len(score.targets):,} test images, {100 * score.accuracy:.1f} % of them correct",
            figures.draw_confusion(counts, classes),
        )


def published_tables() -> Panel:
    """The panel with plots of tables 2, 5 and 6 of the ViT paper."""
    return Panel(
        "published",
        "Published results",
        "Dots are accuracies after fine-tuning, by task or by pre-training data; bars are the compute of pre-training, "
        f"with the number of epochs if there were two runs ({SOURCE}, tables 2, 5 and 6; not measured here).",
        "Published accuracy by task, by pre-training data, and pre-training compute of ViTs, hybrids and ResNets",
        figures.draw_published(),
    )


def _row(row: Cost) -> tuple[str, ...]:
    flops = (row.linear_flops + row.attention_flops) / 1e9
    return (
        row.label,
        f"{row.tokens:,}",
        f"{flops:,.0f}" if flops >= 100 else f"{flops:.3g}",
        _bytes(row.matrix_bytes),
        _bytes(row.fused_bytes),
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"


def _query(layer: AttentionLayer, query: int | None) -> Tensor:
    """Attention [B, H, N] of one query; None means the mean over all queries."""
    if query is not None:
        return layer.rows(query)[:, :, 0]
    total: Any = sum(rows.sum(2) for _, rows in layer.blocks())
    return total / layer.shape[2]


def _heats(flow: Tensor, query: int | None, where: tokens.Geometry) -> Tensor:
    """Heat maps [B, h, w]: the query's row of a rollout [B, N', N], or the mean over rows, without prefix tokens."""
    row = flow.mean(1) if query is None else flow[:, query]
    return row[:, where.prefix :].unflatten(1, where.grid)
