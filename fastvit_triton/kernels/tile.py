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


@jit
def activate(x, KIND: tl.constexpr):
    """GELU (erf), GELU (tanh), x·sigmoid(1.702 x), ReLU or SiLU of fp32 x; "swiglu" is the SiLU of its gate."""
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1/√2
    if KIND == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2·√(2/π); tanh u = 2·sigmoid(2u) − 1
    if KIND == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    if KIND == "relu":
        return tl.where(x < 0, 0.0, x)  # a GPU's maximum would turn NaN into 0
    if KIND == "silu" or KIND == "swiglu":
        return x * tl.sigmoid(x)
    return x


@jit
def activate_grad(x, KIND: tl.constexpr):
    """The derivative of `activate` at fp32 x."""
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1/√(2π)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    if KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    if KIND == "silu" or KIND == "swiglu":
        s = tl.sigmoid(x)
        return s + x * s * (1.0 - s)
    return tl.full(x.shape, 1.0, tl.float32)
