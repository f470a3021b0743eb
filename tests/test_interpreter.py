"""Tests of the kernels in Triton's interpreter, forward and every gradient. Oracle: float64."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
import triton.language as tl
from budget import assert_within_budget, converted, largest, leaves, outside, results
from interpreter import interpreting, poisoned
from sampling import sampled
from triton import jit
from triton.runtime.errors import InterpreterError

from benchmarks.launch_recorder import record
from fastvit_triton import fold, kernels
from fastvit_triton.kernels import OPS, attention, attention_qkv, depthwise, layer_norm, linear, mlp, window
from fastvit_triton.kernels.activation import ACTIVATIONS
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import TUNED

pytestmark = pytest.mark.usefixtures("always_folded")


def with_statistics(function):
    """Two linear layers by `function`; the LayerNorm of the second uses the row statistics that the first returns."""

    def run(x, weight, **rest):
        y, stats = function(x, weight, stats=layer_norm.row_stats(x), return_stats=True, **rest)
        return y, function(y, weight.T.contiguous(), norm=(None, None, 1e-6), stats=stats)

    return run


# models ask for no statistics of a gated layer; the reference computes them from x
STATS = dataclasses.replace(
    linear.OP,
    name="linear_with_statistics",
    run=with_statistics(linear.linear),
    reference=with_statistics(linear.reference),
    cases={name: case for name, case in linear.OP.cases.items() if "gated" not in case},
    ragged={"odd": linear.OP.ragged["odd"], "rms": linear.OP.ragged["rms"]},
)
KERNELS = [op for op in (*OPS, STATS) if op.ragged]
EVERY = {f"{op.name}-{name}": (op, case) for op in KERNELS for name, case in op.ragged.items()}
# cases of a second or more, which do not run by default
LONG = ["depthwise-many_blocks", "patch_embed-registers", "patch_embed-patch14", "attention-vit", "attention_qkv-vit"]
LONG += [f"window_attention-{name}" for name in "padded padded_last swin swin384 swinv2 swinv2_256 narrow".split()]
UNLESS_LONG = [pytest.param(*EVERY[name], marks=pytest.mark.full if name in LONG else (), id=name) for name in EVERY]
FIRST = {op.name: name for name, (op, _) in reversed(EVERY.items()) if name not in LONG}.values()


def typed(dtype, turn):
    """By default the first case of each op runs in float32, and one in 24 in each dtype; in float16 many are fast."""
    for i, name in enumerate(EVERY):
        shown = name not in LONG and (i % 24 == 8 * turn or (dtype == torch.float32 and name in FIRST))
        fast = dtype == torch.float16 and name not in LONG and (name in FIRST or i % 3 == turn)
        marks = [pytest.mark.fast] * fast + [pytest.mark.full] * (not shown)
        yield pytest.param(dtype, *EVERY[name], marks=marks, id=f"{dtype}-{name}")


TYPED = [*typed(torch.float32, 0), *typed(torch.float16, 1), *typed(torch.bfloat16, 2)]


@pytest.mark.parametrize("dtype, op, case", TYPED)
def test_kernel_equals_float64(dtype, op, case):
    """Oracle: the reference in float64, within its `Budget`; new memory is filled with NaN."""
    assert outside(op, case, dtype) == []


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.fast)], ids=str)
def test_every_activation_equals_float64(name, dtype):
    """Oracle: as above, for pre-activations of magnitude 10, so that all pieces of an activation occur."""
    for op, case in ((depthwise.OP, dict(B=2, H=4, W=9, C=8, K=3)), (linear.OP, dict(B=1, N=9, K=16, F=8))):
        x = op.inputs(case, dtype, "cpu")["x"].detach() * 5
        assert outside(op, case, dtype, x=x.requires_grad_(), activation=name) == []


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of 0 · ∞
def test_pieces_of_activations_meet_as_in_pytorch():
    """Oracle: PyTorch's values and gradients at the ends of each piece, and of NaN and infinity."""
    ends = torch.tensor([-3.0, 3.0, 0.0, 6.0, -2.9999998, 2.9999998, math.nan, math.inf, -math.inf])
    for name in ("relu", "hardswish", "relu6"):
        got, want = ends.clone().requires_grad_(), ends.clone().requires_grad_()
        with interpreting():
            y = depthwise.depthwise(got.view(1, 1, 1, 9), torch.ones(9, 1, 1, 1), activation=name)
            y.sum().backward()
        ACTIVATIONS[name](want).sum().backward()
        torch.testing.assert_close(y.detach().flatten(), ACTIVATIONS[name](ends), equal_nan=True)
        torch.testing.assert_close(got.grad, want.grad, equal_nan=True)


