"""Tests of attention's forms for short sequences, forward and backward. Oracle: float64, in Triton's interpreter."""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from budget import allowed, largest, outside
from interpreter import interpreting, poisoned

from benchmarks.launch_recorder import compiled, record
from benchmarks.lint import violations
from benchmarks.sass import GPUS, read
from fastvit_triton.kernels import attention, attention_qkv
from fastvit_triton.kernels.attention_launch import WHOLE, pieces_of, whole
from fastvit_triton.kernels.launch import overriding, targeting
from fastvit_triton.measure.candidates import CANDIDATES, candidates

ROWS = whole(BLOCK_M=32, num_warps=4, num_stages=1)
BOXES = whole(BLOCK_M=128, TMA=1, num_warps=8, num_stages=3)
BOXES |= whole("bwd_whole", BLOCK_M=32, num_warps=8, num_stages=3)
# also L, which the backward pass reads
WITH_LSE = dataclasses.replace(
    attention.OP,
    run=partial(attention.attention, return_lse=True),
    reference=partial(attention.reference, return_lse=True),
)


def sizes(N: int, D: int, Nq: int | None = None) -> dict[str, int]:
    return dict(B=1, H=2, Nq=N if Nq is None else Nq, Nk=N, D=D, Dv=D)


def kernels(function, *arguments, arch: str = "sm_90", phase: str = "inference", **options) -> list[str]:
    """Names of the kernels of attention in one phase."""
    names = [launch.name for launch in record(arch, function, *arguments, **options)[phase]]
    return [name.removeprefix("attention.") for name in names if name.startswith("attention.")]


def wrong(N: int, D: int, Nq: int, dtype: torch.dtype) -> list[str]:
    """Results outside their budget. The gradients of q and k vanish for one key; both forms leave a rounding there."""
    vanishing = {"gradient of q[0]", "gradient of k[0]"} if N == 1 else set()
    return [name for name in outside(WITH_LSE, sizes(N, D, Nq), dtype) if name not in vanishing]


@pytest.mark.parametrize(
    "N, D, dtype", [(1, 64, "float32"), (17, 80, "bfloat16"), (77, 64, "float16"), (197, 80, "float32")]
)
def test_whole_rows_equal_float64(N, D, dtype):
    """Oracle: the reference in float64, within its `Budget`: output, L and gradients; new memory is filled with NaN."""
    with overriding(ROWS):
        assert wrong(N, D, min(N, 40), getattr(torch, dtype)) == []


@pytest.mark.full
@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("last", range(16, WHOLE + 1, 16))
def test_whole_rows_of_every_length_equal_float64(last, D):
    """Oracle: as above."""
    for N in range(last - 15, last + 1):
        with overriding(ROWS):
            assert wrong(N, D, 1 + N % 40, torch.float16) == [], N


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["class_token", "so400m", "giant", "widest"])
def test_whole_rows_of_other_heads_equal_float64(name):
    """Oracle: as above, for queries and keys of other numbers, and heads of 48 to 256 channels, of one or two tiles."""
    with overriding(ROWS):
        assert outside(attention.OP, attention.OP.ragged[name], torch.float32) == []


def test_packed_projections_take_whole_rows():
    """Oracle: as above, through `attention_qkv`, whose q, k and v are strided views."""
    case = dict(B=2, H=2, N=53, D=64)
    with overriding(ROWS):
        assert kernels(attention_qkv.OP.run, **attention_qkv.OP.inputs(case, torch.bfloat16, "cpu")) == [
            "_fwd_whole_kernel"
        ]
        assert outside(attention_qkv.OP, case, torch.bfloat16) == []


