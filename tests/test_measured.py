"""Tests of measurements of the user's own GPU: their location, their precedence, and files that are ignored.

The GPU is a stand-in: its properties are given, and CPU tensors count as its own.
"""

import json
import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreter import interpreting

from fastvit_triton import linear
from fastvit_triton.cli import main, models
from fastvit_triton.expected.count import assumed
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.kernels import choose, launch, measured, onednn, settings
from fastvit_triton.kernels.measured import Measured
from fastvit_triton.kernels.sizes import Branch

pytestmark = pytest.mark.fast

FACTS = dict(gpu="NVIDIA Card (X)", architecture="sm_90", units=10, driver=1, torch="2", cuda="13", cudnn=9, triton="3")
FACTS["sources"] = "abc"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BLOCK = Branch("attention", 5, 197, 64, 192, 64, 4), Branch("mlp", 5, 197, 64, 256, 256)


def content(rows=None, ways=None, **facts):
    held = dict(format=1, facts=FACTS | facts, runs=[])
    held["rows"] = {name: dict(config=config) for name, config in (rows or {}).items()}
    return json.dumps(held | dict(ways={name: dict(way=way) for name, way in (ways or {}).items()}))


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The measurement file of the stand-in, which does not exist yet."""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    facts = measured.facts_of
    monkeypatch.setattr(measured, "facts_of", lambda device: dict(FACTS) if device.type == "cuda" else facts(device))
    monkeypatch.setattr(launch, "_architecture", lambda kind, index: "sm_90")
    monkeypatch.setattr(choose, "gpu_on", lambda device: "h200")
    choose.forget()
    yield measured.path_of(FACTS)
    choose.forget()


def test_exact_sizes_then_their_class_then_the_table(path):
    """Oracle: by hand; sizes 1000 and 30 belong to the class 1024, 32."""
    table = launch.table("sm_90")["linear.fwd.half"]
    rows = {"linear.fwd.half 1000,30": dict(A=1), "linear.fwd.half ~1024,32": dict(A=2)}
    assert launch.config("linear.fwd.half", {}, GPU, 1000, 30) == table | dict(enable_fp_fusion=True)
    path.write_text(content(rows))
    assert launch.config("linear.fwd.half", {}, GPU, 1000, 30)["BLOCK_M"] == table["BLOCK_M"]  # the file is read once
    choose.forget()
    found = [launch.config("linear.fwd.half", {}, GPU, *sizes) for sizes in ((1000, 30), (1000, 31), (1000, 33), ())]
    assert [one.get("A") for one in found] == [1, 2, None, None]
    assert launch.config("odd", dict(A=3), GPU, 1000, 30)["A"] == 3
    assert "A" not in launch.config("linear.fwd.half", {}, CPU, 1000, 30)
    with launch.targeting("sm_80"):  # not the local GPU
        assert "A" not in launch.config("linear.fwd.half", dict(B=1), GPU, 1000, 30)
    with launch.overriding({"linear.fwd.half 1000,30": dict(A=5), "linear.fwd.half": dict(A=6)}) as looked_up:
        assert [launch.config("linear.fwd.half", {}, GPU, *s)["A"] for s in ((1000, 30), (1, 1))] == [5, 6]
    assert list(looked_up) == ["linear.fwd.half 1000,30", "linear.fwd.half 1,1"]


def test_ways_come_from_user_measurements_then_the_table(path, monkeypatch, tmp_path):
    """Oracle: by hand; 5 images of 197 tokens belong to the class 8 of 256."""
    exact, near = measured.block_names(BLOCK, "inference")
    assert "N=197 B=5" in exact and near == measured.block_names([b.rounded for b in BLOCK], "inference")[1]
    assert choose.measured_way(GPU, (exact, near)) is None
    tables = tmp_path / "tables"
    shutil.copytree(launch.TUNED / "choices", tables / "choices")
    (tables / "sm_90.json").write_text(json.dumps({"ways": {"measured": {near: "plain"}}}))
    monkeypatch.setattr(launch, "TUNED", tables)
    found = []
    for ways in ({}, {near: "mixed"}, {near: "mixed", exact: "fused"}):
        path.write_text(content(ways=ways))
        choose.forget()
        found.append(choose.measured_way(GPU, (exact, near)))
    where = "in tuned/sm_90.json", "on this machine", "on this machine"
    shapes = near, near, exact
    assert found == [(way, f"measured {place}: {shape}")
                     for way, place, shape in zip(("plain", "mixed", "fused"), where, shapes, strict=True)]  # fmt: skip

    def decides(dtype=torch.bfloat16, replayed=False):
        return choose.choose(GPU, BLOCK, dtype, False, False, replayed, None, "auto").why.split()[0]

    assert decides().startswith("measured") and decides(torch.float32).startswith("predicted")  # IEEE float32
    path.unlink()
    choose.forget()
    assert decides(replayed=True) == "measured" and decides() == "predicted:"  # the blocks of the table were replayed
    with settings.forcing("plain"):
        assert choose.way_of(torch.empty(1), BLOCK, False, False) == "plain"
    assert measured.op_names("attention", 4, True, (3, 5, True)) == (
        "attention training fp32 3,5,1", "attention training fp32 ~4,8,1",
    )  # fmt: skip


def test_no_measurement_changes_the_shape_of_row_statistics():
    """Oracle: the shape without measurements, which compiled programs rely on, for exact sizes and their class."""
    x, w = torch.randn(3, 64).half(), torch.randn(64, 64).half()
    rows = {"BLOCK_F": 16, "BLOCK_M": 32, "BLOCK_K": 32, "GROUP": 8, "PARTS": 1, "WGMMA_WARPS": 0, "num_warps": 4}
    shapes = []
    with interpreting():
        for name in (None, "linear.fwd.half 3,64,64", "linear.fwd.half ~4,64,64"):
            with measured.using(Measured(rows={} if name is None else {name: rows | dict(num_stages=2)})):
                shapes.append([linear(x, w, return_stats=True)[1].shape, linear(x, w).shape])
    assert shapes[0] == shapes[1] == shapes[2]


def test_files_that_change_in_a_context_are_noticed_after_it():
    """Oracle: another value of `in_use`, part of the key of cached choices, after `forget`."""
    before = measured.in_use
    with measured.using(Measured()):
        measured.forget()
    assert measured.in_use is not before
    with measured.using(Measured()):
        pass
    assert measured.in_use is not before


def test_ops_use_measured_choices(path):
    """Oracle: by hand."""
    sizes = (8, 12, 197, 197, 64, False)
    with launch.targeting("sm_90"):
        x = torch.empty(1, dtype=torch.bfloat16)
        for way in ("plain", "fused"):
            ways = dict.fromkeys(measured.op_names("attention", 2, True, sizes), way)
            with measured.using(Measured(ways=ways)):
                assert choose.prefers_kernel(x, "attention", *sizes) == (way == "fused")


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not JSON"),
        ('{"format": 1', "not JSON"),
        ("[1]", "is not a file of"),
        (content().replace('"format": 1', '"format": 2'), "is not a file of"),
        (content({"a": dict(A="7")}), "is not a file of"),
        (content({"a": dict(A=-7)}), "is not a file of"),
        (content(ways={"a": "fast"}), "is not a file of"),
        (content(sources="old"), "sources old, here abc"),
        (content(gpu="other", units=3), "gpu other, here NVIDIA Card (X); units 3, here 10"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(path, text, why):
    """Oracle: a machine without a file; the warning names the file, the reason, and the remedy."""
    path.write_text(text)
    with pytest.warns(UserWarning, match="tune` again or remove it") as said:
        for _ in range(3):
            assert measured.of(GPU) is measured.NOTHING
    assert len(said) == 1 and str(path) in str(said[0].message) and why in str(said[0].message)


def test_a_file_of_bytes_and_a_folder_in_its_place_are_ignored(path):
    path.write_bytes(b"\xff\xfe{}")
    with pytest.warns(UserWarning, match="ignoring"):
        assert measured.of(GPU) is measured.NOTHING
    choose.forget()
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="ignoring"):
        assert measured.of(GPU) is measured.NOTHING


def test_one_file_for_a_gpu_and_its_software(path, monkeypatch):
    """Oracle: the name has the GPU and differs with every property but the sources; the platform's default folder."""
    assert path.name.startswith("nvidia-card-x-") and path.suffix == ".json"
    for name in FACTS:
        assert (measured.path_of(FACTS | {name: "other"}) == path) == (name == "sources")
    monkeypatch.delenv("FASTVIT_TRITON_CACHE")
    assert measured.folder().name == "fastvit_triton" and measured.folder().is_absolute()


