"""Ring 3: what the public functions launch, compiled for GPUs that are not here. Oracle: the binaries themselves."""

import ast
import dataclasses
import json

import pytest
import torch
import triton
from interpreter import interpreting
from triton.runtime.jit import JITFunction

from benchmarks import static
from benchmarks.cases import cases
from benchmarks.launches import Launch, compiled, record, work
from benchmarks.sass import PARTS, read
from fastvit_triton import layer_norm
from fastvit_triton.kernels import OPS

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


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """ViT-B in bfloat16 at batch 256, a longer attention and a narrow MLP, every launch forward and backward."""
    return static.report(ARCHS, quick=True)["rows"]


def launches(arch: str) -> list[Launch]:
    """The same launches, not yet compiled."""
    built = (case.build() for case in cases(quick=True))
    phases = (record(arch, function, *arguments, **options) for function, arguments, options in built)
    return [launch for phase in phases for found in phase.values() for launch in found]


@pytest.mark.parametrize("arch", ARCHS)
def test_launches_in_use_are_clean(rows, arch):
    """Zero spilled bytes, shared memory within the part, at least one resident block, matrix instructions."""
    found = [f"{r['kernel']} ({r['op']} {r['phase']}): {v}" for r in rows if r["arch"] == arch for v in r["violations"]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("arch", ARCHS)
def test_products_run_on_matrix_units(rows, arch):
    """The kernels known to multiply do so with the part's own instruction, and no other kernel does."""
    used = {r["kernel"]: set(r["mma"]) for r in rows if r["arch"] == arch}
    assert {kernel for kernel, names in used.items() if names} == PRODUCTS
    kind = {"sm_80": "HMMA", "sm_90": "HGMMA", "gfx942": "mfma"}[arch]
    assert all(name.startswith(kind) for names in used.values() for name in names)


def test_no_launch_is_worse_than_in_the_committed_report(rows):
    """Oracle: the committed rows of the same launches: no new spill, no lost matrix instruction, bounds within 5 %.

    Each triton brings its own compilers, so a report says nothing of another's launches; some cover one part alone.
    """
    made = [json.loads(path.read_text()) for path in static.RESULTS.rglob("static.json")]
    report = next((r for r in made if r["triton"] == triton.__version__), None)
    if report is None:
        have = " and ".join(r["triton"] for r in made)
        pytest.skip(f"the committed reports are by triton {have}, this is {triton.__version__}")

    def launches_of(rows):
        found = {}
        for row in rows:
            key = tuple(row[name] for name in ("arch", "case", "op", "phase", "dtype"))
            found.setdefault(key, []).append(row)
        return found

    committed = launches_of(report["rows"])
    for key, now in launches_of(row for row in rows if row["arch"] in report["parts"]).items():
        assert [row["kernel"] for row in now] == [row["kernel"] for row in committed[key]], key
        for new, old in zip(now, committed[key], strict=True):
            assert new["spill_bytes"] <= old["spill_bytes"] and new["mma"].keys() >= old["mma"].keys(), (key, new)
            assert new["predicted_us"] <= 1.05 * old["predicted_us"], (key, new["kernel"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_counted_flops_are_those_of_the_tiles(arch):
    """Flops of the matrix instructions, loop passes and the rest, equal those computed from tile sizes."""
    counted = [launch for launch in launches(arch) if launch.name in ("attention._fwd_kernel", "linear._fwd_kernel")]
    assert counted
    for launch in counted:
        binary, todo = read(compiled(launch, arch)), work(launch)
        flops = binary.once.flops + todo.passes * binary.loop.flops
        assert flops == pytest.approx(todo.padded) or not binary.loop.flops, launch.config


def test_spills_are_seen():
    """A kernel held to 64 registers spills, and the report says so."""
    launch = next(launch for launch in launches("sm_80") if launch.name == "attention._fwd_kernel")
    starved = dataclasses.replace(launch, options=launch.options | {"maxnreg": 64})
    kernel = compiled(starved, "sm_80")
    binary = read(kernel)
    assert binary.registers <= 64 and binary.spill_bytes > 0
    assert any("spilled" in v for v in static.violations(starved, binary, "sm_80", kernel.asm["ttir"]))


def test_floor_of_attention():
    """ViT-B, batch 256, on an H200: 3072 heads read q, k, v and write o, 197 × 64 bfloat16 each, at 4.3 TB/s."""
    launch = next(launch for launch in launches("sm_90") if launch.name == "attention._fwd_kernel")
    expected = 3072 * 4 * 197 * 64 * 2 / 4.3e12 * 1e6
    assert static.floor(launch, "inference", static.PARTS["sm_90"]) == pytest.approx(expected, rel=1e-3)


def test_every_case_launches():
    """Oracle: the functions' own checks, which the whole report would meet only after an hour of compiling."""
    for case in cases():
        function, arguments, options = case.build()
        for found in record("sm_90", function, *arguments, **options).values():
            assert all(launch.tensors and launch.nbytes for launch in found), case


def test_recording_leaves_nothing_behind():
    """After recording and compiling, Triton, PyTorch and the interpreter work as before."""
    before = JITFunction.run, torch.Tensor.__matmul__, torch.Tensor.float
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    found = record("sm_90", layer_norm, x, weight, None, 1e-6)
    assert [launch.name for launch in found["backward"]] == ["layer_norm._bwd_kernel"]
    compiled(found["forward"][0], "sm_90")
    assert (JITFunction.run, torch.Tensor.__matmul__, torch.Tensor.float) == before
    with interpreting():
        torch.testing.assert_close(layer_norm(x, weight, None, 1e-6), torch.layer_norm(x, (8,), weight, None, 1e-6))


@pytest.mark.parametrize("folder, parts", [(".", PARTS), ("triton-3.6.0", ["sm_90"])])
def test_committed_report_is_of_these_sources_and_clean(folder, parts):
    """Oracle: the hash of the kernels and their tables as they are now; every part, nothing spilled, all fits."""
    committed = json.loads((static.RESULTS / folder / "static.json").read_text())
    assert committed["sources"] == static.sources_hash(), f"the report is stale; run `{static.COMMAND}`"
    assert set(committed["parts"]) == set(parts)
    assert not [row for row in committed["rows"] if row["violations"]]
    covered = {row["op"] for row in committed["rows"]}
    assert covered >= {op.name for op in OPS} - {"fold"}  # which `linear` launches


def test_hash_reads_meaning_only():
    """Comments, docstrings and layout do not change the hash of a source; one number does."""
    said = [
        static._spelled(ast.parse(text))
        for text in (
            'def f(x):\n    """Old."""\n    return x + 1\n',
            "def f(x):  # new\n    return (x +\n        1)\n",
            "def f(x):\n    return x + 2\n",
        )
    ]
    assert said[0] == said[1] != said[2]
    row, choice = dict(config={"BLOCK_M": 64}, provenance="predicted"), dict(choice=dict(measured={"N=256": "ours"}))
    table = {"a": row, "b": choice}
    assert static._launched({"a": row | choice}) == static._launched(table) != static._launched({"a": choice})
