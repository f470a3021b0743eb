"""Tests of the compile backend's rewriting on captured graphs: writes to memory, dtypes, forms of calls, errors."""

import contextlib
import itertools
import logging
import operator
import re
import warnings
from pathlib import Path

import captured
import pytest
import torch
import torch.nn.functional as F
from captured import PATTERNS
from sampling import sampled
from torch import fx

import fastvit_triton
from fastvit_triton.convert import backend
from fastvit_triton.convert.graph import nodes, regions, rewrite

names = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda function: function.__name__)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Makes the CPU count as a GPU while graphs are rewritten; the rewritten calls run the references."""
    captured.as_on_gpu(monkeypatch)


@names
def test_patterns_are_rewritten(pattern):
    """Oracle: the function itself, and the functions that replace its calls."""
    shapes, expected = PATTERNS[pattern]
    tensors = captured.make(shapes)
    graph, became = captured.rewritten(captured.captured(pattern, tensors))
    assert {part for word in became for part in word.split(", ")} == expected
    assert captured.same(captured.outputs(graph, tensors), captured.outputs(pattern, tensors), torch.float32)


ROWS = {  # part i of a weight that is divided into three, and whether these are all of its rows in order
    "chunk": (lambda t, i: t.chunk(3)[i], True),
    "split": (lambda t, i: torch.split(t, 6)[i], True),
    "slices": (lambda t, i: t[6 * i : 6 * i + 6], True),
    "another order": (lambda t, i: t.chunk(3)[2 - i], False),
    "not all": (lambda t, i: t[5 * i : 5 * i + 5], False),
    "every third row": (lambda t, i: t[i::3], False),
    "a part without gradients": (lambda t, i: t.chunk(3)[i].detach() if i == 1 else t.chunk(3)[i], False),
    "other operators": (lambda t, i: t.exp().chunk(3)[i], False),
}


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_one_weight_are_not_copied(form):
    """Oracle: the function itself; `cat` is needed where the parts are not all rows in order."""
    part, is_whole = ROWS[form]

    def three(x, g, w, c):
        layers = [(part(w, i), part(c, i)) for i in range(3)]
        h = F.layer_norm(x, (captured.D,), g)
        return tuple(F.linear(h, *layer) for layer in layers)

    tensors = captured.make(((2, 3, captured.D), (captured.D,), (18, captured.D), (18,)))
    graph, became = captured.rewritten(captured.captured(three, tensors))
    assert became == {"linear"}
    assert (graph.graph.find_nodes(op="call_function", target=torch.cat) == []) == is_whole
    assert captured.same(captured.outputs(graph, tensors), captured.outputs(three, tensors), torch.float32)


def test_parts_of_other_places_are_not_taken_for_thirds():
    """Oracle: the function itself; a part of a third's length that begins elsewhere is no third."""

    def mixed(x, w):
        h = F.linear(x, w)
        parts = h[..., :6], torch.split(h, [9, 6, 3], -1)[1], h[..., 12:]
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in parts)
        gated = F.silu(h[..., :9]) * torch.split(h, [5, 9, 4], -1)[1]
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(o, w[:, :6]), F.linear(gated, w.new_ones(4, 9))

    tensors = captured.make(((2, 3, captured.D), (18, captured.D)))
    graph, _ = captured.rewritten(captured.captured(mixed, tensors))
    assert captured.same(captured.outputs(graph, tensors), captured.outputs(mixed, tensors), torch.float32)


OTHERS = [  # arguments to try after the tensor that is written to
    *(lambda x, given=given: given for given in ((2.5,), (), (0.25, 0.75), (0, 2.5), (0, 1), (1, 0, 2.5))),
    lambda x: (x,),
    lambda x: (x > 0.5, 2.5),
    lambda x: (x > 0.5, x),
    lambda x: (x, x),
]
NOT_APPLICABLE = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def in_place():
    """Every in-place operator of Python and method of Tensor that runs, with a function for its other arguments."""
    named = [getattr(operator, name) for name in sorted(vars(operator)) if re.fullmatch("i[a-z]+", name)]
    named += [name for name in sorted(dir(torch.Tensor)) if re.fullmatch(r"[a-z]\w*[a-z0-9]_|__i[a-z]+__", name)]
    for op, others in itertools.product(named, OTHERS):
        x = torch.linspace(0.1, 0.9, 12).view(2, 3, 2)
        before = x.clone()
        with contextlib.suppress(*NOT_APPLICABLE), warnings.catch_warnings(action="ignore"):
            arguments = x, *others(x)
            torch.manual_seed(0)
            getattr(x, op)(*arguments[1:]) if isinstance(op, str) else op(*arguments)
            if x.shape == before.shape and x.stride() == before.stride() and not torch.equal(x, before):
                yield op, others


