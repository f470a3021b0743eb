"""A training run from its settings: what the command `train` does between its options and its output."""

import uuid
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from ..files import replacing, sweep
from .build import SELF_SUPERVISED, UNMIXED
from .checkpoint import PREVIOUS, STATE, make_state, restore, save_state, write_errors
from .class_weights import class_weights
from .data import Data
from .data.findings import quiet
from .data.folder import worker_errors
from .data.inspection import Inspection, inspect
from .data.split import SPLIT, Split, read_split, write_split
from .data.transform import MAX_PIXELS
from .distributed import World
from .distributed.engine import has_finite_weights
from .frozen import freeze_backbone, has_batch_norm
from .loop import Diverged, Progress
from .outputs import (
    BEST,
    FILES,
    LOG,
    TABLE,
    WEIGHTS,
    draw_results,
    evaluations_since_best,
    is_best,
    log_row,
    weights_metadata,
    write_log,
)
from .ranges import NonNegativeInt, PositiveInt, checked
from .recipes import Recipe
from .rng import use_deterministic_algorithms
from .settings import check_unchanged, check_used, recipe_of
from .sources import load
from .step import autocast_dtype
from .stopping import Request, Stopped
from .trackers import Log, TrackedRun, check_trackers, tracking
from .trainer import Trainer, build_trainer


