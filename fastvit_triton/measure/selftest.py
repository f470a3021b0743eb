"""Checks of the kernels on a GPU: float64, gradients, repeatability, streams, CUDA graphs, threads, memory.

`planned` returns the checks of a device, `workers` runs them. On a CPU they need Triton's interpreter.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

from ..deploy.cuda_graph import capture
from ..kernels import OPS
from ..kernels.backend import using_backend
from ..kernels.launch import overriding
from ..kernels.op import Op
from ..kernels.settings import forcing
from ..models import create_model
from .compare import Named, converted, cotangents, leaves, named_leaves, outcome, relative_errors, verdict
from .real_shapes import REAL
from .timing import peak_bytes, wait

Check = Callable[[], dict]  # returns the columns of a result row

BY_NAME = {op.name: op for op in OPS}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = 2**20  # values of arguments, up to which PyTorch's error is taken from several calls
SEEDS = (8, 9, 10, 11, 12)  # of those calls
LATE = 50_000_000  # cycles, about 30 ms: longer than the host needs to launch an op and its backward pass
THREADS, ROUNDS = 4, 5  # for checks with threads

# op → its case with a layer_scale and a bias and, before them, no activation, on a GPU and on a CPU
SCALED = {"linear": ("ViT-B proj", "branch"), "mlp": ("ViT-B", "ragged")}
STREAMS, REPEATS = 4, 500  # of checks under load
WIDTH = 8192  # of the square matrices beside them: a product takes 1.5 ms of an H200, longer than an op's two passes

# (model, images): blocks of the model are trained for the memory check
TRAINED = (("vit_base_patch16_224", 64), ("vit_tiny_patch16_224", 64), ("vit_huge_patch14_224", 16))
DEPTH = 4  # of that check: the gradients of the last block's weights are made while all others' activations are held

# Triton 3.4 to 3.7.0 with its bundled ptxas miscompiles tl.dot of 64-wide tiles transposed in registers on sm_90. So
# every head width is tested with token counts around one and several tiles, including the backward pass
WIDTHS = (16, 32, 48, 64, 72, 80, 96, 128)
TOKENS = (63, 64, 65, 128, 197, 257)


def planned(device: torch.device) -> dict[str, Check]:
    """Name → check, most important first: on a GPU shapes of real models, on a CPU the first case of every op."""
    checks: dict[str, Check] = {}

    def every(kind: str, dtype: torch.dtype, shapes: Callable[[Op], dict]) -> None:
        for op in OPS:
            for name, case in shapes(op).items():
                title = f"{op.name} {kind}{name} {dtype}".replace("torch.", "")
                checks[title] = partial(_near, op, case, dtype, device)

    def beyond(what: str) -> None:
        checks.update({f"{far[0]} {what}": partial(_beyond, *far, device) for far in _far(device)})

    if device.type != "cuda":
        for place in range(max(len(op.cases) for op in OPS)):
            for dtype in (torch.float32, torch.float16):  # the interpreter's tl.dot is wrong for bfloat16
                every("tiny ", dtype, partial(_tiny, place=place))
            if place == 0:
                beyond("last images")
                for name, (_, tiny) in SCALED.items():
                    op = BY_NAME[name]
                    checks[f"{name} under load"] = partial(check_load, op, op.cases[tiny], torch.float32, device)
        return checks
    every("", torch.bfloat16, lambda op: REAL[op.name])
    firsts = [(op, next(iter(REAL[op.name].values()))) for op in OPS]
    for kind, mode in {"on a stream": on_stream, "in a CUDA graph": in_graph, "in threads": in_threads}.items():
        checks |= {f"{op.name} {kind}": partial(_mode, mode, op, case, device) for op, case in firsts}
    for name, (real, _) in SCALED.items():
        load = partial(check_load, BY_NAME[name], REAL[name][real], torch.bfloat16, device)
        checks[f"{name} under load"] = load
    for model, batch in TRAINED:
        checks[f"memory of blocks of {model}"] = partial(check_memory, model, batch, device)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    if last != device:
        for op, case in firsts:
            checks[f"{op.name} on {last}"] = partial(_near, op, case, torch.bfloat16, last)
    beyond("beyond 2^31 values")
    for width in WIDTHS:
        for N in TOKENS:
            case = dict(B=2, H=2, Nq=N, Nk=N, D=width, Dv=width)
            checks[f"attention D={width} N={N}"] = partial(_near, BY_NAME["attention"], case, torch.bfloat16, device)
    for dtype in DTYPES:
        every("small ", dtype, lambda op: op.ragged)
        every("tiny ", dtype, _tiny)
    for dtype in (torch.float16, torch.float32):
        every("", dtype, lambda op: REAL[op.name])
    return checks


def _tiny(op: Op, place: int | None = None) -> dict[str, dict]:
    """The op's cases without "shift": on few values far from 0, PyTorch's error, our limit, may be small by chance."""
    cases = [(name, case) for name, case in op.cases.items() if not case.get("shift")]
    return dict(cases if place is None else cases[place : place + 1])


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Context in which ops always launch their kernels, regardless of the plan."""
    with using_backend("triton"), forcing("fused"):
        yield


