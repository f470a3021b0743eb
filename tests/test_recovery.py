"""Tests of crash recovery. Oracle: a run killed at any moment and resumed ends with bitwise the same weights.

As a script, `test_recovery.py FOLDER SEED`, this file is the process that forks trainers and kills them.
"""

import errno
import itertools
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from agreement import one_sentence
from commands import run_python
from PIL import Image
from sampling import sampled
from test_train import RECIPE, steps_of, stripes, tiny

from fastvit_triton.cli.loading import load_trained
from fastvit_triton.files import replacing, sweep
from fastvit_triton.models import create_model
from fastvit_triton.models.weights import save_weights
from fastvit_triton.train import checkpoint, outputs, run
from fastvit_triton.train.data import Data, TensorBatches
from fastvit_triton.train.data.folder import FolderBatches, ImageFiles
from fastvit_triton.train.data.split import SPLIT
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.loop import Diverged
from fastvit_triton.train.recipes import FOLDER, override_recipe
from fastvit_triton.train.settings import check_unchanged
from fastvit_triton.train.sources import load
from fastvit_triton.train.trainer import Trainer, build_trainer


def build() -> Trainer:
    """A trainer with shuffling, augmentation, erasing, mixing, dropout, stochastic depth, clipping and EMA."""
    transform, model = Transform((8, 8), (0.2,), (0.3,)), tiny(drop_path_rate=0.2, proj_drop_rate=0.1)
    train = TensorBatches(*stripes(61), transform, 8, torch.clone)
    data = Data("stripes", tuple("0123456789"), transform, train, TensorBatches(*stripes(16), transform, 8))
    torch.manual_seed(5)
    return build_trainer(model, data, RECIPE)


def train(out: Path, save_every: int | None = 1, last: int | None = None) -> int:
    """Starts or resumes the run in `out`; returns the number of steps taken, at most `last`."""
    built, steps = build(), 0
    state = checkpoint.newest_state(out)[0] if held(out) else None
    for progress in steps_of(built, out, state, save_every=save_every):
        steps += not progress.done
        if steps == last:
            break
    return steps


