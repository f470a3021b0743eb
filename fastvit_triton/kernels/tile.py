"""The device half: Triton itself, and the @jit helpers that two or more kernels use.

The only file that imports triton. Where it is missing (macOS, Windows) `jit` and `tl` are inert, so kernel files still
import, and `usable` keeps everyone on the PyTorch path.
"""

try:
    import triton.language as tl
    from triton import jit

    MISSING = None
except ImportError as error:
    MISSING = str(error)

    class _Inert:
        """Answers every attribute and call with itself: enough for annotations and decorators to be evaluated."""

        def __getattr__(self, name: str) -> "_Inert":
            return self

        def __call__(self, *arguments, **options) -> "_Inert":
            return self

    tl = jit = _Inert()


@jit
def rows(ptr, n, stride, N, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Channels first … first + WIDTH of rows n, [len(n), WIDTH]; zeros past channel D and, when MASKED, past row N."""
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
def put_rows(ptr, x, n, stride, N, first: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Stores x [len(n), WIDTH] where `rows` would load it, inside N and D only."""
    d = first + tl.arange(0, WIDTH)
    at = ptr + n.to(tl.int64)[:, None] * stride + d[None, :]
    inside = (n < N)[:, None] & (d < D)[None, :] if first + WIDTH > D else (n < N)[:, None]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)
