"""What measures must itself be right: turns, medians, verdicts, deadlines, files, tables. Oracle: hand-made arms."""

import json
import math
import signal
import statistics
import time
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F

from benchmarks import arms, compare, cpu, gpu, models, ops, plot, timing, tune
from benchmarks.arms import Arm, Case, measure
from benchmarks.match import verdict
from benchmarks.record import ROOT, Deadline, Late, Part
from fastvit_triton import create_model

CPU = torch.device("cpu")


@pytest.fixture
def part(tmp_path):
    """Makes parts that tell nobody."""
    return lambda seconds=60.0, **named: Part("x", tmp_path, Deadline(seconds), True, lambda line: None, **named)


@pytest.mark.filterwarnings("default")  # other libraries' own
def test_dry_run_executes_every_part(tmp_path):
    """Oracle: the files. Every part leaves one, whole, with its provenance, nothing missed and no error."""
    paths = gpu.main(["--out", str(tmp_path), "--dry-run", "--quiet", "--only", ",".join(gpu.PARTS)])
    assert len(paths) == len(gpu.PARTS) <= 8 and set(paths) == set(tmp_path.iterdir())
    for path in paths:
        held = json.loads(path.read_text())
        assert held["rows"] and not held["not_reached"] and held["dry_run"], path
        assert {"gpu", "commit", "date", "command", "packages"} <= held.keys()
        assert [row for row in held["rows"] if "error" in row or row.get("match") is False] == [], path
        assert all(row["match"] for row in held["rows"] if "speedup" in row)


def test_arms_take_turns_there_and_back():
    """Oracle: the order of calls, written down by the arms themselves; the untimed part comes before each."""
    called = []

    def step(name, copy):
        called.append(f"before {name}")
        return lambda: called.append(f"{name}{copy}")

    steps = {name: partial(step, name) for name in "ab"}
    samples, errors = timing.samples_of(steps, CPU, Deadline(60), seconds=0.0, rounds=(3, 3), copies=2)
    timed = called[12:]  # three warm-up calls of each arm
    assert timed[1::2] == ["a0", "b0", "b1", "a1", "a0", "b0"] and not errors
    assert timed[::2] == [f"before {c[0]}" for c in timed[1::2]]
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}


def test_median_and_quartiles():
    """Oracle: five numbers in order, read by eye, and a call of known length."""
    assert timing.Timing.of([5.0, 1.0, 4.0, 2.0, 3.0]) == timing.Timing(3.0, 2.0, 4.0, 5)
    assert timing.Timing.of([7.0]) == timing.Timing(7.0, 7.0, 7.0, 1)
    found, _ = timing.alternate({"nap": lambda i: lambda: time.sleep(0.002)}, CPU, Deadline(60), 0.0, (3, 3))
    assert found["nap"].us >= 2000


def layer():
    """A linear layer with arms that are right, wrong in the result or in a gradient, NaN, broken and absent."""

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
    found = [Arm(name, None, call) for name, call in calls.items()] + [Arm("absent", "not installed")]
    return Case("layer", torch.bfloat16, inputs, found, eager, facts=dict(op="layer"), work=(2.0 * 64 * 16 * 32, 1e4))


def test_wrong_arms_have_no_time():
    """Oracle: which arms were made wrong, and how."""
    forward, backward = (measure(layer(), phase, CPU, Deadline(60), 0.0) for phase in ("forward", "backward"))
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


def test_a_missing_output_is_no_match():
    """Oracle: the definition; an arm that gives less than was asked, or another shape, is wrong."""
    truth = {"output 0": torch.ones(2), "output 1": torch.ones(3)}
    assert not verdict({"output 0": torch.ones(2)}, truth, truth, torch.float32).match
    assert not verdict(truth | {"output 1": torch.ones(1)}, truth, truth, torch.float32).match
    assert verdict(truth, truth, truth, torch.float32).match


