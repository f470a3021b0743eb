"""Tests of `explain` for detectors: what queries attend to, the command, and errors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import prints, refused
from PIL import Image

from fastvit_triton import create_model
from fastvit_triton.cli import explain as explain_cli
from fastvit_triton.cli import main
from fastvit_triton.explain import query_panels, query_views
from fastvit_triton.explain.queries import draw_queries
from fastvit_triton.train.detection import scenes

NAMES = ["detr_digits", "deformable_detr_digits"]
CLASSES = tuple("0123456789")


def made(name):
    """A small detector in evaluation mode, whose classes have scores that differ."""
    torch.manual_seed(0)
    model = create_model(name).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.1, 0.2)
    return model


def last_layer(model):
    """The last layer of the decoder."""
    return list(model.get_submodule("transformer.decoder.layers").children())[-1]


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_the_detections_and_weights_sum_to_one(name):
    """Oracle: `model.detections`; hooks are removed, and outputs stay the same."""
    model = made(name)
    images, _ = scenes("test", 2)
    with torch.no_grad():
        outputs = model(images)
        (first, second) = model.detections(outputs, [(1, 1)] * 2, 0.1)
    views = query_views(model, images, 0.1)
    for found, wanted in zip(views, (first, second), strict=True):
        order = wanted["scores"].argsort(descending=True)
        assert found and [view.score for view in found] == wanted["scores"][order].tolist()
        assert torch.equal(torch.stack([view.box for view in found]).sort(0)[0], wanted["boxes"].sort(0)[0])
        for view in found:
            part = view.map if name == "detr_digits" else view.weights
            assert part.min() >= 0 and float(part.sum()) == pytest.approx(1, abs=64 * torch.finfo(torch.float32).eps)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(images)["logits"], outputs["logits"])
    assert not query_views(model, images, 1.0)[0]


def test_maps_are_pytorchs_attention_weights():
    """Oracle: F.multi_head_attention_forward with the same weights, averaged over heads."""
    model = made("detr_digits")
    attention = last_layer(model).multihead_attn
    calls = []
    handle = attention.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    images, _ = scenes("test", 1, 3)
    views = query_views(model, images, 0.0)[0]
    handle.remove()
    q, k, v, _ = calls[0]
    ends = attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = attention.out_proj.weight, attention.out_proj.bias
    _, weights = F.multi_head_attention_forward(q, k, v, q.shape[2], attention.num_heads, *ends, *out, training=False)
    maps = torch.stack([view.map.flatten() for view in views])
    distances = torch.cdist(maps, weights[0])
    assert (
        distances.min(1)[0].max() <= 64 * torch.finfo(torch.float32).eps
    )  # each is that of a query, and none is twice
    assert sorted(distances.argmin(1).tolist()) == list(range(len(maps)))


def test_points_are_where_the_output_depends_on_the_map():
    """Oracle: gradients: the attention of a query depends on the cells around its points, and on no others."""
    model = made("deformable_detr_digits")
    attention = last_layer(model).cross_attn
    calls = []
    handle = attention.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    views = query_views(model, scenes("test", 1, 3)[0], 0.0)[0]
    handle.remove()
    q, reference, memory, shapes, mask = calls[0]
    near = {}
    for query in range(q.shape[1]):
        leaf = memory.detach().requires_grad_()
        attention(
            q[:, query : query + 1], reference[:, query : query + 1], leaf, shapes, mask
        ).square().sum().backward()
        near[query] = leaf.grad[0].abs().sum(-1) > 0
    for view in views:
        points = view.points.view(attention.num_heads, len(shapes), attention.points, 2)
        touched = []
        for i, (height, width) in enumerate(shapes):
            cells = torch.zeros(height, width, dtype=torch.bool)
            at = points[:, i].flatten(0, 1) * torch.tensor([width, height]) - 0.5
            for x, y in at.tolist():
                for row in (int(y // 1), int(y // 1) + 1):
                    for column in (int(x // 1), int(x // 1) + 1):
                        if 0 <= row < height and 0 <= column < width:
                            cells[row, column] = True
            touched.append(cells.flatten())
        assert any(torch.equal(torch.cat(touched), cells) for cells in near.values())


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_a_picture_for_each_object(name):
    """Oracle: numbers of pictures and rows; an image without objects has one picture and a sentence."""
    model = made(name)
    images, _ = scenes("test", 2)
    first, second = query_panels(model, images, images.clamp(0, 1), ["a.png", "b.png"], CLASSES, 0.1)
    assert first.name == "queries-1" and 1 <= len(first.figure.axes) <= 6 == len(second.figure.axes) + 6 - len(
        second.table[1:]
    )
    assert len(first.table) == len(first.figure.axes) + 1 and first.image == "a.png"
    (empty,) = query_panels(model, images[:1], images[:1], ["a.png"], CLASSES, 1.0)
    assert not empty.table and len(empty.figure.axes) == 1 and "No object" in empty.reading
    assert len(draw_queries(images[0].expand(3, -1, -1), [], CLASSES).axes) == 1
    with pytest.raises(TypeError, match="Linear; query_views is for DETR"):
        query_views(torch.nn.Linear(1, 1), images)


@pytest.mark.full
def test_the_command_draws_queries(tmp_path: Path, capsys, monkeypatch):
    """Oracle: files of the report; `--query` is for classifiers; no test images are read, and none are mistaken."""
    monkeypatch.setattr(explain_cli, "test_images", lambda *_: pytest.fail("read"))
    run = tmp_path / "run"
    words = ["train", "--model", "detr_digits", "--data", "scenes", "--out", str(run), "--epochs", "1"]
    from fastvit_triton.train.detection import load

    load.TRAINING, before = (32, 0), load.TRAINING
    try:
        assert main(words) == 0
    finally:
        load.TRAINING = before
    Image.new("L", (40, 30)).save(tmp_path / "image.png")
    words = [
        "explain",
        "--checkpoint",
        str(run),
        str(tmp_path / "image.png"),
        "--out",
        str(tmp_path / "report"),
    ]
    assert "shows 1 of 1 image" in prints(capsys, *words) and (tmp_path / "report" / "queries-1.png").exists()
    assert "--query 1 is for classifiers" in refused(capsys, *words, "--query", "1")
    assert "is no classifier, so there are no mistakes to explain" in refused(capsys, *words[:3])
