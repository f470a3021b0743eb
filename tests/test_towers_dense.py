"""Tests of the conversion of transformers' towers whose images are not packed. Oracle: the original, in float64."""

import copy
import pickle
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")
from interpreter import interpreting
from test_convert import Recorder
from test_towers import EXACT, FEW, SINGLE, distance, joined, run
from towers import build, outputs

from fastvit_triton import optimize, revert
from fastvit_triton.convert import forwards
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.plan import forcing


def patches(images, count, width):
    """Patches with their places in two columns before their pixels; of the last image two are padding."""
    x = torch.rand(images, count, width)
    x[..., 0], x[..., 1] = torch.arange(1, count + 1) // 4, torch.arange(1, count + 1) % 4
    x[-1, -2:] = 0
    return x


AXES = dict(image_size=80, window_size=4, global_attn_indexes=[1], mlp_dim=32, output_channels=8, num_pos_feats=4)
SEGGPT = dict(image_size=[64, 32], pretrain_image_size=32, mlp_dim=32, intermediate_hidden_state_indices=[0, 1])
SEGGPT |= dict(merge_index=0, decoder_hidden_size=8)
VITDET = dict(image_size=64, pretrain_image_size=64, window_size=3, window_block_indices=[0], mlp_ratio=2)
VITDET |= dict(use_relative_position_embeddings=True)
IMAGE, PAIR = dict(pixel_values=(2, 3, 80, 80)), dict.fromkeys(("pixel_values", "prompt_pixel_values"), (2, 3, 32, 32))
LLAMA = dict(vision_output_dim=24, projector_input_dim=16, projector_output_dim=16, image_size=64)
LLAMA |= dict(intermediate_size=96, pixel_shuffle_ratio=0.5)
SAM3 = dict(image_size=64, patch_size=16, window_size=3, global_attn_indexes=[1], pretrain_image_size=32)
VJEPA = dict(crop_size=32, frames_per_clip=4, hidden_size=40, pred_hidden_size=24, pred_num_attention_heads=2)
VJEPA |= dict(pred_num_hidden_layers=1, pred_num_mask_tokens=2, num_attention_heads=2)
OCR = dict(num_key_value_heads=1, num_attention_heads=2, layer_types=["full_attention"] * 2)
GEMMA = dict(position_embedding_size=9, pooling_kernel_size=2)
PLACES = torch.tensor([[divmod(n, 4) for n in range(16)], [divmod(n, 4) if n < 8 else (-1, -1) for n in range(16)]])
VIDEO, LINES = dict(num_frames=3, drop_path_rate=0), dict(image_size=[16, 32], patch_size=[4, 8])
BRIDGE = dict(hidden_size=128, num_hidden_layers=2, patch_size=16, image_size=32)
T5 = dict(d_ff=32, d_kv=12, patch_embed_hidden_size=20, seq_len=8, dropout_rate=0.0)
DOCLING = dict(image_size=64, patch_size=8, out_hidden_size=24, deepstack_visual_indexes=[0, 1], scale_factor=4)
HIERA = dict(embed_dim=12, image_size=[64, 64], depths=[1, 1, 2], num_heads=[1, 2, 2], num_query_pool=2)
HIERA |= dict(masked_unit_size=[4, 4], masked_unit_attention=[True, True, False], mlp_ratio=2.0, patch_size=[7, 7])
STAGES = dict(model_type="sam2_hiera_det_model", query_stride=[2, 2], patch_kernel_size=[7, 7])
STAGES |= dict(patch_stride=[4, 4], patch_padding=[3, 3])
STAGES |= dict(image_size=[64, 64], blocks_per_stage=[1, 1, 3, 1], embed_dim_per_stage=[8, 16, 24, 32])
STAGES |= dict(num_attention_heads_per_stage=[1, 2, 2, 2], window_size_per_stage=[8, 4, 3, 2], hidden_size=8)
STAGES |= dict(global_attention_blocks=[3], window_positional_embedding_background_size=[3, 3])
SAM2 = dict(backbone_config=STAGES, backbone_channel_list=[32, 24, 16, 8], fpn_hidden_size=8)
FLORENCE = dict(embed_dim=[8, 16], depths=[1, 1], num_heads=[2, 2], num_groups=[2, 2], patch_prenorm=[False, True])
FLORENCE |= dict(window_size=3, drop_path_rate=0.0)
FLORENCE |= {f"patch_{key}": value for key, value in dict(size=[7, 3], stride=[4, 2], padding=[3, 1]).items()}
SUPER = dict(patch_size=1, embed_dim=12, depths=[2], num_heads=[2], window_size=4, image_size=12, drop_path_rate=0.0)
SMALL = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
QFORMER = SMALL | dict(vocab_size=9, encoder_hidden_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BLIP = dict(vision_config=SMALL | dict(image_size=32, patch_size=16), qformer_config=QFORMER)
BLIP |= dict(num_query_tokens=3, image_text_hidden_size=8)
LFM = dict(patch_size=16, temporal_patch_size=1)
TOWERS = {  # class: options besides those of towers.py, and the inputs or their shapes
    "sam.SamVisionEncoder": (AXES, IMAGE),
    "got_ocr2.GotOcr2VisionEncoder": (AXES, IMAGE),
    "SegGptModel": (SEGGPT, PAIR | dict(prompt_masks=(2, 3, 32, 32))),
    "VitDetModel": (VITDET, dict(pixel_values=(2, 3, 64, 80))),
    "PixtralVisionModel": ({}, dict(pixel_values=(2, 3, 48, 32), image_sizes=torch.tensor([[48, 32], [32, 16]]))),
    "Llama4VisionModel": (LLAMA, dict(pixel_values=(2, 3, 64, 64))),
    "Sam3ViTModel": (SAM3, dict(pixel_values=(2, 3, 64, 64))),
    "VJEPA2Model": (VJEPA, dict(pixel_values_videos=(2, 4, 3, 32, 32))),
    "deepseek_ocr2.DeepseekOcr2VisionEncoder": (OCR, dict(inputs_embeds=(2, 7, 24), num_patches=4)),
    "TimesformerModel": (VIDEO, dict(pixel_values=(2, 3, 3, 32, 32))),
    "MgpstrModel": (LINES, dict(pixel_values=(2, 3, 16, 32))),
    "bridgetower.BridgeTowerVisionModel": (BRIDGE, dict(image=(2, 3, 32, 32))),
    "Phi4MultimodalVisionModel": (dict(crop_size=32), dict(pixel_values=(2, 3, 32, 32))),
    "Pix2StructVisionModel": (T5, dict(flattened_patches=patches(2, 6, 22))),
    "kosmos2_5.Kosmos2_5VisionModel": (T5 | dict(max_num_patches=8), dict(flattened_patches=patches(2, 6, 22))),
    "GraniteDoclingVisionModel": (DOCLING, dict(pixel_values=(2, 3, 64, 64))),
    "HieraModel": (HIERA, dict(pixel_values=(2, 3, 64, 64))),
    "Sam2VisionModel": (SAM2, dict(pixel_values=(2, 3, 64, 64))),
    "Florence2VisionBackbone": (FLORENCE, dict(hidden_states=(2, 3, 40, 56))),
    "Swin2SRModel": (SUPER, dict(pixel_values=(2, 3, 12, 8))),
    "Blip2VisionModelWithProjection": (BLIP, dict(pixel_values=(2, 3, 32, 32))),
    "Lfm3VlVisionModel": (LFM, dict(pixel_values=(12, 768), grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]]))),
    "Gemma4VisionModel": (GEMMA, dict(pixel_values=(2, 16, 768), pixel_position_ids=PLACES)),
}
ROUNDED = (  # to float32, in the original
    "got_ocr2.GotOcr2VisionEncoder", "SegGptModel", "PixtralVisionModel", "Llama4VisionModel", "Sam3ViTModel",
    "deepseek_ocr2.DeepseekOcr2VisionEncoder", "Gemma4VisionModel", "kosmos2_5.Kosmos2_5VisionModel",
    "Lfm3VlVisionModel",
)  # fmt: skip
WITHOUT_WEIGHTS = (  # in the original's outputs
    "sam.SamVisionEncoder", "Llama4VisionModel", "bridgetower.BridgeTowerVisionModel",
    "kosmos2_5.Kosmos2_5VisionModel", "Lfm3VlVisionModel",
)  # fmt: skip
EPS64 = torch.finfo(torch.float64).eps
SHORT = "sam.SamVisionEncoder", "Llama4VisionModel", "MgpstrModel", "HieraModel"  # the others run in the full test
NAMES = [pytest.param(n, marks=() if n in SHORT else pytest.mark.full) for n in TOWERS]


