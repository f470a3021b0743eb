"""Tests of `fastvit-triton selftest`: it passes, reports wrong ops, survives crashed processes, and ends in time."""

import contextlib
import dataclasses
import json
import math
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from commands import refused
from interpreter import interpreting
from patience import HANG

from fastvit_triton.cli import main
from fastvit_triton.kernels import OPS, settings
from fastvit_triton.measure import selftest, workers
from fastvit_triton.measure.compare import named_leaves, outcome, verdict
from fastvit_triton.measure.timeout import Deadline

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FIRST = ["layer_norm tiny ragged float32", "linear tiny branch float16"]


class InProcess:
    """A worker that runs its checks in this process."""

    def __init__(self, device: torch.device) -> None:
        self.checks, self.device = selftest.planned(device), device

    def ready(self) -> bool:
        return True

    def answer(self, name: str) -> dict:
        return workers.row_of(name, self.checks[name], self.device)

    def kill(self) -> None: ...

    def end(self) -> int:
        return 0


@pytest.fixture
def here(monkeypatch):
    """Runs checks in this process, one after another, in the interpreter."""
    monkeypatch.setattr(workers, "Worker", InProcess)
    monkeypatch.setattr(workers, "count", lambda device: 1)
    with interpreting():
        yield


@pytest.fixture
def only(monkeypatch):
    """Restricts the checks to some names."""

    def leave(*names):
        kept = {name: check for name, check in selftest.planned(CPU).items() if name in names}
        assert len(kept) == len(names)
        monkeypatch.setattr(selftest, "planned", lambda device: kept)

    return leave


def command(capsys, tmp_path, *words, code):
    """(last line on stdout, contents of the file) of `selftest --interpret`, which must end with exit code `code`."""
    out = tmp_path / "out.json"
    assert main(["selftest", "--interpret", "--out", str(out), *words]) == code
    return capsys.readouterr().out.splitlines()[-1], json.loads(out.read_text())


def test_first_case_of_every_op_passes(here, only, capsys, tmp_path):
    """Oracle: float64, by the checks themselves; one row each with its provenance, in the order of the plan."""
    names = list(selftest.planned(CPU))
    firsts = names[: len(OPS)]
    assert {name.split()[0] for name in firsts} == {op.name for op in OPS}
    only(*firsts, "layer_norm last images")
    line, held = command(capsys, tmp_path, code=0)
    assert line.startswith(f"{len(OPS) + 1} checks of {len(OPS)} ops passed on the CPU in Triton's interpreter in ")
    assert line.endswith(f"{tmp_path / 'out.json'} holds them") and "not reached" not in line
    assert [row["case"] for row in held["rows"]] == [
        name for name in names if name in (*firsts, "layer_norm last images")
    ]
    assert all(row["match"] and row["within"] <= 1 and row.get("bitwise", True) for row in held["rows"])
    assert held["failed"] == held["not_reached"] == [] and held["device"] == "cpu" and held["gpu"] is None
    assert {"commit", "date", "command", "packages", "seconds"} <= held.keys()


def broken(op, monkeypatch, change):
    """Replaces one of `OPS` by an op with changed outputs."""

    def run(**arguments):
        return change(op.run(**arguments))

    changed = dataclasses.replace(op, run=run)
    monkeypatch.setattr(selftest, "OPS", [changed if other is op else other for other in OPS])


calls = iter(range(10**6))


@pytest.mark.fast
@pytest.mark.parametrize(
    "change, said",
    [
        (lambda y: y + 1e-3, r"output 0: error \d+"),
        (lambda y: y + math.nan, "output 0: not finite"),
        (lambda y: y.detach() + 0 * y, r"gradient of \w+\[0\]: error"),
        (lambda y: y + 1e-7 * (next(calls) % 2), "results of equal calls differ"),
        (lambda y: y.nothing, r"AttributeError: 'Tensor' object has no attribute 'nothing'"),
    ],
    ids=["off", "infinite", "no_gradient", "unrepeatable", "raises"],
)
def test_a_wrong_op_is_reported(here, capsys, tmp_path, monkeypatch, change, said):
    """Oracle: which op was made wrong, and how; the other op's check passes."""
    broken(next(op for op in OPS if op.name == "layer_norm"), monkeypatch, change)
    kept = {name: selftest.planned(CPU)[name] for name in FIRST}
    monkeypatch.setattr(selftest, "planned", lambda device: kept)
    line, held = command(capsys, tmp_path, code=1)
    assert line.startswith("1 of 2 checks failed on the CPU in Triton's interpreter in ")
    found = line[line.index(": the first is ") :]
    assert re.search(rf"is {FIRST[0]} \({said}", found), found
    assert held["failed"] == FIRST[:1] and [row["case"] for row in held["rows"]] == FIRST