def held(out: Path) -> list[Path]:
    return [out / name for name in (checkpoint.STATE, checkpoint.PREVIOUS) if (out / name).exists()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_state(out / checkpoint.STATE)["model"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def die_in(name: str, call: int, after: bool) -> None:
    """Makes this process kill itself before or after the n-th call of os.fsync, os.replace or torch.save."""
    module = torch if name == "save" else os
    real, calls = getattr(module, name), iter(range(1, 10**6))

    def deadly(*args: object, **options: object) -> object:
        now = next(calls) == call
        if now and name == "save" and not after:
            Path(args[1]).write_bytes(b"half a file")
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


def attempt(out: Path, delay: float | None, kill: tuple[str, int, bool] | None) -> bool:
    """Runs a trainer in a forked process that is killed after a delay or at a call; returns True if it finished."""
    child = os.fork()
    if not child:
        if kill is not None:
            die_in(*kill)
        train(out)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.WEXITSTATUS(status) == 0 if os.WIFEXITED(status := os.waitpid(child, 0)[1]) else False


def _blank(*_: object) -> SimpleNamespace:
    """Replaces the figures, which would take most of the time."""
    return SimpleNamespace(savefig=lambda path, **_: path.touch())


def main(root: Path, seed: int) -> None:
    """Kills twenty trainers: ten at random moments, ten while a checkpoint is written."""
    torch.set_num_threads(1)
    outputs.curves = outputs.predictions = _blank
    dice = random.Random(seed)
    (root / "whole").mkdir()
    began = time.perf_counter()
    train(root / "whole")
    span, kills, runs, inside = time.perf_counter() - began, 0, 0, 0
    expected = weights(root / "whole")
    while kills < 20:
        out = root / f"run{runs}"
        out.mkdir()
        runs += 1
        done = False
        while not done:
            kill, delay = None, None
            if kills < 20 and kills % 2:
                kill = dice.choice(("fsync", "replace", "save")), dice.randint(1, 5), dice.random() < 0.5
            elif kills < 20:
                delay = dice.uniform(0.02, span / 6)
            done = attempt(out, delay, kill)
            kills += not done
            inside += any(out.glob(".*")) or len(held(out)) == 1
        assert same(weights(out), expected), out
        assert (out / outputs.LOG).exists() and not any(out.glob(".*"))
    print(f"{kills} kills in {runs} runs, {inside} inside a write")


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the trainers are forked")
def test_killed_runs_end_in_the_same_weights(tmp_path: Path):
    """Oracle: the weights of an uninterrupted run, bit by bit, after twenty kills, some of them during a write."""
    variables = dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1")
    printed = run_python("-W", "ignore", __file__, tmp_path, "0", **variables)
    kills, runs, inside = map(int, re.findall(r"\d+", printed))
    assert kills >= 20 > runs and inside >= 1, printed


@pytest.mark.fast
def test_resumes_within_an_epoch(tmp_path: Path, undrawn):
    """Oracle: an uninterrupted run, including its log except for times."""
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", save_every=None)
    train(tmp_path / "resumed", save_every=3, last=15)  # saved after step 6 of the second epoch
    assert checkpoint.load_state(tmp_path / "resumed" / checkpoint.STATE)["progress"]["step"] == 6
    torch.rand(7)
    train(tmp_path / "resumed", save_every=5)
    assert same(weights(tmp_path / "resumed"), weights(tmp_path / "whole"))
    rows = [(tmp_path / name / outputs.LOG).read_text().splitlines() for name in ("whole", "resumed")]
    assert [row.split(",")[:6] for row in rows[0]] == [row.split(",")[:6] for row in rows[1]]


@pytest.mark.full
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_state_is_replaced_by_the_previous_one(tmp_path: Path, damage: str):
    """Oracle: the sentence, and the weights of an uninterrupted run; if both states are damaged, loading raises."""
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole")
    out = tmp_path / "resumed"
    train(out, last=13)
    path = out / checkpoint.STATE

    def harm(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes({"flip": content, "cut": content[:-100], "empty": b""}[damage])

    harm(path)
    state, sentence = checkpoint.newest_state(out)
    assert sentence.startswith(f"{path} is damaged or not a training state: ")
    assert sentence.endswith(f"; resuming from {out / checkpoint.PREVIOUS}, epoch 2, step 4")
    assert state["progress"]["step"] == 4
    train(out)
    assert same(weights(out), weights(tmp_path / "whole"))
    harm(path)
    harm(out / checkpoint.PREVIOUS)
    with pytest.raises(ValueError, match=r"training_state\.pt is damaged"):
        checkpoint.newest_state(out)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, damage",
    sampled(itertools.product((outputs.WEIGHTS, outputs.BEST, outputs.LOG), ("missing", "empty", "cut")), 4),
)
def test_files_that_follow_from_the_state_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn, name: str, damage: str
):
    """Oracle: the files of the finished run; its last epoch is its best."""
    monkeypatch.setattr(run, "is_best", lambda history: True)
    train(tmp_path)
    path, names = tmp_path / name, (outputs.WEIGHTS, outputs.BEST, outputs.LOG)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    assert before[outputs.WEIGHTS] == before[outputs.BEST]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else before[name][:-7])
    assert train(tmp_path) == 0
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def changed(**fields: object) -> Callable[[dict], dict]:
    """A change of fields of a state's progress."""
    return lambda state: {"progress": state["progress"] | fields}


