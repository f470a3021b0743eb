"""Tests of `tune`: invented timings give the right choices, and incorrect results none. Kernels are interpreted.

The clock is a stand-in that returns a time for each variant; nothing is timed.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import prints
from interpreter import interpreting
from patience import HANG, run_in_threads
from torch import nn

import fastvit_triton
from fastvit_triton import create_model, freeze, optimize, unfreeze
from fastvit_triton.cli import main
from fastvit_triton.engine import branch
from fastvit_triton.kernels import choose, measured, onednn, settings
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.op import REGISTERED
from fastvit_triton.measure import kept, model_times, timing, tuning
from fastvit_triton.measure.model_parts import calls_of, calls_of_variants, parts_of
from fastvit_triton.measure.tune import WAYS, Tuned, tune
from fastvit_triton.measure.tuning import fastest

SMALL = dict(img_size=16, patch_size=8, depth=1, embed_dim=32, num_heads=2, num_classes=3)
SLOW, FAST = dict(BLOCK_M=128, BLOCK_F=64, BLOCK_K=32, GROUP=8, PARTS=2, WGMMA_WARPS=0), dict(BLOCK_M=64, BLOCK_F=64)
QUICK = dict(SLOW, **FAST, num_warps=4, num_stages=2)  # the fastest by the stand-in clock


class Invented:
    """A clock that returns `us` of a variant and runs nothing."""

    us = staticmethod(lambda variant: 10.0)

    def __init__(self, device, latency=False):
        self.pending = []

    def time(self, variant, step, copy):
        self.pending.append(variant)

    def samples(self):
        found = {}
        for variant in self.pending:
            found.setdefault(variant, []).append(self.us(variant))
        self.pending.clear()
        return found


@pytest.fixture
def invented(monkeypatch, tmp_path):
    """Installs invented timings, two candidates for one product and none for others, and a folder for this test."""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "Clock", Invented)
    monkeypatch.setattr(Invented, "us", staticmethod(lambda variant: 10.0))
    other = dict(QUICK, BLOCK_M=32)
    monkeypatch.setattr(
        tuning, "candidates_for", lambda row, arch: (QUICK, other) if row.startswith("linear.fwd") else ()
    )
    choose.forget()
    monkeypatch.setattr(model_times, "compiled", lambda model: model)  # a test of the command compiles
    with interpreting(), targeting("sm_90"), using_backend("auto"):
        yield Invented
    choose.forget()


def model_and_images(train=False, **options):
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", **SMALL | options).half().train(train)
    return model, torch.randn(2, 3, 16, 16).half()


def by_name(**us):
    """A clock that assigns times to variants by the beginning of their names."""
    return staticmethod(lambda variant: next((t for name, t in us.items() if variant.startswith(name)), 10.0))


def quick_is_fast(variant):
    return 5.0 if variant.startswith("{") and json.loads(variant) == QUICK else 10.0


@pytest.mark.full
@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_fastest_is_saved_and_used(invented, monkeypatch, train):
    """Oracle: the invented times; another process, which reads the file, chooses the fastest."""
    times = {"fused, our attention": 3.0}
    monkeypatch.setattr(Invented, "us", staticmethod(lambda v: times.get(v) or quick_is_fast(v)))
    model, images = model_and_images(train, depth=2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    stages = []
    found = tune(model, images, train, seconds=500, on_progress=lambda stage, done: stages.append(done))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training == train
    assert stages == sorted(stages) and 0 <= stages[0] < stages[-1] < 1
    products = [row for row in found.launches if row["row"].startswith("linear.fwd.half")]
    assert products and all(row["best"] == QUICK and (row["us"], row["us_before"]) == (5.0, 10.0) for row in products)
    block, stem = found.parts
    assert (block["name"], block["count"], block["way"]) == ("Block", 2, "fused, our attention")
    assert (stem["name"], stem["way"]) == ("stem", stem["rule"])  # equal times change nothing
    assert all(said["match"] for said in block["variants"].values())
    held = json.loads(found.path.read_text())
    assert held["rows"].keys() >= {products[0]["row"]} and held["facts"]["gpu"] == "cpu"
    with measured.using(measured.measured_in(held)):
        choices = []
        with settings.observing(choices.append), torch.set_grad_enabled(train):
            model(images)
    found_in = {(c.name, c.way, c.why.partition(":")[0]) for c in choices if c.branches}
    assert found_in == {("attention + mlp", "fused", "measured on this machine")}
    assert found.model.keys() == {"eager", "before", "after", "torch.compile"}


@pytest.mark.full
@pytest.mark.parametrize("way", ["plain", "mixed, SDPA, BLAS", "mixed, SDPA, our fc1"])
def test_any_way_can_be_chosen(invented, monkeypatch, way):
    """Oracle: the invented times."""
    monkeypatch.setattr(Invented, "us", by_name(**{way: 2.0, "fused": 5.0}))
    found = tune(*model_and_images(), seconds=500)
    assert found.parts[0]["way"] == way
    assert set(found.parts[0]["entries"]) > set(found.parts[0]["shapes"]) or way == "plain"


@pytest.mark.full
def test_launches_of_every_variant_are_tuned(invented):
    """Oracle: by hand: the fused MLP of 32 channels is one launch; in the mixed way, fc1 has 2 times 5 rows."""
    model, images = model_and_images()
    with settings.forcing("fused"), torch.no_grad():
        known = calls_of(lambda: model(images))
    parts = parts_of(model, (images,), {}, False, measured.NOTHING, WAYS["GPU"])
    found = [row for call in calls_of_variants(parts, measured.NOTHING, False, known) for row in call.rows]
    assert [row for row in found if row.startswith("linear")] == ["linear.fwd.half 10,128,32"]
    assert not {*found} & {row for call in known for row in call.rows}


@pytest.mark.full
def test_an_incorrect_candidate_has_no_time(invented, monkeypatch):
    """Oracle: a product whose result is wrong with one candidate, which would be the fastest."""
    monkeypatch.setattr(Invented, "us", staticmethod(quick_is_fast))
    run, fake = REGISTERED["linear_fwd"]

    def wrong(*arguments):
        y, *rest = run(*arguments)
        rows = {} if (overrides := fastvit_triton.kernels.launch._overrides) is None else overrides[0]
        return (y + 1 if QUICK in rows.values() else y, *rest)

    monkeypatch.setitem(REGISTERED, "linear_fwd", (wrong, fake))
    found = tune(*model_and_images(), seconds=500)
    products = [row for row in found.launches if row["op"] == "linear_fwd"]
    assert products
    for row in products:
        tried = {json.dumps(one["config"]): one for one in row["tried"]}
        assert not tried[json.dumps(QUICK)]["match"] and "us" not in tried[json.dumps(QUICK)]
        assert row["best"] == row["tried"][0]["config"] != QUICK


@pytest.mark.full
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.full)])
def test_launch_parameters_that_make_a_block_incorrect_are_not_kept(invented, monkeypatch, fails):
    """Oracle: blocks that are wrong or fail with the new rows, although each candidate is correct by itself."""
    monkeypatch.setattr(Invented, "us", staticmethod(quick_is_fast))
    add_branches = branch.add_branches_with_stats

    def wrong(*inputs, **named):
        result, stats = add_branches(*inputs, **named)
        rows = measured.of(torch.device("cpu")).rows
        fused = any(way == "fused" for way in measured.of(torch.device("cpu")).ways.values())
        if fused and QUICK in rows.values():
            if fails:
                raise RuntimeError("out of resource: shared memory")
            return result + 1, stats
        return result, stats

    monkeypatch.setattr(branch, "add_branches_with_stats", wrong)
    found = tune(*model_and_images(), seconds=500)
    assert all(row["best"] is None and "Block is incorrect" in row["rejected"] for row in found.launches)
    assert found.rows() == {}


@pytest.mark.full
def test_candidates_that_do_not_compile_or_spill_are_left_out(invented, monkeypatch):
    """Oracle: a compiler that fails, and kernels that report spills."""
    monkeypatch.setattr(Invented, "us", staticmethod(quick_is_fast))

    def compiled(self):
        future = tuning.Future()
        if self.configs and QUICK in self.configs.values():
            text = json.dumps(QUICK)
            future.set_exception(RuntimeError("out of resource: shared memory"))
            self.compiled[text] = [future]
        return launches(self)

    launches = tuning.Candidates.launches
    monkeypatch.setattr(tuning.Candidates, "launches", lambda self: compiled(self) and {})
    found = tune(*model_and_images(), seconds=500)
    row = next(row for row in found.launches if row["op"] == "linear_fwd")
    assert ["shared memory" in one.get("error", "") for one in row["tried"]] == [False, True, False]
    assert row["best"] == row["tried"][0]["config"]

    class Kernel:
        n_spills = 3

        def _init_handles(self):
            pass

    with pytest.raises(RuntimeError, match="spills 3 registers"):
        tuning.refuse_spills(Kernel())


@pytest.mark.fast
def test_fastest():
    """Oracle: by hand: differences within the quartiles are noise; no choice without a time of the variant in use."""
    near, far, used = dict(us=9, q1=8, q3=10.5), dict(us=7, q1=6, q3=8), dict(us=10, q1=10, q3=11)
    assert fastest(dict(a=near, b=used), "b") == "b"
    assert fastest(dict(a=far, b=used), "b") == "a"
    assert fastest(dict(a=far, b=dict(match=True)), "b") is None
    assert fastest(dict(a=far, b=dict(match=False)), "b") == fastest(dict(a=far), "b") == "a"
    assert fastest({}, "b") is None


@pytest.mark.full
@pytest.mark.parametrize("train", [False, True])
def test_the_way_in_use_stays_if_all_are_as_fast(invented, train):
    """Oracle: a table that says mixed; all times are equal."""
    model, images = model_and_images(train)
    ways = {shape: "mixed" for shape in tune(model, images, train, seconds=500).parts[0]["shapes"]}
    with measured.using(measured.Measured(ways=ways)):
        block = tune(model, images, train, seconds=500).parts[0]
    assert block["rule"] == block["way"] and block["rule"].startswith("mixed")


@pytest.mark.fast
def test_launches_that_share_a_name_use_the_most_frequent():
    """Oracle: by hand; launches are sorted by their counts."""
    one, other = (dict(row=f"a {n},8", best=dict(A=n), us=1.0, us_before=1.0) for n in (9, 10))
    found = Tuned("m", False, {}, launches=[one, other, dict(one, best=dict(A=3))])
    assert {name: entry["config"]["A"] for name, entry in found.rows().items()} == {
        "a ~16,8": 9,
        "a 9,8": 9,
        "a 10,8": 10,
    }


class Autocast(nn.Module):
    """A module that uses autocast, replaces a buffer, and is called with a keyword argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        with torch.autocast("cpu", torch.float16):
            return self.layer(src=x)


