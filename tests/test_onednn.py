"""Tests of oneDNN's products on a CPU: results, when they run, what is cached of frozen models."""

import copy
import gc
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from agreement import normal
from budget import Budget, assert_within_budget, results, telling
from catalogue import COMMON, REPEATS, build, inputs, outputs
from sampling import marked
from test_replay import CHANGES, again
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_map

import fastvit_triton
from benchmarks import host
from fastvit_triton import create_model, freeze, optimize, revert, unfreeze
from fastvit_triton.engine import freeze as freeze_file
from fastvit_triton.engine import ways
from fastvit_triton.engine.body import project
from fastvit_triton.engine.freeze import PROGRAMS
from fastvit_triton.engine.replay.calls import Recorded
from fastvit_triton.kernels import linear, measured, mlp, onednn, settings
from fastvit_triton.kernels.activation import apply_activation
from fastvit_triton.kernels.backend import using_backend

CPU = torch.device("cpu")
EVERY_PRODUCT = {"float32": dict.fromkeys(onednn.PHASES, 0.0)}
SETTINGS = dict(img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=5)
CASES = [
    pytest.param(op, case, id=f"{op.name}-{name}")
    for op in (linear.OP, mlp.OP)
    for name, case in op.ragged.items()
    if not name.startswith("empty")
]
DTYPES = [d for d in onednn.DTYPES if onednn.why_not(CPU, d) is None]
SAMPLE = [name for name in COMMON if name not in REPEATS][::4]

pytestmark = pytest.mark.skipif(onednn.why_not(CPU, torch.float32) is not None, reason="PyTorch has no oneDNN here")


def _wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.fixture
def calls(monkeypatch):
    """The operands' shapes and post-operations of each product that runs by oneDNN."""
    found = []
    product = onednn._call

    def call(x, weight, bias, activation=None, other=None, operation=""):
        found.append((tuple(x.shape), weight.is_mkldnn, activation or operation))
        return product(x, weight, bias, activation, other, operation)

    for dtype in DTYPES:  # not counted
        onednn.why_not(CPU, dtype)
        for name in (None, "packed", *onednn.BINARY, *onednn.POST_OPERATIONS):
            onednn.refusal(dtype, name)
    monkeypatch.setattr(onednn, "_call", call)
    return found


@pytest.fixture
def vit():
    """A ViT with LayerScale whose weights are random, and images."""
    torch.manual_seed(0)
    model = normal(create_model("vit_tiny_patch16_224", **SETTINGS, init_values=0.5).eval(), 0.2)
    return model, torch.randn(2, 3, 32, 32)


@pytest.mark.few(21)
@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op, case", CASES)
def test_products_equal_float64(op, case, dtype, calls):
    """Oracle: the reference in float64, within its `Budget`, for outputs and gradients; also without gradients."""
    budget = Budget(op, case, dtype)
    with using_backend("onednn"):
        got = results(op.run, budget.arguments)
        with torch.no_grad():
            alone = op.run(**budget.arguments)
    assert len(calls) >= 4  # forward twice, and two products in the backward pass
    assert max(budget.ratios(got).values()) <= 1
    without = {name: value for name, value in got.items() if name.startswith("gradient")} | {"output 0": alone.double()}
    assert max(budget.ratios(without).values()) <= 1


@pytest.mark.few(7)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in COMMON])
def test_models_equal_the_original(name, calls):
    """Oracle: the original in float64, and PyTorch's own error in float32; training, inference and frozen."""
    narrow, given32 = build(name, torch.float32), inputs(name, torch.float32)
    wide, given = copy.deepcopy(narrow).double(), tree_map(_wide, given32)

    def found(model, given, train=True):
        with torch.set_grad_enabled(train):
            y = outputs(model, given)
        if not train:
            return {"output": y.double()}
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view_as(y)
        grads = torch.autograd.grad((y * weights).sum(), parameters.values(), allow_unused=True)
        return {"output": y.detach().double()} | {
            n: g.double() for n, g in zip(parameters, grads, strict=True) if g is not None
        }

    truth, own = found(wide, given), found(narrow, given32)
    optimize(narrow)
    with using_backend("onednn"):
        got = found(narrow, given32)
        trained = len(calls)
        alone = found(narrow, given32, train=False)
        freeze(narrow)
        frozen = found(narrow, given32, train=False)
    assert trained and len(calls) > trained
    assert_within_budget(got, own, truth)
    for result in (alone, frozen):
        assert_within_budget(result, {"output": own["output"]}, {"output": truth["output"]})


