"""Runs a training job and writes weights, logs and plots."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..files import sweep
from .build import build_lr, build_objective, build_optimizer, build_step, build_test, module_to_export
from .checkpoint import PREVIOUS, STATE, make_state, restore, save_state, write_errors
from .data import Data
from .data.folder import worker_errors
from .data.split import SPLIT, write_split
from .distributed import World
from .distributed.engine import Engine, has_finite_weights, parallelize
from .loop import Diverged, Progress, Score, fit
from .outputs import (
    BEST,
    FILES,
    LOG,
    WEIGHTS,
    draw_results,
    evaluations_since_best,
    is_best,
    log_row,
    weights_metadata,
    write_log,
)
from .ranges import PositiveInt, checked
from .recipes import Recipe
from .step import Step
from .stopping import Request, Stopped


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model and all arguments that `fit` needs to train it, from `build_trainer`.

    Attributes:
        model: on its device, wrapped in DDP or FSDP if there are several ranks.
        data: training and test batches.
        recipe: the recipe that the other attributes were built from.
        step: one optimiser step.
        optimizer: over the model's parameters.
        lr_at: function from the global step, starting at 0, to the learning rate.
        engine: gathers the model's weights and state from all ranks.
        frozen: modules that stay in evaluation mode, see `freeze_backbone`.
    """

    model: nn.Module
    data: Data
    recipe: Recipe
    step: Step
    optimizer: Optimizer
    lr_at: Callable[[int], float]
    engine: Engine = field(default_factory=Engine)
    frozen: Sequence[nn.Module] = ()

    @property
    def epochs(self) -> int:
        """Length of the run in epochs."""
        return self.recipe.epochs_of(len(self.data.train))

    @property
    def test(self) -> Callable[[nn.Module], Score]:
        """A function that scores a model on the test batches."""
        return build_test(self.recipe, self.step, self.data.test)

    def fit(self, start: Progress | None = None) -> Iterator[Progress]:
        """Runs `fit` with these settings.

        Args:
            start: progress of the run to resume; None starts a new run.
        """
        return fit(
            self.model,
            self.data.train,
            self.optimizer,
            self.lr_at,
            epochs=self.epochs,
            start=start,
            step=self.step,
            test=self.test,
            test_once=self.data.test_once,
            frozen=self.frozen,
        )


@checked
def build_trainer(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    grad_accum_steps: PositiveInt = 1,
    amp: torch.dtype | None = None,
    teacher: nn.Module | None = None,
    distillation: Literal["hard", "soft"] = "hard",
    parallel: str | None = None,
    world: World | None = None,
    class_weights: Tensor | None = None,
    frozen: Sequence[nn.Module] = (),
) -> Trainer:
    """Builds objective, step, optimiser, learning-rate schedule and engine from a recipe.

    Args:
        model: on its device; from `build_masked_model` for self-supervised recipes.
        data: from `load`.
        recipe: the recipe.
        grad_accum_steps: number of micro-batches per step.
        amp: autocast dtype.
        teacher: for distillation; in evaluation mode, on the same device.
        distillation: "hard" or "soft".
        parallel: "ddp" or "fsdp", see distributed/parallel.py; None trains in one process.
        world: from `process_group`; required with `parallel`.
        class_weights: [K], on the model's device, see `build_loss`.
        frozen: modules that stay in evaluation mode, from `freeze_backbone`.
    """
    objective = build_objective(recipe, model, data.transform, teacher, distillation, class_weights, world)
    step = build_step(recipe, model, objective, len(data.classes), grad_accum_steps, amp)
    wrapped = model
    engine = Engine()
    if parallel is not None:
        assert world is not None, "`parallel` needs a world"
        wrapped, step, engine = parallelize(parallel, model, step, world, data.train.per_rank)
    optimizer = build_optimizer(recipe, model)
    lr_at = build_lr(recipe, len(data.train))
    return Trainer(
        model=wrapped,
        data=data,
        recipe=recipe,
        step=step,
        optimizer=optimizer,
        lr_at=lr_at,
        engine=engine,
        frozen=frozen,
    )


