"""DINOv2 — Learning robust visual features without supervision. Oquab et al., arXiv:2304.07193.

Registers: Darcet et al., arXiv:2309.16588. Official: facebookresearch/dinov2.

Differs from ViT:
  1. LayerScale 1e-5, patch 14, image 518, no head. 2. The giant's MLP is SwiGLU with 8/3 D hidden channels.
  3. `*_reg4_*`: four register tokens, and positions for patches only (as timm folds the official checkpoint).
Adds nothing.
"""

from dataclasses import replace

import torch

from ..checkpoints.tensors import State
from .config import Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE, SMALL, TIMM, TOKEN, TOWER, VIT

COMMON = dict(patch_size=14, img_size=518, init_values=1e-5, num_classes=0)
REG4 = dict(reg_tokens=4, no_embed_class=True)
GIANT: Options = dict(embed_dim=1536, depth=40, num_heads=24, mlp="swiglu", mlp_ratio=2.66667 * 2)


class Dinov2(VisionTransformer):
    """ViT that interpolates positions as the official code does; with registers this is timm's method."""

    position_resize = "dinov2"


CONFIG = ViTConfig
MODEL = Dinov2
VARIANTS: dict[str, Options] = {
    "vit_small_patch14_dinov2": dict(SMALL, **COMMON),
    "vit_base_patch14_dinov2": dict(BASE, **COMMON),
    "vit_large_patch14_dinov2": dict(LARGE, **COMMON),
    "vit_giant_patch14_dinov2": dict(GIANT, **COMMON),
    "vit_small_patch14_reg4_dinov2": dict(SMALL, **COMMON, **REG4),
    "vit_base_patch14_reg4_dinov2": dict(BASE, **COMMON, **REG4),
    "vit_large_patch14_reg4_dinov2": dict(LARGE, **COMMON, **REG4),
    "vit_giant_patch14_reg4_dinov2": dict(GIANT, **COMMON, **REG4),
}
MODELS = {name: VisionTransformer for name in VARIANTS if "_reg4_" in name}


# Names in checkpoints, from transformers 4.56 and 5.23, and the authors' models/vision_transformer.py and
# layers/swiglu_ffn.py.


def read_dinov2(tensors: State) -> State:
    """Reduces the classifier [K, 2·D] to the class token's half [K, D] if the patch mean's half is zero."""
    weight = tensors.get("classifier.weight")
    width = tensors["embeddings.cls_token"].shape[-1]
    if weight is None or weight.shape[1] != 2 * width or weight[:, width:].any():
        return tensors
    return {**tensors, "classifier.weight": weight[:, :width]}


def write_dinov2(tensors: State) -> State:
    """The inverse of `read_dinov2`: adds a zero half for the patch mean, and a zero mask token."""
    tensors = {**tensors, "embeddings.mask_token": torch.zeros_like(tensors["embeddings.cls_token"][0])}
    if (weight := tensors.get("classifier.weight")) is not None:
        tensors["classifier.weight"] = torch.cat((weight, torch.zeros_like(weight)), 1)
    return tensors


DINOV2 = replace(
    VIT,
    name="transformers Dinov2",
    mark="encoder.layer.0.layer_scale1.lambda1",
    stem={**VIT.stem, "reg_token": "embeddings.register_tokens"},
    blocks="encoder.layer.{}",
    block={
        **{our: VIT.block[our] for our in ("attn.{q,k,v}", "attn.proj")},
        "ls{1,2}.gamma": "layer_scale{1,2}.lambda1",
        "mlp.fc1": "mlp.fc1 mlp.weights_in",
        "mlp.{gate,up,down}": "mlp.{gate,up,down}_proj",
        "mlp.fc2": "mlp.fc2 mlp.weights_out",
    },
    read=read_dinov2,
    write=write_dinov2,
    base="dinov2.",
    needs=dict(TOWER | TOKEN, registers=False, layer_scale=True),
)
DINOV2_REGISTERS = replace(
    DINOV2,
    name="transformers Dinov2WithRegisters",
    mark="embeddings.register_tokens",
    resize="bicubic_antialias",
    base="dinov2_with_registers.",
    needs=dict(DINOV2.needs, registers=True),
)
DINO = replace(
    TIMM,
    name="DINOv2",
    mark="mask_token",
    beside="",
    resize="dinov2",
    stem={"reg_token": "register_tokens"},
    blocks="blocks.{}.{} blocks.{}",  # in FSDP chunks, the second number is the block's index over all chunks
    block={"mlp.fc{1,2}": "mlp.w{12,3}"},
)
DINO_REGISTERS = replace(DINO, name="DINOv2 with registers", mark="register_tokens", resize="bicubic_antialias")
