"""Small models of the hierarchical families and of CPVT, with random weights, and their oracles with the same weights.

Oracles are timm's models; for PVT it is transformers', whose two embedding norms have another epsilon than the
authors'; for CPVT timm's DeiT with a torch convolution between the blocks.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attention_families
import convolutional_families
import timm
import torch
import torch.nn.functional as F
from catalogue import redraw
from timm.models import crossvit, levit, pit, swin_transformer, tnt, twins
from torch import Tensor, nn
from transformers import PvtConfig, PvtForImageClassification

from fastvit_triton import create_model

State = dict[str, Any]


class Case(NamedTuple):
    """A family's oracle.

    Attributes:
        name: a name in `create_model`.
        options: for `create_model`.
        build: makes the oracle for these options, except for img_size, and an image size.
        sizes: of images; the first is that of the model, the others need dynamic_img_size.
        convert: renames the oracle's tensors, and joins those that are one in ours.
        logits: the oracle's logits of images.
        zero: ends of names of parameters whose gradient is 0 in exact arithmetic, besides key biases.
        batch: number of images; a BatchNorm of two images has gradients that cancel.
        small: regular expression of parameters that are drawn ten times smaller, as no norm limits what they do.
    """

    name: str
    options: dict[str, Any]
    build: Callable[..., nn.Module]
    sizes: tuple[tuple[int, int], ...]
    convert: Callable[[State], State] = dict
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, images: model(images)
    zero: tuple[str, ...] = ()
    batch: int = 2
    small: str = "^$"


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


SVT = dict(embed_dims=(12, 24), num_heads=(2, 3), mlp_ratios=(2, 2), depths=(3, 2), sr_ratios=(2, 1), wss=(3, 3))
VIT = dict(embed_dim=12, num_heads=2, depth=3, patch_size=4)
CASES = {
    "swin": Case(
        "swin_tiny_patch4_window7_224",
        dict(patch_size=2, embed_dim=12, depths=(3, 2), num_heads=(2, 3), window_size=(4, 3)),
        swin_transformer.SwinTransformer,
        ((18, 26), (16, 12)),
    ),
    "twins_svt": Case("twins_svt_small", SVT | dict(patch_size=2), any_twins, ((20, 28), (18, 22))),
    "twins_pcpvt": Case(
        "twins_pcpvt_small", SVT | dict(patch_size=2, depths=(2, 1), wss=None), any_twins, ((20, 28), (18, 22))
    ),
    "pvt": Case(
        "pvt_tiny",
        {k: v for k, v in SVT.items() if k != "wss"},
        pvt,
        ((16, 64), (32, 32)),
        pvt_names,
        lambda model, images: model(images).logits,
    ),
    "cpvt": Case("cpvt_tiny", VIT | dict(pegs=1), Conditional, ((12, 20), (16, 8)), cpvt_names),
    "cpvt_gap": Case(
        "cpvt_small_gap",
        VIT | dict(pegs=2, class_token=False, global_pool="avg", fc_norm=False),
        Conditional,
        ((12, 20), (16, 8)),
        cpvt_names,
    ),
}
CASES |= {name: Case(**row) for name, row in attention_families.ROWS.items()}
CASES |= {name: Case(**row) for name, row in convolutional_families.ROWS.items()}

TIMM = {"depths": "depth", "num_heads": "heads"}  # our option → timm's


def of_timm(cls: type[nn.Module], names: dict[str, str], **fixed: Any) -> Callable[..., nn.Module]:
    """Builds timm's class from our options; `names` has those that differ."""
    return lambda **options: cls(**{names.get(key, key): value for key, value in options.items()}, **fixed)


PIT = dict(patch_size=6, stride=3, base_dims=(6, 6), depths=(2, 1), num_heads=(2, 4), mlp_ratio=2.0)
PITS = [("pit", "pit_ti_224", {}), ("pit_distilled", "pit_ti_distilled_224", dict(distilled=True))]
CASES |= {
    kind: Case(name, PIT, of_timm(pit.PoolingVisionTransformer, TIMM, **fixed), ((20, 27), (24, 18)))
    for kind, name, fixed in PITS
}