def test_other_calls_loop_over_keys():
    """Oracle: the list of what whole rows do not compute; without a row of tuned/ no call takes them."""
    q, k, v = (torch.randn(2, 2, 50, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    few = partial(kernels, attention.attention, q, k, v)
    assert few() == ["_fwd_kernel"]
    long = [torch.randn(1, 1, WHOLE + 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    with overriding(ROWS):
        assert few() == few(scale=0.5) == kernels(attention.attention, *(t[:, :, :256] for t in long))
        assert few() == ["_fwd_whole_kernel"]
        others = [few(scale=-1.0), few(scale=0.0), few(bias=torch.zeros(1, 2, 50, 50)), few(causal=True)]
        others += [few(kv_lens=torch.tensor([50, 9])), few(axis_bias=(q[..., :5], q[..., :10]))]
        others += [kernels(attention.attention, *long)]
        others += [kernels(attention.varlen_attention, *(t[0].transpose(0, 1) for t in (q, k, v)), ends, 30)]
        assert others == [["_fwd_kernel"]] * len(others)
    with overriding(whole(BLOCK_M=0, num_warps=4, num_stages=1)):
        assert few() == ["_fwd_kernel"]


@contextlib.contextmanager
def by_boxes(programs: int = 3):
    """In this context attention reads by descriptors where it can, as on sm_90, in so many programs."""
    with overriding(BOXES), targeting("sm_90"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "units", lambda device: programs)
        yield


@pytest.mark.parametrize("N, D, dtype", [(17, 32, "bfloat16"), (197, 64, "float16")])
def test_whole_rows_by_descriptors_equal_float64(N, D, dtype):
    """Oracle: as above, with two programs for all tiles of all heads in the forward pass; gradients likewise."""
    with by_boxes(2):
        assert wrong(N, D, min(N, 40), getattr(torch, dtype)) == []


@pytest.mark.full
@pytest.mark.parametrize("last", range(16, WHOLE + 1, 16))
def test_whole_rows_of_every_length_by_descriptors_equal_float64(last):
    """Oracle: as above."""
    for N in range(last - 15, last + 1):
        with by_boxes():
            assert wrong(N, 64, N if N % 4 == 0 else 1 + N % 40, torch.float16) == [], N


@pytest.mark.parametrize("layout", ["packed", "heads first", "tokens first", "one image", "odd", "unaligned"])
def test_layouts_that_descriptors_read(layout):
    """Oracle: as above; memory that is no [B, N, H·D] and no [B·H, N, D], and unaligned memory, is read by the loop."""
    B, H, N, D = (1 if layout == "one image" else 2), 3, 21, 32
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(4 * B * H * N * D + 1, generator=generator).half()
    shapes = {
        "packed": lambda i: memory[: 3 * B * H * N * D].view(B, N, 3, H, D)[:, :, i].transpose(1, 2),
        "heads first": lambda i: memory[i:][: B * H * N * D].clone().view(B, H, N, D),
        "tokens first": lambda i: memory[i:][: B * H * N * D].clone().view(B, N, H, D).transpose(1, 2),
        "one image": lambda i: memory[: 4 * H * N * D].view(H, 4, N, D)[None, :, i].as_strided(*one_image(i)),
        "odd": lambda i: memory[: 4 * B * H * N * D].view(B, N, H, 4, D)[:, :, :, i].transpose(1, 2),
        "unaligned": lambda i: memory[1:][: 3 * B * H * N * D].view(B, N, 3, H, D)[:, :, i].transpose(1, 2),
    }

    def one_image(i):  # of an axis of size 1 the stride may be any number
        return (1, H, N, D), (2**31 + 1, 4 * N * D, D, 1), i * N * D

    q, k, v = (shapes[layout](i).requires_grad_() for i in range(3))
    cotangent = torch.randn(B, N, H, D, generator=generator).transpose(1, 2)
    if layout == "heads first":
        cotangent = cotangent.contiguous()

    def results(run, dtype):
        given = [t.detach().to(dtype).requires_grad_() if dtype != t.dtype else t for t in (q, k, v)]
        o = run(*given)
        return [o.detach(), *torch.autograd.grad(o, given, cotangent.to(dtype))]

    with by_boxes():
        form = "" if layout in ("odd", "unaligned") else "_tma"
        assert kernels(attention.attention, q, k, v) == [f"_fwd{form}_kernel"]
        assert kernels(attention.attention, q, k, v, phase="backward") == [f"_bwd{form}_kernel"]
        with interpreting(), poisoned():
            found = results(attention.attention, torch.float16)
    wanted, own = (results(attention.reference, dtype) for dtype in (torch.float64, torch.float16))
    for got, want, theirs in zip(found, wanted, own, strict=True):
        assert largest(got - want) <= allowed(float(largest(theirs - want)), float(largest(want)), torch.float16)


def test_other_gpus_and_heads_have_no_descriptors():
    """Oracle: the list of what the kernel with descriptors does not compute, by dtype, width and architecture."""

    def few(D, dtype=torch.bfloat16, arch="sm_90", Dv=None):
        q, k, v = (torch.randn(1, 2, 50, d, dtype=dtype, requires_grad=True) for d in (D, D, Dv or D))
        forward = kernels(attention.attention, q, k, v, arch=arch)
        backward = kernels(attention.attention, q, k, v, arch=arch, phase="backward")
        assert ("_fwd_tma_kernel" in forward) == ("_bwd_tma_kernel" in backward) and len(forward) == 1
        return len(forward + backward), "_fwd_tma_kernel" in forward

    with overriding(BOXES):
        assert few(64) == few(16) == few(64, torch.float16) == (2, True)
        others = [few(80), few(48), few(128), few(64, torch.float32), few(64, Dv=32)]
        others += [few(64, arch=arch) for arch in GPUS if arch != "sm_90"]
        assert not any(boxed for _, boxed in others)


def test_other_gradients_loop_over_keys():
    """Oracle: the list of what the backward pass with all keys at once does not compute, and its row in use."""
    q, k, v = (torch.randn(2, 2, 50, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    few = partial(kernels, attention.attention, q, k, v, phase="backward")
    long = [torch.randn(1, 1, WHOLE + 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    assert few() == ["_bwd_kernel"]
    with overriding(BOXES):
        assert few() == few(scale=-1.0) == ["_bwd_tma_kernel"]
        others = [few(bias=torch.zeros(1, 2, 50, 50)), few(causal=True), few(kv_lens=torch.tensor([50, 9]))]
        others += [few(axis_bias=(q[..., :5], q[..., :10])), kernels(attention.attention, *long, phase="backward")]
        ends = torch.tensor([0, 20, 50], dtype=torch.int32)
        packed = [t[0].transpose(0, 1) for t in (q, k, v)]
        others += [kernels(attention.varlen_attention, *packed, ends, 30, phase="backward")]
        assert all(found and "_bwd_tma_kernel" not in found for found in others)


@pytest.mark.fast
def test_pieces_hold_all_keys():
    """Oracle: by hand; for any number at most three powers of two, in order, that leave less than 32 columns empty."""
    examples = {1: (16, 0, 0), 50: (64, 0, 0), 65: (64, 16, 0), 197: (128, 64, 16), 209: (128, 64, 32)}
    examples |= {225: (128, 128, 0), 256: (128, 128, 0)}
    assert {N: pieces_of(N) for N in examples} == examples
    for N in range(1, WHOLE + 1):
        pieces = pieces_of(N)
        assert list(pieces) == sorted(pieces, reverse=True) and {*pieces} <= {0, 16, 32, 64, 128}
        assert 0 <= sum(pieces) - N < 32


@pytest.mark.full
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("row", [row for row in CANDIDATES if "whole" in row])
def test_candidates_fit_every_length(row, arch):
    """Oracle: the rules of the compile report, for lengths whose pieces are of all kinds, in training."""
    D = int(row.rpartition(".")[2]) // 2
    for blocks in candidates(row, arch):
        for N in (16, 48, 100, 145, 197, 224, 256):
            qkv = torch.empty(16, N, 3, 12, D, dtype=torch.bfloat16, requires_grad=True)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            with overriding({row: blocks}):
                launches = record(arch, attention.attention, q, k, v)
            (launch,) = launches["backward" if "bwd" in row else "forward"]
            kernel = compiled(launch, arch)
            form = "_bwd_tma" if "bwd" in row else "_fwd_tma" if "TMA" in blocks else "_fwd_whole"
            assert launch.name == f"attention.{form}_kernel"
            assert violations(launch, read(kernel), arch, kernel.asm) == [], (N, blocks)
