"""Small models of timm's families with random weights, on which `optimize` is tested."""

from importlib import import_module

import torch
from foreign import redraw
from torch import Tensor, nn

TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5)


def timm(path: str, *given: object, **options: object) -> nn.Module:
    """The class "model.Class" of timm with these arguments."""
    file, cls = path.split(".")
    return getattr(import_module(f"timm.models.{file}"), cls)(*given, **options)


def caformer() -> nn.Module:
    file = import_module("timm.models.metaformer")
    norms = (file.LayerNorm2dNoBias, file.LayerNormNoBias)
    sizes = dict(depths=(1, 1), dims=(8, 32), token_mixers=(file.SepConv, file.Attention), norm_layers=norms)
    return file.MetaFormer(**sizes, use_mlp_head=True, num_classes=5)


def relative(block: str = "RelPosBlock", **more: object) -> nn.Module:
    file = import_module("timm.models.vision_transformer_relpos")
    sizes = dict(block_fn=getattr(file, block), mlp_ratio=2, init_values=0.1)
    return file.VisionTransformerRelPos(**TINY, **sizes, **more)


def maxvit(**more: object) -> nn.Module:
    file = import_module("timm.models.maxxvit")
    transformer = file.MaxxVitTransformerCfg(dim_head=8, window_size=(2, 2), grid_size=(2, 2), **more)
    options = dict(embed_dim=(16,), depths=(1,), block_type=("M",), stem_width=(8, 16), transformer_cfg=transformer)
    return file.MaxxVit(file.MaxxVitCfg(**options), img_size=16, num_classes=5)


def gcvit() -> nn.Module:
    sizes = dict(embed_dim=8, depths=(1, 2), num_heads=(1, 2), mlp_ratio=2, window_size=((4, 2), (2, 1)))
    return timm("gcvit.GlobalContextVit", img_size=(32, 16), window_ratio=None, **sizes, num_classes=5)


def swin_cr(**more: object) -> nn.Module:
    sizes = dict(img_size=(28, 20), patch_size=4, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2))
    return timm("swin_transformer_v2_cr.SwinTransformerV2Cr", **sizes, mlp_ratio=2, num_classes=5, **more)


def sam(**more: object) -> nn.Module:
    sizes = dict(mlp_ratio=2, neck_chans=0, global_attn_indexes=(1,), qkv_bias=True)
    model = timm("vision_transformer_sam.VisionTransformerSAM", **TINY, **sizes, **more)
    if "use_rel_pos" in more:  # the table of another size of image, which is interpolated
        model.blocks[1].attn.rel_pos_h = nn.Parameter(torch.empty(11, 8))
    return model


def nest() -> nn.Module:
    sizes = dict(img_size=32, patch_size=4, num_levels=2, embed_dims=(8, 16), num_heads=(2, 4), depths=(1, 1))
    return timm("nest.Nest", **sizes, mlp_ratio=2, num_classes=5)


def hiera(**more: object) -> nn.Module:
    sizes = dict(img_size=(64, 32), embed_dim=8, num_heads=1, stages=(1, 2, 1), q_pool=2, mlp_ratio=2, num_classes=5)
    return timm("hiera.Hiera", **sizes, mask_unit_attn=(True, True, False), mask_unit_size=(4, 4), **more)


def sam2() -> nn.Module:
    sizes = dict(embed_dim=8, num_heads=1, stages=(1, 2, 1), q_pool=1, window_spec=(4, 2, 2), num_classes=5)
    return timm("hieradet_sam2.HieraDet", **sizes, global_att_blocks=(2,), global_pos_size=(4, 4))


def mvit(**more: object) -> nn.Module:
    sizes = dict(depths=(1, 2), embed_dim=8, num_heads=1, mlp_ratio=2, stride_q=((1, 1), (2, 2)))
    config = import_module("timm.models.mvitv2").MultiScaleVitCfg(**sizes, stride_kv_adaptive=(2, 2), **more)
    return timm("mvitv2.MultiScaleVit", config, img_size=32, num_classes=5)


def volo() -> nn.Module:
    sizes = dict(img_size=32, layers=(1, 2), embed_dims=(16, 24), num_heads=(2, 3), downsamples=(True, False))
    sizes |= dict(outlook_attention=(True, False), mlp_ratio=2, stem_hidden_dim=8, num_classes=5)
    return timm("volo.VOLO", **sizes, use_aux_head=False, post_layers=("ca",))


def levit(**more: object) -> nn.Module:
    sizes = dict(img_size=64, embed_dim=(16, 24), key_dim=4, depth=(1, 1), num_heads=(2, 3), num_classes=5)
    return timm("levit.Levit", **sizes, **more)


def efficientformer() -> nn.Module:
    sizes = dict(depths=(1, 1, 1, 2), embed_dims=(8, 8, 8, 16), num_vit=1)
    return timm("efficientformer.EfficientFormer", **sizes, num_classes=5)


def tiny_vit() -> nn.Module:
    sizes = dict(embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2), window_sizes=(2, 3), mlp_ratio=2)
    return timm("tiny_vit.TinyVit", **sizes, num_classes=5)


def xcit() -> nn.Module:
    sizes = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, cls_attn_layers=1, eta=0.5)
    return timm("xcit.Xcit", **sizes, num_classes=5)


