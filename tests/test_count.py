"""Tests of `doctor --model`'s counts of launches, bytes and flops. Oracle: hand counts and recorded launches."""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from catalogue import build
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.launch_recorder import recording
from fastvit_triton import create_model, freeze, optimize
from fastvit_triton.engine.values import reserved
from fastvit_triton.expected.blocks import host_us
from fastvit_triton.expected.count import count, predict, weightless
from fastvit_triton.expected.events import Count
from fastvit_triton.expected.gpus import Device, gpus
from fastvit_triton.expected.trace import assuming_true, tracing
from fastvit_triton.explain.costs import image_cost
from fastvit_triton.kernels import backend, launch, tile
from fastvit_triton.kernels.settings import forcing

pytestmark = pytest.mark.fast


def empty(*shape, dtype=torch.bfloat16):
    """An uninitialised tensor whose values are never read."""
    return torch.empty(shape, dtype=dtype)


def kernels(model, *inputs):
    """Counts of inference: in eager PyTorch, with all kernels, and with all kernels and a frozen model."""
    with forcing("fused"):
        found = predict(model, gpus()["h200"], False, *inputs)
    return found.eager, found.ours, found.frozen


def test_operators_by_hand():
    """Oracle: operands and results by hand, 2 bytes per number; views and new memory are free."""
    x, w, b = empty(6, 8), empty(16, 8), empty(16)
    read, written = 6 * 8 + 16 * 8 + 16, 6 * 16
    assert count(F.linear, x, w, b) == Count(1, 2 * (read + written), 2 * 6 * 8 * 16)
    assert count(F.gelu, x) == Count(1, 2 * 2 * 48)
    assert count(x.add_, x) == Count(1, 2 * 2 * 48)  # one read, one write
    assert count(lambda: x.t().reshape(2, 4, 6).detach().unbind(0)) == Count()
    assert count(lambda: (x.new_empty(5), torch.empty_like(x))) == Count()
    assert count(F.gelu, empty(1, 8).expand(6, 8)).nbytes == 2 * (8 + 48)  # only one row is read


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give no addresses without memory")
def test_tensors_may_be_larger_than_the_memory():
    """Oracle: bytes by hand; the input and the result of 2 TB each have addresses alone."""
    x = reserved(torch.empty(2**20, 2**20, dtype=torch.bfloat16, device="meta"))
    assert count(F.gelu, x) == Count(1, 2 * 2 * 2**40)
    assert count(F.gelu, x[:, ::2].mT) == Count(1, 2 * 2**40)
    places = torch.zeros(2**20, dtype=torch.int64)  # whose values are known, so that small results are computed
    assert count(torch.zeros, 2**20, 2**20) == Count(1, 4 * 2**40)
    assert count(lambda: places.new_zeros(2**40)).launches == 1
    assert count(lambda: F.one_hot(places, 2**20).to(torch.bfloat16)).nbytes > 3 * 8 * 2**40


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gradients_of_a_convolution_by_hand(groups, transposed):
    """Oracle: dx and dW each have as many products as y, whatever the number of groups."""
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(8, 8, 3, padding=1, groups=groups, dtype=torch.bfloat16)
    x = empty(2, 8, 5, 6).requires_grad_()
    one = 2 * 2 * 8 * 5 * 6 * (8 // groups) * 9
    assert count(layer, x).flops == one
    assert count(lambda: layer(x).backward(empty(2, 8, 5, 6))).flops == 3 * one
    assert count(lambda: layer(x.detach()).backward(empty(2, 8, 5, 6))).flops == 2 * one  # dW alone


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_hand(masked):
    """Oracle: q, k, v, mask and output once each, and L in fp32; both matrix products; for every calling convention."""
    q, k, v, mask = empty(2, 3, 5, 8), empty(2, 3, 7, 8), empty(2, 3, 7, 8), empty(2, 1, 5, 7) if masked else None
    nbytes = 2 * (2 * 2 * 3 * 5 * 8 + 2 * 2 * 3 * 7 * 8 + (2 * 5 * 7 if masked else 0)) + 4 * 2 * 3 * 5
    found = count(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert found == Count(1, nbytes, 2 * 2 * 2 * 3 * 5 * 7 * 8)
    layer = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.bfloat16).eval()
    x = empty(2, 5, 24)
    products = 2 * 10 * 24 * 24 * 4 + 2 * 2 * 2 * 5 * 5 * 24
    with torch.no_grad():
        assert count(layer, x, x, x, need_weights=False).flops == products


BLOCKS = {
    "timm_vit": lambda m: m.blocks[0],
    "timm_deit3": lambda m: m.blocks[0],
    "timm_vit_qk_norm": lambda m: m.blocks[0],
    "torchvision_vit": lambda m: m.encoder.layers[0],
    "hf_vit": lambda m: m.layers[0],
    "vit_pytorch_vit": lambda m: m.transformer,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_counted_launches_equal_recorded_launches(name):
    """Oracle: the kernels that the same block launches on real tensors, and the bytes of their arguments."""
    block = BLOCKS[name](build(name, torch.bfloat16)).eval()
    optimize(block)
    x = torch.randn(2, 5, 24, dtype=torch.bfloat16)
    recorded = []
    with torch.no_grad():
        for prepare in (lambda: None, partial(freeze, block)):
            prepare()
            with recording("sm_90") as found:
                block(x)  # folds weights
                del found[:]
                block(x)
            recorded.append((len(found), sum(launch.nbytes for launch in found)))
    _, *counted = kernels(block, x)
    assert [(count.launches, count.nbytes) for count in counted] == recorded


@pytest.mark.parametrize("name, after", [("vit_small_patch16_224", 5), ("vit_tiny_patch16_224", 4)])
@pytest.mark.parametrize("batch, more", [(1, 2), (8, 1)], ids=["few_rows", "many_rows"])
def test_a_block_makes_ten_launches_before_and_five_when_frozen(batch, more, name, after):
    """Oracle: the operators of an eager block, counted by hand, and the plan; three blocks minus two.

    In a model that is not frozen, one launch folds both LayerNorms, or both run if there are few rows. ViT-Ti's rows
    are narrow enough for an MLP in one launch.
    """

    def both(depth):
        with torch.device("meta"):
            model = create_model(name, depth=depth).to(torch.bfloat16).eval()
        return kernels(model, empty(batch, 3, 224, 224))

    three, two = both(3), both(2)
    assert [a.launches - b.launches for a, b in zip(three, two, strict=True)] == [10, after + more, after]
    assert three[1].nbytes < three[0].nbytes


def test_flops_equal_the_cost_table():
    """Oracle: `explain`'s formula for one image plus the head; the same before and after `optimize`."""
    with torch.device("meta"):
        model = create_model("vit_base_patch16_224").to(torch.bfloat16).eval()
    costs = image_cost(224, 16, dim=768, depth=12, num_heads=12, head_dim=64, hidden=3072)
    before, after, frozen = kernels(model, empty(4, 3, 224, 224))
    assert (
        before.flops == after.flops == frozen.flops == 4 * (costs.linear_flops + costs.attention_flops + 2 * 768 * 1000)
    )


def test_each_gpu_has_its_own_choices():
    """Oracle: the tables of two GPUs; expected times are those of rates so fast that the host is the bottleneck."""
    with torch.device("meta"):
        model = create_model("vit_small_patch16_224", depth=2).to(torch.bfloat16).eval()
    real = gpus()["rtx4090"]
    other = gpus()["h200"]
    fast = other._replace(sheet=Device("fast", 1e6, 1e6, 1e6, "none"))
    first, second, third = found = [predict(model, gpu, False, empty(256, 3, 224, 224)) for gpu in (fast, real, fast)]
    assert [{choice.way for choice in one.blocks} for one in found] == [{"mixed"}, {"fused"}, {"mixed"}]
    assert second.frozen.launches == second.ours.launches - 2  # one fold per block
    assert first == third and first.eager == second.eager
    assert second.ours_us()[0] > second.ours_us()[1] > second.ours_us()[2] > second.ours_us(frozen=True)[2]
    assert first.eager_us() == 2 * host_us("plain", 2, False, True) > first.compiled_us()
    assert first.ours_us()[1] == 2 * host_us("mixed", 2, False, True)
    assert second.compiled.nbytes < second.eager.nbytes


@pytest.mark.parametrize("name, branches", [("tnt_s_patch16_224", 4), ("cct_7_3x1_32", 2), ("cait_xxs24_224", 2)])
def test_each_branch_is_counted_once(name, branches):
    """Oracle: by hand: the branches of two blocks, and CaiT's class blocks' MLPs."""
    with weightless():
        model = create_model(name, depth=2).to(torch.bfloat16).eval()
    side = 32 if name.startswith("cct") else 224
    found = predict(model, gpus()["h200"], False, empty(8, 3, side, side))
    assert sum(len(choice.branches) for choice in found.blocks) == 2 * branches + 2 * name.startswith("cait")


def test_training_counts_every_output():
    """Oracle: by hand: the products of two heads on one input, and two each in the backward pass (one is for x)."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 3, bias=False), nn.Linear(8, 5, bias=False)

        def forward(self, x):
            return {"a": self.a(x), "b": (self.b(x), None)}

    found = predict(Heads(), gpus()["h200"], True, torch.empty(4, 8, device="meta"))
    assert found.frozen is None and found.blocks == () and found.eager == found.ours
    assert found.eager.launches == 4 and found.eager.flops == 2 * 2 * 4 * 8 * (3 + 5)


class Grids(nn.Module):
    """Splits tokens by grids that it reads from a tensor, as Qwen2-VL does, and averages valid ones, as DETR does."""

    def __init__(self):
        super().__init__()
        self.fc, self.rates = nn.Linear(8, 8), torch.linspace(0, 1, 3).tolist()
        self.register_buffer("ids", torch.arange(5))

    def forward(self, x, grids):
        parts, valid = x.split(grids.prod(-1).tolist()), torch.zeros(len(x), dtype=torch.bool)
        for part, (h, w) in zip(parts, grids, strict=True):
            part.view(int(h), int(w), 8)
        valid[: int(grids[0].prod())] = True
        valid[self.ids[-1]] = False
        return self.fc(x[valid] if valid.any() else x)


def test_integers_and_constants_have_values():
    """Oracle: PyTorch's own results and shapes on real tensors; weights and images have no values, also on the CPU."""
    x, grids = torch.randn(14, 8), torch.tensor([[2, 4], [3, 2]])
    with weightless():
        model = Grids()
    assert model.fc.weight.is_meta and model.rates == [0, 0.5, 1] and model.ids.tolist() == list(range(5))
    found = predict(model, gpus()["h200"], False, x.to("meta"), grids)
    real = Grids()
    assert found.eager.flops == 2 * len(real(x, grids)) * 8 * 8 == 2 * 7 * 8 * 8

    def computed(grids):
        places = torch.arange(6.0).view(2, 3)
        places[0] = places.mean(0)
        sides = torch.empty(2, dtype=torch.long)
        sides[0], sides[1] = 4, 5
        filled = torch.empty(2).fill_(3)
        return places[places > 1], grids.cumsum(0), torch.ones_like(x[:2])[:, :2] + 1, filled, sides

    with tracing():
        got = [t.tolist() for t in computed(grids)]
        for unknown in (x, torch.rand(2), torch.ones(2).copy_(x[0, :2]), torch.empty(2, dtype=torch.long)):
            with pytest.raises(RuntimeError, match="tolist reads a value that depends on weights"):
                unknown.tolist()
    assert got == [t.tolist() for t in computed(grids)]
    for asked in ((x.to("meta"), grids.to("meta")), (x.to("meta"), grids.to("meta") + 0)):
        with pytest.raises(RuntimeError, match="integer inputs on the CPU, such as a grid, have values"):
            predict(model, gpus()["h200"], False, *asked)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Detr", "DeformableDetr"])
def test_detection_models_are_counted(name):
    """Oracle: torch's flop counter on a run with real weights; masks and grids are read from tensors."""
    import transformers

    sizes = dict(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4)
    backbone = transformers.ResNetConfig(**sizes, out_features=["stage4"] if name == "Detr" else ["stage3", "stage4"])
    sides = [f"{part}_{what}" for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")]
    options = dict(zip(sides, (1, 2, 32, 2, 2, 32), strict=True), d_model=32, num_queries=5, backbone_config=backbone)
    config = getattr(transformers, f"{name}Config")(**options, use_timm_backbone=False, use_pretrained_backbone=False)
    config.num_feature_levels = 2
    build = getattr(transformers, f"{name}ForObjectDetection")
    with weightless():
        model = build._from_config(config, attn_implementation="eager").eval()
    real = build._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    images = torch.randn(2, 3, 64, 96)
    with FlopCounterMode(display=False) as counter:
        real(images)
    assert predict(model, gpus()["h200"], False, images.to("meta")).eager.flops == counter.get_total_flops() > 0


def test_global_state_is_restored():
    """Oracle: the switch and the assumed GPU, after a model that needs real values and one that does not."""

    class Reader(nn.Module):
        def forward(self, x):
            return x if x.sum().item() else -x

    def facts():
        return backend._switch, launch.target, type(tile.load_rows).run, torch.backends.mha.get_fastpath_enabled()

    with backend.using_backend("torch"):
        before = facts()
        with pytest.raises(RuntimeError, match="reads a value"):
            kernels(Reader(), empty(2, 3))
        with torch.device("meta"):
            kernels(create_model("vit_digits_patch2_8").to(torch.bfloat16), empty(2, 1, 8, 8))
        assert facts() == before


def test_unknown_masks_may_count_as_true():
    """Oracle: the places of a mask that is True everywhere: 6 pairs of int64, gathered from 6 of 3 numbers."""
    x = torch.empty(2, 3, device="meta")

    def chosen() -> torch.Tensor:
        return x[torch.where(x > 0)]

    with pytest.raises(RuntimeError, match="nonzero reads a value"):
        count(chosen)
    with assuming_true():
        assert count(chosen).nbytes == (24 + 6) + (6 + 6 * 16) + (24 + 6 * 16 + 24)
    with pytest.raises(RuntimeError, match="nonzero reads a value"):
        count(chosen)


def test_counts_need_no_triton(monkeypatch):
    """Oracle: the count with Triton; without it each operator is one launch."""
    with torch.device("meta"):
        model = create_model("vit_tiny_patch16_224", depth=1).to(torch.bfloat16).eval()
    with_it = kernels(model, empty(2, 3, 224, 224))
    monkeypatch.setattr(tile, "MISSING", "blocked")
    monkeypatch.setattr(tile, "load_rows", type("Inert", (), {})())
    without = kernels(model, empty(2, 3, 224, 224))
    assert tile.MISSING == "blocked" and without[0] == with_it[0]
    assert [c.flops for c in without] == [c.flops for c in with_it]
    assert (
        without[2].launches <= with_it[2].launches <= without[2].launches + 1
    )  # row statistics before the first block
