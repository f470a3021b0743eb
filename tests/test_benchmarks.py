"""Tests of the benchmark harness: order, medians, verdicts, deadlines, files, tables. Oracle: artificial variants."""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreting
from matplotlib.figure import Figure
from patience import HANG

from benchmarks import backtest, compare_commits, cpu, drop_in, model_runs, op_cases, plot, tune
from benchmarks.conftest import against_compile
from benchmarks.result_file import ROOT, ResultFile
from benchmarks.targets import targets, to_race
from fastvit_triton.kernels import launch, onednn
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.sizes import WAYS
from fastvit_triton.measure import timeout, timing, tuning
from fastvit_triton.measure.compare import verdict
from fastvit_triton.measure.timeout import Deadline, TimedOut
from fastvit_triton.measure.variants import Case, Variant, VariantTimes, measure, rows_of

CPU = torch.device("cpu")


@pytest.fixture
def part(tmp_path):
    """A factory of result files that print no rows."""
    return lambda **named: ResultFile("x", tmp_path, Deadline(HANG), True, lambda line: None, **named)


@pytest.mark.fast
def test_variants_alternate_in_both_orders():
    """Oracle: the order of calls, recorded by the variants; the untimed part runs before each call."""
    called = []

    def step(name, copy):
        called.append(f"before {name}")
        return lambda: called.append(f"{name}{copy}")

    steps = {name: partial(step, name) for name in "ab"}
    samples, errors = timing.samples_of(steps, CPU, Deadline(HANG), seconds=0.0, rounds=(3, 3), copies=2)
    timed = called[12:]  # three warm-up calls of each variant
    assert timed[1::2] == ["a0", "b0", "b1", "a1", "a0", "b0"] and not errors
    assert timed[::2] == [f"before {c[0]}" for c in timed[1::2]]
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("seconds, calls", [(1e6, 10), (0.0, 3)])
def test_variants_are_warmed_up(seconds, calls):
    """Oracle: the calls before the two that are timed: all that were asked for, or three if there is no time."""
    called = []
    step = lambda copy: lambda: called.append(copy)  # noqa: E731
    samples, _ = timing.samples_of({"x": step}, CPU, Deadline(1e6), seconds, (2, 2), copies=2, warm_up=10)
    assert len(samples["x"]) == 2 and called == [*(turn % 2 for turn in range(calls)), 0, 1]


@pytest.mark.fast
def test_median_and_quartiles():
    """Oracle: the quartiles of five ordered numbers, and a call of known duration."""
    assert timing.Timing.of([5.0, 1.0, 4.0, 2.0, 3.0]) == timing.Timing(3.0, 2.0, 4.0, 5)
    assert timing.Timing.of([7.0]) == timing.Timing(7.0, 7.0, 7.0, 1)
    found, _ = timing.alternate({"nap": lambda i: lambda: time.sleep(0.002)}, CPU, Deadline(HANG), 0.0, (3, 3))
    assert found["nap"].us >= 2000


def layer():
    """A linear layer whose variants are correct, wrong in the output or in a gradient, NaN, raising and missing."""

    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in ((64, 32), (16, 32)))
        return dict(x=x, weight=weight)

    def eager(x, weight):
        return F.linear(x, weight)

    def broken(x, weight):
        raise RuntimeError("out of order")

    calls = {
        "eager": eager,
        "in float32": lambda x, weight: F.linear(x.float(), weight.float()).to(x.dtype),
        "4 % off": lambda x, weight: F.linear(x, weight) * 1.04,
        "no gradient": lambda x, weight: F.linear(x, weight.detach()) + 0 * weight.sum(),
        "NaN": lambda x, weight: F.linear(x, weight).masked_fill(torch.eye(64, 16, dtype=torch.bool), math.nan),
        "broken": broken,
    }
    found = [Variant(name, None, call) for name, call in calls.items()] + [Variant("absent", "not installed")]
    return Case("layer", torch.bfloat16, inputs, found, eager, facts=dict(op="layer"), work=(2.0 * 64 * 16 * 32, 1e4))


@pytest.mark.fast
def test_wrong_variants_have_no_time():
    """Oracle: which variants were made wrong, and how."""
    forward, backward = (measure(layer(), phase, CPU, Deadline(HANG), 0.0) for phase in ("forward", "backward"))
    right = {"forward": {"eager", "in float32", "no gradient"}, "backward": {"eager", "in float32"}}
    for phase, found in (("forward", forward), ("backward", backward)):
        assert {name for name, row in found.rows.items() if "us" in row} == right[phase] == set(found.samples)
        assert {name for name, row in found.rows.items() if row.get("match")} == right[phase]
        assert found.rows["broken"]["error"] == "RuntimeError: out of order"
        assert found.rows["absent"]["reason"] == "not installed"
    assert forward.rows["NaN"]["worst"] == "output 0" and forward.rows["eager"]["within"] <= 0.5
    assert backward.rows["no gradient"]["worst"] == "gradient of weight[0]"
    eager, other = forward.samples["eager"], forward.samples["in float32"]
    ratios = [a / b for a, b in zip(eager, other, strict=True)]
    assert forward.rows["in float32"]["speedup"] == round(statistics.median(ratios), 3)
    assert forward.rows["eager"]["speedup"] == 1.0 and forward.rows["eager"]["flops"] == 2 * 64 * 16 * 32


