"""Tests of SIGTERM and SIGUSR1 in training: a state at the next step, a line, and the same weights when resumed."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import refused, start
from patience import HANG, PATIENCE
from test_data import write_folder
from test_photos import SMALL, photographs
from test_recovery import build, same, train, weights
from test_train import steps_of

from fastvit_triton.cli import main
from fastvit_triton.train import checkpoint, progress, stopping
from fastvit_triton.train.checkpoint import STATE, load_state
from fastvit_triton.train.distributed import World
from fastvit_triton.train.loop import Progress
from fastvit_triton.train.outputs import LOCK
from fastvit_triton.train.stopping import GRACE, SIGNALS, Stopped, listening, outlive

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process that is sent a signal")


@pytest.fixture(autouse=True)
def handlers():
    """Checks that each test leaves the handlers of signals as they were."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [3, 8])  # within an epoch of eight steps, and its last
def test_a_stopped_run_resumes_with_the_same_bits(step: int, tmp_path: Path, undrawn):
    """Oracle: the weights of a run that was not stopped, bit by bit; the state is of the step after the signal."""
    out, whole = tmp_path / "stopped", tmp_path / "whole"
    out.mkdir()
    whole.mkdir()
    train(whole, save_every=None)
    with listening() as request, pytest.raises(Stopped, match=f"after step {step} of epoch 1"):
        request.deferred = True
        for now in steps_of(build(), out, stop=request):
            if now.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    held = load_state(out / STATE)["progress"]
    assert (held["epoch"], held["step"], held["done"]) == (1, step, False)
    train(out, save_every=None)
    assert same(weights(out), weights(whole))


@pytest.mark.full
def test_a_run_that_is_asked_at_its_end_is_finished(tmp_path: Path):
    """Oracle: no exception after the last epoch; its plots are drawn."""
    with listening() as request:
        request.deferred = True
        for now in steps_of(build(), tmp_path, stop=request):
            if now.epoch == build().epochs and now.done:
                os.kill(os.getpid(), signal.SIGTERM)
    assert request.name == "SIGTERM" and (tmp_path / "curves.png").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", SIGNALS)
def test_the_command_ends_with_a_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Oracle: the exit code of shells, the sentence, and a state of the step after the signal."""
    name, out = signal.Signals(number).name, tmp_path / "run"

    @contextmanager
    def show(*_: object):
        yield lambda now: os.kill(os.getpid(), number)

    monkeypatch.setattr(progress, "show_progress", show)
    words = ["train", "--out", str(out), "--device", "cpu", "--epochs", "3", "--batch-size", "512"]
    sentence = refused(capsys, *words, code=128 + number)
    assert sentence.startswith(f"fastvit-triton: stopped by {name} after step 2 of epoch 1; {out} holds everything")
    assert sentence.endswith(f"resume with: fastvit-triton train --out {out} --resume")
    assert load_state(out / STATE)["progress"]["step"] == 2


@pytest.mark.full
def test_a_signal_to_all_processes(tmp_path: Path):
    """Oracle: the exit code and the sentence; schedulers send it also to the workers, which live on for a while."""
    out, data = tmp_path / "run", photographs(tmp_path / "photographs", {"a": 9, "b": 9})
    words = [*SMALL, "--val-split", "0.5", "--epochs", "5000", "--workers", "2", "--out", str(out)]
    child = start("train", "--data", str(data), *words, preexec_fn=os.setsid)
    try:
        for line in child.stdout:
            if line.startswith("epoch 2/"):
                break
        os.killpg(child.pid, signal.SIGTERM)
        _, errors = child.communicate(timeout=HANG)
    finally:
        child.kill()
    assert child.returncode == 143
    (sentence,) = errors.splitlines()
    assert sentence.startswith("fastvit-triton: stopped by SIGTERM after step ") and load_state(out / STATE)


def test_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Oracle: the sentence and the exit code; nothing is left."""
    monkeypatch.setattr(checkpoint, "newest_state", lambda out: None)
    monkeypatch.setattr(
        "fastvit_triton.train.run.Run.from_settings", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert main(["train", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 143
    assert capsys.readouterr().err == "fastvit-triton: stopped by SIGTERM before the first step\n"
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("run", LOCK)]


def test_several_processes_agree():
    """Oracle: by hand: at each tenth step of an epoch, and at its end, all know that one was asked; else none asks."""

    class Two(World):
        def all_reduce_min(self, count: int) -> int:
            asked.append(count)
            return min(count, 0)  # the other process was asked

    asked, request = [], stopping.Request()
    steps = [Progress(1, step, done=False) for step in range(1, 26)] + [Progress(1, 25)]
    assert [now.step for now in steps if request.at(now, Two(world_size=2))] == [10, 20, 25]
    assert asked == [1, 1, 1]
    request.name = "SIGTERM"
    assert not request.at(steps[4], Two(world_size=2)) and request.at(steps[4], World())


def test_workers_outlive_the_signal():
    """Oracle: the process lives on, and an alarm will end it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        outlive(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 < signal.alarm(0) <= GRACE
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)


def test_other_threads_leave_signals_alone():
    """Oracle: the handlers of the main thread, which alone may set some; the request is never made."""
    seen = []

    def listen() -> None:
        with listening() as request:
            seen.append((signal.getsignal(signal.SIGTERM), request.name))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGTERM), "")]


ENDS = """
import sys
from fastvit_triton.train import FOLDER, load, override_recipe, stopping

stopping.GRACE = 10_000
data = load(sys.argv[1], override_recipe(FOLDER, img_size=8, batch_size=2), workers=1)
next(iter(data.train))
"""


def test_python_ends_with_workers_that_are_in_use(tmp_path: Path):
    """Oracle: the script ends, without a word, long before its workers would end by themselves."""
    root = write_folder(tmp_path / "images", per_class=2)
    script = subprocess.run(
        [sys.executable, "-c", ENDS, root], capture_output=True, text=True, timeout=300 * PATIENCE, check=False
    )
    assert (script.returncode, script.stderr) == (0, "")
