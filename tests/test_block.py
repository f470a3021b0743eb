"""What a block hands on and keeps: launches counted, row statistics, and the folded weights of eager inference."""

import copy
import pickle

import pytest
import torch
from interpreter import interpreting
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launches import recording
from fastvit_triton import create_model
from fastvit_triton.layers import seam

SIZES = dict(img_size=8, patch_size=4, embed_dim=16, num_heads=2, num_classes=3)
FREE = ("view", "reshape", "transpose", "permute", "unbind", "slice", "select", "expand", "detach", "empty", "alias")


class Kernels(TorchDispatchMode):
    """Names of PyTorch's own operations that would launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not any(word in name for word in FREE):
            self.names.append(name)
        return function(*arguments, **(options or {}))


def model(depth: int = 2, dtype: torch.dtype = torch.float32, **sizes: int) -> torch.nn.Module:
    """A small ViT with LayerScale; every parameter is random."""
    torch.manual_seed(0)
    net = create_model("vit_tiny_patch16_224", depth=depth, init_values=0.1, **SIZES | sizes).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return net.to(dtype)


def launched(depth: int, width: int) -> tuple[list[str], list[str]]:
    """Our launches and PyTorch's in bfloat16 inference, after one call that fills what is kept."""
    net, image = model(depth, torch.bfloat16, embed_dim=width), torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    with recording("sm_90") as found, torch.no_grad():
        net(image)
        found.clear()
        with Kernels() as kernels:
            net(image)
    return [launch.name for launch in found], kernels.names


@pytest.mark.parametrize("width, mlp", [(256, ["linear._fwd_kernel"] * 2), (16, ["mlp._fwd_kernel"])])
def test_a_block_is_five_launches_or_four(width, mlp):
    """Oracle: the plan LN → qkv, attention, proj + residual, LN → fc1 → GELU, fc2 + residual; none is PyTorch's.

    The last two are one where rows are narrow.
    """
    (two, before), (three, after) = launched(2, width), launched(3, width)
    plan = ["linear._fwd_kernel", "attention._fwd_kernel", "linear._fwd_kernel", *mlp]
    assert three == ["patch_embed._fwd_kernel", "layer_norm._stats_kernel", *plan * 3, "layer_norm._fwd_kernel"]
    assert len(three) - len(two) == len(plan) and after == before


def test_statistics_travel_unless_a_hook_watches():
    """Oracle: the PyTorch path. A hook on a block sees one tensor, and the result is the same."""
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


def test_statistics_are_made_only_where_a_product_reads_them():
    """Under autocast a float32 stream keeps a LayerNorm of its own, which finds its own."""
    block, x = model().blocks[0], torch.randn(2, 5, 16)
    with interpreting(), torch.no_grad():
        assert block(x, return_stats=True)[1].shape[0] == 10
        with torch.autocast("cpu", torch.float16):
            assert block(x, return_stats=True)[1] is None
            assert block(x.half(), return_stats=True)[1] is not None


def _step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _average(net):
    with torch.no_grad():
        for p in net.parameters():
            p.lerp_(torch.ones_like(p), 0.5)


def _replace(net):
    net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()}, assign=True)


def _load(net):
    net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()})


def _shift_norm(net):
    with torch.no_grad():
        net.blocks[0].norm1.bias.add_(1.0)


def _move(net):
    """What FSDP2 does when it gathers a parameter again: the same object, other memory."""
    for p in net.parameters():
        p.data = p.data * 0.5


@pytest.mark.parametrize("change", [_step, _average, _replace, _load, _shift_norm, _move])
def test_folded_weights_follow_their_sources(change):
    """Oracle: a fresh copy of the changed model, which keeps nothing. Every way to write a weight shows at once."""
    net, image = model(), torch.randn(2, 3, 8, 8)
    with interpreting():
        with torch.no_grad():
            before = net(image)
        change(net)
        with torch.no_grad():
            after = net(image)
            fresh = copy.deepcopy(net)(image)
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_a_bias_made_for_one_call_is_not_taken_for_the_last():
    """BEiT joins its bias anew in each call: another tensor where the one before was, of the same address and id."""
    x, weight, norm = torch.zeros(2, 8), torch.zeros(4, 8), (torch.ones(8), torch.zeros(8), 1e-6)
    memory = torch.ones(4).numpy()
    with interpreting(), torch.no_grad():
        bias = torch.from_numpy(memory)
        assert torch.equal(seam.folded(x, norm, (weight,), (bias,)).const, torch.ones(4))
        before, bias = id(bias), None
        memory[:] = 2
        bias = next((t for t in [torch.from_numpy(memory) for _ in range(1000)] if id(t) == before), None)
        if bias is None:
            pytest.skip("no new tensor took the freed identity")
        assert torch.equal(seam.folded(x, norm, (weight,), (bias,)).const, torch.full((4,), 2.0))


def test_folded_weights_are_kept_and_are_not_state():
    """Made once per layer and dtype; no copy or pickle holds them; training drops them."""
    net, image, made = model(), torch.randn(2, 3, 8, 8), []
    real = seam.fold
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "fold", lambda *arguments: made.append(1) or real(*arguments))
        with torch.no_grad():
            net(image), net(image)
        assert len(made) == 4  # qkv and fc1 of two blocks
        assert net.blocks[0].attn.qkv.weight in seam._folds
        twin = pickle.loads(pickle.dumps(net))
        assert twin.blocks[0].attn.qkv.weight not in seam._folds and set(net.state_dict()) == set(model().state_dict())
        net.train()(image)
        assert net.blocks[0].attn.qkv.weight not in seam._folds
        with torch.inference_mode():
            born = copy.deepcopy(net)
            made.clear()
            born(image), born(image)
        assert len(made) == 0  # inference tensors do not count their writes
