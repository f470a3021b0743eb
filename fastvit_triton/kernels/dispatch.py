"""Chooses, within a registered op, between our Triton kernel and PyTorch (cuBLAS, SDPA, cuDNN).

The choice is the entry "choice" of a row of launch parameters in tuned/: by shape, "ours" or "torch", "measured" or
"predicted". For shapes without an entry a rule decides: ours only if

    the operation is bound by memory even at its fewest bytes, flops / bytes < RIDGE, and
    our launches move fewer bytes than eager's operators, by at least the fraction SAVED. Each operator counts every
    tensor that it reads or writes once.

Products in IEEE float32 are left to PyTorch unless measured. FASTVIT_TRITON_BACKEND=triton always
selects the kernels. Both choices give the same outputs; `eager` is PyTorch's side.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend, launch
from .argument import Epilogue

SAVED = 0.15
# 16-bit flops per byte of memory bandwidth from data sheets, for the GPU of each architecture with the smallest ratio:
# A100 80 GB, RTX 3090, RTX 4090, H200, B200, RTX 5090, MI300X
RIDGE = dict(sm_80=153, sm_86=76, sm_89=164, sm_90=184, sm_100=281, sm_120=117, gfx942=247)
MAX_CHOICES = 4096  # cached choices

forced: bool | None = None  # overrides the choice, for measurements: True for the kernels, False for PyTorch
_choices: dict[tuple, bool] = {}
_observer: Callable[[str, str, str], None] | None = None  # see `observing`


class Work(NamedTuple):
    """Cost of an operation.

    Attributes:
        flops: floating-point operations.
        floor: bytes if every input is read once and every output written once.
        ours: bytes that our launches move.
        eager: bytes that eager PyTorch's operators move.
    """

    flops: float
    floor: float
    ours: float
    eager: float


def attention(row: Callable[..., str], kernel: str, q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> bool:
    """True if our kernels are chosen for attention without bias, key lengths and packed images.

    Args:
        row: (kernel, q, bias, width) → (row name, default launch parameters).
        kernel: "fwd", or "bwd_dq" for the whole backward pass.
        q: [B, H, Nq, D].
        k: [B, H, Nk, D].
        v: [B, H, Nk, Dv].
        packed: the gradient is one tensor dqkv, which PyTorch has to concatenate.
    """
    deterministic = kernel != "fwd" and torch.are_deterministic_algorithms_enabled()  # SDPA sums dq in any order
    key = (kernel, q.shape, k.shape[2], v.shape[3], packed, deterministic, q.dtype, q.device, *_state(q))
    choice = _choices.get(key)
    if choice is None:
        D = q.shape[3]
        only_ours = D % 8 or D != v.shape[3] or not q.numel() or not k.numel()  # no kernel of SDPA returns L
        work = None if only_ours or deterministic else _attention(kernel, q, k, packed)
        choice = remember(key, lambda: row(kernel, q, None, D)[0], q, work)
    return choice


def linear(
    row: Callable[..., str],
    x: Tensor,
    weight: Tensor,
    colsum: Tensor | None,
    stats: Tensor | None,
    epilogue: Epilogue,
    save: bool,
) -> bool:
    """True if our kernel is chosen for the product of `linear` with its norm and epilogue.

    Args:
        row: (x, F, activation, layer_scale, residual) → row name.
        x: [..., K].
        weight: [F, K], or [2F, K] for "swiglu".
        colsum: [F], not None if a LayerNorm is folded in.
        stats: its row statistics [M, tiles, 2], or None.
        epilogue: what follows the product.
        save: a backward pass follows, which needs the pre-activation of an activation.
    """
    activation, layer_scale, sample_scale, residual, return_stats = epilogue
    ends = (layer_scale is not None, sample_scale is not None, residual is not None, return_stats)
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
    choice = _choices.get(key)
    if choice is None:
        F = len(weight) // 2 if activation == "swiglu" else len(weight)
        work = _linear(x, weight, colsum, stats, activation, ends, save) if x.numel() else None
        choice = remember(key, lambda: row(x, F, activation, layer_scale, residual), x, work)
    return choice


def patch_embed(row: str, image: Tensor, weight: Tensor, pos: Tensor | None, prefix: Tensor | None) -> bool:
    """True if our kernel is chosen for the patch projection or, for a row of "bwd", for its weight gradient.

    Args:
        row: row name in tuned/.
        image: [B, C, H, W].
        weight: [D, C, P, P'].
        pos: [1, N, D], or None.
        prefix: [1, T, D], or None.
    """
    call = (row, image.shape, image.dtype, weight.shape, pos is None, prefix is None)
    key = (*call, weight.dtype, weight.device, *_state(weight))
    choice = _choices.get(key)
    if choice is None:
        work = _patch_embed(row, image, weight, pos, prefix) if image.numel() else None
        choice = remember(key, lambda: row, weight, work)
    return choice


def _state(x: Tensor) -> tuple:
    """Global state that a choice depends on, as part of the cache key."""
    return forced, backend.backend(), launch.target, x.dtype == torch.float32 and torch.get_float32_matmul_precision()


def remember(key: tuple, row: Callable[[], str], x: Tensor, shape_and_work: tuple[str, Work] | None) -> bool:
    """Makes and caches a choice; True for our kernels.

    Args:
        key: of the cache.
        row: returns the row name.
        x: tensor of the operation's device and dtype.
        shape_and_work: (name of the shape, cost); None if only our kernels support the case.
    """
    if _observer is not None:
        if shape_and_work is not None:
            shape, work = shape_and_work
            exact = launch.precision(x) == "ieee"
            _observer(row(), shape, rule(launch.architecture(x.device), x.dtype, exact, work))
        return True
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    if shape_and_work is None or forced is not None or backend.backend() == "triton":
        choice = shape_and_work is None or forced is not False
    else:
        architecture, (shape, work) = launch.architecture(x.device), shape_and_work
        choice = decide(row(), shape, architecture, x.dtype, launch.precision(x) == "ieee", work) == "ours"
    _choices[key] = choice
    return choice


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
    """The choice, "ours" or "torch", from the table of an architecture, else by the rule; not cached.

    Args:
        row: row name in tuned/.
        shape: name of the shape in the table.
        architecture: sm_90, gfx942, …
        dtype: of the operands.
        exact: products are in IEEE float32.
        work: cost of the operation.
    """
    column = choices(architecture).get(row, {})
    for provenance in ("measured", "predicted"):
        if shape in column.get(provenance, {}):
            return column[provenance][shape]
    return rule(architecture, dtype, exact, work)


def rule(architecture: str, dtype: torch.dtype, exact: bool, work: Work) -> str:
    """The choice without a table, by the rule in the header: "ours" or "torch"; arguments as in `decide`."""
    ridge = RIDGE.get(architecture, min(RIDGE.values())) / (2 if dtype == torch.float32 else 1)
    bound_by_memory = work.flops < ridge * work.floor
    return "ours" if not exact and bound_by_memory and work.eager - work.ours >= SAVED * work.eager else "torch"


@functools.cache
def choices(architecture: str) -> dict[str, dict[str, dict[str, str]]]:
    """Choices in the table of an architecture: row name → "measured" or "predicted" → shape → "ours" or "torch"."""
    path = launch.TUNED / f"{architecture}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: row["choice"] for name, row in rows.items() if "choice" in row}


def forget() -> None:
    """Clears the caches, so that tables are read again."""
    _choices.clear()
    choices.cache_clear()


def _class(n: int) -> int:
    """A size as in the names of shapes: the smallest power of two that is at least n."""
    return launch.power_of_2(n)


def _attention(kernel, q, k, packed):
    (B, H, Nq, D), Nk, size = q.shape, k.shape[2], q.element_size()
    queries, keys, logs = B * H * Nq * D * size, B * H * Nk * D * size, 4 * B * H * Nq
    if kernel == "fwd":
        moved = 2 * queries + 2 * keys + logs
        work = Work(4 * B * H * Nq * Nk * D, moved, moved, moved)
    else:  # two kernels: dq and Δ read q, k, v, o, do; dk and dv read q, k, v, do. One kernel a head reads them once
        floor = 4 * queries + 4 * keys + logs
        whole_head = size == 2 and D in (16, 32, 64) and Nk <= 256
        ours = floor if whole_head else 6 * queries + 6 * keys + 4 * logs
        work = Work(10 * B * H * Nq * Nk * D, floor, ours, floor)
        if packed:
            work = work._replace(eager=floor + 2 * (queries + 2 * keys))
    shape = f"N={_class(Nk)} heads={_class(B * H)}{' packed' if packed else ''}"
    return shape, work


def _linear(x, weight, colsum, stats, activation, ends, save):
    """(shape name, cost). In eager each operator, a LayerNorm too, reads its inputs and writes its output."""
    (P, K), size = weight.shape, x.element_size()
    M, F = x.numel() // K, P // 2 if activation == "swiglu" else P
    layer_scale, sample_scale, residual, _ = ends
    inputs, outputs = M * K * size, M * F * size
    floor = inputs + P * K * size + outputs + residual * outputs
    kept = save and activation is not None
    ours = floor + (colsum is not None and stats is None) * inputs + kept * M * P * size
    eager = inputs + P * K * size + M * P * size + (colsum is not None) * 2 * inputs
    eager += {None: 0, "swiglu": 5, "quick_gelu": 5}.get(activation, 2) * outputs
    eager += (2 * layer_scale + 2 * sample_scale + 3 * residual) * outputs
    parts = [f"K={K} F={F} M={_class(M)}", "norm" * (colsum is not None), activation or ""]
    parts += [word for word, there in zip(("layer_scale", "scale", "residual", "stats"), ends, strict=True) if there]
    parts += ["kept" * kept]
    return " ".join(filter(None, parts)), Work(2.0 * M * P * K, floor, ours, eager)


def _patch_embed(row, image, weight, pos, prefix):
    (D, _, P, Q), size, B = weight.shape, weight.element_size(), len(image)
    N, T = image.shape[2] // P * (image.shape[3] // Q), 0 if prefix is None else prefix.shape[1]
    K, pixels, tokens = weight[0].numel(), image.numel() * image.element_size(), B * N * D * size
    shape, flops = f"K={K} D={D} M={_class(B * N)}", 2.0 * B * N * K * D
    if ".bwd." in row:  # eager copies the gradient of the tokens into the layout of an image
        floor = pixels + tokens + K * D * size
        parts = launch.cdiv(B * N, 4096) * K * D * 4
        return shape, Work(flops, floor, floor + 2 * parts, floor + 2 * tokens)
    all_tokens = tokens + B * T * D * size
    floor = pixels + K * D * size + all_tokens
    eager = pixels + K * D * size + tokens + (T > 0) * (tokens + all_tokens) + (pos is not None) * 2 * all_tokens
    if image.dtype == torch.uint8:  # cast, divided by 255, minus mean, divided by std
        eager += image.numel() * (1 + 7 * size)
    return f"{shape} prefix={T}", Work(flops, floor, floor, eager)
