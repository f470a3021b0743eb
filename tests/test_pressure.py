"""Tests of robustness: memory layouts, 64-bit addresses, extreme values, mutated kernels, unusual callers."""

import contextlib
import inspect
import linecache
import math
import mmap
import re

import pytest
import torch
import triton
from budget import allowed, converted, largest, leaves, outside, results
from interpreter import interpreting, poisoned
from sampling import sampled
from test_interpreter import STATS
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.launch_recorder import compiled, record
from fastvit_triton.kernels import (
    OPS,
    attention,
    attention_backward,
    attention_inner,
    attention_launch,
    batch_norm,
    deformable,
    depthwise,
    depthwise_backward,
    fold,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    mlp,
    patch_embed,
    window,
    window_backward,
)
from fastvit_triton.kernels.launch import overriding, targeting

pytestmark = pytest.mark.usefixtures("always_folded")

CASES = [pytest.param(op, case, id=f"{op.name}-{name}") for op in OPS for name, case in op.cases.items()]
CASES += [
    pytest.param(linear.OP, dict(B=1, N=5, K=6, F=4), id="linear-one_image"),
    pytest.param(patch_embed.OP, dict(B=1, C=3, H=6, W=9, P=3, D=5, T=2, pos_prefix=2), id="patch_embed-wide_patch"),
]
FILES = (
    attention,
    attention_backward,
    attention_inner,
    batch_norm,
    deformable,
    depthwise,
    depthwise_backward,
    fold,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    mlp,
    patch_embed,
    window,
    window_backward,
)
MODULES = {m.__name__.rsplit(".", 1)[1]: m for m in FILES}
STEP = 2**30  # values: two steps exceed 32 bits, while one step is still a 32-bit stride


def far(t, axes):
    """A copy whose elements along the first axes are STEP apart, in address space that gets memory when written to."""
    strides = [s + STEP * (axis < axes) for axis, s in enumerate(t.contiguous().stride())]
    span = 2 * STEP + 1 + sum(s * (size - 1) for s, size in zip(strides, t.shape, strict=True))
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    space = mmap.mmap(-1, span * t.element_size(), flags=anonymous)
    # 2·STEP values precede it, so that a wrapped offset reads zeros instead of faulting
    return torch.frombuffer(space, dtype=t.dtype).as_strided(t.shape, strides, 2 * STEP).copy_(t)


LAYOUTS = {
    "misaligned": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "stride of two": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:1].expand_as(t),
    "rows far apart": lambda t: far(t, t.dim() - 1),
    "values far apart": lambda t: far(t, t.dim()),
}


def in_turn(cases, others):
    """Each case with each of the others; by default, with one of them in turn."""
    found = []
    for i, case in enumerate(cases):
        for j, other in enumerate(others):
            marks = pytest.mark.full if (i + j) % len(others) else ()
            found.append(pytest.param(*case.values, other, id=f"{case.id}-{other}", marks=marks))
    return found


