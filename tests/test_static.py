"""Tests of launches compiled for GPUs that are not present. Oracle: the binaries."""

import dataclasses
import functools

import pytest
import torch
import triton
from interpreter import interpreting
from sampling import sampled
from triton.runtime.jit import JITFunction
from turns import TURN

from benchmarks import static
from benchmarks.artefacts import COMMAND as REGENERATE
from benchmarks.fingerprint import checks, key
from benchmarks.launch_cases import cases
from benchmarks.launch_recorder import Launch, compiled, record
from benchmarks.lint import violations
from benchmarks.sass import GPUS, Binary, read
from fastvit_triton import layer_norm
from fastvit_triton.expected.launched import work
from fastvit_triton.kernels import OPS
from fastvit_triton.kernels import launch as launcher

ARCHS = ("sm_80", "sm_90", "gfx942")
PRODUCTS = {
    "attention._fwd_kernel",
    "attention._bwd_kernel",
    "attention._bwd_dq_kernel",
    "attention._bwd_dkdv_kernel",
    "linear._fwd_kernel",
    "mlp._fwd_kernel",
    "patch_embed._fwd_kernel",
    "patch_embed._bwd_weight_kernel",
}


@functools.cache
def committed_now() -> dict | None:
    """The committed report by this release of Triton, if there is one."""
    made = map(static.load, static.RESULTS.rglob("static.json"))
    return next((report for report in made if report["triton"] == triton.__version__), None)


@pytest.fixture(scope="module", params=ARCHS)
def rows(request) -> list[dict]:
    """Rows of ViT-B in bfloat16 at batch 256, a longer attention and a narrow MLP, forward and backward.

    Only launches that are not in the committed report are compiled; on one architecture in turn all are.
    """
    audited = request.param == ARCHS[TURN % len(ARCHS)] or committed_now() is None
    return static.report([request.param], quick=True, known={} if audited else static.reusable(committed_now()))["rows"]


@functools.cache
def launches(arch: str) -> list[Launch]:
    """The same launches, not compiled."""
    built = (case.build() for case in cases(quick=True))
    phases = (record(arch, function, *arguments, **options) for function, arguments, options in built)
    return [launch for phase in phases for found in phase.values() for launch in found]


@pytest.mark.full
def test_launches_in_use_have_no_violations(rows):
    """Oracle: no spilled bytes, shared memory within the GPU's, at least one resident block, matrix instructions."""
    found = [f"{r['kernel']} ({r['op']} {r['phase']}): {v}" for r in rows for v in r["violations"]]
    assert not found, "\n".join(found)


@pytest.mark.full
def test_products_run_on_matrix_units(rows):
    """Oracle: kernels known to multiply use the GPU's own matrix instruction, and no other kernel does."""
    used = {r["kernel"]: set(r["mma"]) for r in rows}
    assert {kernel for kernel, names in used.items() if names} == PRODUCTS
    kind = {"sm_80": "HMMA", "sm_90": "HGMMA", "gfx942": "mfma"}[rows[0]["arch"]]
    assert all(name.startswith(kind) for names in used.values() for name in names)


@pytest.mark.full
def test_no_launch_is_worse_than_in_the_committed_report(rows):
    """Oracle: the committed rows of the same launches: no new spill, no lost matrix instruction, bounds within 5 %.

    Each Triton release has its own compilers, so only the report of this release counts; some cover one GPU only.
    """
    report = committed_now() or pytest.skip(f"there is no committed report by triton {triton.__version__}")

    def launches_of(rows):
        found = {}
        for row in rows:
            found.setdefault(tuple(row[name] for name in ("arch", "case", "op", "phase", "dtype")), []).append(row)
        return found

    committed = launches_of(report["rows"])
    for call, now in launches_of(row for row in rows if row["arch"] in report["parts"]).items():
        assert [row["kernel"] for row in now] == [row["kernel"] for row in committed[call]], call
        for new, old in zip(now, committed[call], strict=True):
            assert new["spill_bytes"] <= old["spill_bytes"] and new["mma"].keys() >= old["mma"].keys(), (call, new)
            assert new["predicted_us"] <= 1.05 * old["predicted_us"], (call, new["kernel"])


@pytest.mark.full
def test_compiling_again_gives_the_committed_figures(rows):
    """Oracle: the committed rows of the same keys."""
    report = committed_now() or pytest.skip(f"there is no committed report by triton {triton.__version__}")
    known, figures = static.reusable(report), {field.name for field in dataclasses.fields(Binary)} - {"once"}
    for row in rows:
        for name in (*figures, "violations", "predicted_us") if row["key"] in known else ():
            assert row[name] == known[row["key"]][name], (row["key"], row["kernel"], name)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_counted_flops_equal_those_of_the_tiles(arch):
    """Oracle: flops computed from tile sizes equal those of the matrix instructions, in the loop and outside."""
    counted = [launch for launch in launches(arch) if launch.name in ("attention._fwd_kernel", "linear._fwd_kernel")]
    assert counted
    for launch in counted:
        binary, todo = read(compiled(launch, arch)), work(launch)
        flops = binary.once.flops + todo.passes * binary.loop.flops
        assert flops == pytest.approx(todo.padded) or not binary.loop.flops, launch.config


@pytest.mark.full
def test_spills_are_reported():
    """Oracle: a kernel limited to 64 registers spills, and the report states it."""
    launch = next(launch for launch in launches("sm_80") if launch.name == "attention._fwd_kernel")
    starved = dataclasses.replace(launch, options=launch.options | {"maxnreg": 64})
    kernel = compiled(starved, "sm_80")
    binary = read(kernel)
    assert binary.registers <= 64 and binary.spill_bytes > 0
    assert any("spilled" in v for v in violations(starved, binary, "sm_80", kernel.asm))


