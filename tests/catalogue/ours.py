"""Our families that are no plain ViT, small and with random weights, and their oracles with the same weights."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models import cait, crossvit, levit, pit, swin_transformer, tnt
from torch import Tensor, nn

from fastvit_triton import create_model

from .entry import redraw
from .equations import (
    AttentionConv,
    Ceit,
    Compact,
    Conditional,
    SoftSplits,
    State,
    Visual,
    any_twins,
    botnet,
    cpvt_names,
    cvt,
    cvt_names,
    deepvit,
    lvvit,
    pvt,
    pvt_names,
    refiner,
)

Size = tuple[int, int]


class Case(NamedTuple):
    """A family and its oracle.

    Attributes:
        name: a name in `create_model`.
        options: for `create_model`.
        build: makes the oracle for these options, except for img_size, and an image size.
        sizes: of images; the first is that of the model, the others need dynamic_img_size.
        traced: other options, and a size, of which the kernels run in the interpreter.
        convert: renames the oracle's tensors, and joins those that are one in ours.
        logits: the oracle's logits of images.
        zero: ends of names of parameters whose gradient is 0 in exact arithmetic, besides key biases.
        batch: number of images; a BatchNorm of two images has gradients that cancel.
        small: regular expression of parameters that are drawn ten times smaller, as no norm limits what they do.
        draws: stochastic depth draws the numbers that the oracle draws.
        digits: a side of images, options, and the oracle's accuracy on digits after two of eight epochs.
    """

    name: str
    options: dict[str, Any]
    build: Callable[..., nn.Module]
    sizes: tuple[Size, ...]
    traced: tuple[State, Size]
    convert: Callable[[State], State] = dict
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, images: model(images)
    zero: tuple[str, ...] = ()
    batch: int = 2
    small: str = "^$"
    draws: bool = True
    digits: tuple[int, State, float] | None = None


def first(model: nn.Module, images: Tensor) -> Tensor:
    """The logits in an output of transformers."""
    return model(images).logits


def of_timm(cls: type[nn.Module], names: dict[str, str], **fixed: Any) -> Callable[..., nn.Module]:
    """Builds timm's class from our options; `names` has those that differ."""
    return lambda **options: cls(**{names.get(key, key): value for key, value in options.items()}, **fixed)


def any_levit(patch_size: int, **options: Any) -> nn.Module:
    """timm's LeViT with two heads."""
    return of_timm(levit.LevitDistilled, {"depths": "depth"}, stem_type=f"s{patch_size}")(**options)


SVT = dict(embed_dims=(12, 24), num_heads=(2, 3), mlp_ratios=(2, 2), depths=(3, 2), sr_ratios=(2, 1), wss=(3, 3))
VIT = dict(embed_dim=12, num_heads=2, depth=3, patch_size=4)
GAP = VIT | dict(pegs=2, class_token=False, global_pool="avg", fc_norm=False)
COMPACT = dict(embed_dim=12, num_heads=2, mlp_ratio=2.0, depth=2, attn_drop_rate=0.0)
DEEP = dict(patch_size=4, embed_dim=12, num_heads=3, depth=2, mlp_ratio=2.0)
LV = DEEP | dict(skip_lam=2.0, stem_widths=(4, 6, 4))
BOT = dict(stem_dim=8, embed_dim=(32, 64), depths=(1, 2), num_heads=(0, 2), strides=(1, 2))
VT = dict(stem_dim=8, embed_dim=(16, 16), depths=(1, 3), num_heads=(0, 1), strides=(1, 1))
VT |= dict(tokens=4, token_dim=24, key_dim=12)
POSITIONAL = dict(patch_size=2, embed_dim=12, depth=2, num_heads=4, mlp_ratio=2.0)
PIT = dict(patch_size=6, stride=3, base_dims=(6, 6), depths=(2, 1), num_heads=(2, 4), mlp_ratio=2.0)
TNT = dict(patch_size=8, embed_dim=12, inner_dim=6, depth=3, num_heads_inner=2, num_heads_outer=3, mlp_ratio=2.0)
CROSS = dict(embed_dim=(12, 18), num_heads=(2, 3), mlp_ratio=(2.0, 1.5, 1.0), depth=((1, 2, 0), (1, 1, 0)))
CROSS |= dict(patch_size=(6, 4), img_scale=(1.0, 2 / 3))
DAGGER = CROSS | dict(patch_size=(12, 16), depth=((1, 1, 2),), multi_conv=True, crop_scale=True)
LEVIT = dict(patch_size=8, embed_dim=(16, 24), key_dim=4, depths=(2, 1), num_heads=(2, 3), mlp_ratio=1.5)
T2T = dict(embed_dim=12, depth=2, num_heads=2, mlp_ratio=1.5, token_dim=6, qk_scale=12**-0.5, token_drop_rate=0.0)
T2T |= dict(drop_path_rate=0.0)
CEIT = dict(patch_size=8, embed_dim=12, depth=2, num_heads=2, mlp_ratio=1.5)

