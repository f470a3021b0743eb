"""Device functions (@jit) shared by kernels, and the only import of triton.

If triton is not installed (macOS, Windows), `jit` and `tl` are inert placeholders: kernel files still import, and
`kernels_available` is False, so every function takes the PyTorch path.
"""

from types import SimpleNamespace
from typing import Any, no_type_check

try:
    import triton.language as tl
    from triton import __version__, jit

    MISSING = None
except ImportError as error:
    MISSING = str(error)

    class _Inert:
        """Returns itself for every attribute and call, so that decorators and annotations can be evaluated."""

        def __getattr__(self, name: str) -> "_Inert":
            return self

        def __call__(self, *arguments, **options) -> "_Inert":
            return self

    tl = jit = _Inert()


Kernel = Any  # what `jit` makes of a function: a JITFunction, the interpreter's function, or the placeholder


def _runtime() -> SimpleNamespace | None:
    """The parts of Triton needed to launch without JITFunction.run; None if the release's launcher is not known."""
    if MISSING is not None or not __version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")):
        return None
    from triton import Config, autotune, knobs
    from triton._C.libtriton import native_specialize_impl
    from triton.compiler.compiler import CompiledKernel, make_backend
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    return SimpleNamespace(
        knobs=knobs, specialize=native_specialize_impl, CompiledKernel=CompiledKernel, make_backend=make_backend,
        driver=driver, JITFunction=JITFunction, run=JITFunction.run, Config=Config, autotune=autotune,
        enter_hooks=knobs.runtime.launch_enter_hook, exit_hooks=knobs.runtime.launch_exit_hook,
    )  # fmt: skip


TRITON: Any = _runtime()


def tensor_descriptor(base: Any, shape: tuple, strides: tuple, box: tuple) -> Any:
    """Triton's descriptor of a tensor, or of a placeholder for one, divided into boxes of that shape."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), list(box))


def repair_interpreter() -> None:
    """Patches triton 3.6's interpreter for NumPy 2.4, which no longer accepts its one-element arrays as an index."""
    from triton.runtime import interpreter

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    original = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = patch


