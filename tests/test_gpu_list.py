"""Tests of the list of measurements on a GPU: keys of rows, its order, its arms, caches. Oracle: artificial lines."""

import json
import shutil
import signal
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from patience import HANG
from torch.optim.optimizer import register_optimizer_step_pre_hook
from triton.runtime.jit import JITFunction

from benchmarks import caches, gpu, lines, op_cases, result_file, rows
from benchmarks.no_device import no_device
from benchmarks.result_file import ResultFile
from benchmarks.rows import Line, done, expected, key_of, ordered, reached, remaining, seconds_of, traced
from fastvit_triton.kernels import launch
from fastvit_triton.kernels.launch import overriding
from fastvit_triton.measure.timeout import Deadline
from fastvit_triton.measure.variants import Case, Variant, rows_of, step_of

CPU = torch.device("cpu")
FACTS = dict(gpu="A", torch="1", triton="2")


@pytest.fixture
def result(tmp_path):
    """A result file that prints no rows."""
    return ResultFile("rows", tmp_path, Deadline(HANG), True, lambda line: None, stamp=lambda row: FACTS)


def simple(*more: Variant) -> Case:
    """A product with some variants; no kernel of ours."""
    inputs = lambda seed: dict(x=torch.randn(8, 8), weight=torch.randn(8, 8))  # noqa: E731
    return Case("c", torch.float32, inputs, [Variant("eager", None, F.linear), *more], F.linear, ("forward",))


def line_of(*more: Variant, **changed) -> Line:
    """A line of that case with all variants."""
    arms = tuple(variant.name for variant in more)
    return replace(Line("blocks", "c", "forward", arms, build=lambda device, dry: simple(*more)), **changed)


@pytest.mark.fast
def test_a_row_is_found_by_its_key(tmp_path):
    """Oracle: the definition. Each part of the key tells rows apart; errors, reasons and rows without keys are none."""
    row = FACTS | dict(case="c", phase="forward", arm="ours", kernels="k", us=1.0, date="d", commit="e")
    assert key_of(row) in done([row], False)
    for name in rows.KEY:
        assert key_of(row | {name: "other"}) not in done([row], False)
    assert key_of(row | dict(us=2.0, date="other", commit="other")) in done([row], False)
    failed, absent = row | dict(error="E"), row | dict(reason=rows.NOT_BUILT)
    assert done([failed, absent], False) == set() and done([failed, absent], True) == {key_of(row)}
    old = {name: value for name, value in row.items() if name != "kernels"}
    assert key_of(old) is None and done([old], True) == set()
    facts = dict(dry_run=False, gpu="A", date="2026-01-01", commit="f", packages=dict(torch="1"), part="rows")
    (tmp_path / "a.json").write_text(json.dumps(facts | dict(rows=[dict(case="x"), row])))
    (tmp_path / "b.json").write_text(json.dumps(facts | dict(rows=[row | dict(kernels="dry")], dry_run=True)))
    of_file = dict(gpu="A", date="2026-01-01", commit="f", torch="1")
    assert rows.committed(tmp_path) == [of_file | dict(case="x"), row]


@pytest.mark.fast
def test_committed_rows_of_before_have_no_key():
    """Oracle: the committed files of 2026-11-26, which are read, with their GPU."""
    held = [row for row in rows.committed() if "kernels" not in row]
    assert len(held) > 800 and {row["gpu"] for row in held} == {"NVIDIA H200"} and not any(map(key_of, held))


