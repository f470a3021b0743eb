"""CvT — Introducing convolutions to vision transformers. Wu et al., arXiv:2103.15808. Official: microsoft/CvT.

Differs from ViT:
  1. Three stages; each begins with a convolution whose windows overlap, and a LayerNorm. There are no positions.
  2. Queries, keys and values are depthwise convolutions of the map; keys and values with a stride of 2.
  3. The class token joins in the last stage, and bypasses the convolutions.
  4. Scores are divided by the root of all channels, not of those of a head; the MLP has QuickGELU.
Adds the convolutional projections. No relation to the CVT of arXiv:2104.05704 (`compact_cvt_*`).
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checkpoints.layout import Layout, Spelling
from ..layers import Blocks, Mlp, drop_path_rates
from ..layers.conv_projection import ConvAttention, ConvBlock, ConvEmbed, ConvStage
from ..layers.embed import sides
from .config import Options
from .fit import keep
from .pyramid import PyramidConfig, PyramidTransformer


@dataclass(frozen=True, kw_only=True)
class CvtConfig(PyramidConfig):
    """Options of CvT, in addition to those of `PyramidConfig`; `patch_size` is the stride of the first convolution.

    Attributes:
        embed_dim: channels of each stage.
        mlp_ratio: hidden channels of the MLP divided by the channels.
        attn_drop_rate: dropout on attention probabilities.
        class_token: prepend a learned token in the last stage.
    """

    embed_dim: tuple[int, ...] = (64, 192, 384)
    depths: tuple[int, ...] = (1, 2, 10)
    num_heads: tuple[int, ...] = (1, 3, 6)
    mlp_ratio: float = 4.0
    attn_drop_rate: float = 0.0
    class_token: bool = True
    global_pool: str = "token"
    eps: float = 1e-5
    pools = ("token", "avg", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_pool == "token" and not self.class_token:
            raise ValueError("global_pool 'token' needs class_token=True; use global_pool='avg' without a class token")

    @property
    def widths(self) -> tuple[int, ...]:
        return self.embed_dim


class ConvolutionalVisionTransformer(PyramidTransformer):
    """CvT; its features are tokens [B, 1 + N, D]."""

    layout = "cvt"
    flattens = True
    info = "stage{}", 0
    undecayed = r"cls_token$"

    def __init__(self, config: CvtConfig) -> None:
        super().__init__(config)
        stride = sides(config.patch_size)
        widths = (config.in_chans, *config.widths)
        last = self.num_stages - 1
        for i, (D, rates) in enumerate(zip(config.widths, self.drop_path_rates(), strict=True)):
            blocks = Blocks(*(build_block(config, i, p) for p in rates))
            embed = ConvEmbed(widths[i], D, (2, 2) if i else stride, config.eps)
            self.add_module(f"stage{i}", ConvStage(embed, blocks, config.class_token and i == last))
        self.build_head()

    def drop_path_rates(self) -> list[list[float]]:
        """Rates of the blocks of each stage; only those of the last one are above 0."""
        *first, last = self.config.depths
        return [[0.0] * depth for depth in first] + [drop_path_rates(self.config.drop_path_rate, last)]

    def stage(self, x: Tensor, i: int) -> Tensor:
        """Stage i: image [B, C, H, W] or map [B, H, W, D] → map [B, H', W', D']; [B, 1, 1 + N, D] for the last one."""
        return self.get_submodule(f"stage{i}")(x.permute(0, 3, 1, 2) if i else x, self.recomputes)

    def to_map(self, x: Tensor, image: Tensor, output_fmt: str) -> tuple[Tensor, Tensor | None]:
        """A stage's map [B, H, W, D], or its tokens [B, 1 + N, D], in another format, and the class token or None."""
        if x.dim() == 4:
            return super().to_map(x, image, output_fmt)
        T = int(self.config.class_token)
        grid = image.shape[2:]
        for i in range(self.num_stages):
            grid = getattr(self, f"stage{i}").patch_embed.grid_of(grid)
        return super().to_map(x[:, T:].unflatten(1, grid), image, output_fmt)[0], x[:, :T] if T else None

    def drop_stages(self, kept: int) -> None:
        """Removes all but the first `kept` stages, and so the class token."""
        for i in range(kept, self.num_stages):
            delattr(self, f"stage{i}")
        self.config = self.config.replace(class_token=False, global_pool="none")

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, 1 + N, D] → [B, D]; all tokens for global_pool="none"."""
        if self.config.global_pool == "token":
            return x[:, 0]
        return super().pool(x[:, 1:] if self.config.class_token and self.config.global_pool == "avg" else x)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that assign parameters to layers, for layer-wise learning rates."""
        fine = [(r"^stage(\d+)\.blocks\.(\d+)", None), (r"^stage(\d+)\.(?:patch_embed|cls_token)", (0,))]
        blocks = [(r"^stage(\d+)", None)] if coarse else fine
        return dict(stem=r"^stage0\.patch_embed", blocks=[*blocks, (r"^norm", (99999,))])


