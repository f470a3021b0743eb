"""Tests of captured blocks (`optimize(model, example=…)`). Oracle, unless a test says otherwise: the model as written.

The models are those of research.py, in float64 with the references, so that only the order of sums may differ.
"""

import contextlib
import copy
import itertools
import pickle
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path

import mutants
import pytest
import research
import torch
from agreement import seeded
from budget import telling
from catalogue import joined
from einops import rearrange
from interpreter import interpreting
from patience import run_in_threads
from research import D
from test_parallel import launch
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastvit_triton import optimize, revert, warmup
from fastvit_triton.convert import backend as compile_backend
from fastvit_triton.convert import candidates, captured, conversion
from fastvit_triton.convert import capture as capture_file
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
def references():
    """Runs the references."""
    with using_backend("torch"):
        yield


@pytest.fixture
def no_graphs(monkeypatch):
    """Starts without captures, for tests that count or change them, or capture under another backend."""
    monkeypatch.setattr(captured, "_by_forward", weakref.WeakKeyDictionary())


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
    fitting = captured._fitting
    capture = captured._capture

    def counted(*call):
        found = fitting(*call)
        counts["graph"] += found is not None
        return found

    def captures(*call):
        counts["capture"] += 1
        return capture(*call)

    monkeypatch.setattr(captured, "_fitting", counted)
    monkeypatch.setattr(captured, "_capture", captures)
    return counts


@pytest.mark.full
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
    share = "95" if name == "map" else "100"  # products of queries and relative positions stay PyTorch's
    assert report.headline().startswith(f"2 of 2 blocks are converted, {share} % of the FLOPs")
    for block in model.blocks:
        (capture,) = captured.captures_of(block)
        assert dict(capture.calls) == MODELS[name].calls and capture.left == ()


class UnmaskedAttention(research.WrittenAttention):
    """As timm's blocks call it."""

    def forward(self, x, attn_mask=None, is_causal=False):
        return super().forward(x)


@pytest.mark.full
@pytest.mark.parametrize("kernels", [False, True])
def test_a_module_of_the_users_in_a_known_block_is_captured(kernels, no_graphs):
    """An attention without a reader, put into timm's block, runs as a graph inside the fused block."""
    block = pytest.importorskip("timm").models.vision_transformer.Block
    torch.manual_seed(1)
    dtype = torch.float32 if kernels else torch.float64
    model = nn.Sequential(block(D, 2), block(D, 2)).to(dtype)
    for part in model:
        part.attn = UnmaskedAttention().to(dtype)
    model.requires_grad_(not kernels)
    original, x = copy.deepcopy(model), torch.randn(2, 7, D, dtype=dtype)
    assert {row.why for row in optimize(model).rows if row.path == "0.attn"} == {conversion.NEEDS_EXAMPLE}
    report = {row.path: row for row in optimize(model.eval(), example=x).rows}
    assert report["0"].became == "fused pre-norm block" and report["0.attn"].within == "0"
    assert report["0.attn"].became.startswith("fused captured module (")
    if kernels:
        wide = copy.deepcopy(original).double()
        for training in (False, True):  # twice the error of PyTorch's float32
            for each in (model, original, wide):
                each.train(training).requires_grad_(training)
            run = (lambda m, x: gradients(m, (x,))) if training else nn.Module.__call__
            want = run(wide, x.double())
            most = 2 * (run(original, x) - want).norm() + torch.finfo(dtype).eps * want.norm()
            with interpreting():
                for _ in range(4):  # recorded in the second call
                    assert (run(model, x) - want).norm() <= most
    else:
        for train in (False, True):
            assert_close(gradients(model.train(train), (x,)), gradients(original.train(train), (x,)))
    seen = []
    model[0].attn.register_forward_hook(lambda *_: seen.append(1))
    model[1].attn = original[1].attn = UnmaskedAttention().to(dtype)
    assert_close(model.eval()(x), original.eval()(x))
    assert seen == [1]


@pytest.mark.full
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


class Positions(nn.Module):
    """Rotates by positions whose values it reads, with tables that it keeps, as CroCo and its kin do."""

    def __init__(self):
        super().__init__()
        self.tables = {}
        self.halves = False

    def forward(self, tokens, positions):
        number = int(positions.max()) + 1
        if number not in self.tables:
            angles = torch.arange(number)[:, None] / torch.linspace(1, 3, tokens.shape[-1], dtype=tokens.dtype)
            self.tables[number] = angles.cos(), angles.sin()
        cos, sin = (table[positions][:, None] for table in self.tables[number])
        turned = tokens * cos + tokens.roll(1, -1) * sin
        return turned.float() if self.halves else turned


