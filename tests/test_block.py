"""Tests of a block's launches and of the row statistics that it passes on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from agreement import seeded
from interpreter import interpreting
from recording import Recorder

from benchmarks.launch_recorder import recording
from fastvit_triton import create_model, freeze, layers, optimize
from fastvit_triton.convert.readers.ours import run_chained
from fastvit_triton.kernels import fold, linear
from fastvit_triton.kernels.argument import Norm
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.layers import Block

pytestmark = pytest.mark.fast

SIZES = dict(img_size=8, patch_size=4, embed_dim=16, num_heads=2, num_classes=3)
FREE = ("view", "reshape", "transpose", "permute", "unbind", "slice", "select", "expand", "detach", "empty", "alias")


def model(depth: int = 2, dtype: torch.dtype = torch.float32, **sizes: int) -> torch.nn.Module:
    """A small ViT with LayerScale and random parameters."""
    torch.manual_seed(0)
    net = create_model("vit_tiny_patch16_224", depth=depth, init_values=0.1, **SIZES | sizes).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return net.to(dtype)


def launched(depth: int, width: int, way: str) -> tuple[list[str], list[str]]:
    """Our launches and PyTorch's in bfloat16 inference, after one call that fills the caches."""
    net = model(depth, torch.bfloat16, embed_dim=width)
    rows = -(-4 * width // 5) * 5  # as many rows as the MLP has outputs, or one batch fewer
    image = torch.randn(rows // 5 - (way == "norms"), 3, 8, 8, dtype=torch.bfloat16)
    if way == "frozen":
        freeze(net)
    with recording("sm_90") as found, torch.no_grad():
        net(image)
        found.clear()
        with Recorder() as run:
            net(image)
    names = [op.removeprefix("aten::").partition(".")[0] for op in run.ops if op.startswith("aten::")]
    return [launch.name for launch in found], [name for name in names if not any(word in name for word in FREE)]


QKV = ["linear._fwd_kernel", "attention._fwd_kernel", "linear._fwd_kernel"]  # LN → qkv, attention, proj + residual
NORM = ["layer_norm._fwd_kernel"]


@pytest.mark.parametrize("width, mlp", [(256, ["linear._fwd_kernel"] * 2), (16, ["mlp._fwd_kernel"])])
@pytest.mark.parametrize("way", ["frozen", "fold", "norms"])
def test_a_block_makes_five_to_seven_launches(way, width, mlp):
    """Oracle: the plan: LN → qkv, attention, proj + residual, LN → fc1 → GELU, fc2 + residual, without PyTorch kernels.

    Five launches if folds are kept; six if one launch folds both norms; seven if both norms run. In a narrow model, the
    last two products are one launch.
    """
    (two, before), (three, after) = launched(2, width, way), launched(3, width, way)
    plan = {"frozen": [*QKV, *mlp], "fold": ["fold._fold_kernel", *QKV, *mlp], "norms": [*NORM, *QKV, *NORM, *mlp]}[way]
    blocks = plan * 3
    if way != "norms":  # statistics of the first block's input, which no product computes
        blocks.insert(way == "fold", "layer_norm._stats_kernel")
    assert three == ["patch_embed._fwd_kernel", *blocks, *NORM]
    assert len(three) - len(two) == len(plan) and after == before


def test_training_folds_both_norms_of_a_block_in_one_launch():
    """Oracle: the plan; backward folds nothing but the matrix that maps the gradient to x, twice per block."""
    net, image = model(2, torch.bfloat16, embed_dim=256).train(), torch.randn(256, 3, 8, 8, dtype=torch.bfloat16)
    with recording("sm_90") as found:
        net(image)
    assert [launch.name for launch in found].count("fold._fold_kernel") == 2


def test_statistics_are_passed_on_unless_a_block_has_hooks(always_folded):
    """Oracle: the PyTorch path. A hook on a block receives one tensor, and the result is the same."""
    net, image, seen = model(3), torch.randn(2, 3, 8, 8), []
    want = net(image).detach()
    with interpreting(), torch.no_grad():
        fused = net(image)
        handle = net.blocks[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
        watched = net(image)
        handle.remove()
    assert [type(t) for t in seen] == [torch.Tensor]
    scale = 64 * torch.finfo(torch.float32).eps * float(want.abs().max())
    assert float((fused - want).abs().max()) <= scale and float((watched - want).abs().max()) <= scale


def test_statistics_are_computed_only_if_a_linear_layer_reads_them(monkeypatch):
    """Oracle: the norm runs by itself, without statistics, on a float32 stream under autocast and on few rows."""
    block, x = model().blocks[0], torch.randn(2, 5, 16)
    assert 10 < block.mlp.fc1.out_features
    with interpreting(), torch.no_grad():
        assert run_chained(block, x, None, block.norm1)[1] is None
    monkeypatch.setitem(fold.SPACE, "border", dict(ROWS_PER_OUTPUT=0))
    with interpreting(), torch.no_grad():
        assert run_chained(block, x, None, block.norm1)[1].shape[0] == 10
        with torch.autocast("cpu", torch.float16):
            assert run_chained(block, x, None, block.norm1)[1] is None
            assert run_chained(block, x.half(), None, block.norm1)[1] is not None


class Rolled(layers.Attention):
    """Attention that overrides only `attend`: it reads the tokens in another order."""

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(qkv.roll(1, 1)).flip(1)


class Pool(torch.nn.Module):
    """A custom body that no reader knows: a linear layer on the mean token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.mean(1, keepdim=True).expand_as(x))


@pytest.mark.parametrize("body, launches", [(Rolled, 5), (Pool, 3)])
def test_what_surrounds_a_custom_body_is_fused(body, launches, always_folded):
    """Oracle: the PyTorch path, output and every gradient; the launches of a block without the custom body's own.

    PyTorch computes the attention of a class that overrides `attend`, between linear layers that are fused, and calls
    a module that no reader knows, between the kernel of its norm and the addition of the residual.
    """
    block = Block(16, body(16), layers.Mlp(16, 32), init_values=0.5, drop_path=0.5)
    optimize(block)
    x = torch.randn(4, 5, 16, requires_grad=True)
    leaves = [x, *block.parameters()]
    for training in (False, True):
        block.train(training)
        want = seeded(block, x)
        grads = torch.autograd.grad(want.square().sum(), leaves)
        with interpreting():
            got = seeded(block, x)
            found = torch.autograd.grad(got.square().sum(), leaves)
        for a, b in zip((got, *found), (want, *grads), strict=True):
            a, b = a.detach(), b.detach()
            assert (a - b).norm() <= 256 * torch.finfo(torch.float32).eps * b.norm().clamp(min=1.0)
    with recording("sm_90") as calls, torch.no_grad():
        block.eval().bfloat16()(torch.randn(64, 5, 16).bfloat16())
    assert len(calls) == launches, [launch.name for launch in calls]


@pytest.mark.parametrize("scales", [None, 0.1], ids=["", "layer scale"])
@pytest.mark.parametrize("way", ["mixed", "fused"])
def test_gradients_under_autocast(way, scales):
    """Oracle: float64; budget: in the norm twice the error of PyTorch's operators, and one rounding to float16."""
    made = create_model("vit_tiny_patch16_224", depth=2, init_values=scales, **SIZES).train()
    x = torch.randn(3, 3, 8, 8)
    found = {}
    for name in (way, "plain", "exact"):
        net = copy.deepcopy(made)
        if name == "exact":
            net.double()(x.double()).square().sum().backward()
        else:
            with interpreting(), forcing(name):
                with torch.autocast("cpu", torch.float16):
                    y = net(x)
                y.float().square().sum().backward()
        found[name] = [p.grad.double() for p in net.parameters()]
    for ours, plain, exact in zip(*found.values(), strict=True):
        budget = 2 * (plain - exact).norm() + torch.finfo(torch.float16).eps * exact.norm()
        assert (ours - exact).norm() <= budget


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "autocast"])
def test_gradients_where_attention_sums_that_of_its_bias(dtype, monkeypatch):
    """Oracle: float64 and the error of PyTorch's operators, as above; in the kernel that of keys is 0."""
    made = create_model("vit_tiny_patch16_224", depth=2, **SIZES | dict(embed_dim=128)).train()  # two heads of 64
    made.blocks[1].attn.qkv.bias.requires_grad_(False)
    x, found = torch.randn(3, 3, 8, 8, dtype=dtype), {}
    for name in ("mixed", "plain", "exact"):
        net = copy.deepcopy(made).to(torch.float64 if name == "exact" else dtype)
        with interpreting(), forcing("plain" if name == "exact" else name):
            with torch.autocast("cpu", torch.float16, enabled=name != "exact" and dtype == torch.float32):
                y = net(x.to(torch.float64 if name == "exact" else dtype))
            y.to(torch.float64).square().sum().backward()
        found[name] = {n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None}
    assert found["mixed"].keys() == found["exact"].keys() and "blocks.1.attn.qkv.bias" not in found["mixed"]
    assert not found["mixed"]["blocks.0.attn.qkv.bias"].unflatten(0, (3, -1))[1].any()
    for ours, plain, exact in zip(*(grads.values() for grads in found.values()), strict=True):
        assert (ours - exact).norm() <= 2 * (plain - exact).norm() + torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("way", ["mixed", "fused"])
def test_an_input_that_is_passed_on_has_the_gradients_of_all_readers(way, kind):
    """Oracle: the equations in float64, for either output alone and for both; budget: 16 roundings of the largest."""
    x, weight, bias = torch.randn(2, 40, 16), torch.randn(24, 16), torch.randn(24)
    norm_weight, norm_bias = torch.randn(16), torch.randn(16) if kind == "layer_norm" else None
    norms = {"layer_norm": F.layer_norm, "rms_norm": lambda x, n, w, _, eps: F.rms_norm(x, n, w, eps)}
    for uses in ((1, 1), (1, 0), (0, 1)):
        exact = x.double().requires_grad_()
        first, second = (None if t is None else t.double() for t in (norm_weight, norm_bias))
        y = F.linear(norms[kind](exact, (16,), first, second, 1e-6), weight.double(), bias.double())
        (uses[0] * y.sin().sum() + uses[1] * exact.cos().sum()).backward()
        given = x.clone().requires_grad_()
        with interpreting():
            norm = Norm(norm_weight, norm_bias, 1e-6, kind)
            y, passed = linear.run(given, weight, bias, norm, passes_input=True, way=way)
            sum(part.sum() for part, used in ((y.sin(), uses[0]), (passed.cos(), uses[1])) if used).backward()
        error = (given.grad - exact.grad).abs().max()
        assert error <= 16 * torch.finfo(torch.float32).eps * exact.grad.abs().max()