@pytest.mark.full
def test_checks_run_in_a_process_of_their_own(only, capsys, tmp_path, monkeypatch):
    """Oracle: kernels ran on the CPU although TRITON_INTERPRET is not set here; PyTorch's error would differ."""
    monkeypatch.chdir(tmp_path)
    only(*FIRST)
    line, held = command(capsys, tmp_path, code=0)
    assert line.startswith("2 checks of 2 ops passed") and len(held["rows"]) == 2
    assert all(row["match"] and row["bitwise"] for row in held["rows"])


PROCESS = """
import json, sys
print("noise")
print('row: {}', flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "dies":
        sys.exit(7)
    row = dict(case=name, op="layer_norm", match=True)
    if name == "loses":
        row = dict(case=name, error="RuntimeError: an illegal memory access", lost=True)
    print("row: " + json.dumps(row), flush=True)
    if "lost" in row:
        break
"""


def test_a_fault_ends_one_process_and_keeps_the_other_rows(capsys, tmp_path, monkeypatch):
    """Oracle: the rows of a stand-in process that crashes in one check and loses its device in another."""
    names = ["a", "loses", "b", "dies", "c"]
    monkeypatch.setattr(selftest, "planned", lambda device: dict.fromkeys(names))
    monkeypatch.setattr(workers, "count", lambda device: 1)
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", PROCESS))
    line, held = command(capsys, tmp_path, code=1)
    assert "2 of 5 checks failed" in line
    assert "the first is loses (RuntimeError: an illegal memory access, and the device was lost)" in line
    assert [row["case"] for row in held["rows"]] == names and held["failed"] == ["loses", "dies"]
    assert held["rows"][3]["error"] == "the process ended with code 7" and held["not_reached"] == []


def test_a_process_that_does_not_start(capsys, tmp_path, monkeypatch):
    """Oracle: the exit code of the process, in one sentence."""
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", "exit(3)"))
    assert main(["selftest", "--interpret", "--out", str(tmp_path / "out.json")]) == 1
    assert "a process for the checks ended with code 3 before the first one" in capsys.readouterr().err


def test_selftest_ends_in_time(capsys, tmp_path, monkeypatch):
    """Oracle: a stand-in whose time is over when its second check begins: the first counts, the others are listed."""
    process, begun, asked = PROCESS.replace("sys.exit(7)", "sys.stdin.read()"), threading.Event(), []
    take = workers.WorkerRun._take

    class Timer:
        def __init__(self, seconds, call):
            asked.append(seconds)
            self._thread = threading.Thread(target=lambda: begun.wait(HANG) and call())
            self.start, self.cancel = self._thread.start, self._thread.join

    def taken(self):
        name = take(self)
        if name == "dies":
            begun.set()
        return name

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(workers.WorkerRun, "_take", taken)
    monkeypatch.setattr(selftest, "planned", lambda device: dict.fromkeys(["a", "dies", "b"]))
    monkeypatch.setattr(workers, "count", lambda device: 1)
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", process))
    line, held = command(capsys, tmp_path, "--seconds", f"{HANG}", code=0)
    assert line.startswith("1 checks of 1 ops passed") and "; 2 were not reached in time; " in line
    assert held["not_reached"] == ["dies (begun)", "b"] and [row["case"] for row in held["rows"]] == ["a"]
    assert HANG / 2 < asked[0] <= HANG


def test_no_passed_check_is_a_failure(here, capsys, tmp_path):
    """Oracle: with no time, exit code 1 and every check listed as not reached."""
    line, held = command(capsys, tmp_path, "--seconds", "1e-9", code=1)
    assert line.startswith("0 checks") and held["rows"] == []
    assert held["not_reached"] == list(selftest.planned(CPU))


