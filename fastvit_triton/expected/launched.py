"""Arithmetic work of launches of our kernels, from their arguments."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..kernels.sizes import seen_pairs


class Launched(NamedTuple):
    """A launch: name of the kernel as in "linear._fwd_kernel", its arguments by name, and number of programs."""

    name: str
    values: dict[str, Any]
    programs: int

    @classmethod
    def of(cls, name: str, kernel: Any, grid: Any, arguments: tuple, fixed: dict[str, object]) -> "Launched":
        """The launch of a kernel by `kernels.launch.run`."""
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | fixed
        return cls(name, values, math.prod(grid(values) if callable(grid) else grid))


@dataclass(frozen=True)
class KernelWork:
    """Arithmetic work of a launch."""

    flops: float = 0.0  # of the operation, without padding
    padded: float = 0.0  # flops of one program, with padding
    passes: float = 1.0  # iterations of the main loop in one program


def work(launch: Launched) -> KernelWork:
    """Work of a launch, computed from its arguments; zero flops for memory-bound kernels."""
    a, name = launch.values, launch.name
    if name.startswith("attention."):
        return _attention_work(launch)
    if name.startswith("window."):
        return _window_work(launch)
    if name == "linear._fwd_kernel":
        passes = math.ceil(a["K"] / a["BLOCK_K"])
        products = 2 if a["GATED"] else 1
        tile = 2 * a["BLOCK_M"] * a["BLOCK_F"] * products
        return KernelWork(2 * a["M"] * a["F"] * a["K"] * products, tile * passes * a["BLOCK_K"], passes)
    if name == "mlp._fwd_kernel":
        passes = math.ceil(a["F"] / a["BLOCK_F"])
        tile = 4 * a["BLOCK_M"] * (a["D0"] + a["D1"])
        return KernelWork(4 * a["M"] * a["D"] * a["F"], tile * passes * a["BLOCK_F"], passes)
    if name == "patch_embed._fwd_kernel":
        passes = math.ceil(a["K"] / a["BLOCK_K"])
        flops = 2 * a["B"] * a["N"] * a["K"] * a["D"]
        return KernelWork(flops, 2 * a["BLOCK_M"] * a["BLOCK_D"] * passes * a["BLOCK_K"], passes)
    if name == "patch_embed._bwd_weight_kernel":
        passes = math.ceil(min(a["ROWS"], a["M"]) / a["BLOCK_M"])
        flops = 2 * a["M"] * a["K"] * a["D"]
        return KernelWork(flops, 2 * a["BLOCK_K"] * a["BLOCK_D"] * passes * a["BLOCK_M"], passes)
    if name == "depthwise._bwd_weight_kernel":
        return KernelWork(passes=a["blocks"])
    if name == "linear._bwd_kernel":
        return KernelWork(passes=a["ROWS"] / a["BLOCK_M"])
    if name == "layer_norm._bwd_kernel":
        return KernelWork(passes=math.ceil(a["M"] / a["BLOCK_M"] / launch.programs))
    return KernelWork()


def sequence(launch: Launched) -> tuple[int, int]:
    """Queries and keys per image of an attention launch; for packed images their mean."""
    a = launch.values
    if not a.get("HAS_CU_SEQLENS"):
        return a["Nq"], a["Nk"]
    mean = round(a["Nq"] * a["H"] * a["tiles"] / launch.programs)
    return mean, mean


def heads_of(launch: Launched) -> float:
    """Heads of all images of an attention launch: each program has several, or they have `tiles` programs each."""
    a = launch.values
    return a["heads"] if "heads" in a else launch.programs / a.get("tiles", 1)


# kernel → number of matrix products that contract over the width of q and k, and over that of v, if not one each
_OVER = {"_bwd_kernel": (3, 2), "_bwd_tma_kernel": (3, 2), "_bwd_dq_kernel": (2, 1), "_bwd_dkdv_kernel": (2, 2)}


def _window_work(launch: Launched) -> KernelWork:
    a = launch.values
    kernel = launch.name.removeprefix("window.")
    one = a["N"] <= min(a["BLOCK_M"], a["BLOCK_N"])
    dq = 5 if a["PRECISION"] == "ieee" else 3  # in fp32 Q Kᵀ and dO Vᵀ are computed twice
    pair = 2 * {"_fwd_kernel": 2, "_bwd_kernel": 5 if one else 4, "_bwd_dq_kernel": dq, "_bwd_dbias_kernel": 2}[kernel]
    rows, columns = (math.ceil(a["N"] / a[block]) for block in ("BLOCK_M", "BLOCK_N"))
    windows = _windows(launch)
    passes = windows / a.get("runs", windows) * {"_bwd_kernel": rows, "_bwd_dbias_kernel": 1}.get(kernel, columns)
    flops = pair * windows * a["heads"] * a["N"] ** 2 * a["D"]
    return KernelWork(flops, pair * a["BLOCK_M"] * a["BLOCK_N"] * a["WIDTH"] * passes, passes)


def _windows(launch: Launched) -> int:
    """Windows of all images."""
    a = launch.values
    return a["windows"] if "runs" in a else launch.programs // (a["heads"] * a["tiles"])


def _attention_work(launch: Launched) -> KernelWork:
    a = launch.values
    kernel = launch.name.removeprefix("attention.")
    q_width = a["D0"] + a["D1"] if "D0" in a else a["D"]
    v_width = a["V0"] + a["V1"] if "V0" in a else a["D"]
    over_q, over_v = _OVER.get(kernel, (1, 1))
    pair = 2 * (over_q * a["D"] + over_v * a.get("Dv", a["D"]))  # flops per query-key pair
    padded_pair = 2 * (over_q * q_width + over_v * v_width)
    if kernel == "_bwd_dbias_kernel":
        images = a["B"] / a["G"]
        padded = padded_pair * a["BLOCK_M"] * a["BLOCK_N"] * images
        return KernelWork(pair * a["B"] * a["H"] * seen_pairs(a["Nq"], a["Nk"], a["CAUSAL"]), padded, images)
    causal = a.get("CAUSAL", False)
    heads = heads_of(launch)
    Nq, Nk = sequence(launch)
    flops = pair * heads * seen_pairs(Nq, Nk, causal)
    if kernel in ("_fwd_whole_kernel", "_fwd_tma_kernel"):
        passes = heads * a["tiles"] / launch.programs  # of one tile; 1 where a program has one
        return KernelWork(flops, padded_pair * a["BLOCK_M"] * (a["N0"] + a["N1"] + a["N2"]) * passes, passes)
    if kernel == "_bwd_tma_kernel":
        passes = math.ceil(Nq / a["BLOCK_M"])
        return KernelWork(flops, padded_pair * a["BLOCK_N"] * passes * a["BLOCK_M"], passes)
    if causal:
        blocks = _causal_blocks(kernel, Nq, Nk, a["BLOCK_M"], a["BLOCK_N"])
        return KernelWork(flops, padded_pair * blocks * a["BLOCK_M"] * a["BLOCK_N"], blocks)
    if kernel == "_bwd_kernel":
        blocks = math.ceil(Nk / a["BLOCK_N"])
        passes = Nq // a["BLOCK_M"]
        padded = padded_pair * blocks * a["BLOCK_N"] * (passes * a["BLOCK_M"] + a["TAIL"])
        return KernelWork(flops, padded, blocks * passes)
    if kernel == "_bwd_dkdv_kernel":
        tiles = math.ceil(Nq / a["BLOCK_M"])
        return KernelWork(flops, padded_pair * a["BLOCK_N"] * tiles * a["BLOCK_M"], Nq // a["BLOCK_M"])
    if kernel == "_bwd_axes_kernel":  # dS times zeros and ones is no arithmetic of the operation
        passes = math.ceil(Nk / a["BLOCK_N"])
        return KernelWork(flops, (padded_pair + 2 * a["WIDTH"]) * a["BLOCK_M"] * passes * a["BLOCK_N"], passes)
    passes = Nk // a["BLOCK_N"]
    return KernelWork(flops, padded_pair * a["BLOCK_M"] * (passes * a["BLOCK_N"] + a["TAIL"]), passes)


def _causal_blocks(kernel: str, Nq: int, Nk: int, BLOCK_M: int, BLOCK_N: int) -> float:
    """Blocks of the scores that a program of a causal kernel computes, on average."""
    offset = Nk - Nq
    if kernel in ("_fwd_kernel", "_bwd_dq_kernel"):
        ends = [min(max(m + BLOCK_M + offset, 0), Nk) for m in range(0, Nq, BLOCK_M)]
        return sum(math.ceil(end / BLOCK_N) for end in ends) / len(ends)
    firsts = [max(n - offset, 0) // BLOCK_M for n in range(0, Nk, BLOCK_N)]
    if kernel == "_bwd_kernel":  # one program; its first block of keys is met by all queries
        return len(firsts) * math.ceil(Nq / BLOCK_M) - sum(firsts[1:])
    return math.ceil(Nq / BLOCK_M) - sum(firsts) / len(firsts)


def size(launch: Launched) -> tuple[int, int, int, int]:
    """(matrices, M, N, K) of products; (heads of all images, queries, keys, channels) of attention; or zeros."""
    a, name = launch.values, launch.name
    if name == "linear._fwd_kernel":
        return 1, a["M"], a["F"] * (2 if a["GATED"] else 1), a["K"]
    if name == "mlp._fwd_kernel":
        return 1, a["M"], a["F"], a["D"]
    if name == "patch_embed._fwd_kernel":
        return 1, a["B"] * a["N"], a["D"], a["K"]
    if name == "attention._bwd_dbias_kernel":
        return a["B"] * a["H"], a["Nq"], a["Nk"], a["D"]
    if name.startswith("attention.") and _attention_work(launch).flops:
        return int(heads_of(launch)), *sequence(launch), a["D"]
    if name == "patch_embed._bwd_weight_kernel":
        return 1, a["D"], a["K"], a["M"]
    if name.startswith("window.") and _window_work(launch).flops:
        return _windows(launch) * a["heads"], a["N"], a["N"], a["D"]
    return 0, 0, 0, 0
