"""Tests of explanations: maps against each package's own softmax, numbers by hand, and the report in a browser."""

import base64
import copy
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from budget import allowed, telling
from catalogue import build, inputs, outputs, redraw
from commands import prints, refused
from interpreter import interpreting
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from patience import HANG
from PIL import Image
from test_convert import same, twins
from test_data import truncate

from fastvit_triton import create_model, explain, optimize, save_weights
from fastvit_triton.cli import main
from fastvit_triton.cli.images import class_of, names_of
from fastvit_triton.explain import figures, published
from fastvit_triton.explain import layer as layer_file
from fastvit_triton.explain.gradients import finest
from fastvit_triton.explain.layer import LayerScores
from fastvit_triton.explain.maps import half_area
from fastvit_triton.explain.page import holds_report
from fastvit_triton.train.loop import Score
from fastvit_triton.train.outputs import write_log

TINY = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=5)
OWN = {
    "plain": {},
    "qk_norm": dict(qk_norm=True),
    "post": dict(norm="post"),
    "relative": dict(pos_embed="relative"),
    "no class token": dict(class_token=False, global_pool="avg", reg_tokens=2),
}
GRADIENTS = ["timm_vit", "timm_beit", "timm_dinov3", "timm_vit_qk_norm"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def within(got, baseline, truth):
    """Asserts error ≤ 2 · (the baseline's own error + one rounding), against float64."""
    got, baseline, truth = (t.detach().double() for t in (got, baseline, truth))
    error, most = (got - truth).norm(), allowed((baseline - truth).norm(), telling(truth).norm(), torch.float32)
    assert got.shape == truth.shape and error <= most, (float(error), float(most))


def exact(got, want):
    """Asserts equality up to the rounding of a few sums in float64."""
    torch.testing.assert_close(
        got, want, rtol=64 * torch.finfo(torch.float64).eps, atol=64 * torch.finfo(torch.float64).eps
    )


def hooks(model):
    """The number of hooks of each module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [[len(getattr(m, k)) for k in kinds] for m in model.modules()]


def probabilities(model, images):
    """Each layer's softmax(scale · q kᵀ + bias) in our model, from its weights and its blocks' inputs."""
    found, inside = [], []
    handles = [b.register_forward_pre_hook(lambda _, a: inside.append(a[0])) for b in model.blocks]
    with torch.no_grad():
        model(images)
        for block, x in zip(model.blocks, inside, strict=True):
            attn, h = block.attn, x if model.config.norm == "post" else block.norm1(x)
            qkv = h @ attn.qkv.weight.T + attn.qkv.bias
            q, k, _ = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
            q, k = attn.q_norm(q), attn.k_norm(k)
            scores = q @ k.mT if attn.position is None else q @ k.mT + attn.position(q)
            found.append((attn.scale * scores).softmax(-1))
    for handle in handles:
        handle.remove()
    return found


def own(**options):
    """Our model in float64 with random parameters, the same in float32, and images."""
    model = create_model("vit_tiny_patch16_224", **TINY | options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return copy.deepcopy(model).double(), model, torch.randn(2, 3, 16, 16)


@pytest.mark.few(4)
@pytest.mark.parametrize("path", [pytest.param("reference", marks=pytest.mark.fast), "interpreter"])
@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_maps_of_our_models_equal_the_softmax(options, path):
    """Oracle: the full matrix written out in float64; outputs and hooks are those without capture."""
    truth, model, images = own(**options)
    want, before = probabilities(truth, images.double()), hooks(model)
    with torch.no_grad(), interpreting() if path == "interpreter" else torch.no_grad():
        output = model(images)
        with explain.capture(model) as seen:
            watched = model(images)
        maps = [layer.map() for layer in seen.layers]
    assert same(watched, output)
    assert [layer.path for layer in seen.layers] == ["blocks.0.attn", "blocks.1.attn"] and len(seen.stream) == 3
    for got, right in zip(maps, want, strict=True):
        assert got.shape == right.shape and same(got.double(), right, torch.float32)
    assert hooks(model) == before and not seen.left


@pytest.mark.fast
@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "optimised"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_map_gradients_equal_autograd(name, optimised, references):
    """Oracle: autograd through the package's own probabilities in float64, for a random cotangent."""
    truth, plain, model, exactly, given = twins(name, False)
    if optimised:
        optimize(model)
    asked, cotangent = [], None
    for oracle, images in ((truth, exactly), (plain, given)):
        maps = []
        for module in oracle.modules():
            if hasattr(module, "fused_attn") and hasattr(module, "attn_drop"):
                module.fused_attn = False
                module.attn_drop.register_forward_pre_hook(lambda _, a, found=maps: found.append(a[0]))
        y = outputs(oracle, images)
        cotangent = torch.randn(y.shape) if cotangent is None else cotangent
        asked.append(torch.autograd.grad((y * cotangent).sum(), maps))
    with explain.capture(model, gradients=True) as seen:
        (outputs(model, given) * cotangent).sum().backward()
    for layer, want, one in zip(seen.layers, *asked, strict=True):
        within(layer.map_grad(), one, want)


@pytest.mark.fast
def test_gradient_rollout_depends_on_the_class():
    """Oracle: the paper's recursion with autograd's gradients of written-out attention; no hook or gradient stays."""
    truth, _, images = own()
    images, classes = images.double(), torch.tensor([3, 1])
    maps = []

    def attend(attn, inputs, named):
        h = torch.nn.functional.layer_norm(inputs[0], inputs[0].shape[-1:], *norm_of[attn])
        q, k, v = attn.qkv(h).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        maps.append((attn.scale * q @ k.mT).softmax(-1))
        return attn.proj((maps[-1] @ v).transpose(1, 2).flatten(2))

    norm_of = {b.attn: (b.norm1.weight, b.norm1.bias, b.norm1.eps) for b in truth.blocks}
    x = truth.patch_embed(images, truth.positions((4, 4)), torch.cat(truth.prefix(), 1))
    for block in truth.blocks:
        x = x + attend(block.attn, (x,), {})
        x = x + block.mlp(block.norm2(x))
    logits = truth.forward_head(truth.norm(x))
    torch.testing.assert_close(logits, truth(images))
    grads = torch.autograd.grad(logits[[0, 1], classes].sum(), maps)
    want = torch.eye(17, dtype=torch.float64).expand(2, -1, -1)
    for a, g in zip(maps, grads, strict=True):
        want = want + (a * g).clamp_min(0).mean(1) @ want
    got = explain.class_relevance(truth, images, classes)
    eps = torch.finfo(torch.float32).eps  # of the log-sum-exp
    assert (got - want).norm() <= 8 * eps * want.norm()
    assert all(p.grad is None for p in truth.parameters()) and not any(map(any, hooks(truth)))


def test_rows_and_blocks_equal_the_whole_map(monkeypatch):
    """Oracle: the whole map, with and without a bias."""
    monkeypatch.setattr(layer_file, "ROWS", 5)
    for options in (OWN["plain"], OWN["relative"]):
        _, model, images = own(**options)
        with torch.no_grad(), explain.capture(model) as seen:
            model(images)
        layer = seen.layers[1]
        whole = layer.map()
        some = torch.tensor([3, 0])
        torch.testing.assert_close(layer.rows(some), whole[:, :, some])
        torch.testing.assert_close(layer.rows(0), whole[:, :, :1])
        torch.testing.assert_close(layer.rows(-1), whole[:, :, -1:])
        torch.testing.assert_close(torch.cat([rows for _, rows in layer.blocks()], 2), whole)


def test_masked_queries_have_zero_attention():
    """Oracle: zeros for a query whose boolean mask excludes every key."""
    model = build("torch_encoder_layer", torch.float32).eval()
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    with torch.no_grad(), explain.capture(model) as seen:
        model(inputs("torch_encoder_layer", torch.float32), src_mask=mask)
    sums = seen.layers[0].map().sum(-1)
    torch.testing.assert_close(sums, (torch.arange(5) != 2).float().expand_as(sums))


@pytest.mark.parametrize("causal", [False, True])
def test_boolean_masks_select_keys(causal):
    """Oracle: softmax over the keys whose mask is True, and up to the query, written out; float64 stays float64."""
    q, k, v = torch.randn(3, 2, 4, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, True, True], [True] * 3])
    layer = explain.AttentionLayer("a", LayerScores(q, k, v, mask[None, None].expand(2, 4, 3, 3), 0.7, causal), 5)
    seen = mask & torch.ones(3, 3, dtype=torch.bool).tril() if causal else mask
    want = (0.7 * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    got = layer.map()
    assert got.dtype == torch.float64 and layer.shape == (2, 4, 3, 3)
    exact(got, want)
    exact(torch.cat([layer.rows(n) for n in range(3)], 2), want)


@pytest.mark.full
def test_capture_errors_are_one_sentence():
    """Oracle: the sentences; hooks are removed after an error in the model as well."""
    _, model, images = own()
    before = hooks(model)
    with (
        pytest.raises(ValueError, match="no attention of Linear could be recorded"),
        explain.capture(torch.nn.Linear(2, 2)),
    ):
        pass
    with pytest.raises(ValueError, match="the model takes 16x16"), explain.capture(model):
        model(images[:, :, :10])
    assert hooks(model) == before
    dropping = create_model("vit_tiny_patch16_224", **TINY, attn_drop_rate=0.5).train()
    with pytest.raises(ValueError, match=r"blocks\.0\.attn: attention dropout 0\.5"), explain.capture(dropping):
        dropping(images)
    with torch.no_grad(), explain.capture(model) as seen:
        model(images)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn has no gradient"):
        seen.layers[0].map_grad()


@pytest.mark.fast
def test_rollout_by_hand():
    """Oracle: (A + I) / 2 multiplied by hand; rows sum to 1 for every fusion and discard ratio."""
    first = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    second = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    want = torch.tensor([[0.75, 0.25], [0.1875, 0.8125]], dtype=torch.float64)  # [[1, 0], [¼, ¾]] · [[¾, ¼], [0, 1]]
    exact(explain.rollout([first[None, None], second[None, None]])[0], want)
    identity = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    exact(explain.rollout([identity] * 3), identity[:, 0])
    maps = [torch.rand(2, 3, 6, 6, dtype=torch.float64).softmax(-1) for _ in range(4)]
    for heads in ("mean", "max", "min"):
        for discard in (0.0, 0.5, 0.9):
            flow = explain.rollout(iter(maps), heads, discard)
            exact(flow.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    pair = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.2, 0.8], [0.4, 0.6]]], dtype=torch.float64)[None]
    exact(explain.rollout([pair], "max")[0, 0], torch.tensor([(0.9 / 1.7 + 1) / 2, 0.8 / 3.4], dtype=torch.float64))
    exact(explain.rollout([pair], "min")[0, 0], torch.tensor([(0.2 / 0.3 + 1) / 2, 0.1 / 0.6], dtype=torch.float64))
    exact(explain.rollout([pair], "mean", 0.25)[0, 1], torch.tensor([0.0, 1.0], dtype=torch.float64))
    exact(explain.rollout([pair[:, :1]], "mean", 0.25)[0, 0], torch.tensor([1.0, 0.0], dtype=torch.float64))
    for arguments, sentence in (
        (([pair], "median"), "heads is 'median'; use one of mean, max, min"),
        (([pair], "mean", 1.0), "discard is 1.0; it must be at least 0 and below 1"),
        (([],), "maps is empty"),
        (([pair, identity[:1]],), "maps have 2 and then 6 tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            explain.rollout(*arguments)


def test_distance_and_entropy_by_hand():
    """Oracle: a uniform map on 2 × 2 patches of 10 px has mean distance (0 + 10 + 10 + 10√2) / 4, the identity 0."""
    uniform = torch.full((1, 1, 4, 4), 0.25, dtype=torch.float64)
    identity = torch.eye(4, dtype=torch.float64)[None, None]
    every = torch.arange(4)
    far = (20 + 10 * math.sqrt(2)) / 4
    exact(explain.attention_distance([(every, uniform)], (2, 2), (10, 10)), torch.tensor([[far]], dtype=torch.float64))
    exact(explain.attention_distance([(every, identity)], (2, 2), (10, 10)), torch.zeros(1, 1, dtype=torch.float64))
    exact(explain.entropy([(every, uniform)]), torch.tensor([[math.log(4)]], dtype=torch.float64))
    exact(explain.entropy([(every, identity)]), torch.zeros(1, 1, dtype=torch.float64))
    with_prefix = torch.full((1, 1, 6, 6), 1 / 6, dtype=torch.float64)  # two prefix tokens make no difference
    with_prefix[..., :2] = 0.25
    with_prefix[..., 2:] = 0.125
    blocks = [(torch.arange(3), with_prefix[:, :, :3]), (torch.arange(3, 6), with_prefix[:, :, 3:])]
    exact(explain.attention_distance(blocks, (2, 2), (10, 10)), torch.tensor([[far]], dtype=torch.float64))
    step = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    step[..., 0, 1] = step[..., 1, 0] = 1  # each of two patches, one below the other, attends to the other
    exact(explain.attention_distance([(torch.arange(2), step)], (2, 1), (7, 9)), torch.tensor([[7.0]]).double())
    with pytest.raises(ValueError, match="grid 3 x 3 has 9 patches, but the map has 4 tokens"):
        explain.attention_distance([(every, uniform)], (3, 3), (1, 1))


def test_half_a_map_by_hand():
    """Oracle: a half of a uniform map, half a patch of one spot; 4 of 4 + 3 + 2 + 1 and a third of 3 are 5."""
    spot = torch.zeros(4, 5)
    spot[2, 3] = 7.0
    assert half_area(torch.full((3, 4), 0.1)) == pytest.approx(0.5) and half_area(spot) == 0.5 / 20
    assert half_area(torch.tensor([[3.0, 1], [2, 4]])) == pytest.approx((1 + 1 / 3) / 4)


def test_components_equal_numpys():
    """Oracle: numpy's SVD of the centred matrix, up to sign; the largest entry determines the sign."""
    samples = torch.randn(20, 7, dtype=torch.float64)
    directions, along, part = explain.principal_components(samples, 5)
    centred = samples.numpy() - samples.numpy().mean(0)
    _, values, rows = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign(np.take_along_axis(rows, abs(rows).argmax(1)[:, None], 1))
    # a direction's error is a rounding of the matrix divided by the gap to the next singular value
    known = 64 * torch.finfo(torch.float64).eps * values[0] / -np.diff(values)[:5].max()
    torch.testing.assert_close(directions, torch.from_numpy((rows * signs)[:5]), rtol=0, atol=float(known))
    exact(along, torch.from_numpy(centred) @ directions.T)
    exact(part, torch.from_numpy((values**2 / (values**2).sum())[:5]))
    with pytest.raises(ValueError, match=r"count is 8; samples of shape \[20, 7\] have 1 to 7"):
        explain.principal_components(samples, 8)


def test_filters_and_colours():
    """Oracle: two known patterns in the filters are recovered; patches of two kinds get two colours."""
    patterns = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 1]])
    weights = torch.tensor([[4.0, 0], [-4, 0], [0, 1], [0, -1]]) @ patterns
    components = explain.filter_components(weights.view(4, 1, 2, 2))
    torch.testing.assert_close(components[:2].flatten(1), patterns)
    where = explain.Geometry((2, 2), 1, (1.0, 1.0))
    tokens = torch.tensor([[9.0, 9, 9], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])[None]
    colours = explain.feature_colours(tokens, where)
    assert colours.shape == (1, 2, 2, 3) and colours.min() >= 0 and colours.max() <= 1
    torch.testing.assert_close(colours[0, 0], colours[0, 1])
    assert not torch.equal(colours[0, 0, 0], colours[0, 0, 1])