@pytest.mark.parametrize("hip, name", [(None, "sm_89"), ("7.1", "gfx942")])
def test_facts_name_the_architecture(hip, name, monkeypatch):
    """Oracle: the architecture's name in `launch.architecture` for the same stand-in, as in committed tables."""
    card = SimpleNamespace(name="Card", major=8, minor=9, multi_processor_count=10, gcnArchName="gfx942:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", hip)
    launch._architecture.cache_clear()
    assert measured.facts_of(GPU)["architecture"] == launch.architecture(GPU) == name
    launch._architecture.cache_clear()


def test_facts_of_a_cpu(monkeypatch):
    """Oracle: no GPU is queried; the CPU, its cores, the threads, and PyTorch; a file of a GPU has another name."""
    facts = measured.facts_of(CPU)
    machine = dict(cpu=measured.cpu_name(), cores=os.cpu_count(), threads=torch.get_num_threads())
    assert facts == machine | dict(torch=torch.__version__, sources=measured.sources())
    assert len(facts["sources"]) == 12
    path = measured.path_of(facts)
    for name, value in dict(cpu="other", cores=0, threads=0, torch="2", sources="old").items():
        assert (measured.path_of(facts | {name: value}) == path) == (name == "sources")
    twin = dict(FACTS, gpu=facts["cpu"])  # a GPU of the same name
    assert measured.path_of(twin) != path
    assert measured.facts_of(CPU, pretended=True)["gpu"] == "cpu" and "cpu" not in measured.facts_of(CPU, True)


