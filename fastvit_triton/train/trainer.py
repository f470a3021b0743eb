"""A model with all that trains it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .build import build_lr, build_objective, build_optimizer, build_step, build_test
from .data import Data
from .distributed import World
from .distributed.engine import Engine, parallelize
from .loop import Progress, Score, fit
from .ranges import PositiveInt, checked
from .recipes import Recipe
from .step import Step


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
