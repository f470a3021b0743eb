"""Fuzzing of the public functions: thousands of valid and invalid calls on the PyTorch path and on the kernels.

    python -m benchmarks.fuzz                       # 10,000 on PyTorch, 500 on the kernels; writes results/fuzz.json
    python -m benchmarks.fuzz --number 37           # one call on both paths, with its arguments

A call is a case of `OPS` with some arguments replaced; its number determines it completely. It must match the reference
in float64, or raise ValueError, TypeError or NotImplementedError in a `raise` statement of this package. Kernels run in
Triton's interpreter, in separate processes, so that a crash is one failure.
"""

import argparse
import json
import linecache
import math
import platform
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

import fastvit_triton
from fastvit_triton.kernels import OPS
from fastvit_triton.kernels.activation import ACTIVATIONS
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.fold import fold
from fastvit_triton.kernels.layer_norm import row_stats
from fastvit_triton.kernels.op import Op
from fastvit_triton.measure.compare import leaves, named_leaves, outcome, verdict

from .correctness import kernels_on
from .result_file import ROOT, as_json, origin, write_text

RESULT = ROOT / "benchmarks" / "results" / "fuzz.json"
OURS = str(Path(fastvit_triton.__file__).parent)
ERRORS = ("ValueError", "TypeError", "NotImplementedError")
SEED, CALLS, KERNEL_CALLS = 2026, 10_000, 500
MODULE = ["-m", "benchmarks.fuzz"]  # what a worker runs
LENGTHS = (torch.int32, torch.int64)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
UNSUPPORTED = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
NUMBERS = (-1, 0, 1, 2, 3, 7, -3, 1.5, 0.0, -0.25, math.nan, math.inf, 1e300, 2**40, 2**70, 1j)
VALUES = (*NUMBERS, True, None, "x", (), (1, 2), [3])


def drawn(number: int, seed: int = SEED) -> tuple[Op, random.Random]:
    """The op of one call, and what draws its arguments."""
    draw = random.Random(seed * 1_000_003 + number)
    return draw.choice(OPS), draw


def example(number: int, seed: int = SEED) -> tuple[Op, dict, list[str]]:
    """(op, arguments, descriptions of the replaced arguments) of one call."""
    op, draw = drawn(number, seed)
    torch.manual_seed(number)
    small = {n: c for n, c in (op.cases | op.ragged).items() if math.prod(v or 1 for v in c.values()) < 40_000}
    name, dtype = draw.choice(sorted(small)), draw.choice(DTYPES)
    arguments = op.inputs(small[name], dtype, "cpu")
    arguments |= _more(op.name, arguments, draw)
    done = [f"{name} {dtype}"]
    for _ in range(draw.choice((0, 0, 1, 1, 1, 2))):
        argument = draw.choice(sorted(arguments))
        arguments[argument], what = _replaced(arguments[argument], draw, argument in ("stats", "cu_seqlens"))
        done.append(f"{argument}: {what}")
    return op, arguments, done


