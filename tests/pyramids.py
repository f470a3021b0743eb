"""Small models of the hierarchical families and of CPVT, with random weights, and their oracles with the same weights.

Oracles are timm's models; for PVT it is transformers', whose two embedding norms have another epsilon than the
authors'; for CPVT timm's DeiT with a torch convolution between the blocks.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import attention_families
import timm
import torch
import torch.nn.functional as F
from foreign import redraw
from timm.models import swin_transformer, twins
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
    """

    name: str
    options: dict[str, Any]
    build: Callable[..., nn.Module]
    sizes: tuple[tuple[int, int], ...]
    convert: Callable[[State], State] = dict
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, images: model(images)
    zero: tuple[str, ...] = ()


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


def pair(case: Case, size: tuple[int, int], **more: Any) -> tuple[nn.Module, nn.Module]:
    """Our model and its oracle for images of this size, in float64 with the same random weights."""
    options = case.options | dict(num_classes=5) | more
    theirs = redraw(case.build(img_size=size, **options)).double()
    ours = create_model(case.name, img_size=size, **options).double()
    ours.load_state_dict(case.convert(theirs.state_dict()))
    return ours, theirs


def gradients(model: nn.Module, convert: Callable[[State], State] = dict) -> State:
    """The gradient of every parameter."""
    return convert({name: parameter.grad for name, parameter in model.named_parameters()})


def loss(logits: Tensor) -> Tensor:
    """A number that depends on every logit."""
    return F.cross_entropy(logits * 3, torch.arange(len(logits)) % logits.shape[1])
