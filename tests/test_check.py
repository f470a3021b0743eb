"""Tests of `fastvit-triton check`: late and failed stages are named, others still run, and one sentence concludes.

Clocks and stages are stand-ins, and the numbers of verdicts are invented; no test depends on how long anything takes.
"""

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from commands import prints, refused, start
from patience import HANG
from safetensors.torch import save_file
from test_community import SOURCE, parts
from torch import nn

from benchmarks import community
from benchmarks.no_device import no_device
from fastvit_triton import create_model
from fastvit_triton.cli import check as command
from fastvit_triton.cli import main
from fastvit_triton.cli.check import CheckRequest
from fastvit_triton.cli.model_by_name import build_model, public_name
from fastvit_triton.kernels import choose, onednn
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.measure import check, selftest, variants, workers
from fastvit_triton.measure.check import (
    BUDGETS,
    FROZEN,
    FROZEN_BF16,
    MEDIUM,
    ON_A_CPU,
    OURS,
    CheckedModel,
    CheckStage,
    _compared,
    _over,
    _ratios,
    _remove_chance,
    _ways,
    _why_missing,
    compare,
    contribution,
    run_stages,
    runtimes,
    runtimes_skipped,
    verdict,
)
from fastvit_triton.measure.libraries import ModelCall
from fastvit_triton.measure.timeout import Deadline, TimedOut
from fastvit_triton.measure.variants import compiling
from fastvit_triton.measure.workers import result_of
from fastvit_triton.models.weights.load import save_weights

CPU = torch.device("cpu")
DIGITS = ("--model", "vit_digits_patch2_8", "--batch", "2", "--device", "cpu")


@pytest.mark.fast
def test_stages_that_overrun_or_fail_are_named_and_the_others_run():
    """Oracle: a clock that the stages advance: each one's line, row and seconds, in order."""
    now, said, ends = [0.0], [], []

    def stage(name, takes, result):
        def run(budget):
            assert budget == BUDGETS[name]
            now[0] += takes
            if isinstance(result, BaseException):
                raise result
            return result

        return CheckStage(name, BUDGETS[name], run)

    stages = [
        stage("selftest", 41.2, TimedOut("at last")),
        stage("tune", 3.0, ValueError("two\nlines")),
        stage("compare", 60.0, dict(error="TimedOut: in its process")),
        stage("max-autotune", 7.0, dict(said="ours is fast", ratios={})),
    ]
    rows = run_stages(stages, said.append, lambda rows: ends.append(list(rows)), clock=lambda: now[0])
    assert said == [
        "selftest: started, at most 40 s",
        "selftest did not finish in 40 s",
        "tune: started, at most 80 s",
        "tune failed: ValueError: two",
        "compare: started, at most 60 s",
        "compare did not finish in 60 s",
        "max-autotune: started, at most 100 s",
        "max-autotune: ours is fast (7 of 100 s)",
    ]
    assert [row["seconds"] for row in rows.values()] == [41.2, 3.0, 60.0, 7.0]
    assert [row["budget"] for row in rows.values()] == list(BUDGETS.values()) == [40, 80, 60, 100]
    assert ends == [list(BUDGETS)[:count] for count in (1, 2, 3, 4)]
    late = "ours is 1.00 ×"
    assert late not in str(verdict(rows)) and verdict(rows).advice.startswith(
        "keep torch.compile: ours could not be measured ("
    )
    skipped = run_stages([stage("tune", 0.0, dict(skipped="there is no GPU"))], said.append)
    assert said[-1] == "tune: skipped, because there is no GPU" and skipped["tune"]["skipped"] == "there is no GPU"


def compared(ways=(), missing=(), **ratios):
    """Row of a comparison; ratios by "eager", "compile" and "autotune"."""
    names = dict(eager="eager (timm)", compile="torch.compile", autotune="torch.compile max-autotune")
    return dict(ways=list(ways), missing=dict(missing), ratios={names[name]: ratio for name, ratio in ratios.items()})


