"""Tests of expected kernel times. Oracle: published rates of Triton's matmul and attention, compiled without a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import static
from benchmarks.launch_recorder import Launch, Pointer, compiled
from benchmarks.sass import GPUS, read
from fastvit_triton.expected.launched import KernelWork


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The kernel of Triton's tutorial without masks; tiles are grouped by 8 rows, as in the tutorial."""
    columns = tl.cdiv(N, BN)
    group, within = tl.program_id(0) // (8 * columns), tl.program_id(0) % (8 * columns)
    m = (group * 8 + within % 8) * BM + tl.arange(0, BM)
    n = within // 8 * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a, b = a_ptr + m[:, None] * K + k[None, :], b_ptr + k[:, None] * N + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * N
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16))


@triton.jit
def _attention(q_ptr, k_ptr, v_ptr, o_ptr, scale, N: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """FlashAttention's forward pass as in Triton's tutorial, not causal; one head is [N, D]."""
    head = tl.program_id(1).to(tl.int64) * N * D
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(q_ptr + head + m[:, None] * D + d[None, :])
    k, v = k_ptr + head + n[None, :] * D + d[:, None], v_ptr + head + n[:, None] * D + d[None, :]
    row_max, row_sum = tl.full((BM,), float("-inf"), tl.float32), tl.full((BM,), 1.0, tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for _ in tl.range(0, N, BN):
        s = tl.dot(q, tl.load(k))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - new_max[:, None])
        shrink = tl.math.exp2(row_max - new_max)
        row_sum, row_max = row_sum * shrink + tl.sum(p, 1), new_max
        acc = tl.dot(p.to(tl.float16), tl.load(v), acc * shrink[:, None])
        k += BN * D
        v += BN * D
    tl.store(o_ptr + head + m[:, None] * D + d[None, :], (acc / row_sum[:, None]).to(tl.float16))


def _rates(launch: Launch, kernel: str, todo: KernelWork, arch: str, monkeypatch) -> tuple[float, float]:
    """(bound, expected) in TFLOP/s."""
    binary, gpu = read(compiled(launch, arch)), GPUS[arch]
    monkeypatch.setattr(static, "work", lambda _: todo)
    needed, fill = static.bounds(launch, binary, gpu), sum(p.fill for p in static.program_cost(launch, binary))
    assert not binary.spill_bytes
    likely = static.expected(kernel, needed, fill * launch.programs, gpu)
    return todo.flops / needed["together"] / 1e6, todo.flops / likely / 1e6


# (architecture, tile, K) → TFLOP/s: Gluon's matmul without persistence on an H100 (its tutorial), and Triton's on an
# A100 (triton issue 743, bf16 and fp16); M = N = 8192
MATMULS = [
    ("sm_90", (128, 256, 64), 768, (525, 525)),
    ("sm_90", (128, 256, 64), 4096, (609, 609)),
    ("sm_90", (128, 256, 64), 8192, (629, 629)),
    ("sm_80", (128, 256, 64), 8192, (223, 267)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("arch, tile, K, measured", MATMULS)
def test_expected_time_of_matmul_is_close_to_published_rates(arch, tile, K, measured, monkeypatch):
    """Oracle: published rates: at most 5 % below the expected rate on an H100, and at most 30 % on an A100."""
    M = N = 8192
    BM, BN, BK = tile
    a, b, c = (Pointer(torch.empty(shape, dtype=torch.float16)) for shape in ((M, K), (K, N), (M, N)))
    launch = Launch(
        _matmul,
        (M // BM * (N // BN),),
        dict(a_ptr=a, b_ptr=b, c_ptr=c, N=N, K=K, BM=BM, BN=BN, BK=BK),
        dict(num_warps=8, num_stages=3),
    )
    todo = KernelWork(2 * M * N * K, 2 * BM * BN * K, K // BK)
    bound, expected = _rates(launch, "matmul", todo, arch, monkeypatch)
    assert expected <= bound
    share = 0.95 if arch == "sm_90" else 0.70
    assert all(share <= rate / expected <= 1.02 for rate in measured), (bound, expected)


# (D, tile, warps, stages) → TFLOP/s of Triton's FlashAttention 2, forward, not causal, N = 4096, on an H100, from
# FlashAttention 3's paper and, for D = 128, tritonbench; smallest fraction of the expected rate
ATTENTIONS = [(64, (128, 64), 4, 3, (400, 400), 0.90), (128, (128, 64), 8, 3, (434, 460), 0.78)]


@pytest.mark.parametrize("D, tile, warps, stages, measured, share", ATTENTIONS)
def test_expected_time_of_attention_is_close_to_published_rates(D, tile, warps, stages, measured, share, monkeypatch):
    """Oracle: published rates: at least 0.90 of the expected rate for 64 channels, 0.78 for 128; 0.62 of the bound."""
    B, H, N, (BM, BN) = 4, 1024 // D, 4096, tile
    q, k, v, o = (Pointer(torch.empty(B, H, N, D, dtype=torch.float16)) for _ in range(4))
    launch = Launch(
        _attention,
        (N // BM, B * H),
        dict(q_ptr=q, k_ptr=k, v_ptr=v, o_ptr=o, scale=0.125, N=N, D=D, BM=BM, BN=BN),
        dict(num_warps=warps, num_stages=stages),
    )
    todo = KernelWork(4 * B * H * N * N * D, 4 * BM * N * D, N // BN)
    bound, expected = _rates(launch, "attention._fwd_kernel", todo, "sm_90", monkeypatch)
    assert all(share <= rate / expected <= 1.02 for rate in measured), (bound, expected)
    assert all(rate / bound <= 0.62 for rate in measured)
