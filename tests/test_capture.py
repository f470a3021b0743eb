"""Tests of captured blocks (`optimize(model, example=…)`). Oracle, unless a test says otherwise: the model as written.

The models are those of research.py, in float64 with the references, so that only the order of sums may differ.
"""

import contextlib
import copy
import pickle
import threading
import warnings
from pathlib import Path

import mutants
import pytest
import research
import torch
from budget import telling
from catalogue import joined
from interpreter import interpreting
from research import D
from test_parallel import launch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastvit_triton import optimize, revert, warmup
from fastvit_triton.convert import captured
from fastvit_triton.engine.freeze import PROGRAMS
from fastvit_triton.engine.replay.calls import Recorded
from fastvit_triton.kernels import onednn
from fastvit_triton.kernels.backend import using_backend

MODELS = research.MODELS


def by_default(*chosen):
    """Parametrizes a test by the names of the models; only the chosen ones run by default."""
    marks = {name: () if name in chosen else pytest.mark.full for name in MODELS}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """Runs the references, and starts without graphs."""
    monkeypatch.setattr(captured, "_table", {})
    with using_backend("torch"):
        yield


def pair(name):
    """(original, converted model)."""
    original = MODELS[name].build()
    converted = copy.deepcopy(original)
    torch.manual_seed(1)
    optimize(converted, example=MODELS[name].inputs(2, MODELS[name].sizes[0]))
    return original, converted


def gradients(model, inputs):
    """Outputs and the gradients of all parameters and inputs, in one vector."""
    inputs = torch.utils._pytree.tree_map(lambda t: t.clone().requires_grad_(), inputs)
    y = joined(model(*inputs))
    cotangents = torch.linspace(-1, 1, len(y), dtype=y.dtype)
    leaves = [*model.parameters(), *torch.utils._pytree.tree_leaves(inputs)]
    grads = torch.autograd.grad(y, leaves, cotangents, allow_unused=True)
    return torch.cat([y.detach(), *(g.flatten() for g in grads if g is not None)])


@pytest.fixture
def runs(monkeypatch):
    """Counts the calls that run a graph, and those that run the forward of a class."""
    counts = dict(graph=0, capture=0)
    fitting = captured.Graphs.fitting
    capture = captured._capture

    def counted(self, *call):
        found = fitting(self, *call)
        counts["graph"] += found is not None
        return found

    def captures(*call):
        counts["capture"] += 1
        return capture(*call)

    monkeypatch.setattr(captured.Graphs, "fitting", counted)
    monkeypatch.setattr(captured, "_capture", captures)
    return counts


@by_default(*MODELS)
def test_blocks_are_captured_whole(name):
    """Oracle: by hand, the functions that each block calls; nothing that the patterns look for is left."""
    model = MODELS[name].build()
    inputs = MODELS[name].inputs(2, MODELS[name].sizes[0])
    if name != "detr":  # whose attention and MLP have readers
        assert {row.why for row in optimize(model).rows if row.path.count(".") == 1} == {
            "it needs an example: optimize(model, example=images)"
        }
    report = optimize(model, example=inputs)
    rows = [row for row in report.rows if row.within is None]
    assert [row.path for row in rows] == ["blocks.0", "blocks.1"]
    assert all(row.became.startswith("fused captured block (") and row.why is None for row in rows)
    assert report.headline().startswith("2 of 2 blocks are converted, 100 % of the FLOPs")
    for block in model.blocks:
        (capture,) = captured.captures_of(block)
        assert dict(capture.calls) == MODELS[name].calls and capture.left == ()


@by_default("rotary", "clip")
def test_outputs_and_gradients(name, runs):
    """In evaluation and training, for another size and batch than the example's."""
    original, converted = pair(name)
    for train in (False, True):
        torch.manual_seed(2)
        inputs = MODELS[name].inputs(3, MODELS[name].sizes[1])
        want = gradients(original.train(train), inputs)
        gradients(converted.train(train), inputs)  # captures it
        runs["graph"] = 0
        assert_close(gradients(converted, inputs), want)
        assert runs["graph"] >= 2
    revert(converted)
    assert not any("forward" in vars(m) for m in converted.modules())


