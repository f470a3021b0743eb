"""Tests of regions: captured blocks that Inductor compiles. Oracle, unless a test says otherwise: the model as written.

Where the compiler does not matter, AOTAutograd's graphs run operator by operator in place of Inductor's code.
"""

import contextlib
import copy
import re
import types
import weakref

import pytest
import research
import torch
from agreement import seeded
from budget import telling
from captured import without_inductor
from catalogue import joined
from functorch.compile import make_boxed_func
from interpreter import interpreting
from test_capture import gradients
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastvit_triton import optimize, revert, warmup
from fastvit_triton.convert import captured
from fastvit_triton.convert import region as region_file
from fastvit_triton.convert.backend import compiling
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.events import Count, Event, Piece
from fastvit_triton.expected.gpus import gpus
from fastvit_triton.expected.inductor import counted, inductor_count
from fastvit_triton.kernels import settings
from fastvit_triton.kernels.backend import using_backend

MODELS = research.MODELS


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Runs the references, without captures of other tests."""
    monkeypatch.setattr(captured, "_by_forward", weakref.WeakKeyDictionary())
    with using_backend("torch"):
        yield


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for Inductor; counts the graphs that it compiled, and the calls of these."""
    return without_inductor(monkeypatch)


def pair(name, **options):
    """(original, converted model)."""
    original = MODELS[name].build()
    converted = copy.deepcopy(original)
    torch.manual_seed(1)
    optimize(converted, example=MODELS[name].inputs(2, MODELS[name].sizes[0]), **{"compile": True} | options)
    return original, converted


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, compiler):
    """In evaluation and training, for another batch than the example's; blocks that are alike share a region."""
    original, converted = pair(name)
    compiled = compiler["compiled"]
    assert compiled == len({c for block in converted.blocks for c in captured.captures_of(block)}) <= 2
    inputs = MODELS[name].inputs(3, MODELS[name].sizes[0])
    compiler["called"] = 0
    with torch.no_grad():
        assert_close(joined(converted(*inputs)), joined(original(*inputs)))
    assert compiler == dict(compiled=compiled, called=2)
    for train in (False, True):
        gradients(converted.train(train), inputs)  # captures it
        compiler["called"] = 0
        assert_close(gradients(converted, inputs), gradients(original.train(train), inputs))
        assert compiler["called"] == 2
    revert(converted)
    assert not any("forward" in vars(module) for module in converted.modules())


OBSERVERS = {
    "mode": lambda block, x: _inside(BaseTorchDispatchMode(), block, x),
    "anomaly": lambda block, x: _inside(torch.autograd.detect_anomaly(check_nan=False), block, x),
    "hooks": lambda block, x: _inside(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), block, x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "vmap": lambda block, x: torch.func.vmap(block)(x[None])[0],
    "jvp": lambda block, x: torch.func.jvp(block, (x,), (torch.ones_like(x),))[1],
}


def _inside(context, block, x):
    with context:
        return block(x)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("observer", OBSERVERS)
def test_observed_calls_run_operators(observer, compiler):
    """What sees operators, or transforms them, does not enter compiled code."""
    original, converted = pair("dino")
    x = MODELS["dino"].inputs(2, 5)[0].requires_grad_()
    converted(x)
    compiler["called"] = 0
    assert_close(OBSERVERS[observer](converted, x), OBSERVERS[observer](original, x))
    assert compiler["called"] == 0
    assert_close(converted(x), original(x))
    assert compiler["called"] == 2


@pytest.mark.full
def test_when_a_region_is_compiled(compiler):
    """On a CPU only if it is asked for; the choice of one model does not affect another, and may be changed."""
    for options, regions in (dict(compile=None), 0), (dict(compile=False), 0), (dict(), 1):
        original, converted = pair("dino", **options)
        x = MODELS["dino"].inputs(2, 5)[0]
        with torch.no_grad():
            assert_close(converted(x), original(x))
        assert compiler == dict(compiled=regions, called=3 * regions)  # one in the call with the example
    report = optimize(converted, example=x, compile=False)
    with torch.no_grad():
        assert_close(converted(x), original(x))
    assert compiler == dict(compiled=1, called=3) and report.compiled is None
    with pytest.raises(TypeError, match=r"compile is 'yes'; give True or False, or None"):
        optimize(original, example=x, compile="yes")


