"""One update of the weights: blend, differentiate part by part, clip, step, average."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from .accumulate import accumulate
from .objective import Objective, supervised
from .parallel import World
from .ranges import Count, Positive, check_fields, checked


@dataclass(frozen=True, kw_only=True)
class Step:
    """What happens to one batch. Each part is a function or an object; None leaves it out.

    A loss that is not finite changes nothing: no weight, no statistic of the optimiser, no average.

    Attributes:
        objective: the loss of (model, images, targets), see objective.py.
        mix: blends a batch, such as `mixup`; targets [B] may become [B, classes].
        parts: pieces in which the gradient is taken, each with its own activations; the update is that of the whole.
        amp: autocast dtype, such as torch.bfloat16; None computes in the weights' dtype.
        scaler: for float16, whose small gradients vanish; a disabled one does nothing.
        clip: largest gradient norm.
        average: a slow copy that follows the weights, from `moving_average`.
        world: processes that share a batch; the update is that of the whole.
        dealt: the batches hold this process's part already, and are blended each in itself; else they are cut here.
    """

    objective: Objective = field(default_factory=lambda: supervised(F.cross_entropy))
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    parts: Count = 1
    amp: torch.dtype | None = None
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", enabled=False))
    clip: Annotated[Positive | None, "no clipping"] = None
    average: AveragedModel | None = None
    world: World = field(default_factory=World)
    dealt: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, images: Tensor, targets: Tensor, key: int = 0
    ) -> tuple[Tensor, Tensor, int]:
        """One update.

        Args:
            model: in training mode.
            optimizer: over its parameters, with this step's rate.
            images: [B, C, H, W].
            targets: [B].
            key: fixes what a model draws where it is trained on several processes.

        Returns:
            The loss, how many answers were right (nan where nothing is answered), 0-d tensors, and how many images
            there were, on all processes.
        """
        world = self.world
        if not self.dealt:  # blended as one process would, then cut
            images, targets = (images, targets) if self.mix is None else self.mix(images, targets)
            images, targets = world.part(images), world.part(targets)
        with world.own(key):
            count = images.shape[0]
            if not count:  # engines need everybody: an image that weighs nothing
                images, targets = images.new_zeros(1, *images.shape[1:]), targets.new_zeros(1, *targets.shape[1:])
            if self.dealt and self.mix is not None:
                images, targets = self.mix(images, targets)
            optimizer.zero_grad()
            parts = min(self.parts, world.least(images.shape[0]) if self.parts > 1 else 1)
            weight = world.mean_of(torch.ones((), device=images.device), count)
            value, logits = accumulate(model, self.objective, images, targets, parts, self.amp, self.scaler, weight)
        right = torch.full((), torch.nan) if logits is None else agreement(logits, targets)
        if world.size > 1:
            sums = [total.to(value) * (count > 0) for total in (value * count, right)]
            total, right, images_seen = world.sum(torch.stack([*sums, value.new_tensor(count)]))
            value, count = total / images_seen, int(images_seen)
        if not value.isfinite():
            return value, right, count
        if self.clip is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update_parameters(model)
        return value, right, count

    def weights(self, model: nn.Module) -> nn.Module:
        """What is evaluated and saved: the average where one is kept, else the model."""
        return model if self.average is None else self.average.module


def agreement(logits: Tensor, targets: Tensor) -> Tensor:
    """How many answers are right; of blended targets [B, classes], the share that the answer has in them."""
    answers = logits.argmax(1)
    return (answers == targets).sum() if targets.ndim == 1 else targets.gather(1, answers[:, None]).sum()


@checked
def half(device: torch.device, name: Literal["auto", "bfloat16", "float16", "float32"] = "auto") -> torch.dtype | None:
    """The autocast dtype of training and evaluation.

    Args:
        device: where the model is.
        name: "auto" (bfloat16 where a GPU has it, none elsewhere), "bfloat16", "float16" or "float32" for none.
    """
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}[name]
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
