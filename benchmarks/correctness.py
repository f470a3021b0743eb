"""Correctness of the kernels on a GPU: every op, dtype and shape against float64, and bitwise repeatability."""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from fastvit_triton.kernels import OPS
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import overriding
from fastvit_triton.kernels.op import Op
from fastvit_triton.kernels.plan import forcing
from fastvit_triton.measure.compare import Named, converted, leaves, named_leaves, outcome, verdict
from fastvit_triton.measure.timeout import one_line

from .op_cases import BY_NAME
from .result_file import ROOT, ResultFile, device_answers

MARK = "row: "  # begins each line of a worker's output that is a row
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# op → shapes of real ViTs
REAL = {
    "attention": {
        "ViT-B": dict(B=8, H=12, Nq=197, Nk=197, D=64, Dv=64),
        "ViT-H": dict(B=4, H=16, Nq=257, Nk=257, D=80, Dv=80),
        "DINOv2-B 518": dict(B=2, H=12, Nq=1370, Nk=1370, D=64, Dv=64),
        "so400m": dict(B=2, H=16, Nq=729, Nk=729, D=72, Dv=72),
        "giant": dict(B=2, H=16, Nq=257, Nk=257, D=88, Dv=88),
        "windows": dict(B=128, H=4, Nq=49, Nk=49, D=32, Dv=32, G=64),
        "bias": dict(B=8, H=12, Nq=197, Nk=197, D=64, Dv=64, G=1),
        "padded": dict(B=8, H=12, Nq=256, Nk=256, D=64, Dv=64, short=59),
    },
    "attention_qkv": {"ViT-B": dict(B=8, H=12, N=197, D=64), "ViT-S": dict(B=8, H=6, N=197, D=64)},
    "varlen_attention": {"naflex": dict(H=12, D=64, a=197, b=577, c=49)},
    "layer_norm": {"ViT-B": dict(B=8, N=197, D=768), "ViT-H": dict(B=4, N=257, D=1280)},
    "add_layer_norm": {"ViT-B": dict(B=8, N=197, D=768), "ViT-H": dict(B=4, N=257, D=1280)},
    "linear": {
        "ViT-B qkv": dict(B=8, N=197, K=768, F=2304, norm=1),
        "ViT-B proj": dict(B=8, N=197, K=768, F=768, branch=1),
        "ViT-H qkv": dict(B=4, N=257, K=1280, F=3840, norm=1),
        "head": dict(B=256, N=1, K=768, F=1000),
    },
    "mlp": {
        "ViT-B": dict(B=8, N=197, D=768, F=3072),
        "ViT-Ti": dict(B=8, N=197, D=192, F=768),
        "recompute": dict(B=4, N=197, D=768, F=3072, recompute=1),
        "DINOv2-g": dict(B=2, N=257, D=1536, F=4096, swiglu=1),
    },
    "patch_embed": {
        "ViT-B": dict(B=8, C=3, H=224, W=224, P=16, D=768, T=1, pos_prefix=1),
        "ViT-H": dict(B=4, C=3, H=224, W=224, P=14, D=1280, T=1, pos_prefix=1),
    },
}

# triton 3.4 to 3.7.0 with its own ptxas miscompiles products of tiles transposed in registers, 64 wide, on sm_90: so
# every width of a head is tested with token counts around one and several tiles, backward pass included
WIDTHS = (16, 32, 48, 64, 72, 80, 96, 128)
TOKENS = (63, 64, 65, 128, 197, 257)


@contextlib.contextmanager
def kernels_on(device: torch.device) -> Iterator[None]:
    """In this context ops launch their kernels, on a CPU in Triton's interpreter.

    LayerNorms are folded into products for any number of rows, so that small cases take that path.
    """
    with overriding({"fold.border": dict(ROWS_PER_OUTPUT=0)}), _launching(device):
        yield


@contextlib.contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with using_backend("triton"):  # whatever the plan would choose
            yield
        return
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        interpreting = importlib.import_module("interpreter").interpreting
    finally:
        sys.path.remove(str(ROOT / "tests"))
    with interpreting():
        yield


def check(op: Op, arguments: dict, dtype: torch.dtype, device: torch.device, repeats: int = 3) -> dict:
    """Columns of one check: those of the verdict on outputs and gradients, and "bitwise", equality of repeated runs."""

    def found(function: Callable, given: dict) -> Named:
        return outcome(function, given, named_leaves(given))

    truth = found(op.reference, converted(arguments, torch.float64))
    baseline = found(op.reference, arguments)
    with kernels_on(device), forcing("fused"):
        runs = [found(op.run, arguments)]
        for _ in range(repeats - 1):
            fill(device)
            runs.append(found(op.run, arguments))
    said = verdict(runs[0], truth, baseline, dtype)
    bitwise = all(same(run[n], runs[0][n]) for run in runs[1:] for n in runs[0])
    return said.columns() | dict(bitwise=bitwise)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the bits are equal, those of NaN and signs of zero included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def fill(device: torch.device) -> None:
    """Fills memory that the allocator will reuse with NaN, so that values that a kernel does not write show."""
    if device.type == "cuda":
        blocks = [torch.full((2**k,), math.nan, device=device) for k in range(8, 25) for _ in range(4)]
        del blocks


