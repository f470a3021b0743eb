"""Predicts the time of a block on a GPU in each way, from its launches and the rates of `gpus`.

A launch takes max(flops / rate of its kind, bytes / bandwidth, 2.5 µs or, for a matmul, 5 µs). Bytes count every
tensor that a launch reads or writes once. Ratios of our kernels are [pessimistic, expected, best]. For the ways see
`kernels.choose`, whose tables are written from these times; nothing that runs a model reads them.

Under autocast, matmuls and attention are 16-bit while a float32 residual is not: norms are not folded, nothing is added
in place, and PyTorch casts the float32 result of its norm in a pass of its own, where our kernel writes 16 bits.
"""

import math
from typing import NamedTuple

from ..kernels.mixed import FASTER_ON
from ..kernels.sizes import Branch
from .gpus import Gpu, table

LEAST_US, LEAST_PRODUCT_US = 2.5, 5.0  # minimum time of a launch, and of a matmul; estimates
PASS = 0.85  # fraction of the copy bandwidth of elementwise passes and of our LayerNorm
NORMS = {"norm": "forward", "norm backward": "backward"}  # kinds of launches of PyTorch's LayerNorm
TILES = {(128, 256): 1.0, (128, 128): 0.93, (64, 128): 0.82, (64, 64): 0.65}  # tile of a matmul → fraction of its rate
NEVER = (1e-9,) * 3  # rates of what does not run
NARROW = 384  # bytes of a row up to which one launch computes an MLP; see `mlp`


class Launch(NamedTuple):
    """One launch: its flops and bytes, and properties that determine its rate."""

    # "product", "fused product", "convolution" (of patches, by cuDNN), "attention", "fused attention", "norm", "norm
    # backward" and "norm sums" (by PyTorch), or "pass"
    kind: str
    flops: float  # of the operation
    nbytes: float  # read and written
    size: tuple[int, int, int] = (0, 0, 0)  # (M, N, K) of a matmul [M, K] · [K, N]
    backward: bool = False  # True for the backward pass of attention


def block_us(gpu: Gpu, branches: tuple[Branch, ...], way: str, training: bool, frozen: bool, ratio: int = 0) -> float:
    """Expected microseconds on the GPU of the residual branches of a block.

    Args:
        gpu: its rates.
        branches: in order.
        way: of all of them.
        training: include the backward pass.
        frozen: LayerNorms are folded beforehand.
        ratio: index of the ratio of our kernels: 0 pessimistic, 1 expected, 2 best.
    """
    return sum(launch_us(gpu, launch, ratio) for launch in launches(gpu, branches, way, training, frozen))


def host_us(way: str, branches: int, training: bool, replayed: bool) -> float:
    """Expected host time in microseconds for this number of residual branches; a block has two."""
    phase = "training" if training else "inference"
    row = table()["blocks"]["host_us"]
    return row["eager"][phase] * row["replayed" if replayed else "called"][phase][way] * branches / 2


def refusal(ours: list[Launch], plain: list[Launch], training: bool, exact: bool) -> str | None:
    """Why a way is excluded regardless of its speed, or None.

    It is excluded if it moves more bytes or has more launches than the plain way, or runs our matmul in IEEE float32.
    In training it must move 1 % less, since sums of biases are not counted.
    """
    if ours is plain:
        return None
    if exact and any(one.kind == "fused product" for one in ours):
        return "products in IEEE float32 are PyTorch's"
    if sum(one.nbytes for one in ours) > sum(one.nbytes for one in plain) * (0.99 if training else 1.0):
        return "moves more bytes than plain"
    return "has more launches than plain" if len(ours) > len(plain) else None


def launches(gpu: Gpu, branches: tuple[Branch, ...], way: str, training: bool, frozen: bool) -> list[Launch]:
    """The launches of the residual branches of a block; arguments as in `block_us`."""
    block_launches = []
    for i, branch in enumerate(branches):
        block_launches += forward(gpu, branch, way, i == 0, i + 1 == len(branches), training, frozen)
        if training:
            block_launches += _backward(gpu, branch, way)
    return block_launches