@pytest.mark.full
def test_the_report_tells_what_was_compiled(compiler, monkeypatch):
    """Also that the compiler failed, and why; then the graph runs operator by operator."""
    model = MODELS["dino"].build()
    x = MODELS["dino"].inputs(2, 5)[0]
    report = optimize(copy.deepcopy(model), example=x, compile=True)
    assert re.search(r"\. 1 graph of captured blocks took \d+ s to compile; other dtypes and modes", str(report))
    assert all(row.became.endswith(", the rest by Inductor)") for row in report.rows)

    def fails(*_):
        raise OSError("no compiler\nat all")

    monkeypatch.setattr(region_file, "compiled", fails)
    monkeypatch.setattr(captured, "_by_forward", weakref.WeakKeyDictionary())
    converted = copy.deepcopy(model)
    report = optimize(converted, example=x, compile=True)
    assert {row.why for row in report.rows} == {"not compiled: Inductor failed with OSError: no compiler"}
    assert "to compile" not in str(report)
    with torch.no_grad():
        assert_close(converted(x), model(x))


class Table(nn.Module):
    """Angles from sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("periods", torch.linspace(1, 3, research.D // 4, dtype=torch.float64))

    def forward(self, *, tokens):
        angles = torch.arange(tokens, device=self.periods.device)[:, None] / self.periods
        return torch.cat((angles, angles), -1).sin(), torch.cat((angles, angles), -1).cos()


class Rotated(nn.Module):
    """Rotary blocks whose table is a module of its own, which is computed for each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = MODELS["rotary"].build().blocks
        self.table = Table()

    def forward(self, x):
        for block in self.blocks:
            (x,) = block([x], self.table(tokens=x.shape[1] - 1))
        return x


@pytest.mark.full
def test_modules_without_products_are_compiled(compiler):
    """A table of positions outside of blocks, if anything is compiled; norms that readers know stay with these."""
    model = Rotated().eval()
    x = torch.randn(2, 5, research.D, dtype=torch.float64)
    assert "table" not in {row.path for row in optimize(copy.deepcopy(model), example=x).rows}
    converted = copy.deepcopy(model)
    rows = {row.path: row for row in optimize(converted, example=x, compile=True).rows}
    assert rows["table"].became == "fused captured module (by Inductor)" and rows["blocks.0"].became is not None
    compiler["called"] = 0
    for length in (5, 8):
        x = torch.randn(3, length, research.D, dtype=torch.float64)
        with torch.no_grad():
            assert_close(converted(x), model(x))
    assert compiler["called"] == 8  # of two tables and two blocks, twice
    revert(converted)
    assert "forward" not in vars(converted.table)


@pytest.mark.full
def test_warm_up_keeps_the_choice(compiler):
    """Of a copy that of the original."""
    original, converted = pair("dino")
    x = MODELS["dino"].inputs(2, 5)[0]
    twin = copy.deepcopy(converted)
    for model in (converted, twin):
        warmup(model, x)
        compiler["called"] = 0
        with torch.no_grad():
            assert_close(model(x), original(x))
        assert compiler == dict(compiled=1, called=2)


@pytest.mark.full
def test_ddp_does_not_split_a_region(compiler, monkeypatch):
    """With buckets of one byte, Dynamo's optimiser for DDP would compile each layer apart."""
    ddp = types.SimpleNamespace(bucket_bytes_cap=1, parameters_to_ignore=set())
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: ddp)
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(3, 5)
    gradients(converted.train(), inputs)
    assert compiler["compiled"] == 2  # one without gradients, and one with
    assert_close(gradients(converted, inputs), gradients(original.train(), inputs))


