"""What only a GPU can say about the kernels: every op, dtype and shape against float64, the same bits each run."""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator

import torch

from fastvit_triton.kernels import OPS
from fastvit_triton.kernels.op import Op

from .arms import switched
from .match import Named, converted, leaves, named_leaves, outcome, verdict
from .ops import BY_NAME
from .record import ROOT, Part

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# op → shapes of ViTs as they are, ragged where the families are
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

# triton 3.4 to 3.7.0 with its own ptxas multiplies wrongly after a transpose in registers, at 64-wide tiles on sm_90:
# every width of a head, and token counts around one and several tiles, go through the kernels' backward pass
WIDTHS = (16, 32, 48, 64, 72, 80, 96, 128)
TOKENS = (63, 64, 65, 128, 197, 257)


@contextlib.contextmanager
def kernels_on(device: torch.device) -> Iterator[None]:
    """Inside, the ops launch their kernels: on a GPU by themselves, on a CPU in Triton's interpreter."""
    if device.type == "cuda":
        with switched("auto"):
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
    """Columns of one check: the verdict on outputs and gradients, and whether repeated runs give the same bits."""

    def found(function: Callable, given: dict) -> Named:
        return outcome(function, given, named_leaves(given))

    truth = found(op.reference, converted(arguments, torch.float64))
    baseline = found(op.reference, arguments)
    with kernels_on(device):
        runs = [found(op.run, arguments)]
        for _ in range(repeats - 1):
            fill(device)
            runs.append(found(op.run, arguments))
    said = verdict(runs[0], truth, baseline, dtype)
    bitwise = all(same(run[n], runs[0][n]) for run in runs[1:] for n in runs[0])
    return said.columns() | dict(bitwise=bitwise)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, NaN and signs of zero included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def fill(device: torch.device) -> None:
    """Leaves NaN in memory that the allocator will hand out next: what a kernel does not write shows."""
    if device.type == "cuda":
        blocks = [torch.full((2**k,), math.nan, device=device) for k in range(8, 25) for _ in range(4)]
        del blocks


def planned(dry: bool) -> Iterator[tuple[str, Op, dict, torch.dtype]]:
    """(name, op, shape, dtype): real shapes in bfloat16 first, then every case in every dtype."""
    if dry:
        for op in OPS:
            name, case = next(iter(op.cases.items()))
            yield f"{op.name} {name}", op, case, torch.float32
        return
    for dtype in DTYPES:
        for op in OPS:
            for name, case in (REAL.get(op.name, {}) | op.ragged | op.cases).items():
                yield f"{op.name} {name}", op, case, dtype
        if dtype == torch.bfloat16:
            for width in WIDTHS:
                for N in TOKENS:
                    case = dict(B=2, H=2, Nq=N, Nk=N, D=width, Dv=width)
                    yield f"attention backward D={width} N={N}", BY_NAME["attention"], case, dtype


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


def run(part: Part, device: torch.device) -> None:
    """All checks, each one row."""
    for name, op, case, dtype in planned(part.dry):
        kind = str(dtype).removeprefix("torch.")
        with part.row(f"{name} {kind}") as go:
            if go:
                columns = check(op, op.inputs(case, dtype, device), dtype, device, repeats=2 if part.dry else 3)
                part.add(dict(case=f"{name} {kind}", op=op.name, dtype=kind, shape=case, **columns))
    for name, images, build, count in far(part.dry):
        with part.row(f"{name} beyond 2^31 values") as go:
            if go:
                columns = check_far(BY_NAME[name], images, build(count + 9, device), device)
                part.add(dict(case=f"{name} beyond 2^31 values", op=name, **columns))
