"""Tests of direct launches in compiled graphs, without a GPU: launches run in the interpreter, on the CPU."""

import ast
import copy
import inspect
import logging
import re
from pathlib import Path

import pytest
import research
import torch
from functorch.compile import aot_function, make_boxed_func
from interpreter import _run, interpreting
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.launch_recorder import launch_of
from benchmarks.no_device import Driver
from benchmarks.sass import read
from fastvit_triton import optimize
from fastvit_triton.convert.backend import compiling
from fastvit_triton.convert.direct import PASS, Lowering, with_lowering
from fastvit_triton.kernels import OPS, attention, attention_launch, launch, layer_norm, linear, settings
from fastvit_triton.kernels.backend import using_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PyTorch's own
    pytest.mark.filterwarnings("ignore:Could not find an active CPU backend"),  # the driver is that of a GPU
]
F = torch.nn.functional
D, H = 48, 3  # width, heads


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """CPU tensors count as on an H200, for which Triton analyses kernels."""
    monkeypatch.setattr(driver, "_active", Driver())
    with launch.targeting("sm_90"), using_backend("triton"):
        yield
    torch._dynamo.reset()


@pytest.fixture
def reasons(caplog):
    """Messages about operators that stay opaque."""
    caplog.set_level(logging.INFO, "fastvit_triton.convert.direct")
    return lambda: [record.getMessage() for record in caplog.records if "opaque" in record.getMessage()]


def ours(graph):
    """Names of our operators in a graph."""
    return [n.target.name() for n in graph.nodes if getattr(n.target, "namespace", None) == "fastvit_triton"]


def launches(graph):
    """The launches in a graph: (flat kernel, arguments)."""
    nodes = [n for n in graph.nodes if n.target is wrap.triton_kernel_wrapper_functional]
    return [(wrap.kernel_side_table.get_kernel(n.kwargs["kernel_idx"]).fn, n.kwargs["kwargs"]) for n in nodes]


def traced(function, *inputs):
    """Lowered graphs of a function and its gradients; both graphs run, each beside the opaque one, with equal bits."""
    graphs = []

    def compiler(graph, _):
        lowered = copy.deepcopy(graph)
        Lowering()(lowered.graph)
        lowered.graph.eliminate_dead_code()
        lowered.recompile()
        graphs.append(lowered.graph)

        def run(*given):
            with interpreting():
                want, got = graph.forward(*given), lowered.forward(*given)
            for a, b in zip(want, got, strict=True):
                assert a is b is None or (a.dtype == b.dtype and a.shape == b.shape)
                assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
            return want

        return make_boxed_func(run)

    with compiling():
        outputs = aot_function(function, compiler, compiler, decompositions=select_decomp_table())(*inputs)
        learned = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if learned:
            torch.autograd.backward(learned, [torch.randn_like(t) for t in learned])
    assert len(graphs) == 1 + bool(learned)
    return graphs


def call(op, case, dtype=torch.float32):
    """(a function of the tensors of an op's case, *these tensors)."""
    flat, spec = tree_flatten(op.inputs(op.cases[case], dtype, "cpu"))
    places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

    def function(*tensors):
        given = dict(zip(places, tensors, strict=True))
        return op.run(**tree_unflatten([given.get(i, value) for i, value in enumerate(flat)], spec))

    return function, *(flat[i].detach().requires_grad_(flat[i].requires_grad) for i in places)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "op, case", [pytest.param(op, c, id=f"{op.name} {c}") for op in OPS for c in op.cases if c != "large"]
)
def test_graphs_compute_the_same_bits(op, case, reasons):
    """Oracle: the opaque graphs, forward and backward: bits are equal, as the same kernels run on the same numbers.

    Operators stay opaque only where PyTorch's analysis of a kernel follows an argument through a called function.
    """
    graphs = traced(*call(op, case))
    left = [name for graph in graphs for name in ours(graph)]
    assert all("analysis" in reason for reason in reasons()) and len(reasons()) == len(left)
    assert not left or "window" in left[0] or "attention" in left[0]
    assert left or any(map(launches, graphs))
    for graph in graphs:
        for flat, values in launches(graph):
            assert all(isinstance(value, (torch.fx.Node, int)) for value in values.values()), flat.src


