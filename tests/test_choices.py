"""Tests of choices: which way a block runs, and that every way computes the same function."""

import copy
import functools
import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import timm
import torch
from agreement import normal
from interpreter import interpreting
from patience import HANG, run_in_threads
from recording import Recorder
from sampling import marked, sampled
from torch.utils._pytree import tree_leaves

from benchmarks import choices
from benchmarks.launch_recorder import recording
from fastvit_triton import create_model, layers, optimize, revert
from fastvit_triton.convert.backend import compiling
from fastvit_triton.convert.conversion import attach
from fastvit_triton.engine import ways
from fastvit_triton.engine.replay import record
from fastvit_triton.engine.replay.recorder import ReplayRefusal
from fastvit_triton.engine.values import given
from fastvit_triton.expected import blocks, ops
from fastvit_triton.expected.count import assumed, traced
from fastvit_triton.expected.cuda_operators import as_on_cuda
from fastvit_triton.expected.gpus import Gpu, gpu_by_name, gpus, table
from fastvit_triton.expected.trace import tracing
from fastvit_triton.kernels import (
    choose,
    depthwise,
    launch,
    layer_norm,
    linear,
    mixed,
    mlp,
    patch_embed,
    predicted,
    settings,
)
from fastvit_triton.kernels.activation import GATED, NAMES, apply_activation
from fastvit_triton.kernels.argument import Lent, NextNorm, Norm, Reader
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.launch import targeting
from fastvit_triton.kernels.settings import forcing
from fastvit_triton.kernels.sizes import WAYS, Branch
from fastvit_triton.measure.compare import outcome, verdict

SIZES = {"Ti": (192, 3), "S": (384, 6), "B": (768, 12), "L": (1024, 16)}
BLOCKS = {
    "plain": {},
    "scaled": dict(init_values=0.5, drop_path=0.5),
    "gated": dict(act="swiglu"),
    "quick": dict(act="quick_gelu"),
    "normed": dict(qk_norm=1e-6),
}


@pytest.fixture
def unmeasured(monkeypatch):
    """No way was measured on any architecture, so that predicted rows decide."""
    monkeypatch.setattr(choose, "measured_ways", functools.cache(lambda architecture: {}))


@pytest.fixture(autouse=True)
def fresh():
    """Clears the cached choices before and after a test."""
    choose.forget()
    ways._ways.clear()
    yield
    choose.forget()
    ways._ways.clear()


def vit(size: str, batch: int, tokens: int = 197) -> tuple[Branch, Branch]:
    C, H = SIZES[size]
    return Branch("attention", batch, tokens, C, 3 * C, C, H), Branch("mlp", batch, tokens, C, 4 * C, 4 * C)


def gpu_of(architecture: str) -> Gpu:
    """The GPU that stands for an architecture."""
    return gpus()[predicted._gpu_on(architecture, False, None)]


def chosen(architecture: str, size: str, batch: int, training: bool = False) -> str:
    x = torch.empty(1, dtype=torch.bfloat16)
    with targeting(architecture), torch.set_grad_enabled(training):
        return choose.way_of(x, vit(size, batch), training, True)


def block(dim: int = 32, act: str = "gelu", qk_norm: float | None = None, **options: object) -> layers.Block:
    torch.manual_seed(0)
    attention = layers.Attention(dim, 2, qk_norm=qk_norm)
    made = layers.Block(dim, attention, layers.Mlp(dim, 4 * dim, act), **options)
    attach(made)
    return made


def sequence(*blocks: layers.Block) -> layers.Blocks:
    """These blocks, each of which passes statistics on to the next."""
    made = layers.Blocks(*blocks)
    attach(made)
    return made


def tiny(converted: bool = False, depth: int = 1, width: int = 64) -> torch.nn.Module:
    """A small ViT of ours, or of timm after `optimize`."""
    make = pytest.importorskip("timm").create_model if converted else create_model
    net = make("vit_tiny_patch16_224", img_size=32, embed_dim=width, num_heads=2, depth=depth, num_classes=3).eval()
    if converted:
        optimize(net)
    return net


@pytest.mark.fast
@pytest.mark.parametrize("size", SIZES)
def test_the_first_table_of_rates(size):
    """Oracle: by hand, from the published rates, for inference with 64 images and more.

    The mixed way leaves GELU to BLAS on sm_90, where our matmuls are slow; on sm_89 these are nearly as fast as BLAS,
    and on sm_80 what they lose is about what the passes of the mixed way cost.
    """
    mixed_on = {
        "sm_89": [],
        "sm_80": [("Ti", 64), ("B", 64), ("B", 256)],
        "sm_90": [*itertools.product(SIZES, (64, 256))],
    }
    for architecture, batch in itertools.product(mixed_on, (64, 256)):
        want = "mixed" if (size, batch) in mixed_on[architecture] else "fused"
        gpu, sizes = gpu_of(architecture), vit(size, batch)
        times = {way: blocks.block_us(gpu, sizes, way, False, True, 1) for way in WAYS}
        assert min(times, key=times.get) == want, (architecture, batch, times)


@pytest.mark.fast
def test_expected_time_of_launches():
    """Oracle: by hand. A product is bound by flops or bytes, a pass by bytes; the minimum is 2.5 or 5 µs."""
    gpu = gpus()["h200"]._replace(product_tflops=100.0, copy_gbs=1000.0, units=100, fused_product=(0.5, 1.0, 1.0))
    copy = blocks.Launch("pass", 0.0, 85e6)
    assert blocks.launch_us(gpu, copy) == pytest.approx(100)
    assert blocks.launch_us(gpu, copy._replace(nbytes=1.0)) == blocks.LEAST_US
    M, N, K = 128 * 100, 256, 2000  # one wave of the largest tile
    product = blocks.Launch("product", 2.0 * M * N * K, 1.0, (M, N, K))
    want = 2.0 * M * N * K / (100e6 * 0.94)
    assert blocks.launch_us(gpu, product) == pytest.approx(want)
    assert blocks.launch_us(gpu, product._replace(size=(1, 1, 1))) == blocks.LEAST_PRODUCT_US
    assert blocks.launch_us(gpu, product._replace(kind="fused product")) == pytest.approx(2 * want)
    assert blocks.launch_us(gpu, product._replace(kind="fused product"), 1) == pytest.approx(want)