@pytest.mark.parametrize("stem", ["conv", "linear"])
def test_filters_of_both_stems_equal_the_projection(stem):
    """Oracle: the stem's own tokens are the products of its filters with the patches."""
    model = create_model("vit_tiny_patch16_224", **TINY, patch_embed=stem).eval()
    images = torch.randn(1, 3, 16, 16)
    filters = explain.patch_filters(model, 3)
    tokens = torch.nn.functional.conv2d(images, filters, model.patch_embed.proj.bias, stride=4).flatten(2).mT
    torch.testing.assert_close(tokens, model.patch_embed(images).detach())


def test_similarity_by_hand():
    """Oracle: 1 for equal tokens, 0 for orthogonal ones, −1 for opposite ones; three tokens by hand."""
    same, across = torch.ones(1, 3, 4), torch.eye(3)[None]
    torch.testing.assert_close(explain.token_similarity(same), torch.ones(1))
    torch.testing.assert_close(explain.token_similarity(across), torch.zeros(1))
    torch.testing.assert_close(explain.token_similarity(torch.tensor([[[2.0, 0], [-1, 0]]])), -torch.ones(1))
    some = torch.tensor([[[1.0, 0], [1, 1], [0, 3]]])
    torch.testing.assert_close(explain.token_similarity(some), torch.tensor([math.sqrt(2) / 3]))
    table = torch.tensor([[1.0, 0], [0, 2], [-3, 0], [1, 1]])
    cosines = explain.position_similarity(table, (2, 2))
    torch.testing.assert_close(cosines[0, 0], torch.tensor([[1.0, 0], [-1, math.sqrt(0.5)]]))
    with pytest.raises(ValueError, match=r"table has shape \[4, 2\]; grid 3 x 3 needs \[9, D\]"):
        explain.position_similarity(table, (3, 3))