@pytest.mark.fast
def test_floor_of_attention():
    """Oracle: ViT-B, batch 256, on an H200: 3072 heads read q, k, v and write o, 197 × 64 bfloat16, at 4.3 TB/s."""
    launch = next(launch for launch in launches("sm_90") if launch.name == "attention._fwd_kernel")
    expected = 3072 * 4 * 197 * 64 * 2 / 4.3e12 * 1e6
    assert static.floor(launch, "inference", static.GPUS["sm_90"]) == pytest.approx(expected, rel=1e-3)


def test_recording_restores_global_state():
    """Oracle: after recording and compiling, Triton, PyTorch and the interpreter work as before."""
    before = launcher.run, JITFunction.run, torch.Tensor.__matmul__, torch.Tensor.float
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    found = record("sm_90", layer_norm, x, weight, None, 1e-6)
    assert [launch.name for launch in found["backward"]] == ["layer_norm._bwd_kernel", "layer_norm._sum_kernel"]
    compiled(found["forward"][0], "sm_90")
    assert (launcher.run, JITFunction.run, torch.Tensor.__matmul__, torch.Tensor.float) == before
    with interpreting():
        torch.testing.assert_close(layer_norm(x, weight, None, 1e-6), torch.layer_norm(x, (8,), weight, None, 1e-6))


REPORTS = {".": list(GPUS), "triton-3.6.0": ["sm_90"], "triton-3.9.0": ["sm_90"]}
RECORDED = sampled([(arch, True) for arch in GPUS], 3)
RECORDED += [pytest.param(arch, False, marks=pytest.mark.full) for arch in GPUS]


def committed(folder: str) -> dict:
    """A committed report."""
    return static.load(static.RESULTS / folder / "static.json")


@pytest.mark.fast
@pytest.mark.parametrize("folder", REPORTS)
def test_committed_report_is_complete_and_clean(folder):
    """Oracle: every GPU and op is present; no launch spills or exceeds the GPU."""
    report = committed(folder)
    assert list(report["parts"]) == REPORTS[folder]
    assert not [row for row in report["rows"] if row["violations"]]
    covered = {row["op"] for row in report["rows"]}
    assert covered >= {op.name for op in OPS} - {"fold"}  # launched by `linear`


@pytest.mark.few(1)
@pytest.mark.parametrize("arch, quick", RECORDED)
def test_committed_reports_contain_the_current_launches(arch, quick):
    """Oracle: the keys of launches recorded now: of ViT-B, and with `-m full` all of them."""
    keys = {}
    for case in cases(quick):
        for phase, launch in static.recorded(case, arch):
            assert launch.tensors and launch.nbytes, case
            keys.setdefault(key(launch, arch), f"{launch.name} ({case.name} {case.op} {phase} {case.dtype})")
    for folder in (folder for folder, parts in REPORTS.items() if arch in parts):
        have = {row["key"] for row in committed(folder)["rows"] if row["arch"] == arch}
        missing = [name for found, name in keys.items() if found not in have]
        command = REGENERATE + " --thorough" * (not quick)
        assert not missing, f"{folder}: {len(missing)} launches changed; run `{command}`\n" + "\n".join(missing)
        assert quick or have == keys.keys(), f"{folder} has launches that no longer occur; run `{command}`"


@pytest.mark.full
def test_unchanged_rows_are_not_compiled(monkeypatch):
    """Oracle: the committed rows; with every key known nothing is compiled, and derived figures are recomputed."""
    monkeypatch.setattr(static, "compiled", None)
    rows = [row for row in committed(".")["rows"] if row["arch"] == "sm_90"]
    known = {row["key"]: row | dict(kernel="old", case="old", config="old", floor_us=-1) for row in rows}
    made = static.report(["sm_90"], quick=True, known=known)["rows"]
    assert made and all(row.pop("expected_us") >= row["predicted_us"] for row in made)
    for row in rows:
        row.pop("expected_us", None)
    assert all(row in rows for row in made)


@pytest.mark.fast
def test_reports_are_read_as_they_were_written(tmp_path):
    """Oracle: the report before, with a launch that does not compile; two rows of a key with other figures."""
    report = committed("triton-3.9.0")
    refused = {name: report["rows"][0][name] for name in (*static.CALL, "kernel", "config", "programs")}
    report["rows"].append(refused | dict(key="refused", violations=["does not compile"]))
    (tmp_path / "static.json").write_text(static.to_json(report))
    assert static.load(tmp_path / "static.json") == report
    report["rows"].append(report["rows"][0] | dict(registers=0))
    with pytest.raises(ValueError, match="has two rows with other figures"):
        static.to_json(report)


@pytest.mark.fast
def test_changed_reports_are_not_reused():
    """Oracle: rows are reused from reports with the same Triton, ptxas and checks of the GPU, and without violation."""
    made = {arch: checks(arch) for arch in ("sm_80", "sm_90")}
    rows = [dict(key=arch, arch=arch, violations=[]) for arch in made] + [dict(key="b", arch="sm_80", violations="b")]
    report = dict(triton=triton.__version__, ptxas=static.ptxas_versions(), checks=made, rows=rows)
    assert static.reusable(report).keys() == made.keys()
    assert static.reusable(report | dict(triton="3.0.0")) == {} == static.reusable(report | dict(ptxas={}))
    assert static.reusable(report | dict(checks=made | dict(sm_80="other"))).keys() == {"sm_90"}
    del report["checks"]
    assert static.reusable(report) == {}