class Scaled(nn.Module):
    """Attention on x and a number that is a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = research.WrittenAttention()

    def forward(self, scale, x):
        return scale, x + scale * self.attn(x)


class ScaledStack(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, scale, x):
        for block in self.blocks:
            scale, x = block(scale, x)
        return x


@pytest.mark.full
def test_the_first_tensor_may_have_no_dimensions(compiler):
    """Such as a temperature."""
    model = ScaledStack().double().eval()
    converted = copy.deepcopy(model)
    given = torch.tensor(0.5, dtype=torch.float64), torch.randn(2, 5, research.D, dtype=torch.float64)
    optimize(converted, example=given, compile=True)
    compiler["called"] = 0
    with torch.no_grad():
        assert_close(converted(*given), model(*given))
    assert compiler["called"] == 2


@pytest.mark.full
def test_errors_of_the_backward_pass_are_seen_when_it_is_compiled(monkeypatch):
    """The graph then runs operator by operator in training."""

    def compiled(graph, inputs, mode, options):
        def fails(*_):
            raise OSError("no compiler")

        with compiling():
            compile_both = aot_autograd(fw_compiler=lambda part, _: make_boxed_func(part.forward), bw_compiler=fails)
            return compile_both(graph, inputs)

    monkeypatch.setattr(region_file, "compiled", compiled)
    original, converted = pair("dino")
    inputs = MODELS["dino"].inputs(3, 5)
    gradients(converted.train(), inputs)
    found = [c.region for c in captured.captures_of(converted.blocks[0]) if c.mode[-1][0]]
    assert [(region.call, region.why) for region in found] == [(None, "Inductor failed with OSError: no compiler")]
    assert_close(gradients(converted, inputs), gradients(original.train(), inputs))


@pytest.mark.full
def test_settings_are_compared(compiler):
    """Oracle: by hand, compiled code has the choices of the settings that it was compiled with."""
    original, converted = pair("dino")
    x = MODELS["dino"].inputs(2, 5)[0]
    for context, called in (using_backend("auto"), 0), (settings.forcing("plain"), 0), (contextlib.nullcontext(), 2):
        compiler["called"] = 0
        with torch.no_grad(), context:
            assert_close(converted(x), original(x))
        assert compiler["called"] == called
    with using_backend("auto"):  # float64, for which nothing is chosen otherwise
        converted = copy.deepcopy(original)
        optimize(converted, example=x, compile=True)
        compiler["called"] = 0
        with torch.no_grad():
            assert_close(converted(x), original(x))
        assert compiler["called"] == 2


@pytest.mark.full
def test_what_was_compiled_can_be_left(compiler):
    """By `compile=False`, also of a copy that was called, and of modules without products."""
    model = Rotated().eval()
    x = torch.randn(2, 5, research.D, dtype=torch.float64)
    converted = copy.deepcopy(model)
    optimize(converted, example=x, compile=True)
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        twin(x)
    for each in (converted, twin):
        report = optimize(each, example=x, compile=False)
        assert "table" not in {row.path for row in report.rows} and report.compiled is None
        compiler["called"] = 0
        with torch.no_grad():
            assert_close(each(x), model(x))
        assert compiler["called"] == 0


class Two(nn.Module):
    """Two results, of which the first has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = research.WrittenAttention()

    def forward(self, x):
        y = self.attn(x)
        return y.detach() * 2, (y * y).sum(), y


@pytest.mark.full
def test_a_trace_counts_outputs_without_gradients():
    """Oracle: no more launches than by the rule for the block as written."""
    model = nn.ModuleList([Two()]).float().train()[0]
    original, x = copy.deepcopy(model), torch.randn(2, 3, research.D)
    optimize(model, example=x)
    model(x)
    images = torch.empty(16, 5, research.D, device="meta")
    found = traced(model, gpus()["h100"], True, (images,), {})
    assert len({event.region for event in found.events} - {0}) == 2
    assert found.count.launches <= inductor_count(traced(original, None, True, (images,), {}).events).launches


def test_a_kernel_writes_what_other_regions_read():
    """Oracle: by hand, for tensors of 40 bytes: region 1 writes both results, as region 2 reads them."""

    def piece(storage):
        return Piece(storage, 0, (10,), 40)

    def event(name, reads, write, region):
        return Event(name, "", False, 1, tuple(map(piece, reads)), (piece(write),), region=region)

    events = [event("mul", [0], 1, 1), event("exp", [1], 2, 1), event("mul", [1, 2], 3, 2)]
    assert counted(events) == Count(2, 6 * 40)