NO_FIT = "the state does not fit this run: "
WRONG = {  # entries that replace those of a state, and the sentence
    "no progress": (lambda state: {"progress": None}, "progress is None; use a dictionary"),
    "a field less": (
        lambda state: {"progress": {name: value for name, value in state["progress"].items() if name != "lr"}},
        "its progress has no 'lr'",
    ),
    "negative step": (changed(step=-1), "progress step is -1; use an integer of at least 1"),
    "no epoch": (
        lambda state: changed(epoch=0)(state) | {"history": []},
        "progress epoch is 0; use an integer of at least 1",
    ),
    "data as text": (lambda state: {"data": "digits"}, "data is 'digits'; use a dictionary, or None"),
    "epoch as text": (changed(epoch="two"), "progress epoch is 'two'; use an integer of at least 1"),
    "loss as a vector": (changed(loss_sum=torch.zeros(2)), "progress loss_sum is no number"),
    "history as a number": (lambda state: {"history": 3}, "its history is no list of log rows"),
    "a row too many": (lambda state: {"history": 4 * state["history"][:1]}, "its history has 4 rows after epoch 1"),
    "a column less": (lambda state: {"history": [{"epoch": 1}]}, "a row of its history has epoch"),
    "a loss as text": (
        lambda state: {"history": [state["history"][0] | {"train_loss": "low"}]},
        "train_loss of its history is 'low'; use a number, or None",
    ),
    "no generators": (lambda state: {"generators": {}}, f"{NO_FIT}'cpu'"),
    "another model": (lambda state: {"model": {}}, f"{NO_FIT}Error.* Missing key"),
    "a weight of another shape": (
        lambda state: {"model": state["model"] | {"norm.weight": torch.ones(3)}},
        f"{NO_FIT}Error.* size mismatch for norm.weight",
    ),
    "no optimizer groups": (
        lambda state: {"optimizer": {"state": {}, "param_groups": []}},
        f"{NO_FIT}loaded state dict has a different number of parameter",
    ),
    "no scaler": (lambda state: {"scaler": []}, r"scaler is \[\]; use a dictionary"),
    "no EMA": (lambda state: {"ema": None}, NO_FIT),
}


@pytest.mark.parametrize("kind", WRONG)
def test_states_of_wrong_values_raise(state_of_one_epoch: dict, tmp_path: Path, kind: str):
    """Oracle: one sentence, a ValueError, before training."""
    change, sentence = WRONG[kind]
    torch.save(state_of_one_epoch | change(state_of_one_epoch), tmp_path / checkpoint.STATE)
    with one_sentence(sentence):
        train(tmp_path)


@pytest.fixture(scope="module")
def state_of_one_epoch(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("one")
    train(out, save_every=None, last=9)
    return checkpoint.load_state(out / checkpoint.STATE)


def test_changed_data_are_noticed(tmp_path: Path):
    """Oracle: the sentence once an image is moved to another class or replaced; other classes are never accepted."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.effect_noise((9 + i, 9), 50).save(tmp_path / split / name / f"{i}.png")
    recipe = override_recipe(FOLDER, img_size=8, batch_size=2)
    before = {"data": load(str(tmp_path), recipe).identity}

    def check(accept: bool = False) -> None:
        check_unchanged(load(str(tmp_path), recipe), before, accept)

    check()
    check_unchanged(load(str(tmp_path), recipe), {})  # a state of an earlier version
    (tmp_path / "train/cat/0.png").rename(tmp_path / "train/dog/9.png")
    with pytest.raises(ValueError, match=r"^the training images of data .* \(6 images, \w{8}; now 6 images, \w{8}\);"):
        check()
    check(accept=True)
    (tmp_path / "train/dog/9.png").rename(tmp_path / "train/cat/0.png")
    check()
    (tmp_path / "val/dog/1.png").write_bytes((tmp_path / "val/dog/2.png").read_bytes())
    with pytest.raises(ValueError, match=r"^the test images of data .*; restore them, or pass --accept-changes$"):
        check()
    (tmp_path / "train/dog").rename(tmp_path / "train/cow")
    (tmp_path / "val/dog").rename(tmp_path / "val/cow")
    with pytest.raises(ValueError, match="has the classes cat, cow, but the run to resume was trained on cat, dog;"):
        check(accept=True)


@pytest.mark.full
def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the sentence while another process holds the lock, and success once it was killed; empty folders go."""
    monkeypatch.setattr(outputs, "LOCK_SECONDS", 0.1)
    with outputs.locked(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / outputs.LOCK).exists()
    assert not (tmp_path / "new" / "run").exists()
    code = (
        "import sys; from pathlib import Path; from fastvit_triton.train import outputs\n"
        "with outputs.locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", code, str(out)]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env=environment, **pipes) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=r"^another process trains in .*out; wait until it ends, or"):
                with outputs.locked(out):
                    pass
        finally:
            other.kill()
    with outputs.locked(out):
        pass
    assert out.exists()


