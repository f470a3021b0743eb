"""Device limits, and measurements that decide what to optimise next."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastvit_triton import create_model, layer_norm
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.measure.candidates import targets
from fastvit_triton.measure.timing import alternate, rate, wait
from fastvit_triton.measure.tuning import time_candidates
from fastvit_triton.measure.variants import Case, Variant, with_backend

from . import model_runs, op_cases
from .correctness import kernels_on
from .launch_cases import MODELS
from .op_cases import kernel_backend
from .result_file import ROOT, ResultFile, measure_case


def ceilings(result: ResultFile, device: torch.device) -> None:
    """Copy bandwidth (reads plus writes), and the throughput of a large bfloat16 matrix product of random numbers."""
    many, side = (2**31, 8192) if not result.dry else (2**16, 64)

    def copy() -> tuple[Callable, float, str]:
        a = torch.randn(many // 2, device=device, dtype=torch.bfloat16)
        return partial(torch.empty_like(a).copy_, a), 2 * a.nbytes, "tbs"

    def product() -> tuple[Callable, float, str]:
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "ab")
        return partial(torch.mm, a, b), 2 * side**3, "tflops"

    for name, build in (("copy", copy), ("bf16 matmul", product)):
        with result.row(name) as wanted:
            if wanted:
                call, amount, unit = build()
                _measured(result, dict(case=name), {name: call}, device, {name: (amount, unit)})


def _measured(result: ResultFile, facts: dict, calls: dict[str, Callable], device: torch.device, work: dict) -> None:
    """Times calls in alternation and adds a row for each; `work` maps a variant to (amount, unit)."""
    steps = {name: (lambda copy, call=call: call) for name, call in calls.items()}
    timings, errors = alternate(steps, device, result.deadline, 0.02 if result.dry else 0.5)
    for name in calls:
        row = dict(facts, arm=name)
        if name in errors:
            row["error"] = errors[name]
        else:
            amount, unit = work[name]
            row |= asdict(timings[name]) | {unit: round(rate(amount, timings[name].us), 3)}
        result.add(row)


def gemms(result: ResultFile, device: torch.device) -> None:
    """1. cuBLAS in bfloat16 and in fp8, on the four matrix products of each model."""
    for model, (D, _, _, N) in [("tiny", (64, 2, 8, 5))] if result.dry else MODELS.items():
        for batch in (1,) if result.dry else (256, 64, 8, 1):
            for name, (columns, K) in dict(qkv=(3 * D, D), proj=(D, D), fc1=(4 * D, D), fc2=(D, 4 * D)).items():
                with result.row(f"gemm {model} {name} batch {batch}") as wanted:
                    if not wanted:
                        continue
                    a = torch.randn(max(batch * N // 16, 1) * 16, K, device=device, dtype=torch.bfloat16)
                    b = torch.randn(columns, K, device=device, dtype=torch.bfloat16)
                    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
                    calls = {"bf16": partial(F.linear, a, b)}
                    calls["fp8"] = partial(
                        torch._scaled_mm, a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                    )
                    facts = dict(case=f"gemm {model} {name} batch {batch}", shape=[len(a), columns, K])
                    work = 2.0 * len(a) * columns * K, "tflops"
                    _measured(result, facts, calls, device, dict.fromkeys(calls, work))


def sdpa(result: ResultFile, device: torch.device) -> None:
    """2. Every attention backend on packed projections, forward and backward."""
    tokens, widths, heads = ((197, 257, 577, 785, 1025, 1370, 4097), (64, 72, 80, 88), (3072, 64))
    if result.dry:
        tokens, widths, heads = (5,), (16,), (2,)
    for H in heads:
        for width in widths:
            for N in tokens:
                if width != 64 and N not in (257, 577, 5):
                    continue
                heads_here = min(H, max(64, 2**30 // N**2 // 16 * 16))  # the float64 reference holds every score
                per = min(16, heads_here)
                shape = op_cases.Shape(
                    f"N={N} D={width} heads={heads_here}", heads_here // per, N, per * width, per, 16
                )
                with result.row(f"attention {shape.name} batch {shape.B}") as wanted:
                    if wanted:
                        dtype = torch.float32 if result.dry else torch.bfloat16
                        case = op_cases.case("attention", shape, dtype, device)
                        case = replace(case, variants=[v for v in case.variants if "compile" not in v.name])
                        measure_case(case, result, device, 0.02 if result.dry else 0.3)


def wide(result: ResultFile, device: torch.device) -> None:
    """3. Models at other batch sizes, inference, with max-autotune."""
    sizes = [("tiny", 16), ("small", 16), ("base", 16), ("large", 16), ("huge", 14)]
    runs = [
        model_runs.Run(f"vit_{size}_patch{P}_224", batch, modes=("max-autotune-no-cudagraphs",))
        for batch in (64, 8, 1)
        for size, P in sizes
    ]
    for run in model_runs.TINY[:1] if result.dry else runs:
        with result.row(run.name, model=run.model) as wanted:
            if wanted:
                case = _short(model_runs.case(run, torch.bfloat16, device), result)
                measure_case(case, result, device, 0.02 if result.dry else 1.0, copies=2)


def _short(case: Case, result: ResultFile) -> Case:
    """Keeps only the first two variants in a dry run; other parts run the rest."""
    return replace(case, variants=case.variants[:2]) if result.dry else case


def gelu(result: ResultFile, device: torch.device) -> None:
    """4. The tanh-GELU epilogue of cuBLASLt against a linear layer followed by GELU, at the shapes of fc1."""
    for model, (D, _, _, N) in [("tiny", (64, 2, 8, 5))] if result.dry else MODELS.items():
        name = f"fc1 and tanh-GELU {model}"

        def inputs(seed: int, M: int = (2 if result.dry else 256) * N, D: int = D) -> dict:
            generator = torch.Generator(device).manual_seed(seed)
            new = partial(torch.randn, generator=generator, device=device)
            x, weight, bias = new(M, D), new(4 * D, D) * D**-0.5, new(4 * D)
            return dict(x=x.bfloat16(), weight=weight.bfloat16(), bias=bias.bfloat16())

        def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")

        def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

        ours = with_backend(kernel_backend(device), partial(op_cases.BY_NAME["linear"].run, activation="gelu_tanh"))
        why = "on a CPU it computes the exact GELU" if device.type == "cpu" else None
        variants = [
            Variant("eager", None, eager),
            Variant("cuBLASLt epilogue", why, fused),
            Variant("ours eager", None, ours),
        ]
        with result.row(name) as wanted:
            if wanted:
                measure_case(Case(name, torch.bfloat16, inputs, variants, eager, ("forward",)), result, device, 0.1)


def profile(result: ResultFile, device: torch.device) -> None:
    """5. Time of each kernel in a training step of one ViT-B layer, in eager PyTorch and with ours."""
    options = dict(depth=1, num_classes=0) | (dict(img_size=32, embed_dim=64, num_heads=2) if result.dry else {})
    with result.row("profile of one layer") as wanted:
        if not wanted:
            return
        with device:
            block = create_model("vit_base_patch16_224", **options).blocks[0].to(torch.bfloat16)
        D = block.norm1.weight.shape[0]
        x = torch.randn(2 if result.dry else 256, 197, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        for backend in ("torch", kernel_backend(device)):
            with using_backend(backend):
                for _ in range(3):
                    block(x).sum().backward()
                kinds = [torch.profiler.ProfilerActivity.CPU]
                kinds += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
                with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
                    block(x).sum().backward()
            events = profiler.key_averages()
            taken = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            for event in sorted(events, key=lambda e: -getattr(e, taken))[:25]:
                row = dict(case="profile of one layer", arm=backend, kernel=event.key[:120], calls=event.count)
                result.add(row | dict(us=getattr(event, taken)))


@triton.jit
def _transposed_kernel(q_ptr, k_ptr, out_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out = (q kᵀ)ᵀ q, q kᵀ transposed in registers: triton 3.4 to 3.7.0 miscompile this on sm_90."""
    i, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q = tl.load(q_ptr + i[:, None] * WIDTH + d[None, :])
    k = tl.load(k_ptr + i[:, None] * WIDTH + d[None, :])
    s = tl.dot(q, tl.trans(k))
    tl.store(out_ptr + i[:, None] * WIDTH + d[None, :], tl.dot(tl.trans(s.to(q.dtype)), q))


