"""Tests of the conversion of transformers' vision towers. Oracle: the original model, in float64 with PyTorch."""

import copy
import pickle

import pytest
import torch
from budget import telling

pytest.importorskip("transformers")
from interpreter import interpreting
from test_convert import Recorder
from towers import PACKED, ROUNDED, TOWERS, build, inputs, outputs, unrounded

from fastvit_triton import optimize, revert
from fastvit_triton.kernels import check
from fastvit_triton.kernels.backend import using_backend

QWEN = "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel"
FORMS = (  # one for each reader and each kind of block; the others run in the full test
    "AltCLIPVisionModel", "BlipVisionModel", "Blip2VisionModel", "InternVLVisionModel", "MLCDVisionModel",
    "MllamaVisionModel", "Molmo2VisionModel", "DPTModel", "ViltModel", "GroupViTVisionModel", "PixioModel",
    "Aimv2VisionModel", "HunYuanVLVisionTransformer", QWEN,
    "Qwen3VLVisionModel", "GlmOcrVisionModel", "Inkling2VisionModel",
)  # fmt: skip
# Both compute the same sums in another order: at most 84 roundings of the result, as in test_models.py.
EXACT, SINGLE = (84 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))
FEW = 8 * torch.finfo(torch.float32).eps  # a few values of the original are rounded to float32, or one op is in float32
# Some attention or a merger stays as it is, in converted blocks.
PARTIAL = "GroupViTVisionModel", "Glm5NextVisionModel", "minicpmv4_6.MiniCPMV4_6VisionModel"
NAMES = [pytest.param(n, marks=() if n in FORMS else pytest.mark.full) for n in TOWERS]


def run(model, given):
    """Outputs and the gradients of every parameter; random numbers are the same in every call."""
    model.zero_grad()
    torch.manual_seed(2)
    y = outputs(model, given)
    torch.manual_seed(3)
    (y * torch.randn_like(y)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert any(g is not None for g in gradients)
    return y.detach(), gradients


def distance(a, b):
    """‖a − b‖ / ‖b‖ of two tensors."""
    return ((a - b).norm() / telling(b).norm()).item()


def joined(gradients):
    """All gradients in one vector; a key's bias has none but rounding, so they are not compared one by one."""
    return torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("name", NAMES)
def test_tower(name):
    """Outputs and gradients equal the original's up to rounding, to float32 where the original rounds to it."""
    model = build(name).train()
    given, original = inputs(model), copy.deepcopy(model)
    tolerance = FEW if name in ROUNDED or name in PACKED else EXACT
    report = optimize(model)
    assert report.fused and (name in PARTIAL or not report.left)
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    if name in PACKED and name != "Cosmos3EdgeVisionModel":  # its positions are computed in float32
        with unrounded():
            want = run(original, given)
        assert distance(got[0], want[0]) <= EXACT and distance(joined(got[1]), joined(want[1])) <= EXACT
    with using_backend("torch"):
        again = run(pickle.loads(pickle.dumps(model)), given)
    assert torch.equal(again[0], got[0])
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i < 3 else pytest.mark.full) for i, n in enumerate(FORMS)]
)
def test_kernels(name):
    """The kernels in the interpreter equal the original up to float32 rounding."""
    model = build(name, torch.float32).eval()
    given = inputs(model, torch.float32)
    torch.manual_seed(2)
    want = outputs(model, given)
    optimize(model)
    torch.manual_seed(2)
    with interpreting(), torch.no_grad():
        assert distance(outputs(model, given), want) <= SINGLE


def test_what_stays_original():
    """Weights that are requested, an active dropout and a replaced submodule run the module's own forward."""
    model = build("ViltModel").eval()
    given, plain = inputs(model), copy.deepcopy(model)
    optimize(model)
    torch.manual_seed(2)
    want = plain(**given, output_attentions=True).attentions
    with using_backend("torch"):
        torch.manual_seed(2)
        got = model(**given, output_attentions=True).attentions
    assert len(got) == len(want) == 2 and all(map(torch.equal, got, want))
    model, plain = model.train(), plain.train()
    for m in (*model.modules(), *plain.modules()):
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.5
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    want = run(plain, given)
    with using_backend("torch"):
        assert distance(run(model, given)[0], want[0]) <= EXACT  # the same random numbers
    model = build("DPTModel").eval()
    given = inputs(model)
    model.encoder.layer[0].intermediate.register_forward_hook(lambda *_: _[2] * 2)
    want = outputs(model, given)
    optimize(model)
    with using_backend("torch"):
        assert distance(outputs(model, given), want) <= EXACT


def test_save_pretrained(tmp_path):
    """A saved converted model has the original's keys and values."""
    model = build("BlipVisionModel", torch.float32)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    optimize(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[k], want[k]) for k in want)


@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.full), "GlmOcrVisionModel"])
def test_launches_of_packed_images(name, monkeypatch):
    """One attention for each layer, whatever the number of images and windows.

    Oracle: the original. Calls with other images of as many tokens do not repeat the launches of the first.
    """
    model = build(name, torch.float32).eval()
    given, original = inputs(model, torch.float32), copy.deepcopy(model)
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


@pytest.mark.parametrize("causal", [False, True])
def test_packed_images(causal):
    """Qwen2-VL's tower with images of different sizes: one call of our attention, equal to "sdpa" for each image."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    from fastvit_triton.convert.readers.transformers import attention_interface as ours

    config = qwen.Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
    model = qwen.Qwen2VisionTransformerPretrainedModel._from_config(config).eval()
    optimize(torch.nn.Identity())  # registers the names
    x, grid = torch.randn(16 + 24, 1176), torch.tensor([[1, 4, 4], [1, 4, 6]])
    want = model(x, grid).pooler_output
    model.config._attn_implementation = ours.FLASH
    assert distance(model(x, grid).pooler_output, want) <= SINGLE
    with interpreting(), torch.no_grad(), Recorder() as run:
        assert distance(model(x, grid).pooler_output, want) <= SINGLE
    assert run.ours == ["attention_fwd"] * 2  # a call for each layer, not for each image
    q = torch.randn(1, 2, 5, 16)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    more = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=3)
    if causal:
        with pytest.raises(ValueError, match="supports packed images only without masks"):
            ours.attention_forward(model, q, q, q, None, is_causal=True, **more)
        with pytest.raises(ValueError, match="is for vision towers; give the text model"):
            ours.attention_forward(model, q, q, q, torch.ones(1, 5), is_causal=True)
    kept = torch.tensor([[1, 1, 1, 0, 0]])
    got = ours.attention_forward(model, q, q, q, kept, is_causal=False)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q, q[:, :, :3], q[:, :, :3]).transpose(1, 2)
    assert distance(got, want) <= FEW


@pytest.mark.parametrize("name", ["BlipVisionModel", "GroupViTVisionModel"])
def test_attention_weights_that_are_always_returned(name):
    """Oracle: the original's weights, whatever attention is set and also where the first call asks for none."""
    model = build(name).eval()
    model.config._attn_implementation = "sdpa"  # which these modules do not read
    given, plain = inputs(model), copy.deepcopy(model)
    optimize(model)
    with using_backend("torch"), torch.no_grad():
        model(**given)
        got, want = (m(**given, output_attentions=True).attentions for m in (model, plain))
    assert len(got) == len(want) == 2
    assert all(distance(a, b) <= EXACT for a, b in zip(got, want, strict=True))