@contextlib.contextmanager
def _folding() -> Iterator[None]:
    """`launching`, with LayerNorms folded for any number of rows, so that small cases cover that path."""
    with overriding({"fold.border": dict(ROWS_PER_OUTPUT=0)}), launching():
        yield


def check(op: Op, arguments: dict, dtype: torch.dtype, device: torch.device, repeats: int = 3) -> dict:
    """Runs one check: columns of the verdict on outputs and gradients, and "bitwise", equality of repeated runs."""

    def results(function: Callable, operands: dict, seed: int = 7) -> Named:
        return outcome(function, operands, named_leaves(operands), partial(cotangents, seed=seed))

    exact = converted(arguments, torch.float64)
    truth = results(op.reference, exact)
    baseline = results(op.reference, arguments)
    usual: dict[str, float] = {}
    few = sum(t.numel() for t in leaves(arguments)) <= FEW
    for seed in SEEDS if few else ():
        errors = relative_errors(results(op.reference, arguments, seed), results(op.reference, exact, seed))
        usual = {name: max(usual.get(name, 0.0), error) for name, error in errors.items()}
    with _folding():
        runs = [results(op.run, arguments)]
        for _ in range(repeats - 1):
            fill(device)
            runs.append(results(op.run, arguments))
    said = verdict(runs[0], truth, baseline, dtype, usual=usual)
    return said.columns() | dict(bitwise=all(same(run, runs[0]) for run in runs[1:]))


def same(found: Named, want: Named) -> bool:
    """True if all tensors are bitwise equal, including NaN and signs of zero."""
    return found.keys() == want.keys() and not different(found, want)