@pytest.mark.parametrize(
    "pairs, channels", [(True, [0, 0, 1, 1, 2, 2, 3, 3]), (False, [0, 1, 2, 3] * 2), (4, [0, 1, 0, 1, 2, 3, 2, 3])]
)
def test_rotary_bands_by_hand(pairs, channels):
    """Oracle: tables made from known angles per patch, which may exceed π."""
    speeds = torch.tensor([[0.5, 0.0], [0.0, 1.5], [0.25, 0.125], [1.0, 0.5]], dtype=torch.float64)  # [pairs, 2]
    y, x = torch.meshgrid(torch.arange(5.0).double(), torch.arange(4.0).double(), indexing="ij")
    angle = (y[..., None] * speeds[:, 0] + x[..., None] * speeds[:, 1]).flatten(0, 1)  # [h·w, pairs]
    wide = angle[:, channels]
    exact(explain.rotary_bands((wide.cos(), wide.sin(), pairs), (5, 4)), speeds)
    with pytest.raises(ValueError, match="rotary bands need a grid of at least 2 x 2"):
        explain.rotary_bands((wide.cos(), wide.sin(), pairs), (20, 1))


def test_position_tables_and_grids_of_known_models():
    """Oracle: the models' own tables and patch sizes."""
    where = explain.Geometry((2, 2), 1, (16.0, 16.0))
    for name, table in (
        ("timm_vit", lambda m: m.pos_embed[0, 1:]),
        ("hf_vit", lambda m: m.embeddings.position_embeddings[0, 1:]),
        ("hf_clip", lambda m: m.embeddings.position_embedding.weight[1:]),
        ("torchvision_vit", lambda m: m.encoder.pos_embedding[0, 1:]),
        ("vit_pytorch_vit", lambda m: m.pos_embedding[-4:]),
    ):
        model = build(name)
        assert explain.geometry(model, inputs(name), 5) == where, name
        assert torch.equal(explain.position_table(model, where), table(model).reshape(-1, 24)[-4:]), name
    assert explain.position_table(build("timm_dinov3"), where) is None
    with pytest.raises(ValueError, match="the image has 2 x 2 patches, but attention has 3 tokens"):
        explain.geometry(build("timm_vit"), inputs("timm_vit"), 3)


