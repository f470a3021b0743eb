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
TRANSFORMERS = (  # the last patch of each minor release
    "4.57.6", "5.0.0", "5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1", "5.9.0", "5.10.4",
    "5.11.0", "5.12.1", "5.13.1", "5.14.1", "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1",
    "5.22.2", "5.23.0",
)  # fmt: skip
# fused rows of each family in every release that has it: two blocks with their attentions and norms, and a stem
FLOORS = {
    "timm": dict(vit=11, deit=11, deit3=11, siglip=14, eva02=15, beit=11, swin=13, pit=10, cait=15),
    "transformers": dict(
        vit=9, deit=9, mae=9, dinov2=11, dinov2_swiglu=11, dinov3=11, dinov3_gated=11, clip=11, siglip=15, siglip2=14,
        swin=15, swinv2=10, donut_swin=15, maskformer_swin=15, segformer=15, glpn=15, pvt=17, pvt_v2=15,
        pvt_v2_linear=12, beit=9, beit_shared=9, data2vec=9, IJepaModel=9, ViTMSNModel=9, VivitModel=9, VideoMAEModel=9,
        YolosModel=9, DPTModel=9, ViltModel=9, FlavaImageModel=9, PixioModel=11, BlipVisionModel=11,
        InternVLVisionModel=11, Idefics3VisionTransformer=11, Glm4vVisionModel=12, Qwen3VLVisionModel=13,
        Qwen2_5_VisionTransformerPretrainedModel=12, Qwen2VisionTransformerPretrainedModel=12,
        Qwen2_5OmniVisionEncoder=12,
    ),
}  # fmt: skip
LOWER = {("timm", "0.4.12", "swin"): 7, ("timm", "0.6.13", "swin"): 7}  # whose blocks have no method _attn
LACKS = ("ImportError", "ModuleNotFoundError", "AttributeError: module ")  # beginnings of errors of what is not there
OLD = {("timm", v) for v in ("0.4.12", "0.6.13")}  # lack options, too
RELEASES = [*(("timm", v) for v in TIMM), *(("transformers", v) for v in TRANSFORMERS)]
SHARED = ("torch", "torchvision")  # taken from this environment


def pip(folder: Path, *what: str) -> None:
    """Installs packages into the folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def shared(requirement: Requirement) -> bool:
    """True if this environment's package is used: torch's, and those of a version that fits."""
    if requirement.name in SHARED:
        return True
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def installed(package: str, version: str) -> Path:
    """The folder of a release, installed on first use."""
    folder = FOLDERS / f"{package}-{version}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    pip(part, "--no-deps", f"{package}=={version}")
    (release,) = metadata.distributions(name=package, path=[str(part)])
    needed = [Requirement(line) for line in release.requires or ()]
    needed = [r for r in needed if (r.marker is None or r.marker.evaluate({"extra": ""})) and not shared(r)]
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
    families = record.get("families", {})  # empty if this release cannot be imported with this torch
    assert losses(package, version, families) == {}
    keep(record | {"date": datetime.date.today().isoformat()})
    assert {name: row["equal"] for name, row in families.items() if row.get("equal", True) is not True} == {}
    assert "error" in record or any(row.get("fused") for row in families.values())


def losses(package: str, version: str, families: dict[str, dict]) -> dict[str, object]:
    """Families with fewer fused rows than their floor and than the committed record, or absent for another reason."""
    kept = next((r for r in json.loads(RECORD.read_text()) if (r["package"], r["version"]) == (package, version)), {})
    found = {}
    for name, row in families.items():
        floor = LOWER.get((package, version, name), FLOORS[package].get(name, 0))
        floor = max(floor, kept.get("families", {}).get(name, {}).get("fused", 0))
        if "absent" in row:
            if not (row["absent"].startswith(LACKS) or (package, version) in OLD):
                found[name] = row["absent"]
        elif row["fused"] < floor:
            found[name] = f"{row['fused']} of {floor}, left {row['left']}"
    return found


def test_the_record_is_complete():
    """Oracle: the list of releases; every family is equal in each release that has it, and no rows were lost."""
    rows = {(row["package"], row["version"]): row for row in json.loads(RECORD.read_text())}
    assert set(RELEASES) <= rows.keys()
    for package, version in RELEASES:
        row = rows[package, version]
        families = row.get("families", {})
        assert "error" in row or families.keys() == FLOORS[package].keys()
        assert all("absent" in family or family["equal"] is True for family in families.values()), version
        assert losses(package, version, families) == {}, version


def test_a_lost_conversion_is_found():
    """Oracle: by hand; one row fewer, and a family that could not be built though the release has it."""
    (row,) = (r for r in json.loads(RECORD.read_text()) if (r["package"], r["version"]) == ("transformers", "5.6.2"))
    families = row["families"]
    fewer = families | {"vit": families["vit"] | {"fused": families["vit"]["fused"] - 1}}
    assert losses("transformers", "5.6.2", fewer).keys() == {"vit"}
    assert losses("transformers", "5.6.2", families | {"vit": {"absent": "TypeError: no"}}).keys() == {"vit"}
    assert losses("transformers", "5.6.2", families | {"vit": {"absent": "ImportError: no"}}) == {}


def test_every_minor_release_is_listed():
    """Oracle: minors of version 5 are consecutive, and the installed one is the last."""
    minors = [int(v.split(".")[1]) for v in TRANSFORMERS if v.startswith("5.")]
    assert minors == list(range(len(minors)))
    last = metadata.version("transformers").split(".")[:2]
    assert TRANSFORMERS[-1].split(".")[:2] == last
