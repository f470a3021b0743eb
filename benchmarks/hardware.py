"""The ceilings of a device, and the measurements that decide what is worth doing next."""

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
from fastvit_triton.measure.timing import alternate, rate, wait
from fastvit_triton.measure.variants import Arm, Case, on

from . import model_runs, op_cases, tune
from .correctness import kernels_on
from .launch_cases import MODELS
from .op_cases import here
from .result_file import ROOT, Part, compete


def ceilings(part: Part, device: torch.device) -> None:
    """Copy bandwidth, reads and writes counted, and the rate of a large bfloat16 product of random numbers."""
    many, side = (2**31, 8192) if not part.dry else (2**16, 64)

    def copy() -> tuple[Callable, float, str]:
        a = torch.randn(many // 2, device=device, dtype=torch.bfloat16)
        return partial(torch.empty_like(a).copy_, a), 2 * a.nbytes, "tbs"

    def product() -> tuple[Callable, float, str]:
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "ab")
        return partial(torch.mm, a, b), 2 * side**3, "tflops"

    for name, build in (("copy", copy), ("bf16 matmul", product)):
        with part.row(name) as go:
            if go:
                call, amount, unit = build()
                _measured(part, dict(case=name), {name: call}, device, {name: (amount, unit)})


def _measured(part: Part, facts: dict, calls: dict[str, Callable], device: torch.device, work: dict) -> None:
    """Times calls against each other and adds a row for each; work is (amount, unit) by arm."""
    steps = {name: (lambda copy, call=call: call) for name, call in calls.items()}
    timings, errors = alternate(steps, device, part.deadline, 0.02 if part.dry else 0.5)
    for name in calls:
        row = dict(facts, arm=name)
        if name in errors:
            row["error"] = errors[name]
        else:
            amount, unit = work[name]
            row |= asdict(timings[name]) | {unit: round(rate(amount, timings[name].us), 3)}
        part.add(row)


def gemms(part: Part, device: torch.device) -> None:
    """1. cuBLAS in bfloat16 and in fp8 at the four products of each model."""
    for model, (D, _, _, N) in [("tiny", (64, 2, 8, 5))] if part.dry else MODELS.items():
        for batch in (1,) if part.dry else (256, 64, 8, 1):
            for name, (columns, K) in dict(qkv=(3 * D, D), proj=(D, D), fc1=(4 * D, D), fc2=(D, 4 * D)).items():
                with part.row(f"gemm {model} {name} batch {batch}") as go:
                    if not go:
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
                    _measured(part, facts, calls, device, dict.fromkeys(calls, work))


def sdpa(part: Part, device: torch.device) -> None:
    """2. Every attention backend, forward and backward, from packed projections."""
    tokens, widths, heads = ((197, 257, 577, 785, 1025, 1370, 4097), (64, 72, 80, 88), (3072, 64))
    if part.dry:
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
                with part.row(f"attention {shape.name} batch {shape.B}") as go:
                    if go:
                        dtype = torch.float32 if part.dry else torch.bfloat16
                        case = op_cases.case("attention", shape, dtype, device)
                        case = replace(case, arms=[arm for arm in case.arms if "compile" not in arm.name])
                        compete(case, part, device, 0.02 if part.dry else 0.3)


def wide(part: Part, device: torch.device) -> None:
    """3. Models at other batch sizes, inference, with max-autotune."""
    sizes = [("tiny", 16), ("small", 16), ("base", 16), ("large", 16), ("huge", 14)]
    runs = [
        model_runs.Run(f"vit_{size}_patch{P}_224", batch, modes=("max-autotune-no-cudagraphs",))
        for batch in (64, 8, 1)
        for size, P in sizes
    ]
    for run in model_runs.TINY[:1] if part.dry else runs:
        with part.row(run.name, model=run.model) as go:
            if go:
                case = _short(model_runs.case(run, torch.bfloat16, device), part)
                compete(case, part, device, 0.02 if part.dry else 1.0, copies=2)


def _short(case: Case, part: Part) -> Case:
    """In a dry run without the arms that other parts have run already."""
    return replace(case, arms=case.arms[:2]) if part.dry else case


def gelu(part: Part, device: torch.device) -> None:
    """4. cuBLASLt's tanh-GELU epilogue against a linear layer and GELU, at fc1's shapes."""
    for model, (D, _, _, N) in [("tiny", (64, 2, 8, 5))] if part.dry else MODELS.items():
        name = f"fc1 and tanh-GELU {model}"

        def inputs(seed: int, M: int = (2 if part.dry else 256) * N, D: int = D) -> dict:
            generator = torch.Generator(device).manual_seed(seed)
            new = partial(torch.randn, generator=generator, device=device)
            x, weight, bias = new(M, D), new(4 * D, D) * D**-0.5, new(4 * D)
            return dict(x=x.bfloat16(), weight=weight.bfloat16(), bias=bias.bfloat16())

        def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")

        def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

        ours = on(here(device), partial(op_cases.BY_NAME["linear"].run, activation="gelu_tanh"))
        why = "on a CPU it computes the exact GELU" if device.type == "cpu" else None
        arms = [Arm("eager", None, eager), Arm("cuBLASLt epilogue", why, fused), Arm("ours eager", None, ours)]
        with part.row(name) as go:
            if go:
                compete(Case(name, torch.bfloat16, inputs, arms, eager, ("forward",)), part, device, 0.1)