def test_cost_by_hand():
    """Oracle: numbers worked out for a model of one block, and for a sequence of pixels."""
    row = explain.image_cost(8, 4, dim=6, depth=1, num_heads=2, head_dim=3, hidden=24, channels=1, prefix=1)
    assert row.tokens == 5
    assert row.linear_flops == 2 * 4 * 16 * 6 + 2 * 5 * (3 * 36 + 36 + 2 * 6 * 24)
    assert row.attention_flops == 2 * (2 * 2 * 5 * 5 * 3)  # q kᵀ and A v, two heads
    assert (row.matrix_bytes, row.fused_bytes) == (2 * 25 * 2, 4 * 5 * 6 * 2 + 2 * 5 * 4)
    model = dict(dim=768, depth=12, num_heads=12, head_dim=64, hidden=3072)
    rows = explain.cost_table(16, (224, 384), **model)
    assert [r.tokens for r in rows] == [197, 577, 50_176]
    assert rows[-1].matrix_bytes == 12 * 50_176**2 * 2
    with pytest.raises(ValueError, match="side is 10, not a multiple of the patch 4; use 8"):
        explain.image_cost(10, 4, **model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits model with random weights, and the log of a run."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("runs") / "digits & <co>"
    out.mkdir()
    model = redraw(create_model("vit_digits_patch2_8"))
    about = {
        "data": "digits",
        "classes": list("0123456789"),
        "transform": {"size": (8, 8), "mean": (0.3,), "std": (0.4,)},
        "batch_size": 64,
        "skip_bad_images": False,
    }
    save_weights(model, out / "model.safetensors", metadata={"training": json.dumps(about)})
    row = dict(epoch=1, lr=0.1, train_loss=2.0, train_accuracy=0.1, test_loss=None, test_accuracy=None)
    write_log(out / "log.csv", [row, row | {"epoch": 2, "test_loss": 2.1, "test_accuracy": 0.2}])
    pictures = out / "pictures"
    pictures.mkdir()
    for i in range(3):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (24, 24), dtype=np.uint8)).save(pictures / f"{i}.png")
    return out


@pytest.fixture(scope="module")
def page(checkpoint: Path) -> Path:
    """The report on two of its three images."""
    out = checkpoint / "report"
    words = ["--checkpoint", checkpoint, checkpoint / "pictures", "--out", out, "--most", "2"]
    assert main(["explain", *map(str, words)]) == 0
    return out / "report.html"


EACH = ("prediction", "attention", "rollout", "tokens")
ONCE = ("layers", "similarity", "positions", "cost")
OPEN = ("why", "curves", "confusion")


def test_report_contains_every_figure(page: Path):
    """Oracle: the list of figures, the diagnostics after the others; each is a PNG whose bytes are embedded in the
    page, and nothing is fetched."""
    text = page.read_text()
    folded = [f"{i:02d}-{name}" for i in (1, 2) for name in EACH] + list(ONCE)
    names = [*OPEN, *folded]
    assert sorted(f.name for f in page.parent.iterdir()) == sorted(["report.html", *(f"{n}.png" for n in names)])
    inside = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    assert inside == [(page.parent / f"{name}.png").read_bytes() for name in names]
    assert all(data.startswith(b"\x89PNG") for data in inside)
    assert len(re.findall(r'alt="[^"]{20,}"', text)) == len(names) == text.count("<img")
    assert not re.search(r'(src|href)="(?!data:|#)|url\(|@import|<script|<link', text)
    assert re.findall(r'<section id="([^"]+)"', text) == names
    (inner,) = re.findall(r"<details>(.*)</details>", text, re.DOTALL)
    assert re.findall(r'href="#([^"]+)"', text) == re.findall(r'<section id="([^"]+)"', inner) == folded  # the contents
    assert "digits &amp; &lt;co&gt;" in text and "<co>" not in text
    assert "50,176" in text
    assert "<h2>Training curves of the run, not of the images above</h2>" in text
    assert "<h2>Confusion matrix of the run&#x27;s 360 test images, not of the images above</h2>" in text


@pytest.mark.fast
def test_a_second_report_leaves_no_figure_of_the_first(tmp_path: Path):
    """Oracle: the files: figures that the first page has are gone, but not one that was replaced, or a user's own; a
    file that the earlier page does not list is not overwritten, and then nothing is written."""

    def written(*names: str) -> set[str]:
        figures = [explain.Panel(name, name, "r", "a", Figure(figsize=(1, 1))) for name in names]
        explain.write_report(figures, tmp_path, "t")
        return {file.name for file in tmp_path.iterdir()} - {"report.html"}

    assert written("01-tokens", "02-tokens", "03-tokens") == {"01-tokens.png", "02-tokens.png", "03-tokens.png"}
    (tmp_path / "mine.png").write_bytes(b"mine")
    (tmp_path / "03-tokens.png").write_bytes(b"mine, too")
    assert written("01-tokens", "why") == {"01-tokens.png", "03-tokens.png", "mine.png", "why.png"}
    before = (tmp_path / "report.html").read_bytes()
    for name in ("mine", "03-tokens"):
        with pytest.raises(ValueError, match=rf"{name}\.png is not of the report in this folder; move it, or give"):
            written("new", name)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"mine") and not (tmp_path / "new.png").exists()
    assert (tmp_path / "report.html").read_bytes() == before
    (tmp_path / "report.html").write_bytes(b"\xff of another program")
    with pytest.raises(ValueError, match=r"holds 01-tokens\.png, 03-tokens\.png, mine\.png and more, but no report of"):
        written()


def test_a_folder_of_other_files_is_refused(checkpoint: Path, page: Path, tmp_path: Path, undrawn, capsys):
    """Oracle: the sentence, and the folder as it was; a hidden file is no content; an earlier report is replaced."""
    (tmp_path / "tokens.png").write_bytes(b"mine")
    words = ["explain", "--checkpoint", str(checkpoint), str(checkpoint / "pictures" / "0.png"), "--no-test"]
    assert main([*words, "--out", str(tmp_path)]) == 2
    advice = "give a new or empty folder, or that of an earlier report"
    assert f"--out {tmp_path} holds tokens.png, but no report of explain; {advice}" in capsys.readouterr().err
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("tokens.png", b"mine")]
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".hidden").touch()
    assert not holds_report(tmp_path / "hidden")
    shutil.copytree(page.parent, tmp_path / "new")
    assert main([*words, "--out", str(tmp_path / "new")]) == 0
    said = "new/report.html shows 1 of 1 image and replaces an earlier report; its figures are in the same folder"
    assert said in capsys.readouterr().out


def test_costs_of_the_report_by_hand(page: Path):
    """Oracle: FLOPs counted by hand for the smallest and the largest number of tokens, in units of 10⁹
    with three digits."""
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page.read_text())
    found = {label: numbers for label, *numbers in rows}
    config = create_model("vit_digits_patch2_8").config
    D, depth = config.embed_dim, config.depth
    for label, patches, patch, N in (("8 px, patch 2", 16, 2, 17), ("224 px, one token per pixel", 50_176, 1, 50_176)):
        products = patches * patch**2 * D + depth * N * D * (4 * D + 8 * D) + depth * 2 * N**2 * D
        tokens, flops = found[label]
        assert tokens == f"{N:,}" and float(flops.replace(",", "")) == pytest.approx(2 * products / 1e9, rel=0.005)


def panels_of(report) -> list[explain.Panel]:
    """The figures of a report, without what is left out."""
    return [panel for panel in report if isinstance(panel, explain.Panel)]


def sizes(drawn: Figure) -> list[float]:
    """Heights in pixels of the letters of a figure on a phone, which shows it 358 pixels wide."""
    texts = [t for t in drawn.findobj(Text) if t.get_visible() and t.get_text().strip()]
    return [t.get_fontsize() / 72 * 358 / drawn.get_figwidth() for t in texts]