IN_PLACE = {}
for op, others in in_place():
    IN_PLACE.setdefault(op, others)


def insert(graph, node, target, op):
    """Inserts a call after a node that writes into the output of another node."""
    with graph.graph.inserting_before(node.next):
        arguments = (target, *(n.node if isinstance(n, fx.Proxy) else n for n in IN_PLACE[op](fx.Proxy(target))))
        create = graph.graph.call_method if isinstance(op, str) else graph.graph.call_function
        written = create(op, arguments)
    graph.recompile()
    return written


@pytest.mark.few(32)
@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_writes_are_seen(op):
    """Oracle: eager PyTorch, which changes the tensor; its memory is named, not assumed."""
    x = torch.linspace(0.1, 0.9, 12).view(2, 3, 2)
    graph = fx.symbolic_trace(lambda x: x.view(3, 2, 2) + 1.0)
    view, add = captured.calls(graph)
    node = insert(graph, view, view, op)
    captured.annotate(graph, [x])
    fake, read = add.meta["example_value"].fake_mode, regions.memory(view.meta["example_value"])
    assert regions.written(node, fake) == read == regions.memory(next(iter(graph.graph.nodes)).meta["example_value"])
    assert regions.written(view, fake) == regions.written(add, fake) == set()


@pytest.mark.few(1)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in (1, 2))])
@names
def test_writes_between_the_calls_of_a_match(pattern, part):
    """Oracle: the graph itself, run node by node, for a write after each call into each tensor that exists by then.

    The writes pass through all in-place operators and methods. Inputs must also be left as the graph leaves them.
    """
    shapes, _ = PATTERNS[pattern]
    tensors, ops, tried = captured.make(shapes), itertools.cycle(IN_PLACE), 0
    places = list(fx.symbolic_trace(pattern).graph.nodes)
    pairs = itertools.combinations_with_replacement(range(len(places) - 2, -1, -1), 2)
    for place, target in [p for p in pairs if places[p[0]].op != "placeholder"][part::3]:
        graph, op = fx.symbolic_trace(pattern), next(ops)
        copies = list(graph.graph.nodes)
        insert(graph, copies[place], copies[target], op)
        try:
            torch.manual_seed(0)
            want = captured.outputs(graph, tensors)
            captured.annotate(graph, tensors)
        except NOT_APPLICABLE:
            continue
        tried += 1
        twin, became = captured.rewritten(graph)
        torch.manual_seed(0)
        assert captured.same(captured.outputs(twin, tensors), want, torch.float32), (op, place, target, became)
    assert tried > 0 or places[-2].prev.op == "placeholder"  # a pattern of one call


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)