def different(found: Named, want: Named) -> list[str]:
    """Names of the tensors that are not bitwise equal; NaN and signs of zero count."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().view(kinds[t.dtype.itemsize])

    return [name for name in want if not torch.equal(bits(found[name]), bits(want[name]))]


def fill(device: torch.device) -> None:
    """Fills free memory of the allocator with NaN, which exposes values that a kernel does not write."""
    if device.type == "cuda":
        blocks = [torch.full((2**k,), math.nan, device=device) for k in range(8, 25) for _ in range(4)]
        del blocks


def _near(op: Op, case: dict, dtype: torch.dtype, device: torch.device) -> dict:
    repeats = 3 if device.type == "cuda" else 2
    columns = check(op, op.inputs(case, dtype, device), dtype, device, repeats)
    return dict(op=op.name, dtype=str(dtype).removeprefix("torch."), shape=case, **columns)


def _mode(mode: Callable[[Callable, dict, Named], list[str]], op: Op, case: dict, device: torch.device) -> dict:
    """Row of a check whose oracle is the same call on the default stream."""
    arguments = op.inputs(case, torch.bfloat16, device)
    row: dict[str, object] = dict(op=op.name, dtype="bfloat16", shape=case)
    with launching():
        want = outcome(op.run, arguments, named_leaves(arguments))
        wait(device)
        differing = mode(op.run, arguments, want)
        row["bitwise"] = differing == []
        if differing:
            row["worst"] = ", ".join(differing)
            theirs = outcome(op.reference, arguments, named_leaves(arguments))
            row["eager"] = ", ".join(mode(op.reference, arguments, theirs))  # what differs of PyTorch's operators
    return row


def _tensors(arguments: dict) -> list[torch.Tensor]:
    """The floating-point tensors of arguments, detached so that they can be overwritten."""
    return [t.detach() for t in leaves(arguments) if t.is_floating_point()]


def on_stream(run: Callable, arguments: dict, want: Named) -> list[str]:
    """The results that differ on another stream, which writes the arguments late: other streams would read NaN."""
    tensors = _tensors(arguments)
    values = [t.clone() for t in tensors]
    for t in tensors:
        t.fill_(math.nan)
    stream = torch.cuda.Stream(tensors[0].device)
    stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        for t, value in zip(tensors, values, strict=True):
            t.copy_(value)
        got = outcome(run, arguments, named_leaves(arguments))
    stream.synchronize()
    return different(got, want)


def in_graph(run: Callable, arguments: dict, want: Named) -> list[str]:
    """The results of both passes that differ when replayed from a CUDA graph captured with zeros."""
    tensors = _tensors(arguments)
    learning = named_leaves(arguments)
    values = [t.clone() for t in tensors]
    along = list[torch.Tensor]()
    outcome(run, arguments, learning, lambda outputs: along.__iadd__(cotangents(outputs)))

    def captured() -> Named:  # of copies, as the gradient of a residual is the output gradient itself
        return outcome(run, arguments, learning, lambda outputs: [t.clone() for t in along])

    for t in tensors:
        t.zero_()
    got, replay = capture(captured, None)
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)
    for t in got.values():
        t.fill_(math.nan)
    replay()
    wait(tensors[0].device)
    return different(got, want)


def in_threads(run: Callable, arguments: dict, want: Named) -> list[str]:
    """The results that differ in several concurrent threads, each with its own stream."""
    device = next(leaves(arguments)).device

    def work(_: int) -> list[str]:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            results = [outcome(run, arguments, named_leaves(arguments)) for _ in range(ROUNDS)]
            stream.synchronize()
            return [name for each in results for name in different(each, want)]

    with ThreadPoolExecutor(THREADS) as pool:
        return sorted({name for names in pool.map(work, range(THREADS)) for name in names})


def check_load(op: Op, case: dict, dtype: torch.dtype, device: torch.device) -> dict:
    """Compares layer_scale's gradient of many passes on several streams, beside large products, with float64.

    On a unit that is shared with other kernels the warps of a block drift apart, which shows races between them.
    """
    many = device.type == "cuda"
    arguments = op.inputs(case, dtype, device)

    def gradient(function: Callable, operands: dict) -> torch.Tensor:
        learning = {name: t for name, t in named_leaves(operands).items() if name.startswith("layer_scale")}
        return outcome(function, operands, learning)["gradient of layer_scale[0]"]

    truth = gradient(op.reference, converted(arguments, torch.float64))
    baseline = gradient(op.reference, arguments)
    matrix = torch.ones(WIDTH if many else 1, WIDTH if many else 1, dtype=dtype, device=device)
    load, *streams = [torch.cuda.Stream(device) if many else None for _ in range(1 + STREAMS)]
    found = []
    wait(device)
    with launching():
        for repeat in range(REPEATS if many else STREAMS):
            with torch.cuda.stream(load):
                matrix @ matrix
            with torch.cuda.stream(streams[repeat % STREAMS]):
                found.append(gradient(op.run, arguments))
        wait(device)
    every = torch.stack(found)
    name = "gradient of layer_scale"
    said = verdict({name: every}, {name: truth.expand_as(every)}, {name: baseline.expand_as(every)}, dtype)
    return dict(op=op.name, dtype=str(dtype).removeprefix("torch."), shape=case, repeats=len(found), **said.columns())


def blocks_of(name: str, device: torch.device, **options: object) -> tuple[nn.Module, int, int]:
    """(two blocks in bfloat16, tokens of an image, channels) of a model."""
    with device:
        model = create_model(name, **dict(depth=2, num_classes=0) | options).to(torch.bfloat16)
    config = model.config
    rows, columns = config.grid_size
    return model.blocks, rows * columns + model.num_prefix_tokens, config.embed_dim


def check_memory(model: str, batch: int, device: torch.device) -> dict:
    """Compares peak memory of a training step of a model's blocks, fused and eager; a match if fused needs no more."""
    blocks, tokens, channels = blocks_of(model, device, depth=DEPTH)
    x, along = (torch.randn(batch, tokens, channels, device=device, dtype=torch.bfloat16) for _ in range(2))
    learning = [x.requires_grad_(), *blocks.parameters()]
    peaks = dict[str, int]()
    for way in ("plain", "fused"):
        with using_backend("triton"), forcing(way):
            step = partial(_train, blocks, x, along, learning)
            for _ in range(3):  # compiles kernels and records launches
                step()
            peaks[way] = peak_bytes(step, device) or 0
    fused = peaks["fused"]
    plain = peaks["plain"]
    columns: dict[str, object] = dict(match=fused <= plain, within=round(fused / plain, 3))
    columns |= dict(worst="peak memory") if not columns["match"] else {}
    return dict(op="blocks", shape=dict(B=batch, N=tokens, D=channels), fused_bytes=fused, eager_bytes=plain, **columns)


