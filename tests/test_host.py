"""Tests of host time by Python calls of a block, which are deterministic. Oracle: timm's block and the limits below."""

import contextlib

import pytest
import torch

from benchmarks import host
from benchmarks.no_device import no_device
from fastvit_triton.kernels import onednn
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.plan import forcing

# Python calls in inference: a plain block looks up its way once, or finds once that nothing of ours runs ("original");
# a fused one is replayed, also on a CPU
LIMITS = {
    "plain": lambda timm: timm + 14,
    "original": lambda timm: timm + 35,
    "fused": lambda timm: 100,
    "onednn": lambda timm: 110,
}


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


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_calls_are_the_same_at_every_run(phase):
    """Oracle: a second count of the same calls, of timm's block and of ours."""
    for make, batch in ((host.by_timm, 0), (host.ours, 1)):
        first = calls(make, phase, "fused", batch)
        assert first == calls(make, phase, "fused", batch) > 50


@pytest.mark.parametrize(
    "make, way, batch",
    [
        (host.ours, "plain", 0),
        (host.converted, "plain", 0),
        (host.converted, "original", 0),
        (host.frozen, "fused", 1),
        (host.converted, "onednn", 1),
        (host.frozen, "onednn", 1),
    ],
)
def test_a_block_makes_few_calls(make, way, batch):
    """Oracle: in inference, the limits above, some of which depend on the number of calls of timm's block."""
    if way == "onednn" and onednn.why_not(torch.device("cpu"), torch.float32) is not None:
        pytest.skip("PyTorch has no oneDNN here")
    assert calls(make, "inference", way, batch) <= LIMITS[way](calls(host.by_timm, "inference", "plain", 0))


@pytest.mark.full
def test_rows():
    """Oracle: every phase, block and way has one row, with positive numbers."""
    rows = host.rows(rounds=2)
    assert len({(row["phase"], row["block"], row["way"]) for row in rows}) == len(rows) == 24
    for row in rows:
        assert row["us"] > 0 < row["timm_us"] and row["calls"] > 0 < row["timm_calls"]
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
