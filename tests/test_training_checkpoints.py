"""Tests of checkpoints as training scripts write them: any suffix, what lies beside the weights, and their wrappers."""

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import one_sentence
from checkpoints import assert_equal, build, randomize
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import ViTConfig, ViTForImageClassification

from fastvit_triton import create_model, load_weights, save_weights
from fastvit_triton.checkpoints import WeightsError
from fastvit_triton.layers.embed import resize_pos_embed

pytestmark = pytest.mark.fast

NAME = "vit_tiny_patch16_224"


def loaded(source: object, want: nn.Module) -> tuple[str, ...]:
    """Loads into another model, which must then equal `want`; returns what was dropped."""
    model = build(NAME)
    report = load_weights(model, source)
    assert_equal(model, want)
    assert all(key in str(report) for key in report.dropped[:4])
    return report.dropped


@pytest.mark.parametrize("suffix", [".ckpt", ".pth.tar", ".model", ".safetensors", ".npz", ".bin", ""])
def test_contents_decide(suffix: str, tmp_path: Path):
    """Oracle: the model; every kind of file under every name."""
    model, path = build(NAME), tmp_path / f"a{suffix}"
    state, arrays = model.state_dict(), io.BytesIO()
    np.savez(arrays, **{key: tensor.numpy() for key, tensor in state.items()})
    for save in (
        lambda: save_file(state, path),
        lambda: torch.save(state, path),
        lambda: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda: path.write_bytes(arrays.getvalue()),
    ):
        save()
        assert loaded(path, model) == ()


BESIDE = {
    "NumPy scalars": [np.float64(0.8), np.int64(3), np.bool_(True), np.float32(1), np.str_("a"), np.datetime64("2026")],
    "arrays": [np.arange(3), np.ones((2, 3), "f4"), np.array(["a", "b"]), np.zeros(0)],
    "random generators": [np.random.get_state(), random.getstate(), random.Random(0), torch.get_rng_state()],
    "paths": [Path("runs"), pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("C:/a")],
    "times": [
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.date(2026, 1, 2),
        datetime.timedelta(seconds=3),
    ],
    "arguments": [argparse.Namespace(lr=0.1, out=Path("runs")), types.SimpleNamespace(a=1)],
    "numbers": [
        decimal.Decimal("0.1"),
        fractions.Fraction(1, 3),
        range(3),
        frozenset([1]),
        uuid.uuid4(),
        torch.__version__,
    ],
    "collections": [
        collections.defaultdict(list, {"loss": [0.1]}),
        collections.defaultdict(float),
        collections.OrderedDict(a=1),
        collections.deque([1.0, 2.0], maxlen=20),
        collections.Counter("ab"),
    ],
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_harmless_objects_beside_the_weights(kind: str, legacy: bool, tmp_path: Path):
    """Oracle: the model; with each of these objects alone, PyTorch's own list of types refuses some of each kind."""
    model, path = build(NAME), tmp_path / "a.pth"
    torch.save({"model": model.state_dict(), "beside": BESIDE[kind]}, path, _use_new_zipfile_serialization=not legacy)
    assert loaded(path, model) == ()


def tutorial(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """PyTorch's tutorial "Saving and loading a general checkpoint"."""
    states = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    return {"epoch": 3, **states, "loss": torch.tensor(0.4)}


def imagenet(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """PyTorch's examples/imagenet/main.py."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    states = {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    module = nn.DataParallel(model)
    return {"epoch": 3, "arch": "vit", "state_dict": module.state_dict(), "best_acc1": torch.tensor(71.0), **states}


def profiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """A profiler that counts operations in buffers of each module."""
    counts = {name: torch.zeros(1, dtype=torch.float64) for name in ("total_ops", "total_params")}
    inside = {f"blocks.0.{name}": count for name, count in counts.items()}
    return model.state_dict() | counts | inside


SCRIPTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "tutorial": (tutorial, ()),
    "imagenet": (imagenet, ()),
    "averaged": (lambda model, _: AveragedModel(model).state_dict(), ("n_averaged",)),
    "profiler": (profiled, ("total_ops", "total_params", "blocks.0.total_ops", "blocks.0.total_params")),
    "net": (lambda model, _: {"net": model.state_dict(), "acc": 80.0, "epoch": 3}, ()),
    "DeepSpeed": (lambda model, _: {"module": model.state_dict(), "lr_scheduler": None, "global_steps": 3}, ()),
    "composer": (lambda model, _: {"state": {"model": model.state_dict(), "optimizers": {}}, "rng": [1]}, ()),
    "loss": (
        lambda model, _: {"model": {**{f"net.{k}": t for k, t in model.state_dict().items()}, "loss.w": torch.ones(5)}},
        ("loss.w",),
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_files_of_training_scripts(script: str, tmp_path: Path):
    """Oracle: the model, and the tensors that are not its own, which are named."""
    model, path = build(NAME), tmp_path / "checkpoint.pth.tar"
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3, 32, 32)).sum().backward()
    optimizer.step()  # its state has tensors, too
    write, dropped = SCRIPTS[script]
    torch.save(write(model, optimizer), path)
    assert set(loaded(path, model)) == set(dropped)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_files_of_lightning(tmp_path: Path):
    """Oracle: the model; the weights of the loss, which Lightning writes beside it, are named."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Task(lightning.LightningModule):
        def __init__(self, rate: float, out: Path) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model, self.loss = build(NAME), nn.CrossEntropyLoss(torch.ones(7))

        def training_step(self, batch, index):
            return self.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.hparams.rate, momentum=0.9)

    task = Task(0.1, tmp_path)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer = lightning.Trainer(max_steps=1, default_root_dir=tmp_path, **quiet)
    data = [(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]))]
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=None))
    (path,) = tmp_path.rglob("*.ckpt")
    assert loaded(path, task.model) == ("loss.weight",)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_wrapped_models_are_loaded_and_saved(wrap: Callable, tmp_path: Path):
    """Oracle: the model inside."""
    source, model = build(NAME), build(NAME)
    save_weights(wrap(source), tmp_path / "a.safetensors")
    load_weights(wrap(model), tmp_path / "a.safetensors")
    assert_equal(model, source)