def tables():
    """Architectures whose table in tuned/ has launch parameters."""
    for path in sorted(TUNED.glob("*.json")):
        if any("config" in row for row in json.loads(path.read_text()).values()):
            yield path.stem


def launched(op, case, architecture):
    """The launches of a case under an architecture's table: kernels, grids and all numbers passed."""
    arguments = op.inputs(case, torch.float16, "cpu")
    launches = [x for phase in record(architecture, op.run, **arguments).values() for x in phase]
    numbers = int | float | str | None
    return [(x.name, x.grid, [(n, v) for n, v in x.values.items() if isinstance(v, numbers)]) for x in launches]


@pytest.mark.few(12)
@pytest.mark.parametrize("op, case", sampled(UNLESS_LONG, 3))
def test_launch_parameters_of_tables_are_correct(op, case, monkeypatch):
    """Oracle: as above, with the block sizes and WGMMA row order of each architecture's table.

    Launches equal to those without a table, which the test above runs, or to another architecture's, run once.
    """
    seen = [launched(op, case, "cpu")]
    for architecture in tables():
        found = launched(op, case, architecture)
        if found not in seen:
            seen.append(found)
            monkeypatch.setattr(kernels.launch, "target", architecture)
            assert outside(op, case, torch.float16) == [], architecture


def alone(op, arguments, keep):
    """Gradient of one floating-point tensor while all others are frozen; `keep` is (argument, index)."""

    def freeze(value, name, counter):
        if isinstance(value, torch.Tensor):
            here = (name, next(counter)) == keep
            return value.detach().requires_grad_(here) if value.is_floating_point() else value
        return tuple(freeze(v, name, counter) for v in value) if isinstance(value, tuple) else value

    return results(op.run, {n: freeze(v, n, itertools.count()) for n, v in arguments.items()})


@pytest.mark.few(3)
@pytest.mark.fast
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_frozen_parameters_change_no_other_gradient(op):
    """Oracle: the same kernels when every parameter learns; freezing one tensor must not affect the others."""
    arguments = op.inputs(next(iter(op.cases.values())), torch.float32, "cpu")
    with interpreting():
        together = results(op.run, arguments)
        for name, value in arguments.items():
            for i, tensor in enumerate(leaves(value)):
                if tensor.requires_grad:
                    found = alone(op, arguments, (name, i))[f"gradient of {name}[{i}]"]
                    want = together[f"gradient of {name}[{i}]"]
                    assert largest(found - want) <= 8 * torch.finfo(torch.float32).eps * largest(want), (name, i)


