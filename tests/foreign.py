"""Small models of other packages with random weights, on which `optimize` is tested.

Packages are imported when a model is built, so that a release without some of the models can still be tested.
"""

from importlib import import_module

import torch
from torch import Tensor, nn

SIDE, PATCH = 32, 16  # 4 patches: ragged enough for every kernel, small enough for the interpreter
TIMM = dict(img_size=SIDE, patch_size=PATCH, embed_dim=24, depth=2, num_heads=2, num_classes=5)
TOWER = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
HF = dict(image_size=SIDE, patch_size=PATCH, **TOWER)
DROPLESS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
DINO_V3 = dict(num_register_tokens=2, pos_embed_rescale=None)  # no random positions in training
ROTARY = dict(use_rot_pos_emb=True, use_abs_pos_emb=False, rope_type="dinov3", rope_rotate_half=True)
BEIT = dict(layer_scale_init_value=0.1, drop_path_rate=0.0)
STAGES = dict(num_encoder_blocks=2, depths=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], drop_path_rate=0.0)
STAGES |= dict(mlp_ratios=[2, 2], sr_ratios=[2, 1], strides=[4, 2])
WINDOWS = dict(image_size=SIDE, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
WINDOWS |= dict(drop_path_rate=0.0, mlp_ratio=2.0)


def _timm(name: str):
    return import_module(f"timm.models.{name}")


def _hf(model: str, config: str, **options: object) -> nn.Module:
    package = import_module("transformers")
    return getattr(package, model)(getattr(package, config)(**options))


def _maskformer_swin() -> nn.Module:
    package = import_module("transformers.models.maskformer.modeling_maskformer_swin")
    return package.MaskFormerSwinModel(import_module("transformers").MaskFormerSwinConfig(**WINDOWS))


def _distilled() -> nn.Module:
    return _timm("deit").VisionTransformerDistilled(**TIMM)


def _dino(name: str, **more: object) -> nn.Module:
    size = {k: v for k, v in HF.items() if k != "intermediate_size"} if "Dinov2" in name else HF
    return _hf(name + "Model", name + "Config", **size, **more)


def _swin(name: str, size: object = 32, **more: object) -> nn.Module:
    """Grids of 8 × 8 and 4 × 4, or 7 × 5 and 4 × 3, for windows of 4 × 4."""
    file, cls = name.split(".")
    sizes = dict(patch_size=4, embed_dim=16, num_heads=(2, 4), window_size=4, num_classes=5, drop_path_rate=0.0)
    return getattr(_timm(file), cls)(img_size=size, **sizes, **more)


def _torchvision_swin(version: str, window: list[int]) -> nn.Module:
    file = import_module("torchvision.models.swin_transformer")
    parts = dict(
        block=getattr(file, f"SwinTransformerBlock{version}"), downsample_layer=getattr(file, f"PatchMerging{version}")
    )
    return file.SwinTransformer([4, 4], 16, [2, 2], [2, 4], window, 2.0, 0.0, 0.0, 0.0, num_classes=5, **parts)


def _twins(**more: object) -> nn.Module:
    sizes = dict(img_size=32, embed_dims=(16, 24), num_heads=(2, 3), mlp_ratios=(2, 2), depths=(2, 2), sr_ratios=(2, 1))
    return _timm("twins").Twins(**(sizes | more), num_classes=5)


def _pvt(**more: object) -> nn.Module:
    sizes = dict(embed_dims=(16, 24), num_heads=(1, 2), mlp_ratios=(2, 2), depths=(1, 2), sr_ratios=(2, 1))
    return _timm("pvt_v2").PyramidVisionTransformerV2(**sizes, **more, num_classes=5)


def _tnt(**more: object) -> nn.Module:
    sizes = dict(img_size=SIDE, patch_size=PATCH, embed_dim=24, inner_dim=8, num_heads_inner=2, num_heads_outer=3)
    return _timm("tnt").TNT(**sizes, depth=2, qkv_bias=True, num_classes=5, **more)


SIZES = {
    "timm_swin_ragged": (28, 20),
    "timm_swin_any": (24, 36),
    "timm_swin_v2_ragged": (28, 20),
    "timm_twins_svt_ragged": (24, 40),
    "timm_pvt_v2": (32, 24),
    "timm_pvt_v2_linear": (32, 24),
    "hf_segformer": (32, 24),
    "hf_pvt_v2": (24, 32),
} | dict.fromkeys(
    ("hf_swin", "hf_swinv2", "hf_donut_swin", "hf_maskformer_swin", "hf_glpn"), (28, 36)
)  # sides of images; SIDE × SIDE for the others

# timm's
MODELS = {
    "timm_vit": lambda: _timm("vision_transformer").VisionTransformer(**TIMM),
    "timm_vit_qk_norm": lambda: _timm("vision_transformer").VisionTransformer(
        **TIMM, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True
    ),
    "timm_deit_distilled": _distilled,
    "timm_deit3": lambda: _timm("vision_transformer").VisionTransformer(**TIMM, init_values=0.1, no_embed_class=True),
    "timm_dinov2_reg": lambda: _timm("vision_transformer").VisionTransformer(
        **TIMM, init_values=0.1, reg_tokens=2, mlp_layer=import_module("timm.layers").SwiGLUPacked, act_layer=nn.SiLU
    ),
    "timm_clip": lambda: _timm("vision_transformer").VisionTransformer(
        **TIMM, pre_norm=True, act_layer="quick_gelu", norm_layer=nn.LayerNorm
    ),
    "timm_siglip": lambda: _timm("vision_transformer").VisionTransformer(
        **TIMM, class_token=False, global_pool="map", act_layer="gelu_tanh"
    ),
    "timm_beit": lambda: _timm("beit").Beit(**TIMM, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1),
    "timm_beit_shared": lambda: _timm("beit").Beit(**TIMM, use_shared_rel_pos_bias=True, init_values=None),
    "timm_eva02": lambda: _timm("eva").Eva(
        **TIMM, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, scale_attn_inner=True
    ),
    "timm_eva": lambda: _timm("eva").Eva(**TIMM, qkv_fused=True, init_values=0.1),
    "timm_dinov3": lambda: _timm("eva").Eva(
        **TIMM, **ROTARY, attn_type="rope", qkv_bias=False, init_values=0.1, num_reg_tokens=2, swiglu_mlp=True
    ),
    "timm_rope_vit": lambda: _timm("eva").Eva(
        **TIMM, use_rot_pos_emb=True, rope_type="mixed", attn_type="rope", qk_norm=True
    ),
    "timm_naflex": lambda: _timm("naflexvit").NaFlexVit(
        _timm("naflexvit").NaFlexVitCfg(
            patch_size=PATCH, embed_dim=24, depth=2, num_heads=2, class_token=True, reg_tokens=1, global_pool="avg"
        ),
        num_classes=5,
    ),
    "timm_swin": lambda: _swin("swin_transformer.SwinTransformer", depths=(2, 1)),
    "timm_swin_ragged": lambda: _swin("swin_transformer.SwinTransformer", (28, 20), depths=(2, 2)),
    "timm_swin_any": lambda: _swin("swin_transformer.SwinTransformer", depths=(2, 1), strict_img_size=False),
    "timm_swin_v2": lambda: _swin("swin_transformer_v2.SwinTransformerV2", depths=(2, 1)),
    "timm_swin_v2_ragged": lambda: _swin("swin_transformer_v2.SwinTransformerV2", (28, 20), depths=(2, 2)),
    "timm_twins_svt": lambda: _twins(wss=(4, 2)),
    "timm_twins_svt_ragged": lambda: _twins(img_size=(24, 40), wss=(4, 4)),
    "timm_twins_pcpvt": lambda: _twins(sr_ratios=(4, 2)),
    "timm_pvt_v2": lambda: _pvt(),
    "timm_pvt_v2_linear": lambda: _pvt(linear=True),
    "timm_tnt": lambda: _tnt(),
    "timm_tnt_legacy": lambda: _tnt(legacy=True),
    "timm_crossvit": lambda: _timm("crossvit").CrossVit(
        img_size=32,
        img_scale=(1.0, 0.5),
        patch_size=(8, 4),
        embed_dim=(16, 24),
        depth=((1, 1, 1), (1, 1, 0)),
        num_heads=(2, 2),
        num_classes=5,
    ),
    "timm_pit": lambda: _timm("pit").PoolingVisionTransformer(
        32, 8, 8, "overlap", (12, 12), (1, 1), (2, 2), 2, num_classes=5
    ),
    "timm_cait": lambda: _timm("cait").Cait(**TIMM, init_values=0.1),
    # transformers'
    "hf_vit": lambda: _hf("ViTModel", "ViTConfig", **HF, **DROPLESS),
    "hf_vit_eager": lambda: _hf("ViTModel", "ViTConfig", **HF, **DROPLESS, attn_implementation="eager"),
    "hf_deit": lambda: _hf("DeiTModel", "DeiTConfig", **HF, **DROPLESS),
    "hf_mae": lambda: _hf("ViTMAEModel", "ViTMAEConfig", **HF, **DROPLESS, mask_ratio=0.5),
    "hf_dinov2": lambda: _dino("Dinov2", layerscale_value=0.5),
    "hf_dinov2_swiglu": lambda: _dino("Dinov2WithRegisters", use_swiglu_ffn=True, num_register_tokens=2),
    "hf_dinov3": lambda: _dino("DINOv3ViT", **DINO_V3),
    "hf_dinov3_gated": lambda: _dino("DINOv3ViT", **DINO_V3, use_gated_mlp=True, hidden_act="silu"),
    "hf_clip": lambda: _hf("CLIPVisionModel", "CLIPVisionConfig", **HF),
    "hf_siglip": lambda: _hf("SiglipVisionModel", "SiglipVisionConfig", **HF),
    "hf_siglip2": lambda: _hf("Siglip2VisionModel", "Siglip2VisionConfig", **TOWER, patch_size=PATCH, num_patches=4),
    "hf_swin": lambda: _hf("SwinModel", "SwinConfig", **WINDOWS),
    "hf_swinv2": lambda: _hf("Swinv2Model", "Swinv2Config", **WINDOWS),
    "hf_donut_swin": lambda: _hf("DonutSwinModel", "DonutSwinConfig", **WINDOWS),
    "hf_maskformer_swin": _maskformer_swin,
    "hf_segformer": lambda: _hf("SegformerModel", "SegformerConfig", **STAGES, **DROPLESS, patch_sizes=[7, 3]),
    "hf_glpn": lambda: _hf("GLPNModel", "GLPNConfig", **STAGES, **DROPLESS, patch_sizes=[7, 3]),
    "hf_pvt": lambda: _hf(
        "PvtModel",
        "PvtConfig",
        **STAGES,
        **DROPLESS,
        image_size=SIDE,
        patch_sizes=[4, 2],
        sequence_reduction_ratios=[2, 1],
    ),
    "hf_pvt_v2": lambda: _hf("PvtV2Model", "PvtV2Config", **STAGES, **DROPLESS, image_size=SIDE, patch_sizes=[7, 3]),
    "hf_pvt_v2_linear": lambda: _hf(
        "PvtV2Model", "PvtV2Config", **STAGES, **DROPLESS, image_size=SIDE, patch_sizes=[7, 3], linear_attention=True
    ),
    "hf_beit": lambda: _hf("BeitModel", "BeitConfig", **HF, **DROPLESS, **BEIT, use_relative_position_bias=True),
    "hf_beit_shared": lambda: _hf(
        "BeitModel", "BeitConfig", **HF, **DROPLESS, **BEIT, use_shared_relative_position_bias=True
    ),
    "hf_data2vec": lambda: _hf(
        "Data2VecVisionModel", "Data2VecVisionConfig", **HF, **DROPLESS, **BEIT, use_relative_position_bias=True
    ),
    # torchvision's, vit-pytorch's, torch's
    "torchvision_vit": lambda: import_module("torchvision.models").VisionTransformer(
        SIDE, PATCH, 2, 2, 24, 48, num_classes=5
    ),
    "torchvision_swin": lambda: _torchvision_swin("", [4, 4]),
    "torchvision_swin_ragged": lambda: _torchvision_swin("", [3, 5]),
    "torchvision_swin_v2": lambda: _torchvision_swin("V2", [4, 4]),
    "torchvision_swin_v2_ragged": lambda: _torchvision_swin("V2", [3, 5]),
    "vit_pytorch_vit": lambda: import_module("vit_pytorch").ViT(
        image_size=SIDE, patch_size=PATCH, num_classes=5, dim=24, depth=2, heads=2, mlp_dim=48, dim_head=12
    ),
    "vit_pytorch_simple": lambda: import_module("vit_pytorch").SimpleViT(
        image_size=SIDE, patch_size=PATCH, num_classes=5, dim=24, depth=2, heads=2, mlp_dim=48, dim_head=12
    ),
    "torch_encoder_layer": lambda: nn.TransformerEncoderLayer(24, 2, 48, 0.0, "gelu", batch_first=True),
    "torch_encoder_layer_first": lambda: nn.TransformerEncoderLayer(24, 3, 48, 0.0, nn.SiLU(), norm_first=True),
    "torch_multihead": lambda: nn.MultiheadAttention(24, 3, batch_first=True),
    "mlp_sequential": lambda: nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)),
}
TOKENS = ("torch_", "mlp_")
KINDS = ("swin", "twins", "pvt", "tnt", "crossvit", "pit", "segformer", "glpn")
PYRAMIDS = [n for n in MODELS if any(kind in n for kind in KINDS)]
# plain models all of whose modules, with other settings, others of the list have, too
REPEATS = """timm_deit_distilled timm_deit3 timm_clip timm_beit_shared timm_eva hf_vit_eager hf_deit hf_mae hf_dinov2
hf_beit_shared hf_dinov3_gated hf_data2vec vit_pytorch_simple""".split()


