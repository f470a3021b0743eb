"""Tests of what reports, `freeze` and `doctor` say of a CPU: the rule of real calls, and given measurements."""

import pytest
import timm
import torch
from catalogue import COMMON, build
from test_convert import inputs, outputs
from torch import nn

from fastvit_triton import freeze, optimize
from fastvit_triton.cli.platforms import step_on_a_cpu
from fastvit_triton.convert import on_cpu
from fastvit_triton.convert.chosen import located
from fastvit_triton.engine import freeze as engine
from fastvit_triton.kernels import measured, onednn
from fastvit_triton.kernels.backend import using_backend
from fastvit_triton.kernels.settings import observing

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(onednn.why_not(CPU, torch.float32) is not None, reason="PyTorch has no oneDNN here")
UNSAID = {"timm_tnt", "timm_tnt_legacy", "timm_naflex", "hf_siglip2", "torch_multihead"}  # their sizes are not known


def row(inference, frozen, training):
    """Context of a CPU for which these are the fewest multiplications."""
    return onednn.using_row({"float32": dict(inference=inference, frozen=frozen, training=training)})


def tiny(depth=3, **options):
    """timm's ViT with blocks of 16 channels, and 5 tokens of 8 × 8 images."""
    sizes = dict(img_size=8, patch_size=4, embed_dim=16, num_heads=2, num_classes=3)
    return timm.create_model("vit_tiny_patch16_224", depth=depth, **sizes | options).eval()


PRODUCTS = 5 * 16 * 16 * (3 + 1 + 4 + 4) / 4  # multiplications of a block's mean product: qkv, proj, fc1 and fc2