@pytest.mark.full
def test_a_model_with_autocast_inside(invented):
    """Oracle: the shape that its block looks up, of 16-bit values; buffers are restored."""
    model, x = Autocast().eval(), torch.randn(2, 5, 32)
    optimize(model)
    choices, count = [], model.count
    found = tune(model, x, seconds=500)
    assert model.count is count and model.count == 0
    with settings.observing(choices.append), torch.no_grad():
        model(x)
    asked = next(choice.shapes for choice in choices if choice.branches)
    assert [part["shapes"] for part in found.parts] == [asked] and "fp32" not in asked[0]


@pytest.mark.full
def test_models_that_optimize_knows(invented):
    """Oracle: one of our models, for a model of another package, converted or not; the given model is not changed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True, dropout=0.0)
    model, x = nn.Sequential(layer).half().eval(), torch.randn(2, 5, 32).half()
    found = tune(model, x, seconds=500)
    assert [part["name"] for part in found.parts] == ["TransformerEncoderLayer"]
    assert "forward" not in layer.__dict__
    optimize(model)
    again = tune(model, dict(input=x), seconds=500)
    assert [part["shapes"] for part in again.parts] == [part["shapes"] for part in found.parts]
    assert "after, CUDA graph" not in again.model
    assert len(json.loads(found.path.read_text())["runs"]) == 2


@pytest.mark.full
def test_optimize_may_tune(invented):
    """Oracle: the saved run, an inference."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True, dropout=0.0)
    model, x = nn.Sequential(layer).half().eval(), torch.randn(2, 5, 32).half()
    optimize(model, tune=x)
    assert [run["train"] for _, held in kept.files() for run in held["runs"]] == [False]