def _more(op: str, given: dict, draw: random.Random) -> dict:
    """Valid values for optional arguments that the op's cases do not use."""

    def randn(*shape: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(like.dtype).requires_grad_()

    options = {}
    if op == "attention":
        q, k = given["q"], given["k"]
        (B, H, Nq, _), Nk = q.shape, k.shape[2]
        mask = torch.rand(1, 1, Nq, Nk) < 0.7
        lens = torch.randint(-1, Nk + 2, (B,))
        options = dict(scale=0.3, return_lse=True)
        if "axis_bias" not in given:
            options |= dict(bias=draw.choice((mask, randn(1, H, 1, Nk, like=q))), kv_lens=lens, causal=True)
    elif op == "varlen_attention" or "varlen" in given:
        options = dict(scale=0.5, causal=True)
    elif op == "attention_qkv":
        B, N, _ = given["qkv"].shape
        mask, lens = torch.rand(1, 1, N, N) < 0.7, torch.randint(0, N + 1, (B,), dtype=torch.int32)
        options = dict(bias=mask, scale=-0.3, return_lse=True, kv_lens=lens, causal=True)
    elif op == "linear" and "activation" not in given:
        activation = draw.choice((*ACTIVATIONS, None))
        options = dict(return_stats=True, activation=activation, residual=None, layer_scale=None)
    elif op == "depthwise":
        activation = draw.choice((*ACTIVATIONS, None))
        options = dict(bias=None, activation=activation, residual=given["stride"] == 1)
    elif op == "batch_norm_act":
        activation = draw.choice((*ACTIVATIONS, None))
        options = dict(
            weight=None, bias=None, activation=activation, residual=randn(*given["x"].shape, like=given["x"])
        )
    elif op == "window_attention":
        (h, w), heads = given["window_size"], given["num_heads"]
        shift = draw.randrange(h), draw.randrange(w)
        pad = randn(given["qkv"].shape[3], like=given["qkv"])
        options = dict(shift_size=shift, bias=None, pad=pad, pad_first=draw.random() < 0.5)
        options["scale"] = draw.choice((0.3, None, randn(heads, like=pad)))
    elif op == "deformable_attention":
        (B, Nq, _, L, *_), like = given["locations"].shape, given["locations"]
        options = dict(reference=draw.choice((randn(B, Nq, L, 2, like=like), randn(B, Nq, L, 4, like=like), None)))
    elif op == "mlp":
        options = dict(return_stats=True, residual=given["x"])
    elif op == "patch_embed":
        image, weight = given["image"], given["weight"]
        pixels, mean = torch.randint(0, 256, image.shape, dtype=torch.uint8), torch.full((image.shape[1],), 0.45)
        if draw.random() < 0.4:
            return dict(image=pixels, mean=mean.to(weight.dtype), std=mean / 2)
    options = {n: v for n, v in options.items() if draw.random() < 0.3}
    if op in ("linear", "mlp") and "norm" in given and draw.random() < 0.5:
        options["stats"] = row_stats(given["x"])
        weight, bias = (given["weight"], given.get("bias")) if op == "linear" else given["fc1"]
        norm_weight, norm_bias, *kind = given["norm"]
        if isinstance(weight, torch.Tensor) and draw.random() < 0.5:
            folded = fold((weight,), (bias,), norm_weight, norm_bias, weight.dtype)
            options |= dict(norm=(None, None, *kind))
            options |= dict(weight=folded, bias=None) if op == "linear" else dict(fc1=(folded, None))
    return options


def _replaced(value: object, draw: random.Random, exact: bool) -> tuple[object, str]:
    """Another value for an argument, and its description; with `exact`, views keep their values."""
    if isinstance(value, (tuple, list)) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        part, what = _replaced(value[i], draw, exact)
        parts = [part if i == j else v for j, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts), f"[{i}] {what}"
    if isinstance(value, (tuple, list)):
        return draw.choice(((value[:-1], "shorter"), ((*value, None), "longer"), (list(value), "as a list")))
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_sparse or draw.random() < 0.1:
        other = draw.choice(VALUES)
        return other, repr(other)
    kinds = [_view, _view, _sized, _ranked, _typed, _placed, *[_shifted] * (2 if value.dtype in LENGTHS else 0)]
    return draw.choice(kinds)(value.detach(), draw, exact)


def _view(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[torch.Tensor, str]:
    strided = t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t
    turned = t.mT.contiguous().mT if t.dim() > 1 else strided
    shifted = torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) if t.numel() else t
    views = [(strided, "strided"), (turned, "turned"), (shifted, "shifted")]
    if t.dim() and len(t) and not exact:
        views.append((t[:1].expand(t.shape), "expanded"))
    return draw.choice(views)


def _shifted(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[torch.Tensor, str]:
    by = draw.choice((-1, 1, 2, 10**6, -(10**9)))
    where = torch.rand(t.shape) < draw.choice((0.3, 1.0))
    return t + by * where.to(t.dtype), f"partly {by} more"


def _sized(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[torch.Tensor, str]:
    if not t.dim():
        return t, "as it is"
    axis = draw.randrange(t.dim())
    size = max(0, draw.choice((0, 1, t.shape[axis] - 1, t.shape[axis] + 1, 2 * t.shape[axis])))
    if not t.shape[axis]:
        return t.new_zeros(*t.shape[:axis], size, *t.shape[axis + 1 :]), f"axis {axis} of size {size}"
    return t.index_select(axis, torch.arange(size) % t.shape[axis]), f"axis {axis} of size {size}"


def _ranked(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[torch.Tensor, str]:
    variants = [(t[None], "one axis more"), (t.flatten(), "flat"), (torch.tensor(1.0).to(t.dtype), "a 0-d tensor")]
    if t.dim() and len(t):
        variants.append((t[0], "one axis less"))
    return draw.choice(variants)


def _typed(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[torch.Tensor, str]:
    dtype = draw.choice(DTYPES + UNSUPPORTED)
    return (t if dtype.is_complex or not t.is_complex() else t.real).to(dtype), str(dtype)


def _placed(t: torch.Tensor, draw: random.Random, exact: bool) -> tuple[object, str]:
    variants = [(t.to("meta"), "on meta"), (t.tolist(), "a list"), (None, "None")]
    if t.dtype in (torch.float32, torch.float64):
        variants += [(t.numpy(), "an array"), (t.to_sparse(), "sparse")]
    return draw.choice(variants)


def answer(number: int, seed: int = SEED) -> dict:
    """Runs one call; returns a row with "came" ("ok" or the error's class) and, for a failure, "wrong"."""
    op, arguments, done = example(number, seed)
    row = dict(number=number, op=op.name, done=done)
    learning = named_leaves(arguments)
    try:
        got = outcome(op.run, arguments, learning or None)
    # Any error: its class is the finding, and the row says whether it is a message of this package.
    except Exception as error:
        name, last = type(error).__name__, error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        file = last.tb_frame.f_code.co_filename
        ours = file.startswith(OURS) and linecache.getline(file, last.tb_lineno).lstrip().startswith("raise ")
        row |= dict(came=name, message=str(error).splitlines()[0][:200] if str(error) else "")
        return (
            row
            if ours and name in ERRORS and "\n" not in str(error)
            else row | dict(wrong="not an error message of this package")
        )
    row["came"] = "ok"
    tensors = list(leaves(tuple(arguments.values())))
    if any(t.is_meta for t in tensors):
        return row
    dtypes = {t.dtype for t in (*tensors, *got.values()) if t.is_floating_point()} & set(DTYPES)
    dtype = max(dtypes, key=lambda d: torch.finfo(d).eps)
    wide = _wide(arguments)
    with using_backend("torch"):
        truth = outcome(op.reference, wide, named_leaves(wide) or None)
        baseline = outcome(op.reference, arguments, learning or None)
    for name in [n for n, t in truth.items() if "return_stats" in arguments and t.shape != got[n].shape]:
        del truth[name], baseline[name], got[name]  # tile statistics depend on the path
    for name, want in truth.items():  # −inf − −inf is NaN; L of a row without keys is −inf
        same = want.isinf() & (got[name] == want)
        for named in (truth, baseline, got):
            named[name] = named[name].masked_fill(same, 0)
    every = got | baseline | truth
    compared = verdict(*(_gradients_joined(outputs, every) for outputs in (got, truth, baseline)), dtype)
    return row if compared.match else row | dict(wrong=f"{compared.worst} has {compared.error:.3g} times its budget")


def _gradients_joined(found: dict[str, torch.Tensor], every: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs, and all gradients named in `every` joined into one tensor with one budget; a missing gradient is zeros.

    Attention's Δ is a sum over the stored output, whose rounding a large scale carries into the smaller gradients.
    """
    outputs = {name: t for name, t in found.items() if name.startswith("output")}
    learning = sorted(name for name in every if not name.startswith("output"))
    gradients = [found.get(name, torch.zeros_like(every[name])).double().flatten() for name in learning]
    return outputs | ({"gradients": torch.cat(gradients)} if gradients else {})


def _wide(value: object) -> object:
    """The same arguments in float64, dtype arguments included."""
    if isinstance(value, dict):
        return {name: _wide(v) for name, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)._make(map(_wide, value)) if hasattr(value, "_make") else type(value)(map(_wide, value))
    return torch.float64 if isinstance(value, torch.dtype) else value


def on_kernels(numbers: range, seed: int = SEED) -> list[dict]:
    """Rows of calls on the kernels; if the process dies, the call it was running is marked "crash"."""
    rows, first = [], numbers.start
    while first < numbers.stop:
        words = [sys.executable, *MODULE, "--worker", str(first), str(numbers.stop), "--seed", str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        finished = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"number"')]
        rows, first = rows + finished, first + len(finished)
        if first < numbers.stop:
            op, _, replaced = example(first, seed)
            why = f"the process ended with code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
            rows.append(dict(number=first, op=op.name, done=replaced, came="crash", wrong=why))
            first += 1
    return rows


def failures(plain: list[dict], kernels: list[dict]) -> list[str]:
    """One line for each failure, and for each call whose result differs between the two paths."""
    lines = [f"{row['number']} {row['op']} {row['done']}: {row}" for row in (*plain, *kernels) if "wrong" in row]
    of = {row["number"]: row for row in plain}
    pairs = [(of[row["number"]], row) for row in kernels]
    differ = [(a, b) for a, b in pairs if (a["came"], a.get("message")) != (b["came"], b.get("message"))]
    return lines + [f"the paths differ: {a} {b}" for a, b in differ]


def counts(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Number of calls by function and outcome."""
    return {op.name: dict(sorted(Counter(r["came"] for r in rows if r["op"] == op.name).items())) for op in OPS}


def main() -> None:
    """Runs all calls, a single call, or a worker's range of calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--number", type=int, help="one call on both paths")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with kernels_on(torch.device("cpu")):
            for number in range(*options.worker):
                print(json.dumps(answer(number, options.seed)), flush=True)
        return
    if options.number is not None:
        print(example(options.number, options.seed), answer(options.number, options.seed), sep="\n")
        print(*on_kernels(range(options.number, options.number + 1), options.seed))
        return
    sys.exit("\n".join(report(options.seed)) or 0)


def report(seed: int = SEED) -> list[str]:
    """Runs all calls, writes results/fuzz.json and returns the failures."""
    plain = [answer(number, seed) for number in range(CALLS)]
    kernels = on_kernels(range(KERNEL_CALLS), seed)
    wrong = failures(plain, kernels)
    facts = dict(seed=seed, python=platform.python_version(), calls=CALLS, kernel_calls=KERNEL_CALLS, failures=wrong)
    result = origin() | facts | dict(pytorch=counts(plain), kernels=counts(kernels))
    write_text(RESULT, as_json(result))
    return wrong


if __name__ == "__main__":
    main()