def test_gradients_of_gradients():
    """Oracle: float64, by PyTorch: the gradient of a squared gradient of x, W and b.

    Tolerance: eight times its change when each number is multiplied by 1 ± 2⁻²⁴, for sums of up to ten terms.
    """
    operands = [torch.randn(*shape).double() for shape in ((2, 5, 8), (6, 8), (6,))]

    def second(product, operands):
        operands = [t.detach().requires_grad_() for t in operands]
        first = torch.autograd.grad(product(*operands).tanh().square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), operands)

    truth = second(F.linear, operands)
    moved = second(F.linear, [t * (1 + 2**-24 * torch.randn_like(t).sign()) for t in operands])
    got = second(onednn.product, [t.float() for t in operands])
    for one, change, want in zip(got, moved, truth, strict=True):
        assert (one - telling(want)).norm() <= 8 * (change - want).norm()


def test_leading_axes_and_strides(calls):
    """Oracle: PyTorch in float64: vectors, four axes, transposed and sliced operands, no bias, an empty batch."""
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for x in (torch.randn(8), torch.randn(2, 3, 4, 8), torch.randn(8, 5).t(), torch.randn(5, 16)[:, ::2]):
        for w, b in ((weight, bias), (weight, None), (torch.randn(8, 6).t(), bias)):
            want = F.linear(x.double(), w.double(), None if b is None else b.double())
            got = onednn.product(x, w, b)
            assert got.shape == want.shape and (got - telling(want)).norm() <= 8 * 2**-24 * 8 * want.norm()
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            grads = torch.autograd.grad(onednn.product(*leaves, b).sum(), leaves)
            wide = [t.detach().double().requires_grad_() for t in (x, w)]
            truth = torch.autograd.grad(F.linear(*wide).sum(), wide)
            for grad, exact in zip(grads, truth, strict=True):
                assert grad.shape == exact.shape and (grad - exact).norm() <= 8 * 2**-24 * 24 * exact.norm()
    assert onednn.product(torch.randn(0, 8), weight, bias).shape == (0, 6)


def test_errors_of_single_products():
    """Oracle: at most four times the error of PyTorch's product against float64, for shapes of ViT-S and ViT-B."""
    ratios = {}
    for rows, K, F_ in ((1, 384, 384), (197, 384, 1536), (197, 1536, 384), (50, 768, 2304), (50, 3072, 768)):
        x, weight = torch.randn(rows, K), torch.randn(F_, K)
        want = telling(F.linear(x.double(), weight.double()))
        own = (F.linear(x, weight) - want).norm()
        ratios[rows, K, F_] = float((onednn.product(x, weight) - want).norm() / own)
    assert max(ratios.values()) <= 4, ratios


class TensorOfAnotherPackage(torch.Tensor):
    """A subclass, such as a sharded or quantised tensor."""


def test_subclasses_of_tensors_see_pytorch(calls):
    """Oracle: no call for a subclass as x or as weight, where plain tensors make one."""
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    with using_backend("onednn"):
        for a, b in (
            (x, weight),
            (x.as_subclass(TensorOfAnotherPackage), weight),
            (x, weight.as_subclass(torch.Tensor)),
        ):
            linear.linear(a, b)
        linear.linear(x, weight.as_subclass(TensorOfAnotherPackage))
    assert len(calls) == 2


def _traced(model, x):
    return torch.jit.trace(model, x, check_trace=False)(x)


def _exported(model, x):
    return torch.export.export(model, (x,)).module()(x)


def _compiled(model, x):
    return torch.compile(model, backend="eager")(x)


def _watched(model, x):
    with BaseTorchDispatchMode():
        return model(x)


def _disabled(model, x):
    torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags, which warns on a CPU
    try:
        return model(x)
    finally:
        torch._C._set_mkldnn_enabled(True)


def _vmapped(model, x):
    return torch.func.vmap(lambda one: model(one[None])[0])(x)


