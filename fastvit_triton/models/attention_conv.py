"""Attention as convolution — On the relationship between self-attention and convolutional layers (arXiv:1911.03584).

Cordonnier, Loukas and Jaggi; official: epfml/attention-cnn.

Differs from ViT:
  1. Patches of 2 x 2; no positions are added and there is no class token; the mean of the tokens goes to the head.
  2. Scores depend on the relative position alone, by a Gaussian per head; 9 heads can be any 3 x 3 convolution.
  3. There are no queries, keys and values: each head carries all channels, which two linear layers join.
  4. Each norm follows its residual, as in BERT.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..checkpoints.layout import Layout, Spelling
from ..checkpoints.tensors import State
from ..layers import Mlp, PatchEmbed, PostNormBlock, drop_path_rates
from ..layers.embed import sides
from ..layers.quadratic import QuadraticAttention
from ..layers.recompute import recomputed
from .config import Options, check_only, check_patches
from .tokens import TokenConfig, TokenModel


@dataclass(frozen=True, kw_only=True)
class AttentionConvConfig(TokenConfig):
    """Options of attention as convolution, in addition to those of `TokenConfig`; `qkv_bias` is that of the heads' sum.

    Attributes:
        num_heads: H.
        isotropic: heads have one precision, not a matrix.
    """

    img_size: int | tuple[int, int] = 32
    num_classes: int = 10
    patch_size: int | tuple[int, int] = 2
    embed_dim: int = 400
    depth: int = 6
    num_heads: int = 9
    mlp_ratio: float = 1.28
    qkv_bias: bool = True
    isotropic: bool = True
    global_pool: str = "avg"
    final_norm: bool = False
    eps: ClassVar[float] = 1e-12
    pools = ("avg", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patches(self)
        check_only(self, final_norm=False, attn_drop_rate=0.0)


class AttentionConv(TokenModel):
    """Attention as convolution; its features are tokens [B, N, D]."""

    layout = "attention_conv"
    num_prefix_tokens = 0

    def __init__(self, config: AttentionConvConfig) -> None:
        super().__init__(config)
        D = config.embed_dim
        drop = config.proj_drop_rate
        sizes = (sides(config.img_size), sides(config.patch_size))
        self.patch_embed = PatchEmbed(*sizes, config.in_chans, D)
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        grid = self.patch_embed.grid_size
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            attn = QuadraticAttention(D, config.num_heads, grid, config.isotropic, config.qkv_bias, drop)
            mlp = Mlp(D, int(D * config.mlp_ratio), drop=drop)
            self.blocks.append(PostNormBlock(D, attn, mlp, config.eps, drop_path=rate))
        self.build_head()

    def stages(self, image: Tensor) -> Iterator[Tensor]:
        """Yields the tokens [B, N, D] after each block."""
        self.grid_of(image)
        x = self.pos_drop(self.patch_embed(image))
        for block in self.blocks:
            x = recomputed(block, x) if self.recomputes else block(x)
            yield x

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, None]:
        """Tokens [B, N, D] in another format; there are no prefix tokens."""
        return super().to_map(x, image, output_fmt)[0], None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for layer-wise learning rates."""
        return dict(stem=r"^patch_embed", blocks=[(r"^blocks\.(\d+)", None)])


CONFIG = AttentionConvConfig
MODEL = AttentionConv
VARIANTS: dict[str, Options] = {"attention_conv": {}}
ORACLE: dict[str, str] = {}  # see the equations in the tests
PARAMS = {"attention_conv": 12_483_834}  # 12.1 M with 10 classes, as in the paper

# Names in checkpoints: the authors', models/bert.py and models/transformer.py; and ours.

POSITIONAL_LAYOUTS = (
    Layout(
        name="attention-cnn",
        mark="features_upscale.weight",
        beside="encoder.layer.0.attention.self.attention_centers",
        resize="linear",
        stem={"patch_embed.proj": "features_upscale", "head": "classifier"},
        blocks="encoder.layer.{}",
        block={
            "attn.attention_centers": "attention.self.attention_centers",
            "attn.attention_spreads": "attention.self.attention_spreads",
            "attn.value": "attention.self.value",
            "attn.proj": "attention.output.dense",
            "norm1": "attention.output.LayerNorm",
            "mlp.fc1": "intermediate.dense",
            "mlp.fc2": "output.dense",
            "norm2": "output.LayerNorm",
        },
    ),
    Layout(
        name="fastvit_triton", mark="patch_embed.proj.weight", beside="blocks.0.attn.attention_centers", resize="linear"
    ),
)


def fit_positional(
    model: Any, target: State, state: State, metadata: Mapping[str, str], mode: str
) -> tuple[list[str], str]:
    """Makes the authors' tensors fit: a linear layer of concatenated pixels [D, p · p · C] becomes a convolution, and
    a table of positions and embeddings that their classifier does not read are dropped; see `fit.fit`."""
    names = ("attention_mask", "mask_embedding", "cls_embedding", "features_downscale.", "pixelizer.")
    useless = [key for key in state if key.endswith("attention.self.R") or key.startswith(names)]
    for key in useless:
        del state[key]
    weight = state.get("patch_embed.proj.weight")
    size = model.config.patch_size
    if weight is not None and weight.dim() == 2 and weight.shape[1] % math.prod(size) == 0:
        state["patch_embed.proj.weight"] = weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2)
    return useless, ""


CHECKPOINTS = Spelling("attention as convolution", POSITIONAL_LAYOUTS, fit_positional)
