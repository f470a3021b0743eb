"""The measured models and their batch sizes."""

from fastvit_triton.measure.model_cases import CaseRun, case, variant_names

__all__ = ["FULL", "SMALL", "TINY", "CaseRun", "case", "variant_names"]

OFFICIAL = "open_clip ViT-B-16"  # whose blocks are captured

# most important first
FULL = (
    CaseRun("vit_base_patch16_224", 256),
    CaseRun("vit_base_patch16_224", 128, True),
    CaseRun("vit_tiny_patch16_224", 256),
    CaseRun("vit_small_patch16_224", 256),
    CaseRun("vit_large_patch16_224", 256),
    CaseRun("vit_base_patch14_dinov2", 32),  # at 518 pixels
    CaseRun("vit_small_patch16_224", 128, True),
    CaseRun("vit_huge_patch14_224", 128),
    CaseRun("vit_base_patch16_siglip_224", 256),
    CaseRun("vit_base_patch16_dinov3", 256),  # timm's implementation
    CaseRun("deit3_base_patch16_224", 256),
    CaseRun("vit-pytorch SimpleViT-B", 256),
    CaseRun(OFFICIAL, 256),
    CaseRun("vit_large_patch16_224", 64, True),
    CaseRun("vit_tiny_patch16_224", 256, True),
    CaseRun("vit_huge_patch14_224", 32, True),
    CaseRun("vit_base_patch16_224", 256, modes=("max-autotune-no-cudagraphs",)),
)
SHORT = dict(img_size=64, depth=2)
SMALL = (
    *(
        CaseRun(model, 2, training, SHORT)
        for model in ("vit_tiny_patch16_224", "vit_small_patch16_224")
        for training in (False, True)
    ),
    CaseRun("vit_small_patch16_dinov3", 2, True, SHORT),
    *(CaseRun(OFFICIAL, 2, training, dict(image_size=64, layers=2, width=96, heads=3)) for training in (False, True)),
)
TINY = tuple(CaseRun("vit_tiny_patch16_224", 2, training, dict(img_size=32, depth=1)) for training in (False, True))