FAST, SLOW, EQUAL = [1.12, 1.08, 1.15], [0.97, 0.95, 0.99], [1.01, 0.98, 1.03]
LATE = {"torch.compile": "did not finish in 60 s"}
FINISH = "; to finish, it takes a smaller --model or --batch, or an idle machine"
VERDICTS = {
    "faster": (
        dict(compare=compared(["fused"], eager=FAST, compile=FAST), **{"max-autotune": compared(autotune=[2, 2, 2])}),
        "use fused: 1.12 × torch.compile (1.08 to 1.15)",
    ),
    "slower": (
        dict(compare=compared(["mixed"], eager=FAST, compile=SLOW)),
        "keep torch.compile: ours is 0.97 × (0.95 to 0.99)",
    ),
    "equal": (
        dict(compare=compared(["fused"], compile=EQUAL)),
        "keep torch.compile: ours is 1.01 × (0.98 to 1.03), no measurable difference",
    ),
    "slower than max-autotune": (
        dict(compare=compared(["fused"], compile=FAST), **{"max-autotune": compared(["fused"], autotune=SLOW)}),
        "keep torch.compile max-autotune: ours is 0.97 × (0.95 to 0.99)",
    ),
    "two ways": (
        dict(compare=compared(["fused", "mixed"], compile=FAST)),
        "use fused and mixed: 1.12 × torch.compile (1.08 to 1.15)",
    ),
    "plain": (dict(compare=compared(["plain"], compile=FAST)), "use ours: 1.12 × torch.compile (1.08 to 1.15)"),
    "late max-autotune": (
        dict(compare=compared(["fused"], compile=FAST), **{"max-autotune": dict(error="did not finish in 100 s")}),
        "use fused: 1.12 × torch.compile (1.08 to 1.15); max-autotune did not finish in 100 s" + FINISH,
    ),
    "late torch.compile": (
        dict(compare=compared(["fused"], LATE, eager=FAST)),
        "use fused: 1.12 × eager PyTorch (1.08 to 1.15); torch.compile did not finish in 60 s" + FINISH,
    ),
    "slower than eager": (
        dict(compare=compared(["fused"], LATE, eager=SLOW)),
        "keep eager PyTorch: ours is 0.97 × (0.95 to 0.99); torch.compile did not finish in 60 s" + FINISH,
    ),
    "late tune": (
        dict(tune=dict(error="did not finish in 80 s"), compare=compared(["fused"], compile=FAST)),
        "use fused: 1.12 × torch.compile (1.08 to 1.15); tune did not finish in 80 s" + FINISH,
    ),
    "a CPU": (
        dict(selftest=dict(skipped="no GPU"), tune=dict(skipped="no GPU"), compare=compared(compile=SLOW)),
        "keep torch.compile: ours is 0.97 × (0.95 to 0.99); the kernels do not run on this machine",
    ),
    "oneDNN on a CPU": (
        dict(selftest=dict(skipped="no GPU"), compare=compared(["onednn"], compile=FAST)),
        "use ours: 1.12 × torch.compile (1.08 to 1.15); "
        "the kernels do not run on this machine, linear layers run by oneDNN",
    ),
    "ours is wrong": (
        dict(compare=compared(missing={"optimized by us": "gives a wrong result: the error of x is too large"})),
        "keep torch.compile: ours could not be measured (it gives a wrong result: the error of x is too large)",
    ),
    "ours is wrong once": (
        {
            "compare": compared(missing={"ours eager": "gives a wrong result: the error of x is too large"}),
            "max-autotune": compared(["fused"], autotune=FAST),
        },
        "keep torch.compile: ours could not be measured (it gives a wrong result: the error of x is too large)",
    ),
    "ours is late once": (
        {
            "compare": compared(missing={"ours eager": "did not finish in 60 s"}),
            "max-autotune": compared(["fused"], autotune=FAST),
        },
        "use fused: 1.12 × torch.compile max-autotune (1.08 to 1.15)",
    ),
    "no comparison": (
        {name: dict(error=f"did not finish in {BUDGETS[name]:g} s") for name in ("compare", "max-autotune")},
        "no verdict: too little was timed (compare did not finish in 60 s; max-autotune did not finish in 100 s); "
        "try a smaller --model or --batch, or an idle machine",
    ),
    "both are late": (
        dict(compare=compared(missing={name: "did not finish in 60 s" for name in ("ours eager", "torch.compile")})),
        "no verdict: too little was timed (ours did not finish in 60 s; torch.compile did not finish in 60 s); "
        "try a smaller --model or --batch, or an idle machine",
    ),
    "ours is late": (
        dict(compare=compared(missing={"ours eager": "did not finish in 60 s"})),
        "keep torch.compile: ours could not be measured (it did not finish in 60 s)" + FINISH,
    ),
    "no comparison but max-autotune": (
        {"compare": dict(error="failed: CUDA error"), "max-autotune": compared(["fused"], autotune=FAST)},
        "use fused: 1.12 × torch.compile max-autotune (1.08 to 1.15); compare failed: CUDA error",
    ),
    "wrong kernels": (
        dict(selftest=dict(failed=["mlp", "linear"]), compare=compared(["fused"], compile=FAST)),
        "keep torch.compile: 2 checks of the kernels failed on this machine, the first is mlp",
    ),
    "nothing": ({}, "no verdict: too little was timed; try a smaller --model or --batch, or an idle machine"),
}  # fmt: skip
BUSY = dict(note="the machine was busy")


def beside(best, compile_speed=FAST, advice=FAST, **ratios):
    """Stages with ONNX Runtime and OpenVINO, by their speeds relative to the best of ours, and to eager PyTorch."""
    names = dict(onnx="ONNX Runtime", openvino="OpenVINO")
    ratios = {names[name]: ratio for name, ratio in ratios.items()}
    row = dict(arm="torch.compile", us=1.0, speedup_quartiles=compile_speed[1:])
    rates = dict(
        best=best, ratios=ratios, speeds={name: [2 * part for part in ratio] for name, ratio in ratios.items()}
    )
    return dict(compare=compared(["plain"], compile=advice) | dict(rows=[row]), runtimes=rates)


PLAIN = "use ours: 1.12 × torch.compile (1.08 to 1.15)"
VERDICTS |= {
    "OpenVINO is fastest": (
        beside(FROZEN, openvino=FAST, onnx=SLOW),
        "use OpenVINO: 2.24 × eager PyTorch (2.16 to 2.30), 1.12 × ours frozen (1.08 to 1.15); "
        f'fastvit_triton.export_model(model, "model.xml", "openvino") writes its file; in PyTorch, {PLAIN}',
    ),
    "ours is as fast as OpenVINO": (
        beside("ours eager", onnx=SLOW, openvino=EQUAL),
        f"{PLAIN}; ONNX Runtime is 0.97 × ours (0.95 to 0.99); OpenVINO is 1.01 × ours (0.98 to 1.03)",
    ),
    "torch.compile is as fast as ONNX Runtime": (
        beside("optimized by us", compile_speed=[2.1, 2.0, 2.2], advice=SLOW, onnx=FAST),
        "keep torch.compile: ours is 0.97 × (0.95 to 0.99); ONNX Runtime is 1.12 × ours (1.08 to 1.15)",
    ),
    "runtimes on a busy machine": (
        (stages := beside(FROZEN, onnx=SLOW)) | dict(runtimes=stages["runtimes"] | BUSY),
        f"{PLAIN}; ONNX Runtime is 0.97 × ours frozen (0.95 to 0.99); the machine was busy",
    ),
    "no runtime": (beside(None) | dict(runtimes=dict(skipped="neither is installed")), PLAIN),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case):
    """Oracle: sentences by hand."""
    stages, sentence = VERDICTS[case]
    assert str(verdict(stages)) == sentence


