"""Tests of training: pure functions at known points, the loop, and resumed runs."""

import errno
import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel_job
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from fastvit_triton.files import replacing
from fastvit_triton.models import create_model
from fastvit_triton.train import checkpoint, outputs, plots, run
from fastvit_triton.train import progress as progress_display
from fastvit_triton.train.augment.mix import mixup
from fastvit_triton.train.data import Data, TensorBatches
from fastvit_triton.train.data.split import SPLIT
from fastvit_triton.train.data.transform import Transform
from fastvit_triton.train.loop import Diverged, Progress, Score, evaluate, fit
from fastvit_triton.train.optim import adamw, parameter_groups, reinit_pos_embed, warmup_cosine
from fastvit_triton.train.progress import show_progress, with_estimate
from fastvit_triton.train.recipes import DIGITS
from fastvit_triton.train.run import Run
from fastvit_triton.train.settings import resolve_settings
from fastvit_triton.train.step import Step, count_correct
from fastvit_triton.train.trainer import Trainer, build_trainer

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2}
RECIPE = replace(parallel_job.RECIPE, epochs=3, ema_decay=0.9, shift=1)


def tiny(**options) -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_digits_patch2_8", **(TINY | options))


def stripes(count: int = 20) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] with one bright row, whose index is the class."""
    targets = torch.arange(count) % 8
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.2
    images[torch.arange(count), 0, targets] += 0.8
    return images, targets


def data(augment: Callable | None = torch.clone) -> Data:
    transform = Transform((8, 8), (0.2,), (0.3,))
    train = TensorBatches(*stripes(20), transform, 8, augment)
    return Data("stripes", tuple("0123456789"), transform, train, TensorBatches(*stripes(16), transform, 8))


def save(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(model.state_dict(), file)  # the same bytes whatever the file's name


def steps_of(trainer: Trainer, out: Path, state: dict | None = None, seed: int = 0, **options) -> Iterator:
    """The generator of a run in `out`."""
    models: Any = SimpleNamespace(save_weights=save)
    return Run(trainer=trainer, out=out, settings={"seed": seed}, models=models, state=state).steps(**options)


def train(out: Path, epochs: int = 3, resume: bool = False, **options) -> nn.Module:
    """Trains `epochs` of three epochs in `out`; `resume` continues the run there."""
    out.mkdir(exist_ok=True)
    model = tiny(drop_path_rate=0.2, proj_drop_rate=0.1)
    torch.manual_seed(5)
    state = checkpoint.newest_state(out)[0] if resume else None
    built = build_trainer(model, data(), RECIPE)
    for progress in steps_of(built, out, state, seed=5, **options):
        if progress.test is not None and progress.epoch == epochs < RECIPE.epochs:
            break
    return model


@pytest.mark.fast
def test_schedule_at_known_points():
    """Oracle: the docstring's formula by hand for 110 steps, 10 of warm-up, peak 2, floor 1."""
    at = partial(warmup_cosine, steps=110, warmup=10, peak=2.0, floor=1.0)
    assert at(0) == 2 / 11 and at(9) == 20 / 11 and at(10) == 2.0
    assert math.isclose(at(60), 1.5) and math.isclose(at(10 + 25), 1 + (1 + math.sqrt(0.5)) / 2)
    assert at(110) == 1.0
    assert warmup_cosine(0, 1, 0, 3.0) == 3.0
    with pytest.raises(ValueError, match="warmup is 5 of 5 steps"):
        warmup_cosine(0, 5, 5, 1.0)


@pytest.mark.fast
def test_parameter_groups():
    """Oracle: matrices and the patch kernel decay; biases, norms, positions and tokens do not; each is listed once."""
    model = tiny(reg_tokens=2)
    decayed, free = parameter_groups(model, 0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    assert all(names[id(parameter)].endswith("weight") and parameter.ndim > 1 for parameter in decayed["params"])
    assert {"pos_embed", "cls_token", "norm.weight"} <= {names[id(parameter)] for parameter in free["params"]}

    plain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    plain[1].weight = plain[0].weight
    (group,) = parameter_groups(plain, 0.1)
    assert len(group["params"]) == 1
    plain[0].weight.requires_grad_(False)
    assert parameter_groups(plain, 0.1) == []


@pytest.mark.fast
def test_learned_positions_are_redrawn():
    """Oracle: the standard deviation of 17 · 16 normal numbers within four standard errors; a model without any."""
    model = tiny()
    reinit_pos_embed(model, 0.5)
    numbers = model.pos_embed.numel()
    assert abs(model.pos_embed.std().item() - 0.5) < 4 * 0.5 / math.sqrt(2 * numbers)
    reinit_pos_embed(nn.Linear(2, 2), 0.5)


@pytest.mark.fast
def test_mixup_blends_images_and_labels_alike():
    """Oracle: one-hot images, which must be mixed like the labels."""
    targets = torch.tensor([0, 1, 2, 3])
    images = F.one_hot(targets, 5).float()[:, None, None]
    blended, soft = mixup(images, targets, 5, alpha=1.0)
    torch.testing.assert_close(blended[:, 0, 0], soft)
    torch.testing.assert_close(soft.sum(1), torch.ones(4))
    assert 0 < soft[0, 0] < 1
    same, hard = mixup(images, targets, 5, alpha=0)
    assert torch.equal(same, images) and torch.equal(hard.argmax(1), targets)


@pytest.mark.fast
def test_agreement():
    """Oracle: by hand; a mixed target counts by its fraction."""
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert count_correct(logits, torch.tensor([0, 0, 0])) == 2
    assert count_correct(logits, torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.0, 1.0]])) == 1.0


