"""How to train, as data. What was measured says so; what was not says that too."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run needs besides images.

    Attributes:
        model: a name for `create_model`.
        img_size: image side in pixels.
        epochs: passes over the training images.
        batch_size: images per step.
        lr: peak learning rate of AdamW.
        weight_decay: of matrices only.
        warmup: part of the run before the peak.
        drop_path_rate: stochastic depth of the last block.
        pos_std: deviation of learned positions at the start; None leaves the model's own, 0.02.
        label_smoothing: probability spread evenly over all classes.
        mixup: alpha of the Beta distribution; 0 is off.
        clip: largest gradient norm.
        degrees: largest rotation (digits only, like the next three; see `random_affine`).
        zoom: largest relative change of size.
        shear: largest shear.
        shift: largest shift in pixels.
        min_area: smallest part of a picture's area in a random crop (image folders only, like the next).
        flip: mirror half of the pictures.
    """

    model: str
    img_size: int
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 0.05
    warmup: float = 0.05
    drop_path_rate: float = 0.0
    pos_std: float | None = None
    label_smoothing: float = 0.1
    mixup: float = 0.0
    clip: float = 1.0
    degrees: float = 0.0
    zoom: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    min_area: float = 0.35
    flip: bool = True

    def __post_init__(self) -> None:
        for field in ("img_size", "epochs", "batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}; it must be above 0, such as 0.001")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it is a part of the run, in [0, 1)")


# Chosen by benchmarks/digits.py, mean validation accuracy over five seeds: benchmarks/results/digits-recipe.json.
# Positions as large as the patches' own signal are what 16 tokens of 4 pixels need most.
DIGITS = Recipe(
    model="vit_digits_patch2_8",
    img_size=8,
    epochs=100,
    batch_size=64,
    lr=2e-3,
    pos_std=0.5,
    mixup=0.4,
    degrees=15,
    zoom=0.15,
    shear=0.15,
    shift=0.5,
)

# A start for pictures of one's own, after DeiT's choices (arXiv:2012.12877, table 9); no accuracy was measured with it.
FOLDER = Recipe(
    model="vit_tiny_patch16_224", img_size=224, epochs=50, batch_size=64, lr=5e-4, drop_path_rate=0.1, mixup=0.2
)
