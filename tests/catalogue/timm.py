"""Small models of timm with random weights."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .entry import SIDE, Entry, Given, Sizes, images

PATCH = 16  # 4 patches: ragged enough for every kernel, small enough for the interpreter
TIMM = dict(img_size=SIDE, patch_size=PATCH, embed_dim=24, depth=2, num_heads=2, num_classes=5)
ROTARY = dict(use_rot_pos_emb=True, use_abs_pos_emb=False, rope_type="dinov3", rope_rotate_half=True)
TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5)


def module(name: str) -> Any:
    """A file of timm's models."""
    return import_module(f"timm.models.{name}")


def made(path: str, *given: object, **options: object) -> nn.Module:
    """The class "model.Class" of timm with these arguments."""
    file, cls = path.split(".")
    return getattr(module(file), cls)(*given, **options)


def entry(
    make: str | Callable[..., nn.Module],
    fused: int,
    *sides: int,
    left: tuple[str, ...] = (),
    own: tuple[str, ...] = (),
    hooked: tuple[str, ...] = (),
    batched: bool = False,
    **options: Any,
) -> Entry:
    """The class "model.Class", or the function, with these options and for images of this height and width."""
    make = partial(made, make) if isinstance(make, str) else make
    inputs = images(*(sides or (SIDE, SIDE)))
    return Entry(partial(make, **options), fused, inputs, left, own, hooked=hooked, batched=batched)


def post_norms(**options: Any) -> nn.Module:
    vit = module("vision_transformer")
    return vit.VisionTransformer(**options, block_fn=vit.ResPostBlock)


def swiglu(**options: Any) -> nn.Module:
    layer = import_module("timm.layers").SwiGLUPacked
    return made("vision_transformer.VisionTransformer", **options, mlp_layer=layer, act_layer=nn.SiLU)


def naflex(**options: Any) -> nn.Module:
    file = module("naflexvit")
    return file.NaFlexVit(file.NaFlexVitCfg(**options), num_classes=5)


def caformer() -> nn.Module:
    file = module("metaformer")
    norms = (file.LayerNorm2dNoBias, file.LayerNormNoBias)
    sizes = dict(depths=(1, 1), dims=(8, 32), token_mixers=(file.SepConv, file.Attention), norm_layers=norms)
    return file.MetaFormer(**sizes, use_mlp_head=True, num_classes=5)


def relative(block: str = "RelPosBlock", **more: object) -> nn.Module:
    file = module("vision_transformer_relpos")
    sizes = dict(block_fn=getattr(file, block), mlp_ratio=2, init_values=0.1)
    return file.VisionTransformerRelPos(**TINY, **sizes, **more)


def maxvit(**more: object) -> nn.Module:
    file = module("maxxvit")
    transformer = file.MaxxVitTransformerCfg(dim_head=8, window_size=(2, 2), grid_size=(2, 2), **more)
    options = dict(embed_dim=(16,), depths=(1,), block_type=("M",), stem_width=(8, 16), transformer_cfg=transformer)
    return file.MaxxVit(file.MaxxVitCfg(**options), img_size=16, num_classes=5)


def vitamin() -> nn.Module:
    return made("vision_transformer.VisionTransformer", **TINY, mlp_layer=module("vitamin").GeGluMlp)


def sam(**more: object) -> nn.Module:
    sizes = dict(mlp_ratio=2, neck_chans=0, global_attn_indexes=(1,), qkv_bias=True)
    model = made("vision_transformer_sam.VisionTransformerSAM", **TINY, **sizes, **more)
    if "use_rel_pos" in more:  # the table of another size of image, which is interpolated
        model.blocks[1].attn.rel_pos_h = nn.Parameter(torch.empty(11, 8))
    return model


def mvit(**more: object) -> nn.Module:
    sizes = dict(depths=(1, 2), embed_dim=8, num_heads=1, mlp_ratio=2, stride_q=((1, 1), (2, 2)))
    config = module("mvitv2").MultiScaleVitCfg(**sizes, stride_kv_adaptive=(2, 2), **more)
    return made("mvitv2.MultiScaleVit", config, img_size=32, num_classes=5)


def patches(dtype: torch.dtype, sizes: Sizes = ()) -> Given:
    """Patches of two images of different sizes."""
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    coordinates = torch.tensor([[[y, x] for y in range(2) for x in range(3)]] * 2)
    coordinates[1, :4] = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    coordinates[1, 4:] = 0
    return {"x": torch.randn(2, 6, PATCH * PATCH * 3, dtype=dtype), "patch_coord": coordinates, "patch_valid": valid}