@pytest.mark.fast
def test_evaluate_any_module():
    """Oracle: a module whose logits are its input; cross-entropy and accuracy by PyTorch; the mode is restored."""
    logits, targets = torch.randn(10, 4), torch.arange(10) % 4
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
        model[1].bias.zero_()
    score = evaluate(model, list(zip(logits.split(3), targets.split(3), strict=True)))
    assert model.training
    assert score.accuracy == (logits.argmax(1) == targets).sum().item() / 10
    assert math.isclose(score.loss, F.cross_entropy(logits, targets).item(), rel_tol=1e-6)
    assert torch.equal(score.predictions, logits.argmax(1)) and torch.equal(score.targets, targets)
    with pytest.raises(ValueError, match="no test images"):
        evaluate(model, [])


@pytest.mark.fast
def test_fit_equals_plain_gradient_descent():
    """Oracle: two steps written out by hand, with the schedule's rates and the clipped gradient."""
    batches = list(zip(torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [2, 1, 0]]), strict=True))
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    rates = [0.5, 0.25]
    for (images, targets), rate in zip(batches, rates, strict=True):
        twin.zero_grad()
        F.cross_entropy(twin(images), targets).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= rate * parameter.grad
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    test = partial(evaluate, batches=batches)
    reports = list(fit(model, batches, optimizer, rates.__getitem__, epochs=1, step=Step(clip=0.1), test=test))
    torch.testing.assert_close(model.weight, twin.weight)
    assert [report.step for report in reports] == [1, 2, 2] and [report.images for report in reports] == [3, 6, 6]
    assert reports[0].test is None and reports[2].test.loss == evaluate(model, batches).loss
    assert [report.lr for report in reports] == [0.5, 0.25, 0.25]


@pytest.mark.fast
def test_a_test_split_can_be_kept_for_the_end():
    """Oracle: the test batches are iterated once, after the last step, and only the last report has a score."""
    reads = []

    class Watched(list):
        def __iter__(self):
            reads.append(model.weight.detach().clone())
            return super().__iter__()

    model = nn.Linear(2, 2)
    batches = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))] * 2
    optimizer = torch.optim.SGD(model.parameters())
    test = partial(evaluate, batches=Watched(batches))
    reports = list(fit(model, batches, optimizer, lambda step: 0.1, epochs=3, test=test, test_once=True))
    assert len(reads) == 1 and torch.equal(reads[0], model.weight)
    assert [r.test is not None for r in reports if r.done] == [False, False, True]


@pytest.mark.fast
def test_fit_stops_at_losses_that_are_not_finite():
    """Oracle: infinite images change no weight, and raise after too many in a row."""
    good, bad = [(torch.full((2, 4), value), torch.tensor([0, 1])) for value in (1.0, math.inf)]
    model = nn.Linear(4, 3)
    start = model.weight.detach().clone()

    def train(batches: list, **options) -> list[Progress]:
        optimizer = torch.optim.SGD(model.parameters())
        test = partial(evaluate, batches=[good])
        return list(fit(model, batches, optimizer, lambda step: 0.1, epochs=2, test=test, **options))

    with pytest.raises(Diverged, match=r"in every step, the last being step 1 of epoch 1; lower lr, now 0.1"):
        train([bad])
    with pytest.raises(Diverged, match=r"not finite in 3 steps in a row, the last being step 3 of epoch 1;"):
        train([bad] * 5, patience=3)
    assert torch.equal(model.weight, start)
    reports = train([bad, bad, good] * 2, patience=3)
    assert [report.images for report in reports[:7]] == [0, 0, 2, 2, 2, 4, 4] and model.weight.isfinite().all()
    with pytest.raises(ValueError, match="no training images left"):
        train([])


