"""A change that a user makes to a model is never ignored. Oracle: the changed original, in float64."""

import copy

import mutants
import pytest
import torch
from interpreter import interpreting
from mutants import WHEN, Change, applied, changes, compare, judged, models
from sampling import sampled
from turns import in_turn

from fastvit_triton import optimize
from fastvit_triton.kernels.settings import forcing

MODELS = models()
# a model of each kind, by default; the rest with -m full
SAMPLE = """timm_vit timm_swin timm_swin_v2 timm_beit hf_vit hf_clip hf_swin torchvision_vit vit_pytorch_vit
torch_encoder_layer hf_Qwen3VLVisionModel timm_gcvit vit_pytorch_crossvit""".split()


def silent(name: str, one_in: int) -> list[str]:
    """The mutants of a model that are in turn and whose outputs or gradients differ from the original's."""
    found = judged(MODELS[name], lambda i: in_turn(f"{name} {i}", one_in))
    return [f"{when} {' '.join(change)}: {verdict.what}" for change, when, verdict in found if not verdict.same]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(SAMPLE, 2, one_in=1))
def test_a_sample_of_changes_is_never_ignored(name):
    """One in 39 mutants of a model of each kind; by default, of every second one."""
    assert silent(name, 39) == []


@pytest.mark.full(one_in=1)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SAMPLE])
def test_changes_are_never_ignored(name):
    """One in 39 mutants of each other model, others in each turn; `python -m benchmarks.mutants` takes all."""
    assert silent(name, 39) == []


