"""Tests of fuzzed arguments: a clear error or correct numbers, equal on the kernels and on PyTorch."""

import json

import pytest
from interpreter import interpreting

from benchmarks import fuzz


@pytest.mark.fast
def test_a_sample_of_the_calls():
    """Oracle: float64 for accepted calls, an error of this package for others; PyTorch's results for the kernels."""
    plain = [fuzz.answer(number) for number in range(150)]
    with interpreting():
        kernels = [fuzz.answer(number) for number in range(10)]
    assert fuzz.failures(plain, kernels) == []


@pytest.mark.fuzz
def test_all_calls():
    """Oracle: as above; writes the committed result."""
    assert fuzz.report() == []


@pytest.mark.fast
def test_committed_result_is_clean():
    """Oracle: its counts, which list only allowed outcomes."""
    result = json.loads(fuzz.RESULT.read_text())
    assert result["calls"] >= 10_000 and result["kernel_calls"] >= 500 and result["failures"] == []
    for half, calls in (("pytorch", result["calls"]), ("kernels", result["kernel_calls"])):
        assert {came for counts in result[half].values() for came in counts} <= {"ok", *fuzz.ERRORS}
        assert sum(sum(counts.values()) for counts in result[half].values()) == calls


def test_a_crashed_process_is_one_failure(monkeypatch):
    """Oracle: the exit code of a worker that kills itself at its second call; the third call is still run."""
    monkeypatch.setattr(fuzz, "MODULE", ["-c", CRASHING_WORKER])
    rows = fuzz.on_kernels(range(3))
    assert [row["came"] for row in rows] == ["ok", "crash", "ok"] and "code -11" in rows[1]["wrong"]


CRASHING_WORKER = """
import json, os, signal, sys
for number in range(*map(int, sys.argv[2:4])):
    if number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps(dict(number=number, op="linear", done=[], came="ok")), flush=True)
"""
