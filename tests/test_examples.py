"""Tests of examples/: notebooks run completely, that for a GPU with a stand-in and without one; every script runs."""

import ast
import json
import re
import runpy
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import timm
import torch
from agreement import normal
from patience import HANG
from PIL import Image
from test_community import GPU, good, parts
from test_data import write_folder

import fastvit_triton
from benchmarks import community
from fastvit_triton.train.data.sample import CLASSES

NOTEBOOK = community.ROOT / "examples" / "measure_on_your_gpu.ipynb"
PHOTOS_BOOK = NOTEBOOK.with_name("photos_to_prediction.ipynb")
TORCH = f"""
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: {GPU!r})
"""
# copies what a command would write on a GPU; fails if there is nothing to copy
COMMAND = """
import shutil, sys
from pathlib import Path
words = sys.argv[1:]
for option in {"--out", "--export"} & set(words):
    target = Path(words[words.index(option) + 1])
    shutil.copy(Path(__file__).with_name(target.name), target)
"""

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the notebook's packages


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """(function that runs a notebook in an empty folder and returns what its code cells print, that folder)."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "FASTVIT_TRITON_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    here = tmp_path / "here"
    here.mkdir()

    def run(path: Path, book: nbformat.NotebookNode | None = None) -> list[str]:
        monkeypatch.setenv("PYTHONPATH", str(path))
        book = book or nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(
            book, timeout=int(HANG), kernel_name="python3", resources={"metadata": {"path": here}}
        ).execute()
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        return ["".join(output.get("text", "") for output in cell.outputs) for cell in code]

    return run, here


@pytest.fixture
def stand_in(tmp_path):
    """The folder of a torch that reports a GPU, and of commands that take no time."""
    folder = tmp_path / "stand_in"
    (folder / "fastvit_triton").mkdir(parents=True)
    (folder / "torch.py").write_text(TORCH)
    (folder / "fastvit_triton" / "__init__.py").write_text("")
    (folder / "fastvit_triton" / "cli.py").write_text(COMMAND)
    for name, part in zip(("benchmark", "selftest", "tuned"), parts(), strict=True):
        (folder / "fastvit_triton" / f"{name}.json").write_text(json.dumps(part))
    return folder


@pytest.mark.full
def test_notebook_on_a_gpu_writes_a_valid_file(notebook, stand_in):
    """Oracle: the same files, joined by hand, and `python -m benchmarks.community check`; the printed line."""
    run, here = notebook
    skipped, first, *printed = run(stand_in)
    held = json.loads((here / "contribution.json").read_text())
    assert held == good() and community.problems(held) == []
    assert skipped == "" and first.startswith("Measuring ") and first.endswith(f" on {GPU}.\n")
    what = "--model vit_base_patch16_224 --batch 64"
    assert printed[:-1] == [
        "$ fastvit-triton selftest --out selftest.json\n",
        f"$ fastvit-triton tune {what}\n$ fastvit-triton tune --export tuned.json\n",
        f"$ fastvit-triton benchmark {what} --out benchmark.json\n",
    ]
    assert json.loads(printed[-1]) == held


def test_notebook_stops_at_a_failing_command(notebook, stand_in):
    """Oracle: the sentence names the command; no file is joined."""
    (stand_in / "fastvit_triton" / "benchmark.json").unlink()
    run, here = notebook
    with pytest.raises(
        nbclient.exceptions.CellExecutionError, match="fastvit-triton benchmark failed with exit code 1"
    ):
        run(stand_in)
    assert not (here / "contribution.json").exists()


@pytest.mark.full
def test_notebook_without_a_gpu_runs_to_the_end(notebook, monkeypatch):
    """Oracle: what every command does without a GPU; the file is invalid only because it has no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run, here = notebook
    _, first, selftest, tune, benchmark, joined = run(community.ROOT)
    assert first.startswith("There is no GPU here")
    assert "ops passed on the CPU in Triton's interpreter" in selftest and "On a GPU, selftest" in selftest
    # a busy machine may not reach the last step in the notebook's 20 s
    assert re.search(r"Every step was executed\.|Steps were not reached in time;", tune) and "On a GPU, tune" in tune
    assert "ours eager" in benchmark and "On a GPU, benchmark" in benchmark
    warning, line = joined.splitlines()
    held = json.loads((here / "contribution.json").read_text())
    assert "nothing to contribute" in warning and json.loads(line) == held
    wrong = community.problems(held)
    assert len(wrong) == 2 and all("gpu is null; it must be the name of a GPU" in sentence for sentence in wrong)


