"""How the papers train, as data: units converted, sources named. None of these was run here.

A record holds what its authors state for ImageNet or CIFAR-10; `optimizer_for`, `lr_for`, `loss_for`, `mix_for` and
`policy_for` turn it into arguments of `fit`, or of any other loop. Unit conversions:

    big_vision  decays weights by schedule · wd, not lr · wd, so AdamW's weight_decay is wd / lr (big_vision/optax.py)
    DeiT        lr is stated for 512 images: lr · batch / 512 (main.py); DeiT III does not scale (--unscale-lr)
    MAE         lr is stated for 256 images: blr · batch / 256 (PRETRAIN.md, FINETUNE.md)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .loss import binary_cross_entropy, soft_cross_entropy
from .mix import mixup_or_cutmix
from .optim import parameter_groups
from .policy import Policy, rand_augment, three_augment
from .schedule import deit_schedule, mae_schedule, vit_schedule


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published way to train.

    Attributes:
        source: where each number below is stated.
        reported: top-1 accuracy in % that the source reports, and for what; "" where it names none.
        duration: what the source says it takes; "" where it does not.
        model: a name for `create_model`.
        options: further arguments of `create_model`, dropout among them.
        img_size: image side in pixels.
        batch_size: images per step, all machines together.
        epochs: length, or None where the source counts steps.
        steps: length, or None where the source counts epochs.
        warmup: in epochs or steps, whichever `warmup_unit` says.
        warmup_unit: "epochs" or "steps".
        optimizer: "adamw", "sgd" (momentum 0.9) or "lamb".
        lr: peak rate, already scaled to the batch.
        weight_decay: in torch.optim.AdamW's convention.
        betas: of AdamW.
        layer_decay: see `parameter_groups`.
        schedule: "vit", "deit" or "mae", see schedule.py.
        decay: "cosine" or, for "vit", "linear".
        floor: rate at the end, where the schedule has one.
        clip: largest gradient norm; None does not clip.
        loss: "softmax"; "sigmoid", summed over classes; "bce", DeiT III's; or "pixels".
        head_bias: what the head's bias starts with.
        label_smoothing: probability spread evenly over all classes.
        mixup: alpha.
        cutmix: alpha; each batch gets one of the two, evenly.
        drop_path: rate of the last block.
        drop_path_constant: the same rate in every block.
        policy: "timm" (rand-m9-mstd0.5-inc1), "three", "randaug(2,m)" (big_vision's own operations) or "".
        erasing: probability of random erasing.
        repeats: looks at each image in an epoch of repeated augmentation; 1 is off.
        min_area: smallest part of a picture in a random crop.
        average: decay of the moving average; None keeps none.
        mask_ratio: part of the patches that a masked autoencoder hides.
        norm_pixels: normalise each patch that it must predict.
    """

    source: str
    reported: str = ""
    duration: str = ""
    model: str
    options: dict = field(default_factory=dict)
    img_size: int = 224
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    warmup: int
    warmup_unit: str = "steps"
    optimizer: str = "adamw"
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 1.0
    schedule: str = "vit"
    decay: str = "cosine"
    floor: float = 0.0
    clip: float | None = None
    loss: str = "softmax"
    head_bias: float = 0.0
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    drop_path: float = 0.0
    drop_path_constant: bool = False
    policy: str = ""
    erasing: float = 0.0
    repeats: int = 1
    min_area: float = 0.08
    average: float | None = None
    mask_ratio: float = 0.0
    norm_pixels: bool = False


_DROPOUT = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "weight_init": "jax", "pre_logits": True}
_BIG_VISION = dict(lr=1e-3, weight_decay=1e-4 / 1e-3, clip=1.0, warmup=10_000, schedule="vit", decay="cosine")
_DEIT = dict(schedule="deit", warmup=5, warmup_unit="epochs", floor=1e-5, weight_decay=0.05, mixup=0.8, cutmix=1.0)
_MAE = dict(schedule="mae", warmup_unit="epochs", weight_decay=0.05)
_FINE = dict(optimizer="sgd", lr=0.03, weight_decay=0.0, clip=1.0, warmup=500, batch_size=512, img_size=384)