def _differentiated(model, x):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[0]


def _in_float64(model, x):
    return copy.deepcopy(model).double()(x.double())


def _faked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))
    return model(x) * 0 + 1.0  # nothing to compare


ELSEWHERE = [_traced, _exported, _compiled, _watched, _disabled, _vmapped, _differentiated, _in_float64, _faked]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of traces and transforms
@pytest.mark.parametrize("run", ELSEWHERE, ids=lambda run: run.__name__)
def test_traces_modes_and_transforms_see_pytorch(run, vit, calls):
    """Oracle: no call of oneDNN's operator, where a plain call makes eight."""
    model, x = vit
    with using_backend("onednn"), torch.no_grad():
        model(x)
        assert len(calls) == 8
        calls.clear()
        run(model, x)
    inside = [] if run is not _faked else calls[:8]
    assert calls == inside


@pytest.mark.few(1)
@pytest.mark.parametrize("ours", [True, False])
def test_dynamo_traces_models_on_this_cpu(ours, vit, monkeypatch):
    """Oracle: the model in eager; the row is that of this machine's CPU, as outside of tests, so a file names it."""
    monkeypatch.setattr(settings, "cpu_row", None)
    model, x = vit if ours else (build("timm_vit", torch.float32).eval(), inputs("timm_vit", torch.float32))
    with torch.no_grad():
        want = model(x)
        optimize(model)
        for function in (measured.cpu_name, onednn.rows, onednn._row_of):
            function.cache_clear()
        got = torch.compile(model, backend="eager", fullgraph=True)(x)
        truth = copy.deepcopy(model).double()(x.double())
    assert_within_budget({"output": got}, {"output": want}, {"output": truth})


def test_backend_torch_is_eager_bit_for_bit(vit, calls):
    """Oracle: the model's own forward in PyTorch; no call of oneDNN's operator."""
    model, x = vit
    plain = copy.deepcopy(model)
    revert(plain)
    for module in plain.modules():
        module.__dict__.pop("forward", None)
    with onednn.using_row(EVERY_PRODUCT), using_backend("torch"):
        assert torch.equal(model(x), telling(plain(x))) and not calls


def test_an_unknown_cpu_runs_pytorch(vit, calls):
    """Oracle: no call without a row; with one, calls for products that are large enough, by phase."""
    model, x = vit
    with torch.no_grad():
        model(x)
        assert not calls
        with onednn.using_row(EVERY_PRODUCT):
            model(x)
        assert len(calls) == 8
        calls.clear()
        with onednn.using_row({"float32": {"inference": 1e9}, "bfloat16": {"inference": 0.0}}):
            model(x)
        assert not calls
    with onednn.using_row({"float32": {"training": 0.0}}):
        model(x)
        assert len(calls) == 8
        calls.clear()
        with torch.no_grad():
            model(x)
    assert not calls


@pytest.mark.parametrize("forced, count", [("onednn", 8), ("plain", 0), ("fused", 0)])
def test_a_context_decides(forced, count, vit, calls):
    """Oracle: the number of calls; kernels that cannot run leave PyTorch's operators."""
    model, x = vit
    with settings.forcing(forced), onednn.using_row(EVERY_PRODUCT), torch.no_grad():
        model(x)
    assert len(calls) == count


def test_frozen_models_pack_once_and_follow_their_weights(vit, calls):
    """Oracle: the model in float64 after each change; the packed operands of the calls."""
    model, x = vit
    freeze(model)

    def check(packed):
        calls.clear()
        with using_backend("onednn"), torch.no_grad():
            got = model(x)
        with using_backend("torch"), torch.no_grad():
            own, want = model(x), copy.deepcopy(model).double()(x.double())
        assert [call[1] for call in calls] == [packed] * 8
        assert_within_budget({"output": got}, {"output": own}, {"output": want})

    check(True)
    before = {name: one.folded for store in freeze_file._frozen.values() for name, one in store.items()}
    check(True)
    after = {name: one.folded for store in freeze_file._frozen.values() for name, one in store.items()}
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(2)
        model.blocks[1].ls2.gamma.mul_(3)
        model.blocks[1].mlp.fc1.bias.add_(1)
    check(True)
    model.blocks[0].mlp.fc2 = nn.Linear(128, 32).eval()
    freeze(model)
    check(True)
    unfreeze(model)
    check(False)
    assert not any(module in freeze_file._frozen for module in model.modules())


