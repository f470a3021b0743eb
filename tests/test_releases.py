"""Tests of other releases of timm and transformers: `pytest -m releases` installs each and records the results.

Each release is installed in a folder of its own under the system's temporary folder, with its requirements except
torch, and tested in a process of its own. benchmarks/results/releases.json has the last record of each version.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "releases.json"
FOLDERS = Path(tempfile.gettempdir()) / "fastvit_triton_releases"
TIMM = ("0.4.12", "0.6.13", "0.9.16", "1.0.3", "1.0.15", "1.0.20", "1.0.24", "1.0.26", "1.0.28", "1.0.31")
TRANSFORMERS = ("4.57.6", "5.0.0", "5.10.4", "5.17.0", "5.23.0")  # the last patch of each minor release
RELEASES = [*(("timm", v) for v in TIMM), *(("transformers", v) for v in TRANSFORMERS)]
SHARED = ("torch", "torchvision")  # taken from this environment


def pip(folder: Path, *what: str) -> None:
    """Installs packages into the folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def installed(package: str, version: str) -> Path:
    """The folder of a release, installed on first use."""
    folder = FOLDERS / f"{package}-{version}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    pip(part, "--no-deps", f"{package}=={version}")
    (release,) = metadata.distributions(name=package, path=[str(part)])
    needed = [Requirement(line) for line in release.requires or ()]
    needed = [r for r in needed if r.name not in SHARED and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    if needed:
        pip(part, *(f"{r.name}{r.specifier}" for r in needed))
    return part.rename(folder)


def keep(record: dict) -> None:
    """Replaces the record of the same package and version."""
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else []
    rows = [row for row in rows if (row["package"], row["version"]) != (record["package"], record["version"])]
    rows = sorted([*rows, record], key=lambda row: (row["package"], [int(n) for n in row["version"].split(".")]))
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")


@pytest.mark.releases
@pytest.mark.parametrize("package, version", RELEASES, ids="-".join)
def test_release(package, version):
    """Oracle: the release's own models: outputs and gradients in float64, and the kernels' outputs in float32."""
    path = os.pathsep.join(map(str, (installed(package, version), ROOT / "tests", ROOT)))
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "release_job.py"), package]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["version"] == version
    keep(record | {"date": datetime.date.today().isoformat()})
    families = record.get("families", {})  # empty if this release cannot be imported with this torch
    assert {name: row["equal"] for name, row in families.items() if row.get("equal", True) is not True} == {}
    assert "error" in record or any(row.get("fused") for row in families.values())


def test_the_record_is_complete():
    """Oracle: the list of releases; every family in a record is equal, or absent from that release."""
    rows = {(row["package"], row["version"]): row for row in json.loads(RECORD.read_text())}
    assert set(RELEASES) <= rows.keys()
    for release in RELEASES:
        families = rows[release].get("families", {})
        assert "error" in rows[release] or families
        assert all("absent" in row or row["equal"] is True for row in families.values()), release