@pytest.mark.skipif(os.name == "nt", reason="the modes of open files are those of POSIX")
def test_files_are_flushed_by_handles_that_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the mode of the handle; os.fsync on Windows, which is FlushFileBuffers, fails if it is read-only."""
    import fcntl

    real, modes = os.fsync, []

    def fsync(handle: int) -> None:
        modes.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("text")
    assert modes == [os.O_RDWR, os.O_RDONLY]  # the file, then the folder, which Windows skips


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_a_written_file_has_the_mode_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int):
    """Oracle: the mode of a file that `open` creates under the same umask, which other threads see at all times."""
    before, set_umask = os.umask(mask), os.umask
    monkeypatch.setattr(os, "umask", None)
    try:
        (tmp_path / "opened").touch()
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("text")
    finally:
        after = set_umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "opened")]
    assert modes == [0o666 & ~mask] * 2 and after == mask


@pytest.mark.parametrize("trouble", ["the folder is gone", "the lock cannot be deleted"])
def test_the_error_of_a_run_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str):
    """Oracle: the error itself, when cleaning up fails: no folder, or Windows, which deletes no open file."""

    def deny(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "in use", str(path))

    with pytest.raises(ValueError, match="the cause"), outputs.locked(tmp_path / "run"):
        if trouble == "the folder is gone":
            shutil.rmtree(tmp_path / "run")
        else:
            monkeypatch.setattr(Path, "unlink", deny)
        raise ValueError("the cause")


def test_weights_are_there_when_a_plot_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: one sentence for each plot that fails; all other files."""
    said = []

    def fail(*_: object) -> None:
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(outputs, "curves", fail)
    monkeypatch.setattr(outputs, "predictions", fail)
    for _ in steps_of(build(), tmp_path, warn=said.append):
        pass
    sentences = [f"cannot write {tmp_path / name}: no fonts; its previous content is intact" for name in PLOTS]
    assert said == sentences
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        outputs.FILES.keys() - {*PLOTS, SPLIT, outputs.TABLE}
    )


PLOTS = (outputs.CURVES, outputs.PREDICTIONS)