@pytest.mark.full
def test_labels_can_be_read_on_a_phone():
    """Oracle: letters of 10 pixels at least, about a browser's smallest heading (0.67 em)."""
    model = create_model("vit_tiny_patch16_224", **TINY).eval()
    classes = tuple(f"class number {i} with a long name" for i in range(5))
    panels = panels_of(explain.explain(model, torch.randn(2, 3, 16, 16), torch.rand(2, 3, 16, 16), ["a", "b"], classes))
    row = dict(epoch=1, lr=0.1, train_loss=2.0, train_accuracy=0.1, test_loss=2.1, test_accuracy=0.2)
    score = Score(0.1, 1.0, torch.arange(10), torch.arange(10))
    panels += [*explain.explain_run([row], score, tuple("0123456789")), explain.published_tables()]
    assert {panel.name.removeprefix("01-") for panel in panels} > {
        "why",
        "tokens",
        "filters",
        "cost",
        "curves",
        "confusion",
    }
    for panel in panels:
        assert min(sizes(panel.figure), default=10) >= 10, panel.name


def test_labels_of_the_confusion_matrix_end_at_their_column():
    """Oracle: where matplotlib draws them: each ends below its column, whatever the lengths of the names."""
    classes = ("Appenzeller Sennenhund", "cat", "a bird of prey", "dog")
    score = Score(0.1, 1.0, torch.arange(4), torch.arange(4))
    (panel,) = explain.explain_run(None, score, classes)
    panel.figure.canvas.draw()
    (axes,) = panel.figure.axes
    columns = axes.transData.transform([(i, 0.0) for i in range(4)])[:, 0]
    half = (columns[1] - columns[0]) / 2
    for label, column in zip(axes.get_xticklabels(), columns, strict=True):
        assert abs(label.get_window_extent().x1 - column) < half, label.get_text()


def test_pictures_of_tokens_align():
    """Oracle: the places that matplotlib computes: one top, one bottom and one width."""
    drawn = figures.draw_tokens(torch.rand(3, 16, 24), torch.rand(4, 6), torch.rand(4, 6, 3), [3.0])
    drawn.canvas.draw()
    boxes = [axes.get_position() for axes in drawn.axes if axes.images and axes.get_title()]
    assert len(boxes) == 3
    for name in ("y0", "y1", "width"):
        np.testing.assert_allclose([getattr(box, name) for box in boxes], getattr(boxes[0], name), atol=1e-3)


def test_norms_reach_from_the_smallest_to_the_largest():
    """Oracle: the norms; the legend of the components."""
    drawn = figures.draw_tokens(torch.rand(3, 8, 8), torch.tensor([[9.0, 16], [12, 10]]), torch.rand(2, 2, 3), [])
    assert drawn.axes[1].images[0].get_clim() == (9.0, 16.0)
    assert "red, green, blue" in drawn.get_supxlabel()


def test_attention_of_each_layer_fills_the_width():
    """Oracle: by hand: the image, then 4 heads in a row, 6 in a row, 16 in two of 8 and 9 in two of 5, one blank;
    tiles are mosaics of squares."""
    heads = {1: torch.rand(4, 8, 8), 4: torch.rand(6, 4, 4), 7: torch.rand(16, 4, 4), 9: torch.rand(9, 4, 4)}
    drawn = figures.draw_attention(torch.rand(3, 32, 32), heads)
    image, *rows = drawn.axes
    assert image.get_title() == "image" and image.images[0].get_array().shape == (32, 32, 3)
    assert [label.get_text() for axes in rows for label in axes.get_yticklabels()] == ["1", "4", "7", "9"]
    places = [axes.get_position() for axes in rows]
    assert {(place.x0, place.x1) for place in places} == {(places[0].x0, places[0].x1)} and places[0].x1 > 0.95
    assert all(above.y0 > place.y1 for above, place in zip((image.get_position(), *places), places, strict=False))
    for axes, place, (down, across), blank in zip(
        rows, places, ((1, 4), (1, 6), (2, 8), (2, 5)), (0, 0, 0, 1), strict=True
    ):
        shades = np.ma.filled(axes.images[0].get_array(), np.nan)
        tile = [round(size / count) for size, count in zip(shades.shape, (down, across), strict=True)]
        middles = shades[tile[0] // 2 :: tile[0], tile[1] // 2 :: tile[1]]
        assert middles.shape == (down, across) and np.isnan(middles).sum() == blank
        width, height = np.multiply((place.width, place.height), drawn.get_size_inches())
        assert height / width == pytest.approx(shades.shape[0] / shades.shape[1])


def test_similarity_counts_attention_layers():
    """Oracle: by hand: LeViT's third layer halves the grid; markers at 1 and 0 lie inside the axes."""
    model = create_model("levit_128s", img_size=64, num_classes=5).eval()
    with torch.no_grad(), explain.capture(model) as seen:
        model(torch.randn(1, 3, 64, 64))
    assert [n for n, layer in enumerate(seen.layers, 1) if layer.halves] == [3, 7]
    assert seen.depths == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11] and len(seen.stream) == 10
    drawn = figures.draw_similarity({0: 0.0, 1: 0.5, 2: 1.0, 4: 1.0})
    drawn.canvas.draw()
    (axes,) = drawn.axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [0, 1, 2, 4]
    radius = (line.get_markersize() + line.get_markeredgewidth()) / 2 * drawn.dpi / 72
    low, high = axes.transData.transform([(0, 0.0), (0, 1.0)])[:, 1]
    assert axes.bbox.y0 <= low - radius and high + radius <= axes.bbox.y1


def test_cost_is_drawn_as_dots():
    """Oracle: the rows' numbers in GFLOP, and no bar, whose length would depend on where the axis begins."""
    rows = explain.cost_table(16, (224, 384), dim=192, depth=2, num_heads=3, head_dim=64, hidden=768)
    (axes,) = figures.draw_cost(rows).axes
    assert not axes.patches
    for line, name in zip(axes.lines, ("linear_flops", "attention_flops"), strict=True):
        assert line.get_linestyle() == "None" and line.get_xdata().tolist() == [
            getattr(row, name) / 1e9 for row in rows
        ]


