"""Who computes inside a registered op: our kernel, or what eager PyTorch calls there (SDPA, cuBLAS, cuDNN).

The choice is a column of tuned/: the row that names a kernel's launch parameters may also say, by shape, who is faster,
"ours" or "torch", either "measured" or "predicted". A shape that stands in no table goes by the rule: ours only where

    the floor of the operation is bound by memory, flops / bytes < RIDGE, and
    our launches move at least a part SAVED fewer bytes than eager's operators, each tensor counted once for each.

Products in IEEE float32 are PyTorch's unless measured. `FASTVIT_TRITON_BACKEND=triton`, as in Triton's interpreter,
always runs the kernels, so that a proof proves something. Outputs are the same either way: `eager` makes the others.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend, launch

SAVED = 0.15
# 16-bit flops that a part does while it moves a byte, from the data sheets of the smallest known ratio by architecture:
# A100 80 GB, RTX 3090, RTX 4090, H200, B200, RTX 5090, MI300X
RIDGE = dict(sm_80=153, sm_86=76, sm_89=164, sm_90=184, sm_100=281, sm_120=117, gfx942=247)
MOST = 4096  # shapes that are remembered

forced: bool | None = None  # whether the kernels run, whatever was measured: for those who measure and compare
_made: dict[tuple, bool] = {}
_observer: Callable[[str, str, str], None] | None = None  # see `observing`


class Work(NamedTuple):
    """What an operation costs: flops, bytes that its floor moves, that our launches move, and eager's operators."""

    flops: float
    floor: float
    ours: float
    eager: float


def attention(row: Callable[..., str], kernel: str, q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> bool:
    """Whether our kernels do `kernel` ("fwd" or "bwd_dq" for the whole backward pass) of unmasked, unpadded attention.

    Args:
        row: (kernel, q, bias, width) → the row's name, and its default.
        kernel: as in `attention.SPACE`.
        q: [B, H, Nq, D].
        k: [B, H, Nk, D].
        v: [B, H, Nk, Dv].
        packed: the gradient is one tensor, which eager has to put together.
    """
    repeats = kernel != "fwd" and torch.are_deterministic_algorithms_enabled()  # SDPA adds up dq in any order
    key = (kernel, q.shape, k.shape[2], v.shape[3], packed, repeats, q.dtype, q.device, *_state(q))
    found = _made.get(key)
    if found is None:
        D = q.shape[3]
        alone = D % 8 or D != v.shape[3] or not q.numel() or not k.numel()  # SDPA has no kernel that tells L
        work = None if alone or repeats else _attention(kernel, q, k, packed)
        found = remember(key, lambda: row(kernel, q, None, D)[0], q, work)
    return found


def linear(
    row: Callable[..., str],
    x: Tensor,
    weight: Tensor,
    colsum: Tensor | None,
    stats: Tensor | None,
    around: tuple,
    save: bool,
) -> bool:
    """Whether our kernel does the product of `linear` with what stands around it.

    Args:
        row: (x, F, activation, layer_scale, residual) → the row's name.
        x: [..., K].
        weight: [F, K], or [2F, K] for "swiglu".
        colsum: given when a LayerNorm is folded in.
        stats: its row statistics, or None.
        around: (activation, layer_scale, sample_scale, residual, return_stats).
        save: the pre-activation is kept.
    """
    activation, layer_scale, scale, residual, return_stats = around
    ends = (layer_scale is not None, scale is not None, residual is not None, return_stats)
    key = (
        x.numel(),
        weight.shape,
        colsum is None,
        stats is None,
        activation,
        ends,
        save,
        *(None if t is None else t.dtype for t in (x, layer_scale, residual)),
        x.device,
        *_state(x),
    )
    found = _made.get(key)
    if found is None:
        F = len(weight) // 2 if activation == "swiglu" else len(weight)
        work = _linear(x, weight, colsum, stats, activation, ends, save) if x.numel() else None
        found = remember(key, lambda: row(x, F, activation, layer_scale, residual), x, work)
    return found


def patch_embed(row: str, image: Tensor, weight: Tensor, pos: Tensor | None, prefix: Tensor | None) -> bool:
    """Whether our kernel does the patch projection, or with a row of "bwd" its weight's gradient.

    Args:
        row: its name in tuned/.
        image: [B, C, H, W].
        weight: [D, C, P, P'].
        pos: [1, N, D], or None.
        prefix: [1, T, D], or None.
    """
    given = (row, image.shape, image.dtype, weight.shape, pos is None, prefix is None)
    key = (*given, weight.dtype, weight.device, *_state(weight))
    found = _made.get(key)
    if found is None:
        work = _patch_embed(row, image, weight, pos, prefix) if image.numel() else None
        found = remember(key, lambda: row, weight, work)
    return found


def _state(x: Tensor) -> tuple:
    """What else a choice depends on."""
    return forced, backend.backend(), launch.target, x.dtype == torch.float32 and torch.get_float32_matmul_precision()


def remember(key: tuple, row: Callable[[], str], x: Tensor, described: tuple[str, Work] | None) -> bool:
    """Whether the kernels run; `described` is the shape's name and what it costs, None where nobody else could."""
    if _observer is not None:
        if described is not None:
            shape, work = described
            exact = launch.precision(x) == "ieee"
            _observer(row(), shape, rule(launch.architecture(x.device), x.dtype, exact, work))
        return True
    if len(_made) >= MOST:
        _made.clear()
    if described is None or forced is not None or backend.backend() == "triton":
        _made[key] = described is None or forced is not False
    else:
        architecture = launch.architecture(x.device)
        _made[key] = (
            decide(row(), described[0], architecture, x.dtype, launch.precision(x) == "ieee", described[1]) == "ours"
        )
    return _made[key]


@contextlib.contextmanager
def forcing(kernels: bool = True) -> Iterator[None]:
    """In this context our kernels run wherever they can, or with `kernels=False` nowhere, whatever the tables say."""
    global forced
    before, forced = forced, kernels
    try:
        yield
    finally:
        forced = before


@contextlib.contextmanager
def observing(observer: Callable[[str, str, str], None]) -> Iterator[None]:
    """In this context our kernels run wherever they can, and each choice is reported; nothing is cached.

    Args:
        observer: called with the row's name, the shape's name, and what the rule says, "ours" or "torch"; not called
            where only our kernels support the case.
    """
    global _observer
    before, _observer = _observer, observer
    forget()
    try:
        yield
    finally:
        _observer = before
        forget()


def decide(row: str, shape: str, architecture: str, dtype: torch.dtype, exact: bool, work: Work) -> str:
    """ "ours" or "torch", from the table or by the rule; not cached.

    Args:
        row: name of the launch parameters.
        shape: what the table calls this shape.
        architecture: sm_90, gfx942, …
        dtype: of the operands.
        exact: products are in IEEE float32.
        work: what it costs.
    """
    column = choices(architecture).get(row, {})
    for provenance in ("measured", "predicted"):
        if shape in column.get(provenance, {}):
            return column[provenance][shape]
    return rule(architecture, dtype, exact, work)


def rule(architecture: str, dtype: torch.dtype, exact: bool, work: Work) -> str:
    """ "ours" where it provably moves fewer bytes and bytes are what counts, else "torch"."""
    ridge = RIDGE.get(architecture, min(RIDGE.values())) / (2 if dtype == torch.float32 else 1)
    bound_by_memory = work.flops < ridge * work.floor
    return "ours" if not exact and bound_by_memory and work.eager - work.ours >= SAVED * work.eager else "torch"


@functools.cache
def choices(architecture: str) -> dict[str, dict[str, dict[str, str]]]:
    """Row → provenance → shape → who, of an architecture's table."""
    path = launch.TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: row["choice"] for name, row in rows.items() if "choice" in row}