def made(name, dtype=torch.float64):
    """The model and its inputs."""
    torch.manual_seed(1)
    options, inputs = TOWERS[name]
    given = {key: torch.randn(x) if isinstance(x, tuple) else x for key, x in inputs.items()}
    floats = [key for key, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return build(name, dtype, options), given | {key: given[key].to(dtype) for key in floats}


@pytest.fixture
def fallbacks(monkeypatch):
    """Classes of the converted modules whose own forward ran."""
    found, original = [], forwards.original

    def noted(module, *inputs, **named):
        tower = forwards.forward_for(module).became == ""  # a tower's own forward, called by ours
        if not tower and not isinstance(module, torch.nn.Sequential):  # the MLP of Swin2SR's bias, of another shape
            found.append(type(module).__name__)
        return type(module).forward(module, *inputs, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("fastvit_triton.convert.") and getattr(module, "original", None) is original:
            monkeypatch.setattr(module, "original", noted)
    return found


@pytest.mark.parametrize("name", TOWERS)
def test_tower(name, fallbacks):
    """Outputs and gradients equal the original's up to rounding, to float32 where the original rounds to it."""
    model, given = made(name)
    original, tolerance = copy.deepcopy(model.train()), FEW if name in ROUNDED else EXACT
    report = optimize(model)
    assert report.fused and all(re.search("LayerNorm|Shuffle", row.type) for row in report.left)
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    assert not fallbacks
    assert [g is None for g in got[1]] == [g is None for g in want[1]]
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance
    with using_backend("torch"):
        again = run(pickle.loads(pickle.dumps(model)), given)
    assert torch.equal(again[0], got[0])
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", ["VJEPA2Model", "sam.SamVisionEncoder", "MgpstrModel", "PixtralVisionModel"])
def test_patches_of_images_and_videos_are_projected(name):
    """Oracle: by hand: the convolution of a patch embedding is converted, of frames too; `test_tower` compares it."""
    model, _ = made(name)
    rows = optimize(model).rows
    convs = [path for path, m in model.named_modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Conv3d))]
    [patches] = [path for path in convs if re.search("embed|patch_", path)]
    assert [row.became for row in rows if row.path == patches] == ["fused patch projection"]


