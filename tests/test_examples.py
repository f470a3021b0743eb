"""Tests of the notebook in examples/: it runs completely with a stand-in for a GPU, and without a GPU."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest
from test_community import GPU, parts

from benchmarks import community

NOTEBOOK = community.ROOT / "examples" / "measure_on_your_gpu.ipynb"
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
    """(function that runs the notebook in an empty folder and returns what its code cells print, that folder)."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "FASTVIT_TRITON_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    here = tmp_path / "here"
    here.mkdir()

    def run(path: Path) -> list[str]:
        monkeypatch.setenv("PYTHONPATH", str(path))
        book = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(
            book, timeout=500, kernel_name="python3", resources={"metadata": {"path": here}}
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


def test_notebook_on_a_gpu_writes_a_valid_file(notebook, stand_in):
    """Oracle: what `python -m benchmarks.community join` makes of the same files, and its check; the printed line."""
    run, here = notebook
    skipped, first, *printed = run(stand_in)
    held = json.loads((here / "contribution.json").read_text())
    assert held == community.join(*parts()) and community.problems(held) == []
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
    assert "Every step was executed." in tune and "On a GPU, tune" in tune
    assert "ours eager" in benchmark and "On a GPU, benchmark" in benchmark
    warning, line = joined.splitlines()
    held = json.loads((here / "contribution.json").read_text())
    assert "nothing to contribute" in warning and json.loads(line) == held
    wrong = community.problems(held)
    assert len(wrong) == 2 and all("gpu is null; it must be the name of a GPU" in sentence for sentence in wrong)


def test_notebook_is_stored_without_outputs():
    """Oracle: nbformat. No outputs or counts are stored, markdown precedes each code cell, only pip is skipped."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    for before, cell in zip([None, *book.cells], book.cells, strict=False):
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert before is not None and before.cell_type == "markdown"
            assert ("skip-execution" in cell.metadata.get("tags", [])) == ("%pip install" in cell.source)
    assert {"selftest", "tune", "benchmark"} <= set(
        "".join(cell.source for cell in book.cells).replace('"', " ").split()
    )
    assert book.metadata.keys() <= {"kernelspec", "language_info"}