def transposed(result: ResultFile, device: torch.device) -> None:
    """6. Whether this triton and ptxas compile that pattern correctly."""
    for rows in (64, 128):
        for warps in (4, 8):
            name = f"transpose in registers, {rows} rows, {warps} warps"
            with result.row(name) as wanted:
                if not wanted:
                    continue
                if device.type != "cuda":
                    result.add(dict(case=name, reason="needs a GPU"))
                    continue
                q, k = (torch.randn(rows, 64, device=device, dtype=torch.bfloat16) for _ in "qk")
                out = torch.empty(rows, 64, device=device)
                _transposed_kernel[(1,)](q, k, out, rows, 64, num_warps=warps, enable_fp_fusion=True)
                middle = (q.double() @ k.double().T).bfloat16().double()
                want = middle.T @ q.double()
                error = float((out.double() - want).norm() / want.norm())
                # the middle product may round the other way where its fp32 sum differs from fp64's
                allowed = 2 * torch.finfo(torch.bfloat16).eps
                result.add(dict(case=name, match=error <= allowed, within=round(error / allowed, 3)))


def tiles(result: ResultFile, device: torch.device) -> None:
    """7. Whether wider tiles are faster, which depends on the bandwidth of the L2 cache: candidates of fc1."""
    target, context = targets(result.dry)[0], partial(kernels_on, device)
    with result.row("tiles of fc1") as wanted:
        if wanted:
            deadline, most = result.deadline.sooner(60), 2 if result.dry else None
            row = time_candidates(target, torch.bfloat16, device, deadline, context, most)
            result.add(dict(case="tiles of fc1", **row))


