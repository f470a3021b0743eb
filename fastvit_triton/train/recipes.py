"""How to train, as data. What was measured says so; what was not says that too."""

import math
from dataclasses import dataclass, field, replace

from .image import IMAGENET_MEAN, IMAGENET_STD


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
    """

    source: str = ""
    reported: str = ""
    duration: str = ""
    model: str
    options: dict = field(default_factory=dict)
    img_size: int = 224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    eval_crop: float = 0.9
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    warmup: float = 0.05
    warmup_unit: str = "run"
    optimizer: str = "adamw"
    lr: float
    lr_images: int | None = None
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 1.0
    schedule: str = "own"
    decay: str = "cosine"
    floor: float = 0.0
    clip: float | None = None
    loss: str = "softmax"
    head_bias: float = 0.0
    pos_std: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixtoken: float = 0.0
    drop_path_rate: float = 0.0
    drop_path_constant: bool = False
    policy: str = ""
    erasing: float = 0.0
    repeats: int = 1
    degrees: float = 0.0
    zoom: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    min_area: float = 0.35
    flip: bool = True
    average: float | None = None
    mask_ratio: float = 0.0
    norm_pixels: bool = False
    decoder: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}; give one of them")
        for name in ("img_size", "epochs", "steps", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.mixtoken and (self.mixup or self.cutmix):
            raise ValueError(f"mixtoken is {self.mixtoken} beside mixup or cutmix; set those to 0, or leave it out")
        if self.loss in ("pixels", "colours") and not 0 < self.mask_ratio < 1:
            raise ValueError(f"loss is {self.loss!r} and mask_ratio {self.mask_ratio}; hide a part, such as 0.75")
        if self.loss in ("bce", "sigmoid") and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; loss {self.loss!r} takes none, set it to 0")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}; it must be above 0, such as 0.001")
        if self.warmup_unit == "run" and not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it is a part of the run, in [0, 1)")

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
    """
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