PUBLISHED = {
    "vit-i1k": Published(
        source="arXiv:2010.11929, table 3, row ImageNet; section 4.1: Adam, batch 4096, 10k steps of warm-up",
        reported="77.91, ViT-B/16 after fine-tuning at 384 (table 5)",
        model="vit_base_patch16_224",
        options=_DROPOUT,
        batch_size=4096,
        epochs=300,
        warmup=10_000,
        lr=3e-3,
        weight_decay=0.3,
        clip=1.0,
    ),
    "vit-i21k": Published(
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
    ),
    "vit-finetune": Published(
        source="arXiv:2010.11929, table 4, row ImageNet; vit_jax/configs/common.py: base_lr, warmup_steps, batch, crop",
        reported="83.97, ViT-B/16 from ImageNet-21k (table 5)",
        model="vit_base_patch16_384",
        steps=20_000,
        **_FINE,
    ),
    "cifar10": Published(
        source="arXiv:2010.11929, table 4, row CIFAR; vit_jax/configs/common.py; lr 0.01 for B/16 is in its sweep",
        reported="99.15, ViT-L/16 from ImageNet-21k (table 2)",
        model="vit_base_patch16_384",
        steps=10_000,
        **(_FINE | {"lr": 0.01}),
    ),
    "augreg": Published(
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
    "simplevit": Published(
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
    "deit": Published(
        source="arXiv:2012.12877, table 9; facebookresearch/deit, main.py, defaults",
        reported="81.8, DeiT-B (README)",
        model="deit_base_patch16_224",
        batch_size=1024,
        epochs=300,
        lr=5e-4 * 1024 / 512,
        label_smoothing=0.1,
        drop_path=0.1,
        policy="timm",
        erasing=0.25,
        repeats=3,
        average=0.99996,
        **_DEIT,
    ),
    "deit3": Published(
        source="arXiv:2204.07118; facebookresearch/deit, README_revenge.md, deit_base_patch16_LS at 192; models_v2.py",
        reported="83.8, ViT-B after 20 epochs of fine-tuning at 224 (README_revenge.md)",
        model="deit3_base_patch16_224",
        options={"init_values": 1e-4},
        img_size=192,
        batch_size=2048,
        epochs=800,
        optimizer="lamb",
        lr=3e-3,
        loss="bce",
        drop_path=0.2,
        drop_path_constant=True,
        policy="three",
        repeats=3,
        average=0.99996,
        **_DEIT,
    ),
    "mae-pretrain": Published(
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
        **_MAE,
    ),
    "mae-finetune": Published(
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
        drop_path=0.1,
        policy="timm",
        erasing=0.25,
        **_MAE,
    ),
}


def optimizer_for(recipe: Published, model: nn.Module) -> Optimizer:
    """The recipe's optimiser over the model's parameter groups. Refuses LAMB, which PyTorch does not have."""
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
    raise ValueError(f"optimizer {recipe.optimizer!r} is not in PyTorch; give one from a library parameter_groups(…)")


def lr_for(recipe: Published, steps_per_epoch: int) -> Callable[[int], float]:
    """Step of the whole run, from 0, to learning rate.

    Args:
        recipe: the record.
        steps_per_epoch: images // batch_size, of the data at hand.
    """
    if recipe.schedule == "vit":
        steps = recipe.steps or recipe.epochs * steps_per_epoch
        options = dict(steps=steps, warmup=recipe.warmup, peak=recipe.lr, decay=recipe.decay, linear_end=recipe.floor)
        return partial(vit_schedule, **options)
    # MAE changes the rate every step, DeiT after each epoch.
    exact = recipe.schedule == "mae"
    schedule = mae_schedule if exact else deit_schedule

    def at(step: int) -> float:
        epoch = step / steps_per_epoch if exact else max(step // steps_per_epoch - 1, 0)
        return schedule(epoch, recipe.epochs, recipe.warmup, recipe.lr, recipe.floor)

    return at


def loss_for(recipe: Published) -> Callable[[Tensor, Tensor], Tensor]:
    """Of logits and soft targets, both [B, K]. Refuses masked autoencoders, whose loss is of pixels."""
    if recipe.loss == "pixels":
        raise ValueError("this recipe predicts pixels; its loss belongs to the masked autoencoder")
    if recipe.loss == "softmax":
        return soft_cross_entropy
    bce = dict(threshold=0.0, reduction="mean") if recipe.loss == "bce" else dict(reduction="sum")
    return partial(binary_cross_entropy, **bce)


def mix_for(recipe: Published, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of images and class numbers: blends them and makes soft, smoothed targets."""
    alphas = dict(mixup_alpha=recipe.mixup, cutmix_alpha=recipe.cutmix)
    return partial(mixup_or_cutmix, classes=classes, smoothing=recipe.label_smoothing, **alphas)


def policy_for(recipe: Published) -> Policy | None:
    """What changes a crop. big_vision's `randaug` is refused: its operations and ranges are others than timm's."""
    policies = {"": None, "timm": rand_augment, "three": three_augment}
    if recipe.policy not in policies:
        raise ValueError(f"policy {recipe.policy!r} is big_vision's own; train without it, or with rand_augment")
    return policies[recipe.policy]
