"""Candidate launch parameters."""

Config = dict[str, int]


def _attention(*blocks: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in blocks)


def _whole(*blocks: tuple[int, int, int], **form: int) -> tuple[Config, ...]:
    return tuple(dict(BLOCK_M=m, num_warps=w, num_stages=s) | form for m, w, s in blocks)


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


# row name (for attention mostly without its width suffix) → architectures → candidates besides the launch parameters
# in use, best guesses first. For the shapes of benchmarks/targets.py none spills registers, and all fit into the shared
# memory of a block: 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120, 64 KB on gfx942.
# Candidates for ANY are tried on every architecture.
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
    # whole rows of scores; the loop over keys is in use. On architectures not listed here heads of 80 channels spill
    "attention.fwd_whole.128": {
        "sm_90": _whole((128, 8, 3), (128, 8, 2), TMA=1),
        "sm_90 sm_100 gfx942": _whole((64, 4, 1)),
        "sm_100": _whole((64, 8, 1)),
        ANY: _whole((32, 4, 1)),
    },
    "attention.fwd_whole.160": {"sm_90 sm_100 gfx942": _whole((64, 4, 1)), "sm_100": _whole((64, 8, 1))},
    # all keys at once; "attention.bwd" is in use
    "attention.bwd_whole.128": {"sm_90": _whole((32, 8, 3), (32, 8, 2), (16, 8, 3))},
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