def planned(dry: bool) -> dict[str, Callable[[torch.device], dict]]:
    """Name → check, the most important first: real shapes in bfloat16, over 2³¹ values, then every case and dtype."""
    if dry:
        firsts = {f"{op.name} {name}": (op, op.cases[name]) for op in OPS for name in [next(iter(op.cases))]}
        found = {name: partial(_near, *what, torch.float32, 2) for name, what in firsts.items()}
        return found | {f"{what[0]} beyond 2^31 values": partial(_beyond, *what) for what in far(dry)}
    found = {}

    def every(dtype: torch.dtype, shapes: Callable[[Op], dict]) -> None:
        for op in OPS:
            for name, case in shapes(op).items():
                found[f"{op.name} {name} {dtype}".replace("torch.", "")] = partial(_near, op, case, dtype, 3)

    every(torch.bfloat16, lambda op: REAL.get(op.name, {}))
    found |= {f"{what[0]} beyond 2^31 values": partial(_beyond, *what) for what in far(dry)}
    for width in WIDTHS:
        for N in TOKENS:
            case = dict(B=2, H=2, Nq=N, Nk=N, D=width, Dv=width)
            found[f"attention D={width} N={N}"] = partial(_near, BY_NAME["attention"], case, torch.bfloat16, 3)
    for dtype in DTYPES:
        every(dtype, lambda op: op.ragged | op.cases)
    for dtype in (torch.float16, torch.float32):
        every(dtype, lambda op: REAL.get(op.name, {}))
    return found


def _near(op: Op, case: dict, dtype: torch.dtype, repeats: int, device: torch.device) -> dict:
    columns = check(op, op.inputs(case, dtype, device), dtype, device, repeats)
    return dict(op=op.name, dtype=str(dtype).removeprefix("torch."), shape=case, **columns)


def _beyond(name: str, images: str, build: Callable, count: int, device: torch.device) -> dict:
    return dict(op=name, **check_far(BY_NAME[name], images, build(count + 9, device), device))


def far(dry: bool) -> Iterator[tuple[str, str, Callable[[int, torch.device], dict], int]]:
    """(op, its argument with the images, (images, device) → arguments, images for 2³¹ values)."""
    limit, dtype = (2**12, torch.float32) if dry else (2**31, torch.bfloat16)
    D, H, N, P, side = (32, 2, 5, 8, 16) if dry else (768, 12, 197, 16, 224)

    def new(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(3)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    def layer_norm(B: int, d: torch.device) -> dict:
        return dict(x=new(d, B, N, D), weight=new(d, D), bias=new(d, D), eps=1e-6)

    def linear(B: int, d: torch.device) -> dict:
        return dict(x=new(d, B, N, D), weight=new(d, 4 * D, D, scale=D**-0.5))

    def patch_embed(B: int, d: torch.device) -> dict:
        return dict(image=new(d, B, 3, side, side), weight=new(d, D, 3, P, P, scale=(3 * P * P) ** -0.5))

    yield "layer_norm", "x", layer_norm, limit // (N * D)
    yield "attention_qkv", "qkv", lambda B, d: dict(qkv=new(d, B, N, 3 * D), num_heads=H), limit // (N * 3 * D)
    yield "linear", "x", linear, limit // (N * 4 * D)
    yield "patch_embed", "image", patch_embed, limit // (3 * side**2)


def check_far(op: Op, images: str, arguments: dict, device: torch.device) -> dict:
    """The last images of a large batch against the reference on them alone, in float64."""
    with torch.no_grad(), kernels_on(device):
        output = next(leaves(op.run(**arguments)))
        values, got = max(output.numel(), arguments[images].numel()), output[-8:].clone()
    del output
    tail = arguments | {images: arguments[images][-8:].clone()}
    truth = outcome(op.reference, converted(tail, torch.float64), None)
    baseline = outcome(op.reference, tail, None)
    return verdict({"output 0": got}, truth, baseline, got.dtype).columns() | dict(values=values)


def run(result: ResultFile, device: torch.device) -> None:
    """Runs all checks, one row each.

    They run in one process for each core, because compiling takes most of the time and a fault in a kernel then ends
    that process alone. They fill Triton's cache for later parts.
    """
    names = [name for name in planned(result.dry) if name not in result.done]
    workers = 1 if result.dry else min(os.cpu_count() or 1, 12)
    adding, finished = threading.Lock(), set()

    def add(row: dict) -> None:
        with adding:
            finished.add(row["case"])
            result.add(row)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda i: _supervise(names[i::workers], result, add), range(workers)))
    result.not_reached += [name for name in names if name not in finished]


def _supervise(names: list[str], result: ResultFile, add: Callable[[dict], None]) -> None:
    """Runs checks in a process; if it ends before its time, that is a row, and a new process runs the rest."""
    while names and not result.deadline.over:
        words = [sys.executable, "-m", "benchmarks.correctness", *(["--dry-run"] if result.dry else [])]
        environment = os.environ | dict(PYTHONPATH=str(ROOT))
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        ) as worker:
            alarm = threading.Timer(result.deadline.left, worker.kill)
            alarm.start()
            worker.stdin.write("\n".join(names))
            worker.stdin.close()
            for line in worker.stdout:
                if line.startswith(MARK):
                    row = json.loads(line.removeprefix(MARK))
                    names = [name for name in names if name != row["case"]]
                    add(row)
            alarm.cancel()
        if names and not result.deadline.over:
            add(dict(case=names[0], error=f"the process ended with code {worker.returncode}"))
            names = names[1:]


def main() -> None:
    """A worker: runs the checks named on standard input, prints one row per line, ends if the device is lost."""
    dry = "--dry-run" in sys.argv
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    torch.backends.cudnn.allow_tf32 = False  # PyTorch's convolution sets part of the budget in float32
    todo = planned(dry)
    for name in sys.stdin.read().splitlines():
        try:
            row = todo[name](device)
        except Exception as error:
            row = dict(error=one_line(error))
        print(MARK + json.dumps(dict(case=name) | row), flush=True)
        if "error" in row and not device_answers():
            break


if __name__ == "__main__":
    main()
