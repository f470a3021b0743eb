"""Tests of the compile backend on odd graphs: every kind of block in every circumstance, against eager PyTorch."""

import contextlib
import itertools

import captured
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_triton.convert import backend

D, N = 8, 6


class Parts(nn.Module):
    """The layers of all blocks, with random weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.fc, self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(4))
        self.qkv, self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(D, 12), nn.Linear(12, D)
        self.narrow = nn.Linear(6, D)
        self.patches = nn.Conv2d(3, D, 2, 2)
        self.mha = nn.MultiheadAttention(D, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True)
        self.scale, self.bias, self.positions = (nn.Parameter(torch.empty(s)) for s in ((D,), (N, N), (1, 4, D)))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)


def split(x):
    """[B, N, D] to [B, H, N, D/H]."""
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def merge(x):
    """[B, H, N, D/H] to [B, N, D]."""
    return x.transpose(1, 2).flatten(2)


def packed(parts, x):
    """Self-attention on a packed projection, as in timm."""
    q, k, v = parts.qkv(parts.norm(x)).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return x + parts.fc(merge(F.scaled_dot_product_attention(q, k, v)))


def separate(parts, x):
    """Self-attention on three projections of one LayerNorm, by keywords, as in transformers."""
    h = F.layer_norm(input=x, normalized_shape=(D,), weight=parts.norm.weight, bias=parts.norm.bias)
    q, k, v = (split(F.linear(input=h, weight=m.weight, bias=m.bias)) for m in (parts.q, parts.k, parts.v))
    return torch.add(input=merge(F.scaled_dot_product_attention(query=q, key=k, value=v)), other=x)


def written_out(parts, x):
    """Attention as two products and a softmax with a bias."""
    q, k, v = (split(layer(x)) for layer in (parts.q, parts.k, parts.v))
    scores = torch.matmul(input=q, other=torch.transpose(input=k, dim0=2, dim1=3)) * 0.5 + parts.bias
    return merge(torch.softmax(scores, axis=-1) @ v)


def masked(parts, x):
    """The same with a boolean tensor added to the scores, as users write by mistake."""
    q, k, v = (split(layer(x)) for layer in (parts.q, parts.k, parts.v))
    return merge((q @ k.transpose(2, 3) + (parts.bias > 0)).softmax(-1) @ v)


def gated(parts, x):
    """SwiGLU."""
    gate, up = torch.chunk(input=parts.up(parts.norm(x)), chunks=2, dim=-1)
    return parts.narrow(torch.mul(input=F.silu(gate), other=up))


def quick(parts, x):
    """MLP with x · sigmoid(1.702 x)."""
    h = parts.up(parts.norm(x))
    return parts.down(h * torch.sigmoid(1.702 * h)) * parts.scale + x


def in_place(parts, x):
    """MLP whose activation writes into its input."""
    return parts.down(F.relu(parts.up(parts.norm(x)), inplace=True)) + x


def embedded(parts, x):
    """Patch projection with positions."""
    return parts.patches(x.reshape(len(x), 3, 4, 4)).flatten(2).transpose(1, 2) + parts.positions


BLOCKS = {
    "branch": lambda parts, x: x + parts.fc(parts.norm(x)) * parts.scale,
    "mlp": lambda parts, x: x + parts.down(F.gelu(parts.up(parts.norm(x)))),
    "mha": lambda parts, x: parts.mha(x, x, x, need_weights=False)[0] + x,
    "encoder": lambda parts, x: parts.encoder(x),
    **{f.__name__: f for f in (packed, separate, written_out, masked, gated, quick, in_place, embedded)},
}


def written_after(block):
    """The block's input is written after it was read, by an operator without an underscore."""

    def run(parts, x):
        x = x * 1.0
        y = block(parts, x)
        x //= 0.5
        return y, block(parts, x), x

    return run


def written_through_a_view(block):
    """The block's input is written through a view that was taken before."""

    def run(parts, x):
        x = x * 1.0
        view = x.view(-1)[3:20]
        y = block(parts, x)
        view.mul_(2.0)
        return y, block(parts, x)

    return run


def written_during(block):
    """A weight of the block is written between two uses, by a method."""

    def run(parts, x):
        with torch.no_grad():
            y = block(parts, x)
            scale = parts.scale * 1.0
            z = x + parts.fc(parts.norm(x)) * scale
            scale.__imod__(0.3)
            return y + scale.sum(), z, F.gelu(parts.fc(x)) * scale

    return run


def in_mode(mode, inside):
    """The block runs in a mode of PyTorch that is entered within the graph, or around it."""

    def circumstance(block):
        def entered(parts, x):
            with mode():
                y = block(parts, x)
            return y, block(parts, x)

        return entered if inside else block

    return circumstance