@pytest.mark.parametrize(
    "form, said", [({}, []), (dict(TMA=1), ["takes descriptors"])], ids=["pointers", "descriptors"]
)
def test_whole_rows_of_attention(form, said, reasons):
    """Oracle: the opaque graph, as above; launches with descriptors stay opaque."""
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float16) for _ in range(3))
    with launch.overriding(attention_launch.whole(BLOCK_M=64, num_warps=4, num_stages=2, **form)):
        (graph,) = traced(attention.attention, q, k, v)
    assert len(launches(graph)) == 1 - len(said) and len(ours(graph)) == len(reasons()) == len(said)
    assert all(part in reason for part, reason in zip(said, reasons(), strict=True))


def test_numbers_are_of_tritons_type():
    """Oracle: Triton's IR of the flat kernels: no float64; a number that is not specialised is no constant."""
    x, w = torch.randn(1, 1, D), torch.randn(D)
    (graph,) = traced(lambda x, w: layer_norm.layer_norm(x, w, w, 1e-5), x, w)
    ((flat, values),) = launches(graph)
    assert "tl.full((), 1e-05, tl.float32)" in flat.src
    assert flat.src.count("tl.full((), 1, tl.int32)") == 2  # M and rows_per_image
    values = {name: node.meta["val"] if isinstance(node, torch.fx.Node) else node for name, node in values.items()}
    code = str(wrap.generate_ttir(flat, dict(values), {})[0])
    assert "f32" in code and "f64" not in code


def test_pointers_in_tuples_are_seen():
    """Oracle: the tensors that fold's kernel reads and writes, all in tuples, by hand: its operator has no others."""
    weights, norm = [torch.randn(n, D) for n in (5, 7)], torch.randn(D)
    op = torch.ops.fastvit_triton.fold.default

    def function(a, b, norm):
        return op([a, b], [None, None], [norm, norm], [2], torch.float32)

    (graph,) = traced(function, *weights, norm)
    ((flat, values),) = launches(graph)
    (node,) = [n for n in graph.nodes if n.target is wrap.triton_kernel_wrapper_functional]
    assert sum(isinstance(value, torch.fx.Node) for value in values.values()) == 3 + 3
    assert len(node.kwargs["tensors_to_clone"]) == 3
    assert "p3 + 240" in flat.src  # the second weight's rows in the packed one: 5 · 48


def test_fills_are_kept():
    """Oracle: the opaque graphs: without rows a function fills the sums with zeros, and launches nothing."""
    w = torch.randn(D).requires_grad_()
    graphs = traced(lambda x, w: layer_norm.layer_norm(x, w, w, 1e-5), torch.randn(0, D).requires_grad_(), w)
    assert not any(ours(graph) or launches(graph) for graph in graphs)


def test_a_changed_compiler_option_keeps_operators_opaque(monkeypatch, reasons):
    """Oracle: Inductor passes no enable_fp_fusion on, and Triton's default may be changed."""
    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)
    (graph,) = traced(lambda x: layer_norm.layer_norm(x, None, None, 1e-5), torch.randn(2, 3, D))
    assert len(ours(graph)) == 1 and not launches(graph)
    assert "enable_fp_fusion" in reasons()[0]


def test_the_pass_is_an_option(monkeypatch, reasons):
    """Oracle: the options given: they are kept; the pass is added where it is asked for and the place is free."""
    given = {"max_autotune": False}
    assert with_lowering(given) == given and with_lowering(None) is None
    monkeypatch.setattr(settings, "direct", True)
    assert isinstance(with_lowering(given)[PASS], Lowering) and with_lowering(given).keys() == {*given, PASS}
    other = {PASS: print}
    assert with_lowering(other) is other and PASS in reasons()[0]


def test_names_in_the_code_of_a_kernel_are_unique():
    """Oracle: Inductor writes functions and constants that a kernel uses by name, the first of a name only."""
    seen = 0
    for path in sorted(Path(launch.__file__).parent.glob("*.py")):
        module = __import__(f"fastvit_triton.kernels.{path.stem}", fromlist=["_"])
        for kernel in [
            f for f in vars(module).values() if isinstance(f, JITFunction) and f.__name__.endswith("_kernel")
        ]:
            found, waiting, seen = {kernel.__name__: kernel}, [kernel], seen + 1
            while waiting:
                scope = (function := waiting.pop()).fn.__globals__
                for name in function.fn.__code__.co_names:
                    value = scope.get(name)
                    if name not in scope or inspect.ismodule(value):
                        continue
                    assert found.setdefault(name, value) is value, (kernel, name)
                    if isinstance(value, JITFunction) and value not in waiting and value is not function:
                        waiting += [value] * (value.fn is not function.fn)
    assert seen > 20


