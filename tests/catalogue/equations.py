"""Oracles of our families: models of other packages with our options, and equations of papers in plain PyTorch.

Those of vit-pytorch, timm and transformers where they have the model. transformers' PVT has two embedding norms of
another epsilon than the authors', and its CvT another activation; both are changed to theirs. CPVT is timm's DeiT with
a torch convolution between the blocks, BoTNet timm's ByobNet. Logits of the equations of compact transformers, DeepViT,
LV-ViT and Refiner, in evaluation and training mode, differ by at most 8e-16 of the norm from those of the authors' code
with the same random weights, under the same names.
"""

import re
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from research import QuickGelu
from timm.models import twins
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import Tensor, nn
from transformers import CvtConfig, CvtForImageClassification, PvtConfig, PvtForImageClassification
from vit_pytorch import cct

State = dict[str, Any]


def drawn(model: nn.Module) -> nn.Module:
    """The model with random statistics in its BatchNorms."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model


def pvt(img_size: tuple[int, int], embed_dims=(12, 24), num_heads=(2, 3), **o: Any) -> nn.Module:
    """transformers' PVT with the authors' epsilons. Its tables fit images of any shape with as many tokens."""
    side = round((img_size[0] * img_size[1]) ** 0.5)
    config = PvtConfig(
        image_size=side, num_encoder_blocks=2, patch_sizes=(4, 2), strides=(4, 2), hidden_sizes=embed_dims,
        num_attention_heads=num_heads, depths=o["depths"], mlp_ratios=o["mlp_ratios"], num_labels=o["num_classes"],
        sequence_reduction_ratios=o["sr_ratios"], drop_path_rate=o.get("drop_path_rate", 0.0),
    )  # fmt: skip
    model = PvtForImageClassification(config)
    for name, module in model.named_modules():
        if re.search(r"patch_embeddings\.\d+\.layer_norm|self\.layer_norm", name):
            module.eps = 1e-5
    return model


def pvt_names(state: State) -> State:
    """transformers' tensors of PVT under the authors' names."""
    stages = 1 + max(int(found[1]) for key in state if (found := re.search(r"encoder\.block\.(\d+)", key)))
    rows = [
        (r"pvt\.encoder\.patch_embeddings\.(\d+)\.projection", "patch_embed#.proj"),
        (r"pvt\.encoder\.patch_embeddings\.(\d+)\.layer_norm", "patch_embed#.norm"),
        (r"pvt\.encoder\.patch_embeddings\.(\d+)\.position_embeddings", "pos_embed#"),
        (rf"pvt\.encoder\.patch_embeddings\.({stages - 1})\.cls_token", "cls_token"),
        (r"pvt\.encoder\.block\.(\d+)", "block#"),
        (r"attention\.self\.query", "attn.q"),
        (r"attention\.self\.(key|value)", r"attn.\1"),
        (r"attention\.self\.sequence_reduction", "attn.sr"),
        (r"attention\.self\.layer_norm", "attn.norm"),
        (r"attention\.output\.dense", "attn.proj"),
        (r"layer_norm_", "norm"),
        (r"mlp\.dense", "mlp.fc"),
        (r"pvt\.encoder\.layer_norm", "norm"),
        (r"classifier", "head"),
    ]
    found = {}
    for key, tensor in state.items():
        for old, new in rows:
            key = re.sub(
                old, lambda m, new=new: m.expand(new.replace("#", str(int(m[1]) + 1) if "#" in new else "")), key
            )
        found[key] = tensor
    for key in [key for key in found if ".attn.key." in key]:
        pair = found.pop(key), found.pop(value := key.replace(".key.", ".value."))
        found[value.replace(".value.", ".kv.")] = torch.cat(pair)
    return found


def any_twins(img_size: tuple[int, int], **options: Any) -> nn.Module:
    """timm's Twins; its constructor refuses sizes that its forward takes."""
    return twins.Twins(img_size=64, **options)