@pytest.mark.fast
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, undrawn):
    """Oracle: three uninterrupted epochs, bit by bit, with shuffling, augmentation, mixup, dropout and drop path."""
    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", epochs=1)
    torch.rand(7)  # another process has another random state
    parts = train(tmp_path / "parts", resume=True)
    for (name, a), b in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    a, b = (checkpoint.load_state(tmp_path / folder / outputs.STATE) for folder in ("whole", "parts"))
    timeless = lambda rows: [{k: v for k, v in row.items() if "second" not in k} for row in rows]  # noqa: E731
    assert timeless(a["history"]) == timeless(b["history"]) and len(a["history"]) == 3
    assert torch.equal(a["generators"]["cpu"], b["generators"]["cpu"])
    kept = torch.load(io.BytesIO((tmp_path / "parts" / outputs.WEIGHTS).read_bytes()))
    for part in ("model", "ema"):
        assert all(torch.equal(tensor, b[part][name]) for name, tensor in a[part].items())
    assert torch.equal(kept["norm.weight"], a["ema"]["module.norm.weight"])


@pytest.mark.fast
def test_a_run_writes_all_files_and_a_finished_run_can_plot_again(tmp_path: Path):
    """Oracle: the list of files; the log has one row per epoch and equals the state's history."""
    train(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(outputs.FILES.keys() - {SPLIT, outputs.TABLE})
    header, *rows = (tmp_path / outputs.LOG).read_text().splitlines()
    history = checkpoint.load_state(tmp_path / outputs.STATE)["history"]
    assert header.split(",") == list(history[0]) and len(rows) == 3
    assert [float(number) for number in rows[2].split(",")] == list(history[2].values())
    (tmp_path / outputs.CURVES).unlink()
    train(tmp_path, resume=True)
    assert (tmp_path / outputs.CURVES).exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_full_disk_leaves_the_epoch_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int):
    """Oracle: the disk is full at each file in turn; all files still load, and the run resumes.

    Resuming writes three files again, and an epoch writes four.
    """
    monkeypatch.setattr(run, "is_best", lambda history: True)
    train(tmp_path, epochs=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sync, calls = os.fsync, iter(range(1, 1000))

    def full(handle: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{handle}") and next(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^cannot write .*: the disk is full; its previous content is intact$"):
        train(tmp_path, epochs=2, resume=True)
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() - before.keys() <= {outputs.PREVIOUS}
    unchanged = (outputs.STATE, outputs.WEIGHTS, outputs.BEST, outputs.LOG)[max(fails_at - 4, 0) :]
    assert all(after[name] == before[name] for name in unchanged)
    train(tmp_path, resume=True)
    assert len(checkpoint.load_state(tmp_path / outputs.STATE)["history"]) == 3


class _Pickled:
    """An object that `torch.load` must not construct."""


@pytest.mark.fast
def test_damaged_or_malicious_states_raise(tmp_path: Path):
    """Oracle: one sentence that names the file."""
    path = tmp_path / "state.pt"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=f"{path} is damaged or not a training state"):
        checkpoint.load_state(path)
    torch.save(_Pickled(), path)
    with pytest.raises(ValueError, match=f"{path} is damaged or not a training state"):
        checkpoint.load_state(path)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match=f"{path} is not a training state of fastvit-triton"):
        checkpoint.load_state(path)
    torch.save({"model": {"weight": torch.zeros(10**5)}}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))
    with pytest.raises(ValueError, match="its records are larger than the file"):
        checkpoint.load_state(path)


@pytest.mark.fast
def test_settings_of_a_resumed_run():
    """Oracle: settings that are not given come from the run; a different setting raises an error that names it."""
    saved = resolve_settings({"epochs": 7})
    assert saved["data"] == "digits" and saved["epochs"] == 7 and saved["lr"] == DIGITS.lr
    state = {"settings": saved, "progress": {"epoch": 3, "step": 5, "done": True}}
    assert resolve_settings({"epochs": 7}, state) == saved
    with pytest.raises(ValueError, match=r"seed is -1; use an integer in \[0, 2\^63\)"):
        resolve_settings({"seed": -1})
    with pytest.raises(ValueError, match="epochs is 8, but the run to resume has 7; leave it out, or pass --accept"):
        resolve_settings({"epochs": 8}, state)
    changed = resolve_settings({"epochs": 8, "weight_decay": 0.2}, state, accept_changes=True)
    assert changed == saved | {"epochs": 8, "weight_decay": 0.2}
    with pytest.raises(ValueError, match=r"recipe is folder, but the run to resume has digits; leave it out$"):
        resolve_settings({"recipe": "folder"}, state, accept_changes=True)
    older = {"settings": {name: value for name, value in saved.items() if name != "deterministic"}}
    assert resolve_settings({}, state | older) == saved
    del older["settings"]["lr"]
    with pytest.raises(ValueError, match="the settings of the run have no lr; its state is damaged"):
        resolve_settings({}, state | older)


