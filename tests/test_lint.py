"""Tests of the rules for compiled launches. Oracle: small kernels with a fault, and the same without."""

import pytest
import torch
import triton.language as tl
from triton import jit

from benchmarks.launch_recorder import Launch, Pointer, compiled
from benchmarks.lint import races, violations
from benchmarks.sass import read


@jit
def scaled(x_ptr, y_ptr, rows_ptr, sum_ptr, K, WHERE: tl.constexpr):
    """y = 2x and sum = x + Σ rows: two uses of x in two layouts, so that the compiler loads it twice."""
    f = tl.arange(0, 16)
    x = tl.load(x_ptr + f)
    if WHERE == "always":
        tl.debug_barrier()
    if WHERE == "sometimes":
        if K > 64:
            tl.debug_barrier()
    if WHERE == "otherwise":
        if K > 64:
            tl.store(sum_ptr + f, x)
        else:
            tl.debug_barrier()
    tl.store(y_ptr + f, 2 * x)
    for start in range(0, K, 64):
        x += tl.sum(tl.load(rows_ptr + f[:, None] * K + start + tl.arange(0, 64)[None, :]), 1)
    tl.store(sum_ptr + f, x)


@jit
def moved(x_ptr, y_ptr, BLOCK: tl.constexpr, BY: tl.constexpr):
    """y[i + BY] = 2 x[i], in one layout."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i + BY, 2 * tl.load(x_ptr + i))


@jit
def passes(x_ptr, y_ptr, K, WHERE: tl.constexpr):
    """Each pass of a loop adds rows of x in one layout and stores y in another, at addresses that the loop carries."""
    wide = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    y_at = y_ptr + tl.arange(0, 1024)
    for _ in range(0, K):
        total = tl.sum(tl.load(x_ptr + wide))
        if WHERE == "between":
            tl.debug_barrier()
        tl.store(y_at, tl.full([1024], 1.0, tl.float32) + total)
        if WHERE == "between":
            tl.debug_barrier()
        y_at += 1024


@jit
def one(x_ptr, y_ptr):
    """y = 2x of one number."""
    tl.store(y_ptr, 2 * tl.load(x_ptr))


@jit
def counted(x_ptr, y_ptr):
    """An atomic sum."""
    tl.atomic_add(y_ptr + tl.arange(0, 128), tl.load(x_ptr + tl.arange(0, 128)))


@jit
def copied(x_desc, y_desc, K, BARRIER: tl.constexpr):
    """y = x, in boxes."""
    for first in range(0, K, 16):
        x = x_desc.load([first, 0])
        if BARRIER:
            tl.debug_barrier()
        y_desc.store([first, 0], x)
        if BARRIER:
            tl.debug_barrier()


@jit
def nothing(x_ptr, K):
    """Loads and stores nothing."""
    tl.load(x_ptr + K)


def launch(kernel, *tensors: torch.Tensor, warps: int = 4, **fixed) -> Launch:
    """A launch with these tensors, K = 256 if it has one, and compile-time arguments."""
    values = dict(zip(kernel.arg_names, map(Pointer, tensors), strict=False)) | fixed
    return Launch(
        kernel,
        (1,),
        values | dict(K=256) if "K" in kernel.arg_names else values,
        dict(num_warps=warps, enable_fp_fusion=True),
    )


def found(each: Launch, arch: str = "sm_90") -> list[str]:
    """What the rule on order finds."""
    return races(compiled(each, arch).asm["ttgir"], each)


def new(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("where, said", [("nowhere", 1), ("always", 0)])
def test_a_store_over_what_another_warp_loads_is_refused(arch, where, said):
    """Oracle: y is x: warp 0 stores what warps 1 to 3 load for their sum, unless a barrier is between."""
    x, rows, total = new(16), new(16, 256), new(16)
    assert found(launch(scaled, x, new(16), rows, total, WHERE="nowhere"), arch) == []
    sentences = found(launch(scaled, x, x, rows, total, WHERE=where), arch)
    assert sentences == ["x_ptr is loaded, y_ptr is stored, and no barrier is between"] * said


def test_views_may_not_overlap_and_barriers_must_stand_on_every_path():
    """Oracle: x and y share one element, or none; a barrier in one branch leaves the other path."""
    both, rows, total = new(32), new(16, 256), new(16)
    assert found(launch(scaled, both[:16], both[15:31], rows, total, WHERE="nowhere"))
    assert found(launch(scaled, both[:16], both[16:], rows, total, WHERE="nowhere")) == []
    for where in ("sometimes", "otherwise"):
        assert found(launch(scaled, both[:16], both[:16], rows, total, WHERE=where))


@pytest.mark.parametrize(
    "size, by, warps, said",
    [(128, 0, 4, 0), (128, 1, 4, 1), (128, 1, 1, 0), (64, 0, 4, 1)],
    ids=["own element", "that of another thread", "one warp", "element in two warps"],
)
def test_only_the_owner_of_an_element_may_change_it(size, by, warps, said):
    """Oracle: 4 warps of 32 lanes, in which 128 elements have one thread each, and 64 have two."""
    x = new(256)
    assert len(found(launch(moved, x, x, warps=warps, BLOCK=size, BY=by))) == said


def test_passes_of_a_loop_meet():
    """Oracle: the load of a pass follows the store of the pass before."""
    x, y = new(2**18), new(2**18)
    assert found(launch(passes, x, y, WHERE="nowhere")) == []
    orders = [("x_ptr is loaded", "y_ptr is stored"), ("y_ptr is stored", "x_ptr is loaded")]
    sentences = found(launch(passes, x, x, WHERE="nowhere"))
    assert [tuple(sentence.split(", ")[:2]) for sentence in sentences] == orders
    assert found(launch(passes, x, x, WHERE="between")) == []


LOOPS = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%x_ptr: !tt.ptr<f32> loc("x_ptr"), %n: i32 loc("n")) {
    %x = tt.splat %x_ptr : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>, #blocked>
    %one = tt.splat %n : i32 -> tensor<128xi32, #blocked>
    scf.for %i = %n to %n step %n : i32 {
      %by = tt.splat %i : i32 -> tensor<128xi32, #blocked>
      %at = tt.addptr %x, %by : tensor<128x!tt.ptr<f32>, #blocked>, tensor<128xi32, #blocked>
      tt.store %at, %one : tensor<128x!tt.ptr<f32>, #blocked>
    }
    scf.for %i = %n to %n step %n : i32 {
      %by = tt.splat %i : i32 -> tensor<128xi32, #blocked>
      %at = tt.addptr %x, %by : tensor<128x!tt.ptr<f32>, #blocked>, tensor<128xi32, #blocked>
      %y = tt.load %at : tensor<128x!tt.ptr<f32>, #blocked>
    }
  }
}
"""