def test_tiles_run_in_whole_waves():
    """Oracle: by hand, for 100 multiprocessors and the best tile: a part of a wave takes as long as a full one.

    One row more than a wave of the largest tiles takes 5 waves of tiles of 64 x 128, which have work for 4.02; one tile
    of 64 x 64 is fastest as one of 128 x 256, at full rate, and a product of that size as eight of 64 x 64.
    """
    gpu = gpus()["h200"]._replace(product_tflops=100.0, copy_gbs=1000.0, units=100)
    assert blocks.TILES == {(128, 256): 1.0, (128, 128): 0.93, (64, 128): 0.82, (64, 64): 0.65}
    for M, N, slower in ((128 * 100 + 1, 256, 5 / 4.02 / 0.82), (64, 64, 100), (128, 256, 100 / 8 / 0.65)):
        product = blocks.Launch("product", 2.0 * M * N * 2000, 1.0, (M, N, 2000))
        assert blocks.launch_us(gpu, product) == pytest.approx(slower * 2.0 * M * N * 2000 / (100e6 * 0.94))


def test_pytorch_stores_a_decomposed_bias():
    """Oracle: by hand, one value for each score, written once and read once; our kernel adds the parts of the bias."""
    gpu, (attn, mlp) = gpus()["h200"], vit("B", 8, 196)
    for way, passes in (("plain", 2), ("fused", 0)):
        bare, biased = (
            sum(one.nbytes for one in blocks.launches(gpu, (one, mlp), way, False, False))
            for one in (attn, attn._replace(decomposed=1))
        )
        assert biased - bare == 2 * passes * 8 * attn.heads * 196 * 196, way
    launches = blocks.launches(gpu, (attn._replace(decomposed=1),), "mixed", True, False)
    assert {one.kind for one in launches if one.flops} == {"product", "fused attention"}