def redraw(model: nn.Module) -> nn.Module:
    """Sets every parameter to random values, so that no zero or one hides an error; returns the model."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() in (0, 1, 3) else parameter[0].numel() ** -0.5
            norm = key.endswith("weight") and parameter.dim() == 1
            parameter.normal_(1.0 if norm else 0.0, spread)
    return model


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The named model with random parameters."""
    return redraw(MODELS[name]()).to(dtype)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> Tensor | dict[str, Tensor]:
    """Two images, or tokens; NaFlexViT and SigLIP 2 get patches of images of different sizes."""
    if name.startswith(TOKENS):
        return torch.randn(2, 5, 24, dtype=dtype)
    if name == "hf_siglip2":
        kept, sides = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), torch.tensor([[2, 3], [2, 2]])
        patches = torch.randn(2, 6, PATCH * PATCH * 3, dtype=dtype)
        return {"pixel_values": patches, "pixel_attention_mask": kept, "spatial_shapes": sides}
    if name == "timm_naflex":
        valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
        coordinates = torch.tensor([[[y, x] for y in range(2) for x in range(3)]] * 2)
        coordinates[1, :4] = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        coordinates[1, 4:] = 0
        patches = torch.randn(2, 6, PATCH * PATCH * 3, dtype=dtype)
        return {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}
    return torch.randn(2, 3, *SIZES.get(name, (SIDE, SIDE)), dtype=dtype)


def outputs(model: nn.Module, given: Tensor | dict[str, Tensor]) -> Tensor:
    """All outputs of the model, in one vector."""
    if isinstance(model, nn.MultiheadAttention):
        return torch.cat(
            [
                model(given, given, given, need_weights=False)[0],
                model(given[:, :1], given, given, need_weights=False)[0],
            ],
            1,
        )
    more = {"noise": torch.arange(4.0).expand(2, -1)} if type(model).__name__ == "ViTMAEModel" else {}
    y = model(**given) if isinstance(given, dict) and "pixel_values" in given else model(given, **more)
    if isinstance(y, Tensor):
        return y
    return torch.cat(
        [
            t.flatten()
            for t in (y if isinstance(y, tuple) else y.values())
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
    )