@pytest.fixture
def cpu_path(tmp_path, monkeypatch):
    """The measurement file of this CPU, which does not exist yet, in an empty folder."""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    choose.forget()
    yield measured.path_of(measured.facts_of(CPU))
    choose.forget()


def cpu_content(ways, **facts):
    """Text of a file of this CPU."""
    held = json.loads(content(ways=ways))
    return json.dumps(held | dict(facts=measured.facts_of(CPU) | facts))


def test_without_a_file_of_the_cpu_nothing_is_measured(cpu_path):
    """Oracle: no warning, and no measurement for a CPU, a pretended GPU and other devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured.of(CPU) is measured.NOTHING
    cpu_path.write_text(cpu_content({"a": "onednn"}))
    choose.forget()
    assert measured.of(CPU).ways == {"a": "onednn"}
    assert measured.of(CPU, pretended=True) is measured.of(torch.device("meta")) is measured.NOTHING


@pytest.mark.parametrize("way", ["fused", "mixed", "fast"])
def test_a_file_of_a_cpu_has_its_ways_only(cpu_path, way):
    """Oracle: as for a damaged file; a file of a GPU has no way "onednn" either."""
    cpu_path.write_text(cpu_content({"a": way}))
    with pytest.warns(UserWarning, match="it is not a file of"):
        assert measured.of(CPU) is measured.NOTHING
    with pytest.raises(ValueError, match="is not a file of"):
        measured.parse(content(ways={"a": "onednn"}))


@pytest.mark.parametrize("change", [dict(cores=0), dict(sources="old"), dict(cpu="other")])
def test_a_file_of_another_cpu_or_software_is_ignored(cpu_path, change):
    """Oracle: a warning that names the difference."""
    cpu_path.write_text(cpu_content({"a": "onednn"}, **change))
    (name,) = change
    with pytest.warns(UserWarning, match=f"{name} {change[name]}, here"):
        assert measured.of(CPU) is measured.NOTHING


def test_commands_warn_in_one_line(cpu_path, monkeypatch, capsys):
    """Oracle: the warning's own text and nothing else on stderr; warnings of other packages stay as they are."""
    cpu_path.write_text("{}")

    def run(args):
        warnings.warn("of another package", stacklevel=1)
        assert measured.of(CPU) is measured.NOTHING
        return 0

    monkeypatch.setattr(models, "run", run)
    with pytest.warns(UserWarning) as said:
        assert main(["models"]) == 0
    why = "it is not a file of `fastvit-triton tune`; run `fastvit-triton tune` again or remove it"
    assert capsys.readouterr().err == f"fastvit-triton: warning: ignoring {cpu_path}: {why}\n"
    assert [str(warning.message) for warning in said] == ["of another package"]