def test_damaged_weights_raise(tmp_path: Path):
    """Oracle: an error after one flipped bit in the last tensor."""
    model = create_model("vit_digits_patch2_8")
    path = tmp_path / outputs.WEIGHTS
    save_weights(model, path, metadata=outputs.weights_metadata(build().data, RECIPE, model, {}, {}))
    load_trained(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged.*its checksum is wrong"):
        load_trained(path)


@pytest.mark.fast
def test_the_old_file_is_kept_and_temporary_files_are_removed(tmp_path: Path):
    """Oracle: the contents after a successful write, a full disk and a killed process."""
    path, before = tmp_path / "a.pt", tmp_path / "b.pt"
    for text in ("one", "two"):
        with replacing(path, keep=before) as temporary:
            temporary.write_text(text)
    assert (path.read_text(), before.read_text()) == ("two", "one")
    with pytest.raises(OSError), replacing(path, keep=before):
        raise OSError(errno.ENOSPC, "full")
    assert (path.read_text(), before.read_text()) == ("two", "one")
    (tmp_path / ".a.pt.x1y2.pt").touch()
    (tmp_path / ".mine.pt").touch()
    sweep(tmp_path, ["a.pt"])
    assert sorted(left.name for left in tmp_path.iterdir()) == [".mine.pt", "a.pt", "b.pt"]


def test_an_interrupt_between_the_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the contents; the new file was complete, so it must be at its path and the old one beside it."""
    path, before = tmp_path / "state", tmp_path / "previous"
    path.write_text("old")
    rename = os.replace

    def interrupted(source, target):
        rename(source, target)
        if Path(target) == before:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(path, keep=before) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and before.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["previous", "state"]


def test_a_rename_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the error of the rename, the old contents beside the path, and no temporary file."""
    path, before = tmp_path / "state", tmp_path / "previous"
    path.write_text("old")
    rename, errors = os.replace, ["first", "second"]

    def failing(source, target):
        if Path(target) == path:
            raise OSError(errors.pop(0))
        rename(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="first"), replacing(path, keep=before) as temporary:
        temporary.write_text("new")
    assert [file.name for file in tmp_path.iterdir()] == ["previous"] and before.read_text() == "old"


@pytest.mark.fast
def test_divergence_names_step_images_and_state(tmp_path: Path):
    """Oracle: images become infinite in the second epoch; the state before that step is complete."""
    whole = build()
    steps = 0
    with pytest.raises(Diverged) as caught:
        for progress in steps_of(whole, tmp_path, save_every=1):
            steps += not progress.done
            if steps == 11:
                whole.data.train.images.fill_(torch.inf)
    sentence = str(caught.value)
    # three good steps in the second epoch, then five bad ones there and five in the third
    assert "not finite in 10 steps in a row, the last being step 5 of epoch 3, images " in sentence
    assert sentence.endswith(f"; {tmp_path / checkpoint.STATE} holds the last good state")
    state = checkpoint.load_state(tmp_path / checkpoint.STATE)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.fast
def test_non_finite_weights_are_not_saved(tmp_path: Path):
    """Oracle: the files after the first epoch; a weight becomes NaN after the last step of the second."""
    whole, names = build(), (outputs.WEIGHTS, outputs.BEST, checkpoint.STATE)
    for progress in steps_of(whole, tmp_path):
        if progress.done and progress.epoch == 1:
            before = [(tmp_path / name).read_bytes() for name in names]
        if progress.step == len(whole.data.train) and progress.epoch == 2 and not progress.done:
            with torch.no_grad():
                next(whole.model.parameters()).fill_(torch.nan)
        if progress.done and progress.epoch == 2:
            break
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_a_worker_that_dies_raises(tmp_path: Path):
    """Oracle: the error sentence."""
    files = [tmp_path / str(i) for i in range(4)]
    images = ImageFiles(files, [0] * 4, ("a",), decode=lambda path: os._exit(1), check=None)
    batches = FolderBatches(tmp_path, images, Transform((8, 8), (0.5,), (0.5,)), batch_size=2, workers=1)
    with pytest.raises(OSError, match=r"^a worker process that decodes images died, perhaps out of memory; lower"):
        list(batches)


def test_a_worker_that_dies_between_batches_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: PyTorch's signal handler raises its RuntimeError in whatever the main thread executes."""

    def handler(*_: object) -> bool:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(run, "has_finite_weights", handler)
    with pytest.raises(OSError, match=r"^a worker process that decodes images died"):
        list(steps_of(build(), tmp_path, save_every=1))


@pytest.mark.fast
def test_a_file_that_vanishes_raises(tmp_path: Path):
    """Oracle: the error sentence names the file."""
    files = [tmp_path / f"{i}.png" for i in range(2)]
    images = ImageFiles(files, [0, 0], ("a",), check=None)
    batches = FolderBatches(tmp_path, images, Transform((8, 8), (0.5,), (0.5,)), batch_size=2)
    with pytest.raises(ValueError, match=r"^2 of 2 images in .* 0.png \(No such file or directory\), 1.png"):
        list(batches)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