@pytest.mark.fast
def test_fingerprints_are_those_of_the_launches():
    """Oracle: PyTorch's arms launch nothing; launch parameters and the phase change ours, the batch does not."""
    line = next(line for line in lines.attention_lines() if line.arms)
    small = replace(line, build=partial(lines.attention, 70, 64, 2))
    found = traced(small, "sm_90")
    assert (
        found["eager"].kernels == "" == found["SDPA cuDNN"].kernels and found["eager"].flops == 4 * 2 * 12 * 70**2 * 64
    )
    ours = found["ours"].kernels
    assert len({found[arm].kernels for arm in ("ours", *lines.STAGES)}) == len(lines.STAGES) + 1 - (
        ours in {found[arm].kernels for arm in lines.STAGES}
    )
    assert traced(replace(small, build=partial(lines.attention, 70, 64, 3)), "sm_90")["ours"].kernels == ours
    assert traced(replace(small, phase="backward"), "sm_90")["ours"].kernels != ours
    with overriding({"attention.fwd.128": dict(BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=4)}):
        assert traced(small, "sm_90")["ours"].kernels != ours


@pytest.mark.fast
def test_checks_are_found_by_the_kernels_of_their_op(monkeypatch):
    """Oracle: which ops can launch the changed kernel; a tuned row counts as a part of its op."""
    ops = ("attention", "layer_norm", "linear", "depthwise")
    before = {op: rows.every_kernel(op) for op in (*ops, None)}
    monkeypatch.setattr(rows, "code", lambda f: "new" if f.__name__ == "_bwd_dkdv_kernel" else "old")
    rows.every_kernel.cache_clear()
    old = {op: rows.every_kernel(op) for op in (*ops, None)}
    monkeypatch.setattr(rows, "code", lambda f: "old")
    rows.every_kernel.cache_clear()
    changed = {op for op in old if rows.every_kernel(op) != old[op]}
    rows.every_kernel.cache_clear()
    assert changed == {"attention", None} and len(set(before.values())) == len(before)


@pytest.mark.fast
def test_only_missing_arms_are_left(monkeypatch):
    """Oracle: by hand: arms with a row are left out; a line with all rows is None; another GPU has none."""
    line = line_of(Variant("a", None, F.linear), Variant("b", None, F.linear))
    key = lambda arm: key_of(FACTS | dict(case="c", phase="forward", arm=arm, kernels=""))  # noqa: E731
    assert remaining(line, {key("eager"), key("a")}, FACTS, "sm_90").arms == ("b",)
    assert remaining(line, {key("a"), key("b")}, FACTS, "sm_90").arms == ()  # the baseline is missing
    assert remaining(line, {key(arm) for arm in ("eager", "a", "b")}, FACTS, "sm_90") is None
    assert remaining(line, {key("a")}, FACTS | dict(gpu="B"), "sm_90").arms == ("a", "b")


@pytest.mark.fast
def test_the_most_valuable_second_comes_first():
    """Oracle: by hand: values per second in each section, the sections' order, and what exceeds a section's share."""
    make = lambda section, case, value, takes: Line(section, case, value=value, run=print, default={"": takes})  # noqa: E731
    found = [make("b", "1", 9, 1.0), make("a", "2", 1, 1.0), make("a", "3", 9, 3.0), make("a", "4", 1, 2.0)]
    order = ordered(found, {}, dict(a=4.0, b=1.0))
    assert [(line.case, takes) for line, takes in order] == [("3", 3.0), ("2", 1.0), ("1", 1.0), ("4", 2.0)]
    assert [start for *_, start in reached(order, 6.0)] == [0.0, 3.0, 4.0, None]
    assert [start for *_, start in reached(order[:1] + order[3:] + order[1:2], 4.5)] == [0.0, None, 3.0]


@pytest.mark.fast
def test_expected_seconds_are_those_of_earlier_rows():
    """Oracle: by hand: the newest row of an arm, of any kernels; else the line's default, else that of the name."""
    line = Line("blocks", "c", "forward", ("a", "torch.compile", "torch.compile max-autotune"))
    earlier = seconds_of([dict(case="c", phase="forward", arm="a", seconds=s) for s in (9.0, 2.0)] + [dict(case="x")])
    usual = rows.PLAIN + rows.COMPILED + rows.AUTOTUNED
    assert expected(line, {}) == pytest.approx(rows.PLAIN + usual)
    assert expected(line, earlier) == pytest.approx(2.0 + usual)
    given = replace(line, default={"": 1.0, "torch.compile": 5.0})
    assert expected(given, earlier) == pytest.approx(rows.PLAIN + 2.0 + 5.0 + 1.0)


