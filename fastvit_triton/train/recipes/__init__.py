"""Training recipes as dataclasses; each states whether its accuracy was measured here. More are in published.py."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from ..augment.policy import policy_by_name
from ..ranges import (
    Degrees,
    Finite,
    FractionAbove0,
    FractionBelow1,
    ImageSide,
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    check_fields,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
OPTIMIZERS = ("adamw", "sgd", "lamb", "muon")
IMAGENET_TRAIN_IMAGES = 1_281_167  # ILSVRC-2012


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run except the data.

    Attributes:
        source: publication of the numbers; "" for our own.
        reported: top-1 accuracy in % that the source reports, and its model; "" if it reports none.
        duration: training time that the source reports; "" if it reports none.
        model: model name for `create_model`.
        options: further arguments of `create_model`, such as dropout rates.
        img_size: image side in pixels.
        mean: per channel, of pixels in [0, 1], for normalising image files.
        std: per channel.
        eval_crop: fraction of the shorter side that the centre crop of a test image keeps.
        crop_mode: of a test image, see `Transform`.
        interpolation: of all resizing, see `Transform`.
        batch_size: images per step, over all processes.
        epochs: length of the run; None if `steps` is given.
        steps: length of the run; None if `epochs` is given. The last epoch is completed at the last step's rate.
        warmup: length of the warm-up, in `warmup_unit`.
        warmup_unit: "steps", "epochs", or "run": a fraction of the whole run in [0, 1).
        optimizer: "adamw", "sgd" (momentum 0.9), "lamb", "muon" (see muon.py), or a class as module:Class.
        lr: peak learning rate at `batch_size`.
        lr_images: batch size for which the source states the rate; `override_recipe` then scales `lr` linearly with the
            batch size. None does not scale.
        weight_decay: see `parameter_groups`; in torch.optim.AdamW's convention.
        betas: β₁ and β₂ of AdamW and LAMB.
        layer_decay: see `parameter_groups`.
        lr_scales: see `parameter_groups`.
        schedule: "own" (`warmup_cosine`), "vit", "deit" or "mae", see schedule.py.
        decay: "cosine" or, for "vit", "linear".
        floor: rate at the end, if the schedule has one.
        clip: maximum gradient norm; None does not clip.
        loss: "softmax"; "sigmoid", summed over classes; "bce", as in DeiT III; "pixels" or "colours" of masked patches;
            "likelihood" of models of pixels; "restoration", the mean absolute error of restored images; "detection",
            classes and boxes of a set of objects.
        head_bias: initial value of the head's bias.
        pos_std: standard deviation of initial positions; None keeps the model's 0.02.
        label_smoothing: probability spread evenly over all classes.
        mixup: alpha of the Beta distribution; 0 is off.
        cutmix: alpha, likewise; if both are on, each batch uses one of the two, chosen with probability 1/2.
        mixtoken: alpha of MixToken; cannot be combined with the other two.
        drop_path_rate: stochastic-depth rate of the last block.
        drop_path_constant: use the same rate in every block.
        policy: augmentation: "timm" (rand-m9-mstd0.5-inc1), "three" (3-Augment), "randaug(2,m)" (big_vision) or "".
        erasing: probability of random erasing.
        repeats: copies of each image in repeated augmentation; 1 disables it.
        degrees: largest rotation (for the digits only, like the next three; see `random_affine`).
        zoom: largest relative change of size.
        shear: largest shear.
        shift: largest shift in pixels.
        min_area: smallest fraction of the area in a random crop (not for the digits, like the next).
        flip: mirror each image with probability 1/2.
        ema_decay: decay of the moving average of the weights; None disables it.
        mask_ratio: fraction of the patches to hide, for self-supervised losses.
        norm_pixels: normalise the pixels of each target patch.
        decoder: arguments of `create_model` for a masked autoencoder's decoder.

    Raises:
        ValueError: a value has the wrong type or is outside the range of its annotation, see ranges.py, or conflicts
            with another.
    """

    source: str = ""
    reported: str = ""
    duration: str = ""
    model: str
    options: dict = field(default_factory=dict)
    img_size: ImageSide = 224
    mean: tuple[Probability, ...] = IMAGENET_MEAN
    std: tuple[FractionAbove0, ...] = IMAGENET_STD
    eval_crop: FractionAbove0 = 0.9
    crop_mode: Literal["box", "center", "squash", "border"] = "box"
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bilinear"
    batch_size: PositiveInt
    epochs: Annotated[PositiveInt | None, "a length in steps"] = None
    steps: Annotated[PositiveInt | None, "a length in epochs"] = None
    warmup: NonNegative = 0.05
    warmup_unit: Literal["steps", "epochs", "run"] = "run"
    optimizer: str = "adamw"
    lr: Positive
    lr_images: Annotated[PositiveInt | None, "a rate that does not scale"] = None
    weight_decay: NonNegative = 0.05
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.999)
    layer_decay: FractionAbove0 = 1.0
    lr_scales: dict = field(default_factory=dict)
    schedule: Literal["own", "vit", "deit", "mae"] = "own"
    decay: Literal["cosine", "linear"] = "cosine"
    floor: NonNegative = 0.0
    clip: Annotated[Positive | None, "no clipping"] = None
    loss: Literal["softmax", "sigmoid", "bce", "pixels", "colours", "likelihood", "restoration", "detection"] = (
        "softmax"
    )
    head_bias: Finite = 0.0
    pos_std: Annotated[Positive | None, "the model's own"] = None
    label_smoothing: FractionBelow1 = 0.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    mixtoken: NonNegative = 0.0
    drop_path_rate: FractionBelow1 = 0.0
    drop_path_constant: bool = False
    policy: str = ""
    erasing: Probability = 0.0
    repeats: PositiveInt = 1
    degrees: Degrees = 0.0
    zoom: FractionBelow1 = 0.0
    shear: Probability = 0.0
    shift: NonNegative = 0.0
    min_area: FractionAbove0 = 0.35
    flip: bool = True
    ema_decay: Annotated[FractionBelow1 | None, "no EMA"] = None
    mask_ratio: FractionBelow1 = 0.0
    norm_pixels: bool = False
    decoder: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        policy_by_name(self.policy)
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise ValueError(
                f"optimizer is {self.optimizer!r}; use {', '.join(map(repr, OPTIMIZERS))}, or module:Class"
            )
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}; give one of them")
        if self.mixtoken and (self.mixup or self.cutmix):
            raise ValueError(f"mixtoken is {self.mixtoken} beside mixup or cutmix; set those to 0, or leave it out")
        if self.loss in ("pixels", "colours") and not self.mask_ratio:
            raise ValueError(f"loss is {self.loss!r} and mask_ratio {self.mask_ratio}; hide some patches, such as 0.75")
        if self.loss in ("bce", "sigmoid") and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; loss {self.loss!r} takes none, set it to 0")
        if self.warmup_unit == "run" and not self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it is a fraction of the run, in [0, 1)")
        if self.shift > self.img_size:
            raise ValueError(f"shift is {self.shift}; it is in pixels, use at most img_size, {self.img_size}")
        if wrong := [pattern for pattern, factor in self.lr_scales.items() if not 0 <= factor < math.inf]:
            raise ValueError(f"lr_scales is {self.lr_scales}; the factor of {wrong[0]!r} has to be a number from 0")
        if not self.lr * self.weight_decay < 1:
            raise ValueError(
                f"weight_decay is {self.weight_decay} and lr {self.lr}; their product is the "
                "fraction of each weight that a step subtracts, keep it below 1"
            )
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}; give both the same")

    def epochs_of(self, steps_per_epoch: int) -> int:
        """Length of the run in epochs, for a data set of `steps_per_epoch` batches."""
        if self.steps is not None:
            return math.ceil(self.steps / steps_per_epoch)
        assert self.epochs is not None  # one of them is given
        return self.epochs


