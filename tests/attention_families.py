"""Oracles of compact transformers, CaiT, DeepViT, LV-ViT and Refiner at small sizes, as rows of `pyramids.CASES`.

Those of vit-pytorch and timm where they have the model; else its equations in plain PyTorch. The logits of these, in
evaluation and training mode, differ by at most 8e-16 of the norm from those of the authors' code with the same random
weights, under the same names. Statistics of BatchNorms are random, too.
"""

from typing import Any

import timm
import torch
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


class Stem(nn.Module):
    """Convolutions 7 x 7 with stride 2 and 3 x 3, with BatchNorm and ReLU, and patches of half the size."""

    def __init__(self, widths: tuple[int, ...], patch: int, D: int) -> None:
        super().__init__()
        channels = [3, *widths]
        for i, width in enumerate(widths, 1):
            kernel, stride, padding = (7, 2, 3) if i == 1 else (3, 1, 1)
            conv = nn.Conv2d(channels[i - 1], width, kernel, stride, padding, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(width))
        patch = patch // 2 if widths else patch
        self.proj = nn.Conv2d(channels[-1], D, patch, patch)
        self.steps = len(widths)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.steps + 1):
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)).relu()
        return self.proj(x)


class Probabilities(nn.Module):
    """softmax(q kᵀ / √d) v, its maps changed by `change(maps)`, between a packed projection and another one."""

    def __init__(self, D: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.scale = heads, (D // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D)

    def change(self, maps: Tensor) -> Tensor:
        return maps

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        maps = self.change((q @ k.transpose(2, 3) * self.scale).softmax(-1))
        return self.proj((maps @ v).transpose(1, 2).flatten(2))


class Mixed(Probabilities):
    """DeepViT's re-attention (arXiv:2103.11886, equation 3), with the map itself and a BatchNorm2d of it."""

    def __init__(self, D: int, heads: int, scaled: bool) -> None:
        super().__init__(D, heads, True)
        self.reatten_matrix, self.var_norm = nn.Conv2d(heads, heads, 1), nn.BatchNorm2d(heads)
        self.factor = self.scale if scaled else 1.0

    def change(self, maps: Tensor) -> Tensor:
        return self.var_norm(self.reatten_matrix(maps)) * self.factor


class Feed(nn.Module):
    """fc2(GELU(fc1))."""

    def __init__(self, D: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, hidden), nn.Linear(hidden, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Residuals(nn.Module):
    """x + f(LN(a x)) / b for attention, then MLP."""

    def __init__(self, D: int, attn: nn.Module, mlp: nn.Module, eps: float, inner: float, outer: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D, eps=eps), attn
        self.norm2, self.mlp = nn.LayerNorm(D, eps=eps), mlp
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x * self.inner)) / self.outer
        return x + self.mlp(self.norm2(x * self.inner)) / self.outer


class Tokens(nn.Module):
    """A class token, positions and blocks on the tokens of a stem; with `dense` LV-ViT's second head.

    Equations of LV-ViT (arXiv:2104.10858, section 3): logits are those of the class token, plus half the largest of the
    patches'. With a `box` (top, bottom, left, right) tokens are mixed after the stem and logits of patches mixed back.
    """

    def __init__(self, img_size: tuple[int, int], patch: int, D: int, classes: int, widths=(), eps=1e-6, dense=False):
        super().__init__()
        self.patch_embed = Stem(widths, patch, D)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + img_size[0] // patch * (img_size[1] // patch), D))
        self.blocks = nn.ModuleList()
        self.norm, self.head = nn.LayerNorm(D, eps=eps), nn.Linear(D, classes)
        if dense:
            self.aux_head = nn.Linear(D, classes)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor, box: tuple[int, int, int, int] | None = None) -> Any:
        x = self.patch_embed(images)
        (h, w), (top, bottom, left, right) = x.shape[2:], box or (0, 0, 0, 0)
        inside = torch.zeros(h, w, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        x = torch.where(inside, x.flip(0), x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        x = self.norm(self.run(x))
        logits = self.head(x[:, 0])
        if not hasattr(self, "aux_head"):
            return logits
        dense = self.aux_head(x[:, 1:])
        if box is None:
            return logits + 0.5 * dense.max(1)[0]
        return logits, torch.where(inside.flatten()[:, None], dense.flip(0), dense)


def deepvit(img_size: tuple[int, int], stem_widths=(), adjust=1.0, plain_depth=0, **o: Any) -> nn.Module:
    """DeepViT by its equations; authors' code: zhoudaquan/dvit_repo, models/layers.py."""
    D, heads = o["embed_dim"], o["num_heads"]
    model = Tokens(img_size, o["patch_size"], D, o["num_classes"], stem_widths)
    for i in range(o["depth"]):
        scaled = o.get("scale_maps", False)
        attn = Probabilities(D, heads, True) if i < plain_depth else Mixed(D, heads, scaled)
        model.blocks.append(Residuals(D, attn, Feed(D, int(D * o["mlp_ratio"])), 1e-6, adjust, adjust))
    return drawn(model)


def lvvit(img_size: tuple[int, int], skip_lam=1.0, **o: Any) -> nn.Module:
    """LV-ViT by its equations; authors' code: zihangJiang/TokenLabeling, tlt/models."""
    D, heads = o["embed_dim"], o["num_heads"]
    model = Tokens(img_size, o["patch_size"], D, o["num_classes"], o["stem_widths"], 1e-5, True)
    for _ in range(o["depth"]):
        attn = Probabilities(D, heads, False)
        model.blocks.append(Residuals(D, attn, Feed(D, int(D * o["mlp_ratio"])), 1e-5, 1.0, skip_lam))
    return drawn(model)


class Refinement(nn.Module):
    """A + BN(W₂ ReLU6(BN(depthwise(ReLU6(BN(W₁ A))))))."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.conv_exp, self.bn1 = nn.Conv2d(heads, width, 1, bias=False), nn.BatchNorm2d(width)
        self.depth_sep_conv = nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv_pro, self.bn3 = nn.Conv2d(width, heads, 1, bias=False), nn.BatchNorm2d(heads)

    def forward(self, maps: Tensor) -> Tensor:
        x = self.bn1(self.conv_exp(maps)).clamp(0, 6)
        return maps + self.bn3(self.conv_pro(self.bn2(self.depth_sep_conv(x)).clamp(0, 6)))


class Sharing(nn.Module):
    """Refiner's two kinds of attention (arXiv:2106.03714): maps of its own plus a part of the last, or refined ones."""

    def __init__(self, D: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (D // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(D, D if width else 3 * D), nn.Linear(D, D)
        if width:
            self.DLA, self.adapt_bn = Refinement(heads, width), nn.BatchNorm2d(heads)

    def forward(self, x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        *qk, v = self.qkv(x).unflatten(-1, (-1, self.heads, x.shape[2] // self.heads)).permute(2, 0, 3, 1, 4)
        if qk:
            maps = (qk[0] @ qk[1].transpose(2, 3) * self.scale).softmax(-1)
            last = maps = maps if last is None else maps + last * self.scale
        else:
            maps = self.adapt_bn(self.DLA(last)) * self.scale
        return self.proj((maps @ v).transpose(1, 2).flatten(2)), last


class Refined(Residuals):
    """x + f(LN(x/2)) · 2, with factors of the MLP's channels."""

    def forward(self, x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        y, last = self.attn(self.norm1(x * self.inner), last)
        x = x + y / self.outer
        return x + self.mlp.scale_channel * self.mlp(self.norm2(x * self.inner)) / self.outer, last


class Chained(Tokens):
    """Blocks that pass a map on."""

    def run(self, x: Tensor) -> Tensor:
        last = None
        for block in self.blocks:
            x, last = block(x, last)
        return x


def refiner(img_size: tuple[int, int], **o: Any) -> nn.Module:
    """Refiner by its equations; authors' code: zhoudaquan/Refiner_ViT, models."""
    D, heads = o["embed_dim"], o["num_heads"]
    model = Chained(img_size, o["patch_size"], D, o["num_classes"], o["stem_widths"], 1e-6, True)
    for i in range(o["depth"]):
        attn, mlp = Sharing(D, heads, o["expansion"] * heads * (i % 2)), Feed(D, int(D * o["mlp_ratio"]))
        mlp.scale_channel = nn.Parameter(torch.ones(D))
        model.blocks.append(Refined(D, attn, mlp, 1e-6, 0.5, 0.5))
    return drawn(model)


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
DEEP = dict(patch_size=4, embed_dim=12, num_heads=3, depth=2, mlp_ratio=2.0)
ROWS["deepvit"] = dict(
    name="deepvit_16b",
    options=DEEP,
    build=deepvit,
    sizes=((12, 20), (8, 16)),
    zero=("reatten_matrix.bias",),
)
ROWS["deepvit_stem"] = dict(
    name="deepvit_s",
    options=DEEP | dict(plain_depth=1, scale_maps=True, adjust=0.5, stem_widths=(4, 6)),
    build=deepvit,
    sizes=((12, 20), (8, 16)),
    zero=("reatten_matrix.bias",),
)
LV = dict(patch_size=4, embed_dim=12, num_heads=3, depth=2, mlp_ratio=2.0, skip_lam=2.0, stem_widths=(4, 6, 4))
ROWS["lvvit"] = dict(name="lvvit_small", options=LV, build=lvvit, sizes=((12, 20), (8, 16)))
ROWS["refiner"] = dict(
    name="refiner_vit_small",
    options=LV | dict(depth=4, skip_lam=0.5, expansion=2),
    build=refiner,
    sizes=((12, 20), (8, 16)),
)
UNDRAWN = [name for name in ROWS if name != "cait"]  # stochastic depth draws other numbers than the oracle
TRACED: dict[str, tuple[State, tuple[int, int]]] = {name: (dict(embed_dim=24), (12, 12)) for name in ROWS}
TRACED["cct"] = dict(embed_dim=24), (12, 8)
TRACED["cait"] = dict(embed_dim=24), (20, 16)
TRACED["deepvit"] = dict(embed_dim=24), (16, 16)
NO_STEM = dict(embed_dim=24, stem_widths=())  # it is PyTorch's, and its ReLU turns a rounding into another gradient
TRACED["deepvit_stem"] = TRACED["lvvit"] = NO_STEM, (16, 16)
TRACED["refiner"] = NO_STEM | dict(depth=2), (12, 12)