def forget() -> None:
    """Reads the tables anew: for what writes them, and for tests."""
    _made.clear()
    choices.cache_clear()


def _class(n: int) -> int:
    """A size as tables name it: the power of two from n up."""
    return launch.power_of_2(n)


def _attention(kernel, q, k, packed):
    (B, H, Nq, D), Nk, size = q.shape, k.shape[2], q.element_size()
    queries, keys, logs = B * H * Nq * D * size, B * H * Nk * D * size, 4 * B * H * Nq
    if kernel == "fwd":
        moved = 2 * queries + 2 * keys + logs
        work = Work(4 * B * H * Nq * Nk * D, moved, moved, moved)
    else:  # dq with Δ reads q, k, v, o, do and writes dq; dk and dv read q, k, v, do; a whole head reads them once
        floor = 4 * queries + 4 * keys + logs
        whole = size == 2 and D in (16, 32, 64) and Nk <= 256
        ours = floor if whole else 6 * queries + 6 * keys + 4 * logs
        work = Work(10 * B * H * Nq * Nk * D, floor, ours, floor)
        if packed:
            work = work._replace(eager=floor + 2 * (queries + 2 * keys))
    shape = f"N={_class(Nk)} heads={_class(B * H)}{' packed' if packed else ''}"
    return shape, work


def _linear(x, weight, colsum, stats, activation, ends, save):
    """Bytes: a LayerNorm reads and writes x, an elementwise operator reads what it takes and writes its output."""
    (P, K), size = weight.shape, x.element_size()
    M, F = x.numel() // K, P // 2 if activation == "swiglu" else P
    layer_scale, scale, residual, _ = ends
    entering, leaving = M * K * size, M * F * size
    floor = entering + P * K * size + leaving + residual * leaving
    kept = save and activation is not None
    ours = floor + (colsum is not None and stats is None) * entering + kept * M * P * size
    eager = entering + P * K * size + M * P * size + (colsum is not None) * 2 * entering
    eager += {None: 0, "swiglu": 5, "quick_gelu": 5}.get(activation, 2) * leaving
    eager += (2 * layer_scale + 2 * scale + 3 * residual) * leaving
    parts = [f"K={K} F={F} M={_class(M)}", "norm" * (colsum is not None), activation or ""]
    parts += [word for word, there in zip(("layer_scale", "scale", "residual", "stats"), ends, strict=True) if there]
    parts += ["kept" * kept]
    return " ".join(filter(None, parts)), Work(2.0 * M * P * K, floor, ours, eager)


def _patch_embed(row, image, weight, pos, prefix):
    (D, _, P, Q), size, B = weight.shape, weight.element_size(), len(image)
    N, T = image.shape[2] // P * (image.shape[3] // Q), 0 if prefix is None else prefix.shape[1]
    K, pixels, tokens = weight[0].numel(), image.numel() * image.element_size(), B * N * D * size
    shape, flops = f"K={K} D={D} M={_class(B * N)}", 2.0 * B * N * K * D
    if ".bwd." in row:  # eager has to make the gradient of tokens an image
        floor = pixels + tokens + K * D * size
        parts = launch.cdiv(B * N, 4096) * K * D * 4
        return shape, Work(flops, floor, floor + 2 * parts, floor + 2 * tokens)
    whole = tokens + B * T * D * size
    floor = pixels + K * D * size + whole
    eager = pixels + K * D * size + tokens + (T > 0) * (tokens + whole) + (pos is not None) * 2 * whole
    if image.dtype == torch.uint8:  # as floats, divided, less the mean, over the deviation
        eager += image.numel() * (1 + 7 * size)
    return f"{shape} prefix={T}", Work(flops, floor, floor, eager)