TNT = dict(patch_size=8, embed_dim=12, inner_dim=6, depth=3, num_heads_inner=2, num_heads_outer=3, mlp_ratio=2.0)
TNTS = [("tnt", "tnt_s_patch16_224", {}), ("tnt_legacy", "tnt_s_legacy_patch16_224", dict(legacy=True))]
CASES |= {kind: Case(name, TNT, of_timm(tnt.TNT, {}, **fixed), ((16, 24), (24, 8))) for kind, name, fixed in TNTS}

CROSS = dict(embed_dim=(12, 18), num_heads=(2, 3), mlp_ratio=(2.0, 1.5, 1.0), depth=((1, 2, 0), (1, 1, 0)))
CROSS |= dict(patch_size=(6, 4), img_scale=(1.0, 2 / 3))
DAGGER = CROSS | dict(patch_size=(12, 16), img_scale=(1.0, 2 / 3), depth=((1, 1, 2),), multi_conv=True, crop_scale=True)
CASES["crossvit"] = Case("crossvit_tiny_240", CROSS, crossvit.CrossVit, ((24, 36), (12, 12)))
CASES["crossvit_dagger"] = Case("crossvit_9_dagger_240", DAGGER, crossvit.CrossVit, ((48, 48), (48, 96)))

LEVIT = dict(patch_size=8, embed_dim=(16, 24), key_dim=4, depths=(2, 1), num_heads=(2, 3), mlp_ratio=1.5)


def any_levit(patch_size: int, **options: Any) -> nn.Module:
    """timm's LeViT with two heads."""
    return of_timm(levit.LevitDistilled, {"depths": "depth"}, stem_type=f"s{patch_size}")(**options)


CASES["levit"] = Case("levit_128s", LEVIT, any_levit, ((40, 56), (32, 24)), batch=8)


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


T2T = dict(embed_dim=12, depth=2, num_heads=2, mlp_ratio=1.5, token_dim=6, qk_scale=12**-0.5, token_drop_rate=0.0)
T2T |= dict(drop_path_rate=0.0)
for kind, name in (("performer", "t2t_vit_7"), ("transformer", "t2t_vit_t_14")):
    CASES[f"t2t_{kind}"] = Case(name, T2T | dict(tokens_type=kind), SoftSplits, ((32, 48), (40, 16)))


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


CEIT = dict(patch_size=8, embed_dim=12, depth=2, num_heads=2, mlp_ratio=1.5)
CASES["ceit"] = Case("ceit_tiny_224", CEIT, Ceit, ((24, 40), (32, 16)), batch=8)


def pair(case: Case, size: tuple[int, int], **more: Any) -> tuple[nn.Module, nn.Module]:
    """Our model and its oracle for images of this size, in float64 with the same random weights."""
    options = case.options | dict(num_classes=5) | more
    theirs = redraw(case.build(img_size=size, **options)).double()
    for name, parameter in theirs.named_parameters():
        if re.search(case.small, name):
            parameter.data.mul_(0.1)
    for name, statistics in theirs.named_buffers():
        if name.endswith("running_var"):
            statistics.uniform_(0.5, 2.0)
        elif name.endswith("running_mean"):
            statistics.normal_()
    ours = create_model(case.name, img_size=size, **options).double()
    ours.load_state_dict(case.convert(theirs.state_dict()))
    return ours, theirs


def gradients(model: nn.Module, convert: Callable[[State], State] = dict) -> State:
    """The gradient of every parameter."""
    return convert({name: p.grad for name, p in model.named_parameters() if p.requires_grad})


def loss(logits: Tensor) -> Tensor:
    """A number that depends on every logit."""
    return F.cross_entropy(logits * 3, torch.arange(len(logits)) % logits.shape[1])