@pytest.mark.fast
def test_a_missing_output_does_not_match():
    """Oracle: the definition; a variant that returns fewer outputs, or one of another shape, does not match."""
    truth = {"output 0": torch.ones(2), "output 1": torch.ones(3)}
    assert not verdict({"output 0": torch.ones(2)}, truth, truth, torch.float32).match
    assert not verdict(truth | {"output 1": torch.ones(1)}, truth, truth, torch.float32).match
    assert verdict(truth, truth, truth, torch.float32).match


@pytest.mark.fast
def test_error_limit_uses_all_tensors_of_a_deep_model():
    """Oracle: by hand. Eager errs by 1 % in two of three tensors, a variant by 1 % in the third as well."""
    truth = {f"output {i}": torch.full((2,), 10.0, dtype=torch.float64) for i in range(3)}
    eager = truth | {f"output {i}": torch.full((2,), 10.1) for i in range(2)}
    variant = truth | {"output 2": torch.full((2,), 10.1)}
    assert not verdict(variant, truth, eager, torch.float32).match
    assert verdict(variant, truth, eager, torch.float32, deep=True).match
    wrong = truth | {"output 2": torch.full((2,), 10.3)}
    assert not verdict(wrong, truth, eager, torch.float32, deep=True).match


@pytest.mark.fast
def test_saved_bytes_count_storages_once():
    """Oracle: x·y saves x and y of 4 KiB each; views share a storage; tensors that the caller keeps do not count."""
    x, y = torch.randn(1024, requires_grad=True), torch.randn(1024, requires_grad=True)
    assert timing.saved_bytes(lambda: x * y, []) == 8192
    assert timing.saved_bytes(lambda: x[:512] * x[512:], []) == 4096
    assert timing.saved_bytes(lambda: x * y, [x]) == 4096
    assert timing.saved_bytes(lambda: (x * y).exp(), [x, y]) == 4096


@pytest.mark.fast
def test_deadlines_interrupt_and_list_missing_rows(part):
    """Oracle: by hand. Rows before the deadline finish, one is interrupted, and later ones are listed as missing."""
    made = part()
    with made.row("quick") as go:
        assert go
        made.add(dict(case="quick"))
    with made.row("slow"):
        assert signal.getitimer(signal.ITIMER_REAL)[0]
        made.deadline.end = 0.0
        signal.raise_signal(signal.SIGALRM)
        made.add(dict(case="slow"))
    with made.row("later") as go:
        assert not go
    made.write()
    held = json.loads(made.path.read_text())
    assert held["not_reached"] == ["slow (begun)", "later"] and held["rows"] == [{"case": "quick"}]


@pytest.mark.fast
def test_an_alarm_while_a_deadline_ends_leaves_no_timer(monkeypatch):
    """Oracle: the process's own timer and handler, if the alarm arrives while it is being turned off."""
    handler, turn, came = signal.getsignal(signal.SIGALRM), signal.setitimer, []

    def interrupted(which, seconds, again=0.0):
        if not seconds and not came:
            came.append(1)
            raise TimedOut("now")
        return turn(which, seconds, again)

    monkeypatch.setattr(signal, "setitimer", interrupted)
    with Deadline(HANG):
        pass
    assert came and signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.fast
def test_deadlines_nest_and_leave_no_alarm():
    """Oracle: the process's own timer and handler; the earlier of two deadlines interrupts, the outer one continues."""
    handler, outer = signal.getsignal(signal.SIGALRM), Deadline(HANG)
    with outer, outer:
        with pytest.raises(TimedOut), outer.sooner(0.05):
            time.sleep(HANG)
        assert HANG / 2 < signal.getitimer(signal.ITIMER_REAL)[0] <= HANG
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is handler


class _Slow:
    def __del__(self):
        time.sleep(HANG)


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_in_a_destructor_is_repeated(monkeypatch):
    """Oracle: two sleeps end. Python prints and drops exceptions of destructors; the next interrupt ends the work."""
    monkeypatch.setattr(timeout, "AGAIN", 0.2)
    with pytest.raises(TimedOut), Deadline(0.1):
        _Slow()
        time.sleep(HANG)


class Gpu:
    """A stand-in for torch on a machine with a GPU; it records the calls in order."""

    int8 = torch.int8

    def __init__(self):
        self.asked, self.cuda = [], self
        for name in ("synchronize", "_sleep", "reset_peak_memory_stats"):
            setattr(self, name, lambda *a, name=name: self.asked.append(name))
        self.held = iter((100, 350))
        self.memory_allocated = self.max_memory_allocated = lambda device: next(self.held)

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=2**30)

    def empty(self, size, **options):
        self.asked.append(f"empty {size}")
        return SimpleNamespace(fill_=lambda value: self.asked.append("flush"))

    def Event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(elapsed_time=lambda end: 0.25)
        event.record = lambda: self.asked.append("event")
        return event


