"""Tests of captured attention in windows, to fewer keys, of one query and with talking heads, against each package."""

import copy
from contextlib import contextmanager

import pytest
import torch
from catalogue import build, inputs, redraw
from catalogue.timm import SWIN
from interpreter import interpreting
from test_explain import hooks, panels_of, within
from timm.models import swin_transformer

from fastvit_triton import create_model, explain, optimize
from fastvit_triton.explain.figures import draw_overlays
from fastvit_triton.explain.report import _depth, can_explain

MODELS = """timm_twins_svt_ragged timm_pvt_v2 timm_pvt_v2_linear timm_tnt timm_cait timm_levit timm_crossvit
timm_swin_ragged timm_swin_v2_ragged torchvision_swin_ragged torchvision_swin_v2""".split()


@contextmanager
def recorded():
    """Yields a list that fills with the results of every softmax; that of `torch.nn.functional` calls the method."""
    found, softmax = [], torch.Tensor.softmax

    def looking(x, *given, **named):
        found.append(softmax(x, *given, **named))
        return found[-1]

    torch.Tensor.softmax = looking
    try:
        yield found
    finally:
        del torch.Tensor.softmax


def run(model, images):
    """The model's output and its attention probabilities, from its own unfused code."""
    mixed, handles = [], []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if hasattr(module, "proj_w"):  # talking heads mix after the softmax
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, given: mixed.append(given[0])))
    with recorded() as found:
        y = model(images)
    for handle in handles:
        handle.remove()
    return y, mixed + found[len(mixed) :]


def three(name):
    """The model in float64 and in float32, and one to capture, with images for each."""
    model, images = build(name).eval(), inputs(name)
    return *(copy.deepcopy(model).to(dtype) for dtype in (torch.float64, torch.float32, torch.float32)), images


@pytest.mark.parametrize("path", ["plain", "reference", "interpreter"])
@pytest.mark.parametrize("name", ["timm_cait", "timm_levit"])
def test_maps_equal_the_packages_softmax(name, path, request):
    """Oracle: what the package's unfused code multiplies values by in float64; outputs and hooks are as without it."""
    truth, plain, model, images = three(name)
    if path != "plain":
        optimize(model)
    if path == "reference":
        request.getfixturevalue("references")
    before = hooks(model)
    with torch.no_grad():
        (right, want), (single, baseline) = run(truth, images), run(plain, images.float())
        with interpreting() if path == "interpreter" else torch.no_grad():
            with explain.capture(model) as seen:
                y = model(images.float())
            maps = [layer.map() for layer in seen.layers]
    within(y, single, right)
    assert len(maps) == len(want) > 0 and not seen.left and hooks(model) == before
    for layer, got, one, exact in zip(seen.layers, maps, baseline, want, strict=True):
        exact, one = (t.reshape(-1, *t.shape[-3:]) for t in (exact, one))
        within(got, one, exact)
        torch.testing.assert_close(torch.cat([rows for _, rows in layer.blocks()], 2), got)
        torch.testing.assert_close(layer.rows(-1), got[:, :, -1:])


@pytest.mark.few(7)
@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "optimised"])
@pytest.mark.parametrize("name", MODELS)
def test_map_gradients_equal_autograd(name, optimised, references):
    """Oracle: autograd through the package's softmax in float64, for a random cotangent."""
    truth, plain, model, images = three(name)
    if optimised:
        optimize(model)
    cotangent, asked = None, []
    for oracle, given in ((truth, images), (plain, images.float())):
        y, maps = run(oracle, given)
        cotangent = torch.randn(y.shape) if cotangent is None else cotangent
        asked.append(torch.autograd.grad((y * cotangent).sum(), maps))
    with explain.capture(model, gradients=True) as seen:
        (model(images.float()) * cotangent).sum().backward()
    for layer, want, one in zip(seen.layers, *asked, strict=True):
        within(layer.map_grad(), *(t.reshape(-1, *t.shape[-3:]) for t in (one, want)))