@pytest.mark.skipif(onednn.why_not(CPU, torch.float32) is not None, reason="PyTorch has no oneDNN here")
def test_ways_on_a_cpu_by_phase(cpu_path):
    """Oracle: by hand: exact sizes, then their class; a frozen block without measurements has those of inference."""
    x = torch.empty(5, 197, 64)
    branches = tuple(branch._replace(itemsize=4) for branch in BLOCK)

    def ways():
        choose.forget()
        found = [choose.way_of(x, branches, training, False, frozen) for training, frozen in PHASES]
        return dict(zip(("training", "inference", "frozen"), found, strict=True))

    PHASES = (True, None), (False, None), (False, "float32")
    names = {phase: measured.block_names(branches, phase) for phase in onednn.PHASES}
    assert set(ways().values()) == {"plain"} and not onednn.usable(x)
    cpu_path.write_text(cpu_content({names["training"][0]: "onednn"}))
    assert ways() == dict(training="onednn", inference="plain", frozen="plain") and onednn.usable(x)
    cpu_path.write_text(cpu_content({names["inference"][1]: "onednn"}))
    assert ways() == dict(training="plain", inference="onednn", frozen="onednn")
    cpu_path.write_text(cpu_content({names["inference"][0]: "onednn", names["frozen"][0]: "plain"}))
    assert ways() == dict(training="plain", inference="onednn", frozen="plain")
    row = {"float32": dict.fromkeys(onednn.PHASES, 0.0)}
    with onednn.using_row(row):  # measurements come first
        assert ways() == dict(training="onednn", inference="onednn", frozen="plain")


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_measured_rows_are_the_fastest_or_say_why_not():
    """Oracle: the least median of the candidates that were right, in the committed file that a row names."""
    for table in sorted(launch.TUNED.glob("*.json")):
        rows = json.loads(table.read_text())
        named = {
            row["source"] for row in rows.values() if isinstance(row, dict) and row.get("provenance") == "measured"
        }
        for source in named:
            for timed in (row for row in json.loads((RESULTS / source).read_text())["rows"] if row.get("tried")):
                right = [one for one in timed["tried"] if one.get("match") and "us" in one]
                fastest, row = min(right, key=lambda one: one["us"])["config"], rows[timed["row"]]
                assert (row["config"] == fastest) != ("why" in row), (table.name, timed["row"], fastest)


def test_attention_is_pytorchs_where_it_measured_faster():
    """Oracle: the medians of the committed rows of the H200, inference and training, for sizes of ViT-S and ViT-B."""
    rows = json.loads((RESULTS / "nvidia-h200-2026-11-26-ops.json").read_text())["rows"]
    x, seen = torch.empty(1, dtype=torch.bfloat16), set()
    for name, heads in (("ViT-S/16", 6), ("ViT-B/16", 12)):
        for phase, training in (("forward", False), ("backward", True)):
            us = {r["arm"]: r["us"] for r in rows if r["case"] == f"attention {name} batch 256" and r.get("us")
                  and r["phase"] == phase}  # fmt: skip
            with assumed(gpus()["h200"]), torch.set_grad_enabled(training):
                chosen = choose.prefers_kernel(x, "attention", 256, heads, 197, 197, 64, True)
            assert chosen == (us["ours eager"] < us["eager"])
            seen.add(chosen)
    assert seen == {False, True}
