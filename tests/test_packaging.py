"""What a release holds: metadata, the source distribution, the extras that error messages name, Python versions."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path

import pytest
from sampling import sampled

import fastvit_triton

pytestmark = pytest.mark.fast

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "fastvit_triton", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    """The source distribution, built from a copy: the build writes beside its sources."""
    copy = tmp_path_factory.mktemp("sdist")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif path.name in FOLDERS:
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist"]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = copy.glob("dist/*.tar.gz")
    with tarfile.open(path) as held:
        yield held


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
    kinds = {".py", ".pyi", ".md", ".json", ".png", ".ipynb", ".typed"}
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
    assert advised >= {"train", "demo", "shards", "bench"} and not bare
    assert advised <= extras


@pytest.mark.parametrize("minor", sampled(range(10, sys.version_info.minor + 1), 9))
def test_files_compile(minor: int):
    """Oracle: the parser of this Python, held to the grammar of an older one."""
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, minor))