def laid(value, layout):
    """The same structure with floating-point tensors in another layout, as leaves of a new graph."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return layout(value.detach()).requires_grad_(value.requires_grad)
    return tuple(laid(v, layout) for v in value) if isinstance(value, tuple) else value


def packed(t):
    """A contiguous copy of the tensor."""
    return t.clone(memory_format=torch.contiguous_format)


LONG = {"window_attention-large"}  # several seconds a layout
LAID = [
    pytest.param(*case.values, name, id=f"{case.id}-{name}", marks=pytest.mark.full if case.id in LONG else ())
    for case in CASES
    for name in LAYOUTS
]


@pytest.mark.few(7)
@pytest.mark.parametrize("op, case, layout", sampled(LAID, 5))  # of the six layouts, one or two for each case
def test_memory_layout_changes_nothing(op, case, layout):
    """Oracle: the same values stored contiguously, bit for bit, outputs and gradients.

    PyTorch's own products may sum at most 64 terms in another order if a matrix is transposed. Values far apart lie on
    separate pages with unmapped memory in between, so 32-bit offsets, which wrap as on a GPU, are detected.
    """
    ours = {n: laid(v, LAYOUTS[layout]) for n, v in op.inputs(case, torch.float32, "cpu").items()}
    copies = {n: laid(v, packed) for n, v in ours.items()}
    # the gradient of a sum is one number with strides 0
    around = (lambda t: t.flatten()[0].expand(t.shape)) if layout == "expanded" else LAYOUTS[layout]
    with interpreting():
        got, want = results(op.run, ours, around), results(op.run, copies, lambda t: packed(around(t)))
    roundings = 64 * torch.finfo(torch.float32).eps if layout == "transposed" else 0.0
    assert [n for n in want if not largest(got[n] - want[n]) <= roundings * largest(want[n])] == []


def longer(case):
    """The case with enough tokens or pixels for more than 2³¹ values in every output."""
    axis = next(a for a in ("N", "Nq", "H", "F") if a in case)
    return case | {axis: 2**31 // case.get("P", 1) * case.get("P", 1)}


@pytest.mark.few(13)
@pytest.mark.parametrize(
    "op, case",
    [c for c in CASES if "varlen" not in c.id],  # whose reference masks all pairs of tokens
)
def test_shapes_beyond_32_bits(op, case):
    """Oracle: the shapes of the reference for the same fake tensors, which have no memory."""
    with FakeTensorMode():
        arguments = op.inputs(longer(case), torch.float16, "cpu")
        want = results(op.reference, arguments)
        with interpreting():
            got = results(op.run, arguments)
    assert max(t.numel() for t in got.values()) > 2**31
    for name, t in want.items():
        assert got[name].shape == t.shape, name


# The base of the first two is the first query of a block, in 64 bits; from there all positions are in a block of at
# most 32 queries of H heads, with at most 64 points, two coordinates and 256 channels each: 32 bits suffice for
# H < 2**17. That of the third multiplies to the number of a cell in its map, which is an integer of 32 bits.
NARROW = (deformable._fwd_kernel, deformable._bwd_points_kernel, deformable._bwd_value_kernel)


def narrow_products(ttir):
    """Products of two 32-bit integers used in an address, except those of a scalar and a constant (tile offsets)."""
    found, made = set(), {}
    for line in ttir.splitlines():
        if match := re.match(r"\s*(%\w+)(?::\d+)? = (\S+) (.*?) : (.*?)(?: loc\(.*\))?$", line):
            made[match[1]] = match[2], re.findall(r"%\w+", match[3]), match[4], line.strip()
    passing = {f"arith.{n}" for n in ("muli", "addi", "subi", "extsi", "minsi", "select")}
    passing |= {f"tt.{n}" for n in ("splat", "broadcast", "expand_dims")}
    reached = [operands[1] for name, operands, *_ in made.values() if name == "tt.addptr"]
    for value in reached:  # grows during iteration
        name, operands, kind, line = made.get(value, ("", (), "", ""))
        constant = any(made.get(o, ("",))[0] == "arith.constant" for o in operands)
        if name == "arith.muli" and "i32" in kind and ("tensor" in kind or not constant):
            found.add(line)
        if name in passing:
            reached += [o for o in operands if o not in reached]
    return found


def launches():
    """Every kernel with every combination of switches that occurs in the ops' cases."""
    found = {}
    for op_, case in (c.values for c in CASES):
        for phase in record("sm_80", op_.run, **op_.inputs(case, torch.float16, "cpu")).values():
            for launch in phase:
                switches = [n for n, v in launch.values.items() if v is True]
                found[(launch.name, launch.values.get("ACTIVATION"), *switches)] = launch
    return found.values()


class Found(Exception):
    """Ends a compilation with the intermediate code of a kernel."""


def ends_at_ttir(backend=None, stages=None, *_):
    """A hook of Triton's compiler: later stages, which are most of its time, are not run."""

    def end(module, metadata):
        raise Found(str(module))

    if stages is None:
        return "ttir", "ttir"  # the key of its cache
    stages["ttgir"] = end


@pytest.mark.full
def test_addresses_are_64_bit_products(monkeypatch):
    """Oracle: the compiler's intermediate code: in every kernel, position times stride is a 64-bit product."""
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", ends_at_ttir)
    for launch in launches():
        with pytest.raises(Found) as ttir:
            compiled(launch, "sm_80")
        found = narrow_products(str(ttir.value))
        assert bool(found) == (launch.kernel in NARROW), (launch.name, found)


