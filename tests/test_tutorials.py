"""Tests of docs/tutorials: all code of a page runs as printed, in order, in one folder and one namespace.

Of a block, the language says what happens: `python` is executed; with a title it is written to the file of that name;
of `bash`, lines that begin with "fastvit-triton" are executed; `sh` and `text` are only shown.
"""

import re
import shlex
import sys
from pathlib import Path

import budget
import pytest
import torch
from commands import run_python

from benchmarks.trainings import rows_of
from fastvit_triton.cli import main
from fastvit_triton.kernels import op
from fastvit_triton.train.data.sample import CLASSES

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def run(text: str, page: str) -> dict:
    """Runs the blocks of a page in the working directory; returns the namespace of its Python code."""
    scope: dict = {"__name__": "example"}
    for language, title, code in BLOCK.findall(text):
        if title:
            with Path(title).open("a", encoding="utf-8") as file:
                file.write(code + "\n\n")
        elif language == "python":
            exec(compile(code, page, "exec"), scope)
        elif language == "bash":
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["fastvit-triton"]:
                    assert main(words[1:]) == 0, line
    return scope


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.fast
def test_blocks_are_short():
    """Oracle: at most 24 lines that are not empty; tests/test_readme.py limits their width."""
    assert len(PAGES) >= 5
    for page, text in PAGES.items():
        for _, _, code in BLOCK.findall(text):
            lines = [line for line in code.splitlines() if line.strip()]
            assert len(lines) <= 24, (page, code)


@pytest.mark.full
def test_photos(here, capsys):
    """Oracle: the commands' results: every class is tested, and the page's files are written."""
    scope = run(PAGES["photos"], "photos")
    assert (here / "runs/photos/predictions.png").stat().st_size
    assert re.search(r"\b\d+ of 48\b", capsys.readouterr().out)
    assert (here / "report/report.html").stat().st_size and len((here / "classes.csv").read_text().splitlines()) == 61
    assert {name for name, _ in scope["classes"]} <= set(CLASSES) and scope["logits"].shape == (1, 6)


def test_figures_of_photos():
    """Oracle: the result of `python -m benchmarks.trainings sample-run`."""
    (found,) = rows_of("sample-run")
    right = f"{round(found['accuracy'] * found['test'])} of the {found['test']} test pictures"
    text = PAGES["photos"].replace("\n", " ")
    source = f"(`python -m benchmarks.trainings sample-run`, one seed, {found['date']})"
    assert f"{found['core_seconds']} s of CPU time, and recognises {right} {source}" in text


@pytest.mark.full
def test_timm(here, capsys):
    """Oracle: the outputs before `optimize`; the weights of the trained model under timm's keys."""
    scope = run(PAGES["timm"], "timm")
    torch.testing.assert_close(scope["after"], scope["before"])  # on a CPU the original code runs
    assert scope["report"].rows and "torch.compile" in capsys.readouterr().out
    saved = torch.load("vit.pt")
    assert saved.keys() == scope["timm"].create_model("vit_tiny_patch16_224", img_size=64).state_dict().keys()


@pytest.mark.full
def test_qwen_vl(here, capsys):
    """Oracle: the outputs before `optimize`."""
    scope = run(PAGES["qwen_vl"], "qwen_vl")
    torch.testing.assert_close(scope["after"], scope["before"])
    assert "converted" in capsys.readouterr().out and (here / "mine/config.json").exists()


@pytest.mark.full
def test_several_gpus(here, monkeypatch):
    """Oracle: the weights of one process in float64: two processes average the gradients of two halves.

    By SGD, because AdamW divides by the size of the gradient, also where that is rounding alone.
    """
    run(PAGES["several_gpus"], "several_gpus")
    text = (here / "train.py").read_text()
    assert text.count("AdamW(") == 1
    text = text.replace("AdamW(", "SGD(")
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0).items():
        monkeypatch.setenv(name, str(value))
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_default_dtype(torch.float32)
    saved = [torch.load("vit.pt")]
    start = "import sys, torch\nsys.path[:0] = {!r}\nimport conftest\ntorch.set_default_dtype(torch.float64)\n"
    (here / "started.py").write_text(start.format([str(ROOT / "tests"), str(ROOT)]) + text)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_python("-W", "ignore", *launcher, "started.py")
    saved.append(torch.load("vit.pt"))
    assert saved[0].keys() == saved[1].keys()
    for name, want in saved[0].items():
        torch.testing.assert_close(saved[1][name], want, msg=name)


@pytest.fixture
def registry(monkeypatch):
    """What registers an op forgets it after the test."""
    library = torch.library.Library("fastvit_triton", "FRAGMENT")
    monkeypatch.setattr(op, "LIBRARY", library)
    monkeypatch.setattr(op, "REGISTERED", dict(op.REGISTERED))
    monkeypatch.setattr(budget, "SUMS", dict(budget.SUMS))
    yield
    library._destroy()
    for name in ("squared_relu", "broken_relu"):
        sys.modules.pop(name, None)


def test_kernel(here, registry):
    """Oracle: the page's own, and that a wrong factor in the backward kernel is found."""
    scope = run(PAGES["kernel"], "kernel")
    text = (here / "squared_relu.py").read_text()
    assert text.count("2.0 * x") == 1
    broken = text.replace("2.0 * x", "1.9 * x")
    broken = re.sub(r'(register\(\s*")squared', r"\1broken_squared", broken)
    (here / "broken_relu.py").write_text(broken)
    import broken_relu

    assert scope["outside"](broken_relu.OP, broken_relu.SHAPES["ragged"], torch.float32) == ["gradient of x[0]"]
