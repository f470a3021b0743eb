"""What a release holds: metadata, the source distribution, the wheel, the extras that error messages name, Python
versions; the workflows that make it, and the forms that its users fill in."""

import ast
import re
import shutil
import sys
import tarfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from commands import run_python
from sampling import sampled

import fastvit_triton

pytestmark = pytest.mark.fast

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", ".github", "benchmarks", "docs", "examples", "fastvit_triton", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def run(*words: str, cwd: Path, **environment: str) -> None:
    """Runs Python with these arguments; fails with what it wrote to stderr."""
    run_python("-W", "ignore", *words, cwd=cwd, **environment)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution and the wheel, built from a copy: the build writes beside its sources."""
    copy = tmp_path_factory.mktemp("sources")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif path.name in FOLDERS:
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    run("setup.py", "-q", "sdist", "bdist_wheel", cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def archive(built: Path) -> tarfile.TarFile:
    """The source distribution."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(archive: tarfile.TarFile):
    """The fields of PKG-INFO."""
    name = next(name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
    return message_from_string(archive.extractfile(name).read().decode())


def test_the_source_distribution_is_complete(archive: tarfile.TarFile):
    """Oracle: the files on disk that the commands of README.md, CONTRIBUTING.md and .ci/run read."""
    held = {name.partition("/")[2] for name in archive.getnames()}
    top = ["constraints.txt", "pyproject.toml", "setup.py", "LICENSE", "CITATION.cff", "mkdocs.yml", ".ci/run"]
    top += [path.name for path in ROOT.glob("*.md")]
    kinds = {".py", ".pyi", ".md", ".json", ".png", ".jpg", ".ipynb", ".typed", ".yml"}
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    needed = {str(path.relative_to(ROOT)) for path in files if path.suffix in kinds and "__pycache__" not in path.parts}
    assert len(needed) > 200 and not {*top, *needed} - held
    assert not [name for name in held if name.endswith(".pyc")]


def test_metadata(metadata):
    """Oracle: the package's version, the licence in SPDX, README.md, and the versions of the classifiers."""
    assert metadata["Version"] == fastvit_triton.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown" and "## Run it" in metadata.get_payload()
    found = metadata.get_all("Classifier")
    lowest = re.fullmatch(r">=3\.(\d+)", metadata["Requires-Python"])[1]
    named = [int(m[1]) for text in found if (m := re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", text))]
    assert named == list(range(int(lowest), 14))
    assert f'target-version = "py3{lowest}"' in (ROOT / "pyproject.toml").read_text()
    assert not [text for text in found if text.startswith("License ::")]  # PEP 639 forbids both


def test_messages_name_extras_that_exist(metadata):
    """Oracle: setup.py's extras. Nothing that is optional is advised by its own name."""
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras >= {"train", "demo", "test", "docs"}
    advised, bare = set(), []
    for path in (ROOT / "fastvit_triton").rglob("*.py"):
        for advice in re.findall(r"pip install ([^\s;,\"]+)", path.read_text()):
            found = re.fullmatch(r"'fastvit_triton\[(.*)\]'", advice)
            advised |= {found[1]} if found else set()
            bare += [] if found else [(path.name, advice)]
    assert advised >= {"train", "demo", "shards", "timm"} and not bare
    assert advised <= extras


def test_all_has_every_extra_of_users(metadata):
    """Oracle: the packages of all other extras, without those of trackers and of developers."""
    needs = re.findall(
        r"^([\w-]+).*extra == [\"'](\w+)[\"']$", "\n".join(metadata.get_all("Requires-Dist")), re.MULTILINE
    )
    others = {"tensorboard", "wandb", "trackio", "mlflow", "docs", "test", "bench"}
    held = {package for package, extra in needs if extra == "all"}
    assert held == {package for package, extra in needs if extra not in {"all", *others}} >= {"matplotlib", "scipy"}


def test_the_table_of_extras_is_complete(metadata):
    """Oracle: setup.py's extras, without those that only developers need."""
    rows = re.findall(r"^\| (`.*?`) \| .* \| .* \|$", (ROOT / "docs" / "start.md").read_text(encoding="utf-8"), re.M)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert named == set(metadata.get_all("Provides-Extra")) - {"docs", "test"}


PROBE = """
import sys
from importlib.metadata import distribution
import torch
torch.compile(torch.nn.Identity(), backend="fastvit_triton")
(point,) = distribution("fastvit_triton").entry_points.select(group="torch_dynamo_backends")
assert point.load() is sys.modules["fastvit_triton.convert.backend"].backend
from fastvit_triton.measure.variants import declare_torchvision_ops
if torch.version.cuda is None and torch.version.hip is None:
    declare_torchvision_ops()  # which torchvision needs with a torch for CPUs
{imports}
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "fastvit_triton"]
outside = [file for file in files if not file.startswith({folder!r})]
assert not outside, outside
"""


@pytest.mark.full
def test_the_installed_wheel_is_found_and_imported(built: Path, tmp_path: Path):
    """Oracle: Dynamo's lookup of a backend by name, and the import statements of README.md, in a process that finds
    the wheel before the sources, and loads no module of ours from elsewhere."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path / "installed"
    options = ("-q", "--no-deps", "--no-index", "--no-compile", "--target", str(folder))
    run("-m", "pip", "install", *options, str(wheel), cwd=tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "from fastvit_triton.layers import Attention, Block, Mlp, PatchEmbed" in imports
    code = PROBE.format(imports="\n".join(dict.fromkeys(imports)), folder=str(folder))
    run("-c", code, cwd=tmp_path, PYTHONPATH=str(folder))


@pytest.mark.full  # by default ruff's parser sees the oldest grammar, below
@pytest.mark.parametrize("minor", range(10, sys.version_info.minor + 1))
def test_files_compile(minor: int):
    """Oracle: the parser of this Python, held to the grammar of an older one."""
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, minor))


@pytest.mark.parametrize("minor", sampled(range(10, 15), 5))
def test_syntax_is_that_of_each_python(minor: int):
    """Oracle: ruff's parser for that version. The table of docs/start.md has these versions."""
    command = ("-m", "ruff", "check", "--isolated", "-q", "--select", "E9", "--target-version", f"py3{minor}")
    run(*command, *FOLDERS[2:], cwd=ROOT)
    assert f"| 3.{minor} | " in (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_pinned_actions(path: Path):
    """Oracle: GitHub's syntax. An action is pinned by its commit, its version stands beside it for Dependabot, the same
    in all workflows; nothing may be written, and the job that publishes alone asks for a token."""
    text = path.read_text(encoding="utf-8")
    flow = yaml.safe_load(text)
    assert flow[True] and flow["permissions"] == {"contents": "read"}  # YAML reads the key "on" as true
    lines = [line for line in text.splitlines() if "uses:" in line]
    pins = [re.fullmatch(r" +- uses: ([\w-]+/[\w-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)", line) for line in lines]
    assert pins and all(pins), lines
    others = "".join(other.read_text(encoding="utf-8") for other in WORKFLOWS)
    for pin in pins:
        assert set(re.findall(rf"{pin[1]}@(.*)", others)) == {f"{pin[2]}  # {pin[3]}"}
    for name, job in flow["jobs"].items():
        assert set([job.get("needs", name)]) <= flow["jobs"].keys() and job["timeout-minutes"] and job["steps"]
        published = any("gh-action-pypi-publish" in step.get("uses", "") for step in job["steps"])
        assert job.get("permissions", {}) == ({"id-token": "write"} if published else {})


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_for_the_machine(path: Path):
    """Oracle: GitHub's syntax of forms; each asks for what `doctor` prints, and names commands that exist."""
    text = path.read_text(encoding="utf-8")
    form = yaml.safe_load(text)
    assert form["name"] and form["description"] and form["labels"]
    asked = {one["id"]: one for one in form["body"] if one["type"] != "markdown"}
    assert len(asked) == sum(one["type"] != "markdown" for one in form["body"])
    for one in form["body"]:
        assert one["type"] in {"markdown", "textarea", "dropdown"} and one.keys() <= {
            "type",
            "id",
            "attributes",
            "validations",
        }
        assert one["attributes"]["value" if one["type"] == "markdown" else "label"]
        assert (one["type"] == "dropdown") == ("options" in one["attributes"])
    assert asked["doctor"]["validations"] == {"required": True} and asked["doctor"]["attributes"]["render"] == "text"
    commands = {path.stem for path in (ROOT / "fastvit_triton" / "cli").glob("*.py")}
    assert {"doctor"} <= set(re.findall(r"fastvit-triton (\w+)", text)) <= commands


def test_updates_of_actions_are_proposed():
    """Oracle: Dependabot's syntax."""
    file = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))
    assert file["version"] == 2 and [one["package-ecosystem"] for one in file["updates"]] == ["github-actions"]
