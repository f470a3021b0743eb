"""The op calls on which rows of launch parameters are tuned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fastvit_triton.kernels import OPS
from fastvit_triton.kernels.compiling import Collector
from fastvit_triton.kernels.launch import architecture, overriding
from fastvit_triton.kernels.op import Op
from fastvit_triton.measure.candidates import Config
from fastvit_triton.measure.compare import Named, converted, leaves, named_leaves, outcome
from fastvit_triton.measure.tuning import Candidates, by_text, to_try


@dataclass(frozen=True)
class Target:
    """An op call on which a row is tuned."""

    op: str  # name of the op
    shape: dict[str, int]  # a case of its `inputs`
    row: str  # name of the row; for attention mostly without its width suffix
    backward: bool = False  # True if the row belongs to a backward kernel


def targets(dry: bool = False) -> list[Target]:
    """Targets to tune, ordered by the time that ViTs spend in them; `dry` selects tiny shapes."""
    B = 64 if not dry else 1
    shrink = (lambda n: n) if not dry else (lambda n: max(n // 48 // 16, 1) * 16)
    C = shrink(768)
    N = shrink(197)
    F = shrink(3072)
    ordered = [Target("linear", dict(B=B, N=N, K=C, F=F, norm=1), "linear.fwd.half")]
    two = ("bwd_dq", "bwd_dkdv")  # where a program cannot hold a whole head
    whole = ("fwd_whole.128", "fwd_whole.160")
    attentions = ((64, N, ("fwd", whole[0], "bwd", "bwd_whole.128")), (80, N, ("fwd", whole[1], *two)), (64, 577, two))
    for width, length, kernels in attentions if not dry else ((16, N, ("fwd", "bwd")), (48, N, two)):
        case = dict(B=B, H=12 if not dry else 1, Nq=length, Nk=length, D=width, Dv=width)
        for kernel in kernels:
            ordered.append(Target("attention", case, f"attention.{kernel}", kernel.startswith("bwd")))
    patches = dict(
        B=B, C=3, H=shrink(224) // 8 * 8, W=shrink(224) // 8 * 8, P=16 if not dry else 8, D=C, T=1, pos_prefix=1
    )
    ordered.append(Target("mlp", dict(B=B, N=N, D=C, F=shrink(2048), gated=0), "linear.fwd.gated"))
    ordered.append(Target("mlp", dict(B=B, N=N, D=shrink(192), F=shrink(768), save=1), "mlp.fwd"))
    ordered.append(Target("patch_embed", patches, "patch_embed.fwd.half"))
    for side, window, kind in ((56, 7, ""), (48, 12, ".large")):
        size, n, heads, D = (side, window, 3, 32) if not dry else (2 * window, window, 1, 16)
        swin = dict(B=B, H=size, W=size, heads=heads, D=D, h=n, w=n, sy=n // 2, sx=n // 2, bias=1)
        ordered.append(Target("window_attention", swin, f"window.fwd{kind}"))
        ordered.append(Target("window_attention", swin, f"window.bwd{kind}", True))
    ordered.append(Target("patch_embed", patches, "patch_embed.bwd.half", True))
    grid = dict(B=B, H=28 if not dry else 5, W=28 if not dry else 5, C=shrink(512), K=3)
    ordered.append(Target("depthwise", grid | dict(gelu=1), "depthwise.fwd.half"))
    ordered.append(Target("depthwise", grid | dict(gelu=1), "depthwise.bwd.half", True))
    maps = dict(B=B, Nq=300, H=8, D=32, P=4, h0=80, w0=80, h1=40, w1=40, h2=20, w2=20)
    maps = maps if not dry else dict(B=B, Nq=3, H=1, D=16, P=2, h0=2, w0=2)
    for kernel in ("fwd", "bwd", "bwd_value"):
        ordered.append(Target("deformable_attention", maps, f"deformable.{kernel}", kernel != "fwd"))
    classifier = dict(B=B, N=1, K=C, F=1000 if not dry else 20)
    return [*ordered, Target("linear", classifier, "linear.fwd.odd")]


def arguments_of(target: Target, dtype: torch.dtype, device: torch.device) -> tuple[Op, dict]:
    """The op and random arguments of the target's shape."""
    op = next(op for op in OPS if op.name == target.op)
    return op, op.inputs(target.shape, dtype, device)


def candidates_of(target: Target, arch: str, call: Callable[[], object]) -> tuple[str, list[Config]]:
    """(full name of the target's row, launch parameters to try, those in use first)."""
    with overriding({}) as looked_up:
        call()
    used = {name.partition(" ")[0]: config for name, config in looked_up.items()}
    name = next((n for n in used if n == target.row or n.startswith(f"{target.row}.")), None)
    if name is None:
        raise LookupError(f"{target.op} at {target.shape} reads {sorted(used)}, not {target.row}")
    return name, to_try(name, used[name], arch)


def to_race(target: Target, dtype: torch.dtype, device: torch.device, most: int | None = None) -> Candidates:
    """All candidates of a target, or the first `most`; call it, and what it returns, where our kernels run."""
    op, arguments = arguments_of(target, dtype, device)
    learning = named_leaves(arguments) if target.backward else None
    outputs = partial(outcome, op.run, arguments, learning)

    def truth() -> tuple[Named, Named]:
        wide = converted(arguments, torch.float64)
        exact = outcome(op.reference, wide, named_leaves(wide) if target.backward else None)
        return exact, outcome(op.reference, arguments, learning)

    def forward() -> list[torch.Tensor]:
        with torch.set_grad_enabled(target.backward):
            return [t for t in leaves(op.run(**arguments)) if t.is_floating_point()]

    def step(copy: int) -> Callable[[], object]:
        if learning is None:
            return forward
        results = [t for t in forward() if t.requires_grad]
        return partial(torch.autograd.grad, results, list(learning.values()), list(map(torch.ones_like, results)))

    with Collector():  # nothing runs
        name, configs = candidates_of(target, architecture(device), outputs)
    return Candidates(name, by_text(*configs[:most]), dict(op=target.op, shape=target.shape), outputs, step, truth)