class Block(torch.nn.Module):
    """A pre-norm block of PyTorch's operators."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
        self.qkv, self.proj = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D)
        self.fc1, self.fc2 = torch.nn.Linear(D, 2 * D), torch.nn.Linear(2 * D, D)

    def forward(self, x):
        """Attention and MLP."""
        B, N, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def _numbers(argument, held):
    """The integers among the arguments that an expression in a flat kernel stands for, in order."""
    match argument:
        case ast.Tuple(elts=parts):
            return [number for part in parts for number in _numbers(part, held)]
        case ast.Name(id=name):
            return [held[name]] if name.startswith("n") else []
        case ast.Call(args=[_, ast.Constant(value=int(one)), _]):
            return [one]
    return []


class Compiled:
    """Runs a block compiled by Inductor, whose code calls flat kernels, which run in the interpreter.

    Attributes:
        codes: what Inductor wrote.
        kernels: of the last run: name, grid, numbers, and compile-time arguments of each launch.
        seen: the compiled flat kernels with their metadata.
    """

    def __init__(self, monkeypatch, direct):
        self.codes, self.kernels, self.seen = [], [], []
        monkeypatch.setattr(settings, "direct", direct)
        monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(self.codes.append))
        monkeypatch.setattr(AsyncCompile, "triton", lambda _, name, source, **options: self._launcher(name, source))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        monkeypatch.setattr(launch, "run", self._opaque)
        torch._dynamo.reset()

    def _opaque(self, kernel, grid, arguments, fixed):
        one = launch_of(kernel, grid, arguments, fixed)
        constants = {name: value for name, value in fixed.items() if name not in one.options}
        numbers = [value for value in tree_leaves(arguments) if type(value) is int]
        options = one.options.get("num_warps", 4), one.options.get("num_stages", 3)
        self.kernels.append((kernel.fn.__name__, (*grid, 1, 1)[:3], numbers, constants, options))
        with interpreting():
            launch.run(kernel, grid, arguments, fixed)

    def _launcher(self, name, source):
        tuner = getattr(PyCodeCache.load(source), name)
        self.seen.append(tuner)
        (inner,) = [n for n in ast.walk(ast.parse(tuner.fn.src)) if isinstance(n, ast.Expr)]
        parameters = tuner.fn.arg_names
        (config,) = tuner.configs

        class Launcher:
            """In place of the tuner's launcher."""

            @staticmethod
            def run(*values, stream):
                *given, x, y, z = values
                held = dict(zip(parameters, given, strict=True))
                numbers = [number for argument in inner.value.args for number in _numbers(argument, held)]
                constants = {word.arg: ast.literal_eval(word.value) for word in inner.value.keywords}
                options = config.num_warps, config.num_stages
                self.kernels.append((inner.value.func.id, (x, y, z), numbers, constants, options))
                with interpreting():
                    _run(tuner.fn, *given, grid=(x, y, z))

        return Launcher

    def __call__(self, module, x):
        """The output, and of a module in training the gradients."""
        self.kernels.clear()
        with torch.set_grad_enabled(module.training), functorch_config.patch(force_non_lazy_backward_lowering=True):
            if not hasattr(self, "compiled"):
                self.compiled = torch.compile(module, backend="fastvit_triton")
            y = self.compiled(x)
            if not module.training:
                return [y]
            return [y, *torch.autograd.grad(y.float().square().sum(), list(module.parameters()))]


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_inductors_code_makes_the_launches(training, monkeypatch):
    """Oracle: the compiled block with opaque operators: its launches in order with their numbers, options and bits."""
    module, x = Block().bfloat16().train(training), torch.randn(2, 7, D, dtype=torch.bfloat16)
    opaque = Compiled(monkeypatch, False)
    want, expected = opaque(module, x), list(opaque.kernels)
    direct = Compiled(monkeypatch, True)
    got = direct(module, x)
    assert direct.kernels == expected and len(expected) == (15 if training else 7)
    assert all(map(torch.equal, want, got)) and len(got) == (13 if training else 1)
    before, after = ("".join(one.codes) for one in (opaque, direct))
    assert len(re.findall(r"= torch\.ops\.fastvit_triton\.\w+\.default\(", before)) == (11 if training else 6)
    assert "torch.ops.fastvit_triton" not in after


@pytest.mark.full
def test_any_batch_runs_in_one_graph(monkeypatch, reasons):
    """Oracle: the opaque graph's bits, for two numbers of images; the second compiles nothing, as it adds no guard."""
    module = torch.nn.Sequential(torch.nn.LayerNorm(D), torch.nn.Linear(D, D)).eval()
    x, more = torch.randn(2, 7, D), torch.randn(5, 7, D)
    direct = Compiled(monkeypatch, True)
    torch._dynamo.mark_dynamic(x, 0)
    got = [direct(module, x)[0], direct(module, more)[0]]
    assert len(direct.codes) == 1 and reasons() == [] and len(direct.kernels) == 3
    opaque = Compiled(monkeypatch, False)
    assert all(map(torch.equal, got, [opaque(module, x)[0], opaque(module, more)[0]]))


