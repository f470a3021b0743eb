"""DeiT — Training data-efficient image transformers & distillation through attention. Touvron et al., arXiv:2012.12877;
DeiT III: Revenge of the ViT, arXiv:2204.07118. Official: facebookresearch/deit.

Differs from ViT:
  1. `*_distilled_*`: a distillation token at index 1 with its own position, and a second head on it.
  2. `deit3_*`: LayerScale 1e-6, and positions for patches only, added before the class token.
Adds the second token and head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .config import Options, ViTConfig
from .distilled import Distilled
from .transformer import VisionTransformer
from .vit import BASE, HUGE, LARGE, SMALL, TINY, VIT


class DistilledVisionTransformer(Distilled, VisionTransformer):
    """ViT with a distillation token."""

    cls_token: nn.Parameter

    def __init__(self, config: ViTConfig, **modules: Any) -> None:
        super().__init__(config, **modules)
        self.head_dist = nn.Linear(self.embed_dim, config.num_classes) if config.num_classes else nn.Identity()
        self.init_weights(config.weight_init)

    def add_tokens(self) -> None:
        self.dist_token = nn.Parameter(torch.empty(1, 1, self.embed_dim))

    def prefix(self) -> list[Tensor]:
        return [self.cls_token, self.dist_token]

    @torch.no_grad()
    def init_weights(self, scheme: str) -> None:
        """Reinitialises all weights, see `VisionTransformer.init_weights`; the new token as in the official code."""
        super().init_weights(scheme)
        nn.init.trunc_normal_(self.dist_token, std=0.02)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces both heads by zero-initialised ones; 0 removes them. They read their own tokens, not a pool."""
        if global_pool not in (None, "", "none", "token"):
            raise ValueError(f"global_pool is {global_pool!r}; the heads of a distilled model need 'token'")
        super().reset_classifier(num_classes)

    def head_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0], x[:, 1]


MEDIUM: Options = dict(embed_dim=512, depth=12, num_heads=8)
III = dict(init_values=1e-6, no_embed_class=True)

CONFIG = ViTConfig
MODEL = VisionTransformer
VARIANTS: dict[str, Options] = {
    "deit_tiny_patch16_224": TINY,
    "deit_small_patch16_224": SMALL,
    "deit_base_patch16_224": BASE,
    "deit_base_patch16_384": dict(BASE, img_size=384),
    "deit_tiny_distilled_patch16_224": TINY,
    "deit_small_distilled_patch16_224": SMALL,
    "deit_base_distilled_patch16_224": BASE,
    "deit_base_distilled_patch16_384": dict(BASE, img_size=384),
    "deit3_small_patch16_224": dict(SMALL, **III),
    "deit3_small_patch16_384": dict(SMALL, **III, img_size=384),
    "deit3_medium_patch16_224": dict(MEDIUM, **III),
    "deit3_base_patch16_224": dict(BASE, **III),
    "deit3_base_patch16_384": dict(BASE, **III, img_size=384),
    "deit3_large_patch16_224": dict(LARGE, **III),
    "deit3_large_patch16_384": dict(LARGE, **III, img_size=384),
    "deit3_huge_patch14_224": dict(HUGE, **III, patch_size=14),
}
MODELS = {name: DistilledVisionTransformer for name in VARIANTS if "_distilled_" in name}


# Names in checkpoints, from transformers 4.56 and 5.23; the authors have those of timm.

DEIT = replace(
    VIT,
    name="transformers DeiT",
    mark="embeddings.distillation_token",
    stem={
        **VIT.stem,
        "dist_token": "embeddings.distillation_token",
        "head": "cls_classifier classifier",
        "head_dist": "distillation_classifier",
    },
    base="deit.",
    needs=dict(VIT.needs, distilled=True),
)