@pytest.mark.fast
def test_ratios_are_paired_by_round():
    """Oracle: by hand: three pairs of times, of which the second is of a slow round; two say nothing about a spread."""
    samples = dict(eager=[2.0, 40.0, 2.0], ours=[1.0, 10.0, 1.0], other=[1.0, 10.0, 2.0])
    assert _ratios(samples, "ours") == dict(eager=[2.0, 2.0, 3.0], other=[1.0, 1.0, 1.5])
    assert _ratios(dict(eager=[1.0] * 3), "ours") == {}
    assert _ratios({name: taken[:2] for name, taken in samples.items()}, "ours") == {}


@pytest.mark.fast
def test_reasons_for_missing_times():
    """Oracle: sentences by hand."""
    wrong = dict(match=False, within=3.25, worst="output 0")
    assert _why_missing(dict(us=1.0, rounds=3), 60) is None
    assert _why_missing(dict(us=1.0, rounds=1), 60) == "was timed in 1 round only, which says nothing"
    assert _why_missing(dict(error="TimedOut: x"), 60) == "did not finish in 60 s"
    assert _why_missing(dict(error="RuntimeError: x"), 60) == "failed: RuntimeError: x"
    assert _why_missing(dict(reason="ImportError: x"), 60) == "failed: ImportError: x"
    assert _why_missing(wrong, 60) == "gives a wrong result: the error of output 0 is 3.25 times the limit"
    assert _why_missing(wrong | dict(within=None), 60).endswith("the error of output 0 is not finite")


def tiny(dtype=torch.float32, train=False, **options):
    """A small model of ours."""
    from fastvit_triton import create_model
    from fastvit_triton.measure.model_cases import randomized

    torch.manual_seed(0)
    sizes = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=4)
    model = randomized(create_model("vit_tiny_patch16_224", **sizes | options), dtype).to(dtype).train(train)

    def inputs(seed):
        return dict(image=torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype))

    return CheckedModel("tiny", model, inputs, 2, dtype, CPU, True)


@pytest.mark.full
@pytest.mark.parametrize("train", [pytest.param(False, marks=pytest.mark.full), True])
def test_comparison_on_a_cpu(train):
    """Oracle: the verdicts of float64; the variants, their ratios, and dropout that is switched off."""
    with compiling("aot_eager"):
        found = compare(tiny(train=train, proj_drop_rate=0.5, drop_path_rate=0.5), None, Deadline(HANG), 0.01, 60)
    bfloat16 = [FROZEN_BF16] if onednn.why_not(CPU, torch.bfloat16) is None else []
    beside = [MEDIUM] if train else [FROZEN, *bfloat16, MEDIUM]
    assert [row["arm"] for row in found["rows"]] == ["eager", "ours eager", *beside, "torch.compile"]
    assert list(found["beside"]) == beside and all(name in found["said"] for name in beside if name == MEDIUM)
    assert all(row["match"] for row in found["rows"] if row["arm"] not in (FROZEN_BF16, MEDIUM))
    assert all(row["us"] > 0 and row["batch"] == 2 for row in found["rows"])
    assert found["ratios"].keys() == {"eager", "torch.compile"} and found["missing"] == {}
    assert found["ways"] == ["plain"] * (FROZEN_BF16 in beside)  # once a model is frozen so, blocks choose
    assert all(low <= median <= high for median, low, high in found["ratios"].values())
    assert {row["phase"] for row in found["rows"]} == {"training" if train else "forward"}


@pytest.mark.full
@pytest.mark.skipif(onednn.why_not(CPU, torch.float32) is not None, reason="PyTorch has no oneDNN here")
def test_comparison_by_onednn(monkeypatch):
    """Oracle: the way, the packed weights of the frozen variant, and a result of lower precision that is timed."""
    packs, pack = [], onednn.pack

    class Rounded(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.01 if torch.get_float32_matmul_precision() == "medium" else 1.0)

    monkeypatch.setattr(onednn, "pack", lambda *given: packs.append(1) or pack(*given))
    subject = tiny()
    subject.model.head = Rounded(32, 4).eval()
    with compiling("aot_eager"), onednn.using_row({"float32": dict.fromkeys(onednn.PHASES, 0.0)}):
        found = compare(subject, None, Deadline(HANG), 0.01, 60)
    frozen = 1 + (onednn.why_not(CPU, torch.bfloat16) is None)
    assert found["ways"] == ["onednn"] and len(packs) == 8 * frozen
    assert torch.get_float32_matmul_precision() == "highest"
    (row,) = (row for row in found["rows"] if row["arm"] == MEDIUM)
    assert not row["match"] and row["us"] > 0
    assert f"eager PyTorch ({found['beside'][MEDIUM][1]:.2f}" in found["said"]
    assert "with outputs off by 1 % of the largest" in found["said"] and "blocks run by oneDNN" in found["said"]