@pytest.mark.parametrize("layer", ["linear", "mlp"])
def test_folding_before_a_call_equals_folding_inside(layer):
    """Oracle: the same layer given its unfolded parameters; output and every gradient, through `fold`'s backward."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    x, norm_weight, norm_bias, out = randn(2, 9, 20), randn(20), randn(20), (randn(20, 24), randn(20))
    weights, biases = (randn(8, 20), randn(8, 20), randn(8, 20)), (randn(8), randn(8), randn(8))

    def parts(x, weights, biases, norm_weight, norm_bias, out):
        w, b, norm = torch.cat(weights), torch.cat(biases), (norm_weight, norm_bias, 1e-6)
        return linear.linear(x, w, b, norm=norm) if layer == "linear" else mlp.mlp(x, (w, b), out, norm=norm)

    def folded(x, weights, biases, norm_weight, norm_bias, out):
        made, norm = fold(weights, biases, norm_weight, norm_bias, x.dtype), (None, None, 1e-6)
        return linear.linear(x, made, norm=norm) if layer == "linear" else mlp.mlp(x, (made, None), out, norm=norm)

    arguments = dict(x=x, weights=weights, biases=biases, norm_weight=norm_weight, norm_bias=norm_bias)
    out = dict(out=out if layer == "mlp" else ())
    truth = results(parts, {n: converted(v, torch.float64) for n, v in (arguments | out).items()})
    with interpreting():
        got = results(folded, arguments | out)
    assert truth.keys() == got.keys()
    for name, want in truth.items():
        assert largest(got[name] - want) <= 64 * torch.finfo(torch.float32).eps * largest(want), name


@pytest.mark.parametrize("learned", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N, D, causal", [(197, 64, False), (70, 64, True), (50, 16, False), (0, 64, False)])
def test_gradient_of_a_bias_in_packed_projections(N, D, causal, learned):
    """Oracle: a bias that PyTorch adds, in float64, and with every gradient computed in float16 as the budget."""
    generator = torch.Generator().manual_seed(0)
    qkv, bias = (torch.randn(shape, generator=generator).half() for shape in ((3, N, 6 * D), (6 * D,)))

    def added(qkv, bias):
        return attention_qkv.reference(qkv + bias.to(qkv.dtype), 2, causal=causal)

    def apart(qkv, bias):
        return attention_qkv.run_with_bias(qkv + bias.detach().to(qkv.dtype), 2, None, causal, bias)

    arguments = {"qkv": qkv.requires_grad_(), "bias": bias.to(learned).requires_grad_()}
    truth = results(added, {n: converted(t, torch.float64) for n, t in arguments.items()})
    own = results(added, arguments)
    with interpreting(), poisoned():
        got = results(apart, arguments)
    if not N:
        assert torch.equal(got["gradient of bias[0]"], torch.zeros(6 * D).double())
        return
    for found in (got, own, truth):
        found["output"] = found.pop("output 0")
    assert_within_budget(got, own, truth, torch.float16)
    assert not got["gradient of bias[0]"].unflatten(0, (3, -1))[1].any() or D < 64  # summed in the kernel


CUTS = {  # cu_seqlens for 9 tokens, max_seqlen, and the token ranges of the images after clamping
    "past the end": ([0, 4, 10**6], 9, [(0, 4), (4, 9)]),
    "negative": ([-1000, 4, 9], 5, [(0, 4), (4, 9)]),
    "decreasing": ([0, 6, 3], 6, [(0, 6)]),
    "tokens of no image": ([2, 4, 7], 3, [(2, 4), (4, 7)]),
    "longer than max_seqlen": ([0, 6, 9], 3, [(0, 3), (6, 9)]),
    "no tokens allowed": ([0, 6, 9], 0, []),
    "beyond 32 bits": ([0, 2**33 + 4, 2**40], 9, [(0, 9)]),
}


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_unchecked_lengths_stay_in_bounds(name, dtype):
    """Oracle: each clamped image in float64, 0 elsewhere; the context checks every address."""
    ends, longest, images = CUTS[name]
    q, k, v, do = (torch.randn(1, 2, 9, 16).to(dtype) for _ in range(4))
    cu_seqlens, ops = torch.tensor(ends), torch.ops.fastvit_triton
    with interpreting(), poisoned():
        o, lse = ops.attention_fwd(q, k, v, None, None, cu_seqlens, longest, 0.25)
        grads = ops.attention_bwd(do, q, k, v, None, None, cu_seqlens, longest, 0.25, o, lse, False, False)[:3]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.zeros_like(wide[0])
    for start, end in images:
        want = want.slice_scatter(attention.reference(*(t[:, :, start:end] for t in wide), scale=0.25), 2, start, end)
    wants = torch.autograd.grad(want, wide, do.double()) if images else [want] * 3
    for got, expected in zip((o, *grads), (want, *wants), strict=True):
        assert largest(got - expected) <= 16 * torch.finfo(dtype).eps * max(largest(expected), 1)


@pytest.mark.fast
@pytest.mark.parametrize("lens", [[-5, 2**40], [0, -(2**33)], [9, 3]])
def test_unchecked_key_lengths_stay_in_bounds(lens):
    """Oracle: the reference with lengths clamped to 0 … Nk; the gradient of a bias has a kernel of its own."""
    arguments = {name: torch.randn(2, 1, 7, 8).requires_grad_() for name in "qkv"}
    arguments["bias"] = torch.randn(1, 1, 7, 7).requires_grad_()
    wide = {n: converted(t, torch.float64) for n, t in arguments.items()}
    truth = results(attention.reference, wide | dict(kv_lens=torch.tensor(lens).clamp(0, 7)))
    with interpreting():
        got = results(attention.attention, arguments | dict(kv_lens=torch.tensor(lens)))
    for name, want in truth.items():
        assert largest(got[name] - want) <= 16 * torch.finfo(torch.float32).eps * largest(want).clamp(min=1), name


def test_a_map_without_columns_has_no_keys():
    """Oracle: attention without keys gives zeros."""
    q, k = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 0, 8)
    with interpreting():
        o = attention.attention(q, k, k, axis_bias=(torch.randn(2, 1, 3, 5), torch.randn(2, 1, 3, 0)))
    assert torch.equal(o, torch.zeros_like(q))


def masked(kind, fill):
    """(attention, its arguments), with rows that `fill` masks whole, in part, and besides −inf."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    if kind == "window":
        bias = torch.zeros(2, 16, 16)
        bias[:, 3], bias[:, 5, :9] = fill, fill
        return lambda qkv, bias: window.window_attention(qkv, 2, (4, 4), (0, 0), bias), [randn(1, 8, 8, 48), bias]
    q, k, v = randn(2, 2, 4, 8), randn(2, 2, 35, 8), randn(2, 2, 35, 8)
    if kind == "axes":
        row, column = torch.zeros(2, 2, 4, 5), torch.zeros(2, 2, 4, 7)
        row[:, :, 1], row[:, :, 2, :2], column[:, :, 1, 0] = fill, fill, fill  # a sum of two is -inf for finfo.min
        return lambda q, k, v, *axes: attention.attention(q, k, v, axis_bias=axes), [q, k, v, row, column]
    bias = torch.zeros(2, 2, 4, 35)
    bias[0, :, 1], bias[0, :, 2, :20], bias[1, :, 3], bias[1, :, 3, 5:] = fill, fill, fill, -math.inf
    return attention.attention, [q, k, v, bias]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, for keys past the end, not stored