@pytest.mark.full
def test_a_choice_by_a_symbolic_size_keeps_an_operator_opaque(monkeypatch, reasons):
    """Oracle: the opaque graph's bits, for two numbers of tokens and one graph each way, with gradients.

    Backward, attention runs in one kernel or two by its number of tokens, which may be any here. Forward, the last
    block of keys is a whole one, whose further columns are zeros.
    """
    module, x, fewer = Block().bfloat16(), *(torch.randn(2, N, D, dtype=torch.bfloat16) for N in (7, 5))
    torch._dynamo.mark_dynamic(x, 1)
    direct = Compiled(monkeypatch, True)
    got = [t for given in (x, fewer) for t in direct(module, given)]
    assert len(direct.codes) == 2 and {reason.split()[0] for reason in reasons()} == {"attention_bwd"}
    opaque = Compiled(monkeypatch, False)
    want = [t for given in (x, fewer) for t in opaque(module, given)]
    assert all(map(torch.equal, got, want))


def attend(q, k, v):
    """Attention without a bias."""
    return attention.fwd_op(q, k, v, None, None, None, 0, 0.25)


def normalise(x, weight, bias):
    """A LayerNorm."""
    return layer_norm._fwd_op(x, None, weight, bias, 1e-5, None, None, None, False)


def multiply(x, weight, bias):
    """A linear layer with GELU."""
    return linear.fwd_op(x, weight, bias, None, None, None, 0.0, "gelu", None, None, None, False, False)


@pytest.mark.full
@pytest.mark.parametrize(
    "function, sizes",
    [
        (attend, [(2, 3, 197, 64)] * 3),
        (normalise, [(2, 7, 192), (192,), (192,)]),
        (multiply, [(8, 192), (64, 192), (64,)]),
    ],
)
def test_binaries_are_those_of_the_kernels(function, sizes, monkeypatch):
    """Oracle: the binary that the operator compiles: its registers and its accesses of memory; no float64.

    A number that a flat kernel holds as a constant may save or cost a register, so 5 % may differ.
    """
    inputs = [torch.randn(*size).bfloat16() for size in sizes]
    (graph,) = traced(function, *inputs)
    (node,) = [n for n in graph.nodes if n.target is wrap.triton_kernel_wrapper_functional]
    tuner, values = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"]), node.kwargs["kwargs"].values()
    given = [v if isinstance(v, int) else torch.empty(v.meta["val"].shape, dtype=v.meta["val"].dtype) for v in values]
    (config,) = tuner.configs
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages, warmup=True)
    flat, own = tuner.fn.run(*given, grid=node.kwargs["grid"][0], **options), []
    monkeypatch.setattr(launch, "run", lambda k, grid, a, fixed: own.append(k.run(*a, grid=grid, warmup=True, **fixed)))
    function(*inputs)
    (own,) = own
    assert ".f64" not in flat.asm["ptx"] and flat.metadata.shared == own.metadata.shared
    for pattern in (r"ld\.global", r"st\.global", r"cp\.async\.", r"mma"):
        counts = [len(re.findall(pattern, binary.asm["ptx"])) for binary in (flat, own)]
        assert counts[0] == counts[1], (pattern, counts)
    assert abs(read(flat).registers / read(own).registers - 1) <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
def test_captured_blocks_launch_directly(training, monkeypatch):
    """Oracle: the captured block with opaque operators: bits of the output and the gradients; its launches."""
    x = torch.randn(2, 5, research.D)
    results = {}
    for direct in (False, True):
        run = Compiled(monkeypatch, direct)
        torch.manual_seed(0)
        block = research.DinoBlock().train(training)
        model = torch.nn.Sequential(block, copy.deepcopy(block)).train(training)
        with torch.set_grad_enabled(training):
            optimize(model, example=x, compile=True)
            run.kernels.clear()
            y = model(x)
            outputs = [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))] if training else [y]
        results[direct] = outputs, list(run.kernels), "".join(run.codes)
    (want, expected, before), (got, launched, after) = results.values()
    assert launched == expected and len(launched) > 4
    assert all(map(torch.equal, want, got))
    assert "torch.ops.fastvit_triton" in before and "torch.ops.fastvit_triton" not in after
