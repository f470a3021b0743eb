"""Runs a training job and writes weights, logs and plots."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..files import sweep
from .build import build_lr, build_objective, build_optimizer, build_step, build_test, module_to_export
from .checkpoint import STATE, make_state, restore, save_state, write_errors
from .data import Data
from .distributed import World
from .distributed.engine import Engine, has_finite_weights, parallelize
from .loop import Diverged, Progress, Score, fit
from .outputs import BEST, FILES, LOG, WEIGHTS, draw_results, is_best, log_row, weights_metadata, write_log
from .ranges import PositiveInt, Seed, check, checked
from .recipes import DIGITS, FOLDER, Recipe, override_recipe
from .recipes.published import PUBLISHED
from .step import Step

# Defaults of the settings that are not fields of a recipe.
SETTINGS = {
    "data": "digits",
    "seed": 0,
    "skip_bad_images": False,
    "weights": None,
    "grad_accum_steps": 1,
    "amp": "auto",
    "teacher": None,
    "distillation": "hard",
    "grad_checkpointing": False,
}
RECIPES = {"digits": DIGITS, "folder": FOLDER} | PUBLISHED


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
    """

    model: nn.Module
    data: Data
    recipe: Recipe
    step: Step
    optimizer: Optimizer
    lr_at: Callable[[int], float]
    engine: Engine = field(default_factory=Engine)

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
    """
    objective = build_objective(recipe, model, data.transform, teacher, distillation)
    step = build_step(recipe, model, objective, len(data.classes), grad_accum_steps, amp)
    wrapped, engine = model, Engine()
    if parallel is not None:
        assert world is not None, "`parallel` needs a world"
        wrapped, step, engine = parallelize(parallel, model, step, world, data.train.per_rank)
    optimizer, lr_at = build_optimizer(recipe, model), build_lr(recipe, len(data.train))
    return Trainer(model=wrapped, data=data, recipe=recipe, step=step, optimizer=optimizer, lr_at=lr_at, engine=engine)


@checked
def run(
    trainer: Trainer,
    out: Path,
    *,
    settings: dict,
    save: Callable[..., None],
    state: dict | None = None,
    save_every: Annotated[PositiveInt | None, "a state after each epoch only"] = None,
) -> Iterator[Progress]:
    """Trains, and writes weights, state and log to `out` after each epoch and plots at the end.

    A generator like `fit`. If it is closed, interrupted or killed, the files saved last remain in `out`. A run resumed
    from `state` gives bitwise the same result as an uninterrupted run. Weights and state are not saved while any weight
    is not finite.

    Args:
        trainer: from `build_trainer`.
        out: an existing folder.
        settings: stored in the state, for resuming.
        save: `save(model, path, metadata=…)` writes weights with a header of strings, such as `save_weights`.
        state: from `load_state`, to resume; None starts a new run.
        save_every: number of steps between states within an epoch; None saves after epochs only.

    Raises:
        Diverged: as `fit`; the message names the last good state.
        OSError: a file cannot be written.
    """
    world = trainer.step.world
    if world.is_main:
        sweep(out, FILES)
    model, data, optimizer, step, engine = trainer.model, trainer.data, trainer.optimizer, trainer.step, trainer.engine
    history: list[dict] = [] if state is None else list(state["history"])
    start = None if state is None else restore(state, model, optimizer, step, engine.load_state)
    score = None
    try:
        for progress in trainer.fit(start):
            due = progress.done or (save_every and progress.step % save_every == 0)
            save_now = due and has_finite_weights(model, world)
            if progress.done:
                score = progress.test
                history.append(log_row(progress))
                for batches in (data.train, data.test):
                    for bad in world.all_gather(batches.bad):
                        batches.bad.update(bad)
                gathered = engine.gather_model(step.eval_model(model))
                if world.is_main and save_now and gathered is not None:
                    module = module_to_export(trainer.recipe, gathered)
                    for path in (out / WEIGHTS, out / BEST) if is_best(history) else (out / WEIGHTS,):
                        with write_errors(path):
                            save(module, path, metadata=weights_metadata(data, trainer.recipe, module, score))
            if save_now:
                local = make_state(model, optimizer, step, progress, history, settings)
                gathered_state = engine.gather_state(local, model, optimizer, step)
                if world.is_main:
                    save_state(out, gathered_state)
            if progress.done and world.is_main:
                write_log(out / LOG, history)
            yield progress
    except Diverged as error:
        saved = f"{out / STATE} holds the last good state" if (out / STATE).exists() else "no state has been saved"
        raise Diverged(f"{error}; {saved}") from error
    # a run that was resumed after its last epoch has no score yet
    score = score or trainer.test(step.eval_model(model))
    if world.is_main:
        draw_results(out, data, history, score)


def resolve_settings(given: dict, saved: dict | None) -> dict:
    """The complete settings of a run: those of the run to resume, or those of a recipe, overridden by given values.

    Args:
        given: any of "recipe" (a name), the keys of `SETTINGS`, and the fields of `Recipe`.
        saved: settings from the state to resume; None starts a new run.

    Raises:
        ValueError: a value is out of range, the recipe is unknown, or a given value differs from the saved one.
    """
    given = dict(given)
    for name in ("data", "weights", "teacher"):
        if given.get(name) is not None and given[name] != "digits":
            given[name] = str(Path(given[name]).resolve())
    check("seed", given.get("seed", 0), Seed)
    check("grad_accum_steps", given.get("grad_accum_steps", 1), PositiveInt)
    if saved is not None:
        for name, value in given.items():
            if value != saved[name]:
                raise ValueError(f"{name} is {value}, but the run to resume has {saved[name]}; leave it out")
        return saved
    name = given.get("recipe") or ("digits" if given.get("data", "digits") == "digits" else "folder")
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; use one of {', '.join(RECIPES)}")
    fields = Recipe.__dataclass_fields__
    recipe = override_recipe(RECIPES[name], **{key: value for key, value in given.items() if key in fields})
    others = {key: value for key, value in given.items() if key not in fields}
    return SETTINGS | asdict(recipe) | others | {"recipe": name}