@pytest.mark.fast
def test_statistics_refuse_what_is_not_square():
    """Oracle: the sentences; a model with one window and no shift has square maps."""
    sentences = {
        "timm_swin_ragged": "layers.0.blocks.0.attn attends within 4 windows of 16 tokens an image; rollout needs maps",
        "timm_tnt": "blocks.0.attn_in attends within 4 windows of 16 tokens an image; rollout needs maps over all",
        "timm_pvt_v2": "stages.0.blocks.0.attn has maps of queries × keys = 48 × 12; rollout needs maps over all",
        "timm_cait": "blocks_token_only.0.attn has maps of queries × keys = 1 × 5; rollout needs maps over all",
    }
    for name, sentence in sentences.items():
        _, _, model, images = three(name)
        with torch.no_grad(), explain.capture(model) as seen:
            model(images.float())
        with pytest.raises(ValueError, match=sentence):
            explain.rollout(seen.layers)
        tensors = {
            "timm_pvt_v2": "a map has queries × keys = 48 × 12; rollout",
            "timm_swin_ragged": "maps have 8 and then 2 images or windows",
        }
        if name in tensors:
            with pytest.raises(ValueError, match=tensors[name]):
                explain.rollout(seen.layers[i].map() for i in (0, -1))
        with pytest.raises(ValueError, match="rollout needs maps over all"):
            explain.class_relevance(model, images.float())
        refused = [layer for layer in seen.layers if layer.why_not_whole]
        for layer in refused:
            with pytest.raises(ValueError, match="patches"):
                explain.attention_distance(
                    layer.blocks(), (layer.shape[3], 1) if layer.shape[2] == 1 else (99, 99), (4, 4)
                )
    model = swin_transformer.SwinTransformer(**SWIN | dict(img_size=16, depths=(1,), num_heads=(2,)))
    with torch.no_grad(), explain.capture(model.eval()) as seen:
        model(torch.randn(2, 3, 16, 16))
    assert explain.rollout(seen.layers).shape == (2, 16, 16)


def test_rollout_through_stages_that_halve_the_grid():
    """Oracle: products of the package's softmax in float64 by hand; a map between stages has no residual."""
    truth, plain, model, images = three("timm_levit")
    classes = torch.tensor([3] * len(images))
    flows = []
    for oracle, given in ((truth, images), (plain, images.float())):
        y, maps = run(oracle, given)
        grads = torch.autograd.grad(y.gather(1, classes[:, None]).sum(), maps)
        assert [tuple(m.shape[2:]) for m in maps] == [(16, 16), (4, 16), (4, 4)]
        A, B, C = (m.mean(1) for m in maps)
        a, b, c = ((m * g).clamp_min(0).mean(1) for m, g in zip(maps, grads, strict=True))
        four, sixteen = torch.eye(4), torch.eye(16)
        flows.append(((C + four) / 2 @ B @ (A + sixteen) / 2, (c + four) @ b @ (a + sixteen)))
    (rollout, relevance), (rollout_32, relevance_32) = flows
    with torch.no_grad(), explain.capture(model) as seen:
        model(images.float())
    within(explain.rollout(seen.layers), rollout_32, rollout)
    within(explain.class_relevance(model, images.float(), classes), relevance_32, relevance)
    for heads in ("mean", "max", "min"):
        for discard in (0.0, 0.5, 0.95):  # with the last, rows between stages lose all keys, and keep theirs
            flow = explain.rollout(seen.layers, heads, discard)
            torch.testing.assert_close(flow.sum(-1), torch.ones(flow.shape[:2]))
    with pytest.raises(ValueError, match="maps have 16 and then 4 tokens"):
        explain.rollout([seen.layers[0], seen.layers[2]])


@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "optimised"])
def test_report_of_levit(optimised, references):
    """Oracle: the figures that LeViT has, the grids of its stages, and a row for each layer."""
    options = dict(embed_dim=(32, 48), key_dim=8, depths=(1, 2), num_heads=(2, 3), num_classes=5)
    model = redraw(create_model("levit_128s", img_size=(128, 192), **options)).eval()
    images = torch.randn(2, 3, 128, 192)
    if optimised:
        optimize(model)
    assert can_explain(model, images)
    panels = panels_of(explain.explain(model, images, images.sigmoid(), ["a", "b"]))
    names = [panel.name.removeprefix("01-").removeprefix("02-") for panel in panels]
    assert names == ["why", *["prediction", "attention", "rollout", "tokens"] * 2, "layers", "similarity"]
    image, *rows = panels[2].figure.axes
    assert image.get_title() == "image"
    assert [label.get_text() for axes in rows for label in axes.get_yticklabels()] == ["1", "2", "3", "4"]
    tokens = panels[4].figure.axes
    assert [axes.images[0].get_array().shape[:2] for axes in tokens[1:3]] == [(4, 6), (4, 6)]
    assert "Layers that halve the grid have no distance" in panels[-2].reading
    assert explain.stage_geometry(images, 96) == explain.Geometry((8, 12), 0, (16.0, 16.0))
    with pytest.raises(ValueError, match="query is 3, but stages have 96, 24 tokens; leave it out"):
        next(explain.explain(model, images, images.sigmoid(), ["a", "b"], query=3))


