"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow receive the rows of the log.

Each is an optional package with its own environment variables, such as WANDB_MODE=offline, WANDB_DIR, TRACKIO_DIR and
MLFLOW_TRACKING_URI. TensorBoard, and MLflow without that variable, write inside the output folder.
"""

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = "fastvit_triton"  # unless the tool's environment variable names another


class TrackedRun(NamedTuple):
    """What a tracker shows of a run."""

    out: Path  # output folder; its name is the name of the run
    key: str  # identifies the run when it is resumed
    settings: Mapping[str, object]  # of the run, from `resolve_settings`
    step: int = 0  # global step at which training starts; 0 for a new run


Log = Callable[[dict[str, float], int], object]


def check_trackers(option: str, text: str) -> None:
    """Raises ValueError unless the text has known trackers, separated by commas, whose packages are installed."""
    names = text.split(",")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{option} is {text!r}; name {twice} once")
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"{option} is {text!r}; use some of {', '.join(TRACKERS)}, separated by commas")
        # without a server, MLflow writes a data base, which mlflow-skinny alone cannot
        parts = [name, "sqlalchemy"] if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") else [name]
        for package in parts:
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"{option} {name} needs the package {package}; {ADVICE[name]}")


@contextmanager
def tracking(text: str | None, run: TrackedRun, warn: Callable[[str], None] = warnings.warn) -> Iterator[Log]:
    """Yields a function that sends a row of the log, at a global step, to all trackers.

    A tracker that fails, for example because its server cannot be reached, is left out from there on; training goes on.
    """
    opened: dict[str, tuple[Log, ExitStack]] = {}

    @contextmanager
    def surviving(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any package, server or disk
            why = next(iter(str(error).splitlines()), "")[:300]
            warn(f"--log-to {name} failed and is left out from here on ({type(error).__name__}: {why})")
            _, stack = opened.pop(name, (None, ExitStack()))
            with suppress(Exception):  # of what failed already
                stack.close()

    def log(row: Mapping[str, float | None], step: int) -> None:
        numbers = {name: value for name, value in row.items() if value is not None}
        for name, (send, _) in list(opened.items()):
            with surviving(name):
                send(numbers, step)

    try:
        for name in text.split(",") if text else ():
            with surviving(name):
                stack = ExitStack()
                opened[name] = stack.enter_context(TRACKERS[name](run)), stack
        yield log
    finally:
        for name, (_, stack) in list(opened.items()):
            with surviving(name):
                stack.__exit__(*sys.exc_info())


@contextmanager
def _tensorboard(run: TrackedRun) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    # events from `purge_step` on are of a run that was replaced, or that had not saved its state
    with SummaryWriter(str(run.out / "tensorboard"), purge_step=run.step + 1 if run.step else 0) as writer:
        if not run.step:
            text = json.dumps(run.settings, indent=1, default=str)
            writer.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()))

        def log(row: dict[str, float], step: int) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield log


@contextmanager
def _wandb(run: TrackedRun) -> Iterator[Log]:
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    options: dict[str, Any] = {"config": dict(run.settings), "allow_val_change": True, "resume": "allow"}
    with wandb.init(project=project, id=run.key, name=run.out.name, **options) as opened:
        yield lambda row, step: opened.log(row, step=step)


@contextmanager
def _trackio(run: TrackedRun) -> Iterator[Log]:
    import trackio

    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{run.out.name}-{run.key[:8]}",  # Trackio knows a run by its name
        config=dict(run.settings),
        resume="allow",
        embed=False,
    )
    try:
        yield lambda row, step: trackio.log(row, step=step)
    finally:
        trackio.finish()


@contextmanager
def _mlflow(run: TrackedRun) -> Iterator[Log]:
    import mlflow

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(f"sqlite:///{(run.out / 'mlflow.db').resolve()}")
    if not os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        mlflow.set_experiment(PROJECT)
    tag = f"{PROJECT}.key"
    runs = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{run.key}'", output_format="list")
    with mlflow.start_run(run_id=runs[0].info.run_id if runs else None, run_name=run.out.name):
        if not runs:
            mlflow.set_tag(tag, run.key)
            mlflow.log_params(dict(run.settings))
        yield lambda row, step: mlflow.log_metrics(row, step=step)


ADVICE = {
    "tensorboard": "pip install 'fastvit_triton[tensorboard]'",
    "wandb": "pip install 'fastvit_triton[wandb]'",
    "trackio": "pip install 'fastvit_triton[trackio]'",
    "mlflow": "pip install 'fastvit_triton[mlflow]'",
}
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