def cast(tensor, dtype):
    """The tensor in this dtype; small integers and booleans of both values."""
    return tensor > 0 if dtype == torch.bool else (2 * tensor).to(dtype) if dtype == torch.int64 else tensor.to(dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern, autocast", sampled(itertools.product(PATTERNS, (False, True)), 3))
def test_every_dtype_of_every_argument(pattern, autocast):
    """Oracle: the function itself; where it raises, so may the graph. Also with all arguments in one dtype."""
    shapes, _ = PATTERNS[pattern]
    tensors, compared = captured.make(shapes), 0
    sets = [tuple(range(len(tensors))), *((i,) for i in range(len(tensors)))]
    if pattern is captured.encoder_layer:  # PyTorch's operator reads other memory if its tensors differ in dtype
        sets = sets[:1]
    for changed, dtype in itertools.product(sets, DTYPES):
        given = [cast(t, dtype) if i in changed else t for i, t in enumerate(tensors)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            try:
                want = captured.outputs(pattern, given)
                graph = captured.captured(pattern, given)
            except (RuntimeError, TypeError, ValueError):
                continue
            twin, became = captured.rewritten(graph)
            got = captured.outputs(twin, given)
        coarse = [t.dtype for t in given if t.is_floating_point()] + [torch.bfloat16] * autocast + [torch.float32]
        compared += 1
        assert captured.same(got, want, max(coarse, key=lambda d: torch.finfo(d).eps)), (changed, dtype, became)
    assert compared > 0


def by_keywords(graph):
    """The graph with all arguments of PyTorch functions given by keyword, so far as these functions allow it."""
    for node in captured.calls(graph):
        kind = nodes.kind(node)
        if node.op == "call_function" and kind is not None and node.target.__module__ != "_operator":
            given = nodes.read(node)
            extra = [name[1:] for name in nodes.ARGUMENTS[kind] if name.startswith("*") and not given.get(name[1:])]
            node.args, node.kwargs = (), {name: value for name, value in given.items() if name not in extra}
    graph.recompile()


@names
def test_keyword_arguments_are_read_like_positional_ones(pattern):
    """Oracle: the graph with positional arguments, result and replacements."""
    shapes, _ = PATTERNS[pattern]
    tensors = captured.make(shapes)
    graph = captured.captured(pattern, tensors)
    _, expected = captured.rewritten(graph)
    by_keywords(graph)
    assert all(not n.args for n in captured.calls(graph) if n.target in (F.linear, F.layer_norm, torch.matmul))
    twin, became = captured.rewritten(graph)
    assert became == expected
    assert captured.same(captured.outputs(twin, tensors), captured.outputs(pattern, tensors), torch.float32)


def test_calls_with_other_arguments_are_not_read():
    """Oracle: `axis`, another name of `dim` in PyTorch; a view of another dtype; results written into a tensor."""
    tensors = captured.make(((2, 3, 4, 4),))

    def function(x):
        y = torch.unbind(x, axis=1)[0]
        return torch.softmax(y, axis=1), x.view(torch.int32).view(2, 12, 4), torch.add(y, y, out=torch.empty_like(y))

    graph = captured.captured(function, tensors)
    kinds = {node.name: nodes.kind(node) for node in captured.calls(graph)}
    by_name = {node.name: node for node in captured.calls(graph)}
    assert nodes.read(by_name["unbind"])["dim"] == nodes.read(by_name["softmax"])["dim"] == 1
    assert (kinds["view"], kinds["view_1"], kinds["add"]) == (None, "reshape", None)


def test_arguments_are_read_by_name_only():
    """Oracle: no code of the package's rewriting reads an argument of a node by its position or its raw keyword."""
    for path in (Path(fastvit_triton.__file__).parent / "convert" / "graph").glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if re.search(r"\.(args|kwargs)\[", line)]
        assert not lines, path


def resized(x, w, b):
    """Bicubic resizing, whose meta function reads sizes as integers, before a LayerNorm and a linear layer."""
    x = F.interpolate(x, size=(4, 4), mode="bicubic")
    return F.linear(F.layer_norm(x.flatten(2), (16,)), w, b)


def test_rewriting_adds_no_guards():
    """Oracle: one graph serves every batch of a function that is captured with a dynamic batch."""
    seen = []

    def rewritten(graph, given):
        shape_env = torch._guards.TracingContext.get().fake_mode.shape_env
        before = list(shape_env.guards), dict(shape_env.replacements)
        seen.append({row.became for row in backend.rewrite(graph).rows})
        assert (list(shape_env.guards), dict(shape_env.replacements)) == before
        return graph.forward

    compiled = torch.compile(resized, backend=rewritten, fullgraph=True)
    for batch in (2, 3, 5):
        tensors = (torch.randn(batch, 3, 8, 8), torch.randn(8, 16), torch.randn(8))
        torch._dynamo.mark_dynamic(tensors[0], 0)
        torch.testing.assert_close(compiled(*tensors), resized(*tensors), rtol=1e-5, atol=1e-5)
    assert len(seen) == 1 and seen[0] - {None}


def broken(self, node):
    """A step of the rewriting that fails half-way."""
    self.graph.erase_node(list(self.graph.nodes)[-1])
    raise KeyError("a bug")


def checkpointed(x):
    """A checkpointed pattern, and one beside it."""

    def hidden(x):
        return F.gelu(F.linear(F.layer_norm(x, (captured.D,)), x[0]))

    return torch.utils.checkpoint.checkpoint(hidden, x, use_reentrant=False) + hidden(x)


def test_a_failed_rewriting_leaves_the_graph_to_the_compiler(monkeypatch, caplog):
    """Oracle: the captured graph, node for node, for an error in the last of two subgraphs; and one logged sentence."""
    monkeypatch.setattr(backend.log, "handlers", [])
    x, seen = torch.randn(2, captured.D, captured.D), []

    def compiler(graph, given):
        def inner(passed, _):
            assert passed is graph
            seen.append([part.code for part in (graph, *graph.children())])
            return graph.forward

        seen.append([part.code for part in (graph, *graph.children())])
        return backend.backend(graph, given, inner=inner)

    def run():
        torch._dynamo.reset()
        with caplog.at_level(logging.INFO, backend.log.name):
            assert captured.same([torch.compile(checkpointed, backend=compiler)(x)], [checkpointed(x)], torch.float32)

    run()
    assert seen[0] != seen[1] and "converted" in caplog.text
    caplog.clear()
    made = rewrite.Rewriter._hand_on_statistics
    calls = itertools.count()
    monkeypatch.setattr(
        rewrite.Rewriter, "_hand_on_statistics", lambda self: broken(self, None) if next(calls) else made(self)
    )
    run()
    assert seen[2] == seen[3] == seen[0] and next(calls) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.fullmatch(r"graph \[\d+/\d+\] is left to Inductor: .* KeyError\('a bug'\)", record.getMessage())
    torch._dynamo.reset()