def test_the_plan_is_printed_without_a_gpu(capsys, monkeypatch):
    """Oracle: the sections in their order, correctness first, and the line with the number of lines reached."""
    assert gpu.main(["--plan", "--seconds", "100"]) is None
    _, *body, last = capsys.readouterr().out.splitlines()
    shown = [line.split("[")[1].split("]")[0] for line in body]
    assert [*dict.fromkeys(shown)] == list(lines.SECTIONS) and len(body) == len(lines.lines())
    starts = [float(line.split()[0]) for line in body if not line.lstrip().startswith("-")]
    assert (
        starts == sorted(starts)
        and starts[-1] < 100
        and last == f"{len(starts)} of {len(body)} lines are reached in 100 s"
    )
    assert len({line.name for line in lines.lines()}) == len(body)


@pytest.mark.fast
def test_an_arm_is_kept_if_the_next_is_not_reached(result):
    """Oracle: the file: rows of the arms before the one that the alarm ends, each with its key, date and seconds."""

    def late(x, weight):
        if torch._C._len_torch_dispatch_stack():  # traced for its kernels
            return F.linear(x, weight)
        result.deadline.end = 0.0
        signal.raise_signal(signal.SIGALRM)

    line = line_of(Variant("first", None, F.linear), Variant("none", rows.NOT_BUILT), Variant("late", None, late))
    gpu.measure(replace(line, arms=(*line.arms, "never")), result, CPU, set(), "sm_90", HANG)  # built without "never"
    held = json.loads(result.path.read_text())
    assert [row.get("arm") for row in held["rows"]] == [None] and "KeyError" in held["rows"][0]["error"]
    gpu.measure(line, result, CPU, set(), "sm_90", HANG)
    held = json.loads(result.path.read_text())["rows"][1:]
    assert [row["arm"] for row in held] == ["eager", "none", "first", "late"]
    assert all(row.keys() >= {*rows.KEY, "seconds", "section"} for row in held)
    assert held[1]["reason"] == "not built" and held[2]["us"] > 0 and held[3]["error"].startswith("TimedOut")
    found = done(held, False)
    assert {key[3] for key in found} == {"eager", "first"}
    result.deadline.end = Deadline(HANG).end
    gpu.measure(replace(line, arms=line.arms[:1]), result, CPU, found, "sm_90", HANG)
    assert len(result.rows) == 5  # nothing is measured again


@pytest.mark.fast
def test_no_arm_fails_for_a_device_that_an_earlier_one_lost(result, monkeypatch):
    """Oracle: the rows: the arm at which the device was lost has an error, and those after it have no row."""
    monkeypatch.setattr(gpu, "device_answers", lambda: False)
    monkeypatch.setattr(result_file, "device_answers", lambda: False)
    line = line_of(Variant("a", None, F.linear), Variant("bad", None, None), Variant("b", None, F.linear))
    with pytest.raises(result_file.DeviceLost):
        gpu.measure(line, result, CPU, set(), "sm_90", HANG)
    assert [row["arm"] for row in result.rows] == ["eager", "a", "bad"] and "error" in result.rows[-1]


@pytest.mark.fast
def test_checks_with_a_row_are_not_repeated(result):
    """Oracle: the cases that a line with cases of its own is told to leave out: same kernels, no error."""
    asked = []

    def run(result, device):
        asked.append(set(result.done))
        result.add(dict(case="attention a", match=True), dict(case="linear b", error="E"), dict(case="c", match=False))

    line = Line("correctness", "correctness", run=run)
    gpu.measure(line, result, CPU, set(), "sm_90", HANG)
    assert (
        result.rows[0]["kernels"] == rows.every_kernel("attention") != result.rows[2]["kernels"] == rows.every_kernel()
    )
    assert result.rows[3]["rows"] == 3 and result.rows[3]["seconds"] >= 0
    gpu.measure(line, result, CPU, done(result.rows, False), "sm_90", HANG)
    gpu.measure(line, result, CPU, done([result.rows[0] | dict(kernels="old")], False), "sm_90", HANG)
    assert asked == [set(), {"attention a", "c"}, set()]