def test_the_same_name_in_two_loops_is_not_the_same_address():
    """Oracle: two loops store and load at their own i; in one loop the load is of what the thread stored."""
    each = launch(nothing, new(256))
    assert races(LOOPS, each) == ["x_ptr is stored, x_ptr is loaded, and no barrier is between"]
    within = LOOPS.replace("    }\n    scf.for %i = %n to %n step %n : i32 {\n", "")
    assert within != LOOPS and races(within, each) == []


def test_scalars_are_loaded_by_all_warps():
    """Oracle: every warp loads a scalar, and one stores it."""
    x = new(1)
    assert found(launch(one, x, new(1))) == [] and len(found(launch(one, x, x))) == 1


def test_what_has_no_rule_is_refused():
    """Oracle: an atomic operation, and a header with another number of pointers."""
    each = launch(counted, new(128), new(128))
    assert "tt.atomic_rmw has an address, and there is no rule for it" in found(each)
    ttgir = compiled(each, "sm_90").asm["ttgir"]
    assert races(ttgir, launch(counted, new(128))) == ["TTGIR has 2 pointers and descriptors for 1 tensors"]


@pytest.mark.parametrize("barrier", [False, True])
def test_no_barrier_ends_a_copy_by_a_descriptor(barrier):
    """Oracle: y is x, or another tensor, or its other half: copies of a pass may still go on in the next one."""
    x, y = (torch.empty(128, 64, dtype=torch.bfloat16) for _ in range(2))

    def of(source, target):
        boxes = dict(x_desc=(Pointer(source), (64, 64), (64, 1), (16, 64)))
        boxes |= dict(y_desc=(Pointer(target), (64, 64), (64, 1), (16, 64)))
        return Launch(copied, (1,), boxes | dict(K=64, BARRIER=barrier), dict(num_warps=4, enable_fp_fusion=True))

    assert found(of(x[:64], y[:64])) == found(of(x[:64], x[64:])) == []
    said = [("x_desc is loaded", "y_desc is stored"), ("y_desc is stored", "x_desc is loaded")]
    for target in (x[:64], x[63:127]):
        assert [tuple(sentence.split(", ")[:2]) for sentence in found(of(x[:64], target))] == said


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_kernel_that_stores_nothing_is_refused(arch):
    """Oracle: one kernel stores a number, the other nothing."""
    for each, said in ((launch(one, new(1), new(1)), []), (launch(nothing, new(256)), ["nothing is stored"])):
        kernel = compiled(each, arch)
        assert violations(each, read(kernel), arch, kernel.asm) == said
