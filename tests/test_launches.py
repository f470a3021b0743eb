"""Tests of launches and bytes of whole models, counted without a GPU, and of their limits."""

import itertools
import json
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import nn

from benchmarks import launches, saved
from benchmarks.launches import MODELS, PHASES, Setting, build, figures, parts, trace, violations
from fastvit_triton import attention, linear, optimize
from fastvit_triton.engine.attention import DenseHeads
from fastvit_triton.expected.count import traced
from fastvit_triton.expected.inductor import inductor_count
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels import launch
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.op import REGISTERED
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.sizes import WAYS

BASE = "timm:vit_base_patch16_224"


def names(found):
    """Names of operators and launches, repeated as often as they are launched."""
    return sorted(event.name for event in found.events for _ in range(event.launches))


@pytest.mark.fast
def test_eager_block_by_hand():
    """Oracle: what each operator of a pre-norm block reads and writes, in values per token; 16 of 34 with Inductor."""
    block, _ = parts(Setting(BASE, 256, arch="sm_90"))
    M, C, H = 256 * 197, 768, 12
    norms, products, attention, gelu, adds = 2 * 2, 4 + 2 + 5 + 5, 4, 8, 2 * 3
    weights = 12 * C * C + (3 + 1 + 4 + 1) * C + 4 * C
    statistics = 4 * M * (2 * 2 + H)
    assert block["eager_launches"] == 10
    assert block["eager_bytes"] == 2 * M * C * (norms + products + attention + gelu + adds) + 2 * weights + statistics
    assert block["inductor_launches"] == 8  # an addition and the following LayerNorm are one kernel
    assert block["eager_bytes"] - block["inductor_bytes"] == 2 * M * C * 2


