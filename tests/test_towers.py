"""Tests of the conversion of transformers' towers beside those of test_converted.py. Oracle: the original model."""

import copy
import re

import pytest
import torch
from agreement import seeded
from recording import Recorder

pytest.importorskip("transformers")
from catalogue import build, inputs, outputs
from catalogue.comparison import EXACT, FEW, SINGLE, distance, run
from catalogue.transformers import DENSE
from interpreter import interpreting
from test_converted import SHORT, dropping, eager

from fastvit_triton import optimize
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels import check
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing

QWEN = "hf_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel"
WITHOUT_WEIGHTS = [  # in the original's outputs
    f"hf_{name}"
    for name in (
        "sam.SamVisionEncoder", "Llama4VisionModel", "bridgetower.BridgeTowerVisionModel",
        "kosmos2_5.Kosmos2_5VisionModel", "Lfm3VlVisionModel",
    )
]  # fmt: skip


def test_what_stays_original():
    """Weights that are requested, an active dropout and a replaced submodule run the module's own forward."""
    model = build("hf_ViltModel").eval()
    given, plain = inputs("hf_ViltModel"), copy.deepcopy(model)
    optimize(model)
    want = seeded(plain, **given, output_attentions=True).attentions
    with using_backend("torch"):
        got = seeded(model, **given, output_attentions=True).attentions
    assert len(got) == len(want) == 2 and all(map(torch.equal, got, want))
    model, plain = model.train(), plain.train()
    for m in (*model.modules(), *plain.modules()):
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.5
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    want = run(plain, given)
    with using_backend("torch"):
        assert distance(run(model, given)[0], want[0]) <= EXACT  # the same random numbers
    model = build("hf_DPTModel").eval()
    given = inputs("hf_DPTModel")
    model.encoder.layer[0].intermediate.register_forward_hook(lambda *_: _[2] * 2)
    want = outputs(model, given)
    optimize(model)
    with using_backend("torch"):
        assert distance(outputs(model, given), want) <= EXACT


def test_save_pretrained(tmp_path):
    """A saved converted model has the original's keys and values."""
    model = build("hf_BlipVisionModel", torch.float32)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    optimize(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[k], want[k]) for k in want)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.full), "hf_GlmOcrVisionModel"])
def test_launches_of_packed_images(name, monkeypatch):
    """One attention for each layer, whatever the number of images and windows.

    Oracle: the original. Calls with other images of as many tokens do not repeat the launches of the first.
    """
    model = build(name, torch.float32).eval()
    given, original = inputs(name, torch.float32), copy.deepcopy(model)
    optimize(model)
    tokens = int(given["grid_thw"].prod(1).sum())
    monkeypatch.setattr(check, "can_read_values", lambda t: False)  # as on a GPU: a call that reads is not recorded
    longer = torch.tensor([[1, 2, 8], [1, 4, tokens // 4 - 4]])
    for grid in (*[given["grid_thw"]] * 3, longer):  # the second call with the same sizes is recorded
        given["grid_thw"] = grid
        with interpreting(), torch.no_grad():
            got = outputs(model, given)
        assert distance(got, outputs(original, given)) <= SINGLE
    with interpreting(), torch.no_grad(), Recorder() as run:
        outputs(model, given)
    assert run.ours.count("attention_fwd") == 2


def test_packed_images():
    """Qwen2-VL's tower with images of different sizes: one call of our attention, equal to "sdpa" for each image."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    from fastvit_triton.convert.readers.transformers import attention_interface as ours

    config = qwen.Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
    model = qwen.Qwen2VisionTransformerPretrainedModel._from_config(config).eval()
    ours.register()
    x, grid = torch.randn(16 + 24, 1176), torch.tensor([[1, 4, 4], [1, 4, 6]])
    want = model(x, grid).pooler_output
    model.config._attn_implementation = ours.FLASH
    assert distance(model(x, grid).pooler_output, want) <= SINGLE
    with interpreting(), torch.no_grad(), Recorder() as run:
        assert distance(model(x, grid).pooler_output, want) <= SINGLE
    assert run.ours == ["attention_fwd"] * 2  # a call for each layer, not for each image


@pytest.mark.parametrize("name", ["hf_BlipVisionModel", "hf_GroupViTVisionModel"])
def test_attention_weights_that_are_always_returned(name):
    """Oracle: the original's weights, whatever attention is set and also where the first call asks for none."""
    model = build(name).eval()
    model.config._attn_implementation = "sdpa"  # which these modules do not read
    given, plain = inputs(name), copy.deepcopy(model)
    optimize(model)
    with using_backend("torch"), torch.no_grad():
        model(**given)
        got, want = (m(**given, output_attentions=True).attentions for m in (model, plain))
    assert len(got) == len(want) == 2
    assert all(distance(a, b) <= EXACT for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "name", [f"hf_{n}" for n in ("VJEPA2Model", "sam.SamVisionEncoder", "MgpstrModel", "PixtralVisionModel")]
)
def test_patches_of_images_and_videos_are_projected(name):
    """Oracle: by hand: the convolution of a patch embedding is converted, of frames too; outputs are compared above."""
    model = build(name)
    rows = optimize(model).rows
    convs = [path for path, m in model.named_modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Conv3d))]
    [patches] = [path for path in convs if re.search("embed|patch_", path)]
    assert [row.became for row in rows if row.path == patches] == ["fused patch projection"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name, fewer",
    [
        ("hf_SegGptModel", False),
        ("hf_Llama4VisionModel", True),
        ("timm_gemma4", False),
        *(pytest.param(f"hf_{n}", n == "HieraModel", marks=pytest.mark.full) for n in ("VJEPA2Model", "HieraModel")),
        pytest.param("hf_Sam3ViTModel", False, marks=pytest.mark.full),
    ],
)
def test_example_adds_no_launches(name, fewer):
    """Blocks with fused attention inside are captured where that saves launches. Oracle: launches that are counted."""
    launches = []
    for with_example in (False, True):
        model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
        optimize(model, freeze=True, example=given if with_example else None)
        arguments = ((), given) if isinstance(given, dict) else ((given,), {})
        with forcing("fused"):
            launches.append(traced(model, gpus()["h200"], False, *arguments, frozen=True).count.launches)
    without, captured = launches
    assert captured < without if fewer else captured == without


SHOWN = [name for name in DENSE if name not in WITHOUT_WEIGHTS]


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.full) for n in SHOWN])
def test_requested_weights(name):
    """Attention weights that are requested are the original's, also after a call that requests none."""
    model, given = build(name), inputs(name)
    eager(model.eval())
    original = copy.deepcopy(model)
    optimize(model)
    with using_backend("torch"), torch.no_grad():
        seeded(outputs, model, given)
        got = seeded(model, **given, output_attentions=True)
    want = seeded(original, **given, output_attentions=True)
    got, want = ([t for t in y["attentions"] if t is not None] for y in (got, want))
    assert len(got) == len(want) > 0 and all(distance(*pair) <= FEW for pair in zip(got, want, strict=True))


def test_dropout_in_attention_has_a_reason():
    """Oracle: the sentence; `test_changed` compares the outputs."""
    model = build("hf_cvt")
    dropping(model)
    assert "own forward while training: attention dropout 0.3" in str(optimize(model.eval()))