def build_block(config: CvtConfig, stage: int, drop_path: float) -> ConvBlock:
    """Builds one block of a stage."""
    D = config.widths[stage]
    drop = config.proj_drop_rate
    attn = ConvAttention(D, config.num_heads[stage], attn_drop=config.attn_drop_rate, proj_drop=drop)
    mlp = Mlp(D, int(D * config.mlp_ratio), "quick_gelu", drop=drop)
    return ConvBlock(D, attn, mlp, config.eps, drop_path=drop_path)


CONFIG = CvtConfig
MODEL = ConvolutionalVisionTransformer
SIZES: dict[str, Options] = {"13": {}, "21": dict(depths=(1, 4, 16))}
VARIANTS: dict[str, Options] = {
    f"cvt_{name}_{side}": dict(size, img_size=side) for side in (224, 384) for name, size in SIZES.items()
}
VARIANTS["cvt_w24_384"] = dict(img_size=384, embed_dim=(192, 768, 1024), depths=(2, 2, 20), num_heads=(3, 12, 16))
ORACLE: dict[str, str] = {}  # transformers has the model, with other parameter names and GELU; it counts
PARAMS = dict(zip(VARIANTS, (19_997_480, 31_622_696, 19_997_480, 31_622_696, 277_196_392), strict=True))

# Names in checkpoints, from transformers 5.23 and the authors' lib/models/cls_cvt.py (microsoft/CvT).


def _from_cvt(key: str) -> str:
    """Stages and their blocks have shorter paths in the authors' code."""
    key = re.sub(r"^encoder\.stages\.(\d+)\.", r"stage\1.", key)
    key = re.sub(r"^(stage\d+)\.layers\.", r"\1.blocks.", key)
    key = key.replace("embedding.convolution_embeddings.projection", "patch_embed.proj")
    return key.replace("embedding.convolution_embeddings.normalization", "patch_embed.norm")


CONVOLVED = "attention.attention.convolution_projection_{{query,key,value}}.convolution_projection.{}"
CVT_LAYOUTS = (
    Layout(
        name="transformers CvT",
        mark="encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        resize="bilinear",
        number=_from_cvt,
        stem={"norm": "layernorm", "head": "classifier"},
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
        block={
            "norm{1,2}": "layernorm_{before,after}",
            "attn.conv_proj_{q,k,v}.conv": CONVOLVED.format("convolution"),
            "attn.conv_proj_{q,k,v}.bn": CONVOLVED.format("normalization"),
            "attn.proj_{q,k,v}": "attention.attention.projection_{query,key,value}",
            "attn.proj": "attention.output.dense",
            "mlp.fc{1,2}": "{intermediate,output}.dense",
        },
        base="cvt.",
    ),
    Layout(
        name="CvT",
        mark="stage0.patch_embed.proj.weight",
        resize="bilinear",
        home="stage{}.blocks.{}",
        blocks="stage{}.blocks.{}",
    ),
)

CHECKPOINTS = Spelling("CvT", CVT_LAYOUTS, keep)
