"""CaiT — Going deeper with image transformers. Touvron et al., arXiv:2103.17239.
Official: facebookresearch/deit, cait_models.py.
Differs from ViT:
  1. The class token joins after the blocks of the patches; two more blocks update it alone (class attention).
  2. LayerScale on every branch; linear maps over the heads before and after the softmax (talking heads).
  3. Stochastic depth has the same rate in all blocks of the patches. Adds the class blocks and the talking heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Fitted, Layout
from ..checkpoints.tensors import State, split
from ..engine.attention import mix_heads
from ..engine.body import normalize
from ..layers import Attention, Block, Mlp
from ..layers.class_attention import ClassAttention
from ..layers.drop_path import add
from ..layers.head_mixing import MixedAttention
from ..layers.scaled_block import ScaledBlock, times
from . import fit
from .base import BLOCKS, LAST
from .config import Options, ViTConfig
from .transformer import VisionTransformer


class TalkingHeads(MixedAttention):
    """Linear maps over the heads before and after the softmax (arXiv:2003.02436; section 5.1).

        P = W' softmax(W S + b) + b',   S = q kᵀ / √d;   the softmax cancels b

    The arguments are those of `MixedAttention`.
    """

    def __init__(self, dim: int, num_heads: int, *options: Any) -> None:
        super().__init__(dim, num_heads, *options)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def maps(self, scores: Tensor) -> Tensor:
        return self.attn_drop(mix_heads(self.proj_w, mix_heads(self.proj_l, scores).softmax(-1)))


class ClassBlock(ScaledBlock):
    """c + γ₁ attention(LN [c, x]), then c + γ₂ MLP(LN c) for a class token c (section 3.2); x is unchanged.

    The arguments are those of `ScaledBlock`; the attention is a `ClassAttention`.
    """

    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:  # type: ignore[override]  # the class token comes with x
        """Patches [B, N, D], class token [B, 1, D] → class token [B, 1, D]."""
        first, second = self.factors(x)
        x_cls = x_cls + self.drop_path1(times(first, self.attn(self.norm1(torch.cat((x_cls, x), 1)))))
        return add(x_cls, self.drop_path2, lambda x: times(second, self.mlp(self.norm2(x))))


class ClassBlocks(nn.ModuleList):
    """A list of `ClassBlock`."""

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Patches [B, N, D], class token [1, 1, D] → updated class token and patches [B, 1 + N, D]."""
        token = token.expand(x.shape[0], -1, -1)
        for block in self:
            token = block(x, token)
        return torch.cat((token, x), 1)


