"""SimpleViT — Better plain ViT baselines for ImageNet-1k. Beyer et al., arXiv:2205.01580. Official: big_vision.

Differs from ViT:
  1. Fixed 2-D sine-cosine positions. 2. No class token: the mean of the tokens after the final norm. 3. No dropout.
  4. The paper's default head keeps a tanh layer (pre_logits=True); a single linear layer costs nothing at 300 epochs
     (Table 1, "head") and is the default here.
Adds nothing.
"""

from .config import Options, ViTConfig
from .transformer import VisionTransformer
from .vit import BASE, SMALL, TINY

SIMPLE = dict(pos_embed="sincos2d", class_token=False, global_pool="avg", fc_norm=False)

CONFIG = ViTConfig
MODEL = VisionTransformer
VARIANTS: dict[str, Options] = {
    "simplevit_tiny_patch16_224": dict(TINY, **SIMPLE),
    "simplevit_small_patch16_224": dict(SMALL, **SIMPLE),
    "simplevit_base_patch16_224": dict(BASE, **SIMPLE),
}