def compiled_us(gpu: Gpu, branches: tuple[Branch, ...], training: bool) -> float:
    """Expected microseconds under torch.compile: as mixed with PyTorch's attention, and nothing in BLAS's epilogues."""
    slow = gpu._replace(fused_attention_tflops=NEVER[:2], fused_product=NEVER, architecture="")
    branches = tuple(branch._replace(layer_scale=0) for branch in branches)  # without equation (10) of our backward
    return block_us(slow, branches, "mixed", training, False) + (0.0 if training else _saved_us(gpu, branches))


def _saved_us(gpu: Gpu, branches: tuple[Branch, ...]) -> float:
    """Microseconds that the sum in place saves in mixed inference."""
    if len(branches) != 2 or not _adds_in_place(branches[1], "mixed", False, True, False):
        return 0.0
    b = branches[1]
    M = b.images * b.tokens
    apart = launch_us(gpu, product(b, M, b.channels, b.inner)) + launch_us(gpu, one_pass(b, 3 * M * b.channels))
    return apart - launch_us(gpu, product(b, M, b.channels, b.inner, extra=M * b.channels))


def saved_values(branch: Branch, way: str) -> int:
    """Values per token that a branch saves for the backward pass, without LayerScale, drop-path and statistics.

    For a ViT block with hidden width 4·C the sum is 16·C if plain, else 10·C, because LN(x) and the activation's output
    are recomputed. The norm of a wide residual is not part of a fused branch, and its result is saved.
    """
    again = branch.channels * (way == "plain" or (way == "fused" and branch.wide))
    again += branch.inner * (way == "plain" and not branch.attends)
    return branch.channels * branch.stream + branch.width + branch.inner * branch.attends + again


def launch_us(gpu: Gpu, launch: Launch, ratio: int = 0) -> float:
    """Expected microseconds of one launch."""
    bandwidth = gpu.copy_gbs * PASS
    if launch.kind in NORMS:
        bandwidth = min(bandwidth, table()["blocks"]["norm_gbs"][NORMS[launch.kind]])
    memory = 0.0 if launch.kind == "norm sums" else launch.nbytes / bandwidth / 1e3
    compute = 0.0
    if launch.kind in ("product", "fused product"):
        compute = _product_us(gpu, *launch.size) / (gpu.fused_product[ratio] if launch.kind == "fused product" else 1)
    elif launch.kind == "convolution":
        compute = launch.flops / (gpu.product_tflops * table()["blocks"]["patch_convolution"]["value"]) / 1e6
    elif launch.flops:
        rates = gpu.fused_attention_tflops if launch.kind == "fused attention" else gpu.attention_tflops
        compute = launch.flops / rates[launch.backward] / 1e6
    return max(memory, compute, LEAST_PRODUCT_US if launch.size[0] else LEAST_US)


def _product_us(gpu: Gpu, M: int, N: int, K: int) -> float:
    """Expected microseconds of a BLAS matmul with its best tile; each wave of tiles takes as long as a full one."""
    efficiency = next(e for most, e in table()["blocks"]["product_efficiency"]["values"] if K <= most)
    best = math.inf
    for (rows, columns), fraction in TILES.items():
        waves = math.ceil(M / rows) * math.ceil(N / columns) / gpu.units
        best = min(best, math.ceil(waves) / waves / fraction) if waves else 0.0
    return 2.0 * M * N * K * best / (gpu.product_tflops * efficiency) / 1e6


def product(branch: Branch, M: int, N: int, K: int, ours: bool = False, extra: float = 0) -> Launch:
    """A matmul launch, with `extra` values read or written besides its operands."""
    kind = "fused product" if ours else "product"
    return Launch(kind, 2.0 * M * N * K, branch.itemsize * (M * K + N * K + M * N + extra), (M, N, K))


def one_pass(branch: Branch, values: float, kind: str = "pass") -> Launch:
    """A launch that reads and writes this number of values and computes next to nothing."""
    return Launch(kind, 0.0, branch.itemsize * values)


def norm_backward(branch: Branch, values: float) -> list[Launch]:
    """PyTorch's launches for the gradients of x, and of γ and β, of a norm of this number of values.

    Both read dy and x; the rate of the first was measured for both.
    """
    return [one_pass(branch, 3 * values, "norm backward"), one_pass(branch, 2 * values, "norm sums")]


