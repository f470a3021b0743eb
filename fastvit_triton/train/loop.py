"""The training loop and evaluation, for any module, batches and optimiser."""

import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .batch import blank_target, to_device
from .distributed import World
from .objective import Objective
from .optim import set_lr
from .ranges import PositiveInt, checked
from .rng import get_rng_state, set_rng_state
from .step import Step


@dataclass(frozen=True)
class Score:
    """Result of an evaluation. Self-supervised models have a loss only; the other fields are None.

    Attributes:
        loss: mean over images; cross-entropy is in nats.
        accuracy: in [0, 1].
        predictions: class numbers [N], on the CPU.
        targets: class numbers [N], on the CPU.
        top5: share of images whose class is among those of the five largest logits.
        confidences: probabilities of the predicted classes [N], on the CPU.
        metrics: in [0, 1], the most important one first: of detectors `ap`, `ap50` and `ap75`, for each of which the
            log has a column `test_…`, and which are None if there are no objects to find, and `ap_low` and `ap_high`,
            the bounds of a 95 % interval, see `average_precision`; of models that give each pixel a class `miou` and
            `pixel_accuracy`.
        detections: of detectors: for each image `boxes` [n, 4], corners in pixels, `labels` [n] and `scores` [n].
        objects: of detectors: what is in the images, as `average_precision` takes it.
    """

    loss: float
    accuracy: float | None = None
    predictions: Tensor | None = None
    targets: Tensor | None = None
    top5: float | None = None
    confidences: Tensor | None = None
    metrics: Mapping[str, float | None] | None = None
    detections: list[dict[str, Tensor]] | None = None
    objects: list[dict[str, Tensor]] | None = None

    @property
    def images(self) -> int | None:
        """Number of test images that a classifier's accuracy or a detector's precision is of; None of other models."""
        scored = self.targets if self.objects is None else self.objects
        return None if scored is None else len(scored)

    @property
    def mark(self) -> float | None:
        """What a progress display shows: the accuracy, or the first of `metrics`; None without either."""
        return self.accuracy if self.metrics is None else next(iter(self.metrics.values()))


@dataclass(frozen=True)
class Progress:
    """State of the training loop after a step. Pass it to `fit` as `start` to resume.

    `fit` yields one after each step and another, with `done` set, at the end of each epoch.

    Attributes:
        epoch: from 1.
        step: within the epoch, from 1.
        images: number of images trained on in this epoch.
        loss_sum: sum of losses over these images, a 0-d tensor on the model's device.
        correct: number of correct predictions among them, likewise a 0-d tensor.
        lr: learning rate of the step.
        seconds: training time in this epoch.
        epoch_rng: state of the random generators at the start of the epoch; None when the epoch is done.
        done: the epoch is complete.
        test: score on the test images, if the epoch is done and an evaluation was due.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    loss_sum: Tensor | Any = 0.0
    correct: Tensor | Any = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    epoch_rng: dict | None = None
    done: bool = True
    test: Score | None = None

    @property
    def loss(self) -> Tensor:
        """Mean loss over the epoch so far, a 0-d tensor; reading its value waits for the device."""
        return self.loss_sum / self.images

    @property
    def accuracy(self) -> Tensor:
        """Mean training accuracy over the epoch so far, a 0-d tensor; NaN for self-supervised models."""
        return self.correct / self.images


class _Batches(Protocol):
    """Batches with a length."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Diverged(ValueError):
    """The loss was not finite in too many consecutive steps."""