def replayed(model):
    """The records of a model's calls."""
    programs = [module.__dict__[PROGRAMS] for module in model.modules() if PROGRAMS in module.__dict__]
    return [one for each in programs for one in each.found.values() if type(one) is Recorded]


REPLAYED = [("ours", dtype, None) for dtype in DTYPES] + [("timm", torch.float32, None)]
REPLAYED += [("ours", torch.float32, precision) for precision in onednn.PRECISIONS]


@pytest.mark.parametrize("kind, dtype, precision", REPLAYED)
def test_replays_equal_the_call(kind, dtype, precision, monkeypatch):
    """Oracle: the same calls without replays, bit by bit, each with other images, weights and context."""
    library = {"ours": create_model, "timm": timm.create_model}[kind]
    model = library("vit_tiny_patch16_224", **SETTINGS, init_values=0.5).eval().to(dtype)
    if kind == "timm":
        optimize(model)
    if precision is not None:
        freeze(model, precision=precision)
    with using_backend("onednn"), torch.no_grad():
        contexts = (False, True) if dtype == torch.float32 and torch.bfloat16 in DTYPES else (False,)
        for number, autocast in enumerate(contexts, 1):
            for _ in range(4):
                x = torch.randn(2, 3, 32, 32, dtype=dtype)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    got = model(x)
                    monkeypatch.setattr(ways, "REPLAYS", False)
                    assert torch.equal(got, telling(model(x)))
                    monkeypatch.setattr(ways, "REPLAYS", True)
            assert len(replayed(model)) == number * SETTINGS["depth"]
            for parameter in model.parameters():
                parameter.mul_(1.125)


@pytest.mark.full
def test_captured_blocks_are_replayed(monkeypatch):
    """Oracle: the same calls without replays, bit by bit, each with other tokens and weights, also where none pays."""
    model = host.captured(2).eval()
    for row in (EVERY_PRODUCT, {"float32": {"inference": 1e12}}):
        with onednn.using_row(row), torch.no_grad():
            model.blocks(torch.randn(2, 3, 16))  # the originals run while these sizes are captured
            for _ in range(4):
                x = torch.randn(2, 3, 16)
                got = model.blocks(x)
                monkeypatch.setattr(ways, "REPLAYS", False)
                assert torch.equal(got, telling(model.blocks(x)))
                monkeypatch.setattr(ways, "REPLAYS", True)
                for parameter in model.parameters():
                    parameter.mul_(1.125)
        assert len(replayed(model)) == 2 * (1 + (row is not EVERY_PRODUCT))


@pytest.mark.parametrize("change", marked(CHANGES, pytest.mark.full, lambda c: c not in ("scale", "transposed")))
@pytest.mark.parametrize("frozen", [False, True])
def test_changes_after_a_replay_take_effect(change, frozen):
    """Oracle: a copy of the block that never replays, changed in the same way; writes without a trace need `freeze`."""
    block = create_model("vit_tiny_patch16_224", **SETTINGS | dict(embed_dim=16)).blocks[0].eval()
    other, x = copy.deepcopy(block), torch.randn(2, 5, 16)
    if frozen:
        freeze(block)
    with using_backend("onednn"), torch.no_grad():
        for _ in range(3):
            again(block, x, False)
        assert len(replayed(block)) == 1
        for each in (block, other):
            torch.manual_seed(2)
            CHANGES[change](each)
        if frozen:
            freeze(block)
            freeze(other)
        want = again(other, x, False, enabled=False)
        for _ in range(3):
            assert all(map(torch.equal, again(block, x, False), want))