def test_the_peak_counts_what_lives_at_once():
    """Oracle: by hand, in units of x: products are kept for the backward pass, views and in-place sums take nothing."""
    x, weight = torch.empty(1024), torch.empty(1024, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.view(32, 32).mul(2).view(-1).add_(1)
        return x

    for call, units in ((lambda: chain(x), 2), (lambda: torch.cat([x * 1, x * 2]), 4)):
        with torch.no_grad(), tracing() as found:
            call()
        assert found.peak == units * 4096
    with tracing() as found:
        y = ((x * weight).exp().exp() * weight).view(2, -1)
    assert found.peak == 3 * 4096 and y.requires_grad  # those of both exps, and y
    with tracing() as found:
        kept = torch.empty(1024).new_empty(2048)
    assert found.peak == 3 * 4096 and len(kept) == 2048


@pytest.mark.fast
def test_eager_training_by_hand():
    """Oracle: three products per linear layer, and CUDA's backward kernels for attention and LayerNorm."""
    one, three = (names(trace(Setting(BASE, 8, "training", depth=depth))[0]) for depth in (1, 3))
    block = {name: (three.count(name) - one.count(name)) / 2 for name in three}
    attention = "_scaled_dot_product_flash_attention"
    expected = {
        "addmm": 4,
        "mm": 8,
        "sum": 4,
        "native_layer_norm": 2,
        "native_layer_norm_backward": 2 * 2,
        attention: 1,
    }
    expected |= {f"{attention}_backward": 3, "gelu": 1, "gelu_backward": 1, "add": 2 + 2, "stack": 1, "clone": 1}
    assert {name: n for name, n in block.items() if n} == expected


@pytest.mark.fast
def test_attention_sums_the_gradient_of_the_bias_of_its_projection(monkeypatch):
    """Oracle: by hand: a pass over dqkv less, and fp32 sums of two blocks of keys are written and read instead."""
    setting = Setting(BASE, 8, "training", "sm_90", depth=1)
    with forcing("mixed"):
        inside = trace(setting)[0]
        monkeypatch.setattr(DenseHeads, "learns_bias", lambda *_: False)
        apart = trace(setting)[0]
    rows, images, F = 8 * 197, 8, 3 * 768
    assert names(apart).count("sum") - names(inside).count("sum") == 1
    assert names(inside).count("layer_norm._sum_kernel") - names(apart).count("layer_norm._sum_kernel") == 1
    assert apart.count.nbytes - inside.count.nbytes == 2 * rows * F - 2 * 4 * 2 * images * F


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rule_gives_inductors_kernels():
    """Oracle: kernels and products in the code that Inductor generates for two blocks on a CPU, in inference."""
    from torch._inductor.utils import run_and_get_code

    called, counted = [], []
    for depth in (1, 3):
        setting = Setting(MODELS[0], 2, depth=depth)
        model = build(setting).to_empty(device="cpu").float()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        torch._dynamo.reset()
        with torch.no_grad():
            _, (code, *_) = run_and_get_code(torch.compile(model), torch.zeros(2, 3, 224, 224))
        called.append(
            len(re.findall(r"^ +(?:cpp_fused\w*|extern_kernels\.\w+|buf\d+ = torch\.ops\.\S+)\(", code, re.M))
        )
        counted.append(inductor_count(trace(setting)[0].events).launches)
    assert counted[1] - counted[0] == called[1] - called[0] == 2 * 8


@pytest.mark.fast
def test_mutation_casts_and_parts_are_counted():
    """Oracle: by hand: in-place writes, autocast's casts, and operators composed of others."""
    x, w, b = torch.empty(6, 8), torch.empty(16, 8), torch.empty(16)
    with tracing() as found, torch.no_grad():
        same = x.add_(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w, b)
        torch.empty(6, 8).copy_(x)
    assert same is x and y.dtype == torch.bfloat16 and y.shape == (6, 16) and y.device.type == "cpu"
    assert names(found) == ["_to_copy"] * 3 + ["add_", "addmm", "copy_"]
    assert found.events[0].nbytes == 2 * 4 * 48 and found.findings == []


@pytest.mark.fast
def test_host_waits_are_found():
    """Oracle: the calls for which PyTorch waits for a GPU."""
    for read in (
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        torch.nonzero,
        lambda t: t[t > 0],
        lambda t: t.tolist(),
    ):
        with tracing() as found:
            with pytest.raises(RuntimeError, match="reads a value"):
                read(torch.empty(3))
        assert len(found.findings) == 1 and found.findings[0].startswith("host waits for ")


@pytest.mark.fast
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_flops_of_causal_attention_are_those_of_the_seen_pairs(path):
    """Oracle: two products of 2·D flops, in two kernels backward seven, for each query and each key up to its own."""
    B, H, N, D = 2, 3, 257, 64
    pairs = B * H * N * (N + 1) // 2
    with launch.targeting("sm_90"), using_backend(path), forcing("fused"), tracing() as found:
        q, k, v = (torch.empty(B, H, N, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        o = attention(q, k, v, causal=True)
        assert found.count.flops == 4 * D * pairs
        if path == "triton":
            o.backward(torch.empty_like(o))
            assert found.count.flops == (4 + 14) * D * pairs


@pytest.mark.fast
def test_a_wrong_fake_is_found(monkeypatch):
    """Oracle: no finding with the correct fakes, and one for an operator whose fake is replaced by another's."""
    with using_backend("triton"):
        model = nn.LayerNorm(24).bfloat16()
        optimize(model)
        x = torch.empty(2, 5, 24, dtype=torch.bfloat16)
        body, fake = REGISTERED["layer_norm_fwd"]
        for broken in (False, True):
            if broken:
                monkeypatch.setitem(REGISTERED, "layer_norm_fwd", (body, lambda *given: fake(*given)[:1]))
            with launch.targeting("sm_90"), torch.no_grad(), tracing() as found:
                model(x)
            assert len(found.findings) == broken


@pytest.mark.fast
def test_launches_outside_operators_are_counted():
    """Oracle: the same call through the registered operator."""
    with launch.targeting("sm_90"), using_backend("triton"), torch.no_grad():
        body, counts = REGISTERED["layer_norm_fwd"][0], []
        given = torch.empty(2, 3, 32), None, torch.empty(32), torch.empty(32), 1e-6, None, None, None, False
        for call in (torch.ops.fastvit_triton.layer_norm_fwd, body):
            with tracing() as found:
                call(*given)
            counts.append(found.count)
    assert counts[0] == counts[1] and counts[0].launches == 1


@pytest.mark.fast
def test_a_norm_before_a_product_writes_its_dtype_under_autocast():
    """Oracle: by hand: the norm, the cast of the weight and the product; no cast of what the norm wrote."""
    x, weight, norm = torch.empty(2, 3, 32), torch.empty(48, 32), (torch.empty(32), torch.empty(32), 1e-6)
    with launch.targeting("sm_90"), using_backend("triton"), forcing("fused"), torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16), tracing() as found:
            linear(x, weight, norm=norm)
    names = sorted(event.name for event in found.events if event.launches)
    assert names == ["_to_copy", "layer_norm._fwd_kernel", "linear._fwd_kernel"]


def test_command_gives_whole_model_and_block():
    """Oracle: a model of four blocks is four blocks and the rest."""
    setting = Setting("timm:vit_tiny_patch16_224", 8, arch="sm_90")
    block, rest = parts(setting)
    whole = figures(Setting(setting.model, 8, arch="sm_90", depth=4))
    for key in rest.keys() - {"peak", "eager_peak"}:  # in inference the second block takes the memory of the first
        assert whole[key] == rest[key] + 4 * block[key], key
    assert whole["ways"].keys() == {"stem", "attention", "mlp"} and set(whole["ways"].values()) <= set(WAYS)


@pytest.mark.parametrize("model", ["timm:vit_small_patch14_reg4_dinov2", "vit_small_patch14_reg4_dinov2"])
def test_images_have_the_models_own_size(model):
    """Oracle: by hand: 37² or 16² patches and 5 other tokens; 38 values of each in a block, 4 for two LayerScales."""
    own, small = (parts(Setting(model, 2, arch="sm_90", size=size))[0] for size in (None, (224, 224)))
    C, H, tokens = 384, 6, 2 * (37**2 - 16**2)
    assert own["eager_launches"] == small["eager_launches"] == 12
    assert own["eager_bytes"] - small["eager_bytes"] == tokens * (2 * C * (38 + 4) + 4 * (2 * 2 + H))
    assert own["bytes"] > small["bytes"] and own["ways"].keys() == small["ways"].keys()


def test_the_command_takes_an_image_size(monkeypatch, capsys):
    """Oracle: `figures` of the same setting; sizes that do not fit give one sentence and exit code 2."""
    words = ["launches", "--model", "vit_small_patch14_reg4_dinov2", "--batch", "2", "--depth", "1"]

    def run(*more):
        monkeypatch.setattr("sys.argv", [*words, *more])
        launches.main()

    run("--img-size", "266x224", "--json")
    want = figures(Setting(words[2], 2, arch="sm_90", depth=1, size=(266, 224)))
    assert json.loads(capsys.readouterr().out).items() >= want.items()
    for wrong, sentence in (
        (["--img-size", "225"], "height 225 is not a multiple of patch_size 14"),
        (["--img-size", "0"], "--img-size is 0"),
        (["--batch", "0"], "--batch is 0; use an integer of at least 1"),
        (["--depth", "0"], "--depth is 0; use an integer of at least 1"),
        (["--model", "timm:swin_tiny_patch4_window7_224"], "which has stages; use a ViT"),
        (["--model", "timm:no_such"], "timm has no model called 'no_such'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(*wrong)
        assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("way", WAYS)
def test_forced_ways_are_used(way):
    """Oracle: the forced way; only fused blocks launch our linear kernel."""
    with forcing(way):
        found, ways = trace(Setting("timm:vit_small_patch16_224", 8, arch="sm_90", depth=1, frozen=True))
    assert ways["attention"] == ways["mlp"] == way
    assert any(event.name == "linear._fwd_kernel" for event in found.events) == (way == "fused")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "phase, batch, arch", sampled(itertools.product(PHASES, (8, 256), ("sm_80", "sm_89", "sm_90")), 4)
)
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[] if i in (0, 2) else pytest.mark.full) for i, m in enumerate(MODELS)]
)
def test_limits(model, arch, batch, phase):
    """Oracle: eager PyTorch. Our default moves no more bytes and makes no more launches (in training 1.1 times)."""
    found = []
    for ours in (True, False):
        for frozen in (False, True) if phase == "inference" else (False,):
            setting = Setting(model, batch, phase, arch, ours, frozen)
            found += [(ours, frozen, sentence) for sentence in violations(setting, *parts(setting))]
    assert found == []


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_224",
        *(pytest.param(f"vit_{size}_patch16_224", marks=pytest.mark.full) for size in ("base", "large")),
        pytest.param("vit_small_patch14_dinov2", marks=pytest.mark.full),
    ],
)
def test_autocast_takes_three_quarters_of_eager(name):
    """Oracle: eager PyTorch under autocast, which casts weights and residual in passes of their own."""
    found = figures(Setting(f"timm:{name}", 64, "autocast", "sm_90"))
    assert found["launches"] <= 0.75 * found["eager_launches"]
    assert found["bytes"] <= 0.75 * found["eager_bytes"]


