"""Tests of the fault campaign itself: that it names what is lost. Oracle: readers, files and trials made to fail."""

import random
import signal
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.faults import cut, damaged, flip, hostile


def test_damaged_files_that_are_read_are_named(tmp_path: Path):
    """Oracle: readers that see no damage, refuse in one line, or refuse in several."""
    source = tmp_path / "source"
    source.write_bytes(bytes(range(64)))
    (tmp_path / "copy").mkdir()

    def refuse(path: Path) -> bool:
        raise ValueError(path.read_bytes().hex())

    def ramble(path: Path) -> bool:
        raise ValueError("one\ntwo")

    def read(change, reads) -> str | None:
        return damaged(source, change, reads, tmp_path / "copy")

    assert read(lambda content: cut(0.5, content), refuse) is None
    assert (tmp_path / "copy/source").read_bytes() == bytes(range(32))
    assert read(lambda content: flip(0.5, 3, content), lambda path: False) == "source is read with other contents"
    assert (tmp_path / "copy/source").read_bytes()[32] == 32 ^ 8
    assert read(bytes, ramble) == "several lines: one\ntwo"
    assert read(bytes, lambda path: path.read_bytes() == source.read_bytes()) is None


def test_hostile_files_that_are_accepted_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: one that is accepted, and one during which the alarm comes that was set for it."""
    left = []

    def late(folder: Path) -> None:
        left.append(signal.alarm(0))
        assert left[0]
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setitem(faults.HOSTILE, "harmless", lambda folder: None)
    monkeypatch.setitem(faults.HOSTILE, "endless", late)
    assert hostile("harmless", tmp_path) == "harmless: accepted"
    with pytest.raises(faults.Late, match=f"endless: not refused within {faults.SECONDS} s"):
        hostile("endless", tmp_path)
    assert 0 < left[0] <= faults.SECONDS
    assert hostile("config with depth 1000000", tmp_path) is None


def test_campaign_counts_and_names_losses(monkeypatch: pytest.MonkeyPatch):
    """Oracle: five trials counted by hand; without time, none is tried."""

    def broken(folder: Path) -> str | None:
        raise OSError("no such thing")

    every = [("a", lambda folder: None)] * 3 + [("b", lambda folder: "the weights differ"), ("b", broken)]
    monkeypatch.setattr(faults, "trials", lambda draw: every)
    said: list[str] = []
    found = faults.campaign(0, 1.0, steps=2, show=said.append)
    a, b = found["rows"]
    assert a == dict(fault="a", planned=3, tried=3, survived=3, lost=[])
    assert (b["tried"], b["survived"], sorted(b["lost"])) == (2, 0, ["OSError: no such thing", "the weights differ"])
    assert sorted(said) == ["b: OSError: no such thing", "b: the weights differ"]
    assert {row["tried"] for row in faults.campaign(0, 0.0, steps=2)["rows"]} == {0}


def test_every_fault_has_trials():
    """Oracle: the counts of the module, such as a cut at each 1/64th of four files and 200 bits in each of four."""
    names = [name for name, _ in faults.trials(random.Random(0))]
    assert names.count("training_state.pt: cut") == 64 and names.count("images: one bit") == 200
    assert sum(name.startswith("run: SIG") and not name.endswith("rank") for name in names) == 40