@pytest.mark.full
def test_comparison_without_a_device():
    """Oracle: launches that compute nothing: they are counted, and ours is wrong while torch.compile has a time."""
    launches = []
    with no_device(lambda *given: launches.append(given)), compiling("aot_eager"):
        found = compare(tiny(torch.float16), "max-autotune", Deadline(HANG), 0.01, 100)
    assert launches and found["ratios"] == {} and found["missing"].keys() == {"ours eager"}
    assert [row["arm"] for row in found["rows"] if "us" in row] == ["eager", "torch.compile max-autotune"]
    assert "ours could not be measured (it gives a wrong result: " in verdict({"compare": found}).advice


@pytest.mark.parametrize("named", [False, True])
def test_runtimes_are_compared_and_those_not_installed_are_named(monkeypatch, named):
    """Oracle: stand-ins: one that computes the exported model's outputs in float64, one a tenth too large, one that is
    not installed; the number of processors with their load, which says that the machine is busy or is not."""

    class Outputs(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, pixels):
            return dict(logits=self.model(pixels), other=pixels)

    def stored(model, path, to, preparation):
        assert to == "onnx" and preparation == {"input_size": (3, 32, 32)} and not path.exists()
        programs[path] = copy.deepcopy(model).double()

    programs, subject = {}, tiny(depth=1)
    if named:
        inputs = subject.inputs
        subject = replace(subject, model=Outputs(subject.model), ours=False, name="hf:x")
        subject = replace(subject, inputs=lambda seed: dict(pixels=inputs(seed)["image"]))
    loaders = {
        "right": ("torch", lambda path: lambda images: programs[path](images.double()).float(), "onnx"),
        "wrong": ("torch", lambda path: lambda images: 1.1 * programs[path](images.double()).float(), "onnx"),
        "absent": ("no_such_package", lambda path: None, "onnx"),
    }
    monkeypatch.setattr(check, "export_model", stored)
    monkeypatch.setattr(check, "RUNTIMES", loaders)
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 100 if named else 2)
    found = runtimes(subject, Deadline(HANG), 0.01, 60)
    ours = OURS[named]
    assert [row["arm"] for row in found["rows"]] == ["eager", ours, FROZEN, *loaders]
    assert found["ratios"].keys() == {"right"} and found["speeds"].keys() == {ours, FROZEN, "right"}
    assert found["best"] in (ours, FROZEN) and found["missing"].keys() == {"wrong", "absent"}
    assert found["missing"]["wrong"].startswith("gives a wrong result")
    assert found["missing"]["absent"] == "was not measured: no_such_package is not installed"
    assert ("note" in found) != named and ("load 9 on 2 processors" in found["said"]) != named


@pytest.mark.full
@pytest.mark.parametrize("package", ["onnxruntime", "openvino"])
def test_an_exported_program_is_timed(package):
    """Oracle: float64, within the error that another order of summation explains."""
    pytest.importorskip("onnxscript")
    pytest.importorskip(package)
    found = runtimes(tiny(depth=1), Deadline(HANG), 0.01, 60)
    name = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}[package]
    assert next(row for row in found["rows"] if row["arm"] == name)["match"] and found["ratios"][name][0] > 0


@pytest.mark.fast
def test_when_runtimes_are_skipped(monkeypatch):
    """Oracle: one clause each: training, another precision, and nothing installed."""
    assert "for inference" in runtimes_skipped(True, "float32") and "in float32" in runtimes_skipped(False, "bfloat16")
    monkeypatch.setattr(check, "RUNTIMES", {"x": ("no_such_package", None, "onnx")})
    assert "pip install 'fastvit_triton[export]' 'fastvit_triton[openvino]'" in runtimes_skipped(False, "float32")
    monkeypatch.setattr(check, "RUNTIMES", {"x": ("torch", None, "onnx")})
    assert runtimes_skipped(False, "float32") is None


@pytest.mark.parametrize("way", ["fused", "mixed", "plain"])
def test_the_ways_of_the_blocks_are_named(way):
    """Oracle: the way that the context asks for, where the kernels run; nothing where they do not."""
    subject = tiny(torch.float16)
    call = ModelCall(subject.model)
    with no_device(), using_backend("auto"), forcing(way):
        assert _ways(call, subject) == [way]
    assert _ways(call, subject) == []


@pytest.mark.full
def test_models_of_other_packages_are_converted():
    """Oracle: the variants' names, and a model that has an input of its own name."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True)

        def forward(self, pixels):
            return dict(features=self.layer(pixels))

    torch.manual_seed(0)
    given = CheckedModel(
        "timm:x", Named().eval(), lambda seed: dict(pixels=torch.randn(2, 5, 32)), 2, torch.float32, CPU, False
    )
    with compiling("aot_eager"):
        found = compare(given, "max-autotune", Deadline(HANG), 0.01, 100)
    names = ["eager (timm)", "optimized by us", "torch.compile max-autotune"]
    assert [row["arm"] for row in found["rows"]] == names and all(row["match"] for row in found["rows"])


@pytest.mark.fast
def test_only_dropout_is_switched_off():
    """Oracle: an attribute of the same name of another module is kept."""

    class Pool(nn.Module):
        p = 3.0

    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.2), Pool())
    model[2].p = 4.0
    _remove_chance(model)
    assert [module.p for module in model] == [0.0, 0.0, 4.0]


# Processes


@pytest.fixture
def over_when(monkeypatch):
    """Function that makes the time of every process end when a condition becomes true."""
    wait = subprocess.Popen.wait

    def install(condition):
        def until_true(self, timeout=None):
            if timeout is None:
                return wait(self)
            until(condition)
            raise subprocess.TimeoutExpired(self.args, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", until_true)

    return install


def until(condition):
    """Waits for a condition, which must become true."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.1)


