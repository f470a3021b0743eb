"""Tests of the budget of errors: every fault of a kernel's sums exceeds it, and kernels keep a margin on every CPU."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from budget import Budget, results
from commands import run_python
from interpreter import interpreting
from kernel_mutants import Contributions, sums_in, tf32_operands
from sampling import sampled
from test_interpreter import EVERY, KERNELS, LONG

from fastvit_triton.kernels import depthwise

pytestmark = [
    pytest.mark.usefixtures("always_folded"),
    # NumPy's, of faulty kernels
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning"),
]

HALF = (torch.float16, torch.bfloat16)
MARGIN = 0.8  # of the budget, so that a loss of precision shows before a test fails

# Sums of so many terms that 16 bits lose more than the rounding of the result. Drop path is 0 for the first image.
MANY_TERMS = {
    "attention": dict(B=1, H=1, Nq=20, Nk=150, D=40, Dv=33),
    "varlen_attention": dict(H=1, D=64, a=3, b=1, c=200),
    "layer_norm": dict(B=2, N=5, D=900),
    "add_layer_norm": dict(B=2, N=5, D=900),
    "rms_norm": dict(B=2, N=5, D=900),
    "add_rms_norm": dict(B=2, N=5, D=900),
    "fold": dict(F=40, K=300, parts=1),
    "linear": dict(B=2, N=20, K=400, F=20),
    "linear_with_statistics": dict(B=2, N=20, K=400, F=20, norm=1),
    "mlp": dict(B=2, N=8, D=24, F=800),
    "patch_embed": dict(B=1, C=3, H=32, W=32, P=16, D=12, T=1, pos_prefix=1),
    "depthwise": dict(B=1, H=32, W=32, C=4, K=3),
    "attention_qkv": dict(B=1, H=1, N=150, D=40, norms=1),
    "window_attention": dict(B=1, H=7, W=14, heads=1, D=32, h=7, w=7),
    "deformable_attention": dict(B=1, Nq=60, H=1, D=32, P=8, h0=3, w0=3, h1=2, w1=2, sides=2),
    "batch_norm_act": dict(B=2, C=3, H=20, W=20, silu=1, residual=1),
}

# Sums of so few terms that each contribution shows in 16 bits.
FEW_TERMS = {
    "attention": dict(B=2, H=1, Nq=17, Nk=35, D=20, Dv=18),
    "varlen_attention": dict(H=1, D=16, a=5, b=0, c=33),
    "layer_norm": dict(B=2, N=16, D=24),
    "add_layer_norm": dict(B=2, N=16, D=24),
    "rms_norm": dict(B=2, N=16, D=24),
    "add_rms_norm": dict(B=2, N=16, D=24),
    "fold": dict(F=24, K=48, parts=2),
    "linear": dict(B=2, N=16, K=48, F=24, norm=1),
    "linear_with_statistics": dict(B=2, N=16, K=48, F=24, norm=1),
    "mlp": dict(B=2, N=16, D=24, F=48, save=1),
    "patch_embed": dict(B=2, C=1, H=14, W=14, P=7, D=20, T=1, pos_prefix=1),
    "depthwise": dict(B=1, H=5, W=4, C=8, K=3, residual=1),
    "attention_qkv": dict(B=1, H=2, N=17, D=20, norms=1),
    "window_attention": dict(B=1, H=5, W=6, heads=1, D=20, h=4, w=5, sy=2, bias=1, cosine=1, pad=1),
    "deformable_attention": dict(B=1, Nq=9, H=2, D=20, P=2, h0=3, w0=4, sides=4),
    "batch_norm_act": dict(B=2, C=5, H=4, W=3, silu=1, residual=1),
}

# Ops without a product of two tiles, for which TF32 means nothing.
NO_PRODUCTS = {
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), "sums of rows and of columns"),
    "fold": "scaled weights and their sums; the products are in `linear`",
    "depthwise": "one product and one addition per tap, in float32 arithmetic",
    "deformable_attention": "one product and one addition per corner of a point, in float32 arithmetic",
    "batch_norm_act": "each value is scaled and shifted alone",
}
NO_SUMS = {"batch_norm_act"}  # ops whose kernels compute each value alone
ADDITIONS = {"depthwise", "deformable_attention"}  # ops whose sums are written as additions of tiles

# Contributions whose loss changes nothing: place → why.
WITHOUT_EFFECT = {
    "layer_norm_backward._bwd_kernel: dbias += tl.sum(dy, 0)": "an RMSNorm has no bias: the sum is not stored",
    "window_backward._bwd_kernel: total = tl.sum(p, 0)": "1 up to the roundings of the log-sum-exp, which it corrects",
}
OPS = [pytest.param(op, id=op.name) for op in KERNELS]
SUMS = [op for op in OPS if op.id not in NO_SUMS]


def faulty(budget, fault):
    """The largest ratio of an error to its budget, with this fault in the kernels."""
    with interpreting(), fault:
        return max(budget.ratios(results(budget.op.run, budget.arguments)).values())


def test_ops_without_sums_add_to_none():
    """The places of the kernels that add to a sum."""
    for op in OPS:
        if op.id in NO_SUMS:
            assert not contributions(Budget(op.values[0], FEW_TERMS[op.id], torch.float32)).last


def contributions(budget):
    """The contributions to sums in a run of the kernels."""
    with interpreting(), Contributions(additions=budget.op.name in ADDITIONS) as found:
        results(budget.op.run, budget.arguments)
    return found


def cancelling_taps(case):
    """Arguments of `depthwise` whose partial sums are larger than the result, as the taps are few."""
    given = depthwise.OP.inputs(case, torch.float64, "cpu")
    x, weight = given["x"].detach() + 16, given["weight"].detach()
    return dict(x=x.requires_grad_(), weight=(weight - weight.mean((-1, -2), keepdim=True)).requires_grad_())


EACH = [pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}") for op in SUMS for dtype in HALF]


@pytest.mark.few(2)
@pytest.mark.parametrize("op, dtype", sampled(EACH, 3))
def test_sums_in_16_bits_exceed_the_budget(op, dtype):
    """Oracle: the same kernels with sums in float32, which keep a margin."""
    changed = cancelling_taps(MANY_TERMS[op.name]) if op.name == "depthwise" else {}
    budget = Budget(op, MANY_TERMS[op.name], dtype, **changed)
    assert max(budget.ratios(budget.run()).values()) <= MARGIN
    assert faulty(budget, sums_in(dtype)) > 1


@pytest.mark.few(11)
@pytest.mark.parametrize("op", OPS)
def test_tf32_operands_exceed_the_budget(op):
    """Oracle: the same kernels with float32 operands; the ops without products are those of NO_PRODUCTS."""
    budget = Budget(op, FEW_TERMS[op.name], torch.float32)
    assert bool(contributions(budget).products) == (op.name not in NO_PRODUCTS)
    if op.name not in NO_PRODUCTS:
        assert faulty(budget, tf32_operands()) > 1


def dropped(op, case, dtype, every):
    """The places where a dropped contribution is within the budget, of `every` place or of that in the longest loop."""
    budget = Budget(op, case, dtype)
    assert max(budget.ratios(budget.run()).values()) <= MARGIN
    last = contributions(budget).last
    tried = last if every else [max(last, key=last.get)]
    with_fault = {place: faulty(budget, Contributions((place, last[place]), op.name in ADDITIONS)) for place in tried}
    return [place for place, ratio in with_fault.items() if not ratio > 1]


IN_TURN = [pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}") for op in SUMS for dtype in (torch.float32, *HALF)]


@pytest.mark.few(6)
@pytest.mark.parametrize("op, dtype", sampled(IN_TURN, 2))
def test_a_dropped_tile_exceeds_the_budget(op, dtype):
    """Oracle: the same kernels; 16 terms of the last tile in the longest loop of the op are missing."""
    assert dropped(op, FEW_TERMS[op.name], dtype, every=False) == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("op", SUMS)
def test_each_dropped_contribution_exceeds_the_budget(op, dtype):
    """Oracle: as above, at each place of each kernel that adds to a sum; WITHOUT_EFFECT says where it cannot."""
    assert set(dropped(op, FEW_TERMS[op.name], dtype, every=True)) <= WITHOUT_EFFECT.keys()


def measured(dtypes):
    """[dtype, case, result, error / budget, second arm / PyTorch's own error] of all cases of few seconds."""
    found = []
    for name, (op, case) in EVERY.items():
        for dtype in dtypes if name not in LONG else ():
            budget = Budget(op, case, dtype)
            for result, ratio in budget.ratios(budget.run()).items():
                own, sums = float(budget.own[result][0]), float(budget.sums[result][0])
                found.append([str(dtype).removeprefix("torch."), name, result, ratio, sums / own if own else None])
    return found


MEASURE = """
import json, torch, test_budget
from fastvit_triton.kernels import fold
fold.SPACE["border"] = dict(ROWS_PER_OUTPUT=0)
found = test_budget.measured((torch.float32, torch.float16, torch.bfloat16))
print(json.dumps([torch.backends.cpu.get_cpu_capability(), found]))
"""


def capabilities():
    """Values of ATEN_CPU_CAPABILITY that this CPU has, with PyTorch's names for them."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if "amx_tile" in flags:  # PyTorch's attention in bfloat16 takes it for granted that AVX-512 is on, too
        return {"avx512": "AVX512"}
    found = {"default": "DEFAULT"} | ({"avx2": "AVX2"} if "avx2" in flags else {})
    return found | ({"avx512": "AVX512"} if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags) else {})


@pytest.mark.full(one_in=3)
def test_ops_keep_a_margin_on_every_cpu():
    """Oracle: float64. PyTorch sums in another order for each set of vector instructions, and NumPy, by which the
    interpreter multiplies matrices, for each kind of CPU.

    Prints the largest ratio of an error to its budget in each setting, and how wide the second arm of the budget is.
    """
    largest = {}
    for capability, said in capabilities().items():
        for core in (None, "Haswell"):
            variables = dict(ATEN_CPU_CAPABILITY=capability, PYTHONPATH=os.pathsep.join(sys.path))
            variables |= {} if core is None else {"OPENBLAS_CORETYPE": core}
            used, rows = json.loads(run_python("-c", MEASURE, **variables).splitlines()[-1])
            assert used == said
            for dtype in ("float32", "float16", "bfloat16"):
                ratio, case, result = max((row[3], *row[1:3]) for row in rows if row[0] == dtype)
                largest[capability, core, dtype] = ratio
                print(f"{capability:8} {core or '':8} {dtype:9} {ratio:.2f} {case} {result}")
            widths = sorted((row[4], *row[1:3]) for row in rows if row[0] == "float32" and row[4] is not None)
            places = [widths[int(share * (len(widths) - 1))] for share in (0, 0.5, 0.9, 1)]
            print("  second arm / own error:", *(f"{w:.1f} {case} {result};" for w, case, result in places))
    assert all(ratio <= MARGIN for ratio in largest.values()), largest