@pytest.mark.fast
def test_an_interrupt_keeps_the_rows(here, only, tmp_path, monkeypatch, capsys):
    """Oracle: the row before Ctrl-C is in the file; exit code 130."""
    only(*FIRST)
    answer = InProcess.answer

    def interrupted(self, name):
        if name == FIRST[1]:
            raise KeyboardInterrupt
        return answer(self, name)

    monkeypatch.setattr(InProcess, "answer", interrupted)
    out = tmp_path / "out.json"
    assert main(["selftest", "--interpret", "--out", str(out)]) == 130
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == FIRST[:1]


@pytest.mark.fast
@pytest.mark.parametrize(
    "words, said",
    [
        ([], "selftest needs a GPU, and there is none in use; --interpret checks tiny shapes on the CPU"),
        (["--device", "cpu"], "--interpret checks tiny shapes on the CPU"),
        (["--device", "nonsense"], "--device nonsense does not work here"),
        (["--device", "meta"], "the kernels do not run on meta: Triton kernels need a CUDA or ROCm GPU"),
        (["--interpret", "--device", "meta"], "--interpret runs on the CPU, --device is meta"),
        (["--interpret", "--seconds", "-1"], "--seconds is -1; give a number above 0"),
        (["--interpret", "--seconds", "nan"], "--seconds is nan; give a number above 0"),
        (["--interpret", "--out", "nowhere/x.json"], "--out nowhere/x.json is in a folder that does not exist"),
        (["--interpret", "--out", "."], "--out . is a folder; give a file"),
    ],
)
def test_invalid_options(capsys, tmp_path, monkeypatch, words, said):
    """Oracle: exit code 2, one sentence, and no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = refused(capsys, "selftest", *words)
    assert said in sentence and list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_plan_of_a_gpu(monkeypatch):
    """Oracle: the documented checks in their order: real shapes, modes, memory, the last device, every case."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = list(selftest.planned(GPU))
    assert len(names) == len(set(names)) > 300
    real = [f"{op.name} {name} bfloat16" for op in OPS for name in selftest.REAL[op.name]]
    modes = [f"{op.name} {mode}" for mode in ("on a stream", "in a CUDA graph", "in threads") for op in OPS]
    memory = [f"memory of blocks of {model}" for model, _ in selftest.TRAINED]
    loads = [f"{op} under load" for op in selftest.SCALED]
    first = [*real, *modes, *loads, *memory, *(f"{op.name} on cuda:1" for op in OPS)]
    assert names[: len(first)] == first
    for op in OPS:
        for dtype in ("bfloat16", "float16", "float32"):
            assert {f"{op.name} small {name} {dtype}" for name in op.ragged} <= set(names)
            assert {f"{op.name} {name} {dtype}" for name in selftest.REAL[op.name]} <= set(names)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not any("cuda:" in name for name in selftest.planned(GPU))