@pytest.mark.full
def test_notebook_of_photos(notebook):
    """Oracle: the sample and its division by hand, the accuracy of training in `evaluate`, up to the digits of either,
    and a picture of every class, of the curves, the predictions and the explanation. One epoch is trained."""
    run, here = notebook
    book = nbformat.read(PHOTOS_BOOK, as_version=4)
    (cell,) = (cell for cell in book.cells if "EPOCHS = 30" in cell.source)
    cell.source = cell.source.replace("EPOCHS = 30", "EPOCHS = 1")
    _, listed, names, train, _, _, evaluate, explain, predict = run(community.ROOT, book)
    assert listed.splitlines() == [f"{name}: 40 files" for name in CLASSES] and names.split() == [*CLASSES]
    assert re.search(r"^images +192 +48$", train, re.MULTILINE) and "epoch 1/1" in train
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) % \(.*\) after 1 epoch", train)
    assert min(abs(float(word) - float(accuracy)) for word in re.findall(r"([\d.]+) %", evaluate)) < 0.06
    assert "\x1b" not in train + evaluate and "report.html" in explain
    assert re.findall(r"^photos/(\w+)/39.jpg: \w+ \d+%, then \w+ \d+%$", predict, re.MULTILINE) == [*CLASSES]
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]
    assert shown == [0, 0, 6, 0, 1, 1, 0, 1, 0] and (here / "runs/photos/model.safetensors").exists()


def test_notebooks_are_stored_without_outputs():
    """Oracle: nbformat. No outputs or counts are stored, markdown precedes each code cell, only pip is skipped."""
    for path, commands in (
        (NOTEBOOK, {"selftest", "tune", "benchmark"}),
        (PHOTOS_BOOK, {"train", "evaluate", "explain"}),
    ):
        book = nbformat.read(path, as_version=4)
        nbformat.validate(book)
        for before, cell in zip([None, *book.cells], book.cells, strict=False):
            if cell.cell_type == "code":
                assert cell.outputs == [] and cell.execution_count is None
                assert before is not None and before.cell_type == "markdown"
                assert ("skip-execution" in cell.metadata.get("tags", [])) == ("%pip install" in cell.source)
        assert commands <= set("".join(cell.source for cell in book.cells).replace('"', " ").split())
        assert book.metadata.keys() <= {"kernelspec", "language_info"}


SCRIPTS = sorted(NOTEBOOK.parent.glob("*.py"))
PHOTOS = ["images/val/red/0.jpg", "images/val/blue/1.png"]
DIGITS = ["--model", "vit_digits_patch2_8"]


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Function that runs a script in a folder with images, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "images", per_class=2)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(NOTEBOOK.with_name(name)), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "model, fused", [("test_vit", 6), pytest.param("swin_tiny_patch4_window7_224", 12, marks=pytest.mark.full)]
)
def test_finetune_timm(script, model, fused):
    """Oracle: timm, which loads the weights strictly; one line for each epoch; every block is fused."""
    small = ("--random", "--epochs", "2", "--batch-size", "4", "--workers", "0", "--out", "tuned.pt")
    text = script("finetune_timm.py", "--model", model, "--data", "images", *small)
    assert sum(map(int, re.findall(r"^\S+ ×(\d+) \(\w*Block\) +converted .*block", text, re.MULTILINE))) == fused
    assert re.findall(r"epoch (\d): loss .*, test accuracy .*%, .* images/s in training on this", text) == ["1", "2"]
    timm.create_model(model, num_classes=2).load_state_dict(torch.load("tuned.pt"))


@pytest.mark.full
def test_accelerate_vlm(script):
    """Oracle: on a CPU the original code runs, so the outputs are equal; the report and two times are printed."""
    text = script("accelerate_vlm.py", "--side", "60")  # rounded down to whole pairs of patches
    assert (
        re.search(r"visual.blocks.\*.mlp ×2 .*converted .*MLP, swiglu", text) and "largest difference 0.0e+00" in text
    )
    assert re.search(r"took \S+ ms, and after optimize \S+ ms, measured on this", text)


def test_serve_cuda_graphs(script, monkeypatch):
    """Oracle: quantiles by hand, of requests that take 1 to 20 ms by a clock of our own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ticks = (tick for i in range(20) for tick in (i, i + (i + 1) * 1e-3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    text = script("serve_cuda_graphs.py", *DIGITS, "--requests", "20")
    assert "20 requests of 1 to 8 images on this cpu, without CUDA graphs" in text
    assert "median 11.00 ms, 99th percentile 20.00 ms, measured" in text


def test_dense_features(script):
    """Oracle: the grid of the patches; the two ways to extract give the same."""
    text = script("dense_features.py", *PHOTOS, *DIGITS, "--random", "--layers", "2")
    held = np.load("features.npz")
    assert {name: held[name].shape for name in held} == dict.fromkeys(("blocks.2", "blocks.3"), (2, 64, 4, 4))
    assert "channels of features_only: [64, 64], largest difference 0.0e+00" in text


@pytest.mark.full
def test_export_onnx(script, monkeypatch):
    """Oracle: PyTorch's best classes, of images prepared by our transform."""
    pytest.importorskip("onnxruntime")
    model = normal(fastvit_triton.create_model(DIGITS[1]).eval(), 0.5)
    monkeypatch.setattr(fastvit_triton, "create_model", lambda *_, **__: model)
    text = script("export_onnx.py", *PHOTOS, *DIGITS, "--random")
    prepared = fastvit_triton.transforms(model)
    with torch.no_grad():
        best = model(torch.stack([prepared(Image.open(path)) for path in PHOTOS])).argmax(1).tolist()
    assert re.findall(r"^images/.*: (\d+)$", text, re.MULTILINE) == list(map(str, best))
    assert "opset 20, largest difference from PyTorch" in text and "2 images took" in text