@pytest.mark.full
@pytest.mark.parametrize("name", TOWERS)
def test_kernels(name):
    """The kernels in the interpreter equal the original up to float32 rounding."""
    model, given = made(name, torch.float32)
    torch.manual_seed(2)
    want = outputs(model.eval(), given)
    optimize(model)
    torch.manual_seed(2)
    with interpreting(), forcing("fused"), torch.no_grad(), Recorder() as launched:
        assert distance(outputs(model, given), want) <= SINGLE
    assert launched.ours


def hooked(model):
    """Doubles the output of every linear layer that is called, and notes the shapes of its inputs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.shapes = []
            module.register_forward_hook(lambda layer, x, y: layer.shapes.append(x[0].shape) or 2 * y)


def dropping(model):
    """Turns on all dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        for name in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), (int, float)):
                setattr(module, name, 0.3)


def eager(model):
    """Selects attention that returns its weights."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [hooked, dropping, eager])
def test_changed(name, change):
    """A changed model equals the original, with the same random numbers."""
    model, given = made(name)
    change(model)
    original = copy.deepcopy(model.train())
    optimize(model)
    want = run(original, given)
    with using_backend("torch"):
        got = run(model, given)
    shapes = [[getattr(m, "shapes", None) for m in each.modules()] for each in (model, original)]
    assert shapes[0] == shapes[1]
    tolerance = FEW if name in ROUNDED or change is eager else EXACT
    if change is hooked:  # doubled layers amplify rounding: the original's answer to one rounding of its inputs
        floats = {key for key, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        rounding = torch.finfo(torch.float32).eps if name in ROUNDED else EPS64
        nudged = given | {key: given[key] * (1 + rounding) for key in floats}
        tolerance += 2 * distance(joined(run(copy.deepcopy(original), nudged)[1]), joined(want[1]))
    assert distance(got[0], want[0]) <= tolerance and distance(joined(got[1]), joined(want[1])) <= tolerance


@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] not in WITHOUT_WEIGHTS])
def test_requested_weights(name):
    """Attention weights that are requested are the original's, also after a call that requests none."""
    model, given = made(name)
    eager(model.eval())
    original = copy.deepcopy(model)
    optimize(model)
    with using_backend("torch"), torch.no_grad():
        torch.manual_seed(2)
        outputs(model, given)
        torch.manual_seed(2)
        got = model(**given, output_attentions=True)
    torch.manual_seed(2)
    want = original(**given, output_attentions=True)
    got, want = ([t for t in y["attentions"] if t is not None] for y in (got, want))
    assert len(got) == len(want) > 0 and all(distance(*pair) <= FEW for pair in zip(got, want, strict=True))
