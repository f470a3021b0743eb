"""Tests of the pages of claims and of the survey: every claim is covered by something that exists."""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from catalogue.ours import CASES

from benchmarks import claim_mutants, survey
from fastvit_triton.models import FAMILIES

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
CLAIMS = {key: covered.split("; ") for key, _, _, covered in generate.fields("claims.txt")}
WAITING = {  # what is not covered
    "2-12": "DETR has models and losses, and is not trained here yet",
    "4-24": "DETR and Deformable DETR have models and losses, and are not trained here yet",
    "4-26": "no detector here reads such a map",
    "4-27": "no model here has axial attention",
    "4-28": "no model here has non-local blocks, of which BoTNet's is the nearest",
    "4-29": "no model here has its strided patterns",
    "4-30": "no model here has such gates, and those of timm run as they are",
}
SYSTEMS = {system.name: system for system in survey.SYSTEMS}
ROWS = {row["system"]: row for row in json.loads((survey.RESULTS / "survey.json").read_text())["rows"]}


@functools.cache
def names(path: Path) -> set[str]:
    """The functions of a test file, from its syntax tree."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_claim_has_a_line():
    """Oracle: the numbers of claims of the five introductions, each numbered from 1."""
    listed = [key for key, *_ in generate.fields("claims.txt")]
    counts = (37, 11, 13, 29, 30)
    assert listed == [f"{i}-{n:02}" for i, count in enumerate(counts) for n in range(1, count + 1)]
    assert re.findall(r"^\| (\d-\d\d) \|", generate.claims(), re.MULTILINE) == listed


@pytest.mark.parametrize("key", CLAIMS)
def test_what_covers_a_claim_exists(key):
    """Oracle: the functions of the test files and their cases, the files, the headings of pages, and the lines of
    reported.txt."""
    reported = {words[0] for words in generate.fields("reported.txt")}
    for word in CLAIMS[key]:
        path, _, name = word.partition("::") if "::" in word else word.partition("#")
        if path.startswith("tests/"):
            name, _, case = name.partition("[")
            assert name.startswith("test_") and name in names(ROOT / path), word
            assert not case or case.removesuffix("]") in CASES, word
        elif word == "reported":
            assert key in reported
        elif path.startswith(("docs/", "examples/", "benchmarks/")):
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE) if name else []
            assert (ROOT / path).is_file() and (not name or name in [h.lower().replace(" ", "-") for h in headings])
        else:
            assert word == WAITING[key]
    assert ("reported" in CLAIMS[key]) == (key in reported)


def test_every_test_of_a_claim_sees_a_careless_edit():
    """Oracle: the committed results: each claim with tests has an edit that makes it false, and one of these tests
    failed with it; test_regenerate.py tests that the results are of today's lines and tests."""
    edits, found = claim_mutants.mutants(), claim_mutants.rows()
    tested = {key: [word for word in words if "::" in word] for key, words in CLAIMS.items()}
    assert claim_mutants.tests() == {key: words for key, words in tested.items() if words}
    assert {edit.claim for edit in edits} == claim_mutants.tests().keys() and len({e.name for e in edits}) == len(edits)
    for edit in [edit for edit in edits if edit.name in found]:
        killer = found[edit.name]["killed"]
        assert killer, f"{edit.name}: all tests pass with this edit"
        assert killer.partition("[")[0] in {word.partition("[")[0] for word in CLAIMS[edit.claim]}


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the tests run in forked processes")
def test_ten_edits_are_seen_now(tmp_path):
    """Oracle: as above, for edits that the commit chooses, in a process of their own."""
    edits = sorted(claim_mutants.mutants(), key=lambda e: claim_mutants.short([str(claim_mutants.commit()), e.name]))
    names, out = [edit.name for edit in edits[:10]], tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.claim_mutants", "--out", str(out), "--only", *names]
    subprocess.run(command, cwd=ROOT, check=True)
    assert all(row["killed"] for row in claim_mutants.rows(out).values())
    assert claim_mutants.rows(out).keys() >= set(names)


