"""Oracles of compact transformers, CaiT, DeepViT, LV-ViT and Refiner at small sizes, as rows of `pyramids.CASES`.

Those of vit-pytorch and timm where they have the model; else its equations in plain PyTorch, in float64. Statistics of
BatchNorms are random, too.
"""

from typing import Any

import timm
from torch import Tensor, nn
from vit_pytorch import cct

State = dict[str, Any]


def drawn(model: nn.Module) -> nn.Module:
    """The model with random statistics in its BatchNorms."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model


class Compact(nn.Module):
    """CCT, CVT or ViT-Lite of vit-pytorch's parts, whose `CCT` builds the first only."""

    def __init__(self, img_size: tuple[int, int], **o: Any) -> None:
        super().__init__()
        layers, kernel, D = o["conv_layers"], o["kernel_size"], o["embed_dim"]
        stride, padding = (max(1, kernel // 2 - 1), max(1, kernel // 2)) if layers else (kernel, 0)
        self.tokenizer = cct.Tokenizer(
            kernel, stride, padding, n_output_channels=D, n_conv_layers=max(1, layers), max_pool=layers > 0,
            activation=nn.ReLU if layers else None, conv_bias=not layers,
        )  # fmt: skip
        self.classifier = cct.TransformerClassifier(
            seq_pool=o.get("global_pool") != "token", embedding_dim=D, num_layers=o["depth"], num_heads=o["num_heads"],
            mlp_ratio=o["mlp_ratio"], num_classes=o["num_classes"], dropout_rate=0.0, attention_dropout=0.0,
            stochastic_depth_rate=0.0, positional_embedding=o.get("positions", "learnable"),
            sequence_length=self.tokenizer.sequence_length(3, *img_size),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.tokenizer(images))


COMPACT = dict(embed_dim=12, num_heads=2, mlp_ratio=2.0, depth=2, attn_drop_rate=0.0)
ROWS: dict[str, State] = {
    "cct": dict(
        name="cct_7_3x2_32",
        options=COMPACT | dict(kernel_size=3, conv_layers=2),
        build=Compact,
        zero=("attention_pool.bias",),
        sizes=((14, 22), (16, 16)),
    ),
    "compact_cvt": dict(
        name="compact_cvt_7_4_32",
        options=COMPACT | dict(kernel_size=4, conv_layers=0),
        build=Compact,
        zero=("attention_pool.bias",),
        sizes=((12, 20), (16, 8)),
    ),
    "vit_lite": dict(
        name="vit_lite_7_4_32",
        options=COMPACT | dict(kernel_size=4, conv_layers=0, class_token=True, global_pool="token"),
        build=Compact,
        zero=("attention_pool.bias",),
        sizes=((12, 20), (16, 8)),
    ),
}
CAIT = dict(patch_size=4, embed_dim=12, num_heads=3, depth=2, mlp_ratio=2.0, init_values=0.5)
ROWS["cait"] = dict(
    name="cait_xxs24_224",
    options=CAIT,
    build=timm.models.cait.Cait,
    sizes=((12, 20), (16, 8)),
    zero=("proj_l.bias", "attn.k.bias"),
)
TRACED: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {name: (dict(), (12, 8)) for name in ROWS}
UNDRAWN = ["cct", "compact_cvt", "vit_lite"]  # stochastic depth draws other numbers than the oracle
TRACED["cait"] = dict(embed_dim=24), (16, 16)