@pytest.mark.fast
def test_a_lost_device_restarts_the_script_after_the_row(tmp_path, monkeypatch):
    """Oracle: the second process's command (remaining time, kept rows), which skips the lost line; the watchdog."""
    ran = []

    def lost(result, device):
        ran.append("lost")
        raise RuntimeError("an illegal memory access was encountered")

    def other(result, device):
        ran.append("other")
        result.add(dict(case="x", match=True))

    found = [Line("ways", "bad", value=2.0, run=lost), Line("ways", "good", run=other)]
    asked = {}
    monkeypatch.setattr(gpu, "lines", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu.launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(gpu, "drift", lambda device, dry: dict(copy_tbs=1.0))
    monkeypatch.setattr(gpu.caches, "use", lambda: [])
    monkeypatch.setattr(result_file, "device_answers", lambda: "good" in ran)
    monkeypatch.setattr(gpu.faulthandler, "dump_traceback_later", lambda *a, **k: asked.update(watchdog=(a, k)))
    monkeypatch.setattr(gpu.os, "closerange", lambda *a: asked.update(closed=a))

    def again(program, words):
        asked.update(words=words)
        raise SystemExit

    monkeypatch.setattr(gpu.os, "execv", again)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "--quiet", "--seconds", "50", "--only", "ways"])
    assert asked["watchdog"] == ((70.0,), dict(exit=True)) and asked["closed"][0] == 3
    words = asked["words"]
    assert words[1:3] == ["-m", "benchmarks.gpu"] and "--resume" in words
    assert words[words.index("--only") + 1] == "ways" and 0 < float(words[words.index("--seconds") + 1]) <= 50
    gpu.main(words[3:])
    assert ran == ["lost", "other"]
    (held,) = tmp_path.glob("a-gpu-*-rows.json")
    (bad, good, total) = json.loads(held.read_text())["rows"]
    assert bad["error"] == "RuntimeError: an illegal memory access was encountered" and bad["case"] == "bad"
    assert good["drift"] == dict(copy_tbs=1.0) and good["gpu"] == "A GPU" and good["date"] and total["case"] == "good"


@pytest.mark.fast
def test_stages_reach_both_passes():
    """Oracle: the launch parameters that the kernels look up, forward and backward, and not after them."""
    ours = next(v for v in lines.attention(70, 64, 1, CPU, False).variants if v.name == "ours").call
    seen = {}
    with rows.tracing(), rows.targeting("sm_90"):
        staged = lines.InRows(ours, partial(lines.staged, 5))
        for _ in range(2):  # the first call looks up the rows
            seen.clear()
            with rows._seeing() as found:
                y = staged(torch.randn(1, 70, 3 * 768).bfloat16().requires_grad_())
                seen["forward"] = [launch.options for launch in found]
                found.clear()
                y.sum().backward()
                seen["backward"] = [launch.options for launch in found]
        with overriding({}) as after:
            ours(torch.randn(1, 70, 3 * 768).bfloat16())
    assert seen["forward"] and all(options["num_stages"] == 5 for options in seen["forward"])
    assert any(options.get("num_stages") == 5 for options in seen["backward"])
    assert all(row.get("num_stages") != 5 for row in after.values())