class PlacedAttention(nn.Module):
    """Attention whose queries and keys are rotated by `Positions`."""

    def __init__(self, rope):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.rope = rope

    def forward(self, x, positions):
        B, N, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, N, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        q, k = self.rope(q, positions), self.rope(k, positions)
        attn = (q @ k.transpose(-2, -1) * 0.3).softmax(-1).to(v.dtype)
        return x + self.proj((attn @ v).transpose(1, 2).reshape(B, N, D)), positions


class Placed(nn.Module):
    """Two of them, which share the rotation."""

    def __init__(self):
        super().__init__()
        rope = Positions()
        self.blocks = nn.ModuleList(PlacedAttention(rope) for _ in range(2))

    def forward(self, x, positions):
        for block in self.blocks:
            x, positions = block(x, positions)
        return x


@pytest.mark.full
def test_values_that_a_forward_reads_are_compared(no_graphs, runs):
    """One graph for each largest position, whose attention is fused; also when the state of the rotation changes."""
    original = Placed().double()
    converted = copy.deepcopy(original)
    x, positions = torch.randn(2, 5, D, dtype=torch.float64), torch.arange(5).expand(2, 5)
    report = optimize(converted.eval(), example=(x, positions))
    assert {row.why for row in report.rows} == {None}
    captures = [c for block in converted.blocks for c in captured.captures_of(block)]
    assert {(c.calls["attention"], c.reads) for c in captures} == {(1, True)}
    assert converted.blocks[0].rope.tables == {}

    def check(graphs, *steps):
        for grad, step in itertools.product((False, True), steps):
            inputs = torch.randn(3, 7, D, dtype=torch.float64).requires_grad_(grad)
            places = step * torch.arange(7).expand(3, 7)
            with torch.set_grad_enabled(grad):
                converted(inputs, places)  # captured
                runs["graph"] = 0
                got, want = (m(inputs, places) for m in (converted, original))
            assert_close(got, want)
            assert (runs["graph"] > 0) == graphs
            if grad:
                weights = [[*m.parameters()] for m in (converted, original)]
                assert_close(*(torch.autograd.grad(y.sum(), w) for y, w in zip((got, want), weights, strict=True)))

    check(True, 2, 3, 2)
    for model in (converted, original):
        model.blocks[0].rope.halves = True  # another dtype than that of the queries
    check(True, 2)
    for model in (converted, original):
        model.blocks[0].rope.halves = False
        model.blocks[0].rope.forward = lambda tokens, positions: 2 * tokens
    check(False, 2)
    compiled = Placed().double().eval()
    assert "the rest by Inductor" in optimize(compiled, example=(x, positions), compile=True).text(verbose=True)


class Reads(nn.Module):
    """An MLP whose input is multiplied by a number that is read from a tensor."""

    def __init__(self, floats: bool, writes: bool, draws: bool):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.floats, self.writes, self.draws = floats, writes, draws
        self.table = [0.5 + i for i in range(10)]

    def forward(self, x, positions):
        positions = positions.clone()
        if self.writes:
            positions[0] = 9
        if self.draws:
            positions = torch.randint(2, (5,))
        number = int((positions.double() if self.floats else positions).max())
        return x + self.fc2(self.fc1(self.norm(x) * self.table[number]).relu())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "reads, why",
    [
        ((True, False, False), "depends on floating-point numbers"),
        ((False, True, False), "it wrote"),
        ((False, False, True), "a random number"),
        ((False, False, False), None),
    ],
)
def test_values_from_the_graph_itself_are_refused(reads, why, no_graphs):
    """Oracle: the original, for another largest position than the example's, with the same random numbers."""
    original = Reads(*reads).double()
    converted, x = copy.deepcopy(original).eval(), torch.randn(2, 5, D, dtype=torch.float64)
    report = optimize(converted, example=(x, torch.arange(5)))
    assert captured.is_bound(converted) == (why is None)
    assert why is None or why in report.text(verbose=True)
    for size in (5, 8, 5):
        assert_close(*(seeded(model, x, torch.arange(size), seed=size) for model in (converted, original)))


