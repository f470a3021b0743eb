"""Graphs that torch.compile makes of converted models. Oracle: the same figures of the originals, and their outputs."""

import copy
import json

import pytest
import torch
from catalogue import MODELS, inputs, outputs
from sampling import sampled
from torch import nn
from torch._dynamo.utils import counters

pytest.importorskip("transformers")
from transformers.models.clip.modeling_clip import CLIPMLP, CLIPEncoderLayer
from transformers.models.siglip.modeling_siglip import SiglipMLP

from benchmarks.recompiles import VARIANTS, Case, Compiler, cases, figures
from benchmarks.result_file import ROOT
from fastvit_triton import optimize
from fastvit_triton.kernels.backend import using_backend

# Converted and original models compute the same sums in another order: at most 84 roundings, as in test_models.py.
SINGLE = 84 * torch.finfo(torch.float32).eps
MOST = 2  # graphs: one for the sizes of the first call, and one for all others
OFTEN = {  # variants that run always
    "Qwen3VLVisionModel": ("converted", "kernels"),
    "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": ("converted",),
    "GlmOcrVisionModel": ("converted",),
    "BlipVisionModel": ("converted",),
    "InternVLVisionModel": ("converted",),
    "ViTMSNModel": ("converted",),
}
RECORD = ROOT / "benchmarks" / "results" / "recompiles.json"


def assert_captured(original, found):
    """At most two whole graphs with the original's outputs, unless the original cannot be captured either."""
    if "error" not in original:
        assert "error" not in found and found["graphs"] <= max(MOST, original["graphs"]) and found["breaks"] == 0
    assert found.get("distance", 0.0) <= SINGLE


def assert_broken_less(original, found):
    """No more graphs and breaks than the original, and no function that is left uncompiled."""
    assert found["graphs"] <= original["graphs"] and found["breaks"] <= original["breaks"]
    assert found.get("limits", 0) <= original.get("limits", 0) and found["distance"] <= SINGLE


@pytest.mark.full
@pytest.mark.parametrize(
    "name, variant", sampled([(name, variant) for name, variants in OFTEN.items() for variant in variants], 8), ids=str
)
def test_four_sizes(name, variant):
    """Whole graphs, at most two over four numbers and sizes of images, of models of one block."""
    found = figures(Case(name), variant, captured=True, calls=4, blocks=1)
    assert_captured({"graphs": MOST}, found)
    assert variant == "kernels" or "distance" in found


@pytest.mark.full
@pytest.mark.parametrize("case", cases()[::8], ids=lambda case: case.name)
def test_every_eighth_model(case):
    """As above for every variant; packed models also without tensors that were computed before the graph.

    `python -m benchmarks.recompiles` takes all models, in half an hour of one core.
    """
    original, *others = (figures(case, variant, captured=True, calls=6) for variant in VARIANTS)
    for found in others:
        assert_captured(original, found)
    if case.packed:
        assert_broken_less(*(figures(case, variant, captured=False, calls=2) for variant in VARIANTS[:2]))


def test_the_committed_figures():
    """No model is captured worse, or has more graphs or breaks, than the original."""
    for row in json.loads(RECORD.read_text())["rows"]:
        for variant in VARIANTS[1:]:
            assert_captured(row["original"]["captured"], row[variant]["captured"])
        if "calls" in row["original"]:
            assert_broken_less(row["original"]["calls"], row["converted"]["calls"])


def graphs_and_breaks(model, given):
    """Of two calls with other numbers of images."""
    torch._dynamo.reset()
    counters.clear()
    compiler = Compiler()
    compiled = torch.compile(model, backend=compiler)
    with torch.no_grad(), using_backend("torch"):
        for images in (given[:2], given):
            outputs(compiled, images)
    torch._dynamo.reset()
    return compiler.graphs, sum(counters["graph_break"].values())


@pytest.mark.full
def test_breaks_between_blocks():
    """A hook that breaks the graph after a block: the functions around fused forwards add neither graphs nor breaks."""
    original = MODELS["hf_clip"].make().eval()
    model = copy.deepcopy(original)
    optimize(model)
    for each in (original, model):
        block = next(m for m in each.modules() if isinstance(m, CLIPEncoderLayer))
        block.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    given = torch.cat((inputs("hf_clip", torch.float32),) * 2)
    graphs, breaks = graphs_and_breaks(original, given)
    found = graphs_and_breaks(model, given)
    assert graphs > MOST and breaks and found[0] <= graphs and found[1] <= breaks


class Config:
    """What an MLP reads."""

    hidden_act, hidden_size, intermediate_size = "gelu", 8, 16


@pytest.mark.full
def test_types_do_not_share_a_limit():
    """The limit of graphs counts for each converted type: two types with as many graphs as it allows are compiled."""
    model = nn.ModuleList(make(Config()) for make in (CLIPMLP, SiglipMLP)).eval()
    assert len(optimize(model).fused) == len(model)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST, fail_on_recompile_limit_hit=True), using_backend("torch"):
        for mlp in model:
            compiler = Compiler()
            compiled = torch.compile(mlp, backend=compiler)
            for images in (2, 3, 4):
                x = torch.randn(images, 3, Config.hidden_size)
                torch.testing.assert_close(compiled(x), mlp(x))
            assert compiler.graphs == MOST
    torch._dynamo.reset()