@pytest.mark.fast
def test_norms_fold_only_into_many_rows():
    """Oracle: `fold.pays`. Rows that are fewer than outputs are normalised in a launch of their own, if not frozen."""
    attn, _ = vit("B", 16)
    few = attn._replace(images=1)
    assert few.tokens < few.width <= attn.images * attn.tokens
    for branch, frozen, values in (
        (attn, False, [2 * attn.width * attn.channels, 16 * 197 * 768]),  # the fold, and statistics of rows
        (attn, True, [16 * 197 * 768]),
        (few, False, [2 * 197 * 768]),  # the norm
        (few, True, [197 * 768]),
    ):
        every = blocks.forward(gpus()["h200"], branch, "fused", True, False, False, frozen)
        assert [one.nbytes // 2 for one in every if one.kind == "pass"] == values


@pytest.mark.fast
def test_the_norm_and_the_stem_of_pytorch_are_slow():
    """Oracle: by hand, from the limits measured on an H200; a convolution of patches has a rate of its own."""
    gpu, rates = gpus()["h200"], table()["blocks"]
    (ours, theirs) = ops.OPS["layer_norm"](2, False, 50432, 768)
    assert blocks.launch_us(gpu, theirs[0]) == 4 * 50432 * 768 / rates["norm_gbs"]["forward"] / 1e3
    assert blocks.launch_us(gpu, ours[0]) == 4 * 50432 * 768 / (gpu.copy_gbs * blocks.PASS) / 1e3
    _, (stem, bias) = ops.OPS["patch_embed"](2, False, 50176, 768, 768, False, False)
    rate = gpu.product_tflops * rates["patch_convolution"]["value"] * 1e6
    assert blocks.launch_us(gpu, stem) == pytest.approx(2 * 50176 * 768 * 768 / rate)
    assert blocks.launch_us(gpu, bias) == blocks.launch_us(gpu, ours[0]) * 50176 / 50432


@pytest.mark.fast
def test_rates_say_where_they_come_from():
    """Oracle: every GPU has a source; the pessimistic ratio is the smallest."""
    for name, gpu in gpus().items():
        assert gpu.source and gpu.sheet.source and gpu.fused_product == tuple(sorted(gpu.fused_product)), name


@pytest.mark.fast
def test_each_gpu_has_a_table(monkeypatch):
    """Oracle: the GPUs with rates; by name among those of one architecture, else its first one, else the H200."""
    listed = json.loads((launch.TUNED / "choices" / "gpus.json").read_text())
    assert listed == {key: dict(name=gpu.name, architecture=gpu.architecture) for key, gpu in gpus().items()}
    assert {path.stem for path in (launch.TUNED / "choices").glob("*.json")} == {*listed, "gpus"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L40S")
    assert predicted._gpu_on("sm_89", True, 0) == "l40s" and predicted._gpu_on("sm_89", False, None) == "rtx4090"
    assert predicted._gpu_on("sm_75", False, None) == "h200"


TABLE = {
    "attention + mlp; inference; 16-bit; replayed": {"192-384": "fused", "768": "plain 100 mixed 400 fused"},
    "attention; inference; 16-bit; replayed": "mixed",
    "mlp; inference; 16-bit; replayed": "fused",
    "layer_norm; inference; 16-bit": "fused",
}


@pytest.fixture
def small_table(monkeypatch):
    """A table of a few rows for every GPU."""
    rows = {
        n: row if isinstance(row, str) else {predicted._span(k): steps for k, steps in row.items()}
        for n, row in TABLE.items()
    }
    monkeypatch.setattr(predicted, "_table", functools.cache(lambda gpu: rows))
    return rows


@pytest.mark.parametrize(
    "width, rows, way, said",
    [
        (768, 100, "plain", "width 768"),
        (768, 101, "mixed", "width 768"),
        (768, 401, "fused", "width 768"),
        (200, 1, "fused", "width 192 to 384"),
        (96, 1, "fused", "width 192 to 384 (no row for 96)"),
        (0, 0, "fused", "width 192 to 384 (no row for 0)"),  # of an attention without keys
        (540, 1, "fused", "width 192 to 384 (no row for 540)"),  # 540 / 384 < 768 / 540
        (550, 1, "plain", "width 768 (no row for 550)"),
        (1408, 200, "mixed", "width 768 (no row for 1408)"),
    ],
)
def test_a_row_is_the_nearest_width_and_the_range_of_rows(small_table, width, rows, way, said):
    """Oracle: by hand, from the table above; widths are compared by their ratio."""
    name = "attention + mlp; inference; 16-bit; replayed"
    assert predicted.row_of("h200", name, width, rows) == (way, f"predicted: {name}, {said}")


def test_a_block_without_a_row_runs_as_its_branches_do(small_table):
    """Oracle: by hand: mixed if they differ, plain if one is plain or unknown, and plain without any row."""
    attention, mlp = vit("B", 1)
    window = mlp._replace(kind="depthwise_mlp")
    for block, way in (
        ((mlp, mlp), "fused"),
        ((attention, mlp, mlp), "mixed"),
        ((attention, window), "plain"),
        ((window,), "plain"),
    ):
        found, why = choose.predicted_way("h200", block, torch.bfloat16, False, "replayed")
        assert found == way and why.startswith("no predicted row: ")
    assert predicted.row_of("h200", "linear; inference; 16-bit", 768, 1) == (
        None,
        "no predicted row: linear; inference; 16-bit",
    )


def test_an_assumed_gpu_applies_inside_its_context_only(unmeasured):
    """Oracle: the table of that GPU; outside the context the choice is unchanged."""
    before, other = chosen("sm_89", "S", 256), chosen("sm_90", "S", 256)
    with settings.assuming("h200"):
        assert before == "fused" != chosen("sm_89", "S", 256) == other
    assert chosen("sm_89", "S", 256) == before


def test_choices_name_the_row_that_decides(unmeasured):
    """Oracle: by hand: the name of the row."""
    seen = []
    with settings.observing(seen.append):
        for batch in (256, 256):
            chosen("sm_90", "B", batch)
        with forcing("fused"):
            chosen("sm_90", "B", 1)
    large, again, forced = seen
    assert large == again and large.name == "attention + mlp" and large.branches == vit("B", 256)
    assert large.why.startswith("predicted: attention + mlp; inference; 16-bit; replayed, width ")
    assert forced.why == "asked for" and forced.way == "fused"
    row = table()["blocks"]["host_us"]
    assert blocks.host_us("fused", 1, True, False) == 410 * row["called"]["training"]["fused"] / 2
    assert blocks.host_us("fused", 2, False, True) == 150 * row["replayed"]["inference"]["fused"]


@pytest.mark.parametrize("gpu", gpus())
def test_committed_rows_are_those_of_the_model(gpu):
    """Oracle: times of a block of ViT-B and of a norm: at most 2 % above plain; others: `benchmarks.regenerate`."""
    points = [
        *choices.block_points(gpus()[gpu], vit("B", 1), choices.IMAGES[::4]),
        *choices.op_points(gpus()[gpu], "layer_norm", (197, 768), choices.IMAGES[::4]),
    ]
    for point in points:
        way, why = predicted.row_of(gpu, point.name, point.width, point.rows)
        assert way is not None and way not in point.refused, why
        assert point.us[way] <= 1.02 * point.us["plain"], why
    committed = json.loads((launch.TUNED / "choices" / f"{gpu}.json").read_text())
    assert committed["predicted_by"].endswith(choices.model()), "run `python -m benchmarks.choices`"


def test_what_may_be_slower_than_plain_loses_more():
    """Oracle: by hand: plain takes a ninth longer by expected rates, mixed a fifth longer by pessimistic ones."""
    expected, pessimistic = dict(plain=1.0, mixed=0.9, fused=0.5), dict(plain=1.0, mixed=1.2, fused=0.5)
    point = choices.Point("row", 64, 1, expected, pessimistic, frozenset({"fused"}), 1)
    want = dict(plain=1 / 9, mixed=0.2 * choices.SLOWER, fused=0.5 / 0.9 - 1 + choices.REFUSED)
    assert point.losses() == pytest.approx(want)
    gpu = gpus()["a100"]
    points = choices.block_points(gpu, vit("B", 1), [64])
    (point,) = (p for p in points if "inference; 16-bit; replayed" in p.name)
    assert point.most_us["fused"] > point.us["fused"] > 0 and point.most_us["plain"] == point.us["plain"]


def test_ranges_of_rows_lose_least():
    """Oracle: all divisions of the sorted sizes into at most three ranges, each with one way."""
    rng = random.Random(0)
    for _ in range(20):
        points = [
            choices.Point("row", 64, rows, *({way: 1 + rng.random() for way in WAYS} for _ in range(2)), frozenset(), 1)
            for rows in rng.sample(range(1, 50), 6)
        ]
        points.sort(key=lambda point: point.rows)
        losses = [point.losses() for point in points]

        def loss(ways, losses=losses):
            return sum(one[way] for one, way in zip(losses, ways, strict=True))

        every = (
            ways for ways in itertools.product(WAYS, repeat=6) if len([*itertools.groupby(ways)]) <= choices.RANGES
        )
        least = min(map(loss, every))
        *steps, last = choices.steps(points).split()
        limits = dict(zip(map(int, steps[1::2]), steps[::2], strict=True))
        got = [next((way for most, way in limits.items() if point.rows <= most), last) for point in points]
        assert loss(got) <= least + (len(limits) + 1) * choices.GAIN


@pytest.mark.full  # by default test_house.py sees the same where Triton is missing
def test_running_a_model_does_not_import_the_model_of_times():
    """Oracle: the modules of a new process in which a model was converted and called."""
    code = (
        "import sys, torch, fastvit_triton\n"
        "net = fastvit_triton.create_model('vit_digits_patch2_8').eval()\n"
        "fastvit_triton.optimize(net)\n"
        "net(torch.zeros(1, 1, 8, 8))\n"
        "print([name for name in sys.modules if name.startswith('fastvit_triton.expected')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    assert done.stdout.strip() == "[]"


def test_saved_values_and_compiled_time():
    """Oracle: the equations of a block in units of C; PyTorch's attention for ours, and passes for the sum in place and
    the activation.
    """
    C, block = 768, vit("B", 64)
    assert [sum(blocks.saved_values(b, way) for b in block) / C for way in WAYS] == [16, 10, 10]
    wide = [b._replace(wide=1) for b in block]  # x is float32, twice a value; LN(x) is saved in 16 bits if fused
    assert [sum(blocks.saved_values(b, way) for b in wide) / C for way in WAYS] == [18, 12, 14]
    gpu = gpus()["h200"]._replace(fused_attention_tflops=(1e6, 1e6))
    for training in (False, True):
        slow = gpu._replace(fused_attention_tflops=(1e-6, 1e-6))
        apart = 0.0 if training else (3 + 8) * 64 * 197 * C * 2 / (gpu.copy_gbs * blocks.PASS) / 1e3
        want = blocks.block_us(slow, block, "mixed", training, False) + apart
        assert blocks.compiled_us(gpu, block, training) == pytest.approx(want)
        assert blocks.compiled_us(gpu, block, training) > blocks.block_us(gpu, block, "mixed", training, False)


@pytest.mark.fast
def test_order_of_the_choice(monkeypatch, tmp_path):
    """Oracle: the precedence: a context, the switch, a measured row, a predicted row."""
    expected = chosen("sm_90", "L", 256)
    assert expected == "mixed"
    name = choose.block_names(vit("L", 256), "inference")[1]
    (tmp_path / "sm_90.json").write_text(json.dumps({"ways": {"measured": {name: "plain"}}}))
    shutil.copytree(launch.TUNED / "choices", tmp_path / "choices")
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    choose.forget()
    assert chosen("sm_90", "L", 256) == "plain" and chosen("sm_90", "L", 256, True) == "mixed"
    with using_backend("triton"):
        assert chosen("sm_90", "L", 256) == "fused"
        with forcing("mixed"):
            assert chosen("sm_90", "L", 256) == "mixed"
    with pytest.raises(ValueError, match="'fast'"), forcing("fast"):
        pass


@pytest.mark.fast
def test_products_in_ieee_float32_are_left_to_pytorch():
    """Oracle: torch.set_float32_matmul_precision."""
    x = torch.empty(1)
    with targeting("sm_89"):
        assert choose.way_of(x, vit("S", 256), False, True) != "fused"
        torch.set_float32_matmul_precision("high")
        try:
            assert choose.way_of(x, vit("S", 256), False, True) == "fused"
        finally:
            torch.set_float32_matmul_precision("highest")


def of_autocast(x: torch.Tensor, sizes: tuple[Branch, ...], dtype: torch.dtype | None) -> choose.Choice:
    """The choice for a block of these sizes on an RTX 4090."""
    seen = []
    autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    with torch.no_grad(), targeting("sm_89"), autocast, settings.observing(seen.append):
        choose.way_of(x, sizes, False, True)
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_have_the_dtype_of_autocast(dtype):
    """Oracle: the dtypes of PyTorch under autocast: products are in its dtype, a float32 residual stays float32."""
    wide, half, block = torch.empty(1), torch.empty(1, dtype=dtype), vit("S", 256)
    rows = [of_autocast(x, block, of).why.split("; ")[2] for x, of in ((wide, None), (wide, dtype), (half, None))]
    assert rows == ["IEEE float32", "autocast", "16-bit"]
    choice, alone = of_autocast(wide, block, dtype), of_autocast(half, block, dtype)
    assert choice.branches == tuple(b._replace(wide=1) for b in block)
    assert alone == of_autocast(half, block, None) and alone.way == "fused" and alone.shapes != choice.shapes
    assert of_autocast(wide, vit("Ti", 256), dtype).way == "fused"


@torch.no_grad()
@pytest.mark.parametrize("op", ["linear", "mlp", "attention", "window_attention", "patch_embed", "layer_norm"])
def test_ops_have_the_dtype_of_autocast(op):
    """Oracle: the choice for 16-bit operands, and for float32 norms, which autocast does not cast, that of float32."""
    sizes = {
        "linear": (12608, 384, 1152, 0, 0, 0, 1, 0, 0), "mlp": (12608, 192, 768, 768, 0, 0, 1, 1, 0, 0),
        "attention": (64, 6, 197, 197, 64, True), "window_attention": (25088, 384, 49, True, False),
        "patch_embed": (12544, 768, 384, True, True), "layer_norm": (12608, 384),
    }[op]  # fmt: skip
    x, seen = torch.empty(1), []
    with targeting("sm_89"), settings.observing(seen.append):
        choose.prefers_kernel(x if op == "layer_norm" else x.bfloat16(), op, *sizes)
        with torch.autocast("cpu", torch.bfloat16):
            choose.prefers_kernel(x, op, *sizes)
    assert seen[0] == seen[1] and (" fp32" in seen[0].shapes[0]) == (op == "layer_norm")


@pytest.mark.parametrize("op, sizes", [("layer_norm", (12608, 384)), ("add_layer_norm", (12608, 384, False, False))])
def test_norms_of_traced_inference_are_left_to_the_compiler(op, sizes):
    """Oracle: Inductor fuses them with their neighbours; in training, and if kernels are asked for, ours run."""
    x = torch.empty(1, dtype=torch.bfloat16)

    def chosen(traced, training):
        with compiling() if traced else nullcontext(), torch.set_grad_enabled(training):
            return choose.prefers_kernel(x, op, *sizes)

    with targeting("sm_90"):
        assert chosen(False, False) and not chosen(True, False) and chosen(True, True) == chosen(False, True)
        with settings.forcing("fused"):
            assert chosen(True, False)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "autocast, options",
    [(True, {}), (False, {}), (False, dict(init_values=1.0)), (False, dict(mlp_layer=timm.layers.SwiGLUPacked))],
    ids=["autocast", "16-bit", "LayerScale", "gated"],
)
def test_bytes_of_a_block(autocast, options, way, training):
    """Oracle: bytes counted from the operators of the second of two blocks; under autocast less the casts of weights.

    Those of the gradient of a residual and small sums are not counted apart.
    """
    net = timm.create_model("vit_small_patch16_224", depth=2, **options)
    dtype = torch.float32 if autocast else torch.bfloat16
    optimize(net.to(dtype))  # ours hand the next norm on to the next block
    images, totals = torch.empty(8, 3, 224, 224, dtype=dtype, device="meta"), []
    gpu, seen = gpu_of("sm_90"), []
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    for _ in range(2):
        with context, forcing(way), settings.observing(seen.append):
            totals.append(traced(net, gpu, training, (images,), {}).count.nbytes)
        del net.blocks[1:]
    sizes = next(choice.branches for choice in seen if choice.branches)
    assert [b.wide for b in sizes] == [int(autocast)] * 2
    casts = (4 + 2) * sum(p.numel() for layer in net.blocks.modules() if type(layer) is torch.nn.Linear
                          for p in layer.parameters()) * (2 if training else 1)  # fmt: skip
    want = sum(one.nbytes for one in blocks.launches(gpu, sizes, way, training, False))
    statistics = 0.005 * (way == "fused" and not autocast)  # of rows; folds are of 16-bit streams only
    tolerance = (0.06 if autocast else 0.02) if training else 0.005 + statistics
    assert totals[0] - totals[1] - casts * autocast == pytest.approx(want, rel=tolerance)


ENDS = list(itertools.product((None, "gelu", "swiglu"), (False, True), (False, True), (False, True)))


def calls_of(op, training):
    """Calls of an op for M = 4096 rows (patches: 16,384) of 768 channels, without memory; in training all learn."""
    M, K, flags = 4096, 768, (False, True)
    new = lambda *shape: given(torch.empty(shape, dtype=torch.bfloat16, device="meta"))  # noqa: E731
    learned = lambda *shape: new(*shape).requires_grad_(training)  # noqa: E731
    if op == "patch_embed":
        for prefix, pos in itertools.product(flags, flags):
            ends = learned(1, 64 + prefix, K) if pos else None, learned(1, 1, K) if prefix else None
            yield partial(patch_embed.patch_embed, new(256, 3, 128, 128), learned(K, 3, 16, 16), learned(K), *ends)
    elif op == "layer_norm":
        yield partial(layer_norm.layer_norm, learned(2, M // 2, K), learned(K), learned(K), 1e-6)
    elif op == "add_layer_norm":
        for scales in itertools.product(flags, flags):
            ends = [scale if given else None for given, scale in zip(scales, (learned(K), new(2)), strict=True)]
            norm = learned(K), learned(K), 1e-6
            yield partial(layer_norm.add_layer_norm, learned(2, M // 2, K), learned(2, M // 2, K), *norm, *ends)
    else:
        for activation, norm, scales, residual in ENDS[8:] if op == "mlp" else ENDS:
            x, F_ = learned(2, M // 2, K), K // 2 if activation == "swiglu" else K
            named = dict(norm=(learned(K), learned(K), 1e-6) if norm else None, activation=activation)
            out = F_ if op == "linear" else K
            named |= dict(layer_scale=learned(out), sample_scale=new(2)) if scales else {}
            named |= dict(residual=new(2, M // 2, out)) if residual else {}
            layer = learned(K, K), learned(K)
            if op == "linear":
                yield partial(linear.linear, x, *layer, **named)
            else:
                yield partial(mlp.mlp, x, layer, (learned(K, F_), learned(K)), **named)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("op", ["linear", "mlp", "layer_norm", "add_layer_norm", "patch_embed"])
def test_an_op_is_counted_as_it_runs(op, training, monkeypatch):
    """Oracle: launches of the call, all of them, and its bytes up to 2 % (biases, partial sums), in both ways."""
    asked = []
    prefers = choose.prefers_kernel
    monkeypatch.setattr(
        choose, "prefers_kernel", lambda x, name, *sizes: asked.append(sizes) or prefers(x, name, *sizes)
    )
    calls = ((i, way, call) for i, way in enumerate(("fused", "plain")) for call in calls_of(op, training))
    for i, way, call in calls:
        grads = torch.set_grad_enabled(training)
        with using_backend("auto"), assumed(gpus()["h200"]), forcing(way), as_on_cuda(), grads, tracing() as seen:
            y = call()
            if training:
                outputs = y if isinstance(y, tuple) else (y,)
                learned = [t for t in tree_leaves((call.args, call.keywords)) if getattr(t, "requires_grad", False)]
                torch.autograd.grad(outputs, learned, [torch.empty_like(t) for t in outputs])
        counted = ops.OPS[op](2, training, *asked[-1])[i]
        assert (len(counted), sum(one.nbytes for one in counted)) == (
            seen.count.launches,
            pytest.approx(seen.count.nbytes, rel=0.02),
        ), (call.keywords, asked[-1], way)


@pytest.mark.parametrize("kernels", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("op", ["linear", "mlp"])
def test_statistics_are_made_only_for_a_reader_that_uses_them(op, kernels, monkeypatch):
    """Oracle: by hand: both calls run by the kernels, with enough rows to fold the norm; else None, in each way."""
    makes, reads = kernels
    monkeypatch.setattr(choose, "prefers_kernel", lambda x, name, *sizes: makes if name == op else reads)
    other = "mlp" if op == "linear" else "linear"
    for rows, wide in ((4096, False), (16, False), (4096, True)):
        x = given(torch.empty(2, rows // 2, 64, dtype=torch.bfloat16, device="meta"))
        residual = x.float() if wide else x
        weight, bias = x.new_empty(64, 64), x.new_empty(64)
        reader = Reader(other, linear.plan_sizes(x, x.new_empty(256, 64), (None, None, 1e-6), "gelu", None, None, x))
        layers = (weight, bias) if op == "linear" else ((weight, bias), (weight, bias))
        call = linear.linear if op == "linear" else mlp.mlp
        with torch.no_grad(), using_backend("auto"), assumed(gpus()["h200"]), tracing():
            y, stats = call(x, *layers, residual=residual, return_stats=reader)
        assert y.dtype == residual.dtype and (stats is not None) == (makes and reads and rows > 256 and not wide)
    x, layer = torch.randn(3, 64), (torch.randn(64, 64), None)
    call = partial(call, x, *layer if op == "linear" else (layer, layer))
    with using_backend("torch"):
        assert call(return_stats=reader)[1] is None
        assert torch.equal(call(return_stats=True)[1], layer_norm.row_stats(call()))
        with pytest.raises(TypeError, match="return_stats must be True, False or a Reader, got str"):
            call(return_stats="x")


def test_activations_count_in_the_choice_of_a_product(unmeasured):
    """Oracle: a product of every GPU and size with norm and GELU; PyTorch's pass for GELU decides 44 % of them."""
    x, sizes = (
        torch.empty(1, dtype=torch.bfloat16),
        itertools.product((1, 8, 64, 256), (50, 197, 1025), (192, 384, 768, 1024)),
    )
    chosen = Counter()
    for images, tokens, width in sizes:
        for gpu in gpus().values():
            with assumed(gpu), torch.no_grad():
                for passes in (0, 1):
                    ends = passes, False, False, False
                    chosen[passes] += choose.prefers_kernel(
                        x, "linear", images * tokens, width, 4 * width, True, True, *ends
                    )
    assert chosen[0] == 0 < 200 < chosen[1]


@torch.no_grad()
def test_weights_stored_for_depthwise_are_not_copied(monkeypatch):
    """Oracle: the layout of the weight; the copy is a launch of the op's row."""
    x, stored = torch.empty(1, 56, 56, 64, dtype=torch.bfloat16), torch.empty(9, 64, dtype=torch.bfloat16)
    stored = stored.t().unflatten(1, (3, 3)).unsqueeze(1)
    rows = []
    monkeypatch.setattr(choose, "row_of", lambda gpu, *row: rows.append(row) or ("fused", ""))
    with targeting("sm_90"):
        for weight in (stored, stored.contiguous()):
            assert depthwise._kernel_is_chosen(x, weight, x[0, 0, 0], 1, None, False)
    assert rows == [(f"depthwise, bias{copy}; inference; 16-bit", 64, 3136) for copy in ("", ", copied weight")]


@pytest.mark.fast
def test_small_batches_are_bound_by_the_host(unmeasured):
    """Oracle: the way with the least host time, if the GPU needs less time than the host."""
    x, block = torch.empty(1, dtype=torch.bfloat16), vit("B", 1)
    with targeting("sm_90"):
        for replayed, row in ((True, "replayed"), (False, "called")):
            ratios = table()["blocks"]["host_us"][row]["inference"]
            assert choose.way_of(x, block, False, replayed) == min(ratios, key=ratios.get)


CASES = [(way, name, autocast) for autocast in (False, True) for name in BLOCKS for way in ("mixed", "fused")]
CASES = marked([c for c in CASES if c[1] == "plain"], pytest.mark.fast, lambda *_: True) + sampled(
    [c for c in CASES if c[1] != "plain"], 3
)


@pytest.mark.few(3)
@pytest.mark.parametrize("way, name, autocast", CASES)
def test_every_way_equals_the_modules(way, name, autocast, always_folded):
    """Oracle: the modules in float64, output and every gradient; the first of two blocks computes the second's norm."""
    nets = sequence(block(**BLOCKS[name]), block(**BLOCKS[name])) if hasattr(layers, "Blocks") else None
    x = torch.randn(4, 7, 32, requires_grad=True)
    dtype = torch.float16 if autocast else torch.float32

    def found(net, x, context):
        torch.manual_seed(3)
        with context:
            return outcome(net, dict(x=x), dict(net.named_parameters()) | dict(x=x))

    half = lambda: torch.autocast("cpu", dtype) if autocast else nullcontext()  # noqa: E731
    nets.train()
    truth = found(
        sequence(block(**BLOCKS[name]), block(**BLOCKS[name])).double(),
        x.detach().double().requires_grad_(),
        nullcontext(),
    )
    baseline = found(nets, x, half())
    with interpreting(), forcing(way):
        got = found(nets, x, half())
    said = verdict(got, truth, baseline, dtype, deep=True)
    assert said.match, said
    assert all(got[n].dtype == baseline[n].dtype for n in baseline)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("way", ["mixed", "fused"])
def test_every_way_equals_the_modules_in_inference(way, converted, always_folded):
    """Oracle: the modules in float64. A mixed block's last product adds to its residual in place; x is not modified."""
    net = normal(tiny(converted, depth=3), 0.1)
    wide = copy.deepcopy(net).double()
    revert(wide)
    x = torch.randn(2, 5, 64)
    before = x.clone()
    with torch.no_grad():
        truth, baseline = dict(output=wide.blocks(x.double())), dict(output=net.blocks(x))
        with interpreting(), forcing(way):
            got = dict(output=net.blocks(x))
    assert verdict(got, truth, baseline, torch.float32).match
    assert torch.equal(x, before)


class Halved(torch.nn.Module):
    """An attention that no reader knows."""

    def forward(self, x):
        return 0.5 * x


def all_of(net: torch.nn.Module, image: torch.Tensor) -> dict[int, torch.Tensor]:
    """The features and the output of each block."""
    features, outputs = net.forward_intermediates(image)
    return dict(enumerate((features, *outputs)))


def noted(monkeypatch: pytest.MonkeyPatch) -> list:
    """Calls of `normalize_lent` from now on, when blocks lend float32 streams, too."""
    calls, real = [], mixed.normalize_lent
    monkeypatch.setattr(mixed, "normalize_lent", lambda *given: calls.append(given) or real(*given))
    monkeypatch.setattr(mixed, "LENDS", (torch.float32,))
    return calls


def without_bias(layer: torch.nn.Linear) -> None:
    layer.bias = None


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "change, calls",
    [
        (lambda blocks: None, 6),
        (lambda blocks: blocks[2].register_forward_hook(lambda *_: None), 2),
        (lambda blocks: blocks[2].norm2.register_forward_hook(lambda *_: None), 2),
        (lambda blocks: blocks[2].attn.proj.register_forward_hook(lambda *_: None), 2),
        (lambda blocks: setattr(blocks[2], "ls1", layers.LayerScale(32, 0.5)), 4),
        (lambda blocks: setattr(blocks[2], "ls2", layers.LayerScale(32, 0.5)), 2),
        (lambda blocks: setattr(blocks[2], "attn", Halved()), 2),
        (lambda blocks: without_bias(blocks[1].mlp.fc2), 2),
        (lambda blocks: without_bias(blocks[1].attn.proj), 6),
        (lambda blocks: without_bias(blocks[3].attn.qkv), 6),
        (lambda blocks: setattr(blocks[1].attn, "proj_drop", torch.nn.Dropout(0.5)), 6),
    ],
    ids="none hook norm_hook proj_hook layer_scale1 layer_scale2 unknown fc2_bias proj_bias qkv_bias dropout".split(),
)
def test_blocks_overwrite_what_only_they_read(change, calls, monkeypatch):
    """Oracle: the modules in float64; calls by hand, two for each block that takes a stream; three calls in turn."""
    net = normal(tiny(depth=4, width=32), 0.1)
    change(net.blocks)
    wide, found = copy.deepcopy(net.eval()).double(), noted(monkeypatch)
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        truth, baseline = (all_of(*given) for given in ((wide, image.double()), (net, image)))
        with interpreting(), forcing("mixed"):
            got = all_of(net, image)
            assert not found  # each output is read
            for _ in range(3):
                got[0] = net.forward_features(image)
                assert verdict(got, truth, baseline, torch.float32).match
    assert len(found) == 2 * calls  # the third is replayed


def test_a_recording_that_fails_overwrites_nothing(monkeypatch):
    """Oracle: the first of three equal calls, which is not recorded."""

    def refuse(*_):
        raise ReplayRefusal("for this test")

    monkeypatch.setattr(record, "_made", refuse)
    calls = noted(monkeypatch)
    net, x = sequence(block(), block(), block()).eval(), torch.randn(2, 5, 32)
    with interpreting(), forcing("mixed"), torch.no_grad():
        first, *others = (net(x) for _ in range(3))
    assert calls and all(torch.equal(first, other) for other in others)


TRIPLES = itertools.product(("mixed", "fused", "plain"), repeat=3)


@pytest.mark.parametrize(
    "first, second, third", marked(TRIPLES, pytest.mark.full, lambda *ways: ways[:2] != ("mixed",) * 2)
)
def test_blocks_of_all_ways_follow_each_other(first, second, third, monkeypatch):
    """Oracle: the modules in float64, for three calls in turn; each block, known by its width, has its way."""
    widths = {32: first, 48: second, 64: third, 96: "mixed"}
    monkeypatch.setattr(choose, "way_of", lambda x, branches, *_: widths[branches[-1].width])
    torch.manual_seed(0)
    net = layers.Blocks(*(layers.Block(32, layers.Attention(32, 2), layers.Mlp(32, width)) for width in widths)).eval()
    normal(net, 0.2)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        truth, baseline = dict(y=copy.deepcopy(net).double()(x.double())), dict(y=net(x))
        attach(net)
        calls = noted(monkeypatch)
        with interpreting():
            for _ in range(3):
                assert verdict(dict(y=net(x)), truth, baseline, torch.float32).match
    assert bool(calls) == (third == "mixed" or first == second == "mixed")


def test_only_bfloat16_is_lent(monkeypatch):
    """Oracle: the rule, also for FASTVIT_TRITON_EXACT."""
    x = torch.zeros(2)
    assert mixed.may_lend(x.bfloat16()) and not mixed.may_lend(x.half()) and not mixed.may_lend(x)
    monkeypatch.setattr(settings, "exact", True)
    assert not mixed.may_lend(x.bfloat16())


@pytest.mark.parametrize("converted", [False, True])
def test_inference_leaves_what_parameters_need(converted):
    """Oracle: all parameters require gradients before and after a mixed call without gradients."""
    net = tiny(converted, width=32)
    with interpreting(), forcing("mixed"), torch.no_grad():
        net(torch.randn(2, 3, 32, 32))
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_subclass_may_override_outputs():
    """Oracle: its method runs, with the arguments of the method of `Blocks`."""

    class Own(layers.Blocks):
        def outputs(self, x, after=(), recompute=False):
            yield x + 1

    net, x = Own(block()), torch.randn(2, 5, 32)
    attach(net)
    with torch.no_grad():
        assert torch.equal(net(x), x + 1)


@pytest.mark.parametrize("way", ["pending", "lent", "summed", "no bias"])
def test_norm_of_a_stream(way):
    """Oracle: the equations in float64; budget: four roundings of the largest value. What is lent is not written."""
    x, pending, bias, late, weight, shift = (torch.randn(*size, 24) for size in ((2, 5), *[()] * 5))
    lent, norm = way in ("pending", "lent"), Norm(weight, shift, 1e-6)
    pending, bias = (None if way == "no bias" else t for t in (pending, bias))
    late = None if way == "pending" else late
    with interpreting():
        s, normed = layer_norm.normalize_lent(x, Lent(pending), bias, NextNorm(norm, late, lends=lent))
    full = x.double() + sum(t.double() for t in (pending, bias) if t is not None)
    want = torch.nn.functional.layer_norm(full, (24,), weight.double(), shift.double(), 1e-6)
    after = full if late is None else full + late
    got = Lent(normed.pending).complete(s)
    for one, exact in ((normed.y, want), (got, after)):
        assert (one - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (s is x) == lent and (normed.pending is not None) == lent


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", NAMES)
def test_activation_pass(activation, dtype):
    """Oracle: PyTorch in float64; budget: one rounding, and, times up, 8 fp32 roundings of 1 and the polynomial."""
    h = 3 * torch.randn(3, 5, 2 * 131).to(dtype)
    with interpreting():
        got = mixed._activated(h, activation)
    exact = apply_activation(h.double(), activation)
    largest = h.abs().max().item()
    inner = 8 * torch.finfo(torch.float32).eps + (3.4e-6 if dtype == torch.float16 else 0.0)  # see `_normal_cdf`
    assert got.dtype == dtype and got.shape == exact.shape
    budget = torch.finfo(dtype).eps * exact.abs() + inner * (largest if activation in GATED else 1.0)
    assert ((got - exact).abs() <= budget).all()


def launched(way: str, training: bool, depth: int = 3, **options: object) -> list[str]:
    """Our kernels in two of three blocks."""
    counts = []
    for some in (depth - 2, depth):
        torch.manual_seed(0)
        net = create_model("vit_tiny_patch16_224", img_size=32, embed_dim=64, num_heads=2, depth=some, **options)
        x = torch.randn(64, 5, 64).bfloat16().requires_grad_(training)
        with recording("sm_90") as found, torch.set_grad_enabled(training), forcing(way):
            y = net.bfloat16().train(training).blocks(x)
            if training:
                y.sum().backward()
        counts.append([one.name for one in found])
    return counts[1][: len(counts[1]) - len(counts[0])] if not training else [len(counts[1]) - len(counts[0])]


def test_a_mixed_block_launches_attention_and_two_passes():
    """Oracle: the plan: after each branch one pass, which also normalises for the next; attention by our kernel."""
    found = launched("mixed", False)
    assert sorted(found) == sorted(["attention._fwd_kernel", "layer_norm._fwd_kernel", "layer_norm._fwd_kernel"] * 2)
    assert not launched("plain", False)


@pytest.mark.fast
@pytest.mark.parametrize("converted", [False, True])
def test_a_plain_block_runs_only_pytorch(converted):
    """Oracle: the operators of the same modules without kernels; none of them is ours."""
    net = tiny(converted)
    x, seen = torch.randn(2, 5, 64), []
    for context in (nullcontext(), targeting("sm_90")):
        with torch.no_grad(), context, forcing("plain"):
            for _ in range(2):  # the first call computes the sizes, the second looks up the way
                with Recorder() as run:
                    net.blocks(x)
                seen.append(run.ops)
    assert all(names == seen[0] for names in seen[1:])
    assert not any("fastvit_triton" in name for name in seen[0])


@pytest.mark.full
@pytest.mark.parametrize("converted, way", sampled(itertools.product((False, True), ("plain", "mixed", "fused")), 2))
def test_compiled_graphs_follow_the_way(converted, way):
    """Oracle: the graph. Only a fused block is an opaque op; otherwise the compiler sees norm, GELU and addition."""
    net = tiny(converted)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def catch(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=keep)(graph, inputs)

    torch._dynamo.reset()
    with torch.no_grad(), targeting("sm_90"), forcing(way):
        with pytest.raises(RuntimeError, match="cannot run its Triton kernel") if way == "fused" else nullcontext():
            torch.compile(net.blocks, backend=catch, fullgraph=True)(torch.randn(2, 5, 64))
    names = " ".join(str(node.target) for graph in graphs for node in graph.graph.nodes)
    ours = "fastvit_triton" in names
    assert ours == (way == "fused")
    assert ("native_layer_norm" in names and "gelu" in names) == (way != "fused"), names


@pytest.mark.parametrize("inside", [False, True])
def test_a_trace_reads_autocast(inside):
    """Oracle: the choice outside a trace for its sizes; autocast is on where the graph is called, or inside of it."""
    autocast, block, seen = functools.partial(torch.autocast, "cpu", torch.bfloat16), vit("Ti", 1), []

    def call(x):
        with autocast() if inside else nullcontext():
            return x + len(choose.way_of(x, block, False, True))

    torch._dynamo.reset()
    l40s = targeting("sm_89"), settings.assuming("l40s")
    with l40s[0], l40s[1], nullcontext() if inside else autocast(), settings.observing(seen.append):
        y = torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(2))
    want = of_autocast(torch.empty(1), vit("Ti", *settings.TRACED), torch.bfloat16)
    assert {choice.way for choice in seen} == {want.way} == {"fused"} and y[0] == len("fused")
    assert seen[0].branches == want.branches


@pytest.mark.full
def test_a_dynamic_batch_is_one_graph():
    """Oracle: torch.compiler.set_stance; tracing specialises on no number of images or tokens."""
    net = tiny()
    torch._dynamo.reset()
    with torch.no_grad(), targeting("sm_90"):
        compiled = torch.compile(net.blocks, backend="eager", fullgraph=True, dynamic=True)
        compiled(torch.randn(3, 5, 64))
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in range(2, 12):
                compiled(torch.randn(batch, 5, 64))


@pytest.mark.fast
def test_plain_state_is_thread_local():
    """Oracle: two threads in overlapping plain blocks; neither sees the other's state nor leaves it set."""
    first, second, seen = threading.Event(), threading.Event(), []

    def outer():
        first.set()
        second.wait(HANG)

    def other():
        first.wait(HANG)
        seen.append(ways.state.inside_plain)
        ways.plainly(second.set)
        seen.append(ways.state.inside_plain)

    run_in_threads(partial(ways.plainly, outer), other)
    assert seen == [False, False] and not ways.state.inside_plain


def test_a_mixed_block_draws_and_keeps_no_more_than_it_needs(monkeypatch):
    """Oracle: the modules' random numbers; LN(x) is freed after the forward pass."""
    made, real = [], mixed.add_and_normalize

    def noted(*arguments):
        s, normed = real(*arguments)
        made.extend([] if normed is None else [weakref.ref(normed.y)])
        return s, normed

    monkeypatch.setattr(mixed, "add_and_normalize", noted)
    net, x = sequence(block(drop_path=0.5), block(drop_path=0.5)), torch.randn(2, 5, 32)
    with interpreting(), forcing("mixed"):
        y = net.eval()(x)
        assert y.requires_grad and made and not any(ref() is not None for ref in made)
    net.train()
    states = []
    for way in ("plain", "mixed"):
        torch.manual_seed(0)
        with interpreting(), forcing(way), torch.no_grad():
            net(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "name, key",
    [
        ("rtx4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("4090", "rtx4090"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("H100", "h100"), ("nvidia-h200", "h200"), ("300x", "mi300x"), ("AMD MI300X", "mi300x"), ("40S", "l40s"),
    ],
)  # fmt: skip
def test_gpus_are_found_by_what_ends_their_names(name: str, key: str):
    """Oracle: the table of rates."""
    assert gpu_by_name(name) is gpus()[key]


@pytest.mark.parametrize("name", ["", "0", "x", "rtx", "gtx 970", "40900", "nvidia"])
def test_unknown_gpus_are_refused(name: str):
    """Oracle: one sentence with the known names."""
    with pytest.raises(ValueError, match=f"^gpu is {name}; use one of h200, h100, .*mi300x$"):
        gpu_by_name(name)


def test_names_that_end_several_gpus_are_refused():
    """Oracle: the two names."""
    with pytest.raises(ValueError, match=r"^gpu is 200; use one of h200, b200$"):
        gpu_by_name("200")