GRIDS = {  # of the blocks whose patches reach the logit, by hand from image size, patches and stages
    "timm_swin_ragged": None,
    "timm_pvt_v2": None,
    "timm_cait": None,
    "timm_tnt": None,
    "botnet50": [(3, 4), (3, 4)],
    "swin_tiny_patch4_window7_224": [(12, 16)] * 2 + [(6, 8)] * 2 + [(3, 4)] + [(2, 2)],
    "pvt_tiny": [(12, 16)] * 2 + [(6, 8)] * 2 + [(3, 4)],
}
PYRAMIDS = {
    "botnet50": dict(depths=(1, 1, 1, 2)),
    "swin_tiny_patch4_window7_224": dict(embed_dim=24, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2), window_size=4),
    "pvt_tiny": dict(depths=(2, 2, 1, 1)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", GRIDS)
def test_contributions_are_derivatives_by_the_size_of_a_token(name):
    """Oracle: central differences in float64 of the logit, of a forward pass whose block scales one patch.

    PVT's last block has a class token, which alone is read, so its patches reach no logit and are left out.
    """
    H, W = (96, 128) if name == "botnet50" else (48, 64)
    if name in PYRAMIDS:
        model = create_model(name, img_size=(H, W), num_classes=5, **PYRAMIDS[name]).eval()
        images = torch.randn(2, 3, H, W)
    else:
        model, images = build(name).eval(), inputs(name)
    model, images = model.double(), images.double()
    classes = torch.arange(len(images)) % 3
    before = hooks(model)
    found = explain.contributions(model, images, classes)
    assert hooks(model) == before and not any(p.grad is not None for p in model.parameters())
    if GRIDS[name] is not None:
        assert [c.where.grid for c in found] == GRIDS[name]
    step = 1e-5
    for part in (found[0], found[len(found) // 2], found[-1]):
        h, w = part.where.grid
        for row, column in {(0, 0), (h - 1, w // 2)}:
            sides = []
            for factor in (1 + step, 1 - step):
                scale = _scaled(part, row * w + column, factor, name == "botnet50")
                handle = model.get_submodule(part.path).register_forward_hook(scale)
                with torch.no_grad():
                    sides.append(model(images).gather(1, classes[:, None])[:, 0])
                handle.remove()
            torch.testing.assert_close(part.values[:, row, column], (sides[0] - sides[1]) / (2 * step))


def _scaled(part, patch, factor, channels_first):
    """A hook that multiplies one patch of the tokens that a block returns."""

    def scale(module, inputs, output):
        y = output[1] if isinstance(output, tuple) else output
        y = y.movedim(1, -1) if channels_first else y
        flat = y.flatten(1, -2).clone()
        flat[:, part.where.prefix + patch] *= factor
        flat = flat.view(y.shape).movedim(-1, 1) if channels_first else flat.view(y.shape)
        return (output[0], flat) if isinstance(output, tuple) else flat

    return scale


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["timm_swin_ragged", "timm_pvt_v2", "timm_cait", "timm_tnt", "timm_crossvit"])
def test_report_without_rollout(name):
    """Oracle: the figures by name; the maps drawn are those of the last block of each grid of at least 4 x 4."""
    model, images = build(name).eval().float(), inputs(name).float()
    assert can_explain(model, images)
    report = list(explain.explain(model, images, images.sigmoid(), list("abcde")[: len(images)]))
    panels = panels_of(report)
    names = {panel.name.partition("-")[2] or panel.name for panel in panels}
    found = explain.contributions(model, images)
    grids = list(dict.fromkeys(c.where.grid for c in found))
    large = [grid for grid in grids if min(grid) >= 4]
    assert names - {"filters"} == {"prediction", "layers"} | ({"why", "contributions", "tokens"} if large else set())
    absent = {part.title: part.reason for part in report if isinstance(part, explain.Absent)}
    assert ("Why" in absent) == (not large) and "rollout" in absent
    assert sum("fewer than 4 × 4" in reason for title, reason in absent.items() if "contributions" in title) == sum(
        min(part.where.grid) < 4 for part in (found if len(grids) == 1 else {c.where.grid: c for c in found}.values())
    )
    if large:
        (panel,) = (panel for panel in panels if panel.name == "01-contributions")
        titles = [axes.get_title() for axes in panel.figure.axes if axes.get_title()][1:]
        assert len(titles) == (len(large) if len(grids) > 1 else min(3, len(found)))
        assert all(f"{h} × {w} patches" in "".join(titles) for h, w in large)
    with pytest.raises(ValueError, match="query is 3, but the model's layers have different tokens"):
        next(explain.explain(model, images, images.sigmoid(), list("abcde"), query=3))


def test_titles_of_contributions_fit():
    """Oracle: where they are drawn: inside the figure, also with a long path and with nothing for the class."""
    where = explain.Geometry((14, 14), 0, (16.0, 16.0))
    parts = [
        explain.Contribution(
            "swinv2.encoder.layers.10.blocks.10", sign * torch.ones(1, 14, 14), torch.ones(1, 196, 4), where
        )
        for sign in (1, -1)
    ]
    titles = [_depth(part, 0) for part in parts]
    assert [title.endswith("none positive") for title in titles] == [False, True]
    page = draw_overlays(torch.rand(3, 56, 56), {title: torch.rand(14, 14) for title in titles})
    page.canvas.draw()
    for axes in page.axes:
        box = axes.title.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= page.bbox.x1


class Residual(torch.nn.Module):
    """x + f(x), as in a ResNet."""

    def __init__(self, width):
        super().__init__()
        self.conv = torch.nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x).relu()


def test_contributions_of_a_model_without_attention():
    """Oracle: the logit without its bias, of which those of the last block are parts, as only a mean and a linear layer
    follow; the grids, and the figures of the report."""
    nn = torch.nn
    layers = nn.Conv2d(3, 6, 4, 4), Residual(6), nn.Conv2d(6, 8, 2, 2), Residual(8), Residual(8)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).double()
    images, classes = torch.randn(2, 3, 32, 48).double(), torch.tensor([3, 0])
    found = explain.contributions(model, images, classes)
    assert [(part.path, part.where.grid) for part in found] == [("1", (8, 12)), ("3", (4, 6)), ("4", (4, 6))]
    logits = model(images).gather(1, classes[:, None])[:, 0] - model[-1].bias[classes]
    torch.testing.assert_close(found[-1].values.sum((1, 2)), logits)
    assert can_explain(model, images)
    report = list(explain.explain(model, images, images.sigmoid(), ["a", "b"]))
    names = {panel.name.partition("-")[2] or panel.name for panel in panels_of(report)}
    assert names == {"why", "prediction", "contributions", "tokens", "filters"}
    reasons = {part.reason for part in report if isinstance(part, explain.Absent)}
    assert reasons == {"the model has no attention that can be recorded"}
    with pytest.raises(ValueError, match="query is 1, but the model has no attention that can be recorded; leave it"):
        next(explain.explain(model, images, images.sigmoid(), ["a", "b"], query=1))


def test_what_has_no_contributions_is_refused():
    """Oracle: the sentences for features without logits and for blocks that return a single patch."""
    images = torch.randn(1, 3, 32, 32)
    options = PYRAMIDS["swin_tiny_patch4_window7_224"]
    features = create_model("swin_tiny_patch4_window7_224", img_size=32, **options, num_classes=0).eval()
    features.forward = features.forward_features
    botnet = create_model("botnet50", img_size=32, depths=(1, 1, 1, 2), num_classes=3).eval()
    for model, sentence in ((features, "returns no logits"), (botnet, "no block returns patches")):
        assert not can_explain(model, images)
        with pytest.raises(ValueError, match=sentence):
            next(explain.explain(model, images, images.sigmoid(), ["a"]))


class StrangeAttention(torch.nn.Linear):
    """A class that is called attention and has none."""


@pytest.mark.fast
def test_unknown_attention_is_named():
    """Oracle: the sentences, beside a layer that can be recorded and alone."""
    known = torch.nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True).eval()
    model, x = torch.nn.Sequential(known, StrangeAttention(24, 24), StrangeAttention(24, 24)), torch.randn(2, 5, 24)
    with torch.no_grad(), explain.capture(model) as seen:
        model(x)
    why = "StrangeAttention multiplies no values by a softmax"
    assert [layer.path for layer in seen.layers] == ["0.self_attn"] and seen.left == {"1": why, "2": why}
    with pytest.raises(ValueError, match=f"Sequential could be recorded \\(1: {why}; 2: {why}\\)"):
        rest = model[1:]
        with explain.capture(rest):
            rest(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "twins_svt_small"])
def test_dropped_attention_is_not_recorded(name):
    """Oracle: the reason, as for a plain ViT; in evaluation mode nothing is dropped."""
    model = create_model(name, img_size=32, attn_drop_rate=0.5)
    image = torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"\.0\.attn: attention dropout 0\.5"), explain.capture(model):
        model(image)
    with explain.capture(model.eval()):
        model(image)