@pytest.mark.fast
def test_alignment_is_compiled_in():
    """Oracle: the compiler's intermediate code: divisibility by 16 is promised for an aligned x, not for x + 1."""
    weight, said = torch.ones(64, requires_grad=True), []
    for layout in (packed, LAYOUTS["misaligned"]):
        (launch,) = record("sm_80", layer_norm.layer_norm, layout(torch.zeros(4, 64)), weight, None, 1e-6)["inference"]
        said.append(re.search(r"%x_ptr: \S+( {tt.divisibility = 16 : i32})?", compiled(launch, "sm_80").asm["ttir"])[1])
    assert said[0] and not said[1]


@pytest.mark.few(5)
@pytest.mark.parametrize("op, case", CASES)
def test_kernels_repeat_bit_by_bit(op, case):
    """Oracle: the first run; no sum depends on an order, and no result on uninitialised memory."""
    runs = []
    for memory in (contextlib.nullcontext(), poisoned()):
        with interpreting(), memory:
            runs.append(results(op.run, op.inputs(case, torch.float16, "cpu")))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def first(arguments):
    """Name of the argument that holds the activations."""
    return next(iter(arguments))


@pytest.mark.few(13)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")  # NumPy's, intended
@pytest.mark.parametrize(
    "op, case, dtype",
    in_turn([c for c in CASES if "shifted" not in c.id and "rope" not in c.id], (torch.float32, torch.float16)),
)
def test_large_inputs(op, case, dtype):
    """Oracle: float64 where the dtype can represent it, with twice PyTorch's own error; elsewhere PyTorch's infinities.

    Activations have magnitude 10⁴; the softmax scale reduces scores to about 1, as a softmax of 10⁸ is meaningless.
    Probabilities below the smallest normal number, such as exp(−100), may be rounded to 0 before they multiply 10⁴.
    """
    arguments, top = op.inputs(case, torch.float64, "cpu"), torch.finfo(dtype).max
    for name in {"q", "k", "v", "qkv", "x", "residual", "image"} & arguments.keys():
        if isinstance(arguments[name], torch.Tensor):  # a residual may be True
            arguments[name] = (arguments[name].detach() * 1e4).requires_grad_()
    if isinstance(arguments.get("scale"), torch.Tensor):  # cosine attention, whose scores do not grow with x
        arguments["scale"] = (arguments["scale"].detach() * 1e-4).requires_grad_()
    elif "scale" in inspect.signature(op.run).parameters:
        arguments["scale"] = 1e-8
    arguments = {n: converted(v, dtype) for n, v in arguments.items()}
    truth = results(op.reference, {n: converted(v, torch.float64) for n, v in arguments.items()})
    baseline = results(op.reference, arguments)
    with interpreting():
        got = results(op.run, arguments)
    for name, exact in truth.items():
        ours, theirs, want = (t.clamp(-top, top) for t in (got[name], baseline[name], exact))
        most = allowed(largest(theirs - want), largest(want), dtype) + 1e4 * torch.finfo(torch.float32).tiny
        assert largest(ours - want) <= most, name
        beyond = exact.abs() > top + most
        assert torch.equal(got[name][beyond], baseline[name][beyond]), name


@pytest.mark.few(11)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")  # NumPy's, and meant
@pytest.mark.parametrize(  # the reference of packed images multiplies values of other images by 0, which spreads NaN
    "op, case, bad", in_turn([c for c in CASES if c.id != "attention_qkv-varlen"], (math.nan, math.inf, -math.inf))
)
def test_nan_and_infinity_propagate(op, case, bad):
    """Oracle: the PyTorch path in float32: the same outputs are NaN or infinite, and so is part of each gradient."""
    arguments = {n: converted(v, torch.float32) for n, v in op.inputs(case, torch.float64, "cpu").items()}
    whole = arguments[first(arguments)]
    spoilt = next(leaves(whole)).detach()
    spoilt[(-1,) * spoilt.dim()] = bad
    spoilt.requires_grad_()
    arguments[first(arguments)] = (spoilt, *whole[1:]) if isinstance(whole, tuple) else spoilt
    if case.get("causal") and "k" in arguments:  # else PyTorch, which masks, may give 0 for a row of -inf, and we NaN
        k = arguments["k"].detach()
        k = k.movedim(2, 0) if k.dim() == 4 else k  # tokens first
        k[::2, ..., -1].abs_()
        k[1::2, ..., -1].abs_().neg_()
    want = results(op.reference, arguments)
    with interpreting():
        got = results(op.run, arguments)
    for name, t in want.items():
        if "output" in name:
            assert torch.equal(got[name].isnan(), t.isnan()) and torch.equal(got[name].isinf(), t.isinf()), name
        assert bool(got[name].isfinite().all()) == bool(t.isfinite().all()), name