@checked
def fit(
    model: nn.Module,
    batches: _Batches,
    optimizer: Optimizer,
    lr_at: Callable[[int], float],
    *,
    epochs: PositiveInt,
    start: Progress | None = None,
    step: Step | None = None,
    test: Callable[[nn.Module], Score],
    test_once: bool = False,
    patience: PositiveInt = 10,
    frozen: Sequence[nn.Module] = (),
) -> Iterator[Progress]:
    """Trains a model: a generator that runs one step per `next` and evaluates after every epoch or after the last one.

    The caller draws the progress bar, writes the log and saves checkpoints between steps. All random numbers come from
    PyTorch's global generators. If generators, weights and optimiser are restored and the `Progress` is passed as
    `start`, the rest of the run is bitwise the same, even from the middle of an epoch.

    Args:
        model: called by the step's objective; by default from images [B, C, H, W] to logits [B, classes].
        batches: yields (images [B, C, H, W], targets [B]); has a length and is iterated once per epoch. Optional:
            `iter_from(n)`, which iterates without the first n batches, and `indices`, the images of the last batch.
        optimizer: over the model's parameters.
        lr_at: function from the global step, starting at 0, to the learning rate.
        epochs: total number of epochs.
        start: progress of the run to resume; None starts a new run.
        step: one optimiser step; None minimises cross-entropy.
        test: scores a model, such as `partial(evaluate, batches=…)`; it is called with the EMA if there is one.
        test_once: evaluate only after the last epoch.
        patience: consecutive steps with a non-finite loss before the run stops; these steps change nothing.
        frozen: modules that stay in evaluation mode, such as those of `freeze_backbone`.

    Raises:
        ValueError: there are no images.
        Diverged: the loss was not finite in `patience` consecutive steps, or in a whole epoch.
    """
    step = step or Step()
    now = start or Progress()
    failures = 0
    device = next(model.parameters()).device
    while now.epoch < epochs or not now.done:
        model.train()
        for module in frozen:
            module.training = False
        if now.done:
            zero = torch.zeros((), device=device)
            now = Progress(now.epoch + 1, loss_sum=zero, correct=zero, epoch_rng=get_rng_state(), done=False)
        assert now.epoch_rng is not None  # the epoch is not done
        key = zlib.crc32(now.epoch_rng["cpu"].numpy()) << 32
        clock = time.perf_counter() - now.seconds
        for number, (images, targets) in enumerate(remaining_batches(batches, now), now.step + 1):
            images = images.to(device, non_blocking=True)
            targets = to_device(targets, device)
            lr = lr_at((now.epoch - 1) * len(batches) + number - 1)
            set_lr(optimizer, lr)
            loss, correct, count = step(model, optimizer, images, targets, key + number)
            sums = now.images, now.loss_sum, now.correct
            if loss.isfinite():
                failures = 0
                sums = (now.images + count, now.loss_sum + loss * count, now.correct + correct)
            elif (failures := failures + 1) == patience:
                raise Diverged(_divergence_message(f"{failures} steps in a row", now.epoch, number, lr, batches))
            now = Progress(now.epoch, number, *sums, lr, time.perf_counter() - clock, now.epoch_rng, done=False)
            yield now
        if not now.step:
            raise ValueError("there are no training images left")
        if not now.images:
            raise Diverged(_divergence_message("every step", now.epoch, now.step, now.lr, batches))
        float(now.loss)  # waits for the device, so that `seconds` includes all of the epoch's work
        seconds = time.perf_counter() - clock
        due = not test_once or now.epoch == epochs
        score = test(step.eval_model(model)) if due else None
        now = Progress(now.epoch, now.step, now.images, now.loss_sum, now.correct, now.lr, seconds, None, True, score)
        yield now