class Models(Protocol):
    """What a run needs to know of its models; the module `fastvit_triton.cli.train_models` has it for ours."""

    def check_settings(self, settings: dict, recipe: Recipe) -> None:
        """Raises ValueError if there is no such model. Called before images are listed, which may take minutes."""

    def build_model(self, settings: dict, recipe: Recipe, data: Data, resumed: bool) -> nn.Module:
        """The model to train, on the CPU; the weights of a resumed run are loaded later.

        Called for new and for resumed runs, so settings that only the library of the models knows are applied here.
        """

    def load_teacher(self, path: str, student: nn.Module, classes: int, device: torch.device) -> nn.Module:
        """The teacher of a distillation, in evaluation mode on the device; changes the student as it needs."""

    def ways(self, device: torch.device) -> dict | None:
        """What decides on this device how the model's blocks run, such as measurements; stored in the run's state."""

    def using_ways(self, ways: dict | None) -> AbstractContextManager:
        """Context in which the model's blocks run as `ways` says; a resumed run has those of its first process."""

    def warm_up(self, model: nn.Module, images: Tensor, quiet: bool) -> None:
        """Compiles what training on such images will launch. Called on GPUs only; `quiet` shows no progress."""

    def save_weights(self, model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
        """Writes the weights, with a header of strings."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run in an output folder. `fastvit-triton train --epochs 2 --out runs/digits` in Python:

    ```python
    from pathlib import Path
    from fastvit_triton.cli import train_models
    from fastvit_triton.train import Run, resolve_settings
    from fastvit_triton.train.outputs import locked

    out = Path("runs/digits")
    with locked(out):  # no other run writes there
        run = Run.from_settings(resolve_settings({"epochs": 2}), out, train_models)
        with run.training() as steps:
            for progress in steps:
                print(progress.epoch, progress.step, progress.loss.item())
    ```

    To resume it, pass `state, damage = newest_state(out)` to both: `resolve_settings({}, state)`, and `state=state`.

    Attributes:
        trainer: model, data and all that `fit` needs.
        out: an existing folder.
        settings: stored in the state, for resuming.
        models: saves the model, and says how it runs.
        state: from `load_state`, to resume; None starts a new run.
        inspection: of the data of a new run; None if it is resumed.
    """

    trainer: Trainer
    out: Path
    settings: dict
    models: Models
    state: dict | None = None
    inspection: Inspection | None = None

    @classmethod
    def from_settings(
        cls,
        settings: dict,
        out: Path,
        models: Models,
        *,
        state: dict | None = None,
        accept_changes: bool = False,
        world: World | None = None,
        parallel: str | None = None,
        workers: NonNegativeInt = 0,
        max_pixels: PositiveInt = MAX_PIXELS,
        quick: bool = False,
    ) -> "Run":
        """Builds data, model and trainer, after seeding the global random generator.

        The data of a new run are inspected, see `data.inspection`.

        Args:
            settings: complete, from `resolve_settings`, to which `state` was given.
            out: an existing folder, which no other run may use, see `locked`; its files are not changed.
            models: builds, warms up and saves the model.
            state: from `load_state`, to resume; None starts a new run.
            accept_changes: resume although the images differ from those of the run.
            world: this process and its device; None trains on the CPU.
            parallel: "ddp" or "fsdp", which need a `world` from `process_group`; None trains in one process.
            workers: processes that decode images; 0 decodes in this process.
            max_pixels: images with more pixels count as images that cannot be read.
            quick: do not compare the files of images with each other.

        Raises:
            UnfitData: labels or scores would be wrong, and `allow` of the settings does not name it.
            ValueError: a setting has no such model, data set, checkpoint or tracker, or the data differ from those of
                the run to resume.
        """
        world = world or World()
        recipe = recipe_of(settings)
        if settings["deterministic"]:
            use_deterministic_algorithms()
        models.check_settings(settings, recipe)
        if state is None:
            check_used(settings)
        if settings["class_weights"] is not None and recipe.loss in UNMIXED:
            raise ValueError(f"class_weights cannot be combined with loss {recipe.loss!r}; leave it out")
        if settings["freeze"] is not None and recipe.loss in UNMIXED:
            raise ValueError(f"freeze trains the head of a classifier, and loss {recipe.loss!r} has none; leave it out")
        torch.manual_seed(settings["seed"])
        if settings["log_to"]:
            check_trackers("--log-to", settings["log_to"])
            if world.is_main and not settings["run_key"]:
                settings = settings | {"run_key": uuid.uuid4().hex}
        if state is None and settings["ways"] is None:
            settings = settings | {"ways": models.ways(world.device)}
        split = None
        if settings["val_split"] is not None:
            split = Split(settings["val_split"], settings["seed"])
            split = split if state is None else read_split(out / SPLIT, split)
        with quiet():  # the table says the same
            data = load(
                settings["data"],
                recipe,
                workers=workers,
                skip_bad_images=settings["skip_bad_images"],
                max_pixels=max_pixels,
                custom=settings["transform"],
                world=world,
                split=split,
                levels=settings["levels"],
            )
        inspection = None
        if state is not None:
            check_unchanged(data, state, accept_changes)
        else:
            options = {"allow": settings["allow"], "quick": quick, "skip_bad_images": settings["skip_bad_images"]}
            inspection = world.all_gather(inspect(data, recipe.loss, **options) if world.is_main else None)[0]
            inspection.refuse()
        model = models.build_model(settings, recipe, data, resumed=state is not None)
        teacher = None
        if settings["teacher"] is not None:
            teacher = models.load_teacher(settings["teacher"], model, len(data.classes), world.device)
        frozen: list[nn.Module] = []
        if settings["freeze"] is not None:
            frozen = freeze_backbone(model)
            recipe = replace(recipe, layer_decay=1.0)  # the head has the whole rate with any
        if has_batch_norm(model, frozen):
            data.train.leave_out_single()
        weights = None
        if settings["class_weights"] is not None:
            weights = class_weights(settings["class_weights"], data.classes, data.train.targets).to(world.device)
        if settings["patience"] is not None and data.test_once:
            raise ValueError(f"patience needs an evaluation after each epoch, and {data.name} has one after the last")
        model = model.to(world.device)
        amp = autocast_dtype(world.device, settings["amp"])
        if world.device.type == "cuda" and not recipe.mask_ratio and recipe.loss != "detection":
            images = recipe.batch_size // world.world_size // settings["grad_accum_steps"]
            shape = max(images, 1), len(data.transform.mean), recipe.img_size, recipe.img_size
            with models.using_ways(settings["ways"]), torch.autocast("cuda", amp, enabled=amp is not None):
                models.warm_up(model, torch.zeros(shape, device=world.device), quiet=not world.is_main)
        trainer = build_trainer(
            model,
            data,
            recipe,
            grad_accum_steps=settings["grad_accum_steps"],
            amp=amp,
            teacher=teacher,
            distillation=settings["distillation"],
            parallel=parallel,
            world=world,
            class_weights=weights,
            frozen=frozen,
        )
        return cls(trainer=trainer, out=out, settings=settings, models=models, state=state, inspection=inspection)

    @property
    def finished_epochs(self) -> int:
        """Number of epochs that were finished before the run was resumed."""
        return 0 if self.state is None else len(self.state["history"])

    @contextmanager
    def training(
        self,
        save_every: int | None = None,
        warn: Callable[[str], None] = warnings.warn,
        stop: Request | None = None,
    ) -> Iterator[Iterator[Progress]]:
        """Opens the trackers; yields the generator `steps`, which trains and writes the files of the run.

        Rows of the log are sent to the trackers after the generator has yielded them.

        Args:
            save_every: number of steps between states within an epoch; None saves after epochs only.
            warn: called with a sentence about each plot that cannot be drawn, and each tracker that fails.
            stop: from `listening`, which notes SIGTERM and SIGUSR1: the run then saves at its next step, and ends.

        Raises:
            ValueError, Diverged, Stopped, OSError: as `steps`.
        """
        if self.inspection is not None and self.trainer.step.world.is_main:
            with write_errors(self.out / TABLE), replacing(self.out / TABLE) as temporary:
                temporary.write_text(self.inspection.text + "\n", encoding="utf-8")
        per_epoch = len(self.trainer.data.train)
        start = 0
        if self.state is not None:
            progress = self.state["progress"]
            start = (progress["epoch"] - 1) * per_epoch + progress["step"]
        trackers = self.settings["log_to"] if self.trainer.step.world.is_main else None
        shown = {name: value for name, value in self.settings.items() if name != "ways"}
        tracked = TrackedRun(self.out, self.settings["run_key"], shown, start)
        steps = self.steps(save_every, warn, stop)
        with (
            self.models.using_ways(self.settings["ways"]),
            tracking(trackers, tracked, warn) as log,
            closing(_logged(steps, log, per_epoch)) as logged,
        ):
            yield logged

    @checked
    def steps(
        self,
        save_every: Annotated[PositiveInt | None, "a state after each epoch only"] = None,
        warn: Callable[[str], None] = warnings.warn,
        stop: Request | None = None,
    ) -> Iterator[Progress]:
        """Trains, and writes state, weights and log after each epoch and plots at the end; arguments as of `training`.

        A generator like `fit`. If it is closed, interrupted or killed, the files saved last remain in `out`. A run
        resumed from `state` gives bitwise the same result as an uninterrupted run. The state is written first, and the
        other files follow from it: a resumed run writes them again if it was killed in between, or if they were lost.
        Weights and state are not saved while any weight is not finite.
        """
        trainer, out, state = self.trainer, self.out, self.state
        model = trainer.model
        data = trainer.data
        optimizer = trainer.optimizer
        step = trainer.step
        engine = trainer.engine
        world = step.world
        if world.is_main:
            sweep(out, FILES)
        history: list[dict] = [] if state is None else list(state["history"])
        start = None
        if state is not None:
            start = restore(state, model, optimizer, step, engine.load_state)
            if start.done:
                self._save_weights(history)
            if history and world.is_main:
                write_log(out / LOG, history)
        if data.split is not None and world.is_main:
            write_split(out / SPLIT, data.split, data.test)
        score, identity = None, data.identity if world.is_main else None  # reads the size of each file
        with _errors(out):
            for progress in () if self._is_stale(history, start) else trainer.fit(start):
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
                    local = make_state(model, optimizer, step, progress, history, self.settings, identity)
                    gathered_state = engine.gather_state(local, model, optimizer, step)
                    if world.is_main:
                        save_state(out, gathered_state)
                if progress.done and save_now:
                    self._save_weights(history)
                if progress.done and world.is_main:
                    write_log(out / LOG, history)
                yield progress
                if self._is_stale(history, progress):
                    break
                if ending and not (progress.done and progress.epoch == trainer.epochs):
                    raise Stopped(f"after step {progress.step} of epoch {progress.epoch}")
            # a run that was resumed after its last epoch has no score yet
            score = score or trainer.test(step.eval_model(model))
        if world.is_main:
            draw_results(out, data, history, score, warn)

    def _is_stale(self, history: list[dict], progress: Progress | None) -> bool:
        """True at the end of an epoch if the last `patience` evaluations are no better than those before."""
        patience = self.settings.get("patience")
        ended = progress is not None and progress.done
        return ended and patience is not None and evaluations_since_best(history) >= patience

    def _save_weights(self, history: list[dict]) -> None:
        """Writes the weights, and once more as the best if they are. Collective."""
        trainer = self.trainer
        gathered: Any = trainer.engine.gather_model(trainer.step.eval_model(trainer.model))
        if gathered is None:
            return
        module: nn.Module = gathered.encoder if trainer.recipe.loss in SELF_SUPERVISED else gathered
        metadata = weights_metadata(trainer.data, trainer.recipe, module, history[-1], self.settings)
        for name in (WEIGHTS, BEST) if is_best(history) else (WEIGHTS,):
            with write_errors(self.out / name):
                self.models.save_weights(module, self.out / name, metadata=metadata)


def _logged(steps: Iterator[Progress], log: Log, per_epoch: int) -> Generator[Progress, None, None]:
    """Yields each progress, then sends its row of the log, if it ends an epoch."""
    for progress in steps:
        try:
            yield progress
        finally:  # also if the caller stops here, because the epoch is in the state
            if progress.done:
                log(log_row(progress), progress.epoch * per_epoch)


@contextmanager
def _errors(out: Path) -> Iterator[None]:
    """Adds the last good state to the message of `Diverged`, and converts the error of a dead worker to OSError."""
    try:
        with worker_errors():
            yield
    except Diverged as error:
        path = next((out / name for name in (STATE, PREVIOUS) if (out / name).exists()), None)
        good = "no state has been saved" if path is None else f"{path} holds the last good state"
        raise Diverged(f"{error}; {good}") from error
