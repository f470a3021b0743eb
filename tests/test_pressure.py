"""Correctness under pressure: strange memory, huge tensors, extreme values, broken kernels, unusual callers."""

import functools
import linecache
import math
import mmap
import re
from inspect import signature

import pytest
import torch
from interpreter import interpreting, poisoned
from test_interpreter import converted, largest, leaves, outside, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastvit_triton as f
from benchmarks.launches import compiled, record
from fastvit_triton.kernels import OPS, attention, layer_norm, linear, mlp, op, patch_embed

CASES = [pytest.param(op, case, id=f"{op.name}-{name}") for op in OPS for name, case in op.cases.items()]
CASES += [
    pytest.param(linear.OP, dict(B=1, N=5, K=6, F=4), id="linear-one_image"),
    pytest.param(patch_embed.OP, dict(B=1, C=3, H=6, W=9, P=3, D=5, T=2, pos_prefix=2), id="patch_embed-wide_patch"),
]
STEP = 2**30  # values: two steps leave 32 bits, while a step itself still is a 32-bit stride


def far(t, axes):
    """Neighbours along the first axes lie STEP apart, in address space whose pages get memory when written to."""
    strides = [s + STEP * (axis < axes) for axis, s in enumerate(t.contiguous().stride())]
    span = 2 * STEP + 1 + sum(s * (size - 1) for s, size in zip(strides, t.shape, strict=True))
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    space = mmap.mmap(-1, span * t.element_size(), flags=anonymous)
    # 2·STEP values in front: an offset that wraps reads zeros there, and does not fault
    return torch.frombuffer(space, dtype=t.dtype).as_strided(t.shape, strides, 2 * STEP).copy_(t)


LAYOUTS = {
    "misaligned": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "every second": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:1].expand_as(t),
    "rows far apart": lambda t: far(t, t.dim() - 1),
    "values far apart": lambda t: far(t, t.dim()),
}


def laid(value, layout):
    """The same structure with floating tensors laid out anew, as leaves of a new graph."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return layout(value.detach()).requires_grad_(value.requires_grad)
    return tuple(laid(v, layout) for v in value) if isinstance(value, tuple) else value


def packed(t):
    """The same values side by side."""
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("op, case", CASES)
def test_memory_layout_changes_nothing(op, case, layout):
    """Oracle: the same values stored contiguously, bit for bit, outputs and gradients.

    PyTorch's own products may sum at most 64 terms in another order where a matrix is transposed. Values far apart lie
    on pages without memory in between, so 32-bit offsets, which the interpreter wraps as a GPU does, show here.
    """
    ours = {n: laid(v, layout) for n, v in op.inputs(case, torch.float32, "cpu").items()}
    copies = {n: laid(v, packed) for n, v in ours.items()}
    # the gradient of a sum is one number with strides 0
    around = (lambda t: t.flatten()[0].expand(t.shape)) if layout is LAYOUTS["expanded"] else layout
    with interpreting():
        got, want = results(op.run, ours, around), results(op.run, copies, lambda t: packed(around(t)))
    roundings = 64 * torch.finfo(torch.float32).eps if layout is LAYOUTS["transposed"] else 0.0
    assert [n for n in want if not largest(got[n] - want[n]) <= roundings * largest(want[n])] == []


def longer(case):
    """The case with so many tokens or pixels that every output has more than 2³¹ values."""
    axis = next(a for a in ("N", "Nq", "H") if a in case)
    return case | {axis: 2**31 // case.get("P", 1) * case.get("P", 1)}


@pytest.mark.parametrize("op, case", [c for c in CASES if "cu_seqlens" not in signature(c.values[0].run).parameters])
def test_shapes_beyond_32_bits(op, case):
    """Oracle: the reference on the same fake tensors, which have no memory: shapes, dtypes, gradients' strides."""
    with FakeTensorMode():
        arguments = op.inputs(longer(case), torch.float16, "cpu")
        want = results(op.reference, arguments)
        with interpreting():
            got = results(op.run, arguments)
    assert max(t.numel() for t in got.values()) > 2**31
    for name, t in want.items():
        assert got[name].shape == t.shape, name


def narrow_products(ttir):
    """Products of two 32-bit numbers that reach an address, unless a scalar is multiplied by a constant (a tile)."""
    found, made = set(), {}
    for line in ttir.splitlines():
        if match := re.match(r"\s*(%\w+)(?::\d+)? = (\S+) (.*?) : (.*?)(?: loc\(.*\))?$", line):
            made[match[1]] = match[2], re.findall(r"%\w+", match[3]), match[4], line.strip()
    passing = {f"arith.{n}" for n in ("muli", "addi", "subi", "extsi", "minsi", "select")}
    passing |= {f"tt.{n}" for n in ("splat", "broadcast", "expand_dims")}
    reached = [operands[1] for name, operands, *_ in made.values() if name == "tt.addptr"]
    for value in reached:  # grows while it is walked
        name, operands, kind, line = made.get(value, ("", (), "", ""))
        constant = any(made.get(o, ("",))[0] == "arith.constant" for o in operands)
        if name == "arith.muli" and "i32" in kind and ("tensor" in kind or not constant):
            found.add(line)
        if name in passing:
            reached += [o for o in operands if o not in reached]
    return found


def launches():
    """Every kernel with every combination of its switches that the ops' cases reach."""
    found = {}
    for op_, case in (case.values for case in CASES):
        for phase in record(op_.run, **op_.inputs(case, torch.float16, "cpu")).values():
            for launch in phase:
                switches = sorted(n for n, v in launch.values.items() if v is True)
                found[launch.name, launch.values.get("ACTIVATION"), *switches] = launch
    return found.values()


def test_addresses_are_64_bit_products():
    """Oracle: the compiler's own intermediate code: a position times a stride is 64 bits wide in every kernel."""
    for launch in launches():
        found = narrow_products(compiled(launch, "sm_80").asm["ttir"])
        assert not found, (launch.name, found)