class Metrics:
    """A class of a training script."""


@pytest.mark.parametrize("legacy", [False, True])
def test_what_is_refused_lists_its_entries(legacy: bool, tmp_path: Path):
    """Oracle: the entries and their kinds by hand; the file's own class is named, and not called."""
    state, path = build(NAME).state_dict(), tmp_path / "a.pt"
    two = {"generator": state, "critic": state, "epoch": 3}
    for held, words in (
        (
            {"model": state, "metrics": Metrics()},
            r"names test_training_checkpoints.Metrics, whose code would run, and it ",
        ),
        (
            {"model": state, "metrics": Metrics()},
            r"holds model \(dict of 32\), metrics \(test_training_chec\S+Metrics\);",
        ),
        (Metrics(), r"holds a test_training_checkpoints.Metrics;"),
        (
            two,
            r"several state dicts, generator, critic; its entries are generator \(\w+ of 32\), critic \(\w+ of 32\), ",
        ),
        ({"model": {}, "epoch": 3}, r"no state dict; its entries are model \(dict\), epoch \(int\)"),
        ({"epoch": 3, "history": [1, 2]}, r"no state dict; its entries are epoch \(int\), history \(list of 2\)"),
    ):
        torch.save(held, path, _use_new_zipfile_serialization=not legacy)
        with one_sentence(words, WeightsError):
            load_weights(build(NAME), path)
    torch.save({"model": state}, path, pickle_protocol=4, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=r"pickle_protocol is above 2, .* and it holds model \(\w+ of 32\);"):
        load_weights(build(NAME), path)


@pytest.mark.parametrize("size, into", [((16, 64), (32, 32)), ((32, 32), (16, 64)), ((64, 16), (16, 64))])
def test_positions_follow_the_configuration_beside_the_weights(size: tuple, into: tuple, tmp_path: Path):
    """Oracle: PyTorch's interpolation, as of transformers, between grids of as many patches; also for the file alone;
    without a configuration the report names the grid that was assumed."""
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, patch_size=8)
    theirs = ViTForImageClassification(ViTConfig(**sizes, image_size=size, num_labels=7))
    nn.init.normal_(theirs.vit.embeddings.position_embeddings)
    theirs.save_pretrained(tmp_path)
    table = theirs.vit.embeddings.position_embeddings.detach()
    old, new = (tuple(side // 8 for side in sides) for sides in (size, into))
    grid = table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    want = nn.functional.interpolate(grid, new, mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        model = create_model(NAME, img_size=into, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
        report = load_weights(model, source)
        assert torch.equal(model.pos_embed, torch.cat((table[:, :1], want), 1))
        assert report.positions == f"{old[0]}x{old[1]} resized to {new[0]}x{new[1]} (bicubic)"
    (tmp_path / "config.json").unlink()
    report = load_weights(model, tmp_path)
    assert report.positions == ("" if new[0] == new[1] else f"{new[0]}x{new[1]} (assumed)")
    assert torch.equal(model.pos_embed, table)


TABLES = {  # model → options, and a size of images with as many patches as a square of half the length
    "vit_tiny_patch16_224": (dict(depth=1), (32, 128)),
    "cait_xxs24_224": (dict(depth=1), (32, 128)),
    "tnt_s_patch16_224": (dict(depth=1), (32, 128)),
    "ceit_tiny_224": (dict(depth=1), (64, 256)),
    "pvt_tiny": (dict(depths=(1, 1, 1, 1)), (64, 256)),
    "crossvit_tiny_240": ({}, (240, 960)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_as_many_rows_are_resized_in_every_family(name: str, tmp_path: Path):
    """Oracle: `resize_pos_embed` between the grids by hand, of the size that the file states."""
    options, size = TABLES[name]
    source = randomize(create_model(name, img_size=size, num_classes=3, **options))
    model = create_model(name, img_size=(2 * size[0], size[1] // 2), num_classes=3, **options)
    save_weights(source, tmp_path / "a.safetensors")
    report = load_weights(model, tmp_path / "a.safetensors")
    grids = re.findall(r"(\d+)x(\d+) resized to (\d+)x(\d+) \((\w+)\)", report.positions)
    tables = [key for key, _ in source.named_parameters() if re.search(r"pos_embed|patch_pos", key)]
    assert len(grids) == len(tables)
    for key, (*sides, mode) in zip(tables, grids, strict=True):
        h, w, rows, columns = map(int, sides)
        assert (rows, columns) == (2 * h, w // 2) and w * size[0] == h * size[1]
        table = source.get_parameter(key)
        want = resize_pos_embed(table, (h, w), (rows, columns), table.shape[1] - h * w, mode)
        assert torch.equal(model.get_parameter(key), want) and not torch.equal(want, table)