@pytest.mark.fast
def test_products_in_place_leave_the_residual():
    """Oracle: the arguments before; eager's result, also without `prepare`; e4m3 within its rounding of 1/16."""
    case = lines.product_case("proj", "ViT-B", 256, CPU, True)
    calls = {variant.name: variant.call for variant in case.variants if variant.reason is None}
    given = case.inputs(0)
    before = given["residual"].clone()
    want = calls["eager"](**given)
    calls["addmm_"].prepare(**given)
    for _ in range(2):
        assert torch.allclose(calls["addmm_"](**given).float(), want.float(), rtol=2**-6, atol=2**-6)
    assert torch.equal(given["residual"], before)
    for kind in lines.SCALED:
        scaled = calls[f"fp8 by {kind}"]
        values, scale = scaled.quantised(given["x"])
        wrong = (values.float() * scale - given["x"].float()).abs() / given["x"].float().abs().clamp(min=2**-4)
        assert wrong.max() < 2**-4 and scale.numel() == (32 if kind == "row" else 1)
        assert not torch.equal(scaled(**given), want)


@pytest.mark.fast
def test_a_step_includes_the_optimiser_and_keeps_the_weights():
    """Oracle: AdamW's own count of steps; the weights before; gradients are those of autograd, and gone after it."""
    module = torch.nn.Linear(4, 4)
    before = module.weight.detach().clone()
    learning = lambda call, arguments: dict(module.named_parameters())  # noqa: E731
    case = replace(simple(), learning=learning)
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(module.weight.grad.clone()))
    x = torch.randn(3, 4)
    step = step_of(case, lambda x: module(x), [dict(x=x)], "step")
    step(0)()
    step(0)()
    hook.remove()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and seen[0].abs().max() > 0
    assert torch.equal(module.weight, before) and module.weight.grad is None


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # warnings of timm
@pytest.mark.parametrize("training", [False, True])
def test_blocks_of_two_authors_have_the_same_weights(training):
    """Oracle: float64: each arm that runs here matches, eager, optimised, ours, compiled; peak bytes are a column."""
    setting = lines.Setting("ViT-B", 256, "training" if training else "forward", autocast=training)
    case = lines.model_case(setting, CPU, True)
    variants = [v for v in case.variants if "compile" not in v.name and v.name not in lines.BACKEND_ARMS]
    found = list(
        rows_of(replace(case, variants=variants), setting.phase, CPU, Deadline(HANG), 0.0, 1, sampler=gpu.invented)
    )
    assert {row["arm"] for row in found if row.get("match")} == {"eager", "optimize", "ours"}
    assert all("peak_bytes" in row for row in found if "match" in row)


def fill(folder: Path, sizes: dict[str, int]) -> None:
    """Files of random bytes, which do not compress, as Triton's and Inductor's caches have them."""
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(torch.randint(256, (size,), dtype=torch.uint8).tolist()))


@pytest.mark.fast
def test_caches_are_carried_in_small_archives(tmp_path, monkeypatch):
    """Oracle: the files after unpacking elsewhere; sizes on the disk; a kernel's files stay together or are out."""
    for variable in caches.FOLDERS:
        monkeypatch.setenv(variable, "")
    here, out, there = tmp_path / "here", tmp_path / "out", tmp_path / "there"
    sizes = {f"triton/{k}/kernel.{end}": 900 - 300 * (k == "A") for k in "ABCD" for end in ("cubin", "json")}
    sizes["triton/E/big.cubin"] = 5000
    fill(here, sizes | {"inductor/fxgraph/ab/cd": 700, "triton/A/tmp.pid_1/part": 10})
    group = {"child_paths": {"kernel.cubin": str(here / "triton" / "A" / "kernel.cubin")}}
    (here / "triton" / "A" / "__grp__kernel.json").write_text(json.dumps(group))
    out.mkdir()
    said = caches.archive(out, here, largest=5200, most=3, together=8000)
    packed = sorted(out.iterdir())
    assert [path.name for path in packed] == ["caches-0.zip", "caches-1.zip"]
    assert all(path.stat().st_size <= 5200 for path in packed) and sum(path.stat().st_size for path in packed) <= 8000
    names = [name for path in packed for name in zipfile.ZipFile(path).namelist()]
    kernels = {name.split("/")[1] for name in names if name.startswith("triton")}
    assert "inductor/fxgraph/ab/cd" in names and "triton/E/big.cubin" not in names and kernels == {*"ABC"}
    assert all(f"triton/{k}/kernel.{end}" in names for k in kernels for end in ("cubin", "json"))
    left = len(sizes) + 2 - len(names)  # and Inductor's file and the group
    assert said.startswith(f"{len(names)} compiled files") and said.endswith(f"; {left} do not fit")
    there.mkdir()
    for path in packed:
        path.rename(there / path.name)
    assert caches.use(there) == [there / path.name for path in packed]
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in names if "__grp__" not in name)
    moved = json.loads((there / "triton" / "A" / "__grp__kernel.json").read_text())["child_paths"]
    assert moved == {"kernel.cubin": str(there / "triton" / "A" / "kernel.cubin")}
    assert caches.os.environ["TRITON_CACHE_DIR"] == str(there / "triton")


