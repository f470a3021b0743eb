"""Tests of the next step that `doctor` names, of the table of platforms, and of what users are told to install."""

import re
from pathlib import Path

import pytest
from commands import prints

from fastvit_triton.cli.platforms import Here, next_step
from fastvit_triton.expected.gpus import gpus

ROOT = Path(__file__).parents[1]
LINUX = Here("Linux", "6.8.0-45-generic", "x86_64", "CUDA", True, True, None)
WSL = LINUX._replace(release="5.15.153.1-microsoft-standard-WSL2")
WINDOWS = LINUX._replace(system="Windows", release="11", machine="AMD64")
JETSON = LINUX._replace(release="5.15.148-tegra", machine="aarch64")
MAC = Here("Darwin", "25.1.0", "arm64", "", False, False, "Triton is not installed")
OLD = "compute capability 7.5 is below 8.0"


@pytest.mark.fast
@pytest.mark.parametrize(
    "here, step",
    [
        (LINUX, "run `fastvit-triton check`"),
        (JETSON, "run `fastvit-triton check`"),
        (LINUX._replace(triton=False, why="no Triton"), "install triton in the release for this PyTorch"),
        (LINUX._replace(why=OLD), f"nothing, PyTorch's operators run, as {OLD}"),
        (LINUX._replace(gpu=False, why="no GPU"), "run `nvidia-smi`: PyTorch was built for CUDA and finds no GPU"),
        (LINUX._replace(gpu=False, build="ROCm", why="no GPU"), "run `rocminfo`: PyTorch was built for ROCm"),
        (LINUX._replace(gpu=False, build="", why="no GPU"), "install the build of PyTorch for CUDA or ROCm; this"),
        (WSL._replace(gpu=False, why="no GPU"), "install NVIDIA's driver in Windows, not in WSL2"),
        (WINDOWS._replace(triton=False, why="no Triton"), "install triton-windows in the release for this PyTorch"),
        (WINDOWS._replace(gpu=False, build="", why="no GPU"), "for CUDA or ROCm, or work in WSL2"),
        (JETSON._replace(gpu=False, build="", why="no GPU"), "install NVIDIA's build of PyTorch for this JetPack"),
        (MAC, "nothing, PyTorch's operators run on a Mac"),
    ],
)
def test_each_platform_has_a_next_step(here, step):
    """Oracle: what is missing there, by hand."""
    assert step in next_step(here)


def test_doctor_prints_one_next_step(capsys, monkeypatch):
    """Oracle: one line; that of a Mac where Python says that this is one."""
    assert prints(capsys, "doctor").count("next step  ") == 1
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "as Triton has no release for it" in " ".join(prints(capsys, "doctor").split())


def test_the_table_names_what_is_compiled():
    """Oracle: the architectures that launch parameters are kept for; each row has one of three states."""
    text = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert {row[-1] for row in rows} == {"tested", "compiled", "never tried"} and len(rows) >= 6
    named = set(re.findall(r"sm_\d+|gfx\w+", " ".join(row[1] for row in rows if row[-1] == "compiled")))
    kept = {path.stem for path in (ROOT / "fastvit_triton" / "kernels" / "tuned").glob("*.json")}
    assert named == {name for name in kept if re.fullmatch(r"sm_\d+|gfx\w+", name)} and gpus()


def test_nothing_promises_a_package_index_or_pins_timm():
    """Oracle: pages install from the folder, but for the FAQ, which says when the other form works; extras of users."""
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert "pip install fastvit" not in text, path.name
        assert path.stem == "faq" or "pip install 'fastvit_triton" not in text, path.name
    extras = (ROOT / "setup.py").read_text(encoding="utf-8").partition("extras_require")[2]
    assert "==" not in extras.partition("entry_points")[0]