SHORT = dict(depths=(2, 1)), (10, 14)
ONE = dict(depths=(1, 1))
WIDE = dict(embed_dim=24)
NO_STEM = dict(embed_dim=24, stem_widths=())  # it is PyTorch's, and its ReLU turns a rounding into another gradient
of_pit = partial(of_timm, pit.PoolingVisionTransformer, {"depths": "depth", "num_heads": "heads"})
of_cct = partial(Case, build=Compact, zero=("attention_pool.bias",), draws=False)
of_deepvit = partial(Case, build=deepvit, zero=("reatten_matrix.bias",), traced=(NO_STEM, (16, 16)), draws=False)
of_t2t = partial(Case, build=SoftSplits, sizes=((32, 48), (40, 16)), traced=(dict(depth=1), (32, 16)))
of_attention = partial(
    Case, build=AttentionConv, sizes=((10, 14), (8, 6)), traced=(WIDE, (8, 12)), batch=4, draws=False
)
CASES = {
    "swin": Case(
        "swin_tiny_patch4_window7_224",
        dict(patch_size=2, embed_dim=12, depths=(3, 2), num_heads=(2, 3), window_size=(4, 3)),
        swin_transformer.SwinTransformer, ((18, 26), (16, 12)), SHORT,
    ),
    "twins_svt": Case("twins_svt_small", SVT | dict(patch_size=2), any_twins, ((20, 28), (18, 22)), SHORT),
    "twins_pcpvt": Case(
        "twins_pcpvt_small", SVT | dict(patch_size=2, depths=(2, 1), wss=None), any_twins, ((20, 28), (18, 22)), SHORT
    ),
    "pvt": Case(
        "pvt_tiny", {key: value for key, value in SVT.items() if key != "wss"}, pvt, ((16, 64), (32, 32)),
        (ONE, (8, 32)), pvt_names, first, draws=False,
    ),
    "cpvt": Case(
        "cpvt_tiny", VIT | dict(pegs=1), Conditional, ((12, 20), (16, 8)), (dict(depth=2), (8, 12)), cpvt_names
    ),
    "cpvt_gap": Case("cpvt_small_gap", GAP, Conditional, ((12, 20), (16, 8)), (dict(depth=2), (8, 12)), cpvt_names),
    "cct": of_cct(
        "cct_7_3x2_32", COMPACT | dict(kernel_size=3, conv_layers=2), sizes=((14, 22), (16, 16)), traced=(WIDE, (12, 8))
    ),
    "compact_cvt": of_cct(
        "compact_cvt_7_4_32", COMPACT | dict(kernel_size=4, conv_layers=0), sizes=((12, 20), (16, 8)),
        traced=(WIDE, (12, 12)),
    ),
    "vit_lite": of_cct(
        "vit_lite_7_4_32", COMPACT | dict(kernel_size=4, conv_layers=0, class_token=True, global_pool="token"),
        sizes=((12, 20), (16, 8)), traced=(WIDE, (12, 12)),
    ),
    "cait": Case(
        "cait_xxs24_224", DEEP | dict(init_values=0.5), cait.Cait, ((12, 20), (16, 8)), (WIDE, (20, 16)),
        zero=("proj_l.bias", "attn.k.bias"),
    ),
    "deepvit": of_deepvit("deepvit_16b", DEEP, sizes=((12, 20), (8, 16)), traced=(WIDE, (16, 16))),
    "deepvit_stem": of_deepvit(
        "deepvit_s", DEEP | dict(plain_depth=1, scale_maps=True, adjust=0.5, stem_widths=(4, 6)),
        sizes=((12, 20), (8, 16)),
    ),
    "lvvit": Case("lvvit_small", LV, lvvit, ((12, 20), (8, 16)), (NO_STEM, (16, 16)), draws=False),
    "refiner": Case(
        "refiner_vit_small", LV | dict(depth=4, skip_lam=0.5, expansion=2), refiner, ((12, 20), (8, 16)),
        (NO_STEM | dict(depth=2), (12, 12)), draws=False,
    ),
    "cvt": Case(
        "cvt_13_224", dict(embed_dim=(12, 24), depths=(1, 2), num_heads=(2, 3), mlp_ratio=2.0), cvt,
        ((18, 29), (20, 24)), (dict(embed_dim=(24,), depths=(1,), num_heads=(3,)), (16, 28)), cvt_names, first,
        zero=("proj_k.bias", "stage0.blocks.0.attn.conv_proj_k.bn.bias"),  # keys move alike
        batch=4, draws=False,
        digits=(32, dict(embed_dim=(24, 48), depths=(1, 2), num_heads=(2, 4), mlp_ratio=2.0), 0.927),
    ),
    "botnet": Case(
        "botnet50", BOT, botnet, ((24, 40), (32, 16)), (dict(embed_dim=(64, 128), depths=(1, 1)), (24, 40)), batch=8,
        digits=(32, BOT | dict(stem_dim=16, embed_dim=(64, 128)), 0.738),
    ),
    "vt": Case(
        "vt_resnet18", VT, Visual, ((24, 40), (32, 16)), (dict(depths=(1, 2)), (24, 32)), batch=8,
        small=r"tokenizer|attn|mlp|projector", draws=False,
        digits=(
            32, VT | dict(stem_dim=16, embed_dim=(32, 32), depths=(1, 2), tokens=8, token_dim=48, key_dim=24), 0.694
        ),
    ),
    "attention_conv": of_attention(
        "attention_conv", POSITIONAL,
        digits=(16, dict(patch_size=2, embed_dim=32, depth=3, num_heads=9, mlp_ratio=2.0), 0.683),
    ),
    "attention_conv_full": of_attention("attention_conv", POSITIONAL | dict(isotropic=False)),
    "pit": Case(
        "pit_ti_224", PIT, of_pit(), ((20, 27), (24, 18)), (ONE, (15, 9)),
        digits=(
            16, dict(patch_size=4, stride=2, base_dims=(16, 16), depths=(2, 2), num_heads=(2, 4), mlp_ratio=4.0), 0.881
        ),
    ),
    "pit_distilled": Case(
        "pit_ti_distilled_224", PIT, of_pit(distilled=True), ((20, 27), (24, 18)), (ONE, (12, 9))
    ),
    "tnt": Case(
        "tnt_s_patch16_224", TNT, tnt.TNT, ((16, 24), (24, 8)), (dict(depth=1), (16, 16)),
        digits=(
            16,
            dict(patch_size=4, embed_dim=48, inner_dim=12, depth=3, num_heads_inner=2, num_heads_outer=3)
            | dict(first_stride=2),
            0.339,
        ),
    ),
    "tnt_legacy": Case(
        "tnt_s_legacy_patch16_224", TNT, partial(tnt.TNT, legacy=True), ((16, 24), (24, 8)), (dict(depth=1), (16, 16))
    ),
    "crossvit": Case(
        "crossvit_tiny_240", CROSS, crossvit.CrossVit, ((24, 36), (12, 12)), (dict(depth=((1, 1, 0),)), (18, 12)),
        digits=(
            24,
            dict(img_scale=(1.0, 2 / 3), patch_size=(4, 4), embed_dim=(32, 64), depth=((1, 2, 0),) * 2)
            | dict(num_heads=(2, 2), mlp_ratio=(2.0, 2.0, 1.0)),
            0.247,
        ),
    ),
    "crossvit_dagger": Case(
        "crossvit_9_dagger_240", DAGGER, crossvit.CrossVit, ((48, 48), (48, 96)), (dict(depth=((1, 1, 2),)), (48, 48))
    ),
    "levit": Case(
        "levit_128s", LEVIT, any_levit, ((40, 56), (32, 24)), (ONE, (24, 16)), batch=8,
        digits=(32, dict(patch_size=8, embed_dim=(32, 64), key_dim=8, depths=(2, 2), num_heads=(2, 4)), 0.942),
    ),
    "t2t_performer": of_t2t("t2t_vit_7", T2T | dict(tokens_type="performer")),
    "t2t_transformer": of_t2t("t2t_vit_t_14", T2T | dict(tokens_type="transformer")),
    "ceit": Case("ceit_tiny_224", CEIT, Ceit, ((24, 40), (32, 16)), (dict(depth=1), (16, 16)), batch=8),
}  # fmt: skip


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
