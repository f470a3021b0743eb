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
        ByoBlockCfg(kind, d=depth, c=width, s=stride, gs=0, br=ratio)
        for kind, depth, width, stride in zip(kinds, o["depths"], o["embed_dim"], o["strides"], strict=True)
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
    options=dict(stem_dim=8, embed_dim=(32, 64), depths=(1, 2), num_heads=(0, 2), strides=(1, 2)),
    build=botnet,
    sizes=((24, 40), (32, 16)),
    batch=8,
)


class Reading(nn.Module):
    """Tokens of a map [B, N, C]: softmax over the pixels of X W, of filters W or of tokens before; then Xᵀ, and V."""

    def __init__(self, C: int, L: int, D: int, recurrent: bool) -> None:
        super().__init__()
        if recurrent:
            self.recur = nn.Linear(D, C, bias=False)
        else:
            self.filters = nn.Parameter(0.01 * torch.randn(L, C))
        self.value = nn.Linear(C, D, bias=False)

    def forward(self, X: Tensor, T: Tensor | None) -> Tensor:
        W = self.recur(T) if hasattr(self, "recur") else self.filters
        return (W @ X.mT).softmax(2) @ self.value(X)


class Module(nn.Module):
    """Equations 1 to 5 of arXiv:2006.03677, with a projection of values where the channels differ."""

    def __init__(self, C: int, L: int, D: int, d: int, recurrent: bool, projects: bool) -> None:
        super().__init__()
        self.tokenizer = Reading(C, L, D, recurrent)
        self.attn = nn.ModuleDict(dict(key=nn.Linear(D, d, bias=False), query=nn.Linear(D, d, bias=False)))
        self.mlp = nn.ModuleDict(dict(fc1=nn.Linear(D, D, bias=False), fc2=nn.Linear(D, D, bias=False)))
        if projects:
            widths = dict(query=(C, d), key=(D, d), value=(D, C))
            self.projector = nn.ModuleDict({n: nn.Linear(*pair, bias=False) for n, pair in widths.items()})

    def forward(self, X: Tensor, T: Tensor | None) -> tuple[Tensor, Tensor]:
        T = self.tokenizer(X, T)
        T = T + (self.attn["key"](T) @ self.attn["query"](T).mT).softmax(2) @ T
        T = T + self.mlp["fc2"](self.mlp["fc1"](T).relu())
        if not hasattr(self, "projector"):
            return X, T
        p = self.projector
        return X + (p["query"](X) @ p["key"](T).mT).softmax(2) @ p["value"](T), T


class Visual(nn.Module):
    """timm's residual stages, visual transformers, and a head on the mean of the tokens."""

    def __init__(self, img_size: tuple[int, int], **o: Any) -> None:
        super().__init__()
        C, depth = o["embed_dim"][-1], o["depths"][-1]
        net = byob(img_size, ("basic",) * len(o["depths"]), **o)
        self.stem, self.stages, self.head = net.stem, net.stages[:-1], nn.Module()
        self.head.fc = nn.Linear(o["token_dim"], o["num_classes"])
        sizes = C, o["tokens"], o["token_dim"], o["key_dim"]
        self.stages.append(nn.Sequential(*(Module(*sizes, i > 0, i + 1 < depth) for i in range(depth))))

    def forward(self, images: Tensor) -> Tensor:
        X, T = self.stages[:-1](self.stem(images)).flatten(2).mT, None
        for block in self.stages[-1]:
            X, T = block(X, T)
        return self.head.fc(T.mean(1))


ROWS["vt"] = dict(
    name="vt_resnet18",
    options=dict(stem_dim=8, embed_dim=(16, 16), depths=(1, 3), num_heads=(0, 1), strides=(1, 1))
    | dict(tokens=4, token_dim=24, key_dim=12),
    build=Visual,
    sizes=((24, 40), (32, 16)),
    batch=8,
    small=r"tokenizer|attn|mlp|projector",
)