@by_default("dino")
def test_few_graphs_serve_all_calls(name, runs):
    """Oracle: at most two graphs for each mode, and all calls run graphs at the end; the blocks share them."""
    original, converted = pair(name)
    calls = [
        (mode, train, MODELS[name].inputs(batch, size))
        for mode in MODES
        for train in (False, True)
        for batch in (1, 2, 5)
        for size in MODELS[name].sizes
    ]
    for again in (False, True):
        runs.update(graph=0, capture=0)
        for mode, train, inputs in calls:
            with MODES[mode]():
                y = converted.train(train)(*inputs)
                assert_close(joined(y), joined(original.train(train)(*inputs)))
        assert not again or (runs["capture"] == 0 and runs["graph"] >= 2 * len(calls))
    graphs = [g for table in captured._table.values() for g in table.values()]
    assert all(len(g.captures) <= 2 for g in graphs)
    assert captured.captures_of(converted.blocks[0]) == captured.captures_of(converted.blocks[1]) != []


@by_default("map")
def test_kernels(name):
    """Oracle: the original in float64, within twice PyTorch's own error in float32 plus one rounding."""
    original = MODELS[name].build()
    torch.manual_seed(3)
    inputs = MODELS[name].inputs(2, MODELS[name].sizes[0])
    single = torch.utils._pytree.tree_map(torch.Tensor.float, inputs)
    with torch.no_grad(), using_backend("auto"):
        want = joined(original(*inputs))
        plain = copy.deepcopy(original).float()
        own = joined(plain(*single)).double()
        optimize(plain, example=single)
        with interpreting():
            got = joined(plain(*single)).double()
    assert not torch.equal(got, own)  # the kernels ran
    allowed = 2 * (own - want).norm() + torch.finfo(torch.float32).eps * want.norm()
    assert (got - want).norm() <= allowed


@by_default()
def test_changes_are_never_ignored(name):
    """Oracle: as in test_mutants.py; every 11th change of the blocks and all that they hold."""
    wrong = [
        f"{when} {' '.join(change)}: {verdict.what}"
        for change, when, verdict in mutants.judged(mutants.models()[f"captured_{name}"], lambda i: i % 11 == 0)
        if not verdict.same
    ]
    assert wrong == []


def test_a_hook_inside_runs_the_block_as_written(runs):
    """And the graph runs again when the hook is gone; hooks of the block itself do not matter."""
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(2, 5)
    for model in (original, converted):
        model.blocks[1].register_forward_hook(lambda module, given, y: 2 * y)
    handles = [
        m.blocks[0].attn.qkv.register_forward_hook(lambda module, given, y: 2 * y) for m in (original, converted)
    ]
    runs["graph"] = 0
    with torch.no_grad():
        assert_close(converted(*inputs), original(*inputs))
        assert runs["graph"] == 1
        for handle in handles:
            handle.remove()
        runs["graph"] = 0
        assert_close(converted(*inputs), original(*inputs))
        assert runs["graph"] == 2


def test_copies_and_pickles(runs):
    """A copy shares the graphs; a pickle runs as written where there is no graph, until `warmup` captures it."""
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(2, 5)
    with torch.no_grad():
        for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            runs["graph"] = 0
            assert_close(copied(*inputs), original(*inputs))
            assert runs["graph"] == 2  # in this process
        captured._table.clear()
        captured._readings.clear()
        copied = pickle.loads(pickle.dumps(converted))
        runs.update(graph=0, capture=0)
        assert_close(copied(*inputs), original(*inputs))
        assert runs == dict(graph=0, capture=0)
        warmup(copied, inputs)
        runs["graph"] = 0
        assert_close(copied(*inputs), original(*inputs))
        assert runs["graph"] == 2