@checked
def run(
    trainer: Trainer,
    out: Path,
    *,
    settings: dict,
    save: Callable[..., None],
    state: dict | None = None,
    save_every: Annotated[PositiveInt | None, "a state after each epoch only"] = None,
    warn: Callable[[str], None] = warnings.warn,
    stop: Request | None = None,
) -> Iterator[Progress]:
    """Trains, and writes state, weights and log to `out` after each epoch and plots at the end.

    A generator like `fit`. If it is closed, interrupted or killed, the files saved last remain in `out`. A run resumed
    from `state` gives bitwise the same result as an uninterrupted run. The state is written first, and the other files
    follow from it: a resumed run writes them again if it was killed in between, or if they were lost. Weights and state
    are not saved while any weight is not finite.
    """
    world = trainer.step.world
    if world.is_main:
        sweep(out, FILES)
    model = trainer.model
    data = trainer.data
    optimizer = trainer.optimizer
    step = trainer.step
    engine = trainer.engine
    history: list[dict] = [] if state is None else list(state["history"])
    start = None
    if state is not None:
        start = restore(state, model, optimizer, step, engine.load_state)
        if start.done:
            _save_weights(trainer, out, history, settings, save)
        if history and world.is_main:
            write_log(out / LOG, history)
    if data.split is not None and world.is_main:
        write_split(out / SPLIT, data.split, data.test)
    score, identity = None, data.identity if world.is_main else None  # reads the size of each file
    with _errors(out):
        for progress in () if _is_stale(settings, history, start) else trainer.fit(start):
            ending = stop is not None and stop.at(progress, world)
            due = progress.done or ending or (save_every and progress.step % save_every == 0)
            save_now = due and has_finite_weights(model, world)
            if progress.done:
                score = progress.test
                history.append(log_row(progress))
                for batches in (data.train, data.test):
                    for bad in world.all_gather(batches.bad):
                        batches.bad.update(bad)
            if save_now:
                local = make_state(model, optimizer, step, progress, history, settings, identity)
                gathered_state = engine.gather_state(local, model, optimizer, step)
                if world.is_main:
                    save_state(out, gathered_state)
            if progress.done and save_now:
                _save_weights(trainer, out, history, settings, save)
            if progress.done and world.is_main:
                write_log(out / LOG, history)
            yield progress
            if _is_stale(settings, history, progress):
                break
            if ending and not (progress.done and progress.epoch == trainer.epochs):
                raise Stopped(f"after step {progress.step} of epoch {progress.epoch}")
        # a run that was resumed after its last epoch has no score yet
        score = score or trainer.test(step.eval_model(model))
    if world.is_main:
        draw_results(out, data, history, score, warn)


def _is_stale(settings: dict, history: list[dict], progress: Progress | None) -> bool:
    """True at the end of an epoch if the last `patience` evaluations are no better than those before."""
    patience = settings.get("patience")
    ended = progress is not None and progress.done
    return ended and patience is not None and evaluations_since_best(history) >= patience


def _save_weights(trainer: Trainer, out: Path, history: list[dict], settings: dict, save: Callable[..., None]) -> None:
    """Writes the weights, and once more as the best if they are. Collective."""
    gathered = trainer.engine.gather_model(trainer.step.eval_model(trainer.model))
    if gathered is None:
        return
    module = module_to_export(trainer.recipe, gathered)
    metadata = weights_metadata(trainer.data, trainer.recipe, module, history[-1], settings)
    for path in (out / WEIGHTS, out / BEST) if is_best(history) else (out / WEIGHTS,):
        with write_errors(path):
            save(module, path, metadata=metadata)


@contextmanager
def _errors(out: Path) -> Iterator[None]:
    """Adds the last good state to the message of `Diverged`, and converts the error of a dead worker to OSError."""
    states = [out / name for name in (STATE, PREVIOUS)]
    try:
        with worker_errors():
            yield
    except Diverged as error:
        good = next(
            (f"{path} holds the last good state" for path in states if path.exists()), "no state has been saved"
        )
        raise Diverged(f"{error}; {good}") from error