def test_saved_bytes_count_storages_once():
    """Oracle: x·y keeps x and y of 4 KiB each; views share a storage; what the caller holds is not counted."""
    x, y = torch.randn(1024, requires_grad=True), torch.randn(1024, requires_grad=True)
    assert timing.saved_bytes(lambda: x * y, []) == 8192
    assert timing.saved_bytes(lambda: x[:512] * x[512:], []) == 4096
    assert timing.saved_bytes(lambda: x * y, [x]) == 4096
    assert timing.saved_bytes(lambda: (x * y).exp(), [x, y]) == 4096


def test_deadlines(part):
    """Oracle: the clock. Before it rows are done; in the middle one is interrupted; after it the rest is named."""
    made, start = part(0.3), time.monotonic()
    with made.row("quick") as go:
        assert go
        made.add(dict(case="quick"))
    with made.row("slow"):
        time.sleep(30)
    with made.row("later") as go:
        assert not go
    assert time.monotonic() - start < 5
    made.write()
    held = json.loads(made.path.read_text())
    assert held["not_reached"] == ["slow (begun)", "later"] and held["rows"] == [{"case": "quick"}]


def test_deadlines_nest_and_leave_no_alarm():
    """Oracle: the process's own timer and handler; the sooner of two deadlines interrupts, and the outer goes on."""
    handler, outer = signal.getsignal(signal.SIGALRM), Deadline(20)
    with outer, outer:
        with pytest.raises(Late), outer.sooner(0.05):
            time.sleep(30)
        assert 15 < signal.getitimer(signal.ITIMER_REAL)[0] <= 20
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is handler


def test_an_arm_that_is_not_ready_in_time_leaves_time_to_the_others():
    """Oracle: an arm that sleeps past the deadline."""
    case = layer()
    case.arms.insert(2, Arm("slow", None, lambda x, weight: time.sleep(30)))
    found = measure(case, "forward", CPU, Deadline(1.0), 0.0)
    assert "us" in found.rows["eager"] and "us" in found.rows["in float32"]
    assert found.rows["slow"]["error"].startswith("Late")


def test_one_failing_row_stops_nothing_and_files_are_whole_after_each(part):
    """Oracle: the file after every row; a resumed part leaves out what it holds."""
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


def test_measured_rows_outlive_predictions(tmp_path):
    """Oracle: the table's file."""
    (tmp_path / "sm_90.json").write_text('{"a": {"config": {"X": 1}, "provenance": "measured"}}')
    assert tune.write("sm_90", {"a": {"X": 2}, "b": {"X": 3}}, "predicted", tmp_path) == ["b"]
    table = json.loads((tmp_path / "sm_90.json").read_text())
    assert table["a"] == {"config": {"X": 1}, "provenance": "measured"}
    assert table["b"] == {"config": {"X": 3}, "provenance": "predicted"}
    assert tune.write("sm_90", {"a": {"X": 4}}, "measured", tmp_path) == ["a"]
    assert json.loads((tmp_path / "sm_90.json").read_text())["a"]["config"] == {"X": 4}


def test_adopting_a_sweep(tmp_path):
    """Oracle: the table; the first shape decides, a dry run is refused, and the row says where it comes from."""
    rows = [dict(case=str(x), arch="sm_90", row="a", best={"X": x}) for x in (1, 2)]
    (tmp_path / "t.json").write_text(fake("tuning", [*rows, dict(case="3", arch="sm_90", row="b", best=None)]))
    assert tune.adopt(tmp_path / "t.json", tmp_path) == ["a"]
    want = {"a": dict(config={"X": 1}, provenance="measured", source="t.json")}
    assert json.loads((tmp_path / "sm_90.json").read_text()) == want
    (tmp_path / "dry.json").write_text(fake("tuning", rows, dry=True))
    with pytest.raises(ValueError, match="no tuning result of a GPU"):
        tune.adopt(tmp_path / "dry.json", tmp_path)


def test_trying_changes_the_launch_and_nothing_after():
    """Oracle: what `config` answers inside and outside."""
    device, row = torch.device("cpu"), "linear.fwd.half"
    before = tune.op.config(row, {"X": 1}, device)
    with tune.trying({row: {"X": 7}}) as asked:
        assert tune.op.config(row, {"X": 1}, device)["X"] == 7
    assert tune.op.config(row, {"X": 1}, device) == before and row in asked.seen