@pytest.mark.parametrize("kind", ["bias", "axes", "window"])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -65504.0])
def test_rows_that_finite_numbers_mask_have_weights(kind, fill):
    """Oracle: PyTorch in float64, where such a row is the mean of v; twice PyTorch's error, output and gradients."""
    function, arguments = masked(kind, fill)

    def run(dtype=torch.float32):
        learned = [t.to(dtype).requires_grad_() for t in arguments]
        y = function(*learned)
        y.sin().sum().backward()
        return [y.detach(), *(t.grad for t in learned)]

    with using_backend("torch"):
        truth, own = run(torch.float64), run()
    with interpreting():
        got = run()
    for i, (found, want, plain) in enumerate(zip(got, truth, own, strict=True)):
        floor = 16 * torch.finfo(torch.float32).eps * largest(want)
        assert largest(found - want) <= 2 * largest(plain - want) + floor, i


@jit
def _copy_kernel(x_ptr, y_ptr, first, N, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Copies N values from x + first; without MASKED, a whole block."""
    i = tl.arange(0, BLOCK)
    mask = i < N if MASKED else i >= 0
    tl.store(y_ptr + i, tl.load(x_ptr + first + i, mask=mask), mask=mask)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_access_outside_of_the_arguments_raises(dtype):
    """Oracle: a tensor's first and last element, by its strides; masked lanes may point anywhere."""
    buffer = torch.arange(64).to(dtype)
    x, y = buffer[8:24:2], torch.zeros(16, dtype=dtype)  # elements 8 to 22
    with interpreting():
        _copy_kernel[(1,)](x, y, 0, 15, BLOCK=16, MASKED=True)
        assert torch.equal(y[:15], buffer[8:23]) and y[15] == 0
        for first, N, masked in ((0, 16, True), (1, 15, True), (-1, 3, True), (0, 15, False)):
            with pytest.raises(InterpreterError, match="a load of"):
                _copy_kernel[(1,)](x, y, first, N, BLOCK=16, MASKED=masked)
        with pytest.raises(InterpreterError, match="a store of"):
            _copy_kernel[(1,)](buffer, y[:3], 0, 4, BLOCK=16, MASKED=True)
        with pytest.raises(InterpreterError, match="a load of"):
            _copy_kernel[(1,)](buffer[:0], y, 0, 1, BLOCK=16, MASKED=True)


@jit
def _first_tile_kernel(x_ptr, y_ptr, tile, N, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    """Copies N values for tile 0 and none for others, by a limit or by a mask of a block and a scalar."""
    i = tl.arange(0, BLOCK)
    mask = i < tl.where(tile == 0, N, 0) if LIMIT else (i < N) & (tile == 0)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=mask), mask=mask)


@pytest.mark.fast
def test_masks_of_other_dtypes_raise():
    """Oracle: triton 3.9, where block & scalar raises as it does here; a limit expresses the same mask."""
    x, y = torch.randn(8), torch.zeros(8)
    with interpreting():
        _first_tile_kernel[(1,)](x, y, 1, 5, BLOCK=8, LIMIT=True)
        assert not y.any()
        _first_tile_kernel[(1,)](x, y, 0, 5, BLOCK=8, LIMIT=True)
        assert torch.equal(y, torch.where(torch.arange(8) < 5, x, 0))
        with pytest.raises(InterpreterError, match="a load with a mask of int32"):
            _first_tile_kernel[(1,)](x, y, 0, 5, BLOCK=8, LIMIT=False)
