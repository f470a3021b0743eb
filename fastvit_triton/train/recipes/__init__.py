"""How to train, as data. What was measured says so; what was not says that too."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from .image import IMAGENET_MEAN, IMAGENET_STD
from .policy import policy_of
from .ranges import Count, Finite, NotNegative, Part, Positive, Probability, Share, Side, Turn, check_fields


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run needs besides images.

    Attributes:
        source: where the numbers are stated; "" for our own.
        reported: top-1 accuracy in % that the source reports, and for what; "" where it names none.
        duration: what the source says it takes; "" where it does not.
        model: a name for `create_model`.
        options: further arguments of `create_model`, dropout among them.
        img_size: image side in pixels.
        mean: per channel, of pixels in [0, 1]; images of a folder are normalised by it.
        std: per channel.
        eval_crop: the centre part of a picture's shorter side that is tested.
        batch_size: images per step, all machines together.
        epochs: length, or None where steps are counted.
        steps: length, or None where epochs are counted; the last epoch is finished at the last step's rate.
        warmup: before the peak, in `warmup_unit`.
        warmup_unit: "steps", "epochs" or "run", a part of the whole run in [0, 1).
        optimizer: "adamw", "sgd" (momentum 0.9) or "lamb".
        lr: peak rate, already scaled to the batch.
        lr_images: images per step for which the source states its rate, which then grows in proportion; None where it
            does not.
        weight_decay: of matrices only, in torch.optim.AdamW's convention.
        betas: of AdamW and LAMB.
        layer_decay: see `parameter_groups`.
        schedule: "own" (`warmup_cosine`), "vit", "deit" or "mae", see schedule.py.
        decay: "cosine" or, for "vit", "linear".
        floor: rate at the end, where the schedule has one.
        clip: largest gradient norm; None does not clip.
        loss: "softmax"; "sigmoid", summed over classes; "bce", DeiT III's; "pixels" or "colours", of masked patches.
        head_bias: what the head's bias starts with.
        pos_std: deviation of learned positions at the start; None leaves the model's own, 0.02.
        label_smoothing: probability spread evenly over all classes.
        mixup: alpha of the Beta distribution; 0 is off.
        cutmix: alpha; where both are on each batch gets one of the two, evenly.
        mixtoken: alpha, in place of the other two.
        drop_path_rate: stochastic depth of the last block.
        drop_path_constant: the same rate in every block.
        policy: "timm" (rand-m9-mstd0.5-inc1), "three", "randaug(2,m)" (big_vision's own operations) or "".
        erasing: probability of random erasing.
        repeats: looks at each image in an epoch of repeated augmentation; 1 is off.
        degrees: largest rotation (digits only, like the next three; see `random_affine`).
        zoom: largest relative change of size.
        shear: largest shear.
        shift: largest shift in pixels.
        min_area: smallest part of a picture's area in a random crop (not of the digits, like the next).
        flip: mirror half of the pictures.
        average: decay of the moving average; None keeps none.
        mask_ratio: part of the patches that is hidden from a model that must predict them.
        norm_pixels: normalise each patch that must be predicted.
        decoder: sizes of a masked autoencoder's decoder, arguments of `create_model`.

    Raises:
        ValueError: a value is of another type or outside of the range that its annotation states, see ranges.py, or
            does not go with another.
    """

    source: str = ""
    reported: str = ""
    duration: str = ""
    model: str
    options: dict = field(default_factory=dict)
    img_size: Side = 224
    mean: tuple[Probability, ...] = IMAGENET_MEAN
    std: tuple[Part, ...] = IMAGENET_STD
    eval_crop: Part = 0.9
    batch_size: Count
    epochs: Annotated[Count | None, "a length in steps"] = None
    steps: Annotated[Count | None, "a length in epochs"] = None
    warmup: NotNegative = 0.05
    warmup_unit: Literal["steps", "epochs", "run"] = "run"
    optimizer: Literal["adamw", "sgd", "lamb"] = "adamw"
    lr: Positive
    lr_images: Annotated[Count | None, "a rate for any batch"] = None
    weight_decay: NotNegative = 0.05
    betas: tuple[Share, Share] = (0.9, 0.999)
    layer_decay: Part = 1.0
    schedule: Literal["own", "vit", "deit", "mae"] = "own"
    decay: Literal["cosine", "linear"] = "cosine"
    floor: NotNegative = 0.0
    clip: Annotated[Positive | None, "no clipping"] = None
    loss: Literal["softmax", "sigmoid", "bce", "pixels", "colours"] = "softmax"
    head_bias: Finite = 0.0
    pos_std: Annotated[Positive | None, "the model's own"] = None
    label_smoothing: Share = 0.0
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    mixtoken: NotNegative = 0.0
    drop_path_rate: Share = 0.0
    drop_path_constant: bool = False
    policy: str = ""
    erasing: Probability = 0.0
    repeats: Count = 1
    degrees: Turn = 0.0
    zoom: Share = 0.0
    shear: Probability = 0.0
    shift: NotNegative = 0.0
    min_area: Part = 0.35
    flip: bool = True
    average: Annotated[Share | None, "no average"] = None
    mask_ratio: Share = 0.0
    norm_pixels: bool = False
    decoder: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        policy_of(self.policy)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}; give one of them")
        if self.mixtoken and (self.mixup or self.cutmix):
            raise ValueError(f"mixtoken is {self.mixtoken} beside mixup or cutmix; set those to 0, or leave it out")
        if self.loss in ("pixels", "colours") and not self.mask_ratio:
            raise ValueError(f"loss is {self.loss!r} and mask_ratio {self.mask_ratio}; hide a part, such as 0.75")
        if self.loss in ("bce", "sigmoid") and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; loss {self.loss!r} takes none, set it to 0")
        if self.warmup_unit == "run" and not self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it is a part of the run, in [0, 1)")
        if self.shift > self.img_size:
            raise ValueError(f"shift is {self.shift}; it is in pixels, use at most img_size, {self.img_size}")
        if not self.lr * self.weight_decay < 1:
            raise ValueError(
                f"weight_decay is {self.weight_decay} and lr {self.lr}; a step takes their product off each weight, "
                "keep it below 1"
            )
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}; give both the same")

    def epochs_of(self, steps_per_epoch: int) -> int:
        """Passes over a data set of so many steps."""
        return self.epochs or math.ceil(self.steps / steps_per_epoch)