@pytest.mark.few(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", [name for name in COMMON if name not in UNSAID])
def test_blocks_are_decided_as_in_a_call(name, frozen):
    """Oracle: the choices of a real call, under a rule that the median block just meets; also of a frozen model."""
    model, given = build(name, torch.float32).eval(), inputs(name, torch.float32)
    optimize(model)
    blocks = on_cpu.blocks_of(model, given, frozen)
    assert blocks is not None
    if frozen:
        engine.freeze(model)
    sizes = sorted(on_cpu.products([block]) for block in blocks)
    least = sizes[len(sizes) // 2] if sizes else 0.0
    calls = []
    with row(least, least, least), measured.using(measured.Measured(ways={})), using_backend("auto"), torch.no_grad():
        with located(model), observing(calls.append):
            outputs(model, given)
        decided = on_cpu.decided(blocks, torch.float32, False, "float32" if frozen else None)
    want = sorted((call.path, call.way, call.branches) for call in calls if call.branches)
    assert sorted((block.path, block.way, block.branches) for block in decided) == want


GPU = " On a GPU: Triton, where it is expected to be faster."
ALL, NEVER = PRODUCTS, PRODUCTS + 1
PACKED = "oneDNN for 3 of 3 blocks, with packed weights."
SENTENCES = {
    "never": ((NEVER, NEVER, NEVER), "batch 1: PyTorch; after freeze(model) PyTorch, too."),
    "frozen": ((NEVER, ALL, NEVER), f"batch 1: PyTorch; after freeze(model) {PACKED}"),
    "always": ((ALL, ALL, ALL), "batch 1: oneDNN for 3 of 3 blocks, with packed weights after freeze(model)."),
    "inference": (
        (ALL, ALL, NEVER),
        f"batch 1: oneDNN for 3 of 3 blocks in inference, PyTorch in training; after freeze(model) {PACKED}",
    ),
}


def second_line(report):
    """What a report says of the CPU."""
    return str(report).splitlines()[1]


@pytest.mark.parametrize("case", SENTENCES)
def test_the_report_says_what_runs_on_a_cpu(case):
    """Oracle: sentences by hand, for limits that the mean product of each block, counted by hand, just meets or not."""
    limits, sentence = SENTENCES[case]
    model = tiny()
    report = optimize(model)
    with row(*limits):
        assert second_line(report) == f"On this CPU, {sentence}{GPU}"


def test_the_report_follows_the_example_and_the_model():
    """Oracle: by hand: an example of two images; a model that is frozen after it was reported, or does not state its
    size; one in float64; and one of this package."""
    model = tiny()
    report = optimize(model, example=torch.randn(2, 3, 8, 8))
    with row(2 * PRODUCTS, 2 * PRODUCTS, 2 * PRODUCTS):
        assert "On this CPU, batch 2: oneDNN for 3 of 3 blocks, with packed" in second_line(report)
        freeze(model)
        assert second_line(report) == f"On this CPU, frozen, batch 2: oneDNN for 3 of 3 blocks.{GPU}"
        by_call = "On this CPU: oneDNN or PyTorch, by the sizes of each call"
        block = timm.models.vision_transformer.Block(16, 2)
        assert second_line(optimize(block)) == f"{by_call}; optimize(model, example=images) says which.{GPU}"
        double = tiny().double()
        assert second_line(optimize(double)).endswith("because torch.float64 always runs on PyTorch.")
        from fastvit_triton import create_model

        ours = create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, num_heads=2, depth=3)
        assert "; after freeze(model) PyTorch, too." in second_line(optimize(ours))


def test_norms_share_a_line():
    """Oracle: by hand: two norms in each of three blocks and the last one; one of which something is said keeps its
    line."""
    model = tiny()
    model.blocks[0].norm1.register_forward_hook(lambda *_: None)
    report = optimize(model)
    lines, verbose = str(report).splitlines(), report.text(verbose=True).splitlines()
    norms = [line for line in lines if "norm" in line]
    assert norms[-1].startswith("6 norms ") and "1 in a launch of its own · report.text(verbose=True)" in norms[-1]
    assert sum("(LayerNorm)" in line for line in lines) == 1 and sum("(LayerNorm)" in line for line in verbose) == 4
    others = [[line.split() for line in text if "norm" not in line] for text in (lines, verbose)]
    assert others[0] == others[1]


def gain(products, threads=None, **speeds):
    """A measured model; speeds are medians, whose quartiles are 0.1 away."""
    quartiles = {name: [speed, round(speed - 0.1, 2), round(speed + 0.1, 2)] for name, speed in speeds.items()}
    return on_cpu.Gain(f"m{products:g}", 1, threads or torch.get_num_threads(), products, quartiles)


@pytest.fixture
def given_gains(monkeypatch):
    """A function that sets what was measured on this machine, which has the name CPU."""
    found: list[on_cpu.Gain] = []
    monkeypatch.setattr(on_cpu, "gains", lambda: found)
    monkeypatch.setattr(measured, "cpu_name", lambda: "CPU")
    return found.extend


@pytest.mark.fast
def test_evidence_is_of_the_nearest_model(given_gains):
    """Oracle: by hand: the same number of threads first, then the nearest size within a factor of 4; else nothing."""
    threads = torch.get_num_threads()
    given_gains([gain(100.0, bf16=2.0), gain(300.0, bf16=3.0), gain(110.0, threads + 1, bf16=4.0)])
    near = "Measured on this kind of CPU (CPU) at the nearest size, "
    said = "× eager PyTorch in float32"
    assert on_cpu.evidence(120.0, "bf16").startswith(f"{near}m100, batch 1, ")
    assert on_cpu.evidence(120.0, "bf16").endswith(f": 2.00 {said} (1.90 to 2.10).")
    assert on_cpu.evidence(1200.0, "bf16").startswith(f"{near}m300")
    assert on_cpu.evidence(1201.0, "bf16").startswith("No model of this size was measured")
    assert on_cpu.evidence(None, "bf16") == f"Measured on this kind of CPU (CPU): 2.00 to 4.00 {said}, by model."
    assert on_cpu.evidence(120.0, "int8").startswith("Nothing was measured in this precision on this kind of CPU (CPU)")


@pytest.mark.fast
@pytest.mark.parametrize(
    "speeds, said",
    [
        (dict(float32=1.2, bf16=2.0, int8=1.35), "There int8 does not gain over freeze(model): 1.20 × eager PyTorch"),
        (dict(float32=1.2, bf16=2.0, int8=1.5), 'There int8 does not gain over freeze(model, "bf16"): 2.00 × eager'),
        (dict(float32=1.2, bf16=2.0, int8=2.3), None),
        (dict(int8=1.1), None),
    ],
)
def test_int8_that_does_not_gain_is_said(given_gains, speeds, said):
    """Oracle: by hand: quartiles that overlap are no gain."""
    given_gains([gain(100.0, **speeds)])
    text = on_cpu.evidence(100.0, "int8")
    assert said in text if said else "does not gain" not in text


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
def test_freeze_says_what_it_did(given_gains, precision):
    """Oracle: the weights that the engine keeps after a call, without the layout's padding; lines by hand."""
    if precision != "float32" and onednn.why_not(CPU, torch.bfloat16) is not None:
        pytest.skip("this CPU has no bfloat16 products")
    given_gains([gain(PRODUCTS, **{precision: 1.5})])
    optimize(model := tiny())
    with row(NEVER, ALL, NEVER):
        done = freeze(model, precision)
        first, second = str(done).splitlines()
        with torch.no_grad():
            model(torch.randn(1, 3, 8, 8))
    kept = [entry.kept.folded for entry in engine.kept_folds(model.modules())]
    packed = [one for one in kept if isinstance(one, onednn.PackedWeight)]
    tensors = [t for one in packed for t in (one.bias, one.scales) if t is not None]
    sizes = {"float32": 4, "bf16": 2, "int8": 1}
    weights = 3 * 12 * 16 * 16 * sizes[precision]
    assert done.nbytes == weights + sum(t.numel() * t.element_size() for t in tensors)
    assert done.layers == len(packed) == 12 and done.norms == 6 and done.precision == precision
    how = {"float32": "", "bf16": " in bfloat16", "int8": " in int8"}[precision]
    start = f"Frozen: oneDNN{how} for 3 of 3 blocks in inference; 12 linear layers keep packed weights, at most "
    assert first == f"{start}{done.nbytes / 1e6:.1f} MB."
    assert second.startswith("Measured on") and "1.50 × eager PyTorch" in second


def test_freeze_says_where_it_changes_nothing(given_gains):
    """Oracle: by hand: products that are too small, an unknown CPU, a model without linear layers, and one that states
    no size."""
    with row(NEVER, NEVER, NEVER):
        optimize(model := tiny())
        assert str(freeze(model)) == (
            "Frozen, which changes nothing here, as PyTorch's products are faster for batch 1."
        )
        assert str(freeze(nn.Sequential(nn.Linear(2, 2)))).endswith("the model is not converted; call optimize first.")
        optimize(block := timm.models.vision_transformer.Block(16, 2).eval())
        first, second = str(freeze(block)).splitlines()
        assert first.startswith("Frozen: linear layers run by oneDNN where their sizes in a call say so; 4 linear lay")
        assert second.startswith("Nothing was measured")
    with onednn.using_row({}):
        assert "there is no row for this CPU" in str(freeze(model))
    assert str(freeze(nn.Identity())) == "Frozen."


@pytest.mark.fast
def test_the_next_step_on_a_cpu(given_gains, monkeypatch):
    """Oracle: by hand: bfloat16 where the CPU has it, and each measured model gains by it; else a measurement."""
    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: None)
    assert "run `fastvit-triton check`" in step_on_a_cpu()
    given_gains([gain(1.0, bf16=2.0), gain(2.0, bf16=1.5)])
    step = step_on_a_cpu()
    assert step.startswith('optimize(model), then freeze(model, "bf16") if') and "1.50 to 2.00 times as fast" in step
    with using_backend("torch"):
        assert step_on_a_cpu().startswith("unset FASTVIT_TRITON_BACKEND")
    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: "this CPU has no bfloat16 products")
    assert "run `fastvit-triton check`" in step_on_a_cpu()
    monkeypatch.setattr(onednn, "why_not", lambda device, dtype: None)
    given_gains([gain(3.0, bf16=1.05)])
    assert "run `fastvit-triton check`" in step_on_a_cpu()
