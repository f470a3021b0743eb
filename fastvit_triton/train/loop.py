"""The training loop, all of it, and the evaluation that goes with it. Any module, any batches, any optimiser."""

import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint import generators, set_generators
from .objective import Objective
from .optim import set_lr
from .parallel import World
from .ranges import Count, checked
from .step import Step


@dataclass(frozen=True)
class Score:
    """What a model made of a test set: mean loss (nats), accuracy in [0, 1], predictions [N] and targets [N].

    A model that only looks at pictures answers nothing: its score has a loss and Nones.
    """

    loss: float
    accuracy: float | None = None
    predictions: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step; the last report of an epoch is `done`, with the `test` score if one was due.

    Handed to `fit` as `start`, with weights, optimiser and generators as they were, it is where a run goes on.
    `loss` and `accuracy` are means over the epoch so far, 0-d tensors on the model's device: reading one waits for it.
    `epoch` and `step` count from 1, `images` counts within the epoch, `seconds` is training time in the epoch, `began`
    holds the random generators as the epoch found them.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    loss_sum: Tensor | float = 0.0
    right: Tensor | float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    began: dict | None = None
    done: bool = True
    test: Score | None = None

    @property
    def loss(self) -> Tensor:
        return self.loss_sum / self.images

    @property
    def accuracy(self) -> Tensor:
        return self.right / self.images


class Diverged(ValueError):
    """The loss was not finite for too long."""


@checked
def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    lr_at: Callable[[int], float],
    *,
    epochs: Count,
    start: Progress | None = None,
    step: Step | None = None,
    test: Callable[[nn.Module], Score],
    test_once: bool = False,
    patience: Count = 10,
) -> Iterator[Progress]:
    """Trains, one step per `next`, and evaluates after every epoch, or after the last one only.

    A generator, so that the caller draws the bar, writes the log and saves the checkpoint in plain sight, between two
    steps. All randomness is PyTorch's global generators: restore their state with the weights' and optimiser's, pass
    the `Progress` as `start`, and the rest of the run is the same to the last bit, from within an epoch too.

    Args:
        model: any module that the step's objective can use; images [B, C, H, W] to logits [B, classes] by default.
        batches: (images [B, C, H, W], targets [B]); iterated once per epoch, and has a length. `after(n)`, if there is
            one, is the same iteration without its first n batches; `indices` says which images the last batch held.
        optimizer: over the model's parameters.
        lr_at: step of the whole run, from 0, to learning rate.
        epochs: where to stop.
        start: how far an earlier run came; None starts.
        step: what happens to a batch; None is plain cross-entropy.
        test: the score of a model, such as `partial(evaluate, batches=…)`; it gets the average where one is kept.
        test_once: evaluate after the last epoch only: a test split that nothing may be chosen by is read once.
        patience: steps in a row whose loss is not finite; they change nothing, and the last one is fatal.

    Raises:
        ValueError: there is no image.
        Diverged: the loss was not finite in `patience` steps in a row, or in a whole epoch.
    """
    step, now, failures = step or Step(), start or Progress(), 0
    device = next(model.parameters()).device
    while now.epoch < epochs or not now.done:
        model.train()
        if now.done:
            zero = torch.zeros((), device=device)
            now = Progress(now.epoch + 1, loss_sum=zero, right=zero, began=generators(), done=False)
        key = zlib.crc32(now.began["cpu"].numpy()) << 32
        clock = time.perf_counter() - now.seconds
        for number, (images, targets) in enumerate(rest(batches, now), now.step + 1):
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            lr = lr_at((now.epoch - 1) * len(batches) + number - 1)
            set_lr(optimizer, lr)
            value, right, count = step(model, optimizer, images, targets, key + number)
            sums = now.images, now.loss_sum, now.right
            if value.isfinite():
                failures, sums = 0, (now.images + count, now.loss_sum + value * count, now.right + right)
            elif (failures := failures + 1) == patience:
                raise Diverged(_obituary(f"{failures} steps in a row", now.epoch, number, lr, batches))
            now = Progress(now.epoch, number, *sums, lr, time.perf_counter() - clock, now.began, done=False)
            yield now
        if not now.step:
            raise ValueError("there is no training image left to learn from")
        if not now.images:
            raise Diverged(_obituary("every step", now.epoch, now.step, now.lr, batches))
        float(now.loss)  # waits for the device, so that the epoch's time is its own
        seconds, due = time.perf_counter() - clock, not test_once or now.epoch == epochs
        score = test(step.weights(model)) if due else None
        now = Progress(now.epoch, now.step, now.images, now.loss_sum, now.right, now.lr, seconds, None, True, score)
        yield now