def override_recipe(recipe: Recipe, **given: Any) -> Recipe:
    """A copy of a recipe with some fields changed, and dependent values (warm-up, learning rate) rescaled.

    With another run length or batch size, the warm-up keeps its fraction of the published run on ImageNet; with another
    batch size, a learning rate with `lr_images` scales linearly. Values passed explicitly are not rescaled.

    Args:
        recipe: recipe to change.
        **given: new values of fields of `Recipe`.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """
    check_fields(Recipe, given)
    if {"epochs", "steps", "batch_size"} & given.keys() and "warmup" not in given and recipe.warmup_unit != "run":
        per_epoch = IMAGENET_TRAIN_IMAGES // recipe.batch_size
        length = recipe.steps or recipe.epochs_of(per_epoch) * per_epoch
        given |= dict(warmup=recipe.warmup * (per_epoch if recipe.warmup_unit == "epochs" else 1) / length)
    if "warmup" in given:
        given |= dict(warmup_unit="run")
    if "epochs" in given:
        given |= dict(steps=None)
    if "batch_size" in given and "lr" not in given and recipe.lr_images:
        given |= dict(lr=recipe.lr * given["batch_size"] / recipe.batch_size)
    return replace(recipe, **given)


# Chosen by benchmarks/trainings.py, mean validation accuracy over five seeds: benchmarks/results/trainings.json.
# pos_std 0.5 instead of the usual 0.02 gained three points.
DIGITS = Recipe(
    model="vit_digits_patch2_8",
    img_size=8,
    epochs=100,
    batch_size=64,
    lr=2e-3,
    pos_std=0.5,
    label_smoothing=0.1,
    mixup=0.4,
    clip=1.0,
    degrees=15,
    zoom=0.15,
    shear=0.15,
    shift=0.5,
)

