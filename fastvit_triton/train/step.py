"""One optimiser step: mix the batch, accumulate gradients over micro-batches, clip, update the weights and the EMA."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from .batch import blank_target, divide
from .distributed import World
from .distributed.parallel import gradient_sync
from .objective import Objective, supervised
from .ranges import Positive, PositiveInt, check_fields, checked


class StepResult(NamedTuple):
    """Result of one step, over all ranks.

    Attributes:
        loss: mean over the batch, a 0-d tensor on the model's device.
        correct: number of correct predictions, a 0-d tensor; NaN if the objective has no logits.
        images: number of images in the batch.
    """

    loss: Tensor
    correct: Tensor
    images: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step on one batch. Optional components are None when they are off.

    If the loss is not finite, weights, optimiser state and EMA are unchanged.

    Attributes:
        objective: (model, images, targets) → (loss, logits or None), see objective.py.
        mix: blends a batch, such as `mixup`; targets [B] may become [B, classes].
        grad_accum_steps: number of micro-batches; the update equals that of the whole batch.
        amp: autocast dtype, such as torch.bfloat16; None computes in the weights' dtype.
        scaler: loss scaling for float16; a disabled scaler does nothing.
        clip: maximum gradient norm; None does not clip.
        ema: moving average of the weights, from `ema_model`.
        world: processes that share each batch; the update equals that of the whole batch.
        per_rank_batches: batches hold this rank's images only, and `mix` blends within the rank; if False all ranks get
            the whole batch, mix it identically, and take their slices.
    """

    objective: Objective = field(default_factory=lambda: supervised(F.cross_entropy))
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    grad_accum_steps: PositiveInt = 1
    amp: torch.dtype | None = None
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    clip: Annotated[Positive | None, "no clipping"] = None
    ema: AveragedModel | None = None
    world: World = field(default_factory=World)
    per_rank_batches: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, images: Tensor, targets: Any, key: int = 0
    ) -> StepResult:
        """Runs one step."""
        world = self.world
        if not self.per_rank_batches:  # mix the whole batch as one process would, then slice
            images, targets = (images, targets) if self.mix is None else self.mix(images, targets)
            images = world.shard(images)
            targets = world.shard(targets)
        with world.rank_rng(key):
            count = images.shape[0]
            if not count:  # collectives need every rank: one dummy image with weight 0
                images = images.new_zeros(1, *images.shape[1:])
                targets = blank_target(targets)
            if self.per_rank_batches and self.mix is not None:
                images, targets = self.mix(images, targets)
            optimizer.zero_grad()
            micro = self.grad_accum_steps
            micro = min(micro, world.all_reduce_min(images.shape[0]) if micro > 1 else 1)
            weight = world.rescale_mean(torch.ones((), device=images.device), count)
            loss, logits = accumulate_gradients(
                model, self.objective, images, targets, micro, self.amp, self.scaler, weight
            )
        correct = torch.full((), torch.nan) if logits is None else count_correct(logits, targets)
        if world.world_size > 1:
            sums = [total.to(loss) * (count > 0) for total in (loss * count, correct)]
            total, correct, all_images = world.all_reduce_sum(torch.stack([*sums, loss.new_tensor(count)]))
            loss = total / all_images
            count = int(all_images)
        if not loss.isfinite():
            return StepResult(loss, correct, count)
        if self.clip is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(model)
        return StepResult(loss, correct, count)

    def eval_model(self, model: nn.Module) -> nn.Module:
        """The model to evaluate and save: the EMA if there is one, else `model`."""
        return model if self.ema is None else self.ema.module


@checked
def accumulate_gradients(
    model: nn.Module,
    objective: Objective,
    images: Tensor,
    targets: Any,
    grad_accum_steps: PositiveInt = 1,
    amp: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    weight: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradient accumulation over micro-batches: adds the whole batch's gradient to `.grad`, up to rounding.

        ∇ L(batch) = Σ_m (B_m / B) ∇ L(micro-batch m)

    This holds for every loss that is a mean over images and for any micro-batch sizes, but not for models in which
    images interact: BatchNorm uses the statistics of each micro-batch. Only one micro-batch's activations are in memory
    at a time. Mix before and clip afterwards: both need the whole batch.

    Args:
        model: from images [B, C, H, W] to the objective's input, such as logits [B, classes].
        objective: see objective.py.
        images: [B, C, H, W].
        targets: [B], [B, classes], or a list of B dicts.
        grad_accum_steps: number of micro-batches, at most B; sizes differ by at most one.
        amp: autocast dtype; None computes in the weights' dtype.
        scaler: loss scaling for float16; None does not scale.
        weight: factor of this rank's loss, from `World.rescale_mean`.

    Returns:
        The loss of the whole batch, a scalar, and its logits [B, classes] or None; both detached.

    Raises:
        ValueError: there are more micro-batches than images, or fewer than one.
    """
    count = images.shape[0]
    if grad_accum_steps > count:
        raise ValueError(f"grad_accum_steps is {grad_accum_steps} for {count} images; use at most the number of images")
    total = torch.zeros((), device=images.device)
    outputs = list[Any]()
    pairs = zip(images.tensor_split(grad_accum_steps), divide(targets, grad_accum_steps), strict=True)
    for number, (micro_images, micro_targets) in enumerate(pairs, 1):
        with gradient_sync(model, number == grad_accum_steps):
            with torch.autocast(images.device.type, amp, enabled=amp is not None):
                loss, logits = _applied(objective, model, micro_images, micro_targets)
            loss = loss * (micro_images.shape[0] / count)
            (loss * weight if scaler is None else scaler.scale(loss * weight)).backward()
        total = total + loss.detach()
        outputs.append(None if logits is None else logits.detach())
    return total, None if None in outputs else torch.cat(outputs)


def _applied(objective: Objective, model: nn.Module, images: Tensor, targets: Any) -> tuple[Tensor, Tensor | None]:
    """The objective; raises ValueError with the remedy if BatchNorm has a single value of each channel."""
    try:
        return objective(model, images, targets)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        remedy = "raise batch_size, or lower grad_accum_steps or the number of processes"
        raise ValueError(f"BatchNorm needs two images or more at a time, and got {len(images)}; {remedy}") from error


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of correct predictions; for soft targets [B, classes], the sum of the predicted classes' probabilities."""
    predictions = logits.argmax(1)
    return (predictions == targets).sum() if targets.ndim == 1 else targets.gather(1, predictions[:, None]).sum()


@checked
def autocast_dtype(
    device: torch.device, name: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
) -> torch.dtype | None:
    """The autocast dtype for training and evaluation; None means no autocast."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}[name]
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