def test_the_lists_of_arms_are_true():
    """Oracle: the arms that the cases have."""
    for name in ops.NAMES:
        assert tuple(a.name for a in ops.case(name, ops.TINY, torch.float32, CPU).arms) == ops.arms_of(name)
    run = models.TINY[0]
    made = {arm.name for arm in models.case(run, torch.bfloat16, CPU).arms}
    assert made == set(models.arms_of(run))


def fake(part, rows, dry=False):
    """A result file as a GPU would leave it."""
    facts = dict(part=part, dry_run=dry, gpu="A GPU", date="2026-01-01", commit="abc", command="c", packages={})
    return json.dumps(facts | dict(rows=rows))


def row(arm, us, match=True, phase="forward"):
    """One measured arm."""
    work = dict(op="attention", model="ViT-B/16", flops=4e9, bytes=1e7, tflops=4e3 / us, tbs=0.1)
    return dict(case="m", phase=phase, arm=arm, us=us, match=match, **work)


def test_tables_come_from_files_alone(tmp_path):
    """Oracle: numbers put into files by hand; without files no number, with a dry run neither."""
    readme = "a\n<!-- measured: models -->\nold 1.23\n<!-- end -->\nb\n<!-- measured: ops -->\n<!-- end -->\n"
    empty = plot.fill(readme, plot.load(tmp_path))
    assert empty.count(plot.NOT_YET) == 2 and "1.23" not in empty and empty.startswith("a\n") and "\nb\n" in empty
    (tmp_path / "dry.json").write_text(fake("models", [row("eager", 1e3)], dry=True))
    assert plot.fill(readme, plot.load(tmp_path)) == empty
    assert not plot.bars(plot.load(tmp_path), tmp_path / "a.png")

    static = dict(case="ViT-B/16", op="mlp", phase="inference", dtype="bfloat16", arch="sm_90", predicted_us=9.5)
    report = dict(command="s", date="d", operations=[static | dict(floor_us=8.0)])
    (tmp_path / "static.json").write_text(json.dumps(report))
    predicted = plot.fill(readme, plot.load(tmp_path))
    assert "predicted bound" in predicted and "9.5" in predicted and plot.NOT_YET in predicted

    arms_of_m = [row("eager", 3e3), row("torch.compile", 2e3), row("ours eager", 4e3), row("timm AMP", 1.0, False)]
    (tmp_path / "m.json").write_text(fake("models", arms_of_m))
    (tmp_path / "o.json").write_text(fake("ops", arms_of_m))
    full = plot.fill(readme, plot.load(tmp_path))
    assert "| m | 3 | **2** | 4 |" in full and "| m | forward | 4000.0 | 0.75 | 0.50 |" in full
    assert "A GPU" in full and plot.NOT_YET not in full and plot.fill(full, plot.load(tmp_path)) == full


