"""Hybrid ViT — a ResNet's feature map as the sequence. Dosovitskiy et al., arXiv:2010.11929, section 3.1.

The ResNet is BiT's (Kolesnikov et al., arXiv:1912.11370).
Differs from ViT:
  1. The patches are cut from the feature map (1x1 after stages, 8x8 if there is only the root), not from the image.
  2. patch_size means total downsampling: "B/16" is 16 pixels a token. R50 at 16 has stage 4's blocks moved to stage 3.
Adds the stem.
"""

from functools import partial

from torch import Tensor, nn

from ..kernels.patch_embed import assemble
from ..layers import PatchEmbed, ResNet, Root
from ..layers.embed import sides
from .config import Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, LARGE, SMALL, TINY


class HybridEmbed(PatchEmbed):
    """Stem: a ResNet, then a patch projection of its feature map; `layers` has the bottlenecks per stage."""

    def __init__(self, config: ViTConfig, layers: tuple[int, ...]) -> None:
        self.layers = layers
        sizes = sides(config.img_size), sides(config.patch_size)
        super().__init__(*sizes, config.in_chans, config.embed_dim, strict_img_size=not config.dynamic_img_size)

    def build(self, embed_dim: int, bias: bool) -> None:
        self.backbone = ResNet(self.in_chans, self.layers) if self.layers else Root(self.in_chans)
        channels, stride = (256 * 2 ** (len(self.layers) - 1), 2 ** (len(self.layers) + 1)) if self.layers else (64, 4)
        patch = self.patch_size[0] // stride, self.patch_size[1] // stride
        self.proj = nn.Conv2d(channels, embed_dim, patch, patch, bias=bias)

    def forward(self, image: Tensor, pos: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """image [B, C, H, W], pos [1, N, D] or [1, T + N, D], prefix [1, T, D] → tokens [B, T + N, D]."""
        self.grid_of(image)
        return assemble(self.proj(self.backbone(image)).flatten(2).transpose(1, 2), pos, prefix)


def hybrid(config: ViTConfig, layers: tuple[int, ...]) -> VisionTransformer:
    """A ViT on a ResNet with `layers` bottlenecks per stage; no stages means only the root."""
    return VisionTransformer(config, patch_embed=HybridEmbed(config, layers))


# (layers, config); appendix B.2 for R50, "How to train your ViT" (arXiv:2106.10270), Table 2 for the others.
SIZES: dict[str, tuple[tuple[int, ...], Options]] = {
    "vit_tiny_r_s16_p8": ((), dict(TINY, patch_size=32)),
    "vit_small_r26_s32": ((2, 2, 2, 2), dict(SMALL, patch_size=32)),
    "vit_base_r50_s16": ((3, 4, 9), dict(BASE, patch_size=16)),
    "vit_large_r50_s32": ((3, 4, 6, 3), dict(LARGE, patch_size=32)),
}
CONFIG = ViTConfig
VARIANTS: dict[str, Options] = {
    f"{n}_{side}": dict(shape, img_size=side) for n, (_, shape) in SIZES.items() for side in (224, 384)
}
MODELS = {f"{n}_{side}": partial(hybrid, layers=layers) for n, (layers, _) in SIZES.items() for side in (224, 384)}
VARIANTS["vit_base_r50_s16_224"]["num_classes"] = 0  # its only weights have no head