@pytest.mark.fast
def test_a_finished_run_may_have_more_epochs():
    """Oracle: the rule: more epochs, once all are done."""
    saved = resolve_settings({"epochs": 7})
    finished = {"settings": saved, "progress": {"epoch": 7, "step": 5, "done": True}}
    assert resolve_settings({"epochs": 9}, finished) == saved | {"epochs": 9}
    for epochs, progress in ((6, {"epoch": 7, "done": True}), (9, {"epoch": 7, "done": False})):
        with pytest.raises(ValueError, match=f"epochs is {epochs}, but the run to resume has 7"):
            resolve_settings({"epochs": epochs}, finished | {"progress": progress | {"step": 5}})
    in_steps = resolve_settings({"data": ".", "recipe": "vit-finetune"})  # 20,000 steps
    for epoch, accepted in ((3, False), (200, True)):
        state = {"settings": in_steps, "progress": {"epoch": epoch, "step": 100, "done": True}}
        with nullcontext() if accepted else pytest.raises(ValueError, match="epochs is 250, but the run to resume has"):
            assert resolve_settings({"epochs": 250}, state)["epochs"] == 250


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", [0, 1, 16])
def test_plots_are_drawn_without_global_state(tmp_path: Path, wrong: int):
    """Oracle: PNG files of a reasonable size; red pixels only if a prediction is wrong; pyplot is not used."""
    import matplotlib
    from PIL import Image

    before = dict(matplotlib.rcParams)
    targets = stripes(16)[1]
    predictions = targets.clone()
    predictions[:wrong] = 9
    score = Score(0.1, (16 - wrong) / 16, predictions, targets, confidences=torch.linspace(0.5, 1, 16))
    plots.predictions(data(), score, max_images=12).savefig(tmp_path / "p.png", dpi=150)
    row = dict(epoch=1, lr=1e-3, train_loss=1.0, train_accuracy=0.5, test_loss=1.1, test_accuracy=0.4)
    untested = row | dict(test_loss=None, test_accuracy=None)
    plots.curves([untested, row] if wrong else [row, untested]).savefig(tmp_path / "c.png", dpi=150)
    assert dict(matplotlib.rcParams) == before
    with Image.open(tmp_path / "p.png") as drawn:
        pixels = torch.tensor(list(drawn.convert("RGB").resize((600, 400)).tobytes())).view(-1, 3)
    red = ((pixels[:, 0] > 190) & (pixels[:, 1] < 100) & (pixels[:, 2] < 100)).sum()
    assert (red > 100) == (wrong > 0)
    with Image.open(tmp_path / "c.png") as drawn:
        assert min(drawn.size) > 400


@pytest.mark.fast
@pytest.mark.parametrize("lr, heights, label", [(2e-5, [2, 1], "10^{-5}"), (0.5, [5, 2.5], "10^{-1}"), (0, [0, 0], "")])
def test_learning_rates_have_a_scientific_axis(lr, heights, label):
    """Oracle: the power of ten by hand; rates of 0 have none."""
    row = dict(epoch=1, lr=lr, train_loss=1.0, train_accuracy=0.5, test_loss=1.1, test_accuracy=0.4)
    *_, rate = plots.curves([row, row | dict(epoch=2, lr=lr / 2)]).axes
    assert rate.lines[0].get_ydata() == pytest.approx(heights)
    assert label in rate.get_ylabel() and bool(label) == bool(rate.get_ylabel())


@pytest.mark.parametrize("stacked", [False, True])
def test_the_legend_covers_no_line(stacked):
    """Oracle: where the legend and its neighbours are drawn: above the axes, beside the title."""
    row = dict(lr=0.1, train_accuracy=0.5, test_accuracy=0.4)
    history = [row | dict(epoch=i, train_loss=1.6 - 0.1 * i, test_loss=1 / i) for i in range(1, 4)]
    page = plots.curves(history, stacked)
    page.canvas.draw()
    loss = page.axes[0]
    legend = loss.get_legend().get_window_extent()
    assert legend.y0 >= loss.get_window_extent().y1
    title = next(text for text in [*loss.texts, loss._left_title] if text.get_text() == "Loss").get_window_extent()
    assert legend.x0 > title.x1 and legend.y1 <= page.bbox.y1 and legend.x1 <= page.bbox.x1