def attention_launch(branch: Branch, ours: bool, backward: bool = False) -> Launch:
    """The launch of a branch's attention, by our kernel or PyTorch's."""
    M = branch.images * branch.tokens
    flops = (10.0 if backward else 4.0) * M * branch.keys_per_query * branch.inner
    values = M * (branch.width + branch.inner) * (2 if backward else 1)
    values += 0 if ours else branch.decomposed * bias_values(branch) * (2 if backward else 1)
    if backward and branch.kind != "window_attention":
        D = branch.inner // max(branch.heads, 1)
        if ours and not in_one_kernel(D, branch.keys_per_query, branch.itemsize, branch.decomposed > 0):
            values += M * (branch.width + branch.inner)  # that of dQ reads all operands again
        if not ours and branch.itemsize == 2 and not branch.decomposed:
            values += 6 * M * branch.inner  # FlashAttention reads O and dO twice, and sums dQ in fp32
    return Launch("fused attention" if ours else "attention", flops, branch.itemsize * values, backward=backward)


def in_one_kernel(D: int, keys: int, itemsize: int, bias: bool = False) -> bool:
    """True if one kernel of ours computes the gradients of q, k and v, with most launch parameters in tuned/."""
    return itemsize == 2 and D * itemsize <= 128 and D & (D - 1) == 0 and keys <= 256 and not bias


def _sums_bias(b: Branch) -> bool:
    """True if our backward kernel also sums the gradient of the bias of queries, keys and values."""
    bare = b.kind == "attention" and b.inner == 64 * b.heads
    return bare and in_one_kernel(64, b.keys_per_query, b.itemsize, b.decomposed > 0)


def bias_values(branch: Branch) -> int:
    """Number of scores, and so of values of a bias of every query and key."""
    return branch.images * branch.heads * branch.tokens * branch.keys_per_query


def _faster_attention(gpu: Gpu | None, branch: Branch, backward: bool = False) -> list[Launch]:
    """The launches of the faster attention of a mixed branch, ours or PyTorch's, which copies into windows and back."""
    ours = [attention_launch(branch, True, backward)]
    if branch.decomposed:  # only our kernel does not store the sum
        return ours
    assert gpu is not None, "the choice depends on the GPU"
    one = attention_launch(branch, False, backward)
    if branch.kind == "window_attention":
        copies = 4 * branch.images * branch.tokens * branch.channels * branch.itemsize
        one = one._replace(nbytes=one.nbytes + copies)
    theirs = [one, *_around_attention(branch)] if backward else [one]
    return min(ours, theirs, key=lambda launches: sum(launch_us(gpu, launch) for launch in launches))


def _around_attention(b: Branch) -> list[Launch]:
    """FlashAttention's other two kernels of the backward pass, and packing dq, dk, dv."""
    small = one_pass(b, 0)
    return [small, small, one_pass(b, 2 * b.images * b.tokens * b.width)]