def edgenext() -> nn.Module:
    sizes = dict(dims=(8,) * 4, depths=(1,) * 4, kernel_sizes=(3,) * 4, heads=(2,) * 4, d2_scales=(2,) * 4)
    return timm("edgenext.EdgeNeXt", **sizes, num_classes=5)


def davit(**more: object) -> nn.Module:
    sizes = dict(depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), window_size=3, mlp_ratio=2)
    return timm("davit.DaVit", **sizes, num_classes=5, **more)


def coat() -> nn.Module:
    sizes = dict(img_size=32, patch_size=4, embed_dims=(8,) * 4, serial_depths=(1,) * 4, parallel_depth=1)
    sizes |= dict(num_heads=2, mlp_ratios=(2,) * 4, crpe_window={3: 1, 5: 1})
    return timm("coat.CoaT", **sizes, num_classes=5)


def vitamin() -> nn.Module:
    mlp = import_module("timm.models.vitamin").GeGluMlp
    return timm("vision_transformer.VisionTransformer", **TINY, mlp_layer=mlp)


def gemma4(**more: object) -> nn.Module:
    sizes = dict(img_size=(32, 16), patch_size=8, embed_dim=16, depth=2, num_heads=2, head_dim=8, intermediate_size=24)
    return timm(
        "gemma4_vit.Gemma4VitClassifier",
        **sizes,
        pooling_kernel_size=1,
        position_embedding_size=8,
        num_classes=5,
        **more,
    )


def csat() -> nn.Module:
    return timm("csatv2.CSATv2", dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), transformer_depths=(0, 0, 0, 1), num_classes=5)


def fastvit() -> nn.Module:
    sizes = dict(
        layers=(1, 1), embed_dims=(8, 32), mlp_ratios=(2, 2), downsamples=(False, True), se_downsamples=(False,) * 2
    )
    return timm("fastvit.FastVit", **sizes, token_mixers=("repmixer", "attention"), num_classes=5)


def convnext() -> nn.Module:
    return timm("convnext.ConvNeXt", depths=(1,) * 4, dims=(8,) * 4, use_grn=True, ls_init_value=None, num_classes=5)


MODELS = {
    "relpos": lambda: relative(),
    "relpos_cls": lambda: relative(class_token=True, global_pool="token", rel_pos_type="mlp", shared_rel_pos=True),
    "relpos_post": lambda: relative("ResPostRelPosBlock", rel_pos_type="mlp", rel_pos_dim=8, qk_norm=True),
    "maxvit": lambda: maxvit(),
    "maxvit_mlp": lambda: maxvit(rel_pos_type="mlp", rel_pos_dim=8, head_first=False),
    "gcvit": gcvit,
    "swin_cr": swin_cr,
    "sam": lambda: sam(window_size=3, use_rel_pos=True),
    "sam_rope": lambda: sam(window_size=2, use_rope=True, use_abs_pos=False, qk_norm=True),
    "nest": nest,
    "hiera": hiera,
    "sam2": sam2,
    "mvit": lambda: mvit(expand_attn=True),
    "mvit_cls": lambda: mvit(use_cls_token=True, expand_attn=False, mode="max", residual_pooling=False),
    "mvit_avg": lambda: mvit(mode="avg", rel_pos_type="", kernel_qkv=(3, 3)),
    "volo": volo,
    "levit": levit,
    "levit_conv": lambda: levit(use_conv=True),
    "efficientformer": efficientformer,
    "tiny_vit": tiny_vit,
    "xcit": xcit,
    "edgenext": edgenext,
    "davit": davit,
    "davit_v2": lambda: davit(channel_attn_v2=True),
    "coat": coat,
    "cait": lambda: timm("cait.Cait", **TINY),
    "caformer": caformer,
    "vitamin": vitamin,
    "csat": csat,
    "fastvit": fastvit,
    "convnext_v2": convnext,
    "hiera_widened": lambda: hiera(use_expand_proj=False),
    "gemma4": lambda: gemma4(),
    "gemma4_grouped": lambda: gemma4(num_kv_heads=1, use_clipped_linears=True),
}
SIZES = {
    "gcvit": (32, 16), "swin_cr": (28, 20), "hiera": (64, 32), "hiera_widened": (64, 32), "csat": (64, 64),
    "maxvit": (16, 16), "maxvit_mlp": (16, 16), "tiny_vit": (40, 24), "davit": (40, 24), "davit_v2": (40, 24),
    "edgenext": (64, 32), "caformer": (32, 48), "sam2": (32, 48), "gemma4": (32, 16), "gemma4_grouped": (32, 16),
    "levit": (64, 64), "levit_conv": (64, 64), "efficientformer": (224, 224), "fastvit": (32, 48),
    "convnext_v2": (64, 32),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The named model with random parameters and statistics."""
    torch.manual_seed(1)
    model = redraw(MODELS[name]())
    for key, buffer in model.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
        if key.endswith(("_min", "_max")):
            buffer.fill_(-0.9 if key.endswith("min") else 0.8)
    return model.to(dtype)


def images(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two images of the size that the named model takes."""
    return torch.randn(2, 3, *SIZES.get(name, (32, 32)), generator=torch.Generator().manual_seed(4), dtype=dtype)