def test_a_program_returns_its_result_or_says_why_not(tmp_path, over_when):
    """Oracle: programs that write, that fail, and that write and then hang."""

    def run(code, **variables):
        return result_of([sys.executable, "-c", f"import json, os, sys, time\n{code}"], 600.0, variables)

    write = "open(sys.argv[-1], 'w').write(json.dumps(dict(a=os.environ['WORD'])))\n"
    assert run(write, WORD="x") == dict(a="x")
    with pytest.raises(ChildProcessError, match="its process ended with code 3: the last line"):
        run("print('first'); print('the last line', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ChildProcessError, match=r"code -\d+: no output"):
        run("os.kill(os.getpid(), 9)")
    over_when((tmp_path / "written").exists)
    assert run(f"{write}os.mkdir({str(tmp_path / 'written')!r}); time.sleep(3600)", WORD="y") == dict(a="y")


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path, over_when):
    """Oracle: the processes, whose numbers they write: they end. The time is over when both have started."""
    paths = [tmp_path / "parent", tmp_path / "child"]
    child = f"import os, time; open({str(paths[1])!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(3600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    code += child.replace(str(paths[1]), str(paths[0]))
    over_when(lambda: all(path.exists() and path.read_text().endswith(" ") for path in paths))
    with pytest.raises(TimedOut, match="did not finish in 60 s"):
        result_of([sys.executable, "-c", code], 60.0)
    until(lambda: not any(is_running(int(path.read_text())) for path in paths))


def is_running(process):
    """True unless a process has ended; one that waits for its parent has."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# The command


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Runs the stages of the command in this process, with a compiler that needs none installed, in an empty folder."""

    def in_process(request, variables, stage, seconds):
        asked = request._replace(stage=stage, budget=seconds, end=time.time() + HANG)
        words = ["-c", json.dumps(asked._asdict()), str(tmp_path / "result.json")]
        with compiling("aot_eager"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            patch.setattr(command, "TIMED", dict(cpu=0.01))
            command.run_stage()
        return json.loads((tmp_path / "result.json").read_text())

    monkeypatch.setattr(command, "_in_process", in_process)
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path / "cache"))
    choose.forget()
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    monkeypatch.undo()
    choose.forget()


FOREIGN = "--model", "timm:test_vit", "--device", "cpu", "--train"


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # of timm
@pytest.mark.parametrize("words", [DIGITS, pytest.param(FOREIGN, marks=pytest.mark.full)])
def test_a_run_on_a_cpu(here, capsys, words, monkeypatch):
    """Oracle: every stage starts and ends; the file has ratios, no absolute time, and its machine and versions."""
    head, *lines, last = prints(capsys, "check", *words).splitlines()
    lines, notes = ([s for s in lines if s.startswith("note: ") == is_note] for is_note in (False, True))
    assert head.startswith(f"{words[1]}, {'training' if '--train' in words else 'inference'}, float32, batch ")
    assert [line.partition(":")[0] for line in lines[:-1]] == [name for name in BUDGETS | ON_A_CPU for _ in range(2)]
    assert "skipped, because the kernels do not run here (" in lines[1]
    assert "launch" not in lines[3] and "; saved; " in lines[3]
    assert "ours is" in lines[5] and "torch.compile max-autotune" in lines[7]
    held = json.loads((here / "fastvit-triton-check.json").read_text())
    assert held["check"]["verdict"].startswith(last) and any("the kernels do not run on this" in line for line in notes)
    assert "tune" not in held and all("us" not in row for row in held["check"]["stages"]["tune"]["model"].values())
    assert held["benchmark"]["packages"]["torch"] and held["benchmark"]["command"] and held["benchmark"]["gpu"] is None
    rows = held["benchmark"]["rows"] + held["check"]["stages"]["max-autotune"]["rows"]
    more = 0 if "--train" in words else 1 + (onednn.why_not(CPU, torch.bfloat16) is None)
    assert len(rows) == 7 + more and all(row["speedup"] > 0 and "us" not in row for row in rows)
    assert all(row["match"] for row in rows if row["arm"] not in (FROZEN_BF16, MEDIUM))
    assert "gpu is null" in community.problems(held | dict(selftest=parts()[1]))[0] and "selftest" not in held


@pytest.mark.fast
def test_frozen_models_are_advised_where_they_were_faster():
    """Oracle: by hand, from times by round: frozen above ours and torch.compile, in bfloat16 above frozen, too."""
    calls = ("optimize(model), then fastvit_triton.freeze(model): ", 'fastvit_triton.freeze(model, "bf16"): ')
    for frozen, rounded, compiled, within, said in (
        (8.0, 5.0, 10.0, 5.0, [True, True]),
        (9.5, 5.0, 10.0, 5.0, [False, True]),
        (8.0, 8.1, 10.0, 5.0, [True, False]),
        (8.0, 5.0, 7.0, 5.0, [False, True]),
        (8.0, 5.0, 10.0, None, [True, False]),
    ):
        times = {"optimized by us": 9.0, FROZEN: frozen, FROZEN_BF16: rounded, "torch.compile": compiled}
        samples = {name: [t, 2 * t, 1.5 * t] for name, t in times.items()}  # rounds of a machine whose load varies
        rows = [dict(arm=arm) for arm in ("eager (timm)", "optimized by us", "torch.compile", FROZEN)]
        rows.append(dict(arm=FROZEN_BF16, match=False, within=within, off=0.006))
        over = {name: _over(samples, name) for name in (FROZEN, FROZEN_BF16)}
        found = compared(["onednn"], compile=FAST) | dict(rows=rows, beside=dict.fromkeys(over, FAST), over=over)
        advice, notes = verdict(dict(compare=found))
        assert advice == "use ours: 1.12 × torch.compile (1.08 to 1.15), by fastvit_triton.optimize(model)"
        assert [any(call in note for note in notes) for call in calls] == said
        assert any(note.endswith("with outputs off by 0.6 % of the largest") for note in notes) == said[1]
        assert ("its result is not finite" in _compared(found)) == (within is None)