@pytest.mark.fast
def test_relu_propagates_nan():
    """Oracle: torch.relu(nan) is nan; a GPU's maximum, unlike the interpreter's, would return the other operand."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    launches = record("sm_80", linear.linear, x, weight, activation="relu")["inference"]
    assert "arith.maxnumf" not in compiled(launches[-1], "sm_80").asm["ttir"]


MORE = {"cross": dict(B=1, H=2, Nq=5, Nk=9, D=16, Dv=16)}
# kernel: part of its source, its replacement, and the op and case that must fail
MUTATIONS = {
    "attention._fwd_kernel": ("1.0 / nonzero_sum", "-1.0 / nonzero_sum", attention.OP, "bias"),
    "attention._fwd_whole_kernel": ("1.0 / row_sum", "-1.0 / row_sum", attention.OP, "class_token"),
    "attention._fwd_tma_kernel": ("1.0 / row_sum", "-1.0 / row_sum", attention.OP, "cross"),
    "attention_backward._bwd_kernel": ("dk0 * softmax_scale", "dk0 * scale", attention.OP, "class_token"),
    "attention_backward._bwd_tma_kernel": ("dk * softmax_scale", "dk * scale", attention.OP, "cross"),
    "attention_backward._bwd_dq_kernel": ("delta = tl.sum", "delta = -tl.sum", attention.OP, "bias"),
    "attention_backward._bwd_dkdv_kernel": ("dk0 * softmax_scale", "dk0 * scale", attention.OP, "bias"),
    "attention_backward._bwd_dbias_kernel": ("dp - tl.load", "dp + tl.load", attention.OP, "bias"),
    "attention_backward._bwd_axes_kernel": ("dp - delta", "dp + delta", attention.OP, "axes"),
    "layer_norm._fwd_kernel": ("x - mean", "x + mean", layer_norm.OP, "ragged"),
    "layer_norm_backward._bwd_kernel": ("t -= normed *", "t += normed *", layer_norm.OP, "ragged"),
    "layer_norm_backward._sum_kernel": ("total += tl.sum", "total -= tl.sum", layer_norm.OP, "ragged"),
    "layer_norm._stats_kernel": ("x - mean", "x + mean", linear.OP, "norm_gelu"),
    "fold._fold_rows": ("folded_bias += tl.sum", "folded_bias -= tl.sum", fold.OP, "one"),
    "fold._fold_kernel": ("block -= blocks", "block += blocks", fold.OP, "three"),
    "linear.merge_stats": ("count - mean", "count + mean", STATS, "norm_gelu"),
    "linear.apply_epilogue": ("y += tl.load(residual_ptr", "y -= tl.load(residual_ptr", linear.OP, "branch"),
    "linear._fwd_kernel": ("tl.arange(0, BLOCK_F // PARTS)", "1 + tl.arange(0, BLOCK_F // PARTS)", linear.OP, "branch"),
    "linear_backward._bwd_scaled_weight_kernel": ("+= sums", "-= sums", linear.OP, "branch"),
    "linear_backward._bwd_kernel": ("dbias += tl.sum(g", "dbias -= tl.sum(g", linear.OP, "norm_gelu"),
    "mlp._fwd_kernel": ("a - mean[:, None]", "a + mean[:, None]", mlp.OP, "recompute"),
    "depthwise._conv_kernel": ("bias += tl.load", "bias -= tl.load", depthwise.OP, "silu"),
    "depthwise_backward._bwd_weight_kernel": ("dbias += g[r]", "dbias -= g[r]", depthwise.OP, "silu"),
    "patch_embed._fwd_kernel": ("y += tl.load(bias_ptr", "y -= tl.load(bias_ptr", patch_embed.OP, "after"),
    "patch_embed._bwd_weight_kernel": ("(at, acc", "(at, -acc", patch_embed.OP, "after"),
    "deformable._fwd_kernel": ("* v11", "* -v11", deformable.OP, "offsets"),
    "deformable._bwd_points_kernel": ("(u10 - u00)", "(u10 + u00)", deformable.OP, "boxes"),
    "deformable._bwd_value_kernel": ("dvalue += a", "dvalue -= a", deformable.OP, "locations"),
    "batch_norm._kernel": (".to(tl.float32) - mean)", ".to(tl.float32) + mean)", batch_norm.OP, "silu"),
    "window._fwd_kernel": ("o / nonzero_sum", "-o / nonzero_sum", window.OP, "moved"),
    "window_backward._bwd_kernel": ("dk *= scale", "dk *= -scale", window.OP, "moved"),
    "window_backward._bwd_dq_kernel": ("dq * scale", "-dq * scale", window.OP, "large"),
    "window_backward._bwd_dbias_kernel": ("dbias += p", "dbias -= p", window.OP, "large"),
}


def mutated(module, name, old, new):
    """The module's kernel with one change in its source; the module itself is not changed."""
    source = "".join(inspect.getsourcelines(getattr(module, name).fn)[0])
    assert old in source, f"{name} no longer contains {old!r}: choose another mutation"
    file, source, made = f"<{name}: {new}>", source.replace(old, new), {}
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # read by Triton
    exec(compile(source, file, "exec"), vars(module), made)
    return made[name]


