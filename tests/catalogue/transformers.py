"""Small models of transformers with random weights."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .entry import SIDE, Entry, Given, Sizes, images

PATCH = 16
TOWER = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
HF = dict(image_size=SIDE, patch_size=PATCH, **TOWER)
DROPLESS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
DINO_V3 = dict(num_register_tokens=2, pos_embed_rescale=None)  # no random positions in training
BEIT = dict(layer_scale_init_value=0.1, drop_path_rate=0.0)
STAGES = dict(num_encoder_blocks=2, depths=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], drop_path_rate=0.0)
STAGES |= dict(mlp_ratios=[2, 2], sr_ratios=[2, 1], strides=[4, 2])
WINDOWS = dict(image_size=SIDE, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
WINDOWS |= dict(drop_path_rate=0.0, mlp_ratio=2.0)


def tower_class(name: str) -> type[nn.Module]:
    """The class of this name, or "model.Class" where transformers does not export it."""
    package, _, cls = name.rpartition(".")
    home = import_module(f"transformers.models.{package}.modeling_{package}" if package else "transformers")
    return getattr(home, cls)


def tower(name: str, options: dict[str, Any]) -> nn.Module:
    """The class of this name with these options of its configuration."""
    model = tower_class(name)
    return model(model.config_class(**options))


def entry(name: str, fused: int, *sides: int, **options: Any) -> Entry:
    """The class with these options and for images of this height and width."""
    return Entry(partial(tower, name, options), fused, images(*(sides or (SIDE, SIDE))))


def maskformer_swin() -> nn.Module:
    package = import_module("transformers.models.maskformer.modeling_maskformer_swin")
    return package.MaskFormerSwinModel(import_module("transformers").MaskFormerSwinConfig(**WINDOWS))


def patches(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Patches of two images of different sizes."""
    kept, sides = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), torch.tensor([[2, 3], [2, 2]])
    pixels = torch.randn(2, 6, PATCH * PATCH * 3, dtype=dtype)
    return {"pixel_values": pixels, "pixel_attention_mask": kept, "spatial_shapes": sides}


DINO_V2 = {key: value for key, value in HF.items() if key != "intermediate_size"}
PVT = dict(**STAGES, **DROPLESS, image_size=SIDE)
COMMON = {
    "hf_vit": entry("ViTModel", 11, **HF, **DROPLESS),
    "hf_vit_eager": entry("ViTModel", 11, **HF, **DROPLESS, attn_implementation="eager")._replace(single=True),
    "hf_deit": entry("DeiTModel", 11, **HF, **DROPLESS),
    "hf_mae": entry("ViTMAEModel", 11, **HF, **DROPLESS, mask_ratio=0.5),
    "hf_dinov2": entry("Dinov2Model", 11, **DINO_V2, layerscale_value=0.5),
    "hf_dinov2_swiglu": entry("Dinov2WithRegistersModel", 11, **DINO_V2, use_swiglu_ffn=True, num_register_tokens=2),
    "hf_dinov3": entry("DINOv3ViTModel", 11, **HF, **DINO_V3),
    "hf_dinov3_gated": entry("DINOv3ViTModel", 11, **HF, **DINO_V3, use_gated_mlp=True, hidden_act="silu"),
    "hf_clip": entry("CLIPVisionModel", 11, **HF),
    "hf_siglip": entry("SiglipVisionModel", 15, **HF),
    "hf_siglip2": Entry(
        partial(tower, "Siglip2VisionModel", TOWER | dict(patch_size=PATCH, num_patches=4)), 14, patches
    ),
    "hf_swin": entry("SwinModel", 18, 28, 36, **WINDOWS),
    "hf_swinv2": entry("Swinv2Model", 10, 28, 36, **WINDOWS),
    "hf_donut_swin": entry("DonutSwinModel", 15, 28, 36, **WINDOWS),
    "hf_maskformer_swin": Entry(maskformer_swin, 15, images(28, 36)),
    "hf_segformer": entry("SegformerModel", 15, 32, 24, **STAGES, **DROPLESS, patch_sizes=[7, 3]),
    "hf_glpn": entry("GLPNModel", 15, 28, 36, **STAGES, **DROPLESS, patch_sizes=[7, 3]),
    "hf_pvt": entry("PvtModel", 17, **PVT, patch_sizes=[4, 2], sequence_reduction_ratios=[2, 1]),
    "hf_pvt_v2": entry("PvtV2Model", 15, 24, 32, **PVT, patch_sizes=[7, 3]),
    "hf_pvt_v2_linear": entry("PvtV2Model", 12, **PVT, patch_sizes=[7, 3], linear_attention=True),
    "hf_beit": entry("BeitModel", 11, **HF, **DROPLESS, **BEIT, use_relative_position_bias=True),
    "hf_beit_shared": entry("BeitModel", 11, **HF, **DROPLESS, **BEIT, use_shared_relative_position_bias=True),
    "hf_data2vec": entry("Data2VecVisionModel", 9, **HF, **DROPLESS, **BEIT, use_relative_position_bias=True),
}