@pytest.mark.fast
def test_the_model_of_a_run_is_checked(tmp_path, monkeypatch):
    """Oracle: the options of the saved model, and an image size in their place; a file of a stranger is refused."""
    model = create_model("vit_digits_patch2_8", depth=1, num_classes=3)
    save_weights(model, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path.parent)
    for size, tokens in ((None, 17), ((12, 12), 37)):
        built = build_model(tmp_path.name, size).model
        assert (len(built.blocks), built.num_classes, built.pos_embed.shape[1]) == (1, 3, tokens)
    (tmp_path / "vit_digits_patch2_8").mkdir()  # a name of a model is no path
    monkeypatch.chdir(tmp_path)
    assert build_model("vit_digits_patch2_8").model.num_classes == 10
    assert public_name("vit_digits_patch2_8") == "vit_digits_patch2_8"
    assert public_name(str(tmp_path)) == "a checkpoint of vit_digits_patch2_8"
    (tmp_path / "other").mkdir()
    save_file(model.state_dict(), tmp_path / "other" / "model.safetensors")
    with pytest.raises(ValueError, match="other does not say which of our models it holds; give a name of a model"):
        build_model(str(tmp_path / "other"))


def results(**changes):
    """Stand-in results of the stages by name."""
    found = {name: dict(said=name, rows=[], ratios={}, missing={}, ways=[]) for name in BUDGETS}
    found["compare"]["ratios"] = {"torch.compile": FAST}
    return found | changes


@pytest.mark.fast
def test_the_file_is_complete_after_every_stage(here, monkeypatch, capsys):
    """Oracle: what each stage, and Ctrl-C in the last one, finds in the folder: one file that loads."""
    seen = []
    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: "no oneDNN")

    def stage(request, variables, name, seconds):
        seen.append([path.name for path in here.iterdir()])
        if seen[-1]:
            held = json.loads((here / "out.json").read_text())
            seen[-1] = list(held["check"]["stages"])
        if name == "max-autotune":
            raise KeyboardInterrupt
        return results()[name]

    monkeypatch.setattr(command, "_in_process", stage)
    assert main(["check", *DIGITS, "--out", "out.json"]) == 130
    names = list(BUDGETS)
    assert seen == [names[:2], names[:3]]
    assert [path.name for path in here.iterdir()] == ["out.json"]
    held = json.loads((here / "out.json").read_text())
    assert held["check"]["verdict"].startswith("use ours: 1.12 × torch.compile")
    (here / "out.json").write_text("before")
    monkeypatch.setattr(command, "_in_process", lambda *given: dict(said="x", bad={1, 2}))  # cannot be written as JSON
    with pytest.raises(TypeError, match="not JSON serializable"):
        main(["check", *DIGITS, "--out", "out.json"])
    held = json.loads((here / "out.json").read_text())
    assert list(held["check"]["stages"]) == names[:2] and [path.name for path in here.iterdir()] == ["out.json"]