# The default for images without --model or --weights: random weights, a few hundred photos, a CPU. LeViT's convolutions
# learn from fewer images than a plain ViT, and a step at 128 pixels computes less than one of FOLDER.
# docs/tutorials/photos.md has what it reached; nothing was searched beyond model and size.
PHOTOS = Recipe(
    model="levit_128s",
    img_size=128,
    epochs=30,
    batch_size=32,
    lr=1e-3,
    label_smoothing=0.1,
    mixup=0.2,
    clip=1.0,
)

# For image folders with --model or --weights, after DeiT (arXiv:2012.12877, table 9); its accuracy was not measured.
FOLDER = Recipe(
    model="vit_tiny_patch16_224",
    epochs=50,
    batch_size=64,
    lr=5e-4,
    label_smoothing=0.1,
    mixup=0.2,
    clip=1.0,
    drop_path_rate=0.1,
)

# For Fashion-MNIST's IDX files; trained by benchmarks/trainings.py: results/trainings.json. Rate, positions and
# clipping are those of the digits; nothing was searched.
FASHION_MNIST = Recipe(
    model="vit_digits_patch2_8",
    options={"patch_size": 7, "embed_dim": 64, "depth": 4, "num_heads": 2},
    img_size=28,
    mean=(0.2860,),
    std=(0.3530,),
    eval_crop=1.0,
    epochs=6,
    batch_size=128,
    lr=2e-3,
    warmup=0.1,
    pos_std=0.5,
    clip=1.0,
    min_area=0.7,
)

# For a small iGPT on grey images, such as Fashion-MNIST's: docs/pixels.md has what it reached. Nothing was searched.
PIXELS = Recipe(
    model="igpt_digits",
    img_size=14,
    mean=(0.5,),
    std=(0.5,),
    eval_crop=1.0,
    interpolation="box",
    batch_size=32,
    epochs=1,
    warmup=0.25,
    lr=3e-3,
    weight_decay=0.01,
    betas=(0.9, 0.95),
    clip=1.0,
    loss="likelihood",
    min_area=1.0,
    flip=False,
)

# For a small IPT on tiles of photographs of 48 pixels a side: docs/pixels.md has what it reached.
RESTORATION = Recipe(
    model="ipt_digits",
    img_size=48,
    mean=(0.0,) * 3,
    std=(1.0,) * 3,
    eval_crop=1.0,
    batch_size=16,
    epochs=7,
    warmup=0.05,
    lr=1e-3,
    weight_decay=0.01,
    clip=1.0,
    loss="restoration",
    min_area=1.0,
)

# For scenes of digits, by a small Deformable DETR; trained by benchmarks/trainings.py: results/trainings.json, AP 73 %
# in 1,600 steps. Nothing was searched.
SCENES = Recipe(
    model="deformable_detr_digits",
    img_size=32,
    mean=(0.0,),
    std=(1.0,),
    batch_size=32,
    epochs=4,
    lr=1e-3,
    weight_decay=1e-4,
    clip=0.5,
    loss="detection",
)

# The same by a small DETR, which needs three times as many steps: AP 69 % in 4,800.
SCENES_DETR = replace(SCENES, model="detr_digits", epochs=12, clip=0.1)

# For folders with boxes: rates, batch and length of Deformable DETR (arXiv:2010.04159, section 5.1), with a cosine
# instead of a drop after 40 epochs; its average precision was not measured.
BOXES = Recipe(
    model="deformable_detr_resnet50",
    img_size=800,
    batch_size=32,
    epochs=50,
    warmup=0.01,
    lr=2e-4,
    lr_scales={"^backbone|reference_points|sampling_offsets": 0.1},
    weight_decay=1e-4,
    clip=0.1,
    loss="detection",
)

# For folders with boxes without --model or --weights: random weights, a CPU. Model and rate are those for shapes, the
# batch is half of theirs, for folders of few images; its average precision on photographs was not measured.
BOXES_TINY = Recipe(
    model="deformable_detr_tiny",
    img_size=256,
    batch_size=8,
    epochs=50,
    lr=1e-3,
    weight_decay=1e-4,
    clip=1.0,
    ema_decay=0.995,
    loss="detection",
)

# For pictures of coloured shapes; trained by benchmarks/trainings.py: results/trainings.json, AP 82 %
# in 1,050 steps. Nothing was searched.
SHAPES = replace(BOXES_TINY, img_size=192, batch_size=16, epochs=7)