IMAGENET = 1_281_167  # training images of ILSVRC-2012, what the published recipes were made for


def shorten(recipe: Recipe, **given: object) -> Recipe:
    """A recipe with some numbers changed, and what hangs on them kept in proportion.

    A run of another length or batch warms up for the same part of it as the published one did on ImageNet, and where
    the source states its rate for so many images a batch of another size gets its share. What is given stands.

    Args:
        recipe: to start from.
        **given: fields of `Recipe`.

    Raises:
        ValueError: a value is of another type than its field, or outside of its range.
    """
    check_fields(Recipe, given)
    if {"epochs", "steps", "batch_size"} & given.keys() and "warmup" not in given and recipe.warmup_unit != "run":
        per_epoch = IMAGENET // recipe.batch_size
        length = recipe.steps or recipe.epochs * per_epoch
        given |= dict(warmup=recipe.warmup * (per_epoch if recipe.warmup_unit == "epochs" else 1) / length)
    if "warmup" in given:
        given |= dict(warmup_unit="run")
    if "epochs" in given:
        given |= dict(steps=None)
    if "batch_size" in given and "lr" not in given and recipe.lr_images:
        given |= dict(lr=recipe.lr * given["batch_size"] / recipe.batch_size)
    return replace(recipe, **given)


# Chosen by benchmarks/digits.py, mean validation accuracy over five seeds: benchmarks/results/digits-recipe.json.
# Positions as large as the patches' own signal are what 16 tokens of 4 pixels need most.
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

# A start for pictures of one's own, after DeiT's choices (arXiv:2012.12877, table 9); no accuracy was measured with it.
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