def launches(result: ResultFile, device: torch.device) -> None:
    """8. Host time of one call in microseconds; the device is idle."""
    x, weight = torch.randn(1, 8, 192, device=device), torch.ones(192, device=device)
    calls = {
        "torch layer_norm": partial(F.layer_norm, x, (192,), weight),
        "our layer_norm": partial(layer_norm, x, weight, None, 1e-6),
    }
    with result.row("host time of a call") as wanted:
        if not wanted:
            return
        for name, call in calls.items():
            samples = []
            with torch.no_grad():
                for _ in range(3 if result.dry else 200):
                    wait(device)
                    start = time.perf_counter()
                    for _ in range(10):
                        call()
                    samples.append((time.perf_counter() - start) * 1e5)
            result.add(dict(case="host time of a call", arm=name, us=statistics.median(samples)))


def cold(result: ResultFile, device: torch.device) -> None:
    """9. Time of the first forward pass of ViT-B in a new process, with Triton's cache empty and then filled."""
    options = "depth=1, img_size=32" if result.dry else ""
    program = f"""
import time, torch
from fastvit_triton import create_model
model = create_model("vit_base_patch16_224", {options}).to("{device}").eval()
image = torch.randn(1, 3, *model.patch_embed.img_size, device="{device}")
start = time.perf_counter()
with torch.no_grad():
    model(image).sum().item()
print(time.perf_counter() - start)
"""
    with tempfile.TemporaryDirectory() as cache, result.row("first forward pass") as wanted:
        for state in ("empty cache", "filled cache")[: 1 if result.dry else 2] if wanted else ():
            variables = os.environ | dict(TRITON_CACHE_DIR=cache, FASTVIT_TRITON_BACKEND=kernel_backend(device))
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env=variables, cwd=ROOT, timeout=120
            )
            measured = dict(us=float(done.stdout) * 1e6) if done.returncode == 0 else dict(error=done.stderr[-300:])
            result.add(dict(case="first forward pass", arm=state, **measured))


def graphs(result: ResultFile, device: torch.device) -> None:
    """10. Latency of one image with CUDA graphs."""
    runs = model_runs.TINY[:1] if result.dry else model_runs.LATENCY[:1]
    for run in runs:
        with result.row(f"{run.name} latency") as wanted:
            if wanted:
                case = _short(model_runs.case(run, torch.bfloat16, device), result)
                measure_case(case, result, device, 0.02 if result.dry else 1.0, copies=1, latency=True)


MEASUREMENTS = (transposed, launches, cold, gelu, profile, tiles, gemms, sdpa, graphs, wide)


def run(result: ResultFile, device: torch.device) -> None:
    """Runs all ten, the shortest first."""
    for measurement in MEASUREMENTS:
        measurement(result, device)