@pytest.mark.fast
def test_adamw_decays_matrices_only():
    """Oracle: with zero gradients a step multiplies matrices by 1 − lr · decay and leaves the rest unchanged."""
    model = nn.Linear(3, 3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias.detach(), before["bias"])


@pytest.mark.fast
@pytest.mark.parametrize(
    "seconds, total, said",
    [
        ([9.0, 2.0, 2.0, 2.0, 50.0], 1804, "about 1 h 0 min to go, at 2 s a step"),
        ([9.0, 2.0, 2.0, 2.0, 50.0], 30, None),
        ([30.0, 1.0], 7, "about 3 min to go, at 30 s a step"),
        ([10.0, 11.0, 1.0], 12, "about 2 min to go, at 11 s a step"),
    ],
    ids=["four steps", "short run", "one long step", "two long steps"],
)
def test_estimated_time(seconds, total, said, monkeypatch):
    """Oracle: by hand: the first step is left out unless it takes the patience; ends of epochs are no steps."""
    now = 0.0
    monkeypatch.setattr("fastvit_triton.train.progress.time.perf_counter", lambda: now)

    def steps():
        nonlocal now
        for i, each in enumerate(seconds, 1):
            now += each
            yield Progress(1, i, done=False)
        yield Progress(1, len(seconds))

    sentences: list[str] = []
    assert len(list(with_estimate(steps(), total, sentences.append))) == len(seconds) + 1
    assert sentences == ([said] if said else [])


@pytest.mark.fast
@pytest.mark.parametrize("terminal", [True, False])
def test_display(terminal: bool):
    """Oracle: no line exceeds 80 columns or is cut; one line per epoch without a terminal; the remaining time."""
    page = io.StringIO()
    console = Console(file=page, force_terminal=terminal, width=80, color_system=None)
    loss, accuracy = torch.tensor(1.234), torch.tensor(0.875)
    with show_progress(console, epochs=60, steps_per_epoch=23) as show:
        for test in (None, Score(0.1, 0.95, loss, loss)):
            show(Progress(60, 23, 1437, 1437 * loss, 1437 * accuracy, 1e-3, 1.0, None, test is not None, test))
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", page.getvalue())) if line]
    separator = " " if terminal else "  "
    words = ("epoch 60/60", "loss 1.234", "train 87.5 %", "test 95.0 %", "1,437 images/s")
    assert separator.join(words) in lines[-1]
    assert all(len(line) <= 80 for line in lines) or not terminal
    assert re.search(r"ETA \d*\d:\d\d\s*$", lines[-1]), lines[-1]
    assert terminal or len(lines) == 1


@pytest.mark.fast
def test_lines_within_long_epochs(monkeypatch: pytest.MonkeyPatch):
    """Oracle: by hand, on a clock that a step of 25 s advances: a line where 60 s passed without one, none for the
    last step, whose epoch has a line; 25 s for each step left, also after a resumption in the middle of an epoch."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_display, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def lines(first: int, seconds: float, steps: int = 7) -> list[str]:
        page = io.StringIO()
        with show_progress(Console(file=page, force_terminal=False, width=80), 2, steps) as show:
            for epoch, start in ((1, first), (2, 1)):
                for step in range(start, steps + 1):
                    clock.now += seconds
                    sums = 200 * step, torch.tensor(300.0 * step), torch.tensor(100.0 * step)
                    show(Progress(epoch, step, *sums, 1e-3, seconds * step, {}, False))
                show(Progress(epoch, steps, *sums, 1e-3, seconds * steps, None, True))
        return page.getvalue().splitlines()

    found = lines(1, 25)
    assert [re.sub("  loss .* images/s", "", line) for line in found] == [
        "epoch 1/2  step 3/7  ETA 4:35",
        "epoch 1/2  step 6/7  ETA 3:20",
        "epoch 1/2  ETA 2:55",
        "epoch 2/2  step 3/7  ETA 1:40",
        "epoch 2/2  step 6/7  ETA 0:25",
        "epoch 2/2  ETA 0:00",
    ]
    assert found[0] == "epoch 1/2  step 3/7  loss 1.500  train 50.0 %  8 images/s  ETA 4:35"
    assert lines(4, 25)[0].endswith("ETA 3:20") and lines(4, 25)[0].startswith("epoch 1/2  step 6/7")
    assert len(lines(1, 8)) == 2 and lines(1, 4000)[0].endswith("ETA 14:26:40")