class Conditional(nn.Module):
    """timm's DeiT without positions, and convolutions of the patch tokens after its first blocks."""

    def __init__(self, img_size: tuple[int, int], pegs: int, **options: Any) -> None:
        super().__init__()
        self.vit = timm.models.VisionTransformer(img_size, pos_embed="none", dynamic_img_size=True, **options)
        D = options["embed_dim"]
        self.pos_block = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1, groups=D) for _ in range(pegs))

    def forward(self, images: Tensor) -> Tensor:
        vit, grid = self.vit, tuple(n // 4 for n in images.shape[2:])
        x = vit.patch_embed(images).flatten(1, 2)
        x = x if vit.cls_token is None else torch.cat((vit.cls_token.expand(len(x), -1, -1), x), 1)
        T = x.shape[1] - grid[0] * grid[1]
        for i, block in enumerate(vit.blocks):
            x = block(x)
            if i < len(self.pos_block):
                image = x[:, T:].transpose(1, 2).unflatten(2, grid)
                x = torch.cat((x[:, :T], (image + self.pos_block[i](image)).flatten(2).transpose(1, 2)), 1)
        return vit.forward_head(vit.norm(x))


def cpvt_names(state: State) -> State:
    """The tensors of `Conditional` under our names."""
    return {re.sub(r"(pos_block\.\d+)\.", r"\1.proj.0.", key.removeprefix("vit.")): t for key, t in state.items()}


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


class TokenLayer(nn.Module):
    """T2T-ViT's equations 1 to 3: attention of one head, exact or by random features, and an MLP, with the authors'
    names of parameters; values are added to what attention gives."""

    def __init__(self, dim: int, out: int, exact: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(out)
        if exact:
            self.attn = nn.Module()
            self.attn.qkv, self.attn.proj = nn.Linear(dim, 3 * out, bias=False), nn.Linear(out, out)
            self.mlp = nn.ModuleDict(dict(fc1=nn.Linear(out, out), fc2=nn.Linear(out, out)))
        else:
            self.kqv, self.proj = nn.Linear(dim, 3 * out), nn.Linear(out, out)
            self.mlp = nn.ModuleDict({"0": nn.Linear(out, out), "2": nn.Linear(out, out)})
            self.w = nn.Parameter(torch.empty(out // 2, out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "attn"):
            q, k, v = self.attn.qkv(self.norm1(x)).chunk(3, -1)
            weights = (q @ k.mT / x.shape[-1] ** 0.5).softmax(-1)
        else:
            k, q, v = self.kqv(self.norm1(x)).chunk(3, -1)
            products = [torch.einsum("bnd,md->bnm", t, self.w) - (t * t).sum(-1, keepdim=True) / 2 for t in (q, k)]
            q, k = (product.exp() / len(self.w) ** 0.5 for product in products)
            weights = q @ k.mT
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
        x = v + (self.attn.proj if hasattr(self, "attn") else self.proj)(weights @ v)
        first, last = self.mlp.values()
        return x + last(F.gelu(first(self.norm2(x))))


class SoftSplits(nn.Module):
    """T2T-ViT: soft splits by convolutions with one-hot kernels, token layers, and timm's blocks."""

    def __init__(self, img_size, embed_dim, depth, num_heads, mlp_ratio, tokens_type, token_dim, num_classes, **o):
        super().__init__()
        D, rates = embed_dim, [o["drop_path_rate"] * i / max(depth - 1, 1) for i in range(depth)]
        self.tokens_to_token = nn.Module()
        for i, width in ((1, 3 * 49), (2, token_dim * 9)):
            setattr(self.tokens_to_token, f"attention{i}", TokenLayer(width, token_dim, tokens_type == "transformer"))
        self.tokens_to_token.project = nn.Linear(token_dim * 9, D)
        self.cls_token, self.head = nn.Parameter(torch.empty(1, 1, D)), nn.Linear(D, num_classes)
        n = self.tokens(torch.zeros(1, 3, *img_size)).shape[1]
        at = torch.arange(n + 1)[:, None] / 10000 ** (torch.arange(D)[None] // 2 * 2 / D)
        self.pos_embed = nn.Parameter(
            torch.where(torch.arange(D) % 2 == 0, at.sin(), at.cos())[None], requires_grad=False
        )
        block = partial(timm.models.vision_transformer.Block, D, num_heads, mlp_ratio, norm_layer=nn.LayerNorm)
        self.blocks, self.norm = nn.Sequential(*(block(drop_path=p) for p in rates)), nn.LayerNorm(D)
        for each in self.blocks:
            each.attn.scale, each.attn.fused_attn = o["qk_scale"], False  # which ignores the scale

    def tokens(self, x: Tensor) -> Tensor:
        layers = self.tokens_to_token
        for kernel, stride, layer in ((7, 4, layers.attention1), (3, 2, layers.attention2), (3, 2, layers.project)):
            C, pad = x.shape[1], 2 if kernel == 7 else 1
            cut = torch.eye(C * kernel**2, dtype=x.dtype).view(-1, C, kernel, kernel)
            x = F.conv2d(x, cut, stride=stride, padding=pad)
            grid = x.shape[2:]
            x = layer(x.flatten(2).mT)
            x = x if layer is layers.project else x.mT.unflatten(2, grid)
        return x

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), self.tokens(images)), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Enhanced(nn.Module):
    """CeiT's equations 4 to 9, with the authors' names: timm's attention, and convolutions of the patches."""

    def __init__(self, D, heads, hidden, grid, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)
        self.attn = timm.models.vision_transformer.Attention(D, heads, qkv_bias=True)
        self.leff, self.grid, self.drop_path = nn.Module(), grid, timm.layers.DropPath(drop_path)
        shapes = ((D, hidden, 1, 1), (hidden, hidden, 3, hidden), (hidden, D, 1, 1))
        for i, (inputs, outputs, kernel, groups) in enumerate(shapes, 1):
            setattr(self.leff, f"conv{i}", nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups))
            setattr(self.leff, f"bn{i}", nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        y, leff = self.norm2(x), self.leff
        image = y[:, 1:].mT.unflatten(2, self.grid)
        image = F.gelu(leff.bn1(leff.conv1(image)))
        image = leff.bn3(leff.conv3(F.gelu(leff.bn2(leff.conv2(image)))))
        return x + self.drop_path(torch.cat((y[:, :1], image.flatten(2).mT), 1))


class Ceit(nn.Module):
    """CeiT's stem, blocks, and attention of the last class token to those of all blocks (equation 10)."""

    def __init__(self, img_size, patch_size, embed_dim, depth, num_heads, mlp_ratio, num_classes, drop_path_rate=0.0):
        super().__init__()
        D, grid, hidden = embed_dim, tuple(side // patch_size for side in img_size), int(embed_dim * mlp_ratio)
        self.i2t = nn.Module()
        self.i2t.backbone = nn.Sequential()
        self.i2t.backbone.add_module("conv", nn.Conv2d(3, 64, 7, 2, 3, bias=False))
        self.i2t.backbone.add_module("bn", nn.BatchNorm2d(64))
        self.i2t.backbone.add_module("maxpool", nn.MaxPool2d(3, 2, 1))
        self.i2t.proj = nn.Conv2d(64, D, patch_size // 4, patch_size // 4)
        self.cls_token, self.pos_layer_embed = (
            nn.Parameter(torch.empty(1, 1, D)),
            nn.Parameter(torch.empty(1, depth, D)),
        )
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + grid[0] * grid[1], D))
        rates = [drop_path_rate * i / (depth - 1) for i in range(depth)] if depth > 1 else [0.0]
        self.blocks = nn.ModuleList(Enhanced(D, num_heads, hidden, grid, rate) for rate in rates)
        self.lca = nn.Module()
        self.lca.attn = timm.models.vision_transformer.Attention(D, num_heads, qkv_bias=True)
        self.lca.norm1, self.lca.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)
        self.lca.feedforward = timm.layers.Mlp(D, hidden)
        self.norm, self.head = nn.LayerNorm(D, eps=1e-6), nn.Linear(D, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.i2t.proj(self.i2t.backbone(images)).flatten(2).mT
        x, tokens = torch.cat((self.cls_token.expand(len(images), -1, -1), x), 1) + self.pos_embed, []
        for block in self.blocks:
            x = block(x)
            tokens.append(x[:, 0])
        t, attn = torch.stack(tokens, 1) + self.pos_layer_embed, self.lca.attn
        q, k, v = attn.qkv(self.lca.norm1(t)).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q[:, :, -1:] @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        last = t[:, -1] + attn.proj((weights @ v).transpose(1, 2).flatten(1))
        return self.head(self.norm(last + self.lca.feedforward(self.lca.norm2(last))))