def test_a_replay_ends_where_onednn_is_disabled(vit):
    """Oracle: PyTorch's operators, bit by bit, while it is disabled; oneDNN's again after it."""
    model, x = vit
    with using_backend("onednn"), torch.no_grad():
        for _ in range(3):
            want = model(x)
        torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags, which warns on a CPU
        try:
            disabled = model(x)
            with using_backend("torch"):
                assert torch.equal(disabled, model(x))
        finally:
            torch._C._set_mkldnn_enabled(True)
        assert torch.equal(model(x), telling(want)) and not torch.equal(disabled, want)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_reduced_precision_of_frozen_models(precision, vit, calls):
    """Oracle: for bf16 the error of the model in bfloat16; for int8 the model whose linear layers round in float64.

    At most one value of int8 in 1,200 may be rounded to its other neighbour: rounding changes n values by √(n / 12)
    steps in all, and rounding f of them to the other side changes √f steps; √(12 / 1,200) = 0.1.
    Only frozen models in inference are reduced, also on a CPU without a row; outputs and the residual stay float32.
    """
    model, x = vit
    truth = copy.deepcopy(model).double()

    def rounded(layer, inputs, y):
        """Equations (3) and (4), in float64."""
        size, weight = inputs[0].abs().amax(-1, keepdim=True) / 127, layer.weight.abs().amax(1) / 127
        product = F.linear((inputs[0] / size).add(0.5).floor(), (layer.weight / weight[:, None]).round())
        return product * size * weight + layer.bias

    with torch.no_grad():
        want = truth(x.double())
        own = copy.deepcopy(model).bfloat16()(x.bfloat16())
        freeze(model, precision=precision)
        got = model(x)
        assert got.dtype == torch.float32
        if precision == "bf16":
            assert [packed for _, packed, _ in calls] == [True] * 8
            assert_within_budget({"output": got.double()}, {"output": own.double()}, {"output": want}, torch.bfloat16)
        else:
            plain = {n: m for n, m in truth.named_modules() if isinstance(m, nn.Linear) and n != "head"}
            for block in truth.blocks:  # the LayerScale is rounded with the weight
                for layer, scale in ((block.attn.proj, block.ls1), (block.mlp.fc2, block.ls2)):
                    layer.weight.mul_(scale.gamma[:, None])
                    layer.bias.mul_(scale.gamma)
                    scale.gamma.fill_(1)
            for layer in plain.values():
                layer.register_forward_hook(rounded)
            exact = truth(x.double())
            step = float((exact - want).norm())  # a value at a border between two numbers may be rounded to the other
            assert float((got - telling(exact)).norm()) <= 0.1 * step
        unfreeze(model)
        calls.clear()
        assert (model(x) - want).norm() < (got - want).norm() and not calls
    freeze(model, precision=precision)
    model(x).sum().backward()  # in float32
    assert model.blocks[0].mlp.fc1.weight.grad is not None and not calls