def test_bad_arguments():
    """Oracle: the error type and the sentence."""
    model, images = model_and_images()
    with pytest.raises(TypeError, match="model is list"):
        tune([], images)
    with pytest.raises(ValueError, match="seconds is 0"):
        tune(model, images, seconds=0)
    with pytest.raises(ValueError, match="none of our kernels on cpu, and no product by oneDNN"):
        tune(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="float64 always runs on PyTorch"):
        tune(model.double(), images.double())
    with using_backend("torch"), pytest.raises(ValueError, match="FASTVIT_TRITON_BACKEND is torch"):
        tune(model.float(), images.float())
    with pytest.raises(ValueError, match="neither the model nor the example has a tensor"):
        tune(nn.Identity(), ())
    with pytest.raises(TypeError, match="example is list"):
        tune(model, [images])
    with pytest.raises(TypeError, match="model is compiled"):
        tune(torch.compile(model, backend="eager"), images)
    optimize(model.double(), tune=images.double())  # neither our kernels nor oneDNN can run


@pytest.mark.full
def test_rank_0_measures_and_the_others_wait(invented, monkeypatch):
    """Oracle: what rank 0 broadcasts, returned or raised."""
    distributed, sent = torch.distributed, []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "broadcast_object_list", sent.extend)
    found = tune(*model_and_images(), seconds=500)
    assert sent == [found]
    with pytest.raises(ValueError, match="none of our kernels"):
        tune(nn.Linear(2, 2), torch.ones(1, 2), seconds=500)
    assert sent == [found, None]

    def receive(objects):
        objects[0] = sent.pop(0)

    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "broadcast_object_list", receive)
    held = found.path.read_text()
    found.path.unlink()  # as on another machine
    assert tune(nn.Linear(2, 2), torch.ones(1, 2)) is found
    assert json.loads(found.path.read_text())["rows"] == json.loads(held)["rows"]
    sent.insert(0, found)
    text = found.path.read_text()
    tune(nn.Linear(2, 2), torch.ones(1, 2))
    assert found.path.read_text() == text  # every result is there
    held = json.loads(text) | dict(ways={})
    found.path.write_text(json.dumps(held))  # the file exists, without this result
    sent.insert(0, found)
    tune(nn.Linear(2, 2), torch.ones(1, 2))
    assert json.loads(found.path.read_text())["ways"] == json.loads(text)["ways"]
    with pytest.raises(RuntimeError, match="tuning failed on rank 0"):
        tune(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.fixture
def on_a_cpu(monkeypatch, tmp_path):
    """Installs invented timings, and a folder for this test; nothing is interpreted."""
    if (why := onednn.why_not(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(why)
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "Clock", Invented)
    monkeypatch.setattr(Invented, "us", by_name(onednn=5.0))
    monkeypatch.setattr(model_times, "compiled", lambda model: model)
    choose.forget()
    yield Invented
    choose.forget()


def chosen(model, images, train=False):
    """The way of each block in a call, as a later process chooses it."""
    choose.forget()
    choices = []
    with settings.observing(choices.append), torch.set_grad_enabled(train):
        model(images)
    return [choice.way for choice in choices if choice.branches]


@pytest.mark.parametrize("train", [False, True])
def test_the_fastest_way_on_a_cpu_is_saved_and_used(on_a_cpu, train):
    """Oracle: the invented times, and the file; a call after it, without a row of the CPU, chooses oneDNN."""
    model, images = model_and_images(train, depth=2)
    model, images = model.float(), images.float()
    assert chosen(model, images, train) == []
    found = tune(model, images, train, seconds=500)
    (block,) = found.parts
    assert (block["name"], block["count"], block["rule"], block["way"]) == ("Block", 2, "plain", "onednn")
    assert block["variants"].keys() == {"plain", "onednn"} and all(v["match"] for v in block["variants"].values())
    assert block["variants"]["onednn"]["speedup"] == 2.0 and not found.launches and not found.attention
    assert found.model.keys() == {"eager", "before", "after", "torch.compile"}
    held = json.loads(found.path.read_text())
    assert held["facts"]["cpu"] == measured.cpu_name() and held["rows"] == {} and len(held["ways"]) == 2
    assert all(("training" in shape) == train for shape in held["ways"])
    assert chosen(model, images, train) == ["onednn"] * 2
    with onednn.using_row({"float32": {}}):
        assert chosen(model, images, not train) == ["plain"] * 2  # another phase
    assert all(p.grad is None for p in model.parameters())


def test_frozen_models_on_a_cpu(on_a_cpu, monkeypatch):
    """Oracle: the invented times: a frozen model takes what was measured in inference, until it is measured itself."""
    model, images = model_and_images()
    model, images = model.float(), images.float()
    tune(model, images, seconds=500)
    freeze(model)
    assert chosen(model, images) == ["onednn"]
    monkeypatch.setattr(Invented, "us", by_name(plain=5.0))
    (block,) = tune(model, images, seconds=500).parts
    assert (block["rule"], block["way"]) == ("onednn", "plain") and "frozen" in block["shapes"][0]
    assert chosen(model, images) == ["plain"]
    unfreeze(model)
    assert chosen(model, images) == ["onednn"]


def test_a_wrong_product_on_a_cpu_has_no_time(on_a_cpu, monkeypatch):
    """Oracle: a product whose result is wrong, which would be the fastest."""
    product = onednn.product
    monkeypatch.setattr(onednn, "product", lambda *given, **named: product(*given, **named) + 1)
    model, images = model_and_images()
    (block,) = tune(model.float(), images.float(), seconds=500).parts
    assert block["way"] == "plain" and not block["variants"]["onednn"]["match"]
    assert "us" not in block["variants"]["onednn"]


def test_ways_on_a_cpu_are_compared_by_round(on_a_cpu, monkeypatch):
    """Oracle: by hand: times that vary threefold, with a ratio of 1.25 in each round; equal ones keep plain."""
    for ratio, way in ((0.8, "onednn"), (1.0, "plain")):
        counts = dict(plain=0, onednn=0)

        def us(variant, ratio=ratio, counts=counts):
            counts[variant] = counts.get(variant, 0) + 1
            return (10.0 + 10 * (counts[variant] % 3)) * (ratio if variant == "onednn" else 1.0)

        monkeypatch.setattr(Invented, "us", staticmethod(us))
        model, images = model_and_images()
        assert tune(model.float(), images.float(), seconds=500).parts[0]["way"] == way
        kept.clear()


@pytest.mark.full
def test_measurements_of_a_cpu_do_not_reach_a_compiler(on_a_cpu, monkeypatch):
    """Oracle: one graph of PyTorch's operators, with the result of the plain model; the file is read after it."""
    model, images = model_and_images()
    model, images = model.float(), images.float()
    tune(model, images, seconds=500)
    choose.forget()
    with torch.no_grad():
        with using_backend("torch"):
            want = model(images)
        with monkeypatch.context() as patch:
            patch.setattr(onednn, "_call", lambda *given, **named: pytest.fail("called"))
            got = torch.compile(model, backend="eager", fullgraph=True)(images)
    torch.testing.assert_close(got, want)
    assert chosen(model, images) == ["onednn"]


@pytest.mark.parametrize("switch", ["auto", "onednn"])
def test_optimize_may_tune_on_a_cpu(on_a_cpu, switch):
    """Oracle: the saved run and way, also where the switch would force every product; the model before is unknown."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, norm_first=True, dropout=0.0)
    model, x = nn.Sequential(layer).eval(), torch.randn(2, 5, 32)
    with using_backend(switch):
        optimize(model, tune=x)
    ((_, held),) = kept.files()
    assert [run["train"] for run in held["runs"]] == [False]
    assert {entry["way"] for entry in held["ways"].values()} == {"onednn"}
    assert chosen(model, x) == ["onednn"]


@pytest.mark.parametrize("words", [(), ("--freeze",), ("--train",)])
def test_the_command_on_a_cpu(on_a_cpu, words, capsys):
    """Oracle: the output: the CPU, its batch and dtype, both ways, no launches; --show lists the ways."""
    command = ["tune", "--model", "vit_digits_patch2_8", "--device", "cpu", *words]
    out = prints(capsys, *command)
    phase = {(): "inference", ("--freeze",): "inference, frozen", ("--train",): "training"}[words]
    assert out.startswith(f"vit_digits_patch2_8, {phase}, float32, batch 1, on {measured.cpu_name()}\n")
    assert "launches" not in out and "2.00" in out and "Saved in" in out
    shown = prints(capsys, "tune", "--show", "--device", "cpu")
    assert f"cpu {measured.cpu_name()}" in shown and "onednn ~attention" in shown


FACTS = dict(gpu="card", units=1, driver=1, torch="2", cuda="1", cudnn=1, triton="3", sources="s")


@pytest.mark.full
def test_several_processes_add_to_one_file(monkeypatch, tmp_path):
    """Oracle: the union of all entries; readers always find a complete file."""
    code = f"""
import sys
from fastvit_triton.measure import kept
for i in range(20):
    kept.add({FACTS!r}, {{f"{{sys.argv[1]}}{{i}}": dict(config=dict(A=i))}}, {{}}, dict(model="m", train=False))
"""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    path = measured.path_of(FACTS)
    jobs = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "xy"]
    while any(job.poll() is None for job in jobs):
        if path.exists():
            measured.parse(path.read_text())
    assert [job.returncode for job in jobs] == [0, 0]
    held = measured.parse(path.read_text())
    assert len(held["rows"]) == len(held["runs"]) == 40


@pytest.mark.fast
def test_files_of_other_sources_are_replaced_and_writes_are_thread_safe(monkeypatch, tmp_path):
    """Oracle: the file after one write with other sources, four concurrent writes, and damage."""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path))
    run = dict(model="m", train=False)
    path = kept.add(FACTS | dict(sources="old"), dict(a=dict(config=dict(A=1))), {}, run)
    run_in_threads(*(partial(kept.add, FACTS, {}, {f"b{i}": dict(way="plain")}, run) for i in range(4)))
    held = measured.parse(path.read_text())
    assert held["rows"] == {} and len(held["ways"]) == 4 and held["facts"] == FACTS
    path.write_text("damaged")
    kept.add(FACTS, dict(a=dict(config=dict(A=1))), {}, run)
    assert measured.parse(path.read_text())["rows"] == dict(a=dict(config=dict(A=1)))


@pytest.mark.fast
def test_files_by_the_command(monkeypatch, tmp_path, capsys):
    """Oracle: the output of show, export, clear and import; each error is one sentence."""
    monkeypatch.setenv("FASTVIT_TRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "facts_of", lambda device: dict(FACTS))
    out = tmp_path / "out.json"

    def said(*words, code=0):
        assert main(["tune", *map(str, words), "--device", "cpu"]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    assert "nothing was measured on this machine" in said("--show")
    assert "run `fastvit-triton tune` first" in said("--export", out, code=2)
    path = kept.add(FACTS, {"a 1": dict(config=dict(A=1))}, {"b": dict(way="mixed")}, dict(model="m", train=True))
    (tmp_path / "cache" / "other.json").write_text("{")
    shown = said("--show")
    assert all(text in shown for text in (str(path), "gpu card", "m, training", "mixed  b", "a 1: A=1", "is damaged"))
    assert str(out) in said("--export", out)
    assert said("--clear").count("removed") == 2 and not path.exists()
    assert str(path) in said("--import", out) and path.read_text() == out.read_text()
    held = json.loads(out.read_text())
    for text, why in (("{", "not JSON"), (json.dumps(held | dict(facts=FACTS | dict(gpu="x"))), "gpu x, here card")):
        out.write_text(text)
        assert why in said("--import", out, code=2)
    assert "No such file" in said("--import", tmp_path / "none", code=1)
    assert "--batch is 0" in said("--batch", 0, code=2)
    assert "--seconds is -1" in said("--seconds", -1, code=2)


@pytest.mark.full(one_in=4)
def test_dry_run(tmp_path):
    """Oracle: every step runs in the interpreter, in a temporary folder; nothing is saved."""
    command = [
        str(Path(sys.executable).with_name("fastvit-triton")),
        "tune",
        "--dry-run",
        "--train",
        "--seconds",
        str(HANG),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "Every step was executed" in done.stdout and "NO" not in done.stdout