@pytest.mark.full
def test_what_a_block_saves():
    """Oracle: by hand, in values per token without statistics: eager PyTorch 16 C, ours 10 C."""
    found = saved.row("ViT-S/16")
    unit = saved.IMAGES * 197 * 384 * 2
    assert found["eager"] / unit == pytest.approx(16, rel=0.01) and found["ours"] / unit == pytest.approx(10, rel=0.01)
    assert found["compile"] > found["eager"]


@pytest.mark.parametrize("way", ["fused", "mixed"])
def test_a_saved_hidden_layer_is_not_written_again(way):
    """Oracle: by hand: M·F values more are saved, and as many less are written, in as many launches."""
    counts, kept, images = [], [], torch.empty(4, 3, 224, 224, dtype=torch.bfloat16)
    for save in ("least", "hidden"):
        model = timm.create_model("vit_small_patch16_224", depth=1).bfloat16()
        optimize(model, save=save)
        with forcing(way), launch.targeting("sm_90"):
            kept.append(saved.saved_by_autograd(model, images, "sm_90"))
            counts.append(traced(model, None, True, (images,), {}).count)
        model.blocks[0].mlp.fc2.requires_grad_(False)
        with forcing(way):
            kept.append(saved.saved_by_autograd(model, images, "sm_90"))
    nbytes = 4 * 197 * 4 * 384 * 2
    assert counts[0].launches == counts[1].launches
    assert counts[0].nbytes - counts[1].nbytes == kept[2] - kept[0] == nbytes
    assert kept[1] == kept[3]  # for a weight that does not learn it is of no use
    with pytest.raises(ValueError, match="save is 'all'; give 'least' or 'hidden'"):
        optimize(model, save="all")