class ChoosingAttention(research.WrittenAttention):
    """Chooses among PyTorch's implementations of attention, and calls einops, which keeps a table of tensor types."""

    def forward(self, x):
        with torch.backends.cuda.sdp_kernel():
            return rearrange(super().forward(x), "b n d -> b n d")


@pytest.mark.filterwarnings("ignore:.*sdp_kernel:FutureWarning")
def test_guards_on_what_a_capture_replaces_are_dropped(no_graphs, runs):
    """Also those on einops, whose table grows when FLOPs are counted on fake tensors."""
    model = nn.Sequential(ChoosingAttention(), ChoosingAttention()).double()
    original, x = copy.deepcopy(model), torch.randn(2, 5, D, dtype=torch.float64)
    report = optimize(model.eval(), example=x)
    assert report.shares().replaced is not None and len(captured.captures_of(model[0])) == 1
    with torch.no_grad():
        runs["graph"] = 0
        assert_close(model(x), original(x))
    assert runs["graph"] == 2


class RestrictedAttention(nn.Module):
    """Attention by one of PyTorch's implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).flatten(2))


def test_a_choice_among_implementations_changes_no_mode(no_graphs):
    """Oracle: the original; the projection before the choice is part of the attention."""
    model = nn.Sequential(RestrictedAttention(), RestrictedAttention()).double().eval()
    original, x = copy.deepcopy(model), torch.randn(2, 5, D, dtype=torch.float64)
    optimize(model, example=x)
    assert captured.captures_of(model[0])[0].calls["attention_qkv"] == 1
    with torch.no_grad():
        assert_close(model(x), original(x))


@pytest.mark.full
@by_default("dino")
def test_few_graphs_serve_all_calls(name, runs):
    """Oracle: at most two graphs for each mode, and all calls run graphs at the end; the blocks share them.

    In inference mode and with gradients the first block has graphs of its own, as its input is an ordinary tensor
    that requires none.
    """
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
    assert all(len(captures.found) <= 2 for captures in captured._captures[converted.blocks[0]].values())
    first, second = ({*captured.captures_of(block)} for block in converted.blocks)
    assert first & second and max(len(first), len(second)) <= 12


@pytest.mark.full
@by_default("map")
@pytest.mark.usefixtures("no_graphs")
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
@pytest.mark.usefixtures("no_graphs")
def test_changes_are_never_ignored(name):
    """Oracle: as in test_mutants.py; every 23rd change of the blocks and all that they hold, others for each model."""
    first = 3 * list(MODELS).index(name)
    wrong = [
        f"{when} {' '.join(change)}: {verdict.what}"
        for change, when, verdict in mutants.judged(mutants.models()[f"captured_{name}"], lambda i: i % 23 == first)
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


@pytest.mark.full
@pytest.mark.usefixtures("no_graphs")
def test_copies_and_pickles(runs):
    """A copy shares the graphs; a pickle runs as written where there is no graph, until `warmup` captures it."""
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(2, 5)
    with torch.no_grad():
        for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            blocks = [row.became for row in optimize(copied).rows if row.path.count(".") == 1]
            assert len(blocks) == 2 and all("fused captured block" in became for became in blocks)
            runs["graph"] = 0
            assert_close(copied(*inputs), original(*inputs))
            assert runs["graph"] == 2  # in this process
        captured._by_forward.clear()
        copied = pickle.loads(pickle.dumps(converted))
        reasons = {row.why for row in optimize(copied).rows if row.path.count(".") == 1}
        assert len(reasons) == 1 and "runs as it is written until `warmup`" in reasons.pop()
        runs.update(graph=0, capture=0)
        assert_close(copied(*inputs), original(*inputs))
        assert runs == dict(graph=0, capture=0)
        warmup(copied, inputs)
        runs["graph"] = 0
        assert_close(copied(*inputs), original(*inputs))
        assert runs["graph"] == 2


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.usefixtures("no_graphs")
def test_globals_that_a_forward_reads(monkeypatch):
    """The number of heads of this model is a global of its file; it changes after the capture."""
    original, converted = pair("unit")
    inputs = MODELS["unit"].inputs(2, 3)
    with torch.no_grad():
        before = converted(*inputs)
        monkeypatch.setattr(research, "H", 4)
        assert_close(converted(*inputs), original(*inputs))
        assert not torch.equal(converted(*inputs), before)


@pytest.mark.full
@pytest.mark.skipif(onednn.why_not(torch.device("cpu"), torch.float32) is not None, reason="PyTorch has no oneDNN here")
@pytest.mark.usefixtures("no_graphs")
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


@pytest.mark.full
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


@pytest.mark.full
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

    run_in_threads(*(partial(work, x) for x in inputs))
    assert wrong == []


class Table(research.DinoBlock):
    """A block that adds each row of a table, which is no parameter or buffer."""

    def __init__(self, rows, nested):
        super().__init__()
        table = torch.ones(rows, D, dtype=torch.float64)
        self.tables = [table] if nested else table

    def forward(self, x):
        table = self.tables[0] if isinstance(self.tables, list) else self.tables
        return super().forward(x) + sum(table)


@pytest.mark.full
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_of_tables(nested):
    """Blocks that differ only in the size of a tensor do not share graphs, and a change of its size in place counts."""
    model = nn.Sequential(*(Table(rows, nested) for rows in (1, 3))).double()
    original = copy.deepcopy(model)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    optimize(model, example=x)
    first, second = map(captured.captures_of, model)
    assert len({*first, *second}) == 2
    with torch.no_grad():
        for rows in (None, 2):
            for block in (*model, *original) if rows else ():
                (block.tables[0] if nested else block.tables).data = torch.ones(rows, D, dtype=torch.float64)
            want = original(x)
            for _ in range(2):
                assert_close(model(x), want)


class Lazy(research.DinoBlock):
    """A block that makes a table in its first call."""

    def forward(self, x):
        if not hasattr(self, "table") or self.table.shape[0] != x.shape[1]:
            self.table = torch.ones(x.shape[1], 1, dtype=x.dtype)
        return super().forward(x + self.table)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_tables_that_a_first_call_makes(backend):
    """Oracle: the blocks themselves; the second one lacks the table that the graph of the first one reads."""
    model = nn.Sequential(Lazy(), Lazy()).double().eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 5, D, dtype=torch.float64)
    with using_backend(backend), torch.no_grad():
        optimize(model, example=x)
        for tokens in (5, 3):
            x = torch.randn(2, tokens, D, dtype=torch.float64)
            assert_close(model(x), plain(x))


class DropPath(nn.Module):
    """Stochastic depth, as research code has it."""

    def __init__(self, rate):
        super().__init__()
        self.drop_prob = rate

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        kept = keep + torch.rand((x.shape[0], 1, 1), dtype=x.dtype)
        return x.div(keep) * kept.floor_()


class Dropped(research.DinoBlock):
    """A block with stochastic depth, and a branch that its rate selects."""

    def __init__(self, rate):
        super().__init__()
        self.drop_path = DropPath(rate)
        self.sample_drop_ratio = rate

    def forward(self, x):
        y = self.drop_path(self.attn(self.norm1(x)))
        return x + (2 * y if self.training and self.sample_drop_ratio > 0.1 else y)


@pytest.mark.full
@pytest.mark.usefixtures("no_graphs")
def test_rates_of_stochastic_depth_share_graphs(runs):
    """Oracle: the original with the same random numbers; one graph without dropping and one for each branch."""
    model = nn.Sequential(*(Dropped(i / 50) for i in range(12))).double().train()
    original = copy.deepcopy(model)
    x = torch.randn(6, 5, D, dtype=torch.float64)
    optimize(model, example=x)
    with torch.no_grad():
        for rate in (0.02, 0.04, 1.0):
            model[1].drop_path.drop_prob = original[1].drop_path.drop_prob = rate
            runs["graph"] = 0
            for _ in range(2):
                assert torch.allclose(seeded(model, x), seeded(original, x), equal_nan=True)
            assert runs["graph"] >= 23 and runs["capture"] == 3


@pytest.mark.full
@pytest.mark.usefixtures("no_graphs")
def test_rates_are_constants_where_dynamo_has_no_method_for_them(monkeypatch, runs):
    """Oracle: the original with the same random numbers; a graph for each of two rates, and the report says why."""
    monkeypatch.delattr(VariableBuilder, "wrap_symfloat")
    monkeypatch.setattr("fastvit_triton.convert.capture", capture_file)  # put back after the test
    monkeypatch.delitem(sys.modules, capture_file.__name__)  # imported again, as with such a release
    model = nn.Sequential(Dropped(0.02), Dropped(0.04)).double().train()
    original = copy.deepcopy(model)
    x = torch.randn(6, 5, D, dtype=torch.float64)
    report = optimize(model, example=x)
    assert [row.why.partition(",")[0] for row in report.fused] == ["rate: its rates are constants"] * 2
    assert runs["capture"] == 2
    with torch.no_grad():
        runs["graph"] = 0
        got, want = seeded(model, x), seeded(original, x)
    assert runs["graph"] == 2 and torch.allclose(got, want, equal_nan=True)


@pytest.mark.usefixtures("no_graphs")
def test_a_release_of_pytorch_without_what_captures_use(monkeypatch):
    """The blocks run as they are written, and the report says why."""
    monkeypatch.setitem(sys.modules, capture_file.__name__, None)  # its import fails, as with a name that has moved
    original, converted = pair("dino")
    rows = [row.why for row in optimize(converted, example=MODELS["dino"].inputs(2, 5)).rows if row.path == "blocks.0"]
    assert rows[0].startswith(f"it cannot be captured: torch {torch.__version__} does not have what captures use: ")
    inputs = MODELS["dino"].inputs(2, 5)
    with torch.no_grad():
        assert_close(converted(*inputs), original(*inputs))


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
        return super().forward(x)


REASONS = {
    "break": "Unsupported: Call to `torch._dynamo.graph_break()`",
    "effect": "its forward changes an attribute or a global",
    "value": "it reads a value that depends on floating-point numbers",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("what", REASONS)
def test_what_cannot_be_captured_runs_as_written(what):
    """And the report says why; what the block holds is captured instead."""
    model = research.Stack(lambda: Odd(what), False).double()
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
    with pytest.raises(TypeError, match=r"example is 'cat\.jpg'; give an example input of the model, such as a tensor"):
        optimize(model, example="cat.jpg")
    with pytest.raises(ValueError, match="axis D of weight must be 17"):  # by a norm that has a fused forward
        optimize(model, example=torch.randn(2, 5, D + 1, dtype=torch.float64))
    assert not any("forward" in vars(m) for m in model.modules())
    report = optimize(model, filter_fn=lambda module, path: path != "blocks.1", example=MODELS["dino"].inputs(2, 5))
    assert [row.why for row in report.rows if row.path == "blocks.1"] == ["excluded by filter_fn"]


@pytest.mark.full
@pytest.mark.usefixtures("no_graphs")
def test_verify_runs_graphs(runs):
    """Oracle: `verify` undoes a conversion that is wrong; here, of a graph that was changed."""
    model = MODELS["dino"].build()
    inputs = MODELS["dino"].inputs(2, 5)
    report = optimize(model, example=inputs, verify=inputs)
    assert len(report.fused) == len(optimize(MODELS["dino"].build(), example=inputs).fused)
    assert runs["graph"] >= 2
    for capture in {c for block in model.blocks for c in captured.captures_of(block)}:
        capture._call = lambda *call, run=capture._call: 2 * run(*call)
    report = optimize(model, example=inputs, verify=inputs)
    assert [row.why.partition(" by ")[0] for row in report.rows if row.path == "blocks.0"] == [
        "its outputs differ from the original's"
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", ["dino", "rotary"])
@pytest.mark.usefixtures("no_graphs")
def test_torch_compile_traces_the_blocks_as_written(name):
    """Oracle: by hand, the attention in the graph that Dynamo hands to a backend, which ours rewrites."""
    original, converted = pair(name)
    original, converted = original.float(), converted.float()
    inputs = torch.utils._pytree.tree_map(torch.Tensor.float, MODELS[name].inputs(2, 5))
    found = []

    def inner(graph, inputs):
        found.append(sum("attention" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    with torch.no_grad(), interpreting():
        compiled = torch.compile(converted, backend=partial(compile_backend.backend, inner=inner), fullgraph=True)
        got, want = joined(compiled(*inputs)), joined(original(*inputs))
        assert_close(got, want, rtol=64 * torch.finfo(torch.float32).eps, atol=64 * torch.finfo(torch.float32).eps)
        assert found == [2]


@pytest.mark.full
def test_ddp_and_fsdp2(tmp_path):
    """Oracle: the gradients of the original on the whole batch, in two processes."""
    launch(2, str(Path(__file__).with_name("capture_job.py")), str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class Branch(nn.Module):
    """Attention of one half of the heads, with a convolution of its values, as in CSWin."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Conv2d(D, D, 3, padding=1, groups=D)


class AttentionOfBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.branches = nn.ModuleList([Branch(), Branch()])


class Written(nn.Module):
    """Attention without a norm, which is small, but no branch."""

    def __init__(self):
        super().__init__()
        self.attn = research.WrittenAttention()


class Stage(nn.Module):
    """Holds blocks."""


@pytest.mark.parametrize("block", [AttentionOfBranches, Written])
def test_lists_of_branches_are_no_stacks(block):
    """Oracle: by hand, the modules to capture: blocks, also those that hold a list, and never the stack of them."""
    model = Stage()
    model.blocks = nn.ModuleList([block(), block()])
    assert [*candidates.candidates(model, set(), set(), True)] == ["blocks.0", "blocks.1"]


def test_what_is_called_inside_a_converted_module_is_captured():
    """Oracle: by hand: nothing inside a converted module, but what it calls because its class is not known."""
    model = Stage()
    model.blocks = nn.ModuleList([Written(), Written()])
    assert [*candidates.candidates(model, {"blocks.0"}, set(), True)] == ["blocks.1"]
    assert [*candidates.candidates(model, {"blocks.0"}, {"blocks.0.attn"}, True)] == ["blocks.0.attn", "blocks.1"]
    assert [*candidates.candidates(model, {""}, {"blocks.1"}, True)] == ["blocks.1"]