def test_weights_may_change_in_any_way():
    """Values, `.data`, replaced parameters, `functional_call`, and a dtype that has no graph yet."""
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(2, 5)
    state = {name: torch.randn_like(p) / 4 for name, p in original.named_parameters()}
    with torch.no_grad():
        assert_close(functional_call(converted, state, inputs), functional_call(original, state, inputs))
        for model in (original, converted):
            model.blocks[0].attn.qkv.weight.data.mul_(1.5)
            model.blocks[1].mlp.fc1.weight = nn.Parameter(state["blocks.1.mlp.fc1.weight"])
        assert_close(converted(*inputs), original(*inputs))
        for model in (original, converted):
            model.float()
        single = [t.float() for t in inputs]
        assert_close(converted(*single), original(*single))
        assert_close(converted(*single), original(*single))


def test_globals_that_a_forward_reads(monkeypatch):
    """The number of heads of this model is a global of its file; it changes after the capture."""
    original, converted = pair("unit")
    inputs = MODELS["unit"].inputs(2, 3)
    with torch.no_grad():
        before = converted(*inputs)
        monkeypatch.setattr(research, "H", 4)
        assert_close(converted(*inputs), original(*inputs))
        assert not torch.equal(converted(*inputs), before)


@pytest.mark.skipif(onednn.why_not(torch.device("cpu"), torch.float32) is not None, reason="PyTorch has no oneDNN here")
def test_a_replay_depends_on_globals(monkeypatch):
    """As above, where the graph's operators were recorded; within 64 roundings to float32 of the largest value."""
    original, converted = (model.float() for model in pair("unit"))
    inputs = [t.float() for t in MODELS["unit"].inputs(2, 3)]

    def check():
        for _ in range(4):
            got, want = converted(*inputs), original(*inputs)
            assert (got - want).abs().max() <= 64 * torch.finfo(torch.float32).eps * telling(want).abs().max()
        return got

    with using_backend("onednn"), torch.no_grad():
        captured.call(converted, tuple(inputs))
        before = check()
        programs = [m.__dict__[PROGRAMS] for m in converted.modules() if PROGRAMS in m.__dict__]
        assert any(type(one) is Recorded for each in programs for one in each.found.values())
        monkeypatch.setattr(research, "H", 4)
        assert not torch.equal(check(), before)


def test_transformations_of_pytorch():
    """`torch.func.grad`, checkpointing, autocast, `torch.compile`, `torch.jit.trace` and `torch.export`."""
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(2, 5)

    def loss(model):
        return lambda weights: functional_call(model, weights, inputs).square().sum()

    weights = dict(original.named_parameters())
    assert_close(torch.func.grad(loss(converted))(weights), torch.func.grad(loss(original))(weights))
    x = inputs[0].clone().requires_grad_()
    for _ in range(2):
        (got,) = torch.autograd.grad(checkpoint(converted, x, use_reentrant=False).sum(), x)
    assert_close(got, torch.autograd.grad(original(x).sum(), x)[0])
    with torch.no_grad():
        want = original(*inputs)
        assert_close(torch.compile(converted, backend="eager", fullgraph=True)(*inputs), want)
        with warnings.catch_warnings(action="ignore"):
            assert_close(torch.jit.trace(converted, inputs)(*inputs), want)
        assert_close(torch.export.export(converted, inputs).module()(*inputs), want)
        single = inputs[0].float()
        for model in (original, converted):
            model.float()
        with torch.autocast("cpu", torch.bfloat16):
            want, ours = original(single), [converted(single) for _ in range(2)][-1]
    assert ours.dtype == want.dtype
    assert (ours - want).norm() <= 8 * torch.finfo(torch.bfloat16).eps * want.norm()  # eight roundings in two blocks


