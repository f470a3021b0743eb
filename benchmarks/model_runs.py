"""The measured models and their batch sizes."""

from fastvit_triton.measure.model_cases import Run, case, variant_names

__all__ = ["FULL", "SMALL", "TINY", "Run", "case", "variant_names"]

OFFICIAL = "open_clip ViT-B-16"  # whose blocks are captured

# most important first
FULL = (
    Run("vit_base_patch16_224", 256),
    Run("vit_base_patch16_224", 128, True),
    Run("vit_tiny_patch16_224", 256),
    Run("vit_small_patch16_224", 256),
    Run("vit_large_patch16_224", 256),
    Run("vit_base_patch14_dinov2", 32),  # at 518 pixels
    Run("vit_small_patch16_224", 128, True),
    Run("vit_huge_patch14_224", 128),
    Run("vit_base_patch16_siglip_224", 256),
    Run("vit_base_patch16_dinov3", 256),  # timm's implementation
    Run("deit3_base_patch16_224", 256),
    Run("vit-pytorch SimpleViT-B", 256),
    Run(OFFICIAL, 256),
    Run("vit_large_patch16_224", 64, True),
    Run("vit_tiny_patch16_224", 256, True),
    Run("vit_huge_patch14_224", 32, True),
    Run("vit_base_patch16_224", 256, modes=("max-autotune-no-cudagraphs",)),
)
SHORT = dict(img_size=64, depth=2)
SMALL = (
    *(
        Run(model, 2, training, SHORT)
        for model in ("vit_tiny_patch16_224", "vit_small_patch16_224")
        for training in (False, True)
    ),
    Run("vit_small_patch16_dinov3", 2, True, SHORT),
    *(Run(OFFICIAL, 2, training, dict(image_size=64, layers=2, width=96, heads=3)) for training in (False, True)),
)
TINY = tuple(Run("vit_tiny_patch16_224", 2, training, dict(img_size=32, depth=1)) for training in (False, True))