def named(**shapes: Any) -> Callable[..., Given]:
    """Named inputs: random ones of these shapes, whose first axis grows with the number of images, and other values."""

    def given(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
        found = dict(shapes)
        for key, value in shapes.items():
            if isinstance(value, tuple):
                count, *rest = value
                found[key] = torch.randn(count * (len(sizes) or 2) // 2, *rest, dtype=dtype)
            elif isinstance(value, Tensor) and value.is_floating_point():
                found[key] = value.to(dtype)
        return found

    return given


def packed(
    first: str, shape: tuple[int, ...], usual: Sizes = ((4, 8), (8, 4)), grid: str = "grid_thw", **more: Any
) -> Callable[..., Given]:
    """Patches of this shape, of images of these sizes in one sequence.

    Args:
        more: `frames` of the last image, a `batch` axis, or `merge_sizes` of every image.
    """

    def given(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
        grids = torch.tensor([[1, *size] for size in sizes or usual])
        grids[-1, 0] += more.get("frames", 1) - 1 if not sizes else 0
        pixels = torch.randn(int(grids.prod(1).sum()), *shape, dtype=dtype)
        merged = {"merge_sizes": torch.full((len(grids),), more["merge_sizes"])} if "merge_sizes" in more else {}
        return {first: pixels[None] if "batch" in more else pixels, grid: grids, **merged}

    return given


def in_one_row(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Patches of images of different sizes beside each other."""
    shapes = torch.tensor(sizes or ((4, 8), (8, 4)), dtype=torch.int32)
    pixels = torch.randn(1, 3, 4, 4 * int(shapes.prod(1).sum()), dtype=dtype)
    return {"pixel_values": pixels, "target_sizes": shapes}


def tiles(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Images of two tiles, the first of which has one."""
    B = len(sizes) or 2
    ids, mask = torch.ones(B, 1, dtype=torch.long), torch.ones(B, 1, 2, dtype=torch.long)
    ids[1:], mask[0, 0, 1] = 2, 0
    pixels = torch.randn(B, 1, 2, 3, SIDE, SIDE, dtype=dtype)
    return {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


def words(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Images with words."""
    B = len(sizes) or 2
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])[torch.arange(B) % 2]
    image = torch.randn(B, 3, SIDE, SIDE, dtype=dtype)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "pixel_values": image}


def flattened(images: int, count: int, width: int) -> Tensor:
    """Patches with their places in two columns before their pixels; of the last image two are padding."""
    x = torch.rand(images, count, width, generator=torch.Generator().manual_seed(1))
    x[..., 0], x[..., 1] = torch.arange(1, count + 1) // 4, torch.arange(1, count + 1) % 4
    x[-1, -2:] = 0
    return x


def row(
    name: str, fused: int, options: dict | None = None, inputs: Callable | tuple[int, int] = (SIDE, SIDE), **more: Any
) -> tuple[str, Entry]:
    """An entry, with its name: a class with these options, and those of SMALL and DROPS that its configuration has."""

    def make() -> nn.Module:
        known = tower_class(name).config_class().to_dict()
        return tower(name, {k: v for k, v in (SMALL | DROPS).items() if k in known} | (options or {}))

    inputs = named(pixel_values=(2, 3, *inputs)) if isinstance(inputs, tuple) else inputs
    return f"hf_{name}", Entry(make, fused, inputs, **more)


SMALL = dict(hidden_size=24, embed_dim=24, intermediate_size=48, mlp_ratio=2.0, num_hidden_layers=2, num_layers=2)
SMALL |= dict(num_attention_heads=2, attention_heads=2, image_size=32, patch_size=16, vocab_size=9, projection_dim=8)
SMALL |= dict(num_key_value_heads=2, head_dim=12, num_frames=4, tubelet_size=2, max_position_embeddings=9)
SMALL |= dict(depth=2, num_heads=2)
DROPS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0)
DROPS["drop_path_rate"] = 0.0
GROUPS = dict(depths=[1, 1, 1], num_hidden_layers=3, num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 2])
MLLAMA = dict(num_global_layers=1, max_num_tiles=2, supported_aspect_ratios=[[1, 1], [1, 2]])
MLLAMA |= dict(intermediate_layers_indices=[0], vision_output_dim=48)
PATCH4 = dict(patch_size=4, image_size=32, out_hidden_size=24)
TOWERS = dict(
    [
        row("Aimv2VisionModel", 12, dict(hidden_act="silu", use_head=True), rounded=True),
        row("AltCLIPVisionModel", 11),
        row("Blip2VisionModel", 11, dict(qkv_bias=True)),
        row("BlipVisionModel", 11),
        row("ChineseCLIPVisionModel", 11),
        row("CLIPSegVisionModel", 11),
        row("DPTModel", 9, dict(is_hybrid=False, backbone_out_indices=[0, 1, 1, 1])),
        row("FlavaImageModel", 9),
        row("GitVisionModel", 11, single=True),
        row(
            "GroupViTVisionModel",
            22,
            GROUPS,
            left=("GroupViTTokenAssign", "GroupViTAssignAttention", "GroupViTCrossAttentionLayer", "GroupViTMixerMLP"),
            own=("GroupViTAttention",),
        ),
        row(
            "HunYuanVLVisionTransformer",
            11,
            dict(out_hidden_size=24, max_image_size=64),
            inputs=packed("pixel_values", (768,), ((2, 2), (2, 4))),
            rounded=True,
        ),
        row("idefics2.Idefics2VisionTransformer", 11),
        row("Idefics3VisionTransformer", 11),
        row("IJepaModel", 11),
        row("InstructBlipVideoVisionModel", 11),
        row("InstructBlipVisionModel", 11),
        row("InternVLVisionModel", 11, dict(image_size=[32, 32], patch_size=[16, 16], use_qk_norm=True), rounded=True),
        row("JanusVisionModel", 11),
        row("kosmos2.Kosmos2VisionModel", 11),
        row("kosmos2.Kosmos2VisionTransformer", 11),
        row("MetaClip2VisionModel", 11),
        row("MLCDVisionModel", 11, dict(num_key_value_groups=1), rounded=True),
        row("MllamaVisionModel", 16, MLLAMA, inputs=tiles),
        row(
            "Molmo2VisionModel",
            10,
            dict(image_size=[32, 32], num_position_embeddings=5),
            inputs=named(pixel_values=(2, 5, 16 * 16 * 3)),
        ),
        row("owlv2.Owlv2VisionTransformer", 11),
        row("OwlViTVisionModel", 11),
        row("PixioModel", 11, dict(mlp_ratio=2)),
        row("QianfanOCRVisionModel", 11, dict(image_size=[32, 32], patch_size=[16, 16])),
        row("RadioModel", 10),
        row("Sapiens2Model", 15, dict(pos_embed_rescale=None), rounded=True),
        row("SmolVLMVisionTransformer", 11),
        row("Step3p7VisionModel", 11, rounded=True),
        row("Tipsv2VisionModel", 11),
        row("VideoMAEModel", 9, inputs=named(pixel_values=(2, 4, 3, 32, 32))),
        row("ViTMSNModel", 11),
        row("VivitModel", 11, dict(tubelet_size=[2, 16, 16]), inputs=named(pixel_values=(2, 4, 3, 32, 32))),
        row("YolosModel", 9, dict(image_size=[32, 32], num_detection_tokens=3)),
        row("ViltModel", 9, inputs=words),
        row("XCLIPVisionModel", 7, inputs=named(pixel_values=(4, 3, 32, 32))),
    ]
)
rounded = partial(row, rounded=True)
PACKED = dict(  # images of different sizes are in one sequence
    [
        rounded(
            "CohereCompassVisionModel",
            13,
            PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
            inputs=packed("hidden_states", (96,)),
        ),
        row("Cosmos3EdgeVisionModel", 10, PATCH4, inputs=packed("pixel_values", (48,))),
        rounded("Ernie4_5_VLMoeVisionTransformerPretrainedModel", 10, PATCH4, inputs=packed("hidden_states", (48,))),
        rounded(
            "Exaone4_5_VisionModel",
            12,
            PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
            inputs=packed("hidden_states", (96,)),
        ),
        rounded("Glm4vMoeVisionModel", 12, PATCH4, inputs=packed("hidden_states", (96,))),
        rounded("Glm4vVisionModel", 12, PATCH4, inputs=packed("hidden_states", (96,))),
        rounded(
            "Glm5NextVisionModel",
            11,
            PATCH4,
            inputs=packed("hidden_states", (96,)),
            left=("Glm5NextVisionMLP", "Glm5NextVisionPatchMerger"),
        ),
        row("GlmImageVisionModel", 11, PATCH4, inputs=packed("pixel_values", (48,))),
        rounded("GlmOcrVisionModel", 16, PATCH4, inputs=packed("hidden_states", (96,))),
        rounded(
            "Inkling2VisionModel",
            11,
            PATCH4,
            inputs=packed("pixel_values", (8, 8, 3), ((2, 4), (4, 2)), "image_grid_thw"),
        ),
        rounded("Kimi_K25VisionModel", 11, PATCH4, inputs=packed("pixel_values", (3, 4, 4))),
        row(
            "minicpmv4_6.MiniCPMV4_6VisionModel",
            12,
            PATCH4 | dict(insert_layer_id=0),
            inputs=in_one_row,
            left=("MiniCPMV4_6ViTWindowAttentionMerger",),
        ),
        rounded("MuseGlimmerVisionModel", 10, PATCH4, inputs=packed("pixel_values", (96,))),
        rounded("MuseSparkVisionModel", 10, PATCH4, inputs=packed("pixel_values", (96,))),
        rounded("PaddleOCRVisionTransformer", 11, PATCH4, inputs=packed("pixel_values", (3, 4, 4), batch=True)),
        rounded(
            "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
            12,
            PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded(
            "qwen2_5_omni.Qwen2_5OmniVisionEncoder",
            12,
            PATCH4 | dict(fullatt_block_indexes=[1], window_size=16),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded(
            "qwen2_vl.Qwen2VisionTransformerPretrainedModel",
            12,
            PATCH4 | dict(mlp_ratio=2),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded(
            "Qwen3_5VisionModel",
            12,
            PATCH4 | dict(num_position_embeddings=64),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded(
            "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder",
            13,
            PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded(
            "Qwen3VLVisionModel",
            13,
            PATCH4 | dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
            inputs=packed("hidden_states", (96,), frames=2),
        ),
        rounded("VideoLlama3VisionModel", 11, PATCH4, inputs=packed("pixel_values", (48,), merge_sizes=2)),
    ]
)
AXES = dict(image_size=80, window_size=4, global_attn_indexes=[1], mlp_dim=32, output_channels=8, num_pos_feats=4)
SEGGPT = dict(image_size=[64, 32], pretrain_image_size=32, mlp_dim=32, intermediate_hidden_state_indices=[0, 1])
SEGGPT |= dict(merge_index=0, decoder_hidden_size=8)
VITDET = dict(image_size=64, pretrain_image_size=64, window_size=3, window_block_indices=[0], mlp_ratio=2)
VITDET |= dict(use_relative_position_embeddings=True)
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
SAM2_STAGES = dict(model_type="sam2_hiera_det_model", query_stride=[2, 2], patch_kernel_size=[7, 7])
SAM2_STAGES |= dict(patch_stride=[4, 4], patch_padding=[3, 3])
SAM2_STAGES |= dict(image_size=[64, 64], blocks_per_stage=[1, 1, 3, 1], embed_dim_per_stage=[8, 16, 24, 32])
SAM2_STAGES |= dict(num_attention_heads_per_stage=[1, 2, 2, 2], window_size_per_stage=[8, 4, 3, 2], hidden_size=8)
SAM2_STAGES |= dict(global_attention_blocks=[3], window_positional_embedding_background_size=[3, 3])
SAM2 = dict(backbone_config=SAM2_STAGES, backbone_channel_list=[32, 24, 16, 8], fpn_hidden_size=8)
FLORENCE = dict(embed_dim=[8, 16], depths=[1, 1], num_heads=[2, 2], num_groups=[2, 2], patch_prenorm=[False, True])
FLORENCE |= dict(window_size=3, drop_path_rate=0.0)
FLORENCE |= {f"patch_{key}": value for key, value in dict(size=[7, 3], stride=[4, 2], padding=[3, 1]).items()}
SUPER = dict(patch_size=1, embed_dim=12, depths=[2], num_heads=[2], window_size=4, image_size=12, drop_path_rate=0.0)
BLIP_SIZES = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
QFORMER = BLIP_SIZES | dict(
    vocab_size=9, encoder_hidden_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
BLIP = dict(vision_config=BLIP_SIZES | dict(image_size=32, patch_size=16), qformer_config=QFORMER)
BLIP |= dict(num_query_tokens=3, image_text_hidden_size=8)
LFM = dict(patch_size=16, temporal_patch_size=1)
DENSE = dict(  # with windows, other inputs or other positions
    [
        row("sam.SamVisionEncoder", 5, AXES, inputs=(80, 80), left=("SamLayerNorm",)),
        row("got_ocr2.GotOcr2VisionEncoder", 5, AXES, inputs=(80, 80), left=("GotOcr2LayerNorm",), single=True),
        row(
            "SegGptModel",
            5,
            SEGGPT,
            inputs=named(pixel_values=(2, 3, 32, 32), prompt_pixel_values=(2, 3, 32, 32), prompt_masks=(2, 3, 32, 32)),
            single=True,
        ),
        row("VitDetModel", 5, VITDET, inputs=(64, 80)),
        row(
            "PixtralVisionModel",
            11,
            inputs=named(pixel_values=(2, 3, 48, 32), image_sizes=torch.tensor([[48, 32], [32, 16]])),
            rounded=True,
        ),
        row("Llama4VisionModel", 5, LLAMA, inputs=(64, 64), left=("Llama4VisionPixelShuffleMLP",), rounded=True),
        row("Sam3ViTModel", 5, SAM3, inputs=(64, 64), rounded=True),
        row("VJEPA2Model", 7, VJEPA, inputs=named(pixel_values_videos=(2, 4, 3, 32, 32))),
        row(
            "deepseek_ocr2.DeepseekOcr2VisionEncoder",
            4,
            OCR,
            inputs=named(inputs_embeds=(2, 7, 24), num_patches=4),
            rounded=True,
        ),
        row("TimesformerModel", 9, VIDEO, inputs=named(pixel_values=(2, 3, 3, 32, 32))),
        row("MgpstrModel", 8, LINES, inputs=(16, 32)),
        row("bridgetower.BridgeTowerVisionModel", 9, BRIDGE, inputs=named(image=(2, 3, 32, 32))),
        row("Phi4MultimodalVisionModel", 15, dict(crop_size=32), inputs=(32, 32)),
        row(
            "Pix2StructVisionModel",
            4,
            T5,
            inputs=named(flattened_patches=flattened(2, 6, 22)),
            left=("Pix2StructLayerNorm",),
        ),
        row(
            "kosmos2_5.Kosmos2_5VisionModel",
            4,
            T5 | dict(max_num_patches=8),
            inputs=named(flattened_patches=flattened(2, 6, 22)),
            left=("Kosmos2_5LayerNorm",),
            single=True,
        ),
        row("GraniteDoclingVisionModel", 20, DOCLING, inputs=(64, 64)),
        row("HieraModel", 8, HIERA, inputs=(64, 64)),
        row("Sam2VisionModel", 13, SAM2, inputs=(64, 64), own=("Sam2SinePositionEmbedding",)),
        row("Florence2VisionBackbone", 8, FLORENCE, inputs=named(hidden_states=(2, 3, 40, 56))),
        row("Swin2SRModel", 8, SUPER, inputs=(12, 8)),
        row("Blip2VisionModelWithProjection", 16, BLIP, inputs=(32, 32)),
        row(
            "Lfm3VlVisionModel",
            2,
            LFM,
            inputs=named(pixel_values=(12, 768), grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]])),
            left=("Lfm3VlVisionLayer",),
            rounded=True,
        ),
        row(
            "Gemma4VisionModel",
            4,
            GEMMA,
            inputs=named(pixel_values=(2, 16, 768), pixel_position_ids=PLACES),
        ),
    ]
)
LEVIT = dict(image_size=128, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1])
LEVIT |= dict(key_dim=[4, 4, 4])
CVT = dict(embed_dim=[8, 16], depth=[1, 2], num_heads=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2])
CVT |= dict(patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], cls_token=[False, True], drop_path_rate=[0.0, 0.2])
CVT |= {
    key: [value] * 2 for key, value in dict(kernel_qkv=3, padding_kv=1, padding_q=1, stride_kv=2, stride_q=1).items()
}
CVT |= dict(attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], qkv_bias=[True, False])
CVT |= dict(qkv_projection_method=["dw_bn"] * 2)


def dropped_paths(name: str, options: dict[str, Any]) -> nn.Module:
    """LeViT with stochastic depth, for which its configuration takes integers only."""
    model = tower(name, options)
    for module in model.modules():
        if hasattr(module, "drop_rate"):
            module.drop_rate = 0.5
    return model


MORE = TOWERS | PACKED | DENSE
MORE["hf_levit"] = Entry(
    partial(tower, "LevitModel", LEVIT), 13, images(128, 128), left=("LevitMLPLayer",), batched=True,
    hooked=(
        "queries_keys_values", "queries_keys_values.batch_norm", "projection.linear", "linear_up", "activation"
    ),
)  # fmt: skip
MORE["hf_levit_drop"] = Entry(
    partial(dropped_paths, "LevitModel", LEVIT), 5, images(128, 128), left=("LevitMLPLayer", "LevitResidualLayer"),
    batched=True,
)  # fmt: skip
MORE["hf_cvt"] = Entry(
    partial(tower, "CvtModel", CVT), 9, images(20, 28), batched=True,
    hooked=(
        "convolution", "normalization", "linear_projection", "projection_key", "attention.attention", "layernorm_after",
        "output.dense", "intermediate", "convolution_projection_value",
    ),
)  # fmt: skip
