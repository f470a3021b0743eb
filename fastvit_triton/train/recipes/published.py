"""Training recipes from papers. None of them was run here.

    fastvit-triton train --recipe deit --data imagenet

A recipe contains the settings that its authors state for ImageNet or CIFAR-10, the accuracy they `reported` and the
training time; build.py converts it to the arguments of `fit`. Unit conversions:

    big_vision  decays weights by schedule · wd, not lr · wd, so AdamW's weight_decay is wd / lr (big_vision/optax.py)
    DeiT        lr is stated for 512 images: lr · batch / 512 (main.py); DeiT III does not scale (--unscale-lr)
    MAE         lr is stated for 256 images: blr · batch / 256 (PRETRAIN.md, FINETUNE.md)
"""

from typing import Any

from . import Recipe

_DROPOUT: dict[str, Any] = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "weight_init": "jax", "pre_logits": True}
# Pixels in [-1, 1] and crops of at least 5 % (vit_jax/input_pipeline.py; big_vision/pp/ops_image.py).
_JAX: dict[str, Any] = dict(
    schedule="vit", warmup_unit="steps", clip=1.0, min_area=0.05, mean=(0.5,) * 3, std=(0.5,) * 3
)
_BIG_VISION = _JAX | dict(lr=1e-3, weight_decay=1e-4 / 1e-3, warmup=10_000, eval_crop=224 / 256)
_DEIT: dict[str, Any] = dict(
    schedule="deit", warmup=5, warmup_unit="epochs", floor=1e-5, weight_decay=0.05, mixup=0.8, cutmix=1.0
)
_DEIT |= dict(min_area=0.08)
_MAE: dict[str, Any] = dict(schedule="mae", warmup_unit="epochs", weight_decay=0.05, lr_images=256, eval_crop=224 / 256)
_FINE = _JAX | dict(optimizer="sgd", lr=0.03, weight_decay=0.0, warmup=500, batch_size=512, img_size=384, eval_crop=1.0)

PUBLISHED = {
    "vit-i1k": Recipe(
        source="arXiv:2010.11929, table 3, row ImageNet; section 4.1: Adam, batch 4096, 10k steps of warm-up",
        reported="77.91, ViT-B/16 after fine-tuning at 384 (table 5)",
        model="vit_base_patch16_224",
        options=_DROPOUT,
        batch_size=4096,
        epochs=300,
        warmup=10_000,
        lr=3e-3,
        weight_decay=0.3,
        **_JAX,
    ),
    "vit-i21k": Recipe(
        source="arXiv:2010.11929, table 3, row ImageNet-21k, ViT-B; decay linear to 1e-5 (vit_jax/utils.py)",
        reported="83.97, ViT-B/16 after fine-tuning on ImageNet (table 5)",
        model="vit_base_patch16_224",
        options=_DROPOUT,
        batch_size=4096,
        epochs=90,
        warmup=10_000,
        lr=1e-3,
        weight_decay=0.03,
        decay="linear",
        floor=1e-5,
        **_JAX,
    ),
    "vit-finetune": Recipe(
        source="arXiv:2010.11929, table 4, row ImageNet; vit_jax/configs/common.py: base_lr, warmup_steps, batch, crop",
        reported="83.97, ViT-B/16 from ImageNet-21k (table 5)",
        model="vit_base_patch16_384",
        steps=20_000,
        **_FINE,
    ),
    "cifar10": Recipe(
        source="arXiv:2010.11929, table 4, row CIFAR; vit_jax/configs/common.py; lr 0.01 for B/16 is in its sweep",
        reported="99.15, ViT-L/16 from ImageNet-21k (table 2)",
        model="vit_base_patch16_384",
        steps=10_000,
        **(_FINE | {"lr": 0.01}),
    ),
    "augreg": Recipe(
        source="arXiv:2106.10270; big_vision/configs/vit_i1k.py, B/16: medium2 = randaug(2,15) and mixup 0.5",
        model="vit_base_patch16_224",
        options={"pre_logits": True},
        batch_size=4096,
        epochs=300,
        loss="sigmoid",
        head_bias=-6.9,
        mixup=0.5,
        policy="randaug(2,15)",
        **_BIG_VISION,
    ),
    "simplevit": Recipe(
        source="arXiv:2205.01580; big_vision/configs/vit_s16_i1k.py",
        reported="76.5, S/16 at 90 epochs (table 1); 78.5 at 150, 80.0 at 300",
        duration="6 to 7 hours on a TPU-v3-8 for 90 epochs (vit_s16_i1k.py)",
        model="simplevit_small_patch16_224",
        options={"pre_logits": True},
        batch_size=1024,
        epochs=90,
        mixup=0.2,
        policy="randaug(2,10)",
        **_BIG_VISION,
    ),
    "deit": Recipe(
        source="arXiv:2012.12877, table 9; facebookresearch/deit, main.py, defaults",
        reported="81.8, DeiT-B (README)",
        model="deit_base_patch16_224",
        batch_size=1024,
        epochs=300,
        lr=5e-4 * 1024 / 512,
        lr_images=512,
        eval_crop=0.875,
        label_smoothing=0.1,
        drop_path_rate=0.1,
        policy="timm",
        erasing=0.25,
        repeats=3,
        ema_decay=0.99996,
        **_DEIT,
    ),
    "deit3": Recipe(
        source="arXiv:2204.07118; facebookresearch/deit, README_revenge.md, deit_base_patch16_LS at 192; models_v2.py",
        reported="83.8, ViT-B after 20 epochs of fine-tuning at 224 (README_revenge.md)",
        model="deit3_base_patch16_224",
        options={"init_values": 1e-4},
        img_size=192,
        batch_size=2048,
        epochs=800,
        optimizer="lamb",
        lr=3e-3,
        eval_crop=1.0,
        loss="bce",
        drop_path_rate=0.2,
        drop_path_constant=True,
        policy="three",
        repeats=3,
        ema_decay=0.99996,
        **_DEIT,
    ),
    "mae-pretrain": Recipe(
        source="arXiv:2111.06377; facebookresearch/mae, PRETRAIN.md, main_pretrain.py",
        reported="85.5, ViT-L after fine-tuning (PRETRAIN.md)",
        duration="about 42 hours on 64 V100 (PRETRAIN.md)",
        model="vit_large_patch16_224",
        options={"num_classes": 0},
        batch_size=4096,
        epochs=800,
        warmup=40,
        lr=1.5e-4 * 4096 / 256,
        betas=(0.9, 0.95),
        loss="pixels",
        min_area=0.2,
        mask_ratio=0.75,
        norm_pixels=True,
        decoder={"embed_dim": 512, "depth": 8, "num_heads": 16},
        **_MAE,
    ),
    "mae-finetune": Recipe(
        source="arXiv:2111.06377; facebookresearch/mae, FINETUNE.md, ViT-Base; main_finetune.py, defaults",
        reported="83.664, ViT-B, the best of four seeds; mean 83.57 (FINETUNE.md)",
        duration="about 7 h 11 min on 32 V100 (FINETUNE.md)",
        model="vit_base_patch16_224",
        options={"global_pool": "avg"},
        batch_size=1024,
        epochs=100,
        warmup=5,
        lr=5e-4 * 1024 / 256,
        layer_decay=0.65,
        floor=1e-6,
        label_smoothing=0.1,
        mixup=0.8,
        cutmix=1.0,
        drop_path_rate=0.1,
        policy="timm",
        erasing=0.25,
        min_area=0.08,
        **_MAE,
    ),
}
