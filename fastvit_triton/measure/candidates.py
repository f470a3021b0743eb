"""Launch parameters to try, and the calls to time them on, as data."""

from dataclasses import dataclass

Config = dict[str, int]


def _attention(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in blocks)


def _product(columns: str, *blocks: tuple[int, ...]) -> tuple[Config, ...]:
    names = ("BLOCK_M", columns, "BLOCK_K", "PARTS", "WGMMA_WARPS", "num_warps", "num_stages")
    extra = dict(GROUP=8) if columns == "BLOCK_F" else {}
    return tuple(dict(zip(names, block, strict=True)) | extra for block in blocks)


# row name (for attention without the width at its end) → candidates beside the launch parameters in use
CANDIDATES: dict[str, tuple[Config, ...]] = {
    "attention.fwd": _attention(
        (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2),
        (64, 128, 4, 2), (256, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 2),
    ),
    "attention.bwd": _attention(  # BLOCK_N = 0: the two kernels below
        (64, 128, 8, 1), (64, 128, 8, 2), (32, 128, 8, 1), (16, 128, 8, 1), (0, 0, 4, 1)
    ),
    "attention.bwd_dq": _attention((64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 1), (128, 32, 8, 2)),
    "attention.bwd_dkdv": _attention((32, 64, 4, 1), (64, 64, 4, 1), (32, 128, 8, 1), (64, 128, 8, 1), (32, 64, 4, 2)),
    "linear.fwd.half": _product(
        "BLOCK_F", (128, 128, 64, 4, 4, 4, 3), (128, 128, 64, 4, 0, 4, 3), (128, 128, 64, 4, 8, 8, 3),
        (128, 128, 64, 2, 0, 8, 3), (128, 128, 32, 4, 4, 4, 4), (128, 256, 64, 4, 0, 8, 3), (256, 128, 64, 4, 8, 8, 3),
        (64, 128, 64, 4, 4, 4, 3), (128, 64, 64, 2, 4, 4, 4), (64, 64, 64, 2, 4, 4, 4), (128, 128, 64, 4, 8, 8, 4),
    ),
    "linear.fwd.gated": _product(
        "BLOCK_F", (128, 128, 64, 4, 8, 8, 3), (128, 64, 64, 4, 0, 4, 3), (128, 64, 64, 4, 0, 8, 3),
        (64, 128, 64, 4, 0, 8, 3),
    ),
    "mlp.fwd": tuple(  # BLOCK_F = 0: two launches of `linear`
        dict(BLOCK_M=m, BLOCK_F=f, num_warps=w, num_stages=s)
        for m, f, w, s in ((128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 8, 1), (0,) * 4)
    ),
    "linear.fwd.odd": _product(
        "BLOCK_F", (128, 128, 32, 4, 0, 4, 3), (128, 64, 32, 4, 0, 4, 3), (64, 64, 64, 4, 0, 4, 3),
        (64, 128, 64, 4, 0, 4, 3),
    ),
    "patch_embed.fwd.half": _product(
        "BLOCK_D", (128, 128, 64, 4, 4, 4, 3), (128, 128, 64, 4, 8, 8, 3), (128, 64, 64, 2, 4, 4, 3),
        (64, 128, 64, 4, 4, 4, 3),
    ),
    "patch_embed.bwd.half": tuple(
        dict(BLOCK_M=m, BLOCK_D=d, BLOCK_K=k, num_warps=w, num_stages=s)
        for m, d, k, w, s in ((64, 128, 128, 8, 2), (64, 128, 128, 8, 3), (32, 128, 128, 8, 3), (64, 64, 128, 4, 3))
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A call of an op that uses a row.

    Attributes:
        op: name of the op.
        shape: a case of its `inputs`.
        row: name of the row; attention's without the width at its end.
        backward: the row is that of a backward kernel.
    """

    op: str
    shape: dict[str, int]
    row: str
    backward: bool = False


def targets(dry: bool = False) -> list[Target]:
    """What is tuned, in the order of the time that ViTs spend in it; `dry` for tiny shapes."""
    B = 64 if not dry else 1
    shrink = (lambda n: n) if not dry else (lambda n: max(n // 48 // 16, 1) * 16)
    D, N, F = shrink(768), shrink(197), shrink(3072)
    found = [Target("linear", dict(B=B, N=N, K=D, F=F, norm=1), "linear.fwd.half")]
    two = ("bwd_dq", "bwd_dkdv")  # where a program cannot hold a whole head
    attentions = ((64, N, ("fwd", "bwd")), (80, N, ("fwd", *two)), (64, 577, two))
    for width, length, kernels in attentions if not dry else ((16, N, ("fwd", "bwd")), (48, N, two)):
        case = dict(B=B, H=12 if not dry else 1, Nq=length, Nk=length, D=width, Dv=width)
        for kernel in kernels:
            found.append(Target("attention", case, f"attention.{kernel}", kernel != "fwd"))
    patches = dict(
        B=B, C=3, H=shrink(224) // 8 * 8, W=shrink(224) // 8 * 8, P=16 if not dry else 8, D=D, T=1, pos_prefix=1
    )
    found.append(Target("mlp", dict(B=B, N=N, D=D, F=shrink(2048), swiglu=1), "linear.fwd.gated"))
    found.append(Target("mlp", dict(B=B, N=N, D=shrink(192), F=shrink(768), recompute=1), "mlp.fwd"))
    found.append(Target("patch_embed", patches, "patch_embed.fwd.half"))
    found.append(Target("patch_embed", patches, "patch_embed.bwd.half", True))
    return [*found, Target("linear", dict(B=B, N=1, K=D, F=1000 if not dry else 20), "linear.fwd.odd")]  # a head