def forward(
    gpu: Gpu | None, b: Branch, way: str, first: bool, last: bool, training: bool, frozen: bool
) -> list[Launch]:
    """The launches of a branch's forward pass; for the arguments see `launches`.

    Args:
        gpu: its rates; None where they do not matter.
        b: the branch.
        way: "fused", "mixed" or "plain".
        first: it is the first branch of its block.
        last: it is the last one.
        training: save what the backward pass needs.
        frozen: the LayerNorm is folded beforehand.
    """
    M = b.images * b.tokens
    C = b.channels
    attention = b.attends
    if b.kind == "reduced_attention":
        return _reduced(gpu, b, way, first, last)
    conv = [one_pass(b, 2 * M * b.inner)] * (b.kind == "depthwise_mlp")
    if way == "fused":
        folds = not b.wide and (M >= b.width or (frozen and not training))  # as `fold.pays`
        leading = _norm(b, way) if not folds else [] if frozen and not training else [one_pass(b, 2 * b.width * C)]
        narrow = b.kind == "mlp" and not training and C * b.itemsize <= NARROW and b.itemsize == 2
        leading += [one_pass(b, M * C)] * (folds and first and not narrow)  # row statistics
        if narrow:  # the hidden layer is not written; a wide residual is not the input of the matmul
            mlp_launch = product(b, M, b.width + b.inner, C, True, (1 + 3 * b.wide) * M * C - M * (b.width + b.inner))
            return [*leading, mlp_launch]
        mlp = b.kind == "mlp"
        extra = M * (b.inner if training else b.inner - b.width) if mlp else 0  # pre is saved, and h is written
        middle = _faster_attention(gpu, b) if attention else conv
        return [*leading, product(b, M, b.width, C, True, extra), *middle, _last(b)]
    norm = [] if way == "mixed" and not first else _norm(b, way)
    core = [one_pass(b, M * (b.width + b.inner))]  # the activation
    if way == "plain" and b.width != b.inner:  # of the gate, then times up
        core = [one_pass(b, 2 * M * b.inner), one_pass(b, 3 * M * b.inner)]
    if attention:
        core = _faster_attention(gpu, b) if way == "mixed" else [attention_launch(b, False)]
        core += [one_pass(b, bias_values(b))] * (b.decomposed and way == "plain")
    entering = [product(b, M, b.width, C)]
    if way == "mixed":
        core = conv or core
        if b.kind == "mlp" and not training:
            entering, core = _fc1(gpu, b), []
    else:
        copies = [one_pass(b, 2 * M * C)] * 2 if b.kind == "window_attention" else []  # into windows and back
        core += conv + copies
    in_place = _adds_in_place(b, way, first, last, training)
    end = [] if in_place else _end(b, way, last)
    return [*norm, *entering, *core, product(b, M, C, b.inner, extra=M * C * in_place), *end]


def fc1_pair(b: Branch) -> tuple[list[Launch], list[Launch]]:
    """fc1 and the activation of an MLP in inference, by our kernel, and by BLAS and a pass; see `kernels.mixed`."""
    M = b.images * b.tokens
    ours = product(b, M, b.width, b.channels, ours=True, extra=M * (b.inner - b.width))
    return [ours], [product(b, M, b.width, b.channels), one_pass(b, M * (b.width + b.inner))]


def _fc1(gpu: Gpu | None, b: Branch) -> list[Launch]:
    """The launches of `fc1_pair` that a mixed branch takes."""
    assert gpu is not None, "the choice depends on the GPU"
    ours, theirs = fc1_pair(b)
    if gpu.architecture in FASTER_ON and b.width == b.inner and b.itemsize == 2:  # GELU and ReLU, in BLAS's epilogue
        return theirs[:1]
    return min(theirs, ours, key=lambda launches: sum(launch_us(gpu, one) for one in launches))


def _norm(b: Branch, way: str) -> list[Launch]:
    """The norm of a branch in launches of its own, and autocast's cast of its result; our kernel writes that dtype."""
    values = b.images * b.tokens * b.channels
    written = one_pass(b, (b.stream + 1) * values)
    return [one_pass(b, 2 * b.stream * values, "norm")] + [written] * b.wide if way == "plain" else [written]


def _last(b: Branch) -> Launch:
    """The last matmul of a fused branch, which adds to the residual."""
    M = b.images * b.tokens
    C = b.channels
    return product(b, M, C, b.inner, True, (2 * b.stream - 1) * M * C)


def _adds_in_place(b: Branch, way: str, first: bool, last: bool, training: bool) -> bool:
    """True if a mixed MLP adds to the residual in its last matmul; the branch before it then adds its bias."""
    return way == "mixed" and b.kind == "mlp" and last and not first and not training and not (b.scales or b.wide)


def _end(b: Branch, way: str, last: bool) -> list[Launch]:
    """LayerScale, stochastic depth and the residual addition of a mixed or plain branch."""
    values = b.images * b.tokens * b.channels
    if way == "mixed":
        return [one_pass(b, ((1 if last else 2) + 2 * b.stream) * values)]
    scales = [one_pass(b, (before + b.stream) * values) for before in (1, b.stream)[: b.scales]]  # the first promotes
    return [*scales, one_pass(b, ((b.stream if scales else 1) + 2 * b.stream) * values)]


