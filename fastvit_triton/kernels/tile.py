"""The device half: Triton itself, and the @jit helpers that two or more kernels use.

The only file that imports triton. Where it is missing (macOS, Windows) `jit` and `tl` are inert, so kernel files still
import, and `kernels_available` keeps everyone on the PyTorch path.
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
def dealt_rows(M: tl.constexpr, DEAL: tl.constexpr):
    """Rows of a tile in the order in which the matrix instruction of DEAL Hopper warps deals them out; 0: in order.

    Where rows of x and of W are taken in dealt order, a thread holds eight neighbouring values of `collected`: 16-bit
    tiles leave in 16-byte stores and need not pass through shared memory first. Elsewhere it changes nothing.
    """
    i = tl.arange(0, M)
    if DEAL > 0:  # bits of i, from the lowest: lane / 4 (3), half, warp, pass
        i = i % 8 + i // 16 % DEAL * 8 + (i // 8 % 2 + i // (16 * DEAL) * 2) * (8 * DEAL)
    return i


@jit
def dealt_columns(F: tl.constexpr, DEAL: tl.constexpr):
    """The same for columns, which are rows of W: a thread holds a pair in each group of eight."""
    i = tl.arange(0, F)
    if DEAL > 0:  # bits of i: of a pair (1), lane % 4 (2), group (2), run of 32
        i = i // 32 * 32 + i // 2 % 4 * 8 + i // 8 % 4 * 2 + i % 2
    return i


@jit
def collected(x, DEAL: tl.constexpr):
    """A tile of which row i is row dealt_rows[i], column j column dealt_columns[j], in order again, [M, F]."""
    if DEAL > 0:
        M: tl.constexpr = x.shape[0]
        F: tl.constexpr = x.shape[1]
        x = tl.reshape(x, [M // (16 * DEAL), DEAL, 2, 8, F // 32, 4, 4, 2])
        x = tl.reshape(tl.permute(x, [0, 2, 1, 3, 4, 6, 5, 7]), [M, F])
    return x


@jit
def columns(x, PARTS: tl.constexpr):
    """x [M, F] as PARTS tensors (1, 2 or 4) of F / PARTS columns side by side."""
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
def no_stats(M: tl.constexpr, RUNS: tl.constexpr):
    """Row statistics of no columns yet: (count [1, RUNS], sum [M, RUNS], centred sum of squares [M, RUNS])."""
    return tl.zeros([1, RUNS], tl.float32), tl.zeros([M, RUNS], tl.float32), tl.zeros([M, RUNS], tl.float32)


@jit
def add_stats(y, f, F, count, total, spread):
    """Row statistics of y [M, columns f] in runs that a thread holds, joined to those before (Chan et al., 1979)."""
    M: tl.constexpr = y.shape[0]
    RUNS: tl.constexpr = total.shape[1]
    WIDTH: tl.constexpr = y.shape[1] // RUNS
    first = tl.min(tl.reshape(f, [RUNS, WIDTH]), 1)
    size = tl.maximum(tl.minimum(F - first, WIDTH), 0).to(tl.float32)[None, :]
    in_f = tl.reshape(f < F, [1, RUNS, WIDTH])
    y = tl.where(in_f, tl.reshape(y, [M, RUNS, WIDTH]), 0.0)
    here = tl.sum(y, 2)
    mean = here / tl.maximum(size, 1.0)
    centred = tl.where(in_f, y - mean[:, :, None], 0.0)
    between = mean - total / tl.maximum(count, 1.0)
    spread += tl.sum(centred * centred, 2) + between * between * (count * size / tl.maximum(count + size, 1.0))
    return count + size, total + here, spread


@jit
def put_stats(at, in_m, count, total, spread):
    """Stores sum and centred sum of squares of each row, of all runs together."""
    row = tl.sum(total, 1)
    off = total / tl.maximum(count, 1.0) - (row / tl.sum(count, 1))[:, None]
    tl.store(at, row, mask=in_m)
    tl.store(at + 1, tl.sum(spread + count * off * off, 1), mask=in_m)


@jit
def _normal_cdf(x, EXACT: tl.constexpr):
    """Φ(x) of fp32 x, by erf; for what is stored in 16 bits by a logistic function, a third of the instructions.

    The odd polynomial is −log₂e · ln(Φ / (1 − Φ)), fitted so that x·Φ(x) is off by at most 3.4e-6.
    """
    if EXACT:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1/√2
    z = tl.minimum(x * x, 25.0)
    p = -2.3020437e-00 + z * (-0.10522997 + z * (3.6204788e-04 + z * (8.7909797e-05 + z * -3.2103784e-06)))
    return 1.0 / (1.0 + tl.exp2(x * p))


@jit
def _sigmoid(x):
    """1 / (1 + e⁻ˣ)."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))  # log₂e


@jit
def activate(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """GELU (erf), GELU (tanh), x·sigmoid(1.702 x), ReLU or SiLU of fp32 x; "swiglu" is the SiLU of its gate."""
    if KIND == "gelu":
        return x * _normal_cdf(x, EXACT)
    if KIND == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2·√(2/π); tanh u = 2·sigmoid(2u) − 1
    if KIND == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    if KIND == "relu":
        return tl.where(x < 0, 0.0, x)  # a GPU's maximum would turn NaN into 0
    if KIND == "silu" or KIND == "swiglu":
        return x * _sigmoid(x)
    return x


@jit
def activate_grad(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The derivative of `activate` at fp32 x."""
    if KIND == "gelu":
        return _normal_cdf(x, EXACT) + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x))  # φ: 1/√(2π)
    if KIND == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if KIND == "quick_gelu":
        s = _sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    if KIND == "silu" or KIND == "swiglu":
        s = _sigmoid(x)
        return s + x * s * (1.0 - s)
    return tl.full(x.shape, 1.0, tl.float32)