VIT, EVA, BEIT = "vision_transformer.VisionTransformer", "eva.Eva", "beit.Beit"
# grids of 8 × 8 and 4 × 4, or 7 × 5 and 4 × 3, for windows of 4 × 4
SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 4), window_size=4, num_classes=5)
SWIN |= dict(drop_path_rate=0.0)
RAGGED = SWIN | dict(img_size=(28, 20), depths=(2, 2))
SWIN_V1, SWIN_V2 = "swin_transformer.SwinTransformer", "swin_transformer_v2.SwinTransformerV2"
TWINS = dict(img_size=32, embed_dims=(16, 24), num_heads=(2, 3), mlp_ratios=(2, 2), depths=(2, 2), sr_ratios=(2, 1))
TWINS |= dict(num_classes=5)
PVT = dict(embed_dims=(16, 24), num_heads=(1, 2), mlp_ratios=(2, 2), depths=(1, 2), sr_ratios=(2, 1), num_classes=5)
TNT = dict(img_size=SIDE, patch_size=PATCH, embed_dim=24, inner_dim=8, num_heads_inner=2, num_heads_outer=3)
TNT |= dict(depth=2, qkv_bias=True, num_classes=5)
CROSS = dict(img_size=32, img_scale=(1.0, 0.5), patch_size=(8, 4), embed_dim=(16, 24), depth=((1, 1, 1), (1, 1, 0)))
CROSS |= dict(num_heads=(2, 2), num_classes=5)
PIT = dict(img_size=32, patch_size=8, stride=8, stem_type="overlap", base_dims=(12, 12), depth=(1, 1), heads=(2, 2))
PIT |= dict(mlp_ratio=2, num_classes=5)
NAFLEX = dict(patch_size=PATCH, embed_dim=24, depth=2, num_heads=2, class_token=True, reg_tokens=1, global_pool="avg")
COMMON = {
    "timm_vit": entry(VIT, 11, **TIMM),
    "timm_vit_qk_norm": entry(VIT, 19, **TIMM, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True),
    "timm_deit_distilled": entry("deit.VisionTransformerDistilled", 11, **TIMM),
    "timm_deit3": entry(VIT, 11, **TIMM, init_values=0.1, no_embed_class=True),
    "timm_dinov2_reg": entry(swiglu, 11, **TIMM, init_values=0.1, reg_tokens=2),
    "timm_clip": entry(VIT, 11, **TIMM, pre_norm=True, act_layer="quick_gelu", norm_layer=nn.LayerNorm),
    "timm_siglip": entry(VIT, 14, **TIMM, class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "timm_beit": entry(BEIT, 11, **TIMM, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1),
    "timm_beit_shared": entry(BEIT, 11, **TIMM, use_shared_rel_pos_bias=True, init_values=None),
    "timm_eva02": entry(
        EVA, 15, **TIMM, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, scale_attn_inner=True
    ),
    "timm_eva": entry(EVA, 11, **TIMM, qkv_fused=True, init_values=0.1),
    "timm_dinov3": entry(
        EVA,
        11,
        **TIMM,
        **ROTARY,
        attn_type="rope",
        qkv_bias=False,
        init_values=0.1,
        num_reg_tokens=2,
        swiglu_mlp=True,
    ),
    "timm_rope_vit": entry(EVA, 15, **TIMM, use_rot_pos_emb=True, rope_type="mixed", attn_type="rope", qk_norm=True),
    "timm_naflex": Entry(partial(naflex, **NAFLEX), 10, patches),
    "timm_swin": entry(SWIN_V1, 18, **SWIN),
    "timm_swin_ragged": entry(SWIN_V1, 23, 28, 20, **RAGGED),
    "timm_swin_any": entry(SWIN_V1, 18, 24, 36, **SWIN, strict_img_size=False),
    "timm_swin_v2": entry(SWIN_V2, 14, **SWIN),
    "timm_swin_v2_ragged": entry(SWIN_V2, 18, 28, 20, **RAGGED),
    "timm_twins_svt": entry("twins.Twins", 23, **TWINS, wss=(4, 2)),
    "timm_twins_svt_ragged": entry("twins.Twins", 23, 24, 40, **TWINS | dict(img_size=(24, 40), wss=(4, 4))),
    "timm_twins_pcpvt": entry("twins.Twins", 23, **TWINS | dict(sr_ratios=(4, 2))),
    "timm_pvt_v2": entry("pvt_v2.PyramidVisionTransformerV2", 15, 32, 24, **PVT),
    "timm_pvt_v2_linear": entry("pvt_v2.PyramidVisionTransformerV2", 12, 32, 24, **PVT, linear=True),
    "timm_tnt": entry("tnt.TNT", 20, **TNT),
    "timm_tnt_legacy": entry("tnt.TNT", 18, **TNT, legacy=True),
    "timm_crossvit": entry("crossvit.CrossVit", 34, **CROSS),
    "timm_pit": entry("pit.PoolingVisionTransformer", 11, **PIT),
    "timm_cait": entry("cait.Cait", 19, **TIMM, init_values=0.1),
}

GCVIT = dict(embed_dim=8, depths=(1, 2), num_heads=(1, 2), mlp_ratio=2, window_size=((4, 2), (2, 1)), num_classes=5)
GCVIT |= dict(img_size=(32, 16), window_ratio=None)
CR = dict(img_size=(28, 20), patch_size=4, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2), mlp_ratio=2)
NEST = dict(img_size=32, patch_size=4, num_levels=2, embed_dims=(8, 16), num_heads=(2, 4), depths=(1, 1), mlp_ratio=2)
HIERA = dict(img_size=(64, 32), embed_dim=8, num_heads=1, stages=(1, 2, 1), q_pool=2, mlp_ratio=2, num_classes=5)
HIERA |= dict(mask_unit_attn=(True, True, False), mask_unit_size=(4, 4))
SAM2 = dict(embed_dim=8, num_heads=1, stages=(1, 2, 1), q_pool=1, window_spec=(4, 2, 2), num_classes=5)
SAM2 |= dict(global_att_blocks=(2,), global_pos_size=(4, 4))
VOLO = dict(img_size=32, layers=(1, 2), embed_dims=(16, 24), num_heads=(2, 3), downsamples=(True, False))
VOLO |= dict(outlook_attention=(True, False), mlp_ratio=2, stem_hidden_dim=8, num_classes=5, use_aux_head=False)
LEVIT = dict(img_size=64, embed_dim=(16, 24), key_dim=4, depth=(1, 1), num_heads=(2, 3), num_classes=5)
FORMER = dict(depths=(1, 1, 1, 2), embed_dims=(8, 8, 8, 16), num_vit=1, num_classes=5)
TINY_VIT = dict(embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2), window_sizes=(2, 3), mlp_ratio=2, num_classes=5)
XCIT = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, cls_attn_layers=1, eta=0.5, num_classes=5)
EDGE = dict(dims=(8,) * 4, depths=(1,) * 4, kernel_sizes=(3,) * 4, heads=(2,) * 4, d2_scales=(2,) * 4, num_classes=5)
DAVIT = dict(depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), window_size=3, mlp_ratio=2, num_classes=5)
COAT = dict(img_size=32, patch_size=4, embed_dims=(8,) * 4, serial_depths=(1,) * 4, parallel_depth=1, num_classes=5)
COAT |= dict(num_heads=2, mlp_ratios=(2,) * 4, crpe_window={3: 1, 5: 1})
CSAT = dict(dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), transformer_depths=(0, 0, 0, 1), num_classes=5)
FASTVIT = dict(layers=(1, 1), embed_dims=(8, 32), mlp_ratios=(2, 2), downsamples=(False, True), num_classes=5)
FASTVIT |= dict(se_downsamples=(False,) * 2, token_mixers=("repmixer", "attention"))
CONVNEXT = dict(depths=(1,) * 4, dims=(8,) * 4, use_grn=True, ls_init_value=None, num_classes=5)
GEMMA = dict(img_size=(32, 16), patch_size=8, embed_dim=16, depth=2, num_heads=2, head_dim=8, intermediate_size=24)
GEMMA |= dict(pooling_kernel_size=1, position_embedding_size=8, num_classes=5)
NORM, BIAS = ("LayerNorm2d",), ("RelPosMlp",)
HEAD, PARTS = (*NORM, "NormMlpClassifierHead"), (*NORM, "PartitionAttentionCl")
CONV = ("Attention", "AttentionDownsample", "LevitBlock", "LevitDownsample", "LevitMlp")
MORE = {
    "timm_deepseek": entry("deepseek_vit.DeepseekVitClassifier", 11, own=("RmsNormFp32",), **TIMM)._replace(
        rounded=True
    ),
    "timm_eva_post_norm": entry(EVA, 7, **TIMM, qkv_fused=True, use_post_norm=True),
    "timm_res_post_norm": entry(post_norms, 7, **TIMM),
    "timm_relpos": entry(relative, 13, left=BIAS, own=("Mlp",), hooked=("attn.qkv",)),
    "timm_relpos_cls": entry(
        relative, 12, left=BIAS, class_token=True, global_pool="token", rel_pos_type="mlp", shared_rel_pos=True
    ),
    "timm_relpos_post": entry(
        relative,
        13,
        left=BIAS,
        own=("Mlp",),
        block="ResPostRelPosBlock",
        rel_pos_type="mlp",
        rel_pos_dim=8,
        qk_norm=True,
    ),
    "timm_maxvit": entry(maxvit, 4, 16, 16, left=PARTS, hooked=("attn.proj",)),
    "timm_maxvit_mlp": entry(maxvit, 6, 16, 16, left=PARTS + BIAS, rel_pos_type="mlp", rel_pos_dim=8, head_first=False),
    "timm_gcvit": entry("gcvit.GlobalContextVit", 6, 32, 16, left=NORM, hooked=("rel_pos",), **GCVIT),
    "timm_swin_cr": entry("swin_transformer_v2_cr.SwinTransformerV2Cr", 15, 28, 20, **CR, num_classes=5),
    "timm_sam": entry(sam, 5, left=NORM, window_size=3, use_rel_pos=True),
    "timm_sam_rope": entry(sam, 5, left=NORM, window_size=2, use_rope=True, use_abs_pos=False, qk_norm=True),
    "timm_nest": entry("nest.Nest", 10, left=("PatchEmbed",), **NEST, num_classes=5),
    "timm_hiera": entry("hiera.Hiera", 18, 64, 32, left=("ClNormMlpClassifierHead",), **HIERA),
    "timm_sam2": entry("hieradet_sam2.HieraDet", 8, 32, 48, left=("ClNormMlpClassifierHead",), **SAM2),
    "timm_mvit": entry(mvit, 6, expand_attn=True),
    "timm_mvit_cls": entry(mvit, 6, use_cls_token=True, expand_attn=False, mode="max", residual_pooling=False),
    "timm_mvit_avg": entry(mvit, 6, mode="avg", rel_pos_type="", kernel_qkv=(3, 3)),
    "timm_volo": entry("volo.VOLO", 17, **VOLO, post_layers=("ca",)),
    "timm_levit": entry("levit.Levit", 6, 64, 64, left=("LevitMlp",), hooked=("proj.ln",), batched=True, **LEVIT),
    "timm_levit_conv": entry(
        "levit.Levit", 0, 64, 64, left=CONV, hooked=("mlp.ln1",), batched=True, **LEVIT, use_conv=True
    ),
    "timm_efficientformer": entry("efficientformer.EfficientFormer", 5, 224, 224, left=("ConvMlpWithNorm",), **FORMER),
    "timm_tiny_vit": entry("tiny_vit.TinyVit", 8, 40, 24, left=HEAD, **TINY_VIT),
    "timm_xcit": entry("xcit.Xcit", 4, left=("ClassAttentionBlock",), **XCIT),
    "timm_edgenext": entry("edgenext.EdgeNeXt", 7, 64, 32, left=HEAD, **EDGE),
    "timm_davit": entry("davit.DaVit", 8, 40, 24, left=HEAD, hooked=("softmax", "attn.qkv"), **DAVIT),
    "timm_davit_v2": entry("davit.DaVit", 8, 40, 24, left=HEAD, **DAVIT, channel_attn_v2=True),
    "timm_coat": entry("coat.CoaT", 18, **COAT),
    "timm_caformer": entry(caformer, 3, 32, 48, left=(*NORM, "LayerNorm2dNoBias", "LayerNormNoBias", "Mlp")),
    "timm_vitamin": entry(vitamin, 13),
    "timm_csat": entry("csatv2.CSATv2", 11, 64, 64, left=(*HEAD, "SpatialAttention"), **CSAT),
    "timm_fastvit": entry("fastvit.FastVit", 1, 32, 48, left=("AttentionBlock", "ConvMlp"), **FASTVIT),
    "timm_convnext_v2": entry("convnext.ConvNeXt", 4, 64, 32, left=HEAD, **CONVNEXT),
    "timm_hiera_widened": entry(
        "hiera.Hiera", 18, 64, 32, left=("ClNormMlpClassifierHead",), **HIERA, use_expand_proj=False
    ),
    "timm_gemma4": entry("gemma4_vit.Gemma4VitClassifier", 4, 32, 16, hooked=("q_proj",), **GEMMA),
    "timm_gemma4_grouped": entry(
        "gemma4_vit.Gemma4VitClassifier",
        2,
        32,
        16,
        left=("Gemma4GatedMlp",),
        **GEMMA,
        num_kv_heads=1,
        use_clipped_linears=True,
    ),
}