def test_edits_that_fit_no_file_raise(tmp_path):
    """Oracle: the sentences."""
    with pytest.raises(ValueError, match=r"entry '0-01 a.py' must be a number and a file, then lines \"- text\""):
        claim_mutants.read("# comment\n\n0-01 a.py\n- x\n")
    (edit,) = claim_mutants.read("0-01 examples/a.py\n- x = 1\n+ x = 2\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"the text of 0-01 is 2 times in examples/a.py, not once$"):
        claim_mutants.edited(edit, tmp_path)
    (tmp_path / "examples" / "a.py").rename(tmp_path / "examples" / "b.py").write_text("if y:\n    x = 1\n")
    (tmp_path / "examples" / "a.py").write_text("")
    with pytest.raises(ValueError, match=r"0 times in examples/a.py, not once; it is in examples/b.py"):
        claim_mutants.edited(edit, tmp_path)
    assert claim_mutants.edited(edit._replace(file="examples/b.py"), tmp_path)[1] == "if y:\n    x = 2\n"


def test_lines_with_missing_fields_raise(tmp_path, monkeypatch):
    """Oracle: the sentences."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "claims.txt").write_text("# comment\n0-01 | a | b\n")
    with pytest.raises(ValueError, match=r"line 0-01 of claims.txt has 3 fields; give 4"):
        generate.fields("claims.txt")
    with pytest.raises(ValueError, match="has 2 fields; give name, paper"):
        survey.read("ViT | 2010.11929")


OTHER_TASKS = {"setr"}  # which have no accuracy on the digits, and are no system of the survey


def test_every_family_is_in_the_survey():
    """Oracle: the systems' number; every family of the package belongs to one, or is a ViT under another name."""
    assert len(SYSTEMS) == len(survey.SYSTEMS) == 29
    covered = {survey.CATALOGUE[system.model] for system in SYSTEMS.values() if system.built}
    others = {family.__name__.rpartition(".")[2] for family in FAMILIES if family not in covered}
    assert others - OTHER_TASKS == {"dinov2", "clip", "siglip", "naflex"}


@pytest.mark.parametrize("name", ROWS)
def test_committed_rows_are_whole(name):
    """Oracle: fewer launches than eager PyTorch, every epoch of every seed, and chance, 10 %.

    DETR's blocks have as many, and BoTNet's one more.
    test_regenerate.py tests that the rows are of the listed systems and models.
    """
    system, row = SYSTEMS[name], ROWS[name]
    eager, fused = row["launches"]
    assert 0 < fused < eager + {"DETR": 1, "BoTNet": 2}.get(name, 0)
    assert system.idea and system.oracle and system.differs
    if "digits" in row:
        small = row["digits"]
        assert [len(seed) for seed in small["accuracy"]] == [survey.EPOCHS] * survey.SEEDS
        assert survey.reached(row)[0] > 30 and small["torch"] and small["date"]


@pytest.mark.full
def test_launches_of_a_block():
    """Oracle: those of a ViT's block, of benchmarks.launches: ten, and five when fused and frozen; Swin's committed."""
    assert survey.counted(SYSTEMS["ViT"])["launches"] == [10, 5]
    assert survey.counted(SYSTEMS["Swin"]) == {key: ROWS["Swin"][key] for key in ("model", "parameters", "launches")}
    assert survey.blocks(((1, 2, 0), (3, 0))) == 6 and survey.filled(((1, 2, 0), 3), 4) == ((4, 4, 0), 4)
    assert survey.filled((3, 4, 6), 4, (0, 0, 8)) == (1, 1, 4) and survey.filled((3, 4), 2, (1, 2)) == (2, 2)


@pytest.mark.full
def test_an_epoch_of_a_small_model():
    """Oracle: chance, one in ten, plus three standard errors of 360 images after one epoch; seed 0 repeats the run."""
    found = [survey.learned(SYSTEMS["LV-ViT"], epochs=1, seeds=1)["accuracy"] for _ in range(2)]
    assert found[0] == found[1] and found[0][0][-1] > 0.1 + 3 * (0.1 * 0.9 / 360) ** 0.5


def test_figure_has_a_label_for_each_system(tmp_path):
    """Oracle: a PNG; labels of equal points do not overlap, and stay between left and right."""
    accuracy = [[0.5] * survey.EPOCHS] * survey.SEEDS
    rows = [dict(system=name, digits=dict(parameters=10_000, accuracy=accuracy)) for name in ("a", "b")]
    survey.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    first = survey.free_place(20, 50, 30, [(16, 46, 24, 54)], 0, 60)
    second = survey.free_place(20, 50, 30, [(16, 46, 24, 54), first], 0, 60)
    assert first == (27, 44, 57, 56) and not survey.overlap(first, second) and 0 < second[0] < second[2] < 60
    assert survey.overlap((0, 0, 2, 2), (1, 1, 3, 3)) and not survey.overlap((0, 0, 1, 1), (1, 0, 2, 1))


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    """Oracle: the file after an interrupted run has the finished rows, and `--missing` runs the others alone."""
    listed, ran = [SYSTEMS[name] for name in ("ViT", "PiT", "Swin")], []

    def learned(system):
        ran.append(system.name)
        if ran == ["ViT", "PiT"]:
            raise KeyboardInterrupt
        return ROWS[system.name]["digits"]

    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(survey, "SYSTEMS", listed)
    monkeypatch.setattr(survey, "learned", learned)
    monkeypatch.setattr(survey, "counted", lambda system: {"model": system.model})
    monkeypatch.setattr("sys.argv", ["survey", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        survey.main()
    rows = json.loads((tmp_path / "survey.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["ViT"] and not (tmp_path / "survey.png").exists()
    monkeypatch.setattr("sys.argv", ["survey", "--out", str(tmp_path), "--missing"])
    survey.main()
    rows = json.loads((tmp_path / "survey.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["ViT", "PiT", "Swin"] and ran == ["ViT", "PiT", "PiT", "Swin"]
    assert (tmp_path / "survey.png").exists()