def rest(batches: Iterable[tuple[Tensor, Tensor]], now: Progress) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch that are still to come; the generators are left as they were, unless it just began."""
    if not now.step:
        return iter(batches)
    here = generators()
    set_generators(now.began)
    if hasattr(batches, "after"):
        stream = batches.after(now.step)
    else:
        stream = iter(batches)
        for _ in itertools.islice(stream, now.step):
            pass
    set_generators(here)
    return stream


def _obituary(span: str, epoch: int, number: int, lr: float, batches: Iterable) -> str:
    indices = getattr(batches, "indices", None)
    which = "" if indices is None else f", images {', '.join(map(str, indices[:10]))}{', …' if indices[10:] else ''}"
    place = f"the last being step {number} of epoch {epoch}{which}"
    return f"the loss was not finite in {span}, {place}; lower lr, now {lr:.2g}"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    amp: torch.dtype | None = None,
    world: World | None = None,
    dealt: bool = False,
) -> Score:
    """Mean cross-entropy and accuracy of a model, which is left in the mode it came in.

    The same weights and batches give the same score on the same machine. Refuses batches without a single image.

    Args:
        model: any module from images [B, C, H, W] to logits [B, classes].
        batches: (images [B, C, H, W], targets [B]).
        amp: autocast dtype; None computes in the weights' dtype.
        world: processes that share the work; all get the score.
        dealt: the batches, which have `indices`, hold this process's part already; else they are cut here.
    """
    device, modes = next(model.parameters()).device, {module: module.training for module in model.modules()}
    world = world or World()
    model.eval()
    losses, predictions, answers, places = [], [], [], []
    try:
        for images, targets, rows in _parts(batches, world, dealt):
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = model(images.to(device, non_blocking=True)).float()[: len(targets)]
            losses.append(F.cross_entropy(logits, targets.to(device), reduction="none"))
            predictions.append(logits.argmax(1))
            answers.append(targets)
            places.append(rows)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not predictions:
        raise ValueError("there is no test image to evaluate on")
    columns = [torch.cat(column).cpu() for column in (losses, predictions, answers, places)]
    if world.size > 1:
        columns = [torch.cat(column) for column in zip(*world.gather(columns), strict=True)]
        columns = [column[columns[-1].argsort()] for column in columns]
    value, predicted, expected, _ = columns
    accuracy = (predicted == expected).sum().item() / len(expected)
    return Score(value.double().mean().item(), accuracy, predicted, expected)


def _parts(
    batches: Iterable[tuple[Tensor, Tensor]], world: World, dealt: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This process's images, targets and indices; where it has none, an image without a target, for company."""
    for images, targets in batches:
        rows = torch.tensor(batches.indices if world.size > 1 else [], dtype=torch.long)
        if not dealt:
            images, targets, rows = world.part(images), world.part(targets), world.part(rows)
        yield images if len(images) else images.new_zeros(1, *images.shape[1:]), targets, rows


@torch.no_grad()
def assess(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    amp: torch.dtype | None = None,
    world: World | None = None,
    dealt: bool = False,
) -> Score:
    """Mean objective over a test set, for models that answer nothing. The masks are the same ones at every call.

    Args:
        model: any module that the objective can use; it is left in the mode it came in.
        batches: (images [B, C, H, W], targets [B]).
        objective: such as `masked_pixels`.
        amp: autocast dtype; None computes in the weights' dtype.
        world: as for `evaluate`.
        dealt: as for `evaluate`.

    Raises:
        ValueError: there is no image.
    """
    device, modes, here = next(model.parameters()).device, {m: m.training for m in model.modules()}, generators()
    world = world or World()
    model.eval()
    total, count = 0.0, 0
    try:
        torch.manual_seed(0)
        for images, targets, _ in _parts(batches, world, dealt):
            answers = targets if len(targets) else targets.new_zeros(1)
            with torch.autocast(device.type, amp, enabled=amp is not None):
                value, _ = objective(model, images.to(device, non_blocking=True), answers.to(device))
            total, count = total + value.item() * len(targets), count + len(targets)
    finally:
        set_generators(here)
        for module, mode in modes.items():
            module.training = mode
    total, count = (sum(column) for column in zip(*world.gather((total, count)), strict=True))
    if not count:
        raise ValueError("there is no test image to evaluate on")
    return Score(total / count)