class Dropping(nn.Module):
    """A block with stochastic depth and dropout, whose norm is written out.

    Args:
        rate: of stochastic depth.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(research.D)
        self.mlp = nn.Sequential(nn.Linear(research.D, 32), nn.GELU(), nn.Linear(32, research.D))
        self.drop_path = rate
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        y = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        y = self.drop(self.mlp(y))
        if self.training and self.drop_path:
            y = y * torch.rand(len(x), 1, 1, dtype=x.dtype).add(1 - self.drop_path).floor() / (1 - self.drop_path)
        return x + y


def dropping(rate=0.0):
    torch.manual_seed(0)
    return nn.Sequential(Dropping(rate), Dropping(rate / 2))


@pytest.mark.full
def test_rates_are_not_compiled(compiler):
    """Blocks with other rates share one graph, whose rates are inputs; Inductor would compile each."""
    model = dropping(0.4)
    converted, x = copy.deepcopy(model), torch.randn(3, 5, research.D)
    report = optimize(converted, example=x, compile=True)
    assert {row.why for row in report.rows} == {"not compiled: its rates are numbers, which Inductor makes constants"}
    want = seeded(model, x)
    for _ in range(2):
        assert_close(seeded(converted, x), want)
    assert compiler["compiled"] == compiler["called"] == 0


@pytest.mark.full
def test_inductor():
    """Real code: outputs, gradients and drawn numbers in float32, within twice eager PyTorch's error, at any batch."""
    model = dropping()
    converted, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    report = optimize(converted, example=torch.randn(2, 5, research.D), compile=True)
    assert report.compiled[0] == 1 and report.compiled[1] > 0
    for batch in (2, 3):
        x = torch.randn(batch, 5, research.D)
        want, plain, got = [], [], []
        for each, seen in ((wide, want), (model, plain), (converted, got), (converted, got)):
            seen.clear()
            torch.manual_seed(1)
            seen.append(gradients(each.train(), (x.to(next(each.parameters()).dtype),)).double())
            seen.append(each.eval()(x.to(next(each.parameters()).dtype)).detach().double().flatten())
        for exact, theirs, ours in zip(want, plain, got, strict=True):
            rounding = torch.finfo(torch.float32).eps * telling(exact).norm()
            assert (ours - exact).norm() <= 2 * ((theirs - exact).norm() + rounding)
    y = converted.train()(x).square().sum()
    weights = [layer.weight for layer in converted.modules() if isinstance(layer, nn.Linear)]
    first, second = (torch.autograd.grad(y, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    compiled = {c for block in converted for c in captured.captures_of(block)}
    assert all(c.region.call is not None for c in compiled) and len(compiled) <= 5


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True])
def test_kernels_are_in_the_compiled_code(frozen, monkeypatch):
    """In the interpreter, Inductor's code calls our operators, which fold weights that are not final; within twice the
    error of eager PyTorch."""
    model = MODELS["dino"].build().float()
    converted, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    x = MODELS["dino"].inputs(2, 5)[0].float()
    sources = []
    from torch._inductor import codecache

    load = codecache.PyCodeCache.load_by_key_path
    monkeypatch.setattr(
        codecache.PyCodeCache,
        "load_by_key_path",
        lambda key, path, *a, **k: (sources.append(open(path).read()), load(key, path, *a, **k))[1],
    )
    with interpreting():
        optimize(converted, example=x, compile=True, freeze=frozen)
        with torch.no_grad():
            got = converted(x)
    want, plain = wide(x.double()), model(x)
    rounding = torch.finfo(torch.float32).eps * want.norm()
    assert (got - want).norm() <= 2 * ((plain - want).norm() + rounding)
    calls = [line for source in sources for line in source.splitlines() if "torch.ops.fastvit_triton." in line]
    assert all(any(name in line for line in calls) for name in ("attention", "linear_fwd"))
    assert any("fold" in line for line in calls) != frozen


class Plain(nn.Module):
    """x + γ · f(norm(x)) with a norm that is written out, in float32, of which no kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(16))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        y = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        return x + self.scale * self.fc2(torch.nn.functional.gelu(self.fc1(y)))


@pytest.mark.few(1)
@pytest.mark.parametrize("training", [False, True])
def test_a_trace_counts_regions_as_inductor_makes_them(training):
    """Oracle: the rule for the block as written; by hand in inference: norm, product, GELU, product, residual."""
    model = nn.Sequential(Plain()).train(training)
    original, x = copy.deepcopy(model), torch.randn(2, 3, 16)
    optimize(model, example=x)
    with contextlib.nullcontext() if training else torch.no_grad():
        model(x)
    images = torch.empty(64, 197, 16, device="meta")
    found = traced(model, gpus()["h100"], training, (images,), {})
    assert len({event.region for event in found.events} - {0}) == 1 + training
    one = inductor_count(traced(original, None, training, (images,), {}).events)
    assert found.count.launches == one.launches
    statistics = 64 * 197 * 2 * 4  # bytes of those that PyTorch's LayerNorm returns, which the norm becomes
    assert training or (one.launches, one.nbytes + statistics) == (5, found.count.nbytes)
    small = traced(model, gpus()["h100"], training, (images[:8],), {})
    assert ({event.region for event in small.events} == {0}) != training  # few images are replayed
