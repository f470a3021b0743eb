"""Tests of candidate launch parameters: lists are short, and every candidate compiles without violations."""

import json

import pytest
from turns import TURN

from benchmarks import candidates as committed
from benchmarks.candidates import TARGETS, compile_candidates, record_candidates
from benchmarks.fingerprint import key
from benchmarks.sass import GPUS
from benchmarks.targets import Target
from fastvit_triton.measure.candidates import CANDIDATES, candidates
from fastvit_triton.measure.tuning import candidates_for


def faults(target: Target, arch: str, stop: int | None = None) -> list[str]:
    """Violations and compile errors of candidates 1 to `stop`; candidate 0 is the launch parameters in use."""
    _, tried = compile_candidates(target, arch, 1, stop)
    assert tried
    return [f"{target.row} on {arch}, {t['config']}: {f}" for t in tried for f in t.get("faults", [t.get("error")])]


@pytest.mark.parametrize("arch", [*GPUS, "another"])
def test_lists_of_candidates_are_short(arch):
    """Oracle: the tuner's budget of a minute for all rows; no candidate occurs twice."""
    assert CANDIDATES.keys() == {target.row for target in TARGETS}
    for row in CANDIDATES:
        found = candidates(row, arch)
        assert len(found) <= 12 and (found or "_whole." in row)
        assert len({json.dumps(config, sort_keys=True) for config in found}) == len(found), row


@pytest.mark.fast
def test_names_with_sizes_have_the_candidates_of_their_row():
    """Oracle: the table's rows, one of which, "window.fwd.large", continues the name of another; and an unknown row."""
    for row in CANDIDATES:
        assert candidates_for(f"{row} 8,16", "sm_90") == candidates(row, "sm_90")
    assert candidates_for("attention.fwd.128 8,16", "sm_90") == candidates("attention.fwd", "sm_90")
    assert candidates_for("attention.forward", "sm_90") == []


@pytest.mark.few(1)
@pytest.mark.parametrize("row, arch", [("linear.fwd.half", "sm_90"), ("mlp.fwd", "sm_86"), ("attention.fwd", "gfx942")])
def test_first_candidates_have_no_violations(row, arch):
    """Oracle: that of `test_static.test_launches_in_use_have_no_violations`, for the first candidates of a row."""
    assert not faults(next(target for target in TARGETS if target.row == row), arch, stop=2)


@pytest.mark.full(one_in=1)  # the audited architecture depends on the turn
@pytest.mark.parametrize("arch", GPUS)
def test_all_candidates_have_no_violations(arch):
    """Oracle: as above, for every candidate of every row, in inference and training.

    Only launches that are not in the committed record are compiled; on one architecture in turn all are, and the record
    must say the same.
    """
    recorded = committed.record(arch)
    audited = arch == list(GPUS)[TURN % len(GPUS)]
    found = committed.faults(arch, {} if audited else recorded)
    assert not {name: said for name, said in found.items() if said}
    assert found == {name: recorded.get(name, said) for name, said in found.items()}


def test_only_launches_without_a_record_are_compiled(monkeypatch, tmp_path):
    """Oracle: two launches, one of them recorded; with another Triton or other rules the record counts for none."""
    _, recorded = record_candidates(TARGETS[0], "sm_90", 1, 3)
    first, second = (launches[0][1] for _, launches in recorded)
    monkeypatch.setattr(committed, "launches", lambda arch: iter([first, second, first]))
    compiled = []
    monkeypatch.setattr(committed, "compile_launch", lambda launch, arch: compiled.append(launch) or ["made"])
    names = [key(launch, "sm_90") for launch in (first, second)]
    assert committed.faults("sm_90", {names[0]: ["kept"]}) == {names[0]: ["kept"], names[1]: ["made"]}
    assert compiled == [second]
    file = tmp_path / "candidates.json"
    assert committed.record("sm_90", file) == {}
    for change, kept in (({}, {names[0]: []}), (dict(triton="3.0.0"), {}), (dict(checks=""), {}), (dict(ptxas={}), {})):
        file.write_text(json.dumps({"sm_90": committed.made_by("sm_90") | dict(faults={names[0]: []}) | change}))
        assert committed.record("sm_90", file) == kept
    assert committed.record("sm_80", file) == {}


@pytest.mark.full
def test_candidates_that_spill_in_training_are_reported(monkeypatch):
    """Oracle: a tile of fc1 that needs 242 registers, and too many where the pre-activation is written as well."""
    config = dict(BLOCK_M=256, BLOCK_F=128, BLOCK_K=64, GROUP=8, PARTS=2, WGMMA_WARPS=0, num_warps=8, num_stages=3)
    monkeypatch.setitem(CANDIDATES, "linear.fwd.half", {"sm_90": (config,)})
    (fault,) = faults(TARGETS[0], "sm_90", stop=2)
    assert "bytes spilled" in fault