def _train(blocks: Callable, x: torch.Tensor, along: torch.Tensor, learning: list[torch.Tensor]) -> None:
    torch.autograd.grad(blocks(x), learning, along)


def _far(device: torch.device) -> Iterator[tuple[str, str, Callable[[int, torch.device], dict], int]]:
    """Yields (op, name of its batched argument, (images, device) → arguments, images for 2³¹ values, 2¹² on a CPU)."""
    tiny = device.type != "cuda"
    limit, dtype = (2**12, torch.float32) if tiny else (2**31, torch.bfloat16)
    D, H, N, P, side = (32, 2, 5, 8, 16) if tiny else (768, 12, 197, 16, 224)

    def new(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(3)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    def layer_norm(B: int, d: torch.device) -> dict:
        return dict(x=new(d, B, N, D), weight=new(d, D), bias=new(d, D), eps=1e-6)

    def linear(B: int, d: torch.device) -> dict:
        return dict(x=new(d, B, N, D), weight=new(d, 4 * D, D, scale=D**-0.5))

    def patch_embed(B: int, d: torch.device) -> dict:
        return dict(image=new(d, B, 3, side, side), weight=new(d, D, 3, P, P, scale=(3 * P * P) ** -0.5))

    def depthwise(B: int, d: torch.device) -> dict:
        return dict(x=new(d, B, P, P, D), weight=new(d, D, 1, 3, 3, scale=1 / 3))

    yield "layer_norm", "x", layer_norm, limit // (N * D)
    yield "attention_qkv", "qkv", lambda B, d: dict(qkv=new(d, B, N, 3 * D), num_heads=H), limit // (N * 3 * D)
    yield "linear", "x", linear, limit // (N * 4 * D)
    yield "patch_embed", "image", patch_embed, limit // (3 * side**2)
    yield "depthwise", "x", depthwise, limit // (P * P * D)


def _beyond(name: str, images: str, build: Callable, count: int, device: torch.device) -> dict:
    return dict(op=name, **check_far(BY_NAME[name], images, build(count + 9, device)))


def check_far(op: Op, images: str, arguments: dict) -> dict:
    """Compares the last images of a large batch with the float64 reference on these images only."""
    with torch.no_grad(), _folding():
        output = next(leaves(op.run(**arguments)))
        values = max(output.numel(), arguments[images].numel())
        got = output[-8:].clone()
    del output
    tail = arguments | {images: arguments[images][-8:].clone()}
    truth = outcome(op.reference, converted(tail, torch.float64), None)
    baseline = outcome(op.reference, tail, None)
    return verdict({"output 0": got}, truth, baseline, got.dtype).columns() | dict(values=values)
