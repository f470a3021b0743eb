"""The training loop, all of it, and the evaluation that goes with it. Any module, any batches, any optimiser."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .optim import set_lr


@dataclass(frozen=True)
class Score:
    """What a model made of a test set: mean loss (nats), accuracy in [0, 1], predictions [N] and targets [N]."""

    loss: float
    accuracy: float
    predictions: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step; the last report of an epoch is `done`, with the `test` score if one was due.

    `loss` and `accuracy` are means over the epoch so far, 0-d tensors on the model's device: reading one waits for it.
    `epoch` and `step` count from 1, `images` counts within the epoch, `seconds` is training time in the epoch.
    """

    epoch: int
    step: int
    images: int
    loss: Tensor
    accuracy: Tensor
    lr: float
    seconds: float
    done: bool = False
    test: Score | None = None


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    test_batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    lr_at: Callable[[int], float],
    *,
    epochs: int,
    start: int = 0,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    clip: float | None = None,
    amp: torch.dtype | None = None,
    test_once: bool = False,
) -> Iterator[Progress]:
    """Trains, one step per `next`, and evaluates after every epoch, or after the last one only.

    A generator, so that the caller draws the bar, writes the log and saves the checkpoint in plain sight, between two
    steps. All randomness is PyTorch's global generator: restore its state with the weights' and optimiser's, pass
    `start`, and the rest of the run is the same to the last bit. Refuses to go on from a loss that is not finite.

    Args:
        model: any module from images [B, C, H, W] to logits [B, classes].
        batches: (images [B, C, H, W], targets [B]); iterated once per epoch, and has a length.
        test_batches: the same, without augmentation.
        optimizer: over the model's parameters.
        lr_at: step of the whole run, from 0, to learning rate.
        epochs: where to stop.
        start: epochs already done.
        loss: of logits [B, classes] and targets, [B] or after `mix` [B, classes].
        mix: blends a batch, such as `mixup`.
        clip: largest gradient norm; None does not clip.
        amp: autocast dtype, such as torch.bfloat16; None computes in the weights' dtype.
        test_once: evaluate after the last epoch only: a test split that nothing may be chosen by is read once.
    """
    device = next(model.parameters()).device
    for epoch in range(start, epochs):
        model.train()
        began, images_seen = time.perf_counter(), 0
        loss_sum, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for step, (images, targets) in enumerate(batches):
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            if mix is not None:
                images, targets = mix(images, targets)
            lr = lr_at(epoch * len(batches) + step)
            set_lr(optimizer, lr)

            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = model(images)
            value = loss(logits.float(), targets)
            optimizer.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

            images_seen += len(images)
            loss_sum += value.detach() * len(images)
            right += agreement(logits.detach(), targets)
            state = dict(epoch=epoch + 1, step=step + 1, images=images_seen, lr=lr, seconds=time.perf_counter() - began)
            yield Progress(loss=loss_sum / images_seen, accuracy=right / images_seen, **state)
        if not images_seen:
            raise ValueError("there is no training image left to learn from")
        if not math.isfinite(loss_sum.item()):
            raise ValueError(f"the loss is {loss_sum.item()} in epoch {epoch + 1}; lower lr, now {lr:.2g}")
        state["seconds"] = time.perf_counter() - began
        due = not test_once or epoch + 1 == epochs
        test = evaluate(model, test_batches, amp) if due else None
        yield Progress(loss=loss_sum / images_seen, accuracy=right / images_seen, done=True, test=test, **state)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], amp: torch.dtype | None = None) -> Score:
    """Mean cross-entropy and accuracy of a model, which is left in the mode it came in.

    The same weights and batches give the same score on the same machine. Refuses batches without a single image.

    Args:
        model: any module from images [B, C, H, W] to logits [B, classes].
        batches: (images [B, C, H, W], targets [B]).
        amp: autocast dtype; None computes in the weights' dtype.
    """
    device, modes = next(model.parameters()).device, {module: module.training for module in model.modules()}
    model.eval()
    losses, predictions, answers = [], [], []
    try:
        for images, targets in batches:
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = model(images.to(device, non_blocking=True)).float()
            losses.append(F.cross_entropy(logits, targets.to(device), reduction="none"))
            predictions.append(logits.argmax(1))
            answers.append(targets)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not predictions:
        raise ValueError("there is no test image to evaluate on")
    predicted, expected = torch.cat(predictions).cpu(), torch.cat(answers).cpu()
    accuracy = (predicted == expected).sum().item() / len(expected)
    return Score(torch.cat(losses).double().mean().item(), accuracy, predicted, expected)


def agreement(logits: Tensor, targets: Tensor) -> Tensor:
    """How many answers are right; of blended targets [B, classes], the share that the answer has in them."""
    answers = logits.argmax(1)
    return (answers == targets).sum() if targets.ndim == 1 else targets.gather(1, answers[:, None]).sum()