RESIDUAL = "visual.transformer.resblocks.0"
# changes that were once ignored; each is made before and after `optimize`
ONCE_IGNORED = [
    ("hf_vit", Change("attention", "", "mine")),
    ("hf_vit", Change("attention", "", "sdpa")),
    ("hf_vit_eager", Change("function", "layers.0.attention", "eager_attention_forward")),
    ("hf_vit", Change("attribute", "layers.0.attention", "head_dim")),
    ("hf_vit", Change("attribute", "layers.0.mlp.activation_fn", "act")),
    ("hf_clip", Change("pre_hook", "encoder.layers.0.self_attn")),
    ("timm_vit", Change("attribute", "blocks.0.attn", "scale")),
    ("timm_swin", Change("method", "layers.0.blocks.0.attn", "_get_rel_pos_bias")),
    ("timm_swin", Change("other_softmax", "layers.0.blocks.0.attn.softmax")),
    ("timm_swin_v2", Change("wrap", "layers.0.blocks.0.attn.softmax")),
    ("timm_twins_svt", Change("attribute", "pos_block.0", "stride")),
    ("timm_gemma4", Change("wrap", "encoder.blocks.0.attn.k_proj")),
    ("hf_ViltModel", Change("attribute", "encoder.layer.0.attention.attention", "attention_head_size")),
    ("hf_VideoMAEModel", Change("attribute", "encoder.layer.0.attention.attention", "scaling")),
    ("hf_Molmo2VisionModel", Change("attribute", "layers.0.self_attn.q_proj", "out_features")),
    ("hf_swin", Change("wrap", "encoder.layers.0.blocks.0.attention.relative_position_bias")),
    ("hf_Exaone4_5_VisionModel", Change("attribute", "blocks.0.attn", "num_heads")),
    ("hf_bridgetower.BridgeTowerVisionModel", Change("attribute", f"{RESIDUAL}.attn", "batch_first")),
    ("hf_bridgetower.BridgeTowerVisionModel", Change("wrap", f"{RESIDUAL}.mlp")),
    ("hf_kosmos2_5.Kosmos2_5VisionModel", Change("attribute", "encoder.layer.0.attention", "n_heads")),
    ("hf_kosmos2_5.Kosmos2_5VisionModel", Change("attribute", "encoder.layer.0.attention", "head_dim")),
    ("hf_deepseek_ocr2.DeepseekOcr2VisionEncoder", Change("attribute", "layers.0.self_attn", "num_key_value_groups")),
    ("hf_sam.SamVisionEncoder", Change("attribute", "layers.0.attn", "scale")),
    ("hf_Phi4MultimodalVisionModel", Change("attribute", "encoder.layers.0.self_attn", "is_causal")),
    ("hf_Gemma4VisionModel", Change("wrap", "encoder.layers.0.self_attn.q_proj")),
    ("hf_Gemma4VisionModel", Change("wrap", "encoder.layers.0.mlp.down_proj")),
    ("hf_Blip2VisionModelWithProjection", Change("wrap", "qformer.encoder.layer.0.crossattention.output")),
    ("timm_gcvit", Change("wrap", "stages.0.blocks.0.attn.rel_pos")),
    ("timm_gemma4_grouped", Change("attribute", "encoder.blocks.0.attn", "num_kv_groups")),
    ("timm_hiera", Change("attribute", "blocks.0.attn", "heads")),
    ("timm_levit", Change("wrap", "stages.0.blocks.0.attn.proj")),
    ("timm_tiny_vit", Change("attribute", "stages.1.blocks.0.attn", "scale")),
    ("torchvision_vit", Change("attribute", "encoder.layers.encoder_layer_0.self_attention", "batch_first")),
    ("torchvision_vit", Change("wrap", "encoder.layers.encoder_layer_0.self_attention")),
    ("vit_pytorch_vit", Change("other_softmax", "transformer.layers.0.0.attend")),
    ("vit_pytorch_vit", Change("subclass", "transformer.layers.0.0", "__call__")),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name, change, when",
    [  # by default, before and after in turn
        pytest.param(*case, when, marks=pytest.mark.full if (i + j) % 2 else ())
        for i, case in enumerate(ONCE_IGNORED)
        for j, when in enumerate(WHEN)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_changes_that_were_once_ignored(name, change, when):
    """Oracle: as above, and that the change is one of those that are listed for the model."""
    original = MODELS[name].build().eval()
    converted = copy.deepcopy(original)
    optimize(converted)
    assert change in changes(original)
    verdict = compare(original, converted, MODELS[name].call, change, when)
    assert verdict is not None and verdict.same, verdict


@pytest.mark.few(3)
@pytest.mark.parametrize("way", ["fused", "mixed"])
@pytest.mark.parametrize("name, change", [ONCE_IGNORED[i] for i in (0, 6, -2, -1)], ids=lambda value: str(value[0]))
def test_kernels_follow_a_change(name, change, way):
    """Oracle: the changed original in float64, within twice PyTorch's own error in float32 plus one rounding."""
    original = MODELS[name].build().eval()
    single = copy.deepcopy(original).float()
    converted = copy.deepcopy(single)
    optimize(converted)
    call = MODELS[name].call

    def outputs(model):
        with torch.no_grad(), applied(model, change):
            return call(model).double()

    want, own = outputs(original), outputs(single)
    with interpreting(), forcing(way):
        with torch.no_grad():
            assert not torch.equal(call(converted).double(), want)  # and the unchanged model is recorded
        got = outputs(converted)
    allowed = 2 * ((own - want).norm() + torch.finfo(torch.float32).eps * want.norm())
    assert (got - want).norm() <= allowed, (float((got - want).norm()), float(allowed))


def test_the_comparison_can_fail(monkeypatch):
    """Oracle: a reader that passes over a replaced softmax, as one once did."""
    monkeypatch.setattr("fastvit_triton.convert.readers.vit_pytorch.tokens.softmax_reason", lambda module: None)
    original = MODELS["vit_pytorch_vit"].build().eval()
    change = Change("other_softmax", "transformer.layers.0.0.attend")
    verdict = compare(original, original, MODELS["vit_pytorch_vit"].call, change, "before")
    assert verdict is not None and not verdict.same and mutants.CHANGES
