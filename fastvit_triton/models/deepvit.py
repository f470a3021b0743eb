"""DeepViT — Towards deeper vision transformer. Zhou et al., arXiv:2103.11886. Official: zhoudaquan/dvit_repo.

Differs from ViT:
  1. Re-attention: the attention maps are mixed across heads and normalised by a BatchNorm before the values.
  2. `deepvit_s`, `deepvit_l`: only their last 5 and 12 blocks have it; tokens come from convolutions.
  3. There a branch f(LN x) is f(LN(x/2)) · 2 in all blocks, which is the factor 2, and 4 ε in the LayerNorm.
Adds re-attention and the stem. vit-pytorch's DeepViT has a LayerNorm over the heads instead of the BatchNorm.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..checkpoints.renaming import CheckpointFormats, Layout
from ..engine.attention import mix_heads
from ..engine.batch_norm import is_constant, sources_of
from ..engine.freeze import derived
from ..engine.leaves import CONVOLUTIONS, Packed, is_plain_module
from ..layers import Attention, Block, Mlp
from ..layers.embed import sides
from ..layers.head_mixing import MixedAttention
from ..layers.scaled_block import ScaledBlock
from ..layers.stems import ConvStem
from .config import Options, ViTConfig, check_only
from .fit import fit
from .transformer import VisionTransformer


class ReAttention(MixedAttention):
    """A linear map over the heads after the softmax, and a BatchNorm of the maps (eq. 3).

        P' = s · BatchNorm(Θ softmax(q kᵀ / √d) + b),   one channel a head

    In evaluation mode Θ and the BatchNorm are one map, which is kept after `freeze`. The arguments are those of
    `MixedAttention`, with s, `factor`, after the first two.
    """

    def __init__(self, dim: int, num_heads: int, factor: float = 1.0, *options: Any) -> None:
        super().__init__(dim, num_heads, *options)
        self.factor = factor
        self.reatten_matrix = nn.Conv2d(num_heads, num_heads, 1)
        self.var_norm = nn.BatchNorm2d(num_heads)

    def maps(self, scores: Tensor) -> Tensor:
        maps = self.attn_drop(scores.softmax(-1))
        norm = self.var_norm
        if is_constant(norm) and is_plain_module(self.reatten_matrix, CONVOLUTIONS):
            return mix_heads(self.folded(), maps)
        return self.factor * norm(self.reatten_matrix(maps))

    def folded(self) -> Packed:
        """Θ, b, BatchNorm with its running statistics, and s as one map over the heads: weight [H, H], bias [H]."""
        norm = self.var_norm
        if (sources := sources_of(self, self.reatten_matrix, norm)) is None:
            return Packed(*self._fold())
        weight = derived(self, f"map {norm.eps}", sources, lambda: self._fold()[0])
        return Packed(weight, derived(self, f"map's bias {norm.eps}", sources, lambda: self._fold()[1]))

    def _fold(self) -> tuple[Tensor, Tensor]:
        norm, conv = self.var_norm, self.reatten_matrix
        mean = norm.running_mean
        variance = norm.running_var
        bias = conv.bias
        assert mean is not None and variance is not None and bias is not None
        gain = norm.weight * (variance + norm.eps).rsqrt()  # [H]
        weight = gain[:, None] * conv.weight[..., 0, 0]
        return self.factor * weight, self.factor * (gain * (bias - mean) + norm.bias)


@dataclass(frozen=True, kw_only=True)
class DeepvitConfig(ViTConfig):
    """Options of DeepViT, in addition to those of `ViTConfig`.

    Attributes:
        plain_depth: first blocks, which have plain attention.
        adjust: a, in branches f(LN(a x)) / a.
        scale_maps: multiply the maps of re-attention by the softmax scale.
        stem_widths: channels of the convolutions before the patch projection; none for patches of the image.
    """

    embed_dim: int = 384
    num_heads: int = 12
    mlp_ratio: float = 3.0
    plain_depth: int = 0
    adjust: float = 1.0
    scale_maps: bool = False
    stem_widths: tuple[int, ...] = ()
    least: ClassVar = ViTConfig.least | dict(plain_depth=0)
    only: ClassVar = dict(norm="pre", mlp="mlp", proj_bias=True, qk_norm=False, head_dim=None, init_values=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self)
        if self.adjust <= 0:
            raise ValueError(f"adjust is {self.adjust}; use a number above 0")


def check_parts(config: Any) -> None:
    """Raises ValueError for options that the stem or the blocks do not have."""
    if config.pos_embed == "relative":
        raise ValueError("pos_embed is 'relative'; this model adds positions to its tokens: use 'learned'")
    widths = config.stem_widths
    if any(width < 1 for width in widths):
        raise ValueError(f"stem_widths is {widths}; use numbers above 0")
    if widths and any(side % 2 for side in sides(config.patch_size)):
        raise ValueError(f"patch_size is {config.patch_size}; convolutions before it need an even one")
    if widths:
        check_only(config, patch_embed="conv")


def build_stem(config: ViTConfig, widths: tuple[int, ...]) -> ConvStem | None:
    """The stem with convolutions of these widths; None for none."""
    size = sides(config.img_size)
    patch = sides(config.patch_size)
    strict = not config.dynamic_img_size
    return ConvStem(size, patch, config.in_chans, config.embed_dim, strict, widths) if widths else None


class DeepVisionTransformer(VisionTransformer):
    """ViT with re-attention."""

    config: DeepvitConfig
    layout = "deepvit"
    position_resize = "bicubic"

    def __init__(self, config: DeepvitConfig) -> None:
        super().__init__(config, patch_embed=build_stem(config, config.stem_widths))

    def build_block(self, i: int, drop_path: float, attention: type[Attention]) -> Block:
        """Creates block i."""
        config = self.config
        D = config.embed_dim
        drop = config.proj_drop_rate
        bias = config.qkv_bias
        if i < config.plain_depth:
            attn: Any = attention(D, config.num_heads, None, bias, attn_drop=config.attn_drop_rate, proj_drop=drop)
        else:
            factor = (D // config.num_heads) ** -0.5 if config.scale_maps else 1.0
            attn = ReAttention(D, config.num_heads, factor, bias, config.attn_drop_rate, drop)
        mlp = Mlp(D, int(D * config.mlp_ratio), config.act, drop=drop)
        if config.adjust == 1.0:
            return Block(D, attn, mlp, config.eps, drop_path=drop_path)
        eps = config.eps / config.adjust**2
        factor = 1 / config.adjust
        return ScaledBlock(D, attn, mlp, eps, drop_path=drop_path, factor=factor)


SMALL: Options = dict(embed_dim=396, depth=16, plain_depth=11, scale_maps=True, adjust=0.5, stem_widths=(64, 64))
LARGE: Options = dict(SMALL, embed_dim=420, depth=32, plain_depth=20, scale_maps=False)

CONFIG = DeepvitConfig
MODEL = DeepVisionTransformer
VARIANTS: dict[str, Options] = {f"deepvit_{depth}b": dict(depth=depth) for depth in (16, 24, 32)}
VARIANTS |= {"deepvit_s": SMALL, "deepvit_l": LARGE, "deepvit_l_384": dict(LARGE, img_size=384)}


# Names in checkpoints: the authors', zhoudaquan/dvit_repo, models/layers.py.

DEEPVIT = Layout(name="DeepViT", mark="patch_embed.proj.weight", beside="blocks.0.attn.qkv.weight", resize="bicubic")

CHECKPOINTS = CheckpointFormats("DeepViT", (DEEPVIT,), fit)
