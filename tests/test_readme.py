"""Tests of the documentation: every Python example of README.md and docs/ runs as printed, in order, in one folder."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import fastvit_triton
import fastvit_triton.convert  # registers the backend where nothing is installed

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
PRETRAINED = "vit_small_patch16_224.augreg_in21k_ft_in1k"  # in the examples
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPEC = importlib.util.spec_from_file_location("generate_pages", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
WIDE = ("README", "deploy", "detect", "explain")
PRINTED = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)\n", re.MULTILINE | re.DOTALL)
EXAMPLES = [(page, code) for page, text in PAGES.items() for code in CODE.findall(text)]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, code):
    """The examples' environment: a folder with a photo and weights, torchrun's variables, .cuda() without a GPU."""
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0).items():
        monkeypatch.setenv(name, str(value))
    if "fastvit_triton.create_model(" in code and "pretrained=True" in code:
        hub = tmp_path / "hub"
        timm.models.save_for_hf(timm.create_model(PRETRAINED), str(hub), safe_serialization=True)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name, **_: str(hub / name))
    if "vit_small.safetensors" in code:
        save_file(timm.create_model("vit_small_patch16_224").state_dict(), "vit_small.safetensors")
    Image.new("RGB", (300, 200), "red").save("photo.jpg")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "accelerate" in sys.modules:  # it remembers the processes that an example started
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec")  # torch.onnx's warning
@pytest.mark.parametrize(
    "page, code",
    [
        pytest.param(
            *example, id=f"{i} {example[0]}", marks=[pytest.mark.fast] if i == 0 else [pytest.mark.full] * (i % 9 > 0)
        )
        for i, example in enumerate(EXAMPLES)
    ],
)
def test_examples_run(page, code, elsewhere, capsys):
    """Oracle: no error, no warning, and the first line that a page shows of the output; at most 24 lines of code."""
    assert len([line for line in code.splitlines() if line.strip()]) <= 24
    if '"onnx"' in code:
        pytest.importorskip("onnxscript")
    exec(compile(code, page, "exec"), {"__name__": "example"})
    if shown := dict(PRINTED.findall(PAGES[page])).get(code):
        assert capsys.readouterr().out.partition("\n")[0] == shown


@pytest.mark.fast
def test_code_fits_a_phone():
    """Oracle: 60 columns of code and commands; what they print may be wider, and pages of WIDE are not yet narrow."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        for code in re.findall(r"^```(?:python|bash|sh)\b.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            longest = max(code.splitlines(), key=len)
            assert len(longest) <= 60 or path.stem in WIDE, (path.name, longest)


def test_examples_show_what_the_package_is_for():
    """Oracle: the calls that users come for."""
    shown = "\n".join(code for _, code in EXAMPLES)
    for call in (
        "timm.",
        "transformers.",
        "torchvision.",
        "torch.compile(",
        "DistributedDataParallel(",
        "export_model(",
    ):
        assert call in shown


@pytest.mark.fast
def test_releases_that_passed_are_those_recorded():
    """Oracle: the result file of the last run of all tests on the newest releases; nothing failed in it."""
    row = json.loads((Path(__file__).parents[1] / "benchmarks/results/suites.json").read_text())["suite"][-1]
    versions = [f"{name} {row[name]}" for name in ("torch", "triton", "timm", "transformers")]
    assert row["failed"] == 0 and row["passed"] > 2500
    assert f"{', '.join(versions[:-1])} and {versions[-1]}, the newest on {row['date']}" in PAGES["proof"].replace(
        "\n", " "
    )


def test_the_readme_is_one_screen():
    """Oracle: at most 150 lines; the two commands come first under their headings."""
    lines = PAGES["README"].splitlines()
    assert len(lines) <= 150
    for heading in ("## Run it", "## Test it"):
        assert lines[lines.index(heading) + 2] == "```bash"


def test_links_between_pages_exist():
    """Oracle: the files; the build of the site also checks links between pages of docs/, but not images."""
    for path in (ROOT / "docs").rglob("*.md"):
        for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / image).exists(), image
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\(((?!http)[^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), link


def test_pages_can_be_read_on_github_and_on_the_site(monkeypatch):
    """Oracle: a page has each table, or a link to it; the site has all tables, and images beside its pages."""
    for kind in ("TABLES", "LINKED"):
        monkeypatch.setattr(generate, kind, {name: lambda: "a table" for name in getattr(generate, kind)})
    found = []
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        blocks = dict(generate.BLOCK.findall(text))
        found += blocks
        assert "{{" not in text and text.count("<!-- table: ") == len(blocks), path
        for name, held in blocks.items():
            assert "|---" in held if name in generate.TABLES else "](../" in held or "`fastvit-triton " in held, name
            for link in re.findall(r"\]\(([^)#]+)\)", held) if name in generate.LINKED else ():
                assert (path.parent / link).exists(), link
        page = generate.of_site(text)
        linked = [name for name in blocks if name in generate.LINKED]
        assert page.count("\na table\n") == len(linked), path
        for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
            assert re.fullmatch(r"(\.\./)?images/[\w-]+\.(png|jpg)", image), image
    assert sorted(found) == sorted(generate.TABLES | generate.LINKED)


def test_every_page_is_in_the_navigation_once():
    """Oracle: the files of docs/, and the pages of API that docs/generate.py writes."""
    nav, found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"], []
    while nav:
        value = nav.pop() if isinstance(nav[-1], str) else next(iter(nav.pop().values()))
        found += [value] if isinstance(value, str) else nav.extend(value) or []
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(found) == sorted([*pages, *(f"api/{name}.md" for name in generate.TASKS)])


def test_the_api_has_every_public_name_once():
    """Oracle: the public names, and those of `train` and `explain`, which have pages of their own."""
    tasks = {name: [n for names in generate.task(name).values() for n, _ in names] for name in generate.TASKS}
    public, packages = {*fastvit_triton.__all__}, {n: getattr(fastvit_triton, n).__all__ for n in ("train", "explain")}
    for name, names in packages.items():
        assert sorted(tasks.pop(name)) == sorted(names)
    assert sorted(n for names in tasks.values() for n in names) == sorted(public - packages.keys() - {"__version__"})


def test_the_version_is_the_same_everywhere():
    """Oracle: the version of the package."""
    for name, text in (("CITATION.cff", "version: {}\n"), ("CHANGELOG.md", "## {}\n")):
        assert text.format(fastvit_triton.__version__) in (ROOT / name).read_text(encoding="utf-8"), name


def test_captured_graphs_are_those_that_were_measured():
    """Oracle: the committed rows of GPUs, by model, whose outputs matched."""
    files = (ROOT / "benchmarks" / "results").glob("nvidia-*-models.json")
    rows = [row for file in files for row in json.loads(file.read_text())["rows"] if "CUDA graph" in row["arm"]]
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"On an H200, graphs of (.+?) gave the outputs", page)
    assert set(re.findall(r"`(\w+)`", sentence)) == {row["model"] for row in rows if row["match"]}
    assert not any("packed" in row["arm"] for row in rows), "the page says that no such graph was captured"