def test_threads_share_graphs():
    """Oracle: the original, in four threads that call and capture at once."""
    original, converted = pair("dino")
    inputs = [MODELS["dino"].inputs(batch, 5) for batch in (1, 2, 3, 4)]
    wrong = []

    def work(x):
        for _ in range(5):
            y = converted(*x).detach()
            with contextlib.suppress(AssertionError):
                assert_close(y, original(*x).detach())
                continue
            wrong.append(x)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Odd(research.DinoBlock):
    """A block that Dynamo cannot capture as one graph, or only as other code than it runs."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.calls = 0

    def forward(self, x):
        if self.what == "break":
            torch._dynamo.graph_break()
        elif self.what == "effect":
            self.calls = self.calls + 1
        elif self.what == "value" and float(x.sum()) > 1e9:
            return x
        elif self.what == "number":
            return super().forward(x), x.shape[0]
        return super().forward(x)


REASONS = {
    "break": "Unsupported: Call to `torch._dynamo.graph_break()`",
    "effect": "its forward changes an attribute or a global",
    "value": "UserError: Consider annotating your code",
    "number": "it returns a int",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_cannot_be_captured_runs_as_written(what):
    """And the report says why; what the block holds is captured instead."""
    model = research.Stack(lambda: Odd(what), what == "number").double()
    original = copy.deepcopy(model)
    report = optimize(model, example=MODELS["dino"].inputs(2, 5)[0])
    rows = {row.path: row for row in report.rows}
    assert rows["blocks.0"].became is None
    assert rows["blocks.0"].why.startswith(f"it cannot be captured: {REASONS[what]}")
    assert rows["blocks.0.attn"].became == "fused captured module (linear ×2, attention_qkv)"
    (x,) = MODELS["dino"].inputs(3, 7)
    with torch.no_grad():
        assert_close(joined(model(x)), joined(original(x)))


def test_bad_arguments():
    """Each error is one sentence that names the argument, and leaves the model as it was."""
    model = MODELS["dino"].build()
    with pytest.raises(TypeError, match="example is True; give an example input of the model, or None"):
        optimize(model, example=True)
    with pytest.raises(ValueError, match="axis D of weight must be 17"):  # by a norm that has a fused forward
        optimize(model, example=torch.randn(2, 5, D + 1, dtype=torch.float64))
    assert not any("forward" in vars(m) for m in model.modules())
    report = optimize(model, filter_fn=lambda module, path: path != "blocks.1", example=MODELS["dino"].inputs(2, 5))
    assert [row.why for row in report.rows if row.path == "blocks.1"] == ["excluded by filter_fn"]


def test_verify_runs_graphs(runs):
    """Oracle: `verify` undoes a conversion that is wrong; here, of a graph that was changed."""
    model = MODELS["dino"].build()
    inputs = MODELS["dino"].inputs(2, 5)
    report = optimize(model, example=inputs, verify=inputs)
    assert len(report.fused) == len(optimize(MODELS["dino"].build(), example=inputs).fused)
    assert runs["graph"] >= 2
    for table in captured._table.values():
        for graphs in table.values():
            graphs.captures[:] = [c._replace(run=lambda *call, run=c.run: 2 * run(*call)) for c in graphs.captures]
    report = optimize(model, example=inputs, verify=inputs)
    assert [row.why.partition(" by ")[0] for row in report.rows if row.path == "blocks.0"] == [
        "its outputs differ from the original's"
    ]
    captured._table.clear()


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # by Dynamo
@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_torch_compile_traces_the_rewritten_graph(copied):
    """Oracle: by hand, the operators of ours in the graph that Dynamo hands to a backend, also of a copy."""
    original, converted = pair("dino")
    original, converted = original.float(), converted.float()
    (x,) = (t.float() for t in MODELS["dino"].inputs(2, 5))
    found = []

    def backend(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad(), interpreting():
        optimize(converted, example=x)
        model = copy.deepcopy(converted) if copied else converted
        got = torch.compile(model, backend=backend, fullgraph=True)(x)
        want = original(x)
    assert sum("attention_fwd" in name for name in found) == 2
    assert_close(got, want, rtol=64 * torch.finfo(torch.float32).eps, atol=64 * torch.finfo(torch.float32).eps)


@pytest.mark.full
def test_ddp_and_fsdp2(tmp_path):
    """Oracle: the gradients of the original on the whole batch, in two processes."""
    launch(2, str(Path(__file__).with_name("capture_job.py")), str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