class Stem(nn.Module):
    """A convolution of patches that unknown code calls; `how` takes its result apart."""

    def __init__(self, how, conv=None):
        super().__init__()
        self.conv = nn.Conv2d(3, D, 4, 4) if conv is None else conv
        self.how, self.head = how, nn.Linear(D, 5)

    def forward(self, image):
        return self.head(self.how(self.conv(image)))


FLATTENED = {
    "flatten": lambda y: y.flatten(2).transpose(1, 2),
    "rearrange": lambda y: rearrange(y, "b d h w -> b (h w) d"),
    "one axis": lambda y: y.view(len(y), -1)[:, :D],  # a view of memory with channels before pixels
    "strided": lambda y: y.as_strided((len(y), D), (y.stride(0), 1)),
    "asked": lambda y: y.mean((2, 3)) * (1 + y.is_contiguous()),
    "dropped": lambda y: nn.functional.dropout(y).mean((2, 3)),  # which elements depends on the order in memory
}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("way", FLATTENED)
def test_a_stem_of_unknown_code_is_converted(way, last):
    """Oracle: the model as written, in the interpreter; without an example, or of other convolutions, nothing is."""
    model, example = Stem(FLATTENED[way]).eval(), torch.randn(2, 3, 8, 12)
    example = example.contiguous(memory_format=torch.channels_last) if last else example
    if way in ("one axis", "strided") and last:
        pytest.skip("as written it reads other elements, or fails")
    wanted = seeded(model, example)
    assert optimize(model).rows == ()
    report = optimize(model, example=example)
    assert [row.path for row in report.rows if row.became is not None] == ["conv"]
    assert [row.path for row in optimize(model).rows] == ["conv"]  # which stays as it is
    with torch.no_grad(), interpreting():
        assert_close(seeded(model, example), wanted)
    before = vars(Stem(FLATTENED[way]).conv).keys()
    revert(model)
    assert vars(model.conv).keys() == before
    overlapping = Stem(FLATTENED[way], nn.Conv2d(3, D, 4, 2)).eval()
    assert not any(row.became for row in optimize(overlapping, example=example).rows)


def test_a_shared_stem_is_converted_once():
    """Oracle: the model as written, in the interpreter."""
    first = Stem(FLATTENED["flatten"])
    model = nn.ModuleDict(dict(a=first, b=Stem(FLATTENED["flatten"], first.conv))).eval()
    model.forward = lambda image: model["a"](image) + model["b"](image)
    example = torch.randn(2, 3, 8, 12)
    wanted = model(example)
    report = optimize(model, example=example)
    assert [row.path for row in report.rows if row.became is not None] == ["a.conv", "b.conv"]
    with torch.no_grad(), interpreting():
        assert_close(model(example), wanted)


def test_a_stem_of_video_is_converted():
    """Oracle: the model as written, in the interpreter."""
    model = Stem(lambda y: y.flatten(2).transpose(1, 2), nn.Conv3d(3, D, (2, 4, 4), (2, 4, 4))).eval()
    example = torch.randn(2, 3, 4, 8, 12)
    wanted = model(example)
    report = optimize(model, example=example)
    assert [row.path for row in report.rows if row.became is not None] == ["conv"]
    with torch.no_grad(), interpreting():
        assert_close(model(example), wanted)