@pytest.mark.fast
@pytest.mark.parametrize(
    "stages, code",
    [
        (results(), 0),
        (results(compare=dict(error="RuntimeError: x")), 1),
        (results(selftest=dict(said="bad", failed=["linear"])), 1),
    ],
    ids=["measured", "not_measured", "wrong_kernels"],
)
def test_exit_code(here, monkeypatch, capsys, stages, code):
    """Oracle: 1 if ours could not be measured or a check failed; a dry run ends without the verdict."""
    monkeypatch.setattr(command, "_in_process", lambda request, variables, name, seconds: stages[name])
    monkeypatch.setattr(command, "_selftest", lambda request, seconds: stages["selftest"])
    last = prints(capsys, "check", *DIGITS, "--dry-run", "--out", "out.json", code=code).splitlines()[-1]
    done = "Failed, or not reached in time: compare." if "error" in stages["compare"] else "Every step was executed."
    assert last == f"{done} Times in the interpreter are meaningless, so there is no verdict."
    assert json.loads((here / "out.json").read_text())["check"]["verdict"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_check_says_and_keeps_what_it_knows(here, monkeypatch, capsys, number):
    """Oracle: the stages that ended, and exit code 130; later stages do not start."""
    started = []

    def stage(request, variables, name, seconds):
        started.append(name)
        if name == "compare":
            signal.raise_signal(number)
        return results()[name]

    monkeypatch.setattr(command, "_in_process", stage)
    monkeypatch.setattr(command, "_selftest", lambda request, seconds: results()["selftest"])
    before, interrupts = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # a process in the background ignores Ctrl-C
        assert main(["check", *DIGITS, "--dry-run", "--out", "out.json"]) == 130
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert started == ["tune", "compare"] and signal.getsignal(signal.SIGTERM) is before
    *_, stopped, said, last = capsys.readouterr().out.splitlines()
    assert stopped == "compare was stopped" and said.startswith("out.json holds these results")
    assert last.startswith("Failed, or not reached in time: compare.")
    stages = json.loads((here / "out.json").read_text())["check"]["stages"]
    assert list(stages) == ["selftest", "tune", "compare"] and stages["compare"]["error"] == "was stopped"
    assert verdict(stages).advice == "no verdict: compare was stopped"


def test_a_dry_run_writes_no_file_unless_asked(here, monkeypatch):
    """Oracle: the folder; processes get the interpreter and a cache of their own."""
    asked = []

    def stage(request, variables, name, seconds):
        asked.append((request.dry, request.device, variables["TRITON_INTERPRET"]))
        assert os.path.isdir(variables["FASTVIT_TRITON_CACHE"])
        return results()[name]

    monkeypatch.setattr(command, "_in_process", stage)
    monkeypatch.setattr(command, "_selftest", lambda request, seconds: results()["selftest"])
    assert main(["check", "--dry-run"]) == 0
    assert asked == [(True, "cpu", "1")] * 3 and list(here.iterdir()) == []


class Instant:
    """A worker whose checks pass at once, or that ends."""

    def __init__(self, device):
        self.alive = len(selftest.planned(device)) > 1

    def ready(self):
        return True

    def answer(self, name):
        return dict(case=name, op="linear", match=name != "b")

    def kill(self): ...

    def end(self):
        return 0


@pytest.mark.fast
def test_checks_of_the_kernels(monkeypatch):
    """Oracle: the rows of a stand-in: numbers and names for the file; no finished check means that it is late."""
    monkeypatch.setattr(selftest, "planned", lambda device: dict.fromkeys("ab"))
    monkeypatch.setattr(workers, "Worker", Instant)
    monkeypatch.setattr(workers, "count", lambda device: 1)
    request = CheckRequest("", "x", None, 1, "float32", False, "cpu", False)
    wrong = dict(case="b", op="linear", match=False, within=3.0, worst="output 0")
    monkeypatch.setattr(Instant, "answer", lambda self, name: wrong if name == "b" else dict(case=name, op="linear"))
    found = command._selftest(request, 60.0)
    assert (found["passed"], found["failed"], found["not_reached"]) == (1, ["b"], [])
    assert found["said"].startswith("1 of 2 checks failed on the CPU")
    with pytest.raises(TimedOut):
        command._selftest(request, 0.0)


@pytest.mark.fast
def test_a_request_travels_as_json():
    """Oracle: the fields; a size becomes a tuple again where the model is built."""
    request = CheckRequest("compare", "vit_digits_patch2_8", (16, 8), 2, "float32", False, "cpu", False, 60.0, 1e9)
    again = CheckRequest(**json.loads(json.dumps(request._asdict())))
    assert again.built().shape == (1, 16, 8) and again.deadline().over


@pytest.mark.fast
def test_tuning_is_summarised():
    """Oracle: by hand: one of two launches has new parameters; a block without a time keeps its way; what was measured
    is saved, for later processes unless the run is dry."""
    used, new = dict(A=1), dict(A=2)
    launches = [dict(best=best, tried=[dict(config=used), dict(config=new)]) for best in (new, used)]
    launches.append(dict(best=None, tried=[dict(config=used)]))
    blocks = [
        dict(name="Block", count=12, rule="mixed", way="fused"),
        dict(name="Pool", count=2, rule="plain", way="plain"),
        dict(name="stem", count=1, rule="onednn", way=None),
    ]
    text = "12 × Block fused (before: mixed), 2 × Pool plain, as before, 1 × stem by oneDNN, as before, because it was "
    text += "not measured in time; new launch parameters for 1 of 3 launches; "
    tuned = SimpleNamespace(parts=blocks, launches=launches)
    clear = "if the machine was busy, `fastvit-triton tune --clear` removes it"
    assert command._tuned(tuned, False) == f"{text}saved; {clear}"
    assert command._tuned(tuned, True) == text + "used in this run only"
    nothing = SimpleNamespace(parts=blocks[2:], launches=launches[2:])
    for dry in (False, True):
        assert command._tuned(nothing, dry).endswith("0 of 1 launches; nothing was measured, so nothing saved")


@pytest.mark.fast
@pytest.mark.parametrize(
    "stages, whole",
    [
        (dict(tune=dict(parts=[dict(after="fused")]), compare=dict(missing={})), True),
        (dict(tune=dict(parts=[dict(after="fused"), dict(after=None)])), False),
        (dict(compare=dict(missing={"torch.compile": "did not finish in 60 s"})), False),
        (dict(selftest=dict(error="failed: x")), False),
    ],
)
def test_a_dry_run_says_whether_each_step_was_executed(stages: dict, whole: bool):
    """Oracle: by hand: a part without a way, a missing variant or a failed stage."""
    sentence = command._dry_conclusion(stages)
    assert sentence.startswith("Every step was executed." if whole else "Failed, or not reached in time: ")
    assert sentence.endswith("there is no verdict.")


@pytest.mark.fast
@pytest.mark.parametrize(
    "ways, said", [(["fused"], False), (["mixed", "fused"], False), (["mixed"], True), ([], False)]
)
def test_a_tuned_way_that_was_not_used_is_named(ways: list[str], said: bool):
    """Oracle: the ways in which the blocks ran when compared, with those that most blocks were given."""
    parts = [dict(name="Block", count=12, before="plain", after="fused"), dict(name="a", count=1, after="plain")]
    compared = dict(ratios={"torch.compile": [1.2, 1.1, 1.3]}, ways=ways)
    sentence = str(verdict(dict(tune=dict(parts=parts), compare=compared)))
    note = "tuning chose fused blocks, and the comparison ran mixed ones"
    assert (note in sentence) == said and ("tuning" in sentence) == said


BAD = [
    (("--model", "timm:nothing"), "timm has no model called 'nothing'"),
    (("--model", "timm:resnet18"), "has no Transformer blocks"),
    (("--model", "."), "there is no checkpoint in ."),
    (("--batch", "10000000000"), "lower it"),
    (("--img-size", "9"), "img_size height 9 is not a multiple of patch_size 2"),
    (("--out", "."), "--out . is a folder; give a file"),
    (("--device", "meta"), "--device meta has no float64 to compare with; use cpu or cuda"),
]


@pytest.mark.filterwarnings("default")  # of timm
@pytest.mark.parametrize("words, said", BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_refused_before_a_stage_starts(here, monkeypatch, capsys, words, said):
    """Oracle: exit code 2, one sentence, no line on stdout, and no file."""
    monkeypatch.setattr(command, "_in_process", lambda *given: pytest.fail("started"))
    assert main(["check", *DIGITS, *words]) == 2
    printed = capsys.readouterr()
    (sentence,) = printed.err.splitlines()
    assert said in sentence and printed.out == "" and list(here.iterdir()) == []


@pytest.mark.fast
@pytest.mark.parametrize("timm", [True, False])
def test_the_default_model_finishes_on_a_cpu(monkeypatch, timm):
    """Oracle: a quarter of the work of ViT-B; timm's model if timm is installed."""
    monkeypatch.setattr(variants, "absent", lambda name: None if timm else name)
    unset = dict.fromkeys(("model", "batch", "img_size", "dtype"))
    request = command._request(argparse.Namespace(device="cpu", train=False, **unset))
    assert request.model == "timm:" * timm + "vit_small_patch16_224" and request.batch == 1


def test_the_default_file_must_be_writable(monkeypatch, tmp_path, capsys):
    """Oracle: exit code 2 and one sentence; the default file's name is that of a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / command.OUT).mkdir()
    assert f"{command.OUT} is a folder; give a file" in refused(capsys, "check", *DIGITS)


# The file to contribute


def on_a_gpu():
    """Rows of the stages as on a GPU: the invented results of the three commands."""
    made, tests, _ = parts()
    tests = {name: tests[name] for name in ("passed", "failed", "not_reached")}
    compare_row = compared(["fused"], compile=FAST) | dict(rows=made["rows"], said="x")
    rows = dict(selftest=tests | dict(said="x"), tune=dict(path="p", said="x"), compare=compare_row)
    rows["max-autotune"] = compared(["fused"], autotune=FAST) | dict(rows=made["rows"][:2], said="x")
    return run_stages(
        [CheckStage(name, BUDGETS[name], lambda _, row=rows[name]: row) for name in BUDGETS], lambda line: None
    )


@pytest.mark.fast
def test_the_file_can_be_contributed():
    """Oracle: `benchmarks.community`, which finds nothing wrong with a file of a GPU, and what it says about others."""
    stages, settings = on_a_gpu(), dict(model="vit_invented", batch=4)
    held = contribution(stages, SOURCE, settings, str(verdict(stages)), parts()[2])
    assert community.problems(json.loads(json.dumps(held))) == []
    assert held["check"]["verdict"] == "use fused: 1.12 × torch.compile (1.08 to 1.15)"
    assert held["check"]["model"] == "vit_invented" and "rows" not in held["check"]["stages"]["compare"]
    assert held["check"]["stages"]["max-autotune"]["rows"][0]["us"] and "tune" in held
    assert "measure without --dry-run" in community.problems(contribution(stages, SOURCE, settings, "s", dry=True))[0]
    on_cpu = contribution(stages, SOURCE | dict(gpu=None), settings, "s")
    assert all("us" not in row for row in on_cpu["benchmark"]["rows"]) and "tune" not in on_cpu
    early = contribution(dict(selftest=stages["selftest"]), SOURCE, settings, "s")
    assert early["benchmark"]["rows"] == [] and early["selftest"]["passed"] == 7


# Everything, in processes


@pytest.mark.full(one_in=3)
def test_dry_run(tmp_path):
    """Oracle: every stage ends in Triton's interpreter, with kernels that match float64."""
    held = finished(tmp_path, "--dry-run")
    assert "error" not in held["check"]["stages"]["tune"] and held["selftest"]["failed"] == []
    assert held["check"]["stages"]["compare"]["ways"] and held["benchmark"]["dry_run"]
    assert all(row["match"] for row in held["benchmark"]["rows"])


@pytest.mark.full
def test_a_real_run_on_the_cpu(tmp_path):
    """Oracle: with torch.compile itself, ours is measured or the reason is given, and nothing is wrong."""
    held = finished(tmp_path, *DIGITS)
    assert all(
        row["match"] for row in held["benchmark"]["rows"] if "match" in row and row["arm"] not in (FROZEN_BF16, MEDIUM)
    )
    assert held["check"]["stages"]["compare"]["ratios"]["eager"][0] > 0


def finished(folder, *words):
    """The file of a run of the command in a process of its own, which must end with a verdict."""
    cache = {"FASTVIT_TRITON_CACHE": str(folder / "cache")}  # later tests must not read what it measures
    child = start("check", *words, "--out", "out.json", variables=cache, cwd=folder)
    printed, errors = child.communicate(timeout=HANG)
    assert child.returncode == 0 and not errors, printed + errors
    held = json.loads((folder / "out.json").read_text())
    assert held["check"]["verdict"].startswith(printed.splitlines()[-1])
    return held