def profile(part: Part, device: torch.device) -> None:
    """5. Where a training step of one eager ViT-B layer spends its time, kernel by kernel."""
    options = dict(depth=1, num_classes=0) | (dict(img_size=32, embed_dim=64, num_heads=2) if part.dry else {})
    with part.row("profile of one layer") as go:
        if not go:
            return
        with device:
            block = create_model("vit_base_patch16_224", **options).blocks[0].to(torch.bfloat16)
        D = block.norm1.weight.shape[0]
        x = torch.randn(2 if part.dry else 256, 197, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        for backend in ("torch", here(device)):
            with using_backend(backend):
                for _ in range(3):
                    block(x).sum().backward()
                kinds = [torch.profiler.ProfilerActivity.CPU]
                kinds += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
                with torch.profiler.profile(activities=kinds, acc_events=True) as told:
                    block(x).sum().backward()
            events = told.key_averages()
            taken = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            for event in sorted(events, key=lambda e: -getattr(e, taken))[:25]:
                row = dict(case="profile of one layer", arm=backend, kernel=event.key[:120], calls=event.count)
                part.add(row | dict(us=getattr(event, taken)))


@triton.jit
def _transposed_kernel(q_ptr, k_ptr, out_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out = (q kᵀ)ᵀ q with the middle product transposed in registers: the pattern that sm_90 miscompiled."""
    i, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q = tl.load(q_ptr + i[:, None] * WIDTH + d[None, :])
    k = tl.load(k_ptr + i[:, None] * WIDTH + d[None, :])
    s = tl.dot(q, tl.trans(k))
    tl.store(out_ptr + i[:, None] * WIDTH + d[None, :], tl.dot(tl.trans(s.to(q.dtype)), q))


def transposed(part: Part, device: torch.device) -> None:
    """6. Whether that pattern is right here, with the ptxas in use."""
    for rows in (64, 128):
        for warps in (4, 8):
            name = f"transpose in registers, {rows} rows, {warps} warps"
            with part.row(name) as go:
                if not go:
                    continue
                if device.type != "cuda":
                    part.add(dict(case=name, reason="needs a GPU"))
                    continue
                q, k = (torch.randn(rows, 64, device=device, dtype=torch.bfloat16) for _ in "qk")
                out = torch.empty(rows, 64, device=device)
                _transposed_kernel[(1,)](q, k, out, rows, 64, num_warps=warps, enable_fp_fusion=True)
                middle = (q.double() @ k.double().T).bfloat16().double()
                want = middle.T @ q.double()
                error = float((out.double() - want).norm() / want.norm())
                # the middle product may round the other way where its fp32 sum differs from fp64's
                allowed = 2 * torch.finfo(torch.bfloat16).eps
                part.add(dict(case=name, match=error <= allowed, within=round(error / allowed, 3)))


def tiles(part: Part, device: torch.device) -> None:
    """7. Whether wider tiles are faster: how fast the L2 cache feeds the units. Read from the sweep of fc1."""
    target = tune.targets(part.dry)[0]
    with part.row("tiles of fc1") as go:
        if go:
            row = tune.measure(
                target,
                torch.bfloat16,
                device,
                part.deadline.sooner(60),
                partial(kernels_on, device),
                2 if part.dry else None,
            )
            part.add(dict(case="tiles of fc1", **row))


def launches(part: Part, device: torch.device) -> None:
    """8. Microseconds of the host for one call, the device never the bottleneck."""
    x, weight = torch.randn(1, 8, 192, device=device), torch.ones(192, device=device)
    calls = {
        "torch layer_norm": partial(F.layer_norm, x, (192,), weight),
        "our layer_norm": partial(layer_norm, x, weight, None, 1e-6),
    }
    with part.row("host time of a call") as go:
        if not go:
            return
        for name, call in calls.items():
            samples = []
            with torch.no_grad():
                for _ in range(3 if part.dry else 200):
                    wait(device)
                    start = time.perf_counter()
                    for _ in range(10):
                        call()
                    samples.append((time.perf_counter() - start) * 1e5)
            part.add(dict(case="host time of a call", arm=name, us=statistics.median(samples)))


def cold(part: Part, device: torch.device) -> None:
    """9. Seconds of the first forward pass of ViT-B in a new process, with Triton's cache empty and then filled."""
    options = "depth=1, img_size=32" if part.dry else ""
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
    with tempfile.TemporaryDirectory() as cache, part.row("first forward pass") as go:
        for state in ("empty cache", "filled cache")[: 1 if part.dry else 2] if go else ():
            variables = os.environ | dict(TRITON_CACHE_DIR=cache, FASTVIT_TRITON_BACKEND=here(device))
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env=variables, cwd=ROOT, timeout=120
            )
            told = dict(us=float(done.stdout) * 1e6) if done.returncode == 0 else dict(error=done.stderr[-300:])
            part.add(dict(case="first forward pass", arm=state, **told))


def graphs(part: Part, device: torch.device) -> None:
    """10. Latency of one image with CUDA graphs."""
    runs = model_runs.TINY[:1] if part.dry else model_runs.LATENCY[:1]
    for run in runs:
        with part.row(f"{run.name} latency") as go:
            if go:
                case = _short(model_runs.case(run, torch.bfloat16, device), part)
                compete(case, part, device, 0.02 if part.dry else 1.0, copies=1, latency=True)


MEASUREMENTS = (transposed, launches, cold, gelu, profile, tiles, gemms, sdpa, graphs, wide)


def run(part: Part, device: torch.device) -> None:
    """All ten, the short ones first."""
    for measurement in MEASUREMENTS:
        measurement(part, device)
