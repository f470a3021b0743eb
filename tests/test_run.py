"""Tests of `train.Run`: in Python it does what the command does, with our models and with those of others."""

import csv
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_data import write_folder
from torch import nn

from fastvit_triton.cli import main, train_models
from fastvit_triton.kernels import measured, onednn
from fastvit_triton.train import Run, newest_state, resolve_settings, trackers
from fastvit_triton.train.outputs import BEST, FILES, LOCK, LOG, WEIGHTS, locked

TIMES = ("images_per_second", "seconds")


@pytest.fixture
def given(tmp_path: Path) -> dict:
    """Settings with random crops, mixing, dropped paths and an average of the weights, on 16 images of 8 x 8 pixels."""
    data = str(write_folder(tmp_path / "images", per_class=4))
    given = {"data": data, "model": "vit_digits_patch2_8", "img_size": 8, "batch_size": 4, "epochs": 3, "seed": 7}
    return given | {"ema_decay": 0.9, "mixup": 0.4, "drop_path_rate": 0.2, "mean": (0.4,) * 3}


def train(out: Path, given: dict, models=train_models, resume: bool = False, epochs: int = 9) -> Run:
    """Trains until an epoch; what the global generator held before does not matter."""
    torch.manual_seed(99)
    with locked(out):
        state = newest_state(out)[0] if resume else None
        run = Run.from_settings(resolve_settings(given, state), out, models, state=state)
        with run.training() as steps:
            for progress in steps:
                if progress.done and progress.epoch == epochs:
                    break
    return run


def command(out: Path, given: dict, *options: str) -> None:
    """Trains with the command."""
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in given.items()}
    words = [word for name, text in texts.items() for word in (f"--{name.replace('_', '-')}", text)]
    assert main(["train", "--out", str(out), "--device", "cpu", "--workers", "0", *words, *options]) == 0


def log(out: Path) -> list[dict]:
    """The rows of the log without times."""
    with (out / LOG).open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def contents(path: Path) -> tuple[dict, dict]:
    """The header of a file of weights, and the bytes of each tensor."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}


def test_a_run_is_the_command(given: dict, tmp_path: Path, undrawn):
    """Oracle: the command's files: weights and best weights with their headers, log, settings and data, to the bit."""
    command(tmp_path / "command", given)
    for name in ("python", "resumed", "resumed by the command"):
        out = tmp_path / name
        train(out, given, epochs=9 if name == "python" else 1)
        if name == "resumed":
            assert len(log(out)) == 1
            train(out, {}, resume=True)
        if name == "resumed by the command":
            command(out, {}, "--resume")
        assert {path.name for path in out.iterdir()} <= {*FILES, LOCK}
        for file in (WEIGHTS, BEST):
            assert contents(out / file) == contents(tmp_path / "command" / file), (name, file)
        assert log(out) == log(tmp_path / "command")
        ours, theirs = (newest_state(folder)[0] for folder in (out, tmp_path / "command"))
        assert ours["settings"] == theirs["settings"] and ours["data"] == theirs["data"]


class Own:
    """Another library: a linear model, and what it was asked to do."""

    def __init__(self) -> None:
        self.calls = []

    def check_settings(self, settings, recipe):
        self.calls.append("check")
        if recipe.img_size != 8:
            raise ValueError("8 pixels")

    def build_model(self, settings, recipe, data, resumed):
        self.calls.append("resume" if resumed else "build")
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, len(data.classes)))

    def ways(self, device):
        return None

    def using_ways(self, ways):
        assert ways is None
        return nullcontext()

    def save_weights(self, model, path, metadata):
        self.calls.append(path.name)
        save_file(model.state_dict(), path, metadata)


def test_models_of_others_are_trained(given: dict, tmp_path: Path):
    """Oracle: the order of the calls by hand; the weights on disk are those of the model; errors come before images."""
    given |= {"ema_decay": None}
    out, own = tmp_path / "out", Own()
    train(out, given, own, epochs=2)
    trained = train(out, {}, own, resume=True).trainer.model
    assert [call for call in own.calls if call not in (WEIGHTS, BEST)] == ["check", "build", "check", "resume"]
    assert own.calls[-1] in (WEIGHTS, BEST)
    kept = load_file(out / WEIGHTS)
    assert all(torch.equal(kept[name], tensor) for name, tensor in trained.state_dict().items())
    with pytest.raises(ValueError, match="8 pixels"):
        Run.from_settings(resolve_settings(given | {"img_size": 16, "data": "none"}), out, own)
    with pytest.raises(ValueError, match="workers is -1"):
        Run.from_settings(resolve_settings(given), out, own, workers=-1)


@pytest.mark.full
@pytest.mark.skipif(onednn.why_not(torch.device("cpu"), torch.float32) is not None, reason="PyTorch has no oneDNN here")
def test_a_resumed_run_keeps_its_ways(given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the weights of the run that was not stopped, bit for bit, by products of oneDNN.

    In between the row of the CPU is gone, and measurements say that every block runs plain; a new run then does.
    """
    row = {"float32": dict.fromkeys(onednn.PHASES, 0.0)}
    products = []
    call = onednn._call
    monkeypatch.setattr(onednn, "_call", lambda *operands, **more: products.append(1) or call(*operands, **more))
    with onednn.using_row(row):
        whole = train(tmp_path / "whole", given)
        train(tmp_path / "stopped", given, epochs=1)
    in_whole_runs = len(products)
    shapes = dict.fromkeys(whole.settings["ways"]["ways"], "plain")
    with measured.using(measured.Measured(ways=shapes)):
        resumed = train(tmp_path / "stopped", {}, resume=True)
        in_resumed_run = len(products) - in_whole_runs
        train(tmp_path / "plain", given)
    assert resumed.settings["ways"]["cpu"] == row == newest_state(tmp_path / "stopped")[0]["settings"]["ways"]["cpu"]
    assert in_whole_runs > in_resumed_run > 0 == len(products) - in_whole_runs - in_resumed_run
    assert contents(tmp_path / "stopped" / WEIGHTS)[1] == contents(tmp_path / "whole" / WEIGHTS)[1]


def test_trackers_receive_each_saved_epoch_once(given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the log, at the global steps of 2 batches an epoch; one key for a run that is stopped and resumed."""
    sent, opened = [], []

    @contextmanager
    def tracker(run):
        opened.append((run.key, run.step, run.settings["run_key"]))
        yield lambda row, step: sent.append((step, row["epoch"]))
        opened.append("closed")

    monkeypatch.setitem(trackers.TRACKERS, "json", tracker)  # the name of a package that is there
    out = tmp_path / "out"
    train(out, given | {"log_to": "json"}, epochs=1)
    key = newest_state(out)[0]["settings"]["run_key"]
    assert sent == [(2, 1)] and opened == [(key, 0, key), "closed"]
    train(out, {}, resume=True)
    assert sent == [(2, 1), (4, 2), (6, 3)] and opened[2:] == [(key, 2, key), "closed"]
    assert len(key) == 32 and len(log(out)) == 3