class Positional(nn.Module):
    """softmax(r_δ · v) X of each head, where r_δ = (δ₁, δ₂, δ₁², δ₂², δ₁ δ₂) and v has the centre and precision of the
    head, times −½ (arXiv:1911.03584, section 3.2)."""

    def __init__(self, D: int, heads: int, grid: tuple[int, int], isotropic: bool) -> None:
        super().__init__()
        at = torch.cartesian_prod(*map(torch.arange, grid)).double()
        d1, d2 = (at - at[:, None]).unbind(2)
        self.r = torch.stack((d1, d2, d1 * d1, d2 * d2, d1 * d2), 2)
        self.attention_centers = nn.Parameter(2 * torch.randn(heads, 2))
        ones = torch.ones(heads) if isotropic else torch.eye(2).repeat(heads, 1, 1)
        self.attention_spreads = nn.Parameter(ones)
        self.value, self.proj = nn.Linear(heads * D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        S = self.attention_spreads
        P = S[:, None, None] ** 2 * torch.eye(2).to(S) if S.dim() == 1 else S @ S.mT
        linear = -2 * torch.einsum("hij,hj->hi", P, self.attention_centers)
        v = torch.cat((linear, P[:, :1, 0], P[:, 1:, 1], 2 * P[:, :1, 1]), 1)
        maps = torch.einsum("nmr,hr->hnm", self.r.to(x), -0.5 * v).softmax(-1)
        return self.proj(self.value(torch.cat([A @ x for A in maps], 2)))


class PostNorm(nn.Module):
    """LN(x + f(x)) for attention, then MLP."""

    def __init__(self, D: int, attn: nn.Module, hidden: int) -> None:
        super().__init__()
        self.attn, self.mlp = attn, nn.ModuleDict(dict(fc1=nn.Linear(D, hidden), fc2=nn.Linear(hidden, D)))
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-12), nn.LayerNorm(D, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](x))))


class AttentionConv(nn.Module):
    """Cordonnier's classifier by its equations."""

    def __init__(self, img_size: tuple[int, int], isotropic: bool = True, **o: Any) -> None:
        super().__init__()
        D, p = o["embed_dim"], o["patch_size"]
        self.patch_embed, grid = nn.Module(), (img_size[0] // p, img_size[1] // p)
        self.patch_embed.proj = nn.Conv2d(o.get("in_chans", 3), D, p, p)
        blocks = (
            PostNorm(D, Positional(D, o["num_heads"], grid, isotropic), int(D * o["mlp_ratio"]))
            for _ in range(o["depth"])
        )
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(D, o["num_classes"])

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch_embed.proj(images).flatten(2).mT).mean(1))


POSITIONAL = dict(patch_size=2, embed_dim=12, depth=2, num_heads=4, mlp_ratio=2.0)
for name, more in (("attention_conv", {}), ("attention_conv_full", dict(isotropic=False))):
    ROWS[name] = dict(
        name="attention_conv", options=POSITIONAL | more, build=AttentionConv, sizes=((10, 14), (8, 6)), batch=4
    )
UNDRAWN = ["cvt", "vt", "attention_conv", "attention_conv_full"]  # stochastic depth draws other numbers than the oracle
TRACED: dict[str, tuple[State, tuple[int, int]]] = {
    "botnet": (dict(embed_dim=(64, 128), depths=(1, 1)), (24, 40)),
    "vt": (dict(depths=(1, 2)), (24, 32)),
    **dict.fromkeys(("attention_conv", "attention_conv_full"), (dict(embed_dim=24), (8, 12))),
    "cvt": (dict(embed_dim=(24,), depths=(1,), num_heads=(3,)), (16, 28)),
}

# As `test_pyramids.DIGITS`: side of the images, options, and the oracle's accuracy after two of eight epochs.
DIGITS: dict[str, tuple[int, State, float]] = {
    "cvt": (32, dict(embed_dim=(24, 48), depths=(1, 2), num_heads=(2, 4), mlp_ratio=2.0), 0.927),
    "botnet": (32, dict(stem_dim=16, embed_dim=(64, 128), depths=(1, 2), num_heads=(0, 2), strides=(1, 2)), 0.738),
    "vt": (
        32,
        dict(stem_dim=16, embed_dim=(32, 32), depths=(1, 2), num_heads=(0, 1), strides=(1, 1), tokens=8)
        | dict(token_dim=48, key_dim=24),
        0.694,
    ),
    "attention_conv": (16, dict(patch_size=2, embed_dim=32, depth=3, num_heads=9, mlp_ratio=2.0), 0.683),
}
