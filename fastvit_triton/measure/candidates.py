"""Candidate launch parameters, and the calls on which they are timed."""

from dataclasses import dataclass

Config = dict[str, int]


def _attention(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in blocks)


def _product(columns: str, *blocks: tuple[int, ...]) -> tuple[Config, ...]:
    names = ("BLOCK_M", columns, "BLOCK_K", "PARTS", "WGMMA_WARPS", "num_warps", "num_stages")
    extra = dict(GROUP=8) if columns == "BLOCK_F" else {}
    return tuple(dict(zip(names, block, strict=True)) | extra for block in blocks)


def _one_launch(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_F=f, num_warps=w, num_stages=s) for m, f, w, s in blocks)


def _weight_gradient(*blocks: tuple[int, int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_D=d, BLOCK_K=k, num_warps=w, num_stages=s) for m, d, k, w, s in blocks)


def _convolution(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    names = ("ROWS", "BLOCK_M", "BLOCK_C", "num_warps")
    return tuple(dict(zip(names, block, strict=True)) | dict(num_stages=1) for block in blocks)


# row name (for attention without its width suffix) → architectures → candidates besides the launch parameters in use,
# best guesses first. For the shapes of `targets` none spills registers, and all fit into the shared memory of a block:
# 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120, 64 KB on gfx942. Candidates for ANY are
# tried on architectures that are not listed.
ANY = "any"
CANDIDATES: dict[str, dict[str, tuple[Config, ...]]] = {
    "attention.fwd": {
        "sm_90": _attention((128, 64, 8, 2), (128, 64, 4, 2), (256, 64, 8, 2), (128, 32, 4, 3)),
        "sm_100": _attention((256, 64, 8, 2), (128, 64, 8, 1), (128, 64, 4, 2)),
        "sm_80 sm_86 sm_89": _attention((128, 32, 4, 2)),
        "sm_80 sm_86 sm_89 sm_120": _attention((128, 64, 8, 2), (64, 64, 4, 3)),
        "gfx942": _attention((128, 64, 4, 1), (128, 64, 8, 1), (64, 32, 4, 2)),
        ANY: _attention((64, 64, 4, 2), (64, 64, 4, 1)),
    },
    "attention.bwd": {  # BLOCK_N = 0: the two kernels below
        "sm_90": _attention((64, 128, 8, 2), (64, 128, 8, 1), (32, 128, 8, 1), (16, 256, 8, 1)),
        "sm_100": _attention((32, 128, 8, 1), (16, 128, 4, 1)),
        "gfx942": _attention((16, 128, 4, 1), (32, 128, 4, 1)),
        ANY: _attention((0, 0, 4, 1), (16, 128, 8, 1)),
    },
    "attention.bwd_dq": {
        "sm_90": _attention((128, 64, 8, 1), (64, 64, 4, 2), (128, 32, 4, 2)),
        "sm_100": _attention((128, 64, 8, 1), (64, 64, 4, 2)),
        "sm_80 sm_86 sm_89": _attention((128, 64, 8, 1)),
        "sm_80 sm_86 sm_89 sm_120": _attention((64, 32, 4, 3)),
        "gfx942": _attention((64, 64, 4, 1), (128, 64, 8, 1)),
        ANY: _attention((64, 32, 4, 2), (128, 32, 8, 2)),
    },
    "attention.bwd_dkdv": {
        "sm_90": _attention((32, 128, 8, 1), (64, 128, 8, 1), (32, 64, 4, 1), (64, 64, 4, 2)),
        "sm_100": _attention((64, 64, 4, 1), (32, 64, 4, 1), (64, 128, 8, 1)),
        "sm_80 sm_86 sm_89": _attention((32, 64, 4, 2)),
        "sm_80 sm_86 sm_89 sm_120": _attention((16, 128, 8, 1)),
        "gfx942": _attention((32, 64, 4, 1), (32, 128, 8, 1)),
        ANY: _attention((16, 64, 4, 2)),
    },
    "linear.fwd.half": {
        "sm_90": _product(
            "BLOCK_F", (128, 256, 64, 4, 8, 8, 3), (256, 128, 64, 4, 8, 8, 3), (128, 256, 64, 4, 0, 8, 3),
            (128, 128, 64, 4, 8, 8, 3), (128, 256, 64, 4, 8, 8, 4), (128, 128, 32, 4, 4, 4, 4),
            (64, 256, 64, 4, 4, 4, 3),
        ),
        "sm_100": _product(
            "BLOCK_F", (128, 256, 64, 4, 0, 8, 3), (256, 128, 64, 4, 0, 8, 3), (128, 128, 64, 4, 0, 4, 3)
        ),
        "sm_80": _product(
            "BLOCK_F", (128, 256, 64, 4, 0, 8, 3), (256, 128, 64, 4, 0, 8, 3), (128, 128, 32, 4, 0, 4, 5)
        ),
        "sm_80 sm_86 sm_89 sm_120": _product(
            "BLOCK_F", (128, 128, 32, 4, 0, 4, 4), (128, 128, 64, 4, 0, 8, 3), (128, 64, 64, 4, 0, 4, 3)
        ),
        "sm_86 sm_89 sm_120": _product("BLOCK_F", (128, 256, 32, 4, 0, 8, 3), (256, 128, 32, 4, 0, 8, 3)),
        "gfx942": _product(
            "BLOCK_F", (256, 256, 64, 4, 0, 8, 2), (128, 128, 64, 4, 0, 4, 2), (256, 128, 64, 4, 0, 8, 2),
            (128, 256, 64, 4, 0, 8, 2), (128, 128, 32, 4, 0, 4, 2),
        ),
        ANY: _product("BLOCK_F", (64, 128, 64, 4, 0, 4, 2)),
    },
    "linear.fwd.gated": {
        "sm_90": _product(
            "BLOCK_F", (256, 64, 64, 2, 8, 8, 3), (128, 128, 64, 4, 8, 8, 4), (128, 64, 64, 4, 4, 4, 3)
        ),
        "sm_100": _product("BLOCK_F", (128, 128, 64, 4, 0, 8, 3), (128, 64, 64, 4, 0, 4, 3)),
        "sm_80 sm_86 sm_89 sm_120": _product(
            "BLOCK_F", (128, 64, 32, 4, 0, 4, 4), (64, 128, 32, 4, 0, 4, 3), (128, 64, 64, 4, 0, 8, 3)
        ),
        "gfx942": _product(
            "BLOCK_F", (128, 64, 64, 4, 0, 4, 2), (128, 128, 32, 4, 0, 8, 2), (64, 128, 64, 4, 0, 4, 2)
        ),
        ANY: _product("BLOCK_F", (128, 64, 32, 4, 0, 8, 2)),
    },
    "mlp.fwd": {  # BLOCK_F = 0: two launches of `linear`
        "sm_90 sm_100": _one_launch((128, 64, 8, 2), (128, 32, 8, 2)),
        "sm_86 sm_89": _one_launch((128, 32, 8, 2)),
        "sm_80 sm_86 sm_89 sm_120": _one_launch((32, 64, 4, 1)),
        "gfx942": _one_launch((64, 64, 4, 1), (128, 32, 8, 1)),
        ANY: _one_launch((0, 0, 8, 1), (64, 32, 8, 1)),
    },
    "linear.fwd.odd": {
        "sm_90": _product("BLOCK_F", (64, 128, 64, 4, 0, 4, 3)),
        "gfx942": _product("BLOCK_F", (64, 64, 64, 4, 0, 4, 2)),
        ANY: _product("BLOCK_F", (64, 64, 64, 2, 0, 4, 2), (128, 64, 32, 4, 0, 4, 2)),
    },
    "window.fwd": {ANY: _attention((64, 64, 4, 2), (64, 64, 8, 1))},
    "window.bwd": {ANY: _attention((16, 64, 4, 1), (64, 64, 8, 2))},
    "window.fwd.large": {
        "sm_80 sm_86 sm_89 sm_90 sm_100 gfx942": _attention((64, 64, 8, 1)),
        ANY: _attention((64, 64, 4, 2)),
    },
    "window.bwd.large": {ANY: _attention((32, 64, 8, 1))},
    "patch_embed.fwd.half": {
        "sm_90": _product(
            "BLOCK_D", (128, 256, 64, 4, 8, 8, 3), (256, 128, 64, 4, 8, 8, 3), (128, 128, 64, 4, 8, 8, 3)
        ),
        "sm_100": _product("BLOCK_D", (128, 128, 64, 4, 0, 4, 3), (128, 256, 64, 4, 0, 8, 3)),
        "sm_80 sm_86 sm_89 sm_120": _product("BLOCK_D", (128, 128, 32, 4, 0, 4, 4), (128, 128, 64, 4, 0, 8, 3)),
        "gfx942": _product("BLOCK_D", (128, 128, 64, 4, 0, 4, 2), (256, 128, 32, 4, 0, 8, 2)),
        ANY: _product("BLOCK_D", (64, 128, 64, 4, 0, 4, 2)),
    },
    "patch_embed.bwd.half": {
        "sm_90": _weight_gradient((64, 128, 256, 8, 2), (32, 128, 256, 8, 3), (128, 128, 128, 8, 2)),
        "sm_80 sm_86 sm_89 sm_100 sm_120": _weight_gradient((64, 128, 128, 8, 3), (64, 64, 128, 4, 3)),
        "gfx942": _weight_gradient((64, 64, 128, 4, 2), (64, 128, 64, 4, 2)),
        ANY: _weight_gradient((32, 128, 128, 8, 2)),
    },
    "depthwise.fwd.half": {ANY: _convolution((2, 16, 64, 4), (4, 32, 64, 8), (4, 16, 32, 2), (2, 32, 64, 8))},
    "depthwise.bwd.half": {ANY: _convolution((2, 32, 32, 4), (4, 16, 32, 4))},
    "deformable.fwd": {ANY: tuple(dict(BLOCK_Q=q, num_warps=w, num_stages=1) for q, w in ((16, 2), (32, 8), (64, 8)))},
    "deformable.bwd": {ANY: (dict(BLOCK_Q=32, num_warps=2, num_stages=1),)},
    "deformable.bwd_value": {ANY: (dict(BLOCK=16, num_warps=1, num_stages=1),)},
}  # fmt: skip


def candidates(row: str, architecture: str) -> list[Config]:
    """Launch parameters to try for a row on an architecture such as "sm_90", best guesses first."""
    return [c for archs, configs in CANDIDATES[row].items() if {architecture, ANY} & {*archs.split()} for c in configs]


@dataclass(frozen=True)
class Target:
    """An op call on which a row is tuned.

    Attributes:
        op: name of the op.
        shape: a case of its `inputs`.
        row: name of the row; for attention without its width suffix.
        backward: True if the row belongs to a backward kernel.
    """

    op: str
    shape: dict[str, int]
    row: str
    backward: bool = False


def targets(dry: bool = False) -> list[Target]:
    """Targets to tune, ordered by the time that ViTs spend in them; `dry` selects tiny shapes."""
    B = 64 if not dry else 1
    shrink = (lambda n: n) if not dry else (lambda n: max(n // 48 // 16, 1) * 16)
    C = shrink(768)
    N = shrink(197)
    F = shrink(3072)
    ordered = [Target("linear", dict(B=B, N=N, K=C, F=F, norm=1), "linear.fwd.half")]
    two = ("bwd_dq", "bwd_dkdv")  # where a program cannot hold a whole head
    attentions = ((64, N, ("fwd", "bwd")), (80, N, ("fwd", *two)), (64, 577, two))
    for width, length, kernels in attentions if not dry else ((16, N, ("fwd", "bwd")), (48, N, two)):
        case = dict(B=B, H=12 if not dry else 1, Nq=length, Nk=length, D=width, Dv=width)
        for kernel in kernels:
            ordered.append(Target("attention", case, f"attention.{kernel}", kernel != "fwd"))
    patches = dict(
        B=B, C=3, H=shrink(224) // 8 * 8, W=shrink(224) // 8 * 8, P=16 if not dry else 8, D=C, T=1, pos_prefix=1
    )
    ordered.append(Target("mlp", dict(B=B, N=N, D=C, F=shrink(2048), gated=0), "linear.fwd.gated"))
    ordered.append(Target("mlp", dict(B=B, N=N, D=shrink(192), F=shrink(768), recompute=1), "mlp.fwd"))
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