@pytest.mark.fast
@pytest.mark.parametrize("latency", [False, True])
def test_device_times_are_taken_between_events(latency, monkeypatch):
    """Oracle: the order: head start for the host, cold cache, events around the call only; milliseconds become µs."""
    monkeypatch.setattr(timing, "torch", gpu_ := Gpu())
    clock = timing.Clock(torch.device("cuda"), latency)
    clock.time("a", lambda copy: lambda: gpu_.asked.append(f"call {copy}"), 1)
    before = ["flush", "synchronize"] if latency else ["_sleep", "flush"]
    assert gpu_.asked == [f"empty {2**32}", *before, "event", "call 1", "event"]
    assert clock.samples() == {"a": [250.0]} and clock.samples() == {} and gpu_.asked[-1] == "synchronize"


@pytest.mark.fast
def test_peak_memory_is_what_a_call_adds(monkeypatch):
    """Oracle: a peak of 350 bytes where 100 were allocated before."""
    monkeypatch.setattr(timing, "torch", gpu_ := Gpu())
    assert timing.peak_bytes(lambda: gpu_.asked.append("call"), torch.device("cuda")) == 250
    assert gpu_.asked == ["synchronize", "reset_peak_memory_stats", "call", "synchronize"]


@pytest.mark.fast
def test_a_slow_variant_leaves_time_for_the_others():
    """Oracle: the process's timer while a variant runs that ends by its alarm: a fifth of the time is left after it."""
    left = []

    def slow(x, weight):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        assert left[0]
        signal.raise_signal(signal.SIGALRM)

    case = layer()
    case.variants.insert(2, Variant("slow", None, slow))
    found = measure(case, "forward", CPU, Deadline(HANG), 0.0)
    assert 0.7 * HANG < left[0] <= 0.8 * HANG
    assert "us" in found.rows["eager"] and "us" in found.rows["in float32"]
    assert found.rows["slow"]["error"].startswith("TimedOut")


@pytest.mark.fast
def test_rows_come_before_the_next_variant_runs():
    """Oracle: when a row comes, later variants were not called; the rows are those of `measure` but for the times."""
    case, called = layer(), list[str]()
    for i, variant in enumerate(case.variants):
        if variant.call is not None:

            def call(*given, name=variant.name, inner=variant.call, **named):
                called.append(name)
                return inner(*given, **named)

            case.variants[i] = replace(variant, call=call)
    case.variants.insert(1, Variant("missing", "not here"))
    case.variants.append(Variant("broken", None, lambda **named: 1 / 0))
    rows, seen = [], []
    for row in rows_of(case, "forward", CPU, Deadline(HANG), 0.0, 1):
        rows.append(row)
        seen.append(row["arm"])
        assert set(called) <= set(seen)
    assert seen[:2] == [case.variants[0].name, "missing"] and seen[-1] == "broken"
    assert rows[-1]["error"].startswith("ZeroDivisionError") and rows[1]["reason"] == "not here"
    whole = measure(case, "forward", CPU, Deadline(HANG), 0.0, 1)
    for row in rows:
        assert row.keys() == whole.rows[row["arm"]].keys()
        assert ("speedup" in row) == ("us" in row) == (row.get("match") is True)


@pytest.mark.fast
def test_a_failing_row_is_recorded_and_files_stay_complete(part):
    """Oracle: the file after every row; a resumed part skips the rows that it contains."""
    made = part()
    with made.row("bad", op="x"):
        raise ValueError("first line\nsecond line")
    assert json.loads(made.path.read_text())["rows"] == [dict(case="bad", op="x", error="ValueError: first line")]
    with made.row("good"):
        made.add(dict(case="good"))
    again = part(resume=True)
    with again.row("bad") as bad, again.row("good") as good, again.row("new") as new:
        assert (bad, good, new) == (False, False, True)
    assert [row["case"] for row in again.rows] == ["bad", "good"]


@pytest.mark.fast
def test_measured_rows_are_not_replaced_by_predictions(tmp_path):
    """Oracle: the file of the table."""
    (tmp_path / "sm_90.json").write_text('{"a": {"config": {"X": 1}, "provenance": "measured"}}')
    assert tune.write("sm_90", {"a": {"X": 2}, "b": {"X": 3}}, "predicted", tmp_path) == ["b"]
    table = json.loads((tmp_path / "sm_90.json").read_text())
    assert table["a"] == {"config": {"X": 1}, "provenance": "measured"}
    assert table["b"] == {"config": {"X": 3}, "provenance": "predicted"}
    assert tune.write("sm_90", {"a": {"X": 4}}, "measured", tmp_path) == ["a"]
    assert json.loads((tmp_path / "sm_90.json").read_text())["a"]["config"] == {"X": 4}


@pytest.mark.fast
def test_measured_ways_are_kept_with_new_launch_parameters(tmp_path):
    """Oracle: the table. For one shape the first measurement counts; a later run replaces an earlier one."""
    said = [dict(shape="a", way=way) for way in ("mixed", "fused")]
    tune.write("sm_90", {"a": {"X": 1}}, "predicted", tmp_path, [*said, dict(shape="b", way="plain")])
    tune.write("sm_90", {"a": {"X": 2}}, "measured", tmp_path, [dict(shape="b", way="fused")])
    table = json.loads((tmp_path / "sm_90.json").read_text())
    assert table["ways"] == dict(measured=dict(a="mixed", b="fused"))
    assert table["a"] == dict(config={"X": 2}, provenance="measured")