def remaining_batches(batches: Iterable[tuple[Tensor, Tensor]], now: Progress) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the current epoch after `now`, drawn with the generator states from the start of the epoch.

    The current states of the global generators are restored afterwards.
    """
    if not now.step:
        return iter(batches)
    assert now.epoch_rng is not None  # the epoch is not done
    current = get_rng_state()
    set_rng_state(now.epoch_rng)
    if hasattr(batches, "iter_from"):
        stream = batches.iter_from(now.step)
    else:
        stream = iter(batches)
        for _ in itertools.islice(stream, now.step):
            pass
    set_rng_state(current)
    return stream


def _divergence_message(span: str, epoch: int, number: int, lr: float, batches: Iterable) -> str:
    indices = getattr(batches, "indices", None)
    which = "" if indices is None else f", images {', '.join(map(str, indices[:10]))}{', …' if indices[10:] else ''}"
    place = f"the last being step {number} of epoch {epoch}{which}"
    return f"the loss was not finite in {span}, {place}; lower lr, now {lr:.2g}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode; afterwards each of its modules has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    amp: torch.dtype | None = None,
    world: World | None = None,
    per_rank_batches: bool = False,
) -> Score:
    """Mean cross-entropy and accuracy of a classifier. Training mode is restored afterwards.

    Deterministic: the same weights and batches give the same score on the same machine.

    Args:
        model: from images [B, C, H, W] to logits [B, classes].
        batches: yields (images [B, C, H, W], targets [B]); has `indices` if there are several ranks.
        amp: autocast dtype; None computes in the weights' dtype.
        world: processes that share the work; all return the same score.
        per_rank_batches: batches hold this rank's images only; if False all ranks get whole batches and slice them.

    Raises:
        ValueError: there are no images.
    """
    device = next(model.parameters()).device
    world = world or World()
    rows = []
    with evaluating(model):
        for images, targets, indices in local_batches(batches, world, per_rank_batches):
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = model(images.to(device, non_blocking=True)).float()[: len(targets)]
            losses = F.cross_entropy(logits, targets.to(device), reduction="none")
            best = logits.topk(min(5, logits.shape[1])).indices
            hits = (best == targets.to(device)[:, None]).any(1)
            rows.append((losses, logits.argmax(1), targets, hits, logits.softmax(1).amax(1), indices))
    if not rows:
        raise ValueError("there are no test images to evaluate on")
    columns = [torch.cat(column).cpu() for column in zip(*rows, strict=True)]
    if world.world_size > 1:
        columns = [torch.cat(column) for column in zip(*world.all_gather(columns), strict=True)]
        columns = [column[columns[-1].argsort()] for column in columns]
    loss, predicted, expected, hit, confidence, _ = columns
    accuracy = (predicted == expected).sum().item() / len(expected)
    top5 = hit.sum().item() / len(expected)
    return Score(loss.double().mean().item(), accuracy, predicted, expected, top5, confidence)


def local_batches(batches: Any, world: World, per_rank_batches: bool) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """This rank's images, targets and indices; a rank with no images gets one dummy image, so collectives match."""
    for images, targets in batches:
        indices = torch.tensor(batches.indices if world.world_size > 1 else [], dtype=torch.long)
        if not per_rank_batches:
            images = world.shard(images)
            targets = world.shard(targets)
            indices = world.shard(indices)
        yield images if len(images) else images.new_zeros(1, *images.shape[1:]), targets, indices


@torch.no_grad()
def evaluate_objective(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    amp: torch.dtype | None = None,
    world: World | None = None,
    per_rank_batches: bool = False,
) -> Score:
    """Mean objective over a test set, for self-supervised models. Every call uses the same random masks.

    Args:
        model: called by the objective; training mode is restored afterwards.
        batches: yields (images [B, C, H, W], targets [B]).
        objective: such as `masked_pixels`.
        amp: autocast dtype; None computes in the weights' dtype.
        world: as for `evaluate`.
        per_rank_batches: as for `evaluate`.

    Raises:
        ValueError: there are no images.
    """
    device = next(model.parameters()).device
    world = world or World()
    total, count = 0.0, 0
    seeded = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(seeded), evaluating(model):
        torch.manual_seed(0)
        for images, targets, _ in local_batches(batches, world, per_rank_batches):
            labels = targets if len(targets) else blank_target(targets)
            with torch.autocast(device.type, amp, enabled=amp is not None):
                loss, _ = objective(model, images.to(device, non_blocking=True), labels.to(device))
            total = total + loss.item() * len(targets)
            count = count + len(targets)
    total, count = (sum(column) for column in zip(*world.all_gather((total, count)), strict=True))
    if not count:
        raise ValueError("there are no test images to evaluate on")
    return Score(total / count)
