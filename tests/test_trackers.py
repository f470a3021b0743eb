"""Tests of experiment trackers: what each receives, on a new run and on a resumed one."""

import csv
import inspect
import os
import sqlite3
import sys
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from commands import refused

from fastvit_triton.cli import main
from fastvit_triton.train import trackers
from fastvit_triton.train.outputs import LOG
from fastvit_triton.train.trackers import TrackedRun, check_trackers, tracking

ROWS = {4: {"epoch": 1, "test_loss": 0.5, "test_accuracy": None}, 8: {"epoch": 2, "test_loss": 0.25}}
SETTINGS = {"lr": 0.5, "policy": "", "betas": (0.9, 0.999), "weights": None}


def track_twice(name: str, out: Path) -> None:
    """Sends the first row in a new run, and the second in the same run resumed."""
    for start, (step, row) in zip((0, 4), ROWS.items(), strict=True):
        with tracking(name, TrackedRun(out, "0123456789abcdef", SETTINGS, start)) as log:
            log(row, step)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values by TensorBoard's own reader, as its page shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path):
    """Oracle: the log's rows, at the global steps of 23 batches an epoch, by TensorBoard's reader; the rows of a run
    that was replaced are gone."""
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    short = ["--recipe", "digits", "--log-to", "tensorboard", "--device", "cpu"]
    assert main(["train", "--out", str(out), "--epochs", "3", *short]) == 0
    assert main(["train", "--out", str(out), "--epochs", "1", "--overwrite", *short]) == 0
    assert main(["train", "--out", str(out), "--resume", "--epochs", "2"]) == 0  # the trackers are those of the run
    with (out / LOG).open() as file:
        rows = list(csv.DictReader(file))
    shown = scalars(out / "tensorboard", "train_loss")
    assert shown == [(23 * int(row["epoch"]), pytest.approx(float(row["train_loss"]))) for row in rows]
    assert len(rows) == 2 and len(scalars(out / "tensorboard", "test_accuracy")) == 2


def test_tensorboard_keeps_the_settings(tmp_path: Path):
    """Oracle: the text that TensorBoard's reader finds, once."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track_twice("tensorboard", tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert '"lr": 0.5' in text.tensor_proto.string_val[0].decode()
    assert scalars(tmp_path / "tensorboard", "test_loss") == [(4, 0.5), (8, 0.25)]


def test_wandb_receives_rows_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the calls that a module with wandb's signatures records (wandb 0.31)."""
    calls = []

    class Opened:
        def log(self, data, step=None, commit=None):
            calls.append((data, step))

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            calls.append(kind)

    def init(
        entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
        config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None,
        force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None, settings=None,
    ):  # fmt: skip
        calls.append((project, id, name, config, resume))
        return Opened()

    module = ModuleType("wandb")
    module.init, module.__spec__ = init, ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    check_trackers("--log-to", "wandb")
    track_twice("wandb", tmp_path / "run")
    opened = ("fastvit_triton", "0123456789abcdef", "run", SETTINGS, "allow")
    first = {"epoch": 1, "test_loss": 0.5}  # without values that were not measured
    assert calls == [opened, (first, 4), None, opened, (ROWS[8], 8), None]


@pytest.mark.filterwarnings("default")  # of the package
def test_wandb_has_these_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: wandb itself, without network: one offline folder for each part, with the same name."""
    wandb = pytest.importorskip("wandb")
    assert {"project", "id", "name", "config", "resume"} <= inspect.signature(wandb.init).parameters.keys()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    track_twice("wandb", tmp_path / "run")
    assert list(tmp_path.glob("wandb/offline-run-*-0123456789abcdef/run-0123456789abcdef.wandb"))


@pytest.mark.filterwarnings("default")  # of the package
def test_trackio_shows_a_resumed_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the table in Trackio's own data base."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    track_twice("trackio", tmp_path / "run")
    (base,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(base).execute("select run_name, step from metrics order by step").fetchall()
    assert rows == [("run-01234567", 4), ("run-01234567", 8)]


@pytest.mark.filterwarnings("default")  # of the package
def test_mlflow_shows_a_resumed_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: MLflow's own client, on the data base in the output folder."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    track_twice("mlflow", tmp_path)
    (run,) = mlflow.search_runs(experiment_names=["fastvit_triton"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "test_loss")
    assert [(point.step, point.value) for point in history] == [(4, 0.5), (8, 0.25)]
    assert run.data.params["lr"] == "0.5" and run.info.status == "FINISHED"
    assert (tmp_path / "mlflow.db").exists()


def test_trackers_are_refused_in_one_sentence(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the sentences; a package that is missing is named before anything is written."""
    out = ("train", "--out", tmp_path / "out")
    assert "--log-to is 'visdom'; use some of tensorboard, wandb" in refused(capsys, *out, "--log-to", "visdom")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    text = refused(capsys, *out, "--log-to", "tensorboard,wandb")
    assert "--log-to tensorboard needs the package tensorboard; pip install 'fastvit_triton[tensorboard]'" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["open", "log", "close"])
def test_a_tracker_that_fails_is_left_out(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: one warning that names the tracker and the error; the other tracker receives every row and is closed."""
    received: dict[str, list] = {"bad": [], "good": []}

    @contextmanager
    def tracker(name: str, run: TrackedRun):
        def fail_at(now: str) -> None:
            received[name].append(now)
            if name == "bad" and now == moment:
                raise ConnectionError("no route\nto host")

        fail_at("open")
        yield lambda row, step: fail_at("log")
        fail_at("close")

    names = {name: partial(tracker, name) for name in received}
    monkeypatch.setattr(trackers, "TRACKERS", names)
    warned: list[str] = []
    with tracking("bad,good", TrackedRun(tmp_path, "", {}), warned.append) as log:
        log(ROWS[4], 4)
        log(ROWS[8], 8)
    assert warned == ["--log-to bad failed and is left out from here on (ConnectionError: no route)"]
    assert received["good"] == ["open", "log", "log", "close"]
    assert received["bad"] == {"open": ["open"], "log": ["open", "log", "close"]}.get(moment, received["good"])


def test_a_tracker_sees_why_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the exception of the run, which wandb and MLflow show as its status; it is not replaced."""
    seen = []

    @contextmanager
    def tracker(run: TrackedRun):
        try:
            yield lambda row, step: None
        except ValueError as error:
            seen.append(error)
            raise

    monkeypatch.setattr(trackers, "TRACKERS", {"one": tracker})
    with pytest.raises(ValueError, match="diverged"), tracking("one", TrackedRun(tmp_path, "", {}), seen.append):
        raise ValueError("the run diverged")
    assert [str(error) for error in seen] == ["the run diverged"]


def test_nothing_is_tracked_unless_asked():
    """Oracle: the function accepts a row without any tracker."""
    with tracking(None, TrackedRun(Path("none"), "", {})) as log:
        log({"epoch": 1}, 1)


def test_a_tracker_is_named_once():
    """Oracle: the tracker that would write each row twice."""
    with pytest.raises(ValueError, match="--log-to is 'wandb,wandb'; name wandb once"):
        check_trackers("--log-to", "wandb,wandb")
