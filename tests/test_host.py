"""Tests of host time by Python calls of a block, which are deterministic. Oracle: timm's block and the limits below."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import host
from benchmarks.no_device import no_device
from fastvit_triton.engine import ways
from fastvit_triton.kernels import onednn
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing

PACKAGE = str(Path(ways.__file__).parents[1])
CASES = [  # with the most Python calls of a block, some of which depend on the number of calls of timm's block
    # a block that may launch kernels looks up its way once
    (host.ours, "inference", "plain", 0, lambda timm: timm + 14),
    # blocks are replayed, on a CPU also plain ones, and those of which nothing of ours runs ("original")
    (host.converted, "inference", "plain", 0, lambda timm: 80),
    (host.converted, "inference", "original", 0, lambda timm: 80),
    (host.frozen, "inference", "fused", 1, lambda timm: 100),
    (host.converted, "inference", "onednn", 1, lambda timm: 85),
    (host.frozen, "inference", "onednn", 1, lambda timm: 85),
    (host.converted, "training", "plain", 0, lambda timm: timm + 25),
    (host.converted, "training", "original", 0, lambda timm: timm + 45),
]


def calls(make, phase, way, batch):
    """Python calls of one block, from models of two depths; launches of kernels do nothing."""
    runs = [host.call(make, depth, phase, batch) for depth in host.DEPTHS]
    with contexts(way):
        for run in runs * 3:
            run()
        shallow, deep = map(host.calls_of, runs)
    return (deep - shallow) / (host.DEPTHS[1] - host.DEPTHS[0])


@contextlib.contextmanager
def contexts(way):
    """Makes blocks run in this way; "original" is that of a CPU without measurements."""
    if way == "original":
        with onednn.using_row({}):
            yield
    else:
        with forcing(way), using_backend("onednn") if way == "onednn" else no_device():
            yield


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["inference", "training"])
def test_calls_are_the_same_at_every_run(phase):
    """Oracle: a second count of the same calls, of timm's block and of ours."""
    for make, batch in ((host.by_timm, 0), (host.ours, 1)):
        first = calls(make, phase, "fused", batch)
        assert first == calls(make, phase, "fused", batch) > 50


@pytest.mark.few(5)
@pytest.mark.parametrize("make, phase, way, batch, most", CASES)
def test_a_block_makes_few_calls(make, phase, way, batch, most):
    """Oracle: the limits above."""
    if way == "onednn" and onednn.why_not(torch.device("cpu"), torch.float32) is not None:
        pytest.skip("PyTorch has no oneDNN here")
    assert calls(make, phase, way, batch) <= most(calls(host.by_timm, phase, "plain", 0))


def test_few_of_our_functions_run_before_the_first_launch(monkeypatch):
    """Oracle: by count, 232 for a block of timm's that is not replayed."""
    monkeypatch.setattr(ways, "REPLAYS", False)
    run = host.call(host.converted, 1, "inference", 1)
    names = []

    def count(frame, event, _):
        if event == "call" and PACKAGE in frame.f_code.co_filename and "launch" not in names:
            names.append(frame.f_code.co_name)

    with contexts("fused"):
        run()
        run()  # the first call finds the sizes, the second the way
        sys.setprofile(count)
        try:
            run()
        finally:
            sys.setprofile(None)
    assert names[-1] == "launch" and len(names) <= 240


@pytest.mark.full(one_in=3)
def test_rows():
    """Oracle: every phase, block and way has one row, with positive numbers."""
    rows = host.rows(rounds=2)
    assert len({(row["phase"], row["block"], row["way"]) for row in rows}) == len(rows) == 24
    for row in rows:
        assert row["us"] > 0 < row["timm_us"] and row["calls"] > 0 < row["timm_calls"]
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