def _reduced(gpu: Gpu | None, b: Branch, way: str, first: bool, last: bool) -> list[Launch]:
    """Forward pass of attention with one key per `keys` tokens: norm, queries, reduction, its norm, keys and values."""
    M = b.images * b.tokens
    C = b.channels
    ours = way == "fused"
    rows = max(M // b.keys, 1)
    norm = [] if way == "mixed" and not first else _norm(b, way)
    reduction = [product(b, rows, C, C * b.keys, ours), one_pass(b, 2 * rows * C)] if b.keys > 1 else []
    products = [product(b, M, b.inner, C, ours), *reduction, product(b, rows, 2 * b.inner, C, ours)]
    core = [attention_launch(b, False)] if way == "plain" else _faster_attention(gpu, b)
    end = [] if ours else _end(b, way, last)
    return [*norm, *products, *core, _last(b) if ours else product(b, M, C, b.inner), *end]


def _backward(gpu: Gpu, b: Branch, way: str) -> list[Launch]:
    M = b.images * b.tokens
    C = b.channels
    attention = b.attends
    products = [product(b, M, b.inner, C), product(b, C, b.inner, M)]  # last layer, then first layer
    products += [product(b, M, C, b.width), product(b, b.width, C, M)]
    sums = [one_pass(b, M * C), one_pass(b, M * b.width)]  # bias gradients
    small = one_pass(b, 0)
    casts = [one_pass(b, (b.stream + 1) * M * C)] * b.wide
    products += casts  # of the gradient of the residual
    if b.kind == "reduced_attention" and b.keys > 1:
        rows = max(M // b.keys, 1)
        products += [product(b, rows, C * b.keys, C), product(b, C, C * b.keys, rows)]
    if b.kind == "depthwise_mlp":
        sums += [one_pass(b, 3 * M * b.inner)] * 2  # input and weight of the convolution
    if way == "plain":
        middle = [one_pass(b, M * (2 * b.width + b.inner))]
        if b.width != b.inner:  # of both factors and of the activation, then joined
            middle = [one_pass(b, 3 * M * b.inner)] * 3 + [one_pass(b, 2 * M * b.width)]
        if b.kind == "window_attention":
            sums += [one_pass(b, 2 * M * C)] * 2
        if attention:
            copied = one_pass(b, 2 * M * b.width)  # dq, dk and dv are stacked first
            middle = [attention_launch(b, False, True), *_around_attention(b), copied]
            middle += [one_pass(b, bias_values(b))] * (2 * b.decomposed)  # sums over rows and over columns
        wide = 3 * b.stream * M * C
        norm = [*casts, *norm_backward(b, b.stream * M * C), one_pass(b, wide)]  # last: the residual
        scaled = [one_pass(b, 2 * b.stream * M * C)] * b.scales
        scaled += [one_pass(b, values * b.stream * M * C) for values in (3, 1)] * b.layer_scale  # the gradient of γ
        return [*products, *sums, *middle, *norm, *scaled]
    middle = [one_pass(b, 2 * M * (b.width + b.inner))]
    if b.kind == "mlp":
        sums[1] = small  # in that launch
    if attention:
        middle = _faster_attention(gpu, b, True)
        if way == "mixed" and middle[0].kind == "fused attention" and _sums_bias(b):
            sums[1] = small
    scaled = [one_pass(b, 2 * M * C)] if b.scales > b.layer_scale else []
    if b.layer_scale:  # equation (10) of `linear_backward` reads and writes matrices in fp32 and in the weight's dtype
        weight, fp32 = C * b.inner, 4 / b.itemsize
        scaled += [one_pass(b, 2 * weight), one_pass(b, (2 * fp32 + 1) * weight), small, small]
    partial = 8 / b.itemsize * C * min(M, 512)  # fp32 sums of the gradients of γ and β
    norm = [one_pass(b, (2 + 3 * b.stream) * M * C + partial), one_pass(b, partial)]
    if b.wide and way == "fused":  # the norm is an operation of its own
        own = (2 * b.stream + 1) * M * C
        norm = [one_pass(b, own + partial), one_pass(b, partial), one_pass(b, 3 * b.stream * M * C)]
    return [*products, *scaled, *sums, *middle, *norm]