def test_layers_without_choice_are_left_out():
    """Oracle: by hand: zero queries attend uniformly; of 2 x 2 patches, a layer has 4 keys, and positions are no
    picture; filters of 2 x 2 pixels show no pattern."""
    _, model, images = own(class_token=False, global_pool="avg", pos_embed="learned")
    model.blocks[0].attn.qkv.weight.data[:24] = 0
    model.blocks[0].attn.qkv.bias.data[:24] = 0

    def parts(model, images):
        report = list(explain.explain(model, images, images.sigmoid(), ["a", "b"]))
        panels = {part.name: part for part in report if isinstance(part, explain.Panel)}
        return panels, {part.title: part.reason for part in report if isinstance(part, explain.Absent)}

    panels, absent = parts(model, images)
    assert absent["distance and entropy of layer 1"] == "attention is uniform"
    assert "distance and entropy of layer 2" not in absent
    for axes in panels["layers"].figure.axes:
        assert {x for dots in axes.collections for x, _ in dots.get_offsets().tolist()} == {2.0}
    model.blocks[0].attn.qkv.bias.data[:24] = 1
    assert "distance and entropy of layer 1" not in parts(model, images)[1]
    small = create_model(
        "vit_tiny_patch16_224", **TINY | dict(img_size=4, patch_size=2, class_token=False, global_pool="avg")
    )
    panels, absent = parts(redraw(small).eval(), torch.randn(2, 3, 4, 4))
    assert not {"layers", "positions", "filters"} & panels.keys()
    for n in (1, 2):
        assert absent[f"distance and entropy of layer {n}"] == "attention to 4 tokens or fewer has little choice"
    assert absent["similarity of position embeddings"] == "2 × 2 patches are fewer than 4 × 4"
    assert absent["filters of the patch embedding"] == "2 × 2 pixels are fewer than 3 × 3"


def test_bars_are_as_wide_as_probabilities():
    """Oracle: the probabilities in per cent, the most likely class on top, and a label with the number beside each."""
    chances = torch.tensor([0.02, 0.5, 0.08, 0.3, 0.1])
    axes = figures.draw_predictions(torch.rand(3, 4, 4), chances, tuple("abcde"), most=4).axes[1]
    bars = sorted(axes.patches, key=lambda bar: -bar.get_y())
    middles = [bar.get_y() + bar.get_height() / 2 for bar in bars]
    assert middles == pytest.approx(axes.get_yticks()[::-1]) and all(bar.get_x() == 0 for bar in bars)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "e", "d", "b"]
    assert [bar.get_width() for bar in bars] == pytest.approx([50, 30, 10, 8])
    texts = sorted(axes.texts, key=lambda text: -text.get_position()[1])
    assert [text.get_text() for text in texts] == ["50.0 %", "30.0 %", "10.0 %", "8.0 %"]


def test_why_is_warm_where_the_map_is():
    """Oracle: the hot patch's place, the given lines beside each image, and no colour for a map of zeros; a second map
    of an image, of the true class, is drawn, and what is written below a map ends below it, beside no other."""
    heats = torch.zeros(4, 4, 6)
    heats[0, 1, 4], heats[1, 3, 0], heats[3, 2, 2] = 2.0, 0.5, 1.0
    titles = [(f"{i}.png", f"cat {i} $ %", "then dog") for i in range(3)]
    below = "half the map lies on\n5.6 % of the image"
    maps = [[(heat, below)] for heat in heats[:3]]
    pictures = torch.rand(3, 3, 64, 96)
    scale = "Each map has its own scale, from 0 to its largest value."
    for found in (maps, [[*maps[0], (heats[3], f"Appenzeller Se…:\n{below}")], *maps[1:]]):
        drawn = figures.draw_why(pictures, found, titles)
        texts = [text.get_text() for text in drawn.texts]
        assert texts == [
            *(
                line
                for texts, of in zip(titles, found, strict=True)
                for line in (*"\n".join(t for _, t in of).split("\n"), *texts)
            ),
            scale,
        ]
        drawn.canvas.draw()
        boxes = [text.get_window_extent() for text in drawn.texts]
        assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 and box.y0 >= 0 for box in boxes)
        assert not any(
            a.overlaps(b) for i, a in enumerate(boxes) for b in [*boxes[:i], *(axes.bbox for axes in drawn.axes)]
        )
    overlays = [axes.images[1].get_array() for axes in drawn.axes if len(axes.images) == 2]
    assert [len(axes.images) for axes in drawn.axes] == [1, 2, 2, 1, 2, 1, 1]
    for overlay, (row, column) in zip(overlays, ((1, 4), (2, 2), (3, 0)), strict=True):
        alpha = overlay[..., 3]
        y, x = np.unravel_index(alpha.argmax(), alpha.shape)
        assert (int(y / alpha.shape[0] * 4), int(x / alpha.shape[1] * 6)) == (row, column)
        assert alpha.max() == pytest.approx(0.8) and (alpha > 0.4).mean() < 4 / 24  # a quarter is within one patch


def test_a_picture_is_dimmed_evenly_where_its_map_is_cold():
    """Oracle: a white picture under a map of two spots, around which bicubic interpolation is negative: a warmer place
    is brighter and not more transparent, and cold places are of one gray."""
    heat = torch.full((8, 8), 0.02, dtype=torch.float64)
    heat[0, 0], heat[4, 4], heat[1, 6] = 0.0, 1.0, 0.4
    drawn = figures.draw_why(torch.ones(1, 3, 64, 64), [[(heat, "")]], [("a", "b", "c")])
    colours = np.asarray(drawn.axes[1].images[1].get_array())
    smooth = torch.nn.functional.interpolate(heat[None, None], (256, 256), mode="bicubic")[0, 0].numpy()
    alpha, order = colours[..., 3], smooth.ravel().argsort()
    luminance = colours[..., :3] @ (0.2126, 0.7152, 0.0722)
    rounding = np.finfo(np.float32).eps
    for values in (alpha, luminance):
        assert (np.diff(values.ravel()[order]) >= -rounding).all() and values.max() > 2 * values.min()
    cold = smooth < 0.03
    assert (smooth < -0.01).any() and (smooth[cold] > 0.02).any()
    shown = 1 - alpha + alpha * luminance
    assert np.ptp(shown[cold]) < 0.05 and shown[cold].max() < 0.7