@pytest.fixture
def streams(monkeypatch):
    """Replaces streams: work on a stream runs at once, in order."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)


def capture(run, pool):
    """Replaces a CUDA graph: a replay repeats the call and writes to the tensors of the first one."""
    held = run()

    def replay():
        for name, value in run().items():
            held[name].copy_(value)

    return held, replay


LAYER_NORM = next(op for op in OPS if op.name == "layer_norm")


@pytest.mark.fast
@pytest.mark.parametrize("mode", [selftest.on_stream, selftest.in_graph, selftest.in_threads])
def test_modes_compare_with_a_plain_call(mode, streams, monkeypatch):
    """Oracle: the reference equals itself in every mode; an op whose result depends on the order of calls does not."""
    monkeypatch.setattr(selftest, "capture", capture)
    right = dataclasses.replace(LAYER_NORM, run=LAYER_NORM.reference)
    turns = iter(range(100))
    wrong = dataclasses.replace(right, run=lambda x, **rest: right.run(x, **rest) + next(turns))
    case = LAYER_NORM.ragged["odd"]
    assert selftest._mode(mode, right, case, CPU)["bitwise"]
    row = selftest._mode(mode, wrong, case, CPU)
    assert not row["bitwise"] and row["op"] == "layer_norm" and row["shape"] == case
    assert row["worst"] == "output 0" and row["eager"] == ""


def test_a_launch_on_another_stream_is_found(streams, monkeypatch):
    """Oracle: an op that reads x when the stream starts, like a launch that does not wait for the stream."""
    arguments, seen = LAYER_NORM.inputs(LAYER_NORM.ragged["odd"], torch.float32, CPU), []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(arguments["x"].detach().clone()))
    want = outcome(LAYER_NORM.reference, arguments, named_leaves(arguments))

    def early(x, **rest):
        return LAYER_NORM.reference(x + (seen[0] - x).detach(), **rest)

    assert "output 0" in selftest.on_stream(early, arguments, want)


@pytest.mark.full
def test_memory_of_a_step_is_compared(monkeypatch):
    """Oracle: peaks of a stand-in; both variants train the same block."""
    peaks = {"plain": 100, "fused": 90}

    def peak_bytes(step, device):
        step()
        return peaks[settings.forced]

    monkeypatch.setattr(selftest, "peak_bytes", peak_bytes)
    with interpreting():
        row = selftest.check_memory("vit_digits_patch2_8", 2, CPU)
        assert row["match"] and (row["fused_bytes"], row["eager_bytes"], row["within"]) == (90, 100, 0.9)
        peaks["fused"] = 110
        row = selftest.check_memory("vit_digits_patch2_8", 2, CPU)
    assert not row["match"] and row["worst"] == "peak memory" and row["within"] == 1.1


@pytest.mark.parametrize("name", selftest.SCALED)
def test_gradients_under_load_are_compared(name):
    """Oracle: an op whose third pass is off in one value of layer_scale's gradient; the op itself passes."""
    op = selftest.BY_NAME[name]
    passes = iter(range(100))

    def wrong(layer_scale, **rest):
        off = torch.zeros_like(layer_scale)
        off[0] = next(passes) == 2
        return op.run(layer_scale=layer_scale, **rest) + (off * layer_scale - (off * layer_scale).detach())

    case = op.cases[selftest.SCALED[name][1]]
    with interpreting():
        for each, match in ((op, True), (dataclasses.replace(op, run=wrong), False)):
            row = selftest.check_load(each, case, torch.float32, CPU)
            assert (row["match"], row["op"], row["repeats"]) == (match, name, selftest.STREAMS)
    assert next(passes) == selftest.STREAMS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", selftest.SCALED)
def test_gradients_of_layer_scale_are_right_under_load(name):
    """Oracle: float64, for 500 passes on four streams beside products that occupy every unit."""
    case = selftest.REAL[name][selftest.SCALED[name][0]]
    row = selftest.check_load(selftest.BY_NAME[name], case, torch.bfloat16, GPU)
    assert row["match"] and row["repeats"] == 500, row


def test_too_little_memory_is_no_failure():
    """Oracle: a check that runs out of memory is marked "skipped", without "error"."""

    def check():
        raise torch.OutOfMemoryError("CUDA out of memory")

    row = workers.row_of("far", check, CPU)
    assert "skipped" in row and "error" not in row and "lost" not in row


@pytest.mark.fast
def test_bits_are_compared():
    """Oracle: NaN equals itself; zeros of different sign, or a missing tensor, differ."""
    a = {"x": torch.tensor([math.nan, 0.0])}
    assert selftest.same(a, {"x": a["x"].clone()})
    assert not selftest.same(a, {"x": torch.tensor([math.nan, -0.0])}) and not selftest.same(a, {})


@pytest.mark.fast
def test_flushed_values_are_no_error():
    """Oracle: a GPU flushes values below 2⁻¹²⁶ to zero; an error above them counts, and one where the truth is zero."""
    tiny = torch.tensor([1e-42], dtype=torch.float64)
    for got, want, match in ((0.0, tiny, True), (1e-37, tiny, False), (1e-42, 0 * tiny, False)):
        truth = {"gradient of x": want}
        said = verdict({"gradient of x": torch.tensor([got])}, truth, {"gradient of x": want.float()}, torch.float32)
        assert said.match is match


@pytest.mark.fast
def test_workers_share_the_checks():
    """Oracle: every name runs once, although four workers take names concurrently; rows are added one at a time."""
    names, adding, rows = [str(i) for i in range(50)], threading.Lock(), []

    class Quick(InProcess):
        def __init__(self):
            pass

        def answer(self, name):
            return dict(case=name)

    def add(row):
        assert adding.acquire(blocking=False)
        time.sleep(1e-4)
        rows.append(row["case"])
        adding.release()

    work = workers.WorkerRun(names, Deadline(HANG), add, Quick)
    work.run(4)
    assert sorted(rows, key=int) == names and work.not_reached == []