@pytest.mark.full
def test_ways_are_timed_and_compared():
    """Oracle: the rows of an A100, whose BLAS has no activation; shapes are named as choices look them up."""
    tiny = dict(img_size=32, embed_dim=32, num_heads=2)

    @contextlib.contextmanager
    def on_a100():
        with interpreting(), launch.targeting("sm_80"), using_backend("auto"):
            yield

    row = tune.time_ways("vit_tiny_patch16_224", 2, False, CPU, Deadline(HANG), on_a100, True, **tiny)
    assert row["shape"].startswith("~attention C=32 F=96 H=2 N=8 B=2 + mlp C=32 F=128 N=8 B=2")
    kernels = itertools.product(("our attention", "SDPA"), ("our fc1", "BLAS"))
    arms = {f"mixed, {attention}, {fc1}" for attention, fc1 in kernels}
    assert row["variants"].keys() == {"plain", "fused, our attention", "fused, SDPA"} | arms
    for way in WAYS:
        us = [said["us"] for name, said in row["variants"].items() if name.startswith(way) and "us" in said]
        assert row.get(f"{way}_us") == min(us, default=None)
    assert row["way"] == "plain" or row["ways"].keys() > {row["shape"]}


@pytest.mark.fast
def test_launches_of_candidates_are_collected():
    """Oracle: one launch for each of the row's parameters in use and its candidates; nothing runs."""
    target = next(target for target in targets(True) if target.row == "window.fwd")
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    with interpreting():
        one = to_race(target, torch.float32, CPU)
        launches = [launch for group in one.launches().values() for launch in group]
    blocks = [[launch.fixed[name] for name in names] for launch in launches]
    assert blocks == [[config[name] for name in names] for config in one.configs.values()]


@pytest.mark.full
def test_candidates_that_spill_are_not_timed(monkeypatch):
    """Oracle: a stand-in for the compiler, whose kernels of one candidate spill; the interpreter compiles none."""
    target = next(target for target in targets(True) if target.row == "window.fwd")

    @contextlib.contextmanager
    def spilling(launches):
        results = [Future() for _ in launches]
        for launch_of, result in zip(launches, results, strict=True):
            spilled = 4 * (launch_of.fixed["num_stages"] == 2)
            result.set_result(SimpleNamespace(n_spills=spilled, _init_handles=lambda: None))
        yield results

    monkeypatch.setattr(tuning, "compiling", spilling)
    tried = tune.time_target(target, torch.float32, CPU, Deadline(HANG), interpreting, 2)["tried"]
    assert [one["config"]["num_stages"] for one in tried] == [1, 2]
    assert "error" not in tried[0] and tried[1]["error"] == "RuntimeError: spills 4 registers" and "us" not in tried[1]


@pytest.mark.fast
def test_tuning_results_are_adopted(tmp_path):
    """Oracle: the table; the first shape decides, a dry run is rejected, and each row names its source."""
    rows = [dict(case=str(x), arch="sm_90", row="a", best={"X": x}) for x in (1, 2)]
    rows.append(dict(case="way", arch="sm_90", shape="c", way="mixed"))
    (tmp_path / "t.json").write_text(fake("tuning", [*rows, dict(case="3", arch="sm_90", row="b", best=None)]))
    assert tune.adopt(tmp_path / "t.json", tmp_path) == ["a", "c"]
    want = {"a": dict(config={"X": 1}, provenance="measured", source="t.json")}
    want["ways"] = dict(measured=dict(c="mixed"), facts=dict(c=dict(source="t.json")))
    assert json.loads((tmp_path / "sm_90.json").read_text()) == want
    (tmp_path / "w.json").write_text(fake("ways", [dict(case="way", arch="sm_90", shape="d", way="fused")]))
    assert tune.adopt(tmp_path / "w.json", tmp_path) == ["d"]
    (tmp_path / "dry.json").write_text(fake("tuning", rows, dry=True))
    with pytest.raises(ValueError, match="not a tuning result of a GPU"):
        tune.adopt(tmp_path / "dry.json", tmp_path)