def bfloat16():
    """Autocast to bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


def branching(block):
    """Control flow on a value, which breaks the graph."""

    def run(parts, x):
        x = block(parts, x) if x.sum() > 0 else block(parts, -x)
        return x * 2

    return run


PLAIN = dict(dtype=torch.float32, around=contextlib.nullcontext, sizes=(2,), dynamic=None, learn=True)
HALF = torch.bfloat16
# circumstance → what it makes of a block, and how that runs
CIRCUMSTANCES = {
    "plain": (lambda block: block, {}),
    "frozen": (lambda block: block, dict(learn=False)),
    "no_grad": (lambda block: block, dict(around=torch.no_grad)),
    "inference": (lambda block: block, dict(around=torch.inference_mode)),
    "no_grad inside": (in_mode(torch.no_grad, True), {}),
    "autocast": (lambda block: block, dict(around=bfloat16, eps=HALF)),
    "autocast inside": (in_mode(bfloat16, True), dict(eps=HALF)),
    "autocast without gradients": (in_mode(bfloat16, True), dict(eps=HALF, around=torch.no_grad)),
    "bfloat16": (lambda block: block, dict(dtype=HALF, eps=HALF)),
    "float16": (lambda block: block, dict(dtype=torch.float16, eps=torch.float16)),
    "float64": (lambda block: block, dict(dtype=torch.float64)),
    "dynamic": (lambda block: block, dict(sizes=(2, 3), dynamic=True)),
    "dynamic without gradients": (lambda block: block, dict(sizes=(2, 3, 1), dynamic=True, around=torch.no_grad)),
    "empty": (lambda block: block, dict(sizes=(0, 2))),
    "checkpoint": (lambda block: lambda parts, x: checkpoint(block, parts, x, use_reentrant=False) * 2, {}),
    "control flow": (branching, dict(sizes=(2, 2, 2), break_=True)),
    "written after": (written_after, dict(around=torch.no_grad)),
    "written through a view": (written_through_a_view, dict(around=torch.no_grad)),
    "written weight": (written_during, {}),
    "written output": (lambda block: lambda parts, x: ((y := block(parts, x) * 1.0).add_(1.0), y.mT), {}),
    "views of the output": (lambda block: lambda parts, x: ((y := block(parts, x)), y.transpose(0, 1), y[:1]), {}),
    "views of the input": (lambda block: lambda parts, x: (x.view(-1), block(parts, x), x[1:]), {}),
    "shared weights": (lambda block: lambda parts, x: block(parts, x) + block(parts, 2 * x), {}),
    "used twice": (lambda block: lambda parts, x: ((y := block(parts, x)) + y, y * y), {}),
    "strided": (lambda block: lambda parts, x: block(parts, x.transpose(0, 1).contiguous().transpose(0, 1)), {}),
    "detached": (lambda block: lambda parts, x: block(parts, x.detach()) + x.sum(), {}),
    "gathered": (lambda block: lambda parts, x: block(parts, x)[torch.tensor([1, 0])], {}),
}
EVERY = list(itertools.product(CIRCUMSTANCES, BLOCKS))
EVERY.remove(("autocast without gradients", "encoder"))  # torch.compile itself gives another dtype than eager
# by default, every second circumstance with one block; a prime step avoids pairing them in the order of the lists
SAMPLE = {(c, [*BLOCKS][5 * i % len(BLOCKS)]) for i, c in enumerate(CIRCUMSTANCES) if i % 2 == 0}
SAMPLE |= {("plain", block) for block in [*BLOCKS][::2]}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Makes the CPU count as a GPU while graphs are rewritten; resets Dynamo."""
    captured.as_on_gpu(monkeypatch)
    yield
    torch._dynamo.reset()


def results(run, parts, x, learn):
    """Outputs, the input as it is left, and gradients of the input and all parameters."""
    parts.zero_grad()
    leaf = x.clone().requires_grad_(learn)
    outputs = run(parts, leaf)
    outputs = [*outputs] if isinstance(outputs, tuple) else [outputs]
    total = sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in outputs)
    gradients = []
    if total.requires_grad:
        total.backward()
        # of an empty batch, PyTorch's fused attention gives its mask no gradient, the written-out form zeros
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in (leaf, *parts.parameters())]
    return [t.detach() for t in (*outputs, leaf, *gradients)]


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "circumstance, block", [pytest.param(*e, marks=() if e in SAMPLE else pytest.mark.full(one_in=3)) for e in EVERY]
)
def test_blocks_in_odd_graphs_equal_eager(circumstance, block):
    """Oracle: the function itself: outputs, the input as it is left, and every gradient."""
    make, options = CIRCUMSTANCES[circumstance]
    options = PLAIN | dict(eps=torch.float32, break_=False) | options
    parts, run, became = Parts().to(options["dtype"]).eval(), make(BLOCKS[block]), set()

    def compiler(graph, given):
        became.update(row.became for row in backend.rewrite(graph).rows)
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    if not options["learn"]:
        parts.requires_grad_(False)
    compiled = torch.compile(run, backend=compiler, dynamic=options["dynamic"], fullgraph=not options["break_"])
    learn = options["learn"] and options["around"] not in (torch.no_grad, torch.inference_mode)
    for i, size in enumerate(options["sizes"]):
        x = torch.randn(size, N, D, dtype=options["dtype"]) * (-1) ** i
        with options["around"]():
            want, got = (results(f, parts, x, learn) for f in (run, compiled))
        scale = max((float(t.double().norm()) for t in want), default=0.0)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            # sums of a few dozen terms in another order; gradients that cancel are small next to the others
            allowed = 64 * torch.finfo(options["eps"]).eps * max(float(b.double().norm()), 0.1 * scale)
            assert a.dtype == b.dtype and a.shape == b.shape and (a.double() - b.double()).norm() <= allowed, became
    if circumstance == "plain":
        assert became - {None}