@pytest.mark.few(6)
@pytest.mark.parametrize("backend", ["auto", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("precision", onednn.PRECISIONS)
def test_a_frozen_model_may_change_its_dtype(precision, dtype, backend, vit):
    """Oracle: the model that was not frozen, within the budget of its dtype around float64."""
    model, x = vit
    truth, own = copy.deepcopy(model).double(), copy.deepcopy(model).to(dtype)
    with using_backend(backend), torch.no_grad():
        want = {"output": truth(x.double())}
        freeze(model, precision=precision)
        for _ in range(2):
            model(x)
        model.to(dtype)
        for _ in range(3):  # as it is, recorded and replayed
            got = model(x.to(dtype))
    assert got.dtype == dtype
    assert_within_budget({"output": got.double()}, {"output": own(x.to(dtype)).detach().double()}, want, dtype)


def test_code_for_few_numbers_of_rows(monkeypatch, calls):
    """Oracle: the products that oneDNN runs: those of the first numbers of rows, also when these come again."""
    monkeypatch.setattr(onednn, "MAX_ROWS", 3)
    monkeypatch.setattr(onednn, "_rows", set())
    weight, ran = torch.randn(5, 8), []
    with using_backend("onednn"), torch.no_grad():
        for rows in (1, 2, 3, 4, 2, 5, 3):
            calls.clear()
            linear.linear(torch.randn(rows, 8), weight)
            ran.append(bool(calls))
    assert ran == [True, True, True, False, True, False, True]


@pytest.mark.parametrize("backend", ["auto", "onednn"])
def test_weights_of_a_frozen_model_may_be_swapped(backend, vit):
    """Oracle: the model with the other weight, which was not frozen; PyTorch swaps no tensor with weak references."""
    model, x = vit
    with using_backend(backend), torch.no_grad():
        freeze(model)
        for _ in range(3):
            before = model(x)
        weight = model.blocks[0].mlp.fc1.weight
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))
        want = copy.deepcopy(model)(x)
        for _ in range(3):
            assert torch.allclose(model(x), want, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(before, want, rtol=1e-2)


@pytest.mark.parametrize("activation", [None, "gelu", "quick_gelu"])
def test_post_operations_in_every_combination(activation):
    """Oracle: float64 by PyTorch: activation, then gate, then residual; eight roundings of a sum of nine terms."""
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    ends = torch.randn(5, 6), torch.randn(5, 6)
    for residual, gate in itertools.product((None, ends[0]), (None, ends[1])):
        want = F.linear(x.double(), weight.double(), bias.double())
        want = want if activation is None else apply_activation(want, activation)
        want = want if gate is None else want * gate
        want = want if residual is None else want + residual
        got = onednn.product(x, weight, bias, activation, residual, gate)
        assert (got - telling(want)).norm() <= 8 * 2**-24 * 9 * want.norm(), (residual is None, gate is None)


def test_rows_of_zeros_in_int8():
    """Oracle: the bias, exactly, for rows of x and of the weight that are zero; NaN stays in its row."""
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    x[1], weight[2], x[3, 0] = 0, 0, torch.nan
    y = onednn.product(x, onednn.pack(weight, bias, None, 4, "int8"))
    assert torch.equal(y[1], telling(bias)) and torch.equal(y[:3, 2], bias[2].expand(3))
    assert y[3].isnan().any() and y[:3].isfinite().all()


def test_only_layers_that_are_frozen_are_packed(calls):
    """Oracle: the packed operands of three projections as one product, or, after one was replaced, of none."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).eval()
    freeze(layers)
    x = torch.randn(2, 8)
    with torch.no_grad():
        project(x, tuple(layers), way="onednn")
        layers[1] = nn.Linear(8, 8).eval()  # its weights are not final: they may be written through `.data`
        got = project(x, tuple(layers), way="onednn")
        layers[1].weight.data.mul_(2)
        changed = project(x, tuple(layers), way="onednn")
    assert [packed for _, packed, _ in calls] == [True, *[False] * 6]
    assert not torch.equal(changed[:, 8:16], telling(got[:, 8:16])) and torch.equal(changed[:, :8], got[:, :8])


@pytest.mark.full
def test_another_precision_replaces_packed_weights(vit):
    """Oracle: the number of packed weights: 8 linear layers in whatever precision; none after `unfreeze`."""
    model, x = vit

    def kept():
        stores = [freeze_file._frozen.get(module, {}) for module in model.modules()]
        return sum(isinstance(one.folded, onednn.PackedWeight) for store in stores for one in store.values())

    gc.collect()  # models of other tests
    with using_backend("onednn"), torch.no_grad():
        for precision in ("float32", "int8", "bf16", "bf16"):
            freeze(model, precision=precision)
            model(x)
            assert kept() == 8 and settings.reduced == (precision != "float32")
        unfreeze(model)
    assert kept() == 0 and not settings.reduced


def test_a_precision_that_cannot_run_is_refused(vit, monkeypatch):
    """Oracle: one sentence with the reason; the model is not frozen by it."""
    model, _ = vit
    for wrong, message in (("fp8", "use one of float32, bf16, int8"), (None, "precision is None")):
        with pytest.raises(ValueError, match=message):
            freeze(model, precision=wrong)
    with pytest.raises(ValueError, match="is for models in float32 on a CPU, this one is bfloat16 on cpu"):
        freeze(copy.deepcopy(model).bfloat16(), precision="int8")
    monkeypatch.setattr(onednn, "refusal", lambda *_: "it is broken")
    with pytest.raises(ValueError, match="cannot run here: it is broken"):
        freeze(model, precision="int8")
    assert not freeze_file.is_frozen(model)


def test_packed_weights_are_not_copied_or_saved(vit, calls):
    """Oracle: equal outputs of a deep copy, a pickle, a saved file and shared memory; packed again where frozen."""
    model, x = vit
    with using_backend("onednn"), torch.no_grad():
        freeze(model)
        want = copy.deepcopy(model).double()(x.double())
        with using_backend("torch"):
            own = model(x)
        model(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        for twin in (*copies, model.share_memory()):
            calls.clear()
            got = twin(x)
            assert_within_budget({"output": got}, {"output": own}, {"output": want})
            assert {call[1] for call in calls} == {twin is model}
            calls.clear()
            freeze(twin)
            twin(x)
            assert {call[1] for call in calls} == {True}


def test_gradients_of_frozen_models(vit, calls):
    """Oracle: the gradient of the images in float64; packed weights have none, so they do not run."""
    model, x = vit
    freeze(model.requires_grad_(False))

    def found(model, x):
        x = x.clone().requires_grad_()
        y = model(x)
        return {"output": y.detach(), "images": torch.autograd.grad(y.sin().sum(), x)[0]}

    with using_backend("torch"):
        truth, own = found(copy.deepcopy(model).double(), x.double()), found(model, x)
    with using_backend("onednn"):
        got = found(model, x)
    assert_within_budget(got, own, truth)
    assert calls and not any(call[1] for call in calls)


def test_the_same_bits_every_call(vit):
    """Oracle: outputs and gradients of three calls are equal."""
    model, x = vit
    found = []
    with using_backend("onednn"):
        for _ in range(3):
            y = model(x)
            found.append([telling(y.detach()), *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_autocast_and_other_dtypes(vit, calls):
    """Oracle: the dtype of PyTorch's output under autocast, and its error against float64."""
    model, x = vit
    if torch.bfloat16 not in DTYPES:
        pytest.skip("this CPU has no bfloat16 products")
    truth = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        with using_backend("torch"):
            own = model(x)
        with using_backend("onednn"):
            got = model(x)
            got.float().square().sum().backward()
    assert got.dtype == own.dtype and len(calls) > 8
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.blocks.parameters())
    got, own, truth = ({"output": y.detach().double()} for y in (got, own, truth))
    assert_within_budget(got, own, truth, torch.bfloat16)