@jit
def load_rows(ptr, n, stride, N, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Loads WIDTH channels of rows n from `first` on, [len(n), WIDTH]; zeros past D channels and, if MASKED, N rows."""
    d = first + tl.arange(0, WIDTH)
    at = ptr + n.to(tl.int64)[:, None] * stride + d[None, :]
    if MASKED and first + WIDTH > D:
        return tl.load(at, mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=(n < N)[:, None], other=0.0)
    if first + WIDTH > D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)


@jit
def store_rows(ptr, x, n, stride, N, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Stores x [len(n), WIDTH] where `load_rows` reads it, for rows below N and channels below D."""
    d = first + tl.arange(0, WIDTH)
    at = ptr + n.to(tl.int64)[:, None] * stride + d[None, :]
    inside = (n < N)[:, None] & (d < D)[None, :] if first + WIDTH > D else (n < N)[:, None]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@jit
def wgmma_rows(M: tl.constexpr, WGMMA_WARPS: tl.constexpr):
    """Row indices 0 … M − 1, permuted to match the accumulator layout of WGMMA with that many warps; 0: not permuted.

    With the rows of x in this order and those of W in the order of `wgmma_columns`, each thread of a Hopper GPU holds
    eight adjacent values of the product after `from_wgmma_order`: 16-bit tiles are written in 16-byte stores without
    passing through shared memory. On other GPUs the permutation has no effect on speed; it never changes the result.
    """
    i = tl.arange(0, M)
    if WGMMA_WARPS > 0:  # bits of i from the lowest: lane / 4 (3 bits), half, warp, pass
        i = i % 8 + i // 16 % WGMMA_WARPS * 8 + (i // 8 % 2 + i // (16 * WGMMA_WARPS) * 2) * (8 * WGMMA_WARPS)
    return i


@jit
def wgmma_columns(F: tl.constexpr, WGMMA_WARPS: tl.constexpr):
    """Column indices 0 … F − 1 of the product, permuted likewise: a thread holds one pair of every group of eight."""
    i = tl.arange(0, F)
    if WGMMA_WARPS > 0:  # bits of i from the lowest: place in a pair (1), lane % 4 (2), group of eight (2), run of 32
        i = i // 32 * 32 + i // 2 % 4 * 8 + i // 8 % 4 * 2 + i % 2
    return i


@jit
def from_wgmma_order(x, WGMMA_WARPS: tl.constexpr):
    """Undoes the permutations of `wgmma_rows` and `wgmma_columns` on a tile x [M, F]."""
    if WGMMA_WARPS > 0:
        M: tl.constexpr = x.shape[0]
        F: tl.constexpr = x.shape[1]
        x = tl.reshape(x, [M // (16 * WGMMA_WARPS), WGMMA_WARPS, 2, 8, F // 32, 4, 4, 2])
        x = tl.reshape(tl.permute(x, [0, 2, 1, 3, 4, 6, 5, 7]), [M, F])
    return x


@jit
@no_type_check  # the length of `parts` depends on PARTS
def split_columns(x, PARTS: tl.constexpr):
    """x [M, F] split by columns into PARTS (1, 2 or 4) tensors [M, F / PARTS]."""
    M: tl.constexpr = x.shape[0]
    F: tl.constexpr = x.shape[1]
    if PARTS == 1:
        parts = (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, [M, 2, F // 2]), [0, 2, 1]))
        if PARTS == 2:
            parts = (left, right)
        else:
            a, b = tl.split(tl.permute(tl.reshape(left, [M, 2, F // 4]), [0, 2, 1]))
            c, d = tl.split(tl.permute(tl.reshape(right, [M, 2, F // 4]), [0, 2, 1]))
            parts = (a, b, c, d)
    return parts


@jit
def zero_stats(M: tl.constexpr, RUNS: tl.constexpr):
    """Row statistics of no columns: (count [1, RUNS], row_sum [M, RUNS], centred sum of squares m2 [M, RUNS])."""
    return tl.zeros([1, RUNS], tl.float32), tl.zeros([M, RUNS], tl.float32), tl.zeros([M, RUNS], tl.float32)


@jit
def add_stats(y, f, F, count, row_sum, m2):
    """Adds y [M, columns f] to row statistics of RUNS runs of adjacent columns, one per thread (Chan et al., 1979)."""
    M: tl.constexpr = y.shape[0]
    RUNS: tl.constexpr = row_sum.shape[1]
    WIDTH: tl.constexpr = y.shape[1] // RUNS
    first = tl.min(tl.reshape(f, [RUNS, WIDTH]), 1)
    size = tl.maximum(tl.minimum(F - first, WIDTH), 0).to(tl.float32)[None, :]
    in_f = tl.reshape(f < F, [1, RUNS, WIDTH])
    y = tl.where(in_f, tl.reshape(y, [M, RUNS, WIDTH]), 0.0)
    new_sum = tl.sum(y, 2)
    mean = new_sum / tl.maximum(size, 1.0)
    centred = tl.where(in_f, y - mean[:, :, None], 0.0)
    between = mean - row_sum / tl.maximum(count, 1.0)
    m2 += tl.sum(centred * centred, 2) + between * between * (count * size / tl.maximum(count + size, 1.0))
    return count + size, row_sum + new_sum, m2


@jit
def store_stats(at, in_m, count, row_sum, m2):
    """Stores the sum and the centred sum of squares of each row, merged over all runs."""
    all_runs = tl.sum(row_sum, 1)
    between = row_sum / tl.maximum(count, 1.0) - (all_runs / tl.sum(count, 1))[:, None]
    tl.store(at, all_runs, mask=in_m)
    tl.store(at + 1, tl.sum(m2 + count * between * between, 1), mask=in_m)