@pytest.mark.parametrize("model, boxes", [("vit_tiny_patch16_224", 10), ("swin_tiny_patch4_window7_224", 13)])
def test_draw_model(script, model, boxes):
    """Oracle: the modules of figure 1 of the ViT paper in their order, their parameters by hand; a PNG."""
    lines = script("draw_model.py", "--model", model, "--out", "model.png").splitlines()
    names = [re.search(r", (.*?): ", line)[1] for line in lines]
    assert len(lines) == boxes and names[:2] == ["image", "patch_embed"] and "logits" in names
    assert [name.rpartition(".")[2] for name in names[-4:]] == ["norm1", "attn", "norm2", "mlp"]
    if "vit" in model:
        block = 12 * 192 * 192 + 13 * 192
        assert lines[2] == f"{model}, blocks.0 … blocks.11: Block, {block:,} parameters → [1, 197, 192]"
        assert lines[4] == f"{model}, head: Linear, {193 * 1000:,} parameters → [1, 1000]"
    with Image.open("model.png") as picture:
        assert min(picture.size) > 500


def test_small_data(script):
    """Oracle: a system with convolutions is better by more than three standard errors of 360 images, seen and moved,
    and both are worse for moved images by as much; the accuracy that counts is the last, and parameters are those of
    the models."""
    text = script("small_data.py", "--shots", "10", "--epochs", "10")
    rows = re.findall(r"10 images per class, (\S+), ([\d,]+) .* accuracy ([\d.]+) %, moved by a pixel ([\d.]+) %", text)
    assert [name for name, *_ in rows] == ["vit_lite_2_4_32", "cct_2_3x2_32"]
    error = 3 * 100 * (2 * 0.25 / 360) ** 0.5
    plain, convolutional = ([float(word) for word in row[2:]] for row in rows)
    assert all(more - less > error for less, more in zip(plain, convolutional, strict=True))
    assert all(seen - moved > error for seen, moved in (plain, convolutional))
    model = fastvit_triton.create_model("cct_2_3x2_32", img_size=16, in_chans=1, num_classes=10)
    assert rows[1][1] == f"{sum(p.numel() for p in model.parameters()):,}"


@pytest.mark.full
def test_vit5_training(script):
    """Oracle: every block is captured, with its attention and MLP; one line with the loss and the speed."""
    text = script("vit5_training.py", "--depth", "2", "--batch", "2", "--side", "32", "--steps", "1")
    assert re.search(r"^blocks\.\* ×2 \(Block\) +converted .*captured block .*attention_qkv, mlp", text, re.MULTILINE)
    assert re.search(r"loss \d\.\d+, \d+ images/s in training on this cpu", text)


def test_vit5_is_the_published_structure():
    """Oracle: parameters by hand; scores depend on the distance of two patches, as rotations by positions do."""
    module = runpy.run_path(str(NOTEBOOK.with_name("vit5_training.py")))
    model = module["ViT5"](dim=64, depth=2, heads=2, side=64)
    block = 4 * 64**2 + 2 * 32 + 2 * 64 * 256 + 256 + 64 + 4 * 64
    outside = 64 * 768 + 64 + (1 + 4 + 16) * 64 + 64 + 64 * 1000
    assert sum(p.numel() for p in model.parameters()) == 2 * block + outside and model.num_tokens == 21
    x = torch.randn(32).expand(1, 21, 1, 32)
    turned = model.blocks[0].attn.rotate(x)[0, :, 0]
    scores = turned @ turned.T
    pairs = [(1, 2), (5, 6), (1, 5), (2, 6)]  # rows of a 4 × 4 grid after the class token
    found = [float(scores[i, j]) for i, j in pairs]
    assert found[0] == pytest.approx(found[1]) and found[2] == pytest.approx(found[3]) and found[0] != found[2]
    assert torch.equal(turned[0], x[0, 0, 0]) and model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


LONGER = {"vit5_training": 120}  # it has a model of its own


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_say_how_to_run_them(path):
    """Oracle: 60 lines, or LONGER; the docstring has the command; each option is read; a page of docs/ has a link."""
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= LONGER.get(
        path.stem, 60
    ) and f"    python examples/{path.name}" in ast.get_docstring(tree)
    for option in re.findall(r'add_argument\("(?:--)?([\w-]+)"', text):
        assert f"args.{option.replace('-', '_')}" in text, option
    pages = [page.read_text() for page in (community.ROOT / "docs").glob("*.md")]
    assert any(f"examples/{path.name}" in page for page in pages)
