"""Oracles of CvT, BoTNet, stand-alone attention and VT-ResNet at small sizes, as rows of `pyramids.CASES`.

CvT is that of transformers, with the authors' activation; BoTNet is timm's ByobNet.
"""

import re
from typing import Any

import torch
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import Tensor, nn
from transformers import CvtConfig, CvtForImageClassification

State = dict[str, Any]


def drawn(model: nn.Module) -> nn.Module:
    """The model with random statistics in its BatchNorms."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model


class QuickGelu(nn.Module):
    """x σ(1.702 x), the activation of the authors' code."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def cvt(img_size: tuple[int, int], **o: Any) -> nn.Module:
    """transformers' CvT, for images of any size."""
    stages, ratio = len(o["depths"]), o["mlp_ratio"]
    each = {
        key: [value] * stages
        for key, value in dict(
            mlp_ratio=ratio, attention_drop_rate=0.0, drop_rate=0.0, drop_path_rate=0.0, qkv_bias=True, kernel_qkv=3,
            padding_kv=1, stride_kv=2, padding_q=1, stride_q=1, qkv_projection_method="dw_bn",
        ).items()
    }  # fmt: skip
    config = CvtConfig(
        patch_sizes=[7, 3][:stages], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=list(o["embed_dim"]),
        num_heads=list(o["num_heads"]), depth=list(o["depths"]), cls_token=[False, True][-stages:],
        num_labels=o["num_classes"], num_channels=o.get("in_chans", 3), **each,
    )  # fmt: skip
    model = CvtForImageClassification(config)
    for module in model.modules():
        if hasattr(module, "activation"):
            module.activation = QuickGelu()
    return drawn(model)


CVT_NAMES = [
    (r"^cvt\.encoder\.stages\.(\d+)\.", r"stage\1."),
    (r"embedding\.convolution_embeddings\.projection", "patch_embed.proj"),
    (r"embedding\.convolution_embeddings\.normalization", "patch_embed.norm"),
    (r"layers\.(\d+)\.layernorm_before", r"blocks.\1.norm1"),
    (r"layers\.(\d+)\.layernorm_after", r"blocks.\1.norm2"),
    (r"layers\.(\d+)\.intermediate\.dense", r"blocks.\1.mlp.fc1"),
    (r"layers\.(\d+)\.output\.dense", r"blocks.\1.mlp.fc2"),
    (r"layers\.(\d+)\.attention\.output\.dense", r"blocks.\1.attn.proj"),
    (r"layers\.(\d+)\.attention\.attention\.", r"blocks.\1.attn."),
    (r"convolution_projection_([qkv])\w+\.convolution_projection\.convolution", r"conv_proj_\1.conv"),
    (r"convolution_projection_([qkv])\w+\.convolution_projection\.normalization", r"conv_proj_\1.bn"),
    (r"\.projection_([qkv])\w+", r".proj_\1"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
]


def cvt_names(state: State) -> State:
    """transformers' tensors of CvT under the authors' names."""
    found = {}
    for key, tensor in state.items():
        for old, new in CVT_NAMES:
            key = re.sub(old, new, key)
        found[key] = tensor
    return found


ROWS: dict[str, State] = {
    "cvt": dict(
        name="cvt_13_224",
        options=dict(embed_dim=(12, 24), depths=(1, 2), num_heads=(2, 3), mlp_ratio=2.0),
        build=cvt,
        sizes=((18, 29), (20, 24)),
        convert=cvt_names,
        logits=lambda model, images: model(images).logits,
        zero=("proj_k.bias", "stage0.blocks.0.attn.conv_proj_k.bn.bias"),  # keys move alike
        batch=4,
    ),
}


def byob(img_size: tuple[int, int], kinds: tuple[str, ...], **o: Any) -> nn.Module:
    """timm's ByobNet with these kinds of blocks."""
    ratio = 0.25 if "bottle" in kinds else 1.0
    blocks = tuple(
        ByoBlockCfg(kind, d=depth, c=width, s=2 if i else 1, gs=0, br=ratio)
        for i, (kind, depth, width) in enumerate(zip(kinds, o["depths"], o["embed_dim"], strict=True))
    )
    config = ByoModelCfg(
        blocks, stem_chs=o["stem_dim"], stem_type="7x7", stem_pool="maxpool", act_layer="relu", fixed_input_size=True,
        self_attn_layer="bottleneck", self_attn_kwargs=dict(num_heads=o["num_heads"][-1], scale_pos_embed=True),
    )  # fmt: skip
    options = dict(img_size=img_size, num_classes=o["num_classes"], in_chans=o.get("in_chans", 3))
    return drawn(ByobNet(config, drop_path_rate=o.get("drop_path_rate", 0.0), **options))


def botnet(img_size: tuple[int, int], **o: Any) -> nn.Module:
    """timm's ByobNet with attention in the stages that have heads."""
    return byob(img_size, tuple("self_attn" if heads else "bottle" for heads in o["num_heads"]), **o)


ROWS["botnet"] = dict(
    name="botnet50",
    options=dict(stem_dim=8, embed_dim=(32, 64), depths=(1, 2), num_heads=(0, 2)),
    build=botnet,
    sizes=((24, 40), (32, 16)),
    batch=8,
)
UNDRAWN = ["cvt"]  # stochastic depth draws other numbers than the oracle
TRACED: dict[str, tuple[State, tuple[int, int]]] = {
    "botnet": (dict(embed_dim=(64, 128), depths=(1, 1)), (24, 40)),
    "cvt": (dict(embed_dim=(24,), depths=(1,), num_heads=(3,)), (16, 28)),
}

# As `test_pyramids.DIGITS`: side of the images, options, and the oracle's accuracy after two of eight epochs.
DIGITS: dict[str, tuple[int, State, float]] = {
    "cvt": (32, dict(embed_dim=(24, 48), depths=(1, 2), num_heads=(2, 4), mlp_ratio=2.0), 0.927),
    "botnet": (32, dict(stem_dim=16, embed_dim=(64, 128), depths=(1, 2), num_heads=(0, 2)), 0.738),
}