@pytest.mark.few(3)
@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("kernel", sampled(MUTATIONS, 2))
def test_one_wrong_sign_is_detected(kernel, monkeypatch):
    """Oracle: the comparison with float64, which passes for the kernel and must fail for its mutated copy."""
    old, new, op_, case = MUTATIONS[kernel]
    file, name = kernel.split(".")
    form = dict(BLOCK_M=64, num_warps=4, num_stages=2, TMA=int("tma" in kernel))
    rows = attention_launch.whole(**form) if name in ("_fwd_whole_kernel", "_fwd_tma_kernel") else {}
    rows |= attention_launch.whole("bwd_whole", **form) if name == "_bwd_tma_kernel" else {}
    # these cover whole heads and whole MLPs, and read by descriptors
    in_16_bits = "tma" in kernel or kernel in ("attention_backward._bwd_kernel", "mlp._fwd_kernel")
    dtype = torch.float16 if in_16_bits else torch.float32
    module, case = MODULES[file], (op_.cases | MORE)[case]
    with overriding(rows), targeting("sm_90") if rows else contextlib.nullcontext():
        assert outside(op_, case, dtype) == []
        monkeypatch.setattr(module, name, mutated(module, name, old, new))
        monkeypatch.setattr(attention_launch, "_prepared", {})  # clears launches that hold the original kernel
        assert outside(op_, case, dtype) != []


# function of `attention_inner`: part of its source, its replacement, dtype, and the case that must fail
DIAGONALS = {
    "fwd_step": ("m[:, None] + offset", "m[:, None] + offset + 1", torch.float32, "causal"),
    "p_and_dp": ("m[:, None] + offset", "m[:, None] + offset - 1", torch.float32, "causal"),
    "dkdv_step": ("m[None, :] + offset", "m[None, :] + offset - 1", torch.float32, "causal"),
    "dqkv_step": ("m[None, :] + offset", "m[None, :] + offset + 1", torch.float16, "causal"),
    "seen_keys": ("m + offset + 1", "m + 1", torch.float32, "causal_prefix"),
    "first_query": ("n - offset", "n + offset", torch.float32, "causal_prefix"),
}


@pytest.mark.few(2)
@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("name", DIAGONALS)
def test_a_moved_diagonal_is_detected(name, monkeypatch):
    """Oracle: the comparison with float64, which passes for the kernels and must fail for a mutated step of them."""
    old, new, dtype, case = DIAGONALS[name]
    case = attention.OP.ragged[case]
    assert outside(attention.OP, case, dtype) == []
    step = mutated(attention_inner, name, old, new)
    for module in (attention, attention_backward, attention_inner):
        monkeypatch.setattr(module, name, step, raising=False)
    monkeypatch.setattr(attention_launch, "_prepared", {})
    assert outside(attention.OP, case, dtype) != []


@pytest.mark.fast
def test_every_kernel_has_a_mutation():
    """Oracle: the kernels found in the kernel files."""
    found = {f"{file}.{name}" for file, m in MODULES.items() for name in vars(m) if re.fullmatch(r"_\w+_kernel", name)}
    assert found <= MUTATIONS.keys()