def test_the_cpu_table_comes_from_files(tmp_path):
    """Oracle: ratios put into files by hand; a newer file counts row by row, a wrong result has no number."""
    facts = dict(command=cpu.COMMAND, threads=2, batch=4, rounds=16, torch="2", timm="1")
    ratio = dict(model="m", step="forward", median=1.5, q1=1.25, q3=1.75, match=True)
    old, new = [ratio, ratio | dict(step="training_step")], [ratio | dict(against="torch.compile", median=2.5)]
    new += [ratio | dict(against="timm", match=False)]
    assert plot.NOT_YET in plot.cpu_table(plot.load(tmp_path))
    for date, rows in (("2026-01-02", new), ("2026-01-01", old)):
        (tmp_path / f"z{date[-1]}.json").write_text(json.dumps(facts | dict(date=date, rows=rows)))
    text = plot.cpu_table(plot.load(tmp_path))
    cells = f"| m | wrong result | 1.50 (1.25 to 1.75) | 2.50 (1.25 to 1.75) | {plot.NOT_YET} |"
    assert cells in text and "2026-01-01" in text and "2026-01-02" in text


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's own
def test_cpu_rows(monkeypatch):
    """Oracle: both steps of both comparisons, ordered quartiles, results that match, and who compiles which arm."""
    asked, compile_ = [], torch.compile

    def tiny(name):
        return timm.models.VisionTransformer(img_size=224, patch_size=112, embed_dim=24, depth=1, num_heads=2)

    def ours(name):
        return create_model("vit_tiny_patch16_224", patch_size=112, embed_dim=24, depth=1, num_heads=2)

    def compile_fast(model, backend="inductor"):
        asked.append(backend)
        return compile_(model, backend="aot_eager")

    monkeypatch.setattr(cpu.timm, "create_model", tiny)
    monkeypatch.setattr(cpu, "create_model", ours)
    monkeypatch.setattr(torch, "compile", compile_fast)
    rows = [row for against in cpu.AGAINST for row in cpu.measure("tiny", against, 3)]
    torch._dynamo.reset()
    steps = ("forward", "training_step")
    assert [(r["against"], r["step"]) for r in rows] == [(a, s) for a in cpu.AGAINST for s in steps]
    assert all(r["match"] and 0 < r["q1"] <= r["median"] <= r["q3"] for r in rows)
    assert asked == ["fastvit_triton", "inductor"]
    other, images = ours("tiny"), torch.randn(2, 3, 224, 224)
    assert not cpu.matches(other.eval(), tiny("tiny").eval(), images)  # other weights


def test_comparing_two_trees(tmp_path):
    """Oracle: ratios of hand-made times, medians over the rounds; rows without a match or a phase are no times."""
    sides = {"before": ([4.0, 4.0], [2.0, 6.0]), "after": ([4.0, 2.0], [1.0, 3.0])}
    found = {}
    for side, (eager, ours) in sides.items():
        (tmp_path / side).mkdir()
        for turn in range(2):
            rows = [row("eager", eager[turn]), row("ours eager", ours[turn]), row("wrong", 1.0, False), dict(case="x")]
            (tmp_path / side / f"{turn}.json").write_text(fake("ops", rows))
        compare.collect(tmp_path / side, found.setdefault(side, {}))
    assert compare.ratios(found["before"], found["after"]) == {("m", "forward", "ours eager"): (2.0, 4 / 3)}


def test_the_readme_is_up_to_date():
    """Oracle: the committed result files; `python -m benchmarks.plot` writes it anew."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- measured: models -->" in readme and "<!-- measured: ops -->" in readme
    assert plot.fill(readme, plot.load()) == readme


def test_pictures(tmp_path):
    """Oracle: a PNG appears when there is something to draw, for each picture."""
    (tmp_path / "m.json").write_text(fake("models", [row("eager", 3e3), row("ours eager", 2e3)]))
    (tmp_path / "o.json").write_text(fake("ops", [row("eager", 30.0), row("ours eager", 20.0)]))
    assert plot.bars(plot.load(tmp_path), tmp_path / "bars.png")
    assert not plot.roofline(plot.load(tmp_path), tmp_path / "roofline.png")  # no ceilings yet
    ceilings = [dict(case="copy", tbs=4.0), dict(case="bf16 matmul", tflops=700.0)]
    (tmp_path / "c.json").write_text(fake("ceilings", ceilings))
    assert plot.roofline(plot.load(tmp_path), tmp_path / "roofline.png")
    for name in ("bars", "roofline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_markers_and_parts_raise(tmp_path, capsys):
    """Oracle: the sentence names what was wrong."""
    with pytest.raises(ValueError, match="nonsense"):
        plot.fill("<!-- measured: nonsense -->", plot.load(tmp_path))
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "--dry-run", "--only", "nonsense"])
    assert "--only names nonsense" in capsys.readouterr().err


def test_the_switch_is_what_it_was():
    """Oracle: the package's own switch before and after, also after an error."""
    before = arms.op._chosen
    with pytest.raises(KeyError), arms.switched("torch"):
        assert arms.op.backend() == "torch"
        raise KeyError
    assert arms.op._chosen == before