def test_the_first_panel_says_what_and_where():
    """Oracle: classes and probabilities of the logits; the map is `class_relevance` of the class token, without
    which the names alone would be drawn; uniform maps are named."""
    _, model, images = own()
    classes = tuple("abcde")
    first, *_ = explain.explain(model, images, images.sigmoid(), ["one.png", "two.png"], classes)
    chances, order = model(images).softmax(1).sort(descending=True)
    relevance = explain.class_relevance(model, images)[:, 0, 1:].view(2, 4, 4)
    every = zip(first.alt.split("; "), (100 * chances).tolist(), order.tolist(), relevance, strict=True)
    for text, values, at, heat in every:
        (best, other), (high, next_) = (classes[k] for k in at[:2]), values[:2]
        lies = f"half the map lies on {100 * half_area(heat):.2g} % of the image"
        assert text.endswith(f", {best}: {high:.1f} %, then {other}: {next_:.1f} %, {lies}")
    assert first.name == "why" and not first.folded
    alphas = [axes.images[1].get_array()[..., 3] for axes in first.figure.axes if len(axes.images) == 2]
    for alpha, wanted in zip(alphas, relevance, strict=True):
        y, x = np.unravel_index(alpha.argmax(), alpha.shape)
        assert wanted[int(4 * y / len(alpha)), int(4 * x / len(alpha))] == wanted.max()
    assert "as coarse as the model's patches, 4 × 4" in first.reading
    wrong = int(order[0, -1])
    first, *_ = explain.explain(
        model, images, images.sigmoid(), ["one.png", "two.png"], classes, None, [wrong, int(order[1, 0])]
    )
    text, right = first.alt.split("; ")
    assert f" %, true class {classes[wrong]}: {100 * chances[0, -1]:.1f} %, " in text and ", then " in right
    of_true = explain.class_relevance(model, images[:1], torch.tensor([wrong]))[0, 0, 1:].view(4, 4)
    assert text.endswith(f"{classes[wrong]}: half the map lies on {100 * half_area(of_true):.2g} % of the image")
    assert [len(axes.images) for axes in first.figure.axes] == [1, 2, 2, 1, 2]  # no second map of the right one
    alpha = first.figure.axes[2].images[1].get_array()[..., 3]
    y, x = np.unravel_index(alpha.argmax(), alpha.shape)
    assert of_true[int(4 * y / len(alpha)), int(4 * x / len(alpha))] == of_true.max()
    torch.nn.init.zeros_(model.head.weight)  # no gradient reaches a patch
    first, *_ = explain.explain(model, images, images.sigmoid(), ["one.png", "two.png"], classes)
    assert first.alt.count(", the map is uniform") == 2


def test_images_are_named_with_the_folders_of_classes(tmp_path: Path, monkeypatch):
    """Oracle: by hand: a folder that is a class's, in Unicode's other form or the working directory, or several."""
    classes = ("pear", "p\u00eache")
    files = [tmp_path / "pear" / "0.jpg", tmp_path / "pe\u0302che" / "0.jpg"]
    assert [class_of(file, classes) for file in files] == [0, 1]
    assert names_of(files[:1], classes) == ["pear/0.jpg"] and names_of(files[:1]) == ["0.jpg"]
    assert names_of([tmp_path / "a" / "0.jpg", tmp_path / "b" / "0.jpg"], classes) == ["a/0.jpg", "b/0.jpg"]
    assert names_of([tmp_path / "a" / "0.jpg"], classes) == ["0.jpg"] and class_of(tmp_path / "0.jpg", classes) is None
    files[0].parent.mkdir()
    monkeypatch.chdir(files[0].parent)
    assert names_of([Path("0.jpg")], classes) == ["pear/0.jpg"] and class_of(Path("0.jpg"), classes) == 0


def test_the_deepest_block_with_enough_patches_is_shown():
    """Oracle: by hand: the last with 7 rows and columns, else the last of those with most patches."""

    def part(path, h, w):
        return explain.Contribution(
            path, torch.ones(1, h, w), torch.ones(1, h * w, 4), explain.Geometry((h, w), 0, (1, 1))
        )

    fine, seven, again, coarse, wide = (
        part("a", 14, 14), part("b", 7, 8), part("c", 7, 8), part("d", 4, 4), part("e", 2, 20))  # fmt: skip
    assert finest([fine, seven, again, coarse, wide]).path == "c"
    assert finest([wide, coarse]).path == "e" and finest([coarse, part("f", 4, 4)]).path == "f"


def test_filters_are_framed():
    """Oracle: pixels of white filters on white paper: a closed frame each, and its number."""
    drawn = figures.draw_filters(torch.ones(3, 3, 4, 4))
    framed = [axes for axes in drawn.axes if axes.axison]
    assert [axes.get_title() for axes in framed] == ["1", "2", "3"] and all(
        spine.get_visible() for axes in framed for spine in axes.spines.values()
    )
    FigureCanvasAgg(drawn).draw()
    dark = np.asarray(drawn.canvas.buffer_rgba())[..., 0] < 200
    assert (dark.sum(0) > 0.5 * dark.any(1).sum()).sum() >= 6  # left and right sides of three frames


@pytest.mark.full
def test_report_of_an_optimised_model_without_class_token(tmp_path: Path, references):
    """Oracle: the figures that such a model has; rotary positions are shown as bands, positions of 2 x 2 patches are
    named, and so are layers of 4 tokens."""
    positions, four = "similarity of position embeddings", "distance and entropy of layer 1"
    for name, expected in (("timm_siglip", {positions, four}), ("timm_dinov3", {"bands"}), ("hf_vit", {positions})):
        model = build(name, torch.float32).eval()
        optimize(model)
        images = inputs(name, torch.float32)
        report = list(explain.explain(model, images[:1], images[:1].sigmoid(), ["a"]))
        names = {part.title if isinstance(part, explain.Absent) else part.name for part in report}
        assert expected <= names and ("layers" in names) == (four not in expected)
        assert ("prediction" in names) == (name != "hf_vit")
    model = create_model("vit_tiny_patch16_224", **TINY).eval()
    with pytest.raises(ValueError, match="query is 17; the model has tokens 0 to 16"):
        next(explain.explain(model, torch.randn(1, 3, 16, 16), torch.rand(1, 3, 16, 16), ["a"], query=17))


OF_64 = {  # what `train` writes into weights, for images of 64 x 64
    "data": "digits",
    "classes": list("0123456789"),
    "transform": {"size": (64, 64), "mean": (0.3,) * 3, "std": (0.4,) * 3},
    "batch_size": 64,
    "skip_bad_images": False,
}


@pytest.mark.full
def test_what_is_left_out_is_named(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture):
    """Oracle: the files and the sentences, on the page, too, for LeViT, whose stages have 4 x 4, 2 x 2 and 1 x 1
    patches; a ViT with patches of 2 x 2 pixels lacks patterns of these."""
    model = redraw(create_model("levit_128s", img_size=64, num_classes=10))
    save_weights(model, tmp_path / "model.safetensors", metadata={"training": json.dumps(OF_64)})
    words = [str(checkpoint / "pictures" / "0.png"), "--no-test"]
    first, *said = prints(capsys, "explain", *words, "--checkpoint", tmp_path, "--out", tmp_path / "r").splitlines()
    layers = {grid: "; ".join(f"attention of layer {n}" for n in numbers) for grid, numbers in (
        ("2 × 2", range(4, 8)), ("1 × 1", range(8, 12)))}  # fmt: skip
    few = "; ".join(f"distance and entropy of layer {n}" for n in range(4, 12))
    lacks = "similarity of position embeddings; filters of the patch projection and cost by image size"
    assert said == [
        *(f"left out, because {grid} patches are fewer than 4 × 4: {names}" for grid, names in layers.items()),
        f"left out, because attention to 4 tokens or fewer has little choice: {few}",
        f"left out, because the model has no such part: {lacks}",
    ]
    assert "shows 1 of 1 image" in first
    text = (tmp_path / "r" / "report.html").read_text()
    assert all(f"<p>{line}.</p>" in text for line in said)
    assert {file.stem for file in (tmp_path / "r").iterdir()} == {*EACH, "why", "layers", "similarity", "report"}
    assert main(["explain", *words, "--checkpoint", str(checkpoint), "--out", str(tmp_path / "v")]) == 0
    small = "left out, because 2 × 2 pixels are fewer than 3 × 3: filters of the patch embedding"
    assert [line for line in capsys.readouterr().out.splitlines() if "left out" in line] == [small]