def test_a_wrong_or_missing_operator_is_not_used(vit, calls, monkeypatch):
    """Oracle: results of PyTorch, and a reason, if the operator raises or gives a wrong result."""
    model, x = vit
    want = model(x)
    for broken, reason in ((lambda *_, **__: torch.zeros(16, 16), "is wrong by"), (None, "fails")):
        monkeypatch.setattr(onednn, "_call", broken or (lambda *_, **__: torch.ops.mkldnn.gone))
        onednn.refusal.cache_clear()
        with using_backend("onednn"):
            assert reason in onednn.why_not(CPU, torch.float32)
            assert torch.equal(model(x), telling(want))
    onednn.refusal.cache_clear()


def test_a_user_s_change_is_called(vit, calls):
    """Oracle: the hook's count, and three products of the block fewer while its layers are hooked or replaced."""
    model, x = vit
    seen = []
    with using_backend("onednn"), torch.no_grad():
        handle = model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
        model(x)
        assert len(seen) == 1 and len(calls) == 7
        handle.remove()
        calls.clear()
        model.blocks[0].attn.proj = nn.Sequential(nn.Linear(32, 32))
        model(x)
        assert len(calls) == 7
        calls.clear()
        real = F.linear
        F.linear = lambda *a, **k: seen.append(2) or real(*a, **k)
        try:
            model(x)
        finally:
            F.linear = real
    assert 2 in seen


def test_only_one_file_calls_the_operator():
    """Oracle: the sources; a call elsewhere would lose gradients without an error."""
    root = Path(fastvit_triton.__file__).parent
    found = [path.name for path in root.rglob("*.py") if re.search(r"ops\.mkldnn|_linear_pointwise", path.read_text())]
    assert found == ["onednn.py"]
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "").sum().backward()
    assert weight.grad is None  # why


FILES = "kernels block attach models convert freeze train own_objects recipes"


@pytest.mark.full
def test_other_tests_pass_with_every_product_by_onednn():
    """Oracle: the tests of ops, layers, models, conversion and training, with the switch of the environment."""
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", *files]
    command += ["-k", "not report_prints"]  # which names the switch
    run = subprocess.run(command, env=os.environ | {"FASTVIT_TRITON_BACKEND": "onednn"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