@pytest.mark.fast
def test_tuning_writes_rows_before_ways_are_timed(tmp_path, monkeypatch, capsys):
    """Oracle: the table, from rows of a stand-in for a GPU's; --check writes nothing, --ways times no candidate."""
    table, seen = tmp_path / "sm_90.json", []

    def ways(result, device, context):
        seen.append(table.exists() and json.loads(table.read_text()).keys())
        result.rows.append(dict(shape="c", way="mixed"))

    def rows(result, device, context):
        result.rows.append(dict(row="a", best={"X": 1}, tried=[dict(config={"X": 1})]))

    monkeypatch.setattr(tune, "run", rows)
    monkeypatch.setattr(tune, "measure_ways", ways)
    monkeypatch.setattr(tune, "write", partial(tune.write, folder=tmp_path))
    monkeypatch.setattr(tune, "ResultFile", lambda *given: SimpleNamespace(rows=[]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    for words, found in ((["--check"], False), (["--ways"], set()), ([], {"ways", "a"})):
        monkeypatch.setattr("sys.argv", ["tune", *words])
        tune.main()
        assert seen.pop() == found and ("taken: a" in capsys.readouterr().out) == (words == [])
    assert json.loads(table.read_text()) == {
        "a": dict(config={"X": 1}, provenance="measured"), "ways": dict(measured=dict(c="mixed"))
    }  # fmt: skip


@pytest.mark.fast
def test_overridden_launch_parameters_end_with_their_context():
    """Oracle: what `config` returns inside and outside; contexts nest, and the innermost one has precedence."""
    device, row = torch.device("cpu"), "linear.fwd.half"
    before = launch.config(row, {"X": 1}, device)
    with launch.overriding({row: {"X": 7}}) as looked_up, launch.overriding({"other": {"X": 8}}) as inner:
        assert launch.config(row, {"X": 1}, device)["X"] == 7 and launch.config("other", {}, device)["X"] == 8
    assert launch.config(row, {"X": 1}, device) == before
    assert inner == {row: {"X": 7}, "other": {"X": 8}} and looked_up == {}


@pytest.mark.fast
def test_variant_lists_match_the_cases():
    """Oracle: the variants that the cases have."""
    for name in op_cases.NAMES:
        case = op_cases.case(name, op_cases.TINY, torch.float32, CPU)
        assert tuple(variant.name for variant in case.variants) == op_cases.variant_names(name)
    run = model_runs.TINY[0]
    made = {variant.name for variant in model_runs.case(run, torch.bfloat16, CPU).variants}
    assert made == set(model_runs.variant_names(run))


def fake(part, rows, dry=False):
    """A result file as written on a GPU."""
    facts = dict(part=part, dry_run=dry, gpu="A GPU", date="2026-01-01", commit="abc", command="c", packages={})
    return json.dumps(facts | dict(rows=rows))


def row(variant, us, match=True, phase="forward"):
    """One measured variant."""
    work = dict(op="attention", model="ViT-B/16", flops=4e9, bytes=1e7, tflops=4e3 / us, tbs=0.1)
    return dict(case="m", phase=phase, arm=variant, us=us, match=match, **work)


@pytest.mark.fast
def test_tables_are_generated_from_files_only(tmp_path):
    """Oracle: numbers written into files by hand; without files, or with a dry run, there is no number."""
    readme = "a\n<!-- measured: models -->\nold 1.23\n<!-- end -->\nb\n<!-- measured: ops -->\n<!-- end -->\n"
    empty = plot.fill(readme, plot.load(tmp_path))
    assert empty.count(plot.NOT_YET) == 2 and "1.23" not in empty and empty.startswith("a\n") and "\nb\n" in empty
    (tmp_path / "dry.json").write_text(fake("models", [row("eager", 1e3)], dry=True))
    assert plot.fill(readme, plot.load(tmp_path)) == empty
    assert not plot.bars(plot.load(tmp_path), tmp_path / "a.png")

    variants_of_m = [row("eager", 3e3), row("torch.compile", 2e3), row("ours eager", 4e3), row("timm AMP", 1.0, False)]
    (tmp_path / "m.json").write_text(fake("models", variants_of_m))
    (tmp_path / "o.json").write_text(fake("ops", variants_of_m))
    ways = dict(case="ways of m", shape="s", rule="plain", way="fused", plain_us=2e3, mixed_us=1.5e3, fused_us=1e3)
    (tmp_path / "w.json").write_text(fake("ways", [ways]))
    keyed = dict(section="ways", kernels="k", torch="1", triton="2")
    assert "| m | 2 | 1.5 | **1** | plain |" in plot.ways_table(plot.load(tmp_path))
    (tmp_path / "r.json").write_text(fake("rows", [ways | dict(plain_us=4e3, gpu="other", **keyed)]))
    assert "| m | 2 | 1.5 | **1** | plain |" in plot.ways_table(plot.load(tmp_path))
    (tmp_path / "r.json").write_text(fake("rows", [ways | dict(plain_us=4e3, **keyed)]))
    text = plot.ways_table(plot.load(tmp_path))
    assert "| m | 4 | 1.5 | **1** | plain |" in text and "Rows of 2026-01-01 (commit abc) replace older ones." in text
    (tmp_path / "w.json").unlink()
    assert "A GPU, torch 1, triton 2, commit abc" in plot.ways_table(plot.load(tmp_path))
    full = plot.fill(readme, plot.load(tmp_path))
    assert "| m | 3 | **2** | 4 |" in full and "| m | forward | 4000.0 | 0.75 | 0.50 |" in full
    assert "A GPU" in full and plot.NOT_YET not in full and plot.fill(full, plot.load(tmp_path)) == full


@pytest.mark.fast
def test_the_cpu_table_is_generated_from_files(tmp_path):
    """Oracle: ratios written into files by hand; newer files win cell by cell; each processor has its own table."""
    facts = dict(command="python -m benchmarks.cpu --out x", packages=dict(torch="2"), commit="c", processor="P")
    cell = dict(model="m", dtype="float32", batch=1, phase="inference", threads=1)

    def row(name, ratio, error=1e-6, **changed):
        column = dict(ratio=ratio, q1=1.25, q3=1.75, error=error)
        return cell | dict(cell=name, columns={"eager": column, "ours": column, "onnx": dict(missing="x")}) | changed

    assert plot.NOT_YET in plot.cpu_table(plot.load(tmp_path))
    assert not plot.cpu_bars(plot.load(tmp_path), tmp_path / "cpu.png")
    files = [("2026-01-02", "P", [row("a", 1.5)]), ("2026-01-01", "P", [row("a", 1.0), row("b", 2.5, 0.02, threads=2)])]
    for date, processor, rows in (*files, ("2026-01-03", "Q", [row("a", 3.0)])):
        held = facts | dict(date=date, processor=processor, rows=rows)
        (tmp_path / f"z{date[-1]}.json").write_text(json.dumps(held))
    text = plot.cpu_table(plot.load(tmp_path))
    assert "| times as fast as eager, P | ours |" in text and "| times as fast as eager, Q | ours |" in text
    assert "| m, float32, batch 1, inference, 1 thread | 1.50 (1.25 to 1.75) |" in text and "1.00 (" not in text
    assert "2 threads | 2.50 (1.25 to 1.75), error 2e-02 |" in text
    assert plot.cpu_bars(plot.load(tmp_path), tmp_path / "cpu.png") and (tmp_path / "cpu.png").exists()
    assert {p: [row["cell"] for row, _ in rows] for p, rows in plot._newest_cells(plot.load(tmp_path)).items()} == {
        "P": ["a", "b"], "Q": ["a"],
    }  # fmt: skip


@pytest.mark.fast
def test_comparing_two_trees(tmp_path):
    """Oracle: ratios of artificial times, medians over the rounds; rows without a match or a phase are ignored."""
    sides = {"before": ([4.0, 4.0], [2.0, 6.0]), "after": ([4.0, 2.0], [1.0, 3.0])}
    found = {}
    for side, (eager, ours) in sides.items():
        (tmp_path / side).mkdir()
        for turn in range(2):
            rows = [row("eager", eager[turn]), row("ours eager", ours[turn]), row("wrong", 1.0, False), dict(case="x")]
            (tmp_path / side / f"{turn}.json").write_text(fake("ops", rows))
        compare_commits.collect(tmp_path / side, found.setdefault(side, {}))
    assert compare_commits.ratios(found["before"], found["after"]) == {("m", "forward", "ours eager"): (2.0, 4 / 3)}


def measured_rows(speeds, **facts):
    """Keyed rows of a model on an H200, one for each arm: speed relative to eager."""
    facts = dict(case="c", phase="forward", model="ViT-B", batch=256, autocast=False, whole=True) | facts
    facts |= dict(gpu="NVIDIA H200", kernels="", torch="2", triton="3", date="d", commit="e", match=True, flops=989e9)
    return [
        facts | dict(arm=arm, us=1e4 / s, speedup=s, speedup_quartiles=[s - 0.1, s + 0.1], peak_bytes=int(100 * s))
        for arm, s in speeds.items()
    ]


@pytest.mark.fast
def test_drop_in_rows_are_chosen_and_sorted():
    """Oracle: by hand. Whole models hide blocks, larger batches smaller ones; a faster torch.compile is the rival."""
    tuned = "torch.compile max-autotune-no-cudagraphs"
    best = {"eager": 1.0, "torch.compile": 1.2, tuned: 1.6, "optimize": 1.2, "ours": 9.0}
    blocks = measured_rows({"eager": 1.0, "optimize": 5.0}, whole=False, case="two blocks of ViT-B batch 256")
    small = measured_rows({"eager": 1.0, "optimize": 5.0}, batch=64, case="ViT-B batch 64")
    training = dict(phase="step", autocast=True, case="ViT-B batch 256 autocast")
    given = measured_rows(best) + blocks + small + measured_rows({"eager": 1.0, "optimize": 1.5}, **training)
    given += measured_rows({"eager": 1.0, "optimize": 7.0}, model="ViT-S", case="ViT-S batch 1 latency")
    given += measured_rows({"eager": 1.0, "optimize": 7.0}, model="ViT-L", autocast=True)
    given += [r | dict(error="E", model="ViT-S") for r in measured_rows({"eager": 1.0, "optimize": 7.0})]
    found = drop_in.measured(given)
    assert [(one.title, one.rival, one.gain) for one in found] == [
        ("ViT-B, training, 256 images", "eager", 1.5), ("ViT-B, inference, 256 images", "max-autotune", 1.2 / 1.6)
    ]  # fmt: skip
    assert found[0].utilisation == pytest.approx(3 * 1.5 / 10) and found[1].images == pytest.approx(256 * 120)
    whole = [(row.gpu, row.mode, row.model, row.batch, round(row.published)) for row in backtest.measured(given)]
    name = "vit_base_patch16_224"
    speeds = [("eager", 25600), ("compile", 30720), ("optimize", 30720)]
    assert whole == [("h200", mode, name, 256, images) for mode, images in speeds]
    text = drop_in.table(given)
    assert (
        "| ViT-B, inference, 256 images | 10 | 1.20 (1.10 to 1.30) | 1.60 (1.50 to 1.70) | 1.20 (1.10 to 1.30) |"
        in text
    )
    assert "| eager, ms | torch.compile | max-autotune | optimize |" in text and drop_in.table([]) == ""
    newer = measured_rows(best | {"optimize": 4.0})
    assert drop_in.measured(given + newer)[0].gain == 4.0 / 1.6


@pytest.mark.fast
def test_the_first_picture_shows_measured_speeds_before_predicted_ones():
    """Oracle: by hand. Only predictions for the measured GPU count, the fastest mode of torch.compile is shown."""
    row = dict(model="ViT-L/16", phase="inference", batch=64, gpu="h200", eager_ms=6.0, compile_ms=5.0, ours_ms=3.0)
    predicted = [
        row | dict(autotune_ms=4.0),
        row | dict(batch=256, ours_ms=1.0),
        row | dict(gpu="a100", phase="training"),
        row | dict(model="Swin-T", phase="training", ours_ms=2.0),
    ]
    found = drop_in.bars(measured_rows({"eager": 1.0, "torch.compile": 1.2, "optimize": 1.5}), predicted)
    assert [tuple(one) for one in found] == [
        ("ViT-B, 256 images", True, 1.2, 1.5),
        ("Swin-T, training, 64 images", False, 1.2, 3.0),
        ("ViT-L, 64 images", False, 1.5, 2.0),
    ]
    assert drop_in.bars([], predicted) == []
    words = "Swin-T, training, 64 images: 1.20 and 3.00; ViT-L, 64 images: 1.50 and 2.00"
    assert drop_in.described(found).endswith(words)
    axis = Figure().subplots()
    drop_in.draw(found, "title", axis)
    widths = [1.2, 1.5, 1.2, 3.0, 1.5, 2.0]
    assert [(bar.get_x(), bar.get_width(), bool(bar.get_hatch())) for bar in axis.patches] == [
        (0, width, n > 1) for n, width in enumerate(widths)
    ]
    ticks = axis.get_xticks()
    assert axis.get_xlim()[0] == 0 and {0, 1, 2, 3} <= set(ticks) and "eager PyTorch is 1" in axis.get_xlabel()


@pytest.mark.fast
def test_every_table_is_on_a_page(tmp_path):
    """Oracle: the markers of the pages; test_regenerate.py tests what is between them."""
    found = [page.read_text(encoding="utf-8") for page in plot.pages()]
    assert sum("speedup.png" in text for text in found) == 2  # README's and the site's first page
    assert all(any(f"<!-- measured: {name} -->" in text for text in found) for name in plot.TABLES)
    assert plot.launch_bars(plot.load(), tmp_path / "launches.png")


@pytest.mark.fast
def test_images_are_written_when_there_is_data(tmp_path):
    """Oracle: for each plot, a PNG is written if and only if there is data."""
    facts = dict(options={}, batch=8, peak_bytes=1)
    pair = [row("timm", 3e3) | facts, row("optimized by us", 2e3) | facts]
    (tmp_path / "m.json").write_text(fake("models", pair))
    (tmp_path / "o.json").write_text(fake("ops", [row("eager", 30.0), row("ours eager", 20.0)]))
    assert plot.bars(plot.load(tmp_path), tmp_path / "bars.png")
    assert not plot.roofline(plot.load(tmp_path), tmp_path / "roofline.png")  # no ceilings yet
    ceilings = [dict(case="copy", tbs=4.0), dict(case="bf16 matmul", tflops=700.0)]
    (tmp_path / "c.json").write_text(fake("ceilings", ceilings))
    assert plot.roofline(plot.load(tmp_path), tmp_path / "roofline.png")
    for name in ("bars", "roofline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # warnings of other libraries
def test_cpu_benchmark_writes_each_cell_once(tmp_path):
    """Oracle: the file after two calls: every cell once; errors against float64; a reason where a column is missing."""
    words = ["--out", str(tmp_path / "cpu.json"), "--resume", "--seconds", str(HANG), "--rounds", "3"]
    words += ["--columns", "medium,ours,frozen,int8,onnx", "--only"]
    small = dict(depth=2, drop_path_rate=0.9, img_size=32, embed_dim=48, num_classes=5)
    with onednn.using_row({"float32": dict.fromkeys(onednn.PHASES, 0.0)}):
        assert len(cpu.main([*words, "vit_tiny,float32,batch 1 ,threads 1,inference"], **small)) == 1
        before = json.loads((tmp_path / "cpu.json").read_text())["rows"]
        rows = cpu.main([*words, "vit_tiny,batch 1 ,threads 1"], **small)
    assert rows[:1] == before and [row["phase"] for row in rows] == ["inference", "training"] * 2
    single, dropped, half, _ = (row["columns"] for row in rows)
    assert single["onnx"].keys() == {"error", "ratio", "q1", "q3"}
    assert "in float32" in half["onnx"]["missing"] and "float32 on a CPU" in half["int8"]["missing"]
    assert all(single[name]["error"] < 1e-5 for name in ("eager", "ours", "frozen"))
    assert all(dropped[name]["error"] < 1e-5 for name in ("eager", "ours"))  # paths are dropped alike
    assert single["medium"]["error"] < 2**-6  # in bfloat16, on CPUs with such instructions
    assert 1e-4 < single["int8"]["error"] < 0.1 and single["ours"]["peak_mib"] > 0


@pytest.mark.fast
def test_rounds_alternate_in_both_orders(monkeypatch):
    """Oracle: the recorded calls; the first round is not timed, nor are calls of each column before the one that is."""
    called = []
    calls = {name: torch.nn.Identity() for name in "ab"}
    names = {id(module): name for name, module in calls.items()}
    for warm, runs in ((0.0, 1), (1e-3, 2)):  # of each column, at least
        called.clear()
        monkeypatch.setattr(cpu, "WARM", warm)
        taken = cpu.timed(lambda module, *_: called.append(names[id(module)]), calls, torch.zeros(1), 0.0, 3)
        grouped = [(name, len([*each])) for name, each in itertools.groupby(called)]
        assert [name for name, _ in grouped] == [*"ababa"] and min(count for _, count in grouped) >= runs
        assert {name: len(found) for name, found in taken.items()} == {"a": 3, "b": 3}


@pytest.mark.fast
def test_unknown_markers_raise(tmp_path):
    """Oracle: the sentence names the unknown marker."""
    with pytest.raises(ValueError, match="nonsense"):
        plot.fill("<!-- measured: nonsense -->", plot.load(tmp_path))


BENCH = """
import json, sys
import pytest
from benchmarks import op_cases
from fastvit_triton.measure import variants
for change, *words in json.loads(sys.argv[1]):
    exec(change)
    print("code", int(pytest.main(words)), flush=True)
"""


def bench(folder, *runs, only="layer_norm-small-forward and eager and not add"):
    """Output of each run of `pytest benchmarks` on one op, in one process and folder.

    Args:
        folder: the current folder.
        runs: statement that is executed first, and options.
        only: the option -k.
    """
    fixed = [str(ROOT / "benchmarks"), "-k", only, "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", BENCH, json.dumps([[run[0], *fixed, *run[1:]] for run in runs])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # in a worker pytest-benchmark times nothing
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode()
    assert done.returncode == 0 and "INTERNALERROR" not in text and "machine_info is different" not in text, text
    parts = re.split(r"^code (\d+)\n", text, flags=re.MULTILINE)
    return list(zip(parts[::2], map(int, parts[1::2]), strict=False))


@pytest.mark.full
def test_pytest_benchmarks_saves_compares_and_is_disabled(tmp_path):
    """Oracle: what pytest-benchmark documents; saved medians are replaced by one that is passed, and one that is not.

    The last two runs cannot time anything, and in the last one ours is wrong.
    """
    compare = "--benchmark-compare", "--benchmark-compare-fail=median:10%"
    (unsaved, code), (saved, same) = bench(tmp_path, ["", compare[0]], ["", "--benchmark-save=first"])
    assert code == same == 0 and "Can't compare" in unsaved and "Saved benchmark data" in saved
    (path,) = tmp_path.rglob("*_first.json")
    held = json.loads(path.read_text())
    passing = {"date", "command", "commit"}
    assert passing <= held["provenance"].keys() and not passing & held["machine_info"].keys()
    assert {row["params"]["variant"] for row in held["benchmarks"]} == {"eager", "ours eager"}
    for name, median in (("long", 1e9), ("short", 0.0)):
        for row in held["benchmarks"]:
            row["stats"]["median"] = median
        (tmp_path / name / path.parent.name).mkdir(parents=True)
        (tmp_path / name / path.parent.name / "0001_first.json").write_text(json.dumps(held))
    untimed = "variants.samples_of = None"
    wrong = "op_cases.with_backend = lambda backend, run: lambda **given: 2 * run(**given)"
    runs = bench(
        tmp_path,
        ["", *compare, "--benchmark-storage=long"],
        ["", *compare, "--benchmark-storage=short"],
        ["", "--benchmark-min-time=1"],
        [untimed, "--benchmark-disable"],
        [wrong, "--benchmark-disable"],
    )
    (faster, *_), (slower, *_), (refused, *_), (disabled, *_), (failed, *_) = runs
    assert [code for _, code in runs] == [0, 1, 4, 0, 1]
    assert "ours eager (NOW)" in faster and "Median" in faster and "StdDev" not in faster
    assert "Performance has regressed" in slower and "Traceback" not in slower
    assert "--benchmark-min-time has no effect here" in refused
    assert "2 passed" in disabled and "Median" not in disabled
    assert "1 failed, 1 passed" in failed and "times the allowed error" in failed


def test_the_closing_line_is_the_median_of_pairs():
    """Oracle: ratios of the pairs by hand, 2, 3, 4 and 5; what failed or is wrong has no ratio."""
    rows = {"eager": dict(match=True), "torch.compile": dict(match=True), "ours compiled": dict(match=True)}
    samples = {"torch.compile": [20.0, 3.0, 8.0, 10.0], "ours compiled": [10.0, 1.0, 2.0, 2.0]}
    assert against_compile(VariantTimes(rows, samples)) == "3.50 (2.75 to 4.25), correct"
    wrong = rows | {"ours compiled": dict(match=False, worst="output", within=7.0)}
    assert against_compile(VariantTimes(wrong, {})) == "incorrect: output has 7.0 times the allowed error"
    assert against_compile(VariantTimes(rows | {"ours compiled": dict(error="E: x")}, {})) == "E: x"
    assert against_compile(VariantTimes(rows, {"ours compiled": [1.0]})) == "correct; torch.compile failed"
    assert against_compile(VariantTimes({"eager": dict(match=True)}, {})) is None