def test_kernels_compiled_ahead_are_found(tmp_path, monkeypatch):
    """Oracle: Triton's cache: real calls as on a GPU add no entry to it, but one where an entry was removed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = op_cases.Shape("s", 3, 70, 64, 2, 16)
    build = lambda device, dry: op_cases.case("layer_norm", shape, torch.bfloat16, device)  # noqa: E731
    line = Line("ops", "c", "training", ("ours eager",), build=build)
    count = caches.compile_ahead([line], "sm_90", lambda text: None)
    entries = lambda: {path.parent.name for path in tmp_path.rglob("*.cubin")}  # noqa: E731
    before = entries()
    assert len(before) == count >= 2
    kernels = set()

    def run(kernel, grid, arguments, fixed):
        kernels.add(kernel)
        kernel.run(*arguments, grid=grid, warmup=True, **fixed)

    def call():
        case = build(CPU, False)
        ours = next(variant.call for variant in case.variants if variant.name == "ours eager")
        step_of(case, ours, [case.inputs(1)], "training")(0)()
        for kernel in kernels:
            kernel.device_caches.pop(-1)  # what this process has loaded
        return entries()

    monkeypatch.setattr(launch, "run", run)
    compile_really = JITFunction._do_compile
    with no_device(), monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", compile_really)
        assert call() == before and len(kernels) == count
        shutil.rmtree(tmp_path / (gone := min(before)))
        assert gone not in entries() and call() == before


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # warnings of other libraries
def test_a_process_runs_each_arm_once_before_it_is_timed():
    """Oracle: the names of the lines that were run; a line that fails ends none of the others."""
    found = [line for line in lines.lines() if line.section == "products"][:2]
    broken = replace(found[0], case="broken", build=partial(lines.product_case, "nonsense", "ViT-B", 1))
    said = []
    assert caches.prepare([*found, broken, Line("ways", "w", run=print)], CPU, True, Deadline(HANG), said.append) == 3
    assert said[-1] == "3 of 3 lines are compiled" and {f"compiled {line.name}" for line in found} < {*said}


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # warnings of other libraries
def test_dry_run_executes_every_line(tmp_path):
    """Oracle: the list: each line has the rows of its arms; all match float64 but fp8, whose precision is less."""
    path = gpu.main(["--out", str(tmp_path), "--dry-run", "--quiet"])
    held = json.loads(path.read_text())
    assert held["dry_run"] and not held["not_reached"] and {"gpu", "commit", "date", "packages"} <= held.keys()
    assert [row for row in held["rows"] if "error" in row] == []
    arms = {(row["case"], row["phase"], row["arm"]): row for row in held["rows"] if "arm" in row and "phase" in row}
    for line in lines.lines():
        assert all((line.case, line.phase, arm) in arms for arm in line.arms), line.name
    wrong = [(row["case"], row.get("arm")) for row in held["rows"] if row.get("match") is False]
    assert [pair for pair in wrong if not str(pair[1]).startswith("fp8")] == []
    assert {row["section"] for row in held["rows"]} == {*lines.SECTIONS}
    assert all(row.keys() >= {"drift", "date", "commit", "kernels"} for row in held["rows"])
    assert all(row["reason"] in ("not built", "needs a GPU") for row in arms.values() if "reason" in row)