@dataclass(frozen=True, kw_only=True)
class CaitConfig(ViTConfig):
    """Options of CaiT, in addition to those of `ViTConfig`, of which it has no registers and no QK-norm.

    Attributes:
        depth_token_only: blocks of the class token; without class_token there are none.
        mlp_ratio_token_only: hidden channels of their MLP divided by D.
    """

    depth: int = 24
    init_values: float | None = 1e-5
    no_embed_class: bool = True
    fc_norm: bool | None = False
    depth_token_only: int = 2
    mlp_ratio_token_only: float = 4.0
    only: ClassVar = dict(
        **dict(reg_tokens=0, qk_norm=False, norm="pre", mlp="mlp", proj_bias=True, head_dim=None),
        **dict(pos_embed="learned", no_embed_class=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive(("num_classes", "depth_token_only", "reg_tokens", "eps", "init_values"))


class Cait(VisionTransformer):
    """CaiT; its features are tokens [B, 1 + N, D], its intermediate features those of the patches [B, N, D]."""

    config: CaitConfig
    layout = "cait"
    layer_patterns = (BLOCKS, (r"^blocks_token_only|^norm", LAST))  # the class blocks are one layer with the norm

    def __init__(self, config: CaitConfig) -> None:
        super().__init__(config)
        D = config.embed_dim
        eps = config.eps
        scale = config.init_values
        blocks = ClassBlocks()
        for _ in range(config.depth_token_only if config.class_token else 0):
            mlp = Mlp(D, int(D * config.mlp_ratio_token_only), config.act)
            blocks.append(ClassBlock(D, ClassAttention(D, config.num_heads, config.qkv_bias), mlp, eps, scale))
        self.blocks_token_only = blocks if config.class_token else None
        self.init_weights(config.weight_init)

    @torch.no_grad()
    def init_weights(self, scheme: str) -> None:
        """Reinitialises all weights, see `VisionTransformer.init_weights`; the class token as in timm."""
        super().init_weights(scheme)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def prefix(self) -> list[Tensor]:
        return []

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        """Creates block i of the patches."""
        config = self.config
        D = config.embed_dim
        drop = config.proj_drop_rate
        attn = TalkingHeads(D, config.num_heads, config.qkv_bias, config.attn_drop_rate, drop)
        mlp = Mlp(D, int(D * config.mlp_ratio), config.act, drop=drop)
        return ScaledBlock(D, attn, mlp, config.eps, config.init_values, config.drop_path_rate)

    def forward_features(self, image: Tensor) -> Tensor:
        """image [B, C, H, W] → tokens [B, 1 + N, D] after the final norm."""
        return self.stage_features(self.blocks(self.embed(image), recompute=self.recomputes), 0)

    def stage_features(self, x: Tensor, stage: int) -> Tensor:
        """Patches [B, N, D] → class token and patches [B, 1 + N, D] after the final norm."""
        x = x if self.blocks_token_only is None else self.blocks_token_only(x, self.cls_token)
        return normalize(x, self.norm)

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, 1 + N, D] → [B, D]; all tokens for global_pool="none"."""
        return super().pool(x[:, 1:] if self.config.global_pool == "avg" and self.config.class_token else x)

    def prune(self, stages: int, norm: bool, head: bool) -> None:
        """Keeps the first `stages` blocks; removes the final norm if `norm`, class token and classifier if `head`."""
        super().prune(stages, norm, head)
        if head:
            self.blocks_token_only = self.cls_token = None
            self.config = self.config.replace(class_token=False)


SIZES = {  # D, heads, blocks, LayerScale, image sides
    "xxs24": (192, 4, 24, 1e-5, (224, 384)),
    "xxs36": (192, 4, 36, 1e-5, (224, 384)),
    "xs24": (288, 6, 24, 1e-5, (384,)),
    "s24": (384, 8, 24, 1e-5, (224, 384)),
    "s36": (384, 8, 36, 1e-6, (384,)),
    "m36": (768, 16, 36, 1e-6, (384,)),
    "m48": (768, 16, 48, 1e-6, (448,)),
}

CONFIG = CaitConfig
MODEL = Cait
VARIANTS: dict[str, Options] = {
    f"cait_{size}_{side}": dict(embed_dim=D, num_heads=heads, depth=depth, init_values=init, img_size=side)
    for size, (D, heads, depth, init, image_sides) in SIZES.items()
    for side in image_sides
}


# Names in checkpoints, from timm 1.0.31.

CAIT = Layout(
    name="timm",
    mark="blocks_token_only.0.attn.q.weight",
    beside="patch_embed.proj.weight",
    resize="bicubic_antialias",
    home="blocks_token_only.{}",
    blocks="blocks_token_only.{}",
)


def fit_cait(model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str) -> Fitted:
    """Makes the positions of `state` fit a CaiT, whose class attention has three projections; see `fit.fit`."""
    for key in [key for key in state if key.startswith("blocks_token_only.") and ".attn.qkv." in key]:
        state |= split({key: state.pop(key)}, "attn.qkv")
    return fit.fit(model, target, state, metadata, mode)


CHECKPOINTS = CheckpointFormats("CaiT", (CAIT,), fit_cait, {"timm": (CAIT,)})
