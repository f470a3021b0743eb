"""Tests of the shares in reports of `optimize`, and of their headline.

Oracle: FLOPs and weights of a small ViT, counted by hand.
"""

import copy
import gc
import pickle
import re
from pathlib import Path

import pytest
import research
import timm
import torch
import transformers
from sampling import marked
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import fastvit_triton
from fastvit_triton import create_model, optimize
from fastvit_triton.convert import flop_shares as shares
from fastvit_triton.convert.chosen import located, with_ways
from fastvit_triton.convert.flop_shares import CountedModel, Shares, stated_input
from fastvit_triton.convert.reporting import NOTHING, OURS, Report, Row
from fastvit_triton.expected.count import predict, traced
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels import measured, onednn
from fastvit_triton.kernels.settings import forcing

C, HEADS, HIDDEN, DEPTH, PATCH, SIDE, CLASSES = 24, 2, 60, 3, 8, 32, 5
PATCHES = (SIDE // PATCH) ** 2
N = PATCHES + 1
# two FLOPs for each multiply-add of a product, as PyTorch counts
STEM = 2 * PATCHES * 3 * PATCH**2 * C
ATTENTION = 2 * N * C * 4 * C + 4 * N * N * C
MLP = 2 * N * C * 2 * HIDDEN
HEAD = 2 * C * CLASSES
TOTAL = STEM + DEPTH * (ATTENTION + MLP) + HEAD


def vit(**options: object) -> VisionTransformer:
    """A small ViT of timm, without a stated input size."""
    sizes = dict(img_size=SIDE, patch_size=PATCH, embed_dim=C, depth=DEPTH, num_heads=HEADS, num_classes=CLASSES)
    return VisionTransformer(**sizes, mlp_ratio=HIDDEN / C, **options).eval()


def image(batch: int = 1) -> torch.Tensor:
    """Images of the model's size."""
    return torch.zeros(batch, 3, SIDE, SIDE)


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """The example of `optimize(tune=…)` is used for counting only."""
    monkeypatch.setattr(fastvit_triton, "tune", lambda *given: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_shares_of_flops_equal_a_hand_count(dtype, batch):
    """Oracle: the products of each module, by hand; the batch and the dtype of the weights do not change a share."""
    model = vit().to(dtype)
    found = optimize(model, tune=image(batch).to(dtype)).shares()
    assert found.of == "FLOPs" and found.total == batch * TOTAL
    want = {"": TOTAL, "patch_embed": STEM, "blocks": DEPTH * (ATTENTION + MLP), "blocks.1": ATTENTION + MLP}
    want |= {"blocks.2.attn": ATTENTION, "blocks.0.mlp": MLP, "head": HEAD, "norm": 0, "nowhere": 0}
    for path, flops in want.items():
        assert found.share(path) == pytest.approx(flops / TOTAL, rel=1e-12), path


def test_shares_of_weights_equal_a_hand_count():
    """Oracle: rows × columns of each layer; a tied weight counts once, and biases, norms and positions do not count."""
    model = vit()
    model.tied = nn.Linear(C, CLASSES)
    model.tied.weight = model.head.weight
    found = optimize(model).shares()
    total = 3 * PATCH**2 * C + DEPTH * (4 * C * C + 2 * C * HIDDEN) + C * CLASSES
    assert found.of == "weights" and found.total == total
    assert found.share("blocks.1") == pytest.approx((4 * C * C + 2 * C * HIDDEN) / total, rel=1e-12)
    assert found.share("blocks.1.mlp") == pytest.approx(2 * C * HIDDEN / total, rel=1e-12)
    assert found.share("norm") == found.share("tied") == 0.0 and found.share("") == 1.0


@pytest.mark.parametrize("apart", [False, True])
def test_packed_projections_of_torch_count(apart):
    """Oracle: q, k and v are C × C each, packed or of other widths than the output, and so is the output's."""
    attention = nn.MultiheadAttention(C, HEADS, **(dict(kdim=C // 2, vdim=C) if apart else {}))
    found = shares.weights(nn.Sequential(attention, nn.Conv2d(4, 6, 3, groups=2), nn.LayerNorm(C)))
    packed = 4 * C * C - apart * C * C // 2
    assert found.total == packed + 6 * 2 * 9 and found.amounts["0"] == packed and found.amounts["1"] == 108


@pytest.mark.parametrize("trained", [True, False])
def test_layers_of_torch_are_counted(trained):
    """Oracle: by hand. Inference of a frozen nn.TransformerEncoderLayer is one operator, which PyTorch cannot count."""
    layer = nn.TransformerEncoderLayer(C, HEADS, HIDDEN, batch_first=True).eval().requires_grad_(trained)
    found = optimize(layer, tune=torch.zeros(1, N, C)).shares()
    assert found.of == "FLOPs" and found.total == ATTENTION + MLP
    assert found.share("self_attn") == pytest.approx(ATTENTION / (ATTENTION + MLP), rel=1e-12)


def stating() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models that state their input size, and the shape of an image."""
    import torchvision

    small = dict(image_size=SIDE, patch_size=PATCH, hidden_size=C, num_hidden_layers=1, num_attention_heads=HEADS)
    hf = transformers.ViTConfig(**small, num_channels=2, intermediate_size=HIDDEN)
    theirs = torchvision.models.VisionTransformer(SIDE, PATCH, 1, HEADS, C, HIDDEN)
    timms = vit(in_chans=1)
    timms.pretrained_cfg = dict(input_size=(3, 224, 224))  # of the pretrained weights; the model has another size
    convolutional = nn.Conv2d(3, C, 3)
    convolutional.default_cfg = dict(input_size=(3, 40, 48))
    stem = dict(layers=(1, 1), embed_dims=(16, 16), num_heads=(1, 1), outlook_attention=(True, False), in_chans=2)
    volo = timm.models.volo.VOLO(downsamples=(True, False), stem_hidden_dim=8, **stem)
    volo.pretrained_cfg = timm.get_pretrained_cfg("volo_d1_224").to_dict()
    return {
        "ours": (create_model("vit_digits_patch2_8"), (1, 1, 8, 8)),
        "transformers": (transformers.ViTModel(hf), (1, 2, SIDE, SIDE)),
        "torchvision": (theirs, (1, 3, SIDE, SIDE)),
        "timm": (timms, (1, 1, SIDE, SIDE)),
        "timm, convolutional": (convolutional, (1, 3, 40, 48)),
        "timm, convolutions before the patches": (volo, (1, 2, 224, 224)),
    }


def test_models_state_their_input_size():
    """Oracle: the sizes that they were built with."""
    for name, (model, shape) in stating().items():
        given = stated_input(model)
        (made,) = given.values() if isinstance(given, dict) else given
        assert made.shape == shape and made.is_meta and (isinstance(given, dict) == (name == "transformers")), name
        assert optimize(model.eval()).shares().of == "FLOPs", name


def test_models_without_an_input_size_state_none():
    """Oracle: attributes that are absent, or that mean something else."""
    assert stated_input(nn.Linear(2, 2)) is stated_input(vit()) is None
    for value in ("large", (1, 2, 3), 2.5, ("a", "b"), (-1, 4), None):
        model = nn.Linear(2, 2)
        model.image_size = value
        assert stated_input(model) is None, value


class Fails(nn.Module):
    """Raises an error, of a class of its own, in its forward."""

    class Error(Exception):
        """Not one of Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `Error`."""
        raise self.Error("no")


class Reads(nn.Module):
    """Reads a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, if its sum is positive."""
        return x if x.sum().item() > 0 else -x


class Uncopied(nn.Module):
    """Cannot be copied."""

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """Raises TypeError."""
        raise TypeError("not this one")


@pytest.mark.parametrize(
    "last, given",
    [
        (Fails(), image()),
        (Reads(), image()),
        (Uncopied(), image()),
        (nn.DataParallel(nn.Identity()), image()),  # wrappers that communicate are not called
        (nn.Identity(), torch.zeros(1, 3, SIDE + 1, SIDE)),  # another size than the model's
        (nn.Identity(), image().to_sparse()),
        (nn.Identity(), dict(unknown=image())),
        (nn.Identity(), "an image"),
    ],
    ids=["error", "value", "copy", "wrapper", "size", "sparse", "argument", "text"],
)
def test_weights_count_where_flops_cannot(last, given):
    """Oracle: shares of the weights, which need no call."""
    model = nn.Sequential(vit(), last)
    report = optimize(model, tune=given)
    assert report.shares() == shares.weights(model)
    assert "share of weights" in str(report) and "% of the weights of linear and convolution layers" in str(report)


@pytest.mark.full
def test_counting_changes_nothing():
    """Oracle: weights, buffers, attributes, random numbers, hooks and their calls, before and after."""
    model, calls = vit(proj_drop_rate=0.5, drop_path_rate=0.5).train(), []
    model.norms = nn.BatchNorm2d(3)
    model.patch_embed.register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return type(self).__mro__[1].forward(self, self.norms(x))

    model.__class__ = type("Seeing", (VisionTransformer,), dict(forward=forward))
    report = optimize(model, tune=image(2))
    state, mode = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    random, facts = torch.get_rng_state(), {id(m): dict(vars(m)) for m in model.modules()}
    assert report.shares().of == "FLOPs"
    assert torch.equal(torch.get_rng_state(), random) and calls == [] and model.seen == []
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert [m.training for m in model.modules()] == mode
    assert all(vars(m) == facts[id(m)] for m in model.modules())
    model(image(2))
    assert calls == ["forward", "before"] and model.seen == [(2, 3, SIDE, SIDE)]


def test_counting_waits_for_the_report(monkeypatch):
    """Oracle: a counter that fails the test; FLOPs are counted when shares are read, and once."""
    counted = []
    monkeypatch.setattr(shares, "flops", lambda *given: counted.append(given) or None)
    report = optimize(model := vit(), tune=image())
    assert counted == []
    assert str(report) == str(report) and len(counted) == 1 and counted[0][0] is model


@pytest.mark.full
def test_a_report_does_not_keep_the_model():
    """Oracle: the garbage collector; without the model, and in copies, weights count."""
    model = vit()
    report = optimize(model, tune=image())
    twins = copy.deepcopy(report), pickle.loads(pickle.dumps(report))
    assert all(twin == report and twin.shares().of == "weights" for twin in twins)
    want = shares.weights(model)
    assert report.subject.model is model
    del model
    gc.collect()
    assert report.subject.model is None and report.shares() == want


def test_global_hooks_are_not_called():
    """Oracle: the hook, which the count would call, and which makes weights count instead."""
    calls = []
    report = optimize(model := vit(), tune=image())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        assert report.shares() == shares.weights(model) and calls == []
    finally:
        handle.remove()


def test_the_example_is_kept_without_its_data():
    """Oracle: devices of the tensors that the report holds."""
    subject = CountedModel(vit(), dict(x=image()))
    assert subject._example["x"].is_meta and subject._example["x"].shape == image().shape


@pytest.mark.parametrize(
    "left, blocks, flops, others",
    [
        ((), 3, DEPTH * (ATTENTION + MLP), STEM),
        (("blocks.1.mlp",), 3, DEPTH * (ATTENTION + MLP) - MLP, STEM),  # no part of the share of its block
        (("blocks.1", "patch_embed"), 2, (DEPTH - 1) * (ATTENTION + MLP), ATTENTION + MLP),
    ],
)
def test_the_headline_counts_what_is_converted(left, blocks, flops, others):
    """Oracle: by hand; modules that are left out by a filter, and the FLOPs of blocks and of others."""
    model = vit()
    report = optimize(model, tune=image(), filter_fn=lambda module, path: path not in left)
    every = percent((flops + others) / TOTAL, 0).replace("100 %", "over 99 %")
    more = f" ({every} with the other modules that are converted)" if others >= 0.01 * TOTAL else ""
    share = f"{percent(flops / TOTAL, 0)} of the FLOPs{more}"
    assert report.headline() == f"{blocks} of 3 blocks are converted, {share}."
    for path in left[:1]:
        share = percent((MLP if path.endswith("mlp") else ATTENTION + MLP) / TOTAL, 1)
        name = r"  blocks\.\*\.mlp \(Mlp\)" if path.endswith("mlp") else r"blocks\.\* \(Block\)"
        assert re.search(rf"^{name} +original +{share}  excluded by filter_fn$", str(report), re.MULTILINE)


def percent(part: float, digits: int) -> str:
    """A part in percent."""
    return f"{100 * part:.{digits}f} %"


def test_without_a_converted_block_modules_are_counted():
    """Oracle: by hand: the patch projection and two branches of each block; norms are listed, but not counted."""
    report = optimize(vit(), filter_fn=lambda module, path: not path.startswith("blocks") or path.endswith("attn"))
    assert report.headline().startswith("4 of 10 modules are converted, ")  # three blocks and three MLPs are not
    assert optimize(vit(), filter_fn=lambda *_: False).headline() == "0 of 10 modules are converted."


def known(*ways: str | None) -> Report:
    """A report of blocks whose ways are known, of equal weights, in a model with another layer of the same size."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(len(ways) + 1)))
    rows = (Row(f"{i}", "Block", way and "fused pre-norm block", way=way) for i, way in enumerate(ways))
    return Report(tuple(rows), subject=CountedModel(model))


def test_fused_is_said_of_what_runs_fused():
    """Oracle: the words, and shares of equal layers; a report that does not know the ways does not say it."""
    unit = "of the weights of linear and convolution layers"
    assert known("fused", "fused", "fused").headline() == f"3 of 3 blocks run fused, 75 % {unit}."
    assert known("plain", "fused", "mixed", None).headline() == (
        f"1 of 4 blocks runs fused, 20 % {unit}; 1 runs mixed, 20 % {unit}; 1 runs plain, 20 % {unit}."
    )
    assert "fused" not in str(known("plain", "mixed"))
    norm = Row("norm", "LayerNorm", "LayerNorm kernel", bare=True, way="fused")
    assert "fused" not in str(Report((norm,), subject=CountedModel(nn.Linear(1, 1))))
    text = str(optimize(vit()))
    assert "fused" not in text.replace("fused, mixed or plain", "") and "3 of 3 blocks are converted" in text


def test_a_model_without_anything_for_us_gets_one_sentence():
    """Oracle: the sentence; candidates that were left for a reason are listed."""

    class StrangeAttention(nn.Module):
        """Named like attention, and of an unknown type."""

    for model in (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Sequential(StrangeAttention())):
        report = optimize(model)
        assert str(report) == f"The model {NOTHING}." and report.is_empty
    report = optimize(create_model("vit_digits_patch2_8"))
    first, *more = str(report).splitlines()
    assert first == "The model calls the kernels itself; nothing needs to be converted." and not report.is_empty
    assert len(more) == 1 and more[0].startswith("On this CPU")
    assert [row.why for row in report.rows] == [OURS]
    patched = nn.LayerNorm(4)
    patched.forward = lambda x: x
    assert "original" in str(optimize(patched)) and "its forward was replaced" in str(optimize(patched))
    assert str(Report()) == "The graph has no call that the kernels replace."


@pytest.mark.parametrize("part, text", [(0.0, "0 %"), (0.001, "under 1 %"), (0.9999, "over 99 %"), (1.0, "100 %")])
def test_the_ends_of_the_range_are_exact(part: float, text: str):
    """Oracle: 0 % and 100 % are said only of nothing and of all."""
    rows = (Row("a", "Block", "fused pre-norm block", way="fused"),)
    subject = CountedModel(nn.Linear(1, 1))
    subject._shares = Shares("FLOPs", {"a": round(part * 10000)}, 10000)
    assert Report(rows, subject=subject).headline() == f"1 of 1 block runs fused, {text} of the FLOPs."


@pytest.mark.parametrize("way", ["fused", "mixed", "plain"])
def test_each_module_has_the_way_of_its_choice(way):
    """Oracle: the forced way; a module in a block has the block's, and a module that the call skips is plain."""
    model = vit(class_token=True)
    model.again, model.unused = model.blocks[2], nn.LayerNorm(C)
    report = optimize(model)
    with forcing(way), located(model):
        prediction = predict(model, gpus()["h100"], False, image().to("meta"))
    assert all("_fastvit_triton_path" not in vars(module) for module in model.modules())
    found = with_ways(report, prediction.choices)
    rows = {row.path: row for row in found.rows}
    want = {"again": way, "unused": "plain", "blocks.1.mlp": way, "blocks.1.norm1": way, "blocks.0": way}
    assert {path: rows[path].way for path in want} == want
    assert "asked for" in rows["blocks.0"].why and "it chose no kernel" in rows["unused"].why
    assert found.headline().startswith(f"4 of 4 blocks run {way}, ") and found.device is None
    assert [row.path for row in found.rows] == [row.path for row in report.rows]


def test_unchanged_modules_have_no_way():
    """Oracle: the row of a module that a filter leaves out."""
    model = vit()
    report = optimize(model, filter_fn=lambda module, path: path != "blocks.1.attn")
    with forcing("fused"), located(model):
        prediction = predict(model, gpus()["h100"], False, image().to("meta"))
    rows = {row.path: row for row in with_ways(report, prediction.choices).rows}
    assert rows["blocks.1.attn"].way is None and rows["blocks.1.attn"].why == "excluded by filter_fn"
    assert rows["blocks.1"].way == rows["blocks.0"].way == "fused"


def test_our_models_have_rows_for_their_blocks():
    """Oracle: the names of its blocks; ops outside of them make no choice where a way is forced."""
    model = create_model("vit_digits_patch2_8").eval()
    with forcing("mixed"), located(model):
        prediction = predict(model, gpus()["h100"], False, torch.empty(1, 1, 8, 8, device="meta"))
    found = with_ways(optimize(model), prediction.choices)
    assert [row.path for row in found.rows] == [f"blocks.{i}" for i in range(len(model.blocks))]
    assert {row.way for row in found.rows} == {"mixed"}
    with located(model):
        prediction = predict(model, gpus()["h100"], False, torch.empty(1, 1, 8, 8, device="meta"))
    found = with_ways(optimize(model), prediction.choices)
    assert found.rows[0].path == "patch_embed" and found.rows[0].why.startswith("predicted: patch_embed")
    (why,) = {row.why for row in found.rows[1:]}
    inside = "attention plain; fc1 plain"  # ops inside the blocks' way
    assert re.fullmatch(f"predicted: attention [+] mlp; inference; .*; {inside}", why)


def test_ways_need_a_model():
    """Oracle: the sentence."""
    with pytest.raises(ValueError, match="give the report of a model that exists"):
        with_ways(Report(), ())


@pytest.mark.full
def test_the_guide_shows_what_is_printed(monkeypatch):
    """Oracle: the report of the page's first example, on a CPU where oneDNN is always chosen."""
    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: None)
    page = (Path(__file__).parents[1] / "docs" / "accelerate.md").read_text(encoding="utf-8")
    model = timm.create_model("vit_base_patch16_224")
    row = {"float32": dict.fromkeys(onednn.PHASES, 0.0)}
    with onednn.using_row(row), measured.using(measured.Measured()):
        assert f"```text\n{optimize(model)}\n```" in page


class Experts(nn.Module):
    """A block with a list of MLPs, as a mixture of experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.gate = timm.layers.Attention(C, HEADS), nn.Linear(C, 2)
        self.experts = nn.ModuleList(timm.layers.Mlp(C, HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + sum(
            g * expert(x) for g, expert in zip(self.gate(x).softmax(-1).split(1, -1), self.experts, strict=True)
        )


class Padded(nn.Module):
    """A block whose attention has a mask of padded keys; PyTorch adds it to the scores in the product."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.linear1, self.linear2 = nn.MultiheadAttention(C, HEADS), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
        x = x + self.attn(x, x, x, key_padding_mask=mask)[0]
        return x + self.linear2(self.linear1(x).relu())


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    small = dict(image_size=SIDE, patch_size=PATCH, hidden_size=C, num_hidden_layers=2, num_attention_heads=HEADS)
    model = transformers.ViTModel(transformers.ViTConfig(**small, intermediate_size=HIDDEN)).eval()
    names = ["query" if any("query" in name for name, _ in model.named_modules()) else "q_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=names)).eval()


LEVIT = {"LevitBlock", "LevitDownsample"}  # without `freeze`, which folds the BatchNorms of its linear layers
# name → (model, input, types of the outer rows that are converted in part)
PARTLY = {
    "vit": (vit, image, set()),
    "convolutions": (lambda: timm.create_model("convnext_atto", num_classes=5).eval(), image, set()),
    "batch norms": (lambda: timm.create_model("levit_128s").eval(), lambda: torch.zeros(1, 3, 224, 224), LEVIT),
    "lora": (lora, image, {"ViTLayer"}),
    "experts": (lambda: nn.Sequential(Experts(), Experts()).eval(), lambda: torch.zeros(1, N, C), set()),
    "padded": (lambda: nn.Sequential(Padded(), Padded()).eval(), lambda: torch.zeros(N, 2, C), set()),
    "captured": (
        lambda: nn.Sequential(research.DinoBlock(), research.DinoBlock()).eval(),
        lambda: torch.zeros(2, N, research.D),
        set(),
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
@pytest.mark.parametrize(
    "name", marked(PARTLY, pytest.mark.full, lambda name: name in ("batch norms", "experts", "padded", "captured"))
)
def test_shares_are_those_of_operators_that_disappear(name):
    """Oracle: FLOPs of the operators of PyTorch before and after, counted where every kernel is launched."""
    make, given, in_part = PARTLY[name]
    model, gpu = make(), gpus()["h200"]
    before = traced(model, None, False, (given(),), {}).count.flops
    report = optimize(model, example=given() if name in ("experts", "padded", "captured") else None)
    if name not in ("experts", "padded", "captured"):
        report.subject._example = (given().to("meta"),)
    with forcing("fused"):
        events = traced(model, gpu, False, (given(),), {}).events
    left = sum(event.flops for event in events if not (event.ours or event.op))
    found = report.shares()
    assert found.of == "FLOPs" and found.total == before
    assert found.replaced_share("") == pytest.approx(1 - left / before, abs=1e-6)
    rows = [row for row in report.rows if report._shown(row) == "in part"]
    assert {row.type for row in rows if row.within is None} == in_part
    linear = {path.rpartition(".")[0] for path, m in model.named_modules() if type(m) is nn.Linear} - {""}
    named = {row.path for row in report.rows}
    ours = [path for path in linear if named.isdisjoint(shares.enclosing(path))]
    assert all(type(model.get_submodule(path)).__module__.startswith(("torch.", "peft.")) for path in ours)


class Positioned(nn.Module):
    """Adds rows of a table of as many positions as the largest, from a cache that is no buffer, to the kept tokens."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(C, C)
        self.drops = drops
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, C] → [B, K, C]."""
        places = torch.cat((torch.zeros(1, device=x.device).long(), torch.arange(x.shape[1] - 1, device=x.device)))
        size = int(places.max()) + 1
        if size not in self.cache:
            self.cache[size] = torch.ones(size, C, device=x.device)
        kept = torch.rand(x.shape[1]) > 0.5 if self.drops else places < x.shape[1]
        return self.fc((x + self.cache[size][places])[:, kept])


@pytest.mark.parametrize("drops", [False, True])
def test_positions_have_values_and_random_masks_have_none(drops: bool, caplog: pytest.LogCaptureFixture):
    """Oracle: one product, by hand; where shapes depend on random numbers, weights are counted, without a log entry."""
    model = Positioned(drops)
    model(torch.zeros(2, 7, C))  # fills the cache
    found = CountedModel(model, torch.zeros(2, 7, C)).shares()
    assert (found.of, found.total) == (("weights", C * C) if drops else ("FLOPs", 2 * 2 * 7 * C * C))
    assert not caplog.records


def test_counting_compiles_nothing():
    """Oracle: a compiler that fails the test."""
    model = vit()
    compiled = torch.compile(model, backend=lambda graph, inputs: pytest.fail("compiled"))
    found = optimize(compiled, tune=image()).shares()
    assert found.of == "FLOPs" and found.total == TOTAL and found.share("_orig_mod.head") > 0