@pytest.mark.full
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pvt_tiny", "tnt_s_patch16_224"])
def test_what_is_shown_instead_of_rollout_is_named(name: str, tmp_path: Path, checkpoint: Path, capsys):
    """Oracle: the files and the sentence."""
    shallow = dict(depth=2) if "tnt" in name else dict(depths=(1, 1, 1, 2))
    model = create_model(name, img_size=64, num_classes=10, **shallow)
    save_weights(model, tmp_path / "model.safetensors", metadata={"training": json.dumps(OF_64)})
    words = [str(checkpoint / "pictures" / "0.png"), "--no-test", "--out", str(tmp_path / "r")]
    said = prints(capsys, "explain", *words, "--checkpoint", tmp_path)
    assert "left out, because layers attend to different tokens (explain.capture has their maps in Python): " in said
    names = {file.stem for file in (tmp_path / "r").iterdir()}
    assert names - {"filters"} == {"why", "prediction", "contributions", "tokens", "layers", "report"}


@pytest.mark.full
def test_unreadable_images_raise(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Oracle: sentences and exit codes; a good image is shown even if another is bad."""
    words = ["explain", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "r"), "--no-test"]
    folder = tmp_path / "some"
    folder.mkdir()
    assert main([*words, str(folder)]) == 2 and "there is no image in" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none.png")]) == 2
    assert capsys.readouterr().err == f"fastvit-triton: error: {tmp_path}/none.png does not exist\n"
    shutil.copy(checkpoint / "pictures" / "0.png", folder / "a.png")
    shutil.copy(checkpoint / "pictures" / "1.png", folder / "b.png")
    truncate(folder / "b.png")
    assert main([*words, str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "b.png cannot be read" in captured.err and "1 of 2 images" in captured.out
    assert not (tmp_path / "r" / "confusion.png").exists() and (tmp_path / "r" / "rollout.png").exists()
    assert main([*words, str(folder), "--most", "0"]) == 2 and "--most is 0" in capsys.readouterr().err
    assert "query is 99; the model has tokens 0 to 16" in refused(capsys, *words, folder / "a.png", "--query", "99")
    assert f"{folder / 'a.png' / 'r'} cannot be created: Not a directory; give another folder" in refused(
        capsys, *words, folder / "a.png", "--out", folder / "a.png" / "r", code=1
    )


PROBE = """<script>addEventListener("load", () => parent.postMessage({
    width: innerWidth, page: document.documentElement.scrollWidth, images: document.images.length,
    loaded: [...document.images].filter(i => i.complete && i.naturalWidth > 0).length,
    over: [...document.querySelectorAll("h1, h2, p, img, section > div")]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).length }, "*"))</script>"""
FRAME = """<title></title><script>addEventListener("message", e => { document.title = JSON.stringify(e.data) })</script>
<iframe src="probe.html" style="border: 0; width: WIDTH; height: 2000px"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_report_in_a_browser(page: Path, tmp_path: Path, width: int):
    """Oracle: the browser's own measurements: every image is loaded, nothing is wider than the screen."""
    text = page.read_text().replace("<details>", "<details open>")
    (tmp_path / "probe.html").write_text(text.replace("</body>", f"{PROBE}</body>"))
    (tmp_path / "frame.html").write_text(
        FRAME.replace("WIDTH", f"{width}px")
    )  # a window of its own is 500 pixels wide or more
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, "--window-size=1400,2100", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    facts = json.loads(re.search(r"<title>(\{.*?\})</title>", done.stdout).group(1))
    assert facts["width"] == width and facts["page"] <= width and not facts["over"], facts
    assert facts["loaded"] == facts["images"] == 2 * len(EACH) + len(ONCE) + len(OPEN), facts


def number(word: str) -> float | None:
    """A number of a table, None for "-"."""
    return None if word == "-" else float(word)


@pytest.mark.fast
def test_published_tables_equal_the_paper():
    """Oracle: the tables, row by row as the paper prints them; its abstract (88.55, 90.72, 94.55, 77.63) and rankings:
    ViT-H/14 leads, more data helps it; from ImageNet alone larger models are worse."""
    rows = (  # of table 2, one task each
        "88.55 87.76 85.30 87.54 88.4", "90.72 90.54 88.62 90.54 90.55", "99.50 99.42 99.15 99.37 -",
        "94.55 93.90 93.25 93.51 -", "97.56 97.32 94.67 96.62 -", "99.68 99.74 99.61 99.63 -",
        "77.63 76.28 72.72 76.29 -",
    )  # fmt: skip
    assert list(zip(*published.TABLE_2.values(), strict=True)) == [tuple(map(number, row.split())) for row in rows]
    rows = "77.91 83.97 84.15", "73.38 81.28 80.73", "76.53 85.15 87.12", "71.16 80.99 84.37", "- 85.13 88.04"
    assert list(zip(*published.TABLE_5.values(), strict=True)) == [tuple(map(number, row.split())) for row in rows]
    assert [list(row.values()) for row in published.TABLE_6.values()] == [
        [55, 196, 224, 783, 1567, 4262], [106, 246, 274, 859, 1668], [50, 96, 141, 199, 563, 1126, 3306]
    ]  # fmt: skip
    alone = dict(zip(published.MODELS, published.TABLE_5["ImageNet"], strict=True))
    assert alone["L/16"] < alone["B/16"] and alone["L/32"] < alone["B/32"]
    tasks = dict(zip(published.TASKS, published.TABLE_2["ViT-H/14, JFT"], strict=True))
    assert [tasks[t] for t in ("ImageNet", "ReaL", "CIFAR-100", "VTAB")] == [88.55, 90.72, 94.55, 77.63]
    assert all(len(row) == len(published.TASKS) for row in published.TABLE_2.values())
    largest = [row[published.MODELS.index("H/14")] for row in published.TABLE_5.values()]
    assert largest[0] is None and largest[1] < largest[2]
    axes = figures.draw_published().axes
    assert [a.get_title("left") for a in axes] == [f"Table {n} (published)" for n in (2, 5, 6)]


def test_filters_are_those_of_the_stem():
    """Oracle: models whose blocks were created before their stem; 3600 and 784 inputs of a block are squares of one."""
    model = create_model("attention_conv", img_size=32, in_chans=1, depth=1)
    assert explain.patch_filters(model, 1).shape == model.patch_embed.proj.weight.shape
    assert (
        explain.patch_filters(create_model("t2t_vit_7", img_size=32, in_chans=1, embed_dim=784, num_heads=4), 1) is None
    )
